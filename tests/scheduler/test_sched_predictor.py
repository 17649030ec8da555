"""Predictor, history and learner, on kernels whose truth is a formula."""

import json
import math
import os
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness.alone import alone_times

from lab.sched.workloads import make
from warpwell import errors, kernel
from warpwell.scheduler.events import Event
from warpwell.scheduler.executor import Capacity, Machine
from warpwell.scheduler.predict.history import AVERAGE_WEIGHT, MAX_FILE_BYTES, MAX_RECORDS, History, default_path
from warpwell.scheduler.predict.identity import default_size, footprint, size_class
from warpwell.scheduler.predict.learner import Learner
from warpwell.scheduler.predict.peaks import machine_for
from warpwell.scheduler.predict.predictor import Predictor
from warpwell.scheduler.predict.record import KernelRecord, kind_of, sized
from warpwell.scheduler.task import Kind, Task


def truth(name, n, *, moving=True, seconds=True):
    """A launch of a made-up kernel: its time is a start-up, a compute and a memory part."""
    seed = random.Random(name)
    power, ratio, drift = seed.choice((1, 2, 3)), seed.uniform(0.8, 1.3), seed.uniform(-0.02, 0.02)
    measured = ratio * n**drift * (40.0 * n**power + 900 * n)
    return KernelRecord(
        name,
        {"n": float(n)},
        max(1, n // 32),
        n / 3e12 if moving else 0.0,
        instructions=measured,
        seconds=3e-6 + measured / 5e11 if seconds else None,
        miss_rate=0.25,
        bandwidth=0.7 if power == 1 else 0.1,
        compute=0.3 if power == 1 else 0.8,
    )


def query(sample):
    return KernelRecord(sample.kernel, sample.size, sample.warps, sample.moving)


SIZES = [int(256 * 1.5**k) for k in range(12)]
NAMES = [f"kernel{k}" for k in range(8)]
ALL = [truth(name, n) for name in NAMES for n in SIZES]


def error(prediction, sample, field="seconds"):
    return abs(getattr(prediction, field) / getattr(sample, field) - 1)


def test_sizes_between_are_interpolated():
    predictor = Predictor(s for s in ALL if s.size["n"] not in SIZES[3:9:2])
    for name in NAMES:
        for n in SIZES[3:9:2]:
            got = predictor.predict(query(truth(name, n)))
            assert error(got, truth(name, n)) < 0.15 and error(got, truth(name, n), "instructions") < 0.01
            assert got.miss_rate == pytest.approx(0.25)
            assert got.kind == truth(name, n).kind


def test_larger_sizes_are_extrapolated():
    predictor = Predictor(s for s in ALL if s.size["n"] <= SIZES[8])
    for name in NAMES:
        got = predictor.predict(query(truth(name, SIZES[11])))
        assert error(got, truth(name, SIZES[11]), "instructions") < 0.03
        assert error(got, truth(name, SIZES[11])) < 0.3


def test_of_a_kernel_that_was_never_measured_nothing_is_said():
    for predictor in (Predictor(), Predictor(s for s in ALL if s.kernel != "kernel0")):
        assert predictor.predict(query(truth("kernel0", 512))) is None


def test_without_the_bytes_of_its_arrays_a_kernel_still_learns():
    rows = [truth("kernel3", n, moving=False) for n in SIZES if n != SIZES[6]]
    got = Predictor(rows).predict(query(truth("kernel3", SIZES[6], moving=False)))
    assert error(got, truth("kernel3", SIZES[6]), "instructions") < 0.1


def test_one_measurement_tells_other_sizes_by_what_they_move():
    record = KernelRecord("k", {"n": 1.0}, 8, 1e-3, seconds=2e-3 + 4e-6, bandwidth=0.5, compute=0.5)
    got = Predictor([record]).predict(KernelRecord("k", {"n": 4.0}, 32, 4e-3))
    assert got.seconds == pytest.approx(8e-3, rel=1e-2)
    assert got.bandwidth == pytest.approx(0.5, rel=1e-2)


def test_other_features_than_those_learnt_are_not_known():
    predictor = Predictor(ALL)
    strange = truth("kernel1", 512)
    strange.size = {"rows": 512.0}
    assert predictor.predict(query(strange)) is None


def test_a_newer_measurement_replaces_an_older_one():
    predictor = Predictor([truth("kernel1", 512)])
    slower = truth("kernel1", 512)
    slower.seconds *= 3
    predictor.add(slower)
    assert len(predictor._by_kernel["kernel1"]) == 1
    assert predictor.predict(query(slower)).seconds == pytest.approx(slower.seconds)


@given(st.floats(0, 1), st.floats(0, 1))
def test_class_is_what_bounds_a_kernel(bandwidth, compute):
    kind = kind_of(bandwidth, compute)
    assert kind is (Kind.MEMORY if bandwidth - compute >= 0 else Kind.COMPUTE)


# -- history ------------------------------------------------------------------------------------------------


def test_history_averages_and_survives_a_file(tmp_path):
    history = History("Some GPU", tmp_path / "h.json")
    history.record(truth("kernel0", 512))
    later = truth("kernel0", 512)
    later.seconds *= 2
    merged = history.record(later)
    assert merged.seconds == pytest.approx(truth("kernel0", 512).seconds * (1 + AVERAGE_WEIGHT)) and merged.times == 2
    history.save()
    again = History.load("Some GPU", tmp_path / "h.json")
    assert again.records == history.records
    assert [p.name for p in tmp_path.iterdir()] == ["h.json"]


def test_a_history_that_is_not_there_is_empty(tmp_path, monkeypatch):
    monkeypatch.setenv("WARPWELL_CACHE_DIR", str(tmp_path))
    assert default_path("NVIDIA H100 80GB") == tmp_path / "warpwell" / "scheduler" / "nvidia-h100-80gb.json"
    history = History.load("NVIDIA H100 80GB")
    assert not history.records
    history.record(truth("kernel0", 64))
    history.save()
    assert len(History.load("NVIDIA H100 80GB").records) == 1


def history_of(samples: str, device: str = "d") -> str:
    return f'{{"format": "warpwell-history/2", "device": "{device}", "pairs": [], "samples": {samples}}}'


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "[" * 100_000,
        '{"format": "other"}',
        history_of('[{"kernel": "k", "size": {}, "warps": 1}]', device="another"),
        history_of("3"),
        history_of('[{"kernel": "k"}]'),
        history_of('[{"kernel": "k", "size": 3, "warps": 1}]'),
        history_of('[{"kernel": 3, "size": {}, "warps": 1}]'),
        history_of('[{"kernel": "k", "size": {"n": NaN}, "warps": 1}]'),
        history_of('[{"kernel": "k", "size": {}, "warps": 0}]'),
        history_of('[{"kernel": "k", "size": {}, "warps": 1}, {"kernel": "l", "size": {}, "warps": 1, "times": "2"}]'),
        history_of('[{"kernel": "k", "size": {}, "warps": 1, "seconds": 1' + 400 * "0" + "}]"),
    ],
)
def test_damaged_histories_are_empty_and_stop_nothing(tmp_path, text):
    (tmp_path / "h.json").write_text(text)
    history = History.load("d", tmp_path / "h.json")
    assert not history.records
    history.record(truth("kernel0", 64))
    history.save()
    assert len(History.load("d", tmp_path / "h.json").records) == 1
    (tmp_path / "h.json").write_text(history_of('[{"kernel": "k", "size": {}, "warps": 1}]'))
    assert len(History.load("d", tmp_path / "h.json").records) == 1


