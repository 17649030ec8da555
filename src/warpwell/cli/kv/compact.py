"""``warpwell kv compact``."""

from __future__ import annotations

import argparse
import time

from ... import kv
from ...errors import ArgumentError
from ..output import Output


def run(arguments: argparse.Namespace) -> int:
    """Compact a store."""
    output = Output(arguments.json)
    if not 0 <= arguments.threshold <= 1:
        raise ArgumentError(f"--threshold {arguments.threshold}: take a share from 0 to 1", name="threshold")
    started = time.perf_counter()
    with output.progress() as report, kv.open(arguments.store, mode="r+") as store:
        before = store.stats.disk_bytes
        done = store.compact(
            threshold=arguments.threshold, progress=lambda copied, total: report("compact", copied, total)
        )
        after = store.stats.disk_bytes
    output.result(
        str(arguments.store),
        {
            "command": "compact",
            "store": str(arguments.store),
            "segments_retired": len(done.segments),
            "records_moved": done.moved,
            "moved_bytes": done.moved_bytes,
            "disk_bytes_before": before,
            "disk_bytes": after,
            "seconds": time.perf_counter() - started,
        },
    )
    return 0
