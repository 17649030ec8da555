/* Which addresses belong to whom: memory on devices, globals of modules, pinned and registered host memory.
 *
 * A table for each device: globals of modules lie where each driver put them, and may collide between devices.
 */
#include "layer.h"
#include "system.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static _Atomic uint64_t last_serial;

static int insert(struct ww_ranges *t, const struct ww_span *r) {
    size_t i = ww_first_behind(t->all, t->n, sizeof *t->all, r->start);
    if (i < t->n && r->start + r->size > t->all[i].start)
        return CUDA_ERROR_ALREADY_MAPPED;
    if (!ww_grow(&t->all, t->n, sizeof *t->all))
        return CUDA_ERROR_OUT_OF_MEMORY;
    memmove(t->all + i + 1, t->all + i, (t->n - i) * sizeof *t->all);
    t->all[i] = *r;
    t->n++;
    return 0;
}

int ww_range_add(struct ww_ranges *t, uint64_t start, uint64_t size, uint32_t what, uint32_t flags, void *owner) {
    struct ww_span r = {start, size, what, flags, atomic_fetch_add(&last_serial, 1) + 1, owner, 0};
    if (!size || start + size < start)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&t->lock);
    int error = insert(t, &r);
    pthread_mutex_unlock(&t->lock);
    return error;
}

static bool find(const struct ww_ranges *t, uint64_t at, size_t *i) {
    *i = ww_first_behind(t->all, t->n, sizeof *t->all, at);
    return *i < t->n && t->all[*i].start <= at;
}

bool ww_range_take(struct ww_ranges *t, uint64_t start, uint32_t what, struct ww_span *r) {
    size_t i;
    pthread_mutex_lock(&t->lock);
    bool found = find(t, start, &i) && t->all[i].start == start && t->all[i].what == what;
    if (found) {
        *r = t->all[i];
        t->n--;
        memmove(t->all + i, t->all + i + 1, (t->n - i) * sizeof *t->all);
    }
    pthread_mutex_unlock(&t->lock);
    return found;
}

bool ww_range_find(struct ww_ranges *t, uint64_t at, struct ww_span *r) {
    size_t i;
    pthread_mutex_lock(&t->lock);
    bool found = find(t, at, &i);
    if (found)
        *r = t->all[i];
    pthread_mutex_unlock(&t->lock);
    return found;
}

bool ww_range_next(struct ww_ranges *t, uint64_t from, struct ww_span *r) {
    pthread_mutex_lock(&t->lock);
    size_t i = ww_first_behind(t->all, t->n, sizeof *t->all, from);
    bool found = i < t->n;
    if (found)
        *r = t->all[i];
    pthread_mutex_unlock(&t->lock);
    return found;
}

struct ww_device *ww_range_owner(uint64_t at, struct ww_span *r) {
    struct ww_device *first = ww_current();
    if (first && ww_range_find(&first->ranges, at, r))
        return first;
    for (int i = 0; i < layer.ndevices; i++)
        if (&layer.devices[i] != first && ww_range_find(&layer.devices[i].ranges, at, r))
            return &layer.devices[i];
    return NULL;
}

bool ww_range_holds(const struct ww_span *r, uint64_t at, uint64_t nbytes) {
    return at >= r->start && nbytes <= r->size && at - r->start <= r->size - nbytes;
}

uint64_t ww_ranges_pinned(struct ww_ranges *t) {
    uint64_t nbytes = 0;
    pthread_mutex_lock(&t->lock);
    for (size_t i = 0; i < t->n; i++)
        nbytes += t->all[i].what == WW_PINNED_MEMORY ? t->all[i].size : 0;
    pthread_mutex_unlock(&t->lock);
    return nbytes;
}

bool ww_range_share(struct ww_ranges *t, const struct ww_span *r, uint64_t user) {
    size_t i;
    pthread_mutex_lock(&t->lock);
    bool found = find(t, r->start, &i) && t->all[i].serial == r->serial;
    if (found)
        t->all[i].users |= user;
    pthread_mutex_unlock(&t->lock);
    return found;
}

void ww_ranges_unshare(struct ww_ranges *t, uint64_t user) {
    pthread_mutex_lock(&t->lock);
    for (size_t i = 0; i < t->n; i++)
        t->all[i].users &= ~user;
    pthread_mutex_unlock(&t->lock);
}

void ww_ranges_clear(struct ww_device *d, void (*give)(struct ww_pool *, size_t)) {
    struct ww_ranges *t = &d->ranges;
    pthread_mutex_lock(&t->lock);
    for (size_t i = 0; i < t->n; i++) {
        if (t->all[i].what == WW_PINNED_MEMORY)
            munmap((void *)(uintptr_t)t->all[i].start, t->all[i].size);
        if (t->all[i].owner && !(t->all[i].flags & WW_OF_GRAPH))
            give(t->all[i].owner, t->all[i].size);
    }
    t->n = 0;
    pthread_mutex_unlock(&t->lock);
    t = &layer.registered;
    pthread_mutex_lock(&t->lock);
    size_t kept = 0;
    for (size_t i = 0; i < t->n; i++)
        if (t->all[i].flags != (uint32_t)(d - layer.devices))
            t->all[kept++] = t->all[i];
    t->n = kept;
    pthread_mutex_unlock(&t->lock);
}
