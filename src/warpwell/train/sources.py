"""Rows of one array or column, in each process of a training program.

A source is pickled as a path, and each process opens the file at its first read. So forked and spawned workers share no
state. Rows arrive in host memory; rows of an array on "cuda" arrive in GPU memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .. import errors, table
from .._check import checked_path
from ..array import Array, open_array
from ..array.gather import gather


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
            raise errors.ArgumentError(f"{name!r} is a scalar: give an array that has rows", name=name)
        if self.dtype.hasobject or self.dtype.kind not in "biufcV":
            raise errors.DTypeError(f"{name!r} has items of {self.dtype}: give numbers or records")
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
                f"{name!r} has {column.nulls} nulls, which an array of numbers cannot hold: fill them before the "
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
        """Return rows of several columns of one table, which are read at once."""
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
            f"{name!r} is {value!r:.60}: give the path of a .npy file, (path, options of ww.open), a column of a "
            "table, or an array",
            name=name,
        )
    # A forked worker cannot use a GPU, so files are opened on the CPU by default.
    options = {"mode": "r", "device": "cpu", **options}
    return ArraySource(PerProcess(partial(open_array, os.path.abspath(checked_path(path)), **options)), name)


def read_rows(sources: Mapping[str, Source], rows: NDArray[np.int64]) -> dict[str, Any]:
    """Return rows of several sources, which are read at once: columns of one table together."""
    results = {name: source.start_read(rows) for name, source in sources.items() if isinstance(source, ArraySource)}
    columns = {name: source for name, source in sources.items() if isinstance(source, ColumnSource)}
    arrays: dict[str, Any] = {}
    for path in {source.path for source in columns.values()}:
        of_table = {name: source for name, source in columns.items() if source.path == path}
        arrays.update(zip(of_table, ColumnSource.read_together([*of_table.values()], rows), strict=True))
    return {name: arrays[name] if name in arrays else results[name]() for name in sources}
