"""Items in kernels: values and bits. `float16` and `bfloat16` are float32 there.

A *code* names what is stored: ``dtype.str`` of a NumPy dtype, or "bfloat16", which NumPy lacks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .. import errors
from ..targets import device
from ..targets.primitives import as_bits, bits_as

BFLOAT16 = "bfloat16"
_MARK = "warpwell"
I8, F4, U2 = np.dtype(np.int64), np.dtype(np.float32), np.dtype(np.uint16)


class Item(NamedTuple):
    """How kernels read and write items of a code.

    Attributes
    ----------
    stored : numpy.dtype
        An item as it is loaded and stored, of the same size.
    value : numpy.dtype
        The value that the kernel uses.
    decode : device function
        The bits of an item, in the low end of a word, to its value (thread).
    encode : device function
        A value to the bits of an item, in the low end of a word (thread).
    plain : bool
        Whether the stored item is the value.
    """

    stored: np.dtype[Any]
    value: np.dtype[Any]
    decode: Callable[..., Any]
    encode: Callable[..., Any]
    plain: bool


@device
def float_of_half(h):
    """Return the float32 of a float16's bits (thread); all are exact."""
    sign = (h & 0x8000) << 16
    magnitude = h & 0x7FFF
    if magnitude >= 0x7C00:  # infinite or NaN
        bits = sign | 0x7F800000 | ((magnitude & 0x3FF) << 13)
    elif magnitude >= 0x400:
        bits = sign | ((magnitude << 13) + (112 << 23))
    else:  # a multiple of 2**-24
        bits = sign | as_bits(np.float32(magnitude) * np.float32(2.0**-24), F4)
    return bits_as(bits, F4)


@device
def half_of_float(value):
    """Return the bits of the float16 that is nearest to a float32, ties to even (thread)."""
    bits = as_bits(value, F4) & 0xFFFFFFFF
    sign = (bits >> 16) & 0x8000
    magnitude = bits & 0x7FFFFFFF
    if magnitude > 0x7F800000:  # NaN must not become infinite
        return sign | 0x7C00 | max((magnitude >> 13) & 0x3FF, 1)
    if magnitude >= 0x47800000:  # 65536 and more
        return sign | 0x7C00
    if magnitude >= 0x38800000:  # at least 2**-14; a carry grows the exponent, up to infinite
        magnitude -= 112 << 23
        return sign | ((magnitude + 0xFFF + ((magnitude >> 13) & 1)) >> 13)
    shift = 126 - (magnitude >> 23)  # multiples of 2**-24
    if shift > 24:
        return sign
    mantissa = (magnitude & 0x7FFFFF) | 0x800000
    rounded = mantissa >> shift
    cut = mantissa - (rounded << shift)
    half = 1 << (shift - 1)
    if cut > half or (cut == half and rounded & 1 == 1):
        rounded += 1
    return sign | rounded


@device
def float_of_bfloat(b):
    """Return the float32 of a bfloat16's bits, which are its upper half (thread)."""
    return bits_as((b & 0xFFFF) << 16, F4)


@device
def bfloat_of_float(value):
    """Return the bits of the bfloat16 that is nearest to a float32, ties to even (thread)."""
    bits = as_bits(value, F4) & 0xFFFFFFFF
    if bits & 0x7FFFFFFF > 0x7F800000:  # NaN: make it quiet, so that a cut payload does not become infinite
        return (bits >> 16) | 0x40
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


_HALF = Item(U2, F4, float_of_half, half_of_float, False)
_BFLOAT = Item(U2, F4, float_of_bfloat, bfloat_of_float, False)


@functools.cache
def item_of(code: str) -> Item:
    """Return how kernels read and write items of a code; times are their 64-bit integers.

    Raises
    ------
    DTypeError
        Kernels have no scalar type for the dtype.
    """
    if code == BFLOAT16:
        return _BFLOAT
    dtype = np.dtype(code)
    if dtype.kind == "f" and dtype.itemsize == 2:
        return _HALF
    widest = 16 if dtype.kind == "c" else 8
    if dtype.kind in "mM":
        dtype = I8
    elif dtype.kind not in "biufc" or dtype.itemsize > widest:
        raise errors.DTypeError(
            f"kernels cannot subscript items of {dtype}: name a field of records (a['field'][i]), gather the items on "
            "the host (a[idx]), or store a number dtype"
        )
    dtype = dtype.newbyteorder("=")

    @device
    def decode(bits):
        return bits_as(bits, dtype)

    @device
    def encode(value):
        return as_bits(value, dtype)

    return Item(dtype, dtype, decode, encode, True)


def code_of(dtype: np.dtype[Any]) -> str:
    """Return the code of items of a dtype."""
    if is_bits(dtype) or (dtype.kind == "V" and dtype.name == BFLOAT16):
        return BFLOAT16
    return dtype.str


def bfloat16_dtype() -> np.dtype[Any]:
    """Return the host's dtype of bfloat16: from ml_dtypes if it is installed, else uint16 with a mark."""
    try:
        import ml_dtypes  # optional
    except ImportError:
        return np.dtype(np.uint16, metadata={_MARK: BFLOAT16})
    return np.dtype(ml_dtypes.bfloat16)


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], step: int = 1) -> bool:
    """Return whether items `step` apart are contiguous in C order with these strides."""
    if 0 in shape:
        return True
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent > 1 and stride != step:
            return False
        step *= extent
    return True


def is_bits(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype is the marked uint16, which has the bits of a bfloat16."""
    return dtype.metadata is not None and dtype.metadata.get(_MARK) == BFLOAT16


def on_host(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of NumPy arrays of these items: without the mark, about which `numpy.save` would warn."""
    return U2 if is_bits(dtype) else dtype


def require_bits(dtype: np.dtype[Any], value: Any, name: str) -> None:
    """Raise DTypeError if numbers are to be stored in items that the host sees as bits."""
    if is_bits(dtype) and np.asarray(value).dtype != U2:
        raise errors.DTypeError(
            f"items of array {name!r} are bfloat16, which NumPy lacks: assign their bits as uint16, or install "
            "ml_dtypes before the array is opened, to assign numbers"
        )
