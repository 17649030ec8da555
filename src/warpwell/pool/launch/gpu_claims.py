"""`Claim`: keeps a GPU for the agent of one job, among the jobs of all users of a host.

A file for each GPU in a folder of the host, with two bytes that processes lock: the first by who has the GPU for
itself, the second by those who share it. The kernel gives locks back when their process ends, however it does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...errors import AgentError

FOLDER = "WARPWELL_GPU_LOCKS"
"""Variable that names another folder than `HERE`: jobs see each other where it is the same."""

HERE = "/tmp/warpwell-gpus"

_OWN, _SHARED = 0, 1
_FLOCK = "hhqqi4x"  # struct flock of Linux, 64 bits: type, whence, start, length, process


class Claim:
    """A GPU that this process uses, until `free` or its end.

    Parameters
    ----------
    uuid : str
    share : bool
        Others may have it, too. Otherwise this raises where somebody has.

    Raises
    ------
    AgentError
        Another process has it.
    """

    def __init__(self, uuid: str, share: bool = False) -> None:
        self.uuid = uuid
        self._file = _open(uuid)
        if self._file is None:
            return
        try:
            if share:
                fcntl.lockf(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, _SHARED)
            else:
                with contextlib.suppress(BlockingIOError, PermissionError):
                    fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _OWN)
                    if _holder(self._file, _SHARED) is None:
                        return
                raise AgentError(f"GPU {uuid} was taken just now by {user_of(uuid)}: start again")
        except BaseException:
            self.free()
            raise

    def free(self) -> None:
        """Let others have it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def user_of(uuid: str) -> str | None:
    """Return who has a GPU for itself or shares it: a process and its user, for people; None where nobody does."""
    file = _open(uuid, make=False)
    if file is None:
        return None
    try:
        process = _holder(file, _OWN) or _holder(file, _SHARED)
    finally:
        os.close(file)
    return None if process is None else _described(process)


def users(gpus: Sequence[str]) -> Mapping[str, str]:
    """Return who has which GPU. To be called before this process claims one: closing a file drops its own locks."""
    found = {uuid: user_of(uuid) for uuid in gpus}
    return {uuid: user for uuid, user in found.items() if user is not None}


def _holder(file: int, byte: int) -> int | None:
    """Return the process that would keep this one from locking a byte; it may be 0, of another container."""
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    kind, _, _, _, process = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else int(process)


def _open(uuid: str, *, make: bool = True) -> int | None:
    """Open a GPU's file; None where that cannot be, of which stderr is told by whoever would make it."""
    folder = Path(os.environ.get(FOLDER) or HERE)
    path = folder / uuid
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        if make:
            with contextlib.suppress(FileExistsError):
                folder.mkdir(parents=True)
                folder.chmod(0o1777)  # all users: a lock needs a file that one may write
        try:
            file = os.open(path, flags)  # not O_CREAT: the kernel may forbid that to others than its owner
        except FileNotFoundError:
            if not make:
                return None
            file = os.open(path, flags | os.O_CREAT, 0o666)
            os.fchmod(file, 0o666)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(f"{path} is no file")
        return file
    except OSError as error:
        if make:
            print(f"warpwell: note: GPU {uuid} cannot be kept from other jobs ({error}): set {FOLDER} to a folder that "
                  f"all users of this host may write", file=sys.stderr)  # fmt: skip
        return None


def _described(process: int) -> str:
    try:
        owner: int | str = os.stat(f"/proc/{process}").st_uid
    except OSError:
        return "a process of another container" if process <= 0 else f"process {process}"
    with contextlib.suppress(KeyError, ImportError):
        import pwd

        owner = pwd.getpwuid(int(owner)).pw_name
    return f"process {process} of user {owner}"
