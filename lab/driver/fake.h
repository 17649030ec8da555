/* Declarations of the fake driver: a CUDA driver without a GPU, for tests of layer and worker.
 *
 * It is asynchronous like a real one: each stream has a thread that runs the stream's operations in order. With a
 * FAKE_SEED other than 0, the thread waits a random short time before each operation. So data arrives late, and a
 * program that relies on an order without a guarantee reads wrong data. If a real driver blocks its caller, the fake
 * driver also blocks, and logs the call (FAKE_BLOCKED).
 *
 * Device memory is memory of this process at the same addresses. Kernels come from text images; see fake_image.c.
 *
 * Variables, with their defaults:
 *
 *     FAKE_DEVICES 2     number of devices
 *     FAKE_MEMORY 8 GiB  bytes of each device
 *     FAKE_SEED 0        seed of the delays; 0: no delays
 *     FAKE_VERSION 13000 version of the driver
 *     FAKE_LOG           file for the names of missing calls
 *     FAKE_GATES 1       0: streams do not wait at words of memory
 *     FAKE_PEERS 1       0: no device reads another's memory
 *     FAKE_WEAK 0        1: as on an H200, pageable Async copies are late, cuMemFreeHost does not wait, and small
 *                        copies from pinned memory overtake work that only the legacy stream orders before them
 *     FAKE_BLOCKED       file: a line for each call that blocked for other work, with "main" or "thread"
 *
 * Locks: `fake_lock` for all objects and queues, `fake_memory` for the table of addresses; the second may be taken
 * while the first is held, never the other way round.
 */
#ifndef WW_FAKE_H
#define WW_FAKE_H

#include "gen_calls.h"

#include <pthread.h>

enum { /* numbers of attributes that the layer does not know */
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
#define FAKE_PENDING 1000 /* operations of a stream; the next call blocks */

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
    unsigned life; /* of the context: objects of a context before its reset are invalid */
};

struct CUctx_st {
    int device, retained;
    unsigned flags, life;
    int sticky;    /* 0, or what every call returns */
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
    double time;                    /* seconds, when done */
    int (*run)(struct fake_op *op); /* CUresult; not 0: the context is lost */
    CUcontext context;
    unsigned life;
    struct fake_op *next, **after; /* in the queue; done before this may run */
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
    struct fake_op *head, *tail, *last; /* last: enqueued, perhaps done */
    size_t pending;
    pthread_cond_t work;
    struct fake_graph *graph;                                       /* it records, see fake_graph.c: .. */
    void (*record)(struct CUstream_st *stream, struct fake_op *op); /* .. takes the operation; lock held */
    struct fake_node *recorded;                                     /* last */
    int captures_globally;
    struct CUstream_st *next; /* of the context */
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

/* A call that the fake does not have: NOT_SUPPORTED. */
int fake_absent(const char *symbol);
/* The calling thread's context if it can be used, else a code. */
int fake_need(CUcontext *context);

/* The same, and take fake_lock unless a code is returned; `leave` gives it back. */
static inline int enter(CUcontext *context) {
    int error = fake_need(context);
    if (!error)
        pthread_mutex_lock(&fake_lock);
    return error;
}

static inline int leave(int error) {
    pthread_mutex_unlock(&fake_lock);
    return error;
}

/* Say that `symbol` blocks for other work. */
void fake_blocks(const char *symbol);
long long fake_number(const char *variable, long long otherwise);
int fake_device(CUdevice device);
int fake_attribute(int attribute, CUdevice device);
/* Whether a device can reach another's memory at all; whether its kernels may. */
int fake_can_reach(int device, int owner);
int fake_may_reach(int device, int owner);
/* Objects: valid handles are in one tree. All with fake_lock held. */
void *fake_make(enum fake_kind kind, size_t size, CUcontext context);
int fake_valid(const void *handle, enum fake_kind kind);
void fake_drop(void *handle); /* the handle is invalid; the memory stays */
void fake_end_life(CUcontext context);

/* -- fake_stream.c ------------------------------------------------------------------------------------------------- */

/* The stream that a handle means in the current context, or a code. fake_lock held. */
int fake_stream(CUstream handle, CUcontext context, CUstream *stream);
struct fake_op *fake_op(CUcontext context, int (*run)(struct fake_op *));
/* Append; fake_lock held. May wait for room. Returns with a reference for the caller where `keep`. */
void fake_enqueue(CUstream stream, struct fake_op *op, int keep, const char *symbol);
void fake_unref(struct fake_op *op); /* lock held */
void fake_wait(struct fake_op *op);  /* lock held; drops the caller's reference */
/* Wait for all work of a context; lock held. `symbol`: log the call if there was work. */
void fake_wait_all(CUcontext context, const char *symbol);
/* Wait for a stream's work; lock held. */
void fake_wait_stream(CUstream stream, const char *symbol);
void fake_flush(CUcontext context); /* printed text to stdout */
void fake_end_streams(CUcontext context);

/* -- fake_graph.c -------------------------------------------------------------------------------------------------- */

int fake_set_condition(uint64_t handle, uint32_t value);
/* Whether calls that are not safe during captures are an error in this thread; lock held. */
int fake_forbids_unsafe_calls(void);

/* -- fake_memory.c ------------------------------------------------------------------------------------------------- */

/* Whether a kernel of the context may touch these bytes; fake_memory held. */
int fake_reachable(CUcontext context, uint64_t address, uint64_t size);
/* Device memory for globals of modules, which is not counted as the program's. 0: no room. */
uint64_t fake_allocate(CUcontext context, uint64_t size);
void fake_release(uint64_t address);
void fake_end_memory(CUcontext context);

#endif
