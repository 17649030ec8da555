"""`layout_of`: the buffers of an Arrow type. `is_valid`: reads one of them in kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..targets import device
from . import arrow as pa

FAMILIES = {
    "bool": ("True or False", "is_boolean"),
    "integer": ("an integer", "is_integer"),
    "float": ("a number", "is_floating"),
    "decimal": ("an int or a decimal.Decimal", "is_decimal32 is_decimal64 is_decimal128"),
    "string": ("a string", "is_string is_large_string"),
    "binary": ("bytes", "is_binary is_large_binary is_fixed_size_binary"),
    "date": ("a datetime.date", "is_date"),
    "timestamp": ("a datetime.datetime without a time zone", "is_timestamp"),
    "zoned timestamp": ("a datetime.datetime with a time zone", ""),
    "duration": ("a datetime.timedelta", "is_duration"),
    "time": ("a datetime.time without a time zone", "is_time"),
}
"""For each family of comparable types: its values, as messages name them, and the tests of pyarrow for these types."""
VIEW_BYTES = 16
"""Bytes of an item of ``string_view`` and ``binary_view``."""


@dataclass(frozen=True)
class Layout:
    """How the values of a type are stored.

    Attributes
    ----------
    kind : {"fixed", "bits", "list", "text", "views", "codes", "null", "nested"}
        Items of one size; bits (bool); lists of one length (fixed-size lists of numbers); offsets and bytes; views and
        bytes; codes and a dictionary; nothing; any other type, which pyarrow reads and kernels do not.
    dtype : numpy.dtype or None
        Of the items: of offsets for "text", of codes for "codes".
    inner : tuple of int
        Extents of one row: ``(k,)`` for a list of k items, or for the bytes of fixed-size binary; ``(2,)`` for the
        limbs of a decimal128.
    """

    kind: str
    dtype: np.dtype[Any] | None
    inner: tuple[int, ...] = ()

    def shape(self, rows: int) -> tuple[int, ...]:
        """Return the shape of the first buffer of a number of rows."""
        if self.kind == "bits":
            return (-(-rows // 8),)
        if self.kind == "text":
            return (rows + 1 if rows else 0,)
        return (rows, *self.inner)


NESTED = Layout("nested", None)


def layout_of(kind: Any) -> Layout:
    """Return the layout of a `pyarrow.DataType`."""
    types = pa.types
    kind = storage_of(kind)
    layout = _flat(kind)
    if layout is not None:
        return layout
    if types.is_fixed_size_list(kind):
        items = _flat(storage_of(kind.value_type))
        if items is not None and items.kind == "fixed" and not items.inner and items.dtype is not None:
            return Layout("list", items.dtype, (int(kind.list_size),))
    elif types.is_dictionary(kind):
        values, codes = _flat(storage_of(kind.value_type)), _flat(kind.index_type)
        if values is not None and values.kind != "null" and codes is not None:
            return Layout("codes", codes.dtype)
    return NESTED


def storage_of(kind: Any) -> Any:
    """Return the type in which an extension type is stored, or the type itself."""
    base = pa.BaseExtensionType
    while isinstance(kind, base):
        kind = kind.storage_type
    return kind


def family_of(kind: Any) -> str:
    """Return a key of `FAMILIES`, or "" for a type whose values are not compared."""
    types, kind = pa.types, storage_of(kind)
    if types.is_timestamp(kind) and kind.tz is not None:
        return "zoned timestamp"
    if types.is_fixed_size_binary(kind) and not kind.byte_width:
        return ""
    return next(
        (name for name, (_, tests) in FAMILIES.items() if any(getattr(types, test)(kind) for test in tests.split())),
        "",
    )


def _flat(kind: Any) -> Layout | None:
    """Return the layout of a type that is not nested and not a dictionary."""
    types = pa.types
    if types.is_boolean(kind):
        return Layout("bits", np.dtype(np.uint8))
    if types.is_null(kind):
        return Layout("null", None)
    if types.is_floating(kind):
        return Layout("fixed", np.dtype(f"<f{kind.bit_width // 8}"))
    if types.is_unsigned_integer(kind):
        return Layout("fixed", np.dtype(f"<u{kind.bit_width // 8}"))
    if types.is_integer(kind) or (types.is_temporal(kind) and not types.is_interval(kind)):
        return Layout("fixed", np.dtype(f"<i{kind.bit_width // 8}"))
    if types.is_decimal(kind):
        limbs = kind.bit_width // 64
        return Layout("fixed", np.dtype(f"<i{min(kind.bit_width // 8, 8)}"), (limbs,) if limbs > 1 else ())
    if types.is_fixed_size_binary(kind):
        return Layout("fixed", np.dtype(np.uint8), (int(kind.byte_width),))
    if types.is_string(kind) or types.is_binary(kind):
        return Layout("text", np.dtype("<i4"))
    if types.is_large_string(kind) or types.is_large_binary(kind):
        return Layout("text", np.dtype("<i8"))
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return Layout("views", np.dtype(np.uint8), (VIEW_BYTES,))
    return None


@device
def is_valid(bits: Any, row: int) -> int:
    """Return 1 if row `row` is not null, else 0. Each thread calls it alone; it orders nothing.

    Parameters
    ----------
    bits : array of uint8
        `Column.valid`, or ``run.valid.array()``, with rows counted from the run's first.
    row : int
    """
    bit: int = (bits[row >> 3] >> (row & 7)) & 1
    return bit
