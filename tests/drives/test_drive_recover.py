"""Restart of a lost drive in the process: flushed data survive, other data survive or are reported as doubtful."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.harness.arrays.kernels import read, write
from tests.harness.drives import needs_qemu, set_timeout
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from lab.campaigns.drive_losses import Comeback
from lab.drives.qemu import QemuDrive, QemuNamespace
from warpwell import errors
from warpwell.cache import written
from warpwell.drives import Drive, DriveMedium
from warpwell.drives.medium import NamespaceMedium
from warpwell.drives.superblock import head_of
from warpwell.nvme import controller as reg

pytestmark = needs_qemu

ITEMS = 1 << 15
DATA = np.arange(ITEMS)
PAGE = 512
"""Items of a page."""
OPTIONS = {"device": "cpu", "page_size": 4096, "cache": "64KiB", "timeout": HANG_SECONDS}


@pytest.fixture
def qemu(tmp_path) -> Iterator[QemuDrive]:
    image = tmp_path / "disk"
    image.write_bytes(head_of(DATA.shape, DATA.dtype) + DATA.tobytes() + bytes(1 << 16))
    second = tmp_path / "second"
    second.write_bytes(image.read_bytes())
    with QemuDrive([QemuNamespace(path=image), QemuNamespace(path=second)], seconds=HANG_SECONDS, queues=6) as made:
        yield made


@pytest.fixture
def drive(qemu: QemuDrive) -> Iterator[Drive]:
    with qemu.open() as made:
        yield made


def opened(drive: Drive, mode: str = "r", nsid: int = 1, **options) -> ww.Array:
    return ww.open(drive.namespace(nsid), mode, **{**OPTIONS, **options})


def values(a: ww.Array, rows: np.ndarray) -> np.ndarray:
    out = np.full(rows.size, -1)
    read[rows.size](a, rows, out)
    return out


def lose(drive: Drive, a: ww.Array | None = None) -> None:
    """Reset the controller without Warpwell's knowledge, and have a command fail."""
    drive.transport.write32(reg.CC, 0)
    with pytest.raises(errors.DriveLostError, match="has reset it"):
        drive.transport.examine()
    if a is not None:
        with pytest.raises(errors.DriveLostError, match=r"recover\(\) on the array"):
            values(a, np.array([0]))


# -- surviving and doubtful data --------------------------------------------------------------------------------


def test_losses_lose_nothing_that_was_flushed_and_name_what_they_may_have_lost() -> None:
    outcome = Comeback(3).run(12)
    assert outcome.lost == [] and outcome.runs == 12
    assert outcome.dropped > 100 and outcome.doubtful > 100, outcome  # the test has provoked losses


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_losses() -> None:
    outcome = Comeback(4).run(200)
    assert outcome.lost == [] and outcome.runs == 200


def test_a_loss_that_is_not_told_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "ranges_of", lambda pages: [])
    assert Comeback(3).run(6).lost


def test_pages_in_doubt_are_named_until_that_is_accepted(drive: Drive) -> None:
    with opened(drive, "r+") as a:
        reopened = opened(drive, "r+", nsid=2, cache=a.cache, page_size=None, timeout=None)
        rows = np.array([3, 4, 5, 9]) * PAGE
        write[4](a, rows, -rows)
        a.flush()
        write[4](a, rows + 1, -rows - 1)
        a.evict(3 * PAGE, 5 * PAGE)  # written, and not flushed
        lose(drive, a)
        doubtful = a.recover()
        first = doubtful[0].start
        # the array does not begin at the beginning of a page
        assert len(doubtful) == 1 and first <= 3 * PAGE and 5 * PAGE <= doubtful[0].stop <= first + 3 * PAGE
        with pytest.raises(errors.DriveLostError, match=r"accept_loss=True"):
            values(a, rows)
        with pytest.raises(errors.DriveLostError, match=r"accept_loss=True"):
            ww.gather(a, rows).result()
        with pytest.raises(errors.DriveLostError, match=r"its pages \d+-\d+ of 4096 bytes"):
            a.flush()  # flush() writes the dirty pages that it still has, then raises
        assert np.array_equal(values(reopened, rows), rows) and reopened.recover() == []
        with pytest.raises(errors.ArgumentError, match="on the array itself"):
            a[: 2 * PAGE].recover(accept_loss=True)  # a part of the array would forget losses outside of it
        assert a.reshape(-1, 2).recover()[0].start == first // 2
        assert a.recover(accept_loss=True) == doubtful and a.recover() == []
        assert np.array_equal(values(a, rows), -rows)
        a.flush()
        a.evict()
        assert values(a, rows + 1)[-1] == -rows[-1] - 1
        reopened.close()


