"""``python -m lab paper``: rerun the experiments of the source documents and compare the shapes."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import time
from pathlib import Path

from .experiment import DISAGREES, FAILED, Experiment, Setting, carry_out, documents

GROUPS = {
    "bam": "bam",
    "taxi": "taxi",
    "scheduling": "scheduling",
    "cluster": "cluster",
    "key-value": "key_value",
}
"""Groups of experiments, and the module of each."""


def experiments(names: list[str]) -> list[Experiment]:
    """Return the experiments of groups, or single experiments by their full names, in the order of the groups.

    Raises
    ------
    ValueError
        A name is unknown.
    """
    choices = [*GROUPS, "all", *documents()]
    for name in names:
        if name not in choices:
            raise ValueError(f"unknown experiment {name!r}; expected one of {', '.join(choices)}")
    found: list[Experiment] = []
    for group, module in GROUPS.items():
        chosen = not names or "all" in names or group in names
        if chosen or any(name.startswith(f"{group}/") for name in names):
            made = importlib.import_module(f".{module}", __package__).EXPERIMENTS
            found += [experiment for experiment in made if chosen or experiment.name in names]
    return found


def main(argv: list[str]) -> int:
    """Run experiments, print the table, and return 1 if a shape disagrees or an experiment fails."""
    parser = argparse.ArgumentParser(
        prog="python -m lab paper",
        description="Rerun the experiments of the source documents on emulated drives, the simulator and the CPU, and "
        "compare the shapes of the results with the documents. The exit status is 1 if a shape disagrees.",
    )
    parser.add_argument("names", nargs="*", metavar="GROUP", help=f"{', '.join(GROUPS)}, all (default), or GROUP/NAME")
    parser.add_argument("--quick", action="store_true", help="fewer points and smaller data: minutes on two cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measured values as JSON")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the table as a Markdown page")
    options = parser.parse_args(argv)
    try:
        chosen = experiments(options.names)
    except ValueError as error:
        parser.error(str(error))
    os.environ.setdefault("WARPWELL_LOG_LEVEL", "ERROR")

    from rich.console import Console

    from ..bench.machine import facts
    from . import report

    results, began = [], time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="warpwell-paper-") as folder:
        setting = Setting(Path(folder), options.quick)
        for experiment in chosen:
            results.append(carry_out(experiment, setting))
            seconds = time.perf_counter() - began
            print(f"[{seconds:6.1f} s] {experiment.name}: {results[-1].status}", file=sys.stderr, flush=True)
    report.print_table(results, Console(width=None if sys.stdout.isatty() else 160))
    if options.json:
        report.write_json(options.json, results, facts())
    if options.page:
        options.page.write_text(report.page(results, facts()), encoding="utf-8")
    return int(any(result.status in (DISAGREES, FAILED) for result in results))
