"""``python -m lab sched trace``: the contents of a trace, and traces written as tables."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

from lab.cli import parser_of, run_command
from warpwell.cli._common import json_option, output_of
from warpwell.scheduler.extend import Kind

from .simulate import finite, print_description, recipe_of, trace_options
from .traces import table

KINDS: dict[str, Kind | None] = {"memory": Kind.MEMORY, "compute": Kind.COMPUTE, "unknown": None}


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = parser_of("sched trace", "Show the contents of a trace, and write it as a table.")
    trace_options(parser)
    parser.add_argument("--out", metavar="FILE.csv", help="write the workload for --trace, one line per kernel")
    json_option(parser)
    return run_command(run, parser, argv)


def run(arguments: argparse.Namespace) -> int:
    """Read the files, and describe the workload."""
    output = output_of(arguments)
    workload = recipe_of(arguments).make()
    counts = Counter(arrival.application.name for arrival in workload.arrivals)
    applications: dict[str, dict[str, Any]] = {}
    for application in {a.application.name: a.application for a in workload.arrivals[::-1]}.values():
        profiles = [kernel.profile for kernel in application.kernels]
        values = {"requests": counts[application.name], "kernels": len(profiles), "seconds": application.seconds}
        for name, kind in KINDS.items():
            values[f"{name}_seconds"] = sum(p.seconds or 0.0 for p in profiles if p.kind is kind)
        applications[application.name] = values
    if arguments.out is not None:
        table.write(workload, arguments.out)
    description = {**workload.describe(), "load": workload.load, "out": arguments.out}
    if output.print_json(finite({**description, "applications": applications})):
        return 0
    print_description(output, description)
    heads = ("application", "requests", "kernels", "solo, ms", "memory, ms", "compute, ms", "unknown, ms")
    rows = []
    for name in sorted(applications):
        requests, kernels, *times = applications[name].values()
        rows.append((name, f"{requests:,}", f"{kernels:,}", *(f"{1e3 * seconds:.3f}" for seconds in times)))
    output.table("applications", heads, rows)
    return 0
