"""Measure which lines of ``src/warpwell`` the tests execute, in total and by room (``make coverage``).

Processes that tests start are not measured: the hooks would double the time of each start.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import coverage
import pytest

SOURCE = Path(__file__).parents[1] / "src" / "warpwell"
CORE = "sysmon" if sys.version_info >= (3, 12) else "ctrace"


class Coverage:
    """A pytest plugin that measures in every process that runs tests; workers send their data to the main one."""

    def __init__(self) -> None:
        self._measured = coverage.Coverage(data_file=None, config_file=False, source=[str(SOURCE)], messages=False)
        self._measured.set_option("run:core", CORE)
        self._measured.set_option("run:disable_warnings", ["no-data-collected"])  # by a process that runs no tests
        self._measured.start()
        self._received: list[bytes] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._measured.stop()
        output = getattr(session.config, "workeroutput", None)
        if output is not None:  # this is a worker of pytest-xdist
            output["covered"] = self._measured.get_data().dumps()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if data := getattr(node, "workeroutput", {}).get("covered"):
            self._received.append(data)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        everything = self._measured.get_data()
        for data in self._received:
            of_worker = coverage.CoverageData(no_disk=True)
            of_worker.loads(data)
            everything.update(of_worker)
        terminalreporter.section("line coverage by room")
        statement_counts: Counter[str] = Counter()
        missing: Counter[str] = Counter()
        for path in SOURCE.rglob("*.py"):
            _, statements, _, missed, _ = self._measured.analysis2(str(path))
            parts = path.relative_to(SOURCE).parts
            for room in (parts[0] if len(parts) > 1 else "warpwell", "total"):
                statement_counts[room] += len(statements)
                missing[room] += len(missed)
        for room in sorted(statement_counts, key=lambda name: (name == "total", name)):
            share = 1 - missing[room] / max(statement_counts[room], 1)
            terminalreporter.line(f"{room:12} {statement_counts[room]:6} lines {share:7.1%}")
