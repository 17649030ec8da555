/* Parameters of nodes, which programs pass and get in the driver's structs. */
#include "layer.h"
#include <stdlib.h>
#include <string.h>

/* -- from the driver's structs ------------------------------------------------------------------------------------- */

static int make_kernel(const struct cu_node_kernel *p, bool second, struct ww_work *w) {
    struct ww_launch k = {.function = p->function || !second ? (void *)p->function : (void *)p->kernel,
                          .shape = p->shape,
                          .params = p->params,
                          .extra = p->extra};
    w->kind = CU_NODE_KERNEL;
    return ww_kernel_make(w->device, &k, &w->of.kernel);
}

static int make_copy(const struct cu_copy3 *c, struct ww_work *w) {
    w->of.copy = *c;
    return ww_copy_check(w->device, c);
}

static int make_set(const struct cu_node_set *s, struct ww_work *w) {
    memcpy(&w->of.set, s, offsetof(struct cu_node_set, context));
    w->of.set.context = ww_context_handle(w->device);
    return ww_set_check(s);
}

static int make_event(CUevent event, struct ww_work *w) {
    struct ww_object *o = ww_object(event, WW_EVENT);
    int error = ww_ready();
    if (error || !o)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    w->device = o->device;
    w->of.event = event;
    return 0;
}

static int make_alloc(struct cu_node_alloc *p, struct ww_work *w) {
    int error = p && p->nbytes ? ww_need(&w->device) : CUDA_ERROR_INVALID_VALUE;
    if (error)
        return error;
    struct ww_device *d;
    if ((error = ww_props_check(&p->pool, &d)) || (d && (error = ww_open(d))))
        return error;
    w->device = d ? d : w->device;
    for (size_t i = 0; i < p->naccess; i++)
        if (p->access[i].location.kind == CU_LOCATION_DEVICE && p->access[i].location.id != ww_device_number(w->device))
            return ww_refused("graphs that allocate memory for another device");
    w->kind = CU_NODE_ALLOC;
    w->of.memory = ww_graph_memory_new(w->device, p->nbytes, !d || p->pool.type == CU_MEM_MANAGED, &error);
    if (!error)
        p->address = w->of.memory->address;
    return error;
}

/* With ww_graphs held: make the work of a FREE node. The memory's ALLOC node is in the same graph or in another one. */
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
            return CUDA_ERROR_INVALID_VALUE; /* freed twice */
    }
    if (!m)
        return CUDA_ERROR_INVALID_VALUE;
    w->kind = CU_NODE_FREE;
    w->of.memory = m;
    w->device = m->device;
    atomic_fetch_add(&m->refs, 1);
    return 0;
}

/* With ww_graphs held: make the work of a child graph node, which has a clone of the graph, as with the driver. */
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

/* Return the parameters in the driver's union in the form in which ww_node_make takes them. */
static void *params_of(struct cu_node_params *p, CUcontext *context) {
    *context = p->type == CU_NODE_COPY ? p->of.copy.context : p->type == CU_NODE_SET ? p->of.set.context : NULL;
    switch (p->type) {
    case CU_NODE_COPY:
        return &p->of.copy.copy;
    case CU_NODE_GRAPH:
        return p->of.graph;
    case CU_NODE_FREE:
        return (void *)(uintptr_t)p->of.memory;
    case CU_NODE_WAIT:
    case CU_NODE_RECORD:
        return p->of.event;
    default:
        return &p->of;
    }
}

/* Make the work of a node, unless it depends on the node's graph (make_in). kind, params: as for ww_node_make. */
static int make(int kind, void *params, CUcontext context, struct ww_work *w) {
    int error;
    w->kind = kind;
    switch (kind) {
    case WW_NODE_UNION: {
        int type = params ? ((struct cu_node_params *)params)->type : CU_NODE_EMPTY;
        if (type < 0 || type == CU_NODE_GRAPH || type == CU_NODE_ALLOC || type == CU_NODE_FREE || type == CU_NODE_EMPTY)
            return CUDA_ERROR_INVALID_VALUE;
        params = params_of(params, &context);
        return make(type, params, context, w);
    }
    case CU_NODE_KERNEL:
    case WW_NODE_KERNEL_V1:
    case CU_NODE_COPY:
    case CU_NODE_SET:
    case CU_NODE_HOST:
        if (!params)
            return CUDA_ERROR_INVALID_VALUE;
        if (kind == CU_NODE_KERNEL)
            context = ((struct cu_node_kernel *)params)->context;
        if ((error = ww_context_or_current(context, &w->device)))
            return error;
        if (kind == CU_NODE_COPY)
            return make_copy(params, w);
        if (kind == CU_NODE_SET)
            return make_set(params, w);
        if (kind != CU_NODE_HOST)
            return make_kernel(params, kind == CU_NODE_KERNEL, w);
        w->of.host = *(struct cu_node_host *)params;
        return w->of.host.run ? 0 : CUDA_ERROR_INVALID_VALUE;
    case CU_NODE_EMPTY:
        w->device = ww_current();
        return ww_ready();
    case CU_NODE_WAIT:
    case CU_NODE_RECORD:
        return make_event(params, w);
    case CU_NODE_ALLOC:
        return make_alloc(params, w);
    case CU_NODE_CONDITION:
        return CUDA_ERROR_INVALID_VALUE; /* such a node cannot be changed */
    default:
        return ww_refused("graph nodes for semaphores and operations on memory");
    }
}

