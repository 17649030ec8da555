"""`ww.gather` on the CPU: the rows equal NumPy's, from every tier; errors, cancellation and forks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import gc
import itertools
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
import types
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness import turns
from tests.harness.arrays.kernels import write
from tests.harness.clock import time_passes
from tests.harness.threads import run_threads
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from lab import media
from warpwell import errors, storage
from warpwell.array.gather import api, gpu, gpu_cached, host, page_batches, tasks, tensors
from warpwell.cache import prefetch
from warpwell.storage import io_threads

ROWS, PAGE = 500, 512
GAP = "WARPWELL_READ_GAP_BYTES"
TIMEOUT = 1000.0
"""Timeout in seconds on the clock of the test, not in real time."""
TIERS: dict[str, dict[str, Any]] = {
    "mapped": {},
    "read ahead": {},
    "host": {"tier": "host"},
    "storage": {"cache": "64KiB", "page_size": PAGE},
    "two frames": {"cache": 2 * (PAGE + 8), "page_size": PAGE},
    "host-cached": {"tier": "host-cached", "cache": "64KiB", "page_size": PAGE},
}


@pytest.fixture(params=list(TIERS))
def opened(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    if request.param == "read ahead":
        monkeypatch.setattr(host.RowCopy, "absent", lambda *_: True)
    return lambda path, *mode, **more: ww.open(path, *mode, device="cpu", **{**TIERS[request.param], **more})


def saved(tmp_path: Path, model: Any, name: str = "a.npy") -> Path:
    np.save(tmp_path / name, model)
    return tmp_path / name


def rows_of(a: Any, rows: Any, **more: Any) -> Any:
    return ww.gather(a, rows, **more).result(HANG_SECONDS)


# -- the same as NumPy ------------------------------------------------------------------------------------------------

SHAPES = [(ROWS,), (ROWS, 3), (ROWS, 7, 5), (ROWS, 2, 3, 4), (ROWS, 300), (ROWS, 0), (1, 9)]
DTYPES = ["i1", "<f2", "<u4", "<i8", "f8", "c16", "S5", "M8[s]", "?", [("x", "<f4"), ("y", "i2", 3)]]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_rows_are_those_that_numpy_has(opened: Any, tmp_path: Path, shape: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(len(shape))
    model = rng.integers(0, 255, (*shape, np.dtype(dtype).itemsize), np.uint8).view(dtype).reshape(shape)
    with opened(saved(tmp_path, model)) as a:
        for rows in (
            rng.integers(0, shape[0], 900),
            np.arange(shape[0])[::-1],
            rng.integers(0, shape[0], (4, 0, 3)),
            rng.integers(0, shape[0], (5, 7)).astype("i4"),
            [shape[0] - 1],
        ):
            got = rows_of(a, rows)
            expected = model[np.asarray(rows)]
            assert got.dtype == expected.dtype and got.shape == expected.shape and got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", DTYPES[2:], ids=str)
def test_items_of_any_dtype(opened: Any, tmp_path: Path, dtype: Any) -> None:
    raw = np.random.default_rng(1).integers(0, 2, (ROWS, 3, np.dtype(dtype).itemsize), np.uint8)
    model = raw.view(dtype).reshape(ROWS, 3)
    rows = np.arange(ROWS - 1, 0, -3)
    with opened(saved(tmp_path, model)) as a:
        assert rows_of(a, rows).tobytes() == model[rows].tobytes()


@settings(max_examples=25)
@given(
    rows=st.lists(st.integers(0, ROWS - 1), max_size=200),
    small=st.booleans(),
    stride=st.sampled_from([1, 2, -1]),
    gap=st.sampled_from([0, PAGE, 1 << 20]),
    max_rows=st.integers(1, 40),
    ahead=st.booleans(),
)
def test_any_list_of_rows(
    rows: list[int], small: bool, stride: int, gap: int, max_rows: int, ahead: bool, tmp_path_factory: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.npy"
    model = np.arange(ROWS * 67, dtype="u2").reshape(ROWS, 67)
    if not path.exists():
        np.save(path, model)
    given_rows = np.array(rows, "i4" if small else "i8")[::stride]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(GAP, str(gap))
        patch.setattr(page_batches, "MAX_LAUNCH_ROWS", max_rows)
        patch.setattr(host, "CHUNK_BYTES", 64)
        patch.setattr(host, "INLINE_CHUNK_ROWS", 16)
        patch.setattr(api, "INLINE_BYTES", 64 if max_rows % 2 else 4 << 20)
        patch.setattr(host, "MAX_CHUNK_BYTES", 134 * max_rows)
        patch.setattr(host.RowCopy, "absent", lambda *_: ahead)
        for options in (TIERS["mapped"], TIERS["storage"]):
            with ww.open(path, device="cpu", **options) as a:
                assert (rows_of(a, given_rows) == model[given_rows]).all()


@settings(max_examples=300)
@given(
    rows=st.lists(st.integers(0, 200), min_size=1, max_size=80),
    nbytes=st.integers(1, 3000),
    origin=st.integers(0, 300),
    max_pages=st.integers(1, 30),
)
def test_batches_have_each_page_once_and_no_more_than_fit(
    rows: list[int], nbytes: int, origin: int, max_pages: int
) -> None:
    starts = origin + np.sort(np.array(rows)) * nbytes
    expected = {p for s in starts.tolist() for p in range(s // PAGE, (s + nbytes - 1) // PAGE + 1)}
    pages: list[int] = []
    high = 0
    for batch in page_batches.page_batches(starts, nbytes, PAGE, max_pages):
        assert batch.low == high < batch.high
        high = batch.high
        assert len(batch.pages) <= max_pages or batch.high == batch.low + 1
        pages += batch.pages.tolist()
    assert high == len(rows) and pages == sorted(expected)


@pytest.mark.parametrize("kind", ["i4", "i8"])
def test_slots_are_filled_again_after_they_are_free(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_cached, "CHUNK_ROWS", 7)
    model = np.random.default_rng(0).integers(0, 255, (500, 24), np.uint8)
    rows = np.random.default_rng(1).integers(0, 500, 5000).astype(kind)
    medium = types.SimpleNamespace(host_memory=lambda: model.ctypes.data)
    rows_of_20 = {"shape": (500, 20), "_strides": (24, 1), "dtype": model.dtype, "_origin": 0}
    slots = gpu_cached._Slots(types.SimpleNamespace(device="cpu", medium=medium, name="a", **rows_of_20), rows)
    memory = slots.buffer.pinned.view(np.dtype(np.uint8))[gpu.HEADER_BYTES :]
    threads = [threading.Thread(target=slots.fill, args=(k,), daemon=True) for k in range(3)]
    for thread in threads:
        thread.start()
    held: list[int] = []
    assert slots.number > 2 * gpu_cached.SLOTS
    for slot in range(slots.number):
        while not slots.is_full(slot):
            time.sleep(0)
        held.append(slot)
        if len(held) == gpu_cached.SLOTS or slot == slots.number - 1:
            time.sleep(1e-4)  # threads wait for a slot
            for full in held:
                first, n = slots.rows_of(full)
                found = memory[full % gpu_cached.SLOTS * slots.slot_bytes :][: 20 * n].reshape(n, 20)
                assert (found == model[rows[first : first + n], :20]).all()
            slots.free_copied(deque([lambda: True] * len(held)))
            held.clear()
    for thread in threads:
        thread.join()


@given(st.sets(st.integers(0, 300), min_size=1), st.integers(0, 20))
def test_gaps_are_filled_up_to_the_limit(pages: set[int], max_gap: int) -> None:
    ascending = np.array(sorted(pages))
    merged = page_batches.fill_gaps(ascending, max_gap).tolist()
    expected = {q for p, n in itertools.pairwise(ascending.tolist()) if n - p - 1 <= max_gap for q in range(p, n)}
    assert merged == sorted(pages | expected)


def test_fields_views_and_reshaped_arrays(opened: Any, tmp_path: Path) -> None:
    kind = np.dtype([("x", "<f4"), ("y", "<i2", 3)])
    model = np.zeros(ROWS, kind)
    model["x"], model["y"] = np.arange(ROWS), np.arange(3 * ROWS).reshape(-1, 3)
    rows = np.array([4, 4, 499, 0])
    with opened(saved(tmp_path, model)) as a:
        for array, same in ((a["x"], model["x"]), (a["y"], model["y"]), (a[100:], model[100:])):
            valid_rows = rows % len(same)
            assert (rows_of(array, valid_rows) == same[valid_rows]).all()
        assert (rows_of(a.reshape(50, 10), rows % 50) == model.reshape(50, 10)[rows % 50]).all()
    with (
        opened(saved(tmp_path, np.zeros((ROWS, 4), kind), "b.npy")) as b,
        pytest.raises(errors.ArgumentError, match="are not contiguous"),
    ):
        ww.gather(b["x"], rows)


def test_rows_larger_than_the_cache(tmp_path: Path) -> None:
    model = np.arange(20 * 9000).reshape(20, 9000)
    with ww.open(saved(tmp_path, model), device="cpu", **TIERS["storage"]) as a:
        assert (rows_of(a, [3, 19, 3, 0]) == model[[3, 19, 3, 0]]).all()


def test_changes_that_are_not_flushed_are_seen(opened: Any, tmp_path: Path) -> None:
    path = saved(tmp_path, np.arange(ROWS))
    with opened(path, "r+") as a:
        index = np.arange(0, ROWS, 7)
        write[len(index)](a, index, -index - 1)
        got = rows_of(a, np.arange(ROWS))
        assert (got[index] == -index - 1).all() and got[1] == 1
        a[3] = 77
        assert rows_of(a, [3, 3]).tolist() == [77, 77]


def test_bfloat16_goes_to_whoever_has_it(tmp_path: Path) -> None:
    bits = np.arange(40, dtype="u2")
    bits.tofile(tmp_path / "b.bin")
    with ww.open(tmp_path / "b.bin", dtype="bfloat16", shape=(10, 4), device="cpu") as a:
        assert (rows_of(a, [9, 1]).view("u2") == bits.reshape(10, 4)[[9, 1]]).all()
        out = np.zeros((2, 4), "u2")
        assert rows_of(a, [3, 2], out=out) is out and (out == bits.reshape(10, 4)[[3, 2]]).all()
        exporter = Exporter(np.zeros((2, 4), "u2"), code=4)
        rows_of(a, [5, 5], out=exporter)
        assert (exporter.memory == bits.reshape(10, 4)[[5, 5]]).all()
        with pytest.raises(errors.DTypeError, match="bfloat16"):
            ww.gather(a, [5, 5], out=Exporter(np.zeros((2, 4), "u2"), code=2))


class Exporter:
    """An array of another library, as its DLPack says: with items of any code."""

    def __init__(self, memory_: Any, code: int, device: int = 1) -> None:
        self.memory, self.code, self.device = memory_, code, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self.memory.__dlpack__()
        tensors.managed(capsule).tensor.code = self.code
        return capsule


# -- out and rows ------------------------------------------------------------------------------------------------------


def test_out_is_filled_and_returned(opened: Any, tmp_path: Path) -> None:
    model = np.random.default_rng(3).random((ROWS, 6), np.float32)
    with opened(saved(tmp_path, model)) as a:
        out = np.full((7, 6), -1, np.float32)
        rows = [1, 5, 5, 499, 0, 2, 3]
        assert rows_of(a, rows, out=out) is out and (out == model[rows]).all()
        exporter = Exporter(np.zeros((7, 6), np.float32), code=2)
        assert rows_of(a, rows, out=exporter) is exporter and (exporter.memory == model[rows]).all()
        within = out.view(np.int32).reshape(-1)[:7]  # the row numbers share memory with `out`
        within[:] = rows
        assert (rows_of(a, within, out=out) == model[rows]).all()


class Nowhere(Exporter):
    """A tensor of PyTorch's device "meta", which has no memory."""

    def __dlpack_device__(self) -> tuple[int, int]:
        raise ValueError("Unknown device type meta for Dlpack")


