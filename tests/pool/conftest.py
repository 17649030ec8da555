"""Starts small programs under mpiexec, with a time-out, and leaves nothing behind."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.harness.until import HANG_SECONDS

FOLDER = Path(__file__).parent
SOURCES = FOLDER.parents[1] / "src"
MAPPING = ("--map-by", ":OVERSUBSCRIBE", "--bind-to", "none")
# Without Open MPI's own failure detector: its thread makes MPI_Finalize hang, and Warpwell looks for signs of life.
TOLERANT = ("--with-ft", "ulfm")
TCP = ("--mca", "btl", "tcp,self")


def mpiexec() -> str | None:
    """The mpiexec in the folder of this Python, which fits mpi4py, before any other."""
    return shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")


@dataclass
class Ended:
    """The outcome of a job."""

    status: int
    output: str
    errors: str

    def select_lines(self, start: str) -> list[str]:
        """Return the rest of lines that start with `start`; output of several ranks may share a line."""
        return [line.removeprefix(start).strip() for line in self.output.splitlines() if line.startswith(start)]


Job = Callable[..., Ended]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """``job(ranks, program, *arguments, options=())``: run a program of `programs/` on N ranks.

    Everything that the job started has ended afterwards.
    """
    started: list[subprocess.Popen[str]] = []

    def start(
        ranks: int, program: str, *arguments: str, options: tuple[str, ...] = TOLERANT, timeout: float = HANG_SECONDS
    ) -> Ended:
        environment = {
            **os.environ,
            "PYTHONPATH": f"{SOURCES}:{SOURCES.parent}",
            "PYTHONUNBUFFERED": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "TMPDIR": str(_short(tmp_path)),
        }
        executable = mpiexec()
        assert executable is not None
        command = [executable, *options, *MAPPING, "-n", str(ranks), sys.executable, str(FOLDER / "programs" / program)]
        process = subprocess.Popen(
            [*command, *arguments],
            env=environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            _end(process.pid)
            output, errors = process.communicate(timeout=HANG_SECONDS)
            pytest.fail(f"the job did not end within {timeout} s\n{output}\n{errors}")
        return Ended(process.returncode, output, errors)

    yield start
    for process in started:
        _end(process.pid)
        if process.poll() is None:
            process.kill()
        process.communicate()


def _short(folder: Path) -> Path:
    """Open MPI creates sockets there, and their paths must be short; its leftovers are deleted with the folder."""
    made = folder / "t"
    made.mkdir(exist_ok=True)
    return made


def _end(session: int) -> None:
    """Kill every process of a session: ranks have process groups of their own."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ProcessLookupError):
            fields = status.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                os.kill(int(status.parent.name), signal.SIGKILL)
