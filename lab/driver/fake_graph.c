/* Graphs of the fake driver. It has only what a worker uses: captured operations, empty nodes and conditional nodes.
 *
 * A launch is one operation of its stream. Its nodes run one at a time. If several nodes are ready, launches alternate
 * between the oldest and the newest one, so that tests notice a missing edge.
 */
#include "fake.h"

#include <stdlib.h>
#include <string.h>

#define HANDLES 4096

struct fake_node {
    struct fake_object object;
    struct fake_graph *graph;
    struct fake_op *op; /* NULL: an empty or conditional node */
    struct cu_node_condition *condition;
    struct fake_node **after;
    size_t nafter;
    int done; /* used while a launch runs */
};

struct fake_graph {
    struct fake_object object;
    struct fake_node **nodes;
    size_t n;
};

struct fake_exec {
    struct fake_object object;
    struct fake_graph *graph; /* a copy, which later changes do not affect */
};

static struct handle {
    struct fake_graph *graph;
    uint32_t value, otherwise, flags;
    int used; /* by a conditional node */
} handles[HANDLES];
static uint64_t nhandles;
static unsigned launches;

static struct fake_node *add(struct fake_graph *graph, struct fake_node *const *after, size_t n) {
    struct fake_node *node = fake_make(FAKE_NODE, sizeof *node, graph->object.context);
    node->graph = graph;
    node->after = calloc(n + 1, sizeof *node->after);
    graph->nodes = realloc(graph->nodes, (graph->n + 1) * sizeof *graph->nodes);
    if (!node->after || !graph->nodes)
        abort();
    if (n)
        memcpy(node->after, after, n * sizeof *after);
    node->nafter = n;
    return graph->nodes[graph->n++] = node;
}

static void drop_graph(struct fake_graph *graph);

static void drop_node(struct fake_node *node) {
    if (node->op)
        fake_unref(node->op);
    for (uint32_t i = 0; node->condition && i < node->condition->size; i++)
        drop_graph(node->condition->graphs[i]);
    if (node->condition)
        free(node->condition->graphs);
    free(node->condition);
    free(node->after);
    fake_drop(node);
}

static void drop_graph(struct fake_graph *graph) {
    for (size_t i = 0; i < graph->n; i++)
        drop_node(graph->nodes[i]);
    free(graph->nodes);
    fake_drop(graph);
}

CUresult cuGraphCreate(void **graph, uint32_t flags) {
    CUcontext context;
    int error = enter(&context);
    if (error)
        return error;
    if (!graph || flags)
        return leave(CUDA_ERROR_INVALID_VALUE);
    *graph = fake_make(FAKE_GRAPH, sizeof(struct fake_graph), context);
    return leave(CUDA_SUCCESS);
}

CUresult cuGraphDestroy(void *graph) {
    CUcontext context;
    int error = enter(&context);
    if (error)
        return error;
    if (!fake_valid(graph, FAKE_GRAPH))
        return leave(CUDA_ERROR_INVALID_VALUE);
    drop_graph(graph);
    return leave(CUDA_SUCCESS);
}

CUresult cuGraphGetNodes(void *handle, void *to, void *count) {
    CUcontext context;
    size_t *n = count;
    int error = enter(&context);
    if (error)
        return error;
    if (!fake_valid(handle, FAKE_GRAPH) || !n)
        return leave(CUDA_ERROR_INVALID_VALUE);
    struct fake_graph *graph = handle;
    if (to)
        memcpy(to, graph->nodes, (*n < graph->n ? *n : graph->n) * sizeof *graph->nodes);
    *n = to && *n < graph->n ? *n : graph->n;
    return leave(CUDA_SUCCESS);
}

static void cut(struct fake_node *from, const struct fake_node *node) {
    size_t kept = 0;
    for (size_t i = 0; i < from->nafter; i++)
        if (from->after[i] != node)
            from->after[kept++] = from->after[i];
    from->nafter = kept;
}

