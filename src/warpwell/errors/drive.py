"""Errors of drives: NVMe controllers that others wrote."""

from __future__ import annotations

import errno

from .general import WarpwellError


class DriveError(WarpwellError, OSError):
    """A drive refused a command, or has a format or limits that Warpwell cannot use. ``errno`` is EIO.

    Parameters
    ----------
    drive : str, optional
        Its address, for example ``"0000:04:00.0"``.
    namespace : int, optional
        Namespace id.
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
        namespace: int | None = None,
        command: str | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(message)
        self.errno = errno.EIO
        self.drive = drive
        self.namespace = namespace
        self.command = command
        self.status = status


class DriveLostError(DriveError, ConnectionError):
    """A drive stopped answering, reported a fatal error, or broke the protocol; it is not used until it is recovered.

    `Array.recover` starts the drive of an array again, and `Drive.recover` a drive.
    """


class DriveInUseError(DriveError):
    """Somebody uses a drive, or it cannot be used safely; it was left alone. ``errno`` is EBUSY.

    Parameters
    ----------
    drive, namespace, command, status : optional
        As in `DriveError`.
    reasons : tuple of str, optional
        What stands against it, in words.
    """

    def __init__(
        self,
        message: str,
        *,
        drive: str | None = None,
        namespace: int | None = None,
        command: str | None = None,
        status: int | None = None,
        reasons: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__(message, drive=drive, namespace=namespace, command=command, status=status)
        self.errno = errno.EBUSY
        self.reasons = reasons
