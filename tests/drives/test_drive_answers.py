"""A medium on a controller that answers as a test wants: wrong completions, every status, and strict data pointers."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.harness.arrays.kernels import read
from tests.harness.clock import time_passes
from tests.harness.threads import run_threads
from tests.harness.until import HANG_SECONDS

import warpwell as ww
from lab.drives.scripted_drive import ScriptedDrive
from warpwell import errors
from warpwell.drives import Drive, DriveMedium
from warpwell.drives.medium import M_INSIDE
from warpwell.nvme import ABORTED_BY_HOST, COMMAND_INTERRUPTED, FLUSH, READ, WRITE
from warpwell.testing.media import FILL, HostBytes, drive

NBYTES = 64 * 512


@pytest.fixture
def wire() -> ScriptedDrive:
    made = ScriptedDrive(arena=8 << 20)
    made.blocks[:] = np.random.default_rng(1).integers(1, 256, NBYTES)
    return made


@pytest.fixture
def medium(wire: ScriptedDrive) -> Iterator[DriveMedium]:
    with Drive(wire) as opened, DriveMedium(opened.namespace(1), queues=2, seconds=HANG_SECONDS) as made:
        yield made


def test_data_pointers_are_those_of_the_specification(wire: ScriptedDrive, medium: DriveMedium) -> None:
    """The scripted controller follows lists and checks offsets, which QEMU does not."""
    for size in (512, 4096, 4608, 8192, 8704, 12288, NBYTES):
        data, buffer = HostBytes(size, seed=size), HostBytes(size)
        at = NBYTES - size
        assert drive(medium, [(WRITE, at, size, data.address)]) == [0]
        assert np.array_equal(wire.blocks[at:], data.bytes)
        assert drive(medium, [(READ, at, size, buffer.address)]) == [0]
        assert np.array_equal(buffer.bytes, data.bytes)


def wrong_cid(answer: np.ndarray) -> None:
    answer["cid"] += 40  # ids are below 32


def other_cid(answer: np.ndarray) -> None:
    answer["cid"] ^= 1  # an id that is not in flight


def older_use(answer: np.ndarray) -> None:
    answer["cid"] -= 32  # of the id that is in flight


def wrong_sqid(answer: np.ndarray) -> None:
    answer["sqid"] += 1


def beyond_the_ring(answer: np.ndarray) -> None:
    answer["sqhd"] = 0x7FFF


@pytest.mark.parametrize("bend", [wrong_cid, other_cid, older_use, wrong_sqid, beyond_the_ring])
def test_a_completion_of_no_command_loses_the_drive(wire: ScriptedDrive, medium: DriveMedium, bend) -> None:
    wire.bend = lambda answer: bend(answer) or True
    buffers = [HostBytes(512) for _ in range(2)]
    requests = [(READ, 512 * k, 512, b.address) for k, b in enumerate(buffers)]
    assert ABORTED_BY_HOST in drive(medium, requests[:1])
    assert (buffers[0].bytes == FILL).all()
    assert drive(medium, requests) == [ABORTED_BY_HOST] * 2
    with pytest.raises(errors.DriveLostError, match=r"posted a completion to queue \d that answers no command"):
        raise medium.failure() or AssertionError
    with pytest.raises(errors.DriveLostError, match="scripted is lost"):
        medium.sync()


def test_a_thread_that_does_not_leave_a_queue_keeps_its_memory(wire: ScriptedDrive) -> None:
    with Drive(wire) as opened:
        medium = DriveMedium(opened.namespace(1), queues=1, seconds=0.05)
        medium._state.words[M_INSIDE] = 1  # a thread is inside the queue
        rings = medium._pairs.port(0)
        medium.close()
        del medium
        gc.collect()
        with pytest.raises(errors.DriveLostError, match="does not release its queues"):
            opened.transport.check()
        opened.stop()  # the drive does not access the queue any more, but the thread may
        blocks = []
        with contextlib.suppress(errors.DriveError):
            while True:
                blocks.append(opened.arena.allocate(4096))
        assert len(blocks) > 100 and all(block.address != rings for block in blocks)


def test_a_second_completion_loses_the_drive(wire: ScriptedDrive, medium: DriveMedium) -> None:
    buffer = HostBytes(512)
    assert drive(medium, [(READ, 0, 512, buffer.address)] * 3) == [0] * 3
    cids = []

    def again(answer: np.ndarray) -> bool:
        cids.append(int(answer["cid"]))
        answer["cid"] = cids[0]
        return True

    wire.bend = again
    statuses = drive(medium, [(READ, 512, 512, buffer.address)] * 8)
    assert 0 in statuses and ABORTED_BY_HOST in statuses and len(statuses) == 8
    assert isinstance(medium.failure(), errors.DriveLostError)


def stale_phase(answer: np.ndarray) -> bool:
    answer["status"] ^= 1
    return True


@pytest.mark.parametrize("bend", [stale_phase, lambda answer: False])
def test_a_completion_that_does_not_come_is_a_time_out(wire: ScriptedDrive, medium: DriveMedium, bend) -> None:
    buffer = HostBytes(512)
    wire.bend = bend
    medium.seconds = 0.3
    assert drive(medium, [(READ, 0, 512, buffer.address)] * 40) == [ABORTED_BY_HOST] * 40
    with pytest.raises(errors.DriveLostError, match=r"not completed within 0\.3 s"):
        raise medium.failure() or AssertionError
    wire.bend = lambda answer: True
    assert (buffer.bytes == FILL).all()


@pytest.mark.parametrize("status", [0x281, 0x4281, 0x0022, 0x4182, 0x0370, 0x3F00, 0x07FF])
@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_every_status_is_reported_and_retried_where_that_may_help(
    wire: ScriptedDrive, medium: DriveMedium, opcode: int, status: int
) -> None:
    wire.status[opcode] = status
    before = len(wire.received_commands)
    data = HostBytes(512, seed=1)
    assert drive(medium, [(opcode, 0, 512, data.address)]) == [status]
    tries = 1 if status & 0x4000 else 4
    assert [opc for _, opc in wire.received_commands[before:]] == [opcode] * tries and medium.retried == tries - 1
    call = {READ: lambda: medium.read(0, 1), WRITE: lambda: medium.write(0, data.bytes)}[opcode]
    with pytest.raises(errors.MediumError, match=f"sc 0x{status & 0xFF:02x}"):
        call()


@pytest.mark.parametrize("status", [0x281, 0x4281, 0x07FF])
def test_a_refused_flush_fails_the_drive(wire: ScriptedDrive, medium: DriveMedium, status: int) -> None:
    wire.status[FLUSH] = status
    with pytest.raises(errors.DriveLostError, match=f"sc 0x{status & 0xFF:02x}"):
        medium.sync()


# -- the same controller under the rings of kernels -------------------------------------------------------------------


@contextlib.contextmanager
def under_rings(wire: ScriptedDrive, **options: Any) -> Iterator[ww.Array]:
    """The namespace as an array whose misses the controller serves."""
    settings = {"cache": "16KiB", "page_size": 4096, "timeout": HANG_SECONDS, "queues": 1, "depth": 64} | options
    with Drive(wire) as drive, ww.open(drive.namespace(1), dtype=np.int64, device="cpu", **settings) as a:
        yield a


def one_of_each_page(a: ww.Array) -> np.ndarray:
    where = np.arange(0, a.size, 512)
    out = np.zeros(where.size, np.int64)
    read[where.size](a, where, out)
    return out


def test_kernels_read_what_the_controller_has(wire: ScriptedDrive) -> None:
    with under_rings(wire) as a:
        assert np.array_equal(one_of_each_page(a), wire.blocks.view(np.int64)[::512])


@pytest.mark.parametrize(
    ("bend", "message"),
    [
        (wrong_cid, r"command \d+ was not in flight"),
        (older_use, r"command \d+ was not in flight"),
        (wrong_sqid, "names submission queue"),
        (beyond_the_ring, "head is 32767"),
        (None, r"commands of kernels were not completed within 1000 s"),
    ],
)
def test_wrong_answers_to_kernels_are_errors_that_name_drive_namespace_and_command(
    wire: ScriptedDrive, bend: Any, message: str
) -> None:
    passing = time_passes(1000.0) if bend is None else contextlib.nullcontext()
    with under_rings(wire, timeout=1000.0) as a:
        one_of_each_page(a)
        a.cache.evict(1, (0, a.size // 512))
        wire.bend = (lambda answer: False) if bend is None else (lambda answer: bend(answer) or True)
        for _ in range(2):
            with passing, pytest.raises(errors.DriveLostError, match=message) as raised:
                one_of_each_page(a)
            passing = contextlib.nullcontext()
            error = raised.value
            assert (error.drive, error.namespace, error.command) == ("scripted", 1, "read")
            assert error.status == ABORTED_BY_HOST and "scripted is lost" in str(error)
        wire.bend = lambda answer: True


@pytest.mark.parametrize("status", [0x281, 0x4281, 0x4182, 0x0370, 0x3F00])
def test_a_status_to_kernels_is_an_error_that_names_it(wire: ScriptedDrive, status: int) -> None:
    with under_rings(wire) as a:
        wire.status[READ] = status
        with pytest.raises(errors.MediumError, match=f"scripted/1.*sc 0x{status & 0xFF:02x}") as raised:
            one_of_each_page(a)
        assert raised.value.status == status
        wire.status.clear()
        assert np.array_equal(one_of_each_page(a), wire.blocks.view(np.int64)[::512])


def test_an_interruption_is_retried(wire: ScriptedDrive, medium: DriveMedium) -> None:
    left = [2]

    def bend(answer: np.ndarray) -> bool:
        if left[0]:
            left[0] -= 1
            answer["status"] |= COMMAND_INTERRUPTED << 1
        return True

    wire.bend = bend
    buffer = HostBytes(512)
    assert drive(medium, [(READ, 1024, 512, buffer.address)]) == [0] and medium.retried == 2
    assert np.array_equal(buffer.bytes, wire.blocks[1024:1536])


def test_a_refused_deletion_leaves_memory_alone(wire: ScriptedDrive) -> None:
    with Drive(wire) as opened:
        medium = DriveMedium(opened.namespace(1), queues=1)
        wire.status[0] = 0x4101
        medium.close()  # the controller may still write to the memory of the queue
        rings = {piece for piece in opened.arena._free}
        assert sum(size for _, size in rings) < opened.arena.nbytes - 32 * (64 << 10)
        wire.status.clear()


def test_two_media_of_a_namespace_write_parts_of_one_block(wire: ScriptedDrive) -> None:
    with Drive(wire) as opened:
        pair = [DriveMedium(opened.namespace(1), queues=1) for _ in range(2)]

        def work(k: int) -> None:
            for value in range(300):
                pair[k].write(256 * k, np.full(256, value & 0xFF, np.uint8))
                assert (pair[k].read(256 * k, 256) == value & 0xFF).all()

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            run_threads(work, [(k,) for k in range(2)])
        finally:
            sys.setswitchinterval(interval)
        for medium in pair:
            medium.close()


def test_partial_blocks_are_read_first(wire: ScriptedDrive, medium: DriveMedium) -> None:
    want = wire.blocks.copy()
    rng = np.random.default_rng(2)
    for _ in range(50):
        at = int(rng.integers(0, NBYTES))
        part = rng.integers(0, 256, int(rng.integers(1, 3000)), np.uint8)
        medium.write(at, part)
        want[at : at + part.size] = part[: NBYTES - at]
        assert np.array_equal(medium.read(at, part.size)[: NBYTES - at], part[: NBYTES - at])
    assert np.array_equal(wire.blocks, want)
