"""`NearServer`: serves devices of other hosts to programs of this one: a worker to each client, whose ring it mirrors.

Threads: one that listens, the communicator's that receives (`heard`), and for each client one that reads its ring and
alone sends, and one that waits for bytes to land. Who receives never sends and never waits.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...driver import DEVICE_UNAVAILABLE, Client, ClientListener, Served, refuse
from ...errors import ClosedError, DeviceLostError, PoolError, StallError
from ..agent.protocol import Op, pack
from ..launch.reservation import WAIT
from ..transport.bulk import Transfer
from ..transport.tags import Tags
from ..transport.transport import Transport
from .ends import GONE, IN, STOPPED, WRONG, Kind, Near, Relay

_LOOK = 0.5
_OPENED_SECONDS = 120.0
_END_SECONDS = 6.0
_MOVE_SECONDS = 60.0
_OUT_OF_MEMORY, _UNKNOWN = 2, 999


@dataclass
class Remote(Served):
    """A device of another host.

    Attributes
    ----------
    rank : int
        Its agent's.
    refusal : (int, str) or None
        Code and line with which it said that it cannot be served.
    lost : str
        Why the agent is gone; empty: it is not.
    asked : bool
    """

    rank: int = 0
    refusal: tuple[int, str] | None = None
    lost: str = ""
    asked: bool = False


class NearServer(ClientListener):
    """Serves the devices of agents on other hosts: its sockets are there at once, and are answered from `begin` on.

    Parameters
    ----------
    devices : mapping
        Rank and name of the agent, by the device's number for clients.
    folder : Path
        That of the sockets.
    relay : Path
        The native part.
    """

    transport: Transport

    def __init__(self, devices: Mapping[int, tuple[int, str]], folder: Path, relay: Path) -> None:
        super().__init__()
        self.relay, self.tags = Relay(relay), Tags()
        self.remotes = {k: Remote(name, k, rank=rank) for k, (rank, name) in devices.items()}
        self.served: dict[int, NearClient] = {}
        self._numbers = itertools.count(1)
        for remote in self.remotes.values():
            self.listen(folder, remote)

    def begin(self, transport: Transport) -> None:
        """Answer clients over this process's transport; `heard` is given what it receives of CUDA."""
        self.transport = transport
        self.start()
        transport.on_lost(self._lost)
        for remote in self.remotes.values():  # all at one time, and before somebody waits for it
            self._ask(remote)

    # -- the listening thread ----------------------------------------------------------------------------------

    @property
    def serving(self) -> int:
        return len(self.served)

    def facts(self, client: Client) -> bytes | None:
        remote = client.served
        assert isinstance(remote, Remote)
        if remote.facts is not None:  # those of a lost agent, too: its device keeps its number
            return remote.facts
        if remote.lost:
            client.refuse(DEVICE_UNAVAILABLE, f"{remote.device} is lost: {remote.lost}")
        elif remote.refusal is not None:
            client.refuse(*remote.refusal)
            remote.refusal = None  # who asks again learns whether it is still so
        else:
            client.is_waiting = client.greeted = True
            if not remote.asked:
                threading.Thread(target=self._ask, args=(remote,), name="warpwell cuda facts", daemon=True).start()
        return None

    def tick(self) -> None:
        for remote in self.remotes.values():
            if remote.facts is not None or remote.refusal is not None or remote.lost:
                self.answer_waiting(remote)

    def open(self, client: Client, output: int, errors: int) -> bool:
        remote = client.served
        assert isinstance(remote, Remote)
        if remote.lost:
            client.refuse(DEVICE_UNAVAILABLE, f"{remote.device} is lost: {remote.lost}")
            return True
        pidfd = None if client.pidfd is None else os.dup(client.pidfd)
        served = NearClient(self, next(self._numbers), remote, client.line.dup(), pidfd)
        self.served[served.number] = served
        served.thread.start()
        return True

    def _ask(self, remote: Remote) -> None:
        remote.asked = True
        with contextlib.suppress(PoolError, ClosedError, StallError):
            self.transport.send(remote.rank, pack(int(Op.CUDA), int(Kind.ASK), remote.ordinal, self._protocol))

    # -- the receiving thread ----------------------------------------------------------------------------------

    def heard(self, peer: int, kind: int, *operands: Any) -> None:
        """Take a message of an agent."""
        if kind == Kind.KNOWN:
            self._known(*operands)
            return
        client = self.served.get(operands[0])
        if client is None or client.remote.rank != peer:
            return  # it has ended
        if kind == Kind.OPENED:
            client.answer = operands[1:]
            client.opened.set()
        elif kind == Kind.BACK:
            client.back(*operands[1:])
        elif kind == Kind.ENDED:
            client.landing.put(None)

    def _known(self, ordinal: int, facts: bytes | None, code: int, why: str) -> None:
        remote = self.remotes[ordinal]
        remote.asked = False
        if facts is None:
            remote.refusal = (code, why)
        else:
            try:
                remote.facts = self.relay.facts(facts, False)
            except PoolError as error:
                remote.refusal = (DEVICE_UNAVAILABLE, str(error))
        self.ring()

    def _lost(self, peer: int, reason: str) -> None:
        for remote in self.remotes.values():
            if remote.rank == peer:
                remote.lost = remote.lost or reason
        for client in list(self.served.values()):
            if client.remote.rank == peer:
                client.stop()
        self.ring()

    def close(self) -> None:
        """Listen no more, and end all clients."""
        super().close()
        clients = list(self.served.values())
        for client in clients:
            client.stop()
        for client in clients:
            client.thread.join(_END_SECONDS)


