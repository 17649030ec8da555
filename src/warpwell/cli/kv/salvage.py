"""``warpwell kv salvage``."""

from __future__ import annotations

import argparse
import time

from ... import kv
from ..output import Output
from .verify import print_problems, problem_values

INCOMPLETE = 1


def run(arguments: argparse.Namespace) -> int:
    """Copy the undamaged records of a store into a new one; return 1 if some are lost."""
    output = Output(arguments.json)
    started = time.perf_counter()
    with output.progress() as report:
        done = kv.salvage(
            arguments.store, arguments.target, progress=lambda read, total: report("salvage", read, total)
        )
    values = {
        "command": "salvage",
        "store": str(arguments.store),
        "target": str(arguments.target),
        "complete": done.complete,
        "records": done.records,
        "value_bytes": done.value_bytes,
        "lost_records": len(done.lost),
        "missing_records": done.missing_records,
        "unproven": done.unproven,
        "seconds": time.perf_counter() - started,
    }
    if arguments.json:
        output.result(
            "",
            {
                **values,
                "lost": [problem_values(p) for p in done.lost],
                "problems": [problem_values(p) for p in done.problems],
            },
        )
    else:
        output.result(str(arguments.target), values)
        print_problems(output, [*done.problems, *done.lost], lost=" is lost")
    return 0 if done.complete else INCOMPLETE
