"""MemoryFirst: a memory-intensive kernel is always resident before the compute-intensive one beside it."""

from __future__ import annotations

from ...scheduler.policies.order import at_least_one
from ...scheduler.policies.sharing import age, at_most, demand, grow, preemptible, quota, share, stopping
from ...scheduler.policy import Decision, Launch, Policy, Preempt, Resize, View
from ...scheduler.task import MEMORY, PREEMPTED, Job


class MemoryFirst(Policy):
    """Pairs of a memory- and a compute-intensive kernel on the same multiprocessors, the former launched first.

    The hardware lets the oldest resident warps issue first, so the memory-intensive kernel keeps its rate and the
    other one loses little; in the other order it starves. One that arrives while compute-intensive kernels run makes
    them leave (no cost test), and they are launched again after it.

    Parameters
    ----------
    part : float
        Part of the device that the memory-intensive kernel of a pair gets.
    patience : int
        How many others may be launched before one that waits, whatever its class.
    most : int
        How often a kernel is made to leave, at most.
    """

    name = "memory-first"
    watches = True
    adjusts = True

    def __init__(self, *, part: float = 0.25, patience: int = 32, most: int = 16) -> None:
        self.part = part
        self.patience = at_least_one("patience", patience)
        self.most = most

    def decide(self, view: View) -> list[Decision]:
        """Launch the complement of what runs, memory first."""
        running = view.running
        if len(running) >= view.limit or stopping(view):
            return []
        heads = view.waiting.heads()
        if not heads:
            return grow(view)
        memory = sum(_memory(j) for j in running)
        job = min(heads, key=lambda j: (
            view.waiting.passed(j) < self.patience,
            # What there is less of is wanted; on an idle device, memory.
            _memory(j) is (memory > len(running) - memory),
            j.state is not PREEMPTED,
            age(j),
        ))  # fmt: skip
        if _memory(job) and running and not memory and all(
            preemptible(j) and j.preemptions < self.most for j in running
        ):  # fmt: skip
            return [Preempt(j, "drain", job, {"rule": "memory first"}) for j in running]
        if len(running) == 1 and _memory(job) is not _memory(running[0]):
            return self._pair(view, running[0], job)
        return share(view, job, {"rule": "memory first", "beside": [j.number for j in running]})

    def _pair(self, view: View, first: Job, second: Job) -> list[Decision]:
        capacity = view.capacity
        why = {"rule": "memory first", "beside": [first.number]}
        if demand(first, capacity) + demand(second, capacity) <= 1.0 or not preemptible(first):
            return share(view, second, why)
        part = self.part if _memory(first) else 1.0 - self.part
        return [
            Resize(first, quota(first, part, capacity), {"rule": "makes room", "for": second.number}),
            Launch(second, at_most(quota(second, 1.0 - part, capacity)), why),
        ]


def _memory(job: Job) -> bool:
    """Whether it is memory-intensive; one of unknown class counts as compute-intensive, whose rate order spares."""
    return job.task.profile.kind is MEMORY
