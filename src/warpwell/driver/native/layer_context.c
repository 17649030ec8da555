/* cuInit, devices, contexts. Only primary contexts exist; a context's handle is the address of its device here. */
#include "layer.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

struct stack { /* contexts that the calling thread has pushed, the current one last */
    int depth, capacity;
    struct ww_device **at;
};

static _Thread_local struct stack stack;
static pthread_key_t stack_key;
static pthread_once_t stack_once = PTHREAD_ONCE_INIT;

/* Attributes of what programs cannot do here: pageable memory, memory made by parts, handles for other
 * processes, pools on NUMA nodes, stream memory operations, multicast, tensor maps. */
static const unsigned char absent[] = {CU_DEVICE_PAGEABLE_ACCESS,
                                       CU_DEVICE_HOST_POINTER_FOR_REGISTERED,
                                       92,
                                       93,
                                       94,
                                       CU_DEVICE_PAGEABLE_BY_HOST_TABLES,
                                       CU_DEVICE_DIRECT_MANAGED,
                                       CU_DEVICE_VMM,
                                       CU_DEVICE_HANDLE_POSIX_FD,
                                       104,
                                       105,
                                       113,
                                       114,
                                       CU_DEVICE_RDMA,
                                       117,
                                       118,
                                       CU_DEVICE_POOL_HANDLE_TYPES,
                                       121,
                                       122,
                                       123,
                                       CU_DEVICE_DMA_BUF,
                                       CU_DEVICE_IPC_EVENT,
                                       126,
                                       CU_DEVICE_TENSOR_MAP,
                                       CU_DEVICE_HANDLE_FABRIC,
                                       CU_DEVICE_UNIFIED_FUNCTION_POINTERS,
                                       130,
                                       CU_DEVICE_MULTICAST,
                                       135,
                                       136,
                                       141,
                                       142,
                                       143};

