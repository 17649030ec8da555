"""Latency and KeyValueLatency: an emulated drive over a medium, or over native functions for keys and values.

Both have the same native functions. A command moves its bytes when it starts, gets a
deadline from the limits, and waits in a queue by deadline until it completes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpwell import errors
from warpwell._os import clock
from warpwell.nvme import (
    COMMAND_INTERRUPTED,
    FLUSH,
    KV_DELETE,
    KV_RETRIEVE,
    KV_STORE,
    word0_opc,
    word5_value_size,
    word6_nlb,
)
from warpwell.storage import PENDING, Medium, NativeMedium, set_word, word, write_answer
from warpwell.storage.commands import (
    A_RESULT,
    A_STATUS,
    A_TAG,
    C_BLOCKS,
    C_CDW10,
    C_WORD0,
    R_EXTRA,
    R_NBYTES,
    R_OFFSET,
    R_OP,
    R_TAG,
    SEATS,
    SlotTable,
    call_complete,
    call_start,
    record_of,
    release_slot,
    take_slot,
    unlock,
)
from warpwell.targets import device, native, private_block
from warpwell.targets.primitives import (
    SYSTEM,
    backoff,
    clock_ns,
    compare_exchange,
    div,
    exchange,
    load_relaxed,
    seat,
    store_relaxed,
)

from .wrapper import Wrapper

# -- state: words that are only read, then what commands pass ------------------------------------------------------
START = 0
COMPLETE = 1
INNER = 2
TABLE = 3
"""Address of the slot table, or 0 if no inner command is ever pending."""
COMMAND_SET = 4
"""`BLOCKS`, or `KEY_VALUE`."""
PARTS = 6
"""Address of the parts."""
ENTRIES = 7
"""Address of the entries."""
BYTES_COST = 8
"""Time of 512 bytes, in 1024ths of a nanosecond, as the next fields."""
LANES = 9
"""Two lanes, of reads and of all other commands: the words `L_COST_512` and so on of each."""
L_COST_512 = 0
L_COST_4096 = 1
L_LATENCY = 2
LANE_WORDS = 3
N_PARTS = 15
"""Number of parts, a power of two, as `ROOM`."""
ROOM = 16
"""Entries of a queue."""
ORIGIN = 17
"""Clock from which times count, so that they can be in 1024ths of a nanosecond."""
BYTES_FREE = 32
"""Time at which all bytes so far have passed. Each word from `COMMANDS_FREE` on is this time for the commands of a
lane."""
COMMANDS_FREE = 33
STATE_WORDS = 64

# -- part: commands that wait for their time, a queue by deadline for each lane ------------------------------------
# # A service thread puts commands into its own part and removes them there, because words that several threads write,
# or read during writes, would cost more than the rest of a command. If a part is full or locked, the next part gets the
# command. So that no command waits for a sleeping thread, threads without work check the other parts, too, and each
# thread does so from time to time. There are about as many parts as processors.
P_LOCK = 0
P_LANES = 1
"""The words `Q_HEAD` and so on of each lane."""
P_LOOKS = 16
"""Number of calls of `latency_complete` of its threads, on a line that no other thread reads. A hint, as `P_SPILLED`:
not atomic."""
P_SPILLED = 17
"""Number of commands that its threads put into other parts; they remove as many there."""
Q_HEAD = 0
Q_TAIL = 1
Q_DUE = 2
"""First deadline (ns), or `NEVER`."""
QUEUE_WORDS = 3
PART_WORDS = 32

# -- entry of a queue -----------------------------------------------------------------------------------------------
E_DEADLINE = 0
E_TAG = 1
E_ANSWER = 2
"""``status | result << 16``."""
ENTRY_WORDS = 4

ROUNDS_AWAKE = 24
"""Rounds without work after which a service thread may sleep between two rounds (`targets.backoff`)."""
SKEW_NS = 10**6
"""Maximum difference between the clock reads of a thread and of a thread that is admitted before it."""
READS = 0
WRITES = 1
BLOCKS = 0
KEY_VALUE = 1
MOST_PARTS = 16
IN_FLIGHT = 4096
"""Entries of the queues of a lane."""
LOOK_ROUND = 64
"""Period, in calls, in which one call checks another part first."""
NEVER = 1 << 62
UNIT = 512
"""Bytes of a block, and of a step in which a retrieve may begin within the value."""


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
        Latency of one command, in microseconds. For the 980 Pro, the latency is under full load; no other value is
        published.
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
    names = ", ".join(d.name for d in DRIVES)
    raise errors.ArgumentError(f"unknown drive {name!r}: choose one of {names}", name="preset")


@dataclass(frozen=True)
class Limits:
    """The limits of an emulated drive, in the units of `Latency`'s options. 0 means no limit."""

    name: str
    read_iops: tuple[float, float]
    write_iops: tuple[float, float]
    bandwidth: float
    latency_us: tuple[float, float]

    def over(self, inner: NativeMedium, command_set: int) -> NativeMedium:
        """Return native functions that delay the functions of a medium, or the functions for keys and values."""
        parts = min(MOST_PARTS, 1 << ((os.cpu_count() or 2) - 1).bit_length())
        block = private_block(8 * (STATE_WORDS + PART_WORDS * parts))
        entries = private_block(8 * ENTRY_WORDS * 2 * IN_FLIGHT)
        table = SlotTable() if inner.complete else None
        state_words = block.words
        state_words[:3] = (inner.start, inner.complete, inner.state)
        state_words[TABLE] = table.address if table else 0
        state_words[COMMAND_SET] = command_set
        state_words[N_PARTS], state_words[ROOM] = parts, IN_FLIGHT // parts
        state_words[PARTS], state_words[ENTRIES] = block.address + 8 * STATE_WORDS, entries.address
        state_words[BYTES_COST] = _cost(self.bandwidth / 512)
        state_words[ORIGIN] = clock.monotonic_ns()
        for k, iops in enumerate((self.read_iops, self.write_iops)):
            lane = state_words[LANES + LANE_WORDS * k :]
            lane[L_COST_512], lane[L_COST_4096] = _cost(iops[0]), _cost(iops[1])
            lane[L_LATENCY] = int(self.latency_us[k] * 1000)
            state_words[STATE_WORDS + P_LANES + QUEUE_WORDS * k + Q_DUE :: PART_WORDS] = NEVER
        owner = (block, entries, table, inner)
        return NativeMedium(
            latency_start.address, latency_complete.address, block.address, owner, non_blocking=inner.complete == 0
        )


