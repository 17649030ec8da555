/* The layer: the libcuda.so.1 of a program that runs on pooled GPUs. It keeps handles, addresses and errors in the
 * program's process, and posts all other calls of the CUDA driver API to worker processes, one for each device.
 *
 * Terms:
 *
 *     channel  a worker's shared memory and socket (wire.h); to post a call is to write an entry into its ring
 *     slot     memory in which the worker stores the answer of a call; other calls get no answer, and their errors are
 *              deferred: a later call returns them
 *     place    a staging buffer of WW_PLACE_BYTES for bytes that do not fit into an entry
 *     life     number of resets of a device's primary context: ids and objects are valid in the life that made them
 *     held     a stream with a host function that has not run: calls to the stream wait in the program
 *     twin     a copy of a graph in the worker's driver
 *
 * Each file calls only files above it in this list, and generated code:
 *
 *     layer_object.c        handles and ids
 *     layer_image.c         length of a module's image that a program passes by its address alone
 *     layer.c               state of the process: devices, connections to servers and workers, fork
 *     layer_names.c         names of errors, cuGetProcAddress, refusals
 *     layer_hold.c          which streams are held
 *     layer_context.c       contexts, and the calling thread's stack of contexts
 *     layer_range.c         device and type of the memory at an address
 *     layer_ring.c          posting calls, waiting for answers, places, deferred errors
 *     layer_peer.c          access of one device to another device's memory and events
 *     layer_host.c          queue and thread of host functions
 *     layer_stream.c        streams and events by their ids
 *     layer_code.c          modules, libraries, functions
 *     layer_launch.c        launches
 *     layer_copy.c          copies and memsets
 *     layer_memory.c        device memory and pinned host memory
 *     layer_owned.c         memory and user objects of graphs
 *     layer_graph.c         graphs, their nodes and edges
 *     layer_condition.c     graphs with conditional nodes, and their twins
 *     layer_capture.c       stream capture
 *     layer_managed.c       managed memory: pinned host memory that a device maps
 *     layer_pool.c          memory pools: accounts over device memory and pinned memory
 *     layer_exec.c          executable graphs: plans, launches, updates
 *     layer_node.c          parameters of graph nodes
 *     layer_device.c        API calls for cuInit, devices, primary contexts
 *     layer_stream_calls.c  API calls for streams and events
 *     layer_memory_calls.c  API calls for memory
 *     layer_work_calls.c    API calls for copies, memsets, launches, host functions
 *
 * Lock order, outermost first: `ww_graphs`; `layer.loading`; `device.opening` and `layer.linking`; `device.post`; the
 * locks of objects, ranges and host functions. The layer creates one thread for host functions, and short-lived threads
 * for large pageable copies. In a forked child of an initialized process, calls return NOT_INITIALIZED before they take
 * a lock.
 */
#ifndef WW_LAYER_H
#define WW_LAYER_H

#include "calls.h"
#include "gen_calls.h"
#include "gen_ops.h"
#include "lock.h"
#include "wire.h"
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

/* The target of a handle. All objects are in one table that is never freed, so a stale handle is detected safely. */
struct ww_object {
    _Atomic uint32_t kind;
    uint32_t id;              /* in messages to the worker; unique among the device's objects of this kind */
    struct ww_device *device; /* NULL: all kinds but streams, events, modules and functions */
    uint64_t life;            /* the device's life in which the object was made */
    uint32_t flags;
    int32_t priority;
    uint64_t serial;           /* unique in the process, also among destroyed objects */
    void *more;                /* data of the kind: struct ww_loaded_image, ww_fn and others */
    struct ww_object *next;    /* in the free list */
    _Atomic uint32_t recorded; /* events: 0 never, 1 recorded in a stream, WW_IN_CAPTURE recorded in a capture */
};

#define WW_IN_CAPTURE 2u

#define WW_ALWAYS 0xffffffffu

/* The connection to a worker. A thread that waits holds a reference, so that a reset does not unmap the memory. */
struct ww_channel {
    struct ww_ring *ring;
    const struct ww_status *status;
    unsigned char *staging;
    int socket, ordinal;
    const struct ww_device *device;
    _Atomic int references;
    _Atomic int lost; /* 0, or the error that all calls return, because the worker has ended or the device was reset */
    /* device.post protects the fields from here to `place_held`. */
    uint64_t head, woken;                  /* bytes written to the ring; `head` when the worker was last woken */
    uint32_t place_use[WW_PLACES];         /* number of the place's last use */
    uint32_t place_stream[WW_PLACES];      /* the stream of that use */
    bool place_held[WW_PLACES];            /* a thread has the place: ww_place_take */
    uint32_t slot_seq[WW_SLOTS];           /* number of the slot's last call; the thread that has the slot writes it */
    _Atomic uint64_t slots[WW_SLOTS / 64]; /* one bit for each slot; 1: a thread has it */
    _Atomic uint64_t seen;                 /* `status.deferred` with the last error that was returned */
    /* device.post protects the fields from here to `behind`. */
    uint32_t weight[WW_IDS]; /* by stream: bytes posted since a caller last waited until the worker had issued them */
    uint32_t copies;         /* number of synchronous copies that returned without waiting: ww_mark_copied */
    uint32_t behind[WW_IDS]; /* by stream: it is ordered after this many of the copies; WW_ALWAYS: after all */
    pthread_mutex_t pinning; /* held for a PIN or LEND call until its descriptor is read from the socket */
};

