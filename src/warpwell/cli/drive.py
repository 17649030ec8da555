"""``warpwell drive info``: one drive, as the kernel and, where it may be asked, the drive itself describe it."""

from __future__ import annotations

import argparse
from typing import Any

from ...cache import format_size
from ...drives import Drive, Machine, PciDrive, VfioTransport, refusals
from ...drives.machine import VFIO_DRIVER
from ...drives.superblock import BYTES, Superblock
from ...errors import DriveError, FormatError
from ..output import Output
from .list import described

ARENA = 1 << 20
"""Bytes of memory that the drive reaches meanwhile: what the admin queue and one buffer need."""


def run(arguments: argparse.Namespace) -> int:
    """Print what is known of a drive; nothing on it is changed."""
    output = Output(arguments.json)
    drive = Machine().drive(arguments.drive)
    own, advice = {}, _advice(drive)
    if drive.driver == VFIO_DRIVER and not refusals(drive):
        try:
            with Drive(VfioTransport(drive.address, ARENA)) as opened:
                own = of_itself(opened)
        except DriveError as error:
            advice = str(error)
    if arguments.json:
        output.result("", {"command": "info", **described(drive), "of_itself": own, "advice": advice})
        return 0
    values: dict[str, Any] = {
        "address": drive.address,
        "driver": drive.driver or "none",
        "IOMMU group": "none" if drive.group is None else drive.group,
        "model": drive.model or "known to the drive only",
        "serial": drive.serial or "known to the drive only",
    }
    values |= {
        each.name: f"namespace {each.nsid}, {format_size(each.nbytes)}, blocks of {each.block} bytes"
        for each in drive.namespaces
    }
    output.result(f"Drive {drive.address}", {**values, **own, "Warpwell": advice})
    return 0


def of_itself(drive: Drive) -> dict[str, Any]:
    """Return what a drive says of itself: identity, limits, and each namespace, with what lies there."""
    values: dict[str, Any] = {
        "model": drive.model,
        "serial": drive.serial,
        "firmware": drive.firmware,
        "NVMe": drive.version,
        "queues": f"{drive.queues} of up to {drive.entries} entries",
        "command": f"up to {format_size(drive.max_transfer)}",
        "volatile_cache": drive.volatile_cache,
    }
    for nsid in drive.namespaces():
        try:
            namespace = drive.namespace(nsid)
            found = Superblock.parse(
                namespace.read(0, -(-BYTES // namespace.block)).tobytes(), namespace.name, namespace.nbytes
            )
            holds = f"an array of {format_size(found.nbytes)}" if found else "no array of Warpwell's"
            values[f"namespace {nsid}"] = (
                f"{format_size(namespace.nbytes)}, blocks of {namespace.block} bytes, {holds}: nvme:{namespace.name}"
            )
        except (DriveError, FormatError) as error:
            values[f"namespace {nsid}"] = str(error)
    return values


def _advice(drive: PciDrive) -> str:
    """Return what stands against the use of a drive, or the next step."""
    if against := refusals(drive):
        return "must leave it alone:\n" + "\n".join(f"- {reason}" for reason in against)
    if drive.driver == VFIO_DRIVER:
        return "may use it"
    return f"may have it, nobody uses it:\nsudo warpwell drive bind {drive.address}"
