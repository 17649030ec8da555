"""The exception for the first error that device code met in a launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .. import errors
from ..nvme import describe
from . import layout as at

if TYPE_CHECKING:
    from .plan import Space

BLOCK = 512
"""Bytes of a logical block."""

def error_of(
    latched: tuple[int, int, int, int], spaces: Mapping[int, Space], *, page_size: int, timeout: float
) -> Exception:
    """Return the exception for what was latched; it names array, page and block, and the next step."""
    kind, nsid, page, value = latched
    space = spaces.get(nsid)
    name = space.name if space else "an array that was closed"
    local = page - space.base if space else page
    lba = local * (page_size // BLOCK)
    where = f"array {name!r}, page {local} (LBA {lba})"
    if kind == at.INDEX_ERROR:
        return errors.IndexRangeError(
            f"a kernel used index {value} of array {name!r} in a dimension of size {page}: compare the index "
            "with the size first (negative indices do not wrap in kernels)",
            array=name,
            index=value,
            size=page,
        )
    if kind == at.READ_ONLY:
        return errors.ReadOnlyError(f'a kernel wrote to array {name!r}, which is read-only: open it with mode="r+"')
    if kind == at.READ_ERROR:
        return errors.MediumError(
            f"reading {where} failed: {describe(value)} (status {value:#06x}); check the drive or file",
            array=name,
            lba=lba,
            page=local,
            status=value,
        )
    if kind == at.WRITE_ERROR:
        return errors.MediumError(
            f"writing {where} failed: {describe(value)} (status {value:#06x}); the page stays in the cache: make "
            "room or mend the drive, then call flush()",
            array=name,
            lba=lba,
            page=local,
            status=value,
        )
    if kind == at.NOT_PINNED:
        return errors.PinError(
            f"a kernel gave back page {local} of array {name!r}, which no kernel holds: call unpin once for each pin "
            "that returned True (what the host pinned, the host gives back)",
            page=local,
        )
    return errors.StallError(
        f"no completion for {timeout:g} s while waiting for {where}: the medium does not answer (or every frame is "
        "pinned); command ids stay quarantined until it does",
        array=name,
        seconds=timeout,
    )
