"""``a[lo:hi]``: a view of rows, which stands where a NumPy array of them stood; host reads past the cache."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import warpwell as ww
from warpwell import errors, gpu
from warpwell.array import Rows

MODEL = np.arange(1000).reshape(100, 10)


@ww.kernel
def copy2(a: Any, out: Any) -> None:
    i, j = gpu.grid(2)
    out[i, j] = a[i, j]


@ww.kernel
def negate(a: Any) -> None:
    i = gpu.grid(1)
    for j in range(a.shape[1]):
        a[i, j] = -a[i, j]


@pytest.fixture(params=["mapped", "storage", "host"])
def a(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    np.save(tmp_path / "a.npy", MODEL)
    with ww.open(tmp_path / "a.npy", "r+", device="cpu", tier=request.param) as array:
        yield array


def test_a_range_of_rows_is_an_array_that_kernels_take(a: Any) -> None:
    rows = a[20:50]
    assert isinstance(rows, Rows) and isinstance(rows, ww.Array)
    assert (rows.shape, rows.dtype, len(rows), rows.tier) == ((30, 10), MODEL.dtype, 30, a.tier)
    out = np.zeros((30, 10), np.int64)
    copy2[30, 10](rows, out)
    np.testing.assert_array_equal(out, MODEL[20:50])
    copy2[5, 10](rows[3:8], out)
    np.testing.assert_array_equal(out[:5], MODEL[23:28])
    with pytest.raises(errors.IndexRangeError, match="index 30 of"):
        copy2[31, 10](rows, np.zeros((31, 10), np.int64))


def test_what_is_not_a_range_of_rows_reads(a: Any) -> None:
    strides = slice(None, None, 2), slice(None, None, -1)
    for index in (3, -1, (3, 4), (slice(2, 5), 3), *strides, [1, 2], ..., (3, slice(4))):
        assert not isinstance(a[index], ww.Array), index
        np.testing.assert_array_equal(a[index], MODEL[index])
    for subscript in (slice(None), slice(5, 2), slice(-3, None), slice(90, 1000), slice(np.int64(2), np.int64(4), 1)):
        assert isinstance(a[subscript], Rows), subscript
        np.testing.assert_array_equal(a[subscript], MODEL[subscript])


def test_rows_stand_where_numpy_arrays_stood(a: Any) -> None:
    rows, model = a[20:23], MODEL[20:23]
    np.testing.assert_array_equal(np.asarray(rows), model)
    np.testing.assert_array_equal(np.asarray(rows, np.float32), model.astype("f4"))
    for got, expected in [
        (rows + 1, model + 1),
        (2 - rows, 2 - model),
        (rows @ model.T, model @ model.T),
        (-rows, -model),
        (rows == model, model == model),
        (rows < 205, model < 205),
        (rows * rows, model * model),
        (model + rows, 2 * model),
        (np.add(rows, 1), model + 1),
        (rows.T, model.T),
        (abs(rows), abs(model)),
        (rows.sum(axis=0), model.sum(axis=0)),
        (rows.astype("f4"), model.astype("f4")),
        (rows[[2, 0]], model[[2, 0]]),
        (rows[1], model[1]),
        (rows[1, 2], model[1, 2]),
        (rows.reshape(-1)[4:9], model.reshape(-1)[4:9]),
        (np.concatenate([rows, rows]), np.concatenate([model, model])),
        (np.mean(rows), model.mean()),
    ]:
        assert not isinstance(got, Rows) or len(got) == 5
        np.testing.assert_array_equal(got, expected)
    assert rows.tolist() == model.tolist() and 205 in rows and 7 not in rows
    assert [list(row) for row in rows] == model.tolist()
    for same in (
        rows.copy(),
        copy.copy(rows),
        copy.deepcopy(rows),
        pickle.loads(pickle.dumps(rows)),
        rows.read(),
        rows.copy_to_host(),
        np.from_dlpack(rows),
    ):
        assert type(same) is np.ndarray
        np.testing.assert_array_equal(same, model)
    with pytest.raises(ValueError, match="ambiguous"):
        bool(rows)
    with pytest.raises(AttributeError):  # sort() would sort a copy
        rows.sort()
    with pytest.raises(TypeError, match=r"read them first, a\[:\]"):
        rows + a
    with pytest.raises(TypeError, match=r"read them first, a\[:\] \+ 1"):
        a + 1


def test_rows_are_a_view_and_not_a_copy(a: Any) -> None:
    rows = a[20:30]
    assert repr(rows).endswith("; numpy.asarray() reads the rows>")
    negate[10](rows)
    model = MODEL.copy()
    model[20:30] *= -1
    np.testing.assert_array_equal(rows, model[20:30])
    rows[0] = 7
    rows[1:3] = a[5:7]
    model[20], model[21:23] = 7, model[5:7]
    a[40:42] += 1
    model[40:42] += 1
    np.testing.assert_array_equal(a[:], model)
    a.flush()
    np.testing.assert_array_equal(np.load(a.medium.path), model)
    a.close()
    with pytest.raises(errors.ClosedError):
        np.asarray(rows)
    assert "closed" in repr(rows) and "numpy.asarray" not in repr(rows)


def test_rows_change_in_place(a: Any, tmp_path: Path) -> None:
    rows = view = a[20:30]
    rows += 1
    rows //= np.arange(1, 11)
    assert rows is view
    model = MODEL.copy()
    model[20:30] = (model[20:30] + 1) // np.arange(1, 11)
    a[5:9] *= a[6:10]
    model[5:9] *= MODEL[6:10]
    np.testing.assert_array_equal(a[:], model)
    with pytest.raises(TypeError, match="cast"):
        rows += 0.5
    write_count = a._part._writes
    a[20:30] = rows
    rows[...] = rows
    assert a._part._writes == write_count, "unchanged rows are not written again"
    a[0:10] = rows
    a.flush()
    np.testing.assert_array_equal(a[0:10], model[20:30])
    with ww.open(a.medium.path, device="cpu", tier=a.tier) as b:
        rows = b[20:30]
        with pytest.raises(errors.ReadOnlyError):
            rows += 1


def test_fields_are_assigned(tmp_path: Path) -> None:
    records = np.zeros(50, [("id", "<i8"), ("xyz", "<f4", 3)])
    np.save(tmp_path / "r.npy", records)
    with ww.open(tmp_path / "r.npy", "r+", device="cpu") as r:
        r["id"] = np.arange(50)
        part = r[10:20]
        part["id"] += 100
        with pytest.raises(errors.ArgumentError, match="are not contiguous"):
            part["id"].reshape(2, 5)
        part["xyz"] = [1, 2, 3]
        records["id"], records["xyz"][10:20] = np.arange(50), [1, 2, 3]
        records["id"][10:20] += 100
        assert (np.asarray(r) == records).all()


def test_fields_of_rows(tmp_path: Path) -> None:
    records = np.zeros(50, [("id", "<i8"), ("xyz", "<f4", 3)])
    records["id"], records["xyz"] = np.arange(50), np.arange(150).reshape(50, 3)
    np.save(tmp_path / "r.npy", records)
    with ww.open(tmp_path / "r.npy", device="cpu") as r:
        np.testing.assert_array_equal(r[5:9]["id"] + 1, records["id"][5:9] + 1)
        np.testing.assert_array_equal(r["xyz"][5:9], records["xyz"][5:9])
        np.testing.assert_array_equal(r["xyz"][5:9].sum(axis=1), records["xyz"][5:9].sum(axis=1))
        assert r[5:9].tobytes() == records[5:9].tobytes() and r["id"][7] == 7


# -- host reads past the cache --------------------------------------------------------------------------------


def test_the_host_reads_past_a_cache_that_holds_nothing_newer(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", MODEL)
    with ww.open(tmp_path / "a.npy", device="cpu", cache="64KiB") as a:
        np.testing.assert_array_equal(np.asarray(a), MODEL)
        np.testing.assert_array_equal(a[3], MODEL[3])
        assert a.stats.misses == 0
    with ww.open(tmp_path / "a.npy", device="cpu", cache="64KiB", stats="full") as a:
        np.testing.assert_array_equal(a[3], MODEL[3])
        assert a.stats.misses > 0  # full statistics count the host's reads


def test_the_host_reads_what_kernels_wrote(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", MODEL)
    with ww.open(tmp_path / "a.npy", "r+", device="cpu", cache="64KiB") as a:
        part = a._part
        assert part.can_read_directly()
        negate[50](a)
        assert (np.load(tmp_path / "a.npy") == MODEL).all()  # only the cache has the negated rows
        np.testing.assert_array_equal(a[3], -MODEL[3])
        np.testing.assert_array_equal(a[40:60], np.concatenate([-MODEL[40:50], MODEL[50:60]]))
        assert part.can_read_directly() and a.stats.writebacks == 2  # the two reads wrote both pages back
        a[3] = 5
        assert part.can_read_directly() and (a[3] == 5).all() and (np.load(tmp_path / "a.npy")[3] == 5).all()
        with a.active():
            assert not part.can_read_directly()  # a launch may be writing
        a.view()
        assert not part.can_read_directly()  # launches that use the view are not counted


def test_a_cut_file_is_no_row_of_zeros(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", MODEL)
    with ww.open(tmp_path / "a.npy", device="cpu", cache="64KiB") as a:
        os.truncate(tmp_path / "a.npy", 4096)
        np.testing.assert_array_equal(a[3], MODEL[3])
        for use in (lambda: a[99], lambda: np.asarray(a), lambda: a[90:].sum()):
            with pytest.raises(errors.MediumError, match="truncated"):
                use()


def test_a_read_beside_a_close_takes_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "a.npy", MODEL)
    np.save(tmp_path / "b.npy", -MODEL)
    for tier in ("mapped", "storage"):
        a = ww.open(tmp_path / "a.npy", device="cpu", tier=tier)
        opened: list[Any] = []
        real = os.preadv

        def preadv(fd: int, buffers: Any, offset: int, a: Any = a, opened: list[Any] = opened, real: Any = real) -> int:
            if not opened:  # as if another thread had closed the array, and the program had opened a file
                a.close()
                opened.extend((tmp_path / "b.npy").open("rb") for _ in range(16))
            return int(real(fd, buffers, offset))

        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", preadv)
            with pytest.raises(errors.ClosedError):
                a[3]
        for file in opened:
            file.close()
