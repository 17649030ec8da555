"""`Dataset`: rows of arrays and tables, and records of stores, for data loaders."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors, table
from .._check import checked_path
from ..kv import Keys, Store
from .records import UNREADABLE, VALUE, Finished, RowReader, StoreReader, compact_keys, rows_of
from .sources import Source, source_of
from .tensors import tensor_of


class Records(Sequence[dict[str, Any]]):
    """Rows of a dataset: ``records.fields`` are whole arrays, ``records[k]`` is one row as a dict.

    PyTorch's default `collate_fn` stacks the rows one by one; `Dataset.collate` uses the fields without a copy.

    Attributes
    ----------
    fields : dict of ndarray, DeviceArray or list
        Shape ``(rows, *shape)`` each. Fields of arrays on "cuda" are `DeviceArray`; reading single rows copies them to
        the host. Values of bytes, and keys that are not all integers, are lists.
    dtypes : dict of numpy.dtype
        The dtypes of the arrays on storage.
    """

    def __init__(self, fields: dict[str, Any], dtypes: dict[str, np.dtype[Any]]) -> None:
        self.fields = fields
        self.dtypes = dtypes

    @cached_property
    def _host_fields(self) -> dict[str, Any]:
        return {name: rows if isinstance(rows, list) else np.asarray(rows) for name, rows in self.fields.items()}

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))

    def __getitem__(self, index: Any) -> Any:
        fields = {name: rows[index] for name, rows in self._host_fields.items()}
        return Records(fields, self.dtypes) if isinstance(index, slice) else fields

    def __repr__(self) -> str:
        return f"<{len(self)} records of {', '.join(self.fields)}>"


class Dataset:
    """Records on storage by position: rows of arrays, of a table, or records of a store; nothing is loaded.

    `DataLoader` accepts it, and PyTorch's ``DataLoader`` does, too.

    Parameters
    ----------
    data : dict, Table, path or Store
        A dict of fields: the value of each name is the path of a ``.npy`` file; ``(path, options of warpwell.open)``; a
        NumPy array, which stays in memory; a column of a table; or an open array, for this process only. A table, or
        the path of a table, stands for its columns. A record of a store is a dict of arrays if the store has a schema,
        else bytes.
    columns : sequence of str, optional
        The columns of the table to use. Default: all.
    keys : optional
        The records to use: keys as for `warpwell.kv.Store.get_many`, or row numbers. Default: all records that there
        are now, in the order of `warpwell.kv.Store.keys_array`.
    key_field : str, optional
        Name of a field to add, which has the key or row number of each record. Values of a store without a schema are
        then the field "value".

    Raises
    ------
    ArgumentError
        There are no fields, they differ in their number of rows, or a column has nulls.
    DTypeError
        A field does not have numbers.
    MissingFileError, FormatError
    KeyMissingError
        On access: a key was deleted from the store.
    ForkError
        On access in a forked process if the store is open for writing; on pickling if it is open for writing or on a
        GPU.

    Notes
    -----
    A dataset is pickled as paths. Each process, forked or spawned, opens arrays and tables again at its first read. A
    forked process uses the store of its parent, with the records as of the fork; a spawned one opens the store again.

    ``(path, {"device": "cuda"})`` is gathered to GPU memory, where `collate` makes tensors. CUDA does not work in
    forked workers: use ``num_workers=0`` or spawned workers.
    """

    def __init__(
        self,
        data: Mapping[str, Any] | table.Table | str | os.PathLike[str] | Store,
        *,
        columns: Sequence[str] | None = None,
        keys: Any = None,
        key_field: str | None = None,
    ) -> None:
        if columns is not None and not isinstance(data, table.Table | str | os.PathLike):
            raise errors.ArgumentError("columns= selects columns of a table: leave it out", name="columns")
        self._reader: RowReader | StoreReader
        if hasattr(data, "get_many"):
            self._reader = StoreReader(data)
        else:
            self._reader = RowReader(_sources(data, columns))
        if key_field is not None and (not isinstance(key_field, str) or key_field in self._reader.names):
            raise errors.ArgumentError(
                f"key_field is {key_field!r}: give a new name, which is not a field already", name="key_field"
            )
        self._key_field = key_field
        self._keys = compact_keys(self._reader.keys() if keys is None else keys)

    @property
    def names(self) -> list[str]:
        """The names of the fields."""
        return [*([] if self._key_field is None else [self._key_field]), *self._reader.names]

    @property
    def store(self) -> Any:
        """The store in this process, or None for arrays and tables."""
        return self._reader.store if isinstance(self._reader, StoreReader) else None

    def __len__(self) -> int:
        return self._keys.size

    def __repr__(self) -> str:
        return f"<Dataset of {self._reader.name}: {len(self):,} records of {', '.join(self.names)}>"

    def __getitem__(self, index: int) -> Any:
        """Return one record; a negative index counts from the end."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: NDArray[Any] | Sequence[int]) -> Records | list[bytes]:
        """Return several records, read together; errors as for `take`."""
        batch = self.take(indices)
        return Records(batch, self._reader.dtypes) if isinstance(batch, dict) else batch

    def take(self, rows: NDArray[Any] | Sequence[int]) -> Any:
        """Return the records at some positions; negative numbers count from the end.

        Returns
        -------
        dict or list
            New arrays ``(len(rows), *shape)``, or a list of bytes for a store without a schema. Rows of arrays on
            "cuda" are `DeviceArray`, which PyTorch uses without a copy.

        Raises
        ------
        ArgumentError, IndexRangeError
        KeyMissingError
        CorruptionError, MediumError
        """
        keys = self._keys.take(rows_of(rows, len(self), self._reader.name))
        return self._with_keys(keys, self._reader.read(keys))

    @staticmethod
    def collate(batch: Any) -> dict[str, Any]:
        """Return records as tensors that share their memory: the ``collate_fn`` of PyTorch's ``DataLoader``.

        Parameters
        ----------
        batch : Records
            From `Dataset`.

        Returns
        -------
        dict of torch.Tensor
            A tensor per field. Lists of bytes stay lists.

        Raises
        ------
        ArgumentError
            The batch is not from `Dataset`, or PyTorch is not installed.
        """
        if not isinstance(batch, Records):
            raise errors.ArgumentError(
                f"collate expects a batch of fields from warpwell.train.Dataset, got a {type(batch).__name__}: values "
                "of a store without a schema are bytes, which your own collate_fn decodes",
                name="collate_fn",
            )
        return {
            name: rows if isinstance(rows, list) else tensor_of(rows, batch.dtypes.get(name, np.dtype(np.int64)))
            for name, rows in batch.fields.items()
        }

    def start_take(self, rows: NDArray[np.int64]) -> Any:
        """Start to read the records at some positions; return a future whose ``wait()`` returns them.

        Records of a store with a schema on a GPU are device arrays.
        """
        keys = self._keys.take(rows)
        future = self._reader.start(keys)
        return future if self._key_field is None else Finished(future, partial(self._with_keys, keys))

    def readable(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of the records at some positions can be read, bool [N], by reading all of them."""
        try:
            self.take(rows)
            return np.ones(len(rows), np.bool_)
        except UNREADABLE:
            half = len(rows) // 2
            if not half:
                return np.zeros(1, np.bool_)
            return np.concatenate([self.readable(rows[:half]), self.readable(rows[half:])])

    def keys_at(self, rows: NDArray[np.int64]) -> list[int | bytes]:
        """Return the keys, or row numbers, of the records at some positions."""
        return self._keys.take(rows).to_list()

    def _with_keys(self, keys: Keys, batch: Any) -> Any:
        if self._key_field is None:
            return batch
        numbers_or_bytes = keys.numbers() if keys.all_integers else keys.to_list()
        return {self._key_field: numbers_or_bytes, **(batch if isinstance(batch, dict) else {VALUE: batch})}

    def checksum(self) -> int:
        """Return a CRC-32 of all keys, which identifies them."""
        crc = 0
        for first in range(0, len(self), 1 << 16):
            padded, lengths = self._keys.take(np.arange(first, min(first + (1 << 16), len(self)))).padded()
            crc = zlib.crc32(lengths.tobytes(), zlib.crc32(padded.tobytes(), crc))
        return crc

    def close(self) -> None:
        """Close the files that this process has open (idempotent); a read opens them again. Stores stay open."""
        self._reader.close()

    def __enter__(self) -> Dataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _sources(data: Any, columns: Sequence[str] | None) -> dict[str, Source]:
    """Return the sources of fields, or of the columns of a table."""
    with contextlib.ExitStack() as stack:
        if isinstance(data, str | os.PathLike):
            if os.path.isfile(os.path.join(checked_path(data, "data"), "MANIFEST")):
                raise errors.ArgumentError(
                    f"{os.fspath(data)} is a key-value store: pass warpwell.kv.open(path)", name="data"
                )
            data = stack.enter_context(table.open(data, device="cpu"))
        if isinstance(data, table.Table):
            data = {name: data[name] for name in (data.names if columns is None else columns)}
        if not isinstance(data, Mapping):
            raise errors.ArgumentError(
                f"data is {data!r:.60}: pass a dict of fields, a table or its path, or an open store"
                " (warpwell.kv.open(path))",
                name="data",
            )
        if not data:
            raise errors.ArgumentError("a dataset without fields: give at least one", name="data")
        return {str(name): source_of(value, str(name)) for name, value in data.items()}
