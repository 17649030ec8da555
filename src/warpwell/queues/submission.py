"""Submission: the lock-free ring of the paper (section III-C), and command ids.

A thread draws a ticket, which determines an entry and a turn. The turn counter admits the thread to its entry; the
thread writes its 64 bytes and sets its mark (its ticket + 1). The thread that takes the mark at the tail is the mover:
it takes all consecutive marks, rings the doorbell once for the batch, stores the tail, and checks the mark at the new
tail once more. A thread that finds that the mark at the tail was taken may return, because marks change only by
acquire-release exchange. Either the mover's second check happens after the thread has set its mark, and takes the mark;
or it happened before, and then the thread reads the mover's new tail. The doorbell is rung before the tail is stored,
so that two movers cannot ring out of order.

There are half as many ids as entries. An id is freed only after its completion was drained, and the drain also raises
the turns of all entries that the controller has fetched, so a thread practically never waits for its turn. It waits if
the controller reports a head that does not move: then the queues are lost (`queues.loss`).

A cid has 16 bits: an id, and above it a generation, which the host chooses. Each use of an id has the next generation,
and the id's state has the generation of the current use. So a duplicate completion names an older use. It is accepted
only if all generations were used in between (256 with rings of 512 entries).
"""

from __future__ import annotations

from warpwell.targets import device
from warpwell.targets.primitives import (
    DEVICE,
    SYSTEM,
    backoff,
    clock_ns,
    compare_exchange,
    exchange,
    fence,
    fetch_add_as,
    fetch_min_as,
    load_acquire,
    load_relaxed,
    load_weak_as,
    store_relaxed,
    store_release,
)

from . import layout as at
from .layout import I8
from .loss import latch_violation, lost


@device
def field(record, index):
    """Return a constant field of a record (thread; an ordinary load, the field never changes)."""
    return load_weak_as(record + 8 * index, I8)


@device
def id_of(queue, cid):
    """Return the id of a cid: the cid without its generation (thread)."""
    return cid & (field(queue, at.Q_N_IDS) - 1)


@device
def id_record(queue, cid):
    """Return the address of an id's record (thread)."""
    return field(queue, at.Q_IDS) + id_of(queue, cid) * (8 * at.ID_WORDS)


@device
def state_word(queue, cid, kind):
    """Return the state of an id whose use `cid` has a kind below `DONE` (thread)."""
    return ((cid & -field(queue, at.Q_N_IDS)) << 8) | kind


@device
def staging_of(queue, cid):
    """Return the address of the staging buffer that an id owns (thread)."""
    return field(queue, at.Q_STAGING) + id_of(queue, cid) * field(queue, at.Q_STAGING_BYTES)


@device
def take_id(queue, reserve):
    """Take a command id and return its cid, or -1 (thread; never waits).

    `reserve` ids stay available to other callers: a prefetch passes a quarter of all ids. Acquires all accesses of the
    id's last owner before `release_id`.
    """
    count = field(queue, at.Q_N_IDS)
    # check first: thousands of threads that add and subtract at once would keep the count above the number of taken ids
    if load_relaxed(queue + 8 * at.Q_IN_USE, DEVICE) >= count - reserve:
        return -1
    # the count and the hint are unordered; the id's state has the memory order
    if fetch_add_as(queue + 8 * at.Q_IN_USE, 1, I8) >= count - reserve:
        fetch_add_as(queue + 8 * at.Q_IN_USE, -1, I8)
        return -1
    start = fetch_add_as(queue + 8 * at.Q_HINT, 1, I8)
    for k in range(count):
        index = (start + k) & (count - 1)
        state = id_record(queue, index) + 8 * at.ID_STATE
        free = load_relaxed(state, DEVICE)
        if free & at.KIND == at.FREE and compare_exchange(state, free, free | at.TAKEN, DEVICE) == free:
            return (free >> 8) | index
    fetch_add_as(queue + 8 * at.Q_IN_USE, -1, I8)
    return -1


@device
def release_id(queue, cid):
    """Release an id and its staging buffer, for the next generation (thread; release order)."""
    after = (cid + field(queue, at.Q_GENERATION)) & 0xFFFF
    store_release(id_record(queue, cid) + 8 * at.ID_STATE, state_word(queue, after, at.FREE), DEVICE)
    fetch_add_as(queue + 8 * at.Q_IN_USE, -1, I8)


@device
def reuse_id(queue, cid):
    """Take an id again after its completion, with its staging buffer, and return the next cid (its owner)."""
    after = (cid + field(queue, at.Q_GENERATION)) & 0xFFFF
    store_release(id_record(queue, cid) + 8 * at.ID_STATE, state_word(queue, after, at.TAKEN), DEVICE)
    return after


@device
def prp2_of(queue, cid, nbytes):
    """Return prp2 of a command that moves `nbytes` bytes between storage and an id's staging, 0 for none (thread).

    prp2 is the second memory page of staging, or the id's list of all pages after the first, which `QueuePairs` has
    filled in. Queues without lists need none.
    """
    lists = field(queue, at.Q_LISTS)
    if lists == 0 or nbytes <= at.MEMORY_PAGE:
        return 0
    if nbytes <= 2 * at.MEMORY_PAGE:
        return staging_of(queue, cid) + at.MEMORY_PAGE
    return lists + (id_of(queue, cid) << field(queue, at.Q_LIST_SHIFT))


