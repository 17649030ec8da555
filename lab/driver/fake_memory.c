/* The fake driver: addresses, memory, copies. See fake.h. */
#include "fake.h"

#include <fcntl.h>
#include <search.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define PIECE ((uint64_t)2 << 20)
#define FRESH 0xa5 /* byte that fills new device memory, so that tests notice reads before the first write */
#define OF_STREAM (1u << 31)
#define EARLY 24576 /* FAKE_WEAK: largest copy that reads pinned memory at once, if the stream has no other work */

enum place { DEVICE = 1, MAPPED, PINNED, REGISTERED, GLOBAL };

struct range { /* of addresses; the ranges of a table do not overlap */
    uint64_t base, size;
    enum place place;
    int device;
    unsigned open;   /* mapped memory: bit mask of devices that may access it */
    unsigned flags;  /* host memory: flags of its allocation. Device memory: OF_STREAM, or 0 */
    uint64_t handle; /* of mapped memory */
};

struct part { /* memory that cuMemCreate created, or that was imported */
    int file, device, refs, released;
    int shareable, imported; /* imported: the memory of another process */
    uint64_t size;
};

static void *ranges, *reserved;
static struct part *parts;
static size_t nparts;

static int by_range(const void *a, const void *b) {
    const struct range *x = a, *y = b;
    return x->base + x->size <= y->base ? -1 : y->base + y->size <= x->base;
}

static struct range *in(void **table, uint64_t address, uint64_t size) {
    struct range key = {.base = address, .size = size ? size : 1};
    void *found = tfind(&key, table, by_range);
    return found ? *(struct range **)found : NULL;
}

static struct range *add(void **table, uint64_t base, uint64_t size, enum place place, int device) {
    struct range *range = calloc(1, sizeof *range);
    if (!range)
        abort();
    *range = (struct range){.base = base, .size = size, .place = place, .device = device, .open = ~0u};
    struct range **found = tsearch(range, table, by_range);
    if (!found)
        abort();
    if (*found != range) {
        free(range);
        return NULL;
    }
    return range;
}

static void drop(void **table, struct range *range) {
    tdelete(range, table, by_range);
    free(range);
}

/* Return true if a device may access all bytes. Kernels may access memory of other devices only with peer access. */
static int covered(int device, uint64_t address, uint64_t size, int by_kernel) {
    while (size) {
        struct range *range = in(&ranges, address, 1);
        if (!range || !(range->open >> device & 1))
            return 0;
        int closed = range->flags & OF_STREAM ? device != range->device : !fake_may_reach(device, range->device);
        if (by_kernel && (range->place == DEVICE || range->place == GLOBAL) && closed)
            return 0;
        uint64_t rest = range->base + range->size - address;
        if (rest >= size)
            return 1;
        address += rest;
        size -= rest;
    }
    return 1;
}

int fake_reachable(CUcontext context, uint64_t address, uint64_t size) {
    return covered(context->device, address, size, 1);
}

/* Copy the range that contains an address to *found, or return 0. */
static int look(uint64_t address, struct range *found) {
    pthread_rwlock_rdlock(&fake_memory);
    struct range *range = in(&ranges, address, 1);
    if (range)
        *found = *range;
    pthread_rwlock_unlock(&fake_memory);
    return range != NULL;
}

static enum place place_of(uint64_t address) {
    struct range range;
    return look(address, &range) ? range.place : 0;
}

/* -- allocations --------------------------------------------------------------------------------------------------- */

/* Return true if the fake gives only the guarantees of CUDA's documentation, although most drivers give more. */
static int weak(void) { return fake_number("FAKE_WEAK", 0) != 0; }

static uint64_t rounded(uint64_t size) { return (size + 4095) & ~(uint64_t)4095; }

static uint64_t fresh(CUcontext context, uint64_t size, enum place place) {
    uint64_t most = (uint64_t)fake_number("FAKE_MEMORY", 8ll << 30), whole = rounded(size);
    if (whole < size || whole > most - context->used)
        return 0;
    void *memory = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return 0;
    if (place == DEVICE)
        memset(memory, FRESH, whole < PIECE ? whole : PIECE);
    pthread_rwlock_wrlock(&fake_memory);
    add(&ranges, (uint64_t)memory, size, place, context->device);
    pthread_rwlock_unlock(&fake_memory);
    context->used += whole;
    return (uint64_t)memory;
}

