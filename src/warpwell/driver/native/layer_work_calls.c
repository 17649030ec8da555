/* The driver's calls for work: copies, memsets, launches, host functions. In a captured stream they become nodes. */
#include "layer.h"
#include <string.h>

int ww_enter(void *h, struct ww_device **d, uint32_t *stream, bool *captured) {
    int error = ww_need(d);
    if (error || (error = ww_stream(h, d, stream)) || (error = ww_earlier(*d)))
        return error;
    return ww_captured(*d, *stream, captured);
}

/* Describe one end of a copy as in a copy node. */
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

/* Add a copy node to the capture of a stream. */
static int captured_copy(struct ww_device *d, uint32_t stream, uint64_t to, enum ww_side to_is, uint64_t from,
                         enum ww_side from_is, size_t nbytes) {
    struct ww_work work = {.kind = CU_NODE_COPY, .device = d};
    work.of.copy = (struct cu_copy3){
        .from = end3(from, from_is, nbytes), .to = end3(to, to_is, nbytes), .width = nbytes, .height = 1, .depth = 1};
    return ww_capture_add(d, stream, &work);
}

int ww_copy(struct ww_device *d, uint32_t stream, bool captured, uint64_t to, enum ww_side to_is, uint64_t from,
            enum ww_side from_is, size_t nbytes, bool waits) {
    struct ww_span r;
    if (!nbytes)
        return 0;
    if (!to || !from || (to_is == WW_DEVICE && !ww_range_owner(to, &r)) ||
        (from_is == WW_DEVICE && !ww_range_owner(from, &r)))
        return CUDA_ERROR_INVALID_VALUE;
    if (!captured)
        return ww_copy_line(d, stream, to, from, nbytes, waits);
    return waits ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : captured_copy(d, stream, to, to_is, from, from_is, nbytes);
}

int ww_copy_boxes(struct ww_device *d, uint32_t stream, bool captured, const struct cu_copy3 *c, bool waits) {
    struct ww_work work = {.kind = CU_NODE_COPY, .device = d, .of.copy = *c};
    if (!captured)
        return ww_copy_post(d, stream, c, waits);
    int error = waits ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : ww_copy_check(d, c);
    return error ? error : ww_capture_add(d, stream, &work);
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

int ww_copy_plane(struct ww_device *d, uint32_t stream, bool captured, const struct cu_copy2 *c, bool waits) {
    struct cu_copy3 k = {
        .from = of_plane(&c->from, c), .to = of_plane(&c->to, c), .width = c->width, .height = c->height, .depth = 1};
    return ww_copy_boxes(d, stream, captured, &k, waits);
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

/* Read the attributes that are sent to the worker. Omit switches that are off, and refuse all other attributes. */
static int read_attributes(struct ww_launch *k, const struct cu_launch_config *c) {
    k->nattributes = 0;
    if (c->nattributes > 64 || (c->nattributes && !c->attributes))
        return CUDA_ERROR_INVALID_VALUE;
    for (uint32_t i = 0; i < c->nattributes; i++) {
        const struct cu_launch_attribute *a = &c->attributes[i];
        struct ww_launch_attribute *to = &k->attributes[k->nattributes];
        bool is_switch = a->id == CU_LAUNCH_COOPERATIVE || a->id == CU_LAUNCH_PROGRAMMATIC_SERIALIZATION;
        if (a->id == CU_LAUNCH_IGNORE || (is_switch && !a->value.number))
            continue;
        if (!ww_is_sent(a->id))
            return ww_refused(
                "cuLaunchKernelEx with an attribute other than cooperative, cluster, serialization, priority");
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

static int host_call(struct ww_device *d, uint32_t stream, bool captured, const struct ww_host *what) {
    struct ww_work work = {.kind = CU_NODE_HOST, .device = d, .of.host = {what->run, what->data}};
    if (!captured)
        return ww_host_post(d, stream, true, what);
    return what->run ? ww_capture_add(d, stream, &work) : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

int ww_body_cuLaunchHostFunc(struct ww_device *d, uint32_t stream, bool captured, void *function, void *data) {
    struct ww_host h = {.data = data};
    *(void **)&h.run = function;
    return host_call(d, stream, captured, &h);
}

int ww_body_cuStreamAddCallback(struct ww_device *d, uint32_t stream, bool captured, CUstream handle, void *callback,
                                void *data) {
    struct ww_host h = {.handle = handle, .data = data};
    *(void **)&h.callback = callback;
    return host_call(d, stream, captured, &h);
}

int ww_fill(struct ww_device *d, uint32_t stream, bool captured, CUdeviceptr to, size_t pitch, uint32_t value,
            uint32_t width, size_t columns, size_t rows, bool waits) {
    struct ww_work work = {
        .kind = CU_NODE_SET,
        .device = d,
        .of.set = {.to = to, .pitch = pitch, .value = value, .width = width, .columns = columns, .rows = rows}};
    if (!columns || !rows)
        return 0;
    if (!captured)
        return ww_set_post(d, stream, &work.of.set, waits);
    int error = waits ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : ww_set_check(&work.of.set);
    return error ? error : ww_capture_add(d, stream, &work);
}
