/* The layer: libcuda.so.1 in a program's process. It keeps handles, addresses and errors, and posts calls to workers.
 *
 * Each file calls those above it only:
 *
 *     layer_object.c        handles and ids
 *     layer_image.c         lengths of images
 *     layer.c               state of the process: devices, the way to servers and workers, fork
 *     layer_names.c         names of errors, cuGetProcAddress, refusals
 *     layer_hold.c          streams that a host function holds
 *     layer_context.c       contexts, and the calling thread's stack of them
 *     layer_range.c         which addresses belong to whom
 *     layer_ring.c          posting, answers, places, errors
 *     layer_peer.c          what one device may do with another's memory and events
 *     layer_host.c          host functions
 *     layer_stream.c        streams and events by their ids
 *     layer_code.c          modules, libraries, functions
 *     layer_launch.c        launches
 *     layer_copy.c          copies and memsets
 *     layer_memory.c        memory on devices and pinned
 *     layer_owned.c         memory and user objects of graphs
 *     layer_graph.c         graphs, their nodes and edges
 *     layer_condition.c     graphs with conditional nodes: the worker's driver has a twin of them
 *     layer_capture.c       streams that record a graph
 *     layer_managed.c       managed memory: pinned memory that a device reaches
 *     layer_pool.c          memory pools: accounts over the device's memory
 *     layer_exec.c          executable graphs: plans, launches, updates
 *     layer_node.c          what a node does: its parameters
 *     layer_device.c        calls: cuInit, devices, primary contexts
 *     layer_stream_calls.c  .. streams and events
 *     layer_memory_calls.c  .. memory
 *     layer_work_calls.c    .. copies, memsets, launches, host functions
 *
 * Order of locks: `layer.loading` > `device.opening`, `layer.linking` > `device.post` > locks of
 * objects, ranges and host functions. No thread is made here but one for pending host functions, and threads
 * of a large pageable copy, while it is carried out. A forked child of an initialized process gets NOT_INITIALIZED
 * before any lock is taken.
 */
#ifndef WW_LAYER_H
#define WW_LAYER_H

#include "calls.h"
#include "gen_calls.h"
#include "gen_ops.h"
#include "wire.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define WW_DEVICES 64
#define WW_OBJECTS (1u << 20)

enum ww_kind {
    WW_DEAD,
    WW_STREAM = 0x5757a1,
    WW_EVENT,
    WW_MODULE,
    WW_LIBRARY,
    WW_KERNEL,
    WW_FUNCTION,
    WW_POOL,
    WW_GRAPH,
    WW_NODE,
    WW_EXEC,
    WW_USER
};

/* Target of a handle. Objects are never returned to malloc, so a stale handle is detected and does not crash. */
struct ww_object {
    _Atomic uint32_t kind;
    uint32_t id;              /* on the wire; of its kind and device */
    struct ww_device *device; /* NULL: libraries and kernels */
    uint64_t life;            /* of the device when it was made */
    uint32_t flags;
    int32_t priority;
    uint64_t serial;           /* never used twice in the process */
    void *more;                /* struct ww_loaded_image, ww_fn and others */
    struct ww_object *next;    /* of the free list */
    _Atomic uint32_t recorded; /* events: 1, or WW_IN_CAPTURE: its last record belongs to a graph */
};

#define WW_IN_CAPTURE 2u

#define WW_ALWAYS 0xffffffffu

/* A worker: its shared memory and socket. Waiters hold a reference, so that a reset unmaps nothing under them. */
struct ww_channel {
    struct ww_ring *ring;
    const struct ww_status *status;
    unsigned char *staging;
    int socket, ordinal;
    const struct ww_device *device;
    _Atomic int references;
    _Atomic int lost;              /* 0, or the code of all calls */
    uint64_t head, woken;          /* under device.post */
    uint32_t place_use[WW_PLACES]; /* under device.post */
    uint32_t place_stream[WW_PLACES];
    bool place_held[WW_PLACES];
    uint32_t slot_seq[WW_SLOTS];           /* of the slot's holder */
    _Atomic uint64_t slots[WW_SLOTS / 64]; /* 1: taken */
    _Atomic uint64_t seen;                 /* deferred errors that were returned */
    uint32_t weight[WW_IDS];               /* by stream: posted since a thread last waited; under device.post */
    uint32_t copies;                       /* synchronous copies that did not wait; under device.post, as behind */
    uint32_t behind[WW_IDS];               /* by stream: how many of them it comes after; WW_ALWAYS: all */
    pthread_mutex_t pinning;               /* one PIN at a time reads the socket */
};

