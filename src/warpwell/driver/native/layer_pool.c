/* Memory pools: accounts over device memory and pinned memory.
 *
 * A worker has one arena for all allocations of its client, so a pool has no memory of its own: it counts the bytes
 * that are allocated from it, and refuses allocations beyond its maximum. The reserved bytes that it reports are the
 * used bytes in units of PIECE, and freed bytes up to the threshold; the worker keeps freed memory mapped in any case.
 * Used bytes decrease with the call that frees, not when its stream reaches that call. The current device's worker pins
 * the memory of host pools and managed memory.
 */
#include "layer.h"
#include <stdlib.h>
#include <string.h>

#define PIECE (2ull << 20)
#define HOST_FLAGS (CU_MEMHOST_PORTABLE | CU_MEMHOST_DEVICEMAP)

struct ww_pool {
    struct ww_object *object;
    struct ww_device *device; /* NULL: a pool of host memory or managed memory */
    struct cu_pool_props props;
    int32_t reuse[3];
    uint64_t threshold;
    size_t used, used_high, reserved, reserved_high, blocks;
    _Atomic uint64_t users; /* bits of other devices that may access the pool's memory */
    bool is_default, gone;  /* gone: the handle was destroyed; the pool is freed with its last block */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct ww_pool *defaults[WW_DEVICES + 2]; /* by device; then of host memory, managed memory */
static struct ww_pool *chosen[2]; /* by cuMemSetMemPool for host memory, managed memory; NULL: the default */

/* -- pools --------------------------------------------------------------------------------------------------------- */

static struct ww_pool *make(struct ww_device *d, const struct cu_pool_props *props) {
    struct ww_pool *p = calloc(1, sizeof *p);
    if (!p || !(p->object = ww_object_new(WW_POOL, NULL))) {
        free(p);
        return NULL;
    }
    p->device = d;
    p->props = *props;
    p->reuse[0] = p->reuse[1] = p->reuse[2] = 1;
    p->object->more = p;
    return p;
}

/* Return the default pool of a device; for NULL, of host memory or managed memory. It is created at the first call. */
struct ww_pool *ww_default_pool(struct ww_device *d, bool managed) {
    struct cu_pool_props props = {.type = managed ? CU_MEM_MANAGED : CU_MEM_PINNED, .location = {CU_LOCATION_HOST, 0}};
    struct ww_pool **at = &defaults[d ? d - layer.devices : WW_DEVICES + managed];
    if (managed)
        props.location.kind = CU_LOCATION_NONE;
    if (d)
        props.location = (struct cu_mem_location){CU_LOCATION_DEVICE, (int)(d - layer.devices)};
    WW_LOCK(&lock);
    if (!*at && (*at = make(d, &props)))
        (*at)->is_default = true;
    return *at;
}

struct ww_pool *ww_pool_of(struct ww_device *d) {
    struct ww_pool *p = atomic_load(&d->pool);
    return p ? p : ww_default_pool(d, false);
}

void *ww_pool_handle(struct ww_pool *p) { return p->object; }

static bool is_place(const struct cu_mem_location *at) {
    return at->kind != CU_LOCATION_DEVICE || (at->id >= 0 && at->id < layer.ndevices);
}

static size_t pieces(size_t nbytes) { return (nbytes + PIECE - 1) / PIECE * PIECE; }

/* Count an allocation. Return false if the pool would be too large. */
static bool take(struct ww_pool *p, size_t nbytes) {
    WW_LOCK(&lock);
    if (nbytes >= SIZE_MAX / 2 - p->used || (p->props.most && p->used + nbytes > pieces(p->props.most)))
        return false;
    p->used += nbytes;
    p->blocks++;
    if (p->used > p->used_high)
        p->used_high = p->used;
    if (pieces(p->used) > p->reserved)
        p->reserved = pieces(p->used);
    if (p->reserved > p->reserved_high)
        p->reserved_high = p->reserved;
    return true;
}

/* Reduce the reserved bytes to `keep` bytes, but not below the used bytes. */
static void shrink(struct ww_pool *p, uint64_t keep) {
    size_t least = pieces(p->used);
    if (p->reserved > keep)
        p->reserved = least > keep ? least : pieces(keep);
    if (p->reserved < least)
        p->reserved = least;
}

static void free_last(struct ww_pool *p) {
    if (p->gone && !p->blocks)
        free(p);
}

void ww_pool_give(struct ww_pool *p, size_t nbytes) {
    WW_LOCK(&lock);
    p->used -= nbytes;
    p->blocks--;
    shrink(p, p->threshold);
    free_last(p);
}

int ww_pool_at(void *h, struct ww_pool **p) {
    int error = ww_ready();
    *p = error ? NULL : ww_object_more(h, WW_POOL);
    return error ? error : *p ? 0 : CUDA_ERROR_INVALID_VALUE;
}

int ww_props_check(const struct cu_pool_props *props, struct ww_device **d) {
    const struct cu_mem_location *at = &props->location;
    bool managed = props->type == CU_MEM_MANAGED;
    int error = managed ? ww_managed_check(&layer.devices[0]) : 0;
    if (error || (!managed && props->type != CU_MEM_PINNED))
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    if (props->handle_types)
        return ww_refused("memory pools and allocations of graphs for other processes");
    bool is_on_device = at->kind == CU_LOCATION_DEVICE;
    if (!is_place(at) || !(managed || is_on_device || at->kind == CU_LOCATION_HOST || at->kind == CU_LOCATION_NUMA))
        return CUDA_ERROR_INVALID_VALUE;
    *d = is_on_device ? &layer.devices[at->id] : NULL;
    return 0;
}

int ww_body_cuMemPoolCreate(void **pool, void *wanted) {
    const struct cu_pool_props *props = wanted;
    struct ww_device *d;
    int error = ww_props_check(props, &d);
    if (error)
        return error;
    struct ww_pool *p = make(props->type == CU_MEM_MANAGED ? NULL : d, props);
    if (!p)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *pool = p->object;
    return 0;
}

int ww_body_cuMemPoolDestroy(struct ww_pool *p, void *h) {
    int error = p->is_default ? CUDA_ERROR_INVALID_VALUE : ww_object_drop(h, WW_POOL, NULL);
    if (error)
        return error;
    for (int i = 0; i < layer.ndevices; i++) {
        struct ww_pool *seen = p;
        atomic_compare_exchange_strong(&layer.devices[i].pool, &seen, NULL);
    }
    WW_LOCK(&lock);
    for (int i = 0; i < 2; i++)
        if (chosen[i] == p)
            chosen[i] = NULL;
    p->gone = true;
    free_last(p);
    return 0;
}

int ww_body_cuMemPoolTrimTo(struct ww_pool *p, size_t keep) {
    pthread_mutex_lock(&lock);
    shrink(p, keep);
    pthread_mutex_unlock(&lock);
    if (!p->device)
        ww_unkeep(NULL);
    return 0;
}

enum setting { FIXED, SWITCH, VALUE, MARK };

static const struct field {
    int attribute;
    enum setting setting; /* MARK: high-water mark of the field in front; to set it to 0 resets it to that field */
    size_t at, nbytes;
} fields[] = {
    {CU_POOL_FOLLOW_EVENTS, SWITCH, offsetof(struct ww_pool, reuse[0]), 4},
    {CU_POOL_OPPORTUNISTIC, SWITCH, offsetof(struct ww_pool, reuse[1]), 4},
    {CU_POOL_INTERNAL, SWITCH, offsetof(struct ww_pool, reuse[2]), 4},
    {CU_POOL_THRESHOLD, VALUE, offsetof(struct ww_pool, threshold), 8},
    {CU_POOL_RESERVED, FIXED, offsetof(struct ww_pool, reserved), 8},
    {CU_POOL_RESERVED_HIGH, MARK, offsetof(struct ww_pool, reserved_high), 8},
    {CU_POOL_USED, FIXED, offsetof(struct ww_pool, used), 8},
    {CU_POOL_USED_HIGH, MARK, offsetof(struct ww_pool, used_high), 8},
    {CU_POOL_TYPE, FIXED, offsetof(struct ww_pool, props.type), 4},
    {CU_POOL_HANDLE_TYPES, FIXED, offsetof(struct ww_pool, props.handle_types), 4},
    {CU_POOL_LOCATION_ID, FIXED, offsetof(struct ww_pool, props.location.id), 4},
    {CU_POOL_LOCATION, FIXED, offsetof(struct ww_pool, props.location.kind), 4},
    {CU_POOL_MOST, FIXED, offsetof(struct ww_pool, props.most), 8},
};

static const struct field *field_of(int attribute) {
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (fields[i].attribute == attribute)
            return fields + i;
    return NULL;
}

int ww_body_cuMemPoolGetAttribute(struct ww_pool *p, int attribute, void *to) {
    const struct field *f = field_of(attribute);
    if (!f)
        return CUDA_ERROR_INVALID_VALUE;
    WW_LOCK(&lock);
    memcpy(to, (const char *)p + f->at, f->nbytes);
    return 0;
}

int ww_body_cuMemPoolSetAttribute(struct ww_pool *p, int attribute, void *from) {
    const struct field *f = field_of(attribute);
    char *at = (char *)p + (f ? f->at : 0);
    if (!f || f->setting == FIXED || (f->setting == MARK && *(uint64_t *)from))
        return CUDA_ERROR_INVALID_VALUE;
    WW_LOCK(&lock);
    if (f->setting == SWITCH)
        *(int32_t *)(void *)at = !!*(int32_t *)from;
    else
        memcpy(at, f->setting == MARK ? at - sizeof(size_t) : from, f->nbytes);
    return 0;
}

/* -- access to a pool ---------------------------------------------------------------------------------------------- */

static bool reaches(const struct ww_pool *p, const struct cu_mem_location *at) {
    if (at->kind != CU_LOCATION_DEVICE)
        return !p->device;
    return !p->device || p->device == &layer.devices[at->id];
}

/* Return true if a device was given access to a pool of another device, and neither was reset since. */
static bool is_user(const struct ww_pool *p, const struct cu_mem_location *at) {
    return p->device && at->kind == CU_LOCATION_DEVICE && atomic_load(&p->users) >> at->id & 1 &&
           atomic_load(&layer.devices[at->id].granted) >> (p->device - layer.devices) & 1;
}

int ww_body_cuMemPoolGetAccess(struct ww_pool *p, int *flags, void *where) {
    const struct cu_mem_location *at = where;
    if (!is_place(at))
        return CUDA_ERROR_INVALID_VALUE;
    *flags = reaches(p, at) || is_user(p, at) ? CU_MEM_READ_WRITE : 0;
    return 0;
}

/* Give another device access to a pool, or revoke it. A device with access to one pool of a device can in fact access
 * all memory of that device. */
static int set_user(struct ww_pool *p, const struct cu_mem_access *a) {
    uint64_t bit = 1ull << a->location.id;
    if (!a->access) {
        atomic_fetch_and(&p->users, ~bit);
        return 0;
    }
    if (a->access != CU_MEM_READ_WRITE)
        return CUDA_ERROR_INVALID_VALUE;
    if (!ww_grant(&layer.devices[a->location.id], p->device))
        return ww_refused("cuMemPoolSetAccess for a device that cannot access the pool's");
    atomic_fetch_or(&p->users, bit);
    return 0;
}

int ww_pool_set_access(struct ww_pool *p, const struct cu_mem_access *all, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (!is_place(&all[i].location))
            return CUDA_ERROR_INVALID_VALUE;
        if (!reaches(p, &all[i].location) && p->device && all[i].location.kind == CU_LOCATION_DEVICE) {
            int error = set_user(p, &all[i]);
            if (error)
                return error;
            continue;
        }
        if (!reaches(p, &all[i].location) && all[i].access)
            return ww_refused("cuMemPoolSetAccess for the host");
        if (p->device && reaches(p, &all[i].location) && all[i].access != CU_MEM_READ_WRITE)
            return CUDA_ERROR_INVALID_VALUE;
    }
    return 0;
}

