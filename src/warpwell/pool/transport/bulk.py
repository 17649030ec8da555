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
"""Bytes of a chunk where nothing else is said: bandwidth has saturated there."""

MAX_CHUNK = 1 << 30  # MPI counts in 31 bits

ALLOWED, COMPLETED, STATUS, CHANGES, HELD = range(5)
"""Words of a transfer: chunks that may move, chunks that are over, its status, the signal of any change, and whether
something may still touch its memory."""

RUNNING, DONE, LOST, CANCELLED = range(4)
"""What the status word says."""


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
        if isinstance(memory, np.ndarray) and memory.flags.c_contiguous:  # of any dtype, also those without a buffer
            return cls(int(memory.ctypes.data), memory.nbytes, chunk, None, memory)
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


class Transfer:
    """A copy that goes on by itself: chunks move as soon as both sides allow them, and are over in order.

    Its words lie at `address`, so that native code may allow and count chunks too.

    Parameters
    ----------
    peer, tag : int
        The other side, and the number that both have agreed on.
    region : Region
        The memory on this side. It is held until nothing touches it any more.
    wake : callable, optional
        Called when more chunks are allowed or the transfer is cancelled.
    """

    def __init__(self, peer: int, tag: int, region: Region, wake: Callable[[], None] | None = None) -> None:
        self.peer = peer
        self.tag = tag
        self.region: Region | None = region
        self.chunks = region.chunks
        self.reason = ""
        self._slots = region.slots
        self._wake = wake
        self._lock = threading.Lock()
        self.words = np.zeros(8, np.int64)
        self.words[HELD] = 1
        self._changes = Signal(self.address + 8 * CHANGES)
        self.words[ALLOWED] = self.chunks if region.slots is None else 0
        if not self.chunks:
            self.finish(DONE)

    @property
    def address(self) -> int:
        """Where the words lie."""
        return int(self.words.ctypes.data)

    @property
    def allowed(self) -> int:
        """Chunks that may move."""
        return int(self.words[ALLOWED])

    @property
    def completed(self) -> int:
        """Chunks that are over: sent, so that their slots are free, or received."""
        return int(self.words[COMPLETED])

    @property
    def status(self) -> int:
        """RUNNING, DONE, LOST or CANCELLED."""
        return int(self.words[STATUS])

    @property
    def done(self) -> bool:
        """Whether it is over, well or not, and its memory is not touched any more."""
        return self.status != RUNNING and not self.words[HELD]

    def allow(self, chunks: int) -> None:
        """Let all chunks before number `chunks` move: they are filled, or their slots are free.

        Raises
        ------
        ArgumentError
            That is more than there are, or a slot would be used again before its chunk is over.
        """
        with self._lock:
            limit = self.chunks if self._slots is None else min(self.chunks, self.completed + self._slots)
            if chunks > limit and self.status == RUNNING:
                raise ArgumentError(f"{chunks} chunks allowed of {self.chunks}, {self.completed} over", name="chunks")
            if chunks <= self.allowed:
                return
            self.words[ALLOWED] = chunks
        if self._wake is not None:
            self._wake()

    def wait(self, chunks: int, timeout: float) -> None:
        """Wait until `chunks` of them are over.

        Raises
        ------
        DeviceLostError
            The other side is gone.
        StallError
            They were not over after `timeout` seconds.
        PoolError
            The transfer was cancelled.
        """
        end = time.monotonic() + timeout
        while True:
            seen = self._changes.value
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
            self._changes.sleep(seen, left)

    def cancel(self) -> None:
        """Move no more chunks. Chunks that are on their way still touch the memory: it is held until `done`.

        The other side has to be told by its own means, and to cancel too. Where it never began its half, this one's
        memory is let go of all the same.
        """
        with self._lock:
            if self.status != RUNNING:
                return
            self.words[STATUS] = CANCELLED
        self._changes.raise_()
        if self._wake is not None:
            self._wake()

    # -- for transports ------------------------------------------------------------------------------------

    def advance(self, completed: int) -> None:
        """Tell that the chunks before `completed` are over."""
        self.words[COMPLETED] = completed
        if completed == self.chunks:
            self.finish(DONE)
        else:
            self._changes.raise_()

    def finish(self, status: int, reason: str = "") -> None:
        """End it (an earlier end stays) and let go of the memory."""
        with self._lock:
            if self.status == RUNNING:
                self.reason = reason
                self.words[STATUS] = status
            self._let_go()
        self._changes.raise_()

    def fail(self, reason: str, keep: Any = None) -> None:
        """The peer is gone. With `keep`, the memory is not let go of: something may still write to it."""
        with self._lock:
            if self.status == RUNNING:
                self.reason = reason
                self.words[STATUS] = LOST
        if keep is None:
            self._let_go()
        self._changes.raise_()

    def _let_go(self) -> None:
        self.words[HELD] = 0
        self.region = None