int ww_ready(void) {
    if (__builtin_expect(atomic_load_explicit(&layer.state, memory_order_acquire) != 2, 0) || layer.forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    return ww_in_host_function ? CUDA_ERROR_NOT_PERMITTED : 0;
}

struct ww_device *ww_current(void) { return stack.depth ? stack.at[stack.depth - 1] : NULL; }

struct ww_device *ww_context(CUcontext h) {
    for (int i = 0; i < layer.ndevices; i++)
        if ((void *)h == &layer.devices[i])
            return &layer.devices[i];
    return NULL;
}

CUcontext ww_context_handle(struct ww_device *d) { return (CUcontext)(void *)d; }

static int index_of(const struct ww_device *d) { return (int)(d - layer.devices); }

int ww_context_code(struct ww_device *d) {
    struct ww_channel *c = atomic_load_explicit(&d->channel, memory_order_acquire);
    if (__builtin_expect(!c, 0))
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    int code = (int)atomic_load_explicit(&c->status->sticky, memory_order_relaxed);
    return code ? code : atomic_load_explicit(&c->lost, memory_order_relaxed);
}

int ww_need(struct ww_device **d) {
    int error = ww_ready();
    if (error)
        return error;
    *d = ww_current();
    if (!*d)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (__builtin_expect(!atomic_load_explicit(&(*d)->channel, memory_order_acquire), 0) && (*d)->retained)
        return ww_open(*d);
    return ww_context_code(*d);
}

CUresult cuInit(unsigned flags) {
    if (layer.forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    int error = ww_facts_once(), known = 1;
    if (!error)
        atomic_compare_exchange_strong(&layer.state, &known, 2);
    return error;
}

CUresult cuDriverGetVersion(int *version) {
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    if (!layer.forked && ww_facts_once() == 0)
        *version = layer.driver_version;
    else
        *version = 0;
    return 0;
}

/* -- devices ------------------------------------------------------------------------------------------------------- */

static int device_of(CUdevice k, struct ww_device **d) {
    int error = ww_ready();
    if (error)
        return error;
    if (k < 0 || k >= layer.ndevices)
        return CUDA_ERROR_INVALID_DEVICE;
    *d = &layer.devices[k];
    return 0;
}

CUresult cuDeviceGetCount(int *n) {
    int error = ww_ready();
    if (error || !n)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    *n = layer.ndevices;
    return 0;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    struct ww_device *d;
    int error = device_of(ordinal, &d);
    if (error || !device)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    *device = ordinal;
    return 0;
}

static int text_out(char *to, int room, const char *text) {
    if (!to || room <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(to, (size_t)room, "%s", text);
    return 0;
}

CUresult cuDeviceGetName(char *name, int room, CUdevice k) {
    struct ww_device *d;
    int error = device_of(k, &d);
    return error ? error : text_out(name, room, d->facts.name);
}

CUresult cuDeviceGetPCIBusId(char *name, int room, CUdevice k) {
    struct ww_device *d;
    int error = device_of(k, &d);
    return error ? error : text_out(name, room, d->facts.pci);
}

CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *name) {
    int error = ww_ready();
    if (error || !device || !name)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < layer.ndevices; i++) {
        const char *full = layer.devices[i].facts.pci, *brief = strchr(full, ':');
        if (!strcasecmp(name, full) || (brief && !strcasecmp(name, brief + 1))) {
            *device = i;
            return 0;
        }
    }
    return CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetUuid_v2(void *uuid, CUdevice k) {
    struct ww_device *d;
    int error = device_of(k, &d);
    if (error || !uuid)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    memcpy(uuid, d->facts.uuid, sizeof d->facts.uuid);
    return 0;
}

CUresult cuDeviceGetUuid(void *uuid, CUdevice k) { return cuDeviceGetUuid_v2(uuid, k); }

CUresult cuDeviceTotalMem_v2(size_t *nbytes, CUdevice k) {
    struct ww_device *d;
    int error = device_of(k, &d);
    if (error || !nbytes)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    *nbytes = d->facts.total_bytes;
    return 0;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice k) {
    struct ww_device *d;
    int error = device_of(k, &d);
    if (error || !value || attribute <= 0 || attribute >= (int)WW_ATTRIBUTES)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    if (attribute == CU_DEVICE_MANAGED_MEMORY || attribute == CU_DEVICE_CONCURRENT_MANAGED)
        *value = ww_manages(d);
    else
        *value = memchr(absent, attribute, sizeof absent) ? 0 : d->facts.attributes[attribute];
    return 0;
}

CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice k) {
    int error = cuDeviceGetAttribute(major, CU_DEVICE_MAJOR, k);
    return error ? error : cuDeviceGetAttribute(minor, CU_DEVICE_MINOR, k);
}

/* -- primary contexts ---------------------------------------------------------------------------------------------- */

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice k) {
    struct ww_device *d;
    int error = device_of(k, &d);
    if (error || !context)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    if ((error = ww_open(d)))
        return error;
    pthread_mutex_lock(&d->opening);
    d->retained++;
    pthread_mutex_unlock(&d->opening);
    *context = ww_context_handle(d);
    return 0;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice k) {
    struct ww_device *d;
    int error = device_of(k, &d);
    if (error)
        return error;
    pthread_mutex_lock(&d->opening);
    bool last = d->retained == 1;
    error = d->retained ? 0 : CUDA_ERROR_INVALID_CONTEXT;
    d->retained -= d->retained > 0;
    pthread_mutex_unlock(&d->opening);
    if (last)
        ww_close(d);
    return error;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice k) { return cuDevicePrimaryCtxRelease_v2(k); }

CUresult cuDevicePrimaryCtxReset(CUdevice k) { return cuDevicePrimaryCtxReset_v2(k); }

CUresult cuDevicePrimaryCtxReset_v2(CUdevice k) {
    struct ww_device *d;
    int error = device_of(k, &d);
    if (!error)
        ww_close(d); /* whoever has the context retained or current goes on with a new worker */
    return error;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice k, unsigned *flags, int *active) {
    struct ww_device *d;
    int error = device_of(k, &d);
    if (error || !flags || !active)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    *flags = d->context_flags;
    *active = atomic_load(&d->channel) != NULL;
    return 0;
}

/* Flags say how the calling thread waits, which is the layer's affair: kept, and told when asked. */
CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice k, unsigned flags) {
    struct ww_device *d;
    int error = device_of(k, &d);
    if (error || flags > 0xff || (flags & 7) == 3 || (flags & 7) > 4)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    d->context_flags = flags;
    return 0;
}

/* -- the thread's stack -------------------------------------------------------------------------------------------- */

