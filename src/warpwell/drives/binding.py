"""`bind` moves a drive from the kernel's driver to vfio-pci, so that programs can use it; `unbind` moves it back.

No other module of Warpwell binds a drive. Binding takes all namespaces of the controller from the kernel, so it is
refused while one of them is in use. Two checks complement each other:

1. The files of the kernel (`warpwell.drives.machine`): mounts, swap, holders, the root disk, programs, virtual
   functions, neighbors in the IOMMU group. They name the user. Only they show loop devices and exports over a network
   (nvmet), because the kernel opens a drive for these without a claim.
2. A claim (``O_EXCL``) on every namespace, held until the kernel's driver has released the drive. It fails for every
   claim of the kernel itself: file systems of several disks, ZFS, mounts of other containers. While it is held, a mount
   fails.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from .. import errors
from .machine import KERNEL_DRIVER, VFIO_DRIVER, Machine, PciDrive, drive_error

BIND_TIMEOUT_SECONDS = 10.0
"""Time-out for a driver to bind or release a device."""

_MAX_NAMED = 5


def refusals(drive: PciDrive) -> list[str]:
    """Return the reasons against binding a drive; an empty list if it may be bound."""
    found = list(drive.uses)
    if drive.functions:
        found.append(f"{drive.functions} virtual functions are active, and may be in use (write 0 to sriov_numvfs)")
    if drive.driver not in (None, KERNEL_DRIVER, VFIO_DRIVER):
        found.append(f"it is bound to the driver {drive.driver}")
    if drive.group is None:
        found.append(
            "there is no IOMMU group, so nothing would keep the drive inside Warpwell's memory: switch the IOMMU on "
            "(VT-d or AMD-Vi in the firmware, and intel_iommu=on on the kernel's command line)"
        )
    if drive.neighbors:
        found.append(
            f"its IOMMU group {drive.group} is not viable: it also has {', '.join(drive.neighbors)}; unbind these "
            "devices too, or move the drive to a slot with its own group"
        )
    return found


def bind(name: str, machine: Machine | None = None, user: int | None = None) -> PciDrive:
    """Bind a drive to vfio-pci, until `unbind` or the next start of the machine.

    Parameters
    ----------
    name : str
        The drive, as `Machine.drive` takes it.
    machine : Machine, optional
    user : int, optional
        Id of a user who may open the drive. Default: only root.

    Returns
    -------
    PciDrive
        The drive as it is now.

    Raises
    ------
    ArgumentError
        This machine has no drive of this name.
    DriveError
        The drive is in use, or unsafe to bind: it was not changed. Or a driver did not bind or release the drive, which
        was returned to the kernel's driver.
    """
    machine = machine or Machine()
    drive = machine.drive(name)
    if found := refusals(drive):
        raise _refused(drive, found)
    if drive.driver != VFIO_DRIVER:
        if not (machine.sys / "bus" / "pci" / "drivers" / VFIO_DRIVER).exists():
            raise drive_error(
                drive.address,
                f"the kernel has not loaded {VFIO_DRIVER}: run modprobe {VFIO_DRIVER} as root, and try again",
            )
        with _claims(machine, drive):
            try:
                _hand_over(machine, drive.address, VFIO_DRIVER)
            except BaseException:
                with contextlib.suppress(errors.DriveError):
                    _hand_over(machine, drive.address, None)
                raise
    if user is not None:
        os.chown(machine.dev / "vfio" / str(drive.group), user, -1)
    return machine.drive(drive.address)


def unbind(name: str, machine: Machine | None = None) -> PciDrive:
    """Return a drive to the kernel's driver.

    Parameters
    ----------
    name : str
        As for `bind`; a drive that is bound to vfio-pci is known only by its address.
    machine : Machine, optional

    Returns
    -------
    PciDrive
        The drive as it is now.

    Raises
    ------
    ArgumentError
        This machine has no drive of this name.
    DriveError
        A program has the drive open, it is bound to another driver, or the kernel's driver did not bind it.
    """
    machine = machine or Machine()
    drive = machine.drive(name)
    if drive.driver not in (None, KERNEL_DRIVER, VFIO_DRIVER):
        raise _refused(drive, [f"it is bound to the driver {drive.driver}"])
    if drive.driver == VFIO_DRIVER and drive.group is not None:
        # The kernel would wait without a time-out until that program has closed it.
        node = machine.dev / "vfio" / str(drive.group)
        try:
            os.close(os.open(node, os.O_RDWR))
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise _refused(drive, [f"a program has {node} open: end it first"]) from error
            if error.errno != errno.ENOENT:
                raise _denied(drive.address, error) from error
    _hand_over(machine, drive.address, None)
    return machine.drive(drive.address)


def _hand_over(machine: Machine, address: str, driver: str | None) -> None:
    """Bind a device to a driver, or with None to the driver that the kernel chooses."""
    folder = machine.device(address)
    _write(folder / "driver_override", driver or "\n", address)
    expected = driver or KERNEL_DRIVER
    if machine.driver(address) not in (None, expected):
        _write(folder / "driver" / "unbind", address, address)
        _wait(lambda: machine.driver(address) is None)
    if machine.driver(address) is None:
        _write(machine.sys / "bus" / "pci" / "drivers_probe", address, address)
        _wait(lambda: machine.driver(address) is not None)
    if (now := machine.driver(address)) != expected:
        raise drive_error(
            address,
            f"the driver {expected} did not take it ({now or 'no driver'} has it): see the kernel's log (dmesg)",
        )


@contextlib.contextmanager
def _claims(machine: Machine, drive: PciDrive) -> Iterator[None]:
    """Claim every namespace of a drive, as a file system would."""
    held: list[int] = []
    try:
        for namespace in drive.namespaces:
            node = machine.dev / namespace.name
            try:
                held.append(claim(node))
            except OSError as error:
                if error.errno == errno.EBUSY:
                    raise _refused(
                        drive,
                        [
                            f"{namespace.name} is claimed: "
                            "a file system of several disks, ZFS or another container uses it"
                        ],
                    ) from error
                if error.errno in (errno.EACCES, errno.EPERM):
                    raise _denied(drive.address, error) from error
                raise _refused(drive, [f"{node} cannot be claimed ({error.strerror})"]) from error
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)


def claim(node: Path) -> int:
    """Open a block device as its only user; return the descriptor. The kernel answers EBUSY if there is another."""
    return os.open(node, os.O_RDONLY | os.O_EXCL | os.O_NONBLOCK)


def _refused(drive: PciDrive, found: list[str]) -> errors.DriveError:
    named = [*found[:_MAX_NAMED], f"and {len(found) - _MAX_NAMED} more"] if len(found) > _MAX_NAMED else found
    identity = f" {drive.model} {drive.serial}".rstrip()
    return errors.DriveError(
        f"drive {drive.address}{identity} was left alone:\n" + "\n".join(f"  - {reason}" for reason in named),
        drive=drive.address,
        reasons=tuple(found),
    )


def _denied(address: str, error: OSError) -> errors.DriveError:
    return drive_error(
        address,
        f"{error.filename}: {error.strerror}. Binding and unbinding need root: put sudo before the command",
    )


def _write(path: Path, text: str, address: str) -> None:
    try:
        with open(path, "w") as file:
            file.write(text)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise _denied(address, error) from error
        raise drive_error(address, f"the kernel refused {text.strip()!r} in {path}: {error.strerror}") from error


def _wait(done: Callable[[], bool]) -> None:
    end = time.monotonic() + BIND_TIMEOUT_SECONDS
    while not done() and time.monotonic() < end:
        time.sleep(0.01)
