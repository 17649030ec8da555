/* The driver's calls for work: copies, memsets, launches, host functions. In a stream that records they become nodes.
 */
#include "layer.h"
#include <string.h>

enum side { ANY, HOST, DEVICE };

/* Whether a call's stream records, and errors of earlier calls. */
static int enter(void *h, int per_thread, struct ww_device **d, uint32_t *stream, bool *captured) {
    int error = ww_need(d);
    if (error || (error = ww_stream(h, per_thread, d, stream)) || (error = ww_earlier(*d)))
        return error;
    return ww_captured(*d, *stream, captured);
}

/* An end of a copy as a graph's node knows it. */
static struct cu_end3 end3(uint64_t at, enum side is, size_t nbytes) {
    struct cu_end3 e = {.type = is == HOST     ? CU_MEMORY_HOST
                                : is == DEVICE ? CU_MEMORY_DEVICE
                                               : CU_MEMORY_UNIFIED,
                        .pitch = nbytes,
                        .height = 1};
    if (is == HOST)
        e.host = (const void *)(uintptr_t)at;
    else
        e.device = at;
    return e;
}

/* A stream that records gets a node. */
static int captured_copy(struct ww_device *d, uint32_t stream, uint64_t to, enum side to_is, uint64_t from,
                         enum side from_is, size_t nbytes) {
    struct ww_work work = {.kind = CU_NODE_COPY, .device = d};
    work.of.copy = (struct cu_copy3){
        .from = end3(from, from_is, nbytes), .to = end3(to, to_is, nbytes), .width = nbytes, .height = 1, .depth = 1};
    return ww_capture_add(d, stream, &work);
}

static int copy(uint64_t to, enum side to_is, uint64_t from, enum side from_is, size_t nbytes, void *h, int per_thread,
                bool waits) {
    struct ww_device *d;
    struct ww_span r;
    uint32_t stream;
    bool captured;
    int error = enter(h, per_thread, &d, &stream, &captured);
    if (error)
        return error;
    if (!nbytes)
        return 0;
    if (!to || !from || (to_is == DEVICE && !ww_range_owner(to, &r)) ||
        (from_is == DEVICE && !ww_range_owner(from, &r)))
        return CUDA_ERROR_INVALID_VALUE;
    if (!captured)
        return ww_copy_line(d, stream, to, from, nbytes, waits);
    return waits ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : captured_copy(d, stream, to, to_is, from, from_is, nbytes);
}

CUresult ww_cuMemcpy(int per_thread, CUdeviceptr to, CUdeviceptr from, size_t nbytes) {
    return copy(to, ANY, from, ANY, nbytes, NULL, per_thread, true);
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t nbytes, CUstream h) {
    return copy(to, ANY, from, ANY, nbytes, h, 0, false);
}

CUresult ww_cuMemcpyHtoD_v2(int per_thread, CUdeviceptr to, const void *from, size_t nbytes) {
    return copy(to, DEVICE, (uintptr_t)from, HOST, nbytes, NULL, per_thread, true);
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t nbytes, CUstream h) {
    return copy(to, DEVICE, (uintptr_t)from, HOST, nbytes, h, 0, false);
}

CUresult ww_cuMemcpyDtoH_v2(int per_thread, void *to, CUdeviceptr from, size_t nbytes) {
    return copy((uintptr_t)to, HOST, from, DEVICE, nbytes, NULL, per_thread, true);
}

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t nbytes, CUstream h) {
    return copy((uintptr_t)to, HOST, from, DEVICE, nbytes, h, 0, false);
}

CUresult ww_cuMemcpyDtoD_v2(int per_thread, CUdeviceptr to, CUdeviceptr from, size_t nbytes) {
    return copy(to, DEVICE, from, DEVICE, nbytes, NULL, per_thread, true);
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t nbytes, CUstream h) {
    return copy(to, DEVICE, from, DEVICE, nbytes, h, 0, false);
}

