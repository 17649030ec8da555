"""`DriverServer`: serves a device of this machine by starting a worker for each client.

A worker first starts the driver and sends the device's facts; it creates a context when it gets a client. So the worker
that sent the facts serves the first client. After that, one *spare* worker waits for the next client, without device
memory. Workers exit when their client exits, or when the server's process exits for any reason: they detect this by a
pipe whose other end only the server has.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._os import socket_peer
from ..errors import WarpwellError
from . import build
from .board import Board, device_file
from .clients import (
    DEVICE_UNAVAILABLE,
    FACTS,
    FACTS_SECONDS,
    MAX_CLIENTS,
    REFUSED,
    REFUSED_PACKET,
    Client,
    ClientListener,
    RefusedError,
)
from .environment import worker_environ

_END_SECONDS = 5.0
_SPARE_SECONDS = 1.0
"""Delay between serving a client and starting the next spare, so that the client starts undisturbed."""
_HAND_OVER = 8  # packet types in driver_calls.txt
_HAND_OVER_PACKET = struct.Struct("=IIIi96s")
_UUID = slice(680, 696)
"""Bytes of the device's UUID in its facts."""
_RUN_MODULE = ".launch.application"
"""End of the name of the module that runs the program of a job."""

__all__ = ["MAX_CLIENTS", "DriverServer"]


@dataclass(frozen=True)
class _Program:
    """A program that a worker serves: its process, and a struct ww_counts (worker.h)."""

    pid: int
    counts: mmap.mmap
    control: socket.socket
    board: Board | None = None
    since: float = field(default_factory=time.monotonic)

    def close(self) -> None:
        """Close the server's descriptors of the program."""
        self.counts.close()
        self.control.close()


@dataclass(frozen=True)
class _Spare:
    """A worker without a client, and the socket over which the server sends it a client."""

    process: subprocess.Popen[bytes]
    control: socket.socket


