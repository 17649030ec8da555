/* Nodes of graphs with parameters that differ from the driver's: a kernel is a host function of the program, and a copy
 * is described by the runtime's structs. Calls for other nodes are forwarded, see runtime_calls.txt. */
#include "runtime.h"

#include <string.h>

/* -- kernels ------------------------------------------------------------------------------------------------------- */

struct kernel_node {
    void *function;
    uint32_t grid[3], block[3], shared;
    void **arguments, **extra;
};

int rt_kernel_node(const void *params, struct cu_node_kernel *to) {
    const struct kernel_node *from = params;
    if (!from)
        return CUDA_ERROR_INVALID_VALUE;
    *to = (struct cu_node_kernel){.shared = from->shared, .params = from->arguments, .extra = from->extra};
    memcpy(to->grid, from->grid, sizeof to->grid);
    memcpy(to->block, from->block, sizeof to->block);
    return rt_kernel(from->function, &to->kernel);
}

static void from_kernel(const struct cu_node_kernel *from, struct kernel_node *to) {
    CUkernel kernel = from->kernel ? from->kernel : (CUkernel)(void *)from->function;
    *to = (struct kernel_node){
        .function = rt_host_function(kernel), .shared = from->shared, .arguments = from->params, .extra = from->extra};
    memcpy(to->grid, from->grid, sizeof to->grid);
    memcpy(to->block, from->block, sizeof to->block);
}

CUDART_API int cudaGraphKernelNodeGetParams(void *node, void *params) {
    struct cu_node_kernel k;
    int error = params ? rt_enter() : CUDA_ERROR_INVALID_VALUE;
    if (error || (error = cuGraphKernelNodeGetParams_v2(node, &k)))
        return rt_result(error);
    from_kernel(&k, params);
    return 0;
}

/* -- copies -------------------------------------------------------------------------------------------------------- */

static void from_end3(const struct cu_end3 *from, struct cuda_position *at, struct cuda_pitched *p) {
    *at = (struct cuda_position){from->x, from->y, from->z};
    *p = (struct cuda_pitched){.pitch = from->pitch, .height = from->height};
    p->base = from->type == CU_MEMORY_HOST ? (void *)(uintptr_t)from->host : (void *)(uintptr_t)from->device;
}

static void from_copy(const struct cu_copy3 *from, struct cuda_copy3 *to) {
    *to = (struct cuda_copy3){.extent = {from->width, from->height, from->depth}};
    from_end3(&from->from, &to->from_position, &to->from);
    from_end3(&from->to, &to->to_position, &to->to);
    int types[2];
    while (!rt_direction(to->direction, &types[0], &types[1]) &&
           (types[0] != from->from.type || types[1] != from->to.type))
        to->direction++;
}

int rt_flat_copy(struct cu_copy3 *to, void *there, const void *here, size_t nbytes, int direction) {
    struct cuda_copy3 c = {.from = {.base = (void *)(uintptr_t)here, .pitch = nbytes, .width = nbytes, .height = 1},
                           .to = {.base = there, .pitch = nbytes, .width = nbytes, .height = 1},
                           .extent = {nbytes, 1, 1},
                           .direction = direction};
    return rt_copy3(&c, to);
}

int rt_symbol_copy(struct cu_copy3 *to, const void *symbol, bool is_to, const void *other, size_t nbytes, size_t offset,
                   int direction) {
    CUdeviceptr start;
    size_t most;
    int error = rt_symbol(symbol, &start, &most);
    if (error || offset > most || nbytes > most - offset)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    void *at = (void *)(uintptr_t)(start + offset);
    return is_to ? rt_flat_copy(to, at, other, nbytes, direction)
                 : rt_flat_copy(to, (void *)(uintptr_t)other, at, nbytes, direction);
}

CUDART_API int cudaGraphMemcpyNodeGetParams(void *node, void *params) {
    struct cu_copy3 copy;
    int error = params ? rt_enter() : CUDA_ERROR_INVALID_VALUE;
    if (error || (error = cuGraphMemcpyNodeGetParams(node, &copy)))
        return rt_result(error);
    from_copy(&copy, params);
    return 0;
}

/* -- nodes of any type --------------------------------------------------------------------------------------------- */

struct node_params { /* as struct cu_node_params, but kernels and copies differ, and no node has a context */
    int32_t type, reserved[3];
    union {
        unsigned char bytes[232];
        struct kernel_node kernel;
        struct {
            int32_t flags, reserved[3];
            struct cuda_copy3 copy;
        } copy;
    } of;
    int64_t more;
};

_Static_assert(sizeof(struct node_params) == sizeof(struct cu_node_params), "layout");

int rt_node(const void *params, struct cu_node_params *to) {
    const struct node_params *from = params;
    if (!from)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(to, from, sizeof *to);
    switch (from->type) {
    case CU_NODE_KERNEL:
        return rt_kernel_node(&from->of.kernel, &to->of.kernel);
    case CU_NODE_COPY:
        memset(&to->of, 0, sizeof to->of);
        to->of.copy.flags = from->of.copy.flags;
        to->of.copy.context = rt_current();
        return rt_copy3(&from->of.copy.copy, &to->of.copy.copy);
    case CU_NODE_SET:
        to->of.set.context = rt_current();
        return 0;
    case CU_NODE_CONDITION:
        to->of.condition.context = rt_current();
        return 0;
    default:
        return 0;
    }
}

/* Copy the driver's results to the program's struct: the address of an ALLOC node, body graphs of a conditional node.
 */
static void from_node(const struct cu_node_params *from, struct node_params *to) {
    if (from->type == CU_NODE_ALLOC || from->type == CU_NODE_CONDITION)
        memcpy(&to->of, &from->of, sizeof to->of);
}

CUDART_API int CUDART_V2(cudaGraphAddNode)(void **node, void *graph, void *after, void *edges, size_t nafter,
                                           void *params) {
    struct cu_node_params n;
    int error = rt_enter();
    if (!error && !(error = rt_node(params, &n)) && !(error = cuGraphAddNode_v2(node, graph, after, edges, nafter, &n)))
        from_node(&n, params);
    return rt_result(error);
}

#if CUDART_MAJOR == 12
CUDART_API int cudaGraphAddNode(void **node, void *graph, void *after, size_t nafter, void *params) {
    return cudaGraphAddNode_v2(node, graph, after, NULL, nafter, params);
}
#endif