def test_an_array_of_an_unknown_device_is_named(opened: Any, tmp_path: Path) -> None:
    with opened(saved(tmp_path, np.zeros((10, 6), np.float32))) as a:
        with pytest.raises(errors.ArgumentError, match=r"out cannot be shared by DLPack .*device type meta"):
            ww.gather(a, [1], out=Nowhere(np.zeros((1, 6), np.float32), code=2))


class Immutable(Exporter):
    """Read-only memory that DLPack exports without the read-only flag, as Arrow and JAX do."""


Immutable.__module__ = "pyarrow.lib"


def bad_outs(a: Any) -> dict[str, tuple[Any, type[Exception], str]]:
    read_only = np.zeros((2, 6), "f4")
    read_only.flags.writeable = False
    return {
        "shape": (np.zeros((3, 6), "f4"), errors.ArgumentError, r"shape \(3, 6\)"),
        "dtype": (np.zeros((2, 6), "f8"), errors.DTypeError, "float64"),
        "order": (np.zeros((6, 2), "f4").T, errors.ArgumentError, "C order"),
        "step": (np.zeros((2, 12), "f4")[:, ::2], errors.ArgumentError, "C order"),
        "read-only": (read_only, errors.ArgumentError, "read-only"),
        "immutable": (Immutable(np.zeros((2, 6), "f4"), 2), errors.ArgumentError, "read-only"),
        "Warpwell's": (None if a is None else a[0:2], errors.ArgumentError, "assign"),
        "list": ([[0.0] * 6] * 2, errors.ArgumentError, "list"),
        "bytes": (b"x" * 48, errors.ArgumentError, "bytes"),
        "kind": (Exporter(np.zeros((2, 6), "f4"), code=0), errors.DTypeError, "32-bit"),
        "GPU": (Exporter(np.zeros((2, 6), "f4"), 2, device=2), errors.ArgumentError, "GPU"),
        "strange device": (Exporter(np.zeros((2, 6), "f4"), 2, device=7), errors.ArgumentError, "type 7"),
    }


