"""A cache that holds all pages of its arrays: each page has its own frame, and its word is read once or never."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.until import HANG_SECONDS

import warpwell as ww
from warpwell import errors, gpu
from warpwell.cache.partition import credit_words

PAGE = 512
ITEMS = PAGE // 8
DEVICES = ["cpu", "interp"]
EVICTING, PLACED, COMPLETE = range(3)


@ww.kernel
def check_items(a, rounds, wrong):
    i = gpu.grid(1)
    for k in range(rounds):
        j = (i * 2654435761 + k * 40503) % a.size
        if a[j] % 1000000 != j:
            gpu.atomic_add(wrong, 0, 1)


@ww.kernel
def add_pages(a, sums):
    i = gpu.grid(1)
    for k in range(ITEMS):
        sums[i] += a[i * ITEMS + k]


@ww.kernel
def add_millions(a, rounds, wrong):
    i = gpu.grid(1)
    for k in range(rounds):
        j = (i * 2654435761 + k * 40503) % a.size
        if a[j] % 1000000 != j:
            gpu.atomic_add(wrong, 0, 1)
        gpu.atomic_add(a, j, 1000000)


@ww.kernel
def hold_and_check(a, rounds, counts):
    i = gpu.grid(1)
    for k in range(rounds):
        j = (i * 2654435761 + k * 40503) % a.size
        held = a.pin(j)
        if a[j] % 1000000 != j:
            gpu.atomic_add(counts, 0, 1)
        if held:
            gpu.atomic_add(counts, 1, 1)
            a.unpin(j)


def save(path: Path, data: np.ndarray) -> None:
    data.astype(np.int64).tofile(path)


def opened(path: Path, mode: str = "r", device: str = "cpu", **options: Any) -> ww.Array:
    if not isinstance(options["cache"], ww.Cache):
        options |= {"page_size": PAGE, "timeout": 20}
    return ww.open(path, mode, dtype=np.int64, device=device, tier="storage", **options)


def seen_as(view: Any) -> int:
    if not view.static.direct_mapped:
        return EVICTING
    return COMPLETE if view.fully_resident else PLACED


def residency(a: ww.Array) -> int:
    with a.active() as view:
        return seen_as(view)


def in_cache(a: ww.Array) -> None:
    """Read each page by a kernel."""
    sums = np.zeros(a.size // ITEMS, np.int64)
    add_pages[sums.size](a, sums)
    assert np.array_equal(sums, a[:].reshape(-1, ITEMS).sum(axis=1))


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_launch_looks_at_follows_what_is_there(tmp_path: Path, device: str) -> None:
    pages, threads = (12, 64) if device == "cpu" else (4, 3)
    data = np.arange(pages * ITEMS)
    save(tmp_path / "a.bin", data)
    with opened(tmp_path / "a.bin", device=device, cache="64KiB") as a:
        wrong = np.zeros(1, np.int64)
        assert residency(a) == PLACED
        assert np.array_equal(a[:], data)
        if device == "cpu":
            assert residency(a) == PLACED and a.stats.misses == 0  # the host bypasses the cache
        in_cache(a)
        assert residency(a) == COMPLETE
        assert seen_as(a.view()) == PLACED  # the view may outlive an eviction
        misses = a.stats.misses
        check_items[threads](a, 4, wrong)
        assert (wrong[0], a.stats.misses, a.stats.evictions) == (0, misses, 0)
        a.evict(0, ITEMS)
        assert residency(a) == PLACED
        save(tmp_path / "a.bin", data + 1000000)  # writes to the open file: evicted pages are read again
        check_items[threads](a, 4, wrong)
        assert wrong[0] == 0 and a[0] == 1000000
    more = 40 if device == "cpu" else 12
    save(tmp_path / "b.bin", np.arange(more * ITEMS))
    with opened(tmp_path / "b.bin", device=device, cache=PAGE * 8) as b:
        assert residency(b) == EVICTING
        in_cache(b)
        assert b[:].sum() == np.arange(more * ITEMS).sum() and residency(b) == EVICTING


def test_arrays_of_a_cache_are_complete_together_and_shares_alone(tmp_path: Path) -> None:
    for name, pages in (("a", 6), ("b", 10), ("c", 100)):
        save(tmp_path / f"{name}.bin", np.arange(pages * ITEMS))
    with ww.Cache("64KiB", page_size=PAGE, device="cpu") as cache:
        a = opened(tmp_path / "a.bin", cache=cache)
        in_cache(a)
        assert residency(a) == COMPLETE
        b = opened(tmp_path / "b.bin", cache=cache)
        assert residency(a) == PLACED  # opening another array empties the cache
        in_cache(a)
        assert residency(a) == PLACED
        in_cache(b)
        assert residency(a) == residency(b) == COMPLETE
        a.pin()  # all pages of `a`: no other page needs a frame
        b.pin()
        with pytest.raises(errors.KernelError, match="unpin them first"):
            a.evict()
        a.unpin()
        b.unpin()
        a.close()
        b.close()
    with ww.Cache(PAGE * 40, page_size=PAGE, device="cpu") as cache:
        c = opened(tmp_path / "c.bin", cache=cache, share=0.5)
        a = opened(tmp_path / "a.bin", cache=cache)
        in_cache(c)
        in_cache(a)
        in_cache(c)
        assert np.array_equal(c[:], np.arange(100 * ITEMS)) and np.array_equal(a[:], np.arange(6 * ITEMS))
        assert (residency(c), residency(a)) == (EVICTING, COMPLETE)
        a.close()
        c.close()


def test_pages_are_evicted_while_launches_read_and_change_them(tmp_path: Path) -> None:
    items = 16 * ITEMS
    save(tmp_path / "a.bin", np.arange(items))
    wrong = np.zeros(1, np.int64)
    launches, limit = 0, time.monotonic() + HANG_SECONDS
    with opened(tmp_path / "a.bin", "r+", cache="64KiB") as a:
        add_millions[64](a, 1, wrong)  # compiled before the threads begin
        stop = threading.Event()

        def evict() -> None:
            while not stop.is_set():
                try:
                    a.evict(0, items // 2)
                except errors.KernelError:
                    pass  # another thread is changing these pages

        thread = threading.Thread(target=evict)
        thread.start()
        try:
            # The system decides when the other thread runs.
            while launches < 6 or (a.stats.evictions == 0 and time.monotonic() < limit):
                add_millions[64](a, 200, wrong)
                launches += 1
        finally:
            stop.set()
            thread.join(HANG_SECONDS)
        assert wrong[0] == 0 and a.stats.evictions > 0
    total = np.fromfile(tmp_path / "a.bin", np.int64)
    assert np.array_equal(total % 1000000, np.arange(items))
    assert (total // 1000000).sum() == 64 * (1 + 200 * launches)


@pytest.mark.parametrize("frames", [2, 3, 200])
def test_many_threads_hold_pages_of_few_frames(tmp_path: Path, frames: int) -> None:
    save(tmp_path / "a.bin", np.arange(1000 * ITEMS))
    assert credit_words(frames) == (1 if frames < 100 else 2)
    counts = np.zeros(2, np.int64)
    cache = PAGE * frames + 8 * frames
    with opened(tmp_path / "a.bin", cache=cache) as a:
        assert a.cache.frames == frames
        hold_and_check[64](a, 40, counts)
        assert counts[0] == 0 and counts[1] > 0
        assert a.cache._count_pinned(a._nsid) == 0
        a.pin(0, (frames - 1) * ITEMS)
        assert a.cache._count_pinned(a._nsid) == frames - 1
        with pytest.raises(errors.KernelError, match="only"):
            a.pin(500 * ITEMS, 502 * ITEMS)
        assert a[900 * ITEMS] == 900 * ITEMS
        a.unpin(0, (frames - 1) * ITEMS)
        a.evict()
