"""PythonMedium: base class of media that are written in Python."""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .medium import Medium, raw_bytes


class PythonMedium(Medium):
    """Base of a medium written in Python: a subclass implements `read`, and `write` where it can.

    Both are called only with ranges inside the medium: past the end, reads are filled with zeros and writes
    cut here. An exception in them fails the command; one with a ``status`` attribute chooses the NVMe status.
    One interpreter thread serves such a medium, so it is slow, and statistics say so.

    Parameters
    ----------
    nbytes : int
        Capacity.
    writable : bool
    name : str, optional
        For messages; left out, the name of the class.

    Examples
    --------
    >>> class Ones(PythonMedium):
    ...     def read(self, offset, nbytes):
    ...         return np.ones(nbytes, np.uint8)
    >>> Ones(700).read(512, 512).sum()
    np.uint64(188)
    """

    def __init__(self, nbytes: int, *, writable: bool = False, name: str | None = None) -> None:
        if nbytes < 0:
            raise errors.ArgumentError(f"a medium of {nbytes} bytes: 0 or more", name="nbytes")
        self.nbytes = nbytes
        self.writable = writable
        self.name = type(self).__name__ if name is None else name
        self.description = f"{self.name} (Python)"
        self._closed = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # A user's functions see only ranges inside the medium, however they are called.
        if "read" in cls.__dict__:
            cls.read = _padded(cls.__dict__["read"])  # type: ignore[method-assign]
        if "write" in cls.__dict__:
            cls.write = _cut(cls.__dict__["write"])  # type: ignore[method-assign]

    def native(self) -> None:
        """Return None: Python serves it."""
        return None

    @abstractmethod
    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Return `nbytes` bytes from byte `offset`: bytes-like or a uint8 array."""

    def write(self, offset: int, data: NDArray[Any]) -> None:
        """Write `data`, a uint8 array of shape ``(n,)``, from byte `offset`."""
        raise errors.ReadOnlyError(f"{self.name} has no write method: give it one, or open it for reading")

    def sync(self) -> None:
        """Make everything durable; see `Medium.sync`."""
        self._check_open()

    def close(self) -> None:
        """Give everything back; see `Medium.close`."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise errors.ClosedError(f"{self.name} is closed: make another")


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
