"""VfioTransport over a VFIO of files: its requests to the kernel, in order. The guest of test_guest.py has one."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.arrays.kernels import read, write
from tests.harness.descriptors import open_descriptors, until_closed
from tests.harness.fake_machine import FakeMachine
from tests.harness.until import HANG_SECONDS

import warpwell as ww
from lab.drives.scripted_drive import ScriptedDrive
from warpwell import errors
from warpwell.drives import Drive, VfioTransport, open_namespace, vfio
from warpwell.drives.superblock import DATA_AT, head_of
from warpwell.nvme import controller as reg
from warpwell.nvme.controller import CSTS

ADDRESS = "0000:01:00.0"
ARENA = 1 << 16
CONFIGURATION_AT = 1 << 16
RANGES = [(0, 0xFEDF_FFFF), (0xFEF0_0000, (1 << 39) - 1)]


class FakeVfio:
    """The ioctls of VFIO, on files of a folder; the device's file has BAR0, and at 64 KiB its configuration space."""

    def __init__(self, machine: FakeMachine) -> None:
        self.machine = machine
        self.requests: list[str] = []
        self.viable = True
        self.can_reset = True
        self.refused: str | None = None
        self.keeps_bus = False
        self.on_reset: Callable[[], object] = lambda: None
        self.device = os.memfd_create("device")
        os.ftruncate(self.device, CONFIGURATION_AT + 4096)

    def ioctl(self, descriptor: int, request: int, argument: Any = 0) -> int:
        name = {
            vfio._GET_API_VERSION: "version",
            vfio._CHECK_EXTENSION: "check",
            vfio._SET_IOMMU: "iommu",
            vfio._GROUP_GET_STATUS: "status",
            vfio._GROUP_SET_CONTAINER: "attach",
            vfio._DEVICE_GET_INFO: "info",
            vfio._DEVICE_GET_REGION_INFO: "region",
            vfio._DEVICE_RESET: "reset",
            vfio._IOMMU_GET_INFO: "ranges",
            vfio._IOMMU_MAP_DMA: "map",
        }[request]
        self.requests.append(name)
        if name == self.refused:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        if name == "status":
            struct.pack_into("I", argument, 4, int(self.viable))
        elif name == "info":
            struct.pack_into("I", argument, 4, int(self.can_reset))
        elif name == "region":
            bar = struct.unpack_from("I", argument, 8)[0] == 0
            struct.pack_into(
                "IIIIQQ",
                argument,
                0,
                32,
                7 if bar else 3,
                0 if bar else 7,
                0,
                0x4000 if bar else 256,
                0 if bar else CONFIGURATION_AT,
            )
        elif name == "ranges":
            struct.pack_into("IIQI", argument, 0, len(argument), 3, 4096, 64)
            struct.pack_into("HHI", argument, 64, 2, 1, 128)  # another capability first
            struct.pack_into("HHIII", argument, 128, 1, 1, 0, len(RANGES), 0)
            for k, each in enumerate(RANGES):
                struct.pack_into("QQ", argument, 144 + 16 * k, *each)
        elif name == "reset":
            self.on_reset()
        elif name == "map":
            self.mapped = struct.unpack("IIQQQ", argument)
        return 1 if name == "check" else 0

    def open_device(self, group: int, request: Any, name: Any) -> int:
        assert name.value.decode() == ADDRESS
        self.requests.append("device")
        return os.dup(self.device)

    @property
    def command(self) -> int:
        """The PCI command register."""
        return int(struct.unpack("<H", os.pread(self.device, 2, CONFIGURATION_AT + 4))[0])


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeVfio:
    machine = FakeMachine(tmp_path)
    machine.add_drive(ADDRESS, 0, driver="vfio-pci")
    for name in ("vfio", "12"):
        machine.text(f"dev/vfio/{name}", "")
    made = FakeVfio(machine)
    monkeypatch.setattr(vfio.fcntl, "ioctl", made.ioctl)
    monkeypatch.setattr(vfio.libc, "ioctl", made.open_device)
    return made


@contextlib.contextmanager
def opened(kernel: FakeVfio) -> Iterator[VfioTransport]:
    transport = VfioTransport(ADDRESS, ARENA, kernel.machine)
    try:
        yield transport
    finally:
        transport.close()
        transport.arena.close()


