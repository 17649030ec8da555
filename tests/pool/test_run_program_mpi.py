"""A program under ``warpwell run`` behaves as under ``python``; and options that place agents."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.harness.until import HANG_SECONDS

from warpwell.cli import main
from warpwell.pool.launch.reservation import FOLDER

from .runs import PROGRAMS, SOURCES, Start, start

__all__ = ["start"]
ENDING = str(PROGRAMS / "ending.py")


def under_python(*arguments: str, text: str = "a line\n", folder: Path = PROGRAMS) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, *arguments],
        input=text,
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SOURCES), "PWD": str(folder)},
        timeout=HANG_SECONDS,
    )
    return done.returncode, done.stdout, done.stderr


def under_run(start: Start, *arguments: str, text: str = "a line\n", folder: Path = PROGRAMS) -> tuple[int, str, str]:
    run = start("--agents", "2", *arguments, stdin=subprocess.PIPE, environ={"PWD": str(folder)}, folder=folder)
    assert run.process.stdin is not None
    run.process.stdin.write(text)
    run.process.stdin.flush()
    status = run.end()
    run.nothing_is_left()
    return status, run.output, run.errors


@pytest.mark.parametrize(
    "arguments",
    [
        [str(PROGRAMS / "semantics.py"), "3", "-m", "--agents", "9"],
        pytest.param(["-m", "semantics", "0"], marks=pytest.mark.slow),
        pytest.param([str(PROGRAMS / "failing_program.py")], marks=pytest.mark.slow),
    ],
    ids=["file", "module", "traceback"],
)
def test_the_same_as_under_python(start: Start, arguments: list[str]) -> None:
    expected = under_python(*arguments)
    assert under_run(start, *arguments) == expected
    assert expected[1]


@pytest.mark.slow
def test_an_application_may_use_mpi_itself(start: Start) -> None:
    text = "import sys, warpwell as ww; c = ww.pool.communicator(); print(c.allreduce(5), c.size, sys.argv)"
    run = start("--agents", "2", "-c", text, "-x")
    assert run.end() == 0
    assert run.output == "5 1 ['-c', '-x']\n"


@pytest.mark.slow
def test_copies_that_nobody_takes_are_let_go(start: Start) -> None:
    run = start("--agents", "2", str(PROGRAMS / "refused.py"))
    assert run.end() == 0, run.errors
    assert run.output.splitlines() == [
        *["upload: True"] * 3,
        *["copy: True"] * 6,
        "interrupted",
        "told: no thread",
        "the same tag: True",
    ]
    run.nothing_is_left()


def test_what_agents_print_arrives(start: Start) -> None:
    rule = "-" * 74
    text = f"import warpwell as ww; [d.call(print, {rule!r}, d.index, sep=chr(10)).get() for d in ww.devices()]"
    run = start("--agents", "2", "-c", text)
    assert run.end() == 0
    assert sorted(run.output.split()) == [rule, rule, "0", "1"]


def fake_ssh(folder: Path, script: str) -> dict[str, str]:
    path = folder / "ssh"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return {"PRTE_MCA_plm_ssh_agent": str(path)}


@pytest.mark.slow
def test_agents_of_other_hosts(start: Start, tmp_path: Path) -> None:
    """The other host is this one under another name: it is reached by something that takes ssh's arguments.

    Over sockets, because files in shared memory have names that are unique on one host.
    """
    environ = fake_ssh(tmp_path, 'while [ "${1#-}" != "$1" ]; do shift; done; shift; exec sh -c "$*"')
    run = start("--tcp", "--hosts", "localhost:1,elsewhere:2", ENDING, "exit", "4", environ=environ)
    assert len(run.line("up")) == 4
    assert (run.end(), run.errors) == (4, "")
    run.nothing_is_left()


@pytest.mark.slow
def test_a_host_that_does_not_answer_is_named(start: Start, tmp_path: Path) -> None:
    environ = fake_ssh(tmp_path, "exec sleep 60")
    run = start(
        "--hosts",
        "localhost:1,elsewhere:2",
        "--start-timeout",
        "3",
        ENDING,
        "exit",
        environ=environ,
    )
    assert run.end() == 2
    assert "agent 2 of 3 (device 1, on elsewhere)" in run.errors and "ssh elsewhere" in run.errors
    run.nothing_is_left()


def test_a_host_that_refuses_says_so(start: Start, tmp_path: Path) -> None:
    environ = fake_ssh(tmp_path, "echo refused >&2; exit 255")
    run = start("--hosts", "localhost:1,elsewhere:2", ENDING, "exit", environ=environ)
    assert run.end() == 2
    assert "refused" in run.errors and "elsewhere" in run.errors
    run.nothing_is_left()


def warpwell(folder: Path, *arguments: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(SOURCES), "TMPDIR": str(folder)}
    command = [sys.executable, "-m", "warpwell", *arguments]
    return subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=environ, timeout=HANG_SECONDS
    ).stdout


def test_top_and_trace(start: Start, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    run = start("--agents", "2", "--trace", str(trace), ENDING, "wait")
    application, *agents = map(int, run.line("up"))
    found = json.loads(warpwell(run.folder, "pool", "top", "--json"))["agents"]
    assert [agent["pid"] for agent in found] == agents
    assert all(agent["info"]["target"] for agent in found)
    assert str(agents[1]) in warpwell(run.folder, "pool", "top")
    os.kill(application, signal.SIGINT)
    assert run.end() == 130
    calls = json.loads(trace.read_text())["devices"]
    assert [device["device"] for device in calls] == [0, 1]


@pytest.mark.slow
def test_info_starts_agents(tmp_path: Path) -> None:
    found = json.loads(warpwell(tmp_path, "pool", "info", "--agents", "2", "--json"))["devices"]
    assert [device["device"] for device in found] == [0, 1] and found[1]["round_trip_us"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--agents", "0", "x.py"], "--agents must be at least 1, got 0"),
        (["--agents", "-1", "x.py"], "--agents must be at least 1, got -1"),
        (["--agents", "2"], "name a program"),
        (["--agents", "2", "no-such-file.py"], "does not exist"),
        (["--hosts", "a:1", "--hostfile", "b", "x.py"], "one of them"),
        (["--mpiexec", "/bin/true", ENDING], "is not the mpiexec of Open MPI or MPICH"),
        (["--agents", "999", ENDING], "999 agents (processes) on this host, which has"),
        (
            ["--hosts", "elsewhere:999", ENDING],
            "999 agents (processes) on host elsewhere: start at most 256, or add --force",
        ),
        (["--agents", "2.5", ENDING], "invalid int value: '2.5'"),
        (["--agents", "2", "--start-timeout", "nan", ENDING], "--start-timeout must be positive, got nan"),
        (["--agents", "2", "--start-timeout", "inf", ENDING], "--start-timeout must be positive, got inf"),
    ],
)
def test_bad_input_ends_before_anything_starts(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    try:
        status: object = main(["run", *arguments])
    except SystemExit as error:  # of argparse
        status = error.code
    errors = capsys.readouterr().err
    assert status == 2 and message in errors and len(errors) < 1000


ONE_GPU = """
import sys
if sys.argv[:1] == ['-m']:
    import warpwell.pool.launch.gpus as gpus
    gpus.list_gpus = lambda: ['GPU-0']
