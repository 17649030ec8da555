"""Errors that device code latched."""

from __future__ import annotations

import errno

from .general import WarpwellError


class KernelError(WarpwellError, RuntimeError):
    """A kernel latched an error, so the results of its launch are not valid; or pages cannot be pinned or unpinned.

    Parameters
    ----------
    array : str, optional
        Name of the array: its path if it has one.
    kernel : str, optional
        Name of the kernel.
    """

    def __init__(self, message: str, *, array: str | None = None, kernel: str | None = None) -> None:
        super().__init__(message)
        self.array = array
        self.kernel = kernel


class IndexRangeError(KernelError, IndexError):
    """A kernel used an index outside an array.

    Parameters
    ----------
    index : int, optional
        The index, flattened in C order if the array has several dimensions.
    size : int, optional
        Number of items of the array.
    """

    def __init__(
        self,
        message: str,
        *,
        array: str | None = None,
        kernel: str | None = None,
        index: int | None = None,
        size: int | None = None,
    ) -> None:
        super().__init__(message, array=array, kernel=kernel)
        self.index = index
        self.size = size


class MediumError(KernelError, OSError):
    """A command completed with an error status. ``errno`` is EIO.

    Parameters
    ----------
    page : int, optional
        Page of the array.
    lba : int, optional
        First logical block of the command.
    status : int, optional
        NVMe status field without the phase bit. The message has its text.
    """

    def __init__(
        self,
        message: str,
        *,
        array: str | None = None,
        kernel: str | None = None,
        page: int | None = None,
        lba: int | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(message, array=array, kernel=kernel)
        self.errno = errno.EIO
        self.page = page
        self.lba = lba
        self.status = status


class StallError(KernelError, TimeoutError):
    """Nothing made progress for as long as the watchdog waits. ``errno`` is ETIMEDOUT.

    Parameters
    ----------
    seconds : float, optional
        How long there was no progress.
    """

    def __init__(
        self,
        message: str,
        *,
        array: str | None = None,
        kernel: str | None = None,
        seconds: float | None = None,
    ) -> None:
        super().__init__(message, array=array, kernel=kernel)
        self.errno = errno.ETIMEDOUT
        self.seconds = seconds