/* -- pools of devices, and of the host ----------------------------------------------------------------------------- */

int ww_give_pool(void **pool, struct ww_pool *p) {
    *pool = p ? ww_pool_handle(p) : NULL;
    return p ? 0 : CUDA_ERROR_OUT_OF_MEMORY;
}

int ww_body_cuDeviceSetMemPool(struct ww_device *d, struct ww_pool *p) {
    if (p->device != d)
        return CUDA_ERROR_INVALID_VALUE;
    atomic_store(&d->pool, p);
    return 0;
}

/* Store the device of a location in `d`; NULL if the location is on the host, or if the memory is managed. */
int ww_pool_place(const struct cu_mem_location *at, int type, const void *out, struct ww_device **d) {
    int error = ww_ready();
    *d = NULL;
    if (error || !at || !out || !is_place(at))
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    if (type == CU_MEM_MANAGED)
        return ww_managed_check(&layer.devices[0]);
    if (type != CU_MEM_PINNED || at->kind < CU_LOCATION_DEVICE || at->kind > CU_LOCATION_NUMA_CURRENT)
        return CUDA_ERROR_INVALID_VALUE;
    if (at->kind == CU_LOCATION_DEVICE)
        *d = &layer.devices[at->id];
    return 0;
}

int ww_body_cuMemGetMemPool(struct ww_device *d, void **pool, int type) {
    bool managed = type == CU_MEM_MANAGED;
    return ww_give_pool(pool, d ? ww_pool_of(d) : chosen[managed] ? chosen[managed] : ww_default_pool(NULL, managed));
}

