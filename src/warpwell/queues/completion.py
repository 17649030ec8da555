"""Completion: one consumer at a time drains the ring and delivers each entry to its waiter by command id.

The consumer is a converged group of lanes: each lane reads one entry, so one round of reads over the bus serves up to
32 completions. No thread searches the ring for its own completion.

Nothing is stored for an entry that answers no command in flight: it is skipped, and latched as a loss (`queues.loss`).
"""

from __future__ import annotations

from warpwell.nvme import word1_cid, word1_phase, word1_sqhd, word1_sqid, word1_status
from warpwell.targets import device
from warpwell.targets.primitives import (
    DEVICE,
    SYSTEM,
    backoff,
    ballot,
    call_cold,
    compare_exchange,
    exchange,
    fence,
    fetch_add,
    ffs,
    load_acquire,
    load_relaxed,
    popc,
    shfl,
    store_relaxed,
    store_release,
    syncwarp,
    warp_size,
)

from . import layout as at
from .loss import latch_violation
from .submission import field, id_record, state_word

ROUNDS = 8
"""Maximum number of rounds of one drain, so that a consumer soon continues with its own work."""
PAUSE = 16
"""Back-off after a poll that finds the ring empty, about a microsecond."""
WAITED_FOR, NO_WAITER, NOT_IN_FLIGHT = 0, 1, 2
"""Fates of a completion: a thread waits for it, the ready ring receives it, or it answers no command."""


@device
def poll(queue, cid):
    """Return -1 while a taken id is in flight, else the status field of its completion (thread).

    Acquires the data that the controller wrote. Zero is success.
    """
    address = id_record(queue, cid) + 8 * at.ID_STATE
    # acquire only on success: on a GPU an acquire invalidates L1, and thousands of threads poll repeatedly
    if load_relaxed(address, DEVICE) & at.DONE == 0:
        return -1
    return load_acquire(address, DEVICE) >> 8


@device
def result_of(queue, cid):
    """Return dw0 of an id's completion, after `poll` or `take_ready` (thread; the pair keeps results)."""
    return load_relaxed(id_record(queue, cid) + 8 * at.ID_RESULT, DEVICE) & 0xFFFFFFFF


@device
def orphan(queue, cid, kind):
    """Give up waiting: turn a taken id into `kind` (ORPHAN or ASYNC) and return -1 (thread).

    If the completion has arrived in the meantime, nothing changes, and its status field is returned.
    """
    use = state_word(queue, cid, 0)
    state = compare_exchange(id_record(queue, cid) + 8 * at.ID_STATE, use | at.TAKEN, use | kind, DEVICE)
    if state & at.DONE != 0:
        return state >> 8
    return -1


@device
def take_async_id(queue):
    """Turn an asynchronous command in flight into a taken id and return the id, or -1 without such a command (thread).

    The completion of this id does not enter the ready ring; `take_ready` returns the other ids.
    """
    for cid in range(field(queue, at.Q_N_IDS)):
        state = id_record(queue, cid) + 8 * at.ID_STATE
        use = load_relaxed(state, DEVICE)
        # A completion of a taken id only marks the id as done: the ready ring is for ids without a waiting thread.
        if use & at.KIND == at.ASYNC and compare_exchange(state, use, use ^ at.ASYNC ^ at.TAKEN, DEVICE) == use:
            return cid
    return -1


@device
def drain(queue, mask, lane, leader):
    """Consume the completions in the ring, unless another group does (all lanes of `mask`, converged).

    Publishes each status with release order after the entry was read with acquire order of system scope.
    """
    locked = 0
    if lane == leader:
        lock = queue + 8 * at.Q_CQ_LOCK
        if load_relaxed(lock, DEVICE) == 0 and exchange(lock, 1, DEVICE) == 0:
            locked = 1
    if shfl(mask, locked, leader) == 0:
        return
    syncwarp(mask)
    shift = field(queue, at.Q_DEPTH_SHIFT)
    below = popc(mask & ((1 << lane) - 1))
    lanes = popc(mask)
    head = load_relaxed(queue + 8 * at.Q_CQ_HEAD, DEVICE)
    # one small read over the bus shows whether there are completions
    anything = 0
    if lane == leader and is_fresh(load_relaxed(entry_of(queue, head, shift) + 8, SYSTEM), head, shift):
        anything = 1
    if shfl(mask, anything, leader) == 0:
        if lane == leader:
            if warp_size() > 1:
                # otherwise many waiting warps would read again at once, and take bus bandwidth from the data
                backoff(PAUSE)
            store_release(queue + 8 * at.Q_CQ_LOCK, 0, DEVICE)
        return
    results = field(queue, at.Q_RESULTS)
    total = 0
    for _ in range(ROUNDS):
        position = head + below
        # load the phase word first: its acquire covers the rest of the entry and the data
        word1 = load_acquire(entry_of(queue, position, shift) + 8, SYSTEM)
        stale = ballot(mask, not is_fresh(word1, position, shift))
        # entries count up to the first stale one in the order of the ring, which is the order of lanes
        count = lanes
        if stale != 0:
            count = popc(mask & ((stale & -stale) - 1))
        if count == 0:
            break
        has_entry = below < count
        fate = WAITED_FOR
        cid = word1_cid(word1)
        if has_entry:
            fate = NOT_IN_FLIGHT
            if is_of_queue(queue, word1, shift):
                is_in_flight = True
                if results != 0:
                    # store the result before the id is done; load it after the phase word, before which it may be an
                    # older entry's
                    is_in_flight = store_result(queue, cid, load_relaxed(entry_of(queue, position, shift), SYSTEM))
                if is_in_flight:
                    fate = deliver(queue, cid, word1_status(word1))
        # the last entry has the newest head of the submission queue
        last = ballot(mask, below == count - 1)
        fetched = shfl(mask, word1_sqhd(word1), ffs(last) - 1)
        if ballot(mask, fate != WAITED_FOR) != 0:
            if fate == NOT_IN_FLIGHT:
                call_cold(latch_violation, queue, at.BAD_COMPLETION, word1)
            alone = fate == NO_WAITER
            _make_ready(queue, mask, ballot(mask, alone), alone, cid, lane, leader)
        syncwarp(mask)  # the lane that read the entry acquired for all
        if lane == leader:
            _admit_next_lap(queue, fetched, shift)
        head += count
        total += count
        if count < lanes:
            break
    if lane == leader and total > 0:
        store_relaxed(queue + 8 * at.Q_CQ_HEAD, head, DEVICE)
        store_release(field(queue, at.Q_CQ_DOORBELL), head & ((1 << shift) - 1), SYSTEM)
        fetch_add(field(queue, at.Q_PROGRESS), total, DEVICE)
    syncwarp(mask)
    if lane == leader:
        store_release(queue + 8 * at.Q_CQ_LOCK, 0, DEVICE)


