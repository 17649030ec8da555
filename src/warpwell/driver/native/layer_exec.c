/* Executable graphs. A plan is a graph's nodes in one of the orders that its edges allow; a launch posts the nodes to
 * the stream in that order.
 *
 * A plan in use is never changed: an update makes another one. A launch holds a reference to its plan until its last
 * step is posted, so that user objects and memory of graphs stay until then. The thread of host functions posts the
 * steps behind a host node, while the stream is held, so that a launch does not wait. An event behind each launch
 * orders launches of one executable graph in different streams.
 *
 * The steps from the first kernel to the last conditional node are one executable graph in the worker's driver. It is
 * made with the plan, and a launch needs one call for it. Earlier steps cannot set a condition.
 */
#include "layer.h"
#include <stdlib.h>
#include <string.h>

struct step {
    struct ww_work work;
    uint64_t node; /* serial of the graph's node */
    bool off;
    uint32_t number, nbodies; /* conditional nodes: id in messages to the worker; number of body graphs */
    struct ww_plan **bodies;
};

struct ww_plan {
    _Atomic int refs;
    size_t n, nshape, nusers;
    struct step *steps;
    size_t *shape; /* numbers of nodes and edges, and the edges: equal if two graphs have the same topology */
    struct ww_user_ref *users;
    size_t twins;               /* number of steps up to the last conditional node, or 0 */
    size_t first;               /* index of the first of these steps that is a kernel or a conditional node */
    struct ww_twin graph, exec; /* the graph's twin, if it has one; executable twin of steps `first` to `twins` - 1 */
};

struct ww_mark { /* an event that is recorded after the last launch */
    _Atomic int refs;
    struct ww_device *device;
    uint64_t life;
    uint32_t event;
};

/* -- plans --------------------------------------------------------------------------------------------------------- */

static void count(const struct ww_graph *g, size_t *nodes, size_t *shape, size_t *users) {
    *nodes += g->n;
    *shape += 1 + g->n;
    *users += g->nusers;
    for (size_t i = 0; i < g->n; i++) {
        *shape += g->nodes[i]->nedges;
        if (g->nodes[i]->work.kind == CU_NODE_GRAPH)
            count(g->nodes[i]->work.of.graph, nodes, shape, users);
    }
}

/* With ww_graphs held. */
static void free_plan(struct ww_plan *p) {
    for (size_t i = 0; i < p->n; i++) {
        ww_work_drop(&p->steps[i].work);
        for (uint32_t k = 0; k < p->steps[i].nbodies; k++)
            if (p->steps[i].bodies[k])
                free_plan(p->steps[i].bodies[k]);
        free(p->steps[i].bodies);
    }
    for (size_t i = 0; i < p->nusers; i++)
        ww_user_release(p->users[i].user, p->users[i].count);
    ww_twin_drop(&p->exec, WW_OP_EXEC_DROP);
    free(p->steps);
    free(p->shape);
    free(p->users);
    free(p);
}

static void drop_plan(struct ww_plan *p) {
    if (!p || atomic_fetch_sub(&p->refs, 1) != 1)
        return;
    WW_LOCK_GRAPHS();
    free_plan(p);
}

/* Return an empty plan, or NULL if out of memory. */
static struct ww_plan *new_plan(size_t nodes, size_t shape, size_t users) {
    struct ww_plan *p = calloc(1, sizeof *p);
    if (!p)
        return NULL;
    atomic_store(&p->refs, 1);
    p->steps = calloc(nodes + 1, sizeof *p->steps);
    p->shape = calloc(shape + 1, sizeof *p->shape);
    p->users = calloc(users + 1, sizeof *p->users);
    if (p->steps && p->shape && p->users)
        return p;
    free_plan(p);
    return NULL;
}

static int add_graph(struct ww_plan *p, struct ww_graph *g);
static int make_plan(struct ww_graph *g, struct ww_plan **made);

static int add_condition(struct ww_plan *p, const struct ww_node *n) {
    struct step *s = &p->steps[p->n++];
    const struct ww_condition *c = n->work.of.condition;
    int error = 0;
    p->twins = p->n;
    *s = (struct step){
        .work = {.kind = CU_NODE_CONDITION, .device = n->work.device}, .node = n->serial, .number = c->node};
    if (!(s->bodies = calloc(c->size, sizeof *s->bodies)))
        return CUDA_ERROR_OUT_OF_MEMORY;
    for (; s->nbodies < c->size && !error; s->nbodies++)
        error = make_plan(c->graphs[s->nbodies], &s->bodies[s->nbodies]);
    return error;
}

