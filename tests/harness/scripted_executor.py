"""ScriptedExecutor: a device in virtual time whose every number a test chooses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from warpwell.scheduler import Profile
from warpwell.scheduler.extend import Capacity, Ended, Executor, Job, Placement, Stopped, Task


class ScriptedExecutor(Executor):
    """Every kernel runs at the rate that it has alone, also with co-runners; a preemption takes no time or a set
    time.

    Parameters
    ----------
    capacity : Capacity, optional
    cost : float
        Actual and reported duration of a preemption in seconds.
    fails : mapping, optional
        By the task's name, the error that it ends with.
    refuses : mapping, optional
        By the task's name, the error that its launch raises.
    raises : mapping, optional
        By a method's name, the error that it raises, as "preempt".
    truth : mapping, optional
        What tasks are really like.
    queues : bool
        Whether it puts jobs behind others itself.

    Attributes
    ----------
    calls : list of tuple
        Every launch, preemption, resize and discard: ``("launch", number, placement)`` and so on.
    """

    def __init__(
        self,
        capacity: Capacity | None = None,
        *,
        cost: float = 0.0,
        fails: Mapping[str, BaseException] | None = None,
        refuses: Mapping[str, Exception] | None = None,
        raises: Mapping[str, Exception] | None = None,
        truth: Mapping[Task, Profile] | None = None,
        queues: bool = False,
    ) -> None:
        self.capacity = capacity or Capacity()
        self._cost = cost
        self._fails = fails or {}
        self._refuses = refuses or {}
        self._raises = raises or {}
        self._truth = {} if truth is None else truth
        self._queues = queues
        self._now = 0.0
        self._ends: dict[Job, float] = {}
        self._stops: dict[Job, float] = {}
        self._from: dict[Job, tuple[float, int]] = {}
        self._after: dict[Job, Job] = {}
        self.calls: list[tuple[object, ...]] = []

    def truth(self, task: Task) -> Profile:
        """Return what a task is really like."""
        return self._truth.get(task, task.profile)

    def launch(self, job: Job, placement: Placement) -> None:
        """Start a job."""
        self.calls.append(("launch", job.number, placement))
        assert job not in self._ends, f"{job.task.name} was launched while it ran"
        if job.task.name in self._refuses:
            raise self._refuses[job.task.name]
        self._begin(job, self._now)

    def launch_behind(self, job: Job, placement: Placement, predecessor: Job) -> bool:
        """Start a job when another one has ended or stopped."""
        if not self._queues:
            return False
        self.calls.append(("behind", job.number, predecessor.number))
        if job.task.name in self._refuses:
            raise self._refuses[job.task.name]
        self._after[predecessor] = job
        self._begin(job, min(self._ends.get(predecessor, self._now), self._stops.get(predecessor, math.inf)))
        return True

    def _begin(self, job: Job, time: float) -> None:
        self._from[job] = time, job.done
        self._ends[job] = time + (self.truth(job.task).seconds or 0.0) * job.left
        if job in self._after:
            self._begin(self._after[job], self._ends[job])

    def preempt(self, job: Job, mode: str = "drain") -> None:
        """Stop a job `cost` seconds from now, or at its end if that comes sooner."""
        self._call("preempt", job.number, mode)
        if self._from[job][0] > self._now:
            self._stops[job] = self._now
            predecessor = next((earlier for earlier, job_ in self._after.items() if job_ is job), None)
            if predecessor is not None:
                del self._after[predecessor]
                if job in self._after:
                    self._after[predecessor] = self._after.pop(job)
                    self._begin(self._after[predecessor], self._from[job][0])
        elif not (job.placement and job.placement.plain):
            self._stops[job] = min(self._now + self._cost, self._ends[job])
            if job in self._after:
                self._begin(self._after[job], self._stops[job])

    def resize(self, job: Job, workers: int | None, younger: bool = False) -> None:
        """Note it."""
        self._call("resize", job.number, workers)

    def _call(self, name: str, *details: object) -> None:
        self.calls.append((name, *details))
        if name in self._raises:
            raise self._raises[name]

    def discard(self, job: Job) -> None:
        """Note it."""
        self.calls.append(("discard", job.number))

    def progress(self, job: Job) -> int:
        """Return blocks in proportion to time."""
        began, done = self._from[job]
        seconds = self._ends[job] - began
        part = 1.0 if seconds <= 0 else max(0.0, min(1.0, (self._now - began) / seconds))
        return done + int((job.task.blocks - done) * part)

    def cost(self, victim: Job, residents: Sequence[Job]) -> float:
        """Return what was set."""
        return self._cost

    def poll(self) -> list[Ended | Stopped]:
        """Return what is due, in order of time."""
        due: list[tuple[float, int, Ended | Stopped]] = []
        for job, time in list(self._ends.items()):
            stop = self._stops.get(job)
            if time <= self._now and (stop is None or time <= stop):
                due.append((time, job.number, Ended(job, time, self._fails.get(job.task.name))))
            elif stop is not None and stop <= self._now:
                due.append((stop, job.number, Stopped(job, stop, min(self.progress(job), job.task.blocks - 1))))
        for _, _, event in due:
            del self._ends[event.job], self._from[event.job]
            self._after.pop(event.job, None)
            self._stops.pop(event.job, None)
        return [event for _, _, event in sorted(due, key=lambda entry: entry[:2])]

    def now(self) -> float:
        """Return the virtual time."""
        return self._now

    def wait(self, until: float | None) -> None:
        """Advance to the next event, or to `until`."""
        times = [*self._ends.values(), *self._stops.values()]
        if until is not None:
            times.append(until)
        if times:
            self._now = max(self._now, min(times))
