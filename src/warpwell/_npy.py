"""``.npy`` files: `read_header` and `npy_header`, for versions 1 to 3 of the format, and `npy_writer`."""

from __future__ import annotations

import contextlib
import io
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from .errors import ArgumentError, FormatError
from .replacing import durable_file

PAGE_BYTES = 4096
"""Bytes before the data of files that `npy_writer` writes, so that aligned items are in one page, not in two."""


def read_header(
    file: IO[bytes], name: str, advice: str = "write it with numpy.save"
) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Read the header of a ``.npy`` file, up to its data; return shape and dtype (any dtype).

    `name` is the file's name in messages, `advice` their next step if it is not a ``.npy`` file.

    Raises
    ------
    FormatError
        The file is not a ``.npy`` file, is in Fortran order, or has a negative extent.
    """
    try:
        try:
            version = np.lib.format.read_magic(file)
        except ValueError:
            file.seek(0)
            raise ValueError(f"it begins with {file.read(6)!r}") from None
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        if version == (3, 0):
            file = _as_version_2(file)
        elif version not in ((1, 0), (2, 0)):
            raise ValueError(f"format version {version} is unknown")
        begin = file.tell()
        for _ in range(100):
            try:
                shape, fortran, dtype = read(file)
                break
            except SystemError:  # Python 3.11 adds up the nesting depth of literals that two threads parse: retry
                file.seek(begin)
        else:
            raise ValueError("its header cannot be parsed while other threads parse headers")
    except (ValueError, tokenize.TokenError, SyntaxError, MemoryError, RecursionError) as error:
        # NumPy does not catch what its parsers raise if the header is not a literal
        raise FormatError(f"{name} is not a .npy file ({error}): {advice}", path=name) from None
    if any(n < 0 for n in shape):
        raise FormatError(f"{name} has shape {shape} with a negative extent: write it again", path=name)
    # C order and Fortran order are the same for an empty array, and if at most one extent is above 1
    if fortran and 0 not in shape and sum(n > 1 for n in shape) > 1:
        raise FormatError(f"{name} is in Fortran order: save numpy.ascontiguousarray(array) instead", path=name)
    return tuple(int(n) for n in shape), dtype


def _as_version_2(file: IO[bytes]) -> IO[bytes]:
    """Return the rest of a header of version 3 (UTF-8) as the rest of a header of version 2 (Latin-1).

    NumPy has no public function that reads version 3. Only the names of fields have characters beyond Latin-1, and
    these are Python literals, in which an escape sequence means the same. `file` is left at the start of the data.
    """
    nbytes = int.from_bytes(file.read(4), "little")
    text = file.read(nbytes)
    if len(text) < nbytes:
        raise ValueError("its header is truncated")
    raw = text.decode().encode("latin-1", "backslashreplace")
    return io.BytesIO(len(raw).to_bytes(4, "little") + raw)


def npy_header(descr: Any, shape: tuple[int, ...], nbytes: int = 0) -> bytes:
    """Return the first bytes of a ``.npy`` file in C order, up to its data, in the lowest version that can express it.

    Parameters
    ----------
    descr : object
        The dtype, as `numpy.lib.format.dtype_to_descr` describes it.
    shape : tuple of int
    nbytes : int
        Length of the result; by default as short as NumPy's own, a multiple of 64.

    Raises
    ------
    ArgumentError
        The description of the dtype does not fit into `nbytes`.
    """
    literal = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    version = 1
    try:
        text = literal.encode("latin-1")
    except UnicodeEncodeError:
        version, text = 3, literal.encode()
    if version == 1 and max(nbytes, len(text) + 74) > 1 << 16:
        version = 2
    start = 10 if version == 1 else 12
    total = nbytes or -(-(start + len(text) + 1) // 64) * 64
    if start + len(text) + 1 > total:
        raise ArgumentError(
            f"the description of this dtype has {len(text)} bytes, but only {total - start - 1} fit: use fewer fields",
            name="dtype",
        )
    length = (total - start).to_bytes(start - 8, "little")
    return np.lib.format.magic(version, 0) + length + text.ljust(total - start - 1) + b"\n"


@contextlib.contextmanager
def npy_writer(path: Path, dtype: Any) -> Iterator[Callable[[Any], None]]:
    """Yield a function that appends the items of an array to a new one-dimensional file of a little-endian dtype.

    The header is written at the end of the block, and the file is made durable. If the block raises, the file is not a
    valid ``.npy`` file.
    """
    dtype = np.dtype(dtype).newbyteorder("<")
    with durable_file(path) as file:
        file.seek(PAGE_BYTES)

        def append(items: Any) -> None:
            file.write(np.ascontiguousarray(items, dtype).reshape(-1).view(np.uint8).data)

        yield append
        length = (file.tell() - PAGE_BYTES) // dtype.itemsize
        file.seek(0)
        file.write(npy_header(np.lib.format.dtype_to_descr(dtype), (length,), PAGE_BYTES))
