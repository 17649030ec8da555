"""`source_of`: rows of one array or column, wherever the program's processes are.

A source is pickled as a path, and opens it in each process at the first read: workers share nothing, whether they were
forked or spawned. Rows arrive in host memory, or of arrays on "cuda" in that of the GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .. import errors, table
from .._check import checked_path
from ..array import Array, open_array
from ..array.gather import gather
from ..table import Reads, Taken
from ..table.take import take as take_columns


class Source(Protocol):
    """Rows by their numbers.

    Attributes
    ----------
    rows : int
    shape : tuple of int
        Of a row.
    dtype : numpy.dtype
        That of an `Array`, which says whether uint16 items are the bits of bfloat16.
    """

    rows: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def begin(self, rows: NDArray[np.int64]) -> Callable[[], Any]:
        """Begin to read rows, whose numbers are in range; return what waits for them and returns a new array.

        It is a NumPy array, or a `DeviceArray`.
        """

    def close(self) -> None:
        """Close what `take` has opened in this process, and would open again."""


def source_of(value: Any, name: str) -> Source:
    """Return the rows of what a user gives.

    Parameters
    ----------
    value : path, (path, dict), ndarray, Array or Column
        A path of a ``.npy`` file, or one with options of `warpwell.open`; an array in memory; an open array, which is
        of use in this process alone; a column of a table.
    name : str
        For messages.

    Raises
    ------
    ArgumentError, DTypeError
        It has no rows of numbers.
    """
    if isinstance(value, np.ndarray):
        return _checked(MemorySource(value), name)
    if isinstance(value, Array):
        return _checked(OpenSource(value), name)
    if isinstance(value, table.Column):
        return ColumnSource(value, name)
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):
        return _checked(FileSource(*value), name)
    if isinstance(value, str | os.PathLike):
        return _checked(FileSource(value, {}), name)
    raise errors.ArgumentError(
        f"{name!r} is {value!r:.60}: give the path of a .npy file, (path, options of ww.open), a column of a table, "
        "or an array",
        name=name,
    )


def _checked(source: Any, name: str) -> Source:
    if not source.whole:
        raise errors.ArgumentError(f"{name!r} has no dimension, so it has no rows: give an array of rows", name=name)
    if source.dtype.hasobject or source.dtype.kind not in "biufcV":
        raise errors.DTypeError(f"{name!r} has items of {source.dtype}: give numbers or records")
    found: Source = source
    return found


class MemorySource:
    """Rows of an array in memory; workers have copies."""

    def __init__(self, items: NDArray[Any]) -> None:
        self._items = items
        self.whole = items.shape
        self.rows = len(items) if items.ndim else 0
        self.shape = items.shape[1:]
        self.dtype = items.dtype

    def begin(self, rows: NDArray[np.int64]) -> Callable[[], NDArray[Any]]:
        """Read rows; see `Source`."""
        return lambda: np.take(self._items, rows, axis=0)

    def close(self) -> None:
        """Do nothing; see `Source`."""


class OpenSource:
    """Rows of an array that is open."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self._pid = os.getpid()
        self.whole = array.shape
        self.rows = int(array.shape[0]) if array.shape else 0
        self.shape = tuple(array.shape[1:])
        self.dtype = np.dtype(array.dtype)

    def begin(self, rows: NDArray[np.int64]) -> Callable[[], NDArray[Any]]:
        """Read rows; see `Source`."""
        if os.getpid() != self._pid:
            self._refuse()
        return _gathered(self._array, rows)

    def close(self) -> None:
        """Do nothing: who opened the array closes it."""

    def __reduce__(self) -> Any:
        self._refuse()

    def _refuse(self) -> None:
        raise errors.ForkError(
            f"array {self._array.name!r} is open in another process: give its path, which a worker opens again, or use "
            "num_workers=0"
        )


