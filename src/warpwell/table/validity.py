"""`is_valid`: whether a row is not null, asked in a kernel."""

from __future__ import annotations

from typing import Any

from ..targets import device


@device
def is_valid(bits: Any, row: int) -> int:
    """Return 1 if row `row` is not null, else 0. Each thread calls it alone; it orders nothing.

    Parameters
    ----------
    bits : array of uint8
        `Column.valid`, or ``run.valid.array()``, with rows counted from the run's first.
    row : int
    """
    found: int = (bits[row >> 3] >> (row & 7)) & 1
    return found
