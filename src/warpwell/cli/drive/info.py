"""``warpwell drive info``: one drive, as the kernel and, where it may be asked, the drive itself describe it."""

from __future__ import annotations

import argparse
from typing import Any

from ...cache.sizes import format_size
from ...drives.binding import refusals
from ...drives.machine import VFIO_DRIVER, Machine, PciDrive
from ..output import Output
from .list import described


def run(arguments: argparse.Namespace) -> int:
    """Print what is known of a drive; nothing on it is changed."""
    output = Output(arguments.json)
    drive = Machine().drive(arguments.drive)
    if arguments.json:
        output.result("", {"command": "info", **described(drive)})
        return 0
    values: dict[str, Any] = {
        "address": drive.address,
        "driver": drive.driver or "none",
        "IOMMU group": "none" if drive.group is None else drive.group,
        "model": drive.model or "known to the drive only",
        "serial": drive.serial or "known to the drive only",
    }
    values |= {each.name: f"namespace {each.nsid}, {format_size(each.nbytes)}, blocks of {each.block} bytes"
               for each in drive.namespaces}  # fmt: skip
    values["Warpwell"] = advice(drive)
    output.result(f"Drive {drive.address}", values)
    return 0


def advice(drive: PciDrive) -> str:
    """Return what stands against the use of a drive, or the next step."""
    if against := refusals(drive):
        return "must leave it alone:\n" + "\n".join(f"- {reason}" for reason in against)
    if drive.driver == VFIO_DRIVER:
        return "may use it"
    return f"may have it, nobody uses it:\nsudo warpwell drive bind {drive.address}"
