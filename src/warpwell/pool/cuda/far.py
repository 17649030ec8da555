"""`FarEnd`: serves an agent's device to programs on other hosts, as an ordinary client of the agent's own workers.

Threads: the agent's receiving thread calls `handle`; for each client, one waits for the worker and sends messages, and
one waits for bulk data. The receiving thread never sends and never blocks.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..._settings import settings
from ...driver import DEVICE_UNAVAILABLE, MISMATCH, DriverServer, RefusedError, clients, generate, receive
from ...errors import ClosedError, PoolError, StallError
from ..agent.protocol import Op, pack
from ..launch.reservation import WAIT
from ..transport.bulk import Transfer
from ..transport.milestone import Milestone
from ..transport.transport import Transport
from .ends import IN, Far, Kind, Relay

_POLL_SECONDS = 0.5
_OPEN_SECONDS = 120.0
_CLOSE_SECONDS = 5.0
_PACKET_BYTES = 4096


class FarEnd:
    """Serves the device of this agent to the communicator.

    Parameters
    ----------
    transport : Transport
        The agent's transport. The caller passes received messages of CUDA to `handle`.
    ordinal : int
        Ordinal of the device in the program.
    make : callable
        Returns the server of the device, which need not listen, and the path of the native library. It may take
        seconds, so a thread calls it. Clients are refused with the message of its `WarpwellError`.
    """

    def __init__(self, transport: Transport, ordinal: int, make: Callable[[], tuple[DriverServer, Path]]) -> None:
        self.transport, self.ordinal = transport, ordinal
        self.served: dict[tuple[int, int], FarClient] = {}
        self.relay: Relay | None = None
        self._protocol = generate.protocol_hash()
        self._server = Milestone()
        self._start(self._make_server, make)
        transport.on_lost(self._lost)

    def handle(self, peer: int, kind: int, *operands: Any) -> None:
        """Handle a message of the communicator."""
        if kind == Kind.QUERY:
            self._start(self._send_facts, peer, *operands)
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
        """Return the server's descriptions of its programs."""
        return self._server.value.programs() if self._server.value is not None else []

    def send(self, peer: int, kind: Kind, *operands: Any) -> None:
        """Send a message to the communicator."""
        self.transport.send(peer, pack(int(Op.CUDA), int(kind), *operands))

    def connect(self, protocol: int) -> tuple[socket.socket, bytes]:
        """Return a connection to this device's server and the facts that the server sent.

        Raises
        ------
        RefusedError
            The server does not exist or refuses the client, or the protocols differ.
        OSError
            The connection failed.
        """
        try:
            server: DriverServer = self._server.get("the server of the device", _OPEN_SECONDS)
        except Exception as error:
            raise RefusedError(DEVICE_UNAVAILABLE, f"host {socket.gethostname()}: {error}") from None
        if protocol != self._protocol:
            reason = f"host {socket.gethostname()} has another version of warpwell's driver layer: install the same"
            raise RefusedError(MISMATCH, reason)
        line = server.connect()
        try:
            line.settimeout(_OPEN_SECONDS + float(os.environ.get(WAIT, 0)))
            line.send(self.pack_hello(clients.HELLO))
            return line, receive_packet(line, clients.FACTS)[0]
        except BaseException:
            line.close()
            raise

    def pack_hello(self, kind: int) -> bytes:
        """Return a HELLO or OPEN packet of a client."""
        share = settings.share.encode()
        return clients.HELLO_PACKET.pack(kind, clients.MAGIC, self._protocol, os.getpid(), self.ordinal, share)

    def _make_server(self, make: Callable[[], tuple[DriverServer, Path]]) -> None:
        try:
            server, path = make()
            self.relay = Relay(path)
            self._server.set(server)
        except BaseException as error:
            self._server.fail(error)

    def _send_facts(self, peer: int, ordinal: int, protocol: int) -> None:
        with contextlib.suppress(PoolError, ClosedError, StallError):
            try:
                line, facts = self.connect(protocol)
                line.close()
                self.send(peer, Kind.FACTS, ordinal, facts, 0, "")
            except RefusedError as refused:
                self.send(peer, Kind.FACTS, ordinal, None, refused.code, str(refused))
            except OSError as error:
                self.send(peer, Kind.FACTS, ordinal, None, DEVICE_UNAVAILABLE, f"its server does not reply: {error}")

    def _lost(self, peer: int, reason: str) -> None:
        for (rank, _), client in list(self.served.items()):
            if rank == peer:
                client.close()

    @staticmethod
    def _start(work: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=work, args=arguments, name="warpwell cuda far", daemon=True).start()


