"""SpanConformance: runs of items in kernels equal NumPy, of any array, cut anywhere, in caches of any size.

A subclass in a test module names the device.
"""

import functools
import operator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import warpwell as ww
from warpwell import gpu
from warpwell.array import fold_indexed_warp
from warpwell.errors import CompileError, IndexRangeError

PAGE = 512


@gpu.function
def add_square(total, item):
    return total + item * item


@gpu.function
def mix(total, item):
    return (total * 3 + item) % 1000003


@gpu.function
def weigh(total, a, b, weight):
    return total + a * b * weight


@gpu.function
def plus(item, more):
    return item + more


@gpu.function
def thrice(i):
    return 3 * i


@gpu.function
def looked_up(total, item, i, table, numbers):
    return total + table[item % 100] * numbers[i % 100]


@gpu.function
def entry(i, table):
    return table[i % 100]


@ww.kernel
def by_tables(a, b, table, numbers, lo, hi, out):
    run = gpu.grid(1) // gpu.warp_size()
    total = fold_indexed_warp(looked_up, 0, a, lo[run], hi[run], table, numbers)
    gpu.map_warp(entry, b, a, lo[run], hi[run], numbers)
    gpu.fill_warp(entry, a, lo[run], hi[run], table)
    gpu.atomic_add(out, run, total)


@ww.kernel
def rows_and_change(a, out):
    row, n = gpu.grid(1) // gpu.warp_size(), a.shape[1]
    total = gpu.fold_warp(add_square, 0, a, row * n, (row + 1) * n)
    gpu.map_warp(plus, a, a, row * n, (row + 1) * n, 1)
    gpu.atomic_add(out, row, total)


@ww.kernel
def by_thread(a, lo, hi, out):
    i = gpu.grid(1)
    out[i, 0] = gpu.fold(operator.add, 0.0, a, lo[i], hi[i])
    out[i, 1] = gpu.fold(min, 1e9, a, lo[i], hi[i])
    out[i, 2] = gpu.fold(max, -1e9, a, lo[i], hi[i])


@ww.kernel
def in_order(a, lo, hi, out):
    i = gpu.grid(1)
    out[i] = gpu.fold(mix, 0, a, lo[i], hi[i])


@ww.kernel
def by_warp(a, b, lo, hi, out):
    run = gpu.grid(1) // gpu.warp_size()
    total = gpu.reduce_warp(operator.add, gpu.fold_warp(add_square, 0, a, lo[run], hi[run]))
    product = gpu.reduce_warp(operator.add, gpu.fold_warp(weigh, 0, (a, b), lo[run], hi[run], 2))
    if gpu.lane_id() == 0:
        out[run, 0] = total
        out[run, 1] = product


@ww.kernel
def change(a, b, out, lo, hi):
    run = gpu.grid(1) // gpu.warp_size()
    gpu.map_warp(plus, b, a, lo[run], hi[run], 2)
    gpu.map_warp(plus, out, a, lo[run], hi[run], 3)
    gpu.fill_warp(thrice, a, lo[run], hi[run])


@ww.kernel
def one_sum(a, lo, hi, out):
    out[0] = gpu.fold(operator.add, 0, a, lo, hi)


@ww.kernel
def blocks(a, n, sums):
    block = gpu.block_index()
    gpu.map_block(plus, a, a, block * n, (block + 1) * n, 1)
    gpu.atomic_add(sums, block, gpu.fold_block(mix, 0, a, block * n, block * n))


