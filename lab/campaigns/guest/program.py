"""The program in the guest: it binds, uses and unbinds drives through VFIO; each check prints one line of JSON.

The drives have the serials `free`, `busy`, `root`, `pair0` and `pair1` in one IOMMU group, and
`virtual`, which has a virtual function.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import io
import json
import os
import re
import resource
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.random

from warpwell import errors
from warpwell.cli import main as warpwell_command
from warpwell.cli._common import Output
from warpwell.drives import Drive, Machine, VfioTransport, bind, open_namespace, unbind
from warpwell.nvme import controller, identify
from warpwell.nvme.controller import CSTS

# Commands import these at run time. The initramfs contains the modules that are imported here.
for module in ("binding", "drive", "formatting", "machine", "opened", "superblock", "vfio"):
    importlib.import_module(f"warpwell.drives.{module}")
with Output(as_json=True).progress():
    pass  # rich imports modules at its first use

COMMANDS = 10_000
SECONDS = 250
"""Timeout of a check in seconds: 10,000 commands take 25 s, and minutes on a busy host."""
BLOCK = 4096

CHECKS: list[Callable[[], str]] = []
MACHINE = Machine()
_libc = ctypes.CDLL(None, use_errno=True)


def check(function: Callable[[], str]) -> Callable[[], str]:
    """Register a function as a check. Checks run in the order of the file, and their results are printed."""
    CHECKS.append(function)
    return function


def address(serial: str) -> str:
    """Return the address of a drive that is bound to the kernel's driver."""
    return next(drive.address for drive in MACHINE.drives() if drive.serial == serial)


def node(serial: str) -> str:
    """Return the block device of a drive, in /dev."""
    return f"/dev/{MACHINE.drive(address(serial)).namespaces[0].name}"


def shell(command: str) -> None:
    """Run a command of busybox, which must succeed."""
    assert os.system(f"({command}) >/dev/null 2>&1") == 0, command


def refused(serial: str, *fragments: str) -> str:
    """Try to bind a drive that is in use; return the error message."""
    where = address(serial)
    with open(node(serial), "rb") as file:
        before = file.read(BLOCK)
    try:
        bind(where)
    except errors.DriveError as error:
        message = str(error)
        assert all(fragment in message for fragment in fragments), (fragments, message)
    else:
        raise AssertionError(f"{serial} was bound")
    assert MACHINE.driver(where) == "nvme"
    with open(node(serial), "rb") as file:
        assert file.read(BLOCK) == before
    return message


def eventually(done: Callable[[], bool], seconds: float = 10) -> None:
    """Wait until a condition is true."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.02)


def forked(function: Callable[[], object]) -> int:
    """Run a function in a child; return its process id."""
    child = os.fork()
    if child == 0:
        try:
            function()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return child


def faults() -> int:
    """Return the number of accesses that the IOMMU has refused, from the kernel's log."""
    return kernel_log().count("[fault reason")


def kernel_log() -> str:
    """Return the kernel's log."""
    descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    records = []
    with contextlib.suppress(BlockingIOError):
        while True:
            records.append(os.read(descriptor, 8192).decode(errors="replace"))
    os.close(descriptor)
    return "".join(records)


# -- drives that must not be bound -------------------------------------------------------------------------------------


@check
def mounted() -> str:
    """A file system."""
    shell(f"mke2fs {node('busy')} && mount -t ext4 {node('busy')} /mnt")
    try:
        return refused("busy", "is mounted at /mnt")
    finally:
        shell("umount /mnt")


@check
def mounted_elsewhere() -> str:
    """A file system that only another container sees: no file shows it, but claiming the device fails."""
    read_end, write_end = os.pipe()

    def elsewhere() -> None:
        new_namespace = 0x00020000
        assert _libc.unshare(new_namespace) == 0
        shell(f"mount --make-rprivate / && mount -t ext4 {node('busy')} /mnt")
        os.write(write_end, b"!")
        signal.pause()

    child = forked(elsewhere)
    os.read(read_end, 1)
    try:
        return refused("busy", "is claimed")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read_end)
        os.close(write_end)
        eventually(lambda: not claimed(node("busy")))


