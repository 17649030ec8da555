/* Stores to the shared memory of wire.h, for layer, worker and relay. The near end of a relay acts as a worker. */
#ifndef WW_SHARED_H
#define WW_SHARED_H

#include "system.h"
#include "wire.h"

/* Wake the side that sleeps on the ring's futex. */
static inline void ww_wake_ring(struct ww_ring *ring) {
    atomic_fetch_add(&ring->wake, 1);
    ww_wake_all(&ring->wake);
}

/* Store the new end of the consumed bytes, after an entry of `size` bytes; `ahead` bytes were published before. */
static inline void ww_store_tail(struct ww_status *status, uint64_t tail, uint64_t ahead, uint64_t size) {
    atomic_store_explicit(&status->tail, tail, memory_order_release);
    if (ahead > WW_RING_BYTES / 2 && ahead - size <= WW_RING_BYTES / 2) {
        atomic_fetch_add(&status->tail_futex, 1);
        ww_wake_all(&status->tail_futex);
    }
}

/* Store an answer, and wake the threads that wait for it. `data` has `nbytes` bytes; WW_OP_MORE fetches `more`. */
static inline void ww_store_answer(struct ww_slot *slot, uint32_t seq, int32_t result, const void *data,
                                   uint32_t nbytes, uint32_t more) {
    slot->result = result;
    slot->nbytes = nbytes;
    slot->more = more;
    if (nbytes)
        memcpy(slot->data, data, nbytes);
    atomic_store_explicit(&slot->seq, seq, memory_order_release);
    ww_wake_all(&slot->seq);
}

/* Store that a use of a place is done. */
static inline void ww_store_place(struct ww_place *place, uint32_t use, int32_t result) {
    place->result = result;
    atomic_store_explicit(&place->use, use, memory_order_release);
    ww_wake_all(&place->use);
}

#endif
