"""A machine of files: the parts of /sys, /proc and /dev that describe NVMe drives, in a folder.

`answering` is its kernel: it does what is written to `driver_override`, `unbind` and `drivers_probe`, and knows which
block devices are claimed.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from warpwell.drives import Machine, binding


class FakeMachine(Machine):
    """A machine whose files are in a folder; the methods add files for a test."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.root = root
        for name in (
            "sys/bus/pci/devices",
            "sys/bus/pci/drivers",
            "sys/class/block",
            "sys/dev/block",
            "proc/self",
            "dev/vfio",
            "dev/mapper",
            "dev/disk",
        ):
            (root / name).mkdir(parents=True)
        for driver in ("nvme", "vfio-pci"):
            self.add_driver(driver)
        self.text("proc/self/mountinfo", "21 1 0:20 / /proc rw - proc proc rw\n")
        self.text("proc/swaps", "Filename Type Size Used Priority\n")
        self.text("proc/cmdline", "quiet\n")

    def text(self, name: str, text: str | int) -> None:
        """Write a file."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def append(self, name: str, text: str) -> None:
        """Add a line to a file."""
        with open(self.root / name, "a") as file:
            file.write(f"{text}\n")

    def link(self, name: str, target: str) -> None:
        """Make a link to another file of the machine."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(self.root / target)

    def add_driver(self, name: str) -> None:
        """Load a driver."""
        (self.root / "sys/bus/pci/drivers" / name).mkdir()

    def add_device(self, address: str, kind: int, driver: str | None, group: int | None) -> str:
        """Plug a PCI device in; return its folder."""
        folder = f"sys/bus/pci/devices/{address}"
        self.text(f"{folder}/class", f"0x{kind:06x}")
        self.text(f"{folder}/driver_override", "(null)")
        if driver:
            self.link(f"{folder}/driver", f"sys/bus/pci/drivers/{driver}")
        if group is not None:
            self.link(f"{folder}/iommu_group", f"sys/kernel/iommu_groups/{group}")
            self.link(f"sys/kernel/iommu_groups/{group}/devices/{address}", folder)
        return folder

    def add_drive(
        self,
        address: str,
        number: int,
        *,
        namespaces: int = 1,
        driver: str | None = "nvme",
        group: int | None = 12,
        multipath: bool = False,
    ) -> None:
        """Plug in an NVMe drive; the kernel calls its namespaces nvme<number>n1 and so on."""
        folder = self.add_device(address, 0x010802, driver, group)
        if driver != "nvme":
            return
        controller = f"{folder}/nvme/nvme{number}"
        self.text(f"{controller}/model", "Fast Drive 9000     ")
        self.text(f"{controller}/serial", f"S{number:04}      ")
        self.text(f"{controller}/firmware_rev", "1.0")
        for nsid in range(1, namespaces + 1):
            name = f"nvme{number}n{nsid}"
            path = f"nvme{number}c{number}n{nsid}" if multipath else name
            (self.root / controller / path).mkdir()
            self.add_block(name, f"259:{number * 16 + nsid}", 4 << 20)
            self.text(f"sys/class/block/{name}/nsid", nsid)

    def add_block(self, name: str, number: str, nbytes: int, of: str | None = None) -> None:
        """Add a block device, or a partition of one."""
        folder = f"sys/class/block/{name}"
        self.text(f"{folder}/size", nbytes // 512)
        self.text(f"{folder}/queue/logical_block_size", 512)
        self.link(f"sys/dev/block/{number}", folder)
        self.text(f"dev/{name}", "")
        if of:
            self.text(f"{folder}/partition", 1)
            self.link(f"sys/class/block/{of}/{name}", folder)

    def mount(self, source: str, mount_point: str, number: str = "0:99") -> None:
        """Mount a device."""
        self.append("proc/self/mountinfo", f"30 1 {number} / {mount_point} rw,relatime shared:1 - ext4 {source} rw")

    def hold(self, name: str, holder: str) -> None:
        """Build a block device on another."""
        self.link(f"sys/class/block/{name}/holders/{holder}", f"sys/class/block/{holder}")


@contextlib.contextmanager
def answering(
    machine: FakeMachine, claimed: tuple[str, ...] = (), takes: bool = True
) -> Iterator[list[tuple[str, str]]]:
    """Answer writes to the files of drivers as the kernel does; yield what was written.

    Parameters
    ----------
    machine : FakeMachine
    claimed : tuple of str
        Block devices that another program has claimed.
    takes : bool
        Whether vfio-pci takes devices that it is given.
    """
    written: list[tuple[str, str]] = []
    held: set[int] = set()

    def write(path: Path, text: str, address: str) -> None:
        written.append((path.name, text.strip()))
        folder = machine.device(address)
        if path.name == "unbind":
            if machine.driver(address) == "nvme":
                assert len(held) == len(list(folder.glob("nvme/*/nvme*"))), "not every namespace is claimed"
                for descriptor in held:
                    os.fstat(descriptor)  # still held
            (folder / "driver").unlink()
        elif path.name == "drivers_probe":
            override = (folder / "driver_override").read_text().strip()
            driver = override if override not in ("", "(null)") else "nvme"
            if takes or driver != "vfio-pci":
                machine.link(f"sys/bus/pci/devices/{address}/driver", f"sys/bus/pci/drivers/{driver}")
        else:
            path.write_text(text)

    def claim(node: Path) -> int:
        if node.name in claimed:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(node))
        descriptor = os.open(node, os.O_RDONLY)
        held.add(descriptor)
        return descriptor

    with mock.patch.object(binding, "_write", write), mock.patch.object(binding, "claim", claim):
        yield written
