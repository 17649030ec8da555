/* Gates in the streams of a program that shares its GPU. See passthrough.h and gate.h.
 *
 * A stream has a record with counters: of gates; of calls that entered and left the driver; of calls that the GPU is
 * known to have passed, because the host has waited for them or because the GPU has written `reached`. The GPU writes
 * two words of a stream: `at`, which is odd while the stream waits at a gate, and `reached`. A stream without work may
 * lose its record to another stream. If WW_STREAMS streams have work, the calls of further streams wait at the closed
 * gate in the host and are not counted.
 *
 * Three types of threads work here. Callers put gates. The keeper of a device writes to the board whether the program
 * is idle, runs, or waits at its closed gate, and opens the gate if no arbiter is alive. The keeper does not call the
 * driver, because the driver may block a caller until the gate opens. The marker appends writes of `reached` to quiet
 * streams, and reads the measured times of calls. While no other program is attached, each thread counts its first call
 * in each round of the marker. If the driver blocks the marker, the program only counts as busy for longer.
 *
 * Linux pins no pages of most file systems for a device. If the board is in such a folder, the GPU waits at a copy of
 * the gate in memory of the process. Threads copy the gate while they hold `publishing`: the keeper before it observes
 * the streams, because work counts as waiting only behind a gate that the GPU sees closed; and a caller that has found
 * the gate closed while the program was idle, before it puts work behind it, because the arbiter has not seen that call
 * and may open the gate of another program.
 *
 * If the driver refuses gates, callers wait at the closed gate in the host, and events replace the writes of `reached`.
 *
 * Locks, in the order in which they are taken: `marking`, held while the marker calls the driver; `attaching`; a
 * stream's `lock`, held while a gate or a mark is put; a device's `publishing`, held while the program's state
 * changes, never during a call of the driver.
 */
#include "gate.h"
#include "passthrough.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

#define GATE_SPACING_NS 200000u /* expected work between two gates; to be fitted on a GPU (sharing.md, section 11) */
#define UNKNOWN_NS 20000u       /* expected time of a call that was never measured: a gate after ten such calls */
#define QUIET_NS 200000u /* time without a call after which a stream gets a mark, if another program is attached */
#define ALONE_QUIET_NS 200000000u /* that time otherwise: longer than a thread waits for a processor within a call */
#define LOOK_NS 20000       /* between two checks of `at`; the GPU writes `at` sooner after it has read the gate */
#define MARK_NS 500000      /* between two rounds of the marker while another program is attached */
#define IDLE_NS 20000000    /* between two checks of the keeper if nothing wakes it; less than WW_GATE_FAIL_OPEN_NS */
#define STALLED_NS 2000000u /* without progress while a stream waits at the gate: all streams depend on it */
#define MAX_STALLED_NS 1000000000u /* maximum of that time if calls are long: the arbiter's own limit (executor.py) */
#define GATE_COPY (2 * WW_STREAMS) /* index of the copy of the gate in `words`, after two words of each stream */
#define COSTS 1024u
#define TIMINGS 64u

#define WAIT_VALUE_64 4u /* operations of cuStreamBatchMemOp */
#define WRITE_VALUE_64 5u
#define DEVICEMAP_PORTABLE (CU_MEMHOST_PORTABLE | CU_MEMHOST_DEVICEMAP)

struct operation { /* CUstreamBatchMemOpParams */
    uint64_t operation, address, value, flags, rest[2];
};

CUresult cuStreamBatchMemOp_v2(CUstream stream, uint32_t count, struct operation *operations, uint32_t flags);

/* The machine's functions that are called here and not defined here. */
#define FUNCTIONS(X)                                                                                                   \
    X(cuCtxGetCurrent)                                                                                                 \
    X(cuCtxSetCurrent)                                                                                                 \
    X(cuCtxGetDevice)                                                                                                  \
    X(cuDeviceGetUuid_v2)                                                                                              \
    X(cuDevicePrimaryCtxGetState)                                                                                      \
    X(cuStreamBatchMemOp_v2)                                                                                           \
    X(cuStreamIsCapturing)                                                                                             \
    X(cuThreadExchangeStreamCaptureMode)                                                                               \
    X(cuMemHostRegister_v2)                                                                                            \
    X(cuMemHostGetDevicePointer_v2)                                                                                    \
    X(cuEventCreate)                                                                                                   \
    X(cuEventRecord)                                                                                                   \
    X(cuEventQuery)                                                                                                    \
    X(cuEventElapsedTime)

static struct {
#define X(name) __typeof__(name) *name;
    FUNCTIONS(X)
#undef X
} machine;

struct device;

struct ww_stream {
    pthread_mutex_t lock;
    CUstream handle; /* NULL: the stream is destroyed, or the record was never used */
    CUcontext context;
    pthread_t thread;               /* for CU_STREAM_PER_THREAD: the thread that it belongs to */
    struct device *device;          /* NULL: never used */
    _Atomic uint64_t *at, *reached; /* the GPU writes */
    CUdeviceptr at_address, reached_address;
    CUevent mark;                        /* instead of a write of `reached` if the device is refused; NULL: none yet */
    uint64_t gates, marked, expected_ns; /* gates put; value of the last mark; expected time since the last gate */
    _Atomic uint64_t entered, left, known, last_ns;
};

