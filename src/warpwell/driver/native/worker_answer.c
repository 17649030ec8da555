/* Answers to the client: slots, places, deferred errors. And ww_wake, which wakes the executor. */
#include "worker.h"

#include <stdlib.h>
#include <string.h>

static unsigned char *rest; /* of the last answer that did not fit in its slot: bytes for WW_OP_MORE */
static size_t nrest;
static uint32_t errors;

/* Wake a mirror (relay.c) that sleeps. `changes` is written after the change itself, and before `watched` is read. */
void ww_changed(void) {
    atomic_fetch_add(&ww.status->changes, 1);
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&ww.ring->watched, memory_order_relaxed))
        ww_wake_all(&ww.status->changes);
}

static void fill_slot(uint32_t slot, uint32_t seq, CUresult result, const void *data, size_t n, size_t more) {
    ww_store_answer(ww.status->slots + slot, seq, result, data, (uint32_t)n, (uint32_t)more);
    ww_changed();
}

void ww_answer(uint32_t slot, uint32_t seq, CUresult result, const void *data, size_t n) {
    ww_living(result);
    if (slot == WW_NO_SLOT)
        return;
    size_t now = n < WW_SLOT_DATA ? n : WW_SLOT_DATA;
    if (n > now) {
        free(rest);
        rest = ww_memory(nrest = n - now);
        memcpy(rest, (const unsigned char *)data + now, nrest);
    }
    fill_slot(slot, seq, result, data, now, n - now);
}

CUresult ww_answer_more(const struct ww_call *call, const struct ww_args_more *args) {
    if (call->entry.slot == WW_NO_SLOT || args->offset >= nrest)
        return CUDA_ERROR_INVALID_VALUE;
    size_t left = nrest - args->offset;
    fill_slot(call->entry.slot, call->entry.seq, CUDA_SUCCESS, rest + args->offset,
              left < WW_SLOT_DATA ? left : WW_SLOT_DATA, 0);
    return WW_LATER;
}

void ww_place_done(uint32_t place, uint32_t use, CUresult result) {
    ww_store_place(ww.status->places + place - 1, use, result);
    ww_changed();
}

void ww_result(const struct ww_call *call, CUresult result) {
    ww_living(result);
    if (result && call->entry.place && ww_place_way(call->entry.op) != WW_NO_BYTES)
        ww_place_done(call->entry.place, call->entry.use, result);
    if (call->entry.slot != WW_NO_SLOT)
        ww_answer(call->entry.slot, call->entry.seq, result, NULL, 0);
    else if (result) {
        atomic_store(&ww.status->deferred, (uint64_t)++errors << 32 | (uint32_t)result);
        ww_changed();
    }
}

void ww_wake(void) { ww_wake_ring(ww.ring); }
