"""`ClientListener`: the socket on which programs request a device.

A client that breaks the protocol loses its own connection only. A subclass serves the accepted clients: `server.py`
starts a worker, ``pool/cuda/near.py`` uses a worker on another host.
"""

from __future__ import annotations

import array
import contextlib
import functools
import os
import selectors
import socket
import struct
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from .._os import socket_peer
from ..errors import ArgumentError, WarpwellError
from . import generate

HELLO, FACTS, OPEN, OPENED, REFUSED = range(1, 6)  # packet types in driver_calls.txt
MAGIC = 0x57574352
HELLO_PACKET = struct.Struct("=IIQII96s")
REFUSED_PACKET = struct.Struct("=Ii500s")
DEVICE_UNAVAILABLE, MISMATCH = 46, 803
MAX_PATH_BYTES = 107
"""Maximum length of a socket's path, in bytes."""
FACTS_SECONDS = 120.0
MAX_CLIENTS = 256
"""Maximum number of waiting connections of a listener, and of served clients."""
_PEER_PIDFD = 77
"""SO_PEERPIDFD of Linux 6.5, which Python does not define."""
_HELLO_SECONDS = 10.0
_TICK = 0.5


class RefusedError(WarpwellError):
    """The listener refuses a client.

    Parameters
    ----------
    code : int
        Error code of the driver.
    reason : str
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


@dataclass(eq=False)
class Client:
    """A connection that is not served yet.

    Attributes
    ----------
    request : (bytes, list of int) or None
        A packet that cannot be answered yet, and its descriptors.
    share : bytes
        The client's variable WARPWELL_SHARE; empty if its calls do not wait at a gate.
    """

    line: socket.socket
    pidfd: int | None
    since: float = field(default_factory=time.monotonic)
    greeted: bool = False
    request: tuple[bytes, list[int]] | None = None
    share: bytes = b""

    def close(self) -> None:
        """Close the connection."""
        self.line.close()
        self.forget_request()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None

    def forget_request(self) -> None:
        """Close the descriptors of an answered request."""
        for descriptor in self.request[1] if self.request is not None else ():
            os.close(descriptor)
        self.request = None


class ClientListener(ABC):
    """Listens for clients of a device, in a thread of its own.

    A subclass initializes itself, then calls `start`. The thread calls `facts` and `open`. If one of these cannot
    answer yet, the thread calls it again after each event, and at least twice a second.

    Parameters
    ----------
    ordinal : int
        The clients' number of the device.

    Attributes
    ----------
    ordinal : int
    protocol : int
        Hash of the protocol of layer and worker.
    known_facts : bytes or None
        The device's facts after a client has requested them.
    """

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.known_facts: bytes | None = None
        self.protocol = generate.protocol_hash()
        self._listener: socket.socket | None = None
        self._clients: set[Client] = set()
        self._ending = False
        self._selector = selectors.DefaultSelector()
        self._adopted: deque[socket.socket] = deque()
        self._waker: tuple[socket.socket, socket.socket] | None = None
        self._thread: threading.Thread | None = None

    @abstractmethod
    def facts(self) -> bytes | None:
        """Return the device's facts, or None if they are not known yet. Raises `RefusedError`."""

    @abstractmethod
    def open(self, client: Client, output: int, errors: int) -> bool:
        """Serve a client, with descriptors of its output. The caller closes its connection and these descriptors.

        Return False if the client cannot be served yet. Raises `RefusedError`.
        """

    def tick(self) -> None:
        """Do other work. The thread calls this after each event, and at least twice a second."""
        return

    @property
    @abstractmethod
    def serving(self) -> int:
        """Number of clients that are served."""

    def listen(self, folder: Path) -> None:
        """Make the socket of the device."""
        path = folder / f"device-{self.ordinal}"
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            raise ArgumentError(
                f"the path of the socket {path} is too long: set TMPDIR to a folder with a shorter path"
            )
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            line.bind(str(path))
            path.chmod(0o600)
            line.listen(MAX_CLIENTS)
            line.setblocking(False)
        except BaseException:
            line.close()
            raise
        self._listener = line
        self._selector.register(line, selectors.EVENT_READ, functools.partial(self._accept, line))

    def start(self) -> None:
        """Start the thread."""
        self._waker = socket.socketpair()
        self._waker[0].setblocking(False)
        self._selector.register(self._waker[0], selectors.EVENT_READ, functools.partial(_drain, self._waker[0]))
        self._thread = threading.Thread(target=self._serve, name="warpwell cuda clients", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Wake the thread."""
        if self._waker is not None:
            self._waker[1].setblocking(False)
            with contextlib.suppress(OSError):
                self._waker[1].send(b".")

    def connect(self) -> socket.socket:
        """Return a connection of a client in this process, as if it had connected to the socket."""
        server_end, client_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._adopted.append(server_end)
        self.wake()
        return client_end

    def close(self) -> None:
        """Close the socket, and drop clients that are not served yet."""
        self._ending = True
        self.wake()
        if self._thread is not None:
            self._thread.join(FACTS_SECONDS)
            self._thread = None
        if self._listener is not None:
            path = self._listener.getsockname()
            self._listener.close()
            self._listener = None
            Path(path).unlink(missing_ok=True)
        for client in list(self._clients):
            client.close()
        self._clients.clear()
        for line in self._adopted:
            line.close()
        for end in self._waker or ():
            end.close()
        self._waker = None
        self._selector.close()

    # -- the thread --------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._ending:
            ready = self._selector.select(_TICK)
            oldest = time.monotonic() - _HELLO_SECONDS  # the work below does not count as time of clients
            for key, _ in ready:
                key.data()
            while self._adopted:
                line = self._adopted.popleft()
                line.setblocking(False)
                self._add_client(line, None)
            self.tick()
            for client in list(self._clients):
                if client.request is not None:
                    self._answer(client, *client.request)
                elif not client.greeted and client.since < oldest:
                    self._drop(client)

    def _accept(self, listener: socket.socket) -> None:
        try:
            line, _ = listener.accept()
        except OSError:
            time.sleep(0.02)  # out of descriptors: the connection stays queued, and this thread must not spin
            return
        with contextlib.suppress(OSError):
            line.setblocking(False)
            pid, user = socket_peer(line)
            if user != os.getuid():
                refuse(line, DEVICE_UNAVAILABLE, "the devices belong to another user; start a pool of your own")
            elif self._add_client(line, pid):
                return
            line.close()

    def _add_client(self, line: socket.socket, pid: int | None) -> bool:
        """Accept a new connection; close it and return False if there are too many."""
        if len(self._clients) >= MAX_CLIENTS or self.serving >= MAX_CLIENTS:
            refuse(line, DEVICE_UNAVAILABLE, f"the device already has the maximum of {MAX_CLIENTS} clients")
            line.close()
            return False
        client = Client(line, None if pid is None else _pidfd(line, pid))
        try:
            self._selector.register(line, selectors.EVENT_READ, functools.partial(self._receive, client))
        except OSError:
            client.close()
            return False
        self._clients.add(client)
        return True

    def _drop(self, client: Client) -> None:
        self._selector.unregister(client.line)
        self._clients.discard(client)
        client.close()

    def _receive(self, client: Client) -> None:
        try:
            packet, descriptors = receive(client.line, HELLO_PACKET.size, 2)
        except OSError:
            self._drop(client)
            return
        if client.request is None:
            self._answer(client, packet, descriptors)
            return
        for descriptor in descriptors:  # a client must wait for the answer to its last packet
            os.close(descriptor)
        self._drop(client)

    def _answer(self, client: Client, packet: bytes, descriptors: list[int]) -> None:
        """Answer a packet now or later; drop a client that is served or refused, or that breaks the protocol."""
        client.request = packet, descriptors
        is_open: bool | None = False
        try:
            is_open = self._try_answer(client, packet, descriptors)
        except RefusedError as refused:
            refuse(client.line, refused.code, str(refused))
        except (OSError, struct.error, subprocess.SubprocessError) as error:
            refuse(client.line, DEVICE_UNAVAILABLE, f"the server cannot serve the program: {error}")
        if is_open:
            client.forget_request()
        elif is_open is not None:
            self._drop(client)

    def _try_answer(self, client: Client, packet: bytes, descriptors: list[int]) -> bool | None:
        """Answer a packet. Return whether the connection stays open, or None if there is no answer yet."""
        if len(packet) != HELLO_PACKET.size:
            return False
        message, magic, protocol, _, _, share = HELLO_PACKET.unpack(packet)
        if magic != MAGIC:
            return False
        if protocol != self.protocol:
            raise RefusedError(MISMATCH, "layer and pool have different versions of warpwell; restart the pool")
        if message == HELLO:
            if (facts := self.facts()) is None:
                return None
            client.line.send(facts)
            client.greeted = True
            return True
        if message != OPEN or len(descriptors) != 2:
            return False
        client.share = share.rstrip(b"\0")
        return False if self.open(client, *descriptors) else None  # after `open`, the worker serves the connection


def receive(line: socket.socket, max_bytes: int, count: int) -> tuple[bytes, list[int]]:
    """Return a packet of at most `max_bytes` bytes with up to `count` descriptors.

    Raises
    ------
    OSError
        The connection has ended, or the packet has more than `count` descriptors.
    """
    room = socket.CMSG_SPACE(count * array.array("i").itemsize)
    packet, control, flags, _ = line.recvmsg(max_bytes + 1, room, socket.MSG_CMSG_CLOEXEC)
    descriptors: list[int] = []
    for level, kind, content in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors += array.array("i", content[: len(content) // 4 * 4])
    if packet and not flags & socket.MSG_CTRUNC:
        return packet, descriptors
    for descriptor in descriptors:
        os.close(descriptor)
    raise ConnectionError("the connection has ended")


def refuse(line: socket.socket, code: int, why: str) -> None:
    """Send a client the code and the reason of a refusal."""
    with contextlib.suppress(OSError):
        line.send(REFUSED_PACKET.pack(REFUSED, code, why.encode()[:499]))


def _drain(waker: socket.socket) -> None:
    with contextlib.suppress(OSError):
        waker.recv(4096)


def _pidfd(line: socket.socket, pid: int) -> int | None:
    """Return a descriptor of the client's process. None on old kernels, where the socket reports the process's exit."""
    with contextlib.suppress(OSError):
        descriptor = line.getsockopt(socket.SOL_SOCKET, _PEER_PIDFD)
        os.set_inheritable(descriptor, False)
        return descriptor
    with contextlib.suppress(OSError, AttributeError):
        return os.pidfd_open(pid)
    return None
