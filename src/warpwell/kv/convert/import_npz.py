"""Arrays of ``.npz`` files: `NpzSource`."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ..._npy import read_header
from ...array import check_dtype
from ...errors import FormatError
from .sources import Batch, Source, check_value, choose, require_names, rows_of

_KEYS = "keys"
"""The array of keys, if no other is chosen."""
_PIECE = 1 << 22
"""Number of bytes that are decompressed at a time."""


class NpzSource(Source):
    """Rows of arrays that have the same length.

    Parameters
    ----------
    path : pathlib.Path
        The file; its arrays are read row by row, compressed ones too.
    rule : str, optional
        One of `KEY_RULES`; names are the items of `key_field`.
    key_field : str, optional
        The array of keys; by default ``keys``. If the file lacks this array, rows are numbered.
    fields : list of str, optional
        Arrays to take; all by default.

    Raises
    ------
    FormatError
        The file is damaged, holds Python objects or Fortran order, or its arrays differ in length.
    """

    kind = "npz"

    def __init__(self, path: Path, rule: str | None, key_field: str | None, fields: list[str] | None) -> None:
        super().__init__(path, rule or "name")
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, NotImplementedError) as error:
            raise FormatError(f"{path} is not a .npz file ({error}): write it with numpy.savez", path=path) from None
        self._arrays: dict[str, NpzMember] = {}
        try:
            self._open_arrays(key_field, fields)
            require_names(rule, self._key, self.where)
        except BaseException:
            self.close()
            raise

    def _open_arrays(self, key_field: str | None, fields: list[str] | None) -> None:
        names = [name[:-4] for name in self._zip.namelist() if name.endswith(".npy")]
        if not names:
            raise FormatError(
                f"{self.path} is a zip file without arrays: unpack it, and load the folder", path=self.path
            )
        if key_field is not None:
            choose([key_field], names, self.where)
        self._key = key_field or (_KEYS if _KEYS in names else None)
        if self._key is None:
            self.rule = "number"
        chosen = [name for name in choose(fields, names, self.where) if name != self._key]
        if not chosen:
            raise FormatError(f"{self.path} has no array but the keys: add an array of values", path=self.path)
        for name in [*chosen, *([] if self._key is None else [self._key])]:
            array = self._arrays[name] = NpzMember(self._zip, name, self.path)
            check_dtype(array.dtype, array.where)
            if not array.shape:
                raise FormatError(f"{self.path}: {name} is a single number: it has no rows", path=self.path)
        if len({array.shape[0] for array in self._arrays.values()}) > 1:
            listed = ", ".join(f"{name} has {array.shape[0]}" for name, array in self._arrays.items())
            raise FormatError(
                f"{self.path}: the arrays differ in length ({listed}): choose with --fields", path=self.path
            )
        self.schema = {name: self._arrays[name].spec for name in chosen}
        self.records = self._arrays[chosen[0]].shape[0]
        self._row_bytes = sum(self._arrays[name].row_bytes for name in chosen)

    def close(self) -> None:
        """Close the file."""
        for member in self._arrays.values():
            member.close()
        self._zip.close()

    def batches(self, start: int = 0) -> Iterator[Batch]:
        """Read all rows from number `start` on."""
        assert self.schema is not None
        check_value(self._row_bytes, f"{self.path}: a row")
        for array in self._arrays.values():
            array.skip(min(start, self.records))
        step = rows_of(self._row_bytes)
        for first in range(start, self.records, step):
            count = min(step, self.records - first)
            keys: NDArray[np.int64] | list[Any] = np.arange(first, first + count)
            if self._key is not None:
                keys = self.keys_from_column(self._arrays[self._key].read(count), first, f"{self.path}: {self._key}")
            values = {name: self._arrays[name].read(count) for name in self.schema}
            yield Batch(keys, values, count * self._row_bytes, (first + count) / self.records)
        for array in self._arrays.values():
            array.finish()  # the zip file's checksum of an array is compared at its end


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

    @property
    def spec(self) -> Any:
        """The field of a schema for the array: its rows."""
        is_text = self.dtype.kind == "U" and len(self.shape) == 1
        return ("str" if is_text else self.dtype), self.shape[1:]

    def read(self, count: int) -> NDArray[Any]:
        """Return the next `count` rows."""
        buffer = bytearray(count * self.row_bytes)
        view, done = memoryview(buffer), 0
        while done < len(buffer):
            got = self._read(min(len(buffer) - done, _PIECE))
            if not got:
                raise FormatError(f"{self.where} ends too early: get the file again", path=self._path)
            view[done : done + len(got)] = got
            done += len(got)
        return np.frombuffer(buffer, self.dtype).reshape(count, *self.shape[1:])

    def skip(self, count: int) -> None:
        """Read `count` rows and drop them: a compressed array cannot be read from the middle."""
        rows = max(1, _PIECE // max(1, self.row_bytes))
        for start in range(0, count, rows):
            self.read(min(rows, count - start))

    def finish(self) -> None:
        """Check that nothing is left. A zip file's checksum is compared at the end."""
        if self._read(1):
            raise FormatError(f"{self.where} is longer than its header says: get the file again", path=self._path)

    def close(self) -> None:
        """Close the array; the archive stays open."""
        self._file.close()

    def _read(self, nbytes: int) -> bytes:
        try:
            return self._file.read(nbytes)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise FormatError(f"{self.where} is damaged ({error}): get the file again", path=self._path) from None
