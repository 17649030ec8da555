"""The parent of each process of a job: reports the exit of its member, and ends the member with the job.

The launcher starts a supervisor for mpiexec, and mpiexec starts a supervisor for each rank. It runs as a file, without
the package and without site packages, so that it starts in milliseconds, before its member can fail. The arguments are
the role of the member, the paths to remove at the end of the job, and the member's command. The supervisor of mpiexec
gets the command from the launcher. This supervisor starts before the job has files, so that it can remove them if the
launcher is killed at any time.

Launcher, supervisor and member exchange JSON objects, one per line. A supervisor forwards messages that it does not
handle::

    from the launcher    run, end, signal: handled here                 reserve, go, start, lost, ask: for the member
    to the launcher      here (first), pid, stopped, status: from here  joined, note, reserved, compiling, ready,
                                                                        failed, fatal, reply: from the member
    from the member      remove: paths to remove at the end of the job; group: another process group to kill
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

ADDRESS, TOKEN = "WARPWELL_POOL_LAUNCHER", "WARPWELL_POOL_TOKEN"
"""Variables that the launcher sets for its processes: the address on which it listens, and its password."""
MEMBER = "WARPWELL_POOL_MEMBER"
"""Variable with the number of the descriptor by which a member reaches its supervisor."""

_CONNECT_SECONDS = 10.0
_SEND_SECONDS = 5
_MAX_LINE_BYTES = 1 << 24
"""Maximum length of a message in bytes: more than a command line of the maximum length of Linux needs as JSON."""
_GRACE_SECONDS = (1.0, 2.0)
"""Time that mpiexec has to exit after its ranks, and after SIGTERM, before it is killed."""
_KILL_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1
_STAYING_ROLES = ("application", "mpiexec")
"""Roles whose supervisor exits only at the end of the job, because mpiexec ends all ranks after the first exit."""


class JsonLines:
    """A connection whose messages are JSON objects, one per line. One thread receives, any thread sends."""

    def __init__(self, connection: socket.socket) -> None:
        # not `settimeout`, which would also limit the receiving thread
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", _SEND_SECONDS, 0))
        self.socket = connection
        self._lock = threading.Lock()
        self._received = b""
        self._broken = False

    def receive(self) -> list[dict[str, Any]]:
        """Receive once; return the messages that are complete.

        Raises
        ------
        EOFError
            The peer has closed the connection, or does not follow the protocol.
        """
        try:
            data = self.socket.recv(1 << 16)
            *complete, self._received = (self._received + data).split(b"\n")
            messages = [json.loads(text) for text in complete]
        except (OSError, ValueError, RecursionError) as error:
            raise EOFError from error
        if not data or len(self._received) > _MAX_LINE_BYTES or not all(isinstance(each, dict) for each in messages):
            raise EOFError
        return messages

    def incoming(self) -> Iterator[dict[str, Any]]:
        """Yield the messages until the connection ends."""
        with contextlib.suppress(EOFError):
            while True:
                yield from self.receive()

    def send(self, **message: Any) -> None:
        """Send a message. Drop it if the peer has not read for seconds, or has exited (which `receive` detects)."""
        with self._lock, contextlib.suppress(OSError):
            if not self._broken:
                self._broken = True  # a part of the message may be sent, so no other message can follow
                self.socket.sendall(json.dumps(message).encode() + b"\n")
                self._broken = False


class Supervisor:
    """Starts a member in a process group of its own, and relays messages until the member or the job ends.

    Parameters
    ----------
    role : str
        "application", "agent", "communicator" or "mpiexec".
    launcher : JsonLines
    paths : sequence of str
        Files and folders to remove at the end of the job.
    """

    def __init__(self, role: str, launcher: JsonLines, paths: list[str]) -> None:
        self._role, self._launcher, self._paths = role, launcher, paths
        self._status: int | None = None
        self._is_over = self._is_orphan = False
        self._has_member = True
        self._wake, waker = os.pipe()
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # `_on_wake` handles SIGCHLD
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the launcher handles them

    def run(self, command: list[str]) -> int:
        """Run the member; return the exit status of this process.

        Parameters
        ----------
        command : list of str
            The member's command; empty if the launcher sends it.
        """
        self._command = command
        while not self._command and not self._is_over:
            self._on_launcher()
        return self._run_member() if not self._is_over else self._end()

    def _run_member(self) -> int:
        own_end, inherited = socket.socketpair()
        self._member = JsonLines(own_end)
        environ = _program_environ() if self._role == "application" else dict(os.environ)
        if self._role != "mpiexec":
            environ[MEMBER] = str(inherited.fileno())
            os.set_inheritable(inherited.fileno(), True)
        self._child = self._fork(self._command, environ)
        self._groups = [self._child]
        inherited.close()
        self._launcher.send(pid=self._child)
        calls = {
            self._launcher.socket.fileno(): self._on_launcher,
            own_end.fileno(): self._on_member,
            self._wake: self._on_wake,
        }
        self._poll = select.poll()
        for descriptor in calls:
            self._poll.register(descriptor, select.POLLIN)
        while not self._is_over and (self._status is None or self._role in _STAYING_ROLES):
            calls[self._poll.poll()[0][0]]()
        if self._status is None:
            self._end_member()
        return self._end()

    def _end(self) -> int:
        if self._is_orphan or (self._is_over and self._role != "mpiexec"):  # the launcher still reads the job's folder
            remove(self._paths)
        if self._status is not None and self._status < 0 and not self._is_over:
            os.kill(os.getpid(), signal.SIGKILL)  # mpiexec must see the same exit of this rank as of the member
        return 1 if self._is_orphan else 0 if self._is_over else self._status or 0

    def _fork(self, command: list[str], environ: Mapping[str, str]) -> int:
        prctl, parent = ctypes.CDLL(None).prctl, os.getpid()
        child = os.fork()
        if child:
            with contextlib.suppress(OSError):
                os.setpgid(child, child)  # here, too: `_kill` may be called before the child has done this
            return child
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
            prctl(_PR_SET_PDEATHSIG, signal.SIGTERM if self._role == "mpiexec" else signal.SIGKILL)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            if os.getppid() == parent:
                os.execvpe(command[0], command, environ)
        os._exit(127)

    def _on_launcher(self) -> None:
        try:
            for message in self._launcher.receive():
                if "end" in message:
                    self._is_over = True
                elif "run" in message:
                    os.environ.update(message["environ"])
                    self._command = message["run"]
                elif "signal" not in message:
                    self._member.send(**message)
                elif self._status is None:
                    os.kill(self._child, int(message["signal"]))
        except EOFError:
            self._is_over = self._is_orphan = True

    def _on_member(self) -> None:
        try:
            for message in self._member.receive():
                if "remove" in message:
                    self._paths += message["remove"]
                elif "group" in message:
                    self._groups.append(message["group"])
                else:
                    self._launcher.send(**message)
        except EOFError:  # the member may have executed another program
            self._has_member = False
            self._poll.unregister(self._member.socket)

    def _on_wake(self) -> None:
        if signal.SIGTERM in os.read(self._wake, 1 << 12):  # sent by mpiexec, which ends all ranks
            self._is_over = True
            self._paths.clear()
        if self._status is not None:
            return
        if os.waitid(os.P_PID, self._child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            self._member.socket.setblocking(False)  # a forked child of the member may have the other end open
            while self._has_member:
                self._on_member()
            self._reap()
            self._launcher.send(status=self._status)
        elif change := os.waitid(os.P_PID, self._child, os.WSTOPPED | os.WCONTINUED | os.WNOHANG):
            self._launcher.send(stopped=change.si_code == os.CLD_STOPPED)

    def _end_member(self) -> None:
        """Kill the member at once; or terminate mpiexec, so that it first ends its processes on other hosts."""
        for number, seconds in zip((0, signal.SIGTERM), _GRACE_SECONDS, strict=True):
            if self._role == "mpiexec" and not self._has_exited(0.0):
                self._kill(number)
                self._has_exited(seconds)
        self._kill(signal.SIGKILL)
        if self._has_exited(_KILL_SECONDS):
            self._reap()

    def _has_exited(self, seconds: float) -> bool:
        """Wait at most `seconds` until the member has exited, in naps of 10 ms; return False on timeout."""
        for _ in range(int(seconds * 100) + 1):
            if os.waitid(os.P_PID, self._child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return True
            select.select([], [], [], min(seconds, 0.01))
        return False

    def _reap(self) -> None:
        """Kill the process groups of the exited member, then release its process id."""
        self._kill(signal.SIGKILL)
        self._status = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])

    def _kill(self, number: int) -> None:
        for group in self._groups:
            with contextlib.suppress(OSError):
                os.killpg(group, number)


def main(role: str, paths: list[str], command: list[str]) -> int:
    """Connect to the launcher, and run the member."""
    address = os.environ[ADDRESS]
    try:
        launcher = JsonLines(connect(address))
        rank = rank_of(os.environ)
        facts = {"token": os.environ[TOKEN], "rank": rank, "supervisor": os.getpid(), "host": socket.gethostname()}
        launcher.send(here=role, **facts)
        if role == "application" and address.startswith("unix:"):
            _, descriptors, _, _ = socket.recv_fds(launcher.socket, 1, 3)
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)  # for other roles; the application writes to the terminal itself
                os.close(descriptor)
    except OSError as error:
        # a launcher of this host that has closed its socket is ending the job, as after Ctrl-C during the start
        if not address.startswith("unix:") or not isinstance(error, ConnectionError):
            print(f"warpwell: host {socket.gethostname()}: no launcher at {address}: {error}", file=sys.stderr)
        remove(paths)
        return 1
    return Supervisor(role, launcher, paths).run(command)


def connect(address: str) -> socket.socket:
    """Connect to ``unix:PATH``, to ``fd:NUMBER``, or to the first host of ``tcp:PORT:HOST,HOST,..`` that answers.

    Raises
    ------
    OSError
        No address answers.
    """
    kind, _, path = address.partition(":")
    if kind == "fd":
        connection = socket.socket(fileno=int(path))
        connection.set_inheritable(False)
        return connection
    port, _, names = path.partition(":")
    reason = OSError("it has no address")
    for name in [path] if kind == "unix" else names.split(","):
        try:
            if kind == "unix":
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connection.settimeout(_CONNECT_SECONDS)
                connection.connect(name)
            else:
                connection = socket.create_connection((name, int(port)), _CONNECT_SECONDS)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.settimeout(None)
            return connection
        except OSError as error:
            reason = error
    raise reason


def rank_of(environ: Mapping[str, str]) -> int:
    """Return the rank that MPI assigns to a process, or -1 if its environment has none."""
    for name in ("PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        if environ.get(name, "").isdecimal():
            return int(environ[name])
    return -1


def remove(paths: list[str]) -> None:
    """Remove files and folders."""
    from shutil import rmtree  # importing its modules at the top would double the start time

    for path in paths:
        rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.unlink(path)


def _program_environ() -> dict[str, str]:
    """Return the environment of the application. Its CUDA driver may be the pool's; agents need the host's driver."""
    environ = dict(os.environ)
    for name, value in json.loads(environ.pop("WARPWELL_POOL_CUDA", "{}")).get("environ", {}).items():
        old = environ.pop(name, None)
        if name in ("LD_LIBRARY_PATH", "PYTHONPATH") and old:
            value += os.pathsep + old  # mpiexec may have put its own libraries there
        if value is not None:
            environ[name] = value
    return environ


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], [path for path in sys.argv[2].split(os.pathsep) if path], sys.argv[3:]))
