/* Links between two workers of this process on one host, access of one device to another device's memory, and waits for
 * another device's events.
 *
 * A link is a socket pair with one end for each worker, created at its first use. Over it, the worker of an owner
 * shares its memory with the worker of a user, which from then on maps every allocation of the owner. The result for a
 * pair is valid for the lives of both devices. Without a link, the program carries out copies and waits between two
 * devices.
 */
#include "layer.h"
#include "system.h"
#include <string.h>

#define YES 1u
#define NO 2u

static _Atomic uint64_t linked[WW_DEVICES][WW_DEVICES];  /* tag of both lives | YES or NO; smaller index first */
static _Atomic uint64_t reached[WW_DEVICES][WW_DEVICES]; /* the same, by index of user, owner */
static _Atomic uint64_t numbers;                         /* number of the last signal */
static uint32_t serial; /* of the last packet with a descriptor; layer.linking protects it */
_Atomic uint64_t ww_pins;

static int index_of(const struct ww_device *d) { return (int)(d - layer.devices); }

static uint64_t tag(const struct ww_device *a, const struct ww_device *b) {
    return (atomic_load(&a->life) & 0x7fffffff) << 33 | (atomic_load(&b->life) & 0x7fffffff) << 2;
}

static const struct ww_peer *peer_of(const struct ww_device *d, const struct ww_device *owner) {
    if (d->facts.remote || owner->facts.remote)
        return NULL;
    for (uint32_t i = 0; i < d->facts.npeers && i < WW_PEERS; i++)
        if (!memcmp(d->facts.peers[i].uuid, owner->facts.uuid, sizeof owner->facts.uuid))
            return &d->facts.peers[i];
    return NULL;
}

/* -- links --------------------------------------------------------------------------------------------------------- */

/* Send a descriptor to a worker in a packet with `serial`, then post the call whose arguments have the same number.
 * layer.linking is held. */
static int give(struct ww_device *d, int fd, uint16_t op, const void *args, size_t nargs) {
    struct ww_link_packet packet = {WW_LINK, serial};
    pthread_mutex_lock(&d->post);
    struct ww_channel *c = atomic_load(&d->channel);
    int lost = !c || ww_send_packet(c->socket, &packet, sizeof packet, &fd, 1, MSG_DONTWAIT);
    pthread_mutex_unlock(&d->post);
    return lost ? CUDA_ERROR_DEVICE_UNAVAILABLE : ww_call(d, op, 0, args, nargs, NULL, 0);
}

static int give_end(struct ww_device *d, const struct ww_device *other, int end) {
    struct ww_args_link args = {(uint32_t)index_of(other), ++serial};
    return give(d, end, WW_OP_LINK, &args, sizeof args);
}

static bool is_known(const _Atomic uint64_t *known, uint64_t now, bool *can) {
    uint64_t was = atomic_load_explicit(known, memory_order_acquire);
    *can = (was & 3) == YES;
    return (was & ~3ull) == now && (was & 3);
}

/* Link two workers. Return false if they have no link. layer.linking is held. */
static bool link_up(struct ww_device *a, struct ww_device *b) {
    if (a > b)
        return link_up(b, a);
    _Atomic uint64_t *known = &linked[index_of(a)][index_of(b)];
    uint64_t now = tag(a, b);
    int ends[2], error;
    bool can;
    if (is_known(known, now, &can))
        return can;
    if (a->facts.remote || b->facts.remote || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends))
        return false;
    error = give_end(a, b, ends[0]);
    error = error ? error : give_end(b, a, ends[1]);
    close(ends[0]);
    close(ends[1]);
    if (error != CUDA_ERROR_NOT_READY) /* NOT_READY: a previous worker's memory is still in use, try again */
        atomic_store(known, now | (error ? NO : YES));
    return !error;
}

bool ww_reach(struct ww_device *user, struct ww_device *owner) {
    _Atomic uint64_t *known = &reached[index_of(user)][index_of(owner)];
    uint64_t now = tag(user, owner);
    bool can;
    if (is_known(known, now, &can))
        return can;
    if (!peer_of(user, owner))
        return false;
    WW_LOCK(&layer.linking);
    if (is_known(known, now, &can) || !(can = link_up(user, owner)))
        return can;
    int error = ww_call_link(owner, WW_OP_SHARE, 0, (uint32_t)index_of(user), 0, NULL, 0);
    atomic_store(&owner->shared, 1); /* later synchronous copies to it wait; this call waits for earlier ones */
    can = !error && !ww_call(owner, WW_OP_STREAM_SYNC, WW_LEGACY, NULL, 0, NULL, 0);
    if (error != CUDA_ERROR_OUT_OF_MEMORY)
        atomic_store_explicit(known, now | (can ? YES : NO), memory_order_release);
    return can;
}

/* -- memory that other devices use --------------------------------------------------------------------------------- */

