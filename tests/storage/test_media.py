"""Every medium passes the conformance suite; tests of each medium, and of faults."""

import errno
import gc
import os
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.native_calls import NativeCalls
from tests.harness.until import HANG_SECONDS

from lab.media import DRIVES, Faulty, Latency, rates_of
from warpwell import errors
from warpwell.nvme import (
    CAPACITY_EXCEEDED,
    NAMESPACE_NOT_READY,
    READ,
    UNRECOVERED_READ_ERROR,
    WRITE,
    WRITE_FAULT,
)
from warpwell.storage import uring
from warpwell.storage.commands import T_FREE, T_LOCK, SlotTable
from warpwell.storage.file import FileMedium, file_status
from warpwell.storage.medium import Medium, PythonMedium
from warpwell.storage.ram import RamMedium
from warpwell.storage.striped import Replicated, Striped
from warpwell.testing.media import UNANSWERED, HostBytes, MediumConformance, drive


def ram(content: np.ndarray, writable: bool) -> RamMedium:
    return RamMedium(content, writable=writable)


class ListMedium(PythonMedium):
    """A medium as a user might write it."""

    def __init__(self, content: np.ndarray, writable: bool) -> None:
        super().__init__(content.size, writable=writable)
        self.data = bytearray(content.tobytes())

    def read(self, offset: int, nbytes: int) -> bytes:  # type: ignore[override]
        assert offset + nbytes <= self.nbytes
        return bytes(self.data[offset : offset + nbytes])

    def write(self, offset: int, data: np.ndarray) -> None:
        assert offset + data.size <= self.nbytes
        self.data[offset : offset + data.size] = data.tobytes()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("source", [4096, np.zeros(4096, np.uint8)], ids=["own", "array"])
def test_a_forked_child_has_memory_of_its_own(source: Any) -> None:
    medium = RamMedium(source)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            medium.write(0, np.ones(512, np.uint8))
            code = 0 if medium.read(0, 512).all() else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not medium.read(0, 512).any()


def stripes(content: np.ndarray, count: int, stripe: int) -> list[np.ndarray]:
    """Return the content of each of `count` media."""
    parts: list[list[np.ndarray]] = [[] for _ in range(count)]
    for index, start in enumerate(range(0, content.size, stripe)):
        parts[index % count].append(content[start : start + stripe])
    return [np.concatenate(p) if p else np.zeros(0, np.uint8) for p in parts]


class TestRam(MediumConformance):
    def make(self, content, folder, writable):
        return ram(content, writable)


class FileConformance(MediumConformance):
    direct: bool | None = None

    def make(self, content, folder, writable):
        self.path = folder / "medium.bin"
        content.tofile(self.path)
        return FileMedium(self.path, writable, direct=self.direct)

    def test_the_file_never_grows(self, medium: Medium) -> None:
        data = HostBytes(4096, seed=1)
        assert self.run(medium, (WRITE, 5 * 4096, 4096, data.address)) == [0]
        medium.sync()
        assert self.path.stat().st_size == self.NBYTES
        assert self.path.read_bytes()[5 * 4096 :] == data.bytes[:777].tobytes()

    def test_blocks_of_a_page_and_the_tail_are_written_together(self, medium: Medium) -> None:
        """Direct and buffered writes that meet in a page of the system's cache made fdatasync report EIO."""
        data = HostBytes(6 * 4096, seed=2)
        requests = [(WRITE, at, 512, data.address + at) for at in range(4 * 4096, 5 * 4096 + 777, 512)]
        for _ in range(100):
            assert set(self.run(medium, *requests, threads=4)) == {0}
            medium.sync()
        assert self.path.read_bytes()[4 * 4096 :] == data.bytes[4 * 4096 : self.NBYTES].tobytes()


class TestFile(FileConformance):
    pass


class TestFileInThePageCache(FileConformance):
    direct = False


needs_ring = pytest.mark.skipif(uring.allowed() is not None, reason=f"io_uring: {uring.allowed()}")


@needs_ring
class TestFileThroughARing(FileConformance):
    def make(self, content, folder, writable):
        self.path = folder / "medium.bin"
        content.tofile(self.path)
        return FileMedium(self.path, writable, direct=True)

    def test_says_so(self, medium: Medium) -> None:
        assert medium.native().complete and "O_DIRECT, io_uring" in medium.description


