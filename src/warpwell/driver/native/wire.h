/* Data shared by the layer (in the client's process) and the worker (a process for one client and one device).
 *
 * Four objects in shared memory, all made and sealed by the worker (no size changes), and one socket:
 *
 *     ring      calls, in one order.                          client: read, write     worker: read
 *     status    consumed bytes, answers, errors, places done. client: read            worker: read, write
 *     staging   PLACES places for bytes on their way.         client: read, write     worker: read, write; registered
 *     pinned    host memory that the client allocated, a memfd each, at the same address on both sides
 *     socket    SOCK_SEQPACKET: the handshake, descriptors, and whether the other side lives
 *
 * A client may write anything at any time. So the worker copies an entry before it checks it, and trusts no number in
 * it; the client maps `status` read-only, and trusts it.
 */
#ifndef WW_WIRE_H
#define WW_WIRE_H

#include "cu.h"
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define WW_MAGIC 0x57574352u
#define WW_LINE 64

#define WW_RING_BYTES (4u << 20)  /* a power of two */
#define WW_ENTRY_MOST (64u << 10) /* an entry with its header; larger payloads go by staging */
#define WW_PLACES 64u
#define WW_PLACE_BYTES (1u << 20)
#define WW_SLOTS 256u /* threads of a client that wait at one time */
#define WW_SLOT_DATA 4032u
#define WW_IDS 65536u      /* of streams, of events: chosen by the client, not 0 */
#define WW_ATTRIBUTES 160u /* of a device */
#define WW_NO_SLOT 0xffffffffu
#define WW_SLEEPS 1u    /* a client that publishes wakes the worker */
#define WW_NAPS 2u      /* it looks again within 50 us: only a thread that waits for it wakes it */
#define WW_LEGACY 1u    /* stream ids: CU_STREAM_LEGACY and NULL */
#define WW_RECORDED 2u  /* not a stream: launches, copies and memsets become nodes, see WW_OP_GRAPH_BEGIN */
#define WW_FIRST_ID 16u /* of streams that the client made */

/* -- ring ---------------------------------------------------------------------------------------------------------- */

/* Entries follow one another, each contiguous and aligned to 32 bytes so that a header always fits. WW_OP_PAD fills the
 * end of the ring. */

struct ww_ring {
    _Alignas(WW_LINE) _Atomic uint64_t head; /* bytes published since the start; stored with release */
    _Alignas(WW_LINE) _Atomic uint32_t wake; /* futex on which the worker sleeps; the client adds 1 after a publication
                                                if `status.asleep` is not 0 (seq_cst fence between the two) */
    _Atomic uint32_t watched;                /* 1: a mirror (relay.c) sleeps on `status.changes`, or is about to */
    _Alignas(4096) unsigned char data[WW_RING_BYTES];
};

struct ww_entry {
    uint32_t size;   /* bytes with this header, a multiple of 32, at most WW_ENTRY_MOST */
    uint16_t op;     /* generated: WW_OP_... */
    uint16_t flags;  /* WW_DONE */
    uint32_t slot;   /* answer slot, or WW_NO_SLOT: no answer, errors are deferred */
    uint32_t seq;    /* of the answer: the slot's last seq + 1 */
    uint32_t stream; /* id, or 0: the call belongs to no stream */
    uint32_t place;  /* 1 + staging place of the payload, or 0 */
    uint32_t nbytes; /* of the payload in that place */
    uint32_t use;    /* of the place: the place's last use + 1 */
    /* arguments follow, packed as the generated struct ww_args_... of the op */
};

/* -- status -------------------------------------------------------------------------------------------------------- */

struct ww_slot {
    _Atomic uint32_t seq; /* futex; stored last, with release */
    int32_t result;       /* CUresult */
    uint32_t nbytes;
    uint32_t more; /* bytes of a longer answer that are left: WW_OP_MORE fetches them */
    uint32_t unused[12];
    unsigned char data[WW_SLOT_DATA];
};

struct ww_place {
    _Atomic uint32_t use; /* futex; the last use that is done, stored with release */
    int32_t result;
};

struct ww_status {
    _Alignas(WW_LINE) _Atomic uint64_t tail; /* bytes of the ring consumed */
    _Atomic uint32_t tail_futex; /* changes with tail while a client waits for room (client polls at 1 ms) */
    _Atomic uint32_t changes;    /* futex: grows with each change of this struct (of `tail`: now and
                                    then), behind it */
    _Alignas(WW_LINE) _Atomic uint32_t asleep;   /* WW_SLEEPS or WW_NAPS: the worker does, or is about to */
    _Alignas(WW_LINE) _Atomic uint64_t deferred; /* count << 32 | code of the last error of a call without an answer */
    _Atomic uint32_t sticky;                     /* 0, or the CUresult with which the context is lost */
    _Alignas(WW_LINE) struct ww_place places[WW_PLACES];
    _Alignas(4096) struct ww_slot slots[WW_SLOTS];
};

/* -- socket: one message a packet ---------------------------------------------------------------------------------- */

/* The first field of each packet is a number WW_..; driver_calls.txt has these, and the smaller structs. */

#define WW_PEERS 16u /* devices of a job on one host */

struct ww_facts {
    uint32_t said, driver_version;
    uint64_t total_bytes;
    uint64_t arena, arena_bytes; /* device addresses of this device's allocations; differ among the devices of a job */
    int32_t attributes[WW_ATTRIBUTES];
    int32_t least_priority, greatest_priority;
    unsigned char uuid[16];
    char name[256];
    char pci[32];
    uint32_t npeers, remote; /* remote: a device of another host; relay.c mirrors its calls */
    struct ww_peer peers[WW_PEERS];
};

struct ww_hand_over { /* server to worker: a client, with descriptors of its socket, of counts, of stdout and stderr,
                         then of its process (pidfd) and of the device's board (gate.h) if there are such */
    uint32_t said, has_process, has_board;
    int32_t pid; /* of the client */
    char share[WW_SHARE_BYTES];
};

#endif
