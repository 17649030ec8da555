"""MediumConformance: tests that every medium passes; a subclass makes the medium.

The suite needs pytest, which collects a subclass in a test module::

    class TestMine(MediumConformance):
        def make(self, content, folder, writable):
            return MyMedium(content)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from .._os import clock
from ..nvme import READ, WRITE, command_word0, command_word6
from ..storage import Medium, python_functions
from ..storage.commands import PENDING, word
from ..targets import Block, device, memory_for, native
from ..targets.primitives import SYSTEM, backoff, call_native, clock_ns, exchange, fetch_add, load_relaxed, scratch

UNANSWERED = -9
"""Status of a command that was not answered in time."""

# -- a request: an NVMe command, its status, and how often it was answered ---------------------------------------
Q_STATUS = 8
Q_ANSWERS = 9
REQUEST_WORDS = 10


class MediumConformance:
    """Tests that hold for every medium. A subclass implements `make`.

    Attributes
    ----------
    BLOCK : int
        Bytes of a block of the medium (`Medium.block`).
    NBYTES : int
        Capacity to test with: more than 40 blocks and less than 48. It should not be a multiple of a block if the
        medium allows that, so that the last block is incomplete.
    TAG : int
        Value that is added to every tag that a medium gets, to check that it treats tags as opaque.
    """

    BLOCK = 512
    NBYTES = 5 * 4096 + 777
    TAG = 0x5_0000

    def make(self, content: NDArray[np.uint8], folder: Path, writable: bool) -> Medium:
        """Return a medium that holds `content`, uint8 of shape ``(NBYTES,)``; `folder` is empty."""
        raise NotImplementedError

    @pytest.fixture
    def content(self) -> NDArray[np.uint8]:
        """Return random bytes from 1 to 255."""
        return np.random.default_rng(7).integers(1, 256, self.NBYTES, np.uint8)

    @pytest.fixture
    def medium(self, content: NDArray[np.uint8], tmp_path: Path) -> Iterator[Medium]:
        """A writable medium."""
        made = self.make(content.copy(), tmp_path, True)
        yield made
        made.close()

    def run(self, medium: Medium, *requests: tuple[int, int, int, int], threads: int = 1) -> list[int]:
        """Run commands ``(opcode, offset, nbytes, buffer)`` and return their statuses."""
        return drive(medium, list(requests), threads=threads, tag=self.TAG)

    def test_says_what_it_is(self, medium: Medium) -> None:
        assert medium.nbytes == self.NBYTES and medium.block == self.BLOCK
        assert medium.name and medium.description and "\n" not in medium.description
        assert ("emulated" in medium.description) <= medium.emulated
        assert medium.native() == medium.native()

    @pytest.mark.parametrize("first", [0, 1, 8, 9, 40])
    @pytest.mark.parametrize("blocks", [1, 8, 25])
    def test_reads_every_place(self, medium: Medium, content: NDArray[np.uint8], first: int, blocks: int) -> None:
        offset, nbytes = first * self.BLOCK, blocks * self.BLOCK
        want = _padded(content, offset, nbytes)
        buffer = HostBytes(nbytes)
        assert self.run(medium, (READ, offset, nbytes, buffer.address)) == [0]
        assert np.array_equal(buffer.bytes, want)
        assert np.array_equal(medium.read(offset, nbytes), want)

    def test_reads_into_buffers_that_are_not_aligned(self, medium: Medium, content: NDArray[np.uint8]) -> None:
        nbytes = 8 * self.BLOCK
        buffer = HostBytes(2 * nbytes)
        assert self.run(medium, (READ, nbytes, nbytes, buffer.address + 520)) == [0]
        assert np.array_equal(buffer.bytes[520 : 520 + nbytes], content[nbytes : 2 * nbytes])
        assert (buffer.bytes[:520] == FILL).all() and (buffer.bytes[520 + nbytes :] == FILL).all()

    def test_zeros_past_the_end(self, medium: Medium) -> None:
        past = -(-self.NBYTES // self.BLOCK) * self.BLOCK
        buffer = HostBytes(8 * self.BLOCK)
        assert self.run(medium, (READ, past, 8 * self.BLOCK, buffer.address)) == [0]
        assert not buffer.bytes.any()
        assert not medium.read(past, 100).any()

    def test_reads_what_was_written(self, medium: Medium, content: NDArray[np.uint8]) -> None:
        want = content.copy()
        for first, blocks in ((0, 1), (8, 16), (7, 2), (24, 8)):
            offset, nbytes = first * self.BLOCK, blocks * self.BLOCK
            data = HostBytes(nbytes, seed=offset + 1)
            want[offset : offset + nbytes] = data.bytes
            assert self.run(medium, (WRITE, offset, nbytes, data.address)) == [0]
        nbytes = 48 * self.BLOCK
        buffer = HostBytes(nbytes)
        assert self.run(medium, (READ, 0, nbytes, buffer.address)) == [0]
        assert np.array_equal(buffer.bytes, _padded(want, 0, nbytes))
        assert np.array_equal(medium.read(0, self.NBYTES), want)

    def test_the_host_writes_too(self, medium: Medium, content: NDArray[np.uint8]) -> None:
        medium.write(1000, np.arange(1000, dtype=np.int64))
        content[1000:9000] = np.arange(1000, dtype=np.int64).view(np.uint8)
        buffer = HostBytes(24 * self.BLOCK)
        assert self.run(medium, (READ, 0, 24 * self.BLOCK, buffer.address)) == [0]
        assert np.array_equal(buffer.bytes, content[: 24 * self.BLOCK])

    def test_a_write_past_the_end_is_cut(self, medium: Medium, content: NDArray[np.uint8]) -> None:
        last, nbytes = 40 * self.BLOCK, 8 * self.BLOCK
        data = HostBytes(nbytes, seed=3)
        assert self.run(medium, (WRITE, last, nbytes, data.address)) == [0]
        medium.write(self.NBYTES - 10, np.full(100, 9, np.uint8))
        assert medium.nbytes == self.NBYTES
        content[last:] = data.bytes[: self.NBYTES - last]
        content[-10:] = 9
        buffer = HostBytes(2 * nbytes)
        assert self.run(medium, (READ, last, 2 * nbytes, buffer.address)) == [0]
        assert np.array_equal(buffer.bytes, _padded(content, last, 2 * nbytes))

    def test_read_only(self, content: NDArray[np.uint8], tmp_path: Path) -> None:
        medium = self.make(content.copy(), tmp_path, False)
        try:
            data = HostBytes(self.BLOCK, seed=1)
            assert not medium.writable
            assert self.run(medium, (WRITE, 0, self.BLOCK, data.address))[0] > 0
            with pytest.raises(ValueError, match=r"writable|write"):
                medium.write(0, data.bytes)
            assert np.array_equal(medium.read(0, self.NBYTES), content)
        finally:
            medium.close()

    def test_errors_have_a_status(self, medium: Medium) -> None:
        block = self.BLOCK
        buffer = HostBytes(block)
        statuses = self.run(medium, (0x7F, 0, block, buffer.address), (READ, -block, block, buffer.address))
        assert all(0 < s < 0x8000 for s in statuses)

    def test_sync(self, medium: Medium) -> None:
        data = HostBytes(self.BLOCK, seed=2)
        assert self.run(medium, (WRITE, self.BLOCK, self.BLOCK, data.address)) == [0]
        medium.sync()

    def test_threads_at_the_same_time(self, medium: Medium, content: NDArray[np.uint8]) -> None:
        # Even blocks are read again and again while odd ones are written.
        size = self.BLOCK
        blocks = self.NBYTES // size
        buffers, requests = [], []
        for number in range(320):
            block = number % blocks
            buffer = HostBytes(size, seed=block + 1)
            buffers.append(buffer)
            requests.append((WRITE if block % 2 else READ, block * size, size, buffer.address))
        assert self.run(medium, *requests, threads=4) == [0] * len(requests)
        want = content[: blocks * size].reshape(blocks, size).copy()
        for number, buffer in enumerate(buffers):
            if number % blocks % 2:
                want[number % blocks] = buffer.bytes
        for number, buffer in enumerate(buffers):
            assert np.array_equal(buffer.bytes, want[number % blocks]), number
        assert np.array_equal(medium.read(0, blocks * size), want.reshape(-1))

    def test_close_twice(self, medium: Medium) -> None:
        medium.close()
        medium.close()
        with pytest.raises(ValueError, match="closed"):
            medium.read(0, 1)
        with pytest.raises(ValueError, match="closed"):
            medium.sync()


FILL = 0xA5


class HostBytes:
    """Aligned memory, like that of commands of service threads.

    Parameters
    ----------
    nbytes : int
    seed : int, optional
        Seed of random bytes; by default, all bytes are `FILL`.

    Attributes
    ----------
    address : int
    bytes : numpy.ndarray
        uint8, shape ``(nbytes,)``.
    """

    def __init__(self, nbytes: int, seed: int | None = None) -> None:
        self._block = memory_for("cpu").allocate(nbytes)
        self.address = self._block.address
        self.bytes = self._block.view(np.dtype(np.uint8))[:nbytes]
        self.bytes[:] = FILL if seed is None else np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def drive(
    medium: Medium,
    requests: list[tuple[int, int, int, int]],
    *,
    threads: int = 1,
    seconds: float = 20.0,
    tag: int = 0,
) -> list[int]:
    """Run commands on a medium as a controller does, all in flight at once.

    Parameters
    ----------
    medium : Medium
    requests : list of (int, int, int, int)
        Opcode, offset, bytes, and host address of the buffer.
    threads : int
        OS threads that start commands and take completions.
    seconds : float
        How long to wait for completions.
    tag : int
        Added to the tags, which are the requests' positions.

    Returns
    -------
    list of int
        NVMe statuses; `UNANSWERED` if no completion arrived in time.

    Raises
    ------
    AssertionError
        A command was answered more than once, or a completion has a tag that no command has.
    """
    native = medium.native() or python_functions(medium)
    block, table = request_table("cpu", requests)
    loop = _drive_part.load()
    until = clock.monotonic_ns() + int(seconds * 1e9)
    arguments = (native.start, native.complete, native.state, block.address, len(requests), tag, until)
    strays: list[int] = []

    def work(first: int) -> None:
        strays.append(loop(*arguments, first, threads))

    workers = [threading.Thread(target=work, args=(k,)) for k in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert strays == [0] * threads, "a completion with an unknown tag"
    assert table[:, Q_ANSWERS].max(initial=0) <= 1, "a command was answered more than once"
    return [int(s) for s in table[:, Q_STATUS]]


def request_table(device: str, requests: list[tuple[int, int, int, int]]) -> tuple[Block, NDArray[np.int64]]:
    """Return the memory of requests for `drive_part`, and the requests in it.

    The first word is the number of requests that are not answered.
    """
    block = memory_for(device).allocate(8 + 8 * REQUEST_WORDS * len(requests))
    table = block.words[1:].reshape(len(requests), REQUEST_WORDS)
    for row, (opcode, offset, nbytes, buffer) in zip(table, requests, strict=True):
        row[:8] = command_of(opcode, offset, nbytes, buffer)
    table[:, Q_STATUS] = UNANSWERED
    block.words[0] = len(requests)
    return block, table


def command_of(opcode: int, offset: int, nbytes: int, buffer: int) -> NDArray[np.int64]:
    """Return the words of a command to blocks; offset and length are multiples of 512."""
    if offset % 512 or nbytes % 512:
        raise ValueError(f"offset and length must be multiples of 512, got {offset} and {nbytes}")
    command = np.zeros(8, np.int64)
    command[0], command[3] = command_word0(opcode, 0, 1), buffer
    command[5], command[6] = offset // 512, command_word6(nbytes // 512 - 1, 0)
    return command


@device
def drive_part(
    start: int,
    complete: int,
    state: int,
    table: int,
    count: int,
    tag: int,
    until: int,
    first: int,
    stride: int,
) -> int:
    """Start every `stride`-th request from `first`, then take completions until none is missing."""
    strays = 0
    out = scratch(24)
    for number in range(first, count, stride):
        status = call_native(start, state, table + 8 + 8 * REQUEST_WORDS * number, tag + number, 0, 0, 0)
        if status != PENDING:
            answer(table, number, status)
    idle = 0
    while load_relaxed(table, SYSTEM) > 0 and clock_ns() < until:
        if complete == 0 or call_native(complete, state, out, 0, 0, 0, 0) == 0:
            backoff(idle)
            idle = min(idle + 1, 30)
            continue
        idle = 0
        number = word(out, 0) - tag
        if number < 0 or number >= count:
            strays += 1
        else:
            answer(table, number, word(out, 1))
    return strays


_drive_part = native(drive_part)


@device
def answer(table: int, number: int, status: int) -> None:
    """Record the answer to a request."""
    request = table + 8 + 8 * REQUEST_WORDS * number
    exchange(request + 8 * Q_STATUS, status, SYSTEM)
    fetch_add(request + 8 * Q_ANSWERS, 1, SYSTEM)
    fetch_add(table, -1, SYSTEM)


def _padded(content: NDArray[np.uint8], offset: int, nbytes: int) -> NDArray[np.uint8]:
    out = np.zeros(nbytes, np.uint8)
    part = content[offset : offset + nbytes]
    out[: part.size] = part
    return out
