"""Policies of a scheduler, by name; `policy` makes one. Those that only comparisons need are in a room above.

==================  =====================================================================================
sharing.py          helpers of all policies: quotas, partitions, rank of classes, standing with aging
order.py            launch in an order, never preempt: first-come, left-over, stream-priority, shortest
source.py           the source's rule: best combination of classes, preemption by its cost formula
standing.py         whose turn it is: priority with aging, within limits, then tenants by their use
live.py             how fast two kernels ran together, from the blocks that they ended
lanes.py            two lanes, one a class: the compute-intensive kernel is always the younger
arrangement.py      places for kernels that run together, with the best sum of rates
warpwell.py         ours: priority, tenants, aging, then the best arrangement in the best order
==================  =====================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ... import errors, registry
from ..policy import Policy
from .lanes import Lanes
from .order import FirstCome, LeftOver, Shortest, StreamPriority
from .source import Source
from .warpwell import Warpwell

POLICIES: dict[str, Callable[..., Policy]] = {
    "first-come": FirstCome,
    "left-over": LeftOver,
    "stream-priority": StreamPriority,
    "shortest": Shortest,
    "source": Source,
    "lanes": Lanes,
    "warpwell": Warpwell,
}
"""What makes each policy; options are keywords of its class."""


def policy(name: str, **options: Any) -> Policy:
    """Make a policy.

    Parameters
    ----------
    name : str
        One of `POLICIES`, or of the policies that are registered for comparisons.
    **options
        Parameters of its class.

    Raises
    ------
    ArgumentError
        There is no such policy, or it has no such option.
    """
    make = POLICIES.get(name)
    if make is None:
        others: dict[str, Callable[..., Policy]] = registry.load(registry.path_of("policies", "compared"))
        if name not in others:
            raise errors.ArgumentError(f"there is no policy {name!r}: choose one of {', '.join(others)}", name="policy")
        make = others[name]
    try:
        return make(**options)
    except TypeError as error:
        raise errors.ArgumentError(
            f"policy {name!r}: {error}; see the parameters of its class", name="policy"
        ) from error
