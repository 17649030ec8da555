/* Memory on devices, pinned and registered host memory, and what a pointer is. */
#include "layer.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define PITCH 512
#define PIN_TRIES 256
#define PIN_STEP (1ull << 16) /* of addresses */
#define PINNED_MS 10000       /* the packet with the memory is on its way when its answer is there */
#define REGISTER_DEVICEMAP 2u
#define KEEP_BLOCKS 32
#define KEEP_BYTES (64u << 20)
#define LOOKS 50 /* with 2 ms between two: for memory that is given back */

/* -- on the device ------------------------------------------------------------------------------------------------- */

int ww_allocate(struct ww_device *d, uint16_t op, uint32_t stream, size_t nbytes, uint32_t flags, void *owner,
                CUdeviceptr *address) {
    struct ww_args_alloc args = {nbytes};
    uint64_t at = 0;
    uint32_t got = 0;
    int error = ww_call(d, op, stream, &args, sizeof args, &at, sizeof at, &got);
    if (error || got != sizeof at)
        return error ? error : CUDA_ERROR_UNKNOWN;
    if ((error = ww_range_add_of(&d->ranges, at, nbytes, WW_ON_DEVICE, flags, owner))) {
        struct ww_args_free back = {at};
        ww_send(d, WW_OP_FREE, 0, &back, sizeof back);
        return error == CUDA_ERROR_ALREADY_MAPPED ? CUDA_ERROR_UNKNOWN : error;
    }
    *address = at;
    return 0;
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t nbytes) {
    struct ww_device *d;
    int error = ww_need(&d);
    if (error || !address || !nbytes)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    return (error = ww_unsafe()) ? error : ww_allocate(d, WW_OP_ALLOC, 0, nbytes, 0, NULL, address);
}

/* Rows one behind another, each at a multiple of the pitch. */
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

/* Take a block out of its table before the worker may give its address to another thread. Memory that a graph's node
 * allocates stays there: it belongs to the graph. The rest of a graph that is posted behind a host function may use the
 * block, so what holds the freeing stream of the device `on`, else any of the owner's, runs first. */
static struct ww_device *take_block(CUdeviceptr address, const struct ww_device *on, uint32_t stream,
                                    struct ww_span *r) {
    struct ww_device *d = ww_range_owner(address, r);
    if (!d || address != r->start)
        return NULL;
    if (r->flags & WW_OF_GRAPH)
        return d;
    if (atomic_load(&d->holds))
        ww_host_wait(d, d == on ? stream : 0);
    bool ours = r->what == WW_ON_DEVICE || (r->what == WW_PINNED_MEMORY && (r->owner || r->flags & WW_MANAGED));
    if (!ours || !ww_range_take(&d->ranges, address, r->what, r))
        return NULL;
    if (r->owner)
        ww_pool_give(r->owner, r->size);
    return d;
}

CUresult cuMemFree_v2(CUdeviceptr address) {
    struct ww_device *d;
    struct ww_span r;
    int error = ww_need(&d);
    if (error || !address)
        return error;
    struct ww_args_free args = {address};
    if ((error = ww_unsafe()))
        return error;
    if (!(d = take_block(address, NULL, 0, &r)))
        return CUDA_ERROR_INVALID_VALUE;
    if (r.flags & WW_OF_GRAPH)
        return ww_graph_memory_freed(r.owner) ? 0 : CUDA_ERROR_INVALID_VALUE;
    if (r.what == WW_PINNED_MEMORY)
        return ww_unpin_taken(d, &r);
    ww_peers_done(d);
    return ww_send(d, WW_OP_FREE, 0, &args, sizeof args);
}

/* Memory of the host's pools whose stream is done with it stays pinned for the next block of its size. To give it back
 * waits for all work of the device, and on some drivers whoever pins memory meanwhile waits for that. */
