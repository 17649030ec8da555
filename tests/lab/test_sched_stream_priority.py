"""Stream priorities: the order of launches, and the rules that hold for every policy."""

import pytest

from lab.sched.policies import make_policy
from lab.sched.rates import ClassTable
from lab.sched.replay import replay
from lab.sched.simulator import Simulator
from lab.testing.policies import CAPACITY, PolicyConformance, task
from warpwell import errors
from warpwell.scheduler import Policy
from warpwell.scheduler.extend import Core, Kind, Request


class TestConformance(PolicyConformance):
    def make(self) -> Policy:
        return make_policy("stream-priority")


def test_launches_are_ordered_by_priority_and_class() -> None:
    tasks = [
        task(Kind.COMPUTE, 1, "low"),
        task(Kind.COMPUTE, 1, "high", priority=1),
        task(Kind.MEMORY, 1, "memory"),
    ]
    rates = ClassTable(CAPACITY)
    core = Core(Simulator(rates, capacity=CAPACITY, mode="drain"), make_policy("stream-priority"), limit=1)
    launched = [event for event in replay([Request(t.name, [t]) for t in tasks], core).log if event.kind == "launch"]
    assert [event.name for event in launched] == ["high", "memory", "low"]
    assert [event.why["priority"] for event in launched] == [2, 1, 0]


def test_the_number_of_jobs_before_aging_must_be_positive() -> None:
    with pytest.raises(errors.ArgumentError, match="aging_jobs"):
        make_policy("stream-priority", aging_jobs=0)
