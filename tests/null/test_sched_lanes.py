"""The policy of two lanes: who runs beside whom, in which order, and when kernels are launched as they are."""

from dataclasses import replace
from typing import Any

import pytest

from warpwell.scheduler import Capacity, Kind, Request, Task
from warpwell.scheduler.core import Core
from warpwell.scheduler.policies.lanes import Lanes
from warpwell.scheduler.policies.live import Live
from warpwell.scheduler.predict.rates import ClassTable
from warpwell.study.rates import Matrix, Pair
from warpwell.study.replay import replay
from warpwell.study.simulator import NO_DELAYS, HostDelays, Simulator
from warpwell.testing.policies import task as said

CAPACITY = Capacity()
M, C = Kind.MEMORY, Kind.COMPUTE


def task(*args: Any, **fields: Any) -> Task:
    """Return a task whose time was measured."""
    made = said(*args, **fields)
    made.profile = replace(made.profile, source="measured")
    return made


def core_of(rates: Any = None, *, limit: int = 2, tenants: Any = None, host: Any = NO_DELAYS, **options: Any) -> Core:
    rates = rates or ClassTable(CAPACITY)
    simulator = Simulator(rates, CAPACITY, mode="drain", host=host)
    return Core(simulator, Lanes(**options), rates=rates, limit=limit, tenants=tenants, trusts=False)


def run(core: Core, *arrivals: tuple[float, Task]) -> Any:
    return replay([Request(one.name, [one], at) for at, one in arrivals], core)


def told(core: Core, kind: str) -> list[tuple[str, dict[str, Any]]]:
    return [(event.name, event.why) for event in core.log if event.kind == kind]


@pytest.mark.parametrize("first", [M, C])
def test_whichever_comes_first_the_memory_intensive_kernel_is_older(first: Kind) -> None:
    core = core_of()
    second = C if first is M else M
    ran = run(core, (0.0, task(first, 60.0)), (5e-3, task(second, 60.0)))
    assert ran.metrics().stp > 1.7  # 1.94 together; 5 ms alone at the beginning, and the rest of one at the end
    assert not told(core, "preempt")
    relieved = [name for name, why in told(core, "resize") if why.get("younger")]
    assert relieved == (["compute"] if first is C else [])
    if first is C:  # its workers leave once the newcomer waits for their room
        kinds = [event.kind for event in core.log if event.name == "memory" or event.kind == "resize"]
        assert kinds.index("launch") < kinds.index("resize")


def test_each_memory_intensive_kernel_is_older_than_the_compute_intensive_one_that_stays() -> None:
    core = core_of()
    arrivals = [(0.0, task(C, 60.0)), *[(0.0, task(M, 10.0)) for _ in range(5)]]
    ran = run(core, *arrivals)
    assert ran.metrics().stp > 1.6
    assert [name for name, why in told(core, "resize") if why.get("younger")] == ["compute"] * 4


@pytest.mark.parametrize("kind", [M, C])
def test_kernels_of_one_class_are_launched_as_they_are(kind: Kind) -> None:
    core = core_of()
    ran = run(core, *[(0.0, task(kind, 5.0)) for _ in range(12)])
    assert all(why["plain"] for _, why in told(core, "launch"))
    assert not told(core, "resize")
    assert ran.metrics().stp > 0.99


@pytest.mark.parametrize("kind", [M, C])
def test_the_next_one_is_there_when_a_long_one_ends(kind: Kind) -> None:
    """Nobody counts the blocks of what was launched as it is, so its rest goes by the clock."""
    core = core_of(host=HostDelays(decision=0.2e-3, launch=0.1e-3, notice=20e-6))
    ran = run(core, *[(0.0, task(kind, 3.0)) for _ in range(20)])
    assert all(why["plain"] for _, why in told(core, "launch"))
    assert ran.metrics().stp > 0.985  # 0.91 if each began when the one before it was known to have ended