/* With ww_graphs held: make the work of a node, of the kinds that depend on the node's graph. */
static int make_in(struct ww_graph *g, int kind, void *params, struct ww_work *w) {
    return kind == CU_NODE_GRAPH  ? make_child(g, params, w)
           : kind == CU_NODE_FREE ? make_free(g, (uintptr_t)params, w)
                                  : ww_condition_make(g, params, w);
}

/* -- nodes --------------------------------------------------------------------------------------------------------- */

static int add(void **made, void *graph, void *const *handles, const struct cu_edge *edges, size_t n, int kind,
               void *params, CUcontext context) {
    struct ww_work w = {.kind = CU_NODE_EMPTY};
    bool needs_graph = kind == CU_NODE_GRAPH || kind == CU_NODE_FREE || kind == CU_NODE_CONDITION;
    int error = needs_graph ? ww_ready() : make(kind, params, context, &w);
    if (error)
        return error;
    struct ww_node **deps = malloc((n + 1) * sizeof *deps), *node;
    WW_LOCK_GRAPHS();
    struct ww_graph *g = ww_graph(graph);
    error = !deps ? CUDA_ERROR_OUT_OF_MEMORY : !g || !made || (n && !handles) ? CUDA_ERROR_INVALID_VALUE : 0;
    for (size_t i = 0; i < n && !error; i++)
        error = (deps[i] = ww_node(handles[i])) ? 0 : CUDA_ERROR_INVALID_VALUE;
    if (!error && needs_graph)
        error = make_in(g, kind, params, &w);
    if (error)
        ww_work_drop(&w);
    else if (!(error = ww_node_add(g, deps, edges, n, &w, &node)))
        *made = node->object;
    if (!error && kind == CU_NODE_CONDITION)
        ((struct cu_node_condition *)params)->graphs = w.of.condition->handles;
    free(deps);
    return error;
}

int ww_node_make(void **made, void *graph, void *deps, size_t n, int kind, void *params, CUcontext context) {
    return add(made, graph, deps, NULL, n, kind, params, context);
}

CUresult cuGraphAddNode_v2(void **made, void *graph, void *deps, void *edges, size_t n, void *params) {
    struct cu_node_params *p = params;
    CUcontext context;
    int error = ww_ready();
    if (error || !p || p->type < 0)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    void *inside = params_of(p, &context);
    return add(made, graph, deps, edges, n, p->type, inside, context);
}

/* -- parameters of nodes ------------------------------------------------------------------------------------------- */

void ww_node_kernel(const struct ww_node *n, struct cu_node_kernel *to, bool second) {
    const struct ww_kernel_work *k = n->work.of.kernel;
    bool kernel = second && ww_object(k->launch.function, WW_KERNEL);
    to->function = kernel ? NULL : k->launch.function;
    to->shape = k->launch.shape;
    to->params = k->nparams ? k->launch.params : NULL;
    to->extra = NULL;
    if (second) {
        to->kernel = kernel ? k->launch.function : NULL;
        to->context = ww_context_handle(n->work.device);
    }
}

void ww_node_alloc(const struct ww_node *n, struct cu_node_alloc *to) {
    const struct ww_graph_memory *m = n->work.of.memory;
    *to = (struct cu_node_alloc){.pool = {.type = CU_MEM_PINNED}, .nbytes = m->nbytes, .address = m->address};
    to->pool.location = m->on_host ? (struct cu_mem_location){CU_LOCATION_HOST, 0}
                                   : (struct cu_mem_location){CU_LOCATION_DEVICE, ww_device_number(m->device)};
}

int ww_node_set(void *h, int kind, void *params, CUcontext context) {
    struct ww_work w = {.kind = CU_NODE_EMPTY};
    int error = make(kind, params, context, &w);
    if (error)
        return error;
    WW_LOCK_GRAPHS();
    struct ww_node *n = ww_node(h);
    if (n && n->work.kind == w.kind) {
        struct ww_work was = n->work;
        n->work = w;
        w = was;
    } else {
        error = CUDA_ERROR_INVALID_VALUE;
    }
    ww_work_drop(&w);
    return error;
}

int ww_exec_set(void *exec, void *h, int kind, void *params, CUcontext context) {
    struct ww_work w = {.kind = CU_NODE_EMPTY};
    int error = make(kind, params, context, &w);
    return error ? error : ww_exec_change(exec, h, &w);
}
