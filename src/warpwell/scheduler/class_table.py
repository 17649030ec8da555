"""ClassTable: rates by class alone, as an H100 has them."""

from __future__ import annotations

from collections.abc import Sequence

from .rate_model import Points, RateModel, between, kind_of, on_each
from .residency import Resident, part_of
from .task import Kind

# Measured on an H100 (132 multiprocessors): a streaming kernel, 3,140 GB/s alone, and an FMA-bound one, in one window.
MEMORY_BY_PROCESSORS: Points = ((0.0, 0.0), (16 / 132, 0.70), (32 / 132, 1.0), (1.0, 1.0))
"""Rate of a memory-intensive kernel by its part of the multiprocessors: a quarter of them saturates the memory."""
MEMORY_BY_BLOCKS: Points = ((0.0, 0.0), (1 / 8, 1.0), (1.0, 1.0))
COMPUTE_BY_BLOCKS: Points = ((0.0, 0.0), (1 / 4, 0.98), (1.0, 1.0))
"""Rate by the part of its resident blocks that a kernel has on every multiprocessor: few hide all latency."""
STARVED: Points = ((0.0, 1.0), (0.25, 0.22), (0.5, 0.02), (0.75, 0.01), (1.0, 0.01))
"""Rate of a memory-intensive kernel launched after a compute-intensive one, by the share of blocks of the latter."""
BESIDE_MEMORY = 0.94
"""Rate of a compute-intensive kernel beside a memory-intensive one that is older."""
# Not measured for the table's kernels: the order of the source is kept (compute with compute is better than memory with
# memory), with a small gain and a small loss. A measured `Matrix` replaces both.
BESIDE_COMPUTE = (0.95, 0.10)
MEMORY_LOSS = 0.04


class ClassTable(RateModel):
    """Rates by class alone: memory- or compute-intensive, in both orders of residency, as measured on an H100.

    A kernel that does not need all multiprocessors (`Profile.need`) disturbs others, and is disturbed, in proportion
    to what overlaps. More than two are composed of their pairs. Unmeasured: two compute-intensive kernels (0.95 and
    0.10 at full size), two memory-intensive ones (0.48 each).
    """

    name = "class table (H100)"

    def evaluate(self, residents: Sequence[Resident]) -> list[float]:
        """Return rates as products over pairs."""
        rates = [self.alone(r) for r in residents]
        for j in range(1, len(residents)):
            for i in range(j):
                older, newer = self._pair(residents[i], residents[j])
                rates[i] *= older
                rates[j] *= newer
        return rates

    def alone(self, resident: Resident) -> float:
        """Return the rate that its blocks and its multiprocessors allow, with nothing beside it."""
        memory = kind_of(resident.profile) is Kind.MEMORY
        rate = between(MEMORY_BY_BLOCKS if memory else COMPUTE_BY_BLOCKS, on_each(resident, self.capacity))
        if resident.partition is not None:
            part = part_of(resident.partition, self.capacity) / (resident.profile.need or 1.0)
            rate *= between(MEMORY_BY_PROCESSORS, part) if memory else min(1.0, part)
        return rate

    def _pair(self, older: Resident, newer: Resident) -> tuple[float, float]:
        """Return the factors by which two kernels slow each other."""
        first, second = kind_of(older.profile), kind_of(newer.profile)
        apart = older.partition != newer.partition and older.partition is not None and newer.partition is not None
        n0, n1 = self._needs(older), self._needs(newer)
        if first is second is Kind.MEMORY:
            demand = between(MEMORY_BY_PROCESSORS, n0) + between(MEMORY_BY_PROCESSORS, n1)
            if demand <= 1:
                return 1.0, 1.0
            each = (1 - MEMORY_LOSS * (demand - 1)) / demand
            return each, each
        if apart:
            return 1.0, 1.0
        free = min(1.0, max(0.0, 1 - n0) / n1) if n1 else 1.0
        if first is second:
            return 1 - (1 - BESIDE_COMPUTE[0]) * n1, max(BESIDE_COMPUTE[1], free)
        if first is Kind.MEMORY:
            return 1.0, 1 - (1 - BESIDE_MEMORY) * n0
        return 1.0, max(between(STARVED, on_each(older, self.capacity)), between(MEMORY_BY_PROCESSORS, free))

    def _needs(self, resident: Resident) -> float:
        return min(resident.profile.need, part_of(resident.partition, self.capacity))
