"""`format_array` formats a namespace as an array. No other function of Warpwell writes to an unformatted namespace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .drive import Namespace
from .superblock import BYTES, DATA_AT, MAGIC, head_of

GUARD = 1 << 20
"""Bytes at each end of a namespace that must be zeros, unless it has a superblock of Warpwell. Partition tables and the
signatures of file systems, LVM, md, ZFS and LUKS are there."""

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
    """Format a namespace as an array, which erases its data.

    The superblock is written last, so an interrupted format leaves no array, and can be repeated.

    Parameters
    ----------
    namespace : Namespace
    shape : tuple of int
    dtype : numpy.dtype
    erase : str
        Serial number of the drive and id of the namespace, ``"S123/1"``, to confirm the erasure.
    items : ndarray, optional
        Content of the array, with this shape and dtype, in C order; a memmap is possible. Default: undefined, as in
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
            f"an array of {nbytes} bytes does not fit on {name}: the namespace has {namespace.nbytes}, of which the "
            f"header takes {DATA_AT}",
            name="shape",
        )
    if erase != (expected := f"{drive.serial}/{namespace.nsid}"):
        raise errors.ArgumentError(
            f"erase must be {expected!r} to erase {name}, got {erase!r}; the namespace was not changed",
            name="erase",
        )
    if not namespace.writable:
        raise errors.DriveError(f"{name} is write-protected", drive=drive.address, namespace=namespace.nsid)
    require_empty(namespace)
    unit = max(BYTES, namespace.block)
    incomplete = np.zeros(unit, np.uint8)
    # A damaged superblock of Warpwell may be formatted again.
    incomplete[: len(MAGIC)] = np.frombuffer(MAGIC, np.uint8)
    namespace.write(0, incomplete)
    namespace.flush()
    if items is not None:
        _write(namespace, np.ascontiguousarray(items).reshape(-1).view(np.uint8), report)
    namespace.write(unit // namespace.block, head[unit:])
    namespace.flush()
    namespace.write(0, head[:unit])
    namespace.flush()


def require_empty(namespace: Namespace) -> None:
    """Raise unless the first and the last MiB of a namespace are zeros, or it begins with Warpwell's superblock.

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
            reason = f"byte {at} is not zero: it may belong to partitions, a file system or another program's data"
            raise errors.DriveError(
                f"namespace {namespace.nsid} of drive {namespace.drive.address} was left alone: {reason}. To erase "
                f"the data: warpwell drive unbind {namespace.drive.address}, then wipe it (blkdiscard -z, or dd from "
                "/dev/zero) by its name in /dev",
                drive=namespace.drive.address,
                namespace=namespace.nsid,
                reasons=(reason,),
            )


def _write(namespace: Namespace, raw: NDArray[np.uint8], report: Callable[[str, int, int], None]) -> None:
    """Write bytes from `DATA_AT` on; zeros fill the last block."""
    for done in range(0, raw.size, CHUNK):
        part = raw[done : done + CHUNK]
        report("write", done, raw.size)
        filled = np.zeros(-(-part.size // namespace.block) * namespace.block, np.uint8)
        filled[: part.size] = part
        namespace.write((DATA_AT + done) // namespace.block, filled)
    report("write", raw.size, raw.size)
