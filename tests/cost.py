"""Record the CPU time of each test, and compare the sum of each room with its budget (``make test-cost``)."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BUDGETS: dict[str, float] = {"programs": 30, "pool": 65, "scheduler": 65, "driver": 50, "drives": 36, "cli": 12}
"""Room -> CPU seconds of its tests in ``make test`` with an empty compile cache."""
TOLERANCE = 1.1


class Recorder:
    """A pytest plugin. A row of a test has its CPU seconds, own and of exited children, and its started processes."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.rows: list[dict[str, Any]] = []
        self._counts: Counter[str] = Counter()
        self._listening = False
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
            self._counts["processes"] += 1
        elif event == "time.sleep":
            self._counts["sleep"] += arguments[0]

    def _listen_to_numba(self) -> None:
        if self._listening or "numba.core.event" not in sys.modules:
            return
        from numba.core import event

        counts = self._counts

        class Compiling(event.Listener):
            depth, began = 0, 0.0

            def on_start(self, event: Any) -> None:
                if self.depth == 0:
                    self.began = time.thread_time()
                self.depth += 1

            def on_end(self, event: Any) -> None:
                self.depth -= 1
                if self.depth == 0:
                    counts["compile"] += time.thread_time() - self.began

        event.register("numba:compiler_lock", Compiling())
        self._listening = True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._listen_to_numba()
        before, counts, began = os.times(), self._counts.copy(), time.perf_counter()
        try:
            return (yield)
        finally:
            after = os.times()
            own = after.user + after.system - before.user - before.system
            children = after.children_user + after.children_system - before.children_user - before.children_system
            new = {key: round(self._counts[key] - counts[key], 3) for key in ("compile", "processes", "sleep")}
            figures = {"cpu": own + children, "children": children, "wall": time.perf_counter() - began}
            self.rows.append({"id": item.nodeid, **{k: round(v, 3) for k, v in figures.items()}, **new})

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.rows += getattr(node, "workeroutput", {}).get("cost", [])

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:  # this is a worker of pytest-xdist
            output["cost"] = self.rows
        elif over_budget(sums(self.rows)):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        rooms = sums(self.rows)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"schema": 1, "rooms": rooms, "tests": self.rows}, indent=1))
        terminalreporter.section("CPU seconds by room")
        for room, figures in sorted(rooms.items(), key=lambda pair: -pair[1]["cpu"]):
            line = "{tests:5.0f} tests {cpu:7.1f} s, children {children:6.1f}, compiling {compile:6.1f}".format(
                **figures
            )
            terminalreporter.line(f"{room:10} {line}, budget {BUDGETS.get(room, 0):g}")
        for room in over_budget(rooms):
            terminalreporter.line(f"{room} exceeds its budget", red=True)


def sums(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the sums of the rows by room."""
    rooms: dict[str, Counter[str]] = {}
    for row in rows:
        room = rooms.setdefault(row["id"].split("/")[1], Counter())
        room.update({key: value for key, value in row.items() if key != "id"})
        room["tests"] += 1
    return {room: {key: round(value, 1) for key, value in found.items()} for room, found in rooms.items()}


def over_budget(rooms: dict[str, dict[str, float]]) -> list[str]:
    """Return the rooms whose tests cost over a tenth more than their budget."""
    return sorted(room for room, found in rooms.items() if found["cpu"] > TOLERANCE * BUDGETS.get(room, float("inf")))
