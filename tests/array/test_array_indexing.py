"""Subscripts of the host mean what NumPy's do, read or write only the named items, and need
little memory in addition to the result."""

import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness.until import HANG_SECONDS

import warpwell as ww
from warpwell import errors, gpu, storage

RECORD = np.dtype([("x", "<i4"), ("y", "<f8", (2,)), ("z", "u1")])


def medium_of(raw: Any, **options: Any) -> ww.Array:
    options = {"cache": "64KiB", "page_size": 512, "device": "cpu", **options}
    return ww.open(storage.RamMedium(raw), "r+", **options)


@ww.kernel
def count(a, n):
    for _ in range(n):
        gpu.atomic_add(a, (1, 5), 1)


@ww.kernel
def length(a, out):
    out[gpu.grid(1)] = len(a)


# -- as NumPy ---------------------------------------------------------------------------------------------------------


def slices(extent: int) -> Any:
    ends = st.none() | st.integers(-extent - 1, extent + 1)
    return st.builds(slice, ends, ends, st.sampled_from([None, 1, 2, -1, -3, 3]))


def integers(extent: int) -> Any:
    return st.integers(-extent, extent - 1) if extent else st.just(slice(None))


@st.composite
def arrays_of(draw: Any, extent: int) -> Any:
    if extent == 0 or draw(st.booleans()):
        return np.array(draw(st.lists(st.booleans(), min_size=extent, max_size=extent)), np.bool_)
    chosen = st.lists(st.integers(-extent, extent - 1), max_size=4)
    return np.array(draw(chosen), draw(st.sampled_from([np.int64, np.int8])))


@st.composite
def indices(draw: Any, shape: tuple[int, ...]) -> Any:
    """An integer, slice, index array or mask in the first dimension; arrays in the others after a slice only."""
    kinds = [integers, slices, arrays_of]
    first = draw(st.one_of(*(kind(shape[0]) for kind in kinds)))
    kinds = kinds if isinstance(first, slice) else kinds[:2]
    subscripts = [draw(st.one_of(*(kind(n) for kind in kinds))) for n in shape[1 : draw(st.integers(1, len(shape)))]]
    if draw(st.booleans()):
        subscripts.append(Ellipsis)
    if not isinstance(first, np.ndarray) and draw(st.booleans()):
        subscripts.insert(draw(st.integers(0, len(subscripts))), None)
    return (first, *subscripts) if subscripts else first


@pytest.mark.quick("interp")  # every type and number of dimensions is compiled separately
@pytest.mark.parametrize("device", ["interp", "cpu"])
@settings(max_examples=30, deadline=None)
@given(
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple),
    dtype=st.sampled_from([np.dtype(t) for t in ("u1", "<i2", "<f4", "<i8", "<c16")] + [RECORD]),
    offset=st.sampled_from([0, 8, 3]),
    data=st.data(),
)
def test_subscripts_are_those_of_numpy(device: str, shape: tuple[int, ...], dtype: Any, offset: int, data: Any) -> None:
    rng = np.random.default_rng(1)
    size = int(np.prod(shape))
    raw = rng.integers(0, 256, offset + size * dtype.itemsize + 5).astype(np.uint8)
    model = raw[offset : offset + size * dtype.itemsize].copy().view(dtype).reshape(shape)
    with medium_of(raw.copy(), dtype=dtype, shape=shape, offset=offset, device=device) as a:
        for _ in range(3):
            array, numpys = a, model
            if dtype is RECORD and (name := data.draw(st.sampled_from([None, "x", "y", "z"]))):
                array, numpys = a[name], model[name]
            index = data.draw(indices(numpys.shape))
            try:
                expected = numpys[index]
            except IndexError:  # index arrays of different lengths
                with pytest.raises(IndexError):
                    array[index]
                continue
            found = array[index]
            assert (
                np.shape(found) == np.shape(expected) and np.asarray(found).tobytes() == np.asarray(expected).tobytes()
            )
            values = rng.integers(0, 256, np.asarray(expected).nbytes).astype(np.uint8)
            values = values.view(numpys.dtype).reshape(np.shape(expected)) if values.size else np.asarray(expected)
            if values.size and data.draw(st.booleans()):
                values = values.reshape(-1)[0]  # a scalar, for all items
            array[index] = numpys[index] = values
            assert a[...].tobytes() == model.tobytes()


@pytest.mark.parametrize("tier", ["mapped", "storage", "host"])
@pytest.mark.parametrize("axis", [0, 1])
def test_of_values_for_one_place_the_last_remains_whole(tier: str, axis: int, tmp_path: Path) -> None:
    repeated, shape = np.arange(200) % 2, (4096, 2) if axis else (2, 4096)
    values = np.repeat(np.arange(200)[:, np.newaxis], 4096, 1)
    with ww.create(tmp_path / "a.npy", shape, np.int64, device="cpu", tier=tier) as a:
        for _ in range(3):
            if axis:
                a[:, repeated] = values.T
            else:
                a[repeated] = values
            found = np.moveaxis(np.asarray(a), axis, 0)
            assert (found == [[198], [199]]).all()
            a[...] = 0


