"""`StagedReads`: long reads into host memory that the host submits to a controller, alongside the commands of kernels.

Each is a command in separate queue pairs with a small weight (`Controller.add_pairs`), so that a page that a kernel
waits for is served between two of them. Rows of a table describe the reads; rows belong to slots, and a slot is done
when all of its rows are. One thread at a time submits, drains and waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .._os import clock
from ..nvme import READ, command_word0, command_word6
from ..queues import QueuePairs, drain, field, id_record, release_id, state_word, submit, take_id, take_ready
from ..queues.layout import ASYNC, I8, ID_COUNT, ID_OPCODE, ID_PAGE, ID_STATUS, Q_WORDS
from ..targets import device, kernel, memory_for, native
from ..targets.primitives import (
    DEVICE,
    backoff,
    clock_ns,
    load_relaxed,
    load_weak_as,
    rem,
    store_relaxed,
    store_release,
)
from .controller import Controller

DEPTH = 32
"""Entries of each ring; half as many commands are in flight, and wait for one service thread."""
SLICE_NS = 50 * 10**6
"""Longest wait in native code, in nanoseconds; between two waits, Python checks for interrupts."""

# -- row: a read --------------------------------------------------------------------------------------------------
W_BLOCK = 0
"""First block; after the read, its status: `UNANSWERED`, 0, or the status field of its completion."""
W_BLOCKS = 1
W_BUFFER = 2
W_STATUS = 3
ROW_WORDS = 4
UNANSWERED = -1

# -- slot ---------------------------------------------------------------------------------------------------------
S_ROWS = 0
"""Rows of the slot."""
S_NEXT = 1
"""Number of submitted rows."""
S_LEFT = 2
"""Number of rows that are not done."""
S_NSID = 3
S_FIRST = 4
"""Address of its first row."""
SLOT_WORDS = 8

SUBMIT_FAILED = 0x7FFF
"""Status of a row whose queue made no progress."""


class StagedReads:
    """Reads of byte ranges of a controller's namespaces into host memory.

    Parameters
    ----------
    controller : Controller
    slots : int
        Number of batches of reads in flight at a time.
    rows : int
        Maximum number of reads of a slot.
    """

    def __init__(self, controller: Controller, *, slots: int, rows: int) -> None:
        self.controller = controller
        self.rows = rows
        interpreted = controller.interpreted
        memory = memory_for("interp" if interpreted else "cpu")
        self.pairs = QueuePairs(memory, count=1 if interpreted else controller.threads, depth=DEPTH, staging_bytes=0)
        self._block = memory.allocate(8 * slots * (SLOT_WORDS + ROW_WORDS * rows))
        self._slots = self._block.words[: slots * SLOT_WORDS].reshape(slots, SLOT_WORDS)
        tables = self._block.words[slots * SLOT_WORDS : slots * (SLOT_WORDS + ROW_WORDS * rows)]
        self._tables = tables.reshape(slots, rows, ROW_WORDS)
        for k in range(slots):
            self._slots[k, S_FIRST] = self._block.address + 8 * (slots * SLOT_WORDS + k * ROW_WORDS * rows)
        controller.add_pairs(self.pairs)

    def start(self, slot: int, nsid: int, blocks: NDArray[np.int64], counts: Any, buffers: NDArray[np.int64]) -> None:
        """Start reads in an idle slot: ``counts[k]`` blocks of 512 bytes from ``blocks[k]`` to ``buffers[k]``."""
        n = len(blocks)
        if self._slots[slot, S_LEFT] or n > self.rows:
            raise errors.ArgumentError(f"slot {slot} has {self._slots[slot, S_LEFT]} reads in flight, got {n} more")
        table = self._tables[slot, :n]
        table[:, W_BLOCK], table[:, W_BLOCKS], table[:, W_BUFFER] = blocks, counts, buffers
        table[:, W_STATUS] = UNANSWERED
        self._slots[slot, :S_FIRST] = n, 0, n, nsid
        self._advance(slot, 0)

    def wait(self, slot: int, seconds: float, stopped: Callable[[], bool]) -> bool:
        """Wait until a slot is done; return False if no read completes for `seconds`, or if `stopped` returns True."""
        left = int(self._slots[:, S_LEFT].sum())
        last_change = clock.monotonic()
        while self._slots[slot, S_LEFT]:
            self._advance(slot, SLICE_NS)
            now = int(self._slots[:, S_LEFT].sum())
            if now != left:
                left, last_change = now, clock.monotonic()
            if clock.monotonic() - last_change > seconds or stopped() or self.pairs.loss() is not None:
                return False
        return True

    def statuses(self, slot: int) -> NDArray[np.int64]:
        """Return the NVMe status of each read of a slot: 0 for success."""
        return self._tables[slot, : self._slots[slot, S_ROWS], W_STATUS].copy()

    def cancel(self) -> None:
        """Submit no more reads; wait for those in flight (`left`)."""
        for slot, table in zip(self._slots, self._tables, strict=True):
            table[slot[S_NEXT] : slot[S_ROWS], W_STATUS] = SUBMIT_FAILED
            slot[S_LEFT] -= slot[S_ROWS] - slot[S_NEXT]
            slot[S_NEXT] = slot[S_ROWS]

    def left(self) -> int:
        """Return how many reads are not done."""
        if self._slots[:, S_LEFT].any():
            self._advance(0, 0)
        return int(self._slots[:, S_LEFT].sum())

    def _advance(self, slot: int, nanoseconds: int) -> None:
        words = (self.pairs.records, self.pairs.count, self._block.address, len(self._slots), slot, nanoseconds)
        if self.controller.interpreted:
            _advance_interpreted[1](*words, device="interp", services=self.controller.services())
        else:
            _advance_compiled(*words)


@kernel
def _advance_interpreted(queues, count, slots, n_slots, slot, nanoseconds):
    advance(queues, count, slots, n_slots, slot, nanoseconds)


@device
def advance(queues, count, slots, n_slots, slot, nanoseconds):
    """Submit waiting reads of all slots and take completions, until a slot is done or the timeout is over (thread)."""
    awaited = slots + slot * (8 * SLOT_WORDS)
    since = clock_ns()
    attempt = 0
    while True:
        work = 0
        for k in range(n_slots):
            # the order of queues does not matter: each service thread serves its own queue in order
            work += submit_rows(queues, count, slots + k * (8 * SLOT_WORDS))
        for k in range(count):
            work += take_rows(queues + k * (8 * Q_WORDS))
        if load_relaxed(awaited + 8 * S_LEFT, DEVICE) == 0 or clock_ns() - since > nanoseconds:
            return 0
        if work == 0:
            backoff(min(attempt, 16))
            attempt += 1
        else:
            attempt = 0


_advance_compiled = native(advance)


@device
def submit_rows(queues, count, slot):
    """Submit rows of a slot while there are free ids; return how many (thread)."""
    rows = load_relaxed(slot + 8 * S_ROWS, DEVICE)
    following = load_relaxed(slot + 8 * S_NEXT, DEVICE)
    done = 0
    full = 0
    turn = following
    while following < rows and full < count:
        queue = queues + rem(turn, count) * (8 * Q_WORDS)
        turn += 1
        cid = take_id(queue, 0)
        if cid < 0:
            full += 1
            continue
        full = 0
        row = field(slot, S_FIRST) + following * (8 * ROW_WORDS)
        record = id_record(queue, cid)
        store_relaxed(record + 8 * ID_PAGE, row, DEVICE)
        store_relaxed(record + 8 * ID_COUNT, slot, DEVICE)
        store_relaxed(record + 8 * ID_OPCODE, READ, DEVICE)
        store_release(record, state_word(queue, cid, ASYNC), DEVICE)
        word0 = command_word0(READ, cid, load_relaxed(slot + 8 * S_NSID, DEVICE))
        control = command_word6(load_weak_as(row + 8 * W_BLOCKS, I8) - 1, 0)
        buffer = load_weak_as(row + 8 * W_BUFFER, I8)
        if not submit(queue, word0, buffer, 0, load_weak_as(row + 8 * W_BLOCK, I8), control):
            finish_row(queue, cid, SUBMIT_FAILED)
        following += 1
        store_relaxed(slot + 8 * S_NEXT, following, DEVICE)
        done += 1
    return done


@device
def take_rows(queue):
    """Take the completions of a queue; return how many (thread)."""
    drain(queue, 1, 0, 0)
    done = 0
    cid = take_ready(queue)
    while cid >= 0:
        finish_row(queue, cid, load_relaxed(id_record(queue, cid) + 8 * ID_STATUS, DEVICE))
        done += 1
        cid = take_ready(queue)
    return done


@device
def finish_row(queue, cid, status):
    """Record the status of a read and release its id (thread)."""
    record = id_record(queue, cid)
    row = load_relaxed(record + 8 * ID_PAGE, DEVICE)
    slot = load_relaxed(record + 8 * ID_COUNT, DEVICE)
    store_relaxed(row + 8 * W_STATUS, status, DEVICE)
    store_relaxed(slot + 8 * S_LEFT, load_relaxed(slot + 8 * S_LEFT, DEVICE) - 1, DEVICE)
    release_id(queue, cid)
