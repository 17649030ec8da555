"""Faulty and KeyValueFaulty: a medium, or native functions for keys and values, that fail on purpose.

Both have the same native functions. Later events (commands that arrived during a silence, late commands, second
completions) wait in one queue, ordered by time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpwell import errors
from warpwell.nvme import KV_UNRECOVERED_ERROR, READ, UNRECOVERED_READ_ERROR, WRITE, WRITE_FAULT, describe, word0_opc
from warpwell.storage import PENDING, Medium, NativeMedium, decode_command, raw_bytes, set_word, word, write_answer
from warpwell.storage.commands import (
    A_STATUS,
    A_TAG,
    C_WORD0,
    COMMAND_BYTES,
    COMMAND_WORDS,
    call_complete,
    call_start,
    encode_command,
    lock,
    unlock,
)
from warpwell.targets import device, memory_for, native
from warpwell.targets.primitives import SYSTEM, clock_ns, div, fetch_add, rem, scratch

from .latency import Latency
from .wrapper import Wrapper

START = 0
COMPLETE = 1
INNER = 2
RECEIVED = 5
SILENT = 6
SILENT_AFTER = 7
"""Commands received after which silence begins; -1: never."""
LOCK = 8
HEAD = 9
TAIL = 10
ENTRIES = 11
LATE_NS = 12
STATUS = 13
"""Status of injected faults; 0: the default of the opcode."""
INJECTED = 14

# -- faults of blocks ----------------------------------------------------------------------------------------
COMMANDS = 16
"""Number of executed reads and writes; withheld commands count when they run."""
WRITES = 17
FAIL_EVERY = 18
READS_TO_FAIL = 19
WRITES_TO_FAIL = 20
TORN_EVERY = 21
RANGES = 22
"""Number of ranges; they follow as pairs."""
RANGE_LIST = 32
MAX_RANGES = 64

# -- schedule, of keys and values ------------------------------------------------------------------------------
STEP = 24
"""Commands since the schedule began."""
LENGTH = 25
"""Steps of the schedule; 0: no faults."""
REPEAT = 26
COUNTS = 27
"""Number of commands for each kind of step."""
STEPS = RANGE_LIST + 2 * MAX_RANGES
MAX_STEPS = 4096

KIND_OK = 0
KIND_ERROR = 1
KIND_LATE = 2
KIND_LOST = 3
KINDS = ("ok", "error", "late", "lost")

MAX_WAITING = 16384
"""Entries of the queue of postponed commands."""
E_DUE = 0
E_TAG = 1
E_COMMAND = 2
ENTRY_WORDS = E_COMMAND + COMMAND_WORDS

ALWAYS = 1 << 60


class _FaultState:
    """Host side of the native functions of both classes."""

    def __init__(self, *, silent_after: int | None = None) -> None:
        self._block = memory_for("cpu").allocate(8 * (STEPS + MAX_STEPS))
        self._entries = memory_for("cpu").allocate(8 * ENTRY_WORDS * MAX_WAITING)
        self._state_words = self._block.words
        self._state_words[ENTRIES] = self._entries.address
        self._state_words[SILENT_AFTER] = -1 if silent_after is None else silent_after

    def _over(self, inner: NativeMedium) -> NativeMedium:
        """Return native functions that call those of `inner`."""
        self._state_words[:3] = (inner.start, inner.complete, inner.state)
        owner = (self._block, self._entries, inner)
        return NativeMedium(faulty_start.address, faulty_complete.address, self._block.address, owner)

    def stop(self) -> None:
        """Stop answering commands, including those in flight."""
        self._state_words[SILENT] = 1

    def resume(self) -> None:
        """Answer again; commands that arrived in the meantime run now. Their buffers must still exist."""
        self._state_words[SILENT_AFTER] = -1
        self._state_words[SILENT] = 0

    @property
    def silent(self) -> bool:
        """Whether answers are withheld."""
        return bool(self._state_words[SILENT])

    @property
    def waiting(self) -> int:
        """Number of late commands and second completions, and of commands that wait for `resume`."""
        return int(self._state_words[TAIL] - self._state_words[HEAD])

    @property
    def commands(self) -> int:
        """Commands received."""
        return int(self._state_words[RECEIVED])

    @property
    def injected(self) -> int:
        """Errors injected so far."""
        return int(self._state_words[INJECTED])


class Faulty(_FaultState, Wrapper):
    """A medium that fails on purpose, for tests of the code above it. Closing it closes the medium.

    Parameters
    ----------
    medium : Medium
    delay_us : float
        Microseconds by which every command is delayed.
    silent_after : int, optional
        Number of commands after which the medium stops answering, until `resume`; further commands wait.
    **faults
        As for `configure`.

    Raises
    ------
    ArgumentError
    """

    def __init__(
        self, medium: Medium, *, delay_us: float = 0.0, silent_after: int | None = None, **faults: Any
    ) -> None:
        Wrapper.__init__(self, Latency(medium, latency_us=delay_us) if delay_us else medium)
        _FaultState.__init__(self, silent_after=silent_after)
        self.name = f"faulty {medium.name}"
        self.description = f"faulty {self.medium.description}"
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
        """Set the faults of later commands; omitted faults do not happen.

        Parameters
        ----------
        fail_every : int
            Every n-th command fails: the n-th, 2n-th, ...
        fail_reads, fail_writes : bool or int
            True: all fail. A number N: the next N fail.
        fail_ranges : sequence of (int, int)
            Start and stop in bytes, at most 64; commands that overlap a range fail.
        torn_writes : bool or int
            True or 1: each write writes only its first half and then fails. A number N: every N-th write.
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
        state_words = self._state_words
        state_words[RANGES] = 0
        for k, (start, stop) in enumerate(fail_ranges):
            state_words[RANGE_LIST + 2 * k], state_words[RANGE_LIST + 2 * k + 1] = start, stop
        state_words[RANGES] = len(fail_ranges)
        state_words[STATUS] = status
        state_words[FAIL_EVERY] = fail_every
        state_words[READS_TO_FAIL] = ALWAYS if fail_reads is True else int(fail_reads)
        state_words[WRITES_TO_FAIL] = ALWAYS if fail_writes is True else int(fail_writes)
        state_words[TORN_EVERY] = int(torn_writes)

    @property
    def withheld(self) -> int:
        """Commands that wait for `resume`."""
        return self.waiting

    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Return bytes, or raise an injected fault."""
        status = self._fault(READ, offset, nbytes)
        if status:
            raise self._error(status, offset)
        return self.medium.read(offset, nbytes)

    def write(self, offset: int, data: NDArray[Any]) -> None:
        """Write bytes; or, for an injected fault, write half of them or none, and raise."""
        raw = raw_bytes(data)
        status = self._fault(WRITE, offset, raw.nbytes)
        if status < 0:
            self.medium.write(offset, raw[: raw.nbytes // 1024 * 512])
            status = -1 - status
        if status:
            raise self._error(status, offset)
        self.medium.write(offset, raw)

    def _fault(self, op: int, offset: int, nbytes: int) -> int:
        """Return the fault of a host's command, as for a command of a queue; -1 minus the status for a torn write."""
        fault = faulty_decide(self._block.address, op, offset, nbytes)
        if fault == PENDING:
            raise errors.StallError(f"{self.name} does not answer: call resume()")
        return fault

    def _error(self, status: int, offset: int) -> errors.MediumError:
        return errors.MediumError(f"{self.name}: {describe(status)}, on purpose", lba=offset // 512, status=status)


class KeyValueFaulty(_FaultState):
    """Key-value functions that fail on purpose, for tests of the code above them.

    Parameters
    ----------
    functions : NativeMedium
        For `Controller.attach_kv`.
    schedule : sequence of str
        The fate of each command, in order: "ok", "error" (an error status, no value moves), "late" (the value moves and
        the completion follows after `late_us`), or "lost" (there is no completion).
    repeat : bool
        Start the schedule again at its end; otherwise later commands succeed.
    late_us : float
        Microseconds.
    status : int
        NVMe status of errors.

    Raises
    ------
    ArgumentError
    """

    def __init__(
        self,
        functions: NativeMedium,
        schedule: Sequence[str] = (),
        *,
        repeat: bool = True,
        late_us: float = 1000.0,
        status: int = KV_UNRECOVERED_ERROR,
    ) -> None:
        super().__init__()
        self._native = self._over(functions)
        self.configure(schedule, repeat=repeat, late_us=late_us, status=status)

    def configure(
        self,
        schedule: Sequence[str],
        *,
        repeat: bool = True,
        late_us: float = 1000.0,
        status: int = KV_UNRECOVERED_ERROR,
    ) -> None:
        """Start another schedule with the next command; see the class for the parameters."""
        unknown = sorted(set(schedule) - set(KINDS))
        if unknown or len(schedule) > MAX_STEPS:
            raise errors.ArgumentError(
                f"a schedule of {len(schedule)} steps with {unknown}: at most {MAX_STEPS}, each one of {KINDS}",
                name="schedule",
            )
        if not 0 < status <= 0x7FFF or not 0 <= late_us < 1e12:
            raise errors.ArgumentError(f"status {status:#x} has 15 bits, late_us {late_us} is 0 or more")
        state_words = self._state_words
        state_words[LENGTH] = 0
        state_words[STEP] = 0
        state_words[STATUS], state_words[LATE_NS], state_words[REPEAT] = status, int(late_us * 1000), repeat
        state_words[STEPS : STEPS + len(schedule)] = [KINDS.index(kind) for kind in schedule]
        state_words[LENGTH] = len(schedule)

    @property
    def counts(self) -> dict[str, int]:
        """Number of commands for each kind of step."""
        return {kind: int(self._state_words[COUNTS + k]) for k, kind in enumerate(KINDS)}

    def native(self) -> NativeMedium:
        """Return the native functions."""
        return self._native


@device
def fault_of(state: int, op: int, offset: int, nbytes: int) -> int:
    """Return the fault of a command: 0 (none), a status, or -1 for a torn write."""
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
def step_of(state: int) -> int:
    """Return the step of the schedule for the next command."""
    number = fetch_add(state + 8 * STEP, 1, SYSTEM)
    length = word(state, LENGTH)
    kind = KIND_OK
    if length > 0 and (word(state, REPEAT) != 0 or number < length):
        kind = word(state, STEPS + rem(number, max(length, 1)))
    fetch_add(state + 8 * (COUNTS + kind), 1, SYSTEM)
    return kind


@device
def postpone(state: int, command: int, tag: int) -> None:
    """Queue a command for later; drop it if the queue is full."""
    lock(state + 8 * LOCK)
    # Times are taken under the lock, so that they rise along the queue. Without a delay no time is taken, because the
    # interpreter's clock starts at 0 in each launch.
    due = word(state, LATE_NS)
    if due > 0:
        due += clock_ns()
    at = word(state, TAIL)
    if at - word(state, HEAD) < MAX_WAITING:
        entry = entry_of(state, at)
        set_word(entry, E_DUE, due)
        set_word(entry, E_TAG, tag)
        copy_command(entry + 8 * E_COMMAND, command)
        set_word(state, TAIL, at + 1)
    unlock(state + 8 * LOCK)


@device
def entry_of(state: int, position: int) -> int:
    """Return the address of an entry."""
    return word(state, ENTRIES) + 8 * ENTRY_WORDS * (position & (MAX_WAITING - 1))


@device
def copy_command(target: int, command: int) -> None:
    """Copy the words of a command."""
    for k in range(COMMAND_WORDS):
        set_word(target, k, word(command, k))


@device
def attempt(state: int, command: int, tag: int) -> int:
    """Run a command with the injected faults of blocks; the lowest bit of the inner tag is 1 for a torn write."""
    op, offset, nbytes, buffer = decode_command(command)
    fault = fault_of(state, op, offset, nbytes)
    if fault > 0:
        return fault
    if fault == 0:
        return call_start(word(state, START), word(state, INNER), command, tag << 1)
    size = div(nbytes, 1024) * 512
    if size > 0:
        part = scratch(COMMAND_BYTES)
        encode_command(part, op, offset, size, buffer)
        if call_start(word(state, START), word(state, INNER), part, (tag << 1) | 1) == PENDING:
            return PENDING
    return injected(state, WRITE)


@device
def receive(state: int) -> bool:
    """Count a command; return True if its answer is withheld."""
    number = fetch_add(state + 8 * RECEIVED, 1, SYSTEM)
    after = word(state, SILENT_AFTER)
    if after >= 0 and number >= after:
        set_word(state, SILENT, 1)
    return word(state, SILENT) != 0


@native
def faulty_decide(state: int, op: int, offset: int, nbytes: int) -> int:
    """Return the fault of a host's command: 0, a status, -1 minus the status (torn write), or PENDING while silent."""
    if receive(state):
        return PENDING
    fault = fault_of(state, op, offset, nbytes)
    if fault < 0:
        return -1 - injected(state, op)
    return fault


@native
def faulty_start(state: int, command: int, tag: int) -> int:
    """Run a command with its injected fault, or postpone it while silent."""
    silent = receive(state)
    kind = step_of(state)
    if kind == KIND_LOST:
        return PENDING
    if kind == KIND_LATE or silent:
        postpone(state, command, tag)
        return PENDING
    if kind == KIND_ERROR:
        return injected(state, word0_opc(word(command, C_WORD0)))
    return attempt(state, command, tag)


@native
def faulty_complete(state: int, out: int) -> bool:
    """Answer a postponed command that is due, or a command of the inner functions; no command while silent."""
    if word(state, SILENT) != 0:
        return False
    command = scratch(COMMAND_BYTES)
    while word(state, HEAD) != word(state, TAIL):
        lock(state + 8 * LOCK)
        head = word(state, HEAD)
        entry = entry_of(state, head)
        if head == word(state, TAIL) or word(entry, E_DUE) > clock_ns():
            unlock(state + 8 * LOCK)
            break
        tag = word(entry, E_TAG)
        copy_command(command, entry + 8 * E_COMMAND)
        set_word(state, HEAD, head + 1)
        unlock(state + 8 * LOCK)
        answer = attempt(state, command, tag)
        if answer != PENDING:
            return write_answer(out, tag, answer & 0xFFFF, answer >> 16)
    function = word(state, COMPLETE)
    if function == 0 or not call_complete(function, word(state, INNER), out):
        return False
    tag = word(out, A_TAG)
    set_word(out, A_TAG, tag >> 1)
    if tag & 1 == 1:
        set_word(out, A_STATUS, injected(state, WRITE))
    return True
