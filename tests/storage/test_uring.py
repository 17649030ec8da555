"""io_uring: errors, forked children, and when it is used."""

import gc
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.native_calls import NativeCalls
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from lab.media import Latency
from warpwell import gpu
from warpwell.nvme import CAPACITY_EXCEEDED, READ, UNRECOVERED_READ_ERROR, WRITE
from warpwell.storage import PENDING, FileMedium, Striped, uring
from warpwell.storage.file import DIRECT_FD
from warpwell.testing.media import HostBytes, drive

pytestmark = pytest.mark.skipif(uring.allowed() is not None, reason=f"io_uring: {uring.allowed()}")

PAGES = 256


@pytest.fixture
def path(tmp_path: Path) -> Path:
    np.arange(PAGES * 512, dtype=np.int64).tofile(tmp_path / "file.bin")
    return tmp_path / "file.bin"


def calls(medium: FileMedium) -> tuple[Any, Any]:
    native = NativeCalls(medium.native())
    return native.start_block, native.complete


def reads(buffer: HostBytes, count: int) -> list[tuple[int, int, int, int]]:
    return [(READ, 4096 * (k % PAGES), 4096, buffer.address + 4096 * k) for k in range(count)]


def check(buffer: HostBytes, count: int) -> None:
    got = buffer.bytes.view(np.int64).reshape(-1, 512)[:count]
    assert (got == np.arange(count)[:, None] % PAGES * 512 + np.arange(512)).all()


@pytest.mark.parametrize("threads", [1, 4])
def test_more_commands_than_the_ring_has_room_for(path: Path, threads: int) -> None:
    buffer = HostBytes(4096 * 3000)
    with FileMedium(path, direct=True) as medium:
        assert drive(medium, reads(buffer, 3000), threads=threads) == [0] * 3000
        assert medium._ring is not None and medium._ring.in_flight == 0
    check(buffer, 3000)


def test_closing_waits_for_what_is_in_flight(path: Path) -> None:
    buffer = HostBytes(4096 * 200)
    medium = FileMedium(path, direct=True)
    start, _ = calls(medium)
    for number, command in enumerate(reads(buffer, 200)):
        assert start(*command, number) == PENDING
    held = medium._ring
    assert held is not None and held.in_flight == 200
    medium.close()
    assert held.in_flight == 0
    check(buffer, 200)


def test_commands_that_the_kernel_does_not_accept_at_once_are_submitted_again(path: Path) -> None:
    buffer = HostBytes(4096 * 10)
    with FileMedium(path, direct=True) as medium:
        start, complete = calls(medium)
        assert medium._ring is not None
        ring_words = medium._ring._block.words
        own_fd, ring_words[uring.G_FD] = int(ring_words[uring.G_FD]), -1
        for number, command in enumerate(reads(buffer, 10)):
            assert start(*command, number) == PENDING
        assert complete() is None and medium._ring.in_flight == 10
        ring_words[uring.G_FD] = own_fd
        found: list[tuple[int, int, int]] = []
        assert until(lambda: found.extend(filter(None, [complete()])) or len(found) == 10)
        assert sorted(found) == [(number, 0, 0) for number in range(10)]
    check(buffer, 10)


def test_a_full_disk_and_a_cut_file(path: Path) -> None:
    buffer = HostBytes(4096, seed=1)
    medium = FileMedium(path, writable=True, direct=True)
    full = os.open("/dev/full", os.O_RDWR)
    try:
        state = medium._state.words
        own_fd, state[DIRECT_FD] = int(state[DIRECT_FD]), full
        assert drive(medium, [(WRITE, 4096, 4096, buffer.address)]) == [CAPACITY_EXCEEDED]
        assert "free some space" in str(medium.last_error())
        state[DIRECT_FD] = own_fd
        os.truncate(path, 3 * 4096 + 512)
        # whole, short, and past the end: never zeros for data
        got = drive(medium, [(READ, 4096 * k, 4096, buffer.address) for k in (2, 3, 4)])
        assert got == [0, UNRECOVERED_READ_ERROR, UNRECOVERED_READ_ERROR]
    finally:
        medium.close()
        os.close(full)


def test_what_was_written_is_in_the_file(path: Path) -> None:
    data = HostBytes(8 * 4096, seed=3)
    with FileMedium(path, writable=True, direct=True) as medium:
        commands = [(WRITE, 4096 * k, 4096, data.address + 4096 * k) for k in range(8)]
        assert drive(medium, commands) == [0] * 8
        medium.sync()
    assert path.read_bytes()[: 8 * 4096] == data.bytes.tobytes()


