"""``python -m lab sched trace``: the contents of a trace, and traces written as tables."""

from __future__ import annotations

import argparse
from collections import defaultdict
from typing import Any

from lab.cli import parser_of, run_command
from warpwell.cli._common import json_option, output_of

from .simulate import recipe_of, trace_options


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = parser_of("sched trace", "Show the contents of a trace, and write it as a table.")
    trace_options(parser)
    parser.add_argument("--out", metavar="FILE.csv", help="write the workload: a line a kernel, for --trace")
    json_option(parser)
    return run_command(run, parser, argv)


def run(arguments: argparse.Namespace) -> int:
    """Read the files, and describe the workload."""
    from lab.sched.traces import table as tables

    from .simulate import _finite

    output = output_of(arguments)
    workload = recipe_of(arguments).make()
    applications: dict[str, dict[str, Any]] = {}
    counts: dict[str, int] = defaultdict(int)
    for arrival in workload.arrivals:
        application = arrival.application
        counts[application.name] += 1
        if application.name not in applications:
            kernels = application.kernels
            by_class = {
                kind: sum(k.profile.seconds or 0.0 for k in kernels if _kind(k) == kind)
                for kind in ("memory", "compute", "unknown")
            }
            applications[application.name] = {
                "kernels": len(kernels),
                "seconds": application.seconds,
                **{f"{kind}_seconds": seconds for kind, seconds in by_class.items()},
            }
    for name, values in applications.items():
        values["requests"] = counts[name]
    if arguments.out is not None:
        tables.write(workload, arguments.out)
    values = {
        "workload": workload.name,
        "requests": len(workload.arrivals),
        "kernels": workload.kernels,
        "seconds_alone": workload.seconds,
        "load": workload.load,
        "span_seconds": workload.arrivals[-1].time - workload.arrivals[0].time,
        "imputed": workload.imputed,
        **{k: v for k, v in workload.about.items() if k not in ("load", "applications")},
        "out": arguments.out,
    }
    if arguments.json:
        output.result("", _finite({**values, "applications": applications}))
        return 0
    shown = {k: v for k, v in values.items() if k not in ("workload", "imputed") and v is not None}
    shown = {k: ", ".join(v) if isinstance(v, list) else v for k, v in shown.items()}
    shown |= {f"imputed: {name}": text for name, text in workload.imputed.items()}
    output.result(workload.name, shown)
    heads = ("application", "requests", "kernels", "alone, ms", "memory, ms", "compute, ms", "unknown, ms")
    rows = []
    for name in sorted(applications):
        its = applications[name]
        times = (its[f"{key}seconds"] * 1e3 for key in ("", "memory_", "compute_", "unknown_"))
        rows.append((name, f"{its['requests']:,}", f"{its['kernels']:,}", *(f"{ms:.3f}" for ms in times)))
    output.table("applications", heads, rows)
    return 0


def _kind(kernel: Any) -> str:
    kind = kernel.profile.kind
    return "unknown" if kind is None else str(kind.value)