void ww_touch(struct ww_device *user, struct ww_device *owner) {
    atomic_fetch_or(&user->touched, 1ull << index_of(owner));
}

/* Return the next device that may use the owner's memory, from index *i on, or NULL. Callers ignore errors of a lost
 * device, because it does not use memory any more. */
static struct ww_device *next_user(const struct ww_device *owner, int *i) {
    uint64_t bit = 1ull << index_of(owner);
    while (*i < layer.ndevices && atomic_load_explicit(&owner->shared, memory_order_relaxed)) {
        struct ww_device *d = &layer.devices[(*i)++];
        if (d != owner && (atomic_load(&d->touched) | atomic_load(&d->peers) | atomic_load(&d->granted)) & bit)
            return d;
    }
    return NULL;
}

void ww_peers_done(struct ww_device *owner) {
    struct ww_device *d;
    for (int i = 0; (d = next_user(owner, &i));) {
        atomic_fetch_and(&d->touched, ~(1ull << index_of(owner)));
        ww_call(d, WW_OP_CTX_SYNC, 0, NULL, 0, NULL, 0);
    }
}

bool ww_peers_are_done(struct ww_peers *p) {
    struct ww_device *d;
    while (!p->asked || ww_answered(&p->post)) {
        p->asked = false;
        int at = p->next;
        if (!(d = next_user(p->owner, &p->next)))
            return true;
        int error = ww_ask_later(d, WW_OP_CTX_SYNC, &p->post);
        if (error == CUDA_ERROR_NOT_READY) {
            p->next = at;
            return false;
        }
        atomic_fetch_and(&d->touched, ~(1ull << index_of(p->owner)));
        p->asked = !error;
    }
    return false;
}

void ww_peers_clear(struct ww_device *d) {
    uint64_t bit = 1ull << index_of(d);
    atomic_store(&d->peers, 0);
    atomic_store(&d->granted, 0);
    atomic_store(&d->touched, 0);
    atomic_store(&d->shared, 0);
    atomic_store(&d->pins, 0);
    for (int i = 0; i < layer.ndevices; i++) {
        ww_ranges_unshare(&layer.devices[i].ranges, bit);
        atomic_fetch_and(&layer.devices[i].peers, ~bit);
        atomic_fetch_and(&layer.devices[i].granted, ~bit);
    }
}

/* -- pinned memory ---------------------------------------------------------------------------------------------------
 *
 * The workers of the other devices on this host map memory that one worker has pinned at the same address, before the
 * first kernel or copy that may use it.
 */

#define PINNED_MS 10000 /* timeout; the worker sends the packet before it answers the call */

int ww_receive_pinned(struct ww_channel *c, uint64_t address, size_t nbytes) {
    struct ww_pinned packet;
    struct stat s;
    int fd, n = ww_receive(c->socket, &packet, sizeof packet, &fd, 1, PINNED_MS);
    if (n == (int)sizeof packet && packet.type == WW_PINNED && packet.address == address && fd >= 0 && !fstat(fd, &s) &&
        (size_t)s.st_size >= nbytes)
        return fd;
    if (fd >= 0)
        close(fd);
    return -1;
}

bool ww_maps_pinned(const struct ww_device *d, const struct ww_device *owner, const struct ww_span *r) {
    return r->type == WW_PINNED_MEMORY && !d->facts.remote && (owner == d || r->users >> index_of(d) & 1);
}

static int lend(struct ww_device *owner, const struct ww_span *r, int *fd) {
    struct ww_channel *c = ww_hold(owner);
    if (!c)
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    pthread_mutex_lock(&c->pinning);
    int error = ww_call_free(owner, WW_OP_LEND, 0, r->start, NULL, 0);
    *fd = error ? -1 : ww_receive_pinned(c, r->start, r->size);
    pthread_mutex_unlock(&c->pinning);
    ww_release(c);
    return error ? error : *fd < 0 ? CUDA_ERROR_OUT_OF_MEMORY : 0;
}

/* Make the worker of `d` map a pinned block of another device; layer.linking is held. */
static int map_block(struct ww_device *d, struct ww_device *owner, const struct ww_span *r) {
    struct ww_args_pin args = {r->start, r->size, 0, ++serial};
    struct ww_args_free back = {r->start};
    uint64_t bit = 1ull << index_of(d), life = atomic_load(&d->life);
    int fd, error = lend(owner, r, &fd);
    if (error)
        return error;
    error = give(d, fd, WW_OP_BORROW, &args, sizeof args);
    close(fd);
    if (!error && !ww_range_share(&owner->ranges, r, bit)) /* freed in the meantime */
        ww_send(d, WW_OP_UNPIN, 0, &back, sizeof back);
    if (life != atomic_load(&d->life))
        ww_ranges_unshare(&owner->ranges, bit);
    return error;
}

