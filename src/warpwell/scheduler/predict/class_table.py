"""ClassTable: rates by class alone, as an H100 has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..executor import Capacity
from ..residency import REMEMBERED, Resident, part_of
from ..task import MEMORY
from .rate_model import Points, RateModel, between, kind_of

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

    def __init__(self, capacity: Capacity | None = None) -> None:
        super().__init__(capacity)
        self._facts: dict[tuple[bool, float, float, str | None], _Facts] = {}
        self._pairs: dict[tuple[_Facts, _Facts], tuple[float, float]] = {}

    def of(self, residents: Sequence[Resident]) -> list[float]:
        """Return rates as products over pairs."""
        if len(residents) == 1:
            return [(residents[0].facts or self._find(residents[0])).alone]
        facts: list[_Facts] = [resident.facts or self._find(resident) for resident in residents]
        if len(facts) == 2:
            one, other = facts
            pair = self._pairs.get((one, other))
            if pair is None:
                if len(self._pairs) >= REMEMBERED:
                    self._pairs.clear()
                older, newer = _pair(one, other)
                pair = self._pairs[one, other] = one.alone * older, other.alone * newer
            return [*pair]
        rates = [fact.alone for fact in facts]
        for j in range(1, len(facts)):
            for i in range(j):
                older, newer = _pair(facts[i], facts[j])
                rates[i] *= older
                rates[j] *= newer
        return rates

    def alone(self, resident: Resident) -> float:
        """Return the rate that its blocks and its multiprocessors allow, with nothing beside it."""
        rate: float = (resident.facts or self._find(resident)).alone
        return rate

    def _find(self, resident: Resident) -> _Facts:
        # Kernels of one class that need as much are alike here: few are, of thousands in a trace, any different.
        figures = kind_of(resident.profile) is MEMORY, resident.profile.need, resident.share, resident.partition
        found = self._facts.get(figures)
        if found is None:
            if len(self._facts) >= REMEMBERED:
                self._facts.clear()
            found = self._facts[figures] = self._derive(*figures)
        resident.facts = found
        return found

    def _derive(self, memory: bool, need: float, share: float, partition: str | None) -> _Facts:
        part = part_of(partition, self.capacity)
        on_each = min(1.0, share / part)
        rate = between(MEMORY_BY_BLOCKS if memory else COMPUTE_BY_BLOCKS, on_each)
        if partition is not None:
            reach = part / (need or 1.0)
            rate *= between(MEMORY_BY_PROCESSORS, reach) if memory else min(1.0, reach)
        need = min(need, part)
        return _Facts(memory, rate, need, between(MEMORY_BY_PROCESSORS, need), between(STARVED, on_each), partition)


@dataclass(eq=False, slots=True)
class _Facts:
    """What a pair's factors depend on; `leaves` is what a compute-intensive kernel leaves to a younger memory-bound."""

    memory: bool
    alone: float
    need: float
    bandwidth: float
    leaves: float
    partition: str | None


def _pair(older: _Facts, newer: _Facts) -> tuple[float, float]:
    """Return the factors by which two kernels slow each other."""
    if older.memory and newer.memory:
        demand = older.bandwidth + newer.bandwidth
        if demand <= 1:
            return 1.0, 1.0
        each = (1 - MEMORY_LOSS * (demand - 1)) / demand
        return each, each
    if older.partition != newer.partition and older.partition is not None and newer.partition is not None:
        return 1.0, 1.0
    if older.memory:
        return 1.0, 1 - (1 - BESIDE_MEMORY) * older.need
    free = max(0.0, 1 - older.need)
    free = 1.0 if free >= newer.need else free / newer.need
    if not newer.memory:
        return 1 - (1 - BESIDE_COMPUTE[0]) * newer.need, max(BESIDE_COMPUTE[1], free)
    return 1.0, 1.0 if free == 1.0 else max(older.leaves, between(MEMORY_BY_PROCESSORS, free))
