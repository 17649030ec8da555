"""`Children`: the processes that mpiexec started on this host, as the kernel lists them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from .lifeline import JOB, rank_of

_PROC = Path("/proc")
_KILL_SECONDS = 2.0


class Children:
    """Processes of a job below `root`.

    Parameters
    ----------
    root : int
        Process id of mpiexec.
    job : str
    """

    def __init__(self, root: int, job: str) -> None:
        self._root, self._job = root, job
        self._ranks: dict[int, int] = {}
        self._others: set[int] = set()

    def ranks(self) -> list[int]:
        """Return the processes with a rank that were ever seen, and those there are now."""
        self._look()
        return list(self._ranks)

    def others(self) -> list[int]:
        """Return what else mpiexec was ever seen to have started: what it reaches other hosts with."""
        self._others |= set(_children(self._root)) - set(self._ranks)
        return list(self._others)

    def ended(self) -> list[int]:
        """Return the ranks of agents that were seen and are gone."""
        self._look()
        alive = {rank for pid, rank in self._ranks.items() if is_alive(pid)}
        return sorted({rank for rank in self._ranks.values() if rank > 0} - alive)

    def _look(self) -> None:
        waiting = [self._root]
        for _ in range(3):  # mpiexec, proxies of it, processes
            waiting = [child for pid in waiting for child in _children(pid)]
            for pid in waiting:
                if pid not in self._ranks:
                    environ = environ_of(pid)
                    if environ.get(JOB) == self._job and (rank := rank_of(environ)) >= 0:
                        self._ranks[pid] = rank


def state_of(pid: int) -> str:
    """Return the kernel's letter for what a process does: T if it is stopped, X if it is gone."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def is_alive(pid: int) -> bool:
    """Tell whether a process runs (or is stopped): one that has ended may be listed until its parent asks."""
    return state_of(pid) not in "ZX"


def environ_of(pid: int) -> dict[str, str]:
    """Return what a process was started with; nothing where it is gone, or somebody else's."""
    try:
        entries = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(e.decode(errors="replace").split("=", 1) for e in entries if b"=" in e)


def kill_all(pids: Iterable[int], job: str) -> None:
    """Kill those of these processes that still are processes of the job, and wait until they are gone."""
    left = [pid for pid in set(pids) if is_alive(pid) and environ_of(pid).get(JOB) == job]
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + _KILL_SECONDS
    while any(is_alive(pid) for pid in left) and time.monotonic() < until:
        time.sleep(0.002)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in (_PROC / str(pid) / "task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found