struct ww_span {
    uint64_t start, size;
    uint32_t what, flags; /* enum ww_what */
    uint64_t serial;
    void *owner;    /* struct ww_pool; with WW_OF_GRAPH struct ww_graph_memory; or NULL */
    uint64_t users; /* bits of other devices whose workers map it: layer_peer.c */
};

struct ww_ranges { /* sorted by start, without overlaps */
    pthread_mutex_t lock;
    struct ww_span *all;
    size_t n;
};

struct ww_ids { /* of a kind on the wire: a ring of free ones, the one given back longest ago first */
    uint32_t first, most, next, at, nfree;
    uint32_t *free; /* most entries, made with the first id that comes back */
};

struct ww_device {
    int ordinal;
    struct ww_facts facts;
    pthread_mutex_t opening, post;
    struct ww_channel *_Atomic channel; /* NULL: no worker */
    _Atomic uint64_t life;              /* adds 1 with each reset */
    int retained;
    uint32_t context_flags;
    _Atomic int holds;               /* host functions that have not run: layer_host.c */
    _Atomic uint64_t peers, touched; /* bits of devices whose memory its kernels may use; that its copies used */
    _Atomic uint64_t granted;        /* bits of devices whose pools its kernels may use */
    _Atomic int shared;              /* others use its memory: see layer_peer.c */
    _Atomic uint64_t pins;           /* the value of ww_pins up to which it maps pinned memory of other devices */
    _Atomic uint64_t copied;         /* an event's id, recorded behind synchronous calls that did not wait */
    struct ww_ranges ranges;
    struct ww_ids streams, events, modules, graphs;
    struct ww_pool *_Atomic pool; /* of cuMemAllocAsync; NULL: the default one */
};

struct ww_layer {
    _Atomic int state; /* 0, 1: facts are known, 2: cuInit was done */
    _Atomic int forked;
    int ndevices, failed; /* failed: code of cuInit */
    int driver_version;
    const char *folder; /* of the sockets */
    bool strict, many_cores;
    pthread_mutex_t starting, loading, linking, ending;
    struct ww_ranges registered; /* flags: the device's index */
    struct ww_device devices[WW_DEVICES];
};

extern struct ww_layer layer;

/* -- layer.c ------------------------------------------------------------------------------------------------------- */

int ww_facts_once(void);                 /* ask the servers, once; 0 or a code */
int ww_open(struct ww_device *d);        /* make sure that there is a worker */
void ww_await_end(struct ww_channel *c); /* of the worker, for a bounded time */
void ww_release(struct ww_channel *c);
struct ww_channel *ww_hold(struct ww_device *d); /* its channel with a reference, or NULL */
bool ww_alive(struct ww_channel *c);             /* looks at the socket; marks the channel lost */
int ww_receive(int socket, void *packet, size_t nbytes, int *fds, int nfds, int timeout_ms);

/* -- layer_context.c ----------------------------------------------------------------------------------------------- */

int ww_ready(void);                                 /* initialized, not forked, no host function: 0 or a code */
int ww_device_at(CUdevice k, struct ww_device **d); /* by its number here */
/* The device of a context, NULL being the thread's. */
int ww_context_or_current(CUcontext context, struct ww_device **d);
int ww_context_set(struct ww_device *d); /* NULL: leave the current context */
int ww_context_push(struct ww_device *d);
int ww_need(struct ww_device **d);         /* of the current context, with a worker that lives */
int ww_context_code(struct ww_device *d);  /* 0, or why no call to the device can succeed */
struct ww_device *ww_current(void);        /* or NULL */
struct ww_device *ww_context(CUcontext h); /* or NULL */
CUcontext ww_context_handle(struct ww_device *d);
int ww_device_number(const struct ww_device *d);

/* -- layer_ring.c -------------------------------------------------------------------------------------------------- */

#define WW_ANSWERED 0x8000u /* for ww_begin alone: an answer is waited for, without WW_DONE when the call is issued */

struct ww_post { /* an entry between ww_begin and ww_finish; the device's `post` is locked */
    struct ww_device *device;
    struct ww_channel *channel;
    struct ww_entry *entry; /* in the ring; arguments follow */
    uint32_t slot, seq;
    bool far_ahead; /* the call needs no answer, but the stream is behind */
};

/* Begin an entry with room for `nbytes` behind its header. flags: 0, WW_DONE or WW_ANSWERED. */
int ww_begin(struct ww_device *d, uint16_t op, uint32_t stream, uint32_t flags, size_t nbytes, struct ww_post *p);
/* Publish it. Where an answer was asked for (also in strict mode, or where a stream is far ahead) wait, return its
 * result. */
