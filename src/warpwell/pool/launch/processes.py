"""The processes of a job on this host: how they are found, and ended.

Run as a file, without the package and without site packages so that it starts in milliseconds, it is the janitor: it
clears up after a launcher that was killed. The launcher starts it in a session of its own, with a pipe as stdin, which
ends with the launcher, however that ends. The arguments are the job's name and its folders.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping

JOB = "WARPWELL_POOL_JOB"
"""Variable that the launcher sets for all processes of a job: the job's name."""

_KILL_SECONDS = 2.0
_GRACE = 2.0
"""Seconds in which mpiexec and all other processes have to end by themselves after their launcher was killed."""
_LIMIT = 4.0


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
        """Return all processes with a rank that were ever seen, those of now included."""
        self._look()
        return list(self._ranks)

    def others(self) -> list[int]:
        """Return the other processes that mpiexec was ever seen to have started: those by which it reaches hosts."""
        self._others |= set(_children(self._root)) - set(self._ranks)
        return list(self._others)

    def ended(self) -> list[int]:
        """Return the ranks that were seen and of which no process is left; 0 is that of application and supervisor."""
        self._look()
        alive = {rank for pid, rank in self._ranks.items() if is_alive(pid)}
        return sorted(set(self._ranks.values()) - alive)

    def seen(self) -> set[int]:
        """Return the ranks that were ever seen."""
        return set(self._ranks.values())

    def _look(self) -> None:
        waiting = [self._root]
        for _ in range(3):  # mpiexec, its proxies, the ranks
            waiting = [child for pid in waiting for child in _children(pid)]
            for pid in waiting:
                if pid not in self._ranks:
                    environ = environ_of(pid)
                    if environ.get(JOB) == self._job and (rank := rank_of(environ)) >= 0:
                        self._ranks[pid] = rank


def rank_of(environ: Mapping[str, str]) -> int:
    """Return the rank that MPI will give a process; -1 if its environment does not have it."""
    for name in ("PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        if environ.get(name, "").isdecimal():
            return int(environ[name])
    return -1


def state_of(pid: int) -> str:
    """Return the kernel's letter for the state of a process: T if it is stopped, X if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stream:
            return stream.read().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def is_alive(pid: int) -> bool:
    """Return whether a process runs or is stopped; one that has ended is listed until its parent waits for it."""
    return state_of(pid) not in "ZX"


def environ_of(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty if it has ended, or is another user's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as stream:
            entries = stream.read().split(b"\0")
    except OSError:
        return {}
    return dict(e.decode(errors="replace").split("=", 1) for e in entries if b"=" in e)


def of_job(pids: Iterable[int], job: str) -> list[int]:
    """Return those of some processes that are alive and belong to a job."""
    return [pid for pid in set(pids) if is_alive(pid) and environ_of(pid).get(JOB) == job]


def kill_all(pids: Iterable[int], job: str) -> None:
    """Kill those of some processes that still belong to a job, and wait until they have ended."""
    left = of_job(pids, job)
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(is_alive(pid) for pid in left), _KILL_SECONDS)


def wait_until(done: Callable[[], object], seconds: float) -> bool:
    """Wait until ``done()`` is true, with short naps at first; return False if it is not after so many seconds."""
    until, nap = time.monotonic() + seconds, 1e-3
    while not done():
        if time.monotonic() > until:
            return False
        time.sleep(nap)
        nap = min(nap * 1.5, 0.02)
    return True


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as stream:
                found += map(int, stream.read().split())
    return found


def clear_up(job: str, folders: list[str]) -> None:
    """Wait for the launcher's end, and finish what it did not."""
    while os.read(0, 1):
        pass
    if not os.path.exists(folders[0]):
        return  # the launcher has cleared up itself

    def left() -> list[int]:
        # those that the application has started in sessions of their own as well
        return of_job([int(n) for n in os.listdir("/proc") if n.isdecimal() and int(n) != os.getpid()], job)

    until = time.monotonic() + _LIMIT
    if not wait_until(lambda: not left(), _GRACE):
        while (found := left()) and time.monotonic() < until:
            kill_all(found, job)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    clear_up(sys.argv[1], sys.argv[2:])