uint64_t fake_allocate(CUcontext context, uint64_t size) { return fresh(context, size, GLOBAL); }

/* Free the allocation that begins at an address; fake_lock held. */
static int release(uint64_t address, enum place place) {
    pthread_rwlock_wrlock(&fake_memory);
    struct range *range = in(&ranges, address, 1);
    int found = range && range->base == address && range->place == place;
    if (found) {
        CUcontext context = &fake_contexts[range->device];
        if (place == DEVICE || place == GLOBAL)
            context->used -= rounded(range->size);
        munmap((void *)range->base, rounded(range->size));
        drop(&ranges, range);
    }
    pthread_rwlock_unlock(&fake_memory);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

void fake_release(uint64_t address) { release(address, GLOBAL); }

static uint64_t ending; /* address of a range of the context, set by find_ending: twalk passes it no argument */
static int ending_device;

static void find_ending(const void *node, VISIT visit, int depth) {
    const struct range *range = *(struct range *const *)node;
    (void)depth;
    if ((visit == postorder || visit == leaf) && range->device == ending_device && range->place != MAPPED)
        ending = range->base;
}

void fake_end_memory(CUcontext context) {
    for (;;) {
        pthread_rwlock_wrlock(&fake_memory);
        ending = 0;
        ending_device = context->device;
        twalk(ranges, find_ending);
        struct range *range = ending ? in(&ranges, ending, 1) : NULL;
        if (range) {
            if (range->place != REGISTERED)
                munmap((void *)range->base, rounded(range->size));
            if (range->place == DEVICE || range->place == GLOBAL)
                context->used -= rounded(range->size);
            drop(&ranges, range);
        }
        pthread_rwlock_unlock(&fake_memory);
        if (!range)
            return;
    }
}

CUresult cuMemGetInfo_v2(size_t *left, size_t *total) {
    CUcontext context;
    int error = enter(&context);
    if (error || !left || !total)
        return error ? error : leave(CUDA_ERROR_INVALID_VALUE);
    *total = (size_t)fake_number("FAKE_MEMORY", 8ll << 30);
    *left = *total - context->used;
    return leave(CUDA_SUCCESS);
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size) {
    CUcontext context;
    int error = enter(&context);
    if (error)
        return error;
    if (!address || !size)
        return leave(CUDA_ERROR_INVALID_VALUE);
    uint64_t found = fresh(context, size, DEVICE);
    if (found)
        *address = found;
    return leave(found ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
}

CUresult cuMemFree_v2(CUdeviceptr address) {
    CUcontext context;
    int error = enter(&context);
    if (error || !address)
        return error ? error : leave(CUDA_SUCCESS);
    struct range range;
    if (!look(address, &range) || range.place != DEVICE)
        return leave(CUDA_ERROR_INVALID_VALUE);
    if (!(range.flags & OF_STREAM)) /* memory from cuMemAllocAsync is freed without a wait */
        fake_wait_all(context, "cuMemFree_v2");
    return leave(context->sticky ? context->sticky : release(address, DEVICE));
}

CUresult cuMemAllocAsync(CUdeviceptr *address, size_t size, CUstream handle) {
    (void)handle;
    int error = cuMemAlloc_v2(address, size);
    pthread_rwlock_wrlock(&fake_memory);
    struct range *range = error ? NULL : in(&ranges, *address, 1);
    if (range)
        range->flags = OF_STREAM;
    pthread_rwlock_unlock(&fake_memory);
    return error;
}

static int run_free(struct fake_op *op) {
    pthread_mutex_lock(&fake_lock);
    release(op->to, DEVICE);
    pthread_mutex_unlock(&fake_lock);
    return CUDA_SUCCESS;
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream handle) {
    CUcontext context;
    CUstream stream;
    int error = enter(&context);
    if (error)
        return error;
    if ((error = fake_stream(handle, context, &stream)))
        return leave(error);
    if (place_of(address) != DEVICE)
        return leave(CUDA_ERROR_INVALID_VALUE);
    struct fake_op *op = fake_op(context, run_free);
    op->to = address;
    fake_enqueue(stream, op, 0, "cuMemFreeAsync");
    return leave(CUDA_SUCCESS);
}

/* Each device has one pool, which keeps nothing: its handle is the context's address. */

CUresult cuDeviceGetMemPool(void **pool, CUdevice device) {
    int error = fake_device(device);
    if (!error && pool)
        *pool = &fake_contexts[device];
    return error ? error : pool ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDeviceGetDefaultMemPool(void **pool, CUdevice device) { return cuDeviceGetMemPool(pool, device); }

static int is_pool(void *pool) {
    CUcontext context = pool;
    return context >= fake_contexts && context < fake_contexts + FAKE_MOST_DEVICES;
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr *address, size_t size, void *pool, CUstream stream) {
    return is_pool(pool) ? cuMemAllocAsync(address, size, stream) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemPoolGetAttribute(void *pool, int32_t attribute, void *value) {
    if (!is_pool(pool) || !value || attribute < 1 || attribute > 16)
        return CUDA_ERROR_INVALID_VALUE;
    if (attribute < 4) /* the three policies for reuse of memory: all are on */
        *(int32_t *)value = 1;
    else
        *(uint64_t *)value = attribute >= 7 ? ((CUcontext)pool)->used : 0;
    return CUDA_SUCCESS;
}

CUresult cuMemPoolSetAttribute(void *pool, int32_t attribute, void *value) {
    return is_pool(pool) && value && attribute > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemPoolTrimTo(void *pool, size_t keep) {
    (void)keep;
    return is_pool(pool) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* -- memory of the host -------------------------------------------------------------------------------------------- */

CUresult cuMemHostAlloc(void **pointer, size_t size, uint32_t flags) {
    CUcontext context;
    int error = enter(&context);
    if (error)
        return error;
    if (!pointer || !size || flags > 7)
        return leave(CUDA_ERROR_INVALID_VALUE);
    void *memory = mmap(NULL, rounded(size), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return leave(CUDA_ERROR_OUT_OF_MEMORY);
    pthread_rwlock_wrlock(&fake_memory);
    add(&ranges, (uint64_t)memory, size, PINNED, context->device)->flags = flags;
    pthread_rwlock_unlock(&fake_memory);
    *pointer = memory;
    return leave(CUDA_SUCCESS);
}

CUresult cuMemAllocHost_v2(void **pointer, size_t size) { return cuMemHostAlloc(pointer, size, 0); }

CUresult cuMemFreeHost(void *pointer) {
    CUcontext context;
    int error = enter(&context);
    if (error)
        return error;
    if (place_of((uint64_t)pointer) != PINNED)
        return leave(CUDA_ERROR_INVALID_VALUE);
    if (!weak())
        fake_wait_all(context, "cuMemFreeHost");
    return leave(release((uint64_t)pointer, PINNED));
}

static int is_of_file(const void *pointer) {
    FILE *maps = fopen("/proc/self/maps", "r");
    unsigned long begin, end, inode, address = (unsigned long)pointer;
    int is_found = 0;
    char line[4352];
    while (maps && !is_found && fgets(line, sizeof line, maps))
        is_found = sscanf(line, "%lx-%lx %*s %*s %*s %lu", &begin, &end, &inode) == 3 && inode && begin <= address &&
                   address < end && !strstr(line, "/dev/zero"); /* the name of shared memory without a file */
    if (maps)
        fclose(maps);
    return is_found;
}

CUresult cuMemHostRegister_v2(void *pointer, size_t size, uint32_t flags) {
    CUcontext context;
    char byte;
    struct iovec here = {&byte, 1}, first = {pointer, 1};
    int error = enter(&context);
    if (error)
        return error;
    if (fake_forbids_unsafe_calls())
        return leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    if (!pointer || !size || flags > 15 || process_vm_readv(getpid(), &here, 1, &first, 1, 0) != 1 ||
        (!fake_number("FAKE_FILES", 1) && is_of_file(pointer)))
        return leave(CUDA_ERROR_INVALID_VALUE);
    pthread_rwlock_wrlock(&fake_memory);
    struct range *range = add(&ranges, (uint64_t)pointer, size, REGISTERED, context->device);
    if (range)
        range->flags = flags;
    pthread_rwlock_unlock(&fake_memory);
    return leave(range ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
}

CUresult cuMemHostUnregister(void *pointer) {
    CUcontext context;
    int error = enter(&context);
    if (error)
        return error;
    if (place_of((uint64_t)pointer) != REGISTERED)
        return leave(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    fake_wait_all(context, "cuMemHostUnregister");
    pthread_rwlock_wrlock(&fake_memory);
    struct range *range = in(&ranges, (uint64_t)pointer, 1);
    int found = range && range->base == (uint64_t)pointer && range->place == REGISTERED;
    if (found)
        drop(&ranges, range);
    pthread_rwlock_unlock(&fake_memory);
    return leave(found ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *address, void *pointer, uint32_t flags) {
    CUcontext context;
    int error = fake_need(&context);
    enum place place = error ? 0 : place_of((uint64_t)pointer);
    if (error || !address || flags || (place != PINNED && place != REGISTERED))
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    *address = (uint64_t)pointer;
    return CUDA_SUCCESS;
}

CUresult cuMemHostGetFlags(uint32_t *flags, void *pointer) {
    CUcontext context;
    struct range range;
    int error = fake_need(&context);
    if (error || !flags || !look((uint64_t)pointer, &range) || (range.place != PINNED && range.place != REGISTERED))
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    *flags = range.flags;
    return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    CUcontext context;
    struct range range;
    int error = fake_need(&context);
    if (error || !look(address, &range))
        return error ? error : CUDA_ERROR_NOT_FOUND;
    if (base)
        *base = range.base;
    if (size)
        *size = range.size;
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, int32_t attribute, CUdeviceptr address) {
    CUcontext context;
    struct range range;
    int error = fake_need(&context);
    if (error || !data || !look(address, &range))
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    int host = range.place == PINNED || range.place == REGISTERED;
    switch (attribute) {
    case CU_POINTER_CONTEXT:
        *(CUcontext *)data = &fake_contexts[range.device];
        break;
    case CU_POINTER_MEMORY_TYPE:
        *(uint32_t *)data = host ? 1 : 2;
        break;
    case CU_POINTER_DEVICE_POINTER:
        *(uint64_t *)data = address;
        break;
    case CU_POINTER_HOST_POINTER:
        *(uint64_t *)data = host ? address : 0;
        break;
    case CU_POINTER_BUFFER_ID:
        *(uint64_t *)data = range.base >> 12;
        break;
    case CU_POINTER_SYNC_MEMOPS:
    case CU_POINTER_IS_MANAGED:
    case CU_POINTER_IS_IPC_CAPABLE:
        *(uint32_t *)data = 0;
        break;
    case CU_POINTER_DEVICE_ORDINAL:
        *(int32_t *)data = range.device;
        break;
    case CU_POINTER_RANGE_START:
        *(uint64_t *)data = range.base;
        break;
    case CU_POINTER_RANGE_SIZE:
        *(size_t *)data = range.size;
        break;
    case CU_POINTER_MAPPED:
        *(uint32_t *)data = 1;
        break;
    case CU_POINTER_HANDLE_TYPES:
        *(uint64_t *)data = 0;
        break;
    default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttributes(uint32_t n, int32_t *attributes, void **data, CUdeviceptr address) {
    CUcontext context;
    int error = fake_need(&context);
    if (error || !attributes || !data)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    for (uint32_t i = 0; i < n; i++)
        if (cuPointerGetAttribute(data[i], attributes[i], address)) {
            int wide = attributes[i] == CU_POINTER_CONTEXT || attributes[i] == CU_POINTER_DEVICE_POINTER ||
                       attributes[i] == CU_POINTER_HOST_POINTER || attributes[i] == CU_POINTER_BUFFER_ID ||
                       attributes[i] == CU_POINTER_RANGE_START || attributes[i] == CU_POINTER_RANGE_SIZE;
            memset(data[i], attributes[i] == CU_POINTER_DEVICE_ORDINAL ? 0xff : 0, wide ? 8 : 4);
        }
    return CUDA_SUCCESS;
}

/* -- copies and memsets -------------------------------------------------------------------------------------------- */

static int is_device(enum place place) { return place == DEVICE || place == MAPPED || place == GLOBAL; }

/* Copy bytes within this process. An unmapped address is an error, not a SIGSEGV. */
static int move(uint64_t to, uint64_t from, uint64_t size) {
    uint64_t done = 0;
    while (done < size) {
        struct iovec here = {(void *)(to + done), size - done}, there = {(void *)(from + done), size - done};
        ssize_t n = process_vm_readv(getpid(), &here, 1, &there, 1, 0);
        if (n <= 0)
            return CUDA_ERROR_ILLEGAL_ADDRESS;
        done += (uint64_t)n;
    }
    return CUDA_SUCCESS;
}

static int run_copy(struct fake_op *op) {
    uint64_t from = op->data ? (uint64_t)op->data : op->from;
    int error = CUDA_SUCCESS;
    pthread_rwlock_rdlock(&fake_memory);
    if (is_device((enum place)op->value) && !covered(op->context->device, op->to, op->size, 0))
        error = CUDA_ERROR_ILLEGAL_ADDRESS;
    if (is_device((enum place)op->width) && !covered(op->context->device, op->from, op->size, 0))
        error = CUDA_ERROR_ILLEGAL_ADDRESS;
    if (!error)
        error = move(op->to, from, op->size);
    pthread_rwlock_unlock(&fake_memory);
    return error;
}

static int checked(CUcontext context, uint64_t address, uint64_t size) {
    pthread_rwlock_rdlock(&fake_memory);
    int known = covered(context->device, address, size, 0);
    pthread_rwlock_unlock(&fake_memory);
    return known;
}

/* Return true if cuMemAllocAsync allocated the memory on another device: peer access does not extend to it. */
static int in_other_pool(CUcontext context, uint64_t address) {
    struct range range;
    return look(address, &range) && range.flags & OF_STREAM && range.place == DEVICE && range.device != context->device;
}

/* Any copy. `must_to`, `must_from`: destination or source must be memory that the driver knows. `wait`: a call without
 * Async. `peer`: a call that names the contexts of both ends. */
static int copy(uint64_t to, uint64_t from, uint64_t size, CUstream handle, int must_to, int must_from, int wait,
                int peer, const char *symbol) {
    CUcontext context;
    CUstream stream;
    int error = enter(&context);
    if (error)
        return error;
    if ((error = fake_stream(handle, context, &stream)) || !size)
        return leave(error);
    enum place at = place_of(to), of = place_of(from);
    if ((must_to && !at) || (must_from && !of) || (at && !checked(context, to, size)) ||
        (of && !checked(context, from, size)) ||
        (!peer && (in_other_pool(context, to) || in_other_pool(context, from))))
        return leave(CUDA_ERROR_INVALID_VALUE);
    struct fake_op *op = fake_op(context, run_copy);
    *op = (struct fake_op){.refs = 1,
                           .run = run_copy,
                           .context = context,
                           .life = context->life,
                           .to = to,
                           .from = from,
                           .size = size,
                           .value = at,
                           .width = of};
    int late = !wait && weak();
    int early = weak() && !wait && (of == PINNED || of == REGISTERED) && is_device(at);
    early = early && size <= EARLY && (!stream->last || stream->last->done);
    if ((!of && !late) || early) { /* read the source now: pageable memory after the stream's earlier work */
        if (!early)
            fake_wait_stream(stream, symbol);
        op->data = malloc(size);
        if (!op->data || move((uint64_t)op->data, from, size)) {
            free(op->data);
            free(op);
            return leave(CUDA_ERROR_INVALID_VALUE);
        }
    }
    int on_device = is_device(at) && is_device(of);
    int waits = (!at && !late) || (wait && !on_device && of);
    if (waits && !wait && stream->last && !stream->last->done)
        fake_blocks(symbol);
    fake_enqueue(stream, op, waits, symbol);
    if (waits) {
        fake_wait(op);
        fake_flush(context);
    }
    return leave(context->sticky);
}

CUresult ww_cuMemcpy(int per_thread, CUdeviceptr to, CUdeviceptr from, size_t size) {
    return copy(to, from, size, per_thread ? CU_STREAM_PER_THREAD : NULL, 0, 0, 1, 0, "cuMemcpy");
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    return copy(to, from, size, stream, 0, 0, 0, 0, "cuMemcpyAsync");
}

CUresult ww_cuMemcpyHtoD_v2(int per_thread, CUdeviceptr to, const void *from, size_t size) {
    return copy(to, (uint64_t)from, size, per_thread ? CU_STREAM_PER_THREAD : NULL, 1, 0, 1, 0, "cuMemcpyHtoD_v2");
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size, CUstream stream) {
    return copy(to, (uint64_t)from, size, stream, 1, 0, 0, 0, "cuMemcpyHtoDAsync_v2");
}

CUresult ww_cuMemcpyDtoH_v2(int per_thread, void *to, CUdeviceptr from, size_t size) {
    return copy((uint64_t)to, from, size, per_thread ? CU_STREAM_PER_THREAD : NULL, 0, 1, 1, 0, "cuMemcpyDtoH_v2");
}

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size, CUstream stream) {
    return copy((uint64_t)to, from, size, stream, 0, 1, 0, 0, "cuMemcpyDtoHAsync_v2");
}

CUresult ww_cuMemcpyDtoD_v2(int per_thread, CUdeviceptr to, CUdeviceptr from, size_t size) {
    return copy(to, from, size, per_thread ? CU_STREAM_PER_THREAD : NULL, 1, 1, 1, 0, "cuMemcpyDtoD_v2");
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    return copy(to, from, size, stream, 1, 1, 0, 0, "cuMemcpyDtoDAsync_v2");
}

CUresult ww_cuMemcpyPeer(int per_thread, CUdeviceptr to, CUcontext there, CUdeviceptr from, CUcontext here,
                         size_t size) {
    (void)there, (void)here;
    return copy(to, from, size, per_thread ? CU_STREAM_PER_THREAD : NULL, 1, 1, 1, 1, "cuMemcpyPeer");
}

CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext there, CUdeviceptr from, CUcontext here, size_t size,
                           CUstream stream) {
    (void)there, (void)here;
    return copy(to, from, size, stream, 1, 1, 0, 1, "cuMemcpyPeerAsync");
}

static int run_set(struct fake_op *op) {
    int error = CUDA_SUCCESS;
    pthread_rwlock_rdlock(&fake_memory);
    if (!covered(op->context->device, op->to, op->size * op->width, 0))
        error = CUDA_ERROR_ILLEGAL_ADDRESS;
    else if (op->width == 1)
        memset((void *)op->to, (int)op->value, op->size);
    else
        for (uint64_t i = 0; i < op->size; i++) {
            if (op->width == 2)
                ((uint16_t *)op->to)[i] = (uint16_t)op->value;
            else
                ((uint32_t *)op->to)[i] = op->value;
        }
    pthread_rwlock_unlock(&fake_memory);
    return error;
}

/* `wait`: a call without Async, which waits if the memory is host memory. */
static int set(uint64_t to, uint32_t value, uint32_t width, uint64_t count, CUstream handle, int wait) {
    CUcontext context;
    CUstream stream;
    int error = enter(&context);
    if (error)
        return error;
    if ((error = fake_stream(handle, context, &stream)) || !count)
        return leave(error);
    if (to % width || count > UINT64_MAX / 4 || !checked(context, to, count * width))
        return leave(CUDA_ERROR_INVALID_VALUE);
    struct fake_op *op = fake_op(context, run_set);
    op->to = to;
    op->size = count;
    op->value = value;
    op->width = width;
    wait = wait && !is_device(place_of(to));
    fake_enqueue(stream, op, wait, "cuMemset");
    if (wait)
        fake_wait(op);
    return leave(context->sticky);
}

CUresult ww_cuMemsetD8_v2(int per_thread, CUdeviceptr to, uint8_t value, size_t count) {
    return set(to, value, 1, count, per_thread ? CU_STREAM_PER_THREAD : NULL, 1);
}

CUresult ww_cuMemsetD16_v2(int per_thread, CUdeviceptr to, uint16_t value, size_t count) {
    return set(to, value, 2, count, per_thread ? CU_STREAM_PER_THREAD : NULL, 1);
}

CUresult ww_cuMemsetD32_v2(int per_thread, CUdeviceptr to, uint32_t value, size_t count) {
    return set(to, value, 4, count, per_thread ? CU_STREAM_PER_THREAD : NULL, 1);
}

CUresult cuMemsetD8Async(CUdeviceptr to, uint8_t value, size_t count, CUstream stream) {
    return set(to, value, 1, count, stream, 0);
}

CUresult cuMemsetD16Async(CUdeviceptr to, uint16_t value, size_t count, CUstream stream) {
    return set(to, value, 2, count, stream, 0);
}

CUresult cuMemsetD32Async(CUdeviceptr to, uint32_t value, size_t count, CUstream stream) {
    return set(to, value, 4, count, stream, 0);
}

/* -- virtual memory management: addresses and memory are separate -------------------------------------------------- */

CUresult cuMemGetAllocationGranularity(size_t *granularity, void *prop, int32_t option) {
    (void)option;
    if (!granularity || !prop)
        return CUDA_ERROR_INVALID_VALUE;
    *granularity = PIECE;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr hint, uint64_t flags) {
    CUcontext context;
    int error = enter(&context);
    if (error)
        return error;
    if (!address || !size || size % PIECE || flags || (alignment & (alignment - 1)))
        return leave(CUDA_ERROR_INVALID_VALUE);
    int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *memory = MAP_FAILED;
    if (hint && hint % PIECE == 0)
        memory = mmap((void *)hint, size, PROT_NONE, how | MAP_FIXED_NOREPLACE, -1, 0);
    if (memory == MAP_FAILED) {
        memory = mmap(NULL, size + PIECE, PROT_NONE, how, -1, 0);
        if (memory == MAP_FAILED)
            return leave(CUDA_ERROR_OUT_OF_MEMORY);
        uint64_t first = (uint64_t)memory, begin = (first + PIECE - 1) & ~(PIECE - 1);
        if (begin > first)
            munmap(memory, begin - first);
        if (first + PIECE > begin)
            munmap((void *)(begin + size), first + PIECE - begin);
        memory = (void *)begin;
    }
    pthread_rwlock_wrlock(&fake_memory);
    add(&reserved, (uint64_t)memory, size, MAPPED, context->device);
    pthread_rwlock_unlock(&fake_memory);
    *address = (uint64_t)memory;
    return leave(CUDA_SUCCESS);
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    pthread_rwlock_wrlock(&fake_memory);
    struct range *range = in(&reserved, address, 1);
    int right = range && range->base == address && range->size == size && !in(&ranges, address, size);
    if (right) {
        munmap((void *)address, size);
        drop(&reserved, range);
    }
    pthread_rwlock_unlock(&fake_memory);
    return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static uint64_t add_part(struct part part) {
    parts = realloc(parts, (nparts + 1) * sizeof *parts);
    if (!parts || part.file < 0)
        abort();
    parts[nparts++] = part;
    return nparts;
}

CUresult cuMemCreate(uint64_t *handle, size_t size, void *wanted, uint64_t flags) {
    const struct cu_mem_prop *prop = wanted;
    CUcontext context;
    int error = enter(&context);
    if (error)
        return error;
    if (!handle || !prop || !size || size % PIECE || flags || prop->type != CU_MEM_PINNED ||
        prop->location.kind != CU_MEM_ON_DEVICE || fake_device(prop->location.id))
        return leave(CUDA_ERROR_INVALID_VALUE);
    context = &fake_contexts[prop->location.id];
    if (size > (uint64_t)fake_number("FAKE_MEMORY", 8ll << 30) - context->used)
        return leave(CUDA_ERROR_OUT_OF_MEMORY);
    char name[16];
    snprintf(name, sizeof name, "fake-%d", prop->location.id);
    int file = memfd_create(name, MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)size))
        abort();
    context->used += size;
    *handle = add_part((struct part){.file = file,
                                     .device = prop->location.id,
                                     .refs = 1,
                                     .size = size,
                                     .shareable = prop->handle_types == CU_MEM_POSIX_FD});
    return leave(CUDA_SUCCESS);
}

CUresult cuMemExportToShareableHandle(void *file, uint64_t handle, int32_t type, uint64_t flags) {
    pthread_mutex_lock(&fake_lock);
    if (!file || !handle || handle > nparts || parts[handle - 1].released || !parts[handle - 1].shareable ||
        type != CU_MEM_POSIX_FD || flags)
        return leave(CUDA_ERROR_INVALID_VALUE);
    *(int *)file = fcntl(parts[handle - 1].file, F_DUPFD_CLOEXEC, 0);
    return leave(CUDA_SUCCESS);
}

CUresult cuMemImportFromShareableHandle(uint64_t *handle, void *wanted, int32_t type) {
    int file = (int)(intptr_t)wanted, device = -1;
    char path[32], name[32] = "";
    struct stat s;
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    if (!handle || type != CU_MEM_POSIX_FD || readlink(path, name, sizeof name - 1) < 0 ||
        sscanf(name, "/memfd:fake-%d", &device) != 1 || fake_device(device) || fstat(file, &s))
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_lock);
    *handle = add_part((struct part){.file = fcntl(file, F_DUPFD_CLOEXEC, 0),
                                     .device = device,
                                     .refs = 1,
                                     .size = (uint64_t)s.st_size,
                                     .imported = 1});
    return leave(CUDA_SUCCESS);
}

static void unref_part(uint64_t handle) {
    struct part *part = &parts[handle - 1];
    if (!--part->refs) {
        close(part->file);
        if (!part->imported)
            fake_contexts[part->device].used -= part->size;
    }
}

CUresult cuMemRelease(uint64_t handle) {
    pthread_mutex_lock(&fake_lock);
    if (!handle || handle > nparts || parts[handle - 1].released)
        return leave(CUDA_ERROR_INVALID_VALUE);
    parts[handle - 1].released = 1;
    unref_part(handle);
    return leave(CUDA_SUCCESS);
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, uint64_t handle, uint64_t flags) {
    pthread_mutex_lock(&fake_lock);
    if (!handle || handle > nparts || parts[handle - 1].released || offset || flags || address % PIECE || !size ||
        size != parts[handle - 1].size)
        return leave(CUDA_ERROR_INVALID_VALUE);
    struct part *part = &parts[handle - 1];
    pthread_rwlock_wrlock(&fake_memory);
    struct range *room = in(&reserved, address, 1), *range = NULL;
    if (room && address + size <= room->base + room->size)
        range = add(&ranges, address, size, MAPPED, part->device);
    if (range) {
        range->open = 0;
        range->handle = handle;
        part->refs++;
        if (mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, part->file, 0) == MAP_FAILED)
            abort();
    }
    pthread_rwlock_unlock(&fake_memory);
    return leave(range ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

/* Unmap [address, address + size) if device < 0, else let the device use it. An error: it does not consist of whole
 * mapped ranges, or the device cannot access one. */
static int each_mapped(uint64_t address, uint64_t size, int device) {
    for (uint64_t at = address; at < address + size;) {
        struct range *range = in(&ranges, at, 1);
        if (!range || range->place != MAPPED || range->base != at || at + range->size > address + size)
            return CUDA_ERROR_INVALID_VALUE;
        if (device >= 0 && !fake_can_reach(device, range->device))
            return CUDA_ERROR_NOT_SUPPORTED;
        at += range->size;
    }
    for (uint64_t at = address; at < address + size;) {
        struct range *range = in(&ranges, at, 1);
        uint64_t bytes = range->size;
        if (device >= 0) {
            range->open |= 1u << device;
            mprotect((void *)at, bytes, PROT_READ | PROT_WRITE);
        } else {
            if (mmap((void *)at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) ==
                MAP_FAILED)
                abort();
            unref_part(range->handle);
            drop(&ranges, range);
        }
        at += bytes;
    }
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t size, void *wanted, size_t count) {
    const struct cu_mem_access *access = wanted;
    if (!access || count != 1 || access->access != CU_MEM_READ_WRITE || access->location.kind != CU_MEM_ON_DEVICE ||
        fake_device(access->location.id))
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_lock);
    pthread_rwlock_wrlock(&fake_memory);
    int error = each_mapped(address, size, access->location.id);
    pthread_rwlock_unlock(&fake_memory);
    return leave(error);
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    pthread_mutex_lock(&fake_lock);
    pthread_rwlock_wrlock(&fake_memory);
    int error = each_mapped(address, size, -1);
    pthread_rwlock_unlock(&fake_memory);
    return leave(error);
}
