"""Errors of NVMe drives that Warpwell drives itself."""

from __future__ import annotations

import errno

from .general import WarpwellError


class DriveError(WarpwellError, OSError):
    """A drive failed, was lost, refused a command, or cannot be used. ``errno`` is EIO.

    Parameters
    ----------
    drive : str, optional
        The drive: a PCI address, or what else names it.
    nsid : int, optional
        The namespace.
    command : str, optional
        The command, for example ``"read"``.
    status : int, optional
        NVMe status field without the phase bit; `warpwell.nvme.describe` returns its text.
    """

    def __init__(
        self,
        message: str,
        *,
        drive: str | None = None,
        nsid: int | None = None,
        command: str | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(message)
        self.errno = errno.EIO
        self.drive = drive
        self.nsid = nsid
        self.command = command
        self.status = status


class DriveInUseError(DriveError):
    """Somebody uses a drive, or it cannot be used safely; it was left alone. ``errno`` is EBUSY.

    Parameters
    ----------
    reasons : tuple of str, optional
        What stands against it, in words.
    """

    def __init__(
        self,
        message: str,
        *,
        drive: str | None = None,
        nsid: int | None = None,
        command: str | None = None,
        status: int | None = None,
        reasons: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__(message, drive=drive, nsid=nsid, command=command, status=status)
        self.errno = errno.EBUSY
        self.reasons = reasons
