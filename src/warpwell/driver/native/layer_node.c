/* What a node does: made from the driver's structs, and given back as such. */
#include "layer.h"
#include <stdlib.h>
#include <string.h>

/* -- from the driver's structs
 * ------------------------------------------------------------------------------------------ */

static int device_for(CUcontext context, struct ww_device **d) {
    int error = ww_ready();
    *d = error ? NULL : context ? ww_context(context) : ww_current();
    return error ? error : *d ? 0 : context ? CUDA_ERROR_INVALID_CONTEXT : ww_need(d) ? CUDA_ERROR_INVALID_CONTEXT : 0;
}

static int make_kernel(const struct cu_node_kernel *p, bool second, struct ww_work *w) {
    struct ww_launch k = {.nattributes = 0};
    if (!p)
        return CUDA_ERROR_INVALID_VALUE;
    int error = device_for(second ? p->context : NULL, &w->device);
    if (error)
        return error;
    k.function = p->function || !second ? (void *)p->function : (void *)p->kernel;
    memcpy(k.grid, p->grid, sizeof k.grid);
    memcpy(k.block, p->block, sizeof k.block);
    k.shared = p->shared;
    k.params = p->params;
    k.extra = p->extra;
    w->kind = CU_NODE_KERNEL;
    return ww_kernel_make(w->device, &k, &w->of.kernel);
}

static int make_copy(const struct cu_copy3 *c, CUcontext context, struct ww_work *w) {
    int error = c ? device_for(context, &w->device) : CUDA_ERROR_INVALID_VALUE;
    if (error || (error = ww_copy_check(w->device, c)))
        return error;
    w->kind = CU_NODE_COPY;
    w->of.copy = *c;
    return 0;
}

static int make_set(const struct cu_node_set *s, CUcontext context, struct ww_work *w) {
    int error = s ? device_for(context, &w->device) : CUDA_ERROR_INVALID_VALUE;
    if (error)
        return error;
    w->kind = CU_NODE_SET;
    memcpy(&w->of.set, s, offsetof(struct cu_node_set, context));
    w->of.set.context = ww_context_handle(w->device);
    return ww_set_check(w->device, s);
}

static int make_host(const struct cu_node_host *p, struct ww_work *w) {
    int error = device_for(NULL, &w->device);
    if (error || !p || !p->run)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    w->kind = CU_NODE_HOST;
    w->of.host = *p;
    return 0;
}

static int make_event(int kind, CUevent event, struct ww_work *w) {
    struct ww_object *o = ww_object(event, WW_EVENT);
    int error = ww_ready();
    if (error || !o)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    w->kind = kind;
    w->device = o->device;
    w->of.event = event;
    return 0;
}

static int make_alloc(struct cu_node_alloc *p, struct ww_work *w) {
    int error = p && p->nbytes ? ww_need(&w->device) : CUDA_ERROR_INVALID_VALUE;
    if (error)
        return error;
    const struct cu_mem_location *at = &p->pool.location;
    bool managed = p->pool.type == CU_MEM_MANAGED;
    if (p->pool.type != CU_MEM_PINNED && (!managed || (error = ww_managed_check(w->device))))
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    if (p->pool.handle_types)
        return ww_refused("graphs that allocate memory for other processes");
    if (at->kind == CU_LOCATION_DEVICE) {
        if (at->id < 0 || at->id >= layer.ndevices)
            return CUDA_ERROR_INVALID_VALUE;
        w->device = &layer.devices[at->id];
        if ((error = ww_open(w->device)))
            return error;
    } else if (!managed && at->kind != CU_LOCATION_HOST && at->kind != CU_LOCATION_NUMA) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (size_t i = 0; i < p->naccess; i++)
        if (p->access[i].location.kind == CU_LOCATION_DEVICE && &layer.devices[p->access[i].location.id] != w->device)
            return ww_refused("graphs that allocate memory for another device");
    w->kind = CU_NODE_ALLOC;
    w->of.memory = ww_graph_memory_new(w->device, p->nbytes, managed || at->kind != CU_LOCATION_DEVICE, &error);
    if (!error)
        p->address = w->of.memory->address;
    return error;
}

/* With ww_graphs held: the graph in which the memory is freed knows the node that allocates it, or another graph does.
 */
