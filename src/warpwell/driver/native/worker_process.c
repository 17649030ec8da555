/* The process: its state, its exit, its memory. */
#include "worker.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct ww_worker ww = {.socket = -1};

void ww_end(int status) {
    if (ww.socket >= 0)
        shutdown(ww.socket, SHUT_RDWR); /* the client need not wait until the driver has released the device */
    _exit(status);
}

void ww_die(const char *line) {
    fprintf(stderr, "warpwell: the CUDA worker of device %u ends: %s\n", ww.ordinal, line);
    fflush(NULL);
    if (ww.status)
        atomic_store(&ww.status->sticky, CUDA_ERROR_UNKNOWN);
    ww_end(1);
}

void ww_lost(CUresult code) {
    atomic_store(&ww.status->sticky, (uint32_t)code);
    alarm(2);
    native.cuCtxSynchronize(); /* prints the message of a device assert; does not block, because the context is lost */
    fflush(NULL);
    ww_end(0);
}

CUresult ww_living(CUresult code) {
    if (ww_is_sticky(code))
        ww_lost(code);
    return code;
}

void *ww_memory(size_t n) {
    void *memory = calloc(1, n);
    if (!memory)
        ww_die("out of host memory");
    return memory;
}

void *ww_grown(void *all, size_t n, size_t *room, size_t size) {
    if (n < *room)
        return all;
    *room = *room ? 2 * *room : 64;
    all = realloc(all, *room * size);
    if (!all)
        ww_die("out of host memory");
    return all;
}

struct ww_call *ww_copy_call(const struct ww_call *call) {
    struct ww_call *kept = ww_memory(call->bytes);
    memcpy(kept, call, call->bytes);
    return kept;
}
