"""`Spares`: agents, whose devices may join and leave (``--allocate use``); `Joining`: devices that join for a lease."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .. import errors
from .._os import uninterrupted
from .agent.protocol import Op
from .caller import Caller
from .device import Device
from .reply import Reply

JOIN_SECONDS = 120.0
"""Time in which an agent must open its device."""

LEAVE_SECONDS = 10.0
"""Time in which an agent must answer whether its device has left."""

Fits = Callable[[str, str, int | None], bool]
"""``fits(target, host, memory)``: whether a device suits a lease; its memory in bytes is None if it is not known."""


class Spares:
    """The agents of a pool. Their devices join and leave, unless the pool is fixed.

    Parameters
    ----------
    caller : Caller
    infos : dict
        Properties of each agent, by rank.
    add : callable
        ``add(devices)`` adds devices to the pool.

    Attributes
    ----------
    is_fixed : bool
        Whether all devices have joined at the start, and cannot leave.
    used_ranks : set of int
        Ranks of the agents whose devices have joined or are joining.
    """

    def __init__(self, caller: Caller, infos: dict[int, dict[str, Any]], add: Callable[[list[Device]], None]) -> None:
        self.caller = caller
        self.infos = infos
        self.add = add
        self.is_fixed = all(info.get("joined", True) for info in infos.values())
        self.used_ranks = set(infos if self.is_fixed else ())
        for index, rank in enumerate(infos):
            connection = caller.connections[rank]
            connection.index, connection.label = index, f"device {index}"

    def fits(self, rank: int, fits: Fits) -> bool:
        """Return True if an agent is not lost and its device suits a lease."""
        info = self.infos[rank]
        return self.caller.connections[rank].lost is None and fits(info["target"], info["host"], info["memory"])

    def unused(self) -> list[int]:
        """Return the ranks of the agents whose devices have not joined."""
        return [rank for rank in self.infos if rank not in self.used_ranks]

    @property
    def lost(self) -> int:
        """The number of lost agents."""
        return sum(self.caller.connections[rank].lost is not None for rank in self.infos)

    @staticmethod
    def is_busy(device: Device) -> bool:
        """Return True if calls of a device wait or run. Unlike in `leave`, the device is not lost after a timeout.

        Raises
        ------
        StallError
            The agent did not answer: a function that it runs may hold the GIL.
        DeviceLostError
            The device was lost.
        """
        connection = device.connection
        reply = connection.request(None, Op.INFO, Reply)
        info = reply.get(f"the properties of {connection.label}", LEAVE_SECONDS)
        return any(lane["doing"] or lane["waiting"] for lane in info["lanes"].values())

    def leave(self, device: Device) -> str | None:
        """Let a device leave, for which this thread has a lease; return the objects that prevent this, if any.

        Raises
        ------
        DeviceLostError
            The device was lost.
        """
        connection = device.connection
        with connection.lock:  # no call of another thread is sent before the answer, and none after it
            reply = connection.request(None, Op.LEAVE, Reply)
            try:
                reply.wait(f"{connection.label} to leave", LEAVE_SECONDS)
            except errors.StallError:
                connection.lost = "it did not answer the request to leave"
                raise
            if isinstance(reply.failure, errors.RemoteError):
                return str(reply.failure.__cause__)
            connection.check()
            connection.lost = "it has left the pool"
            self.caller.reconnect(connection.rank)
            self.used_ranks.discard(connection.rank)
            return None


class _Reservation(NamedTuple):
    """A request to an agent to reserve GPUs of its host, with the rank of each GPU's agent."""

    rank: int
    reply: Reply
    host: str
    gpus: dict[str, int]


