"""Metrics by hand, and replays that end."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.sched.metrics import jain, measure, turnaround
from lab.sched.rates import ClassTable
from lab.sched.replay import replay
from lab.sched.simulator import Simulator
from warpwell import errors
from warpwell.scheduler import Policy, Profile
from warpwell.scheduler.core import Core
from warpwell.scheduler.extend import Event, Job, Kind, Log, Request, State, Task


def done(request, index, arrival, ended):
    return Job(request.tasks[index], request, arrival, state=State.DONE, ended=ended, done=1)


def task(seconds, kind=Kind.MEMORY, **options):
    return Task("k", 1, Profile(kind=kind, seconds=seconds), **options)


def test_figures_of_a_small_run():
    # a: two kernels of 1 s, from 0 to 4; b: one of 2 s, from 1 to 4.
    a = Request("a", [task(1.0), task(1.0, Kind.COMPUTE)], 0.0)
    b = Request("b", [task(2.0, priority=1)], 1.0)
    jobs = [done(a, 0, 0.0, 1.0), done(a, 1, 1.0, 4.0), done(b, 0, 1.0, 4.0)]
    jobs[0].preemptions = 2
    events = [
        Event(0.1, "preempt", 0, "k"),
        Event(0.3, "stop", 0, "k", why={"done": 3}),
        Event(0.4, "hold", 1, "k"),
        Event(0.5, "preempt", 0, "k"),
        Event(0.6, "stop", 0, "k", why={"done": 4}),
    ]
    found = measure(jobs, events, steps=[1e-6, 3e-6])
    assert (found.makespan, found.stp) == (4.0, 1.0)
    assert found.antt == pytest.approx((4 / 2 + 3 / 2) / 2)
    assert found.fairness == pytest.approx((2 / 4) / (2 / 3))
    assert found.jain == pytest.approx((0.5 + 2 / 3) ** 2 / (2 * (0.25 + 4 / 9)))
    assert (found.requests, found.kernels, found.failed) == (2, 3, 0)
    assert found.turnaround["memory"].count == 2 and found.turnaround["memory"].p50 == 2.0
    assert found.turnaround["compute"].p99 == 3.0
    assert found.requests_by_priority[1].p95 == 3.0
    assert (found.preemptions, found.holds) == (2, 1)
    assert found.preemption_p50 == pytest.approx(0.15)
    assert (found.decisions, found.decision_mean) == (2, 2e-6)
    json.dumps(found.as_dict(), allow_nan=False)


def test_what_was_not_done_does_not_count():
    a = Request("a", [task(1.0), task(1.0)], 0.0)
    jobs = [done(a, 0, 0.0, 2.0), Job(a.tasks[1], a, 2.0, state=State.FAILED, ended=3.0)]
    found = measure(jobs)
    assert (found.kernels, found.failed, found.requests) == (1, 1, 0)
    assert found.stp == pytest.approx(1 / 3) and math.isnan(found.antt)
    assert found.as_dict()["antt"] is None
    empty = measure([])
    assert (empty.stp, empty.makespan, empty.jain) == (0.0, 0.0, 1.0)


def test_time_alone_may_be_unknown():
    a, b = Request("a", [task(None)]), Request("b", [task(3.0)])
    found = measure([done(a, 0, 0.0, 2.0), done(b, 0, 0.0, 6.0)])
    assert (found.antt, found.requests) == (2.0, 2)
    assert measure([done(a, 0, 0.0, 2.0)], alone=lambda _: 1.0).antt == 2.0


def test_requests_of_one_name_are_one_program():
    requests = [Request("a", [task(1.0)]), Request("a", [task(1.0)]), Request("b", [task(1.0)])]
    jobs = [done(r, 0, 0.0, end) for r, end in zip(requests, (1.0, 4.0, 2.0), strict=True)]
    assert measure(jobs).fairness == pytest.approx(0.5 / 0.625)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20))
def test_jain_is_between_one_and_one_by_n(values):
    assert 1 / len(values) - 1e-9 <= jain(values) <= 1 + 1e-9
    assert jain([values[0]] * len(values)) == pytest.approx(1.0)


def test_percentiles():
    found = turnaround(list(range(101)))
    assert (found.p50, found.p95, found.p99, found.count) == (50.0, 95.0, 99.0, 101)


# -- replay --------------------------------------------------------------------------------------------------
def core_of(policy="first-come", **options):
    simulator = Simulator(ClassTable())
    return Core(simulator, policy, rates=simulator.rates, **options)


def test_a_replay_submits_when_it_is_time_and_reports_progress():
    requests = [Request(f"r{i}", [task(1.0)], arrival) for i, arrival in enumerate((3.0, 0.5, 0.0))]
    result = replay(requests, core_of())
    assert [(job.request.name, job.arrival, job.ended) for job in result.jobs] == [
        ("r2", 0.0, 1.0),
        ("r1", 0.5, 2.0),
        ("r0", 3.0, 4.0),
    ]
    assert result.metrics().makespan == 4.0 and len(result.steps) > 0


def test_a_request_that_is_too_large_is_left_out_and_others_go_on():
    large = Request("large", [task(1.0, memory=1 << 60)])
    result = replay([large, Request("r", [task(1.0)])], core_of())
    assert [job.request.name for job in result.jobs] == ["r"] and result.metrics().requests == 1
    ((request, error),) = result.rejected
    assert request is large and isinstance(error, errors.TaskMemoryError)


def test_a_policy_that_never_launches_is_named():
    class Lazy(Policy):
        name = "lazy"

        def decide(self, view):
            return []

    with pytest.raises(errors.SchedulerError, match="lazy"):
        replay([Request("r", [task(1.0)])], core_of(Lazy()))


def test_logs_say_what_was_run(tmp_path):
    core = core_of()
    core.log.about = {"policy": "first-come", "rates": "class table"}
    result = replay([Request("r", [task(1.0)])], core)
    with open(tmp_path / "log", "w") as stream:
        result.log.write(stream)
    with open(tmp_path / "log") as stream:
        again = Log.read(stream)
    assert again.about == core.log.about and again.events == result.log.events
