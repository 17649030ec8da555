"""Stores that are dropped, and stores that a program leaves open when it ends."""

import gc
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.descriptors import open_descriptors, until_closed
from tests.harness.kv_device import exist
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from warpwell import closing, errors
from warpwell.kv import lifetime
from warpwell.kv.index.index import S_STRIPES, StoreState
from warpwell.storage import io_threads
from warpwell.train.loader import Prefetch


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "s.kv"
    with ww.kv.create(folder) as store:
        store.put_many(np.arange(10), np.ones((10, 64), np.uint8))
    return folder


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096


def eventually(holds: Callable[[], bool], seconds: float = HANG_SECONDS) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


# -- dropped stores -----------------------------------------------------------------------------------------


def test_dropped_readers_give_everything_back(path: Path) -> None:
    ww.kv.open(path).get(1)
    assert closing.wait_until_closed(HANG_SECONDS)  # stores that other tests dropped have been closed
    files, growths = open_descriptors(), []
    for _ in range(3):
        space = address_space()
        for _ in range(10):
            store = ww.kv.open(path)
            assert store.get(1) == bytes([1]) * 64
            del store
        growths.append(address_space() - space)
    until_closed(files)
    # A mapping alone takes 256 MiB. A thread of another test may add 64 MiB once: an arena of the
    # allocator has this size. Memory that readers keep is added in every round.
    assert min(growths) < 16 << 20, growths


