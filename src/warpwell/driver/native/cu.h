/* Types, numbers and layouts of the CUDA driver API for layer, worker, runtime and pass-through driver, written without
 * NVIDIA's headers.
 *
 * Only the library that has created a handle dereferences it. Device addresses are 64-bit numbers. Enumerations are
 * ints. Other structs, numbers, codes (CUDA_ERROR_...) and prototypes are generated from driver_calls.txt:
 * gen_structs.h, gen_numbers.h, and gen_calls.h, which includes this file.
 */
#ifndef WW_CU_H
#define WW_CU_H

#include "gen_numbers.h"
#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUlib_st *CUlibrary;
typedef struct CUfunc_st *CUfunction;
typedef struct CUkern_st *CUkernel;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;

/* Stream handles that name no object: the legacy stream, and the default stream of the calling thread. */
#define CU_STREAM_LEGACY ((CUstream)1)
#define CU_STREAM_PER_THREAD ((CUstream)2)

/* Keys in the list `extra` of a launch: a buffer of packed parameters and its size, instead of kernelParams. */
#define CU_LAUNCH_END ((void *)0)
#define CU_LAUNCH_BUFFER ((void *)1)
#define CU_LAUNCH_BUFFER_SIZE ((void *)2)

struct cu_launch_attribute {
    uint32_t id, pad;
    union {
        unsigned char bytes[64];
        uint64_t align;
        int32_t number; /* cooperative, priority, serialization, policy */
        uint32_t cluster[3];
    } value;
};

struct cu_shape {
    uint32_t grid[3], block[3], shared;
};

/* Members for a launch's shape: grid, block, shared, and `shape` to assign all three. */
#define CU_SHAPE                                                                                                       \
    union {                                                                                                            \
        struct {                                                                                                       \
            uint32_t grid[3], block[3], shared;                                                                        \
        };                                                                                                             \
        struct cu_shape shape;                                                                                         \
    }

_Static_assert(sizeof(struct cu_launch_attribute) == 72, "layout");

#include "gen_structs.h"

struct cu_node_params {
    int32_t type, reserved[3];
    union {
        unsigned char bytes[232];
        struct cu_node_kernel kernel;
        struct cu_node_copy copy;
        struct cu_node_set set;
        struct cu_node_host host;
        void *graph;
        CUevent event;
        struct cu_node_alloc alloc;
        CUdeviceptr memory;
        struct cu_node_condition condition;
    } of;
    int64_t more;
};

_Static_assert(sizeof(struct cu_node_params) == 256, "layout");

#endif
