/* The worker: a process that owns the context, the memory and the streams of one client on one device.
 *
 * A file calls only the files that are listed above it:
 *
 *     worker_process.c   state of the process, exit
 *     worker_answer.c    answers to the client
 *     worker_heavy.c     two more threads, for driver calls that may block
 *     worker_gate.c      which calls wait while the arbiter lets another program use the device
 *     worker_arena.c     device addresses: which are mapped, used, free
 *     worker_streams.c   streams, events, parked calls, and marks, which show how far the device is in a stream
 *     worker_images.c    modules, functions
 *     worker_links.c     workers of this client on other devices: their memory and events
 *     worker_memory.c    allocations, frees, pinned memory
 *     worker_copies.c    copies, memsets, launches
 *     worker_graphs.c    graphs with conditional nodes; the layer keeps all other graphs
 *     worker_executor.c  main thread: reads the ring and answers; makes only driver calls that cannot block
 *     worker.c           start: options, the client that the server hands over, shared memory, the context
 *
 * Only the executor changes the data in this file, unless a comment names the heavy thread.
 */
#ifndef WW_WORKER_H
#define WW_WORKER_H

#include "calls.h"
#include "cu.h"
#include "gate.h"
#include "gen_worker.h"
#include "lock.h"
#include "shared.h"
#include "system.h"
#include "wire.h"

/* -- the process --------------------------------------------------------------------------------------------------- */

/* Counters that the server reads while the worker runs; server.py unpacks the same layout. */
struct ww_counts {
    _Atomic uint64_t calls, bytes; /* ring entries read; bytes of device memory in use */
};

struct ww_worker {
    struct ww_ring *ring;
    struct ww_status *status;
    unsigned char *staging, *cells; /* both pinned for the device */
    int socket;                     /* to the client; -1: the server has not handed over a client yet */
    uint32_t ordinal;
    uint64_t tail; /* bytes of the ring read since the start */
    CUcontext context;
    CUdevice device;
    uint64_t quota;     /* limit on device memory in bytes; 0: no limit */
    uint64_t host_most; /* limit on pinned memory in bytes */
    int shareable; /* linked workers can map device memory; the heavy thread clears it if the driver cannot export */
    struct ww_counts *counts;
    struct ww_gate gate; /* the client's gate; attached only if its WARPWELL_SHARE asks for one */
};
extern struct ww_worker ww;

_Noreturn void ww_die(const char *line); /* print `line` to the client's stderr, exit */
_Noreturn void ww_lost(CUresult code);   /* the context is lost: report the code to the client, exit */
CUresult ww_living(CUresult code);       /* return `code`, or call ww_lost if it means that the context is lost */
_Noreturn void ww_end(int status);
void *ww_memory(size_t n);                                      /* calloc, or exit */
void *ww_grown(void *all, size_t n, size_t *room, size_t size); /* make room for one more than `n` elements, or exit */

struct ww_call;
struct ww_stream;

/* -- calls: copies of ring entries, and items that the worker itself puts into streams ----------------------------- */

struct ww_generation { /* one record of an event: a wait for it is not affected by later records */
    uint32_t refs, timed;
    int recorded; /* the record call has been read */
    int parked;   /* .. and is not issued yet */
    CUevent native;
    struct ww_todo *signals; /* actions for when the device has passed the record, held until it is issued */
};

struct ww_todo { /* an action for when the device has passed a mark */
    struct ww_todo *next;
    enum { WW_ANSWER, WW_PLACE, WW_CELL, WW_BARRIER, WW_THEN } kind;
    uint32_t a, b; /* ANSWER: slot, seq. PLACE: place, use. CELL: cell. THEN: argument of `then` */
    uint64_t address;
    void (*then)(uint32_t a, uint64_t address);
    struct ww_barrier *barrier;
};

#define WW_LATER (-1) /* result of a call whose answer has been sent, or will be sent later */

struct ww_operation {                             /* what the worker does with entries of one op */
    uint32_t bytes;                               /* minimum size of the arguments */
    CUresult (*read)(const struct ww_call *call); /* executes the call when it is read; NULL: its stream issues it */
    CUresult (*check)(struct ww_call *call);      /* checks the arguments when the call is read; or NULL */
    int (*is_due)(const struct ww_call *call);    /* 0: the call must stay parked. NULL: it is always due */
    CUresult (*issue)(struct ww_stream *s, struct ww_call *call);
    int is_node; /* a graph that records takes the call as a node */
};

/* Indexed by op. gen_worker.h declares the functions. */
extern const struct ww_operation ww_operations[WW_HAND_OPS];

