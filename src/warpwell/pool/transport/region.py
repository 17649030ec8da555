"""`Region`: memory that a transfer reads or writes, in chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import ArgumentError

DEFAULT_CHUNK = 1 << 20
"""Bytes of a chunk where nothing else is said: bandwidth has saturated there."""

MAX_CHUNK = 1 << 30  # MPI counts in 31 bits


@dataclass(frozen=True)
class Region:
    """Memory of a transfer. Chunk k stands at ``address + (k % slots) * chunk``.

    Parameters
    ----------
    address : int
        Where it begins, in this process.
    nbytes : int
        Bytes of the whole transfer, which may be more than the slots hold.
    chunk : int
        Bytes of a chunk; the last one may have fewer.
    slots : int or None
        How many chunks there is room for, used in turn. None: all of the data is there.
    keep : object
        Held until the transfer is over, so that the memory stays.

    Raises
    ------
    ArgumentError
        A size that cannot be.
    """

    address: int
    nbytes: int
    chunk: int = DEFAULT_CHUNK
    slots: int | None = None
    keep: Any = None

    def __post_init__(self) -> None:
        if self.nbytes < 0:
            raise ArgumentError(f"a transfer of {self.nbytes} bytes", name="nbytes")
        if not 0 < self.chunk <= MAX_CHUNK:
            raise ArgumentError(f"chunks have 1 to {MAX_CHUNK} bytes, not {self.chunk}", name="chunk")
        if self.slots is not None and self.slots < 1:
            raise ArgumentError(f"a transfer needs a slot or more, not {self.slots}", name="slots")

    @classmethod
    def over(cls, memory: Any, *, chunk: int = DEFAULT_CHUNK) -> Region:
        """Return the region that is all of `memory`: an array, or another contiguous buffer."""
        view = memoryview(memory)
        address = int(np.frombuffer(view.cast("B"), np.uint8).ctypes.data) if view.nbytes else 0
        return cls(address, view.nbytes, chunk, None, memory)

    @property
    def chunks(self) -> int:
        """How many chunks the transfer has."""
        return -(-self.nbytes // self.chunk)

    def place(self, chunk: int) -> tuple[int, int]:
        """Return address and bytes of a chunk."""
        slot = chunk if self.slots is None else chunk % self.slots
        return self.address + slot * self.chunk, min(self.chunk, self.nbytes - chunk * self.chunk)
