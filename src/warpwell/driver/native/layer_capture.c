/* Streams that record: a call to one becomes a node of a graph and is not posted, so no worker knows of captures.
 *
 * The protocol. (1) A capture has a graph, a mode, the thread that began it, its first stream, and for each of its
 * streams the nodes behind which that stream's next node comes. `ww_graphs` protects all of it; `ww_captures` counts
 * captures, so that without captures a call costs one load. (2) A call asks ww_captured between the choice of its
 * stream and its post: node, post, or an error. Nothing of a capture is ever in a ring. (3) An event recorded in such a
 * stream names nodes; a stream that waits for it joins the capture, with an error if that stream records
 * another one. Such an event can be asked nothing, until it is recorded in a stream that posts. (4) The legacy stream
 * posts only while no blocking stream of the device records: else the call would belong to it. (5) Calls that query a
 * recording stream or its whole context, and calls that the modes forbid, are refused. (6) Each such error invalidates
 * the captures that it meets: their calls fail until their first stream ends them. (7) The end comes in the first
 * stream, in the thread that began unless the mode is relaxed, and only when the nodes of all its streams lead to the
 * first's last ones; all streams leave in any case. (8) A destroyed first stream and a reset of the device end a
 * capture; a destroyed graph invalidates it.
 */
#include "layer.h"
#include <stdlib.h>
#include <string.h>

struct nodes {
    struct ww_node **all;
    size_t n;
};

struct member { /* a stream that records */
    struct member *next;
    uint32_t stream;
    bool blocking;
    struct nodes last;
};

struct noted { /* an event recorded in one */
    struct noted *next;
    struct ww_object *event;
    uint64_t serial;
    struct nodes last;
};

struct capture {
    struct capture *next;
    uint64_t id, life;
    int mode, broken; /* broken: it is invalidated */
    const void *thread;
    bool into; /* a graph of the program's */
    struct ww_device *device;
    uint32_t first;
    struct ww_graph *graph; /* NULL: destroyed meanwhile */
    struct member *members;
    struct noted *events;
    void **told; /* handles that cuStreamGetCaptureInfo returned, and their edges' data: full dependencies */
};

_Atomic int ww_captures;
static struct capture *captures;
static uint64_t last_id;
static _Thread_local int mode_of_thread = CU_CAPTURE_GLOBAL;
static _Thread_local char thread_mark; /* its address is the thread */

/* -- lists --------------------------------------------------------------------------------------------------------- */

static bool in(const struct nodes *l, const struct ww_node *n) {
    for (size_t i = 0; i < l->n; i++)
        if (l->all[i] == n)
            return true;
    return false;
}

static int put(struct nodes *l, struct ww_node *n) {
    if (in(l, n))
        return 0;
    if (!ww_grow(&l->all, l->n, sizeof *l->all))
        return CUDA_ERROR_OUT_OF_MEMORY;
    l->all[l->n++] = n;
    return 0;
}

static int put_all(struct nodes *to, const struct nodes *from) {
    int error = 0;
    for (size_t i = 0; i < from->n && !error; i++)
        error = put(to, from->all[i]);
    return error;
}

static void end_capture(struct capture *c) {
    struct capture **at = &captures;
    while (*at != c)
        at = &(*at)->next;
    *at = c->next;
    for (struct member *m = c->members, *next; m; m = next) {
        next = m->next;
        free(m->last.all);
        free(m);
    }
    for (struct noted *e = c->events, *next; e; e = next) {
        next = e->next;
        free(e->last.all);
        free(e);
    }
    free(c->told);
    free(c);
    atomic_fetch_sub(&ww_captures, 1);
}

static void graph_gone(const struct ww_graph *g);

static void graphs_of_node_gone(const struct ww_work *w) {
    if (w->kind == CU_NODE_GRAPH)
        graph_gone(w->of.graph);
    for (uint32_t i = 0; w->kind == CU_NODE_CONDITION && i < w->of.condition->size; i++)
        graph_gone(w->of.condition->graphs[i]);
}