static int make_free(const struct ww_graph *g, CUdeviceptr address, struct ww_work *w) {
    struct ww_span r;
    struct ww_graph_memory *m = NULL;
    w->device = ww_range_owner(address, &r);
    if (w->device && r.flags & WW_OF_GRAPH && r.start == address)
        m = r.owner;
    for (size_t i = 0; i < g->n; i++) {
        const struct ww_work *other = &g->nodes[i]->work;
        if (other->kind == CU_NODE_ALLOC && other->of.memory->address == address)
            m = other->of.memory;
        if (other->kind == CU_NODE_FREE && other->of.memory->address == address)
            return CUDA_ERROR_INVALID_VALUE; /* twice */
    }
    if (!m)
        return CUDA_ERROR_INVALID_VALUE;
    w->kind = CU_NODE_FREE;
    w->of.memory = m;
    w->device = m->device;
    atomic_fetch_add(&m->refs, 1);
    return 0;
}

/* With ww_graphs held: a clone of the graph, as the driver does it. */
static int make_child(const struct ww_graph *within, void *h, struct ww_work *w) {
    struct ww_graph *g = ww_graph(h);
    if (!g || g == within)
        return CUDA_ERROR_INVALID_VALUE;
    if (ww_graph_has(g, CU_NODE_ALLOC) || ww_graph_has(g, CU_NODE_FREE) || ww_graph_has(g, CU_NODE_CONDITION))
        return CUDA_ERROR_NOT_SUPPORTED;
    w->kind = CU_NODE_GRAPH;
    w->device = ww_current();
    w->of.graph = ww_graph_clone(g);
    return w->of.graph ? 0 : CUDA_ERROR_OUT_OF_MEMORY;
}

/* -- nodes
 * -------------------------------------------------------------------------------------------------------------- */

/* Where a node goes. */
struct place {
    void **made, *graph;
    void *const *deps;
    const struct cu_edge *edges;
    size_t n;
};

/* Add a node whose work is made, or, with the graph's lock, is made of a handle or an address. */
static int add(const struct place *at, struct ww_work *w, int kind, void *h) {
    struct ww_node **deps = malloc((at->n + 1) * sizeof *deps), *node;
    pthread_mutex_lock(&ww_graphs);
    struct ww_graph *g = ww_graph(at->graph);
    int error = !deps                                     ? CUDA_ERROR_OUT_OF_MEMORY
                : !g || !at->made || (at->n && !at->deps) ? CUDA_ERROR_INVALID_VALUE
                                                          : 0;
    for (size_t i = 0; i < at->n && !error; i++)
        error = (deps[i] = ww_node(at->deps[i])) ? 0 : CUDA_ERROR_INVALID_VALUE;
    if (!error && kind == CU_NODE_GRAPH)
        error = make_child(g, h, w);
    if (!error && kind == CU_NODE_FREE)
        error = make_free(g, (uintptr_t)h, w);
    if (!error && kind == CU_NODE_CONDITION)
        error = ww_condition_make(g, h, w);
    if (!error) {
        error = ww_node_add(g, deps, at->edges, at->n, w, &node);
        if (!error)
            *at->made = node->object;
    } else {
        ww_work_drop(w);
    }
    ww_graphs_leave();
    free(deps);
    return error;
}

static int add_made(const struct place *at, struct ww_work *w, int error) {
    return error ? error : add(at, w, -1, NULL);
}

#define PLACE {made, graph, deps, NULL, n}

CUresult cuGraphAddEmptyNode(void **made, void *graph, void *deps, size_t n) {
    struct ww_work w = {.kind = CU_NODE_EMPTY, .device = ww_current()};
    return add_made(&(struct place)PLACE, &w, ww_ready());
}

CUresult cuGraphAddKernelNode_v2(void **made, void *graph, void *deps, size_t n, void *params) {
    struct ww_work w = {.kind = CU_NODE_EMPTY};
    return add_made(&(struct place)PLACE, &w, make_kernel(params, true, &w));
}

CUresult cuGraphAddKernelNode(void **made, void *graph, void *deps, size_t n, void *params) {
    struct ww_work w = {.kind = CU_NODE_EMPTY};
    return add_made(&(struct place)PLACE, &w, make_kernel(params, false, &w));
}

