"""``warpwell drive unbind``: gives a drive back to the kernel."""

from __future__ import annotations

import argparse

from ...drives import Machine, unbind
from ..output import Output
from .list import described


def run(arguments: argparse.Namespace) -> int:
    """Hand the drive to the kernel's driver."""
    drive = unbind(arguments.drive, Machine())
    output = Output(arguments.json)
    if arguments.json:
        output.result("", {"command": "unbind", **described(drive)})
        return 0
    output.screen.print(f"{drive.address} is the kernel's again; its data are as they were.")
    return 0
