"""Policies of a scheduler, by name; `policy` creates one.

==================  =====================================================================================
sharing.py          helpers of all policies: quotas, rank of classes
order.py            launch in an order, never preempt: first-come, left-over
source.py           the source's rule: best combination of classes, preemption by its cost formula
priority.py         order of waiting jobs: priority with aging, within limits, then tenants by their use
live.py             how fast two kernels ran together, from the blocks that they completed
lanes.py            two lanes, one for each class: the compute-intensive kernel is always the younger
==================  =====================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ... import errors
from ..policy import Policy
from .lanes import Lanes
from .order import FirstCome, LeftOver
from .source import Source

POLICIES: dict[str, Callable[..., Policy]] = {
    "first-come": FirstCome,
    "left-over": LeftOver,
    "source": Source,
    "lanes": Lanes,
}
"""Constructors of policies, by name. Options are keywords of the class."""


def policy(name: str, **options: Any) -> Policy:
    """Create a policy.

    Parameters
    ----------
    name : str
        One of `POLICIES`.
    **options
        Parameters of its class.

    Raises
    ------
    ArgumentError
        The name or an option is unknown.
    """
    make = POLICIES.get(name)
    if make is None:
        raise errors.ArgumentError(f"unknown policy {name!r}: choose one of {', '.join(POLICIES)}", name="policy")
    try:
        return make(**options)
    except TypeError as error:
        raise errors.ArgumentError(
            f"policy {name!r}: {error}; see the parameters of its class", name="policy"
        ) from error
