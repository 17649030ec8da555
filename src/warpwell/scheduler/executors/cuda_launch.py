"""Launches on a GPU: tasks prepared before theirs (`Ahead`), the time it takes (`Pace`), and their order (`Order`)."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Container
from typing import Any

from ...targets.blocks.control import BEGUN
from ..task import Job, Placement
from .cuda_run import CudaRun

LEARN = 0.2
"""Weight of a new measurement."""

RELAUNCH = 300e-6
"""Seconds that a launch takes, until it has been measured."""

MOST = 64
"""Tasks that are prepared before they are launched, at most."""


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
        """Forget jobs that were cancelled before their launch, or are launched as others were."""
        if self._made:
            for job in jobs:
                self._made.pop(job, None)

    def take(self, job: Job, placement: Placement) -> CudaRun:
        """Return the run of a job, prepared or not."""
        run = self._made.pop(job, None) or CudaRun(job, placement)
        run.placement = placement
        return run


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
        self._at = 0.0

    def keep(self, run: CudaRun, stream: Any, now: float) -> None:
        """Put a wait into the stream of a run, where its kernel might come too early. It is launched behind it."""
        before = None if self._before is None else self._before()
        if before is not None and before is not run and before.runs and now - self._at < SOON:
            self._gpu.wait_word(stream, before.control + 8 * BEGUN, before.top)
        # one without a quota may find no room for all of its workers for long, and gains nothing by being first
        first = run.placement.workers is not None and run.form == "workers"
        self._before = weakref.ref(run) if first else None
        self._at = now