int ww_finish(struct ww_post *p);

int ww_send_flags(struct ww_device *d, uint16_t op, uint32_t stream, uint32_t flags, const void *args, size_t nargs);
int ww_send(struct ww_device *d, uint16_t op, uint32_t stream, const void *args, size_t nargs);
int ww_call(struct ww_device *d, uint16_t op, uint32_t stream, const void *args, size_t nargs, void *out, size_t nout);
/* As ww_call, for long answers: all bytes come in malloc'd `*all` (NULL: none), with an error, too. One call at a time.
 */
int ww_ask(struct ww_device *d, uint16_t op, const void *args, size_t nargs, unsigned char **all, size_t *nall);
/* As ww_call without arguments, for the thread of host functions, which must not wait; NOT_READY: ask again later. */
int ww_ask_later(struct ww_device *d, uint16_t op, struct ww_post *p);
bool ww_answered(struct ww_post *p); /* it has been answered, or will not be: p is done with */
int ww_earlier(
    struct ww_device *d); /* an error of earlier calls that was not returned yet, once; a sticky one always */

/* A place for bytes on their way: the holder has a reference to the channel until ww_place_drop. waited: the stream has
 * nothing outstanding, or the call belongs to none. WW_STREAM_FIRST: few places are left, wait for the stream, ask
 * again. */
#define WW_STREAM_FIRST (-1)
int ww_place_take(struct ww_device *d, uint32_t stream, bool waits, bool waited, struct ww_channel **c,
                  uint32_t *place);
/* Post an entry with bytes in a place that the caller holds. */
int ww_place_send(struct ww_device *d, uint16_t op, uint32_t stream, uint32_t flags, struct ww_channel *c,
                  uint32_t place, uint32_t nbytes, const void *args, size_t nargs);
/* Take a place, fill it, and post an entry with it. */
int ww_place_fill(struct ww_device *d, uint16_t op, uint32_t stream, uint32_t flags, const void *bytes, uint32_t nbytes,
                  const void *args, size_t nargs);
int ww_place_wait(struct ww_channel *c, uint32_t place);
void ww_place_drop(struct ww_device *d, struct ww_channel *c, uint32_t place);
uint32_t ww_places_free(struct ww_device *d);

int ww_event_new(struct ww_device *d, uint32_t flags, uint32_t *id);
int ww_event_end(struct ww_device *d, uint64_t life, uint32_t id);

/* -- layer_object.c ------------------------------------------------------------------------------------------------ */

struct ww_object *ww_object_new(uint32_t kind, struct ww_device *d); /* NULL: no room */
struct ww_object *ww_object(const void *handle, uint32_t kind);      /* or NULL; one of an earlier life is NULL, too */
static inline int ww_object_at(const void *handle, uint32_t kind, struct ww_object **o) {
    *o = ww_object(handle, kind);
    return *o ? 0 : CUDA_ERROR_INVALID_HANDLE;
}
/* *was: its last state, or NULL. Return 0 or a code. */
int ww_object_drop(const void *handle, uint32_t kind, struct ww_object *was);
static inline void *ww_object_more(const void *handle, uint32_t kind) {
    struct ww_object *o = ww_object(handle, kind);
    return o ? o->more : NULL;
}
int ww_id_take(struct ww_ids *ids, uint32_t *id); /* 0 or OUT_OF_MEMORY */
void ww_id_give(struct ww_device *d, struct ww_ids *ids, uint64_t life, uint32_t id);
void ww_ids_clear(struct ww_device *d);
void ww_objects_after_fork(void);

/* Make room behind `n` elements for one more, or return false. `all`: the address of the pointer to them. The room is
 * the next power of two. */
bool ww_grow(void *all, size_t n, size_t each);

/* -- layer_range.c ------------------------------------------------------------------------------------------------- */

enum ww_what { WW_ON_DEVICE = 1, WW_GLOBAL, WW_PINNED_MEMORY, WW_REGISTERED };

#define WW_MANAGED 0x100u  /* flag of pinned memory, in addition to the flags of cuMemHostAlloc: managed memory */
#define WW_OF_GRAPH 0x200u /* .. of any memory: a graph's node allocates it */