def limits_of(
    preset: str | None,
    read_iops: float | tuple[float, float] | None,
    write_iops: float | tuple[float, float] | None,
    bandwidth: float | None,
    latency_us: float | tuple[float, float] | None,
) -> Limits:
    """Return the limits of a preset, in which the given values replace those of the preset."""
    if preset is not None:
        rates = rates_of(preset)
        preset = rates.name
        read_iops = rates.read_iops if read_iops is None else read_iops
        write_iops = rates.write_iops if write_iops is None else write_iops
        bandwidth = rates.bandwidth if bandwidth is None else bandwidth
        latency_us = rates.latency_us if latency_us is None else latency_us
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
        return self.limits.over(inner, BLOCKS)

    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Return bytes after the time that the drive would take."""
        begin = clock.monotonic()
        out = self.medium.read(offset, nbytes)
        self._wait(begin, nbytes, 0)
        return out

    def write(self, offset: int, data: NDArray[Any]) -> None:
        """Write bytes; return after the time that the drive would take."""
        begin = clock.monotonic()
        self.medium.write(offset, data)
        self._wait(begin, data.nbytes, 1)

    def _wait(self, begin: float, nbytes: int, lane: int) -> None:
        """Sleep until the drive would complete a transfer that started at `begin`."""
        rate = self.limits.bandwidth
        seconds = self.limits.latency_us[lane] * 1e-6 + (nbytes / rate if rate else 0.0)
        left = begin + seconds - clock.monotonic()
        if left > 0:
            clock.sleep(left)


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
        self._native = self.limits.over(functions, KEY_VALUE)

    def native(self) -> NativeMedium:
        """Return the native functions."""
        return self._native


@device
def advance(address: int, passed: int, cost: int) -> int:
    """Reserve time on a shared limit after earlier reservations; return its end. Idle time is not saved up."""
    free = passed  # a guess saves a load: a failed exchange returns the actual value
    while True:
        after = max(passed, free) + cost
        found = compare_exchange(address, free, after, SYSTEM)
        if found == free:
            return after
        free = found


@device
def admit(state: int, lane: int, arrival: int, nbytes: int) -> int:
    """Admit a command as soon as the limits permit; return its deadline (ns)."""
    costs = state + 8 * (LANES + LANE_WORDS * lane)
    free = state + 8 * (COMMANDS_FREE + lane)
    origin = word(state, ORIGIN)
    while origin - arrival > SKEW_NS:  # The interpreter's clock starts at 0 in each launch.
        if compare_exchange(state + 8 * ORIGIN, origin, arrival, SYSTEM) == origin:
            set_word(state, BYTES_FREE, 0)
            set_word(state, COMMANDS_FREE + READS, 0)
            set_word(state, COMMANDS_FREE + WRITES, 0)
        origin = word(state, ORIGIN)
    passed = (arrival - origin) << 10
    if nbytes > 0:
        cost = word(costs, L_COST_512)
        if nbytes >= 4096:
            cost = word(costs, L_COST_4096)
        bytes_cost = div(nbytes, 512) * word(state, BYTES_COST)
        passed = max(advance(free, passed, cost), advance(state + 8 * BYTES_FREE, passed, bytes_cost))
    return origin + (passed >> 10) + word(costs, L_LATENCY)


@device
def entry_of(state: int, part: int, lane: int, position: int) -> int:
    """Return the address of an entry."""
    room = word(state, ROOM)
    return word(state, ENTRIES) + 8 * ENTRY_WORDS * (room * (2 * part + lane) + (position & (room - 1)))


@device
def part_of(state: int, part: int) -> int:
    """Return the address of a part."""
    return word(state, PARTS) + 8 * PART_WORDS * part


@device
def nth_part(state: int, number: int) -> int:
    """Return the part with a number modulo the number of parts."""
    return number & (word(state, N_PARTS) - 1)


@device
def put_later(state: int, part: int, lane: int, deadline: int, tag: int, answer: int) -> bool:
    """Queue an answer, ``status | result << 16``, for its deadline; return False if the part is locked or full."""
    record = part_of(state, part)
    if load_relaxed(record + 8 * P_LOCK, SYSTEM) != 0 or exchange(record + 8 * P_LOCK, 1, SYSTEM) != 0:
        return False
    queue = record + 8 * (P_LANES + QUEUE_WORDS * lane)
    head = word(queue, Q_HEAD)
    tail = word(queue, Q_TAIL)
    room = tail - head < word(state, ROOM)
    if room:
        entry = entry_of(state, part, lane, tail)
        set_word(entry, E_DEADLINE, deadline)
        set_word(entry, E_TAG, tag)
        set_word(entry, E_ANSWER, answer)
        set_word(queue, Q_TAIL, tail + 1)
        if tail == head:
            set_word(queue, Q_DUE, deadline)
    unlock(record + 8 * P_LOCK)
    return room


@device
def pop_due(state: int, part: int, out: int) -> bool:
    """Move the first due answer of a part to `out`; return True if there was one."""
    record = part_of(state, part)
    lane = READS
    if word(record, P_LANES + QUEUE_WORDS + Q_DUE) < word(record, P_LANES + Q_DUE):
        lane = WRITES
    queue = record + 8 * (P_LANES + QUEUE_WORDS * lane)
    due = word(queue, Q_DUE)
    if due == NEVER:
        return False
    now = clock_ns()
    # A locked part is skipped: the next call finds its answers.
    if due > now or load_relaxed(record + 8 * P_LOCK, SYSTEM) != 0 or exchange(record + 8 * P_LOCK, 1, SYSTEM) != 0:
        return False
    is_due = word(queue, Q_DUE) <= now
    if is_due:
        head = word(queue, Q_HEAD) + 1
        entry = entry_of(state, part, lane, head - 1)
        answer = word(entry, E_ANSWER)
        write_answer(out, word(entry, E_TAG), answer & 0xFFFF, answer >> 16)
        set_word(queue, Q_HEAD, head)
        due = NEVER
        if head != word(queue, Q_TAIL):
            due = word(entry_of(state, part, lane, head), E_DEADLINE)
        set_word(queue, Q_DUE, due)
    unlock(record + 8 * P_LOCK)
    return is_due


@device
def pop_other(state: int, own_part: int, out: int) -> bool:
    """Move a due answer from the parts after `own_part` to `out`; return True if there was one."""
    spilled = part_of(state, own_part) + 8 * P_SPILLED
    waiting = False
    for k in range(1, word(state, N_PARTS)):
        part = nth_part(state, own_part + k)
        lanes = part_of(state, part) + 8 * P_LANES
        if word(lanes, Q_DUE) != NEVER or word(lanes, QUEUE_WORDS + Q_DUE) != NEVER:
            waiting = True
            if pop_due(state, part, out):
                store_relaxed(spilled, max(load_relaxed(spilled, SYSTEM) - 1, 0), SYSTEM)
                return True
    if not waiting:
        store_relaxed(spilled, 0, SYSTEM)
    return False


@device
def take_due(state: int, out: int) -> bool:
    """Move a due answer, first of the calling thread's part, to `out`; return True if there was one."""
    own_part = nth_part(state, seat())
    record = part_of(state, own_part)
    looks = word(record, P_LOOKS) + 1
    set_word(record, P_LOOKS, looks)
    if looks & (LOOK_ROUND - 1) == 0:
        if pop_due(state, nth_part(state, div(looks, LOOK_ROUND)), out):
            return True
    elif looks & 1 == 0 and word(record, P_SPILLED) > 0 and pop_other(state, own_part, out):
        return True
    if pop_due(state, own_part, out):
        return True
    idle = idle_rounds()
    if idle >= ROUNDS_AWAKE:
        return pop_other(state, own_part, out)
    return idle > 0 and pop_due(state, nth_part(state, looks), out)


