"""`Runtime`: what an agent's device can do; and `CpuRuntime`, for machines without a GPU."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...targets import view_of
from .peer_access import LocalHostAccess, PeerAccess, RemoteHostAccess, exported, process_token

_ALIGNMENT = 4096

_proof = np.frombuffer(os.urandom(16), np.uint8)
"""A process that reads these bytes at their address has access to the memory of this process, not of another one."""

SPIN = 200e-6
"""Seconds for which it is looked without a pause whether a stream has come to a mark,"""

NAP = 20e-6
"""and then between two looks."""


class Runtime(ABC):
    """Memory, streams, copies and launches of one device, addressed by numbers of bytes.

    A *block* is memory with an ``address``; it is freed when the last reference to it goes, after all work in the
    streams that it was `used` in. Work in a stream is in order, and may go on after a call has returned. A *mark* is a
    point of a stream.
    """

    target: str
    """"cpu" or "cuda"."""

    synchronous: bool
    """Whether work is done when a call returns, so that marks are reached as soon as they exist."""

    @abstractmethod
    def enter(self) -> None:
        """Make the device the calling thread's (each thread that uses it, once)."""

    @abstractmethod
    def info(self) -> dict[str, Any]:
        """Return name, uuid, memory (bytes) and compute_capability (a pair, or None)."""

    @abstractmethod
    def memory_info(self) -> tuple[int, int]:
        """Return free and total bytes."""

    @abstractmethod
    def allocate(self, nbytes: int) -> Any:
        """Return a block; its contents are not set. Raises MemoryError."""

    @abstractmethod
    def used(self, block: Any, stream: Any) -> None:
        """Note that work in a stream uses a block from now on."""

    @abstractmethod
    def array(
        self,
        block: Any,
        offset: int,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
    ) -> Any:
        """Return what kernels take for a part of a block."""

    def operand(self, block: Any, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Callable[[], Any]:
        """Return what makes the arrays that Python functions take for a part of a block, for each call another one."""
        array = self.array(block, offset, dtype, shape)
        return lambda: array

    @abstractmethod
    def staging(self, nbytes: int) -> NDArray[np.uint8] | None:
        """Return host memory from which the device copies fast; None where device memory is host memory."""

    @abstractmethod
    def drop_staging(self) -> None:
        """Do not return this thread's staging memory again: something may still write to it."""

    def page_lock(self, address: int, nbytes: int) -> Callable[[], object] | None:
        """Let the device copy fast from and to host memory; return what undoes that."""
        return None

    @abstractmethod
    def stream(self, priority: int) -> Any:
        """Return a new stream."""

    @abstractmethod
    def close_stream(self, stream: Any) -> None:
        """Drop a stream when its work is done."""

    @abstractmethod
    def write(self, stream: Any, to: int, data: Any, *, lent: bool = False) -> None:
        """Copy host bytes to the device; they may change when it returns, unless lent until the stream is there."""

    @abstractmethod
    def read(self, stream: Any, to: NDArray[np.uint8], source: int) -> None:
        """Copy to host memory, after what the stream was given before, and wait for that."""

    def fetch(self, stream: Any, to: NDArray[np.uint8], source: int) -> None:
        """Copy to staging memory; it is there when the stream is."""
        self.read(stream, to, source)

    @abstractmethod
    def copy(self, stream: Any, to: int, source: int, nbytes: int) -> None:
        """Copy within the device. The parts do not overlap."""

    @abstractmethod
    def peer_address(self) -> Any:
        """Return the argument of `peer_access` for other devices of this host; None if none can reach this memory."""

    @abstractmethod
    def export(self, block: Any) -> Any:
        """Return the data with which `PeerAccess.open` opens a block."""

    @abstractmethod
    def peer_access(self, address: Any) -> PeerAccess:
        """Return the access to the memory of another device; raise the reason if there is none."""

    @abstractmethod
    def fill(self, stream: Any, to: int, item: bytes, count: int) -> None:
        """Write an item `count` times."""

    @abstractmethod
    def launch(self, stream: Any, launch: Any, arguments: Sequence[Any]) -> None:
        """Run a kernel."""

    @abstractmethod
    def call(self, stream: Any, function: Callable[..., Any], arguments: Sequence[Any], options: Any) -> Any:
        """Call a host function with arrays of the device, in a stream; its result must not stay on the device."""

    @abstractmethod
    def mark(self, stream: Any, timing: bool) -> Any:
        """Return a mark behind all work so far."""

    @abstractmethod
    def reached(self, mark: Any) -> bool:
        """Tell whether a stream has come to a mark."""

    def reach(self, mark: Any, timeout: float) -> bool:
        """Wait until a stream has come to a mark, or the time is over; return whether it has."""
        begun = time.monotonic()
        while not self.reached(mark):
            waited = time.monotonic() - begun
            if waited > timeout:
                return False
            time.sleep(0 if waited < SPIN else NAP)
        return True

    @abstractmethod
    def after(self, stream: Any, mark: Any) -> None:
        """Let later work of a stream wait for a mark, perhaps of another."""

    @abstractmethod
    def elapsed(self, mark: Any, earlier: Any) -> float:
        """Return seconds between two marks that were reached."""

    @abstractmethod
    def synchronize(self, stream: Any) -> None:
        """Wait for all work so far; raise what went wrong in it."""


class _HostBlock:
    def __init__(self, nbytes: int) -> None:
        self.memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
        base = int(self.memory.ctypes.data)
        self.address = -(-base // _ALIGNMENT) * _ALIGNMENT
        self.bytes = self.memory[self.address - base :][:nbytes]


@functools.cache
def _processor() -> str:
    """Return what this processor calls itself. (`platform.processor` starts a process to learn it.)"""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.machine()


class CpuRuntime(Runtime):
    """Kernels run compiled, on the cores; "device memory" is host memory."""

    target = "cpu"
    synchronous = True

    def __init__(self) -> None:
        self._uuid = f"CPU-{uuid.uuid4()}"  # agents of one host are devices of their own

    def enter(self) -> None:
        """Do nothing: every thread can use host memory."""

    def info(self) -> dict[str, Any]:
        return {
            "name": _processor(),
            "uuid": self._uuid,
            "memory": self.memory_info()[1],
            "compute_capability": None,
        }

    def memory_info(self) -> tuple[int, int]:
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")

    def allocate(self, nbytes: int) -> Any:
        try:
            return _HostBlock(nbytes)
        except MemoryError:
            raise MemoryError(f"the device has no room for {nbytes} bytes") from None

    def used(self, block: Any, stream: Any) -> None:
        """Do nothing: a block lives as long as its references."""

    def array(
        self,
        block: Any,
        offset: int,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
    ) -> Any:
        return np.ndarray(shape, dtype, block.bytes, offset, strides)

    def operand(self, block: Any, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Callable[[], Any]:
        array: NDArray[Any] = self.array(block, offset, dtype, shape)
        return array.view

    def staging(self, nbytes: int) -> NDArray[np.uint8] | None:
        return None

    def drop_staging(self) -> None:
        """Do nothing: nothing is staged."""

    def stream(self, priority: int) -> Any:
        return None

    def close_stream(self, stream: Any) -> None:
        """Do nothing: streams have no state here."""

    def write(self, stream: Any, to: int, data: Any, *, lent: bool = False) -> None:
        raw = np.frombuffer(data, np.uint8)
        if raw.nbytes:
            view_of(to, raw.nbytes, np.uint8)[:] = raw

    def read(self, stream: Any, to: NDArray[np.uint8], source: int) -> None:
        if to.nbytes:
            to[:] = view_of(source, to.nbytes, np.uint8)

    def copy(self, stream: Any, to: int, source: int, nbytes: int) -> None:
        if nbytes:
            view_of(to, nbytes, np.uint8)[:] = view_of(source, nbytes, np.uint8)

    def peer_address(self) -> Any:
        return process_token(), os.getpid(), int(_proof.ctypes.data), _proof.tobytes()

    def export(self, block: Any) -> Any:
        exported[block.address] = block
        return block.address

    def peer_access(self, address: Any) -> PeerAccess:
        token, process, proof_address, proof = address
        return LocalHostAccess(self) if token == process_token() else RemoteHostAccess(process, proof_address, proof)

    def fill(self, stream: Any, to: int, item: bytes, count: int) -> None:
        if count and item:
            dtype = np.dtype(f"V{len(item)}")
            view_of(to, count * len(item), dtype)[:] = np.frombuffer(item, dtype)[0]

    def launch(self, stream: Any, launch: Any, arguments: Sequence[Any]) -> None:
        launch(*arguments, device="cpu")

    def call(self, stream: Any, function: Callable[..., Any], arguments: Sequence[Any], options: Any) -> Any:
        return function(*arguments, **options)

    def mark(self, stream: Any, timing: bool) -> Any:
        return time.perf_counter()

    def reached(self, mark: Any) -> bool:
        return True

    def after(self, stream: Any, mark: Any) -> None:
        """Do nothing: work is done when a call returns."""

    def elapsed(self, mark: Any, earlier: Any) -> float:
        return float(mark - earlier)

    def synchronize(self, stream: Any) -> None:
        """Do nothing: work is done when a call returns."""