int ww_range_add(struct ww_ranges *t, uint64_t start, uint64_t size, uint32_t what, uint32_t flags, void *owner);
bool ww_range_take(struct ww_ranges *t, uint64_t start, uint32_t what, struct ww_span *r); /* removes it */
bool ww_range_find(struct ww_ranges *t, uint64_t at, struct ww_span *r);
struct ww_device *ww_range_owner(uint64_t at,
                                 struct ww_span *r); /* the current device's first; NULL: plain host memory */
bool ww_range_holds(const struct ww_span *r, uint64_t at, uint64_t nbytes);
uint64_t ww_ranges_pinned(struct ww_ranges *t);                            /* bytes of pinned memory */
bool ww_range_next(struct ww_ranges *t, uint64_t from, struct ww_span *r); /* the first that ends behind an address */
bool ww_range_share(struct ww_ranges *t, const struct ww_span *r, uint64_t user); /* false: it is gone */
void ww_ranges_unshare(struct ww_ranges *t, uint64_t user);
/* Unmaps pinned memory, too; `give` takes a block of a pool. */
void ww_ranges_clear(struct ww_device *d, void (*give)(struct ww_pool *, size_t));

/* -- layer_peer.c -------------------------------------------------------------------------------------------------- */

bool ww_can_reach(const struct ww_device *user, const struct ww_device *owner); /* as the driver reports it */
bool ww_reach(struct ww_device *user, struct ww_device *owner); /* all memory of the owner is mapped at the user */
void ww_touch(struct ww_device *user,
              struct ww_device *owner); /* a copy of the user's was posted to memory of the owner */
/* Let kernels of a device use the owner's pools; false if they cannot. */
bool ww_grant(struct ww_device *user, struct ww_device *owner);
extern _Atomic uint64_t ww_pins; /* adds 1 with each pinned block that other devices may use */
void ww_map_pinned(struct ww_device *d);
/* Let kernels and copies of a device use pinned memory of the others on this host. */
static inline void ww_use_pinned(struct ww_device *d) {
    uint64_t pins = atomic_load_explicit(&ww_pins, memory_order_relaxed);
    if (__builtin_expect(pins != atomic_load_explicit(&d->pins, memory_order_relaxed), 0))
        ww_map_pinned(d);
}
bool ww_maps_pinned(const struct ww_device *d, const struct ww_device *owner, const struct ww_span *r);
int ww_receive_pinned(struct ww_channel *c, uint64_t address, size_t nbytes); /* a descriptor, or -1 */
void ww_unshare(const struct ww_span *r); /* other devices unmap pinned memory when they are done with it */
void ww_unshare_all(struct ww_device *owner);
void ww_peers_done(struct ww_device *owner); /* waits for all who may use its memory: before a free */
struct ww_peers { /* the same for a thread that must not wait: call ww_peers_are_done until it returns true */
    struct ww_device *owner;
    int next;   /* the first that was not asked yet */
    bool asked; /* that before it was, and has not answered */
    struct ww_post post;
};
bool ww_peers_are_done(struct ww_peers *p);
void ww_peers_clear(struct ww_device *d); /* a life has ended */
/* A stream waits for another device's event; *can: it does, or an error says why not. */
int ww_wait_across(struct ww_device *d, uint32_t stream, struct ww_device *owner, uint32_t event, bool *can);

/* -- layer_stream.c, layer_code.c, layer_image.c, layer_names.c ---------------------------------------------------- */

int ww_stream(void *h, struct ww_device **d, uint32_t *id);
int ww_stream_of(void *h, struct ww_device **d, uint32_t *id);
int ww_stream_create(struct ww_device *d, uint32_t flags, int32_t priority, uint32_t *id);
struct ww_object *ww_stream_object(CUstream h);  /* NULL: a default stream */
int ww_stream_end(const struct ww_object *what); /* its last state */
int ww_mark_copied(struct ww_device *d);         /* a synchronous call on the legacy stream returns without waiting */
int ww_event(void *h, struct ww_device *d, uint32_t *id);
int ww_function(void *h, struct ww_device *d, uint32_t *id);

struct ww_fn {                         /* a function on a device */
    struct ww_object *object, *module; /* module: of a loaded module, else NULL */
    struct ww_object *kernel;          /* of a library's function, else NULL */
    char *name;
    uint32_t nparams, param_bytes;
    struct ww_param *params;
    _Atomic int32_t attributes[WW_FUNCTION_ATTRIBUTES];
};

int ww_fn_of(void *h, struct ww_device *d, struct ww_fn **f); /* of a CUfunction, or of a CUkernel on this device */
int ww_fn_any(void *h, struct ww_fn **f);                     /* of a CUfunction on any device */