/* Append a node after its dependencies. */
static int add_step(struct ww_plan *p, const struct ww_node *n) {
    if (n->work.kind == CU_NODE_GRAPH)
        return add_graph(p, n->work.of.graph);
    if (n->work.kind == CU_NODE_CONDITION)
        return add_condition(p, n);
    int error = ww_work_copy(&p->steps[p->n].work, &n->work);
    if (!error)
        p->steps[p->n++].node = n->serial;
    return error;
}

static bool ready(const struct ww_node *n, const bool *placed) {
    for (size_t e = 0; e < n->nedges; e++)
        if (!placed[n->edges[e].from->place])
            return false;
    return true;
}

/* Append the nodes of a graph in the order of their creation, as far as dependencies allow. Return INVALID_VALUE if the
 * edges form a cycle. */
static int add_nodes(struct ww_plan *p, const struct ww_graph *g) {
    bool *placed = calloc(g->n + 1, sizeof *placed);
    size_t left = g->n, before = left + 1;
    int error = placed ? 0 : CUDA_ERROR_OUT_OF_MEMORY;
    while (left && !error && left < before) {
        before = left;
        for (size_t i = 0; i < g->n && !error; i++)
            if (!placed[i] && ready(g->nodes[i], placed)) {
                error = add_step(p, g->nodes[i]);
                placed[i] = true;
                left--;
            }
    }
    free(placed);
    return error ? error : left ? CUDA_ERROR_INVALID_VALUE : 0;
}

static int add_graph(struct ww_plan *p, struct ww_graph *g) {
    p->shape[p->nshape++] = g->n;
    for (size_t i = 0; i < g->n; i++)
        g->nodes[i]->place = i;
    for (size_t i = 0; i < g->n; i++) {
        p->shape[p->nshape++] = g->nodes[i]->nedges;
        for (size_t e = 0; e < g->nodes[i]->nedges; e++)
            p->shape[p->nshape++] = g->nodes[i]->edges[e].from->place;
    }
    for (size_t i = 0; i < g->nusers; i++) {
        p->users[p->nusers++] = g->users[i];
        ww_user_retain(g->users[i].user, g->users[i].count);
    }
    return add_nodes(p, g);
}

/* With ww_graphs held: make a plan without an executable twin. The caller drops *made also after an error. */
static int make_plan(struct ww_graph *g, struct ww_plan **made) {
    size_t nodes = 0, shape = 0, users = 0;
    count(g, &nodes, &shape, &users);
    struct ww_plan *p = *made = new_plan(nodes, shape, users);
    if (!p)
        return CUDA_ERROR_OUT_OF_MEMORY;
    p->graph = g->twin;
    return add_graph(p, g);
}

/* Post a kernel, a copy or a memset. */
static int post_work(struct ww_device *d, uint32_t stream, const struct ww_work *w) {
    if (w->kind == CU_NODE_COPY)
        return ww_copy_post(d, stream, &w->of.copy, false);
    if (w->kind == CU_NODE_SET)
        return ww_set_post(d, stream, &w->of.set, false);
    return w->device == d ? ww_kernel_post(d, stream, w->of.kernel)
                          : ww_refused("graphs with kernels of several devices");
}

/* Record a step in the twin of its graph, which is being recorded. */
static int record_step(struct ww_device *d, const struct step *s) {
    switch (s->work.kind) {
    case CU_NODE_KERNEL:
    case CU_NODE_COPY:
    case CU_NODE_SET:
        return post_work(d, WW_RECORDED, &s->work);
    case CU_NODE_CONDITION:
        return ww_send_id(d, WW_OP_GRAPH_NODE, 0, s->number);
    case CU_NODE_EMPTY:
    case CU_NODE_ALLOC: /* its memory is allocated already */
    case CU_NODE_FREE:
        return 0;
    default:
        return ww_refused(
            "graphs with host functions or events between kernels and conditional nodes, or within these");
    }
}

