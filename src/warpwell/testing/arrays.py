"""ArrayConformance: tests that every device passes; a subclass names the device.

Needs pytest. A subclass in a test module is collected as it is::

    class TestArrays(ArrayConformance):
        DEVICE = "cuda"
"""
# ruff: noqa: D102, D103 (the name of a test says what holds)

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import warpwell as ww

from .. import errors

PAGE = 512
DTYPES = ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8", "c8", "c16", "M8[us]")
ADDABLE = ("i4", "u4", "i8", "u8", "f4", "f8")


@ww.kernel
def read(a, index, out):
    i = ww.grid(1)
    out[i] = a[index[i]]


@ww.kernel
def write(a, index, values):
    i = ww.grid(1)
    a[index[i]] = values[i]


@ww.kernel
def add(a, index, values):
    i = ww.grid(1)
    ww.atomic_add(a, index[i], values[i])


@ww.kernel
def old_values(a, out):
    i = ww.grid(1)
    out[i] = ww.atomic_add(a, 0, 1)


@ww.kernel
def transfer2(a, b, extents):
    i, j = ww.grid(2)
    extents[0], extents[1], extents[2] = len(a), a.shape[1], a.size
    b[i, j] = a[i, j]


@ww.kernel
def transfer3(a, b, extents):
    i, j, k = ww.grid(3)
    extents[0], extents[1], extents[2] = len(a), a.shape[2], a.size
    b[i, j, k] = a[i, j, k]


