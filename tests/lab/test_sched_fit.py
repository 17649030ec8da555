"""``sched fit`` finds the constants behind measurements and refuses bad files; recorded counts test the predictor."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from lab.commands import main as lab
from lab.sched.fitting import Preemption, fit, read_csv, read_model
from lab.sched.rates import ClassTable, Matrix
from lab.sched.replay import replay
from lab.sched.simulator import Simulator
from warpwell import errors
from warpwell.scheduler import Profile
from warpwell.scheduler.core import Core
from warpwell.scheduler.decision import SOURCE, SourceModel
from warpwell.scheduler.events import Log
from warpwell.scheduler.extend import Capacity, Request, Stopped, Task
from warpwell.scheduler.predict.peaks import machine_for
from warpwell.scheduler.predict.predictor import Predictor
from warpwell.scheduler.predict.record import KernelRecord, kind_of, sized
from warpwell.scheduler.task import Kind

RESULTS = Path(__file__).parents[2] / "lab" / "results" / "h200" / "sched"


def preemptions(slope, base, count=60, noise=0.0, misses=None):
    random = np.random.default_rng(5)
    for k in range(count):
        nbytes, miss = random.uniform(1e5, 3e7), random.random() if misses is None else misses
        cycles = (slope * miss + base) * nbytes * (1 + noise * random.standard_normal())
        yield Preemption(nbytes, miss, cycles, Kind.MEMORY if k % 3 else Kind.COMPUTE, 0.87 if k % 3 else 0.99)


def test_constants_are_found_again():
    found = fit(preemptions(0.07, 0.02))
    assert (found.model.slope, found.model.base) == pytest.approx((0.07, 0.02))
    assert (found.model.memory_decay, found.model.compute_decay) == pytest.approx((0.87, 0.99))
    assert found.model.r2 == pytest.approx(1) and found.r2_decay == pytest.approx(1)
    assert found.r2_source < 0.99 and found.costs == found.decays == 60 and not found.notes
    source = fit(preemptions(SOURCE.slope, SOURCE.base))
    assert source.r2_source == pytest.approx(1)


def test_noise_lowers_the_coefficient_of_determination():
    found = fit(preemptions(0.07, 0.02, noise=0.2))
    assert found.model.slope == pytest.approx(0.07, rel=0.2)
    assert 0.7 < found.model.r2 < 0.999


def test_constants_are_never_negative():
    rows = [Preemption(1e6 * k, m, 1e3 * k * (2 - m)) for k in range(1, 6) for m in (0.1, 0.5, 0.9)]
    found = fit(rows)
    assert found.model.slope == 0 and found.model.base > 0


def test_what_was_not_measured_keeps_the_sources_constants():
    found = fit([Preemption(kind=Kind.MEMORY, decay=0.8)])
    assert (found.model.slope, found.model.base, found.model.r2) == (SOURCE.slope, SOURCE.base, None)
    assert (found.model.memory_decay, found.model.compute_decay) == (0.8, 1.0)
    assert any("compute" in note for note in found.notes)
    single = fit(preemptions(0.07, 0.02, misses=0.5))
    assert single.model.slope * 0.5 + single.model.base == pytest.approx(0.055)
    assert any("one miss rate" in note for note in single.notes)
    with pytest.raises(errors.ArgumentError, match="no preemption"):
        fit([Preemption(nbytes=5.0)])


def write(path, header, *rows):
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return str(path)


def test_csv_with_seconds_and_empty_cells(tmp_path):
    path = write(tmp_path / "a.csv", ["bytes", "miss_rate", "seconds", "kind", "decay", "victim"],
                 [1 << 18, 0.5, 1e-5, "memory", 0.9, "a"], [1 << 17, 0.25, 2e-5, "", "", "b"])  # fmt: skip
    first, second = read_csv(path, clock=1e9)
    assert first == Preemption(1 << 18, 0.5, pytest.approx(1e4), Kind.MEMORY, 0.9)
    assert second == Preemption(1 << 17, 0.25, pytest.approx(2e4))


@pytest.mark.parametrize(
    ("header", "row", "message"),
    [
        (["a", "b"], [1, 2], "columns a, b"),
        (["bytes", "miss_rate", "cycles"], [1, 1.5, 3], "line 2: miss_rate is '1.5'"),
        (["bytes", "miss_rate", "cycles"], [1, -1, 3], "line 2: miss_rate is '-1'"),
        (["bytes", "miss_rate", "cycles"], ["x", 1, 3], "line 2: bytes is 'x'"),
        (["kind", "decay"], ["mixed", 0.5], "line 2: kind is 'mixed'"),
    ],
)
def test_bad_csv_is_refused(tmp_path, header, row, message):
    with pytest.raises(errors.FormatError, match=message):
        read_csv(write(tmp_path / "a.csv", header, row), 1e9)


def test_files_that_are_not_text_or_nest_too_deeply_are_refused(tmp_path):
    binary, deep = tmp_path / "binary", tmp_path / "deep"
    binary.write_bytes(b"\xff\xfe\0")
    deep.write_text("[" * 100_000)
    with pytest.raises(errors.FormatError, match="binary"):
        read_csv(binary, 1e9)
    for read in (read_model, Matrix.read, Log.load):
        for path in (binary, deep):
            with pytest.raises(errors.FormatError, match=path.name):
                read(path)


class Recording(Simulator):
    """Records what a multiprocessor had to save at each preemption, and how long it took."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.rows, self.pending = [], {}

    def preempt(self, job, mode="drain"):
        profile, placement = job.task.profile, job.placement
        blocks = min(profile.resident, job.task.blocks, placement.workers or job.task.blocks)
        nbytes = (profile.registers + profile.shared) * -(-blocks // self.capacity.processors)
        misses = [other.task.profile.miss_rate for other in self.core.running if other is not job]
        self.pending[job] = self.now(), nbytes, max(misses, default=0.0)
        super().preempt(job, mode)

    def poll(self):
        events = super().poll()
        for event in events:
            start, nbytes, miss_rate = self.pending.pop(event.job, (None, 0, 0))
            if isinstance(event, Stopped) and start is not None:
                self.rows.append(Preemption(nbytes, miss_rate, (event.time - start) * self.capacity.clock))
        return events


def test_a_simulated_run_gives_its_own_constants_back():
    model = SourceModel(slope=0.05, base=0.03)
    requests = []
    for k in range(90):
        # The memory-intensive kernel arrives while two compute-intensive ones run, and replaces one.
        memory = k % 3 == 2
        profile = Profile(
            Kind.MEMORY if memory else Kind.COMPUTE,
            0.02,
            1e8,
            registers=8192 * (1 + k % 8),
            miss_rate=0.02 * (k % 36),
            bandwidth=0.9 if memory else 0.05,
            compute=0.1 if memory else 0.9,
        )
        arrival = 0.2 * (k // 3) + 1e-3 * (k % 3)
        requests.append(Request(f"r{k}", [Task(f"kernel{k}", 50_000, profile)], arrival=arrival))
    rates = ClassTable()
    simulator = Recording(rates, model=model, mode="switch")
    simulator.core = Core(simulator, "source", rates=rates)
    replay(requests, simulator.core)
    found = fit(simulator.rows)
    assert found.costs >= 5
    assert found.model.slope == pytest.approx(0.05) and found.model.base == pytest.approx(0.03)
    assert found.model.r2 > 0.999


def run(capsys, *arguments):
    code = lab(["sched", "fit", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_command_writes_constants_that_load(tmp_path, capsys):
    rows = [[p.nbytes, p.miss_rate, p.cycles, p.kind.value, p.decay] for p in preemptions(0.07, 0.02)]
    unknown = ["", "", 1000, "", ""]
    path = write(tmp_path / "a.csv", ["bytes", "miss_rate", "cycles", "kind", "decay"], *rows, unknown)
    code, result = run(capsys, path, "--out", str(tmp_path / "m.json"), "--clock", "1e9")
    assert code == 0 and result["costs"] == 60
    assert "1 preemptions were skipped" in result["notes"][-1]
    model = read_model(tmp_path / "m.json")
    assert model.slope == pytest.approx(0.07, rel=0.05) and "a.csv" in model.origin
    assert model.r2 == pytest.approx(result["r2"])


def test_missing_files_and_a_wrong_clock(tmp_path, capsys):
    for name in ("no.csv", "no"):
        assert lab(["sched", "fit", str(tmp_path / name)]) == 2
        assert "does not exist" in capsys.readouterr().err
    assert lab(["sched", "fit", "x.csv", "--clock", "0"]) == 2
    assert "--clock 0" in capsys.readouterr().err


# -- counts -------------------------------------------------------------------------------------------------


def recorded_samples():
    """Return the launches that an H200 ran under a profiler."""
    content = json.loads((RESULTS / "sched_counts_h200.json").read_text())
    assert content["machine"]["gpu"] == "NVIDIA H200"
    machine, capacity, samples = machine_for("NVIDIA H200"), Capacity(), []
    for row in content["rows"]:
        cycles = row.get("cycles") or row["seconds"] * capacity.clock
        moved, miss_rate = row.get("dram_bytes"), row.get("miss_rate")
        samples.append(
            KernelRecord(
                row["kernel"],
                sized(row["size"]),
                row["warps"],
                row.get("bytes", 0) / machine.bandwidth,
                instructions=row["instructions"],
                seconds=row["seconds"],
                miss_rate=None if miss_rate is None else min(1.0, max(0.0, miss_rate)),
                bandwidth=None if moved is None else min(1.0, moved / row["seconds"] / machine.bandwidth),
                compute=min(1.0, row["instructions"] / (4 * capacity.processors * cycles)),  # 4 instructions a cycle
            )
        )
    return samples


def test_recorded_counts_interpolate_within_the_goal():
    samples = recorded_samples()
    assert len({s.kernel for s in samples}) == 26
    instruction_errors, time_errors = [], []
    for kernel in {s.kernel for s in samples}:
        rows = sorted((s for s in samples if s.kernel == kernel), key=lambda s: s.warps * sum(s.size.values()))
        for left_out in rows[1:-1]:
            predictor = Predictor(r for r in rows if r is not left_out)
            got = predictor.predict(KernelRecord(kernel, left_out.size, left_out.warps, left_out.moving))
            instruction_errors.append(abs(got.instructions / left_out.instructions - 1))
            time_errors.append(abs(got.seconds / left_out.seconds - 1))
    assert np.median(instruction_errors) < 0.05 and np.median(time_errors) < 0.05


def test_one_run_shows_the_classes_of_recorded_counts():
    samples = recorded_samples()
    for min_seconds, accuracy in ((2e-5, 0.9), (1e-4, 1.0)):  # shorter kernels are bound by latency, and have no class
        long = [s for s in samples if s.seconds >= min_seconds]
        is_right = [kind_of(s.moving / s.seconds, 1 - s.moving / s.seconds) is s.kind for s in long]
        assert np.mean(is_right) >= accuracy
