"""QemuDrive: a QEMU without a guest whose NVMe controller a test uses as a drive.

QEMU (Debian: ``apt-get install qemu-system-x86``) starts in less than a tenth of a second, needs no KVM and no
privileges, and ends when this process ends for any reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from warpwell import errors
from warpwell._check import checked_nbytes
from warpwell.drives import DmaArena, Drive

from .qtest import ARENA_SLOT, NVME_SLOT, QtestTransport

BINARY = "qemu-system-x86_64"
VARIABLE = "WARPWELL_QEMU"
"""Environment variable with the program to use instead of `BINARY`."""
INSTALL = f"{BINARY} is not installed: apt-get install qemu-system-x86 (Debian, Ubuntu)"

START_SECONDS = 20.0
"""Timeout of the start of QEMU, which takes a twentieth of a second if a core is free."""

# PR_SET_PDEATHSIG survives exec, but kills QEMU when the *thread* that started it ends.
_WITH_PARENT = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)\n"
    "if os.getppid() == int(sys.argv[1]):\n"
    "    os.execv(sys.argv[2], sys.argv[2:])\n"
)


@dataclass(frozen=True)
class QemuNamespace:
    """A namespace of a `QemuDrive`, with unusual formats for tests.

    Attributes
    ----------
    size : int or str, optional
        Bytes, or text such as "64MiB": zeros in memory, which are lost when QEMU ends.
    path : str, optional
        An image file instead, raw, which QEMU reads and writes through the page cache.
    backend : dict, optional
        A block node of QEMU's instead (``-blockdev``), for example ``{"driver": "nbd", ...}``.
    block : int
        Bytes of a logical block: 512 or 4096.
    writable : bool
    metadata : int
        Bytes of metadata for each block.
    options : dict
        Further options of ``nvme-ns``, for example ``{"zoned": "on"}``.
    """

    size: int | str | None = None
    path: str | os.PathLike[str] | None = None
    backend: dict[str, Any] | None = None
    block: int = 512
    writable: bool = True
    metadata: int = 0
    options: dict[str, Any] = field(default_factory=dict)


class QemuDrive:
    """A drive that QEMU emulates (a context manager).

    Parameters
    ----------
    namespaces : sequence of int, str or QemuNamespace
        Namespaces 1, 2, ...: sizes, or `QemuNamespace`.
    arena : int or str
        Maximum memory of the drive's queues and buffers, a power of two, allocated at its first use.
    mdts : int, optional
        A command transfers at most 2**mdts pages of 4 KiB; 0: no limit.
    queues : int, optional
        I/O queue pairs of the controller.
    serial : str
    subsystem : bool
        Whether the controller belongs to a subsystem, with which its namespaces are shared.
    options : dict, optional
        Further options of ``nvme``.
    seconds : float
        Timeout of an access to a register, after which the drive is lost.
    binary : str, optional
        Path of QEMU. Default: the path in the environment variable ``WARPWELL_QEMU``, else ``qemu-system-x86_64``.

    Attributes
    ----------
    pid : int
        QEMU's process id.
    arena : DmaArena

    Raises
    ------
    DeviceNotFoundError
        QEMU is not installed; the message names the package.
    DriveError
        QEMU does not start; the message has its output.

    Examples
    --------
    >>> with QemuDrive(["64MiB"]) as qemu, qemu.open() as drive:
    ...     drive.namespace(1).read(0, 8)
    """

    def __init__(
        self,
        namespaces: Sequence[int | str | QemuNamespace] = ("64MiB",),
        *,
        arena: int | str = "1GiB",
        mdts: int | None = None,
        queues: int | None = None,
        serial: str = "warpwell",
        subsystem: bool = False,
        options: dict[str, Any] | None = None,
        seconds: float = 60.0,
        binary: str | None = None,
    ) -> None:
        named = binary or os.environ.get(VARIABLE)
        found = shutil.which(named or BINARY)
        if found is None:
            where = VARIABLE if named and not binary else "binary"
            why = f"{where} is {named}, which is not a program: set it to the path of QEMU" if named else INSTALL
            raise errors.DeviceNotFoundError(why, device="nvme")
        self._seconds = seconds
        self._resources = contextlib.ExitStack()
        self._owner_pid = os.getpid()
        self._transport: Callable[[], QtestTransport | None] = lambda: None
        with contextlib.ExitStack() as stack:
            self.arena = DmaArena(checked_nbytes(arena, "arena"))
            stack.callback(self.arena.close)
            self._output = stack.enter_context(tempfile.TemporaryFile())
            own_end, qemu_end = socket.socketpair()
            stack.callback(own_end.close)
            self._end = own_end
            files = [qemu_end.fileno(), self.arena.fd]
            with qemu_end, contextlib.ExitStack() as images:
                controller: dict[str, Any] = {"serial": serial}
                if mdts is not None:
                    controller["mdts"] = mdts
                if queues is not None:
                    controller["max_ioqpairs"] = queues
                settings = self._settings(qemu_end.fileno(), subsystem, controller | (options or {}))
                for k, description in enumerate(namespaces, 1):
                    space = description if isinstance(description, QemuNamespace) else QemuNamespace(description)
                    settings += _namespace(k, space, images, files)
                self._process = _start([found, *settings], files, self._output)
            self.pid = self._process.pid
            self._pidfd = os.pidfd_open(self.pid)
            stack.callback(os.close, self._pidfd)
            stack.callback(_kill, self._process)
            self._connect(START_SECONDS).close()  # QEMU answers, or this raises QEMU's own message
            self._resources = stack.pop_all()
        # An open drive keeps a reference to this object, because its transport may have to kill QEMU.
        self._dropped = weakref.finalize(self, _release, self._resources, self._owner_pid)
        self._dropped.atexit = False  # threads may use it until the process ends, which also ends QEMU

    def _settings(self, end: int, subsystem: bool, options: dict[str, Any]) -> list[str]:
        controller = {"driver": "nvme", "id": "nvme", "addr": f"{NVME_SLOT:x}"}
        if subsystem:
            controller["subsys"] = "subsystem"
        memory = {
            "qom-type": "memory-backend-file",
            "id": "arena",
            "size": self.arena.nbytes,
            "mem-path": f"/proc/self/fd/{self.arena.fd}",
            "share": True,
        }
        ivshmem = {"driver": "ivshmem-plain", "memdev": "arena", "addr": f"{ARENA_SLOT:x}"}
        return [
            *("-nodefaults", "-no-user-config", "-display", "none", "-serial", "none", "-monitor", "none", "-S"),
            *("-machine", "q35,usb=off,smm=off,sata=off", "-accel", "tcg", "-m", "16"),
            *("-chardev", f"socket,id=test,fd={end}", "-object", "qtest,id=qtest,chardev=test,log=none"),
            *("-object", json.dumps(memory), "-device", json.dumps(ivshmem)),
            *(("-device", "nvme-subsys,id=subsystem") if subsystem else ()),
            *("-device", json.dumps(controller | options)),
        ]

    def transport(self) -> QtestTransport:
        """Return a new transport to the controller, which keeps its state; raise `DriveError` if another is open."""
        return self._connect(self._seconds)

    def _connect(self, seconds: float) -> QtestTransport:
        address = f"qemu:{self.pid}"
        if os.getpid() != self._owner_pid:
            raise errors.ForkError(
                f"drive {address} belongs to process {self._owner_pid}, and this is {os.getpid()}, forked from it: "
                "start another QEMU here"
            )
        open_now = self._transport()
        if open_now is not None and not open_now.closed and self.running:
            raise errors.DriveError(
                f"drive {address} is already open in this program: close it first, or share it",
                drive=address,
                reasons=("it is open in this program",),
            )
        try:
            transport = QtestTransport(
                self._end.dup(), self.arena, self._pidfd, address=address, kill=self.kill, seconds=seconds
            )
            self._transport = weakref.ref(transport)
            return transport
        except errors.DriveLostError as error:
            self._output.seek(0)
            output = self._output.read().decode("utf-8", "replace").strip()
            raise errors.DriveLostError(
                f"{error}" + (f"; its output: {output}" if output else ""), drive=address
            ) from None

    def open(self, **options: Any) -> Drive:
        """Return the drive, enabled; `options` are those of `Drive`.

        Raises
        ------
        DriveError
            The drive is open in this program: a second user would reset it and write its doorbells.
        """
        return Drive(self.transport(), **options)

    @staticmethod
    def is_installed() -> bool:
        """Return True if QEMU is installed; `INSTALL` describes the installation."""
        return shutil.which(os.environ.get(VARIABLE) or BINARY) is not None

    @property
    def running(self) -> bool:
        """Whether QEMU's process exists, stopped or not."""
        return not _ended(self._pidfd, 0.0)

    def kill(self) -> None:
        """Kill QEMU (SIGKILL) and wait until it has exited."""
        _kill(self._process)

    def stop(self) -> None:
        """Stop QEMU (SIGSTOP) and wait until all of its threads have stopped. After that, it does not answer."""
        self._process.send_signal(signal.SIGSTOP)
        self._await("Tt")

    def cont(self) -> None:
        """Resume a stopped QEMU (SIGCONT)."""
        self._process.send_signal(signal.SIGCONT)

    def _await(self, states: str) -> None:
        until = time.monotonic() + 5
        while time.monotonic() < until:
            tasks = f"/proc/{self.pid}/task"
            if all(_state(f"{tasks}/{task}/stat") in states for task in os.listdir(tasks)):
                return
            time.sleep(0.001)
        raise errors.DriveError(f"QEMU ({self.pid}) is not stopped after 5 s", drive=f"qemu:{self.pid}")

    def close(self) -> None:
        """Kill QEMU and release everything (idempotent). Dropping the object does the same unless a drive is open."""
        _release(self._resources, self._owner_pid)

    def __enter__(self) -> QemuDrive:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill QEMU and wait until it has exited."""
    if process.poll() is None:
        process.kill()
        process.wait(10)


def _release(resources: contextlib.ExitStack, process: int) -> None:
    if os.getpid() == process:  # else the process belongs to the parent
        resources.close()


def _namespace(nsid: int, space: QemuNamespace, images: contextlib.ExitStack, files: list[int]) -> list[str]:
    """Return QEMU's options of a namespace; files that it needs are appended to `files`, and closed by `images`."""
    node: dict[str, Any]
    if space.backend is not None:
        node = dict(space.backend)
    else:
        if space.path is not None:
            path = os.fspath(space.path)
        else:
            image = os.memfd_create("warpwell-namespace", os.MFD_CLOEXEC)
            images.callback(os.close, image)
            os.ftruncate(image, checked_nbytes(space.size or 0, "size"))
            files.append(image)
            path = f"/proc/self/fd/{image}"
        node = {"driver": "file", "filename": path, "aio": "threads", "locking": "off"}
        node = {"driver": "raw", "file": node}
    node.update({"node-name": f"n{nsid}", "read-only": not space.writable, "discard": "unmap"})
    device = {"driver": "nvme-ns", "drive": f"n{nsid}", "bus": "nvme", "nsid": nsid}
    device |= {"logical_block_size": space.block, "physical_block_size": space.block, "ms": space.metadata}
    return ["-blockdev", json.dumps(node), "-device", json.dumps(device | space.options)]