enum state { IDLE, RUNNING, HELD };

struct device {
    CUdevice number;
    CUcontext context; /* the device's context; NULL: destroyed */
    bool is_refused;   /* the driver does not let the GPU wait at the gate or write words, so the host waits */
    struct ww_gate gate;
    struct ww_gate_slot *slot; /* stays if the slot is lost, because gates in streams still read it */
    CUdeviceptr gate_address, words_address;
    _Atomic uint64_t *words; /* of the streams, which the GPU writes, and the copy of the gate */
    struct ww_stream streams[WW_STREAMS];
    pthread_mutex_t publishing;
    enum state state;
    _Atomic uint32_t hosts; /* threads that wait at the gate */
    uint64_t progress, progress_ns;
    uint64_t passes; /* number of gates that the GPU had passed when the program was last found not to pass any */
};

/* Expected time of calls with a key. A wrong time only causes a gate too many or too few. */
struct cost {
    _Atomic uint64_t key;
    _Atomic uint32_t ns, calls;
};

enum timing_state { FREE, TAKEN, RECORDED };

struct timing {
    _Atomic int state;
    CUcontext context;
    CUevent begin, end;
    uint64_t key;
};

_Atomic uint32_t ww_nwatched, ww_must_look, ww_round;
_Atomic uint64_t *ww_watched[WW_WATCHED];
__thread uint32_t ww_calls __attribute__((tls_model("initial-exec")));
__thread uint32_t ww_counted_round __attribute__((tls_model("initial-exec")));

static struct device devices[WW_WATCHED];
static struct cost costs[COSTS];
static struct timing timings[TIMINGS];
static pthread_mutex_t attaching = PTHREAD_MUTEX_INITIALIZER, marking = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int disabled = 1, ending; /* disabled: calls of this process have no gates */
static int64_t priority;
static char tenant[WW_GATE_NAME];
static __thread CUcontext last_context __attribute__((tls_model("initial-exec")));
static __thread struct device *last_device __attribute__((tls_model("initial-exec")));

static void *keep(void *device);
static void *mark(void *unused);

/* -- reports to the arbiter ---------------------------------------------------------------------------------------- */

static uint64_t passed(const struct ww_stream *s) {
    uint64_t known = atomic_load(&s->known), reached = s->device ? atomic_load(s->reached) : 0;
    return known > reached ? known : reached;
}

static bool is_active(const struct ww_stream *s) { return s->device && passed(s) < atomic_load(&s->entered); }

static bool is_closed(const struct device *d) { return atomic_load(&d->slot->gate) != 1; }

static void copy_gate(struct device *d) { atomic_store(&d->words[GATE_COPY], atomic_load(&d->slot->gate)); }

static bool is_shared(const struct device *d) {
    return d && d->gate.slot && (atomic_load(&d->gate.head->programs) > 1 || is_closed(d));
}

/* Return RUNNING if the GPU executes work of the program, HELD if all such work waits at the gate, else IDLE. */
static enum state observe(struct device *d) {
    uint32_t active = 0, waiting = 0;
    uint64_t progress = 0, passes = 0, now = ww_now_ns();
    for (struct ww_stream *s = d->streams; s < d->streams + WW_STREAMS; s++) {
        uint64_t at = atomic_load(s->at);
        passes += at >> 1;
        if (!is_active(s))
            continue;
        active++;
        waiting += (uint32_t)(at & 1);
        progress += at + passed(s);
    }
    if (progress != d->progress)
        d->progress_ns = now;
    d->progress = progress;
    bool has_passed = passes != d->passes && waiting != active; /* through a gate that was open for a short time */
    if (d->state != HELD || waiting == active)
        d->passes = passes;
    if (!active) /* a thread that has not left the opened gate yet will make a call */
        return atomic_load(&d->hosts) ? HELD : IDLE;
    if (atomic_load(&d->words[GATE_COPY]) == 1)
        return RUNNING;
    uint64_t longest = atomic_load(&d->slot->longest_ns);
    uint64_t limit = longest < MAX_STALLED_NS / 4 ? 4 * longest : MAX_STALLED_NS;
    bool is_stalled = waiting && now - d->progress_ns > (limit > STALLED_NS ? limit : STALLED_NS);
    /* The work that a held program enqueues begins with a gate, which the GPU may not have reached yet. */
    return waiting == active || is_stalled || (d->state == HELD && !has_passed) ? HELD : RUNNING;
}

/* Report the program's state to the board; the caller has locked `publishing`. The order matters: `wants` is written
 * before `done`, because to the arbiter, a program without held calls and without work on the GPU is idle. */
