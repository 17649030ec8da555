/* The executor: reads entries of the ring in order, carries out or hands on each, answers. It trusts nothing in an
 * entry: it copies the entry, then checks it. An invalid entry ends the worker, and with it only this
 * client's work.
 */
#include "worker.h"

#include <linux/futex.h>
#include <sched.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define BATCH 32                 /* entries between two looks at the device */
#define SPIN_NS 200000u          /* without anything new, before the executor naps: programs in Python pause for less */
#define SPIN_WAITED_NS 10000000u /* the same while a thread waits for the device: it spins as long (layer_ring.c) */
#define SPIN_FEW_NS 20000u       /* both where it takes the program's core from it */
#define FEW_CORES 2
#define NAP_NS 50000u       /* a running program need not wake the executor.. */
#define NAPS_NS 20000000u   /* .. for so long */
#define STEP_PART 128u      /* sleeps while the device works are this part of the time since the last event, .. */
#define STEP_LEAST_NS 5000u /* .. at least this, .. */
#define STEP_MOST_NS 50000u /* .. and at most this */
#define IDLE_NS 50000000u
#define TOLD (WW_RING_BYTES / 4) /* a mirror learns of so much that was read */

static _Alignas(64) unsigned char buffer[sizeof(struct ww_call) + WW_ENTRY_MOST];

/* -- calls
 * ------------------------------------------------------------------------------------------------------------------ */

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

/* A call that is replayed as it is. Its arguments are followed by zeros up to the entry's end: their size is the op's.
 */
static CUresult replay(const struct ww_call *call) {
    return ww_heavy_for(call, (struct ww_job){.work = run, .done = was_run, .call = ww_copy_call(call)});
}

#define ARGS(name) .bytes = sizeof(struct ww_args_##name)

static const struct ww_operation operations[WW_HAND_OPS] = {
    [WW_OP_IMAGE] = {.read = ww_image, ARGS(image)},
    [WW_OP_LOAD] = {.read = ww_load, ARGS(load)},
    [WW_OP_UNLOAD] = {.read = ww_unload, ARGS(id)},
    [WW_OP_GLOBAL] = {.read = ww_global, ARGS(global)},
    [WW_OP_FUNCTION_SET] = {.read = ww_function_set, ARGS(function_set)},
    [WW_OP_CLUSTERS] = {.read = ww_clusters, ARGS(launch)},
    [WW_OP_LAUNCH] = {.check = ww_launch_check, .issue = ww_launch_issue, .is_node = 1, ARGS(launch)},
    [WW_OP_COPY] = {.check = ww_copy_check, .issue = ww_copy_issue, .is_node = 1, ARGS(copy)},
    [WW_OP_IN] = {.check = ww_move_check, .issue = ww_in_issue, ARGS(move)},
    [WW_OP_OUT] = {.check = ww_move_check, .issue = ww_out_issue, ARGS(move)},
    [WW_OP_MEMSET] = {.issue = ww_fill_issue, .is_node = 1, ARGS(memset)},
    [WW_OP_STREAM_CREATE] = {.read = ww_stream_create, ARGS(stream_create)},
    [WW_OP_STREAM_DESTROY] = {.read = ww_stream_destroy, ARGS(id)},
    [WW_OP_STREAM_QUERY] = {.read = ww_stream_query},
    [WW_OP_STREAM_SYNC] = {.read = ww_stream_sync},
    [WW_OP_STREAM_WAIT] = {.check = ww_event_check, .is_due = ww_wait_is_due, .issue = ww_wait_issue, ARGS(event)},
    [WW_OP_EVENT_CREATE] = {.read = ww_event_create, ARGS(event)},
    [WW_OP_EVENT_DESTROY] = {.read = ww_event_destroy, ARGS(event)},
    [WW_OP_EVENT_RECORD] = {.check = ww_event_check, .issue = ww_record_issue, ARGS(event)},
    [WW_OP_EVENT_QUERY] = {.read = ww_event_query, ARGS(event)},
    [WW_OP_EVENT_SYNC] = {.read = ww_event_sync, ARGS(event)},
    [WW_OP_EVENT_ELAPSED] = {.read = ww_event_elapsed, ARGS(elapsed)},
    [WW_OP_CTX_SYNC] = {.read = ww_ctx_sync},
    [WW_OP_ALLOC] = {.read = ww_alloc, ARGS(alloc)},
    [WW_OP_FREE] = {.read = ww_free, ARGS(free)},
    [WW_OP_ALLOC_ASYNC] = {.read = ww_alloc, ARGS(alloc)},
    [WW_OP_FREE_ASYNC] = {.check = ww_free_check, .issue = ww_free_issue, ARGS(free)},
    [WW_OP_MEM_INFO] = {.read = ww_mem_info},
    [WW_OP_PIN] = {.read = ww_pin, ARGS(pin)},
    [WW_OP_UNPIN] = {.read = ww_unpin, ARGS(free)},
    [WW_OP_LINK] = {.read = ww_link, ARGS(link)},
    [WW_OP_SHARE] = {.read = ww_share, ARGS(link)},
    [WW_OP_SIGNAL] = {.read = ww_signal, ARGS(signal)},
    [WW_OP_AWAIT] = {.check = ww_await_check, .is_due = ww_await_is_due, .issue = ww_await_issue, ARGS(signal)},
    [WW_OP_GRAPH_HANDLE] = {.read = ww_graph_handle, ARGS(graph_handle)},
    [WW_OP_GRAPH_CONDITION] = {.read = ww_graph_condition, ARGS(graph_condition)},
    [WW_OP_GRAPH_BEGIN] = {.read = ww_graph_begin, ARGS(id)},
    [WW_OP_GRAPH_NODE] = {.read = ww_graph_node, ARGS(id)},
    [WW_OP_GRAPH_END] = {.read = ww_graph_end},
    [WW_OP_GRAPH_MAKE] = {.read = ww_graph_make, ARGS(graph)},
    [WW_OP_GRAPH_LAUNCH] = {.check = ww_graph_launch_check, .issue = ww_graph_launch_issue, ARGS(id)},
    [WW_OP_GRAPH_DROP] = {.read = ww_graph_drop, ARGS(graph)},
    [WW_OP_EXEC_DROP] = {.read = ww_exec_drop, ARGS(id)},
    [WW_OP_MORE] = {.read = ww_answer_more},
};

