"""KeyValueLatency: an emulated drive over native functions for keys and values."""

from __future__ import annotations

from ..nvme import COMMAND_INTERRUPTED, FLUSH, KV_DELETE, KV_RETRIEVE, KV_STORE
from ..targets import call_native, clock_ns, device, memory_for, native
from ._results import keep_result, results_table, take_result
from ._words import (
    R_EXTRA,
    R_NBYTES,
    R_OP,
    R_STATUS,
    R_TAG,
    SlotTable,
    record_of,
    release_slot,
    set_word,
    take_slot,
    word,
)
from .latency import (
    COMPLETE,
    INNER,
    L_DUE,
    READS,
    START,
    STATE_WORDS,
    TABLE,
    WRITES,
    admit,
    later,
    limits_of,
    pop_due,
)
from .medium import PENDING, NativeMedium

RESULTS = STATE_WORDS
UNIT = 512
"""Bytes of a step in which a retrieve may begin within the value."""
R_RESULT = R_STATUS
"""Result of a command that is done and waits for its time."""


class KeyValueLatency:
    """An emulated drive: key-value commands complete when a drive with these limits would have them done.

    The value moves when a command starts. Retrieve, list and exist count as reads; a command's bytes are
    those of the value that moved. Otherwise as `Latency`, whose limits these are.

    Parameters
    ----------
    functions : NativeMedium
        For `Controller.attach_kv`.
    preset : str, optional
        "P5800X", "PM1735" or "980Pro" (`warpwell.storage.presets`). The options below replace its values.
    read_iops, write_iops : float or tuple of float, optional
        Commands a second; two numbers for values under 4096 bytes and others. No limit where left out.
    bandwidth : float, optional
        Bytes a second, reads and writes together. No limit where left out.
    latency_us : float or tuple of float, optional
        Microseconds; two numbers for reads and for writes. 0 where left out.

    Raises
    ------
    ArgumentError
    """

    emulated = True

    def __init__(
        self,
        functions: NativeMedium,
        preset: str | None = None,
        *,
        read_iops: float | tuple[float, float] | None = None,
        write_iops: float | tuple[float, float] | None = None,
        bandwidth: float | None = None,
        latency_us: float | tuple[float, float] | None = None,
    ) -> None:
        self.limits = limits_of(preset, read_iops, write_iops, bandwidth, latency_us)
        self.description = f"latency {self.limits.name} (emulated)"
        self._block = memory_for("cpu").allocate(8 * (RESULTS + 1))
        self._table, self._results = SlotTable(), results_table()
        words = self._block.words
        words[:4] = (functions.start, functions.complete, functions.state, self._table.address)
        words[RESULTS] = self._results.address
        self._keep = (self.limits.fill(words), functions)

    def native(self) -> NativeMedium:
        """Return the native functions."""
        return NativeMedium(delayed_start.address, delayed_complete.address, self._block.address, self)


@device
def lane_of(state: int, op: int) -> int:
    """Return the lane of a command."""
    opcode = op & 0xFF
    if opcode == KV_STORE or opcode == KV_DELETE or opcode == FLUSH:
        return state + 8 * WRITES
    return state + 8 * READS


@device
def moved_by(op: int, nbytes: int, result: int) -> int:
    """Return the bytes of the value that a command moved, at least 1: any command counts as one."""
    start = ((op >> 24) & 0xFFFF) * UNIT
    opcode = op & 0xFF
    if opcode == KV_STORE:
        return max(1, nbytes)
    if opcode == KV_RETRIEVE:
        return max(1, min(nbytes, result - start))
    return 1


@device
def hold(state: int, slot: int, answer: int) -> int:
    """Keep a command that is done until its time; return PENDING, or the answer where it is past."""
    record = record_of(word(state, TABLE), slot)
    op = word(record, R_OP)
    moved = moved_by(op, word(record, R_NBYTES), (answer >> 16) & 0xFFFFFFFF)
    lane = lane_of(state, op)
    deadline = admit(state, lane, word(record, R_EXTRA), moved)
    set_word(record, R_RESULT, answer >> 16)
    if later(state, lane, deadline, slot, answer & 0xFFFF) == PENDING:
        return PENDING
    return answer


@native
def delayed_start(state: int, op: int, key0: int, key1: int, buffer: int, tail: int) -> int:
    """Move the value now, complete at the deadline."""
    arrival = clock_ns()
    table = word(state, TABLE)
    slot = take_slot(table)
    if slot < 0:
        return COMMAND_INTERRUPTED
    nbytes = tail & 0xFFFFFFFF
    record = record_of(table, slot)
    set_word(record, R_TAG, tail >> 32)
    set_word(record, R_OP, op)
    set_word(record, R_NBYTES, nbytes)
    set_word(record, R_EXTRA, arrival)
    inner = (slot << 32) | nbytes
    answer = call_native(word(state, START), word(state, INNER), op, key0, key1, buffer, inner)
    if answer == PENDING:
        return PENDING
    answer = hold(state, slot, answer)
    if answer != PENDING:
        release_slot(table, slot)
    return answer


@native
def delayed_complete(state: int, a: int, b: int, c: int, d: int, e: int) -> int:
    """Return the command that is due for longest, or one of the inner functions whose time has come."""
    if a == 1:
        return take_result(word(state, RESULTS), b)
    now = clock_ns()
    lane = state + 8 * READS
    if word(state + 8 * WRITES, L_DUE) < word(lane, L_DUE):
        lane = state + 8 * WRITES
    if word(lane, L_DUE) <= now:
        found = pop_due(state, lane, now)
        if found >= 0:
            return finish(state, found >> 16, found & 0xFFFF)
    function = word(state, COMPLETE)
    while function != 0:
        got = call_native(function, word(state, INNER), 0, 0, 0, 0, 0)
        if got < 0:
            break
        slot = got >> 16
        result = call_native(function, word(state, INNER), 1, slot, 0, 0, 0)
        if hold(state, slot, (got & 0xFFFF) | (result << 16)) != PENDING:
            return finish(state, slot, got & 0xFFFF)
    return -1


@device
def finish(state: int, slot: int, status: int) -> int:
    """Give a slot back, keep the result for the next call, and return tag and status."""
    table = word(state, TABLE)
    record = record_of(table, slot)
    tag = word(record, R_TAG)
    keep_result(word(state, RESULTS), tag, word(record, R_RESULT))
    release_slot(table, slot)
    return (tag << 16) | status
