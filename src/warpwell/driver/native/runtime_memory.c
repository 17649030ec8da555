/* Memory, copies, fills. See runtime.h.
 *
 * Copies with a direction use the driver's function for that direction, so that the driver refuses a wrong direction as
 * with NVIDIA's runtime. With cudaMemcpyDefault, and from host to host, unified addresses determine the direction.
 * Arrays are not served.
 */
#include "runtime.h"

#include <string.h>

enum direction { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, BY_ADDRESS };

static CUdeviceptr address(const void *p) { return (uintptr_t)p; }

/* -- allocation ---------------------------------------------------------------------------------------------------- */

CUDART_API int cudaMalloc(void **p, size_t nbytes) {
    CUdeviceptr at = 0;
    int error = rt_enter();
    if (!error && !p)
        error = CUDA_ERROR_INVALID_VALUE;
    if (error || (nbytes && (error = cuMemAlloc_v2(&at, nbytes))))
        return rt_result(error);
    *p = (void *)(uintptr_t)at;
    return 0;
}

CUDART_API int cudaMallocAsync(void **p, size_t nbytes, CUstream stream) {
    CUdeviceptr at = 0;
    int error = rt_enter();
    if (!error && !p)
        error = CUDA_ERROR_INVALID_VALUE;
    if (error || (nbytes && (error = cuMemAllocAsync(&at, nbytes, stream))))
        return rt_result(error);
    *p = (void *)(uintptr_t)at;
    return 0;
}

/* 0 bytes are not an error, unlike in the driver. */
CUDART_API int cudaMallocManaged(void **p, size_t nbytes, uint32_t flags) {
    CUdeviceptr at = 0;
    int error = rt_enter();
    if (!error && !p)
        error = CUDA_ERROR_INVALID_VALUE;
    if (error || (nbytes && (error = cuMemAllocManaged(&at, nbytes, flags))))
        return rt_result(error);
    *p = (void *)(uintptr_t)at;
    return 0;
}

CUDART_API int cudaHostAlloc(void **p, size_t nbytes, uint32_t flags) {
    int error = rt_enter();
    if (!error && !p)
        error = CUDA_ERROR_INVALID_VALUE;
    if (error || (nbytes && (error = cuMemHostAlloc(p, nbytes, flags))))
        return rt_result(error);
    if (!nbytes)
        *p = NULL;
    return 0;
}

CUDART_API int cudaMallocHost(void **p, size_t nbytes) { return cudaHostAlloc(p, nbytes, 0); }

CUDART_API int cudaMallocPitch(void **p, size_t *pitch, size_t width, size_t height) {
    CUdeviceptr at = 0;
    int error = rt_enter();
    if (!error && (!p || !pitch))
        error = CUDA_ERROR_INVALID_VALUE;
    if (error)
        return rt_result(error);
    *pitch = 0;
    if (width && height && (error = cuMemAllocPitch_v2(&at, pitch, width, height, 4)))
        return rt_result(error);
    *p = (void *)(uintptr_t)at;
    return 0;
}

CUDART_API int cudaMalloc3D(void *pitched, struct cuda_extent extent) {
    struct cuda_pitched *p = pitched;
    if (!p)
        return rt_result(CUDA_ERROR_INVALID_VALUE);
    p->width = extent.width;
    p->height = extent.height;
    return cudaMallocPitch(&p->base, &p->pitch, extent.width, extent.height * extent.depth);
}

struct pointer_attributes {
    int32_t type, device;
    void *device_pointer, *host_pointer;
#if CUDART_MAJOR >= 13
    long reserved[8];
#endif
};

CUDART_API int cudaPointerGetAttributes(void *attributes, const void *p) {
    struct pointer_attributes *a = attributes;
    uint32_t type = 0, is_managed = 0;
    CUdeviceptr device_pointer = 0;
    int ordinal = -2, error = rt_enter();
    void *host = NULL;
    int wanted[] = {CU_POINTER_MEMORY_TYPE, CU_POINTER_IS_MANAGED, CU_POINTER_DEVICE_ORDINAL, CU_POINTER_DEVICE_POINTER,
                    CU_POINTER_HOST_POINTER};
    void *values[] = {&type, &is_managed, &ordinal, &device_pointer, &host};
    if (error || !a || !p)
        return rt_result(error ? error : CUDA_ERROR_INVALID_VALUE);
    if ((error = cuPointerGetAttributes(sizeof wanted / sizeof *wanted, wanted, values, address(p))))
        return rt_result(error);
    memset(a, 0, sizeof *a);
    a->type = is_managed ? 3 : (int)type;
    a->device = type ? ordinal : -2;
    a->device_pointer = (void *)(uintptr_t)device_pointer;
    a->host_pointer = type ? host : (void *)(uintptr_t)p;
    return 0;
}

/* -- copies of bytes ----------------------------------------------------------------------------------------------- */

