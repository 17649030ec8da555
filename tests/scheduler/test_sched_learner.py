"""The default analyzer: profiles of kernels that were submitted without one, learned from their runs."""

import gc
import importlib.util
import json
import sys
import threading
import time
import weakref

import numpy as np
import pytest
from tests.harness.alone import alone_times
from tests.harness.until import HANG_SECONDS

import warpwell as ww
from lab.testing.fake_gpu import fake_executor
from warpwell import errors, gpu
from warpwell.scheduler import Policy, Profile, Scheduler
from warpwell.scheduler.core import Core
from warpwell.scheduler.events import DEFAULT_MAX_EVENTS
from warpwell.scheduler.executor import Capacity, Ended, Executor, Machine
from warpwell.scheduler.executors.cpu_executor import CpuExecutor
from warpwell.scheduler.extend import Kind, Launch, Log, Placement, Request, Task
from warpwell.scheduler.predict.identity import identity
from warpwell.scheduler.predict.learner import MAX_RECORDS, Learner
from warpwell.scheduler.predict.record import FIRST_MEASURED_LAUNCHES, LAUNCHES_PER_MEASUREMENT, is_persistent

STEP = """
import warpwell as ww
@ww.kernel
def step(x):
    i = ww.gpu.grid(1)
    if i < x.size:
        {body}
"""


@ww.kernel
def add(x):
    i = gpu.grid(1)
    if i < x.size:
        x[i] += 1


def load(folder, name, body):
    path = folder / f"{name}.py"
    path.write_text(STEP.format(body=body))
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.step


# -- identity of kernels --------------------------------------------------------------------------------------


def test_kernels_of_one_name_differ_by_their_code(tmp_path):
    x = np.zeros(8)
    adding, doubling = load(tmp_path, "one", "x[i] += 1"), load(tmp_path, "other", "x[i] *= 2")
    assert identity(adding[8], (x,)).split("@")[0] == identity(doubling[8], (x,)).split("@")[0] == "step"
    assert identity(adding[8], (x,)) != identity(doubling[8], (x,))
    assert identity(adding[8], (x,)) == identity(adding[16], (x,)) and is_persistent(identity(adding[8], (x,)))
    assert identity(adding[8], (x,)) != identity(adding[8], (np.zeros(8, np.int64),)), "types count"


