/* Streams that host functions hold: a thread that posts to one waits until the function has run (layer_host.c). */
#include "layer.h"

_Thread_local bool ww_in_host_function, ww_in_host_thread;

pthread_mutex_t ww_hosts_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t ww_hosts_changed = PTHREAD_COND_INITIALIZER;
struct ww_host *ww_hosts;

static _Atomic unsigned char non_blocking[WW_DEVICES][WW_IDS / 8];

void ww_host_stream(struct ww_device *d, uint32_t stream, bool free_one) {
    _Atomic unsigned char *byte = &non_blocking[d - layer.devices][stream / 8];
    unsigned char bit = (unsigned char)(1u << stream % 8);
    if (free_one)
        atomic_fetch_or(byte, bit);
    else
        atomic_fetch_and(byte, (unsigned char)~bit);
}

bool ww_host_blocking(const struct ww_device *d, uint32_t stream) {
    return !(atomic_load(&non_blocking[d - layer.devices][stream / 8]) >> stream % 8 & 1);
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
    pthread_mutex_lock(&ww_hosts_lock);
    bool yes = ww_hosts_hold(d, stream, true);
    pthread_mutex_unlock(&ww_hosts_lock);
    return yes;
}

bool ww_host_has(struct ww_device *d, uint32_t stream) {
    bool yes = false;
    pthread_mutex_lock(&ww_hosts_lock);
    for (const struct ww_host *h = ww_hosts; h && !yes; h = h->next)
        yes = h->device == d && h->stream == stream && h->life == atomic_load(&d->life);
    pthread_mutex_unlock(&ww_hosts_lock);
    return yes;
}

/* Wait until nothing holds the stream; 0: until nothing holds any of the device. The thread of host
 * functions does not wait: others wait for it. */
void ww_host_wait(struct ww_device *d, uint32_t stream) {
    if (ww_in_host_thread)
        return;
    pthread_mutex_lock(&ww_hosts_lock);
    while (ww_hosts_hold(d, stream, true))
        pthread_cond_wait(&ww_hosts_changed, &ww_hosts_lock);
    pthread_mutex_unlock(&ww_hosts_lock);
}
