/* Graphs with conditional nodes. Kernels set the value of a conditional handle, which decides on the device how such a
 * graph continues. So the worker's driver must have the graph, too: its twin. Handles, and conditional nodes with their
 * body graphs, are created in the twin at once. The twin gets all other nodes when the graph is instantiated, in the
 * order of its plan; before that, they exist only in the program, as in graphs without a twin.
 */
#include "layer.h"
#include <stdlib.h>
#include <string.h>

int ww_twin_name(struct ww_twin *t, struct ww_device *d) {
    int error = ww_id_take(&d->graphs, &t->id);
    if (!error) {
        t->device = d;
        t->life = atomic_load(&d->life);
    }
    return error;
}

/* -- handles, nodes ------------------------------------------------------------------------------------------------ */

CUresult cuGraphConditionalHandleCreate(uint64_t *handle, void *graph, CUcontext context, unsigned value,
                                        unsigned flags) {
    struct ww_device *d = NULL;
    int error = ww_ready();
    if (error || !handle || flags > CU_CONDITION_ASSIGN)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    if (context ? !(d = ww_context(context)) : (error = ww_need(&d)) != 0)
        return error ? error : CUDA_ERROR_INVALID_CONTEXT;
    if ((error = ww_open(d)))
        return error;
    WW_LOCK_GRAPHS();
    struct ww_graph *g = ww_graph(graph);
    error = !g || (g->twin.device && g->twin.device != d) ? CUDA_ERROR_INVALID_VALUE : 0;
    if (!error && !g->twin.device)
        error = g->within && g->within->work.kind == CU_NODE_CONDITION ? CUDA_ERROR_INVALID_VALUE
                                                                       : ww_twin_name(&g->twin, d);
    if (!error && !(error = ww_twin_code(&g->twin)))
        error = ww_call_graph_handle(d, WW_OP_GRAPH_HANDLE, 0, g->twin.id, value, flags, handle, sizeof *handle);
    return error;
}

/* Create the body graphs of a conditional node, each with an id for its twin. */
static int make_graphs(struct ww_condition *c, struct ww_device *d) {
    c->graphs = calloc(c->size, sizeof *c->graphs);
    c->handles = calloc(c->size, sizeof *c->handles);
    int error = c->graphs && c->handles ? 0 : CUDA_ERROR_OUT_OF_MEMORY;
    for (uint32_t i = 0; i < c->size && !error; i++) {
        if (!(c->graphs[i] = ww_graph_new()))
            return CUDA_ERROR_OUT_OF_MEMORY;
        error = ww_twin_name(&c->graphs[i]->twin, d);
        c->handles[i] = c->graphs[i]->object;
    }
    return error;
}

/* Free the ids of the body graphs' twins without a message, because the worker does not have these twins. */
static void never_made(struct ww_condition *c) {
    for (uint32_t i = 0; c->graphs && i < c->size; i++)
        if (c->graphs[i])
            ww_twin_drop(&c->graphs[i]->twin, 0);
}

static int send_node(const struct ww_graph *g, const struct ww_condition *c) {
    struct {
        struct ww_args_graph_condition args;
        uint32_t ids[WW_BODIES];
    } m = {.args = {c->handle, g->twin.id, c->node, (uint32_t)c->type, c->size}};
    for (uint32_t i = 0; i < c->size; i++)
        m.ids[i] = c->graphs[i]->twin.id;
    return ww_call(g->twin.device, WW_OP_GRAPH_CONDITION, 0, &m, sizeof m.args + c->size * sizeof *m.ids, NULL, 0);
}

int ww_condition_make(struct ww_graph *g, const struct cu_node_condition *p, struct ww_work *w) {
    int error = p->size && p->size <= WW_BODIES && p->type >= 0 && p->type <= 2 ? ww_twin_code(&g->twin)
                                                                                : CUDA_ERROR_INVALID_VALUE;
    if (!error && p->context && ww_context(p->context) != g->twin.device)
        error = CUDA_ERROR_INVALID_VALUE;
    struct ww_condition *c = error ? NULL : calloc(1, sizeof *c);
    if (!c)
        return error ? error : CUDA_ERROR_OUT_OF_MEMORY;
    *c = (struct ww_condition){.handle = p->handle, .type = p->type, .size = p->size, .node = g->next_id};
    if ((error = make_graphs(c, g->twin.device)) || (error = send_node(g, c))) {
        never_made(c);
        ww_condition_drop(c);
        return error;
    }
    c->within = g->twin;
    w->kind = CU_NODE_CONDITION;
    w->device = g->twin.device;
    w->of.condition = c;
    return 0;
}