def test_a_constant_that_the_code_names_counts(tmp_path):
    def made(times):
        path = tmp_path / f"constant{times}.py"
        path.write_text(f"TIMES = {times}\n" + STEP.format(body="x[i] += TIMES"))
        spec = importlib.util.spec_from_file_location("constant", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.step

    x = np.zeros(8)
    assert identity(made(1)[8], (x,)) != identity(made(2)[8], (x,))


def test_code_without_a_file_is_itself_alone():
    x, made = np.zeros(8), []
    for _ in range(2):
        scope = {"ww": ww}
        exec(compile("def step(x):\n    x[0] = 1\n", "<nowhere>", "exec"), scope)
        made.append(ww.kernel(scope["step"]))
    names = [identity(k[8], (x,)) for k in made]
    assert names[0] != names[1] and not any(is_persistent(n) for n in names)


# -- the default ----------------------------------------------------------------------------------------------


def test_a_scheduler_as_in_the_how_to_measures_the_first_kernel():
    with Scheduler("cpu", executor=fake_executor()) as scheduler:
        arrays = [np.zeros(256 * 40) for _ in range(12)]
        handles = [scheduler.submit(add[x.size], x) for x in arrays]
        for handle in handles:
            handle.result(HANG_SECONDS)
    assert all((x == 1).all() for x in arrays)
    rules = [e.why["rule"] for e in scheduler.log if e.kind == "launch"]
    assert rules[0] == "unknown" and "unknown" not in rules[1:], "the first one is measured, then all are known"
    assert {h.task.profile.source for h in handles[1:]} == {"measured"}


@pytest.mark.timing
def test_the_cpu_measures_what_runs_alone_without_compiling_it(tmp_path):
    kernel = load(tmp_path, "fresh", f"x[i] += {time.time_ns()}")  # not compiled yet
    with Scheduler("cpu") as scheduler:
        began = time.perf_counter()
        scheduler.submit(kernel[1000], np.zeros(1000)).result(HANG_SECONDS)
        total_seconds = time.perf_counter() - began
        ((_, seconds),) = alone_times(scheduler.log)
        task = scheduler.task(kernel[1000], np.zeros(1000))
    assert task.profile.source == "measured" and task.profile.kind in Kind
    assert 0 < seconds < total_seconds / 4, "compiling took most of it"
    assert task.profile.seconds == pytest.approx(seconds)


def test_two_tenants_kernels_of_one_name_are_two(tmp_path):
    quick, slow = load(tmp_path, "quick", "x[i] += 1"), load(tmp_path, "slow", "x[i] = x[i] * 0.5")
    with Scheduler("cpu") as scheduler:
        scheduler.submit(quick[1000], np.zeros(1000), tenant="a").result(HANG_SECONDS)
        assert scheduler.task(quick[1000], np.zeros(1000), tenant="a").profile.source == "measured"
        assert scheduler.task(slow[1000], np.zeros(1000), tenant="b").profile.source == "cold"


def test_a_profile_that_was_given_is_kept():
    profile = Profile(kind=Kind.COMPUTE, seconds=1.0)
    with Scheduler("cpu") as scheduler:
        task = scheduler.task(add[8], np.zeros(8), profile=profile)
        assert task.profile is profile and task.known is None


def test_a_learner_without_a_scheduler_says_so():
    with pytest.raises(errors.ArgumentError, match="pass it to a scheduler"):
        Learner()(Task("k", 1, launch=add[8], arguments=(np.zeros(8),)))
    nothing = Task("k", 1)
    assert Learner()(nothing) is nothing.profile


# -- learning -------------------------------------------------------------------------------------------------


def learner():
    learns = Learner()
    learns.use_device(Capacity(), lambda: Machine(bandwidth=1e9))
    return learns


def task_of(learner, n=1000, **options):
    task = Task("add", 4, launch=add[n], arguments=(np.zeros(n),), **options)
    task.profile = learner(task)
    return task


def test_a_kernel_gets_its_class_from_how_fast_it_went_through_its_arrays():
    learns = learner()
    task = task_of(learns)
    assert (task.profile.source, task.profile.kind) == ("cold", None)
    assert learns.learn(task, 10e-6)  # 8000 bytes: 0.8 of the bandwidth
    assert learns(task).kind is Kind.MEMORY and learns(task).seconds == 10e-6
    larger = task_of(learns, 100_000)
    assert larger.profile.source == "predicted", "another size"
    assert learns.learn(larger, 8e-3) and learns(larger).kind is Kind.COMPUTE  # a tenth of the bandwidth


def test_a_profile_changes_only_where_the_time_does():
    learns = learner()
    task = task_of(learns)
    assert learns.learn(task, 1e-3)
    profile = learns(task)
    assert not learns.learn(task, 1.05e-3) and learns(task) is profile
    assert learns.learn(task, 0.5e-3) and learns(task).seconds < 0.7e-3


def test_measuring_gets_rare():
    learns = learner()
    task = task_of(learns)
    is_measured = []
    for _ in range(3 * LAUNCHES_PER_MEASUREMENT):
        is_measured.append(task.known.should_measure)
        learns.learn(task, 1e-3)
    assert all(is_measured[:FIRST_MEASURED_LAUNCHES]) and sum(is_measured) <= FIRST_MEASURED_LAUNCHES + 3


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_cannot_be_teach_nothing(seconds):
    learns = learner()
    task = task_of(learns)
    assert not learns.learn(task, seconds) and task.known.seconds is None


def test_a_learner_is_bounded():
    learns = learner()
    for number in range(MAX_RECORDS + 50):
        learns.learn(task_of(learns, size={"n": number + 1}), 1e-3)
    assert len(learns._records) <= MAX_RECORDS
    assert [len(rows) for rows in learns.predictor._by_kernel.values()] == [8]


class Hand(Executor):
    """Runs nothing: the test says when a task has ended, and that its kernel took half a second."""

    capacity = Capacity(processors=4)

    def __init__(self):
        self.time, self.events, self.running = 0.0, [], []

    def launch(self, job, placement):
        self.running.append(job)

    def end(self):
        self.time += 1
        self.events.append(Ended(self.running.pop(0), self.time, None, 0.5))

    def preempt(self, job, mode="drain"):
        pass

    def resize(self, job, workers, younger=False):
        pass

    def progress(self, job):
        return 0

    def cost(self, victim, co_runners):
        return 1.0

    def poll(self):
        events, self.events = self.events, []
        return events

    def now(self):
        return self.time

    def wait(self, until):
        pass


class Plan(Policy):
    """Launches all that waits, with a placement that the test chooses."""

    name = "plan"
    placement = Placement()

    def decide(self, view):
        return [Launch(job, self.placement) for job in list(view.waiting)[: view.limit - len(view.running)]]


@pytest.mark.parametrize(
    "placement, sizes, measured",
    [
        (Placement(), [1000], True),
        (Placement(), [1000, 100_000], False),
        (Placement(workers=2), [1000], False),
        (Placement(plain=True), [1000], True),
    ],
)
def test_only_what_has_the_whole_device_for_itself_is_measured(placement, sizes, measured):
    executor, learns, plan = Hand(), learner(), Plan()
    plan.placement = placement
    core = Core(executor, plan, log=Log(), learner=learns)
    tasks = [task_of(learns, n) for n in sizes]
    for task in tasks:
        core.submit(Request("r", [task], executor.now()))
        core.step()
    for _ in tasks:
        executor.end()
        core.step()
    assert [task.known.seconds for task in tasks] == [0.5 if measured else None] * len(sizes)
    assert alone_times(core.log) == ([(0, 0.5)] if measured else [])


def test_many_threads_ask_while_one_teaches():
    learns, failures = learner(), []

    def learn_kernels():
        try:
            for n in range(200):
                learns.learn(task_of(learns, 2 ** (n % 12)), 1e-3)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=learn_kernels) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert not failures and not any(t.is_alive() for t in threads)


