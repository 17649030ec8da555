"""Latency and KeyValueLatency: an emulated drive over a medium, or over native functions for keys and values.

Both are served by the same native functions; `KEYED` tells them apart. A command moves its bytes when it starts, gets a
deadline from the limits, and waits in its lane, ordered by deadline, until it completes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from ..nvme import COMMAND_INTERRUPTED, FLUSH, KV_DELETE, KV_RETRIEVE, KV_STORE
from ..targets import (
    SYSTEM,
    backoff,
    call_native,
    clock_ns,
    device,
    div,
    load_relaxed,
    native,
    store_relaxed,
)
from ..targets.memory import private_block
from .commands import (
    R_EXTRA,
    R_NBYTES,
    R_OP,
    R_STATUS,
    R_TAG,
    SlotTable,
    keep_result,
    lock,
    record_of,
    release_slot,
    results_table,
    set_word,
    take_result,
    take_slot,
    unlock,
    word,
)
from .medium import PENDING, Medium, NativeMedium, Wrapper

START = 0
COMPLETE = 1
INNER = 2
TABLE = 3
LOCK = 4
ORIGIN = 5
"""Clock of the first command; times count from it, so that they can be in 1024ths of a nanosecond."""
BYTES_COST = 6
"""Of 512 bytes, in 1024ths of a nanosecond, as the next ones."""
BYTES_FREE = 7
"""When the bytes so far have passed; `L_FREE` says so of the commands of a lane."""

# -- lane: one of reads, one of everything else; each is a queue by deadline --------------------
READS = 8
WRITES = 16
L_HEAD = 0
L_TAIL = 1
L_DUE = 2
"""First deadline (ns), or `NEVER`."""
L_ENTRIES = 3
L_COST_512 = 4
L_COST_4096 = 5
L_FREE = 6
L_LATENCY = 7

KEYED = 24
"""1 where commands are of keys and values."""
RESULTS = 25
STATE_WORDS = 26

IN_FLIGHT = 4096
NEVER = 1 << 62
UNIT = 512
"""Bytes of a step in which a retrieve may begin within the value."""
R_RESULT = R_STATUS
"""Result of a command that is done and waits for its time."""


@dataclass(frozen=True)
class DriveRates:
    """Rates of a drive, measured with one drive on four PCIe 4 lanes.

    Source: Qureshi and others, GPU-Initiated On-Demand High-Throughput Storage Access in the BaM System
    Architecture (2023), table 3.

    Attributes
    ----------
    name : str
    read_iops, write_iops : tuple of float
        Commands a second of 512 bytes, and of 4096 bytes.
    latency_us : float
        Latency of one command, in microseconds. For the 980 Pro it is under full load; no other is published.
    """

    name: str
    read_iops: tuple[float, float]
    write_iops: tuple[float, float]
    latency_us: float

    @property
    def bandwidth(self) -> float:
        """Bytes a second: the rate of its reads of 4096 bytes."""
        return 4096 * self.read_iops[1]


DRIVES = (
    DriveRates("P5800X", (5.1e6, 1.5e6), (1.0e6, 1.5e6), 11.0),
    DriveRates("PM1735", (1.1e6, 1.6e6), (351e3, 351e3), 25.0),
    DriveRates("980Pro", (0.75e6, 0.75e6), (172e3, 172e3), 324.0),
)
"""Intel Optane P5800X, Samsung PM1735, Samsung 980 Pro."""


def rates_of(name: str) -> DriveRates:
    """Return a drive by name (case does not matter).

    Raises
    ------
    ArgumentError
        No drive has that name.
    """
    for candidate in DRIVES:
        if candidate.name.lower() == name.lower().replace(" ", ""):
            return candidate
    known = ", ".join(d.name for d in DRIVES)
    raise errors.ArgumentError(f"there is no drive {name!r}: choose one of {known}", name="preset")


@dataclass(frozen=True)
class Limits:
    """The limits of an emulated drive, in the units of `Latency`'s options. 0 means no limit."""

    name: str
    read_iops: tuple[float, float]
    write_iops: tuple[float, float]
    bandwidth: float
    latency_us: tuple[float, float]

    def over(self, inner: NativeMedium, *, keyed: bool) -> NativeMedium:
        """Return native functions that delay those of a medium, or (`keyed`) those for keys and values."""
        block = private_block(8 * STATE_WORDS)
        entries = private_block(2 * 16 * IN_FLIGHT)
        table, results = SlotTable(), results_table()
        words = block.words
        words[:4] = (inner.start, inner.complete, inner.state, table.address)
        words[KEYED], words[RESULTS] = keyed, results.address
        words[BYTES_COST] = _cost(self.bandwidth / 512)
        for k, iops in enumerate((self.read_iops, self.write_iops)):
            lane = words[(READS, WRITES)[k] :]
            lane[L_DUE] = NEVER
            lane[L_ENTRIES] = entries.address + 16 * IN_FLIGHT * k
            lane[L_COST_512], lane[L_COST_4096] = _cost(iops[0]), _cost(iops[1])
            lane[L_LATENCY] = int(self.latency_us[k] * 1000)
        kept = (block, entries, table, results, inner)
        return NativeMedium(latency_start.address, latency_complete.address, block.address, kept)


