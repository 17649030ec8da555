"""Every exception that Warpwell raises.

Each exception is a `WarpwellError`, and also the built-in exception that a caller would expect::

    WarpwellError (Exception)
    ├── ArgumentError (ValueError)              an argument with a value that is not allowed
    │   ├── ValueSizeError                      a value that is too large, or of another size
    │   ├── QuotaError                          shares of tenants that exceed 100 %
    │   └── TransformError                      a kernel that cannot be cut into blocks
    ├── DTypeError (TypeError)                  a dtype that is not supported
    │   └── SchemaError                         fields that do not match the schema of a store
    ├── FormatError (ValueError)                a file whose content contradicts its name or header
    │   ├── CorruptionError                     a store whose bytes differ from those written
    │   └── StoreVersionError                   a store in a newer format
    ├── MissingFileError (FileNotFoundError)    a path that does not exist
    ├── ReadOnlyError (ValueError)              a write to an array opened with mode "r"
    ├── ClosedError (ValueError)                use after close
    ├── SharingError (ValueError)               a second "r+" open of one file
    │   └── ForkError                           an array, device or store used in a forked process
    ├── KeyMissingError (KeyError)              a key that a store does not have
    ├── StoreFailedError (OSError)              a store that is read-only since a write failed
    ├── DeviceNotFoundError (RuntimeError)      a device that this machine does not have
    ├── DriverBuildError (RuntimeError)         no C compiler for the layer below CUDA programs
    ├── StorageFullError (OSError)              no space left on the medium
    ├── DriveError (OSError)                    a drive that refused a command, is in use or unusable
    │   └── DriveLostError (ConnectionError)    a drive that stopped answering, or broke the protocol
    ├── SchedulerError (RuntimeError)           a task that a scheduler could not run
    │   ├── TaskLostError                       a task that was lost with its device or process
    │   ├── TaskMemoryError (MemoryError)       a task that needs more memory than there is
    │   └── ServiceError (ConnectionError)      a scheduler service that does not answer
    │       └── MessageSizeError (ValueError)   a message to or from it that is too large
    ├── TurnTimeoutError (TimeoutError)         a turn at a GPU that did not come in time
    ├── PoolError (RuntimeError)                a failure between an application and its devices
    │   ├── DeviceLostError (ConnectionError)   a device whose agent died or stopped answering
    │   ├── RemoteError                         an error raised on a device, with its traceback
    │   ├── AgentError                          agents that could not be started
    │   └── PoolVersionError                    an agent or application of another version
    ├── CompileError (TypeError)                a kernel that does not compile for its arguments
    ├── CodeError (TypeError)                   a function whose code cannot be sent to a device
    └── KernelError (RuntimeError)              an error in a kernel, or pages that cannot be pinned
        ├── IndexRangeError (IndexError)        an index outside the array
        ├── MediumError (OSError)               a command that completed with an error status
        └── StallError (TimeoutError)           no progress for as long as the watchdog waits

A call that raises leaves nothing behind that it created. Device code never raises: it latches (keeps) its first error,
and every later read in that launch returns 0. Python raises a `KernelError` when the launch has ended.

The message describes what happened and what to do next; the attributes have the same information for programs. An
attribute is None if its value is not known.
"""

import errno as _errno
from os import PathLike as _PathLike
from typing import Any as _Any


class WarpwellError(Exception):
    """Base of every exception that Warpwell raises.

    Parameters
    ----------
    message : str
        What happened, and what to do next.
    **attributes
        Attributes of the class.
    """

    def __init__(self, message: str, **attributes: _Any) -> None:
        super().__init__(message)
        if unknown := attributes.keys() - self._attribute_names():
            raise TypeError(f"{type(self).__name__} has no attributes {sorted(unknown)}")
        vars(self).update(attributes)

    @classmethod
    def _attribute_names(cls) -> set[str]:
        return {name for base in cls.__mro__ for name in getattr(base, "__annotations__", ())}


class ArgumentError(WarpwellError, ValueError):
    """An argument has a value that is not allowed.

    Attributes
    ----------
    name : str
        The argument, for example ``"page_size"``.
    """

    name: str | None = None


class ValueSizeError(ArgumentError):
    """A value is larger than a store accepts, or does not have the size that all values of its store must have.

    Attributes
    ----------
    name : str
        As in `ArgumentError`.
    nbytes : int
        Bytes of the value.
    """

    nbytes: int | None = None


