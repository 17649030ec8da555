"""Every policy: the conformance suite, and what is its own."""

import gc
import weakref

import pytest
from tests.harness.scripted_executor import ScriptedExecutor

from warpwell import errors
from warpwell.scheduler import Capacity, Job, Kind, Launch, Placement, Policy, Preempt, Profile, Request, State, Task
from warpwell.scheduler.core import Core
from warpwell.scheduler.policies import policy
from warpwell.scheduler.policies.order import FirstCome, LeftOver
from warpwell.scheduler.policies.sharing import quota, rank
from warpwell.scheduler.predict.rates import ClassTable, Matrix, Pair
from warpwell.study.policies import POLICIES
from warpwell.study.policies.chimera import Chimera
from warpwell.study.policies.drf import divide
from warpwell.study.replay import replay
from warpwell.study.simulator import HostDelays, Simulator
from warpwell.testing.policies import CAPACITY, PolicyConformance, task

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
    # memory + compute is best, so a second memory-intensive kernel waits for as long as compute comes
    assert Planted(policy("source")).starving(M, "compute", 0.3, beside=M).started is None
    assert Planted(policy("warpwell")).starving(M, "compute", 0.3, beside=M).started is not None
    starving = {name for name in POLICIES if policy(name).starves}
    assert starving - {"oracle"} == {name for name in POLICIES if name.startswith("source")}


@pytest.mark.parametrize("name", POLICIES)
def test_what_has_ended_is_kept_by_nobody(name) -> None:
    """Tasks have arrays with them."""
    gc.collect()
    gc.freeze()  # the collections below look at what is made here, not at what earlier tests left
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
    with pytest.raises(errors.ArgumentError, match=r"'fastest'.*first-come.*left-over.*source.*warpwell") as caught:
        policy("fastest")
    assert caught.value.name == "policy"


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(errors.ArgumentError, match=r"'shortest'.*speed"):
        policy("shortest", speed=1)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("shortest", {"aging": 0}),
        ("warpwell", {"patience": 0}),
        ("warpwell", {"slack": -1}),
        ("chimera", {"patience": 0}),
    ],
)
def test_an_option_that_would_let_tasks_starve_is_refused(name, options) -> None:
    with pytest.raises(errors.ArgumentError, match=next(iter(options))):
        policy(name, **options)


def test_policies_have_the_names_they_are_registered_under() -> None:
    assert [policy(name).name for name in POLICIES] == list(POLICIES)


# -- what is each one's own ---------------------------------------------------------------------------------


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


def test_stream_priority_launches_the_higher_first_and_says_so_to_the_stream() -> None:
    requests = named(("low", C, 1, {}), ("high", C, 1, {"priority": 1}), ("memory", M, 1, {}))
    core = run("stream-priority", requests, limit=1)
    assert launches(core) == ["high", "memory", "low"]
    assert [e.why["priority"] for e in core.log if e.kind == "launch"] == [2, 1, 0]


def test_shortest_launches_the_shortest_first() -> None:
    requests = named(("a", C, 3, {}), ("b", C, 1, {}), ("c", M, 2, {}))
    assert launches(run("shortest", requests, limit=1)) == ["b", "c", "a"]


def test_partitions_even_and_best() -> None:
    core = run("even-partition", named(("a", M, 1, {}), ("b", C, 1, {})))
    assert [e.why["partition"] for e in core.log if e.kind == "launch"] == ["a64", "b64"]
    # 32 of 132 multiprocessors keep a streaming kernel's whole rate (measured): the smallest that does
    core = run("best-partition", named(("a", M, 1, {}), ("b", C, 1, {}), ("c", M, 1, {}), ("d", C, 1, {})))
    where = {e.name: e.why["partition"] for e in core.log if e.kind == "launch"}
    assert {where["a"], where["c"]} == {"a32"}
    assert {where["b"], where["d"]} == {"b32"}
    bare = Capacity(partitions=None)
    core = run("even-partition", named(("a", M, 1, {}), ("b", C, 1, {})), capacity=bare)
    assert [e.why["workers"] for e in core.log if e.kind == "launch"] == [528, 528]


