"""Every exception that Warpwell raises.

Each is a `WarpwellError` and also the built-in that a caller would expect::

    WarpwellError (Exception)
    ├── ArgumentError (ValueError)              an option that cannot be: page size, cache size, tier ...
    │   ├── KeyLengthError                      a key of 0 or more than 16 bytes
    │   ├── ValueSizeError                      a value over the limit, or that does not fit its records
    │   ├── QuotaError                          shares of tenants that are more than there is
    │   └── TransformError                      a kernel that cannot be cut into blocks
    ├── DTypeError (TypeError)                  a dtype or item type that is not supported
    │   └── SchemaError                         fields that are not those of a store's schema
    ├── FormatError (ValueError)                a file that is not what its name or header says
    │   ├── EdgeListError                       a line of an edge list that does not parse
    │   ├── CorruptionError                     a store whose bytes are not what was written
    │   └── StoreVersionError                   a store in a newer format
    ├── MissingFileError (FileNotFoundError)    a path that does not exist
    ├── ReadOnlyError (ValueError)              a write to an array that was opened with mode "r"
    ├── ClosedError (ValueError)                use after close
    ├── SharingError (ValueError)               a second "r+" open of one file
    │   └── ForkError                           a store or scheduler used in a process that was forked from its own
    ├── KeyMissingError (KeyError)              a key that a store does not have
    ├── StoreFailedError (OSError)              a store that takes no more writes since one failed
    ├── DeviceNotFoundError (RuntimeError)      a GPU that is not there
    ├── StorageFullError (OSError)              no space left on the medium
    ├── SchedulerError (RuntimeError)           a task that a scheduler could not carry out
    │   ├── TaskLostError                       a task whose device or process died, and that cannot run again
    │   ├── TaskMemoryError (MemoryError)       a task that is larger than the device's memory, or a tenant's part
    │   └── ServiceError (ConnectionError)      a scheduler service that does not answer
    └── KernelError (RuntimeError)              what a kernel latched; raised after its launch
        ├── IndexRangeError (IndexError)        an index outside of the array
        ├── MediumError (OSError)               a command that completed with an error status
        ├── StallError (TimeoutError)           no progress at all for as long as the watchdog waits
        └── PinError                            a page with more holders than its pin count can tell

A call that raises has created nothing. Device code never raises: it latches its first error, every later read
in that launch returns 0, and Python raises a `KernelError` once the launch is over.

The message says what happened and what to do next; the attributes say the same for programs. An attribute is
None where its value is not known.
"""

from __future__ import annotations

import errno
import os

__all__ = [
    "ArgumentError",
    "ClosedError",
    "CorruptionError",
    "DTypeError",
    "DeviceNotFoundError",
    "EdgeListError",
    "ForkError",
    "FormatError",
    "IndexRangeError",
    "KernelError",
    "KeyLengthError",
    "KeyMissingError",
    "MediumError",
    "MissingFileError",
    "PinError",
    "QuotaError",
    "ReadOnlyError",
    "SchedulerError",
    "SchemaError",
    "ServiceError",
    "SharingError",
    "StallError",
    "StorageFullError",
    "StoreFailedError",
    "StoreVersionError",
    "TaskLostError",
    "TaskMemoryError",
    "TransformError",
    "ValueSizeError",
    "WarpwellError",
]

# OSError takes a second positional argument for strerror and then prints "[Errno ...]" before the message.
# The classes here hand it the message alone and set `errno` afterwards, so str() is what the caller wrote.
# Attributes are optional keywords: pickling calls the class with the message and restores the rest from its
# dictionary.


class WarpwellError(Exception):
    """Base of every exception that Warpwell raises.

    Parameters
    ----------
    message : str
        What happened, and what to do next. (The first parameter of every class here.)
    """


