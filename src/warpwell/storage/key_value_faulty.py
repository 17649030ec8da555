"""KeyValueFaulty: native functions for keys and values that fail on purpose."""

from __future__ import annotations

from collections.abc import Sequence

from .. import errors
from ..nvme import KV_UNRECOVERED_ERROR
from ..targets import (
    SYSTEM,
    call_native,
    clock_ns,
    device,
    fetch_add,
    load_relaxed,
    memory_for,
    native,
    rem,
    store_relaxed,
)
from ._results import keep_result, results_table, take_result
from ._words import lock, set_word, unlock, word
from .medium import PENDING, NativeMedium

START = 0
COMPLETE = 1
INNER = 2
RESULTS = 3
COMMANDS = 4
STATUS = 5
LATE_NS = 6
SILENT = 7
LOCK = 8
HEAD = 9
TAIL = 10
ENTRIES = 11
LENGTH = 12
"""Steps of the schedule; 0: no faults."""
REPEAT = 13
COUNTS = 16
"""Commands that met each kind of step."""
STEPS = 24
MAX_STEPS = 4096

WELL = 0
ERROR = 1
LATE = 2
LOST = 3
DUPLICATE = 4
KINDS = ("ok", "error", "late", "lost", "duplicate")

WAITING = 16384
"""Entries of what comes later, in order of time."""
ENTRY_BYTES = 64
E_DUE = 0
E_KIND = 1
E_OP = 2
E_KEY0 = 3
E_KEY1 = 4
E_BUFFER = 5
E_TAIL = 6
E_ANSWER = 7