int ww_image_length(const void *image, size_t most, const void **start, size_t *nbytes);

struct ww_loaded_image; /* an image on a device */
int ww_library_lock(CUlibrary h, struct ww_object **o, struct ww_loaded_image **c);

/* -- layer_host.c -------------------------------------------------------------------------------------------------- */

extern _Thread_local bool ww_in_host_function, ww_in_host_thread;

struct ww_host { /* a function that has not run yet; in order of posting */
    struct ww_host *next;
    struct ww_device *device;
    uint64_t life;
    uint32_t stream, event; /* event 0: due when earlier functions of its stream have run */
    bool blocking, lent;    /* lent: the event belongs to another function */
    CUstream handle;
    void (*run)(void *);
    void (*callback)(CUstream, CUresult, void *);
    bool (*due)(void *);       /* instead of an event; it holds no stream */
    void (*then)(void *, int); /* posts what comes behind it, while the stream is held */
    void *data;
};

extern pthread_mutex_t ww_hosts_lock; /* of the queue */
extern pthread_cond_t ww_hosts_changed;
extern struct ww_host *ww_hosts;

bool ww_hosts_hold(const struct ww_device *d, uint32_t stream, bool itself); /* with the lock */
void ww_host_stream(struct ww_device *d, uint32_t stream, bool free_one);    /* free_one: it does not block */
bool ww_host_blocking(const struct ww_device *d, uint32_t stream);
bool ww_host_held(struct ww_device *d, uint32_t stream); /* calls to it must wait for a host function */
bool ww_host_has(struct ww_device *d, uint32_t stream);  /* one of its own has not run */
void ww_host_wait(struct ww_device *d, uint32_t stream); /* until it is not; 0: until no stream is */
/* Run a function in the thread of host functions when the stream gets there, then `then` in that thread, which may post
 * to the stream while it is still held. Without `holds`, no stream waits: the function runs when its event's last
 * record is done or the context is lost (`lent`: the event stays the caller's), or when `due`, which is polled, returns
 * true. */
int ww_host_post(struct ww_device *d, uint32_t stream, bool holds, const struct ww_host *what);
/* The same when all that was posted to the stream is done. */
int ww_host_after(struct ww_device *d, uint32_t stream, void (*then)(void *, int), void *data);

/* -- layer_memory.c, layer_managed.c, layer_pool.c ----------------------------------------------------------------- */

int ww_allocate(struct ww_device *d, uint16_t op, uint32_t stream, size_t nbytes, uint32_t flags, void *owner,
                CUdeviceptr *address);
int ww_pin(struct ww_device *d, void **address, size_t nbytes, uint32_t flags, void *owner);
/* Put whole private pages of the program into pinned memory, without a change of their address or content. `alias` is
 * the address of the pinned memory, which devices use. */
int ww_pin_pages(struct ww_device *d, void *address, size_t nbytes, void **alias);
/* Give the program private pages with the same content again. */
void ww_unpin_pages(void *address, size_t nbytes);
/* Of the host's pool: when its stream gets there; the caller does not wait. */
int ww_unpin_in_stream(struct ww_device *d, uint32_t stream, struct ww_device *owner, const struct ww_span *r);
int ww_unpin_taken(struct ww_device *d, const struct ww_span *r); /* of memory that was taken out of the ranges */
void ww_unpin_posted(struct ww_device *d, const struct ww_span *r, bool there); /* .. without waiting */
bool ww_unkeep(struct ww_device *d); /* gives back what is kept pinned for a device, NULL: for all; false: nothing */

bool ww_manages(const struct ww_device *d);      /* it may have managed memory .. */
int ww_managed_check(const struct ww_device *d); /* .. or the code of its refusal; says once what such memory is */

struct ww_pool *ww_pool_of(struct ww_device *d);
void ww_pool_give(struct ww_pool *p, size_t nbytes);
void *ww_pool_handle(struct ww_pool *p);
int ww_pool_at(void *handle, struct ww_pool **p);
struct ww_pool *ww_default_pool(struct ww_device *d, bool managed);
int ww_pool_allocate(struct ww_pool *p, struct ww_device *d, uint32_t stream, size_t nbytes, CUdeviceptr *address);

/* -- layer_launch.c, layer_copy.c: work of graph nodes, posted to a stream ----------------------------------------- */

struct ww_launch {
    void *function;
    CU_SHAPE;
    uint32_t nattributes;
    struct ww_launch_attribute attributes[WW_LAUNCH_ATTRIBUTES];
    void **params, **extra;
};