static void report(struct device *d, enum state state) {
    struct ww_gate *g = &d->gate;
    if (state == d->state || !g->slot) {
        d->state = state;
        return;
    }
    if (state == RUNNING) {
        atomic_store(&g->slot->issued, ++g->issued);
        ww_gate_stop_waiting(g);
    } else {
        if (state == HELD)
            ww_gate_fails_open(g);
        else
            ww_gate_stop_waiting(g);
        if (d->state == RUNNING)
            ww_gate_pass(g, 1);
        if (state == IDLE && is_shared(d))
            ww_gate_ring(g);
    }
    d->state = state;
}

/* Count a call that is about to enter a stream; the caller has locked the stream. Return true if the stream has no
 * earlier work. The count and the state change under one lock of `publishing`, because between the two changes the
 * keeper would take the program for idle. */
static bool enter(struct ww_stream *s) {
    struct device *d = s->device;
    pthread_mutex_lock(&d->publishing);
    bool begins = !is_active(s);
    if (d->state == IDLE)
        d->state = ww_gate_enter(&d->gate, true) ? RUNNING : HELD;
    if (d->state == HELD)
        copy_gate(d);
    atomic_fetch_add(&s->entered, 1);
    pthread_mutex_unlock(&d->publishing);
    return begins;
}

/* Report that the program is idle, if it is. */
static void report_idle(struct device *d) {
    pthread_mutex_lock(&d->publishing);
    if (d->state != IDLE && observe(d) == IDLE)
        report(d, IDLE);
    pthread_mutex_unlock(&d->publishing);
}

/* The keeper of a device. A stream that waits at the gate at one check may have passed the gate just before it was
 * closed: the program is held if two checks in a row find the stream there, and the gate has not changed between them.
 * Until then `wants` stays: if the arbiter opens the gate and soon closes it again, it waits for that word. */
static void *keep(void *device) {
    struct device *d = device;
    enum state before = IDLE;
    uint32_t opened = 0;
    while (true) {
        uint32_t opened_before = opened;
        opened = atomic_load(&d->slot->opened);
        pthread_mutex_lock(&d->publishing);
        copy_gate(d);
        enum state found = observe(d);
        bool is_sure = found != HELD || (opened == opened_before && (before == HELD || d->state == HELD));
        if (is_sure)
            report(d, found);
        bool is_lost = d->gate.slot && atomic_load(&d->slot->serial) != d->gate.serial;
        bool fails_open = d->gate.slot ? is_sure && d->state == HELD && ww_gate_fails_open(&d->gate) : found != IDLE;
        if (fails_open || is_lost) {
            atomic_store(&d->slot->gate, 1);
            copy_gate(d);
        }
        bool drains = is_closed(d) ? d->state == RUNNING : d->state == HELD;
        pthread_mutex_unlock(&d->publishing);
        before = found;
        ww_futex_wait(&d->slot->opened, opened, drains || !is_sure ? LOOK_NS : IDLE_NS);
    }
    return NULL;
}

/* -- attaching ----------------------------------------------------------------------------------------------------- */

static void in_child(void) { /* the slot is the parent's, and so are the threads */
    if (atomic_load(&ww_nwatched))
        atomic_store(&disabled, 1);
    atomic_store(&ww_nwatched, 0);
    pthread_mutex_init(&marking, NULL); /* the marker may have held it */
}

/* Wait at exit until the marker has ended its round, because the driver ends after that. */
static void at_exit(void) {
    struct timespec until;
    atomic_store(&ending, 1);
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec++;
    if (!pthread_mutex_timedlock(&marking, &until))
        pthread_mutex_unlock(&marking);
}

static void start_thread(void *(*run)(void *), void *argument) {
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&thread, NULL, run, argument))
        atomic_store(&disabled, 1);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Open the board of a device; create it if it does not exist. Return a descriptor, or -1. */
static int open_board(CUdevice number) {
    const char *folder = getenv("WARPWELL_TURNS");
    unsigned char uuid[16];
    char path[4096], *name = path;
    struct stat about;
    if (machine.cuDeviceGetUuid_v2(uuid, number))
        return -1;
    int n = folder && *folder ? snprintf(path, sizeof path - 64, "%s", folder)
                              : snprintf(path, sizeof path - 64, "/dev/shm/warpwell-%u", (unsigned)getuid());
    if (n < 0 || n >= (int)sizeof path - 64 || stat(path, &about))
        return -1;
    bool is_group = about.st_mode & S_IWGRP;
    gid_t group = about.st_gid;
    name += n + sprintf(name + n, "/gpu-");
    for (size_t i = 0; i < sizeof uuid; i++)
        name += sprintf(name, "%02x", uuid[i]);
    strcpy(name, ".board");
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return -1;
    uint64_t format = WW_GATE_FORMAT;
    if (fstat(fd, &about) || (about.st_size < (off_t)WW_GATE_BYTES && posix_fallocate(fd, 0, WW_GATE_BYTES)) ||
        (about.st_size < (off_t)WW_GATE_BYTES && pwrite(fd, &format, sizeof format, 0) != sizeof format)) {
        close(fd);
        return -1;
    }
    if (is_group && about.st_uid == geteuid() && !fchown(fd, (uid_t)-1, group))
        fchmod(fd, S_IRUSR | S_IWUSR | S_IRGRP | S_IWGRP);
    return fd;
}

