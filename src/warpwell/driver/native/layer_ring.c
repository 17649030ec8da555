/* Posting calls, waiting for answers, staging places, deferred errors.
 *
 * Posting needs device.post. Waiting needs no lock, only a reference to the channel: a reset in another thread marks
 * the channel lost, and a waiting thread sees that within WAIT_MS. A signal does not end a wait.
 */
#include "layer.h"
#include "shared.h"
#include "system.h"
#include <stdlib.h>

#define WAIT_MS 50                 /* interval at which a waiting thread checks that the worker is alive */
#define SPIN_NS 10000000           /* a waiting thread spins for 10 ms before it sleeps, as with the native driver */
#define SPIN_SHORT_NS 20000        /* spin time with CU_CTX_BLOCKING_SYNC, or if the call only has to be issued */
#define SPIN_FEW 20                /* checks before a thread sleeps if the worker may need its core */
#define LOOKS 32                   /* checks of the awaited word between two readings of the clock */
#define YIELDS 16                  /* readings of the clock between two calls of sched_yield */
#define AHEAD (16u << 20)          /* weight of a stream's calls after which a caller waits until its call is issued */
#define CALL_WEIGHT 4096u          /* weight of a call, in addition to its bytes */
#define NO_SLOT_NOW (-2)           /* all slots are taken: poll with a query instead of waiting */
#define KEPT_SLOTS (0xffull << 56) /* 8 of each 64 slots are only for calls that are answered soon */
#define KEPT_PLACES ((WW_PLACES + 7u) / 8u + 1u) /* places only for callers that have synchronized their stream */

static bool looked(const _Atomic uint32_t *word, uint32_t value, int times) {
    for (int i = 0; i < times; i++) {
        if (atomic_load_explicit(word, memory_order_acquire) == value)
            return true;
        ww_relax();
    }
    return false;
}

/* Spin for a bounded time until *word is `value`. With `soon`, the bound is SPIN_SHORT_NS. */
static bool spin(const struct ww_channel *c, const _Atomic uint32_t *word, uint32_t value, bool soon) {
    if (!layer.many_cores)
        return looked(word, value, SPIN_FEW);
    if (looked(word, value, LOOKS))
        return true;
    bool sleeps = soon || (c->device->context_flags & CU_CTX_SCHEDULE) == CU_CTX_BLOCKING_SYNC;
    uint64_t until = ww_now_ns() + (sleeps ? SPIN_SHORT_NS : SPIN_NS);
    for (uint32_t round = 1; ww_now_ns() < until; round++) {
        if (looked(word, value, LOOKS))
            return true;
        if (round % YIELDS == 0)
            sched_yield();
    }
    return false;
}

/* Wait until the worker stores `value` in *word. Return 0, or the error of a lost channel. The caller has published the
 * call for which the worker does so. */
static int await(struct ww_channel *c, const _Atomic uint32_t *word, uint32_t value, bool soon) {
    if (atomic_load_explicit(&c->status->asleep, memory_order_relaxed) == WW_NAPS)
        ww_wake_ring(c->ring);
    if (spin(c, word, value, soon))
        return 0;
    for (uint32_t round = 1;; round++) {
        uint32_t seen = atomic_load_explicit(word, memory_order_acquire);
        if (seen == value)
            return 0;
        if ((ww_futex_wait(word, seen, WAIT_MS * 1000000l) == ETIMEDOUT || round % 64 == 0) && !ww_alive(c)) {
            if (atomic_load_explicit(word, memory_order_acquire) == value)
                return 0;
            return atomic_load(&c->lost);
        }
    }
}

/* -- slots --------------------------------------------------------------------------------------------------------- */

