/* Host functions: code of the program that runs when a stream gets there, and before what comes behind it.
 *
 * Nothing of this travels. Behind the work before a function an event is recorded; one thread asks for these events,
 * and runs what is due. Until a function has run its stream is *held*: whoever posts to it waits, and whoever posts to
 * the legacy stream while a blocking one is held, or the reverse. So a call behind a function is posted after it. A
 * second function of a held stream joins its queue at once. The thread ends when it has had nothing to do for a while;
 * no other thread is ever made in a program.
 *
 * The functions may not call the driver: there every call returns NOT_PERMITTED.
 */
#include "layer.h"
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define IDLE_MS 500
#define LEAST_STEP 20000l /* ns between looks, growing */
#define MOST_STEP 1000000l

struct host { /* a function that has not run yet; in order of posting */
    struct host *next;
    struct ww_device *device;
    uint64_t life;
    uint32_t stream, event; /* event 0: due when those of its stream before it have run */
    bool blocking, lent;    /* lent: the event is somebody else's */
    CUstream handle;
    void (*run)(void *);
    void (*callback)(CUstream, CUresult, void *);
    bool (*due)(void *);       /* in place of an event; it holds nothing up */
    void (*then)(void *, int); /* posts what comes behind it, while the stream is held */
    void *data;
};

_Thread_local bool ww_in_host_function, ww_in_host_thread;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct host *first, *current; /* current: that runs */
static bool running;
static unsigned char non_blocking[WW_DEVICES][WW_IDS / 8];

void ww_host_stream(struct ww_device *d, uint32_t stream, bool free_one) {
    pthread_mutex_lock(&lock);
    unsigned char *byte = &non_blocking[d - layer.devices][stream / 8], bit = (unsigned char)(1u << stream % 8);
    *byte = (unsigned char)(free_one ? *byte | bit : *byte & ~bit);
    pthread_mutex_unlock(&lock);
}

bool ww_host_blocking(const struct ww_device *d, uint32_t stream) {
    return !(non_blocking[d - layer.devices][stream / 8] >> stream % 8 & 1);
}

/* Say whether a call to the stream must wait for the function. */
static bool holds(const struct host *h, const struct ww_device *d, uint32_t stream) {
    if (h->device != d || h->life != atomic_load(&d->life))
        return false;
    if (h->stream == stream)
        return true;
    return (stream == WW_LEGACY && h->blocking) || (h->stream == WW_LEGACY && ww_host_blocking(d, stream));
}

static bool held(const struct ww_device *d, uint32_t stream, bool itself) {
    for (const struct host *h = first; h; h = h->next)
        if ((!stream && !h->due && h->device == d && h->life == atomic_load(&d->life)) ||
            (stream && holds(h, d, stream) && (itself || h->stream != stream)))
            return true;
    return false;
}

bool ww_host_held(struct ww_device *d, uint32_t stream) {
    pthread_mutex_lock(&lock);
    bool yes = held(d, stream, true);
    pthread_mutex_unlock(&lock);
    return yes;
}

bool ww_host_has(struct ww_device *d, uint32_t stream) {
    bool yes = false;
    pthread_mutex_lock(&lock);
    for (const struct host *h = first; h && !yes; h = h->next)
        yes = h->device == d && h->stream == stream && h->life == atomic_load(&d->life);
    pthread_mutex_unlock(&lock);
    return yes;
}

/* Wait until nothing holds the stream; 0: until nothing holds any of the device. What runs in the thread of host
 * functions is itself what others wait for. */
