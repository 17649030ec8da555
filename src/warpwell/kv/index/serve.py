"""The functions that a controller calls for a key-value command: reads are served here, changes are put into a ring."""

from __future__ import annotations

from warpwell.kv.index.fetch import ABSENT, FOUND, count_reads, read_part, read_value
from warpwell.kv.index.layout import S_RING, S_TABLE, SIZE_MASK, WITH_VERSION, enter, leave, version_at
from warpwell.kv.index.slots import lookup
from warpwell.kv.log.format import MAX_VALUE
from warpwell.nvme import (
    FLUSH,
    KV_DELETE,
    KV_EXIST,
    KV_LIST,
    KV_RETRIEVE,
    KV_STORE,
    word0_opc,
    word5_key_size,
    word5_options,
    word5_value_size,
)
from warpwell.nvme.status import (
    INVALID_FIELD,
    INVALID_OPCODE,
    KV_INVALID_KEY_SIZE,
    KV_INVALID_VALUE_SIZE,
    KV_KEY_DOES_NOT_EXIST,
    KV_UNRECOVERED_ERROR,
    NAMESPACE_NOT_READY,
    NAMESPACE_WRITE_PROTECTED,
)
from warpwell.storage.commands import word, write_answer
from warpwell.targets import device, native
from warpwell.targets.primitives import (
    SYSTEM,
    backoff,
    exchange,
    load_acquire,
    load_relaxed,
    store_relaxed,
    store_release,
)

PENDING = -1

# -- words of a command (see `warpwell.nvme.key_value`) ------------------------------------------------------------
C_WORD0 = 0
C_KEY0 = 1
C_BUFFER = 3
C_SIZES = 5
C_KEY1 = 7

# -- ring of requests for the interpreter, in words; a line for each group of words that one side writes ---------
Q_SHIFT = 0
Q_FLAGS = 1
"""1: changes are taken; 2: closing, nothing is taken."""
Q_LOCK = 8
"""Of threads that put requests."""
Q_TAIL = 9
"""Requests that were put."""
Q_HEAD = 16
"""Requests that were taken."""
Q_DONE_LOCK = 24
"""Of threads that fetch answers."""
Q_DONE_HEAD = 25
Q_DONE_TAIL = 32
Q_ENTRIES = 40
ENTRY_WORDS = 6
E_OP = 0
E_KEY0 = 1
E_KEY1 = 2
E_BUFFER = 3
E_TAG = 4
E_NBYTES = 5
RING_SHIFT = 14
"""More entries than all queues of a controller have command ids."""
RING_WORDS = Q_ENTRIES + (ENTRY_WORDS + 1) * (1 << RING_SHIFT)

TAKES_CHANGES = 1
CLOSING = 2


@device
def masked(word, nbytes):
    """Return the low 0 to 8 bytes of a word of a key, padded with zeros."""
    if nbytes >= 8:
        return word
    if nbytes <= 0:
        return 0
    return word & ((1 << (8 * nbytes)) - 1)


@device
def take_lock(address):
    """Take a spin lock, which is held for a few instructions."""
    attempt = 0
    while exchange(address, 1, SYSTEM) != 0:
        backoff(attempt)
        attempt += 1


