"""Policies that exist only for comparison: baselines of the patent's background section, and stream priorities.

==================  ===============================================================================================
chimera.py          even shares of the device, and preemption by switch, drain or flush under a latency bound
smk_drf.py          simultaneous multikernel: shares of every multiprocessor by dominant resource fairness
stream_priority.py  everything at once in streams, with priorities of streams
==================  ===============================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from warpwell.scheduler import Policy
from warpwell.scheduler.extend import POLICIES
from warpwell.scheduler.policies import policy

from .chimera import Chimera
from .smk_drf import SmkDrf
from .stream_priority import StreamPriority

BASELINES: dict[str, Callable[..., Policy]] = {"chimera": Chimera, "smk-drf": SmkDrf}
"""Baselines of the patent, by name."""
_LAB_POLICIES = {**BASELINES, "stream-priority": StreamPriority}
NAMES = (*POLICIES, *_LAB_POLICIES)
"""Names of all policies."""


def make_policy(name: str, **options: Any) -> Policy:
    """Return a new policy of `NAMES`.

    Raises
    ------
    ArgumentError
        The name is unknown, or the policy does not have an option.
    """
    return _LAB_POLICIES[name](**options) if name in _LAB_POLICIES else policy(name, **options)