def cuts(size: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return starts and ends of runs that follow each other, some of them empty or of one item."""
    ends = np.sort(np.random.default_rng(size).integers(0, size + 1, count - 1))
    ends[1], ends[3] = ends[0], ends[2] + 1
    ends = np.sort(np.concatenate([[0], ends, [size]]))
    return ends[:-1].copy(), ends[1:].copy()


def mixed(items: np.ndarray) -> int:
    """Return what a fold by `mix` gives."""
    return functools.reduce(lambda total, item: (total * 3 + int(item)) % 1000003, items, 0)


class SpanConformance:
    """Tests that hold on every device."""

    DEVICE: str
    SIZE = 5000
    RUNS = 64

    @property
    def warp(self) -> int:
        return 32 if self.DEVICE == "cuda" else 1

    def open(self, path: Path, data: np.ndarray, **options: Any) -> Any:
        np.save(path, data)
        options = {"cache": 8 * PAGE, "page_size": PAGE, "device": self.DEVICE, "timeout": 30} | options
        return ww.open(path, **options)

    @pytest.mark.parametrize("shape", [(5000,), (5, 10, 100)])
    def test_folds_of_every_shape(self, tmp_path: Path, shape: tuple[int, ...]) -> None:
        data = np.random.default_rng(0).integers(-100, 100, shape).astype(np.float32)
        lo, hi = cuts(5000, 20)
        out = np.zeros((20, 3))
        with self.open(tmp_path / "a.npy", data) as a:
            by_thread[20](a, lo, hi, out, device=self.DEVICE)
        for i, run in enumerate(data.reshape(-1)[i:j] for i, j in zip(lo, hi, strict=True)):
            assert out[i].tolist() == [run.sum(dtype=float), run.min(initial=1e9), run.max(initial=-1e9)]

    @pytest.mark.parametrize(
        ("kind", "options"), [("i2", {}), ("u1", {"page_size": 4096, "cache": "1MiB"}), ("i8", {"tier": "host"})]
    )
    def test_a_fold_takes_items_in_order(self, tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
        data = np.random.default_rng(1).integers(0, 100, self.SIZE).astype(kind)
        lo, hi = cuts(self.SIZE, 10)
        out = np.zeros(10, np.int64)
        with self.open(tmp_path / "a.npy", data, **options) as a:
            in_order[10](a, lo, hi, out, device=self.DEVICE)
        assert out.tolist() == [mixed(data[i:j]) for i, j in zip(lo, hi, strict=True)]

    def test_fields_and_odd_places(self, tmp_path: Path) -> None:
        records = np.zeros(300, [("a", "u1"), ("b", "<i8"), ("c", "<i4", 3)])
        records["b"] = np.arange(300)
        records["c"] = np.arange(900).reshape(300, 3)
        out = np.zeros(1, np.int64)
        with self.open(tmp_path / "a.npy", records) as a:
            for field, lo, hi in (("b", 3, 290), ("c", 100, 850)):
                one_sum[1](a.field(field), lo, hi, out, device=self.DEVICE)
                assert out[0] == records[field].reshape(-1)[lo:hi].sum()
        (tmp_path / "raw").write_bytes(b"abcd" + np.arange(1000, dtype=np.int32).tobytes())
        raw = {"dtype": np.int32, "shape": 1000, "offset": 4, "device": self.DEVICE}
        with ww.open(tmp_path / "raw", cache="64KiB", **raw) as a:
            one_sum[1](a, 1, 999, out, device=self.DEVICE)
            assert out[0] == np.arange(1, 999).sum()

    @pytest.mark.parametrize("cache", [1, 2, 9, 4000])
    def test_warps_share_runs(self, tmp_path: Path, cache: int, page_size: int = PAGE) -> None:
        data = np.arange(self.SIZE)
        factors = np.random.default_rng(2).integers(0, 9, self.SIZE)
        lo, hi = cuts(self.SIZE, self.RUNS)
        out = np.zeros((self.RUNS, 2), np.int64)
        frames = {"page_size": page_size, "cache": cache * (page_size + 8)}
        with self.open(tmp_path / "a.npy", data, **frames) as a, self.open(tmp_path / "b.npy", factors, **frames) as b:
            by_warp[self.RUNS * self.warp](a, b, lo, hi, out, device=self.DEVICE)
            expected = [
                [(data[start:end] ** 2).sum(), (data * factors * 2)[start:end].sum()]
                for start, end in zip(lo, hi, strict=True)
            ]
            assert out.tolist() == expected

    @pytest.mark.parametrize("cache", [1, 2, 9])
    def test_stores(self, tmp_path: Path, cache: int, page_size: int = PAGE) -> None:
        data = np.arange(self.SIZE, dtype=np.int32)
        lo, hi = cuts(self.SIZE, self.RUNS)
        out = np.zeros(self.SIZE, np.int64)
        frames = {"page_size": page_size, "cache": cache * (page_size + 8), "mode": "r+"}
        np.save(tmp_path / "b.npy", np.full(self.SIZE, -1))
        with (
            self.open(tmp_path / "a.npy", data, **frames) as a,
            self.open(tmp_path / "b.npy", np.full(self.SIZE, -1), **frames) as b,
        ):
            change[self.RUNS * self.warp](a, b, out, lo, hi, device=self.DEVICE)
            np.testing.assert_array_equal(out, data + 3)
            np.testing.assert_array_equal(b[:], data + 2)
            np.testing.assert_array_equal(a[:], 3 * data)
        assert np.array_equal(np.load(tmp_path / "b.npy"), data + 2)

    @pytest.mark.parametrize("cache", [2, 4000])
    def test_arrays_among_the_arguments(self, tmp_path: Path, cache: int) -> None:
        data, numbers = np.arange(self.SIZE)[::-1] % 1000, np.arange(100)[::-1].copy()
        lo, hi = cuts(self.SIZE, 10)
        frames = {"cache": cache * (PAGE + 8), "mode": "r+"}
        for stored in (False, True):
            out = np.zeros(10, np.int64)
            with (
                self.open(tmp_path / "a.npy", data, **frames) as a,
                self.open(tmp_path / "b.npy", np.zeros(self.SIZE, int), **frames) as b,
                self.open(tmp_path / "t.npy", numbers + 1) as on_storage,
            ):
                table = on_storage if stored else numbers + 1
                by_tables[10 * self.warp](a, b, table, numbers, lo, hi, out, device=self.DEVICE)
                assert np.array_equal(a[:], numbers[np.arange(self.SIZE) % 100] + 1)
                assert np.array_equal(b[:], numbers[data % 100])
            terms = (numbers[data % 100] + 1) * numbers[np.arange(self.SIZE) % 100]
            assert out.tolist() == [terms[i:j].sum() for i, j in zip(lo, hi, strict=True)]

    @pytest.mark.parametrize("kind", ["host", "device", "mapped", "C", "F", "part"])
    def test_rows_of_arrays_in_memory(self, tmp_path: Path, kind: str) -> None:
        data = np.random.default_rng(3).integers(0, 100, (7, 301)).astype(np.float32)
        out = np.zeros(7, np.int64)
        if kind in ("host", "device", "mapped"):
            if kind == "mapped" and self.DEVICE != "cpu":
                pytest.skip("files are mapped on cpu")
            np.save(tmp_path / "a.npy", data)
            with ww.open(tmp_path / "a.npy", "r+", device=self.DEVICE, tier=kind) as a:
                rows_and_change[7 * self.warp](a, out, device=self.DEVICE)
                with pytest.raises(IndexRangeError) as error:
                    rows_and_change[8 * self.warp](a, np.zeros(8, np.int64), device=self.DEVICE)
                assert error.value.index == 7 * 301
            changed = np.load(tmp_path / "a.npy")
            assert np.array_equal(changed, data + 2)  # twice
        else:
            part = np.full((7, 350), -1, np.float32)[:, 20:321]
            a = part if kind == "part" else np.zeros(data.shape, np.float32, kind)
            a[:] = data
            rows_and_change[7 * self.warp](a, out, device=self.DEVICE)
            assert np.array_equal(a, data + 1)
            assert kind != "part" or (a.base[:, :20] == -1).all()
        assert out.tolist() == (data**2).sum(axis=1).tolist()

    def test_blocks(self, tmp_path: Path) -> None:
        data = np.arange(4096)
        with self.open(tmp_path / "a.npy", data, mode="r+") as a:
            ww.kernel(blocks.function, block=96)[4](a, 1024, np.zeros(4, np.int64), device=self.DEVICE)
            assert np.array_equal(a[:], data + 1)

    def test_a_run_out_of_range_is_an_error(self, tmp_path: Path) -> None:
        out = np.zeros(1, np.int64)
        with self.open(tmp_path / "a.npy", np.arange(100)) as a:
            for lo, hi, wrong in ((0, 101, 100), (-3, 4, -3), (200, 300, 200)):
                with pytest.raises(IndexRangeError, match=str(wrong)) as error:
                    one_sum[1](a, lo, hi, out, device=self.DEVICE)
                assert error.value.index == wrong
            one_sum[1](a, 0, 100, out, device=self.DEVICE)
            assert out[0] == 4950
            one_sum[1](a, 300, 200, out, device=self.DEVICE)
            assert out[0] == 0

    def test_what_is_no_source_does_not_compile(self) -> None:
        with pytest.raises((CompileError, ww.errors.DTypeError)):
            one_sum[1](3, 0, 1, np.zeros(1, np.int64), device=self.DEVICE)

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def test_sums_of_any_runs(self, tmp_path: Path, data: st.DataObject) -> None:
        size = data.draw(st.integers(1, 2000))
        ends = data.draw(st.lists(st.tuples(st.integers(0, size), st.integers(0, size)), min_size=1, max_size=8))
        lo, hi = (np.array(column) for column in zip(*ends, strict=True))
        out = np.zeros((len(lo), 3))
        values = np.arange(size, dtype=np.float32)
        with self.open(tmp_path / "a.npy", values) as a:
            by_thread[len(lo)](a, lo, hi, out, device=self.DEVICE)
        assert out[:, 0].tolist() == [values[i:j].sum() for i, j in zip(lo, hi, strict=True)]