/* Record steps `first` to n - 1 into their graph's twin, then the body graphs of conditional nodes into their twins. */
static int record(const struct ww_plan *p, size_t first, size_t n) {
    struct ww_device *d = p->graph.device;
    int error = ww_twin_code(&p->graph), end;
    if (error || (error = ww_call_id(d, WW_OP_GRAPH_BEGIN, 0, p->graph.id, NULL, 0)))
        return error;
    for (size_t i = first; i < n && !error; i++)
        error = record_step(d, &p->steps[i]);
    end = ww_call(d, WW_OP_GRAPH_END, 0, NULL, 0, NULL, 0);
    error = error ? error : end;
    for (size_t i = 0; i < n; i++)
        for (uint32_t k = 0; k < p->steps[i].nbodies && !error; k++)
            error = record(p->steps[i].bodies[k], 0, p->steps[i].bodies[k]->n);
    return error;
}

/* With ww_graphs held: make a plan with its executable twin. The caller drops *made also after an error. */
static int make_whole(struct ww_graph *g, struct ww_plan **made) {
    int error = make_plan(g, made);
    if (error || !(*made)->twins)
        return error;
    struct ww_plan *p = *made;
    while (p->steps[p->first].work.kind != CU_NODE_KERNEL && p->steps[p->first].work.kind != CU_NODE_CONDITION)
        p->first++;
    if ((error = record(p, p->first, p->twins)) || (error = ww_twin_name(&p->exec, p->graph.device)))
        return error;
    if ((error = ww_call_graph(p->graph.device, WW_OP_GRAPH_MAKE, 0, p->graph.id, p->exec.id, NULL, 0)))
        ww_twin_drop(&p->exec, 0);
    return error;
}

/* With ww_graphs held: return a copy of a plan that may be changed. NULL: the plan has a twin, or out of memory. */
static struct ww_plan *copy_plan(const struct ww_plan *from) {
    struct ww_plan *p = from->twins ? NULL : new_plan(from->n, from->nshape, from->nusers);
    for (; p && p->n < from->n; p->n++) {
        struct step *s = &p->steps[p->n];
        *s = from->steps[p->n];
        if (ww_work_copy(&s->work, &from->steps[p->n].work)) {
            free_plan(p);
            return NULL;
        }
    }
    if (!p)
        return NULL;
    p->nshape = from->nshape;
    memcpy(p->shape, from->shape, from->nshape * sizeof *p->shape);
    p->nusers = from->nusers;
    memcpy(p->users, from->users, from->nusers * sizeof *p->users);
    for (size_t i = 0; i < p->nusers; i++)
        ww_user_retain(p->users[i].user, p->users[i].count);
    return p;
}

/* -- executable graphs --------------------------------------------------------------------------------------------- */

struct ww_exec *ww_exec(const void *h) { return ww_object_more(h, WW_EXEC); }

static void drop_mark(struct ww_mark *m) {
    if (!m || atomic_fetch_sub(&m->refs, 1) != 1)
        return;
    ww_event_end(m->device, m->life, m->event);
    free(m);
}

static void drop_exec(struct ww_exec *x) {
    if (atomic_fetch_sub(&x->refs, 1) != 1)
        return;
    drop_mark(x->mark);
    free(x);
}

/* -- plans that launches may still use ----------------------------------------------------------------------------- */

struct retired {
    struct ww_plan *plan;
    struct ww_mark *mark;
};

static void drop_retired(void *data, int code) {
    struct retired *r = data;
    (void)code;
    drop_mark(r->mark);
    drop_plan(r->plan);
    free(r);
}

/* Drop a plan, without waiting, when its launches are done on the device: user objects must exist until then. */
static void retire(struct ww_plan *p, struct ww_mark *m) {
    struct retired *r = NULL;
    bool over = !p->nusers || !m || m->life != atomic_load(&m->device->life) || ww_context_code(m->device) ||
                ww_call_event(m->device, WW_OP_EVENT_QUERY, 0, m ? m->event : 0, 0, NULL, 0) != CUDA_ERROR_NOT_READY;
    if (!over && (r = malloc(sizeof *r))) {
        *r = (struct retired){p, m};
        atomic_fetch_add(&m->refs, 1);
        if (!ww_host_post(m->device, 0, false,
                          &(struct ww_host){.then = drop_retired, .data = r, .event = m->event, .lent = true}))
            return;
        drop_mark(m);
        free(r);
    }
    drop_plan(p);
}

/* -- creation and destruction -------------------------------------------------------------------------------------- */

