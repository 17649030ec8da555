"""Every exception that Warpwell raises.

Each is a `WarpwellError` and also the built-in that a caller would expect::

    WarpwellError (Exception)
    ├── ArgumentError (ValueError)              an argument with a value that is not allowed
    │   ├── KeyLengthError                      a key of 0 bytes, or of more than 16
    │   ├── ValueSizeError                      a value that is too large, or of another size
    │   ├── QuotaError                          shares of tenants that exceed 100 %
    │   └── TransformError                      a kernel that cannot be cut into blocks
    ├── DTypeError (TypeError)                  a dtype that is not supported
    │   └── SchemaError                         fields that do not match the schema of a store
    ├── FormatError (ValueError)                a file whose content contradicts its name or header
    │   ├── EdgeListError                       a line of an edge list that cannot be parsed
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
    ├── DriveError (OSError)                    a drive that refused a command, is in use, or cannot be used
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

A call that raises has created nothing. Device code never raises: it keeps (latches) its first error, every later read
in that launch returns 0, and Python raises a `KernelError` when the launch has ended.

The message says what happened and what to do next; the attributes say the same to programs. An attribute is None if its
value is not known.

The classes are in five files::

    general.py    arguments, files, stores, devices
    kernel.py     errors that device code latched
    drive.py      NVMe controllers
    scheduler.py  tasks that share a device
    pool.py       the devices of a pool
"""

from __future__ import annotations

from .drive import DriveError, DriveLostError
from .general import (
    ArgumentError,
    ClosedError,
    CompileError,
    CorruptionError,
    DeviceNotFoundError,
    DriverBuildError,
    DTypeError,
    EdgeListError,
    ForkError,
    FormatError,
    KeyLengthError,
    KeyMissingError,
    MissingFileError,
    QuotaError,
    ReadOnlyError,
    SchemaError,
    SharingError,
    StorageFullError,
    StoreFailedError,
    StoreVersionError,
    TransformError,
    ValueSizeError,
    WarpwellError,
)
from .kernel import (
    IndexRangeError,
    KernelError,
    MediumError,
    StallError,
)
from .pool import (
    AgentError,
    CodeError,
    DeviceLostError,
    PoolError,
    PoolVersionError,
    RemoteError,
)
from .scheduler import (
    MessageSizeError,
    SchedulerError,
    ServiceError,
    TaskLostError,
    TaskMemoryError,
    TurnTimeoutError,
)

__all__ = [
    "ArgumentError",
    "AgentError",
    "ClosedError",
    "CodeError",
    "CompileError",
    "CorruptionError",
    "DTypeError",
    "DeviceLostError",
    "DeviceNotFoundError",
    "DriverBuildError",
    "DriveError",
    "DriveLostError",
    "EdgeListError",
    "ForkError",
    "FormatError",
    "IndexRangeError",
    "KernelError",
    "KeyLengthError",
    "KeyMissingError",
    "MediumError",
    "MessageSizeError",
    "MissingFileError",
    "PoolError",
    "PoolVersionError",
    "QuotaError",
    "ReadOnlyError",
    "RemoteError",
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
    "TurnTimeoutError",
    "ValueSizeError",
    "WarpwellError",
]
