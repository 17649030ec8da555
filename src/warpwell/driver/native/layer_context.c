/* Contexts, and each thread's stack of contexts. A device has one context. The handle of a context is the
 * address of the device's struct ww_device. */
#include "layer.h"
#include <stdlib.h>

struct entry {
    struct ww_device *device;
    bool is_created; /* by cuCtxCreate */
};

struct stack { /* contexts that the calling thread has pushed, the current one last */
    int depth, capacity;
    struct entry *at;
};

static _Thread_local struct stack stack;
static pthread_key_t stack_key;
static pthread_once_t stack_once = PTHREAD_ONCE_INIT;

int ww_ready(void) {
    if (__builtin_expect(atomic_load_explicit(&layer.state, memory_order_acquire) != 2, 0) || layer.forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    return ww_in_host_function ? CUDA_ERROR_NOT_PERMITTED : 0;
}

struct ww_device *ww_current(void) { return stack.depth ? stack.at[stack.depth - 1].device : NULL; }

bool ww_current_is_created(void) { return stack.depth && stack.at[stack.depth - 1].is_created; }

struct ww_device *ww_context(CUcontext h) {
    for (int i = 0; i < layer.ndevices; i++)
        if ((void *)h == &layer.devices[i])
            return &layer.devices[i];
    return NULL;
}

CUcontext ww_context_handle(struct ww_device *d) { return (CUcontext)(void *)d; }

int ww_device_number(const struct ww_device *d) { return (int)(d - layer.devices); }

int ww_context_code(struct ww_device *d) {
    struct ww_channel *c = atomic_load_explicit(&d->channel, memory_order_acquire);
    if (__builtin_expect(!c, 0))
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    int code = (int)atomic_load_explicit(&c->status->sticky, memory_order_relaxed);
    return code ? code : atomic_load_explicit(&c->lost, memory_order_relaxed);
}

int ww_need(struct ww_device **d) {
    int error = ww_ready();
    if (error)
        return error;
    *d = ww_current();
    if (!*d)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (__builtin_expect(!atomic_load_explicit(&(*d)->channel, memory_order_acquire), 0) &&
        ((*d)->retained || (*d)->created))
        return ww_open(*d);
    return ww_context_code(*d);
}

int ww_device_at(CUdevice k, struct ww_device **d) {
    int error = ww_ready();
    if (error)
        return error;
    if (k < 0 || k >= layer.ndevices)
        return CUDA_ERROR_INVALID_DEVICE;
    *d = &layer.devices[k];
    return 0;
}

/* -- the thread's stack -------------------------------------------------------------------------------------------- */

static void free_stack(void *unused) {
    (void)unused;
    free(stack.at);
    stack = (struct stack){0};
}

static void make_stack_key(void) { pthread_key_create(&stack_key, free_stack); }

int ww_context_push(struct ww_device *d, bool is_created) {
    if (stack.depth == stack.capacity) {
        int capacity = stack.capacity ? 2 * stack.capacity : 8;
        struct entry *at = realloc(stack.at, (size_t)capacity * sizeof *at);
        if (!at)
            return CUDA_ERROR_OUT_OF_MEMORY;
        stack.at = at;
        stack.capacity = capacity;
        pthread_once(&stack_once, make_stack_key);
        pthread_setspecific(stack_key, at);
    }
    stack.at[stack.depth++] = (struct entry){d, is_created};
    return 0;
}

int ww_context_set(struct ww_device *d) {
    if (d && !stack.depth)
        return ww_context_push(d, false);
    if (d)
        stack.at[stack.depth - 1] = (struct entry){d, false};
    else
        stack.depth -= stack.depth > 0;
    return 0;
}

int ww_body_cuCtxPopCurrent_v2(CUcontext *context) {
    struct ww_device *d = stack.at[--stack.depth].device;
    if (context)
        *context = ww_context_handle(d);
    return 0;
}

int ww_context_or_current(CUcontext context, struct ww_device **d) {
    int error = ww_ready();
    *d = context ? ww_context(context) : ww_current();
    return error ? error : *d ? 0 : CUDA_ERROR_INVALID_CONTEXT;
}
