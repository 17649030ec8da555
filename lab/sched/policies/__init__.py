"""Policies that exist only for comparison: the baselines of the patent's background section.

===========  ===============================================================================================
chimera.py   even shares of the device, and preemption by switch, drain or flush under a latency bound
smk_drf.py   simultaneous multikernel: shares of every multiprocessor by dominant resource fairness
===========  ===============================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from warpwell.scheduler import POLICIES, Policy
from warpwell.scheduler.policies import policy

from .chimera import Chimera
from .smk_drf import SmkDrf

BASELINES: dict[str, Callable[..., Policy]] = {"chimera": Chimera, "smk-drf": SmkDrf}
"""Policies that a scheduler does not offer, by name."""
NAMES = (*POLICIES, *BASELINES)
"""Names of all policies."""


def make_policy(name: str, **options: Any) -> Policy:
    """Return a new policy of `NAMES`.

    Raises
    ------
    ArgumentError
        The name is unknown, or the policy does not have an option.
    """
    return BASELINES[name](**options) if name in BASELINES else policy(name, **options)
