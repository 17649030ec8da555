/* The fake driver: calls made of other calls: resets of contexts, older names, callbacks, files, pitched memory. */
#include "fake.h"
#include "gen_calls.h"
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Destroy all streams, memory and other objects of a context; lock held. */
static void end_context(CUcontext context) {
    fake_end_life(context);
    fake_end_streams(context);
    fake_end_memory(context);
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    int error = fake_device(device);
    if (error)
        return error;
    pthread_mutex_lock(&fake_lock);
    CUcontext context = &fake_contexts[device];
    error = context->retained ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
    if (!error && !--context->retained)
        end_context(context);
    pthread_mutex_unlock(&fake_lock);
    return error;
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    int error = fake_device(device);
    if (error)
        return error;
    pthread_mutex_lock(&fake_lock);
    end_context(&fake_contexts[device]);
    pthread_mutex_unlock(&fake_lock);
    return CUDA_SUCCESS;
}

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

/* -- rows and boxes: each row is copied or filled by itself, in unified addresses ---------------------------------- */

static uint64_t row_of(const struct cu_end3 *e, size_t y, size_t z) {
    uint64_t base = e->type == CU_MEMORY_HOST ? (uintptr_t)e->host : e->device;
    return base + e->x + e->pitch * (e->y + y + e->height * (e->z + z));
}

static CUresult copy_box(int per_thread, const struct cu_copy3 *c, CUstream stream, bool waits) {
    CUresult result = CUDA_SUCCESS;
    for (size_t z = 0; z < c->depth && !result; z++)
        for (size_t y = 0; y < c->height && !result; y++) {
            uint64_t to = row_of(&c->to, y, z), from = row_of(&c->from, y, z);
            result = waits ? ww_cuMemcpy(per_thread, to, from, c->width) : cuMemcpyAsync(to, from, c->width, stream);
        }
    return result;
}

static struct cu_end3 end3(const struct cu_end2 *e) {
    return (struct cu_end3){
        .x = e->x, .y = e->y, .type = e->type, .host = e->host, .device = e->device, .pitch = e->pitch};
}

static struct cu_copy3 copy3(const struct cu_copy2 *c) {
    return (struct cu_copy3){
        .from = end3(&c->from), .to = end3(&c->to), .width = c->width, .height = c->height, .depth = 1};
}

CUresult ww_cuMemcpy2DUnaligned_v2(int per_thread, void *copy) {
    struct cu_copy3 c = copy3(copy);
    return copy_box(per_thread, &c, NULL, true);
}

CUresult cuMemcpy2DAsync_v2(void *copy, CUstream stream) {
    struct cu_copy3 c = copy3(copy);
    return copy_box(0, &c, stream, false);
}

CUresult ww_cuMemcpy3D_v2(int per_thread, void *copy) { return copy_box(per_thread, copy, NULL, true); }

CUresult cuMemcpy3DAsync_v2(void *copy, CUstream stream) { return copy_box(0, copy, stream, false); }

CUresult ww_cuMemsetD2D8_v2(int per_thread, CUdeviceptr to, size_t pitch, uint8_t value, size_t width, size_t height) {
    CUresult result = CUDA_SUCCESS;
    for (size_t y = 0; y < height && !result; y++)
        result = ww_cuMemsetD8_v2(per_thread, to + y * pitch, value, width);
    return result;
}

CUresult cuMemsetD2D8Async(CUdeviceptr to, size_t pitch, uint8_t value, size_t width, size_t height, CUstream stream) {
    CUresult result = CUDA_SUCCESS;
    for (size_t y = 0; y < height && !result; y++)
        result = cuMemsetD8Async(to + y * pitch, value, width, stream);
    return result;
}

CUresult cuModuleLoadFatBinary(CUmodule *module, const void *image) { return cuModuleLoadData(module, image); }

/* Wait for all work that has been enqueued in a stream; the legacy stream also waits for all blocking streams. */
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

/* Wait for the earlier work of the stream, then run the callback on the caller's thread. */
CUresult cuStreamAddCallback(CUstream stream, void *callback, void *data, unsigned flags) {
    void (*run)(CUstream, CUresult, void *);
    CUresult result = flags ? CUDA_ERROR_INVALID_VALUE : reach(stream);
    *(void **)&run = callback;
    if (!flags)
        run(stream, result, data);
    return result;
}

/* Return the bytes of a file with a 0 after them, from malloc, or NULL if the file cannot be read. */
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
