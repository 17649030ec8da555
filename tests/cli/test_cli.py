"""Tests of the command line that need no compiler."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.until import HANG_SECONDS

from warpwell.cli import main
from warpwell.cli._common import Output, readable
from warpwell.graph import build


def test_run_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "warpwell", "--version"], capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert (done.returncode, done.stdout.split()[0]) == (0, "warpwell")


def failing(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command that must fail for its input; return what it says."""
    assert main([str(a) for a in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("warpwell: error: ")
    assert "Traceback" not in captured.err
    return captured.err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0 1\n1 two\n", "row 2"),
        ("0 1\n\n3 -1\n", "row 2"),
        ("0\n", "row 1"),
        ("1.5 2\n", "row 1"),
        ("", "no edge"),
    ],
)
def test_edges_that_are_malformed(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str) -> None:
    (tmp_path / "edges.txt").write_text(text)
    assert says in failing(capsys, "graph", "convert", tmp_path / "edges.txt", tmp_path / "out.ww")
    assert [p.name for p in tmp_path.iterdir()] == ["edges.txt"]


def test_places_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edges = tmp_path / "edges.txt"
    edges.write_text("0 1\n")
    assert "none.txt" in failing(capsys, "graph", "convert", tmp_path / "none.txt", tmp_path / "out.ww")
    assert "create the folder" in failing(capsys, "graph", "convert", edges, tmp_path / "none" / "out.ww")
    assert "convert" in failing(capsys, "graph", "bfs", tmp_path / "none.ww", "--source", 0)
    assert "folder" in failing(capsys, "graph", "cc", edges)
    assert "graph.json" in failing(capsys, "graph", "cc", tmp_path)
    assert main(["graph", "convert", str(edges), str(tmp_path / "out.ww")]) == 0
    capsys.readouterr()
    assert "--overwrite" in failing(capsys, "graph", "convert", edges, tmp_path / "out.ww")


def test_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "edges.txt").write_text("0 1\n")
    monkeypatch.setattr("os.fsync", full)
    assert "space" in failing(capsys, "graph", "convert", tmp_path / "edges.txt", tmp_path / "out.ww")
    assert [p.name for p in tmp_path.iterdir()] == ["edges.txt"]


def test_files_of_a_graph_that_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = build([(np.array([0, 1]), np.array([1, 2]))], tmp_path / "g.ww")
    edges = graph.edges_path.read_bytes()
    for content, says in (
        (edges[:-3], "copied whole"),
        (b"no array at all", "not a .npy file"),
        (edges.replace(b"<i4", b"<f4"), "float32"),
    ):
        graph.edges_path.write_bytes(content)
        assert says in failing(capsys, "graph", "bfs", graph.path, "--source", 0)
    graph.edges_path.unlink()
    assert "missing" in failing(capsys, "graph", "bfs", graph.path, "--source", 0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--source", 3], "0 to 2"),
        (["--source", -1], "0 to 2"),
        (["--source", "x"], "no vertex 'x'"),
        (["--source", "1.5"], "no vertex '1.5'"),
        (["--source", 0, "--page-size", 1000], "power of two"),
        (["--source", 0, "--page-size", 256], "512 to 1,048,576 bytes"),
        (["--source", 0, "--cache", 100], "smaller than one page"),
        (["--source", 0, "--cache", "much"], "not a size"),
        (["--source", 0, "--cache", "0"], "at least 1 byte"),
        (["--source", 0, "--out", "levels.txt"], ".npy"),
        (["--source", 0, "--out", "no/such/folder/levels.npy"], "does not exist"),
    ],
)
def test_options_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[object], says: str
) -> None:
    graph = build([(np.array([0, 1]), np.array([1, 2]))], tmp_path / "g.ww")
    assert says in failing(capsys, "graph", "bfs", graph.path, "--device", "cpu", *options)


@pytest.mark.parametrize("options", [["--device", "tpu"], [], ["--source", "0", "--devic", "cpu"]])
def test_options_that_do_not_parse(capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["graph", "bfs", "g.ww", *options])
    assert end.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_components_of_a_directed_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = build([(np.array([0, 1]), np.array([1, 2]))], tmp_path / "g.ww")
    assert "--undirected" in failing(capsys, "graph", "cc", graph.path)
    assert "--undirected" in failing(capsys, "graph", "triangles", graph.path)
    assert "--in-edges" in failing(capsys, "graph", "pagerank", graph.path)
    assert "no weights" in failing(capsys, "graph", "sssp", graph.path, "--source", 0)


def test_weights_of_a_list_that_are_not_announced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "w.txt").write_text("0 1 5\n1 2 6\n")
    command = ["graph", "convert", str(tmp_path / "w.txt"), str(tmp_path / "w.ww")]
    assert "to read the third field" in failing(capsys, *command)
    assert main([*command, "--weights", "int32"]) == 0
    assert "int32" in capsys.readouterr().out
    assert main([*command, "--weights", "none", "--overwrite"]) == 0
    assert re.search(r"weights\W+none", capsys.readouterr().out)


def test_no_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    graph = build([(np.array([0, 1]), np.array([1, 2]))], tmp_path / "g.ww")
    monkeypatch.setattr("warpwell.targets.gpu.device.has_cuda", lambda: False)
    assert "cpu" in failing(capsys, "graph", "bfs", graph.path, "--source", 0, "--device", "cuda")