# -- processes that end with this one ---------------------------------------------------------------------------------

_start_requests: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
_starter: threading.Thread | None = None
_starting = threading.Lock()


def _start(command: list[str], files: Sequence[int], output: Any) -> subprocess.Popen[bytes]:
    """Start a process that is killed when this process ends; the starting thread lives as long as this process."""
    global _starter
    result: queue.SimpleQueue[subprocess.Popen[bytes] | BaseException] = queue.SimpleQueue()
    parent = str(os.getpid())

    def start() -> None:
        try:
            result.put(
                subprocess.Popen(
                    [sys.executable, "-ISc", _WITH_PARENT, parent, *command],
                    pass_fds=files,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C of a terminal must reach only this process
                )
            )
        except BaseException as error:  # raised again in the calling thread
            result.put(error)

    with _starting:
        if _starter is None or not _starter.is_alive():
            _starter = threading.Thread(target=_serve, args=(_start_requests,), name="warpwell-qemu", daemon=True)
            _starter.start()
    _start_requests.put(start)
    found = result.get(timeout=30)
    if isinstance(found, BaseException):
        raise found
    return found


def _serve(requests: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        requests.get()()


def _after_fork() -> None:
    global _start_requests, _starter, _starting
    _start_requests, _starter, _starting = queue.SimpleQueue(), None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def _ended(pidfd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _state(path: str) -> str:
    with open(path, encoding="ascii", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[0]
