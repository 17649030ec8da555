"""Bounds checks: an index that is out of range is an error after the launch, and nothing else is touched."""

import inspect
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.harness.until import HANG_SECONDS

import warpwell as ww
from lab import media
from warpwell import errors, gpu, storage
from warpwell.targets import bounds
from warpwell.targets.compiler.code_cache import cache_key
from warpwell.targets.kernel import Kernel, Launch

DEVICES = ["cpu", "interp"]
RECORD = np.dtype([("a", "<i4"), ("b", "<f8")])


@ww.kernel(check=True)
def double(x, y):
    i = gpu.grid(1)
    y[i] = 2 * x[i]


@ww.kernel
def unchecked(x, y):
    i = gpu.grid(1)
    y[i] = 2 * x[i]


@gpu.function
def item_of(row, j):
    return row[j]


@ww.kernel(check=True)
def by_rows(x, y, j):
    i = gpu.grid(1)
    y[i] = item_of(x[i], j)


@ww.kernel(check=True)
def two(x, i, j, out):
    x[i, j] = 5
    out[0] = x[i, j]
    x[i][j] += 1
    out[1] = x[i, :][j] + x[..., j][i]


@ww.kernel(check=True)
def grid_of_two(x, out):
    i, j = gpu.grid(2)
    gpu.atomic_add(out, 0, x[i, j])


@ww.kernel(check=True)
def slices(x, i, out):
    x[1:100] = 7  # slices are cut, as NumPy cuts them
    row = x[2:]
    out[0] = row[i]


@ww.kernel(check=True)
def count(x, i):
    gpu.atomic_add(x, i, 1)


@ww.kernel(check=True)
def records(r, i, out):
    out[0] = r[i]["b"]
    r["a"][i] = 3


@ww.kernel(check=True)
def from_storage(a, index, out):
    i = gpu.grid(1)
    out[i] = a[index[i]]


def fails(call, kernel: str, argument: str, index: int, size: int) -> None:
    with pytest.raises(errors.IndexRangeError) as caught:
        call()
    error = caught.value
    assert isinstance(error, IndexError)
    assert (error.kernel, error.array, error.index, error.size) == (kernel, argument, index, size)
    assert all(str(part) in str(error) for part in (repr(kernel), repr(argument), index, size))


@pytest.mark.parametrize("device", DEVICES)
def test_an_index_beyond_an_argument_is_told_after_the_launch(device: str) -> None:
    x, y = np.ones(100), np.zeros(100)
    double[100](x, y, device=device)
    assert y.sum() == 200
    around = np.zeros(300)
    y = around[100:200]
    fails(lambda: double[101](np.ones(101), y, device=device), "double", "y", 100, 100)
    assert around.sum() == around[100:200].sum()  # the memory around y is unchanged
    fails(lambda: double[61](np.ones(60), y, device=device), "double", "x", 60, 60)
    if device == "cpu":
        y[:] = 3
        with pytest.raises(errors.IndexRangeError):
            double[100](np.ones(60), y, device=device)
        assert y.tolist() == [2] * 60 + [0] * 40  # reads beyond the end return 0


@pytest.mark.parametrize("device", DEVICES)
def test_rows_keep_the_name_of_their_argument_in_helpers_too(device: str) -> None:
    x, y = np.arange(12.0).reshape(3, 4), np.full(5, -1.0)
    by_rows[3](x, y, 3, device=device)
    by_rows[3](x, y, -1, device=device)  # a negative index counts from the end, as in NumPy
    assert y.tolist() == [3, 7, 11, -1, -1]
    fails(lambda: by_rows[1](x, y, 4, device=device), "by_rows", "x", 4, 4)
    fails(lambda: by_rows[1](x, y, -5, device=device), "by_rows", "x", -5, 4)
    fails(lambda: by_rows[4](x, y, 1, device=device), "by_rows", "x", 3, 3)


