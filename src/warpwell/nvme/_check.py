"""Import-time checks that a dtype has the layout that the specification gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def require_layout(dtype: np.dtype[Any], size: int, offsets: Mapping[str, int]) -> None:
    """Raise ImportError unless `dtype` has `size` bytes and exactly the fields of `offsets`, there.

    Not an assertion: python -O must not switch it off.
    """
    actual = {name: field[1] for name, field in dtype.fields.items()} if dtype.fields else {}
    if dtype.itemsize != size or actual != dict(offsets):
        raise ImportError(
            f"a wire struct has {dtype.itemsize} bytes and offsets {actual}, but the specification says {size} "
            f"bytes and {dict(offsets)}"
        )


def table(*fields: tuple[str, str, int, int], size: int) -> np.dtype[Any]:
    """Return the dtype of some fields of a struct of `size` bytes.

    A field is its name, its format, and its first and last byte as the specification's table has them. Raise
    ImportError where they contradict each other.
    """
    end = -1
    for name, kind, first, last in fields:
        if first <= end or np.dtype(kind).itemsize != last - first + 1 or last >= size:
            raise ImportError(f"field {name!r} of a wire struct is not bytes {first} to {last} of {size}")
        end = last
    names, formats, offsets = [f[0] for f in fields], [f[1] for f in fields], [f[2] for f in fields]
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size})