def test_writers_of_one_file_keep_what_the_others_measured(tmp_path):
    path = tmp_path / "h.json"
    first, second = History.load("d", path), History.load("d", path)
    first.record(KernelRecord("a@1", {"n": 1.0}, 1, seconds=1.0))
    second.record(KernelRecord("b@2", {"n": 1.0}, 1, seconds=2.0))
    second.record(KernelRecord("c@~3", {"n": 1.0}, 1, seconds=2.0))  # code that another process cannot recognize
    left = tmp_path / ".h.json.left"  # a file that a killed process has left
    left.touch()
    os.utime(left, (1, 1))
    first.save()
    second.save()
    assert [p.name for p in tmp_path.iterdir()] == ["h.json"]
    assert sorted(s.kernel for s in History.load("d", path).records) == ["a@1", "b@2"]


def test_a_history_is_bounded(tmp_path):
    history = History("d", tmp_path / "h.json")
    for number in range(MAX_RECORDS + 10):
        history.record(KernelRecord(f"k@{number}", {"n": 1.0}, 1, seconds=1.0))
    history.save()
    again = History.load("d", tmp_path / "h.json")
    assert len(history.records) == len(again.records) == MAX_RECORDS
    assert again.records[-1].kernel == f"k@{MAX_RECORDS + 9}"
    assert again.path.stat().st_size < MAX_FILE_BYTES


def test_a_file_that_is_too_large_is_no_history(tmp_path):
    history = History("d", tmp_path / "h.json")
    history.record(KernelRecord("k@1", {}, 1, seconds=1.0))
    history.save()
    with open(tmp_path / "h.json", "a") as file:
        file.write(" " * MAX_FILE_BYTES)
    assert not History.load("d", tmp_path / "h.json").records


@pytest.mark.parametrize("fields", [{"seconds": -1.0}, {"seconds": math.nan}, {"miss_rate": 1.5}, {"warps": 0}])
def test_measurements_that_cannot_be_are_refused(fields):
    with pytest.raises(errors.ArgumentError):
        KernelRecord(**{"kernel": "k", "size": {}, "warps": 1, **fields})