class FileSource:
    """Rows of a file that `warpwell.open` opens."""

    def __init__(self, path: str | os.PathLike[str], options: dict[str, Any]) -> None:
        self.path = os.path.abspath(checked_path(path))
        self._options = {"device": "cpu", **options}  # what workers can use, which have no GPU where they were forked
        self._opened: tuple[int, Array] | None = None
        array = self._array()
        self.whole = array.shape
        self.rows = int(array.shape[0]) if array.shape else 0
        self.shape = tuple(array.shape[1:])
        self.dtype = np.dtype(array.dtype)

    def begin(self, rows: NDArray[np.int64]) -> Callable[[], NDArray[Any]]:
        """Read rows; see `Source`."""
        return _gathered(self._array(), rows)

    def close(self) -> None:
        """Close the file; see `Source`."""
        opened, self._opened = self._opened, None
        if opened is not None and opened[0] == os.getpid():
            opened[1].close()

    def _array(self) -> Array:
        pid = os.getpid()
        opened = self._opened
        if opened is None or opened[0] != pid:
            opened = self._opened = pid, open_array(self.path, "r", **self._options)
        return opened[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}


class ColumnSource:
    """Rows of a column of a table: numbers, truth values, lists of one length; dates and times as their integers."""

    def __init__(self, column: table.Column, name: str) -> None:
        self.path, self._column = column.path, column.name
        self._opened: tuple[int, table.Table] | None = None
        self.rows = column.rows
        if column.nulls:
            raise errors.ArgumentError(
                f"{name!r} has {column.nulls} nulls, for which arrays of numbers have no place: fill them before the "
                "table is written, or take other columns",
                name=name,
            )
        if not self.rows:
            raise errors.ArgumentError(f"{name!r} is a column of a table without rows", name=name)
        row = self._read([column], np.zeros(1, np.int64))[column.name]
        if row.dtype.kind not in "biuf" or str(column.type).startswith("fixed_size_binary"):
            raise errors.DTypeError(
                f"{name!r} is a column of {column.type}: rows are numbers or lists of one length of them; convert it "
                "before the table is written, or take other columns"
            )
        self.shape, self.dtype = row.shape[1:], row.dtype

    def begin(self, rows: NDArray[np.int64]) -> Callable[[], NDArray[Any]]:
        """Read rows; see `Source`."""
        return lambda: self.together([self], rows)[0]

    @staticmethod
    def together(sources: Sequence[ColumnSource], rows: NDArray[np.int64]) -> list[NDArray[Any]]:
        """Return rows of columns of one table, of which all are read at once."""
        opened = sources[0]._table()
        once, places = np.unique(rows, return_inverse=True)
        read = ColumnSource._read([opened[name] for name in dict.fromkeys(one._column for one in sources)], once)
        return [read[one._column][places] for one in sources]

    def _table(self) -> table.Table:
        pid = os.getpid()
        opened = self._opened
        if opened is None or opened[0] != pid:
            opened = self._opened = pid, table.open(self.path, device="cpu")
        return opened[1]

    @staticmethod
    def _read(columns: Sequence[table.Column], rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        found = Taken(take_columns(columns, rows, Reads())).numpy()
        return {name: one.view(np.int64) if one.dtype.kind in "mM" else one for name, one in found.items()}

    def close(self) -> None:
        """Close the table; see `Source`."""
        opened, self._opened = self._opened, None
        if opened is not None and opened[0] == os.getpid():
            opened[1].close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}


def begin_all(sources: Mapping[str, Source], rows: NDArray[np.int64]) -> dict[str, Callable[[], NDArray[Any]]]:
    """Begin to read rows of several sources, those of one table together; see `Source.begin`."""
    tables: dict[str, list[str]] = {}
    begun = {}
    for name, source in sources.items():
        if isinstance(source, ColumnSource):
            tables.setdefault(source.path, []).append(name)
        else:
            begun[name] = source.begin(rows)
    for names in tables.values():
        members = [one for one in map(sources.get, names) if isinstance(one, ColumnSource)]
        read = _once(partial(ColumnSource.together, members, rows), len(names))
        begun |= dict(zip(names, read, strict=True))
    return {name: begun[name] for name in sources}


def _once(read: Callable[[], list[NDArray[Any]]], count: int) -> list[Callable[[], NDArray[Any]]]:
    """Return a function for each of what `read` returns, of which the first that is called calls it."""
    found: list[NDArray[Any]] = []

    def one(k: int) -> NDArray[Any]:
        if not found:
            found.extend(read())
        return found[k]

    return [partial(one, k) for k in range(count)]


def _gathered(array: Array, rows: NDArray[np.int64]) -> Callable[[], Any]:
    future = gather(array, rows)
    return future.result
