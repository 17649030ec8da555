"""Core: places, memory, quotas, requests, failures and cancellation; the waiting list; tenants."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness.scripted_executor import ScriptedExecutor

from lab.sched.rates import ClassTable
from lab.sched.simulator import Simulator
from warpwell import errors
from warpwell.scheduler import Policy, Profile
from warpwell.scheduler.core import Core
from warpwell.scheduler.extend import Capacity, Job, Kind, Launch, Placement, Preempt, Request, Resize, State, Task
from warpwell.scheduler.policies.order import LeftOver
from warpwell.scheduler.tenants import Tenant, Tenants
from warpwell.scheduler.waiting import Waiting

SMALL = Capacity(memory=100)


def task(name="t", seconds=1.0, **fields):
    return Task(name, 100, Profile(kind=Kind.COMPUTE, seconds=seconds), **fields)


def finish(core):
    for _ in range(10_000):
        until = core.step()
        if not core.busy:
            return core
        core.executor.wait(until)
    raise AssertionError("it does not end")


def started(core):
    return {job.task.name: job.started for job in core.jobs}


# -- requests -----------------------------------------------------------------------------------------------


def test_only_the_head_of_a_request_competes() -> None:
    core = Core(ScriptedExecutor(), "left-over", limit=4)
    jobs = core.submit(Request("app", [task("a"), task("b"), task("c")]))
    core.step()
    assert [job.state for job in jobs] == [State.RUNNING, State.WAITING, State.WAITING]
    assert core.waiting == []
    finish(core)
    assert [(job.arrival, job.started, job.ended) for job in jobs] == [(0, 0, 1), (1, 1, 2), (2, 2, 3)]


def test_a_request_arrives_when_it_says() -> None:
    core = Core(ScriptedExecutor(), "left-over")
    core.submit(Request("later", [task("later")], 5.0))
    core.submit(Request("now", [task("now")]))
    assert core.step() == 5.0
    finish(core)
    assert started(core) == {"later": 5.0, "now": 0.0}


def test_the_log_is_in_order_of_time_although_arrivals_are_seen_late() -> None:
    executor = ScriptedExecutor()
    core = Core(executor, "first-come")
    core.submit(Request("a", [task("a", 1.0)]))
    core.submit(Request("b", [task("b", 1.0)], 0.5))
    core.step()
    executor.wait(3.0)
    executor.wait(3.0)
    finish(core)
    assert [(e.time, e.kind, e.name) for e in core.log][:4] == [
        (0.0, "arrive", "a"),
        (0.0, "launch", "a"),
        (0.5, "arrive", "b"),
        (1.0, "end", "a"),
    ]


def test_jobs_that_have_ended_are_forgotten_on_request() -> None:
    core = Core(ScriptedExecutor(), "left-over", keep=False)
    for _ in range(3):
        core.submit(Request("r", [task(), task()]))
    assert len(core.jobs) == 6
    finish(core)
    assert core.jobs == []


def test_a_request_may_bring_the_numbers_of_its_tasks() -> None:
    core = Core(ScriptedExecutor(), "left-over")
    numbers = [
        [job.number for job in core.submit(Request("r", [task(), task()], first=first))] for first in (None, 7, 4, None)
    ]
    assert numbers == [[0, 1], [7, 8], [4, 5], [9, 10]]
    finish(core)
    assert {e.task for e in core.log if e.kind == "end"} == {0, 1, 4, 5, 7, 8, 9, 10}


# -- failures and cancellation ------------------------------------------------------------------------------


def test_a_failed_task_ends_its_request_and_frees_its_place_and_memory() -> None:
    boom = RuntimeError("boom")
    core = Core(ScriptedExecutor(SMALL, fails={"bad": boom}), "left-over", limit=1)
    bad = core.submit(Request("bad", [task("bad", memory=100), task("next"), task("last")]))
    good = core.submit(Request("good", [task("good", memory=100)]))
    finish(core)
    assert [job.state for job in bad] == [State.FAILED, State.CANCELLED, State.CANCELLED]
    assert bad[0].error is boom
    assert good[0].state is State.DONE
    assert core.admission.free == 100
    assert [(e.kind, e.name) for e in core.log][3:6] == [("fail", "bad"), ("cancel", "next"), ("cancel", "last")]


def test_a_launch_that_raises_is_the_failure_of_its_task() -> None:
    core = Core(ScriptedExecutor(SMALL, refuses={"bad": ValueError("no such argument")}), "left-over", limit=1)
    bad = core.submit(Request("bad", [task("bad", memory=60)]))[0]
    good = core.submit(Request("good", [task("good", memory=60)]))[0]
    finish(core)
    assert (bad.state, good.state, good.started) == (State.FAILED, State.DONE, 0.0)
    assert isinstance(bad.error, ValueError)
    assert core.admission.free == 100


def test_a_lost_task_is_logged_as_lost() -> None:
    core = Core(ScriptedExecutor(fails={"t": errors.TaskLostError("the device is gone")}), "left-over")
    core.submit(Request("r", [task()]))
    finish(core)
    assert [e.kind for e in core.log] == ["arrive", "launch", "lost"]


class Reshuffles(LeftOver):
    """Launches so that it can be preempted."""

    def decide(self, view):
        if len(view.running) >= view.limit or not view.waiting:
            return []
        return [Launch(view.waiting.first())]


def test_cancelling_one_that_waits_runs_or_is_still_to_come() -> None:
    executor = ScriptedExecutor(SMALL, cost=0.25)
    core = Core(executor, Reshuffles(), limit=1)
    running = core.submit(Request("a", [task("a", memory=100), task("a2")]))
    waiting = core.submit(Request("b", [task("b", memory=100)]))
    coming = core.submit(Request("c", [task("c"), task("c2")], 7.0))
    core.step()
    assert core.cancel(waiting[0])
    assert core.cancel(coming[0])
    assert core.cancel(running[0])
    assert running[0].state is State.STOPPING, "it leaves when its blocks let it"
    assert [job.state for job in (*waiting, *coming, running[1])] == [State.CANCELLED] * 4
    finish(core)
    assert running[0].state is State.CANCELLED
    assert running[0].ended == 0.25
    assert core.admission.free == 100
    assert ("discard", running[0].number) in executor.calls
    assert not core.busy


def test_a_later_task_of_a_request_can_be_cancelled_alone_with_those_after_it() -> None:
    core = Core(ScriptedExecutor(), "left-over")
    jobs = core.submit(Request("r", [task("a"), task("b"), task("c")]))
    core.step()
    assert core.cancel(jobs[1])
    finish(core)
    assert [job.state for job in jobs] == [State.DONE, State.CANCELLED, State.CANCELLED]


def test_one_that_ends_while_it_is_cancelled_is_done_and_its_request_is_not() -> None:
    core = Core(ScriptedExecutor(cost=5.0), Reshuffles())
    jobs = core.submit(Request("r", [task("a"), task("b")]))
    core.step()
    core.cancel(jobs[0])
    finish(core)
    assert [job.state for job in jobs] == [State.DONE, State.CANCELLED]


# -- memory -------------------------------------------------------------------------------------------------


def test_a_task_that_does_not_fit_waits_and_smaller_ones_go_on() -> None:
    core = Core(ScriptedExecutor(SMALL), "left-over", limit=3)
    for name, memory in (("a", 60), ("b", 60), ("c", 40), ("d", 0)):
        core.submit(Request(name, [task(name, memory=memory)]))
    finish(core)
    assert started(core) == {"a": 0.0, "b": 1.0, "c": 0.0, "d": 0.0}


def test_memory_is_kept_free_for_one_that_many_were_admitted_past() -> None:
    def large_starts(patience):
        core = Core(ScriptedExecutor(SMALL), "left-over", limit=2, patience=patience)
        for number in range(40):
            core.submit(Request("small", [task(f"s{number}", 1.0, memory=50)], 0.49 * number))
        core.submit(Request("large", [task("large", memory=100)], 0.6))
        finish(core)
        return sum(job.started < started(core)["large"] for job in core.jobs if job.task.name != "large")

    assert large_starts(4) <= 4 + 3
    assert large_starts(1000) == 40, "or this test could not fail"


def test_a_preempted_task_keeps_its_memory() -> None:
    class Once(Reshuffles):
        def decide(self, view):
            if len(view.running) == 1 and not view.running[0].preemptions and view.now >= 0.5:
                if view.running[0].state is State.RUNNING:
                    return [Preempt(view.running[0])]
                return []
            if view.running:
                return []
            return [Launch(job) for job in list(view.waiting)[-1:]]

    core = Core(ScriptedExecutor(SMALL), Once(), limit=1)
    first = core.submit(Request("first", [task("first", memory=70)]))[0]
    core.submit(Request("small", [task("small", memory=30)], 0.5))
    core.submit(Request("large", [task("large", memory=31)], 0.5))
    core.step()
    core.executor.wait(0.5)
    core.step()
    core.step()
    assert first.state is State.PREEMPTED
    assert [job.task.name for job in core.running] == ["small"], "31 more would not fit"
    assert core.admission.free == 0
    finish(core)
    assert all(job.state is State.DONE for job in core.jobs)


def test_a_task_larger_than_the_memory_creates_nothing() -> None:
    core = Core(ScriptedExecutor(SMALL), "left-over")
    with pytest.raises(errors.TaskMemoryError, match=r"'big' needs 101 bytes, but the device has 100") as caught:
        core.submit(Request("r", [task("a"), task("big", memory=101)]))
    assert caught.value.task == "big"
    assert core.jobs == [] and not core.busy
    assert [e.kind for e in core.log] == ["reject"]


# -- invalid decisions -------------------------------------------------------------------------------------


PLAIN = Placement(plain=True)


class Replaces(Policy):
    """Makes what runs leave for the first that waits, which takes its place; then it is wrong, if it is to be."""

    name = "replaces"
    wrong = False

    def decide(self, view):
        job = view.waiting.first()
        if job is None or len(view.running) > 1:
            return []
        if not view.running:
            return [Launch(job)]
        victim = view.running[0]
        if victim.state is not State.RUNNING:
            return []
        leaves = Preempt(victim, newcomer=job)
        return [leaves, Launch(victim)] if self.wrong else [leaves, Launch(job, behind=victim)]


@pytest.mark.parametrize("wrong", [False, True])
def test_the_log_is_written_when_the_device_has_been_told(wrong: bool) -> None:
    executor, policy = ScriptedExecutor(queues=True, cost=0.1), Replaces()
    core = Core(executor, policy)
    core.submit(Request("one", [task("one")]))
    core.step()
    policy.wrong = wrong
    executor.wait(0.2)
    core.submit(Request("other", [task("other")], 0.2))
    lengths = []
    for name in ("preempt", "launch_behind"):
        method = getattr(executor, name)
        setattr(executor, name, lambda *args, method=method: (lengths.append(len(core.log)), method(*args))[1])
    if wrong:
        with pytest.raises(errors.SchedulerError, match="correct the policy"):
            core.step()
    else:
        core.step()
    assert lengths == [2] * len(lengths) and len(lengths) == 2 - wrong
    kinds = ["arrive", "launch", "arrive", "preempt", *["launch"][wrong:]]
    assert [event.kind for event in core.log] == kinds


@pytest.mark.parametrize("limit", [1, 2])  # with one slot, the second task is queued after the first
def test_a_task_that_cancels_itself_while_it_is_launched_goes_on(limit: int) -> None:
    executor = ScriptedExecutor(queues=True)
    core = Core(executor, "first-come", limit=limit)
    _, cancelled, after = (core.submit(Request(name, [task(name)]))[0] for name in ("before", "cancelled", "after"))
    answers = []
    for name in ("launch", "launch_behind"):
        method = getattr(executor, name)

        def launch(job, *arguments, method=method):
            if job is cancelled:
                answers.append(core.cancel(cancelled))
            return method(job, *arguments)

        setattr(executor, name, launch)
    for _ in range(20):
        core.step()
        if core.running:
            executor.wait(None)
    assert answers[0] is False and cancelled.state is after.state is State.DONE


class Wrong(Policy):
    name = "wrong"

    def __init__(self, decide):
        self.decide_ = decide

    def decide(self, view):
        return self.decide_(view)


@pytest.mark.parametrize(
    ("decide", "message"),
    [
        (lambda view: [Launch(job) for job in view.waiting], "although 1 run already"),
        (lambda view: [Launch(view.waiting.first())] * 2, "is running"),
        (lambda view: [Preempt(view.waiting.first())], "is waiting"),
        (lambda view: [Preempt(j) for j in view.running] or [Launch(view.waiting.first(), PLAIN)], "launched plain"),
    ],
)
def test_a_policy_that_breaks_the_rules_is_told(decide, message) -> None:
    core = Core(ScriptedExecutor(), Wrong(decide), limit=1)
    for _ in range(2):
        core.submit(Request("r", [task()]))
    with pytest.raises(errors.SchedulerError, match=f"policy 'wrong' .*{message}"):
        core.step()


def test_a_limit_of_nothing() -> None:
    with pytest.raises(errors.ArgumentError, match="limit is 0: give an integer, 1 or more"):
        Core(ScriptedExecutor(), "left-over", limit=0)


def test_a_kernel_that_cannot_be_cut_runs_whole_and_says_why() -> None:
    executor = ScriptedExecutor()
    core = Core(executor, "source")
    core.submit(Request("r", [task(whole="it returns before a barrier, line 7")]))
    core.step()
    assert executor.calls[0][2].plain
    assert next(e.why["whole"] for e in core.log if e.kind == "launch") == "it returns before a barrier, line 7"


# -- tenants ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"a": {"share": 0.7}, "b": {"share": 0.4}}, r"110\.0%"),
        ({"a": {"share": 1.5}}, "share of tenant 'a' is 1.5: give"),
        ({"a": {"share": 0}}, "share of tenant 'a' is 0: give"),
        ({"a": {"memory": 60}, "b": {"memory": 0.5}}, "110 bytes, but the device has 100"),
        ({"a": {"memory": -1}}, "memory of tenant 'a' is -1: give"),
        ({"a": {"memory": float("inf")}}, "memory of tenant 'a' is inf: give"),
    ],
)
def test_quotas_over_what_there_is(settings, message) -> None:
    with pytest.raises(errors.QuotaError, match=message):
        Core(ScriptedExecutor(SMALL), "left-over", tenants=settings)


@pytest.mark.parametrize("settings", [None, {}, []])
def test_without_settings_any_tenant_is_welcome(settings) -> None:
    assert Tenants(Capacity(), settings).account("anybody").tenant.name == "anybody"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"a": {"weight": 0}}, "weight of tenant 'a'"),
        ({"a": {"speed": 3}}, "speed"),
        ({"a": {"window": 0}}, "window"),
        ([Tenant("a"), Tenant("a")], "two settings"),
        (3, "tenants has 3, which is not a Tenant: pass a dictionary"),
        ("ab", "tenants has 'a', which is not a Tenant: pass a dictionary"),
        ({3: 1}, "named 3: give a string"),
        ({"a": "x"}, "setting of tenant 'a' is 'x': pass a dictionary"),
        ({"a": True}, "setting of tenant 'a' is True"),
        ({"a": {"weight": "2"}}, "weight of tenant 'a' is '2': give a number"),
        ({"a": {"share": "0.5"}}, "share of tenant 'a' is '0.5': give a number"),
        ({"a": Tenant("b")}, "setting of tenant 'a' names tenant 'b'"),
    ],
)
def test_settings_that_cannot_be(settings, message) -> None:
    with pytest.raises(errors.ArgumentError, match=message):
        Core(ScriptedExecutor(), "left-over", tenants=settings)


def test_a_tenant_that_no_setting_names() -> None:
    core = Core(ScriptedExecutor(), "left-over", tenants={"a": 2.0})
    core.submit(Request("r", [task(tenant="a")]))
    with pytest.raises(errors.QuotaError, match=r"'z' has no setting.*one of a"):
        core.submit(Request("r", [task(tenant="a"), task(tenant="z")]))
    assert len(core.jobs) == 1


def test_a_tenant_holds_no_more_memory_than_its_quota_and_others_are_not_kept_waiting() -> None:
    core = Core(ScriptedExecutor(SMALL), "left-over", limit=4, tenants={"a": {"memory": 50}, "b": {}})
    for name, tenant in (("a1", "a"), ("a2", "a"), ("b1", "b"), ("b2", "b")):
        core.submit(Request(name, [task(name, memory=30, tenant=tenant)]))
    finish(core)
    assert started(core) == {"a1": 0.0, "a2": 1.0, "b1": 0.0, "b2": 0.0}
    with pytest.raises(errors.TaskMemoryError, match="its tenant may hold 50"):
        core.submit(Request("r", [task(memory=51, tenant="a")]))


def test_what_runs_is_charged_for_exactly_the_device() -> None:
    core = Core(ScriptedExecutor(Capacity(processors=40)), "left-over", limit=2)  # both tasks fit on the device
    core.submit(Request("a", [task("a", 2.0, tenant="a")]))
    core.submit(Request("b", [task("b", 1.0, tenant="b")]))
    finish(core)
    # One second is shared, one is solo.
    assert core.tenants["a"].used == pytest.approx(20 + 40)
    assert core.tenants["b"].used == pytest.approx(20)


def test_a_kernel_that_waits_for_room_on_the_device_is_not_charged() -> None:
    core = Core(ScriptedExecutor(Capacity(processors=10)), "left-over", limit=2)
    core.submit(Request("a", [task("a", 2.0, tenant="a")]))
    core.submit(Request("b", [task("b", 3.0, tenant="b")]))
    finish(core)
    assert core.tenants["a"].used == pytest.approx(20) and core.tenants["b"].used == pytest.approx(10)


def shares(burst, with_big=True, until=40.0):
    tenants = {"small": {"share": 0.25, "burst": burst, "window": 2.0}, "big": {}}
    core = Core(ScriptedExecutor(), "left-over", limit=1, tenants=tenants)
    for _ in range(100):
        core.submit(Request("r", [task("s", 0.5, tenant="small")]))
        if with_big:
            core.submit(Request("r", [task("b", 0.5, tenant="big")]))
    while core.executor.now() < until:
        core.executor.wait(core.step())
    return core.tenants["small"].used / (132 * until)


def test_a_tenant_over_its_quota_waits() -> None:
    # A quarter of the device, and one window's worth at the start.
    assert shares(burst=False) == pytest.approx(0.25, abs=0.05)
    assert shares(burst=False, with_big=False) == pytest.approx(0.25, abs=0.05), "without burst the rest stays idle"


def test_with_burst_a_quota_is_what_it_is_sure_of() -> None:
    assert shares(burst=True) == pytest.approx(0.25, abs=0.05)
    assert shares(burst=True, with_big=False) == pytest.approx(1.0, abs=0.02)


def test_places_that_nobody_within_a_quota_can_take_go_to_those_who_may_burst() -> None:
    # "sure" is within its quota and waits for memory that its own first task holds
    tenants = {"sure": {"share": 0.9, "memory": 60}, "burst": {"share": 0.01, "window": 1.0}}
    core = Core(ScriptedExecutor(SMALL), "left-over", limit=2, tenants=tenants)
    core.submit(Request("r", [task("a", 10.0, tenant="sure", memory=60)]))
    core.submit(Request("r", [task("b", 10.0, tenant="sure", memory=60)]))
    for number in range(5):
        core.submit(Request("r", [task(f"c{number}", 1.0, tenant="burst")]))
    while core.executor.now() < 9:
        core.executor.wait(core.step())
    assert [job.ended for job in core.jobs[2:]] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_tenant_over_its_quota_replaces_no_task_of_one_within_its_quota() -> None:
    """The replaced task would wait, bar the tenant that may burst, and be launched again, without end."""

    class Replace(Policy):
        name = "replace"

        def decide(self, view):
            heads, running = view.waiting.heads(), view.running
            if not heads or (running and running[0].state is not State.RUNNING):
                return []
            return [Preempt(running[0], "switch", heads[0], {"rule": "worth"}) if running else Launch(heads[0])]

    tenants = {"burst": {"share": 0.01, "window": 0.1}, "sure": {}}
    core = Core(ScriptedExecutor(), Replace(), limit=1, tenants=tenants)
    core.submit(Request("r", [task("first", 1.0, tenant="burst")]))
    core.submit(Request("r", [task("sure", 1.0, tenant="sure")], 1.0))
    core.submit(Request("r", [task("second", 1.0, tenant="burst")], 1.5))
    finish(core)
    assert [event.why["rule"] for event in core.log if event.kind == "hold"] == ["over quota"]
    assert started(core)["second"] == pytest.approx(2.0) and all(job.preemptions == 0 for job in core.jobs)


def test_a_preemption_that_waits_for_a_quota_happens_when_the_tenant_is_within_it() -> None:
    tenants = {"burst": {"share": 0.1, "window": 0.1}, "sure": {}}
    core = Core(ScriptedExecutor(), "lanes", limit=1, tenants=tenants)
    core.submit(Request("r", [task("first", 1.0, tenant="burst")]))
    core.submit(Request("r", [task("sure", 100.0, tenant="sure")], 1.0))
    second = core.submit(Request("r", [task("second", 1.0, tenant="burst", priority=5)], 1.5))[0]
    core.step()
    for core.executor._now in (1.0, 1.5):
        core.step()
    assert second in core.waiting  # not queued after the other task
    finish(core)
    assert started(core)["second"] == pytest.approx(10.9)


def test_one_that_comes_late_does_not_catch_up() -> None:
    tenants = Tenants(Capacity(processors=1), {"old": 1.0, "new": 1.0})
    made = task(tenant="old")
    job = Job(made, Request("r", [made]), 0.0)
    tenants.add_waiting(tenants["old"])
    tenants.charge([job], 100.0)
    assert tenants["old"].clock == 100.0
    tenants.add_waiting(tenants["new"])
    assert tenants["new"].clock == 100.0


# -- invalid tasks ------------------------------------------------------------------------------------------

HUGE = 10**5000


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("priority", ("high", None, 0.5, 2**63, -HUGE)),
        ("deadline", ("soon", 0.0, -1, math.nan, math.inf, 1.1e9, HUGE)),
        ("memory", ("much", None, -1, math.nan, 0.5, HUGE)),
        ("blocks", (0, 2.0, HUGE)),
        ("name", (3, None)),
        ("tenant", ([], None)),
        ("profile", ("x", {})),
    ],
)
def test_a_task_that_cannot_be_is_refused_where_it_is_made(name, values) -> None:
    for value in values:
        with pytest.raises(errors.ArgumentError, match=f"^{name} of.*(give|pass|must be)") as caught:
            Task(**{"name": "t", "blocks": 1, name: value})
        assert caught.value.name == name


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("kind", ("Memory", 1, ["memory"])),
        *((n, ("long", -1, math.nan, math.inf, HUGE)) for n in ("seconds", "instructions")),
        *((n, ("x", None, -0.1, 1.1, math.nan, HUGE)) for n in ("miss_rate", "bandwidth", "compute", "need")),
        *((n, ("x", None, -1, 0.5, math.nan, HUGE)) for n in ("registers", "shared", "threads", "resident")),
    ],
)
def test_a_profile_that_cannot_be_is_refused_where_it_is_made(name, values) -> None:
    for value in values:
        with pytest.raises(errors.ArgumentError, match=f"^{name} of a profile.*(give|must be)") as caught:
            Profile(**{name: value})
        assert caught.value.name == name


def test_a_profile_takes_the_text_of_a_class() -> None:
    assert Profile(kind="memory") == Profile(kind=Kind.MEMORY)


# -- the waiting list ---------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans()), max_size=60), st.integers(0, 2**16))
def test_the_waiting_list_is_a_sorted_list_in_buckets(entries, seed) -> None:
    """Against a plain list: additions in any order, removals anywhere, and heads of buckets with some not allowed."""
    chance = random.Random(seed)
    forbidden = set()
    waiting = Waiting(lambda job: job.task.priority, lambda job: job.arrival, lambda job: job not in forbidden)
    model = []
    for number, (arrival, bucket, removes) in enumerate(entries):
        made = task(priority=bucket)
        job = Job(made, Request("r", [made]), float(arrival), number=number)
        waiting.add(job)
        model.append(job)
        model.sort(key=lambda j: (j.arrival, j.number))
        if chance.random() < 0.2:
            forbidden.add(job)
        if removes:
            for _ in range(chance.randrange(3)):
                if model:
                    removed = model[0] if chance.random() < 0.5 else chance.choice(model)
                    model.remove(removed)
                    waiting.remove(removed) if chance.random() < 0.5 else waiting.launched(removed)
        allowed = [j for j in model if j not in forbidden]
        assert waiting.everything == model
        assert list(waiting) == allowed and len(waiting) == len(allowed) and bool(waiting) == bool(allowed)
        assert waiting.first() is (allowed[0] if allowed else None)
        heads = {b: next(j for j in allowed if j.task.priority == b) for b in {j.task.priority for j in allowed}}
        assert {j.task.priority: j for j in waiting.heads()} == heads
        assert all((j in waiting) == (j in model) for j in (job, *model))


def test_waiting_ages_by_those_that_pass() -> None:
    waiting = Waiting(lambda job: job.task.priority, lambda job: job.arrival)
    jobs = []
    for number, priority in enumerate((0, 1, 1, 0)):
        made = task(priority=priority)
        jobs.append(Job(made, Request("r", [made]), 0.0, number=number))
        waiting.add(jobs[-1])
    waiting.launched(jobs[1])
    waiting.launched(jobs[2])
    assert waiting.passed(jobs[0]) == 2
    waiting.launched(jobs[0])
    assert waiting.passed(jobs[3]) == 0, "its bucket has had its turn"


@pytest.mark.parametrize("name", ["first-come", "source", "lanes"])
def test_a_decision_looks_at_few_however_many_wait(name) -> None:
    """Counted in looks at jobs, which no busy machine changes."""

    def looks(backlog):
        core = Core(ScriptedExecutor(), name)
        for number in range(backlog):
            kind = list(Kind)[number % 2]
            # A task with memory makes the core ask whether it may be launched.
            core.submit(Request("r", [Task("t", 100, Profile(kind=kind, seconds=1.0), memory=1)]))
        core.step()
        count = 0
        allowed = core._queue.allowed

        def counted(job):
            nonlocal count
            count += 1
            return allowed(job)

        core._queue.allowed = counted
        while core.executor.now() < 30:
            core.executor.wait(core.step())
        return count

    few = looks(100)
    assert 20 <= few == looks(3000)


# -- trains -------------------------------------------------------------------------------------------------


class Ahead(LeftOver):
    """Launches as many jobs as it may."""

    ahead = 6

    def decide(self, view):
        active = len(view.running) + sum(map(len, view.trains.values()))
        return [Launch(job, PLAIN) for job in list(view.waiting)[: view.limit + self.ahead - active]]


def train(limit=1, count=5, policy=None, **options):
    core = Core(ScriptedExecutor(**options), policy or Ahead(), limit=limit)
    for k in range(count):
        core.submit(Request(f"t{k}", [task(f"t{k}", tenant=f"user{k % 2}")]))
    core.step()
    return core


def events_of(core, kind):
    return [(event.time, event.task) for event in core.log if event.kind == kind]


@pytest.mark.parametrize("queues", [False, True])
def test_jobs_of_a_train_take_one_place_and_run_in_turn(queues: bool) -> None:
    core = train(queues=queues)
    assert [job.number for job in core.running] == [0] and len(core.waiting) == (0 if queues else 4)
    finish(core)
    assert [(job.started, job.ended, job.ran) for job in core.jobs] == [(k, k + 1, 1.0) for k in range(5)]
    assert events_of(core, "end") == [(k + 1.0, k) for k in range(5)]
    # only the job that holds the slot is charged
    assert [core.tenants[f"user{k}"].used for k in range(2)] == [3 * 132, 2 * 132]
    behind = [event.why.get("behind") for event in core.log if event.kind == "launch"]
    assert behind == ([None, 0, 1, 2, 3] if queues else [None] * 5)
    assert events_of(core, "launch") == [(0.0 if queues else float(k), k) for k in range(5)]
    kinds = [call[0] for call in core.executor.calls]
    assert kinds == (["launch"] + ["behind"] * 4 if queues else ["launch"] * 5)


@pytest.mark.parametrize("queues", [False, True])
def test_the_shortest_train_gets_the_next(queues: bool) -> None:
    core = train(limit=2, count=8, queues=queues)
    assert [job.number for job in core.running] == [0, 1]
    finish(core)
    assert [job.ended for job in core.jobs] == [1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("queues", [False, True])
def test_a_job_in_a_train_may_be_cancelled_before_its_turn(queues: bool) -> None:
    core = train(queues=queues)
    jobs = core.jobs
    assert core.may_leave(jobs[2]) and not core.may_leave(jobs[0])
    assert core.cancel(jobs[2]) and core.cancel(jobs[4])
    finish(core)
    assert [job.state for job in jobs] == [
        State.DONE,
        State.DONE,
        State.CANCELLED,
        State.DONE,
        State.CANCELLED,
    ]
    assert jobs[1].ended == 2 and core.admission.free == core.executor.capacity.memory
    assert not core.busy and all(account.running == 0 for account in core.tenants.values())


def test_a_job_in_a_train_may_be_preempted_and_comes_again() -> None:
    class Once(Ahead):
        adjusts = True
        has_preempted = False

        def decide(self, view):
            if self.has_preempted or view.now < 1.0:
                return super().decide(view)
            self.has_preempted = True
            return [Preempt(view.trains[view.running[0]][-1])]

    core = train(queues=True, policy=Once())
    finish(core)
    last = core.jobs[4]
    assert last.state is State.DONE and last.preemptions == 1 and last.ran == 1.0
    assert [events_of(core, kind)[0][1] for kind in ("preempt", "stop")] == [4, 4]
    assert len(events_of(core, "launch")) == 6 and len(events_of(core, "end")) == 5


@pytest.mark.parametrize("queues", [False, True])
def test_a_failure_in_a_train_stops_nobody_else(queues: bool) -> None:
    core = train(queues=queues, refuses={"t2": errors.ArgumentError("no")}, fails={"t1": errors.KernelError("bad")})
    finish(core)
    states = [State.DONE, State.FAILED, State.FAILED, State.DONE, State.DONE]
    assert [job.state for job in core.jobs] == states
    assert not core.busy and all(account.running == 0 for account in core.tenants.values())


def test_more_than_a_policy_says_are_no_train() -> None:
    class TooMany(Ahead):
        def decide(self, view):
            return [Launch(job, PLAIN) for job in view.waiting]

    with pytest.raises(errors.SchedulerError, match="launched 't7' although 1 run already"):
        train(count=9, queues=True, policy=TooMany())


def test_a_place_that_becomes_free_beside_a_train_is_given_at_once() -> None:
    class TwoPlaces(Ahead):
        def decide(self, view):
            free = view.limit - len(view.running)
            long = [job for job in view.waiting if job.task.name == "long"]
            short = [job for job in view.waiting if job.task.name == "short"]
            if free == 2:
                return [Launch(long[0]), Launch(short[0], PLAIN)]
            if free:
                return [Launch(job) for job in long[:1]]
            return [] if view.trains else [Launch(job, PLAIN) for job in short[:6]]

    core = Core(ScriptedExecutor(queues=True), TwoPlaces(), limit=2)
    for name, seconds, count in (("long", 2.25, 2), ("short", 1.0, 7)):
        for _ in range(count):
            core.submit(Request(name, [task(name, seconds)]))
    finish(core)
    assert [job.started for job in core.jobs if job.task.name == "long"] == [0.0, 2.25]


class Behind(Policy):
    """Runs one job as workers with the next one queued after it; `times` are the times of its decisions."""

    name = "behind"
    ahead = 2
    adjusts = True
    period = 0.25

    def __init__(self, *scheduled):
        self.times, self.scheduled = [], list(scheduled)

    def decide(self, view):
        self.times.append(view.now)
        for time, decide in self.scheduled:
            if view.now >= time:
                self.scheduled.remove((time, decide))
                return decide(view)
        job, running = view.waiting.first(), view.running
        if job is None or view.trains or any(running_job.state is State.STOPPING for running_job in running):
            return []
        return [Launch(job, behind=running[0] if running else None)]


def lane(*scheduled, count=3, queues=True, fields=None, **options):
    executor = ScriptedExecutor(options.pop("capacity", None), queues=queues, **options)
    core = Core(executor, Behind(*scheduled), limit=1)
    for k in range(count):
        core.submit(Request(f"t{k}", [task(f"t{k}", **(fields or {}))]))
    core.step()
    return core


@pytest.mark.parametrize("queues", [False, True])
def test_workers_behind_workers_take_their_place(queues: bool) -> None:
    core = lane(queues=queues)
    assert [job.number for job in core.running] == [0]
    assert [job.number for job in core.waiting] == ([2] if queues else [1, 2])
    finish(core)
    assert [(job.started, job.ended, job.ran) for job in core.jobs] == [(k, k + 1, 1.0) for k in range(3)]
    behind = [event.why.get("behind") for event in core.log if event.kind == "launch"]
    assert behind == ([None, 0, 1] if queues else [None] * 3)
    assert {1.0, 2.0} <= set(core.policy.times)  # the core decides at each end
    kinds = [call[0] for call in core.executor.calls]
    assert kinds == (["launch", "behind", "behind"] if queues else ["launch"] * 3)
    assert core.tenants["default"].used == 3 * 132


@pytest.mark.parametrize("cost", [0.0, 0.2])
def test_who_is_behind_a_preempted_job_leaves_first_and_a_newcomer_takes_the_place(cost: float) -> None:
    def replace(view):
        first = view.running[0]
        return [Preempt(first, newcomer=view.waiting.first()), Launch(view.waiting.first(), behind=first)]

    core = lane((0.25, replace), cost=cost)
    core.executor.wait(0.25)
    finish(core)
    jobs = core.jobs
    assert jobs[2].started == 0.25 + cost
    recorded = [(event.kind, event.task) for event in core.log if event.kind in ("preempt", "stop")]
    assert [task for kind, task in recorded if kind == "preempt"] == [1, 0]
    assert {task for kind, task in recorded if kind == "stop"} == {0, 1}
    assert [job.preemptions for job in jobs] == [1, 1, 0] and all(job.state is State.DONE for job in jobs)
    assert [call[1] for call in core.executor.calls if call[0] == "preempt"] == [1, 0]
    assert sum(job.ran for job in jobs) == pytest.approx(3.0)


@pytest.mark.parametrize("queues", [False, True])
def test_who_is_behind_a_cancelled_job_takes_its_place(queues: bool) -> None:
    core = lane(queues=queues, cost=0.125)
    core.executor.wait(0.25)
    core.step()
    assert core.cancel(core.jobs[0])
    finish(core)
    assert [job.state for job in core.jobs] == [State.CANCELLED, State.DONE, State.DONE]
    assert [job.started for job in core.jobs] == [0, 0.375, 1.375]
    assert not core.busy and core.tenants["default"].running == 0


def test_one_behind_another_holds_its_memory_and_gives_it_back() -> None:
    core = lane(capacity=SMALL, fields={"memory": 40})
    assert core.admission.free == 20
    assert core.cancel(core.jobs[1])
    core.step()
    core.executor.wait(core.executor.now())
    core.step()
    assert core.jobs[1].state is State.CANCELLED and core.jobs[2].state is State.RUNNING
    finish(core)
    assert core.admission.free == 100 and [job.ended for job in core.jobs[::2]] == [1.0, 2.0]


@pytest.mark.parametrize("queues", [False, True])
def test_a_failure_behind_another_or_before_it_stops_nobody_else(queues: bool) -> None:
    core = lane(
        count=4, queues=queues, refuses={"t1": errors.ArgumentError("no")}, fails={"t2": errors.KernelError("bad")}
    )
    finish(core)
    assert [job.state for job in core.jobs] == [State.DONE, State.FAILED, State.FAILED, State.DONE]
    assert not core.busy and core.tenants["default"].running == 0


REQUESTS = {
    "preempt": lambda view: [Preempt(view.running[0])],
    "resize": lambda view: [Resize(view.running[0], 2, younger=True)],
}


@pytest.mark.parametrize("name", REQUESTS)
def test_an_executor_that_cannot_do_what_is_asked_of_one_that_runs_stops_nobody(name: str) -> None:
    class Once(Behind):
        def decide(self, view):
            if view.now >= 0.25 and self.scheduled:
                return self.scheduled.pop()(view)
            return [Launch(job) for job in list(view.waiting)[: view.limit - len(view.running)]]

    executor = ScriptedExecutor(raises={name: OSError("the device is busy")}, queues=True)
    core = Core(executor, Once(REQUESTS[name]), limit=2)
    for k in range(4):
        core.submit(Request(f"t{k}", [task(f"t{k}")]))
    finish(core)
    assert sum(call[0] == name for call in executor.calls) == 1
    assert [job.state for job in core.jobs] == [State.DONE] * 4 and not core.busy
    assert core.tenants["default"].running == 0
    assert [e.kind for e in core.log if "the device is busy" in str(e.why.get("error"))] == [name]


def test_one_whose_cancelling_raises_runs_to_its_end() -> None:
    core = Core(ScriptedExecutor(raises={"preempt": OSError("the device is busy")}), Behind(), limit=1)
    core.submit(Request("t", [task("t"), task("later")]))
    core.step()
    assert core.cancel(core.jobs[0])
    finish(core)
    assert [job.state for job in core.jobs] == [State.DONE, State.CANCELLED]


def test_a_device_that_is_lost_when_something_is_asked_of_it_ends_the_core() -> None:
    core = lane((0.25, REQUESTS["preempt"]), raises={"preempt": errors.TaskLostError("the device is gone")})
    core.executor.wait(0.25)
    with pytest.raises(errors.TaskLostError, match="gone"):
        core.step()


@pytest.mark.parametrize(
    ("decide", "message"),
    [
        (lambda view: [Launch(view.waiting.first(), behind=view.trains[view.running[0]][0])], "which is running"),
        (lambda view: [Resize(view.trains[view.running[0]][0], 4)], "which has not started"),
    ],
)
def test_what_cannot_be_done_with_one_that_has_not_begun(decide, message) -> None:
    core = lane((0.5, decide))
    core.executor.wait(0.5)
    with pytest.raises(errors.SchedulerError, match=message):
        core.step()


class Wild(Policy):
    """Launches, preempts and resizes random jobs."""

    name = "wild"
    ahead, adjusts, watches, period = 5, True, True, 0.125

    def __init__(self, rng):
        self.rng = rng

    def decide(self, view):
        rng, running = self.rng, view.running
        behind = [job for train in view.trains.values() for job in train]
        if running and rng.random() < 0.3:
            job = rng.choice([*running, *behind])
            may = job.state is State.RUNNING and (job in behind or not job.placement.plain)
            if may and rng.random() < 0.5:
                found = [Preempt(job)]
                if job in running and view.waiting and len(behind) < self.ahead:
                    found.append(Launch(view.waiting.first(), Placement(3), behind=job))
                return found
            if job in running:
                return [Resize(job, rng.randrange(1, 9), younger=rng.random() < 0.5)]
        waiting = list(view.waiting)
        if not waiting:
            return []
        job = rng.choice(waiting)
        if len(running) < view.limit and (not running or rng.random() < 0.5):
            return [Launch(job, rng.choice([PLAIN, Placement(), Placement(5)]))]
        if len(behind) < self.ahead and rng.random() < 0.5:
            return [Launch(job, rng.choice([PLAIN, Placement()]), behind=rng.choice(running))]
        return []


@pytest.mark.parametrize("device", ["queues", "refuses", "simulator"])
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=60, deadline=None)
def test_whatever_a_policy_does_every_task_ends_and_gives_back_what_it_had(device: str, seed: int) -> None:
    rng = random.Random(seed)
    if device == "simulator":
        executor = Simulator(ClassTable(SMALL), SMALL, mode=rng.choice(["switch", "drain"]), seed=1)
        unit = 1e-3
    else:
        fails = {"bad": errors.KernelError("bad")}
        executor = ScriptedExecutor(SMALL, queues=device == "queues", cost=rng.choice([0.0, 0.1]), fails=fails)
        unit = 1.0
    core = Core(executor, Wild(rng), limit=rng.randrange(1, 4))
    core.policy.period *= unit
    for k in range(rng.randrange(1, 14)):
        names = rng.choices(["good", "bad"], [4, 1], k=rng.randrange(1, 3))
        tasks = [task(name, unit * rng.choice([0.25, 1.0, 2.0]), memory=rng.choice([0, 0, 30, 60])) for name in names]
        core.submit(Request(f"r{k}", tasks, unit * rng.choice([0.0, 0.5, 3.0])))
    for _ in range(4000):
        until = core.step()
        assert len(core.running) <= core.limit and len(set(core.running)) == len(core.running)
        assert set(core._trains) <= set(core.running)
        behind = [job for train in core._trains.values() for job in train]
        assert len(set(behind)) == len(behind)
        assert all(job.train is train for train in core._trains.values() for job in train)
        assert not set(behind) & set(core.running) and all(core._trains.values())
        assert all(job.train is None for job in core.jobs if job not in behind)
        if device == "queues":
            assert set(executor._ends) == {*core.running, *behind}  # the ends of exactly the launched jobs are known
        assert device != "refuses" or not behind
        if rng.random() < 0.03:
            core.cancel(rng.choice(core.jobs))
        if not core.busy:
            break
        executor.wait(until)
    ends = (State.DONE, State.FAILED, State.CANCELLED)
    assert not core.busy and all(job.state in ends for job in core.jobs)
    assert all(job.done == job.task.blocks for job in core.jobs if job.state is State.DONE)
    assert core.admission.free == 100
    assert all(a.running == a.waiting == a.held == 0 for a in core.tenants.values())


class _NotThisOne(ScriptedExecutor):
    """Cannot queue one of the jobs."""

    def launch_behind(self, job, placement, before):
        return job.task.name != "t1" and super().launch_behind(job, placement, before)


def test_no_later_job_overtakes_one_that_cannot_be_queued() -> None:
    core = Core(_NotThisOne(queues=True), Ahead(), limit=1)
    jobs = [core.submit(Request(f"t{k}", [task(f"t{k}")]))[0] for k in range(4)]
    finish(core)
    assert [(job.state, job.started) for job in jobs] == [(State.DONE, k) for k in range(4)]
    behind = [event.why.get("behind") for event in core.log if event.kind == "launch"]
    assert behind == [None, None, 1, 2], "the next ones are queued when it runs"