def test_records_without_features_of_size_survive_a_file(tmp_path):
    history = History("d", tmp_path / "h.json")
    history.record(KernelRecord("k@1", {}, 1, seconds=1.0))
    history.save()
    assert History.load("d", tmp_path / "h.json").records == history.records


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=30))
def test_averages_lie_among_what_was_measured(times):
    history = History("d", "unused")
    for seconds in times:
        sample = history.record(KernelRecord("k", {"n": 1.0}, 1, seconds=seconds))
    assert min(times) * (1 - 1e-9) <= sample.seconds <= max(times) * (1 + 1e-9)
    assert sample.times == len(times)


# -- profiles -----------------------------------------------------------------------------------------------


@kernel
def scale(x, factor):
    x[0] = factor


def learner():
    learns = Learner()
    learns.use_device(Capacity(), lambda: Machine(bandwidth=1e9))
    return learns


X = np.zeros(32000, np.float32)


def task_of(learns, n=32000, size=None, factor=3):
    task = Task("scale", 8, launch=scale[n], arguments=(X, factor), size=size or {})
    task.profile = learns(task)
    return task


def test_nothing_known_is_a_cold_and_careful_answer():
    profile = task_of(learner()).profile
    assert (profile.source, profile.kind, profile.seconds) == ("cold", None, None)
    assert (profile.miss_rate, profile.need) == (1.0, 1.0)
    assert profile.registers == 32 * 4 * 256 and profile.resident == 8 * 132


def test_the_time_of_one_run_tells_the_class_and_the_shares():
    quick, slow = learner(), learner()
    quick.learn(task_of(quick), X.nbytes / 1e9 / 0.8)
    slow.learn(task_of(slow), X.nbytes / 1e9 / 0.2)
    profile, busy = task_of(quick).profile, task_of(slow).profile
    assert profile.source == "measured" and profile.kind is Kind.MEMORY and profile.bandwidth == pytest.approx(0.8)
    assert busy.kind is Kind.COMPUTE and busy.compute == pytest.approx(0.8)
    assert profile.need == pytest.approx(125 / 132), "its blocks leave some processors free"


def test_what_was_measured_comes_before_what_is_predicted():
    learns = learner()
    for n, seconds in ((1000, 1e-3), (2000, 2e-3), (4000, 4e-3)):
        learns.learn(task_of(learns, n, {"n": n}, n), seconds)
    exact = task_of(learns, 2000, {"n": 2000}, 2000).profile
    assert exact.source == "measured" and exact.seconds == pytest.approx(2e-3)
    between = task_of(learns, 3000, {"n": 3000}, 3000).profile
    assert between.source == "predicted"


def test_a_task_gets_a_profile_and_a_log_teaches():
    learns = learner()
    tasks = {k: task_of(learns, 2000, {"n": 2000 + k}) for k in range(4)}
    events = [
        Event(0.0, "launch", 0, "scale"),
        Event(0.5, "end", 0, "scale", why={"ran": 0.5, "alone": 0.25}),
        Event(1.0, "launch", 1, "scale"),
        Event(1.1, "launch", 2, "scale"),
        Event(1.6, "end", 1, "scale"),
        Event(2.0, "end", 2, "scale"),
    ]
    assert alone_times(events) == [(0, 0.25)]  # measured by the kernel, not taken from the log
    for number, seconds in alone_times(events):
        learns.learn(tasks[number], seconds)
    assert learns(tasks[0]).seconds == 0.25
    given_profile = Task("other", 1).profile
    assert learns(Task("other", 1, given_profile)) is given_profile


def test_features_and_footprint_of_a_launch():
    y = np.zeros((4, 5))
    size = default_size(scale[8, 4], (y, 16, True, 2.5, -1))
    assert size == {"extent0": 8.0, "extent1": 4.0, "argument1": 16.0, "bytes": size_class(160)}
    assert default_size(scale[8, 4], (y, np.int64(16), np.True_, 2.5, np.int32(-1))) == size
    assert sized({"n": np.int64(3), "x": np.float32(0.5), "name": "a"}) == {"n": 3.0, "x": 0.5}
    assert default_size(scale[1000], ()) == default_size(scale[1010], ()) != default_size(scale[1300], ())
    assert footprint((y, y, 3, np.float32(1), X)) == y.nbytes + X.nbytes


def test_a_workload_is_a_request_with_profiles():
    app = make("atax", 40)
    request = app.request([1e-3, 2e-3, 3e-3, 4e-3], arrival=2.0)
    assert [t.name for t in request.tasks] == ["atax_rows", "atax_fold", "atax_columns", "atax_total"]
    assert request.arrival == 2.0 and [t.profile.seconds for t in request.tasks] == [1e-3, 2e-3, 3e-3, 4e-3]
    assert all(t.blocks >= 1 and t.memory == app.memory and t.size == {"n": 40} for t in request.tasks)
    json.dumps([t.size for t in request.tasks])


def test_peaks_of_a_device_by_its_name():
    assert machine_for("NVIDIA H200").bandwidth == 4.8e12
    assert machine_for("NVIDIA H100 80GB HBM3") == machine_for("something else") == Machine()
    assert machine_for("something else", 1e12).bandwidth == 1e12