class NearClient:
    """One client of one remote device."""

    def __init__(self, server: NearServer, number: int, remote: Remote, line: socket.socket, pidfd: int | None) -> None:
        self.number, self.remote = number, remote
        self.answer: tuple[Any, ...] = ()
        self.opened, self.ended = threading.Event(), threading.Event()
        self.landing: queue.SimpleQueue[tuple[int, int, int] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="warpwell cuda ring", daemon=True)
        self._server, self._transport = server, server.transport
        self._line, self._pidfd = line, -1 if pidfd is None else pidfd
        self._near: Near | None = None
        self._moves: dict[int, Transfer] = {}  # the last copy of each place
        self._stopped = False

    def stop(self) -> None:
        """End it without more ado: nothing comes of its worker any more."""
        self._stopped = True
        if self._near is not None:
            self._near.stop()

    # -- the reading thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            near = self._open()
            if near is not None:
                threading.Thread(target=self._land, args=(near,), name="warpwell cuda bytes", daemon=True).start()
                self._mirror(near)
        except (PoolError, ClosedError, StallError, OSError):
            pass  # the agent is gone, or takes nothing any more: the client's connection says so
        finally:
            self._end()

    def _tell(self, kind: Kind, *operands: Any) -> None:
        self._transport.send(self.remote.rank, pack(int(Op.CUDA), int(kind), self.number, *operands))

    def _open(self) -> Near | None:
        self._tell(Kind.OPEN, self.remote.ordinal, self._server._protocol)
        until = time.monotonic() + _OPENED_SECONDS + float(os.environ.get(WAIT, 0))
        while not self.opened.wait(0.05):
            late = time.monotonic() > until
            if late or self.remote.lost or self._stopped or self._server.relay.gone(self._line.fileno(), self._pidfd):
                why = f"is lost: {self.remote.lost}" if self.remote.lost else "has opened no context"
                refuse(self._line, DEVICE_UNAVAILABLE, f"{self.remote.device} {why}")
                return None
        facts, code, why = self.answer
        if facts is None:
            refuse(self._line, code, why)
            return None
        try:
            near = Near(self._server.relay)
        except MemoryError as error:
            refuse(self._line, _OUT_OF_MEMORY, str(error))
            return None
        self._near = near
        try:
            socket.send_fds(self._line, [self._server.relay.facts(facts, True)], near.descriptors)
        finally:
            for descriptor in near.descriptors:
                os.close(descriptor)
        return near

    def _mirror(self, near: Near) -> None:
        while not self._stopped:
            code, block = near.take(self._line.fileno(), self._pidfd, _LOOK)
            if code > 0:
                start, end, data, stops = block
                self._tell(Kind.SHIP, start, end, data, tuple(self._begin(near, *stop) for stop in stops))
            elif code == WRONG:
                near.sticky(_UNKNOWN)
                print(
                    f"warpwell: the CUDA client of device {self.remote.ordinal} ends: its ring is wrong",
                    file=sys.stderr,
                    flush=True,
                )
                return
            elif code == GONE:
                self._tell(Kind.CLOSE)
                self.ended.wait(_END_SECONDS)  # the client may wait for the device's memory
                return
            elif code == STOPPED:
                return

    def _begin(self, near: Near, end: int, place: int, use: int, nbytes: int, way: int) -> tuple[Any, ...]:
        """Begin to move the bytes of an entry; return it with its payload."""
        self._settle(place)
        here, there = self._transport.rank, self.remote.rank
        payload: Any = 0
        if way == IN and nbytes <= near.relay.inline:
            payload = near.read(place, nbytes)
        elif nbytes > near.relay.inline:
            source, destination = (here, there) if way == IN else (there, here)
            payload = self._server.tags.new(source, destination)
            move = self._transport.put if way == IN else self._transport.get
            transfer = self._moves[place] = move(there, payload, near.region(place, nbytes))
            self._server.tags.begun(source, destination, transfer)
        return end, place, use, nbytes, way, payload

    def _settle(self, place: int) -> None:
        """Wait until the last copy of a place lets go of it; the other side has all of it, so that is soon."""
        before = self._moves.pop(place, None)
        until = time.monotonic() + _MOVE_SECONDS
        while before is not None and not before.done:
            if time.monotonic() > until or self._stopped:
                raise StallError(f"a copy of {self.remote.device} does not end", seconds=_MOVE_SECONDS)
            time.sleep(5e-5)

    def _end(self) -> None:
        self._stopped = True
        self._server.served.pop(self.number, None)
        if not self.remote.lost:
            with contextlib.suppress(PoolError, ClosedError, StallError):
                self._tell(Kind.CLOSE)  # whatever the reason, its worker must end; one that has does not hear it
        self.landing.put(None)
        for transfer in self._moves.values():
            if not transfer.done:
                transfer.cancel()
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)
        self._line.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)

    # -- the receiving thread ----------------------------------------------------------------------------------

    def back(self, answers: bytes, places: tuple[Any, ...]) -> None:
        """Store answers; places whose bytes are still on their way are left to `_land`."""
        near = self._near
        if near is None or self._stopped:
            return
        if answers and not near.apply(answers):
            self.stop()
            return
        for place, use, result, payload in places:
            if isinstance(payload, int):
                self.landing.put((place, use, result))
                continue
            if payload is not None:
                near.write(place, payload)
            elif result and (given_up := self._moves.get(place)) is not None:
                given_up.cancel()  # if it was to come here, it does not
            near.done(place, use, result)

    # -- the landing thread ------------------------------------------------------------------------------------

    def _land(self, near: Near) -> None:
        """Wait for bytes that the far end has begun to send, in its order, and for the end behind them."""
        while (landed := self.landing.get()) is not None:
            place, use, result = landed
            transfer = self._moves.get(place)
            try:
                if transfer is not None:
                    transfer.wait(transfer.chunks, _MOVE_SECONDS)
            except (DeviceLostError, PoolError, StallError):
                break
            near.done(place, use, result)
        self.stop()
        self.ended.set()
