"""ArrayConformance: tests that every device passes; a subclass names the device.

A subclass in a test module is collected as it is::

    class TestArrays(ArrayConformance):
        DEVICE = "cuda"
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from warpwell import errors

from .items import ItemConformance
from .kernels import PAGE, add, ask_for, hold, mark3, read, read2, release, scan_beside, total, write


class ArrayConformance(ItemConformance):
    """Tests that hold on every device: items, the cache, tiers, life and launches."""

    # -- cache ----------------------------------------------------------------------------------------------

    def test_full_statistics_add_up(self, numbers: Path) -> None:
        with self.open(numbers, stats="full", cache=64 * PAGE, merge=1) as a:  # nothing is read ahead
            out = np.zeros(1, np.int64)
            self.run(total, 1, a, 8, 2, out)
            items = -(-a.size // 8)
            assert out[0] == 2 * np.arange(0, a.size, 8).sum()
            s = a.stats
            assert (s.misses, s.hits, s.evictions, s.bytes_wanted) == (12, 2 * items - 12, 0, 16 * items)
            assert s.bytes_read == 12 * PAGE and s.read_commands == 12 and s.writebacks == 0
            assert s.io_amplification == 12 * PAGE / (16 * items)
        with self.open(numbers, stats="full") as a:
            self.run(total, 1, a, 8, 2, out)
            s = a.stats
            assert s.misses == 24 and s.evictions == 24 - a.cache.frames and s.bytes_read == 24 * PAGE
            assert s.hits == 2 * items - 24
        with self.open(numbers) as a:
            assert a.stats.hits is None and a.stats.io_amplification is None

    def test_prefetched_pages_are_no_misses(self, numbers: Path) -> None:
        out = np.zeros(1, np.int64)
        for by_host in (True, False):
            with self.open(numbers, cache=64 * PAGE, merge=1) as a:
                if by_host:
                    a.prefetch(0, 4 * PAGE // 8).result(30)  # five pages, because of the header
                    first = a.stats
                    # A GPU reads a few pages by warps, which count them as misses.
                    assert self.DEVICE == "cuda" or (first.prefetched, first.misses) == (5, 0)
                else:
                    rows = np.arange(0, a.size, 32)
                    flags = np.zeros(rows.size, np.int64)
                    self.run(ask_for, rows.size, a, rows, flags)
                    assert flags.all()
                self.run(total, 1, a, 8, 1, out)
                s = a.stats
                assert s.prefetched + s.misses == 12 and s.bytes_read == 12 * PAGE
                if by_host:
                    assert first.prefetched + first.misses == 5 and s.misses - first.misses == 7
                    assert (s.prefetched, s.prefetch_dropped) == (first.prefetched, 0)
                flags = np.ones(1, np.int64)
                self.run(ask_for, 1, a, np.array([a.size]), flags)
                assert flags[0] == 0, "a prefetch past the end is no error and no page"

    def test_pages_read_in_turn_are_read_ahead(self, numbers: Path) -> None:
        with self.open(numbers, cache=64 * PAGE, merge=8) as a:
            out = np.zeros(1, np.int64)
            self.run(total, 1, a, 8, 1, out)
            assert out[0] == np.arange(0, a.size, 8).sum()
            s = a.stats
            # The read commands: page 0; 1 and 2; 3 to 6; 7, where a queue ends; 8 to 11.
            assert (s.misses, s.prefetched, s.read_commands, s.bytes_read) == (5, 7, 5, 12 * PAGE)
        with self.open(numbers, cache=64 * PAGE, merge=8) as a:
            self.run(read, 4, a, np.array([10, 4, 8, 2]) * (PAGE // 8), np.zeros(4, np.int64))
            assert (a.stats.misses, a.stats.prefetched) == (4, 0), "pages without a cached neighbor are not prefetched"

    def test_pinned_pages_stay(self, numbers: Path) -> None:
        out = np.zeros(1, np.int64)
        with self.open(numbers) as a:
            per = PAGE // 8
            a.pin(0, 40)
            a.pin(0, 40)
            misses = a.stats.misses
            self.run(total, 1, a, 8, 3, out)
            assert a.stats.misses == misses + 3 * 11
            with pytest.raises(errors.KernelError, match="only"):
                a.pin()
            with pytest.raises(errors.KernelError, match="not pinned"):
                a.unpin(5 * per, 6 * per)
            with pytest.raises(errors.KernelError, match="unpin them first"):
                a.evict(0, 40)
            a.unpin(0, 40)
            with pytest.raises(errors.KernelError):
                a.evict(0, 40)
            a.unpin(0, 40)
            a.evict(0, 40)
            misses = a.stats.misses
            self.run(read, 1, a, np.array([3]), out)  # by a kernel: the host may read past the cache
            assert out[0] == 3
            assert a.stats.misses == misses + 1

    def test_kernels_pin_all_frames_but_one(self, numbers: Path) -> None:
        with self.open(numbers) as a:
            rows = np.arange(0, 12 * PAGE // 8 - 64, PAGE // 8)
            held = np.zeros(rows.size, np.int64)
            self.run(hold, 1, a, rows, held)
            assert held.sum() == a.cache.frames - 1
            out = np.zeros(1, np.int64)
            self.run(total, 1, a, 8, 1, out)
            assert out[0] == np.arange(0, a.size, 8).sum()
            self.run(release, 1, a, rows, held)
            a.evict()
            assert not (a.cache.page_words(a._nsid) & 2).any()

    def test_evicting_writes_back(self, numbers: Path) -> None:
        with self.open(numbers, "r+", cache=64 * PAGE) as a:
            self.run(write, 5, a, np.arange(5), -np.arange(5) - 1)
            assert np.load(numbers)[:5].tolist() == [0, 1, 2, 3, 4], "not yet"
            a.evict()
            assert np.load(numbers)[:5].tolist() == [-1, -2, -3, -4, -5]
            s = a.stats
            assert s.writebacks == 1 and s.evictions == s.misses
            a.flush()
            assert a.stats.writebacks == 1

    def test_pages_that_are_read_once_give_way(self, tmp_path: Path, numbers: Path) -> None:
        np.save(tmp_path / "hot.npy", np.full(40, 7))
        misses = []
        for once in (True, False):
            with self.cache(2) as cache:
                hot = self.open(tmp_path / "hot.npy", cache=cache)
                scanned = self.open(numbers, cache=cache, read_once=once)
                out = np.zeros(2, np.int64)
                self.run(scan_beside, 1, hot, scanned, PAGE // 8, out)
                assert out[1] == 7 * 12
                misses.append(cache.stats.misses)
                hot.close()
                scanned.close()
        # both arrays start with a header of 128 bytes, so 12 steps of a page are 12 pages
        assert misses[0] == 12 + 1 and misses[1] > 12 + 1

    def test_arrays_share_a_cache(self, tmp_path: Path) -> None:
        n = 8 * PAGE // 8
        models = [np.arange(n) + 1000 * k for k in range(3)]
        for k, model in enumerate(models):
            np.save(tmp_path / f"{k}.npy", model)
        with self.cache(8) as cache:
            a = self.open(tmp_path / "0.npy", "r+", cache=cache, share=0.25)
            b = self.open(tmp_path / "1.npy", "r+", cache=cache)
            assert [cache.space(each._nsid).pool.frames for each in (a, b)] == [2, 6]
            rows = np.random.default_rng(6).permutation(n)[: 64 * self.SCALE]
            a[rows] = models[0][rows] = -models[0][rows]
            a.prefetch(0, 100)
            c = self.open(tmp_path / "2.npy", cache=cache, share=0.25)
            assert c[5] == 2005
            for array, model in zip((a, b, c, b, a), np.array(models)[[0, 1, 2, 1, 0]], strict=True):
                np.testing.assert_array_equal(np.asarray(array[:]), model)
            for bad in (0, 1.5, -1, 0.9):
                with pytest.raises(errors.ArgumentError, match="share"):
                    self.open(tmp_path / "2.npy", cache=cache, share=bad)
            a.close()
            a.close()
            np.testing.assert_array_equal(np.load(tmp_path / "0.npy"), models[0])
            b[0] = models[1][0] = 5
            c.close()
            np.testing.assert_array_equal(np.asarray(b[:]), models[1])
            b.close()
            with pytest.raises(errors.ClosedError):
                a[0]
        with pytest.raises(errors.ClosedError):
            self.open(tmp_path / "0.npy", cache=cache)
        with self.open(tmp_path / "0.npy", "r+"):
            pass  # the failed open() has released its claim on the file

    def test_an_array_dropped_without_close_leaves_its_share(self, numbers: Path, tmp_path: Path) -> None:
        np.save(tmp_path / "b.npy", np.arange(9))
        with self.cache(4) as cache:
            dropped = self.open(numbers, cache=cache, share=0.75)
            assert dropped[1] == 1
            del dropped
            b = self.open(tmp_path / "b.npy", cache=cache, share=0.75)
            assert b[8] == 8
            b.close()

    def test_a_cache_very_small_for_its_data(self, tmp_path: Path) -> None:
        n = 8_000 * PAGE // 8
        rng = np.random.default_rng(8)
        model = np.zeros(n, np.int64)
        model[::61] = np.arange(model[::61].size)
        np.save(tmp_path / "big.npy", model)
        with self.open(tmp_path / "big.npy", "r+", cache=20 * PAGE) as a:
            for _ in range(2):
                rows = rng.integers(0, n, 40 * self.SCALE)
                out = np.zeros(rows.size, np.int64)
                self.run(read, rows.size, a, rows, out)
                np.testing.assert_array_equal(out, model[rows])
                amounts = rng.integers(-9, 9, rows.size)
                np.add.at(model, rows, amounts)
                self.run(add, rows.size, a, rows, amounts)
            a.prefetch(0, 1000)
            rows = np.concatenate([rows, np.arange(0, 3000, 60)])
            np.testing.assert_array_equal(np.asarray(a[rows]), model[rows])
            a.evict(0, 3000)
            assert a.stats.evictions > 0
        np.testing.assert_array_equal(np.load(tmp_path / "big.npy"), model)

    # -- tiers and life -------------------------------------------------------------------------------------

    def test_all_tiers_give_the_same_results(self, tmp_path: Path) -> None:
        n = 5 * PAGE // 8 + 3
        rng = np.random.default_rng(9)
        start = rng.integers(-100, 100, n)
        rows, amounts = rng.integers(0, n, 200), rng.integers(-9, 9, 200)
        targets = rng.permutation(n)[:50]
        model = start.copy()
        model[targets] = np.arange(50)
        np.add.at(model, rows, amounts)
        for tier in self.tiers:
            np.save(tmp_path / "a.npy", start)
            with self.open(tmp_path / "a.npy", "r+", tier=tier) as a:
                self.run(write, 50, a, targets, np.arange(50))
                self.run(add, 200, a, rows, amounts)
                a.prefetch(0, 9)
                a.evict()
                out = np.zeros(n, np.int64)
                self.run(read, n, a, np.arange(n), out)
                np.testing.assert_array_equal(out, model, err_msg=tier)
                np.testing.assert_array_equal(np.asarray(a[rows]), model[rows], err_msg=tier)
                with pytest.raises(errors.IndexRangeError, match=f"index {n} of array"):
                    self.run(read, 1, a, np.array([n]), out)
                a.flush()
                np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), model, err_msg=tier)
                a[2] = model[2] = 77
            np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), model, err_msg=f"{tier}: closing flushes")
            model = start.copy()
            model[targets] = np.arange(50)
            np.add.at(model, rows, amounts)
            with self.open(tmp_path / "a.npy", tier=tier) as a:
                with pytest.raises(errors.ReadOnlyError, match='mode="r\\+"'):
                    self.run(write, 1, a, np.array([0]), np.array([1]))
                with pytest.raises(errors.ReadOnlyError):
                    self.run(add, 1, a, np.array([0]), np.array([1]))
                with pytest.raises(errors.ReadOnlyError):
                    a[0] = 1

    def test_closed_arrays_say_so(self, numbers: Path) -> None:
        a = self.open(numbers, "r+")
        part = a.reshape(2, -1 + 1 + a.size // 2)
        a.close()
        a.close()
        out = np.zeros(1, np.int64)
        uses = [
            lambda: a[0],
            lambda: a.__setitem__(0, 1),
            a.flush,
            lambda: a.stats,
            a.pin,
            a.unpin,
            a.evict,
            a.prefetch,
            a.view,
            lambda: a.reshape(-1),
            lambda: part[0],
            lambda: self.run(read, 1, a, np.zeros(1, np.int64), out),
            lambda: self.run(read2, 1, part, 0, 0, out),
        ]
        for use in uses:
            with pytest.raises((errors.ClosedError, errors.ArgumentError), match=r"closed|cannot become"):
                use()
        assert "closed" in repr(a)

    def test_a_launch_that_cannot_begin_leaves_the_others_usable(self, numbers: Path, tmp_path: Path) -> None:
        np.save(tmp_path / "b.npy", np.arange(9))
        with self.cache(4) as cache:
            a = self.open(numbers, cache=cache)
            b = self.open(tmp_path / "b.npy", cache=cache)
            b.close()
            with pytest.raises(errors.ClosedError):
                self.run(scan_beside, 1, a, b, 1, np.zeros(2, np.int64))
            c = self.open(tmp_path / "b.npy", cache=cache)
            assert c[8] == 8 and a[9] == 9
            a.close()
            c.close()

    def test_one_writer_a_file(self, numbers: Path, tmp_path: Path) -> None:
        (tmp_path / "link.npy").hardlink_to(numbers)
        with self.open(numbers, "r+"):
            for path in (numbers, tmp_path / "link.npy"):
                with pytest.raises(errors.SharingError, match="already open for writing in this process"):
                    self.open(path, "r+")
            with self.open(numbers) as reader:
                assert reader[4] == 4
        with self.open(numbers, "r+") as again:
            assert again[4] == 4

    # -- launches -------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (2, 1, 33)])
    def test_launches_of_three_dimensions_run_every_index_once(self, shape: tuple[int, int, int]) -> None:
        out = np.zeros(shape, np.int64)
        self.run(mark3, shape, out)
        i, j, k = np.indices(shape)
        np.testing.assert_array_equal(out, 1 + i + 10 * j + 100 * k)

    @pytest.mark.parametrize("shape", [0, (0,), (0, 3), (4, 0, 2)])
    def test_a_launch_of_nothing_does_nothing(self, shape: Any, numbers: Path) -> None:
        with self.open(numbers) as a:
            self.run(read, shape, a, np.zeros(1, np.int64), np.zeros(1, np.int64))
            assert a.stats.misses == 0

    @pytest.mark.parametrize("shape", [-1, 1.5, "4", (1, 2, 3, 4), (), None])
    def test_wrong_launch_shapes(self, shape: Any) -> None:
        with pytest.raises(errors.ArgumentError, match="launch shape"):
            read[shape]
        with pytest.raises(errors.ArgumentError, match="number of threads"):
            read(1)
