/* The fake driver: start, devices, contexts, errors, symbols. See fake.h. */
#include "fake.h"

#include <fcntl.h>
#include <search.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t fake_moved = PTHREAD_COND_INITIALIZER;
pthread_rwlock_t fake_memory = PTHREAD_RWLOCK_INITIALIZER;
struct CUctx_st fake_contexts[FAKE_MOST_DEVICES];

static int initialized, forked, devices;
static void *valid;               /* tree of the valid objects, sorted by address */
static __thread CUcontext *stack; /* of the calling thread: contexts, the current one last */
static __thread int top, stack_size;
static pthread_key_t stack_key;
static pthread_once_t stack_once = PTHREAD_ONCE_INIT;

/* -- files, numbers ------------------------------------------------------------------------------------------------ */

static void note(const char *variable, const char *symbol, const char *more) {
    const char *path = getenv(variable);
    char line[160];
    int n = snprintf(line, sizeof line, "%s%s\n", symbol, more);
    int file = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    if (file >= 0) {
        if (write(file, line, (size_t)n) != n)
            abort();
        close(file);
    }
}

int fake_absent(const char *symbol) {
    note("FAKE_LOG", symbol, "");
    return CUDA_ERROR_NOT_SUPPORTED;
}

void fake_blocks(const char *symbol) {
    note("FAKE_BLOCKED", symbol, syscall(SYS_gettid) == getpid() ? " main" : " thread");
}

long long fake_number(const char *variable, long long otherwise) {
    const char *text = getenv(variable);
    return text && *text ? atoll(text) : otherwise;
}

/* -- objects ------------------------------------------------------------------------------------------------------- */

static int by_address(const void *a, const void *b) { return a < b ? -1 : a > b; }

void *fake_make(enum fake_kind kind, size_t size, CUcontext context) {
    struct fake_object *object = calloc(1, size);
    if (!object || !tsearch(object, &valid, by_address))
        abort();
    object->kind = kind;
    object->context = context;
    object->life = context->life;
    return object;
}

int fake_valid(const void *handle, enum fake_kind kind) {
    if (!handle || !tfind(handle, &valid, by_address))
        return 0;
    const struct fake_object *object = handle;
    return object->kind == kind && object->life == object->context->life;
}

void fake_drop(void *handle) { tdelete(handle, &valid, by_address); }

/* -- start, errors, symbols ---------------------------------------------------------------------------------------- */

static void in_child(void) {
    forked = initialized;
    pthread_mutex_init(&fake_lock, NULL);
}

