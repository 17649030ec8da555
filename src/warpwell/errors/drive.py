"""Errors of drives: NVMe controllers that others wrote."""

from __future__ import annotations

import errno

from .general import WarpwellError


class DriveError(WarpwellError, OSError):
    """A drive refused a command, is in use, or cannot be used. ``errno`` is EIO.

    Parameters
    ----------
    drive : str, optional
        Its address, for example ``"0000:04:00.0"``.
    namespace : int, optional
        Namespace id.
    command : str, optional
        The command, for example ``"read"``.
    status : int, optional
        NVMe status field without the phase bit. The message has its text.
    reasons : tuple of str, optional
        Why the drive was not touched: it is in use, or cannot be used safely. Empty for other errors.
    """

    def __init__(
        self,
        message: str,
        *,
        drive: str | None = None,
        namespace: int | None = None,
        command: str | None = None,
        status: int | None = None,
        reasons: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.errno = errno.EIO
        self.drive = drive
        self.namespace = namespace
        self.command = command
        self.status = status
        self.reasons = reasons


class DriveLostError(DriveError, ConnectionError):
    """A drive stopped answering, reported a fatal error, or broke the protocol; it is not used until it is recovered.

    `Array.recover` starts the drive of an array again, and `Drive.recover` a drive.
    """
