"""Ctrl-C in commands that take long: they end soon, with code 130 and one sentence, and leave nothing."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.harness.until import HANG_SECONDS, until

CHECKOUT = Path(__file__).parents[2]


Begin = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Start commands as a terminal does: in groups of their own, which Ctrl-C is for. All are gone after the test."""
    with contextlib.ExitStack() as stack:

        def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", *arguments],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=os.environ | {"PYTHONPATH": str(CHECKOUT)} | environment,
                    start_new_session=True,
                )
            )
            stack.callback(end, process)
            return process

        def end(process: subprocess.Popen[str]) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        yield start


def session_processes(session: int) -> list[str]:
    """Processes of a session that still run."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] not in "ZX":
                found.append(folder.name)
    return found


def interrupt(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Press Ctrl-C; return what was written."""
    assert process.poll() is None, process.communicate()
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 130, err
    assert "Traceback" not in err and err.endswith("warpwell: interrupted\n")
    until(lambda: not session_processes(process.pid))  # helpers of multiprocessing exit when their pipes are closed
    return out, err


def wait_for(true: Callable[[], object], process: subprocess.Popen[str]) -> None:
    until(lambda: true() or process.poll() is not None)
    assert process.poll() is None, "the program has ended early"


def test_simulations_of_four_policies(begin: Begin) -> None:
    policies = "left-over,source,lanes,first-come"
    process = begin("lab", "sched", "simulate", "--policy", policies, "--kernels", "2000000")
    ticks = os.sysconf("SC_CLK_TCK")

    def cpu_seconds() -> float:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].split()
        return int(fields[11]) / ticks

    wait_for(lambda: cpu_seconds() > 3, process)  # longer than the imports of the program
    out, _ = interrupt(process)
    assert out == ""


def test_a_service(begin: Begin, tmp_path: Path) -> None:
    path = tmp_path / "run" / "s.sock"
    for number, code in ((signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 0)):
        process = begin(
            "warpwell", "sched", "serve", "--device", "cpu", "--socket", str(path), "--json", TMPDIR=str(tmp_path)
        )
        assert process.stdout is not None and '"socket"' in process.stdout.readline()
        if number == signal.SIGINT:
            interrupt(process)
        else:
            process.send_signal(number)
            _, err = process.communicate(timeout=HANG_SECONDS)
            assert process.returncode == code and err == ""
        if number != signal.SIGKILL:  # the killed program leaves its files
            assert [p.name for p in path.parent.iterdir()] == ["s.sock.lock"]
            assert list(tmp_path.iterdir()) == [path.parent]


def test_a_service_that_is_starting(begin: Begin, tmp_path: Path) -> None:
    path = tmp_path / "run" / "s.sock"
    process = begin("warpwell", "sched", "serve", "--device", "cpu", "--socket", str(path), TMPDIR=str(tmp_path))
    wait_for(lambda: list(tmp_path.glob("run/s.sock*")), process)
    interrupt(process)
    assert [p.name for p in path.parent.iterdir()] == ["s.sock.lock"]
    assert list(tmp_path.iterdir()) == [path.parent]


@pytest.mark.parametrize("handles", [False, True])
def test_what_holds_an_interrupt_up_is_ended_and_its_folder_removed(tmp_path: Path, handles: bool) -> None:
    program = f"""
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from warpwell.cli._common import exit_on_interrupt
from warpwell.replacing import replacing
exit_on_interrupt()
with replacing({str(tmp_path / "held")!r}) as folder:
    folder.mkdir()
    (folder / "file").touch()
    while True:
        try:
            print(folder, flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            if not {handles}:
                raise
"""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert folder.exists()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=HANG_SECONDS)
    assert not folder.exists()
    if handles:
        assert process.returncode == 130 and err == "warpwell: interrupted\n"
    else:
        assert process.returncode == -signal.SIGINT, "Python's own end came first"