@ww.kernel
def transfer4(a, b, extents):
    t = ww.grid(1)
    n = a.shape[3]
    m = a.shape[2] * n
    i = t // (a.shape[1] * m)
    j = t // m % a.shape[1]
    extents[0], extents[1], extents[2] = len(a), a.shape[3], a.size
    b[i, j, t // n % a.shape[2], t % n] = a[i, j, t // n % a.shape[2], t % n]


@ww.kernel
def read2(a, i, j, out):
    out[0] = a[i, j]


@ww.kernel
def mark3(out):
    i, j, k = ww.grid(3)
    ww.atomic_add(out, (i, j, k), 1 + i + 10 * j + 100 * k)


@ww.kernel
def total(a, step, rounds, out):
    """One thread reads every `step`-th item, several times."""
    for _ in range(rounds):
        for i in range(0, a.size, step):
            out[0] += a[i]


@ww.kernel
def scan_beside(hot, scanned, step, out):
    """One thread reads pages of one array twice each, and between them always the same item of another."""
    for i in range(0, scanned.size, step):
        out[0] += scanned[i] + scanned[i + 1]
        out[1] += hot[0]


@ww.kernel
def ask_for(a, index, out):
    i = ww.grid(1)
    out[i] = 0
    if a.prefetch(index[i]):
        out[i] = 1


@ww.kernel
def hold(a, index, out):
    """One thread pins pages, as many as it gets."""
    for k in range(index.size):
        out[k] = 0
        if a.pin(index[k]):
            out[k] = 1


@ww.kernel
def release(a, index, held):
    for k in range(index.size):
        if held[k] == 1:
            a.unpin(index[k])


@ww.kernel
def stop_when_failed(a, out):
    i = ww.grid(1)
    if i == 0:
        out[0] = a[a.size]
    if i == 255:
        since = ww.clock_ns()
        while not ww.failed():
            if ww.clock_ns() - since > 20_000_000_000:
                return
        out[1] = 1


def values_of(dtype: str, n: int, seed: int = 1) -> Any:
    """Return `n` random values of a dtype, extremes included."""
    dt = np.dtype(dtype)
    rng = np.random.default_rng(seed)
    if dt.kind == "b":
        return rng.integers(0, 2, n).astype(dt)
    if dt.kind in "iu":
        info = np.iinfo(dt)
        out = rng.integers(info.min, info.max, n, dt, endpoint=True)
        out[:2] = info.min, info.max
        return out
    if dt.kind == "M":
        return rng.integers(-(10**15), 10**15, n).astype(dt)
    if dt.kind == "c":
        return (rng.normal(size=n) + 1j * rng.normal(size=n)).astype(dt)
    out = rng.normal(size=n).astype(dt)
    out[:3] = np.inf, -0.0, np.finfo(dt).tiny
    return out


@pytest.mark.timeout(110)
class ArrayConformance:
    """Tests that hold on every device.

    Attributes
    ----------
    DEVICE : {"cpu", "cuda", "interp"}
    SCALE : int
        Factor of sizes; the interpreter takes 1.
    """

    DEVICE = "cpu"
    SCALE = 8

    def open(self, path: Any, mode: str = "r", **options: Any) -> ww.Array:
        """Open with four pages of cache, unless told otherwise."""
        if not isinstance(options.get("cache"), ww.Cache):
            options = {"cache": 4 * (PAGE + 8), "page_size": PAGE, "timeout": 20.0, **options}
        return ww.open(path, mode, device=self.DEVICE, **options)

    def cache(self, frames: int, **options: Any) -> ww.Cache:
        return ww.Cache(frames * (PAGE + 8), page_size=PAGE, device=self.DEVICE, timeout=20.0, **options)

    def run(self, kernel: Any, shape: Any, *args: Any) -> None:
        kernel[shape](*args, device=self.DEVICE)

    @pytest.fixture
    def numbers(self, tmp_path: Path) -> Path:
        """A file of 12 pages of int64, each item its index."""
        np.save(tmp_path / "numbers.npy", np.arange(12 * PAGE // 8 - 16))
        return tmp_path / "numbers.npy"

    # -- items ----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_kernels_read_and_write_items(self, tmp_path: Path, dtype: str) -> None:
        n = 3 * PAGE // np.dtype(dtype).itemsize // (8 // self.SCALE) + 5
        model = values_of(dtype, n)
        np.save(tmp_path / "a.npy", model)
        index = np.random.default_rng(2).permutation(n)
        kernel_dtype = np.int64 if dtype.startswith("M") else model.dtype
        with self.open(tmp_path / "a.npy", "r+", cache=3 * (PAGE + 8)) as a:
            out = np.zeros(n, kernel_dtype)
            self.run(read, n, a, index, out)
            assert out.tobytes() == model[index].tobytes()
            fresh = values_of(dtype, n, seed=3)
            self.run(write, n, a, index, fresh.view(kernel_dtype))
            out[:] = 0
            self.run(read, n, a, index, out)
            assert out.tobytes() == fresh.tobytes()
        expected = np.empty(n, model.dtype)
        expected[index] = fresh
        assert np.load(tmp_path / "a.npy").tobytes() == expected.tobytes()

    @pytest.mark.parametrize(("dtype", "offset"), [("i8", 3), ("f4", 1), ("c16", 509), ("u2", 5)])
    def test_unaligned_items_may_straddle_pages(self, tmp_path: Path, dtype: str, offset: int) -> None:
        size = np.dtype(dtype).itemsize
        n = 2 * PAGE // size + 7
        model = values_of(dtype, n)
        (tmp_path / "raw").write_bytes(b"\xaa" * offset + model.tobytes() + b"\xbb" * 5)
        index = np.arange(n)[::-1].copy()
        with self.open(tmp_path / "raw", "r+", dtype=dtype, shape=n, offset=offset) as a:
            out = np.zeros(n, dtype)
            self.run(read, n, a, index, out)
            assert out.tobytes() == model[::-1].tobytes()
            assert np.asarray(a[index]).tobytes() == model[::-1].tobytes()
            self.run(write, n, a, index, model)
            assert np.asarray(a[:]).tobytes() == model[::-1].tobytes()
            if dtype in ("i8", "f4"):
                with pytest.raises(Exception, match="atomic_add takes aligned"):
                    self.run(add, n, a, index, model)
        raw = (tmp_path / "raw").read_bytes()
        assert raw == b"\xaa" * offset + model[::-1].tobytes() + b"\xbb" * 5

    @pytest.mark.parametrize(
        ("shape", "kernel"), [((5, 30), transfer2), ((3, 4, 13), transfer3), ((2, 3, 4, 7), transfer4)]
    )
    def test_subscripts_of_several_dimensions(self, tmp_path: Path, shape: tuple[int, ...], kernel: Any) -> None:
        model = values_of("i8", int(np.prod(shape))).reshape(shape)
        np.save(tmp_path / "a.npy", model)
        with self.open(tmp_path / "a.npy") as a, self.open_new(tmp_path / "b.npy", shape, "i8") as b:
            extents = np.zeros(3, np.int64)
            grid = shape if len(shape) < 4 else model.size
            self.run(kernel, grid, a, b, extents)
            assert extents.tolist() == [shape[0], shape[-1], model.size]
            np.testing.assert_array_equal(np.asarray(b[:]), model)
        np.testing.assert_array_equal(np.load(tmp_path / "b.npy"), model)

    def open_new(self, path: Path, shape: Any, dtype: str, **options: Any) -> ww.Array:
        options = {"cache": 4 * (PAGE + 8), "page_size": PAGE, **options}
        return ww.create(path, shape, dtype, device=self.DEVICE, **options)

    def test_an_index_out_of_range_names_array_index_and_extent(self, numbers: Path, tmp_path: Path) -> None:
        np.save(tmp_path / "table.npy", np.arange(12.0).reshape(3, 4))
        with self.open(numbers) as a, self.open(tmp_path / "table.npy") as table:
            out = np.zeros(1, np.int64)
            for bad in (a.size, -1, 2**62):
                with pytest.raises(errors.IndexRangeError, match=rf"index {bad} of array 'numbers.npy'") as caught:
                    self.run(read, 1, a, np.array([bad]), out)
                assert (caught.value.array, caught.value.index, caught.value.size) == ("numbers.npy", bad, a.size)
            self.run(read, 1, a, np.array([7]), out)
            assert out[0] == 7, "the error was cleared"
            cell = np.zeros(1)
            for i, j, bad, extent in ((1, 4, 4, 4), (3, 0, 3, 3), (-1, 2, -1, 3), (2, -7, -7, 4)):
                with pytest.raises(errors.IndexRangeError, match=rf"index {bad} of array 'table.npy'") as caught:
                    self.run(read2, 1, table, i, j, cell)
                assert caught.value.size == extent
            self.run(read2, 1, table, 2, 3, cell)
            assert cell[0] == 11

    def test_failed_lets_loops_stop(self, numbers: Path) -> None:
        out = np.zeros(2, np.int64)
        with self.open(numbers) as a:
            with pytest.raises(errors.IndexRangeError):
                self.run(stop_when_failed, 256, a, out)
            assert out[1] == 1

    def test_wrong_subscripts_are_typing_errors_with_advice(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", np.zeros((4, 4), np.float16))
        np.save(tmp_path / "r.npy", np.zeros(4, [("x", "f4")]))
        np.save(tmp_path / "l.npy", np.zeros(4, np.longdouble))
        np.save(tmp_path / "i.npy", np.zeros(4, np.int16))
        out = np.zeros(4)
        index = np.zeros(4, np.int64)
        with self.open(tmp_path / "a.npy") as a:
            with pytest.raises(Exception, match="1 indices for an array of 2 dimensions"):
                self.run(read, 1, a, index, out)
            with pytest.raises(Exception, match="kernels cannot subscript items of float16"):
                self.run(read2, 1, a, 0, 0, out)
        with self.open(tmp_path / "r.npy") as a, pytest.raises(Exception, match="use a field view"):
            self.run(read, 1, a, index, out)
        with self.open(tmp_path / "l.npy") as a:
            with pytest.raises(Exception, match="kernels cannot subscript items of"):
                self.run(read, 1, a, index, out)
            assert np.asarray(a[:]).tolist() == [0] * 4
        with self.open(tmp_path / "i.npy", "r+") as a:
            with pytest.raises(Exception, match="atomic_add takes aligned 4- and 8-byte"):
                self.run(add, 1, a, index, index)

    # -- atomic additions -----------------------------------------------------------------------------------

    @pytest.mark.parametrize("dtype", ADDABLE)
    def test_additions_are_atomic(self, tmp_path: Path, dtype: str) -> None:
        n, threads = 2 * PAGE // np.dtype(dtype).itemsize, 60 * self.SCALE
        rng = np.random.default_rng(4)
        index = rng.choice(rng.integers(0, n, 9), threads)
        amounts = rng.integers(0 if dtype[0] == "u" else -50, 50, threads).astype(dtype)
        model = np.zeros(n, dtype)
        np.add.at(model, index, amounts)
        with self.open_new(tmp_path / "a.npy", n, dtype, cache=PAGE + 8) as a:
            self.run(add, threads, a, index, amounts)
            np.testing.assert_array_equal(np.asarray(a[:]), model)
        np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), model)
        plain = np.zeros(n, dtype)
        self.run(add, threads, plain, index, amounts)
        np.testing.assert_array_equal(plain, model)

    def test_an_addition_returns_the_old_value_once_each(self, tmp_path: Path) -> None:
        n = 20 * self.SCALE
        with self.open_new(tmp_path / "a.npy", 4, "i8") as a:
            out = np.full(n, -1)
            self.run(old_values, n, a, out)
            assert sorted(out.tolist()) == list(range(n))

    # -- host -----------------------------------------------------------------------------------------------

    INDICES = (
        3, -1, slice(None), slice(2, 9), slice(None, None, 3), slice(None, None, -2), slice(7, 2, -1), slice(4, 4),
        slice(-5, None), slice(90, 200), np.array([3, 3, -1, 0]), [5, -6], np.array([[1, 2], [0, 11]]),
        np.zeros(0, np.int64), [], np.arange(12) % 3 == 0, np.zeros(12, bool), Ellipsis,
        np.array([4], np.uint8), (np.int32(2),),
    )  # fmt: skip
    INNER = (
        (2, 1), (slice(1, 3), 2), (Ellipsis, 1), (-1, slice(None, None, 2)), ([1, 1, 5], slice(1, 4)),
        (slice(None), [0, 2]), ([2, 0], 1), (np.array([[1, 2]]), -1), (3, Ellipsis),
    )  # fmt: skip

    @pytest.mark.parametrize("shape", [(12,), (12, 5), (12, 3, 2)])
    def test_the_host_reads_and_writes_as_numpy_does(self, tmp_path: Path, shape: tuple[int, ...]) -> None:
        model = values_of("i4", int(np.prod(shape))).reshape(shape)
        np.save(tmp_path / "a.npy", model)
        indices = self.INDICES + (self.INNER if len(shape) > 1 else ())
        with self.open(tmp_path / "a.npy", "r+") as a:
            for index in indices:
                got = np.asarray(a[index])
                assert got.dtype == model.dtype
                np.testing.assert_array_equal(got, model[index], err_msg=repr(index))
            for k, index in enumerate(indices):
                model[index] = a[index] = k  # duplicates write the same
                np.testing.assert_array_equal(np.asarray(a[:]), model, err_msg=repr(index))
                rows = np.arange(12)[index[0] if isinstance(index, tuple) else index]
                if np.unique(rows).size == rows.size and np.ndim(model[index]):
                    a[index] = model[index] = model[index][::-1].copy()
                    np.testing.assert_array_equal(np.asarray(a[:]), model, err_msg=repr(index))
            assert len(a) == 12 and a.shape == shape and a.size == model.size and a.nbytes == model.nbytes
            np.testing.assert_array_equal(np.asarray(a), model)
        np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), model)

    def test_wrong_host_indices(self, numbers: Path, tmp_path: Path) -> None:
        np.save(tmp_path / "t.npy", np.zeros((3, 4)))
        with self.open(numbers) as a, self.open(tmp_path / "t.npy") as table:
            for bad in (a.size, -a.size - 1, [0, a.size], np.array([-a.size - 1])):
                with pytest.raises(errors.IndexRangeError, match=r"numbers\.npy"):
                    a[bad]
            with pytest.raises(errors.DTypeError, match="integers, slices or masks"):
                a[1.5]
            with pytest.raises(errors.ArgumentError, match="mask of shape"):
                a[np.zeros(3, bool)]
            with pytest.raises(IndexError, match="2 indices"):
                a[1, 2]
            for crossed in (([0, 1], [1, 2]), (0, slice(None), [1])):
                with pytest.raises((errors.ArgumentError, IndexError)):
                    table[crossed]

    def test_empty_arrays_and_arrays_without_dimensions(self, tmp_path: Path) -> None:
        np.save(tmp_path / "e.npy", np.zeros((0, 3), np.float32))
        np.save(tmp_path / "f.npy", np.zeros((3, 0)))
        np.save(tmp_path / "z.npy", np.float64(3.5))
        for tier in ("storage", "device"):
            with self.open(tmp_path / "e.npy", "r+", tier=tier) as a:
                assert len(a) == 0 and a.size == 0 and np.asarray(a[:]).shape == (0, 3)
                assert np.asarray(a[[]]).shape == (0, 3)
                a[:] = 1
                a.prefetch()
                a.pin()
                a.unpin()
                a.evict()
                out = np.zeros(1, np.float32)
                with pytest.raises(errors.IndexRangeError):
                    self.run(read2, 1, a, 0, 0, out)
            with self.open(tmp_path / "f.npy") as a:
                assert np.asarray(a[1]).shape == (0,) and np.asarray(a[[0, 2]]).shape == (2, 0)
            with self.open(tmp_path / "z.npy", "r+", tier=tier) as a:
                a[()] = 3.5
                assert a[()] == 3.5 and np.asarray(a).shape == ()
                with pytest.raises(TypeError, match="without dimensions"):
                    len(a)
                with pytest.raises(Exception, match="an array of 0 dimensions"):
                    self.run(read, 1, a, np.zeros(1, np.int64), np.zeros(1))
                one = a.reshape(1)
                self.run(write, 1, one, np.zeros(1, np.int64), np.array([4.25]))
            assert np.load(tmp_path / "z.npy") == 4.25
        np.save(tmp_path / "raw.npy", np.zeros(0))
        (tmp_path / "empty").write_bytes(b"")
        with self.open(tmp_path / "empty", dtype="i8") as a:
            assert a.shape == (0,)

    RECORD = np.dtype([("tag", "u1"), ("x", "f4"), ("pair", "i4", (2,)), ("t", "f8")])

    @pytest.mark.parametrize("align", [False, True])
    @pytest.mark.parametrize("shape", [(70,), (10, 7)])
    def test_record_arrays_and_their_fields(self, tmp_path: Path, align: bool, shape: tuple[int, ...]) -> None:
        dtype = np.dtype([(n, *d) for n, d in zip(self.RECORD.names, (["u1"], ["f4"], ["i4", (2,)], ["f8"]),
                          strict=True)], align=align)  # type: ignore[arg-type]  # fmt: skip
        model = np.zeros(shape, dtype)
        rng = np.random.default_rng(5)
        for name in dtype.names:
            model[name] = rng.integers(0, 200, model[name].shape)
        np.save(tmp_path / "r.npy", model)
        with self.open(tmp_path / "r.npy", "r+") as a:
            assert np.asarray(a[:]).tobytes() == model.tobytes()
            assert np.asarray(a[[3, 1]]).tobytes() == model[[3, 1]].tobytes()
            for name in dtype.names:
                field = a[name]
                assert field.shape == model[name].shape and field.dtype == model[name].dtype
                np.testing.assert_array_equal(np.asarray(field[:]), model[name])
                np.testing.assert_array_equal(np.asarray(field[[5, -1, 5]]), model[name][[5, -1, 5]])
                np.testing.assert_array_equal(np.asarray(field[2]), model[name][2])
                field[4:9] = model[name][4:9] = model[name][4:9] + 1
            assert np.asarray(a[:]).tobytes() == model.tobytes(), "a field's neighbours are left alone"
            if len(shape) == 1:
                out = np.zeros(70, np.float32)
                self.run(read, 70, a["x"], np.arange(70), out)
                np.testing.assert_array_equal(out, model["x"])
                self.run(write, 70, a["x"], np.arange(70), out + 1)
                model["x"] += 1
            with pytest.raises(errors.ArgumentError, match="has no field 'y'"):
                a.field("y")
        assert np.load(tmp_path / "r.npy").tobytes() == model.tobytes()

    def test_views_of_views_write_to_the_same_file(self, tmp_path: Path) -> None:
        for tier in ("storage", "host-cached", "host", "device"):
            np.save(tmp_path / "a.npy", np.zeros(24, np.int64))
            with self.open(tmp_path / "a.npy", "r+", tier=tier) as a:
                b = a.reshape(4, 6).reshape((24,))
                self.run(write, 24, b, np.arange(24), np.arange(24) + 1)
            np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), np.arange(24) + 1)
            with pytest.raises(errors.ClosedError):
                b[0]

    # -- cache ----------------------------------------------------------------------------------------------

    def test_full_statistics_add_up(self, numbers: Path) -> None:
        with self.open(numbers, stats="full", cache=64 * PAGE) as a:
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
            with self.open(numbers, cache=64 * PAGE) as a:
                if by_host:
                    a.prefetch(0, 4 * PAGE // 8)  # five pages, because of the header
                else:
                    rows = np.arange(0, a.size, 32)
                    flags = np.zeros(rows.size, np.int64)
                    self.run(ask_for, rows.size, a, rows, flags)
                    assert flags.all()
                self.run(total, 1, a, 8, 1, out)
                s = a.stats
                assert s.prefetched + s.misses == 12 and s.bytes_read == 12 * PAGE
                if by_host:
                    assert (s.prefetched, s.prefetch_dropped, s.misses) == (5, 0, 7)
                flags = np.ones(1, np.int64)
                self.run(ask_for, 1, a, np.array([a.size]), flags)
                assert flags[0] == 0, "a prefetch past the end is no error and no page"

    def test_pinned_pages_stay(self, numbers: Path) -> None:
        out = np.zeros(1, np.int64)
        with self.open(numbers) as a:
            per = PAGE // 8
            a.pin(0, 40)
            a.pin(0, 40)
            misses = a.stats.misses
            self.run(total, 1, a, 8, 3, out)
            assert a.stats.misses == misses + 3 * 11
            with pytest.raises(errors.PinError, match="only"):
                a.pin()
            with pytest.raises(errors.PinError, match="not pinned"):
                a.unpin(5 * per, 6 * per)
            with pytest.raises(errors.PinError, match="unpin them first"):
                a.evict(0, 40)
            a.unpin(0, 40)
            with pytest.raises(errors.PinError):
                a.evict(0, 40)
            a.unpin(0, 40)
            a.evict(0, 40)
            misses = a.stats.misses
            assert a[3] == 3
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
            assert not (a.cache.words() & 2).any()

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
            assert cache.pool_frames(a._nsid) == 2 and cache.pool_frames(b._nsid) == 6
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
            pass  # the claim of a failed open was given back

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
        n = 10_000 * PAGE // 8
        rng = np.random.default_rng(8)
        model = np.zeros(n, np.int64)
        model[::61] = np.arange(model[::61].size)
        np.save(tmp_path / "big.npy", model)
        with self.open(tmp_path / "big.npy", "r+", cache=20 * PAGE) as a:
            assert a.cache.hashed
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
            with pytest.raises(errors.PinError, match="too large for its cache"):
                a.pin(0, 1)
            held = np.ones(1, np.int64)
            self.run(hold, 1, a, np.array([5]), held)
            assert held[0] == 0, "in a hashed table kernels cannot pin either"
            a.evict(0, 3000)
            assert a.stats.evictions > 0
        np.testing.assert_array_equal(np.load(tmp_path / "big.npy"), model)

    # -- tiers and life -------------------------------------------------------------------------------------

    def test_four_tiers_give_the_same_results(self, tmp_path: Path) -> None:
        n = 5 * PAGE // 8 + 3
        rng = np.random.default_rng(9)
        start = rng.integers(-100, 100, n)
        rows, amounts = rng.integers(0, n, 200), rng.integers(-9, 9, 200)
        targets = rng.permutation(n)[:50]
        model = start.copy()
        model[targets] = np.arange(50)
        np.add.at(model, rows, amounts)
        for tier in ("storage", "host-cached", "host", "device"):
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
            lambda: a[0], lambda: a.__setitem__(0, 1), a.flush, lambda: a.stats, a.pin, a.unpin, a.evict, a.prefetch,
            a.view, lambda: a.reshape(-1), lambda: part[0], lambda: self.run(read, 1, a, np.zeros(1, np.int64), out),
            lambda: self.run(read2, 1, part, 0, 0, out),
        ]  # fmt: skip
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
                with pytest.raises(errors.SharingError, match="already open for writing"):
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
