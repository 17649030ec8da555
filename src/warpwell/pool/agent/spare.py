"""`SpareDevice`: a device that an agent has only while the device has joined the program (``--allocate use``)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ... import errors
from ..launch.reservation import NOTE_SECONDS, POLL_SECONDS, Claim, Reservation
from .copies import MappedArray
from .memory import BufferView
from .protocol import Op
from .runtime import Runtime
from .state import HANDLERS, AgentState, handles

LANE_SECONDS = 2.0
"""Time in which the threads of streams without calls must end."""


class SpareDevice:
    """The device of an agent that joins and leaves.

    The runtime is opened when the device first joins, and is kept: compiled kernels and libraries refer to its context.

    Parameters
    ----------
    target : {"cpu", "cuda"}
    gpu : str or None
        UUID of the GPU, or None for the CPU.
    open_runtime : callable
        Returns the runtime.
    note : callable
        Called with a line about the position in the queue of jobs that wait for GPUs.
    """

    def __init__(
        self, target: str, gpu: str | None, open_runtime: Callable[[], Runtime], note: Callable[[str], None] = print
    ) -> None:
        self.note = note
        self._target, self._gpu, self._open = target, gpu, open_runtime
        self._joined = False
        self._runtime: Runtime | None = None
        self._claim: Claim | None = None

    def info(self) -> dict[str, Any]:
        """Return the properties that the agent reports in addition to those of its runtime."""
        unknown = {"target": self._target, "memory": None} if self._runtime is None else {}
        return {**unknown, "joined": self._joined, "gpu": self._gpu}

    def join(self, agent: AgentState) -> None:
        """Claim and open the device.

        Raises
        ------
        AgentError
            Another job has claimed the GPU.
        """
        if self._gpu is not None and not self._joined:
            self._claim = Claim(self._gpu)
        try:
            self._runtime = agent.runtime = self._runtime or self._open()
            agent.runtime.enter()
            self._joined = True
        except BaseException:
            self.release()
            raise

    def leave(self, agent: AgentState) -> None:
        """Close all streams, remove all code, return unused memory, and release the claim.

        Raises
        ------
        PoolError
            The device holds objects, which the message names.
        """
        if not self._joined:
            return
        if held := _holdings(agent):
            raise errors.PoolError(held)
        lanes = [agent.lanes.pop(number) for number in list(agent.lanes)]
        for lane in lanes:
            lane.end()
        for lane in lanes:  # the next stream with this number must not get the old stream's messages
            lane.thread.join(LANE_SECONDS)
        for objects in (agent.handles, agent.codes, agent.events, agent.signals):
            objects.clear()
        with contextlib.suppress(Exception):  # the streams and the code are closed, so the device cannot stay
            agent.runtime.trim()
        self.release()

    def release(self) -> None:
        """Release the claim without closing anything (idempotent)."""
        self._joined = False
        if self._claim is not None:
            self._claim.free()
            self._claim = None


def _holdings(agent: AgentState) -> str:
    """Return the objects that prevent a device from leaving as text; empty if nothing does."""
    objects = [v for v in agent.handles.values() if not isinstance(v, MappedArray)]
    buffers = sum(isinstance(v, BufferView) for v in objects)
    shared = agent.sharing.count()
    counts = {
        "buffers": buffers,
        "objects": len(objects) - buffers,
        "busy streams": sum(not lane.is_idle for lane in agent.lanes.values()) + len(agent.helpers) - len(agent.idle),
        "copies": len(agent.incoming) + len(agent.outgoing) + len(agent.bulk) + len(agent.answers),
        "blocks that other devices have open": shared["held"] + shared["ending"],
    }
    return ", ".join(f"{name} ({count})" for name, count in counts.items() if count)


@handles(Op.JOIN)
def join(agent: AgentState, _s: int, _q: int, reply: int) -> None:
    """Open the device. Messages wait until it is open: the program sends no calls before that."""
    try:
        agent.spare.join(agent)
    except Exception as error:
        agent.refuse(reply, "join", error)
    else:
        HANDLERS[Op.INFO](agent, 0, 0, reply)


@handles(Op.LEAVE)
def leave(agent: AgentState, _s: int, _q: int, reply: int) -> None:
    """Release the device, unless it holds objects."""
    agent.answer(reply, "leave", lambda: agent.spare.leave(agent))


@handles(Op.RESERVE)
def reserve(agent: AgentState, _s: int, _q: int, reply: int, gpus: Sequence[str], count: int, seconds: float) -> None:
    """Reserve GPUs of this host for agents that will join, until the request is cancelled."""
    released, start = threading.Event(), time.monotonic()
    agent.reservations[reply] = released

    def note(text: str) -> None:
        if time.monotonic() >= start + NOTE_SECONDS:  # a short wait is not reported
            agent.spare.note(text)

    def run() -> None:
        reservation = Reservation(gpus, count, seconds, note)
        try:
            while not (reserved := reservation.poll()):
                if released.wait(POLL_SECONDS):
                    return
            agent.send(Op.REPLY, reply, reserved)
            released.wait()
        except errors.AgentError:
            agent.refuse(reply, "reservation", errors.StallError(reservation.shortage(), seconds=seconds))
        except Exception as error:
            agent.refuse(reply, "reservation", error)
        finally:
            reservation.close()
            agent.reservations.pop(reply, None)

    threading.Thread(target=run, name="warpwell reservation", daemon=True).start()
