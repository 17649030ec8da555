"""Stores reach the file unchanged: flush during launches, close, drop, the end of the program."""

import gc
import os
import queue
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness.arrays.kernels import write
from tests.harness.examples import examples
from tests.harness.threads import run_threads
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from warpwell import closing, errors, gpu, storage
from warpwell.array import opening

TIERS = ["storage", "host-cached", "host", "device"]
N = 1024


@ww.kernel
def gated(a, first, value, gate):
    """Store to an item, and to the next one when the gate is open."""
    i = gpu.grid(1)
    a[first + 2 * i] = value
    gpu.atomic_add(gate, 0, 1)
    while gpu.atomic_add(gate, 1, 0) == 0 and not gpu.failed():
        pass
    a[first + 2 * i + 1] = value


@ww.kernel
def fill(a, first, value):
    a[first + gpu.grid(1)] = value


class Gated:
    """A launch in a thread that stores to two items for each of its threads, before and after `release`."""

    def __init__(self, a: ww.Array, first: int = 0, value: int = 7, n: int = 4) -> None:
        self._gate = np.zeros(2, np.int64)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(a, first, value, n), daemon=True)
        self._thread.start()
        assert until(lambda: self._gate[0] >= n or not self._thread.is_alive())  # the kernel may be compiled first

    def _run(self, a: ww.Array, first: int, value: int, n: int) -> None:
        try:
            gated[n](a, first, value, self._gate)
        except BaseException as error:
            self.error = error

    def release(self) -> None:
        self._gate[1] = 1
        self._thread.join(HANG_SECONDS)
        assert not self._thread.is_alive() and self.error is None


@contextmanager
def launched(*args: Any) -> Iterator[Gated]:
    gated = Gated(*args)
    try:
        yield gated
    finally:
        gated.release()


def zeros(path: Path, n: int = N) -> Path:
    np.save(path, np.zeros(n, np.int64))
    return path


# -- flush ------------------------------------------------------------------------------------------------------------


@pytest.mark.quick("storage", "host")
@pytest.mark.parametrize("tier", TIERS)
def test_what_a_launch_stores_after_a_flush_is_written(tier: str, tmp_path: Path) -> None:
    path = zeros(tmp_path / "a.npy")
    with ww.open(path, "r+", tier=tier, cache="64KiB", device="cpu") as a, launched(a):
        a.flush()
        assert np.load(path)[:8].tolist() == [7, 0] * 4
    assert np.load(path)[:8].tolist() == [7] * 8


@pytest.mark.parametrize("tier", TIERS)
def test_pages_that_were_only_read_are_not_written(tier: str, tmp_path: Path) -> None:
    path = zeros(tmp_path / "a.npy", 4096)
    with ww.open(path, "r+", tier=tier, cache="64KiB", page_size=512, device="cpu") as a:
        a[3] = 3
        assert a[:].sum() == 3
        writer = np.load(path, mmap_mode="r+")
        writer[500] = 5
        writer.flush()
    assert np.load(path)[[3, 500]].tolist() == [3, 5] and np.load(path).sum() == 8


class Refusing(storage.RamMedium):
    """Memory whose writes fail while `broken` is set, from the given one on."""

    broken = -1

    def write(self, offset: int, data: Any) -> None:
        if self.broken == 0:
            raise errors.StorageFullError("no room")
        self.broken -= 1
        super().write(offset, data)


@pytest.mark.parametrize("tier", TIERS[1:])
@pytest.mark.parametrize("after", [0, 1])
def test_a_flush_that_fails_is_made_good_by_the_next(tier: str, after: int) -> None:
    data = np.zeros(N, np.int64)
    medium = Refusing(data)
    with ww.open(medium, "r+", dtype="i8", tier=tier, cache="64KiB", page_size=512, device="cpu") as a:
        a[5] = 5
        a[700] = 7  # not adjacent to page 0: a separate write
        medium.broken = after
        with pytest.raises(errors.StorageFullError):
            a.flush()
        medium.broken = -1
        a.flush()
        assert data[5] == 5 and data[700] == 7


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["put", "kernel"]), st.integers(0, 200), st.integers(1, 56), st.integers(1, 99)),
        st.tuples(st.just("begin"), st.integers(0, 30), st.integers(1, 99)),
        st.tuples(st.sampled_from(["release", "flush", "evict", "read", "reopen", "drop"])),
    ),
    max_size=14,
)


