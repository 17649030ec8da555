"""`VfioTransport`: a controller on the PCI bus, bound to vfio-pci, through container and group (IOMMU type 1).

The IOMMU lets the controller access the arena and no other memory. The addresses of the arena in this process are also
its IOMMU addresses, so controllers and this process use the same pointers. The arena is mapped as a whole and never
unmapped in part; the kernel unmaps it when the container is closed, after it has stopped the device. The kernel does so
as well if the process is killed.

Numbers of the ioctls: Linux, include/uapi/linux/vfio.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import struct
import threading
import weakref
from collections.abc import Iterator

import numpy as np

from .. import errors
from .._check import checked_nbytes
from ..nvme.controller import DOORBELLS
from ..storage.commands import word
from ..targets import native, private_block
from ..targets.primitives import SYSTEM, fence, store_relaxed_as
from .arena import DmaArena, libc, unmap
from .machine import VFIO_DRIVER, Machine, PciDrive, drive_error
from .transport import Transport

ARENA_BYTES = 256 << 20
"""Default size of the memory of a drive, in bytes; all of it is pinned."""

_BASE = ord(";") << 8 | 100  # _IO(VFIO_TYPE, VFIO_BASE + n)
_GET_API_VERSION, _CHECK_EXTENSION, _SET_IOMMU = _BASE, _BASE + 1, _BASE + 2
_GROUP_GET_STATUS, _GROUP_SET_CONTAINER, _GROUP_GET_DEVICE_FD = _BASE + 3, _BASE + 4, _BASE + 6
_DEVICE_GET_INFO, _DEVICE_GET_REGION_INFO, _DEVICE_RESET = _BASE + 7, _BASE + 8, _BASE + 11
_IOMMU_GET_INFO, _IOMMU_MAP_DMA = _BASE + 12, _BASE + 13

_API_VERSION = 0
_TYPE1_V2 = 3
_GROUP_VIABLE = 1
_DEVICE_CAN_RESET = 1
_REGION_CAN_MAP = 4
_INFO_HAS_CAPABILITIES = 2
_CAPABILITY_IOVA_RANGES = 1
_MAP_READ_WRITE = 3

_BAR0, _CONFIGURATION = 0, 7
_COMMAND = 0x04
_COMMAND_USED = 0x0406
"""Memory space, bus master, and no INTx: admin completions always request an interrupt."""
_BUS_MASTER = 0x0004

_MAP_FIXED = 0x10

I4 = np.dtype(np.int32)


@native
def store(state: int, offset: int, value: int, _c: int, _d: int, _e: int) -> int:
    """Store 32 bits to the register at `offset`; return 0, or -1 if the drive has failed or is closed (thread).

    `state` is the address of a word with the address of the registers, or 0. On x86-64 the store follows all earlier
    stores of the thread.
    """
    registers = word(state, 0)
    if registers == 0:
        return -1
    fence(SYSTEM)
    store_relaxed_as(registers + offset, value, I4)
    return 0


class VfioTransport(Transport):
    """A controller that `warpwell.drives.bind` has bound to vfio-pci. This class does not bind one.

    Parameters
    ----------
    name : str
        The drive, in a form that `Machine.drive` accepts.
    arena : int or str
        Memory for the controller ("64MiB"): a power of two. All of it is pinned (``ulimit -l``).
    machine : Machine, optional

    Attributes
    ----------
    ranges : list of (int, int)
        First and last addresses of the ranges that the IOMMU translates.

    Raises
    ------
    ArgumentError
        This machine has no drive of this name.
    DriveError
        Another program has it open, its IOMMU group is not viable, it is not bound to vfio-pci, this user may not
        open it, or its memory cannot be pinned. The message has the next step.
    """

    def __init__(self, name: str, arena: int | str = ARENA_BYTES, machine: Machine | None = None) -> None:
        machine = machine or Machine()
        drive = machine.drive(name)
        if drive.driver != VFIO_DRIVER or drive.group is None:
            raise drive_error(
                drive.address,
                f"it is bound to {drive.driver or 'no driver'}, not to {VFIO_DRIVER}: to bind it, run: "
                f"sudo warpwell drive bind {drive.address}",
            )
        try:
            with contextlib.ExitStack() as undo:
                self._take(drive, machine, checked_nbytes(arena, "arena"), undo)
                undo.pop_all()
        except errors.WarpwellError:
            raise
        except OSError as error:
            raise drive_error(
                drive.address, f"the kernel does not open it ({error.strerror}): see the kernel's log (dmesg)"
            ) from error
        _open.add(self)

    # -- opening --------------------------------------------------------------------------------------------------

    def _take(self, drive: PciDrive, machine: Machine, arena: int, undo: contextlib.ExitStack) -> None:
        self._descriptors: list[int] = []
        undo.callback(self._close_descriptors)
        container = self._open(machine, drive, "vfio")
        group = self._open(machine, drive, str(drive.group))
        self._attach(drive, container, group)
        self.ranges = iova_ranges(container)
        high_first = sorted(self.ranges, reverse=True)  # Code and heap of a program may be at low addresses.
        super().__init__(drive.address, DmaArena(arena, **({"ranges": high_first} if high_first else {})))
        undo.callback(self.arena.close)
        self._pin(container)
        self._device = self._get_device(group)
        self._configuration = self._region(_CONFIGURATION)[2]
        self._map_registers()
        undo.callback(libc.munmap, self._at, self._size)
        self._command(_COMMAND_USED)
        self._lock = threading.Lock()
        self._closed = False
        self._state = private_block(8)
        self._state.words[0] = self._at
        self._unmapped = weakref.finalize(self, unmap, self._at, self._size, self._pid)
        self._unmapped.atexit = False  # Threads may use the registers until the process ends.

    def _open(self, machine: Machine, drive: PciDrive, name: str) -> int:
        node = machine.dev / "vfio" / name
        try:
            self._descriptors.append(os.open(node, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise drive_error(
                    drive.address,
                    f"it is open in another program ({node} is busy): end that program first",
                    reasons=(f"{node} is busy",),
                ) from error
            advice = {
                errno.EACCES: f"let this user open it, once: sudo warpwell drive bind {drive.address} --user $USER",
                errno.ENOENT: "run modprobe vfio-pci vfio_iommu_type1 as root",
            }.get(error.errno or 0, "see the kernel's log (dmesg)")
            raise drive_error(drive.address, f"{node}: {error.strerror}: {advice}") from error
        return self._descriptors[-1]

    def _attach(self, drive: PciDrive, container: int, group: int) -> None:
        if fcntl.ioctl(container, _GET_API_VERSION) != _API_VERSION or not fcntl.ioctl(
            container, _CHECK_EXTENSION, _TYPE1_V2
        ):
            raise drive_error(drive.address, "this kernel's VFIO has no IOMMU of type 1, version 2")
        status = bytearray(struct.pack("II", 8, 0))
        fcntl.ioctl(group, _GROUP_GET_STATUS, status)
        if not struct.unpack("II", status)[1] & _GROUP_VIABLE:
            reason = f"its IOMMU group {drive.group} is not viable: {', '.join(drive.neighbors)} must be unbound too"
            raise drive_error(drive.address, reason, reasons=(reason,))
        fcntl.ioctl(group, _GROUP_SET_CONTAINER, struct.pack("i", container))
        fcntl.ioctl(container, _SET_IOMMU, _TYPE1_V2)

    def _pin(self, container: int) -> None:
        arena = self.arena
        piece = struct.pack("IIQQQ", 32, _MAP_READ_WRITE, arena.address, arena.address, arena.nbytes)
        try:
            fcntl.ioctl(container, _IOMMU_MAP_DMA, piece)
        except OSError as error:
            raise drive_error(
                self.address,
                f"the kernel does not pin {arena.nbytes >> 10} KiB for it ({error.strerror}): raise ulimit -l "
                "(memlock in /etc/security/limits.conf), or choose a smaller arena",
            ) from error

    def _get_device(self, group: int) -> int:
        # fcntl.ioctl would treat the device's descriptor, its result, as a length of the text.
        name = ctypes.create_string_buffer(self.address.encode())
        device: int = libc.ioctl(group, ctypes.c_ulong(_GROUP_GET_DEVICE_FD), name)
        if device < 0:
            code = ctypes.get_errno()
            raise drive_error(
                self.address, f"vfio-pci does not open it ({os.strerror(code)}): see the kernel's log (dmesg)"
            )
        self._descriptors.append(device)
        os.set_inheritable(device, False)
        info = bytearray(struct.pack("IIIII", 20, 0, 0, 0, 0))
        fcntl.ioctl(device, _DEVICE_GET_INFO, info)
        self._can_reset = bool(struct.unpack_from("I", info, 4)[0] & _DEVICE_CAN_RESET)
        return device

    def _region(self, index: int) -> tuple[int, int, int]:
        """Return the flags of a region, its size in bytes, and its offset in the device's file."""
        info = bytearray(struct.pack("IIIIQQ", 32, 0, index, 0, 0, 0))
        fcntl.ioctl(self._device, _DEVICE_GET_REGION_INFO, info)
        _, flags, _, _, size, offset = struct.unpack("IIIIQQ", info)
        return flags, size, offset

    def _map_registers(self) -> None:
        flags, size, offset = self._region(_BAR0)
        if not flags & _REGION_CAN_MAP or size <= DOORBELLS:
            raise drive_error(self.address, f"its registers ({size} bytes) cannot be mapped")
        # mmap.mmap would keep a copy of the descriptor, with which a forked child would keep the drive busy.
        at = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, self._device, offset)
        if at in (None, ctypes.c_void_p(-1).value):
            raise drive_error(self.address, f"its registers cannot be mapped ({os.strerror(ctypes.get_errno())})")
        self._at, self._size = at, size
        libc.madvise(at, size, mmap.MADV_DONTFORK)

    # -- use ------------------------------------------------------------------------------------------------------

    def read32(self, offset: int) -> int:
        with self._access(offset) as address:
            return ctypes.c_uint32.from_address(address).value  # one access of 32 bits

    def write32(self, offset: int, value: int) -> None:
        with self._access(offset) as address:
            ctypes.c_uint32.from_address(address).value = value

    @contextlib.contextmanager
    def _access(self, offset: int) -> Iterator[int]:
        self.check()
        if offset % 4 or not 0 <= offset < self._size:
            raise errors.ArgumentError(f"there is no register of 32 bits at {offset:#x}", name="offset")
        with self._lock:  # Registers must not be unmapped during the access.
            self._require_open()
            yield self._at + offset

    def native_store(self) -> tuple[int, int]:
        return store.address, self._state.address

    def _disable_stores(self) -> None:
        self._state.words[0] = 0

    def _enable_stores(self) -> None:
        with self._lock:
            self._state.words[0] = 0 if self._closed else self._at

    def restore(self) -> None:
        self.check()
        with self._lock:
            self._require_open()
            self._command(_COMMAND_USED)

    def reset_function(self) -> bool:
        with self._lock:
            self._require_open()
            return self._reset()

    def reset(self) -> None:
        self.fail("it was reset: open it again")
        with self._lock:
            if self._closed:
                return
            self._stop()
        self.arena.end_quarantine()

    def close(self) -> None:
        if os.getpid() != self._pid:
            return  # The fork handler has closed the child's descriptors.
        with self._lock:
            if self._closed:
                return
            try:
                self._stop()
            finally:
                self._closed = True
                self._state.words[0] = 0
                try:
                    _cover(self._at, self._size)
                finally:
                    self._close_descriptors()  # The kernel resets the device, then unpins the arena.

    def check(self) -> None:
        super().check()
        self._require_open()

    def _require_open(self) -> None:
        if self._closed:
            raise errors.ClosedError(f"drive {self.address} is closed: open it again")

    def _stop(self) -> None:
        """Reset the function, or disable its access to the bus (lock held)."""
        if self._reset():
            return
        if self._command(_COMMAND_USED & ~_BUS_MASTER) & _BUS_MASTER:
            raise drive_error(self.address, "it cannot be reset or stopped: end this process, which frees its memory")

    def _reset(self) -> bool:
        """Reset the function; return False if that is not possible (lock held)."""
        if self._can_reset:
            with contextlib.suppress(OSError):
                fcntl.ioctl(self._device, _DEVICE_RESET)
                return True
        return False

    def _command(self, value: int) -> int:
        """Write the PCI command register, and return its new value."""
        os.pwrite(self._device, struct.pack("<H", value), self._configuration + _COMMAND)
        read: int = struct.unpack("<H", os.pread(self._device, 2, self._configuration + _COMMAND))[0]
        return read

    def _close_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


