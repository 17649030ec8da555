"""Chimera (ASPLOS 2015): even shares of the device, and preemption by switch, drain or flush under a latency bound."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any

from warpwell.scheduler import Policy
from warpwell.scheduler.extend import Decision, Job, Preempt, State, View
from warpwell.scheduler.policies.sharing import age, grow, preemptible, share, stopping

BOUND_SECONDS = 15e-6
"""Longest preemption that a kernel of higher priority accepts: the bound of Chimera's evaluation."""


class Chimera(Policy):
    """Kernels in order of priority and arrival, each with an even share of the device.

    Below the limit, running kernels make room for a new one. At the limit, a kernel of higher priority replaces
    the kernel with the lowest. Of the techniques within the latency bound, the policy takes the technique with the
    smallest loss; if all are slower, the fastest:

    - A drain waits for the end of the resident blocks and loses nothing.
    - A switch takes the time to save the blocks, and loses this time and as much to restore them.
    - A flush takes no time and loses the work of the resident blocks. The kernel must be idempotent.

    The original chooses for each multiprocessor. Here all multiprocessors run the same waves of blocks, so one choice
    serves all of them. The rule has no aging: a kernel of low priority may wait forever.

    Parameters
    ----------
    bound : float
        Latency bound in seconds.
    idempotent : collection of str
        Names of idempotent kernels.
    """

    name = "chimera"
    starves = True
    watches = True
    adjusts = True

    def __init__(self, *, bound: float = BOUND_SECONDS, idempotent: Collection[str] = ()) -> None:
        self.bound = bound
        self.idempotent = frozenset(idempotent)

    def bucket(self, job: Job) -> Hashable:
        """Group by priority, and preempted or new."""
        return job.priority, job.state is State.PREEMPTED

    def decide(self, view: View) -> list[Decision]:
        """Launch the first kernel below the limit; at the limit, preempt a lower priority for it."""
        heads = view.waiting.heads()
        if not heads:
            return grow(view)
        first = min(heads, key=lambda job: (-job.priority, job.state is not State.PREEMPTED, *age(job)))
        if len(view.running) < view.limit:
            return share(view, first, {"rule": "even share"})
        victims = [job for job in view.running if preemptible(job) and job.priority < first.priority]
        if stopping(view) or not victims:
            return []
        victim = min(victims, key=lambda job: (job.priority, -job.arrival, -job.number))
        mode, why = self.technique(view, victim)
        return [Preempt(victim, mode, first, why)]

    def technique(self, view: View, victim: Job) -> tuple[str, dict[str, Any]]:
        """Return the technique that preempts a kernel, with the latency and loss in seconds of each for the log."""
        task, profile = victim.task, victim.task.profile
        width = min(profile.resident, task.blocks)
        if victim.placement is not None and victim.placement.workers is not None:
            width = min(width, victim.placement.workers)
        wave = (profile.seconds or 0.0) * min(profile.resident, task.blocks) / task.blocks
        elapsed = victim.done % width / width * wave
        techniques = {"drain": (wave - elapsed, 0.0)}
        if "switch" in view.capacity.modes:
            seconds = view.cost(victim, [job for job in view.running if job is not victim])
            techniques["switch"] = (seconds, 2 * seconds)
        if "flush" in view.capacity.modes and task.name in self.idempotent:
            techniques["flush"] = (0.0, elapsed)
        fast = {mode: costs for mode, costs in techniques.items() if costs[0] <= self.bound}
        mode = min(fast, key=lambda m: fast[m][1]) if fast else min(techniques, key=lambda m: techniques[m][0])
        return mode, {"rule": "priority", "bound": self.bound, "techniques": {m: [*c] for m, c in techniques.items()}}
