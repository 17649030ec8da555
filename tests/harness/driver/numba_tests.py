"""Run numba-cuda's own tests of its driver part, in one process, on the driver that the loader finds.

    python -m tests.harness.driver.numba_tests OUTPUT.json

The output has the outcome of each test: "passed", "skipped: ..", or the last line of its error.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
import unittest
from pathlib import Path

PACKAGE = "numba.cuda.tests.cudadrv"


class Outcomes(unittest.TestResult):
    """Collects what becomes of each test; a failed part of one fails it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def note(self, test: unittest.TestCase, outcome: str) -> None:
        """Keep the first bad outcome of a test."""
        name = test.id().removeprefix(f"{PACKAGE}.").split(" ")[0]
        if self.found.get(name, "passed") == "passed":
            self.found[name] = outcome

    def failed(self, test: unittest.TestCase, error: object) -> None:
        """Note the last line of an error."""
        assert isinstance(error, tuple)
        report = str(error[1]).strip().splitlines() or [""]
        kind = error[0].__name__
        self.note(test, f"{kind}: {report[-1]}")

    def addSuccess(self, test: unittest.TestCase) -> None:
        """Called by unittest."""
        self.note(test, "passed")

    def addError(self, test: unittest.TestCase, err: object) -> None:  # type: ignore[override]
        """Called by unittest."""
        self.failed(test, err)

    def addFailure(self, test: unittest.TestCase, err: object) -> None:  # type: ignore[override]
        """Called by unittest."""
        self.failed(test, err)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: object) -> None:  # type: ignore[override]
        """Called by unittest."""
        if err is not None:
            self.failed(test, err)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        """Called by unittest."""
        self.note(test, f"skipped: {reason}")


def main() -> None:
    """Run all, and write the outcomes."""
    package = importlib.import_module(PACKAGE)
    suite, loader = unittest.TestSuite(), unittest.TestLoader()
    for name in sorted(module.name for module in pkgutil.iter_modules(package.__path__)):
        if name.startswith("test_"):
            suite.addTests(loader.loadTestsFromModule(importlib.import_module(f"{PACKAGE}.{name}")))
    outcomes = Outcomes()
    suite.run(outcomes)
    Path(sys.argv[1]).write_text(json.dumps(outcomes.found, indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
