/* Declarations of the fake driver: a CUDA driver without a GPU, for tests of layer and worker.
 *
 * It is asynchronous like a real one: each stream has a thread that runs the stream's operations in order. With a
 * FAKE_SEED other than 0, the thread waits a random short time before each operation. So data arrives late, and a
 * program that relies on an order that CUDA does not guarantee reads wrong data. If a real driver blocks its caller,
 * the fake driver also blocks, and logs the call (FAKE_BLOCKED).
 *
 * Device memory is memory of this process at the same addresses. Kernels come from text images; see fake_image.c.
 *
 * Variables, with their defaults:
 *
 *     FAKE_DEVICES 2     number of devices
 *     FAKE_MEMORY 8 GiB  bytes of each device
 *     FAKE_SEED 0        seed of the delays; 0: no delays
 *     FAKE_VERSION 13000 version of the driver
 *     FAKE_CURRENT_US 0  microseconds that cuCtxSetCurrent takes
 *     FAKE_LAUNCH_US 0   microseconds after which cuLaunchKernel enqueues
 *     FAKE_LOG           file for the names of functions that were called but that the fake does not have
 *     FAKE_FILES 1       0: memory of files cannot be registered, as on Linux for most file systems
 *     FAKE_GATES 1       0: stream memory operations are not supported
 *     FAKE_PEERS 1       0: no device can access another device's memory
 *     FAKE_WEAK 0        1: as on an H200, Async copies access pageable memory after their return, cuMemFreeHost
 *                        does not wait, and small copies from pinned memory overtake work that only the legacy stream
 *                        orders before them
 *     FAKE_BLOCKED       file for the names of calls that waited for other work, and "main" or "thread" for the caller
 *
 * Locks: `fake_lock` for all objects and queues, `fake_memory` for the table of addresses. A thread that holds
 * `fake_memory` must not take `fake_lock`; the reverse is allowed.
 */
#ifndef WW_FAKE_H
#define WW_FAKE_H

#include "gen_calls.h"

#include <pthread.h>

enum { /* numbers that gen_numbers.h does not have */
       CU_FUNC_SHARED_BYTES = 1,
       CU_FUNC_CONST_BYTES = 2,
       CU_FUNC_LOCAL_BYTES = 3,
       CU_FUNC_PTX_VERSION = 5,
       CU_FUNC_BINARY_VERSION = 6,
       CU_FUNC_ATTRIBUTES = 16, /* one more than the last */
       CU_DEVICE_MAX_BLOCK_Y = 3,
       CU_DEVICE_MAX_BLOCK_Z = 4,
       CU_DEVICE_MAX_GRID_Y = 6,
       CU_DEVICE_MAX_GRID_Z = 7,
       CU_DEVICE_SHARED_PER_BLOCK = 8,
       CU_DEVICE_CONSTANT_MEMORY = 9,
       CU_DEVICE_MAX_PITCH = 11,
       CU_DEVICE_CLOCK_RATE = 13,
       CU_DEVICE_TEXTURE_ALIGNMENT = 14,
       CU_DEVICE_CONCURRENT_KERNELS = 31,
       CU_DEVICE_PCI_BUS = 33,
       CU_DEVICE_L2_BYTES = 38,
       CU_DEVICE_THREADS_PER_MULTIPROCESSOR = 39,
       CU_DEVICE_ASYNC_ENGINES = 40,
       CU_DEVICE_UNIFIED_ADDRESSING = 41,
       CU_DEVICE_SHARED_PER_MULTIPROCESSOR = 81,
       CU_DEVICE_REGISTERS_PER_MULTIPROCESSOR = 82,
       CU_DEVICE_COOPERATIVE_LAUNCH = 95,
       CU_DEVICE_SHARED_PER_BLOCK_OPTIN = 97,
       CU_DEVICE_HOST_REGISTER = 99,
       CU_DEVICE_BLOCKS_PER_MULTIPROCESSOR = 106,
       CU_DEVICE_RESERVED_SHARED_PER_BLOCK = 111,
       CU_DEVICE_MEMORY_POOLS = 115,
       CU_DEVICE_CLUSTER_LAUNCH = 120,
       CU_LIMITS = 16,
};

#define FAKE_MOST_DEVICES 16
#define FAKE_PENDING 1000 /* maximum number of operations in a stream's queue; the next call blocks */

enum fake_kind {
    FAKE_STREAM = 0x57a1,
    FAKE_EVENT,
    FAKE_MODULE,
    FAKE_FUNCTION,
    FAKE_LIBRARY,
    FAKE_KERNEL,
    FAKE_GRAPH,
    FAKE_NODE,
    FAKE_EXEC
};

struct fake_object { /* first member of each object that a handle points to */
    enum fake_kind kind;
    struct CUctx_st *context;
    unsigned life; /* `life` of the context when the object was made: a reset invalidates objects */
};

