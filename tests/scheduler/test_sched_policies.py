"""Every policy: the conformance suite, and tests of single policies."""

import gc
import weakref

import pytest
from tests.harness.scripted_executor import ScriptedExecutor

from lab.sched.rates import ClassTable
from lab.sched.simulator import Simulator
from lab.testing.policies import CAPACITY, PolicyConformance, task
from warpwell import errors
from warpwell.scheduler import Policy
from warpwell.scheduler.core import Core
from warpwell.scheduler.extend import Job, Kind, Launch, Placement, Preempt, Request, State
from warpwell.scheduler.policies import POLICIES, policy
from warpwell.scheduler.policies.order import FirstCome, LeftOver
from warpwell.scheduler.policies.sharing import quota, rank
from warpwell.scheduler.predict.rates import ClassRates

M, C = Kind.MEMORY, Kind.COMPUTE


def conformance(name: str) -> type[PolicyConformance]:
    class Made(PolicyConformance):
        def make(self) -> Policy:
            return policy(name)

    Made.__name__ = Made.__qualname__ = "Test" + name.title().replace("-", "")
    return Made


for _name in POLICIES:
    _made = conformance(_name)
    globals()[_made.__name__] = _made
del _made, _name


# -- the suite can fail -------------------------------------------------------------------------------------


class Planted(PolicyConformance):
    def __init__(self, made: Policy) -> None:
        self.made = made

    def make(self) -> Policy:
        return self.made


class Lazy(FirstCome):
    """Leaves the device idle once in a while."""

    def decide(self, view):
        return [] if len(view.waiting) == 1 else super().decide(view)


class Last(LeftOver):
    """The newest first: the oldest starves."""

    def decide(self, view):
        if len(view.running) >= view.limit:
            return []
        return [Launch(job, Placement(plain=True)) for job in list(view.waiting)[-1:]]


class Hesitant(LeftOver):
    """Says that it fills places, and runs one kernel at a time."""

    def decide(self, view):
        return [] if view.running else super().decide(view)


def test_the_suite_finds_an_idle_device() -> None:
    suite = Planted(Lazy())
    with pytest.raises(AssertionError, match="device idle"):
        suite.drive(suite.core(), [Request("r", [task()])])


def test_the_suite_finds_a_free_place() -> None:
    suite = Planted(Hesitant())
    with pytest.raises(AssertionError, match="place free"):
        suite.drive(suite.core(), [Request("r", [task()]) for _ in range(3)])


def test_the_suite_finds_starvation() -> None:
    with pytest.raises(AssertionError, match="it waits after"):
        Planted(Last()).test_nothing_starves.hypothesis.inner_test(Planted(Last()), M, "compute", 0.3, 0, None)


def test_the_suite_finds_a_policy_that_goes_round_in_circles() -> None:
    class Circles(LeftOver):
        def decide(self, view):
            if view.running:
                stops = any(job.state is State.STOPPING for job in view.running)
                return [] if stops else [Preempt(view.running[0], "switch")]
            return [Launch(min(view.waiting, key=lambda job: job.preemptions))]

    suite = Planted(Circles())
    with pytest.raises(AssertionError, match="no progress"):
        suite.drive(suite.core(limit=1), [Request("r", [task()]) for _ in range(2)])


def test_source_makes_a_kernel_wait_as_long_as_the_one_that_stays_runs() -> None:
    # Memory + compute is the best pair, so a second memory-intensive kernel waits while compute-intensive ones arrive.
    assert Planted(policy("source")).starving(M, "compute", 0.3, co_runner=M).started is None
    assert Planted(policy("lanes")).starving(M, "compute", 0.3, co_runner=M).started is not None
    starving = {name for name in POLICIES if policy(name).starves}
    assert starving == {"source"}


@pytest.mark.parametrize("name", POLICIES)
def test_what_has_ended_is_kept_by_nobody(name) -> None:
    """Tasks have arrays with them."""
    gc.collect()
    gc.freeze()  # the collections below then skip the objects of earlier tests
    core = Core(ScriptedExecutor(CAPACITY), policy(name), keep=False)
    tasks = weakref.WeakSet()
    for number in range(24):
        made = task((M, C)[number % 2], 1, "mc"[number % 2], arguments=(bytearray(9),), number=number)
        tasks.add(made)
        core.submit(Request("r", [made]))
    del made
    while core.busy:
        core.executor.wait(core.step())
        if len(core.jobs) % 6 == 0:
            gc.collect()
            assert {t.number for t in tasks} == {job.number for job in core.jobs}
    core.step()
    gc.collect()
    assert not tasks


# -- names and options --------------------------------------------------------------------------------------


def test_an_unknown_policy_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(errors.ArgumentError, match=r"'fastest'.*first-come.*left-over.*source.*lanes") as caught:
        policy("fastest")
    assert caught.value.name == "policy"


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(errors.ArgumentError, match=r"'lanes'.*speed"):
        policy("lanes", speed=1)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lanes", {"patience": 0}),
        ("lanes", {"slack": -1}),
        ("lanes", {"most": 0}),
        ("lanes", {"worthwhile": -1}),
    ],
)
def test_an_option_that_would_let_tasks_starve_is_refused(name, options) -> None:
    with pytest.raises(errors.ArgumentError, match=next(iter(options))):
        policy(name, **options)


def test_policies_have_the_names_they_are_registered_under() -> None:
    assert [policy(name).name for name in POLICIES] == list(POLICIES)


# -- single policies ----------------------------------------------------------------------------------------


