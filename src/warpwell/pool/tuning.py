"""`CopyPlan`: the pieces of a copy; `Tuning`: the settings of a device's plans."""

from __future__ import annotations

from typing import NamedTuple

from .._check import checked_integer
from .._settings import settings
from .transport.bulk import MAX_CHUNK

CHUNK = 2 << 20
"""Bytes of a chunk: bandwidth has saturated there."""

MIN_CHUNK = 4096

LARGE = 24 << 20
"""Size in bytes from which a copy is split into chunks. A chunk costs tens of microseconds on either side: over the
shared memory of MPI, smaller copies gain less than that from the overlap. Over a slow link, set a chunk for them."""

BUFFERS = 4
"""Staging buffers of a copy: one is received, one is copied on, and two even out what takes longer now and then."""


class CopyPlan(NamedTuple):
    """The pieces of a copy.

    Attributes
    ----------
    chunk : int
        Bytes of a chunk; both sides must have the same.
    buffers : int
        Chunks that the staging memory of an agent holds; 0: all data are staged, and then copied on.
    """

    chunk: int
    buffers: int


class Tuning:
    """The settings for copies between a device and the application or other devices.

    Parameters
    ----------
    chunk : int, optional
        Bytes, for copies of any size; by default 2 MiB from 24 MiB on, and smaller copies go in one piece.
    buffers : int
    pipelined : bool
        False: receive everything, then copy it on.
    direct : bool
        Whether other devices of the same host write to it themselves; False: data come as from other hosts.
    """

    def __init__(
        self, chunk: int | None = None, buffers: int = BUFFERS, pipelined: bool = True, direct: bool = True
    ) -> None:
        self.chunk = None if chunk is None else checked_integer(chunk, "chunk", minimum=MIN_CHUNK, maximum=MAX_CHUNK)
        self.buffers = checked_integer(buffers, "buffers", maximum=1024)
        self.pipelined = pipelined
        self.direct = direct

    @classmethod
    def from_environment(cls) -> Tuning:
        """Return the settings of ``WARPWELL_POOL_CHUNK``, ``_BUFFERS``, ``_PIPELINE`` and ``_DIRECT``."""
        return cls(settings.pool_chunk, settings.pool_buffers, settings.pool_pipeline, settings.pool_direct)

    def plan(self, nbytes: int) -> CopyPlan:
        """Return the plan of a copy of N bytes; a copy of one chunk has no pipeline."""
        chunk = self.chunk
        if chunk is None:
            chunk = CHUNK if nbytes >= LARGE else max(nbytes, MIN_CHUNK)
        single = nbytes <= chunk
        return CopyPlan(chunk, 0 if single or not self.pipelined else self.buffers)
