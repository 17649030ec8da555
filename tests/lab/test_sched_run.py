"""``python -m lab sched run``, ``warpwell sched explain``, ``serve`` and ``status``, as users start them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.harness.until import HANG_SECONDS, until

from lab.commands import main as lab
from warpwell.cli.main import main
from warpwell.errors import ServiceError
from warpwell.scheduler.events import Event, Log
from warpwell.scheduler.service.client import connect

Capture = pytest.CaptureFixture[str]


def called(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    code = (lab if arguments[0] == "run" else main)(["sched", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_what_cannot_be_written_is_told_before_the_work(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, folder = tmp_path / "l.jsonl", tmp_path / "none"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if it were not installed
    code, _, err = called(
        capsys, "run", "--device", "cpu", "--workload", "triad:500", "--log", str(log), "--picture", "p.png"
    )
    assert code == 2 and "a picture needs matplotlib" in err
    code, _, err = called(
        capsys,
        "serve",
        "--device",
        "cpu",
        "--socket",
        str(tmp_path / "run" / "s.sock"),
        "--log",
        str(log),
        "--metrics",
        str(folder / "m.prom"),
    )
    assert code == 2 and f"--metrics {folder / 'm.prom'}: the folder {folder} does not exist" in err
    assert not any(tmp_path.iterdir())


def test_a_mix_under_two_policies(capsys: Capture, tmp_path: Path) -> None:
    code, out, _ = called(
        capsys,
        "run",
        "--device",
        "cpu",
        "--policy",
        "first-come,source",
        "--workload",
        "gemm:40,triad:500",
        "--repeat",
        "2",
        "--seed",
        "3",
        "--log",
        str(tmp_path / "l.jsonl"),
        "--trace-out",
        str(tmp_path / "t.json"),
        "--picture",
        str(tmp_path / "p.png"),
        "--json",
    )
    assert code == 0
    values = json.loads(out)
    assert values["requests"] == 4 and values["kernels"] == 4 and values["results"] == "equal to NumPy's"
    assert set(values["alone_seconds"]) == {"gemm", "triad"}
    for name in ("first-come", "source"):
        metrics = values["policies"][name]
        assert metrics["requests"] == 4 and metrics["kernels"] == 4 and metrics["failed"] == 0
        # STP is the sum of the times alone over the makespan
        assert metrics["stp"] == pytest.approx(values["sum_alone_seconds"] / metrics["makespan"])
        log = Log.read((tmp_path / f"l.{name}.jsonl").read_text().splitlines())
        assert log.about["policy"] == name and log.about["seed"] == 3
        assert sum(e.kind == "end" for e in log) == 4
        assert (tmp_path / f"p.{name}.png").stat().st_size > 1000
        trace = json.loads((tmp_path / f"t.{name}.json").read_text())
        assert sum(e["ph"] == "X" and e["cat"] == "task" for e in trace["traceEvents"]) >= 4


def test_an_open_trace_and_the_table(capsys: Capture) -> None:
    code, out, _ = called(capsys, "run", "--device", "cpu", "--workload", "triad:500", "--repeat", "3", "--load", "0.5")
    assert code == 0 and "STP" in out and "p99 memory" in out and "lanes" in out and "equal to NumPy's" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--policy", "nope"], "unknown policy 'nope': choose one of first-come"),
        (["run", "--policy", ","], "no policy named"),
        (["run", "--workload", "nope"], "unknown workload 'nope'"),
        (["run", "--workload", "gemm:-3"], "--workload gemm:-3: its size"),
        (["run", "--load", "-1"], "--load must be above 0, got -1.0"),
        (["run", "--repeat", "0"], "--repeat is 0"),
        (["run", "--log", "/nowhere/l.jsonl"], "/nowhere does not exist"),
        (["explain", "absent.jsonl"], "absent.jsonl does not exist"),
        (["serve", "--allow", "x"], "add --group"),
        (["serve", "--metrics", "absent/m.prom"], "--metrics absent/m.prom: the folder absent does not exist"),
        (["serve", "--tenants", "absent.json"], "absent.json does not exist: give the file of --tenants"),
        (["status", "--socket", "absent/s.sock"], "warpwell sched serve"),
    ],
)
def test_bad_input(capsys: Capture, arguments: list[str], message: str, tmp_path: Path) -> None:
    device = ["--device", "cpu"] if arguments[0] in ("run", "serve") else []
    code, _, err = called(capsys, *arguments, *device)
    assert code == 2 and message in err and err.startswith("warpwell: error: ")


def test_no_gpu(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpwell.targets.gpu.device.has_cuda", lambda: False)
    code, _, err = called(capsys, "run", "--device", "cuda")
    assert code == 2 and err.startswith("warpwell: error: no GPU is usable here") and "device cpu" in err


def written(path: Path) -> Path:
    log = Log()
    log.about = {"policy": "source"}
    log.add(Event(0.0, "arrive", 0, "gemm", "a"))
    log.add(Event(0.0, "launch", 0, "gemm", "a", {"rule": "best combination", "co_runners": []}))
    log.add(Event(0.5, "hold", 1, "mvt", "b", {"rule": "no prediction", "victim": 0}))
    log.add(Event(1.0, "end", 0, "gemm", "a", {"ran": 1.0, "preemptions": 0}))
    with path.open("w") as stream:
        log.write(stream)
    return path


def test_explaining_a_log(capsys: Capture, tmp_path: Path) -> None:
    path = written(tmp_path / "l.jsonl")
    _, out, _ = called(capsys, "explain", str(path))
    out_lines = out.splitlines()
    assert "policy" in out and "source" in out
    assert "gemm (task 0) was launched on the idle device" in out_lines[-2] and "mvt (task 1)" in out_lines[-1]
    _, out, _ = called(
        capsys,
        "explain",
        str(path),
        "--all",
        "--json",
        "--metrics",
        str(tmp_path / "m.prom"),
        "--trace-out",
        str(tmp_path / "t.json"),
    )
    values = json.loads(out)
    assert [e["kind"] for e in values["events"]] == ["arrive", "launch", "hold", "end"]
    assert values["events"][3]["text"] == "gemm (task 0) has ended, after 1 s on the device."
    assert 'warpwell_launches_total{policy="source",tenant="a"} 1' in (tmp_path / "m.prom").read_text()
    assert (tmp_path / "t.json").exists()
    for options, kinds in (
        (["--task", "1"], ["hold"]),
        (["--task", "0"], ["launch", "hold"]),
        (["--tenant", "b"], ["hold"]),
        (["--kind", "end"], ["end"]),
        (["--since", "0.2"], ["hold"]),
        (["--until", "0.2"], ["launch"]),
    ):
        _, out, _ = called(capsys, "explain", str(path), "--json", *options)
        assert [e["kind"] for e in json.loads(out)["events"]] == kinds, options


def test_filters_that_match_nothing_say_so(capsys: Capture, tmp_path: Path) -> None:
    path = written(tmp_path / "l.jsonl")
    for options, filters in (
        (["--tenant", "nobody"], "--tenant nobody"),
        (["--task", "7", "--since", "0.1"], "--task 7 --since 0.1"),
    ):
        code, out, err = called(capsys, "explain", str(path), *options)
        assert code == 0 and "source" in out and "task" not in out
        assert err.startswith(f"nothing matches {filters}; tenants in this log: a, b; tasks 0 to 1")
    assert called(capsys, "explain", str(path), "--tenant", "a")[2] == ""
    path.write_text('{"about": {"policy": "source"}}\n')
    assert called(capsys, "explain", str(path))[2] == "this log has no events\n"


def test_the_properties_of_a_log(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "l.jsonl"
    fields = {"arrivals": "Poisson", "memory": 1 << 30, "policy": "source", "prediction_error": 0.05}
    path.write_text(json.dumps({"about": fields}) + "\n")
    rows = [row.split() for row in called(capsys, "explain", str(path))[1].splitlines()]
    found = {" ".join(row).strip("│ ").replace(" │ ", ": ") for row in rows if "│" in row}
    assert {"arrivals: Poisson", "policy: source", "prediction error: 0.05"} < found
    assert any(row.startswith("memory: 1.0 GiB") for row in found)


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[1]",
        '{"time": 1}',
        '{"time": "x", "kind": "end", "task": 1, "name": "k"}',
        '{"time": 1, "kind": "end", "task": 1, "name": "k", "more": 2}',
        '{"about": 3}',
    ],
)
def test_damaged_logs_are_named_by_line(capsys: Capture, tmp_path: Path, line: str) -> None:
    path = written(tmp_path / "l.jsonl")
    with path.open("a") as stream:
        stream.write(line + "\n")
    code, _, err = called(capsys, "explain", str(path))
    assert code == 2 and "line 6 is not an event of a log" in err
    path.write_bytes(b"\xff\xfe\x00")
    code, _, err = called(capsys, "explain", str(path))
    assert code == 2 and "is not a log" in err


KERNEL = """
import sys
import numpy as np, warpwell as ww
from warpwell.scheduler.service.client import connect