@device
def submit(queue, word0, prp1, prp2, slba, control):
    """Put a Command in the ring and ensure that a doorbell is rung for it (thread).

    All earlier accesses of the thread are visible to the controller when it reads the command. `word0` has opcode, id
    and namespace, `prp1` the data address, `prp2` the second address (see `prp2_of`; 0 is not stored), `slba` the first
    block, `control` the block count. Returns False, with nothing submitted, only if the controller is lost.
    """
    shift = field(queue, at.Q_DEPTH_SHIFT)
    mask = (1 << shift) - 1
    ticket = take_entry(queue, shift)
    if ticket < 0:
        return False
    # a block namespace ignores the other words, and each store crosses the bus
    entry = field(queue, at.Q_SQ) + 64 * (ticket & mask)
    store_relaxed(entry, word0, SYSTEM)
    store_relaxed(entry + 24, prp1, SYSTEM)
    if prp2 != 0:
        store_relaxed(entry + 32, prp2, SYSTEM)
    store_relaxed(entry + 40, slba, SYSTEM)
    store_relaxed(entry + 48, control, SYSTEM)
    mark(queue, ticket, mask)
    ring(queue, mask)
    return True


@device
def submit_entry(queue, word0, word1, prp1, word5, word6, word7):
    """Put a Command with a key, which uses more words, in the ring like `submit` (thread).

    `word1` and `word7` have the key, `word5` the sizes of key and value (see `warpwell.nvme.key_value`); the words of
    mptr and prp2 stay zero.
    """
    shift = field(queue, at.Q_DEPTH_SHIFT)
    mask = (1 << shift) - 1
    ticket = take_entry(queue, shift)
    if ticket < 0:
        return False
    entry = field(queue, at.Q_SQ) + 64 * (ticket & mask)
    store_relaxed(entry, word0, SYSTEM)
    store_relaxed(entry + 8, word1, SYSTEM)
    store_relaxed(entry + 24, prp1, SYSTEM)
    store_relaxed(entry + 40, word5, SYSTEM)
    store_relaxed(entry + 48, word6, SYSTEM)
    store_relaxed(entry + 56, word7, SYSTEM)
    mark(queue, ticket, mask)
    ring(queue, mask)
    return True


@device
def take_entry(queue, shift):
    """Take the next entry of the ring and wait for its turn; return the ticket (thread).

    Return -1 if the controller is lost: the entry stays empty, and the tail cannot pass it until the queues are
    rewound.
    """
    ticket = fetch_add_as(queue + 8 * at.Q_TICKET, 1, I8)  # relaxed: the turn has the memory order
    turn = field(queue, at.Q_TURNS) + 8 * (ticket & ((1 << shift) - 1))
    attempt = 0
    since = 0
    while load_acquire(turn, DEVICE) < ticket >> shift:
        backoff(attempt)
        if attempt == 0:
            since = clock_ns()
        attempt += 1
        if attempt & 31 == 0:
            if clock_ns() - since > field(queue, at.Q_TURN_NS):
                latch_violation(queue, at.NO_TURN, 0)
            if lost(queue):
                return -1
    return ticket


@device
def mark(queue, ticket, mask):
    """Mark the entry of a ticket as written, for the mover (thread; release order)."""
    exchange(field(queue, at.Q_MARKS) + 8 * (ticket & mask), ticket + 1, DEVICE)


@device
def ring(queue, mask):
    """Move the tail over consecutive marks and ring one doorbell for each batch (thread; never waits)."""
    marks = field(queue, at.Q_MARKS)
    tail = load_acquire(queue + 8 * at.Q_TAIL, DEVICE)
    moved = False
    while True:
        mark_at = marks + 8 * (tail & mask)
        found = exchange(mark_at, 0, DEVICE)
        if found == tail + 1:
            tail = take_marks(marks, tail + 1, mask)
            moved = True
        elif found != 0:
            # this thread slept for a lap and took the mark of a later ticket: put it back, and continue from the
            # current tail, because a mover may have seen the gap in the meantime and returned
            exchange(mark_at, found, DEVICE)
            tail = load_acquire(queue + 8 * at.Q_TAIL, DEVICE)
        elif moved:
            # acquire the marks that were taken relaxed, and release the entries to the controller
            fence(SYSTEM)
            store_relaxed(field(queue, at.Q_SQ_DOORBELL), tail & mask, SYSTEM)
            store_release(queue + 8 * at.Q_TAIL, tail, DEVICE)
            moved = False
        else:
            return


@device
def take_marks(marks, tail, mask):
    """Take the marks from the one at `tail` on, four at a time; return the tail after them (the mover; relaxed).

    Consecutive exchanges with acquire-release order would limit the rate of a queue: each is a round trip to memory.
    """
    while True:
        first = marks + 8 * (tail & mask)
        second = marks + 8 * ((tail + 1) & mask)
        third = marks + 8 * ((tail + 2) & mask)
        fourth = marks + 8 * ((tail + 3) & mask)
        a = load_relaxed(first, DEVICE)
        b = load_relaxed(second, DEVICE)
        c = load_relaxed(third, DEVICE)
        d = load_relaxed(fourth, DEVICE)
        if a != tail + 1 or b != tail + 2 or c != tail + 3 or d != tail + 4:
            return tail
        # marks are above 0: the minimum of a mark and 0 is 0
        a = fetch_min_as(first, 0, I8)
        b = fetch_min_as(second, 0, I8)
        c = fetch_min_as(third, 0, I8)
        d = fetch_min_as(fourth, 0, I8)
        if a == 0 or b == 0 or c == 0 or d == 0:
            break
        tail += 4
    # a thread that slept for a lap has one of the marks and will put it back: the marks after it have to wait
    run = 0
    if a != 0:
        run = 1
        if b != 0:
            run = 2
            if c != 0:
                run = 3
    if run < 1 and b != 0:
        exchange(second, b, DEVICE)
    if run < 2 and c != 0:
        exchange(third, c, DEVICE)
    if run < 3 and d != 0:
        exchange(fourth, d, DEVICE)
    return tail + run
