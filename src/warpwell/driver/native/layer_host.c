/* Host functions: functions of the program that run in the order of a stream, after earlier work and before later work.
 *
 * Workers know nothing of them. An event is recorded behind the work before a function; one thread in the program polls
 * these events, and runs the functions that are due. Until a function has run, its stream is *held*: calls to the
 * stream wait in the program. Calls to the legacy stream wait, too, while a blocking stream is held, and the reverse.
 * So calls that follow a function are posted after it has run. A second function of a held stream is queued without
 * waiting. The thread exits when the queue has been empty for IDLE_MS.
 *
 * In a host function, all calls of the driver return NOT_PERMITTED.
 */
#include "layer.h"
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define IDLE_MS 500
#define LEAST_STEP 20000l /* ns between two polls; doubles up to MOST_STEP */
#define MOST_STEP 1000000l

/* -- the thread ---------------------------------------------------------------------------------------------------- */

static struct ww_host *current; /* the function that is running */
static bool running;

/* Return NOT_READY, 0 if a function is due, or the error that ended its context. */
static int is_due(const struct ww_host *h) {
    if (h->due && !h->due(h->data))
        return CUDA_ERROR_NOT_READY;
    if (h->life != atomic_load(&h->device->life))
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    if (h->due)
        return 0;
    if (!h->event)
        return ww_context_code(h->device);
    return ww_call_event(h->device, WW_OP_EVENT_QUERY, 0, h->event, 0, NULL, 0);
}

static bool behind_another(const struct ww_host *one) {
    for (const struct ww_host *h = ww_hosts; h != one; h = h->next)
        if (one->stream && h->device == one->device && h->stream == one->stream && h->life == one->life)
            return true;
    return false;
}

/* Return a function that is due, and the result of is_due for it, or NULL. The caller holds ww_hosts_lock, which is
 * released during queries. */
static struct ww_host *next_due(int *code) {
    for (struct ww_host *h = ww_hosts; h; h = h->next) {
        if (behind_another(h))
            continue;
        pthread_mutex_unlock(&ww_hosts_lock); /* `h` stays: only this thread removes functions */
        *code = is_due(h);
        pthread_mutex_lock(&ww_hosts_lock);
        if (*code != CUDA_ERROR_NOT_READY)
            return h;
    }
    return NULL;
}

static void run(struct ww_host *h, int code) {
    ww_in_host_function = true;
    if (h->callback)
        h->callback(h->handle, code, h->data);
    else if (h->run && !code)
        h->run(h->data);
    ww_in_host_function = false;
    if (h->then)
        h->then(h->data, code);
    if (h->event && !h->lent)
        ww_event_end(h->device, h->life, h->event);
}

static void take_out(struct ww_host *h) {
    struct ww_host **at = &ww_hosts;
    while (*at != h)
        at = &(*at)->next;
    *at = h->next;
    atomic_fetch_sub(&h->device->holds, 1);
    free(h);
    pthread_cond_broadcast(&ww_hosts_changed);
}

static void *serve(void *unused) {
    long step = LEAST_STEP;
    ww_in_host_thread = true;
    pthread_mutex_lock(&ww_hosts_lock);
    for (;;) {
        int code, gone = 0;
        struct ww_host *h = next_due(&code);
        if (h) {
            current = h;
            pthread_mutex_unlock(&ww_hosts_lock);
            run(h, code);
            pthread_mutex_lock(&ww_hosts_lock);
            current = NULL;
            take_out(h);
            step = LEAST_STEP;
        } else if (ww_hosts) {
            struct timespec t = {.tv_nsec = step};
            pthread_mutex_unlock(&ww_hosts_lock);
            nanosleep(&t, NULL);
            pthread_mutex_lock(&ww_hosts_lock);
            step = step * 2 < MOST_STEP ? step * 2 : MOST_STEP;
        } else {
            struct timespec t;
            clock_gettime(CLOCK_REALTIME, &t);
            t.tv_nsec += IDLE_MS * 1000000l;
            t.tv_sec += t.tv_nsec / 1000000000l;
            t.tv_nsec %= 1000000000l;
            while (!ww_hosts && !gone)
                gone = pthread_cond_timedwait(&ww_hosts_changed, &ww_hosts_lock, &t);
            step = LEAST_STEP;
            if (!ww_hosts)
                break;
        }
    }
    running = false;
    pthread_mutex_unlock(&ww_hosts_lock);
    return unused;
}

/* Start the thread of host functions, with all signals blocked, unless it is running. ww_hosts_lock is held. */
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

/* -- calls --------------------------------------------------------------------------------------------------------- */

/* Create an event and record it behind all calls that were posted to the stream. */
static int mark(struct ww_device *d, uint32_t stream, uint32_t *event) {
    int error = ww_event_new(d, CU_EVENT_DISABLE_TIMING, event);
    return error ? error : ww_send_event(d, WW_OP_EVENT_RECORD, stream, *event, 0);
}

/* Queue a function. If its stream is not held yet, record the event for which it waits first. */
static int enqueue(struct ww_host *h, uint32_t stream) {
    struct ww_host **at;
    bool joined, inside = ww_in_host_thread; /* queued by the current function: next after it */
    pthread_mutex_lock(&ww_hosts_lock);
    while (h->stream && !inside &&
           ww_hosts_hold(h->device, h->stream, false)) /* another stream's function: wait, like any call */
        pthread_cond_wait(&ww_hosts_changed, &ww_hosts_lock);
    joined = h->stream && !inside && ww_hosts_hold(h->device, h->stream, true);
    pthread_mutex_unlock(&ww_hosts_lock);
    int error = joined || h->lent ? 0 : mark(h->device, stream, &h->event);
    if (error)
        return error;
    pthread_mutex_lock(&ww_hosts_lock);
    if (joined && !ww_hosts_hold(h->device, h->stream, true))
        h->event = 0; /* the earlier functions have run, and no work was posted since: due at once */
    for (at = &ww_hosts; *at && !(inside && *at == current); at = &(*at)->next)
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
    pthread_cond_broadcast(&ww_hosts_changed);
    pthread_mutex_unlock(&ww_hosts_lock);
    return error;
}

int ww_host_post(struct ww_device *d, uint32_t stream, bool holds_it, const struct ww_host *what) {
    struct ww_host *h = malloc(sizeof *h);
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

struct later {
    struct ww_device *device;
    uint32_t stream;
    void (*then)(void *, int);
    void *data;
};

/* The stream's earlier functions have run and have posted their work, so that an event can be recorded behind it. */
static void after_all(void *data, int code) {
    struct later l = *(struct later *)data;
    free(data);
    if (code || ww_host_after(l.device, l.stream, l.then, l.data))
        l.then(l.data, code ? code : CUDA_ERROR_UNKNOWN);
}

int ww_host_after(struct ww_device *d, uint32_t stream, void (*then)(void *, int), void *data) {
    if (ww_in_host_thread || !atomic_load(&d->holds) || !ww_host_held(d, stream))
        return ww_host_post(d, stream, false, &(struct ww_host){.then = then, .data = data});
    struct later *l = malloc(sizeof *l);
    if (!l)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *l = (struct later){d, stream, then, data};
    int error = ww_host_post(d, stream, true, &(struct ww_host){.then = after_all, .data = l});
    if (error)
        free(l);
    return error;
}