# -- history files ------------------------------------------------------------------------------------------


def test_a_learner_that_saves_begins_with_what_was_measured_before(tmp_path, monkeypatch):
    history = tmp_path / "warpwell" / "scheduler" / "device.json"
    monkeypatch.setattr("warpwell.scheduler.predict.history.default_path", lambda device: history)
    first = Learner(saves=True)
    with Scheduler("cpu", executor=CpuExecutor, analyzer=first) as scheduler:
        scheduler.submit(add[1000], np.zeros(1000)).result(HANG_SECONDS)
    first.save()
    (path,) = (tmp_path / "warpwell" / "scheduler").iterdir()
    assert [s["kernel"].split("@")[0] for s in json.loads(path.read_text())["samples"]] == ["add"]
    written = path.stat().st_mtime_ns
    first.save()
    assert path.stat().st_mtime_ns == written, "nothing new"
    with Scheduler("cpu", analyzer=Learner(saves=True)) as scheduler:
        assert scheduler.task(add[1000], np.zeros(1000)).profile.source == "measured"
    path.write_text("{")
    with Scheduler("cpu", analyzer=Learner(saves=True)) as scheduler:
        assert scheduler.task(add[1000], np.zeros(1000)).profile.source == "cold"


def test_a_scheduler_keeps_what_it_learnt_with_no_set_up(tmp_path, monkeypatch):
    monkeypatch.setattr("warpwell.scheduler.predict.history.default_path", lambda device: tmp_path / "device.json")
    with Scheduler("cpu") as scheduler:
        assert scheduler.task(add[1000], np.zeros(1000)).profile.source == "cold"
        scheduler.submit(add[1000], np.zeros(1000)).result(HANG_SECONDS)
    with Scheduler("cpu") as scheduler:
        assert scheduler.task(add[1000], np.zeros(1000)).profile.source == "measured"
    (tmp_path / "device.json").unlink()
    (tmp_path / "device.json").mkdir()  # cannot be written, which is ignored silently
    with Scheduler("cpu") as scheduler:
        assert scheduler.task(add[1000], np.zeros(1000)).profile.source == "cold"
        scheduler.submit(add[1000], np.zeros(1000)).result(HANG_SECONDS)


# -- log and memory ------------------------------------------------------------------------------------------


def test_the_log_of_a_scheduler_is_bounded_and_a_log_of_ones_own_keeps_all():
    own_log = Log()
    for log, max_events in ((None, DEFAULT_MAX_EVENTS), (own_log, None)):
        with Scheduler("cpu", log=log) as scheduler:
            assert scheduler.log.max_events == max_events
    few = Log(kinds=("end",), max_events=8)
    with Scheduler("cpu", log=few) as scheduler:
        for _ in range(20):
            scheduler.submit(add[8], np.zeros(8)).result(HANG_SECONDS)
    assert {e.kind for e in few} == {"end"} and len(few) <= 9 and few.dropped == 20 - len(few)


def test_a_scheduler_that_is_dropped_is_freed():
    scheduler = Scheduler("cpu")
    scheduler.submit(add[1000], np.zeros(1000)).result(HANG_SECONDS)
    dispatcher = scheduler._dispatcher
    parts = [weakref.ref(p) for p in (dispatcher, dispatcher.core, scheduler._analyzer, scheduler.log)]
    thread = dispatcher._thread
    del scheduler, dispatcher
    gc.collect()
    thread.join(HANG_SECONDS)
    assert not thread.is_alive()
    del thread
    gc.collect()
    assert [p() for p in parts] == [None] * 4
