"""`Runtime`: the operations of an agent's device, here of the CPU; `CudaRuntime` overrides them."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..._os import processor_name
from ...targets import view_of
from .peer_access import HostAccess, PeerAccess

Shape: TypeAlias = tuple[int, ...]

_ALIGNMENT = 4096

proof = np.frombuffer(os.urandom(16), np.uint8)
"""A process that reads these bytes at their address has access to the memory of this process, and not of another
process."""

SPIN = 200e-6
"""Time in seconds for which a mark is polled without a pause."""

NAP = 20e-6
"""Pause between two polls after that, in seconds."""


class _HostBlock:
    def __init__(self, nbytes: int) -> None:
        self.memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
        base = int(self.memory.ctypes.data)
        self.address = -(-base // _ALIGNMENT) * _ALIGNMENT
        self.bytes = self.memory[self.address - base :][:nbytes]


class Runtime:
    """Memory, streams, copies and launches of one device, addressed in bytes.

    This class is the device "cpu": kernels run compiled on the cores, and "device memory" is host memory. `CudaRuntime`
    overrides all operations.

    A *block* is memory with an ``address``. It is freed after its last reference is dropped and all work in the streams
    in which it was `used` is done. Work in a stream is ordered, and may continue after a call has returned. A *mark* is
    a point in a stream.
    """

    target = "cpu"
    """"cpu" or "cuda"."""

    synchronous = True
    """Whether work is done when a call returns, and marks are reached when they are created."""

    def __init__(self) -> None:
        self._uuid = f"CPU-{uuid.uuid4()}"  # each agent of a host is a separate device

    def enter(self) -> None:
        """Make the device current in the calling thread. Each thread calls it once, before all other methods."""

    def info(self) -> dict[str, Any]:
        """Return name, uuid, memory (bytes) and compute_capability (a pair, or None)."""
        name, memory = processor_name(), self.memory_info()[1]
        return {"name": name, "uuid": self._uuid, "memory": memory, "compute_capability": None}

    def memory_info(self) -> tuple[int, int]:
        """Return free and total bytes."""
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")

    def allocate(self, nbytes: int) -> Any:
        """Return an uninitialized block. Raises MemoryError."""
        try:
            return _HostBlock(nbytes)
        except MemoryError:
            raise MemoryError(f"the device has no memory for {nbytes} bytes") from None

    def used(self, block: Any, stream: Any) -> None:
        """Keep a block until all current work of a stream is done."""

    def array(self, block: Any, offset: int, dtype: np.dtype[Any], shape: Shape, strides: Shape | None = None) -> Any:
        """Return the kernel argument for a part of a block."""
        return np.ndarray(shape, dtype, block.bytes, offset, strides)

    def operand(self, block: Any, offset: int, dtype: np.dtype[Any], shape: Shape) -> Callable[[], Any]:
        """Return a function that returns a new array object of a part of a block, for Python functions."""
        array: NDArray[Any] = self.array(block, offset, dtype, shape)
        return array.view

    def staging(self, nbytes: int) -> NDArray[np.uint8] | None:
        """Return page-locked host memory, or None if device memory is host memory."""
        return None

    def drop_staging(self) -> None:
        """Never return this thread's staging memory again, because a transfer may still write to it."""

    def page_lock(self, address: int, nbytes: int) -> Callable[[], object] | None:
        """Page-lock host memory, and return the function that unlocks it, or None if that is not possible."""
        return None

    def stream(self, priority: int) -> Any:
        """Return a new stream."""
        return None

    def close_stream(self, stream: Any) -> None:
        """Destroy a stream after its work."""

    def write(self, stream: Any, to: int, data: Any) -> None:
        """Copy host data, which may change after the call or, if it is page-locked, after the stream's copy."""
        raw = np.frombuffer(data, np.uint8)
        if raw.nbytes:
            view_of(to, raw.nbytes, np.uint8)[:] = raw

    def read(self, stream: Any, to: NDArray[np.uint8], source: int) -> None:
        """Copy to host memory after earlier work of the stream, and wait for the copy."""
        if to.nbytes:
            to[:] = view_of(source, to.nbytes, np.uint8)

    def fetch(self, stream: Any, to: NDArray[np.uint8], source: int) -> None:
        """Copy to staging memory, in the order of the stream."""
        self.read(stream, to, source)

    def copy(self, stream: Any, to: int, source: int, nbytes: int) -> None:
        """Copy within the device. Source and destination do not overlap."""
        if nbytes:
            view_of(to, nbytes, np.uint8)[:] = view_of(source, nbytes, np.uint8)

    def peer_address(self) -> Any:
        """Return the argument of `peer_access` for other devices of this host, or None if they have no access."""
        return os.getpid(), int(proof.ctypes.data), proof.tobytes()

    def export(self, block: Any) -> Any:
        """Return the data with which `PeerAccess.open` opens a block."""
        return block.address

    def peer_access(self, address: Any) -> PeerAccess:
        """Return the access to the memory of another device. Raises `PoolError` without access."""
        return HostAccess(*address)

    def fill(self, stream: Any, to: int, item: bytes, count: int) -> None:
        """Write an item `count` times."""
        if count and item:
            dtype = np.dtype(f"V{len(item)}")
            view_of(to, count * len(item), dtype)[:] = np.frombuffer(item, dtype)[0]

    def launch(self, stream: Any, launch: Any, arguments: Sequence[Any]) -> None:
        """Run a kernel."""
        launch(*arguments, device="cpu")

    def call(self, stream: Any, function: Callable[..., Any], arguments: Sequence[Any], options: Any) -> Any:
        """Call a host function with arrays of the device, in a stream. Return its result in host memory."""
        return function(*arguments, **options)

    def mark(self, stream: Any, timing: bool) -> Any:
        """Return a mark after all current work of a stream."""
        return time.perf_counter()

    def reached(self, mark: Any) -> bool:
        """Return True if a stream has reached a mark."""
        return True

    def reach(self, mark: Any, timeout: float) -> bool:
        """Wait until a stream has reached a mark; return False if it has not after `timeout` seconds."""
        start = time.monotonic()
        while not self.reached(mark):
            waited = time.monotonic() - start
            if waited > timeout:
                return False
            time.sleep(0 if waited < SPIN else NAP)
        return True

    def after(self, stream: Any, mark: Any) -> None:
        """Make later work of a stream wait for a mark of any stream."""

    def elapsed(self, mark: Any, earlier: Any) -> float:
        """Return the seconds between two reached marks."""
        return float(mark - earlier)

    def synchronize(self, stream: Any) -> None:
        """Wait for all current work of a stream; raise its failure."""

    def trim(self) -> None:
        """Return unused memory to the device, for other processes."""
