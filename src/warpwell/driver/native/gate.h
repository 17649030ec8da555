/* The gate of a program: the arbiter of a GPU opens and closes it, and the program holds its calls while the gate is
 * closed.
 *
 * The board is a file of the GPU in /dev/shm: a head and WW_GATE_SLOTS slots, one for each program. board.py has the
 * same layout. All words are 64 bits wide and aligned; each has one writer, so no update is lost and none is
 * torn. Only `successor` and `gate` of a lease may be written by other leases. The words are hints for performance: a
 * wrong word delays programs or lets two run at once, and never damages data.
 *
 * A slot belongs to the process that has locked byte WW_GATE_LOCKS + index of the file (F_SETLK). Linux releases the
 * lock when the process exits, also if it crashes. `serial` is odd while the slot is in use, and changes with its
 * owner.
 *
 * Order of memory: the program stores `issued`, then (full fence) loads `gate`. The arbiter stores `gate`, then (the
 * futex call is a full fence) loads `issued` and `done`. So either the program sees the closed gate or the arbiter sees
 * the call. `done` is stored with release.
 *
 * The GPU may pass the gate of WW_GATE_STREAMS before the program has counted the work. So if a call is held and none
 * is counted when the arbiter closes the gate, the arbiter waits until `wants` or `issued` changes. The program changes
 * `wants` only if no stream has passed the gate, which it checks some time after it has found the gate closed.
 *
 * Succession of leases (lease.py, executor.py): the arbiter stores `level`, `gate` = 1, then `running`, when it opens
 * the gate of a lease. When it closes that gate, it stores `successor` first. A waiting lease with base > level may do
 * the same: the arbiter confirms or undoes it. The successor may enter when `done` of the running lease equals
 * `issued`.
 * - It stores its own `issued`, then (fence) loads `running`, `successor`, and the fields of all slots. The arbiter
 *   stores `running` = 0, then (fence) loads `issued` of all leases, before it opens another gate. So either the lease
 *   sees the revocation, or the arbiter sees the lease and waits until it has left.
 * - Two leases that both count themselves as the successor see each other's `issued` after their fences: at most one
 *   enters.
 * - The running lease stores `done`, then (the futex call is a fence) changes `opened` of its successor. If it dies
 *   between the two, or the successor dies, the waiting thread or the arbiter finds out at its next look.
 *
 * Uncontended: while its gate is open and without a bound, a program stores WW_GATE_UNCOUNTED in `issued` instead of
 * each number, so that calls need no fence. It stores the number when it sees the closed gate or a bound, or has
 * nothing to do. Until then the arbiter waits for it as for one call on the device.
 *
 * Fail open: the arbiter changes `beat` at least every WW_GATE_BEAT_NS while a program waits. A program that has waited
 * WW_GATE_FAIL_OPEN_NS of its own clock without a change counts its gate as open until `beat` changes again. No time of
 * one process is compared with a time of another.
 */
#ifndef WW_GATE_H
#define WW_GATE_H

#include "system.h"

#include <stdatomic.h>

#define WW_GATE_FORMAT 0x3345544147575757ull /* "WWWGATE3" */
#define WW_GATE_SLOTS 128u
#define WW_GATE_SLOT_BYTES 256u
#define WW_GATE_TABLE 4096u /* offset of the slots */
#define WW_GATE_BYTES (WW_GATE_TABLE + WW_GATE_SLOTS * WW_GATE_SLOT_BYTES)
#define WW_GATE_LOCKS 0x10000000000ll /* byte of the file whose lock is slot 0's presence */
#define WW_GATE_ARBITER_LOCK 0xffffffffffll
#define WW_GATE_NAME 64u
#define WW_GATE_UNCOUNTED (1ull << 63) /* value of `issued` while calls are not counted */

#define WW_GATE_BEAT_NS 20000000u
#define WW_GATE_FAIL_OPEN_NS 100000000u

#define WW_GATE_MEASURED_FIRST 4u /* calls of a kind that are measured, and then one in WW_GATE_MEASURED_EACH */
#define WW_GATE_MEASURED_EACH 16u