CUDART_API int cudaMemcpy(void *to, const void *from, size_t nbytes, int direction) {
    int error = rt_enter();
    if (error || !nbytes)
        return rt_result(error);
    switch (direction) {
    case HOST_TO_DEVICE:
        return rt_result(cuMemcpyHtoD_v2(address(to), from, nbytes));
    case DEVICE_TO_HOST:
        return rt_result(cuMemcpyDtoH_v2(to, address(from), nbytes));
    case DEVICE_TO_DEVICE:
        return rt_result(cuMemcpyDtoD_v2(address(to), address(from), nbytes));
    case HOST_TO_HOST:
    case BY_ADDRESS:
        return rt_result(cuMemcpy(address(to), address(from), nbytes));
    default:
        return rt_result(RT_DIRECTION);
    }
}

CUDART_API int cudaMemcpyAsync(void *to, const void *from, size_t nbytes, int direction, CUstream stream) {
    int error = rt_enter();
    if (error || !nbytes)
        return rt_result(error);
    switch (direction) {
    case HOST_TO_DEVICE:
        return rt_result(cuMemcpyHtoDAsync_v2(address(to), from, nbytes, stream));
    case DEVICE_TO_HOST:
        return rt_result(cuMemcpyDtoHAsync_v2(to, address(from), nbytes, stream));
    case DEVICE_TO_DEVICE:
        return rt_result(cuMemcpyDtoDAsync_v2(address(to), address(from), nbytes, stream));
    case HOST_TO_HOST:
    case BY_ADDRESS:
        return rt_result(cuMemcpyAsync(address(to), address(from), nbytes, stream));
    default:
        return rt_result(RT_DIRECTION);
    }
}

#if CUDART_MAJOR >= 13
/* Attributes are only hints about locations and the order of accesses: each copy is one call in the stream's order. */
CUDART_API int cudaMemcpyBatchAsync(void **to, void **from, void *nbytes, size_t count, void *attributes,
                                    size_t *indices, size_t nattributes, CUstream stream) {
    int error = count && (!to || !from || !nbytes) ? CUDA_ERROR_INVALID_VALUE : 0;
    (void)attributes, (void)indices, (void)nattributes;
    for (size_t i = 0; i < count && !error; i++)
        error = cudaMemcpyAsync(to[i], from[i], ((const size_t *)nbytes)[i], BY_ADDRESS, stream);
    return rt_result(error);
}
#endif

/* -- variables ----------------------------------------------------------------------------------------------------- */

static int in_symbol(const void *symbol, size_t nbytes, size_t offset, void **at) {
    CUdeviceptr start;
    size_t most;
    int error = rt_enter();
    if (error || (error = rt_symbol(symbol, &start, &most)))
        return error;
    if (offset > most || nbytes > most - offset)
        return CUDA_ERROR_INVALID_VALUE;
    *at = (void *)(uintptr_t)(start + offset);
    return 0;
}

static bool is_to_device(int direction) { return direction == HOST_TO_DEVICE || direction >= DEVICE_TO_DEVICE; }

static bool is_from_device(int direction) { return direction >= DEVICE_TO_HOST; }

CUDART_API int cudaMemcpyToSymbol(const void *symbol, const void *from, size_t nbytes, size_t offset, int direction) {
    void *at;
    int error = is_to_device(direction) ? in_symbol(symbol, nbytes, offset, &at) : RT_DIRECTION;
    return error ? rt_result(error) : cudaMemcpy(at, from, nbytes, direction);
}

CUDART_API int cudaMemcpyToSymbolAsync(const void *symbol, const void *from, size_t nbytes, size_t offset,
                                       int direction, CUstream stream) {
    void *at;
    int error = is_to_device(direction) ? in_symbol(symbol, nbytes, offset, &at) : RT_DIRECTION;
    return error ? rt_result(error) : cudaMemcpyAsync(at, from, nbytes, direction, stream);
}

CUDART_API int cudaMemcpyFromSymbol(void *to, const void *symbol, size_t nbytes, size_t offset, int direction) {
    void *at;
    int error = is_from_device(direction) ? in_symbol(symbol, nbytes, offset, &at) : RT_DIRECTION;
    return error ? rt_result(error) : cudaMemcpy(to, at, nbytes, direction);
}

CUDART_API int cudaMemcpyFromSymbolAsync(void *to, const void *symbol, size_t nbytes, size_t offset, int direction,
                                         CUstream stream) {
    void *at;
    int error = is_from_device(direction) ? in_symbol(symbol, nbytes, offset, &at) : RT_DIRECTION;
    return error ? rt_result(error) : cudaMemcpyAsync(to, at, nbytes, direction, stream);
}

/* -- copies of rows and boxes -------------------------------------------------------------------------------------- */

