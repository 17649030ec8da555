"""Native media under the seeded interpreter: each command is answered once under every interleaving."""

import numpy as np
import pytest

import warpwell as ww
from lab.media import Faulty, Latency, latency
from warpwell import gpu
from warpwell.nvme import READ, UNRECOVERED_READ_ERROR, WRITE
from warpwell.storage.commands import PENDING, call_complete, call_start, encode_command, word
from warpwell.storage.medium import Medium, PythonMedium, python_functions
from warpwell.storage.ram import RamMedium
from warpwell.storage.striped import Replicated, Striped
from warpwell.targets.interp.interpreter import launch
from warpwell.targets.primitives import clock_ns, grid, scratch
from warpwell.testing.media import Q_ANSWERS, Q_STATUS, HostBytes, drive_part, request_table

SEEDS = 12
THREADS = 3
FOREVER = 1 << 62


def interpreted(medium: Medium, requests: list[tuple[int, int, int, int]], seed: int) -> list[int]:
    """Statuses of the requests, started and completed by interpreted threads."""
    native = medium.native() or python_functions(medium)
    block, table = request_table("interp", requests)
    arguments = (native.start, native.complete, native.state, block.address, len(requests), 1 << 16, FOREVER)
    strays = []

    def thread() -> None:
        strays.append(drive_part(*arguments, grid(1), THREADS))

    launch(thread, THREADS, seed=seed, coarse_copies=True, max_steps=300_000)
    assert strays == [0] * THREADS
    assert (table[:, Q_ANSWERS] == 1).all()
    return [int(s) for s in table[:, Q_STATUS]]


def content() -> np.ndarray:
    return np.random.default_rng(3).integers(1, 256, 2048 + 100, np.uint8)


def striped() -> Medium:
    bytes_ = content()
    parts = [np.concatenate([bytes_[k * 512 : k * 512 + 512] for k in ks]) for ks in ((0, 2, 4), (1, 3))]
    return Striped([Latency(RamMedium(parts[0]), latency_us=20), RamMedium(parts[1])], 512)


def replicated() -> Medium:
    bad = Latency(Faulty(RamMedium(content()), fail_every=2), latency_us=30)
    return Latency(Replicated([bad, Latency(RamMedium(content()), latency_us=5)]), latency_us=60)


def ram() -> Medium:
    return RamMedium(content())


class InPython(PythonMedium):
    def __init__(self, content: np.ndarray) -> None:
        super().__init__(content.size, writable=True)
        self.content = content.copy()

    def read(self, offset: int, nbytes: int) -> np.ndarray:
        return self.content[offset : offset + nbytes]

    def write(self, offset: int, data: np.ndarray) -> None:
        self.content[offset : offset + data.size] = data


def in_python() -> Medium:
    return InPython(content())