def test_one_that_is_over_before_the_other_has_made_room_is_launched_as_it_is() -> None:
    core = core_of(host=HostDelays(decision=20e-6, launch=10e-6))
    blocks = task(C, 12.0, blocks=2112)  # each takes 6 ms
    run(core, (0.0, blocks), (1e-3, task(M, 5.0)), (1e-3, task(M, 5.0)))
    assert not [why for _, why in told(core, "resize") if why.get("younger")]


@pytest.mark.parametrize("make", [lambda: said(C, 5.0), lambda: task(C, 300.0)])
def test_kernels_that_may_take_long_can_always_leave(make: Any) -> None:
    core = core_of()
    run(core, *[(0.0, make()) for _ in range(4)])
    assert not any(why.get("plain") for _, why in told(core, "launch"))


def test_short_kernels_are_launched_as_they_are() -> None:
    """Those that take less than some decisions do, as many at once as are over in a millisecond."""
    core = core_of(host=HostDelays(decision=80e-6, launch=5e-6))
    run(core, *[(0.0, task(kind, 0.2)) for kind in (M, C) * 80])
    launches = [event for event in core.log if event.kind == "launch"][80:]  # before, nothing is known of the host
    assert all(event.why["plain"] for event in launches)
    assert max(sum(other.time == event.time for other in launches) for event in launches) > 2
    ended = {event.task: event.time for event in core.log if event.kind == "end"}
    most = max(sum(other.time <= event.time < ended[other.task] for other in launches) for event in launches)
    assert 4 <= most <= 7  # those of a millisecond, and the last one


@pytest.mark.parametrize(("blocks", "beside"), [(264, True), (1056, False)])
def test_two_of_one_class_run_beside_each_other_if_neither_fills_the_device(blocks: int, beside: bool) -> None:
    core = core_of()
    first, second = (task(M, 3.0, name, blocks=blocks) for name in ("first", "second"))
    one = run(core, (0.0, task(C, 1.0)), (1e-4, first), (2e-4, second))
    ended = {job.task.name: job.ended for job in one.jobs}
    began = {job.task.name: job.started for job in one.jobs}
    assert (began["second"] < ended["first"] - 1e-3) is beside


def test_one_that_is_alone_can_leave_and_gets_the_device_back() -> None:
    core = core_of()
    run(core, (0.0, task(C, 50.0)), (5e-3, task(M, 5.0)))
    assert [why.get("plain", False) for _, why in told(core, "launch")] == [False, False]
    assert told(core, "resize")[-1] == ("compute", {"rule": "alone", "workers": None})


def test_a_pair_that_gains_nothing_is_left_alone_for_a_second() -> None:
    pairs = [Pair(a, b, (0.5, 0.4), (s, 1 - s)) for a, b in (("memory", "compute"), ("compute", "memory"))
             for s in (0.25, 0.5, 0.75)]  # fmt: skip
    core = core_of(Matrix(pairs, ClassTable(CAPACITY)))
    run(core, *[(0.0, task(kind, 10.0)) for kind in (M, C) * 8], (0.5, task(M, 10.0)), (2.0, task(M, 10.0)),
        (2.0, task(C, 10.0)))  # fmt: skip
    rules = [why["rule"] for _, why in told(core, "launch")]
    assert rules[:2] == ["lanes", "lanes"] and rules[2:15] == ["arrival"] * 13 and rules[-2:] == ["lanes", "lanes"]


def test_a_higher_priority_takes_its_lane() -> None:
    core = core_of()
    urgent = task(C, 5.0, "urgent", priority=2)
    run(core, (0.0, task(M, 50.0)), (0.0, task(C, 50.0, "low")), (10e-3, urgent))
    (name, why), = told(core, "preempt")
    assert name == "low" and why["rule"] == "priority" and why["C"] < why["rest"]
    order = [event.name for event in core.log if event.kind == "end"]
    assert order[0] == "urgent"


