"""``warpwell drive``: finds NVMe drives, binds them for Warpwell, and makes arrays on them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, DriveError, FormatError, MissingFileError
from ._common import Commands, add_command, add_group, json_option, output_of

if TYPE_CHECKING:
    import numpy as np

    from ..drives import Drive, PciDrive

ARENA_BYTES = 1 << 20
"""Memory that a drive can access while `info` reads its properties: enough for the admin queue and one buffer."""


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``drive`` and its commands."""
    verbs = add_group(commands, "drive", "find, bind and unbind NVMe drives that kernels read directly")
    text = "list the NVMe drives of this machine, and whether Warpwell may use them"
    json_option(add_command(verbs, "list", list_drives, text))
    _drive(add_command(verbs, "info", info, "describe a drive, and whether Warpwell may use it"))
    parser = add_command(
        verbs,
        "bind",
        bind_drive,
        "replace the Linux driver of an unused drive, so that Warpwell can use it",
        "Bind a drive to vfio-pci, so that Warpwell can use it. This is refused if anything on the drive is mounted, "
        "swap, part of LVM, ZFS or md, the root disk, or open in a program. Nothing on the drive is changed. The drive "
        "stays bound until unbind or the next boot. Needs root.",
    )
    _drive(parser)
    parser.add_argument("--user", metavar="NAME", help="user who may open the drive (default: only root)")
    _drive(add_command(verbs, "unbind", unbind_drive, "return a drive to the Linux driver"))
    parser = add_command(
        verbs,
        "format-array",
        format_drive,
        "make an array on a drive and erase the drive's data",
        "Make an array on a namespace of a bound drive. This is refused unless the first and the last MiB are zeros, "
        "or contain an array of Warpwell, and unless --yes-destroy-data names the drive.",
    )
    parser.add_argument("namespace", metavar="DRIVE/NAMESPACE", help="PCI address and namespace, as in 0000:01:00.0/1")
    parser.add_argument("--from", dest="source", metavar="FILE.npy", help="items of the array")
    parser.add_argument("--dtype", metavar="NAME", help="type of the items without --from, such as int64 or float32")
    parser.add_argument("--shape", metavar="A,B", help="shape without --from; the items are what the drive contains")
    text = "serial number and namespace, to confirm that this namespace may be erased"
    parser.add_argument("--yes-destroy-data", dest="erase", metavar="SERIAL/NAMESPACE", help=text)
    json_option(parser)


