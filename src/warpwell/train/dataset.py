"""`Dataset`: rows of several arrays as records, for data loaders."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors, table
from ..kv import rows_of
from .sources import read_rows, source_of


class Records(Sequence[dict[str, Any]]):
    """Rows of a dataset: ``records.fields`` are whole arrays, ``records[k]`` is one row as a dict.

    PyTorch's default `collate_fn` stacks the rows one by one; `warpwell.train.collate` uses the fields without a copy.

    Attributes
    ----------
    fields : dict of ndarray or DeviceArray
        Shape ``(rows, *shape)`` each. Fields of arrays on "cuda" are `DeviceArray`; reading single rows copies them to
        the host.
    dtypes : dict of numpy.dtype
        The dtypes of the arrays on storage.
    """

    def __init__(self, fields: dict[str, Any], dtypes: dict[str, np.dtype[Any]]) -> None:
        self.fields = fields
        self.dtypes = dtypes

    @cached_property
    def _host_fields(self) -> dict[str, NDArray[Any]]:
        return {name: np.asarray(rows) for name, rows in self.fields.items()}

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))

    def __getitem__(self, index: Any) -> Any:
        fields = {name: rows[index] for name, rows in self._host_fields.items()}
        return Records(fields, self.dtypes) if isinstance(index, slice) else fields

    def __repr__(self) -> str:
        return f"<{len(self)} records of {', '.join(self.fields)}>"


class Dataset:
    """Records whose fields are rows of arrays on storage; nothing is loaded.

    PyTorch's ``DataLoader`` accepts it. `warpwell.kv.DataLoader` accepts it, too: it needs no PyTorch, divides batches
    among ranks, and resumes.

    Parameters
    ----------
    fields : dict, Table or path
        The value of each name is the path of a ``.npy`` file; ``(path, options of warpwell.open)``; a NumPy array,
        which stays in memory; a column of a table; or an open array, for this process only. A table, or the path of a
        table, stands for its columns.
    columns : sequence of str, optional
        The columns of the table to use. Default: all.

    Raises
    ------
    ArgumentError
        There are no fields, they differ in their number of rows, or a column has nulls.
    DTypeError
        A field does not have numbers.
    MissingFileError, FormatError

    Notes
    -----
    A dataset is pickled as paths. Each process, forked or spawned, opens the files again at its first read.

    ``(path, {"device": "cuda"})`` is gathered to GPU memory, where `collate` makes tensors. CUDA does not work in
    forked workers: use ``num_workers=0`` or spawned workers.
    """

    def __init__(
        self,
        fields: Mapping[str, Any] | table.Table | str | os.PathLike[str],
        *,
        columns: Sequence[str] | None = None,
    ) -> None:
        with contextlib.ExitStack() as stack:
            if isinstance(fields, str | os.PathLike):
                fields = stack.enter_context(table.open(fields, device="cpu"))
            if isinstance(fields, table.Table):
                fields = {name: fields[name] for name in (fields.names if columns is None else columns)}
            if not fields:
                raise errors.ArgumentError("a dataset without fields: give at least one", name="fields")
            self._sources = {str(name): source_of(value, str(name)) for name, value in fields.items()}
        rows = {name: source.rows for name, source in self._sources.items()}
        if len(set(rows.values())) > 1:
            counts = ", ".join(f"{name!r} has {count:,}" for name, count in rows.items())
            raise errors.ArgumentError(f"fields of a dataset must have equally many rows: {counts}", name="fields")
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

    def __getitems__(self, indices: NDArray[Any] | Sequence[int]) -> Records:
        """Return several records, read together; errors as for `take`."""
        return Records(self.take(indices), {name: source.dtype for name, source in self._sources.items()})

    def take(self, rows: NDArray[Any] | Sequence[int]) -> dict[str, Any]:
        """Return rows as new arrays ``(len(rows), *shape)``; negative numbers count from the end.

        Rows of arrays on "cuda" are `DeviceArray`, which PyTorch uses without a copy.

        Raises
        ------
        ArgumentError, IndexRangeError
        MediumError
        """
        return read_rows(self._sources, rows_of(rows, self._rows, self.names[0]))

    def close(self) -> None:
        """Close the files that this process has open (idempotent). A read opens them again."""
        for source in self._sources.values():
            source.close()

    def __enter__(self) -> Dataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The interface of a store that `warpwell.kv.DataLoader` uses: keys are row numbers.

    def keys_array(self) -> range:
        """Return the row numbers."""
        return range(self._rows)

    def get_many(self, keys: Any) -> tuple[dict[str, Any], NDArray[np.bool_]]:
        """Return rows as arrays, and an array of True: every row exists."""
        return self.take(keys), np.ones(len(keys), np.bool_)