CUresult cuGraphAddMemcpyNode(void **made, void *graph, void *deps, size_t n, void *copy, CUcontext context) {
    struct ww_work w = {.kind = CU_NODE_EMPTY};
    return add_made(&(struct place)PLACE, &w, make_copy(copy, context, &w));
}

CUresult cuGraphAddMemsetNode(void **made, void *graph, void *deps, size_t n, void *set, CUcontext context) {
    struct ww_work w = {.kind = CU_NODE_EMPTY};
    return add_made(&(struct place)PLACE, &w, make_set(set, context, &w));
}

CUresult cuGraphAddHostNode(void **made, void *graph, void *deps, size_t n, void *host) {
    struct ww_work w = {.kind = CU_NODE_EMPTY};
    return add_made(&(struct place)PLACE, &w, make_host(host, &w));
}

CUresult cuGraphAddEventRecordNode(void **made, void *graph, void *deps, size_t n, CUevent event) {
    struct ww_work w = {.kind = CU_NODE_EMPTY};
    return add_made(&(struct place)PLACE, &w, make_event(CU_NODE_RECORD, event, &w));
}

CUresult cuGraphAddEventWaitNode(void **made, void *graph, void *deps, size_t n, CUevent event) {
    struct ww_work w = {.kind = CU_NODE_EMPTY};
    return add_made(&(struct place)PLACE, &w, make_event(CU_NODE_WAIT, event, &w));
}

CUresult cuGraphAddMemAllocNode(void **made, void *graph, void *deps, size_t n, void *alloc) {
    struct ww_work w = {.kind = CU_NODE_EMPTY};
    return add_made(&(struct place)PLACE, &w, make_alloc(alloc, &w));
}

CUresult cuGraphAddMemFreeNode(void **made, void *graph, void *deps, size_t n, CUdeviceptr address) {
    struct ww_work w = {.kind = CU_NODE_EMPTY};
    int error = ww_ready();
    return error ? error : add(&(struct place)PLACE, &w, CU_NODE_FREE, (void *)(uintptr_t)address);
}

CUresult cuGraphAddChildGraphNode(void **made, void *graph, void *deps, size_t n, void *child) {
    struct ww_work w = {.kind = CU_NODE_EMPTY};
    int error = ww_ready();
    return error ? error : add(&(struct place)PLACE, &w, CU_NODE_GRAPH, child);
}

/* Work of any kind but a child graph and a free. */
static int make(struct cu_node_params *p, struct ww_work *w) {
    switch (p->type) {
    case CU_NODE_KERNEL:
        return make_kernel(&p->of.kernel, true, w);
    case CU_NODE_COPY:
        return make_copy(&p->of.copy.copy, p->of.copy.context, w);
    case CU_NODE_SET:
        return make_set(&p->of.set, p->of.set.context, w);
    case CU_NODE_HOST:
        return make_host(&p->of.host, w);
    case CU_NODE_EMPTY:
        w->device = ww_current();
        return ww_ready();
    case CU_NODE_WAIT:
    case CU_NODE_RECORD:
        return make_event(p->type, p->of.event, w);
    case CU_NODE_ALLOC:
        return make_alloc(&p->of.alloc, w);
    case CU_NODE_CONDITION:
        return CUDA_ERROR_INVALID_VALUE; /* such a node stays as it was made */
    default:
        return ww_refused("graph nodes for semaphores and operations on memory");
    }
}

CUresult cuGraphAddNode_v2(void **made, void *graph, void *deps, void *edges, size_t n, void *params) {
    struct ww_work w = {.kind = CU_NODE_EMPTY};
    struct cu_node_params *p = params;
    struct place at = {made, graph, deps, edges, n};
    int error = ww_ready();
    if (error || !p)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    if (p->type == CU_NODE_GRAPH)
        return add(&at, &w, CU_NODE_GRAPH, p->of.graph);
    if (p->type == CU_NODE_FREE)
        return add(&at, &w, CU_NODE_FREE, (void *)(uintptr_t)p->of.memory);
    if (p->type == CU_NODE_CONDITION) {
        if (!(error = add(&at, &w, CU_NODE_CONDITION, &p->of.condition)))
            p->of.condition.graphs = w.of.condition->handles;
        return error;
    }
    return add_made(&at, &w, make(p, &w));
}

/* -- parameters of nodes
 * ------------------------------------------------------------------------------------------------ */