int rt_direction(int direction, int *from, int *to) {
    static const int types[][2] = {[HOST_TO_HOST] = {CU_MEMORY_HOST, CU_MEMORY_HOST},
                                   [HOST_TO_DEVICE] = {CU_MEMORY_HOST, CU_MEMORY_DEVICE},
                                   [DEVICE_TO_HOST] = {CU_MEMORY_DEVICE, CU_MEMORY_HOST},
                                   [DEVICE_TO_DEVICE] = {CU_MEMORY_DEVICE, CU_MEMORY_DEVICE},
                                   [BY_ADDRESS] = {CU_MEMORY_UNIFIED, CU_MEMORY_UNIFIED}};
    if (direction < 0 || direction > BY_ADDRESS)
        return RT_DIRECTION;
    *from = types[direction][0];
    *to = types[direction][1];
    return 0;
}

int rt_copy2(struct cu_copy2 *c, void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
             size_t height, int direction) {
    *c = (struct cu_copy2){.from = {.host = from, .device = address(from), .pitch = from_pitch},
                           .to = {.host = to, .device = address(to), .pitch = to_pitch},
                           .width = width,
                           .height = height};
    int error = rt_direction(direction, &c->from.type, &c->to.type);
    return error || (width <= to_pitch && width <= from_pitch) ? error : RT_PITCH;
}

static struct cu_end3 end3(const struct cuda_pitched *p, const struct cuda_position *at, int type) {
    return (struct cu_end3){.x = at->x,
                            .y = at->y,
                            .z = at->z,
                            .type = type,
                            .host = p->base,
                            .device = address(p->base),
                            .pitch = p->pitch,
                            .height = p->height};
}

int rt_copy3(const struct cuda_copy3 *c, struct cu_copy3 *to) {
    int types[2], error = c ? rt_direction(c->direction, &types[0], &types[1]) : CUDA_ERROR_INVALID_VALUE;
    if (error)
        return error;
    if (c->from_array || c->to_array)
        return rt_refuse("a copy with a cudaArray");
    if (c->extent.width > c->from.pitch || c->extent.width > c->to.pitch)
        return RT_PITCH;
    *to = (struct cu_copy3){.from = end3(&c->from, &c->from_position, types[0]),
                            .to = end3(&c->to, &c->to_position, types[1]),
                            .width = c->extent.width,
                            .height = c->extent.height,
                            .depth = c->extent.depth};
    return 0;
}

static bool is_empty(struct cuda_extent e) { return !e.width || !e.height || !e.depth; }

CUDART_API int cudaMemcpy3DAsync(void *copy, CUstream stream) {
    const struct cuda_copy3 *c = copy;
    struct cu_copy3 d;
    int error = rt_enter();
    if (!error && !(error = rt_copy3(c, &d)) && !is_empty(c->extent))
        error = cuMemcpy3DAsync_v2(&d, stream);
    return rt_result(error);
}

CUDART_API int cudaMemcpy3D(void *copy) {
    const struct cuda_copy3 *c = copy;
    struct cu_copy3 d;
    int error = rt_enter();
    if (!error && !(error = rt_copy3(c, &d)) && !is_empty(c->extent))
        error = cuMemcpy3D_v2(&d);
    return rt_result(error);
}

struct peer_copy3 {
    void *from_array;
    struct cuda_position from_position;
    struct cuda_pitched from;
    int32_t from_device;
    void *to_array;
    struct cuda_position to_position;
    struct cuda_pitched to;
    int32_t to_device;
    struct cuda_extent extent;
};

/* Translate a copy between devices. The devices are not needed, because unified addresses determine them. */
static int of_peers(const struct peer_copy3 *p, struct cuda_copy3 *c) {
    if (!p)
        return CUDA_ERROR_INVALID_VALUE;
    *c = (struct cuda_copy3){p->from_array, p->from_position, p->from,   p->to_array, p->to_position,
                             p->to,         p->extent,        BY_ADDRESS};
    return 0;
}

CUDART_API int cudaMemcpy3DPeer(void *copy) {
    struct cuda_copy3 c;
    int error = of_peers(copy, &c);
    return error ? rt_result(error) : cudaMemcpy3D(&c);
}

CUDART_API int cudaMemcpy3DPeerAsync(void *copy, CUstream stream) {
    struct cuda_copy3 c;
    int error = of_peers(copy, &c);
    return error ? rt_result(error) : cudaMemcpy3DAsync(&c, stream);
}

/* -- fills --------------------------------------------------------------------------------------------------------- */

CUDART_API int cudaMemset3DAsync(struct cuda_pitched to, int value, struct cuda_extent extent, CUstream stream) {
    int error = 0;
    for (size_t z = 0; z < extent.depth && !error; z++)
        error = cudaMemset2DAsync((char *)to.base + z * to.pitch * to.height, to.pitch, value, extent.width,
                                  extent.height, stream);
    return error;
}

CUDART_API int cudaMemset3D(struct cuda_pitched to, int value, struct cuda_extent extent) {
    int error = 0;
    for (size_t z = 0; z < extent.depth && !error; z++)
        error = cudaMemset2D((char *)to.base + z * to.pitch * to.height, to.pitch, value, extent.width, extent.height);
    return error;
}
