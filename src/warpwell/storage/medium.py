"""Medium: the interface of storage behind a controller; the base class of media in Python."""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .._check import checked_nbytes
from ..nvme import READ, WRITE, word0_opc, word6_nlb
from ..nvme.status import CAPACITY_EXCEEDED, INVALID_OPCODE, UNRECOVERED_READ_ERROR, WRITE_FAULT
from ..targets import native, private_block, view_of
from ..targets.primitives import SYSTEM, load_relaxed, store_relaxed
from .commands import BLOCK, C_BLOCK, C_BLOCKS, C_BUFFER, C_WORD0, COMMAND_BYTES, call_start, decode_command, word


@dataclass(frozen=True)
class NativeMedium:
    """The native functions of a medium, for service threads that hold no interpreter lock.

    ``start(state, command, tag)`` starts a read or a write; flushes are calls of `Medium.sync` instead. `command` is
    the address of the eight words of an NVMe command, which are valid until `start` returns; words 2 and 4 are
    undefined. The range of the command is a multiple of the medium's block, and a read may reach past the end of the
    medium (`commands.decode_command`). `tag` is not negative and has at most 56 bits. If `start` completes the command,
    it returns ``status | result << 16``, an NVMe status (0: success) and dw0 of the completion. Otherwise it returns
    `PENDING`, and a later call of ``complete(state, answer)`` returns True for the command, once, and writes three
    words to `answer`: tag, status and result. `complete` returns False while no completion is due. Several threads call
    both functions concurrently.

    Attributes
    ----------
    start : int
        C address, from `warpwell.targets.native`.
    complete : int
        C address; 0 if no command is ever pending.
    state : int
        First argument of both: the address of 64-bit words.
    owner : object
        Object that owns the memory of `state`; the caller of the functions must keep it alive.
    memory : int
        Address of the medium's first byte, if `start` copies its data in memory without waiting; else 0. The
        completions of several commands are then posted together.
    non_blocking : bool
        Whether `complete` only reads memory and never waits. Several completions are then posted together.
    """

    start: int
    complete: int
    state: int
    owner: Any = field(default=None, compare=False, repr=False)
    memory: int = 0
    non_blocking: bool = False


class Medium(ABC):
    """Storage: a file, memory, or an emulated drive.

    Attributes
    ----------
    nbytes : int
        Capacity in bytes. Reads past it return zeros; writes past it are dropped.
    writable : bool
    name : str
        Name in messages: a path, or the type of the medium.
    description : str
        One line.
    emulated : bool
        Whether the medium's times are simulated by a model. Reports mention this.
    block : int
        Ranges of native commands are multiples of this number of bytes.
    """

    nbytes: int
    writable: bool
    name: str
    description: str
    emulated: bool = False
    block: int = 512

    @abstractmethod
    def native(self) -> NativeMedium | None:
        """Return the native functions (always the same ones), or None for a medium written in Python."""

    @abstractmethod
    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Read and return `nbytes` bytes from byte `offset`; bytes past the end are zeros.

        Raises
        ------
        MediumError
            The medium failed; ``status`` is the NVMe status.
        ClosedError
            The medium is closed.
        """

    @abstractmethod
    def write(self, offset: int, data: NDArray[Any]) -> None:
        """Write `data` (C order) at byte `offset`; bytes past the end are dropped.

        Raises
        ------
        MediumError
            The medium failed; ``status`` is the NVMe status.
        StorageFullError
            No space is left.
        ReadOnlyError
            The medium is not writable.
        ClosedError
            The medium is closed.
        """

    @abstractmethod
    def sync(self) -> None:
        """Wait until everything written is durable, and check that the medium was not changed from outside.

        Raises
        ------
        MediumError, StorageFullError, FormatError, ClosedError
            The data may not be durable.
        """

    @abstractmethod
    def close(self) -> None:
        """Release all resources (idempotent); does not sync. No command may be in flight."""

    def last_error(self) -> str | None:
        """Return a description of the last failed command, in addition to its status, or None."""
        return None

    def host_memory(self) -> int:
        """Return the address of the first byte, for reads without commands, if all bytes are in host memory; else 0.

        Data read from there is correct if a later call of `require_memory` raises nothing. The address is valid as long
        as this object lives.
        """
        return 0

    def require_memory(self) -> None:
        """Raise MediumError if `host_memory` has failed so far: data read from there may be zeros."""
        return

    def failure(self) -> Exception | None:
        """Return why commands cannot reach the medium any more, or None; replaces the error that a launch latched."""
        return None

    def __enter__(self) -> Medium:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- for subclasses -------------------------------------------------------------------------------------

    def _inside(self, offset: int, nbytes: int) -> int:
        """Return how many of `nbytes` bytes from `offset` lie inside the medium."""
        if offset < 0 or nbytes < 0:
            raise errors.ArgumentError(
                f"{self.name}: offset {offset} and {nbytes} bytes: neither may be negative", name="offset"
            )
        return max(0, min(nbytes, self.nbytes - offset))

    def _check_writable(self) -> None:
        if not self.writable:
            raise errors.ReadOnlyError(f"{self.name} is not writable: open it with writable=True")


def raw_bytes(data: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the bytes of an array, in C order, shape ``(nbytes,)``."""
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)


