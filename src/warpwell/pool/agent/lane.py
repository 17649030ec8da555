"""`Lane`: the thread of one stream on an agent, which runs the stream's calls in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .memory import GivenUpError, SkippedError
from .protocol import ACKNOWLEDGE_BYTES, ACKNOWLEDGE_CALLS, Op

if TYPE_CHECKING:
    from .agent import Agent


class Lane:
    """A stream. A call that waits or fails holds up or spoils nothing but this lane's own calls.

    Parameters
    ----------
    agent : Agent
    number : int
        The stream's; -1 for a helper, whose calls nobody counts.
    priority : int
    """

    def __init__(self, agent: Agent, number: int, priority: int = 0) -> None:
        self.number = number
        self.priority = priority
        self.calls = 0
        self.doing = ""
        self._agent = agent
        self._stream: Any = None
        self._made = False
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._told = 0
        self._bytes = 0
        self.thread = threading.Thread(target=self._work, name=f"warpwell lane {number}", daemon=True)
        self.thread.start()

    @property
    def stream(self) -> Any:
        """The device's stream, made when the lane first needs it (in its thread)."""
        if not self._made:
            self._stream = self._agent.runtime.stream(self.priority)
            self._made = True
        return self._stream

    @property
    def waiting(self) -> int:
        """Calls that have not begun."""
        return self._queue.qsize()

    def put(self, sequence: int, call: Any, reply: int, cost: int, run: Callable[..., None], *arguments: Any) -> None:
        """Queue a call.

        Parameters
        ----------
        sequence : int
        call : str or object with a name
            What it is called in errors; an object stands for a launch.
        reply : int
            Whose failure it is: 0 for one that is kept and told at the next synchronization.
        cost : int
            Bytes that came with it.
        run : callable
            ``run(lane, *arguments)``.
        """
        self._queue.put((sequence, call, reply, cost, run, arguments))

    def end(self) -> None:
        """Let the thread end behind the calls so far."""
        self._queue.put(None)

    def _work(self) -> None:
        agent = self._agent
        agent.runtime.enter()
        while True:
            item = self._queue.get()
            if item is None:
                break
            sequence, call, reply, cost, run, arguments = item
            self.doing = call
            try:
                run(self, *arguments)
            except SkippedError as skipped:
                if reply:
                    agent.refuse(reply, call, skipped.cause, earlier=True)
            except GivenUpError as given_up:
                if reply:
                    agent.refuse(reply, call, given_up, earlier=True)
            except BaseException as error:  # the caller's to know, whatever it is
                agent.failed(self.number, sequence, call, reply, error)
            self.doing = ""
            # an idle lane must not hold the memory that its last call used
            item = run = arguments = call = None
            self.calls += 1
            if self.number >= 0:
                self._count(sequence, cost)
            else:
                agent.idle.append(self)
        if self._made:
            agent.runtime.close_stream(self._stream)

    def _count(self, sequence: int, cost: int) -> None:
        self._bytes += cost
        if sequence - self._told >= ACKNOWLEDGE_CALLS or self._bytes >= ACKNOWLEDGE_BYTES:
            self._told, self._bytes = sequence, 0
            self._agent.tell(Op.DONE, self.number, sequence)
