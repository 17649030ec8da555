"""A drive that is killed, stopped, full or broken: flushed data survive, errors report it, and nothing hangs."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from tests.harness.arrays import kernels
from tests.harness.drives import needs_qemu, set_timeout
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from lab.campaigns import drive_losses
from lab.campaigns.drive_losses import Campaign, Opener, by_medium, by_rings
from lab.drives import nbd
from lab.drives.nbd import NbdServer
from lab.drives.qemu import QemuDrive, QemuNamespace
from warpwell import errors
from warpwell.drives import DriveMedium
from warpwell.drives.medium import NamespaceMedium
from warpwell.nvme import ABORTED_BY_HOST, READ, UNRECOVERED_READ_ERROR, WRITE, WRITE_FAULT
from warpwell.queues import layout as at
from warpwell.storage.striped import Replicated, Striped
from warpwell.targets.memory import view_of
from warpwell.testing.media import FILL, HostBytes, drive

pytestmark = needs_qemu
NBYTES = 1 << 20


@pytest.fixture
def content() -> np.ndarray:
    return np.random.default_rng(5).integers(1, 256, NBYTES, np.uint8)


@pytest.fixture
def disk(content: np.ndarray) -> Iterator[NbdServer]:
    with NbdServer(content) as made:
        yield made


@pytest.fixture
def qemu(disk: NbdServer) -> Iterator[QemuDrive]:
    with QemuDrive([QemuNamespace(backend=disk.backend)], seconds=HANG_SECONDS) as made:
        yield made


@pytest.fixture
def medium(qemu: QemuDrive) -> Iterator[DriveMedium]:
    with qemu.open() as opened, DriveMedium(opened.namespace(1), seconds=HANG_SECONDS) as made:
        yield made


# -- kills ------------------------------------------------------------------------------------------------------------


each_opener = pytest.mark.parametrize("opener", [pytest.param(by_medium, marks=pytest.mark.slow), by_rings])


def kill_and_look(runs: int, seed: int, opener: Opener) -> None:
    dropped = 0
    for attempt in range(5):  # on a busy machine, a kill may come before the drive has unflushed sectors
        outcome = Campaign(seed + 100 * attempt, opener).run(runs)
        assert outcome.lost == []
        assert outcome.runs == runs <= outcome.flushes
        dropped = max(dropped, outcome.dropped)
        if dropped > 10 * runs:
            break
    assert dropped > 10 * runs


@each_opener
def test_kills_lose_nothing_that_was_flushed(opener: Opener) -> None:
    kill_and_look(8, seed=1, opener=opener)


@each_opener
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_kills_lose_nothing_that_was_flushed(opener: Opener) -> None:
    kill_and_look(200, seed=2, opener=opener)


@each_opener
def test_a_sync_without_flush_is_found(monkeypatch: pytest.MonkeyPatch, opener: Opener) -> None:
    monkeypatch.setattr(DriveMedium if opener is by_medium else NamespaceMedium, "sync", lambda self: None)
    assert Campaign(seed=1, opened=opener).run(3).lost


def test_a_kill_ends_a_launch_that_waits_for_a_silent_disk(disk: NbdServer, qemu: QemuDrive) -> None:
    """Nothing is stored to a register meanwhile: only the watch can see that QEMU has ended."""
    with qemu.open() as opened, DriveMedium(opened.namespace(1), seconds=HANG_SECONDS) as medium:
        with ww.open(medium, **drive_losses.OPTIONS) as array:
            index = np.arange(0, 65536, 512)
            out = np.zeros(index.size, np.int64)
            kernels.read[1](array, index[:1], out)  # compiled
            disk.answering.clear()
            timer = threading.Timer(0.2, qemu.kill)
            timer.start()
            with pytest.raises(errors.DriveError, match=r"qemu:\d+ is lost: its QEMU has ended.*qemu:\d+/1"):
                kernels.read[index.size](array, index, out)
            timer.join(HANG_SECONDS)
            disk.answering.set()
            for call in (medium.sync, lambda: medium.read(0, 512), lambda: medium.write(0, index)):
                with pytest.raises(errors.DriveError, match="is lost"):
                    call()
            assert medium.failure() is not None and "is lost" in (medium.last_error() or "")


# -- QEMU is stopped --------------------------------------------------------------------------------------------------


def test_a_drive_that_comes_back_late_writes_to_quarantined_memory_alone(
    disk: NbdServer, qemu: QemuDrive, medium: DriveMedium, content: np.ndarray
) -> None:
    buffers = [HostBytes(8192) for _ in range(40)]
    disk.answering.clear()
    medium.seconds = 1.0
    set_timeout(medium.namespace.drive, 0.5)
    timer = threading.Timer(0.1, qemu.stop)
    timer.start()
    requests = [(READ, 8192 * k, 8192, b.address) for k, b in enumerate(buffers)]
    assert drive(medium, requests) == [ABORTED_BY_HOST] * 40
    with pytest.raises(errors.DriveLostError, match="not completed within"):
        medium.sync()
    disk.answering.set()
    timer.join()  # a later stop would last
    qemu.cont()
    pairs = medium._pairs
    records = pairs._device.words[: pairs.count * at.Q_WORDS].reshape(-1, at.Q_WORDS)
    staged = [view_of(int(first), pairs.ids * pairs.staging_bytes, np.uint8) for first in records[:, at.Q_STAGING]]
    assert until(lambda: any(data.any() for data in staged))  # the drive runs again, and carries out the old reads
    time.sleep(0.05)
    assert all((b.bytes == FILL).all() for b in buffers)
    assert drive(medium, requests[:1]) == [ABORTED_BY_HOST]
    late_data = {content[at : at + 8192].tobytes() for at in range(0, NBYTES, 8192)}
    assert any(data[at : at + 8192].tobytes() in late_data for data in staged for at in range(0, data.size, 64 << 10))


def test_a_short_stop_is_waited_for(qemu: QemuDrive, medium: DriveMedium, content: np.ndarray) -> None:
    buffers = [HostBytes(4096) for _ in range(300)]  # more reads than command ids
    qemu.stop()
    threading.Timer(0.2, qemu.cont).start()
    assert drive(medium, [(READ, 512 * k, 4096, b.address) for k, b in enumerate(buffers)]) == [0] * 300
    for k, buffer in enumerate(buffers):
        assert np.array_equal(buffer.bytes, content[512 * k :][:4096])


# -- errors of the disk -----------------------------------------------------------------------------------------------


def test_an_error_that_stays_is_reported_after_some_retries(disk: NbdServer, medium: DriveMedium) -> None:
    buffer = HostBytes(4096)
    disk.fault = lambda kind, at, size: errno.EIO if kind == nbd.READ and at <= 8192 < at + size else 0
    assert drive(medium, [(READ, 8192, 4096, buffer.address), (READ, 4096, 4096, buffer.address)]) == [0x281, 0]
    assert medium.retried == 3 and medium.failure() is None
    with pytest.raises(errors.MediumError, match=r"qemu:\d+: namespace 1: read .*unrecovered read error") as caught:
        medium.read(8192, 4096)
    assert caught.value.status == UNRECOVERED_READ_ERROR and caught.value.lba == 16
    with ww.open(medium, **drive_losses.OPTIONS) as array:
        with pytest.raises(errors.MediumError, match=r"page 2 .*unrecovered read error"):
            kernels.read[1](array, np.array([1024]), np.zeros(1, np.int64))


def test_an_error_that_passes_is_not_seen(disk: NbdServer, medium: DriveMedium, content: np.ndarray) -> None:
    failed = set()

    def once(kind: int, at: int, size: int) -> int:
        first = (kind, at) not in failed
        failed.add((kind, at))
        return errno.EIO if first and kind in (nbd.READ, nbd.WRITE) else 0

    disk.fault = once
    data = HostBytes(70000 // 512 * 512, seed=3)
    buffer = HostBytes(data.bytes.size)
    assert drive(medium, [(WRITE, 0, data.bytes.size, data.address)]) == [0]
    assert drive(medium, [(READ, 0, data.bytes.size, buffer.address)]) == [0]
    assert np.array_equal(buffer.bytes, data.bytes) and medium.retried >= 4


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EPERM, errno.EIO])
def test_a_disk_that_takes_no_writes(disk: NbdServer, medium: DriveMedium, code: int) -> None:
    """QEMU reports a full disk, and one that is read-only, as a write fault."""
    disk.fault = lambda kind, at, size: code if kind == nbd.WRITE else 0
    data = HostBytes(4096, seed=1)
    assert drive(medium, [(WRITE, 0, 4096, data.address)]) == [WRITE_FAULT]
    with pytest.raises(errors.MediumError, match="write of 8 blocks from 0 failed: write fault"):
        medium.write(0, data.bytes)
    with ww.open(medium, "r+", **drive_losses.OPTIONS) as array:
        kernels.write[1](array, np.array([0]), np.array([7]))
        with pytest.raises(errors.MediumError, match=r"page 0.*write fault"):
            array.flush()
        disk.fault = None
        array.flush()
    assert disk.contents()[:8].view(np.int64)[0] == 7


def test_a_failed_flush_is_a_loss(disk: NbdServer, medium: DriveMedium) -> None:
    disk.fault = lambda kind, at, size: errno.EIO if kind == nbd.FLUSH else 0
    with ww.open(medium, "r+", **drive_losses.OPTIONS) as array:
        kernels.write[1](array, np.array([0]), np.array([7]))
        for _ in range(2):
            with pytest.raises(errors.DriveLostError, match=r"flush failed.*may be lost"):
                array.flush()
        disk.fault = None
        for item in (0, 9999):  # one item in the cache, one not
            with pytest.raises(errors.DriveLostError):
                kernels.read[1](array, np.array([item]), np.zeros(1, np.int64))
            with pytest.raises(errors.DriveLostError):
                kernels.write[1](array, np.array([item]), np.array([8]))
        with pytest.raises(errors.DriveError):
            array.close()


# -- two drives -------------------------------------------------------------------------------------------------------


def test_a_replica_goes_on_when_one_drive_dies(content: np.ndarray) -> None:
    with (
        NbdServer(content) as disk,
        NbdServer(content) as two,
        QemuDrive([QemuNamespace(backend=disk.backend)]) as first,
        first.open() as a,
        QemuDrive([QemuNamespace(backend=two.backend)]) as second,
        second.open() as b,
    ):
        media = [DriveMedium(d.namespace(1), queues=1) for d in (a, b)]
        with Replicated(media) as pair:
            assert pair.emulated and "QEMU" in pair.description
            first.kill()
            buffers = [HostBytes(4096) for _ in range(20)]
            assert drive(pair, [(READ, 4096 * k, 4096, x.address) for k, x in enumerate(buffers)]) == [0] * 20
            assert all(np.array_equal(x.bytes, content[4096 * k :][:4096]) for k, x in enumerate(buffers))
            assert np.array_equal(pair.read(0, 4096), content[:4096])
            assert pair.failure() is None
            with pytest.raises(errors.DriveError):
                pair.write(0, content[:512])
            second.kill()
            assert drive(pair, [(READ, 0, 4096, buffers[0].address)]) == [ABORTED_BY_HOST]
            assert isinstance(pair.failure(), errors.DriveLostError)
            assert isinstance(Striped(media, 4096).failure(), errors.DriveLostError)


# -- opening and closing ----------------------------------------------------------------------------------------------


def test_closing_gives_back_queues_and_threads(qemu: QemuDrive) -> None:
    with qemu.open(queues=3) as opened:
        before = set(threading.enumerate())
        for _ in range(3):
            medium = DriveMedium(opened.namespace(1), queues=8)
            assert medium.queues == 3 and "3 queues of 64" in medium.description and medium.native().complete
            with pytest.raises(errors.DriveError, match="grants 3 I/O queues"):
                DriveMedium(opened.namespace(1))
            medium.close()
            medium.close()
        assert not set(threading.enumerate()) - before  # idle I/O threads of earlier tests may end
        with pytest.raises(errors.ArgumentError, match="power of two"):
            DriveMedium(opened.namespace(1), depth=100)
        DriveMedium(opened.namespace(1), queues=3).close()


def test_pages_hold_whole_blocks() -> None:
    with QemuDrive([QemuNamespace("1MiB", block=4096)]) as qemu, qemu.open() as opened:
        with DriveMedium(opened.namespace(1)) as medium:
            with pytest.raises(errors.ArgumentError, match="blocks of 4096 bytes, but a page has 512"):
                ww.open(medium, dtype="u1", device="cpu", page_size=512, cache=4096)
            with pytest.raises(errors.ArgumentError, match="stripe_bytes must be a multiple of 4096"):
                Striped([medium], 512)
            data = HostBytes(4096)
            assert drive(medium, [(READ, 512, 512, data.address)]) == [0x002]