def test_convert_and_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edges, out = tmp_path / "edges.txt", tmp_path / "out.ww"
    edges.write_text("# comment\n0\t1\n1\t2\n2\t1\n")
    assert main(["graph", "convert", str(edges), str(out), "--undirected", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["vertices"], report["edges"], report["undirected"]) == (3, 4, True)
    assert main(["graph", "convert", str(edges), str(out), "--overwrite", "--vertices", "9"]) == 0
    assert "out.ww" in capsys.readouterr().out
    command = ["graph", "generate", "kron", str(tmp_path / "kron.ww"), "--scale", "6", "--degree", "4", "--seed", "3"]
    assert main([*command, "--json", "--memory", "1MiB"]) == 0
    assert json.loads(capsys.readouterr().out)["vertices"] == 64
    assert "scale" in failing(capsys, "graph", "generate", "urand", tmp_path / "u.ww", "--scale", 40)


def test_an_interrupt(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("warpwell.graph.convert", interrupted)
    assert main(["graph", "convert", "a", "b"]) == 130
    assert capsys.readouterr().err == "warpwell: interrupted\n"


@pytest.mark.parametrize("name", ["data[train].ww", "a[b]:rocket:.ww", "[red]"])
def test_names_are_text_and_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main(["graph", "generate", "kron", str(tmp_path / name), "--scale", "3"]) == 0
    assert capsys.readouterr().out.count(name) >= 1 + (len(str(tmp_path / name)) < 60)
    closing = "nothing [/b] opened"
    output = Output(as_json=False)
    output.result(closing, {closing: closing})
    with output.progress() as report:
        report(closing, 0, 1)
    assert capsys.readouterr().out.count(closing) == 3


def test_numbers_that_are_read() -> None:
    assert [readable(key, 1_234_567) for key in ("vertices", "owner_pid", "seed", "memory", "held_bytes")] == [
        "1,234,567",
        "1234567",
        "1234567",
        "1.2 MiB (1,234,567)",
        "1.2 MiB (1,234,567)",
    ]
    assert {readable(key, None) for key in ("weights", "names", "cache_bytes")} == {"none"}
    assert readable("hits", None) == "not counted"
    assert readable("uptime", 3725.5) == readable("uptime", 3725) == "1:02:05 (h:mm:ss)"


@pytest.mark.parametrize("command", ["info", "graph bfs g.ww --source 0", "kv stats x", "sched explain x", "pool top"])
def test_an_unknown_option_shows_the_commands_usage(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command.split(), "--nope"])
    assert end.value.code == 2
    usage = capsys.readouterr().err
    name = " ".join(command.split()[: 1 + (command != "info")])
    assert usage.startswith(f"usage: warpwell {name} ") and "unrecognized arguments: --nope" in usage


@pytest.mark.parametrize(("trace", "says"), [("none/t.json", "does not exist; create it first"), (".", "is a folder")])
def test_a_trace_that_cannot_be_written_is_found_before_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, trace: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app.py").write_text("open('ran', 'w')")
    message = failing(capsys, "run", "--agents", 1, "--target", "cpu", "--trace", trace, "app.py")
    assert f"--trace {trace}" in message and says in message
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("status", "ends"), [(0, 1), (3, 3)])
def test_a_trace_that_was_lost_at_the_end_is_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, status: int, ends: int
) -> None:
    from warpwell.pool.launch import application

    class NoDevices(list):  # type: ignore[type-arg]
        def close(self) -> None:
            pass

    monkeypatch.setattr(application, "_status", status)
    application._write_trace(str(tmp_path / "t.json"), NoDevices())  # type: ignore[arg-type]
    assert (application._status, (tmp_path / "t.json").exists()) == (status, True)
    application._write_trace(str(tmp_path / "gone" / "t.json"), NoDevices())  # type: ignore[arg-type]
    assert application._status == ends
    message = capsys.readouterr().err
    assert message.startswith("warpwell: error: the trace ") and "gone" in message


@pytest.mark.parametrize(
    ("variable", "text", "code"),
    [
        ("WARPWELL_THREADS", "abc", "import warpwell.targets.compiler.run_cpu"),
        ("WARPWELL_POOL_STALL", "ten", "from warpwell.pool.transport.milestone import limit; limit()"),
        ("WARPWELL_POOL_STALL", "-1", "from warpwell.pool.transport.milestone import limit; limit()"),
    ],
)
def test_variables_that_cannot_be_are_named(tmp_path: Path, variable: str, text: str, code: str) -> None:
    (tmp_path / "program.py").write_text(code)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        env={**os.environ, variable: text},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert f"ArgumentError: {variable} is {text!r}: give " in done.stderr


def test_top_tells_the_calls_a_second_of_cuda_programs_since_the_last_look(capsys: pytest.CaptureFixture[str]) -> None:
    from warpwell.cli.pool import print_programs

    def agent(calls: int, seconds: float, pid: int | None) -> dict[str, Any]:
        program = {
            "pid": pid,
            "command": "app.py",
            "worker": 7,
            "device": 3,
            "bytes": 5 << 20,
            "calls": calls,
            "seconds": seconds,
        }
        return {"host": "a", "info": {"programs": [program]}}

    silent = {"host": "b", "state": "silent"}
    before = print_programs(Output(False), [agent(1000, 2.0, 41), silent], {})
    print_programs(Output(False), [agent(4000, 3.0, None)], before)
    table = capsys.readouterr().out
    assert [word in table for word in ("app.py", "on another host", "5.0 MiB", "1,000", "500", "3,000")] == [True] * 6
    assert print_programs(Output(False), [silent], before) == {} and not capsys.readouterr().out