@pytest.mark.parametrize("case", sorted(bad_outs(None)))
def test_an_out_that_does_not_fit_is_refused_before_anything_is_begun(tmp_path: Path, case: str) -> None:
    with ww.open(saved(tmp_path, np.zeros((ROWS, 6), "f4")), device="cpu") as a:
        out, kind, message = bad_outs(a)[case]
        with pytest.raises(kind, match=message):
            ww.gather(a, [0, 1], out=out)
        assert not tasks._running


@pytest.mark.parametrize("tier", ["mapped", "host"])
def test_an_out_in_the_array_itself_is_refused(tmp_path: Path, tier: str) -> None:
    path = saved(tmp_path, np.zeros((ROWS, 6), "f4"))
    with ww.open(path, "r+", device="cpu", tier=tier) as a:
        address = a._part.data + a._origin
        for at in (-24, 0, 24 * (ROWS - 1)):
            view = np.ctypeslib.as_array((ctypes.c_float * 12).from_address(address + at)).reshape(2, 6)
            with pytest.raises(errors.ArgumentError, match="overlaps"):
                ww.gather(a, [0, 1], out=view)


def test_rows_that_are_no_rows_are_refused(opened: Any, tmp_path: Path) -> None:
    with opened(saved(tmp_path, np.zeros((ROWS, 2)))) as a:
        for rows, kind, message in (
            (3, errors.ArgumentError, "one number"),
            ([0.5], errors.DTypeError, "float64"),
            (np.ones(ROWS, bool), errors.DTypeError, "flatnonzero"),
            (np.zeros(2, "u8"), errors.DTypeError, "uint64"),
            (["a"], errors.DTypeError, "pass int32"),
            (Exporter(np.zeros(2, "i8"), 0, device=2), errors.ArgumentError, "GPU"),
            ([[1], [2, 3]], errors.ArgumentError, "array"),
        ):
            with pytest.raises(kind, match=message):
                ww.gather(a, rows)
        with pytest.raises(errors.ArgumentError, match="stream"):
            ww.gather(a, [0], stream=object())
        with pytest.raises(errors.ArgumentError, match="no rows"):
            ww.gather(a[:1].reshape(2)[:1].reshape(()), [0])
    with pytest.raises(errors.ArgumentError, match=r"ww\.open"):
        ww.gather(np.zeros(3), [0])
    with pytest.raises(errors.ClosedError):
        ww.gather(a, [0])


