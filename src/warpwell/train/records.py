"""Records by their keys: rows of arrays and tables, by row number, and records of a store.

A source, which has the rows of one array or column, is pickled as a path, and each process opens the file at its first
read. So forked and spawned workers share no state. Rows arrive in host memory; rows of an array on "cuda" arrive in GPU
memory.

A reader has the attributes ``name`` (for messages), ``names`` and ``dtypes`` of its fields, and the methods ``keys``,
``read``, ``start`` and ``close``.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .. import errors, table
from .._check import checked_path
from ..array import Array, open_array
from ..array.gather import gather
from ..kv import HostFuture, Keys, Ragged, as_keys
from ..kv import open as open_store

UNREADABLE = (errors.CorruptionError, errors.MediumError, errors.KeyMissingError)
"""Errors of single records."""
VALUE = "value"
"""Name of the field with the values of a store without a schema."""


class PerProcess:
    """An object that each process opens at its first use; a pickled copy is not open.

    Parameters
    ----------
    open_object : callable
        Return the open object, which has a method ``close``. It must support pickling.
    """

    def __init__(self, open_object: Callable[[], Any]) -> None:
        self._open_object = open_object
        self._opened: tuple[int, Any] | None = None

    def get(self) -> Any:
        """Return the object of this process."""
        opened = self._opened
        if opened is None or opened[0] != os.getpid():
            opened = self._opened = os.getpid(), self._open_object()
        return opened[1]

    def close(self) -> None:
        """Close the object if this process has opened it (idempotent)."""
        opened, self._opened = self._opened, None
        if opened is not None and opened[0] == os.getpid():
            opened[1].close()

    def __reduce__(self) -> Any:
        return PerProcess, (self._open_object,)


class ArraySource:
    """Rows of an array.

    Parameters
    ----------
    array : ndarray, Array or PerProcess
        In memory, open in this process, or a file that each process opens.
    name : str
        The name of the field, for messages.

    Attributes
    ----------
    rows : int
    shape : tuple of int
        The shape of a row.
    dtype : numpy.dtype
        The dtype of an `Array` distinguishes uint16 from the bits of bfloat16.

    Raises
    ------
    ArgumentError, DTypeError
        The array does not have rows of numbers.
    """

    def __init__(self, array: NDArray[Any] | Array | PerProcess, name: str) -> None:
        self._array = array
        opened = self._open()
        self.dtype = np.dtype(opened.dtype)
        if not opened.shape:
            raise errors.ArgumentError(f"{name!r} is a scalar: pass an array that has rows", name=name)
        if self.dtype.hasobject or self.dtype.kind not in "biufcV":
            raise errors.DTypeError(f"{name!r} has items of {self.dtype}: pass numbers or records")
        self.rows = int(opened.shape[0])
        self.shape = tuple(opened.shape[1:])

    def _open(self) -> Any:
        return self._array.get() if isinstance(self._array, PerProcess) else self._array

    def start_read(self, rows: NDArray[np.int64]) -> Callable[[], Any]:
        """Start to read rows; their numbers must be in range.

        Returns
        -------
        callable
            Wait for the rows and return them as a new array: a `DeviceArray` of an array on "cuda", else an ndarray.
        """
        array = self._open()
        if isinstance(array, np.ndarray):
            return partial(np.take, array, rows, axis=0)
        return gather(array, rows).result

    def close(self) -> None:
        """Close the file if this process has opened it; a read opens it again."""
        if isinstance(self._array, PerProcess):
            self._array.close()


class ColumnSource:
    """Rows of a column of a table: numbers, booleans, lists of one length; dates and times as integers.

    It has the attributes and methods of `ArraySource`.
    """

    def __init__(self, column: table.Column, name: str) -> None:
        self.path, self._column, self.rows = column.path, column.name, column.rows
        self._table = PerProcess(partial(table.open, column.path, device="cpu"))
        if column.nulls:
            raise errors.ArgumentError(
                f"{name!r} has {column.nulls} nulls, which an array of numbers cannot represent: fill them before the "
                "table is written, or take other columns",
                name=name,
            )
        if not self.rows:
            raise errors.ArgumentError(f"{name!r} is a column of a table without rows", name=name)
        import pyarrow  # slow

        row = _numpy_columns(table.ColumnBatch(pyarrow.table({name: column.arrow(0, 1)})))[name]
        if row.dtype.kind not in "biuf" or str(column.type).startswith("fixed_size_binary"):
            raise errors.DTypeError(
                f"{name!r} is a column of {column.type}: expected numbers or lists of numbers of one length; convert "
                "it before the table is written, or take other columns"
            )
        self.shape, self.dtype = row.shape[1:], row.dtype

    def start_read(self, rows: NDArray[np.int64]) -> Callable[[], NDArray[Any]]:
        """Return a function that reads rows; see `ArraySource.start_read`."""
        return lambda: self.read_together([self], rows)[0]

    @staticmethod
    def read_together(sources: Sequence[ColumnSource], rows: NDArray[np.int64]) -> list[NDArray[Any]]:
        """Read several columns of one table in one call, and return the rows."""
        unique_rows, positions = np.unique(rows, return_inverse=True)
        names = list(dict.fromkeys(source._column for source in sources))
        columns = _numpy_columns(table.Selection(sources[0]._table.get(), unique_rows).take(names))
        return [columns[source._column][positions] for source in sources]

    def close(self) -> None:
        """Close the table if this process has opened it; a read opens it again."""
        self._table.close()


def _numpy_columns(rows: table.ColumnBatch) -> dict[str, NDArray[Any]]:
    columns = rows.numpy()
    return {name: items.view(np.int64) if items.dtype.kind in "mM" else items for name, items in columns.items()}


Source: TypeAlias = ArraySource | ColumnSource


def source_of(value: Any, name: str) -> Source:
    """Return a source of the rows of a value that a user passes.

    Parameters
    ----------
    value : path, (path, dict), ndarray, Array or Column
        The path of a ``.npy`` file, or a path with options of `warpwell.open`; an array in memory; an open array, for
        this process only; a column of a table.
    name : str
        The name of the field, for messages.

    Raises
    ------
    ArgumentError, DTypeError
        The value does not have rows of numbers.
    """
    if isinstance(value, table.Column):
        return ColumnSource(value, name)
    if isinstance(value, np.ndarray | Array):
        return ArraySource(value, name)
    path, options = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
    if not isinstance(path, str | os.PathLike) or not isinstance(options, dict):
        raise errors.ArgumentError(
            f"{name!r} is {value!r:.60}: pass the path of a .npy file, (path, options of ww.open), a column of a "
            "table, or an array",
            name=name,
        )
    # A forked worker cannot use a GPU, so files are opened on the CPU by default.
    options = {"mode": "r", "device": "cpu", **options}
    return ArraySource(PerProcess(partial(open_array, os.path.abspath(checked_path(path)), **options)), name)


class KeyRange:
    """Integer keys in arithmetic progression, without a list of them."""

    def __init__(self, keys: range) -> None:
        self.size = len(keys)
        self._first = keys.start
        self._step = keys.step

    def take(self, rows: NDArray[np.int64]) -> Keys:
        """Return the keys at some positions."""
        return Keys(self._first + self._step * rows, None)


def compact_keys(keys: Any) -> Keys | KeyRange:
    """Return keys in the form that needs least memory; arrays are copied, because their owner may change them."""
    if isinstance(keys, range) and len(keys) > 2:
        as_keys([keys[0], keys[-1]])  # raises an error if they do not have 64 bits
        return KeyRange(keys)
    checked = as_keys(keys)
    if checked.lengths is None and checked.size and checked.all_integers:
        first, last = int(checked.words[0]), int(checked.words[-1])
        if last - first == checked.size - 1 and (np.diff(checked.words) == 1).all():
            return KeyRange(range(first, last + 1))
    return checked.copied()


class RowReader:
    """Rows of arrays and of columns of tables; keys are row numbers.

    Parameters
    ----------
    sources : dict of Source
        They have the same number of rows.
    """

    name = "Dataset"

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = sources
        self.dtypes = {name: source.dtype for name, source in sources.items()}
        counts = {name: source.rows for name, source in sources.items()}
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{name!r} has {count:,}" for name, count in counts.items())
            raise errors.ArgumentError(f"fields of a dataset must have equally many rows: {listed}", name="data")
        self._rows = next(iter(counts.values()))

    @property
    def names(self) -> list[str]:
        """The names of the fields."""
        return list(self._sources)

    def keys(self) -> range:
        """Return all row numbers."""
        return range(self._rows)

    def read(self, keys: Keys) -> dict[str, Any]:
        """Return rows as arrays ``(rows, *shape)``, or as device arrays for arrays on "cuda"."""
        rows = rows_of(keys.numbers(), self._rows, self.names[0])
        waits = {
            name: source.start_read(rows) for name, source in self._sources.items() if isinstance(source, ArraySource)
        }
        columns = {name: source for name, source in self._sources.items() if isinstance(source, ColumnSource)}
        arrays: dict[str, Any] = {}
        for path in {source.path for source in columns.values()}:
            of_table = {name: source for name, source in columns.items() if source.path == path}
            arrays.update(zip(of_table, ColumnSource.read_together([*of_table.values()], rows), strict=True))
        return {name: arrays[name] if name in arrays else waits[name]() for name in self._sources}

    def start(self, keys: Keys) -> Any:
        """Start to read rows; return a future whose ``wait()`` returns the result of `read`."""
        return HostFuture(lambda: self.read(keys))

    def require(self, keys: Keys | KeyRange) -> None:
        """Raise KeyMissingError if a key is not the number of a row."""
        checked = keys.take(np.array([0, keys.size - 1])) if isinstance(keys, KeyRange) else keys
        numbers = checked.numbers()
        absent = np.flatnonzero((numbers < 0) | (numbers >= self._rows) | ~np.asarray(checked.kinds))
        if absent.size:
            first = int(absent[0])
            raise errors.KeyMissingError(
                f"{self.names} have no row for key {checked.row(first)!r}: {self._rows} rows have the keys "
                f"0 to {self._rows - 1}; add the rows, or pass keys= that have one",
                key=checked.raw(first),
            )

    def close(self) -> None:
        """Close the files that this process has open (idempotent). A read opens them again."""
        for source in self._sources.values():
            source.close()


class StoreReader:
    """Records of a store.

    In a forked process the store has the records as of the fork. A reader that is pickled opens the store again.

    Parameters
    ----------
    store : Store
        Or any object with the methods `Store.get_many` and `Store.keys_array`.
    fields : sequence of str, optional
        The fields of its schema to read.

    Raises
    ------
    ArgumentError, SchemaError
        The store has no schema, or its schema lacks one of the fields.
    """

    def __init__(self, store: Any, fields: Sequence[str] | None = None) -> None:
        self._store: Any = store
        self._path: Any = getattr(store, "path", None)
        self.name = str(self._path or type(store).__name__)
        self._schema = getattr(store, "schema", None)
        device = getattr(store, "device", None)
        is_host_store = device in (None, "cpu")
        self._can_reopen = self._path is not None and not getattr(store, "writable", True) and is_host_store
        # Values without a schema are lists of bytes, also of a store on a GPU.
        self._is_on_host = is_host_store or self._schema is None
        self.dtypes = {} if self._schema is None else {field.name: field.dtype for field in self._schema.fields}
        self._options: dict[str, Any] = {}  # of get_many and get_async
        if fields is not None:
            if self._schema is None:
                raise errors.ArgumentError(f"{self.name} has no fields: leave columns= out", name="columns")
            self._options["fields"] = self._schema.check_names(fields)
            if not self._options["fields"]:
                raise errors.ArgumentError(f"columns= is empty: name some of {list(self.dtypes)}", name="columns")
            self.dtypes = {name: self.dtypes[name] for name in self._options["fields"]}
        self.names = list(self.dtypes) or [VALUE]

    @property
    def store(self) -> Any:
        """The store, in this process."""
        if self._store is None:
            self._store = open_store(self._path, mode="r")
        return self._store

    def keys(self) -> Any:
        """Return all keys that the store has now, in the order of `Store.keys_array`."""
        store = self.store
        if not hasattr(store, "keys_array"):
            raise errors.ArgumentError(f"{store!r} does not list its keys: pass keys=", name="keys")
        return store.ordered() if hasattr(store, "ordered") else store.keys_array()

    def read(self, keys: Keys) -> Any:
        """Return records: a dict of arrays, or a list of bytes for a store without a schema."""
        batch = self._checked(keys, self.store.get_many(_as_argument(keys), **self._options))
        if not isinstance(batch, dict):
            return batch
        # If there are several fields, they are views of whole records. Sums of such views would round in another order
        # than sums of contiguous arrays.
        return {
            name: field if isinstance(field, Ragged) else np.ascontiguousarray(field) for name, field in batch.items()
        }

    def start(self, keys: Keys) -> Any:
        """Start to read records; return a future whose ``wait()`` returns them, on the store's device."""
        if self._is_on_host:
            return HostFuture(lambda: self.read(keys))
        future = self.store.get_async(_as_argument(keys), **self._options)
        return Waiting(lambda: self._checked(keys, future.wait()))

    def _checked(self, keys: Keys, result: tuple[Any, Any]) -> Any:
        """Return a batch, or raise KeyMissingError if a record is missing."""
        batch, found = result
        absent = np.flatnonzero(~np.asarray(found, dtype=bool))
        if absent.size:
            first = int(absent[0])
            raise errors.KeyMissingError(
                f"{self.name} does not have key {keys.row(first)!r} ({absent.size} of a batch of {keys.size} are"
                " missing): was it deleted after the dataset or the loader was made? Make it again, or pass keys= that"
                " the store has",
                key=keys.raw(first),
            )
        return batch

    def close(self) -> None:
        """Do nothing: the store belongs to its opener."""

    def __getstate__(self) -> dict[str, Any]:
        if not self._can_reopen:
            raise errors.ForkError(
                f"a dataset of {self.name} cannot be sent to another process, because its store is open for writing or"
                " on a GPU: open it with mode='r' and without a device, or load batches in this process (num_workers=0)"
            )
        return {**self.__dict__, "_store": None}