struct ww_kernel_work {      /* a launch with its parameters; one allocation holds it all */
    struct ww_launch launch; /* its params point into packed */
    uint32_t nparams, nbytes;
    unsigned char *packed;
};

/* Find the function and check the launch; *buffer: its packed parameters, if it came with them. */
int ww_launch_check(struct ww_device *d, const struct ww_launch *k, struct ww_fn **f, const void **buffer);
int ww_launch_post(struct ww_device *d, uint32_t stream, const struct ww_fn *f, const struct ww_launch *k,
                   const void *buffer);
int ww_kernel_make(struct ww_device *d, const struct ww_launch *k,
                   struct ww_kernel_work **made);                      /* checked; freed by free */
struct ww_kernel_work *ww_kernel_copy(const struct ww_kernel_work *k); /* NULL: no memory */
int ww_kernel_post(struct ww_device *d, uint32_t stream, const struct ww_kernel_work *k);
int ww_copy_check(struct ww_device *d, const struct cu_copy3 *c);
int ww_copy_post(struct ww_device *d, uint32_t stream, const struct cu_copy3 *c, bool waits);
int ww_copy_line(struct ww_device *d, uint32_t stream, uint64_t to, uint64_t from, size_t nbytes, bool waits);
int ww_set_check(struct ww_device *d, const struct cu_node_set *s);
int ww_set_post(struct ww_device *d, uint32_t stream, const struct cu_node_set *s, bool waits);

/* -- layer_graph.c, layer_node.c ----------------------------------------------------------------------------------- */

struct ww_graph_memory { /* memory of an ALLOC node: one address, as long as a graph or a plan names it */
    _Atomic int refs;
    _Atomic int live; /* allocated by a launch, and not freed since */
    struct ww_device *device;
    uint64_t life, address;
    size_t nbytes;
    bool on_host;
    uint64_t freed_in;            /* how often its device's had been trimmed when it was freed, and 1 */
    struct ww_graph_memory *next; /* of the list of memory without a name .. */
    struct ww_span range;         /* .. the memory to free .. */
    struct ww_peers users;        /* .. and the devices that may still use it */
};

struct ww_twin {              /* a graph, or an executable one, that the worker's driver has */
    struct ww_device *device; /* NULL: none */
    uint64_t life;
    uint32_t id;
};

struct ww_condition { /* of a conditional node */
    uint64_t handle;
    int32_t type;
    uint32_t size, node;      /* node: its number at the worker */
    struct ww_twin within;    /* the twin of its graph; no device: the node is not there */
    struct ww_graph **graphs; /* owned */
    void **handles;           /* of these graphs: the program reads them */
};

struct ww_work { /* of a node */
    int kind;    /* enum cu_node */
    struct ww_device *device;
    union {
        struct ww_kernel_work *kernel; /* owned */
        struct cu_copy3 copy;
        struct cu_node_set set;
        struct cu_node_host host;
        struct ww_graph *graph; /* owned */
        CUevent event;
        struct ww_graph_memory *memory; /* a reference */
        struct ww_condition *condition; /* owned; NULL in plans */
    } of;
};

struct ww_edge {
    struct ww_node *from;
    struct cu_edge data;
};

struct ww_node {
    struct ww_object *object;
    struct ww_graph *graph;
    struct ww_work work;
    struct ww_edge *edges; /* that lead here */
    size_t nedges;
    uint32_t id;
    uint64_t serial, original; /* of the handle; of the node that this one is a clone of */
    size_t place;              /* while a plan is made */
};

struct ww_user_ref {
    struct ww_user *user;
    uint32_t count;
};

struct ww_graph {
    struct ww_object *object;
    struct ww_node **nodes; /* in the order in which they were made */
    size_t n;
    uint32_t next_id;
    uint64_t serial;
    struct ww_node *within; /* the node that owns this graph, or NULL */
    struct ww_user_ref *users;
    size_t nusers;
    struct ww_twin twin;
};

/* All graphs. Within it a worker's answers are waited for, but no stream, no place for bytes, no other device: user
 * objects and memory whose last reference is dropped go when it is left. */
extern pthread_mutex_t ww_graphs;
void ww_graphs_leave(void);
static inline int ww_graphs_left(int error) {
    ww_graphs_leave();
    return error;
}

struct ww_user {
    struct ww_object *object;
    uint32_t refs;
    void (*run)(void *);
    void *data;
    struct ww_user *next;
};

struct ww_plan;
struct ww_mark;