def _cover(address: int, nbytes: int) -> None:
    """Replace mapped registers by plain memory, until the transport is collected.

    A native thread that has loaded their address may still store to it. Without a mapping, that store would end the
    program, or change a later mapping.
    """
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    if libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, kind, -1, 0) != address:
        raise OSError(ctypes.get_errno(), "registers cannot be covered by memory")


def iova_ranges(container: int) -> list[tuple[int, int]]:
    """Return the address ranges that an IOMMU translates, first and last; empty if the kernel does not report them."""
    info = bytearray(4096)
    struct.pack_into("I", info, 0, len(info))
    fcntl.ioctl(container, _IOMMU_GET_INFO, info)
    _, flags, _, at = struct.unpack_from("IIQI", info)
    while flags & _INFO_HAS_CAPABILITIES and at:
        kind, _, after = struct.unpack_from("HHI", info, at)
        if kind == _CAPABILITY_IOVA_RANGES:
            (count,) = struct.unpack_from("I", info, at + 8)
            return [struct.unpack_from("QQ", info, at + 16 + 16 * k) for k in range(count)]
        at = after
    return []


_open: weakref.WeakSet[VfioTransport] = weakref.WeakSet()


def _after_fork() -> None:
    """Close the child's copies of the descriptors: they would keep the drive busy after the parent's exit.

    The registers are not mapped in the child, so native functions must not store to them.
    """
    for transport in list(_open):
        transport._state.words[0] = 0
        transport._close_descriptors()


os.register_at_fork(after_in_child=_after_fork)
