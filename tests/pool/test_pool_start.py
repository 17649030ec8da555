"""The launcher's look at agents that are to start, with processes that are made up."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from warpwell.errors import AgentError
from warpwell.pool.launch.launcher import Launcher, RunOptions, _end_with


def started(seen: set[int], here: list[tuple[str, int]]) -> Any:
    made: Any = Launcher(["program.py"], RunOptions())
    made._places = {1: "localhost", 2: "localhost", 3: "localhost"}
    made._here = {who: SimpleNamespace(kind=who[0], about={}, ready=False, local=True, pid=0) for who in here}
    made._children = SimpleNamespace(ended=list, seen=lambda: seen)
    made._output = SimpleNamespace(settle=lambda: None, said=lambda: "")
    return made


@pytest.mark.parametrize(
    ("seen", "here", "named"),
    [
        ({0, 1, 3}, [("application", 0), ("agent", 1), ("agent", 3)], True),
        ({0, 1, 2, 3}, [("application", 0), ("agent", 1), ("agent", 3)], False),  # it is slow
        (set(), [("application", 0), ("agent", 1), ("agent", 3)], False),  # processes cannot be seen here
        ({0, 1, 3}, [("agent", 1), ("agent", 3)], False),
        ({0, 1, 2, 3}, [("supervisor", 0), ("application", 0), ("agent", 1), ("agent", 2), ("agent", 3)], False),
        ({0, 1, 2, 3}, [("supervisor", 0), ("agent", 1), ("agent", 2), ("agent", 3)], False),  # it imports
    ],
)
def test_an_agent_that_ended_between_two_looks_is_named(
    seen: set[int], here: list[tuple[str, int]], named: bool
) -> None:
    """It was told by the time-out of the start alone, after 30 s."""
    launcher = started(seen, here)
    for tick in range(200):
        if named and tick > 60:
            with pytest.raises(AgentError, match=r"agent 2 of .* ended before it was ready"):
                launcher._check_start(0.1 * tick)
        elif not named or tick < 40:
            launcher._check_start(0.1 * tick)


def test_an_application_that_ended_before_it_was_seen_is_told() -> None:
    launcher = started({1, 2, 3}, [("agent", 1), ("agent", 2), ("agent", 3)])
    for tick in range(40):
        launcher._check_start(0.1 * tick)
    with pytest.raises(AgentError, match="the application ended before it was ready"):
        launcher._check_start(6.0)
    launcher = started({0, 1, 2, 3}, [("agent", 1)])
    launcher._check_start(0.1)
    launcher._children.ended = lambda: [0]
    with pytest.raises(AgentError, match="the application ended before it was ready"):
        launcher._check_start(0.2)


@pytest.mark.parametrize("alive", [True, False])
def test_mpiexec_does_not_outlive_a_launcher_that_is_killed_while_it_starts_it(alive: bool) -> None:
    parent = os.getpid() if alive else os.getpid() + 1
    line = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"]
    done = subprocess.run(line, preexec_fn=lambda: _end_with(parent, lambda *_: 0), check=False)
    assert done.returncode == (-signal.SIGTERM if alive else 1)
