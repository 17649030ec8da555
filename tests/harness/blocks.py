"""Launches in blocks: kernels that tests of the CPU and of a GPU share, and drains on a GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import warpwell as ww
from warpwell import gpu
from warpwell.targets.blocks.control import CONTROL_WORDS, CURSOR, DONE, NEVER, STOP, TARGET, fresh
from warpwell.targets.primitives import barrier, block_index, block_threads, shared_array, thread_index


@ww.kernel
def plane(x):
    i, j = gpu.grid(2)
    x[i, j] += 1000 * i + j


@ww.kernel(block=128)
def reverse(x, y):
    tile = shared_array(256, np.float64)
    block = block_index()
    for k in range(thread_index(), 256, block_threads()):
        tile[k] = x[256 * block + k]
    barrier()
    for k in range(thread_index(), 256, block_threads()):
        y[256 * block + k] += tile[255 - k]


class OnGpu:
    """A stream of a GPU, and the forms and the control record of a launch; subclasses make the last two."""

    def __init__(self) -> None:
        from warpwell.scheduler.executors.gpu import Gpu

        self.gpu = Gpu()
        self.gpu.enter()
        self.stream = self.gpu.new_stream()
        self.forms: Any = None
        self.control = 0

    def control_words(self) -> Any:
        return self.gpu.read_words(self.control, CONTROL_WORDS)

    def wait(self, event: Any) -> None:
        until = time.monotonic() + 30
        while not self.gpu.done(event):
            assert time.monotonic() < until
        self.gpu.synchronize(self.stream)

    def drains(self, seed: int, count: int) -> Iterator[Any]:
        """Drain and shrink at random until `count` blocks have run; yield the control words after each launch."""
        rng = np.random.default_rng(seed)
        resident = self.forms.resources("workers")["resident"]
        done = 0
        until = time.monotonic() + 60
        while done < count:
            assert time.monotonic() < until
            quota = int(rng.integers(1, resident + 1))
            self.gpu.write_words(self.stream, self.control, fresh(done, target=quota)[:DONE])
            self.forms.start(self.control, 0, resident, self.stream, int(rng.integers(1, 4)))
            event = self.gpu.mark(self.stream)
            aim = done + int(rng.integers(1, count // 10))
            while self.control_words()[CURSOR] < aim and not self.gpu.done(event):
                assert time.monotonic() < until
            if rng.random() < 0.5:
                # Let the youngest or the oldest workers leave.
                low = rng.random() < 0.5
                self.gpu.set_word(self.control + 8 * (TARGET if low else STOP), max(1, quota // 2))
                time.sleep(1e-3)
            self.gpu.set_word(self.control + 8 * STOP, NEVER)
            self.wait(event)
            state = self.control_words()
            assert min(state[CURSOR], count) == state[DONE]
            done = int(state[DONE])
            yield state
