/* Streams and events. Their ids are chosen here, so making one waits for nobody. */
#include "layer.h"
#include <stdlib.h>
#include <string.h>

/* -- the calling thread's own streams, one for each device --------------------------------------------------------- */

struct own {
    struct {
        uint32_t id;
        uint64_t life;
    } at[WW_DEVICES];
};

static _Thread_local struct own own;
static pthread_key_t at_end;
static pthread_once_t once = PTHREAD_ONCE_INIT;

struct ending { /* of a stream */
    struct ww_device *device;
    uint64_t life;
    uint32_t id;
};

static int end_now(const struct ending *e) {
    struct ww_args_id args = {e->id, 0};
    int error =
        e->life == atomic_load(&e->device->life) ? ww_send(e->device, WW_OP_STREAM_DESTROY, 0, &args, sizeof args) : 0;
    if (!error)
        ww_id_give(e->device, &e->device->streams, e->life, e->id);
    return error;
}

static void end_later(void *data, int code) {
    if (!code)
        end_now(data);
    free(data);
}

/* A stream goes; behind a host function that has not run, for the rest of a graph is posted behind that. */
static int end_stream(const struct ending *what) {
    struct ending *e;
    if (atomic_load(&what->device->holds) && ww_host_has(what->device, what->id) && (e = malloc(sizeof *e))) {
        *e = *what;
        if (!ww_host_add(e->device, e->id, NULL, end_later, e))
            return 0;
        free(e);
    }
    return end_now(what);
}

/* A thread ends: its streams go. Destructors run before its thread-local memory does. */
static void give_back(void *unused) {
    (void)unused;
    for (int i = 0; i < layer.ndevices && !ww_ready(); i++) {
        struct ending e = {&layer.devices[i], own.at[i].life, own.at[i].id};
        own.at[i].id = 0;
        if (e.id && e.life == atomic_load(&e.device->life))
            end_stream(&e);
    }
}

static void make_key(void) { pthread_key_create(&at_end, give_back); }

/* A stream begins: one that does not block comes after nothing yet. */
static void place_stream(struct ww_device *d, uint32_t id, bool non_blocking) {
    pthread_mutex_lock(&d->post);
    struct ww_channel *c = atomic_load(&d->channel);
    if (c)
        c->behind[id] = non_blocking ? 0 : WW_ALWAYS;
    pthread_mutex_unlock(&d->post);
    ww_host_stream(d, id, non_blocking);
}

static int create(struct ww_device *d, uint32_t flags, int32_t priority, uint32_t *id) {
    int error = ww_id_take(&d->streams, id);
    struct ww_args_stream_create args = {*id, flags, priority, 0};
    if (!error)
        place_stream(d, *id, flags & CU_STREAM_NON_BLOCKING);
    return error ? error : ww_send(d, WW_OP_STREAM_CREATE, 0, &args, sizeof args);
}