@pytest.mark.parametrize("wrong", [-1, ROWS, 1 << 40, -(1 << 62)])
def test_a_row_out_of_range_is_named_with_its_place(opened: Any, tmp_path: Path, wrong: int) -> None:
    with opened(saved(tmp_path, np.arange(ROWS))) as a:
        rows = np.arange(300)
        rows[[123, 200]] = wrong
        task = ww.gather(a, rows)
        with pytest.raises(errors.IndexRangeError, match=f"row {wrong} at position (123|200) of .* of 500 rows"):
            task.result(HANG_SECONDS)
        assert task.done() and not tasks._running
        assert rows_of(a, [1, 2]).tolist() == [1, 2], "and the array can be used"


def test_rows_of_other_libraries(tmp_path: Path) -> None:
    with ww.open(saved(tmp_path, np.arange(ROWS)), device="cpu") as a:
        for rows in ([5, 1], (5, 1), memoryview(np.array([5, 1])), Exporter(np.array([5, 1]), code=0)):
            assert rows_of(a, rows).tolist() == [5, 1]


def test_rows_may_be_changed_while_they_are_gathered(tmp_path: Path) -> None:
    with ww.open(saved(tmp_path, np.arange(ROWS)), device="cpu") as a:
        rows = np.arange(ROWS)
        task = ww.gather(a, rows)
        rows[:] = -1
        assert (task.result(HANG_SECONDS) == np.arange(ROWS)).all()


# -- reads of pages ----------------------------------------------------------------------------------------------------


