/* Launches, attributes of kernels, occupancy. See runtime.h. */
#include "runtime.h"

#include <stdatomic.h>
#include <string.h>

#define PENDING_MOST 32 /* maximum depth of launches with arguments that launch kernels themselves */
#define CACHED 16

struct shape {
    struct cuda_dim3 grid, block;
    size_t shared;
    CUstream stream;
};

static _Thread_local struct {
    struct shape at[PENDING_MOST];
    unsigned n;
} pending;

/* Number of changes to attributes of kernels. Each change invalidates cached occupancies. */
static _Atomic uint64_t changes;

/* -- launches ------------------------------------------------------------------------------------------------------ */

CUDART_API int __cudaPushCallConfiguration(struct cuda_dim3 grid, struct cuda_dim3 block, size_t shared,
                                           CUstream stream) {
    if (pending.n == PENDING_MOST)
        return rt_result(CUDA_ERROR_OUT_OF_MEMORY);
    pending.at[pending.n++] = (struct shape){grid, block, shared, stream};
    return 0;
}

CUDART_API int __cudaPopCallConfiguration(void *grid, void *block, size_t *shared, void *stream) {
    if (!pending.n)
        return rt_result(RT_CONFIGURATION);
    const struct shape *s = &pending.at[--pending.n];
    memcpy(grid, &s->grid, sizeof s->grid);
    memcpy(block, &s->block, sizeof s->block);
    *shared = s->shared;
    memcpy(stream, &s->stream, sizeof s->stream);
    return 0;
}

/* An empty grid is an invalid configuration in release 12, and an invalid value in release 13 (H200, driver 13.0). */
static bool is_bad_grid(uint32_t n, int most) { return n > (uint32_t)most || (!n && CUDART_MAJOR == 12); }

/* Return true if a grid or block exceeds the device's limits. The driver has the same error for other invalid
 * arguments.
 */
static bool is_bad_shape(const uint32_t *grid, const uint32_t *block) {
    int device, most[6], threads;
    if (cuCtxGetDevice(&device) || cuDeviceGetAttribute(&threads, CU_DEVICE_MAX_THREADS_PER_BLOCK, device))
        return false;
    for (int i = 0; i < 3; i++) {
        if (cuDeviceGetAttribute(&most[i], CU_DEVICE_MAX_GRID_X + i, device) ||
            cuDeviceGetAttribute(&most[3 + i], CU_DEVICE_MAX_BLOCK_X + i, device))
            return false;
        if (is_bad_grid(grid[i], most[i]) || !block[i] || block[i] > (uint32_t)most[3 + i])
            return true;
    }
    return (uint64_t)block[0] * block[1] * block[2] > (uint64_t)threads;
}

static int launched(int error, const uint32_t *grid, const uint32_t *block) {
    if (__builtin_expect(error == CUDA_ERROR_INVALID_VALUE, 0) && is_bad_shape(grid, block))
        error = RT_CONFIGURATION;
    return rt_result(error);
}

CUDART_API int __cudaLaunchKernel(CUkernel kernel, struct cuda_dim3 grid, struct cuda_dim3 block, void **arguments,
                                  size_t shared, CUstream stream) {
    int error = rt_enter();
    if (!error && !kernel) /* __cudaGetKernel failed, and recorded why */
        return cudaPeekAtLastError() ? cudaPeekAtLastError() : rt_result(RT_FUNCTION);
    if (!error && shared > UINT32_MAX)
        error = CUDA_ERROR_INVALID_VALUE;
    if (!error)
        error = cuLaunchKernel((CUfunction)(void *)kernel, grid.x, grid.y, grid.z, block.x, block.y, block.z,
                               (unsigned)shared, stream, arguments, NULL);
    return launched(error, &grid.x, &block.x);
}

