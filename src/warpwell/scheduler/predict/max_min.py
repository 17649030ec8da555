"""MaxMin: rates from two resources, issue slots and memory bandwidth."""

from __future__ import annotations

from collections.abc import Sequence

from ..executor import Capacity
from ..residency import Resident, part_of
from ..task import Kind, Profile
from .class_table import BESIDE_MEMORY, MEMORY_BY_PROCESSORS, ClassTable
from .rate_model import RateModel, between, kind_of


class MaxMin(RateModel):
    """Two resources: issue slots, which the older kernels take first, and memory bandwidth, which is shared max-min.

    A kernel at rate r takes r times what it takes alone (`Profile.compute`, `Profile.bandwidth`; where both are 0,
    those of its class, times `Profile.need`). Bandwidth is filled progressively: all rates rise together, until it is
    used up.

    Parameters
    ----------
    capacity : Capacity
    ordered : bool
        Whether issue slots go by age. If not, they are shared max-min too.
    """

    def __init__(self, capacity: Capacity | None = None, *, ordered: bool = True) -> None:
        super().__init__(capacity)
        self.ordered = ordered
        self.name = "two-resource max-min" + ("" if ordered else ", no order of residency")
        self._table = ClassTable(self.capacity)

    def of(self, residents: Sequence[Resident]) -> list[float]:
        """Return rates so that neither resource is exceeded."""
        caps = [self._table.alone(r) for r in residents]
        demands = [self.demand(r.profile) for r in residents]
        bandwidth = [d[1] for d in demands]
        rates = caps
        # Twice: kernels that lack issue slots leave bandwidth to others.
        for _ in range(2):
            filled = fill(bandwidth, caps, 1.0)
            rates = self._issue([d[0] for d in demands], filled, residents)
            caps = [r if r < f else c for r, f, c in zip(rates, filled, caps, strict=True)]
        return rates

    def demand(self, profile: Profile) -> tuple[float, float]:
        """Return what a kernel takes of issue slots and of bandwidth when it runs alone."""
        if profile.compute or profile.bandwidth:
            return profile.compute, profile.bandwidth
        if kind_of(profile) is Kind.MEMORY:
            return (1 - BESIDE_MEMORY) * profile.need, between(MEMORY_BY_PROCESSORS, profile.need)
        return profile.need, 0.05 * profile.need

    def _issue(self, demands: Sequence[float], rates: Sequence[float], residents: Sequence[Resident]) -> list[float]:
        found = list(rates)
        for partition in {r.partition for r in residents}:
            here = [i for i, r in enumerate(residents) if r.partition == partition]
            left = part_of(partition, self.capacity)
            if not self.ordered:
                for i, rate in zip(here, fill([demands[i] for i in here], [rates[i] for i in here], left), strict=True):
                    found[i] = rate
                continue
            for i in here:
                if demands[i] * rates[i] > left:
                    found[i] = left / demands[i]
                left = max(0.0, left - demands[i] * found[i])
        return found


def fill(demands: Sequence[float], caps: Sequence[float], capacity: float) -> list[float]:
    """Return max-min fair rates: each at most its cap, and the sum of rate times demand at most `capacity`."""
    rates = list(caps)
    open_ = [i for i, d in enumerate(demands) if d > 0 and caps[i] > 0]
    left = capacity
    while open_:
        level = left / sum(demands[i] for i in open_)
        small = [i for i in open_ if caps[i] <= level]
        if not small:
            for i in open_:
                rates[i] = level
            break
        for i in small:
            left -= caps[i] * demands[i]
        open_ = [i for i in open_ if caps[i] > level]
    return rates