class FarClient:
    """A worker that serves a client on another host."""

    def __init__(self, end: FarEnd, peer: int, number: int) -> None:
        self._end, self._peer, self._number = end, peer, number
        self._lock = threading.Condition()
        self._line: socket.socket | None = None
        self._far: Far | None = None
        self._closing = False
        self._copied = 0  # position in the ring up to which blocks were copied
        self._stops: deque[_Stop] = deque()
        self._outs: dict[int, tuple[int, int, int]] = {}  # for each slot: use, tag, bytes
        self._puts: dict[int, Transfer] = {}
        self._has_waiter = False

    def close(self) -> None:
        """Close the connection to the worker; `run` sends ENDED when it has exited."""
        with self._lock:
            self._closing = True
            if self._line is not None:
                with contextlib.suppress(OSError):
                    self._line.shutdown(socket.SHUT_WR)
            self._lock.notify_all()

    # -- the thread that sends ---------------------------------------------------------------------------------

    def run(self, ordinal: int, protocol: int) -> None:
        """Start the worker, and send its answers until it exits."""
        try:
            try:
                reply: tuple[bytes | None, int, str] = (self._open(protocol), 0, "")
            except RefusedError as refused:
                reply = None, refused.code, str(refused)
            except (OSError, MemoryError) as error:
                reply = None, DEVICE_UNAVAILABLE, f"its worker cannot be started: {error}"
            self._end.send(self._peer, Kind.OPENED, self._number, *reply)
            if reply[0] is not None:
                self._send_answers()
                self._end.send(self._peer, Kind.ENDED, self._number)
        except (PoolError, ClosedError, StallError):
            pass  # the communicator is lost
        finally:
            self._release()

    def _open(self, protocol: int) -> bytes:
        line, _ = self._end.connect(protocol)
        with self._lock:
            self._line = line
            if self._closing:
                raise RefusedError(DEVICE_UNAVAILABLE, "the client has exited")
        socket.send_fds(line, [self._end.pack_hello(clients.OPEN)], [1, 2])
        facts, descriptors = receive_packet(line, clients.OPENED)
        try:
            assert self._end.relay is not None
            if len(descriptors) != 3:
                raise RefusedError(DEVICE_UNAVAILABLE, "its worker sent no memory")
            self._far = Far(self._end.relay, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        line.setblocking(False)
        return facts

    def _send_answers(self) -> None:
        far, line, deadline = self._far, self._line, None
        assert far is not None and line is not None
        while True:
            answers, slots, ended = far.wait(line.fileno(), _POLL_SECONDS)
            if answers:
                completed = tuple((*slot, self._payload(far, *slot)) for slot in slots)
                self._end.send(self._peer, Kind.BACK, self._number, answers, completed)
            elif ended:
                return
            if self._closing:
                deadline = deadline or time.monotonic() + _CLOSE_SECONDS
                if time.monotonic() > deadline:
                    return

    def _payload(self, far: Far, slot: int, use: int, result: int) -> int | bytes | None:
        """Return the payload of a completed slot; start to send its data if it is bulk data."""
        with self._lock:
            expected, tag, nbytes = self._outs.get(slot, (None, 0, 0))
            if expected != use:
                return None
            del self._outs[slot]
        if result:
            return None
        if nbytes <= far.relay.inline:
            return far.read(slot, nbytes)
        self._puts[slot] = self._end.transport.put(self._peer, tag, far.region(slot, nbytes))
        return tag

    def _release(self) -> None:
        self._end.served.pop((self._peer, self._number), None)
        with self._lock:
            self._closing = True
            transfers = [*self._puts.values(), *(stop.transfer for stop in self._stops if stop.transfer is not None)]
            self._stops.clear()
            self._lock.notify_all()
            if self._line is not None:
                self._line.close()
                self._line = None
        for transfer in transfers:
            if not transfer.done:
                transfer.cancel()

    # -- the thread that receives ------------------------------------------------------------------------------

    def ship(self, start: int, end: int, block: bytes, stops: tuple[Any, ...]) -> None:
        """Copy a block into the ring, and publish it up to the first stop whose data is missing."""
        far = self._far
        with self._lock:
            if far is None or self._closing:
                return
            if far.copy(start, end, block):
                self._copied = end
                self._stops.extend(_Stop(*stop) for stop in stops)
                self._advance(far)
                if self._stops:
                    self._lock.notify_all()
                    if not self._has_waiter:
                        self._has_waiter = True
                        self._end._start(self._wait_for_data, far)
                return
        self.close()

    def _advance(self, far: Far) -> None:
        """Start the copies whose slots are free, and publish all entries that are ready. The caller holds the lock."""
        try:
            for stop in self._stops:
                previous = self._puts.get(stop.slot)
                if not stop.started and (previous is None or previous.done):
                    self._start_copy(far, stop)
        except (PoolError, ClosedError):
            return  # the communicator is lost, which `on_lost` reports
        head = None
        while self._stops and self._stops[0].ready:
            head = self._stops.popleft().end
        if not self._stops:
            head = self._copied
        if head is not None:
            far.publish(head)

    def _start_copy(self, far: Far, stop: _Stop) -> None:
        if stop.direction == IN and isinstance(stop.payload, bytes):
            far.write(stop.slot, stop.payload)
        elif stop.direction == IN:
            stop.transfer = self._end.transport.get(self._peer, stop.payload, far.region(stop.slot, stop.nbytes))
        else:
            self._outs[stop.slot] = (stop.use, stop.payload, stop.nbytes)
        stop.started = True

    # -- the thread that waits for bulk data -------------------------------------------------------------------

    def _wait_for_data(self, far: Far) -> None:
        while True:
            with self._lock:
                while not self._stops and not self._closing:
                    self._lock.wait(_POLL_SECONDS)
                if self._closing:
                    return
                stop = self._stops[0]
                transfer = stop.transfer or self._puts.get(stop.slot)
            try:
                if transfer is not None:
                    transfer.wait(transfer.chunks, _POLL_SECONDS)
                if stop.transfer is None:
                    time.sleep(5e-5)  # all data was sent, so the transport releases the slot within microseconds
            except StallError:
                continue
            except PoolError:
                return  # a lost or cancelled transfer also closes this client
            with self._lock:
                if not self._closing:
                    self._advance(far)


@dataclass(slots=True)
class _Stop:
    """An entry that moves data. The ring is published up to it when the entry is ready."""

    end: int
    slot: int
    use: int
    nbytes: int
    direction: int
    payload: Any
    started: bool = False
    transfer: Transfer | None = None

    @property
    def ready(self) -> bool:
        """Whether the slot holds the data for the worker, or is free for the worker's data."""
        return self.started and (self.transfer is None or self.transfer.completed >= self.transfer.chunks)


def receive_packet(line: socket.socket, kind: int) -> tuple[bytes, list[int]]:
    """Return a packet of the expected kind and its file descriptors.

    Raises
    ------
    RefusedError
        The server refuses the client, or sent another kind of packet.
    OSError
        The connection failed.
    """
    packet, descriptors = receive(line, _PACKET_BYTES, 3)
    received = int.from_bytes(packet[:4], "little")
    if received == kind:
        return packet, descriptors
    for descriptor in descriptors:
        os.close(descriptor)
    if received == clients.REFUSED and len(packet) == clients.REFUSED_PACKET.size:
        _, code, reason = clients.REFUSED_PACKET.unpack(packet)
        raise RefusedError(code, reason.rstrip(b"\0").decode(errors="replace"))
    raise RefusedError(DEVICE_UNAVAILABLE, "its server sent an unexpected packet")
