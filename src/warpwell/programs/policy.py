"""`Programs`: which program has the device: priority with aging, then least use over weight, in time slices."""

from __future__ import annotations

from ..scheduler import Policy
from ..scheduler.extend import Decision, Hold, Job, Launch, Placement, Preempt, Priority, State, View

TIME_SLICE_SECONDS = 20e-3
"""Time for which a program has the device before programs of the same level can have it. Chosen with the H200 turns of
23 November, not varied since: a switch of programs costs about 0.3 ms."""

AGING_SECONDS = 1.0
"""Waiting time that raises the level of a program by one, so that no program starves. Chosen, not fitted."""


class Programs(Policy):
    """Give the device to the waiting program of the highest level; of equal levels, to the least use over weight.

    Programs of one tenant share its time equally. A lease of any level must leave if its turn lasts for the
    tenant's hold time while a program waits for that time.

    A lease that entered while no arbiter was alive comes first, because it already has the device.

    The level of a waiting program is the sum of its priority and its tenant's, plus one for each `AGING_SECONDS` of
    waiting. A program keeps the level at which it was launched for a time slice; after that, its level is the sum of
    the priorities.
    """

    name = "programs"

    def __init__(self) -> None:
        self._priority = Priority(
            tolerance_seconds=0.0, aging=lambda view, job: int((view.now - job.since) / AGING_SECONDS)
        )
        self._launch_levels: dict[int, int] = {}

    def bucket(self, job: Job) -> int:
        return job.number  # each program competes

    def decide(self, view: View) -> list[Decision]:
        waiting = view.waiting.heads()
        if not waiting:
            return []
        inside = [job for job in waiting if job.task.launch.is_inside]
        first = inside if inside and not view.running else self._priority.first(view, waiting)
        best = min(first, key=lambda job: (job.task.launch.used, job.since, job.number))
        level = self._priority.effective(view, best)
        why = {"level": level, "use": _use(view, best)[0] / view.capacity.processors}
        if len(view.running) < view.limit:
            self._launch_levels[best.number] = level
            best.task.launch.write_levels(level, self._priority.base(view, best))
            return [Launch(best, Placement(), {"rule": "priority", **why})]
        running = [job for job in view.running if job.state is State.RUNNING]
        for job in view.running:
            job.task.launch.precede(best.task.launch)
        if len(running) < len(view.running):
            return []  # a preempted program will leave soon
        victim = min(running, key=lambda job: (self._running_level(view, job), -_use(view, job)[0]))
        victim_level, resident = self._running_level(view, victim), view.now - victim.since
        why |= {"victim": victim.number, "victim_level": victim_level, "resident": resident}
        if level > victim_level:
            return [Preempt(victim, "drain", best, {"rule": "priority", **why})]
        waited = view.now - min(job.since for job in waiting)
        if victim.task.launch.is_lease and min(resident, waited) >= victim.task.launch.hold:
            return [Preempt(victim, "drain", best, {"rule": "hold time", **why})]
        if resident < TIME_SLICE_SECONDS:
            rule = "time slice" if level == victim_level else "fair share"
            return [Hold(best, {"rule": rule, **why}, again=TIME_SLICE_SECONDS - resident)]
        if level == victim_level and _use(view, best) <= _use(view, victim):
            return [Preempt(victim, "drain", best, {"rule": "time slice", **why})]
        return [Hold(best, {"rule": "fair share", **why}, again=TIME_SLICE_SECONDS)]

    def ended(self, job: Job, now: float) -> None:
        self._launch_levels.pop(job.number, None)

    def _running_level(self, view: View, job: Job) -> int:
        level = self._priority.base(view, job)
        is_in_slice = view.now - job.since < TIME_SLICE_SECONDS
        return max(level, self._launch_levels.get(job.number, level)) if is_in_slice else level


def _use(view: View, job: Job) -> tuple[float, float]:
    """Return the SM-seconds that the tenant of a job has used, divided by its weight; then the program's seconds."""
    program, seconds = job.task.launch, view.now - job.since
    clock: float = view.tenants[job.task.tenant].clock
    return clock, program.used + (0.0 if job.is_waiting else seconds)