/* Contexts are those of the addresses: arenas of devices do not overlap. */
static int peer(CUdeviceptr to, CUcontext there, CUdeviceptr from, CUcontext here, size_t nbytes, void *h,
                int per_thread, bool waits) {
    if (ww_ready() || !ww_context(there) || !ww_context(here))
        return ww_ready() ? CUDA_ERROR_NOT_INITIALIZED : CUDA_ERROR_INVALID_CONTEXT;
    return copy(to, DEVICE, from, DEVICE, nbytes, h, per_thread, waits);
}

CUresult ww_cuMemcpyPeer(int per_thread, CUdeviceptr to, CUcontext there, CUdeviceptr from, CUcontext here,
                         size_t nbytes) {
    return peer(to, there, from, here, nbytes, NULL, per_thread, true);
}

CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext there, CUdeviceptr from, CUcontext here, size_t nbytes,
                           CUstream h) {
    return peer(to, there, from, here, nbytes, h, 0, false);
}

static int boxes(const struct cu_copy3 *c, void *h, int per_thread, bool waits) {
    struct ww_work work = {.kind = CU_NODE_COPY};
    uint32_t stream;
    bool captured;
    int error = enter(h, per_thread, &work.device, &stream, &captured);
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

static int plane(const void *given, void *h, int per_thread, bool waits) {
    const struct cu_copy2 *c = given;
    if (!c)
        return CUDA_ERROR_INVALID_VALUE;
    struct cu_copy3 k = {
        .from = of_plane(&c->from, c), .to = of_plane(&c->to, c), .width = c->width, .height = c->height, .depth = 1};
    return boxes(&k, h, per_thread, waits);
}

CUresult ww_cuMemcpy2D_v2(int per_thread, void *c) { return plane(c, NULL, per_thread, true); }

CUresult ww_cuMemcpy2DUnaligned_v2(int per_thread, void *c) { return plane(c, NULL, per_thread, true); }

CUresult cuMemcpy2DAsync_v2(void *c, CUstream h) { return plane(c, h, 0, false); }

CUresult ww_cuMemcpy3D_v2(int per_thread, void *c) {
    return c ? boxes(c, NULL, per_thread, true) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemcpy3DAsync_v2(void *c, CUstream h) { return c ? boxes(c, h, 0, false) : CUDA_ERROR_INVALID_VALUE; }

static int set(const struct cu_node_set *s, void *h, int per_thread, bool waits) {
    struct ww_work work = {.kind = CU_NODE_SET, .of.set = *s};
    uint32_t stream;
    bool captured;
    int error = enter(h, per_thread, &work.device, &stream, &captured);
    if (error)
        return error;
    if (!s->columns || !s->rows)
        return 0;
    if (!captured)
        return ww_set_post(work.device, stream, s, waits);
    if (waits || (error = ww_set_check(work.device, s)))
        return error ? error : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return ww_capture_add(work.device, stream, &work);
}

static int fill(CUdeviceptr to, uint32_t value, uint32_t width, size_t count, void *h, int per_thread, bool waits) {
    struct cu_node_set s = {.to = to, .value = value, .width = width, .columns = count, .rows = 1};
    return set(&s, h, per_thread, waits);
}

static int fill2(CUdeviceptr to, size_t pitch, uint32_t value, uint32_t width, size_t columns, size_t rows, void *h,
                 int per_thread, bool waits) {
    struct cu_node_set s = {.to = to, .pitch = pitch, .value = value, .width = width, .columns = columns, .rows = rows};
    return set(&s, h, per_thread, waits);
}

CUresult ww_cuMemsetD2D8_v2(int per_thread, CUdeviceptr to, size_t pitch, unsigned char value, size_t columns,
                            size_t rows) {
    return fill2(to, pitch, value, 1, columns, rows, NULL, per_thread, true);
}

CUresult ww_cuMemsetD2D16_v2(int per_thread, CUdeviceptr to, size_t pitch, unsigned short value, size_t columns,
                             size_t rows) {
    return fill2(to, pitch, value, 2, columns, rows, NULL, per_thread, true);
}

CUresult ww_cuMemsetD2D32_v2(int per_thread, CUdeviceptr to, size_t pitch, unsigned value, size_t columns,
                             size_t rows) {
    return fill2(to, pitch, value, 4, columns, rows, NULL, per_thread, true);
}

CUresult cuMemsetD2D8Async(CUdeviceptr to, size_t pitch, unsigned char value, size_t columns, size_t rows, CUstream h) {
    return fill2(to, pitch, value, 1, columns, rows, h, 0, false);
}

CUresult cuMemsetD2D16Async(CUdeviceptr to, size_t pitch, unsigned short value, size_t columns, size_t rows,
                            CUstream h) {
    return fill2(to, pitch, value, 2, columns, rows, h, 0, false);
}

CUresult cuMemsetD2D32Async(CUdeviceptr to, size_t pitch, unsigned value, size_t columns, size_t rows, CUstream h) {
    return fill2(to, pitch, value, 4, columns, rows, h, 0, false);
}

CUresult ww_cuMemsetD8_v2(int per_thread, CUdeviceptr to, unsigned char value, size_t count) {
    return fill(to, value, 1, count, NULL, per_thread, true);
}

CUresult ww_cuMemsetD16_v2(int per_thread, CUdeviceptr to, unsigned short value, size_t count) {
    return fill(to, value, 2, count, NULL, per_thread, true);
}

CUresult ww_cuMemsetD32_v2(int per_thread, CUdeviceptr to, unsigned value, size_t count) {
    return fill(to, value, 4, count, NULL, per_thread, true);
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream h) {
    return fill(to, value, 1, count, h, 0, false);
}

CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t count, CUstream h) {
    return fill(to, value, 2, count, h, 0, false);
}

CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream h) {
    return fill(to, value, 4, count, h, 0, false);
}