@device
def hand_over(ring, op, key0, key1, buffer, nbytes, tag):
    """Put a request into the ring; return PENDING, or the status of a request that is refused."""
    if ring == 0:
        return NAMESPACE_WRITE_PROTECTED
    flags = load_acquire(ring + 8 * Q_FLAGS, SYSTEM)
    if flags & CLOSING != 0:
        return NAMESPACE_NOT_READY
    if flags & TAKES_CHANGES == 0 and op & 0xFF != KV_LIST:
        return NAMESPACE_WRITE_PROTECTED
    mask = (1 << load_relaxed(ring + 8 * Q_SHIFT, SYSTEM)) - 1
    take_lock(ring + 8 * Q_LOCK)
    at = load_relaxed(ring + 8 * Q_TAIL, SYSTEM)
    status = PENDING
    # An answer keeps its place until it is fetched, so both halves of the ring have room for what is inside.
    if at - load_acquire(ring + 8 * Q_DONE_HEAD, SYSTEM) > mask:
        status = NAMESPACE_NOT_READY
    else:
        entry = ring + 8 * (Q_ENTRIES + ENTRY_WORDS * (at & mask))
        store_relaxed(entry + 8 * E_OP, op, SYSTEM)
        store_relaxed(entry + 8 * E_KEY0, key0, SYSTEM)
        store_relaxed(entry + 8 * E_KEY1, key1, SYSTEM)
        store_relaxed(entry + 8 * E_BUFFER, buffer, SYSTEM)
        store_relaxed(entry + 8 * E_TAG, tag, SYSTEM)
        store_relaxed(entry + 8 * E_NBYTES, nbytes, SYSTEM)
        store_release(ring + 8 * Q_TAIL, at + 1, SYSTEM)
    store_release(ring + 8 * Q_LOCK, 0, SYSTEM)
    return status


@device
def retrieve(state, key0, key1, length, buffer, nbytes, first, options, stripe):
    """Copy as much of a value as fits, from byte `first`; return status and size (see `kv_start`)."""
    epoch = enter(state, stripe)
    loc0, loc1 = lookup(load_acquire(state + 8 * S_TABLE, SYSTEM), key0, key1, length)
    size = loc1 & SIZE_MASK
    status = ABSENT
    if loc0 != 0:
        if nbytes == 0:
            status = FOUND  # only the size is asked for
        elif size <= nbytes and first == 0:
            status = read_value(state, loc0, loc1, buffer)
        elif first >= size:
            status = FOUND
        else:
            status = read_part(state, loc0, loc1, buffer, first, min(nbytes, size - first), stripe)
    leave(state, stripe, epoch)
    if status == FOUND:
        count_reads(state, stripe, 1, 1, min(size, nbytes), 0)
        if options & WITH_VERSION != 0 and nbytes > 0 and (first > 0 or size > nbytes):
            version = version_at(buffer, nbytes)
            store_relaxed(version, loc0, SYSTEM)
            store_relaxed(version + 8, loc1, SYSTEM)
        return size << 16
    if status == ABSENT:
        count_reads(state, stripe, 1, 0, 0, 0)
        return KV_KEY_DOES_NOT_EXIST
    count_reads(state, stripe, 1, 0, 0, 1)
    return KV_UNRECOVERED_ERROR


@native
def kv_start(state: int, command: int, tag: int) -> int:
    """Start a key-value command; see `warpwell.storage.medium.NativeMedium`.

    Parameters
    ----------
    state : int
        Address of the store's state block.
    command : int
        Address of a command (`warpwell.nvme.key_value`). Bits 31:16 of cdw11, which the command set reserves, are the
        offset at which a retrieve starts, in units of 512 bytes.
    tag : int
        At most 40 bits.

    Returns
    -------
    int
        ``status | dw0 << 16``, or PENDING; then `kv_complete` answers.

    Notes
    -----
    A retrieve with the option `WITH_VERSION` whose buffer has not the whole value also writes the value's location to
    `version_at`, where the caller provides `VERSION_BYTES` more than the buffer and its alignment.
    """
    word5 = word(command, C_SIZES)
    opcode = word0_opc(word(command, C_WORD0))
    length = word5_key_size(word5)
    nbytes = word5_value_size(word5)
    buffer = word(command, C_BUFFER)
    options = word5_options(word5)
    op = opcode | (length << 8) | (options << 16)
    if buffer == 0 and nbytes > 0:
        return INVALID_FIELD
    if opcode == FLUSH:
        ring = load_acquire(state + 8 * S_RING, SYSTEM)
        if ring == 0 or load_relaxed(ring + 8 * Q_FLAGS, SYSTEM) & TAKES_CHANGES == 0:
            return 0  # nothing was changed, so all is durable
        return hand_over(ring, op, 0, 0, 0, 0, tag)
    if length > 16 or (length == 0 and opcode != KV_LIST):
        return KV_INVALID_KEY_SIZE
    low = masked(word(command, C_KEY0), length)
    high = masked(word(command, C_KEY1), length - 8)
    if opcode == KV_RETRIEVE:
        first = ((word5 >> 48) & 0xFFFF) << 9
        return retrieve(state, low, high, length, buffer, nbytes, first, options, tag >> 16)
    if opcode == KV_EXIST:
        stripe = tag >> 16
        epoch = enter(state, stripe)
        loc0, _ = lookup(load_acquire(state + 8 * S_TABLE, SYSTEM), low, high, length)
        leave(state, stripe, epoch)
        return 0 if loc0 != 0 else KV_KEY_DOES_NOT_EXIST
    if opcode == KV_STORE and nbytes > MAX_VALUE:
        return KV_INVALID_VALUE_SIZE
    if opcode == KV_STORE or opcode == KV_DELETE or opcode == KV_LIST:
        return hand_over(load_acquire(state + 8 * S_RING, SYSTEM), op, low, high, buffer, nbytes, tag)
    return INVALID_OPCODE