static uint32_t try_slot(struct ww_channel *c, uint64_t kept) {
    static _Thread_local unsigned hint;
    for (unsigned i = 0; i < WW_SLOTS / 64; i++) {
        unsigned word = (hint + i) % (WW_SLOTS / 64);
        uint64_t taken = atomic_load_explicit(&c->slots[word], memory_order_relaxed);
        while (~(taken | kept)) {
            unsigned bit = (unsigned)__builtin_ctzll(~(taken | kept));
            if (atomic_compare_exchange_weak_explicit(&c->slots[word], &taken, taken | 1ull << bit,
                                                      memory_order_acquire, memory_order_relaxed)) {
                hint = word;
                return word * 64 + bit;
            }
        }
    }
    return WW_NO_SLOT;
}

static void give_slot(struct ww_channel *c, uint32_t slot) {
    atomic_fetch_and_explicit(&c->slots[slot / 64], ~(1ull << slot % 64), memory_order_release);
}

/* Return true if the answer may depend on a later action of the program. Such calls cannot take the reserved slots. */
static bool waits_long(uint16_t op, uint32_t flags) {
    return (flags & WW_DONE) || op == WW_OP_STREAM_SYNC || op == WW_OP_EVENT_SYNC || op == WW_OP_CTX_SYNC ||
           op == WW_OP_UNPIN;
}

/* Return the query of the stream or event that a call waits for, or 0 for other calls. */
static uint16_t query_of(uint16_t op) {
    return op == WW_OP_STREAM_SYNC ? WW_OP_STREAM_QUERY : op == WW_OP_EVENT_SYNC ? WW_OP_EVENT_QUERY : 0;
}

/* Take a slot whose bit is not in `kept`, so that calls that are answered soon find one even if many threads wait for
 * streams. Return 0, an error code, or NO_SLOT_NOW. */
static int take_slot(struct ww_channel *c, uint16_t op, uint64_t kept, uint32_t *slot) {
    struct timespec step = {.tv_nsec = 200000};
    while ((*slot = try_slot(c, kept)) == WW_NO_SLOT) {
        if (atomic_load(&c->lost))
            return c->lost;
        if (query_of(op) || (kept && ww_in_host_thread))
            return NO_SLOT_NOW;
        nanosleep(&step, NULL);
    }
    return 0;
}

/* -- posting ------------------------------------------------------------------------------------------------------- */

static int await_room(struct ww_channel *c, uint64_t need) {
    for (uint32_t round = 1;; round++) {
        uint32_t seen = atomic_load_explicit(&c->status->tail_futex, memory_order_acquire);
        uint64_t tail = atomic_load_explicit(&c->status->tail, memory_order_acquire);
        if (c->head + need - tail <= WW_RING_BYTES)
            return 0;
        ww_futex_wait(&c->status->tail_futex, seen, 1000000);
        if (round % WAIT_MS == 0 && !ww_alive(c))
            return atomic_load(&c->lost);
    }
}

/* Return the position in the ring of an entry of `size` bytes. If the entry does not fit at the end of the ring, pad
 * the end and return the beginning. NULL: the channel is lost. */
static struct ww_entry *room_for(struct ww_channel *c, uint32_t size) {
    uint32_t at = (uint32_t)(c->head & (WW_RING_BYTES - 1)), rest = WW_RING_BYTES - at;
    uint64_t need = size + (size > rest ? rest : 0);
    if (c->head + need - atomic_load_explicit(&c->status->tail, memory_order_acquire) > WW_RING_BYTES &&
        await_room(c, need))
        return NULL;
    if (size > rest) {
        struct ww_entry *pad = (struct ww_entry *)(c->ring->data + at);
        *pad = (struct ww_entry){.size = rest, .op = WW_OP_PAD, .slot = WW_NO_SLOT};
        c->head += rest;
        at = 0;
    }
    return (struct ww_entry *)(c->ring->data + at);
}

/* Lock device.post and return the channel. If there is no usable one, unlock, set *error and return NULL. */
static struct ww_channel *lock_channel(struct ww_device *d, int *error) {
    pthread_mutex_lock(&d->post);
    struct ww_channel *c = atomic_load_explicit(&d->channel, memory_order_acquire);
    *error = c ? atomic_load_explicit(&c->lost, memory_order_relaxed) : CUDA_ERROR_CONTEXT_IS_DESTROYED;
    if (*error) {
        pthread_mutex_unlock(&d->post);
        return NULL;
    }
    return c;
}

