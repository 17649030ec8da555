/* Between hosts: two ends that stand between a layer and a worker of another host.
 *
 *     layer  -- ring, status, staging of the near end --  near  == messages, bytes ==  far  -- ring .. of the worker --
 * worker
 *
 * The near end is a worker to the layer: it makes and seals the memory, takes entries out of the ring, and stores
 * answers. The far end is a layer to the worker, and its ring has the same bytes at the same offsets. The transport
 * between them is not known here. No function waits longer than its timeout, and none prints.
 *
 * A client may write anything at any time: the near end copies entries out before it checks them, and hands on the
 * copies. `tail` of the near ring is what was taken; the worker's is the near end's credit: it takes no entry for which
 * the far ring has no room.
 */
#include "calls.h"
#include "cu.h"
#include "system.h"
#include "wire.h"

#include <poll.h>
#include <stdlib.h>

#define API __attribute__((visibility("default")))
#define LOOK_NS 50000000l /* how often a sleeper looks whether the other side lives */
#define SPIN_NS 20000     /* without anything new, before it sleeps, where there are cores to spare */
#define STAGING ((size_t)WW_PLACES * WW_PLACE_BYTES)
#define SMALL (WW_PLACE_BYTES / 16) /* bytes of a place that may travel with its block */
#define SMALL_MOST (4 * SMALL)      /* .. of all of a block */

enum { NOTHING = 0, WRONG = -1, GONE = -2, STOPPED = -3 };

struct stop { /* an entry of a block whose place has bytes to move */
    uint64_t end;
    uint32_t place, use, nbytes, way;
};

struct near {
    struct ww_ring *ring;
    struct ww_status *status;
    unsigned char *staging;
    uint64_t tail;
    uint32_t uses[WW_PLACES]; /* of places, the last that was taken */
    _Atomic uint64_t far_tail;
    _Atomic int stopped;
};

struct far {
    struct ww_ring *ring;
    const struct ww_status *status;
    unsigned char *staging;
    uint64_t filled; /* bytes of the ring that are there, published or not */
    _Atomic uint32_t asked[WW_SLOTS];
    uint32_t sent[WW_SLOTS], uses[WW_PLACES];
    uint32_t seen; /* status.changes */
    uint64_t tail, deferred;
    uint32_t sticky;
    int again;
};

/* An answer message: a head, then for each answer a slot with its bytes, padded to 8. */
struct back {
    uint64_t tail, deferred;
    uint32_t sticky, answers;
};

struct answer {
    uint32_t slot, seq;
    int32_t result;
    uint32_t nbytes, more, unused;
};

struct done {
    uint32_t place, use;
    int32_t result;
};

/* -- both ---------------------------------------------------------------------------------------------------------- */

/* Sleep for less than 1 s, and not past the time to look. */
static void doze(const _Atomic uint32_t *word, uint32_t seen, int64_t ns) {
    if (ns > 0)
        ww_futex_wait(word, seen, ns < LOOK_NS ? ns : LOOK_NS);
}

static int64_t now_ns(void) { return (int64_t)ww_now_ns(); }

/* Whether a thread that began to wait then spins. */
static bool spins(int64_t began, int64_t now) {
    static int known;
    if (!known)
        known = ww_many_cores() ? 1 : -1;
    return now - began < SPIN_NS && known > 0;
}

/* Whether the other end of a socket, or its process, is gone. Unexpected packets are dropped, and the kernel
 * closes their descriptors. */
API int ww_gone(int socket, int pidfd) {
    char byte;
    struct pollfd process = {pidfd, POLLIN, 0};
    if (pidfd >= 0 && poll(&process, 1, 0) > 0)
        return 1;
    for (int i = 0; i < 64; i++) {
        ssize_t n = recv(socket, &byte, 1, MSG_DONTWAIT);
        if (n < 0)
            return errno != EAGAIN && errno != EINTR;
        if (n == 0) {
            struct pollfd p = {socket, POLLRDHUP, 0}; /* or an empty packet */
            return poll(&p, 1, 0) > 0 && p.revents & (POLLRDHUP | POLLHUP | POLLERR);
        }
    }
    return 0;
}

