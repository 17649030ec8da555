/* Data shared by the layer (in the client's process) and the worker (a process for one client and one device).
 *
 * Four objects in shared memory, which the worker creates with a sealed size, and one socket:
 *
 *     ring      calls, in one order.                          client: read, write     worker: read
 *     status    consumed bytes, answers, errors, places done. client: read            worker: read, write
 *     staging   WW_PLACES buffers (places) for payloads.      client: read, write     worker: read, write; pinned
 *     pinned    host memory that the client allocated: a memfd for each block, at the same address on both sides
 *     socket    SOCK_SEQPACKET: handshake and descriptors; its end shows that the other side has exited
 *
 * A client may write anything at any time. So the worker copies an entry, checks the copy, and trusts no number in it
 * before that. The client maps `status` read-only, and trusts the worker.
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
#define WW_ENTRY_MOST (64u << 10) /* maximum size of an entry with its header; larger payloads use places */
#define WW_PLACES 64u
#define WW_PLACE_BYTES (1u << 20)
#define WW_SLOTS 256u /* maximum number of threads of a client that wait at a time */
#define WW_SLOT_DATA 4032u
#define WW_IDS 65536u      /* bound of stream ids and of event ids, which the client chooses; 0 is not an id */
#define WW_ATTRIBUTES 160u /* device attributes that a worker sends */
#define WW_NO_SLOT 0xffffffffu
#define WW_SLEEPS 1u    /* `asleep`: a client must wake the worker after it publishes an entry */
#define WW_NAPS 2u      /* `asleep`: the worker looks again within 50 us; only a client that waits wakes it */
#define WW_LEGACY 1u    /* stream id of CU_STREAM_LEGACY and NULL */
#define WW_RECORDED 2u  /* stream id of calls that become nodes of a graph: see WW_OP_GRAPH_BEGIN */
#define WW_FIRST_ID 16u /* smallest id of a stream that the client creates */

/* -- ring ---------------------------------------------------------------------------------------------------------- */

/* Entries follow one another. Each is contiguous, and aligned to 32 bytes so that a header always fits. If the next
 * entry does not fit before the end of the ring, a WW_OP_PAD entry fills the rest. */

struct ww_ring {
    _Alignas(WW_LINE) _Atomic uint64_t head; /* bytes published since the start; stored with release */
    _Alignas(WW_LINE) _Atomic uint32_t wake; /* futex on which the worker sleeps. The client adds 1: see WW_SLEEPS and
                                                WW_NAPS (seq_cst fence between head and `status.asleep`) */
    _Atomic uint32_t watched;                /* 1: a mirror (relay.c) sleeps on `status.changes`, or is about to */
    _Alignas(4096) unsigned char data[WW_RING_BYTES];
};

struct ww_entry {
    uint32_t size;   /* bytes with this header, a multiple of 32, at most WW_ENTRY_MOST */
    uint16_t op;     /* generated: WW_OP_... */
    uint16_t flags;  /* WW_DONE */
    uint32_t slot;   /* answer slot, or WW_NO_SLOT: no answer, errors are deferred */
    uint32_t seq;    /* number of the answer: 1 + the number of the last answer in the slot */
    uint32_t stream; /* id, or 0: the call belongs to no stream */
    uint32_t place;  /* 1 + staging place of the payload, or 0 */
    uint32_t nbytes; /* bytes of the payload in that place */
    uint32_t use;    /* number of this use of the place: 1 + the number of the last use */
    /* arguments follow, packed as the generated struct ww_args_... of the op */
};

/* -- status -------------------------------------------------------------------------------------------------------- */

struct ww_slot {
    _Atomic uint32_t seq; /* futex: number of the last answer; stored last, with release */
    int32_t result;       /* CUresult */
    uint32_t nbytes;
    uint32_t more; /* bytes of the answer that do not fit here: WW_OP_MORE fetches them */
    uint32_t unused[12];
    unsigned char data[WW_SLOT_DATA];
};

struct ww_place {
    _Atomic uint32_t use; /* futex: number of the last use that is done; stored with release */
    int32_t result;
};

struct ww_status {
    _Alignas(WW_LINE) _Atomic uint64_t tail; /* bytes of the ring consumed */
    _Atomic uint32_t tail_futex; /* changes when the ring is half empty again (waiting clients poll at 1 ms) */
    _Atomic uint32_t changes;    /* futex: adds 1 after each change of this struct, but only after
                                    some changes of `tail` */
    _Alignas(WW_LINE) _Atomic uint32_t asleep;   /* WW_SLEEPS, WW_NAPS: the worker sleeps, or is about to; 0: it runs */
    _Alignas(WW_LINE) _Atomic uint64_t deferred; /* errors of calls without an answer: count << 32 | last code */
    _Atomic uint32_t sticky;                     /* 0, or the CUresult that ended the context */
    _Alignas(WW_LINE) struct ww_place places[WW_PLACES];
    _Alignas(4096) struct ww_slot slots[WW_SLOTS];
};

/* -- socket: one message a packet ---------------------------------------------------------------------------------- */

/* The first field of each packet, `type`, is its type. driver_calls.txt has the types, and the smaller structs. */

#define WW_PEERS 16u /* maximum number of devices of a job on one host */

struct ww_facts {
    uint32_t type, driver_version;
    uint64_t total_bytes;
    uint64_t arena, arena_bytes; /* range of this device's allocations; the devices of a job have different ranges */
    int32_t attributes[WW_ATTRIBUTES];
    int32_t least_priority, greatest_priority;
    unsigned char uuid[16];
    char name[256];
    char pci[32];
    uint32_t npeers, remote; /* remote: a device of another host; relay.c mirrors its calls */
    struct ww_peer peers[WW_PEERS];
};

struct ww_hand_over { /* server to worker: serve this client. Descriptors: its socket, the file of ww_counts, its stdout
                         and stderr; then its pidfd with has_process, the device's board (gate.h) with has_board */
    uint32_t type, has_process, has_board;
    int32_t pid; /* of the client */
    char share[WW_SHARE_BYTES];
};

#endif
