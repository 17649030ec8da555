/* Which addresses belong to whom: memory on devices, globals of modules, pinned and registered host memory.
 *
 * A table for each device: globals of modules lie where each driver put them, and may collide between devices.
 */
#include "layer.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static _Atomic uint64_t last_serial;

/* Index of the first range that starts behind `at`. */
static size_t behind(const struct ww_ranges *t, uint64_t at) {
    size_t low = 0, high = t->n;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (t->all[middle].start <= at)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static int insert(struct ww_ranges *t, const struct ww_span *r) {
    size_t i = behind(t, r->start);
    if (i && t->all[i - 1].start + t->all[i - 1].size > r->start)
        return CUDA_ERROR_ALREADY_MAPPED;
    if (i < t->n && r->start + r->size > t->all[i].start)
        return CUDA_ERROR_ALREADY_MAPPED;
    if (t->n == t->room) {
        size_t room = t->room ? 2 * t->room : 64;
        struct ww_span *all = realloc(t->all, room * sizeof *all);
        if (!all)
            return CUDA_ERROR_OUT_OF_MEMORY;
        t->all = all;
        t->room = room;
    }
    memmove(t->all + i + 1, t->all + i, (t->n - i) * sizeof *t->all);
    t->all[i] = *r;
    t->n++;
    return 0;
}

int ww_range_add(struct ww_ranges *t, uint64_t start, uint64_t size, uint32_t what, uint32_t flags) {
    return ww_range_add_of(t, start, size, what, flags, NULL);
}

int ww_range_add_of(struct ww_ranges *t, uint64_t start, uint64_t size, uint32_t what, uint32_t flags, void *owner) {
    struct ww_span r = {start, size, what, flags, atomic_fetch_add(&last_serial, 1) + 1, owner};
    if (!size || start + size < start)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&t->lock);
    int error = insert(t, &r);
    pthread_mutex_unlock(&t->lock);
    return error;
}

static bool find(const struct ww_ranges *t, uint64_t at, size_t *i) {
    *i = behind(t, at);
    return (*i)-- && at - t->all[*i].start < t->all[*i].size;
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
        if (t->all[i].flags != (uint32_t)d->ordinal)
            t->all[kept++] = t->all[i];
    t->n = kept;
    pthread_mutex_unlock(&t->lock);
}
