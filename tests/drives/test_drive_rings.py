"""Kernels over a drive: a cache's own rings, served by QEMU's NVMe controller."""

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.harness.arrays.kernels import read, write
from tests.harness.clock import time_passes
from tests.harness.descriptors import Descriptors, open_descriptors
from tests.harness.drives import needs_qemu, set_timeout
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from lab.drives.qemu import QemuDrive, QemuNamespace
from lab.drives.qtest import NVME_SLOT
from warpwell import errors
from warpwell.array import opening
from warpwell.drives import Drive, Namespace
from warpwell.drives.controller import DriveRings
from warpwell.drives.doorbell_forwarder import DoorbellForwarder
from warpwell.drives.superblock import DATA_AT, head_of
from warpwell.storage import RamMedium, current_io_threads

pytestmark = needs_qemu

ITEMS = 1 << 18
"""2 MiB of int64."""
DATA = np.random.default_rng(15).integers(-(1 << 40), 1 << 40, ITEMS)


def formatted(path, data=DATA, spare: int = 1 << 16):
    """Write a namespace that holds an array, as an image."""
    path.write_bytes(head_of(data.shape, data.dtype) + data.tobytes() + bytes(spare))
    return path


SILENCE_SECONDS = HANG_SECONDS
"""Timeout for QEMU in tests that do not stop it, because other tests may slow it down."""


@contextlib.contextmanager
def drive_with(image, **options) -> Iterator[tuple[QemuDrive, Drive]]:
    block = options.pop("block", 512)
    options = {"seconds": SILENCE_SECONDS, **options}
    with QemuDrive([QemuNamespace(path=image, block=block)], **options) as qemu, qemu.open() as drive:
        yield qemu, drive


def opened(drive: Drive, mode: str = "r", **options) -> ww.Array:
    options = {"device": "cpu", "cache": "128KiB", "page_size": 4096, "timeout": HANG_SECONDS, **options}
    return ww.open(drive.namespace(1), mode, **options)


def gathered(a: ww.Array, seed: int = 0, n: int = 3000) -> None:
    """Read random items by a kernel, and compare."""
    where = np.random.default_rng(seed).integers(0, ITEMS, n)
    out = np.zeros(n, np.int64)
    read[n](a, where, out)
    assert np.array_equal(out, DATA[where])


def on_disk(path) -> np.ndarray:
    return np.fromfile(path, np.int64, offset=DATA_AT)[:ITEMS]


# -- reading and writing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "block"),
    [(4096, 512), pytest.param(8192, 4096, marks=pytest.mark.slow), pytest.param(65536, 512, marks=pytest.mark.slow)],
)
def test_kernels_read_and_write(tmp_path, page: int, block: int) -> None:
    image = formatted(tmp_path / "disk")
    head = image.read_bytes()[:DATA_AT]
    with drive_with(image, block=block) as (_, drive), opened(drive, "r+", page_size=page, cache=16 * page) as a:
        assert (a.shape, a.dtype, a.tier) == ((ITEMS,), np.dtype(np.int64), "storage")
        gathered(a)
        where = np.random.default_rng(1).permutation(ITEMS)[:4000]
        values = np.arange(4000)
        write[4000](a, where, values)
        assert a[int(where[7])] == 7  # the host reads an item that only the cache has
        a.flush()
        want = DATA.copy()
        want[where] = values
        assert np.array_equal(on_disk(image), want)
        assert a.stats.misses > 0 and a.stats.writebacks > 0
        assert np.array_equal(np.asarray(a[100:9000]), want[100:9000])
    assert image.read_bytes()[:DATA_AT] == head


def test_prefetch_pins_and_host_indices(tmp_path) -> None:
    with drive_with(formatted(tmp_path / "disk")) as (_, drive), opened(drive, cache="1MiB") as a:
        assert a.prefetch(0, 50 * 512).result(HANG_SECONDS).loaded == 50
        a.pin(1000, 1100)
        a.unpin(1000, 1100)
        assert np.array_equal(a[np.array([5, ITEMS - 1, 77])], DATA[[5, ITEMS - 1, 77]])
        assert np.array_equal(np.asarray(a), DATA)


