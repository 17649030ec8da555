"""Which drives may be taken from the kernel, on a machine of files; the guest (test_guest.py) shows the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.harness.descriptors import open_descriptors, until_closed
from tests.harness.fake_machine import FakeMachine, answering

from warpwell import errors
from warpwell.drives import Machine, bind, refusals, unbind

ADDRESS = "0000:01:00.0"


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    made = FakeMachine(tmp_path)
    made.add_drive(ADDRESS, 0, namespaces=2)
    return made


def refused(machine: FakeMachine, claimed: tuple[str, ...] = ()) -> str:
    """Try to bind a drive that must be left alone; return the message."""
    with answering(machine, claimed) as written, pytest.raises(errors.DriveError) as raised:
        bind(ADDRESS, machine)
    assert written == [] and machine.driver(ADDRESS) == "nvme"
    assert raised.value.reasons and all(reason in str(raised.value) for reason in raised.value.reasons[:5])
    return str(raised.value)


def test_a_drive_that_nobody_uses_is_handed_over_and_back(machine: FakeMachine) -> None:
    with answering(machine) as written:
        assert bind(ADDRESS, machine).driver == "vfio-pci"
        assert written == [("driver_override", "vfio-pci"), ("unbind", ADDRESS), ("drivers_probe", ADDRESS)]
        # The second time, nothing is written.
        assert bind("01:00.0", machine).driver == "vfio-pci" and len(written) == 3
        written.clear()
        assert unbind(ADDRESS, machine).driver == "nvme"
        assert written == [("driver_override", ""), ("unbind", ADDRESS), ("drivers_probe", ADDRESS)]
        assert (machine.device(ADDRESS) / "driver_override").read_text() == "\n"
        written.clear()
        assert unbind(ADDRESS, machine).driver == "nvme" and written == [("driver_override", "")]


def test_what_is_on_any_namespace_keeps_the_drive(machine: FakeMachine) -> None:
    machine.mount("/dev/nvme0n2", r"/my\040data", "259:2")
    assert "nvme0n2 is mounted at /my data" in refused(machine)


def test_a_partition_keeps_the_drive(machine: FakeMachine) -> None:
    machine.add_block("nvme0n1p3", "259:7", 1 << 20, of="nvme0n1")
    machine.mount("/dev/nvme0n1p3", "/", "0:33")  # btrfs has a device number of its own: the source tells
    assert "nvme0n1p3 is mounted at /" in refused(machine)


def test_mounts_that_only_the_first_process_sees_keep_the_drive(machine: FakeMachine) -> None:
    machine.text("proc/1/mountinfo", "30 1 259:1 / /home rw - xfs /dev/nvme0n1 rw")
    assert "nvme0n1 is mounted at /home" in refused(machine)


def test_swap_keeps_the_drive(machine: FakeMachine) -> None:
    machine.add_block("nvme0n1p2", "259:9", 1 << 20, of="nvme0n1")
    machine.append("proc/swaps", "/dev/nvme0n1p2 partition 1000 0 -2")
    assert "nvme0n1p2 is swap space" in refused(machine)


def test_lvm_keeps_the_drive_and_its_mounts_are_named(machine: FakeMachine) -> None:
    machine.add_block("dm-0", "254:0", 1 << 20)
    machine.text("sys/class/block/dm-0/dm/name", "vg-root")
    machine.text("sys/class/block/dm-0/dm/uuid", "LVM-abc")
    machine.hold("nvme0n1", "dm-0")
    assert "nvme0n1 is held by dm-0 (LVM: vg-root)" in refused(machine)
    machine.link("dev/mapper/vg-root", "dev/dm-0")
    machine.mount("/dev/mapper/vg-root", "/srv")
    assert "nvme0n1 is held by dm-0 (LVM: vg-root), which is mounted at /srv" in refused(machine)


def test_md_keeps_the_drive(machine: FakeMachine) -> None:
    machine.add_block("md0", "9:0", 1 << 20)
    machine.text("sys/class/block/md0/md/level", "raid1")
    machine.hold("nvme0n2", "md0")
    assert "nvme0n2 is held by md0 (md, raid1)" in refused(machine)


def test_what_is_exported_to_other_hosts_keeps_the_drive(machine: FakeMachine) -> None:
    space = "sys/kernel/config/nvmet/subsystems/nqn.2026-01.lab:fast/namespaces/1"
    machine.text(f"{space}/device_path", "/dev/nvme0n2")
    machine.text(f"{space}/enable", 0)
    assert refusals(machine.drive(ADDRESS)) == []  # the export is configured, but not enabled
    machine.text(f"{space}/enable", 1)
    assert "nvme0n2 is exported by nvmet, to other hosts: nqn.2026-01.lab:fast" in refused(machine)


def test_a_controller_that_is_passed_on_to_other_hosts_is_kept(machine: FakeMachine) -> None:
    passthru = "sys/kernel/config/nvmet/subsystems/nqn.lab/passthru"
    machine.text(f"{passthru}/device_path", "/dev/nvme1")
    machine.text(f"{passthru}/enable", 1)
    assert refusals(machine.drive(ADDRESS)) == []
    machine.text(f"{passthru}/device_path", "/dev/nvme0")
    assert "nvme0 is exported by nvmet, to other hosts: nqn.lab" in refused(machine)


def test_a_loop_device_keeps_the_drive_and_its_mounts_are_named(machine: FakeMachine) -> None:
    machine.add_block("nvme0n1p3", "259:7", 1 << 20, of="nvme0n1")
    machine.add_block("loop0", "7:0", 1 << 20)
    machine.text("sys/class/block/loop0/loop/backing_file", "/dev/nvme0n1p3")
    assert "nvme0n1p3 is held by loop0" in refused(machine)
    machine.mount("/dev/loop0", "/mnt")
    assert "nvme0n1p3 is held by loop0, which is mounted at /mnt" in refused(machine)


def test_what_the_kernel_has_claimed_keeps_the_drive(machine: FakeMachine) -> None:
    message = refused(machine, claimed=("nvme0n2",))  # ZFS leaves no other trace
    assert "nvme0n2 is claimed" in message and "ZFS" in message


def test_a_namespace_without_a_node_keeps_the_drive(machine: FakeMachine) -> None:
    (machine.dev / "nvme0n2").unlink()
    assert "nvme0n2 cannot be claimed" in refused(machine)


@pytest.mark.parametrize("command_line", ["root=/dev/nvme0n1", "ro root=UUID=12-34", "root=PARTUUID=ab quiet"])
def test_the_root_disk_is_kept(machine: FakeMachine, command_line: str) -> None:
    machine.text("proc/cmdline", command_line)
    machine.link("dev/disk/by-uuid/12-34", "dev/nvme0n1")
    machine.link("dev/disk/by-partuuid/ab", "dev/nvme0n1")
    assert "nvme0n1 is the root disk" in refused(machine)


@pytest.mark.parametrize("node", ["nvme0n1", "ng0n1"])
def test_a_program_that_has_it_open_keeps_the_drive(machine: FakeMachine, node: str) -> None:
    machine.text("proc/123/comm", "qemu")
    (machine.proc / "123" / "fd").mkdir()
    (machine.proc / "123" / "fd" / "5").symlink_to(f"/dev/{node}")
    assert f"/dev/{node} is open in process 123 (qemu)" in refused(machine)


def test_active_virtual_functions_keep_the_drive(machine: FakeMachine) -> None:
    machine.text(f"sys/bus/pci/devices/{ADDRESS}/sriov_numvfs", 0)
    assert refusals(machine.drive(ADDRESS)) == []
    machine.text(f"sys/bus/pci/devices/{ADDRESS}/sriov_numvfs", 4)
    assert "4 virtual functions are active" in refused(machine)


def test_a_group_that_is_not_viable_keeps_the_drive(machine: FakeMachine) -> None:
    machine.add_driver("e1000")
    machine.add_device("0000:00:01.0", 0x060400, "nvme", 12)  # a bridge: no harm
    machine.add_device("0000:01:00.1", 0x020000, None, 12)
    assert refusals(machine.drive(ADDRESS)) == []
    machine.add_device("0000:01:00.2", 0x020000, "e1000", 12)
    assert "group 12 is not viable: it also has 0000:01:00.2 (e1000)" in refused(machine)


def test_a_machine_without_an_iommu_keeps_its_drives(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    machine.add_drive(ADDRESS, 0, group=None)
    assert "switch the IOMMU on" in refused(machine)


def test_the_drive_of_another_driver_is_kept(machine: FakeMachine) -> None:
    machine.add_driver("uio_pci_generic")
    machine.add_drive("0000:02:00.0", 1, driver="uio_pci_generic", group=13)
    for change in (bind, unbind):
        with (
            answering(machine) as written,
            pytest.raises(errors.DriveError, match="bound to the driver uio_pci_generic"),
        ):
            change("0000:02:00.0", machine)
        assert written == []


def test_with_multipath_the_disk_that_is_used_is_asked(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    machine.add_drive(ADDRESS, 3, multipath=True)
    assert [each.name for each in machine.drive("nvme3n1").namespaces] == ["nvme3n1"]
    machine.mount("/dev/nvme3n1", "/home", "259:49")
    assert "nvme3n1 is mounted at /home" in refused(machine)


def test_a_drive_that_vfio_does_not_take_goes_back(machine: FakeMachine) -> None:
    with answering(machine, takes=False) as written, pytest.raises(errors.DriveError, match="dmesg"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("warpwell.drives.binding.BIND_TIMEOUT_SECONDS", 0.05)
            bind(ADDRESS, machine)
    assert machine.driver(ADDRESS) == "nvme"
    assert written[-2:] == [("driver_override", ""), ("drivers_probe", ADDRESS)]
    assert (machine.device(ADDRESS) / "driver_override").read_text() == "\n"


def test_without_vfio_it_is_said_what_to_load(machine: FakeMachine) -> None:
    (machine.sys / "bus/pci/drivers/vfio-pci").rmdir()
    with answering(machine) as written, pytest.raises(errors.DriveError, match="modprobe vfio-pci"):
        bind(ADDRESS, machine)
    assert written == []


def test_no_descriptor_stays_open(machine: FakeMachine) -> None:
    before = open_descriptors()
    refused(machine, claimed=("nvme0n2",))  # the claim on the first namespace is released
    with answering(machine):
        bind(ADDRESS, machine)
    until_closed(before)


def test_without_root_it_is_said_who_can(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(node: Path) -> int:
        raise PermissionError(13, "Permission denied", str(node))

    monkeypatch.setattr("warpwell.drives.binding.claim", denied)
    with pytest.raises(errors.DriveError, match="sudo"):
        bind(ADDRESS, machine)
    assert machine.driver(ADDRESS) == "nvme"


@pytest.mark.parametrize("name", [ADDRESS, "01:00.0", "nvme0", "nvme0n1", "/dev/nvme0n2", "/dev/nvme0n1p1"])
def test_names_of_a_drive(machine: FakeMachine, name: str) -> None:
    assert machine.address(name) == ADDRESS


def test_names_that_mean_no_drive(machine: FakeMachine) -> None:
    machine.add_device("0000:00:02.0", 0x030000, None, 1)
    with pytest.raises(errors.ArgumentError, match=r"not an NVMe drive: this machine has 0000:01:00\.0"):
        machine.address("00:02.0")
    with pytest.raises(errors.ArgumentError, match="'sda'"):
        machine.address("sda")


def test_this_machine_can_be_asked() -> None:
    for drive in Machine().drives():
        assert drive.address and isinstance(refusals(drive), list)


def test_a_machine_without_pci(tmp_path: Path) -> None:
    assert Machine(tmp_path).drives() == []
    with pytest.raises(errors.ArgumentError, match="this machine has no drive"):
        Machine(tmp_path).drive("nvme0")