/* Let the host wait at the gate from the next call on, because of an error of the driver. */
static void refuse(struct device *d, CUresult error) {
    static _Atomic int is_reported;
    d->is_refused = true;
    if (!atomic_exchange(&is_reported, 1))
        fprintf(stderr,
                "warpwell share: the driver does not let the GPU wait at a gate (error %d), so the host waits "
                "instead: work that is already queued delays other programs\n",
                (int)error);
}

static CUresult register_memory(void *memory, size_t nbytes, CUdeviceptr *address) {
    CUresult error = machine.cuMemHostRegister_v2(memory, nbytes, DEVICEMAP_PORTABLE);
    return error ? error : machine.cuMemHostGetDevicePointer_v2(address, memory, 0);
}

/* Let the GPU see the gate and the words of the streams. */
static void register_words(struct device *d, CUcontext context) {
    CUdeviceptr board;
    CUresult error = register_memory(d->words, (size_t)sysconf(_SC_PAGESIZE), &d->words_address);
    d->is_refused = false;
    if (error)
        refuse(d, error);
    d->gate_address = register_memory(d->gate.head, WW_GATE_BYTES, &board)
                          ? d->words_address + GATE_COPY * sizeof *d->words
                          : board + (CUdeviceptr)((char *)&d->slot->gate - (char *)d->gate.head);
    d->context = context;
}

/* Take a slot of the current device's board; `attaching` is held. */
static struct device *attach(CUcontext context, CUdevice number) {
    uint32_t n = atomic_load(&ww_nwatched);
    struct device *d = &devices[n];
    int fd = n < WW_WATCHED ? open_board(number) : -1;
    if (fd < 0)
        return NULL;
    if (!ww_gate_attach(&d->gate, fd, WW_GATE_STREAMS, getpid(), priority, tenant))
        return NULL;
    size_t nbytes = (size_t)sysconf(_SC_PAGESIZE);
    d->slot = d->gate.slot;
    /* Shared: after a fork, a write to private memory may move it, and the GPU would keep the earlier page. */
    d->words = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (d->words == MAP_FAILED)
        return NULL;
    d->number = number;
    pthread_mutex_init(&d->publishing, NULL);
    for (struct ww_stream *s = d->streams; s < d->streams + WW_STREAMS; s++) {
        pthread_mutex_init(&s->lock, NULL);
        s->at = d->words + 2 * (s - d->streams);
        s->reached = s->at + 1;
    }
    register_words(d, context);
    if (!n) {
        pthread_atfork(NULL, NULL, in_child);
        atexit(at_exit);
        start_thread(mark, NULL);
    }
    start_thread(keep, d);
    ww_watched[n] = &d->gate.head->programs;
    atomic_store_explicit(&ww_nwatched, n + 1, memory_order_release);
    return d;
}

bool ww_prepare_gates(void *library) {
    const char *share = getenv("WARPWELL_SHARE");
    bool is_complete = ww_gate_parse(share, &priority, tenant);
#define X(name) is_complete = is_complete && (*(void **)&machine.name = dlsym(library, #name));
    FUNCTIONS(X)
#undef X
    atomic_store(&disabled, !is_complete);
    atomic_store(&ww_must_look, is_complete);
    if (!is_complete && share && *share)
        fprintf(stderr,
                "warpwell share: this program's calls are not ordered: WARPWELL_SHARE is not PRIORITY:TENANT, or the "
                "driver does not support CUDA 12\n");
    return is_complete;
}

/* Let this thread make calls that are not allowed while a stream is captured, until `mode` is exchanged back. */
static void exchange_mode(int32_t *mode) { machine.cuThreadExchangeStreamCaptureMode(mode); }

/* Return the current context's device, or NULL. A device is attached at the first call. */
static struct device *current_device(CUcontext *context) {
    CUdevice number;
    if (atomic_load_explicit(&disabled, memory_order_relaxed) || machine.cuCtxGetCurrent(context) || !*context)
        return NULL;
    if (*context == last_context && last_device && last_device->context)
        return last_device;
    if (machine.cuCtxGetDevice(&number))
        return NULL;
    struct device *found = NULL;
    int32_t mode = CU_CAPTURE_RELAXED; /* else registering memory would invalidate a capture */
    exchange_mode(&mode);
    pthread_mutex_lock(&attaching);
    for (uint32_t i = 0; i < atomic_load(&ww_nwatched) && !found; i++)
        found = devices[i].number == number ? &devices[i] : NULL;
    if (!found)
        found = attach(*context, number);
    if (!found && atomic_exchange(&ww_must_look, 0)) /* try again rarely */
        fprintf(stderr, "warpwell share: this program's calls are not ordered: all slots of the GPU's board are in use,"
                        " or the folder in WARPWELL_TURNS cannot be used\n");
    if (found && !found->context) /* the context was destroyed and created again */
        register_words(found, *context);
    pthread_mutex_unlock(&attaching);
    exchange_mode(&mode);
    last_context = *context;
    last_device = found;
    return found;
}

