"""PolicyConformance: tests that every policy passes. A subclass creates the policy.

Needs pytest and hypothesis. Pytest collects a subclass in a test module::

    class TestMine(PolicyConformance):
        def make(self):
            return MyPolicy()
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lab.sched.rates import ClassTable
from lab.sched.simulator import Simulator
from warpwell import errors
from warpwell.scheduler import Policy, Profile
from warpwell.scheduler.extend import Capacity, Core, Ended, Job, Kind, Request, State, Stopped, Task

CAPACITY = Capacity(memory=1000)
LIFE = re.compile(r"arrive( launch( resize)*( preempt stop)?)* (end|fail|cancel|preempt end)")
"""Events of a task, in order: the valid sequences. ("hold" concerns other tasks and is left out.)"""


class Failing(Simulator):
    """A simulation in which tasks of some names end with an error."""

    def __init__(self, *args: Any, fails: Iterable[str] = (), **options: Any) -> None:
        super().__init__(*args, **options)
        self._fails = frozenset(fails)

    def poll(self) -> list[Ended | Stopped]:
        """Return the events; the end of a failing task has an error."""
        return [
            Ended(e.job, e.time, RuntimeError("planted"))
            if isinstance(e, Ended) and e.job.task.name in self._fails
            else e
            for e in super().poll()
        ]


def task(kind: Kind | None = Kind.COMPUTE, milliseconds: float = 1.0, name: str = "", **fields: Any) -> Task:
    """Return a task that fills the device, or has as many blocks as its time allows."""
    name = name or (kind.value if kind else "unknown")
    blocks = fields.pop("blocks", max(1, int(milliseconds * 1056)))
    return Task(name, blocks, Profile(kind=kind, seconds=milliseconds * 1e-3), **fields)


_tasks = st.builds(
    task,
    kind=st.sampled_from([Kind.MEMORY, Kind.COMPUTE]),
    milliseconds=st.sampled_from([0.1, 0.5, 1.0, 3.0]),
    blocks=st.sampled_from([1, 100, 1056, 10560]),
    priority=st.sampled_from([0, 0, 0, 2]),
    tenant=st.sampled_from(["a", "b"]),
    memory=st.sampled_from([0, 0, 300, 600]),
    deadline=st.sampled_from([None, None, 0.004]),
    whole=st.sampled_from(["", "", "", "it has a barrier"]),
)
_requests = st.lists(
    st.builds(
        lambda tasks, gap: (tasks, gap),
        st.lists(_tasks, min_size=1, max_size=3),
        st.sampled_from([0.0, 0.0, 2e-4, 2e-3]),
    ),
    min_size=1,
    max_size=8,
)


def arrivals(entries: Iterable[tuple[list[Task], float]]) -> list[Request]:
    """Return requests that arrive one after another, each with its gap."""
    time, found = 0.0, []
    for number, (tasks, gap) in enumerate(entries):
        time += gap
        found.append(Request(f"request {number}", tasks, time))
    return found


class PolicyConformance:
    """Tests that every policy must pass. A subclass implements `make`."""

    def make(self) -> Policy:
        """Return a new policy."""
        raise NotImplementedError

    def core(
        self,
        *,
        limit: int = 2,
        mode: str = "switch",
        fails: Iterable[str] = (),
        tenants: Mapping[str, Any] | None = None,
        truth: Mapping[Task, Profile] | None = None,
    ) -> Core:
        """Return a scheduler with this policy on a simulated device."""
        rates = ClassTable(CAPACITY)
        executor = Failing(rates, capacity=CAPACITY, mode=mode, fails=fails, truth=truth, seed=1)
        return Core(executor, self.make(), limit=limit, rates=rates, tenants=tenants)

    def drive(self, core: Core, requests: Iterable[Request] = (), stop: int | None = None) -> Core:
        """Run until all tasks have ended (or `stop` kernels), and check the invariants at each step."""
        for request in requests:
            core.submit(request)
        jobs = core.jobs
        heavy = [job for job in jobs if job.task.memory]
        tasks, steps, log_length, ended = len(jobs), 0, 0, 0
        while core.busy and (stop is None or ended < stop):
            until = core.step()
            self.check(core)
            held = sum(
                job.task.memory for job in heavy if job.state in (State.RUNNING, State.STOPPING, State.PREEMPTED)
            )
            assert held + core.admission.free == core.executor.capacity.memory
            assert core.admission.free >= 0
            ended += sum(event.kind == "end" for event in core.log.events[log_length:])
            log_length = len(core.log)
            if core.busy:
                core.executor.wait(until)
            steps += 1
            assert steps < 200 * tasks + 1000, f"{core.policy.name} makes no progress: {core.log.events[-6:]}"
        return core

    def check(self, core: Core) -> None:
        """Check the invariants after a step."""
        running, name = core.running, core.policy.name
        plain = sum([job.placement is not None and job.placement.plain for job in running])
        assert len(running) <= core.limit + min(plain, core.policy.ahead)
        assert len(set(running)) == len(running)
        assert all(job.state in (State.RUNNING, State.STOPPING) for job in running)
        first = core.first_waiting
        if first is None:
            return
        # Work conservation: the device is idle only if no task may be launched.
        assert running, f"{name} leaves the device idle while {first.task.name} waits"
        if core.policy.conserves and not any(job.state is State.STOPPING for job in running):
            assert len(running) == core.limit, f"{name} leaves a place free"

    @settings(max_examples=12, suppress_health_check=[HealthCheck.differing_executors])
    @given(entries=_requests, limit=st.sampled_from([1, 2, 2, 3]), mode=st.sampled_from(["switch", "drain"]))
    def test_every_task_ends_and_no_block_is_lost(self, entries, limit, mode) -> None:  # type: ignore[no-untyped-def]
        core = self.drive(self.core(limit=limit, mode=mode), arrivals(entries))
        lives: dict[int, list[str]] = {job.number: [] for job in core.jobs}
        done = dict.fromkeys(lives, 0)
        for event in core.log:
            if event.kind != "hold":
                lives[event.task].append(event.kind)
            if event.kind == "stop":
                assert done[event.task] <= event.why["done"] <= core.jobs[event.task].task.blocks
                done[event.task] = event.why["done"]
        for job in core.jobs:
            assert job.state is State.DONE
            assert job.done == job.task.blocks
            assert LIFE.fullmatch(" ".join(lives[job.number])), lives[job.number]
            assert job.started is not None and job.ended is not None
            assert job.arrival <= job.started <= job.ended
        assert [event.time for event in core.log] == sorted(event.time for event in core.log)
        # No tenant is charged for time in which the device was idle.
        used = sum(account.used for account in core.tenants.values())
        assert used <= core.executor.now() * CAPACITY.processors * (1 + 1e-9)
        assert core.admission.free == CAPACITY.memory
        assert all(account.held == account.running == account.waiting == 0 for account in core.tenants.values())

    @pytest.fixture
    def fair(self) -> None:
        if self.make().starves:
            pytest.skip("it says that tasks may starve")

    @pytest.mark.usefixtures("fair")
    # A kernel keeps running, and one class is its best co-runner: kernels of the other class must run nevertheless.
    @example(Kind.MEMORY, "compute", 0.3, 0, Kind.MEMORY)
    @example(Kind.COMPUTE, "memory", 0.3, 0, Kind.COMPUTE)
    @example(Kind.MEMORY, "both", 0.3, 1, Kind.COMPUTE)
    @settings(
        max_examples=4, suppress_health_check=[HealthCheck.differing_executors, HealthCheck.function_scoped_fixture]
    )
    @given(
        kind=st.sampled_from(Kind),
        rivals=st.sampled_from(["memory", "compute", "both"]),
        milliseconds=st.sampled_from([0.3, 1.0]),
        priority=st.sampled_from([0, 1]),
        co_runner=st.sampled_from([None, Kind.MEMORY, Kind.COMPUTE]),
    )
    def test_nothing_starves(self, kind, rivals, milliseconds, priority, co_runner) -> None:  # type: ignore[no-untyped-def]
        victim = self.starving(kind, rivals, milliseconds, priority, co_runner)
        assert victim.started is not None, f"it waits after {RIVALS - 20} others have ended"
        assert co_runner or victim.state is State.DONE, (
            f"it is {victim.state.value} after {RIVALS - 20} others have ended"
        )

    def starving(
        self, kind: Kind, rivals: str, milliseconds: float, priority: int = 0, co_runner: Kind | None = None
    ) -> Job:
        """Return a victim after rivals have arrived for a long time, faster than they can run.

        With `co_runner`, a kernel of that class runs from the beginning, and longer than all rivals together.
        """
        core = self.core(mode="drain")
        if co_runner is not None:
            # Few blocks, so that the rivals have room in any form of launch.
            core.submit(Request("long", [task(co_runner, 3.0 * RIVALS, "long", blocks=100)]))
        kinds = {"memory": [Kind.MEMORY], "compute": [Kind.COMPUTE], "both": list(Kind)}[rivals]
        for number in range(RIVALS):
            rival = task(kinds[number % len(kinds)], 0.3, "rival", priority=priority)
            core.submit(Request("rival", [rival], number * 0.3e-3 / 3))
        victim = core.submit(Request("victim", [task(kind, milliseconds, "victim")], 0.5e-3))[0]
        self.drive(core, stop=RIVALS - 20)
        return victim

    @pytest.mark.usefixtures("fair")
    def test_no_priority_makes_others_wait_for_ever(self) -> None:
        core = self.core(mode="drain")
        for number in range(CEILING_RIVALS):
            core.submit(Request("rival", [task(Kind.COMPUTE, 0.3, "rival", priority=2**62)], number * 1e-4))
        victim = core.submit(Request("victim", [task(Kind.COMPUTE, 0.3, "victim")], 5e-4))[0]
        self.drive(core, stop=CEILING_RIVALS - 20)
        assert victim.started is not None, f"it waits after {CEILING_RIVALS - 20} others have ended"

    def test_a_task_that_fails_frees_its_place_and_others_go_on(self) -> None:
        core = self.core(fails={"bad"}, tenants={"a": 1.0, "b": 1.0})
        bad = [task(Kind.MEMORY, name="bad", tenant="a", memory=600), task(name="after", tenant="a")]
        good = [Request("good", [task(tenant="b", memory=600), task(Kind.MEMORY, tenant="b")], 1e-4) for _ in range(4)]
        self.drive(core, [Request("bad", bad), *good])
        assert [job.state for job in core.jobs[:2]] == [State.FAILED, State.CANCELLED]
        assert isinstance(core.jobs[0].error, RuntimeError)
        assert all(job.state is State.DONE for job in core.jobs[2:])
        assert core.admission.free == CAPACITY.memory
        assert [e.kind for e in core.log if e.task < 2][-2:] == ["fail", "cancel"]

    @pytest.mark.parametrize("when", [0.0, 0.5e-3, 2.2e-3])
    def test_a_task_that_is_cancelled_frees_its_place(self, when: float) -> None:
        core = self.core(mode="drain")
        jobs = [core.submit(Request("r", [task(k, 4.0, memory=400), task(k)]))[0] for k in (*Kind, *Kind)]
        while core.executor.now() < when:
            core.step()
            core.executor.wait(when)
        core.step()
        assert core.cancel(jobs[0])
        self.drive(core)
        plain = any(e.kind == "launch" and e.task == jobs[0].number and e.why.get("plain") for e in core.log)
        assert jobs[0].state is (State.DONE if plain else State.CANCELLED)
        assert not core.cancel(jobs[0])
        assert all(job.state is State.DONE for job in jobs[1:])
        assert core.jobs[jobs[0].number + 1].state is State.CANCELLED
        assert core.admission.free == CAPACITY.memory

    def test_a_task_larger_than_the_memory_is_refused_and_others_go_on(self) -> None:
        core = self.core()
        core.submit(Request("good", [task()]))
        with pytest.raises(errors.TaskMemoryError, match=r"large.*1001 bytes.*1000"):
            core.submit(Request("bad", [task(), task(name="large", memory=1001)]))
        self.drive(core)
        assert [job.state for job in core.jobs] == [State.DONE]

    def test_equal_input_gives_an_equal_log(self) -> None:
        def run() -> list[Any]:
            entries = [([task(k, m)], g) for k in Kind for m in (0.2, 1.0) for g in (0.0, 1e-4, 9e-4)]
            return self.drive(self.core(), arrivals(entries * 2)).log.events

        first = run()
        assert len(first) >= 3 * 24
        assert first == run()

    def test_kernels_of_which_nothing_is_known_run_too(self) -> None:
        tasks = [task(), task(None), task(Kind.MEMORY), task(None)]
        truth = {each: each.profile for each in tasks}
        for unknown in (tasks[1], tasks[3]):
            truth[unknown] = Profile(kind=Kind.MEMORY, seconds=1e-3)
            unknown.profile = Profile()
        core = self.drive(self.core(truth=truth), [Request("r", [each]) for each in tasks])
        assert all(job.state is State.DONE for job in core.jobs)

    def test_a_tenant_keeps_to_its_quota(self) -> None:
        core = self.core(tenants={"small": {"share": 0.25, "burst": False, "window": 4e-3}, "big": {}})
        requests = [Request("r", [task(k, 0.5, tenant=t)]) for _ in range(30) for t in ("small", "big") for k in Kind]
        for request in requests:
            core.submit(request)
        while core.executor.now() < 25e-3:
            core.executor.wait(core.step())
            assert core.busy
        account = core.tenants["small"]
        share = account.used / (core.executor.now() * CAPACITY.processors)
        # A tenant may use one window of unused quota at the start, and one kernel may exceed it.
        assert 0.1 < share < 0.25 * (25 + 4) / 25 + 2 * 1.1 / 25, share


CEILING_RIVALS = 340
"""More than the `aging_jobs` of a policy (32) for each of the 9 priorities up to the ceiling of an unnamed tenant."""

RIVALS = 240
"""More tasks than may pass a task: twice the `aging_jobs` of a policy (32) for one priority, and its predecessors."""