static pthread_mutex_t keeping = PTHREAD_MUTEX_INITIALIZER;
static struct kept {
    struct ww_device *device; /* NULL: no block */
    uint64_t life;
    struct ww_span range;
} kept[KEEP_BLOCKS];
static uint64_t kept_bytes;

static struct kept take_kept(struct kept *k) {
    struct kept was = *k;
    k->device = NULL;
    kept_bytes -= was.range.size;
    return was;
}

/* Say whether the block is kept. One of an earlier life of the device makes room. */
static bool keep(struct ww_device *d, const struct ww_span *r) {
    uint64_t life = atomic_load(&d->life);
    struct kept *room = NULL;
    pthread_mutex_lock(&keeping);
    for (struct kept *k = kept; k < kept + KEEP_BLOCKS; k++) {
        if (k->device == d && k->life != life) {
            struct kept old = take_kept(k);
            munmap((void *)(uintptr_t)old.range.start, old.range.size);
        }
        room = k->device ? room : k;
    }
    bool fits = room && r->owner && !d->facts.remote && kept_bytes + r->size <= KEEP_BYTES;
    if (fits) {
        *room = (struct kept){d, life, *r};
        kept_bytes += r->size;
    }
    pthread_mutex_unlock(&keeping);
    return fits;
}

/* A kept block of such a size, or NULL. */
static void *pin_kept(struct ww_device *d, size_t whole, uint32_t flags) {
    void *at = NULL;
    pthread_mutex_lock(&keeping);
    for (struct kept *k = kept; k < kept + KEEP_BLOCKS && !at; k++)
        if (k->device == d && k->life == atomic_load(&d->life) && k->range.size == whole && k->range.flags == flags)
            at = (void *)(uintptr_t)take_kept(k).range.start;
    pthread_mutex_unlock(&keeping);
    return at;
}

bool ww_unkeep(struct ww_device *d) {
    bool any = false;
    for (struct kept *k = kept; k < kept + KEEP_BLOCKS; k++) {
        pthread_mutex_lock(&keeping);
        struct kept was = k->device && (!d || k->device == d) ? take_kept(k) : (struct kept){0};
        pthread_mutex_unlock(&keeping);
        if (was.device)
            ww_unpin_posted(was.device, &was.range, was.life == atomic_load(&was.device->life));
        any |= was.device != NULL;
    }
    return any;
}

struct unpinning {
    struct ww_device *device;
    struct ww_span range;
    uint64_t life;
};

/* In the thread of host functions, which must not wait: other streams may wait for it. */
void ww_unpin_posted(struct ww_device *d, const struct ww_span *r, bool there) {
    struct ww_args_free args = {r->start};
    if (there && !d->facts.remote)
        ww_send(d, WW_OP_UNPIN, 0, &args, sizeof args);
    munmap((void *)(uintptr_t)r->start, r->size);
}

static void unpin_later(void *data, int code) {
    struct unpinning *u = data;
    bool there = !code && u->life == atomic_load(&u->device->life);
    if (!there || !keep(u->device, &u->range))
        ww_unpin_posted(u->device, &u->range, there);
    free(u);
}

/* Memory of the host's pool goes when its stream gets there; the caller does not wait. */
static int unpin_in_stream(struct ww_device *d, uint32_t stream, struct ww_device *owner, const struct ww_span *r) {
    struct unpinning *u = malloc(sizeof *u);
    if (!u)
        return ww_unpin_taken(owner, r);
    *u = (struct unpinning){owner, *r, atomic_load(&owner->life)};
    int error = ww_host_after(d, stream, unpin_later, u);
    if (error) {
        free(u);
        return ww_unpin_taken(owner, r);
    }
    return 0;
}

