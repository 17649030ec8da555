// The program around a CUDA C++ kernel that makes its workers. program.py fills in what stands in braces,
// and puts the program in its place.
typedef unsigned long long ww_word;
static __device__ __forceinline__ unsigned ww_own_block() { return blockIdx.x; }
static __device__ __forceinline__ unsigned ww_thread() {
    return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}
// each warp has a place for its block; 512 bytes, so that arrays behind it are aligned as without it
struct __align__(128) ww_shared {
    uint3 block[32];
    uint3 grid;
    long long claimed;
};
// a function has it, because a program may have no shared variable outside of one
static __device__ __forceinline__ ww_shared *ww_slots() {
    __shared__ ww_shared slots;
    return &slots;
}
static __device__ __forceinline__ uint3 ww_block_index() { return ww_slots()->block[ww_thread() >> 5]; }
static __device__ __forceinline__ dim3 ww_grid_dim() {
    const uint3 grid = ww_slots()->grid;
    return dim3(grid.x, grid.y, grid.z);
}
#undef __global__
#undef __launch_bounds__
#undef __maxnreg__
#undef __grid_constant__
#define __global__ __device__ __forceinline__
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __grid_constant__
#define blockIdx (::ww_block_index())
#define gridDim (::ww_grid_dim())
#line 1 "{name}.cu"
/* the program */
#undef blockIdx
#undef gridDim
#undef __global__
#define __global__ __attribute__((global))
#line 1 "warpwell.cu"
enum { WW_STOP, WW_TARGET, WW_FLOOR, WW_MIRROR, WW_CURSOR, WW_DONE, WW_BEGUN, WW_LEFT };

static __device__ __forceinline__ void ww_load_pair(long long ww_address, long long *ww_one, long long *ww_other) {
    asm volatile("ld.relaxed.gpu.global.v2.s64 {%0, %1}, [%2];"
                 : "=l"(*ww_one), "=l"(*ww_other)
                 : "l"(ww_address)
                 : "memory");
}

static __device__ __forceinline__ void ww_tell(long long ww_mirror, long long ww_value) {
    asm volatile("st.relaxed.sys.global.s64 [%0], %1;" ::"l"(ww_mirror & -64), "l"(ww_value) : "memory");
}

static __device__ __forceinline__ long long ww_add(long long ww_control, int ww_at, long long ww_value) {
    return (long long)atomicAdd((ww_word *)ww_control + ww_at, (ww_word)ww_value);
}

static __device__ __forceinline__ void ww_set_grid(long long ww_x, long long ww_y, long long ww_z) {
    if (ww_thread() == 0)
        ww_slots()->grid = make_uint3((unsigned)ww_x, (unsigned)ww_y, (unsigned)ww_z);
}

// every lane of a warp comes here
static __device__ __forceinline__ void ww_set_block(unsigned ww_number, unsigned ww_x, unsigned ww_y, unsigned ww_z) {
    uint3 ww_place = make_uint3(ww_number, 0, 0);
    if (ww_y * ww_z != 1) {
        const unsigned ww_row = ww_number / ww_x;
        ww_place = make_uint3(ww_number - ww_row * ww_x, ww_row % ww_y, ww_row / ww_y);
    }
    ww_slots()->block[ww_thread() >> 5] = ww_place;
    __syncwarp();
}

// What the flags say is looked at first, so whatever is claimed is run. Every thread of a block comes here.
static __device__ __forceinline__ long long ww_claim(long long ww_control, long long ww_worker, long long ww_chunk,
                                                     long long ww_ended) {
    __syncthreads(); // the blocks before have ended, for all threads
    if (ww_thread() == 0) {
        long long ww_stop, ww_target, ww_floor, ww_mirror, ww_before = 0, ww_first = -1;
        if (ww_ended != 0)
            ww_before = ww_add(ww_control, WW_DONE, ww_ended);
        ww_load_pair(ww_control + 8 * WW_STOP, &ww_stop, &ww_target);
        ww_load_pair(ww_control + 8 * WW_FLOOR, &ww_floor, &ww_mirror);
        if (ww_stop <= ww_worker && ww_floor <= ww_worker && ww_worker < ww_target)
            ww_first = ww_add(ww_control, WW_CURSOR, ww_chunk);
        ww_slots()->claimed = ww_first;
        const int ww_often = (int)(ww_mirror & 63);
        if (ww_mirror != 0 && ww_before >> ww_often != (ww_before + ww_ended) >> ww_often)
            ww_tell(ww_mirror, ww_before + ww_ended);
    }
    __syncthreads();
    return ww_slots()->claimed;
}

static __device__ __forceinline__ void ww_count(long long ww_control, int ww_at) {
    if (ww_thread() == 0)
        ww_add(ww_control, ww_at, 1);
}

extern "C" __global__ void ww_workers_{name}(long long ww_control, long long ww_base, long long ww_chunk,
                                             long long ww_blocks, long long ww_period, long long ww_x, long long ww_y,
                                             long long ww_z{parameters}) {
    const long long ww_worker = ww_base + ww_own_block();
    long long ww_ended = 0, ww_first = 0, ww_last = 0, ww_next = 0;
    unsigned ww_number = 0;
    ww_set_grid(ww_x, ww_y, ww_z);
    ww_count(ww_control, WW_BEGUN);
    // Never taken. A loop with two entries is none to a compiler, which so moves nothing of the kernel before it: a
    // product that was moved would be rounded by itself, where the kernel as it is adds to it in one step.
    if (ww_chunk < 1)
        goto ww_behind;
ww_more:
    ww_first = ww_claim(ww_control, ww_worker, ww_chunk, ww_ended);
    if (ww_first < 0 || ww_first >= ww_blocks)
        goto ww_leave;
    ww_last = ww_first + ww_chunk < ww_blocks ? ww_first + ww_chunk : ww_blocks;
    ww_next = ww_first;
    ww_number = (unsigned)(ww_first < ww_period ? ww_first : ww_first % ww_period);
ww_block:
    ww_set_block(ww_number, (unsigned)ww_x, (unsigned)ww_y, (unsigned)ww_z);
    ::{name}({arguments});
ww_behind:
    ++ww_next;
    ww_number = ww_number + 1 == (unsigned)ww_period ? 0 : ww_number + 1;
    if (ww_next < ww_last) {
        __syncthreads(); // the next block may use the memory that this one shares
        goto ww_block;
    }
    ww_ended = ww_last - ww_first;
    goto ww_more;
ww_leave:
    ww_count(ww_control, WW_LEFT);
}