struct ww_exec {
    struct ww_object *object;
    struct ww_plan *plan;
    uint64_t flags;
    struct ww_mark *mark;       /* NULL: never launched */
    uint32_t stream;            /* of the last launch, on the mark's device */
    bool gone;                  /* its handle is destroyed */
    _Atomic int refs, unposted; /* unposted: launches that are not posted to their end */
};

struct ww_graph *ww_graph_new(void); /* with ww_graphs held; NULL: no memory */
void ww_graph_drop(struct ww_graph *g);
struct ww_graph *ww_graph(const void *handle);
struct ww_node *ww_node(const void *handle);
struct ww_user *ww_user(const void *handle);
struct ww_exec *ww_exec(const void *handle);
int ww_node_add(struct ww_graph *g, struct ww_node *const *deps, const struct cu_edge *edges, size_t n,
                struct ww_work *work, struct ww_node **made); /* takes what `work` owns, also on errors */
void ww_node_remove(struct ww_node *n);                       /* from its graph */
void ww_work_drop(struct ww_work *w);
int ww_work_copy(struct ww_work *to, const struct ww_work *from);
bool ww_graph_has(const struct ww_graph *g, int kind); /* also in child graphs and in graphs of conditional nodes */
bool ww_graph_has_memory(const struct ww_graph *g);
struct ww_graph *ww_graph_clone(struct ww_graph *g); /* with ww_graphs held; NULL: no memory */
struct ww_graph_memory *ww_graph_memory_new(struct ww_device *d, size_t nbytes, bool on_host, int *error);
void ww_graph_memory_drop(struct ww_graph_memory *m);  /* with ww_graphs held: a name less */
bool ww_graph_memory_freed(struct ww_graph_memory *m); /* a call or a node frees it; false: it is not allocated */
void ww_graph_memory_live(struct ww_graph_memory *m);

/* -- layer_condition.c: all with ww_graphs held -------------------------------------------------------------------- */

int ww_condition_make(struct ww_graph *g, const struct cu_node_condition *p, struct ww_work *w);
void ww_condition_drop(struct ww_condition *c);
int ww_twin_code(const struct ww_twin *t);         /* 0, or why it is not there */
void ww_twin_drop(struct ww_twin *t, uint16_t op); /* GRAPH_DROP, EXEC_DROP, or 0: the worker does not have it */
int ww_twin_begin(const struct ww_twin *t);
int ww_twin_step(const struct ww_twin *t, const struct ww_work *w,
                 uint32_t node); /* node: number of a conditional one */
int ww_twin_end(const struct ww_twin *t);
int ww_work_post(struct ww_device *d, uint32_t stream, const struct ww_work *w); /* a kernel, copy or memset */
int ww_twin_exec(const struct ww_twin *t, struct ww_twin *exec);
int ww_twin_launch(const struct ww_twin *exec, struct ww_device *d, uint32_t stream);

/* Give a node of an executable graph other work of its kind; takes what `work` owns. */
int ww_exec_change(void *exec, void *node, struct ww_work *work);

void ww_user_retain(struct ww_user *user, uint32_t count);
void ww_user_release(struct ww_user *user, uint32_t count);

/* -- layer_capture.c ----------------------------------------------------------------------------------------------- */

extern _Atomic int ww_captures; /* under way in the process */

int ww_captured_slow(struct ww_device *d, uint32_t stream, bool *yes);
int ww_unsafe_slow(void);
int ww_no_synchronize_slow(struct ww_device *d, uint32_t stream);
/* Set *yes if the stream records. An error: the call is not allowed there now, and ends captures that it breaks. */
static inline int ww_captured(struct ww_device *d, uint32_t stream, bool *yes) {
    *yes = false;
    return __builtin_expect(atomic_load_explicit(&ww_captures, memory_order_relaxed), 0)
               ? ww_captured_slow(d, stream, yes)
               : 0;
}
/* A call that the mode of a capture may forbid. */
static inline int ww_unsafe(void) {
    return __builtin_expect(atomic_load_explicit(&ww_captures, memory_order_relaxed), 0) ? ww_unsafe_slow() : 0;
}
/* A call that looks at a stream, 0: at the whole context. */
static inline int ww_no_synchronize(struct ww_device *d, uint32_t stream) {
    return __builtin_expect(atomic_load_explicit(&ww_captures, memory_order_relaxed), 0)
               ? ww_no_synchronize_slow(d, stream)
               : 0;
}
int ww_capture_add(struct ww_device *d, uint32_t stream, struct ww_work *work); /* takes what `work` owns */
int ww_capture_alloc(struct ww_device *d, uint32_t stream, size_t nbytes, CUdeviceptr *address);
int ww_capture_record(struct ww_device *d, uint32_t stream, struct ww_object *event);
int ww_capture_wait(struct ww_device *d, uint32_t stream, bool captured, struct ww_object *event, bool *done);
void ww_capture_forget_event(struct ww_object *event);
void ww_capture_stream_gone(struct ww_device *d, uint32_t stream);

