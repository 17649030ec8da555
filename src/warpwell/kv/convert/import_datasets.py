"""Data sets of Hugging Face's ``datasets``: ``DatasetSource``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..._check import imported
from ...errors import ArgumentError, FormatError
from .sources import Batch, KeyRule, SchemaFields, check_value, choose, rows_of

_FIRST_ROWS = 64


class DatasetSource:
    """Rows of a data set. Columns of numbers become the fields of a schema; a single column of text or bytes becomes
    the value.

    Columns are read from Arrow, so dtypes are kept.

    Parameters
    ----------
    dataset : datasets.Dataset
        The data set; its indices (of a shuffle or selection) are followed.
    rule : KeyRule
        Names are the items of `key_field`.
    key_field : str, optional
        Column of keys: integers, or text or bytes of 1 to 16 bytes. Otherwise rows are numbered.
    fields : list of str, optional
        Columns to take; all but the keys by default.
    where : str
        Name of the data set in messages.

    Raises
    ------
    ArgumentError
        A column does not exist.
    FormatError
        A column has no fixed shape, or values are missing.
    """

    kind = "datasets"

    def __init__(
        self,
        dataset: Any,
        rule: KeyRule,
        key_field: str | None = None,
        fields: list[str] | None = None,
        where: str = "the data set",
    ) -> None:
        self.where = where
        self._rule = rule
        self._dataset = dataset.with_format("arrow")
        self._key = key_field
        columns: list[str] = list(dataset.column_names)
        if key_field is not None:
            choose([key_field], columns, where)
        self._fields = [n for n in choose(fields, columns, where) if n != key_field or fields]
        self.records = len(dataset)
        if not self._fields or not self.records:
            raise FormatError(f"{where} has {self.records} rows and no column left for values")
        first = self._dataset[: min(_FIRST_ROWS, self.records)]
        self._text = len(self._fields) == 1 and _is_text(first.column(self._fields[0]).type)
        self.schema: SchemaFields | None = None
        sizes = [0]
        if self._text:
            sizes = [len(v) for v in _texts(first.column(self._fields[0]), where)]
        else:
            arrays = {n: _array(first.column(n), f"{where}: {n}") for n in self._fields}
            self.schema = {n: (a.dtype.name, a.shape[1:]) for n, a in arrays.items()}
            sizes = [sum(a.nbytes // len(a) for a in arrays.values())]
        self._step = rows_of(max(sizes))

    @classmethod
    def open(cls, path: Path, rule: KeyRule, key_field: str | None, fields: list[str] | None) -> DatasetSource:
        """Open what ``save_to_disk`` wrote, or an ``.arrow`` file."""
        datasets = imported("datasets", "datasets")
        try:
            data = datasets.load_from_disk(str(path)) if path.is_dir() else datasets.Dataset.from_file(str(path))
        except Exception as error:  # Arrow and datasets raise classes of their own for damage
            raise FormatError(f"{path} cannot be read as a data set ({error})", path=path) from None
        return cls(data, rule, key_field, fields, str(path))

    def batches(self) -> Iterator[Batch]:
        """Read all rows."""
        for start in range(0, self.records, self._step):
            table = self._dataset[start : start + self._step]
            keys = self._keys(table, start)
            if self._text:
                values = _texts(table.column(self._fields[0]), f"{self.where}: {self._fields[0]}")
                check_value(max(map(len, values)), f"{self.where}: a value in rows {start} and up")
                yield Batch(keys, values, sum(map(len, values)))
                continue
            arrays = {n: _array(table.column(n), f"{self.where}: {n}") for n in self._fields}
            assert self.schema is not None
            for name, array in arrays.items():
                if (array.dtype.name, array.shape[1:]) != self.schema[name]:
                    raise FormatError(
                        f"{self.where}: {name} has items of shape {array.shape[1:]} from row {start} on, and of "
                        f"{self.schema[name][1]} before: a schema needs one shape. Leave it out with --fields"
                    )
            yield Batch(keys, arrays, sum(a.nbytes for a in arrays.values()))

    def close(self) -> None:
        """Do nothing: no file is open."""

    def _keys(self, table: Any, start: int) -> NDArray[np.int64] | list[bytes]:
        if self._key is None:
            return self._rule.from_numbers(start, table.num_rows)
        column, where = table.column(self._key), f"{self.where}: {self._key}"
        if _is_text(column.type):
            return self._rule.from_names(_texts(column, where), start, where)
        return self._rule.from_column(_array(column, where), start, where)


def _is_text(kind: Any) -> bool:
    return str(kind) in ("string", "large_string", "binary", "large_binary")


def _texts(column: Any, where: str) -> list[bytes]:
    if column.null_count:
        raise FormatError(f"{where} has rows without a value: filter them out first")
    return [v if isinstance(v, bytes) else v.encode() for v in column.to_pylist()]


def _array(column: Any, where: str) -> NDArray[Any]:
    """Return a column, chunks of nested lists of one shape, as an array."""
    array = column.combine_chunks()
    if hasattr(array, "chunks"):  # older Arrow leaves one chunk in its wrapper
        array = array.chunk(0)
    shape = [len(array)]
    while True:
        if hasattr(array, "storage"):  # datasets' Array2D and so on
            array = array.storage
        if array.null_count:
            raise FormatError(f"{where} has rows without a value: filter them out first")
        if "list" not in str(array.type).split("<")[0]:
            break
        flat = array.flatten()
        rows = max(1, len(array))
        lengths = array.value_lengths().to_numpy(zero_copy_only=False) if hasattr(array, "value_lengths") else None
        if len(flat) % rows or (lengths is not None and (lengths != len(flat) // rows).any()):
            raise FormatError(f"{where} has lists of several lengths: leave it out with --fields, or pad it")
        shape.append(len(flat) // rows)
        array = flat
    try:
        values: NDArray[Any] = array.to_numpy(zero_copy_only=False)
    except (TypeError, NotImplementedError):
        values = np.empty(0, object)
    if values.dtype.kind not in "biuf":
        raise ArgumentError(
            f"{where} is {array.type}, and a schema has numbers only: choose columns with --fields, or one column of "
            "text or bytes alone",
            name="fields",
        )
    return np.ascontiguousarray(values).reshape(shape)
