"""``warpwell run --notebook``: a Jupyter kernel's requirements, without Jupyter; with it if it is installed."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from tests.harness.threads import until_blocked
from tests.harness.until import HANG_SECONDS, until

from lab.campaigns.marked import MARK, command_of, marked, seconds_until_none_is_left, state_of

from .runs import PROGRAMS, SOURCES, Start, planted, start

__all__ = ["start"]


def test_interrupts_end_cells_and_nothing_else(start: Start, tmp_path: Path) -> None:
    command = ("--notebook", "--agents", "2", "-m", "kernel_like", "-f", "a file.json")
    run = start(*command, folder=PROGRAMS, environ={"TEST_INTERRUPTED_AFTER": str(tmp_path / "interrupted")})
    program, *arguments = run.line("up")
    assert arguments == ["-f", "a", "file.json"]
    for number in range(4):  # more interrupts than end a program that is not a kernel
        assert run.line("cell") == [str(number)]
        if number != 1:  # cell 1 does not wait
            until_blocked(int(program))
        run.process.send_signal(signal.SIGINT)
        assert run.line("was") == ["interrupted"]
    assert run.line("cell") == ["4"]
    assert run.line("was") == ["interrupted"]
    assert run.line("between") == []
    for _ in range(4):
        run.process.send_signal(signal.SIGINT)
        assert run.line("ignored") == []
    (tmp_path / "interrupted").touch()
    assert run.line("sums") == ["1", "2"]
    assert run.line("was") == ["done"]
    assert run.line("seen") == ["from", "an", "agent"]
    assert (run.end(), run.errors) == (0, "")
    run.nothing_is_left()


@pytest.mark.slow
def test_an_interrupt_while_everybody_starts_is_none(start: Start) -> None:
    run = start(
        "--notebook", "--agents", "2", str(PROGRAMS / "ending.py"), "exit", "3", environ=planted("1:stop-before-mpi")
    )
    until(lambda: any(state_of(pid) == "T" for pid in run.find("agent_main")))
    stopped = [pid for pid in run.find("agent_main") if state_of(pid) == "T"]
    for _ in range(4):
        run.process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    os.kill(stopped[0], signal.SIGCONT)
    run.line("up")
    assert run.end() == 3
    run.nothing_is_left()


@pytest.mark.parametrize("ends", [True, False], ids=["with", "without"])
def test_it_ends_with_jupyter(ends: bool) -> None:
    mark = uuid.uuid4().hex
    command = [
        sys.executable,
        "-m",
        "warpwell",
        "run",
        *["--notebook"] * ends,
        "--agents",
        "1",
        str(PROGRAMS / "ending.py"),
        "wait",
    ]
    text = (
        "import os, subprocess, sys; os.environ['JPY_PARENT_PID'] = str(os.getpid())\n"
        "subprocess.Popen(sys.argv[1:], start_new_session=True).wait()"
    )
    jupyter = subprocess.Popen(
        [sys.executable, "-c", text, *command],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCES), MARK: mark},
    )
    try:
        assert jupyter.stdout is not None and jupyter.stdout.readline().startswith("up")
        jupyter.kill()
        jupyter.wait(HANG_SECONDS)
        if ends:
            until(lambda: not marked(mark))
        else:
            time.sleep(0.5)
            assert marked(mark)
    finally:
        jupyter.kill()
        for pid in marked(mark):
            if "warpwell run" in command_of(pid):
                os.kill(pid, signal.SIGTERM)
        jupyter.communicate(timeout=HANG_SECONDS)
        seconds_until_none_is_left(mark, HANG_SECONDS)


@pytest.mark.parametrize("mode", ["signal", pytest.param("message", marks=pytest.mark.slow)])
def test_a_kernel_of_jupyter(tmp_path: Path, mode: str) -> None:
    for module in ("ipykernel", "jupyter_client"):
        # Do not import them here, because they start threads and set signal handlers.
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")
    mark = uuid.uuid4().hex
    environ = {**os.environ, "JUPYTER_DATA_DIR": str(tmp_path), "PYTHONPATH": f"{SOURCES}:{SOURCES.parent}", MARK: mark}
    del environ["PYTEST_CURRENT_TEST"]  # with this variable, ipykernel does not read its descriptors
    command = [sys.executable, "-m", "warpwell", "pool", "notebook", "--agents", "2", "--share-gpu"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=HANG_SECONDS, env=environ)
    # Run a separate program, because the descriptors that it leaves open would fail this test.
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "notebook.py"), mode],
        env=environ,
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=2 * HANG_SECONDS,  # of two kernels and a dozen cells
    )
    assert done.stdout.endswith("all is well\n"), done.stderr