class JoinedReader:
    """Records of several readers with the same keys: the fields of all.

    Parameters
    ----------
    readers : list of RowReader and StoreReader
        The first one determines the keys.
    """

    def __init__(self, readers: list[RowReader | StoreReader]) -> None:
        self._readers = readers
        self.name = readers[0].name
        self.names = [name for reader in readers for name in reader.names]
        for name in self.names:
            if self.names.count(name) > 1:
                raise errors.ArgumentError(f"field {name!r} is in two parts of join=: rename it in one", name="join")
        self.dtypes = {name: dtype for reader in readers for name, dtype in reader.dtypes.items()}

    @property
    def store(self) -> Any:
        """The first store, or None."""
        return next((reader.store for reader in self._readers if isinstance(reader, StoreReader)), None)

    def keys(self) -> Any:
        """Return all keys of the first reader."""
        return self._readers[0].keys()

    def require(self, keys: Keys | KeyRange) -> None:
        """Raise KeyMissingError if arrays or tables lack a row for a key; stores are checked when they are read."""
        for reader in self._readers:
            if isinstance(reader, RowReader):
                reader.require(keys)

    def read(self, keys: Keys) -> dict[str, Any]:
        """Return the fields of all records."""
        return self._merged([reader.read(keys) for reader in self._readers])

    def start(self, keys: Keys) -> Waiting:
        """Start to read records; return a future whose ``wait()`` returns them."""
        futures = [reader.start(keys) for reader in self._readers]
        return Waiting(lambda: self._merged([future.wait() for future in futures]))

    @staticmethod
    def _merged(parts: list[Any]) -> dict[str, Any]:
        batches = [part if isinstance(part, dict) else {VALUE: part} for part in parts]
        return {name: rows for batch in batches for name, rows in batch.items()}

    def close(self) -> None:
        """Close the files that this process has open (idempotent)."""
        for reader in self._readers:
            reader.close()


