"""Batches that threads of the host gather: the threads on the CPU; the GPU's part is in test_kv_gpu_cuda.py."""

from __future__ import annotations

import ctypes
import gc
import os
import queue
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.threads import run_threads
from tests.harness.until import HANG_SECONDS, until

from warpwell import closing, errors, kv
from warpwell.kv import lifetime
from warpwell.kv.device import gather
from warpwell.kv.device.gather import BatchSpaces
from warpwell.storage import io_threads

SCHEMA = {"x": ("uint8", (5,)), "y": "int64"}
COUNT = 3000


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kv") / "a.kv"
    with kv.create(path, schema=SCHEMA) as store:
        keys = np.arange(COUNT)
        store.put_many(keys, {"x": np.repeat(keys[:, None], 5, axis=1).astype(np.uint8), "y": 3 * keys})
    return path


@pytest.fixture
def store(path: Path) -> Any:
    with kv.open(path, device="cpu") as store:
        yield store


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give batches jobs that no thread of an earlier test serves."""
    readers = gather.PieceReaders()
    monkeypatch.setattr(gather, "piece_readers", lambda: readers)


def start(store: Any, keys: Any, spaces: BatchSpaces | None = None) -> Any:
    return gather.GatheredBatch(store, spaces or BatchSpaces(), keys, None)


def check(batch: Any, keys: Any) -> None:
    batch.wait_until_ended()
    space, keys = batch._lease.space, np.asarray(keys)
    raw = space.device.view(np.dtype(np.uint8))
    rows = raw[space.rows_at :][: len(keys) * space.stride].view(batch._schema.record)
    inside = (keys >= 0) & (keys < COUNT)
    assert (raw[space.found_at :][: len(keys)] == inside).all()
    assert (rows["y"] == np.where(inside, 3 * keys, 0)).all()
    assert (rows["x"][inside] == (keys[inside] % 256)[:, None]).all()


@pytest.mark.parametrize("count", [0, 1, 511, 512, 1025, 40_000])
def test_rows_of_a_batch(store: Any, count: int) -> None:
    keys = np.random.default_rng(count).integers(-50, COUNT + 50, count)
    batch = start(store, keys)
    before = keys.copy()
    keys[:] = 7  # the caller may change its array
    check(batch, before)
    assert batch.done() and not store._engine.gathered


def test_keys_of_bytes(tmp_path: Path) -> None:
    keys = [b"k%d" % k for k in range(2000)]
    with kv.create(tmp_path / "a", schema={"y": "int64"}) as store:
        store.put_many(keys, {"y": np.arange(2000)})
    with kv.open(tmp_path / "a", device="cpu") as store:
        batch = start(store, [*keys, b"absent"])
        batch.wait_until_ended()
        space = batch._lease.space
        rows = space.device.view(np.dtype(np.int64))[space.rows_at // 8 :][:2001]
        assert (rows[:2000] == np.arange(2000)).all() and rows[2000] == 0


class StreamInThread:
    """A stream that works in the background and in order, as a GPU's does."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._calls = stream, queue.SimpleQueue[Callable[[], Any]]()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            self._calls.get()()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._stream, name)
        if name not in ("wait_for_word", "copy"):
            return function
        return lambda *arguments: self._calls.put(partial(function, *arguments))

    def mark(self) -> Callable[[], bool]:
        done = threading.Event()
        self._calls.put(done.set)
        return done.is_set


