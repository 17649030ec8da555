"""`Dataset`: rows of several arrays as records, for data loaders."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors, table
from ..kv import rows_of
from .source import begin_all, source_of


class Records(Sequence[dict[str, Any]]):
    """Rows of a data set: ``records.fields`` are whole arrays, ``records[k]`` is one row as a dict.

    PyTorch's own `collate_fn` stacks the rows one by one; `warpwell.train.collate` takes the fields as they are.

    Attributes
    ----------
    fields : dict of ndarray or DeviceArray
        Shape ``(rows, *shape)`` each; `DeviceArray` of arrays on "cuda", of which rows are taken by way of the host.
    dtypes : dict of numpy.dtype
        Of the arrays on storage.
    """

    def __init__(self, fields: dict[str, Any], dtypes: dict[str, np.dtype[Any]]) -> None:
        self.fields = fields
        self.dtypes = dtypes
        self._copies: dict[str, NDArray[Any]] | None = None

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))

    def _on_host(self) -> dict[str, NDArray[Any]]:
        """Return the fields in host memory; those of a GPU are copied once."""
        if self._copies is None:
            self._copies = {name: np.asarray(rows) for name, rows in self.fields.items()}
        return self._copies

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Records({name: rows[index] for name, rows in self._on_host().items()}, self.dtypes)
        return {name: rows[index] for name, rows in self._on_host().items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[k] for k in range(len(self)))

    def __repr__(self) -> str:
        return f"<{len(self)} records of {', '.join(self.fields)}>"


class Dataset:
    """Records whose fields are rows of arrays on storage; nothing is loaded.

    PyTorch's ``DataLoader`` takes it, and so does `warpwell.kv.DataLoader`, which needs no PyTorch, divides batches
    among ranks, and resumes.

    Parameters
    ----------
    fields : dict, Table or path
        Names, each with the path of a ``.npy`` file; ``(path, options of warpwell.open)``; a NumPy array, which stays
        in memory; a column of a table; or an open array, for this process alone. Or a table: all of its columns.
    columns : sequence of str, optional
        Of a table: the columns to take.

    Raises
    ------
    ArgumentError
        There are no fields, they differ in their number of rows, or one has nulls.
    DTypeError
        A field has no numbers.
    MissingFileError, FormatError

    Notes
    -----
    It is pickled as paths. Each process, forked or spawned, opens the files again at its first read.

    ``(path, {"device": "cuda"})`` is gathered to the GPU's memory, and `collate` makes tensors there. CUDA works in no
    forked worker: use ``num_workers=0``, or workers that are spawned.
    """

    def __init__(
        self,
        fields: Mapping[str, Any] | table.Table | str | os.PathLike[str],
        *,
        columns: Sequence[str] | None = None,
    ) -> None:
        with contextlib.ExitStack() as ours:
            if isinstance(fields, str | os.PathLike):
                fields = ours.enter_context(table.open(fields, device="cpu"))
            if isinstance(fields, table.Table):
                fields = {name: fields[name] for name in (fields.names if columns is None else columns)}
            if not fields:
                raise errors.ArgumentError("a dataset without fields: give at least one", name="fields")
            self._sources = {str(name): source_of(value, str(name)) for name, value in fields.items()}
        rows = {name: source.rows for name, source in self._sources.items()}
        if len(set(rows.values())) > 1:
            told = ", ".join(f"{name!r} has {count:,}" for name, count in rows.items())
            raise errors.ArgumentError(f"fields of one dataset have one number of rows, and {told}", name="fields")
        self._rows = next(iter(rows.values()))

    @property
    def schema(self) -> None:
        """None: `warpwell.kv.DataLoader` takes fields as they come."""

    @property
    def names(self) -> list[str]:
        """The names of the fields."""
        return list(self._sources)

    def __len__(self) -> int:
        return self._rows

    def __repr__(self) -> str:
        return f"<Dataset of {self._rows:,} records of {', '.join(self.names)}>"

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one record; a negative index counts from the end."""
        record: dict[str, Any] = self.__getitems__([index])[0]
        return record

    def __getitems__(self, indices: Sequence[int]) -> Records:
        """Return several records, read together.

        Raises
        ------
        ArgumentError, IndexRangeError
        MediumError
        """
        return Records(self.take(indices), {name: source.dtype for name, source in self._sources.items()})

    def take(self, rows: NDArray[Any] | Sequence[int]) -> dict[str, Any]:
        """Return rows as new arrays ``(len(rows), *shape)``; negative numbers count from the end.

        Of arrays on "cuda" they are `DeviceArray`, which PyTorch takes without a copy.

        Raises
        ------
        ArgumentError, IndexRangeError
        MediumError
        """
        rows = rows_of(rows, self._rows, self.names[0])
        begun = begin_all(self._sources, rows)  # all of them are read at once
        return {name: result() for name, result in begun.items()}

    def close(self) -> None:
        """Close the files that this process has open (idempotent). A read opens them again."""
        for source in self._sources.values():
            source.close()

    def __enter__(self) -> Dataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what `warpwell.kv.DataLoader` asks of a store: keys are row numbers

    def ordered(self) -> range:
        """Return the row numbers."""
        return range(self._rows)

    keys_array = ordered

    def get_many(self, keys: Any) -> tuple[dict[str, Any], NDArray[np.bool_]]:
        """Return rows as arrays, and that all were found."""
        return self.take(keys), np.ones(len(keys), np.bool_)
