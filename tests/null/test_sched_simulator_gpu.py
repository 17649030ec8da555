"""The simulator beside a GPU: traces that an H200 has run, with the pairs and the host's times of that run."""

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from warpwell.scheduler import Capacity, Kind, Profile, Request, Task
from warpwell.scheduler.core import Core
from warpwell.scheduler.policies import POLICIES
from warpwell.scheduler.policies.lanes import Lanes
from warpwell.scheduler.predict.rates import ClassTable
from warpwell.study.rates import Matrix, Pair
from warpwell.study.replay import replay
from warpwell.study.simulator import HostDelays, Simulator

RUN = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "sched_share_h200.json").read_text())
LAUNCH, DECISION = 60e-6, 5
"""Seconds of a launch; the column of a decision's microseconds."""
LATER = 5e-3
"""Seconds from the first class to the second, where the order matters."""
KNOWN = {("compute first", "source"): 0.07}
"""Where the error is larger: workers that come back beside older ones lie worse than where both begin."""

PROFILES = {
    name: Profile(Kind(kind), seconds, registers=1 << 15, threads=256, resident=resident, source="measured")
    for name, (seconds, kind, _, resident) in RUN["profiles"].items()
}
PAIRS = Matrix([Pair(a, b, tuple(rates), tuple(shares)) for a, b, rates, shares in RUN["pairs"]], ClassTable())


def lanes_of(title: str) -> tuple[list[str], list[str]]:
    suite = [name for name in PROFILES if not name.startswith("random")]
    names = {
        "short": [name for name in suite if name not in ("stream", "logistic")],
        "complementary": ["stream", "logistic"],
        "random mix": [name for name in PROFILES if name.startswith("random")],
    }.get(title, suite)  # fmt: skip
    memory, compute = ([name for name in names if PROFILES[name].kind is kind] for kind in (Kind.MEMORY, Kind.COMPUTE))
    return {"memory only": (memory, memory), "compute only": (compute, compute)}.get(title, (memory, compute))


def trace(title: str, seed: int) -> list[Request]:
    """Return the requests as `benchmarks/sched_share.py` draws them."""
    if title.endswith(" first"):
        sides = ("stream", "logistic") if title == "memory first" else ("logistic", "stream")
        each = [(name, LATER * k) for k, name in enumerate(sides) for _ in range(RUN["count"] // 2)]
        return [Request(name, [Task(name, RUN["profiles"][name][2], PROFILES[name])], at) for name, at in each]
    names, _, load = title.partition(", load ")
    lanes, count = lanes_of(names), RUN["count"]
    rng = np.random.default_rng(seed)
    order = [str(rng.choice(lanes[k % 2])) for k in range(count)]
    rng.shuffle(order)
    if not title.endswith(("0.5", "0.9", "1.5")):
        arrivals = np.zeros(count)
    else:
        gap = sum(PROFILES[name].seconds or 0.0 for name in order) / count / float(load)
        arrivals = np.cumsum(rng.exponential(gap, count))
    return [Request(name, [Task(name, RUN["profiles"][name][2], PROFILES[name])], float(at))
            for name, at in zip(order, arrivals, strict=True)]  # fmt: skip


def simulated(title: str, policy: str, seed: int, row: list[float]) -> float:
    step = row[DECISION] * 1e-6
    host = HostDelays(max(0.0, step - LAUNCH), min(step, LAUNCH), signal=15e-6, notice=20e-6)
    simulator = Simulator(PAIRS, Capacity(), mode="drain", host=host, workers=0.96)
    its = Lanes(soon=0) if policy == "lanes" else policy  # nothing was launched ahead in that run
    return replay(trace(title, seed), Core(simulator, its, rates=PAIRS)).metrics().stp


@pytest.mark.parametrize(
    ("title", "policy", "rows"),
    [
        pytest.param(*its, id=f"{its[0]}-{its[1]}")
        for its in RUN["figures"]
        if its[1] in POLICIES
    ],
)
def test_the_simulator_is_within_a_twentieth_of_the_gpu(title: str, policy: str, rows: list[Any]) -> None:
    found = [simulated(title, policy, seed, row) / row[0] - 1.0 for seed, row in enumerate(rows)]
    assert abs(statistics.median(found)) < KNOWN.get((title, policy), 0.05), found


def test_the_same_trace_runs_alike_twice() -> None:
    row = RUN["figures"][0][2][0]
    assert simulated("seven", "lanes", 1, row) == simulated("seven", "lanes", 1, row)
