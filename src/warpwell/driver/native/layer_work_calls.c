/* The driver's calls for work: copies, memsets, launches, host functions. In a stream that records they become nodes.
 */
#include "layer.h"
#include <string.h>

/* Whether a call's stream records, and errors of earlier calls. */
static int enter(void *h, struct ww_device **d, uint32_t *stream, bool *captured) {
    int error = ww_need(d);
    if (error || (error = ww_stream(h, d, stream)) || (error = ww_earlier(*d)))
        return error;
    return ww_captured(*d, *stream, captured);
}

/* An end of a copy as a graph's node knows it. */
static struct cu_end3 end3(uint64_t at, enum ww_side is, size_t nbytes) {
    struct cu_end3 e = {.type = is == WW_HOST     ? CU_MEMORY_HOST
                                : is == WW_DEVICE ? CU_MEMORY_DEVICE
                                                  : CU_MEMORY_UNIFIED,
                        .pitch = nbytes,
                        .height = 1};
    if (is == WW_HOST)
        e.host = (const void *)(uintptr_t)at;
    else
        e.device = at;
    return e;
}

/* A stream that records gets a node. */
static int captured_copy(struct ww_device *d, uint32_t stream, uint64_t to, enum ww_side to_is, uint64_t from,
                         enum ww_side from_is, size_t nbytes) {
    struct ww_work work = {.kind = CU_NODE_COPY, .device = d};
    work.of.copy = (struct cu_copy3){
        .from = end3(from, from_is, nbytes), .to = end3(to, to_is, nbytes), .width = nbytes, .height = 1, .depth = 1};
    return ww_capture_add(d, stream, &work);
}

int ww_copy(uint64_t to, enum ww_side to_is, uint64_t from, enum ww_side from_is, size_t nbytes, void *h, bool waits) {
    struct ww_device *d;
    struct ww_span r;
    uint32_t stream;
    bool captured;
    int error = enter(h, &d, &stream, &captured);
    if (error)
        return error;
    if (!nbytes)
        return 0;
    if (!to || !from || (to_is == WW_DEVICE && !ww_range_owner(to, &r)) ||
        (from_is == WW_DEVICE && !ww_range_owner(from, &r)))
        return CUDA_ERROR_INVALID_VALUE;
    if (!captured)
        return ww_copy_line(d, stream, to, from, nbytes, waits);
    return waits ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : captured_copy(d, stream, to, to_is, from, from_is, nbytes);
}

/* The addresses determine the contexts: arenas of devices do not overlap. */
int ww_copy_between(CUdeviceptr to, CUcontext there, CUdeviceptr from, CUcontext here, size_t nbytes, void *h,
                    bool waits) {
    if (ww_ready() || !ww_context(there) || !ww_context(here))
        return ww_ready() ? CUDA_ERROR_NOT_INITIALIZED : CUDA_ERROR_INVALID_CONTEXT;
    return ww_copy(to, WW_DEVICE, from, WW_DEVICE, nbytes, h, waits);
}

int ww_copy_boxes(const struct cu_copy3 *c, void *h, bool waits) {
    struct ww_work work = {.kind = CU_NODE_COPY};
    uint32_t stream;
    bool captured;
    int error = !c ? CUDA_ERROR_INVALID_VALUE : enter(h, &work.device, &stream, &captured);
    if (error || !captured)
        return error ? error : ww_copy_post(work.device, stream, c, waits);
    if (waits || (error = ww_copy_check(work.device, c)))
        return error ? error : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    work.of.copy = *c;
    return ww_capture_add(work.device, stream, &work);
}

static struct cu_end3 of_plane(const struct cu_end2 *e, const struct cu_copy2 *c) {
    return (struct cu_end3){.x = e->x,
                            .y = e->y,
                            .type = e->type,
                            .host = e->host,
                            .device = e->device,
                            .array = e->array,
                            .pitch = e->pitch ? e->pitch : c->width,
                            .height = e->y + c->height};
}

int ww_copy_plane(const struct cu_copy2 *c, void *h, bool waits) {
    if (!c)
        return CUDA_ERROR_INVALID_VALUE;
    struct cu_copy3 k = {
        .from = of_plane(&c->from, c), .to = of_plane(&c->to, c), .width = c->width, .height = c->height, .depth = 1};
    return ww_copy_boxes(&k, h, waits);
}

static int launch(const struct ww_launch *k, void *h) {
    struct ww_device *d;
    struct ww_fn *f;
    const void *buffer;
    uint32_t stream;
    bool captured;
    int error = ww_need(&d);
    if (error || (error = ww_stream(h, &d, &stream)) || (error = ww_launch_check(d, k, &f, &buffer)) ||
        (error = ww_earlier(d)) || (error = ww_captured(d, stream, &captured)))
        return error;
    if (captured) {
        struct ww_work work = {.kind = CU_NODE_KERNEL, .device = d};
        return (error = ww_kernel_make(d, k, &work.of.kernel)) ? error : ww_capture_add(d, stream, &work);
    }
    ww_use_pinned(d);
    return ww_launch_post(d, stream, f, k, buffer);
}

CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, CUstream stream, void **params, void **extra) {
    struct ww_launch k;
    k.function = f;
    k.grid[0] = gx, k.grid[1] = gy, k.grid[2] = gz;
    k.block[0] = bx, k.block[1] = by, k.block[2] = bz;
    k.shared = shared;
    k.nattributes = 0;
    k.params = params;
    k.extra = extra;
    return launch(&k, stream);
}

CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                   unsigned bz, unsigned shared, CUstream stream, void **params) {
    struct ww_launch k = {.function = f,
                          .grid = {gx, gy, gz},
                          .block = {bx, by, bz},
                          .shared = shared,
                          .nattributes = 1,
                          .attributes = {{CU_LAUNCH_COOPERATIVE, {1, 0, 0}}},
                          .params = params};
    return launch(&k, stream);
}

/* Take the attributes that travel; those that are off are left out, others are refused. */
static int read_attributes(struct ww_launch *k, const struct cu_launch_config *c) {
    k->nattributes = 0;
    if (c->nattributes > 64 || (c->nattributes && !c->attributes))
        return CUDA_ERROR_INVALID_VALUE;
    for (uint32_t i = 0; i < c->nattributes; i++) {
        const struct cu_launch_attribute *a = &c->attributes[i];
        struct ww_launch_attribute *to = &k->attributes[k->nattributes];
        switch (a->id) {
        case CU_LAUNCH_IGNORE:
            continue;
        case CU_LAUNCH_COOPERATIVE:
        case CU_LAUNCH_PROGRAMMATIC_SERIALIZATION:
            if (!a->value.number)
                continue;
            break;
        case CU_LAUNCH_CLUSTER_DIMENSION:
        case CU_LAUNCH_PRIORITY:
            break;
        default:
            return ww_refused(
                "cuLaunchKernelEx with an attribute other than cooperative, cluster, serialization, priority");
        }
        if (k->nattributes == WW_LAUNCH_ATTRIBUTES)
            return CUDA_ERROR_INVALID_VALUE;
        to->id = a->id;
        memcpy(to->value, a->value.cluster, sizeof to->value);
        k->nattributes++;
    }
    return 0;
}

CUresult ww_cuLaunchKernelEx(int per_thread, void *config, CUfunction f, void **params, void **extra) {
    const struct cu_launch_config *c = config;
    struct ww_launch k;
    int error = ww_ready();
    if (error || !c || (error = read_attributes(&k, c)))
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    k.function = f;
    k.shape = c->shape;
    k.params = params;
    k.extra = extra;
    return launch(&k, c->stream ? c->stream : per_thread ? CU_STREAM_PER_THREAD : NULL);
}

int ww_clusters(int *n, CUfunction h, const struct cu_launch_config *c, uint32_t what) {
    struct {
        struct ww_args_launch launch;
        struct ww_launch_attribute attributes[WW_LAUNCH_ATTRIBUTES];
    } args;
    struct ww_launch k;
    struct ww_device *d;
    struct ww_fn *f;
    int error = ww_need(&d);
    if (error || !n || !c || (error = read_attributes(&k, c)) || (error = ww_fn_of(h, d, &f)))
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    args.launch =
        (struct ww_args_launch){.function = f->object->id | what, .shape = c->shape, .attributes = k.nattributes};
    memcpy(args.attributes, k.attributes, k.nattributes * sizeof *k.attributes);
    size_t nbytes = sizeof args.launch + k.nattributes * sizeof *k.attributes;
    return ww_call(d, WW_OP_CLUSTERS, 0, &args, nbytes, n, sizeof *n);
}

static int host_call(CUstream h, struct ww_host *what) {
    struct ww_device *d;
    uint32_t stream;
    bool captured;
    int error = enter(h, &d, &stream, &captured);
    what->handle = h;
    if (error || !captured)
        return error ? error : ww_host_post(d, stream, what);
    struct ww_work work = {.kind = CU_NODE_HOST, .device = d, .of.host = {what->run, what->data}};
    return what->run ? ww_capture_add(d, stream, &work) : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult cuLaunchHostFunc(CUstream stream, void *function, void *data) {
    struct ww_host h = {.data = data};
    *(void **)&h.run = function;
    return function ? host_call(stream, &h) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuStreamAddCallback(CUstream stream, void *callback, void *data, unsigned flags) {
    struct ww_host h = {.data = data};
    *(void **)&h.callback = callback;
    return callback && !flags ? host_call(stream, &h) : CUDA_ERROR_INVALID_VALUE;
}

int ww_fill(CUdeviceptr to, size_t pitch, uint32_t value, uint32_t width, size_t columns, size_t rows, void *h,
            bool waits) {
    struct ww_work work = {
        .kind = CU_NODE_SET,
        .of.set = {.to = to, .pitch = pitch, .value = value, .width = width, .columns = columns, .rows = rows}};
    uint32_t stream;
    bool captured;
    int error = enter(h, &work.device, &stream, &captured);
    if (error)
        return error;
    if (!columns || !rows)
        return 0;
    if (!captured)
        return ww_set_post(work.device, stream, &work.of.set, waits);
    if (waits || (error = ww_set_check(work.device, &work.of.set)))
        return error ? error : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return ww_capture_add(work.device, stream, &work);
}