enum ww_gate_kind {
    WW_GATE_WORKER = 1,  /* a worker of the driver layer: holds calls in the host */
    WW_GATE_STREAMS = 2, /* a pass-through driver: its streams wait at `gate` or a copy of it on the GPU, and threads
                            of the process write the words; work behind a closed gate is not issued yet */
    WW_GATE_TURN = 3,    /* a thread with ww.turn (lease.py): waits in the host. Its gate is closed at first */
};

struct ww_gate_head {
    _Atomic uint64_t format;
    _Atomic uint64_t arbiter;                 /* process ID of the arbiter in its own namespace, for information only */
    _Alignas(64) _Atomic uint64_t beat;       /* arbiter: changes while it lives and a program waits */
    _Atomic uint64_t programs;                /* arbiter: slots in use */
    _Atomic uint64_t running;                 /* arbiter: 1 + the slot of the running lease; 0: not a lease */
    _Alignas(64) _Atomic uint32_t bell, rest; /* futex of the arbiter: each program adds 1 and wakes it */
    _Alignas(64) _Atomic uint32_t fence, rest1;
};

struct ww_gate_slot {
    /* Written by the arbiter. The owner, when it takes the slot, sets `budget_ns` to 0, and `gate` to 1 if the slot is
     * not a lease and no other program is attached. */
    _Alignas(64) _Atomic uint64_t gate; /* 1: open, 0: closed. The only word on which a GPU may wait */
    _Atomic uint64_t budget_ns;         /* limit of expected work on the device at a time; 0: no limit */
    _Atomic uint32_t opened, rest0;     /* futex of the program: changes when the gate opens or closes */
    _Atomic uint64_t serial;            /* the owner writes */
    _Atomic uint64_t successor;         /* lease with a closed gate: serial * 128 + index of the next slot; 0: none */
    _Atomic uint64_t level;         /* lease: 2^40 + its level, by which waiting leases compare themselves with it */
    _Atomic uint32_t closed, rest1; /* lease: futex of its keeper thread; `opened` is for the waiting thread */
    _Atomic uint64_t undrained;     /* 1 + `done`, if the device did not pass the calls after `done` in time */

    /* Written by the program. */
    _Alignas(64) _Atomic uint64_t wants; /* 0: no call is held; else changes with each check of the waiting program */
    _Atomic uint64_t issued, done;       /* number of calls issued to the device, and passed by the device */
    _Atomic uint64_t expected_ns;        /* expected time of the calls that are issued and not done */
    _Atomic uint64_t longest_ns;         /* time of the longest recent call */
    uint64_t spare1[3];

    /* Written rarely: by the arbiter for `warpwell share status`; from `kind` on by the owner when it takes the slot.
     */
    _Alignas(64) _Atomic uint64_t state; /* 0 idle, 1 running, 2 leaving, 3 waiting, 4 overdue */
    _Atomic uint64_t since_ns, used_ns, launches;
    _Atomic uint64_t kind;
    _Atomic int64_t pid, priority; /* pid: in the program's namespace; larger priorities go first */
    _Atomic uint64_t base;         /* arbiter: `level` without aging */

    _Alignas(64) char tenant[WW_GATE_NAME]; /* ends with a zero byte */
};

_Static_assert(sizeof(struct ww_gate_slot) == WW_GATE_SLOT_BYTES, "slots of the board have 256 bytes");

/* -- the program's side -------------------------------------------------------------------------------------------- */

struct ww_gate {
    struct ww_gate_head *head;
    struct ww_gate_slot *slot; /* NULL: not attached, and no call waits */
    uint64_t serial, issued, done, expected_ns;
    uint64_t beat, beat_seen_ns; /* while the program waits: last value of `beat`, and when this process first saw it */
    bool is_waiting;
    bool is_uncounted; /* `issued` of the slot is WW_GATE_UNCOUNTED */
    int fd;            /* never closed while attached: to close any descriptor of the file would free the lock */
};