def test_it_is_opened_and_closed_in_order(kernel: FakeVfio) -> None:
    before, open_before = set(os.listdir("/proc/self/fd")), open_descriptors()
    with opened(kernel) as transport:
        assert kernel.requests == [
            "version",
            "check",
            "status",
            "attach",
            "iommu",
            "ranges",
            "map",
            "device",
            "info",
            "region",
            "region",
        ]
        assert transport.ranges == RANGES
        at = transport.arena.address
        assert kernel.mapped == (32, 3, at, at, ARENA) and RANGES[1][0] <= at < RANGES[1][1]
        assert kernel.command == 0x406
        inherited = [
            fd
            for fd in map(int, set(os.listdir("/proc/self/fd")) - before)
            if os.path.exists(f"/proc/self/fd/{fd}") and os.get_inheritable(fd)
        ]
        assert not inherited
    assert kernel.requests[-1] == "reset"
    until_closed(open_before)
    transport.close()  # a second close() does nothing
    for use in (lambda: transport.read32(0), lambda: transport.write32(0, 1)):
        with pytest.raises(errors.ClosedError):
            use()


def test_registers_are_words_of_32_bits(kernel: FakeVfio) -> None:
    with opened(kernel) as transport, mmap.mmap(kernel.device, 0x4000) as bar:
        bar[0:16] = bytes(range(16))
        assert transport.read32(4) == 0x07060504 and transport.read64(0) == 0x0706050403020100
        transport.write32(0x1000, 0x8000_0001)
        assert bar[0x1000:0x1008] == b"\1\0\0\x80\0\0\0\0"
        for offset in (2, -4, 0x4000):
            with pytest.raises(errors.ArgumentError):
                transport.read32(offset)


def test_native_threads_store_a_doorbell_and_not_its_neighbor(kernel: FakeVfio) -> None:
    with opened(kernel) as transport, mmap.mmap(kernel.device, 0x4000) as bar:
        address, state = transport.native_store()
        store = ctypes.CFUNCTYPE(ctypes.c_long, *[ctypes.c_long] * 6)(address)
        bar[0x1000:0x100C] = b"\xff" * 12
        assert store(state, 0x1004, 7, 0, 0, 0) == 0
        assert bar[0x1000:0x100C] == b"\xff" * 4 + b"\7\0\0\0" + b"\xff" * 4
        transport.fail("it is a test")
        assert store(state, 0x1004, 8, 0, 0, 0) == -1 and bar[0x1004] == 7


