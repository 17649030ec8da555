/* The worker: one process that has the context, the memory and the streams of one client on one device.
 *
 * Each file calls those above it only:
 *
 *     worker_process.c   state of the process, its end
 *     worker_answer.c    answers
 *     worker_heavy.c     two more threads for calls of the driver that may wait
 *     worker_gate.c      which calls wait while another program has the device
 *     worker_arena.c     which addresses are mapped, used, free
 *     worker_streams.c   streams, events, parked calls, marks: when the device has passed a point of a stream
 *     worker_images.c    modules, functions
 *     worker_links.c     workers of this client on other devices: their memory and events
 *     worker_memory.c    allocations, frees, pinned memory
 *     worker_copies.c    copies, memsets, launches
 *     worker_graphs.c    graphs with conditional nodes, which the driver keeps
 *     worker_executor.c  main thread: reads the ring, answers; makes only calls of the driver that cannot wait
 *     worker.c           start: arguments, shared memory, the client's first packet
 *
 * The executor alone changes what stands here, unless a comment says that it is the heavy thread's.
 */
#ifndef WW_WORKER_H
#define WW_WORKER_H

#include "calls.h"
#include "cu.h"
#include "gate.h"
#include "gen_worker.h"
#include "system.h"
#include "wire.h"

/* -- the process --------------------------------------------------------------------------------------------------- */

/* Counters of a worker that the server reads at any time (server.py has the same). */
struct ww_counts {
    _Atomic uint64_t calls, bytes; /* entries that were read; device memory in use */
};

struct ww_worker {
    struct ww_ring *ring;
    struct ww_status *status;
    unsigned char *staging, *cells; /* both registered */
    int socket;                     /* -1: there is no client */
    uint32_t ordinal;
    uint64_t tail; /* bytes of the ring that were read */
    CUcontext context;
    CUdevice device;
    uint64_t quota;     /* bytes of device memory, or 0 */
    uint64_t host_most; /* bytes of pinned memory */
    int shareable;      /* other processes may map this device's memory */
    struct ww_counts *counts;
    struct ww_gate gate; /* of this client; not attached unless it shares the device with other programs */
};
extern struct ww_worker ww;

_Noreturn void ww_die(const char *line); /* the client is wrong, or the machine: one line on its stderr, and the end */
_Noreturn void ww_lost(CUresult code);   /* the context is lost: the client learns the code, and the end */
CUresult ww_living(CUresult code);       /* `code`, or the end if the context is lost with it */
_Noreturn void ww_end(int status);
void *ww_memory(size_t n);                                      /* zeroed, or the end */
void *ww_grown(void *all, size_t n, size_t *room, size_t size); /* an array of `n` with room for one more, or the end */

struct ww_call;
struct ww_stream;

/* -- calls: entries of the ring that were copied, and items that the worker itself puts into streams --------------- */

struct ww_generation { /* of an event: one record. Waits and queries belong to it, not to the event */
    uint32_t refs, timed;
    int recorded; /* a record was read */
    int parked;   /* and is not issued yet */
    CUevent native;
    struct ww_todo *signals; /* to be marked when the record is issued */
};

struct ww_todo { /* what happens when a mark has been passed */
    struct ww_todo *next;
    enum { WW_ANSWER, WW_PLACE, WW_CELL, WW_BARRIER, WW_THEN } kind;
    uint32_t a, b; /* slot and seq; place and use; cell; of `then` */
    uint64_t address;
    void (*then)(uint32_t a, uint64_t address);
    struct ww_barrier *barrier;
};

#define WW_LATER (-1) /* result of a call whose answer has been sent, or follows */

struct ww_operation {                             /* of an entry */
    uint32_t bytes;                               /* least size of its arguments */
    CUresult (*read)(const struct ww_call *call); /* carries it out when it is read; NULL: its stream does */
    CUresult (*check)(struct ww_call *call);      /* checks arguments when it is read; or NULL */
    int (*is_due)(const struct ww_call *call);    /* or NULL */
    CUresult (*issue)(struct ww_stream *s, struct ww_call *call);
    int is_node; /* graphs record it */
};

/* By number; their functions are declared in gen_worker.h. */
extern const struct ww_operation ww_operations[WW_HAND_OPS];

struct ww_call {
    struct ww_call *next;
    const struct ww_operation *operation; /* NULL: not an entry */
    uint64_t order;                       /* in which calls were read */
    size_t bytes;                         /* of this struct with its arguments */
    struct ww_generation *generation;     /* of waits and records */
    struct ww_native_function *function;
    struct ww_await *await;
    struct ww_exec *exec;
    struct ww_todo *todo;             /* not an entry, but a mark for this */
    int destroys;                     /* not an entry, but the stream's end */
    int is_held;                      /* a mark has its answer */
    int needs_cell, is_between_hosts; /* a copy of the worker's own */
    uint32_t nargs;                   /* bytes of args */
    struct ww_entry entry;
    _Alignas(16) unsigned char args[];
};

void ww_answer(uint32_t slot, uint32_t seq, CUresult result, const void *data, size_t n);
void ww_result(const struct ww_call *call,
               CUresult result); /* answers, or defers an error; a payload's place is done on errors */
void ww_place_done(uint32_t place, uint32_t use, CUresult result);
void ww_changed(void);           /* behind a change of the status */
void ww_wake(void);              /* from other threads: the executor looks at its lists again */
_Noreturn void ww_execute(void); /* the main loop */

/* -- gate: expected times of calls, measured while another program waits for the device ---------------------------- */

struct ww_cost { /* of a function, or of a kind of copy */
    uint32_t ns, calls;
};

