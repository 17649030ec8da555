/* The fake driver: streams, their threads, events, synchronization. */
#include "fake.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static uint64_t next_stream = 1;
static __thread struct {
    CUstream stream;
    unsigned life;
} own[FAKE_MOST_DEVICES]; /* by device: the calling thread's default stream */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* -- operations ---------------------------------------------------------------------------------------------------- */

struct fake_op *fake_op(CUcontext context, int (*run)(struct fake_op *)) {
    struct fake_op *op = calloc(1, sizeof *op);
    if (!op)
        abort();
    op->refs = 1;
    op->run = run;
    op->context = context;
    op->life = context->life;
    return op;
}

void fake_unref(struct fake_op *op) {
    if (op && !--op->refs) {
        free(op->data);
        free(op);
    }
}

static void finish(struct fake_op *op) {
    for (size_t i = 0; i < op->nafter; i++)
        fake_unref(op->after[i]);
    free(op->after);
    op->after = NULL;
    op->nafter = 0;
    op->time = now();
    op->done = 1;
}

static void add_after(struct fake_op *op, struct fake_op *before) {
    if (!before || before->done)
        return;
    op->after = realloc(op->after, (op->nafter + 1) * sizeof *op->after);
    if (!op->after)
        abort();
    before->refs++;
    op->after[op->nafter++] = before;
}

static int is_ready(const struct fake_op *op) {
    for (size_t i = 0; i < op->nafter; i++)
        if (!op->after[i]->done)
            return 0;
    return 1;
}

/* Sleep for a random short time before an operation. Half of the operations do not wait. */
static void delay(CUstream stream) {
    if (!stream->random)
        return;
    stream->random ^= stream->random << 13;
    stream->random ^= stream->random >> 7;
    stream->random ^= stream->random << 17;
    unsigned r = (unsigned)(stream->random >> 33) & 31;
    if (r >= 16)
        usleep(r == 31 ? 1500 : (r - 15) * 12);
}

static void unlink_stream(CUstream stream) {
    for (CUstream *at = &stream->object.context->streams; *at; at = &(*at)->next)
        if (*at == stream) {
            *at = stream->next;
            break;
        }
}

static void *run_stream(void *argument) {
    CUstream stream = argument;
    pthread_mutex_lock(&fake_lock);
    for (;;) {
        while (!stream->head && !stream->destroyed)
            pthread_cond_wait(&stream->work, &fake_lock);
        struct fake_op *op = stream->head;
        if (!op)
            break;
        CUcontext context = op->context;
        while (!is_ready(op) && !context->sticky && op->life == context->life)
            pthread_cond_wait(&fake_moved, &fake_lock);
        if (op->run && !context->sticky && op->life == context->life) {
            pthread_mutex_unlock(&fake_lock);
            delay(stream);
            int error = op->run(op);
            pthread_mutex_lock(&fake_lock);
            if (error && !context->sticky && op->life == context->life)
                __atomic_store_n(&context->sticky, error, __ATOMIC_RELEASE);
        }
        finish(op);
        stream->head = op->next;
        stream->pending--;
        if (!stream->head)
            stream->tail = NULL;
        fake_unref(op);
        pthread_cond_broadcast(&fake_moved);
    }
    fake_unref(stream->last);
    stream->last = NULL;
    unlink_stream(stream);
    pthread_mutex_unlock(&fake_lock);
    return NULL; /* do not free the stream: then no other stream gets the same handle */
}

static void start(CUstream stream) {
    pthread_attr_t attributes;
    pthread_t thread;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 256 << 10);
    if (pthread_create(&thread, &attributes, run_stream, stream))
        abort();
    pthread_attr_destroy(&attributes);
    stream->started = 1;
}

void fake_enqueue(CUstream stream, struct fake_op *op, int keep, const char *symbol) {
    CUcontext context = stream->object.context;
    if (stream->record) {
        stream->record(stream, op);
        return;
    }
    if (stream->pending >= FAKE_PENDING)
        fake_blocks(symbol);
    while (stream->pending >= FAKE_PENDING && !context->sticky && op->life == context->life)
        pthread_cond_wait(&fake_moved, &fake_lock);
    if (stream == context->legacy) {
        for (CUstream other = context->streams; other; other = other->next)
            if (other != stream && !(other->flags & CU_STREAM_NON_BLOCKING))
                add_after(op, other->last);
    } else if (!(stream->flags & CU_STREAM_NON_BLOCKING) && context->legacy) {
        add_after(op, context->legacy->last);
    }
    op->refs += keep ? 2 : 1; /* for `last`, and the caller; fake_op() made the queue's reference */
    fake_unref(stream->last);
    stream->last = op;
    if (stream->tail)
        stream->tail->next = op;
    else
        stream->head = op;
    stream->tail = op;
    stream->pending++;
    if (!stream->started)
        start(stream);
    pthread_cond_signal(&stream->work);
}