def test_memory_first_makes_compute_leave_and_come_back_after_memory() -> None:
    late = [Request("m", [task(M, 5, "m")], 1e-3)]
    core = run("memory-first", [*named(("c", C, 20, {})), *late])
    kinds = [(e.kind, e.name) for e in core.log if e.kind in ("launch", "preempt", "stop")]
    assert kinds == [("launch", "c"), ("preempt", "c"), ("stop", "c"), ("launch", "m"), ("launch", "c")]
    memory = core.jobs[1]
    assert memory.ended - memory.started < 5e-3 * 1.05, "it keeps its rate"


def test_warpwell_does_so_when_the_table_says_that_it_is_worth_it_and_not_at_the_end() -> None:
    def order(arrival):
        core = run("warpwell", [*named(("c", C, 20, {})), Request("m", [task(M, 5, "m")], arrival)])
        return [(e.kind, e.name) for e in core.log if e.kind in ("launch", "preempt")]

    assert order(1e-3) == [("launch", "c"), ("preempt", "c"), ("launch", "m"), ("launch", "c")]
    assert ("preempt", "c") not in order(19.95e-3), "what is left of it is less than the cost"


def test_warpwell_has_nearly_twice_the_throughput_on_a_backlog_of_both_classes() -> None:
    def makespan(name):
        # lengths differ, so that pairs do not end together
        lengths = {C: (3.0, 4.0, 5.0), M: (1.0, 2.0, 6.0)}
        entries = [(f"{k.value}{i}", k, lengths[k][i % 3], {"blocks": 105600}) for i in range(12) for k in (C, M)]
        core = run(name, named(*entries))
        return max(job.ended for job in core.jobs)

    left_over = makespan("left-over")
    # measured on the hardware: 1.95 with the memory-intensive kernel resident first; preemptions cost some of it
    assert left_over / makespan("warpwell") > 1.6
    assert makespan("warpwell") < makespan("warpwell-no-preemption") < left_over * 1.01


MEASURED = [
    # Compute-bound kernels gain nothing beside each other, and the younger starves; c gains with m where m is first.
    *(Pair(a, b, (0.98, 0.02)) for a in ("c", "d") for b in ("c", "d")),
    *(Pair("m", c, (0.9, 0.6)) for c in ("c", "d")),
    *(Pair(c, "m", (1.0, 0.0)) for c in ("c", "d")),
]  # fmt: skip


def measured(
    requests: list[Request], pairs: list[Pair] = MEASURED, host: HostDelays | None = None, **parts: int
) -> Core:
    capacity = Capacity(partitions=parts or None)
    table = Matrix(pairs, ClassTable(capacity))
    core = Core(Simulator(table, mode="drain", host=host or HostDelays()), policy("warpwell"), rates=table)
    replay(requests, core)
    return core


def test_warpwell_lets_kernels_take_turns_that_gain_nothing_together() -> None:
    core = measured(named(*[(name, C, 2, {}) for name in "cdcdcd"]))
    assert [e.kind for e in core.log if e.kind in ("resize", "preempt")] == []
    assert {e.why.get("workers") for e in core.log if e.kind == "launch"} == {None}
    # No gap: the next one has been launched when one ends.
    assert max(job.ended for job in core.jobs) == pytest.approx(12e-3, rel=1e-3)
    host = HostDelays(decision=300e-6, launch=60e-6, notice=20e-6)
    core = measured(named(*[(name, C, 2, {}) for name in "cdcdcd"]), host=host)
    assert max(job.ended for job in core.jobs) == pytest.approx(12e-3 + 360e-6, rel=1e-3)


def test_warpwell_shares_where_that_gains_something() -> None:
    core = measured(named(("m", M, 2, {}), ("c", C, 2, {})))
    assert max(job.ended for job in core.jobs) < 3e-3
    launched = {e.name: e.why.get("workers") for e in core.log if e.kind == "launch"}
    assert launched["m"] is not None, "it leaves room"
    assert launched["c"] is None, "it has what is left, and all when the other one ends"


def test_warpwell_does_not_stop_what_waits_for_its_turn_and_goes_on_with_what_runs() -> None:
    # On hardware d would see that only when c has ended. Both leave, and m is resident first.
    two = named(("c", C, 5, {}), ("d", C, 5, {}))
    core = measured([*two, Request("m", [task(M, 5, "m")], 1e-3)])
    preempted = [(e.name, e.why["rule"]) for e in core.log if e.kind == "preempt"]
    assert preempted == [("c", "worth, and residency"), ("d", "worth, and residency")]
    two = named(("c", C, 5, {}), ("d", C, 5, {}))
    core = measured([*two, Request("x", [task(C, 1, "x", priority=1)], 1e-3)])
    assert [e.name for e in core.log if e.kind == "preempt" and e.why["rule"] == "priority"] == ["c", "d"]
    assert core.jobs[2].ended < 3.1e-3, "at the end of the wave"


