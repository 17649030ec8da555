/* Stream capture: a call to a captured stream becomes a node of a graph and is not posted, so no worker knows of it.
 *
 * (1) A capture has a graph, a mode, the thread that began it, its first stream, and for each of its streams the last
 * nodes, on which the stream's next node will depend. `ww_graphs` protects captures; `ww_captures` counts them, so that
 * without captures a call costs one load. (2) A call that has found its stream, and has not posted yet, calls
 * ww_captured. The result is to add a node, to post, or an error. (3) An event that is recorded in a captured stream
 * stands for the stream's last nodes. A stream that waits for the event joins the capture, or gets an error if it
 * belongs to another capture. The event cannot be queried until it is recorded in a stream that is not captured. (4)
 * Calls to the legacy stream fail while a blocking stream of the device is captured, because they would be ordered with
 * that stream. (5) Calls that query or synchronize a captured stream or its context fail, and so do calls that the
 * modes forbid. (6) Each such error invalidates the captures that forbid the call: calls to their streams fail until
 * their first streams end them. (7) A capture is ended in its first stream, by the thread that began it unless the mode
 * is relaxed. That fails if the nodes of a stream do not lead to the first stream's last nodes, but ends the capture,
 * too. (8) A capture also ends when its first stream is destroyed or the device is reset. It is invalidated when its
 * graph is destroyed.
 */
#include "layer.h"
#include <stdlib.h>
#include <string.h>

struct nodes {
    struct ww_node **all;
    size_t n;
};

struct member { /* a captured stream, or an event that was recorded in a captured stream */
    struct member *next;
    uint32_t stream;
    bool blocking;
    struct ww_object *event;
    uint64_t serial;
    struct nodes last;
};

struct capture {
    struct capture *next;
    uint64_t id, life;
    int mode, broken; /* broken: the capture is invalidated */
    const void *thread;
    bool into; /* the program passed the graph */
    struct ww_device *device;
    uint32_t first;
    struct ww_graph *graph; /* NULL: the program has destroyed it */
    struct member *members, *events;
    void **told; /* arrays of cuStreamGetCaptureInfo: node handles, then edge data (zero: full dependencies) */
};

_Atomic int ww_captures;
static struct capture *captures;
static uint64_t last_id;
static _Thread_local int mode_of_thread = CU_CAPTURE_GLOBAL;
static _Thread_local char thread_mark; /* its address identifies the thread */

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

static void free_members(struct member *m) {
    for (struct member *next; m; m = next) {
        next = m->next;
        free(m->last.all);
        free(m);
    }
}

