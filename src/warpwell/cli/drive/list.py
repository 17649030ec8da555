"""``warpwell drive list``: the NVMe drives of this machine."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from ...cache import format_size
from ...drives import Machine, PciDrive, refusals
from ...drives.machine import KERNEL_DRIVER, VFIO_DRIVER
from ..output import Output


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each drive. No drive is opened, and no privilege is needed."""
    output = Output(arguments.json)
    drives = Machine().drives()
    if arguments.json:
        output.result("", {"command": "list", "drives": [described(drive) for drive in drives]})
        return 0
    if not drives:
        output.screen.print(
            "No NVMe drive is on the PCI bus of this machine. A virtual one needs no hardware and no root: see "
            "docs/how-to/use-a-drive.md"
        )
        return 0
    heads = ("address", "model", "serial", "namespaces", "size", "driver", "Warpwell")
    output.table(
        "NVMe drives",
        heads,
        [
            (
                drive.address,
                drive.model or "-",
                drive.serial or "-",
                " ".join(n.name for n in drive.namespaces) or "-",
                format_size(sum(n.nbytes for n in drive.namespaces)) if drive.namespaces else "-",
                drive.driver or "none",
                in_short(drive),
            )
            for drive in drives
        ],
        left=[head for head in heads if head != "size"],
    )
    return 0


def described(drive: PciDrive) -> dict[str, object]:
    """Return a drive for JSON: its attributes, and why it may not be bound."""
    return {**asdict(drive), "refusals": refusals(drive)}


def in_short(drive: PciDrive) -> str:
    """Return in a few words whether Warpwell may use a drive."""
    against = refusals(drive)
    if against:
        more = f" (and {len(against) - 1} more)" if len(against) > 1 else ""
        return f"no: {against[0].split(':')[0]}{more}"
    if drive.driver == VFIO_DRIVER:
        return "ready"
    return "free to bind" if drive.driver == KERNEL_DRIVER else "free to bind (no driver has it)"
