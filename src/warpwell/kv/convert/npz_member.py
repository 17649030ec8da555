"""One array of a ``.npz`` file, read row by row: ``NpzMember``."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ..._npy import read_header
from ...errors import FormatError

_PIECE = 1 << 22
"""Number of bytes that are decompressed at a time."""


class NpzMember:
    """One array of a ``.npz`` file, compressed or not, read from its start on.

    Parameters
    ----------
    archive : zipfile.ZipFile
    name : str
        The array.
    path : Path
        The file, for messages.

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
        Unchecked: the caller checks it.
    row_bytes : int
        Bytes of an item of the first dimension; of the array if it has no dimensions.

    Raises
    ------
    FormatError
        Not an array, Fortran order, or damaged; also while reading.
    """

    def __init__(self, archive: zipfile.ZipFile, name: str, path: Path) -> None:
        self.where = f"{path}: {name}"
        self._path = path
        try:
            self._file: IO[bytes] = archive.open(f"{name}.npy")
            self.shape, self.dtype = read_header(self._file, self.where, "write the file with numpy.savez")
        except (EOFError, zipfile.BadZipFile, zlib.error, KeyError, RuntimeError, NotImplementedError) as error:
            raise FormatError(
                f"{self.where} is not a readable array ({error}): write the file with numpy.savez", path=path
            ) from None
        self.row_bytes = self.dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64))

    def read(self, count: int) -> NDArray[Any]:
        """Return the next `count` rows."""
        buffer = bytearray(count * self.row_bytes)
        view, done = memoryview(buffer), 0
        while done < len(buffer):
            got = self._read(min(len(buffer) - done, _PIECE))
            if not got:
                raise FormatError(f"{self.where} ends too early: is the file truncated?", path=self._path)
            view[done : done + len(got)] = got
            done += len(got)
        return np.frombuffer(buffer, self.dtype).reshape(count, *self.shape[1:])

    def skip(self, count: int) -> None:
        """Read `count` rows and drop them: a compressed array has no other way to the rows after them."""
        rows = max(1, _PIECE // max(1, self.row_bytes))
        for start in range(0, count, rows):
            self.read(min(rows, count - start))

    def finish(self) -> None:
        """Check that nothing is left. A zip file's checksum is compared at the end."""
        if self._read(1):
            raise FormatError(f"{self.where} is longer than its header says", path=self._path)

    def close(self) -> None:
        """Close the array; the archive stays open."""
        self._file.close()

    def _read(self, nbytes: int) -> bytes:
        try:
            return self._file.read(nbytes)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise FormatError(f"{self.where} is damaged ({error}): get the file again", path=self._path) from None