int ww_body_cuMemSetMemPool(struct ww_device *d, struct ww_pool *p, int type) {
    if (p->device != d || p->props.type != type)
        return CUDA_ERROR_INVALID_VALUE;
    if (d)
        atomic_store(&d->pool, p);
    else
        chosen[type == CU_MEM_MANAGED] = p;
    return 0;
}

/* -- allocations --------------------------------------------------------------------------------------------------- */

int ww_pool_allocate(struct ww_pool *p, struct ww_device *d, uint32_t stream, size_t nbytes, CUdeviceptr *address) {
    void *at = NULL;
    size_t taken = p->device ? nbytes : (nbytes + 4095) & ~(size_t)4095; /* as ww_pin rounds the size */
    if (!take(p, taken))
        return CUDA_ERROR_OUT_OF_MEMORY;
    int error = p->device ? ww_allocate(p->device, p->device == d ? WW_OP_ALLOC_ASYNC : WW_OP_ALLOC,
                                        p->device == d ? stream : 0, nbytes, 0, p, address)
                          : ww_pin(d, &at, nbytes, p->props.type == CU_MEM_MANAGED ? WW_MANAGED : HOST_FLAGS, p);
    if (error)
        ww_pool_give(p, taken);
    else if (!p->device)
        *address = (uintptr_t)at;
    return error;
}
