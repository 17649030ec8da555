"""`JobFiles`: the folders of one job on one host, which are removed when the job ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

JOB = "WARPWELL_POOL_JOB"
"""Variable that the launcher sets for all processes of a job: the job's name."""
_PREFIX = "warpwell-pool-"
_RANDOM = 4
_STALE_SECONDS = 3600.0
"""Age in seconds at which shared memory is removed if its launcher is not visible, as in another container."""
_MAX_FOLDER_BYTES = 50
"""Maximum length of the path of the folder for temporary files, because paths of sockets have at most 107
characters."""
SHARED_MEMORY = Path("/dev/shm")


class JobFiles:
    """The folder of a job for sockets and MPI's own files, and one in shared memory.

    Parameters
    ----------
    job : str
        The name of the job, of letters and digits.
    """

    def __init__(self, job: str) -> None:
        self.job = job
        self.folder = base() / job
        self.memory = SHARED_MEMORY / f"{_PREFIX}{os.getuid()}-{job}"
        self._lock: int | None = None

    @classmethod
    def of_new_job(cls) -> JobFiles:
        """Return the folders of a new job of this process, which `make` creates."""
        return cls(f"{os.getpid()}{secrets.token_hex(_RANDOM)}")

    def make(self) -> None:
        """Make the folders; remove the folders of jobs whose launcher and supervisors were killed."""
        _sweep()
        self.folder.mkdir(mode=0o700)
        # under a temporary name: another launcher would remove a folder whose file is not locked
        new = self.folder / "lock.new"
        self._lock = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # the kernel releases the lock when this process exits for any reason
        new.rename(self.folder / "lock")
        self.use()

    @property
    def socket(self) -> Path:
        """The socket on which the launcher listens."""
        return self.folder / "socket"

    def use(self) -> None:
        """Make the folder in shared memory; each host has its own."""
        if SHARED_MEMORY.is_dir():
            with contextlib.suppress(FileExistsError):
                self.memory.mkdir(mode=0o700)

    def remove(self) -> None:
        """Remove both folders; a process that has mapped a file keeps its memory."""
        for path in (self.memory, self.folder):
            shutil.rmtree(path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def base() -> Path:
    """Return the folder of all jobs of this user on this host."""
    folder = tempfile.gettempdir()
    if len(folder) > _MAX_FOLDER_BYTES:
        folder = "/tmp"
    path = Path(folder) / f"{_PREFIX}{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.stat().st_uid != os.getuid() or path.is_symlink():
        raise PermissionError(f"{path} is owned by another user; remove it, or set TMPDIR")
    return path


def jobs() -> Iterator[tuple[JobFiles, bool]]:
    """Yield every job of this user on this host, and whether its launcher is alive."""
    for path in sorted(base().iterdir()):
        try:
            lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # another process creates or removes the folder
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield JobFiles(path.name), True
        else:
            yield JobFiles(path.name), False
        finally:
            os.close(lock)


def _sweep() -> None:
    for files, alive in jobs():
        if not alive:
            files.remove()
    for path in SHARED_MEMORY.glob(f"{_PREFIX}{os.getuid()}-*"):  # of jobs with another temporary folder
        launcher = path.name.rpartition("-")[2][: -2 * _RANDOM]
        with contextlib.suppress(OSError):
            if not Path("/proc", launcher).exists() and path.stat().st_mtime < time.time() - _STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