/* Take a slot and a reference to the channel. A thread must not wait for a slot while it holds device.post, because the
 * threads that have the slots need that lock before they free them. */
static int slot_first(struct ww_device *d, uint16_t op, uint32_t flags, struct ww_post *p) {
    int error;
    struct ww_channel *c = lock_channel(d, &error);
    if (!c)
        return error;
    atomic_fetch_add_explicit(&c->references, 1, memory_order_relaxed);
    pthread_mutex_unlock(&d->post);
    p->channel = c;
    if ((error = take_slot(c, op, waits_long(op, flags) ? KEPT_SLOTS : 0, &p->slot)))
        ww_release(c);
    return error;
}

static int drop_slot(struct ww_post *p, int error) {
    if (p->slot != WW_NO_SLOT) {
        give_slot(p->channel, p->slot);
        ww_release(p->channel);
    }
    return error;
}

/* Let a stream that the driver does not order after the legacy stream wait for the synchronous copies that returned
 * early (ww_mark_copied). */
static bool come_after_copies(struct ww_device *d, struct ww_channel *c, uint32_t stream) {
    struct ww_args_event args = {(uint32_t)atomic_load(&d->copied), 0};
    uint32_t size = sizeof(struct ww_entry) + 32;
    struct ww_entry *e = room_for(c, size);
    if (!e)
        return false;
    *e = (struct ww_entry){.size = size, .op = WW_OP_STREAM_WAIT, .slot = WW_NO_SLOT, .stream = stream};
    memcpy(e + 1, &args, sizeof args);
    c->head += size; /* published together with the call that follows */
    c->behind[stream] = c->copies;
    return true;
}

int ww_begin(struct ww_device *d, uint16_t op, uint32_t stream, uint32_t flags, size_t nbytes, struct ww_post *p) {
    uint32_t size = (uint32_t)((sizeof(struct ww_entry) + nbytes + 31) & ~(size_t)31);
    int error;
    p->device = d;
    p->slot = WW_NO_SLOT;
    p->far_ahead = false;
    if (__builtin_expect(stream && atomic_load_explicit(&d->holds, memory_order_acquire), 0) && !ww_in_host_thread &&
        stream != WW_RECORDED)
        ww_host_wait(d, stream);
    if (nbytes > WW_ENTRY_MOST - sizeof(struct ww_entry))
        return CUDA_ERROR_INVALID_VALUE;
    if (__builtin_expect((flags & (WW_DONE | WW_ANSWERED)) || layer.strict, 0) && (error = slot_first(d, op, flags, p)))
        return error;
    struct ww_channel *c = lock_channel(d, &error);
    if (!c)
        return drop_slot(p, error);
    if (p->slot != WW_NO_SLOT && c != p->channel) { /* a reset came before the lock */
        pthread_mutex_unlock(&d->post);
        return drop_slot(p, CUDA_ERROR_CONTEXT_IS_DESTROYED);
    }
    bool after = stream <= WW_RECORDED || stream >= WW_IDS || c->behind[stream] == c->copies ||
                 c->behind[stream] == WW_ALWAYS || come_after_copies(d, c, stream);
    struct ww_entry *e = after ? room_for(c, size) : NULL;
    if (!e) {
        error = atomic_load(&c->lost);
        pthread_mutex_unlock(&d->post);
        return drop_slot(p, error);
    }
    *e = (struct ww_entry){
        .size = size, .op = op, .flags = (uint16_t)(flags & ~WW_ANSWERED), .slot = p->slot, .stream = stream};
    if (p->slot != WW_NO_SLOT)
        e->seq = p->seq = ++c->slot_seq[p->slot];
    p->channel = c;
    p->entry = e;
    return 0;
}

