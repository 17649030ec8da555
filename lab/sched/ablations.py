"""``python -m lab sched ablations``: the effect of each part and constant of the policy `lanes`, in the simulator.

Every variant replays the traces that an H200 ran (`SOURCE`) in virtual time, so results are equal on every machine.
``--check`` compares them with `BASELINE`; ``--json`` writes a new baseline.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from lab.cli import parser_of, run_command
from warpwell import errors
from warpwell.cli._common import Output
from warpwell.json_file import read_json
from warpwell.scheduler import Job, Policy, State, View
from warpwell.scheduler.policies import lanes, live
from warpwell.scheduler.policies.lanes import Lanes

from .recorded import STP, RecordedRun
from .simulator import Simulator

SOURCE = ("sched_ten_later_h200.json", 400)
"""File of the recorded run, and its first seed."""
BASELINE = Path(__file__).parents[1] / "results" / "simulator" / "ablations.json"
FORMAT = "warpwell-ablations/1"
TOLERANCE = 1e-5
"""Largest relative difference of equal results. Stored results have six decimals."""
FULL = "full policy"
"""Name of the variant without changes."""

CONSTANTS: dict[ModuleType, tuple[str, ...]] = {
    lanes: (
        *("SOONEST", "TRAIN", "AHEAD", "LONGEST", "BRIEF", "LONG", "DECISIONS", "WAITS", "ALIKE", "FRESH", "TRIED"),
        *("LITTLE", "NAMES"),
    ),
    live: ("WINDOW", "WAVES", "HALF", "LEAST", "SLOWED", "NEAR", "UNTRIED", "USUAL"),
}
"""Constants of modules whose sensitivity is measured."""
OPTIONS = ("worthwhile", "least", "rest", "pause", "soon", "slack", "lead")
"""Options of `Lanes` whose sensitivity is measured."""

Summary = dict[str, float]
"""Results of a variant on a trace, over all seeds.