/* In a stream that records: a node, for memory that a graph allocates. */
static int free_in_graph(struct ww_device *d, uint32_t stream, CUdeviceptr address) {
    struct ww_span r;
    if (!ww_range_owner(address, &r) || !(r.flags & WW_OF_GRAPH) || r.start != address)
        return CUDA_ERROR_INVALID_VALUE;
    struct ww_work work = {.kind = CU_NODE_FREE, .device = d, .of.memory = r.owner};
    atomic_fetch_add(&work.of.memory->refs, 1);
    return ww_capture_add(d, stream, &work);
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream h) {
    struct ww_device *d, *owner;
    struct ww_span r;
    uint32_t stream;
    bool captured;
    int error = ww_need(&d);
    if (error || (error = ww_stream(h, 0, &d, &stream)) || !address || (error = ww_captured(d, stream, &captured)))
        return error;
    if (captured)
        return free_in_graph(d, stream, address);
    struct ww_args_free args = {address};
    if (!(owner = take_block(address, d, stream, &r)))
        return CUDA_ERROR_INVALID_VALUE;
    if (r.flags & WW_OF_GRAPH)
        return ww_graph_memory_freed(r.owner) ? 0 : CUDA_ERROR_INVALID_VALUE;
    if (r.what == WW_PINNED_MEMORY)
        return unpin_in_stream(d, stream, owner, &r);
    if (owner != d) { /* a stream of another device says nothing about this one's work: as cuMemFree */
        ww_peers_done(owner);
        return ww_send(owner, WW_OP_FREE, 0, &args, sizeof args);
    }
    return ww_send(d, WW_OP_FREE_ASYNC, stream, &args, sizeof args);
}

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    struct ww_device *d;
    struct ww_mem_info info = {0, 0};
    int error = ww_need(&d);
    if (error || (error = ww_call(d, WW_OP_MEM_INFO, 0, NULL, 0, &info, sizeof info, NULL)))
        return error;
    if (free_bytes)
        *free_bytes = info.free;
    if (total)
        *total = info.total;
    return 0;
}

/* -- pinned -------------------------------------------------------------------------------------------------------- */

