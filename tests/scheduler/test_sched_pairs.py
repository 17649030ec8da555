"""The table of pairs: measured rates of co-running kernels, stored by code and size for each device."""

import json
from pathlib import Path
from typing import Any

import pytest

from lab.sched.rates import ClassTable
from lab.sched.simulator import Simulator
from warpwell.scheduler import Profile
from warpwell.scheduler.core import Core
from warpwell.scheduler.extend import Capacity, Kind, Request, Task
from warpwell.scheduler.predict import pairs as module
from warpwell.scheduler.predict.history import History
from warpwell.scheduler.predict.learner import Learner
from warpwell.scheduler.predict.pairs import Pairs
from warpwell.scheduler.predict.rates import ClassRates
from warpwell.scheduler.predict.record import KernelRecord

KEY = ("stream@1 {}", "logistic@2 {}")


def test_newer_measurements_count_more_and_the_oldest_pairs_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PAIRS", 3)
    pairs = Pairs()
    pairs.record(KEY, 0.5, (0.8, 0.4))
    pairs.record(KEY, 0.5, (1.0, 0.6))
    pairs.record(KEY, 0.25, (0.5, 0.5))
    assert pairs.get(KEY) == {0.5: (pytest.approx(0.9), pytest.approx(0.5)), 0.25: (0.5, 0.5)}
    for name in "abc":
        pairs.record((name, "c"), 0.5, (1.0, 1.0))
    assert len(pairs) == 3 and not pairs.get(KEY) and pairs.learnt == 6


def test_pairs_are_kept_with_the_history_but_for_those_of_this_process(tmp_path: Path) -> None:
    history = History("GPU", tmp_path / "g.json")
    history.pairs.record(KEY, 0.5, (0.9, 0.7))
    history.pairs.record(("stream@~1 {}", KEY[1]), 0.5, (0.9, 0.7))
    second = History("GPU", tmp_path / "g.json")
    second.pairs.record(("other@3 {}", KEY[1]), 0.25, (0.5, 0.5))
    for saved in (history, second):
        saved.save()
    found = History.load("GPU", tmp_path / "g.json").pairs
    assert len(found) == 2 and found.get(KEY) == {0.5: (0.9, 0.7)}


@pytest.mark.parametrize(
    "wrong",
    [
        7,
        [7],
        [["a", "b"]],
        [["a", 3, [[0.5, 1, 1]]]],
        [["a", "b", [[0.5, 1, "x"]]]],
        [["a", "b", [[1.5, 1, 1]]]],
        [["a", "b", [[0.5, -1, 1]]]],
        [["a", "b", [[0.5, float("nan"), 1]]]],
    ],
)
def test_a_damaged_table_is_none(tmp_path: Path, wrong: Any) -> None:
    path = tmp_path / "g.json"
    path.write_text(json.dumps({"format": "warpwell-history/2", "device": "GPU", "samples": [], "pairs": wrong}))
    assert not len(History.load("GPU", path).pairs)


def test_lanes_begin_with_what_was_measured_before() -> None:
    """The second of two is better company, and a quarter of the device the better share: both are known at once."""
    learner = Learner()
    tasks = []
    for name, kind in (("m", Kind.MEMORY), ("c", Kind.COMPUTE), ("d", Kind.COMPUTE)):
        profile = Profile(kind=kind, seconds=10e-3, registers=1 << 15, threads=256, resident=1056, source="measured")
        tasks.append(Task(name, 10560, profile, known=KernelRecord(f"{name}@1", {}, 1, profile=profile)))
    memory, bad, good = (task.known.key for task in tasks)
    learner.history.pairs.record((memory, bad), 0.5, (0.7, 0.4))
    learner.history.pairs.record((memory, good), 0.25, (0.9, 0.9))
    core = Core(Simulator(ClassTable(), Capacity(), mode="drain"), "lanes", learner=learner)
    for task in tasks:
        core.submit(Request(task.name, [task]))
    core.step()
    launched = [(event.name, event.why["share"]) for event in core.log if event.kind == "launch"]
    assert launched == [("m", 0.25), ("d", 0.75)]
    while core.busy:
        core.executor.wait(core.step())
    assert learner.history.pairs.learnt > 2


@pytest.mark.parametrize("kinds", [(Kind.MEMORY, Kind.MEMORY, Kind.COMPUTE), (Kind.COMPUTE, Kind.COMPUTE, Kind.MEMORY)])
def test_the_source_weighs_with_what_was_measured(kinds: tuple[Kind, ...]) -> None:
    """The rates of the share nearest to its own are used, unless the compute-intensive kernel would be the older."""
    learner, tasks = Learner(), []
    for number, kind in enumerate(kinds):
        profile = Profile(kind=kind, seconds=10e-3, registers=1 << 15, threads=256, resident=1056, source="measured")
        tasks.append(Task(str(number), 10560, profile, known=KernelRecord(f"{number}@1", {}, 1, profile=profile)))
    measured = {0.25: (0.1, 0.2), 0.5: (0.9, 0.8), 0.75: (0.3, 0.2)}
    for memory_task in tasks[:2]:
        memory, compute = (memory_task, tasks[2]) if kinds[0] is Kind.MEMORY else (tasks[2], memory_task)
        for share, rates in measured.items():
            learner.history.pairs.record((memory.known.key, compute.known.key), share, rates)
    core = Core(Simulator(ClassTable(), Capacity(), mode="drain"), "source", learner=learner)
    for task in tasks:
        core.submit(Request(task.name, [task]))
        core.step()
    (event,) = [event for event in core.log if event.kind in ("preempt", "hold")]
    by_class = sum(ClassRates().together(core.running, [job.placement for job in core.running]))
    assert event.why["S0"] == pytest.approx(by_class)
    assert (event.why["S1"] == pytest.approx(1.7)) is (kinds[0] is Kind.MEMORY)
