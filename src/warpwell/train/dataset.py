"""`Dataset`: rows of arrays and tables, or records of stores, for data loaders."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .. import errors, table
from .._check import checked_callable, checked_path
from ..array import DeviceArray
from ..kv import HostFuture, Keys, Store
from .records import (
    UNREADABLE,
    VALUE,
    JoinedReader,
    RowReader,
    Source,
    StoreReader,
    Waiting,
    compact_keys,
    rows_of,
    source_of,
)
from .tensors import columns_of, set_default_collate, tensors_of

SKIPPED = "skipped"
"""Name of the field of a collated batch with the keys of the records that were left out."""


class DecodeError(errors.ArgumentError):
    """`decode` raised an error for a record. That error is the ``__cause__`` of this one.

    Attributes
    ----------
    key : bytes
        The key of the record.
    path : str
        For a record of a store, the file that holds it; otherwise the name of the data.
    offset : int or None
        Byte offset of the record in this file.
    """

    key: bytes | None = None
    path: str | None = None
    offset: int | None = None


class Record(dict[str, Any]):
    """One row of a dataset. PyTorch's default ``collate_fn`` calls `Dataset.collate` for lists of this type."""


class Records(Sequence[dict[str, Any]]):
    """Rows of a dataset: ``records.fields`` are whole columns, ``records[k]`` is one row as a dict.

    `Dataset.collate` makes tensors of the fields without a copy.

    Attributes
    ----------
    fields : dict of ndarray, DeviceArray, Ragged or list
        Arrays have the shape ``(rows, *shape)``. Fields of arrays on "cuda" are `DeviceArray`; reading single rows
        copies them to the host. Values of bytes, and keys that are not all integers, are lists.
    dtypes : dict of numpy.dtype
        The dtypes of the arrays on storage.
    skipped : list of int and bytes, or None
        The keys of the records that were left out, if the dataset has ``on_error="skip"``.
    """

    def __init__(
        self, fields: dict[str, Any], dtypes: Mapping[str, np.dtype[Any]], skipped: list[int | bytes] | None = None
    ) -> None:
        self.fields = fields
        self.dtypes = dtypes
        self.skipped = skipped

    @cached_property
    def _host_fields(self) -> dict[str, Any]:
        return {n: np.asarray(rows) if isinstance(rows, DeviceArray) else rows for n, rows in self.fields.items()}

    def __len__(self) -> int:
        return len(next(iter(self.fields.values()), ()))

    def __getitem__(self, index: Any) -> Any:
        fields = {name: rows[index] for name, rows in self._host_fields.items()}
        if isinstance(index, slice):
            return Records(fields, self.dtypes)
        set_default_collate(Record, Dataset.collate)
        return Record(fields)

    def __repr__(self) -> str:
        return f"<{len(self)} records of {', '.join(self.fields)}>"