@device
def entry_of(queue, position, shift):
    """Return the address of a completion entry (thread)."""
    return field(queue, at.Q_CQ) + 16 * (position & ((1 << shift) - 1))


@device
def is_fresh(word1, position, shift):
    """Return, by the phase bit, whether an entry was posted in the lap of `position` (thread)."""
    return word1_phase(word1) != ((position >> shift) & 1)


@device
def is_of_queue(queue, word1, shift):
    """Return whether a completion names this queue and a valid head of its submission ring (thread)."""
    return word1_sqid(word1) == field(queue, at.Q_SQID) and word1_sqhd(word1) >> shift == 0


@device
def deliver(queue, cid, status):
    """Store the status of an id; return WAITED_FOR, NO_WAITER, or NOT_IN_FLIGHT without a store (the consumer's lanes).

    Any cid leads to the state of some id. If the id is not in flight, its state has another generation or kind.
    Releases all accesses that the caller has acquired.
    """
    record = id_record(queue, cid)
    use = state_word(queue, cid, 0)
    found = compare_exchange(record + 8 * at.ID_STATE, use | at.TAKEN, at.DONE | (status << 8), DEVICE)
    if found == use | at.TAKEN:
        return WAITED_FOR
    if found == use | at.ASYNC or found == use | at.ORPHAN:
        # of two entries for one id in one round, the second fails here
        if compare_exchange(record + 8 * at.ID_STATE, found, found | at.FOUND, DEVICE) == found:
            store_relaxed(record + 8 * at.ID_STATUS, status, DEVICE)
            return NO_WAITER
    return NOT_IN_FLIGHT


@device
def store_result(queue, cid, result):
    """Store dw0 and dw1 for the waiter of an id; return False without a store if the id is not in flight (thread)."""
    record = id_record(queue, cid)
    kind = load_relaxed(record + 8 * at.ID_STATE, DEVICE) ^ state_word(queue, cid, 0)
    if kind <= at.FREE or kind >= at.FOUND or (result >> 32) & 0xFFFF >= field(queue, at.Q_RESULTS):
        return False
    store_relaxed(record + 8 * at.ID_RESULT, result, DEVICE)
    return True


@device
def _make_ready(queue, mask, waiting, is_ready, cid, lane, leader):
    """Append ids without a waiting thread to the ready ring (all lanes of `mask`, holding the lock)."""
    # the leader loads the tail, because it stored it in the previous round, and votes have no memory order
    tail = shfl(mask, load_relaxed(queue + 8 * at.Q_READY_TAIL, DEVICE), leader)
    count = field(queue, at.Q_N_IDS)
    if is_ready:
        slot = tail + popc(waiting & ((1 << lane) - 1))
        store_release(field(queue, at.Q_READY) + 8 * (slot & (count - 1)), cid, DEVICE)
    syncwarp(mask)
    if lane == leader:
        store_release(queue + 8 * at.Q_READY_TAIL, tail + popc(waiting), DEVICE)


@device
def take_ready(queue):
    """Take one completed id without a waiting thread, or return -1 (thread; acquires its status and data)."""
    head = load_relaxed(queue + 8 * at.Q_READY_HEAD, DEVICE)
    if head >= load_relaxed(queue + 8 * at.Q_READY_TAIL, DEVICE):
        return -1
    while head < load_acquire(queue + 8 * at.Q_READY_TAIL, DEVICE):
        slot = field(queue, at.Q_READY) + 8 * (head & (field(queue, at.Q_N_IDS) - 1))
        cid = load_acquire(slot, DEVICE)
        found = compare_exchange(queue + 8 * at.Q_READY_HEAD, head, head + 1, DEVICE)
        if found == head:
            return cid
        head = found
    return -1


@device
def _admit_next_lap(queue, fetched, shift):
    """Admit threads of the next lap to every entry that the controller has fetched (the consumer's leader).

    A controller may report any head. A head that is older than the last one, or beyond the submitted entries, admits
    threads too early. They overwrite no entry in use, because there are half as many ids as entries. No thread is
    admitted too late (`take_entry` waits for its turn or a later one).
    """
    mask = (1 << shift) - 1
    fetched &= mask
    head = load_relaxed(queue + 8 * at.Q_SQ_HEAD, DEVICE)
    # one fence for all turns: a release per turn would be a fence per turn, and all submitting threads wait for this
    fence(DEVICE)
    while (head & mask) != fetched:
        store_relaxed(field(queue, at.Q_TURNS) + 8 * (head & mask), (head >> shift) + 1, DEVICE)
        head += 1
    store_relaxed(queue + 8 * at.Q_SQ_HEAD, head, DEVICE)