def test_many_threads_and_more_batches_than_places(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "PIECE_KEYS", 1)
    with kv.open(path, device="cpu") as store, kv.open(path, device="cpu") as second_store:
        stores = store, second_store
        for each in stores:
            monkeypatch.setattr(each._engine, "stream", StreamInThread(each._engine.stream))

        def work(seed: int) -> None:
            rng, spaces = np.random.default_rng(seed), [BatchSpaces(), BatchSpaces()]
            for _ in range(20):
                batches = []
                for _ in range(8):
                    keys, which = rng.integers(0, COUNT + 9, rng.integers(0, 70)), rng.integers(2)
                    batches.append((start(stores[which], keys, spaces[which]), keys))
                del batches[::3]  # dropped in flight
                for batch, keys in batches:
                    check(batch, keys)

        run_threads(work, [(seed,) for seed in range(8)])
        for batch in [*store._engine.gathered, *second_store._engine.gathered]:
            batch.wait_until_ended()
        assert sorted(gather.piece_readers()._free) == list(range(gather.SLOTS))


def test_a_thread_that_hangs_keeps_no_other_batch_waiting(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readers, hangs, release = gather.PieceReaders(), threading.Event(), threading.Event()
    read_jobs = readers._read_jobs

    def hang(jobs: int, start: int) -> int:
        if hangs.is_set():
            return int(read_jobs(jobs, start))
        # As if it had started a chunk long ago, on a drive that does not answer.
        ctypes.c_int64.from_address(start).value = 1
        hangs.set()
        release.wait(HANG_SECONDS)
        ctypes.c_int64.from_address(start).value = 0
        return 0

    monkeypatch.setattr(gather, "THREADS", 1)
    monkeypatch.setattr(gather, "piece_readers", lambda: readers)
    monkeypatch.setattr(readers, "_read_jobs", hang)
    with kv.open(path, device="cpu") as store:
        first = start(store, np.arange(9))
        assert hangs.wait(HANG_SECONDS)
        first.wait_until_ended()
        second = start(store, np.arange(9))
        until(lambda: not (readers._jobs[:, gather.J_LEFT] > 0).any(), 30)
        check(second, np.arange(9))
        release.set()


def test_dropped_batches_end_when_the_store_is_closed(path: Path) -> None:
    store = kv.open(path, device="cpu")
    spaces = BatchSpaces()
    for _ in range(50):
        start(store, np.arange(COUNT), spaces)
    store.close()
    assert not store._engine.gathered
    with pytest.raises(errors.ClosedError):
        start(store, [1])


@pytest.fixture
def damaged_path(tmp_path: Path) -> Path:
    with kv.create(tmp_path / "a", schema=SCHEMA) as store:
        store.put_many(np.arange(COUNT), {"x": np.zeros((COUNT, 5), np.uint8), "y": np.arange(COUNT)})
    segment = next((tmp_path / "a").glob("*.val"))
    raw = bytearray(segment.read_bytes())
    raw[4096 + 64 * 1234] ^= 1
    segment.write_bytes(raw)
    return tmp_path / "a"


def test_a_damaged_value(damaged_path: Path) -> None:
    with kv.open(damaged_path, device="cpu") as store:
        batch = start(store, np.arange(COUNT))
        for _ in range(2):
            with pytest.raises(errors.CorruptionError, match="1234 is damaged"):
                batch.wait()


@pytest.mark.parametrize("end", ["close", "drop", "reap"])
def test_a_batch_keeps_its_error_when_the_store_is_closed(damaged_path: Path, end: str) -> None:
    store = kv.open(damaged_path, device="cpu")
    batch = start(store, np.arange(COUNT))
    if end == "reap":
        batch.read()
        start(store, [1]).wait_until_ended()  # the engine forgets batches that are done
    if end == "drop":
        del store
        gc.collect()
        lifetime.wait_until_closed()
    else:
        store.close()
    with pytest.raises(errors.CorruptionError, match="1234 is damaged"):
        batch.wait()


def test_another_store_has_all_places(path: Path) -> None:
    with kv.open(path, device="cpu") as store, kv.open(path, device="cpu") as second_store:
        before = [start(second_store, np.arange(600)) for _ in range(gather.SLOTS)]
        batch = start(store, np.arange(COUNT))
        assert batch.done()
        for each in before:
            check(each, np.arange(600))
        check(batch, np.arange(COUNT))
    assert sorted(gather.piece_readers()._free) == list(range(gather.SLOTS))


def test_a_batch_is_read_if_no_thread_can_be_started(store: Any, unread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    monkeypatch.setattr(io_threads, "_pool", io_threads.IOThreadPool())
    monkeypatch.setattr(store._engine.stream, "wait_for_word", lambda *_: None)
    batch = start(store, np.arange(COUNT))
    assert batch.done()  # otherwise a later wait in the stream would block on the batch
    check(batch, np.arange(COUNT))


def test_a_batch_that_ends_while_another_thread_waits_for_it(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, slots = start(store, np.arange(COUNT)), []
    address_of = batch._readers.address_of

    class Slot(int):
        """A place that another thread gives back after the comparison."""

        def __ge__(self, number: int) -> bool:
            store._engine.forget_gathered(batch)
            return True

    def note_slot(slot: int) -> int:
        slots.append(slot)
        return address_of(max(slot, 0))

    monkeypatch.setattr(batch._readers, "address_of", note_slot)
    batch._slot = Slot(batch._slot)
    batch.wait_until_ended()
    assert slots and min(slots) >= 0


def test_the_end_of_the_program_reads_batches_in_flight(
    store: Any, unread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store._engine.stream, "wait_for_word", lambda *_: None)  # a GPU waits without the host
    monkeypatch.setattr(gather, "current_io_threads", io_threads.IOThreadPool)
    monkeypatch.setattr(io_threads.IOThreadPool, "submit", lambda *_: None)  # as if the I/O threads had stopped
    batch = start(store, np.arange(COUNT))
    assert not batch.done()
    estate, _ = closing._unfinished[id(store._estate)]
    estate.finish()
    assert batch.done() and not store.closed


def test_a_batch_does_not_end_before_its_copy_is_in_the_stream(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, mark = store._engine.stream, store._engine.stream.mark
    is_copied = False

    def mark_after_reap() -> Any:
        store._engine.reap()  # by another thread
        assert len(gather.piece_readers()._free) == gather.SLOTS - 1
        mark()
        return lambda: is_copied

    monkeypatch.setattr(stream, "mark", mark_after_reap)
    batch = start(store, np.arange(COUNT))
    assert not batch.done() and list(store._engine.gathered) == [batch]
    is_copied = True
    check(batch, np.arange(COUNT))


def test_an_error_of_the_stream_leaves_no_batch(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise errors.KernelError("the driver failed")

    with monkeypatch.context() as patch:
        patch.setattr(store._engine.stream, "wait_for_word", fail)
        with pytest.raises(errors.KernelError):
            start(store, np.arange(COUNT))
    store._engine.gathered[0].wait_until_ended()
    check(start(store, np.arange(COUNT)), np.arange(COUNT))
    assert not store._engine.gathered
    assert len(gather.piece_readers()._free) == gather.SLOTS


def test_ctrl_c_waits_until_a_batch_is_in_the_stream(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, steps = store._engine.stream, []
    for name in ("wait_for_word", "copy", "mark"):
        function = getattr(stream, name)

        def step(*args: Any, name: str = name, function: Any = function) -> Any:
            steps.append(name)
            if name == "wait_for_word":
                os.kill(os.getpid(), signal.SIGINT)
            return function(*args)

        monkeypatch.setattr(stream, name, step)
    with pytest.raises(KeyboardInterrupt):
        start(store, np.arange(COUNT))
    assert steps == ["wait_for_word", "copy", "mark"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_threads_of_its_own(store: Any) -> None:
    batch = start(store, np.arange(COUNT))
    child = os.fork()
    if child == 0:
        try:
            with pytest.raises(errors.ForkError, match="start it again here"):
                batch.wait_until_ended()
            readers = gather.piece_readers()
            fine = sorted(readers._free) == list(range(gather.SLOTS)) and not readers._workers.occupied
            os._exit(0 if fine else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    check(batch, np.arange(COUNT))