def claimed(path: str) -> bool:
    """Return True if a block device is claimed."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_EXCL))
    except OSError:
        return True
    return False


@check
def swap() -> str:
    """Swap space."""
    shell(f"mkswap {node('busy')} && swapon {node('busy')}")
    try:
        return refused("busy", "is swap space")
    finally:
        shell(f"swapoff {node('busy')}")


@check
def held() -> str:
    """A volume of the device mapper, created as LVM creates its volumes."""
    name = os.path.basename(node("busy"))
    number = [int(n) for n in Path(f"/sys/class/block/{name}/dev").read_text().split(":")]
    mapper(3, uuid="LVM-guest")  # create
    table = struct.pack("=QQiI16s", 0, 2048, 0, 0, b"linear") + f"{number[0]}:{number[1]} 0".encode().ljust(24, b"\0")
    mapper(9, table)  # load
    mapper(6)  # resume
    try:
        return refused("busy", f"{name} is held by dm-0 (LVM: vg-data)")
    finally:
        mapper(4)  # remove


def mapper(command: int, table: bytes = b"", uuid: str = "") -> None:
    """Send a command to the device mapper (include/uapi/linux/dm-ioctl.h)."""
    packed = bytearray(16384)
    struct.pack_into("=3IIIIiIIIQ", packed, 0, 4, 0, 0, len(packed), 312, int(bool(table)), 0, 0, 0, 0, 0)
    packed[48 : 48 + 7] = b"vg-data"
    if uuid:
        packed[176 : 176 + len(uuid)] = uuid.encode()
    packed[312 : 312 + len(table)] = table
    with open("/dev/mapper/control", "rb") as control:
        fcntl.ioctl(control, 3 << 30 | 312 << 16 | 0xFD << 8 | command, packed)


@check
def open_in_a_program() -> str:
    """A program that reads the raw device, without a claim."""
    with open(node("busy"), "rb"):
        return refused("busy", f"is open in process {os.getpid()}")


@check
def root_disk() -> str:
    """The disk that the kernel's command line names, by a link as udev creates it."""
    os.makedirs("/dev/disk/by-uuid")
    os.symlink(node("root"), "/dev/disk/by-uuid/cafe")
    return refused("root", "is the root disk")


@check
def group_not_viable() -> str:
    """Two drives in one IOMMU group."""
    return refused("pair0", "is not viable", f"{address('pair1')} (nvme)")


@check
def virtual_functions() -> str:
    """A drive with an active virtual function."""
    path = MACHINE.device(address("virtual")) / "sriov_numvfs"
    path.write_text("1")
    try:
        return refused("virtual", "1 virtual functions are active")
    finally:
        path.write_text("0")


@check
def not_bound() -> str:
    """A drive of the kernel's driver is not opened, and stays bound to it."""
    try:
        VfioTransport(address("free"))
    except errors.DriveError as error:
        assert "warpwell drive bind" in str(error) and MACHINE.driver(address("free")) == "nvme"
        return str(error)
    raise AssertionError("the drive was opened")


# -- use ------------------------------------------------------------------------------------------------------------

FREE = ""


