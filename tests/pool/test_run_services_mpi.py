"""Arrays and stores that agents have opened, tasks on them, and the pool examples, under ``warpwell run``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.harness.until import HANG_SECONDS

from .runs import PROGRAMS, SOURCES, Start, start

__all__ = ["start"]
EXAMPLES = Path(__file__).parents[2] / "examples"


def under_python(program: Path, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=HANG_SECONDS,
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "agents"),
    [
        pytest.param(path, agents, id=f"{path.stem}-{agents}")
        for path in (PROGRAMS / "services.py", PROGRAMS / "placing.py", *sorted(EXAMPLES.glob("pool_*/*.py")))
        for agents in (2, 4)
    ],
)
def test_the_same_as_under_python(start: Start, program: Path, agents: int, tmp_path: Path) -> None:
    expected = under_python(program, tmp_path)
    run = start("--agents", str(agents), str(program), folder=tmp_path)
    assert run.end() == 0, run.errors
    assert run.output == expected
    assert expected
    run.nothing_is_left()


def test_tasks_of_a_killed_agent_run_elsewhere(start: Start, tmp_path: Path) -> None:
    run = start("--agents", "2", str(PROGRAMS / "services_lost.py"), folder=tmp_path)
    assert run.end() == 0, run.errors
    assert run.output.splitlines() == ["lost TaskLostError", "moved [1, 2]", "array lost"]
    run.nothing_is_left()
