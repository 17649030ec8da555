"""``warpwell kv salvage``."""

from __future__ import annotations

import argparse
import time

from ... import kv
from ...kv.keys import as_key
from ...kv.log.verify import Problem
from ..output import Output
from .get import describe_key

INCOMPLETE = 1


def run(arguments: argparse.Namespace) -> int:
    """Put what is sound of a store into a new one; return 1 where something is lost."""
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
        output.result("", {**values, "lost": [_values(p) for p in done.lost],
                           "problems": [_values(p) for p in done.problems]})  # fmt: skip
    else:
        output.result(str(arguments.target), values)
        for problem in [*done.problems, *done.lost]:
            at = "" if problem.offset is None else f", byte {problem.offset:,}"
            key = "" if problem.key is None else f" (key {describe_key(problem.key)} is lost)"
            output.screen.print(f"{problem.path}{at}: {problem.what}{key}")
    return 0 if done.complete else INCOMPLETE


def _values(problem: Problem) -> dict[str, object]:
    key = None if problem.key is None else as_key(problem.key).hex()
    return {"path": problem.path, "offset": problem.offset, "what": problem.what, "key_hex": key}
