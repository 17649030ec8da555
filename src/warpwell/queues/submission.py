"""Submission: the lock-free ring of the paper (section III-C), and command ids.

A ticket gives an entry and a turn; the turn counter admits the thread to its entry; it writes its 64 bytes
and sets its mark (its ticket + 1). The thread that takes the mark at the tail is the mover: it takes all consecutive
marks, rings the doorbell once for the batch, stores the tail, and looks at the new tail's mark once more. A
thread that finds the tail's mark taken may leave, because marks change only by acquire-release exchange:
either the mover's second look comes after the thread's mark and takes it, or it came before, and then the
thread reads the mover's new tail. The doorbell is rung before the tail is stored, so that two movers cannot
ring out of order.

Ids are half as many as the entries and are freed only after the completion was drained, which also
raised the turns of all entries the controller had fetched; so an admitted thread practically never waits. It does
where a controller tells a head that does not move: then the queues are lost (`queues.loss`).

A cid is an id with a generation above it, 16 bits in all: the host's choice. Each use of an id has the next generation,
and the id's state has the generation of the current use. So a completion that comes once more names an older use. It is
believed only if all generations have passed since (256 with rings of 512 entries).
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
from .loss import accuse, lost


@device
def field(record, index):
    """Return a constant field of a record (thread; an ordinary load, the field never changes)."""
    return load_weak_as(record + 8 * index, I8)


@device
def id_of(queue, cid):
    """Return the id of a cid: it without its generation (thread)."""
    return cid & (field(queue, at.Q_N_IDS) - 1)


@device
def id_record(queue, cid):
    """Return the address of an id's record (thread)."""
    return field(queue, at.Q_IDS) + id_of(queue, cid) * (8 * at.ID_WORDS)


@device
def state_word(queue, cid, kind):
    """Return what the state of an id is while a use of it, `cid`, is of a kind below `DONE` (thread)."""
    return ((cid & -field(queue, at.Q_N_IDS)) << 8) | kind


@device
def staging_of(queue, cid):
    """Return the address of the staging buffer that an id owns (thread)."""
    return field(queue, at.Q_STAGING) + id_of(queue, cid) * field(queue, at.Q_STAGING_BYTES)


@device
def take_id(queue, reserve):
    """Take a command id and return its cid, or -1 (thread; never waits).

    `reserve` ids are left for others: a prefetch passes a quarter of them. Acquires what the id's last
    owner did before `release_id`.
    """
    count = field(queue, at.Q_N_IDS)
    # looked at first: thousands that add and take back at once would keep the count above what is there
    if load_relaxed(queue + 8 * at.Q_IN_USE, DEVICE) >= count - reserve:
        return -1
    # these count and hint, and order nothing: the id's state does
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
    """Give an id and its staging buffer back, for the next generation (thread; releases what it did before)."""
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

    It is the second memory page of staging, or the id's list of all pages after the first, which `QueuePairs` has
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
    """Put a Command in the ring and see to it that a doorbell is rung for it (thread).

    Everything the thread did before is visible to the controller when it reads the command. `word0` holds
    opcode, id and namespace, `prp1` the data address, `prp2` the rest of it (see `prp2_of`; 0 is not stored), `slba`
    the first block, `control` the block count. Returns False, with nothing submitted, only if the controller is lost.
    """
    shift = field(queue, at.Q_DEPTH_SHIFT)
    mask = (1 << shift) - 1
    ticket = take_entry(queue, shift)
    if ticket < 0:
        return False
    # the other words mean nothing to a block namespace: each store less is one less on the bus
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
    """Put a Command that uses more words in the ring, as `submit` does: one with a key (thread).

    `word1` and `word7` hold the key, `word5` the sizes of key and value (see `warpwell.nvme.key_value`); the
    words of mptr and prp2 are those that the ring was made with, zero.
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

    Return -1 if the controller is lost: the entry stays empty, and nothing gets past it until the queues are rewound.
    """
    ticket = fetch_add_as(queue + 8 * at.Q_TICKET, 1, I8)  # the turn orders
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
                accuse(queue, at.NO_TURN, 0)
            if lost(queue):
                return -1
    return ticket


@device
def mark(queue, ticket, mask):
    """Tell movers that the entry of a ticket is written (thread; releases what was written)."""
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
            tail = follow(marks, tail + 1, mask)
            moved = True
        elif found != 0:
            # this thread slept for a lap and took a later one's mark: put it back, and move from today's
            # tail, because a mover may have seen the hole meanwhile and left
            exchange(mark_at, found, DEVICE)
            tail = load_acquire(queue + 8 * at.Q_TAIL, DEVICE)
        elif moved:
            # acquires the marks that were taken relaxed, and releases the entries to the controller
            fence(SYSTEM)
            store_relaxed(field(queue, at.Q_SQ_DOORBELL), tail & mask, SYSTEM)
            store_release(queue + 8 * at.Q_TAIL, tail, DEVICE)
            moved = False
        else:
            return


@device
def follow(marks, tail, mask):
    """Take the marks from the one at `tail` on, four at a time; return the tail after them (the mover; relaxed).

    One exchange after another, of acquire-release order, would bound the commands of a queue: each is a trip to memory.
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
        # marks are above 0: the least of a mark and 0 is 0
        a = fetch_min_as(first, 0, I8)
        b = fetch_min_as(second, 0, I8)
        c = fetch_min_as(third, 0, I8)
        d = fetch_min_as(fourth, 0, I8)
        if a == 0 or b == 0 or c == 0 or d == 0:
            break
        tail += 4
    # a thread that slept for a lap has one of them and puts it back: those behind it have to wait
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
