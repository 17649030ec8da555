"""RamMedium: bytes in host memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .._check import checked_nbytes
from ..nvme import READ, WRITE
from ..nvme.status import INVALID_OPCODE, LBA_OUT_OF_RANGE, NAMESPACE_WRITE_PROTECTED
from ..targets import memory_for, native, private_block
from ..targets.primitives import copy_bytes
from .commands import decode_command, word, zero_fill
from .medium import Medium, NativeMedium, raw_bytes

BASE = 0
NBYTES = 1
WRITABLE = 2


class RamMedium(Medium):
    """Bytes in host memory.

    Parameters
    ----------
    source : numpy.ndarray or int
        An array in C order, used in place; or a number of bytes, initially zero.
    writable : bool, optional
        Default: whether the array is writable; True for new bytes.

    Raises
    ------
    ArgumentError
        The array is not in C order, or it is read-only and `writable` is True.
    """

    def __init__(self, source: NDArray[Any] | int | str, *, writable: bool | None = None) -> None:
        if isinstance(source, np.ndarray):
            if not source.flags.c_contiguous:
                raise errors.ArgumentError(
                    "the array is not in C order: pass numpy.ascontiguousarray(array)", name="source"
                )
            if writable and not source.flags.writeable:
                raise errors.ArgumentError("the array is read-only: pass a copy of it", name="writable")
            self.writable = bool(source.flags.writeable) if writable is None else writable
            self._bytes = source.reshape(-1).view(np.uint8)
            self._owner: Any = source
        else:
            nbytes = checked_nbytes(source, "source", minimum=0)
            self._owner = private_block(max(nbytes, 8))
            self._bytes = self._owner.view(np.dtype(np.uint8))[:nbytes]
            self.writable = True if writable is None else writable
        self.nbytes = self._bytes.nbytes
        self.name = "ram"
        self.description = "ram"
        self._state = memory_for("cpu").allocate(64)
        self._state.words[:3] = (self._bytes.ctypes.data, self.nbytes, self.writable)
        self._closed = False

    def native(self) -> NativeMedium:
        """Return the native functions."""
        return NativeMedium(ram_start.address, 0, self._state.address, memory=int(self._state.words[BASE]))

    def host_memory(self) -> int:
        """Return the address of the bytes, or 0 for a subclass, because its commands may do more."""
        return int(self._state.words[BASE]) if type(self) is RamMedium else 0

    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Return a copy of the bytes."""
        self._check_open()
        inside = self._inside(offset, nbytes)
        out = np.zeros(nbytes, np.uint8)
        out[:inside] = self._bytes[offset : offset + inside]
        return out

    def write(self, offset: int, data: NDArray[Any]) -> None:
        """Copy bytes into the memory."""
        self._check_open()
        self._check_writable()
        raw = raw_bytes(data)
        inside = self._inside(offset, raw.nbytes)
        self._bytes[offset : offset + inside] = raw[:inside]

    def sync(self) -> None:
        """Do nothing: memory is never durable."""
        self._check_open()

    def close(self) -> None:
        """Close the medium: further calls raise ClosedError."""
        # The memory lives as long as this object: a late command of a controller must not access freed memory.
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise errors.ClosedError("the ram medium is closed: create another medium")


@native
def ram_start(state: int, command: int, tag: int) -> int:
    """Copy the bytes before returning (never pending)."""
    op, offset, nbytes, buffer = decode_command(command)
    if op != READ and op != WRITE:
        return INVALID_OPCODE
    if offset < 0 or nbytes < 0:
        return LBA_OUT_OF_RANGE
    inside = max(0, min(nbytes, word(state, NBYTES) - offset))
    at = word(state, BASE) + offset
    if op == READ:
        copy_bytes(buffer, at, inside)
        zero_fill(buffer + inside, nbytes - inside)
        return 0
    if word(state, WRITABLE) == 0:
        return NAMESPACE_WRITE_PROTECTED
    copy_bytes(at, buffer, inside)
    return 0
