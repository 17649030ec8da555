/* Streams and events by their ids. The layer chooses the ids, so that creating a stream or event does not wait. */
#include "layer.h"
#include <stdlib.h>
#include <string.h>

/* -- streams behind CU_STREAM_PER_THREAD, one for each thread and device ------------------------------------------- */

struct own {
    struct {
        uint32_t id;
        uint64_t life;
    } at[WW_DEVICES];
};

static _Thread_local struct own own;
static pthread_key_t at_end;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static int end_now(const struct ww_object *e) {
    int error = e->life == atomic_load(&e->device->life) ? ww_send_id(e->device, WW_OP_STREAM_DESTROY, 0, e->id) : 0;
    if (!error)
        ww_id_give(e->device, &e->device->streams, e->life, e->id);
    return error;
}

static void end_later(void *data, int code) {
    if (!code)
        end_now(data);
    free(data);
}

/* Destroy a stream, but after its host functions, because these may still post the rest of a graph to the stream. */
int ww_stream_end(const struct ww_object *what) {
    struct ww_object *e;
    if (atomic_load(&what->device->holds) && ww_host_has(what->device, what->id) && (e = malloc(sizeof *e))) {
        memcpy(e, what, sizeof *e);
        if (!ww_host_post(e->device, e->id, true, &(struct ww_host){.then = end_later, .data = e}))
            return 0;
        free(e);
    }
    return end_now(what);
}

/* Destroy the streams of a thread that ends. Destructors of keys run before thread-local memory is freed. */
static void give_back(void *unused) {
    (void)unused;
    for (int i = 0; i < layer.ndevices && !ww_ready(); i++) {
        struct ww_object e = {.device = &layer.devices[i], .life = own.at[i].life, .id = own.at[i].id};
        own.at[i].id = 0;
        if (e.id && e.life == atomic_load(&e.device->life))
            ww_stream_end(&e);
    }
}

static void make_key(void) { pthread_key_create(&at_end, give_back); }

/* Record the type of a new stream. A non-blocking one is not ordered after any synchronous copy yet. */
static void place_stream(struct ww_device *d, uint32_t id, bool non_blocking) {
    WW_LOCK(&d->post);
    struct ww_channel *c = atomic_load(&d->channel);
    if (c)
        c->behind[id] = non_blocking ? 0 : WW_ALWAYS;
    ww_host_stream(d, id, non_blocking);
}

int ww_stream_create(struct ww_device *d, uint32_t flags, int32_t priority, uint32_t *id) {
    int error = ww_id_take(&d->streams, id);
    if (!error)
        place_stream(d, *id, flags & CU_STREAM_NON_BLOCKING);
    return error ? error : ww_send_stream_create(d, WW_OP_STREAM_CREATE, 0, *id, flags, priority);
}

static int own_stream(struct ww_device *d, uint32_t *id) {
    int i = (int)(d - layer.devices);
    uint64_t life = atomic_load_explicit(&d->life, memory_order_relaxed);
    if (!own.at[i].id || own.at[i].life != life) {
        uint32_t made;
        int error = ww_stream_create(d, 0, 0, &made);
        if (error)
            return error;
        own.at[i].id = made;
        own.at[i].life = life;
        pthread_once(&once, make_key);
        pthread_setspecific(at_end, &own);
    }
    *id = own.at[i].id;
    return 0;
}

/* -- synchronous calls that do not wait ---------------------------------------------------------------------------- */

/* Find the event of `copied`; create it at its first use in a life of the device. */
static int copied_event(struct ww_device *d, uint32_t *event) {
    uint64_t life = atomic_load(&d->life), tag = life << 32, mark = atomic_load(&d->copied);
    *event = (uint32_t)mark;
    if (*event && mark >> 32 == tag >> 32)
        return 0;
    int error = ww_event_new(d, CU_EVENT_DISABLE_TIMING, event);
    if (error || atomic_compare_exchange_strong(&d->copied, &mark, tag | *event))
        return error;
    error = ww_event_end(d, life, *event); /* another thread has stored an event */
    *event = (uint32_t)mark;
    return error;
}

/* Synchronous copies and memsets on the legacy stream may return when they are posted. An event is recorded behind
 * each. A stream that the driver does not order after the legacy stream waits for that event before its next call
 * (ww_begin), so that its work begins after the copy, as with a call that waits. */
int ww_mark_copied(struct ww_device *d) {
    struct ww_args_event args = {0, 0};
    struct ww_post p;
    int error = copied_event(d, &args.event);
    if (error || (error = ww_begin(d, WW_OP_EVENT_RECORD, WW_LEGACY, 0, sizeof args, &p)))
        return error;
    memcpy(p.entry + 1, &args, sizeof args);
    if (++p.channel->copies == WW_ALWAYS)
        p.channel->copies = 1;
    return ww_finish(&p);
}

/* -- streams ------------------------------------------------------------------------------------------------------- */

/* Find the id and device of a stream handle. For a default stream, *d must be the current device, and stays. */
int ww_stream(void *h, struct ww_device **d, uint32_t *id) {
    if (!h || h == CU_STREAM_LEGACY) {
        *id = WW_LEGACY;
        return 0;
    }
    if (h == CU_STREAM_PER_THREAD)
        return own_stream(*d, id);
    struct ww_object *o = ww_object(h, WW_STREAM);
    if (!o)
        return CUDA_ERROR_INVALID_HANDLE;
    *d = o->device;
    *id = o->id;
    return 0;
}

int ww_current_stream(void *h, struct ww_device **d, uint32_t *id) {
    int error = ww_need(d);
    return error ? error : ww_stream(h, d, id);
}

/* The same, but only a default stream needs a current context. */
int ww_stream_of(void *h, struct ww_device **d, uint32_t *id) {
    struct ww_object *o = (uintptr_t)h > 2 ? ww_object(h, WW_STREAM) : NULL;
    int error = ww_ready();
    if (error || ((uintptr_t)h > 2 && !o))
        return error ? error : CUDA_ERROR_INVALID_HANDLE;
    if (!o)
        return ww_current_stream(h, d, id);
    *d = o->device;
    *id = o->id;
    return 0;
}

struct ww_object *ww_stream_object(CUstream h) { return (uintptr_t)h > 2 ? ww_object(h, WW_STREAM) : NULL; }