class DriverServer(ClientListener):
    """Serves a device of this machine to unmodified programs.

    Parameters
    ----------
    device : str
        The driver's ordinal of the device.
    ordinal : int
        The clients' ordinal of the device: servers of several processes share a folder.
    parts : Built
        Layer and worker; see `build.parts`.
    driver : path, optional
        The driver's library; by default, ``libcuda.so.1`` of the machine.
    folder : path, optional
        An existing folder for the socket. Without a folder there is no socket, and clients connect only by `connect`.
    quota : int, optional
        Bytes of device memory of each client.
    claim : callable, optional
        Returns a reservation of the device, from the first context until the last worker has exited: its ``poll``
        returns whether the device is reserved, or raises a `WarpwellError`, and ``close`` releases it.

    Raises
    ------
    ArgumentError
        The folder's path is too long for sockets.
    """

    def __init__(
        self,
        device: str,
        ordinal: int,
        parts: build.Built,
        *,
        driver: str | Path | None = None,
        folder: str | Path | None = None,
        quota: int | None = None,
        claim: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__(ordinal)
        self._line = [str(parts.worker), "--driver", str(driver or "libcuda.so.1"), "--device", device]
        self._line += ["--ordinal", str(ordinal), *(["--quota", str(quota)] if quota else [])]
        self._environ = worker_environ(os.environ)
        self._workers: dict[subprocess.Popen[bytes], _Program] = {}
        self._spare: _Spare | None = None
        self._opened = math.inf
        self._claim = claim
        self._reservation: Any = None
        self._life: tuple[int, ...] = os.pipe()
        try:
            if folder is not None:
                self.listen(Path(folder))
            self.start()
        except BaseException:
            self.close()
            raise

    @property
    def workers(self) -> list[int]:
        """Process ids of the workers that are alive and have a client."""
        return [worker.pid for worker in list(self._workers) if worker.poll() is None]

    def programs(self) -> list[dict[str, Any]]:
        """Return the properties of each program that is served.

        Returns
        -------
        list of dict
            ``pid`` of the program (None: on another host), ``command``, ``worker`` (its process), ``device`` (the
            program's number for it), ``bytes`` of device memory, ``calls`` and ``seconds`` since its first call.
        """
        found = []
        for worker, program in list(self._workers.items()):
            with contextlib.suppress(ValueError):  # the program has ended, and its counts are closed
                calls, used = struct.unpack("=QQ", program.counts[:16])
                pid = None if program.pid == os.getpid() else program.pid
                found.append(
                    {
                        "pid": pid,
                        "command": "" if pid is None else _command(pid),
                        "worker": worker.pid,
                        "device": self.ordinal,
                        "bytes": used,
                        "calls": calls,
                        "seconds": time.monotonic() - program.since,
                    }
                )
        return found

    @property
    def serving(self) -> int:
        return len(self._workers)

    def close(self) -> None:
        """End all workers, and remove the socket. Clients lose the device."""
        super().close()
        for descriptor in self._life:
            os.close(descriptor)
        self._life = ()
        self._await_workers()
        self._end_reservation()

    def _await_workers(self) -> None:
        until = time.monotonic() + _END_SECONDS
        ended = list(self._workers)
        for program in self._workers.values():
            program.close()
        if self._spare is not None:
            self._spare.control.close()
            ended.append(self._spare.process)
        for worker in ended:
            try:
                worker.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        self._workers.clear()
        self._spare = None

    # -- the thread --------------------------------------------------------------------------------------------

    def tick(self) -> None:
        for worker in [worker for worker in self._workers if worker.poll() is not None]:
            self._workers.pop(worker).close()
        for board in {program.board for program in self._workers.values()}:
            if board is not None:
                board.ensure_arbiter()
        if not self._workers and not any(client.request is not None for client in self._clients):
            self._end_reservation()
        if self._spare is None and self._opened < time.monotonic() - _SPARE_SECONDS:
            with contextlib.suppress(OSError):  # out of processes or descriptors: try again later
                self._spare = self._start()

    def facts(self) -> bytes | None:
        if self.known_facts is None:
            spare = self._start()
            facts = _receive_facts(spare)
            if isinstance(facts, str):
                _end(spare)
                raise RefusedError(DEVICE_UNAVAILABLE, facts)
            self.known_facts, self._spare = facts, spare
        return self.known_facts

    def open(self, client: Client, output: int, errors: int) -> bool:
        if self._claim is not None:
            try:
                self._reservation = self._reservation or self._claim()
                if not self._reservation.poll():
                    return False
            except WarpwellError as error:
                self._end_reservation()  # the next client waits for its own time
                raise RefusedError(DEVICE_UNAVAILABLE, str(error)) from None
        self._serve_client(client, output, errors)
        return True

    def _end_reservation(self) -> None:
        if self._reservation is not None:
            self._reservation.close()
            self._reservation = None

    def _serve_client(self, client: Client, output: int, errors: int) -> None:
        counts = os.memfd_create("warpwell-counts", os.MFD_CLOEXEC)
        try:
            os.ftruncate(counts, mmap.PAGESIZE)
            client.line.setblocking(True)  # the worker shares this flag
            (pid, _), board = socket_peer(client.line), self._board(client)
            handed = [client.line.fileno(), counts, output, errors]
            handed += [] if client.pidfd is None else [client.pidfd]
            handed += [] if board is None else [board.descriptor]
            packet = _HAND_OVER_PACKET.pack(
                _HAND_OVER, client.pidfd is not None, board is not None, pid, client.share if board else b""
            )
            shown = mmap.mmap(counts, 0)  # may fail, so before the worker gets the client
            spare = self._hand_over(packet, handed)
            self._workers[spare.process] = _Program(pid, shown, spare.control, board)
        finally:
            os.close(counts)
        self._opened = time.monotonic()

    def _board(self, client: Client) -> Board | None:
        """Return the board of the device if a client shares it with other programs."""
        if not client.share or self.known_facts is None:
            return None
        try:
            board = Board.of(device_file(self.known_facts[_UUID]))
            board.ensure_arbiter()
        except (WarpwellError, OSError) as error:
            raise RefusedError(DEVICE_UNAVAILABLE, f"the device cannot be shared: {error}") from None
        return board

    def _start(self) -> _Spare:
        """Start a worker without a client."""
        control, worker_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with worker_end:
            ends = {"--control": worker_end.fileno(), "--life": self._life[0]}
            try:
                process = subprocess.Popen(
                    [*self._line, *(str(word) for pair in ends.items() for word in pair)],
                    env=self._environ,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=list(ends.values()),
                    start_new_session=True,  # Ctrl-C must reach only the client
                )
            except BaseException:
                control.close()
                raise
        control.settimeout(FACTS_SECONDS)
        return _Spare(process, control)

    def _hand_over(self, packet: bytes, descriptors: list[int]) -> _Spare:
        """Send a client to the spare, or to a new worker if the spare has exited or failed to start."""
        spare, self._spare = self._spare, None
        if spare is not None:
            with contextlib.suppress(OSError):
                if not _has_failed(spare):
                    socket.send_fds(spare.control, [packet], descriptors)
                    return spare
            _end(spare)
        spare = self._start()
        try:
            socket.send_fds(spare.control, [packet], descriptors)
        except OSError:
            _end(spare)
            raise
        return spare


def _receive_facts(spare: _Spare) -> bytes | str:
    """Wait for the facts of a new worker's device; return them, or the reason of a failure."""
    packet = b""
    with contextlib.suppress(OSError):  # the worker has exited, or exceeds the timeout
        packet = spare.control.recv(1 << 16)
    message = struct.unpack_from("=I", packet)[0] if packet else 0
    if message == FACTS:
        return packet
    if message == REFUSED:
        why: bytes = REFUSED_PACKET.unpack(packet)[2]
        return why.rstrip(b"\0").decode(errors="replace")
    with contextlib.suppress(subprocess.TimeoutExpired):
        return f"its worker exited with status {spare.process.wait(_END_SECONDS)}"
    return "its worker does not respond"


def _has_failed(spare: _Spare) -> bool:
    """Return True if a spare could not start, or has exited."""
    spare.control.setblocking(False)
    try:
        packet = spare.control.recv(1 << 16)
    except BlockingIOError:  # the spare is starting, or has sent the facts before
        return False
    return len(packet) < 4 or struct.unpack_from("=I", packet)[0] != FACTS


def _end(spare: _Spare) -> None:
    spare.control.close()  # the spare waits for a client on this socket
    try:
        spare.process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        spare.process.kill()
        spare.process.wait()


def _command(pid: int) -> str:
    """Return the command of a process, without the path of its interpreter and the prefix of `warpwell run`."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    arguments[0] = os.path.basename(arguments[0])
    return " ".join(arguments[3:] if len(arguments) > 3 and arguments[2].endswith(_RUN_MODULE) else arguments).strip()