CUresult cuGraphDestroyNode(void *handle) {
    CUcontext context;
    int error = enter(&context);
    if (error)
        return error;
    if (!fake_valid(handle, FAKE_NODE))
        return leave(CUDA_ERROR_INVALID_VALUE);
    struct fake_node *node = handle;
    struct fake_graph *graph = node->graph;
    size_t kept = 0;
    for (size_t i = 0; i < graph->n; i++) {
        if (graph->nodes[i] == node)
            continue;
        cut(graph->nodes[i], node);
        graph->nodes[kept++] = graph->nodes[i];
    }
    graph->n = kept;
    drop_node(node);
    return leave(CUDA_SUCCESS);
}

CUresult cuGraphAddEmptyNode(void **made, void *graph, void *after, size_t n) {
    CUcontext context;
    int error = enter(&context);
    if (error)
        return error;
    if (!made || !fake_valid(graph, FAKE_GRAPH))
        return leave(CUDA_ERROR_INVALID_VALUE);
    *made = add(graph, after, n);
    return leave(CUDA_SUCCESS);
}

CUresult cuGraphAddDependencies(void *graph, void *from, void *to, size_t n) {
    CUcontext context;
    int error = enter(&context);
    if (error)
        return error;
    if (!fake_valid(graph, FAKE_GRAPH))
        return leave(CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < n; i++) {
        struct fake_node *node = ((void **)to)[i], *before = ((void **)from)[i];
        if (!fake_valid(node, FAKE_NODE) || !fake_valid(before, FAKE_NODE) || node->graph != graph ||
            before->graph != graph)
            return leave(CUDA_ERROR_INVALID_VALUE);
        for (size_t k = 0; k < node->nafter; k++)
            if (node->after[k] == before)
                return leave(CUDA_ERROR_INVALID_VALUE); /* the edge exists */
        node->after = realloc(node->after, (node->nafter + 1) * sizeof *node->after);
        if (!node->after)
            abort();
        node->after[node->nafter++] = before;
    }
    return leave(CUDA_SUCCESS);
}

/* -- conditional nodes --------------------------------------------------------------------------------------------- */

CUresult cuGraphConditionalHandleCreate(uint64_t *handle, void *graph, CUcontext other, uint32_t value,
                                        uint32_t flags) {
    CUcontext context;
    int error = enter(&context);
    if (error)
        return error;
    if (!handle || !fake_valid(graph, FAKE_GRAPH) || (other && other != context) || flags > CU_CONDITION_ASSIGN)
        return leave(CUDA_ERROR_INVALID_VALUE);
    if (nhandles == HANDLES)
        return leave(CUDA_ERROR_OUT_OF_MEMORY);
    handles[nhandles] = (struct handle){.graph = graph, .value = value, .otherwise = value, .flags = flags};
    *handle = 0xc0de0000u + nhandles++;
    return leave(CUDA_SUCCESS);
}

static struct handle *handle_of(uint64_t handle) {
    return handle - 0xc0de0000u < nhandles ? handles + (handle - 0xc0de0000u) : NULL;
}

int fake_set_condition(uint64_t handle, uint32_t value) {
    struct handle *h = handle_of(handle);
    if (!h)
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    h->value = value;
    return CUDA_SUCCESS;
}

CUresult cuGraphAddNode(void **made, void *graph, void *after, size_t n, void *params) {
    CUcontext context;
    struct cu_node_params *p = params;
    int error = enter(&context);
    if (error)
        return error;
    struct cu_node_condition *c = p ? &p->of.condition : NULL;
    struct handle *h = c ? handle_of(c->handle) : NULL;
    if (!made || !fake_valid(graph, FAKE_GRAPH) || !h || p->type != CU_NODE_CONDITION || h->used || c->type < 0 ||
        c->type > 2 || !c->size || (c->type < 2 && c->size > 2 - (uint32_t)c->type))
        return leave(CUDA_ERROR_INVALID_VALUE);
    struct fake_node *node = *made = add(graph, after, n);
    h->used = 1;
    node->condition = malloc(sizeof *c);
    c->graphs = calloc(c->size, sizeof *c->graphs);
    if (!node->condition || !c->graphs)
        abort();
    for (uint32_t i = 0; i < c->size; i++)
        c->graphs[i] = fake_make(FAKE_GRAPH, sizeof(struct fake_graph), context);
    *node->condition = *c;
    return leave(CUDA_SUCCESS);
}

