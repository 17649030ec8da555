"""`Tuning`: the settings for copies of a device; `CopyPlan`: the chunks of one copy."""

from __future__ import annotations

from typing import NamedTuple

from .._check import checked_integer
from .._settings import settings
from .transport.bulk import MAX_CHUNK

CHUNK = 2 << 20
"""Default size of a chunk in bytes; larger chunks do not increase the bandwidth."""

MIN_CHUNK = 4096
"""Minimum size of a chunk in bytes."""

LARGE = 24 << 20
"""Size in bytes from which a copy is split into chunks by default. A chunk costs tens of microseconds on either side.
Over the shared memory of MPI, smaller copies gain less than that from the overlap; over a slow link, set `chunk`."""

BUFFERS = 4
"""Staging buffers of a copy: one receives, one is copied to the device, and two absorb variations."""


class CopyPlan(NamedTuple):
    """The chunks of a copy.

    Attributes
    ----------
    chunk : int
        Size of a chunk in bytes, equal on both sides.
    buffers : int
        Number of chunks that the staging memory of an agent holds.
    """

    chunk: int
    buffers: int


class Tuning:
    """The settings for copies between a device and the program or other devices.

    Parameters
    ----------
    chunk : int, optional
        Size of a chunk in bytes. By default, copies from 24 MiB have chunks of 2 MiB, and smaller copies one chunk.
    buffers : int
        Number of staging buffers.
    pipelined : bool
        Whether an agent copies a chunk to the device while it receives the next one. If not, all data is one chunk (of
        at most 1 GiB).
    direct : bool
        Whether other devices of the same host write to this device's memory themselves.
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
        """Return the plan of a copy of N bytes."""
        if not self.pipelined:
            return CopyPlan(min(max(nbytes, MIN_CHUNK), MAX_CHUNK), 1)
        chunk = self.chunk or (CHUNK if nbytes >= LARGE else max(nbytes, MIN_CHUNK))
        return CopyPlan(chunk, self.buffers if nbytes > chunk else 1)
