/* Managed memory: pinned memory of the host at one address for program and worker. The program reads and writes it at
 * the speed of its memory, also while kernels do; kernels reach it over the bus, and nothing moves. So prefetches and
 * advice are taken and change nothing. Only one worker maps such memory: a program with several devices is refused it.
 */
#include "layer.h"

#define ATTACH_MOST 2u /* of cuMemAllocManaged: for all streams, for the host first */

bool ww_manages(const struct ww_device *d) {
    return layer.ndevices == 1 && !d->facts.remote && d->facts.attributes[CU_DEVICE_MANAGED_MEMORY] &&
           d->facts.attributes[CU_DEVICE_CAN_MAP_HOST];
}

int ww_managed_check(const struct ww_device *d) {
    static _Atomic int said;
    if (!ww_manages(d))
        return ww_refused(layer.ndevices > 1 ? "managed memory of a program with several devices"
                                             : "managed memory on this device");
    if (!atomic_exchange(&said, 1))
        ww_say("managed memory is pinned memory of the host here: kernels reach it over the bus");
    return 0;
}

CUresult cuMemAllocManaged(CUdeviceptr *address, size_t nbytes, unsigned flags) {
    struct ww_device *d;
    void *at = NULL;
    int error = ww_need(&d);
    if (error || !address || !nbytes || nbytes > SIZE_MAX / 2 || !flags || flags > ATTACH_MOST)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    if ((error = ww_unsafe()) || (error = ww_managed_check(d)))
        return error;
    error = ww_pin(d, &at, nbytes, WW_MANAGED, NULL);
    if (!error)
        *address = (uintptr_t)at;
    return error;
}

/* -- hints ------------------------------------------------------------------------------------------------------------
 */

/* Say whether a range is managed memory, and a place one that memory may be at. */
static int hint(CUdeviceptr address, size_t nbytes, int kind, int id) {
    struct ww_span r;
    bool place = kind == CU_LOCATION_DEVICE ? id >= 0 && id < layer.ndevices
                                            : kind >= CU_LOCATION_HOST && kind <= CU_LOCATION_NUMA_CURRENT;
    int error = ww_ready();
    if (error || !nbytes || !place)
        return error ? error : nbytes ? CUDA_ERROR_INVALID_DEVICE : CUDA_ERROR_INVALID_VALUE;
    bool managed = ww_range_owner(address, &r) && r.what == WW_PINNED_MEMORY && r.flags & WW_MANAGED;
    return managed && ww_range_holds(&r, address, nbytes) ? 0 : CUDA_ERROR_INVALID_VALUE;
}

static int prefetch(CUdeviceptr address, size_t nbytes, int kind, int id, CUstream h) {
    struct ww_device *d;
    uint32_t stream;
    bool captured;
    int error = ww_need(&d);
    if (error || (error = ww_stream(h, &d, &stream)) || (error = ww_captured(d, stream, &captured)))
        return error;
    return captured ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : hint(address, nbytes, kind, id);
}

/* A struct cu_mem_location in a register: its kind, then its number. */
static int kind_of(uint64_t location) { return (int)(uint32_t)location; }

static int id_of(uint64_t location) { return (int)(uint32_t)(location >> 32); }

CUresult cuMemPrefetchAsync(CUdeviceptr address, size_t nbytes, CUdevice device, CUstream h) {
    return prefetch(address, nbytes, device == -1 ? CU_LOCATION_HOST : CU_LOCATION_DEVICE, device, h);
}

CUresult cuMemPrefetchAsync_v2(CUdeviceptr address, size_t nbytes, uint64_t location, unsigned flags, CUstream h) {
    return flags ? CUDA_ERROR_INVALID_VALUE : prefetch(address, nbytes, kind_of(location), id_of(location), h);
}

/* Every stream reads and writes managed memory, wherever it is attached. */
CUresult cuStreamAttachMemAsync(CUstream h, CUdeviceptr address, size_t nbytes, unsigned flags) {
    bool is_one_flag = flags && flags <= 4 && !(flags & (flags - 1));
    return is_one_flag ? prefetch(address, nbytes ? nbytes : 1, CU_LOCATION_HOST, 0, h) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemAdvise(CUdeviceptr address, size_t nbytes, int advice, CUdevice device) {
    bool known = advice >= 1 && advice <= 6;
    return known ? hint(address, nbytes, device == -1 ? CU_LOCATION_HOST : CU_LOCATION_DEVICE, device)
                 : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemAdvise_v2(CUdeviceptr address, size_t nbytes, int advice, uint64_t location) {
    bool anywhere = advice == 1 || advice == 2 || advice == 4; /* read mostly and not, no preferred place */
    if (advice < 1 || advice > 6)
        return CUDA_ERROR_INVALID_VALUE;
    return hint(address, nbytes, anywhere ? CU_LOCATION_HOST : kind_of(location), anywhere ? 0 : id_of(location));
}
