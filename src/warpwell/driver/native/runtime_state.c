/* Start of the driver, contexts of threads, errors. See runtime.h.
 *
 * Nothing happens when the library is loaded. A thread without a current context enters the primary context of its
 * device (0 until cudaSetDevice) at its first call. A context that the program made current with the driver's
 * functions stays. A reset gives up the primary context and advances `generation`, so that the other threads enter the
 * next one.
 */
#include "runtime.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#define REFUSED_NAMES 256

enum phase { IDLE, STARTED, FORKED, UNLOADED };

static _Atomic int phase;
static _Atomic uint64_t generation = 1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    CUcontext context; /* the last primary context, also after its release */
    bool is_retained;
} devices[RT_DEVICES]; /* under lock */

static _Thread_local struct {
    uint64_t generation; /* when the thread entered its context; 0: never */
    int device, last;
} mine;

/* -- start and end ------------------------------------------------------------------------------------------------- */

static void forked(void) {
    if (atomic_load(&phase) == STARTED)
        atomic_store(&phase, FORKED);
    atomic_fetch_add(&generation, 1);
}

__attribute__((constructor)) static void loaded(void) { pthread_atfork(NULL, NULL, forked); }

__attribute__((destructor)) static void unloaded(void) {
    atomic_store(&phase, UNLOADED);
    atomic_fetch_add(&generation, 1);
}

static int start(void) {
    int version = 0, error = cuInit(0);
    if (!error && !(error = cuDriverGetVersion(&version)) && version < RT_OLDEST_DRIVER)
        error = RT_DRIVER;
    int idle = IDLE;
    if (!error)
        atomic_compare_exchange_strong(&phase, &idle, STARTED);
    return error;
}

int rt_start(void) {
    switch (atomic_load_explicit(&phase, memory_order_acquire)) {
    case STARTED:
        return 0;
    case FORKED:
        return RT_INITIALIZATION;
    case UNLOADED:
        return RT_UNLOADING;
    default:
        return start();
    }
}

/* -- contexts ------------------------------------------------------------------------------------------------------ */

uint64_t rt_generation(void) { return atomic_load_explicit(&generation, memory_order_acquire); }

int rt_context(int device, CUcontext *context) {
    int count, error = rt_start();
    if (error || (error = cuDeviceGetCount(&count)))
        return error;
    if (device < 0 || device >= count || device >= RT_DEVICES)
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    if (!devices[device].is_retained && !(error = cuDevicePrimaryCtxRetain(&devices[device].context, device)))
        devices[device].is_retained = true;
    *context = devices[device].context;
    pthread_mutex_unlock(&lock);
    return error;
}

/* Return true if a context is a primary one that this library retained, perhaps before a reset. */
static bool is_ours(CUcontext context) {
    bool found = false;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < RT_DEVICES && !found; i++)
        found = devices[i].context == context;
    pthread_mutex_unlock(&lock);
    return found;
}

static int enter_device(void) {
    CUcontext context, now = NULL;
    uint64_t entered = rt_generation();
    int error = rt_start();
    if (error)
        return error;
    if (cuCtxGetCurrent(&now) || !now || is_ours(now)) {
        error = rt_context(mine.device, &context);
        if (error || (error = cuCtxSetCurrent(context)))
            return error;
    }
    mine.generation = entered;
    return 0;
}

int rt_enter(void) {
    CUcontext now;
    if (__builtin_expect(mine.generation == rt_generation() && !cuCtxGetCurrent(&now) && now, 1))
        return 0;
    return enter_device();
}

CUcontext rt_current(void) {
    CUcontext now = NULL;
    return cuCtxGetCurrent(&now) ? NULL : now;
}

int rt_use_device(int device) {
    CUcontext context;
    uint64_t entered = rt_generation();
    int error = rt_context(device, &context);
    if (error || (error = cuCtxSetCurrent(context)))
        return error;
    mine.device = device;
    mine.generation = entered;
    return 0;
}

int rt_device(int *device) {
    CUcontext now = NULL;
    int error = rt_start();
    if (error)
        return error;
    *device = mine.device;
    if (!cuCtxGetCurrent(&now) && now && !is_ours(now)) /* the program has made it current */
        error = cuCtxGetDevice(device);
    return error;
}

int rt_reset_device(int device) {
    int error = rt_start();
    if (error || (error = cuDevicePrimaryCtxReset_v2(device)))
        return error;
    pthread_mutex_lock(&lock);
    if (devices[device].is_retained)
        cuDevicePrimaryCtxRelease_v2(device);
    devices[device].is_retained = false;
    pthread_mutex_unlock(&lock);
    atomic_fetch_add(&generation, 1);
    mine.last = 0;
    return 0;
}

/* -- errors -------------------------------------------------------------------------------------------------------- */

int rt_result(int error) {
    if (__builtin_expect(error, 0))
        mine.last = error;
    return error;
}

/* Return true for errors after which the context cannot be used: they stay the last error until a reset. */
static bool is_sticky(int error) {
    return error == CUDA_ERROR_ILLEGAL_ADDRESS || error == CUDA_ERROR_LAUNCH_TIMEOUT || error == CUDA_ERROR_ASSERT ||
           error == CUDA_ERROR_ECC_UNCORRECTABLE || error == CUDA_ERROR_NVLINK_UNCORRECTABLE ||
           (error >= CUDA_ERROR_HARDWARE_STACK_ERROR && error <= CUDA_ERROR_LAUNCH_FAILED);
}

CUDART_API int cudaGetLastError(void) {
    int error = mine.last;
    if (!is_sticky(error))
        mine.last = 0;
    return error;
}

CUDART_API int cudaPeekAtLastError(void) { return mine.last; }

static const struct rt_error *error_of(int code) {
    const struct rt_error *e = rt_errors;
    while (e->name && e->code != code)
        e++;
    return e;
}

CUDART_API const char *cudaGetErrorName(int code) {
    const char *name = error_of(code)->name;
    return name ? name : "unrecognized error code";
}

CUDART_API const char *cudaGetErrorString(int code) {
    const char *text = error_of(code)->text;
    return text ? text : "unrecognized error code";
}

void rt_say(const char *format, ...) {
    char line[1024];
    va_list values;
    va_start(values, format);
    vsnprintf(line, sizeof line, format, values);
    va_end(values);
    fprintf(stderr, "warpwell: %s\n", line);
}

int rt_refuse(const char *name) {
    static const char *named[REFUSED_NAMES];
    static pthread_mutex_t naming = PTHREAD_MUTEX_INITIALIZER;
    int i = 0;
    pthread_mutex_lock(&naming);
    while (i < REFUSED_NAMES && named[i] && strcmp(named[i], name) != 0)
        i++;
    bool first = i < REFUSED_NAMES && !named[i];
    if (first)
        named[i] = name;
    pthread_mutex_unlock(&naming);
    if (first)
        rt_say("%s is not served by this CUDA runtime: cudaErrorNotSupported", name);
    return rt_result(CUDA_ERROR_NOT_SUPPORTED);
}
