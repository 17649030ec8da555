"""`LaunchQueues`: a native thread that launches kernels, in order in each stream, and records their ends.

A queue is a stream and a ring of rows. The scheduler writes a row and publishes it, without a driver call and without
releasing the interpreter lock, so other Python threads cannot delay the scheduler. The native thread launches rows
while less than `AHEAD_NS` of work are on the GPU, records one event for several rows, queries the oldest event, and
wakes a waiting thread. Rows that are not launched yet may be withdrawn.

Every wait is bounded: a lost wake-up costs `NAP_NS`. While kernels run, the thread polls for `SPIN_NS` without a pause,
and then less and less often; without work it sleeps.
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
"""Rows of a queue: the maximum number of pushed kernels that have not ended."""

MAX_QUEUES = 128
"""Maximum number of queues."""

AHEAD_NS = 2_000_000
"""Limit of expected work of a queue on the GPU, in nanoseconds. Beyond it, only a second kernel is launched ahead."""

MARK_NS = 40_000
"""Expected nanoseconds of kernels after which an event is recorded. The last kernel always has an event.

An event costs the GPU nothing, and this thread 1.3 us to record and 1.7 us to query (H200). A word that the stream
writes would cost the GPU 2 us."""

MAX_SUBMIT_ROWS = 32
"""Maximum number of rows of a queue that are launched before the thread continues with the next queue."""

EVENT_BATCH = 64
"""Number of events of a queue that are created together, when the first one is needed."""

SPIN_NS = 2_000_000
"""Spin time of the thread without news, in nanoseconds."""

LAUNCH_TIMEOUT_SECONDS, LAUNCH_SPIN_SECONDS = 1.0, 50e-6
"""Maximum time that `LaunchQueue.launched` waits (on a busy machine), and its spin time."""

NAP_NS = 100_000_000
"""Maximum length of a sleep in nanoseconds."""

NOT_READY = 600
"""CUDA_ERROR_NOT_READY."""

# Offsets of the thread's state fields, in bytes
STOP, LINE_COUNT, NEWS, WOKEN, LAUNCH, RECORD, QUERY, READ, WRITE, PPOLL = (8 * k for k in range(10))
WORKER, WAITER = 128, 192
"""Offsets of two futexes: the first wakes the native thread, the second a caller of `watch`."""
TABLE = 256
"""Offset of the table of queue addresses."""

# Fields of a bell
ASLEEP, HANDLE, POLLED, SECONDS, NANOS, BUFFER = (8 * k for k in range(6))

# Fields of a queue
STREAM, PUSHED, LAUNCHED, ENDED, AHEAD, UNMARKED, SINCE, ERROR = (8 * k for k in range(8))
ROWS = 64

# Fields of a row, after its CUlaunchConfig
FUNCTION, ARGUMENTS, STATE, EXPECTED, BEFORE, EVENT, MARKED, STATUS, BEGUN_AT, ENDED_AT = (8 * k for k in range(7, 17))
ROW = 8 * 18
CONFIGURATION = 7
"""Size of CUlaunchConfig in 64-bit fields."""
HANDLE_WORD = 4
"""Index of its field with the stream."""

READY, STARTED, WITHDRAWN = 1, 2, 3

NOTHING = np.zeros(CONFIGURATION + 2, np.int64)
"""An empty launch, without a kernel."""


@device
def status_of(result):
    """Return a C int that was returned in a register of 64 bits."""
    return result & 0xFFFFFFFF


@device
def row_of(queue, number):
    """Return the address of a row."""
    return queue + ROWS + ROW * (number & (SLOTS - 1))


@device
def wake_sleeper(state, bell):
    """Wake the thread that sleeps on a bell, or is about to.

    Both sides exchange `ASLEEP` and never store or load it. A load may be reordered before an earlier store, even
    across an acquire-release fence, so each side would miss the change of the other.
    """
    if exchange(bell + ASLEEP, 0, SYSTEM) != 0:
        store_relaxed(bell + BUFFER, 1, SYSTEM)
        call_native(load_relaxed(state + WRITE, SYSTEM), load_relaxed(bell + HANDLE, SYSTEM), bell + BUFFER, 8, 0, 0, 0)


@device
def park(state, bell, nanos):
    """Sleep until the bell rings or a time has passed. The caller must have set `ASLEEP` and then checked again."""
    store_relaxed(bell + SECONDS, nanos // 1_000_000_000, SYSTEM)
    store_relaxed(bell + NANOS, nanos % 1_000_000_000, SYSTEM)
    rang = call_native(load_relaxed(state + PPOLL, SYSTEM), bell + POLLED, 1, bell + SECONDS, 0, 0, 0)
    if status_of(rang) == 1:
        read, handle = load_relaxed(state + READ, SYSTEM), load_relaxed(bell + HANDLE, SYSTEM)
        call_native(read, handle, bell + BUFFER + 8, 8, 0, 0, 0)
    exchange(bell + ASLEEP, 0, SYSTEM)


@device
def mark(state, queue):
    """Record the event of the last launched row."""
    row = row_of(queue, load_relaxed(queue + UNMARKED, SYSTEM) - 1)
    record = load_relaxed(state + RECORD, SYSTEM)
    event, stream = load_relaxed(row + EVENT, SYSTEM), load_relaxed(queue + STREAM, SYSTEM)
    status = status_of(call_native(record, event, stream, 0, 0, 0, 0))
    if status != 0:
        store_relaxed(queue + ERROR, status, SYSTEM)
    store_relaxed(row + MARKED, 1, SYSTEM)
    store_relaxed(queue + UNMARKED, 0, SYSTEM)
    store_relaxed(queue + SINCE, 0, SYSTEM)


@device
def launch(state, queue, row):
    """Launch the kernel of a row. A row without a function represents earlier operations in the stream."""
    stream = load_relaxed(queue + STREAM, SYSTEM)
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
def submit_pending(state, queue):
    """Launch rows of a queue, up to the limit of work on the GPU; return their number."""
    launched = load_relaxed(queue + LAUNCHED, SYSTEM)
    ended = load_relaxed(queue + ENDED, SYSTEM)
    moved = 0
    while moved < MAX_SUBMIT_ROWS and launched < load_acquire(queue + PUSHED, SYSTEM):
        ahead = load_relaxed(queue + AHEAD, SYSTEM)
        if ahead >= AHEAD_NS and launched - ended >= 2:
            break
        row = row_of(queue, launched)
        store_relaxed(row + MARKED, 0, SYSTEM)
        launched += 1
        moved += 1
        if compare_exchange(row + STATE, READY, STARTED, SYSTEM) == READY:
            if launch(state, queue, row) == 0:
                expected = load_relaxed(row + EXPECTED, SYSTEM)
                since = load_relaxed(queue + SINCE, SYSTEM) + expected
                store_relaxed(queue + AHEAD, ahead + expected, SYSTEM)
                store_relaxed(queue + SINCE, since, SYSTEM)
                store_relaxed(queue + UNMARKED, launched, SYSTEM)
                if since >= MARK_NS or load_relaxed(row + BEFORE, SYSTEM) != 0:
                    mark(state, queue)
        store_release(queue + LAUNCHED, launched, SYSTEM)
    if load_relaxed(queue + UNMARKED, SYSTEM) != 0 and launched == load_acquire(queue + PUSHED, SYSTEM):
        mark(state, queue)
    return moved


@device
def on_gpu(row):
    """Return True if a row was launched: not withdrawn, and accepted by the driver."""
    return load_relaxed(row + STATE, SYSTEM) == STARTED and load_relaxed(row + STATUS, SYSTEM) == 0


@device
def poll_completions(state, queue):
    """Record the ends of a queue's kernels; return their number."""
    ended, launched = load_relaxed(queue + ENDED, SYSTEM), load_relaxed(queue + LAUNCHED, SYSTEM)
    first = ended
    while ended < launched:
        last = ended
        while last < launched and load_relaxed(row_of(queue, last) + MARKED, SYSTEM) == 0:
            last += 1
        if last == launched:
            # No row is covered by an event: rows that never ran end in order.
            while ended < launched and not on_gpu(row_of(queue, ended)):
                ended += 1
            break
        status = load_relaxed(queue + ERROR, SYSTEM)
        if status == 0:
            event = load_relaxed(row_of(queue, last) + EVENT, SYSTEM)
            status = status_of(call_native(load_relaxed(state + QUERY, SYSTEM), event, 0, 0, 0, 0, 0))
        if status == NOT_READY:
            break
        if status != 0:
            store_relaxed(queue + ERROR, status, SYSTEM)
        now = clock_ns()
        while ended <= last:
            row = row_of(queue, ended)
            store_relaxed(row + ENDED_AT, now, SYSTEM)
            if on_gpu(row):
                ahead = load_relaxed(queue + AHEAD, SYSTEM) - load_relaxed(row + EXPECTED, SYSTEM)
                store_relaxed(queue + AHEAD, ahead, SYSTEM)
                store_relaxed(row + STATUS, status, SYSTEM)
            ended += 1
    if ended != first:
        store_release(queue + ENDED, ended, SYSTEM)
        fetch_add(state + NEWS, 1, SYSTEM)
        wake_sleeper(state, state + WAITER)
    return ended - first


