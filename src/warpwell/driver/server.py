"""`DriverServer`: serves devices of this machine: starts a worker for each client and device.

Workers end with their client, and with the process of the server, however that ends: they hold one end of a pipe whose
other end only the server has.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import DriverBuildError
from . import build
from .clients import CLIENTS, DEVICE_UNAVAILABLE, FACTS_SECONDS, LONGEST, Client, ClientListener, Served
from .environment import client_environ, make_library_folder, worker_environ

_PREFIX = "ww-cuda-"
_END_SECONDS = 5.0
_RUNS = ".launch.application"
"""End of the name of the module that runs the program of a job."""

__all__ = ["CLIENTS", "DriverServer"]


@dataclass(frozen=True)
class _Program:
    """A program that a worker serves: its process, the device's number for it, and a struct ww_counts (worker.h)."""

    pid: int
    ordinal: int
    counts: mmap.mmap
    since: float = field(default_factory=time.monotonic)


class DriverServer(ClientListener):
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
    listens : bool
        Without, there is no folder and no socket in it: clients come by `connect` alone.

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
        listens: bool = True,
    ) -> None:
        parts = parts or build.parts()
        if parts.layer is None or parts.worker is None:
            raise DriverBuildError("the driver layer for unmodified CUDA programs is not in this installation")
        names = [str(i) for i in range(devices)] if isinstance(devices, int) else list(devices)
        super().__init__()
        self._served = [Served(name, first + i) for i, name in enumerate(names)]
        self._worker, self._layer = parts.worker, parts.layer
        self._driver = str(driver or "libcuda.so.1")
        self._quota = quota
        self._environ = worker_environ(os.environ if environ is None else environ)
        self._workers: dict[subprocess.Popen[bytes], _Program] = {}
        self._life: tuple[int, int] | None = None
        self._lock: int | None = None
        self.folder = Path(folder or "")
        if folder is None and listens:
            self.folder, self._lock = _make_folder()
        try:
            self._begin(listens)
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

    def programs(self) -> list[dict[str, Any]]:
        """Return what there is to know of each program that is served.

        Returns
        -------
        list of dict
            ``pid`` of the program (None: it is on another host), ``command``, ``worker`` (its process), ``device`` (the
            program's number for it), ``bytes`` of device memory, ``calls`` and ``seconds`` since its first one.
        """
        found = []
        for worker, program in list(self._workers.items()):
            with contextlib.suppress(ValueError):  # it has ended, and its counts are closed
                calls, used = struct.unpack("=QQ", program.counts[:16])
                pid = None if program.pid == os.getpid() else program.pid
                found.append({"pid": pid, "command": "" if pid is None else _command(pid), "worker": worker.pid,
                              "device": program.ordinal, "bytes": used, "calls": calls,
                              "seconds": time.monotonic() - program.since})  # fmt: skip
        return found

    def connect(self, ordinal: int) -> socket.socket:
        """Return a connection of a client in this process to a device, as if it had come to its socket."""
        return self.adopt(next(served for served in self._served if served.ordinal == ordinal))

    @property
    def serving(self) -> int:
        return len(self._workers)

    def close(self) -> None:
        """End all workers, and remove what the server made. Clients find their devices lost."""
        super().close()
        for descriptor in self._life or ():
            os.close(descriptor)
        self._life = None
        self._await_workers()
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

    def _begin(self, listens: bool) -> None:
        self._life = os.pipe()
        if listens and not (self.folder / "lib").exists():
            with contextlib.suppress(FileExistsError):  # another server of this folder was faster
                make_library_folder(self.folder, self._layer)
        for served in self._served if listens else ():
            self.listen(self.folder, served)
        self.start()

    def _await_workers(self) -> None:
        until = time.monotonic() + _END_SECONDS
        for worker, program in self._workers.items():
            program.counts.close()
            try:
                worker.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        self._workers.clear()

    # -- the thread --------------------------------------------------------------------------------------------

    def tick(self) -> None:
        for worker in [worker for worker in self._workers if worker.poll() is not None]:
            self._workers.pop(worker).counts.close()

    def facts(self, client: Client) -> bytes | None:
        served = client.served
        if served.facts is None:
            done = subprocess.run(
                [*self._line(served), "--facts"], env=self._environ, stdin=subprocess.DEVNULL, capture_output=True,
                timeout=FACTS_SECONDS, start_new_session=True, check=False,
            )  # fmt: skip
            if done.returncode:
                said = done.stderr.decode(errors="replace").strip() or f"its worker ended with {done.returncode}"
                client.refuse(DEVICE_UNAVAILABLE, said.removeprefix("warpwell: "))
                return None
            served.facts = done.stdout[8:]
        return served.facts

    def open(self, client: Client, output: int, errors: int) -> None:
        assert self._life is not None
        handed = [client.line.fileno(), self._life[0]]
        line = [*self._line(client.served), "--socket", str(handed[0]), "--life", str(handed[1])]
        if client.pidfd is not None:
            handed.append(client.pidfd)
            line += ["--pidfd", str(client.pidfd)]
        credentials = client.line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        counts = os.memfd_create("warpwell-counts", os.MFD_CLOEXEC)
        try:
            os.ftruncate(counts, mmap.PAGESIZE)
            program = _Program(struct.unpack("=iII", credentials)[0], client.served.ordinal, mmap.mmap(counts, 0))
            client.line.setblocking(True)  # the worker shares this flag
            worker = subprocess.Popen(
                [*line, "--counts", str(counts)], env=self._environ, stdin=subprocess.DEVNULL, stdout=output,
                stderr=errors, pass_fds=[*handed, counts], start_new_session=True,  # a Ctrl-C is for the client
            )  # fmt: skip
        finally:
            os.close(counts)
        self._workers[worker] = program

    def _line(self, served: Served) -> list[str]:
        line = [str(self._worker), "--driver", self._driver, "--device", served.device]
        line += ["--ordinal", str(served.ordinal)]
        return [*line, "--quota", str(self._quota)] if self._quota else line


def _command(pid: int) -> str:
    """Return the command of a process, without the path of its interpreter and what `warpwell run` puts before it."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    words[0] = os.path.basename(words[0])
    return " ".join(words[3:] if len(words) > 3 and words[2].endswith(_RUNS) else words).strip()


def _make_folder() -> tuple[Path, int]:
    """Make a folder for sockets; return it and a descriptor whose lock ends with this process, however that ends.

    Folders of servers that were killed are removed.
    """
    base = tempfile.gettempdir()
    base = base if len(os.fsencode(base)) < LONGEST - 30 else "/tmp"
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
