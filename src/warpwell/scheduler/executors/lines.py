"""`Lines`: a native thread that launches kernels, each stream's in order, and notes their ends; Python writes rows.

A line is a stream and a ring of rows. Who has work writes a row and publishes it; that calls no driver, keeps the
interpreter lock, and so is not held up by threads that want it. The thread launches rows while fewer than `AHEAD_NS` of
work are on the GPU, records an event behind several at a time, asks for the oldest one, and rings a bell where somebody
waits. What it has not launched yet may be withdrawn.

No wait is without a bound: a lost wake-up costs `NAP_NS`. While kernels run the thread asks without a pause for
`SPIN_NS`, then more and more seldom; without work it sleeps.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..._os import clock
from ...targets import device, native
from ...targets.primitives import (
    SYSTEM,
    backoff,
    call_native,
    clock_ns,
    compare_exchange,
    exchange,
    fence,
    fetch_add,
    load_acquire,
    load_relaxed,
    store_relaxed,
    store_release,
)

SLOTS = 1024
"""Rows of a line: kernels that were given to it and have not ended, at most."""

MOST = 128
"""Lines."""

AHEAD_NS = 2_000_000
"""Expected nanoseconds of work of a line that are on the GPU, beyond which only a second kernel is launched ahead."""

MARK_NS = 40_000
"""Expected nanoseconds of kernels behind which an event is recorded, and asked for; the last one always has one.

