"""The arguments of ``warpwell drive``."""

from __future__ import annotations

import argparse

from ..arguments import Commands, command, json_option


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``drive`` and its commands."""
    drive = commands.add_parser("drive", help="find, take and give back NVMe drives that kernels read themselves")
    verbs = drive.add_subparsers(metavar="COMMAND", required=True)

    shown = command(verbs, "list", "drive.list", "show the NVMe drives of this machine, and who uses them")
    json_option(shown)

    info = command(verbs, "info", "drive.info", "show one drive, and whether Warpwell may use it")
    _drive(info)
    json_option(info)

    bind = command(verbs, "bind", "drive.bind", "take a drive that nobody uses from the kernel, for Warpwell")
    bind.description = (
        "Hand a drive to vfio-pci, so that Warpwell can use it. This is refused if anything on the drive is mounted, "
        "swap, part of LVM, ZFS or md, the root disk, or open in a program. Nothing on the drive is changed. It lasts "
        "until unbind, or the next start of the machine. Needs root."
    )
    _drive(bind)
    bind.add_argument("--user", metavar="NAME", help="who may open the drive then (default: only root)")
    json_option(bind)

    unbind = command(verbs, "unbind", "drive.unbind", "give a drive back to the kernel")
    _drive(unbind)
    json_option(unbind)


def _drive(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("drive", metavar="DRIVE", help="PCI address (01:00.0), or a name of the kernel's (nvme0n1)")