/* -- streams ------------------------------------------------------------------------------------------------------- */

static bool is_stream(const struct ww_stream *s, CUstream handle, CUcontext context) {
    if (s->handle != handle)
        return false;
    if (handle == CU_STREAM_PER_THREAD)
        return s->context == context && pthread_equal(s->thread, pthread_self());
    return handle != CU_STREAM_LEGACY || s->context == context;
}

/* Return true if the record can be given to another stream: its stream has no work and no call in the driver. */
static bool is_free(const struct ww_stream *s) {
    return !is_active(s) && atomic_load(&s->left) == atomic_load(&s->entered);
}

/* Lock a free record and return it, or NULL: one without a stream, else the one that was used least recently. */
static struct ww_stream *lock_free(struct device *d) {
    struct ww_stream *found = NULL;
    for (struct ww_stream *s = d->streams; s < d->streams + WW_STREAMS; s++) {
        bool is_better = !found || (found->handle && (!s->handle || s->last_ns < found->last_ns));
        if (!is_free(s) || !is_better || pthread_mutex_trylock(&s->lock))
            continue;
        bool is_still_free = is_free(s); /* a call may have entered just before the lock */
        struct ww_stream *worse = is_still_free ? found : s;
        found = is_still_free ? s : found;
        if (worse)
            pthread_mutex_unlock(&worse->lock);
    }
    return found;
}

/* Lock the record of a stream and return it, or NULL if the stream does not have one and (with `make`) none is free.
 * Until it is locked, a record without work may be given to another stream. */
static struct ww_stream *lock_stream(struct device *d, CUstream handle, CUcontext context, bool make) {
    for (struct ww_stream *s = d->streams; s < d->streams + WW_STREAMS; s++) {
        if (!is_stream(s, handle, context))
            continue;
        pthread_mutex_lock(&s->lock);
        if (is_stream(s, handle, context))
            return s;
        pthread_mutex_unlock(&s->lock);
    }
    if (!make)
        return NULL;
    pthread_mutex_lock(&attaching);
    struct ww_stream *found = d->context ? lock_free(d) : NULL;
    if (found) {
        found->mark = found->context == context ? found->mark : NULL; /* an event belongs to a context */
        found->context = context;
        found->thread = pthread_self();
        found->at_address = d->words_address + 16 * (CUdeviceptr)(found - d->streams);
        found->reached_address = found->at_address + 8;
        found->device = d;
        found->handle = handle;
    }
    pthread_mutex_unlock(&attaching);
    return found;
}

static bool is_capturing(CUstream handle) {
    int32_t status = 0;
    return machine.cuStreamIsCapturing(handle, &status) || status;
}

static CUresult write_mark(struct ww_stream *s) {
    s->marked = atomic_load(&s->entered);
    if (s->device->is_refused) {
        bool has_event = s->mark || !machine.cuEventCreate(&s->mark, CU_EVENT_DISABLE_TIMING);
        CUresult error = has_event ? machine.cuEventRecord(s->mark, s->handle) : CUDA_ERROR_INVALID_CONTEXT;
        if (error)
            s->mark = NULL; /* the event belongs to another context */
        return error;
    }
    struct operation mark = {WRITE_VALUE_64, s->reached_address, s->marked, 0, {0, 0}};
    return machine.cuStreamBatchMemOp_v2(s->handle, 1, &mark, 0);
}

/* Put a gate, or one half of it. Between the two halves a stream waits for an event, which counts as waiting at the
 * gate. */
static CUresult put_gate(struct ww_stream *s, bool first, bool second) {
    uint64_t gate = s->gates += first;
    struct operation operations[3] = {{WRITE_VALUE_64, s->at_address, 2 * gate - 1, 0, {0, 0}},
                                      {WAIT_VALUE_64, s->device->gate_address, 1, 0, {0, 0}},
                                      {WRITE_VALUE_64, s->at_address, 2 * gate, 0, {0, 0}}};
    s->expected_ns = 0;
    return machine.cuStreamBatchMemOp_v2(s->handle, first + 2u * second, operations + !first, 0);
}

/* -- expected times ------------------------------------------------------------------------------------------------ */

static struct cost *cost_of(uint64_t key) {
    struct cost *cost = &costs[(key * 0x9e3779b97f4a7c15ull) >> 54];
    _Static_assert(COSTS == 1 << 10, "ten bits of the hash");
    if (atomic_load_explicit(&cost->key, memory_order_relaxed) != key) {
        atomic_store(&cost->key, key);
        atomic_store(&cost->calls, 0);
        atomic_store(&cost->ns, UNKNOWN_NS);
    }
    return cost;
}

