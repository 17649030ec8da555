"""Compare stored results, or results of two revisions that run alternately."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import machine, runner, schema

TOLERANCE = 0.05
"""Relative change that is never reported."""


class NotComparableError(Exception):
    """A base result cannot be a baseline; the message states the reason."""


@dataclass(frozen=True)
class Change:
    """A figure that differs: by more than the tolerance and the measured spread, or because it is missing.

    Attributes
    ----------
    figure, unit : str
    base, new : float or None
        Medians; None if the figure is missing there.
    limit : float
        Relative change up to which the figure counts as unchanged.
    worse : bool
    """

    figure: str
    unit: str
    base: float | None
    new: float | None
    limit: float
    worse: bool

    def __str__(self) -> str:
        """Return one line."""
        if self.base is None:
            return f"new        {self.figure}: {self.new:.4g} {self.unit}"
        if self.new is None:
            return f"MISSING    {self.figure}: was {self.base:.4g} {self.unit}"
        change = self.new / self.base - 1 if self.base else float("inf")
        word = "REGRESSION" if self.worse else "better    "
        values = f"{self.base:.4g} -> {self.new:.4g} {self.unit}"
        return f"{word} {self.figure}: {values} ({change:+.1%}, limit {self.limit:.1%})"


def spread(runs: Sequence[float]) -> float:
    """Return the range of repeated measurements, relative to their middle; 0 for a single measurement."""
    middle = (max(runs) + min(runs)) / 2
    return (max(runs) - min(runs)) / abs(middle) if middle else 0.0


def check_baseline(result: schema.Result) -> None:
    """Raise NotComparableError if the result was measured on a busy machine."""
    if result["busy"]:
        raise NotComparableError(
            f"the base result of {result['benchmark']} was measured on a busy machine; measure again on an idle machine"
        )


def compare_results(base: schema.Result, new: schema.Result, tolerance: float = TOLERANCE) -> list[Change]:
    """Return the changes of one benchmark.

    Raises
    ------
    NotComparableError
        The base was measured on a busy machine, or with other options.
    """
    check_baseline(base)
    if base["options"] != new["options"]:
        raise NotComparableError(
            f"{base['benchmark']} was measured with different options: {base['options']} and {new['options']}"
        )
    changes = []
    old = {figure["id"]: figure for figure in base["figures"]}
    current = {figure["id"]: figure for figure in new["figures"]}
    for name in [*old, *(name for name in current if name not in old)]:
        before, after = old.get(name), current.get(name)
        if before is None or after is None:
            unit = (before or after or {})["unit"]
            pair = before and before["value"], after and after["value"]
            changes.append(Change(name, unit, *pair, tolerance, worse=after is None))
            continue
        limit = max(tolerance, spread(before["runs"]), spread(after["runs"]))
        difference = after["value"] - before["value"]
        if abs(difference) > limit * abs(before["value"]):
            worse = (difference < 0) == (before["better"] == "higher")
            changes.append(Change(name, before["unit"], before["value"], after["value"], limit, worse))
    return changes


def report(
    base: Sequence[schema.Result], new: Sequence[schema.Result], tolerance: float = TOLERANCE, partial: bool = False
) -> int:
    """Print all changes and return 1 if a figure is worse or missing, otherwise 0.

    Benchmarks of `base` that `new` lacks count as missing, unless `partial` is true.
    """
    status, compared = 0, 0
    latest = {result["benchmark"]: result for result in new}
    for result in base:
        after = latest.get(result["benchmark"])
        if after is None:
            if not partial:
                print(f"MISSING    {result['benchmark']}: no result")
                status = 1
            continue
        compared += len(result["figures"])
        if after["busy"]:
            print(f"note       {result['benchmark']}: measured on a busy machine")
        if {k: v for k, v in result["machine"].items() if k in ("cpu", "cores", "gpu")} != {
            k: v for k, v in after["machine"].items() if k in ("cpu", "cores", "gpu")
        }:
            print(f"note       {result['benchmark']}: measured on different machines")
        for change in compare_results(result, after, tolerance):
            print(change)
            status = max(status, int(change.worse))
    print(f"{compared} figures compared, {'regressions found' if status else 'no regression'}")
    return status


@contextlib.contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """Yield a temporary worktree of a revision."""
    with tempfile.TemporaryDirectory(prefix="warpwell-compare-") as folder:
        path = Path(folder) / "tree"
        command = ["git", "worktree", "add", "--quiet", "--detach", str(path), revision]
        done = subprocess.run(command, cwd=machine.ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"cannot check out revision {revision!r}: {done.stderr.strip()}")
        try:
            yield path
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(path)], cwd=machine.ROOT, capture_output=True)


def against(
    revision: str, names: Sequence[str], setting: runner.Setting, rounds: int = 5, tolerance: float = TOLERANCE
) -> int:
    """Run benchmarks of a revision and of this checkout alternately, each run in a fresh process, and report changes.

    The order within a pair alternates, too. One run of each side warms the compilation cache and is not counted.
    """
    bases: list[schema.Result] = []
    news: list[schema.Result] = []
    with checkout(revision) as tree:
        if not (tree / "lab" / "bench" / "runner.py").exists():
            raise SystemExit(f"revision {revision!r} has no lab/bench/runner.py; pass a later revision")
        sides = (tree, machine.ROOT)
        for name in names:
            start = time.perf_counter()
            try:
                for root in sides:
                    runner.run_once(name, setting, root)
                answers: tuple[list[dict[str, Any]], ...] = ([], [])
                for k in range(rounds):
                    for side in (0, 1) if k % 2 == 0 else (1, 0):
                        answers[side].append(runner.run_once(name, setting, sides[side]))
            except runner.CannotRunError as error:
                print(f"skipped    {name}: {error}", file=sys.stderr)
                continue
            took = time.perf_counter() - start
            # Both sides ran under the same load, so the comparison is valid on a busy machine, with a wider spread.
            for results, answer, root in ((bases, answers[0], tree), (news, answers[1], machine.ROOT)):
                results.append(runner.result_of(name, setting, answer, busy=False, seconds=took, root=root))
    if not bases:
        raise SystemExit("nothing was compared")
    return report(bases, news, tolerance)