/* Take a slot of the board in `fd`, which belongs to the gate from then on. Return false if the file is not a board or
 * all its slots are in use: then calls do not wait, and `fd` is closed. */
bool ww_gate_attach(struct ww_gate *g, int fd, enum ww_gate_kind kind, int64_t pid, int64_t priority,
                    const char *tenant);

/* Report to the arbiter that this program waits at its closed gate. Return true if the program need not wait, because
 * no arbiter is alive or another program has the slot. Call this at least every 50 ms while the program waits. */
bool ww_gate_fails_open(struct ww_gate *g);

/* Report that the program does not wait. */
void ww_gate_stop_waiting(struct ww_gate *g);

/* Wake the arbiter. */
void ww_gate_ring(struct ww_gate *g);

/* Read the variable WARPWELL_SHARE, PRIORITY:TENANT. Return false if it asks for no gate. */
bool ww_gate_parse(const char *share, int64_t *priority, char tenant[WW_GATE_NAME]);

static inline bool ww_gate_is_open(const struct ww_gate *g) {
    return !g->slot || (atomic_load_explicit(&g->slot->gate, memory_order_relaxed) == 1 &&
                        atomic_load_explicit(&g->slot->serial, memory_order_relaxed) == g->serial);
}

/* Return true if no other program delays this one: its calls need not be counted, measured or bounded. */
static inline bool ww_gate_is_uncontended(const struct ww_gate *g) {
    return ww_gate_is_open(g) && !atomic_load_explicit(&g->slot->budget_ns, memory_order_relaxed);
}

/* Stop counting calls on the board, just after a call that is counted and not passed yet. */
static inline void ww_gate_stop_counting(struct ww_gate *g) {
    g->is_uncounted = true;
    atomic_store_explicit(&g->slot->issued, WW_GATE_UNCOUNTED, memory_order_relaxed);
}

/* Count calls on the board again: store their number. Later calls need ww_gate_enter. */
static inline void ww_gate_count(struct ww_gate *g) {
    if (!g->is_uncounted)
        return;
    g->is_uncounted = false;
    atomic_store_explicit(&g->slot->issued, g->issued, memory_order_release);
    if (g->done == g->issued && !ww_gate_is_open(g))
        ww_gate_ring(g);
}

/* Count a call that is about to be given to the device. Return false, and count nothing, if it must wait. */
static inline bool ww_gate_enter(struct ww_gate *g, bool can_wait) {
    if (!g->slot)
        return true;
    atomic_store_explicit(&g->slot->issued, g->issued + 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst);
    if (can_wait && !ww_gate_is_open(g) && !ww_gate_fails_open(g)) {
        atomic_store_explicit(&g->slot->issued, g->issued, memory_order_relaxed);
        return false;
    }
    g->issued++;
    if (g->is_waiting && ww_gate_is_open(g))
        ww_gate_stop_waiting(g);
    return true;
}

/* Report that the device has passed `n` calls. Wake the arbiter if it may wait for the last one. */
static inline void ww_gate_pass(struct ww_gate *g, uint64_t n) {
    if (!g->slot || !n)
        return;
    atomic_store_explicit(&g->slot->done, g->done += n, memory_order_release);
    if (g->done == g->issued && !ww_gate_is_open(g))
        ww_gate_ring(g);
}

/* Return true if the next call of a kind, after `calls` earlier ones, is measured. */
static inline bool ww_gate_must_measure(uint32_t calls) {
    return calls < WW_GATE_MEASURED_FIRST || calls % WW_GATE_MEASURED_EACH == 0;
}

/* Record the time of a measured call. Return the longest recent time, which decreases by a 64th at each call. */
static inline uint64_t ww_gate_learn(struct ww_gate_slot *slot, uint64_t ns) {
    uint64_t longest = atomic_load_explicit(&slot->longest_ns, memory_order_relaxed);
    longest -= longest / 64;
    longest = longest > ns ? longest : ns;
    atomic_store_explicit(&slot->longest_ns, longest, memory_order_relaxed);
    return longest;
}

#endif