def in_memory(path: Path) -> int:
    """Return how many pages of a file are in the page cache."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        count = -(-len(mapped) // mmap.PAGESIZE)
        vector = (ctypes.c_ubyte * count)()
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        libc = ctypes.CDLL(None)
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), vector) == 0
        return sum(flags & 1 for flags in vector)


def test_a_cold_mapped_file_is_read_where_rows_are_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GAP, "0")
    model = np.random.default_rng(5).integers(0, 1 << 60, (4096, 512))
    path = saved(tmp_path, model)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if in_memory(path):
        pytest.skip("the file system ignores requests to drop pages")
    rows = np.random.default_rng(6).integers(0, 4096, 200)
    with ww.open(path, device="cpu") as a:
        assert (rows_of(a, rows) == model[rows]).all()
        # The header shifts the rows, so each spans two pages. 64 more: the header, and the read-ahead of page faults.
        assert in_memory(path) <= 2 * len(set(rows.tolist())) + 64
        monkeypatch.setattr(host.RowCopy, "fetch", None)
        assert (rows_of(a, rows) == model[rows]).all(), "now it is in memory, and copied from there"


def test_small_gathers_are_done_at_once_and_leave_nothing(tmp_path: Path) -> None:
    model = np.arange(1 << 16).reshape(1 << 12, -1)
    with ww.open(saved(tmp_path, model), device="cpu") as a:
        threads = threading.active_count()
        np.asarray(a[:])  # the file is in the page cache now
        rows = np.array([5, 4095, 0])
        task = ww.gather(a, rows)
        assert task.done() and threading.active_count() <= threads
        rows[:] = 1
        assert (task.result() == model[[5, 4095, 0]]).all()
        for count in (3, 1 << 14, 1 << 16):  # copied by this thread, with helpers, and by other threads
            rows[:] = 1
            wide = np.resize(rows, count)
            task = ww.gather(a, wide)
            assert task.done() or count == 1 << 16
            wide[:] = 2
            result = task.result()
            assert (result == model[1]).all()
            reference = weakref.ref(result.base if result.base is not None else result)
            gc.disable()  # no reference cycle needs the collector
            try:
                del task, result
                assert until(lambda reference=reference: reference() is None)
            finally:
                gc.enable()


def test_a_wrong_limit_of_gaps_is_refused_before_anything_is_begun(opened, tmp_path, monkeypatch) -> None:
    with opened(saved(tmp_path, np.arange(ROWS))) as a:
        monkeypatch.setenv(GAP, "much")
        with pytest.raises(errors.ArgumentError, match=GAP):
            ww.gather(a, [0])
        monkeypatch.setenv(GAP, "4KiB")
        assert rows_of(a, [0, 7]).tolist() == [0, 7]


@pytest.mark.parametrize("kind", ["ram", "striped", "replicated", "latency", "python"])
def test_rows_of_any_medium(tmp_path: Path, kind: str) -> None:
    model = np.arange(1 << 15)
    for k in range(3):
        model.tofile(tmp_path / f"{k}")
    stripes = [model.reshape(-1, 2, 64)[:, k].copy() for k in range(2)]
    openers: dict[str, Callable[[], Any]] = {
        "ram": lambda: storage.RamMedium(model),
        "striped": lambda: storage.Striped([storage.RamMedium(stripe) for stripe in stripes], 512),
        "replicated": lambda: storage.Replicated([storage.FileMedium(tmp_path / f"{k}") for k in range(3)]),
        "latency": lambda: media.Latency(storage.FileMedium(tmp_path / "0"), latency_us=50.0),
        "python": WholeReads,
    }
    rows = np.random.default_rng(2).integers(0, 1 << 12, 3000)
    with ww.open(openers[kind](), dtype="i8", shape=(1 << 12, 8), device="cpu", cache="64KiB", page_size=PAGE) as a:
        assert (rows_of(a, rows) == model.reshape(-1, 8)[rows]).all()
        assert (rows_of(a[100:], rows % 100) == model.reshape(-1, 8)[100 + rows % 100]).all()


class WholeReads(storage.medium.PythonMedium):
    """A medium in Python."""

    def __init__(self) -> None:
        super().__init__(8 << 15)

    def read(self, offset: int, nbytes: int) -> Any:
        return np.arange(1 << 15).view(np.uint8)[offset : offset + nbytes]


def test_full_statistics_count_what_is_gathered(tmp_path: Path) -> None:
    with ww.open(saved(tmp_path, np.arange(ROWS)), device="cpu", cache="64KiB", page_size=PAGE, stats="full") as a:
        rows_of(a, np.arange(ROWS))
        rows_of(a, np.arange(ROWS))
        assert a.stats.bytes_wanted == 2 * 8 * ROWS and ROWS <= (a.stats.hits or 0) <= 2 * ROWS


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_failing_medium_raises_and_leaves_nothing(tmp_path: Path) -> None:
    medium = media.Faulty(storage.RamMedium(np.arange(100_000)), fail_ranges=[(204_800, 215_040)])
    with ww.open(medium, dtype="i8", device="cpu", cache="64KiB", page_size=PAGE) as a:
        task = ww.gather(a, np.arange(0, 100_000, 50))
        with pytest.raises(errors.MediumError, match="LBA"):
            task.result(HANG_SECONDS)
        assert rows_of(a, [5, 99_999]).tolist() == [5, 99_999]
    assert not tasks._running


def test_a_silent_medium_ends_the_gather_by_the_time_out(tmp_path: Path) -> None:
    medium = media.Faulty(storage.RamMedium(np.arange(100_000)), silent_after=3)
    a = ww.open(medium, dtype="i8", device="cpu", cache="64KiB", page_size=PAGE, timeout=TIMEOUT)
    task = ww.gather(a, np.arange(0, 100_000, 500))
    with pytest.raises(TimeoutError, match="wait longer"):
        task.result(0.01)
    with time_passes(TIMEOUT), pytest.raises(errors.StallError):
        task.result()
    a.close()
    assert not tasks._running


def test_a_file_that_is_cut_while_it_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path, np.arange(1 << 16))
    for ahead in (False, True):
        monkeypatch.setattr(host.RowCopy, "absent", lambda *_, ahead=ahead: ahead)
        with ww.open(path, device="cpu") as a:
            os.truncate(path, 1 << 17)
            with pytest.raises(errors.MediumError, match="truncated"):
                rows_of(a, np.arange(0, 1 << 16, 16))
            assert not tasks._running
            with pytest.raises(errors.MediumError):
                ww.gather(a, [0])
        path = saved(tmp_path, np.arange(1 << 16))


class Slow(storage.medium.PythonMedium):
    """A medium whose reads complete after `release_reads` is set."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.release_reads = threading.Event()

    def read(self, offset: int, nbytes: int) -> Any:
        self.release_reads.wait(HANG_SECONDS)
        return np.full(nbytes, 7, np.uint8)