struct ww_span {
    uint64_t start, size;
    uint32_t type, flags; /* enum ww_memory_type; flags of the allocation, or the device's index for WW_REGISTERED */
    uint64_t serial;
    void *owner;    /* struct ww_pool, ww_graph_memory (WW_OF_GRAPH), address on device (WW_REGISTERED), or NULL */
    uint64_t users; /* bits of other devices whose workers map the memory: layer_peer.c */
};

struct ww_ranges { /* spans are sorted by `start` and do not overlap */
    pthread_mutex_t lock;
    struct ww_span *all;
    size_t n;
};

struct ww_ids {                         /* ids of one kind of object; the one freed longest ago is used first */
    uint32_t capacity, next, at, nfree; /* ids from `next` to `capacity` - 1 were never used */
    uint32_t *free; /* queue of `nfree` freed ids in a ring of `capacity` from index `at`, allocated at the first use */
};

struct ww_device {
    int ordinal;
    struct ww_facts facts;
    pthread_mutex_t opening, post;         /* held to start or end the worker; to write an entry into the ring */
    struct ww_channel *_Atomic channel;    /* NULL: no worker */
    _Atomic uint64_t life;                 /* number of resets */
    int retained, created;                 /* uses of the device's context: as the primary one, and by cuCtxCreate */
    uint32_t primary_flags, context_flags; /* flags of the primary context; of the context that is in use now, where
                                              CU_CTX_BLOCKING_SYNC shortens the spinning of waiting threads */
    _Atomic int holds;                     /* entries of this device in the queue of host functions: layer_host.c */
    _Atomic uint64_t peers, touched; /* bits of devices: kernels may access their memory; copies have accessed it */
    _Atomic uint64_t granted;        /* bits of devices whose pools this device's kernels may use */
    _Atomic int shared;              /* another device's worker maps this device's memory: layer_peer.c */
    _Atomic uint64_t pins;           /* value of ww_pins when this device last mapped other devices' pinned memory */
    _Atomic uint64_t copied;         /* life << 32 | id of the event that ww_mark_copied records */
    struct ww_ranges ranges;
    struct ww_ids streams, events, modules, graphs;
    struct ww_pool *_Atomic pool; /* from which cuMemAllocAsync allocates; NULL: the default pool */
};

struct ww_layer {
    _Atomic int state;    /* 0: nothing is known, 1: the servers were asked for facts, 2: cuInit has succeeded */
    _Atomic int forked;   /* 1: in a child of an initialized process */
    int ndevices, failed; /* failed: the error that cuInit returns, or 0 */
    int driver_version;
    const char *folder;      /* of the servers' sockets */
    bool strict, many_cores; /* strict: all calls wait for their answers */
    pthread_mutex_t starting, loading, linking, ending;
    struct ww_ranges registered; /* memory that cuMemHostRegister has registered */
    struct ww_device devices[WW_DEVICES];
};

extern struct ww_layer layer;

/* -- layer.c ------------------------------------------------------------------------------------------------------- */

int ww_facts_once(void);                 /* ask the servers for facts about their devices, once; 0 or an error code */
int ww_open(struct ww_device *d);        /* start a worker, unless the device has one */
void ww_await_end(struct ww_channel *c); /* make the worker exit, and wait for it at most about 5 s */
void ww_release(struct ww_channel *c);
struct ww_channel *
ww_hold(struct ww_device *d);        /* take a reference to the device's channel; return NULL without a worker */
bool ww_alive(struct ww_channel *c); /* false: the worker has ended; this marks the channel lost */
int ww_receive(int socket, void *packet, size_t nbytes, int *fds, int nfds, int timeout_ms);

/* -- layer_context.c ----------------------------------------------------------------------------------------------- */