It costs the GPU nothing, and this thread 1.3 and 1.7 us (H200); a word that the stream writes costs the GPU 2 us."""

MANY = 32
"""Rows of a line that are launched before the others are looked at."""

MADE = 64
"""Events of a line that are made at a time, when the first one is needed."""

SPIN_NS = 2_000_000
"""Nanoseconds without news for which the thread asks without a pause."""

SOON, SPIN_FOR = 1.0, 50e-6
"""Seconds for which somebody waits for a launch, at most (on a machine that is busy), and without a pause."""

NAP_NS = 100_000_000
"""Nanoseconds of a sleep, at most."""

NOT_READY = 600
"""CUDA_ERROR_NOT_READY."""

# Words of the thread's state, in bytes
STOP, LINES, NEWS, WOKEN, LAUNCH, RECORD, QUERY, READ, WRITE, PPOLL = (8 * k for k in range(10))
WORKER, WAITER = 128, 192
"""Bells: what the thread sleeps on, and what somebody who waits for news does."""
TABLE = 256
"""Addresses of the lines."""

# Words of a bell
ASLEEP, HANDLE, POLLED, SECONDS, NANOS, BUFFER = (8 * k for k in range(6))

# Words of a line
STREAM, PUSHED, LAUNCHED, ENDED, AHEAD, UNMARKED, SINCE, ERROR = (8 * k for k in range(8))
ROWS = 64

# Words of a row: CUlaunchConfig comes first
FUNCTION, ARGUMENTS, STATE, EXPECTED, BEFORE, EVENT, MARKED, STATUS, BEGUN_AT, ENDED_AT = (8 * k for k in range(7, 17))
ROW = 8 * 18
CONFIGURATION = 7
"""Words of CUlaunchConfig."""
HANDLE_WORD = 4
"""Of these, the stream."""

READY, TAKEN, WITHDRAWN = 1, 2, 3

NOTHING = np.zeros(CONFIGURATION + 2, np.int64)
"""A kernel that is none."""


@device
def status_of(result):
    """Return a C int that was returned in a register of 64 bits."""
    return result & 0xFFFFFFFF


@device
def row_of(line, number):
    """Return the address of a row."""
    return line + ROWS + ROW * (number & (SLOTS - 1))


@device
def ring(state, bell):
    """Wake who sleeps on a bell, or is about to.

    `ASLEEP` is exchanged on both sides, never stored or loaded: behind a store, a load may be early, also past a fence
    of acquire and release, and each side would miss the other.
    """
    if exchange(bell + ASLEEP, 0, SYSTEM) != 0:
        store_relaxed(bell + BUFFER, 1, SYSTEM)
        call_native(load_relaxed(state + WRITE, SYSTEM), load_relaxed(bell + HANDLE, SYSTEM), bell + BUFFER, 8, 0, 0, 0)


@device
def doze(state, bell, nanos):
    """Sleep until the bell rings, or for a time; who calls it has set `ASLEEP` and looked once more since."""
    store_relaxed(bell + SECONDS, nanos // 1_000_000_000, SYSTEM)
    store_relaxed(bell + NANOS, nanos % 1_000_000_000, SYSTEM)
    rang = call_native(load_relaxed(state + PPOLL, SYSTEM), bell + POLLED, 1, bell + SECONDS, 0, 0, 0)
    if status_of(rang) == 1:
        read, handle = load_relaxed(state + READ, SYSTEM), load_relaxed(bell + HANDLE, SYSTEM)
        call_native(read, handle, bell + BUFFER + 8, 8, 0, 0, 0)
    exchange(bell + ASLEEP, 0, SYSTEM)


@device
def mark(state, line):
    """Record the event of the last row that was launched and has none behind it."""
    row = row_of(line, load_relaxed(line + UNMARKED, SYSTEM) - 1)
    record = load_relaxed(state + RECORD, SYSTEM)
    event, stream = load_relaxed(row + EVENT, SYSTEM), load_relaxed(line + STREAM, SYSTEM)
    status = status_of(call_native(record, event, stream, 0, 0, 0, 0))
    if status != 0:
        store_relaxed(line + ERROR, status, SYSTEM)
    store_relaxed(row + MARKED, 1, SYSTEM)
    store_relaxed(line + UNMARKED, 0, SYSTEM)
    store_relaxed(line + SINCE, 0, SYSTEM)


@device
def launch(state, line, row):
    """Launch the kernel of a row; one without a function stands for what the stream was given before."""
    stream = load_relaxed(line + STREAM, SYSTEM)
    before = load_relaxed(row + BEFORE, SYSTEM)
    status = 0
    if before != 0:
        status = status_of(call_native(load_relaxed(state + RECORD, SYSTEM), before, stream, 0, 0, 0, 0))
    function, arguments = load_relaxed(row + FUNCTION, SYSTEM), load_relaxed(row + ARGUMENTS, SYSTEM)
    if status == 0 and function != 0:
        status = status_of(call_native(load_relaxed(state + LAUNCH, SYSTEM), row, function, arguments, 0, 0, 0))
    store_relaxed(row + BEGUN_AT, clock_ns(), SYSTEM)
    store_relaxed(row + STATUS, status, SYSTEM)
    return status


@device
def feed(state, line):
    """Launch what a line has, as far as work may be ahead; return how many rows."""
    launched = load_relaxed(line + LAUNCHED, SYSTEM)
    ended = load_relaxed(line + ENDED, SYSTEM)
    moved = 0
    while moved < MANY and launched < load_acquire(line + PUSHED, SYSTEM):
        ahead = load_relaxed(line + AHEAD, SYSTEM)
        if ahead >= AHEAD_NS and launched - ended >= 2:
            break
        row = row_of(line, launched)
        store_relaxed(row + MARKED, 0, SYSTEM)
        launched += 1
        moved += 1
        if compare_exchange(row + STATE, READY, TAKEN, SYSTEM) == READY:
            if launch(state, line, row) == 0:
                expected = load_relaxed(row + EXPECTED, SYSTEM)
                since = load_relaxed(line + SINCE, SYSTEM) + expected
                store_relaxed(line + AHEAD, ahead + expected, SYSTEM)
                store_relaxed(line + SINCE, since, SYSTEM)
                store_relaxed(line + UNMARKED, launched, SYSTEM)
                if since >= MARK_NS or load_relaxed(row + BEFORE, SYSTEM) != 0:
                    mark(state, line)
        store_release(line + LAUNCHED, launched, SYSTEM)
    if load_relaxed(line + UNMARKED, SYSTEM) != 0 and launched == load_acquire(line + PUSHED, SYSTEM):
        mark(state, line)
    return moved


@device
def on_gpu(row):
    """Whether a row was launched: it was not withdrawn, and the driver did not refuse it."""
    return load_relaxed(row + STATE, SYSTEM) == TAKEN and load_relaxed(row + STATUS, SYSTEM) == 0


@device
def reap(state, line):
    """Note the ends of a line's kernels; return how many rows."""
    ended, launched = load_relaxed(line + ENDED, SYSTEM), load_relaxed(line + LAUNCHED, SYSTEM)
    first = ended
    while ended < launched:
        last = ended
        while last < launched and load_relaxed(row_of(line, last) + MARKED, SYSTEM) == 0:
            last += 1
        if last == launched:
            # nothing behind which an event is: what never ran ends in its turn
            while ended < launched and not on_gpu(row_of(line, ended)):
                ended += 1
            break
        status = load_relaxed(line + ERROR, SYSTEM)
        if status == 0:
            event = load_relaxed(row_of(line, last) + EVENT, SYSTEM)
            status = status_of(call_native(load_relaxed(state + QUERY, SYSTEM), event, 0, 0, 0, 0, 0))
        if status == NOT_READY:
            break
        if status != 0:
            store_relaxed(line + ERROR, status, SYSTEM)
        now = clock_ns()
        while ended <= last:
            row = row_of(line, ended)
            store_relaxed(row + ENDED_AT, now, SYSTEM)
            if on_gpu(row):
                ahead = load_relaxed(line + AHEAD, SYSTEM) - load_relaxed(row + EXPECTED, SYSTEM)
                store_relaxed(line + AHEAD, ahead, SYSTEM)
                store_relaxed(row + STATUS, status, SYSTEM)
            ended += 1
    if ended != first:
        store_release(line + ENDED, ended, SYSTEM)
        fetch_add(state + NEWS, 1, SYSTEM)
        ring(state, state + WAITER)
    return ended - first


