/* Handles, which are pointers into one table, so that an invalid or stale handle is detected before it is dereferenced;
 * and ids of objects in messages to the worker. */
#include "layer.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct ww_object *_Atomic table; /* of WW_OBJECTS; Linux allocates pages at their first use */
static _Atomic uint32_t used;
static struct ww_object *free_first, *free_last; /* queue of destroyed objects; the oldest is reused first */
static uint64_t last_serial;

static struct ww_object *next_object(void) {
    struct ww_object *all = atomic_load(&table), *o = free_first;
    uint32_t n = atomic_load(&used);
    if (!all) {
        all = mmap(NULL, sizeof *all * WW_OBJECTS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
        if (all == MAP_FAILED)
            return NULL;
        atomic_store(&table, all);
    }
    /* While fewer than 1024 objects were used, one free object is kept: a small program rarely gets a handle again. */
    if (o && (n >= 1024 || o != free_last)) {
        free_first = o->next;
        if (!free_first)
            free_last = NULL;
        return o;
    }
    if (n == WW_OBJECTS)
        return NULL;
    atomic_store(&used, n + 1);
    return all + n;
}

struct ww_object *ww_object_new(uint32_t kind, struct ww_device *d) {
    WW_LOCK(&lock);
    struct ww_object *o = next_object();
    if (!o)
        return NULL;
    memset((char *)o + sizeof o->kind, 0, sizeof *o - sizeof o->kind);
    o->device = d;
    o->life = d ? atomic_load(&d->life) : 0;
    o->serial = ++last_serial;
    atomic_store_explicit(&o->kind, kind, memory_order_release);
    return o;
}

static struct ww_object *at(const void *handle) {
    struct ww_object *all = atomic_load_explicit(&table, memory_order_acquire);
    uintptr_t offset = (uintptr_t)handle - (uintptr_t)all;
    if (!all || (uintptr_t)handle < (uintptr_t)all || offset % sizeof *all ||
        offset / sizeof *all >= atomic_load_explicit(&used, memory_order_relaxed))
        return NULL;
    return all + offset / sizeof *all;
}

struct ww_object *ww_object(const void *handle, uint32_t kind) {
    struct ww_object *o = at(handle);
    if (!o || atomic_load_explicit(&o->kind, memory_order_acquire) != kind)
        return NULL;
    return !o->device || o->life == atomic_load_explicit(&o->device->life, memory_order_relaxed) ? o : NULL;
}

int ww_object_drop(const void *handle, uint32_t kind, struct ww_object *was) {
    struct ww_object *o = at(handle);
    uint32_t expected = kind;
    WW_LOCK(&lock);
    if (!o || !atomic_compare_exchange_strong(&o->kind, &expected, WW_DEAD))
        return CUDA_ERROR_INVALID_HANDLE;
    if (was)
        memcpy(was, o, sizeof *was);
    o->next = NULL;
    if (free_last)
        free_last->next = o;
    else
        free_first = o;
    free_last = o;
    return o->device && o->life != atomic_load(&o->device->life) ? CUDA_ERROR_CONTEXT_IS_DESTROYED : 0;
}

bool ww_grow(void *all, size_t n, size_t each) {
    void *old, *more;
    if (n & (n - 1))
        return true;
    memcpy(&old, all, sizeof old);
    if (!(more = realloc(old, (n ? 2 * n : 1) * each)))
        return false;
    memcpy(all, &more, sizeof more);
    return true;
}

/* -- ids ----------------------------------------------------------------------------------------------------------- */

int ww_id_take(struct ww_ids *ids, uint32_t *id) {
    WW_LOCK(&lock);
    if (ids->next < ids->capacity) {
        *id = ids->next++;
        return 0;
    }
    if (!ids->nfree)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *id = ids->free[ids->at];
    ids->at = (ids->at + 1) % ids->capacity;
    ids->nfree--;
    return 0;
}

void ww_id_give(struct ww_device *d, struct ww_ids *ids, uint64_t life, uint32_t id) {
    WW_LOCK(&lock);
    if (!ids->free)
        ids->free = malloc(ids->capacity * sizeof *ids->free);
    if (ids->free && life == atomic_load(&d->life) && ids->nfree < ids->capacity)
        ids->free[(ids->at + ids->nfree++) % ids->capacity] = id;
}

static void clear(struct ww_ids *ids, uint32_t first, uint32_t capacity) {
    ids->next = first;
    ids->capacity = capacity;
    ids->nfree = ids->at = 0;
}

void ww_ids_clear(struct ww_device *d) {
    WW_LOCK(&lock);
    clear(&d->streams, WW_FIRST_ID, WW_IDS);
    clear(&d->events, 1, WW_IDS);
    clear(&d->modules, 1, WW_MODULES);
    clear(&d->graphs, 1, WW_GRAPHS);
}

void ww_objects_after_fork(void) { pthread_mutex_init(&lock, NULL); }