/* Begin to measure a call. Return the number of its pair of events, or -1. */
static int begin_timing(struct ww_stream *s, uint64_t key) {
    for (int i = 0; i < (int)TIMINGS; i++) {
        struct timing *t = &timings[i];
        int free_state = FREE;
        if (t->begin && t->context != s->context)
            continue; /* an event belongs to a context */
        if (!atomic_compare_exchange_strong(&t->state, &free_state, TAKEN))
            continue;
        t->key = key;
        t->context = s->context;
        if ((t->end || !machine.cuEventCreate(&t->end, 0)) && (t->begin || !machine.cuEventCreate(&t->begin, 0)) &&
            !machine.cuEventRecord(t->begin, s->handle))
            return i;
        atomic_store(&t->state, FREE);
        return -1;
    }
    return -1;
}

static void learn(struct device *d, uint64_t key, float milliseconds) {
    struct cost *cost = cost_of(key);
    float ns = 1e6f * milliseconds, before = (float)atomic_load(&cost->ns);
    ns = ns < 0 ? 0 : ns > 4e9f ? 4e9f : ns;
    bool is_first = atomic_load(&cost->calls) <= WW_GATE_MEASURED_FIRST;
    atomic_store(&cost->ns, (uint32_t)(is_first ? ns : before + (ns - before) / 4));
    atomic_store(&d->slot->expected_ns, ww_gate_learn(d->slot, (uint64_t)ns) + GATE_SPACING_NS);
}

static void read_timings(struct device *d) {
    for (struct timing *t = timings; t < timings + TIMINGS; t++) {
        float milliseconds;
        if (atomic_load(&t->state) != RECORDED || t->context != d->context)
            continue;
        CUresult error = machine.cuEventQuery(t->end);
        if (error == CUDA_ERROR_NOT_READY)
            continue;
        if (!error && !machine.cuEventElapsedTime(&milliseconds, t->begin, t->end))
            learn(d, t->key, milliseconds);
        atomic_store(&t->state, FREE);
    }
}

/* -- calls --------------------------------------------------------------------------------------------------------- */

/* Wait in the host while the gate is closed, because the driver refuses gates or the call's stream has no record. Then
 * count the call, if its stream has a record, and return the record, locked. A waiting thread looks for the record at
 * each check, because the stream's context may be destroyed in the meantime.
 *
 * The gate is checked and the call is counted under one lock of `publishing`. If the program is RUNNING, the arbiter
 * waits for its work until a thread reports, under that lock, that no stream is active: the call makes one active
 * before. Else ww_gate_enter stores `issued` before it loads the gate (gate.h). So the arbiter never takes the program
 * for idle after a call has passed the gate and until the GPU has passed the call. */
static struct ww_stream *hold_host(struct device *d, CUstream handle, CUcontext context) {
    struct ww_gate *g = &d->gate;
    bool is_held = false;
    while (true) {
        uint32_t opened = atomic_load(&d->slot->opened);
        struct ww_stream *s = lock_stream(d, handle, context, true);
        pthread_mutex_lock(&d->publishing);
        bool passes = s && d->state != RUNNING ? ww_gate_enter(g, true) : ww_gate_is_open(g) || ww_gate_fails_open(g);
        if (!passes && !is_held)
            atomic_fetch_add(&d->hosts, 1);
        if (passes && is_held)
            atomic_fetch_sub(&d->hosts, 1);
        is_held = !passes;
        if (is_held && d->state == IDLE)
            d->state = HELD;
        if (passes && s) {
            d->state = RUNNING;
            atomic_fetch_add(&s->entered, 1);
            if (g->is_waiting && ww_gate_is_open(g))
                ww_gate_stop_waiting(g);
        }
        pthread_mutex_unlock(&d->publishing);
        if (passes)
            return s;
        if (s)
            pthread_mutex_unlock(&s->lock);
        ww_futex_wait(&d->slot->opened, opened, IDLE_NS);
    }
}

/* Count one call, which stands for all calls of this thread until the marker's next round, so that the arbiter makes an
 * arriving program wait for them. Calls in CU_STREAM_PER_THREAD are not counted, because the marker, which is another
 * thread, cannot put a mark there. */
static bool count_call(struct device *d, CUstream handle, CUcontext context, struct ww_call *call) {
    if (!d->gate.slot || handle == CU_STREAM_PER_THREAD || is_capturing(handle))
        return false;
    struct ww_stream *s = lock_stream(d, handle, context, true);
    if (!s)
        return false;
    enter(s);
    *call = (struct ww_call){s, -1, 0};
    s->expected_ns = GATE_SPACING_NS; /* the first call with another program attached gets a gate */
    pthread_mutex_unlock(&s->lock);
    return true;
}