void ww_map_pinned(struct ww_device *d) {
    static _Atomic int warned;
    struct ww_span r;
    if (ww_in_host_thread) /* this thread must not wait; the call that queued its work has mapped the memory */
        return;
    WW_LOCK(&layer.linking);
    uint64_t pins = atomic_load(&ww_pins), life = atomic_load(&d->life);
    for (int i = 0; i < layer.ndevices && !d->facts.remote; i++) {
        struct ww_device *owner = &layer.devices[i];
        for (uint64_t at = 0; owner != d && !owner->facts.remote && ww_range_next(&owner->ranges, at, &r);
             at = r.start + r.size) {
            if (r.type != WW_PINNED_MEMORY || r.owner || ww_maps_pinned(d, owner, &r))
                continue;
            int error = map_block(d, owner, &r);
            if (error && !atomic_exchange(&warned, 1))
                ww_say(
                    "device %d cannot use pinned memory of device %d: error %d; allocate it while device %d is current",
                    d->ordinal, owner->ordinal, error, d->ordinal);
        }
    }
    atomic_store(&d->pins, pins);
    if (life != atomic_load(&d->life))
        atomic_store(&d->pins, 0);
}

void ww_unshare(const struct ww_span *r) {
    for (int i = 0; i < layer.ndevices; i++)
        if (r->users >> i & 1)
            ww_send_free(&layer.devices[i], WW_OP_UNPIN, 0, r->start);
}

void ww_unshare_all(struct ww_device *owner) {
    struct ww_span r;
    for (uint64_t at = 0; ww_range_next(&owner->ranges, at, &r); at = r.start + r.size)
        ww_unshare(&r);
}

/* -- waits for another device's events ----------------------------------------------------------------------------- */

/* The owner's worker signals the worker of `d` when the event's last record is done; the latter holds the stream until
 * the signal arrives. */
int ww_wait_across(struct ww_device *d, uint32_t stream, struct ww_device *owner, uint32_t event, bool *can) {
    struct ww_device *first = d < owner ? d : owner, *second = d < owner ? owner : d;
    if (!is_known(&linked[index_of(first)][index_of(second)], tag(first, second), can)) {
        WW_LOCK(&layer.linking);
        *can = link_up(first, second);
    }
    if (!*can)
        return 0;
    uint64_t number = atomic_fetch_add(&numbers, 1) + 1;
    int error = ww_send_signal(owner, WW_OP_SIGNAL, 0, event, (uint32_t)index_of(d), number);
    return error ? error : ww_send_signal(d, WW_OP_AWAIT, stream, 0, (uint32_t)index_of(owner), number);
}

/* -- the driver's calls -------------------------------------------------------------------------------------------- */

bool ww_can_reach(const struct ww_device *d, const struct ww_device *owner) { return d != owner && peer_of(d, owner); }

int ww_body_cuDeviceGetP2PAttribute(struct ww_device *d, struct ww_device *owner, int *value, int attribute) {
    const struct ww_peer *peer = peer_of(d, owner); /* the layer does not serve attributes of arrays */
    *value = !peer                         ? 0
             : attribute == CU_P2P_RANK    ? peer->rank
             : attribute == CU_P2P_ATOMICS ? peer->atomics
                                           : attribute == CU_P2P_ACCESS;
    return 0;
}

/* Call ww_reach until its result is final, for at most about 1 s, because memory of a previous worker may still be in
 * use. */
static bool reach_soon(struct ww_device *d, struct ww_device *owner) {
    struct timespec step = {.tv_nsec = 2000000};
    bool can;
    for (int i = 0; !(can = ww_reach(d, owner)) && i < 500; i++) {
        if (is_known(&reached[index_of(d)][index_of(owner)], tag(d, owner), &can))
            break;
        nanosleep(&step, NULL);
    }
    return can;
}

bool ww_grant(struct ww_device *user, struct ww_device *owner) {
    if (!peer_of(user, owner) || ww_open(user) || ww_open(owner) || !reach_soon(user, owner))
        return false;
    atomic_fetch_or(&user->granted, 1ull << index_of(owner));
    return true;
}

int ww_body_cuCtxEnablePeerAccess(struct ww_device *d, CUcontext context) {
    struct ww_device *owner = ww_context(context);
    if (!owner || owner == d)
        return CUDA_ERROR_INVALID_CONTEXT;
    int error = peer_of(d, owner) ? ww_open(owner) : CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    if (error)
        return error;
    if (!reach_soon(d, owner))
        return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    uint64_t bit = 1ull << index_of(owner);
    return atomic_fetch_or(&d->peers, bit) & bit ? CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED : 0;
}

int ww_body_cuCtxDisablePeerAccess(struct ww_device *d, CUcontext context) {
    struct ww_device *owner = ww_context(context);
    uint64_t bit = 1ull << index_of(owner);
    if (!(atomic_load(&d->peers) & bit))
        return CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
    ww_touch(d, owner); /* earlier kernels may still access the memory */
    atomic_fetch_and(&d->peers, ~bit);
    return 0;
}