def test_closing_waits_for_a_gather(tmp_path: Path) -> None:
    medium = Slow()
    a = ww.open(medium, dtype="u1", device="cpu", cache="64KiB", page_size=PAGE, timeout=TIMEOUT)
    task = ww.gather(a, np.arange(0, 1 << 20, 9000))
    closing = threading.Thread(target=a.close)
    closing.start()
    time.sleep(0.1)
    assert closing.is_alive() and not task.done()
    medium.release_reads.set()
    closing.join(HANG_SECONDS)
    assert not closing.is_alive() and (task.result(HANG_SECONDS) == 7).all()


def test_a_cancelled_gather_ends_and_leaves_the_array_usable(tmp_path: Path) -> None:
    medium = Slow()
    with ww.open(medium, dtype="u1", device="cpu", cache="16KiB", page_size=PAGE, timeout=TIMEOUT) as a:
        task = ww.gather(a, np.arange(0, 1 << 20, 600))
        assert task.cancel()
        medium.release_reads.set()
        with pytest.raises(errors.ClosedError, match="cancelled"):
            task.result(HANG_SECONDS)
        assert not task.cancel() and not tasks._running
        assert rows_of(a, [1]).tolist() == [7]


def test_a_task_skips_chunks_after_a_failure_or_a_cancel() -> None:
    started: list[int] = []
    gate = threading.Event()

    def run(k: int) -> None:
        started.append(k)
        gate.wait(HANG_SECONDS)
        if k == 0:
            raise ValueError("no")
        until(lambda: task.error)

    over: list[Any] = []
    workers = tasks.WorkerGroup(2)
    task = tasks.ChunkedTask(100, run, workers, finished=lambda: over.append(1))
    while len(started) < 2:
        time.sleep(1e-3)
    gate.set()
    assert isinstance(task.exception(HANG_SECONDS), ValueError) and over == [1] and len(started) == 2
    gate.clear()
    started.clear()
    task = tasks.ChunkedTask(100, run, workers, finished=lambda: over.append(1))
    while not started:
        time.sleep(1e-3)
    assert task.cancel()
    with pytest.raises(TimeoutError, match=r"the task is not done after 0\.01 s"):
        task.result(0.01)
    gate.set()
    assert isinstance(task.exception(HANG_SECONDS), ValueError), "the error of the chunk that had started"
    assert len(started) <= 3 and not task.cancel() and len(over) == 2


def test_a_task_that_is_done_here_is_not_kept_by_a_group_whose_threads_never_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(type(io_threads.current()), "submit", lambda *_: None)
    workers = tasks.WorkerGroup(2)
    task = tasks.ChunkedTask(3, lambda chunk: chunk, workers, help=True)
    assert task.done() and task.result() == 2 and not workers._tasks


def test_threads_that_carry_out_chunks_are_not_spare() -> None:
    is_started, gate = threading.Event(), threading.Event()
    workers = tasks.WorkerGroup(2)
    task = tasks.ChunkedTask(1, lambda k: (is_started.set(), gate.wait(HANG_SECONDS))[1], workers)
    assert is_started.wait(HANG_SECONDS) and workers._count_slots() == 1
    gate.set()
    assert task.result(HANG_SECONDS)


def test_many_tasks_have_few_threads_and_their_order() -> None:
    executed: list[tuple[int, int]] = []
    busy_counts: list[int] = []
    busy: list[int] = []
    workers = tasks.WorkerGroup(3)

    def run(task: int, chunk: int) -> None:
        busy.append(1)
        busy_counts.append(len(busy))
        executed.append((task, chunk))
        time.sleep(1e-3)
        busy.pop()

    started = [tasks.ChunkedTask(5, lambda k, n=n: run(n, k), workers) for n in range(40)]
    assert not concurrent.futures.wait(started, 60).not_done and len(executed) == 200 and max(busy_counts) <= 3
    assert all(k - n <= 3 for n, (k, _) in enumerate(executed[::5])), "no task starts before those in front of it"
    slow = threading.Event()
    stuck = [tasks.ChunkedTask(1, lambda k: slow.wait(HANG_SECONDS), workers) for _ in range(9)]
    assert tasks.ChunkedTask(1, lambda k: 7, tasks.WorkerGroup(1)).result(HANG_SECONDS) == 7, (
        "another group is not blocked"
    )
    helped: list[int] = []
    assert tasks.ChunkedTask(9, helped.append, workers, help=True).done(), "it does not wait for other tasks"
    assert helped == list(range(9))
    slow.set()
    assert all(task.result(HANG_SECONDS) for task in stuck)


def test_gathers_are_futures_of_the_standard_library(opened: Any, tmp_path: Path) -> None:
    with opened(saved(tmp_path, np.arange(ROWS))) as a:
        started = [ww.gather(a, [k, 7]) for k in range(5)]
        assert not concurrent.futures.wait(started, 60).not_done
        assert [task.result().tolist() for task in started] == [[k, 7] for k in range(5)]
        assert started[0].exception() is None and "gather of 2 rows of array 'a.npy', done" in repr(started[0])

        async def rows() -> Any:
            return await asyncio.wrap_future(ww.gather(a, [3]))

        assert asyncio.run(rows()).tolist() == [3]