class KeyValueFaulty:
    """Key-value functions that fail on purpose, for tests of what stands above them.

    Parameters
    ----------
    functions : NativeMedium
        For `Controller.attach_kv`. None of its commands may be pending where a step is "duplicate".
    schedule : sequence of str
        What happens to each command in order: "ok", "error" (a status, nothing moves), "late" (the value moves
        and the completion comes after `late_us`), "lost" (nothing ever happens), or "duplicate" (a second
        completion after `late_us`).
    repeat : bool
        Start the schedule again at its end; otherwise further commands are well.
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
        self._block = memory_for("cpu").allocate(8 * (STEPS + MAX_STEPS))
        self._entries, self._results = memory_for("cpu").allocate(ENTRY_BYTES * WAITING), results_table()
        self._words = self._block.words
        self._words[:4] = (functions.start, functions.complete, functions.state, self._results.address)
        self._words[ENTRIES] = self._entries.address
        self._functions = functions
        self.configure(schedule, repeat=repeat, late_us=late_us, status=status)

    def configure(
        self,
        schedule: Sequence[str],
        *,
        repeat: bool = True,
        late_us: float = 1000.0,
        status: int = KV_UNRECOVERED_ERROR,
    ) -> None:
        """Start another schedule with the next command; parameters as of the class."""
        unknown = sorted(set(schedule) - set(KINDS))
        if unknown or len(schedule) > MAX_STEPS:
            raise errors.ArgumentError(
                f"a schedule of {len(schedule)} steps with {unknown}: at most {MAX_STEPS}, each one of {KINDS}",
                name="schedule",
            )
        if not 0 < status <= 0x7FFF or not 0 <= late_us < 1e12:
            raise errors.ArgumentError(f"status {status:#x} has 15 bits, late_us {late_us} is 0 or more")
        words = self._words
        words[LENGTH] = 0
        words[COMMANDS] = 0
        words[STATUS], words[LATE_NS], words[REPEAT] = status, int(late_us * 1000), repeat
        words[STEPS : STEPS + len(schedule)] = [KINDS.index(kind) for kind in schedule]
        words[LENGTH] = len(schedule)

    def stop(self) -> None:
        """Answer no command any more, those in flight included."""
        self._words[SILENT] = 1

    def resume(self) -> None:
        """Answer again; commands that came meanwhile run now. Their buffers must still be there."""
        self._words[SILENT] = 0

    @property
    def counts(self) -> dict[str, int]:
        """Commands that met each kind of step."""
        return {kind: int(self._words[COUNTS + k]) for k, kind in enumerate(KINDS)}

    @property
    def waiting(self) -> int:
        """Late commands and duplicates that are still to come."""
        return int(self._words[TAIL] - self._words[HEAD])

    def native(self) -> NativeMedium:
        """Return the native functions."""
        return NativeMedium(faulty_start.address, faulty_complete.address, self._block.address, self)


@device
def step_of(state: int) -> int:
    """Return what happens to the next command."""
    number = fetch_add(state + 8 * COMMANDS, 1, SYSTEM)
    length = word(state, LENGTH)
    kind = WELL
    if length > 0 and (word(state, REPEAT) != 0 or number < length):
        kind = word(state, STEPS + rem(number, max(length, 1)))
    fetch_add(state + 8 * (COUNTS + kind), 1, SYSTEM)
    return kind


@device
def put_off(state: int, kind: int, op: int, key0: int, key1: int, buffer: int, tail: int, answer: int) -> None:
    """Queue what comes later; with a full queue it never comes."""
    lock(state + 8 * LOCK)
    # under the lock, so that times rise along the queue
    due = clock_ns() + word(state, LATE_NS)
    at = word(state, TAIL)
    if at - word(state, HEAD) < WAITING:
        entry = word(state, ENTRIES) + ENTRY_BYTES * (at & (WAITING - 1))
        store_relaxed(entry + 8 * E_DUE, due, SYSTEM)
        store_relaxed(entry + 8 * E_KIND, kind, SYSTEM)
        store_relaxed(entry + 8 * E_OP, op, SYSTEM)
        store_relaxed(entry + 8 * E_KEY0, key0, SYSTEM)
        store_relaxed(entry + 8 * E_KEY1, key1, SYSTEM)
        store_relaxed(entry + 8 * E_BUFFER, buffer, SYSTEM)
        store_relaxed(entry + 8 * E_TAIL, tail, SYSTEM)
        store_relaxed(entry + 8 * E_ANSWER, answer, SYSTEM)
        set_word(state, TAIL, at + 1)
    unlock(state + 8 * LOCK)


@native
def faulty_start(state: int, op: int, key0: int, key1: int, buffer: int, tail: int) -> int:
    """Run a command as the schedule has it."""
    kind = step_of(state)
    if kind == LOST:
        return PENDING
    if kind == LATE or word(state, SILENT) != 0:
        put_off(state, LATE, op, key0, key1, buffer, tail, 0)
        return PENDING
    if kind == ERROR:
        return word(state, STATUS)
    answer = call_native(word(state, START), word(state, INNER), op, key0, key1, buffer, tail)
    if kind == DUPLICATE and answer != PENDING:
        put_off(state, DUPLICATE, op, key0, key1, buffer, tail, answer)
    return answer


@native
def faulty_complete(state: int, a: int, b: int, c: int, d: int, e: int) -> int:
    """Nothing while silent; else what was put off and is due, then what the inner functions have."""
    function = word(state, COMPLETE)
    if a == 1:
        result = take_result(word(state, RESULTS), b)
        if result == 0 and function != 0:
            result = call_native(function, word(state, INNER), 1, b, 0, 0, 0)
        return result
    if word(state, SILENT) != 0:
        return -1
    while word(state, HEAD) != word(state, TAIL):
        lock(state + 8 * LOCK)
        head = word(state, HEAD)
        entry = word(state, ENTRIES) + ENTRY_BYTES * (head & (WAITING - 1))
        if head == word(state, TAIL) or load_relaxed(entry + 8 * E_DUE, SYSTEM) > clock_ns():
            unlock(state + 8 * LOCK)
            break
        kind = load_relaxed(entry + 8 * E_KIND, SYSTEM)
        op = load_relaxed(entry + 8 * E_OP, SYSTEM)
        key0 = load_relaxed(entry + 8 * E_KEY0, SYSTEM)
        key1 = load_relaxed(entry + 8 * E_KEY1, SYSTEM)
        buffer = load_relaxed(entry + 8 * E_BUFFER, SYSTEM)
        tail = load_relaxed(entry + 8 * E_TAIL, SYSTEM)
        answer = load_relaxed(entry + 8 * E_ANSWER, SYSTEM)
        set_word(state, HEAD, head + 1)
        unlock(state + 8 * LOCK)
        if kind == LATE:
            answer = call_native(word(state, START), word(state, INNER), op, key0, key1, buffer, tail)
        if answer != PENDING:
            keep_result(word(state, RESULTS), tail >> 32, answer >> 16)
            return ((tail >> 32) << 16) | (answer & 0xFFFF)
    if function == 0:
        return -1
    return call_native(function, word(state, INNER), 0, 0, 0, 0, 0)
