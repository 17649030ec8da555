"""Simulated throughput compared with an H200 that ran the same traces."""

import statistics
from typing import Any

import pytest

from lab.sched.recorded import STP, RecordedRun
from warpwell.scheduler.policies import POLICIES

ALL, NOW = RecordedRun.read("sched_ten_h200.json", 100), RecordedRun.read("sched_ten_later_h200.json", 400)
PEERS = RecordedRun.read("sched_peers_h200.json", 0)


def figures() -> list[Any]:
    """Return the parameters of the test. For `lanes`, the later run counts: the policy changed after the first run."""
    rows: dict[tuple[str, str], tuple[RecordedRun, Any]] = {}
    for recorded, policies in ((ALL, POLICIES), (NOW, ("left-over", "lanes")), (PEERS, ("stream-priority",))):
        for policy in policies:
            rows |= {(title, policy): (recorded, seeds) for title, seeds in recorded.rows(policy).items()}
    assert {policy for _, policy in rows} == {*POLICIES, "stream-priority"}
    return [pytest.param(*key, *value, id=f"{key[0]}-{key[1]}") for key, value in rows.items()]


@pytest.mark.parametrize(("title", "policy", "recorded", "rows"), figures())
def test_the_simulator_is_within_a_twentieth_of_the_gpu(
    title: str, policy: str, recorded: RecordedRun, rows: list[Any]
) -> None:
    errors = [recorded.simulate(title, n, row, policy).stp / row[STP] - 1.0 for n, row in enumerate(rows)]
    assert abs(statistics.median(errors)) < 0.05, errors


def test_the_same_trace_runs_alike_twice() -> None:
    row = NOW.rows("lanes")["random mix"][1]
    first, second = (NOW.simulate("random mix", 1, row, "lanes").stp for _ in range(2))
    assert first == second
