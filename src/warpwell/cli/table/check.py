"""``warpwell table check``."""

from __future__ import annotations

import argparse
import time

from ... import table
from ..kv.verify import DAMAGED, print_problems, problem_values
from ..output import Output


def run(arguments: argparse.Namespace) -> int:
    """Read everything and check it; return 1 where something is damaged."""
    output = Output(arguments.json)
    started = time.perf_counter()
    with output.progress() as report:
        found = table.check(arguments.table, progress=report)
    values = {
        "command": "check",
        "table": str(arguments.table),
        "sound": found.sound,
        "rows": found.rows,
        "bytes_read": found.nbytes,
        "unchecked": found.unchecked if arguments.json else ", ".join(found.unchecked) or "none",
        "seconds": time.perf_counter() - started,
    }
    if arguments.json:
        output.result("", {**values, "problems": [problem_values(one) for one in found.problems]})
    else:
        output.result(str(arguments.table), values)
        print_problems(output, found.problems)
    return 0 if found.sound else DAMAGED
