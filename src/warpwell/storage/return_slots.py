"""Return value queues: slots for values, in shared memory, that the controller assigns when it answers.

A command that transfers data (cdw10 is not 0) and names no buffer requests a slot. The controller takes the next free
slot and returns its number in the low half of dw1 of the completion; the reader of the value frees the slot by clearing
its word. There are fewer slots than command ids: if all are taken, the command completes with "namespace not ready" and
must be submitted again after values have been taken.
"""

from __future__ import annotations

from warpwell.nvme.status import NAMESPACE_NOT_READY
from warpwell.queues import QueuePairs, field, id_record
from warpwell.queues import layout as at
from warpwell.targets import Allocator, device
from warpwell.targets.primitives import (
    DEVICE,
    SYSTEM,
    compare_exchange,
    load_acquire,
    load_relaxed,
    store_relaxed,
    store_release,
)

from .. import errors
from .commands import C_BUFFER, C_CDW10, set_word, word

# -- record of a return value queue (shared host memory), `Q_USER` and `P_USER` of a pair ------------------------
R_COUNT = 0
"""Number of slots, a power of two."""
R_SLOT_BYTES = 1
R_SLOTS = 2
"""Address of the first slot."""
R_FLAGS = 3
"""Address of a word for each slot: 1 while the slot has a value that no thread has taken."""
R_OF = 4
"""Address of a word for each command id: 1 more than the slot of its command, or 0 (only the controller accesses
it)."""
R_NEXT = 8
R_WORDS = 16


class ReturnSlots:
    """Memory of the return value queues of queue pairs, one for each pair; the pairs keep this object alive.

    Parameters
    ----------
    memory : Allocator
        Allocator of the device whose threads submit.
    pairs : QueuePairs
        Pairs with results.
    count : int
        Slots of each queue, a power of two of at most 32768.
    slot_bytes : int
        Bytes of each slot, a multiple of 512.

    Attributes
    ----------
    nbytes : int
        Bytes of shared memory.
    """

    def __init__(self, memory: Allocator, pairs: QueuePairs, count: int, slot_bytes: int) -> None:
        if count < 1 or count & (count - 1) or count > 32768 or slot_bytes < 512 or slot_bytes % 512:
            raise errors.ArgumentError(
                f"return slots must be a power of two up to 32768, of a multiple of 512 bytes, got {count} slots of "
                f"{slot_bytes} bytes"
            )
        values = -(-8 * (R_WORDS + count + pairs.ids) // 4096) * 4096
        each = values + count * slot_bytes
        block = memory.allocate_shared(pairs.count * each)
        self.nbytes = block.nbytes
        for k in range(pairs.count):
            words, address = block.words[k * each // 8 :], block.address + k * each
            words[R_COUNT], words[R_SLOT_BYTES], words[R_SLOTS] = count, slot_bytes, address + values
            words[R_FLAGS], words[R_OF] = address + 8 * R_WORDS, address + 8 * (R_WORDS + count)
            pairs.set_user(k, block, k * each, count + 1)


@device
def alloc_return_slot(port: int, cid: int) -> int:
    """Take a slot for a command's value; return its address, or 0 if all are taken (any I/O thread)."""
    record = field(port, at.P_USER)
    count = field(record, R_COUNT)
    first = load_relaxed(record + 8 * R_NEXT, SYSTEM)
    for k in range(count):
        slot = (first + k) & (count - 1)
        flag = field(record, R_FLAGS) + 8 * slot
        if load_acquire(flag, SYSTEM) == 0 and compare_exchange(flag, 0, 1, SYSTEM) == 0:
            store_relaxed(record + 8 * R_NEXT, slot + 1, SYSTEM)
            store_relaxed(field(record, R_OF) + 8 * cid, slot + 1, SYSTEM)
            return field(record, R_SLOTS) + slot * field(record, R_SLOT_BYTES)
    return 0


@device
def assign_return_slot(port: int, cid: int, command: int) -> int:
    """Set a return slot as the buffer of a command that requests one; return a status (any I/O thread)."""
    if word(command, C_BUFFER) != 0 or word(command, C_CDW10) & 0xFFFFFFFF == 0 or field(port, at.P_USER) == 0:
        return 0
    slot = alloc_return_slot(port, cid)
    if slot == 0:
        return NAMESPACE_NOT_READY  # all slots are taken: the command must be submitted again
    set_word(command, C_BUFFER, slot)
    return 0


@device
def with_return_slot(port: int, cid: int, status: int, result: int) -> int:
    """Return dw0 and dw1 of a completion; free the slot if it has no value (any I/O thread).

    `result` is dw0. Bits 15:0 of dw1 are the number of the slot, from 1, or 0.
    """
    dw0 = result & 0xFFFFFFFF
    record = field(port, at.P_USER)
    if record == 0:
        return dw0
    of = field(record, R_OF) + 8 * cid
    slot = load_relaxed(of, SYSTEM)
    if slot == 0:
        return dw0
    store_relaxed(of, 0, SYSTEM)
    if status != 0 or dw0 == 0:
        store_release(field(record, R_FLAGS) + 8 * (slot - 1), 0, SYSTEM)
        return dw0
    return dw0 | (slot << 32)


@device
def return_slot_of(queue: int, cid: int) -> int:
    """Return the address of the return slot that a completion named, or 0; as for `result_of` (thread)."""
    slot = (load_relaxed(id_record(queue, cid) + 8 * at.ID_RESULT, DEVICE) >> 32) & 0xFFFF
    if slot == 0:
        return 0
    record = field(queue, at.Q_USER)
    return field(record, R_SLOTS) + (slot - 1) * field(record, R_SLOT_BYTES)


@device
def free_return_slot(queue: int, cid: int) -> None:
    """Free the return slot of a completion, if it has one (thread; releases its reads)."""
    slot = (load_relaxed(id_record(queue, cid) + 8 * at.ID_RESULT, DEVICE) >> 32) & 0xFFFF
    if slot != 0:
        store_relaxed(id_record(queue, cid) + 8 * at.ID_RESULT, 0, DEVICE)
        store_release(field(field(queue, at.Q_USER), R_FLAGS) + 8 * (slot - 1), 0, SYSTEM)