@native
def kv_complete(state: int, answer: int) -> bool:
    """Answer a pending command that has completed; return whether there was one. Pending commands have no result."""
    ring = load_acquire(state + 8 * S_RING, SYSTEM)
    if ring == 0:
        return False
    head = load_acquire(ring + 8 * Q_DONE_HEAD, SYSTEM)
    if head == load_acquire(ring + 8 * Q_DONE_TAIL, SYSTEM):
        return False
    take_lock(ring + 8 * Q_DONE_LOCK)
    is_found = False
    head = load_relaxed(ring + 8 * Q_DONE_HEAD, SYSTEM)
    if head != load_acquire(ring + 8 * Q_DONE_TAIL, SYSTEM):
        shift = load_relaxed(ring + 8 * Q_SHIFT, SYSTEM)
        done = Q_ENTRIES + (ENTRY_WORDS << shift)
        found = load_relaxed(ring + 8 * (done + (head & ((1 << shift) - 1))), SYSTEM)
        is_found = write_answer(answer, found >> 16, found & 0xFFFF, 0)
        store_release(ring + 8 * Q_DONE_HEAD, head + 1, SYSTEM)
    store_release(ring + 8 * Q_DONE_LOCK, 0, SYSTEM)
    return is_found


def wait_for_requests(ring, attempts):
    """Wait a limited time until the ring has requests; return their number (the interpreter's thread, no lock held)."""
    head = load_relaxed(ring + 8 * Q_HEAD, SYSTEM)
    for attempt in range(attempts):
        count = load_acquire(ring + 8 * Q_TAIL, SYSTEM) - head
        if count > 0 or load_acquire(ring + 8 * Q_FLAGS, SYSTEM) & CLOSING != 0:
            return count
        backoff(min(attempt, 60))
    return 0


def answer(ring, word):
    """Put an answer into the ring (the interpreter's thread)."""
    shift = load_relaxed(ring + 8 * Q_SHIFT, SYSTEM)
    tail = load_relaxed(ring + 8 * Q_DONE_TAIL, SYSTEM)
    done = Q_ENTRIES + (ENTRY_WORDS << shift)
    store_relaxed(ring + 8 * (done + (tail & ((1 << shift) - 1))), word, SYSTEM)
    store_release(ring + 8 * Q_DONE_TAIL, tail + 1, SYSTEM)
    return 0


def taken(ring, count):
    """Note that requests were removed from the ring (the interpreter's thread)."""
    store_release(ring + 8 * Q_HEAD, load_relaxed(ring + 8 * Q_HEAD, SYSTEM) + count, SYSTEM)
    return 0
