"""Headers of ``.npy`` files: where the data starts, dtype and shape, checked against the file."""

from __future__ import annotations

import math
import os
import pathlib
import tokenize
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from .. import errors


@dataclass(frozen=True)
class Header:
    """Layout of an array in a file; `origin` is the byte where item 0 starts."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    origin: int

    @property
    def nbytes(self) -> int:
        """Bytes of the items."""
        return math.prod(self.shape) * self.dtype.itemsize


def check_extents(shape: tuple[int, ...], dtype: np.dtype[Any], name: str) -> None:
    """Check that the strides of an array are numbers for device code, those of an empty one too.

    Raises
    ------
    ArgumentError
        The extents that are not 0, and the bytes of an item, multiply to 2^63 or more.
    """
    if math.prod(n for n in shape if n) * dtype.itemsize >= 1 << 63:
        raise errors.ArgumentError(
            f"{name}: shape {shape} of {dtype} is too large: it has 2^63 bytes or more (extents of 0 not counted)",
            name="shape",
        )


def is_npy(path: pathlib.Path) -> bool:
    """Tell whether a file begins as ``.npy`` files do."""
    with path.open("rb") as file:
        return file.read(len(np.lib.format.MAGIC_PREFIX)) == np.lib.format.MAGIC_PREFIX


def read_header(
    file: IO[bytes], name: str, advice: str = "write it with numpy.save"
) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Read the header of a ``.npy`` file, up to its data; return shape and dtype, which may be any.

    `name` is what messages call the file, `advice` what they say to do if it is none.

    Raises
    ------
    FormatError
        Not a ``.npy`` file, or Fortran order.
    """
    try:
        version = np.lib.format.read_magic(file)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }.get(version)
        if read is None:
            raise ValueError(f"format version {version} is unknown")
        shape, fortran, dtype = read(file)
    except (ValueError, tokenize.TokenError, SyntaxError, MemoryError, RecursionError) as error:
        # numpy lets what its parsers raise through where a header is no literal at all
        raise errors.FormatError(f"{name} is not a .npy file ({error}): {advice}", path=name) from None
    if fortran and len(shape) > 1:
        raise errors.FormatError(
            f"{name} is in Fortran order: save numpy.ascontiguousarray(array) instead", path=name
        )
    return tuple(int(n) for n in shape), dtype


def read_npy(path: pathlib.Path) -> Header:
    """Read and check the header of a ``.npy`` file.

    Raises
    ------
    FormatError
        Not a ``.npy`` file, Fortran order, shorter than its header promises, or of a shape that is too large.
    DTypeError
        A dtype without a fixed size, or big-endian.
    """
    with path.open("rb") as file:
        shape, dtype = read_header(file, str(path), "save it with numpy.save, or pass dtype= for a raw file")
        origin = file.tell()
        size = os.fstat(file.fileno()).st_size
    header = Header(check_dtype(dtype, str(path)), shape, origin)
    try:
        check_extents(header.shape, header.dtype, str(path))
    except errors.ArgumentError as error:
        raise errors.FormatError(str(error), path=str(path)) from None
    if size != origin + header.nbytes:
        kind = "truncated" if size < origin + header.nbytes else "longer than its header says"
        raise errors.FormatError(
            f"{path} is {kind}: {size} bytes where {origin + header.nbytes} are expected for shape "
            f"{header.shape} of {header.dtype}: write it again",
            path=str(path),
        )
    return header


def check_dtype(dtype: Any, name: str) -> np.dtype[Any]:
    """Return a dtype that arrays may have: fixed size, little-endian.

    Raises
    ------
    DTypeError
    """
    try:
        checked: np.dtype[Any] = np.dtype(dtype)
    except TypeError as error:
        raise errors.DTypeError(f"{name}: {dtype!r} is not a dtype: {error}") from None
    if checked.hasobject or checked.itemsize == 0:
        raise errors.DTypeError(
            f"{name}: items of {checked} have no fixed size: convert them to numbers or fixed-size records"
        )
    if checked.subdtype is not None:
        raise errors.DTypeError(f"{name}: items of {checked} are arrays: pass their dtype, and a longer shape")
    if not _little_endian(checked):
        raise errors.DTypeError(f"{name}: {checked} is big-endian: save array.astype(dtype.newbyteorder('<')) instead")
    return checked


def _little_endian(dtype: np.dtype[Any]) -> bool:
    """Tell whether all numbers in a dtype are, records and arrays within records included."""
    if dtype.subdtype is not None:
        return _little_endian(dtype.subdtype[0])
    if dtype.fields is not None:
        return all(_little_endian(field[0]) for field in dtype.fields.values())
    return bool(dtype.isnative)