@device
def lane_of(word0: int) -> int:
    """Return the lane of a command; a read and a retrieve have one opcode, and so do a write and a store."""
    opcode = word0_opc(word0)
    if opcode == KV_STORE or opcode == KV_DELETE or opcode == FLUSH:
        return WRITES
    return READS


@device
def moved_by(state: int, word0: int, word5: int, word6: int, result: int) -> int:
    """Return the bytes that a command moved; at least 1 for a command on keys, so that each counts."""
    opcode = word0_opc(word0)
    if word(state, COMMAND_SET) == BLOCKS:
        return (word6_nlb(word6) + 1) * UNIT
    if opcode == KV_STORE:
        return max(1, word5_value_size(word5))
    if opcode == KV_RETRIEVE:
        first = word6 & 0xFFFFFFFF  # see `warpwell.kv.index.serve.C_FIRST`
        return max(1, min(word5_value_size(word5), (result & 0xFFFFFFFF) - first))
    return 1


@device
def hold(state: int, word0: int, word5: int, word6: int, tag: int, arrival: int, answer: int) -> int:
    """Store a finished command until its deadline; return PENDING, or the answer if the command takes no time.

    Wait for the deadline if all parts are full.
    """
    lane = lane_of(word0)
    deadline = admit(state, lane, arrival, moved_by(state, word0, word5, word6, answer >> 16))
    own_part = nth_part(state, seat())
    while deadline > arrival:
        for k in range(word(state, N_PARTS)):
            if put_later(state, nth_part(state, own_part + k), lane, deadline, tag, answer):
                if k > 0:
                    record = part_of(state, own_part)
                    set_word(record, P_SPILLED, word(record, P_SPILLED) + 1)
                return PENDING
        backoff(24)
        arrival = clock_ns()
    return answer


