"""`write_trace`: what a program called on its devices."""

from __future__ import annotations

import json
from collections.abc import Iterable

from ..device import Device


def write_trace(path: str, devices: Iterable[Device]) -> None:
    """Write a JSON object with a list of devices, and of each the calls: count, bytes, and seconds waited for.

    Parameters
    ----------
    path : str
    devices : iterable of Device
    """
    found = [
        {
            "device": d.index, "name": d.name, "host": d.host, "target": d.target, "lost": d.lost,
            "calls": {name: {"count": n, "bytes": b, "wait_seconds": w} for name, (n, b, w) in d.trace().items()},
        }
        for d in devices
    ]  # fmt: skip
    with open(path, "w", encoding="utf-8") as stream:
        json.dump({"devices": found}, stream, indent=1)
        stream.write("\n")
