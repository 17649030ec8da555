"""Rates by class: how fast kernels run together, as their normalized IPC (ipc_shared / ipc_alone).

The hardware behaves as if the oldest resident warps issue first. So a memory-intensive kernel that was launched before
a compute-intensive one keeps its rate, and one launched after it starves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..task import COMPUTE, Job, Placement

T = TypeVar("T")

PAIR_RATES = {
    (True, False): (1.0, 0.94),
    (False, True): (1.0, 0.02),
    (False, False): (0.95, 0.10),
    (True, True): (0.48, 0.48),
}
"""Rates of the older and of the newer kernel of a pair, by whether each is memory-intensive. Each has half of the
device. Pairs of different classes were measured on an H100, with a streaming kernel and an FMA-bound one. Rates of
pairs of the same class were chosen: they keep the order of the source (compute with compute is better), with a small
gain and a small loss."""


class ClassRates:
    """Rates by class and order of residency only; satisfies `warpwell.scheduler.policy.Rates`.

    A kernel of unknown class counts as memory-intensive.
    """

    def together(self, jobs: Sequence[Job], placements: Sequence[Placement]) -> list[float]:
        """Return each job's rate; the first job was launched first."""
        is_memory = [job.task.profile.kind is not COMPUTE for job in jobs]
        return composed(is_memory, lambda older, newer: PAIR_RATES[older, newer])


def composed(kernels: Sequence[T], pair: Callable[[T, T], Sequence[float]]) -> list[float]:
    """Return the rates of kernels, the oldest first, if each kernel slows all others.

    ``pair(older, newer)`` returns the rates of two kernels. Slowdowns add up: three kernels that run at half of
    their rate in each pair get a third each.
    """
    slow = [1.0] * len(kernels)
    for j in range(1, len(kernels)):
        for i in range(j):
            for k, rate in zip((i, j), pair(kernels[i], kernels[j]), strict=True):
                slow[k] += 1.0 / rate - 1.0 if rate > 0 else math.inf
    return [1.0 / slowdown for slowdown in slow]
