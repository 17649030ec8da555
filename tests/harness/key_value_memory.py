"""KeyValueMemory: keys and values in host memory behind native functions, and a client of the queues, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpwell.nvme import (
    CAPACITY_EXCEEDED,
    INVALID_OPCODE,
    KV_DELETE,
    KV_EXIST,
    KV_INVALID_KEY_SIZE,
    KV_INVALID_VALUE_SIZE,
    KV_KEY_DOES_NOT_EXIST,
    KV_KEY_EXISTS,
    KV_LIST,
    KV_RETRIEVE,
    KV_STORE,
    MAX_KEY_BYTES,
    STORE_IF_EXISTS,
    STORE_IF_MISSING,
    command_word0,
    key_value_word5,
    key_words,
    word0_opc,
    word5_key_size,
    word5_options,
    word5_value_size,
)
from warpwell.queues.completion import drain, orphan, poll, result_of, take_ready
from warpwell.queues.layout import ORPHAN, Q_WORDS
from warpwell.queues.submission import release_id, staging_of, submit_entry, take_id
from warpwell.storage.commands import lock, set_word, unlock, word
from warpwell.storage.medium import NativeMedium
from warpwell.targets import device, kernel, memory_for, native
from warpwell.targets.primitives import (
    SYSTEM,
    backoff,
    clock_ns,
    copy_bytes,
    element_address,
    grid,
    lane_id,
    rem,
    store_relaxed,
)

for _function in (command_word0, key_value_word5):
    device(_function)

BASE = 0
SLOTS = 1
LARGEST = 2
LOCK = 3
STRIDE = 4

S_KEY0 = 0
S_KEY1 = 1
S_SIZES = 2
"""Size of the key (0: free) and, from bit 8 on, size of the value; -1 if the key was deleted."""
S_VALUE = 24
"""Byte offset of the value."""

C_OPCODE = 0
C_KEY0 = 1
C_KEY1 = 2
C_SIZE = 3
C_OPTIONS = 4
C_NBYTES = 5
COMMAND_WORDS = 6

NOTHING = -1
"""No id was free: nothing was submitted."""
TIMED_OUT = -2
"""No completion in time: the id is quarantined."""


class KeyValueMemory:
    """Keys and values in host memory, with the native functions that `Controller.attach_kv` takes.

    Parameters
    ----------
    slots : int
        Most keys, a power of two.
    largest : int
        Most bytes of a value.
    """

    def __init__(self, slots: int = 1024, largest: int = 64) -> None:
        stride = -(-(S_VALUE + largest) // 8) * 8
        self._block = memory_for("cpu").allocate(slots * stride)
        self._state = memory_for("cpu").allocate(64)
        self._state.words[:5] = (self._block.address, slots, largest, 0, stride)
        self.blocks = (self._block, self._state)

    def native(self) -> NativeMedium:
        """Return the native functions."""
        return NativeMedium(memory_start.address, 0, self._state.address, self)

    def fill(self, keys: NDArray[np.int64], values: NDArray[np.uint8]) -> None:
        """Put values (``[N, nbytes]``) under 8-byte keys that were not there."""
        fields = self._state.words
        slots, stride = int(fields[SLOTS]), int(fields[STRIDE])
        rows = self._block.view(np.dtype(np.uint8)).reshape(slots, stride)
        heads = rows[:, :S_VALUE].view(np.int64)
        for key, value in zip(keys.tolist(), values, strict=True):
            at = key & (slots - 1)
            while heads[at, S_SIZES]:
                at = (at + 1) & (slots - 1)
            heads[at] = (key, 0, 8 | value.size << 8)
            rows[at, S_VALUE : S_VALUE + value.size] = value


@device
def find(state: int, key0: int, key1: int, size: int) -> int:
    """Return the address of a key's slot, or minus the address of a free slot, or 0 if the table is full."""
    slots = word(state, SLOTS)
    free_slot = 0
    for k in range(slots):
        at = word(state, BASE) + word(state, STRIDE) * ((key0 + k) & (slots - 1))
        sizes = word(at, S_SIZES)
        if sizes <= 0 and free_slot == 0:
            free_slot = -at
        if sizes == 0:
            return free_slot
        if sizes & 0xFF == size and word(at, S_KEY0) == key0 and word(at, S_KEY1) == key1 and sizes > 0:
            return at
    return free_slot


@native
def memory_start(state: int, command: int, tag: int) -> int:
    """Run a command at once."""
    opcode, word5 = word0_opc(word(command, 0)), word(command, 5)
    size, options, nbytes = word5_key_size(word5), word5_options(word5), word5_value_size(word5)
    if opcode != KV_RETRIEVE and opcode != KV_STORE and opcode != KV_EXIST and opcode != KV_DELETE:
        if opcode == KV_LIST and size > MAX_KEY_BYTES:
            return KV_INVALID_KEY_SIZE
        return INVALID_OPCODE
    if size < 1 or size > MAX_KEY_BYTES:
        return KV_INVALID_KEY_SIZE
    lock(state + 8 * LOCK)
    answer = run(state, opcode, size, options, word(command, 1), word(command, 7), word(command, 3), nbytes)
    unlock(state + 8 * LOCK)
    return answer


