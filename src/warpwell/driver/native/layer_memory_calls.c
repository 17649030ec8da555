/* The driver's calls on memory of devices and of the host, pinned or registered, and on attributes of pointers. */
#include "layer.h"
#include <string.h>

#define PITCH 512
#define REGISTER_DEVICEMAP 2u
#define REGISTER_IOMEMORY 4u

/* Allocate rows, each at a multiple of the pitch. */
CUresult cuMemAllocPitch_v2(CUdeviceptr *address, size_t *pitch, size_t width, size_t height, unsigned element) {
    size_t row = (width + PITCH - 1) / PITCH * PITCH;
    if (!pitch || !width || !height || (element != 4 && element != 8 && element != 16) || row < width ||
        row > SIZE_MAX / height)
        return ww_ready() ? CUDA_ERROR_NOT_INITIALIZED : CUDA_ERROR_INVALID_VALUE;
    int error = cuMemAlloc_v2(address, row * height);
    if (!error)
        *pitch = row;
    return error;
}

/* Remove the span of a block before the worker can reuse its address for another thread. The span of memory that a
 * graph's node allocates stays, because it belongs to the graph. The rest of a graph that is still to be posted behind
 * a host function may use the block. So first wait for host functions: those that hold the freeing stream if the
 * block's device is `on`, the device of that stream, else all functions of the block's device. */
static struct ww_device *take_block(CUdeviceptr address, const struct ww_device *on, uint32_t stream,
                                    struct ww_span *r) {
    struct ww_device *d = ww_range_owner(address, r);
    if (!d || address != r->start)
        return NULL;
    if (r->flags & WW_OF_GRAPH)
        return d;
    if (atomic_load(&d->holds))
        ww_host_wait(d, d == on ? stream : 0);
    bool ours = r->type == WW_ON_DEVICE || (r->type == WW_PINNED_MEMORY && (r->owner || r->flags & WW_MANAGED));
    if (!ours || !ww_range_take(&d->ranges, address, r->type, r))
        return NULL;
    if (r->owner)
        ww_pool_give(r->owner, r->size);
    return d;
}

/* Free a block. d: the device of the stream in which it is freed; NULL: without a stream. */
static int free_block(struct ww_device *d, uint32_t stream, CUdeviceptr address) {
    struct ww_span r;
    struct ww_device *owner = take_block(address, d, stream, &r);
    if (!owner)
        return CUDA_ERROR_INVALID_VALUE;
    if (r.flags & WW_OF_GRAPH)
        return ww_graph_memory_freed(r.owner) ? 0 : CUDA_ERROR_INVALID_VALUE;
    if (r.type == WW_PINNED_MEMORY)
        return d ? ww_unpin_in_stream(d, stream, owner, &r) : ww_unpin_taken(owner, &r);
    if (owner == d)
        return ww_send_free(d, WW_OP_FREE_ASYNC, stream, address);
    ww_peers_done(owner); /* also for a stream of another device: no stream orders the work of all devices */
    return ww_send_free(owner, WW_OP_FREE, 0, address);
}

/* NVIDIA's driver frees a block also if no context is current: numba.cuda.close() does so (H200). */
CUresult cuMemFree_v2(CUdeviceptr address) {
    struct ww_device *d;
    struct ww_span r;
    int error = ww_need(&d);
    if (error == CUDA_ERROR_INVALID_CONTEXT && (d = ww_range_owner(address, &r)))
        error = ww_context_code(d);
    return error || !address || (error = ww_unsafe()) ? error : free_block(NULL, 0, address);
}

/* Add a FREE node to the capture of a stream, for memory that a graph allocates. */
static int free_in_graph(struct ww_device *d, uint32_t stream, CUdeviceptr address) {
    struct ww_span r;
    if (!ww_range_owner(address, &r) || !(r.flags & WW_OF_GRAPH) || r.start != address)
        return CUDA_ERROR_INVALID_VALUE;
    struct ww_work work = {.kind = CU_NODE_FREE, .device = d, .of.memory = r.owner};
    atomic_fetch_add(&work.of.memory->refs, 1);
    return ww_capture_add(d, stream, &work);
}

int ww_body_cuMemFreeAsync(struct ww_device *d, uint32_t stream, CUdeviceptr address) {
    bool captured;
    int error = address ? ww_captured(d, stream, &captured) : 0;
    if (error || !address)
        return error;
    return captured ? free_in_graph(d, stream, address) : free_block(d, stream, address);
}

