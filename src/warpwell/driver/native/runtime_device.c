/* Devices, their properties and flags, entry points of the driver, channel descriptors. See runtime.h. */
#include "runtime.h"

#include <string.h>

#define MAP_HOST 8u /* cudaDeviceMapHost: always set */
#define FLAGS_GIVEN 1u
#define PER_THREAD 2u /* cudaEnablePerThreadDefaultStream, and the same flag of cuGetProcAddress */

struct properties { /* start of cudaDeviceProp; rt_properties describes the fields that follow */
    char name[256];
    struct cu_uuid uuid;
    char luid[8];
    uint32_t luid_mask;
    size_t total;
};

#if CUDART_MAJOR == 12
#define PROPERTY_BYTES 1032
#else
#define PROPERTY_BYTES 1008
#endif

/* -- choice of a device -------------------------------------------------------------------------------------------- */

CUDART_API int cudaGetDeviceCount(int *count) {
    int error = count ? rt_start() : CUDA_ERROR_INVALID_VALUE;
    if (count && error == CUDA_ERROR_NO_DEVICE)
        *count = 0;
    return rt_result(error ? error : cuDeviceGetCount(count));
}

CUDART_API int cudaSetDevice(int device) { return rt_result(rt_use_device(device)); }

CUDART_API int cudaGetDevice(int *device) { return rt_result(device ? rt_device(device) : CUDA_ERROR_INVALID_VALUE); }

/* Set flags of a device's primary context. */
static int set_flags(int device, uint32_t flags) { return cuDevicePrimaryCtxSetFlags_v2(device, flags & ~MAP_HOST); }

CUDART_API int cudaSetDeviceFlags(uint32_t flags) {
    int device, error = rt_device(&device);
    return rt_result(error ? error : set_flags(device, flags));
}

CUDART_API int cudaGetDeviceFlags(uint32_t *flags) {
    int device, is_active, error = flags ? rt_device(&device) : CUDA_ERROR_INVALID_VALUE;
    if (error || (error = cuDevicePrimaryCtxGetState(device, flags, &is_active)))
        return rt_result(error);
    *flags |= MAP_HOST;
    return 0;
}

CUDART_API int cudaInitDevice(int device, uint32_t device_flags, uint32_t flags) {
    CUcontext context;
    int error = flags & ~FLAGS_GIVEN ? CUDA_ERROR_INVALID_VALUE : rt_context(device, &context);
    if (!error && flags & FLAGS_GIVEN)
        error = set_flags(device, device_flags);
    return rt_result(error);
}

CUDART_API int cudaDeviceReset(void) {
    int device, error = rt_device(&device);
    return rt_result(error ? error : rt_reset_device(device));
}

#if CUDART_MAJOR == 12
CUDART_API int cudaThreadExit(void) { return cudaDeviceReset(); }
#endif

/* -- properties ---------------------------------------------------------------------------------------------------- */

CUDART_API int CUDART_V2(cudaGetDeviceProperties)(void *properties, int device) {
    struct properties *p = properties;
    int error = p ? rt_start() : CUDA_ERROR_INVALID_VALUE;
    if (error)
        return rt_result(error);
    memset(p, 0, PROPERTY_BYTES);
    if ((error = cuDeviceGetName(p->name, sizeof p->name, device)) || (error = cuDeviceGetUuid_v2(&p->uuid, device)) ||
        (error = cuDeviceTotalMem_v2(&p->total, device)))
        return rt_result(error);
    for (const struct rt_property *one = rt_properties; one->nbytes; one++) {
        int value = 0;
        if (cuDeviceGetAttribute(&value, one->attribute, device)) /* an older driver */
            value = 0;
        size_t wide = (size_t)value;
        memcpy((char *)properties + one->offset, one->nbytes == sizeof wide ? (void *)&wide : (void *)&value,
               one->nbytes);
    }
    return 0;
}

CUDART_API int cudaChooseDevice(int *device, void *properties) {
    size_t offset = 0;
    int count, wanted[2], error = device && properties ? cudaGetDeviceCount(&count) : CUDA_ERROR_INVALID_VALUE;
    if (error)
        return rt_result(error);
    for (const struct rt_property *one = rt_properties; one->nbytes && !offset; one++)
        offset = one->attribute == CU_DEVICE_MAJOR ? one->offset : 0;
    memcpy(wanted, (char *)properties + offset, sizeof wanted); /* the minor number follows */
    *device = 0;
    for (int i = count - 1; i >= 0; i--) {
        int major = 0, minor = 0;
        cuDeviceGetAttribute(&major, CU_DEVICE_MAJOR, i);
        cuDeviceGetAttribute(&minor, CU_DEVICE_MINOR, i);
        if (major > wanted[0] || (major == wanted[0] && minor >= wanted[1]))
            *device = i;
    }
    return 0;
}

CUDART_API int cudaDriverGetVersion(int *version) {
    return rt_result(version ? cuDriverGetVersion(version) : CUDA_ERROR_INVALID_VALUE);
}

CUDART_API int cudaRuntimeGetVersion(int *version) {
    if (!version)
        return rt_result(CUDA_ERROR_INVALID_VALUE);
    *version = RT_VERSION;
    return 0;
}

/* -- other --------------------------------------------------------------------------------------------------------- */

CUDART_API int cudaStreamGetDevice(CUstream stream, int *device) {
    CUcontext own, context;
    int error = device ? rt_enter() : CUDA_ERROR_INVALID_VALUE;
    if (error || (error = cuStreamGetCtx(stream, &context)) || (error = cuCtxGetCurrent(&own)))
        return rt_result(error);
    if ((error = cuCtxSetCurrent(context)) || (error = cuCtxGetDevice(device))) {
        cuCtxSetCurrent(own);
        return rt_result(error);
    }
    return rt_result(cuCtxSetCurrent(own));
}

static int entry_point(const char *name, void **function, uint32_t version, uint64_t flags, int *status) {
    int found = 0, error = function ? rt_start() : CUDA_ERROR_INVALID_VALUE;
    if (!error)
        error = cuGetProcAddress_v2(name, function, (int)version, flags, &found);
    if (error == CUDA_ERROR_NOT_FOUND && status) /* reported by the status */
        error = 0;
    if (status)
        *status = found;
    return rt_result(error);
}

int rt_cudaGetDriverEntryPoint(const char *name, void **function, uint64_t flags, int *status, int per_thread) {
    return entry_point(name, function, RT_VERSION, flags || !per_thread ? flags : PER_THREAD, status);
}

int rt_cudaGetDriverEntryPointByVersion(const char *name, void **function, uint32_t version, uint64_t flags,
                                        int *status, int per_thread) {
    return entry_point(name, function, version, flags || !per_thread ? flags : PER_THREAD, status);
}

struct channel { /* cudaChannelFormatDesc: bits of each component of a texture */
    int32_t x, y, z, w, type;
};

CUDART_API struct channel cudaCreateChannelDesc(int x, int y, int z, int w, int type) {
    return (struct channel){x, y, z, w, type};
}
