"""``warpwell kv compact``."""

from __future__ import annotations

import argparse
import time
from typing import Any

from .. import kv
from .output import Output


def run(arguments: argparse.Namespace) -> int:
    """Compact a store."""
    output = Output(arguments.json)
    started = time.perf_counter()
    with output.progress() as report, kv.open(arguments.store, mode="r+") as store:
        report("compact", 0, 0)
        before = store.stats.disk_bytes
        done = store.compact()
        store.commit()
        after = store.stats.disk_bytes
    reports: list[Any] = list(done) if isinstance(done, list | tuple) else [done]
    output.result(
        str(arguments.store),
        {
            "command": "compact",
            "store": str(arguments.store),
            "segments_retired": sum(len(r.segments) for r in reports),
            "records_moved": sum(r.moved for r in reports),
            "moved_bytes": sum(r.moved_bytes for r in reports),
            "disk_bytes_before": before,
            "disk_bytes": after,
            "seconds": time.perf_counter() - started,
        },
    )
    return 0
