"""``warpwell pool info``: the devices that a program would have."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from ...cache import format_size
from ...errors import PoolError
from ...pool.launch.launcher import Launcher
from ..output import Output
from .run import options


def run(arguments: argparse.Namespace) -> int:
    """Start a pool, ask its devices, and end it."""
    output = Output(arguments.json)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "devices.json"
        status = Launcher(["-m", "warpwell.pool.launch.describe", str(path)], options(arguments)).run()
        if status or not path.exists():
            raise PoolError(f"the program that asks the devices ended with status {status}")
        found = json.loads(path.read_text())
    seconds = round(time.monotonic() - began, 3)
    if arguments.json:
        output.result("", {"command": "info", "devices": found, "seconds": seconds})
        return 0
    heads = ("device", "host", "target", "name", "memory", "free", "link", "round trip us", "process")
    output.table(
        f"Pool (started, asked and ended in {seconds:.1f} s)",
        heads,
        [
            (
                str(d["device"]),
                d["host"],
                d["target"],
                d["name"],
                format_size(d["memory_bytes"]),
                format_size(d["free_bytes"]),
                d["link"],
                f"{d['round_trip_us']:.0f}",
                str(d["pid"]),
            )
            for d in found
        ],
        left=heads,
    )
    return 0
