"""Watchdog: finds tasks that are stuck."""

from __future__ import annotations

from collections.abc import Iterable

from .. import errors
from .executor import Executor
from .task import Job


class Watchdog:
    """Looks whether blocks begin and end.

    A task that has a block in hand, and begins none and ends none for `seconds`, is stuck. Compiling, waiting for a
    place and waiting between two blocks are not. A task that runs whole shows nothing until it ends, so it is never
    stuck.

    Parameters
    ----------
    seconds : float or None
        None: nothing is stuck.

    Attributes
    ----------
    due : float or None
        When to look next, while something runs.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds = None if seconds is None else errors.checked_seconds(seconds, "stuck_after")
        self.due = None if seconds is None else 0.0
        self._seen: dict[Job, tuple[tuple[int, int], float]] = {}

    def look(self, running: Iterable[Job], executor: Executor) -> list[Job]:
        """Return the tasks that are stuck, each once; before `due`, none."""
        now = executor.now()
        if self.seconds is None or self.due is None or now < self.due:
            return []
        self.due = now + self.seconds / 4
        seen, self._seen = self._seen, {}
        stuck = []
        for job in running:
            if job.placement is not None and job.placement.plain:
                continue
            done, claimed = executor.progress(job), executor.claimed(job)
            if claimed <= done:
                continue
            sign, since = seen.get(job, ((-1, -1), now))
            if sign != (done, claimed):
                since = now
            if now - since >= self.seconds:
                stuck.append(job)
            else:
                self._seen[job] = ((done, claimed), since)
        return stuck

    def error(self, job: Job) -> errors.StallError:
        """Return what a stuck task fails with."""
        return errors.StallError(
            f"task {job.task.name!r} began no block and ended none for {self.seconds:g} s, with {job.done} of "
            f"{job.task.blocks} done: a thread of its kernel waits or loops forever (if its blocks take that long, "
            "make the scheduler with a larger stuck_after=)",
            kernel=job.task.name,
            seconds=self.seconds,
        )