static void end_capture(struct capture *c) {
    struct capture **at = &captures;
    while (*at != c)
        at = &(*at)->next;
    *at = c->next;
    free_members(c->members);
    free_members(c->events);
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

/* Invalidate captures into a graph that is being destroyed, or into a graph of its nodes. */
static void graph_gone(const struct ww_graph *g) {
    for (struct capture *c = captures; c; c = c->next)
        if (c->graph == g) {
            c->broken = 1;
            c->graph = NULL;
        }
    for (size_t i = 0; i < g->n; i++)
        graphs_of_node_gone(&g->nodes[i]->work);
}

void ww_graph_end(struct ww_graph *g) {
    graph_gone(g);
    ww_graph_drop(g);
}

/* End a capture, and destroy its graph unless the program passed it. */
static void cancel(struct capture *c) {
    struct ww_graph *g = c->into ? NULL : c->graph;
    end_capture(c);
    if (g)
        ww_graph_end(g);
}

/* End captures of earlier lives of their devices. */
static void sweep(void) {
    for (struct capture *c = captures, *next; c; c = next) {
        next = c->next;
        if (c->life != atomic_load(&c->device->life))
            cancel(c);
    }
}

#define LOCK_CAPTURES()                                                                                                \
    WW_LOCK_GRAPHS();                                                                                                  \
    sweep()

static struct capture *capture_of(const struct ww_device *d, uint32_t stream, struct member **found) {
    for (struct capture *c = captures; c; c = c->next)
        for (struct member *m = c->members; m && c->device == d; m = m->next)
            if (m->stream == stream) {
                *found = m;
                return c;
            }
    return NULL;
}

static struct member *noted_of(const struct capture *c, const struct ww_object *event) {
    for (struct member *e = c->events; e; e = e->next)
        if (e->event == event && e->serial == event->serial)
            return e;
    return NULL;
}

/* -- checks of calls ----------------------------------------------------------------------------------------------- */

/* Check a call to the legacy stream: captured blocking streams make it an error, which invalidates their captures. */
static int implicit(const struct ww_device *d) {
    int error = 0;
    for (struct capture *c = captures; c; c = c->next)
        for (struct member *m = c->members; m && c->device == d; m = m->next)
            if (m->blocking) {
                c->broken = 1;
                error = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
            }
    return error;
}

int ww_captured_slow(struct ww_device *d, uint32_t stream, bool *yes) {
    struct member *m;
    LOCK_CAPTURES();
    if (stream == WW_LEGACY)
        return implicit(d);
    struct capture *c = capture_of(d, stream, &m);
    *yes = c && !c->broken;
    return c && c->broken ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : 0;
}

int ww_unsafe_slow(void) {
    int error = 0;
    LOCK_CAPTURES();
    for (struct capture *c = captures; c; c = c->next) {
        bool mine = c->thread == &thread_mark && c->mode != CU_CAPTURE_RELAXED && mode_of_thread != CU_CAPTURE_RELAXED;
        bool anyones = c->mode == CU_CAPTURE_GLOBAL && mode_of_thread == CU_CAPTURE_GLOBAL;
        if (mine || anyones) {
            c->broken = 1;
            error = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    }
    return error;
}

int ww_no_synchronize_slow(struct ww_device *d, uint32_t stream) {
    int error = 0;
    struct member *m;
    LOCK_CAPTURES();
    if (stream == WW_LEGACY)
        return implicit(d);
    for (struct capture *c = captures; c && !stream; c = c->next)
        if (c->device == d) {
            c->broken = 1;
            error = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    struct capture *c = stream ? capture_of(d, stream, &m) : NULL;
    if (c) {
        error = c->broken ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        c->broken = 1;
    }
    return error;
}

/* Add a node that depends on the last nodes of a captured stream. The new node is then the only last one. */
static int add(struct capture *c, struct member *m, struct ww_work *work) {
    struct ww_node *node;
    int error = ww_node_add(c->graph, m->last.all, NULL, m->last.n, work, &node);
    if (error)
        return error;
    m->last.n = 0;
    return put(&m->last, node);
}

/* With ww_graphs held: find the capture of a stream; return an error if it is invalidated. */
static int recording(struct ww_device *d, uint32_t stream, struct capture **c, struct member **m) {
    *c = capture_of(d, stream, m);
    return !*c ? CUDA_ERROR_ILLEGAL_STATE : (*c)->broken || !(*c)->graph ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : 0;
}

int ww_capture_add(struct ww_device *d, uint32_t stream, struct ww_work *work) {
    struct capture *c;
    struct member *m;
    LOCK_CAPTURES();
    int error = recording(d, stream, &c, &m);
    if (error)
        ww_work_drop(work);
    return error ? error : add(c, m, work);
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

/* Forget an event's record in a capture, because the event is recorded again. */
static void forget(const struct ww_object *event) {
    for (struct capture *c = captures; c; c = c->next) {
        struct member *e = noted_of(c, event);
        if (e)
            e->serial = 0;
    }
}

static int note(struct capture *c, const struct member *m, struct ww_object *event) {
    struct member *e = noted_of(c, event);
    forget(event);
    if (!e) {
        if (!(e = calloc(1, sizeof *e)))
            return CUDA_ERROR_OUT_OF_MEMORY;
        *e = (struct member){.next = c->events, .event = event};
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
    LOCK_CAPTURES();
    int error = recording(d, stream, &c, &m);
    if (!error && event->device != d)
        error = CUDA_ERROR_INVALID_HANDLE;
    return error ? error : note(c, m, event);
}

void ww_capture_forget_event(struct ww_object *event) {
    LOCK_CAPTURES();
    forget(event);
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

/* Let a stream wait for an event. *done: the stream is captured, or the event was last recorded in a capture, so that
 * the wait must not be posted. */
int ww_capture_wait(struct ww_device *d, uint32_t stream, bool captured, struct ww_object *event, bool *done) {
    struct capture *c = NULL, *of = NULL;
    struct member *m = NULL;
    struct member *e = NULL;
    LOCK_CAPTURES();
    for (struct capture *k = captures; k && !e; k = k->next)
        if ((e = noted_of(k, event)))
            of = k;
    *done = captured || event->recorded == WW_IN_CAPTURE;
    int error = captured ? recording(d, stream, &c, &m) : 0;
    if (error || !*done)
        return error;
    if (!of) { /* the event does not belong to a capture in progress */
        if (c)
            c->broken = 1;
        return c ? CUDA_ERROR_STREAM_CAPTURE_ISOLATION : CUDA_ERROR_CAPTURED_EVENT;
    }
    if (of->broken || (c && c != of)) {
        error = of->broken ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_ERROR_STREAM_CAPTURE_MERGE;
        of->broken = 1;
        if (c)
            c->broken = 1;
        return error;
    }
    if (d != of->device || stream == WW_LEGACY) {
        of->broken = 1;
        return stream == WW_LEGACY ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return m ? put_all(&m->last, &e->last) : join(of, stream, ww_host_blocking(d, stream), &e->last);
}

/* A stream is destroyed. If it is the first stream of a capture, cancel the capture, which could not end any more. The
 * nodes of another captured stream must still lead to the last nodes of the first stream. */
void ww_capture_stream_gone(struct ww_device *d, uint32_t stream) {
    struct member *m;
    if (!atomic_load(&ww_captures))
        return;
    LOCK_CAPTURES();
    struct capture *c = capture_of(d, stream, &m);
    if (c && c->first == stream)
        cancel(c);
    else if (c)
        m->stream = 0; /* a new stream may get its id */
}

/* -- calls --------------------------------------------------------------------------------------------------------- */

/* Find nodes of a graph by their handles. */
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
    LOCK_CAPTURES();
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
    return error;
}

/* Return true if the last nodes of all streams are among the first stream's last nodes, or lead to them. */
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
    LOCK_CAPTURES();
    struct capture *c = capture_of(d, stream, &m);
    if (!graph && !(c && c->into)) /* needed unless the program passed the graph */
        return CUDA_ERROR_INVALID_VALUE;
    if (!c || c->first != stream)
        return c ? CUDA_ERROR_STREAM_CAPTURE_UNMATCHED : CUDA_ERROR_ILLEGAL_STATE;
    if (c->thread != &thread_mark && c->mode != CU_CAPTURE_RELAXED)
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    int error = c->broken      ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
                : joined(c, m) ? 0
                               : CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    if (error) {
        cancel(c);
        return error;
    }
    if (graph)
        *graph = c->graph->object;
    end_capture(c);
    return 0;
}

static int status_of(const struct capture *c) {
    return !c ? CU_CAPTURE_NONE : c->broken ? CU_CAPTURE_INVALIDATED : CU_CAPTURE_ACTIVE;
}

int ww_body_cuStreamIsCapturing(struct ww_device *d, uint32_t stream, int *status) {
    struct member *m;
    *status = CU_CAPTURE_NONE;
    if (!atomic_load(&ww_captures))
        return 0;
    LOCK_CAPTURES();
    if (stream == WW_LEGACY)
        return implicit(d);
    *status = status_of(capture_of(d, stream, &m));
    return 0;
}

int ww_body_cuStreamGetCaptureInfo_v3(struct ww_device *d, uint32_t stream, int *status, uint64_t *id, void **graph,
                                      void **deps, void **edges, size_t *n) {
    struct member *m;
    LOCK_CAPTURES();
    int error = stream == WW_LEGACY ? implicit(d) : 0;
    if (error)
        return error;
    struct capture *c = capture_of(d, stream, &m);
    *status = status_of(c);
    if (!c || c->broken)
        return 0;
    free(c->told);
    void **told = c->told = calloc(m->last.n + 1, sizeof *told + sizeof(struct cu_edge));
    if (!told)
        return CUDA_ERROR_OUT_OF_MEMORY;
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
    return 0;
}

int ww_body_cuStreamUpdateCaptureDependencies_v2(struct ww_device *d, uint32_t stream, void *deps, size_t n,
                                                 unsigned set) {
    struct capture *c;
    struct member *m;
    struct nodes more = {NULL, 0};
    LOCK_CAPTURES();
    int error = recording(d, stream, &c, &m);
    if (!error && !(error = read_nodes(c->graph, deps, n, &more))) {
        if (set)
            m->last.n = 0;
        error = put_all(&m->last, &more);
    }
    free(more.all);
    return error;
}

int ww_body_cuThreadExchangeStreamCaptureMode(int *mode) {
    if (*mode < CU_CAPTURE_GLOBAL || *mode > CU_CAPTURE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    int before = mode_of_thread;
    mode_of_thread = *mode;
    *mode = before;
    return 0;
}

/* -- destroyed nodes ----------------------------------------------------------------------------------------------- */

static void take(struct member *m, const struct ww_node *n) {
    for (; m; m = m->next) {
        size_t kept = 0;
        for (size_t i = 0; i < m->last.n; i++)
            if (m->last.all[i] != n)
                m->last.all[kept++] = m->last.all[i];
        m->last.n = kept;
    }
}

void ww_node_end(struct ww_node *n) {
    for (struct capture *c = captures; c; c = c->next)
        if (c->graph == n->graph) {
            take(c->members, n);
            take(c->events, n);
        }
    graphs_of_node_gone(&n->work);
    ww_node_remove(n);
}
