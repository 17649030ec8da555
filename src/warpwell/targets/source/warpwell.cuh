// Include this file before all other text of a CUDA C++ program to let a Warpwell scheduler preempt its kernels between
// blocks. By itself it changes nothing. With WARPWELL_WORKERS, which Warpwell defines for a second compilation, kernels
// become device functions that a loop over claimed blocks calls, and blockIdx and gridDim describe the claimed block.
//
// A thread must not return before a barrier that other threads of its block reach: it would wait at the barrier of the
// loop instead.
#pragma once
#ifdef WARPWELL_WORKERS
namespace warpwell {
typedef unsigned long long word;
enum { STOP, TARGET, MIRROR, CURSOR = 4, DONE, BEGUN, LEFT };

static __device__ __forceinline__ unsigned thread_index() {
    return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}

// Each warp has an entry for its block. The size is 512 bytes, so that arrays behind it keep their alignment.
struct __align__(128) SharedState {
    uint3 block[32];
    uint3 grid;
    long long claimed;
};

// A function holds it, because a program may have no shared variable outside of one.
static __device__ __forceinline__ SharedState *shared_state() {
    __shared__ SharedState state;
    return &state;
}

static __device__ __forceinline__ uint3 block_index() { return shared_state()->block[thread_index() >> 5]; }

static __device__ __forceinline__ dim3 grid_blocks() {
    const uint3 grid = shared_state()->grid;
    return dim3(grid.x, grid.y, grid.z);
}

static __device__ __forceinline__ void load_pair(long long address, long long *first, long long *second) {
    asm volatile("ld.relaxed.gpu.global.v2.s64 {%0, %1}, [%2];"
                 : "=l"(*first), "=l"(*second)
                 : "l"(address)
                 : "memory");
}

static __device__ __forceinline__ long long load_word(long long address) {
    long long value;
    asm volatile("ld.relaxed.gpu.global.s64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

static __device__ __forceinline__ void report_progress(long long mirror, long long blocks) {
    asm volatile("st.relaxed.sys.global.s64 [%0], %1;" ::"l"(mirror & -64), "l"(blocks) : "memory");
}

static __device__ __forceinline__ long long add(long long control, int index, long long value) {
    return (long long)atomicAdd((word *)control + index, (word)value);
}

// All lanes of a warp call this.
static __device__ __forceinline__ void set_block(unsigned number, unsigned x, unsigned y, unsigned z) {
    uint3 block = make_uint3(number, 0, 0);
    if (y * z != 1) {
        const unsigned row = number / x;
        block = make_uint3(number - row * x, row % y, row / y);
    }
    shared_state()->block[thread_index() >> 5] = block;
    __syncwarp();
}

// Returns the first of `chunk` claimed blocks, or -1 if the worker must leave. All threads of a block call this. The
// flags are read before the claim, so every claimed block runs.
static __device__ __forceinline__ long long claim(long long control, long long worker, long long chunk,
                                                  long long ended) {
    __syncthreads(); // The previous blocks have ended for all threads.
    if (thread_index() == 0) {
        long long stop, target, mirror, before = 0, first = -1;
        if (ended != 0)
            before = add(control, DONE, ended);
        load_pair(control + 8 * STOP, &stop, &target);
        mirror = load_word(control + 8 * MIRROR);
        if (stop <= worker && worker < target)
            first = add(control, CURSOR, chunk);
        shared_state()->claimed = first;
        const int shift = (int)(mirror & 63);
        if (mirror != 0 && before >> shift != (before + ended) >> shift)
            report_progress(mirror, before + ended);
    }
    __syncthreads();
    return shared_state()->claimed;
}

template <class Kernel, Kernel kernel, class... Arguments>
__global__ void workers(long long control, long long base, long long chunk, long long blocks, long long x,
                        long long y, long long z, Arguments... arguments) {
    const long long worker = base + blockIdx.x;
    long long ended = 0, first = 0, last = 0, next = 0;
    unsigned number = 0;
    if (thread_index() == 0) {
        shared_state()->grid = make_uint3((unsigned)x, (unsigned)y, (unsigned)z);
        add(control, BEGUN, 1);
    }
    // Never taken. A loop with two entries is not a loop to the compiler, so it moves nothing of the kernel in front of
    // it: a product that was moved would be rounded by itself, and would not be fused with a sum as in the kernel
    // alone.
    if (chunk < 1)
        goto after_block;
claim_blocks:
    first = claim(control, worker, chunk, ended);
    if (first < 0 || first >= blocks)
        goto leave;
    last = first + chunk < blocks ? first + chunk : blocks;
    next = first;
    number = (unsigned)first;
run_block:
    set_block(number, (unsigned)x, (unsigned)y, (unsigned)z);
    kernel(arguments...);
after_block:
    ++next;
    ++number;
    if (next < last) {
        __syncthreads(); // The next block may use the shared memory of this one.
        goto run_block;
    }
    ended = last - first;
    goto claim_blocks;
leave:
    if (thread_index() == 0)
        add(control, LEFT, 1);
}

// Names the workers of a kernel by the kernel alone: `workers_of<decltype(&kernel), &kernel>::entry`.
template <class Kernel, Kernel kernel> struct workers_of;
template <class... Arguments, void (*kernel)(Arguments...)> struct workers_of<void (*)(Arguments...), kernel> {
    static constexpr void (*entry)(long long, long long, long long, long long, long long, long long, long long,
                                   Arguments...) = &workers<void (*)(Arguments...), kernel, Arguments...>;
};
} // namespace warpwell

#undef __global__
#undef __launch_bounds__
#undef __maxnreg__
#undef __grid_constant__
#define __global__ __device__ __forceinline__
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __grid_constant__
#define blockIdx (::warpwell::block_index())
#define gridDim (::warpwell::grid_blocks())
#endif
