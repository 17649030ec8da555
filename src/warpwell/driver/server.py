"""`DriverServer`: accepts clients of devices on sockets of a folder, and starts a worker for each client and device.

A client that is wrong in any way loses its connection, nobody else's. Workers end with their client, and with the
process of the server, however that ends: they hold one end of a pipe whose other end only the server has.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import selectors
import shutil
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from ..errors import ArgumentError, DriverBuildError
from . import build, generate
from .environment import client_environ, make_library_folder, worker_environ

_HELLO, _FACTS, _OPEN, _OPENED, _REFUSED = range(1, 6)  # enum ww_said
_MAGIC = 0x57574352
_HELLO_PACKET = struct.Struct("=IIQII")
_REFUSED_PACKET = struct.Struct("=Ii500s")
_DEVICE_UNAVAILABLE, _MISMATCH = 46, 803
_PEER_PIDFD = 77
"""SO_PEERPIDFD, which Python does not name: of Linux 6.5."""
_PREFIX = "ww-cuda-"
_LONGEST = 107
"""Bytes of a socket's path."""
_HELLO_SECONDS = 10.0
_FACTS_SECONDS = 120.0
_END_SECONDS = 5.0
_TICK = 0.5
CLIENTS = 256
"""Connections of a server, and its workers."""


@dataclass
class _Served:
    """A device: what it is to the server's own driver, its number for clients, its facts once somebody asked."""

    device: str
    ordinal: int
    facts: bytes | None = None


@dataclass(eq=False)
class _Client:
    """A connection, until a worker has it."""

    line: socket.socket
    served: _Served
    pidfd: int | None
    since: float = field(default_factory=time.monotonic)
    greeted: bool = False

    def close(self) -> None:
        self.line.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


