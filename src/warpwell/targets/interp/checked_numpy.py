"""`CheckedNumPy`: NumPy arrays of a launch with bounds checks, in interpreted device code."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ... import errors


def out_of_range(kernel: str, name: str, index: int, extent: int) -> errors.IndexRangeError:
    """Return the exception for an index of an argument."""
    return errors.IndexRangeError(
        f"kernel {kernel!r} used index {index} of its argument {name!r} in a dimension of size {extent}: compare the "
        "index with the size first",
        array=name,
        kernel=kernel,
        index=index,
        size=extent,
    )


class CheckedNumPy(np.ndarray):
    """An array whose errors name kernel and argument if an index is out of range. Its rows are such arrays, too."""

    origin: tuple[str, str] | None = None

    def __array_finalize__(self, source: Any) -> None:
        self.origin = getattr(source, "origin", None)

    def __getitem__(self, index: Any) -> Any:
        return self._try(super().__getitem__, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._try(super().__setitem__, index, value)

    def _try(self, operation: Callable[..., Any], *args: Any) -> Any:
        try:
            return operation(*args)
        except IndexError as error:
            found = re.search(r"index (-?\d+) is out of bounds for axis \d+ with size (\d+)", str(error))
            if found is None or self.origin is None:
                raise
            raise out_of_range(*self.origin, int(found[1]), int(found[2])) from None
