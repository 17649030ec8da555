/* Tables of address ranges: device memory, globals of modules, pinned and registered host memory.
 *
 * Each device has a table of its own, because the driver of each worker chooses the addresses of globals, and two
 * devices may have globals at the same address.
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
    ww_insert(t->all, &t->n, sizeof *t->all, i, r);
    return 0;
}

int ww_range_add(struct ww_ranges *t, uint64_t start, uint64_t size, uint32_t type, uint32_t flags, void *owner) {
    struct ww_span r = {start, size, type, flags, atomic_fetch_add(&last_serial, 1) + 1, owner, 0};
    if (!size || start + size < start)
        return CUDA_ERROR_INVALID_VALUE;
    WW_LOCK(&t->lock);
    return insert(t, &r);
}

static bool find(const struct ww_ranges *t, uint64_t at, size_t *i) {
    *i = ww_first_behind(t->all, t->n, sizeof *t->all, at);
    return *i < t->n && t->all[*i].start <= at;
}

bool ww_range_take(struct ww_ranges *t, uint64_t start, uint32_t type, struct ww_span *r) {
    size_t i;
    WW_LOCK(&t->lock);
    if (!find(t, start, &i) || t->all[i].start != start || t->all[i].type != type)
        return false;
    *r = t->all[i];
    ww_remove(t->all, &t->n, sizeof *t->all, i);
    return true;
}

bool ww_range_find(struct ww_ranges *t, uint64_t at, struct ww_span *r) {
    size_t i;
    WW_LOCK(&t->lock);
    if (!find(t, at, &i))
        return false;
    *r = t->all[i];
    return true;
}

bool ww_range_next(struct ww_ranges *t, uint64_t from, struct ww_span *r) {
    WW_LOCK(&t->lock);
    size_t i = ww_first_behind(t->all, t->n, sizeof *t->all, from);
    if (i == t->n)
        return false;
    *r = t->all[i];
    return true;
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
    WW_LOCK(&t->lock);
    for (size_t i = 0; i < t->n; i++)
        nbytes += t->all[i].type == WW_PINNED_MEMORY ? t->all[i].size : 0;
    return nbytes;
}

bool ww_range_share(struct ww_ranges *t, const struct ww_span *r, uint64_t user) {
    size_t i;
    WW_LOCK(&t->lock);
    if (!find(t, r->start, &i) || t->all[i].serial != r->serial)
        return false;
    t->all[i].users |= user;
    return true;
}

void ww_ranges_unshare(struct ww_ranges *t, uint64_t user) {
    WW_LOCK(&t->lock);
    for (size_t i = 0; i < t->n; i++)
        t->all[i].users &= ~user;
}

static void clear_registered(uint32_t device) {
    struct ww_ranges *t = &layer.registered;
    WW_LOCK(&t->lock);
    size_t kept = 0;
    for (size_t i = 0; i < t->n; i++)
        if (t->all[i].flags != device)
            t->all[kept++] = t->all[i];
    t->n = kept;
}

void ww_ranges_clear(struct ww_device *d, void (*give)(struct ww_pool *, size_t)) {
    struct ww_ranges *t = &d->ranges;
    clear_registered((uint32_t)(d - layer.devices));
    WW_LOCK(&t->lock);
    for (size_t i = 0; i < t->n; i++) {
        if (t->all[i].type == WW_PINNED_MEMORY)
            munmap((void *)(uintptr_t)t->all[i].start, t->all[i].size);
        if (t->all[i].owner && !(t->all[i].flags & WW_OF_GRAPH))
            give(t->all[i].owner, t->all[i].size);
    }
    t->n = 0;
}