class ArgumentError(WarpwellError, ValueError):
    """An option or argument has a value that cannot be.

    Parameters
    ----------
    name : str, optional
        The argument, for example ``"page_size"``.
    """

    def __init__(self, message: str, *, name: str | None = None) -> None:
        super().__init__(message)
        self.name = name


class KeyLengthError(ArgumentError):
    """A key has 0 or more than 16 bytes.

    Parameters
    ----------
    name : str, optional
        As in `ArgumentError`.
    length : int, optional
        Bytes of the key.
    """

    def __init__(self, message: str, *, name: str | None = None, length: int | None = None) -> None:
        super().__init__(message, name=name)
        self.length = length


class ValueSizeError(ArgumentError):
    """A value is larger than a store takes, or not as large as all values of its store are.

    Parameters
    ----------
    name : str, optional
        As in `ArgumentError`.
    nbytes : int, optional
        Bytes of the value.
    """

    def __init__(self, message: str, *, name: str | None = None, nbytes: int | None = None) -> None:
        super().__init__(message, name=name)
        self.nbytes = nbytes


class DTypeError(WarpwellError, TypeError):
    """A dtype is not supported: objects, big-endian or variable size, or atomics on a small item."""


class SchemaError(DTypeError):
    """A schema cannot be, or what was put has other fields, dtypes or shapes than the store's schema.

    Parameters
    ----------
    field : str, optional
        The field.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class FormatError(WarpwellError, ValueError):
    """A file is not what its name or header says: no ``.npy`` magic, truncated, or of the wrong size.

    Parameters
    ----------
    path : str or os.PathLike, optional
        The file.
    """

    def __init__(self, message: str, *, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__(message)
        self.path = path


class EdgeListError(FormatError):
    """A line of an edge list does not parse, or names a vertex that cannot be.

    Parameters
    ----------
    path : str or os.PathLike, optional
        The file.
    line : int, optional
        Line number, from 1.
    """

    def __init__(
        self, message: str, *, path: str | os.PathLike[str] | None = None, line: int | None = None
    ) -> None:
        super().__init__(message, path=path)
        self.line = line


class CorruptionError(FormatError):
    """The bytes of a store are not those that were written; nothing was changed.

    Parameters
    ----------
    path : str or os.PathLike, optional
        The file.
    offset : int, optional
        Where in the file, in bytes.
    """

    def __init__(
        self, message: str, *, path: str | os.PathLike[str] | None = None, offset: int | None = None
    ) -> None:
        super().__init__(message, path=path)
        self.offset = offset


class StoreVersionError(FormatError):
    """A store was written in a newer format than this version knows.

    Parameters
    ----------
    path : str or os.PathLike, optional
        The file.
    version : int, optional
        The format's number.
    """

    def __init__(
        self, message: str, *, path: str | os.PathLike[str] | None = None, version: int | None = None
    ) -> None:
        super().__init__(message, path=path)
        self.version = version


class MissingFileError(WarpwellError, FileNotFoundError):
    """A path does not exist. ``errno`` is ENOENT.

    Parameters
    ----------
    path : str or os.PathLike, optional
        The file. (``filename`` stays None: it would change what str() prints.)
    """

    def __init__(self, message: str, *, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__(message)
        self.errno = errno.ENOENT
        self.path = path


class ReadOnlyError(WarpwellError, ValueError):
    """A write to an array that was opened with mode ``"r"``."""


class ClosedError(WarpwellError, ValueError):
    """An array, cache or queue pair was used after it was closed."""


class SharingError(WarpwellError, ValueError):
    """A file that is open for writing was opened for writing again, with other options.

    Parameters
    ----------
    path : str or os.PathLike, optional
        The file.
    """

    def __init__(self, message: str, *, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__(message)
        self.path = path


class ForkError(SharingError):
    """A scheduler, or a store that is open for writing or on a GPU, was used in a process forked from its own."""


class KeyMissingError(WarpwellError, KeyError):
    """A store does not have a key.

    Parameters
    ----------
    key : bytes, optional
        The key.
    """

    def __init__(self, message: str, *, key: bytes | None = None) -> None:
        super().__init__(message)
        self.key = key

    def __str__(self) -> str:
        # KeyError would print the repr of its argument.
        return str(self.args[0])


class StoreFailedError(WarpwellError, OSError):
    """A write or fsync of a store failed: it is read-only from then on. ``errno`` is EIO.

    Parameters
    ----------
    path : str or os.PathLike, optional
        The store or file.
    code : int, optional
        The system's errno for what failed.
    """

    def __init__(
        self, message: str, *, path: str | os.PathLike[str] | None = None, code: int | None = None
    ) -> None:
        super().__init__(message)
        self.errno = errno.EIO
        self.path = path
        self.code = code


class DeviceNotFoundError(WarpwellError, RuntimeError):
    """A device was asked for that this machine does not have, or whose packages are not installed.

    Parameters
    ----------
    device : str, optional
        What was asked for, for example ``"cuda"``.
    """

    def __init__(self, message: str, *, device: str | None = None) -> None:
        super().__init__(message)
        self.device = device


class StorageFullError(WarpwellError, OSError):
    """The medium has no space left. ``errno`` is ENOSPC.

    Parameters
    ----------
    path : str or os.PathLike, optional
        The file that could not grow.
    """

    def __init__(self, message: str, *, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__(message)
        self.errno = errno.ENOSPC
        self.path = path


class QuotaError(ArgumentError):
    """Quotas of tenants are over 100 %, or a tenant that no setting names asks for a share."""


class TransformError(ArgumentError):
    """A kernel cannot be cut into blocks that are claimed one by one; it can run whole.

    Parameters
    ----------
    construct : str, optional
        What stands in the way.
    line : int, optional
        Where, in the kernel's file.
    """

    def __init__(
        self, message: str, *, name: str | None = None, construct: str | None = None, line: int | None = None
    ) -> None:
        super().__init__(message, name=name)
        self.construct = construct
        self.line = line


class SchedulerError(WarpwellError, RuntimeError):
    """A scheduler could not carry a task out.

    Parameters
    ----------
    task : str, optional
        The task's name.
    """

    def __init__(self, message: str, *, task: str | None = None) -> None:
        super().__init__(message)
        self.task = task


class TaskLostError(SchedulerError):
    """The device or the process that ran a task died, and its input is gone with it."""


class TaskMemoryError(SchedulerError, MemoryError):
    """A task is larger than the device's memory, or than its tenant's part of it."""


class ServiceError(SchedulerError, ConnectionError):
    """A scheduler service does not answer, or refused the call."""


class KernelError(WarpwellError, RuntimeError):
    """A kernel latched an error; results of that launch are not to be used.

    Parameters
    ----------
    array : str, optional
        Name of the array, its path where it has one.
    kernel : str, optional
        Name of the kernel.
    """

    def __init__(self, message: str, *, array: str | None = None, kernel: str | None = None) -> None:
        super().__init__(message)
        self.array = array
        self.kernel = kernel


class IndexRangeError(KernelError, IndexError):
    """A kernel used an index outside of an array.

    Parameters
    ----------
    index : int, optional
        The index, flattened in C order where the array has several dimensions.
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
        NVMe status field without the phase bit; `warpwell.nvme.describe` puts it into words.
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
    """Nothing anywhere made progress for as long as the watchdog waits. ``errno`` is ETIMEDOUT.

    Parameters
    ----------
    seconds : float, optional
        How long nothing moved.
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


class PinError(KernelError):
    """A page has more holders than its pin count can tell, and none of them let go in time.

    Parameters
    ----------
    page : int, optional
        Page of the array.
    """

    def __init__(
        self,
        message: str,
        *,
        array: str | None = None,
        kernel: str | None = None,
        page: int | None = None,
    ) -> None:
        super().__init__(message, array=array, kernel=kernel)
        self.page = page