class TestFileThroughThreads(FileConformance):
    def make(self, content, folder, writable):
        self.path = folder / "medium.bin"
        content.tofile(self.path)
        return FileMedium(self.path, writable, ring=False)


class TestPython(MediumConformance):
    def make(self, content, folder, writable):
        return ListMedium(content, writable)


class TestStriped(MediumConformance):
    def make(self, content, folder, writable):
        return Striped([ram(c, writable) for c in stripes(content, 3, 1024)], 1024)


class TestReplicated(MediumConformance):
    def make(self, content, folder, writable):
        return Replicated([ram(content.copy(), writable) for _ in range(2)])


class TestLatency(MediumConformance):
    def make(self, content, folder, writable):
        return Latency(ram(content, writable), "P5800X")


class TestStripedLatency(MediumConformance):
    def make(self, content, folder, writable):
        parts = stripes(content, 3, 1024)
        return Striped([Latency(ram(c, writable), latency_us=50.0 * k) for k, c in enumerate(parts)], 1024)


class TestLatencyOverReplicatedLatency(MediumConformance):
    def make(self, content, folder, writable):
        replicas = [Latency(ram(content.copy(), writable), latency_us=40 * k) for k in range(3)]
        return Latency(Replicated(replicas), latency_us=(20, 200))


class TestFaultyWithoutFaults(MediumConformance):
    def make(self, content, folder, writable):
        return Faulty(ram(content, writable), delay_us=30)


class TestStripedFiles(MediumConformance):
    def make(self, content, folder, writable):
        media: list[Medium] = []
        for k, part in enumerate(stripes(content, 2, 4096)):
            part.tofile(folder / f"{k}.bin")
            media.append(Faulty(FileMedium(folder / f"{k}.bin", writable)))
        return Striped(media, 4096)


class TestPythonUnderWrappers(MediumConformance):
    def make(self, content, folder, writable):
        parts = stripes(content, 2, 512)
        media = [Faulty(Latency(ListMedium(c, writable), latency_us=1)) for c in parts]
        return Replicated([Striped(media, 512)])


@pytest.mark.parametrize("wrap", [Faulty, Latency])
def test_a_wrapper_that_is_dropped_gives_its_memory_back_at_once(wrap: Any) -> None:
    inner = RamMedium(4096)
    wrapper = wrap(inner)
    wrapper.native()
    alive = [weakref.ref(wrapper), weakref.ref(inner)]
    gc.disable()
    try:
        del wrapper, inner
        assert [reference() for reference in alive] == [None, None]
    finally:
        gc.enable()


# -- files ---------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file.bin").write_bytes(np.arange(16384, dtype=np.uint8).tobytes())
    return tmp_path / "file.bin"


def test_a_file_in_memory_is_mapped_and_may_be_cut() -> None:
    content = np.random.default_rng(3).integers(0, 256, 65000, np.uint8)
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="warpwell-") as file:
        content.tofile(file.name)
        medium = FileMedium(file.name)
        if "in memory" not in medium.description:
            pytest.skip("/dev/shm is no tmpfs")
        data, far = HostBytes(8192), HostBytes(4096)
        read = (READ, 59904, 8192, data.address)
        assert drive(medium, [read]) == [0]
        assert data.bytes[:5096].tobytes() == content[59904:].tobytes()
        assert not data.bytes[5096:].any()  # beyond the end of the file
        os.truncate(file.name, 30000)
        # The second read finds the zero pages that the SIGBUS handler of the first read has mapped.
        assert drive(medium, [read, (READ, 61440, 4096, far.address)]) == [UNRECOVERED_READ_ERROR] * 2
        assert "truncated" in (medium.last_error() or "")
        assert drive(medium, [(READ, 512, 4096, data.address)]) == [0]
        content.tofile(file.name)
        assert drive(medium, [read]) == [0]
        assert data.bytes[:5096].tobytes() == content[59904:].tobytes()
        medium.close()
        assert drive(medium, [read]) != [0]
        del medium
        gc.collect()
        assert file.name not in Path("/proc/self/maps").read_text(encoding="utf-8")


