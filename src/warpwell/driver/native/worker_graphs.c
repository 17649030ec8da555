/* Graphs with conditional nodes. The layer keeps all other graphs. A conditional node is decided on the device, so the
 * driver must have its graph: the handles, the conditional nodes, and all other nodes. The client records the other
 * nodes each time it makes an executable graph.
 *
 * A recording puts all nodes in one sequence, as a launch of any other graph does: recorded nodes, a conditional node,
 * the nodes that are recorded next, and so on. Conditional nodes stay in the graph between recordings, because their
 * handles and bodies belong to them; all other nodes are removed first.
 */
#include "worker.h"

#include <stdlib.h>
#include <string.h>

#define RELAXED 2 /* capture mode that does not restrict other calls of this thread */

struct node {
    void *native;
    uint32_t id;
};

struct graph {
    void *native;
    struct graph *above; /* of a body: the graph that contains its conditional node, and is destroyed with it */
    uint32_t node;       /* .. and the number of that node */
    struct node *nodes;  /* only the conditional nodes */
    uint32_t n;
    size_t room;
};

struct ww_exec {
    void *native;
    uint32_t refs; /* 1 for its id, 1 for each launch that was read and is not issued yet */
};

static struct graph *graphs[WW_GRAPHS];
static uint32_t highest; /* highest id that a graph has had */
static struct ww_exec *execs[WW_GRAPHS];
static int making; /* the heavy thread instantiates a graph: calls that would change graphs are refused */
static struct {
    struct graph *graph;
    struct ww_stream stream;
    void *last;            /* node that the next one depends on */
    int open, conditional; /* the stream is capturing; `last` is a conditional node */
    CUresult code;
} recording;

static struct graph *find(uint32_t id) { return id < WW_GRAPHS && !making ? graphs[id] : NULL; }

static struct node *find_node(struct graph *g, uint32_t id) {
    for (uint32_t i = 0; i < g->n; i++)
        if (g->nodes[i].id == id)
            return g->nodes + i;
    return NULL;
}

static void fail(CUresult code) {
    ww_living(code);
    if (!recording.code)
        recording.code = code;
}

/* -- handles and conditional nodes --------------------------------------------------------------------------------- */

static void add_graph(uint32_t id, struct graph g) {
    graphs[id] = ww_memory(sizeof g);
    *graphs[id] = g;
    if (id > highest)
        highest = id;
}

CUresult ww_graph_handle(const struct ww_call *call, const struct ww_args_graph_handle *args) {
    uint64_t handle = 0;
    void *made = NULL;
    CUresult code = CUDA_SUCCESS;
    if (!args->graph || args->graph >= WW_GRAPHS || making)
        return CUDA_ERROR_INVALID_VALUE;
    if (!native.cuGraphConditionalHandleCreate || !native.cuStreamBeginCaptureToGraph)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (!graphs[args->graph] && !(code = native.cuGraphCreate(&made, 0)))
        add_graph(args->graph, (struct graph){.native = made});
    if (!code)
        code = native.cuGraphConditionalHandleCreate(&handle, graphs[args->graph]->native, ww.context, args->value,
                                                     args->flags);
    ww_answer(call->entry.slot, call->entry.seq, code, &handle, code ? 0 : sizeof handle);
    return WW_LATER;
}

static CUresult add_condition(const struct ww_args_graph_condition *args, struct graph *g) {
    const uint32_t *ids = (const void *)(args + 1);
    struct cu_node_params p = {.type = CU_NODE_CONDITION};
    void *made = NULL;
    for (uint32_t i = 0; i < args->size; i++) {
        if (!ids[i] || ids[i] >= WW_GRAPHS || graphs[ids[i]])
            return CUDA_ERROR_INVALID_VALUE;
        for (uint32_t k = 0; k < i; k++)
            if (ids[k] == ids[i])
                return CUDA_ERROR_INVALID_VALUE;
    }
    p.of.condition = (struct cu_node_condition){
        .handle = args->handle, .type = (int32_t)args->type, .size = args->size, .context = ww.context};
    CUresult code = native.cuGraphAddNode(&made, g->native, NULL, 0, &p);
    if (code)
        return code;
    g->nodes = ww_grown(g->nodes, g->n, &g->room, sizeof *g->nodes);
    g->nodes[g->n++] = (struct node){made, args->node};
    for (uint32_t i = 0; i < args->size; i++)
        add_graph(ids[i], (struct graph){.native = p.of.condition.graphs[i], .above = g, .node = args->node});
    return CUDA_SUCCESS;
}

