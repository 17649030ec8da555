"""Launches on a GPU: preparation (`Ahead`), control records (`Records`), and their `Order`."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Container
from typing import Any

import numpy as np

from ... import errors
from ...targets.blocks import BEGUN, CONTROL_WORDS, MIRROR, PINNED_BYTES, fresh, mirror_word
from ..task import Job, Placement
from .cuda_run import CudaRun

MAX_PREPARED = 64
"""Maximum number of tasks that are prepared before they are launched."""

RECORDS = 4096
"""Maximum number of tasks that have begun and not ended."""

RESET_BATCH = 128 // CONTROL_WORDS
"""Control records that one call resets: the driver takes fewer than 256 words."""

START_TIMEOUT_SECONDS = 1e-3
"""Time after a launch after which its workers are assumed to have started. No launch was observed to take as long."""


class Ahead:
    """Begins waiting tasks that need no copies and no compilation, while the executor is idle.

    Parameters
    ----------
    gpu : Gpu
    begin : callable
        ``begin(run)`` begins the arguments of a run and returns its error, if any.
    """

    def __init__(self, gpu: Any, begin: Callable[[CudaRun], BaseException | None]) -> None:
        self._gpu = gpu
        self._begin = begin
        self._coming: deque[Job] = deque(maxlen=MAX_PREPARED)
        self._made: dict[Job, CudaRun] = {}

    def note(self, job: Job) -> None:
        """Add a waiting job."""
        self._coming.append(job)

    def step(self, launched: Container[Job]) -> bool:
        """Prepare one job that is not among `launched`; return False if no job is left."""
        while self._coming:
            job = self._coming.popleft()
            if not job.is_waiting or job in launched or job in self._made:
                continue
            if self._gpu.at_hand(job.task.launch, job.task.arguments):
                run = CudaRun(job, Placement())
                if self._begin(run) is None:
                    self.keep(run)
                return True
        return False

    def keep(self, run: CudaRun) -> None:
        """Store a prepared run."""
        if len(self._made) < MAX_PREPARED:
            self._made[run.job] = run

    def drop(self, job: Job) -> None:
        """Forget a job that was cancelled before its launch."""
        self._made.pop(job, None)

    def take(self, job: Job, placement: Placement) -> CudaRun:
        """Return the run of a job, prepared or not."""
        run = self._made.pop(job, None) or CudaRun(job, placement)
        run.placement = placement
        return run


class Records:
    """A pool of initialized control records, so that a launch writes no words before its workers start.

    Progress is reported to pinned memory, so that it needs no copies. Records of ended tasks are reset in the
    background, as late as possible, because a stream may still wait for a word of such a record (`Order`).

    Parameters
    ----------
    gpu : Gpu
    """

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu
        # One allocation for all: freeing memory waits for every running kernel.
        self._slab = gpu.allocate(8 * CONTROL_WORDS * RECORDS)
        self._slab.write(0, np.tile(np.array(fresh(), np.int64), RECORDS))
        self._progress = gpu.allocate_shared(PINNED_BYTES * RECORDS)
        self._progress_words = self._progress.words
        self._mirror = mirror_word(self._progress.address, 1)
        self._first: int = self._slab.address
        self._ready: deque[int] = deque(self._slab.address + 8 * CONTROL_WORDS * k for k in range(RECORDS))
        self._used: deque[int] = deque()
        self._reset: tuple[Any, list[int]] | None = None
        # Keys: intervals at which workers report progress.
        self._spare: dict[int, int] = {}
        self._missing: set[int] = set()

    def take(self, blocks: int) -> int:
        """Return the address of an initialized record (`fresh`) for a task of `blocks` blocks."""
        interval = mirror_word(0, blocks)
        record = self._spare.pop(interval, None)
        self._missing.add(interval)
        if record is None:
            record = self._next()
            self._report_progress(record, interval)
        return record

    def step(self) -> bool:
        """Prepare a spare record; return False if none is missing or no record is ready."""
        if not self._missing or not self._ready:
            return False
        interval = self._missing.pop()
        if interval not in self._spare:
            record = self._ready.popleft()
            try:
                self._report_progress(record, interval)
            except errors.DeviceNotFoundError:  # `poll` reports the loss
                return False
            self._spare[interval] = record
        return True

    def _report_progress(self, record: int, interval: int) -> None:
        """Let workers report progress after they have read the address of the record."""
        number = self._number(record)
        self._progress_words[PINNED_BYTES // 8 * number] = 0
        self._gpu.set_word(record + 8 * MIRROR, self._mirror + PINNED_BYTES * number + interval)

    def progress(self, record: int) -> int:
        """Return a lower bound of the number of completed blocks of a record's task."""
        return int(self._progress_words[PINNED_BYTES // 8 * self._number(record)])

    def _number(self, record: int) -> int:
        return (record - self._first) // (8 * CONTROL_WORDS)

    def _next(self) -> int:
        if self._reset is not None and (not self._ready or self._gpu.done(self._reset[0])):
            event, made = self._reset
            self._reset = None
            while not self._gpu.done(event):
                time.sleep(10e-6)
            self._ready += made
        if self._reset is None and self._used and len(self._ready) <= 2 * RESET_BATCH:
            made = [self._used.popleft() for _ in range(min(RESET_BATCH, len(self._used)))]
            self._reset = self._gpu.reset_words(made, fresh()), made
        if not self._ready and self._reset is not None:
            return self._next()
        if not self._ready and self._spare:
            return self._spare.popitem()[1]
        if not self._ready:
            raise errors.SchedulerError(f"{RECORDS} tasks have begun and not ended: wait for some of them first")
        return self._ready.popleft()

    def put(self, record: int) -> None:
        """Return the record of a task that has ended."""
        self._used.append(record)


class Order:
    """Delays a kernel until the workers of the previous launch have started.

    Launches in two streams race for room on the device. If a memory-intensive kernel should be resident first but is
    not, a compute-intensive kernel leaves it almost no issue slots (see docs/scheduler.md).

    Parameters
    ----------
    gpu : Gpu
    """

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu
        self._before: weakref.ref[CudaRun] | None = None
        self._started_workers = 0
        self._time = 0.0

    def keep(self, run: CudaRun, stream: Any, now: float) -> None:
        """Push a wait into the stream of a run before its kernel, if the kernel might start too early."""
        before = None if self._before is None else self._before()
        if before is None or before is run or not before.runs or now - self._time >= START_TIMEOUT_SECONDS:
            return
        # A kernel of higher priority does not wait.
        if run.placement.priority <= before.placement.priority and before.is_launched():
            self._gpu.wait_word(stream, before.control + 8 * BEGUN, self._started_workers)

    def began(self, run: CudaRun, now: float) -> None:
        """Record that a run was launched, and not queued after another one."""
        # Without a quota, a run may wait long for room for all its workers, and gains nothing from being first.
        self._before = weakref.ref(run) if run.count and run.placement.workers is not None else None
        self._started_workers, self._time = run.top - run.never, now