CUDART_API int cudaLaunchKernel(const void *function, struct cuda_dim3 grid, struct cuda_dim3 block, void **arguments,
                                size_t shared, CUstream stream) {
    CUkernel kernel;
    int error = rt_enter();
    if (error || (error = rt_kernel(function, &kernel)))
        return rt_result(error);
    return __cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

CUDART_API int cudaLaunchCooperativeKernel(const void *function, struct cuda_dim3 grid, struct cuda_dim3 block,
                                           void **arguments, size_t shared, CUstream stream) {
    CUkernel kernel;
    int error = rt_enter();
    if (!error && shared > UINT32_MAX)
        error = CUDA_ERROR_INVALID_VALUE;
    if (!error && !(error = rt_kernel(function, &kernel)))
        error = cuLaunchCooperativeKernel((CUfunction)(void *)kernel, grid.x, grid.y, grid.z, block.x, block.y, block.z,
                                          (unsigned)shared, stream, arguments);
    return launched(error, &grid.x, &block.x);
}

struct launch_config { /* as struct cu_launch_config, but with 64 bits for `shared` */
    struct cuda_dim3 grid, block;
    size_t shared;
    CUstream stream;
    void *attributes;
    uint32_t nattributes;
};

_Static_assert(sizeof(struct launch_config) == sizeof(struct cu_launch_config) &&
                   offsetof(struct launch_config, stream) == offsetof(struct cu_launch_config, stream),
               "layout");

int rt_config(const void *config, struct cu_launch_config *to, int per_thread) {
    const struct launch_config *from = config;
    if (!from || from->shared > UINT32_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(to, from, sizeof *to);
    if (per_thread && !to->stream)
        to->stream = CU_STREAM_PER_THREAD;
    return 0;
}

int rt_cudaLaunchKernelExC(void *config, const void *function, void **arguments, int per_thread) {
    struct cu_launch_config c;
    CUkernel kernel;
    int error = rt_enter();
    if (error || (error = rt_config(config, &c, per_thread)) || (error = rt_kernel(function, &kernel)))
        return rt_result(error);
    return launched(cuLaunchKernelEx(&c, (CUfunction)(void *)kernel, arguments, NULL), c.grid, c.block);
}

/* -- kernels ------------------------------------------------------------------------------------------------------- */

/* Enter a context, and get the kernel of a host function and the current device. */
static int enter_kernel(const void *function, CUkernel *kernel, int *device) {
    int error = rt_enter();
    return error || (error = rt_kernel(function, kernel)) ? error : cuCtxGetDevice(device);
}

struct function_attributes {
    size_t shared, constant, local;
    int32_t threads, registers, ptx, binary, cache, dynamic, carveout, cluster_must, cluster[3], policy, nonportable;
    int32_t reserved[16];
};

_Static_assert(sizeof(struct function_attributes) == 144, "layout");

CUDART_API int cudaFuncGetAttributes(void *attributes, const void *function) {
    struct function_attributes *a = attributes;
    CUkernel kernel;
    int device, bytes[3], error = a ? enter_kernel(function, &kernel, &device) : CUDA_ERROR_INVALID_VALUE;
    if (error)
        return rt_result(error);
    memset(a, 0, sizeof *a);
    int32_t *const to[] = {&a->threads,    &bytes[0],      &bytes[1],        &bytes[2],
                           &a->registers,  &a->ptx,        &a->binary,       &a->cache,
                           &a->dynamic,    &a->carveout,   &a->cluster_must, &a->cluster[0],
                           &a->cluster[1], &a->cluster[2], &a->nonportable,  &a->policy};
    for (int i = 0; i < (int)(sizeof to / sizeof *to); i++) {
        error = cuKernelGetAttribute(to[i], i, kernel, device);
        if (error && i <= CU_FUNC_SHARED_CARVEOUT) /* older drivers lack later attributes */
            return rt_result(error);
    }
    a->shared = (size_t)bytes[0];
    a->constant = (size_t)bytes[1];
    a->local = (size_t)bytes[2];
    return 0;
}

CUDART_API int cudaFuncSetAttribute(const void *function, int attribute, int value) {
    CUkernel kernel;
    int device, error = enter_kernel(function, &kernel, &device);
    atomic_fetch_add(&changes, 1);
    return rt_result(error ? error : cuKernelSetAttribute(attribute, value, kernel, device));
}

/* Only check the arguments: supported GPUs have banks of shared memory of one width. */
CUDART_API int cudaFuncSetSharedMemConfig(const void *function, int config) {
    CUkernel kernel;
    int device, error = enter_kernel(function, &kernel, &device);
    return rt_result(error ? error : config < 0 || config > 2 ? CUDA_ERROR_INVALID_VALUE : 0);
}

CUDART_API int cudaFuncGetName(const char **name, const void *function) {
    CUkernel kernel;
    int device, error = name ? enter_kernel(function, &kernel, &device) : CUDA_ERROR_INVALID_VALUE;
    if (error)
        return rt_result(error);
    *name = rt_kernel_name(function);
    return *name ? 0 : rt_result(cuKernelGetName(name, kernel));
}

CUDART_API int cudaLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
    int error = rt_enter();
    if (!error && !(error = cuLibraryGetKernel(kernel, library, name)))
        error = rt_add_kernel(*kernel);
    return rt_result(error);
}

CUDART_API int cudaLibraryEnumerateKernels(CUkernel *kernels, uint32_t most, CUlibrary library) {
    unsigned count = 0;
    int error = rt_enter();
    if (!error && !(error = cuLibraryGetKernelCount(&count, library)))
        error = cuLibraryEnumerateKernels(kernels, most, library);
    for (unsigned i = 0; i < count && i < most && !error; i++)
        error = rt_add_kernel(kernels[i]);
    return rt_result(error);
}

/* -- occupancy ----------------------------------------------------------------------------------------------------- */

/* Answers are cached, because programs call this before every launch, and with the layer each query of the driver takes
 * a message. */
CUDART_API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads,
                                                                      size_t shared, uint32_t flags) {
    static _Thread_local struct {
        uint64_t generation, changes;
        const void *function;
        size_t shared;
        uint32_t flags;
        int device, threads, blocks;
    } cache[CACHED];
    int device, error = rt_enter();
    CUkernel kernel;
    CUfunction f;
    if (error || !blocks || (error = cuCtxGetDevice(&device)))
        return rt_result(error ? error : CUDA_ERROR_INVALID_VALUE);
    size_t i = ((uintptr_t)function / 16 + shared + (unsigned)threads / 32 + flags) % CACHED;
    uint64_t generation = rt_generation(), changed = atomic_load(&changes);
    if (cache[i].generation == generation && cache[i].changes == changed && cache[i].function == function &&
        cache[i].shared == shared && cache[i].flags == flags && cache[i].device == device &&
        cache[i].threads == threads) {
        *blocks = cache[i].blocks;
        return 0;
    }
    if ((error = rt_kernel(function, &kernel)) || (error = cuKernelGetFunction(&f, kernel)) ||
        (error = cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, f, threads, shared, flags)))
        return rt_result(error);
    cache[i].generation = generation, cache[i].changes = changed;
    cache[i].function = function, cache[i].shared = shared, cache[i].flags = flags;
    cache[i].device = device, cache[i].threads = threads, cache[i].blocks = *blocks;
    return 0;
}

CUDART_API int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads,
                                                             size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared, 0);
}