def launches(core: Core) -> list[str]:
    return [event.name for event in core.log if event.kind == "launch"]


def run(name, requests, *, limit=2, mode="drain", capacity=CAPACITY, tenants=None, **options):
    rates = ClassTable(capacity)
    core = Core(Simulator(rates, capacity=capacity, mode=mode), policy(name, **options), limit=limit, tenants=tenants)
    for request in requests:
        core.submit(request)
    while core.busy:
        until = core.step()
        if core.busy:
            core.executor.wait(until)
    return core


def named(*entries, at=0.0):
    return [Request(name, [task(kind, ms, name, **fields)], at) for name, kind, ms, fields in entries]


def test_rates_by_class_keep_the_ranks_and_the_order_of_residency() -> None:
    def rates(*kinds: Kind | None) -> list[float]:
        jobs = [Job(task(kind), Request("r", [task(kind)]), 0.0) for kind in kinds]
        return ClassRates().together(jobs, [Placement() for _ in jobs])

    memory, compute = Kind.MEMORY, Kind.COMPUTE
    assert rates(memory) == rates(compute) == [1.0]
    assert sum(rates(memory, compute)) > 1.9 > sum(rates(compute, compute)) > 1.0 > sum(rates(memory, memory))
    assert rates(compute, memory) == [1.0, 0.02], "a younger memory-intensive kernel starves"
    assert rates(None, compute) == rates(memory, compute), "an unknown class counts as memory-intensive"
    assert rates(memory, memory, memory) == pytest.approx([1 / (1 + 2 * (1 / 0.48 - 1))] * 3)


def test_ranks_are_those_of_the_source() -> None:
    assert rank([M, C]) < rank([C, C]) < rank([M, M])
    assert rank([C, None]) == rank([C, M]), "unknown counts as memory"
    assert rank([M, C, C]) < rank([C, C, C]) < rank([M, M, C]) < rank([M, M, M])


def test_first_come_runs_one_at_a_time_and_left_over_fills_places() -> None:
    requests = named(("a", M, 1, {}), ("b", C, 1, {}), ("c", M, 1, {}))
    core = run("first-come", requests)
    ends = [job.ended for job in core.jobs]
    assert [job.started for job in core.jobs] == [0.0, *ends[:2]]
    core = run("left-over", named(("a", M, 1, {}), ("b", C, 1, {}), ("c", M, 1, {})))
    assert [job.started for job in core.jobs[:2]] == [0.0, 0.0]
    assert all(e.why["plain"] for e in core.log if e.kind == "launch")


def test_lanes_have_nearly_twice_the_throughput_on_a_backlog_of_both_classes() -> None:
    def makespan(name):
        # lengths differ, so that pairs do not end together
        lengths = {C: (3.0, 4.0, 5.0), M: (1.0, 2.0, 6.0)}
        entries = [(f"{k.value}{i}", k, lengths[k][i % 3], {"blocks": 105600}) for i in range(12) for k in (C, M)]
        core = run(name, named(*entries))
        return max(job.ended for job in core.jobs)

    left_over = makespan("left-over")
    # measured on the hardware: 1.95 with the memory-intensive kernel resident first
    assert left_over / makespan("lanes") > 1.6


def test_lanes_put_priority_before_pairing_and_preempts_for_it() -> None:
    requests = [*named(("m", M, 20, {}), ("c", C, 20, {})), Request("x", [task(M, 1, "x", priority=1)], 1e-3)]
    core = run("lanes", requests)
    victims = [(e.name, e.why["rule"]) for e in core.log if e.kind == "preempt" and e.time < 1.5e-3]
    assert victims and victims[0][1] == "priority"
    assert core.jobs[2].started < 2e-3


def test_lanes_give_tenants_their_weights() -> None:
    rates, weights = ClassTable(CAPACITY), {"a": 3.0, "b": 1.0}
    core = Core(
        Simulator(rates, capacity=CAPACITY, mode="drain"), policy("lanes", tolerance_seconds=2e-3), tenants=weights
    )
    for i in range(400):
        core.submit(Request("r", [task((M, C)[i // 2 % 2], 1.0, tenant="ab"[i % 2])]))
    while core.executor.now() < 0.15:
        core.executor.wait(core.step())
        core.step()
    assert core.tenants["b"].waiting
    assert 2.4 < core.tenants["a"].used / core.tenants["b"].used < 3.6


def test_lanes_let_a_task_go_ahead_that_would_miss_its_deadline() -> None:
    requests = named(("a", C, 2, {}), ("b", C, 2, {}), ("urgent", C, 2, {"deadline": 4.5e-3}))
    assert launches(run("lanes", requests, limit=1)) != ["a", "b", "urgent"]


def test_a_kernel_of_unknown_class_runs_alone_under_lanes() -> None:
    requests = named(("a", None, 1, {}), ("b", C, 1, {}))
    core = run("lanes", requests)
    assert core.jobs[1].started >= core.jobs[0].ended


def test_quotas_are_whole_blocks_a_multiprocessor() -> None:
    made = task(C, 10.0)  # 8 blocks of 32 KiB of registers fill a multiprocessor
    job = Job(made, Request("r", [made]), 0.0)
    assert quota(job, 1.0, CAPACITY) is None
    assert [quota(job, part, CAPACITY) for part in (0.3, 0.5, 0.7)] == [2 * 132, 4 * 132, 5 * 132]
    assert quota(job, 0.1, CAPACITY) == 105, "less than one each: on some"
