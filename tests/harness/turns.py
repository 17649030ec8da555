"""Programs that take turns, a driver that records its calls, and KeyboardInterrupt at every point, for tests of leases.

A test module names the fixtures that it needs: ``folder, name, start = turns.folder, turns.name, turns.start``.
"""

from __future__ import annotations

import contextlib
import dis
import itertools
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from warpwell.driver import Board
from warpwell.programs import Arbiter, lease, program_status

from .conversation import Conversation
from .until import until


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The boards are the test's own."""
    monkeypatch.setenv("WARPWELL_TURNS", str(tmp_path))


class ArbiterThread(threading.Thread):
    """The arbiter of a board in this process: its import in another one takes a second."""

    def __init__(self, board: Board) -> None:
        super().__init__(daemon=True)
        self._board, self._is_over = board, False
        assert board.become_arbiter()
        self.arbiter = Arbiter(board)
        self.start()

    def run(self) -> None:
        while not self._is_over:
            bell = self._board.bell
            self._board.wait(bell, self.arbiter.step())

    def end(self) -> None:
        self._is_over = True
        self._board.ring()
        self.join()
        self._board.resign()


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """A device of the test's own, without an arbiter: this process keeps its boards."""
    made = f"d{abs(hash(request.node.nodeid))}"
    yield made
    end_leases()


def end_leases() -> None:
    """Retire the leases of this thread, and wait for the keepers of all threads that have ended.

    A keeper calls the driver and writes to its board: it must not reach the `Gpu` or the clock of the next test.
    """
    while lease._leases.found:
        lease._leases.found.popitem()[1].retire()
    until(lambda: not any(thread.name == "warpwell-lease" for thread in threading.enumerate()))


@pytest.fixture
def name(device: str, folder: None) -> Iterator[str]:
    """A device of the test's own, and its arbiter."""
    arbiter = ArbiterThread(Board.of(device))
    yield device
    arbiter.end()


@pytest.fixture
def start(device: str) -> Iterator[Programs]:
    """Starts programs, which end with the test."""
    made = Programs(device)
    yield made
    for program in made.started:
        with program.process:  # which closes the pipes
            program.process.kill()


class Program(Conversation):
    """A process that takes turns; it prints a line a step."""

    def __init__(self, name: str, code: str) -> None:
        head = "import os, signal, sys, time, threading\nimport warpwell as ww\n"
        head += f"say = lambda *a: print(*a, flush=True)\nD = {name!r}\n"
        self.process = subprocess.Popen(
            [sys.executable, "-c", head + code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def send(self, number: int) -> None:
        self.process.send_signal(number)


class Programs:
    """Starts programs at a device."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.started: list[Program] = []

    def __call__(self, code: str) -> Program:
        self.started.append(Program(self._name, code))
        return self.started[-1]

    def holder(self, more: str = "") -> Program:
        """Start `HOLDS`, which is inside."""
        made = self(HOLDS + more)
        assert made.line() == "inside"
        return made

    def waiter(self, tenant: str = "waiter", priority: int = 0) -> Program:
        """Start `WAITER`, which waits: another program must have the lease."""
        made = self(WAITER.format(priority=priority).replace("waiter", tenant))
        assert made.line() == "begins"
        until(lambda: waiting(self._name, tenant))
        return made


HOLDS = """
with ww.turn("holder", device=D):
    say("inside")
    sys.stdin.readline()
say("out")
sys.stdin.readline()
"""

WAITER = """
say("begins")
with ww.turn("waiter", device=D, priority={priority}):
    say("inside")
    sys.stdin.readline()
say("out")
sys.stdin.readline()
"""

OTHER_PROGRAM = """
while sys.stdin.readline():
    with ww.turn("other", device=D, priority={priority:d}, timeout=100):
        pass
    say("done")
"""


def rows(name: str) -> dict[str, dict[str, Any]]:
    return {row["tenant"]: row for row in program_status() if row["device"] == name}


def state(name: str, tenant: str) -> str | None:
    return rows(name).get(tenant, {}).get("state")


def waiting(name: str, tenant: str = "waiter") -> bool:
    return state(name, tenant) == "waiting"


class Interrupt:
    """Send SIGINT at one place in some files where Python looks for signals; `was_sent` becomes True with it.

    It looks when a function begins, after calls, and when a loop goes back. `paths` are parts of the files' paths.
    """

    def __init__(self, at: int, paths: Sequence[str]) -> None:
        self._paths = paths
        self._left, self.was_sent, self.where = at, False, ""
        self._called: set[Any] = set()

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        code = frame.f_code
        inside = any(path in code.co_filename for path in self._paths)
        if not inside or code.co_name == "__del__" or self.was_sent:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        looks = event == "call" or frame in self._called
        self._called.discard(frame)
        if event == "opcode":
            name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            looks = looks or name.startswith("JUMP_BACKWARD")
            if name.startswith("CALL"):
                self._called.add(frame)
        elif event != "call":
            return self
        self._left -= looks
        if looks and self._left < 0:
            self.was_sent, self.where = True, f"{frame.f_code.co_qualname}:{frame.f_lineno}"
            signal.raise_signal(signal.SIGINT)
        return self


def interruptions(run_once: Callable[[], object], *paths: str, step: int = 1, least: int = 50) -> Iterator[str]:
    """Interrupt a function at every `step`-th of its points, one at a time; yield the point after each time.

    There must be more than `least` points, or the paths name no code that runs.
    """
    before = sys.gettrace()
    for at in itertools.count(0, step):
        interrupt = Interrupt(at, paths or ("programs/lease.py", "programs/gpu_work.py"))
        sys.settrace(interrupt)
        with contextlib.suppress(KeyboardInterrupt):
            try:
                run_once()
            finally:
                sys.settrace(before)
        yield f"{at}: {interrupt.where}"
        if not interrupt.was_sent:
            break
    assert at > least


class Gpu:
    """The driver's functions, which record their calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.context = 77
        self._events = 0

    def cuCtxGetCurrent(self, where: Any) -> int:
        where._obj.value = self.context
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.calls.append(f"context {context}")
        return 0

    def cuCtxSynchronize(self) -> int:
        self.calls.append("synchronize")
        return 0

    def cuEventCreate(self, where: Any, flags: int) -> int:
        self._events += 1
        where._obj.value = self._events
        return 0

    def cuEventRecord(self, event: Any, stream: int) -> int:
        self.calls.append(f"record {event.value} in {stream}")
        return 0

    def cuEventSynchronize(self, event: Any) -> int:
        self.calls.append(f"wait {event.value}")
        return 0

    def cuEventDestroy_v2(self, event: Any) -> int:
        self.calls.append(f"destroy {event.value}")
        return 0