@device
def run(state: int, opcode: int, size: int, options: int, key0: int, key1: int, buffer: int, nbytes: int) -> int:
    """Run a command under the lock."""
    slot = find(state, key0, key1, size)
    if opcode == KV_STORE:
        if nbytes > word(state, LARGEST):
            return KV_INVALID_VALUE_SIZE
        if slot > 0 and options & STORE_IF_MISSING != 0:
            return KV_KEY_EXISTS
        if slot <= 0 and options & STORE_IF_EXISTS != 0:
            return KV_KEY_DOES_NOT_EXIST
        if slot == 0:
            return CAPACITY_EXCEEDED
        slot = abs(slot)
        set_word(slot, S_KEY0, key0)
        set_word(slot, S_KEY1, key1)
        set_word(slot, S_SIZES, size | (nbytes << 8))
        copy_bytes(slot + S_VALUE, buffer, nbytes)
        return 0
    if slot <= 0:
        return KV_KEY_DOES_NOT_EXIST
    if opcode == KV_DELETE:
        set_word(slot, S_SIZES, -1)
        return 0
    if opcode == KV_EXIST:
        return 0
    value_size = word(slot, S_SIZES) >> 8
    copy_bytes(buffer, slot + S_VALUE, min(value_size, nbytes))
    return value_size << 16


# -- client ---------------------------------------------------------------------------------------------------


@device
def send(queue: int, nsid: int, command: int, buffer: int) -> Any:
    """Submit a command; return its id, or `NOTHING` if no id is free (thread; never waits).

    `command` is the address of its words (`COMMAND_WORDS` of them), `buffer` the address of the value to store. The
    value goes through the id's staging, which a retrieve finds full of ones.
    """
    cid = take_id(queue, 0)
    if cid < 0:
        return NOTHING
    opcode = word(command, C_OPCODE)
    nbytes = word(command, C_NBYTES)
    staging = staging_of(queue, cid)
    if opcode == KV_STORE:
        copy_bytes(staging, buffer, nbytes)
    else:
        for k in range(nbytes >> 3):
            store_relaxed(staging + 8 * k, -1, SYSTEM)
    word5 = key_value_word5(nbytes, word(command, C_SIZE), word(command, C_OPTIONS))
    word0 = command_word0(opcode, cid, nsid)
    submit_entry(queue, word0, word(command, C_KEY0), staging, word5, 0, word(command, C_KEY1))
    return cid


@device
def settle(queue: int) -> None:
    """Drain the queue, and release an id that was abandoned and has completed (thread)."""
    lane = lane_id()
    drain(queue, 1 << lane, lane, lane)
    completed = take_ready(queue)
    if completed >= 0:
        release_id(queue, completed)


@device
def wait(queue: int, cid: int, limit_ns: int) -> Any:
    """Wait for a completion; return its status with dw0 from bit 16 on, or `TIMED_OUT` (thread)."""
    since = clock_ns()
    attempt = 0
    while True:
        status = poll(queue, cid)
        if status < 0 and clock_ns() - since > limit_ns:
            status = orphan(queue, cid, ORPHAN)
            if status < 0:
                return TIMED_OUT
        if status >= 0:
            return status | (result_of(queue, cid) << 16)
        settle(queue)
        backoff(min(attempt, 24))
        attempt += 1


@device
def request(queue: int, nsid: int, command: int, buffer: int, limit_ns: int) -> Any:
    """Send a command and wait for it; a retrieved value is in `buffer` (thread). Returns what `wait` does."""
    cid = send(queue, nsid, command, buffer)
    if cid < 0:
        return NOTHING
    answer = wait(queue, cid, limit_ns)
    if answer != TIMED_OUT:
        if word(command, C_OPCODE) == KV_RETRIEVE:
            copy_bytes(buffer, staging_of(queue, cid), word(command, C_NBYTES))
        release_id(queue, cid)
    return answer


@kernel
def request_all(
    queues: int, n_queues: int, nsid: int, commands: int, buffers: Any, answers: Any, each: int, limit: int
) -> None:
    """Each thread sends `each` commands, one after the other, through a queue of its own or shared."""
    i = grid(1)
    queue = queues + rem(i, n_queues) * (8 * Q_WORDS)
    for k in range(i * each, min((i + 1) * each, len(answers))):
        buffer = element_address(buffers, (k, 0))
        answers[k] = request(queue, nsid, commands + k * (8 * COMMAND_WORDS), buffer, limit)


def command_row(opcode: int, key: bytes | int, nbytes: int = 0, options: int = 0) -> list[int]:
    """Return the words of a command. A key that is too long for one is cut off, and its size is not."""
    name = key.to_bytes(8, "little", signed=True) if isinstance(key, int) else key
    return [opcode, *key_words(name[:MAX_KEY_BYTES]), len(name), options, nbytes]