int ww_ready(void); /* 0, or the error of a call before cuInit, in a forked child, or in a host function */
int ww_device_at(CUdevice k, struct ww_device **d); /* the device that the program numbers k */
/* Find the device of a context; for NULL, the device of the calling thread's current context. */
int ww_context_or_current(CUcontext context, struct ww_device **d);
int ww_context_set(struct ww_device *d); /* replace the current context; NULL: pop it */
/* Push a device's context on the calling thread's stack. A created context and the primary one have the same handle, so
 * the stack records which of the two was pushed: cuCtxDestroy must not pop the primary one. */
int ww_context_push(struct ww_device *d, bool is_created);
bool ww_current_is_created(void);
int ww_need(struct ww_device **d);         /* find the current context's device, and start its worker if need be */
int ww_context_code(struct ww_device *d);  /* 0, or the error that every call to the device returns now */
struct ww_device *ww_current(void);        /* of the calling thread's current context, or NULL */
struct ww_device *ww_context(CUcontext h); /* NULL: not a context */
CUcontext ww_context_handle(struct ww_device *d);
int ww_device_number(const struct ww_device *d);

/* -- layer_ring.c -------------------------------------------------------------------------------------------------- */

#define WW_ANSWERED 0x8000u /* flag of ww_begin: the call gets an answer, without WW_DONE when it has been issued */

struct ww_post { /* a call while its entry is written, and then while its answer is awaited */
    struct ww_device *device;
    struct ww_channel *channel;
    struct ww_entry *entry; /* header in the ring; the arguments follow */
    uint32_t slot, seq;
    bool far_ahead; /* the caller wants no answer, but waits for one: too many calls of the stream are not issued yet */
};

/* Begin an entry with `nbytes` of arguments, and lock device.post unless an error is returned. flags: 0, WW_DONE or
 * WW_ANSWERED. */
int ww_begin(struct ww_device *d, uint16_t op, uint32_t stream, uint32_t flags, size_t nbytes, struct ww_post *p);
/* Publish the entry and unlock device.post. If the call has a slot (because of its flags, in strict mode, or because
 * the stream is far ahead), wait for the answer and return its result. */
int ww_finish(struct ww_post *p);

int ww_send_flags(struct ww_device *d, uint16_t op, uint32_t stream, uint32_t flags, const void *args, size_t nargs);
/* Post a call that gets no answer. */
int ww_send(struct ww_device *d, uint16_t op, uint32_t stream, const void *args, size_t nargs);
/* Post a call, wait for its answer, and copy the answer's `nout` bytes. */
int ww_call(struct ww_device *d, uint16_t op, uint32_t stream, const void *args, size_t nargs, void *out, size_t nout);
/* As ww_call, for answers that are longer than a slot. *all: the bytes of the answer, from malloc, or NULL; a call that
 * fails may have some, too. Such calls must not overlap, because the worker keeps the rest of one answer only. */
int ww_ask(struct ww_device *d, uint16_t op, const void *args, size_t nargs, unsigned char **all, size_t *nall);
/* Post a call without arguments in the thread of host functions, which must not wait; then poll ww_answered. NOT_READY:
 * nothing was posted, try again later. */
int ww_ask_later(struct ww_device *d, uint16_t op, struct ww_post *p);
bool ww_answered(struct ww_post *p); /* true: the answer has arrived, or never will; its slot is free again */
/* Return the last deferred error unless an earlier call returned it, and a sticky error always. */
int ww_earlier(struct ww_device *d);

/* Take a staging place, and a reference to its channel, until ww_place_drop. waits: wait for a place instead of
 * returning NOT_READY. waited: the stream has no unfinished call, or the call belongs to no stream. WW_STREAM_FIRST:
 * few places are left; synchronize the stream, then call again with `waited`. */
#define WW_STREAM_FIRST (-1)
int ww_place_take(struct ww_device *d, uint32_t stream, bool waits, bool waited, struct ww_channel **c,
                  uint32_t *place);
/* Post a call whose bytes are in a place that the caller has taken. */
int ww_place_send(struct ww_device *d, uint16_t op, uint32_t stream, uint32_t flags, struct ww_channel *c,
                  uint32_t place, uint32_t nbytes, const void *args, size_t nargs);
/* Take a place, copy `bytes` into it, post a call with it, and drop it. */
int ww_place_fill(struct ww_device *d, uint16_t op, uint32_t stream, uint32_t flags, const void *bytes, uint32_t nbytes,
                  const void *args, size_t nargs);
int ww_place_wait(struct ww_channel *c, uint32_t place);
void ww_place_drop(struct ww_device *d, struct ww_channel *c, uint32_t place);
uint32_t ww_places_free(struct ww_device *d);

int ww_event_new(struct ww_device *d, uint32_t flags, uint32_t *id);
int ww_event_end(struct ww_device *d, uint64_t life, uint32_t id);

/* -- layer_object.c ------------------------------------------------------------------------------------------------ */