class Dataset:
    """Records on storage by position: rows of arrays or of a table, or records of a store. Opening loads none.

    Warpwell's `DataLoader` and PyTorch's ``DataLoader`` accept a dataset.

    Parameters
    ----------
    data : dict, Table, path or Store
        A dict of fields, each with a name and the path of a ``.npy`` file; ``(path, options of warpwell.open)``; a
        NumPy array, which stays in memory; a column of a table; or an open array, which only this process can use. Or a
        table, or the path of a table, with a field for each column. Or a store: a record is a dict of arrays if the
        store has a schema, else bytes.
    columns : sequence of str, optional
        The columns of the table, or the fields of the store, to use. Default: all.
    join : sequence, optional
        More fields for the same keys: stores, tables and dicts of fields, as for `data`. A store must have a record for
        each key; the key of a row is its number. The values of a store without a schema become the field "value".
    keys : optional
        The records to use: keys as for `warpwell.kv.Store.get_many`, or row numbers. Default: all records that exist
        when the dataset is created, in the order of `warpwell.kv.Store.keys_array`.
    key_field : str, optional
        Name of a field to add, with the key or row number of each record. The values of a store without a schema then
        become the field "value".
    decode : callable, optional
        ``decode(record) -> record``, called with each record (a dict of its fields, or bytes) in the thread or worker
        process that reads the batch. If it returns dicts, a field whose arrays, tensors or numbers have one shape is
        stacked, and any other field becomes a list. If it returns anything else, the batch is the list of results.
        Spawned workers import the function by name.
    on_error : {"raise", "skip"}
        "skip" leaves out records that are damaged, that the drive cannot read, that were deleted, or for which `decode`
        raises: batches of `DataLoader` and `__getitems__` then have fewer rows. If none of the records of a batch can
        be read, and the batch has several, the error is raised anyway.

    Raises
    ------
    ArgumentError
        There are no fields, the fields differ in their number of rows, or a column has nulls. When a record is read:
        `decode` raised an error; the message names the key of the record.
    DTypeError
        The items of a field are not numbers.
    MissingFileError, FormatError
    KeyMissingError
        Joined rows lack a key. When a record is read: its key was deleted from a store, or is not in a joined store.
    ForkError
        The store is open for writing, and a forked process reads from it; or the dataset is pickled, and the store is
        open for writing or on a GPU.

    Notes
    -----
    A dataset is pickled as paths. Each process, forked or spawned, opens arrays and tables again at its first read. A
    forked process uses the store of its parent, with the records as of the fork; a spawned one opens the store again.

    Rows of a field ``(path, {"device": "cuda"})`` are gathered to GPU memory, and `collate` makes tensors there. CUDA
    does not work in forked workers: use ``num_workers=0`` or spawned workers.
    """

    def __init__(
        self,
        data: Mapping[str, Any] | table.Table | str | os.PathLike[str] | Store,
        *,
        columns: Sequence[str] | None = None,
        join: Sequence[Any] = (),
        keys: Any = None,
        key_field: str | None = None,
        decode: Callable[[Any], Any] | None = None,
        on_error: str = "raise",
    ) -> None:
        if columns is not None and isinstance(data, Mapping) and not hasattr(data, "get_many"):
            raise errors.ArgumentError("columns= selects columns of a table or a store: leave it out", name="columns")
        if on_error not in ("raise", "skip"):
            raise errors.ArgumentError(f'on_error is {on_error!r}: choose "raise" or "skip"', name="on_error")
        if not isinstance(join, list | tuple):
            raise errors.ArgumentError(f"join is {join!r:.60}: pass a list of stores, tables and dicts", name="join")
        checked_callable(decode, "decode")
        self._decode = decode
        self._skips = on_error == "skip"
        readers = [_reader(data, columns), *(_reader(part, None) for part in join)]
        self._reader: Reader = readers[0] if len(readers) == 1 else JoinedReader(readers)
        if key_field is not None and (not isinstance(key_field, str) or key_field in self._reader.names):
            raise errors.ArgumentError(
                f"key_field is {key_field!r}: choose a name that is not a field", name="key_field"
            )
        self._key_field = key_field
        self._keys = compact_keys(self._reader.keys() if keys is None else keys)
        if isinstance(self._reader, JoinedReader):
            self._reader.require(self._keys)

    @property
    def names(self) -> list[str]:
        """The names of the fields."""
        return [*([] if self._key_field is None else [self._key_field]), *self._reader.names]

    @property
    def store(self) -> Any:
        """The store in this process, or None for arrays and tables."""
        return None if isinstance(self._reader, RowReader) else self._reader.store

    def __len__(self) -> int:
        return self._keys.size

    def __repr__(self) -> str:
        return f"<Dataset of {self._reader.name}: {len(self):,} records of {', '.join(self.names)}>"

    def __getitem__(self, index: int) -> Any:
        """Return one record; a negative index counts from the end."""
        batch = self.take([index])
        return Records(batch, {})[0] if isinstance(batch, dict) else batch[0]

    def __getitems__(self, indices: NDArray[Any] | Sequence[int]) -> Records | list[Any]:
        """Return several records, read together. Raises as `take` does, unless `on_error` is "skip"."""
        keys = self._keys.take(rows_of(indices, len(self), self._reader.name))
        batch, skipped = self._finish(keys, partial(self._reader.read, keys), self._reader.read)
        if not isinstance(batch, dict):
            results: list[Any] = batch
            return results
        return Records(batch, {} if self._decode else self._reader.dtypes, skipped if self._skips else None)

    def take(self, rows: NDArray[Any] | Sequence[int]) -> Any:
        """Return the records at some positions; negative numbers count from the end.

        Returns
        -------
        dict or list
            New arrays ``(len(rows), *shape)``, a `Ragged` for each ragged field, or a list of bytes for a store
            without a schema. Rows of arrays on "cuda" are `DeviceArray`, which PyTorch uses without a copy.

        Raises
        ------
        ArgumentError, IndexRangeError
        KeyMissingError
        CorruptionError, MediumError
        """
        keys = self._keys.take(rows_of(rows, len(self), self._reader.name))
        return self._finish(keys, partial(self._reader.read, keys), None)[0]

    @staticmethod
    def collate(batch: Any) -> dict[str, Any]:
        """Return a batch as tensors that share its memory: the ``collate_fn`` of PyTorch's ``DataLoader``.

        Parameters
        ----------
        batch : Records or list of dict
            A batch, or a list of records, of a `Dataset`. The fields of the records of a list are stacked.

        Returns
        -------
        dict of torch.Tensor
            A tensor per field. Ragged fields become lists of tensors, bytes or strings. Lists stay lists; arrays in
            them become tensors. With ``on_error="skip"`` the field "skipped" lists the keys of the records that were
            left out.

        Raises
        ------
        ArgumentError
            The batch is not from `Dataset`, or PyTorch is not installed.
        """
        if isinstance(batch, list) and batch and all(isinstance(record, Record) for record in batch):
            batch = Records(columns_of(batch), {})
        if not isinstance(batch, Records):
            raise errors.ArgumentError(
                f"collate expects a batch of fields from warpwell.train.Dataset, got a {type(batch).__name__}: values "
                "of a store without a schema are bytes, which your own collate_fn decodes, or a decode= that returns a "
                "dict",
                name="collate_fn",
            )
        tensors = {name: tensors_of(rows, batch.dtypes.get(name)) for name, rows in batch.fields.items()}
        return tensors if batch.skipped is None else {**tensors, SKIPPED: batch.skipped}

    def start(self, rows: NDArray[np.int64]) -> Any:
        """Start to read the records at some positions, for `DataLoader`.

        Returns
        -------
        future
            Its ``wait()`` returns the batch and the keys of the records that were left out. Records of a store with a
            schema on a GPU are device arrays, unless there is a `decode` function.
        """
        keys = self._keys.take(rows)
        if self._decode is not None:  # in a thread of the pool, so that batches are decoded ahead, too
            return HostFuture(lambda: self._finish(keys, partial(self._reader.read, keys), self._reader.read))
        future = self._reader.start(keys)
        return Waiting(lambda: self._finish(keys, future.wait, lambda some: self._reader.start(some).wait()))

    def _finish(
        self, keys: Keys, wait: Callable[[], Any], read_again: Callable[[Keys], Any] | None
    ) -> tuple[Any, list[int | bytes]]:
        """Return a batch, decoded and with its field of keys, and the keys of the records that were left out.

        Parameters
        ----------
        keys : Keys
        wait : callable
            Return the records of the keys.
        read_again : callable, optional
            Return the records of some of the keys, for ``on_error="skip"``; None to raise the error in any case.
        """
        skipped: list[int | bytes] = []
        try:
            batch = wait()
        except UNREADABLE:
            if read_again is None or not self._skips:
                raise
            is_readable = self._readable(keys)
            if keys.size > 1 and not is_readable.any():
                raise  # the drive failed, not some records
            skipped = keys.take(~is_readable).to_list()
            keys = keys.take(is_readable)
            batch = read_again(keys)
        if self._decode is not None:
            batch, is_decoded = self._decoded(keys, batch, is_skipping=self._skips and read_again is not None)
            skipped += keys.take(~is_decoded).to_list()
            keys = keys.take(is_decoded)
        if self._key_field is not None:
            numbers_or_bytes = keys.numbers() if keys.all_integers else keys.to_list()
            batch = {self._key_field: numbers_or_bytes, **(batch if isinstance(batch, dict) else {VALUE: batch})}
        return batch, skipped

    def _readable(self, keys: Keys) -> NDArray[np.bool_]:
        """Return which records can be read, bool [N], by reading all of them."""
        try:
            self._reader.read(keys)
            return np.ones(keys.size, np.bool_)
        except UNREADABLE:
            half = keys.size // 2
            if not half:
                return np.zeros(1, np.bool_)
            parts = keys.take(slice(half)), keys.take(slice(half, None))
            return np.concatenate([self._readable(part) for part in parts])

    def _decoded(self, keys: Keys, batch: Any, is_skipping: bool) -> tuple[Any, NDArray[np.bool_]]:
        """Return the decoded records of a batch, as columns if they are dicts, and which could be decoded."""
        assert self._decode is not None
        records = Records(batch, {}) if isinstance(batch, dict) else batch
        is_decoded = np.ones(keys.size, np.bool_)
        results = []
        for k in range(keys.size):
            try:
                results.append(self._decode(records[k]))
            except Exception as error:
                is_decoded[k] = False
                if not is_skipping or (k == keys.size - 1 > 0 and not results):
                    name, key = type(error).__name__, keys.row(k)
                    path, offset = (self._reader.name, None) if self.store is None else self.store.place_of(key)
                    where = path if offset is None else f"{path}, byte {offset}"
                    raise DecodeError(
                        f"{where}: decode= raised {name} for the record of key {key!r}: {error}",
                        name="decode",
                        key=keys.raw(k),
                        path=path,
                        offset=offset,
                    ) from error
        if not all(isinstance(result, dict) for result in results):
            return results, is_decoded
        return columns_of(results) if results else {name: [] for name in self._reader.names}, is_decoded

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


Reader: TypeAlias = RowReader | StoreReader | JoinedReader


def _reader(data: Any, columns: Sequence[str] | None) -> RowReader | StoreReader:
    return StoreReader(data, columns) if hasattr(data, "get_many") else RowReader(_sources(data, columns))


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
            raise errors.ArgumentError("a dataset without fields: pass at least one", name="data")
        return {str(name): source_of(value, str(name)) for name, value in data.items()}