int ww_allocate_in_stream(struct ww_device *d, uint32_t stream, bool captured, CUdeviceptr *address, size_t nbytes,
                          struct ww_pool *p) {
    if (captured)
        return ww_capture_alloc(d, stream, nbytes ? nbytes : 1, address); /* a node also for 0 bytes */
    if (!nbytes) { /* no memory and no error, as with the driver */
        *address = 0;
        return 0;
    }
    if (!p && !(p = ww_pool_of(d)))
        return CUDA_ERROR_OUT_OF_MEMORY;
    return ww_pool_allocate(p, d, stream, nbytes, address);
}

int ww_body_cuMemFreeHost(void *address) {
    struct ww_span r;
    struct ww_device *d = ww_range_owner((uintptr_t)address, &r);
    int error = address ? ww_unsafe() : 0;
    if (error || !address)
        return error;
    if (d && atomic_load(&d->holds))
        ww_host_wait(d, 0); /* as in take_block */
    if (!d || r.owner || r.flags & WW_MANAGED || !ww_range_take(&d->ranges, (uintptr_t)address, WW_PINNED_MEMORY, &r))
        return CUDA_ERROR_INVALID_VALUE;
    return ww_unpin_taken(d, &r);
}

int ww_body_cuMemHostGetDevicePointer_v2(struct ww_device *d, CUdeviceptr *device, void *address) {
    struct ww_span r;
    uint64_t at = (uintptr_t)address;
    if (ww_range_find(&layer.registered, at, &r)) {
        if (!r.owner)
            return ww_refused("cuMemHostGetDevicePointer of memory that was registered without a mapping");
        at = (uintptr_t)r.owner + (at - r.start);
    }
    ww_use_pinned(d);
    struct ww_device *owner = ww_range_owner(at, &r);
    if (!owner || r.type != WW_PINNED_MEMORY)
        return CUDA_ERROR_INVALID_VALUE;
    if (!ww_maps_pinned(d, owner, &r))
        return ww_refused("cuMemHostGetDevicePointer for a device of another host than the memory's");
    *device = at;
    return 0;
}

/* Registered memory stays pageable, because the worker is another process: copies use staging, and kernels cannot
 * access it. With REGISTER_DEVICEMAP, its pages are replaced by memory that the worker maps and pins. */
int ww_body_cuMemHostRegister_v2(struct ww_device *d, void *address, size_t nbytes, unsigned flags) {
    struct ww_span r;
    void *alias = NULL;
    int error;
    if (flags & REGISTER_IOMEMORY)
        return ww_refused("cuMemHostRegister of memory of another device");
    if (ww_range_owner((uintptr_t)address, &r) || ww_range_find(&layer.registered, (uintptr_t)address, &r))
        return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    if (flags & REGISTER_DEVICEMAP && (error = ww_pin_pages(d, address, nbytes, &alias)))
        return error;
    error = ww_range_add(&layer.registered, (uintptr_t)address, nbytes, WW_REGISTERED, (uint32_t)ww_device_number(d),
                         alias);
    if (error && alias && ww_range_take(&d->ranges, (uintptr_t)alias, WW_PINNED_MEMORY, &r)) {
        ww_unpin_taken(d, &r);
        ww_unpin_pages(address, nbytes);
    }
    return error == CUDA_ERROR_ALREADY_MAPPED ? CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED : error;
}

int ww_body_cuMemHostUnregister(void *address) {
    struct ww_span r, pinned;
    if (!ww_range_take(&layer.registered, (uintptr_t)address, WW_REGISTERED, &r))
        return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    if (!r.owner)
        return 0;
    struct ww_device *d = &layer.devices[r.flags];
    if (atomic_load(&d->holds))
        ww_host_wait(d, 0); /* as in take_block */
    bool is_pinned = ww_range_take(&d->ranges, (uintptr_t)r.owner, WW_PINNED_MEMORY, &pinned);
    int error = is_pinned ? ww_unpin_taken(d, &pinned) : 0;
    ww_unpin_pages(address, r.size);
    return error;
}

/* -- attributes of pointers ---------------------------------------------------------------------------------------- */

