"""ClockGpu: a GPU whose kernels do nothing for a fixed time, to measure the scheduler's own cost.

Launches, events and queries are native and hold no interpreter lock: as on a GPU, only the scheduler's threads need it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from lab.testing.fake_gpu import FakeForms, FakeGpu
from warpwell.scheduler.executors.gpu import Gpu
from warpwell.scheduler.executors.launch_queues import FUNCTION, HANDLE_WORD, LaunchQueues
from warpwell.targets.native import native
from warpwell.targets.primitives import SYSTEM, clock_ns, load_relaxed, store_relaxed


@native
def _launch(row, _a, _b, _c, _d, _e):
    """Keep the stream of a row busy for additional nanoseconds."""
    stream = load_relaxed(row + 8 * HANDLE_WORD, SYSTEM)
    begins = max(clock_ns(), load_relaxed(stream, SYSTEM))
    store_relaxed(stream, begins + load_relaxed(row + FUNCTION, SYSTEM), SYSTEM)
    return 0


@native
def _record(event, stream, _a, _b, _c, _d):
    store_relaxed(event, load_relaxed(stream, SYSTEM), SYSTEM)
    return 0


@native
def _query(event, _a, _b, _c, _d, _e):
    return 0 if clock_ns() >= load_relaxed(event, SYSTEM) else 600


class ClockArray(np.ndarray):
    """An array with the launch fields of an array in device memory."""

    @property
    def gpu_data(self) -> Any:
        """The pointer attribute of numba-cuda arrays."""
        return _POINTER


_POINTER = SimpleNamespace(device_ctypes_pointer=SimpleNamespace(value=4096))


class ClockForms(FakeForms):
    """A kernel that takes `seconds` in each form of launch."""

    def __init__(self, blocks: Any, seconds: float) -> None:
        super().__init__(blocks, 4, True)
        self._kernel = np.zeros(9, np.int64)
        self._kernel[FUNCTION // 8] = int(1e9 * seconds)

    def plain_row(self) -> Any:
        """See `Forms`."""
        return self._kernel

    def workers_row(self, control: int, base: int, workers: int, chunk: int = 1) -> Any:
        """See `Forms`."""
        return self._kernel


class ClockGpu(FakeGpu):
    """Replaces `Gpu` for kernels whose results are unused.

    Parameters
    ----------
    seconds : float
        Duration of each kernel.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    @functools.cached_property
    def launch_queues(self) -> LaunchQueues:
        """See `Gpu`."""
        functions = [function.address for function in (_launch, _record, _query)]
        return LaunchQueues(functions, self.new_events, lambda priority: self._clock(), self.enter)

    def _clock(self) -> Any:
        return SimpleNamespace(handle=self.new_events(1)[0])

    def between(self, first: int, last: int) -> float:
        """See `Gpu`."""
        return self._seconds

    def forms(self, blocks: Any) -> Any:
        """See `Gpu`."""
        return ClockForms(blocks, self._seconds)

    def at_hand(self, launch: Any, args: Sequence[Any]) -> bool:
        """See `Gpu`."""
        return True

    launch_signature = Gpu.launch_signature

    def synchronize(self, stream: Any) -> None:
        """See `Gpu`."""