/* -- bodies of generated calls ------------------------------------------------------------------------------------- */

enum ww_side { WW_ANY, WW_HOST, WW_DEVICE }; /* memory that a call names */

/* Find a stream, and whether it records. The functions below get the result. Errors of earlier calls are returned. */
int ww_enter(void *h, struct ww_device **d, uint32_t *stream, bool *captured);
int ww_copy(struct ww_device *d, uint32_t stream, bool captured, uint64_t to, enum ww_side to_is, uint64_t from,
            enum ww_side from_is, size_t nbytes, bool waits);
int ww_copy_plane(struct ww_device *d, uint32_t stream, bool captured, const struct cu_copy2 *c, bool waits);
int ww_copy_boxes(struct ww_device *d, uint32_t stream, bool captured, const struct cu_copy3 *c, bool waits);
int ww_fill(struct ww_device *d, uint32_t stream, bool captured, CUdeviceptr to, size_t pitch, uint32_t value,
            uint32_t width, size_t columns, size_t rows, bool waits);
int ww_allocate_in_stream(CUdeviceptr *address, size_t nbytes, struct ww_pool *p, CUstream h);
int ww_event_ask(CUevent h, uint16_t op); /* errors of earlier calls come with the answer */
int ww_text_out(char *to, int room, const char *text);
void ww_reset(struct ww_device *d); /* lets the worker go: a new life of the device */
int ww_synchronize(struct ww_device *d);
int ww_get_attribute(const struct ww_fn *f, int attribute, int *value);
int ww_set_attribute(struct ww_fn *f, int attribute, int value);
int ww_param_info(const struct ww_fn *f, size_t i, size_t *offset, size_t *nbytes);
int ww_clusters(int *n, CUfunction h, const struct cu_launch_config *c, uint32_t what);
int ww_give_pool(void **pool, struct ww_pool *p);
int ww_pool_set_access(struct ww_pool *p, const struct cu_mem_access *all, size_t n);

/* With ww_graphs held: */
int ww_graph_nodes(const struct ww_graph *g, void **to, size_t *n, bool roots);
int ww_graph_edges(const struct ww_graph *g, void **from, void **to, struct cu_edge *data, size_t *n);
int ww_node_dependencies(const struct ww_node *node, void **to, struct cu_edge *data, size_t *n);
int ww_node_dependents(const struct ww_node *node, void **to, struct cu_edge *data, size_t *n);
int ww_graph_connect(struct ww_graph *g, void *const *from, void *const *to, const struct cu_edge *edges, size_t n);
int ww_graph_disconnect(struct ww_graph *g, void *const *from, void *const *to, size_t n);
void ww_graph_end(struct ww_graph *g);
void ww_node_end(struct ww_node *n);
void ww_node_kernel(const struct ww_node *n, struct cu_node_kernel *to, bool second);
void ww_node_alloc(const struct ww_node *n, struct cu_node_alloc *to);

/* Without it: */
#define WW_NODE_KERNEL_V1 (-1) /* a kernel with the first version of its parameters */
#define WW_NODE_UNION (-2)     /* a settable kind with the driver's union of all parameters, which names it */
int ww_capture_begin(struct ww_device *d, uint32_t stream, int mode, void *graph, void *const *deps, size_t n);
/* params: as the driver's call for the kind has them; the event, address or graph itself where it has one. */
int ww_node_make(void **made, void *graph, void *deps, size_t n, int kind, void *params, CUcontext context);
int ww_node_set(void *node, int kind, void *params, CUcontext context);
int ww_exec_set(void *exec, void *node, int kind, void *params, CUcontext context);

int ww_error_text(int code, bool name, const char **text);
int ww_hint(CUdeviceptr address, size_t nbytes, int kind, int id);
int ww_prefetch(CUdeviceptr address, size_t nbytes, int kind, int id, CUstream h);
int ww_instantiate(void **exec, void *graph, uint64_t flags, int *result);

int ww_refused(const char *symbol);
void ww_say(const char *format, ...) __attribute__((format(printf, 1, 2)));

#include "gen_layer.h"

#endif