"""


def test_more_agents_than_gpus(start: Start, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(ONE_GPU)
    run = start("--agents", "2", ENDING, environ={"PYTHONPATH": f"{tmp_path}:{SOURCES}"})
    assert run.end() == 2
    assert "2 agents on this host, which has 1 GPU: start fewer, or use --share-gpu" in run.errors


def test_a_gpu_that_another_job_has(start: Start, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(ONE_GPU)
    environ = {"PYTHONPATH": f"{tmp_path}:{SOURCES}", FOLDER: str(tmp_path / "locks")}
    code = "from warpwell.pool.launch.reservation import Claim\nClaim('GPU-0')\nprint('has', flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, **environ}, stdout=subprocess.PIPE, stdin=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == b"has\n"
        run = start(ENDING, environ=environ)
        assert run.end() == 2
        assert f"has 1 GPU; process {owner.pid} of user" in run.errors
        assert "--share-gpu" in run.errors
        owner.kill()


def test_without_mpi(start: Start, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\n"
        "before = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'mpi4py' else before(name, *a)\n"
    )
    run = start("--agents", "2", ENDING, environ={"PYTHONPATH": f"{tmp_path}:{SOURCES}"})
    assert run.end() == 2
    assert "pip install -e '.[mpi]'" in run.errors


def test_a_named_transport_joins_all_processes(start: Start) -> None:
    program = "import warpwell as ww; d = ww.devices()[0]; print(d.link, d.to_device(range(3)).copy_to_host().tolist())"
    environ = {"WARPWELL_POOL_TRANSPORT": "lab.link:emulated", "WARPWELL_LAB_LINK": "3600,20"}
    run = start("--agents", "1", "--target", "cpu", "-c", program, environ=environ)
    assert run.end() == 0, run.errors
    assert "emulated link: 3600 MB/s, 20 us" in run.output and "[0, 1, 2]" in run.output


def test_a_transport_that_does_not_exist_ends_the_start(start: Start) -> None:
    run = start("--agents", "1", "--target", "cpu", "-c", "", environ={"WARPWELL_POOL_TRANSPORT": "no_such_module:f"})
    assert run.end() != 0
    assert "WARPWELL_POOL_TRANSPORT must be module:function, got 'no_such_module:f'" in run.errors