@device
def idle_rounds() -> int:
    """Return the number of rounds without work of the calling service thread. Other threads may always sleep."""
    rounds = div(seat(), SEATS) - 1
    if rounds < 0:
        return ROUNDS_AWAKE
    return rounds


@native
def latency_start(state: int, command: int, tag: int) -> int:
    """Move the bytes, and complete at the deadline."""
    table = word(state, TABLE)
    word0 = word(command, C_WORD0)
    word5 = word(command, C_CDW10)
    word6 = word(command, C_BLOCKS)
    arrival = clock_ns()
    inner = tag
    if table != 0:
        inner = take_slot(table)
        if inner < 0:
            return COMMAND_INTERRUPTED
        record = record_of(table, inner)
        set_word(record, R_TAG, tag)
        set_word(record, R_OP, word0)
        set_word(record, R_OFFSET, word5)
        set_word(record, R_NBYTES, word6)
        set_word(record, R_EXTRA, arrival)
    answer = call_start(word(state, START), word(state, INNER), command, inner)
    if answer == PENDING:
        return PENDING
    if table != 0:
        release_slot(table, inner)
    return hold(state, word0, word5, word6, tag, arrival, answer)


@native
def latency_complete(state: int, out: int) -> bool:
    """Answer a command whose deadline has passed, or a command of the inner functions that took no time."""
    if take_due(state, out):
        return True
    function = word(state, COMPLETE)
    while function != 0 and call_complete(function, word(state, INNER), out):
        table = word(state, TABLE)
        slot = word(out, A_TAG)
        record = record_of(table, slot)
        tag = word(record, R_TAG)
        arrival = word(record, R_EXTRA)
        word0 = word(record, R_OP)
        word5 = word(record, R_OFFSET)
        word6 = word(record, R_NBYTES)
        release_slot(table, slot)
        answer = hold(state, word0, word5, word6, tag, arrival, word(out, A_STATUS) | (word(out, A_RESULT) << 16))
        if answer != PENDING:
            return write_answer(out, tag, answer & 0xFFFF, answer >> 16)
    return False
