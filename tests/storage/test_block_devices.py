"""Arrays and media on block devices: loop devices, which need root."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.harness.descriptors import open_descriptors, until_closed
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from warpwell import errors
from warpwell.nvme import READ, WRITE
from warpwell.storage import FileMedium
from warpwell.testing.media import HostBytes, MediumConformance, drive

MIB = 1 << 20


def system(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    if done.returncode:
        pytest.skip(f"{command[0]}: {done.stderr.strip() or done.returncode}")
    return done.stdout.strip()


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Return a function that makes a loop device of a file."""
    if os.geteuid() != 0 or shutil.which("losetup") is None:
        pytest.skip("loop devices need root and losetup")
    made: list[str] = []

    def make(content: np.ndarray, *options: str) -> Path:
        file = tmp_path / f"disk-{len(made)}"
        content.tofile(file)
        made.append(system("losetup", "--show", "-f", *options, str(file)))
        return Path(made[-1])

    yield make
    for device in made:
        subprocess.run(["losetup", "-d", device], check=False, timeout=HANG_SECONDS)


class TestLoopDevice(MediumConformance):
    @pytest.fixture
    def medium(self, content: np.ndarray, tmp_path: Path, loop: Callable[..., Path]) -> Iterator[FileMedium]:  # type: ignore[override]
        self.loop = loop
        with self.make(content, tmp_path, True) as made:
            yield made

    @pytest.fixture(autouse=True)
    def loops(self, loop: Callable[..., Path]) -> None:
        self.loop = loop

    def make(self, content, folder, writable):
        padded = np.zeros(6 * 4096, np.uint8)
        padded[: content.size] = content
        return FileMedium(self.loop(padded), writable, nbytes=content.size)


@pytest.mark.parametrize("block", [512, 4096])
def test_blocks_of_both_sizes(loop: Callable[..., Path], block: int) -> None:
    items = np.arange(MIB // 8)
    device = loop(items, "-b", str(block))
    with FileMedium(device, True) as medium:
        assert medium.nbytes == MIB
        if medium.direct:
            assert medium.alignment == block
        buffer = HostBytes(8192)
        # smaller than a block, and unaligned in memory
        for offset, nbytes, at in ((512, 512, 0), (4096, 4096, 0), (4096, 4096, 520), (MIB - 512, 512, 0)):
            assert drive(medium, [(READ, offset, nbytes, buffer.address + at)]) == [0]
            got = buffer.bytes[at : at + nbytes].view(np.int64)
            assert (got == items[offset // 8 : (offset + nbytes) // 8]).all()
        data = HostBytes(8192, seed=5)
        assert drive(medium, [(WRITE, 1024, 512, data.address), (WRITE, 8192, 4096, data.address + 4096)]) == [0, 0]
        medium.sync()
        assert (medium.read(1024, 512) == data.bytes[:512]).all()
        assert (medium.read(8192, 4096) == data.bytes[4096:]).all()


def test_an_array_on_a_device(loop: Callable[..., Path]) -> None:
    items = np.arange(MIB // 4, dtype=np.int32)
    device = loop(items)
    with ww.open(device, "r+", dtype=np.int32, shape=(100, 300), offset=4096, device="cpu", cache="64KiB") as a:
        assert a.tier == "storage" and a[3, 4] == 1024 + 904
        with pytest.raises(errors.SharingError, match=r"is in use: .* by an array of this program"):
            ww.open(device, "r+", dtype=np.int32, device="cpu")
        a[3] = np.zeros(300, np.int32)
    with ww.open(str(device), dtype=np.int32, device="cpu") as a:
        assert a.tier == "storage" and a.shape == (MIB // 4,)
        items[1024 + 900 : 1024 + 1200] = 0
        assert (np.asarray(a) == items).all()


def test_devices_that_cannot_be_opened(loop: Callable[..., Path], tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(MIB // 8))
    device = loop(np.frombuffer((tmp_path / "a.npy").read_bytes()[:MIB], np.uint8))
    with pytest.raises(errors.ArgumentError, match="is a block device: pass dtype="):
        ww.open(device, device="cpu")
    with pytest.raises(errors.ArgumentError, match="a block device is read through a cache"):
        ww.open(device, dtype=np.int64, device="cpu", tier="mapped")
    before = open_descriptors()
    fixed = loop(np.zeros(MIB, np.uint8), "-r")
    with pytest.raises(errors.ReadOnlyError, match=f"{fixed} is a read-only device"):
        ww.open(fixed, "r+", dtype=np.int64, device="cpu")
    with ww.open(fixed, dtype=np.int64, device="cpu") as a:
        assert not np.asarray(a).any()
    system("losetup", "-d", str(fixed))
    with pytest.raises((errors.FormatError, OSError), match=r"no medium is in it|No such device"):
        ww.open(fixed, dtype=np.int64, device="cpu")
    until_closed(before)


def mounted(device: Path, at: Path) -> bool:
    done = subprocess.run(["mount", str(device), str(at)], capture_output=True, timeout=HANG_SECONDS, check=False)
    return done.returncode == 0


def test_a_mounted_device_is_not_written(loop: Callable[..., Path], tmp_path: Path) -> None:
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("there is no mkfs.ext4")
    device = loop(np.zeros(16 * MIB, np.uint8))
    system("mkfs.ext4", "-q", str(device))
    (tmp_path / "at").mkdir()
    system("mount", str(device), str(tmp_path / "at"))
    try:
        with pytest.raises(errors.SharingError, match=f"{device} is mounted at {tmp_path / 'at'}: .*open it with mode"):
            ww.open(device, "r+", dtype=np.uint8, device="cpu")
        with ww.open(device, dtype=np.uint16, device="cpu") as a:
            assert a[(1024 + 56) // 2] == 0xEF53  # the file system's magic number
    finally:
        subprocess.run(["umount", str(tmp_path / "at")], check=True, timeout=HANG_SECONDS)
    with ww.open(device, "r+", dtype=np.uint8, device="cpu"):
        assert not mounted(device, tmp_path / "at")  # the open array holds the device
    assert until(lambda: mounted(device, tmp_path / "at"))
    subprocess.run(["umount", str(tmp_path / "at")], check=True, timeout=HANG_SECONDS)
