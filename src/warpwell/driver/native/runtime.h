/* The CUDA runtime library over public functions of the driver: interfaces between its files.
 *
 * One source serves releases 12 and 13: CUDART_MAJOR is the release. Each file calls only earlier ones in this list:
 * state (start, contexts, errors), register (code of the program), launch, memory, device, graph. Functions that only
 * call the driver, variants for per-thread streams, and refusals are generated, see runtime.py.
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

#define RT_DEVICES 64 /* maximum number of devices that a program uses */
#define RT_OLDEST_DRIVER 12000

struct rt_error {
    int code;
    const char *name, *text;
};

struct rt_property {
    uint16_t offset, nbytes, attribute; /* a field of cudaDeviceProp, and the driver's attribute with its value */
};

extern const struct rt_error rt_errors[];        /* ends with a NULL name */
extern const struct rt_property rt_properties[]; /* ends with nbytes 0 */

/* -- runtime_state.c ----------------------------------------------------------------------------------------------- */

/* Start the driver. Return an error if it cannot be used, in a forked child, and while the library is unloaded. */
int rt_start(void);
/* Start the driver. If the calling thread has no current context, make its device's current. */
int rt_enter(void);
/* Make a device the calling thread's device, and its primary context the current one. */
int rt_use_device(int device);
/* Destroy what the process has on a device; threads enter its new context at their next call. */
int rt_reset_device(int device);
/* Get the device of the calling thread, without creating a context. */
int rt_device(int *device);
/* Get the primary context of a device; create it if need be. */
int rt_context(int device, CUcontext *context);
/* Return the current context, or NULL. */
CUcontext rt_current(void);
/* Return a number that changes whenever a device is reset. */
uint64_t rt_generation(void);
/* Record an error as the thread's last error, unless it is 0, and return it. */
int rt_result(int error);
/* Report a function that is not served on stderr, once a process. Record and return cudaErrorNotSupported. */
int rt_refuse(const char *name);
int cudaGetLastError(void);
int cudaPeekAtLastError(void);
const char *cudaGetErrorName(int code);
/* Print a line on stderr. */
void rt_say(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* -- runtime_register.c -------------------------------------------------------------------------------------------- */

/* Find the kernel of a host function of the program. A handle that rt_add_kernel has stored is its own kernel. */
int rt_kernel(const void *function, CUkernel *kernel);
/* Store the handle of a kernel that the program has looked up, so that rt_kernel finds it. */
int rt_add_kernel(CUkernel kernel);
/* Return the host function of a kernel, or the kernel's handle if it has no host function. */
void *rt_host_function(CUkernel kernel);
/* Return the name of a host function's kernel, or NULL. */
const char *rt_kernel_name(const void *function);
/* Get the address and size of a variable of the program on the current device. */
int rt_symbol(const void *symbol, CUdeviceptr *address, size_t *nbytes);

/* -- runtime_launch.c ---------------------------------------------------------------------------------------------- */

/* Translate a launch configuration to the driver's struct. per_thread: 0 stands for the thread's default stream. */
int rt_config(const void *config, struct cu_launch_config *to, int per_thread);

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

/* Translate a copy of a box to the driver's struct. */
int rt_copy3(const struct cuda_copy3 *copy, struct cu_copy3 *to);
/* Describe a copy of rows. */
int rt_copy2(struct cu_copy2 *copy, void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
             size_t height, int direction);
/* Get the types of memory at both ends of a copy; cudaErrorInvalidMemcpyDirection: unknown direction. */
int rt_direction(int direction, int *from, int *to);

/* -- runtime_graph.c ----------------------------------------------------------------------------------------------- */

/* Translate the parameters of a kernel node, or of a node of any type. */
int rt_kernel_node(const void *params, struct cu_node_kernel *to);
int rt_node(const void *params, struct cu_node_params *to);
/* Describe a copy of bytes as a box. */
int rt_flat_copy(struct cu_copy3 *to, void *there, const void *here, size_t nbytes, int direction);
/* The same for a copy to (or from) a variable of the program. */
int rt_symbol_copy(struct cu_copy3 *to, const void *symbol, bool is_to, const void *other, size_t nbytes, size_t offset,
                   int direction);

#endif
