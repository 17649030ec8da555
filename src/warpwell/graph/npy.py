"""``.npy`` files whose length is known only at the end: ``NpyWriter``."""

import contextlib
import os
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from warpwell import replacing

#: Bytes in front of the data: one page, so that 1,024 aligned items of 4 bytes are in one page of 4 KiB, not in two.
HEADER_BYTES = 4096


class NpyWriter:
    """Writes a one-dimensional ``.npy`` file (version 1.0) piece by piece.

    The header is written last. A file that was not closed, or left by an exception, is not a valid ``.npy``
    file.

    Parameters
    ----------
    path : path-like
        The file; an existing one is replaced.
    dtype : numpy.dtype, default int64
        Type of the items, little-endian.

    Attributes
    ----------
    length : int
        Items written so far.

    Raises
    ------
    StorageFullError
        No space is left (at any call).
    """

    def __init__(self, path: str | Path, dtype: npt.DTypeLike = np.int64) -> None:
        self.path = Path(path)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.length = 0
        self._file = open(self.path, "wb", buffering=0)
        self._file.seek(HEADER_BYTES)

    def append(self, items: npt.NDArray[Any]) -> None:
        """Append items, shape ``(n,)``; they are converted to the file's dtype, which must hold them."""
        write_array(self._file, np.asarray(items, self.dtype), self.path)
        self.length += items.size

    def close(self) -> None:
        """Write the header and wait until the file is on the medium."""
        text = f"{{'descr': '{self.dtype.str}', 'fortran_order': False, 'shape': ({self.length},), }}"
        header = b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little")
        header += text.encode().ljust(HEADER_BYTES - 11) + b"\n"
        with self._file:
            self._file.seek(0)
            write_array(self._file, np.frombuffer(header, np.uint8), self.path)
            with storage_full(self.path):
                os.fsync(self._file.fileno())

    def __enter__(self) -> "NpyWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()


def write_array(file: IO[bytes], array: npt.NDArray[np.generic], path: Path) -> None:
    """Write an array to an unbuffered file; if the disk is full, StorageFullError names `path`."""
    rest = memoryview(np.ascontiguousarray(array)).cast("B")  # type: ignore[arg-type]
    with storage_full(path):
        while rest:
            rest = rest[file.write(rest) :]


def storage_full(path: Path) -> contextlib.AbstractContextManager[None]:
    """Turn the errors of a full disk into StorageFullError, with advice for graphs."""
    return replacing.storage_full(
        path,
        ". No partial file is left. Free some space or write to another disk. "
        "A graph larger than memory needs about twice its own size during conversion.",
    )