def test_a_dropped_writer_commits_and_lets_the_next_one_in(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = ww.kv.open(path, "r+")
    store.put(99, b"one")
    del store
    store = ww.kv.open(path, "r+")
    store.put(100, b"two")
    knot: list[Any] = [store]
    knot.append(knot)
    del store, knot
    gc.collect()
    with ww.kv.open(path, "r+") as again:
        assert (again[99], again[100], len(again)) == (b"one", b"two", 12)
    assert not caplog.records


@pytest.mark.parametrize("is_new", [False, True])
def test_a_dropped_writer_whose_commit_takes_long_lets_the_next_one_in(
    path: Path, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    store = ww.kv.open(path, "r+")
    store.put(99, b"one")
    inner, settle = store._records.log.commit, closing.wait_until_closed
    may_end, waits = threading.Event(), list[float]()

    def commit() -> int:
        assert may_end.wait(HANG_SECONDS)
        return inner()

    def short_settle(seconds: float) -> bool:
        waits.append(seconds)
        if len(waits) == 1:
            return settle(0.01)  # which is over before the commit has ended
        may_end.set()
        return settle(HANG_SECONDS)

    store._records.log.commit = commit
    monkeypatch.setattr(closing, "wait_until_closed", short_settle)
    try:
        del store
        with ww.kv.create(path, overwrite=True) if is_new else ww.kv.open(path, "r+") as again:
            assert again.get(99) == (None if is_new else b"one")
    finally:
        may_end.set()
    assert len(waits) == 2 and waits[0] < waits[1]


def test_what_a_dropped_writer_could_not_commit_is_told(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = ww.kv.open(path, "r+")
    store.put_many([11, 12], [b"x", b"y"])

    def fail() -> int:
        raise errors.StorageFullError("no space left", path=str(path))

    store._records.log.commit = fail
    del store
    assert closing.wait_until_closed(HANG_SECONDS)
    message = caplog.text
    assert "2 changes" in message and str(path) in message and "are lost" in message and "no space left" in message
    assert "Traceback" not in message
    with ww.kv.open(path, "r+") as again:
        assert len(again) == 10


def test_an_interrupt_while_a_dropped_writer_commits(path: Path) -> None:
    store = ww.kv.open(path, "r+")
    store.put(11, b"x")
    store_log = store._records.log
    inner, is_dropped = store_log.commit, threading.Event()

    def commit() -> int:
        store_log.commit = inner  # closing the log commits once more
        assert is_dropped.wait(HANG_SECONDS)  # Ctrl-C must not come while the finalizer hands the store over
        signal.raise_signal(signal.SIGINT)
        return inner()

    store_log.commit = commit
    # Raised here, and not in a finalizer, which would ignore it and lose the record.
    with pytest.raises(KeyboardInterrupt):
        del store
        is_dropped.set()
        until(lambda: False)
    with ww.kv.open(path) as again:
        assert again[11] == b"x"


def test_a_dropped_prefetch_is_not_waited_for() -> None:
    started, answered = threading.Event(), threading.Event()

    class Answer:
        def wait(self) -> None:
            started.set()
            assert answered.wait(HANG_SECONDS)

    ahead: Prefetch[int] = Prefetch(iter(range(3)), lambda _: Answer(), 2)
    flight = ahead._flight
    start = time.monotonic()
    del ahead  # may run in any thread, also in the one that must answer
    assert time.monotonic() - start < HANG_SECONDS / 2
    assert started.wait(HANG_SECONDS)
    answered.set()
    assert closing.wait_until_closed(HANG_SECONDS) and not flight._futures


def test_a_dropped_writer_on_a_device_is_replaced(path: Path) -> None:
    store = ww.kv.open(path, "r+", device="cpu")
    store.put(50, b"x")
    del store
    with ww.kv.create(path, overwrite=True) as new:
        assert len(new) == 0


def test_a_store_and_another_beside_it_are_dropped_at_once(path: Path) -> None:
    for swapped in (False, True):
        first = ww.kv.open(path, device="cpu")
        knot: list[Any] = [first, ww.kv.open(path, device="cpu", beside=first)]
        ends = [store._engine for store in knot]
        if swapped:
            knot.reverse()
        knot.append(knot)
        del first, knot
        gc.collect()
        assert eventually(lambda ends=ends: all(engine._closed for engine in ends))  # type: ignore[misc]


def test_a_dropped_store_on_a_device_ends_its_threads(path: Path) -> None:
    def threads() -> int:
        writers = sum(t.name == "warpwell-kv-writes" for t in threading.enumerate())
        return writers + io_threads.current().active_threads

    present = np.zeros(12, np.int64)
    with ww.kv.open(path, device="cpu") as first:
        exist[3](first, np.arange(3), present)
    assert eventually(lambda: threads() == 0)
    files = open_descriptors()
    for mode in ("r", "r+"):
        store = ww.kv.open(path, mode, device="cpu", threads=2)
        exist[12](store, np.arange(12), present)
        assert present.tolist() == [1] * 10 + [0] * 2
        assert threads() > 0
        if mode == "r+":
            store.put(77, b"x")
        del store
    with ww.kv.open(path, "r+") as again:  # waits for the store that is being closed
        assert again[77] == b"x"
    assert eventually(lambda: threads() == 0)
    until_closed(files)


def test_a_batch_keeps_the_store_that_it_comes_from(path: Path) -> None:
    for device in (None, "cpu"):
        future = ww.kv.open(path, device=device).get_async(np.arange(5))
        gc.collect()
        values, found = future.wait(HANG_SECONDS)
        assert found.all() and [len(value) for value in values] == [64] * 5


def test_a_read_that_does_not_end_does_not_keep_the_program() -> None:
    code = "import time; from warpwell.kv import HostFuture; HostFuture(lambda: time.sleep(1000)); print('ends')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_SECONDS, check=True
    )
    assert done.stdout == "ends\n" and not done.stderr


def test_a_callback_that_exits_does_not_end_the_reads() -> None:
    """Four threads read: more exits of callbacks than that must not end all of them."""
    for _ in range(5):
        begins = threading.Event()
        future = ww.kv.HostFuture(begins.wait)
        future.add_done_callback(lambda _: sys.exit("a callback ends its thread"))
        begins.set()
        assert future.wait(HANG_SECONDS) is True
    assert ww.kv.HostFuture(lambda: 3).wait(HANG_SECONDS) == 3


def test_a_store_that_could_not_be_opened_leaves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ww.kv.open(path, device="cpu").close()
    files, space, threads = open_descriptors(), address_space(), set(threading.enumerate())

    def refused(native: Any) -> Any:
        raise RuntimeError("no drive")

    for _ in range(3):
        with pytest.raises(RuntimeError, match="no drive"):
            ww.kv.open(path, "r+", device="cpu", drive=refused)
    until_closed(files)
    assert not set(threading.enumerate()) - threads  # idle I/O threads of earlier tests may end
    assert address_space() - space < 200 << 20


def test_stores_are_dropped_in_the_middle_of_others_work(path: Path) -> None:
    """A finalizer comes anywhere, with locks held: none that it needs may be among them."""
    from warpwell.kv.index import reader
    from warpwell.targets import bus_error

    functions = (
        bus_error.map_guarded,
        bus_error.unmap,
        reader.map_file,
    )
    codes = {function.__code__ for function in functions}
    gc.collect()
    guarded = set(bus_error._slots)  # arrays of other tests may be mapped still
    count = 0

    def trace(frame: Any, event: str, argument: object) -> Any:
        nonlocal count
        if frame.f_code in codes and event == "line":
            count += 1
            ww.kv.open(path)  # dropped at once
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        store = ww.kv.open(path)
        assert store.get(3) == bytes([1]) * 64
        store.close()
    finally:
        sys.settrace(before)
    assert count > 10 and set(bus_error._slots) <= guarded


# -- the end of a program -----------------------------------------------------------------------------------


def end(program: str, path: Path) -> tuple[int, str]:
    code = f"import os, sys, warpwell as ww\npath = {str(path)!r}\n{program}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr


@pytest.mark.quick("end", "fork", "exception")
@pytest.mark.parametrize(
    ("program", "status", "stored", "message"),
    [
        ("w = ww.kv.create(path); w['a'] = b'1'", 0, 1, ""),
        ("w = ww.kv.create(path); w['a'] = b'1'; sys.exit(3)", 3, 1, ""),
        ("w = ww.kv.create(path, durability='none'); w['a'] = b'1'; d = ww.kv.open(path, device='cpu')", 0, 1, ""),
        (
            "w = ww.kv.create(path); w['a'] = b'1'; w.commit(); w['b'] = w['c'] = b'2'; raise ValueError('mine')",
            1,
            1,
            "2 changes of {path} since its last commit() are lost",
        ),
        ("w = ww.kv.create(path); w['a'] = b'1'; w.commit(); raise ValueError('mine')", 1, 1, None),
        (
            "w = ww.kv.create(path); w['a'] = b'1'; child = os.fork()\n"
            "if not child: sys.exit(0)\n"
            "os.waitpid(child, 0); assert w.uncommitted() == 1 and w['a'] == b'1'; w['b'] = b'2'",
            0,
            2,
            "",
        ),
    ],
    ids=["end", "exit", "none", "exception", "nothing-lost", "fork"],
)
def test_a_program_that_leaves_a_store_open(
    tmp_path: Path, program: str, status: int, stored: int, message: str | None
) -> None:
    path = tmp_path / "s.kv"
    code, errors_said = end(program, path)
    assert code == status, errors_said
    with ww.kv.open(path) as store:
        assert len(store) == stored
    if message == "":
        assert errors_said == ""
    elif message is None:
        assert "warpwell:" not in errors_said
    else:
        assert message.format(path=path) in errors_said and "with" in errors_said


def leave(path: Path, fail: bool) -> None:
    logging.getLogger().handlers.clear()  # pytest's handlers, inherited from the parent
    store = ww.kv.create(path)
    store["a"] = b"1"
    globals()["_left"] = store  # not dropped when the function ends
    if fail:
        raise ValueError("mine")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("fail", [False, True])
def test_a_forked_worker_that_leaves_a_store_open(
    tmp_path: Path, fail: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    import multiprocessing

    worker = multiprocessing.get_context("fork").Process(target=leave, args=(tmp_path / "s.kv", fail))
    try:
        raise KeyError("its parent's")
    except KeyError:
        worker.start()  # an exception that the parent handles does not end a child
    worker.join(HANG_SECONDS)
    assert worker.exitcode == int(fail)
    with ww.kv.open(tmp_path / "s.kv") as store:
        assert len(store) == (0 if fail else 1)
    assert ("1 change of" in capfd.readouterr().err) == fail


def test_kernels_under_way_do_not_keep_the_end_from_committing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ww.kv.open(path, "r+", device="cpu") as store:
        store.put(50, b"x")
        monkeypatch.setattr(store._engine, "_launches", 1)
        lifetime._close_at_exit(store, False)
        assert store.uncommitted() == 0
        monkeypatch.undo()


def test_a_reader_that_hangs_delays_the_end_of_a_store_once(tmp_path, monkeypatch):
    drain_seconds: list[float] = []
    drain = StoreState.drain

    def short_drain(state: StoreState, seconds: float = 0.05) -> bool:
        drain_seconds.append(seconds)
        return drain(state, seconds)

    monkeypatch.setattr(StoreState, "drain", short_drain)
    store = ww.kv.create(tmp_path / "store.kv", segment_bytes=1 << 16)
    store.put_many(np.arange(8), [bytes(60_000)] * 8)
    store.commit()
    assert store.stats.segments == 8
    readers = store._records.state.words[S_STRIPES : S_STRIPES + 2]
    readers += 1  # as if in each epoch a thread hung in a read
    drain_seconds.clear()
    store.close()
    assert len(drain_seconds) < 4