void fake_wait(struct fake_op *op) {
    CUcontext context = op->context;
    while (!op->done && !context->sticky && op->life == context->life)
        pthread_cond_wait(&fake_moved, &fake_lock);
    fake_unref(op);
}

/* Return true if a stream has work that a wait for `of` waits for: `of` is the same stream, or the legacy stream and
 * the stream is a blocking one, or NULL, which means all streams. */
static int has_work(CUstream stream, CUstream of) {
    int asked = !of || stream == of || (of == of->object.context->legacy && !(stream->flags & CU_STREAM_NON_BLOCKING));
    return asked && stream->last && !stream->last->done;
}

static void wait_for(CUcontext context, CUstream of, const char *symbol) {
    size_t n = 0;
    struct fake_op **ops = NULL;
    for (CUstream stream = context->streams; stream; stream = stream->next) {
        if (!has_work(stream, of))
            continue;
        ops = realloc(ops, (n + 1) * sizeof *ops);
        if (!ops)
            abort();
        stream->last->refs++;
        ops[n++] = stream->last;
    }
    if (n && symbol)
        fake_blocks(symbol);
    for (size_t i = 0; i < n; i++)
        fake_wait(ops[i]);
    free(ops);
}

void fake_wait_stream(CUstream stream, const char *symbol) { wait_for(stream->object.context, stream, symbol); }

void fake_wait_all(CUcontext context, const char *symbol) {
    unsigned life = context->life;
    wait_for(context, NULL, symbol);
    if (life == context->life)
        fake_flush(context);
}

void fake_flush(CUcontext context) {
    size_t done = 0;
    while (done < context->nprinted) {
        ssize_t n = write(1, context->printed + done, context->nprinted - done);
        if (n <= 0)
            break;
        done += (size_t)n;
    }
    context->nprinted = 0;
}

/* -- streams ------------------------------------------------------------------------------------------------------- */

static CUstream make_stream(CUcontext context, unsigned flags, int priority) {
    CUstream stream = fake_make(FAKE_STREAM, sizeof *stream, context);
    stream->flags = flags;
    stream->priority = priority;
    stream->id = next_stream++;
    uint64_t seed = (uint64_t)fake_number("FAKE_SEED", 0);
    stream->random = seed ? (seed * 0x9e3779b97f4a7c15ull ^ stream->id * 0xbf58476d1ce4e5b9ull) | 1 : 0;
    pthread_cond_init(&stream->work, NULL);
    stream->next = context->streams;
    context->streams = stream;
    return stream;
}

/* Invalidate the handle. Enqueued operations still run, and a wait for the context waits for them. */
static void end_stream(CUstream stream) {
    if (!stream->started)
        unlink_stream(stream);
    stream->destroyed = 1;
    fake_drop(stream);
    pthread_cond_signal(&stream->work);
}

void fake_end_streams(CUcontext context) {
    while (context->streams) {
        CUstream stream = context->streams;
        unlink_stream(stream);
        if (!stream->destroyed)
            end_stream(stream);
    }
    context->legacy = NULL;
    pthread_cond_broadcast(&fake_moved);
}

int fake_stream(CUstream handle, CUcontext context, CUstream *stream) {
    if (!handle || handle == CU_STREAM_LEGACY) {
        if (!context->legacy)
            context->legacy = make_stream(context, 0, 0);
        *stream = context->legacy;
        return CUDA_SUCCESS;
    }
    if (handle == CU_STREAM_PER_THREAD) {
        int device = context->device;
        if (!own[device].stream || own[device].life != context->life) {
            own[device].stream = make_stream(context, 0, 0);
            own[device].life = context->life;
        }
        *stream = own[device].stream;
        return CUDA_SUCCESS;
    }
    if (!fake_valid(handle, FAKE_STREAM))
        return CUDA_ERROR_INVALID_HANDLE;
    if (handle->object.context != context)
        return CUDA_ERROR_INVALID_HANDLE;
    *stream = handle;
    return CUDA_SUCCESS;
}

/* Find the stream that a handle means in the current context. Without an error, fake_lock is held. */
static int enter_stream(CUstream handle, CUstream *stream) {
    CUcontext context;
    int error = enter(&context);
    if (error)
        return error;
    error = fake_stream(handle, context, stream);
    return error ? leave(error) : 0;
}

CUresult cuStreamCreateWithPriority(CUstream *stream, uint32_t flags, int32_t priority) {
    CUcontext context;
    int error = fake_need(&context);
    if (error || !stream || flags > CU_STREAM_NON_BLOCKING)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_lock);
    *stream = make_stream(context, flags, priority > 0 ? 0 : priority < -5 ? -5 : priority);
    return leave(CUDA_SUCCESS);
}

