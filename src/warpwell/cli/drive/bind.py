"""``warpwell drive bind``: takes a drive that nobody uses from the kernel."""

from __future__ import annotations

import argparse
import pwd

from ...drives import Machine, bind
from ...errors import ArgumentError
from ..output import Output
from .list import described


def run(arguments: argparse.Namespace) -> int:
    """Hand the drive to vfio-pci."""
    user = None
    if arguments.user is not None:
        try:
            user = pwd.getpwnam(arguments.user).pw_uid
        except KeyError as error:
            raise ArgumentError(f"--user {arguments.user}: this machine has no such user", name="user") from error
    machine = Machine()
    before = machine.drive(arguments.drive)
    drive = bind(before.address, machine, user)
    output = Output(arguments.json)
    if arguments.json:
        output.result("", {"command": "bind", **described(drive)})
        return 0
    names = ", ".join(f"/dev/{each.name}" for each in before.namespaces)
    output.screen.print(
        f"{drive.address} is Warpwell's now (IOMMU group {drive.group}); its data are as they were."
        + (f" {names} will come back with: sudo warpwell drive unbind {drive.address}" if names else "")
    )
    return 0