/* After each AHEAD bytes of a stream's calls, give one call a slot, so that its caller waits until the worker has
 * issued it. Otherwise calls to a stream that never becomes ready would fill the worker's memory. */
static void far_ahead(struct ww_post *p) {
    struct ww_channel *c = p->channel;
    uint32_t *weight = &c->weight[p->entry->stream % WW_IDS];
    *weight += CALL_WEIGHT + p->entry->size + p->entry->nbytes;
    if (*weight < AHEAD || p->slot != WW_NO_SLOT || (p->slot = try_slot(c, KEPT_SLOTS)) == WW_NO_SLOT)
        return;
    *weight = 0;
    p->far_ahead = true;
    atomic_fetch_add_explicit(&c->references, 1, memory_order_relaxed);
    p->entry->slot = p->slot;
    p->entry->seq = p->seq = ++c->slot_seq[p->slot];
}

/* Publish the entry and unlock device.post. After a wake-up, no other is sent until the worker has consumed the entry
 * that was published with it. No wake-up is lost: this thread stores `head`, then (fence) loads `asleep` and `tail`;
 * the worker stores `asleep`, then (fence) loads `head`. */
static void publish(struct ww_post *p) {
    struct ww_channel *c = p->channel;
    if (p->entry->stream)
        far_ahead(p);
    c->head += p->entry->size;
    atomic_store_explicit(&c->ring->head, c->head, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&c->status->asleep, memory_order_relaxed) == WW_SLEEPS &&
        atomic_load_explicit(&c->status->tail, memory_order_relaxed) >= c->woken) {
        c->woken = c->head;
        ww_wake_ring(c->ring);
    }
    pthread_mutex_unlock(&p->device->post);
}

int ww_finish(struct ww_post *p) {
    publish(p);
    if (__builtin_expect(p->slot == WW_NO_SLOT, 1))
        return 0;
    const struct ww_slot *s = &p->channel->status->slots[p->slot];
    int error = await(p->channel, &s->seq, p->seq, p->far_ahead);
    return drop_slot(p, error ? error : s->result);
}

int ww_send_flags(struct ww_device *d, uint16_t op, uint32_t stream, uint32_t flags, const void *args, size_t nargs) {
    struct ww_post p;
    int error = ww_begin(d, op, stream, flags, nargs, &p);
    if (error)
        return error;
    memcpy(p.entry + 1, args, nargs);
    return ww_finish(&p);
}

int ww_send(struct ww_device *d, uint16_t op, uint32_t stream, const void *args, size_t nargs) {
    return ww_send_flags(d, op, stream, 0, args, nargs);
}

/* Post a call and wait for its answer. If that succeeds, the caller must free the slot. */
static int ask(struct ww_device *d, uint16_t op, uint32_t stream, const void *args, size_t nargs, struct ww_post *p) {
    int error = ww_begin(d, op, stream, WW_ANSWERED, nargs, p);
    if (error)
        return error;
    if (nargs)
        memcpy(p->entry + 1, args, nargs);
    publish(p);
    error = await(p->channel, &p->channel->status->slots[p->slot].seq, p->seq, false);
    return error ? drop_slot(p, error) : 0;
}

int ww_call(struct ww_device *d, uint16_t op, uint32_t stream, const void *args, size_t nargs, void *out, size_t nout) {
    struct timespec step = {.tv_nsec = 1000000};
    struct ww_post p;
    int error = ask(d, op, stream, args, nargs, &p);
    if (error == NO_SLOT_NOW)
        while ((error = ww_call(d, query_of(op), stream, args, nargs, NULL, 0)) == CUDA_ERROR_NOT_READY)
            nanosleep(&step, NULL);
    if (error || p.slot == WW_NO_SLOT)
        return error;
    const struct ww_slot *s = &p.channel->status->slots[p.slot];
    error = !s->result && nout && s->nbytes != nout ? CUDA_ERROR_UNKNOWN : s->result;
    if (!error && nout)
        memcpy(out, s->data, nout);
    return drop_slot(&p, error);
}

