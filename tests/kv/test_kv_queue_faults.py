"""Queues under key-value load with faults: late, repeated and lost completions, and counters that wrap.

Every value contains its key, so that one delivered to another command is noticed.
"""

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.harness.key_value_load import (
    BAD_STATUS,
    FAILED,
    FULL,
    GOOD,
    NBYTES,
    OUTCOMES,
    TOO_SLOW,
    WRONG,
    fill_checked,
    retrieve_checked,
    send_retrieve,
)
from tests.harness.key_value_memory import KeyValueMemory, settle

from lab.media import KeyValueFaulty, KeyValueLatency
from warpwell import errors
from warpwell.queues import QueuePairs
from warpwell.queues.layout import P_CQ_TAIL, P_SQ_HEAD, Q_WORDS
from warpwell.storage.controller import Controller
from warpwell.targets import kernel, memory_for
from warpwell.targets.primitives import clock_ns, grid

pytestmark = pytest.mark.timing

KEYS = 500
PATIENT = 20 * 10**9
MS = 10**6


@pytest.fixture(scope="module")
def memory() -> KeyValueMemory:
    made = KeyValueMemory(slots=1024, largest=NBYTES)
    fill_checked(made, KEYS)
    return made


class Load:
    """A controller, queue pairs, and a namespace that is or is not faulty."""

    def __init__(self, functions: Any, *, count: int = 1, depth: int = 16, threads: int = 2, window: int = 0):
        self.pairs = QueuePairs(memory_for("cpu"), count=count, depth=depth, staging_bytes=512, results=True)
        self.controller = Controller(self.pairs, threads=threads, window=window)
        self.nsid = self.controller.attach_kv(functions)
        self.slowest = 0.0

    def run(self, threads: int, each: int, *, limit: int = PATIENT) -> dict[int, int]:
        """Retrieve; return how often each outcome came."""
        counts, slowest = np.zeros(OUTCOMES, np.int64), np.zeros(threads, np.int64)
        arguments = (self.pairs.records, self.pairs.count, self.nsid, KEYS, each, limit, counts, slowest)
        with self.controller.active():
            retrieve_checked[threads](*arguments, device="cpu")
        self.slowest = slowest.max() / 1e9
        assert counts.sum() == threads * each and counts[WRONG] == 0 and counts[BAD_STATUS] == 0
        return {k: int(n) for k, n in enumerate(counts) if n}

    def settle(self, seconds: float = 10.0) -> int:
        """Release ids whose completion came late, until all are free or for that long; return those in use."""
        end = time.monotonic() + seconds
        with self.controller.active():
            while self.pairs.in_use() and time.monotonic() < end:
                settle_all[self.pairs.count](self.pairs.records, device="cpu")
        return self.pairs.in_use()


@kernel
def settle_all(first):
    for _ in range(100):
        settle(first + grid(1) * (8 * Q_WORDS))


@kernel
def fill_up(queue, nsid, sent, out):
    """Send until there is no room, and once more."""
    while True:
        since = clock_ns()
        cid = send_retrieve(queue, nsid, out[0], 1)
        if cid < 0:
            out[1] = clock_ns() - since
            return
        sent[out[0]] = cid
        out[0] += 1


@pytest.fixture
def loads() -> Iterator[Any]:
    made: list[Load] = []

    def make(*args: Any, **options: Any) -> Load:
        made.append(Load(*args, **options))
        return made[-1]

    yield make
    for load in made:
        load.controller.close()


@pytest.mark.parametrize(("depth", "window"), [(4, 0), (16, 0), (16, 5), (65536, 0)])
def test_ids_and_phases_wrap(memory: KeyValueMemory, loads: Any, depth: int, window: int) -> None:
    """Twice over every 16-bit counter, and over the phase of the largest ring there is."""
    load = loads(memory.native(), depth=depth, window=window)
    threads = 2 if depth == 4 else 4
    each = 2 * 70_000 // threads
    counts = load.run(threads, each)
    # Rarely, a thread is refused because it finds all ids in use while it searches.
    assert counts[GOOD] + counts.get(FULL, 0) == threads * each and counts.get(FULL, 0) < 10
    port = load.pairs.ports[0]
    assert port[P_SQ_HEAD] == port[P_CQ_TAIL] == counts[GOOD] > 2 * 65536
    assert load.pairs.in_use() == 0


@pytest.mark.parametrize("window", [0, 4])
def test_a_full_queue_refuses_at_once(memory: KeyValueMemory, loads: Any, window: int) -> None:
    faulty = KeyValueFaulty(memory.native())
    load = loads(faulty.native(), depth=64, window=window)
    faulty.stop()
    out, sent = np.zeros(2, np.int64), np.zeros(64, np.int64)
    with load.controller.active():
        for _ in range(3):
            fill_up[1](load.pairs.record(0), load.nsid, sent, out, device="cpu")
            assert out[0] == load.pairs.ids == 32
            assert out[1] < 100 * MS
    assert len(set(sent[:32].tolist())) == 32
    # The commands of another launch are refused, too, and do not wait.
    assert load.run(4, 10) == {FULL: 40}
    assert load.slowest < 1
    faulty.resume()
    # No thread polls for these ids, and only orphaned and asynchronous commands are completed: the ids stay in use.
    deadline = time.monotonic() + 10
    while load.controller.outstanding() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert load.controller.outstanding() == 0


