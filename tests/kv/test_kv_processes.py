"""Stores in forked and spawned processes, and under calls that come in the middle of others."""

import copy
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.until import HANG_SECONDS

import warpwell as ww
from warpwell import errors
from warpwell.kv import lifetime
from warpwell.kv.index.index import Index, StoreState
from warpwell.kv.index.reader import Reader
from warpwell.kv.schema import _finish
from warpwell.kv.store import _get

# The threads of the parent do nothing that a child here waits for.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

N = 400
SIZE = 2048


def value(key: int, version: int = 0) -> bytes:
    return bytes([(key + version) % 251]) * SIZE


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of N values of one size."""
    folder = tmp_path_factory.mktemp("kv") / "bytes.kv"
    with ww.kv.create(folder) as store:
        store.put_many(np.arange(N), [value(k) for k in range(N)])
    return folder


@pytest.fixture
def store(path: Path) -> Iterator[Any]:
    with ww.kv.open(path) as opened:
        yield opened


def in_child(check: Callable[[], object], seconds: float = HANG_SECONDS) -> int:
    """Fork, and call `check` in the child, which ends with 0 if it returns; return the child's process id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, seconds)
            check()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def joined(children: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def check_reads(store: Any, seed: int, count: int) -> None:
    for key in np.random.default_rng(seed).integers(0, N, count).tolist():
        assert store.get(key) == value(key)
    keys = np.random.default_rng(seed).integers(0, N, 50)
    assert store.get_many(keys)[0] == [value(k) for k in keys.tolist()]


# -- forks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [None, "cpu"])
def test_forked_readers_read_their_own_values(path: Path, device: str | None) -> None:
    with ww.kv.open(path, device=device) as store:
        check_reads(store, 0, 10)
        stop = threading.Event()

        def read() -> None:
            while not stop.is_set():
                check_reads(store, 1, 100)

        thread = threading.Thread(target=read)
        thread.start()
        children = [in_child(lambda k=k: check_reads(store, k, 20_000)) for k in range(3)]  # type: ignore[misc]
        codes = joined(children)
        stop.set()
        thread.join(HANG_SECONDS)
        assert codes == [0, 0, 0]
        check_reads(store, 5, 100)


def test_a_child_goes_on_with_what_was_there_at_the_fork(tmp_path: Path) -> None:
    path = tmp_path / "s.kv"
    writer = ww.kv.create(path, segment_bytes="64KiB")
    writer.put_many(np.arange(100), [b"old"] * 100)
    writer.commit()
    store = ww.kv.open(path)
    assert store.get(5) == b"old"
    read_end, write_end = os.pipe()

    def child() -> None:
        assert os.read(read_end, 1) == b"x"  # the parent has refreshed and closed
        assert len(store) == 100 and 7 in store
        assert store.get(5) == store[7] == b"old"
        assert store.get_many([5, 7])[0] == [b"old", b"old"]
        assert store.refresh() > 0
        assert store.get(5) == b"new" * 4000 and 7 not in store
        assert store.get_many([5, 7])[0] == [b"new" * 4000, None]
        store.close()

    pid = in_child(child)
    writer.put_many(np.arange(100), [b"new" * 4000] * 100)
    writer.commit()
    writer.delete(7)
    writer.commit()
    assert store.refresh() > 0
    store.close()
    writer.compact()
    writer.close()
    os.write(write_end, b"x")
    assert joined([pid]) == [0]
    os.close(read_end)
    os.close(write_end)


@pytest.mark.slow
def test_forks_beside_refreshes_and_reads(tmp_path: Path) -> None:
    path = tmp_path / "s.kv"
    writer = ww.kv.create(path, segment_bytes="64KiB", shards=[tmp_path / "one.kv", tmp_path / "two.kv"])
    writer.put_many(np.arange(N), [value(k) for k in range(N)])
    writer.commit()
    store = ww.kv.open(path)
    stop, failed = threading.Event(), []

    def guarded(step: Callable[[int], object]) -> Callable[[], None]:
        def run() -> None:
            version = 0
            try:
                while not stop.is_set():
                    version += 1
                    step(version)
            except BaseException as error:
                failed.append(error)

        return run

    def write(version: int) -> None:
        writer.put_many(np.arange(N), [value(k, version) for k in range(N)])
        writer.commit()
        if version % 5 == 0:
            writer.compact(threshold=0.5)

    def check() -> None:
        for _ in range(2):
            values = [store.get(k) for k in range(0, N, 7)]
            many, found = store.get_many(np.arange(0, N, 7))
            assert many == values and found.all() and len(store) == N
            assert all(v is not None and len(set(v)) == 1 and len(v) == SIZE for v in values)
            store.refresh()
        store.close()

    threads = [
        threading.Thread(target=guarded(step))
        for step in (write, lambda _: store.refresh(), lambda _: store.get_many(np.arange(N)))
    ]
    for thread in threads:
        thread.start()
    try:
        codes = [code for _ in range(15) for code in joined([in_child(check)])]
    finally:
        stop.set()
        for thread in threads:
            thread.join(HANG_SECONDS)
    assert codes == [0] * 15 and not failed
    store.close()
    writer.close()


def test_a_fork_does_not_wait_for_ever_for_a_refresh(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifetime, "_SECONDS", 0.1)
    is_locked, done = threading.Event(), threading.Event()

    def refresh() -> None:
        with store._records.lock:
            is_locked.set()
            done.wait(HANG_SECONDS)

    thread = threading.Thread(target=refresh)
    thread.start()
    assert is_locked.wait(HANG_SECONDS)

    def refused() -> None:
        with pytest.raises(errors.ForkError, match="being refreshed"):
            store.get(1)
        store.close()

    try:
        assert joined([in_child(refused)]) == [0]
    finally:
        done.set()
        thread.join(HANG_SECONDS)
    check_reads(store, 1, 10)
    assert joined([in_child(lambda: check_reads(store, 2, 10))]) == [0]
    assert store._records.lock.acquire(blocking=False)
    store._records.lock.release()


def test_a_fork_in_the_middle_of_a_refresh_of_the_same_thread(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        with pytest.raises(errors.ForkError, match="being refreshed"):
            store.get(1)

    children = []
    log = store._records.log
    inner = log.refresh

    def refresh(**options: Any) -> Any:
        children.append(in_child(refused))  # as a signal handler could
        return inner(**options)

    monkeypatch.setattr(log, "refresh", refresh)
    store.refresh()
    assert joined(children) == [0]
    check_reads(store, 3, 10)


def test_a_read_that_the_parent_began_is_refused_in_a_child(store: Any) -> None:
    future = store.get_async(np.arange(3))

    def refused() -> None:
        assert future.done()
        with pytest.raises(errors.ForkError, match="start it again here"):
            future.wait()
        assert store.get_async(np.arange(3)).wait(HANG_SECONDS)[0] == [value(k) for k in range(3)]

    assert joined([in_child(refused)]) == [0]
    assert future.wait(HANG_SECONDS)[0] == [value(k) for k in range(3)]


def test_a_forked_child_compiles_while_the_parent_does(tmp_path: Path) -> None:
    """A fork waits for the compiler; a child would find its lock taken by a thread that it does not have."""
    from numba.core.compiler_lock import global_compiler_lock

    compiling, forked = threading.Event(), threading.Event()

    def compile_something() -> None:
        with global_compiler_lock:
            compiling.set()
            forked.wait(0.3)

    thread = threading.Thread(target=compile_something)
    with ww.kv.create(tmp_path / "s.kv"):  # imports the compiler
        thread.start()
        assert compiling.wait(HANG_SECONDS)

        def take() -> None:
            with global_compiler_lock:
                pass

        child = in_child(take)
        forked.set()
        thread.join(HANG_SECONDS)
        assert joined([child]) == [0]


# -- stores and data sets that are sent to workers ------------------------------------------------------------


class Held:
    """A typical data set, which holds the open store."""

    def __init__(self, path: Path, *, wrapped: bool) -> None:
        store = ww.kv.open(path)
        self.records: Any = ww.train.Dataset(store) if wrapped else store

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> np.ndarray:
        return np.frombuffer(self.records[index], np.uint8).copy()


def look(dataset: Held, seed: int, connection: Any) -> None:
    try:
        wrong = 0
        for k in np.random.default_rng(seed).integers(0, N, 3000).tolist():
            wrong += dataset[k].tobytes() != value(k)
        connection.send(wrong)
    except BaseException as error:
        connection.send(error)
        raise


@pytest.mark.quick("fork-True", "spawn-False")
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_read_right_values(path: Path, method: str, wrapped: bool) -> None:
    dataset = Held(path, wrapped=wrapped)
    assert dataset[0].tobytes() == value(0)  # uses the store before the workers start
    context = multiprocessing.get_context(method)
    pairs = [context.Pipe(duplex=False) for _ in range(2)]
    workers = [context.Process(target=look, args=(dataset, k, pairs[k][1])) for k in range(2)]
    for worker in workers:
        worker.start()
    for worker, (receiving, _) in zip(workers, pairs, strict=True):
        assert receiving.poll(HANG_SECONDS), "no answer from a worker"
        assert receiving.recv() == 0
        worker.join(HANG_SECONDS)
        assert worker.exitcode == 0
    assert dataset[7].tobytes() == value(7)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_torch_read_right_values(path: Path, method: str, wrapped: bool) -> None:
    data = pytest.importorskip("torch.utils.data")
    dataset = Held(path, wrapped=wrapped)
    assert dataset[0].tobytes() == value(0)
    loader = data.DataLoader(
        dataset, batch_size=16, num_workers=2, shuffle=False, multiprocessing_context=method, timeout=120
    )
    for _ in range(2 if method == "fork" else 1):  # the others import torch for each worker
        rows = np.concatenate([batch.numpy() for batch in loader])
        assert [row.tobytes() for row in rows] == [value(k) for k in range(N)]


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_store_that_is_open_for_reading_is_pickled(path: Path, device: str | None) -> None:
    options: dict[str, Any] = {} if device is None else {"device": device, "cache": "64KiB", "value_bytes": SIZE}
    with ww.kv.open(path, **options) as store:
        with pickle.loads(pickle.dumps(store)) as again, copy.deepcopy(store) as copied:
            assert type(again) is type(copied) is type(store) and again is not store and again.path == store.path
            check_reads(again, 1, 10)
            if device is not None:
                assert again.options == store.options
            copied.close()
            check_reads(again, 2, 10)
        check_reads(store, 2, 10)
    with pytest.raises(errors.ClosedError):
        pickle.dumps(store)


def test_a_store_that_is_open_for_writing_is_not_pickled(tmp_path: Path) -> None:
    with ww.kv.create(tmp_path / "s.kv") as store, pytest.raises(errors.ForkError, match="mode='r'"):
        pickle.dumps(store)


# -- calls in the middle of calls -----------------------------------------------------------------------------


def at_each_line_of(code: Any, call: Callable[[], object], work: Callable[[], object]) -> int:
    """Do `work`, and `call` at each line of a function that it comes by, as signal handlers and finalizers may."""
    line_count = 0

    def trace(frame: Any, event: str, argument: object) -> Any:
        nonlocal line_count
        if frame.f_code is code and event in ("line", "return"):
            line_count += 1
            call()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return line_count


def test_a_get_that_is_interrupted_by_a_get(store: Any) -> None:
    got: list[bytes] = []
    # This function does the reads that native code does not: signal handlers cannot interrupt native code.
    get = partial(_get, store._records, None)
    line_count = at_each_line_of(_get.__code__, lambda: got.append(get(99)), lambda: got.append(get(1)))
    assert line_count >= 5 and got[-1] == value(1)
    assert got[:-1] == [value(99)] * line_count


def test_a_get_that_is_interrupted_by_a_signal(store: Any) -> None:
    expected = [value(k) for k in range(90)]
    previous = signal.signal(signal.SIGALRM, lambda *_: store.get(99))
    try:
        store.get(99)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        end = time.monotonic() + 0.7
        while time.monotonic() < end:
            for k in range(90):
                assert store.get(k) == expected[k]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_an_interrupt_while_a_record_becomes_arrays(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with ww.kv.create(tmp_path / "s", schema={"x": "int64", "name": "str"}) as made:
        made.put_many([1], {"x": [5], "name": ["a"]})
    with ww.kv.open(tmp_path / "s") as store:
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                at_each_line_of(_finish.__code__, interrupt, lambda: store.get(1))
        assert store.get(1) == {"x": 5, "name": "a"}


def test_bookkeeping_that_is_interrupted_by_a_read(store: Any) -> None:
    reader, state = store._records.reader, store._records.state
    freed: list[int] = []
    assert at_each_line_of(Reader.map_one_more.__code__, reader.map_one_more, reader.map_one_more) >= 4
    line_count = at_each_line_of(
        StoreState.collect.__code__, lambda: state.retire(lambda: freed.append(1)), lambda: state.retire(lambda: None)
    )
    assert line_count >= 8 and state.drain() and len(freed) == line_count
    check_reads(store, 1, 10)


# -- calls during close -------------------------------------------------------------------------------------


def test_lists_of_values_are_read_while_the_store_is_closed(path: Path) -> None:
    for _ in range(5):
        store = ww.kv.open(path)
        ended: list[type[BaseException]] = []

        def read(store: Any = store, ended: list[type[BaseException]] = ended) -> None:
            try:
                while True:
                    store.get_many(np.arange(64))
            except BaseException as error:
                ended.append(type(error))

        threads = [threading.Thread(target=read, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.03)
        store.close()
        for thread in threads:
            thread.join(HANG_SECONDS)
        assert ended == [errors.ClosedError] * 4


def test_a_location_whose_segment_is_not_open_is_an_error(path: Path) -> None:
    store = ww.kv.open(path)
    store._records.reader.close()
    with pytest.raises(errors.CorruptionError, match="not open"):
        store.get_many([1, 2])
    store.close()


@pytest.mark.parametrize("step", ["_swap", "put"])
def test_an_interrupted_refresh_loses_no_changes(tmp_path, monkeypatch, step):
    with ww.kv.create(tmp_path / "store") as writer:
        writer[0] = b"old"
        writer.commit()
        with ww.kv.open(tmp_path / "store") as reader:
            writer.put_many(np.arange(5000), np.ones((5000, 8), np.uint8))
            writer.commit()

            def interrupted(*_: Any, **__: Any) -> None:
                monkeypatch.undo()
                raise KeyboardInterrupt

            monkeypatch.setattr(Index, step, interrupted)
            with pytest.raises(KeyboardInterrupt):
                reader.refresh()
            assert reader.refresh() == 5000
            assert len(reader) == 5000 and reader[0] == bytes([1] * 8)
            del writer[0]
            writer.commit()
            assert reader.refresh() == 1 and 0 not in reader


def test_a_reader_that_saw_an_interrupted_commit_sees_the_next(tmp_path, monkeypatch):
    with ww.kv.create(tmp_path / "store") as writer:
        writer[0] = b"old"
        writer.commit()
        with ww.kv.open(tmp_path / "store") as reader:
            real = os.pwrite

            def pwrite(fd: int, data: Any, offset: int) -> int:
                done = real(fd, data, offset)
                if os.readlink(f"/proc/self/fd/{fd}").endswith(".jnl"):
                    monkeypatch.undo()
                    signal.raise_signal(signal.SIGINT)
                return done

            monkeypatch.setattr(os, "pwrite", pwrite)
            writer[1] = b"one"
            with pytest.raises(KeyboardInterrupt):
                writer.commit()
            reader.refresh()
            assert reader[1] == b"one"
            writer[2] = b"two"
            writer.commit()
            reader.refresh()
            assert reader[1] == b"one" and reader[2] == b"two"


def test_values_that_a_killed_writer_did_not_commit_take_no_space(tmp_path):
    path, copy = tmp_path / "a.kv", tmp_path / "b.kv"
    with ww.kv.create(path, segment_bytes="64KiB") as w:
        w.put_many([1, 2], [b"one" * 1000, b"two" * 1000])
        w.commit()
        w.seal()
        w.put(3, b"three" * 1000)
        w.commit()
        used = sum(file.stat().st_size for file in path.glob("*.val"))
        w.put_many(range(10, 20), [os.urandom(20_000)] * 10)
        shutil.copytree(path, copy)  # as if the process were killed
    assert len(list(copy.glob("*.val"))) > 2
    before = sum(file.stat().st_size for file in copy.glob("*.val"))
    with ww.kv.open(copy, "r+") as w:
        sizes = {file.name: file.stat().st_size for file in copy.glob("*.val")}
        assert before > used + 150_000 and sum(sizes.values()) == used + 4096 * (len(sizes) - 1)
        w.put(4, b"four" * 1000)
        w.commit()
    with ww.kv.open(copy) as r:
        assert dict(r.items()) == {1: b"one" * 1000, 2: b"two" * 1000, 3: b"three" * 1000, 4: b"four" * 1000}
        assert r.verify().sound


def test_replaced_values_stay_for_readers_that_have_not_refreshed(tmp_path):
    path = tmp_path / "a.kv"
    with ww.kv.create(path) as w:
        w.put_many([1, 2], [b"one", b"two" * 50_000])
    with ww.kv.open(path) as reader:
        with ww.kv.open(path, "r+") as w:
            w.delete(2)
            w.seal()  # so the snapshot refers to no value at the end of the segment
        with ww.kv.open(path, "r+") as w:
            w.put(3, b"three" * 50_000)
        assert reader[2] == b"two" * 50_000
        reader.refresh()
        assert dict(reader.items()) == {1: b"one", 3: b"three" * 50_000}