static void free_stack(void *unused) {
    (void)unused;
    free(stack.at);
    stack = (struct stack){0};
}

static void make_stack_key(void) { pthread_key_create(&stack_key, free_stack); }

static int push(struct ww_device *d) {
    if (stack.depth == stack.capacity) {
        int capacity = stack.capacity ? 2 * stack.capacity : 8;
        struct ww_device **at = realloc(stack.at, (size_t)capacity * sizeof *at);
        if (!at)
            return CUDA_ERROR_OUT_OF_MEMORY;
        stack.at = at;
        stack.capacity = capacity;
        pthread_once(&stack_once, make_stack_key);
        pthread_setspecific(stack_key, at);
    }
    stack.at[stack.depth++] = d;
    return 0;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    int error = ww_ready();
    if (error || !context)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    *context = ww_current() ? ww_context_handle(ww_current()) : NULL;
    return 0;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    int error = ww_ready();
    struct ww_device *d = ww_context(context);
    if (error || (context && !d))
        return error ? error : CUDA_ERROR_INVALID_CONTEXT;
    if (!context) {
        stack.depth -= stack.depth > 0;
        return 0;
    }
    if (!stack.depth)
        return push(d);
    stack.at[stack.depth - 1] = d;
    return 0;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    int error = ww_ready();
    struct ww_device *d = ww_context(context);
    if (error || !d)
        return error ? error : CUDA_ERROR_INVALID_CONTEXT;
    return push(d);
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    int error = ww_ready();
    if (error || !stack.depth)
        return error ? error : CUDA_ERROR_INVALID_CONTEXT;
    struct ww_device *d = stack.at[--stack.depth];
    if (context)
        *context = ww_context_handle(d);
    return 0;
}

CUresult cuCtxPushCurrent(CUcontext context) { return cuCtxPushCurrent_v2(context); }

CUresult cuCtxPopCurrent(CUcontext *context) { return cuCtxPopCurrent_v2(context); }

CUresult cuCtxGetDevice(CUdevice *device) {
    int error = ww_ready();
    if (error || !device)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    if (!ww_current())
        return CUDA_ERROR_INVALID_CONTEXT;
    *device = index_of(ww_current());
    return 0;
}

/* The device of a context, NULL being the thread's. */
static int context_or_current(CUcontext context, struct ww_device **d) {
    int error = ww_ready();
    *d = context ? ww_context(context) : ww_current();
    return error ? error : *d ? 0 : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuCtxGetDevice_v2(CUdevice *device, CUcontext context) {
    struct ww_device *d;
    int error = context_or_current(context, &d);
    if (error || !device)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    *device = index_of(d);
    return 0;
}

CUresult cuCtxGetFlags(unsigned *flags) {
    struct ww_device *d;
    int error = context_or_current(NULL, &d);
    if (error || !flags)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    *flags = d->context_flags;
    return 0;
}

CUresult cuCtxGetId(CUcontext context, uint64_t *id) {
    struct ww_device *d;
    int error = context_or_current(context, &d);
    if (error || !id)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    *id = (atomic_load(&d->life) + 1) * WW_DEVICES + (uint64_t)index_of(d);
    return 0;
}

CUresult cuCtxGetApiVersion(CUcontext context, unsigned *version) {
    struct ww_device *d;
    int error = context_or_current(context, &d);
    if (error || !version)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    *version = 3020;
    return 0;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    struct ww_device *d;
    int error = context_or_current(NULL, &d);
    if (error)
        return error;
    if (least)
        *least = d->facts.least_priority;
    if (greatest)
        *greatest = d->facts.greatest_priority;
    return 0;
}

static int synchronize(struct ww_device *d) {
    int error = ww_no_synchronize(d, 0);
    if (error)
        return error;
    if (atomic_load(&d->holds))
        ww_host_wait(d, 0);
    error = ww_call(d, WW_OP_CTX_SYNC, 0, NULL, 0, NULL, 0, NULL);
    return error ? error : ww_earlier(d);
}

CUresult cuCtxSynchronize(void) {
    struct ww_device *d;
    int error = ww_need(&d);
    return error ? error : synchronize(d);
}

CUresult cuCtxSynchronize_v2(CUcontext context) {
    struct ww_device *d;
    int error = context_or_current(context, &d);
    return error ? error : (error = ww_open(d)) ? error : synchronize(d);
}