def test_threads_gather_from_one_array(opened: Any, tmp_path: Path) -> None:
    model = np.random.default_rng(9).random((ROWS, 33))
    with opened(saved(tmp_path, model)) as a:

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(3):
                rows = rng.integers(0, ROWS, 150)
                ahead = [ww.gather(a, rows[k::3]) for k in range(3)]
                assert all((task.result(HANG_SECONDS) == model[rows[k::3]]).all() for k, task in enumerate(ahead))

        run_threads(work, [(seed,) for seed in range(4)])
    assert not tasks._running


def test_another_array_is_opened_on_the_cache_after_the_gather(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "DRAIN_TIMEOUT_SECONDS", 0.2)
    medium = Slow()
    with ww.Cache("64KiB", device="cpu", page_size=PAGE) as cache, ww.open(medium, dtype="u1", cache=cache) as a:
        task = ww.gather(a, np.arange(0, 1 << 20, 9000))
        while not cache._in_flight:
            time.sleep(1e-3)
        with pytest.raises(errors.SharingError, match="launches"):
            ww.open(saved(tmp_path, np.arange(9)), cache=cache)
        medium.release_reads.set()
        assert (task.result(HANG_SECONDS) == 7).all()
        ww.open(saved(tmp_path, np.arange(9)), cache=cache).close()


# -- processes ---------------------------------------------------------------------------------------------------------


def in_child(work: Callable[[], bool]) -> bool:
    child = os.fork()
    if child == 0:
        signal.alarm(int(HANG_SECONDS))
        try:
            os._exit(0 if work() else 1)
        except BaseException:
            os._exit(2)
    return os.waitpid(child, 0)[1] == 0


def test_a_forked_child_gathers_from_a_mapping_and_not_through_a_cache(tmp_path: Path) -> None:
    path = saved(tmp_path, np.arange(ROWS))
    with ww.open(path, device="cpu") as a, ww.open(path, device="cpu", cache="64KiB", page_size=PAGE) as b:
        task = ww.gather(a, [1])
        task.result(HANG_SECONDS)
        assert rows_of(b, [3]).tolist() == [3]

        def work() -> bool:
            assert task.done()
            with pytest.raises(errors.ForkError):
                task.result()
            with pytest.raises(errors.ForkError):
                ww.gather(b, [1])
            return not task.cancel() and rows_of(a, [4, 499]).tolist() == [4, 499]

        with a._part.cache.lock:  # a thread of the parent may hold the lock at the fork
            child_is_fine = threading.Thread(target=lambda: fine.append(in_child(work)))
            fine: list[bool] = []
            child_is_fine.start()
            child_is_fine.join(HANG_SECONDS)
        assert fine == [True]
        assert task.result(HANG_SECONDS).tolist() == [1] and rows_of(a, [2]).tolist() == [2]


def test_a_fork_amid_gathers_leaves_the_child_able_to_gather(tmp_path: Path) -> None:
    path = saved(tmp_path, np.arange(1 << 20))
    with ww.open(path, device="cpu") as a:
        rows = np.random.default_rng(1).integers(0, 1 << 20, 1 << 20)
        for _ in range(5):
            started = [ww.gather(a, rows) for _ in range(3)]
            assert in_child(lambda: rows_of(a, [7, 1]).tolist() == [7, 1])
            assert all((task.result(HANG_SECONDS) == rows).all() for task in started)


ENDING = """
import sys, numpy as np, warpwell as ww
np.save("a.npy", np.arange(1 << 20))
a = ww.open("a.npy", device="cpu")
rows = np.random.default_rng(0).integers(0, 1 << 20, 1 << 20)
ww.gather(a, rows[:10]).result()
left = [ww.gather(a, rows) for _ in range(6)]
print("end", flush=True)
"""

INTERRUPTED = """
import faulthandler, os, signal, threading, time, numpy as np, warpwell as ww
from warpwell import storage
faulthandler.dump_traceback_later(180)
class Slow(storage.medium.PythonMedium):
    def read(self, offset, nbytes):
        go.wait(30)
        return np.full(nbytes, 7, np.uint8)
go = threading.Event()
with ww.open(Slow(1 << 20), dtype="u1", device="cpu", cache="64KiB", page_size=512) as a:
    go.set()
    ww.gather(a, np.arange(1000, 1 << 20, 9000)).result()  # compiles
    go.clear()
    begun = ww.gather(a, np.arange(0, 1 << 20, 9000))
    try:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        begun.result(110)
    except KeyboardInterrupt:
        print("interrupted", begun.done(), flush=True)
    go.set()
    print(int(begun.result(60).min()), begun.done(), flush=True)
"""


@pytest.mark.parametrize(("program", "expected"), [(ENDING, "end\n"), (INTERRUPTED, "interrupted False\n7 True\n")])
def test_programs_that_end_or_are_interrupted_amid_gathers(tmp_path: Path, program: str, expected: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, expected, "")