CUresult cuStreamCreate(CUstream *stream, uint32_t flags) { return cuStreamCreateWithPriority(stream, flags, 0); }

CUresult cuStreamDestroy_v2(CUstream handle) {
    CUstream stream;
    if (!handle || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD)
        return CUDA_ERROR_INVALID_HANDLE;
    int error = enter_stream(handle, &stream);
    if (error)
        return error;
    end_stream(stream); /* its thread exits after the operations that are enqueued */
    return leave(CUDA_SUCCESS);
}

CUresult cuStreamSynchronize(CUstream handle) {
    CUstream stream;
    int error = enter_stream(handle, &stream);
    if (error)
        return error;
    CUcontext context = stream->object.context;
    fake_wait_stream(stream, "cuStreamSynchronize");
    fake_flush(context);
    return leave(context->sticky);
}

CUresult cuStreamQuery(CUstream handle) {
    CUstream stream;
    int error = enter_stream(handle, &stream);
    if (error)
        return error;
    for (CUstream other = stream->object.context->streams; other; other = other->next)
        if (has_work(other, stream))
            return leave(CUDA_ERROR_NOT_READY);
    return leave(CUDA_SUCCESS);
}

static int run_function(struct fake_op *op) {
    ((void (*)(void *))(uintptr_t)op->to)((void *)(uintptr_t)op->from);
    return CUDA_SUCCESS;
}

CUresult cuLaunchHostFunc(CUstream handle, void *function, void *data) {
    CUstream stream;
    int error = enter_stream(handle, &stream);
    if (error)
        return error;
    if (!function)
        return leave(CUDA_ERROR_INVALID_VALUE);
    struct fake_op *op = fake_op(stream->object.context, run_function);
    op->to = (uintptr_t)function;
    op->from = (uintptr_t)data;
    fake_enqueue(stream, op, 0, "cuLaunchHostFunc");
    return leave(CUDA_SUCCESS);
}

