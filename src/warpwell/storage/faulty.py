"""Faulty: a medium that fails on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from ..nvme import READ, UNRECOVERED_READ_ERROR, WRITE, WRITE_FAULT, describe
from ..targets import (
    SYSTEM,
    call_native,
    device,
    div,
    fetch_add,
    load_relaxed,
    memory_for,
    native,
    rem,
    store_relaxed,
)
from ._words import lock, set_word, unlock, word
from .latency import Latency
from .medium import PENDING, Medium, NativeMedium, raw_bytes

START = 0
COMPLETE = 1
INNER = 2
COMMANDS = 3
"""Reads and writes so far, withheld ones when they come to run."""
WRITES = 4
INJECTED = 5
FAIL_EVERY = 6
READS_TO_FAIL = 7
WRITES_TO_FAIL = 8
TORN_EVERY = 9
STATUS = 10
"""Status of injected faults; 0: what fits the opcode."""
SILENT = 11
SILENT_AFTER = 12
"""Commands received after which silence begins; -1: never."""
RECEIVED = 13
LOCK = 14
HEAD = 15
TAIL = 16
ENTRIES = 17
RANGES = 18
"""Number of ranges; they follow as pairs."""
RANGE_LIST = 24
MAX_RANGES = 64

WITHHELD = 16384
ENTRY_BYTES = 40
ALWAYS = 1 << 60


class Faulty(Medium):
    """A medium that fails on purpose, for tests of what stands above it. Closing it closes the medium.

    Parameters
    ----------
    medium : Medium
    delay_us : float
        Microseconds that every command takes longer.
    silent_after : int, optional
        Commands after which it answers no more, until `resume`; further ones wait.
    **faults
        As `configure` takes them.

    Raises
    ------
    ArgumentError
    """

    def __init__(
        self, medium: Medium, *, delay_us: float = 0.0, silent_after: int | None = None, **faults: Any
    ) -> None:
        self.medium = Latency(medium, latency_us=delay_us) if delay_us else medium
        self.nbytes = medium.nbytes
        self.writable = medium.writable
        self.emulated = True
        self.name = f"faulty {medium.name}"
        self.description = f"faulty {self.medium.description}"
        self._block = memory_for("cpu").allocate(8 * (RANGE_LIST + 2 * MAX_RANGES))
        self._entries = memory_for("cpu").allocate(ENTRY_BYTES * WITHHELD)
        self._words = self._block.words
        self._words[ENTRIES] = self._entries.address
        self._words[SILENT_AFTER] = -1 if silent_after is None else silent_after
        self._native: NativeMedium | None = None
        self.configure(**faults)

    def configure(
        self,
        *,
        fail_every: int = 0,
        fail_reads: bool | int = False,
        fail_writes: bool | int = False,
        fail_ranges: Sequence[tuple[int, int]] = (),
        torn_writes: bool | int = False,
        status: int = 0,
    ) -> None:
        """Choose the faults from now on; what is left out does not happen.

        Parameters
        ----------
        fail_every : int
            Every so many commands one fails: the n-th, 2n-th, ...
        fail_reads, fail_writes : bool or int
            All of them, or the next so many.
        fail_ranges : sequence of (int, int)
            Start and stop in bytes, at most 64; commands that touch one fail.
        torn_writes : bool or int
            Each write, or every so many, writes only its first half and then fails.
        status : int
            NVMe status of the faults; 0: unrecovered read error, or write fault.

        Raises
        ------
        ArgumentError
        """
        if len(fail_ranges) > MAX_RANGES:
            raise errors.ArgumentError(f"{len(fail_ranges)} ranges: at most {MAX_RANGES}", name="fail_ranges")
        if not 0 <= status <= 0x7FFF:
            raise errors.ArgumentError(f"status {status:#x}: 15 bits", name="status")
        words = self._words
        words[RANGES] = 0
        for k, (start, stop) in enumerate(fail_ranges):
            words[RANGE_LIST + 2 * k], words[RANGE_LIST + 2 * k + 1] = start, stop
        words[RANGES] = len(fail_ranges)
        words[STATUS] = status
        words[FAIL_EVERY] = fail_every
        words[READS_TO_FAIL] = ALWAYS if fail_reads is True else int(fail_reads)
        words[WRITES_TO_FAIL] = ALWAYS if fail_writes is True else int(fail_writes)
        words[TORN_EVERY] = int(torn_writes)

    def stop(self) -> None:
        """Answer no command any more, those in flight included."""
        self._words[SILENT] = 1

    def resume(self) -> None:
        """Answer again; withheld commands run now. Their buffers must still be there."""
        self._words[SILENT_AFTER] = -1
        self._words[SILENT] = 0

    @property
    def silent(self) -> bool:
        """Whether it withholds its answers."""
        return bool(self._words[SILENT])

    @property
    def withheld(self) -> int:
        """Commands that wait for `resume`."""
        return int(self._words[TAIL] - self._words[HEAD])

    @property
    def commands(self) -> int:
        """Commands received."""
        return int(self._words[RECEIVED])

    @property
    def injected(self) -> int:
        """Faults so far."""
        return int(self._words[INJECTED])

    def native(self) -> NativeMedium | None:
        """Return the native functions."""
        if self._native is None:
            inner = self.medium.native()
            if inner is None:
                return None
            self._words[:3] = (inner.start, inner.complete, inner.state)
            self._native = NativeMedium(faulty_start.address, faulty_complete.address, self._block.address)
        return self._native

    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Return bytes; see `Medium.read`."""
        status = self._fault(READ, offset, nbytes)
        if status:
            raise self._error(status, offset)
        return self.medium.read(offset, nbytes)

    def write(self, offset: int, data: NDArray[Any]) -> None:
        """Write bytes; see `Medium.write`."""
        raw = raw_bytes(data)
        status = self._fault(WRITE, offset, raw.nbytes)
        if status < 0:
            self.medium.write(offset, raw[: raw.nbytes // 1024 * 512])
            status = -status
        if status:
            raise self._error(status, offset)
        self.medium.write(offset, raw)

    def sync(self) -> None:
        """Make everything durable; see `Medium.sync`."""
        self.medium.sync()

    def close(self) -> None:
        """Give everything back; see `Medium.close`."""
        self.medium.close()

    def last_error(self) -> str | None:
        """Return what is known of the last failure."""
        return self.medium.last_error()

    def _fault(self, op: int, offset: int, nbytes: int) -> int:
        """What `fault_of` does, for the host's own reads and writes; minus the status for a torn write."""
        words = self._words
        words[RECEIVED] += 1
        if 0 <= words[SILENT_AFTER] < words[RECEIVED]:
            words[SILENT] = 1
        if words[SILENT]:
            raise errors.StallError(f"{self.name} does not answer: call resume()")
        words[COMMANDS] += 1
        left = READS_TO_FAIL if op == READ else WRITES_TO_FAIL
        hit = bool(words[FAIL_EVERY] > 0 and words[COMMANDS] % words[FAIL_EVERY] == 0)
        if words[left] > 0:
            words[left] -= 1
            hit = True
        for k in range(int(words[RANGES])):
            start, stop = words[RANGE_LIST + 2 * k : RANGE_LIST + 2 * k + 2]
            hit = hit or bool(offset < stop and start < offset + nbytes)
        torn = False
        if op == WRITE and words[TORN_EVERY] > 0 and not hit:
            words[WRITES] += 1
            torn = bool(words[WRITES] % words[TORN_EVERY] == 0)
        if not hit and not torn:
            return 0
        words[INJECTED] += 1
        status = int(words[STATUS]) or (UNRECOVERED_READ_ERROR if op == READ else WRITE_FAULT)
        return -status if torn else status

    def _error(self, status: int, offset: int) -> errors.MediumError:
        return errors.MediumError(
            f"{self.name}: {describe(status)}, on purpose", lba=offset // 512, status=status
        )


@device
def fault_of(state: int, op: int, offset: int, nbytes: int) -> int:
    """Decide over a command: 0, a status, or -1 for a torn write."""
    if op != READ and op != WRITE:
        return 0
    number = fetch_add(state + 8 * COMMANDS, 1, SYSTEM) + 1
    every = word(state, FAIL_EVERY)
    hit = every > 0 and rem(number, max(every, 1)) == 0
    left = WRITES_TO_FAIL
    if op == READ:
        left = READS_TO_FAIL
    if word(state, left) > 0 and fetch_add(state + 8 * left, -1, SYSTEM) > 0:
        hit = True
    for k in range(word(state, RANGES)):
        start = word(state, RANGE_LIST + 2 * k)
        stop = word(state, RANGE_LIST + 2 * k + 1)
        if offset < stop and start < offset + nbytes:
            hit = True
    if hit:
        return injected(state, op)
    torn = word(state, TORN_EVERY)
    if op == WRITE and torn > 0 and rem(fetch_add(state + 8 * WRITES, 1, SYSTEM) + 1, max(torn, 1)) == 0:
        return -1
    return 0


@device
def injected(state: int, op: int) -> int:
    """Count a fault and return its status."""
    fetch_add(state + 8 * INJECTED, 1, SYSTEM)
    status = word(state, STATUS)
    if status == 0:
        status = WRITE_FAULT
        if op == READ:
            status = UNRECOVERED_READ_ERROR
    return status


@device
def attempt(state: int, op: int, offset: int, nbytes: int, buffer: int, tag: int) -> int:
    """Run a command, well or not."""
    fault = fault_of(state, op, offset, nbytes)
    if fault > 0:
        return fault
    size = nbytes
    torn = 0
    if fault < 0:
        size = div(nbytes, 1024) * 512
        torn = 1
    # the inner tag remembers that the answer will be an error
    status = call_native(word(state, START), word(state, INNER), op, offset, size, buffer, (tag << 1) | torn)
    if torn == 1 and status != PENDING:
        return injected(state, WRITE)
    return status


@native
def faulty_start(state: int, op: int, offset: int, nbytes: int, buffer: int, tag: int) -> int:
    """Run a command, or withhold it while silent."""
    number = fetch_add(state + 8 * RECEIVED, 1, SYSTEM)
    after = word(state, SILENT_AFTER)
    if after >= 0 and number >= after:
        set_word(state, SILENT, 1)
    if word(state, SILENT) == 0:
        return attempt(state, op, offset, nbytes, buffer, tag)
    lock(state + 8 * LOCK)
    tail = word(state, TAIL)
    if tail - word(state, HEAD) < WITHHELD:  # else it is lost for good, which is as silent
        entry = word(state, ENTRIES) + ENTRY_BYTES * (tail & (WITHHELD - 1))
        store_relaxed(entry, op, SYSTEM)
        store_relaxed(entry + 8, offset, SYSTEM)
        store_relaxed(entry + 16, nbytes, SYSTEM)
        store_relaxed(entry + 24, buffer, SYSTEM)
        store_relaxed(entry + 32, tag, SYSTEM)
        set_word(state, TAIL, tail + 1)
    unlock(state + 8 * LOCK)
    return PENDING


@native
def faulty_complete(state: int, a: int, b: int, c: int, d: int, e: int) -> int:
    """Nothing while silent; else run what was withheld, then ask the inner medium."""
    if word(state, SILENT) != 0:
        return -1
    while word(state, HEAD) != word(state, TAIL):
        lock(state + 8 * LOCK)
        head = word(state, HEAD)
        if head == word(state, TAIL):
            unlock(state + 8 * LOCK)
            break
        entry = word(state, ENTRIES) + ENTRY_BYTES * (head & (WITHHELD - 1))
        op = load_relaxed(entry, SYSTEM)
        offset = load_relaxed(entry + 8, SYSTEM)
        nbytes = load_relaxed(entry + 16, SYSTEM)
        buffer = load_relaxed(entry + 24, SYSTEM)
        tag = load_relaxed(entry + 32, SYSTEM)
        set_word(state, HEAD, head + 1)
        unlock(state + 8 * LOCK)
        status = attempt(state, op, offset, nbytes, buffer, tag)
        if status != PENDING:
            return (tag << 16) | status
    function = word(state, COMPLETE)
    if function == 0:
        return -1
    got = call_native(function, word(state, INNER), 0, 0, 0, 0, 0)
    if got < 0:
        return -1
    status = got & 0xFFFF
    if (got >> 16) & 1 == 1:
        status = injected(state, WRITE)
    return ((got >> 17) << 16) | status