def test_threads_end_when_nothing_is_left_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = io_threads.IOThreadPool()
    monkeypatch.setattr(io_threads, "_pool", pool)
    monkeypatch.setattr(io_threads, "IDLE_TIMEOUT", 0.05)
    before = set(os.listdir("/proc/self/fd"))
    with ww.open(saved(tmp_path, np.arange(ROWS)), device="cpu") as a:
        for _ in range(20):
            rows_of(a, np.arange(ROWS))
        assert not a._part._streams and not a._part._launches, "dropped without a flush, too"
    until(lambda: pool.threads == 0)
    assert len(set(os.listdir("/proc/self/fd")) - before) == 0


# -- batches -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 1, 5])
def test_batches_are_those_that_numpy_has(opened: Any, tmp_path: Path, ahead: int) -> None:
    model = np.arange(ROWS * 5, dtype="f4").reshape(ROWS, 5)
    rng = np.random.default_rng(ahead)
    batch_rows = [rng.integers(0, ROWS, n).astype(kind) for n, kind in ((9, "i8"), (0, "i4"), (200, "i4"), (3, "i8"))]
    with opened(saved(tmp_path, model)) as a, ww.rows(a, iter(batch_rows), ahead) as batches:
        for rows, got in zip(batch_rows, batches, strict=True):
            assert (got == model[rows]).all() and got.shape == (len(rows), 5)
        with pytest.raises(StopIteration):
            next(batches)
    assert not tasks._running


def test_batches_are_taken_as_far_ahead_as_was_said(tmp_path: Path) -> None:
    read_batches: list[int] = []

    def endless() -> Any:
        for k in range(1000):
            read_batches.append(k)
            yield [k % 7, 2]

    with ww.open(saved(tmp_path, np.arange(ROWS)), device="cpu") as a, ww.rows(a, endless(), ahead=3) as batches:
        assert not read_batches
        assert next(batches).tolist() == [0, 2] and len(read_batches) == 5
        assert next(batches).tolist() == [1, 2] and len(read_batches) == 6
    with pytest.raises(StopIteration):
        next(batches)


def test_the_place_of_a_wrong_row_is_that_in_its_batch(opened: Any, tmp_path: Path) -> None:
    with opened(saved(tmp_path, np.arange(ROWS))) as a, pytest.raises(errors.IndexRangeError, match="at position 3 of"):
        list(ww.rows(a, [[1, 5, 1, ROWS]]))


def test_what_fails_in_a_batch_is_raised_in_its_turn(tmp_path: Path) -> None:
    def broken() -> Any:
        yield [1]
        yield [2]
        raise RuntimeError("no more")

    with ww.open(saved(tmp_path, np.arange(ROWS)), device="cpu") as a:
        for batches, kind in (
            (broken(), RuntimeError),
            ([[1], [2], [ROWS], [3]], errors.IndexRangeError),
            ([[1], [2], [0.5]], errors.DTypeError),
        ):
            it = ww.rows(a, batches, ahead=4)
            assert [next(it).tolist(), next(it).tolist()] == [[1], [2]]
            with pytest.raises(kind):
                next(it)
            with pytest.raises(StopIteration):
                next(it)
        for wrong, name in ((7, "batches"), ("rows", "batches")):
            with pytest.raises(errors.ArgumentError, match=name):
                ww.rows(a, wrong)  # type: ignore[arg-type]
        with pytest.raises(errors.ArgumentError, match="ahead"):
            ww.rows(a, [], ahead=-1)
    with pytest.raises(errors.ClosedError):
        ww.rows(a, [[1]])


@pytest.mark.quick("mapped-11")
@pytest.mark.parametrize("step", [1, 11])
@pytest.mark.parametrize("tier", ["mapped", "storage"])
def test_an_interrupt_at_any_point_loses_no_chunk(tier: str, step: int, tmp_path: Path) -> None:
    model = np.arange(ROWS * 3).reshape(ROWS, 3)
    rows = np.arange(ROWS)[::-1]
    with ww.open(saved(tmp_path, model), device="cpu", **TIERS[tier]) as a:
        assert (rows_of(a, rows) == model[rows]).all()
        for position in turns.interruptions(
            lambda: ww.gather(a, rows).result(HANG_SECONDS), "warpwell/array/gather/", step=step
        ):
            assert until(lambda: not tasks._running), position
        assert (rows_of(a, rows) == model[rows]).all()


def test_an_interrupt_of_a_cancellation_loses_no_chunk() -> None:
    workers, started, release_reads = tasks.WorkerGroup(1), [], threading.Event()

    def begin_and_cancel() -> None:
        release_reads.clear()
        for _ in range(3):
            started.append(tasks.ChunkedTask(9, lambda chunk: release_reads.wait(HANG_SECONDS), workers))
            started[-1].cancel()

    for position in turns.interruptions(begin_and_cancel, "array/gather/tasks.py", "storage/io_threads.py"):
        release_reads.set()
        assert until(lambda: not tasks._running), position
        assert all(isinstance(task.exception(HANG_SECONDS), errors.ClosedError | None) for task in started), position
