"""`Listener`: the socket on which the launcher of a job accepts connections of the job's supervisors.

`query_job` connects to this socket from another process, and an `Observer` collects the agents' answers for the caller.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from ..._os import clock
from ...errors import PoolError
from ..agent.timed_queue import TimedQueue
from .job_files import JobFiles
from .supervise import JsonLines

_ANSWER_SECONDS = 2.0
"""Time in which agents must answer an observer. An agent does not answer while a call holds the GIL."""
_ASK_SECONDS = 5.0


class Connection(JsonLines):
    """The launcher's connection to a supervisor of the job, or to an observer.

    Attributes
    ----------
    facts : dict
        The last value of each key that the peer has sent.
    is_open : bool
        Whether the connection is open.
    """

    def __init__(self, opened: socket.socket) -> None:
        super().__init__(opened)
        self.local = opened.family == socket.AF_UNIX
        self.facts: dict[str, Any] = {}
        self.is_open = True

    @property
    def role(self) -> str:
        """The role of the member, or "observer"."""
        return str(self.facts["here"])

    @property
    def rank(self) -> int:
        """The rank of the member."""
        return int(self.facts["rank"])

    def pass_files(self, descriptors: Sequence[int]) -> None:
        """Send open files to a supervisor of this host, as its first message."""
        if self.local:
            with contextlib.suppress(OSError):
                socket.send_fds(self.socket, [b"."], list(descriptors))

    def kill(self) -> None:
        """Kill supervisor and member, if they are on this host."""
        if self.local:
            for name, kill in (("supervisor", os.kill), ("pid", os.killpg)):
                with contextlib.suppress(OSError, KeyError):
                    kill(int(self.facts[name]), signal.SIGKILL)

    def close(self) -> None:
        """Close the connection, which ends the member."""
        self.is_open = False
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class Listener:
    """Listens in a socket file, and on a port if there are other hosts.

    Parameters
    ----------
    files : JobFiles
    away : bool
        Whether processes of other hosts connect.

    Attributes
    ----------
    events : TimedQueue
        ``(connection, message)`` for each message; ``(connection, None)`` after a connection has closed.
    token : str
        The password that each process must send first.
    address : str
        For `supervise.connect`.
    """

    def __init__(self, files: JobFiles, away: bool) -> None:
        self.events: TimedQueue[tuple[Connection | None, dict[str, Any] | None]] = TimedQueue()
        self.token = secrets.token_hex(16)
        (files.folder / "token").write_text(self.token, encoding="utf-8")  # only the owner has access to the folder
        self._sockets = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)]
        self._sockets[0].bind(str(files.socket))
        self.address = f"unix:{files.socket}"
        if away:
            self._sockets.append(socket.create_server(("", 0)))
            self.address = f"tcp:{self._sockets[1].getsockname()[1]}:{','.join(_names())}"
        for each in self._sockets:
            each.listen(1024)
            threading.Thread(target=self._accept, args=(each,), name="warpwell accept", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def serve(self, connected: socket.socket) -> Connection:
        """Return a connection to a supervisor that this process has started, which needs no password."""
        connection = Connection(connected)
        threading.Thread(target=self._serve, args=(connection, True), name="warpwell process", daemon=True).start()
        return connection

    def _accept(self, listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted, _ = listening.accept()
                if accepted.family != socket.AF_UNIX:
                    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection = Connection(accepted)
                threading.Thread(target=self._serve, args=(connection,), name="warpwell process", daemon=True).start()

    def _serve(self, connection: Connection, trusted: bool = False) -> None:
        messages = connection.incoming()
        first = next(messages, {})
        token = self.token if trusted else str(first.get("token"))
        if "here" not in first or not hmac.compare_digest(token.encode(), self.token.encode()):
            connection.close()
            return
        connection.facts = first
        self.events.put((connection, first))
        for message in messages:
            self.events.put((connection, message))
        self.events.put((connection, None))


class Observer:
    """Requests a report of all agents for a caller of `query_job`, and sends the reports together.

    Parameters
    ----------
    connection : Connection
        The connection of the caller.
    agents : iterable of Connection
    """

    def __init__(self, connection: Connection, agents: Iterable[Connection]) -> None:
        self._connection, self._agents = connection, sorted(agents, key=lambda agent: agent.rank)
        self._deadline = clock.monotonic() + _ANSWER_SECONDS
        for agent in self._agents:
            agent.facts.pop("reply", None)
            agent.send(ask=True)

    def answer(self) -> bool:
        """Send the reports if all agents have answered or have had enough time; return True if they were sent."""
        waiting = [a for a in self._agents if a.is_open and a.facts.get("ready") and "reply" not in a.facts]
        if waiting and clock.monotonic() < self._deadline:
            return False
        found = []
        for agent in self._agents:
            facts, info = agent.facts, agent.facts.get("reply")
            state = "lost" if not agent.is_open else "starting" if not facts.get("ready") else "silent"
            report = {"rank": agent.rank, "host": facts["host"], "pid": facts.get("pid"), "state": state}
            found.append({**report, "state": "running", "info": info} if info else report)
        self._connection.send(agents=found)
        self._connection.close()
        return True


def query_job(files: JobFiles) -> list[dict[str, Any]]:
    """Return the reports of the agents of a running job, from its launcher.

    Each has rank, host, pid and state, and info if the agent has answered.

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
            line.sendall(json.dumps({"here": "observer", "token": token}).encode() + b"\n")
            with line.makefile("rb") as file:
                found: list[dict[str, Any]] = json.loads(file.readline())["agents"]
    except (OSError, ValueError, KeyError) as error:
        raise PoolError(f"job {files.job} does not answer: it may have ended ({error})") from error
    return found


def _names() -> list[str]:
    """Return possible addresses of this host for other hosts, the best address first."""
    if address := os.environ.get("WARPWELL_POOL_HOST"):
        return [address]
    found = [socket.gethostname()]
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(found[0], None, type=socket.SOCK_STREAM)]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.255.255.255", 1))  # sends no data, but the kernel chooses the sender's address
        found.append(probe.getsockname()[0])
    return [name for name in dict.fromkeys(found) if ":" not in name] + ["127.0.0.1"]
