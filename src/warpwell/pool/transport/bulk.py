"""`Region`: memory that a bulk copy between two processes reads or writes; `Transfer`: one side of such a copy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import ArgumentError, DeviceLostError, PoolError, StallError
from .signal import Signal

DEFAULT_CHUNK = 1 << 20
"""Default size of a chunk in bytes; larger chunks do not increase the bandwidth."""

MAX_CHUNK = 1 << 30  # MPI counts in 31 bits

ALLOWED, COMPLETED, STATUS, CHANGES, HELD = range(5)
"""Control words of a transfer: chunks that may move, completed chunks, status, the `Signal` of any change, and whether
the transport may still access the memory."""

RUNNING, DONE, LOST, CANCELLED = range(4)
"""Values of the status word."""


@dataclass(frozen=True)
class Region:
    """The memory of one side of a transfer. Chunk k is at ``address + (k % slots) * chunk``.

    Parameters
    ----------
    address : int
        Address of the memory in this process.
    nbytes : int
        Size of the transfer in bytes; it may exceed the size of the slots.
    chunk : int
        Size of a chunk in bytes; the last chunk may be smaller.
    slots : int or None
        Number of chunks that the memory holds, as a ring. None: it holds all of the data.
    keep : object
        Owner of the memory; referenced until the transfer is done.

    Raises
    ------
    ArgumentError
        A size is out of range.
    """

    address: int
    nbytes: int
    chunk: int = DEFAULT_CHUNK
    slots: int | None = None
    keep: Any = None

    def __post_init__(self) -> None:
        if self.nbytes < 0:
            raise ArgumentError(f"nbytes must not be negative, got {self.nbytes}", name="nbytes")
        if not 0 < self.chunk <= MAX_CHUNK:
            raise ArgumentError(f"chunk must be from 1 to {MAX_CHUNK} bytes, got {self.chunk}", name="chunk")
        if self.slots is not None and self.slots < 1:
            raise ArgumentError(f"slots must be at least 1, got {self.slots}", name="slots")

    @classmethod
    def over(cls, memory: Any, *, chunk: int = DEFAULT_CHUNK) -> Region:
        """Return the region of all of `memory`: an array or another contiguous buffer."""
        # not every dtype supports the buffer protocol
        if isinstance(memory, np.ndarray) and memory.flags.c_contiguous:
            return cls(int(memory.ctypes.data), memory.nbytes, chunk, None, memory)
        view = memoryview(memory)
        address = int(np.frombuffer(view.cast("B"), np.uint8).ctypes.data) if view.nbytes else 0
        return cls(address, view.nbytes, chunk, None, memory)

    @property
    def chunks(self) -> int:
        """Number of chunks of the transfer."""
        return -(-self.nbytes // self.chunk)

    def locate(self, chunk: int) -> tuple[int, int]:
        """Return the address and the size in bytes of a chunk."""
        slot = chunk if self.slots is None else chunk % self.slots
        return self.address + slot * self.chunk, min(self.chunk, self.nbytes - chunk * self.chunk)


class Transfer:
    """One side of an asynchronous copy. A chunk moves when both sides allow it; chunks complete in order.

    Native code reads and writes the control words at `address`. Any thread may call the methods.

    Parameters
    ----------
    peer, tag : int
        Rank of the other side, and the tag that both sides use.
    region : Region
        The memory on this side. It is referenced until the transport no longer accesses it.

    Attributes
    ----------
    wake : callable
        Called when more chunks are allowed or the transfer is cancelled; the transport sets it.
    """

    def __init__(self, peer: int, tag: int, region: Region) -> None:
        self.peer = peer
        self.tag = tag
        self.region: Region | None = region
        self.chunks = region.chunks
        self.reason = ""
        self._slots = region.slots
        self.wake: Callable[[], object] = int
        self._lock = threading.Lock()
        self._control = np.zeros(8, np.int64)
        self._control[HELD] = 1
        self._changes = Signal(self.address + 8 * CHANGES)
        self._control[ALLOWED] = self.chunks if region.slots is None else 0
        if not self.chunks:
            self.finish(DONE)

    @property
    def address(self) -> int:
        """Address of the control words."""
        return int(self._control.ctypes.data)

    @property
    def allowed(self) -> int:
        """Number of chunks that may move."""
        return int(self._control[ALLOWED])

    @property
    def completed(self) -> int:
        """Number of chunks that were received, or sent, so that their slots are free."""
        return int(self._control[COMPLETED])

    @property
    def status(self) -> int:
        """RUNNING, DONE, LOST or CANCELLED."""
        return int(self._control[STATUS])

    @property
    def done(self) -> bool:
        """Whether the transfer has ended in any way and the transport no longer accesses its memory."""
        return self.status != RUNNING and not self._control[HELD]

    def allow(self, chunks: int) -> None:
        """Allow the first `chunks` chunks to move: they are filled, or their slots are free.

        Raises
        ------
        ArgumentError
            The transfer has fewer chunks, or a slot would be reused before its chunk has completed.
        """
        with self._lock:
            limit = self.chunks if self._slots is None else min(self.chunks, self.completed + self._slots)
            if chunks > limit and self.status == RUNNING:
                raise ArgumentError(
                    f"chunks must be at most {limit} ({self.completed} of {self.chunks} completed), got {chunks}",
                    name="chunks",
                )
            if chunks <= self.allowed:
                return
            self._control[ALLOWED] = chunks
        self.wake()

    def wait(self, chunks: int, timeout: float) -> None:
        """Wait until `chunks` chunks have completed.

        Raises
        ------
        DeviceLostError
            The peer was lost.
        StallError
            The chunks did not complete within `timeout` seconds.
        PoolError
            The transfer was cancelled.
        """
        end = time.monotonic() + timeout
        while True:
            version = self._changes.value
            status = self.status
            if self.completed >= chunks:
                return
            if status == LOST:
                raise DeviceLostError(f"rank {self.peer} was lost in the middle of a copy: {self.reason}")
            if status == CANCELLED:
                raise PoolError("the copy was cancelled")
            left = end - time.monotonic()
            if left <= 0:
                raise StallError(
                    f"a copy with rank {self.peer}: {self.completed} of {self.chunks} chunks after {timeout:g} s, "
                    f"{self.allowed} allowed on this side",
                    seconds=timeout,
                )
            self._changes.sleep(version, left)

    def cancel(self) -> None:
        """Move no more chunks. Chunks in flight still access the memory, which is referenced until `done`.

        The caller must make the other side cancel, too. The memory is released even if that side was never started.
        """
        with self._lock:
            if self.status != RUNNING:
                return
            self._control[STATUS] = CANCELLED
        self._changes.raise_()
        self.wake()

    # -- for transports ------------------------------------------------------------------------------------

    def advance(self, completed: int) -> None:
        """Record that the first `completed` chunks have completed."""
        self._control[COMPLETED] = completed
        if completed == self.chunks:
            self.finish(DONE)
        else:
            self._changes.raise_()

    def finish(self, status: int, reason: str = "", keep_memory: bool = False) -> None:
        """Set the final status, unless one is set, and release the memory.

        With `keep_memory`, never release the memory, because MPI may still access it.
        """
        with self._lock:
            if self.status == RUNNING:
                self.reason = reason
                self._control[STATUS] = status
            if not keep_memory:
                self._control[HELD] = 0
                self.region = None
        self._changes.raise_()

    def fail(self, reason: str, keep_memory: bool = False) -> None:
        """Mark the peer as lost; see `finish`."""
        self.finish(LOST, reason, keep_memory)