class PythonMedium(Medium):
    """Base of a medium written in Python: a subclass implements `read`, and optionally `write`.

    Both methods are called only with ranges inside the medium: past the end, this class fills reads with zeros and
    truncates writes. An exception in one of them fails the command; the exception's attribute ``status``, if any,
    becomes the NVMe status. One Python thread serves such a medium, which is slow; statistics mention it.

    Parameters
    ----------
    nbytes : int
        Capacity.
    writable : bool
    name : str, optional
        For messages; default: the name of the class.

    Examples
    --------
    >>> class Ones(PythonMedium):
    ...     def read(self, offset, nbytes):
    ...         return np.ones(nbytes, np.uint8)
    >>> Ones(700).read(512, 512).sum()
    np.uint64(188)
    """

    def __init__(self, nbytes: int | str, *, writable: bool = False, name: str | None = None) -> None:
        self.nbytes = checked_nbytes(nbytes, "nbytes", minimum=0)
        self.writable = writable
        self.name = type(self).__name__ if name is None else name
        self.description = f"{self.name} (Python)"
        self._closed = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Methods of a subclass receive only ranges inside the medium.
        if "read" in cls.__dict__:
            cls.read = _padded(cls.__dict__["read"])  # type: ignore[method-assign]
        if "write" in cls.__dict__:
            cls.write = _cut(cls.__dict__["write"])  # type: ignore[method-assign]

    def native(self) -> None:
        """Return None: Python serves this medium."""
        return None

    @abstractmethod
    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Return `nbytes` bytes from byte `offset`: bytes-like or a uint8 array."""

    def write(self, offset: int, data: NDArray[Any]) -> None:
        """Write `data`, a uint8 array of shape ``(n,)``, at byte `offset`."""
        raise errors.ReadOnlyError(f"{self.name} has no write method: define one, or open it for reading")

    def sync(self) -> None:
        """Do nothing; a subclass that buffers overrides it."""
        self._check_open()

    def close(self) -> None:
        """Close the medium; a subclass that holds resources overrides it."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise errors.ClosedError(f"{self.name} is closed: create another medium")


def _padded(function: Any) -> Any:
    @functools.wraps(function)
    def read(self: PythonMedium, offset: int, nbytes: int) -> NDArray[np.uint8]:
        self._check_open()
        inside = self._inside(offset, nbytes)
        out = np.zeros(nbytes, np.uint8)
        if inside:
            got = function(self, offset, inside)
            raw = raw_bytes(got) if isinstance(got, np.ndarray) else np.frombuffer(got, np.uint8)
            if raw.nbytes != inside:
                raise errors.MediumError(
                    f"{self.name}: read({offset}, {inside}) returned {raw.nbytes} bytes: return all of them",
                    lba=offset // 512,
                    status=0x281,
                )
            out[:inside] = raw
        return out

    return read


def _cut(function: Any) -> Any:
    @functools.wraps(function)
    def write(self: PythonMedium, offset: int, data: NDArray[Any]) -> None:
        self._check_open()
        self._check_writable()
        raw = raw_bytes(data)
        inside = self._inside(offset, raw.nbytes)
        if inside:
            function(self, offset, raw[:inside])

    return write


def carry_out(medium: Medium, opcode: int, offset: int, data: NDArray[np.uint8]) -> int:
    """Carry out a command by the Python methods of a medium: read into `data`, or write it; return the NVMe status."""
    try:
        if opcode == READ:
            data[:] = medium.read(offset, data.size)
        elif opcode == WRITE:
            medium.write(offset, data[: max(0, medium.nbytes - offset)])
        else:
            return INVALID_OPCODE
        return 0
    except Exception as error:  # device code sees only a status
        status = getattr(error, "status", None)
        if isinstance(status, int) and 0 < status < 0x8000:
            return status
        if isinstance(error, errors.StorageFullError):
            return CAPACITY_EXCEEDED
        return UNRECOVERED_READ_ERROR if opcode == READ else WRITE_FAULT


def python_functions(medium: Medium) -> NativeMedium:
    """Return native functions of a medium written in Python: each command takes Python's global interpreter lock."""
    one_at_a_time = threading.Lock()

    def start(state: int, command: int, tag: int) -> int:
        fields = view_of(command, COMMAND_BYTES, np.int64).tolist()
        offset, nbytes = BLOCK * fields[C_BLOCK], BLOCK * (word6_nlb(fields[C_BLOCKS]) + 1)
        with one_at_a_time:
            data = view_of(fields[C_BUFFER], nbytes, np.uint8)
            return carry_out(medium, word0_opc(fields[C_WORD0]), offset, data)

    function = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(start)
    block = private_block(8)
    block.words[0] = ctypes.cast(function, ctypes.c_void_p).value or 0
    _interpreted[block.address] = medium
    return NativeMedium(python_start.address, 0, block.address, (block, function))


_interpreted: weakref.WeakValueDictionary[int, Medium] = weakref.WeakValueDictionary()
"""Media by the address of their state, for the interpreter."""


def start_interpreted(state: int, command: int, tag: int) -> int:
    """Carry out a command of a medium written in Python in an interpreted run; return its status."""
    return carry_out_interpreted(_interpreted[state], command)


def complete_nothing(state: int, answer: int) -> bool:
    """Return False: no interpreted command is ever pending."""
    return False


def carry_out_interpreted(medium: Medium, command: int) -> int:
    """Carry out a command on the interpreter's memory, which other Python code does not see; return its status."""
    op, offset, nbytes, buffer = decode_command(command)
    words = np.zeros(nbytes // 8, np.int64)
    if op == WRITE:
        words[:] = [load_relaxed(buffer + 8 * k, SYSTEM) for k in range(len(words))]
    status = carry_out(medium, op, offset, words.view(np.uint8))
    if op == READ and status == 0:
        for k, value in enumerate(words.tolist()):
            store_relaxed(buffer + 8 * k, value, SYSTEM)
    return status


@native(interpreted=start_interpreted)
def python_start(state: int, command: int, tag: int) -> int:
    """Call the host function whose address is the state."""
    return call_start(word(state, 0), state, command, tag)