`stp` is the median, and `stp_lowest` the lowest, system throughput relative to the recorded one of the policy
left-over. `antt` is the mean normalized turnaround time; as a mean, it changes with every seed.
"""
Results = dict[str, dict[str, Summary]]
"""Summaries by variant and trace."""


@dataclass(frozen=True)
class Variant:
    """A changed policy.

    Attributes
    ----------
    make_policy : callable
        Returns a policy that has not run yet.
    simulator : type
        `Simulator` or a subclass.
    constant : tuple, optional
        Module, name and value of a constant during the replays.
    """

    make_policy: Callable[[], Policy] = Lanes
    simulator: type[Simulator] = Simulator
    constant: tuple[ModuleType, str, float] | None = None


class WithoutReissue(Simulator):
    """A device that cannot re-issue a kernel when another one begins."""

    def relieve_when(self, mate: Job, job: Job) -> bool:
        """Refuse."""
        return False


class WithoutPrelaunch(Simulator):
    """A device that cannot launch a kernel when another one ends."""

    def launch_behind(self, job: Job, placement: Any, predecessor: Job) -> bool:
        """Refuse."""
        return False


class EqualShares(live.Live):
    """Measurements of pairs that always choose half of the device for each kernel."""

    def _best_share(self, *arguments: Any) -> float:
        return 0.5


class OneShare(Lanes):
    """`Lanes` that gives each kernel of a pair half of the device."""

    def __init__(self) -> None:
        super().__init__()
        self._live = EqualShares()


def replaced(**attributes: Any) -> Callable[[], Policy]:
    """Return a subclass of `Lanes` with replaced methods or class attributes.

    Raises
    ------
    AttributeError
        `Lanes` does not have the attribute, so replacing it would change nothing.
    """
    for name in attributes:
        getattr(Lanes, name)
    return type("Ablated", (Lanes,), attributes)


def never_swap(policy: Any, view: View, heads: list[Job]) -> list[Any]:
    """Never preempt for a better pair."""
    return []


def ignore_gain(policy: Any, view: View, job: Job, mate: Job) -> bool:
    """Launch a pair as persistent blocks whatever it gains."""
    return bool(policy._short(view, live.in_order(job, mate)[0]) or policy._poor(view, job, mate))


def never_brief(policy: Any, view: View, job: Job) -> bool:
    """Launch every solo kernel as persistent blocks."""
    return False


def bucket_without_name(policy: Any, job: Job) -> tuple[Any, ...]:
    """Group waiting kernels by everything except their names."""
    task = job.task
    return task.tenant, job.priority, task.profile.kind, job.state is State.PREEMPTED, task.deadline is None


ABLATIONS: dict[str, Variant] = {
    FULL: Variant(),
    "no re-issue by the GPU": Variant(simulator=WithoutReissue),
    "no launch queue": Variant(replaced(ahead=0)),
    "launch queue of 4": Variant(replaced(ahead=4)),
    "no lookahead": Variant(lambda: Lanes(soon=0)),
    "no prelaunch by the GPU": Variant(simulator=WithoutPrelaunch),
    "one share": Variant(OneShare),
    "no swap": Variant(replaced(_swap=never_swap)),
    "no separation": Variant(lambda: Lanes(least=0, rest=0)),
    "no gain test": Variant(replaced(_alone=ignore_gain)),
    "no short solo launches": Variant(replaced(_brief=never_brief)),
    "no kernel names": Variant(replaced(bucket=bucket_without_name)),
    "all planned cuts": Variant(replaced(_swap=never_swap, _alone=ignore_gain, ahead=4), WithoutReissue),
}
"""Variants of the policy without one of its parts, by name."""


def sensitivity() -> dict[str, Variant]:
    """Return a variant for each constant halved, and one for each constant doubled."""
    variants = {}
    for module, names in CONSTANTS.items():
        for name in names:
            for factor in (0.5, 2):
                value = scaled(getattr(module, name), factor)
                variants[f"{name} x {factor:g}"] = Variant(constant=(module, name, value))
    parameters = inspect.signature(Lanes).parameters
    for name in OPTIONS:
        for factor in (0.5, 2):
            options: dict[str, Any] = {name: scaled(parameters[name].default, factor)}
            variants[f"{name} x {factor:g}"] = Variant(partial(Lanes, **options))
    return variants


def scaled(value: float, factor: float) -> float:
    """Return a constant times a factor; an integer stays an integer of at least 1."""
    return max(1, int(value * factor)) if isinstance(value, int) else value * factor


@contextmanager
def constant_set(module: ModuleType, name: str, value: float) -> Iterator[None]:
    """Set a constant of a module, and restore it at the end."""
    previous, defaults = getattr(module, name), Lanes._divide.__defaults__
    setattr(module, name, value)
    if name == "FRESH":
        # The default of a parameter was evaluated when the module was imported.
        Lanes._divide.__defaults__ = (value,)
    try:
        yield
    finally:
        setattr(module, name, previous)
        Lanes._divide.__defaults__ = defaults


def measure(variants: Mapping[str, Variant], titles: Iterable[str] | None = None) -> Results:
    """Replay recorded traces with each variant.

    Parameters
    ----------
    variants : mapping
        Variants by name.
    titles : iterable of str, optional
        Names of the traces; all by default.
    """
    recorded = RecordedRun.read(*SOURCE)
    selected = list(recorded.rows("lanes") if titles is None else titles)
    results: Results = {}
    for name, variant in variants.items():
        if variant.constant is None:
            results[name] = {title: _summarize(recorded, title, variant) for title in selected}
        else:
            with constant_set(*variant.constant):
                results[name] = {title: _summarize(recorded, title, variant) for title in selected}
    return results


def _summarize(recorded: RecordedRun, title: str, variant: Variant) -> Summary:
    ratios, turnarounds = [], []
    rows, base = recorded.rows("lanes")[title], recorded.rows("left-over")[title]
    for number, row in enumerate(rows):
        metrics = recorded.simulate(title, number, row, variant.make_policy(), variant.simulator)
        ratios.append(metrics.stp / base[number][STP])
        turnarounds.append(metrics.antt)
    summary = {
        "stp": statistics.median(ratios),
        "stp_lowest": min(ratios),
        "antt": statistics.fmean(turnarounds),
    }
    return {key: round(value, 6) for key, value in summary.items()}


def differences(results: Results, baseline: Results) -> list[str]:
    """Return a message for each result that is not in the baseline or differs from it by more than `TOLERANCE`."""
    messages = []
    for name, traces in results.items():
        for title, summary in traces.items():
            expected = baseline.get(name, {}).get(title)
            if expected is None:
                messages.append(f"{name}, {title}: not in the baseline")
                continue
            for key, value in summary.items():
                if abs(value - expected[key]) > TOLERANCE * abs(expected[key]):
                    messages.append(f"{name}, {title}: {key} is {value:.6f}, expected {expected[key]:.6f}")
    return messages


def read_baseline(path: Path = BASELINE) -> dict[str, Results]:
    """Return the results of a file by group, `ablations` and `sensitivity`.

    Raises
    ------
    MissingFileError, FormatError
        The file does not exist, or does not contain results.
    """
    content = read_json(path, f'results of ablations, whose "format" is "{FORMAT}"')
    if content.get("format") != FORMAT:
        raise errors.FormatError(f'{path} has the format {content.get("format")!r}, expected "{FORMAT}"', path=path)
    return {group: content[group] for group in ("ablations", "sensitivity") if group in content}


def check(groups: Mapping[str, Results], path: Path = BASELINE) -> list[str]:
    """Compare complete groups with a file; a variant or trace only in the file is a difference, too."""
    stored = read_baseline(path)
    messages = []
    for group, results in groups.items():
        expected = stored.get(group, {})
        messages += differences(results, expected)
        for name, traces in expected.items():
            missing = traces.keys() - results.get(name, {}).keys()
            messages += [f"{name}, {title}: only in the baseline" for title in sorted(missing)]
    return messages


def write(groups: Mapping[str, Results], path: Path) -> None:
    """Write results as a baseline, one line for each variant and trace."""
    sections = [f'{{\n "format": "{FORMAT}",\n "source": "{SOURCE[0]}"']
    for group, results in groups.items():
        variants = []
        for name, traces in results.items():
            cells = [f"   {json.dumps(title)}: {json.dumps(summary)}" for title, summary in traces.items()]
            variants.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(cells) + "\n  }")
        sections.append(f' "{group}": {{\n' + ",\n".join(variants) + "\n }")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(",\n".join(sections) + "\n}\n", encoding="utf-8")


def show(output: Output, groups: Mapping[str, Results]) -> None:
    """Print the tables."""
    ablations = groups["ablations"]
    full = ablations[FULL]
    output.table(
        "Median STP, relative to left-over",
        ["variant", *full],
        [[name, *(f"{summary['stp']:.3f}" for summary in traces.values())] for name, traces in ablations.items()],
    )
    if "sensitivity" not in groups:
        return
    rows = []
    for name, traces in groups["sensitivity"].items():
        row = [name]
        for key, threshold in (("stp", 0.5), ("antt", 5.0)):
            changes = {title: 100 * (summary[key] / full[title][key] - 1) for title, summary in traces.items()}
            row.append(", ".join(f"{title} {c:+.1f}" for title, c in changes.items() if abs(c) >= threshold) or "-")
        rows.append(row)
    heads = ["constant", "STP, % (from 0.5)", "ANTT, % (from 5)"]
    output.table("Changes from the full policy", heads, rows, left=heads)


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = parser_of("sched ablations", "Measure variants of the policy lanes on recorded traces, in virtual time.")
    parser.add_argument("--sensitivity", action="store_true", help="halve and double each constant, too (40 s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as a baseline")
    parser.add_argument("--check", action="store_true", help="compare with the baseline; exit with 1 if one differs")
    return run_command(run, parser, argv)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, and write or compare if requested."""
    groups = {"ablations": measure(ABLATIONS)}
    if arguments.sensitivity:
        groups["sensitivity"] = measure(sensitivity())
    show(Output(command=arguments.command), groups)
    if arguments.json is not None:
        write(groups, arguments.json)
    if not arguments.check:
        return 0
    messages = check(groups)
    count = sum(map(len, groups["ablations"].values())) + sum(map(len, groups.get("sensitivity", {}).values()))
    print("\n".join(messages) if messages else f"{count} results are equal to the baseline", file=sys.stderr)
    return int(bool(messages))
