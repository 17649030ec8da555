"""`Agent`: serves one device to one application: receives calls and hands them to the lanes of their streams."""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from ... import errors
from ..copy import copies, exchange, lent, transfer
from ..copy.sharing import Sharing
from ..transport.milestone import Milestone
from ..transport.tags import Tags
from ..transport.transport import Transfer, Transport
from . import agent_calls, parts
from .code import Loaded
from .lane import Lane
from .memory import GivenUpError, Missing, View
from .outbox import Outbox
from .protocol import Op, pack, pack_failure, unpack, unpack_dtype
from .runtime import Runtime

GRACE = 2.0
"""Seconds that lanes have for what was queued when the application said goodbye."""

_NAMES = {"await": "await_", "global": "set_global"}


class Agent:
    """One device of a pool.

    Its main loop never waits for anything but messages. Whatever takes time is done by a lane (the thread of one
    stream) or by the outbox.

    Parameters
    ----------
    transport : Transport
    runtime : Runtime
        What executes.
    application : int
        Rank of whoever is served.
    copy_in, copy_out : callable, optional
        How bulk data move between the transport and device memory; see `transfer`.
    """

    def __init__(
        self,
        transport: Transport,
        runtime: Runtime,
        *,
        application: int = 0,
        copy_in: Callable[..., None] = transfer.copy_in,
        copy_out: Callable[..., None] = transfer.copy_out,
    ) -> None:
        self.transport = transport
        self.runtime = runtime
        self.application = application
        self.copy_in = copy_in
        self.copy_out = copy_out
        self.stopped = False
        self.handles: dict[int, Any] = {}
        self.codes: dict[str, Loaded] = {}
        self.events: dict[int, Milestone] = {}
        self.signals: dict[int, Milestone] = {}
        self.halves: dict[int, copies.Half] = {}
        self.bulk: dict[int, copies.Half] = {}
        self.answers: dict[int, list[Transfer]] = {}
        self.tags = Tags(1)
        self.over: collections.OrderedDict[int, None] = collections.OrderedDict()
        self.sharing = Sharing(self)
        self.counts: dict[str, int] = {}
        self._lanes: dict[int, Lane] = {}
        self._helpers: list[Lane] = []
        self.idle: list[Lane] = []
        self._outbox = Outbox(self)
        self._begun = time.time()
        self._operations = {int(op): self._operation(op.name.lower()) for op in Op if op < Op.DONE}

    def _operation(self, name: str) -> Callable[..., None]:
        own = getattr(self, f"_{name}", None)
        if own is not None:
            return own  # type: ignore[no-any-return]
        function = _NAMES.get(name, name)
        where = next(module for module in (lent, exchange, parts, agent_calls) if hasattr(module, function))
        return functools.partial(getattr(where, function), self)

    def run(self) -> None:
        """Serve until the application says goodbye or is gone."""
        self.runtime.enter()
        self.transport.on_lost(self._peer_lost)
        try:
            while not self.stopped:
                got = self.transport.receive(0.5)
                if got is None:
                    if self.application in self.transport.lost():
                        break
                    continue
                peer, message = got
                op, *operands = unpack(message)
                self._dispatch(peer, op, operands)
                got = message = operands = None  # type: ignore[assignment]
        except errors.ClosedError:
            pass  # whoever owns the transport ended it
        finally:
            self._end()

    def _dispatch(self, peer: int, op: int, operands: list[Any]) -> None:
        name = Op(op).name
        self.counts[name] = self.counts.get(name, 0) + 1
        if op >= Op.SIGNAL:
            self._from_agent(peer, op, *operands)
            return
        try:
            self._operations[op](*operands)
        except Exception as error:  # a call that cannot even be queued fails as one that ran
            failure = error
            self.later(lambda: self.failed(operands[0], operands[1], name.lower(), 0, failure))

    # -- what lanes use ----------------------------------------------------------------------------------------

    def lane(self, number: int) -> Lane:
        """Return the lane of a stream."""
        lane = self._lanes.get(number)
        if lane is None:
            lane = self._lanes[number] = Lane(self, number)
        return lane

    def helper(self) -> Lane:
        """Return a lane for one call that belongs to no stream of this device."""
        with contextlib.suppress(IndexError):
            return self.idle.pop()
        lane = Lane(self, -1)
        self._helpers.append(lane)
        return lane

    def view(self, handle: int) -> Any:
        """Return what a handle stands for: a `View` or another object, or what says that there is none."""
        found = self.handles.get(handle)
        return Missing(handle) if found is None else found

    def tell(self, op: Op, *operands: Any, to: int | None = None) -> None:
        """Send a message, from a lane or the outbox; nobody is told where the peer is gone."""
        try:
            self.transport.send(self.application if to is None else to, pack(int(op), *operands))
        except (errors.PoolError, errors.ClosedError, errors.StallError):
            pass  # a peer that is gone needs no answer, and its loss is told by the transport

    def failed(self, stream: int, sequence: int, call: Any, reply: int, error: BaseException) -> None:
        """Tell the application of a call that failed."""
        if reply:
            self.refuse(reply, call, error)
        else:
            self.tell(Op.FAILED, stream, sequence, _called(call), pack_failure(error))

    def refuse(self, reply: int, call: Any, error: BaseException, *, earlier: bool = False) -> None:
        """Answer a request with a failure; `earlier` if it was told of before."""
        self.tell(Op.REFUSED, reply, _called(call), pack_failure(error), earlier)

    def alive(self, peer: int | None = None) -> Callable[[], None]:
        """Return what raises where a wait (for something of `peer`) has become pointless."""

        def check() -> None:
            if self.stopped:
                raise errors.ClosedError("the agent ends")
            if peer is not None and peer in self.transport.lost():
                raise _lost(peer, self.transport.lost()[peer])

        return check

    def move(self, way: Callable[..., None], lane: Lane, view: View, peer: int, tag: int, plan: Any,
             started: copies.Started) -> None:  # fmt: skip
        """Have bulk data come or go (`copy_in`, `copy_out`), from a lane."""
        address = view.address(self.runtime, lane.stream)
        if view.nbytes:
            way(self.transport, self.runtime, lane.stream, peer, tag, plan, view.memory.block, address, view.nbytes,
                started)  # fmt: skip

    def later(self, call: Callable[[], None], mark: Any = None) -> None:
        """Have the outbox call something, once the device has come to `mark`."""
        self._outbox.put(call, mark)

    def when_reached(self, milestone: Milestone, call: Callable[[BaseException | None], None]) -> None:
        """Have the outbox call ``call(failure)`` when the device has come to a recorded event."""
        milestone.when_set(lambda m: self.later(lambda: call(m.failure), None if m.failure else m.value))

    # -- at once -----------------------------------------------------------------------------------------------

    def _view(self, _s: int, _q: int, handle: int, base: int, offset: int, dtype: Any, shape: Any,
              strides: Any) -> None:  # fmt: skip
        whole = self.view(base)
        self.handles[handle] = View(whole.memory, whole.offset + offset, unpack_dtype(dtype), shape, strides)

    def _free(self, _s: int, _q: int, handle: int) -> None:
        last = [self.handles.pop(handle, None)]
        self.events.pop(handle, None)
        if isinstance(last[0], agent_calls.Held):  # its own end may take long
            self.helper().put(0, "end of an object", 0, 0, lambda lane: last.clear())

    def _code(self, _s: int, _q: int, key: str, name: str, data: bytes) -> None:
        self.codes[key] = Loaded(name, data)

    def _code_end(self, _s: int, _q: int, key: str) -> None:
        self.codes.pop(key, None)

    def _stream(self, number: int, _q: int, priority: int) -> None:
        self._lanes[number] = Lane(self, number, priority)

    def _stream_end(self, number: int, _q: int) -> None:
        lane = self._lanes.pop(number, None)
        if lane is not None:
            lane.end()

    def _info(self, _s: int, _q: int, reply: int) -> None:
        def answer() -> None:
            try:
                self.tell(Op.REPLY, reply, self.info())
            except Exception as error:  # a device that cannot be asked
                self.refuse(reply, "info", error)

        self.later(answer)

    def info(self) -> dict[str, Any]:
        """Return what there is to know of the device and its agent."""
        free, total = self.runtime.memory_info()
        lanes = {n: {"calls": lane.calls, "waiting": lane.waiting, "doing": _called(lane.doing) if lane.doing else ""}
                 for n, lane in list(self._lanes.items())}  # fmt: skip
        views = [v for v in list(self.handles.values()) if isinstance(v, View)]
        held = {id(v.memory): v.memory.nbytes for v in views if v.memory.block is not None}
        return {
            **self.runtime.info(),
            "target": self.runtime.target,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "python": sys.version.split()[0],
            "seconds": time.time() - self._begun,
            "free": free,
            "total": total,
            "held": sum(held.values()),
            "buffers": len(self.handles),
            "calls": dict(self.counts),
            "lanes": lanes,
            "shared": self.sharing.count(),
            "unreachable": self.sharing.unreachable(),
            "halves": len(self.halves),
            "transport": self.transport.statistics(),
        }

    def _cancel(self, _s: int, _q: int, reply: int) -> None:
        half = self.bulk.get(reply) or self.halves.get(reply)
        if half is not None:
            half.fail(GivenUpError("the application gave the copy up"))
        for answer in self.answers.pop(reply, ()):
            answer.cancel()

    def _goodbye(self, _s: int, _q: int) -> None:
        self.stopped = True

    # -- other agents ------------------------------------------------------------------------------------------

    def half(self, number: int, peer: int) -> copies.Half:
        """Return this side of a copy; whichever of its two messages comes first makes it."""
        half = self.halves.get(number)
        if half is None:
            half = self.halves[number] = copies.Half(peer)
            if (reason := self.transport.lost().get(peer)) is not None:  # nobody else will tell it
                half.fail(_lost(peer, reason))
        return half

    def signal(self, number: int) -> Milestone:
        """Return what stands for an event of another agent here."""
        return self.signals.setdefault(number, Milestone())

    def _from_agent(self, peer: int, op: int, number: int, *operands: Any) -> None:
        if op == Op.SIGNAL:
            signal, failure = self.signal(number), operands[0]
            signal.set() if failure is None else signal.fail(errors.PoolError(f"rank {peer}: {failure[0]}"))
        elif op == Op.RELEASE:
            self.sharing.release(peer, number)
        elif op == Op.RELEASED:
            self.sharing.released(peer, number)
        else:
            exchange.heard(self, peer, op, number, *operands)

    def _peer_lost(self, peer: int, reason: str) -> None:
        for half in list(self.halves.values()):
            if half.peer == peer:
                half.fail(_lost(peer, reason))
        self.sharing.lost(peer)

    def _end(self) -> None:
        until = time.monotonic() + GRACE
        lanes = [*self._lanes.values(), *self._helpers]
        for lane in lanes:
            lane.end()
        for lane in lanes:
            lane.thread.join(max(0.0, until - time.monotonic()))
        self.stopped = True
        self._outbox.end()
        self.handles.clear()


def _lost(peer: int, reason: str) -> errors.DeviceLostError:
    return errors.DeviceLostError(f"rank {peer} is gone: {reason}")


def _called(call: Any) -> str:
    return call if isinstance(call, str) else f"launch of {call.name!r}"


def start(agent: Agent, name: str) -> threading.Thread:
    """Run an agent in a thread of this process."""
    thread = threading.Thread(target=agent.run, name=name, daemon=True)
    thread.start()
    return thread