/* The work of a node of the kind, with ww_graphs held; NULL: not held, *error says why. */
static struct ww_work *look(void *h, int kind, const void *out, int *error) {
    if ((*error = ww_ready()))
        return NULL;
    pthread_mutex_lock(&ww_graphs);
    struct ww_node *n = ww_node(h);
    if (n && n->work.kind == kind && out)
        return &n->work;
    ww_graphs_leave();
    *error = CUDA_ERROR_INVALID_VALUE;
    return NULL;
}

static int done(void) {
    ww_graphs_leave();
    return 0;
}

static int set(void *h, struct ww_work *w, int error) {
    struct ww_work *old = error ? NULL : look(h, w->kind, w, &error);
    if (old) {
        struct ww_work was = *old;
        *old = *w;
        *w = was;
        done();
    }
    ww_work_drop(w);
    return error;
}

static int get_kernel(void *h, struct cu_node_kernel *to, bool second) {
    int error;
    struct ww_work *w = look(h, CU_NODE_KERNEL, to, &error);
    if (!w)
        return error;
    const struct ww_kernel_work *k = w->of.kernel;
    bool kernel = second && ww_object(k->function, WW_KERNEL);
    to->function = kernel ? NULL : k->function;
    memcpy(to->grid, k->grid, sizeof to->grid);
    memcpy(to->block, k->block, sizeof to->block);
    to->shared = k->shared;
    to->params = k->nparams ? k->params : NULL;
    to->extra = NULL;
    if (second) {
        to->kernel = kernel ? k->function : NULL;
        to->context = ww_context_handle(w->device);
    }
    return done();
}

CUresult cuGraphKernelNodeGetParams_v2(void *h, void *to) { return get_kernel(h, to, true); }

CUresult cuGraphKernelNodeGetParams(void *h, void *to) { return get_kernel(h, to, false); }

CUresult cuGraphKernelNodeSetParams_v2(void *h, void *params) {
    struct ww_work w = {.kind = CU_NODE_EMPTY};
    return set(h, &w, make_kernel(params, true, &w));
}

CUresult cuGraphKernelNodeSetParams(void *h, void *params) {
    struct ww_work w = {.kind = CU_NODE_EMPTY};
    return set(h, &w, make_kernel(params, false, &w));
}

CUresult cuGraphMemcpyNodeGetParams(void *h, void *to) {
    int error;
    struct ww_work *w = look(h, CU_NODE_COPY, to, &error);
    if (!w)
        return error;
    memcpy(to, &w->of.copy, sizeof w->of.copy);
    return done();
}

CUresult cuGraphMemcpyNodeSetParams(void *h, void *copy) {
    struct ww_work w = {.kind = CU_NODE_EMPTY};
    return set(h, &w, make_copy(copy, NULL, &w));
}

CUresult cuGraphMemsetNodeGetParams(void *h, void *to) {
    int error;
    struct ww_work *w = look(h, CU_NODE_SET, to, &error);
    if (!w)
        return error;
    memcpy(to, &w->of.set, offsetof(struct cu_node_set, context));
    return done();
}

CUresult cuGraphMemsetNodeSetParams(void *h, void *params) {
    struct ww_work w = {.kind = CU_NODE_EMPTY};
    return set(h, &w, make_set(params, NULL, &w));
}

CUresult cuGraphHostNodeGetParams(void *h, void *to) {
    int error;
    struct ww_work *w = look(h, CU_NODE_HOST, to, &error);
    if (!w)
        return error;
    memcpy(to, &w->of.host, sizeof w->of.host);
    return done();
}

CUresult cuGraphHostNodeSetParams(void *h, void *params) {
    struct ww_work w = {.kind = CU_NODE_EMPTY};
    return set(h, &w, make_host(params, &w));
}

CUresult cuGraphChildGraphNodeGetGraph(void *h, void **graph) {
    int error;
    struct ww_work *w = look(h, CU_NODE_GRAPH, graph, &error);
    if (!w)
        return error;
    *graph = w->of.graph->object;
    return done();
}

static int get_event(void *h, int kind, CUevent *to) {
    int error;
    struct ww_work *w = look(h, kind, to, &error);
    if (!w)
        return error;
    *to = w->of.event;
    return done();
}

CUresult cuGraphEventRecordNodeGetEvent(void *h, CUevent *to) { return get_event(h, CU_NODE_RECORD, to); }

