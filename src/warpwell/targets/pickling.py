"""`cloudpickle`: functions and kernels as bytes, with what they name."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def cloudpickle() -> Any:
    """Return the package of that name, or the one that Numba brings: devices of this process need no extra."""
    try:
        import cloudpickle as found
    except ImportError:
        from numba import cloudpickle as found
    return found