void ww_host_wait(struct ww_device *d, uint32_t stream) {
    if (ww_in_host_thread)
        return;
    pthread_mutex_lock(&lock);
    while (held(d, stream, true))
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

/* -- the thread --------------------------------------------------------------------------------------------------- */

/* What the worker says about a function's event: NOT_READY, 0, or the error that ended the context. */
static int is_due(const struct host *h) {
    struct ww_args_event args = {h->event, 0};
    if (h->due && !h->due(h->data))
        return CUDA_ERROR_NOT_READY;
    if (h->life != atomic_load(&h->device->life))
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    if (h->due)
        return 0;
    if (!h->event)
        return ww_context_code(h->device);
    return ww_call(h->device, WW_OP_EVENT_QUERY, 0, &args, sizeof args, NULL, 0, NULL);
}

static bool behind_another(const struct host *one) {
    for (const struct host *h = first; h != one; h = h->next)
        if (one->stream && h->device == one->device && h->stream == one->stream && h->life == one->life)
            return true;
    return false;
}

/* A function that is due, with the code of its stream; NULL: none. The lock is held, but not while the worker is asked.
 */
static struct host *next_due(int *code) {
    for (struct host *h = first; h; h = h->next) {
        if (behind_another(h))
            continue;
        pthread_mutex_unlock(&lock); /* only this thread takes any out: h stays */
        *code = is_due(h);
        pthread_mutex_lock(&lock);
        if (*code != CUDA_ERROR_NOT_READY)
            return h;
    }
    return NULL;
}

static void run(struct host *h, int code) {
    struct ww_args_event args = {h->event, 0};
    ww_in_host_function = true;
    if (h->callback)
        h->callback(h->handle, code, h->data);
    else if (h->run && !code)
        h->run(h->data);
    ww_in_host_function = false;
    if (h->then)
        h->then(h->data, code);
    if (h->event && !h->lent && h->life == atomic_load(&h->device->life) &&
        !ww_send(h->device, WW_OP_EVENT_DESTROY, 0, &args, sizeof args))
        ww_id_give(h->device, &h->device->events, h->life, h->event);
}

static void take_out(struct host *h) {
    struct host **at = &first;
    while (*at != h)
        at = &(*at)->next;
    *at = h->next;
    atomic_fetch_sub(&h->device->holds, 1);
    free(h);
    pthread_cond_broadcast(&changed);
}

static void *serve(void *unused) {
    long step = LEAST_STEP;
    ww_in_host_thread = true;
    pthread_mutex_lock(&lock);
    for (;;) {
        int code, gone = 0;
        struct host *h = next_due(&code);
        if (h) {
            current = h;
            pthread_mutex_unlock(&lock);
            run(h, code);
            pthread_mutex_lock(&lock);
            current = NULL;
            take_out(h);
            step = LEAST_STEP;
        } else if (first) {
            struct timespec t = {.tv_nsec = step};
            pthread_mutex_unlock(&lock);
            nanosleep(&t, NULL);
            pthread_mutex_lock(&lock);
            step = step * 2 < MOST_STEP ? step * 2 : MOST_STEP;
        } else {
            struct timespec t;
            clock_gettime(CLOCK_REALTIME, &t);
            t.tv_nsec += IDLE_MS * 1000000l;
            t.tv_sec += t.tv_nsec / 1000000000l;
            t.tv_nsec %= 1000000000l;
            while (!first && !gone)
                gone = pthread_cond_timedwait(&changed, &lock, &t);
            step = LEAST_STEP;
            if (!first)
                break;
        }
    }
    running = false;
    pthread_mutex_unlock(&lock);
    return unused;
}

/* Make the thread where there is none; it takes no signals. The lock is held. */
static int start_thread(void) {
    pthread_attr_t detached;
    pthread_t thread;
    sigset_t all, before;
    if (running)
        return 0;
    sigfillset(&all);
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    running = !pthread_create(&thread, &detached, serve, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&detached);
    return running ? 0 : CUDA_ERROR_OPERATING_SYSTEM;
}

/* -- calls -------------------------------------------------------------------------------------------------------- */

/* An event behind all that was posted to the stream. */
static int mark(struct ww_device *d, uint32_t stream, uint32_t *event) {
    int error = ww_id_take(&d->events, event);
    struct ww_args_event args = {*event, CU_EVENT_DISABLE_TIMING};
    if (error || (error = ww_send(d, WW_OP_EVENT_CREATE, 0, &args, sizeof args)))
        return error;
    args.flags = 0;
    return ww_send(d, WW_OP_EVENT_RECORD, stream, &args, sizeof args);
}

/* Put a function into the queue; where its stream is not held yet, the event is recorded first. */
static int enqueue(struct host *h, uint32_t stream) {
    struct host **at;
    bool joined, inside = ww_in_host_thread; /* the rest of what runs there: at its place in the queue */
    pthread_mutex_lock(&lock);
    while (h->stream && !inside && held(h->device, h->stream, false)) /* another stream's: as for any other call */
        pthread_cond_wait(&changed, &lock);
    joined = h->stream && !inside && held(h->device, h->stream, true);
    pthread_mutex_unlock(&lock);
    int error = joined || h->lent ? 0 : mark(h->device, stream, &h->event);
    if (error)
        return error;
    pthread_mutex_lock(&lock);
    if (joined && !held(h->device, h->stream, true))
        h->event = 0; /* it has run meanwhile, and nothing was posted since: due at once */
    for (at = &first; *at && !(inside && *at == current); at = &(*at)->next)
        ;
    if (*at)
        at = &(*at)->next;
    h->next = *at;
    *at = h;
    atomic_fetch_add(&h->device->holds, 1);
    if ((error = start_thread())) {
        *at = h->next;
        atomic_fetch_sub(&h->device->holds, 1);
    }
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return error;
}

static int add(const struct host *what) {
    struct host *h = malloc(sizeof *h);
    int error = ww_need(&((struct host *)what)->device);
    if (!h || error) {
        free(h);
        return error ? error : CUDA_ERROR_OUT_OF_MEMORY;
    }
    *h = *what;
    bool captured = false;
    error = ww_stream(h->handle, 0, &h->device, &h->stream);
    if (!error)
        error = ww_earlier(h->device);
    if (!error)
        error = ww_captured(h->device, h->stream, &captured);
    if (captured && !error) {
        struct ww_work work = {.kind = CU_NODE_HOST, .device = h->device, .of.host = {h->run, h->data}};
        error = h->run ? ww_capture_add(h->device, h->stream, &work) : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        free(h);
        return error;
    }
    if (!error) {
        h->life = atomic_load(&h->device->life);
        h->blocking = ww_host_blocking(h->device, h->stream);
        error = enqueue(h, h->stream);
    }
    if (error)
        free(h);
    return error;
}

static int add_to(struct ww_device *d, uint32_t stream, bool holds_it, const struct host *what) {
    struct host *h = malloc(sizeof *h);
    if (!h)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *h = *what;
    h->device = d;
    h->life = atomic_load(&d->life);
    h->stream = holds_it ? stream : 0;
    h->blocking = holds_it && ww_host_blocking(d, stream);
    int error = enqueue(h, stream);
    if (error)
        free(h);
    return error;
}

int ww_host_add(struct ww_device *d, uint32_t stream, void (*run)(void *), void (*then)(void *, int), void *data) {
    return add_to(d, stream, true, &(struct host){.run = run, .then = then, .data = data});
}

int ww_host_when(struct ww_device *d, uint32_t event, void (*then)(void *, int), void *data) {
    return add_to(d, 0, false, &(struct host){.then = then, .data = data, .event = event, .lent = true});
}

int ww_host_once(struct ww_device *d, bool (*due)(void *), void (*then)(void *, int), void *data) {
    return add_to(d, 0, false, &(struct host){.due = due, .then = then, .data = data, .lent = true});
}

struct later {
    struct ww_device *device;
    uint32_t stream;
    void (*then)(void *, int);
    void *data;
};

/* The host functions before have run, and what they held back is posted: now the stream's end can be marked. */
static void after_all(void *data, int code) {
    struct later l = *(struct later *)data;
    free(data);
    if (code || ww_host_after(l.device, l.stream, l.then, l.data))
        l.then(l.data, code ? code : CUDA_ERROR_UNKNOWN);
}

int ww_host_after(struct ww_device *d, uint32_t stream, void (*then)(void *, int), void *data) {
    if (ww_in_host_thread || !atomic_load(&d->holds) || !ww_host_held(d, stream))
        return add_to(d, stream, false, &(struct host){.then = then, .data = data});
    struct later *l = malloc(sizeof *l);
    if (!l)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *l = (struct later){d, stream, then, data};
    int error = ww_host_add(d, stream, NULL, after_all, l);
    if (error)
        free(l);
    return error;
}

CUresult cuLaunchHostFunc(CUstream stream, void *function, void *data) {
    struct host h = {.handle = stream, .data = data};
    *(void **)&h.run = function;
    return function ? add(&h) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuStreamAddCallback(CUstream stream, void *callback, void *data, unsigned flags) {
    struct host h = {.handle = stream, .data = data};
    *(void **)&h.callback = callback;
    return callback && !flags ? add(&h) : CUDA_ERROR_INVALID_VALUE;
}
