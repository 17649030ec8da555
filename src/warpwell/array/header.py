"""Headers of ``.npy`` files: start of the data, dtype and shape, checked against the file."""

from __future__ import annotations

import io
import math
import os
import pathlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import errors
from .._npy import read_header
from ..drives import BYTES, DATA_AT, Superblock
from ..storage import Medium
from .items import BFLOAT16, bfloat16_dtype


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
    """Check that the strides of an array fit into device code's integers, even for an empty array.

    Raises
    ------
    ArgumentError
        The product of the item's bytes and all extents other than 0 is 2^63 or more.
    """
    if math.prod(n for n in shape if n) * dtype.itemsize >= 1 << 63:
        raise errors.ArgumentError(
            f"{name}: shape {shape} of {dtype} is too large: it has 2^63 bytes or more (extents of 0 not counted)",
            name="shape",
        )


def is_npy(fd: int) -> bool:
    """Return whether an open file begins like a ``.npy`` file."""
    return os.pread(fd, len(np.lib.format.MAGIC_PREFIX), 0) == np.lib.format.MAGIC_PREFIX


def read_npy(path: pathlib.Path, fd: int, bfloat16: bool = False) -> Header:
    """Read and check the header of a ``.npy`` file, open as `fd`; `path` is for messages.

    With `bfloat16`, items of two bytes are bfloat16.

    Raises
    ------
    FormatError
        The file is not a ``.npy`` file, is in Fortran order, is shorter than its header says, or its shape is too
        large.
    DTypeError
        The dtype has no fixed size, or is big-endian.
    """
    file = io.BytesIO(_head(fd))  # the position in the file belongs to all threads that read it
    shape, dtype = read_header(file, str(path), "save it with numpy.save, or pass dtype= for a raw file")
    header = Header(check_dtype(dtype, str(path)), shape, file.tell())
    try:
        check_extents(header.shape, header.dtype, str(path))
    except errors.ArgumentError as error:
        raise errors.FormatError(str(error), path=str(path)) from None
    size, expected = os.fstat(fd).st_size, header.origin + header.nbytes
    if size != expected:
        kind = "truncated" if size < expected else "longer than its header says"
        raise errors.FormatError(
            f"{path} is {kind}: {size} bytes, but {expected} are expected for shape {header.shape} of {header.dtype}: "
            "write it again",
            path=str(path),
        )
    return _as_bfloat16(header, path) if bfloat16 else header


def _head(fd: int) -> bytes:
    """Return the first bytes of a file, with all of its header if it is a ``.npy`` file."""
    raw = os.pread(fd, 4096, 0)
    width = 2 if raw[6:7] == b"\x01" else 4
    nbytes = 8 + width + int.from_bytes(raw[8 : 8 + width], "little")
    # NumPy parses no header that is longer than 10,000 bytes
    return raw if nbytes <= len(raw) else os.pread(fd, min(nbytes, 1 << 20), 0)


def _as_bfloat16(header: Header, path: object) -> Header:
    """Return the header of a file whose items of two bytes are bfloat16."""
    if header.dtype.itemsize != 2 or header.dtype.kind not in "Vu":
        raise errors.DTypeError(f"{path} has items of {header.dtype}, not of bfloat16 (saved as V2): leave dtype= out")
    return Header(bfloat16_dtype(), header.shape, header.origin)


def read_superblock(medium: Medium, *, dtype: Any, shape: Any, writable: bool) -> Header | None:
    """Return the layout of the array on a namespace, or None if it is raw and `dtype` describes it.

    Raises
    ------
    FormatError
        The array is damaged; or the namespace is raw, and `dtype` is missing.
    ReadOnlyError
        The namespace is raw, and is opened for writing.
    ArgumentError
        `dtype` or `shape` is passed for a namespace with an array.
    """
    name = medium.name
    raw = medium.read(0, min(DATA_AT, medium.nbytes)).tobytes()
    found = Superblock.parse(raw[:BYTES], name, medium.nbytes)
    advice = f"`warpwell drive format-array {name.removeprefix('nvme:')}` creates one, which erases all data"
    if found is None:
        if writable:
            raise errors.ReadOnlyError(
                f"{name} holds no array of Warpwell's, so it may hold other data: open it for reading ({advice})"
            )
        if dtype is None:
            raise errors.FormatError(f"{name} holds no array of Warpwell's: pass dtype= to read it raw ({advice})")
        return None
    file = io.BytesIO(raw)
    file.seek(found.npy_at)
    extents, described = read_header(file, name, "format it again")
    header = Header(check_dtype(described, name), extents, file.tell())
    if header.origin + header.nbytes != found.npy_at + found.nbytes:
        raise errors.FormatError(f"{name}: superblock and header contradict each other: format it again", path=name)
    if is_bfloat16(dtype) and shape is None:
        return _as_bfloat16(header, name)
    if dtype is not None or shape is not None:
        raise errors.ArgumentError(
            f"{name} holds an array with a dtype and a shape of its own: leave dtype= and shape= out", name="dtype"
        )
    return header


def is_bfloat16(dtype: Any) -> bool:
    """Return whether an option is bfloat16."""
    name: object = getattr(dtype, "name", getattr(dtype, "__name__", dtype))
    return name == BFLOAT16


def check_dtype(dtype: Any, name: str) -> np.dtype[Any]:
    """Return a dtype if arrays may have it: fixed size, little-endian.

    Raises
    ------
    DTypeError
    """
    try:
        checked: np.dtype[Any] = bfloat16_dtype() if is_bfloat16(dtype) else np.dtype(dtype)
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
    """Return whether all numbers in a dtype are little-endian, including nested records and arrays."""
    if dtype.subdtype is not None:
        return _little_endian(dtype.subdtype[0])
    if dtype.fields is not None:
        return all(_little_endian(field[0]) for field in dtype.fields.values())
    return bool(dtype.isnative)
