/* The executor: reads entries of the ring in order, carries out or hands on each, answers. It trusts nothing in an
 * entry: it copies the entry, then checks it. What no honest layer writes ends the worker, and with it only this
 * client's work.
 */
#include "worker.h"

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define BATCH 32                 /* entries between two looks at the device */
#define SPIN_NS 200000u          /* without anything new, before the executor naps: programs in Python pause for less */
#define SPIN_WAITED_NS 10000000u /* the same while a thread waits for the device: it spins as long (layer_ring.c) */
#define SPIN_FEW_NS 20000u       /* both where it takes the program's core from it */
#define FEW_CORES 2
#define NAP_NS 50000u       /* a program that goes on need not wake the executor.. */
#define NAPS_NS 20000000u   /* .. for so long */
#define STEP_PART 128u      /* sleeps while the device works are this part of the time since the last event, .. */
#define STEP_LEAST_NS 5000u /* .. at least this, .. */
#define STEP_MOST_NS 50000u /* .. and at most this */
#define IDLE_NS 50000000u
#define TOLD (WW_RING_BYTES / 4) /* a mirror learns of so much that was read */

struct rest { /* of an answer that is longer than a slot */
    unsigned char *bytes;
    size_t at, n;
};

static struct rest rests[WW_SLOTS];
static uint32_t errors;
static _Alignas(64) unsigned char buffer[sizeof(struct ww_call) + WW_ENTRY_MOST];

static long futex(_Atomic uint32_t *word, int op, uint32_t value, const struct timespec *limit) {
    return syscall(SYS_futex, (uint32_t *)word, op, value, limit, NULL, 0);
}

/* -- answers
 * -------------------------------------------------------------------------------------------------------------- */

static void forget_rest(uint32_t slot) {
    free(rests[slot].bytes);
    rests[slot] = (struct rest){0};
}

/* A mirror sleeps until something changes: behind the change, before the look at whether it sleeps. */
static void changed(void) {
    atomic_fetch_add(&ww.status->changes, 1);
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&ww.ring->watched, memory_order_relaxed))
        futex(&ww.status->changes, FUTEX_WAKE, INT_MAX, NULL);
}

static void fill_slot(uint32_t slot, uint32_t seq, CUresult result, const void *data, size_t n, size_t more) {
    struct ww_slot *s = ww.status->slots + slot;
    s->result = result;
    s->nbytes = (uint32_t)n;
    s->more = (uint32_t)more;
    if (n)
        memcpy(s->data, data, n);
    atomic_store_explicit(&s->seq, seq, memory_order_release);
    futex(&s->seq, FUTEX_WAKE, INT_MAX, NULL);
    changed();
}

void ww_answer(uint32_t slot, uint32_t seq, CUresult result, const void *data, size_t n) {
    if (slot == WW_NO_SLOT)
        return;
    size_t now = n < WW_SLOT_DATA ? n : WW_SLOT_DATA;
    if (n > now) {
        forget_rest(slot);
        rests[slot] = (struct rest){.bytes = ww_memory(n - now), .n = n - now};
        memcpy(rests[slot].bytes, (const unsigned char *)data + now, n - now);
    }
    fill_slot(slot, seq, result, data, now, n - now);
}

static void answer_more(const struct ww_call *call) {
    if (call->entry.slot == WW_NO_SLOT)
        return;
    struct rest *r = rests + call->entry.slot;
    size_t now = r->n - r->at < WW_SLOT_DATA ? r->n - r->at : WW_SLOT_DATA;
    r->at += now;
    fill_slot(call->entry.slot, call->entry.seq, CUDA_SUCCESS, r->bytes + r->at - now, now, r->n - r->at);
    if (r->at == r->n)
        forget_rest(call->entry.slot);
}

void ww_place_done(uint32_t place, uint32_t use, CUresult result) {
    struct ww_place *p = ww.status->places + place - 1;
    p->result = result;
    atomic_store_explicit(&p->use, use, memory_order_release);
    futex(&p->use, FUTEX_WAKE, INT_MAX, NULL);
    changed();
}

void ww_result(const struct ww_call *call, CUresult result) {
    uint16_t op = call->entry.op;
    if (ww_is_sticky(result))
        ww_lost(result);
    if (result && call->entry.place && (op == WW_OP_IN || op == WW_OP_OUT))
        ww_place_done(call->entry.place, call->entry.use, result);
    if (call->entry.slot != WW_NO_SLOT)
        ww_answer(call->entry.slot, call->entry.seq, result, NULL, 0);
    else if (result) {
        atomic_store(&ww.status->deferred, (uint64_t)++errors << 32 | (uint32_t)result);
        changed();
    }
}

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
static void replay(const struct ww_call *call) {
    ww_heavy((struct ww_job){
        .work = run, .done = was_run, .call = ww_copy_call(call), .slot = call->entry.slot, .seq = call->entry.seq});
}

