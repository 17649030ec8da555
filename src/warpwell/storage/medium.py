"""Medium: bytes on something that a controller reads and writes for the queues."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors

PENDING = -1
"""What a start function returns when the command will complete later."""


@dataclass(frozen=True)
class NativeMedium:
    """The native functions of a medium, for service threads that hold no interpreter lock.

    ``start(state, opcode, offset, nbytes, buffer, tag)`` begins a command: an NVMe opcode (READ, WRITE,
    FLUSH), a range in bytes (multiples of 512; a read may reach past the end), a host address, and a tag of
    at most 40 bits. It returns an NVMe status (0: done well), or `PENDING`. After that
    ``complete(state, 0, 0, 0, 0, 0)`` returns ``tag << 16 | status`` once for it, and -1 while nothing is
    due. Several threads call both at the same time.

    Attributes
    ----------
    start : int
        C address, from `warpwell.targets.native`.
    complete : int
        C address; 0 where no command is ever pending.
    state : int
        First argument of both: the address of 64-bit words.
    owner : object
        What holds the memory of `state`; whoever calls the functions keeps it.
    """

    start: int
    complete: int
    state: int
    owner: Any = field(default=None, compare=False, repr=False)


class Medium(ABC):
    """Bytes on a file, in memory, or on an emulated drive.

    Attributes
    ----------
    nbytes : int
        Capacity in bytes. Reads past it give zeros, and writes never go past it.
    writable : bool
    name : str
        For messages: a path, or what kind of medium it is.
    description : str
        One line.
    emulated : bool
        Times measured on it are those of a model, and reports say so.
    """

    nbytes: int
    writable: bool
    name: str
    description: str
    emulated: bool = False

    @abstractmethod
    def native(self) -> NativeMedium | None:
        """Return the native functions (always the same ones), or None for a medium written in Python."""

    @abstractmethod
    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Return `nbytes` bytes from byte `offset`, zeros past the end; waits for them.

        Raises
        ------
        MediumError
            The medium failed; ``status`` says how.
        ClosedError
            The medium is closed.
        """

    @abstractmethod
    def write(self, offset: int, data: NDArray[Any]) -> None:
        """Write `data` (C order) from byte `offset`; what lies past the end is dropped.

        Raises
        ------
        MediumError
            The medium failed; ``status`` says how.
        StorageFullError
            No space is left.
        ReadOnlyError
            The medium is not writable.
        ClosedError
            The medium is closed.
        """

    @abstractmethod
    def sync(self) -> None:
        """Wait until everything written is durable, and check that nobody else changed the medium.

        Raises
        ------
        MediumError, StorageFullError, FormatError, ClosedError
            It may not be durable.
        """

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Idempotent; does not sync. No command may be in flight."""

    def last_error(self) -> str | None:
        """Return what is known of the last failed command beyond its status, or None."""
        return None

    def __enter__(self) -> Medium:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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


def media_description(media: list[Medium]) -> str:
    """Say of what a wrapper is made: ``"4 x file a.bin"`` style, each kind once."""
    texts = [m.description for m in media]
    return texts[0] if len(texts) == 1 else f"{len(texts)} media ({', '.join(dict.fromkeys(texts))})"
