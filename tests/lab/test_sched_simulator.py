"""The simulator and its rates: cases with known results, and properties of all runs."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.sched.rates import BESIDE_MEMORY, ClassTable, Matrix, Pair
from lab.sched.replay import replay
from lab.sched.simulator import RELIEVED, HostDelays, Simulator
from warpwell import errors
from warpwell.scheduler import Profile
from warpwell.scheduler.core import Core
from warpwell.scheduler.decision import SourceModel
from warpwell.scheduler.extend import Capacity, Ended, Job, Kind, Placement, Request, State, Stopped, Task
from warpwell.scheduler.policies import POLICIES

FULL = 8 * 132
MEMORY = Profile(kind=Kind.MEMORY, seconds=1e-3, miss_rate=0.8)
COMPUTE = Profile(kind=Kind.COMPUTE, seconds=1e-3, miss_rate=0.2)


def job(profile, blocks=10 * FULL, name="k", **options):
    task = Task(name, blocks, profile, **options)
    return Job(task, Request(name, [task]), 0.0)


def half():
    return Placement(workers=FULL // 2)


def until_quiet(simulator, max_events=10_000):
    found = []
    for _ in range(max_events):
        before = simulator.now()
        simulator.wait(None)
        events = simulator.poll()
        if not events:
            return found
        assert all(before <= event.time <= simulator.now() for event in events)
        found += events
    raise AssertionError("it does not come to rest")


# -- rates ---------------------------------------------------------------------------------------------------
def test_memory_first_is_best():
    table = ClassTable()
    pair = [job(MEMORY), job(COMPUTE)]
    memory_first = table.together(pair, [half(), half()])
    compute_first = table.together(pair[::-1], [half(), half()])
    assert sum(memory_first) > 1.85 > 1.3 > sum(compute_first)
    assert table.together([pair[0]], [Placement()]) == [1.0]


def test_class_table_has_what_was_measured():
    table = ClassTable()
    memory, compute = job(MEMORY), job(COMPUTE)
    for quarter, starved in ((2, 0.22), (4, 0.02), (6, 0.01)):
        quotas = [Placement(workers=quarter * 132), Placement(workers=(8 - quarter) * 132)]
        assert table.together([compute, memory], quotas)[1] == pytest.approx(starved)
        assert table.together([memory, compute], quotas) == pytest.approx([1.0, BESIDE_MEMORY], abs=0.02)
    assert table.together([memory, compute], [Placement(), Placement()]) == [1.0, 0.0]  # no room


def test_small_kernels_do_not_disturb_each_other():
    small = dataclasses.replace(MEMORY, need=0.1, resident=FULL // 10), dataclasses.replace(COMPUTE, need=0.1)
    jobs = [job(small[1], FULL // 10), job(small[0], FULL // 10)]
    assert ClassTable().together(jobs, [Placement(), Placement()]) == pytest.approx([1.0, 1.0], abs=0.01)


profiles = st.builds(
    Profile,
    kind=st.sampled_from([Kind.MEMORY, Kind.COMPUTE, None]),
    seconds=st.floats(1e-6, 1e-2),
    need=st.floats(0.01, 1.0),
    bandwidth=st.floats(0.0, 1.0),
    compute=st.floats(0.0, 1.0),
)


@given(st.lists(st.tuples(profiles, st.integers(1, FULL)), min_size=1, max_size=4))
@settings(max_examples=60)
def test_rates_are_ratios(kernels):
    jobs = [job(profile, name=str(i)) for i, (profile, _) in enumerate(kernels)]
    placements = [Placement(workers=workers) for _, workers in kernels]
    found = ClassTable().together(jobs, placements)
    assert all(0.0 <= rate <= 1.0 + 1e-9 for rate in found)
    assert found == ClassTable().together(jobs, placements)


def test_a_matrix_is_asked_by_name_order_and_quota(tmp_path):
    pairs = [
        Pair("copy", "gemm", (0.9, 0.8), (0.25, 0.75)),
        Pair("copy", "gemm", (0.7, 0.6), (0.75, 0.25)),
        Pair("gemm", "copy", (1.0, 0.1)),
    ]
    capacity = Capacity()
    path = tmp_path / "pairs.json"
    Matrix(pairs, device="a GPU").write(path)
    table = Matrix.read(path, ClassTable(capacity))
    assert "3 pairs" in table.name and "a GPU" in table.name
    copy, gemm = job(MEMORY, name="copy"), job(COMPUTE, name="gemm")
    quarter, three_quarters = Placement(workers=FULL // 4), Placement(workers=3 * FULL // 4)
    assert table.together([copy, gemm], [quarter, three_quarters]) == [0.9, 0.8]
    assert table.together([copy, gemm], [three_quarters, quarter]) == [0.7, 0.6]
    assert table.together([gemm, copy], [half(), half()]) == [1.0, 0.1]
    unknown = job(COMPUTE, name="other")
    expected = ClassTable(capacity).together([copy, unknown], [quarter, three_quarters])
    assert table.together([copy, unknown], [quarter, three_quarters]) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("no json", "JSON"),
        ("{}", "warpwell-pairs/1"),
        ("[1]", "warpwell-pairs/1"),
        ('{"format": "warpwell-pairs/1", "pairs": [{"first": "a"}]}', "entry 0"),
        ('{"format": "warpwell-pairs/1", "pairs": [{"first": "a", "second": "b", "rates": [1, -1]}]}', "rates"),
        (
            '{"format": "warpwell-pairs/1", "pairs": [{"first": "a", "second": "b", "rates": [1, 1], "x": 1}]}',
            "entry 0.*'x'",
        ),
    ],
)
def test_a_damaged_matrix(tmp_path, text, says):
    path = tmp_path / "pairs.json"
    path.write_text(text)
    with pytest.raises(errors.FormatError, match=says):
        Matrix.read(path)


def test_a_matrix_that_is_not_there(tmp_path):
    with pytest.raises(errors.MissingFileError):
        Matrix.read(tmp_path / "none.json")


# -- the simulator, by hand ----------------------------------------------------------------------------------
def test_one_kernel_takes_its_time():
    simulator = Simulator(ClassTable())
    kernel = job(MEMORY)
    simulator.launch(kernel, Placement())
    simulator.wait(4e-4)
    assert simulator.poll() == [] and simulator.now() == 4e-4
    assert simulator.progress(kernel) == 4 * FULL
    simulator.wait(None)
    (ended,) = simulator.poll()
    assert ended.job is kernel and ended.time == pytest.approx(1e-3) and ended.error is None


def test_two_kernels_share():
    simulator = Simulator(ClassTable())
    memory, compute = job(MEMORY), job(COMPUTE)
    simulator.launch(memory, half())
    simulator.launch(compute, half())
    first, second = until_quiet(simulator)
    rate = ClassTable().together([memory, compute], [half(), half()])[1]
    after = ClassTable().together([compute], [half()])[0]
    assert first.job is memory and first.time == pytest.approx(1e-3)
    assert second.time == pytest.approx(1e-3 + 1e-3 * (1 - rate) / after)


def test_a_plain_kernel_waits_for_the_last_wave():
    # 15 waves of 100 and one of 50 blocks: half the device is free from 0.9677 of the time on.
    profile = dataclasses.replace(MEMORY, seconds=1.0, resident=100, registers=1, threads=32)
    capacity = Capacity(processors=100, blocks=1)
    table = ClassTable(capacity)
    simulator = Simulator(table)
    first, second = job(profile, 1550), job(profile, 100)
    simulator.launch(first, Placement(plain=True))
    simulator.launch(second, Placement(plain=True))
    simulator.wait(0.9)
    assert simulator.progress(second) == 0
    simulator.wait(1500 / 1550 + 1e-3)
    simulator._settle()
    assert simulator._runs[second].position > 0
    events = until_quiet(simulator)
    assert [event.job for event in events] == [first, second]


@pytest.mark.parametrize("co_runner", [None, MEMORY, COMPUTE])
def test_a_switch_takes_the_cycles_of_the_source(co_runner):
    simulator = Simulator(ClassTable(), mode="switch")
    victim = job(COMPUTE)
    co_runners = [] if co_runner is None else [job(co_runner)]
    for each in (*co_runners, victim):
        simulator.launch(each, half())
    simulator.wait(1e-4)
    # 4 blocks of 32 KiB of registers on each multiprocessor, which all save at the same time.
    miss_rate = 0.0 if co_runner is None else co_runner.miss_rate
    seconds = SourceModel().preempt_cycles(miss_rate, 32 << 10, 0, 4) / Capacity().clock
    assert simulator.cost(victim, co_runners) == pytest.approx(seconds)
    simulator.preempt(victim, "switch")
    simulator.wait(None)
    (stopped,) = simulator.poll()
    assert isinstance(stopped, Stopped) and stopped.time == pytest.approx(1e-4 + seconds)
    done = stopped.done
    victim.done = done
    simulator.launch(victim, half())
    ended = [event for event in until_quiet(simulator) if event.job is victim]
    assert isinstance(ended[0], Ended)
    assert simulator.saved_seconds == pytest.approx(2 * seconds)
    if co_runner is None:  # only the time for saving and restoring is lost
        assert ended[0].time == pytest.approx(1e-3 / ClassTable().together([victim], [half()])[0] + 2 * seconds)


def test_a_memory_kernel_that_stays_is_slowed_by_a_switch():
    model = SourceModel(slope=5.0, memory_decay=0.5)
    ends = []
    for decay in (0.5, 1.0):
        simulator = Simulator(ClassTable(), model=dataclasses.replace(model, memory_decay=decay), mode="switch")
        co_runner, victim = job(MEMORY), job(COMPUTE)
        simulator.launch(co_runner, half())
        simulator.launch(victim, half())
        simulator.wait(1e-5)
        simulator.preempt(victim, "switch")
        cost = simulator.cost(victim, [co_runner])
        assert cost < 5e-4
        ends.append(next(e.time for e in until_quiet(simulator) if e.job is co_runner))
    assert ends[0] - ends[1] == pytest.approx(0.5 * cost)


def test_a_drain_ends_the_wave():
    simulator = Simulator(ClassTable(), mode="drain", flag=0.0)
    kernel = job(MEMORY)
    simulator.launch(kernel, Placement())
    simulator.wait(2.5e-4)
    assert simulator.cost(kernel, []) == pytest.approx(0.5e-4)
    simulator.preempt(kernel, "switch")  # this device cannot switch, so it drains
    simulator.preempt(kernel)  # a second request has no effect
    simulator.wait(None)
    (stopped,) = simulator.poll()
    assert stopped.done == 3 * FULL and stopped.time == pytest.approx(3e-4)
    kernel.done = stopped.done
    simulator.launch(kernel, Placement())
    (ended,) = until_quiet(simulator)
    assert ended.time == pytest.approx(1e-3)


def test_a_quota_holds_from_the_end_of_the_wave_on():
    simulator = Simulator(ClassTable(), mode="drain", flag=0.0)
    first, second = job(COMPUTE), job(MEMORY)
    simulator.launch(first, Placement())
    simulator.launch(second, half())
    simulator.wait(0.5e-4)
    simulator.resize(first, FULL // 2)
    simulator.wait(0.99e-4)
    assert simulator._runs[second].found == 0
    simulator.wait(1.01e-4)
    assert (simulator._runs[first].found, simulator._runs[second].found) == (FULL // 2, FULL // 2)


def test_a_kernel_that_starves_leaves_when_it_has_ended_its_blocks():
    table = Matrix([Pair("one", "two", (1.0, 0.0))])
    simulator = Simulator(table, mode="drain", flag=0.0)
    first_job, second_job = job(COMPUTE, name="one"), job(COMPUTE, name="two")
    simulator.launch(first_job, half())
    simulator.launch(second_job, half())
    simulator.wait(0.5e-4)
    simulator.preempt(second_job)
    first, then = until_quiet(simulator)
    assert first == Ended(first_job, first.time) and first.time >= 1e-3
    # The second job finishes its current block, at the solo rate with half of its workers.
    (rate,) = table.together([second_job], [half()])
    assert then == Stopped(second_job, pytest.approx(first.time + 1e-3 / 20 / rate), FULL // 2)


@pytest.mark.parametrize(("mode", "remaining_rate"), [("drain", RELIEVED), ("switch", 1.0)])
def test_a_compute_intensive_kernel_is_slower_beside_an_older_one_once_it_was_relieved(mode, remaining_rate):
    rates = {"memory": 0.9, "compute": 0.8}
    pairs = [Pair("memory", "compute", tuple(rates.values())), Pair("compute", "memory", (1.0, 0.1))]
    simulator = Simulator(Matrix(pairs), mode=mode, flag=0.0)
    jobs = {name: job(profile, 10_000 * FULL, name) for name, profile in (("compute", COMPUTE), ("memory", MEMORY))}
    for kernel in jobs.values():
        simulator.launch(kernel, half())
    simulator.resize(jobs["compute"], FULL // 2, younger=True)
    simulator.wait(0.1e-3)
    simulator._settle()
    before = {name: simulator._runs[kernel].position for name, kernel in jobs.items()}
    simulator.wait(0.3e-3)
    simulator._settle()
    for name, kernel in jobs.items():
        seconds = (simulator._runs[kernel].position - before[name]) / kernel.task.blocks * 1e-3
        assert seconds == pytest.approx(0.2e-3 * rates[name] * (remaining_rate if name == "compute" else 1.0))


def test_flags_are_seeded():
    def stops(seed):
        simulator = Simulator(ClassTable(), mode="drain", seed=seed)
        found = []
        for _ in range(5):
            kernel = job(MEMORY, 1000 * FULL)
            simulator.launch(kernel, Placement())
            simulator.preempt(kernel)
            found += [event.time for event in until_quiet(simulator)]
        return found

    assert stops(1) == stops(1) != stops(2)


# -- the host's time -----------------------------------------------------------------------------------------
HOST = HostDelays(decision=100e-6, launch=50e-6, signal=10e-6, notice=20e-6)


def ends(policy, kernels, host):
    simulator = Simulator(ClassTable(), mode="drain", flag=0.0, host=host)
    requests = [Request("r", [kernel.task]) for kernel in kernels]
    return replay(requests, Core(simulator, policy, rates=simulator.rates)).jobs


def test_a_hand_over_takes_what_the_host_takes():
    # Decided at 100, launched at 150, ended at 1150, noticed at 1170, decided at 1270, launched at 1320, ended at 2320.
    first, second = ends("first-come", [job(MEMORY), job(MEMORY)], HOST)
    assert (first.ended, second.ended) == (pytest.approx(1150e-6), pytest.approx(2320e-6))
    first, second = ends("first-come", [job(MEMORY), job(MEMORY)], HostDelays())
    assert (first.ended, second.ended) == (pytest.approx(1000e-6), pytest.approx(2000e-6))


def test_launches_come_one_after_another():
    # One decision; the second is launched 50 us after the first. They are so small that they do not slow each other.
    small = dataclasses.replace(MEMORY, need=0.05, resident=FULL // 2)
    first, second = ends("left-over", [job(small), job(small)], HOST)
    assert (first.ended, second.ended) == (pytest.approx(1150e-6), pytest.approx(1200e-6))


def test_what_was_launched_behind_a_kernel_needs_no_host_to_begin():
    # The second has been launched at 200 and begins when the first ends.
    first, second = ends("left-over", [job(MEMORY), job(MEMORY)], HOST)
    assert (first.ended, second.ended) == (pytest.approx(1150e-6), pytest.approx(2150e-6))


def test_the_device_goes_on_while_the_host_is_busy():
    simulator = Simulator(ClassTable(), mode="drain", flag=0.0, host=HOST)
    first, second = job(MEMORY), job(COMPUTE)
    simulator.launch(first, Placement())  # runs from 50 us on, in waves of 100
    simulator.wait(200e-6)
    assert simulator.poll() == []
    simulator.preempt(first)  # decided at 300, seen at 310: its third wave ends at 350
    assert simulator.now() == pytest.approx(310e-6)
    simulator.launch(second, Placement())  # starts at 360, after the first kernel has left
    assert simulator.poll() == [Stopped(first, pytest.approx(350e-6), 3 * FULL)]
    assert [event.time for event in until_quiet(simulator)] == [pytest.approx(1360e-6)]
    # The host decides before its next command, so the cost includes three delays: notice, decide, launch.
    assert simulator.cost(first, []) == pytest.approx(170e-6 + 50e-6)


def test_workers_that_relieve_others_or_are_more_take_a_launch():
    simulator = Simulator(ClassTable(), mode="drain", host=HOST)
    first, second = job(COMPUTE, 10_000 * FULL), job(COMPUTE)
    simulator.launch(first, half())
    for workers, younger, seconds in ((FULL // 4, False, 10e-6), (FULL // 2, False, 50e-6), (FULL // 2, True, 50e-6)):
        before = simulator.now()
        simulator.resize(first, workers, younger)
        assert simulator.now() - before == pytest.approx(seconds)
    simulator.launch_behind(second, half(), first)
    before = simulator.now()
    simulator.resize(first, FULL // 2, younger=True)  # the next kernel starts after its youngest workers
    assert simulator.now() - before == pytest.approx(100e-6)


def test_what_cannot_be():
    simulator = Simulator(ClassTable())
    kernel = job(MEMORY)
    with pytest.raises(errors.ArgumentError, match="mode"):
        Simulator(ClassTable(), mode="magic")
    with pytest.raises(errors.ArgumentError, match="seconds"):
        simulator.launch(job(Profile()), Placement())
    with pytest.raises(errors.ArgumentError, match="workers"):
        simulator.launch(kernel, Placement(workers=0))
    simulator.launch(kernel, Placement())
    with pytest.raises(errors.SchedulerError, match="already"):
        simulator.launch(kernel, Placement())
    with pytest.raises(errors.SchedulerError, match="does not run"):
        simulator.preempt(job(MEMORY))


# -- invariants ----------------------------------------------------------------------------------------------
class Watched(Simulator):
    """A simulator that records rates over time and the start and end of each launch itself."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.work = {}
        self.spans = {}
        self.blocks = {}
        self.last = 0.0

    def launch(self, job, placement):
        assert all(start <= end <= self.now() for start, end in self.spans.get(job, ())), "it runs already"
        super().launch(job, placement)
        self._note(job)

    def launch_behind(self, job, placement, before):
        found = super().launch_behind(job, placement, before)
        self._note(job)
        return found

    def _note(self, job):
        self.spans.setdefault(job, []).append([self.now(), math.inf])
        self.blocks.setdefault(job, []).append(job.done)

    def wait(self, until):
        before = self.now()
        super().wait(until)
        assert self.now() >= before
        # A busy host notices events late.
        assert until is None or self.now() <= max(until, before) + self._host.decision + self._host.notice + 1e-12

    def poll(self):
        events = super().poll()
        for event in events:
            assert self.last <= event.time <= self.now()
            self.last = event.time
            span = self.spans[event.job][-1]
            assert span[1] == math.inf, "it ended twice"
            span[1] = event.time
            self.blocks[event.job].append(event.job.task.blocks if isinstance(event, Ended) else event.done)
        return events

    def _settle(self):
        seconds = self._now - self._settled
        for job, run in self._runs.items():
            assert run.speed * run.per_block <= 1.0 + 1e-9  # no kernel is faster than solo
            self.work[job] = self.work.get(job, 0.0) + run.speed * run.per_block * max(0.0, seconds)
        super()._settle()


