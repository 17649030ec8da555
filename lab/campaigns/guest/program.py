"""What runs in the guest: drives are bound, used through VFIO and unbound; each check prints one line of JSON.

The drives are told apart by their serials: `free`, `busy`, `root`, `pair0` and `pair1` in one IOMMU group, and
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

# Commands import these when they run; modules that are imported here are packed.
for module in ("binding", "drive", "formatting", "machine", "opened", "superblock", "vfio"):
    importlib.import_module(f"warpwell.drives.{module}")
with Output(as_json=True).progress():
    pass  # for what rich imports then

COMMANDS = 10_000
SECONDS = 250
"""Of one check, at most: ten thousand commands take 25 s, and minutes on a busy machine."""
BLOCK = 4096

CHECKS: list[Callable[[], str]] = []
MACHINE = Machine()
_libc = ctypes.CDLL(None, use_errno=True)


def check(function: Callable[[], str]) -> Callable[[], str]:
    """Run a function as a check, in the order of the file; what it returns is told."""
    CHECKS.append(function)
    return function


def address(serial: str) -> str:
    """Return the address of a drive that the kernel's driver has."""
    return next(drive.address for drive in MACHINE.drives() if drive.serial == serial)


def node(serial: str) -> str:
    """Return the block device of a drive, in /dev."""
    return f"/dev/{MACHINE.drive(address(serial)).namespaces[0].name}"


def shell(command: str) -> None:
    """Run a command of busybox, which must succeed."""
    assert os.system(f"({command}) >/dev/null 2>&1") == 0, command


def refused(serial: str, *words: str) -> str:
    """Try to bind a drive that must be left alone; return what is said."""
    where = address(serial)
    with open(node(serial), "rb") as file:
        before = file.read(BLOCK)
    try:
        bind(where)
    except errors.DriveError as error:
        said = str(error)
        assert all(word in said for word in words), (words, said)
    else:
        raise AssertionError(f"{serial} was bound")
    assert MACHINE.driver(where) == "nvme"
    with open(node(serial), "rb") as file:
        assert file.read(BLOCK) == before
    return said


def eventually(done: Callable[[], bool], seconds: float = 10) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "it did not come to be"
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
    """Return how many accesses the IOMMU has refused, as the kernel's log tells."""
    return kernel_log().count("[fault reason")


def kernel_log() -> str:
    """Return the kernel's log."""
    descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    lines = []
    with contextlib.suppress(BlockingIOError):
        while True:
            lines.append(os.read(descriptor, 8192).decode(errors="replace"))
    os.close(descriptor)
    return "".join(lines)


# -- what must be left alone ----------------------------------------------------------------------------------------


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
    """A file system that only another container sees: no file tells of it, the claim fails."""
    ours, theirs = os.pipe()

    def elsewhere() -> None:
        new_namespace = 0x00020000
        assert _libc.unshare(new_namespace) == 0
        shell(f"mount --make-rprivate / && mount -t ext4 {node('busy')} /mnt")
        os.write(theirs, b"!")
        signal.pause()

    child = forked(elsewhere)
    os.read(ours, 1)
    try:
        return refused("busy", "is claimed")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ours)
        os.close(theirs)
        eventually(lambda: not claimed(node("busy")))


def claimed(path: str) -> bool:
    """Tell whether somebody has claimed a block device."""
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
    """A volume of the device mapper (LVM's are such), built as LVM builds them."""
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
    """Ask the device mapper (include/uapi/linux/dm-ioctl.h)."""
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
    """The disk that the kernel's command line names; its link is udev's."""
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
    """A drive that the kernel has is not opened, let alone bound."""
    try:
        VfioTransport(address("free"))
    except errors.DriveError as error:
        assert "warpwell drive bind" in str(error) and MACHINE.driver(address("free")) == "nvme"
        return str(error)
    raise AssertionError("it was opened")


# -- use ------------------------------------------------------------------------------------------------------------

FREE = ""


