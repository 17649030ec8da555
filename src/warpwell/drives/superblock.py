"""`Superblock`: the first 4,096 bytes of a namespace that holds an array.

Warpwell refuses to write to a namespace without a superblock. From `NPY_AT` on, the namespace has a whole ``.npy`` file
with a padded header, so that the items begin at `DATA_AT`, a multiple of every usual page. Any program reads it: ``dd
if=/dev/nvme0n1 bs=4K skip=255 of=array.npy`` and ``numpy.load``.

=====  =====  =====================================================================
byte   bytes  value (little-endian)
=====  =====  =====================================================================
0      8      ``WARPWELL``
8      4      version, 1
12     4      CRC-32C of the 4,096 bytes, with 0 in this field
16     8      bytes from the start of the namespace to the ``.npy`` file, `NPY_AT`
24     8      bytes of the ``.npy`` file, header included
32     16     random identity of the array
48            zeros
=====  =====  =====================================================================
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import errors
from .._npy import npy_header
from ..targets import crc32c_of

BYTES = 4096
"""Bytes of the superblock, at the start of the namespace."""
NPY_AT = (1 << 20) - 4096
"""Offset of the ``.npy`` file in bytes."""
DATA_AT = 1 << 20
"""Offset of its items in bytes."""

MAGIC = b"WARPWELL"
VERSION = 1
_FIELDS = struct.Struct("<8sIIQQ16s")


@dataclass(frozen=True)
class Superblock:
    """The fields of a superblock.

    Attributes
    ----------
    nbytes : int
        Bytes of the ``.npy`` file, header included.
    npy_at : int
        Offset of that file in the namespace, in bytes.
    identity : bytes
        16 random bytes that identify the array.
    """

    nbytes: int
    npy_at: int = NPY_AT
    identity: bytes = b""

    def pack(self) -> bytes:
        """Return the `BYTES` bytes."""
        identity = self.identity or os.urandom(16)
        fields = (MAGIC, VERSION, 0, self.npy_at, self.nbytes, identity)
        body = bytearray(_FIELDS.pack(*fields).ljust(BYTES, b"\0"))
        struct.pack_into("<I", body, 12, crc32c_of(bytes(body)))
        return bytes(body)

    @classmethod
    def parse(cls, raw: bytes, name: str, capacity: int) -> Superblock | None:
        """Return the superblock in the first bytes of a namespace, or None if it has no superblock of Warpwell.

        Parameters
        ----------
        raw : bytes
            The first `BYTES` bytes.
        name : str
            For messages.
        capacity : int
            Bytes of the namespace.

        Raises
        ------
        FormatError
            The superblock is damaged, newer than this program, or of a larger namespace.
        """
        if raw[: len(MAGIC)] != MAGIC:
            return None
        _, version, checksum, npy_at, nbytes, identity = _FIELDS.unpack_from(raw)
        body = bytearray(raw[:BYTES])
        body[12:16] = bytes(4)
        if len(raw) < BYTES or crc32c_of(bytes(body)) != checksum:
            raise errors.FormatError(
                f"{name} has a damaged superblock: format the namespace again, or open it raw with dtype="
            )
        if version != VERSION:
            raise errors.FormatError(
                f"{name}: superblock version {version}, but this Warpwell reads version {VERSION}: "
                "use the Warpwell that wrote it"
            )
        if npy_at % 512 or npy_at < BYTES or npy_at + nbytes > capacity:
            raise errors.FormatError(
                f"{name}: its array ends at byte {npy_at + nbytes}, but it has {capacity}: it was copied from a "
                "larger namespace; copy it to one that is large enough"
            )
        return cls(nbytes, npy_at, identity)


def head_of(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """Return the first `DATA_AT` bytes of a namespace that holds an array: superblock, zeros, header.

    Items follow in C order.

    Parameters
    ----------
    shape : tuple of int
    dtype : numpy.dtype

    Raises
    ------
    ArgumentError
        The description of the dtype does not fit, because it has too many fields.
    """
    nbytes = DATA_AT - NPY_AT + int(np.prod(shape, dtype=object)) * dtype.itemsize
    return Superblock(nbytes).pack().ljust(NPY_AT, b"\0") + npy_header(
        np.lib.format.dtype_to_descr(dtype), shape, DATA_AT - NPY_AT
    )