@pytest.mark.parametrize("window", [0, 4])
def test_commands_of_a_launch_that_ended_before_a_thread_awoke(memory: KeyValueMemory, loads: Any, window: int) -> None:
    load = loads(memory.native(), depth=16, window=window)
    load.run(1, 1)
    for _ in range(5):
        for pause in (0.1, 0.5, 2, 5):
            time.sleep(pause)  # the threads park; a thread that has not parked yet serves the command
            before = load.pairs.ports[0, P_CQ_TAIL]
            counts, slowest = np.zeros(OUTCOMES, np.int64), np.zeros(1, np.int64)
            retrieve_checked[1](load.pairs.records, 1, load.nsid, KEYS, 1, 0, counts, slowest, device="cpu")
            if load.pairs.announced() == 1:
                break
            load.settle()
        assert load.pairs.announced() == 1
        load.controller.begin()
        load.controller.end()
        deadline = time.monotonic() + 5
        while load.pairs.ports[0, P_CQ_TAIL] == before and time.monotonic() < deadline:
            time.sleep(0.001)
        assert load.pairs.ports[0, P_CQ_TAIL] == before + 1 and load.pairs.announced() == 0
        load.settle()


@pytest.mark.parametrize("window", [0, 12])
def test_late_completions(memory: KeyValueMemory, loads: Any, window: int) -> None:
    """A value that comes after the time-out goes only to the staging buffer of the quarantined id."""
    faulty = KeyValueFaulty(memory.native(), ["ok", "ok", "late", "ok"], late_us=40_000)
    load = loads(faulty.native(), depth=64, window=window)
    counts = load.run(4, 300, limit=10 * MS)
    assert counts[TOO_SLOW] >= 20 and counts[GOOD] >= 20
    assert load.settle() == 0, faulty.counts
    # Late answers within the time limit are good.
    faulty.configure(["late", "ok"], late_us=2_000)
    assert load.run(4, 50) == {GOOD: 200}


def test_lost_completions(memory: KeyValueMemory, loads: Any) -> None:
    faulty = KeyValueFaulty(memory.native(), ["lost"] + ["ok"] * 19)
    load = loads(faulty.native(), depth=64)
    counts = load.run(4, 100, limit=100 * MS)
    assert counts == {GOOD: 380, TOO_SLOW: 20}
    # The ids of the lost commands are never used again.
    assert load.settle(0.3) == 20
    faulty.configure(["lost"])
    counts = load.run(4, 10, limit=20 * MS)
    assert counts == {TOO_SLOW: 12, FULL: 28}
    assert load.slowest < 5
    assert load.settle(0.1) == 32 and faulty.counts["lost"] == 32


def test_lost_completions_do_not_use_the_window_up(memory: KeyValueMemory, loads: Any) -> None:
    """Lost commands fill the window for a second; later commands then proceed."""
    faulty = KeyValueFaulty(memory.native(), ["lost"] * 8, repeat=False)
    load = loads(faulty.native(), depth=64, window=8, count=2)
    assert load.run(8, 1, limit=5 * MS) == {TOO_SLOW: 8}
    counts = load.run(4, 200)
    assert counts == {GOOD: 800} and 0.5 < load.slowest < 5
    assert load.run(4, 200) == {GOOD: 800} and load.slowest < 0.9
    assert load.settle(0.1) == 8


def test_errors_by_schedule(memory: KeyValueMemory, loads: Any) -> None:
    faulty = KeyValueFaulty(memory.native(), ["ok", "error", "ok"])
    load = loads(faulty.native(), depth=32)
    assert load.run(3, 100) == {GOOD: 200, FAILED: 100}
    faulty.configure(["error"], repeat=False)
    assert load.run(1, 10) == {FAILED: 1, GOOD: 9}


@pytest.mark.parametrize("seed", range(4))
def test_everything_at_once(memory: KeyValueMemory, loads: Any, seed: int) -> None:
    """A schedule of all faults, two queues, an emulated drive below: never a wrong value."""
    random = np.random.default_rng(seed)
    kinds = random.choice(["ok", "late", "error", "lost"], 500, p=[0.85, 0.1, 0.04, 0.01]).tolist()
    below = memory.native() if seed & 1 else KeyValueLatency(memory.native(), latency_us=200)
    functions = below.native() if isinstance(below, KeyValueLatency) else below
    faulty = KeyValueFaulty(functions, kinds, late_us=float(random.choice([0, 500, 8_000])))
    load = loads(faulty.native(), count=2, depth=128, window=int(random.choice([0, 100])))
    load.run(8, 250, limit=4 * MS)
    lost = faulty.counts["lost"]
    assert load.settle(0.5 if lost else 10) == lost


@pytest.mark.parametrize("window", [0, 8])
def test_a_stopped_service_thread_hangs_nobody(memory: KeyValueMemory, loads: Any, window: int) -> None:
    load = loads(memory.native(), depth=16, window=window)
    counts, slowest = np.zeros(OUTCOMES, np.int64), np.zeros(4, np.int64)
    arguments = (load.pairs.records, 1, load.nsid, KEYS, 1_000_000, 100 * MS, counts, slowest)
    load.run(4, 50)
    stopper = threading.Timer(0.3, load.controller.close)
    with load.controller.active():
        stopper.start()
        start = time.monotonic()
        stopped_soon(arguments)
    assert time.monotonic() - start < 30
    stopper.join()
    assert counts[WRONG] == counts[BAD_STATUS] == 0 and counts[GOOD] > 0
    assert counts[TOO_SLOW] == load.pairs.ids and slowest.max() < 10**10
    with pytest.raises(errors.ClosedError):
        load.controller.begin()


def stopped_soon(arguments: tuple[Any, ...]) -> None:
    """Retrieve while the controller is closed; every command after that ends by its limit, or is refused."""
    retrieve_checked[4](*arguments, device="cpu")