int ww_ask_later(struct ww_device *d, uint16_t op, struct ww_post *p) {
    int error = ww_begin(d, op, 0, WW_ANSWERED, 0, p);
    if (!error)
        publish(p);
    return error == NO_SLOT_NOW ? CUDA_ERROR_NOT_READY : error;
}

bool ww_answered(struct ww_post *p) {
    const _Atomic uint32_t *seq = &p->channel->status->slots[p->slot].seq;
    if (atomic_load_explicit(seq, memory_order_acquire) != p->seq && ww_alive(p->channel))
        return false;
    drop_slot(p, 0);
    return true;
}

int ww_ask(struct ww_device *d, uint16_t op, const void *args, size_t nargs, unsigned char **all, size_t *nall) {
    struct ww_post p;
    *all = NULL;
    *nall = 0;
    int error = ask(d, op, 0, args, nargs, &p);
    if (error)
        return error;
    const struct ww_slot *s = &p.channel->status->slots[p.slot];
    size_t n = s->nbytes < WW_SLOT_DATA ? s->nbytes : WW_SLOT_DATA, whole = n + s->more;
    if (n && !(*all = malloc(whole)))
        return drop_slot(&p, CUDA_ERROR_OUT_OF_MEMORY);
    if (n)
        memcpy(*all, s->data, n);
    int result = drop_slot(&p, s->result);
    for (size_t at = n; at < whole && !error; at += WW_SLOT_DATA) {
        error =
            ww_call_more(d, WW_OP_MORE, 0, at - n, *all + at, whole - at < WW_SLOT_DATA ? whole - at : WW_SLOT_DATA);
    }
    if (error) {
        free(*all);
        *all = NULL;
        return result ? result : error;
    }
    *nall = whole;
    return result;
}

/* -- errors -------------------------------------------------------------------------------------------------------- */

int ww_earlier(struct ww_device *d) {
    struct ww_channel *c = atomic_load_explicit(&d->channel, memory_order_acquire);
    if (!c)
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    int sticky = (int)atomic_load_explicit(&c->status->sticky, memory_order_acquire);
    if (__builtin_expect(sticky != 0, 0))
        return sticky;
    uint64_t deferred = atomic_load_explicit(&c->status->deferred, memory_order_acquire);
    uint64_t seen = atomic_load_explicit(&c->seen, memory_order_relaxed);
    while (__builtin_expect(deferred >> 32 != seen >> 32, 0))
        if (atomic_compare_exchange_weak(&c->seen, &seen, deferred))
            return (int)(uint32_t)deferred;
    return 0;
}

/* -- places -------------------------------------------------------------------------------------------------------- */

static bool place_idle(const struct ww_channel *c, uint32_t i) {
    return !c->place_held[i] &&
           atomic_load_explicit(&c->status->places[i].use, memory_order_acquire) == c->place_use[i];
}

uint32_t ww_places_free(struct ww_device *d) {
    int error;
    uint32_t n = 0;
    struct ww_channel *c = lock_channel(d, &error);
    if (!c)
        return 0;
    for (uint32_t i = 0; i < WW_PLACES; i++)
        n += place_idle(c, i);
    pthread_mutex_unlock(&d->post);
    return n;
}

/* Choose a free place. A stream gets one while it has fewer places than are free, and one of the last KEPT_PLACES only
 * if the caller has synchronized the stream: so streams that never become ready leave places to others. The very last
 * place is for the thread of host functions, which posts the rest of graphs: threads that hold places may wait for it.
 * Return 0, NOT_READY if no place may be taken now, or WW_STREAM_FIRST. */
static int pick_place(struct ww_channel *c, uint32_t stream, bool waited, uint32_t *place) {
    uint32_t idle = 0, mine = 0, found = WW_PLACES;
    for (uint32_t i = 0; i < WW_PLACES; i++) {
        if (place_idle(c, i)) {
            idle++;
            found = i;
        } else if (c->place_stream[i] == stream) {
            mine++;
        }
    }
    *place = found;
    if (!waited && idle <= KEPT_PLACES)
        return WW_STREAM_FIRST;
    return ww_in_host_thread ? (idle ? 0 : CUDA_ERROR_NOT_READY) : idle > 1 && mine < idle ? 0 : CUDA_ERROR_NOT_READY;
}

