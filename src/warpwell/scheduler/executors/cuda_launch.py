"""Launches on a GPU: tasks prepared before theirs (`Ahead`), `Records`, the time it takes (`Pace`), and `Order`."""

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

LEARN = 0.2
"""Weight of a new measurement."""

RELAUNCH = 300e-6
"""Seconds that a launch takes, until it has been measured."""

MOST = 64
"""Tasks that are prepared before they are launched, at most."""


RECORDS = 4096
"""Tasks that may have begun and not ended."""

BATCH = 128 // CONTROL_WORDS
"""Control records that are reset by one call: the driver takes fewer than 256 words."""

SOON = 1e-3
"""Seconds after a launch in which its workers may not have begun; none has been seen to take as long."""


class Ahead:
    """Begins tasks that wait, where that copies and compiles nothing, while the executor has nothing else to do.

    Parameters
    ----------
    gpu : Gpu
    begin : callable
        ``begin(run)`` begins the arguments of a run and returns what went wrong.
    """

    def __init__(self, gpu: Any, begin: Callable[[CudaRun], BaseException | None]) -> None:
        self._gpu = gpu
        self._begin = begin
        self._coming: deque[Job] = deque(maxlen=MOST)
        self._made: dict[Job, CudaRun] = {}

    def note(self, job: Job) -> None:
        """Learn that a job waits."""
        self._coming.append(job)

    def step(self, begun: Container[Job]) -> bool:
        """Prepare one job that is not among `begun`; return whether there was one."""
        while self._coming:
            job = self._coming.popleft()
            if not job.waits or job in begun or job in self._made:
                continue
            if self._gpu.at_hand(job.task.launch, job.task.arguments):
                run = CudaRun(job, Placement())
                if self._begin(run) is None:
                    self.keep(run)
                return True
        return False

    def keep(self, run: CudaRun) -> None:
        """Keep a run that is prepared."""
        if len(self._made) < MOST:
            self._made[run.job] = run

    def drop(self, *jobs: Job) -> None:
        """Forget jobs that were cancelled before their launch."""
        if self._made:
            for job in jobs:
                self._made.pop(job, None)

    def take(self, job: Job, placement: Placement) -> CudaRun:
        """Return the run of a job, prepared or not."""
        run = self._made.pop(job, None) or CudaRun(job, placement)
        run.placement = placement
        return run


class Records:
    """Control records for tasks that begin: no launch has to set words before its workers, or to copy any for progress.

    Those of tasks that have ended are reset in the background, and as late as can be: a stream may still be about to
    look at a word of one (`Order`).

    Parameters
    ----------
    gpu : Gpu
    """

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu
        # one block of memory for all: to free memory waits for every kernel that runs
        self._slab = gpu.allocate(8 * CONTROL_WORDS * RECORDS)
        self._slab.write(0, np.tile(np.array(fresh(), np.int64), RECORDS))
        self._told = gpu.allocate_shared(PINNED_BYTES * RECORDS)
        self._words = self._told.words
        self._mirror = mirror_word(self._told.address, 1)
        self._first: int = self._slab.address
        self._ready: deque[int] = deque(self._slab.address + 8 * CONTROL_WORDS * k for k in range(RECORDS))
        self._used: deque[int] = deque()
        self._reset: tuple[Any, list[int]] | None = None
        # by how often progress is told
        self._spare: dict[int, int] = {}
        self._wanted: set[int] = set()

    def take(self, blocks: int) -> int:
        """Return the address of a record as `fresh` says, for a task of so many blocks."""
        often = mirror_word(0, blocks)
        record = self._spare.pop(often, None)
        self._wanted.add(often)
        if record is None:
            record = self._next()
            self._tell(record, often)
        return record

    def step(self) -> bool:
        """Make a record ready in place of one that was taken; return whether there was one."""
        if not self._wanted or not self._ready:
            return False
        often = self._wanted.pop()
        if often not in self._spare:
            record = self._ready.popleft()
            try:
                self._tell(record, often)
            except errors.DeviceNotFoundError:  # `poll` says that it is lost
                return False
            self._spare[often] = record
        return True

    def _tell(self, record: int, often: int) -> None:
        """Let workers tell progress; they find the address when it is there."""
        number = self._number(record)
        self._words[PINNED_BYTES // 8 * number] = 0
        self._gpu.set_word(record + 8 * MIRROR, self._mirror + PINNED_BYTES * number + often)

    def progress(self, record: int) -> int:
        """Return how many blocks of a record's task have ended, or some less."""
        return int(self._words[PINNED_BYTES // 8 * self._number(record)])

    def _number(self, record: int) -> int:
        return (record - self._first) // (8 * CONTROL_WORDS)

    def _next(self) -> int:
        if self._reset is not None and (not self._ready or self._gpu.done(self._reset[0])):
            event, made = self._reset
            self._reset = None
            while not self._gpu.done(event):
                time.sleep(10e-6)
            self._ready += made
        if self._reset is None and self._used and len(self._ready) <= 2 * BATCH:
            made = [self._used.popleft() for _ in range(min(BATCH, len(self._used)))]
            self._reset = self._gpu.reset_words(made, fresh()), made
        if not self._ready and self._reset is not None:
            return self._next()
        if not self._ready and self._spare:
            return self._spare.popitem()[1]
        if not self._ready:
            raise errors.SchedulerError(f"{RECORDS} tasks have begun and not ended: let some end first")
        return self._ready.popleft()

    def give(self, record: int) -> None:
        """Give back the record of a task that has ended."""
        self._used.append(record)


class Pace:
    """How long it takes from the end of a task to the next launch, and the launch itself, as they were so far.

    Parameters
    ----------
    launching : float
        Seconds, until a launch has been measured.

    Attributes
    ----------
    launching : float
        Seconds of a launch.
    seconds : float
        Of both together.
    """

    def __init__(self, launching: float = RELAUNCH) -> None:
        self.launching = launching
        self._handing = 0.0
        self._free: float | None = None

    @property
    def seconds(self) -> float:
        """See the class."""
        return self.launching + self._handing

    def freed(self, now: float) -> float:
        """Note that a task has left or ended; return `now`."""
        self._free = now
        return now

    def launched(self, asked: float, now: float) -> None:
        """Note a launch that was asked for and is done."""
        self.launching += LEARN * (now - asked - self.launching)
        if self._free is not None:
            self._handing += LEARN * (asked - self._free - self._handing)
            self._free = None


class Order:
    """Lets a kernel begin when the workers of that before it have begun.

    Launches in two streams race, and who wins takes the room: a memory-intensive kernel that was to be resident first,
    and is not, gets next to nothing beside a compute-intensive one (see docs/scheduler.md).

    Parameters
    ----------
    gpu : Gpu
    """

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu
        self._before: weakref.ref[CudaRun] | None = None
        self._least = 0
        self._at = 0.0

    def keep(self, run: CudaRun, stream: Any, now: float) -> None:
        """Put a wait into the stream of a run, where its kernel might come too early. It is launched behind it."""
        before = None if self._before is None else self._before()
        if before is None or before is run or not before.runs or now - self._at >= SOON:
            return
        # who is more urgent does not wait
        if run.placement.priority <= before.placement.priority and before.is_launched():
            self._gpu.wait_word(stream, before.control + 8 * BEGUN, self._least)

    def began(self, run: CudaRun, now: float) -> None:
        """Note that a run was launched, and not behind another."""
        # one without a quota may find no room for all of its workers for long, and gains nothing by being first
        self._before = weakref.ref(run) if run.count and run.placement.workers is not None else None
        self._least, self._at = run.top - run.never, now
