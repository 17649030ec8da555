"""``warpwell run`` in tests: starts it, finds its processes by a mark in their environment, and counts what is left."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.harness.until import HANG_SECONDS, until

from lab.campaigns.marked import MARK, command_of, marked

FOLDER = Path(__file__).parent
SOURCES = FOLDER.parents[1] / "src"
PROGRAMS = FOLDER / "programs"


class Run:
    """A running ``warpwell run``."""

    def __init__(
        self, arguments: list[str], folder: Path, environ: dict[str, str], stdin: int, cwd: Path | None
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.folder = folder
        self.before = segments()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "warpwell", *arguments],
            cwd=cwd or folder,
            text=True,
            start_new_session=True,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": f"{SOURCES}:{SOURCES.parent}",
                "TMPDIR": str(folder),
                **environ,
                MARK: self.mark,
            },
        )
        self.output = self.errors = ""
        self._partial_line = b""

    def line(self, start: str) -> list[str]:
        """Words of the next line of output that starts so, without that."""
        for line in self._output_lines():
            if line.startswith(start):
                return line.removeprefix(start).split()
            self.output += line
        pytest.fail(f"the program ended before it wrote {start!r}: {self.output}{self.process.communicate()[1]}")

    def _output_lines(self) -> Iterator[str]:
        """Yield lines as they come. A file object would keep what comes with them, and `end` would miss it."""
        assert self.process.stdout is not None
        while True:
            while b"\n" in self._partial_line:
                line, _, self._partial_line = self._partial_line.partition(b"\n")
                yield line.decode() + "\n"
            more = os.read(self.process.stdout.fileno(), 1 << 16)
            if not more:
                return
            self._partial_line += more

    def end(self, timeout: float = HANG_SECONDS) -> int:
        """Wait for the end; return the exit status."""
        try:
            output, errors = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            output, errors = self.process.communicate(timeout=HANG_SECONDS)
            pytest.fail(f"it did not end within {timeout:g} s\n{self.output}{output}\n{errors}")
        self.output += self._partial_line.decode() + output
        self.errors += errors
        return self.process.returncode

    def find(self, word: str) -> list[int]:
        """Return the processes of the run whose command has `word`, in the order of their start."""
        return [pid for pid in self.left() if word in command_of(pid)]

    def left(self) -> list[int]:
        """Processes of the run that there still are; the command itself not counted."""
        return [pid for pid in marked(self.mark) if pid != self.process.pid]

    def nothing_is_left(self) -> None:
        """Wait until nothing is left of the run."""
        until(lambda: not self.left())
        until(lambda: not self.files())  # the last process of the run removes its files

    def files(self) -> list[str]:
        """Return the files that the run has left behind."""
        own = [str(path) for base in self.folder.glob("warpwell-pool-*") for path in base.iterdir()]
        mpi_files = [str(path) for path in self.folder.iterdir() if path.name.startswith(("ompi", "prte", "pmix"))]
        return own + mpi_files + sorted(name for name in segments() - self.before if f"-{self.process.pid}" in name)

    def kill(self) -> None:
        """Kill everything."""
        ended = self.process.poll() is not None  # if so, its process id may belong to another process
        for pid in [*([] if ended else [self.process.pid]), *self.left()]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def segments() -> set[str]:
    """Names in shared memory."""
    return set(os.listdir("/dev/shm"))


Start = Callable[..., Run]


@pytest.fixture
def start() -> Iterator[Start]:
    """``start("--agents", "2", "file.py", .., environ={..})``: runs; nothing of it is left after the test."""
    runs: list[Run] = []
    temporary = Path(tempfile.mkdtemp(prefix="ww-run-", dir="/tmp"))

    def begin(
        *arguments: str,
        environ: dict[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        folder: Path | None = None,
    ) -> Run:
        options = ["--start-timeout", f"{HANG_SECONDS:g}"]  # `arguments` may have another one, which counts
        runs.append(Run(["run", *options, *arguments], temporary, environ or {}, stdin, folder))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()
        run.process.communicate()
    shutil.rmtree(temporary, ignore_errors=True)


def planted(*plants: str) -> dict[str, str]:
    """Environment in which processes do at their start what `programs/planted/sitecustomize.py` knows."""
    return {"PYTHONPATH": f"{PROGRAMS / 'planted'}:{SOURCES}", "WARPWELL_TEST_PLANTED": ",".join(plants)}