int ww_place_take(struct ww_device *d, uint32_t stream, bool waits, bool waited, struct ww_channel **taken,
                  uint32_t *place) {
    struct timespec step = {.tv_nsec = 20000};
    for (uint32_t round = 1;; round++) {
        int error;
        struct ww_channel *c = lock_channel(d, &error);
        if (!c)
            return error;
        int code = pick_place(c, stream, waited, place);
        if (!code) {
            c->place_held[*place] = true;
            c->place_stream[*place] = stream;
            atomic_fetch_add_explicit(&c->references, 1, memory_order_relaxed);
            *taken = c;
        } else if (round % 1000 == 0) {
            ww_alive(c);
        }
        pthread_mutex_unlock(&d->post);
        if (code != CUDA_ERROR_NOT_READY || !waits)
            return code;
        nanosleep(&step, NULL);
    }
}

int ww_place_send(struct ww_device *d, uint16_t op, uint32_t stream, uint32_t flags, struct ww_channel *c,
                  uint32_t place, uint32_t nbytes, const void *args, size_t nargs) {
    struct ww_post p;
    int error = ww_begin(d, op, stream, flags, nargs, &p);
    if (error)
        return error;
    if (p.channel != c) { /* the device was reset: this entry is in the new worker's ring */
        pthread_mutex_unlock(&d->post);
        return drop_slot(&p, CUDA_ERROR_CONTEXT_IS_DESTROYED);
    }
    p.entry->place = place + 1;
    p.entry->nbytes = nbytes;
    p.entry->use = ++c->place_use[place];
    memcpy(p.entry + 1, args, nargs);
    return ww_finish(&p);
}

int ww_place_fill(struct ww_device *d, uint16_t op, uint32_t stream, uint32_t flags, const void *bytes, uint32_t nbytes,
                  const void *args, size_t nargs) {
    struct ww_channel *c;
    uint32_t place;
    int error = ww_place_take(d, stream, true, !stream, &c, &place);
    if (error == WW_STREAM_FIRST && !(error = ww_call(d, WW_OP_STREAM_SYNC, stream, NULL, 0, NULL, 0)))
        error = ww_place_take(d, stream, true, true, &c, &place);
    if (error)
        return error;
    memcpy(c->staging + (size_t)place * WW_PLACE_BYTES, bytes, nbytes);
    error = ww_place_send(d, op, stream, flags, c, place, nbytes, args, nargs);
    ww_place_drop(d, c, place);
    return error;
}

int ww_place_wait(struct ww_channel *c, uint32_t place) {
    int error = await(c, &c->status->places[place].use, c->place_use[place], false);
    return error ? error : c->status->places[place].result;
}

void ww_place_drop(struct ww_device *d, struct ww_channel *c, uint32_t place) {
    pthread_mutex_lock(&d->post);
    c->place_held[place] = false;
    pthread_mutex_unlock(&d->post);
    ww_release(c);
}

/* -- events -------------------------------------------------------------------------------------------------------- */

int ww_event_new(struct ww_device *d, uint32_t flags, uint32_t *id) {
    uint64_t life = atomic_load(&d->life);
    int error = ww_id_take(&d->events, id);
    if (!error && (error = ww_send_event(d, WW_OP_EVENT_CREATE, 0, *id, flags)))
        ww_id_give(d, &d->events, life, *id);
    return error;
}

int ww_event_end(struct ww_device *d, uint64_t life, uint32_t id) {
    int error = life == atomic_load(&d->life) ? ww_send_event(d, WW_OP_EVENT_DESTROY, 0, id, 0) : 0;
    if (!error)
        ww_id_give(d, &d->events, life, id);
    return error;
}