struct ww_object *ww_object_new(uint32_t kind, struct ww_device *d); /* NULL: out of memory */
struct ww_object *ww_object(const void *handle, uint32_t kind); /* NULL: no such object in the device's present life */
static inline int ww_object_at(const void *handle, uint32_t kind, struct ww_object **o) {
    *o = ww_object(handle, kind);
    return *o ? 0 : CUDA_ERROR_INVALID_HANDLE;
}
/* Destroy an object. `was`, unless it is NULL, gets a copy of the object. Return 0 or an error code. */
int ww_object_drop(const void *handle, uint32_t kind, struct ww_object *was);
static inline void *ww_object_more(const void *handle, uint32_t kind) {
    struct ww_object *o = ww_object(handle, kind);
    return o ? o->more : NULL;
}
int ww_id_take(struct ww_ids *ids, uint32_t *id); /* 0, or OUT_OF_MEMORY if all ids are in use */
void ww_id_give(struct ww_device *d, struct ww_ids *ids, uint64_t life, uint32_t id);
void ww_ids_clear(struct ww_device *d);
void ww_objects_after_fork(void);

/* Make room for one more element in a malloc'd array of `n` elements; its capacity is the next power of two. False: out
 * of memory. `all` is the address of the pointer to the array, `each` the size of an element. */
bool ww_grow(void *all, size_t n, size_t each);

/* -- layer_range.c ------------------------------------------------------------------------------------------------- */

enum ww_memory_type { WW_ON_DEVICE = 1, WW_GLOBAL, WW_PINNED_MEMORY, WW_REGISTERED };

#define WW_MANAGED 0x100u  /* flag of WW_PINNED_MEMORY, in addition to cuMemHostAlloc's flags: managed memory */
#define WW_OF_GRAPH 0x200u /* flag of WW_PINNED_MEMORY and WW_ON_DEVICE: a graph's ALLOC node allocates the memory */

int ww_range_add(struct ww_ranges *t, uint64_t start, uint64_t size, uint32_t type, uint32_t flags, void *owner);
/* Remove the span that begins at `start`. Return false if no span of this type begins there. */
bool ww_range_take(struct ww_ranges *t, uint64_t start, uint32_t type, struct ww_span *r);
bool ww_range_find(struct ww_ranges *t, uint64_t at, struct ww_span *r);
/* Find the device whose table has the address, the current device first. Return NULL for plain host memory. */
struct ww_device *ww_range_owner(uint64_t at, struct ww_span *r);
bool ww_range_holds(const struct ww_span *r, uint64_t at, uint64_t nbytes); /* the span contains all of these bytes */
uint64_t ww_ranges_pinned(struct ww_ranges *t);                             /* bytes of pinned memory */
bool ww_range_next(struct ww_ranges *t, uint64_t from, struct ww_span *r); /* the first span with an end above `from` */
/* Add the bits `user` to a span's `users`. Return false if the span was removed. */
bool ww_range_share(struct ww_ranges *t, const struct ww_span *r, uint64_t user);
void ww_ranges_unshare(struct ww_ranges *t, uint64_t user);
/* Remove all spans of a device after a reset, and unmap pinned memory. `give` returns a block's bytes to its pool. */
void ww_ranges_clear(struct ww_device *d, void (*give)(struct ww_pool *, size_t));

/* -- layer_peer.c -------------------------------------------------------------------------------------------------- */

bool ww_can_reach(const struct ww_device *user, const struct ww_device *owner); /* as the driver reports */
/* Let the worker of device `user` map all memory of device `owner`. Return false if it cannot. */
bool ww_reach(struct ww_device *user, struct ww_device *owner);
/* Remember that a copy of the user's was posted that accesses memory of the owner. */
void ww_touch(struct ww_device *user, struct ww_device *owner);
/* Let kernels on device `user` access the pools of device `owner`. Return false if they cannot. */
bool ww_grant(struct ww_device *user, struct ww_device *owner);
extern _Atomic uint64_t ww_pins; /* number of pinned blocks so far that other devices may map */
void ww_map_pinned(struct ww_device *d);
/* Make a device's worker map the pinned memory of the other devices on this host, before a kernel or copy. */
static inline void ww_use_pinned(struct ww_device *d) {
    uint64_t pins = atomic_load_explicit(&ww_pins, memory_order_relaxed);
    if (__builtin_expect(pins != atomic_load_explicit(&d->pins, memory_order_relaxed), 0))
        ww_map_pinned(d);
}
bool ww_maps_pinned(const struct ww_device *d, const struct ww_device *owner, const struct ww_span *r);
int ww_receive_pinned(struct ww_channel *c, uint64_t address, size_t nbytes); /* the memory's descriptor, or -1 */
void ww_unshare(const struct ww_span *r); /* other devices' workers unmap pinned memory after their earlier calls */
void ww_unshare_all(struct ww_device *owner);
void ww_peers_done(struct ww_device *owner); /* before a free: synchronize all devices that may use the memory */
struct ww_peers { /* state of ww_peers_are_done, which does not wait: call that function until it returns true */
    struct ww_device *owner;
    int next;   /* index of the next device to look at */
    bool asked; /* `post` synchronizes a device before `next`, and has no answer yet */
    struct ww_post post;
};
bool ww_peers_are_done(struct ww_peers *p);
void ww_peers_clear(struct ww_device *d); /* after a reset: the device accesses no other, and no other accesses it */
/* Let a stream wait for another device's event. *can is false if the two workers have no link: then nothing waits. */
int ww_wait_across(struct ww_device *d, uint32_t stream, struct ww_device *owner, uint32_t event, bool *can);

