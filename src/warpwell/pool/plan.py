"""`Plan`: in which pieces a copy goes; `Tuning`: what a device's plans are made of."""

from __future__ import annotations

import os
from typing import NamedTuple

from .. import errors
from .region import MAX_CHUNK

CHUNK = 1 << 20
"""Bytes of a chunk of large copies: bandwidth has saturated there (benchmarks/pool_transfer.py)."""

LEAST = 128 << 10
"""Bytes of a chunk at least: handing over a smaller one takes longer than it does to copy."""

PIECES = 4
"""Chunks that a smaller copy has at least: with fewer there is little to overlap."""

BUFFERS = 4
"""Staging buffers of a copy: one is received, one is copied on, and two even out what takes longer now and then."""


class Plan(NamedTuple):
    """How a copy goes.

    Attributes
    ----------
    chunk : int
        Bytes of a chunk; both sides must have the same.
    buffers : int
        Chunks that the staging memory of an agent holds; 0: all of the data is staged, and then copied on.
    """

    chunk: int
    buffers: int


class Tuning:
    """How copies between the application, or other devices, and a device are cut.

    Parameters
    ----------
    chunk : int, optional
        Bytes; by default 1 MiB, and less for copies of less than 4 MiB.
    buffers : int
    pipelined : bool
        False: receive everything, then copy it on.
    """

    def __init__(self, chunk: int | None = None, buffers: int = BUFFERS, pipelined: bool = True) -> None:
        if chunk is not None and not 4096 <= chunk <= MAX_CHUNK:
            raise errors.ArgumentError(f"chunk is {chunk} bytes: give 4096 to {MAX_CHUNK}", name="chunk")
        if not 1 <= buffers <= 1024:
            raise errors.ArgumentError(f"buffers is {buffers}: give 1 to 1024", name="buffers")
        self.chunk = chunk
        self.buffers = buffers
        self.pipelined = pipelined

    @classmethod
    def from_environment(cls) -> Tuning:
        """Return what WARPWELL_POOL_CHUNK, WARPWELL_POOL_BUFFERS and WARPWELL_POOL_PIPELINE (0 or 1) say."""
        numbers: dict[str, int | None] = {"CHUNK": None, "BUFFERS": BUFFERS, "PIPELINE": 1}
        for name in numbers:
            text = os.environ.get(f"WARPWELL_POOL_{name}")
            if text:
                try:
                    numbers[name] = int(text)
                except ValueError:
                    raise errors.ArgumentError(
                        f"WARPWELL_POOL_{name} is {text!r}: give a whole number", name=f"WARPWELL_POOL_{name}"
                    ) from None
        return cls(numbers["CHUNK"], numbers["BUFFERS"] or 0, bool(numbers["PIPELINE"]))

    def plan(self, nbytes: int) -> Plan:
        """Return the plan of a copy of so many bytes.

        One that is so small that it has one chunk goes as without a pipeline.
        """
        chunk = self.chunk
        if chunk is None:
            piece = -(-nbytes // PIECES)
            chunk = min(CHUNK, max(LEAST, -(-piece // 4096) * 4096))
        single = nbytes <= chunk
        return Plan(chunk, 0 if single or not self.pipelined else self.buffers)