int ww_instantiate(void **exec, void *h, uint64_t flags, int *result) {
    struct ww_plan *p = NULL;
    struct ww_exec *x = NULL;
    int error = ww_ready();
    if (error || !exec || flags > 15)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    if (flags & CU_INSTANTIATE_DEVICE)
        return ww_refused("graphs that kernels launch");
    WW_LOCK_GRAPHS();
    struct ww_graph *g = ww_graph(h);
    error = g ? make_whole(g, &p) : CUDA_ERROR_INVALID_VALUE;
    *result = g && error == CUDA_ERROR_INVALID_VALUE ? 2 : error ? 1 : 0; /* 2: invalid structure */
    if (!error && (!(x = calloc(1, sizeof *x)) || !(x->object = ww_object_new(WW_EXEC, NULL))))
        error = CUDA_ERROR_OUT_OF_MEMORY;
    if (error) {
        free(x);
        if (p)
            free_plan(p);
        return error;
    }
    atomic_store(&x->refs, 1);
    x->plan = p;
    x->flags = flags & ~(uint64_t)CU_INSTANTIATE_UPLOAD;
    x->object->more = x;
    *exec = x->object;
    return 0;
}

CUresult ww_cuGraphInstantiateWithParams(int per_thread, void **exec, void *graph, void *params) {
    struct cu_instantiate *p = params;
    (void)per_thread; /* an upload does nothing: the nodes' images are in the worker */
    if (!p)
        return CUDA_ERROR_INVALID_VALUE;
    p->node = NULL;
    p->result = 1;
    return ww_instantiate(exec, graph, p->flags, &p->result);
}

int ww_body_cuGraphExecDestroy(void *h) {
    pthread_mutex_lock(&ww_graphs);
    struct ww_exec *x = ww_exec(h);
    if (x) {
        ww_object_drop(h, WW_EXEC, NULL);
        x->gone = true;
    }
    ww_graphs_leave();
    if (!x)
        return CUDA_ERROR_INVALID_VALUE;
    retire(x->plan, x->mark);
    drop_exec(x);
    return 0;
}

/* Replace the plan of an executable graph, and unlock ww_graphs. */
static void replace(struct ww_exec *x, struct ww_plan *p) {
    struct ww_plan *old = x->plan;
    x->plan = p;
    ww_graphs_leave();
    retire(old, x->mark);
}

static struct step *step_of(const struct ww_plan *p, const void *node) {
    const struct ww_node *n = ww_node(node);
    for (size_t i = 0; n && i < p->n; i++)
        if (p->steps[i].node == n->serial)
            return &p->steps[i];
    return NULL;
}

/* Replace the plan by a copy with one changed step: with other `work`, which is taken, or else switched `off` or on. */
static int change(void *h, void *node, struct ww_work *work, bool off) {
    pthread_mutex_lock(&ww_graphs);
    struct ww_exec *x = ww_exec(h);
    struct step *s = x ? step_of(x->plan, node) : NULL;
    int kind = s ? s->work.kind : CU_NODE_EMPTY;
    bool may = s && (work ? kind == work->kind : kind == CU_NODE_KERNEL || kind == CU_NODE_COPY || kind == CU_NODE_SET);
    struct ww_plan *p = may ? copy_plan(x->plan) : NULL;
    if (!p) {
        if (work)
            ww_work_drop(work);
        ww_graphs_leave();
        return !may              ? CUDA_ERROR_INVALID_VALUE
               : !x->plan->twins ? CUDA_ERROR_OUT_OF_MEMORY
                                 : ww_refused("changes of one node in an executable graph with conditional nodes");
    }
    struct step *to = &p->steps[s - x->plan->steps];
    if (work) {
        ww_work_drop(&to->work);
        to->work = *work;
    } else {
        to->off = off;
    }
    replace(x, p);
    return 0;
}

int ww_exec_change(void *h, void *node, struct ww_work *work) { return change(h, node, work, false); }

int ww_body_cuGraphNodeSetEnabled(void *h, void *node, unsigned enabled) { return change(h, node, NULL, !enabled); }

int ww_body_cuGraphNodeGetEnabled(struct ww_exec *x, void *node, unsigned *enabled) {
    const struct step *s = step_of(x->plan, node);
    if (s)
        *enabled = !s->off;
    return s ? 0 : CUDA_ERROR_INVALID_VALUE;
}

/* -- updates ------------------------------------------------------------------------------------------------------- */