struct ww_call {
    struct ww_call *next;
    const struct ww_operation *operation; /* NULL: not a ring entry, but one of the worker's own items */
    uint64_t order;                       /* position in the order in which calls were read */
    size_t bytes;                         /* size of this struct with the arguments */
    struct ww_generation *generation;     /* STREAM_WAIT, EVENT_RECORD: the record that is meant */
    struct ww_native_function *function;
    struct ww_await *await;
    struct ww_exec *exec;
    struct ww_todo *todo;             /* the action that follows when the stream reaches the mark */
    int destroys;                     /* an item that destroys the stream */
    int is_held;                      /* its WW_PLACE action reports success */
    int needs_cell, is_between_hosts; /* the payload needs a cell; both ends are host memory: the worker copies */
    uint32_t nargs;                   /* bytes in args */
    struct ww_entry entry;
    _Alignas(16) unsigned char args[];
};

void ww_answer(uint32_t slot, uint32_t seq, CUresult result, const void *data, size_t n);
/* Answer the call, or defer an error if the call has no slot. An error also completes the call's place. */
void ww_result(const struct ww_call *call, CUresult result);
void ww_place_done(uint32_t place, uint32_t use, CUresult result);
void ww_changed(void);           /* call after each change of ww_status: it wakes the mirror (relay.c) */
void ww_wake(void);              /* for other threads: make the executor look at its lists */
_Noreturn void ww_execute(void); /* the main loop */

/* -- gate: expected times of calls, measured while another program waits for the device ---------------------------- */

struct ww_cost {        /* of a function, or of an op without one */
    uint32_t ns, calls; /* expected time of a call; calls that were counted while the arbiter bounded work */
};

struct ww_part { /* the calls of a stream between two marks */
    uint64_t since_ns, expected_ns;
    struct ww_cost *cost; /* to update with the time of the part's only call; NULL: not measured */
};

bool ww_gate_admits(const struct ww_call *call); /* count the call as issued, or return false: it must wait */
int ww_gate_is_contended(void); /* true: mark all streams now, because the arbiter waits for progress */
int ww_part_measures(const struct ww_call *call); /* true: measure the call by a mark before and after it */
int ww_part_add(struct ww_part *part,
                const struct ww_call *call); /* add an issued call; return true if the stream is to be marked now */
void ww_part_passed(struct ww_part *part, uint64_t *passed_ns, uint64_t calls);

/* -- streams ------------------------------------------------------------------------------------------------------- */

struct ww_mark {
    struct ww_mark *next;
    CUevent native;
    uint64_t count; /* `issued` of the stream when the mark was made: calls that it covers */
    int waited;     /* a thread of the client waits: show printf output of kernels first */
    int counted;    /* in the number that ww_streams_waited reads */
    struct ww_todo *todos;
    struct ww_part part;
};

struct ww_stream {
    struct ww_stream *next_made, *next_parked;
    CUstream native;
    int nonblocking, gone, is_parked;
    uint64_t issued, marked, done; /* numbers of calls: given to the driver, covered by a mark, passed */
    uint32_t cells;                /* cells in use */
    struct ww_mark *first_mark, *last_mark;
    struct ww_todo *later;        /* actions for the next mark, whenever it is made */
    struct ww_call *first, *last; /* parked calls */
    size_t parked_bytes;
    struct ww_part part; /* calls that no mark covers yet */
    uint64_t passed_ns;  /* when the executor found the last mark passed */
};

void ww_streams_start(void);
CUresult ww_stream_call(struct ww_call *call); /* issue the call, or park a copy */
int ww_streams_step(void);                     /* poll marks, issue parked calls; true if anything happened */
void ww_streams_settle(void);                  /* mark all streams and store the count of calls, for the arbiter */
int ww_streams_busy(void);                     /* true if a mark, a parked call or a wait is outstanding */
int ww_streams_waited(void);                   /* true if a thread of the client may wait for a mark or an event */
struct ww_stream *ww_find_stream(uint32_t id);
void ww_stream_later(struct ww_stream *s, struct ww_todo todo); /* act when the next mark has been passed */
void ww_stream_mark(struct ww_stream *s, struct ww_todo todo);  /* act when all calls issued so far have been passed */
uint32_t ww_take_cell(struct ww_stream *s);                     /* 1 + a cell, or 0: the stream cannot have one now */
/* Act when the last record of the event in the call's arguments has been passed. */
CUresult ww_event_passed(const struct ww_call *call, struct ww_todo todo);

struct ww_barrier { /* calls `then` when all calls that were read before it have been passed */
    uint32_t left;  /* streams that have not passed the barrier yet */
    void (*then)(struct ww_barrier *barrier);
    uint32_t slot, seq;
    uint64_t key;
    void *with;
};
void ww_barrier(struct ww_barrier barrier);
CUresult ww_barrier_for(const struct ww_call *call, struct ww_barrier barrier); /* `then` answers the call; WW_LATER */

