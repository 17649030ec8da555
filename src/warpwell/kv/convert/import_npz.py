"""The arrays of a ``.npz`` file, each row a record: ``NpzSource``."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...array import check_dtype
from ...cache import batches_of
from ...errors import FormatError
from .npz_member import NpzMember
from .sources import Batch, KeyRule, SchemaFields, check_value, choose, rows_of

KEYS, LENGTHS, INTEGERS, VALUES, OFFSETS = "keys", "key_lengths", "key_integers", "values", "value_offsets"
"""Arrays of a dump. `INTEGERS` are flags: which keys are integers. Without a schema, `VALUES` are the bytes of all
values and `OFFSETS` their N + 1 bounds."""


class NpzSource:
    """Rows of arrays that have the same length; or what ``warpwell kv dump`` wrote.

    Parameters
    ----------
    path : pathlib.Path
        The file; members are read row by row, compressed ones too.
    rule : KeyRule
        Names are the items of `key_field`.
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

    def __init__(self, path: Path, rule: KeyRule, key_field: str | None, fields: list[str] | None) -> None:
        self.path = path
        self._rule = rule
        try:
            self._zip = zipfile.ZipFile(path)
            names = [n[:-4] for n in self._zip.namelist() if n.endswith(".npy")]
        except (zipfile.BadZipFile, NotImplementedError) as error:
            raise FormatError(f"{path} is not a .npz file ({error}): write it with numpy.savez", path=path) from None
        self._arrays: dict[str, NpzMember] = {}
        try:
            if key_field is not None:
                choose([key_field], names, str(path))
            self._key = key_field or (KEYS if KEYS in names else None)
            self._bytes = VALUES in names and OFFSETS in names and fields is None
            special = {self._key, *({LENGTHS, INTEGERS} & set(names) if self._key == KEYS and LENGTHS in names else ())}
            names_of_values = (
                [VALUES] if self._bytes else [n for n in choose(fields, names, str(path)) if n not in special]
            )
            if not names_of_values:
                raise FormatError(f"{path} has no array but the keys: add an array of values", path=path)
            for name in [*names_of_values, *(n for n in special if n), *([OFFSETS] if self._bytes else [])]:
                array = self._arrays[name] = NpzMember(self._zip, name, path)
                check_dtype(array.dtype, array.where)
            self._fields = names_of_values
            self.records = self._rows()
        except BaseException:
            self.close()
            raise

    @property
    def schema(self) -> SchemaFields | None:
        """Return the fields; None for a dump of a store without a schema."""
        if self._bytes:
            return None
        return {n: (self._arrays[n].dtype.name, self._arrays[n].shape[1:]) for n in self._fields}

    def batches(self) -> Iterator[Batch]:
        """Read all rows."""
        return self._byte_batches() if self._bytes else self._array_batches()

    def close(self) -> None:
        """Close the file."""
        for member in self._arrays.values():
            member.close()
        self._zip.close()

    def _array_batches(self) -> Iterator[Batch]:
        row_bytes = sum(self._arrays[n].row_bytes for n in self._fields)
        check_value(row_bytes, f"{self.path}: a row")
        step = rows_of(row_bytes)
        for start in range(0, self.records, step):
            count = min(step, self.records - start)
            values = {name: self._arrays[name].read(count) for name in self._fields}
            yield Batch(self._keys(start, count), values, count * row_bytes)
        self._finish()

    def _byte_batches(self) -> Iterator[Batch]:
        offsets, values = self._arrays[OFFSETS], self._arrays[VALUES]
        begin = int(offsets.read(1)[0])
        start, step = 0, rows_of(values.shape[0] // max(1, self.records))
        while start < self.records:
            count = min(step, self.records - start)
            ends = offsets.read(count)
            sizes = np.diff(ends, prepend=begin)
            if (sizes < 0).any() or begin < 0 or int(ends[-1]) > values.shape[0]:
                raise FormatError(
                    f"{self.path}: {OFFSETS} does not rise to the end of {VALUES}: was the file edited?", path=self.path
                )
            check_value(int(sizes.max()), f"{self.path}: record {start + int(sizes.argmax())}")
            keys = self._keys(start, count)
            keys = keys if isinstance(keys, list) else list(keys)
            for rows in batches_of(sizes, 1 << 24, count):  # one large value makes a batch of many small ones too large
                batch_values = [values.read(n).tobytes() for n in sizes[rows].tolist()]
                yield Batch(_uniform(keys[rows]), batch_values, int(sizes[rows].sum()))
            begin, start = int(ends[-1]), start + count
        self._finish()

    def _keys(self, start: int, count: int) -> NDArray[np.int64] | list[Any]:
        if self._key is None:
            return self._rule.from_numbers(start, count)
        column = self._arrays[self._key].read(count)
        where = f"{self.path}: {self._key}"
        if LENGTHS in self._arrays:
            if column.ndim != 2 or column.dtype != np.uint8:
                raise FormatError(f"{where} is not uint8 [N, 16] though there are {LENGTHS}", path=self.path)
            lengths = self._arrays[LENGTHS].read(count).tolist()
            names: list[Any] = [row.tobytes()[:n] for row, n in zip(column, lengths, strict=True)]
            keys: NDArray[np.int64] | list[Any] = self._rule.from_names(names, start, where)
            if INTEGERS in self._arrays and keys is names:
                for k in np.flatnonzero(self._arrays[INTEGERS].read(count)).tolist():
                    keys[k] = int.from_bytes(names[k], "little", signed=True)
            return keys
        return self._rule.from_column(column, start, where)

    def _rows(self) -> int:
        shapes = {n: m.shape for n, m in self._arrays.items()}
        flat = [n for n, shape in shapes.items() if not shape]
        if flat:
            raise FormatError(f"{self.path}: {flat[0]} is a single number: it has no rows", path=self.path)
        lengths = {n: shape[0] - (n == OFFSETS) for n, shape in shapes.items() if not (self._bytes and n == VALUES)}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{n} has {length}" for n, length in lengths.items())
            raise FormatError(
                f"{self.path}: the arrays have several lengths ({listed}): choose with --fields", path=self.path
            )
        if min(lengths.values()) < 0 or (self._bytes and self._arrays[OFFSETS].dtype != np.int64):
            raise FormatError(f"{self.path}: {OFFSETS} is not int64 [N + 1]", path=self.path)
        return next(iter(lengths.values()))

    def _finish(self) -> None:
        """Read the members to their ends, where the zip file's checksums are compared."""
        for member in self._arrays.values():
            member.finish()


def _uniform(keys: list[Any]) -> NDArray[np.int64] | list[bytes]:
    return np.array(keys, np.int64) if isinstance(keys[0], np.integer) else keys
