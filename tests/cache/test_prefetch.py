"""Prefetches and long reads past the cache: which pages are loaded, which are not, and that none is stale."""

from __future__ import annotations

import pickle
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness.arrays.kernels import PAGE, add, read, write
from tests.harness.clock import time_passes
from tests.harness.cufile import file_of, install_fake
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from lab import media
from warpwell import errors, storage
from warpwell._future import Future
from warpwell.array import host_access
from warpwell.cache import PrefetchCounts, prefetch
from warpwell.cache.prefetch import _Rows

PER = PAGE // 8
N = 400 * PER
TIMEOUT = 1000.0
"""Timeout in seconds on the clock of the test, not in real time."""


def faulty(**faults: Any) -> media.Faulty:
    return media.Faulty(storage.RamMedium(np.arange(N)), **faults)


@pytest.fixture(params=["staged", "cufile"])
def plain(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a function that returns a medium of items 0 to N - 1: in memory, or a file that a fake cuFile reads."""
    if request.param == "staged":
        yield lambda writable=True: storage.RamMedium(np.arange(N))
        return
    fake = install_fake(monkeypatch)
    yield lambda writable=True: file_of(tmp_path / "plain", np.arange(N), writable)
    assert fake.bytes_read and not fake.registrations


def open_on(medium: Any, mode: str = "r", **options: Any) -> ww.Array:
    options = {"cache": 100 * (PAGE + 8), "page_size": PAGE, "timeout": TIMEOUT, **options}
    return ww.open(medium, mode, dtype="i8", device="cpu", **options)


def read_all(a: ww.Array, rows: Any) -> Any:
    out = np.full(len(rows), -7)
    read[len(rows)](a, rows, out)
    return out


def counts_of(future: Future, timeout: float = HANG_SECONDS) -> PrefetchCounts:
    """Wait for a prefetch; return its counts after a check of their sum."""
    counts = future.result(timeout)
    assert counts.pages == counts.loaded + counts.present + counts.skipped + counts.failed
    return counts


# -- rows ---------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    pages=st.lists(st.integers(0, 500), min_size=1, max_size=200, unique=True).map(sorted),
    max_pages=st.integers(1, 9),
    extra=st.integers(0, 40),
)
def test_rows_hold_each_page_once_in_its_slot(pages: list[int], max_pages: int, extra: int) -> None:
    slot_pages = max_pages + extra
    rows = _Rows.of(np.array(pages), max_pages, slot_pages)
    assert [p + k for p, n in zip(rows.pages, rows.counts, strict=True) for k in range(n)] == pages
    assert (rows.counts >= 1).all() and (rows.counts <= max_pages).all()
    assert (rows.positions >= 0).all() and (rows.positions + rows.counts <= slot_pages).all()
    assert (np.diff(rows.slots) >= 0).all() and rows.slots[0] == 0
    for slot in range(int(rows.slots[-1]) + 1):
        inside = rows.slots == slot
        assert (np.diff(rows.positions[inside]) == rows.counts[inside][:-1]).all()
    if pages == list(range(pages[0], pages[-1] + 1)):
        contiguous = _Rows.of((pages[0], pages[-1] + 1), max_pages, slot_pages)
        assert (contiguous.pages == rows.pages).all() and (contiguous.positions == rows.positions).all()


# -- counts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot", [4 * PAGE, 13 * PAGE, 1 << 22])
def test_a_prefetch_returns_counts(slot: int, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(prefetch.SLOT_BYTES, "cpu", slot)
    with open_on(plain(False)) as a:
        frames = a.cache.frames
        future = a.prefetch(0, 10 * PER)
        first = counts_of(future)
        assert future.done() and (first.pages, first.loaded) == (10, 10)
        second = counts_of(a.prefetch(0, 20 * PER))
        assert (second.loaded, second.present) == (10, 10)
        remaining = counts_of(a.prefetch())
        assert remaining.pages == frames and remaining.loaded == frames - 20
        before = a.stats
        assert (read_all(a, np.arange(0, frames * PER, PER)) == np.arange(0, frames * PER, PER)).all()
        assert a.stats.misses == before.misses == 0 and a.stats.prefetched == frames
        assert repr(future) == "<Future: prefetch of 10 pages, done>"
        assert pickle.loads(pickle.dumps(remaining)) == remaining, "a pool sends it"
        empty = a.prefetch(3, 3)
        assert empty.done() and counts_of(empty) == (0,) * 5
    with open_on(faulty(), tier="host") as a:
        assert a.prefetch().done()


def test_old_pages_make_room_and_new_ones_are_not_evicted_by_their_own(plain: Any) -> None:
    with open_on(plain(False)) as a:
        frames = a.cache.frames
        old = np.arange(300 * PER, 300 * PER + frames * PER)
        for _ in range(2):
            read_all(a, old)  # marks the pages as used
        assert counts_of(a.prefetch(0, frames * PER)).loaded == frames
        before = a.stats.misses
        rows = np.arange(0, frames * PER, PER)
        np.testing.assert_array_equal(read_all(a, rows), rows)
        assert a.stats.misses == before


def test_dirty_and_pinned_pages_stay(plain: Any) -> None:
    with open_on(plain(), "r+") as a:
        frames = a.cache.frames
        write[30](a, 300 * PER + PER * np.arange(30), -np.arange(30))
        a.pin(350 * PER, 360 * PER)
        counts = counts_of(a.prefetch())
        assert (counts.loaded, counts.skipped) == (frames - 40, 40)
        assert a.stats.prefetch_dropped == 40
        assert (read_all(a, 300 * PER + PER * np.arange(30)) == -np.arange(30)).all()


def test_failed_reads_are_counted_and_demand_finds_the_error() -> None:
    with open_on(faulty(fail_ranges=[(5 * PAGE, 6 * PAGE)])) as a:
        assert counts_of(a.prefetch(0, 90 * PER)).failed == 90, "one command"
        assert counts_of(a.prefetch(10 * PER, 60 * PER)).loaded == a.stats.prefetched == 50
        good = np.array([r for r in range(20 * PER) if r // PER != 5])
        np.testing.assert_array_equal(read_all(a, good), good)
        with pytest.raises(errors.MediumError):
            read_all(a, np.array([5 * PER]))


def test_every_third_read_fails_and_nothing_is_wrong() -> None:
    medium = faulty(fail_every=3)
    with open_on(medium) as a:
        pages = a.page_set()
        for _ in range(5):
            a.evict()
            counts_of(a.prefetch())
            pages.add_range(0, 64 * PER)
            assert len(list(pages.waves())) == 2
        medium.configure()
        rows = np.arange(N)
        np.testing.assert_array_equal(read_all(a, rows), rows)


def test_a_silent_medium_ends_a_prefetch_and_is_used_again() -> None:
    medium = faulty()
    with open_on(medium, timeout=TIMEOUT) as a:
        assert a[3] == 3
        medium.stop()
        future = a.prefetch(100 * PER, 150 * PER)
        with time_passes(TIMEOUT):
            assert until(future.done)
        assert future.result() == (50, 0, 0, 50, 0)
        medium.resume()
        rows = np.arange(100 * PER, 150 * PER)
        np.testing.assert_array_equal(read_all(a, rows), rows)
        assert counts_of(a.prefetch(0, 20 * PER)) == (20, 19, 1, 0, 0)
        np.testing.assert_array_equal(read_all(a, rows - 100 * PER), rows - 100 * PER)


def test_a_cancelled_prefetch_drops_the_rest() -> None:
    medium = faulty()
    with open_on(medium, cache=1 << 20) as a:
        a.prefetch(0, 1).result(HANG_SECONDS)
        medium.stop()
        future = a.prefetch()
        assert future.cancel()
        medium.resume()
        counts = counts_of(future)
        assert counts.loaded < counts.pages and counts.skipped > 0 and not future.cancel()


@pytest.mark.parametrize("close", ["array", "cache", "other array", "evict"])
def test_closing_ends_a_prefetch(close: str) -> None:
    with ww.Cache(100 * (PAGE + 8), page_size=PAGE, device="cpu", timeout=TIMEOUT) as cache:
        options: dict[str, Any] = {"cache": cache, "page_size": None, "timeout": None}
        a = open_on(faulty(delay_us=200_000), **options)
        a[0]
        future = a.prefetch(50 * PER, 150 * PER)
        if close == "array":
            a.close()
        elif close == "cache":
            cache.close()
        elif close == "evict":
            a.evict()
        else:
            open_on(storage.RamMedium(np.arange(N)), **options).close()
        assert future.done() and counts_of(future, 0)
        if close == "other array":
            np.testing.assert_array_equal(read_all(a, np.arange(N)), np.arange(N))
        if close == "array":
            with pytest.raises(errors.ClosedError):
                a.prefetch()


def test_a_prefetch_that_begins_while_its_array_leaves_ends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with ww.Cache(100 * (PAGE + 8), page_size=PAGE, device="cpu", timeout=TIMEOUT) as cache:
        a = open_on(faulty(delay_us=100_000), cache=cache, page_size=None, timeout=None)
        a[0]
        stop, detach, started, left = cache.bulk.stop, cache.controller.detach, [], []

        def stop_late(*nsid: int) -> None:
            stop(*nsid)
            if a._part._ending and not started:  # as another thread that found the array open before it closed
                started.append(cache.bulk.prefetch(a._nsid, (50, 150)))

        def detach_idle(nsid: int) -> None:
            left.append(cache.bulk.reads(nsid))
            detach(nsid)

        monkeypatch.setattr(cache.bulk, "stop", stop_late)
        monkeypatch.setattr(cache.controller, "detach", detach_idle)
        a.close()
        assert started and started[0].done() and left == [False]


def test_what_is_written_during_a_prefetch_is_not_lost() -> None:
    medium = faulty(delay_us=20_000)
    rng = np.random.default_rng(0)
    with open_on(medium, "r+") as a:
        expected = np.arange(N)
        for _ in range(6):
            rows = rng.permutation(N)[:60]
            future = a.prefetch(int(rng.integers(0, 300)) * PER, N)
            add[60](a, rows, np.full(60, 1000))
            expected[rows] += 1000
            future.result(HANG_SECONDS)
        np.testing.assert_array_equal(read_all(a, np.arange(N)), expected)
        a.flush()
        np.testing.assert_array_equal(np.asarray(medium.read(0, 8 * N)).view(np.int64), expected)


def test_prefetches_of_many_threads_beside_kernels(plain: Any) -> None:
    with open_on(plain(), "r+") as a:
        expected = np.arange(N)
        failures: list[BaseException] = []
        stop = threading.Event()

        def request_range(seed: int) -> None:
            rng = np.random.default_rng(seed)
            try:
                while not stop.is_set():
                    low = int(rng.integers(0, 380))
                    counts_of(a.prefetch(low * PER, (low + 20) * PER))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=request_range, args=(k,)) for k in range(3)]
        for thread in threads:
            thread.start()
        rng = np.random.default_rng(9)
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            rows = rng.permutation(N)[:100]
            add[100](a, rows, rows)
            expected[rows] += rows
        stop.set()
        for thread in threads:
            thread.join(HANG_SECONDS)
        assert not failures
        np.testing.assert_array_equal(read_all(a, np.arange(N)), expected)


# -- past the cache ---------------------------------------------------------------------------------------------------


class OnHost:
    """Host memory that looks like device memory."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = np.zeros(nbytes, np.uint8)
        self.__cuda_array_interface__ = {"data": (self.bytes.ctypes.data, False)}

    def __getitem__(self, part: slice) -> Any:
        return self.bytes[part]


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize(("low", "high"), [(0, N), (3, N - 5), (70, 71), (130, 9000)])
@pytest.mark.parametrize("slot", [8 * PAGE, 50 * PAGE, 1 << 22])
def test_long_runs_hold_what_kernels_wrote(
    mode: str, low: int, high: int, slot: int, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(prefetch.SLOT_BYTES, "cpu", slot)
    with open_on(plain(mode == "r+"), mode) as a:
        expected = np.arange(N)
        if mode == "r+":
            rows = np.arange(0, N, 700)
            write[len(rows)](a, rows, -rows)
            expected[rows] = -rows
        else:
            read_all(a, np.arange(0, N, 5000))
        memory, runs = OnHost(8 * (high - low)), host_access.runs_of(a, slice(low, high))
        repaired: list[int] = []
        real = host_access._copy_by_kernel

        def copy(array: Any, starts: Any, nbytes: int, data: Any) -> None:
            repaired.append(nbytes)
            real(array, starts, nbytes, data)

        monkeypatch.setattr(host_access, "_copy_by_kernel", copy)
        assert host_access.read_bulk(a, runs, memory) is memory
        np.testing.assert_array_equal(memory.bytes.view(np.int64), expected[low:high])
        assert bool(repaired) == (mode == "r+") or high - low < 700
        a.evict()
        if mode == "r+":
            write[len(rows)](a, rows, 5 * rows)
            expected[rows] = 5 * rows
        out = host_access.read_bulk(a, runs)
        np.testing.assert_array_equal(out.view(np.int64), expected[low:high])


def test_a_run_that_is_in_the_cache_or_fails_is_read_by_kernels() -> None:
    with open_on(faulty()) as a:
        a.prefetch(0, 90 * PER).result(HANG_SECONDS)
        runs = host_access.runs_of(a, slice(80 * PER))
        assert host_access.read_bulk(a, runs, OnHost(8 * 80 * PER)) is None
        assert a[: 80 * PER].sum() == np.arange(80 * PER).sum()
    with open_on(faulty(fail_ranges=[(5 * PAGE, 6 * PAGE)])) as a:
        assert host_access.read_bulk(a, host_access.runs_of(a, slice(N))) is None


def test_the_whole_array_is_read_past_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    values = np.random.default_rng(1).random((300, 100)).astype(np.float32)
    np.save(tmp_path / "a.npy", values)
    monkeypatch.setattr(host_access, "is_bulk", lambda array, runs: runs.nbytes > 0)
    with ww.open(tmp_path / "a.npy", device="cpu", tier="storage", cache="64KiB", page_size=PAGE) as a:
        before = a.stats
        np.testing.assert_array_equal(np.asarray(a), values)
        np.testing.assert_array_equal(np.asarray(a, np.float64), values)
        assert a.stats.misses == before.misses and a.stats.bytes_read >= 2 * values.nbytes
        with pytest.raises(ValueError, match="copy"):
            np.asarray(a, copy=False)


def test_staging_that_a_medium_may_write_to_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    abandoned: list[Any] = []
    monkeypatch.setattr(prefetch, "_abandoned", abandoned)
    medium = faulty()
    a = open_on(medium)
    a[0]
    medium.stop()
    future = a.prefetch(100 * PER, 150 * PER)
    with time_passes(TIMEOUT):
        assert until(future.done)
    assert len(abandoned) == 1
    medium.resume()
    a.close()


def test_an_interrupted_prefetch_does_the_work_of_those_that_wait_for_it() -> None:
    class Interrupting(storage.PythonMedium):
        def read(self, offset: int, nbytes: int) -> Any:
            if not helpers:
                helpers.append(
                    threading.Thread(
                        target=lambda: counts.append(a.prefetch(300, 310).result(HANG_SECONDS)), daemon=True
                    )
                )
                helpers[0].start()
                assert until(lambda: len(a.cache.bulk._unfinished) == 2)
                signal.raise_signal(signal.SIGINT)
            return np.arange(offset // 8, (offset + nbytes) // 8).view(np.uint8)

    helpers: list[threading.Thread] = []
    counts: list[PrefetchCounts] = []
    with ww.open(Interrupting(8 * N), dtype="i8", device="interp", cache=100 * (PAGE + 8), page_size=PAGE) as a:
        with pytest.raises(KeyboardInterrupt):
            a.prefetch(0, 10)
        helpers[0].join(HANG_SECONDS)
        assert counts and counts[0].skipped == 0


def test_an_interrupted_wait_for_a_wave_cancels_the_next_wave(monkeypatch: pytest.MonkeyPatch) -> None:
    medium = storage.RamMedium(np.arange(N))
    with ww.open(medium, dtype="i8", device="cpu", cache=100 * (PAGE + 8), page_size=PAGE) as a:
        bulk, started = a.cache.bulk, list[prefetch.Prefetch]()
        start = bulk.prefetch

        def record(*arguments: Any, **options: Any) -> prefetch.Prefetch:
            started.append(start(*arguments, **options))
            return started[-1]

        def interrupt(self: Any) -> None:
            raise KeyboardInterrupt

        parts = [np.arange(4), np.arange(4, 8), np.arange(8, 12)]
        with monkeypatch.context() as patch:
            patch.setattr(bulk, "prefetch", record)
            patch.setattr(prefetch.Prefetch, "exception", interrupt)
            with pytest.raises(KeyboardInterrupt):
                next(bulk.waves(a._nsid, zip(parts, parts, strict=True), once=False))
        assert len(started) == 2 and started[1].stopped