@pytest.mark.parametrize("device", DEVICES)
def test_stores_and_items_of_two_dimensions(device: str) -> None:
    x, out = np.zeros((3, 4)), np.zeros(2)
    two[1](x, 2, -4, out, device=device)
    assert x[2, 0] == 6 and out.tolist() == [5, 12] and x.sum() == 6
    fails(lambda: two[1](x, 0, 4, out, device=device), "two", "x", 4, 4)
    fails(lambda: two[1](x, -4, 0, out, device=device), "two", "x", -4, 3)
    assert x.sum() == 6
    total = np.zeros(1)
    grid_of_two[3, 4](x, total, device=device)
    assert total[0] == 6
    fails(lambda: grid_of_two[3, 5](x, total, device=device), "grid_of_two", "x", 4, 4)


@pytest.mark.parametrize("device", DEVICES)
def test_slices_additions_and_records(device: str) -> None:
    x, out = np.zeros(6), np.zeros(1)
    slices[1](x, 3, out, device=device)
    assert x.tolist() == [0, 7, 7, 7, 7, 7] and out[0] == 7
    fails(lambda: slices[1](x, 4, out, device=device), "slices", "x", 4, 4)
    counts = np.zeros(4, np.int64)
    count[3](counts, 3, device=device)
    for index in (4, -1):  # an atomic addition does not wrap negative indices
        fails(lambda i=index: count[1](counts, i, device=device), "count", "x", index, 4)
    assert counts.tolist() == [0, 0, 0, 3]
    r = np.zeros(3, RECORD)
    r["b"] = 1.5
    records[1](r, 2, out, device=device)
    assert out[0] == 1.5 and r["a"].tolist() == [0, 0, 3]
    fails(lambda: records[1](r, 3, out, device=device), "records", "r", 3, 3)
    assert r["a"].tolist() == [0, 0, 3]


@ww.kernel(check=True)
def one_or_other(x, y, which, out):
    made = np.zeros(4)
    row = made
    if which == 1:
        row = x[1]
    both = x[0] if which == 2 else y
    out[0] = row[2] + both[2] + x[1].sum() + len(y)
    for value in x[0]:
        out[0] += value


def test_variables_that_are_one_array_or_another() -> None:
    x, out = np.arange(12.0).reshape(3, 4), np.zeros(1)
    for which, expected in ((0, 0 + 1), (1, 6 + 1), (2, 0 + 2)):
        one_or_other[1](x, np.ones(4), which, out, device="cpu")
        assert out[0] == expected + 22 + 4 + 6
    one_or_other[1](x, np.ones(2), 2, out, device="cpu")
    with pytest.raises(errors.IndexRangeError, match=r"index 2 .* size 2"):
        one_or_other[1](x, np.ones(2), 0, out, device="cpu")


def test_the_environment_switches_it_on_at_each_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    y = np.zeros(3)
    monkeypatch.setenv("WARPWELL_CHECK", "1")
    fails(lambda: unchecked[3](np.ones(2), y, device="cpu"), "unchecked", "x", 2, 2)
    monkeypatch.setenv("WARPWELL_CHECK", "yes")
    with pytest.raises(errors.ArgumentError, match="WARPWELL_CHECK"):
        unchecked[3](np.ones(3), y, device="cpu")
    monkeypatch.delenv("WARPWELL_CHECK")
    assert not bounds.checking(unchecked)
    unchecked[3](np.ones(3), y, device="cpu")
    assert y.tolist() == [2, 2, 2]


