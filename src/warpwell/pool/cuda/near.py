"""`NearServer`: serves devices of other hosts to programs of this host, and mirrors the ring of each client.

Threads: for each device, one listens; the communicator's receiving thread calls `handle`; for each client, one reads
the ring and sends messages, and one waits for bulk data. The receiving thread never sends and never blocks.
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
from pathlib import Path
from typing import Any

from ...driver import DEVICE_UNAVAILABLE, Client, ClientListener, RefusedError, refuse
from ...errors import ClosedError, PoolError, StallError
from ..agent.protocol import Op, pack
from ..launch.reservation import WAIT
from ..transport.bulk import Transfer
from ..transport.transport import Tags, Transport
from .ends import EXITED, IN, STOPPED, WRONG, Kind, Near, Relay

_POLL_SECONDS = 0.5
_OPEN_SECONDS = 120.0
_CLOSE_SECONDS = 6.0
_COPY_SECONDS = 60.0
_OUT_OF_MEMORY, _UNKNOWN = 2, 999
"""CUDA_ERROR_OUT_OF_MEMORY and CUDA_ERROR_UNKNOWN."""


class NearServer:
    """Serves the devices of agents on other hosts. Its sockets exist at once; `begin` starts to accept clients.

    Parameters
    ----------
    devices : mapping of int to (int, str)
        Rank and name of each agent, by the ordinal of its device in the program.
    folder : Path
        Folder of the sockets.
    relay : Path
        The native library.
    """

    transport: Transport

    def __init__(self, devices: Mapping[int, tuple[int, str]], folder: Path, relay: Path) -> None:
        self.relay, self.tags = Relay(relay), Tags()
        self.remotes = {ordinal: Remote(self, ordinal, *agent) for ordinal, agent in devices.items()}
        self.served: dict[int, NearClient] = {}
        self.numbers = itertools.count(1)
        for remote in self.remotes.values():
            remote.listen(folder)

    def begin(self, transport: Transport) -> None:
        """Serve clients over `transport`. The caller passes received messages of CUDA to `handle`."""
        self.transport = transport
        for remote in self.remotes.values():
            remote.start()
        transport.on_lost(self._lost)
        for remote in self.remotes.values():  # concurrently, and before a client waits for a reply
            remote.request_facts()

    # -- the receiving thread ----------------------------------------------------------------------------------

    def handle(self, peer: int, kind: int, *operands: Any) -> None:
        """Handle a message of an agent."""
        if kind == Kind.FACTS:
            self.remotes[operands[0]].store_facts(*operands[1:])
            return
        client = self.served.get(operands[0])
        if client is None or client.remote.rank != peer:
            return  # the client has been closed
        if kind == Kind.OPENED:
            client.open_reply = operands[1:]
            client.opened.set()
        elif kind == Kind.BACK:
            client.apply_answers(*operands[1:])
        elif kind == Kind.ENDED:
            client.incoming.put(None)

    def _lost(self, peer: int, reason: str) -> None:
        for remote in self.remotes.values():
            if remote.rank == peer:
                remote.lost = remote.lost or reason
                remote.wake()
        for client in list(self.served.values()):
            if client.remote.rank == peer:
                client.stop()


class Remote(ClientListener):
    """A device of another host.

    Parameters
    ----------
    server : NearServer
    ordinal : int
    rank : int
        Rank of the agent.
    name : str
        Name of the agent.

    Attributes
    ----------
    rank : int
    name : str
    lost : str
        Why the agent is lost, or "".
    """

    def __init__(self, server: NearServer, ordinal: int, rank: int, name: str) -> None:
        super().__init__(ordinal)
        self.rank, self.name, self.lost = rank, name, ""
        self._server = server
        self._refusal: tuple[int, str] | None = None  # error and reason if the agent cannot serve the device
        self._is_requested = False

    def require_agent(self) -> None:
        """Raise `RefusedError` if the agent is lost."""
        if self.lost:
            raise RefusedError(DEVICE_UNAVAILABLE, f"{self.name} is lost: {self.lost}")

    def send(self, kind: Kind, *operands: Any) -> None:
        """Send a message to the agent."""
        self._server.transport.send(self.rank, pack(int(Op.CUDA), int(kind), *operands))

    def request_facts(self) -> None:
        """Request the facts of the device. A lost agent is reported otherwise."""
        self._is_requested = True
        with contextlib.suppress(PoolError, ClosedError, StallError):
            self.send(Kind.QUERY, self.ordinal, self.protocol)

    def store_facts(self, facts: bytes | None, code: int, reason: str) -> None:
        """Store the reply to a request: the facts, or a refusal."""
        self._is_requested = False
        if facts is None:
            self._refusal = (code, reason)
        else:
            try:
                self.known_facts = self._server.relay.facts(facts, False)
            except PoolError as error:
                self._refusal = (DEVICE_UNAVAILABLE, str(error))
        self.wake()

    # -- the listening thread ----------------------------------------------------------------------------------

    @property
    def serving(self) -> int:
        return len(self._server.served)

    def facts(self) -> bytes | None:
        if self.known_facts is not None:  # even if the agent is lost, because its device keeps the ordinal
            return self.known_facts
        self.require_agent()
        if self._refusal is not None:
            refusal, self._refusal = self._refusal, None  # the next client causes another request
            raise RefusedError(*refusal)
        if not self._is_requested:
            threading.Thread(target=self.request_facts, name="warpwell cuda facts", daemon=True).start()
        return None

    def open(self, client: Client, output: int, errors: int) -> bool:
        self.require_agent()
        pidfd = None if client.pidfd is None else os.dup(client.pidfd)
        served = NearClient(self._server, next(self._server.numbers), self, client.line.dup(), pidfd)
        self._server.served[served.number] = served
        served.thread.start()
        return True


class NearClient:
    """A client of a remote device."""

    def __init__(self, server: NearServer, number: int, remote: Remote, line: socket.socket, pidfd: int | None) -> None:
        self.number, self.remote = number, remote
        self.open_reply: tuple[Any, ...] = ()
        self.opened, self.ended = threading.Event(), threading.Event()
        self.incoming: queue.SimpleQueue[tuple[int, int, int] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="warpwell cuda ring", daemon=True)
        self._server, self._transport = server, server.transport
        self._line, self._pidfd = line, -1 if pidfd is None else pidfd
        self._near: Near | None = None
        self._transfers: dict[int, Transfer] = {}  # the last copy of each slot
        self._stopped = False

    def stop(self) -> None:
        """Stop serving the client, because its worker sends no more messages."""
        self._stopped = True
        if self._near is not None:
            self._near.stop()

    # -- the reading thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            near = self._open()
            name = "warpwell cuda bytes"
            threading.Thread(target=self._complete_copies, args=(near,), name=name, daemon=True).start()
            self._mirror(near)
        except RefusedError as refused:
            refuse(self._line, refused.code, str(refused))
        except (PoolError, ClosedError, StallError, OSError):
            pass  # the agent is lost or receives nothing; the end of the connection reports it to the client
        finally:
            self._close()

    def _send(self, kind: Kind, *operands: Any) -> None:
        self.remote.send(kind, self.number, *operands)

    def _open(self) -> Near:
        relay = self._server.relay
        self._send(Kind.OPEN, self.remote.ordinal, self.remote.protocol)
        deadline = time.monotonic() + _OPEN_SECONDS + float(os.environ.get(WAIT, 0))
        while not self.opened.wait(0.05):
            self.remote.require_agent()
            is_late = time.monotonic() > deadline
            if is_late or self._stopped or relay.has_exited(self._line.fileno(), self._pidfd):
                raise RefusedError(DEVICE_UNAVAILABLE, f"{self.remote.name} has opened no context")
        facts, code, reason = self.open_reply
        if facts is None:
            raise RefusedError(code, reason)
        try:
            near = Near(relay)
        except MemoryError as error:
            raise RefusedError(_OUT_OF_MEMORY, str(error)) from None
        self._near = near
        try:
            socket.send_fds(self._line, [relay.facts(facts, True)], near.descriptors)
        finally:
            for descriptor in near.descriptors:
                os.close(descriptor)
        return near

    def _mirror(self, near: Near) -> None:
        while not self._stopped:
            code, block = near.receive_entries(self._line.fileno(), self._pidfd, _POLL_SECONDS)
            if code > 0:
                start, end, data, stops = block
                self._send(Kind.SHIP, start, end, data, tuple(self._start_copy(near, *stop) for stop in stops))
            elif code == WRONG:
                near.set_sticky_error(_UNKNOWN)
                text = f"closed the CUDA client of device {self.remote.ordinal}: its ring is malformed"
                print(f"warpwell: {text}", file=sys.stderr, flush=True)
                return
            elif code == EXITED:
                self._send(Kind.CLOSE)
                self.ended.wait(_CLOSE_SECONDS)  # the client may wait until the device's memory is free
                return
            elif code == STOPPED:
                return

    def _start_copy(self, near: Near, end: int, slot: int, use: int, nbytes: int, direction: int) -> tuple[Any, ...]:
        """Start to copy the data of an entry; return the stop with its payload."""
        self._wait_for_slot(slot)
        payload: Any = 0
        if direction == IN and nbytes <= near.relay.inline:
            payload = near.read(slot, nbytes)
        elif nbytes > near.relay.inline:
            memory, tags = near.region(slot, nbytes), self._server.tags
            transfer = tags.start(self._transport, self.remote.rank, memory, outgoing=direction == IN)
            self._transfers[slot], payload = transfer, transfer.tag
        return end, slot, use, nbytes, direction, payload

    def _wait_for_slot(self, slot: int) -> None:
        """Wait until the last copy of a slot is done. The far side has all of its data, so this is short."""
        transfer = self._transfers.pop(slot, None)
        deadline = time.monotonic() + _COPY_SECONDS
        while transfer is not None and not transfer.done:
            if time.monotonic() > deadline or self._stopped:
                raise StallError(f"a copy of {self.remote.name} does not complete", seconds=_COPY_SECONDS)
            time.sleep(5e-5)

    def _close(self) -> None:
        self._stopped = True
        self._server.served.pop(self.number, None)
        if not self.remote.lost:
            with contextlib.suppress(PoolError, ClosedError, StallError):
                self._send(Kind.CLOSE)  # the worker must exit after any failure; ignored if it has exited
        self.incoming.put(None)
        for transfer in self._transfers.values():
            if not transfer.done:
                transfer.cancel()
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)
        self._line.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)

    # -- the receiving thread ----------------------------------------------------------------------------------

    def apply_answers(self, answers: bytes, slots: tuple[Any, ...]) -> None:
        """Store answers. Slots whose data is in flight are completed by `_complete_copies`."""
        near = self._near
        if near is None or self._stopped:
            return
        if answers and not near.apply(answers):
            self.stop()
            return
        for slot, use, result, payload in slots:
            if isinstance(payload, int):
                self.incoming.put((slot, use, result))
                continue
            if payload is not None:
                near.write(slot, payload)
            elif result and (transfer := self._transfers.get(slot)) is not None:
                transfer.cancel()  # after a failure, the far side sends no data
            near.complete_slot(slot, use, result)

    # -- the thread that waits for bulk data -------------------------------------------------------------------

    def _complete_copies(self, near: Near) -> None:
        """Wait for the data that the far side sends, in its order, then for ENDED."""
        while (item := self.incoming.get()) is not None:
            slot, use, result = item
            transfer = self._transfers.get(slot)
            try:
                if transfer is not None:
                    transfer.wait(transfer.chunks, _COPY_SECONDS)
            except (PoolError, StallError):
                break
            near.complete_slot(slot, use, result)
        self.stop()
        self.ended.set()
