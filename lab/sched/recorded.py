"""Recorded runs: traces that a GPU ran for `lab/bench/sched_share.py`, and their replay in the simulator.

A replay takes the measured pairs and the host time per decision of the recorded run.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from warpwell import errors
from warpwell.scheduler import Policy, Profile
from warpwell.scheduler.extend import Core, Kind, Request, Task

from .metrics import Metrics
from .policies import make_policy
from .rates import ClassTable, Matrix, Pair
from .replay import replay
from .simulator import HostDelays, Simulator

RESULTS = Path(__file__).parents[1] / "results" / "h200" / "sched"

STP, DECISION_MICROSECONDS = 0, 5
"""Columns of a recorded row."""
WORKERS = 0.96
"""Rate of a preemptible kernel on the H200, relative to the unmodified kernel."""
SECOND_CLASS_DELAY = 5e-3
"""Seconds from the first class to the second in traces whose names end in "first"."""


class RecordedRun(NamedTuple):
    """A run of `lab/bench/sched_share.py` on a GPU.

    Attributes
    ----------
    first_seed : int
        Seed of the first row of each trace.
    content : dict
        The content of the file.
    profiles : dict
        Measured profile of each kernel.
    pairs : Matrix
        Measured rates of pairs.
    """

    first_seed: int
    content: dict[str, Any]
    profiles: dict[str, Profile]
    pairs: Matrix

    @classmethod
    def read(cls, name: str, first_seed: int) -> RecordedRun:
        """Read a file in `RESULTS`."""
        content = json.loads((RESULTS / name).read_text())
        profiles = {
            kernel: Profile(Kind(kind), seconds, registers=1 << 15, threads=256, resident=resident, source="measured")
            for kernel, (seconds, kind, _, resident) in content["profiles"].items()
        }
        pairs = [Pair(a, b, tuple(rates), tuple(shares)) for a, b, rates, shares in content["pairs"]]
        return cls(first_seed, content, profiles, Matrix(pairs, ClassTable()))

    def rows(self, policy: str) -> dict[str, list[list[float]]]:
        """Return the recorded rows of a policy by trace, one row per seed."""
        return {title: rows for title, name, rows in self.content["figures"] if name == policy}

    def requests(self, title: str, number: int) -> list[Request]:
        """Return the requests of a trace as `lab/bench/sched_share.py` draws them from its seed `number`.

        Raises
        ------
        SchedulerError
            The kernels differ from those that the GPU ran.
        """
        count = self.content["count"]
        if title.endswith(" first"):
            both = ("stream", "logistic") if title == "memory first" else ("logistic", "stream")
            arrivals = [(name, SECOND_CLASS_DELAY * k) for k, name in enumerate(both) for _ in range(count // 2)]
        else:
            names, _, load = title.partition(", load ")
            classes = self._kernels_by_class(names)
            rng = np.random.default_rng(self.first_seed + number)
            order = [str(rng.choice(classes[k % 2])) for k in range(count)]
            rng.shuffle(order)
            times = np.zeros(count)
            if load:
                gap = sum(self.profiles[name].seconds or 0.0 for name in order) / count / float(load)
                times = np.cumsum(rng.exponential(gap, count))
            arrivals = list(zip(order, map(float, times), strict=True))
        if Counter(name for name, _ in arrivals) != self.content["work"][title][number]:
            raise errors.SchedulerError(f"the kernels of {title!r}, seed {number}, differ from the recorded ones")
        blocks = {name: profile[2] for name, profile in self.content["profiles"].items()}
        return [Request(name, [Task(name, blocks[name], self.profiles[name])], time) for name, time in arrivals]

    def _kernels_by_class(self, title: str) -> tuple[list[str], list[str]]:
        suite = [name for name in self.profiles if not name.startswith("random")]
        names = {
            "short": [name for name in suite if name not in ("stream", "logistic")],
            "complementary": ["stream", "logistic"],
            "random mix": [name for name in self.profiles if name.startswith("random")],
        }.get(title, suite)
        memory, compute = ([n for n in names if self.profiles[n].kind is kind] for kind in (Kind.MEMORY, Kind.COMPUTE))
        return {"memory only": (memory, memory), "compute only": (compute, compute)}.get(title, (memory, compute))

    def simulate(self, title: str, number: int, row: list[float], policy: str | Policy) -> Metrics:
        """Replay a trace in the simulator.

        Parameters
        ----------
        title : str
            Name of the trace.
        number : int
            Index of the seed.
        row : list of float
            The recorded row whose host time per decision the replay takes.
        policy : str or Policy
            Name of a policy, or a policy that has not run yet.
        """
        delays = HostDelays.of(1e-6 * row[DECISION_MICROSECONDS])
        executor = Simulator(self.pairs, mode="drain", host=delays, workers=WORKERS)
        made = make_policy(policy) if isinstance(policy, str) else policy
        return replay(self.requests(title, number), Core(executor, made, rates=self.pairs)).metrics()