/* -- layer_stream.c, layer_code.c, layer_image.c, layer_names.c ---------------------------------------------------- */

int ww_stream(void *h, struct ww_device **d, uint32_t *id);
int ww_current_stream(void *h, struct ww_device **d, uint32_t *id);
int ww_stream_of(void *h, struct ww_device **d, uint32_t *id);
int ww_stream_create(struct ww_device *d, uint32_t flags, int32_t priority, uint32_t *id);
struct ww_object *ww_stream_object(CUstream h);  /* NULL: a default stream, or not a stream */
int ww_stream_end(const struct ww_object *what); /* destroy a stream; what: a copy of its object */
int ww_mark_copied(struct ww_device *d); /* for a synchronous call on the legacy stream that returns without waiting */
int ww_function(void *h, struct ww_device *d, uint32_t *id);

struct ww_fn {                         /* a function on a device */
    struct ww_object *object, *module; /* module: for which cuModuleGetFunction returned the function, or NULL */
    struct ww_object *kernel;          /* the CUkernel of a library's function, else NULL */
    char *name;
    uint32_t nparams, param_bytes;
    struct ww_param *params;
    _Atomic int32_t attributes[WW_FUNCTION_ATTRIBUTES];
};

int ww_fn_of(void *h, struct ww_device *d, struct ww_fn **f); /* h: a CUfunction of the device, or any CUkernel */
int ww_fn_any(void *h, struct ww_fn **f); /* h: a CUfunction of any device, or a CUkernel for the current device */

int ww_image_length(const void *image, size_t most, const void **start, size_t *nbytes);

struct ww_loaded_image; /* the image of a module or library, loaded on a device */
int ww_library(CUlibrary h, struct ww_object **o, struct ww_loaded_image **c);

/* -- layer_host.c -------------------------------------------------------------------------------------------------- */

extern _Thread_local bool ww_in_host_function, ww_in_host_thread;

struct ww_host { /* a host function that has not run yet */
    struct ww_host *next;
    struct ww_device *device;
    uint64_t life;
    uint32_t stream, event; /* stream that is held, or 0; event, or 0: due after the stream's earlier functions */
    bool blocking, lent;    /* blocking: type of the held stream. lent: `event` is the caller's, or `due` replaces it */
    CUstream handle;        /* for `callback` */
    void (*run)(void *);
    void (*callback)(CUstream, CUresult, void *);
    bool (*due)(void *);       /* polled instead of an event, for a function that holds no stream */
    void (*then)(void *, int); /* called after `run`; may post to the stream, which is still held */
    void *data;
};

extern pthread_mutex_t ww_hosts_lock; /* protects `ww_hosts` */
extern pthread_cond_t ww_hosts_changed;
extern struct ww_host *ww_hosts; /* in order of posting */

/* With ww_hosts_lock held: return true if a function holds the stream; without `itself`, a function of another stream.
 * Stream 0: return true if any function of the device without `due` has not run. */
bool ww_hosts_hold(const struct ww_device *d, uint32_t stream, bool itself);
void ww_host_stream(struct ww_device *d, uint32_t stream, bool free_one); /* store if a new stream is non-blocking */
bool ww_host_blocking(const struct ww_device *d, uint32_t stream);
bool ww_host_held(struct ww_device *d, uint32_t stream); /* calls to the stream must wait for a host function */
bool ww_host_has(struct ww_device *d, uint32_t stream);  /* a function that was posted to this stream has not run */
void ww_host_wait(struct ww_device *d, uint32_t stream); /* until no function holds it; 0: until all have run */
/* Let the thread of host functions call `run` or `callback`, then `then`, when all work that was posted to the stream
 * before is done. With `holds`, the stream is held until then. Without `holds`, the function may wait for something
 * else: with `lent` for the last record of the caller's `event`, or until `due` returns true. If the context is lost,
 * `run` is not called, and `callback` and `then` get the error. */
