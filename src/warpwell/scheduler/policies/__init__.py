"""Policies by name; see `policy`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ... import errors
from ..policy import Policy
from .chimera import Chimera
from .drf import SmkDrf
from .oracle import Oracle
from .order import FirstCome, LeftOver, Shortest, StreamPriority
from .orion import Orion
from .partition import BestPartition, EvenPartition
from .residency import MemoryFirst
from .source import Source
from .warpwell import Warpwell

POLICIES: dict[str, Callable[..., Policy]] = {
    "first-come": FirstCome,
    "left-over": LeftOver,
    "stream-priority": StreamPriority,
    "even-partition": EvenPartition,
    "best-partition": BestPartition,
    "memory-first": MemoryFirst,
    "chimera": Chimera,
    "smk-drf": SmkDrf,
    "orion": Orion,
    "shortest": Shortest,
    "source": Source,
    "source-no-preemption": partial(Source, preempts=False, name="source-no-preemption"),
    "source-no-pairing": partial(Source, pairs=False, name="source-no-pairing"),
    "source-no-cost": partial(Source, costs=False, name="source-no-cost"),
    "source-perfect": partial(Source, perfect=True, name="source-perfect"),
    "warpwell": Warpwell,
    "warpwell-no-preemption": partial(Warpwell, preempts=False, name="warpwell-no-preemption"),
    "warpwell-no-pairing": partial(Warpwell, pairs=False, name="warpwell-no-pairing"),
    "warpwell-no-cost": partial(Warpwell, costs=False, name="warpwell-no-cost"),
    "warpwell-perfect": partial(Warpwell, perfect=True, name="warpwell-perfect"),
    "oracle": Oracle,
}
"""What makes each policy; options are keywords of its class."""


def policy(name: str, **options: Any) -> Policy:
    """Make a policy.

    Parameters
    ----------
    name : str
        One of `POLICIES`.
    **options
        Parameters of its class.

    Raises
    ------
    ArgumentError
        There is no such policy, or it has no such option.
    """
    make = POLICIES.get(name)
    if make is None:
        raise errors.ArgumentError(f"there is no policy {name!r}: choose one of {', '.join(POLICIES)}", name="policy")
    try:
        return make(**options)
    except TypeError as error:
        raise errors.ArgumentError(
            f"policy {name!r}: {error}; see the parameters of its class", name="policy"
        ) from error
