"""``.npy`` files whose length is known only at the end: ``NpyWriter``."""

import contextlib
import os
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from warpwell import replacing
from warpwell._npy import npy_header

#: Bytes in front of the data: one page, so that 1,024 aligned items of 4 bytes are in one page of 4 KiB, not in two.
HEADER_BYTES = 4096

GRAPH_ADVICE = (
    ". No partial file is left. Free some space or write to another disk. "
    "A graph larger than memory needs about twice its own size during conversion."
)


class NpyWriter:
    """Writes a ``.npy`` file (version 1.0) piece by piece, one-dimensional or of rows of one shape.

    The header is written last. A file that was not closed, or left by an exception, is not a valid ``.npy``
    file.

    Parameters
    ----------
    path : path-like
        The file; an existing one is replaced.
    dtype : numpy.dtype, default int64
        Type of the items, little-endian.
    inner : tuple of int
        Shape of a row; ``()`` for a one-dimensional array.
    advice : str
        End of the message where no space is left.

    Attributes
    ----------
    length : int
        Rows written so far.

    Raises
    ------
    StorageFullError
        No space is left (at any call).
    """

    def __init__(
        self, path: str | Path, dtype: npt.DTypeLike = np.int64, inner: tuple[int, ...] = (), advice: str | None = None
    ) -> None:
        self.path = Path(path)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.inner = inner
        self.length = 0
        self._advice = GRAPH_ADVICE if advice is None else advice
        self._file = open(self.path, "wb", buffering=0)
        self._file.seek(HEADER_BYTES)

    def fileno(self) -> int:
        """Return the descriptor of the file."""
        return self._file.fileno()

    def append(self, items: npt.NDArray[Any]) -> None:
        """Append rows, shape ``(n, *inner)``; they are converted to the file's dtype, which must hold them."""
        write_array(self._file, np.asarray(items, self.dtype), self.path, self._advice)
        self.length += len(items)

    def close(self) -> None:
        """Write the header and wait until the file is on the medium."""
        descr, shape = np.lib.format.dtype_to_descr(self.dtype), (self.length, *self.inner)
        header = npy_header(descr, shape, HEADER_BYTES)
        with self._file:
            self._file.seek(0)
            write_array(self._file, np.frombuffer(header, np.uint8), self.path, self._advice)
            with storage_full(self.path, self._advice):
                os.fsync(self._file.fileno())

    def __enter__(self) -> "NpyWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()


def write_array(file: IO[bytes], array: npt.NDArray[Any], path: Path, advice: str | None = None) -> None:
    """Write an array to an unbuffered file; if the disk is full, StorageFullError names `path`."""
    rest = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    with storage_full(path, advice):
        while rest:
            rest = rest[file.write(rest) :]


def storage_full(path: Path, advice: str | None = None) -> contextlib.AbstractContextManager[None]:
    """Turn the errors of a full disk into StorageFullError, by default with advice for graphs."""
    return replacing.storage_full(path, GRAPH_ADVICE if advice is None else advice)