bool ww_before(CUstream handle, uint64_t key, struct ww_call *call) {
    CUcontext context;
    struct device *d = current_device(&context);
    ww_counted_round = atomic_load_explicit(&ww_round, memory_order_relaxed);
    if (!is_shared(d))
        return d && count_call(d, handle, context, call);
    int32_t mode = CU_CAPTURE_RELAXED;
    exchange_mode(&mode);
    bool captures = is_capturing(handle);
    struct ww_stream *s = captures || d->is_refused ? NULL : lock_stream(d, handle, context, true);
    if (s) {
        bool begins = enter(s);
        bool has_gate = begins || s->expected_ns >= GATE_SPACING_NS || !s->gates;
        CUresult error = has_gate ? put_gate(s, true, true) : CUDA_SUCCESS;
        if (error) {
            refuse(d, error);
            atomic_fetch_sub(&s->entered, 1); /* undo `enter` */
            pthread_mutex_unlock(&s->lock);
            s = NULL;
        }
    }
    if (!s && !captures)
        s = hold_host(d, handle, context);
    if (s) {
        struct cost *cost = cost_of(key);
        uint32_t calls = atomic_fetch_add_explicit(&cost->calls, 1, memory_order_relaxed);
        s->expected_ns += atomic_load_explicit(&cost->ns, memory_order_relaxed);
        uint64_t number = atomic_load(&s->entered);
        bool is_last = atomic_load(&s->left) == number - 1;
        *call = (struct ww_call){s, -1, is_last ? number : 0};
        if (ww_gate_must_measure(calls))
            call->timing = begin_timing(s, key);
        pthread_mutex_unlock(&s->lock);
    }
    exchange_mode(&mode);
    return s != NULL;
}

void ww_after(const struct ww_call *call, bool is_done) {
    struct ww_stream *s = call->stream;
    int32_t mode = CU_CAPTURE_RELAXED;
    exchange_mode(&mode);
    if (call->timing >= 0) {
        bool is_recorded = !machine.cuEventRecord(timings[call->timing].end, s->handle);
        atomic_store(&timings[call->timing].state, is_recorded ? RECORDED : FREE);
    }
    atomic_store(&s->last_ns, ww_now_ns());
    atomic_fetch_add(&s->left, 1);
    if (is_done && call->number == atomic_load(&s->entered)) { /* no call has entered since */
        atomic_store(&s->known, call->number);
        report_idle(s->device);
    } else if (s->handle == CU_STREAM_PER_THREAD) { /* the marker cannot put a mark there */
        pthread_mutex_lock(&s->lock);
        if (is_stream(s, CU_STREAM_PER_THREAD, s->context)) /* else another stream has the record */
            write_mark(s);
        pthread_mutex_unlock(&s->lock);
    }
    exchange_mode(&mode);
}

void ww_before_wait(CUstream handle, uint64_t entered[]) {
    CUcontext context;
    struct device *d = current_device(&context);
    for (size_t i = 0; i < WW_STREAMS; i++) {
        struct ww_stream *s = d ? &d->streams[i] : NULL;
        entered[i] = s ? atomic_load(&s->left) : 0; /* before the check: the calls of the next stream do not count */
        bool is_meant = s && s->device && (handle ? is_stream(s, handle, context) : s->context == context);
        entered[i] = is_meant ? entered[i] : 0;
    }
}

void ww_after_wait(const uint64_t entered[]) {
    CUcontext context;
    struct device *d = current_device(&context);
    bool is_known = false;
    for (size_t i = 0; d && i < WW_STREAMS; i++) {
        uint64_t before = atomic_load(&d->streams[i].known);
        while (entered[i] > before && !atomic_compare_exchange_weak(&d->streams[i].known, &before, entered[i]))
            ;
        is_known |= entered[i] > 0;
    }
    if (is_known) {
        ww_counted_round = atomic_load(&ww_round) - 1; /* the next call is counted */
        report_idle(d);
    }
}

/* A stream that waits for an event counts as waiting at the gate behind that wait, because the event's stream may be
 * held at a gate itself. The gate counts as a call: otherwise the program would not request the GPU while the host
 * waits for the stream. */
CUresult ww_wait_event(CUstream handle, CUevent event, uint32_t flags, CUresult (*wait)(CUstream, CUevent, uint32_t)) {
    CUcontext context;
    struct device *d = current_device(&context);
    struct ww_stream *s = is_shared(d) && !d->is_refused ? lock_stream(d, handle, context, false) : NULL;
    if (s && is_capturing(handle)) {
        pthread_mutex_unlock(&s->lock);
        s = NULL;
    }
    if (!s)
        return wait(handle, event, flags);
    int32_t mode = CU_CAPTURE_RELAXED;
    exchange_mode(&mode);
    enter(s);
    bool is_put = !put_gate(s, true, false);
    exchange_mode(&mode);
    CUresult error = wait(handle, event, flags);
    exchange_mode(&mode);
    if (is_put && !is_capturing(handle)) { /* the event may have taken the stream into a capture */
        put_gate(s, false, true);
        atomic_store(&s->last_ns, ww_now_ns());
        atomic_fetch_add(&s->left, 1);
        if (handle == CU_STREAM_PER_THREAD)
            write_mark(s);
    } else {
        atomic_fetch_sub(&s->entered, 1); /* undo `enter`: nothing was put, and the lock was held since */
    }
    pthread_mutex_unlock(&s->lock);
    exchange_mode(&mode);
    return error;
}

