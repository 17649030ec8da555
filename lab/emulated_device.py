"""`EmulatedDevice`: a runtime whose device memory is behind a copy engine, so that pipelining has an effect without a
GPU.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpwell.pool.agent.runtime import Runtime
from warpwell.targets.memory import view_of


class EmulatedDevice(Runtime):
    """Copies between staging and "device" memory by a thread, in order, at a bandwidth; kernels run on the CPU.

    As on a GPU, `write` of lent memory and `fetch` return at once, and the engine reaches their marks later.

    Parameters
    ----------
    bandwidth : float
        Maximum bytes per second of the copy engine, kept by a deadline for each copy, because short sleeps overshoot.
    jitter : float
        Maximum delay of the start of a copy or kernel in seconds, so that unordered streams overtake each other.
    seed : int
        Seed of these delays.
    """

    synchronous = False

    def __init__(self, bandwidth: float = 10e9, jitter: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        self.bandwidth = bandwidth
        self.jitter = jitter
        self.chance = random.Random(seed)
        self.copies = 0
        self._thread = threading.local()

    def used(self, block: Any, stream: Any) -> None:
        """See `Runtime`. A stream keeps the blocks that it uses until it is synchronized."""
        stream.holds.append(block)

    def staging(self, nbytes: int) -> NDArray[np.uint8] | None:
        """See `Runtime`; the calling thread may use the memory until its next call."""
        buffer: NDArray[np.uint8] | None = getattr(self._thread, "staging", None)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self._thread.staging = np.zeros(max(nbytes, 1), np.uint8)
        return buffer[:nbytes]

    def drop_staging(self) -> None:
        """See `Runtime`."""
        self._thread.staging = None

    def stream(self, priority: int) -> Any:
        """See `Runtime`."""
        return _Engine(self)

    def close_stream(self, stream: Any) -> None:
        """See `Runtime`."""
        stream.put(None)

    def write(self, stream: Any, to: int, data: Any, *, lent: bool = False) -> None:
        """See `Runtime`."""
        raw = np.frombuffer(data, np.uint8)
        stream.put((view_of(to, raw.nbytes, np.uint8), raw if lent else raw.copy()) if raw.nbytes else ())

    def fetch(self, stream: Any, to: NDArray[np.uint8], source: int) -> None:
        """See `Runtime`."""
        stream.put((to, view_of(source, to.nbytes, np.uint8)) if to.nbytes else ())

    def read(self, stream: Any, to: NDArray[np.uint8], source: int) -> None:
        """See `Runtime`."""
        self.fetch(stream, to, source)
        self.synchronize(stream)

    def copy(self, stream: Any, to: int, source: int, nbytes: int) -> None:
        """See `Runtime`."""
        stream.put((view_of(to, nbytes, np.uint8), view_of(source, nbytes, np.uint8)) if nbytes else ())

    def fill(self, stream: Any, to: int, item: bytes, count: int) -> None:
        """See `Runtime`."""
        self.synchronize(stream)
        super().fill(stream, to, item, count)

    def launch(self, stream: Any, launch: Any, arguments: Any) -> None:
        """See `Runtime`. The next synchronization of the stream reports a failed kernel."""
        run = super().launch

        def launched() -> None:
            try:
                run(stream, launch, arguments)
            except BaseException as error:
                stream.failure = error

        stream.put(launched)

    def call(self, stream: Any, function: Any, arguments: Any, options: Any) -> Any:
        """See `Runtime`."""
        self.synchronize(stream)
        return super().call(stream, function, arguments, options)

    def mark(self, stream: Any, timing: bool) -> Any:
        """See `Runtime`."""
        event = _Mark()
        stream.put(event)
        return event

    def reached(self, mark: Any) -> bool:
        """See `Runtime`."""
        return bool(mark.event.is_set())

    def reach(self, mark: Any, timeout: float) -> bool:
        """See `Runtime`."""
        return bool(mark.event.wait(timeout))

    def after(self, stream: Any, mark: Any) -> None:
        """See `Runtime`."""
        stream.put(mark.event)

    def elapsed(self, mark: Any, earlier: Any) -> float:
        """See `Runtime`."""
        return float(mark.time - earlier.time)

    def synchronize(self, stream: Any) -> None:
        """See `Runtime`."""
        held, stream.holds = stream.holds, []
        mark = self.mark(stream, False)
        if not mark.event.wait(600):
            raise TimeoutError("an emulated copy engine makes no progress")
        held.clear()
        failure, stream.failure = stream.failure, None
        if failure is not None:
            raise failure


class _Mark:
    def __init__(self) -> None:
        self.event = threading.Event()
        self.time = 0.0


class _Engine:
    """A stream: a thread that executes copies one after another."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._free = 0.0
        self.holds: list[Any] = []
        self.failure: BaseException | None = None
        self.put = self._items.put
        threading.Thread(target=self._work, name="warpwell emulated copies", daemon=True).start()

    def _work(self) -> None:
        while (item := self._items.get()) is not None:
            if isinstance(item, _Mark):
                item.time = time.perf_counter()
                item.event.set()
            elif isinstance(item, threading.Event):
                item.wait(600)
            elif callable(item):
                time.sleep(self._device.chance.uniform(0, self._device.jitter))
                item()
            elif item:
                to, source = item
                time.sleep(self._device.chance.uniform(0, self._device.jitter))
                start = time.perf_counter()
                to[:] = source
                self._device.copies += 1
                self._free = max(start, self._free) + to.nbytes / self._device.bandwidth
                while (left := self._free - time.perf_counter()) > 0:
                    time.sleep(left if left > 1e-4 else 0)
