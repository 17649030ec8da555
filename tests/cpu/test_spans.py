"""Runs of items in kernels equal NumPy: arrays of any kind, cut at any place, with caches of any size."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import warpwell as ww
from warpwell.errors import CompileError, IndexRangeError

DEVICE = "cpu"


@ww.device
def weigh(total, a, b, weight):
    return total + a * b * weight


@ww.device
def plus(item, more):
    return item + more


@ww.device
def thrice(i):
    return 3 * i


@ww.kernel
def sum_runs(a, lo, hi, out):
    i = ww.grid(1)
    out[i] = ww.fold(ww.add, 0.0, a, lo[i], hi[i])


@ww.kernel
def weigh_runs(a, b, lo, hi, out):
    i = ww.grid(1)
    out[i] = ww.fold_warp(weigh, 0.0, (a, b), lo[i], hi[i], 2)


@ww.kernel
def extremes(a, lo, hi, out):
    i = ww.grid(1)
    out[i, 0] = ww.fold_block(ww.least, 1e9, a, lo[i], hi[i])
    out[i, 1] = ww.fold_warp(ww.greatest, -1e9, a, lo[i], hi[i])
    out[i, 2] = ww.reduce_warp(ww.add, ww.fold(ww.add_square, 0.0, a, lo[i], hi[i]))


@ww.kernel
def change(a, b, n):
    i = ww.grid(1)
    lo, hi = i * n, min(i * n + n, a.size)
    ww.map(plus, b, a, lo, hi, 2)
    ww.fill_warp(thrice, a, lo, hi)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path


def spans(size: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return starts and ends of runs: empty ones, single items, all, and others."""
    random = np.random.default_rng(size)
    ends = np.sort(random.integers(0, size + 1, (count, 2)), axis=1)
    ends[:4] = [(0, size), (size, size), (size // 2, size // 2 + 1), (0, 1)]
    return ends[:, 0].copy(), ends[:, 1].copy()


@pytest.mark.parametrize("shape", [(5000,), (50, 100), (5, 10, 100), (5, 2, 50, 10)])
@pytest.mark.parametrize("kind", ["f4", "i2"])
def test_folds_of_every_shape(folder: Path, shape: tuple[int, ...], kind: str) -> None:
    data = np.random.default_rng(0).integers(-100, 100, shape).astype(kind)
    np.save(folder / "a.npy", data)
    lo, hi = spans(5000, 20)
    out = np.zeros((20, 3))
    with ww.open(folder / "a.npy", device=DEVICE, cache="64KiB") as a:
        extremes[20](a, lo, hi, out)
    flat = data.reshape(-1).astype(float)
    for i in range(20):
        run = flat[lo[i] : hi[i]]
        expected = [run.min(initial=1e9), run.max(initial=-1e9), (run**2).sum()]
        assert out[i].tolist() == expected


def test_several_sources_and_arguments(folder: Path) -> None:
    a, b = np.arange(3000.0).reshape(30, 100), np.arange(3000, dtype=np.int32)
    np.save(folder / "a.npy", a)
    lo, hi = spans(3000, 20)
    out = np.zeros(20)
    with ww.open(folder / "a.npy", device=DEVICE) as stored:
        weigh_runs[20](stored, b, lo, hi, out)
    products = a.reshape(-1) * b * 2
    assert out.tolist() == [products[i:j].sum() for i, j in zip(lo, hi, strict=True)]


def test_stores(folder: Path) -> None:
    data = np.arange(10_000, dtype=np.int32)
    np.save(folder / "a.npy", data)
    with (
        ww.open(folder / "a.npy", device=DEVICE, mode="r+", cache="64KiB") as a,
        ww.create(folder / "b.npy", 10_000, np.int64, device=DEVICE, cache="64KiB") as b,
    ):
        change[100](a, b, 100)
        assert np.array_equal(a[:], 3 * data) and np.array_equal(b[:], data + 2)
    assert np.array_equal(np.load(folder / "b.npy"), data + 2)


def test_a_run_out_of_range_is_an_error(folder: Path) -> None:
    np.save(folder / "a.npy", np.arange(100))
    with ww.open(folder / "a.npy", device=DEVICE) as a:
        for lo, hi, wrong in ((0, 101, 100), (-3, 4, -3)):
            with pytest.raises(IndexRangeError, match=str(wrong)) as error:
                sum_runs[1](a, np.array([lo]), np.array([hi]), np.zeros(1))
            assert error.value.index == wrong
        out = np.zeros(1)
        sum_runs[1](a, np.array([0]), np.array([100]), out)
        assert out[0] == 4950


def test_what_is_no_source_does_not_compile() -> None:
    with pytest.raises(CompileError):
        sum_runs[1](3, np.zeros(1, int), np.zeros(1, int), np.zeros(1), device=DEVICE)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_sums_of_any_runs(tmp_path: Path, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 2000))
    values = np.arange(size, dtype=np.float64)
    np.save(tmp_path / "a.npy", values)
    ends = data.draw(st.lists(st.tuples(st.integers(0, size), st.integers(0, size)), min_size=1, max_size=8))
    lo, hi = (np.array(column) for column in zip(*ends, strict=True))
    out = np.zeros(len(lo))
    with ww.open(tmp_path / "a.npy", device=DEVICE, cache="64KiB", page_size=512) as a:
        sum_runs[len(lo)](a, lo, hi, out)
    assert out.tolist() == [values[i:j].sum() for i, j in zip(lo, hi, strict=True)]