def content(lba: int, times: int) -> np.ndarray:
    """Return the content of a page after it was written `times` times."""
    return np.full(BLOCK // 8, lba * 1_000_003 + times, np.int64)


@check
def bound_by_the_command() -> str:
    """``warpwell drive bind``, with ``list`` before and after it."""
    global FREE
    FREE = address("free")
    with open(node("free"), "r+b") as file:
        file.write(b"kernel's" * (BLOCK // 8))
        os.fsync(file.fileno())
    message = command("drive", "list")
    assert "free to bind" in message
    message += command("drive", "bind", FREE)
    assert MACHINE.driver(FREE) == "vfio-pci"
    own = json.loads(command("drive", "info", FREE, "--json"))["identity"]
    assert own["serial"] == "free" and f"no array of Warpwell's: nvme:{FREE}/1" in own["namespace 1"]
    return message


def command(*arguments: str) -> str:
    """Run a command of warpwell in this process; return what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert warpwell_command(arguments) == 0
    return out.getvalue()


@contextlib.contextmanager
def opened() -> Iterator[Drive]:
    """Open the drive that was bound."""
    with Drive(VfioTransport(FREE, 8 << 20)) as drive:
        yield drive


@check
def reads_and_writes() -> str:
    """10,000 commands on random pages; every read is compared."""
    before = faults()
    with opened() as drive:
        transport = drive.transport
        assert any(low <= transport.arena.address < high for low, high in transport.ranges), transport.ranges
        assert transport.arena.address >= 1 << 36  # outside the address space of the program
        namespace = drive.namespace(1)
        step = BLOCK // namespace.block
        assert namespace.read(0, step).tobytes() == b"kernel's" * (BLOCK // 8)
        pages = 512
        times = np.zeros(pages, int)
        random = np.random.default_rng(1)
        began = time.monotonic()
        for page in range(pages):
            namespace.write(page * step, content(page, 0))
        for page in random.integers(0, pages, COMMANDS - pages):
            if random.random() < 0.5:
                times[page] += 1
                namespace.write(int(page) * step, content(page, times[page]))
            else:
                read = namespace.read(int(page) * step, step).view(np.int64)
                assert (read == content(page, times[page])).all(), page
        seconds = time.monotonic() - began
        for first in range(0, pages, 32):  # 128 KiB each: by a PRP list
            read = namespace.read(first * step, 32 * step).view(np.int64).reshape(32, -1)
            assert all((read[k] == content(first + k, times[first + k])).all() for k in range(32))
        namespace.flush()
        namespace.write(0, np.full(BLOCK, 7, np.uint8))
        namespace.flush()
        message = (
            f"{drive!r}; {COMMANDS} commands in {seconds:.1f} s; IOVA ranges {transport.ranges}; arena at "
            f"{transport.arena.address:#x}"
        )
    assert faults() == before == 0
    return message


@check
def errors_of_the_drive() -> str:
    """The error of a failed command names drive, namespace, command and status; the drive still works."""
    with opened() as drive:
        namespace = drive.namespace(1)
        namespace.blocks += 8
        try:
            namespace.read(namespace.blocks - 8, 8)
        except errors.DriveError as error:
            assert (error.drive, error.namespace, error.command) == (FREE, 1, "read") and error.status
            assert namespace.read(0, 8)[0] == 7
            return str(error)
    raise AssertionError("the read succeeded")


@check
def one_program_at_a_time() -> str:
    """A second open and an unbind are refused while a program has the drive open."""
    messages = []
    with opened():
        for attempt in (lambda: VfioTransport(FREE), lambda: unbind(FREE)):
            try:
                attempt()
            except errors.DriveError as error:
                messages.append(str(error))
    assert len(messages) == 2 and MACHINE.driver(FREE) == "vfio-pci"
    return "\n".join(messages)


@check
def children() -> str:
    """A forked child cannot use the drive, and does not block it after its parent has ended."""
    pids, says = os.pipe(), os.pipe()

    def use() -> None:
        drive = Drive(VfioTransport(FREE, 1 << 20))

        def use_again() -> None:
            try:
                drive.transport.read32(CSTS)
            except errors.ForkError as error:
                os.write(says[1], str(error).encode())
            drive.close()
            signal.pause()

        os.write(pids[1], str(forked(use_again)).encode())
        signal.pause()

    parent = forked(use)
    child, message = int(os.read(pids[0], 100)), os.read(says[0], 1000).decode()
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    with opened() as drive:
        assert drive.namespace(1).read(0, 8)[0] == 7
    os.kill(child, signal.SIGKILL)
    for each in (*pids, *says):
        os.close(each)
    return message


@check
def killed() -> str:
    """After a program was killed during writes, the next program can open the drive."""

    def write() -> None:
        with opened() as drive:
            namespace = drive.namespace(1)
            while True:
                namespace.write(8, np.full(BLOCK, 9, np.uint8))

    for _ in range(3):
        child = forked(write)
        time.sleep(0.5)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with opened() as drive:
            assert drive.namespace(1).read(0, 8)[0] == 7
    assert faults() == 0
    return "3 times"


@check
def reset() -> str:
    """A reset stops the controller and frees its memory, and the drive can be opened again."""
    transport = VfioTransport(FREE, 1 << 20)
    drive = Drive(transport)
    transport.reset()
    try:
        drive.namespace(1)
    except errors.DriveLostError as error:
        message = str(error)
    else:
        raise AssertionError("the drive is not lost")
    with transport.despite_failure():
        assert transport.read32(CSTS) & 1 == 0
    drive.close()
    with opened() as again:
        assert again.namespace(1).read(0, 8)[0] == 7
    return message


@check
def nothing_left() -> str:
    """A failed open and a close leave no descriptor and no mapping."""

    def state() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("vfio")

    with opened():
        assert state()[1]
    before = state()
    for _ in range(3):
        with opened():
            pass
        with contextlib.suppress(errors.ArgumentError):
            VfioTransport(FREE, 3 << 20)  # not a power of two, which is found after group and container were opened
    assert state() == before, (before, state())
    return str(before)


@check
def memory_limit() -> str:
    """The error for a user with a small limit names the limit."""
    read_end, write_end = os.pipe()

    def open_with_little() -> None:
        os.chown(f"/dev/vfio/{MACHINE.drive(FREE).group}", 1000, -1)
        os.chmod("/dev/vfio/vfio", 0o666)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
        os.setuid(1000)
        try:
            VfioTransport(FREE, 8 << 20)
        except errors.DriveError as error:
            os.write(write_end, str(error).encode())
        with Drive(VfioTransport(FREE, 1 << 20)) as drive:
            drive.namespace(1).read(0, 8)
        os.write(write_end, b" and a small one opens")

    assert os.waitpid(forked(open_with_little), 0)[1] == 0
    message = os.read(read_end, 4096).decode()
    assert "ulimit -l" in message and "opens" in message, message
    return message


@check
def wrong_addresses() -> str:
    """The IOMMU refuses an access outside the arena, and the kernel logs it: the only faults of this program."""
    assert faults() == 0
    with opened() as drive:
        with contextlib.suppress(errors.DriveError):
            drive._run(controller.identify(identify.CNS_CONTROLLER, drive.arena.address + (1 << 36)), "identify")
    assert faults() > 0
    return next(line for line in kernel_log().splitlines() if "[fault reason" in line)


@check
def given_back() -> str:
    """``warpwell drive unbind``: the kernel's driver works, and reads the written pages."""
    message = command("drive", "unbind", FREE)
    assert MACHINE.driver(FREE) == "nvme"
    assert (MACHINE.device(FREE) / "driver_override").read_text().strip() == "(null)"
    eventually(lambda: bool(MACHINE.drive(FREE).namespaces) and os.path.exists(node("free")))
    with open(node("free"), "r+b", buffering=0) as file:
        assert file.read(BLOCK) == b"\7" * BLOCK
        file.seek(1 << 20)
        file.write(b"again" * 1000)
        os.fsync(file.fileno())
    shell(f"mke2fs {node('free')} && mount -t ext4 {node('free')} /mnt && umount /mnt")
    return message


@check
def formatted() -> str:
    """``warpwell drive format-array`` refuses a file system, and creates an array that any program can read."""
    np.save("/tmp/a.npy", array := np.arange(100_000).reshape(1000, 100))
    arguments = ["drive", "format-array", f"{FREE}/1", "--from", "/tmp/a.npy", "--yes-destroy-data", "free/1"]
    command("drive", "bind", FREE)
    with contextlib.redirect_stderr(io.StringIO()) as refused:
        assert warpwell_command(arguments) == 2
    assert "was left alone" in refused.getvalue(), refused.getvalue()
    command("drive", "unbind", FREE)
    eventually(lambda: bool(MACHINE.drive(FREE).namespaces) and os.path.exists(node("free")))
    shell(f"mount -t ext4 {node('free')} /mnt && umount /mnt && dd if=/dev/zero of={node('free')} bs=1M count=64")
    command("drive", "bind", FREE)
    message = command(*arguments)
    namespace, give_up = open_namespace(f"nvme:{FREE}/1")
    same, give_up_other = open_namespace(f"{FREE}/1")
    assert namespace.drive is same.drive  # a process opens a drive once
    give_up()
    assert np.load(io.BytesIO(same.read(2040, 1800).tobytes())).sum() == array.sum()
    give_up_other()
    command("drive", "unbind", FREE)
    eventually(lambda: bool(MACHINE.drive(FREE).namespaces) and os.path.exists(node("free")))
    with open(node("free"), "rb") as file:
        file.seek(255 * 4096)
        assert np.array_equal(np.load(file), array)
    return message


def too_long(*_: object) -> None:
    """Handle SIGALRM."""
    raise TimeoutError(f"a check took over {SECONDS} s")


def main() -> None:
    """Run all checks, or the checks that the kernel's command line names (checks=...)."""
    signal.signal(signal.SIGALRM, too_long)
    print(f"up for {Path('/proc/uptime').read_text().split()[0]} s", flush=True)
    only = re.search(r"checks=(\S+)", Path("/proc/cmdline").read_text())
    for function in CHECKS:
        if only and function.__name__ not in only[1].split(","):
            continue
        began = time.monotonic()
        signal.alarm(SECONDS)
        try:
            result = {"ok": True, "said": function()}
        except BaseException:
            result = {"ok": False, "said": traceback.format_exc()}
        signal.alarm(0)
        result |= {"check": function.__name__, "seconds": round(time.monotonic() - began, 2)}
        print(f"\n@@{json.dumps(result)}", flush=True)
    sys.exit(0)


if __name__ == "__main__":
    main()