@pytest.mark.quick("storage")
@pytest.mark.parametrize("tier", TIERS)
@settings(max_examples=examples(12), deadline=None)
@given(operations=OPERATIONS)
def test_any_order_of_stores_flushes_and_launches(
    tier: str, operations: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The file is the model after a flush at rest, and another writer's items stay what they are throughout.

    The host and short launches write items 0 to 255, a launch that keeps running writes 256 to 511. The items of the
    other writer have separate pages.
    """
    path = zeros(tmp_path_factory.mktemp("order") / "a.npy")
    model = np.zeros(N, np.int64)
    options: dict[str, Any] = {"tier": tier, "cache": 6 * 520, "page_size": 512, "device": "cpu"}
    a = ww.open(path, "r+", **options)
    flying: Gated | None = None
    with path.open("r+b") as writer:
        writer.seek(128 + 8 * 768)
        for k, (operation, *with_) in enumerate(operations):
            if operation in ("put", "kernel"):
                first, n, value = with_
                model[first : first + n] = value
                if operation == "put":
                    a[first : first + n] = value
                else:
                    fill[n](a, first, value)
            elif operation == "begin" and flying is None:
                first, value = 256 + 8 * with_[0], with_[1]
                flying = Gated(a, first, value)
                model[first : first + 8] = value
            elif operation == "release" and flying is not None:
                flying.release()
                flying = None
            elif operation == "flush":
                a.flush()
                now = np.load(path)
                assert (now[:256] == model[:256]).all()
                assert flying is not None or (now[:512] == model[:512]).all()
            elif operation == "evict":
                a.evict(0, 200)
            elif operation == "read":
                assert (a[:256] == model[:256]).all()
            elif flying is None and operation == "reopen":
                a.close()
                assert (np.load(path)[:512] == model[:512]).all()
                a = ww.open(path, "r+", **options)
            elif flying is None and operation == "drop":
                del a
                a = ww.open(path, "r+", **options)
                assert (np.load(path)[:512] == model[:512]).all()
            writer.write(np.int64(k + 1).tobytes())
            writer.flush()
        if flying is not None:
            flying.release()
    a.close()
    model[768 : 768 + len(operations)] = np.arange(len(operations)) + 1
    assert (np.load(path) == model).all()


# -- closing ----------------------------------------------------------------------------------------------------------


@pytest.mark.quick("storage")
@pytest.mark.parametrize("tier", TIERS)
def test_an_array_of_a_shared_cache_stays_open_while_a_launch_uses_it(tier: str, tmp_path: Path) -> None:
    path, second_path = zeros(tmp_path / "a.npy"), zeros(tmp_path / "b.npy")
    with ww.Cache("64KiB", device="cpu") as cache, ww.open(second_path, "r+", cache=cache) as b:
        a = ww.open(path, "r+", cache=cache, tier=tier)
        with launched(a):
            with pytest.raises(errors.SharingError, match=r"1 launches use array 'a\.npy': wait"):
                a.close()
            with pytest.raises(errors.SharingError):
                cache.close()
            with pytest.raises(errors.SharingError):
                ww.open(path, cache=cache)
            b[5] = 5
            b.close()  # the launch does not use b
            assert np.load(second_path)[5] == 5
        a.close()
        assert np.load(path)[:8].tolist() == [7] * 8
        with pytest.raises(errors.ClosedError):
            fill[1](a, 0, 1)


def test_arrays_that_come_and_go_beside_residency_calls(tmp_path: Path) -> None:
    """Frames move when an array is opened or closed: no call of another thread may work on where they were."""
    path, second_path = zeros(tmp_path / "a.npy", 1 << 14), zeros(tmp_path / "b.npy", 1 << 14)
    with ww.Cache("256KiB", device="cpu", page_size=512) as cache, ww.open(path, "r+", cache=cache) as a:
        a[:] = 3
        stop = threading.Event()
        unexpected: list[BaseException] = []

        def work() -> None:
            while not stop.is_set():
                try:
                    a.prefetch()
                    a.evict(0, 2000)
                except errors.KernelError:  # a prefetch of these pages is in flight
                    pass
                except BaseException as error:
                    unexpected.append(error)
                    return

        thread = threading.Thread(target=work)
        thread.start()
        done = 0
        deadline = time.monotonic() + 3
        while done < 8 and time.monotonic() < deadline:
            try:
                with ww.open(second_path, "r+", cache=cache) as b:
                    b[:] = done
                    assert (b[:] == done).all()
                done += 1
            except errors.SharingError:
                pass
        stop.set()
        thread.join(HANG_SECONDS)
        assert not unexpected and not thread.is_alive()
        assert (a[:] == 3).all()


def test_a_closed_cache_leaves_nothing_unwritten(tmp_path: Path) -> None:
    paths = [zeros(tmp_path / f"{tier}.npy") for tier in TIERS]
    cache = ww.Cache("64KiB", device="cpu")
    arrays = [ww.open(path, "r+", cache=cache, tier=tier) for path, tier in zip(paths, TIERS, strict=True)]
    for a in arrays:
        a[9] = 9
    cache.close()
    for a in arrays:
        a.close()
    assert [np.load(path)[9] for path in paths] == [9] * 4


def test_closing_gives_pins_back(tmp_path: Path) -> None:
    with ww.Cache("64KiB", device="cpu") as cache, ww.open(zeros(tmp_path / "a.npy"), cache=cache) as a:
        b = ww.open(zeros(tmp_path / "b.npy"), cache=cache)
        b.pin()
        b.pin(0, 100)
        b.close()
        assert cache._count_pinned(a._nsid) == 0
        ww.open(tmp_path / "b.npy", cache=cache).close()


# -- dropping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("shared", [False, True])
def test_a_dropped_array_is_written(tier: str, shared: bool, tmp_path: Path) -> None:
    path = zeros(tmp_path / "a.npy")
    cache: Any = ww.Cache("64KiB", device="cpu") if shared else "64KiB"
    a = ww.open(path, "r+", tier=tier, cache=cache, device="cpu")
    a[3] = 8
    del a
    assert until(lambda: bool(np.load(path)[3] == 8))
    # The dropped array has released its file, its frames and its share.
    with ww.open(path, "r+", cache=cache, device="cpu") as again:
        assert again[3] == 8
    if shared:
        cache.close()


def test_what_a_dropped_array_cannot_write_is_told(caplog: pytest.LogCaptureFixture) -> None:
    medium = Refusing(np.zeros(N, np.int64))
    a = ww.open(medium, "r+", dtype="i8", tier="host", cache="64KiB", device="cpu", name="mine")
    a[3] = 8
    medium.broken = 0
    del a
    assert closing.wait_until_closed(20)
    assert "changes of array 'mine', which was dropped, may be lost: StorageFullError: no room" in caplog.text


def test_a_collection_between_any_two_lines_blocks_nothing(tmp_path: Path) -> None:
    """A finalizer that took a lock, or waited, would stop the thread that holds it."""
    path = zeros(tmp_path / "a.npy", 10)
    done: list[int] = []

    def work() -> None:
        with path.open("rb") as file:
            repeat(file)

    def repeat(file: Any) -> None:
        for allocations in range(1, 40):
            gc.collect()
            gc.disable()
            a: Any = ww.open(path, "r+", device="cpu", cache="64KiB")
            a.me = a  # only the collector frees it
            del a
            gc.set_threshold(gc.get_count()[0] + allocations, 1000, 1000)
            gc.enable()
            try:
                status = os.fstat(file.fileno())
                opening._claim((status.st_dev, status.st_ino), str(path))()
            except errors.SharingError:
                pass
            gc.set_threshold(*thresholds)
            gc.collect()
            closing.wait_until_closed(20)
            done.append(allocations)

    thresholds = gc.get_threshold()
    gc.freeze()  # collecting the garbage of earlier tests would take most of the time
    thread = threading.Thread(target=work, daemon=True)
    try:
        thread.start()
        thread.join(HANG_SECONDS)
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
        gc.unfreeze()
    assert len(done) == 39


def test_a_closing_thread_that_could_not_be_started_is_started_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = zeros(tmp_path / "a.npy")
    monkeypatch.setattr(closing, "_thread", None)
    monkeypatch.setattr(closing, "_dropped", queue.SimpleQueue())
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "warpwell-closing":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            ww.open(path, "r+", device="cpu", cache="64KiB")
    a = ww.open(path, "r+", device="cpu", cache="64KiB")
    a[3] = 8
    del a
    assert until(lambda: bool(np.load(path)[3] == 8))


def test_dropped_caches_are_freed(tmp_path: Path) -> None:
    path = zeros(tmp_path / "a.npy")

    def use() -> None:
        cache = ww.Cache("1MiB", device="cpu")
        with ww.open(path, cache=cache) as a:
            assert a[5] == 0

    use()
    assert closing.wait_until_closed(20)
    before = threading.active_count()
    for _ in range(4):
        use()
    gc.collect()
    assert closing.wait_until_closed(20) and until(lambda: threading.active_count() <= before)


@pytest.mark.parametrize("tier", ["host", "device"])
def test_what_kernels_write_that_nobody_counts_is_written(tier: str, tmp_path: Path) -> None:
    """Those that are given a view; in these tiers they need no controller, so nothing brackets them."""
    path = zeros(tmp_path / "a.npy")
    with ww.open(path, "r+", device="cpu", tier=tier) as a:
        view = a.view()
        for value in (1, 2):
            write[4](view, np.arange(4), np.full(4, value), device="cpu")
            a.flush()
            assert np.load(path)[:5].tolist() == [value] * 4 + [0]


# -- the end of the program -------------------------------------------------------------------------------------------

PROGRAM = """
    import atexit, multiprocessing, os, sys, threading, time
    import numpy as np
    import warpwell as ww

    TIERS = ["storage", "host-cached", "host", "device"]

    def write(value=8, shared=False):
        cache = ww.Cache("64KiB", device="cpu") if shared else "64KiB"
        arrays = [ww.open(f"{tier}.npy", "r+", tier=tier, cache=cache, device="cpu") for tier in TIERS]
        for a in arrays:
            a[3] = value
        return arrays
"""
ENDS = {
    "falls off": ("kept = write()", 0),
    "shared": ("kept = write(shared=True)", 0),
    "dropped": ("write()", 0),
    "cycle": ("kept = write(); kept.append(kept); del kept", 0),
    "sys.exit": ("kept = write(); sys.exit(3)", 3),
    "exception": ("kept = write(); 1 / 0", 1),
    "handler": ("atexit.register(lambda: [a.close() for a in kept]); kept = write()", 0),
    "thread": (  # opens before the main thread exits: from Python 3.12 on, no thread can start after that
        "opened = threading.Event()\n"
        "def work():\n"
        "    global kept\n"
        "    kept = write(7)\n"
        "    opened.set(); time.sleep(0.2)\n"
        "    for a in kept: a[3] = 8\n"
        "threading.Thread(target=work).start(); opened.wait(60)",
        0,
    ),
    "multiprocessing": (
        "p = multiprocessing.get_context('fork').Process(target=lambda: globals().update(kept=write()))\n"
        "p.start(); p.join(60); assert p.exitcode == 0",
        0,
    ),
}


def program(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    source = textwrap.dedent(PROGRAM) + textwrap.dedent(text)
    quiet = "ignore:This process:DeprecationWarning"  # Python 3.12 warns about fork() with threads
    command = [sys.executable, "-W", quiet, "-c", source]
    # From an empty code cache it compiles for 50 s of CPU time.
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=2 * HANG_SECONDS)


@pytest.mark.quick("falls off", "handler", "multiprocessing")
@pytest.mark.parametrize("how", ENDS)
def test_a_program_that_ends_writes_what_is_open(how: str, tmp_path: Path) -> None:
    for tier in TIERS:
        zeros(tmp_path / f"{tier}.npy")
    text, status = ENDS[how]
    ended = program(tmp_path, text)
    assert ended.returncode == status, ended.stderr
    assert "may be lost" not in ended.stderr and ("ZeroDivisionError" in ended.stderr) == (how == "exception")
    assert [np.load(tmp_path / f"{tier}.npy")[3] for tier in TIERS] == [8] * 4


def test_a_forked_child_does_not_write_its_parents_changes(tmp_path: Path) -> None:
    for tier in TIERS:
        zeros(tmp_path / f"{tier}.npy")
    (tmp_path / "put.py").write_text("import warpwell as ww\n@ww.kernel\ndef put(a, value):\n    a[3] = value\n")
    ended = program(
        tmp_path,
        """
        from put import put
        kept = write()
        for a in kept: a.flush()
        for a in kept: put[1](a, 9)
        child = os.fork()
        if not child:
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print([int(np.load(f"{tier}.npy")[3]) for tier in TIERS], flush=True)
        """,
    )
    assert (ended.stdout.strip(), ended.stderr, ended.returncode) == ("[8, 8, 8, 8]", "", 0)
    assert [np.load(tmp_path / f"{tier}.npy")[3] for tier in TIERS] == [9] * 4


@pytest.mark.slow
def test_a_daemon_that_writes_still_is_told(tmp_path: Path) -> None:
    for tier in TIERS:
        zeros(tmp_path / f"{tier}.npy")
    (tmp_path / "gated.py").write_text(
        "import warpwell as ww\n@ww.kernel\ndef gated(a, gate):\n    a[3] = 8\n    ww.gpu.atomic_add(gate, 0, 1)\n"
        "    while ww.gpu.atomic_add(gate, 1, 0) == 0:\n        pass\n    a[4] = 8\n"
    )
    ended = program(
        tmp_path,
        """
        from gated import gated
        gates = [np.zeros(2, np.int64) for tier in TIERS]
        arrays = [ww.open(f"{tier}.npy", "r+", tier=tier, cache="64KiB", device="cpu") for tier in TIERS]
        for a, gate in zip(arrays, gates):
            threading.Thread(target=lambda a=a, gate=gate: gated[1](a, gate), daemon=True).start()
            while not gate[0]:
                time.sleep(0.01)
        """,
    )
    assert ended.returncode == 0
    for tier in TIERS:
        assert f"changes of array '{tier}.npy' may be lost: SharingError: a launch in a daemon" in ended.stderr
        assert np.load(tmp_path / f"{tier}.npy")[3] == 8


@pytest.mark.quick("kernel")
@pytest.mark.parametrize("how", ["put[1](a, 8)", "a[3] = 8"], ids=["kernel", "host"])
def test_threads_that_cannot_be_started_at_the_end_are_not_needed(how: str, tmp_path: Path) -> None:
    """From Python 3.12 on none can; here a launch had at most one thread, and writing back asks for many."""
    np.save(tmp_path / "a.npy", np.zeros(1 << 14))
    (tmp_path / "put.py").write_text("import warpwell as ww\n@ww.kernel\ndef put(a, value):\n    a[3] = value\n")
    ended = program(
        tmp_path,
        f"""
        from put import put

        def refuse(self):
            raise RuntimeError("can't create new thread at interpreter shutdown")

        a = ww.open("a.npy", "r+", cache="1MiB", page_size=512, device="cpu")
        {how}
        threading.Thread.start = refuse
        """,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert np.load(tmp_path / "a.npy")[3] == 8


# -- prefetch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["storage", "host-cached"])
def test_a_prefetch_from_the_host_brings_what_the_frames_hold(tier: str) -> None:
    """Many times the command ids of the cache: they are used again and again."""
    medium = storage.RamMedium(np.arange(1 << 16))
    options: dict[str, Any] = {"page_size": 512, "cache": 600 * 520, "depth": 16, "queues": 2, "device": "cpu"}
    with ww.open(medium, dtype="i8", tier=tier, **options) as a:
        a.prefetch()
        assert until(lambda: a.cache._process_completions() or a.stats.prefetched == a.cache.frames)
        assert a.stats.prefetch_dropped == 0 and a.cache.frames > 400
        before = a.stats.misses
        assert a[: 64 * 100].sum() == sum(range(64 * 100)) and a.stats.misses == before
        a.evict()
        a.pin(0, 64 * (a.cache.frames - 5))
        a.prefetch()  # resident pages count as prefetched; the other pages have five frames
        assert a.stats.prefetch_dropped <= 5


# -- views and queues -------------------------------------------------------------------------------------------------


def test_a_view_from_before_the_frames_moved_is_refused(tmp_path: Path) -> None:
    path = zeros(tmp_path / "a.npy")
    with ww.Cache("64KiB", device="cpu") as cache, ww.open(path, "r+", cache=cache) as a:
        with a.active() as used:
            fill[1](used, 3, 5, device="cpu")
        never_used = a.view()
        ww.open(path, cache=cache).close()
        for view in (used, never_used):
            with pytest.raises(errors.ClosedError, match=r"call a\.view\(\) for each launch"):
                fill[1](view, 3, 6, device="cpu")
            with pytest.raises(errors.ClosedError, match=r"call a\.view\(\) for each launch"):
                view.flat()
        with a.active() as view:
            fill[1](view, 4, 6, device="cpu")
        assert a[3:5].tolist() == [5, 6]


def test_small_arrays_have_few_queues(tmp_path: Path) -> None:
    with ww.open(zeros(tmp_path / "a.npy"), cache="1MiB", device="cpu") as a:
        assert a.cache.pairs.count == 1
    with ww.open(tmp_path / "a.npy", cache="1MiB", device="cpu", queues=4) as a:
        assert a.cache.pairs.count == 4
    with ww.open(zeros(tmp_path / "b.npy", 1 << 16), cache="1MiB", device="cpu") as a:
        assert a.cache.pairs.count == 8 and (a[:] == 0).all()


def test_counts_of_threads_are_apart(tmp_path: Path) -> None:
    """Flush and evict count what is left to do: with one word for both, a flush could miss what it has not written."""
    with ww.Cache("256KiB", page_size=512, device="cpu") as cache:
        arrays = [ww.open(zeros(tmp_path / f"{k}.npy", 1 << 12), "r+", cache=cache) for k in range(2)]

        def work(k: int) -> None:
            for _ in range(40):
                arrays[k].pin(0, 2000)
                arrays[k].unpin(0, 2000)

        run_threads(work, [(k,) for k in range(2)])
        assert cache._count_pinned(arrays[0]._nsid) == 0
        for a in arrays:
            a.close()
