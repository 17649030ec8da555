/* Checks of the test programs of the CUDA runtime. A failed check names its line and ends the program with status 1. */
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            printf("%s:%d: %s (last error %d)\n", __FILE__, __LINE__, #condition, (int)cudaPeekAtLastError());         \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

#define EQUAL(code, expected)                                                                                          \
    do {                                                                                                               \
        long long found_ = (long long)(code);                                                                          \
        if (found_ != (long long)(expected)) {                                                                         \
            printf("%s:%d: %s is %lld, expected %s\n", __FILE__, __LINE__, #code, found_, #expected);                  \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

#define OK(call) EQUAL(call, cudaSuccess)

typedef unsigned long long u64;

/* The stub driver computes kernels with these names. */
extern "C" __global__ void fill(unsigned *to, u64 count, unsigned value) {
    for (u64 i = threadIdx.x; i < count; i += blockDim.x)
        to[i] = value;
}

extern "C" __global__ void add(unsigned *to, const unsigned *from, u64 count) {
    for (u64 i = threadIdx.x; i < count; i += blockDim.x)
        to[i] += from[i];
}

template <typename T> __global__ void copy(T *to, const T *from, u64 nbytes) {
    for (u64 i = threadIdx.x; i < nbytes / sizeof(T); i += blockDim.x)
        to[i] = from[i];
}

extern "C" __global__ void nap(unsigned microseconds) {
    for (unsigned i = 0; i < microseconds; i++)
        __nanosleep(1000);
}

extern "C" __global__ void fault() { *(volatile int *)8 = 0; }
