/* The executor: reads the entries of the ring in order, executes each or passes it to a stream or a heavy thread, and
 * answers. It trusts nothing in an entry: it copies the entry, then checks the copy. An entry with an invalid header
 * ends the worker, and so only this client's work.
 */
#include "worker.h"

#include <string.h>

#define BATCH 32                 /* entries to read before the executor looks at the device again */
#define SPIN_NS 200000u          /* idle time after which the executor naps; Python programs pause for less */
#define SPIN_WAITED_NS 10000000u /* .. if a thread of the client waits, which spins for as long (layer_ring.c) */
#define SPIN_FEW_NS 20000u       /* both, on a machine without a core to spare */
#define NAP_NS 50000u            /* duration of a nap, which a waiting client ends early, .. */
#define NAPS_NS 20000000u        /* .. and the idle time after which the executor sleeps instead */
#define STEP_PART 128u      /* while the device works, a sleep lasts this part of the time since the last event, .. */
#define STEP_LEAST_NS 5000u /* .. at least this, .. */
#define STEP_MOST_NS 50000u /* .. and at most this */
#define IDLE_NS 50000000u   /* duration of a sleep, which the client ends early when it publishes an entry */
#define MIRROR_WAKE_BYTES (WW_RING_BYTES / 4) /* interval of wake-ups of a mirror (relay.c), in bytes read */

static _Alignas(64) unsigned char buffer[sizeof(struct ww_call) + WW_ENTRY_MOST];

/* -- calls --------------------------------------------------------------------------------------------------------- */

static void run(struct ww_job *job) {
    uint32_t n = 0;
    job->data = ww_memory(256);
    job->result = ww_run(job->call->entry.op, job->call->args, job->call->nargs, job->data, 256, &n);
    job->nbytes = n;
}

static void was_run(struct ww_job *job) {
    if (job->slot == WW_NO_SLOT)
        ww_result(job->call, job->result);
    else
        ww_answer(job->slot, job->seq, job->result, job->data, job->result ? 0 : job->nbytes);
}

/* Pass a call to generated code, which makes the same call of the driver. The op determines the size of the arguments;
 * zeros follow them up to the end of the entry. */
static CUresult replay(const struct ww_call *call) {
    return ww_heavy_for(call, (struct ww_job){.work = run, .done = was_run, .call = ww_copy_call(call)});
}

static void carry_out(struct ww_call *call) {
    static const struct ww_operation replayed = {.read = replay};
    const struct ww_operation *o = call->entry.op < WW_HAND_OPS ? ww_operations + call->entry.op : &replayed;
    if (!o->read && !o->issue)
        o = &replayed; /* whose generated code answers NOT_FOUND */
    call->operation = o;
    CUresult code = call->nargs < o->bytes              ? CUDA_ERROR_INVALID_VALUE
                    : o->read                           ? o->read(call)
                    : call->entry.stream == WW_RECORDED ? ww_graph_record(call)
                                                        : ww_stream_call(call);
    if (code != WW_LATER)
        ww_result(call, code);
}

/* -- ring ---------------------------------------------------------------------------------------------------------- */

static void passed(uint64_t ahead, uint32_t size) {
    ww.tail += size;
    ww_store_tail(ww.status, ww.tail, ahead, size);
    if ((ww.tail - size) / MIRROR_WAKE_BYTES != ww.tail / MIRROR_WAKE_BYTES)
        ww_changed();
}

static int read_one(void) {
    uint64_t ahead = atomic_load_explicit(&ww.ring->head, memory_order_acquire) - ww.tail;
    if (!ahead)
        return 0;
    if (ahead > WW_RING_BYTES || ahead % sizeof(struct ww_entry))
        ww_die("the ring's head is wrong");
    struct ww_call *call = (void *)buffer;
    uint64_t at = ww.tail % WW_RING_BYTES;
    memset(call, 0, sizeof *call);
    memcpy(&call->entry, ww.ring->data + at, sizeof call->entry);
    const struct ww_entry *e = &call->entry;
    if (e->size < sizeof *e || e->size % sizeof *e || e->size > ahead || e->size > WW_RING_BYTES - at)
        ww_die("an entry's size is wrong");
    if (e->op != WW_OP_PAD) {
        if (e->size > WW_ENTRY_MOST || (e->slot != WW_NO_SLOT && e->slot >= WW_SLOTS) || e->place > WW_PLACES ||
            e->nbytes > WW_PLACE_BYTES)
            ww_die("an entry's header is wrong");
        call->nargs = e->size - (uint32_t)sizeof *e;
        call->bytes = sizeof *call + call->nargs;
        memcpy(call->args, ww.ring->data + at + sizeof *e, call->nargs);
    }
    passed(ahead, e->size);
    if (e->op != WW_OP_PAD)
        carry_out(call);
    return 1;
}

static int read_some(void) {
    int n = 0;
    while (n < BATCH && read_one())
        n++;
    return n;
}

/* -- the loop ------------------------------------------------------------------------------------------------------ */

/* Sleep until the client wakes the executor (WW_SLEEPS: when it publishes an entry; WW_NAPS: when it waits), another
 * thread of the worker has news, or `ns` have passed. A waker changes `wake` before its futex call. */
static void sleep_ns(uint32_t ns, uint32_t how) {
    uint32_t seen = atomic_load(&ww.ring->wake);
    atomic_store(&ww.status->asleep, how);
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load(&ww.ring->head) == ww.tail && !ww_heavy_step() && !ww_links_step())
        ww_futex_wait(&ww.ring->wake, seen, ns);
    atomic_store(&ww.status->asleep, 0);
}

static void rest(uint64_t since, int many) {
    uint64_t now = ww_now_ns(), idle = now - since, spin = SPIN_FEW_NS;
    if (many)
        spin = ww_streams_waited() ? SPIN_WAITED_NS : SPIN_NS;
    if (idle < spin) {
        ww_relax();
        return;
    }
    ww_memory_rest(now);
    if (ww.gate.slot)
        ww_streams_settle();
    if (!ww_streams_busy() && !ww_links_busy()) {
        if (idle < NAPS_NS)
            sleep_ns(NAP_NS, WW_NAPS);
        else
            sleep_ns(IDLE_NS, WW_SLEEPS);
        return;
    }
    uint64_t step = idle / STEP_PART;
    if (step < STEP_LEAST_NS)
        step = STEP_LEAST_NS;
    sleep_ns((uint32_t)(step < STEP_MOST_NS ? step : STEP_MOST_NS), WW_NAPS);
}

static void count(uint64_t calls) {
    atomic_store_explicit(&ww.counts->calls, calls, memory_order_relaxed);
    atomic_store_explicit(&ww.counts->bytes, ww_arena.used, memory_order_relaxed);
}

_Noreturn void ww_execute(void) {
    uint64_t since = ww_now_ns(), calls = 0;
    int many = ww_many_cores();
    for (;;) {
        int some = read_some();
        calls += (uint64_t)some;
        some |= ww_heavy_step();
        some |= ww_links_step();
        some |= ww_streams_step();
        if (some) {
            since = ww_now_ns();
            count(calls);
        } else
            rest(since, many);
    }
}
