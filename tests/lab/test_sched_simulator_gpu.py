"""The simulator beside a GPU: traces that an H200 has run, with the pairs and the host's times of that run."""

import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from lab.sched.rates import Matrix, Pair
from lab.sched.replay import replay
from lab.sched.simulator import HostDelays, Simulator
from warpwell.scheduler import Capacity, Kind, Profile, Request, Task
from warpwell.scheduler.core import Core
from warpwell.scheduler.policies import POLICIES
from warpwell.scheduler.predict.rates import ClassTable

RESULTS = Path(__file__).parents[2] / "lab" / "results" / "h200" / "sched"
DECISION = 5
"""The column of a decision's microseconds."""
WORKERS = 0.96
LATER = 5e-3
"""Seconds from the first class to the second, where the order matters."""


class Run(NamedTuple):
    """What `lab/bench/sched_share.py` wrote, and its first seed."""

    first: int
    said: dict[str, Any]
    profiles: dict[str, Profile]
    pairs: Matrix


def run(name: str, first: int) -> Run:
    said = json.loads((RESULTS / name).read_text())
    profiles = {
        name: Profile(Kind(kind), seconds, registers=1 << 15, threads=256, resident=resident, source="measured")
        for name, (seconds, kind, _, resident) in said["profiles"].items()
    }
    pairs = [Pair(a, b, tuple(rates), tuple(shares)) for a, b, rates, shares in said["pairs"]]
    return Run(first, said, profiles, Matrix(pairs, ClassTable()))


ALL, NOW = run("sched_ten_h200.json", 100), run("sched_ten_later_h200.json", 400)
PEERS = run("sched_peers_h200.json", 0)


def figures() -> list[Any]:
    """Return what is compared. `lanes` has changed since the first run: the later one has what it is now."""
    rows: dict[tuple[str, str], tuple[Run, Any]] = {}
    for of, policies in ((ALL, POLICIES), (NOW, ("left-over", "lanes")), (PEERS, ("stream-priority",))):
        rows |= {(title, policy): (of, its) for title, policy, its in of.said["figures"] if policy in policies}
    assert {policy for _, policy in rows} == set(POLICIES)
    return [pytest.param(*key, *its, id=f"{key[0]}-{key[1]}") for key, its in rows.items()]


def sides(of: Run, title: str) -> tuple[list[str], list[str]]:
    suite = [name for name in of.profiles if not name.startswith("random")]
    names = {
        "short": [name for name in suite if name not in ("stream", "logistic")],
        "complementary": ["stream", "logistic"],
        "random mix": [name for name in of.profiles if name.startswith("random")],
    }.get(title, suite)
    memory, compute = ([name for name in names if of.profiles[name].kind is k] for k in (Kind.MEMORY, Kind.COMPUTE))
    return {"memory only": (memory, memory), "compute only": (compute, compute)}.get(title, (memory, compute))


def trace(of: Run, title: str, seed: int) -> list[Request]:
    """Return the requests as `lab/bench/sched_share.py` draws them."""
    count = of.said["count"]
    if title.endswith(" first"):
        both = ("stream", "logistic") if title == "memory first" else ("logistic", "stream")
        each = [(name, LATER * k) for k, name in enumerate(both) for _ in range(count // 2)]
    else:
        names, _, load = title.partition(", load ")
        lanes = sides(of, names)
        rng = np.random.default_rng(seed)
        order = [str(rng.choice(lanes[k % 2])) for k in range(count)]
        rng.shuffle(order)
        arrivals = np.zeros(count)
        if load:
            gap = sum(of.profiles[name].seconds or 0.0 for name in order) / count / float(load)
            arrivals = np.cumsum(rng.exponential(gap, count))
        each = list(zip(order, map(float, arrivals), strict=True))
    blocks = {name: its[2] for name, its in of.said["profiles"].items()}
    return [Request(name, [Task(name, blocks[name], of.profiles[name])], at) for name, at in each]


def simulated(of: Run, title: str, policy: str, number: int, row: list[float]) -> float:
    requests = trace(of, title, of.first + number)
    assert Counter(request.name for request in requests) == of.said["work"][title][number]
    host = HostDelays.of(1e-6 * row[DECISION])
    simulator = Simulator(of.pairs, Capacity(), mode="drain", host=host, workers=WORKERS)
    return replay(requests, Core(simulator, policy, rates=of.pairs)).metrics().stp


@pytest.mark.parametrize(("title", "policy", "of", "rows"), figures())
def test_the_simulator_is_within_a_twentieth_of_the_gpu(title: str, policy: str, of: Run, rows: list[Any]) -> None:
    found = [simulated(of, title, policy, number, row) / row[0] - 1.0 for number, row in enumerate(rows)]
    assert abs(statistics.median(found)) < 0.05, found


def test_the_same_trace_runs_alike_twice() -> None:
    row = next(rows[1] for title, policy, rows in NOW.said["figures"] if (title, policy) == ("random mix", "lanes"))
    assert simulated(NOW, "random mix", "lanes", 1, row) == simulated(NOW, "random mix", "lanes", 1, row)
