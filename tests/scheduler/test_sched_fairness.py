"""Fairness between tenants: claims (priorities, deadlines, times, memory) get no tenant more than its fair share."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from lab.sched.rates import ClassTable
from lab.sched.simulator import Simulator
from warpwell import errors
from warpwell.scheduler import Profile
from warpwell.scheduler.admission import Admission
from warpwell.scheduler.core import Core
from warpwell.scheduler.executors.cuda_run import CudaRun
from warpwell.scheduler.extend import Capacity, Job, Kind, Request, Task
from warpwell.scheduler.policies.sharing import remaining_seconds
from warpwell.scheduler.task import Placement, State
from warpwell.scheduler.tenants import Tenant, Tenants

CAPACITY = Capacity()


def profile(seconds: float, kind: Kind = Kind.COMPUTE, **fields: Any) -> Profile:
    return Profile(kind=kind, seconds=seconds, registers=16384, resident=1056, bandwidth=0.1, compute=0.9, **fields)


def core_of(tenants: Any, truth: Any = None) -> Core:
    executor = Simulator(ClassTable(CAPACITY), CAPACITY, mode="drain", truth=truth)
    return Core(executor, "lanes", tenants=tenants)


def submit(core: Core, tenant: str, seconds: float, count: int, **fields: Any) -> list[Job]:
    found = []
    for _ in range(count):
        made = Task(f"k{tenant}", 8448, fields.pop("claims", None) or profile(seconds), tenant=tenant, **fields)
        found += core.submit(Request(tenant, [made]))
    return found


def drive(core: Core, over: Callable[[], bool]) -> None:
    while core.busy and not over():
        core.executor.wait(core.step())


@pytest.mark.parametrize("claims", [{"priority": 1000}, {"priority": 1 << 62}, {"deadline": 1e-9}])
@pytest.mark.parametrize("tenants", [{"a": 1, "b": 1}, {"a": 100, "b": 1}, None])
def test_what_a_tenant_claims_gets_it_ahead_by_a_second_and_no_more(tenants: Any, claims: dict[str, Any]) -> None:
    core = core_of(tenants)
    greedy, modest = submit(core, "b", 5e-3, 1500, **claims), submit(core, "a", 5e-3, 20)
    drive(core, lambda: all(j.ended for j in modest))
    # One second, and the greedy tenant's fair share of the time until then.
    assert sum(j.ended is not None for j in greedy) < 200 + 60


def test_an_operator_gives_a_tenant_priority_for_as_long_as_it_likes() -> None:
    core = core_of({"a": {}, "b": {"priority": 3}})
    first, second = submit(core, "b", 5e-3, 400), submit(core, "a", 5e-3, 1)
    drive(core, lambda: second[0].started is not None)
    assert sum(j.ended is not None for j in first) > 90  # 32 for each priority


def test_priorities_count_up_to_the_ceiling_of_a_tenant() -> None:
    core = core_of({"a": {}, "b": {"ceiling": 2}, "c": {"ceiling": 0}, "d": {"ceiling": 1 << 40}})
    expected = {"a": (8, -8, 5), "b": (2, -2, 2), "c": (0, 0, 0), "d": (1 << 40, -(1 << 40), 5)}
    for name, priorities in expected.items():
        found = [submit(core, name, 1e-3, 1, priority=p)[0].priority for p in (1 << 62, -(1 << 62), 5)]
        assert tuple(found) == priorities
    core.step()
    recorded = [e.why for e in core.log if e.kind == "arrive" and e.tenant == "b"]
    assert recorded == [{"submitted": p, "priority": q} for p, q in ((1 << 62, 2), (-(1 << 62), -2), (5, 2))]


@pytest.mark.parametrize(
    "wrong", [{"ceiling": -1}, {"ceiling": 1.5}, {"ceiling": True}, {"priority": 1 << 63}, {"priority": math.nan}]
)
def test_settings_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(errors.ArgumentError, match=f"{next(iter(wrong))} of tenant 'x'"):
        Tenant("x", **wrong)


@pytest.mark.parametrize("long", [20e-3, 100e-3])
@pytest.mark.parametrize("share", [None, 0.5])
def test_equal_tenants_do_equal_work_however_long_their_kernels_are(long: float, share: float | None) -> None:
    """Short ones wait behind long ones on the device for most of the time, and must not be charged for it."""
    settings = 1 if share is None else {"share": share, "burst": False}
    core = core_of({"a": settings, "b": settings})
    jobs = {"a": submit(core, "a", long, int(6 / long)), "b": submit(core, "b", 2e-3, 3000)}
    drive(core, lambda: core.executor.now() >= 4.0)
    work = {t: sum(j.task.profile.seconds or 0.0 for j in own_jobs if j.ended) for t, own_jobs in jobs.items()}
    assert abs(work["a"] - work["b"]) < (0.2 if long < 0.05 else 1.2), work  # aging: up to a second ahead
    used = {t: core.tenants[t].used / CAPACITY.processors for t in jobs}
    assert all(used[t] == pytest.approx(work[t], abs=2 * long) for t in jobs)


def test_who_used_an_idle_device_owes_nobody_for_it() -> None:
    core = core_of({"a": 1, "b": 1})
    submit(core, "b", 0.5, 4)
    drive(core, lambda: False)
    first, second = submit(core, "a", 5e-3, 100), submit(core, "b", 5e-3, 100)
    drive(core, lambda: all(j.ended for j in first))
    assert sum(j.ended is not None for j in second) > 80


def test_a_time_that_was_said_is_believed_until_it_is_over() -> None:
    made = Task("k", 100, profile(1.0))
    job = Job(made, Request("r", [made]), 0.0, state=State.RUNNING, placement=Placement())
    for now, done, expected in ((0.5, 0, 1.0), (1.0, 0, 1.0), (3.0, 0, 3.0), (3.0, 25, 9.0), (0.5, 75, 0.25)):
        job.done = done
        assert remaining_seconds(job, now) == pytest.approx(expected)
    job.done, job.ran, job.placement = 50, 4.0, None  # a preempted job does not age while it waits
    assert remaining_seconds(job, 9.0) == pytest.approx(4.0)


class Cut:
    preemptible, blocks = False, 10_000


def run_of(expected_profile: Profile, **cut: Any) -> CudaRun:
    made = Task("k", 10_000, expected_profile)
    run = CudaRun(Job(made, Request("r", [made]), 0.0), Placement())
    blocks: Any = Cut()
    vars(blocks).update(cut)
    run.blocks, run.resources = blocks, {"resident": 10}
    return run


def test_what_is_only_said_to_be_short_can_be_asked_to_leave() -> None:
    for source, form in (("given", "workers"), ("measured", "plain"), ("predicted", "plain")):
        assert run_of(profile(1e-6, source=source), preemptible=True).form == form


def test_what_stays_on_the_device_counts_and_stands_in_nobodys_way() -> None:
    tenants = Tenants(CAPACITY, {"a": {"memory": 1000}, "b": {}})
    admission = Admission(10_000, tenants, patience=2)
    admission.reserve("a", 600)
    with pytest.raises(errors.TaskMemoryError, match=r"tenant 'a' may have 400 more bytes .* the array has 401"):
        admission.reserve("a", 401)
    with pytest.raises(errors.TaskMemoryError, match="9400 more"):
        admission.reserve("b", 9401)
    with pytest.raises(errors.QuotaError):
        admission.reserve("c", 1)
    admission.reserve("b", 9000)

    def job(number: int, memory: int, tenant: str, resident_bytes: int = 0) -> Job:
        made = Task("k", 1, memory=memory, resident_bytes=resident_bytes, tenant=tenant)
        return Job(made, Request("r", [made]), 0.0, number=number)

    large = job(0, 5000, "b")
    assert not admission.allowed(large)  # not before arrays of the same tenant are freed
    for number in range(1, 9):
        small = job(number, 100, "a")
        assert admission.allowed(small)
        admission.admit(small)
        admission.release_job(small)
    assert not admission.allowed(job(9, 500, "a")) and admission.allowed(job(9, 400, "a", resident_bytes=400))
    admission.release("b", 9000)
    assert admission.allowed(large) and admission.free == 9400 and tenants["b"].held == tenants["b"].reserved == 0


def test_what_was_to_be_over_soon_and_is_not_leaves_for_a_higher_priority() -> None:
    """The other one comes when it still may be true, and nothing else happens for a long time."""
    truth: dict[Task, Profile] = {}
    core = core_of(None, truth)
    claimed = profile(1e-6)
    for _ in range(2):
        made = Task("long", 84480, claimed)
        truth[made] = profile(10.0)
        core.submit(Request("long", [made]))
    short = core.submit(Request("short", [Task("short", 100, profile(1e-3), priority=1)], 1e-5))[0]
    drive(core, lambda: short.ended is not None)
    assert short.ended is not None and short.ended < 0.1
