"""The GPUs of this host: which there are (`list_gpus`), which job has each (`Claim`), which agent gets each (`assign`).

A GPU that an agent uses is locked: a file for each GPU in a folder of the host, with two bytes that processes lock, the
first by the one that has the GPU for itself, the second by those that share it. The kernel releases the locks when
their process ends, however it does.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import stat
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...driver.environment import FOLDER as LAYER
from ...errors import AgentError
from ...libcuda import driver, uuid_of

FOLDER = "WARPWELL_GPU_LOCKS"
"""Variable that names another folder than `HERE`; jobs see each other if they have the same folder."""

HERE = "/tmp/warpwell-gpus"

_OWN, _SHARED = 0, 1
_FLOCK = "hhqqi4x"  # struct flock of Linux, 64 bits: type, whence, start, length, process


def list_gpus() -> list[str]:
    """Return the UUIDs of the GPUs that may be used, in the driver's order; empty without any.

    The driver is asked in a process of its own, because it reads ``CUDA_VISIBLE_DEVICES`` once, when it is first
    called, and this process will set that later. Call it before there are threads.
    """
    if not has_driver(os.environ):
        return []
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, json.dumps(_ask()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        said = stream.read()
    os.waitpid(child, 0)
    found: list[str] = json.loads(said) if said else []
    return found


def has_driver(environ: Mapping[str, str]) -> bool:
    """Say whether this process finds the driver of this machine, and not the layer of another job."""
    return not environ.get(LAYER) and driver() is not None


def visible(own: str, gpus: Sequence[str]) -> str:
    """Return an agent's ``CUDA_VISIBLE_DEVICES``: its own GPU first, which becomes ordinal 0, and then the others.

    The agent does not compute on the others. But only to a GPU that the process sees can the copy engine write; to
    others the driver copies with a kernel, which waits until multiprocessors are free (H200, driver 580). A part of a
    GPU (MIG) stands alone: a process can use only one.
    """
    return own if own.startswith("MIG") else ",".join([own, *(uuid for uuid in gpus if uuid != own)])


def assign(
    agents: Sequence[int], gpus: Sequence[str], target: str, share: bool, host: str, taken: Mapping[str, str] = {}
) -> dict[int, Mapping[str, Any]]:
    """Return target and GPU of each agent of a host: GPU 0, 1, .. in the order of ranks, without those in use.

    Parameters
    ----------
    agents : sequence of int
        Ranks.
    gpus : sequence of str
        UUIDs.
    target : {"auto", "cpu", "cuda"}
    share : bool
        Several agents may use one GPU, also one that another job uses.
    host : str
        For messages.
    taken : mapping
        GPUs that other jobs use, and their users.

    Raises
    ------
    AgentError
        There are too few GPUs.
    """
    if target == "cpu" or (target == "auto" and not gpus):
        return {rank: {"target": "cpu"} for rank in agents}
    if not gpus:
        raise AgentError(f"host {host} has no GPU: leave out --target cuda, or check its driver with nvidia-smi")
    free = [uuid for uuid in gpus if uuid not in taken]
    if len(agents) > len(free) and not share:
        used = [uuid for uuid in gpus if uuid in taken]
        others = f", of which other jobs have {len(used)} (GPU {used[0]}: {taken[used[0]]})" if used else ""
        raise AgentError(
            f"host {host} has {len(gpus)} GPU{'s' * (len(gpus) > 1)}{others} for {len(agents)} "
            f"agent{'s' * (len(agents) > 1)}: start fewer, {'wait for them, ' if used else ''}add hosts, or take "
            f"--share-gpu to have several agents on one GPU"
        )
    order = [*free, *(uuid for uuid in gpus if uuid in taken)]
    chosen = {rank: order[k % len(order)] for k, rank in enumerate(agents)}
    return {rank: {"target": "cuda", "gpu": gpus.index(uuid), "uuid": uuid} for rank, uuid in chosen.items()}


def _ask() -> list[str]:
    library, count = driver(), ctypes.c_int(0)
    if library.cuInit(0) != 0 or library.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    found = []
    for k in range(count.value):
        device = ctypes.c_int(0)
        library.cuDeviceGet(ctypes.byref(device), k)
        digits = (uuid_of(library, device) or bytes(16)).hex()
        found.append(f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}")
    return found


class Claim:
    """A GPU that this process uses, until `free` or its end.

    Parameters
    ----------
    uuid : str
    share : bool
        Other processes may use it, too. Otherwise this raises if another process uses it.

    Raises
    ------
    AgentError
        Another process uses it.
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
        """Release the GPU."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def user_of(uuid: str) -> str | None:
    """Return the process that uses a GPU, alone or shared, and its user, as text; None if none does."""
    file = _open(uuid, make=False)
    if file is None:
        return None
    try:
        process = _holder(file, _OWN) or _holder(file, _SHARED)
    finally:
        os.close(file)
    return None if process is None else _described(process)


def users(gpus: Sequence[str]) -> Mapping[str, str]:
    """Return the users of GPUs. Call it before this process claims one: closing a file drops its own locks."""
    found = {uuid: user_of(uuid) for uuid in gpus}
    return {uuid: user for uuid, user in found.items() if user is not None}


def _holder(file: int, byte: int) -> int | None:
    """Return the process that holds the lock of a byte; 0 if it is in another container."""
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    kind, _, _, _, process = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else int(process)


def _open(uuid: str, *, make: bool = True) -> int | None:
    """Open the file of a GPU; return None if that fails, with a note on stderr if the file was to be made."""
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
            raise OSError(f"{path} is not a file")
        return file
    except OSError as error:
        if make:
            print(
                f"warpwell: note: GPU {uuid} cannot be kept from other jobs ({error}): set {FOLDER} to a folder that "
                f"all users of this host may write",
                file=sys.stderr,
            )
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
