/* Relay between a layer and a worker on another host. It has two ends, one on each host:
 *
 *     layer -- shared memory -- near end == messages == far end -- shared memory -- worker
 *
 * The near end acts as the worker of the layer: it creates and seals the shared memory, takes entries from the ring,
 * and stores answers. The far end acts as the layer of the worker; its ring has the same bytes at the same offsets.
 * Callers transport the messages between the ends. No function waits longer than its timeout, and none prints.
 *
 * A client may change its memory at any time, so the near end copies entries before it checks them, and forwards the
 * copies. `tail` of the near ring is the end of the entries that were taken. `tail` of the worker is the near end's
 * credit: the near end takes an entry only if the far ring has room for it.
 */
#include "calls.h"
#include "cu.h"
#include "shared.h"
#include "system.h"
#include "wire.h"

#include <poll.h>
#include <stdlib.h>

#define API __attribute__((visibility("default")))
#define LOOK_NS 50000000l /* interval at which a sleeping thread checks that the other side is alive */
#define SPIN_NS 20000     /* time that a thread spins before it sleeps, if the host has enough cores */
#define STAGING ((size_t)WW_PLACES * WW_PLACE_BYTES)
#define SMALL (WW_PLACE_BYTES / 16) /* a place with at most this many bytes may be sent with its block */
#define SMALL_MOST (4 * SMALL)      /* with more bytes in such places, a block takes no further entry */

enum { NOTHING = 0, WRONG = -1, GONE = -2, STOPPED = -3 };

struct stop { /* an entry of a block with bytes in a place, which must be sent, too */
    uint64_t end;
    uint32_t place, use, nbytes, way;
};

struct near {
    struct ww_ring *ring;
    struct ww_status *status;
    unsigned char *staging;
    uint64_t tail;
    uint32_t uses[WW_PLACES]; /* by place: number of its last use in an entry that was taken */
    _Atomic uint64_t far_tail;
    _Atomic int stopped;
};

struct far {
    struct ww_ring *ring;
    const struct ww_status *status;
    unsigned char *staging;
    uint64_t filled;                          /* end of the bytes in the ring, published or not */
    _Atomic uint32_t asked[WW_SLOTS];         /* by slot: number of the last call that gets an answer */
    uint32_t sent[WW_SLOTS], uses[WW_PLACES]; /* numbers of the last answers and uses that were sent back */
    uint32_t seen;                            /* value of status.changes before the last scan */
    uint64_t tail, deferred;
    uint32_t sticky;
    int again; /* the last scan left out answers, because its buffer was full */
};

/* Head of a message to the near end. For each answer, a struct answer and the answer's bytes, padded to 8, follow. */
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

/* -- both ends ----------------------------------------------------------------------------------------------------- */

/* Sleep until *word is not `seen`, for at most `ns` and LOOK_NS. */
static void doze(const _Atomic uint32_t *word, uint32_t seen, int64_t ns) {
    if (ns > 0)
        ww_futex_wait(word, seen, ns < LOOK_NS ? ns : LOOK_NS);
}

static int64_t now_ns(void) { return (int64_t)ww_now_ns(); }

/* Return true if a thread that has waited since `began` should still spin. */
static bool spins(int64_t began, int64_t now) {
    static int known;
    if (!known)
        known = ww_many_cores() ? 1 : -1;
    return now - began < SPIN_NS && known > 0;
}

/* Return 1 if the other side has closed the socket, or its process has exited. Unexpected packets are dropped, and
 * Linux closes their descriptors. */
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
            struct pollfd p = {socket, POLLRDHUP, 0}; /* n is 0 also for an empty packet */
            return poll(&p, 1, 0) > 0 && p.revents & (POLLRDHUP | POLLHUP | POLLERR);
        }
    }
    return 0;
}

static void free_side(void *side, struct ww_ring *ring, const struct ww_status *status, unsigned char *staging) {
    ww_unmap(ring, sizeof *ring);
    ww_unmap(status, sizeof *status);
    ww_unmap(staging, STAGING);
    free(side);
}

API void ww_near_free(struct near *n) { free_side(n, n->ring, n->status, n->staging); }

API void ww_far_free(struct far *f) { free_side(f, f->ring, f->status, f->staging); }

/* -- near end: memory ---------------------------------------------------------------------------------------------- */

/* Create the shared memory of a client, and its descriptors, which the caller must close. NULL: out of memory. */
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

/* Change a worker's facts to those that a client of the near end gets. */
API void ww_near_facts(struct ww_facts *facts, int opened) {
    facts->type = opened ? WW_OPENED : WW_FACTS;
    facts->remote = 1;
    facts->npeers = 0;
    facts->attributes[CU_DEVICE_CAN_MAP_HOST] = 0;
}

/* Get sizes in bytes: of struct ww_facts, of a place, and the limit for places that are sent with their block. */
API void ww_sizes(uint32_t sizes[3]) {
    sizes[0] = sizeof(struct ww_facts);
    sizes[1] = WW_PLACE_BYTES;
    sizes[2] = SMALL;
}

