/* Calls that follow from others: older names, host functions, files, memory with a pitch. */
#include "fake.h"
#include "gen_calls.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

CUresult cuDevicePrimaryCtxRelease(CUdevice device) { return cuDevicePrimaryCtxRelease_v2(device); }

CUresult cuDevicePrimaryCtxReset(CUdevice device) { return cuDevicePrimaryCtxReset_v2(device); }

CUresult cuCtxPushCurrent(CUcontext context) { return cuCtxPushCurrent_v2(context); }

CUresult cuCtxPopCurrent(CUcontext *context) { return cuCtxPopCurrent_v2(context); }

CUresult cuStreamDestroy(CUstream stream) { return cuStreamDestroy_v2(stream); }

CUresult cuEventDestroy(CUevent event) { return cuEventDestroy_v2(event); }

CUresult cuMemAllocPitch_v2(CUdeviceptr *address, size_t *pitch, size_t width, size_t height, unsigned element) {
    (void)element;
    *pitch = (width + 511) & ~(size_t)511;
    return cuMemAlloc_v2(address, *pitch * height);
}

CUresult cuModuleLoadFatBinary(CUmodule *module, const void *image) { return cuModuleLoadData(module, image); }

/* Wait until a stream comes to a call that is posted now: the legacy one behind all blocking streams. */
static CUresult reach(CUstream stream) {
    CUevent event;
    CUresult result = cuEventCreate(&event, 0);
    if (result)
        return result;
    result = cuEventRecord(event, stream);
    if (!result)
        result = cuEventSynchronize(event);
    cuEventDestroy_v2(event);
    return result;
}

/* Callbacks run on the caller's thread, when the stream has got there. */
CUresult cuStreamAddCallback(CUstream stream, void *callback, void *data, unsigned flags) {
    void (*run)(CUstream, CUresult, void *);
    CUresult result = flags ? CUDA_ERROR_INVALID_VALUE : reach(stream);
    *(void **)&run = callback;
    if (!flags)
        run(stream, result, data);
    return result;
}

/* A file's bytes with a 0 behind them, malloc'd; NULL: there is none. */
static char *read_whole(const char *path) {
    FILE *f = fopen(path, "rb");
    char *all = NULL;
    long n = -1;
    if (f && !fseek(f, 0, SEEK_END) && (n = ftell(f)) >= 0 && !fseek(f, 0, SEEK_SET) &&
        (all = calloc(1, (size_t)n + 1)))
        n = (long)fread(all, 1, (size_t)n, f);
    if (f)
        fclose(f);
    return all;
}

CUresult cuModuleLoad(CUmodule *module, const char *path) {
    char *image = read_whole(path);
    CUresult result = image ? cuModuleLoadData(module, image) : CUDA_ERROR_FILE_NOT_FOUND;
    free(image);
    return result;
}

CUresult cuLibraryLoadFromFile(CUlibrary *library, const char *path, int *names, void **values, unsigned n,
                               int *library_names, void **library_values, unsigned nlibrary) {
    char *image = read_whole(path);
    CUresult result = CUDA_ERROR_FILE_NOT_FOUND;
    if (image)
        result = cuLibraryLoadData(library, image, names, values, n, library_names, library_values, nlibrary);
    free(image);
    return result;
}