static int own_stream(struct ww_device *d, uint32_t *id) {
    int i = (int)(d - layer.devices);
    uint64_t life = atomic_load_explicit(&d->life, memory_order_relaxed);
    if (!own.at[i].id || own.at[i].life != life) {
        uint32_t made;
        int error = create(d, 0, 0, &made);
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

/* -- synchronous calls that do not wait --------------------------------------------------------------------------- */

/* The event of `copied`, made at its first use in a life. */
static int copied_event(struct ww_device *d, uint32_t *event) {
    uint64_t life = atomic_load(&d->life), tag = life << 32, mark = atomic_load(&d->copied);
    struct ww_args_event args = {(uint32_t)mark, CU_EVENT_DISABLE_TIMING};
    *event = args.event;
    if (args.event && mark >> 32 == tag >> 32)
        return 0;
    int error = ww_id_take(&d->events, event);
    args.event = *event;
    if (error || (error = ww_send(d, WW_OP_EVENT_CREATE, 0, &args, sizeof args)))
        return error;
    if (!atomic_compare_exchange_strong(&d->copied, &mark, tag | args.event)) { /* another thread's first */
        *event = (uint32_t)mark;
        error = ww_send(d, WW_OP_EVENT_DESTROY, 0, &args, sizeof args);
        ww_id_give(d, &d->events, life, args.event);
    }
    return error;
}

/* Synchronous copies and memsets on the legacy stream return when they are posted. An event behind each is what every
 * stream that does not order itself behind the legacy one waits for before its next call (ww_begin): the driver's own
 * call would have waited for the same. */
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

/* The id and device of a stream handle; for the null stream and its like *d must be the current device. */
int ww_stream(void *h, int per_thread, struct ww_device **d, uint32_t *id) {
    if (!h && per_thread)
        h = CU_STREAM_PER_THREAD;
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

/* The same with a look at the device's state; a stream's own device needs no current context. */
static int stream_of(void *h, struct ww_device **d, uint32_t *id) {
    struct ww_object *o = (uintptr_t)h > 2 ? ww_object(h, WW_STREAM) : NULL;
    int error = ww_ready();
    if (error || ((uintptr_t)h > 2 && !o))
        return error ? error : CUDA_ERROR_INVALID_HANDLE;
    if (!o)
        return (error = ww_need(d)) ? error : ww_stream(h, 0, d, id);
    *d = o->device;
    *id = o->id;
    return 0;
}

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
    struct ww_device *d;
    int error = ww_need(&d);
    if (error || !stream || flags > CU_STREAM_NON_BLOCKING)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    if (priority > d->facts.least_priority)
        priority = d->facts.least_priority;
    if (priority < d->facts.greatest_priority)
        priority = d->facts.greatest_priority;
    struct ww_object *o = ww_object_new(WW_STREAM, d);
    if (!o)
        return CUDA_ERROR_OUT_OF_MEMORY;
    o->flags = flags;
    o->priority = priority;
    if ((error = create(d, flags, priority, &o->id))) {
        struct ww_object was;
        ww_object_drop(o, WW_STREAM, &was);
        return error;
    }
    *stream = (CUstream)(void *)o;
    return 0;
}

CUresult cuStreamCreate(CUstream *stream, unsigned flags) { return cuStreamCreateWithPriority(stream, flags, 0); }

CUresult cuStreamDestroy_v2(CUstream h) {
    struct ww_object was;
    int error = ww_ready();
    if (error || (error = (uintptr_t)h <= 2 ? CUDA_ERROR_INVALID_HANDLE : ww_object_drop(h, WW_STREAM, &was)))
        return error;
    if (atomic_load(&ww_captures))
        ww_capture_stream_gone(was.device, was.id);
    return end_stream(&(struct ending){was.device, was.life, was.id});
}

CUresult cuStreamDestroy(CUstream h) { return cuStreamDestroy_v2(h); }

CUresult cuStreamSynchronize(CUstream h) {
    struct ww_device *d;
    uint32_t id;
    int error = stream_of(h, &d, &id);
    if (error || (error = ww_no_synchronize(d, id)) ||
        (error = ww_call(d, WW_OP_STREAM_SYNC, id, NULL, 0, NULL, 0, NULL)))
        return error;
    return ww_earlier(d);
}

CUresult cuStreamQuery(CUstream h) {
    struct ww_device *d;
    uint32_t id;
    int error = stream_of(h, &d, &id);
    if (!error)
        error = ww_no_synchronize(d, id);
    if (!error && atomic_load(&d->holds) && ww_host_held(d, id))
        return CUDA_ERROR_NOT_READY;
    if (error || (error = ww_call(d, WW_OP_STREAM_QUERY, id, NULL, 0, NULL, 0, NULL)))
        return error;
    return ww_earlier(d);
}

#define EXTERNAL 1u /* flag of records and waits: nodes of their own in a stream that records */

/* A record or wait that is a node of its own. */
static int external(struct ww_device *d, uint32_t stream, int kind, struct ww_object *event) {
    struct ww_work work = {.kind = kind, .device = event->device, .of.event = (CUevent)(void *)event};
    return ww_capture_add(d, stream, &work);
}

/* A wait while there are captures; done: it belongs to one. */
static int wait_captured(struct ww_device *d, uint32_t stream, unsigned flags, struct ww_object *event, bool *done) {
    bool captured;
    int error = ww_captured(d, stream, &captured);
    *done = captured;
    if (error || !(captured && flags == EXTERNAL))
        return error ? error : ww_capture_wait(d, stream, captured, event, done);
    return external(d, stream, CU_NODE_WAIT, event);
}

CUresult cuStreamWaitEvent(CUstream h, CUevent event, unsigned flags) {
    struct ww_device *d;
    uint32_t id;
    int error = stream_of(h, &d, &id);
    struct ww_object *e = ww_object(event, WW_EVENT);
    if (error || !e)
        return error ? error : CUDA_ERROR_INVALID_HANDLE;
    if (flags > EXTERNAL)
        return CUDA_ERROR_INVALID_VALUE;
    if (atomic_load(&ww_captures) || e->recorded == WW_IN_CAPTURE) {
        bool done;
        if ((error = wait_captured(d, id, flags, e, &done)) || done)
            return error;
    }
    if (e->device != d) {
        bool can;
        if (!atomic_load_explicit(&e->recorded, memory_order_relaxed))
            return 0;
        error = ww_wait_across(d, id, e->device, e->id, &can);
        return can ? error : cuEventSynchronize(event); /* without a link between the workers the program waits */
    }
    struct ww_args_event args = {e->id, 0};
    return ww_send(d, WW_OP_STREAM_WAIT, id, &args, sizeof args);
}

CUresult cuStreamGetCtx(CUstream h, CUcontext *context) {
    struct ww_device *d;
    uint32_t id;
    int error = stream_of(h, &d, &id);
    if (error || !context)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    *context = ww_context_handle(d);
    return 0;
}

CUresult cuStreamGetCtx_v2(CUstream h, CUcontext *context, void *green) {
    if (green)
        *(void **)green = NULL;
    return cuStreamGetCtx(h, context);
}

CUresult cuStreamGetDevice(CUstream h, CUdevice *device) {
    struct ww_device *d;
    uint32_t id;
    int error = stream_of(h, &d, &id);
    if (error || !device)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    *device = (CUdevice)(d - layer.devices);
    return 0;
}

/* Check the handle and return its object, NULL for the null stream and its like. */
static int look(void *h, const void *out, struct ww_object **o) {
    struct ww_device *d;
    uint32_t id;
    int error = stream_of(h, &d, &id);
    *o = (uintptr_t)h > 2 && !error ? ww_object(h, WW_STREAM) : NULL;
    return error ? error : out ? 0 : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuStreamGetFlags(CUstream h, unsigned *flags) {
    struct ww_object *o;
    int error = look(h, flags, &o);
    if (!error)
        *flags = o ? o->flags : 0;
    return error;
}

CUresult cuStreamGetPriority(CUstream h, int *priority) {
    struct ww_object *o;
    int error = look(h, priority, &o);
    if (!error)
        *priority = o ? o->priority : 0;
    return error;
}

CUresult cuStreamGetId(CUstream h, uint64_t *id) {
    struct ww_object *o;
    int error = look(h, id, &o);
    if (!error && o) {
        *id = o->serial + WW_IDS;
    } else if (!error) {
        struct ww_device *d;
        uint32_t own_id;
        error = stream_of(h, &d, &own_id);
        *id = own_id;
    }
    return error;
}

/* -- events -------------------------------------------------------------------------------------------------------- */

int ww_event(void *h, struct ww_device *d, uint32_t *id) {
    struct ww_object *o = ww_object(h, WW_EVENT);
    if (!o || o->device != d)
        return CUDA_ERROR_INVALID_HANDLE;
    *id = o->id;
    return 0;
}

CUresult cuEventCreate(CUevent *event, unsigned flags) {
    struct ww_device *d;
    int error = ww_need(&d);
    if (error || !event || flags > 7)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    if (flags & CU_EVENT_INTERPROCESS)
        return ww_refused("cuEventCreate for other processes");
    struct ww_object *o = ww_object_new(WW_EVENT, d);
    if (!o)
        return CUDA_ERROR_OUT_OF_MEMORY;
    o->flags = flags;
    error = ww_id_take(&d->events, &o->id);
    struct ww_args_event args = {o->id, flags};
    if (error || (error = ww_send(d, WW_OP_EVENT_CREATE, 0, &args, sizeof args))) {
        struct ww_object was;
        ww_object_drop(o, WW_EVENT, &was);
        return error;
    }
    *event = (CUevent)(void *)o;
    return 0;
}

CUresult cuEventDestroy_v2(CUevent h) {
    struct ww_object was;
    int error = ww_ready();
    if (error || (error = ww_object_drop(h, WW_EVENT, &was)))
        return error;
    struct ww_args_event args = {was.id, 0};
    if (!(error = ww_send(was.device, WW_OP_EVENT_DESTROY, 0, &args, sizeof args)))
        ww_id_give(was.device, &was.device->events, was.life, was.id);
    return error;
}

CUresult cuEventDestroy(CUevent h) { return cuEventDestroy_v2(h); }

CUresult cuEventRecordWithFlags(CUevent event, CUstream h, unsigned flags) {
    struct ww_device *d;
    uint32_t id, stream;
    int error = stream_of(h, &d, &stream);
    if (error || (error = ww_event(event, d, &id)))
        return error;
    struct ww_object *o = (struct ww_object *)(void *)event;
    bool captured;
    if (flags > EXTERNAL)
        return CUDA_ERROR_INVALID_VALUE;
    if ((error = ww_earlier(d)) || (error = ww_captured(d, stream, &captured)))
        return error;
    if (captured)
        return flags ? external(d, stream, CU_NODE_RECORD, o) : ww_capture_record(d, stream, o);
    if (flags)
        return CUDA_ERROR_INVALID_VALUE; /* external records belong to captures */
    if (o->recorded == WW_IN_CAPTURE)
        ww_capture_forget_event(o);
    struct ww_args_event args = {id, 0};
    if (!(error = ww_send(d, WW_OP_EVENT_RECORD, stream, &args, sizeof args)))
        atomic_store_explicit(&o->recorded, 1, memory_order_relaxed);
    return error;
}

CUresult cuEventRecord(CUevent event, CUstream h) { return cuEventRecordWithFlags(event, h, 0); }

/* Ask about an event; errors of earlier calls come with the answer. */
static int about(CUevent h, uint16_t op) {
    struct ww_object *o = ww_object(h, WW_EVENT);
    int error = ww_ready();
    if (error || !o)
        return error ? error : CUDA_ERROR_INVALID_HANDLE;
    if (o->recorded == WW_IN_CAPTURE)
        return CUDA_ERROR_CAPTURED_EVENT;
    if (op == WW_OP_EVENT_QUERY && (error = ww_unsafe()))
        return error;
    struct ww_args_event args = {o->id, 0};
    error = ww_call(o->device, op, 0, &args, sizeof args, NULL, 0, NULL);
    return error ? error : ww_earlier(o->device);
}

CUresult cuEventQuery(CUevent h) { return about(h, WW_OP_EVENT_QUERY); }

CUresult cuEventSynchronize(CUevent h) { return about(h, WW_OP_EVENT_SYNC); }

CUresult cuEventElapsedTime_v2(float *ms, CUevent first, CUevent second) {
    struct ww_object *a = ww_object(first, WW_EVENT), *b = ww_object(second, WW_EVENT);
    int error = ww_ready();
    uint32_t got;
    if (error || !ms)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    if (a && b && (a->recorded == WW_IN_CAPTURE || b->recorded == WW_IN_CAPTURE))
        return CUDA_ERROR_CAPTURED_EVENT;
    if (!a || !b || a->device != b->device || !a->recorded || !b->recorded ||
        ((a->flags | b->flags) & CU_EVENT_DISABLE_TIMING))
        return CUDA_ERROR_INVALID_HANDLE;
    struct ww_args_elapsed args = {a->id, b->id};
    error = ww_call(a->device, WW_OP_EVENT_ELAPSED, 0, &args, sizeof args, ms, sizeof *ms, &got);
    return error ? error : got == sizeof *ms ? 0 : CUDA_ERROR_UNKNOWN;
}

CUresult cuEventElapsedTime(float *ms, CUevent first, CUevent second) {
    return cuEventElapsedTime_v2(ms, first, second);
}