@pytest.mark.parametrize("kind", [M, C])
def test_beside_a_short_urgent_kernel_nothing_long_begins_that_cannot_leave(kind: Kind) -> None:
    core = core_of(host=HostDelays(decision=0.1e-3, launch=50e-6))
    urgent = [(5e-3 + 7e-3 * k, task(kind, 0.1, "urgent", priority=8)) for k in range(12)]
    ran = run(core, *[(0.0, task(its, 12.0)) for its in (M, C) for _ in range(5)], *urgent)
    assert not [name for name, why in told(core, "launch") if why.get("plain") and name != "urgent"]
    waits = [job.started - job.arrival for job in ran.jobs if job.task.name == "urgent" and job.started is not None]
    assert len(waits) == 12
    assert max(waits) < 2.2e-3


def test_blocks_of_a_kernel_of_higher_priority_get_room_first() -> None:
    core = core_of(host=HostDelays(decision=0.1e-3, launch=50e-6))
    places: dict[str, Any] = {}
    launch = core.executor.launch
    core.executor.launch = lambda job, place: (places.setdefault(job.task.name, place), launch(job, place))[1]  # type: ignore[method-assign]
    run(core, (0.0, task(M, 12.0)), (0.0, task(C, 12.0)), (5e-3, task(M, 0.1, "urgent", priority=3)))
    assert places["urgent"].priority == 3
    assert places["memory"].priority == 0


def test_a_known_better_pair_takes_the_place_of_another_by_the_source_s_test() -> None:
    pairs = [Pair("memory", name, rates, (s, 1 - s)) for name, rates in (("good", (0.95, 0.9)), ("bad", (0.7, 0.5)))
             for s in (0.25, 0.5, 0.75)]  # fmt: skip
    core = core_of(Matrix(pairs, ClassTable(CAPACITY)))
    known = [(0.0, task(M, 10.0)), (0.0, task(C, 10.0, "good")), (0.1, task(M, 10.0)), (0.1, task(C, 10.0, "bad"))]
    run(core, *known, (0.2, task(M, 100.0)), (0.2, task(C, 100.0, "bad")), (0.22, task(C, 40.0, "good")))
    (name, why), = told(core, "preempt")
    assert name == "bad" and why["S1"] > why["S0"] and why["C"] < why["T"] and why["gain"] > 0


def test_shares_follow_the_rates() -> None:
    live = Live()
    memory, compute = (core_of().submit(Request("r", [task(kind, 10.0)]))[0] for kind in (M, C))
    rates = {0.5: (0.5, 0.9), 0.75: (0.9, 0.8)}
    now, chosen = 0.0, []
    for _ in range(5):
        share = live.choose(memory, compute)
        chosen.append(share)
        memory.done = compute.done = 0
        live.begin(memory, compute, now)
        live.look([memory, compute], now + 1e-3)
        now += 8e-3
        for job, rate in zip((memory, compute), rates[share], strict=True):
            job.done = int(0.8 * rate * job.task.blocks)
        live.look([], now)
        live.begin(memory, compute, now)  # a window in which both only begin says nothing
        now += 2e-3
        live.look([], now)
    assert chosen == [0.5, 0.75, 0.75, 0.75, 0.75]
    assert live.sum(compute, memory) == 1.7
    assert live.poor(memory, compute, 1.75, now, 1.0) and not live.poor(memory, compute, 1.69, now, 1.0)
    assert not live.poor(memory, compute, 1.75, now + 1.1, 1.0)
    later = Live()
    later.pairs = live.pairs  # of another process: it is tried when it has rested once
    assert later.poor(memory, compute, 1.75, 5.0, 1.0) and not later.poor(memory, compute, 1.75, 6.1, 1.0)


def test_a_kernel_that_blocks_its_lane_holds_up_nobody_for_ever() -> None:
    core = core_of()
    arrivals = [(0.0, task(C, 1000.0, "long"))] + [(1e-3 * k, task(M, 2.0)) for k in range(200)]
    core_jobs = run(core, *arrivals, (2e-3, task(C, 2.0, "victim"))).jobs
    long, victim = (next(job for job in core_jobs if job.task.name == name) for name in ("long", "victim"))
    assert victim.ended is not None and long.ended is not None and victim.ended < 0.5 * long.ended
