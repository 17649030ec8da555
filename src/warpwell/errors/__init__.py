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
    │   └── ForkError                           an array, device, store ... used in a process forked from its own
    ├── KeyMissingError (KeyError)              a key that a store does not have
    ├── StoreFailedError (OSError)              a store that takes no more writes since one failed
    ├── DeviceNotFoundError (RuntimeError)      a GPU that is not there
    ├── StorageFullError (OSError)              no space left on the medium
    ├── SchedulerError (RuntimeError)           a task that a scheduler could not carry out
    │   ├── TaskLostError                       a task whose device or process died, and that cannot run again
    │   ├── TaskMemoryError (MemoryError)       a task that is larger than the device's memory, or a tenant's part
    │   └── ServiceError (ConnectionError)      a scheduler service that does not answer
    │       └── MessageSizeError (ValueError)   a message to it or from it that is larger than it may be
    ├── PoolError (RuntimeError)                what went wrong between an application and its devices
    │   ├── DeviceLostError (ConnectionError)   a device whose agent died or does not answer any more
    │   ├── RemoteError                         what was raised on a device, with its traceback there
    │   ├── AgentError                          agents that could not be started
    │   └── PoolVersionError                    another version at the other end
    ├── CompileError (TypeError)                a kernel that does not compile with arguments of these types
    ├── CodeError (TypeError)                   a kernel or function whose code cannot be sent to a device
    └── KernelError (RuntimeError)              what a kernel latched; raised after its launch
        ├── IndexRangeError (IndexError)        an index outside of the array
        ├── MediumError (OSError)               a command that completed with an error status
        ├── StallError (TimeoutError)           no progress at all for as long as the watchdog waits
        └── PinError                            pages that cannot be pinned, or pins that nobody has

A call that raises has created nothing. Device code never raises: it latches its first error, every later read
in that launch returns 0, and Python raises a `KernelError` once the launch is over.

The message says what happened and what to do next; the attributes say the same for programs. An attribute is
None where its value is not known.
"""

from __future__ import annotations

from .general import (
    ArgumentError,
    ClosedError,
    CompileError,
    CorruptionError,
    DeviceNotFoundError,
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
    PinError,
    StallError,
)
from .options import checked_integer, checked_seconds
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
    "PinError",
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
    "ValueSizeError",
    "WarpwellError",
]