/* -- near: memory -------------------------------------------------------------------------------------------------- */

API void ww_near_free(struct near *n) {
    ww_unmap(n->ring, sizeof *n->ring);
    ww_unmap(n->status, sizeof *n->status);
    ww_unmap(n->staging, STAGING);
    free(n);
}

/* Make the memory of a client and its descriptors, which are the caller's; NULL: out of memory. */
API struct near *ww_near_make(int fds[3]) {
    struct near *n = calloc(1, sizeof *n);
    fds[0] = fds[1] = fds[2] = -1;
    if (!n)
        return NULL;
    if ((n->ring = ww_share_memory("warpwell-ring", NULL, sizeof *n->ring, false, fds)) &&
        (n->status = ww_share_memory("warpwell-status", NULL, sizeof *n->status, true, fds + 1)) &&
        (n->staging = ww_share_memory("warpwell-staging", NULL, STAGING, false, fds + 2)))
        return n;
    for (int i = 0; i < 3; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    ww_near_free(n);
    return NULL;
}

API unsigned char *ww_near_staging(struct near *n) { return n->staging; }

/* Facts of a worker as a client of the near end sees them. */
API void ww_near_facts(struct ww_facts *facts, int opened) {
    facts->said = opened ? WW_OPENED : WW_FACTS;
    facts->remote = 1;
    facts->npeers = 0;
    facts->attributes[CU_DEVICE_CAN_MAP_HOST] = 0;
}

/* Bytes of facts, of a place, of a place whose bytes travel with its block. */
API void ww_sizes(uint32_t sizes[3]) {
    sizes[0] = sizeof(struct ww_facts);
    sizes[1] = WW_PLACE_BYTES;
    sizes[2] = SMALL;
}

/* -- near: the ring ------------------------------------------------------------------------------------------------ */

/* Check what a worker would end for, and places more closely: the bytes move outside of it. */
static int wrong(const struct near *n, const struct ww_entry *e, uint64_t ahead, uint64_t rest, struct stop *s) {
    if (e->size < sizeof *e || e->size % sizeof *e || e->size > ahead || e->size > rest)
        return 1;
    if (e->op == WW_OP_PAD)
        return e->size > WW_ENTRY_MOST;
    if (e->size > WW_ENTRY_MOST || (e->slot != WW_NO_SLOT && e->slot >= WW_SLOTS) || e->op == WW_OP_LINK ||
        (e->op >= WW_OP_PIN && e->op <= WW_OP_UNPIN))
        return 1; /* no descriptor gets there */
    s->way = ww_place_way(e->op);
    if (!s->way || !e->place)
        return (s->way = WW_NO_BYTES);
    if (e->place > WW_PLACES || e->nbytes > WW_PLACE_BYTES)
        return 1;
    s->place = e->place - 1, s->use = e->use, s->nbytes = e->nbytes;
    uint32_t last = n->uses[s->place]; /* one use of a place at a time: no more transfers than places */
    return e->use != last + 1 || atomic_load_explicit(&n->status->places[s->place].use, memory_order_relaxed) != last;
}

static void passed(struct near *n, uint64_t ahead, uint64_t size) {
    n->tail += size;
    atomic_store_explicit(&n->status->tail, n->tail, memory_order_release);
    if (ahead > WW_RING_BYTES / 2 && ahead - size <= WW_RING_BYTES / 2) {
        atomic_fetch_add(&n->status->tail_futex, 1);
        ww_wake_all(&n->status->tail_futex);
    }
}

struct block { /* that is being taken */
    unsigned char *out;
    uint32_t room, nbytes, small, nstops, most;
    struct stop *stops;
};

/* Take one entry: 1, NOTHING (there is no more, or no room, or the block is full), WRONG; 2: the block ends with it. */
static int take_one(struct near *n, struct block *b) {
    uint64_t ahead = atomic_load_explicit(&n->ring->head, memory_order_acquire) - n->tail;
    if (!ahead)
        return NOTHING;
    if (ahead > WW_RING_BYTES || ahead % sizeof(struct ww_entry))
        return WRONG;
    if (b->room - b->nbytes < WW_ENTRY_MOST || b->nstops == b->most || b->small > SMALL_MOST)
        return NOTHING;
    uint64_t at = n->tail % WW_RING_BYTES;
    unsigned char *to = b->out + b->nbytes;
    struct ww_entry e;
    struct stop s = {0};
    memcpy(to, n->ring->data + at, sizeof e);
    memcpy(&e, to, sizeof e);
    if (wrong(n, &e, ahead, WW_RING_BYTES - at, &s))
        return WRONG;
    if (n->tail + e.size - atomic_load(&n->far_tail) > WW_RING_BYTES)
        return NOTHING;
    if (s.way) {
        n->uses[s.place] = s.use;
        s.end = n->tail + e.size;
        b->stops[b->nstops++] = s;
        b->small += s.nbytes <= SMALL ? s.nbytes : 0;
    }
    uint32_t bytes = e.op == WW_OP_PAD ? (uint32_t)sizeof e : e.size;
    memcpy(to + sizeof e, n->ring->data + at + sizeof e, bytes - sizeof e);
    b->nbytes += bytes;
    passed(n, ahead, e.size);
    return e.op == WW_OP_PAD ? 2 : 1;
}

/* Take entries that are there, at most `room` bytes (not less than WW_ENTRY_MOST) and `*nstops` with bytes: *from to
 * *to of the ring, of which the bytes returned are the beginning. NOTHING: none came in time. */
API int ww_near_take(struct near *n, int socket, int pidfd, unsigned char *out, uint32_t room, struct stop *stops,
                     uint32_t *nstops, uint64_t *from, uint64_t *to, int timeout_ms) {
    struct block b = {.out = out, .room = room, .stops = stops, .most = *nstops};
    int64_t began = now_ns(), until = began + timeout_ms * 1000000ll;
    *from = n->tail;
    *nstops = 0;
    for (;;) {
        if (atomic_load(&n->stopped))
            return STOPPED;
        uint32_t seen = atomic_load(&n->ring->wake);
        int code;
        while ((code = take_one(n, &b)) == 1)
            ;
        *to = n->tail;
        *nstops = b.nstops;
        if (code == WRONG)
            return WRONG;
        if (b.nbytes)
            return (int)b.nbytes;
        int64_t now = now_ns();
        if (spins(began, now)) {
            ww_relax();
            continue;
        }
        if (ww_gone(socket, pidfd))
            return GONE;
        if (now >= until)
            return NOTHING;
        int nothing = atomic_load(&n->ring->head) == n->tail; /* else the far ring is full: its tail wakes us */
        if (nothing)
            atomic_store(&n->status->asleep, 1);
        atomic_thread_fence(memory_order_seq_cst);
        if (!nothing || atomic_load(&n->ring->head) == n->tail)
            doze(&n->ring->wake, seen, until - now);
        atomic_store(&n->status->asleep, 0);
    }
}

static void wake(struct near *n) {
    atomic_fetch_add(&n->ring->wake, 1);
    ww_wake_all(&n->ring->wake);
}

API void ww_near_stop(struct near *n) {
    atomic_store(&n->stopped, 1);
    wake(n);
}

API void ww_near_sticky(struct near *n, uint32_t code) { atomic_store(&n->status->sticky, code); }

API void ww_near_place(struct near *n, uint32_t place, uint32_t use, int32_t result) {
    if (place >= WW_PLACES)
        return;
    struct ww_place *p = n->status->places + place;
    p->result = result;
    atomic_store_explicit(&p->use, use, memory_order_release);
    ww_wake_all(&p->use);
}

static size_t padded(uint32_t nbytes) { return ((size_t)nbytes + 7) & ~(size_t)7; }

/* Store what has come back: errors first, so that a thread that sees an answer sees the errors before it. 0, or WRONG.
 */
API int ww_near_apply(struct near *n, const unsigned char *bytes, size_t nbytes) {
    struct back head;
    struct answer a;
    if (nbytes < sizeof head)
        return WRONG;
    memcpy(&head, bytes, sizeof head);
    if (head.sticky)
        atomic_store(&n->status->sticky, head.sticky);
    atomic_store(&n->status->deferred, head.deferred);
    if (head.tail > atomic_load(&n->far_tail)) {
        atomic_store(&n->far_tail, head.tail);
        wake(n);
    }
    size_t at = sizeof head;
    for (uint32_t i = 0; i < head.answers; i++) {
        if (nbytes - at < sizeof a)
            return WRONG;
        memcpy(&a, bytes + at, sizeof a);
        at += sizeof a;
        if (a.slot >= WW_SLOTS || a.nbytes > WW_SLOT_DATA || nbytes - at < padded(a.nbytes))
            return WRONG;
        struct ww_slot *s = n->status->slots + a.slot;
        s->result = a.result;
        s->nbytes = a.nbytes;
        s->more = a.more;
        memcpy(s->data, bytes + at, a.nbytes);
        atomic_store_explicit(&s->seq, a.seq, memory_order_release);
        ww_wake_all(&s->seq);
        at += padded(a.nbytes);
    }
    return 0;
}

/* -- far ----------------------------------------------------------------------------------------------------------- */

API void ww_far_free(struct far *f) {
    ww_unmap(f->ring, sizeof *f->ring);
    ww_unmap(f->status, sizeof *f->status);
    ww_unmap(f->staging, STAGING);
    free(f);
}

/* Map what a worker gave; the descriptors stay the caller's. */
API struct far *ww_far_make(const int fds[3]) {
    struct far *f = calloc(1, sizeof *f);
    if (!f)
        return NULL;
    f->ring = ww_map_shared(fds[0], sizeof *f->ring, PROT_READ | PROT_WRITE);
    f->status = ww_map_shared(fds[1], sizeof *f->status, PROT_READ);
    f->staging = ww_map_shared(fds[2], STAGING, PROT_READ | PROT_WRITE);
    if (f->ring && f->status && f->staging)
        return f;
    ww_far_free(f);
    return NULL;
}

API unsigned char *ww_far_staging(struct far *f) { return f->staging; }

/* Note for which answers a block asks: only those slots are looked at. */
static int note(struct far *f, const unsigned char *bytes, uint32_t nbytes) {
    struct ww_entry e;
    for (uint32_t at = 0; at < nbytes;) {
        if (nbytes - at < sizeof e)
            return WRONG;
        memcpy(&e, bytes + at, sizeof e);
        if (e.op == WW_OP_PAD)
            return at + sizeof e == nbytes ? 0 : WRONG;
        if (e.size < sizeof e || e.size > nbytes - at || (e.slot != WW_NO_SLOT && e.slot >= WW_SLOTS))
            return WRONG;
        if (e.slot != WW_NO_SLOT)
            atomic_store_explicit(&f->asked[e.slot], e.seq, memory_order_relaxed);
        at += e.size;
    }
    return 0;
}

/* Put a block where it was in the near ring, without publishing it. 0, or WRONG. */
API int ww_far_copy(struct far *f, uint64_t from, uint64_t to, const unsigned char *bytes, uint32_t nbytes) {
    uint64_t tail = atomic_load_explicit(&f->status->tail, memory_order_acquire);
    if (from != f->filled || to < from || nbytes > to - from || to - tail > WW_RING_BYTES || note(f, bytes, nbytes))
        return WRONG;
    uint64_t at = from % WW_RING_BYTES, first = WW_RING_BYTES - at;
    if (first > nbytes)
        first = nbytes;
    memcpy(f->ring->data + at, bytes, first);
    memcpy(f->ring->data, bytes + first, nbytes - first);
    f->filled = to;
    return 0;
}

API void ww_far_publish(struct far *f, uint64_t head) {
    atomic_store_explicit(&f->ring->head, head, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    if (!atomic_load_explicit(&f->status->asleep, memory_order_relaxed))
        return;
    atomic_fetch_add(&f->ring->wake, 1);
    ww_wake_all(&f->ring->wake);
}

static uint32_t scan_answers(struct far *f, unsigned char *out, uint32_t room, uint32_t *answers) {
    uint32_t at = 0;
    for (uint32_t i = 0; i < WW_SLOTS; i++) {
        if (atomic_load_explicit(&f->asked[i], memory_order_relaxed) == f->sent[i])
            continue;
        const struct ww_slot *s = f->status->slots + i;
        uint32_t seq = atomic_load_explicit(&s->seq, memory_order_acquire);
        if (seq == f->sent[i])
            continue;
        struct answer a = {.slot = i, .seq = seq, .result = s->result, .nbytes = s->nbytes, .more = s->more};
        if (a.nbytes > WW_SLOT_DATA)
            a.nbytes = WW_SLOT_DATA;
        if (room - at < sizeof a + padded(a.nbytes)) {
            f->again = 1;
            break;
        }
        memcpy(out + at, &a, sizeof a);
        memcpy(out + at + sizeof a, s->data, a.nbytes);
        at += (uint32_t)(sizeof a + padded(a.nbytes));
        f->sent[i] = seq;
        ++*answers;
    }
    return at;
}

static uint32_t scan_places(struct far *f, struct done *places) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < WW_PLACES; i++) {
        uint32_t use = atomic_load_explicit(&f->status->places[i].use, memory_order_acquire);
        if (use == f->uses[i])
            continue;
        places[n++] = (struct done){i, use, f->status->places[i].result};
        f->uses[i] = use;
    }
    return n;
}