CUresult cuGraphEventWaitNodeGetEvent(void *h, CUevent *to) { return get_event(h, CU_NODE_WAIT, to); }

CUresult cuGraphEventRecordNodeSetEvent(void *h, CUevent event) {
    struct ww_work w = {.kind = CU_NODE_EMPTY};
    return set(h, &w, make_event(CU_NODE_RECORD, event, &w));
}

CUresult cuGraphEventWaitNodeSetEvent(void *h, CUevent event) {
    struct ww_work w = {.kind = CU_NODE_EMPTY};
    return set(h, &w, make_event(CU_NODE_WAIT, event, &w));
}

CUresult cuGraphMemAllocNodeGetParams(void *h, void *to) {
    int error;
    struct ww_work *w = look(h, CU_NODE_ALLOC, to, &error);
    if (!w)
        return error;
    const struct ww_graph_memory *m = w->of.memory;
    struct cu_node_alloc p = {.pool = {.type = CU_MEM_PINNED}, .nbytes = m->nbytes, .address = m->address};
    p.pool.location = m->on_host ? (struct cu_mem_location){CU_LOCATION_HOST, 0}
                                 : (struct cu_mem_location){CU_LOCATION_DEVICE, (int)(m->device - layer.devices)};
    memcpy(to, &p, sizeof p);
    return done();
}

CUresult cuGraphMemFreeNodeGetParams(void *h, CUdeviceptr *to) {
    int error;
    struct ww_work *w = look(h, CU_NODE_FREE, to, &error);
    if (!w)
        return error;
    *to = w->of.memory->address;
    return done();
}

/* Parameters of a node in a graph, or of that node in an executable one. */
static int set_any(void *exec, void *h, struct cu_node_params *p) {
    struct ww_work w = {.kind = CU_NODE_EMPTY};
    if (!p || p->type == CU_NODE_GRAPH || p->type == CU_NODE_ALLOC || p->type == CU_NODE_FREE ||
        p->type == CU_NODE_EMPTY)
        return CUDA_ERROR_INVALID_VALUE;
    int error = make(p, &w);
    return exec ? ww_exec_set(exec, h, &w, error) : set(h, &w, error);
}

CUresult cuGraphNodeSetParams(void *h, void *params) { return set_any(NULL, h, params); }

CUresult cuGraphExecNodeSetParams(void *exec, void *h, void *params) {
    return exec ? set_any(exec, h, params) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphExecKernelNodeSetParams_v2(void *exec, void *h, void *params) {
    struct ww_work w = {.kind = CU_NODE_EMPTY};
    return ww_exec_set(exec, h, &w, make_kernel(params, true, &w));
}

CUresult cuGraphExecKernelNodeSetParams(void *exec, void *h, void *params) {
    struct ww_work w = {.kind = CU_NODE_EMPTY};
    return ww_exec_set(exec, h, &w, make_kernel(params, false, &w));
}

CUresult cuGraphExecMemcpyNodeSetParams(void *exec, void *h, void *copy, CUcontext context) {
    struct ww_work w = {.kind = CU_NODE_EMPTY};
    return ww_exec_set(exec, h, &w, make_copy(copy, context, &w));
}

CUresult cuGraphExecMemsetNodeSetParams(void *exec, void *h, void *params, CUcontext context) {
    struct ww_work w = {.kind = CU_NODE_EMPTY};
    return ww_exec_set(exec, h, &w, make_set(params, context, &w));
}

CUresult cuGraphExecHostNodeSetParams(void *exec, void *h, void *params) {
    struct ww_work w = {.kind = CU_NODE_EMPTY};
    return ww_exec_set(exec, h, &w, make_host(params, &w));
}

CUresult cuGraphExecEventRecordNodeSetEvent(void *exec, void *h, CUevent event) {
    struct ww_work w = {.kind = CU_NODE_EMPTY};
    return ww_exec_set(exec, h, &w, make_event(CU_NODE_RECORD, event, &w));
}

CUresult cuGraphExecEventWaitNodeSetEvent(void *exec, void *h, CUevent event) {
    struct ww_work w = {.kind = CU_NODE_EMPTY};
    return ww_exec_set(exec, h, &w, make_event(CU_NODE_WAIT, event, &w));
}
