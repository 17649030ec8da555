/* Held streams: a thread that posts to one waits until the host functions that hold it have run (layer_host.c). */
#include "layer.h"

_Thread_local bool ww_in_host_function, ww_in_host_thread;

pthread_mutex_t ww_hosts_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t ww_hosts_changed = PTHREAD_COND_INITIALIZER;
struct ww_host *ww_hosts;

static _Atomic bool non_blocking[WW_DEVICES][WW_IDS];

void ww_host_stream(struct ww_device *d, uint32_t stream, bool free_one) {
    atomic_store(&non_blocking[d - layer.devices][stream], free_one);
}

bool ww_host_blocking(const struct ww_device *d, uint32_t stream) {
    return !atomic_load(&non_blocking[d - layer.devices][stream]);
}

/* Return whether a call to the stream must wait for the function. */
static bool holds(const struct ww_host *h, const struct ww_device *d, uint32_t stream) {
    if (h->device != d || h->life != atomic_load(&d->life))
        return false;
    if (h->stream == stream)
        return true;
    return (stream == WW_LEGACY && h->blocking) || (h->stream == WW_LEGACY && ww_host_blocking(d, stream));
}

bool ww_hosts_hold(const struct ww_device *d, uint32_t stream, bool itself) {
    for (const struct ww_host *h = ww_hosts; h; h = h->next)
        if ((!stream && !h->due && h->device == d && h->life == atomic_load(&d->life)) ||
            (stream && holds(h, d, stream) && (itself || h->stream != stream)))
            return true;
    return false;
}

bool ww_host_held(struct ww_device *d, uint32_t stream) {
    WW_LOCK(&ww_hosts_lock);
    return ww_hosts_hold(d, stream, true);
}

bool ww_host_has(struct ww_device *d, uint32_t stream) {
    WW_LOCK(&ww_hosts_lock);
    for (const struct ww_host *h = ww_hosts; h; h = h->next)
        if (h->device == d && h->stream == stream && h->life == atomic_load(&d->life))
            return true;
    return false;
}

/* Wait until no function holds the stream; 0: until all functions of the device without `due` have run. The thread of
 * host functions returns at once, because the functions need that thread to run. */
void ww_host_wait(struct ww_device *d, uint32_t stream) {
    if (ww_in_host_thread)
        return;
    WW_LOCK(&ww_hosts_lock);
    while (ww_hosts_hold(d, stream, true))
        pthread_cond_wait(&ww_hosts_changed, &ww_hosts_lock);
}
