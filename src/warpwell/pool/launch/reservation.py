"""Coordinates GPUs between jobs: `Claim`, a GPU that a process uses; `Reservation`, the next GPUs that become free.

All state is locks in one folder of the host, which the kernel releases when their process ends. Each GPU has a file
with two lockable bytes: the job that has the GPU exclusively locks the first, and the processes that use the GPU lock
the second. Each waiting job has a *ticket*, a locked file in the subfolder ``queue``; the lowest number is first.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import socket
import stat
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ..._os import clock
from ...errors import AgentError

WAIT = "WARPWELL_CUDA_WAIT"
"""Variable with the seconds that a job or its CUDA program may wait for GPUs."""
FOLDER = "WARPWELL_GPU_LOCKS"
"""Variable that replaces `DEFAULT_FOLDER`. Only jobs with the same folder coordinate."""
DEFAULT_FOLDER = "/tmp/warpwell-gpus"
POLL_SECONDS = 0.25
"""Interval at which a waiting job looks for free GPUs."""
NOTE_SECONDS = 30.0
"""Interval at which a waiting job reports its position."""
LOCK_SECONDS = 10.0
"""Time in which the lock of the queue, which processes hold for milliseconds, must become free."""

_OWN, _USED = 0, 1
_FLOCK = "hhqqi4x"  # struct flock of Linux, 64 bits: type, whence, start, length, process
_MAX_TEXT_BYTES = 200


class Claim:
    """A GPU that this process uses, until `free` or its end.

    Parameters
    ----------
    uuid : str
    exclusive : bool
        No other process may use the GPU, except with a claim that is not exclusive.

    Raises
    ------
    AgentError
        The claim is exclusive, and another process uses the GPU.
    """

    def __init__(self, uuid: str, *, exclusive: bool = False) -> None:
        self._file = _open(uuid)
        if self._file is None:
            return
        has_lock = _lock(self._file, _OWN, fcntl.F_WRLCK) if exclusive else _lock(self._file, _USED, fcntl.F_RDLCK)
        if not has_lock or (exclusive and _is_locked(self._file, _USED)):
            self.free()
            raise AgentError(f"{uuid} is in use by {user_of(uuid)}: start again")
        try:
            os.pwrite(self._file, _description().ljust(_MAX_TEXT_BYTES), 0)
        except OSError:
            self.free()
            raise

    def free(self) -> None:
        """Release the GPU."""
        if self._file is not None:
            for byte in (_OWN, _USED):  # closing would not unlock, because a forked child has the file open, too
                _lock(self._file, byte, fcntl.F_UNLCK)
            os.close(self._file)
            self._file = None


def user_of(uuid: str) -> str | None:
    """Return the process that uses a GPU, exclusively or not, and its user, as text; None if the GPU is free."""
    file = _open(uuid, make=False)
    if file is None:
        return None
    try:
        if not _is_locked(file, _OWN) and not _is_locked(file, _USED):
            return None
        text = os.pread(file, _MAX_TEXT_BYTES, 0).decode(errors="replace").strip()
        return "".join(filter(str.isprintable, text)) or "another process"
    finally:
        os.close(file)


def users(gpus: Iterable[str]) -> Mapping[str, str]:
    """Return a process for each GPU in use."""
    found = {uuid: user_of(uuid) for uuid in gpus}
    return {uuid: user for uuid, user in found.items() if user is not None}


class Reservation:
    """GPUs that a job gets exclusively after the jobs before it in the queue have their GPUs.

    Parameters
    ----------
    gpus : sequence of str
        UUIDs of the GPUs to choose from.
    count : int
    wait : float
        Seconds after which `poll` raises.
    note : callable
        Called with a line about the position in the queue, at once and every `NOTE_SECONDS`.

    Raises
    ------
    AgentError
        `gpus` has fewer than `count` items.
    """

    def __init__(self, gpus: Sequence[str], count: int, wait: float = 0.0, note: Callable[[str], None] = print) -> None:
        self._gpus, self._count, self._wait, self._note = gpus, count, wait, note
        self._ticket: Path | None = None
        self._lock: int | None = None
        self._since = clock.monotonic()
        self._noted = -NOTE_SECONDS
        self._claims: list[Claim] = []
        self._reserved: list[str] = []
        self._ahead = 0
        if count > len(gpus):
            raise AgentError(f"{self.shortage()}: start fewer, add hosts, or use --share-gpu")

    def poll(self) -> list[str]:
        """Claim the GPUs if possible, and return them; otherwise return an empty list.

        Raises
        ------
        AgentError
            The time is over.
        """
        if self._reserved:
            return self._reserved
        waited, limit = clock.monotonic() - self._since, self._wait
        try:
            with _queue() as folder:
                free = self._free(folder)
                for uuid in free[: self._count] if len(free) >= self._count else ():
                    self._claims.append(Claim(uuid, exclusive=True))
                    self._reserved.append(uuid)
        except AgentError:  # a process that shares GPUs has claimed one since `_free` checked
            self._release()
        except BlockingIOError:  # another process has the lock of the queue
            limit += LOCK_SECONDS
        except OSError as error:
            _report_unusable(", ".join(self._gpus), error)
            self._reserved = list(self._gpus[: self._count])
        if self._reserved:
            self._leave()
            return self._reserved
        if waited >= limit:
            self.close()
            advice = f"; they were not free within {self._wait:g} s" if self._wait else "; wait for them with --wait"
            raise AgentError(f"{self.shortage()}{advice}, start fewer, add hosts, or use --share-gpu")
        if waited >= self._noted + NOTE_SECONDS and self._wait:
            self._noted = waited
            self._note(f"waiting for {self.shortage()}")
        return []

    def close(self) -> None:
        """Release the GPUs, and leave the queue."""
        self._leave()
        self._release()

    def _release(self) -> None:
        for claim in self._claims:
            claim.free()
        self._claims, self._reserved = [], []

    def _free(self, folder: Path) -> list[str]:
        """Enter the queue; return the free GPUs that no earlier job in the queue wants."""
        numbers = sorted(int(name) for name in os.listdir(folder) if name.isdecimal())
        if self._ticket is None:
            self._ticket = folder / str(numbers[-1] + 1 if numbers else 1)
            self._lock = os.open(self._ticket, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
            os.fchmod(self._lock, 0o666)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            os.write(self._lock, " ".join(self._gpus).encode())
        reserved: set[str] = set()
        self._ahead = 0
        for number in numbers:
            if number < int(self._ticket.name) and (gpus := _read_ticket(folder / str(number))) & set(self._gpus):
                reserved |= gpus
                self._ahead += 1
        return [uuid for uuid in self._gpus if uuid not in reserved and user_of(uuid) is None]

    def _leave(self) -> None:
        if self._ticket is not None and self._lock is not None:
            self._ticket.unlink(missing_ok=True)
            os.close(self._lock)
        self._ticket = self._lock = None

    def shortage(self) -> str:
        """Return the shortage as text, with the users of all GPUs of the host: two jobs may wait for each other."""
        count, folder = len(self._gpus), _folder(make=False)
        used = users(sorted(set(os.listdir(folder)) - {"queue"})) if folder.is_dir() else {}
        text = f"{self._count} GPU{'s' * (self._count > 1)} of the {count or 'no'} on host {socket.gethostname()}"
        parts = [f"{uuid} is in use by {user}" for uuid, user in used.items()]
        if self._ahead:
            parts.append(f"{self._ahead} job{'s' * (self._ahead > 1)} ahead in the queue")
        return text + "".join(f", {part}" for part in parts)


@contextlib.contextmanager
def _queue() -> Iterator[Path]:
    """Yield the locked folder of tickets; raise BlockingIOError if another process has the lock."""
    folder = _folder() / "queue"
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        folder.chmod(0o777)  # writable for all users, because each removes the tickets of killed processes
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield folder
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing would not unlock, because another thread may have forked a child
    finally:
        os.close(file)


def _read_ticket(ticket: Path) -> set[str]:
    """Return the GPUs for which the job of a ticket waits; remove the ticket if its process has ended."""
    try:
        file = os.open(ticket, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return set()
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(OSError):
            ticket.unlink()
        return set()
    except BlockingIOError:
        return set(os.pread(file, 1 << 16, 0).decode(errors="replace").split())
    finally:
        os.close(file)


def _folder(*, make: bool = True) -> Path:
    """Create and return the folder of all locks."""
    folder = Path(os.environ.get(FOLDER) or DEFAULT_FOLDER)
    if make:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            folder.chmod(0o1777)  # writable for all users, because a lock needs a writable file
    return folder


def _open(uuid: str, *, make: bool = True) -> int | None:
    """Open the file of a GPU; return None if that fails. With `make`, print a note in that case."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        path = _folder(make=make) / uuid
        try:
            file = os.open(path, flags)  # without O_CREAT, which the kernel may forbid to users other than the owner
        except FileNotFoundError:
            if not make:
                return None
            file = os.open(path, flags | os.O_CREAT, 0o666)
            os.fchmod(file, 0o666)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(f"{path} is not a file")
        return file
    except OSError as error:
        if make:
            _report_unusable(uuid, error)
        return None


def _report_unusable(gpus: str, error: OSError) -> None:
    advice = f"set {FOLDER} to a folder that all users of this host may write"
    print(f"warpwell: note: {gpus} cannot be reserved against other jobs ({error}): {advice}", file=sys.stderr)


def _lock(file: int, byte: int, kind: int) -> bool:
    """Lock a byte for this open file; return False if a lock of another open file conflicts."""
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def _is_locked(file: int, byte: int) -> bool:
    """Return whether another open file has a lock on a byte."""
    request = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    kind = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_OFD_GETLK, request))[0]
    return bool(kind != fcntl.F_UNLCK)


def _description() -> bytes:
    owner: int | str = os.getuid()
    with contextlib.suppress(KeyError):
        owner = pwd.getpwuid(os.getuid()).pw_name
    return f"process {os.getpid()} of user {owner}".encode()