/* Reserve addresses of the range for pinned memory that nobody uses; the next ones at each try. */
static void *reserve(size_t nbytes) {
    static _Atomic uint64_t next = WW_PIN_LOWEST;
    for (int i = 0; i < PIN_TRIES; i++) {
        uint64_t step = (nbytes + PIN_STEP - 1) & ~(PIN_STEP - 1), at = atomic_fetch_add(&next, step);
        if (at + step > WW_PIN_HIGHEST) {
            atomic_store(&next, WW_PIN_LOWEST);
            continue;
        }
        void *wanted = (void *)(uintptr_t)at;
        void *got =
            mmap(wanted, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
        if (got == wanted)
            return got;
        if (got != MAP_FAILED)
            munmap(got, nbytes);
    }
    return NULL;
}

/* Receive the memory that the worker made and put it where its addresses were reserved. */
static int map_pinned(struct ww_channel *c, void *at, size_t nbytes) {
    struct ww_pinned packet;
    struct stat s;
    int fd, n = ww_receive(c->socket, &packet, sizeof packet, &fd, 1, PINNED_MS);
    bool good = n == (int)sizeof packet && packet.said == WW_PINNED && packet.address == (uintptr_t)at && fd >= 0 &&
                !fstat(fd, &s) && (size_t)s.st_size >= nbytes;
    if (good)
        good = mmap(at, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == at;
    if (fd >= 0)
        close(fd);
    if (good)
        madvise(at, nbytes, MADV_DONTFORK);
    return good ? 0 : CUDA_ERROR_OUT_OF_MEMORY;
}

static int unpin(struct ww_device *d, uint64_t at, size_t nbytes) {
    struct ww_args_free args = {at};
    int error = d->facts.remote ? 0 : ww_call(d, WW_OP_UNPIN, 0, &args, sizeof args, NULL, 0, NULL);
    munmap((void *)(uintptr_t)at, nbytes);
    return error;
}

int ww_unpin_taken(struct ww_device *d, const struct ww_span *r) { return unpin(d, r->start, r->size); }

static int pin_at(struct ww_device *d, struct ww_channel *c, void *at, size_t whole, uint32_t flags) {
    struct ww_args_pin args = {(uintptr_t)at, whole, flags, 0};
    pthread_mutex_lock(&c->pinning);
    int error = ww_call(d, WW_OP_PIN, 0, &args, sizeof args, NULL, 0, NULL);
    int unmapped = error ? 0 : map_pinned(c, at, whole);
    pthread_mutex_unlock(&c->pinning);
    if (unmapped)
        unpin(d, (uintptr_t)at, whole);
    else if (error)
        munmap(at, whole);
    return error ? error : unmapped;
}

/* For a device of another host: memory of the program alone, from and to which copies go by way of staging. It has
 * the bound that a worker holds. */
static int pin_here(struct ww_device *d, void **address, size_t whole, uint32_t flags, void *owner) {
    uint64_t most = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE) / 2;
    if (whole > most || ww_ranges_pinned(&d->ranges) > most - whole)
        return CUDA_ERROR_OUT_OF_MEMORY;
    void *at = reserve(whole);
    if (!at)
        return CUDA_ERROR_OUT_OF_MEMORY;
    int error = mprotect(at, whole, PROT_READ | PROT_WRITE) ? CUDA_ERROR_OUT_OF_MEMORY : 0;
    if (!error)
        error = ww_range_add_of(&d->ranges, (uintptr_t)at, whole, WW_PINNED_MEMORY, flags, owner);
    if (error)
        munmap(at, whole);
    else
        *address = at;
    return error == CUDA_ERROR_ALREADY_MAPPED ? CUDA_ERROR_OUT_OF_MEMORY : error;
}

int ww_pin(struct ww_device *d, void **address, size_t nbytes, uint32_t flags, void *owner) {
    size_t whole = (nbytes + 4095) & ~(size_t)4095;
    if (d->facts.remote)
        return pin_here(d, address, whole, flags, owner);
    pthread_mutex_lock(&d->post);
    struct ww_channel *c = atomic_load(&d->channel);
    if (c)
        atomic_fetch_add(&c->references, 1);
    pthread_mutex_unlock(&d->post);
    struct timespec step = {.tv_nsec = 2000000};
    int error = c ? CUDA_ERROR_ALREADY_MAPPED : CUDA_ERROR_CONTEXT_IS_DESTROYED, looks = 0;
    void *at = NULL;
    if (c && owner && (at = pin_kept(d, whole, flags)))
        error = 0;
    for (int i = 0; i < PIN_TRIES && error == CUDA_ERROR_ALREADY_MAPPED; i++) {
        error = (at = reserve(whole)) ? pin_at(d, c, at, whole, flags) : CUDA_ERROR_OUT_OF_MEMORY;
        if (error == CUDA_ERROR_OUT_OF_MEMORY && (looks ? looks++ < LOOKS : ww_unkeep(d) && ++looks)) {
            nanosleep(&step, NULL); /* for what was kept to be there again */
            error = CUDA_ERROR_ALREADY_MAPPED;
        }
    }
    if (c)
        ww_release(c);
    if (!error && (error = ww_range_add_of(&d->ranges, (uintptr_t)at, whole, WW_PINNED_MEMORY, flags, owner)))
        unpin(d, (uintptr_t)at, whole);
    if (error)
        return error == CUDA_ERROR_ALREADY_MAPPED ? CUDA_ERROR_OUT_OF_MEMORY : error;
    *address = at;
    return 0;
}

CUresult cuMemHostAlloc(void **address, size_t nbytes, unsigned flags) {
    struct ww_device *d;
    int error = ww_need(&d);
    if (error || !address || flags > 7 || nbytes > SIZE_MAX / 2)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    *address = NULL;
    if ((error = ww_unsafe()))
        return error;
    return nbytes ? ww_pin(d, address, nbytes, flags, NULL) : 0;
}

CUresult cuMemAllocHost_v2(void **address, size_t nbytes) {
    return cuMemHostAlloc(address, nbytes, CU_MEMHOST_PORTABLE | CU_MEMHOST_DEVICEMAP);
}

CUresult cuMemFreeHost(void *address) {
    struct ww_span r;
    struct ww_device *d;
    int error = ww_need(&d);
    if (error || !address)
        return error;
    if ((error = ww_unsafe()))
        return error;
    d = ww_range_owner((uintptr_t)address, &r);
    if (d && atomic_load(&d->holds))
        ww_host_wait(d, 0); /* as in take_block */
    if (!d || r.owner || r.flags & WW_MANAGED || !ww_range_take(&d->ranges, (uintptr_t)address, WW_PINNED_MEMORY, &r))
        return CUDA_ERROR_INVALID_VALUE;
    return unpin(d, r.start, r.size);
}

CUresult cuMemHostGetFlags(unsigned *flags, void *address) {
    struct ww_span r;
    struct ww_device *d;
    int error = ww_need(&d);
    if (error || !flags)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    if (!ww_range_owner((uintptr_t)address, &r) || r.what != WW_PINNED_MEMORY || r.flags & WW_MANAGED)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = r.flags & ~WW_OF_GRAPH;
    return 0;
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device, void *address, unsigned flags) {
    struct ww_span r;
    struct ww_device *d;
    int error = ww_need(&d);
    if (error || !device || flags)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    if (d->facts.remote && ww_range_owner((uintptr_t)address, &r) && r.what == WW_PINNED_MEMORY)
        return ww_refused("cuMemHostGetDevicePointer for a device of another host");
    if (ww_range_find(&d->ranges, (uintptr_t)address, &r) && r.what == WW_PINNED_MEMORY) {
        *device = (uintptr_t)address;
        return 0;
    }
    if (ww_range_owner((uintptr_t)address, &r) && r.what == WW_PINNED_MEMORY)
        return ww_refused("cuMemHostGetDevicePointer of memory that was pinned on another device");
    if (ww_range_find(&layer.registered, (uintptr_t)address, &r))
        return ww_refused("cuMemHostGetDevicePointer of registered memory");
    return CUDA_ERROR_INVALID_VALUE;
}

/* Registered memory stays pageable for the worker, which is another process: it is copied by way of staging, and
 * kernels cannot read it. */
CUresult cuMemHostRegister_v2(void *address, size_t nbytes, unsigned flags) {
    struct ww_device *d;
    struct ww_span r;
    int error = ww_need(&d);
    if (error || !address || !nbytes || flags > 15)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    if (flags & (REGISTER_DEVICEMAP | 4u))
        return ww_refused("cuMemHostRegister of memory that the device maps");
    if (ww_range_owner((uintptr_t)address, &r))
        return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    error = ww_range_add(&layer.registered, (uintptr_t)address, nbytes, WW_REGISTERED, (uint32_t)d->ordinal);
    return error == CUDA_ERROR_ALREADY_MAPPED ? CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED : error;
}

CUresult cuMemHostUnregister(void *address) {
    struct ww_device *d;
    struct ww_span r;
    int error = ww_need(&d);
    if (error || !address)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    bool found = ww_range_take(&layer.registered, (uintptr_t)address, WW_REGISTERED, &r);
    return found ? 0 : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

/* -- what a pointer is --------------------------------------------------------------------------------------------- */

CUresult cuMemGetAddressRange_v2(CUdeviceptr *start, size_t *nbytes, CUdeviceptr address) {
    struct ww_device *d;
    struct ww_span r;
    int error = ww_need(&d);
    if (error)
        return error;
    if (!ww_range_owner(address, &r))
        return CUDA_ERROR_NOT_FOUND;
    if (start)
        *start = r.start;
    if (nbytes)
        *nbytes = r.size;
    return 0;
}

/* Write one attribute of a pointer with a known range. */
static int attribute_of(struct ww_device *d, const struct ww_span *r, CUdeviceptr at, int attribute, void *to) {
    bool pinned = r->what == WW_PINNED_MEMORY, managed = pinned && r->flags & WW_MANAGED,
         mapped = !pinned || !d->facts.remote;
    switch (attribute) {
    case CU_POINTER_CONTEXT:
        *(CUcontext *)to = ww_context_handle(d);
        return 0;
    case CU_POINTER_MEMORY_TYPE:
        *(unsigned *)to = pinned && !managed ? 1 : 2;
        return 0;
    case CU_POINTER_DEVICE_POINTER:
        *(CUdeviceptr *)to = mapped ? at : 0;
        return mapped ? 0 : CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_HOST_POINTER:
        *(void **)to = pinned ? (void *)(uintptr_t)at : NULL;
        return pinned ? 0 : CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_BUFFER_ID:
        *(uint64_t *)to = r->serial;
        return 0;
    case CU_POINTER_DEVICE_ORDINAL:
        *(int *)to = (int)(d - layer.devices);
        return 0;
    case CU_POINTER_RANGE_START:
        *(CUdeviceptr *)to = r->start;
        return 0;
    case CU_POINTER_RANGE_SIZE:
        *(size_t *)to = r->size;
        return 0;
    case CU_POINTER_MAPPED:
        *(int *)to = mapped;
        return 0;
    case CU_POINTER_IS_MANAGED:
        *(int *)to = managed;
        return 0;
    case CU_POINTER_SYNC_MEMOPS:
    case CU_POINTER_IS_IPC_CAPABLE:
        *(int *)to = 0;
        return 0;
    case CU_POINTER_HANDLE_TYPES:
        *(uint64_t *)to = 0;
        return 0;
    case 15:
        *(int *)to = 0;
        return 0; /* capable of GPUDirect RDMA */
    case 16:
        *(int *)to = 3;
        return 0; /* access: read and write */
    case 17:      /* pool */
        *(void **)to = r->owner && !(r->flags & WW_OF_GRAPH) ? ww_pool_handle(r->owner) : NULL;
        return 0;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult cuPointerGetAttribute(void *to, int attribute, CUdeviceptr at) {
    struct ww_span r;
    int error = ww_ready();
    if (error || !to)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    struct ww_device *d = ww_range_owner(at, &r);
    return d ? attribute_of(d, &r, at, attribute, to) : CUDA_ERROR_INVALID_VALUE;
}

/* Bytes of an attribute's value. */
static size_t width_of(int attribute) {
    switch (attribute) {
    case CU_POINTER_MEMORY_TYPE:
    case CU_POINTER_SYNC_MEMOPS:
    case CU_POINTER_IS_MANAGED:
    case CU_POINTER_DEVICE_ORDINAL:
    case CU_POINTER_IS_IPC_CAPABLE:
    case CU_POINTER_MAPPED:
    case 15:
    case 16:
        return 4;
    default:
        return 8;
    }
}

CUresult cuPointerGetAttributes(unsigned n, int *attributes, void **to, CUdeviceptr at) {
    struct ww_span r;
    int error = ww_ready();
    if (error || !attributes || !to)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    struct ww_device *d = ww_range_owner(at, &r);
    for (unsigned i = 0; i < n; i++) {
        if (attributes[i] < 1 || attributes[i] > 17)
            return CUDA_ERROR_INVALID_VALUE;
        memset(to[i], 0, width_of(attributes[i]));
        if (d)
            attribute_of(d, &r, at, attributes[i], to[i]); /* what the memory has not stays 0 */
        else if (attributes[i] == CU_POINTER_DEVICE_ORDINAL)
            *(int *)to[i] = -2; /* plain host memory */
    }
    return 0;
}