def test_warpwell_takes_the_best_company_by_name_where_the_table_knows_names() -> None:
    # Of the two that wait behind the oldest, the younger one goes better with it.
    pairs = [Pair("m", "c", (0.6, 0.5)), Pair("m", "d", (0.9, 0.7)), Pair("c", "d", (1, 0)), Pair("c", "m", (1, 0))]
    core = measured(named(("m", M, 2, {}), ("c", C, 2, {}), ("d", C, 2, {})), [*pairs, Pair("d", "m", (1, 0))])
    assert launches(core) == ["m", "d", "c"]


def test_warpwell_gets_a_kernel_out_of_its_partition_when_it_is_alone() -> None:
    shared = [Pair("a", "b", (0.5, 0.5)), Pair("b", "a", (0.5, 0.5)), Pair("b", "a", (0.1, 0.1), partition=0.24)]
    pairs = [Pair("a", "b", (0.9, 0.9), partition=0.24), *shared]
    core = measured(named(("a", C, 20, {}), ("b", C, 2, {})), pairs, a32=32, b32=100)
    assert [e.why.get("partition") for e in core.log if e.kind == "launch"] == ["a32", "b32", None]
    assert [e.why["rule"] for e in core.log if e.kind == "preempt"] == ["out of its partition"]
    assert core.jobs[0].ended < 22e-3


def test_warpwell_puts_priority_before_pairing_and_preempts_for_it() -> None:
    requests = [*named(("m", M, 20, {}), ("c", C, 20, {})), Request("x", [task(M, 1, "x", priority=1)], 1e-3)]
    core = run("warpwell", requests)
    victims = [(e.name, e.why["rule"]) for e in core.log if e.kind == "preempt" and e.time < 1.5e-3]
    assert victims and victims[0][1] == "priority"
    assert core.jobs[2].started < 2e-3
    core = run("warpwell-no-preemption", requests)
    assert not [e for e in core.log if e.kind == "preempt"]


