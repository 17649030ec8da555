"""`Machine`: the NVMe drives of this machine and their users, from files of the kernel. It does not open a drive.

All data come from ``/sys``, ``/proc`` and the names in ``/dev``, without privileges. Unreadable files are skipped: a
claim on the namespaces (`warpwell.drives.binding`) finds users that these files do not show.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import errors

NVME_CLASS = 0x010802
"""PCI class code of an NVMe I/O controller (PCI Code and ID Assignment Specification, "Base Class 01h")."""

SECTOR = 512
"""Unit of the sizes that Linux reports, in bytes, for every logical block size."""

KERNEL_DRIVER = "nvme"
VFIO_DRIVER = "vfio-pci"

_ADDRESS = re.compile(r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])")
_NAMESPACE = re.compile(r"nvme(\d+)(?:c\d+)?n(\d+)")
_BRIDGE_CLASS = 0x06
_HARMLESS_DRIVERS = (VFIO_DRIVER, "pci-stub")
_HOLDERS = {"LVM-": "LVM", "CRYPT-": "an encrypted volume", "mpath-": "multipath"}


def drive_error(address: str, why: str, **details: Any) -> errors.DriveError:
    """Return the error of a drive; `details` are attributes of `DriveError`."""
    return errors.DriveError(f"drive {address}: {why}", drive=address, **details)


@dataclass(frozen=True)
class KernelNamespace:
    """A namespace of a drive that is bound to the kernel's driver.

    Attributes
    ----------
    name : str
        The block device, for example ``nvme0n1``.
    nsid : int
    nbytes : int
    block : int
        Bytes of a logical block.
    uses : tuple of str
        Descriptions of its users: mounts, swap, holders, programs, exports to other hosts.
    """

    name: str
    nsid: int
    nbytes: int
    block: int
    uses: tuple[str, ...] = ()


@dataclass(frozen=True)
class PciDrive:
    """An NVMe controller on the PCI bus.

    Attributes
    ----------
    address : str
        PCI address, for example ``0000:01:00.0``.
    driver : str or None
        The bound driver: ``nvme`` (the kernel's), ``vfio-pci`` (ready for Warpwell), another, or None.
    group : int or None
        Number of its IOMMU group; None without an IOMMU.
    neighbors : tuple of str
        Devices of the group that make it not viable, each with its driver.
    functions : int
        Number of active virtual functions.
    model, serial, firmware : str
        Empty unless the kernel's driver has the controller: only the controller itself knows them.
    namespaces : tuple of KernelNamespace
        Empty unless the kernel's driver has the controller.
    """

    address: str
    driver: str | None
    group: int | None
    neighbors: tuple[str, ...] = ()
    functions: int = 0
    model: str = ""
    serial: str = ""
    firmware: str = ""
    namespaces: tuple[KernelNamespace, ...] = ()

    @property
    def uses(self) -> tuple[str, ...]:
        """Descriptions of the users of all its namespaces."""
        return tuple(use for namespace in self.namespaces for use in namespace.uses)


class Machine:
    """The description of this machine by the kernel.

    Parameters
    ----------
    root : path
        Folder with ``sys``, ``proc`` and ``dev``: tests use another one.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self.sys, self.proc, self.dev = root / "sys", root / "proc", root / "dev"

    def device(self, address: str) -> Path:
        """Return the folder of a PCI device."""
        return self.sys / "bus" / "pci" / "devices" / address

    def driver(self, address: str) -> str | None:
        """Return the name of the bound driver of a PCI device, or None."""
        link = self.device(address) / "driver"
        return os.path.basename(os.readlink(link)) if link.is_symlink() else None

    def addresses(self) -> list[str]:
        """Return the PCI addresses of all NVMe I/O controllers, in order."""
        folder = self.sys / "bus" / "pci" / "devices"
        if not folder.is_dir():
            return []
        return sorted(each.name for each in folder.iterdir() if _number(each / "class") == NVME_CLASS)

    def drives(self) -> list[PciDrive]:
        """Return all NVMe drives on the PCI bus, in the order of their addresses."""
        users = DeviceUsers(self)
        return [self._drive(address, users) for address in self.addresses()]

    def drive(self, name: str) -> PciDrive:
        """Return one drive.

        Parameters
        ----------
        name : str
            A PCI address, with or without its domain (``0000:01:00.0``, ``01:00.0``), or the name of a block device or
            controller of the kernel (``nvme0n1``, ``/dev/nvme0``).

        Raises
        ------
        ArgumentError
            No NVMe drive of this machine has the name.
        """
        return self._drive(self.address(name), DeviceUsers(self))

    def address(self, name: str) -> str:
        """Return the PCI address of a drive by any of its names; see `drive`."""
        found = self.addresses()
        if match := _ADDRESS.fullmatch(name):
            domain, bus, device, function = match.groups()
            address = f"{(domain or '0').zfill(4)[-8:]}:{bus}:{device}.{function}".lower()
            if address in found:
                return address
            if self.device(address).exists():
                raise errors.ArgumentError(
                    f"{address} is a PCI device, but not an NVMe drive: {_advice(found)}", name="address"
                )
        else:
            # The name of a partition names its disk.
            block = re.sub(r"(nvme\d+n\d+)p\d+", r"\1", name.removeprefix("/dev/"))
            for address in found:
                for controller in _folders(self.device(address) / "nvme", "nvme"):
                    inside = [self._head(each.name) for each in _folders(controller, "nvme")]
                    if block in (controller.name, *inside):
                        return address
        raise errors.ArgumentError(f"no NVMe drive on the PCI bus is called {name!r}: {_advice(found)}", name="address")

    def _drive(self, address: str, users: DeviceUsers) -> PciDrive:
        folder = self.device(address)
        controllers = _folders(folder / "nvme", "nvme")
        namespaces = [
            self._namespace(self._head(each.name), controller.name, users)
            for controller in controllers
            for each in _folders(controller, "nvme")
            if _NAMESPACE.fullmatch(each.name)
        ]
        text = {key: _text(controllers[0] / name) for key, name in _IDENTITY.items()} if controllers else {}
        group = folder / "iommu_group"
        return PciDrive(
            address,
            self.driver(address),
            int(os.path.basename(os.readlink(group))) if group.is_symlink() else None,
            tuple(self._neighbors(address)),
            _number(folder / "sriov_numvfs") or 0,
            **text,
            namespaces=tuple(sorted(namespaces, key=lambda each: each.nsid)),
        )

    def _head(self, name: str) -> str:
        """Return the block device of a namespace: with multipath, nvme0c1n1 is a path, and nvme0n1 is the device."""
        return _NAMESPACE.sub(r"nvme\1n\2", name)

    def _namespace(self, name: str, controller: str, users: DeviceUsers) -> KernelNamespace:
        folder = self.sys / "class" / "block" / name
        nsid = _number(folder / "nsid") or int(_NAMESPACE.fullmatch(name)[2])  # type: ignore[index]
        size = (_number(folder / "size") or 0) * SECTOR
        return KernelNamespace(
            name,
            nsid,
            size,
            _number(folder / "queue" / "logical_block_size") or SECTOR,
            tuple(users.of(name, controller)),
        )

    def _neighbors(self, address: str) -> Iterator[str]:
        """Yield the devices of an IOMMU group that make it not viable, because a program would control them as well."""
        for each in _folders(self.device(address) / "iommu_group" / "devices", ""):
            if each.name == address or (_number(each / "class") or 0) >> 16 == _BRIDGE_CLASS:
                continue
            driver = self.driver(each.name)
            if driver is not None and driver not in _HARMLESS_DRIVERS:
                yield f"{each.name} ({driver})"


class DeviceUsers:
    """A snapshot of the users of the block devices of a machine.

    Parameters
    ----------
    machine : Machine
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.block = machine.sys / "class" / "block"
        self.mounts: dict[str, list[str]] = {}
        for mount_point, number, source in self._mounted():
            for name in {self._by_number(number), self._by_path(source)} - {None}:
                if mount_point not in (mounts := self.mounts.setdefault(str(name), [])):
                    mounts.append(mount_point)
        self.swaps = {
            self._by_path(line.split()[0]) for line in _split_lines(machine.proc / "swaps")[1:] if line.split()
        }
        self.root = self._root()
        self.programs = self._open()
        self.exports = self._exports()

    def _exports(self) -> dict[str | None, list[str]]:
        """Return, by device, users in the kernel without a claim: loop devices, exports over a network.

        The key of an exported controller is its name.
        """
        found: dict[str | None, list[str]] = {}
        for loop in _folders(self.block, "loop"):
            file = _text(loop / "loop" / "backing_file").removesuffix(" (deleted)")
            found.setdefault(self._by_path(file), []).append(loop.name)
        for subsystem in _folders(self.machine.sys / "kernel" / "config" / "nvmet" / "subsystems", ""):
            for space in (*_folders(subsystem / "namespaces", ""), subsystem / "passthru"):
                path = _text(space / "device_path")
                if _text(space / "enable") in ("1", "y", "Y"):
                    name = path.removeprefix("/dev/") if space.name == "passthru" else self._by_path(path)
                    found.setdefault(name, []).append(f"nvmet, to other hosts: {subsystem.name}")
        return found

    def of(self, name: str, controller: str) -> Iterator[str]:
        """Yield descriptions of the users of a namespace and its partitions; `controller` is its controller's name."""
        yield from (f"{controller} is exported by {export}" for export in self.exports.get(controller, ()))
        parts = [each.name for each in _folders(self.block / name, name) if (each / "partition").exists()]
        for device in (name, *parts):
            yield from self._of(device, device)
        for device in (name, *parts, name.replace("nvme", "ng", 1)):
            yield from (f"/dev/{device} is open in process {program}" for program in self.programs.get(device, ()))

    def _of(self, name: str, subject: str) -> Iterator[str]:
        """Yield the uses of a block device, and of the devices that are built on it (device mapper, md)."""
        for mount_point in self.mounts.get(name, ()):
            yield f"{subject} is mounted at {mount_point}"
        if name in self.swaps:
            yield f"{subject} is swap space"
        if name == self.root:
            yield f"{subject} is the root disk (root= on the kernel's command line)"
        exports = self.exports.get(name, ())
        yield from (f"{subject} is exported by {export}" for export in exports if export.startswith("nvmet"))
        loops = [each for each in exports if each.startswith("loop")]
        for holder in [*(each.name for each in _folders(self.block / name / "holders", "")), *loops]:
            through = f"{subject} is held by {self._describe_holder(holder)}"
            above = list(self._of(holder, f"{through}, which"))
            yield from above or [through]

    def _describe_holder(self, name: str) -> str:
        mapped = _text(self.block / name / "dm" / "name")
        uuid = _text(self.block / name / "dm" / "uuid")
        kind = next((word for prefix, word in _HOLDERS.items() if uuid.startswith(prefix)), "device mapper")
        level = _text(self.block / name / "md" / "level")
        return f"{name} ({kind}: {mapped})" if mapped else f"{name} (md, {level})" if level else name

    def _mounted(self) -> Iterator[tuple[str, str, str]]:
        """Yield mount point, device number and source of the mounts in this process and in process 1."""
        for process in ("self", "1"):
            for line in _split_lines(self.machine.proc / process / "mountinfo"):
                left, _, right = line.partition(" - ")
                fields, source = left.split(), right.split()
                if len(fields) > 4 and len(source) > 1:
                    yield _unescape(fields[4]), fields[2], _unescape(source[1])

    def _by_number(self, number: str) -> str | None:
        link = self.machine.sys / "dev" / "block" / number
        return os.path.basename(os.readlink(link)) if link.is_symlink() else None

    def _by_path(self, source: str) -> str | None:
        """Return the block device of a path in /dev, through links such as /dev/mapper/..."""
        if not source.startswith("/dev/"):
            return None
        name = os.path.basename(os.path.realpath(self.machine.dev / source.removeprefix("/dev/")))
        return name if (self.block / name).exists() else None

    def _root(self) -> str | None:
        option = re.search(r"(?:^|\s)root=(\S+)", _text(self.machine.proc / "cmdline"))
        if option is None:
            return None
        kind, _, name = option[1].partition("=")
        if not name:
            return self._by_path(kind)
        return self._by_path(f"/dev/disk/by-{kind.lower()}/{name}")

    def _open(self) -> dict[str, list[str]]:
        """Return the programs, "123 (name)", that have a node of /dev open, by node, as far as they are visible."""
        found: dict[str, list[str]] = {}
        for process in (each for each in _folders(self.machine.proc, "") if each.name.isdigit()):
            for target in {_target(each) for each in _folders(process / "fd", "")}:
                if target.startswith(("/dev/nvme", "/dev/ng")):
                    program = f"{process.name} ({_text(process / 'comm')})"
                    found.setdefault(target.removeprefix("/dev/"), []).append(program)
        return found


_IDENTITY = {"model": "model", "serial": "serial", "firmware": "firmware_rev"}


def _advice(found: list[str]) -> str:
    if not found:
        return "this machine has no drive (a virtual drive needs no hardware: docs/how-to/use-a-drive.md)"
    return f"this machine has {', '.join(found)} (warpwell drive list shows them)"


def _folders(folder: Path, prefix: str) -> list[Path]:
    try:
        return sorted(each for each in folder.iterdir() if each.name.startswith(prefix))
    except OSError:
        return []


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""  # It was closed concurrently.


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _split_lines(path: Path) -> list[str]:
    return _text(path).splitlines()


def _number(path: Path) -> int | None:
    try:
        return int(_text(path), 0)
    except ValueError:
        return None


def _unescape(text: str) -> str:
    """Undo the octal escapes of /proc, such as a blank in a path."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