@device
def step(state):
    """Launch and look once, line by line; return twice the rows that moved, and one more where something is left."""
    moved = left = 0
    for k in range(load_acquire(state + LINES, SYSTEM)):
        line = load_relaxed(state + TABLE + 8 * k, SYSTEM)
        if load_acquire(line + PUSHED, SYSTEM) != load_relaxed(line + ENDED, SYSTEM):
            moved += feed(state, line) + reap(state, line)
            if load_acquire(line + PUSHED, SYSTEM) != load_relaxed(line + ENDED, SYSTEM):
                left = 1
    return 2 * moved + left


@native
def serve(state, _a, _b, _c, _d, _e):
    """Launch and look until `STOP` is set; the thread's whole life."""
    bell = state + WORKER
    since = clock_ns()
    while load_acquire(state + STOP, SYSTEM) == 0:
        found = step(state)
        now = clock_ns()
        if found > 1:
            since = now
        elif now - since <= SPIN_NS:
            backoff(0)  # other threads may have work
        else:
            exchange(bell + ASLEEP, 1, SYSTEM)
            fence(SYSTEM)
            found = step(state)
            if found > 1 or load_acquire(state + STOP, SYSTEM) != 0:
                exchange(bell + ASLEEP, 0, SYSTEM)
                since = now
            elif found == 1:
                doze(state, bell, min(1_000_000, 20_000 + (now - since) // 500))
            else:
                doze(state, bell, NAP_NS)
    return 0


@native
def watch(state, seen, until, spin, soonest, _e):
    """Return when there is news since `seen`, when `WOKEN` was set, or at a time (`clock_ns`).

    News is not looked at before the time `soonest`, so that several ends come together.
    """
    bell = state + WAITER
    since = clock_ns()
    attempt = 0
    while clock_ns() < soonest and load_acquire(state + WOKEN, SYSTEM) == 0:
        backoff(attempt & 15)
        attempt += 1
    while load_acquire(state + NEWS, SYSTEM) == seen and load_acquire(state + WOKEN, SYSTEM) == 0:
        now = clock_ns()
        if now >= until:
            break
        if now - since < spin:
            backoff(attempt & 15)
            attempt += 1
            continue
        exchange(bell + ASLEEP, 1, SYSTEM)
        fence(SYSTEM)
        if load_acquire(state + NEWS, SYSTEM) == seen and load_acquire(state + WOKEN, SYSTEM) == 0:
            doze(state, bell, min(until - now, NAP_NS))
    exchange(bell + ASLEEP, 0, SYSTEM)
    return 0


@native
def publish(address, value, state, _c, _d, _e):
    """Store a word behind those before it, and wake the thread."""
    store_release(address, value, SYSTEM)
    fence(SYSTEM)
    ring(state, state + WORKER)
    return 0


@native
def wake(state, _a, _b, _c, _d, _e):
    """Make `watch` return."""
    store_release(state + WOKEN, 1, SYSTEM)
    fence(SYSTEM)
    ring(state, state + WAITER)
    return 0


@native
def nudge(state, _a, _b, _c, _d, _e):
    """Make `watch` return because there is news, which is not the thread's."""
    fetch_add(state + NEWS, 1, SYSTEM)
    ring(state, state + WAITER)
    return 0


@native
def withdraw(row, _a, _b, _c, _d, _e):
    """Withdraw a row that was not launched; return what its state was."""
    return compare_exchange(row + STATE, READY, WITHDRAWN, SYSTEM)


class Line:
    """A stream whose kernels the native thread launches, in order. One thread at a time uses it (see `Lines.take`).

    Attributes
    ----------
    stream : object
        With a `handle`.
    """

    def __init__(self, lines: Lines, stream: Any) -> None:
        self.stream = stream
        self._lines = lines
        self._words = np.zeros((ROWS + ROW * SLOTS) // 8, np.int64)
        self._rows = self._words[ROWS // 8 :].reshape(SLOTS, ROW // 8)
        self.address = int(self._words.ctypes.data)
        self._handle = int(stream.handle)
        self._words[STREAM // 8] = self._handle
        self._pushed = 0
        self._reaped = 0
        self._owners: deque[Any] = deque()
        self._expected = 0.0
        self._events = np.zeros(SLOTS, np.int64)

    @property
    def empty(self) -> bool:
        """Whether `reap` has told of all that was pushed."""
        return self._pushed == self._reaped

    @property
    def told(self) -> int:
        """The number of the first kernel of which `reap` has not told."""
        return self._reaped

    @property
    def room(self) -> int:
        """How many more it takes now."""
        return SLOTS - (self._pushed - self._reaped)

    @property
    def seconds(self) -> float:
        """What it has not ended, in seconds as they were expected of the last one."""
        return self._expected * (self._pushed - int(self._words[ENDED // 8]))

    def push(self, kernel: NDArray[np.int64], expected: float, owner: Any, timer: tuple[int, int] = (0, 0)) -> int:
        """Give it a kernel; return its number, for `withdraw`.

        Parameters
        ----------
        kernel : array of words
            See `Prepared.row`. What its arguments are at must stay until `reap` has told of it. `NOTHING` launches
            nothing: its end is that of what the stream was given by others.
        expected : float
            Seconds that it takes, as far as that is known; 0 where not.
        owner : object
            What `reap` calls it.
        timer : (int, int)
            Handles of events to record before and behind it; 0 for none.
        """
        number, self._expected = self._pushed, expected
        row = self._rows[number & (SLOTS - 1)]
        row[: CONFIGURATION + 2] = kernel[: CONFIGURATION + 2]
        row[HANDLE_WORD] = self._handle
        row[EXPECTED // 8] = int(min(expected, 1e6) * 1e9) or MARK_NS
        row[BEFORE // 8], last = timer
        row[EVENT // 8] = last or self._event(number & (SLOTS - 1))
        row[STATE // 8] = READY
        self._owners.append(owner)
        self._pushed = number + 1
        self._lines.publish(self.address + PUSHED, number + 1)
        return number

    def launched(self, number: int) -> bool:
        """Wait until a kernel was launched, which takes microseconds; return False where it is held back."""
        words, begun = self._words, clock.monotonic()
        while int(words[LAUNCHED // 8]) <= number:
            waited = clock.monotonic() - begun
            held = words[AHEAD // 8] >= AHEAD_NS and words[LAUNCHED // 8] - words[ENDED // 8] >= 2
            if held or waited > SOON:
                return False
            if waited > SPIN_FOR:
                clock.sleep(SPIN_FOR)
        return True

    def withdrawable(self, number: int) -> bool:
        """Return whether a kernel was not launched yet."""
        return int(self._rows[number & (SLOTS - 1), STATE // 8]) == READY

    def follows(self, number: int, owner: Any) -> bool:
        """Return whether kernels of others, before this one of `owner`, have not ended yet."""
        return any(other is not owner for other in itertools.islice(self._owners, number - self._reaped))

    def _event(self, slot: int) -> int:
        """Return the handle of a row's own event."""
        if not self._events[slot]:
            first = slot - slot % MADE
            self._events[first : first + MADE] = self._lines.new_events(MADE)
        return int(self._events[slot])

    def withdraw(self, number: int) -> bool:
        """Withdraw a kernel; return False where it was launched. `reap` tells of it all the same, with status -1."""
        at = self.address + ROWS + ROW * (number & (SLOTS - 1))
        return self._lines.withdraw(at)

    def reap(self) -> list[tuple[Any, int, float, float]]:
        """Return what has ended since the last call: owner, the driver's status, and when it was launched and ended.

        Times are those of `warpwell._os.clock`. An end is noticed behind several short kernels at a time.
        """
        ended = int(self._words[ENDED // 8])
        found = []
        while self._reaped < ended:
            first = self._reaped & (SLOTS - 1)
            rows = self._rows[first : first + ended - self._reaped, STATE // 8 :].tolist()
            self._reaped += len(rows)
            for state, _, _, _, _, status, begun, at, _ in rows:
                status = -1 if state == WITHDRAWN else status
                found.append((self._owners.popleft(), status, 1e-9 * begun, 1e-9 * at))
        return found


class Lines:
    """Lines, and the thread that serves them.

    Parameters
    ----------
    functions : sequence of int
        Addresses of cuLaunchKernelEx, cuEventRecord and cuEventQuery, or of what stands for them.
    new_events : callable
        ``new_events(count)`` returns handles of events without a time.
    new_stream : callable
        ``new_stream(priority)`` returns a stream.
    enter : callable
        Called first in the thread.
    """

    def __init__(
        self,
        functions: Sequence[int],
        new_events: Callable[[int], Sequence[int]],
        new_stream: Callable[[int], Any],
        enter: Callable[[], None],
    ) -> None:
        self.new_events = new_events
        self._new_stream = new_stream
        self._state = np.zeros((TABLE + 8 * MOST) // 8, np.int64)
        self._address = int(self._state.ctypes.data)
        libc = ctypes.CDLL(None)
        places = (LAUNCH, RECORD, QUERY, READ, WRITE, PPOLL)
        addresses = (*functions, *map(address_of, (libc.read, libc.write, libc.ppoll)))
        for place, address in zip(places, addresses, strict=True):
            self._state[place // 8] = address
        self._handles = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2)]
        for bell, handle in zip((WORKER, WAITER), self._handles, strict=True):
            self._state[(bell + HANDLE) // 8] = handle
            self._state[(bell + POLLED) // 8] = handle | 1 << 32  # POLLIN
        self._lines: list[Line] = []
        self._idle: dict[int, list[Line]] = {}
        self._kinds: dict[Line, int] = {}
        self._publish, self._wake = _holding(publish, 3), _holding(wake, 1)
        self._withdraw, self._nudge = _holding(withdraw, 1), _holding(nudge, 1)
        serves = _releasing(serve)
        self._watch = _releasing(watch)

        def run() -> None:
            enter()
            serves(self._address, 0, 0, 0, 0, 0)

        self._thread = threading.Thread(target=run, name="warpwell-lines", daemon=True)
        self._thread.start()

    def take(self, priority: int) -> Line | None:
        """Return an empty line, to be given back with `give`; None where all are taken."""
        idle = self._idle.setdefault(priority, [])
        if idle:
            return idle.pop()
        if len(self._lines) == MOST:  # one of another priority is better than none
            return next((others.pop() for others in self._idle.values() if others), None)
        line = Line(self, self._new_stream(priority))
        self._kinds[line] = priority
        self._state[TABLE // 8 + len(self._lines)] = line.address
        self._lines.append(line)
        self.publish(self._address + LINES, len(self._lines))
        return line

    def give(self, line: Line) -> None:
        """Give back a line that is empty."""
        self._idle[self._kinds[line]].append(line)

    def publish(self, address: int, value: int) -> None:
        """Store a word behind what was stored before, for the thread, and wake it."""
        self._publish(address, value, self._address)

    def withdraw(self, row: int) -> bool:
        """Withdraw the row at an address; return whether it had not been launched."""
        return bool(self._withdraw(row) == READY)

    @property
    def news(self) -> int:
        """How often ends were noted."""
        return int(self._state[NEWS // 8])

    @property
    def woken(self) -> bool:
        """Whether `wake` was called since `rest`."""
        return bool(self._state[WOKEN // 8])

    def rest(self) -> None:
        """Forget that `wake` was called."""
        self._state[WOKEN // 8] = 0

    def wake(self) -> None:
        """Make `watch` return, now or when it is next called (any thread)."""
        if not self._state[WOKEN // 8]:
            self._wake(self._address)

    def nudge(self) -> None:
        """Let `news` change: there is something to look at (any thread)."""
        self._nudge(self._address)

    def watch(self, seen: int, until: float, spin: float, soonest: float = 0.0) -> None:
        """Return when `news` is not `seen`, after `wake`, or at a time of `warpwell._os.clock`.

        It looks without a pause for `spin` seconds, and then sleeps. It holds no interpreter lock. Before the time
        `soonest` only `wake` ends it.
        """
        until, soonest = (int(min(at, clock.monotonic() + 1e6) * 1e9) for at in (until, soonest))
        self._watch(self._address, seen, until, int(spin * 1e9), soonest, 0)

    def stop(self) -> None:
        """Let the thread end, which launches no more. It is not waited for: a lost GPU's driver may not answer."""
        if self._handles:
            self.publish(self._address + STOP, 1)

    def close(self) -> None:
        """End the thread; what runs is not waited for."""
        if not self._handles:
            return
        self.stop()
        self._thread.join(5.0)
        if self._thread.is_alive():
            return  # a driver that does not answer; its words stay
        handles, self._handles = self._handles, []
        for handle in handles:
            os.close(handle)


def address_of(function: Any) -> int:
    """Return the address of a function of a C library, or of a callback."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _holding(function: Any, given: int) -> Any:
    """Return a native function as Python calls it, with its first arguments, without giving up the interpreter lock.

    Who gives it up may get it back as late as other threads' whole turns are over (5 ms each).
    """
    return ctypes.PYFUNCTYPE(*(ctypes.c_int64,) * (1 + given))(function.address)


def _releasing(function: Any) -> Any:
    return ctypes.CFUNCTYPE(*(ctypes.c_int64,) * 7)(function.address)