class DriverServer:
    """Serves devices of this machine to programs that know nothing of it.

    Parameters
    ----------
    devices : int or sequence of str
        How many devices of the driver, or which: ordinals or UUIDs. Clients see them in this order.
    driver : path, optional
        The driver's library; by default that of the machine.
    folder : path, optional
        An existing folder for the sockets and the layer's names; by default one of its own, removed at the end.
    first : int
        The clients' ordinal of the first device: servers of several processes share a folder.
    quota : int, optional
        Bytes of device memory of each client on each device.
    environ : mapping, optional
        From which the environment of workers is made; by default that of this process.
    parts : Built, optional
        Layer and worker; by default those of `build.parts`.

    Raises
    ------
    DriverBuildError
        The native parts cannot be built.
    ArgumentError
        The folder's path is too long for sockets.

    Examples
    --------
    >>> with DriverServer(2) as server:  # doctest: +SKIP
    ...     subprocess.run([sys.executable, "program.py"], env=server.environ())
    """

    def __init__(
        self,
        devices: int | Sequence[str] = 1,
        *,
        driver: str | Path | None = None,
        folder: str | Path | None = None,
        first: int = 0,
        quota: int | None = None,
        environ: Mapping[str, str] | None = None,
        parts: build.Built | None = None,
    ) -> None:
        parts = parts or build.parts()
        if parts.layer is None or parts.worker is None:
            raise DriverBuildError("the driver layer for unmodified CUDA programs is not in this installation")
        names = [str(i) for i in range(devices)] if isinstance(devices, int) else list(devices)
        self._served = [_Served(name, first + i) for i, name in enumerate(names)]
        self._worker, self._layer = parts.worker, parts.layer
        self._driver = str(driver or "libcuda.so.1")
        self._quota = quota
        self._protocol = generate.protocol_hash()
        self._environ = worker_environ(os.environ if environ is None else environ)
        self._lock: int | None = None
        if folder is not None:
            self.folder = Path(folder)
        else:
            self.folder, self._lock = _make_folder()
        self._listeners: list[tuple[socket.socket, Path]] = []
        self._clients: set[_Client] = set()
        self._workers: set[subprocess.Popen[bytes]] = set()
        self._ending = False
        self._selector = selectors.DefaultSelector()
        self._life: tuple[int, int] | None = None
        self._bell: tuple[socket.socket, socket.socket] | None = None
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def environ(self, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of a client, made from that of this process or the one given."""
        return client_environ(self.folder, environ)

    @property
    def workers(self) -> list[int]:
        """Process ids of the workers that are alive."""
        return [worker.pid for worker in list(self._workers) if worker.poll() is None]

    def close(self) -> None:
        """End all workers, and remove what the server made. Clients find their devices lost."""
        self._ending = True
        if self._bell is not None:
            with contextlib.suppress(OSError):
                self._bell[1].send(b".")
        if self._thread is not None:
            self._thread.join(_FACTS_SECONDS)
            self._thread = None
        for line, path in self._listeners:
            line.close()
            path.unlink(missing_ok=True)
        self._listeners = []
        for client in list(self._clients):
            client.close()
        self._clients.clear()
        for descriptor in self._life or ():
            os.close(descriptor)
        self._life = None
        self._await_workers()
        for end in self._bell or ():
            end.close()
        self._bell = None
        self._selector.close()
        if self._lock is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> DriverServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- start and end -----------------------------------------------------------------------------------------

    _thread: threading.Thread | None = None

    def _start(self) -> None:
        self._life = os.pipe()
        self._bell = socket.socketpair()
        self._selector.register(self._bell[0], selectors.EVENT_READ, None)
        if not (self.folder / "lib").exists():
            with contextlib.suppress(FileExistsError):  # another server of this folder was faster
                make_library_folder(self.folder, self._layer)
        for served in self._served:
            self._listen(served)
        self._thread = threading.Thread(target=self._serve, name="warpwell cuda clients", daemon=True)
        self._thread.start()

    def _listen(self, served: _Served) -> None:
        path = self.folder / f"device-{served.ordinal}"
        if len(os.fsencode(path)) > _LONGEST:
            raise ArgumentError(
                f"the path of the socket {path} is too long: set TMPDIR to a folder with a shorter path"
            )
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            line.bind(str(path))
            path.chmod(0o600)
            line.listen(CLIENTS)
            line.setblocking(False)
        except BaseException:
            line.close()
            raise
        self._listeners.append((line, path))
        self._selector.register(line, selectors.EVENT_READ, served)

    def _await_workers(self) -> None:
        until = time.monotonic() + _END_SECONDS
        for worker in self._workers:
            try:
                worker.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        self._workers.clear()

    # -- the thread --------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._ending:
            for key, _ in self._selector.select(_TICK):
                if isinstance(key.data, _Served):
                    self._accept(key.fileobj, key.data)  # type: ignore[arg-type]
                elif isinstance(key.data, _Client):
                    self._hear(key.data)
            self._workers -= {worker for worker in self._workers if worker.poll() is not None}
            late = time.monotonic() - _HELLO_SECONDS
            for client in [client for client in self._clients if not client.greeted and client.since < late]:
                self._drop(client)

    def _accept(self, listener: socket.socket, served: _Served) -> None:
        try:
            line, _ = listener.accept()
        except OSError:
            time.sleep(0.02)  # no descriptors are left: the connection waits, and this thread must not spin
            return
        with contextlib.suppress(OSError):
            line.setblocking(False)
            pid, uid, _ = struct.unpack("=iII", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid != os.getuid():
                _refuse(line, _DEVICE_UNAVAILABLE, "the devices belong to another user")
            elif len(self._clients) >= CLIENTS or len(self._workers) >= CLIENTS:
                _refuse(line, _DEVICE_UNAVAILABLE, f"the device has {CLIENTS} clients, which is the most")
            else:
                client = _Client(line, served, _pidfd(line, pid))
                self._clients.add(client)
                self._selector.register(line, selectors.EVENT_READ, client)
                return
            line.close()

    def _drop(self, client: _Client) -> None:
        self._selector.unregister(client.line)
        self._clients.discard(client)
        client.close()

    def _hear(self, client: _Client) -> None:
        try:
            packet, descriptors = _receive(client.line)
        except OSError:
            self._drop(client)
            return
        try:
            if self._understand(client, packet, descriptors):
                return
        except (OSError, struct.error, subprocess.SubprocessError):
            pass
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if client in self._clients:
            self._drop(client)

    def _understand(self, client: _Client, packet: bytes, descriptors: list[int]) -> bool:
        """Answer a packet; return False if the connection must end."""
        if len(packet) != _HELLO_PACKET.size:
            return False
        said, magic, protocol, _, _ = _HELLO_PACKET.unpack(packet)
        if magic != _MAGIC:
            return False
        if protocol != self._protocol:
            _refuse(client.line, _MISMATCH, "the layer is of another version of warpwell than the pool")
            return False
        if said == _HELLO:
            facts = self._facts(client)
            if facts is None:
                return False
            client.line.send(facts)
            client.greeted = True
            return True
        if said != _OPEN or len(descriptors) != 2:
            return False
        self._open(client, *descriptors)
        self._drop(client)  # the worker has the connection now
        return True

    def _facts(self, client: _Client) -> bytes | None:
        served = client.served
        if served.facts is None:
            done = subprocess.run(
                [*self._line(served), "--facts"], env=self._environ, stdin=subprocess.DEVNULL, capture_output=True,
                timeout=_FACTS_SECONDS, start_new_session=True, check=False,
            )  # fmt: skip
            if done.returncode:
                said = done.stderr.decode(errors="replace").strip() or f"its worker ended with {done.returncode}"
                _refuse(client.line, _DEVICE_UNAVAILABLE, said.removeprefix("warpwell: "))
                return None
            served.facts = done.stdout[8:]
        return served.facts

    def _open(self, client: _Client, output: int, errors: int) -> None:
        assert self._life is not None
        handed = [client.line.fileno(), self._life[0]]
        line = [*self._line(client.served), "--socket", str(handed[0]), "--life", str(handed[1])]
        if client.pidfd is not None:
            handed.append(client.pidfd)
            line += ["--pidfd", str(client.pidfd)]
        client.line.setblocking(True)  # the worker shares this flag
        worker = subprocess.Popen(
            line, env=self._environ, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, pass_fds=handed,
            start_new_session=True,  # a Ctrl-C is for the client
        )  # fmt: skip
        self._workers.add(worker)

    def _line(self, served: _Served) -> list[str]:
        line = [str(self._worker), "--driver", self._driver, "--device", served.device]
        line += ["--ordinal", str(served.ordinal)]
        return [*line, "--quota", str(self._quota)] if self._quota else line


def _make_folder() -> tuple[Path, int]:
    """Make a folder for sockets; return it and a descriptor whose lock ends with this process, however that ends.

    Folders of servers that were killed are removed.
    """
    base = tempfile.gettempdir()
    base = base if len(os.fsencode(base)) < _LONGEST - 30 else "/tmp"
    for old in Path(base).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            _remove_abandoned(old)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    lock = os.open(folder / "new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(folder / "new", folder / "lock")  # now that it is locked, it may be seen
    return folder, lock


def _remove_abandoned(folder: Path) -> None:
    if folder.stat().st_uid != os.getuid():
        return
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _receive(line: socket.socket) -> tuple[bytes, list[int]]:
    """Return a packet and its descriptors; raise OSError at the end of the connection, or if more came than may."""
    room = socket.CMSG_SPACE(2 * array.array("i").itemsize)
    packet, control, flags, _ = line.recvmsg(_HELLO_PACKET.size + 1, room, socket.MSG_CMSG_CLOEXEC)
    descriptors: list[int] = []
    for level, kind, content in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors += array.array("i", content[: len(content) // 4 * 4])
    if packet and not flags & socket.MSG_CTRUNC:
        return packet, descriptors
    for descriptor in descriptors:
        os.close(descriptor)
    raise ConnectionError("the connection has ended")


def _refuse(line: socket.socket, code: int, why: str) -> None:
    with contextlib.suppress(OSError):
        line.send(_REFUSED_PACKET.pack(_REFUSED, code, why.encode()[:499]))


def _pidfd(line: socket.socket, pid: int) -> int | None:
    """Return a descriptor of the client's process, or None where the kernel has none: then the socket tells its end."""
    with contextlib.suppress(OSError):
        descriptor = line.getsockopt(socket.SOL_SOCKET, _PEER_PIDFD)
        os.set_inheritable(descriptor, False)
        return descriptor
    with contextlib.suppress(OSError, AttributeError):
        return os.pidfd_open(pid)
    return None