int ww_host_post(struct ww_device *d, uint32_t stream, bool holds, const struct ww_host *what);
/* Let that thread call `then` when the stream has done all posted work, also what host functions still have to post. */
int ww_host_after(struct ww_device *d, uint32_t stream, void (*then)(void *, int), void *data);

/* -- layer_memory.c, layer_managed.c, layer_pool.c ----------------------------------------------------------------- */

int ww_allocate(struct ww_device *d, uint16_t op, uint32_t stream, size_t nbytes, uint32_t flags, void *owner,
                CUdeviceptr *address);
int ww_pin(struct ww_device *d, void **address, size_t nbytes, uint32_t flags, void *owner);
/* Replace whole private pages of the program by pinned memory at the same address, with the same content. *alias: the
 * address at which devices access that memory. */
int ww_pin_pages(struct ww_device *d, void *address, size_t nbytes, void **alias);
/* Replace such pages by private pages with the same content. */
void ww_unpin_pages(void *address, size_t nbytes);
/* Unpin memory of a host pool when all work posted to the stream is done; the caller does not wait for it. */
int ww_unpin_in_stream(struct ww_device *d, uint32_t stream, struct ww_device *owner, const struct ww_span *r);
int ww_unpin_taken(struct ww_device *d, const struct ww_span *r); /* unpin memory whose span was removed, and wait */
/* The same without waiting. there: the worker still has the memory. */
void ww_unpin_posted(struct ww_device *d, const struct ww_span *r, bool there);
bool ww_unkeep(struct ww_device *d); /* unpin unused memory that is kept for a device (NULL: all); false: none is */

bool ww_manages(const struct ww_device *d);      /* programs can allocate managed memory on the device */
int ww_managed_check(const struct ww_device *d); /* 0, or a refusal if they cannot; prints a note at the first call */

struct ww_pool *ww_pool_of(struct ww_device *d);
void ww_pool_give(struct ww_pool *p, size_t nbytes);
void *ww_pool_handle(struct ww_pool *p);
int ww_pool_at(void *handle, struct ww_pool **p);
/* Check the properties of a pool or of an allocation. *d: the device of the location, or NULL for the host. */
int ww_props_check(const struct cu_pool_props *props, struct ww_device **d);
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

struct ww_kernel_work {      /* a launch with a copy of its parameters, in one allocation */
    struct ww_launch launch; /* launch.params point into `packed` */
    uint32_t nparams, nbytes;
    unsigned char *packed;
};

/* Find a launch's function, and check the launch. *buffer: the packed parameters in `extra`, or NULL. */
int ww_launch_check(struct ww_device *d, const struct ww_launch *k, struct ww_fn **f, const void **buffer);
int ww_launch_post(struct ww_device *d, uint32_t stream, const struct ww_fn *f, const struct ww_launch *k,
                   const void *buffer);
/* Write what the program has printed, before a launch: the worker prints for kernels to the same file. */
void ww_flush_output(void);
int ww_kernel_make(struct ww_device *d, const struct ww_launch *k,
                   struct ww_kernel_work **made);                      /* check a launch and copy it, for free() */
struct ww_kernel_work *ww_kernel_copy(const struct ww_kernel_work *k); /* NULL: no memory */
int ww_kernel_post(struct ww_device *d, uint32_t stream, const struct ww_kernel_work *k);
int ww_copy_check(struct ww_device *d, const struct cu_copy3 *c);
int ww_copy_post(struct ww_device *d, uint32_t stream, const struct cu_copy3 *c, bool waits);
int ww_copy_line(struct ww_device *d, uint32_t stream, uint64_t to, uint64_t from, size_t nbytes, bool waits);
int ww_set_check(const struct cu_node_set *s);
int ww_set_post(struct ww_device *d, uint32_t stream, const struct cu_node_set *s, bool waits);

/* -- layer_graph.c, layer_node.c ----------------------------------------------------------------------------------- */

struct ww_graph_memory { /* memory of an ALLOC node; it keeps its address while a graph or a plan refers to it */
    _Atomic int refs;
    _Atomic int live; /* a launch has allocated the memory, and nothing has freed it since */
    struct ww_device *device;
    uint64_t life, address;
    size_t nbytes;
    bool on_host;
    uint64_t freed_in;            /* 1 + number of trims of the device's graph memory before the last free; 0: none */
    struct ww_graph_memory *next; /* in the list of memory without references, for which only: */
    struct ww_span range;         /* the memory to free; size 0: a reset has freed it */
    struct ww_peers users;        /* the devices that may still use it */
};