static int compare(const struct ww_plan *old, const struct ww_plan *new) {
    if (old->nshape != new->nshape || old->n != new->n ||
        memcmp(old->shape, new->shape, old->nshape * sizeof *old->shape))
        return CU_UPDATE_TOPOLOGY;
    for (size_t i = 0; i < old->n; i++) {
        const struct ww_work *a = &old->steps[i].work, *b = &new->steps[i].work;
        if (a->kind != b->kind)
            return CU_UPDATE_TYPE;
        if (a->kind == CU_NODE_ALLOC || a->kind == CU_NODE_FREE)
            return CU_UPDATE_NOT_SUPPORTED;
        if (a->kind != CU_NODE_EMPTY && a->device != b->device)
            return CU_UPDATE_PARAMETERS;
        if (old->steps[i].nbodies != new->steps[i].nbodies)
            return CU_UPDATE_TOPOLOGY;
        for (uint32_t k = 0; k < old->steps[i].nbodies; k++) {
            int result = compare(old->steps[i].bodies[k], new->steps[i].bodies[k]);
            if (result)
                return result;
        }
    }
    return 0;
}

int ww_body_cuGraphExecUpdate_v2(void *h, void *graph, void *result) {
    struct cu_update *r = result;
    struct ww_plan *p = NULL;
    *r = (struct cu_update){1, NULL, NULL};
    pthread_mutex_lock(&ww_graphs);
    struct ww_exec *x = ww_exec(h);
    struct ww_graph *g = ww_graph(graph);
    int error = x && g ? make_whole(g, &p) : CUDA_ERROR_INVALID_VALUE;
    if (!error && (r->result = compare(x->plan, p)))
        error = CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
    if (error) {
        ww_graphs_leave();
        drop_plan(p);
        return error;
    }
    for (size_t i = 0; i < p->n; i++) { /* steps keep the node handles of the instantiated graph */
        p->steps[i].node = x->plan->steps[i].node;
        p->steps[i].off = x->plan->steps[i].off;
    }
    replace(x, p);
    return 0;
}

/* -- launches ------------------------------------------------------------------------------------------------------ */

struct run { /* a launch that is not completely posted */
    struct ww_exec *exec;
    struct ww_plan *plan;
    struct ww_device *device;
    uint32_t stream;
    size_t at;
};

static void end_run(struct run *r) {
    atomic_fetch_sub(&r->exec->unposted, 1);
    if (r->exec->gone) /* cuGraphExecDestroy has retired the plan before this launch recorded the mark */
        retire(r->plan, r->exec->mark);
    else
        drop_plan(r->plan);
    drop_exec(r->exec);
    free(r);
}

static int post_event(struct ww_device *d, uint32_t stream, const struct ww_work *w) {
    struct ww_object *o = ww_object(w->of.event, WW_EVENT);
    if (!o || o->device != d)
        return o ? ww_refused("graphs with events of another device") : CUDA_ERROR_INVALID_HANDLE;
    int error = ww_send_event(d, w->kind == CU_NODE_RECORD ? WW_OP_EVENT_RECORD : WW_OP_STREAM_WAIT, stream, o->id, 0);
    if (!error && w->kind == CU_NODE_RECORD)
        atomic_store_explicit(&o->recorded, 1, memory_order_relaxed);
    return error;
}

static int post_step(const struct run *r, const struct ww_work *w) {
    switch (w->kind) {
    case CU_NODE_KERNEL:
    case CU_NODE_COPY:
    case CU_NODE_SET:
        return post_work(r->device, r->stream, w);
    case CU_NODE_WAIT:
    case CU_NODE_RECORD:
        return post_event(r->device, r->stream, w);
    default:
        return 0;
    }
}

/* Launch the steps that are one executable graph in the worker's driver. */
static int launch_twin(const struct run *r) {
    const struct ww_twin *t = &r->plan->exec;
    int error = ww_twin_code(t);
    if (!error && t->device != r->device)
        error = ww_refused("launches of graphs with conditional nodes in streams of another device");
    ww_flush_output();
    return error ? error : ww_send_id(r->device, WW_OP_GRAPH_LAUNCH, r->stream, t->id);
}

static int behind(const struct ww_exec *x, struct ww_device *d, uint32_t stream, uint16_t op) {
    return ww_send_event(d, op, stream, x->mark->event, 0);
}

static void go_on(void *data, int code);

static void call_host(void *data) {
    const struct run *r = data;
    const struct cu_node_host *h = &r->plan->steps[r->at - 1].work.of.host;
    h->run(h->data);
}