def content(lba: int, times: int) -> np.ndarray:
    """Return what a page has after it was written so many times."""
    return np.full(BLOCK // 8, lba * 1_000_003 + times, np.int64)


@check
def bound_by_the_command() -> str:
    """``warpwell drive bind``, and list before and after."""
    global FREE
    FREE = address("free")
    with open(node("free"), "r+b") as file:
        file.write(b"kernel's" * (BLOCK // 8))
        os.fsync(file.fileno())
    said = command("drive", "list")
    assert "free to bind" in said
    said += command("drive", "bind", FREE)
    assert MACHINE.driver(FREE) == "vfio-pci"
    own = json.loads(command("drive", "info", FREE, "--json"))["identity"]
    assert own["serial"] == "free" and f"no array of Warpwell's: nvme:{FREE}/1" in own["namespace 1"]
    return said


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
    """Ten thousand commands on random pages, each read checked."""
    before = faults()
    with opened() as drive:
        transport = drive.transport
        assert any(low <= transport.arena.address < high for low, high in transport.ranges), transport.ranges
        assert transport.arena.address >= 1 << 36  # not among the program's own
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
        said = (
            f"{drive!r}; {COMMANDS} commands in {seconds:.1f} s; IOVA ranges {transport.ranges}; arena at "
            f"{transport.arena.address:#x}"
        )
    assert faults() == before == 0
    return said


@check
def errors_of_the_drive() -> str:
    """A command that fails names drive, namespace, command and status; the drive goes on."""
    with opened() as drive:
        namespace = drive.namespace(1)
        namespace.blocks += 8
        try:
            namespace.read(namespace.blocks - 8, 8)
        except errors.DriveError as error:
            assert (error.drive, error.namespace, error.command) == (FREE, 1, "read") and error.status
            assert namespace.read(0, 8)[0] == 7
            return str(error)
    raise AssertionError("it was read")


@check
def one_program_at_a_time() -> str:
    """A second open, and unbind, are refused while a program has the drive."""
    said = []
    with opened():
        for attempt in (lambda: VfioTransport(FREE), lambda: unbind(FREE)):
            try:
                attempt()
            except errors.DriveError as error:
                said.append(str(error))
    assert len(said) == 2 and MACHINE.driver(FREE) == "vfio-pci"
    return "\n".join(said)


@check
def children() -> str:
    """A forked child cannot use the drive, and does not keep it busy when its parent has ended."""
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
    child, said = int(os.read(pids[0], 100)), os.read(says[0], 1000).decode()
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    with opened() as drive:
        assert drive.namespace(1).read(0, 8)[0] == 7
    os.kill(child, signal.SIGKILL)
    for each in (*pids, *says):
        os.close(each)
    return said


@check
def killed() -> str:
    """A program that is killed in the middle of writes leaves a drive that the next one can open."""

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
    """A reset stops the controller, its memory is free again, and it can be opened anew."""
    transport = VfioTransport(FREE, 1 << 20)
    drive = Drive(transport)
    transport.reset()
    try:
        drive.namespace(1)
    except errors.DriveLostError as error:
        said = str(error)
    else:
        raise AssertionError("it is not lost")
    with transport.despite_failure():
        assert transport.read32(CSTS) & 1 == 0
    drive.close()
    with opened() as again:
        assert again.namespace(1).read(0, 8)[0] == 7
    return said


@check
def nothing_left() -> str:
    """Opening fails or closes without leaving a descriptor or a mapping."""

    def state() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("vfio")

    with opened():
        assert state()[1]
    before = state()
    for _ in range(3):
        with opened():
            pass
        with contextlib.suppress(errors.ArgumentError):
            VfioTransport(FREE, 3 << 20)  # no power of two: found when group and container are open
    assert state() == before, (before, state())
    return str(before)


@check
def memory_limit() -> str:
    """The error for a user with a small limit names the limit."""
    ours, theirs = os.pipe()

    def open_with_little() -> None:
        os.chown(f"/dev/vfio/{MACHINE.drive(FREE).group}", 1000, -1)
        os.chmod("/dev/vfio/vfio", 0o666)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
        os.setuid(1000)
        try:
            VfioTransport(FREE, 8 << 20)
        except errors.DriveError as error:
            os.write(theirs, str(error).encode())
        with Drive(VfioTransport(FREE, 1 << 20)) as drive:
            drive.namespace(1).read(0, 8)
        os.write(theirs, b" and a small one opens")

    assert os.waitpid(forked(open_with_little), 0)[1] == 0
    said = os.read(ours, 4096).decode()
    assert "ulimit -l" in said and "opens" in said, said
    return said


@check
def wrong_addresses() -> str:
    """The IOMMU refuses what lies outside the arena, and the kernel's log tells: the only faults of this program."""
    assert faults() == 0
    with opened() as drive:
        with contextlib.suppress(errors.DriveError):
            drive._run(controller.identify(identify.CNS_CONTROLLER, drive.arena.address + (1 << 36)), "identify")
    assert faults() > 0
    return next(line for line in kernel_log().splitlines() if "[fault reason" in line)


@check
def given_back() -> str:
    """``warpwell drive unbind``: the kernel's driver works, and sees what was written."""
    said = command("drive", "unbind", FREE)
    assert MACHINE.driver(FREE) == "nvme"
    assert (MACHINE.device(FREE) / "driver_override").read_text().strip() == "(null)"
    eventually(lambda: bool(MACHINE.drive(FREE).namespaces) and os.path.exists(node("free")))
    with open(node("free"), "r+b", buffering=0) as file:
        assert file.read(BLOCK) == b"\7" * BLOCK
        file.seek(1 << 20)
        file.write(b"again" * 1000)
        os.fsync(file.fileno())
    shell(f"mke2fs {node('free')} && mount -t ext4 {node('free')} /mnt && umount /mnt")
    return said


@check
def formatted() -> str:
    """``warpwell drive format-array`` leaves a file system alone, and makes an array that any program reads."""
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
    said = command(*arguments)
    namespace, give_up = open_namespace(f"nvme:{FREE}/1")
    other, give_up_other = open_namespace(f"{FREE}/1")
    assert namespace.drive is other.drive  # a process opens a drive once
    give_up()
    assert np.load(io.BytesIO(other.read(2040, 1800).tobytes())).sum() == array.sum()
    give_up_other()
    command("drive", "unbind", FREE)
    eventually(lambda: bool(MACHINE.drive(FREE).namespaces) and os.path.exists(node("free")))
    with open(node("free"), "rb") as file:
        file.seek(255 * 4096)
        assert np.array_equal(np.load(file), array)
    return said


def too_long(*_: object) -> None:
    """Handle SIGALRM."""
    raise TimeoutError(f"a check took over {SECONDS} s")


def main() -> None:
    """Run all checks, or those that the kernel's command line names (checks=...)."""
    signal.signal(signal.SIGALRM, too_long)
    print(f"up for {Path('/proc/uptime').read_text().split()[0]} s", flush=True)
    only = re.search(r"checks=(\S+)", Path("/proc/cmdline").read_text())
    for function in CHECKS:
        if only and function.__name__ not in only[1].split(","):
            continue
        began = time.monotonic()
        signal.alarm(SECONDS)
        try:
            told = {"ok": True, "said": function()}
        except BaseException:
            told = {"ok": False, "said": traceback.format_exc()}
        signal.alarm(0)
        told |= {"check": function.__name__, "seconds": round(time.monotonic() - began, 2)}
        print(f"\n@@{json.dumps(told)}", flush=True)
    sys.exit(0)


if __name__ == "__main__":
    main()