/* Find the device and the span of an address. Registered memory belongs to the device on which it was registered. */
static struct ww_device *owner_of(CUdeviceptr at, struct ww_span *r) {
    struct ww_device *d = ww_range_owner(at, r);
    return d || !ww_range_find(&layer.registered, at, r) ? d : &layer.devices[r->flags];
}

/* Return the address at which the device accesses an address of its memory, or 0 if it cannot. */
static CUdeviceptr on_device(const struct ww_device *d, const struct ww_span *r, CUdeviceptr at) {
    if (r->type == WW_REGISTERED)
        return r->owner ? (uintptr_t)r->owner + (at - r->start) : 0;
    return r->type == WW_PINNED_MEMORY && d->facts.remote ? 0 : at;
}

/* Return the size of an attribute's value in bytes. */
static size_t width_of(int attribute) {
    static const uint32_t narrow = 1 << CU_POINTER_MEMORY_TYPE | 1 << CU_POINTER_SYNC_MEMOPS |
                                   1 << CU_POINTER_IS_MANAGED | 1 << CU_POINTER_DEVICE_ORDINAL |
                                   1 << CU_POINTER_IS_IPC_CAPABLE | 1 << CU_POINTER_MAPPED | 1 << CU_POINTER_RDMA |
                                   1 << CU_POINTER_ACCESS;
    return narrow >> attribute & 1 ? 4 : 8;
}

/* Write one attribute of the address `at` in a span. */
static int attribute_of(struct ww_device *d, const struct ww_span *r, CUdeviceptr at, int attribute, void *to) {
    bool pinned = r->type == WW_PINNED_MEMORY || r->type == WW_REGISTERED,
         managed = r->type == WW_PINNED_MEMORY && r->flags & WW_MANAGED,
         pooled = r->type != WW_REGISTERED && r->owner && !(r->flags & WW_OF_GRAPH);
    CUdeviceptr mapped = on_device(d, r, at);
    const uint64_t values[] = {
        [CU_POINTER_CONTEXT] = (uintptr_t)ww_context_handle(d),
        [CU_POINTER_MEMORY_TYPE] = pinned && !managed ? 1 : 2,
        [CU_POINTER_DEVICE_POINTER] = mapped,
        [CU_POINTER_HOST_POINTER] = pinned ? at : 0,
        [CU_POINTER_BUFFER_ID] = r->serial,
        [CU_POINTER_IS_MANAGED] = managed,
        [CU_POINTER_DEVICE_ORDINAL] = (uint64_t)ww_device_number(d),
        [CU_POINTER_RANGE_START] = r->start,
        [CU_POINTER_RANGE_SIZE] = r->size,
        [CU_POINTER_MAPPED] = mapped != 0,
        [CU_POINTER_ACCESS] = 3, /* read and write */
        [CU_POINTER_POOL] = pooled ? (uintptr_t)ww_pool_handle(r->owner) : 0,
    };
    if (attribute < 1 || attribute > CU_POINTER_POOL || attribute == CU_POINTER_P2P_TOKENS)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(to, &values[attribute], width_of(attribute));
    bool has_none =
        (attribute == CU_POINTER_DEVICE_POINTER || attribute == CU_POINTER_HOST_POINTER) && !values[attribute];
    return has_none ? CUDA_ERROR_INVALID_VALUE : 0;
}

int ww_body_cuPointerGetAttribute(void *to, int attribute, CUdeviceptr at) {
    struct ww_span r;
    struct ww_device *d = owner_of(at, &r);
    return d ? attribute_of(d, &r, at, attribute, to) : CUDA_ERROR_INVALID_VALUE;
}

int ww_body_cuPointerGetAttributes(unsigned n, int *attributes, void **to, CUdeviceptr at) {
    struct ww_span r;
    struct ww_device *d = owner_of(at, &r);
    for (unsigned i = 0; i < n; i++) {
        if (attributes[i] < 1 || attributes[i] > CU_POINTER_POOL)
            return CUDA_ERROR_INVALID_VALUE;
        memset(to[i], 0, width_of(attributes[i]));
        if (d)
            attribute_of(d, &r, at, attributes[i], to[i]); /* attributes without a value stay 0 */
        else if (attributes[i] == CU_POINTER_DEVICE_ORDINAL)
            *(int *)to[i] = -2; /* plain host memory */
    }
    return 0;
}