struct CUctx_st {
    int device, retained;
    unsigned flags, life;
    int sticky;    /* 0, or the error that every call returns */
    uint64_t used; /* bytes of device memory */
    size_t limits[CU_LIMITS];
    int cache, shared_size; /* configurations */
    struct CUstream_st *legacy, *streams;
    char *printed; /* output of kernels since the last synchronization */
    size_t nprinted;
};

/* One operation of a stream. A waiting thread holds a reference. */
struct fake_op {
    int refs, done;
    double time;                    /* when it was done, in seconds */
    int (*run)(struct fake_op *op); /* CUresult; not 0: the context is lost */
    CUcontext context;
    unsigned life;
    struct fake_op *next, **after; /* next in the queue; operations that must be done before this one runs */
    size_t nafter;
    uint64_t to, from, size; /* of copies, memsets, frees */
    uint32_t value, width;
    void *data; /* freed with the operation */
    CUfunction function;
    size_t nparams;
};

struct CUstream_st {
    struct fake_object object;
    unsigned flags;
    int priority, started, destroyed;
    uint64_t id, random;
    struct fake_op *head, *tail, *last; /* last: the newest operation, which may be done */
    size_t pending;
    pthread_cond_t work;
    struct fake_graph *graph;                                       /* that it captures into, see fake_graph.c: .. */
    void (*record)(struct CUstream_st *stream, struct fake_op *op); /* .. adds a node to it; lock held */
    struct fake_node *recorded;                                     /* node captured last */
    int captures_globally;
    struct CUstream_st *next; /* in the context's list */
};

struct CUevent_st {
    struct fake_object object;
    unsigned flags;
    struct fake_op *last; /* its last record, or NULL */
};

extern pthread_mutex_t fake_lock;
extern pthread_cond_t fake_moved;
extern pthread_rwlock_t fake_memory;
extern struct CUctx_st fake_contexts[FAKE_MOST_DEVICES];

/* -- fake.c -------------------------------------------------------------------------------------------------------- */

/* Log a call that the fake does not have. Return NOT_SUPPORTED. */
int fake_absent(const char *symbol);
/* Get the calling thread's context, or return the code that its call must return. */
int fake_need(CUcontext *context);

static inline int leave(int error) {
    pthread_mutex_unlock(&fake_lock);
    return error;
}

/* Do the same as fake_need, and without an error take fake_lock, which `leave` releases. Check `sticky` again under the
 * lock: a kernel may have lost the context since. */
static inline int enter(CUcontext *context) {
    int error = fake_need(context);
    if (error)
        return error;
    pthread_mutex_lock(&fake_lock);
    return (*context)->sticky ? leave((*context)->sticky) : CUDA_SUCCESS;
}

/* Log that the call `symbol` waits for other work. */
void fake_blocks(const char *symbol);
long long fake_number(const char *variable, long long otherwise);
int fake_device(CUdevice device);
int fake_attribute(int attribute, CUdevice device);
/* Return true if a device can get access to the owner's memory; if its kernels have access (peer access). */
int fake_can_reach(int device, int owner);
int fake_may_reach(int device, int owner);
/* Objects: one tree contains all valid handles. Call these functions with fake_lock held. */
void *fake_make(enum fake_kind kind, size_t size, CUcontext context);
int fake_valid(const void *handle, enum fake_kind kind);
void fake_drop(void *handle); /* invalidates the handle; does not free the memory */
void fake_end_life(CUcontext context);

/* -- fake_stream.c ------------------------------------------------------------------------------------------------- */

/* Find the stream that a handle means in a context, or return a code. fake_lock held. */
int fake_stream(CUstream handle, CUcontext context, CUstream *stream);
struct fake_op *fake_op(CUcontext context, int (*run)(struct fake_op *));
/* Append an operation; may wait for room in the queue. With `keep`, the caller gets a reference. fake_lock held. */
void fake_enqueue(CUstream stream, struct fake_op *op, int keep, const char *symbol);
void fake_unref(struct fake_op *op); /* lock held */
void fake_wait(struct fake_op *op);  /* lock held; drops the caller's reference */
/* Wait for all work of a context; lock held. `symbol`: log the call if there was work. */
void fake_wait_all(CUcontext context, const char *symbol);
/* Wait for a stream's work; lock held. */
void fake_wait_stream(CUstream stream, const char *symbol);
void fake_flush(CUcontext context); /* write the output of kernels to stdout */
void fake_end_streams(CUcontext context);

/* -- fake_graph.c -------------------------------------------------------------------------------------------------- */

int fake_set_condition(uint64_t handle, uint32_t value);
/* Return true if a capture forbids this thread to make calls that are unsafe during captures; lock held. */
int fake_forbids_unsafe_calls(void);

/* -- fake_memory.c ------------------------------------------------------------------------------------------------- */

/* Return true if kernels of the context may access these bytes; fake_memory held. */
int fake_reachable(CUcontext context, uint64_t address, uint64_t size);
/* Allocate device memory for a global of a module, which cuMemFree refuses to free. Return 0 if there is no room. */
uint64_t fake_allocate(CUcontext context, uint64_t size);
void fake_release(uint64_t address);
void fake_end_memory(CUcontext context);

#endif
