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

    form = command(verbs, "format-array", "drive.format_array", "make an array on a drive; what was on it is lost")
    form.description = (
        "Make an array on a namespace of a drive that was bound. It is refused unless the first and the last MiB are "
        "zeros, or an array of Warpwell's is there, and unless --yes-destroy-data names the drive."
    )
    _namespace(form)
    form.add_argument("--from", dest="source", metavar="FILE.npy", help="what the array holds")
    form.add_argument("--dtype", metavar="NAME", help="of the items, without --from: int64, float32, ...")
    form.add_argument("--shape", metavar="A,B", help="without --from; the items are what lies there")
    form.add_argument(
        "--yes-destroy-data",
        dest="erase",
        metavar="SERIAL/NAMESPACE",
        help="serial number and id of the namespace, to say that you mean this one",
    )
    json_option(form)


def _namespace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("namespace", metavar="DRIVE/NAMESPACE", help="PCI address and id, such as 0000:01:00.0/1")


def _drive(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("drive", metavar="DRIVE", help="PCI address (01:00.0), or a name of the kernel's (nvme0n1)")
