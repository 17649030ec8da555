"""`Lifeline`: what ties a process of a job to the launcher; when it breaks, the process ends."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import AgentError
from .job_files import JobFiles

ADDRESS, TOKEN, JOB = "WARPWELL_POOL_LAUNCHER", "WARPWELL_POOL_TOKEN", "WARPWELL_POOL_JOB"
"""Variables that the launcher sets for its processes: where it listens, what it knows them by, their job's name."""

ENDED = 70
"""Exit status of a process whose launcher is gone."""

_CONNECT_SECONDS = 10.0
_GO_SECONDS = 600.0
"""More than the launcher itself would wait."""


class Lifeline:
    """A connection to the launcher.

    Parameters
    ----------
    kind : str
        ``"agent"`` or ``"application"``.
    environ : mapping
        Says where the launcher is.
    about : mapping
        What else it should know of this process.

    Raises
    ------
    AgentError
        The launcher is not there.
    """

    def __init__(self, kind: str, environ: Mapping[str, str] = os.environ, about: Mapping[str, Any] = {}) -> None:
        self._files = JobFiles(environ[JOB])
        self._lock = threading.Lock()
        self._answers: dict[str, Callable[[dict[str, Any]], Any]] = {}
        self._socket = connect(environ[ADDRESS])
        self._lines = self._socket.makefile("rb")
        self.rank = rank_of(environ)
        self.tell(here=kind, token=environ[TOKEN], rank=self.rank, pid=os.getpid(), host=socket.gethostname(), **about)

    def tell(self, **what: Any) -> None:
        """Send something; a launcher that is gone is noticed elsewhere."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(what).encode() + b"\n")

    def wait_for_go(self) -> dict[str, Any]:
        """Wait until everybody is here; return what the launcher decided. Ends the process if it decided to end.

        No process enters MPI before all are here, because MPI would wait for a dead one forever.
        """
        self._files.use()
        self._socket.settimeout(_GO_SECONDS)
        said = self._read()
        self._socket.settimeout(None)
        if said is None or "go" not in said:
            self._leave()
        else:
            found: dict[str, Any] = said["go"]
            return found
        raise AssertionError

    def shared_memory(self) -> str | None:
        """Return the folder for files in shared memory, which are removed with the job."""
        return str(self._files.memory) if self._files.memory.is_dir() else None

    def on(self, name: str, answer: Callable[[dict[str, Any]], Any]) -> None:
        """Have the watching thread call ``answer(message)`` for messages with this name."""
        self._answers[name] = answer

    def watch(self) -> None:
        """Watch in a thread from now on: the process ends when the launcher does, or says so."""
        threading.Thread(target=self._watch, name="warpwell lifeline", daemon=True).start()

    def _watch(self) -> None:
        while (said := self._read()) is not None and "end" not in said:
            for name, answer in list(self._answers.items()):
                if name in said:
                    with contextlib.suppress(Exception):  # whatever happens, watch on
                        answer(said)
        self._leave()

    def _read(self) -> dict[str, Any] | None:
        try:
            line = self._lines.readline()
            found: dict[str, Any] | None = json.loads(line) if line.endswith(b"\n") else None
            return found
        except (OSError, ValueError):
            return None

    def _leave(self) -> None:
        """End the process at once: a thread in MPI would not let it end in any other way."""
        shutil.rmtree(self._files.memory, ignore_errors=True)  # the launcher removes only those of its own host
        os._exit(ENDED)


def connect(address: str) -> socket.socket:
    """Connect to ``unix:PATH`` or ``tcp:PORT:HOST,HOST,..`` (the first that answers).

    Raises
    ------
    AgentError
    """
    kind, _, rest = address.partition(":")
    reason: OSError | None = None
    if kind == "unix":
        tries: list[Any] = [rest]
    else:
        port, _, names = rest.partition(":")
        tries = [(name, int(port)) for name in names.split(",")]
    for each in tries:
        try:
            if kind == "unix":
                found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                found.settimeout(_CONNECT_SECONDS)
                found.connect(each)
            else:
                found = socket.create_connection(each, _CONNECT_SECONDS)
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            found.settimeout(None)
            return found
        except OSError as error:
            reason = error
    raise AgentError(f"host {socket.gethostname()}: no launcher of the job at {address} ({reason})")


def rank_of(environ: Mapping[str, str]) -> int:
    """Return the rank that MPI will give this process; -1 where its launcher does not say so before."""
    for name in ("PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        if environ.get(name, "").isdecimal():
            return int(environ[name])
    return -1


def interrupt(number: int) -> None:
    """Deliver a signal to this process's main thread, as a terminal would."""
    main = threading.main_thread().ident
    if number == signal.SIGINT and main is not None:
        signal.pthread_kill(main, number)  # to whichever thread sits in a system call
    else:
        os.kill(os.getpid(), number)
