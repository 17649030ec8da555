"""Policies that comparisons need: those of other schedulers, an oracle, and ours without one of their parts.

==================  =====================================================================================
partition.py        multiprocessors of its own for each kernel: even-partition, best-partition
memory_first.py     memory-first: a memory-intensive kernel is resident before a compute-intensive one
chimera.py          chimera: a higher priority replaces a lower one, in the way that loses least
drf.py              smk-drf: quotas by dominant resource fairness
orion.py            orion: best effort beside a kernel of high priority and of the other class
oracle.py           oracle: tries all types that wait, with the truth; in the simulator only
==================  =====================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ...scheduler.policies import POLICIES as OWN
from ...scheduler.policies.source import Source
from ...scheduler.policies.warpwell import Warpwell
from ...scheduler.policy import Policy
from .chimera import Chimera
from .drf import SmkDrf
from .memory_first import MemoryFirst
from .oracle import Oracle
from .orion import Orion
from .partition import BestPartition, EvenPartition

POLICIES: dict[str, Callable[..., Policy]] = {
    "first-come": OWN["first-come"],
    "left-over": OWN["left-over"],
    "stream-priority": OWN["stream-priority"],
    "even-partition": EvenPartition,
    "best-partition": BestPartition,
    "memory-first": MemoryFirst,
    "chimera": Chimera,
    "smk-drf": SmkDrf,
    "orion": Orion,
    "shortest": OWN["shortest"],
    "source": Source,
    "source-no-preemption": partial(Source, preempts=False, name="source-no-preemption"),
    "source-no-pairing": partial(Source, pairs=False, name="source-no-pairing"),
    "source-no-cost": partial(Source, costs=False, name="source-no-cost"),
    "source-perfect": partial(Source, perfect=True, name="source-perfect"),
    "lanes": OWN["lanes"],
    "warpwell": Warpwell,
    "warpwell-no-preemption": partial(Warpwell, preempts=False, name="warpwell-no-preemption"),
    "warpwell-no-pairing": partial(Warpwell, pairs=False, name="warpwell-no-pairing"),
    "warpwell-no-cost": partial(Warpwell, costs=False, name="warpwell-no-cost"),
    "warpwell-perfect": partial(Warpwell, perfect=True, name="warpwell-perfect"),
    "oracle": Oracle,
}
"""What makes each policy that can be compared, the scheduler's own among them; `scheduler.policies.policy` looks here
for a name that is not its own."""