CUresult cuInit(uint32_t flags) {
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    pthread_mutex_lock(&fake_lock);
    if (!initialized) {
        devices = (int)fake_number("FAKE_DEVICES", 2);
        devices = devices > FAKE_MOST_DEVICES ? FAKE_MOST_DEVICES : devices;
        for (int i = 0; i < devices; i++) {
            fake_contexts[i].device = i;
            fake_contexts[i].life = 1;
        }
        pthread_atfork(NULL, NULL, in_child);
        initialized = 1;
    }
    pthread_mutex_unlock(&fake_lock);
    return devices ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

CUresult cuDriverGetVersion(int32_t *version) {
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    *version = (int)fake_number("FAKE_VERSION", 13000);
    return CUDA_SUCCESS;
}

static const struct ww_error *error_of(int code) {
    for (size_t i = 0; i < sizeof ww_errors / sizeof *ww_errors; i++)
        if (ww_errors[i].code == code)
            return &ww_errors[i];
    return NULL;
}

CUresult cuGetErrorName(int32_t code, const char **name) {
    const struct ww_error *error = error_of(code);
    if (!name)
        return CUDA_ERROR_INVALID_VALUE;
    *name = error ? error->name : NULL;
    return error ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(int32_t code, const char **text) {
    const struct ww_error *error = error_of(code);
    if (!text)
        return CUDA_ERROR_INVALID_VALUE;
    *text = error ? error->text : NULL;
    return error ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetProcAddress_v2(const char *name, void **symbol, int32_t version, uint64_t flags, int32_t *status) {
    const struct ww_variant *best = NULL;
    int known = 0;
    if (!name || !symbol)
        return CUDA_ERROR_INVALID_VALUE;
    for (const struct ww_variant *v = ww_variants; v->name; v++) {
        if (strcmp(v->name, name))
            continue;
        known = 1;
        if (v->version > version || (v->per_thread && !(flags & CU_GET_PROC_ADDRESS_PER_THREAD)))
            continue;
        if (!best || v->per_thread >= best->per_thread)
            best = v; /* variants of one kind (per_thread or not) are sorted by version */
    }
    *symbol = best ? best->symbol : NULL;
    if (status)
        *status = best ? 0 : known ? 2 : 1;
    return CUDA_SUCCESS;
}

CUresult cuGetProcAddress(const char *name, void **symbol, int32_t version, uint64_t flags) {
    int error = cuGetProcAddress_v2(name, symbol, version, flags, NULL);
    return error ? error : *symbol ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuGetExportTable(void *table, void *id) {
    (void)id;
    if (!table)
        return CUDA_ERROR_INVALID_VALUE;
    *(void **)table = NULL;
    return CUDA_ERROR_NOT_FOUND;
}

/* -- devices ------------------------------------------------------------------------------------------------------- */

int fake_device(CUdevice device) {
    if (!initialized || forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    return device >= 0 && device < devices ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetCount(int32_t *count) {
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    if (!initialized || forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    *count = devices;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int32_t ordinal) {
    int error = fake_device(ordinal);
    if (!error && device)
        *device = ordinal;
    return error ? error : device ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDeviceGetName(char *name, int32_t room, CUdevice device) {
    int error = fake_device(device);
    if (!error && name && room > 0)
        snprintf(name, (size_t)room, "Fake GPU %d", device);
    return error;
}

CUresult cuDeviceGetUuid(void *uuid, CUdevice device) {
    int error = fake_device(device);
    if (!error && uuid) {
        memset(uuid, 0xfa, 16);
        ((unsigned char *)uuid)[15] = (unsigned char)device;
    }
    return error ? error : uuid ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDeviceGetUuid_v2(void *uuid, CUdevice device) { return cuDeviceGetUuid(uuid, device); }

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    int error = fake_device(device);
    if (!error && bytes)
        *bytes = (size_t)fake_number("FAKE_MEMORY", 8ll << 30);
    return error ? error : bytes ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static const struct {
    int attribute, value;
} ATTRIBUTES[] = {
    {CU_DEVICE_MAX_THREADS_PER_BLOCK, 1024},
    {CU_DEVICE_MAX_BLOCK_X, 1024},
    {CU_DEVICE_MAX_BLOCK_Y, 1024},
    {CU_DEVICE_MAX_BLOCK_Z, 64},
    {CU_DEVICE_MAX_GRID_X, 2147483647},
    {CU_DEVICE_MAX_GRID_Y, 65535},
    {CU_DEVICE_MAX_GRID_Z, 65535},
    {CU_DEVICE_SHARED_PER_BLOCK, 49152},
    {CU_DEVICE_CONSTANT_MEMORY, 65536},
    {CU_DEVICE_WARP_SIZE, 32},
    {CU_DEVICE_MAX_PITCH, 2147483647},
    {CU_DEVICE_REGISTERS_PER_BLOCK, 65536},
    {CU_DEVICE_CLOCK_RATE, 1500000},
    {CU_DEVICE_TEXTURE_ALIGNMENT, 512},
    {CU_DEVICE_MULTIPROCESSORS, 132},
    {CU_DEVICE_CAN_MAP_HOST, 1},
    {CU_DEVICE_CONCURRENT_KERNELS, 1},
    {CU_DEVICE_L2_BYTES, 52428800},
    {CU_DEVICE_THREADS_PER_MULTIPROCESSOR, 2048},
    {CU_DEVICE_ASYNC_ENGINES, 3},
    {CU_DEVICE_UNIFIED_ADDRESSING, 1},
    {CU_DEVICE_MAJOR, 9},
    {CU_DEVICE_STREAM_PRIORITIES, 1},
    {CU_DEVICE_SHARED_PER_MULTIPROCESSOR, 233472},
    {CU_DEVICE_REGISTERS_PER_MULTIPROCESSOR, 65536},
    {CU_DEVICE_COOPERATIVE_LAUNCH, 1},
    {CU_DEVICE_SHARED_PER_BLOCK_OPTIN, 232448},
    {CU_DEVICE_HOST_REGISTER, 1},
    {CU_DEVICE_MANAGED_MEMORY, 1},
    {CU_DEVICE_CONCURRENT_MANAGED, 1},
    {CU_DEVICE_VMM, 1},
    {CU_DEVICE_HANDLE_POSIX_FD, 1},
    {CU_DEVICE_BLOCKS_PER_MULTIPROCESSOR, 32},
    {CU_DEVICE_RESERVED_SHARED_PER_BLOCK, 1024},
    {CU_DEVICE_MEMORY_POOLS, 1},
    {CU_DEVICE_CLUSTER_LAUNCH, 1},
    {CU_DEVICE_UNIFIED_FUNCTION_POINTERS, 1},
};

int fake_attribute(int attribute, CUdevice device) {
    if (attribute == CU_DEVICE_PCI_BUS)
        return device + 1;
    for (size_t i = 0; i < sizeof ATTRIBUTES / sizeof *ATTRIBUTES; i++)
        if (ATTRIBUTES[i].attribute == attribute)
            return ATTRIBUTES[i].value;
    return 0;
}

CUresult cuDeviceGetAttribute(int32_t *value, int32_t attribute, CUdevice device) {
    int error = fake_device(device);
    if (error || !value || attribute < 1 || attribute > 160)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    *value = fake_attribute(attribute, device);
    return CUDA_SUCCESS;
}

CUresult cuDeviceComputeCapability(int32_t *major, int32_t *minor, CUdevice device) {
    int error = fake_device(device);
    if (error || !major || !minor)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    *major = fake_attribute(CU_DEVICE_MAJOR, device);
    *minor = fake_attribute(CU_DEVICE_MINOR, device);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char *id, int32_t room, CUdevice device) {
    int error = fake_device(device);
    if (error || !id || room < 13)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    snprintf(id, (size_t)room, "0000:%02x:00.0", device + 1);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *id) {
    int bus = 0;
    if (!device || !id || sscanf(id, "%*x:%x:", (unsigned *)&bus) != 1)
        return CUDA_ERROR_INVALID_VALUE;
    return cuDeviceGet(device, bus - 1);
}

int fake_can_reach(int device, int owner) { return device == owner || fake_number("FAKE_PEERS", 1) != 0; }

CUresult cuDeviceCanAccessPeer(int32_t *can, CUdevice device, CUdevice other) {
    int error = fake_device(device) ? fake_device(device) : fake_device(other);
    if (!error && can)
        *can = device != other && fake_can_reach(device, other);
    return error ? error : can ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDeviceGetP2PAttribute(int32_t *value, int32_t attribute, CUdevice device, CUdevice other) {
    int error = attribute < 1 || attribute > 5 ? CUDA_ERROR_INVALID_VALUE : cuDeviceCanAccessPeer(value, device, other);
    if (!error && attribute == CU_P2P_RANK)
        *value = 0;
    return error;
}

/* -- contexts ------------------------------------------------------------------------------------------------------ */

static int is_context(CUcontext context) { return context >= fake_contexts && context < fake_contexts + devices; }

int fake_need(CUcontext *context) {
    if (!initialized || forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    *context = top ? stack[top - 1] : NULL;
    if (!*context)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!__atomic_load_n(&(*context)->retained, __ATOMIC_ACQUIRE))
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    return __atomic_load_n(&(*context)->sticky, __ATOMIC_ACQUIRE);
}

static _Atomic unsigned enabled[FAKE_MOST_DEVICES]; /* by device: bits of the devices that its kernels may access */

int fake_may_reach(int device, int owner) { return device == owner || (enabled[device] >> owner & 1); }

CUresult cuCtxEnablePeerAccess(CUcontext other, uint32_t flags) {
    CUcontext context;
    int error = fake_need(&context);
    if (error || flags)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    if (!is_context(other) || other == context || !other->retained)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!fake_can_reach(context->device, other->device))
        return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    unsigned bit = 1u << other->device;
    if (enabled[context->device] & bit)
        return CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    enabled[context->device] |= bit;
    return CUDA_SUCCESS;
}

CUresult cuCtxDisablePeerAccess(CUcontext other) {
    CUcontext context;
    int error = fake_need(&context);
    if (error || !is_context(other))
        return error ? error : CUDA_ERROR_INVALID_CONTEXT;
    unsigned bit = 1u << other->device;
    if (!(enabled[context->device] & bit))
        return CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
    enabled[context->device] &= ~bit;
    return CUDA_SUCCESS;
}

void fake_end_life(CUcontext context) {
    context->life++;
    enabled[context->device] = 0;
    for (int i = 0; i < FAKE_MOST_DEVICES; i++)
        enabled[i] &= ~(1u << context->device);
    context->sticky = 0;
    context->nprinted = 0;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    int error = fake_device(device);
    if (error || !context)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_lock);
    *context = &fake_contexts[device];
    (*context)->retained++;
    pthread_mutex_unlock(&fake_lock);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, uint32_t *flags, int32_t *active) {
    int error = fake_device(device);
    if (error || !flags || !active)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    *flags = fake_contexts[device].flags;
    *active = fake_contexts[device].retained > 0;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, uint32_t flags) {
    int error = fake_device(device);
    if (!error)
        fake_contexts[device].flags = flags;
    return error;
}

static void free_stack(void *unused) {
    (void)unused;
    free(stack);
    stack = NULL;
    top = stack_size = 0;
}

static void make_stack_key(void) { pthread_key_create(&stack_key, free_stack); }

static void push(CUcontext context) {
    if (top == stack_size) {
        stack_size = stack_size ? 2 * stack_size : 8;
        stack = realloc(stack, (size_t)stack_size * sizeof *stack);
        if (!stack || pthread_once(&stack_once, make_stack_key) || pthread_setspecific(stack_key, stack))
            abort();
    }
    stack[top++] = context;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    if (!initialized || forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    usleep((useconds_t)fake_number("FAKE_CURRENT_US", 0));
    if (context && !is_context(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (top)
        top--;
    if (context)
        push(context);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    if (!initialized || forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!context)
        return CUDA_ERROR_INVALID_VALUE;
    *context = top ? stack[top - 1] : NULL;
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    if (!initialized || forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!is_context(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    push(context);
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    if (!initialized || forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!top)
        return CUDA_ERROR_INVALID_CONTEXT;
    top--;
    if (context)
        *context = stack[top];
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) { return cuCtxGetDevice_v2(device, top ? stack[top - 1] : NULL); }

CUresult cuCtxGetDevice_v2(CUdevice *device, CUcontext context) {
    if (!initialized || forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    context = context ? context : top ? stack[top - 1] : NULL;
    if (!device || !is_context(context))
        return device ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_INVALID_VALUE;
    *device = context->device;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetFlags(uint32_t *flags) {
    CUcontext context;
    int error = fake_need(&context);
    if (!error && flags)
        *flags = context->flags;
    return error ? error : flags ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuCtxGetId(CUcontext context, uint64_t *id) {
    context = context ? context : top ? stack[top - 1] : NULL;
    if (!id || !is_context(context))
        return id ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_INVALID_VALUE;
    *id = (uint64_t)context->device + ((uint64_t)context->life << 32);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetApiVersion(CUcontext context, uint32_t *version) {
    if (!version || (context && !is_context(context)))
        return CUDA_ERROR_INVALID_CONTEXT;
    *version = 3020;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int32_t *least, int32_t *greatest) {
    CUcontext context;
    int error = fake_need(&context);
    if (error)
        return error;
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t *value, int32_t limit) {
    CUcontext context;
    int error = fake_need(&context);
    if (error || !value || limit < 0)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    if (limit >= CU_LIMITS)
        return CUDA_ERROR_UNSUPPORTED_LIMIT;
    *value = context->limits[limit];
    return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(int32_t limit, size_t value) {
    CUcontext context;
    int error = fake_need(&context);
    if (error || limit < 0)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    if (limit >= CU_LIMITS)
        return CUDA_ERROR_UNSUPPORTED_LIMIT;
    context->limits[limit] = value;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCacheConfig(int32_t *config) {
    CUcontext context;
    int error = fake_need(&context);
    if (!error && config)
        *config = context->cache;
    return error ? error : config ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuCtxSetCacheConfig(int32_t config) {
    CUcontext context;
    int error = fake_need(&context);
    if (!error && config >= 0 && config <= 3)
        context->cache = config;
    return error ? error : config >= 0 && config <= 3 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuCtxGetSharedMemConfig(int32_t *config) {
    CUcontext context;
    int error = fake_need(&context);
    if (!error && config)
        *config = context->shared_size;
    return error ? error : config ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuCtxSetSharedMemConfig(int32_t config) {
    CUcontext context;
    int error = fake_need(&context);
    if (!error)
        context->shared_size = config;
    return error;
}

CUresult cuCtxResetPersistingL2Cache(void) {
    CUcontext context;
    return fake_need(&context);
}

CUresult cuProfilerStart(void) {
    CUcontext context;
    return fake_need(&context);
}

CUresult cuProfilerStop(void) {
    CUcontext context;
    return fake_need(&context);
}