CUresult ww_graph_condition(const struct ww_call *call, const struct ww_args_graph_condition *args) {
    struct graph *g = find(args->graph);
    return args->size && args->size <= WW_BODIES && args->size * sizeof(uint32_t) <= call->nargs - sizeof *args && g &&
                   !find_node(g, args->node)
               ? add_condition(args, g)
               : CUDA_ERROR_INVALID_VALUE;
}

/* -- recording ----------------------------------------------------------------------------------------------------- */

/* End the capture of the stream. The next node depends on the last node that was captured. */
static void pause_recording(void) {
    int status = 0;
    uint64_t id;
    void *graph = NULL, *nodes = NULL;
    size_t n = 0;
    if (!recording.open)
        return;
    recording.open = 0;
    CUresult code = native.cuStreamGetCaptureInfo_v2(recording.stream.native, &status, &id, &graph, &nodes, &n);
    if (!code && n == 1)
        recording.last = *(void **)nodes;
    else if (!code && n)
        code = CUDA_ERROR_UNKNOWN; /* one stream captures a sequence: one node is last */
    fail(code);
    fail(native.cuStreamEndCapture(recording.stream.native, &graph));
    recording.conditional = 0;
}

/* Destroy all nodes but the conditional ones, and so all edges. */
static CUresult clear(struct graph *g) {
    size_t n = 0;
    CUresult code = native.cuGraphGetNodes(g->native, NULL, &n);
    void **all = ww_memory((n + 1) * sizeof *all);
    if (!code && n)
        code = native.cuGraphGetNodes(g->native, all, &n);
    for (size_t i = 0; i < n && !code; i++) {
        int stays = 0;
        for (uint32_t k = 0; k < g->n; k++)
            stays |= g->nodes[k].native == all[i];
        if (!stays)
            code = native.cuGraphDestroyNode(all[i]);
    }
    free(all);
    return code;
}

CUresult ww_graph_begin(const struct ww_args_id *args) {
    struct graph *g = find(args->id);
    CUresult code = g && !recording.graph ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
    if (!code && !recording.stream.native)
        code = native.cuStreamCreateWithPriority(&recording.stream.native, CU_STREAM_NON_BLOCKING, 0);
    if (code || (code = clear(g)))
        return code;
    recording.graph = g;
    recording.last = NULL;
    recording.open = recording.conditional = 0;
    recording.code = CUDA_SUCCESS;
    return CUDA_SUCCESS;
}

/* Put an empty node between two conditional nodes: an edge between them would survive clear(), which removes edges only
 * with their nodes. */
static CUresult apart(void) {
    void *made = NULL;
    CUresult code = native.cuGraphAddEmptyNode(&made, recording.graph->native, &recording.last, 1);
    if (!code)
        recording.last = made;
    return code;
}

static CUresult record(struct ww_call *call) {
    const struct ww_operation *o = call->operation;
    if (!o->is_node)
        return CUDA_ERROR_NOT_SUPPORTED;
    CUresult code = o->check ? o->check(call) : CUDA_SUCCESS;
    if (code || (code = call->is_between_hosts ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS))
        return code;
    if (!recording.open) {
        size_t n = recording.last ? 1 : 0;
        code = native.cuStreamBeginCaptureToGraph(recording.stream.native, recording.graph->native,
                                                  n ? &recording.last : NULL, NULL, n, RELAXED);
        if (code)
            return code;
        recording.open = 1;
    }
    return o->issue(&recording.stream, call);
}

CUresult ww_graph_record(struct ww_call *call) {
    if (!recording.graph)
        return CUDA_ERROR_INVALID_HANDLE;
    CUresult code = record(call);
    fail(code);
    if (call->entry.place && ww_place_way(call->entry.op) != WW_NO_BYTES)
        ww_place_done(call->entry.place, call->entry.use, code);
    ww_answer(call->entry.slot, call->entry.seq, code, NULL, 0); /* without a slot: GRAPH_END returns the error */
    return WW_LATER;
}

CUresult ww_graph_node(const struct ww_call *call, const struct ww_args_id *args) {
    struct node *n = recording.graph ? find_node(recording.graph, args->id) : NULL;
    CUresult code = n ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
    pause_recording();
    if (!code && recording.conditional)
        code = apart();
    if (!code && recording.last)
        code = native.cuGraphAddDependencies(recording.graph->native, &recording.last, &n->native, 1);
    if (!code) {
        recording.last = n->native;
        recording.conditional = 1;
    }
    fail(code);
    ww_answer(call->entry.slot, call->entry.seq, code, NULL, 0);
    return WW_LATER;
}