/* -- recording ----------------------------------------------------------------------------------------------------- */

static void record(CUstream stream, struct fake_op *op) {
    struct fake_node *node = add(stream->graph, &stream->recorded, stream->recorded ? 1 : 0);
    node->op = op;
    stream->recorded = node;
}

static __thread int32_t thread_mode;
static int global_captures;

CUresult cuThreadExchangeStreamCaptureMode(int32_t *mode) {
    int32_t before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

int fake_forbids_unsafe_calls(void) { return global_captures && thread_mode != CU_CAPTURE_RELAXED; }

CUresult cuStreamBeginCaptureToGraph(CUstream handle, void *graph, void *after, void *edges, size_t n, int32_t mode) {
    CUcontext context;
    CUstream stream;
    int error = enter(&context);
    if (error)
        return error;
    if ((error = fake_stream(handle, context, &stream)))
        return leave(error);
    if (!fake_valid(graph, FAKE_GRAPH) || stream->graph || edges || n > 1)
        return leave(CUDA_ERROR_INVALID_VALUE);
    stream->graph = graph;
    stream->record = record;
    stream->captures_globally = mode == CU_CAPTURE_GLOBAL;
    global_captures += stream->captures_globally;
    stream->recorded = n ? *(struct fake_node **)after : NULL;
    return leave(CUDA_SUCCESS);
}

CUresult cuStreamGetCaptureInfo_v2(CUstream handle, int32_t *status, uint64_t *id, void **graph, void **nodes,
                                   size_t *n) {
    CUcontext context;
    CUstream stream;
    int error = enter(&context);
    if (error)
        return error;
    if ((error = fake_stream(handle, context, &stream)))
        return leave(error);
    *status = stream->graph ? 1 : 0;
    *id = stream->id;
    *graph = stream->graph;
    *nodes = &stream->recorded;
    *n = stream->recorded ? 1 : 0;
    return leave(CUDA_SUCCESS);
}

CUresult cuStreamEndCapture(CUstream handle, void **graph) {
    CUcontext context;
    CUstream stream;
    int error = enter(&context);
    if (error)
        return error;
    if ((error = fake_stream(handle, context, &stream)))
        return leave(error);
    if (!stream->graph)
        return leave(CUDA_ERROR_ILLEGAL_STATE);
    *graph = stream->graph;
    global_captures -= stream->captures_globally;
    stream->graph = NULL;
    stream->record = NULL;
    return leave(CUDA_SUCCESS);
}

/* -- executable graphs --------------------------------------------------------------------------------------------- */

static struct fake_graph *copy(const struct fake_graph *from) {
    struct fake_graph *graph = fake_make(FAKE_GRAPH, sizeof *graph, from->object.context);
    for (size_t i = 0; i < from->n; i++) {
        struct fake_node *node = add(graph, NULL, 0), *old = from->nodes[i];
        if ((node->op = old->op))
            node->op->refs++;
        if (old->condition) {
            node->condition = malloc(sizeof *node->condition);
            if (!node->condition)
                abort();
            *node->condition = *old->condition;
            node->condition->graphs = calloc(old->condition->size, sizeof(void *));
            for (uint32_t k = 0; k < old->condition->size; k++)
                node->condition->graphs[k] = copy(old->condition->graphs[k]);
        }
    }
    for (size_t i = 0; i < from->n; i++) {
        struct fake_node *node = graph->nodes[i], *old = from->nodes[i];
        free(node->after);
        node->after = calloc(old->nafter + 1, sizeof *node->after);
        if (!node->after)
            abort();
        for (size_t k = 0; k < old->nafter; k++)
            for (size_t j = 0; j < from->n; j++)
                if (from->nodes[j] == old->after[k])
                    node->after[node->nafter++] = graph->nodes[j];
    }
    return graph;
}

static int unused(const struct fake_graph *graph) {
    for (uint64_t i = 0; i < nhandles; i++)
        if (handles[i].graph == graph && !handles[i].used)
            return 1;
    return 0;
}

CUresult cuGraphInstantiateWithFlags(void **made, void *graph, uint64_t flags) {
    CUcontext context;
    int error = enter(&context);
    if (error)
        return error;
    if (!made || flags || !fake_valid(graph, FAKE_GRAPH) || unused(graph))
        return leave(CUDA_ERROR_INVALID_VALUE);
    struct fake_exec *exec = *made = fake_make(FAKE_EXEC, sizeof *exec, context);
    exec->graph = copy(graph);
    return leave(CUDA_SUCCESS);
}

/* Frees no memory, because launches in streams may use it. */
CUresult cuGraphExecDestroy(void *exec) {
    CUcontext context;
    int error = enter(&context);
    if (error)
        return error;
    if (!fake_valid(exec, FAKE_EXEC))
        return leave(CUDA_ERROR_INVALID_VALUE);
    fake_drop(exec);
    return leave(CUDA_SUCCESS);
}

static int run_graph(const struct fake_graph *graph, const struct fake_op *launch);

static int run_condition(const struct cu_node_condition *c, const struct fake_op *launch) {
    const struct handle *h = handle_of(c->handle);
    int error = 0;
    if (c->type == 2)
        return h->value < c->size ? run_graph(c->graphs[h->value], launch) : 0;
    if (c->type == 0)
        return h->value ? run_graph(c->graphs[0], launch) : c->size == 2 ? run_graph(c->graphs[1], launch) : 0;
    while (h->value && !error && __atomic_load_n(&launch->context->life, __ATOMIC_RELAXED) == launch->life)
        error = run_graph(c->graphs[0], launch);
    return error;
}

static struct fake_node *next(const struct fake_graph *graph) {
    for (size_t i = 0; i < graph->n; i++) {
        struct fake_node *node = graph->nodes[launches & 1 ? i : graph->n - 1 - i];
        int ready = !node->done;
        for (size_t k = 0; k < node->nafter && ready; k++)
            ready = node->after[k]->done;
        if (ready)
            return node;
    }
    return NULL;
}

static int run_graph(const struct fake_graph *graph, const struct fake_op *launch) {
    struct fake_node *node;
    int error = 0;
    for (size_t i = 0; i < graph->n; i++)
        graph->nodes[i]->done = 0;
    while (!error && (node = next(graph))) {
        node->done = 1;
        if (node->condition)
            error = run_condition(node->condition, launch);
        else if (node->op && node->op->run)
            error = node->op->run(node->op);
    }
    return error;
}

static void assign(const struct fake_graph *graph) {
    for (size_t i = 0; i < graph->n; i++) {
        const struct cu_node_condition *c = graph->nodes[i]->condition;
        struct handle *h = c ? handle_of(c->handle) : NULL;
        if (h && h->flags & CU_CONDITION_ASSIGN)
            h->value = h->otherwise;
        for (uint32_t k = 0; c && k < c->size; k++)
            assign(c->graphs[k]);
    }
}

static int run_launch(struct fake_op *op) {
    const struct fake_graph *graph = *(struct fake_graph **)op->data;
    launches++;
    assign(graph);
    return run_graph(graph, op);
}

CUresult cuGraphLaunch(void *exec, CUstream handle) {
    CUcontext context;
    CUstream stream;
    int error = enter(&context);
    if (error)
        return error;
    if ((error = fake_stream(handle, context, &stream)))
        return leave(error);
    if (!fake_valid(exec, FAKE_EXEC))
        return leave(CUDA_ERROR_INVALID_VALUE);
    struct fake_op *op = fake_op(context, run_launch);
    op->data = malloc(sizeof(struct fake_graph *));
    if (!op->data)
        abort();
    *(struct fake_graph **)op->data = ((struct fake_exec *)exec)->graph;
    fake_enqueue(stream, op, 0, "cuGraphLaunch");
    return leave(context->sticky);
}