class Waiting:
    """A future whose ``wait()`` is a function."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        self.wait = wait


def _as_argument(keys: Keys) -> Any:
    """Return keys as an argument of `Store.get_many`."""
    return keys.words if keys.lengths is None else keys.arrays()


def rows_of(indices: Any, size: int, name: str) -> NDArray[np.int64]:
    """Return indices of a dataset of `size` rows as row numbers; negative numbers count from the end.

    Raises
    ------
    ArgumentError, IndexRangeError
    """
    if not isinstance(indices, np.ndarray) or indices.dtype.kind not in "iu" or indices.ndim != 1:
        if not isinstance(indices, Iterable):
            raise _not_an_index(indices)
        indices = np.array([_as_index(index) for index in indices], object)
    outside = np.flatnonzero((indices < -size) | (indices >= size))
    if outside.size:
        index = int(indices[outside[0]])
        text = f"index {index} of a dataset of {size} records"
        raise errors.IndexRangeError(text, array=name, index=index, size=size)
    rows: NDArray[np.int64] = indices.astype(np.int64)
    rows[rows < 0] += size
    return rows


def _as_index(index: Any) -> int:
    try:
        if not isinstance(index, bool):  # True would be row 1
            return operator.index(index)
    except TypeError:
        pass
    raise _not_an_index(index)


def _not_an_index(index: Any) -> errors.ArgumentError:
    hint = ", np.flatnonzero(mask) of a mask" if isinstance(index, bool | np.bool_) else ""
    return errors.ArgumentError(
        f"index {index!r:.60} of a dataset: pass a whole number, or a list of them to __getitems__(){hint}",
        name="index",
    )