/* -- near end: the ring -------------------------------------------------------------------------------------------- */

/* Return true if an entry is invalid: a worker would exit because of it. Places are checked more strictly, because the
 * relay moves their bytes. */
static int wrong(const struct near *n, const struct ww_entry *e, uint64_t ahead, uint64_t rest, struct stop *s) {
    if (e->size < sizeof *e || e->size % sizeof *e || e->size > ahead || e->size > rest)
        return 1;
    if (e->op == WW_OP_PAD)
        return e->size > WW_ENTRY_MOST;
    if (e->size > WW_ENTRY_MOST || (e->slot != WW_NO_SLOT && e->slot >= WW_SLOTS) || e->op == WW_OP_LINK ||
        (e->op >= WW_OP_PIN && e->op <= WW_OP_UNPIN))
        return 1; /* these operations send descriptors, which cannot reach another host */
    s->way = ww_place_way(e->op);
    if (!s->way || !e->place)
        return (s->way = WW_NO_BYTES);
    if (e->place > WW_PLACES || e->nbytes > WW_PLACE_BYTES)
        return 1;
    s->place = e->place - 1, s->use = e->use, s->nbytes = e->nbytes;
    uint32_t last = n->uses[s->place]; /* one use of a place at a time: no more transfers than places */
    return e->use != last + 1 || atomic_load_explicit(&n->status->places[s->place].use, memory_order_relaxed) != last;
}

struct block { /* entries that are being taken */
    unsigned char *out;
    uint32_t room, nbytes, small, nstops, most;
    struct stop *stops;
};

/* Take one entry. Return 1; 2 if the block ends with the entry; NOTHING if the near ring is empty, the far ring has no
 * room, or the block is full; WRONG if the entry is invalid. */
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
    n->tail += e.size;
    ww_store_tail(n->status, n->tail, ahead, e.size);
    return e.op == WW_OP_PAD ? 2 : 1;
}

/* Take a block of published entries, with at most `room` bytes (not less than WW_ENTRY_MOST) and at most *nstops
 * entries with bytes in places. The block covers the ring from *from to *to. Return the number of its first bytes,
 * which are in `out`; the rest of the block is padding. NOTHING: no entry was published in time. */
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
        int nothing = atomic_load(&n->ring->head) == n->tail; /* else the far ring is full: ww_near_apply wakes */
        if (nothing)
            atomic_store(&n->status->asleep, 1);
        atomic_thread_fence(memory_order_seq_cst);
        if (!nothing || atomic_load(&n->ring->head) == n->tail)
            doze(&n->ring->wake, seen, until - now);
        atomic_store(&n->status->asleep, 0);
    }
}

API void ww_near_stop(struct near *n) {
    atomic_store(&n->stopped, 1);
    ww_wake_ring(n->ring);
}

API void ww_near_sticky(struct near *n, uint32_t code) { atomic_store(&n->status->sticky, code); }

API void ww_near_place(struct near *n, uint32_t place, uint32_t use, int32_t result) {
    if (place < WW_PLACES)
        ww_store_place(n->status->places + place, use, result);
}

static size_t padded(uint32_t nbytes) { return ((size_t)nbytes + 7) & ~(size_t)7; }

/* Store the contents of a message in `status`: errors first, so that a thread that reads an answer finds the errors of
 * earlier calls. Return 0 or WRONG. */
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
        ww_wake_ring(n->ring);
    }
    size_t at = sizeof head;
    for (uint32_t i = 0; i < head.answers; i++) {
        if (nbytes - at < sizeof a)
            return WRONG;
        memcpy(&a, bytes + at, sizeof a);
        at += sizeof a;
        if (a.slot >= WW_SLOTS || a.nbytes > WW_SLOT_DATA || nbytes - at < padded(a.nbytes))
            return WRONG;
        ww_store_answer(n->status->slots + a.slot, a.seq, a.result, bytes + at, a.nbytes, a.more);
        at += padded(a.nbytes);
    }
    return 0;
}

/* -- far end ------------------------------------------------------------------------------------------------------- */

/* Map the shared memory of a worker. The caller must close the descriptors. */
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

/* Record which slots get answers to the entries of a block: only these slots are scanned. Return 0 or WRONG. */
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

/* Copy a block to its offsets in the far ring, which are those in the near ring, without publishing it. Return 0 or
 * WRONG. */
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
    if (atomic_load_explicit(&f->status->asleep, memory_order_relaxed))
        ww_wake_ring(f->ring);
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

/* Write a message with all changes since the last scan. Return its size in bytes, or 0 if nothing has changed. Errors
 * are read after the answers, so that the message has the errors of all calls before these answers. */
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

/* Wait for changes. Write a message for ww_near_apply, and the places that are done. Return the message's size, or
 * NOTHING if nothing has changed in time. *ended: the worker has exited; then call this function again until it returns
 * NOTHING, to read the worker's last answers. */
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
