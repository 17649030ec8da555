"""`Extent`: items of a column in a file. `MappedFile`: the file's bytes in memory, zeros past a truncated end."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._os import allow_more_files
from ..array import Array, Mapping, open_array
from ..array.gather import Pieces
from ..errors import FormatError, MediumError
from ..storage import FileMedium
from . import arrow as pa
from .library import line_of


class MappedFile:
    """A file in memory, read only. Views of it stay valid after `close`.

    Parameters
    ----------
    path : str
        A regular file.
    direct : bool, optional
        Whether pieces of the file are read past the page cache, if that is possible. Default: if the pieces are sparse.

    Attributes
    ----------
    path : str
        Absolute.
    nbytes : int
    buffer : pyarrow.Buffer
        All bytes of the file.
    direct : bool or None

    Raises
    ------
    MissingFileError, FormatError, OSError
        The file cannot be opened or mapped.
    """

    def __init__(self, path: str, direct: bool | None = None) -> None:
        self.path = os.path.abspath(path)
        if os.path.exists(self.path) and not os.path.isfile(self.path):  # a pipe would wait for its writer
            raise FormatError(f"{self.path} is not a file or folder", path=self.path)
        self._medium = FileMedium(self.path, direct=False)
        try:
            allow_more_files(self._medium.fileno())
            self._mapping = Mapping(self._medium, self.path)
        except BaseException:
            self._medium.close()
            raise
        self.nbytes = self._medium.nbytes
        self.direct = direct
        self.buffer = pa.foreign_buffer(self._mapping.address, self.nbytes, base=self._mapping)

    def require(self) -> None:
        """Raise MediumError if the file was truncated, or bytes of it could not be read."""
        self._mapping.require()
        size = os.fstat(self._medium.fileno()).st_size
        if size < self.nbytes:  # the missing pages were not touched yet
            raise MediumError(
                f"{self.path} was truncated from {self.nbytes} to {size} bytes while it was open: "
                "restore it, and open the table again"
            )

    def damaged(self, reason: str) -> FormatError:
        """Return the error for bytes that no writer produces; raise MediumError if the file was truncated."""
        self.require()
        return FormatError(f"{self.path}: {reason}: the file is damaged, write it again", path=self.path)

    @contextlib.contextmanager
    def checking(self, description: str) -> Iterator[None]:
        """Raise `damaged` if pyarrow refuses an array over the file."""
        try:
            yield
        except pa.ArrowException as error:
            raise self.damaged(f"{description} ({line_of(error)})") from None

    def fileno(self) -> int:
        """Return the descriptor of the file."""
        return self._medium.fileno()

    def read_alone(self, *, is_alone: bool) -> None:
        """Set whether the system reads a touched page alone, or also up to 8 MiB after it."""
        self._mapping.read_alone(is_alone)

    def pieces(self, starts: NDArray[np.int64], sizes: Any, parts: Sequence[int] = (0,)) -> Pieces:
        """Return pieces of the file, for `fetch`. Parts of pieces are far from one another."""
        return Pieces(self._mapping, self.fileno, self.path, self.nbytes, starts, sizes, self.direct, parts)

    def offset_of(self, buffer: Any) -> int | None:
        """Return where in the file a `pyarrow.Buffer` begins; None if it is not within the mapping."""
        at = int(buffer.address) - int(self.buffer.address)
        return at if 0 <= at and at + int(buffer.size) <= self.nbytes else None

    def close(self) -> None:
        """Close the file (idempotent)."""
        self._medium.close()


def validate(array: Any) -> None:
    """Check the offsets, codes and text of an array; raise pyarrow.ArrowException.

    Dates and times may be any integers.
    """
    values = array.dictionary if isinstance(array, pa.DictionaryArray) else array
    if pa.types.is_temporal(values.type) and not pa.types.is_interval(values.type):
        plain = values.view(pa.int32() if values.type.bit_width == 32 else pa.int64())
        array = plain if values is array else pa.DictionaryArray.from_arrays(array.indices, plain, safe=False)
    array.validate(full=True)


@dataclass(frozen=True, eq=False)
class Extent:
    """Contiguous items in a file.

    Attributes
    ----------
    file : MappedFile
    offset : int
        Byte of the file at which the items begin; within the file, and not always a multiple of the item's size.
    dtype : numpy.dtype
    shape : tuple of int
    """

    file: MappedFile
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def path(self) -> str:
        """The file's path."""
        return self.file.path

    @property
    def nbytes(self) -> int:
        """Bytes of the items."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def buffer(self) -> Any:
        """The bytes as a `pyarrow.Buffer`, without a copy."""
        return self.file.buffer.slice(self.offset, self.nbytes)

    def numpy(self) -> NDArray[Any]:
        """Return the items as a read-only view of the mapping, without a copy.

        If the file is truncated while the view is used, items past its end are zeros, and the table's `close` raises.
        """
        if not self.nbytes:
            return np.empty(self.shape, self.dtype)
        flat: NDArray[Any] = np.frombuffer(self.file.buffer, self.dtype, math.prod(self.shape), self.offset)
        return flat.reshape(self.shape)

    def array(self, **options: Any) -> Array:
        """Open the items as an array for kernels, with options of `warpwell.open`. The caller closes the array.

        Raises
        ------
        FormatError
            The file was replaced since the table was opened.
        MediumError
            The file was truncated.
        """
        self.file.require()
        opened = open_array(self.path, dtype=self.dtype, shape=self.shape, offset=self.offset, **options)
        medium = opened.medium
        if isinstance(medium, FileMedium) and not os.path.sameopenfile(self.file.fileno(), medium.fileno()):
            opened.close()
            raise FormatError(
                f"{self.path} was replaced since the table was opened: open the table again", path=self.path
            )
        return opened
