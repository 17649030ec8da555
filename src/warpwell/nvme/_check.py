"""Import-time check that a dtype has the layout that the specification gives."""

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