@pytest.mark.parametrize("direct", [None, False])
def test_a_file_cut_under_it_is_an_error_not_zeros(path: Path, direct: bool | None) -> None:
    buffer = HostBytes(4096)
    with FileMedium(path, writable=True, direct=direct) as medium:
        os.truncate(path, 9000)
        assert drive(medium, [(READ, 4096, 4096, buffer.address)]) == [0]
        assert medium.last_error() is None
        for offset in (8192, 12288):
            assert drive(medium, [(READ, offset, 4096, buffer.address)]) == [UNRECOVERED_READ_ERROR]
        assert "cut" in medium.last_error()
        with pytest.raises(OSError, match="cut") as caught:
            medium.read(8192, 4096)
        assert caught.value.status == UNRECOVERED_READ_ERROR
        # a write must not give the length back with zeros in between
        assert drive(medium, [(WRITE, 12288, 4096, buffer.address)]) == [WRITE_FAULT]
        with pytest.raises(OSError, match="cut"):
            medium.write(12288, buffer.bytes)
        assert path.stat().st_size == 9000
        with pytest.raises(errors.FormatError, match="truncated from 16384 to 9000"):
            medium.sync()


def test_a_file_that_was_replaced_is_noticed(path: Path) -> None:
    with FileMedium(path, writable=True) as medium:
        medium.write(0, np.zeros(8))
        (path.parent / "new").write_bytes(path.read_bytes())
        os.replace(path.parent / "new", path)
        with pytest.raises(errors.FormatError, match="was replaced by another file"):
            medium.sync()


def test_what_cannot_be_opened(path: Path) -> None:
    with pytest.raises(errors.MissingFileError, match="does not exist"):
        FileMedium(path.parent / "none")
    with pytest.raises(errors.FormatError, match="16384 bytes, but 20000"):
        FileMedium(path, nbytes=20000)
    for wrong in (path.parent, "/dev/null"):
        with pytest.raises(errors.FormatError):
            FileMedium(wrong)
    assert FileMedium(path, nbytes=1000).nbytes == 1000


def test_a_closed_file_is_an_error_in_native_code(path: Path) -> None:
    buffer = HostBytes(512)
    medium = FileMedium(path)
    medium.close()
    assert drive(medium, [(READ, 0, 512, buffer.address)]) == [NAMESPACE_NOT_READY]


def test_an_empty_file(path: Path) -> None:
    path.write_bytes(b"")
    buffer = HostBytes(512)
    with FileMedium(path, writable=True) as medium:
        assert drive(medium, [(READ, 0, 512, buffer.address), (WRITE, 0, 512, buffer.address)]) == [0, 0]
        assert not buffer.bytes.any() and path.stat().st_size == 0


def test_a_full_disk_is_no_media_error() -> None:
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        assert file_status(WRITE, code) == CAPACITY_EXCEEDED
    assert file_status(WRITE, errno.EIO) == WRITE_FAULT
    assert file_status(READ, errno.EIO) == UNRECOVERED_READ_ERROR


def test_enospc_in_native_code(path: Path) -> None:
    buffer = HostBytes(512)
    medium = FileMedium(path, writable=True, direct=False)
    full = os.open("/dev/full", os.O_RDWR)
    try:
        # The medium writes to /dev/full instead of its file: each write fails as on a full disk.
        medium._state.words[0] = full
        assert drive(medium, [(WRITE, 512, 512, buffer.address)]) == [CAPACITY_EXCEEDED]
        assert "free some space" in medium.last_error()
        own_fd, medium._fd = medium._fd, full
        medium._size = lambda: medium.nbytes
        with pytest.raises(errors.StorageFullError, match="free some space"):
            medium.write(0, buffer.bytes)
        medium._fd = own_fd
    finally:
        medium.close()
        os.close(full)


# -- wrappers ------------------------------------------------------------------------------------------------


