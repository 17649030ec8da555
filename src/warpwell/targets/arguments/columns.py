"""`viewed`: columns of pandas, Polars and Arrow as arguments of kernels, without a copy, for reading.

A column becomes a read-only NumPy array over its own memory, before the launch is passed on: so all targets, the
scheduler and the pool treat it like any other NumPy array. Dates and times become their integers. A column without such
an array is refused, and the message names a replacement: an implicit copy could be as large as a table.

No library is imported here. The module and the name of a class identify its library; this is checked once per class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ..signature import argument

Reader = Callable[[Any], NDArray[Any]]


def viewed(kernel: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """Return a launch's arguments with columns as read-only NumPy arrays.

    Raises
    ------
    ArgumentError
        A column has nulls, several chunks, or items that do not begin at multiples of their size.
    DTypeError
        The items of a column are not numbers of whole bytes, or there are several columns.
    """
    readers = [_reader_of(type(value)) for value in args]  # type: ignore[arg-type]  # a class is hashable
    if not any(readers):
        return tuple(args)
    return tuple([_view(kernel, k, value, readers[k]) if readers[k] else value for k, value in enumerate(args)])


@functools.cache
def _reader_of(kind: type) -> tuple[str, Reader] | None:
    """Return the library of a class of columns, and its reader; None for other classes."""
    for base in kind.__mro__:
        library = base.__module__.partition(".")[0]
        if (library, base.__name__) in _READERS:
            return library, _READERS[library, base.__name__]
    return None


def _view(kernel: Any, number: int, value: Any, found: Any) -> Any:
    library, reader = found
    try:
        array = reader(value).view()
    except _NoView as reason:
        text = str(reason)
        for key, expressions in _REPLACEMENTS.items():
            text = text.replace(key, expressions[_LIBRARIES.index(library)])
        column = f"{argument(kernel, number)} ({library} {type(value).__name__})"
        raise reason.error(f"{column} {text}") from None
    array.flags.writeable = False
    return array


class _NoView(Exception):
    """The reason why a column has no array over its memory: "has 2 chunks, ...: pass <chunks>".

    A key of `_REPLACEMENTS` stands for the expression of the column's library.
    """

    def __init__(self, text: str, error: type[errors.WarpwellError] = errors.DTypeError) -> None:
        super().__init__(text)
        self.error = error


_LIBRARIES = ("pyarrow", "polars", "pandas")
_REPLACEMENTS = {
    "<values>": ("array.fill_null(0)", "series.fill_null(0)", "series.fillna(0)"),
    "<times>": ("array.fill_null(0)", "series.to_physical().fill_null(0)", "series.dropna()"),
    "<chunks>": ("array.combine_chunks()", "series.rechunk()", "series.to_numpy()"),
    "<bytes>": ('array.cast("uint8")', "series.cast(polars.UInt8)", 'series.astype("uint8")'),
    "<codes>": (
        "array.dictionary_encode().indices",
        "series.cast(polars.Categorical).to_physical()",
        'series.astype("category").cat.codes',
    ),
    "<floats>": ('array.cast("float64")', "series.cast(polars.Float64)", 'series.astype("float64")'),
    "<copy>": ("numpy.array(array)", "numpy.array(series)", "series.to_numpy(copy=True)"),
}
"""Expressions that messages recommend, by library."""


def _check_nulls(count: int, replacement: str = "<values>") -> None:
    if count:
        text = f"has {count} null{'s' * (count != 1)}, which kernels cannot distinguish from values: pass {replacement}"
        raise _NoView(text, errors.ArgumentError)


def _check_chunks(count: int) -> None:
    if count > 1:
        text = f"has {count} chunks, but kernels take one piece of memory: pass <chunks>, a copy"
        raise _NoView(text, errors.ArgumentError)


def _check_alignment(address: int, nbytes: int) -> None:
    if address % nbytes:
        text = f"has items of {nbytes} bytes that are not {nbytes}-byte aligned: pass <copy>"
        raise _NoView(text, errors.ArgumentError)


def _no_numbers(name: str) -> _NoView:
    """Return the reason for a type whose items are not numbers of whole bytes."""
    kind = name.lower()
    if kind.startswith("bool"):
        return _NoView("has booleans, eight a byte: pass <bytes>")
    if kind.startswith(("str", "large_string", "utf8")) and not kind.startswith("struct"):
        return _NoView("has text, which kernels do not take: pass <codes>")
    if kind.startswith("decimal"):
        return _NoView(f"has items of {name}: pass <floats>, which rounds")
    return _NoView(f"has items of {name}, but kernels take numbers: convert them first")


def _refuse_table(frame: Any) -> NDArray[Any]:
    collected = ".collect()" if type(frame).__name__ == "LazyFrame" else ""
    raise _NoView(f'has columns: pass each as an argument of its own, as table{collected}["name"]')


# -- Arrow -------------------------------------------------------------------------------------------------------------

_ARROW_TYPES = {
    "int8": "i1", "int16": "i2", "int32": "i4", "int64": "i8", "uint8": "u1", "uint16": "u2", "uint32": "u4",
    "uint64": "u8", "halffloat": "f2", "float": "f4", "double": "f8", "date32": "i4", "date64": "i8", "time32": "i4",
    "time64": "i8", "timestamp": "i8", "duration": "i8",
}  # fmt: skip
"""NumPy types of items in memory, by the names of Arrow types."""


def _arrow(column: Any) -> NDArray[Any]:
    """Return the items of a pyarrow.Array or ChunkedArray."""
    kind = column.type
    lists = str(kind).startswith("fixed_size_list")
    dtype = None if lists else _arrow_dtype(kind)
    _check_nulls(column.null_count)
    if hasattr(column, "num_chunks"):
        _check_chunks(column.num_chunks)
        column = column.chunk(0) if column.num_chunks else column.combine_chunks()
    if dtype is None:
        items = _arrow(column.flatten())
        return items.reshape(len(column), kind.list_size, *items.shape[1:])
    if not len(column):
        return np.empty(0, dtype)
    data = column.buffers()[1]
    if not data.is_cpu:
        raise _NoView("is in GPU memory: pass cupy.from_dlpack(array)", errors.ArgumentError)
    first = column.offset * dtype.itemsize
    _check_alignment(data.address + first, dtype.itemsize)
    if first + len(column) * dtype.itemsize > data.size:
        raise _NoView("ends before its last item: array.validate() reports the damage", errors.ArgumentError)
    return np.frombuffer(data, dtype, len(column), first)


def _arrow_dtype(kind: Any) -> np.dtype[Any]:
    name = str(kind)
    stored = _ARROW_TYPES.get(name.partition("[")[0])
    if stored is not None:
        return np.dtype(stored)
    if hasattr(kind, "storage_type"):
        raise _NoView(f"has items of {name}: pass array.storage")
    if name.startswith("dictionary"):
        raise _NoView("is dictionary-encoded: pass array.indices, or array.dictionary_decode()")
    raise _no_numbers(name)


# -- Polars ------------------------------------------------------------------------------------------------------------


def _polars(series: Any) -> NDArray[Any]:
    dtype = series.dtype
    name = str(dtype)
    lists, time = name.startswith("Array("), dtype.is_temporal()
    if name.startswith(("Categorical", "Enum")):
        raise _NoView("has categories: pass their codes, series.to_physical()")
    if not (lists or time or dtype.is_integer() or dtype.is_float()) or name.endswith("128"):
        raise _no_numbers(name)
    _check_nulls(series.null_count(), "<times>" if time else "<values>")
    _check_chunks(series.n_chunks())
    if lists:
        return _polars(series.explode()).reshape(len(series), *dtype.shape)
    # to_physical takes 50 us, which numbers need not
    array: NDArray[Any] = (series.to_physical() if time else series).to_numpy(allow_copy=False)
    _check_alignment(int(array.ctypes.data), array.dtype.itemsize)
    return array


# -- pandas ------------------------------------------------------------------------------------------------------------


def _pandas(series: Any) -> NDArray[Any]:
    dtype = series.dtype
    if hasattr(dtype, "pyarrow_dtype"):
        return _arrow(series.array.__arrow_array__())
    name = str(dtype)
    if name == "category":
        raise _NoView("has categories: pass their codes, series.cat.codes")
    if name.startswith(("datetime64", "timedelta64")):
        _check_nulls(series.hasnans and int(series.isna().sum()), "<times>")
        times: NDArray[Any] = series.array.view("i8")
        return times
    stored = dtype if isinstance(dtype, np.dtype) else getattr(dtype, "numpy_dtype", None)
    if stored is None or stored.kind not in "biufc":
        raise _no_numbers("text or other objects" if name == "object" else name)
    if stored is dtype:
        return np.asarray(series.to_numpy())
    _check_nulls(series.hasnans and int(series.isna().sum()))
    return np.asarray(series.to_numpy(stored, copy=False))


_READERS: dict[tuple[str, str], Reader] = {
    ("pyarrow", "Array"): _arrow,
    ("pyarrow", "ChunkedArray"): _arrow,
    ("polars", "Series"): _polars,
    ("pandas", "Series"): _pandas,
    ("pyarrow", "Table"): _refuse_table,
    ("pyarrow", "RecordBatch"): _refuse_table,
    ("polars", "DataFrame"): _refuse_table,
    ("polars", "LazyFrame"): _refuse_table,
    ("pandas", "DataFrame"): _refuse_table,
}
"""Readers by the package and the name of a class or one of its bases."""
