/* Graphs: nodes, edges, user objects. They exist only in the program's process; layer_exec.c posts the work of their
 * nodes. Only graphs with conditional nodes have twins in the worker's driver (layer_condition.c).
 *
 * One lock, ww_graphs, protects all graphs. Destructors of user objects run after it is unlocked, and must not call the
 * driver.
 */
#include "layer.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct ww_graph *ww_graph(const void *h) { return ww_object_more(h, WW_GRAPH); }

struct ww_node *ww_node(const void *h) { return ww_object_more(h, WW_NODE); }

/* -- user objects -------------------------------------------------------------------------------------------------- */

struct ww_user *ww_user(const void *h) { return ww_object_more(h, WW_USER); }

int ww_body_cuUserObjectCreate(void **object, void *data, void *destroy, unsigned count) {
    struct ww_user *u = calloc(1, sizeof *u);
    if (!u || !(u->object = ww_object_new(WW_USER, NULL))) {
        free(u);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    u->refs = count;
    u->data = data;
    *(void **)&u->run = destroy;
    u->object->more = u;
    *object = u->object;
    return 0;
}

static struct ww_user_ref *ref_of(struct ww_graph *g, const struct ww_user *u) {
    for (size_t i = 0; i < g->nusers; i++)
        if (g->users[i].user == u)
            return &g->users[i];
    return NULL;
}

static int hold(struct ww_graph *g, struct ww_user *u, uint32_t count) {
    struct ww_user_ref *r = ref_of(g, u);
    if (!r) {
        if (!ww_grow(&g->users, g->nusers, sizeof *g->users))
            return CUDA_ERROR_OUT_OF_MEMORY;
        r = &g->users[g->nusers++];
        *r = (struct ww_user_ref){u, 0};
    }
    r->count += count;
    return 0;
}

int ww_body_cuGraphRetainUserObject(struct ww_graph *g, struct ww_user *u, uint32_t count, uint32_t moves) {
    int error = hold(g, u, count);
    if (!error && !moves)
        ww_user_retain(u, count);
    return error;
}

int ww_body_cuGraphReleaseUserObject(struct ww_graph *g, struct ww_user *u, uint32_t count) {
    struct ww_user_ref *r = ref_of(g, u);
    if (!r || !count || count > r->count)
        return CUDA_ERROR_INVALID_VALUE;
    r->count -= count;
    if (!r->count)
        *r = g->users[--g->nusers];
    ww_user_release(u, count);
    return 0;
}

/* -- nodes --------------------------------------------------------------------------------------------------------- */

struct ww_graph *ww_graph_new(void) {
    struct ww_graph *g = calloc(1, sizeof *g);
    if (!g || !(g->object = ww_object_new(WW_GRAPH, NULL))) {
        free(g);
        return NULL;
    }
    g->serial = g->object->serial;
    g->object->more = g;
    return g;
}

/* Append a node without edges to a graph. */
static struct ww_node *append(struct ww_graph *g) {
    struct ww_node *n = calloc(1, sizeof *n);
    if (!n || !ww_grow(&g->nodes, g->n, sizeof *g->nodes) || !(n->object = ww_object_new(WW_NODE, NULL))) {
        free(n);
        return NULL;
    }
    n->graph = g;
    n->id = g->next_id++;
    n->serial = n->object->serial;
    n->object->more = n;
    g->nodes[g->n++] = n;
    return n;
}

static struct ww_edge *edge_of(const struct ww_node *from, const struct ww_node *to) {
    for (size_t i = 0; i < to->nedges; i++)
        if (to->edges[i].from == from)
            return &to->edges[i];
    return NULL;
}

static int connect(struct ww_node *from, struct ww_node *to, const struct cu_edge *data) {
    static const struct cu_edge none;
    if (!ww_grow(&to->edges, to->nedges, sizeof *to->edges))
        return CUDA_ERROR_OUT_OF_MEMORY;
    to->edges[to->nedges++] = (struct ww_edge){from, data ? *data : none};
    return 0;
}

static void disconnect(const struct ww_node *from, struct ww_node *to) {
    struct ww_edge *e = edge_of(from, to);
    if (e) {
        size_t i = (size_t)(e - to->edges);
        memmove(e, e + 1, (--to->nedges - i) * sizeof *e);
    }
}

void ww_node_remove(struct ww_node *n) {
    struct ww_graph *g = n->graph;
    size_t at = 0;
    for (size_t i = 0; i < g->n; i++) {
        disconnect(n, g->nodes[i]);
        if (g->nodes[i] == n)
            at = i;
    }
    memmove(g->nodes + at, g->nodes + at + 1, (--g->n - at) * sizeof *g->nodes);
    ww_work_drop(&n->work);
    ww_object_drop(n->object, WW_NODE, NULL);
    free(n->edges);
    free(n);
}

int ww_node_add(struct ww_graph *g, struct ww_node *const *deps, const struct cu_edge *edges, size_t n,
                struct ww_work *work, struct ww_node **made) {
    struct ww_node *node = append(g);
    int error = node ? 0 : CUDA_ERROR_OUT_OF_MEMORY;
    for (size_t i = 0; i < n && !error; i++)
        error = !deps[i] || deps[i]->graph != g || deps[i] == node || edge_of(deps[i], node)
                    ? CUDA_ERROR_INVALID_VALUE
                    : connect(deps[i], node, edges ? &edges[i] : NULL);
    if (node && !error) {
        node->work = *work;
        if (work->kind == CU_NODE_GRAPH)
            work->of.graph->within = node;
        for (uint32_t i = 0; work->kind == CU_NODE_CONDITION && i < work->of.condition->size; i++)
            work->of.condition->graphs[i]->within = node;
        *made = node;
        return 0;
    }
    if (node) {
        node->work.kind = CU_NODE_EMPTY;
        ww_node_remove(node);
    }
    ww_work_drop(work); /* no destructor is due: a child graph is a clone, and its source still exists */
    return error;
}

int ww_twin_code(const struct ww_twin *t) {
    if (!t->device)
        return CUDA_ERROR_INVALID_VALUE;
    int error = ww_context_code(t->device);
    return error ? error : t->life == atomic_load(&t->device->life) ? 0 : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

void ww_twin_drop(struct ww_twin *t, uint16_t op) {
    if (t->device && (!op || (!ww_twin_code(t) && !ww_send_graph(t->device, op, 0, t->id, 0))))
        ww_id_give(t->device, &t->device->graphs, t->life, t->id);
    t->device = NULL;
}

void ww_condition_drop(struct ww_condition *c) {
    if (!c)
        return;
    for (uint32_t i = 0; i < c->size; i++)
        if (c->graphs && c->graphs[i])
            ww_graph_drop(c->graphs[i]);
    if (!ww_twin_code(&c->within))
        ww_send_graph(c->within.device, WW_OP_GRAPH_DROP, 0, c->within.id, 1 + c->node);
    free(c->graphs);
    free(c->handles);
    free(c);
}

int ww_work_copy(struct ww_work *to, const struct ww_work *from) {
    *to = *from;
    switch (from->kind) {
    case CU_NODE_KERNEL:
        to->of.kernel = ww_kernel_copy(from->of.kernel);
        return to->of.kernel ? 0 : CUDA_ERROR_OUT_OF_MEMORY;
    case CU_NODE_GRAPH:
        to->of.graph = ww_graph_clone(from->of.graph);
        return to->of.graph ? 0 : CUDA_ERROR_OUT_OF_MEMORY;
    case CU_NODE_ALLOC:
    case CU_NODE_FREE:
        atomic_fetch_add(&from->of.memory->refs, 1);
        return 0;
    default:
        return 0;
    }
}

void ww_work_drop(struct ww_work *w) {
    switch (w->kind) {
    case CU_NODE_KERNEL:
        free(w->of.kernel);
        break;
    case CU_NODE_GRAPH:
        ww_graph_drop(w->of.graph);
        break;
    case CU_NODE_CONDITION:
        ww_condition_drop(w->of.condition);
        break;
    case CU_NODE_ALLOC:
    case CU_NODE_FREE:
        ww_graph_memory_drop(w->of.memory);
        break;
    default:
        break;
    }
    w->kind = CU_NODE_EMPTY;
}

void ww_graph_drop(struct ww_graph *g) {
    while (g->n)
        ww_node_remove(g->nodes[g->n - 1]);
    for (size_t i = 0; i < g->nusers; i++)
        ww_user_release(g->users[i].user, g->users[i].count);
    ww_twin_drop(&g->twin, WW_OP_GRAPH_DROP);
    ww_object_drop(g->object, WW_GRAPH, NULL);
    free(g->nodes);
    free(g->users);
    free(g);
}

bool ww_graph_has(const struct ww_graph *g, int kind) {
    for (size_t i = 0; i < g->n; i++) {
        const struct ww_work *w = &g->nodes[i]->work;
        if (w->kind == kind || (w->kind == CU_NODE_GRAPH && ww_graph_has(w->of.graph, kind)))
            return true;
        for (uint32_t k = 0; w->kind == CU_NODE_CONDITION && k < w->of.condition->size; k++)
            if (ww_graph_has(w->of.condition->graphs[k], kind))
                return true;
    }
    return false;
}

/* Return true if a graph has ALLOC or FREE nodes. As with the driver, such graphs are not cloned and lose no nodes or
 * edges, because their memory has one address. */
bool ww_graph_has_memory(const struct ww_graph *g) {
    return ww_graph_has(g, CU_NODE_ALLOC) || ww_graph_has(g, CU_NODE_FREE);
}

/* Clone the nodes of a graph, then their edges: `place` is a node's index in both graphs. */
struct ww_graph *ww_graph_clone(struct ww_graph *g) {
    struct ww_graph *c = ww_graph_new();
    int error = c ? 0 : CUDA_ERROR_OUT_OF_MEMORY;
    for (size_t i = 0; i < g->n && !error; i++) {
        struct ww_node *n = append(c);
        struct ww_work work;
        g->nodes[i]->place = i;
        if (n)
            n->work.kind = CU_NODE_EMPTY;
        error = n ? ww_work_copy(&work, &g->nodes[i]->work) : CUDA_ERROR_OUT_OF_MEMORY;
        if (!error) {
            n->work = work;
            n->original = g->nodes[i]->serial;
            if (work.kind == CU_NODE_GRAPH)
                work.of.graph->within = n;
        }
    }
    for (size_t i = 0; i < g->n && !error; i++)
        for (size_t e = 0; e < g->nodes[i]->nedges && !error; e++)
            error = connect(c->nodes[g->nodes[i]->edges[e].from->place], c->nodes[i], &g->nodes[i]->edges[e].data);
    for (size_t i = 0; i < g->nusers && !error; i++)
        if (!(error = hold(c, g->users[i].user, g->users[i].count)))
            ww_user_retain(g->users[i].user, g->users[i].count);
    if (!error) {
        c->next_id = g->next_id;
        return c;
    }
    if (c)
        ww_graph_drop(c); /* no destructor is due: the source still has its references */
    return NULL;
}

/* -- calls on graphs ----------------------------------------------------------------------------------------------- */

int ww_body_cuGraphCreate(void **graph) {
    struct ww_graph *g = ww_graph_new();
    if (!g)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *graph = g->object;
    return 0;
}

int ww_body_cuGraphClone(void **clone, struct ww_graph *g) {
    if (ww_graph_has_memory(g) || ww_graph_has(g, CU_NODE_CONDITION))
        return CUDA_ERROR_NOT_SUPPORTED;
    struct ww_graph *c = ww_graph_clone(g);
    *clone = c ? c->object : NULL;
    return c ? 0 : CUDA_ERROR_OUT_OF_MEMORY;
}

int ww_body_cuGraphNodeFindInClone(void **found, struct ww_node *n, struct ww_graph *clone) {
    for (size_t i = 0; i < clone->n; i++)
        if (clone->nodes[i]->original == n->serial) {
            *found = clone->nodes[i]->object;
            return 0;
        }
    return CUDA_ERROR_INVALID_VALUE;
}

/* A list for a caller: the elements for which its array has room, or, without an array, only the length. */
struct list {
    void **to;
    size_t room, n;
};

static void list_put(struct list *l, void *one) {
    if (l->to && l->n < l->room)
        l->to[l->n] = one;
    l->n++;
}

static int list_end(const struct list *l, size_t *n) {
    for (size_t i = l->n; l->to && i < l->room; i++)
        l->to[i] = NULL;
    *n = l->to && l->room < l->n ? l->room : l->n;
    return 0;
}

int ww_graph_nodes(const struct ww_graph *g, void **to, size_t *n, bool roots) {
    struct list l = {to, *n, 0};
    for (size_t i = 0; i < g->n; i++)
        if (!roots || !g->nodes[i]->nedges)
            list_put(&l, g->nodes[i]->object);
    return list_end(&l, n);
}

static void put_edge(struct list *from, struct list *to, struct cu_edge *data, const struct ww_edge *e,
                     struct ww_node *n) {
    if (data && to->n < to->room)
        data[to->n] = e->data;
    if (from)
        list_put(from, e->from->object);
    list_put(to, n->object);
}

int ww_graph_edges(const struct ww_graph *g, void **from, void **to, struct cu_edge *data, size_t *n) {
    struct list a = {from, *n, 0}, b = {to, *n, 0};
    size_t ignored;
    for (size_t i = 0; i < g->n; i++)
        for (size_t e = 0; e < g->nodes[i]->nedges; e++)
            put_edge(&a, &b, to ? data : NULL, &g->nodes[i]->edges[e], g->nodes[i]);
    list_end(&a, &ignored);
    return list_end(&b, n);
}

int ww_node_dependencies(const struct ww_node *node, void **to, struct cu_edge *data, size_t *n) {
    struct list l = {to, *n, 0};
    for (size_t e = 0; e < node->nedges; e++)
        put_edge(NULL, &l, to ? data : NULL, &node->edges[e], node->edges[e].from);
    return list_end(&l, n);
}

int ww_node_dependents(const struct ww_node *node, void **to, struct cu_edge *data, size_t *n) {
    struct list l = {to, *n, 0};
    for (size_t i = 0; i < node->graph->n; i++) {
        const struct ww_edge *e = edge_of(node, node->graph->nodes[i]);
        if (e)
            put_edge(NULL, &l, to ? data : NULL, e, node->graph->nodes[i]);
    }
    return list_end(&l, n);
}

/* Find the two nodes of edge i; return an error unless they are different nodes of this graph. */
static int ends(const struct ww_graph *g, void *const *from, void *const *to, size_t i, struct ww_node **a,
                struct ww_node **b) {
    *a = ww_node(from[i]);
    *b = ww_node(to[i]);
    return *a && *b && *a != *b && (*a)->graph == g && (*b)->graph == g ? 0 : CUDA_ERROR_INVALID_VALUE;
}

/* Add edges, or remove them. If one of the edges is invalid, change nothing. */
static int edit(const struct ww_graph *g, void *const *from, void *const *to, const struct cu_edge *edges, size_t n,
                bool adds) {
    struct ww_node *a, *b;
    int error = 0;
    for (size_t i = 0; i < n; i++)
        if (ends(g, from, to, i, &a, &b) || !edge_of(a, b) != adds)
            return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < n && !error; i++) {
        ends(g, from, to, i, &a, &b);
        if (!adds)
            disconnect(a, b);
        else if (!edge_of(a, b)) /* the list may contain an edge twice */
            error = connect(a, b, edges ? &edges[i] : NULL);
    }
    return error;
}

int ww_graph_connect(struct ww_graph *g, void *const *from, void *const *to, const struct cu_edge *edges, size_t n) {
    return edit(g, from, to, edges, n, true);
}

int ww_graph_disconnect(struct ww_graph *g, void *const *from, void *const *to, size_t n) {
    return n && ww_graph_has_memory(g) ? CUDA_ERROR_NOT_SUPPORTED : edit(g, from, to, NULL, n, false);
}

/* -- DOT files ----------------------------------------------------------------------------------------------------- */

static const char *const kinds[] = {"KERNEL",     "MEMCPY",       "MEMSET", "HOST", "GRAPH",     "EMPTY",
                                    "WAIT EVENT", "EVENT RECORD", "",       "",     "MEM ALLOC", "MEM FREE",
                                    "",           "CONDITIONAL"};

static void draw(FILE *to, const struct ww_graph *g) {
    fprintf(to, "subgraph cluster_%llu {\nlabel=\"graph_%llu\"\n", (unsigned long long)g->serial,
            (unsigned long long)g->serial);
    for (size_t i = 0; i < g->n; i++) {
        const struct ww_node *n = g->nodes[i];
        fprintf(to, "\"node_%llu\" [label=\"%u\\n%s\"];\n", (unsigned long long)n->serial, n->id, kinds[n->work.kind]);
        if (n->work.kind == CU_NODE_GRAPH)
            draw(to, n->work.of.graph);
        for (uint32_t k = 0; n->work.kind == CU_NODE_CONDITION && k < n->work.of.condition->size; k++)
            draw(to, n->work.of.condition->graphs[k]);
    }
    for (size_t i = 0; i < g->n; i++)
        for (size_t e = 0; e < g->nodes[i]->nedges; e++)
            fprintf(to, "\"node_%llu\" -> \"node_%llu\";\n", (unsigned long long)g->nodes[i]->edges[e].from->serial,
                    (unsigned long long)g->nodes[i]->serial);
    fprintf(to, "}\n");
}

int ww_body_cuGraphDebugDotPrint(struct ww_graph *g, const char *path) {
    FILE *to = fopen(path, "w");
    if (!to)
        return CUDA_ERROR_OPERATING_SYSTEM;
    fprintf(to, "digraph dot {\n");
    draw(to, g);
    fprintf(to, "}\n");
    return fclose(to) ? CUDA_ERROR_OPERATING_SYSTEM : 0;
}
