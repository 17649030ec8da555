"""`open_namespace`: opens a namespace by its name, ``ADDRESS/NAMESPACE``; all users of a process share its drive.

A drive can be opened once at a time. The first user in this process opens it, later users share it, and the last user
closes it.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable

from .. import errors
from .drive import Drive, Namespace
from .machine import Machine
from .vfio import ARENA_BYTES, VfioTransport

_NAME = re.compile(r"(?:nvme:)?(.+)/(\d+)")

_drives: dict[str, tuple[Drive, int]] = {}
"""Drive and number of users, by address."""
_changing = threading.Lock()


def open_namespace(name: str, machine: Machine | None = None) -> tuple[Namespace, Callable[[], None]]:
    """Return a namespace of a drive of this machine, and the function that releases it (once).

    Parameters
    ----------
    name : str
        ``"nvme:0000:01:00.0/1"``: PCI address and id of the namespace; ``nvme:`` may be left out.
    machine : Machine, optional

    Raises
    ------
    ArgumentError
        The name has another form, or this machine has no drive of this name.
    DriveError
        The drive is not bound to vfio-pci (the message has the command), cannot be used, or is open in another
        program. DriveLostError: it has failed, and is still in use in this process.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise errors.ArgumentError(
            f"{name!r} is not the name of a namespace: write nvme:ADDRESS/NAMESPACE, such as nvme:0000:01:00.0/1 "
            "(warpwell drive list shows addresses)",
            name="path",
        )
    address = (machine or Machine()).address(match[1])
    with _changing:
        drive, users = _drives.get(address) or (Drive(VfioTransport(address, ARENA_BYTES, machine)), 0)
        if drive.failure:
            raise errors.DriveLostError(
                f"{drive.failure}; call recover() on one of the {users} arrays of this process that use it, or close "
                "them and open it again",
                drive=address,
            )
        _drives[address] = drive, users + 1
    try:
        release = contextlib.ExitStack()
        release.callback(_release, address, drive)
        return drive.namespace(int(match[2])), release.close
    except BaseException:
        _release(address, drive)
        raise


def _release(address: str, drive: Drive) -> None:
    with _changing:
        shared, users = _drives.get(address, (None, 0))
        if shared is not drive:
            return  # The drive is the parent's.
        if users > 1:
            _drives[address] = drive, users - 1
            return
        del _drives[address]
        drive.close()


def _after_fork() -> None:
    """Remove the parent's drives: the child cannot use them."""
    global _changing
    _changing = threading.Lock()
    _drives.clear()


os.register_at_fork(after_in_child=_after_fork)
