/* The driver's interface as layer and worker see it: types, numbers and layouts, in our own words.
 *
 * Handles are pointers that only their maker follows. Addresses on a device are 64-bit numbers. Enumerations are ints.
 * Numbers of attributes, codes (CUDA_ERROR_...) and prototypes are generated from driver_calls.txt: gen_numbers.h, and
 * gen_calls.h, which includes this file.
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

#define CU_STREAM_NON_BLOCKING 1u
#define CU_EVENT_BLOCKING_SYNC 1u
#define CU_CTX_SCHEDULE 7u /* of a context's flags: how a thread waits */
#define CU_CTX_BLOCKING_SYNC 4u
#define CU_EVENT_DISABLE_TIMING 2u
#define CU_EVENT_INTERPROCESS 4u
#define CU_GET_PROC_ADDRESS_LEGACY 1u
#define CU_GET_PROC_ADDRESS_PER_THREAD 2u /* flag: functions that are found use the thread's default stream */

/* Flags of pinned memory. */
#define CU_MEMHOST_PORTABLE 1u
#define CU_MEMHOST_DEVICEMAP 2u

/* Kinds of `extra` of a launch: one buffer of packed parameters and its size instead of kernelParams. */
#define CU_LAUNCH_END ((void *)0)
#define CU_LAUNCH_BUFFER ((void *)1)
#define CU_LAUNCH_BUFFER_SIZE ((void *)2)

struct cu_uuid {
    unsigned char bytes[16];
};

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

/* Members of a struct with a shape, which can be assigned as a whole. */
#define CU_SHAPE                                                                                                       \
    union {                                                                                                            \
        struct {                                                                                                       \
            uint32_t grid[3], block[3], shared;                                                                        \
        };                                                                                                             \
        struct cu_shape shape;                                                                                         \
    }

struct cu_launch_config {
    CU_SHAPE;
    CUstream stream;
    struct cu_launch_attribute *attributes;
    uint32_t nattributes;
};

_Static_assert(sizeof(struct cu_launch_attribute) == 72, "layout");
_Static_assert(sizeof(struct cu_launch_config) == 56 && offsetof(struct cu_launch_config, stream) == 32, "layout");

/* -- memory made by parts -------------------------------------------------------------------------------------------
 */

#define CU_MEM_PINNED 1 /* types of an allocation */
#define CU_MEM_MANAGED 2
#define CU_MEM_ON_DEVICE 1  /* kind of a location */
#define CU_MEM_READ_WRITE 3 /* access */
#define CU_MEM_GRANULARITY_MINIMUM 0
#define CU_MEM_POSIX_FD 1 /* type of a handle for other processes */
#define CU_P2P_RANK 1     /* attributes of a pair of devices */
#define CU_P2P_ACCESS 2
#define CU_P2P_ATOMICS 3

struct cu_mem_location {
    int32_t kind, id;
};

struct cu_mem_prop {
    int32_t type, handle_types;
    struct cu_mem_location location;
    void *unused;
    struct {
        uint8_t compression, rdma;
        uint16_t usage;
        uint8_t reserved[4];
    } flags;
};

struct cu_mem_access {
    struct cu_mem_location location;
    int32_t access;
};

_Static_assert(sizeof(struct cu_mem_prop) == 32 && sizeof(struct cu_mem_access) == 12, "layout");

/* -- pools ----------------------------------------------------------------------------------------------------------
 */

enum cu_location { CU_LOCATION_NONE, CU_LOCATION_DEVICE, CU_LOCATION_HOST, CU_LOCATION_NUMA, CU_LOCATION_NUMA_CURRENT };

struct cu_pool_props {
    int32_t type, handle_types;
    struct cu_mem_location location;
    void *unused;
    size_t most; /* bytes, or 0 */
    uint16_t usage;
    unsigned char reserved[54];
};

enum cu_graph_memory { CU_GRAPH_USED, CU_GRAPH_USED_HIGH, CU_GRAPH_RESERVED, CU_GRAPH_RESERVED_HIGH };

/* -- copies of rows and of boxes ------------------------------------------------------------------------------------
 */

enum cu_memory_type { CU_MEMORY_HOST = 1, CU_MEMORY_DEVICE, CU_MEMORY_ARRAY, CU_MEMORY_UNIFIED };

struct cu_end2 {
    size_t x, y; /* bytes, rows */
    int32_t type;
    const void *host;
    CUdeviceptr device;
    void *array;
    size_t pitch;
};

struct cu_copy2 {
    struct cu_end2 from, to;
    size_t width, height;
};

struct cu_end3 {
    size_t x, y, z, level;
    int32_t type;
    const void *host;
    CUdeviceptr device;
    void *array, *unused;
    size_t pitch, height;
};

struct cu_copy3 {
    struct cu_end3 from, to;
    size_t width, height, depth;
};

/* -- graphs ---------------------------------------------------------------------------------------------------------
 */

struct cu_node_kernel { /* the first version ends before `kernel` */
    CUfunction function;
    CU_SHAPE;
    void **params, **extra;
    CUkernel kernel;
    CUcontext context;
};

struct cu_node_set { /* the first version ends before `context` */
    CUdeviceptr to;
    size_t pitch;
    uint32_t value, width; /* of an element */
    size_t columns, rows;  /* elements, rows */
    CUcontext context;
};

struct cu_node_copy {
    int32_t flags, unused;
    CUcontext context;
    struct cu_copy3 copy;
};

struct cu_node_host {
    void (*run)(void *);
    void *data;
};

struct cu_node_alloc {
    struct cu_pool_props pool;
    const struct cu_mem_access *access;
    size_t naccess, nbytes;
    CUdeviceptr address; /* out */
};

struct cu_node_condition {
    uint64_t handle;
    int32_t type;  /* 0 if, 1 while, 2 switch */
    uint32_t size; /* how many graphs: if 1 or 2 (else), while 1 */
    void **graphs; /* out: an array of the node's */
    CUcontext context;
};

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

struct cu_edge {
    unsigned char from_port, to_port, type, reserved[5];
};

struct cu_instantiate {
    uint64_t flags;
    CUstream upload;
    void *node; /* out: which failed */
    int32_t result;
};

struct cu_update {
    int32_t result;
    void *node, *from;
};

#define CU_CONDITION_ASSIGN 1u /* the value at the begin of each launch is the default */
#define CU_INSTANTIATE_AUTO_FREE 1u
#define CU_INSTANTIATE_UPLOAD 2u
#define CU_INSTANTIATE_DEVICE 4u
#define CU_UPDATE_TOPOLOGY 2
#define CU_UPDATE_TYPE 3
#define CU_UPDATE_PARAMETERS 5
#define CU_UPDATE_NOT_SUPPORTED 6

enum cu_capture_mode { CU_CAPTURE_GLOBAL, CU_CAPTURE_THREAD, CU_CAPTURE_RELAXED };
enum cu_capture_status { CU_CAPTURE_NONE, CU_CAPTURE_ACTIVE, CU_CAPTURE_INVALIDATED };

_Static_assert(sizeof(struct cu_pool_props) == 88 && sizeof(struct cu_copy2) == 128 && sizeof(struct cu_copy3) == 200,
               "layout");
_Static_assert(sizeof(struct cu_node_kernel) == 72 && sizeof(struct cu_node_set) == 48, "layout");
_Static_assert(sizeof(struct cu_node_alloc) == 120 && sizeof(struct cu_node_params) == 256, "layout");
_Static_assert(sizeof(struct cu_edge) == 8 && sizeof(struct cu_instantiate) == 32 && sizeof(struct cu_update) == 24,
               "layout");

#endif