CUresult ww_graph_end(const struct ww_call *call) {
    (void)call;
    pause_recording();
    CUresult code = recording.graph ? recording.code : CUDA_ERROR_INVALID_HANDLE;
    recording.graph = NULL;
    return code;
}

/* -- executable graphs --------------------------------------------------------------------------------------------- */

static void make(struct ww_job *job) {
    void *made = NULL;
    job->result = native.cuGraphInstantiateWithFlags(&made, job->with, 0);
    job->with = made;
}

static void made(struct ww_job *job) {
    making = 0;
    if (!job->result) {
        struct ww_exec *x = execs[job->a] = ww_memory(sizeof *x);
        *x = (struct ww_exec){.native = job->with, .refs = 1};
    }
    ww_answer(job->slot, job->seq, job->result, NULL, 0);
}

CUresult ww_graph_make(const struct ww_call *call, const struct ww_args_graph *args) {
    struct graph *g = find(args->graph);
    if (!g || recording.graph || !args->other || args->other >= WW_GRAPHS || execs[args->other])
        return CUDA_ERROR_INVALID_HANDLE;
    making = 1;
    return ww_heavy_for(call, (struct ww_job){.work = make, .done = made, .with = g->native, .a = args->other});
}

static void drop_exec(struct ww_exec *x) {
    if (--x->refs)
        return;
    native.cuGraphExecDestroy(x->native); /* its launches continue on the device */
    free(x);
}

CUresult ww_exec_drop(const struct ww_args_id *args) {
    struct ww_exec *x = args->id < WW_GRAPHS ? execs[args->id] : NULL;
    if (!x)
        return CUDA_ERROR_INVALID_HANDLE;
    execs[args->id] = NULL;
    drop_exec(x);
    return CUDA_SUCCESS;
}

CUresult ww_graph_launch_check(struct ww_call *call, const struct ww_args_id *args) {
    struct ww_exec *x = args->id < WW_GRAPHS ? execs[args->id] : NULL;
    if (!x)
        return CUDA_ERROR_INVALID_HANDLE;
    x->refs++;
    call->exec = x;
    return CUDA_SUCCESS;
}

CUresult ww_graph_launch_issue(struct ww_stream *s, struct ww_call *call) {
    CUresult code = native.cuGraphLaunch(call->exec->native, s->native);
    drop_exec(call->exec);
    call->exec = NULL;
    return code;
}

/* -- ends ---------------------------------------------------------------------------------------------------------- */

static void forget(uint32_t id);

/* Forget the bodies of conditional node `node` of a graph, or of all its conditional nodes with `all`. */
static void forget_bodies(const struct graph *g, int all, uint32_t node) {
    for (uint32_t id = 1; id <= highest; id++)
        if (graphs[id] && graphs[id]->above == g && (all || graphs[id]->node == node))
            forget(id);
}

static void forget(uint32_t id) {
    struct graph *g = graphs[id];
    graphs[id] = NULL;
    forget_bodies(g, 1, 0);
    free(g->nodes);
    free(g);
}

static void destroy(struct ww_job *job) {
    job->result = job->a ? native.cuGraphDestroyNode(job->with) : native.cuGraphDestroy(job->with);
}

static void destroyed(struct ww_job *job) { ww_result(job->call, job->result); }

CUresult ww_graph_drop(const struct ww_call *call, const struct ww_args_graph *args) {
    struct graph *g = args->graph < WW_GRAPHS ? graphs[args->graph] : NULL;
    struct node *n = g && args->other ? find_node(g, args->other - 1) : NULL;
    if (!g || (args->other && !n)) /* a graph whose first handle was refused does not exist */
        return g ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
    if (recording.graph) { /* only a client that breaks the protocol drops a graph while it records */
        pause_recording();
        recording.graph = NULL;
    }
    void *ends = n ? n->native : g->above ? NULL : g->native;
    struct ww_job job = {.work = destroy, .done = destroyed, .with = ends, .a = args->other};
    if (n) {
        forget_bodies(g, 0, n->id);
        *n = g->nodes[--g->n];
    } else {
        forget(args->graph);
    }
    if (!job.with)
        return CUDA_SUCCESS;
    if (making) { /* queue it behind the instantiation, in the heavy thread */
        job.call = ww_copy_call(call);
        ww_heavy(job);
        return WW_LATER;
    }
    destroy(&job);
    return job.result;
}
