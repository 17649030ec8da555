/* Managed memory: pinned host memory at the same address in the program and in the worker. The program accesses it at
 * the speed of host memory, also while kernels use it; kernels access it over the bus, and pages do not migrate. So
 * prefetches and advice have no effect. Only one worker can map such memory, so programs with several devices get an
 * error.
 */
#include "layer.h"

bool ww_manages(const struct ww_device *d) {
    return layer.ndevices == 1 && !d->facts.remote && d->facts.attributes[CU_DEVICE_MANAGED_MEMORY] &&
           d->facts.attributes[CU_DEVICE_CAN_MAP_HOST];
}

int ww_managed_check(const struct ww_device *d) {
    static _Atomic int warned;
    if (!ww_manages(d))
        return ww_refused(layer.ndevices > 1 ? "managed memory of a program with several devices"
                                             : "managed memory on this device");
    if (!atomic_exchange(&warned, 1))
        ww_say("managed memory is pinned memory of the host here: kernels reach it over the bus");
    return 0;
}

int ww_body_cuMemAllocManaged(struct ww_device *d, CUdeviceptr *address, size_t nbytes) {
    void *at = NULL;
    int error = ww_pin(d, &at, nbytes, WW_MANAGED, NULL);
    if (!error)
        *address = (uintptr_t)at;
    return error;
}

/* -- hints --------------------------------------------------------------------------------------------------------- */

/* Return 0 if a range is managed memory, and the location is valid. */
int ww_hint(CUdeviceptr address, size_t nbytes, int kind, int id) {
    struct ww_span r;
    bool place = kind == CU_LOCATION_DEVICE ? id >= 0 && id < layer.ndevices
                                            : kind >= CU_LOCATION_HOST && kind <= CU_LOCATION_NUMA_CURRENT;
    int error = ww_ready();
    if (error || !nbytes || !place)
        return error ? error : nbytes ? CUDA_ERROR_INVALID_DEVICE : CUDA_ERROR_INVALID_VALUE;
    bool managed = ww_range_owner(address, &r) && r.type == WW_PINNED_MEMORY && r.flags & WW_MANAGED;
    return managed && ww_range_holds(&r, address, nbytes) ? 0 : CUDA_ERROR_INVALID_VALUE;
}