def test_capacity_of_stripes_that_are_not_equal() -> None:
    def sizes(*n: int) -> int:
        return Striped([RamMedium(k) for k in n], 1024).nbytes

    assert sizes(2048, 2048) == 4096
    assert sizes(2048, 1024) == 3072
    assert sizes(1500, 1024) == 2048 + 476
    assert sizes(9999, 100) == 1124
    with pytest.raises(errors.ArgumentError, match="multiple of 512"):
        Striped([RamMedium(1)], 1000)
    # the excess capacity of the larger medium is unused
    striped = Striped([RamMedium(np.full(9999, 1, np.uint8)), RamMedium(np.full(1024, 1, np.uint8))], 1024)
    assert striped.nbytes == 3072
    buffer = HostBytes(8192)
    assert drive(striped, [(READ, 0, 8192, buffer.address)]) == [0]
    assert buffer.bytes.sum() == 3072


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: Latency(m, latency_us=20)], ids=["done", "pending"])
def test_a_bad_replica_is_hidden_until_it_misses_a_write(wrap) -> None:
    bad = Faulty(RamMedium(np.full(4096, 7, np.uint8)), fail_reads=True)
    both = Replicated([wrap(bad), wrap(RamMedium(np.full(4096, 7, np.uint8)))])
    buffer = HostBytes(4096)
    assert drive(both, [(READ, 0, 512, buffer.address + 512 * k) for k in range(8)], threads=2) == [0] * 8
    assert (buffer.bytes == 7).all() and bad.injected > 0
    assert (both.read(0, 4096) == 7).all()
    bad.configure(fail_writes=1)
    buffer.bytes[:] = 8
    assert drive(both, [(WRITE, 0, 512, buffer.address)]) == [WRITE_FAULT]
    assert both.stale == [0]
    for _ in range(4):
        assert drive(both, [(READ, 0, 512, buffer.address)]) == [0]
        assert (buffer.bytes[:512] == 8).all() and (both.read(0, 512) == 8).all()


def test_every_replica_bad() -> None:
    both = Replicated([Latency(Faulty(RamMedium(4096), fail_reads=True), latency_us=9) for _ in range(3)])
    buffer = HostBytes(512)
    assert drive(both, [(READ, 0, 512, buffer.address)] * 5) == [UNRECOVERED_READ_ERROR] * 5
    with pytest.raises(errors.MediumError, match="on purpose"):
        both.read(0, 1)


def test_replicas_of_one_size() -> None:
    with pytest.raises(errors.ArgumentError, match="differ in size"):
        Replicated([RamMedium(1), RamMedium(2)])


def timed(medium: Medium, requests: list[tuple[int, int, int, int]]) -> float:
    drive(medium, requests[:1])  # compile
    begin = time.monotonic()
    assert drive(medium, requests) == [0] * len(requests)
    return time.monotonic() - begin


@pytest.mark.timing
def test_hundreds_of_latencies_pass_at_once() -> None:
    buffer = HostBytes(512)
    requests = [(READ, 0, 512, buffer.address)] * 800
    assert 0.05 <= timed(Latency(RamMedium(512), latency_us=50_000), requests) < 1.0


@pytest.mark.timing
def test_rates_are_limits() -> None:
    buffer = HostBytes(8192)
    small = [(READ, 0, 512, buffer.address)] * 500
    assert 0.1 <= timed(Latency(RamMedium(8192), read_iops=5000), small) < 1.0
    assert timed(Latency(RamMedium(8192), write_iops=50), small) < 0.5
    large = [(READ, 0, 8192, buffer.address)] * 100
    assert 0.1 <= timed(Latency(RamMedium(8192), bandwidth=8192 * 1000), large) < 1.0
    assert timed(Latency(RamMedium(8192), read_iops=(10.0, 1e6)), large) < 0.5


def test_more_than_its_queue_holds_is_late_not_lost() -> None:
    buffer = HostBytes(512)
    requests = [(WRITE, 0, 512, buffer.address)] * 5000
    assert timed(Latency(RamMedium(512), latency_us=3000), requests) >= 0.003


def test_the_host_waits_for_an_emulated_drive_too() -> None:
    medium = Latency(RamMedium(4096), bandwidth=4096 * 20)
    begin = time.monotonic()
    medium.read(0, 4096)
    assert time.monotonic() - begin >= 0.05