@device
def step(state):
    """Launch and poll each queue once; return twice the number of moved rows, plus one if a queue is not empty."""
    moved = left = 0
    for k in range(load_acquire(state + LINE_COUNT, SYSTEM)):
        queue = load_relaxed(state + TABLE + 8 * k, SYSTEM)
        if load_acquire(queue + PUSHED, SYSTEM) != load_relaxed(queue + ENDED, SYSTEM):
            moved += submit_pending(state, queue) + poll_completions(state, queue)
            if load_acquire(queue + PUSHED, SYSTEM) != load_relaxed(queue + ENDED, SYSTEM):
                left = 1
    return 2 * moved + left


@native
def serve(state, _a, _b, _c, _d, _e):
    """Launch and poll until `STOP` is set: the body of the native thread."""
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
                park(state, bell, min(1_000_000, 20_000 + (now - since) // 500))
            else:
                park(state, bell, NAP_NS)
    return 0


@native
def watch(state, last_news, until, spin, soonest, _e):
    """Return when `NEWS` differs from `last_news`, when `WOKEN` is set, or at a time (`clock_ns`).

    `NEWS` is not read before the time `soonest`, so that several ends are handled together.
    """
    bell = state + WAITER
    since = clock_ns()
    attempt = 0
    while clock_ns() < soonest and load_acquire(state + WOKEN, SYSTEM) == 0:
        backoff(attempt & 15)
        attempt += 1
    while load_acquire(state + NEWS, SYSTEM) == last_news and load_acquire(state + WOKEN, SYSTEM) == 0:
        now = clock_ns()
        if now >= until:
            break
        if now - since < spin:
            backoff(attempt & 15)
            attempt += 1
            continue
        exchange(bell + ASLEEP, 1, SYSTEM)
        fence(SYSTEM)
        if load_acquire(state + NEWS, SYSTEM) == last_news and load_acquire(state + WOKEN, SYSTEM) == 0:
            park(state, bell, min(until - now, NAP_NS))
    exchange(bell + ASLEEP, 0, SYSTEM)
    return 0


@native
def publish(address, value, state, bell, _d, _e):
    """Store a word after all earlier stores, and wake the thread of a bell."""
    store_release(address, value, SYSTEM)
    fence(SYSTEM)
    wake_sleeper(state, bell)
    return 0


@native
def nudge(state, _a, _b, _c, _d, _e):
    """Make `watch` return because of news from another source than the thread."""
    fetch_add(state + NEWS, 1, SYSTEM)
    wake_sleeper(state, state + WAITER)
    return 0


@native
def withdraw(row, _a, _b, _c, _d, _e):
    """Withdraw a row that was not launched; return its previous state."""
    return compare_exchange(row + STATE, READY, WITHDRAWN, SYSTEM)


class LaunchQueue:
    """A stream whose kernels the native thread launches, in order. One thread at a time uses it.

    Attributes
    ----------
    stream : object
        A stream with a `handle`.
    """

    def __init__(self, owner: LaunchQueues, stream: Any) -> None:
        self.stream = stream
        self._owner = owner
        self._fields = np.zeros((ROWS + ROW * SLOTS) // 8, np.int64)
        self._rows = self._fields[ROWS // 8 :].reshape(SLOTS, ROW // 8)
        self.address = int(self._fields.ctypes.data)
        self._handle = int(stream.handle)
        self._fields[STREAM // 8] = self._handle
        self._pushed = 0
        self._polled = 0
        self._owners: deque[Any] = deque()
        self._expected = 0.0
        self._events = np.zeros(SLOTS, np.int64)

    @property
    def empty(self) -> bool:
        """Whether `poll_completions` has returned all pushed kernels."""
        return self._pushed == self._polled

    @property
    def polled(self) -> int:
        """Number of kernels that `poll_completions` has returned, which equals the number of the next kernel."""
        return self._polled

    @property
    def room(self) -> int:
        """Number of free rows."""
        return SLOTS - (self._pushed - self._polled)

    @property
    def seconds(self) -> float:
        """Expected seconds of all kernels that have not ended, estimated from the last kernel."""
        return self._expected * (self._pushed - int(self._fields[ENDED // 8]))

    def push(self, kernel: NDArray[np.int64], expected: float, owner: Any, timer: tuple[int, int] = (0, 0)) -> int:
        """Push a kernel to the queue; return its number, for `withdraw`.

        Parameters
        ----------
        kernel : array of int64
            See `Prepared.row`. The memory of the arguments must stay valid until `poll_completions` has returned the
            kernel. `NOTHING` has no kernel, and ends with the earlier operations of the stream.
        expected : float
            Expected seconds; 0 if unknown.
        owner : object
            Object by which `poll_completions` identifies the kernel.
        timer : (int, int)
            Handles of events to record before and after the kernel; 0 for none.
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
        self._owner.publish(self.address + PUSHED, number + 1)
        return number

    def launched(self, number: int) -> bool:
        """Wait until a kernel is launched, which takes microseconds; return False if it is held back."""
        fields, start = self._fields, clock.monotonic()
        while int(fields[LAUNCHED // 8]) <= number:
            waited = clock.monotonic() - start
            held = fields[AHEAD // 8] >= AHEAD_NS and fields[LAUNCHED // 8] - fields[ENDED // 8] >= 2
            if held or waited > LAUNCH_TIMEOUT_SECONDS:
                return False
            if waited > LAUNCH_SPIN_SECONDS:
                clock.sleep(LAUNCH_SPIN_SECONDS)
        return True

    def withdrawable(self, number: int) -> bool:
        """Return True if a kernel is not launched yet."""
        return int(self._rows[number & (SLOTS - 1), STATE // 8]) == READY

    def follows(self, number: int, owner: Any) -> bool:
        """Return True if earlier kernels of other owners have not ended."""
        return any(earlier is not owner for earlier in itertools.islice(self._owners, number - self._polled))

    def _event(self, slot: int) -> int:
        """Return the handle of a row's own event."""
        if not self._events[slot]:
            first = slot - slot % EVENT_BATCH
            self._events[first : first + EVENT_BATCH] = self._owner.new_events(EVENT_BATCH)
        return int(self._events[slot])

    def withdraw(self, number: int) -> bool:
        """Withdraw a kernel, which ends with status -1; return False if it was launched."""
        return self._owner.withdraw(self.address + ROWS + ROW * (number & (SLOTS - 1)))

    def poll_completions(self) -> list[tuple[Any, int, float, float]]:
        """Return the kernels that have ended since the last call: owner, driver status, launch time, and end time.

        Times are of `warpwell._os.clock`. Several short kernels share one end time.
        """
        ended = int(self._fields[ENDED // 8])
        entries = []
        while self._polled < ended:
            first = self._polled & (SLOTS - 1)
            rows = self._rows[first : first + ended - self._polled, STATE // 8 :].tolist()
            self._polled += len(rows)
            for state, _, _, _, _, status, start, end, _ in rows:
                status = -1 if state == WITHDRAWN else status
                entries.append((self._owners.popleft(), status, 1e-9 * start, 1e-9 * end))
        return entries


class LaunchQueues:
    """All queues of a GPU, and the thread that serves them.

    Parameters
    ----------
    functions : sequence of int
        Addresses of cuLaunchKernelEx, cuEventRecord and cuEventQuery, or of substitutes.
    new_events : callable
        ``new_events(count)`` returns handles of events without timing.
    new_stream : callable
        ``new_stream(priority)`` returns a stream.
    enter : callable
        The thread calls this first.
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
        self._state = np.zeros((TABLE + 8 * MAX_QUEUES) // 8, np.int64)
        self._address = int(self._state.ctypes.data)
        libc = ctypes.CDLL(None)
        fields = (LAUNCH, RECORD, QUERY, READ, WRITE, PPOLL)
        addresses = (*functions, *map(address_of, (libc.read, libc.write, libc.ppoll)))
        for field, address in zip(fields, addresses, strict=True):
            self._state[field // 8] = address
        self._handles = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2)]
        for bell, handle in zip((WORKER, WAITER), self._handles, strict=True):
            self._state[(bell + HANDLE) // 8] = handle
            self._state[(bell + POLLED) // 8] = handle | 1 << 32  # POLLIN
        self._created: list[LaunchQueue] = []
        self._idle: dict[int, list[LaunchQueue]] = {}
        self._priorities: dict[LaunchQueue, int] = {}
        self._publish, self._withdraw, self._nudge = _holding(publish, 4), _holding(withdraw, 1), _holding(nudge, 1)
        serves = _releasing(serve)
        self._watch = _releasing(watch)

        def run() -> None:
            enter()
            serves(self._address, 0, 0, 0, 0, 0)

        self._thread = threading.Thread(target=run, name="warpwell-launch-queues", daemon=True)
        self._thread.start()

    def take(self, priority: int) -> LaunchQueue | None:
        """Return an empty queue, to be returned with `put`; None if all are in use."""
        idle = self._idle.setdefault(priority, [])
        if idle:
            return idle.pop()
        if len(self._created) == MAX_QUEUES:  # a queue of another priority is better than no queue
            return next((available.pop() for available in self._idle.values() if available), None)
        queue = LaunchQueue(self, self._new_stream(priority))
        self._priorities[queue] = priority
        self._state[TABLE // 8 + len(self._created)] = queue.address
        self._created.append(queue)
        self.publish(self._address + LINE_COUNT, len(self._created))
        return queue

    def put(self, queue: LaunchQueue) -> None:
        """Return an empty queue."""
        self._idle[self._priorities[queue]].append(queue)

    def publish(self, address: int, value: int) -> None:
        """Store a word for the thread after all earlier stores, and wake the thread."""
        self._publish(address, value, self._address, self._address + WORKER)

    def withdraw(self, row: int) -> bool:
        """Withdraw the row at an address; return False if it was launched."""
        return bool(self._withdraw(row) == READY)

    @property
    def news(self) -> int:
        """Counter of recorded ends and of `nudge`."""
        return int(self._state[NEWS // 8])

    @property
    def woken(self) -> bool:
        """Whether `wake` was called since `clear_wake`."""
        return bool(self._state[WOKEN // 8])

    def clear_wake(self) -> None:
        """Reset `woken`."""
        self._state[WOKEN // 8] = 0

    def wake(self) -> None:
        """Make `watch` return, now or on its next call (any thread)."""
        if not self._state[WOKEN // 8]:
            self._publish(self._address + WOKEN, 1, self._address, self._address + WAITER)

    def nudge(self) -> None:
        """Increment `news`, so that `watch` returns (any thread)."""
        self._nudge(self._address)

    def watch(self, last_news: int, until: float, spin: float, soonest: float = 0.0) -> None:
        """Return when `news` differs from `last_news`, after `wake`, or at time `until` of `warpwell._os.clock`.

        This spins for `spin` seconds and then sleeps, without the interpreter lock. Before the time `soonest`, only
        `wake` makes it return.
        """
        until, soonest = (int(min(time, clock.monotonic() + 1e6) * 1e9) for time in (until, soonest))
        self._watch(self._address, last_news, until, int(spin * 1e9), soonest, 0)

    def stop(self) -> None:
        """Stop the thread without waiting, because the driver of a lost GPU may not return."""
        if self._handles:
            self.publish(self._address + STOP, 1)

    def close(self) -> None:
        """End the thread. It does not wait for running kernels."""
        if not self._handles:
            return
        self.stop()
        self._thread.join(5.0)
        if self._thread.is_alive():
            return  # the driver does not return; the state that the thread uses stays valid
        handles, self._handles = self._handles, []
        for handle in handles:
            os.close(handle)


def address_of(function: Any) -> int:
    """Return the address of a function of a C library, or of a callback."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _holding(function: Any, arguments: int) -> Any:
    """Return a callable for a native function with this number of arguments, which keeps the interpreter lock.

    A thread that releases the lock may wait for the switch interval (5 ms) of each other thread until it has the lock
    again.
    """
    return ctypes.PYFUNCTYPE(*(ctypes.c_int64,) * (1 + arguments))(function.address)


def _releasing(function: Any) -> Any:
    return ctypes.CFUNCTYPE(*(ctypes.c_int64,) * 7)(function.address)