CUresult cuStreamGetCtx(CUstream handle, CUcontext *context) {
    CUstream stream;
    int error = enter_stream(handle, &stream);
    if (error)
        return error;
    if (context)
        *context = stream->object.context;
    return leave(context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

CUresult cuStreamGetCtx_v2(CUstream handle, CUcontext *context, void *green) {
    if (green)
        *(void **)green = NULL;
    return cuStreamGetCtx(handle, context);
}

CUresult cuStreamGetDevice(CUstream handle, CUdevice *device) {
    CUcontext context;
    int error = cuStreamGetCtx(handle, &context);
    if (!error && device)
        *device = context->device;
    return error ? error : device ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuStreamGetFlags(CUstream handle, uint32_t *flags) {
    CUstream stream;
    int error = enter_stream(handle, &stream);
    if (error)
        return error;
    if (flags)
        *flags = stream->flags;
    return leave(flags ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

CUresult cuStreamGetPriority(CUstream handle, int32_t *priority) {
    CUstream stream;
    int error = enter_stream(handle, &stream);
    if (error)
        return error;
    if (priority)
        *priority = stream->priority;
    return leave(priority ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

CUresult cuStreamGetId(CUstream handle, uint64_t *id) {
    CUstream stream;
    int error = enter_stream(handle, &stream);
    if (error)
        return error;
    if (id)
        *id = stream->id;
    return leave(id ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

CUresult cuStreamIsCapturing(CUstream handle, int32_t *status) {
    CUstream stream;
    int error = enter_stream(handle, &stream);
    if (error)
        return error;
    if (status)
        *status = stream->record != NULL;
    return leave(status ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

/* -- operations on memory ------------------------------------------------------------------------------------------ */

struct memory_operation { /* CUstreamBatchMemOpParams, of 64-bit waits (4) and writes (5) */
    uint64_t operation, address, value, flags, rest[2];
};

static int write_word(struct fake_op *op) {
    __atomic_store_n((uint64_t *)op->to, op->size, __ATOMIC_SEQ_CST);
    return CUDA_SUCCESS;
}

static int wait_word(struct fake_op *op) {
    CUcontext context = op->context;
    while ((int64_t)(__atomic_load_n((uint64_t *)op->to, __ATOMIC_SEQ_CST) - op->size) < 0 &&
           !__atomic_load_n(&context->sticky, __ATOMIC_ACQUIRE) && op->life == context->life)
        usleep(10);
    return CUDA_SUCCESS;
}

WW_API CUresult cuStreamBatchMemOp_v2(CUstream handle, uint32_t count, struct memory_operation *operations,
                                      uint32_t flags) {
    CUstream stream;
    int error = flags || !operations ? CUDA_ERROR_INVALID_VALUE : enter_stream(handle, &stream);
    if (error)
        return error;
    if (stream->record || fake_number("FAKE_GATES", 1) == 0)
        return leave(CUDA_ERROR_NOT_SUPPORTED);
    for (struct memory_operation *m = operations; m < operations + count && !error; m++) {
        struct fake_op *op = fake_op(stream->object.context, m->operation == 4 ? wait_word : write_word);
        op->to = m->address;
        op->size = m->value;
        fake_enqueue(stream, op, 0, "cuStreamBatchMemOp_v2");
    }
    return leave(CUDA_SUCCESS);
}

CUresult cuCtxSynchronize(void) {
    CUcontext context;
    int error = fake_need(&context);
    if (error)
        return error;
    pthread_mutex_lock(&fake_lock);
    fake_wait_all(context, "cuCtxSynchronize");
    return leave(context->sticky);
}

CUresult cuCtxSynchronize_v2(CUcontext other) {
    CUcontext context;
    int error = fake_need(&context);
    if (error)
        return error;
    pthread_mutex_lock(&fake_lock);
    context = other ? other : context;
    fake_wait_all(context, "cuCtxSynchronize_v2");
    return leave(context->sticky);
}

/* -- events -------------------------------------------------------------------------------------------------------- */

static int enter_event(CUevent event) {
    CUcontext context;
    int error = enter(&context);
    if (error)
        return error;
    return fake_valid(event, FAKE_EVENT) ? CUDA_SUCCESS : leave(CUDA_ERROR_INVALID_HANDLE);
}

CUresult cuEventCreate(CUevent *event, uint32_t flags) {
    CUcontext context;
    int error = fake_need(&context);
    if (error || !event || flags > 7 || flags & CU_EVENT_INTERPROCESS)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_lock);
    *event = fake_make(FAKE_EVENT, sizeof **event, context);
    (*event)->flags = flags;
    return leave(CUDA_SUCCESS);
}

CUresult cuEventDestroy_v2(CUevent event) {
    int error = enter_event(event);
    if (error)
        return error;
    fake_unref(event->last);
    fake_drop(event);
    free(event);
    return leave(CUDA_SUCCESS);
}

CUresult cuEventRecord(CUevent event, CUstream handle) {
    CUstream stream;
    int error = enter_event(event);
    if (error)
        return error;
    CUcontext context = event->object.context;
    if ((error = fake_stream(handle, context, &stream)))
        return leave(error);
    struct fake_op *op = fake_op(context, NULL);
    fake_enqueue(stream, op, 1, "cuEventRecord");
    fake_unref(event->last);
    event->last = op;
    return leave(CUDA_SUCCESS);
}

CUresult cuEventRecordWithFlags(CUevent event, CUstream handle, uint32_t flags) {
    return flags > 1 ? CUDA_ERROR_INVALID_VALUE : cuEventRecord(event, handle);
}

CUresult cuEventQuery(CUevent event) {
    int error = enter_event(event);
    if (error)
        return error;
    return leave(!event->last || event->last->done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
}

CUresult cuEventSynchronize(CUevent event) {
    int error = enter_event(event);
    if (error)
        return error;
    CUcontext context = event->object.context;
    struct fake_op *op = event->last;
    if (op && !op->done) {
        fake_blocks("cuEventSynchronize");
        op->refs++;
        fake_wait(op); /* not `event->last`: the event may be destroyed in the meantime */
    }
    fake_flush(context);
    return leave(context->sticky);
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent first, CUevent second) {
    int error = enter_event(first);
    if (error)
        return error;
    if (!milliseconds)
        return leave(CUDA_ERROR_INVALID_VALUE);
    if (!fake_valid(second, FAKE_EVENT) || !first->last || !second->last ||
        (first->flags | second->flags) & CU_EVENT_DISABLE_TIMING)
        return leave(CUDA_ERROR_INVALID_HANDLE);
    if (!first->last->done || !second->last->done)
        return leave(CUDA_ERROR_NOT_READY);
    *milliseconds = (float)((second->last->time - first->last->time) * 1e3);
    return leave(CUDA_SUCCESS);
}

CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent first, CUevent second) {
    return cuEventElapsedTime(milliseconds, first, second);
}

CUresult cuStreamWaitEvent(CUstream handle, CUevent event, uint32_t flags) {
    CUstream stream;
    if (flags > 1)
        return CUDA_ERROR_INVALID_VALUE;
    int error = enter_stream(handle, &stream);
    if (error)
        return error;
    if (!fake_valid(event, FAKE_EVENT))
        return leave(CUDA_ERROR_INVALID_HANDLE);
    if (event->last && !event->last->done) {
        struct fake_op *op = fake_op(stream->object.context, NULL);
        add_after(op, event->last);
        fake_enqueue(stream, op, 0, "cuStreamWaitEvent");
    }
    return leave(CUDA_SUCCESS);
}
