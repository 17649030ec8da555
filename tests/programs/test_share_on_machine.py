"""``warpwell share`` on the machine's own driver, which is the fake driver here."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.harness.until import HANG_SECONDS, until

from lab.driver.build import build_fake
from warpwell.cli.main import main
from warpwell.driver import Board, passthrough_environ
from warpwell.programs import end_programs, program_status
from warpwell.programs.launch import ARBITER_CHECK_SECONDS

ROOT = Path(__file__).parents[2]
DEVICE = "gpu-" + "fa" * 15 + "00"
BEFORE = """
import sys, time
from tests.harness.driver.calls import Cuda, NON_BLOCKING
cuda = Cuda()
cuda.start(1)
cuda.use(0)
stream = cuda.stream(NON_BLOCKING)
def launch(count=10):
    for _ in range(count):
        cuda.launch(0, stream, "nap", 200)
    cuda.cuStreamSynchronize(stream)
launch()
print("ready", flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def shared(tmp_path: Path, text: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program by ``warpwell share``; yield when it is ready."""
    machine = tmp_path / "machine"
    machine.mkdir(exist_ok=True)
    if not (machine / "libcuda.so.1").exists():
        (machine / "libcuda.so.1").symlink_to(build_fake())
    line = [sys.executable, "-m", "warpwell", "share", *options, "-c", BEFORE + textwrap.dedent(text)]
    with subprocess.Popen(
        line,
        cwd=ROOT,
        env=os.environ | {"LD_LIBRARY_PATH": str(machine), "CUDA_MODULE_LOADING": "EAGER"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.terminate()  # ends the program that `share` started, too


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Board]:
    monkeypatch.setenv("WARPWELL_TURNS", str(tmp_path))
    yield Board.of(DEVICE)
    if arbiter := Board.of(DEVICE).arbiter:
        os.kill(arbiter, signal.SIGKILL)


def post_line(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def row() -> dict[str, Any]:
    return next(iter(program_status()), {})


def test_a_program_is_listed_and_has_an_arbiter_which_is_replaced(tmp_path: Path, board: Board) -> None:
    with shared(tmp_path, "sys.exit(7)", "--priority", "2", "--tenant", "me") as process:
        until(lambda: board.arbiter)
        first = board.arbiter
        assert (row()["tenant"], row()["priority"]) == ("me", 2)
        assert first is not None
        os.kill(first, signal.SIGKILL)
        until(lambda: board.arbiter not in (None, first))
        post_line(process)
        assert process.wait(HANG_SECONDS) == 7
    until(lambda: not row())


def test_a_program_is_not_disturbed_by_boards_that_cannot_be_used(tmp_path: Path, board: Board) -> None:
    (tmp_path / "gpu-0.board").write_bytes(b"other" * 10_000)
    with shared(tmp_path, "sys.exit(7)") as process:
        until(lambda: board.arbiter)
        post_line(process)
        assert process.wait(HANG_SECONDS) == 7


def test_files_of_the_working_folder_do_not_stop_the_arbiter(
    tmp_path: Path, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    board.ensure_arbiter()
    until(lambda: board.arbiter)


def test_end_spares_a_process_that_only_a_slot_names(tmp_path: Path, board: Board) -> None:
    with (
        subprocess.Popen(["sleep", "1000"]) as victim,
        shared(tmp_path, "time.sleep(1000)", "--tenant", "me") as process,
    ):
        index, _ = next(board.used_slots())
        board.fields[board.slot(index) + Board.PID] = victim.pid
        assert victim.pid not in end_programs("me")
        assert process.wait(HANG_SECONDS) == 128 + signal.SIGTERM
        assert victim.poll() is None
        victim.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_program_too(tmp_path: Path, board: Board, number: signal.Signals) -> None:
    with shared(tmp_path, "time.sleep(1000)", "--tenant", "me") as process:
        post_line(process)
        process.send_signal(number)
        assert process.wait(HANG_SECONDS) == 128 + number
        until(lambda: not row())


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_program_that_uses_the_driver_directly_is_reported(tmp_path: Path, board: Board, is_direct: bool) -> None:
    machine = tmp_path / "machine" / "libcuda.so.1"
    machine.parent.mkdir()
    machine.symlink_to(build_fake())
    text = f"import ctypes, sys; ctypes.CDLL({str(machine) if is_direct else machine.name!r}); sys.stdin.readline()"
    line = [sys.executable, "-m", "warpwell", "share", "-c", text]
    environ = os.environ | {"LD_LIBRARY_PATH": str(machine.parent)}
    with subprocess.Popen(line, env=environ, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        if is_direct:
            assert "calls are not ordered, because it uses the CUDA driver directly" in process.stderr.readline()
        else:
            time.sleep(3 * ARBITER_CHECK_SECONDS)
        assert process.communicate("\n", HANG_SECONDS) == (None, "")


@pytest.mark.parametrize("share", ["x:y", "1", "1:" + "y" * 64, "1:y", ""])
def test_a_wrong_variable_is_reported_by_the_program(tmp_path: Path, share: str) -> None:
    (tmp_path / "libcuda.so.1").symlink_to(build_fake())
    environ = passthrough_environ(os.environ, tmp_path / "libcuda.so.1") | {"WARPWELL_SHARE": share}
    text = "from warpwell.libcuda import orders_calls; print(orders_calls())"
    done = subprocess.run([sys.executable, "-c", text], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == f"{share == '1:y'}\n"
    assert ("calls are not ordered: WARPWELL_SHARE" in done.stderr) == (share not in ("1:y", ""))


def test_a_program_without_a_slot_is_reported_once(tmp_path: Path, board: Board) -> None:
    for index in range(128):
        assert board.take_slot(Board.TURN, os.getpid(), 0, f"t{index}") is not None
    (tmp_path / "libcuda.so.1").symlink_to(build_fake())
    environ = passthrough_environ(os.environ, tmp_path / "libcuda.so.1") | {"WARPWELL_SHARE": "0:me"}
    line = [sys.executable, "-c", BEFORE]
    done = subprocess.run(line, cwd=ROOT, env=environ, input="\n", capture_output=True, text=True, check=True)
    assert done.stderr.count("calls are not ordered: all slots") == 1
    for index in range(128):
        board.release_slot(index)


def test_two_programs_get_the_gpu_in_turn(tmp_path: Path, board: Board) -> None:
    busy = "while True:\n    launch(50)"
    text = """
        for _ in range(20):
            launch()
            time.sleep(2e-3)
        print("served", flush=True)
        """
    with shared(tmp_path, busy, "--tenant", "train") as train:
        post_line(train)
        until(lambda: board.arbiter)
        with shared(tmp_path, text, "--priority", "1", "--tenant", "serve") as serve:
            post_line(serve)
            assert serve.stdout is not None
            assert serve.stdout.readline() == "served\n"
            used = {each["tenant"]: each["launches"] for each in program_status()}
            assert used["train"] > 0 and used["serve"] > 0
            assert serve.wait(HANG_SECONDS) == 0


@pytest.mark.parametrize("options", [["--agents", "2"], ["--no-ft"], ["--allocate", "use"]])
def test_options_of_a_pool_are_refused_on_the_machines_driver(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["share", *options, sys.executable, "-c", "pass"]) == 2
    text = f"{options[0]} needs a pool: add --cuda pool, or leave out {options[0]}"
    assert text in " ".join(capsys.readouterr().err.split())
