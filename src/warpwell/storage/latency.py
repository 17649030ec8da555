"""Latency: an emulated drive over another medium."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from ..nvme import COMMAND_INTERRUPTED, READ, WRITE
from ..targets import (
    SYSTEM,
    Block,
    backoff,
    call_native,
    clock_ns,
    device,
    div,
    load_relaxed,
    memory_for,
    native,
    store_relaxed,
)
from ._words import (
    R_EXTRA,
    R_OP,
    R_TAG,
    SlotTable,
    lock,
    record_of,
    release_slot,
    set_word,
    take_slot,
    unlock,
    word,
)
from .medium import PENDING, Medium, NativeMedium
from .presets import drive

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
LANE_WORDS = 8
STATE_WORDS = WRITES + LANE_WORDS
L_HEAD = 0
L_TAIL = 1
L_DUE = 2
"""First deadline (ns), or `NEVER`."""
L_ENTRIES = 3
L_COST_512 = 4
L_COST_4096 = 5
L_FREE = 6
L_LATENCY = 7

IN_FLIGHT = 4096
NEVER = 1 << 62


class Latency(Medium):
    """An emulated drive: commands complete when a drive with these limits would have them done.

    The bytes move when a command starts. It passes when commands (IOPS) and bytes (bandwidth) before it have
    passed, and completes a latency later; up to 4096 reads and as many writes are in flight. Closing it
    closes the medium. Each has limits of its own, so one drive is one `Latency`, over a `Striped` if need be.

    Parameters
    ----------
    medium : Medium
    preset : str, optional
        "P5800X", "PM1735" or "980Pro" (`warpwell.storage.presets`). The options below replace its values.
    read_iops, write_iops : float or tuple of float, optional
        Commands a second; two numbers for commands under 4096 bytes and others. No limit where left out.
    bandwidth : float, optional
        Bytes a second, reads and writes together. No limit where left out.
    latency_us : float or tuple of float, optional
        Microseconds; two numbers for reads and for writes and flushes. 0 where left out.

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
        self.medium = medium
        self.nbytes = medium.nbytes
        self.writable = medium.writable
        self.emulated = True
        self.name = f"latency {self.limits.name} over {medium.name}"
        self.description = f"latency {self.limits.name} over {medium.description} (emulated)"
        self._native: NativeMedium | None = None
        self._keep: Any = None

    def native(self) -> NativeMedium | None:
        """Return the native functions."""
        if self._native is None:
            inner = self.medium.native()
            if inner is None:
                return None
            block = memory_for("cpu").allocate(8 * STATE_WORDS)
            table = SlotTable() if inner.complete else None
            block.words[:4] = (inner.start, inner.complete, inner.state, table.address if table else 0)
            self._keep = (block, self.limits.fill(block.words), table)
            self._native = NativeMedium(latency_start.address, latency_complete.address, block.address)
        return self._native

    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Return bytes; see `Medium.read`."""
        begin = time.monotonic()
        out = self.medium.read(offset, nbytes)
        self._wait(begin, nbytes, 0)
        return out

    def write(self, offset: int, data: NDArray[Any]) -> None:
        """Write bytes; see `Medium.write`."""
        begin = time.monotonic()
        self.medium.write(offset, data)
        self._wait(begin, data.nbytes, 1)

    def sync(self) -> None:
        """Make everything durable; see `Medium.sync`."""
        self.medium.sync()

    def close(self) -> None:
        """Give everything back; see `Medium.close`."""
        self.medium.close()

    def last_error(self) -> str | None:
        """Return what is known of the last failure."""
        return self.medium.last_error()

    def _wait(self, begin: float, nbytes: int, lane: int) -> None:
        """Loading a whole array takes as long as on the drive."""
        rate = self.limits.bandwidth
        seconds = self.limits.latency_us[lane] * 1e-6 + (nbytes / rate if rate else 0.0)
        left = begin + seconds - time.monotonic()
        if left > 0:
            time.sleep(left)


@dataclass(frozen=True)
class Limits:
    """What an emulated drive can do: see `Latency`. 0 is no limit."""

    name: str
    read_iops: tuple[float, float]
    write_iops: tuple[float, float]
    bandwidth: float
    latency_us: tuple[float, float]

    def fill(self, words: NDArray[np.int64]) -> Block:
        """Write the limits and empty lanes into a state; return the memory of the lanes' entries."""
        entries = memory_for("cpu").allocate(2 * 16 * IN_FLIGHT)
        words[BYTES_COST] = _cost(self.bandwidth / 512)
        for k, iops in enumerate((self.read_iops, self.write_iops)):
            lane = words[(READS, WRITES)[k] :]
            lane[L_DUE] = NEVER
            lane[L_ENTRIES] = entries.address + 16 * IN_FLIGHT * k
            lane[L_COST_512], lane[L_COST_4096] = _cost(iops[0]), _cost(iops[1])
            lane[L_LATENCY] = int(self.latency_us[k] * 1000)
        return entries


