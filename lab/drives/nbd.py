"""NbdServer: a disk with a volatile write cache for QEMU. If its client is killed, unflushed writes are lost.

If QEMU is killed over an image file, no write is lost, even without a flush, because the page cache keeps the writes.
So tests of losses put QEMU's drive on this server (Network Block Device protocol), and kill QEMU.

Source: the NBD project's proto.md: fixed newstyle negotiation, simple replies.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpwell import errors
from warpwell.storage import raw_bytes

SECTOR = 512
"""Size in bytes of the unit that a power loss keeps or drops."""
VERSIONS = 4
"""Maximum number of unflushed contents of a sector that are kept, so that a power loss can leave an old content."""
LONGEST = 32 << 20
"""Maximum size of a request, in bytes."""

# -- negotiation ----------------------------------------------------------------------------------------------------
NBD_MAGIC, OPTION_MAGIC, REPLY_MAGIC = 0x4E42444D41474943, 0x49484156454F5054, 0x3E889045565A9
FIXED_NEWSTYLE, NO_ZEROES = 1, 2
OPT_EXPORT_NAME, OPT_ABORT, OPT_LIST, OPT_INFO, OPT_GO = 1, 2, 3, 6, 7
REP_ACK, REP_SERVER, REP_INFO, REP_UNSUPPORTED = 1, 2, 3, 0x80000001
INFO_EXPORT, INFO_BLOCK_SIZE = 0, 3
HAS_FLAGS, READ_ONLY, SEND_FLUSH = 1, 2, 4

# -- transmission ---------------------------------------------------------------------------------------------------
REQUEST = struct.Struct(">IHHQQI")
REQUEST_MAGIC, SIMPLE_REPLY_MAGIC = 0x25609513, 0x67446698
READ, WRITE, DISCONNECT, FLUSH = 0, 1, 2, 3


class NbdServer:
    """A disk in memory behind a Unix socket, for one client at a time; a thread of this process serves it.

    An acknowledged write is in a volatile cache. A flush makes durable only the writes that were acknowledged when it
    arrived. Requests that arrive together are executed in a random order. If the client ends without a disconnect (it
    was killed), power is lost: each unflushed sector keeps its newest content with probability one half, and otherwise
    has an older content.

    Parameters
    ----------
    content : int or numpy.ndarray
        Size of the disk in bytes, all zeros; or its content, which is copied. A multiple of 512 bytes.
    seed : int
        Seed of the order of requests, and of the sectors that a power loss drops.
    writable : bool

    Attributes
    ----------
    path : str
        The socket, in a folder of its own.
    nbytes : int
    fault : callable, optional
        Called with kind (`READ`, `WRITE` or `FLUSH`), offset and bytes of each request; returns an errno with which the
        request fails, or 0.
    answering : threading.Event
        While this event is cleared, the disk does nothing.
    losses, dropped : int
        Power losses so far, and sectors whose newest content they dropped.
    requests : dict of int to int
        Number of requests of each type.

    Examples
    --------
    >>> with NbdServer(1 << 20, seed=3) as disk:
    ...     disk.url.startswith("nbd+unix:///?socket=")
    True
    """

    def __init__(self, content: int | NDArray[Any] = 64 << 20, *, seed: int = 0, writable: bool = True) -> None:
        if isinstance(content, int):
            self._durable = bytearray(content)
        else:
            self._durable = bytearray(raw_bytes(content))
        self.nbytes = len(self._durable)
        if self.nbytes % SECTOR:
            raise errors.ArgumentError(f"a disk of {self.nbytes} bytes: a multiple of {SECTOR}", name="content")
        self.writable = writable
        self.fault: Callable[[int, int, int], int] | None = None
        self.answering = threading.Event()
        self.answering.set()
        self.losses = self.dropped = 0
        self.requests = {READ: 0, WRITE: 0, FLUSH: 0}
        self._cache: dict[int, list[bytes]] = {}
        """For each unflushed sector, its contents since the last flush, the newest content last."""
        self._acknowledged: set[int] = set()
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._alone = threading.Event()
        self._alone.set()
        self._closed = False
        self._connection: socket.socket | None = None
        self._folder = tempfile.mkdtemp(prefix="warpwell-nbd-")  # short: a socket's path has 107 bytes
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.path = os.path.join(self._folder, "disk")
            self._listener.bind(self.path)
            self._listener.listen(4)
            self._thread = threading.Thread(target=self._serve, name=f"nbd {self.path}", daemon=True)
            self._thread.start()
        except BaseException:
            self._listener.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    @property
    def url(self) -> str:
        """The disk as `qemu-img` and `qemu-io` name it."""
        return f"nbd+unix:///?socket={self.path}"

    @property
    def backend(self) -> dict[str, Any]:
        """The disk as `QemuNamespace` and QEMU's ``-blockdev`` name it."""
        server = {"type": "unix", "path": self.path}
        return {"driver": "raw", "file": {"driver": "nbd", "server": server}}

    @property
    def unflushed(self) -> int:
        """Number of sectors that a power loss may change."""
        return len(self._cache)

    def contents(self) -> NDArray[np.uint8]:
        """Return the content that a client would read; after `wait_alone`, the content after a killed client."""
        with self._lock:
            out = np.frombuffer(bytes(self._durable), np.uint8).copy()
            for sector, versions in self._cache.items():
                out[sector * SECTOR : (sector + 1) * SECTOR] = np.frombuffer(versions[-1], np.uint8)
            return out

    def wait_alone(self, seconds: float = 5.0) -> None:
        """Wait until no client is connected and the losses of a killed client are applied.

        Raises
        ------
        TimeoutError
        """
        if not self._alone.wait(seconds):
            raise TimeoutError(f"a client of {self.path} is connected after {seconds} s: end it first")

    def lose_power(self) -> None:
        """Drop or keep each sector that is not flushed, at random; make the result durable."""
        with self._lock:
            self.losses += 1
            for sector, versions in self._cache.items():
                left: bytes | None = versions[-1]
                if self._random.random() < 0.5:
                    self.dropped += 1
                    left = self._random.choice([None, *versions[:-1]])
                if left is not None:
                    self._durable[sector * SECTOR : (sector + 1) * SECTOR] = left
            self._cache.clear()
            self._acknowledged.clear()

    def close(self) -> None:
        """End the connection, the thread and the socket (idempotent): to a client, the disk fails from now on."""
        self._closed = True
        self.answering.set()
        for endpoint in (self._listener, self._connection):
            if endpoint is not None:
                with contextlib.suppress(OSError):
                    endpoint.shutdown(socket.SHUT_RDWR)  # wakes the thread; close alone would not
        self._thread.join(10)
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> NbdServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closed:
            try:
                self._connection, _ = self._listener.accept()
            except OSError:
                return
            self._alone.clear()
            ended = True
            with self._connection as connection, contextlib.suppress(OSError, EOFError):
                client = _Client(connection)
                if self._negotiate(client):
                    ended = False
                    ended = self._transmit(client)
            if not ended:
                self.lose_power()
            self._connection = None
            self._alone.set()

    def _negotiate(self, client: _Client) -> bool:
        """Negotiate the disk with a client; return False if the client only requested information."""
        client.send(struct.pack(">QQH", NBD_MAGIC, OPTION_MAGIC, FIXED_NEWSTYLE | NO_ZEROES))
        (flags,) = struct.unpack(">I", client.read_exact(4))
        facts = struct.pack(">QH", self.nbytes, HAS_FLAGS | SEND_FLUSH | (0 if self.writable else READ_ONLY))
        while True:
            magic, option, length = struct.unpack(">QII", client.read_exact(16))
            if magic != OPTION_MAGIC or length > 1 << 16:
                raise EOFError("no option of NBD")
            client.read_exact(length)  # the disk name, which is empty, and requests for information

            def reply(kind: int, data: bytes = b"", option: int = option) -> None:
                client.send(struct.pack(">QIII", REPLY_MAGIC, option, kind, len(data)) + data)

            if option == OPT_EXPORT_NAME:
                client.send(facts + (b"" if flags & NO_ZEROES else bytes(124)))
                return True
            if option in (OPT_INFO, OPT_GO):
                reply(REP_INFO, struct.pack(">H", INFO_EXPORT) + facts)
                reply(REP_INFO, struct.pack(">HIII", INFO_BLOCK_SIZE, SECTOR, 4096, LONGEST))
                reply(REP_ACK)
                if option == OPT_GO:
                    return True
            elif option == OPT_LIST:
                reply(REP_SERVER, struct.pack(">I", 0))
                reply(REP_ACK)
            elif option == OPT_ABORT:
                reply(REP_ACK)
                return False
            else:
                reply(REP_UNSUPPORTED)

    def _transmit(self, client: _Client) -> bool:
        """Answer requests until the client disconnects; return True. Raise EOFError if it ends without a disconnect."""
        while True:
            together = list(self._arrived(client))
            self._random.shuffle(together)
            with self._lock:
                # Sectors that a flush among them covers: those acknowledged before it arrived.
                covered = set(self._acknowledged)
            for kind, cookie, offset, length, data in together:
                self.answering.wait()
                if kind == DISCONNECT:
                    continue
                with self._lock:
                    code, out = self._carry_out(kind, offset, length, data, covered)
                    if kind == WRITE and code == 0:
                        self._acknowledged.update(_sectors(offset, length))
                client.send(struct.pack(">IIQ", SIMPLE_REPLY_MAGIC, code, cookie) + out)
            if any(kind == DISCONNECT for kind, *_ in together):
                return True

    def _arrived(self, client: _Client) -> Iterator[tuple[int, int, int, int, bytes]]:
        """Wait for a request; yield this request and others that have arrived, at most 64."""
        for number in range(64):
            if number and not client.has_bytes(REQUEST.size):
                return
            magic, _, kind, cookie, offset, length = REQUEST.unpack(client.read_exact(REQUEST.size))
            if magic != REQUEST_MAGIC or length > LONGEST:
                raise EOFError("no request of NBD")
            yield kind, cookie, offset, length, client.read_exact(length) if kind == WRITE else b""

    def _carry_out(self, kind: int, offset: int, length: int, data: bytes, covered: set[int]) -> tuple[int, bytes]:
        """Execute a request (with the lock); return an errno or 0, and the data of a read."""
        if kind not in self.requests:
            return errno.EINVAL, b""
        self.requests[kind] += 1
        code = self.fault(kind, offset, length) if self.fault is not None else 0
        if code:
            return code, b""
        if kind == FLUSH:
            for sector in covered:
                self._durable[sector * SECTOR : (sector + 1) * SECTOR] = self._cache.pop(sector)[-1]
            self._acknowledged -= covered
            covered.clear()
            return 0, b""
        if offset % SECTOR or length % SECTOR or offset + length > self.nbytes:
            return errno.ENOSPC if kind == WRITE and offset + length > self.nbytes else errno.EINVAL, b""
        if kind == READ:
            if self._cache:
                parts = (self._newest(sector) for sector in _sectors(offset, length))
                return 0, b"".join(parts)
            return 0, bytes(self._durable[offset : offset + length])
        if not self.writable:
            return errno.EPERM, b""
        for k, sector in enumerate(_sectors(offset, length)):
            versions = self._cache.setdefault(sector, [])
            if len(versions) == VERSIONS:
                del versions[self._random.randrange(VERSIONS)]
            versions.append(data[k * SECTOR : (k + 1) * SECTOR])
        return 0, b""

    def _newest(self, sector: int) -> bytes:
        versions = self._cache.get(sector)
        return versions[-1] if versions else bytes(self._durable[sector * SECTOR : (sector + 1) * SECTOR])


def _sectors(offset: int, length: int) -> range:
    return range(offset // SECTOR, (offset + length) // SECTOR)


class _Client:
    """The received and sent bytes of a client."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.send = connection.sendall
        self._arrived = bytearray()

    def has_bytes(self, nbytes: int) -> bool:
        """Return True if `nbytes` bytes have arrived. Never blocks."""
        with contextlib.suppress(BlockingIOError):
            if len(self._arrived) < nbytes:
                self._arrived += self.connection.recv(1 << 18, socket.MSG_DONTWAIT)
        return len(self._arrived) >= nbytes

    def read_exact(self, nbytes: int) -> bytes:
        """Wait for `nbytes` bytes, and remove them from the buffer."""
        while len(self._arrived) < nbytes:
            got = self.connection.recv(max(1 << 18, nbytes - len(self._arrived)))
            if not got:
                raise EOFError("the client has ended")
            self._arrived += got
        out = bytes(self._arrived[:nbytes])
        del self._arrived[:nbytes]
        return out
