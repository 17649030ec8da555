"""``python -m lab sched check``: the default policy in the simulator, compared with results of an earlier revision.

Virtual time makes the results equal on every machine. ``--json`` writes a new baseline.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

from lab.cli import parser_of, run_command
from warpwell import errors
from warpwell.cli._common import Output
from warpwell.json_file import read_json

from .experiment import Experiment
from .recorded import STP, RecordedRun
from .replay import ReplayResult
from .traces.recipe import Recipe

POLICY = "lanes"
"""Name of the default policy."""
SOURCE = ("sched_ten_later_h200.json", 400)
"""File of the run that an H200 recorded, and its first seed."""
BASELINE = Path(__file__).parents[1] / "results" / "simulator" / "baseline.json"
FORMAT = "warpwell-baseline/1"
REVISION = "5c84dc83"
"""Commit that produced the baseline."""
LOWEST, LOWEST_RANDOM_MIX = 0.99, 0.96
"""Smallest accepted STP relative to the baseline, on all traces except "random mix", and on "random mix" (issue 35)."""

BUILT_IN = "built-in mix"
HOST_SECONDS = 145e-6
"""Host time per decision and launch in seconds, measured with an H200; for the built-in mix."""

Summary = dict[str, float]
"""Results on a trace, over all seeds: `stp` is the median and `stp_lowest` the lowest STP, `antt` the mean ANTT.

The STP of a trace that a GPU ran is relative to the GPU's STP under the policy left-over.
"""
Results = dict[str, Summary]
"""Summaries by trace."""


def measure(titles: Iterable[str] | None = None) -> Results:
    """Replay the recorded traces and the built-in mix.

    Parameters
    ----------
    titles : iterable of str, optional
        Names of the traces; all by default.
    """
    recorded = RecordedRun.read(*SOURCE)
    rows, base = recorded.rows("lanes"), recorded.rows("left-over")
    results: Results = {}
    for title in [*rows, BUILT_IN] if titles is None else titles:
        if title == BUILT_IN:
            found = [_built_in(seed).metrics() for seed in (0, 1)]
            ratios = [metrics.stp for metrics in found]
        else:
            found = [recorded.simulate(title, number, row, POLICY) for number, row in enumerate(rows[title])]
            ratios = [metrics.stp / base[title][number][STP] for number, metrics in enumerate(found)]
        summary = {
            "stp": statistics.median(ratios),
            "stp_lowest": min(ratios),
            "antt": statistics.fmean(metrics.antt for metrics in found),
        }
        results[title] = {key: round(value, 6) for key, value in summary.items()}
    return results


def _built_in(seed: int) -> ReplayResult:
    return Experiment(Recipe(kernels=800, load=1.5, seed=seed), mode="drain", host=HOST_SECONDS).run(POLICY)


def log_of(seed: int) -> str:
    """Return the log of the built-in mix as text."""
    text = io.StringIO()
    _built_in(seed).log.write(text)
    return text.getvalue()


def losses(results: Results, baseline: Results) -> list[str]:
    """Return a message for each trace that is not stored, or whose STP is too low relative to the stored one."""
    messages = [f"{title}: only in the baseline" for title in sorted(baseline.keys() - results.keys())]
    for title, summary in results.items():
        if title not in baseline:
            messages.append(f"{title}: not in the baseline")
            continue
        ratio = summary["stp"] / baseline[title]["stp"]
        accepted = LOWEST_RANDOM_MIX if title == "random mix" else LOWEST
        if ratio < accepted:
            messages.append(f"{title}: STP is {ratio:.3f} of the baseline, expected at least {accepted}")
    return messages


def read_baseline(path: Path = BASELINE) -> Results:
    """Return the stored results.

    Raises
    ------
    MissingFileError, FormatError
        The file does not exist, or does not contain results.
    """
    content = read_json(path, f'results of the simulator, whose "format" is "{FORMAT}"')
    if content.get("format") != FORMAT:
        raise errors.FormatError(f'{path} has the format {content.get("format")!r}, expected "{FORMAT}"', path=path)
    return dict(content["results"])


def write(results: Results, path: Path) -> None:
    """Write results as a baseline."""
    content = {"format": FORMAT, "revision": REVISION, "policy": POLICY, "source": SOURCE[0], "results": results}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = parser_of("sched check", "Compare the default policy in the simulator with stored results.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as a baseline")
    return run_command(run, parser, argv)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and compare. The exit code is 1 if a result is worse, or if two runs give different logs."""
    results = measure()
    if arguments.json is not None:
        write(results, arguments.json)
    stored = read_baseline(arguments.json or BASELINE)
    rows = [
        (title, *(f"{found[key]:.3f}" for key in found), *(f"{found[key] / stored[title][key]:.3f}" for key in found))
        for title, found in results.items()
        if title in stored
    ]
    heads = ["trace", "STP", "lowest", "ANTT", "STP, of stored", "lowest, of stored", "ANTT, of stored"]
    Output(command=arguments.command).table(f"{POLICY}, compared with {REVISION}", heads, rows)
    messages = losses(results, stored)
    messages += [f"seed {seed}: two runs give different logs" for seed in range(10) if log_of(seed) != log_of(seed)]
    print("\n".join(messages) or "no loss; 10 pairs of logs are equal", file=sys.stderr)
    return int(bool(messages))