def limits_of(
    preset: str | None,
    read_iops: float | tuple[float, float] | None,
    write_iops: float | tuple[float, float] | None,
    bandwidth: float | None,
    latency_us: float | tuple[float, float] | None,
) -> Limits:
    """Return the limits of a preset, in which the given values replace its own."""
    if preset is not None:
        known = rates_of(preset)
        preset = known.name
        read_iops = known.read_iops if read_iops is None else read_iops
        write_iops = known.write_iops if write_iops is None else write_iops
        bandwidth = known.bandwidth if bandwidth is None else bandwidth
        latency_us = known.latency_us if latency_us is None else latency_us
    latencies = _pair(latency_us, "latency_us")
    return Limits(
        preset or f"{latencies[0]:g} us",
        _pair(read_iops, "read_iops"),
        _pair(write_iops, "write_iops"),
        _pair(bandwidth, "bandwidth")[0],
        latencies,
    )


def _pair(value: float | tuple[float, float] | None, name: str) -> tuple[float, float]:
    pair = value if isinstance(value, tuple) else (value or 0.0, value or 0.0)
    if len(pair) != 2 or not all(0 <= v < 1e12 for v in pair):
        raise errors.ArgumentError(f"{name} is {value}: a positive number, or two", name=name)
    return pair


def _cost(rate: float) -> int:
    return round(1e9 * 1024 / rate) if rate else 0


