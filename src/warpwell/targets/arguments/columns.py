"""`viewed`: columns of pandas, Polars and Arrow as arguments of kernels, without a copy, for reading.

A column becomes a read-only NumPy array over its own memory, before anything else sees the launch: so all targets, the
scheduler and the pool take it as they take any other NumPy array. Dates and times become their integers. A column
without such an array is refused, and the message names a replacement: an implicit copy could be as large as a table.

No library is imported here. A class says by its module and name whose it is, once for each class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ..signature import parameters

Reader = Callable[[Any], NDArray[Any]]


def viewed(kernel: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """Return a launch's arguments with columns as read-only NumPy arrays.

    Raises
    ------
    ArgumentError
        A column has nulls, several chunks, or items that do not begin at multiples of their size.
    DTypeError
        The items of a column are no numbers of whole bytes, or there are several columns.
    """
    for value in args:
        kind = type(value)
        if kind not in _readers:
            _readers[kind] = _reader_of(kind)
        if _readers[kind] is not None:
            return tuple([_view(kernel, k, argument) for k, argument in enumerate(args)])
    return tuple(args)


_readers: dict[type, Reader | None] = {}


def _reader_of(kind: type) -> Reader | None:
    for base in kind.__mro__:
        reader = _READERS.get((base.__module__.partition(".")[0], base.__name__))
        if reader is not None:
            return reader
    return None


def _view(kernel: Any, number: int, value: Any) -> Any:
    kind = type(value)
    if kind not in _readers:
        _readers[kind] = _reader_of(kind)
    reader = _readers[kind]
    if reader is None:
        return value
    try:
        array = reader(value).view()
    except _NoView as reason:
        names = _names(kernel)
        name = names[number] if number < len(names) else number + 1
        library = kind.__module__.partition(".")[0]
        column = f"argument {name!r} of kernel {kernel.__name__!r} ({library} {kind.__name__})"
        raise reason.error(f"{column} {reason}") from None
    array.flags.writeable = False
    return array


def _names(kernel: Any) -> list[str]:
    if kernel.function is kernel:  # CUDA C++
        return [p.name for p in kernel.parameters]
    return parameters(kernel)


class _NoView(Exception):
    """Why a column has no array over its memory, and what to write: "has 2 chunks, ..."."""

    def __init__(self, text: str, error: type[errors.WarpwellError] = errors.ArgumentError) -> None:
        super().__init__(text)
        self.error = error


class _Advice(NamedTuple):
    """Expressions of a library that messages recommend."""

    fill: str
    fill_time: str
    join: str
    widen: str
    codes: str
    convert: str
    copy: str


_ARROW = _Advice(
    "array.fill_null(0)",
    "array.fill_null(0)",
    "array.combine_chunks()",
    'array.cast("uint8")',
    "array.dictionary_encode().indices",
    'array.cast("float64")',
    "numpy.array(array)",
)
_POLARS = _Advice(
    "series.fill_null(0)",
    "series.to_physical().fill_null(0)",
    "series.rechunk()",
    "series.cast(polars.UInt8)",
    "series.cast(polars.Categorical).to_physical()",
    "series.cast(polars.Float64)",
    "numpy.array(series)",
)
_PANDAS = _Advice(
    "series.fillna(0)",
    "series.dropna()",
    "series.to_numpy()",
    'series.astype("uint8")',
    'series.astype("category").cat.codes',
    'series.astype("float64")',
    "series.to_numpy(copy=True)",
)


def _no_nulls(count: int, advice: _Advice, *, time: bool = False) -> None:
    if count:
        raise _NoView(
            f"has {count} null{'s' * (count != 1)}, which kernels cannot tell from values: pass "
            f"{advice.fill_time if time else advice.fill}"
        )


def _one_chunk(count: int, advice: _Advice) -> None:
    if count > 1:
        raise _NoView(f"has {count} chunks, and kernels take one piece of memory: pass {advice.join}, a copy")


def _aligned(address: int, dtype: np.dtype[Any], advice: _Advice) -> None:
    if address % dtype.itemsize:
        raise _NoView(
            f"has items of {dtype.itemsize} bytes that are not {dtype.itemsize}-byte aligned: pass {advice.copy}"
        )


def _no_numbers(name: str, advice: _Advice) -> _NoView:
    """Return the reason for a type whose items are no numbers of whole bytes."""
    kind = name.lower()
    if kind.startswith("bool"):
        return _NoView(f"has booleans, eight a byte: pass {advice.widen}", errors.DTypeError)
    if kind.startswith(("str", "large_string", "utf8")) and not kind.startswith("struct"):
        return _NoView(f"has text, which kernels do not take: pass {advice.codes}", errors.DTypeError)
    if kind.startswith("decimal"):
        return _NoView(f"has items of {name}: pass {advice.convert}, which rounds", errors.DTypeError)
    return _NoView(f"has items of {name}, and kernels take numbers: make numbers of them first", errors.DTypeError)


def _several(frame: Any) -> NDArray[Any]:
    """Refuse a table."""
    collected = ".collect()" if type(frame).__name__ == "LazyFrame" else ""
    raise _NoView(f'has columns: pass each as an argument of its own, as table{collected}["name"]', errors.DTypeError)


# -- Arrow -------------------------------------------------------------------------------------------------------------

_ARROW_TYPES = {
    "int8": "i1", "int16": "i2", "int32": "i4", "int64": "i8", "uint8": "u1", "uint16": "u2", "uint32": "u4",
    "uint64": "u8", "halffloat": "f2", "float": "f4", "double": "f8", "date32": "i4", "date64": "i8", "time32": "i4",
    "time64": "i8", "timestamp": "i8", "duration": "i8",
}  # fmt: skip
"""NumPy types of items in memory, by the names of Arrow types."""


def _arrow(column: Any, advice: _Advice = _ARROW) -> NDArray[Any]:
    """Return the items of a pyarrow.Array or ChunkedArray."""
    kind = column.type
    lists = str(kind).startswith("fixed_size_list")
    dtype = None if lists else _arrow_dtype(kind, advice)
    _no_nulls(column.null_count, advice)
    if hasattr(column, "num_chunks"):
        _one_chunk(column.num_chunks, advice)
        column = column.chunk(0) if column.num_chunks else column.combine_chunks()
    if dtype is None:
        return _arrow(column.flatten(), advice).reshape(len(column), kind.list_size, *_inner(kind.value_type))
    if not len(column):
        return np.empty(0, dtype)
    data = column.buffers()[1]
    if not data.is_cpu:
        raise _NoView("is in GPU memory: pass cupy.from_dlpack(array)")
    first = column.offset * dtype.itemsize
    _aligned(data.address + first, dtype, advice)
    if first + len(column) * dtype.itemsize > data.size:
        raise _NoView("ends before its last item: array.validate() reports the damage")
    return np.frombuffer(data, dtype, len(column), first)


def _inner(kind: Any) -> tuple[int, ...]:
    """Return the shape of an item that is a list of a fixed size, ()."""
    return (kind.list_size, *_inner(kind.value_type)) if str(kind).startswith("fixed_size_list") else ()


def _arrow_dtype(kind: Any, advice: _Advice) -> np.dtype[Any]:
    name = str(kind)
    stored = _ARROW_TYPES.get(name.partition("[")[0])
    if stored is not None:
        return np.dtype(stored)
    if hasattr(kind, "storage_type"):
        raise _NoView(f"has items of {name}: pass array.storage", errors.DTypeError)
    if name.startswith("dictionary"):
        raise _NoView("is dictionary-encoded: pass array.indices, or array.dictionary_decode()", errors.DTypeError)
    raise _no_numbers(name, advice)


# -- Polars ------------------------------------------------------------------------------------------------------------


def _polars(series: Any) -> NDArray[Any]:
    dtype = series.dtype
    name = str(dtype)
    lists, time = name.startswith("Array("), dtype.is_temporal()
    if name.startswith(("Categorical", "Enum")):
        raise _NoView("has categories: pass their codes, series.to_physical()", errors.DTypeError)
    if not (lists or time or dtype.is_integer() or dtype.is_float()) or name.endswith("128"):
        raise _no_numbers(name, _POLARS)
    _no_nulls(series.null_count(), _POLARS, time=time)
    _one_chunk(series.n_chunks(), _POLARS)
    if lists:
        return _polars(series.explode()).reshape(len(series), *dtype.shape)
    # to_physical takes 50 us, which numbers need not
    array: NDArray[Any] = (series.to_physical() if time else series).to_numpy(allow_copy=False)
    _aligned(int(array.ctypes.data), array.dtype, _POLARS)
    return array


# -- pandas ------------------------------------------------------------------------------------------------------------


def _pandas(series: Any) -> NDArray[Any]:
    dtype = series.dtype
    if hasattr(dtype, "pyarrow_dtype"):
        return _arrow(series.array.__arrow_array__(), _PANDAS)
    name = str(dtype)
    if name == "category":
        raise _NoView("has categories: pass their codes, series.cat.codes", errors.DTypeError)
    if name.startswith(("datetime64", "timedelta64")):
        _no_nulls(series.hasnans and int(series.isna().sum()), _PANDAS, time=True)
        times: NDArray[Any] = series.array.view("i8")
        return times
    stored = dtype if isinstance(dtype, np.dtype) else getattr(dtype, "numpy_dtype", None)
    if stored is None or stored.kind not in "biufc":
        raise _no_numbers("text or other objects" if name == "object" else name, _PANDAS)
    if stored is dtype:
        return np.asarray(series.to_numpy())
    _no_nulls(series.hasnans and int(series.isna().sum()), _PANDAS)
    return np.asarray(series.to_numpy(stored, copy=False))


_READERS: dict[tuple[str, str], Reader] = {
    ("pyarrow", "Array"): _arrow,
    ("pyarrow", "ChunkedArray"): _arrow,
    ("polars", "Series"): _polars,
    ("pandas", "Series"): _pandas,
    ("pyarrow", "Table"): _several,
    ("pyarrow", "RecordBatch"): _several,
    ("polars", "DataFrame"): _several,
    ("polars", "LazyFrame"): _several,
    ("pandas", "DataFrame"): _several,
}
"""Readers by the package and the name of a class or one of its bases."""
