/* Copies, memsets and launches. _check functions run when a call is read, _issue functions when a stream issues it. */
#include "worker.h"

#include <string.h>

#define EARLY_MOST (64u << 10)

static int in_pins(uint64_t at) { return at >= WW_PIN_LOWEST && at < WW_PIN_HIGHEST; }

/* Check sizes, place and function of a call. The addresses of copies and memsets are checked when it is issued. */
CUresult ww_launch_check(struct ww_call *call, const struct ww_args_launch *args) {
    if (args->attributes > WW_LAUNCH_ATTRIBUTES || args->param_bytes > WW_PARAMS_MOST)
        return CUDA_ERROR_INVALID_VALUE;
    size_t bytes = sizeof *args + args->attributes * sizeof(struct ww_launch_attribute) + args->param_bytes;
    if (bytes > call->nargs)
        return CUDA_ERROR_INVALID_VALUE;
    call->function = ww_function(args->function);
    if (!call->function)
        return CUDA_ERROR_INVALID_HANDLE;
    for (uint32_t i = 0; i < call->function->params; i++) {
        struct ww_param p = call->function->param[i];
        if (p.size > args->param_bytes || p.offset > args->param_bytes - p.size)
            return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

CUresult ww_move_check(struct ww_call *call, const struct ww_args_move *args) {
    call->is_between_hosts = in_pins(args->address);
    if (call->entry.place)
        return args->nbytes == call->entry.nbytes && args->nbytes <= WW_PLACE_BYTES ? CUDA_SUCCESS
                                                                                    : CUDA_ERROR_INVALID_VALUE;
    if (call->entry.op == WW_OP_OUT || args->nbytes > WW_SMALL || args->nbytes > call->nargs - sizeof *args)
        return CUDA_ERROR_INVALID_VALUE;
    call->needs_cell = 1;
    return CUDA_SUCCESS;
}

CUresult ww_copy_check(struct ww_call *call, const struct ww_args_copy *args) {
    call->is_between_hosts = in_pins(args->to) && in_pins(args->from);
    return CUDA_SUCCESS;
}

static CUresult between_hosts(uint64_t to, const void *from, uint64_t n) {
    memmove((void *)(uintptr_t)to, from, n);
    return CUDA_SUCCESS;
}

/* Report the place as done when the device has passed the copy. */
static CUresult place_later(struct ww_stream *s, struct ww_call *call) {
    ww_stream_mark(s, (struct ww_todo){.kind = WW_PLACE, .a = call->entry.place, .b = call->entry.use});
    call->is_held = call->entry.slot == WW_NO_SLOT;
    return CUDA_SUCCESS;
}

CUresult ww_in_issue(struct ww_stream *s, struct ww_call *call, const struct ww_args_move *args) {
    enum ww_where where = ww_where(args->address, args->nbytes);
    if (where == WW_NOWHERE)
        return CUDA_ERROR_INVALID_VALUE;
    const unsigned char *from;
    uint32_t cell = 0;
    if (call->entry.place) {
        from = ww.staging + (size_t)(call->entry.place - 1) * WW_PLACE_BYTES;
    } else {
        cell = ww_take_cell(s);
        if (!cell)
            return CUDA_ERROR_OUT_OF_MEMORY; /* cannot happen: a call that gets no cell stays parked */
        unsigned char *to = ww.cells + (size_t)(cell - 1) * WW_SMALL;
        memcpy(to, call->args + sizeof *args, args->nbytes);
        from = to;
        ww_stream_later(s, (struct ww_todo){.kind = WW_CELL, .a = cell - 1});
    }
    CUresult code = where == WW_DEVICE ? native.cuMemcpyHtoDAsync_v2(args->address, from, args->nbytes, s->native)
                                       : between_hosts(args->address, from, args->nbytes);
    return code || !call->entry.place ? code : place_later(s, call);
}

CUresult ww_out_issue(struct ww_stream *s, struct ww_call *call, const struct ww_args_move *args) {
    enum ww_where where = ww_where(args->address, args->nbytes);
    if (where == WW_NOWHERE)
        return CUDA_ERROR_INVALID_VALUE;
    unsigned char *to = ww.staging + (size_t)(call->entry.place - 1) * WW_PLACE_BYTES;
    CUresult code = where == WW_DEVICE ? native.cuMemcpyDtoHAsync_v2(to, args->address, args->nbytes, s->native)
                                       : between_hosts((uintptr_t)to, (void *)(uintptr_t)args->address, args->nbytes);
    return code ? code : place_later(s, call);
}

/* If a stream has no work of its own, the driver may read up to about 24 KiB of pinned memory during the call, although
 * the legacy stream has earlier work that writes this memory (seen on an H200). So give the stream some work first: set
 * a byte that the copy overwrites. */
static CUresult copy_in(struct ww_stream *s, const struct ww_args_copy *args) {
    if (!s->nonblocking && args->nbytes && args->nbytes <= EARLY_MOST) {
        CUresult code = native.cuMemsetD8Async(args->to, 0, 1, s->native);
        if (code)
            return code;
    }
    return native.cuMemcpyHtoDAsync_v2(args->to, (void *)(uintptr_t)args->from, args->nbytes, s->native);
}

CUresult ww_copy_issue(struct ww_stream *s, const struct ww_args_copy *args) {
    enum ww_where to = ww_where(args->to, args->nbytes), from = ww_where(args->from, args->nbytes);
    if (to == WW_NOWHERE || from == WW_NOWHERE)
        return CUDA_ERROR_INVALID_VALUE;
    if (to == WW_DEVICE && from == WW_DEVICE)
        return native.cuMemcpyDtoDAsync_v2(args->to, args->from, args->nbytes, s->native);
    if (to == WW_DEVICE)
        return copy_in(s, args);
    if (from == WW_DEVICE)
        return native.cuMemcpyDtoHAsync_v2((void *)(uintptr_t)args->to, args->from, args->nbytes, s->native);
    return between_hosts(args->to, (void *)(uintptr_t)args->from, args->nbytes);
}

CUresult ww_memset_issue(struct ww_stream *s, const struct ww_args_memset *args) {
    if ((args->width != 1 && args->width != 2 && args->width != 4) || args->address % args->width ||
        args->count > UINT64_MAX / 4 || ww_where(args->address, args->count * args->width) == WW_NOWHERE)
        return CUDA_ERROR_INVALID_VALUE;
    if (args->width == 1)
        return native.cuMemsetD8Async(args->address, (unsigned char)args->value, args->count, s->native);
    if (args->width == 2)
        return native.cuMemsetD16Async(args->address, (unsigned short)args->value, args->count, s->native);
    return native.cuMemsetD32Async(args->address, args->value, args->count, s->native);
}

static CUresult fill_config(struct cu_launch_config *config, struct cu_launch_attribute *attributes,
                            const struct ww_args_launch *args) {
    const struct ww_launch_attribute *from = (const void *)(args + 1);
    *config =
        (struct cu_launch_config){.shape = args->shape, .attributes = attributes, .nattributes = args->attributes};
    for (uint32_t i = 0; i < args->attributes; i++) {
        if (!ww_is_sent(from[i].id))
            return CUDA_ERROR_NOT_SUPPORTED;
        attributes[i] = (struct cu_launch_attribute){.id = from[i].id};
        memcpy(attributes[i].value.bytes, from[i].value, sizeof from[i].value);
    }
    return CUDA_SUCCESS;
}

CUresult ww_launch_issue(struct ww_stream *s, struct ww_call *call, const struct ww_args_launch *args) {
    struct cu_launch_attribute attributes[WW_LAUNCH_ATTRIBUTES];
    struct cu_launch_config config;
    unsigned char *params = (unsigned char *)(args + 1) + args->attributes * sizeof(struct ww_launch_attribute);
    void *pointers[4096];
    const struct ww_native_function *f = call->function;
    if (f->params > sizeof pointers / sizeof *pointers)
        return CUDA_ERROR_INVALID_VALUE;
    for (uint32_t i = 0; i < f->params; i++)
        pointers[i] = params + f->param[i].offset;
    CUresult code = fill_config(&config, attributes, args);
    config.stream = s->native;
    return code ? code : native.cuLaunchKernelEx(&config, f->native, pointers, NULL);
}

/* -- clusters ------------------------------------------------------------------------------------------------------ */

static void find_clusters(struct ww_job *job) {
    const struct ww_args_launch *args = (const void *)job->call->args;
    struct cu_launch_attribute attributes[WW_LAUNCH_ATTRIBUTES];
    struct cu_launch_config config;
    CUfunction f;
    int32_t *n = job->data = ww_memory(sizeof *n);
    job->result = ww_find_function(args->function & ~WW_CLUSTER_SIZE, &f);
    if (!job->result)
        job->result = fill_config(&config, attributes, args);
    if (!job->result && args->function & WW_CLUSTER_SIZE)
        job->result = native.cuOccupancyMaxPotentialClusterSize(n, f, &config);
    else if (!job->result)
        job->result = native.cuOccupancyMaxActiveClusters(n, f, &config);
    job->nbytes = job->result ? 0 : sizeof *n;
}

CUresult ww_clusters(const struct ww_call *call, const struct ww_args_launch *args) {
    if (args->attributes > WW_LAUNCH_ATTRIBUTES ||
        args->attributes * sizeof(struct ww_launch_attribute) > call->nargs - sizeof *args)
        return CUDA_ERROR_INVALID_VALUE;
    if (!native.cuOccupancyMaxPotentialClusterSize || !native.cuOccupancyMaxActiveClusters)
        return CUDA_ERROR_NOT_SUPPORTED;
    return ww_heavy_for(call, (struct ww_job){.work = find_clusters, .call = ww_copy_call(call)});
}