@ww.kernel
def fill(x, value):
    i = ww.gpu.grid(1)
    if i < x.size:
        x[i] = value

if __name__ == "__main__":
    x = np.zeros(300)
    with connect(sys.argv[1], tenant="a") as client:
        client.submit(fill[300], x, 2.5).result(100)
    assert (x == 2.5).all()
"""


@pytest.mark.slow
def test_serving_until_a_signal(capsys: Capture, tmp_path: Path) -> None:
    socket, log, metrics = tmp_path / "run" / "s.sock", tmp_path / "l.jsonl", tmp_path / "m.prom"
    tenants = tmp_path / "tenants.json"
    tenants.write_text(json.dumps({"a": {"weight": 2}, "b": {"share": 0.5}}))
    (tmp_path / "client.py").write_text(KERNEL)
    command = [sys.executable, "-m", "warpwell", "sched", "serve", "--socket", str(socket), "--device", "cpu",
               "--policy", "source", "--tenants", str(tenants), "--log", str(log), "--metrics", str(metrics),
               "--json"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            started = json.loads(process.stdout.readline())
            assert started["socket"] == str(socket) and started["policy"] == "source" and started["device"] == "cpu"
            subprocess.run([sys.executable, str(tmp_path / "client.py"), str(socket)], check=True, timeout=HANG_SECONDS)
            code, out, _ = called(capsys, "status", "--socket", str(socket), "--json")
            status: dict[str, Any] = json.loads(out)
            assert code == 0 and status["owner_pid"] == started["owner_pid"] and status["owner_restarts"] == 0
            _, out, _ = called(capsys, "status", "--socket", str(socket), "--prometheus")
            assert 'warpwell_tasks_ended_total{outcome="done",policy="source",tenant="a"} 1' in out
            _, out, _ = called(capsys, "status", "--socket", str(socket), "--log", str(tmp_path / "now.jsonl"))
            assert "owner pid" in out
            with pytest.raises(ServiceError, match="tenant 'c' has no setting in this service"):
                connect(socket, tenant="c")
            process.send_signal(signal.SIGTERM)
            assert process.wait(HANG_SECONDS) == 0
        finally:
            process.kill()
    assert not socket.exists()
    for path in (log, tmp_path / "now.jsonl"):
        _, out, _ = called(capsys, "explain", str(path), "--all")
        assert "fill (task 0) has ended" in out
    assert 'tenant="a"' in metrics.read_text()
    until(lambda: not os.path.exists(f"/proc/{started['owner_pid']}"))


def test_a_log_is_explained_where_stdin_and_stdout_are_closed(tmp_path: Path) -> None:
    path = tmp_path / "l.jsonl"
    with path.open("w") as stream:
        log = Log()
        log.add(Event(0.0, "arrive", 1, "k"))
        log.write(stream)
    for source, closed, message in ((str(path), ">&-", ""), ("-", "<&-", "this log has no events\n")):
        command = [sys.executable, "-m", "warpwell", "sched", "explain", "--all", source]
        done = subprocess.run(
            ["bash", "-c", f'"$@" {closed}', "bash", *command], capture_output=True, text=True, timeout=120, check=False
        )
        assert (done.returncode, done.stderr) == (0, message)