class DTypeError(WarpwellError, TypeError):
    """A dtype is not supported: objects, big-endian or variable size, or atomics on a small item."""


class SchemaError(DTypeError):
    """A schema is not allowed, or a record has other fields, dtypes or shapes than the schema of its store.

    Attributes
    ----------
    field : str
        The field.
    """

    field: str | None = None


class FormatError(WarpwellError, ValueError):
    """A file contradicts its name or header: it has no ``.npy`` magic, is truncated, or has a malformed row.

    Attributes
    ----------
    path : str or os.PathLike
        The file.
    row : int
        Number of the row of an edge list, from 1. Blank lines and comments between rows are not counted.
    """

    path: str | _PathLike[str] | None = None
    row: int | None = None


class CorruptionError(FormatError):
    """Bytes of a store differ from the bytes that were written. The call that found this has changed nothing.

    Attributes
    ----------
    path : str or os.PathLike
        The file.
    offset : int
        Position in the file, in bytes.
    """

    offset: int | None = None


class StoreVersionError(FormatError):
    """A store has a newer format than this version can read.

    Attributes
    ----------
    path : str or os.PathLike
        The file.
    version : int
        The number of the format.
    """

    version: int | None = None


class MissingFileError(WarpwellError, FileNotFoundError):
    """A path does not exist. ``errno`` is ENOENT.

    Attributes
    ----------
    path : str or os.PathLike
        The file. (``filename`` stays None, because it would change the text of ``str(error)``.)
    """

    errno = _errno.ENOENT
    path: str | _PathLike[str] | None = None


class ReadOnlyError(WarpwellError, ValueError):
    """An array that was opened with mode ``"r"`` was written to."""


class ClosedError(WarpwellError, ValueError):
    """An array, cache or queue pair was used after it was closed."""


class SharingError(WarpwellError, ValueError):
    """A file that is open for writing was opened for writing again, with other options.

    Attributes
    ----------
    path : str or os.PathLike
        The file.
    """

    path: str | _PathLike[str] | None = None


class ForkError(SharingError):
    """An array, device, scheduler or store was used in a process that was forked from the process that created it.

    A store raises this only if it is open for writing or on a device.
    """


class KeyMissingError(WarpwellError, KeyError):
    """A store does not have a key.

    Attributes
    ----------
    key : bytes
        The key.
    """

    key: bytes | None = None

    def __str__(self) -> str:
        # KeyError would print the repr of its argument.
        return str(self.args[0])


class StoreFailedError(WarpwellError, OSError):
    """A write or fsync of a store failed, and the store is read-only since then. ``errno`` is EIO.

    Attributes
    ----------
    path : str or os.PathLike
        The store or file.
    code : int
        The errno of the failed call.
    """

    errno = _errno.EIO
    path: str | _PathLike[str] | None = None
    code: int | None = None


class DeviceNotFoundError(WarpwellError, RuntimeError):
    """The requested device is not in this machine, or the packages that it needs are not installed.

    Attributes
    ----------
    device : str
        The requested device, for example ``"cuda"``.
    """

    device: str | None = None


class DriverBuildError(WarpwellError, RuntimeError):
    """The layer for unmodified CUDA programs cannot be built: there is no C compiler, or the compiler failed."""


class StorageFullError(WarpwellError, OSError):
    """The medium has no space left. ``errno`` is ENOSPC.

    Attributes
    ----------
    path : str or os.PathLike
        The file that could not grow.
    """

    errno = _errno.ENOSPC
    path: str | _PathLike[str] | None = None


class QuotaError(ArgumentError):
    """The quotas of tenants exceed 100 %, or a tenant without settings submits a task."""


class CompileError(WarpwellError, TypeError):
    """A kernel does not compile for the types of its arguments; ``__cause__`` is the compiler's own error."""


class TransformError(ArgumentError):
    """A kernel cannot be cut into blocks that are claimed one by one; it can still run unmodified.

    Attributes
    ----------
    construct : str
        The part of the kernel that prevents it.
    line : int
        Line number of this part in the kernel's file.
    """

    construct: str | None = None
    line: int | None = None


# -- drives: NVMe controllers that other software implements ---------------------------------------------------------