static int launch(const struct ww_launch *k, void *h, int per_thread) {
    struct ww_device *d;
    struct ww_fn *f;
    const void *buffer;
    uint32_t stream;
    bool captured;
    int error = ww_need(&d);
    if (error || (error = ww_stream(h, per_thread, &d, &stream)) || (error = ww_launch_check(d, k, &f, &buffer)) ||
        (error = ww_earlier(d)) || (error = ww_captured(d, stream, &captured)))
        return error;
    if (captured) {
        struct ww_work work = {.kind = CU_NODE_KERNEL, .device = d};
        return (error = ww_kernel_make(d, k, &work.of.kernel)) ? error : ww_capture_add(d, stream, &work);
    }
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
    return launch(&k, stream, 0);
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
    return launch(&k, stream, 0);
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
    memcpy(k.grid, c->grid, sizeof k.grid);
    memcpy(k.block, c->block, sizeof k.block);
    k.shared = c->shared;
    k.params = params;
    k.extra = extra;
    return launch(&k, c->stream, per_thread);
}

static int clusters(int *n, CUfunction h, const struct cu_launch_config *c, uint32_t what) {
    struct {
        struct ww_args_launch launch;
        struct ww_launch_attribute attributes[WW_LAUNCH_ATTRIBUTES];
    } args = {.launch = {.shared = c ? c->shared : 0}};
    struct ww_launch k;
    struct ww_device *d;
    struct ww_fn *f;
    uint32_t got;
    int error = ww_need(&d);
    if (error || !n || !c || (error = read_attributes(&k, c)) || (error = ww_fn_of(h, d, &f)))
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    args.launch.function = f->object->id | what;
    args.launch.attributes = k.nattributes;
    memcpy(args.launch.grid, c->grid, sizeof args.launch.grid);
    memcpy(args.launch.block, c->block, sizeof args.launch.block);
    memcpy(args.attributes, k.attributes, k.nattributes * sizeof *k.attributes);
    error = ww_call(d, WW_OP_CLUSTERS, 0, &args, sizeof args, n, sizeof *n, &got);
    return error ? error : got == sizeof *n ? 0 : CUDA_ERROR_UNKNOWN;
}

CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, void *config) { return clusters(n, f, config, 0); }

CUresult cuOccupancyMaxPotentialClusterSize(int *n, CUfunction f, void *config) {
    return clusters(n, f, config, WW_CLUSTER_SIZE);
}

static int host_call(CUstream h, struct ww_host *what) {
    struct ww_device *d;
    uint32_t stream;
    bool captured;
    int error = enter(h, 0, &d, &stream, &captured);
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