/* Write what is new; 0: nothing is. Errors are read behind the answers, so they are as new as these. */
static int scan(struct far *f, unsigned char *out, uint32_t room, struct done *places, uint32_t *nplaces) {
    struct back head = {0};
    f->again = 0;
    uint32_t bytes = scan_answers(f, out + sizeof head, room - (uint32_t)sizeof head, &head.answers);
    *nplaces = scan_places(f, places);
    atomic_thread_fence(memory_order_acquire);
    head.deferred = atomic_load(&f->status->deferred);
    head.sticky = atomic_load(&f->status->sticky);
    head.tail = atomic_load(&f->status->tail);
    int far_on = head.tail - f->tail >= WW_RING_BYTES / 4;
    if (!head.answers && !*nplaces && head.deferred == f->deferred && head.sticky == f->sticky && !far_on)
        return 0;
    f->deferred = head.deferred, f->sticky = head.sticky, f->tail = head.tail;
    memcpy(out, &head, sizeof head);
    return (int)(sizeof head + bytes);
}

/* Wait for something new and write it: the bytes for `ww_near_apply`, and places that are done. NOTHING: none came in
 * time. *ended: the worker is gone; call until it returns NOTHING. */
API int ww_far_wait(struct far *f, int socket, unsigned char *out, uint32_t room, struct done *places,
                    uint32_t *nplaces, int *ended, int timeout_ms) {
    int64_t began = now_ns(), until = began + timeout_ms * 1000000ll;
    *nplaces = 0;
    for (;;) {
        uint32_t changes = atomic_load_explicit(&f->status->changes, memory_order_acquire);
        if (changes != f->seen || f->again || *ended) {
            f->seen = changes;
            int n = scan(f, out, room, places, nplaces);
            if (n || *ended)
                return n;
            continue;
        }
        int64_t now = now_ns();
        if (spins(began, now)) {
            ww_relax();
            continue;
        }
        *ended = ww_gone(socket, -1);
        if (*ended)
            continue;
        if (now >= until)
            return NOTHING;
        atomic_store(&f->ring->watched, 1);
        atomic_thread_fence(memory_order_seq_cst);
        if (atomic_load(&f->status->changes) == changes)
            doze(&f->status->changes, changes, until - now);
        atomic_store(&f->ring->watched, 0);
    }
}
