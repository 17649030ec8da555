"""ItemConformance: tests of items and host indexing that every device passes (see `testing.arrays`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from warpwell import errors
from warpwell.array import Array, create, open_array
from warpwell.cache import Cache
from warpwell.storage.medium import Medium

from .kernels import (
    ADDABLE,
    DTYPES,
    PAGE,
    RECORD,
    add,
    fields_of_records,
    old_values,
    read,
    read2,
    stop_when_failed,
    transfer2,
    transfer3,
    transfer4,
    unknown_field,
    values_of,
    write,
)


class ItemConformance:
    """Reading and writing items, by kernels and by the host: tests that hold on every device.

    Attributes
    ----------
    DEVICE : {"cpu", "cuda", "interp"}
    SCALE : int
        Factor of sizes; the interpreter takes 1.
    TIER : str
        Of arrays that are opened without one.
    """

    DEVICE = "cpu"
    SCALE = 8
    TIER = "auto"

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers that the device has."""
        return (*(("mapped",) if self.DEVICE == "cpu" else ()), "storage", "host-cached", "host", "device")

    def open(self, path: Any, mode: str = "r", **options: Any) -> Array:
        """Open with four pages of cache, unless told otherwise or in a tier without a cache."""
        options.setdefault("tier", "auto" if isinstance(path, Medium) else self.TIER)
        if options["tier"] == "mapped":
            of_cache = ("cache", "page_size", "timeout", "stats")
            options = {name: value for name, value in options.items() if name not in of_cache}
        elif not isinstance(options.get("cache"), Cache):
            options = {"cache": 4 * (PAGE + 8), "page_size": PAGE, "timeout": 20.0, **options}
        return open_array(path, mode, device=self.DEVICE, **options)

    def cache(self, frames: int, **options: Any) -> Cache:
        return Cache(frames * (PAGE + 8), page_size=PAGE, device=self.DEVICE, timeout=20.0, **options)

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

    @pytest.mark.parametrize(
        ("dtype", "offset"), [("i8", 3), ("f4", 1), pytest.param("c16", 509, marks=pytest.mark.slow), ("u2", 5)]
    )
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

    @pytest.mark.parametrize("tier", ["storage", "host"])
    def test_kernels_name_fields_of_records(self, tmp_path: Path, tier: str) -> None:
        n = 3 * PAGE // RECORD.itemsize
        rng = np.random.default_rng(5)
        model = rng.integers(0, 256, n * RECORD.itemsize).astype(np.uint8).view(RECORD)
        model["x"], model["v"], model["in"]["h"] = rng.random(n), rng.random((n, 3)), rng.random(n)
        np.save(tmp_path / "r.npy", model)
        out = np.zeros((n, 5))
        with self.open(tmp_path / "r.npy", "r+", tier=tier) as a:
            self.run(fields_of_records, n, a, out)
            with pytest.raises(Exception, match="no field 'y': known are id, x, v, in"):
                self.run(unknown_field, 1, a, out)
        inner = model["in"]
        for k, column in enumerate((model["x"], model["v"][:, 2], inner["a"], inner["h"], np.full(n, 4 * n))):
            np.testing.assert_array_equal(out[:, k], column)
        model["x"], inner["h"] = -1.5, model["v"][:, 0]
        assert np.load(tmp_path / "r.npy").tobytes() == model.tobytes()
        with self.open(tmp_path / "r.npy", tier=tier) as a, pytest.raises(errors.ReadOnlyError):
            self.run(fields_of_records, n, a, out)

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

    def open_new(self, path: Path, shape: Any, dtype: str, **options: Any) -> Array:
        options = {"cache": 4 * (PAGE + 8), "page_size": PAGE, **options}
        return create(path, shape, dtype, device=self.DEVICE, **options)

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
        np.save(tmp_path / "a.npy", np.zeros((4, 4), "S3"))
        np.save(tmp_path / "r.npy", np.zeros(4, [("x", "f4")]))
        np.save(tmp_path / "l.npy", np.zeros(4, np.longdouble))
        np.save(tmp_path / "i.npy", np.zeros(4, np.int16))
        out = np.zeros(4)
        index = np.zeros(4, np.int64)
        with self.open(tmp_path / "a.npy") as a:
            with pytest.raises(Exception, match="1 index for an array of 2 dimensions"):
                self.run(read, 1, a, index, out)
            with pytest.raises(Exception, match=r"kernels cannot subscript items of \|S3"):
                self.run(read2, 1, a, 0, 0, out)
        with self.open(tmp_path / "r.npy") as a, pytest.raises(Exception, match="name a field of records"):
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

    INDICES: tuple[Any, ...] = (
        3, -1, slice(None), slice(2, 9), slice(None, None, 3), slice(None, None, -2), slice(7, 2, -1), slice(4, 4),
        slice(-5, None), slice(90, 200), np.array([3, 3, -1, 0]), [5, -6], np.array([[1, 2], [0, 11]]),
        np.zeros(0, np.int64), [], np.arange(12) % 3 == 0, np.zeros(12, bool), Ellipsis,
        np.array([4], np.uint8), (np.int32(2),),
    )  # fmt: skip
    INNER = (
        (2, 1),
        (slice(1, 3), 2),
        (Ellipsis, 1),
        (-1, slice(None, None, 2)),
        ([1, 1, 5], slice(1, 4)),
        (slice(None), [0, 2]),
        ([2, 0], 1),
        (np.array([[1, 2]]), -1),
        (3, Ellipsis),
    )

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
                single = a.reshape(1)
                self.run(write, 1, single, np.zeros(1, np.int64), np.array([4.25]))
            assert np.load(tmp_path / "z.npy") == 4.25
        np.save(tmp_path / "raw.npy", np.zeros(0))
        (tmp_path / "empty").write_bytes(b"")
        with self.open(tmp_path / "empty", dtype="i8") as a:
            assert a.shape == (0,)

    RECORD = np.dtype([("tag", "u1"), ("x", "f4"), ("pair", "i4", (2,)), ("t", "f8")])

    @pytest.mark.parametrize("align", [False, True])
    @pytest.mark.parametrize("shape", [(70,), (10, 7)])
    def test_record_arrays_and_their_fields(self, tmp_path: Path, align: bool, shape: tuple[int, ...]) -> None:
        names: Any = self.RECORD.names
        kinds: Any = (["u1"], ["f4"], ["i4", (2,)], ["f8"])
        dtype: Any = np.dtype([(n, *d) for n, d in zip(names, kinds, strict=True)], align=align)
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
            assert np.asarray(a[:]).tobytes() == model.tobytes(), "a field's neighbors are left alone"
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
        for tier in self.tiers:
            np.save(tmp_path / "a.npy", np.zeros(24, np.int64))
            with self.open(tmp_path / "a.npy", "r+", tier=tier) as a:
                b = a.reshape(4, 6).reshape((24,))
                self.run(write, 24, b, np.arange(24), np.arange(24) + 1)
            np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), np.arange(24) + 1)
            with pytest.raises(errors.ClosedError):
                b[0]