struct ww_twin {              /* id of a graph or an executable graph in the worker's driver */
    struct ww_device *device; /* NULL: there is no twin */
    uint64_t life;
    uint32_t id;
};

struct ww_condition { /* data of a conditional node */
    uint64_t handle;  /* CUgraphConditionalHandle */
    int32_t type;
    uint32_t size, node;      /* number of body graphs; id of the node in messages to the worker */
    struct ww_twin within;    /* the twin of the node's graph; device NULL: the worker does not have the node */
    struct ww_graph **graphs; /* the body graphs; owned */
    void **handles;           /* their handles, which the program reads */
};

struct ww_work { /* the operation of a node */
    int kind;    /* enum cu_node */
    struct ww_device *device;
    union {
        struct ww_kernel_work *kernel; /* owned */
        struct cu_copy3 copy;
        struct cu_node_set set;
        struct cu_node_host host;
        struct ww_graph *graph; /* owned */
        CUevent event;
        struct ww_graph_memory *memory; /* a counted reference */
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
    struct ww_edge *edges; /* from the nodes on which this one depends */
    size_t nedges;
    uint32_t id;
    uint64_t serial, original; /* serial of this node's handle; serial of the node of which this one is a clone, or 0 */
    size_t place;              /* index in the graph, while a plan or a clone is made */
};

struct ww_user_ref {
    struct ww_user *user;
    uint32_t count;
};

struct ww_graph {
    struct ww_object *object;
    struct ww_node **nodes; /* in the order of their creation */
    size_t n;
    uint32_t next_id;
    uint64_t serial;
    struct ww_node *within; /* the child graph node or conditional node that owns this graph, or NULL */
    struct ww_user_ref *users;
    size_t nusers;
    struct ww_twin twin;
};

/* Protects all graphs. A thread that holds it may wait for a worker's answer, but not for a stream, a staging place or
 * another device. So user objects and memory that lose their last reference are freed when the lock is released. */
extern pthread_mutex_t ww_graphs;
void ww_graphs_leave(void);
static inline void ww_graphs_unlock(pthread_mutex_t **held) {
    (void)held;
    ww_graphs_leave();
}
#define WW_LOCK_GRAPHS()                                                                                               \
    __attribute__((cleanup(ww_graphs_unlock), unused)) pthread_mutex_t *ww_graphs_held = ww_locked(&ww_graphs)

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
    bool gone;                  /* the handle was destroyed */
    _Atomic int refs, unposted; /* unposted: number of launches with steps that are not posted yet */
};

struct ww_graph *ww_graph_new(void); /* with ww_graphs held; NULL: no memory */
void ww_graph_drop(struct ww_graph *g);
struct ww_graph *ww_graph(const void *handle);
struct ww_node *ww_node(const void *handle);
struct ww_user *ww_user(const void *handle);
struct ww_exec *ww_exec(const void *handle);
int ww_node_add(struct ww_graph *g, struct ww_node *const *deps, const struct cu_edge *edges, size_t n,
                struct ww_work *work, struct ww_node **made); /* takes what `work` owns, also on errors */
void ww_node_remove(struct ww_node *n);                       /* remove it from its graph and free it */
void ww_work_drop(struct ww_work *w);
int ww_work_copy(struct ww_work *to, const struct ww_work *from);
bool ww_graph_has(const struct ww_graph *g, int kind); /* also in child graphs and in graphs of conditional nodes */
bool ww_graph_has_memory(const struct ww_graph *g);
struct ww_graph *ww_graph_clone(struct ww_graph *g); /* with ww_graphs held; NULL: no memory */
struct ww_graph_memory *ww_graph_memory_new(struct ww_device *d, size_t nbytes, bool on_host, int *error);
void ww_graph_memory_drop(struct ww_graph_memory *m);  /* with ww_graphs held: drop a reference */
bool ww_graph_memory_freed(struct ww_graph_memory *m); /* a call or a node frees the memory; false: not allocated */
void ww_graph_memory_live(struct ww_graph_memory *m);  /* a launch allocates the memory */

/* -- layer_condition.c: with ww_graphs held ------------------------------------------------------------------------ */

int ww_condition_make(struct ww_graph *g, const struct cu_node_condition *p, struct ww_work *w);
void ww_condition_drop(struct ww_condition *c);
int ww_twin_code(const struct ww_twin *t); /* 0, or the error of calls with it: there is no twin, or its worker ended */
void ww_twin_drop(struct ww_twin *t, uint16_t op);        /* op: WW_OP_GRAPH_DROP or _EXEC_DROP; 0: it was never made */
int ww_twin_name(struct ww_twin *t, struct ww_device *d); /* give a twin on the device an id */

/* Replace the work of an executable graph's node by work of the same kind; takes what `work` owns. */
int ww_exec_change(void *exec, void *node, struct ww_work *work);

