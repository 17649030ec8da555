"""The policy of two lanes: which kernels run together, in which order, and which are launched non-preemptible."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.harness.scripted_executor import ScriptedExecutor

from lab.sched.rates import ClassTable, Matrix, Pair
from lab.sched.replay import replay
from lab.sched.simulator import NO_DELAYS, HostDelays, Simulator
from lab.testing.policies import task as unmeasured_task
from warpwell.scheduler.batch import Batch
from warpwell.scheduler.core import Core
from warpwell.scheduler.extend import Capacity, Kind, Request, Task
from warpwell.scheduler.policies.lanes import Lanes, _class_seconds
from warpwell.scheduler.policies.live import Live, _key
from warpwell.scheduler.task import State

CAPACITY = Capacity()
M, C = Kind.MEMORY, Kind.COMPUTE


def task(*args: Any, **fields: Any) -> Task:
    """Return a task whose time was measured."""
    made = unmeasured_task(*args, **fields)
    made.profile = replace(made.profile, source="measured")
    return made


def core_of(rates: Any = None, *, limit: int = 2, tenants: Any = None, host: Any = NO_DELAYS, **options: Any) -> Core:
    rates = rates or ClassTable(CAPACITY)
    simulator = Simulator(rates, CAPACITY, mode="drain", host=host)
    return Core(simulator, Lanes(**options), rates=rates, limit=limit, tenants=tenants, trusts=False)


def run(core: Core, *arrivals: tuple[float, Task]) -> Any:
    return replay([Request(arriving.name, [arriving], at) for at, arriving in arrivals], core)


def events_of(core: Core, kind: str) -> list[tuple[str, dict[str, Any]]]:
    return [(event.name, event.why) for event in core.log if event.kind == kind]


@pytest.mark.parametrize("first", [M, C])
def test_whichever_comes_first_the_memory_intensive_kernel_is_older(first: Kind) -> None:
    core = core_of()
    second = C if first is M else M
    ran = run(core, (0.0, task(first, 60.0)), (5e-3, task(second, 60.0)))
    # 1.94 while both run; solo for the first 5 ms, and for the rest of one kernel at the end.
    assert ran.metrics().stp > 1.7
    assert not events_of(core, "preempt")
    reissued = [name for name, why in events_of(core, "resize") if why.get("younger")]
    assert reissued == (["compute"] if first is C else [])
    if first is C:  # its workers leave only when the arriving kernel waits for their room
        kinds = [event.kind for event in core.log if event.name == "memory" or event.kind == "resize"]
        assert kinds.index("launch") < kinds.index("resize")


def test_each_memory_intensive_kernel_is_older_than_the_compute_intensive_one_that_stays() -> None:
    core = core_of()
    arrivals = [(0.0, task(C, 60.0)), *[(0.0, task(M, 10.0)) for _ in range(5)]]
    ran = run(core, *arrivals)
    assert ran.metrics().stp > 1.6
    # Re-issued when each of the four successors has started.
    assert [name for name, why in events_of(core, "resize") if why.get("younger")] == ["compute"] * 4


def test_kernels_are_distinguished_although_many_others_have_run() -> None:
    core = core_of()
    run(core, *[(0.1 * k, task(C, 5.0, name=f"earlier {k}")) for k in range(20)])
    jobs = [core.submit(Request(name, [task(C, 5.0, name=name)]))[0] for name in ("first", "second")]
    first, second = map(core.policy.bucket, jobs)
    assert first != second


@pytest.mark.parametrize("kind", [M, C])
def test_kernels_of_one_class_are_launched_as_they_are(kind: Kind) -> None:
    core = core_of()
    ran = run(core, *[(0.0, task(kind, 5.0)) for _ in range(12)])
    assert all(why["plain"] for _, why in events_of(core, "launch"))
    assert not events_of(core, "resize")
    assert ran.metrics().stp > 0.99


@pytest.mark.parametrize("kind", [M, C])
def test_the_next_one_is_there_when_a_long_one_ends(kind: Kind) -> None:
    """The blocks of a non-preemptible launch are not counted, so its remaining time is estimated by the clock."""
    core = core_of(host=HostDelays(decision=0.2e-3, launch=0.1e-3, notice=20e-6))
    ran = run(core, *[(0.0, task(kind, 3.0)) for _ in range(20)])
    assert all(why["plain"] for _, why in events_of(core, "launch"))
    assert ran.metrics().stp > 0.985  # 0.91 if each began when the end of its predecessor was known


def test_a_kernel_of_some_decisions_does_not_go_on_as_it_is_for_what_the_host_takes() -> None:
    """The host takes its time either way; launched as it is, so were all that follow."""
    core = core_of(host=HOST, lookahead_seconds=0.0)
    run(core, *[(0.0, task(kind, seconds, blocks=1 << 16)) for kind, seconds in ((C, 3.0), (M, 0.5)) for _ in range(6)])
    assert not [name for name, why in events_of(core, "launch") if name == "memory" and why.get("plain")]


@pytest.mark.parametrize("make", [lambda: unmeasured_task(C, 5.0), lambda: task(C, 300.0)])
def test_kernels_that_may_take_long_can_always_leave(make: Any) -> None:
    core = core_of()
    run(core, *[(0.0, make()) for _ in range(4)])
    assert not any(why.get("plain") for _, why in events_of(core, "launch"))


def test_short_kernels_do_not_queue_after_batches() -> None:
    """A batch can be preempted, so that no kernel may be launched beyond the limit after two of them."""
    core = core_of(host=HostDelays(decision=80e-6, launch=5e-6))
    launch = task(C, 0.02, "launch", launch=SimpleNamespace(kernel=None))
    batches = [task(C, 0.02, "batch", blocks=4, launch=Batch([launch], [0] * 4)) for _ in range(6)]
    # Before these tasks, the delays of the host are unknown.
    warm_up = [(0.0, task(C, 0.02, "single")) for _ in range(80)]
    ran = run(core, *warm_up, *[(0.1, arriving) for batch in batches for arriving in (batch, task(C, 0.02, "single"))])
    assert all(job.state is State.DONE for job in ran.jobs)


def test_short_kernels_are_launched_as_they_are() -> None:
    """Those that take less than some decisions do; four wait on the device."""
    core = core_of(host=HostDelays(decision=80e-6, launch=5e-6))
    run(core, *[(0.0, task(kind, 0.2)) for kind in (M, C) * 80])
    # Skip the 80 tasks before which the delays of the host are unknown.
    launches = [event for event in core.log if event.kind == "launch"][80:]
    assert all(event.why["plain"] for event in launches)
    ended = {event.task: event.time for event in core.log if event.kind == "end"}
    max_waiting = max(
        sum(earlier.time <= event.time < ended[earlier.task] for earlier in launches) for event in launches
    )
    assert 4 <= max_waiting <= 6


@pytest.mark.parametrize(("blocks", "together"), [((264, 264), True), ((528, 1056), True), ((1056, 1056), False)])
def test_kernel_runs_beside_one_of_its_class_that_does_not_fill_the_device(
    blocks: tuple[int, int], together: bool
) -> None:
    core = core_of()
    first, second = (task(M, 3.0, name, blocks=count) for name, count in zip(("first", "second"), blocks, strict=True))
    replayed = run(core, (0.0, task(C, 1.0)), (1e-4, first), (2e-4, second))
    ended = {job.task.name: job.ended for job in replayed.jobs}
    began = {job.task.name: job.started for job in replayed.jobs}
    assert (began["second"] < ended["first"] - 1e-3) is together


def test_one_that_is_alone_can_leave_and_gets_the_device_back() -> None:
    core = core_of()
    run(core, (0.0, task(C, 50.0)), (5e-3, task(M, 5.0)))
    assert [why.get("plain", False) for _, why in events_of(core, "launch")] == [False, False]
    assert events_of(core, "resize")[-1] == ("compute", {"rule": "alone", "workers": None})


def test_a_pair_that_gains_nothing_is_left_alone_for_a_second() -> None:
    pairs = [
        Pair(a, b, (0.5, 0.4), (s, 1 - s))
        for a, b in (("memory", "compute"), ("compute", "memory"))
        for s in (0.25, 0.5, 0.75)
    ]
    core = core_of(Matrix(pairs, ClassTable(CAPACITY)))
    run(
        core,
        *[(0.0, task(kind, 10.0)) for kind in (M, C) * 8],
        (0.5, task(M, 10.0)),
        (2.0, task(M, 10.0)),
        (2.0, task(C, 10.0)),
    )
    rules = [why["rule"] for _, why in events_of(core, "launch")]
    assert rules[:2] == ["lanes", "lanes"] and rules[2:15] == ["arrival"] * 13 and rules[-2:] == ["lanes", "lanes"]


def test_a_higher_priority_takes_its_lane() -> None:
    core = core_of()
    urgent = task(C, 5.0, "urgent", priority=2)
    run(core, (0.0, task(M, 50.0)), (0.0, task(C, 50.0, "low")), (10e-3, urgent))
    ((name, why),) = events_of(core, "preempt")
    assert name == "low" and why["rule"] == "priority" and why["C"] < why["rest"]
    order = [event.name for event in core.log if event.kind == "end"]
    assert order[0] == "urgent"


@pytest.mark.parametrize("kind", [M, C])
def test_beside_a_short_urgent_kernel_nothing_long_begins_that_cannot_leave(kind: Kind) -> None:
    core = core_of(host=HostDelays(decision=0.1e-3, launch=50e-6))
    urgent = [(5e-3 + 7e-3 * k, task(kind, 0.1, "urgent", priority=8)) for k in range(12)]
    ran = run(core, *[(0.0, task(lane, 12.0)) for lane in (M, C) for _ in range(5)], *urgent)
    assert not [name for name, why in events_of(core, "launch") if why.get("plain") and name != "urgent"]
    wait_seconds = [
        job.started - job.arrival for job in ran.jobs if job.task.name == "urgent" and job.started is not None
    ]
    assert len(wait_seconds) == 12
    assert max(wait_seconds) < 2.2e-3


def test_blocks_of_a_kernel_of_higher_priority_get_room_first() -> None:
    core = core_of(host=HostDelays(decision=0.1e-3, launch=50e-6))
    placements: dict[str, Any] = {}
    begin = core.executor._begin
    core.executor._begin = lambda job, placement: (
        placements.setdefault(job.task.name, placement),
        begin(job, placement),
    )[1]
    run(core, (0.0, task(M, 12.0)), (0.0, task(C, 12.0)), (5e-3, task(M, 0.1, "urgent", priority=3)))
    assert placements["urgent"].priority == 3
    assert placements["memory"].priority == 0


def even() -> tuple[float, float]:
    """Return seconds of work of both classes that are about."""
    return 1.0, 1.0


def test_the_class_with_more_work_gets_the_larger_share() -> None:
    live = Live()
    memory, compute = (core_of().submit(Request("r", [task(kind, 10.0)]))[0] for kind in (M, C))
    live.pairs.record(_key(memory, compute), 0.5, (0.75, 0.76))
    assert live.share(memory, compute, lambda: (9.0, 1.0)) == 0.75  # tries 0.75 for the kernel that would end last
    assert live.share(memory, compute, lambda: (1.0, 9.0)) == 0.25
    live.pairs.record(_key(memory, compute), 0.75, (0.98, 0.5))
    assert live.share(memory, compute, lambda: (9.0, 1.0)) == 0.75
    assert live.share(memory, compute, lambda: (1.0, 1.0)) == 0.5  # 0.5 has the higher rate of both together
    live.pairs.record(_key(memory, compute), 0.25, (0.4, 0.9))  # much less together
    assert live.share(memory, compute, lambda: (1.0, 9.0)) == 0.5


def test_work_is_what_runs_and_waits_on_the_device_or_not() -> None:
    core = core_of()
    requests = [(0.0, task(kind, 10.0)) for kind in (M, M, M, C)]
    for at, arriving in requests:
        core.submit(Request(arriving.name, [arriving], at))
    core.step()
    memory, compute = _class_seconds(core._view)
    assert memory == pytest.approx(30e-3) and compute == pytest.approx(10e-3)


def test_shares_follow_the_rates() -> None:
    live = Live()
    memory, compute = (core_of().submit(Request("r", [task(kind, 10.0)]))[0] for kind in (M, C))
    rates = {0.5: (0.5, 0.9), 0.75: (0.9, 0.8)}
    now, chosen = 0.0, []
    for _ in range(5):
        share = live.share(memory, compute, even)
        chosen.append(share)
        memory.done = compute.done = 0
        live.begin(memory, compute, share, now)
        live.update([memory, compute], now + 1e-3)
        now += 8e-3
        for job, rate in zip((memory, compute), rates[share], strict=True):
            job.done = int(0.8 * rate * job.task.blocks)
        live.update([], now)
    assert chosen == [0.5, 0.75, 0.75, 0.75, 0.75]
    assert live.sum(compute, memory) == 1.7
    assert live.poor(memory, compute, 1.75, now, 1.0) and not live.poor(memory, compute, 1.69, now, 1.0)
    assert not live.poor(memory, compute, 1.75, now + 1.1, 1.0)
    later = Live()
    # As if another process had stored the pairs: a poor pair is tried again after one cooldown.
    later.pairs = live.pairs
    assert later.poor(memory, compute, 1.75, 5.0, 1.0) and not later.poor(memory, compute, 1.75, 6.1, 1.0)


def test_windows_of_a_pair_that_are_too_short_count_together() -> None:
    live, seconds = Live(), 1e-3
    now = 0.0
    for k in range(4):
        memory, compute = (core_of().submit(Request("r", [task(kind, 1.0, blocks=2112)]))[0] for kind in (M, C))
        assert not live.pairs.get(_key(memory, compute)) or k > 1
        live.begin(memory, compute, 0.5, now)
        now += 0.8 * seconds
        memory.done = compute.done = int(0.5 * 0.8 * 2112)  # less than a wave
        live.update([], now)
    assert live.sum(memory, compute) == 1.0


def test_a_short_window_that_begins_with_a_launch_says_nothing() -> None:
    """Two kernels of 0.7 ms seemed to gain nothing together, because their launches were in the window."""
    live = Live()
    memory, compute = (core_of().submit(Request("r", [task(kind, 1.0, blocks=10560)]))[0] for kind in (M, C))
    for min_seconds, found in ((3e-3, None), (0.0, 0.8)):
        memory.done = compute.done = 0
        live.begin(memory, compute, 0.5, 0.0, min_seconds)
        memory.done = compute.done = memory.task.blocks
        live.update([], 2.5e-3)
        rates = live.rates(memory, compute)
        assert (rates is None) if found is None else sum(rates) == pytest.approx(found)


def test_shares_of_short_kernels_are_not_tried() -> None:
    live = Live()
    memory, compute = (core_of().submit(Request("r", [task(kind, 1.0)]))[0] for kind in (M, C))
    live.pairs.record(_key(memory, compute), 0.5, (0.4, 0.9))
    assert live.share(memory, compute, even, 2e-3) == 0.5
    assert live.share(memory, compute, even, 0.5e-3) == live.share(memory, compute, even) == 0.75


def test_a_kernel_that_blocks_its_lane_holds_up_nobody_for_ever() -> None:
    core = core_of()
    arrivals = [(0.0, task(C, 1000.0, "long"))] + [(1e-3 * k, task(M, 2.0)) for k in range(200)]
    core_jobs = run(core, *arrivals, (2e-3, task(C, 2.0, "victim"))).jobs
    long, victim = (next(job for job in core_jobs if job.task.name == name) for name in ("long", "victim"))
    assert victim.ended is not None and long.ended is not None and victim.ended < 0.5 * long.ended


def test_there_is_no_train_behind_those_that_can_leave() -> None:
    """One takes the last place as workers, and the next one, which runs whole, waits: it ended the scheduler."""
    core = core_of()
    arriving = [
        task(C, 0.1, "late", priority=2),
        task(C, 0.1, "late", priority=2, whole="it has a barrier"),
        task(M, 1.0),
    ]
    ran = run(core, (0.0, task(C, 6.0, "long", priority=5, blocks=1 << 16)), *[(5.5e-3, kernel) for kernel in arriving])
    assert all(job.done == job.task.blocks for job in ran.jobs)


# -- launched ahead -------------------------------------------------------------------------------------------

HOST = HostDelays(decision=0.25e-3, launch=50e-6, signal=15e-6, notice=20e-6)


def idle(core: Core, kind: Kind) -> float:
    """Return the seconds in which no kernel of a class ran, between its first launch and its last end."""
    jobs = sorted((job.started, job.ended) for job in core.jobs if job.task.profile.kind is kind)
    return sum(max(0.0, after[0] - before[1]) for before, after in itertools.pairwise(jobs))


@pytest.mark.parametrize("ahead", [False, True])
def test_no_lane_is_empty_while_the_host_decides(ahead: bool) -> None:
    core = core_of(host=HOST, lookahead_seconds=1e-3 if ahead else 0.0)
    run(core, *[(0.0, task(kind, 3.0)) for kind in (M, C) for _ in range(8)])
    assert [idle(core, kind) < 1e-6 for kind in (M, C)] == [ahead, ahead]


def test_the_next_one_is_chosen_late() -> None:
    core = core_of(host=HOST)
    run(core, *[(0.0, task(kind, 12.0)) for kind in (M, C) for _ in range(3)])
    jobs = core.jobs
    behind = [(event.time, jobs[event.task], jobs[event.why["behind"]]) for event in core.log if "behind" in event.why]
    assert len(behind) >= 3
    assert all(running.ended - time < 3e-3 for time, _, running in behind)


def test_at_most_one_waits_in_each_lane() -> None:
    core = core_of(host=HOST)
    decide, found = core.policy.decide, []
    core.policy.decide = lambda view: found.append([len(waiting) for waiting in view.trains.values()]) or decide(view)  # type: ignore[method-assign, func-returns-value]
    run(core, *[(0.0, task(kind, 2.0)) for kind in (M, C) for _ in range(10)])
    assert [1, 1] in found and max(max(waiting, default=0) for waiting in found) == 1


def test_a_long_kernel_alone_has_the_next_one_behind_it_where_the_limit_is_one() -> None:
    core = core_of(host=HOST, limit=1)
    run(core, *[(0.0, task(M, 4.0)) for _ in range(5)])
    assert idle(core, M) < 1e-6


@pytest.mark.parametrize("kind", [M, C])
def test_one_of_higher_priority_comes_before_what_was_launched_ahead(kind: Kind) -> None:
    core = core_of(host=HOST)
    lanes = [(0.0, task(lane, 12.0)) for lane in (M, C) for _ in range(3)]
    ahead = next(event.time for event in run(core, *lanes).log if "behind" in event.why and event.name == kind.value)
    core = core_of(host=HOST)
    ran = run(core, *lanes, (ahead + 0.5e-3, task(kind, 1.0, "urgent", priority=4)))
    urgent = ran.jobs[-1]
    assert urgent.task.name == "urgent" and urgent.started - urgent.arrival < 2e-3
    assert all(job.done == job.task.blocks for job in ran.jobs)


@pytest.mark.parametrize("level", [0, 5])
def test_what_others_passed_too_often_is_not_taken_back_for_one_that_it_comes_before(level: int) -> None:
    """It was launched ahead, taken back and launched ahead, as often as the host could."""
    core = core_of(host=HOST)
    for kernel in (task(M, 4.0, "first", blocks=1 << 16), task(M, 6.0, "old"), *[task(C, 4.0) for _ in range(8)]):
        core.submit(Request(kernel.name, [kernel]))
    first, old = core.jobs[:2]
    for _ in range(100):
        core.executor.wait(core.step())
        if old.train:
            break
    remaining = 4e-3 * (1.0 - core.executor.progress(first) / first.task.blocks)
    core.executor.wait(core.executor.now() + remaining - 0.2e-3)
    core.policy._queued[old] = level  # as if other tasks had overtaken it
    core.submit(Request("new", [task(M, 1.0, "new", priority=2)], core.executor.now()))
    core.step()
    assert [event.task for event in core.log if event.kind == "preempt"] == ([] if level else [old.number])


def test_a_newcomer_takes_the_place_of_who_leaves_for_it_without_the_host() -> None:
    for ahead in (False, True):
        core = core_of(host=HOST, lookahead_seconds=1e-3 if ahead else 0.0)
        urgent = task(M, 1.0, "urgent", priority=4)
        run(core, (0.0, task(M, 30.0)), (0.0, task(C, 30.0)), (10e-3, urgent))
        (stop,) = [event.time for event in core.log if event.kind == "stop"]
        assert (core.jobs[-1].started - stop < 1e-9) is ahead


@pytest.mark.parametrize("lookahead_seconds", [0.0, 1e-3])
@pytest.mark.parametrize("kind", [M, C])
@pytest.mark.parametrize("gains", [True, False])
def test_a_short_urgent_kernel_never_waits_for_room_until_a_long_one_has_ended(
    gains: bool, kind: Kind, lookahead_seconds: float
) -> None:
    """Its own room counts, and its rate: non-preemptible with a kernel that fills the device, it has no room."""
    names = ("memory", "compute")
    poor = [Pair(a, b, (0.52, 0.52), (s, 1 - s)) for a, b in (names, names[::-1]) for s in (0.25, 0.5, 0.75)]
    core = core_of(
        None if gains else Matrix(poor, ClassTable(CAPACITY)), host=HOST, lookahead_seconds=lookahead_seconds
    )
    long = [(0.0, task(lane, 12.0, blocks=blocks)) for lane, blocks in ((M, 1 << 19), (C, 1 << 16)) for _ in range(20)]
    urgent = [(3e-3 + 14.3e-3 * k, task(kind, 0.1, "urgent", priority=8, blocks=64)) for k in range(16)]
    ran = run(core, *long, *urgent)
    took = [job.ended - job.arrival for job in ran.jobs if job.task.name == "urgent"]
    assert len(took) == 16 and max(took) < 2.2e-3


def test_a_lane_without_company_goes_on_with_kernels_as_they_are() -> None:
    core = core_of(host=HOST)
    run(core, *[(0.0, task(M, 2.0)) for _ in range(2)], *[(0.0, task(C, 2.0)) for _ in range(9)])
    plain = [bool(why.get("plain")) for name, why in events_of(core, "launch") if name == "compute"]
    assert plain[-4:] == [True] * 4 and not plain[0]
    assert idle(core, C) < 1e-6


def test_the_next_one_of_a_pair_that_gains_nothing_goes_on_as_it_is() -> None:
    names = ("memory", "compute")
    poor = [Pair(a, b, (0.5, 0.45), (s, 1 - s)) for a, b in (names, names[::-1]) for s in (0.25, 0.5, 0.75)]
    core = core_of(Matrix(poor, ClassTable(CAPACITY)), host=HOST)
    run(core, *[(0.0, task(kind, 2.0, blocks=1 << 15)) for kind in (M, C) for _ in range(12)])
    found = [bool(why.get("plain")) for _, why in events_of(core, "launch")]
    assert sum(found) >= 16, found


def test_the_next_one_of_a_lane_comes_behind_it_where_the_trains_of_the_other_are_full() -> None:
    executor = ScriptedExecutor(queues=True)
    core = Core(executor, Lanes(), trusts=False)
    core.submit(Request("long", [task(M, 20.0)]))
    core.step()
    executor.wait(19.9e-3)
    for kernels in ([task(C, 2e-3) for _ in range(600)], [task(M, 20.0)]):
        core._view.overhead = 0.3e-3
        for kernel in kernels:
            core.submit(Request(kernel.name, [kernel], executor.now()))
        core.step()
    first, last = core.jobs[0], core.jobs[-1]
    assert first.state is last.state is State.RUNNING and last in core._trains[first]
    assert sum(map(len, core._trains.values())) == Lanes.ahead + 1