requests = st.lists(
    st.tuples(
        st.floats(0.0, 2e-3),  # arrival
        st.lists(
            st.tuples(
                st.sampled_from([Kind.MEMORY, Kind.COMPUTE]),
                st.floats(1e-6, 1e-3),
                st.integers(1, 3 * FULL),
                st.floats(0.05, 1.0),
            ),
            min_size=1,
            max_size=4,
        ),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=6,
)


def made(plan):
    found = []
    for i, (arrival, tasks, priority) in enumerate(plan):
        chain = []
        for j, (kind, seconds, blocks, need) in enumerate(tasks):
            profile = Profile(kind=kind, seconds=seconds, need=need, resident=max(1, int(FULL * need)))
            chain.append(Task(f"{kind.value}{j}", blocks, profile, priority=priority))
        found.append(Request(f"r{i}", chain, arrival))
    return found


@pytest.mark.parametrize("mode", ["switch", "drain"])
@given(
    plan=requests,
    policy=st.sampled_from(sorted(POLICIES)),
    limit=st.integers(1, 3),
    host=st.sampled_from([HostDelays(), HostDelays(), HOST]),
)
@settings(max_examples=60)
def test_work_is_conserved(mode, plan, policy, limit, host):
    simulator = Watched(ClassTable(), mode=mode, seed=1, host=host)
    result = replay(made(plan), Core(simulator, policy, limit=limit, rates=simulator.rates))
    assert result.jobs and all(job.state is State.DONE for job in result.jobs)
    for job in result.jobs:
        assert simulator.work[job] == pytest.approx(job.task.profile.seconds, rel=1e-6, abs=1e-6)
        runs = simulator.spans[job]
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(runs))
        # Each launch starts at the block at which the last one stopped: all blocks run, each once.
        steps = simulator.blocks[job]
        assert steps[0] == 0 and steps[-1] == job.task.blocks
        for stopped, launched in zip(steps[1::2], steps[2::2], strict=False):
            assert stopped == launched
        if mode == "drain":
            assert steps == sorted(steps)
    assert all(len(spans) == 1 + job.preemptions for job, spans in simulator.spans.items())
    spans = list(itertools.chain.from_iterable(simulator.spans.values()))
    count = 0
    for _, change in sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans]):
        count += change
        assert count <= limit + POLICIES[policy]().ahead
    again = Simulator(ClassTable(), mode=mode, seed=1, host=host)
    repeated = replay(made(plan), Core(again, policy, limit=limit, rates=again.rates))
    assert repeated.log.events == result.log.events