void ww_forget_stream(CUstream handle) {
    uint32_t n = atomic_load(&ww_nwatched);
    for (struct device *d = devices; d < devices + n; d++)
        for (struct ww_stream *s = d->streams; s < d->streams + WW_STREAMS; s++) {
            if (s->handle != handle || !handle || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD)
                continue;
            pthread_mutex_lock(&s->lock);
            bool is_meant = s->handle == handle;
            if (is_meant && is_active(s) && (is_capturing(handle) || write_mark(s)))
                atomic_store(&s->known, atomic_load(&s->entered));
            s->handle = is_meant ? NULL : s->handle;
            pthread_mutex_unlock(&s->lock);
        }
}

void ww_forget_contexts(CUcontext context) {
    uint32_t n = atomic_load(&ww_nwatched), flags;
    for (struct device *d = devices; d < devices + n; d++) {
        int32_t is_active_primary = 1;
        bool is_gone = context && d->context == context;
        if (!context && !machine.cuDevicePrimaryCtxGetState(d->number, &flags, &is_active_primary))
            is_gone = !is_active_primary;
        for (struct ww_stream *s = d->streams; s < d->streams + WW_STREAMS; s++) {
            if (!is_gone && !(context && s->context == context))
                continue;
            pthread_mutex_lock(&s->lock);
            atomic_store(&s->known, atomic_load(&s->entered));
            s->handle = NULL;
            s->mark = NULL;
            pthread_mutex_unlock(&s->lock);
        }
        for (struct timing *t = timings; t < timings + TIMINGS && is_gone; t++)
            if (t->context == d->context) {
                t->begin = t->end = NULL;
                atomic_store(&t->state, FREE);
            }
        if (is_gone)
            d->context = NULL;
    }
}

/* -- the marker ---------------------------------------------------------------------------------------------------- */

/* Learn whether the GPU has passed the calls of a quiet stream, by a mark in the stream. The legacy stream is queried
 * instead: it synchronizes all blocking streams, so a mark in it would make the later calls of every such stream wait
 * for the earlier calls of every other one, and two of these streams could wait for each other. While no other program
 * is attached, a busy thread counts one call in each round of the marker, so a stream that counts no call for several
 * rounds is quiet. A mark must not overtake a call that is counted, or checked in an earlier round, and has not reached
 * the driver: such a call would be work that nobody knows of. */
static void mark_quiet(struct ww_stream *s, uint64_t now) {
    uint64_t quiet_ns = is_shared(s->device) ? QUIET_NS : ALONE_QUIET_NS;
    if (!is_active(s) || pthread_mutex_trylock(&s->lock))
        return;
    bool is_quiet = now >= atomic_load(&s->last_ns) + quiet_ns; /* `last_ns` may be later than `now` */
    uint64_t entered = atomic_load(&s->entered);
    bool is_legacy = s->handle == CU_STREAM_LEGACY;
    if (s->mark && s->marked > atomic_load(&s->known) && machine.cuEventQuery(s->mark) != CUDA_ERROR_NOT_READY)
        atomic_store(&s->known, s->marked);
    if (is_quiet && s->handle && s->handle != CU_STREAM_PER_THREAD && (is_legacy || s->marked != entered) &&
        atomic_load(&s->left) == entered && !machine.cuCtxSetCurrent(s->context) && !is_capturing(s->handle) &&
        (is_legacy ? ww_machine.cuStreamQuery(s->handle) != CUDA_ERROR_NOT_READY : write_mark(s) != 0))
        atomic_store(&s->known, entered);
    pthread_mutex_unlock(&s->lock);
}

static void *mark(void *unused) {
    int32_t mode = CU_CAPTURE_RELAXED;
    machine.cuThreadExchangeStreamCaptureMode(&mode);
    while (!atomic_load(&ending)) {
        uint32_t n = atomic_load(&ww_nwatched), opened = n ? atomic_load(&devices->slot->opened) : 0;
        bool is_busy = false;
        atomic_fetch_add(&ww_round, 1); /* before the marks, so that a call behind a mark is counted */
        pthread_mutex_lock(&marking);
        for (struct device *d = devices; d < devices + n && !atomic_load(&ending); d++) {
            uint64_t now = ww_now_ns();
            is_busy |= is_shared(d);
            if (!d->context || machine.cuCtxSetCurrent(d->context))
                continue;
            read_timings(d);
            for (struct ww_stream *s = d->streams; s < d->streams + WW_STREAMS; s++)
                mark_quiet(s, now);
            report_idle(d);
        }
        pthread_mutex_unlock(&marking);
        struct timespec pause = {0, is_busy ? MARK_NS : IDLE_NS};
        if (is_busy || !n)
            nanosleep(&pause, NULL);
        else /* wakes up when another program attaches */
            ww_futex_wait(&devices->slot->opened, opened, IDLE_NS);
    }
    return unused;
}