static void carry_out(struct ww_call *call) {
    static const struct ww_operation replayed = {.read = replay};
    const struct ww_operation *o = call->entry.op < WW_HAND_OPS ? operations + call->entry.op : &replayed;
    if (!o->read && !o->issue)
        o = &replayed; /* answers NOT_FOUND */
    call->operation = o;
    CUresult code = call->nargs < o->bytes              ? CUDA_ERROR_INVALID_VALUE
                    : o->read                           ? o->read(call)
                    : call->entry.stream == WW_RECORDED ? ww_graph_record(call)
                                                        : ww_stream_call(call);
    if (code != WW_LATER)
        ww_result(call, code);
}

/* -- ring
 * -------------------------------------------------------------------------------------------------------------------
 */

static void passed(uint64_t ahead, uint32_t size) {
    ww.tail += size;
    atomic_store_explicit(&ww.status->tail, ww.tail, memory_order_release);
    if (ahead > WW_RING_BYTES / 2 && ahead - size <= WW_RING_BYTES / 2) {
        atomic_fetch_add(&ww.status->tail_futex, 1);
        ww_wake_all(&ww.status->tail_futex);
    }
    if ((ww.tail - size) / TOLD != ww.tail / TOLD)
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
        if (e->slot != WW_NO_SLOT && e->op != WW_OP_MORE)
            ww_forget_rest(e->slot);
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

/* -- the loop
 * ------------------------------------------------------------------------------------------------------------- */

/* Sleeps until the client wakes it (WW_SLEEPS: as soon as it posts; WW_NAPS: when it waits), another thread is done, or
 * the time is over. The waker changes `wake` first. */
static void sleep_ns(uint32_t ns, uint32_t how) {
    struct timespec limit = {0, (long)ns};
    uint32_t seen = atomic_load(&ww.ring->wake);
    atomic_store(&ww.status->asleep, how);
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load(&ww.ring->head) == ww.tail && !ww_heavy_step() && !ww_links_step())
        syscall(SYS_futex, (uint32_t *)&ww.ring->wake, FUTEX_WAIT, seen, &limit, NULL, 0);
    atomic_store(&ww.status->asleep, 0);
}

static int many_cores(void) {
    cpu_set_t set;
    return !sched_getaffinity(0, sizeof set, &set) && CPU_COUNT(&set) > FEW_CORES;
}

static void rest(uint64_t since, int many) {
    uint64_t now = ww_now_ns(), idle = now - since, spin = SPIN_FEW_NS;
    if (many)
        spin = ww_streams_waited() ? SPIN_WAITED_NS : SPIN_NS;
    if (idle < spin) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
        return;
    }
    ww_memory_rest(now);
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
    int many = many_cores();
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