def test_drives_are_named() -> None:
    assert [rates_of(d.name.upper()) for d in DRIVES] == list(DRIVES)
    medium = Latency(RamMedium(4096), "980 pro", latency_us=5)
    assert medium.emulated and "980Pro" in medium.description and "emulated" in medium.description
    with pytest.raises(errors.ArgumentError, match="one of P5800X, PM1735, 980Pro"):
        Latency(RamMedium(4096), "floppy")
    with pytest.raises(errors.ArgumentError, match="read_iops"):
        Latency(RamMedium(4096), read_iops=-1)


# -- faults --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0, 20])
def test_faults_come_as_ordered(delay: float) -> None:
    buffer = HostBytes(512)
    read, write = (READ, 1024, 512, buffer.address), (WRITE, 1024, 512, buffer.address)
    medium = Faulty(RamMedium(4096), delay_us=delay, fail_every=3)
    assert drive(medium, [read, write] * 3) == [0, 0, UNRECOVERED_READ_ERROR, 0, 0, WRITE_FAULT]
    medium.configure(fail_reads=2, status=0x4281)
    assert drive(medium, [read, write] * 3) == [0x4281, 0, 0x4281, 0, 0, 0]
    medium.configure(fail_writes=True)
    assert drive(medium, [read, write]) == [0, WRITE_FAULT]
    medium.configure(fail_ranges=[(0, 1024), (1535, 1536)])
    assert drive(medium, [(READ, k * 512, 512, buffer.address) for k in range(4)]) == [0x281, 0x281, 0x281, 0]
    with pytest.raises(errors.MediumError) as caught:
        medium.read(0, 512)
    assert caught.value.status == 0x281
    medium.configure()
    assert drive(medium, [read, write]) == [0, 0]
    assert medium.injected == 2 + 2 + 1 + 3 + 1


@pytest.mark.parametrize("delay", [0, 20])
def test_a_torn_write_wrote_half(delay: float) -> None:
    inner = RamMedium(4096)
    medium = Faulty(inner, delay_us=delay, torn_writes=True)
    buffer = HostBytes(4096)
    assert drive(medium, [(WRITE, 0, 4096, buffer.address)]) == [WRITE_FAULT]
    assert inner.read(0, 4096).astype(bool).sum() == 2048
    with pytest.raises(errors.MediumError):
        medium.write(2048, buffer.bytes[:1024])
    assert inner.read(0, 4096).astype(bool).sum() == 2048 + 512


@pytest.mark.parametrize("delay", [0, 20])
def test_silence_and_what_comes_after(delay: float) -> None:
    medium = Faulty(RamMedium(np.full(4096, 5, np.uint8)), delay_us=delay, silent_after=3)
    buffer = HostBytes(4096)
    requests = [(READ, 512 * k, 512, buffer.address + 512 * k) for k in range(8)]
    statuses = drive(medium, requests, seconds=0.1)
    # With a delay, the first three are in flight when the drive falls silent.
    assert statuses[3:] == [UNANSWERED] * 5 and (delay or statuses[:3] == [0] * 3)
    assert medium.silent and medium.withheld == 5
    with pytest.raises(errors.StallError, match="resume"):
        medium.read(0, 1)
    medium.resume()
    calls = NativeCalls(medium.native())
    got = []
    deadline = time.monotonic() + HANG_SECONDS
    while len(got) < statuses.count(UNANSWERED) and time.monotonic() < deadline:
        if (answer := calls.complete()) is not None:
            got.append(answer)
    assert sorted(got) == [(k, 0, 0) for k in range(8) if statuses[k] == UNANSWERED]
    assert (buffer.bytes == 5).all()
    assert drive(medium, requests) == [0] * 8
    medium.stop()
    assert drive(medium, requests, seconds=0.05) == [UNANSWERED] * 8


def test_a_forked_child_takes_no_slots_of_its_parent() -> None:
    table = SlotTable(8)
    if (child := os.fork()) == 0:
        table._block.words[T_LOCK], table._block.words[T_FREE] = 1, 0  # takes all slots, and exits with the lock held
        os._exit(0)
    os.waitpid(child, 0)
    assert table.taken == 0 and table._block.words[T_LOCK] == 0
