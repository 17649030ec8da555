/* cuInit, devices, their contexts and reset. */
#include "layer.h"
#include <stdio.h>
#include <string.h>
#include <strings.h>

static const unsigned char absent[] = {WW_ABSENT}; /* attributes of features that programs cannot use here */

CUresult cuInit(unsigned flags) {
    if (layer.forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    int error = ww_facts_once(), known = 1;
    if (!error)
        atomic_compare_exchange_strong(&layer.state, &known, 2);
    return error;
}

/* -- devices ------------------------------------------------------------------------------------------------------- */

int ww_text_out(char *to, int room, const char *text) {
    if (!to || room <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(to, (size_t)room, "%s", text);
    return 0;
}

int ww_body_cuDeviceGetByPCIBusId(CUdevice *device, const char *name) {
    for (int i = 0; i < layer.ndevices; i++) {
        const char *full = layer.devices[i].facts.pci, *brief = strchr(full, ':');
        if (!strcasecmp(name, full) || (brief && !strcasecmp(name, brief + 1))) {
            *device = i;
            return 0;
        }
    }
    return CUDA_ERROR_INVALID_DEVICE;
}

int ww_body_cuDeviceGetAttribute(struct ww_device *d, int *value, int attribute) {
    if (attribute == CU_DEVICE_MANAGED_MEMORY || attribute == CU_DEVICE_CONCURRENT_MANAGED)
        *value = ww_manages(d);
    else
        *value = memchr(absent, attribute, sizeof absent) ? 0 : d->facts.attributes[attribute];
    return 0;
}

/* -- contexts ------------------------------------------------------------------------------------------------------ */

/* Separate the device from its worker, and begin a new life of the device. */
static struct ww_channel *close_channel(struct ww_device *d) {
    int alive = 0;
    WW_LOCK(&d->post);
    struct ww_channel *c = atomic_exchange(&d->channel, NULL);
    if (!c)
        return NULL;
    atomic_compare_exchange_strong(&c->lost, &alive, CUDA_ERROR_CONTEXT_IS_DESTROYED);
    atomic_fetch_add(&d->life, 1);
    ww_ids_clear(d);
    ww_peers_clear(d);
    return c;
}

/* Reset the device; the caller has locked `opening`. */
static void reset(struct ww_device *d) {
    struct ww_channel *c = close_channel(d);
    if (!c)
        return;
    ww_await_end(c);
    ww_unkeep(d);
    ww_unshare_all(d);
    ww_ranges_clear(d, ww_pool_give);
    ww_release(c);
}

void ww_reset(struct ww_device *d) {
    WW_LOCK(&d->opening);
    reset(d);
}

/* Give up one of `count` uses of the device's context; the last use of any kind ends its worker. */
static int give_up(struct ww_device *d, int *count) {
    WW_LOCK(&d->opening); /* also during the reset: a thread that uses the context from now on finds the next one */
    if (!*count)
        return CUDA_ERROR_INVALID_CONTEXT;
    --*count;
    if (!d->retained && !d->created)
        reset(d);
    return 0;
}

int ww_body_cuDevicePrimaryCtxRelease_v2(struct ww_device *d) { return give_up(d, &d->retained); }

int ww_body_cuDevicePrimaryCtxRetain(struct ww_device *d, CUcontext *context) {
    WW_LOCK(&d->opening);
    if (!d->retained && !d->created)
        d->context_flags = d->primary_flags;
    d->retained++;
    *context = ww_context_handle(d);
    return 0;
}

/* A device has one context. Each context that the program creates there is another use of it. */
int ww_body_cuCtxCreate_v2(struct ww_device *d, CUcontext *context, uint32_t flags) {
    int error = ww_context_push(d, true);
    if (error)
        return error;
    pthread_mutex_lock(&d->opening);
    if (!d->retained && !d->created)
        d->context_flags = flags;
    d->created++;
    pthread_mutex_unlock(&d->opening);
    *context = ww_context_handle(d);
    return 0;
}

int ww_body_cuCtxCreate_v4(CUcontext *context, void *options, uint32_t flags, CUdevice device) {
    const struct cu_context_options *o = options;
    if (o && (o->naffinities || o->graphics))
        return ww_refused("contexts with a part of the processors, or for graphics");
    return cuCtxCreate_v2(context, flags, device);
}

int ww_body_cuCtxDestroy_v2(CUcontext context) {
    struct ww_device *d = ww_context(context);
    bool is_current = ww_current() == d && (ww_current_is_created() || !d->retained);
    int error = give_up(d, &d->created);
    if (!error && is_current)
        ww_body_cuCtxPopCurrent_v2(NULL);
    return error;
}

int ww_synchronize(struct ww_device *d) {
    int error = ww_no_synchronize(d, 0);
    if (error)
        return error;
    if (atomic_load(&d->holds))
        ww_host_wait(d, 0);
    error = ww_call(d, WW_OP_CTX_SYNC, 0, NULL, 0, NULL, 0);
    return error ? error : ww_earlier(d);
}