def _drive(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("drive", metavar="DRIVE", help="PCI address (01:00.0) or Linux device name (nvme0n1)")
    json_option(parser)


# -- list, info --------------------------------------------------------------------------------------------------------


def list_drives(arguments: argparse.Namespace) -> int:
    """Print a line for each drive. No drive is opened, and no privilege is needed."""
    from ..cache import format_size
    from ..drives import Machine

    output = output_of(arguments)
    drives = Machine().drives()
    if output.print_json({"drives": [_drive_values(drive) for drive in drives]}):
        return 0
    if not drives:
        output.screen.print(
            "No NVMe drive is on the PCI bus of this machine. A virtual one needs no hardware and no root: see "
            "docs/how-to/use-a-drive.md"
        )
        return 0
    heads = ("address", "model", "serial", "namespaces", "size", "driver", "Warpwell")
    rows = [
        (
            drive.address,
            drive.model or "-",
            drive.serial or "-",
            " ".join(n.name for n in drive.namespaces) or "-",
            format_size(sum(n.nbytes for n in drive.namespaces)) if drive.namespaces else "-",
            drive.driver or "none",
            _short_advice(drive),
        )
        for drive in drives
    ]
    output.table("NVMe drives", heads, rows, left=[head for head in heads if head != "size"])
    return 0


def info(arguments: argparse.Namespace) -> int:
    """Print the description of a drive by Linux, and by the drive itself if it is bound; nothing on it is changed."""
    from ..cache import format_size
    from ..drives import VFIO_DRIVER, Drive, Machine, VfioTransport, refusals

    output = output_of(arguments)
    drive = Machine().drive(arguments.drive)
    identity, advice = {}, _advice(drive)
    if drive.driver == VFIO_DRIVER and not refusals(drive):
        try:
            with Drive(VfioTransport(drive.address, ARENA_BYTES)) as opened:
                identity = describe_drive(opened)
        except DriveError as error:
            advice = str(error)
    if output.print_json({**_drive_values(drive), "identity": identity, "advice": advice}):
        return 0
    values: dict[str, Any] = {
        "address": drive.address,
        "driver": drive.driver or "none",
        "IOMMU group": "none" if drive.group is None else drive.group,
        "model": drive.model or "known only to the drive",
        "serial": drive.serial or "known only to the drive",
    }
    for each in drive.namespaces:
        values[each.name] = f"namespace {each.nsid}, {format_size(each.nbytes)}, blocks of {each.block} bytes"
    output.result(f"Drive {drive.address}", {**values, **identity, "Warpwell": advice})
    return 0


def describe_drive(drive: Drive) -> dict[str, Any]:
    """Return the identity and the limits of an open drive, and the size and contents of each namespace."""
    from ..cache import format_size
    from ..drives import BYTES, Superblock

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
            raw = namespace.read(0, -(-BYTES // namespace.block)).tobytes()
            found = Superblock.parse(raw, namespace.name, namespace.nbytes)
            content = f"an array of {format_size(found.nbytes)}" if found else "no array of Warpwell"
            size = f"{format_size(namespace.nbytes)}, blocks of {namespace.block} bytes"
            values[f"namespace {nsid}"] = f"{size}, {content}: nvme:{namespace.name}"
        except (DriveError, FormatError) as error:
            values[f"namespace {nsid}"] = str(error)
    return values


def _drive_values(drive: PciDrive) -> dict[str, object]:
    """Return a drive for JSON: its attributes, and the reasons why it may not be bound."""
    from dataclasses import asdict

    from ..drives import refusals

    return {**asdict(drive), "refusals": refusals(drive)}


def _short_advice(drive: PciDrive) -> str:
    from ..drives import KERNEL_DRIVER, VFIO_DRIVER, refusals

    reasons = refusals(drive)
    if reasons:
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        return f"no: {reasons[0].split(':')[0]}{more}"
    if drive.driver == VFIO_DRIVER:
        return "ready"
    return "free to bind" if drive.driver == KERNEL_DRIVER else "free to bind (no driver has it)"


def _advice(drive: PciDrive) -> str:
    """Return the reasons against the use of a drive, or the next step."""
    from ..drives import VFIO_DRIVER, refusals

    if reasons := refusals(drive):
        return "must not use it:\n" + "\n".join(f"- {reason}" for reason in reasons)
    if drive.driver == VFIO_DRIVER:
        return "may use it"
    return f"may bind it, because it is unused:\nsudo warpwell drive bind {drive.address}"


# -- bind, unbind, format-array ----------------------------------------------------------------------------------------


def bind_drive(arguments: argparse.Namespace) -> int:
    """Bind a drive to vfio-pci."""
    import pwd

    from ..drives import Machine, bind

    output = output_of(arguments)
    user = None
    if arguments.user is not None:
        try:
            user = pwd.getpwnam(arguments.user).pw_uid
        except KeyError as error:
            raise ArgumentError(f"--user {arguments.user}: this machine has no such user", name="user") from error
    machine = Machine()
    before = machine.drive(arguments.drive)
    drive = bind(before.address, machine, user)
    if not output.print_json(_drive_values(drive)):
        names = ", ".join(f"/dev/{each.name}" for each in before.namespaces)
        output.screen.print(
            f"{drive.address} is bound for Warpwell (IOMMU group {drive.group}); its data are unchanged."
            + (f" {names} will return with: sudo warpwell drive unbind {drive.address}" if names else "")
        )
    return 0


def unbind_drive(arguments: argparse.Namespace) -> int:
    """Return a drive to the Linux driver."""
    from ..drives import Machine, unbind

    output = output_of(arguments)
    drive = unbind(arguments.drive, Machine())
    if not output.print_json(_drive_values(drive)):
        output.screen.print(f"{drive.address} is bound to the Linux driver again; its data are unchanged.")
    return 0


def format_drive(arguments: argparse.Namespace) -> int:
    """Format a namespace as an array."""
    from ..cache import format_size
    from ..drives import format_array, open_namespace, require_empty

    output = output_of(arguments)
    items, shape, dtype = _layout(arguments)
    namespace, close = open_namespace(arguments.namespace)
    try:
        drive = namespace.drive
        erase = f"{drive.serial}/{namespace.nsid}"
        if arguments.erase is None:
            require_empty(namespace)
            raise ArgumentError(
                f"this would erase namespace {namespace.nsid} of drive {drive.address} ({drive.model}, "
                f"{format_size(namespace.nbytes)}), which seems empty; to confirm, add --yes-destroy-data {erase}"
            )
        with output.progress() as report:
            format_array(namespace, shape, dtype, erase=arguments.erase, items=items, report=report)
        name = f"nvme:{namespace.name}"
    finally:
        close()
    if not output.print_json({"path": name, "shape": list(shape), "dtype": dtype.str}):
        output.screen.print(f'formatted {name} as an array {shape} of {dtype}: ww.open("{name}", "r+")')
    return 0


def _layout(arguments: argparse.Namespace) -> tuple[Any, tuple[int, ...], np.dtype[Any]]:
    """Return items, shape and dtype of the array, from the file of ``--from`` or (without items) from the options."""
    import numpy as np

    from ..array import check_dtype

    path = arguments.source
    if path is not None:
        if arguments.dtype or arguments.shape:
            raise ArgumentError("--from determines the dtype and the shape; omit --dtype and --shape")
        try:
            items = np.load(path, mmap_mode="r")
        except FileNotFoundError as error:
            raise MissingFileError(f"{path} does not exist; check the path", path=path) from error
        except ValueError as error:
            text = f"{path} is not a .npy file of numbers ({error}); save it with numpy.save"
            raise FormatError(text, path=path) from error
        if not isinstance(items, np.ndarray):
            items.close()
            raise FormatError(f"{path} contains several arrays; save one with numpy.save", path=path)
        return items, items.shape, check_dtype(items.dtype, path)
    if not arguments.dtype or not arguments.shape:
        raise ArgumentError("describe the array: give --dtype and --shape, or --from FILE.npy")
    try:
        shape = tuple(int(part) for part in arguments.shape.split(","))
    except ValueError as error:
        raise ArgumentError(f"--shape {arguments.shape} is not a shape; give 1000 or 1000,100") from error
    if not shape or min(shape) < 1:
        raise ArgumentError(f"--shape {arguments.shape}: every length must be at least 1")
    return None, shape, check_dtype(arguments.dtype, "--dtype")