static void carry_out(struct ww_call *call) {
    switch (call->entry.op) {
    case WW_OP_PAD:
        break;
    case WW_OP_IMAGE:
        ww_image(call);
        break;
    case WW_OP_LOAD:
        ww_load(call);
        break;
    case WW_OP_UNLOAD:
        ww_unload(call);
        break;
    case WW_OP_GLOBAL:
        ww_global(call);
        break;
    case WW_OP_FUNCTION_SET:
        ww_function_set(call);
        break;
    case WW_OP_CLUSTERS:
        ww_clusters(call);
        break;
    case WW_OP_LAUNCH:
    case WW_OP_COPY:
    case WW_OP_IN:
    case WW_OP_OUT:
    case WW_OP_MEMSET:
    case WW_OP_STREAM_WAIT:
    case WW_OP_AWAIT:
    case WW_OP_EVENT_RECORD:
    case WW_OP_FREE_ASYNC:
    case WW_OP_GRAPH_LAUNCH:
        if (call->entry.stream == WW_RECORDED)
            ww_graph_record(call);
        else
            ww_stream_call(call);
        break;
    case WW_OP_GRAPH_HANDLE:
        ww_graph_handle(call);
        break;
    case WW_OP_GRAPH_CONDITION:
        ww_graph_condition(call);
        break;
    case WW_OP_GRAPH_BEGIN:
        ww_graph_begin(call);
        break;
    case WW_OP_GRAPH_NODE:
        ww_graph_node(call);
        break;
    case WW_OP_GRAPH_END:
        ww_graph_end(call);
        break;
    case WW_OP_GRAPH_MAKE:
        ww_graph_make(call);
        break;
    case WW_OP_GRAPH_DROP:
        ww_graph_drop(call);
        break;
    case WW_OP_EXEC_DROP:
        ww_exec_drop(call);
        break;
    case WW_OP_STREAM_CREATE:
        ww_stream_create(call);
        break;
    case WW_OP_STREAM_DESTROY:
        ww_stream_destroy(call);
        break;
    case WW_OP_STREAM_QUERY:
        ww_stream_query(call);
        break;
    case WW_OP_STREAM_SYNC:
        ww_stream_sync(call);
        break;
    case WW_OP_EVENT_CREATE:
        ww_event_create(call);
        break;
    case WW_OP_EVENT_DESTROY:
        ww_event_destroy(call);
        break;
    case WW_OP_EVENT_QUERY:
        ww_event_query(call);
        break;
    case WW_OP_EVENT_SYNC:
        ww_event_sync(call);
        break;
    case WW_OP_EVENT_ELAPSED:
        ww_event_elapsed(call);
        break;
    case WW_OP_CTX_SYNC:
        ww_ctx_sync(call);
        break;
    case WW_OP_ALLOC:
    case WW_OP_ALLOC_ASYNC:
        ww_alloc(call);
        break;
    case WW_OP_FREE:
        ww_free(call);
        break;
    case WW_OP_MEM_INFO:
        ww_mem_info(call);
        break;
    case WW_OP_PIN:
        ww_pin(call);
        break;
    case WW_OP_UNPIN:
        ww_unpin(call);
        break;
    case WW_OP_LINK:
        ww_link(call);
        break;
    case WW_OP_SHARE:
        ww_share(call);
        break;
    case WW_OP_SIGNAL:
        ww_event_signal(call);
        break;
    case WW_OP_MORE:
        answer_more(call);
        break;
    default:
        replay(call);
        break;
    }
}

/* -- ring
 * -------------------------------------------------------------------------------------------------------------------
 */

static void passed(uint64_t ahead, uint32_t size) {
    ww.tail += size;
    atomic_store_explicit(&ww.status->tail, ww.tail, memory_order_release);
    if (ahead > WW_RING_BYTES / 2 && ahead - size <= WW_RING_BYTES / 2) {
        atomic_fetch_add(&ww.status->tail_futex, 1);
        futex(&ww.status->tail_futex, FUTEX_WAKE, INT_MAX, NULL);
    }
    if ((ww.tail - size) / TOLD != ww.tail / TOLD)
        changed();
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
        if (e->slot != WW_NO_SLOT && e->op != WW_OP_MORE && rests[e->slot].bytes)
            forget_rest(e->slot);
    }
    passed(ahead, e->size);
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

void ww_wake(void) {
    atomic_fetch_add(&ww.ring->wake, 1);
    futex(&ww.ring->wake, FUTEX_WAKE, INT_MAX, NULL);
}

uint64_t ww_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Sleeps until the client wakes it (WW_SLEEPS: as soon as it posts; WW_NAPS: when it waits), another thread is done, or
 * the time is over. Who wakes changes `wake` first. */
static void sleep_ns(uint32_t ns, uint32_t how) {
    struct timespec limit = {0, (long)ns};
    uint32_t seen = atomic_load(&ww.ring->wake);
    atomic_store(&ww.status->asleep, how);
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load(&ww.ring->head) == ww.tail && !ww_heavy_step() && !ww_links_step())
        futex(&ww.ring->wake, FUTEX_WAIT, seen, &limit);
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