class Latency(Wrapper):
    """An emulated drive: commands complete when a drive with these limits would complete them.

    The bytes move when a command starts. It is admitted when earlier commands (IOPS) and bytes (bandwidth) have passed,
    and completes one latency later; at most 4096 reads and 4096 writes are in flight. Closing it closes the medium.
    Each `Latency` has its own limits, so use one for each drive, over a `Striped` medium if necessary.

    Parameters
    ----------
    medium : Medium
    preset : str, optional
        "P5800X", "PM1735" or "980Pro" (`DRIVES`). The options below replace its values.
    read_iops, write_iops : float or tuple of float, optional
        Commands a second; two numbers for commands under 4096 bytes and others. Default: no limit.
    bandwidth : float, optional
        Bytes a second, reads and writes together. Default: no limit.
    latency_us : float or tuple of float, optional
        Microseconds; two numbers for reads and for writes and flushes. Default: 0.

    Raises
    ------
    ArgumentError
    """

    def __init__(
        self,
        medium: Medium,
        preset: str | None = None,
        *,
        read_iops: float | tuple[float, float] | None = None,
        write_iops: float | tuple[float, float] | None = None,
        bandwidth: float | None = None,
        latency_us: float | tuple[float, float] | None = None,
    ) -> None:
        self.limits = limits_of(preset, read_iops, write_iops, bandwidth, latency_us)
        super().__init__(medium)
        self.name = f"latency {self.limits.name} over {medium.name}"
        self.description = f"latency {self.limits.name} over {medium.description} (emulated)"

    def _over(self, inner: NativeMedium) -> NativeMedium:
        return self.limits.over(inner, keyed=False)

    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Return bytes after the time that the drive would take."""
        begin = time.monotonic()
        out = self.medium.read(offset, nbytes)
        self._wait(begin, nbytes, 0)
        return out

    def write(self, offset: int, data: NDArray[Any]) -> None:
        """Write bytes; return after the time that the drive would take."""
        begin = time.monotonic()
        self.medium.write(offset, data)
        self._wait(begin, data.nbytes, 1)

    def _wait(self, begin: float, nbytes: int, lane: int) -> None:
        """Sleep until the drive would complete a transfer that started at `begin`."""
        rate = self.limits.bandwidth
        seconds = self.limits.latency_us[lane] * 1e-6 + (nbytes / rate if rate else 0.0)
        left = begin + seconds - time.monotonic()
        if left > 0:
            time.sleep(left)


class KeyValueLatency:
    """An emulated drive: key-value commands complete when a drive with these limits would complete them.

    The value moves when a command starts. Retrieve, list and exist count as reads; the bytes of a command are the size
    of its value. The limits are those of `Latency`.

    Parameters
    ----------
    functions : NativeMedium
        For `Controller.attach_kv`.
    preset : str, optional
        "P5800X", "PM1735" or "980Pro" (`DRIVES`). The options below replace its values.
    read_iops, write_iops : float or tuple of float, optional
        Commands a second; two numbers for values under 4096 bytes and others. Default: no limit.
    bandwidth : float, optional
        Bytes a second, reads and writes together. Default: no limit.
    latency_us : float or tuple of float, optional
        Microseconds; two numbers for reads and for writes. Default: 0.

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
        self._native = self.limits.over(functions, keyed=True)

    def native(self) -> NativeMedium:
        """Return the native functions."""
        return self._native


@device
def admit(state: int, lane: int, arrival: int, nbytes: int) -> int:
    """Admit a command as soon as the limits permit; return its deadline (ns)."""
    lock(state + 8 * LOCK)
    origin = word(state, ORIGIN)
    if origin == 0 or arrival < origin:  # the interpreter's clock starts anew with each launch
        origin = arrival
        set_word(state, ORIGIN, origin)
        set_word(state, BYTES_FREE, 0)
        set_word(state + 8 * READS, L_FREE, 0)
        set_word(state + 8 * WRITES, L_FREE, 0)
    passed = (arrival - origin) << 10
    if nbytes > 0:
        cost = word(lane, L_COST_512)
        if nbytes >= 4096:
            cost = word(lane, L_COST_4096)
        # an idle drive saves nothing up, neither commands nor bytes
        commands = max(passed, word(lane, L_FREE)) + cost
        transferred = max(passed, word(state, BYTES_FREE)) + div(nbytes, 512) * word(state, BYTES_COST)
        set_word(lane, L_FREE, commands)
        set_word(state, BYTES_FREE, transferred)
        passed = max(commands, transferred)
    unlock(state + 8 * LOCK)
    return origin + (passed >> 10) + word(lane, L_LATENCY)


@device
def later(state: int, lane: int, deadline: int, slot: int, status: int) -> int:
    """Queue a completion for its deadline and return PENDING; return the status if the deadline has passed.

    Wait for the deadline if the queue is full.
    """
    if deadline <= clock_ns():
        return status
    lock(state + 8 * LOCK)
    tail = word(lane, L_TAIL)
    head = word(lane, L_HEAD)
    queued = tail - head < IN_FLIGHT
    if queued:
        entry = word(lane, L_ENTRIES) + 16 * (tail & (IN_FLIGHT - 1))
        store_relaxed(entry, deadline, SYSTEM)
        store_relaxed(entry + 8, (slot << 16) | status, SYSTEM)
        set_word(lane, L_TAIL, tail + 1)
        if tail == head:
            set_word(lane, L_DUE, deadline)
    unlock(state + 8 * LOCK)
    if queued:
        return PENDING
    while clock_ns() < deadline:
        backoff(24)
    return status