/* Post the remaining steps up to the next host node, whose `go_on` posts the rest, or up to the end, and then free the
 * run. */
static int post(struct run *r) {
    int error = 0;
    while (r->at < r->plan->n && !error) {
        if (r->at == r->plan->first && r->plan->twins) {
            error = launch_twin(r);
            r->at = r->plan->twins;
            continue;
        }
        const struct step *s = &r->plan->steps[r->at++];
        if (s->work.kind == CU_NODE_HOST && !s->off) {
            error =
                ww_host_post(r->device, r->stream, true, &(struct ww_host){.run = call_host, .then = go_on, .data = r});
            if (!error)
                return 0;
        } else if (!s->off) {
            error = post_step(r, &s->work);
        }
    }
    behind(r->exec, r->device, r->stream, WW_OP_EVENT_RECORD);
    end_run(r);
    return error;
}

static void go_on(void *data, int code) {
    struct run *r = data;
    if (code) {
        end_run(r);
        return;
    }
    int error = post(r);
    if (error)
        ww_say("a graph's launch ends in its middle: error %d", error);
}

static int new_mark(struct ww_exec *x, struct ww_device *d, uint64_t life) {
    struct ww_mark *m = malloc(sizeof *m);
    int error = m ? ww_event_new(d, CU_EVENT_DISABLE_TIMING, &m->event) : CUDA_ERROR_OUT_OF_MEMORY;
    if (error) {
        free(m);
        return error;
    }
    atomic_init(&m->refs, 1);
    m->device = d;
    m->life = life;
    drop_mark(x->mark);
    x->mark = m;
    return 0;
}

/* Order this launch after the last one if that was in another stream of the device. */
static int order(struct ww_exec *x, struct ww_device *d, uint32_t stream) {
    uint64_t life = atomic_load(&d->life);
    int error = 0;
    if (!x->mark || x->mark->device != d || x->mark->life != life) {
        error = new_mark(x, d, life);
    } else if (x->stream != stream) {
        if (atomic_load(&x->unposted) > 1) /* the last launch is not completely posted */
            ww_host_wait(d, x->stream);
        error = behind(x, d, stream, WW_OP_STREAM_WAIT);
    }
    x->stream = stream;
    return error;
}

/* Return an error if a launch would allocate memory that is still allocated, unless the flag AUTO_FREE allows that. */
static int check_memory(const struct ww_exec *x) {
    for (size_t i = 0; i < x->plan->n; i++) {
        const struct ww_work *w = &x->plan->steps[i].work;
        if (w->kind == CU_NODE_ALLOC && atomic_load(&w->of.memory->live) && !(x->flags & CU_INSTANTIATE_AUTO_FREE))
            return CUDA_ERROR_INVALID_VALUE;
    }
    return 0;
}

/* Mark the graph's memory as allocated or freed: the program sees that at the call, not when the stream reaches it. */
static void count_memory(const struct ww_plan *p) {
    for (size_t i = 0; i < p->n; i++) {
        const struct ww_work *w = &p->steps[i].work;
        if (w->kind == CU_NODE_ALLOC)
            ww_graph_memory_live(w->of.memory);
        else if (w->kind == CU_NODE_FREE)
            ww_graph_memory_freed(w->of.memory);
    }
}

int ww_body_cuGraphLaunch(struct ww_device *d, uint32_t stream, bool captured, void *h) {
    int error = 0;
    if (captured)
        return ww_refused("launches of graphs in a stream that records");
    ww_use_pinned(d);
    struct run *r = calloc(1, sizeof *r);
    if (!r)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&ww_graphs);
    struct ww_exec *x = ww_exec(h);
    if (x && !(error = check_memory(x))) {
        *r = (struct run){x, x->plan, d, stream, 0};
        atomic_fetch_add(&x->refs, 1);
        atomic_fetch_add(&x->unposted, 1);
        atomic_fetch_add(&x->plan->refs, 1);
    }
    ww_graphs_leave();
    if (!x || error) {
        free(r);
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    }
    bool held = atomic_load(&d->holds) && ww_host_held(d, stream);
    if (!(error = order(x, d, stream)))
        count_memory(r->plan);
    if (error || (held && (error = ww_host_post(d, stream, true, &(struct ww_host){.then = go_on, .data = r})))) {
        end_run(r);
        return error;
    }
    return held ? 0 : post(r); /* if held, the thread of host functions posts the steps: no wait here */
}
