"""`FarEnd`: an agent's side of programs on other hosts: an ordinary client of the agent's own workers.

Threads: the agent's that receives (`heard`), and for each client one that waits for its worker and alone sends, and,
where bytes are on their way, one that waits for them. Who receives never sends and never waits.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...driver import DEVICE_UNAVAILABLE, MISMATCH, DriverServer, clients, generate, receive
from ...errors import ClosedError, PoolError, StallError, WarpwellError
from ..agent.protocol import Op, pack
from ..launch.reservation import WAIT
from ..transport.bulk import Transfer
from ..transport.transport import Transport
from .ends import IN, Far, Kind, Relay

_LOOK = 0.5
_OPENED_SECONDS = 120.0
_END_SECONDS = 5.0
_PACKET = 4096


class RefusedError(PoolError):
    """A worker that there is not, with the driver's code for it."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class FarEnd:
    """Serves the device of this agent to the communicator.

    Parameters
    ----------
    transport : Transport
        This process's; `heard` is given what it receives of CUDA.
    ordinal : int
        The device's number for clients.
    make : callable
        Returns the server of the device, which need not listen, and the path of the native part. It may take seconds,
        and is called in a thread. A `WarpwellError` of it is what clients are told.
    """

    def __init__(self, transport: Transport, ordinal: int, make: Callable[[], tuple[DriverServer, Path]]) -> None:
        self.transport, self.ordinal = transport, ordinal
        self.served: dict[tuple[int, int], FarClient] = {}
        self.relay: Relay | None = None
        self._protocol = generate.protocol_hash()
        self._make, self._why = make, ""
        self._server: DriverServer | None = None
        self._made = threading.Event()
        self._closed = False
        self._start(self._begin)
        transport.on_lost(self._lost)

    def heard(self, peer: int, kind: int, *operands: Any) -> None:
        """Take a message of the communicator."""
        if kind == Kind.ASK:
            self._start(self._tell_facts, peer, *operands)
            return
        number = operands[0]
        client = self.served.get((peer, number))
        if kind == Kind.OPEN and client is None:
            client = self.served[peer, number] = FarClient(self, peer, number)
            self._start(client.run, *operands[1:])
        elif client is not None and kind == Kind.SHIP:
            client.ship(*operands[1:])
        elif client is not None and kind == Kind.CLOSE:
            client.close()

    def programs(self) -> list[dict[str, Any]]:
        """Return what the server of the device tells of its programs."""
        return [] if self._server is None else self._server.programs()

    def tell(self, peer: int, kind: Kind, *operands: Any) -> None:
        """Send a message."""
        self.transport.send(peer, pack(int(Op.CUDA), int(kind), *operands))

    def connect(self, protocol: int) -> tuple[socket.socket, bytes]:
        """Return a connection to this device's server and the facts that it told.

        Raises
        ------
        RefusedError
        OSError
        """
        if not self._made.wait(_OPENED_SECONDS) or self._server is None:
            raise RefusedError(DEVICE_UNAVAILABLE, f"host {socket.gethostname()}: {self._why or 'it is not ready'}")
        if protocol != self._protocol:
            why = f"host {socket.gethostname()} has another version of warpwell's driver layer: install the same"
            raise RefusedError(MISMATCH, why)
        line = self._server.connect(self.ordinal)
        try:
            line.settimeout(_OPENED_SECONDS + float(os.environ.get(WAIT, 0)))
            line.send(self.hello(clients.HELLO))
            return line, expect(line, clients.FACTS)[0]
        except BaseException:
            line.close()
            raise

    def hello(self, said: int) -> bytes:
        """Return what a client says of itself."""
        return clients.HELLO_PACKET.pack(said, clients.MAGIC, self._protocol, os.getpid(), self.ordinal)

    def close(self) -> None:
        """End all clients and the server."""
        self._closed = True
        for client in list(self.served.values()):
            client.close()
        if self._made.wait(_OPENED_SECONDS) and self._server is not None:
            self._server.close()

    def _begin(self) -> None:
        try:
            server, path = self._make()
            self.relay, self._server = Relay(path), server
        except (WarpwellError, OSError) as error:
            self._why = str(error)
        self._made.set()

    def _tell_facts(self, peer: int, ordinal: int, protocol: int) -> None:
        with contextlib.suppress(PoolError, ClosedError, StallError):
            try:
                line, facts = self.connect(protocol)
                line.close()
                self.tell(peer, Kind.KNOWN, ordinal, facts, 0, "")
            except RefusedError as refused:
                self.tell(peer, Kind.KNOWN, ordinal, None, refused.code, str(refused))
            except OSError as error:
                self.tell(peer, Kind.KNOWN, ordinal, None, DEVICE_UNAVAILABLE, f"its server does not answer: {error}")

    def _lost(self, peer: int, reason: str) -> None:
        for (rank, _), client in list(self.served.items()):
            if rank == peer:
                client.close()

    @staticmethod
    def _start(work: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=work, args=arguments, name="warpwell cuda far", daemon=True).start()


