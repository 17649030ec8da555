// A second file with device code: nvcc links both, with -rdc=true.
#include <cuda_runtime.h>

extern __device__ unsigned factor; // core.cu

__device__ unsigned own = 77;

extern "C" __global__ void fill(unsigned *to, unsigned long long count, unsigned value);

void fill_elsewhere(unsigned *to, unsigned long long count, unsigned value) { fill<<<1, 32>>>(to, count, value); }

unsigned elsewhere() {
    unsigned value = 0;
    return cudaMemcpyFromSymbol(&value, own, sizeof value) == cudaSuccess ? value : 0;
}
