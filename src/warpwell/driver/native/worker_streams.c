/* Streams, events, parked calls, marks.
 *
 * Parked calls: a call queues here, in the order of its stream, while the driver might block on it or an earlier call
 * is still parked. Calls are numbered as they are read. A call of the legacy stream is issued when no blocking stream
 * has a parked call with a smaller number, and vice versa; a wait for an event when the record that it refers to has
 * been issued; and any call only while fewer than MOST calls of its stream are outstanding. The parked call with the
 * smallest number waits only for the device, a signal of another worker or the gate, so calls of one worker do not
 * deadlock.
 *
 * Marks: a mark is an event that the worker records in a stream and polls. It covers the calls before it. The worker
 * has no other way to see the progress of the device. Blocking streams also wait for a mark in the legacy stream, so
 * such a mark must be recorded before the next call of a blocking stream is issued: see `about_to_issue`.
 */
#include "worker.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST 512u /* outstanding calls in a stream: the driver blocks at about 1,000 */
#define MARK_EACH 64u
#define PARKED_MOST (64u << 20) /* bytes of calls parked in a stream: only hostile clients reach the limit */
#define PARKED_MOST_ALL (512u << 20)
#define TODOS_MOST (1u << 20) /* only hostile clients reach this limit, too */

struct event {
    uint32_t flags;
    struct ww_generation *generation; /* its last record */
};

struct waiter { /* a thread in cuEventSynchronize, or a stream of another device */
    struct waiter *next;
    struct ww_generation *generation;
    struct ww_todo todo;
};

static struct ww_stream *streams[WW_IDS];
static struct event *events[WW_IDS];
static struct ww_stream *made; /* all streams, and destroyed ones until their work is done */
static struct ww_stream *legacy;
static struct ww_stream *parked; /* streams with parked calls */
static struct waiter *waiters;
static uint64_t order, parked_bytes;
/* nwaited: marks for which threads may wait. nunmarked: blocking streams but legacy with calls that no mark covers. */
static uint32_t nmarks, nwaited, ntodos, nwaiters, nunmarked;
static CUevent spare[1024];
static uint32_t nspare;
static uint16_t free_cells[WW_CELLS];
static uint32_t nfree_cells;

/* -- marks --------------------------------------------------------------------------------------------------------- */

