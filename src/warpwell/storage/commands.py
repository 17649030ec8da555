"""Helpers of native media: words of commands and answers, spin locks, zeros, slots of commands in flight.

A medium that waits for another medium keeps each command in a slot; the slot's number is the tag that the other medium
receives.
"""

from __future__ import annotations

import numpy as np

from ..nvme import word0_opc, word5_slba, word6_nlb
from ..targets import device, private_block
from ..targets.primitives import (
    SYSTEM,
    backoff,
    call_native,
    exchange,
    load_relaxed,
    store_relaxed,
    store_relaxed_as,
    store_release,
)

U1 = np.dtype(np.uint8)

BLOCK = 512
"""Bytes of a logical block."""

# -- command, as `start` gets it: words of an NVMe command ------------------------------------------------------
C_WORD0 = 0
"""Opcode, command identifier and namespace."""
C_BUFFER = 3
C_BLOCK = 5
"""First block."""
C_CDW10 = 5
"""Lower half: cdw10. In commands that do not address blocks, it is often the number of bytes to transfer."""
C_BLOCKS = 6
"""Number of blocks, less 1."""
COMMAND_WORDS = 8
COMMAND_BYTES = 64

# -- answer, as `complete` writes it ----------------------------------------------------------------------------
A_TAG = 0
A_STATUS = 1
A_RESULT = 2
ANSWER_WORDS = 3
ANSWER_BYTES = 24

# -- slot table: a lock, the number of free slots, the stack of free slots, then the records -----------------
T_LOCK = 0
T_FREE = 1
T_CAPACITY = 2
T_STACK = 8

# -- record of a command in flight ---------------------------------------------------------------------------
R_TAG = 0
R_OP = 1
R_OFFSET = 2
R_NBYTES = 3
R_BUFFER = 4
R_STATUS = 5
"""First error of its parts."""
R_REMAINING = 6
"""Number of parts that are not done."""
R_EXTRA = 7
"""First replica and number of tries; bytes past the end of a file; or the time at which the command arrived."""
RECORD_WORDS = 8

PENDING = -1
"""Result of a start function if the command will complete later."""

SLOTS = 16384
"""Number of slots: more than the command ids of all queues of a controller."""


@device
def word(state: int, index: int) -> int:
    """Load a state word."""
    return load_relaxed(state + 8 * index, SYSTEM)


@device
def set_word(state: int, index: int, value: int) -> None:
    """Store a state word."""
    store_relaxed(state + 8 * index, value, SYSTEM)


@device
def decode_command(command: int) -> tuple[int, int, int, int]:
    """Return the opcode of a command to blocks, its offset and length in bytes, and the address of its buffer."""
    return (
        word0_opc(word(command, C_WORD0)),
        word5_slba(word(command, C_BLOCK)) * BLOCK,
        (word6_nlb(word(command, C_BLOCKS)) + 1) * BLOCK,
        word(command, C_BUFFER),
    )


@device
def encode_command(command: int, op: int, offset: int, nbytes: int, buffer: int) -> int:
    """Write a command to blocks, of a multiple of 512 bytes; return its address."""
    set_word(command, C_WORD0, op)
    set_word(command, C_BUFFER, buffer)
    set_word(command, C_BLOCK, offset >> 9)
    set_word(command, C_BLOCKS, (nbytes >> 9) - 1)
    return command


@device
def call_start(function: int, state: int, command: int, tag: int) -> int:
    """Call a start function (`NativeMedium`)."""
    return call_native(function, state, command, tag, 0, 0, 0)


@device
def call_complete(function: int, state: int, answer: int) -> bool:
    """Call a complete function (`NativeMedium`)."""
    return call_native(function, state, answer, 0, 0, 0, 0) != 0


@device
def write_answer(answer: int, tag: int, status: int, result: int) -> bool:
    """Write an answer; return True."""
    set_word(answer, A_TAG, tag)
    set_word(answer, A_STATUS, status)
    set_word(answer, A_RESULT, result)
    return True


@device
def lock(address: int) -> None:
    """Acquire a spin lock; the caller may hold it for a few instructions only."""
    attempt = 0
    while exchange(address, 1, SYSTEM) != 0:
        backoff(attempt)
        attempt += 1


@device
def unlock(address: int) -> None:
    """Release a spin lock."""
    store_release(address, 0, SYSTEM)


@device
def zero_fill(address: int, nbytes: int) -> None:
    """Zero a buffer."""
    at = address
    end = address + nbytes
    while at < end and at & 7 != 0:
        store_relaxed_as(at, 0, U1)
        at += 1
    while at + 8 <= end:
        store_relaxed(at, 0, SYSTEM)
        at += 8
    while at < end:
        store_relaxed_as(at, 0, U1)
        at += 1


@device
def try_slot(table: int) -> int:
    """Take a free slot, or return -1."""
    lock(table)
    count = word(table, T_FREE)
    slot = -1
    if count > 0:
        slot = word(table, T_STACK + count - 1)
        set_word(table, T_FREE, count - 1)
    unlock(table)
    return slot


@device
def take_slot(table: int) -> int:
    """Take a free slot; wait for one up to about a second, then return -1."""
    for attempt in range(1500):
        slot = try_slot(table)
        if slot >= 0:
            return slot
        backoff(attempt)
    return -1


@device
def fill_slot(table: int, slot: int, tag: int, op: int, offset: int, nbytes: int, buffer: int, parts: int) -> int:
    """Record a command of `parts` parts in its slot; return the record's address."""
    record = record_of(table, slot)
    set_word(record, R_TAG, tag)
    set_word(record, R_OP, op)
    set_word(record, R_OFFSET, offset)
    set_word(record, R_NBYTES, nbytes)
    set_word(record, R_BUFFER, buffer)
    set_word(record, R_STATUS, 0)
    set_word(record, R_REMAINING, parts)
    set_word(record, R_EXTRA, 0)
    return record


@device
def release_slot(table: int, slot: int) -> None:
    """Release a slot."""
    lock(table)
    count = word(table, T_FREE)
    set_word(table, T_STACK + count, slot)
    set_word(table, T_FREE, count + 1)
    unlock(table)


@device
def record_of(table: int, slot: int) -> int:
    """Return the address of a slot's record."""
    return table + 8 * (T_STACK + word(table, T_CAPACITY) + slot * RECORD_WORDS)


class SlotTable:
    """Host side of a slot table. A forked child has a copy, which shares no slots with its parent.

    Parameters
    ----------
    capacity : int
        Maximum number of commands in flight.
    """

    def __init__(self, capacity: int = SLOTS) -> None:
        self._block = private_block(8 * (T_STACK + capacity * (1 + RECORD_WORDS)))
        words = self._block.words
        words[T_FREE] = words[T_CAPACITY] = capacity
        words[T_STACK : T_STACK + capacity] = np.arange(capacity)
        self.address = self._block.address

    @property
    def taken(self) -> int:
        """Number of slots that are taken (a snapshot)."""
        return int(self._block.words[T_CAPACITY] - self._block.words[T_FREE])


# -- the calling service thread (`targets.seat`): its number, below, and the rounds without work, plus 1 -------------

SEATS = 64
"""Maximum number of service threads of a controller."""


@device
def seat_of(number: int, idle: int) -> int:
    """Return the address of the calling service thread's words."""
    return (idle + 1) * SEATS + number