def mapping_at(address: int) -> str:
    """Return the line of this process's mappings that holds an address, or an empty text."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, end = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= address < end:
            return line
    return ""


def test_a_thread_in_the_middle_of_a_store_reaches_no_register_and_no_memory_of_others(kernel: FakeVfio) -> None:
    with opened(kernel) as transport:
        at = transport._at
        assert "memfd:device" in mapping_at(at)
    # As a thread that loaded the address before the drive was closed, and stores after that.
    assert "rw-p" in (covered := mapping_at(at)) and "memfd" not in covered
    ctypes.c_uint32.from_address(at + 0x1000).value = 5
    assert os.pread(kernel.device, 4, 0x1000) == bytes(4)
    del transport
    gc.collect()
    assert mapping_at(at) == ""


def test_a_drive_that_is_gone_is_lost(kernel: FakeVfio) -> None:
    with opened(kernel) as transport, mmap.mmap(kernel.device, 0x4000) as bar:
        bar[CSTS] = 1
        transport.examine()
        bar[CSTS : CSTS + 4] = b"\xff" * 4
        for use in (transport.examine, lambda: transport.read32(0)):
            with pytest.raises(errors.DriveLostError, match="it was removed"):
                use()


def test_what_cannot_be_reset_loses_the_bus(kernel: FakeVfio, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel.can_reset = False
    with opened(kernel) as transport:
        transport.reset()
        assert "reset" not in kernel.requests and kernel.command == 0x402
        with pytest.raises(errors.DriveLostError, match="it was reset"):
            transport.read32(0)
    with opened(kernel) as transport:
        with monkeypatch.context() as patch:
            patch.setattr(transport, "_command", lambda value: 0x406)  # the command register does not change
            with pytest.raises(errors.DriveError, match="cannot be reset or stopped"):
                transport.reset()


def test_what_was_reset_is_used_again(kernel: FakeVfio) -> None:
    with opened(kernel) as transport, mmap.mmap(kernel.device, 0x4000) as bar:
        address, state = transport.native_store()
        store = ctypes.CFUNCTYPE(ctypes.c_long, *[ctypes.c_long] * 6)(address)
        transport.fail("it is a test")
        with transport.despite_failure():
            assert transport.reset_function() and kernel.requests[-1] == "reset"
            # A reset clears the command register, bus mastering included.
            os.pwrite(kernel.device, bytes(2), CONFIGURATION_AT + 4)
            transport.restore()
            assert kernel.command == 0x406 and transport.read32(0) == 0
        with pytest.raises(errors.DriveLostError):
            transport.read32(0)
        assert store(state, 0x1000, 7, 0, 0, 0) == -1
        transport.pass_generation()
        transport.revive()
        assert store(state, 0x1000, 7, 0, 0, 0) == 0 and bar[0x1000] == 7 and transport.failure is None
        kernel.can_reset = transport._can_reset = False
        transport.fail("again")
        assert not transport.reset_function()
        transport.close()
        transport.revive()  # revive() does nothing for a closed transport
        assert store(state, 0x1000, 8, 0, 0, 0) == -1 and bar[0x1000] == 7


def test_a_child_has_neither_descriptors_nor_registers(kernel: FakeVfio) -> None:
    with opened(kernel) as transport:
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            verdict = b"nothing"
            with contextlib.suppress(BaseException):
                open_paths = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
                busy = any("/dev/vfio/" in path for path in open_paths)
                try:
                    transport.read32(0)
                except errors.ForkError:
                    verdict = b"busy" if busy else b"refused"
                transport.close()
            os.write(write_end, verdict)
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(read_end, 100) == b"refused"
        os.close(read_end)
        os.close(write_end)
        # The child's close() does not affect the parent.
        assert transport.read32(0) == 0 and "reset" not in kernel.requests


@pytest.mark.parametrize("at", ["version", "status", "attach", "iommu", "ranges", "map", "info", "region"])
def test_what_fails_leaves_nothing(kernel: FakeVfio, at: str) -> None:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:")

    kernel.refused = at
    files, before = open_descriptors(), mappings()
    with pytest.raises(errors.DriveError, match="Cannot allocate memory"):
        VfioTransport(ADDRESS, ARENA, kernel.machine)
    until_closed(files)
    assert mappings() <= before  # those of earlier tests may end meanwhile


def test_a_group_that_is_not_viable(kernel: FakeVfio) -> None:
    kernel.viable = False
    with pytest.raises(errors.DriveError, match="group 12 is not viable"):
        VfioTransport(ADDRESS, ARENA, kernel.machine)


def test_memory_that_may_not_be_pinned(kernel: FakeVfio) -> None:
    kernel.refused = "map"
    with pytest.raises(errors.DriveError, match=r"does not pin 1024 KiB .*: raise ulimit -l"):
        VfioTransport(ADDRESS, 1 << 20, kernel.machine)
    kernel.refused = None
    VfioTransport(ADDRESS, 1 << 20, kernel.machine).close()


def test_nothing_is_bound_by_opening(kernel: FakeVfio) -> None:
    kernel.machine.add_drive("0000:02:00.0", 1, group=13)
    for attempt in (
        lambda name: VfioTransport(name, ARENA, kernel.machine),
        lambda name: open_namespace(f"nvme:{name}/1", kernel.machine),
    ):
        with pytest.raises(errors.DriveError, match=r"sudo warpwell drive bind 0000:02:00\.0"):
            attempt("0000:02:00.0")
    assert kernel.machine.driver("0000:02:00.0") == "nvme" and kernel.requests == []
    with pytest.raises(errors.ArgumentError, match=r"nvme:0000:01:00\.0/1"):
        open_namespace("0000:01:00.0", kernel.machine)


@pytest.mark.parametrize(
    ("code", "says"),
    [(errno.EBUSY, "another program"), (errno.EACCES, "--user"), (errno.ENOENT, "modprobe vfio-pci")],
)
def test_a_node_that_cannot_be_opened(kernel: FakeVfio, monkeypatch: pytest.MonkeyPatch, code: int, says: str) -> None:
    real = os.open

    def refuse(path: Any, *more: Any) -> int:
        if "vfio/12" in str(path):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, *more)

    monkeypatch.setattr(vfio.os, "open", refuse)
    with pytest.raises(errors.DriveError, match=says):
        VfioTransport(ADDRESS, ARENA, kernel.machine)


# -- rings of kernels -------------------------------------------------------------------------------------------------


class Behind:
    """A controller in a thread, which looks at the registers in the device's file as hardware does behind a bus."""

    def __init__(self, kernel: FakeVfio, content: np.ndarray) -> None:
        self.engine = ScriptedDrive()
        self.engine.blocks = content.copy()
        self.engine.namespace["nsze"] = content.size // 512
        self.bar = np.ndarray(0x4000 // 4, np.uint32, mmap.mmap(kernel.device, 0x4000))
        for offset in (reg.CAP, reg.CAP + 4, reg.VS):
            self.bar[offset // 4] = self.engine.registers[offset]
        self.deaf = self.ends = False
        self.lock = threading.Lock()
        self.bells = reg.DOORBELLS // 4 + np.arange(8)
        self._rang = np.zeros(8, np.uint32)
        kernel.on_reset = self.reset
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def reset(self) -> None:
        """Be reset by the kernel: nothing is left but the data."""
        with self.lock:
            self.bar[reg.CC // 4] = self.bar[CSTS // 4] = 0
            self._disabled()
            self.deaf = False

    def _disabled(self) -> None:
        self.engine.write32(reg.CC, 0)
        self.bar[self.bells] = self._rang[:] = 0

    def _work(self) -> None:
        while not self.ends:
            time.sleep(0 if self.engine.registers[CSTS] & 1 and not self.deaf else 0.0005)
            with self.lock:
                if not self.deaf:
                    self._look()

    def _look(self) -> None:
        engine = self.engine
        if (control := int(self.bar[reg.CC // 4])) != engine.registers[reg.CC]:
            for offset in (reg.AQA, reg.ASQ, reg.ASQ + 4, reg.ACQ, reg.ACQ + 4):
                engine.registers[offset] = int(self.bar[offset // 4])
            if control & 1:
                engine.write32(reg.CC, control)
            else:
                self._disabled()
            self.bar[CSTS // 4] = engine.registers[CSTS]
        rang = self.bar[self.bells]
        for k in np.flatnonzero(rang != self._rang):
            engine.write32(4 * int(self.bells[k]), int(rang[k]))
        self._rang = rang


def test_rings_of_kernels_over_vfio(kernel: FakeVfio) -> None:
    """Registers, doorbells, recovery by a reset of the function: all but the bus and the IOMMU."""
    items = np.arange(1 << 15)
    content = np.frombuffer(head_of(items.shape, items.dtype) + items.tobytes(), np.uint8)
    behind = Behind(kernel, content)
    transport = VfioTransport(ADDRESS, 1 << 23, kernel.machine)
    behind.engine.arena = transport.arena
    rows = np.random.default_rng(2).permutation(items.size)[:2000]
    out = np.zeros(rows.size, np.int64)
    with Drive(transport) as drive:
        with ww.open(drive.namespace(1), "r+", device="cpu", cache="64KiB", page_size=4096, timeout=HANG_SECONDS) as a:
            assert a.cache.controller.forwarder is not None
            read[rows.size](a, rows, out)
            assert np.array_equal(out, rows)
            write[rows.size](a, rows, -rows)
            a.flush()
            want = items.copy()
            want[rows] = -rows
            assert np.array_equal(behind.engine.blocks[DATA_AT:].view(np.int64), want)
            write[1](a, rows[:1], np.array([77]))
            behind.deaf = True  # it reports a failure, and does not even let itself be disabled
            behind.bar[CSTS // 4] |= 2
            drive.timeout = 0.1
            with pytest.raises(errors.DriveLostError, match="fatal error"):
                read[rows.size](a, rows, out)
            assert a.recover() == [] and "reset" in kernel.requests and kernel.command == 0x406
            read[rows.size](a, rows, out)
            want[rows[0]] = 77
            assert np.array_equal(out, want[rows])
        assert np.array_equal(behind.engine.blocks[DATA_AT:].view(np.int64), want)
    behind.ends = True
    behind.thread.join(HANG_SECONDS)
    transport.arena.close()
