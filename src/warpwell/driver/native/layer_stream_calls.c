/* The driver's calls on streams and events. */
#include "layer.h"

int ww_body_cuStreamCreateWithPriority(struct ww_device *d, CUstream *stream, unsigned flags, int priority) {
    if (priority > d->facts.least_priority)
        priority = d->facts.least_priority;
    if (priority < d->facts.greatest_priority)
        priority = d->facts.greatest_priority;
    struct ww_object *o = ww_object_new(WW_STREAM, d);
    int error = o ? ww_stream_create(d, flags, priority, &o->id) : CUDA_ERROR_OUT_OF_MEMORY;
    if (error) {
        ww_object_drop(o, WW_STREAM, NULL);
        return error;
    }
    o->flags = flags;
    o->priority = priority;
    *stream = (CUstream)(void *)o;
    return 0;
}

int ww_body_cuStreamQuery(struct ww_device *d, uint32_t id) {
    if (atomic_load(&d->holds) && ww_host_held(d, id))
        return CUDA_ERROR_NOT_READY;
    int error = ww_call(d, WW_OP_STREAM_QUERY, id, NULL, 0, NULL, 0);
    return error ? error : ww_earlier(d);
}

#define EXTERNAL 1u /* flag of records and waits of events: a capture gets a node for them */

/* Add a node that records an event or waits for it to the capture of a stream. */
static int external(struct ww_device *d, uint32_t stream, int kind, struct ww_object *event) {
    struct ww_work work = {.kind = kind, .device = event->device, .of.event = (CUevent)(void *)event};
    return ww_capture_add(d, stream, &work);
}

/* Let a stream wait for an event while captures are in progress. *done: the wait belongs to a capture. */
static int wait_captured(struct ww_device *d, uint32_t stream, unsigned flags, struct ww_object *event, bool *done) {
    bool captured;
    int error = ww_captured(d, stream, &captured);
    *done = captured;
    if (error || !(captured && flags == EXTERNAL))
        return error ? error : ww_capture_wait(d, stream, captured, event, done);
    return external(d, stream, CU_NODE_WAIT, event);
}

int ww_body_cuStreamWaitEvent(struct ww_device *d, uint32_t id, struct ww_object *e, unsigned flags) {
    int error;
    if (atomic_load(&ww_captures) || e->recorded == WW_IN_CAPTURE) {
        bool done;
        if ((error = wait_captured(d, id, flags, e, &done)) || done)
            return error;
    }
    if (e->device != d) {
        bool can;
        if (!atomic_load_explicit(&e->recorded, memory_order_relaxed))
            return 0;
        error = ww_wait_across(d, id, e->device, e->id, &can); /* without a link, this thread waits */
        return can ? error : ww_event_ask((CUevent)(void *)e, WW_OP_EVENT_SYNC);
    }
    return ww_send_event(d, WW_OP_STREAM_WAIT, id, e->id, 0);
}

/* Access policy windows of the L2 cache and synchronization policies do not change results: they are ignored. */
int ww_body_cuStreamSetAttribute(int attribute) {
    if (attribute == CU_LAUNCH_ACCESS_WINDOW || attribute == CU_LAUNCH_WAIT_POLICY)
        return 0;
    return ww_refused("cuStreamSetAttribute with an attribute other than access policy and synchronization policy");
}

/* -- events -------------------------------------------------------------------------------------------------------- */

int ww_body_cuEventCreate(struct ww_device *d, CUevent *event, unsigned flags) {
    if (flags & CU_EVENT_INTERPROCESS)
        return ww_refused("cuEventCreate for other processes");
    struct ww_object *o = ww_object_new(WW_EVENT, d);
    int error = o ? ww_event_new(d, flags, &o->id) : CUDA_ERROR_OUT_OF_MEMORY;
    if (error) {
        ww_object_drop(o, WW_EVENT, NULL);
        return error;
    }
    o->flags = flags;
    *event = (CUevent)(void *)o;
    return 0;
}

int ww_body_cuEventRecordWithFlags(struct ww_device *d, uint32_t stream, bool captured, struct ww_object *o,
                                   unsigned flags) {
    if (captured)
        return flags ? external(d, stream, CU_NODE_RECORD, o) : ww_capture_record(d, stream, o);
    if (flags)
        return CUDA_ERROR_INVALID_VALUE; /* external records belong to captures */
    if (o->recorded == WW_IN_CAPTURE)
        ww_capture_forget_event(o);
    int error = ww_send_event(d, WW_OP_EVENT_RECORD, stream, o->id, 0);
    if (!error)
        atomic_store_explicit(&o->recorded, 1, memory_order_relaxed);
    return error;
}

/* Query or synchronize an event. Return the error of this call, or a deferred error. */
int ww_event_ask(CUevent h, uint16_t op) {
    struct ww_object *o = ww_object(h, WW_EVENT);
    int error = ww_ready();
    if (error || !o)
        return error ? error : CUDA_ERROR_INVALID_HANDLE;
    if (o->recorded == WW_IN_CAPTURE)
        return CUDA_ERROR_CAPTURED_EVENT;
    if (op == WW_OP_EVENT_QUERY && (error = ww_unsafe()))
        return error;
    error = ww_call_event(o->device, op, 0, o->id, 0, NULL, 0);
    return error ? error : ww_earlier(o->device);
}

int ww_body_cuEventElapsedTime_v2(float *ms, CUevent first, CUevent second) {
    struct ww_object *a = ww_object(first, WW_EVENT), *b = ww_object(second, WW_EVENT);
    if (a && b && (a->recorded == WW_IN_CAPTURE || b->recorded == WW_IN_CAPTURE))
        return CUDA_ERROR_CAPTURED_EVENT;
    if (!a || !b || a->device != b->device || !a->recorded || !b->recorded ||
        ((a->flags | b->flags) & CU_EVENT_DISABLE_TIMING))
        return CUDA_ERROR_INVALID_HANDLE;
    return ww_call_elapsed(a->device, WW_OP_EVENT_ELAPSED, 0, a->id, b->id, ms, sizeof *ms);
}