static CUevent take_event(void) {
    CUevent event = NULL;
    if (nspare)
        return spare[--nspare];
    CUresult code = ww_living(native.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    if (code)
        ww_die("the driver makes no more events");
    return event;
}

static void give_event(CUevent event) {
    if (nspare < sizeof spare / sizeof *spare)
        spare[nspare++] = event;
    else
        native.cuEventDestroy_v2(event);
}

static struct ww_todo *todo_copy(struct ww_todo todo) {
    struct ww_todo *kept = ww_memory(sizeof *kept);
    if (++ntodos > TODOS_MOST)
        ww_die("more calls wait than a client can have");
    *kept = todo;
    return kept;
}

static void do_one(struct ww_stream *s, const struct ww_todo *t) {
    switch (t->kind) {
    case WW_ANSWER:
        ww_answer(t->a, t->b, CUDA_SUCCESS, NULL, 0);
        break;
    case WW_PLACE:
        ww_place_done(t->a, t->b, CUDA_SUCCESS);
        break;
    case WW_CELL:
        free_cells[nfree_cells++] = (uint16_t)t->a;
        s->cells--;
        break;
    case WW_THEN:
        t->then(t->a, t->address);
        break;
    case WW_BARRIER:
        if (--t->barrier->left == 0) {
            t->barrier->then(t->barrier);
            free(t->barrier);
        }
        break;
    default:
        break;
    }
}

static void do_all(struct ww_stream *s, struct ww_todo *list) {
    while (list) {
        struct ww_todo *next = list->next;
        do_one(s, list);
        ntodos--;
        free(list);
        list = next;
    }
}

static struct ww_mark *mark(struct ww_stream *s) {
    if (s->last_mark && s->last_mark->count == s->issued)
        return s->last_mark;
    struct ww_mark *m = ww_memory(sizeof *m);
    m->native = take_event();
    CUresult code = ww_living(native.cuEventRecord(m->native, s->native));
    if (code)
        ww_die("the driver records no event");
    if (s != legacy && !s->nonblocking && s->marked != s->issued)
        nunmarked--;
    m->count = s->marked = s->issued;
    m->part = s->part;
    s->part = (struct ww_part){0};
    m->todos = s->later;
    s->later = NULL;
    if (s->last_mark)
        s->last_mark->next = m;
    else
        s->first_mark = m;
    s->last_mark = m;
    nmarks++;
    return m;
}

void ww_stream_later(struct ww_stream *s, struct ww_todo todo) {
    struct ww_todo *kept = todo_copy(todo);
    kept->next = s->later;
    s->later = kept;
}

/* Append at the end: the todos of a mark are done in the order in which they were added. */
static void append(struct ww_todo **list, struct ww_todo *todo) {
    while (*list)
        list = &(*list)->next;
    *list = todo;
    todo->next = NULL;
}

static void mark_for(struct ww_stream *s, struct ww_todo *todo) {
    if (s->done == s->issued && !s->first_mark) {
        todo->next = NULL;
        do_all(s, todo);
        return;
    }
    struct ww_mark *m = mark(s);
    m->waited |= todo->kind == WW_ANSWER || todo->kind == WW_BARRIER;
    if (!m->counted && (m->waited || todo->kind == WW_PLACE)) {
        m->counted = 1;
        nwaited++;
    }
    append(&m->todos, todo);
}

void ww_stream_mark(struct ww_stream *s, struct ww_todo todo) { mark_for(s, todo_copy(todo)); }

/* Let the driver print the output of kernels, which a query does not do. The event is done, so this cannot block. */
static void show_prints(CUevent event) {
    ww_living(native.cuEventSynchronize(event));
    fflush(stdout);
}

static int poll_stream(struct ww_stream *s) {
    int some = 0;
    for (struct ww_mark *m; (m = s->first_mark); some = 1) {
        CUresult code = native.cuEventQuery(m->native);
        if (code == CUDA_ERROR_NOT_READY)
            break;
        if (code)
            ww_lost(code);
        if (m->waited)
            show_prints(m->native);
        ww_part_passed(&m->part, &s->passed_ns, m->count - s->done);
        s->done = m->count;
        s->first_mark = m->next;
        if (!s->first_mark)
            s->last_mark = NULL;
        give_event(m->native);
        nmarks--;
        nwaited -= (uint32_t)m->counted;
        do_all(s, m->todos);
        free(m);
    }
    return some;
}

/* -- parking ------------------------------------------------------------------------------------------------------- */

static int drained(struct ww_stream *s) {
    if (s->marked != s->issued)
        mark(s);
    return s->done == s->issued && !s->first_mark;
}

/* Return true if the worker may copy between two host addresses: when all earlier calls that the stream waits for have
 * been passed. It copies itself because such a copy blocks in the driver. */
static int host_turn(struct ww_stream *s) {
    int ok = drained(s);
    if (s->nonblocking)
        return ok;
    for (struct ww_stream *other = made; other; other = other->next_made)
        if (!other->nonblocking && (s == legacy || other == legacy))
            ok &= other->gone ? !other->first_mark : drained(other);
    return ok;
}

static int has_cell(const struct ww_stream *s) { return nfree_cells && s->cells < nfree_cells; }

static int ready(struct ww_stream *s, const struct ww_call *call) {
    const struct ww_operation *o = call->operation;
    if (s->issued - s->done >= MOST)
        return 0;
    if (o && o->is_due && !o->is_due(call))
        return 0;
    if (call->needs_cell && !has_cell(s))
        return 0;
    if (s == legacy) {
        for (const struct ww_stream *p = parked; p; p = p->next_parked)
            if (p != legacy && !p->nonblocking && p->first && p->first->order < call->order)
                return 0;
    } else if (!s->nonblocking && legacy->first && legacy->first->order < call->order) {
        return 0;
    }
    return (!call->is_between_hosts || host_turn(s)) && ww_gate_admits(call);
}

static void drop_generation(struct ww_generation *g) {
    if (g && --g->refs == 0) {
        native.cuEventDestroy_v2(g->native);
        free(g);
    }
}

static void end_stream(struct ww_stream *s) {
    struct ww_stream **at = &made;
    while (*at != s)
        at = &(*at)->next_made;
    *at = s->next_made;
    free(s);
}

/* Mark the legacy stream before a call of a blocking stream, and vice versa: a later mark would wait for that call. */
static void about_to_issue(const struct ww_stream *s) {
    if (s->nonblocking)
        return;
    if (s != legacy && legacy->marked != legacy->issued)
        mark(legacy);
    for (struct ww_stream *other = made; s == legacy && nunmarked && other; other = other->next_made)
        if (other != legacy && !other->nonblocking && other->marked != other->issued)
            mark(other);
}

static void issue(struct ww_stream *s, struct ww_call *call) {
    if (call->todo) {
        mark_for(s, call->todo);
        return;
    }
    if (call->destroys) {
        mark(s);
        native.cuStreamDestroy_v2(s->native);
        s->gone = 1;
        return;
    }
    about_to_issue(s);
    if (s != legacy && !s->nonblocking && s->marked == s->issued)
        nunmarked++;
    int is_contended = ww.gate.slot && !ww.gate.is_uncounted;
    int is_measured = is_contended && ww_part_measures(call);
    if (is_measured && s->marked != s->issued)
        mark(s);
    s->issued++; /* before the driver call, so that marks made after it cover the call */
    int is_due = is_contended && ww_part_add(&s->part, call);
    CUresult code = call->operation->issue(s, call);
    if (!ww_living(code) && !call->is_held && (call->entry.flags & WW_DONE) && call->entry.slot != WW_NO_SLOT)
        ww_stream_mark(s, (struct ww_todo){.kind = WW_ANSWER, .a = call->entry.slot, .b = call->entry.seq});
    else if (!call->is_held)
        ww_result(call, code);
    if (s->issued - s->marked >= MARK_EACH || (s->later && nfree_cells < WW_CELLS / 2) || is_due)
        mark(s);
    drop_generation(call->generation);
    call->generation = NULL;
}

static void park(struct ww_stream *s, struct ww_call *kept) {
    kept->next = NULL;
    if (s->last)
        s->last->next = kept;
    else
        s->first = kept;
    s->last = kept;
    s->parked_bytes += kept->bytes;
    parked_bytes += kept->bytes;
    if (s->parked_bytes > PARKED_MOST || parked_bytes > PARKED_MOST_ALL)
        ww_die("a stream holds too many calls");
    if (!s->is_parked) {
        s->is_parked = 1;
        s->next_parked = parked;
        parked = s;
    }
    if (s->marked != s->issued)
        mark(s); /* to see when the outstanding calls are done */
}

/* Find the event's record when the call is read: later, the id may name another event, or another record. */
CUresult ww_event_check(struct ww_call *call, const struct ww_args_event *args) {
    struct event *event = args->event < WW_IDS ? events[args->event] : NULL;
    if (!event)
        return CUDA_ERROR_INVALID_HANDLE;
    struct ww_generation *g = event->generation;
    if (call->entry.op == WW_OP_EVENT_RECORD) {
        if (g->refs > 1) { /* a call still waits for the last record */
            struct ww_generation *fresh = ww_memory(sizeof *fresh);
            CUresult code = native.cuEventCreate(&fresh->native, event->flags);
            if (code) {
                free(fresh);
                return code;
            }
            *fresh = (struct ww_generation){.refs = 1, .timed = g->timed, .native = fresh->native};
            drop_generation(g);
            event->generation = g = fresh;
        }
        g->recorded = g->parked = 1;
    }
    g->refs++;
    call->generation = g;
    return CUDA_SUCCESS;
}

int ww_wait_is_due(const struct ww_call *call) { return !call->generation->parked; }

CUresult ww_wait_issue(struct ww_stream *s, struct ww_call *call) {
    return call->generation->recorded ? native.cuStreamWaitEvent(s->native, call->generation->native, 0) : CUDA_SUCCESS;
}

CUresult ww_record_issue(struct ww_stream *s, struct ww_call *call) {
    struct ww_generation *g = call->generation;
    CUresult code = native.cuEventRecord(g->native, s->native);
    g->parked = 0;
    for (struct ww_todo *next, *t = g->signals; t; t = next) {
        next = t->next;
        mark_for(s, t);
    }
    g->signals = NULL;
    return code;
}

CUresult ww_stream_call(struct ww_call *call) {
    struct ww_stream *s = ww_find_stream(call->entry.stream);
    CUresult code = s ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
    call->order = ++order;
    if (!code && call->operation->check)
        code = call->operation->check(call);
    if (code)
        return code;
    if (!s->first && ready(s, call))
        issue(s, call);
    else
        park(s, ww_copy_call(call));
    return WW_LATER;
}

/* Queue an item of the worker's own after all calls that were read for a stream. */
static void put(struct ww_stream *s, struct ww_todo *todo, int destroys) {
    struct ww_call *call = ww_memory(sizeof *call);
    call->bytes = sizeof *call;
    call->order = ++order;
    call->todo = todo;
    call->destroys = destroys;
    if (s->first) {
        park(s, call);
        return;
    }
    issue(s, call);
    free(call);
}

static int unpark(struct ww_stream *s) {
    int some = 0;
    while (s->first && ready(s, s->first)) {
        struct ww_call *call = s->first;
        s->first = call->next;
        if (!s->first)
            s->last = NULL;
        s->parked_bytes -= call->bytes;
        parked_bytes -= call->bytes;
        issue(s, call);
        free(call);
        some = 1;
    }
    if (s->first && s->marked != s->issued)
        mark(s);
    return some;
}

static int unpark_all(void) {
    int some = 0;
    for (struct ww_stream *s = parked, *next; s; s = next) {
        next = s->next_parked;
        some |= unpark(s); /* may add other streams to the list, at its head */
    }
    for (struct ww_stream **at = &parked; *at;) {
        struct ww_stream *s = *at;
        if (s->first) {
            at = &s->next_parked;
        } else {
            s->is_parked = 0;
            *at = s->next_parked;
        }
    }
    return some;
}

static int poll_waiters(void) {
    int some = 0;
    for (struct waiter **at = &waiters; *at;) {
        struct waiter *w = *at;
        CUresult code = w->generation->parked ? CUDA_ERROR_NOT_READY : native.cuEventQuery(w->generation->native);
        if (code == CUDA_ERROR_NOT_READY) {
            at = &w->next;
            continue;
        }
        ww_living(code);
        if (w->todo.kind == WW_ANSWER) {
            show_prints(w->generation->native);
            ww_answer(w->todo.a, w->todo.b, code, NULL, 0);
        } else {
            do_one(NULL, &w->todo);
        }
        *at = w->next;
        nwaiters--;
        drop_generation(w->generation);
        free(w);
        some = 1;
    }
    return some;
}

void ww_streams_settle(void) {
    for (struct ww_stream *s = made; s; s = s->next_made)
        if (s->marked != s->issued)
            mark(s);
    ww_gate_count(&ww.gate);
}

int ww_streams_step(void) {
    if (ww.gate.slot && ww_gate_is_contended())
        ww_streams_settle();
    int some = parked ? unpark_all() : 0; /* before end_stream(): streams leave the list `parked` first */
    for (struct ww_stream *s = made, *next; s; s = next) {
        next = s->next_made;
        if (s->first_mark)
            some |= poll_stream(s);
        if (s->gone && !s->first_mark && !s->is_parked)
            end_stream(s);
    }
    if (waiters)
        some |= poll_waiters();
    return some;
}

int ww_streams_busy(void) { return nmarks || parked || waiters; }

int ww_streams_waited(void) { return nwaited || waiters; }

/* -- streams ------------------------------------------------------------------------------------------------------- */

struct ww_stream *ww_find_stream(uint32_t id) { return id < WW_IDS ? streams[id] : NULL; }

uint32_t ww_take_cell(struct ww_stream *s) {
    if (!has_cell(s))
        return 0;
    s->cells++;
    return 1u + free_cells[--nfree_cells];
}

static struct ww_stream *add_stream(uint32_t id, CUstream stream, int nonblocking) {
    struct ww_stream *s = ww_memory(sizeof *s);
    s->native = stream;
    s->nonblocking = nonblocking;
    s->next_made = made;
    made = streams[id] = s;
    return s;
}

void ww_streams_start(void) {
    legacy = add_stream(WW_LEGACY, CU_STREAM_LEGACY, 0);
    while (nfree_cells < WW_CELLS) {
        free_cells[nfree_cells] = (uint16_t)nfree_cells;
        nfree_cells++;
    }
}

CUresult ww_stream_create(const struct ww_args_stream_create *args) {
    CUstream stream = NULL;
    if (args->id < WW_FIRST_ID || args->id >= WW_IDS || streams[args->id])
        return CUDA_ERROR_INVALID_VALUE;
    CUresult code = native.cuStreamCreateWithPriority(&stream, args->flags & CU_STREAM_NON_BLOCKING, args->priority);
    if (!code)
        add_stream(args->id, stream, !!(args->flags & CU_STREAM_NON_BLOCKING));
    return code;
}

CUresult ww_stream_destroy(const struct ww_args_id *args) {
    struct ww_stream *s = args->id >= WW_FIRST_ID ? ww_find_stream(args->id) : NULL;
    if (!s)
        return CUDA_ERROR_INVALID_HANDLE;
    streams[args->id] = NULL;
    put(s, NULL, 1);
    return CUDA_SUCCESS;
}

/* Return true if calls are parked that belong to the stream, or that its next call would wait for. */
static int behind_parked(const struct ww_stream *s) {
    for (const struct ww_stream *p = parked; s == legacy && p; p = p->next_parked)
        if (p->first && !p->nonblocking)
            return 1;
    return s->first != NULL;
}

CUresult ww_stream_query(const struct ww_call *call) {
    struct ww_stream *s = ww_find_stream(call->entry.stream);
    if (!s)
        return CUDA_ERROR_INVALID_HANDLE;
    CUresult code = behind_parked(s) ? CUDA_ERROR_NOT_READY : native.cuStreamQuery(s->native);
    if (!code && s->first_mark) /* do the todos of passed marks before the answer */
        poll_stream(s);
    return !code && s->first_mark ? CUDA_ERROR_NOT_READY : code;
}

static void answer_barrier(struct ww_barrier *barrier) {
    ww_answer(barrier->slot, barrier->seq, CUDA_SUCCESS, NULL, 0);
}

/* Put a barrier over all blocking streams (the legacy stream waits for all of these), or over all streams. */
static void barrier_over(struct ww_barrier wanted, int nonblocking_too) {
    struct ww_barrier *b = ww_memory(sizeof *b);
    *b = wanted;
    b->left = 1;
    for (struct ww_stream *s = made; s; s = s->next_made) {
        if (s->nonblocking && !nonblocking_too)
            continue;
        if (s->gone ? !s->first_mark : !s->first && s->done == s->issued && !s->first_mark)
            continue;
        b->left++;
        struct ww_todo todo = {.kind = WW_BARRIER, .barrier = b};
        if (s->gone)
            append(&s->last_mark->todos, todo_copy(todo));
        else
            put(s, todo_copy(todo), 0);
    }
    do_one(NULL, &(struct ww_todo){.kind = WW_BARRIER, .barrier = b});
}

void ww_barrier(struct ww_barrier barrier) { barrier_over(barrier, 1); }

CUresult ww_barrier_for(const struct ww_call *call, struct ww_barrier barrier) {
    barrier.slot = call->entry.slot;
    barrier.seq = call->entry.seq;
    ww_barrier(barrier);
    return WW_LATER;
}

CUresult ww_stream_sync(const struct ww_call *call) {
    struct ww_stream *s = ww_find_stream(call->entry.stream);
    if (!s)
        return CUDA_ERROR_INVALID_HANDLE;
    if (s == legacy)
        barrier_over((struct ww_barrier){.then = answer_barrier, .slot = call->entry.slot, .seq = call->entry.seq}, 0);
    else
        put(s, todo_copy((struct ww_todo){.kind = WW_ANSWER, .a = call->entry.slot, .b = call->entry.seq}), 0);
    return WW_LATER;
}

CUresult ww_ctx_sync(const struct ww_call *call) {
    return ww_barrier_for(call, (struct ww_barrier){.then = answer_barrier});
}

/* -- events -------------------------------------------------------------------------------------------------------- */

static struct event *find_event(const struct ww_call *call) {
    const struct ww_args_event *args = (const void *)call->args;
    return args->event && args->event < WW_IDS ? events[args->event] : NULL;
}

CUresult ww_event_create(const struct ww_args_event *args) {
    uint32_t allowed = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING;
    CUevent event = NULL;
    if (!args->event || args->event >= WW_IDS || events[args->event] || (args->flags & ~allowed))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult code = native.cuEventCreate(&event, args->flags);
    if (code)
        return code;
    struct event *e = events[args->event] = ww_memory(sizeof *e);
    e->flags = args->flags;
    e->generation = ww_memory(sizeof *e->generation);
    *e->generation =
        (struct ww_generation){.refs = 1, .timed = !(args->flags & CU_EVENT_DISABLE_TIMING), .native = event};
    return CUDA_SUCCESS;
}

CUresult ww_event_destroy(const struct ww_call *call) {
    struct event *e = find_event(call);
    if (!e)
        return CUDA_ERROR_INVALID_HANDLE;
    events[((const struct ww_args_event *)(const void *)call->args)->event] = NULL;
    drop_generation(e->generation);
    free(e);
    return CUDA_SUCCESS;
}

CUresult ww_event_query(const struct ww_call *call) {
    struct event *e = find_event(call);
    return !e                      ? CUDA_ERROR_INVALID_HANDLE
           : e->generation->parked ? CUDA_ERROR_NOT_READY
                                   : native.cuEventQuery(e->generation->native);
}

static void wait_for(struct ww_generation *g, struct ww_todo todo) {
    if (++nwaiters > TODOS_MOST)
        ww_die("more waits than a client can have");
    struct waiter *w = ww_memory(sizeof *w);
    *w = (struct waiter){.next = waiters, .generation = g, .todo = todo};
    g->refs++;
    waiters = w;
}

CUresult ww_event_sync(const struct ww_call *call) {
    struct event *e = find_event(call);
    if (!e)
        return CUDA_ERROR_INVALID_HANDLE;
    wait_for(e->generation, (struct ww_todo){.kind = WW_ANSWER, .a = call->entry.slot, .b = call->entry.seq});
    return WW_LATER;
}

/* If the event does not exist or has no record, act at once: a stream of another device must not wait forever. */
CUresult ww_event_passed(const struct ww_call *call, struct ww_todo todo) {
    struct event *e = find_event(call);
    struct ww_generation *g = e ? e->generation : NULL;
    if (!g || !g->recorded)
        do_one(NULL, &todo);
    else if (g->parked)
        append(&g->signals, todo_copy(todo));
    else
        wait_for(g, todo);
    return e ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult ww_event_elapsed(const struct ww_call *call, const struct ww_args_elapsed *args) {
    const struct event *first = args->first < WW_IDS ? events[args->first] : NULL;
    const struct event *second = args->second < WW_IDS ? events[args->second] : NULL;
    const struct ww_generation *from = first ? first->generation : NULL, *to = second ? second->generation : NULL;
    float ms = 0;
    if (!from || !to || !from->recorded || !to->recorded || !from->timed || !to->timed)
        return CUDA_ERROR_INVALID_HANDLE;
    if (from->parked || to->parked)
        return CUDA_ERROR_NOT_READY;
    CUresult code = native.cuEventElapsedTime(&ms, from->native, to->native);
    ww_answer(call->entry.slot, call->entry.seq, code, &ms, code ? 0 : sizeof ms);
    return WW_LATER;
}