#define WW_CELLS 256u /* buffers of WW_SMALL bytes: payloads from ring entries, until the device has copied them */

/* -- memory -------------------------------------------------------------------------------------------------------- */

#define WW_ALIGN 512u
#define WW_ARENA_BASE 0x300000000000ull
#define WW_ARENA_STEP (1ull << 40)

enum ww_block_state { WW_UNMAPPED, WW_BUSY, WW_FREE, WW_USED, WW_FREEING };

struct ww_block {
    uint64_t at, size;
    enum ww_block_state state;
};

struct ww_chunk {
    uint64_t at, size, handle;
};

struct ww_arena {
    uint64_t base, bytes, piece, quota, mapped, free, used;
    struct ww_block *blocks; /* sorted by address, without gaps */
    size_t n, room;
    struct ww_chunk *chunks; /* each was created and mapped whole; in no order */
    size_t nchunks, chunk_room;
};
extern struct ww_arena ww_arena;

void ww_arena_init(struct ww_arena *a, uint64_t base, uint64_t bytes, uint64_t piece, uint64_t quota);
uint64_t ww_arena_take(struct ww_arena *a, uint64_t n);
uint64_t ww_arena_choose(struct ww_arena *a, uint64_t n, uint64_t *size);
void ww_arena_settle(struct ww_arena *a, uint64_t at, uint64_t size, uint64_t handle);
int ww_arena_spare(struct ww_arena *a, uint64_t keep, struct ww_chunk *out);
int ww_arena_holds(const struct ww_arena *a, uint64_t at, uint64_t n);
int ww_arena_freeing(struct ww_arena *a, uint64_t at);
void ww_arena_free(struct ww_arena *a, uint64_t at);

CUresult ww_memory_start(uint32_t ordinal, uint64_t total, uint64_t *base, uint64_t *bytes);
enum ww_where { WW_NOWHERE, WW_DEVICE, WW_HOST };
enum ww_where ww_where(uint64_t at, uint64_t n); /* NOWHERE: the client may not use the range */
void ww_memory_rest(uint64_t now);               /* the executor is idle: give unused memory back to the driver */

/* -- workers of the same client on other devices ------------------------------------------------------------------- */

int ww_link_holds(uint64_t at, uint64_t n); /* true if the range is another device's memory that is mapped here */
CUresult ww_map(uint64_t at, uint64_t n, uint64_t handle);       /* releases the handle on an error */
CUresult ww_links_add(uint64_t at, uint64_t n, uint64_t handle); /* heavy thread: linked workers map a new chunk */
void ww_links_drop(uint64_t at, uint64_t n);                     /* heavy thread: linked workers unmap a chunk */
int ww_links_step(void);                 /* handle signals and ended links; true if there were any */
int ww_links_busy(void);                 /* true if signals could not be sent yet */
int ww_take_descriptor(uint32_t serial); /* heavy thread: the descriptor of the client's WW_LINK packet, or -1 */

/* -- graphs -------------------------------------------------------------------------------------------------------- */

CUresult ww_graph_record(struct ww_call *call); /* a call whose stream is WW_RECORDED */

/* -- images -------------------------------------------------------------------------------------------------------- */

struct ww_native_function {
    uint32_t id, params;
    CUfunction native;
    struct ww_param *param;
    struct ww_cost cost;
};

struct ww_native_function *ww_function(uint32_t id); /* or NULL */
int ww_is_global(uint64_t at, uint64_t n);

/* -- heavy threads ------------------------------------------------------------------------------------------------- */

struct ww_job {
    struct ww_job *next;
    void (*work)(struct ww_job *job); /* called in a heavy thread: sets result, data, nbytes */
    void (*done)(struct ww_job *job); /* called in the executor after `work`; NULL: the executor only answers */
    CUresult result;
    uint32_t slot, seq;
    void *data; /* bytes of the answer, from malloc; freed with the job */
    size_t nbytes;
    uint64_t a, b, c;
    int fd;
    int waits; /* `work` waits for all work of the device: the second thread runs it */
    void *with;
    struct ww_call *call; /* a copy, freed with the job; or NULL */
};

void ww_heavy_start(void);
void ww_heavy(struct ww_job job);
CUresult ww_heavy_for(const struct ww_call *call, struct ww_job job); /* the job answers the call; returns WW_LATER */
void ww_heavy_behind(const struct ww_barrier *barrier, struct ww_job job); /* the job answers the barrier's call */
int ww_heavy_step(void); /* call `done` of finished jobs; true if there were any */
struct ww_call *ww_copy_call(const struct ww_call *call);

#endif