def test_warpwell_gives_tenants_their_weights() -> None:
    rates, weights = ClassTable(CAPACITY), {"a": 3.0, "b": 1.0}
    core = Core(Simulator(rates, capacity=CAPACITY, mode="drain"), policy("warpwell", slack=2e-3), tenants=weights)
    for i in range(400):
        core.submit(Request("r", [task((M, C)[i // 2 % 2], 1.0, tenant="ab"[i % 2])]))
    while core.executor.now() < 0.15:
        core.executor.wait(core.step())
        core.step()
    assert core.tenants["b"].waiting
    assert 2.4 < core.tenants["a"].used / core.tenants["b"].used < 3.6


def test_warpwell_lets_a_task_go_ahead_that_would_miss_its_deadline() -> None:
    requests = named(("a", C, 2, {}), ("b", C, 2, {}), ("urgent", C, 2, {"deadline": 4.5e-3}))
    assert launches(run("warpwell", requests, limit=1)) != ["a", "b", "urgent"]


def test_warpwell_runs_more_than_two() -> None:
    small = [Task("k", 66, Profile(kind=k, seconds=1e-3, need=0.06)) for k in (M, C, M, C)]
    core = run("warpwell", [Request("r", [one]) for one in small], limit=4)
    assert [job.started for job in core.jobs] == [0.0] * 4


def test_a_kernel_of_unknown_class_runs_alone_under_warpwell() -> None:
    requests = named(("a", None, 1, {}), ("b", C, 1, {}))
    core = run("warpwell", requests)
    assert core.jobs[1].started >= core.jobs[0].ended


def test_dominant_shares_are_equal_and_weighted() -> None:
    def job(registers, shared, blocks=10**6):
        profile = Profile(kind=M, seconds=1.0, registers=registers, shared=shared, threads=64, resident=132 * 32)
        made = Task("t", blocks, profile)
        return Job(made, Request("r", [made]), 0.0)

    capacity = Capacity(registers=256 << 10, shared=256 << 10, threads=2048, blocks=32)
    # One takes 1/16 of the registers a block, the other 1/8 of the shared memory and 1/256 of the registers.
    one, other = job(16 << 10, 0), job(1 << 10, 32 << 10)
    assert divide([one, other], [1, 1], capacity) == [15 * 132, None]
    # Two that want the same resource get half each, or by weight.
    assert divide([one, job(16 << 10, 0)], [1, 1], capacity) == [8 * 132, 8 * 132]
    assert divide([one, job(16 << 10, 0)], [3, 1], capacity) == [12 * 132, 4 * 132]
    # What one does not need goes to the other.
    assert divide([one, job(16 << 10, 0, blocks=132)], [1, 1], capacity) == [15 * 132, None]


def test_chimera_chooses_the_way_by_its_bound() -> None:
    def way(bound, modes, idempotent, blocks=1056 * 10):
        executor = ScriptedExecutor(Capacity(modes=modes))
        core = Core(executor, Chimera(bound=bound))
        made = task(C, 10.0, blocks=blocks, idempotent=idempotent)
        core.submit(Request("low", [made]))
        core.submit(Request("middle", [task(C, 10.0, priority=1)]))
        core.step()
        core.submit(Request("high", [task(C, 1.0, priority=5)]))
        core.step()
        return next((e.why["mode"], e.why["ways"]) for e in core.log if e.kind == "preempt")

    every = ("drain", "flush", "switch")
    # Blocks of 1 ms: a drain is expected to take half of one; a switch saves 8 blocks of 32 KiB on each of 132.
    # preempt_cycle = (0.09526 * 0.5 + 0.01633) * 32768 * 1056 = 2.213e6 cycles = 1.261 ms at 1.755 GHz
    mode, ways = way(1e-3, every, True, blocks=10560)
    assert mode == "drain" and ways["drain"] == [pytest.approx(0.5e-3), 0.0]
    assert ways["switch"][0] == pytest.approx(1.261e-3, rel=1e-3)
    assert way(1e-4, every, True)[0] == "flush"
    assert way(1e-4, every, False)[0] == "drain", "nothing is fast enough: the fastest"
    assert way(1e-4, ("drain", "flush"), True)[0] == "flush"


def test_orion_pairs_opposite_profiles_only() -> None:
    core = run("orion", named(("a", C, 1, {}), ("b", C, 1, {}), ("c", M, 1, {})))
    started = {job.task.name: job.started for job in core.jobs}
    assert started["a"] == started["c"] == 0.0
    assert started["b"] > 0.0


def test_orion_bounds_what_is_outstanding() -> None:
    core = run("orion", named(("a", C, 10, {}), ("b", M, 1, {})), outstanding=0.025)
    assert core.jobs[1].started >= core.jobs[0].ended
    core = run("orion", named(("a", C, 10, {}), ("b", M, 0.2, {})), outstanding=0.025)
    assert core.jobs[1].started == 0.0


def test_quotas_are_whole_blocks_a_multiprocessor() -> None:
    made = task(C, 10.0)  # 8 blocks of 32 KiB of registers fill a multiprocessor
    job = Job(made, Request("r", [made]), 0.0)
    assert quota(job, 1.0, CAPACITY) is None
    assert [quota(job, part, CAPACITY) for part in (0.3, 0.5, 0.7)] == [2 * 132, 4 * 132, 5 * 132]
    assert quota(job, 0.1, CAPACITY) == 105, "less than one each: on some"


def test_perfect_prediction_sees_the_truth() -> None:
    # Predicted as long, truly nearly over: only perfect prediction sees that there is nothing left to gain.
    def preempted(name, seconds):
        tasks = [task(M, 10.0, "stays"), task(M, 10.0, "liar")]
        truth = {one: Profile(kind=M, seconds=seconds) for one in tasks}
        core = Core(ScriptedExecutor(truth=truth, cost=1e-3), policy(name))
        for one in tasks:
            core.submit(Request("r", [one]))
        core.step()
        core.submit(Request("r", [task(C, 5.0)]))
        core.step()
        return [e.kind for e in core.log if e.kind in ("preempt", "hold")]

    assert preempted("source", 0.5e-3) == ["preempt"]
    assert preempted("source-perfect", 0.5e-3) == ["hold"]
    assert preempted("source-perfect", 10e-3) == ["preempt"]
