"""Chimera: even shares of the device, and preemption by switch, drain or flush under a latency bound."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ...scheduler.decision import SOURCE, SourceModel
from ...scheduler.policies.order import at_least_one
from ...scheduler.policies.sharing import age, alone, grow, highest, preemptible, share, standing, stopping
from ...scheduler.policy import Decision, Policy, Preempt, View
from ...scheduler.task import PREEMPTED, Job


class Chimera(Policy):
    """Kernels of higher priority make those of lower leave, in the way that loses least under a bound of latency.

    Below the limit the device is divided evenly: running kernels make room at block ends. At the limit, one that waits
    with a higher priority replaces the one with the lowest. The way is chosen from those that the executor has: a drain
    loses nothing and takes the rest of a block; a switch takes and loses the time to save the blocks; a flush
    (idempotent kernels) takes no time and loses what the blocks have run. (The original chooses for each
    multiprocessor by how far its blocks are; block ends are all that stock hardware shows, so this is by expectation.)

    Parameters
    ----------
    bound : float
        Seconds that a preemption may take, if any way is that fast.
    patience : int
        How many others may pass before waiting counts as one more priority.
    model : SourceModel, optional
        What a switch costs.
    """

    name = "chimera"
    adjusts = True

    def __init__(self, *, bound: float = 15e-6, patience: int = 32, model: SourceModel = SOURCE) -> None:
        self.bound = bound
        self.patience = at_least_one("patience", patience)
        self.model = model

    def bucket(self, job: Job) -> Hashable:
        """Group by priority and tenant, and preempted or new."""
        return job.priority, job.task.tenant, job.state is PREEMPTED

    def decide(self, view: View) -> list[Decision]:
        """Launch the highest, or make room for it."""
        jobs = highest(view, self.patience)
        if not jobs:
            return grow(view)
        job = min(jobs, key=lambda j: (j.state is not PREEMPTED, age(j)))
        if len(view.running) < view.limit:
            return share(view, job, {"rule": "priority", "priority": standing(view, job)})
        if stopping(view):
            return []
        # Each preemption counts as one more priority, so that nobody is made to leave forever.
        victims = [j for j in view.running if preemptible(j)]
        if not victims:
            return []
        victim = min(victims, key=lambda j: (standing(view, j) + j.preemptions, -j.arrival, -j.number))
        if standing(view, victim) + victim.preemptions >= standing(view, job):
            return []
        mode, why = self.way(view, victim)
        return [Preempt(victim, mode, job, {"rule": "priority", **why})]

    def way(self, view: View, victim: Job) -> tuple[str, dict[str, Any]]:
        """Return how to make a job leave, and the expected latencies and losses in seconds that decided.

        A loss is the time of the whole device that is spent on nothing.
        """
        profile, capacity = victim.task.profile, view.capacity
        resident = alone(victim, capacity)
        block = (profile.seconds or 0.0) * min(1.0, resident / victim.task.blocks)
        ways = {"drain": (block / 2, 0.0)}
        if "switch" in capacity.modes:
            cycles = self.model.preempt_cycles(profile.miss_rate, profile.registers, profile.shared, resident)
            ways["switch"] = (cycles / capacity.clock, 2 * cycles / capacity.clock)
        if "flush" in capacity.modes and victim.task.idempotent:
            ways["flush"] = (0.0, block / 2)
        fast = [mode for mode, (latency, _) in ways.items() if latency <= self.bound]
        if fast:
            mode = min(fast, key=lambda m: ways[m][1])
        else:
            mode = min(ways, key=lambda m: ways[m][0])
        return mode, {"bound": self.bound, "ways": {m: list(w) for m, w in ways.items()}}