def test_under_wrappers(path: Path) -> None:
    buffer = HostBytes(4096 * 100)
    both = Latency(Striped([FileMedium(path, direct=True), FileMedium(path, direct=True)], 4096), latency_us=20)
    assert drive(both, [(READ, 8192 * k, 4096, buffer.address + 4096 * k) for k in range(100)], threads=2) == [0] * 100
    check(buffer, 100)
    both.close()


def open_descriptors(path: Path) -> int:
    found = [
        os.readlink(f"/proc/self/fd/{name}")
        for name in os.listdir("/proc/self/fd")
        if int(name) < 200 and os.path.lexists(f"/proc/self/fd/{name}")
    ]
    return sum("io_uring" in target or target == str(path) for target in found)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_leaves_the_ring_alone(path: Path) -> None:
    gc.collect()
    rings_before = open_descriptors(path)  # rings of media that other tests keep open
    buffer = HostBytes(4096 * 100)
    medium = FileMedium(path, direct=True)
    start, complete = calls(medium)
    for number, command in enumerate(reads(buffer, 100)):
        assert start(*command, number) == PENDING
    assert open_descriptors(path) > rings_before
    child = os.fork()
    if child == 0:
        medium.close()
        medium.close()
        os._exit(open_descriptors(path) - rings_before)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    done: set[int] = set()
    until = time.monotonic() + HANG_SECONDS
    while len(done) < 100 and time.monotonic() < until:
        if (found := complete()) is not None:
            assert found[1] == 0
            done.add(found[0])
    assert len(done) == 100
    check(buffer, 100)
    medium.close()


def test_where_it_is_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileMedium(path) as medium:
        if medium.direct:
            assert medium.ring and medium.description.endswith("(O_DIRECT, io_uring)")
    with FileMedium(path, direct=False) as medium:
        assert not medium.ring and medium.description.endswith("(page cache)")
    monkeypatch.setattr("warpwell.storage.file.allowed", lambda: "a test forbids it")
    with FileMedium(path) as medium:
        assert not medium.ring and medium.native().complete == 0
    monkeypatch.undo()
    monkeypatch.setattr("warpwell.storage.file.Ring", lambda: exec("raise OSError(12, 'no memory')"))
    with FileMedium(path) as medium:  # without a ring, at a limit of the system, the medium works
        assert medium.native().complete == 0 and not medium.ring


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="/dev/shm cannot be written")
def test_not_in_memory() -> None:
    file = Path("/dev/shm") / f"warpwell-ring-{os.getpid()}"
    try:
        file.write_bytes(bytes(1 << 16))
        with FileMedium(file) as medium:
            assert not medium.ring
    finally:
        file.unlink()


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSYS)", "killed the process that probed it (signal 31)"),
        ("import sys; sys.exit(print('io_uring_setup: Operation not permitted') or 1)", "Operation not permitted"),
        ("import time; time.sleep(60)", "could not probe it"),
    ],
)
def test_who_asks_may_be_killed(monkeypatch: pytest.MonkeyPatch, program: str, reason: str) -> None:
    run = subprocess.run

    def run_probe(command: list[str], timeout: float, **options: Any) -> Any:
        return run([*command[:-1], program], timeout=0.5 if "sleep" in program else timeout, **options)

    monkeypatch.setattr(subprocess, "run", run_probe)
    assert reason in str(uring.allowed.__wrapped__())


def test_a_switched_off_kernel_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uring.Path, "read_text", lambda self: "2\n")
    assert "io_uring_disabled is 2" in str(uring.allowed.__wrapped__())
    monkeypatch.undo()
    monkeypatch.setattr(sys, "executable", "/opt/frozen/app")
    assert "no Python interpreter" in str(uring.allowed.__wrapped__())


@ww.kernel
def add_one(a, n):
    i = gpu.grid(1)
    if i < n:
        a[i] = a[i] + 1


def test_an_array_reads_and_writes_through_it(tmp_path: Path) -> None:
    file = tmp_path / "a.npy"
    np.save(file, np.arange(100_003, dtype=np.int32))
    with ww.open(file, "r+", device="cpu", tier="storage", cache="64KiB") as a:
        assert "io_uring" in a.cache.controller.medium(1).description
        for _ in range(2):
            add_one[a.size](a, a.size)
    assert (np.load(file) == np.arange(100_003) + 2).all()


def test_the_interpreter_reads_without_it(tmp_path: Path) -> None:
    file = tmp_path / "a.npy"
    np.save(file, np.arange(600, dtype=np.int64))
    with ww.open(file, "r+", device="interp", tier="storage", cache="4KiB", page_size=1024) as a:
        add_one[300](a, 300)
    assert (np.load(file)[:300] == np.arange(300) + 1).all()
