"""`Lifeline`: the connection of a process of a job to its launcher; when it breaks, the process ends.

A `JsonLine` is either end of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from ...errors import AgentError
from .job_files import JobFiles
from .processes import JOB, rank_of
from .supervise import connect, is_closed

ADDRESS, TOKEN = "WARPWELL_POOL_LAUNCHER", "WARPWELL_POOL_TOKEN"
"""Variables that the launcher sets for its processes: the address where it listens, and the password to it."""

WAIT = "WARPWELL_CUDA_WAIT"
"""Variable with the seconds that a job or its CUDA program may wait for GPUs."""

ENDED = 70
"""Exit status of a process whose launcher has ended."""

_LONGEST = 1 << 20
"""Bytes of a message at most."""
_GO_SECONDS = 600.0
"""More than the launcher itself would wait."""


class JsonLine:
    """A connection whose messages are JSON objects, one a line."""

    def __init__(self, opened: socket.socket) -> None:
        self._socket = opened
        self._lines = opened.makefile("rb")
        self._lock = threading.Lock()
        self._broken = False

    def read(self) -> dict[str, Any] | None:
        """Return the next message; None if there are no more."""
        try:
            line = self._lines.readline(_LONGEST)
            found = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError):
            found = None
        return found if isinstance(found, dict) else None

    def tell(self, **message: Any) -> None:
        """Send a message, unless the other end is gone or has not read for too long: `read` notices that."""
        with self._lock:
            try:
                if not self._broken:
                    self._socket.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                self._broken = True  # half of a message may have been sent: nothing may follow it


class Lifeline(JsonLine):
    """A connection to the launcher.

    Parameters
    ----------
    kind : str
        ``"agent"`` or ``"application"``.
    environ : mapping
        Has the launcher's address.
    about : mapping
        What else the launcher needs to know of this process.

    Raises
    ------
    AgentError
        The launcher does not answer. The process ends if it has closed.
    """

    def __init__(self, kind: str, environ: Mapping[str, str] = os.environ, about: Mapping[str, Any] = {}) -> None:
        self._files = JobFiles(environ[JOB])
        self._decisions: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._wait_seconds = float(environ.get(WAIT, 0))
        self._answers: dict[str, Callable[[dict[str, Any]], Any]] = {}
        self.before_exit: Callable[[], object] = bool
        """Called before the launcher, or its end, ends this process."""
        try:
            super().__init__(connect(environ[ADDRESS]))
        except OSError as error:
            host, address = socket.gethostname(), environ[ADDRESS]
            if is_closed(address, error):
                self._leave()
            raise AgentError(f"host {host}: no launcher of the job at {address} ({error})") from error
        self.rank = rank_of(environ)
        self.tell(here=kind, token=environ[TOKEN], rank=self.rank, pid=os.getpid(), host=socket.gethostname(), **about)

    def wait_for_go(self, reserve: Callable[..., list[str]] = list) -> dict[str, Any]:
        """Wait until all processes are connected; return what the launcher decided. End the process if it says so.

        No process enters MPI before all are connected, because MPI would wait for a dead one forever. From this call on
        the process ends when the launcher ends.

        Parameters
        ----------
        reserve : callable
            Returns the GPUs of this host that the job has for itself, if the launcher asks this process for them.
        """
        self._files.use()
        threading.Thread(target=self._watch, name="warpwell lifeline", daemon=True).start()
        while True:
            try:
                message = self._decisions.get(timeout=_GO_SECONDS + self._wait_seconds)
            except queue.Empty:
                self._leave()
            if "go" in message:
                found: dict[str, Any] = message["go"]
                return found
            try:
                self.tell(reserved=reserve(**message["reserve"]))
            except AgentError as error:
                self.tell(unavailable=str(error))

    def shared_memory(self) -> str | None:
        """Return the folder for files in shared memory, which is removed with the job; None without shared memory."""
        return str(self._files.memory) if self._files.memory.is_dir() else None

    def on(self, name: str, answer: Callable[[dict[str, Any]], Any]) -> None:
        """Call ``answer(message)`` for messages with this name, in the watching thread."""
        self._answers[name] = answer

    def _watch(self) -> None:
        while (said := self.read()) is not None and "end" not in said:
            if "go" in said or "reserve" in said:
                self._decisions.put(said)
            for name, answer in list(self._answers.items()):
                if name in said:
                    with contextlib.suppress(Exception):  # whatever happens, watch on
                        answer(said)
        self._leave()

    def _leave(self) -> NoReturn:
        """End the process at once: a thread in MPI would not let it end in any other way."""
        self.before_exit()
        shutil.rmtree(self._files.memory, ignore_errors=True)  # the launcher removes only those of its own host
        os._exit(ENDED)


def interrupt(number: int) -> None:
    """Deliver a signal to this process's main thread, as a terminal would."""
    main = threading.main_thread().ident
    if number == signal.SIGINT and main is not None:
        signal.pthread_kill(main, number)  # to whichever thread sits in a system call
    else:
        os.kill(os.getpid(), number)
