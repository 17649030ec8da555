"""`Lane`: the thread of one stream on an agent; `DeferredCalls`: the thread for replies without a lane."""

from __future__ import annotations

import contextlib
import queue
import threading
import traceback
from collections.abc import Callable
from typing import Any, Protocol

from ..transport.transport import Transport
from .memory import SkippedError
from .protocol import ACKNOWLEDGE_BYTES, ACKNOWLEDGE_CALLS, Op
from .runtime import Runtime
from .timed_queue import TimedQueue

HELPER, CLOSING = -1, -2
"""Numbers of lanes without a stream: for single calls (`AgentState.helper` reuses the lane), and for closing blocks of
peers."""

_MIN_NAP_SECONDS, _MAX_NAP_SECONDS = 20e-6, 1e-3
"""Interval between two polls of marks, in seconds."""


class LaneOwner(Protocol):
    """The interface of `AgentState` for its own parts."""

    runtime: Runtime
    transport: Transport
    stopped: bool
    idle: list[Lane]

    def helper(self) -> Lane:
        """Return a lane for one call that belongs to no stream."""

    def later(self, call: Callable[[], None], mark: Any = None) -> None:
        """Make a deferred call."""

    def send(self, op: Op, *operands: Any, to: int | None = None) -> None:
        """Send a message."""

    def failed(self, stream: int, sequence: int, call: Any, reply: int, error: BaseException) -> None:
        """Report a failed call to the program."""

    def refuse(self, reply: int, call: Any, error: BaseException, *, earlier: bool = False) -> None:
        """Answer a request with a failure."""


class Lane:
    """The thread of a stream. A call that waits or fails does not affect calls of other lanes.

    Parameters
    ----------
    agent : LaneOwner
    number : int
        Number of the stream, `HELPER` or `CLOSING`.
    priority : int
    """

    def __init__(self, agent: LaneOwner, number: int, priority: int = 0) -> None:
        self.number = number
        self.priority = priority
        self.calls = 0
        self.doing = ""
        self._agent = agent
        self._stream: Any = None
        self._made = False
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._pending: list[None] = []  # one entry for each call that has not completed; changed without a lock
        self._acknowledged = 0
        self._bytes = 0
        self.thread = threading.Thread(target=self._work, name=f"warpwell lane {number}", daemon=True)
        self.thread.start()

    @property
    def stream(self) -> Any:
        """The stream of the device, created at its first use (in the thread of the lane)."""
        if not self._made:
            self._stream = self._agent.runtime.stream(self.priority)
            self._made = True
        return self._stream

    @property
    def waiting(self) -> int:
        """Number of calls that have not started."""
        return self._queue.qsize()

    @property
    def is_idle(self) -> bool:
        """Whether no call waits or runs, and the device has completed the work of the stream."""
        runtime = self._agent.runtime
        return not self._pending and (not self._made or runtime.reached(runtime.mark(self._stream, False)))

    def put(self, sequence: int, call: Any, reply: int, cost: int, run: Callable[[Lane], None]) -> None:
        """Queue a call.

        Parameters
        ----------
        sequence : int
        call : str or object with a name
            Name of the call in errors, or the object that is launched.
        reply : int
            Request that receives a failure; 0: the next synchronization reports it.
        cost : int
            Size of the payload in bytes.
        run : callable
            ``run(lane)``.
        """
        self._pending.append(None)
        self._queue.put((sequence, call, reply, cost, run))

    def end(self) -> None:
        """Let the thread exit after the queued calls."""
        self._queue.put(None)

    def _work(self) -> None:
        agent = self._agent
        agent.runtime.enter()
        while True:
            item = self._queue.get()
            if item is None:
                break
            sequence, call, reply, cost, run = item
            self.doing = call
            try:
                run(self)
            except SkippedError as skipped:
                if reply:
                    agent.refuse(reply, call, skipped.cause, earlier=True)
            except BaseException as error:  # any exception: the caller handles it
                agent.failed(self.number, sequence, call, reply, error)
            self.doing = ""
            # an idle lane must not hold the memory that its last call used
            item = run = call = None
            self.calls += 1
            self._pending.pop()
            if self.number >= 0:
                self._count(sequence, cost)
            elif self.number == HELPER:
                agent.idle.append(self)
        if self._made:
            agent.runtime.close_stream(self._stream)

    def _count(self, sequence: int, cost: int) -> None:
        self._bytes += cost
        if sequence - self._acknowledged >= ACKNOWLEDGE_CALLS or self._bytes >= ACKNOWLEDGE_BYTES:
            self._acknowledged, self._bytes = sequence, 0
            self._agent.send(Op.DONE, self.number, sequence)


class DeferredCalls:
    """Makes calls in order. A call with a mark waits until the device has reached the mark.

    Marks are polled in turn and do not block each other, because a mark may depend on the reply for another mark.
    """

    def __init__(self, agent: LaneOwner) -> None:
        self._agent = agent
        self._queue: TimedQueue[Any] = TimedQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()  # finalizers call `put`, too

    def put(self, call: Callable[[], None], mark: Any = None) -> None:
        """Make a call, after `mark` if it is given."""
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="warpwell deferred calls", daemon=True)
                    self._thread.start()
        self._queue.put((call, mark))

    def end(self) -> None:
        """End the thread."""
        self._queue.put(None)

    def _work(self) -> None:
        runtime: Runtime | None = None
        marks: list[tuple[Callable[[], None], Any]] = []
        nap = _MIN_NAP_SECONDS
        while True:
            with contextlib.suppress(queue.Empty):
                item = self._queue.get(timeout=nap if marks else None)
                if item is None:
                    return
                marks.append(item)
                nap = _MIN_NAP_SECONDS
            if runtime is not self._agent.runtime:  # a device has joined
                runtime = self._agent.runtime
                runtime.enter()
            waiting = []
            for call, mark in marks:
                if self._agent.stopped:
                    continue  # the program has exited
                if mark is None or self._reached(mark):
                    try:
                        call()
                    except Exception:  # later calls must still run
                        traceback.print_exc()
                else:
                    waiting.append((call, mark))
            nap = _MIN_NAP_SECONDS if len(waiting) < len(marks) else min(2 * nap, _MAX_NAP_SECONDS)
            marks = waiting
            item = call = mark = None  # type: ignore[assignment]  # or an idle thread would keep the last call's memory

    def _reached(self, mark: Any) -> bool:
        try:
            return self._agent.runtime.reached(mark)
        except Exception:  # the lanes of a failed device report its failure
            return True