@given(data=st.data(), blocks=st.integers(1, 5000), mode=st.sampled_from(["switch", "drain"]))
@settings(max_examples=60)
def test_any_sequence_of_quotas_and_preemptions(data, blocks, mode):
    simulator = Watched(ClassTable(), mode=mode, flag=1e-5)
    first, second = job(dataclasses.replace(MEMORY, resident=600), blocks), job(COMPUTE, 50 * FULL)
    simulator.launch(second, half())
    simulator.launch(first, Placement())
    shown = 0
    for _ in range(data.draw(st.integers(0, 12))):
        simulator.wait(simulator.now() + data.draw(st.floats(0.0, 3e-4)))
        for event in simulator.poll():
            if event.job is first and isinstance(event, Stopped):
                first.done = event.done
                simulator.launch(first, Placement(workers=data.draw(st.integers(1, 2000))))
        if first in simulator._runs:
            assert shown <= simulator.progress(first) < blocks
            shown = simulator.progress(first)
            if data.draw(st.booleans()):
                simulator.preempt(first, data.draw(st.sampled_from(["drain", "switch"])))
            else:
                simulator.resize(first, data.draw(st.one_of(st.none(), st.integers(1, 2000))))
    for _ in range(20):
        for event in until_quiet(simulator):
            if event.job is first and isinstance(event, Stopped):
                first.done = event.done
                simulator.launch(first, Placement())
    assert simulator.blocks[first][-1] == blocks
    assert simulator.blocks[first] == sorted(simulator.blocks[first])
    assert simulator.work[first] == pytest.approx(MEMORY.seconds, rel=1e-6)


# -- the truth ------------------------------------------------------------------------------------
def test_what_is_true_may_differ_from_what_is_predicted():
    task = Task("k", 10 * FULL, MEMORY)
    truth = dataclasses.replace(MEMORY, seconds=5e-3)
    simulator = Simulator(ClassTable(), truth={task: truth})
    core = Core(simulator, "first-come", rates=simulator.rates)
    result = replay([Request("r", [task])], core)
    assert simulator.now() == pytest.approx(5e-3)
    assert simulator.truth(task) is truth
    assert result.metrics().stp == pytest.approx(1.0)