def faulty() -> Medium:
    return Faulty(striped())


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("make", [ram, striped, replicated, in_python, faulty])
def test_reads(make, seed: int) -> None:
    buffers = [HostBytes(1536) for _ in range(6)]
    requests = [(READ, 512 * k, 1536, b.address) for k, b in enumerate(buffers)]
    assert interpreted(make(), requests, seed) == [0] * 6
    padded = np.concatenate([content(), np.zeros(4096, np.uint8)])
    for k, buffer in enumerate(buffers):
        assert np.array_equal(buffer.bytes, padded[512 * k : 512 * k + 1536]), k


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_part_that_is_full_or_locked_is_passed_over(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Four parts with one place each, one of them without a thread: there are more commands than places.
    monkeypatch.setattr(latency.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(latency, "IN_FLIGHT", 4)
    drive = Latency(RamMedium(content()), latency_us=2000, read_iops=2000)
    medium = Striped([drive], 512)
    buffers = [HostBytes(512) for _ in range(9)]
    requests = [(READ, 512 * (k % 4), 512, b.address) for k, b in enumerate(buffers)]
    assert interpreted(medium, requests, seed) == [0] * 9
    assert all(np.array_equal(b.bytes, content()[512 * (k % 4) :][:512]) for k, b in enumerate(buffers))
    passed = drive.native().owner[0].words[latency.COMMANDS_FREE + latency.READS]
    assert passed >= 9 * 500_000 << 10  # the commands passed the gate one after another


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("make", [striped, in_python])
def test_writes(make, seed: int) -> None:
    medium = make()
    buffers = [HostBytes(512, seed=k) for k in range(5)]
    requests = [(WRITE, 512 * k, 512, b.address) for k, b in enumerate(buffers)]
    assert interpreted(medium, requests, seed) == [0] * 5
    want = np.concatenate([b.bytes for b in buffers])[: medium.nbytes]
    assert np.array_equal(medium.read(0, medium.nbytes), want)


@ww.kernel
def add_one(a, n):
    i = gpu.grid(1)
    if i < n:
        a[i] = a[i] + 1


@pytest.mark.parametrize("device", ["cpu", "interp"])
def test_kernels_read_and_write_a_medium_in_python(device: str) -> None:
    medium = InPython(np.arange(1000, dtype=np.int64).view(np.uint8))
    with ww.open(medium, "r+", dtype=np.int64, device=device, tier="storage", cache="4KiB", page_size=512) as a:
        add_one[300](a, 300)
        assert (np.asarray(a[:]) == np.arange(1000) + (np.arange(1000) < 300)).all()
    assert (medium.content.view(np.int64) == np.arange(1000) + (np.arange(1000) < 300)).all()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_as_many_faults_as_ordered(seed: int) -> None:
    buffer = HostBytes(512)
    medium = Faulty(RamMedium(512), fail_every=3)
    statuses = interpreted(medium, [(READ, 0, 512, buffer.address)] * 9, seed)
    assert sorted(statuses) == [0] * 6 + [UNRECOVERED_READ_ERROR] * 3
    medium.configure(fail_reads=4)
    statuses = interpreted(medium, [(READ, 0, 512, buffer.address)] * 9, seed)
    assert sorted(statuses) == [0] * 5 + [UNRECOVERED_READ_ERROR] * 4


@pytest.mark.parametrize("seed", range(SEEDS))
def test_withheld_commands_run_once(seed: int) -> None:
    medium = Faulty(striped())
    medium.stop()
    buffers = [HostBytes(512) for _ in range(4)]
    native = medium.native()
    assert native is not None

    def start() -> None:
        k = grid(1)
        command = scratch(64)
        encode_command(command, READ, 512 * k, 512, buffers[k].address)
        assert call_start(native.start, native.state, command, k) == -1

    done = []

    def complete() -> None:
        answer = scratch(24)
        for _ in range(200):
            if call_complete(native.complete, native.state, answer):
                done.append((word(answer, 0), word(answer, 1)))

    launch(start, 4, seed=seed, coarse_copies=True)
    assert medium.withheld == 4
    medium.resume()
    launch(complete, 2, seed=seed, coarse_copies=True)
    assert sorted(done) == [(k, 0) for k in range(4)]
    assert np.array_equal(np.concatenate([b.bytes for b in buffers]), content()[:2048])


def test_commands_that_came_while_it_was_silent_run_at_once_in_a_later_launch() -> None:
    medium = Faulty(RamMedium(content()))
    medium.stop()
    native, buffer, answers = medium.native(), HostBytes(512), []
    assert native is not None

    def begin() -> None:
        for _ in range(50):
            clock_ns()
        command = scratch(64)
        encode_command(command, READ, 0, 512, buffer.address)
        answers.append(call_start(native.start, native.state, command, 7))

    def end() -> None:
        answer = scratch(24)
        answers.append(call_complete(native.complete, native.state, answer))
        answers.extend([word(answer, 0), word(answer, 1)])

    launch(begin, 1, seed=0)
    medium.resume()
    launch(end, 1, seed=0)
    assert answers == [PENDING, True, 7, 0] and medium.withheld == 0