class FarClient:
    """One worker, for one client on another host."""

    def __init__(self, end: FarEnd, peer: int, number: int) -> None:
        self._end, self._peer, self._number = end, peer, number
        self._lock = threading.Condition()
        self._line: socket.socket | None = None
        self._far: Far | None = None
        self._closing = False
        self._filled = 0
        self._stops: deque[_Stop] = deque()
        self._outs: dict[int, tuple[int, int, int]] = {}  # of each place: use, tag, bytes
        self._puts: dict[int, Transfer] = {}
        self._waiting = False

    def close(self) -> None:
        """Let the worker go; `run` says when it has."""
        with self._lock:
            self._closing = True
            if self._line is not None:
                with contextlib.suppress(OSError):
                    self._line.shutdown(socket.SHUT_WR)
            self._lock.notify_all()

    # -- the thread that sends ---------------------------------------------------------------------------------

    def run(self, ordinal: int, protocol: int) -> None:
        """Open the worker, and send back what it answers until its end."""
        try:
            try:
                facts = self._open(protocol)
            except RefusedError as refused:
                self._end.tell(self._peer, Kind.OPENED, self._number, None, refused.code, str(refused))
                return
            except (OSError, MemoryError) as error:
                why = f"its worker cannot be started: {error}"
                self._end.tell(self._peer, Kind.OPENED, self._number, None, DEVICE_UNAVAILABLE, why)
                return
            self._end.tell(self._peer, Kind.OPENED, self._number, facts, 0, "")
            self._send_back()
            self._end.tell(self._peer, Kind.ENDED, self._number)
        except (PoolError, ClosedError, StallError):
            pass  # nobody is there any more
        finally:
            self._leave()

    def _open(self, protocol: int) -> bytes:
        line, _ = self._end.connect(protocol)
        with self._lock:
            self._line = line
            if self._closing:
                raise RefusedError(DEVICE_UNAVAILABLE, "the client has gone")
        socket.send_fds(line, [self._end.hello(clients.OPEN)], [1, 2])
        facts, descriptors = expect(line, clients.OPENED)
        try:
            assert self._end.relay is not None
            if len(descriptors) != 3:
                raise RefusedError(DEVICE_UNAVAILABLE, "its worker gave no memory")
            self._far = Far(self._end.relay, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        line.setblocking(False)
        return facts

    def _send_back(self) -> None:
        far, line, until = self._far, self._line, None
        assert far is not None and line is not None
        while True:
            answers, places, ended = far.wait(line.fileno(), _LOOK)
            if answers:
                told = tuple((place, use, result, self._done(far, place, use, result)) for place, use, result in places)
                self._end.tell(self._peer, Kind.BACK, self._number, answers, told)
            elif ended:
                return
            if self._closing:
                until = until or time.monotonic() + _END_SECONDS
                if time.monotonic() > until:
                    return

    def _done(self, far: Far, place: int, use: int, result: int) -> int | bytes | None:
        """Begin to send the bytes that a place has for the client; return what the near end is told of them."""
        with self._lock:
            found = self._outs.get(place)
            if found is None or found[0] != use:
                return None
            del self._outs[place]
        _, tag, nbytes = found
        if result:
            return None
        if nbytes <= far.relay.inline:
            return far.read(place, nbytes)
        self._puts[place] = self._end.transport.put(self._peer, tag, far.region(place, nbytes))
        return tag

    def _leave(self) -> None:
        self._end.served.pop((self._peer, self._number), None)
        with self._lock:
            self._closing = True
            moves = [*self._puts.values(), *(stop.transfer for stop in self._stops if stop.transfer is not None)]
            self._stops.clear()
            self._lock.notify_all()
            if self._line is not None:
                self._line.close()
                self._line = None
        for transfer in moves:
            if not transfer.done:
                transfer.cancel()

    # -- the thread that receives ------------------------------------------------------------------------------

    def ship(self, start: int, end: int, block: bytes, stops: tuple[Any, ...]) -> None:
        """Put a block into the ring, and publish it as far as its bytes are there."""
        far = self._far
        with self._lock:
            if far is None or self._closing:
                return
            good = far.copy(start, end, block)
            if good:
                self._filled = end
                self._stops.extend(_Stop(*stop) for stop in stops)
                self._advance(far)
                if self._stops:
                    self._lock.notify_all()
                    if not self._waiting:
                        self._waiting = True
                        self._end._start(self._await_bytes, far)
        if not good:
            self.close()

    def _advance(self, far: Far) -> None:
        """Begin what can be begun, and publish all that is ready. With the lock."""
        head = None
        try:
            for stop in self._stops:
                before = self._puts.get(stop.place)
                if not stop.begun and (before is None or before.done):
                    self._begin(far, stop)
        except (PoolError, ClosedError):
            return  # the peer is gone, and tells so by other ways
        while self._stops and self._stops[0].ready:
            head = self._stops.popleft().end
        if not self._stops:
            head = self._filled
        if head is not None:
            far.publish(head)

    def _begin(self, far: Far, stop: _Stop) -> None:
        if stop.way == IN and isinstance(stop.payload, bytes):
            far.write(stop.place, stop.payload)
        elif stop.way == IN:
            stop.transfer = self._end.transport.get(self._peer, stop.payload, far.region(stop.place, stop.nbytes))
        else:
            self._outs[stop.place] = (stop.use, stop.payload, stop.nbytes)
        stop.begun = True

    # -- the thread that waits for bytes -----------------------------------------------------------------------

    def _await_bytes(self, far: Far) -> None:
        while True:
            with self._lock:
                while not self._stops and not self._closing:
                    self._lock.wait(_LOOK)
                if self._closing:
                    return
                first = self._stops[0]
                awaited = first.transfer or self._puts.get(first.place)
            try:
                if awaited is not None:
                    awaited.wait(awaited.chunks, _LOOK)
                if first.transfer is None:
                    time.sleep(5e-5)  # all of it was sent: its memory is let go of at any moment
            except StallError:
                continue
            except PoolError:
                return  # lost or cancelled: whoever did it ends this client
            with self._lock:
                if not self._closing:
                    self._advance(far)


class _Stop:
    """An entry with bytes, up to which the ring may be published when they are there."""

    __slots__ = ("begun", "end", "nbytes", "payload", "place", "transfer", "use", "way")

    def __init__(self, end: int, place: int, use: int, nbytes: int, way: int, payload: Any) -> None:
        self.end, self.place, self.use, self.nbytes, self.way, self.payload = end, place, use, nbytes, way, payload
        self.begun = False
        self.transfer: Transfer | None = None

    @property
    def ready(self) -> bool:
        """Whether its bytes are where the worker takes them, or may be written there."""
        return self.begun and (self.transfer is None or self.transfer.completed >= self.transfer.chunks)


def expect(line: socket.socket, said: int) -> tuple[bytes, list[int]]:
    """Return a packet of a kind and its descriptors.

    Raises
    ------
    RefusedError
    OSError
    """
    packet, descriptors = receive(line, _PACKET, 3)
    got = int.from_bytes(packet[:4], "little")
    if got == said:
        return packet, descriptors
    for descriptor in descriptors:
        os.close(descriptor)
    if got == clients.REFUSED and len(packet) == clients.REFUSED_PACKET.size:
        _, code, why = clients.REFUSED_PACKET.unpack(packet)
        raise RefusedError(code, why.rstrip(b"\0").decode(errors="replace"))
    raise RefusedError(DEVICE_UNAVAILABLE, "its server gave a wrong answer")
