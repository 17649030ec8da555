"""Tests of page sets, prefetches and their tickets for every device."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

import warpwell as ww
from warpwell import errors
from warpwell.targets import kernel
from warpwell.targets.primitives import grid

PAGE = 512


@kernel
def mark(pages, items):
    pages.add(items[grid(1)])


@kernel
def mark_range(pages, starts, stops):
    i = grid(1)
    pages.add_range(starts[i], stops[i])


@kernel
def take(a, items, out, first, end):
    i = grid(1)
    if items[i] >= first and items[i] < end:
        out[i] = a[items[i]]


def take_in_waves(a, pages, items):
    """Mark items, and read them wave by wave."""
    mark[len(items)](pages, items)
    out = np.full(len(items), -1, np.int64)
    for first, stop in pages.waves():
        take[len(items)](a, items, out, first, stop)
    return out


class PageSetConformance:
    DEVICE: ClassVar[str]

    def saved(self, path: Any, n: int = 8192, dtype: Any = np.int32) -> tuple[Any, Any]:
        values = np.random.default_rng(5).integers(0, 1 << 30, n).astype(dtype)
        np.save(path / "x.npy", values)
        return path / "x.npy", values

    def open(self, file: Any, **options: Any) -> Any:
        return ww.open(file, device=self.DEVICE, **{"cache": 32 * PAGE + 4096, "page_size": PAGE, **options})

    def test_waves_cover_marked_items_in_order(self, tmp_path):
        file, values = self.saved(tmp_path)
        with self.open(file) as a:
            pages = a.page_set()
            items = np.unique(np.random.default_rng(1).integers(0, len(values), 300))
            mark[len(items)](pages, items)
            expected = np.unique((a._origin + 4 * items) // PAGE)
            assert pages.count() == len(expected)
            out = np.full(len(items), -1, np.int64)
            end = 0
            waves = 0
            for first, stop in pages.waves():
                assert first == end or waves == 0
                assert stop > first
                take[len(items)](a, items, out, first, stop)
                end = stop
                waves += 1
            assert (out == values[items]).all()
            assert waves > 1
            assert pages.count() == 0

    def test_pages_of_a_wave_are_in_the_cache(self, tmp_path):
        file, _ = self.saved(tmp_path)
        with self.open(file, cache="64KiB") as a:
            pages = a.page_set()
            items = np.arange(0, 8192, 400)
            mark[len(items)](pages, items)
            out = np.zeros(len(items), np.int64)
            for first, stop in pages.waves():
                before = a.stats
                assert before.misses + before.prefetched == len(items)
                take[len(items)](a, items, out, first, stop)
                assert a.stats.misses == before.misses

    @pytest.mark.parametrize("frames", [1, 2, 3])
    def test_any_cache_is_large_enough(self, tmp_path, frames):
        file, values = self.saved(tmp_path, 1024)
        with self.open(file, cache=frames * (PAGE + 8)) as a:
            items = np.arange(0, 1024, 3)
            assert (take_in_waves(a, a.page_set(), items) == values[items]).all()

    def test_ranges_set_whole_words_of_marks(self, tmp_path):
        file, _ = self.saved(tmp_path, 128 * 300)
        with self.open(file) as a:
            rng = np.random.default_rng(3)
            for _ in range(4):
                starts = rng.integers(0, a.size, 6)
                stops = np.minimum(a.size, starts + rng.integers(0, 128 * 140, 6))
                pages = a.page_set()
                mark_range[6](pages, starts, stops)
                expected = set()
                for low, high in zip(starts, stops, strict=True):
                    if high > low:
                        expected |= set(range((a._origin + 4 * low) // PAGE, (a._origin + 4 * high - 4) // PAGE + 1))
                assert pages.count() == len(expected)
                host = a.page_set()
                for low, high in zip(starts, stops, strict=True):
                    host.add_range(int(low), int(high))
                assert (host._read_bits() == pages._read_bits()).all()

    def test_items_over_two_pages_and_fields(self, tmp_path):
        records = np.zeros(500, np.dtype([("a", "u1"), ("b", "<i8")]))
        records["b"] = np.arange(500)
        np.save(tmp_path / "r.npy", records)
        with self.open(tmp_path / "r.npy") as a:
            b = a["b"]
            pages = b.page_set()
            items = np.arange(500)
            mark[500](pages, items)
            assert pages.count() == -(-(a._origin + 9 * 500) // PAGE)
            assert (take_in_waves(b, pages, items) == items).all()

    def test_memory_tiers_have_one_wave(self, tmp_path):
        file, _ = self.saved(tmp_path)
        for tier in ("host", "device"):
            with self.open(file, tier=tier) as a:
                pages = a.page_set()
                mark[2](pages, np.array([1, 5000]))
                assert list(pages.waves()) == [(0, a.size)]
                assert pages.count() == 0

    def test_host_cached(self, tmp_path):
        file, values = self.saved(tmp_path)
        with self.open(file, tier="host-cached") as a:
            items = np.arange(0, 8192, 100)
            assert (take_in_waves(a, a.page_set(), items) == values[items]).all()

    def test_marks_outside_the_array_are_errors(self, tmp_path):
        file, values = self.saved(tmp_path)
        with self.open(file) as a:
            pages = a.page_set()
            with pytest.raises(errors.IndexRangeError):
                mark[1](pages, np.array([len(values)]))
            with pytest.raises(errors.IndexRangeError):
                mark_range[1](pages, np.array([5]), np.array([4]))
            with pytest.raises(errors.IndexRangeError):
                pages.add(-1)
            assert pages.count() == 0
        with pytest.raises(errors.ClosedError):
            list(pages.waves())
