"""The arrays of a ``.npz`` file, each row a record: ``NpzSource``."""

from __future__ import annotations

import itertools
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ..._npy import read_header
from ...array import check_dtype
from ...cache import batches_of
from ...errors import FormatError
from ..ragged import Ragged
from .sources import Batch, KeyRule, SchemaFields, Source, check_value, choose, require_names, rows_of

KEYS, LENGTHS, INTEGERS, VALUES, OFFSETS = "keys", "key_lengths", "key_integers", "values", "value_offsets"
"""Arrays of a dump. `INTEGERS` are flags: which keys are integers. Without a schema, `VALUES` are the bytes of all
values and `OFFSETS` their N + 1 bounds."""
RAGGED = {"_offsets": np.ndarray, "_bytes_offsets": bytes, "_str_offsets": str}
"""Suffixes of the arrays with the N + 1 bounds of a ragged field, by the type of its items."""


_PIECE = 1 << 22
"""Number of bytes that are decompressed at a time."""


class NpzSource(Source):
    """Rows of arrays that have the same length; or a dump that ``warpwell kv dump`` wrote.

    Parameters
    ----------
    path : pathlib.Path
        The file; members are read row by row, compressed ones too.
    rule : str, optional
        One of `KEY_RULES`; names are the items of `key_field`.
    key_field : str, optional
        The array of keys; ``keys`` if there is one, else rows are numbered.
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
            names = [n[:-4] for n in self._zip.namelist() if n.endswith(".npy")]
        except (zipfile.BadZipFile, NotImplementedError) as error:
            raise FormatError(f"{path} is not a .npz file ({error}): write it with numpy.savez", path=path) from None
        self._arrays: dict[str, NpzMember] = {}
        try:
            if not names:
                raise FormatError(f"{path} is a zip file without arrays: unpack it, and load the folder", path=path)
            if key_field is not None:
                choose([key_field], names, str(path))
            self._key = key_field or (KEYS if KEYS in names else None)
            self._bytes = VALUES in names and OFFSETS in names and fields is None
            special = {self._key, *({LENGTHS, INTEGERS} & set(names) if self._key == KEYS and LENGTHS in names else ())}
            chosen = [VALUES] if self._bytes else [n for n in choose(fields, names, str(path)) if n not in special]
            self._ragged: dict[str, tuple[str, type]] = {VALUES: (OFFSETS, bytes)} if self._bytes else {}
            if self._key == KEYS and not self._bytes:
                self._ragged = self._find_ragged(chosen, names)
            bounds = [name for name, _ in self._ragged.values()]
            names_of_values = [name for name in chosen if name not in bounds]
            if not names_of_values:
                raise FormatError(f"{path} has no array but the keys: add an array of values", path=path)
            for name in [*names_of_values, *(n for n in special if n), *bounds]:
                array = self._arrays[name] = NpzMember(self._zip, name, path)
                check_dtype(array.dtype, array.where)
            self._ends: dict[str, NDArray[Any]] = {}
            self._fields = names_of_values
            require_names(rule, self._key, str(path))
            if self._key is None:
                self.rule = KeyRule("number")
            self.records = self._rows()
            self.schema = None if self._bytes else self._read_schema()
        except BaseException:
            self.close()
            raise

    def _read_schema(self) -> SchemaFields:
        schema: SchemaFields = {}
        for name in self._fields:
            array, (_, item_type) = self._arrays[name], self._ragged.get(name, ("", np.ndarray))
            shape = (None, *array.shape[1:]) if name in self._ragged else array.shape[1:]
            if array.dtype.kind == "U" and len(array.shape) == 1:
                item_type = str
            schema[name] = (array.dtype, shape) if item_type is np.ndarray else (item_type.__name__, ())
        return schema

    def close(self) -> None:
        """Close the file."""
        for member in self._arrays.values():
            member.close()
        self._zip.close()

    def batches(self, first: int = 0) -> Iterator[Batch]:
        """Read all rows from number `first` on."""
        self._skip(min(first, self.records))
        fixed = sum(self._arrays[n].row_bytes for n in self._fields if n not in self._ragged)
        ragged = sum(self._arrays[n].row_bytes * self._arrays[n].shape[0] for n in self._ragged)
        step = rows_of(fixed + ragged // max(1, self.records))
        for start in range(first, self.records, step):
            count = min(step, self.records - start)
            bounds = {name: self._bounds(name, count) for name in self._ragged}
            sizes = np.full(count, fixed, np.int64)
            for name, ends in bounds.items():
                sizes += np.diff(ends) * self._arrays[name].row_bytes
            check_value(int(sizes.max()), f"{self.path}: record {start + int(sizes.argmax())}")
            keys = self._keys(start, count)
            for rows in batches_of(sizes, 1 << 24, count):  # one large value makes a batch of many small ones too large
                values: dict[str, Any] = {}
                for name in self._fields:
                    if name in bounds:
                        offsets = bounds[name][rows.start : rows.stop + 1]
                        items = self._arrays[name].read(int(offsets[-1] - offsets[0]))
                        values[name] = Ragged(items, offsets - offsets[0], self._ragged[name][1])
                    else:
                        values[name] = self._arrays[name].read(rows.stop - rows.start)
                share = (start + rows.stop) / self.records
                yield Batch(keys[rows], values[VALUES] if self._bytes else values, int(sizes[rows].sum()), share)
        for name in () if self.records else self._ragged:
            self._bounds(name, 0)  # there is one bound of no items
        for member in self._arrays.values():
            member.finish()  # the zip file's checksum of an array is compared at its end

    def _skip(self, count: int) -> None:
        """Go to a row, in arrays that were not read yet."""
        for name, member in self._arrays.items():
            member.skip(0 if name in self._ragged else count)
        for name, (offsets, _) in self._ragged.items():
            self._ends[name] = self._arrays[offsets].read(1)
            if count:
                self._arrays[name].skip(min(max(0, int(self._ends[name][0])), self._arrays[name].shape[0]))

    def _find_ragged(self, chosen: list[str], names: list[str]) -> dict[str, tuple[str, type]]:
        """Return the ragged fields of a dump: for each the name of its bounds, and the type of its items."""
        found = {}
        records = NpzMember(self._zip, KEYS, self.path).shape[:1]
        for name, (suffix, item_type) in itertools.product(chosen, RAGGED.items()):
            if name + suffix in names:
                bounds = NpzMember(self._zip, name + suffix, self.path)
                if bounds.dtype == np.int64 and bounds.shape == (records[0] + 1,):
                    found[name] = name + suffix, item_type
        return found

    def _bounds(self, name: str, count: int) -> NDArray[Any]:
        """Return the bounds of the next items of a ragged field, count + 1 offsets."""
        offsets = self._ragged[name][0]
        bounds = np.concatenate([self._ends[name], self._arrays[offsets].read(count)])
        if (np.diff(bounds) < 0).any() or bounds[0] < 0 or int(bounds[-1]) > self._arrays[name].shape[0]:
            raise FormatError(
                f"{self.path}: {offsets} does not rise to the end of {name}: was the file edited?", path=self.path
            )
        self._ends[name] = bounds[-1:]
        return bounds

    def _keys(self, start: int, count: int) -> NDArray[np.int64] | list[Any]:
        if self._key is None:
            return self.rule.from_numbers(start, count)
        column = self._arrays[self._key].read(count)
        where = f"{self.path}: {self._key}"
        if LENGTHS in self._arrays:
            if column.ndim != 2 or column.dtype != np.uint8:
                raise FormatError(f"{where} is not uint8 [N, width] though there are {LENGTHS}", path=self.path)
            lengths = self._arrays[LENGTHS].read(count).tolist()
            names: list[Any] = [row.tobytes()[:n] for row, n in zip(column, lengths, strict=True)]
            keys: NDArray[np.int64] | list[Any] = self.rule.from_names(names, start, where)
            if INTEGERS in self._arrays and keys is names:
                for k in np.flatnonzero(self._arrays[INTEGERS].read(count)).tolist():
                    keys[k] = int.from_bytes(names[k], "little", signed=True)
            return keys
        return self.rule.from_column(column, start, where)

    def _rows(self) -> int:
        shapes = {n: m.shape for n, m in self._arrays.items()}
        flat = [n for n, shape in shapes.items() if not shape]
        if flat:
            raise FormatError(f"{self.path}: {flat[0]} is a single number: it has no rows", path=self.path)
        bounds = [name for name, _ in self._ragged.values()]
        lengths = {n: shape[0] - (n in bounds) for n, shape in shapes.items() if n not in self._ragged}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{n} has {length}" for n, length in lengths.items())
            raise FormatError(
                f"{self.path}: the arrays have several lengths ({listed}): choose with --fields", path=self.path
            )
        if min(lengths.values()) < 0 or (self._bytes and self._arrays[OFFSETS].dtype != np.int64):
            raise FormatError(f"{self.path}: {OFFSETS} is not int64 [N + 1]", path=self.path)
        return next(iter(lengths.values()))


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