def limits_of(
    preset: str | None,
    read_iops: float | tuple[float, float] | None,
    write_iops: float | tuple[float, float] | None,
    bandwidth: float | None,
    latency_us: float | tuple[float, float] | None,
) -> Limits:
    """Return the limits of a preset, with the values given in place of its own."""
    if preset is not None:
        known = drive(preset)
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


@device
def admit(state: int, lane: int, arrival: int, nbytes: int) -> int:
    """Let a command pass as soon as the limits permit; return its deadline (ns)."""
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
def later(state: int, lane: int, deadline: int, tag: int, status: int) -> int:
    """Queue a completion for its deadline; with a full queue wait for it. Return PENDING or the status."""
    lock(state + 8 * LOCK)
    tail = word(lane, L_TAIL)
    head = word(lane, L_HEAD)
    queued = tail - head < IN_FLIGHT
    if queued:
        entry = word(lane, L_ENTRIES) + 16 * (tail & (IN_FLIGHT - 1))
        store_relaxed(entry, deadline, SYSTEM)
        store_relaxed(entry + 8, (tag << 16) | status, SYSTEM)
        set_word(lane, L_TAIL, tail + 1)
        if tail == head:
            set_word(lane, L_DUE, deadline)
    unlock(state + 8 * LOCK)
    if queued:
        return PENDING
    while clock_ns() < deadline:
        backoff(24)
    return status


@native
def latency_start(state: int, op: int, offset: int, nbytes: int, buffer: int, tag: int) -> int:
    """Move the bytes now, complete at the deadline."""
    arrival = clock_ns()
    lane = state + 8 * WRITES
    moved = 0
    if op == READ:
        lane = state + 8 * READS
    if op == READ or op == WRITE:
        moved = nbytes
    table = word(state, TABLE)
    slot = -1
    if table != 0:
        slot = take_slot(table)
        if slot < 0:
            return COMMAND_INTERRUPTED
    deadline = admit(state, lane, arrival, moved)
    inner = tag
    if slot >= 0:
        record = record_of(table, slot)
        set_word(record, R_TAG, tag)
        set_word(record, R_OP, op)
        set_word(record, R_EXTRA, deadline)
        inner = slot
    status = call_native(word(state, START), word(state, INNER), op, offset, nbytes, buffer, inner)
    if status == PENDING:
        return PENDING
    if slot >= 0:
        release_slot(table, slot)
    return later(state, lane, deadline, tag, status)


@native
def latency_complete(state: int, a: int, b: int, c: int, d: int, e: int) -> int:
    """Return the completion that is due for longest, or one of the inner medium whose time has come."""
    now = clock_ns()
    lane = state + 8 * READS
    if word(state + 8 * WRITES, L_DUE) < word(lane, L_DUE):
        lane = state + 8 * WRITES
    if word(lane, L_DUE) <= now:
        found = pop_due(state, lane, now)
        if found >= 0:
            return found
    table = word(state, TABLE)
    while table != 0:
        got = call_native(word(state, COMPLETE), word(state, INNER), 0, 0, 0, 0, 0)
        if got < 0:
            break
        record = record_of(table, got >> 16)
        tag = word(record, R_TAG)
        op = word(record, R_OP)
        deadline = word(record, R_EXTRA)
        release_slot(table, got >> 16)
        status = got & 0xFFFF
        if deadline > now:
            lane = state + 8 * WRITES
            if op == READ:
                lane = state + 8 * READS
            status = later(state, lane, deadline, tag, status)
        if status != PENDING:
            return (tag << 16) | status
    return -1


@device
def pop_due(state: int, lane: int, now: int) -> int:
    """Take the first entry of a lane where it is due; else -1."""
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
