"""`Rendezvous`: where the processes of a job connect to its launcher, and stay connected.

`ask_job` connects there from outside; an `Observer` collects the agents' answers for it.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

from ...errors import PoolError
from ..agent.timed_queue import TimedQueue
from .job_files import JobFiles
from .lifeline import JsonLine

_TELL_SECONDS = 5
_ANSWER_SECONDS = 2.0
"""Agents have so long to answer an observer; one whose call holds the interpreter lock may not."""
_ASK_SECONDS = 5.0


class Rendezvous:
    """Listens in a socket file, and on a port where there are other hosts.

    Parameters
    ----------
    files : JobFiles
    away : bool
        Whether processes of other hosts will connect. A token keeps strangers out.

    Attributes
    ----------
    events : TimedQueue
        ``(connection, message)`` for each message, and ``(connection, None)`` when a connection has closed.
    """

    def __init__(self, files: JobFiles, away: bool) -> None:
        self.events: TimedQueue[tuple[Any, dict[str, Any] | None]] = TimedQueue()
        self.token = secrets.token_hex(16)
        (files.folder / "token").write_text(self.token, encoding="utf-8")  # the folder is its owner's alone
        self._sockets = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)]
        self._sockets[0].bind(str(files.socket))
        self.address = self.far_address = f"unix:{files.socket}"
        if away:
            listening = socket.create_server(("", 0))
            self._sockets.append(listening)
            self.far_address = f"tcp:{listening.getsockname()[1]}:{','.join(_names())}"
        for each in self._sockets:
            each.listen(1024)

    def start(self) -> None:
        """Accept connections from now on, those that wait already included."""
        for each in self._sockets:
            threading.Thread(target=self._accept, args=(each,), name="warpwell accept", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                accepted, _ = listening.accept()
            except OSError:
                return
            if accepted.family != socket.AF_UNIX:
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(
                target=self._serve, args=(JobProcess(accepted),), name="warpwell process", daemon=True
            ).start()

    def _serve(self, connection: JobProcess) -> None:
        first = connection.read()
        if first is None or not hmac.compare_digest(str(first.get("token")), self.token):
            connection.close()
            return
        connection.take(first)
        said: dict[str, Any] | None = first
        while said is not None:
            self.events.put((connection, said))
            said = connection.read()
        self.events.put((connection, None))


class JobProcess(JsonLine):
    """A process of the job, as the launcher sees it."""

    def __init__(self, opened: socket.socket) -> None:
        # not `settimeout`, which would also limit the thread that reads
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", _TELL_SECONDS, 0))
        super().__init__(opened)
        self.local = opened.family == socket.AF_UNIX
        self.kind, self.rank, self.pid, self.host = "", -1, 0, ""
        self.about: dict[str, Any] = {}
        self.ready = self.open = False

    def take(self, first: dict[str, Any]) -> None:
        """Take what the process says about itself."""
        self.kind, self.rank = str(first.get("here")), int(first.get("rank", -1))
        self.pid, self.host = int(first.get("pid", 0)), str(first.get("host"))
        self.about, self.open = first, True

    def hand(self, descriptors: Sequence[int]) -> None:
        """Pass open files to a process of this host."""
        if self.local:
            with self._lock, contextlib.suppress(OSError):
                socket.send_fds(self._socket, [b"."], list(descriptors))

    def close(self) -> None:
        """Close the connection, which ends the process."""
        self.open = False
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


class Observer:
    """Asks all agents for a caller of `ask_job`, and answers when they have answered.

    Parameters
    ----------
    connection : JobProcess
        The caller's.
    agents : sequence of JobProcess
    """

    _last = 0

    def __init__(self, connection: JobProcess, agents: Sequence[JobProcess]) -> None:
        Observer._last += 1
        self._number = Observer._last
        self._connection, self._agents = connection, sorted(agents, key=lambda agent: agent.rank)
        self._waiting = {agent.rank for agent in agents if agent.open and agent.ready}
        self._answers: dict[int, object] = {}
        self._until = time.monotonic() + _ANSWER_SECONDS
        for agent in agents:
            agent.tell(ask=self._number)

    def take(self, agent: JobProcess, number: int) -> None:
        """Take an agent's answer, if it answers this question."""
        if number == self._number and agent.rank in self._waiting:
            self._waiting.discard(agent.rank)
            self._answers[agent.rank] = agent.about.get("info")

    def answered(self) -> bool:
        """Answer if all agents have, or their time is over; return whether it has answered."""
        if self._waiting and time.monotonic() < self._until:
            return False
        found = []
        for agent in self._agents:
            state = "lost" if not agent.open else "starting" if not agent.ready else "silent"
            about = {"rank": agent.rank, "host": agent.host, "pid": agent.pid}
            info = self._answers.get(agent.rank)
            found.append({**about, "state": "running", "info": info} if info else {**about, "state": state})
        self._connection.tell(agents=found)
        self._connection.close()
        return True


def ask_job(files: JobFiles) -> list[dict[str, Any]]:
    """Ask the launcher of a running job what its agents do; return an object for each.

    It has rank, host, pid and state, and info if the agent answered.

    Raises
    ------
    PoolError
        The job has ended, or its launcher does not answer.
    """
    try:
        token = (files.folder / "token").read_text(encoding="utf-8")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(_ASK_SECONDS)
            line.connect(str(files.socket))
            line.sendall(json.dumps({"here": "observer", "token": token, "pid": os.getpid()}).encode() + b"\n")
            with line.makefile("rb") as lines:
                found: list[dict[str, Any]] = json.loads(lines.readline())["agents"]
    except (OSError, ValueError, KeyError) as error:
        raise PoolError(f"job {files.job} does not answer: it may have ended ({error})") from error
    return found


def _names() -> list[str]:
    """Return addresses by which others may reach this host, the best first."""
    given = os.environ.get("WARPWELL_POOL_HOST")
    if given:
        return [given]
    found = [socket.gethostname()]
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(found[0], None, type=socket.SOCK_STREAM)]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.255.255.255", 1))  # nothing is sent; the kernel says which address it would send from
        found.append(probe.getsockname()[0])
    return [name for name in dict.fromkeys(found) if ":" not in name] + ["127.0.0.1"]
