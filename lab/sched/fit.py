"""``python -m lab sched fit``: constants of the cost formula, from measured preemptions."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from lab.cli import parser_of, run_command
from warpwell.cli._common import json_option, output_of
from warpwell.errors import ArgumentError

from .fitting import fit, read_csv, write_model


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = parser_of("sched fit", "Fit the cost formula to measured preemptions.")
    text = "CSV of preemptions (miss_rate, bytes, cycles or seconds; kind, decay)"
    parser.add_argument("measurements", nargs="+", metavar="FILE", help=text)
    parser.add_argument("--clock", type=float, default=1.755e9, metavar="HZ", help="cycles a second (default 1.755e9)")
    parser.add_argument("--out", metavar="FILE.json", help="write the constants, for --model of other commands")
    json_option(parser)
    return run_command(run, parser, argv)


def run(arguments: argparse.Namespace) -> int:
    """Fit, and report how well it fits."""
    output = output_of(arguments)
    if not arguments.clock > 0:
        raise ArgumentError(f"--clock {arguments.clock:g}: give cycles a second", name="clock")
    rows = []
    for path in arguments.measurements:
        rows += read_csv(path, arguments.clock)
    found = fit(rows, origin=", ".join(arguments.measurements))
    if arguments.out:
        write_model(found.model, arguments.out)
    values = asdict(found)
    notes, model = values.pop("notes"), values.pop("model")
    unknown = sum(p.cycles is not None and (p.nbytes is None or p.miss_rate is None) for p in rows)
    if unknown:
        notes.append(f"{unknown} preemptions were skipped, because their bytes or miss rate are unknown")
    result = {**model, **values, "written": arguments.out, "notes": notes}
    output.result("Cost and decay", result, {"notes": "; ".join(notes)})
    return 0