@device
def pop_due(state: int, lane: int, now: int) -> int:
    """Remove and return the first entry of a lane if it is due, else -1."""
    found = -1
    lock(state + 8 * LOCK)
    head = word(lane, L_HEAD)
    tail = word(lane, L_TAIL)
    if head != tail and word(lane, L_DUE) <= now:
        entries = word(lane, L_ENTRIES)
        found = load_relaxed(entries + 16 * (head & (IN_FLIGHT - 1)) + 8, SYSTEM)
        head += 1
        set_word(lane, L_HEAD, head)
        if head == tail:
            set_word(lane, L_DUE, NEVER)
        else:
            set_word(lane, L_DUE, load_relaxed(entries + 16 * (head & (IN_FLIGHT - 1)), SYSTEM))
    unlock(state + 8 * LOCK)
    return found


@device
def lane_of(state: int, op: int) -> int:
    """Return the lane of a command; a read and a retrieve have one opcode, and so do a write and a store."""
    opcode = op & 0xFF
    if opcode == KV_STORE or opcode == KV_DELETE or opcode == FLUSH:
        return state + 8 * WRITES
    return state + 8 * READS


@device
def moved_by(state: int, op: int, nbytes: int, result: int) -> int:
    """Return the bytes that a command moved; at least 1 for a command on keys, so that each counts."""
    opcode = op & 0xFF
    if word(state, KEYED) == 0:
        if opcode == FLUSH:
            return 0
        return nbytes
    if opcode == KV_STORE:
        return max(1, nbytes)
    if opcode == KV_RETRIEVE:
        return max(1, min(nbytes, result - ((op >> 24) & 0xFFFF) * UNIT))
    return 1


@native
def latency_start(state: int, op: int, first: int, second: int, buffer: int, last: int) -> int:
    """Move the bytes now, complete at the deadline.

    `second` and `last` are the number of bytes and the tag; for keys and values `last` holds both.
    """
    arrival = clock_ns()
    table = word(state, TABLE)
    slot = take_slot(table)
    if slot < 0:
        return COMMAND_INTERRUPTED
    nbytes = second
    tag = last
    inner = slot
    if word(state, KEYED) != 0:
        nbytes = last & 0xFFFFFFFF
        tag = last >> 32
        inner = (slot << 32) | nbytes
    record = record_of(table, slot)
    set_word(record, R_TAG, tag)
    set_word(record, R_OP, op)
    set_word(record, R_NBYTES, nbytes)
    set_word(record, R_EXTRA, arrival)
    answer = call_native(word(state, START), word(state, INNER), op, first, second, buffer, inner)
    if answer == PENDING:
        return PENDING
    answer = hold(state, slot, answer)
    if answer != PENDING:
        release_slot(table, slot)
    return answer


@device
def hold(state: int, slot: int, answer: int) -> int:
    """Keep a finished command until its deadline; return PENDING, or the answer if the deadline has passed."""
    record = record_of(word(state, TABLE), slot)
    op = word(record, R_OP)
    moved = moved_by(state, op, word(record, R_NBYTES), (answer >> 16) & 0xFFFFFFFF)
    lane = lane_of(state, op)
    deadline = admit(state, lane, word(record, R_EXTRA), moved)
    set_word(record, R_RESULT, answer >> 16)
    if later(state, lane, deadline, slot, answer & 0xFFFF) == PENDING:
        return PENDING
    return answer


@native
def latency_complete(state: int, a: int, b: int, c: int, d: int, e: int) -> int:
    """Return the command with the earliest deadline that has passed, or one of the inner functions that is due.

    With `a` 1, return the result of the key-value command with tag `b`.
    """
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
        answer = got & 0xFFFF
        if word(state, KEYED) != 0:
            answer |= call_native(function, word(state, INNER), 1, slot, 0, 0, 0) << 16
        if hold(state, slot, answer) != PENDING:
            return finish(state, slot, answer & 0xFFFF)
    return -1


@device
def finish(state: int, slot: int, status: int) -> int:
    """Release a slot, keep the result for the next call, and return tag and status."""
    table = word(state, TABLE)
    record = record_of(table, slot)
    tag = word(record, R_TAG)
    keep_result(word(state, RESULTS), tag, word(record, R_RESULT))
    release_slot(table, slot)
    return (tag << 16) | status
