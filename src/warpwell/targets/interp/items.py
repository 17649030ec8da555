"""Items of 1, 2, 4 or 8 bytes as the ``interp`` target reads and writes them: bits to scalar and back."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np


class ItemCodec:
    """Turns the bits of an item into the scalar that device code computes with, and back.

    Parameters
    ----------
    dtype : numpy.dtype or type
        Fixed-size little-endian type of 1, 2, 4 or 8 bytes; another is a TypeError.

    Notes
    -----
    Integers and booleans become Python's (device code computes in int64), float64 becomes a Python float, and
    all others a NumPy scalar, so that float32 arithmetic rounds as it does in compiled code.
    """

    __slots__ = ("_plain", "dtype", "mask", "sign", "size")

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)
        self.size: int = self.dtype.itemsize
        if self.size not in (1, 2, 4, 8):
            raise TypeError(
                f"items of {self.dtype} have {self.size} bytes; device accesses take 1, 2, 4 or 8"
            )
        self.mask: int = (1 << 8 * self.size) - 1
        self.sign = 1 << (8 * self.size - 1) if self.dtype.kind == "i" else 0
        self._plain = self.dtype.kind in "iu"

    def decode(self, bits: int) -> Any:
        """Scalar of the unsigned number `bits`."""
        if self._plain:
            return (bits ^ self.sign) - self.sign
        value: Any = np.frombuffer(bits.to_bytes(self.size, "little"), self.dtype)[0]
        return value.item() if self.dtype.kind == "b" or self.dtype == np.float64 else value

    def encode(self, value: Any) -> int:
        """Bits of `value`, as an unsigned number; integers wrap."""
        if self._plain:
            return int(value) & self.mask
        with np.errstate(all="ignore"):  # compiled code rounds to infinity without a word
            data: bytes = np.asarray(value).astype(self.dtype).tobytes()
        return int.from_bytes(data, "little")


@lru_cache(maxsize=256)
def item_codec(dtype: Any) -> ItemCodec:
    """The codec of `dtype`."""
    return ItemCodec(dtype)
