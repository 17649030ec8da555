/* The CUDA runtime library over public functions of the driver: interfaces between its files.
 *
 * One source serves releases 12 and 13: CUDART_MAJOR is the release. Levels, each of which calls only those in front of
 * it: state (start, contexts, errors), register (code of the program), launch, memory, device, graph. Forwards,
 * variants for per-thread streams and refusals are generated, see runtime.py.
 *
 * Handles are the driver's own. Error codes are the driver's, except where the runtime has its own: RT_...
 */
#ifndef WW_RUNTIME_H
#define WW_RUNTIME_H

#include "gen_calls.h"

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define CUDART_API __attribute__((visibility("default")))

struct cuda_dim3 {
    uint32_t x, y, z;
};

struct cuda_extent {
    size_t width, height, depth;
};

struct cuda_pitched {
    void *base;
    size_t pitch, width, height;
};

#if CUDART_MAJOR == 12
#include "gen_runtime_12.h"
#define CUDART_V2(name) name##_v2
#define RT_VERSION 12090
#else
#include "gen_runtime_13.h"
#define CUDART_V2(name) name
#define RT_VERSION 13000
#endif

enum rt_code {
    RT_INITIALIZATION = 3, /* in a forked child */
    RT_UNLOADING = 4,
    RT_CONFIGURATION = 9,
    RT_PITCH = 12,
    RT_SYMBOL = 13,
    RT_DIRECTION = 21,
    RT_DRIVER = 35,
    RT_FUNCTION = 98,
};

#define RT_DEVICES 64 /* the most that a program uses */
#define RT_OLDEST_DRIVER 12000

struct rt_error {
    int code;
    const char *name, *text;
};

struct rt_property {
    uint16_t offset, nbytes, attribute; /* of the driver; ends with nbytes 0 */
};

extern const struct rt_error rt_errors[]; /* ends with a NULL name */
extern const struct rt_property rt_properties[];

/* -- runtime_state.c ----------------------------------------------------------------------------------------------- */

/* Start the driver; a code if it cannot be used (also in a forked child, and while the library is unloaded). */
int rt_start(void);
/* Start the driver. If the calling thread has no current context, make its device's current. */
int rt_enter(void);
/* Make the primary context of a device current, and keep the device for the thread. */
int rt_use_device(int device);
/* Destroy what the process has on a device; threads enter its new context at their next call. */
int rt_reset_device(int device);
/* The device of the calling thread; no context is created. */
int rt_device(int *device);
/* The primary context of a device, created if need be. */
int rt_context(int device, CUcontext *context);
/* The current context, or NULL. */
CUcontext rt_current(void);
/* A number that changes whenever a device is reset. */
uint64_t rt_generation(void);
/* Record a code that is not 0 as the thread's last error; return it. */
int rt_result(int error);
/* Name a function that is not served, once a process, on stderr: cudaErrorNotSupported, recorded. */
int rt_refuse(const char *name);
int cudaGetLastError(void);
int cudaPeekAtLastError(void);
const char *cudaGetErrorName(int code);
/* A line on stderr. */
void rt_say(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* -- runtime_register.c -------------------------------------------------------------------------------------------- */

/* The kernel behind a host function of the program, or a kernel's handle itself. */
int rt_kernel(const void *function, CUkernel *kernel);
/* Remember the handle of a kernel that the program looked up itself. */
int rt_add_kernel(CUkernel kernel);
/* The host function of a kernel; or the handle itself. */
void *rt_host_function(CUkernel kernel);
/* Name of the kernel behind a host function, or NULL. */
const char *rt_kernel_name(const void *function);
/* Address and size of a variable of the program on the current device. */
int rt_symbol(const void *symbol, CUdeviceptr *address, size_t *nbytes);

/* -- runtime_memory.c ---------------------------------------------------------------------------------------------- */

struct cuda_position {
    size_t x, y, z;
};

struct cuda_copy3 {
    void *from_array;
    struct cuda_position from_position;
    struct cuda_pitched from;
    void *to_array;
    struct cuda_position to_position;
    struct cuda_pitched to;
    struct cuda_extent extent;
    int32_t direction;
};

/* The driver's description of a box copy. */
int rt_copy3(const struct cuda_copy3 *copy, struct cu_copy3 *to);
/* Types of memory at both ends of a copy; cudaErrorInvalidMemcpyDirection for an unknown direction. */
int rt_direction(int direction, int *from, int *to);

#endif