class DriveError(WarpwellError, OSError):
    """A drive refused a command, is in use, or cannot be used. ``errno`` is EIO.

    Attributes
    ----------
    drive : str
        Address of the drive, for example ``"0000:04:00.0"``.
    namespace : int
        Namespace id.
    command : str
        The command, for example ``"read"``.
    status : int
        NVMe status field without the phase bit. The message has its text.
    reasons : tuple of str
        Why the drive was not touched: it is in use, or cannot be used safely. Empty for other errors.
    """

    errno = _errno.EIO
    drive: str | None = None
    namespace: int | None = None
    command: str | None = None
    status: int | None = None
    reasons: tuple[str, ...] = ()


class DriveLostError(DriveError, ConnectionError):
    """A drive stopped answering, reported a fatal error, or broke the protocol. It is not used until it is recovered.

    `Array.recover` restarts the drive of an array, and `Drive.recover` restarts a drive.
    """


# -- errors that device code latched ---------------------------------------------------------------------------------


class KernelError(WarpwellError, RuntimeError):
    """A kernel latched an error, so the results of its launch are not valid; or pages cannot be pinned or unpinned.

    Attributes
    ----------
    array : str
        Path of the array, or its name if it has no path.
    kernel : str
        Name of the kernel.
    """

    array: str | None = None
    kernel: str | None = None


class IndexRangeError(KernelError, IndexError):
    """A kernel used an index outside an array.

    Attributes
    ----------
    index : int
        The index, flattened in C order if the array has several dimensions.
    size : int
        Number of items of the array.
    """

    index: int | None = None
    size: int | None = None


class MediumError(KernelError, OSError):
    """A command completed with an error status. ``errno`` is EIO.

    Attributes
    ----------
    page : int
        Page of the array.
    lba : int
        First logical block of the command.
    status : int
        NVMe status field without the phase bit. The message has its text.
    """

    errno = _errno.EIO
    page: int | None = None
    lba: int | None = None
    status: int | None = None


class StallError(KernelError, TimeoutError):
    """Nothing made progress for as long as the watchdog waits. ``errno`` is ETIMEDOUT.

    Attributes
    ----------
    seconds : float
        Time without progress, in seconds.
    """

    errno = _errno.ETIMEDOUT
    seconds: float | None = None


# -- between an application and the devices of its pool --------------------------------------------------------------


class PoolError(WarpwellError, RuntimeError):
    """A failure between an application and the devices of its pool."""


class DeviceLostError(PoolError, ConnectionError):
    """The agent of a device died or stopped answering; the data on the device are lost.

    Attributes
    ----------
    device : int
        Index of the device among the application's devices.
    """

    device: int | None = None


class RemoteError(PoolError):
    """A call failed on its device. The next synchronization raises this; ``__cause__`` is the error itself.

    Attributes
    ----------
    call : str
        The call that failed, for example ``"launch of 'scale'"``.
    remote_traceback : str
        The traceback on the agent.
    """

    call: str | None = None
    remote_traceback: str | None = None


class AgentError(PoolError):
    """Agents could not be started, or one ended before it was ready.

    Attributes
    ----------
    agent : str
        Name of the agent and of its host.
    """

    agent: str | None = None


class PoolVersionError(PoolError):
    """The application and an agent have different versions of Warpwell, Python or the protocol."""


class CodeError(WarpwellError, TypeError):
    """A kernel or function cannot be sent to a device, because it refers to something that cannot be serialized."""


# -- tasks that share a device ---------------------------------------------------------------------------------------


class SchedulerError(WarpwellError, RuntimeError):
    """A scheduler could not run a task.

    Attributes
    ----------
    task : str
        The task's name.
    """

    task: str | None = None


class TaskLostError(SchedulerError):
    """The device or process that ran a task died, and with it the task's input was lost."""


class TaskMemoryError(SchedulerError, MemoryError):
    """A task needs more memory than the device has, or than its tenant may use."""


class ServiceError(SchedulerError, ConnectionError):
    """A scheduler service does not answer, or refuses a call."""


class MessageSizeError(ServiceError, ValueError):
    """A message to or from a scheduler service is too large; the connection stays usable."""


class TurnTimeoutError(WarpwellError, TimeoutError):
    """A turn at a GPU could not begin within the timeout that its caller gave.

    Attributes
    ----------
    device : str
        Name of the device.
    """

    device: str | None = None


__all__ = [name for name in globals() if name.endswith("Error")]