def test_a_segmentation_fault_becomes_an_error(tmp_path: Path) -> None:
    (tmp_path / "oob.py").write_text(
        "import numpy as np, warpwell as ww\nfrom warpwell import gpu\n"
        + "@ww.kernel\n"
        + inspect.getsource(double.function).partition("\n")[2]
        + "double[3_000_000](np.ones(100), np.zeros(100), device='cpu')\n"
    )
    ran = subprocess.run(
        [sys.executable, tmp_path / "oob.py"],
        env={**os.environ, "WARPWELL_CHECK": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert ran.returncode == 1 and "IndexRangeError: kernel 'double' used index" in ran.stderr


def test_an_array_on_storage_still_tells_its_own(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(1000.0))
    out = np.zeros(4)
    with ww.open(tmp_path / "a.npy", cache="64KiB", device="cpu") as a:
        from_storage[4](a, np.array([1, 2, 3, 999]), out)
        assert out.tolist() == [1, 2, 3, 999]
        with pytest.raises(errors.IndexRangeError, match=r"a\.npy"):
            from_storage[4](a, np.array([1, 2, 3, 1000]), out)
        fails(lambda: from_storage[4](a, np.arange(3), out), "from_storage", "index", 3, 3)


def test_compiled_code_is_kept_apart_from_that_without_checks() -> None:
    twin = double.checked_variant(2)
    keys = {cache_key(double.function), cache_key(twin.function)}
    assert len(keys) == 2 and None not in keys
    assert not bounds.checking(twin) and twin is double.checked_variant(2)
    unchecked[1](np.ones(1), np.zeros(1), device="cpu")
    double[1](np.ones(1), np.zeros(1), device="cpu")
    counts = [_llvm(k).count("cmpxchg") for k in (unchecked, twin)]
    assert counts[0] == 0 and counts[1] > 0


def _llvm(kernel: Kernel) -> str:
    """Return the compiler's text, also for code that was loaded from the disk cache."""
    (driver,) = (code for key, code in kernel.current().compiled.items() if key[0] == "cpu")
    return "".join(str(c.library._get_module_for_linking()) for c in driver.overloads.values())


def test_integers_wrap_when_they_are_stored() -> None:
    y = np.zeros(1, np.int8)
    double[1](np.array([150]), y, device="cpu")
    assert y[0] == 300 - 256


def test_blocks_and_options_stay() -> None:
    k = ww.kernel(double.function, max_registers=40, check=True)
    again = pickle.loads(pickle.dumps(double.__reduce__()[0]))
    assert again.keywords == {"max_registers": None, "block": None, "check": True}
    assert k.checked_variant(2).max_registers == 40
    assert isinstance(k[3], Launch)


@ww.kernel(check=True)
def item_then_index(a, x, out):
    value = a[0]
    out[0] = x[100 - int(value)]  # in range of x, if the read of a[0] succeeded


@ww.kernel(check=True)
def index_then_item(a, x, out):
    out[0] = a[int(x[out.size]) + a.size]


@ww.kernel(check=True)
def until_failed(x, rounds):
    i = gpu.grid(1)
    if i == 0:
        x[x.size] = 1
    while rounds[i] < 2_000_000_000 and not gpu.failed():
        rounds[i] += 1


def test_what_failed_first_is_told() -> None:
    """Failed reads return 0, and indices too; the error reports the failed read, not its consequences."""
    medium = media.Faulty(storage.RamMedium(np.full(1000, 100)), fail_ranges=[(0, 4096)])
    out, x = np.zeros(2), np.zeros(100)
    with ww.open(medium, dtype="i8", device="cpu", cache="64KiB") as a:
        with pytest.raises(errors.MediumError):
            item_then_index[1](a, x, out)
        medium.configure()
        item_then_index[1](a, x, out)
        fails(lambda: index_then_item[1](a, np.zeros(2), out), "index_then_item", "x", 2, 2)
        item_then_index[1](a, x, out)  # the error of the previous launch is gone


def test_loops_that_ask_whether_the_launch_failed_stop() -> None:
    rounds = np.zeros(4, np.int64)
    fails(lambda: until_failed[4](np.zeros(3), rounds, device="cpu"), "until_failed", "x", 3, 3)
    assert rounds.max() < 2_000_000_000


def test_a_store_beyond_a_view_is_caught_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without checks it changes the memory after the view."""

    @ww.kernel
    def fill(out):
        i = gpu.grid(1)
        out[i] = 7

    block = np.zeros(20)
    monkeypatch.setenv("WARPWELL_CHECK", "1")
    with pytest.raises(errors.IndexRangeError, match=r"'fill' used index 1\d of its argument 'out'"):
        fill[20](block[:10], device="cpu")
    assert block.tolist() == [7] * 10 + [0] * 10
