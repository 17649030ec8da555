"""`format_array` makes an array on a namespace: the only way in which Warpwell writes where none of its arrays lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .drive import Namespace
from .superblock import BYTES, DATA_AT, MAGIC, head_of

GUARD = 1 << 20
"""Bytes at the start and at the end of a namespace that must be zeros, or an array of ours. Partition tables, and what
marks file systems, LVM, md, ZFS, LUKS and others, lie there."""

CHUNK = 1 << 20


def format_array(
    namespace: Namespace,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    *,
    erase: str,
    items: NDArray[Any] | None = None,
    report: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> None:
    """Make an array on a namespace; everything that was on it is lost.

    The superblock is written last, so what was begun and not ended is no array, and can be formatted again.

    Parameters
    ----------
    namespace : Namespace
    shape : tuple of int
    dtype : numpy.dtype
    erase : str
        Serial number of the drive and id of the namespace, ``"S123/1"``: whoever says it means this one.
    items : ndarray, optional
        What the array holds; of this shape and dtype, in C order, a memmap as well. Default: what lies there, as
        `numpy.empty`.
    report : callable, optional
        ``report("write", done, total)``, in bytes.

    Raises
    ------
    ArgumentError
        `erase` names another namespace, or the array does not fit.
    DriveError
        The namespace holds other data and was not changed, or the drive refuses or is write-protected.
    """
    drive, name = namespace.drive, f"namespace {namespace.nsid} of drive {namespace.drive.address}"
    head = np.frombuffer(head_of(shape, dtype), np.uint8)
    nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if DATA_AT + nbytes > namespace.nbytes:
        raise errors.ArgumentError(
            f"an array of {nbytes} bytes does not fit on {name}: it has {namespace.nbytes}, {DATA_AT} of which are for "
            "the header",
            name="shape",
        )
    if erase != (meant := f"{drive.serial}/{namespace.nsid}"):
        raise errors.ArgumentError(
            f"{name} is {meant}, and not {erase!r}: nothing was written. What is on it would be lost; if that is "
            "meant, name it so",
            name="erase",
        )
    if not namespace.writable:
        raise errors.DriveError(f"{name} is write-protected", drive=drive.address, namespace=namespace.nsid)
    require_empty(namespace)
    unit = max(BYTES, namespace.block)
    begun = np.zeros(unit, np.uint8)
    begun[: len(MAGIC)] = np.frombuffer(MAGIC, np.uint8)  # ours, and damaged: whoever formats it next may
    namespace.write(0, begun)
    namespace.flush()
    if items is not None:
        _write(namespace, np.ascontiguousarray(items).reshape(-1).view(np.uint8), report)
    namespace.write(unit // namespace.block, head[unit:])
    namespace.flush()
    namespace.write(0, head[:unit])
    namespace.flush()


def require_empty(namespace: Namespace) -> None:
    """Raise unless the first and the last MiB of a namespace are zeros, or the first begins with our superblock.

    Raises
    ------
    DriveError
    """
    count = -(-min(GUARD, namespace.nbytes) // namespace.block)
    first = namespace.read(0, count)
    if first[: len(MAGIC)].tobytes() == MAGIC:
        return
    for lba, data in ((0, first), (namespace.blocks - count, namespace.read(namespace.blocks - count, count))):
        if data.any():
            at = lba * namespace.block + int(np.flatnonzero(data)[0])
            reason = f"byte {at} is not zero: partitions, a file system or another program's data may lie there"
            raise errors.DriveError(
                f"namespace {namespace.nsid} of drive {namespace.drive.address} was left alone: {reason}. If nobody "
                f"needs them: warpwell drive unbind {namespace.drive.address}, then wipe it (blkdiscard -z, or dd from "
                "/dev/zero) by its name in /dev",
                drive=namespace.drive.address,
                namespace=namespace.nsid,
                reasons=(reason,),
            )


def _write(namespace: Namespace, raw: NDArray[np.uint8], report: Callable[[str, int, int], None]) -> None:
    """Write bytes from `DATA_AT` on, the last block filled up with zeros."""
    for done in range(0, raw.size, CHUNK):
        part = raw[done : done + CHUNK]
        report("write", done, raw.size)
        filled = np.zeros(-(-part.size // namespace.block) * namespace.block, np.uint8)
        filled[: part.size] = part
        namespace.write((DATA_AT + done) // namespace.block, filled)
    report("write", raw.size, raw.size)
