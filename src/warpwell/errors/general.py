"""Errors of arguments, files, stores and devices."""

from __future__ import annotations

import errno
import os

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
    """An argument has a value that is not allowed.

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
    """A value is larger than a store accepts, or differs in size from all values of its store.

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
    """A schema is not allowed, or a record has other fields, dtypes or shapes than the schema of its store.

    Parameters
    ----------
    field : str, optional
        The field.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class FormatError(WarpwellError, ValueError):
    """A file contradicts its name or header: it has no ``.npy`` magic, is truncated, or has the wrong size.

    Parameters
    ----------
    path : str or os.PathLike, optional
        The file.
    """

    def __init__(self, message: str, *, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__(message)
        self.path = path


class EdgeListError(FormatError):
    """A line of an edge list cannot be parsed, or names a vertex that is not allowed.

    Parameters
    ----------
    path : str or os.PathLike, optional
        The file.
    line : int, optional
        Line number, from 1.
    """

    def __init__(self, message: str, *, path: str | os.PathLike[str] | None = None, line: int | None = None) -> None:
        super().__init__(message, path=path)
        self.line = line


class CorruptionError(FormatError):
    """The bytes of a store differ from those that were written; nothing was changed.

    Parameters
    ----------
    path : str or os.PathLike, optional
        The file.
    offset : int, optional
        Place in the file, in bytes.
    """

    def __init__(self, message: str, *, path: str | os.PathLike[str] | None = None, offset: int | None = None) -> None:
        super().__init__(message, path=path)
        self.offset = offset


class StoreVersionError(FormatError):
    """A store has a newer format than this version can read.

    Parameters
    ----------
    path : str or os.PathLike, optional
        The file.
    version : int, optional
        The number of the format.
    """

    def __init__(self, message: str, *, path: str | os.PathLike[str] | None = None, version: int | None = None) -> None:
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
    """An array that was opened with mode ``"r"`` was written to."""


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
    """An array, device, scheduler or store was used in a process that was forked from its own.

    Of stores, those that are open for writing or on a device.
    """


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
        The errno of the failed call.
    """

    def __init__(self, message: str, *, path: str | os.PathLike[str] | None = None, code: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno.EIO
        self.path = path
        self.code = code


class DeviceNotFoundError(WarpwellError, RuntimeError):
    """The requested device is not in this machine, or the packages that it needs are not installed.

    Parameters
    ----------
    device : str, optional
        The requested device, for example ``"cuda"``.
    """

    def __init__(self, message: str, *, device: str | None = None) -> None:
        super().__init__(message)
        self.device = device


class DriverBuildError(WarpwellError, RuntimeError):
    """The layer for unmodified CUDA programs cannot be built: there is no C compiler, or it failed."""


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
    """The quotas of tenants exceed 100 %, or a tenant without settings submits a task."""


class CompileError(WarpwellError, TypeError):
    """A kernel does not compile for arguments of these types; ``__cause__`` is the compiler's own error."""


class TransformError(ArgumentError):
    """A kernel cannot be cut into blocks that are claimed one by one; it can still run whole.

    Parameters
    ----------
    construct : str, optional
        The part of the kernel that prevents it.
    line : int, optional
        Its line in the kernel's file.
    """

    def __init__(
        self, message: str, *, name: str | None = None, construct: str | None = None, line: int | None = None
    ) -> None:
        super().__init__(message, name=name)
        self.construct = construct
        self.line = line