void ww_user_retain(struct ww_user *user, uint32_t count);
void ww_user_release(struct ww_user *user, uint32_t count);

/* -- layer_capture.c ----------------------------------------------------------------------------------------------- */

extern _Atomic int ww_captures; /* number of captures in progress in the process */

int ww_captured_slow(struct ww_device *d, uint32_t stream, bool *yes);
int ww_unsafe_slow(void);
int ww_no_synchronize_slow(struct ww_device *d, uint32_t stream);
/* Find out whether a stream is being captured. An error: the call is not allowed, and has invalidated a capture or met
 * an invalidated one. */
static inline int ww_captured(struct ww_device *d, uint32_t stream, bool *yes) {
    *yes = false;
    return __builtin_expect(atomic_load_explicit(&ww_captures, memory_order_relaxed), 0)
               ? ww_captured_slow(d, stream, yes)
               : 0;
}
/* Check a call that the mode of a capture may forbid; such a call invalidates the capture. */
static inline int ww_unsafe(void) {
    return __builtin_expect(atomic_load_explicit(&ww_captures, memory_order_relaxed), 0) ? ww_unsafe_slow() : 0;
}
/* Check a call that queries or synchronizes a stream (0: the context): a capture forbids it, and is invalidated. */
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

enum ww_side { WW_ANY, WW_HOST, WW_DEVICE }; /* memory that a copy's function requires at one end */

/* Find a stream, and whether it is being captured: arguments of the functions below. Returns deferred errors, too. */
int ww_enter(void *h, struct ww_device **d, uint32_t *stream, bool *captured);
int ww_copy(struct ww_device *d, uint32_t stream, bool captured, uint64_t to, enum ww_side to_is, uint64_t from,
            enum ww_side from_is, size_t nbytes, bool waits);
int ww_copy_plane(struct ww_device *d, uint32_t stream, bool captured, const struct cu_copy2 *c, bool waits);
int ww_copy_boxes(struct ww_device *d, uint32_t stream, bool captured, const struct cu_copy3 *c, bool waits);
int ww_fill(struct ww_device *d, uint32_t stream, bool captured, CUdeviceptr to, size_t pitch, uint32_t value,
            uint32_t width, size_t columns, size_t rows, bool waits);
int ww_allocate_in_stream(struct ww_device *d, uint32_t stream, bool captured, CUdeviceptr *address, size_t nbytes,
                          struct ww_pool *p);
int ww_event_ask(CUevent h, uint16_t op); /* query or synchronize an event; returns deferred errors, too */
int ww_text_out(char *to, int room, const char *text);
void ww_reset(struct ww_device *d); /* end the device's worker: a new life of the device begins */
int ww_synchronize(struct ww_device *d);
int ww_get_attribute(const struct ww_fn *f, int attribute, int *value);
int ww_set_attribute(struct ww_fn *f, int attribute, int value);
int ww_param_info(const struct ww_fn *f, size_t i, size_t *offset, size_t *nbytes);
int ww_clusters(int *n, CUfunction h, const struct cu_launch_config *c, uint32_t type);
int ww_give_pool(void **pool, struct ww_pool *p);
int ww_pool_place(const struct cu_mem_location *at, int type, const void *out, struct ww_device **d);
int ww_load_module(CUmodule *module, const void *image, size_t most, unsigned n, int *names, void **values);
int ww_load_library(CUlibrary *library, const void *image, size_t most, int *names, void **values, unsigned n);
int ww_global(struct ww_loaded_image *c, const char *name, CUdeviceptr *address, size_t *nbytes);
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

/* Without ww_graphs held: */
#define WW_NODE_KERNEL_V1 (-1) /* kind: a kernel, with version 1 of its parameters */
#define WW_NODE_UNION (-2)     /* kind: the `type` of the parameters, which are a struct cu_node_params */
int ww_capture_begin(struct ww_device *d, uint32_t stream, int mode, void *graph, void *const *deps, size_t n);
/* params: the struct that the driver's function for this kind takes; or the event, address or graph that it takes. */
int ww_node_make(void **made, void *graph, void *deps, size_t n, int kind, void *params, CUcontext context);
int ww_node_set(void *node, int kind, void *params, CUcontext context);
int ww_exec_set(void *exec, void *node, int kind, void *params, CUcontext context);

int ww_error_text(int code, bool name, const char **text);
int ww_hint(CUdeviceptr address, size_t nbytes, int kind, int id);
int ww_instantiate(void **exec, void *graph, uint64_t flags, int *result);

int ww_refused(const char *symbol);
void ww_say(const char *format, ...) __attribute__((format(printf, 1, 2)));

#include "gen_layer.h"

#endif