def test_what_is_no_index_is_refused() -> None:
    with medium_of(np.arange(12), dtype="i8", shape=(3, 4)) as a:
        for index in (3, -4, (0, 4), (slice(None), -5), [0, 3], (0, 0, 0), (slice(None), [0, 4]), (..., ...)):
            with pytest.raises(IndexError):
                a[index]
        for index in ((0, [1]), ([0], [1]), (None, [1])):
            with pytest.raises(errors.ArgumentError, match="index array only in its first dimension"):
                a[index]
        with pytest.raises(ValueError, match="broadcast"):
            a[0] = [1, 2, 3]
        assert a[:].tolist() == np.arange(12).reshape(3, 4).tolist()


# -- concurrent writes ------------------------------------------------------------------------------------------------


@pytest.mark.quick("storage")
@pytest.mark.parametrize("tier", ["storage", "host"])
def test_threads_that_set_different_columns_keep_each_others(tier: str, tmp_path: Path) -> None:
    with ww.create(tmp_path / "m.npy", (4, 16), np.int64, cache="64KiB", device="cpu", tier=tier) as a:
        a[0, 0] = 0
        counting = threading.Thread(target=lambda: count[8](a, 50_000))

        def put(column: int) -> None:
            for k in range(1, 31):
                a[0, column] = k
                a[1, 6:8] = k

        threads = [counting, *(threading.Thread(target=put, args=(column,)) for column in range(6))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_SECONDS)
        assert a[0, :6].tolist() == [30] * 6
        assert a[1, 5] == 400_000


# -- memory -----------------------------------------------------------------------------------------------------------

BYTES = 48 << 20


@pytest.fixture(scope="module")
def large() -> Any:
    raw = np.zeros(BYTES, np.uint8)
    raw[::1000] = 1
    with medium_of(raw, dtype="u1", cache="8MiB", page_size=4096) as a:
        assert a[5] == 0
        yield a


READS = {
    "all": lambda a: a[:],
    "odd": lambda a: a[: BYTES - 3],
    "strided": lambda a: a[::5],
    "column": lambda a: a.reshape(-1, 1024)[:, 100],
    "columns": lambda a: a.reshape(-1, 1024)[:, 100:108],
    "rows": lambda a: a.reshape(-1, 16)[np.arange(0, BYTES // 16, 3, dtype=np.int32)],
}


@pytest.mark.quick("all")
@pytest.mark.parametrize("name", READS)
def test_reads_take_little_memory_beside_their_result(name: str, large: Any) -> None:
    tracemalloc.start()
    try:
        out = READS[name](large)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    own = out.nbytes + (4 * (BYTES // 48) if name == "rows" else 0)
    assert peak - own < 20 << 20
    assert out.dtype == np.uint8 and out.sum() == READS[name](np.asarray(_model())).sum()


def _model() -> Any:
    raw = np.zeros(BYTES, np.uint8)
    raw[::1000] = 1
    return raw


@pytest.mark.slow
def test_writes_take_little_memory(large: Any) -> None:
    rows = large.reshape(-1, 1024)
    tracemalloc.start()
    try:
        rows[:, 1:3] = 0
        rows[:20000] = np.arange(1024).astype(np.uint8)
        rows[:20000] = np.arange(20000).astype(np.uint8)[:, np.newaxis]
        rows[:20000] = np.float32(0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40 << 20
    large[: 20000 * 1024] = 0
    large[::1000] = 1
    assert (large[: 1 << 20] == _model()[: 1 << 20]).all()


# -- extents ----------------------------------------------------------------------------------------------------------


def test_empty_arrays_whose_other_extents_are_too_large_are_refused(tmp_path: Path) -> None:
    (tmp_path / "r.bin").write_bytes(b"12345678")
    too_large = (0, 1 << 62)
    with pytest.raises(errors.ArgumentError, match="2\\^63 bytes or more"):
        ww.open(tmp_path / "r.bin", dtype="i8", shape=too_large, device="cpu")
    with pytest.raises(errors.ArgumentError, match="2\\^63 bytes or more"):
        ww.create(tmp_path / "c.npy", too_large, np.int64, device="cpu")
    assert not (tmp_path / "c.npy").exists()
    with (tmp_path / "h.npy").open("wb") as file:
        np.lib.format.write_array_header_2_0(file, {"descr": "<i8", "fortran_order": False, "shape": too_large})
    with pytest.raises(errors.FormatError, match="2\\^63 bytes or more"):
        ww.open(tmp_path / "h.npy", device="cpu")
    with ww.open(tmp_path / "r.bin", dtype="i8", shape=(0, 1 << 59), device="cpu", cache="64KiB") as a:
        with pytest.raises(errors.ArgumentError, match="2\\^63 bytes or more"):
            a.reshape(0, 3, 1 << 60)
        out = np.ones(1, np.int64)
        length[1](a, out)
        assert out[0] == 0 and a[:].shape == (0, 1 << 59) and a.reshape(0, 1 << 58).size == 0
