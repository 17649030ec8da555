"""`Rendezvous`: where the processes of a job connect to its launcher, and stay connected."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

from ..agent.timed_queue import TimedQueue
from .job_files import JobFiles

_LONGEST = 1 << 20
"""Bytes of a message at most."""
_TELL_SECONDS = 5


class Rendezvous:
    """Listens in a socket file, and on a port where there are other hosts.

    Parameters
    ----------
    files : JobFiles
    away : bool
        Whether processes of other hosts will connect. A token keeps out whoever else may.

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
        """Take connections from now on; who came before has been kept waiting."""
        for each in self._sockets:
            threading.Thread(target=self._accept, args=(each,), name="warpwell accept", daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
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
            threading.Thread(target=self._serve, args=(Connection(accepted),), name="warpwell process",
                             daemon=True).start()  # fmt: skip

    def _serve(self, connection: Connection) -> None:
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


class Connection:
    """A process of the job, as the launcher sees it."""

    def __init__(self, opened: socket.socket) -> None:
        self._socket = opened
        # not `settimeout`, which would count for the thread that reads as well
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", _TELL_SECONDS, 0))
        self._deaf = False
        self._lines = opened.makefile("rb")
        self._lock = threading.Lock()
        self.local = opened.family == socket.AF_UNIX
        self.kind, self.rank, self.pid, self.host = "", -1, 0, ""
        self.about: dict[str, Any] = {}
        self.ready = self.open = False

    def take(self, first: dict[str, Any]) -> None:
        """Take over what it says about itself."""
        self.kind, self.rank = str(first.get("here")), int(first.get("rank", -1))
        self.pid, self.host = int(first.get("pid", 0)), str(first.get("host"))
        self.about, self.open = first, True

    def read(self) -> dict[str, Any] | None:
        """Return its next message; None when there are no more."""
        try:
            line = self._lines.readline(_LONGEST)
            found = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError):
            found = None
        return found if isinstance(found, dict) else None

    def tell(self, **what: Any) -> None:
        """Send a message; who is gone needs none, nor who has not read for so long that nothing more fits."""
        with self._lock:
            try:
                if not self._deaf:
                    self._socket.sendall(json.dumps(what).encode() + b"\n")
            except OSError:
                self._deaf = True  # half of a message may be under way: nothing may follow it

    def hand(self, descriptors: Sequence[int]) -> None:
        """Hand open files to a process of this host."""
        if self.local:
            with self._lock, contextlib.suppress(OSError):
                socket.send_fds(self._socket, [b"."], list(descriptors))

    def close(self) -> None:
        """End the connection, and so the process."""
        self.open = False
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def _names() -> list[str]:
    """Return addresses of this host that others may reach it by, the best first."""
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
