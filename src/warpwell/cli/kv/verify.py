"""``warpwell kv verify``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable

from ...kv.keys import as_key
from ...kv.log.verify import Problem
from ...kv.shard_folders import verify_all
from ..output import Output
from .get import describe_key

DAMAGED = 1


def run(arguments: argparse.Namespace) -> int:
    """Read everything and check it; return 1 where something is damaged."""
    output = Output(arguments.json)
    started = time.perf_counter()
    with output.progress() as report:
        found = verify_all(arguments.store, progress=lambda done, total: report("verify", done, total))
    values = {
        "command": "verify",
        "store": str(arguments.store),
        "sound": found.sound,
        "records": found.records,
        "value_bytes": found.value_bytes,
        "journal_records": found.journal_records,
        "torn_bytes": found.torn_bytes,
        "seconds": time.perf_counter() - started,
    }
    if arguments.json:
        output.result("", {**values, "problems": [problem_values(p) for p in found.problems]})
    else:
        output.result(str(arguments.store), values)
        print_problems(output, found.problems)
    return 0 if found.sound else DAMAGED


def print_problems(output: Output, problems: Iterable[Problem], lost: str = "") -> None:
    """Print the damage, a line for each problem; `lost` is printed after the key of a value."""
    for problem in problems:
        at = "" if problem.offset is None else f", byte {problem.offset:,}"
        key = "" if problem.key is None else f" (key {describe_key(problem.key)}{lost})"
        output.screen.print(f"{problem.path}{at}: {problem.what}{key}")


def problem_values(problem: Problem) -> dict[str, object]:
    """Return a problem for JSON."""
    key = None if problem.key is None else as_key(problem.key).hex()
    return {"path": problem.path, "offset": problem.offset, "what": problem.what, "key_hex": key}