struct ww_part { /* the calls of a stream that a mark covers first */
    uint64_t since_ns, expected_ns;
    struct ww_cost *cost; /* of its only call, which is measured; or NULL */
};

bool ww_gate_admits(const struct ww_call *call);  /* counts it as issued, or it must wait */
int ww_gate_is_contended(void);                   /* whether marks are to show soon what is passed */
int ww_part_measures(const struct ww_call *call); /* whether a mark before and behind the call measures it */
int ww_part_add(struct ww_part *part, const struct ww_call *call); /* whether a mark is due */
void ww_part_passed(struct ww_part *part, uint64_t *passed_ns, uint64_t calls);

/* -- streams ------------------------------------------------------------------------------------------------------- */

struct ww_mark {
    struct ww_mark *next;
    CUevent native;
    uint64_t count; /* calls of the stream that it covers */
    int waited;     /* a thread waits: output of kernels is shown first */
    int counted;    /* in ww_streams_waited */
    struct ww_todo *todos;
    struct ww_part part;
};

struct ww_stream {
    struct ww_stream *next_made, *next_parked;
    CUstream native;
    int nonblocking, gone, is_parked;
    uint64_t issued, marked, done; /* calls: given to the driver, covered by a mark, passed */
    uint32_t cells;                /* that it holds */
    struct ww_mark *first_mark, *last_mark;
    struct ww_todo *later;        /* go to the next mark, whenever that comes */
    struct ww_call *first, *last; /* parked */
    size_t parked_bytes;
    struct ww_part part; /* calls that no mark covers yet */
    uint64_t passed_ns;  /* when the last mark was seen to pass */
};

void ww_streams_start(void);
CUresult ww_stream_call(struct ww_call *call); /* issues it or parks a copy of it */
int ww_streams_step(void);                     /* looks at marks and parked calls; whether something happened */
void ww_streams_settle(void);                  /* counts calls and marks what no mark covers, for the arbiter */
int ww_streams_busy(void);                     /* whether a mark or a wait is outstanding */
int ww_streams_waited(void);                   /* whether a thread may wait for one */
struct ww_stream *ww_find_stream(uint32_t id);
void ww_stream_later(struct ww_stream *s, struct ww_todo todo); /* at the next mark */
void ww_stream_mark(struct ww_stream *s, struct ww_todo todo);  /* when all that is issued now has been passed */
uint32_t ww_take_cell(struct ww_stream *s);                     /* 1 + cell, or 0: none for this stream now */
CUresult ww_event_passed(const struct ww_call *call,
                         struct ww_todo todo); /* done when the last record has been passed */

struct ww_barrier { /* all calls that were read before it are passed */
    uint32_t left;
    void (*then)(struct ww_barrier *barrier);
    uint32_t slot, seq;
    uint64_t what;
    void *with;
};
void ww_barrier(struct ww_barrier barrier);
CUresult ww_barrier_for(const struct ww_call *call, struct ww_barrier barrier); /* .. that answers the call: WW_LATER */

#define WW_CELLS 256u /* of WW_SMALL bytes: payloads that travelled in entries, on their way to the device */

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
    struct ww_block *blocks; /* by address, they cover the whole range */
    size_t n, room;
    struct ww_chunk *chunks; /* mapped at one time each */
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
enum ww_where ww_where(uint64_t at, uint64_t n); /* memory that the client may name in copies */
void ww_memory_rest(uint64_t now);               /* nothing was to be done: frees unused memory */

/* -- workers of the same client on other devices ------------------------------------------------------------------- */

int ww_link_holds(uint64_t at, uint64_t n);                      /* memory of another device that is mapped here */
CUresult ww_map(uint64_t at, uint64_t n, uint64_t handle);       /* or give the handle back, and return a code */
CUresult ww_links_add(uint64_t at, uint64_t n, uint64_t handle); /* these two in the heavy thread */
void ww_links_drop(uint64_t at, uint64_t n);
int ww_links_step(void); /* handles news of the links' thread; returns whether there were any */
int ww_links_busy(void);
int ww_take_descriptor(uint32_t serial); /* in the heavy thread: received with WW_LINK, or -1 */

/* -- graphs -------------------------------------------------------------------------------------------------------- */

CUresult ww_graph_record(struct ww_call *call); /* a call on WW_RECORDED */

/* -- images -------------------------------------------------------------------------------------------------------- */

struct ww_native_function {
    uint32_t id, params;
    CUfunction native;
    struct ww_param *param;
    struct ww_cost cost;
};

struct ww_native_function *ww_function(uint32_t id); /* or NULL */
int ww_is_global(uint64_t at, uint64_t n);

/* -- heavy thread -------------------------------------------------------------------------------------------------- */

struct ww_job {
    struct ww_job *next;
    void (*work)(struct ww_job *job); /* in the heavy thread: sets result, data, nbytes */
    void (*done)(struct ww_job *job); /* in the executor, then the job and its data are freed; NULL: only the answer */
    CUresult result;
    uint32_t slot, seq;
    void *data; /* malloced: bytes of the answer */
    size_t nbytes;
    uint64_t a, b, c;
    int fd;
    int waits; /* for all work of the device */
    void *with;
    struct ww_call *call; /* a copy, freed with the job, or NULL */
};

void ww_heavy_start(void);
void ww_heavy(struct ww_job job);
CUresult ww_heavy_for(const struct ww_call *call, struct ww_job job);      /* .. that answers the call: WW_LATER */
void ww_heavy_behind(const struct ww_barrier *barrier, struct ww_job job); /* .. that answers the barrier's call */
int ww_heavy_step(void); /* carries out `done` of jobs that are; whether there was one */
struct ww_call *ww_copy_call(const struct ww_call *call);

#endif