def test_a_flush_does_not_acknowledge_what_another_generation_has_taken(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread recovers the drive between the writes of a flush and its Flush, which would succeed."""
    with opened(drive, "r+") as a:
        write[1](a, np.array([7]), np.array([70]))
        sync = NamespaceMedium.sync

        def meanwhile(medium: NamespaceMedium) -> None:
            monkeypatch.setattr(NamespaceMedium, "sync", sync)
            lose(drive)
            drive.recover()
            sync(medium)

        monkeypatch.setattr(NamespaceMedium, "sync", meanwhile)
        with pytest.raises(errors.DriveLostError, match="started again since"):
            a.flush()
        assert a.recover() == []  # it is in the cache
        written_before = a.stats.writebacks
        a.flush()
        assert a.stats.writebacks == written_before + 1


# -- objects from before the loss --------------------------------------------------------------------------------------


def test_each_cache_is_recovered_by_itself(drive: Drive) -> None:
    first, second, third = (opened(drive, nsid=k, queues=1) for k in (1, 2, 1))
    rows = np.arange(0, ITEMS, 999)
    values(first, rows)
    lose(drive, first)
    assert first.recover() == []
    for _ in range(2):
        with pytest.raises(errors.DriveLostError, match="was lost"):
            values(second, rows)
        assert np.array_equal(values(first, rows), rows)  # the failure did not lose the drive again
    spare = drive.spare_queues
    third.close()  # the ids of its old queues now belong to other queues
    assert drive.spare_queues == spare and drive.failure is None
    assert second.recover() == [] and np.array_equal(values(second, rows), rows)
    assert np.array_equal(values(first, rows[::-1].copy()), rows[::-1])
    second.close()
    first.close()


def test_namespaces_queues_and_media_of_before_refuse(drive: Drive) -> None:
    space, queue = drive.namespace(1), drive.host_queue()
    medium = DriveMedium(drive.namespace(2), queues=1)
    a = ww.open(medium, "r", dtype=np.int64, **OPTIONS)
    rows = np.arange(0, ITEMS, 999)
    before = values(a, rows)
    lose(drive)
    drive.recover()
    drive.recover()  # nothing to do
    assert drive.failure is None
    for use in (
        lambda: space.read(0, 1),
        space.flush,
        medium.sync,
        a.recover,
        lambda: values(a, rows),
        lambda: medium.read(0, 512),
    ):
        with pytest.raises(errors.DriveLostError, match="started again since"):
            use()
    again = drive.host_queue()  # a new queue with the same id
    drive.delete_pair(queue.qid, queue.generation)
    assert queue.qid == again.qid and again.qid in drive._pairs
    a.close()
    medium.close()
    assert again.qid in drive._pairs
    with DriveMedium(drive.namespace(2), queues=1) as new, ww.open(new, "r", dtype=np.int64, **OPTIONS) as b:
        assert np.array_equal(values(b, rows), before)
    assert drive.namespace(1).read(0, 1).size == 512


def test_threads_that_recover_and_launch_at_once(drive: Drive) -> None:
    arrays = [opened(drive, nsid=k, queues=1) for k in (1, 2)]
    rows = np.arange(0, ITEMS, 37)
    assert all(np.array_equal(values(a, rows), rows) for a in arrays)
    wrong: list[object] = []
    done = threading.Event()

    def work(a: ww.Array) -> None:
        while not done.is_set():
            try:
                if not np.array_equal(values(a, rows), rows):
                    wrong.append("items")
            except errors.DriveLostError:
                try:
                    wrong.extend(a.recover())
                except errors.SharingError:
                    time.sleep(0.001)  # a launch of another thread is still running
                except errors.DriveLostError:
                    pass  # the drive was lost again
            except BaseException as error:
                wrong.append(error)
                raise

    threads = [threading.Thread(target=work, args=(a,)) for a in arrays * 2]
    for thread in threads:
        thread.start()
    for k in range(6):
        time.sleep(0.1)
        if k % 2:
            drive.transport.set_bus_master(False)
        else:
            drive.transport.write32(reg.CC, 0)
        assert until(lambda: drive.transport.failure is None and drive.transport.generation > k)
    done.set()
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert not wrong
    for a in arrays:
        a.close()


# -- what does not come back --------------------------------------------------------------------------------------


def test_a_qemu_that_has_ended_does_not_come_back(qemu: QemuDrive, drive: Drive) -> None:
    with pytest.raises(errors.DriveLostError, match="unflushed"), opened(drive, "r+") as a:
        write[1](a, np.array([7]), np.array([70]))
        qemu.kill()
        for use in (lambda: values(a, np.array([ITEMS - 1])), a.recover, drive.recover, a.flush):
            with pytest.raises(errors.DriveLostError, match="its QEMU has ended"):
                use()


def test_a_qemu_that_stands_still_comes_back_when_it_goes_on(qemu: QemuDrive, drive: Drive) -> None:
    with opened(drive, "r+") as a:
        write[1](a, np.array([7]), np.array([70]))
        qemu.stop()
        set_timeout(drive, 0.5)
        recoveries: list[Callable[[], object]] = [lambda: values(a, np.array([ITEMS - 1])), a.recover, a.recover]
        for use in recoveries:
            with pytest.raises(errors.DriveLostError, match="not completed within"):
                use()
        qemu.cont()
        set_timeout(drive, HANG_SECONDS)
        assert a.recover() == [] and values(a, np.array([7, 8])).tolist() == [70, 8]
