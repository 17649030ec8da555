/* Launches. They are checked here against the device and the function, so that invalid launches fail at once with the
 * driver's error codes. */
#include "layer.h"
#include <stdio.h>
#include <stdio_ext.h>
#include <stdlib.h>
#include <string.h>

/* Return the driver's error for a block with too many threads: OUT_OF_RESOURCES if it needs too many registers, else
 * INVALID_VALUE, because the kernel was compiled for fewer threads. */
static int too_many_threads(const struct ww_device *d, const struct ww_fn *f, uint64_t threads) {
    int registers = atomic_load_explicit(&f->attributes[CU_FUNC_REGISTERS], memory_order_relaxed);
    uint64_t of_a_warp = ((uint64_t)(registers > 0 ? registers : 0) * 32 + 255) / 256 * 256; /* in units of 256 */
    uint64_t needed = (threads + 31) / 32 * of_a_warp;
    return needed > (uint64_t)d->facts.attributes[CU_DEVICE_REGISTERS_PER_BLOCK] ? CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
                                                                                 : CUDA_ERROR_INVALID_VALUE;
}

static int check_shape(const struct ww_device *d, struct ww_fn *f, const struct ww_launch *k) {
    const int32_t *have = d->facts.attributes;
    uint64_t threads = 1;
    for (int i = 0; i < 3; i++) {
        if (!k->grid[i] || k->grid[i] > (uint32_t)have[CU_DEVICE_MAX_GRID_X + i])
            return CUDA_ERROR_INVALID_VALUE;
        if (!k->block[i] || k->block[i] > (uint32_t)have[CU_DEVICE_MAX_BLOCK_X + i])
            return CUDA_ERROR_INVALID_VALUE;
        threads *= k->block[i];
    }
    if (threads > (uint32_t)have[CU_DEVICE_MAX_THREADS_PER_BLOCK])
        return CUDA_ERROR_INVALID_VALUE;
    if (threads > (uint32_t)atomic_load_explicit(&f->attributes[CU_FUNC_MAX_THREADS], memory_order_relaxed))
        return too_many_threads(d, f, threads);
    int most = atomic_load_explicit(&f->attributes[CU_FUNC_MAX_DYNAMIC_SHARED], memory_order_relaxed);
    return most >= 0 && k->shared > (uint32_t)most ? CUDA_ERROR_INVALID_VALUE : 0;
}

/* Find the buffer of packed parameters in `extra`, a list of pairs of key and value that ends with CU_LAUNCH_END. */
static int packed(void **extra, const void **buffer, size_t *nbytes) {
    *buffer = NULL;
    *nbytes = 0;
    for (int i = 0; i < 8 && extra[i] != CU_LAUNCH_END; i += 2) {
        if (extra[i] == CU_LAUNCH_BUFFER)
            *buffer = extra[i + 1];
        else if (extra[i] == CU_LAUNCH_BUFFER_SIZE && extra[i + 1])
            *nbytes = *(size_t *)extra[i + 1];
        else
            return CUDA_ERROR_INVALID_VALUE;
    }
    return 0;
}

/* Return 0 if the launch has all parameters of the function. *buffer: packed parameters, or NULL. */
static int check_params(const struct ww_fn *f, const struct ww_launch *k, const void **buffer) {
    size_t nbytes;
    *buffer = NULL;
    if (k->params && k->extra)
        return CUDA_ERROR_INVALID_VALUE;
    if (!f->nparams || k->params)
        return 0;
    if (!k->extra)
        return CUDA_ERROR_INVALID_VALUE;
    int error = packed(k->extra, buffer, &nbytes);
    return error ? error : *buffer && nbytes >= f->param_bytes ? 0 : CUDA_ERROR_INVALID_VALUE;
}

static void pack(const struct ww_fn *f, const struct ww_launch *k, const void *buffer, void *to) {
    if (buffer)
        memcpy(to, buffer, f->param_bytes);
    else
        for (uint32_t i = 0; i < f->nparams; i++)
            memcpy((char *)to + f->params[i].offset, k->params[i], f->params[i].size);
}

int ww_launch_check(struct ww_device *d, const struct ww_launch *k, struct ww_fn **f, const void **buffer) {
    int error = ww_fn_of(k->function, d, f);
    return error || (error = check_shape(d, *f, k)) ? error : check_params(*f, k, buffer);
}

void ww_flush_output(void) {
    if (__fpending(stdout) && !ftrylockfile(stdout)) { /* a thread that holds stdout does not delay a launch */
        fflush_unlocked(stdout);
        funlockfile(stdout);
    }
}

int ww_launch_post(struct ww_device *d, uint32_t stream, const struct ww_fn *f, const struct ww_launch *k,
                   const void *buffer) {
    size_t extra = k->nattributes * sizeof *k->attributes;
    struct ww_post p;
    ww_flush_output();
    int error = ww_begin(d, WW_OP_LAUNCH, stream, 0, sizeof(struct ww_args_launch) + extra + f->param_bytes, &p);
    if (error)
        return error;
    struct ww_args_launch *args = (struct ww_args_launch *)(p.entry + 1);
    *args = (struct ww_args_launch){
        .function = f->object->id, .shape = k->shape, .attributes = k->nattributes, .param_bytes = f->param_bytes};
    if (extra) /* most launches have no attributes */
        memcpy(args + 1, k->attributes, extra);
    pack(f, k, buffer, (char *)(args + 1) + extra);
    return ww_finish(&p);
}

/* -- launches of graph nodes --------------------------------------------------------------------------------------- */

static struct ww_kernel_work *new_work(const struct ww_kernel_work *like, const struct ww_param *at) {
    size_t pointers = sizeof *like + like->nparams * sizeof(void *);
    struct ww_kernel_work *w = malloc(pointers + like->nbytes + 1);
    if (!w)
        return NULL;
    *w = *like;
    w->launch.params = (void **)(w + 1);
    w->packed = (unsigned char *)w + pointers;
    for (uint32_t i = 0; i < w->nparams; i++)
        w->launch.params[i] =
            w->packed + (at ? (size_t)at[i].offset : (size_t)((unsigned char *)like->launch.params[i] - like->packed));
    return w;
}

int ww_kernel_make(struct ww_device *d, const struct ww_launch *k, struct ww_kernel_work **made) {
    const void *buffer;
    struct ww_fn *f;
    int error = ww_launch_check(d, k, &f, &buffer);
    if (error)
        return error;
    struct ww_kernel_work like = {.launch = *k, .nparams = f->nparams, .nbytes = f->param_bytes};
    like.launch.extra = NULL;
    if (!(*made = new_work(&like, f->params)))
        return CUDA_ERROR_OUT_OF_MEMORY;
    pack(f, k, buffer, (*made)->packed);
    return 0;
}

struct ww_kernel_work *ww_kernel_copy(const struct ww_kernel_work *k) {
    struct ww_kernel_work *w = new_work(k, NULL);
    if (w)
        memcpy(w->packed, k->packed, k->nbytes);
    return w;
}

int ww_kernel_post(struct ww_device *d, uint32_t stream, const struct ww_kernel_work *w) {
    struct ww_fn *f;
    int error = ww_fn_of(w->launch.function, d, &f);
    if (error || w->nbytes != f->param_bytes)
        return error ? error : CUDA_ERROR_INVALID_HANDLE;
    return ww_launch_post(d, stream, f, &w->launch, w->packed);
}
