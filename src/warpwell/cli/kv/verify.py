"""``warpwell kv verify``."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable

from ...errors import CorruptionError, FormatError, MissingFileError
from ...kv.keys import as_key
from ...kv.log.manifest import read_manifest
from ...kv.log.verify import Problem, VerifyReport, verify
from ...kv.shard_folders import find_shard, resolved
from ..output import Output
from .get import describe_key

DAMAGED = 1


def run(arguments: argparse.Namespace) -> int:
    """Read everything and check it; return 1 where something is damaged."""
    output = Output(arguments.json)
    started = time.perf_counter()
    with output.progress() as report:
        found = _verify(arguments.store, lambda done, total: report("verify", done, total))
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
        output.result("", {**values, "problems": [_values(p) for p in found.problems]})
    else:
        output.result(str(arguments.store), values)
        for problem in found.problems:
            at = "" if problem.offset is None else f", byte {problem.offset:,}"
            key = "" if problem.key is None else f" (key {describe_key(problem.key)})"
            output.screen.print(f"{problem.path}{at}: {problem.what}{key}")
    return 0 if found.sound else DAMAGED


def _verify(path: str, progress: Callable[[int, int], object]) -> VerifyReport:
    """Check a store and its shards; unlike `Store.verify`, one that is too damaged to open."""
    report = verify(path, progress=progress)
    with contextlib.suppress(CorruptionError):  # it is among the problems
        for number, shard in enumerate((read_manifest(report.path).schema or {}).get("shards") or ()):
            path = resolved(shard["path"], report.path)
            try:
                found = verify(find_shard(report.path, number, shard).path, progress=progress)
            except (MissingFileError, FormatError) as error:
                report.problems.append(Problem(path, None, str(error)))
                continue
            report.records += found.records
            report.value_bytes += found.value_bytes
            report.journal_records += found.journal_records
            report.torn_bytes += found.torn_bytes
            report.problems += found.problems
    return report


def _values(problem: Problem) -> dict[str, object]:
    key = None if problem.key is None else as_key(problem.key).hex()
    return {"path": problem.path, "offset": problem.offset, "what": problem.what, "key_hex": key}