def test_several_namespaces_and_caches_of_one_drive(tmp_path) -> None:
    first_image, second_image = formatted(tmp_path / "one"), formatted(tmp_path / "two", DATA[::-1].copy())
    spaces = [QemuNamespace(path=first_image), QemuNamespace(path=second_image, block=4096)]
    with QemuDrive(spaces, queues=6, seconds=SILENCE_SECONDS) as qemu, qemu.open() as drive:
        first = ww.open(drive.namespace(1), device="cpu", cache="128KiB", page_size=4096, queues=2)
        second = ww.open(drive.namespace(2), device="cpu", cache=first.cache)
        third = ww.open(drive.namespace(2), device="cpu", cache="64KiB", page_size=4096)
        # The drive has six queues, of which the host uses one.
        assert third.cache.pairs.count == 3 and drive.spare_queues == 0
        where = np.arange(0, ITEMS, 100)
        out = np.zeros((3, where.size), np.int64)
        workers = [
            threading.Thread(target=lambda k=k, a=a: read[where.size](a, where, out[k]))
            for k, a in enumerate((first, second, third))
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(HANG_SECONDS)
        assert np.array_equal(out[0], DATA[where])
        assert np.array_equal(out[1], DATA[::-1][where]) and np.array_equal(out[2], out[1])
        with pytest.raises(errors.DriveError, match="all are in use"):
            ww.open(drive.namespace(1), device="cpu", cache="64KiB", page_size=4096)
        third.close()
        assert drive.spare_queues == 3
        with pytest.raises(errors.ArgumentError, match="not on it"):
            ww.open(RamMedium(np.arange(512)), dtype=np.int64, device="cpu", cache=first.cache)
        assert int(second[0]) == DATA[-1]
        second.close()
        first.close()


def test_raw_namespaces_are_read_only_and_end_with_a_whole_page(tmp_path) -> None:
    image = tmp_path / "raw"
    data = np.arange(9 * 512 + 64)  # 9 pages of 4,096 bytes, and a block of 512
    image.write_bytes(data.tobytes())
    with drive_with(image) as (_, drive):
        with pytest.raises(errors.FormatError, match="format-array"):
            opened(drive)
        with pytest.raises(errors.ReadOnlyError, match="holds no array of Warpwell"):
            opened(drive, "r+", dtype=np.int64)
        with opened(drive, dtype=np.int64) as a:
            assert a.shape == (9 * 512,) and np.array_equal(np.asarray(a), data[: 9 * 512])
        with opened(drive, dtype=np.int64, page_size=512, cache=8192) as a:
            assert np.array_equal(np.asarray(a), data)
        with pytest.raises(errors.FormatError, match="too few"):
            opened(drive, dtype=np.int64, shape=data.size)


def test_what_a_drive_does_not_serve_is_refused(tmp_path) -> None:
    with drive_with(formatted(tmp_path / "disk"), block=4096, mdts=1) as (_, drive):
        for wrong, options in [
            ("page_size", {"page_size": 16384, "cache": "1MiB"}),
            ("page_size", {"page_size": 512}),
            ("dtype", {"dtype": np.int32}),
            ("tier", {"tier": "mapped"}),
        ]:
            with pytest.raises(errors.ArgumentError, match=wrong):
                opened(drive, **options)
        with opened(drive, "r+") as a, pytest.raises(errors.SharingError, match="already open"):
            opened(drive, "r+", cache=a.cache, page_size=None, timeout=None)
        before = drive.spare_queues
        with opened(drive) as a:
            gathered(a, n=200)
        assert drive.spare_queues == before


def test_a_failed_command_names_drive_namespace_and_status(tmp_path) -> None:
    image = {"driver": "file", "filename": str(formatted(tmp_path / "disk"))}
    worn = {"event": "none", "iotype": "read", "errno": 5, "sector": (DATA_AT + 8 * (ITEMS - 512)) // 512}
    backend = {"driver": "blkdebug", "image": {"driver": "raw", "file": image}, "inject-error": [worn]}
    with (
        QemuDrive([QemuNamespace(backend=backend)], seconds=SILENCE_SECONDS) as qemu,
        qemu.open() as drive,
        opened(drive) as a,
    ):
        out = np.zeros(64, np.int64)
        with pytest.raises(errors.MediumError, match=r"reading array 'nvme:qemu:\d+/1', page") as caught:
            read[64](a, np.arange(ITEMS - 64, ITEMS), out)
        assert caught.value.status & 0x7FF == 0x281


# -- loss -------------------------------------------------------------------------------------------------------------


def in_background(a: ww.Array, outcome: list[object]) -> threading.Thread:
    """Launch again and again until a launch raises; record the error and its time."""

    def work() -> None:
        n = 4000
        out, seed = np.zeros(n, np.int64), 0
        try:
            while True:
                seed += 1
                where = np.random.default_rng(seed).integers(0, ITEMS, n)
                read[n](a, where, out)
                if not np.array_equal(out, DATA[where]):
                    outcome.append("wrong items")
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def bus_master_off(qemu: QemuDrive, drive: Drive) -> None:
    drive.transport._configure(NVME_SLOT, 0x04, 0x0402)


HARM = {
    "killed": lambda qemu, drive: qemu.kill(),
    "stopped": lambda qemu, drive: qemu.stop(),
    "bus master off": bus_master_off,
}


@pytest.mark.parametrize("harm", ["killed", *(pytest.param(key, marks=pytest.mark.slow) for key in list(HARM)[1:])])
def test_launches_end_when_the_drive_is_lost(tmp_path, harm: str) -> None:
    image = formatted(tmp_path / "disk")
    with drive_with(image, seconds=HANG_SECONDS) as (qemu, drive):
        a = opened(drive, cache="64KiB")
        gathered(a)  # compiled by now
        outcome: list[object] = []
        thread = in_background(a, outcome)
        time.sleep(0.3)
        HARM[harm](qemu, drive)
        set_timeout(drive, 2.0)
        with time_passes(HANG_SECONDS):
            thread.join(HANG_SECONDS)
        (error,) = outcome
        assert isinstance(error, errors.DriveLostError), repr(error)
        assert error.drive == drive.address and error.namespace == 1 and error.command == "read"
        assert error.status == 0x371 and f"drive {drive.address} is lost" in str(error)
        with pytest.raises(errors.DriveLostError):  # fails at once
            gathered(a)
        with pytest.raises(errors.DriveLostError):
            opened(drive)
        a.close()
    with drive_with(image) as (_, drive), opened(drive) as a:
        gathered(a)


def test_late_data_meet_only_memory_that_nobody_has(tmp_path) -> None:
    image = formatted(tmp_path / "disk")
    with QemuDrive([QemuNamespace(path=image)], arena="16MiB", seconds=SILENCE_SECONDS) as qemu:
        drive = qemu.open()
        a = opened(drive, cache="64KiB")
        gathered(a)
        outcome: list[object] = []
        thread = in_background(a, outcome)
        time.sleep(0.2)
        qemu.stop()
        set_timeout(drive, 2.0)
        with time_passes(HANG_SECONDS):
            thread.join(HANG_SECONDS)
        assert isinstance(outcome[-1], errors.DriveLostError)
        assert a.cache.pairs.in_use() > 0  # the drive still has commands, whose data may arrive late
        a.close()
        del a, outcome, thread
        blocks = []
        with contextlib.suppress(errors.DriveError):
            while True:  # all memory that the arena still has
                blocks.append(drive.arena.allocate(1 << 16))
                blocks[-1].words[:] = 0x5A5A
        assert blocks
        qemu.cont()
        time.sleep(0.3)
        assert all((block.words == 0x5A5A).all() for block in blocks)
        del blocks
        drive.close()  # stops the controller: no data arrives after this
        with qemu.open() if qemu.running else drive_of_another(image) as again, opened(again) as b:
            gathered(b)


@contextlib.contextmanager
def drive_of_another(image) -> Iterator[Drive]:
    with drive_with(image) as (_, drive):
        yield drive


def test_unflushed_changes_of_a_lost_drive_are_told(tmp_path) -> None:
    with drive_with(formatted(tmp_path / "disk")) as (qemu, drive):
        a = opened(drive, "r+")
        write[100](a, np.arange(100), np.arange(100))
        qemu.kill()
        with pytest.raises(errors.DriveLostError):
            a.flush()
        with pytest.raises(errors.DriveLostError, match="unflushed"):
            a.close()
        assert until(lambda: not current_io_threads().active_threads)


def test_tiers_in_memory_and_the_interpreter_take_the_namespace_as_a_medium(tmp_path) -> None:
    image = formatted(tmp_path / "disk")
    with drive_with(image) as (_, drive):
        with ww.open(drive.namespace(1), "r+", device="cpu", tier="host", cache="64KiB") as a:
            gathered(a, n=100)
            a[5] = 50
        assert on_disk(image)[5] == 50
        with ww.open(drive.namespace(1), device="interp", cache="16KiB", page_size=4096) as a:
            assert a[5] == 50 and int(a[-1]) == DATA[-1]
        assert drive.spare_queues == drive.queues - 1


def test_a_name_opens_the_namespace(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    with drive_with(formatted(tmp_path / "disk")) as (_, drive):
        given_up: list[str] = []

        def found(name: str) -> tuple[Namespace, Callable[[], None]]:
            assert name == "nvme:0000:04:00.0/1"
            return drive.namespace(1), lambda: given_up.append(name)

        monkeypatch.setattr(opening, "open_namespace", found)
        with ww.open("nvme:0000:04:00.0/1", device="cpu", cache="64KiB", name="edges") as a:
            gathered(a, n=50)
            assert a.name == "edges" and not given_up
        assert len(given_up) == 1
        with pytest.raises(errors.ArgumentError):
            ww.open("nvme:0000:04:00.0/1", device="cpu", page_size=100)
        with pytest.raises(errors.ArgumentError, match="dtype"):
            ww.open("nvme:0000:04:00.0/1", device="cpu", dtype=np.int8)
        assert len(given_up) == 2


def test_ctrl_c_ends_a_launch_and_the_array_goes_on(tmp_path) -> None:
    with drive_with(formatted(tmp_path / "disk")) as (_, drive), opened(drive, cache="64KiB") as a:
        gathered(a)
        where = np.random.default_rng(3).integers(0, ITEMS, 2_000_000)
        out = np.zeros(where.size, np.int64)
        timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            read[where.size](a, where, out)
        gathered(a, 9)


# -- forwarder -------------------------------------------------------------------------------------------------------


def test_the_forwarder_parks_and_wakes(tmp_path) -> None:
    with drive_with(formatted(tmp_path / "disk")) as (_, drive), opened(drive) as a:
        forwarder: DoorbellForwarder = a.cache.controller.forwarder
        for seed in range(30):
            gathered(a, seed, n=50)
            if seed % 3 == 0:
                assert until(lambda: forwarder.parked)
        assert forwarder.forwarded > 0


def test_a_failed_forwarder_fails_the_drive(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    with drive_with(formatted(tmp_path / "disk")) as (_, drive), opened(drive) as a:
        gathered(a, n=50)

        def broken() -> bool:
            raise RuntimeError("planted")

        monkeypatch.setattr(drive.transport, "examine", broken)
        with pytest.raises(errors.DriveLostError, match="doorbells"):
            for seed in range(10_000):
                gathered(a, seed)


# -- life -------------------------------------------------------------------------------------------------------------


def test_nothing_is_left(tmp_path) -> None:
    image = formatted(tmp_path / "disk")
    with drive_with(image) as (_, drive):

        def state() -> tuple[Descriptors, int, int]:
            return open_descriptors(), current_io_threads().active_threads, drive.spare_queues

        opened(drive).close()
        before = state()
        for _ in range(3):
            with opened(drive) as a:
                gathered(a, n=20)
            a = opened(drive, "r+")
            gathered(a, n=20)
            del a  # closed by the closing thread

        def is_nothing_left() -> bool:
            files, threads, spare_queues = state()  # the first two of earlier tests may end meanwhile
            return files <= before[0] and threads <= before[1] and spare_queues == before[2]

        assert until(is_nothing_left), (state(), before)


def test_a_forked_child_leaves_the_drive_alone(tmp_path) -> None:
    with drive_with(formatted(tmp_path / "disk")) as (_, drive), opened(drive, "r+") as a:
        gathered(a, n=20)
        child = os.fork()
        if not child:
            code = 1
            with contextlib.suppress(BaseException):
                try:
                    gathered(a, n=20)
                except errors.ForkError:
                    try:
                        opened(drive)
                    except errors.ForkError:
                        a.close()
                        code = 0
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        gathered(a, n=20)


def test_a_forwarder_that_does_not_end_keeps_its_memory(tmp_path, monkeypatch) -> None:
    with drive_with(formatted(tmp_path / "disk"), arena="64MiB") as (_, drive):
        a = opened(drive)
        gathered(a, n=20)
        forwarder, rings = a.cache.controller.forwarder, a.cache.pairs.doorbells()
        ended = forwarder.stop
        monkeypatch.setattr(forwarder, "stop", lambda: ended() and False)
        alive = [forwarder]  # as if its thread did not end
        a.close()
        with pytest.raises(errors.DriveLostError, match="doorbells does not stop"):
            drive.transport.check()
        drive.stop()
        del a
        gc.collect()
        blocks = []
        with contextlib.suppress(errors.DriveError):
            while True:
                blocks.append(drive.arena.allocate(1 << 16))
        assert alive and len(blocks) > 100
        assert all(not block.address <= word < block.address + block.nbytes for block in blocks for word in rings.flat)


@pytest.mark.slow
def test_threads_side_by_side(tmp_path) -> None:
    with drive_with(formatted(tmp_path / "disk")) as (_, drive), opened(drive) as a:
        failed: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                for k in range(2):
                    gathered(a, 10 * seed + k, n=300)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_SECONDS)
        assert not failed


def test_rings_fit_the_drive() -> None:
    with QemuDrive(arena="16MiB", queues=3, mdts=5, seconds=SILENCE_SECONDS) as qemu, qemu.open() as drive:
        from warpwell.storage.protocol import Rings

        rings = DriveRings(drive).fit(Rings(8, 16, 4), "cpu", 4096)
        assert rings == Rings(2, 64, 1)
        rings = DriveRings(drive).fit(Rings(2, 128, 4), "cuda", 65536)
        assert rings == Rings(1, 64, 2) or rings.queues * rings.depth // 2 * rings.merge * 65536 <= 8 << 20
        with pytest.raises(errors.ArgumentError, match="interp"):
            DriveRings(drive).fit(Rings(1, 64, 1), "interp", 4096)