class Joining:
    """The devices that join for one lease: all or none. Used by one thread.

    Hosts with enough spare agents reserve GPUs at the same time, and the first answer counts. If no host has enough,
    hosts reserve in the order of their names, so that two jobs cannot wait for each other.

    Parameters
    ----------
    spares : Spares
    fits : Fits
    changed : callable
        Called when the result of `poll` may have changed; must not block.
    """

    def __init__(self, spares: Spares, fits: Fits, changed: Callable[[], None]) -> None:
        self._spares, self._fits, self._changed = spares, fits, changed
        self._count = 0
        self._candidates: set[int] = set()
        self._ranks: list[int] = []  # ranks of the reserved agents
        self._requested: list[_Reservation] = []
        self._held: list[_Reservation] = []

    @property
    def is_waiting(self) -> bool:
        """Whether a host has not answered."""
        return bool(self._requested)

    @property
    def reserved(self) -> int:
        """The number of devices that are reserved or are joining."""
        return len(self._ranks)

    def poll(self, count: int, candidates: Sequence[int], seconds: float) -> bool:
        """Return True if `count` devices can join; if not, let hosts reserve GPUs. Does not wait.

        Parameters
        ----------
        count : int
        candidates : sequence of int
            Ranks of spare agents.
        seconds : float
            Time for which hosts wait for GPUs that other jobs use.

        Raises
        ------
        StallError
            The GPUs were not free in time.
        """
        if count != self._count or not self._candidates.issuperset(candidates):
            self.cancel()
            self._count, self._candidates = count, set(candidates)
        with uninterrupted():
            failure = self._receive()
            if len(self._ranks) < count and not self._requested and failure is None:
                self._reserve(count - len(self._ranks), candidates, seconds)
        if failure is not None and not self._requested:
            raise failure
        return len(self._ranks) == count

    def _receive(self) -> BaseException | None:
        """Use the GPUs of the first host that has reserved them; return the failure of a host that could not."""
        failure: BaseException | None = None
        for request in [r for r in self._requested if r.reply.done]:
            self._requested.remove(request)
            if request.reply.failure is None:
                self._held.append(request)
                self._use([request.gpus[uuid] for uuid in request.reply.value])
                self._withdraw(self._requested)
                return None
            self._withdraw([request])
            if isinstance(request.reply.failure, errors.RemoteError):  # otherwise the agent is lost
                failure = request.reply.failure.__cause__ or request.reply.failure
        return failure

    def _reserve(self, missing: int, candidates: Sequence[int], seconds: float) -> None:
        hosts: dict[str, list[int]] = defaultdict(list)
        for rank in candidates:
            hosts[self._spares.infos[rank]["host"]].append(rank)
        for request in self._held:
            hosts.pop(request.host, None)
        if sum(map(len, hosts.values())) < missing:
            return  # the lease waits for devices that have joined
        names = sorted(hosts)
        for name in [n for n in names if len(hosts[n]) >= missing] or names[:1]:
            gpus = {gpu: rank for rank in hosts[name] if (gpu := self._spares.infos[rank]["gpu"]) is not None}
            if not gpus:  # CPUs need no reservation
                self._use(hosts[name][:missing])
                break
            rank, count = hosts[name][0], min(missing, len(gpus))
            with contextlib.suppress(errors.DeviceLostError):  # the next poll takes another agent
                connection = self._spares.caller.connections[rank]
                reply = connection.request(None, Op.RESERVE, Reply, list(gpus), count, seconds)
                self._requested.append(_Reservation(rank, reply, name, gpus))
                reply.when_set(lambda _: self._changed())

    def _use(self, ranks: list[int]) -> None:
        self._ranks += ranks
        self._spares.used_ranks.update(ranks)

    def join(self) -> None:
        """Let the devices of the reserved agents join.

        Raises
        ------
        RemoteError
            A device could not be opened.
        DeviceLostError
            An agent was lost.
        """
        caller, infos = self._spares.caller, self._spares.infos
        connections = [caller.connections[rank] for rank in self._ranks]
        is_joined = False
        try:
            replies = [(c, c.request(None, Op.JOIN, Reply)) for c in connections]
            for connection, reply in replies:
                infos[connection.rank] = reply.get(f"{connection.label} to join", JOIN_SECONDS)
            for request in self._held:  # a lost agent ends its reservation, so another job could get the GPUs first
                connection = caller.connections[request.rank]
                connection.request(None, Op.INFO, Reply).get(f"the reservation of {connection.label}", JOIN_SECONDS)
            if all(self._spares.fits(rank, self._fits) for rank in self._ranks):  # now their memory is known
                with uninterrupted():
                    devices = [Device(caller, c, c.index, infos[c.rank]) for c in connections]
                    self._ranks.clear()  # before `add`: a later lease must not count these devices as joining
                    self._spares.add(devices)
                    is_joined = True
        finally:
            with uninterrupted():
                for connection in () if is_joined else connections:  # after JOIN, and without objects
                    with contextlib.suppress(errors.WarpwellError):
                        connection.request(None, Op.LEAVE, Reply)
            self.cancel()

    def cancel(self) -> None:
        """Release all reservations; agents that have joined have claims of their own."""
        with uninterrupted():
            self._spares.used_ranks.difference_update(self._ranks)  # before another lease gets the GPUs
            self._ranks.clear()
            self._withdraw(self._requested)
            self._withdraw(self._held)
            self._count = 0

    def _withdraw(self, requests: list[_Reservation]) -> None:
        while requests:
            request, caller = requests.pop(), self._spares.caller
            caller.replies.pop(request.reply.number, None)
            with contextlib.suppress(errors.WarpwellError):  # the current connection: the device may have left
                caller.connections[request.rank].send(Op.CANCEL, request.reply.number)