static void break_all(struct capture *c) { c->broken = 1; }

/* A graph goes with the graphs of its nodes. */
static void graph_gone(const struct ww_graph *g) {
    for (struct capture *c = captures; c; c = c->next)
        if (c->graph == g) {
            break_all(c);
            c->graph = NULL;
        }
    for (size_t i = 0; i < g->n; i++)
        graphs_of_node_gone(&g->nodes[i]->work);
}

void ww_graph_end(struct ww_graph *g) {
    graph_gone(g);
    ww_graph_drop(g);
}

/* Captures of an earlier life of their device are over. */
static void sweep(void) {
    for (struct capture *c = captures, *next; c; c = next) {
        next = c->next;
        if (c->life == atomic_load(&c->device->life))
            continue;
        struct ww_graph *g = c->into ? NULL : c->graph;
        end_capture(c);
        if (g)
            ww_graph_end(g);
    }
}

static void enter(void) {
    pthread_mutex_lock(&ww_graphs);
    sweep();
}

static int leave(int error) {
    ww_graphs_leave();
    return error;
}

static struct capture *capture_of(const struct ww_device *d, uint32_t stream, struct member **found) {
    for (struct capture *c = captures; c; c = c->next)
        for (struct member *m = c->members; m && c->device == d; m = m->next)
            if (m->stream == stream) {
                *found = m;
                return c;
            }
    return NULL;
}

static struct noted *noted_of(const struct capture *c, const struct ww_object *event) {
    for (struct noted *e = c->events; e; e = e->next)
        if (e->event == event && e->serial == event->serial)
            return e;
    return NULL;
}

/* -- queries of calls ---------------------------------------------------------------------------------------------- */

/* A call to the legacy stream while blocking streams record. */
static int implicit(const struct ww_device *d) {
    int error = 0;
    for (struct capture *c = captures; c; c = c->next)
        for (struct member *m = c->members; m && c->device == d; m = m->next)
            if (m->blocking) {
                break_all(c);
                error = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
            }
    return error;
}

int ww_captured_slow(struct ww_device *d, uint32_t stream, bool *yes) {
    struct member *m;
    enter();
    if (stream == WW_LEGACY)
        return leave(implicit(d));
    struct capture *c = capture_of(d, stream, &m);
    *yes = c && !c->broken;
    return leave(c && c->broken ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : 0);
}

int ww_unsafe_slow(void) {
    int error = 0;
    enter();
    for (struct capture *c = captures; c; c = c->next) {
        bool mine = c->thread == &thread_mark && c->mode != CU_CAPTURE_RELAXED && mode_of_thread != CU_CAPTURE_RELAXED;
        bool anyones = c->mode == CU_CAPTURE_GLOBAL && mode_of_thread == CU_CAPTURE_GLOBAL;
        if (mine || anyones) {
            break_all(c);
            error = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    }
    return leave(error);
}

int ww_no_synchronize_slow(struct ww_device *d, uint32_t stream) {
    int error = 0;
    struct member *m;
    enter();
    if (stream == WW_LEGACY)
        return leave(implicit(d));
    for (struct capture *c = captures; c && !stream; c = c->next)
        if (c->device == d) {
            break_all(c);
            error = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    struct capture *c = stream ? capture_of(d, stream, &m) : NULL;
    if (c) {
        error = c->broken ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        break_all(c);
    }
    return leave(error);
}

/* Add a node behind the stream's last ones; it is the last one then. */
static int add(struct capture *c, struct member *m, struct ww_work *work) {
    struct ww_node *node;
    int error = ww_node_add(c->graph, m->last.all, NULL, m->last.n, work, &node);
    if (error)
        return error;
    m->last.n = 0;
    return put(&m->last, node);
}

/* With the lock: the stream's capture, if it still records. */
static int recording(struct ww_device *d, uint32_t stream, struct capture **c, struct member **m) {
    *c = capture_of(d, stream, m);
    return !*c ? CUDA_ERROR_ILLEGAL_STATE : (*c)->broken || !(*c)->graph ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : 0;
}

int ww_capture_add(struct ww_device *d, uint32_t stream, struct ww_work *work) {
    struct capture *c;
    struct member *m;
    enter();
    int error = recording(d, stream, &c, &m);
    if (error)
        ww_work_drop(work);
    else
        error = add(c, m, work);
    leave(error);
    return error;
}

int ww_capture_alloc(struct ww_device *d, uint32_t stream, size_t nbytes, CUdeviceptr *address) {
    struct ww_work work = {.kind = CU_NODE_ALLOC, .device = d};
    int error;
    work.of.memory = ww_graph_memory_new(d, nbytes, false, &error);
    if (error)
        return error;
    uint64_t at = work.of.memory->address;
    if (!(error = ww_capture_add(d, stream, &work)))
        *address = at;
    return error;
}

/* -- events -------------------------------------------------------------------------------------------------------- */

/* Forget the event's earlier record: it has another one. */
static void forget(const struct ww_object *event) {
    for (struct capture *c = captures; c; c = c->next) {
        struct noted *e = noted_of(c, event);
        if (e)
            e->serial = 0;
    }
}

static int note(struct capture *c, const struct member *m, struct ww_object *event) {
    struct noted *e = noted_of(c, event);
    forget(event);
    if (!e) {
        if (!(e = calloc(1, sizeof *e)))
            return CUDA_ERROR_OUT_OF_MEMORY;
        *e = (struct noted){.next = c->events, .event = event};
        c->events = e;
    }
    e->serial = event->serial;
    e->last.n = 0;
    atomic_store(&event->recorded, WW_IN_CAPTURE);
    return put_all(&e->last, &m->last);
}

int ww_capture_record(struct ww_device *d, uint32_t stream, struct ww_object *event) {
    struct capture *c;
    struct member *m;
    enter();
    int error = recording(d, stream, &c, &m);
    if (!error && event->device != d)
        error = CUDA_ERROR_INVALID_HANDLE;
    return leave(error ? error : note(c, m, event));
}

void ww_capture_forget_event(struct ww_object *event) {
    enter();
    forget(event);
    leave(0);
}

static int join(struct capture *c, uint32_t stream, bool blocking, const struct nodes *last) {
    struct member *m = calloc(1, sizeof *m);
    if (!m)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *m = (struct member){.stream = stream, .blocking = blocking};
    int error = put_all(&m->last, last);
    m->next = c->members;
    c->members = m;
    return error;
}

/* A wait where the stream records, or the event was recorded in a stream that did. done: it is carried out. */
int ww_capture_wait(struct ww_device *d, uint32_t stream, bool captured, struct ww_object *event, bool *done) {
    struct capture *c = NULL, *of = NULL;
    struct member *m = NULL;
    struct noted *e = NULL;
    enter();
    for (struct capture *k = captures; k && !e; k = k->next)
        if ((e = noted_of(k, event)))
            of = k;
    *done = captured || event->recorded == WW_IN_CAPTURE;
    int error = captured ? recording(d, stream, &c, &m) : 0;
    if (error || !*done)
        return leave(error);
    if (!of) { /* an event of no capture that is under way */
        if (c)
            break_all(c);
        return leave(c ? CUDA_ERROR_STREAM_CAPTURE_ISOLATION : CUDA_ERROR_CAPTURED_EVENT);
    }
    if (of->broken || (c && c != of)) {
        error = of->broken ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_ERROR_STREAM_CAPTURE_MERGE;
        break_all(of);
        if (c)
            break_all(c);
        return leave(error);
    }
    if (d != of->device || stream == WW_LEGACY) {
        break_all(of);
        return leave(stream == WW_LEGACY ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    return leave(m ? put_all(&m->last, &e->last) : join(of, stream, ww_host_blocking(d, stream), &e->last));
}

/* Its recorded work must still be joined by the end. Without its first stream a capture cannot end. */
void ww_capture_stream_gone(struct ww_device *d, uint32_t stream) {
    struct member *m;
    if (!atomic_load(&ww_captures))
        return;
    enter();
    struct capture *c = capture_of(d, stream, &m);
    if (c && c->first == stream) {
        struct ww_graph *g = c->into ? NULL : c->graph;
        end_capture(c);
        if (g)
            ww_graph_end(g);
    } else if (c) {
        m->stream = 0; /* its id may be used again */
    }
    leave(0);
}

/* -- calls --------------------------------------------------------------------------------------------------------- */

/* Nodes of a graph by their handles. */
static int read_nodes(const struct ww_graph *g, void *const *handles, size_t n, struct nodes *to) {
    int error = n && !handles ? CUDA_ERROR_INVALID_VALUE : 0;
    for (size_t i = 0; i < n && !error; i++) {
        struct ww_node *node = ww_node(handles[i]);
        error = node && node->graph == g ? put(to, node) : CUDA_ERROR_INVALID_VALUE;
    }
    return error;
}

int ww_capture_begin(struct ww_device *d, uint32_t stream, int mode, void *graph, void *const *deps, size_t n) {
    struct member *m;
    if (mode < CU_CAPTURE_GLOBAL || mode > CU_CAPTURE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    if (stream == WW_LEGACY)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    struct capture *c = calloc(1, sizeof *c);
    struct nodes last = {NULL, 0};
    enter();
    struct ww_graph *g = graph ? ww_graph(graph) : NULL;
    int error = !c                          ? CUDA_ERROR_OUT_OF_MEMORY
                : capture_of(d, stream, &m) ? CUDA_ERROR_ILLEGAL_STATE
                : graph && !g               ? CUDA_ERROR_INVALID_VALUE
                                            : 0;
    for (struct capture *k = captures; k && g && !error; k = k->next)
        error = k->graph == g ? CUDA_ERROR_ILLEGAL_STATE : 0;
    if (!error && !graph && !(g = ww_graph_new()))
        error = CUDA_ERROR_OUT_OF_MEMORY;
    if (!error)
        error = read_nodes(g, deps, n, &last);
    if (!error) {
        *c = (struct capture){.next = captures,
                              .id = ++last_id,
                              .life = atomic_load(&d->life),
                              .mode = mode,
                              .thread = &thread_mark,
                              .into = graph != NULL,
                              .device = d,
                              .first = stream,
                              .graph = g};
        error = join(c, stream, ww_host_blocking(d, stream), &last);
        captures = c;
        atomic_fetch_add(&ww_captures, 1);
    } else {
        free(c);
    }
    free(last.all);
    return leave(error);
}

/* Whether all that was recorded comes before the first stream's last nodes. */
static bool joined(const struct capture *c, const struct member *first) {
    struct nodes reached = {NULL, 0};
    bool all = !put_all(&reached, &first->last);
    for (size_t i = 0; i < reached.n && all; i++)
        for (size_t e = 0; e < reached.all[i]->nedges && all; e++)
            all = !put(&reached, reached.all[i]->edges[e].from);
    for (const struct member *m = c->members; m && all; m = m->next)
        for (size_t i = 0; i < m->last.n && all; i++)
            all = in(&reached, m->last.all[i]);
    free(reached.all);
    return all;
}

int ww_body_cuStreamEndCapture(struct ww_device *d, uint32_t stream, void **graph) {
    struct member *m;
    if (graph)
        *graph = NULL;
    enter();
    struct capture *c = capture_of(d, stream, &m);
    if (!graph && !(c && c->into)) /* a program that gave the graph needs no handle of it */
        return leave(CUDA_ERROR_INVALID_VALUE);
    if (!c || c->first != stream)
        return leave(c ? CUDA_ERROR_STREAM_CAPTURE_UNMATCHED : CUDA_ERROR_ILLEGAL_STATE);
    if (c->thread != &thread_mark && c->mode != CU_CAPTURE_RELAXED)
        return leave(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    int error = c->broken      ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
                : joined(c, m) ? 0
                               : CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    struct ww_graph *g = c->graph;
    bool into = c->into;
    end_capture(c);
    if (!error && graph)
        *graph = g->object;
    else if (error && g && !into)
        ww_graph_end(g);
    return leave(error);
}

static int status_of(const struct capture *c) {
    return !c ? CU_CAPTURE_NONE : c->broken ? CU_CAPTURE_INVALIDATED : CU_CAPTURE_ACTIVE;
}

int ww_body_cuStreamIsCapturing(struct ww_device *d, uint32_t stream, int *status) {
    struct member *m;
    *status = CU_CAPTURE_NONE;
    if (!atomic_load(&ww_captures))
        return 0;
    enter();
    if (stream == WW_LEGACY)
        return leave(implicit(d));
    *status = status_of(capture_of(d, stream, &m));
    return leave(0);
}

int ww_body_cuStreamGetCaptureInfo_v3(struct ww_device *d, uint32_t stream, int *status, uint64_t *id, void **graph,
                                      void **deps, void **edges, size_t *n) {
    struct member *m;
    enter();
    int error = stream == WW_LEGACY ? implicit(d) : 0;
    if (error)
        return leave(error);
    struct capture *c = capture_of(d, stream, &m);
    *status = status_of(c);
    if (!c || c->broken)
        return leave(0);
    free(c->told);
    void **told = c->told = calloc(m->last.n + 1, sizeof *told + sizeof(struct cu_edge));
    if (!told)
        return leave(CUDA_ERROR_OUT_OF_MEMORY);
    for (size_t i = 0; i < m->last.n; i++)
        told[i] = m->last.all[i]->object;
    if (id)
        *id = c->id;
    if (graph)
        *graph = c->graph->object;
    if (deps)
        *deps = told;
    if (edges)
        *edges = told + m->last.n;
    if (n)
        *n = m->last.n;
    return leave(0);
}

int ww_body_cuStreamUpdateCaptureDependencies_v2(struct ww_device *d, uint32_t stream, void *deps, size_t n,
                                                 unsigned set) {
    struct capture *c;
    struct member *m;
    struct nodes more = {NULL, 0};
    enter();
    int error = recording(d, stream, &c, &m);
    if (!error && !(error = read_nodes(c->graph, deps, n, &more))) {
        if (set)
            m->last.n = 0;
        error = put_all(&m->last, &more);
    }
    free(more.all);
    return leave(error);
}

int ww_body_cuThreadExchangeStreamCaptureMode(int *mode) {
    if (*mode < CU_CAPTURE_GLOBAL || *mode > CU_CAPTURE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    int before = mode_of_thread;
    mode_of_thread = *mode;
    *mode = before;
    return 0;
}

/* -- graphs and nodes that go -------------------------------------------------------------------------------------- */

static void take(struct nodes *l, const struct ww_node *n) {
    size_t kept = 0;
    for (size_t i = 0; i < l->n; i++)
        if (l->all[i] != n)
            l->all[kept++] = l->all[i];
    l->n = kept;
}

static void node_gone(const struct ww_node *n) {
    for (struct capture *c = captures; c; c = c->next) {
        for (struct member *m = c->members; m && c->graph == n->graph; m = m->next)
            take(&m->last, n);
        for (struct noted *e = c->events; e && c->graph == n->graph; e = e->next)
            take(&e->last, n);
    }
    graphs_of_node_gone(&n->work);
}

void ww_node_end(struct ww_node *n) {
    node_gone(n);
    ww_node_remove(n);
}
