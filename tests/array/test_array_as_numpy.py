"""Common NumPy expressions on an array on storage: each works, or raises an error that names the replacement."""

import copy
import itertools
import operator
import pickle
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import warpwell as ww
from warpwell import errors, gpu
from warpwell.array import reductions
from warpwell.array.array import TIERS
from warpwell.array.operators import ITERATION_BYTES


@pytest.fixture
def array(tmp_path: Path) -> Iterator[Any]:
    np.save(tmp_path / "a.npy", np.arange(10_000.0).reshape(1000, 10))
    with ww.open(tmp_path / "a.npy", device="cpu", cache="64KiB", page_size="4KiB") as a:
        yield a


def test_iteration_yields_the_rows(array: Any) -> None:
    rows = list(array)
    assert len(rows) == 1000 and np.array_equal(rows, np.arange(10_000.0).reshape(1000, 10))
    assert max(array.reshape(-1)) == 9999.0


def test_iteration_reads_many_rows_at_a_time_and_never_all(tmp_path: Path) -> None:
    rows = 16 * ITERATION_BYTES // 512 + 5
    np.save(tmp_path / "a.npy", np.arange(64 * rows).reshape(rows, 64))
    # "full" also counts reads by the host.
    with ww.open(tmp_path / "a.npy", device="cpu", cache="64KiB", stats="full") as a:
        each = iter(a)
        assert next(each)[0] == 0
        assert ITERATION_BYTES <= a.stats.bytes_read < 8 * ITERATION_BYTES  # a cache this small reads pages twice
        assert sum(1 for _ in each) == rows - 1


def test_an_array_without_dimensions_has_nothing_to_iterate_over(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.float64(3))
    with ww.open(tmp_path / "a.npy", device="cpu", cache="64KiB") as a, pytest.raises(TypeError, match=r"a\[\(\)\]"):
        iter(a)


def test_numpy_gets_a_copy_and_never_without_being_told(array: Any) -> None:
    assert np.asarray(array).shape == (1000, 10) and np.array(array, copy=True).dtype == np.float64
    with pytest.raises(ValueError, match="leave copy=False out"):
        np.asarray(array, copy=False)


@pytest.mark.parametrize(
    ("attempt", "says"),
    [
        (lambda a: a > 3, r"a\[:\] > 3"),
        (lambda a: a == 3, r"a\[:\] == 3"),
        (lambda a: a != 3, r"a\[:\] != 3"),
        (lambda a: a + 1, r"a\[:\] \+ 1"),
        (lambda a: 2 * a, r"2 \* a\[:\]"),
        (lambda a: operator.iadd(a, 1), r"a\[:\] \+ 1"),
        (lambda a: -a, r"-a\[:\]"),
        (lambda a: abs(a), r"abs\(a\[:\]\)"),
        (lambda a: np.ones(10) + a, r"np.add\(array.*, a\[:\]\)"),
        (lambda a: np.add(a, 1), r"np.add\(a\[:\], 1\)"),
        (lambda a: np.add.accumulate(a), r"np.add.accumulate\(a\[:\]\)"),
        (lambda a: np.median(a), r"np.median\(a\[:\]\)"),
        (lambda a: np.concatenate([a, a]), r"np.concatenate\("),
        (lambda a: np.add(a[:], a), r"read them first, a\[:\],"),
        (lambda a: np.add(1, 2, out=(a[:],)), r"rows\[...\] = ..."),
        (lambda a: 5.0 in a, r"5.0 in a\[:\]"),
        (copy.copy, "cannot be copied"),
        (copy.deepcopy, "cannot be copied"),
        (pickle.dumps, "cannot be pickled: send its path"),
    ],
)
def test_what_needs_the_items_says_how_to_get_them(array: Any, attempt: Callable[[Any], Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        attempt(array)
    assert array[0, 1] == 1.0  # the failed attempt leaves the array open


@pytest.mark.parametrize("name", ["astype", "cumsum", "copy"])
def test_other_methods_of_numpy_name_the_way(array: Any, name: str) -> None:
    assert not hasattr(array, name) and hasattr(array[:], name)
    with pytest.raises(AttributeError, match=rf"read them first, a\[:\]\.{name}"):
        getattr(array, name)
    with pytest.raises(AttributeError, match="'Array' object has no attribute 'nonsense'"):
        array.nonsense  # noqa: B018


def test_functions_of_numpy_that_read_nothing(array: Any) -> None:
    assert (np.shape(array), np.ndim(array), np.size(array), np.result_type(array)) == ((1000, 10), 2, 10_000, "f8")


REDUCTIONS = [getattr(np, name) for name in reductions.NAMES]


def _values(dtype: str) -> Any:
    values = np.random.default_rng(3).normal(size=(7, 5, 6)) * (1 if dtype == "f2" else 50)
    if dtype == "nan":
        values[[2, 5], 1, 4] = np.nan
        return values
    return values.astype(dtype)


@pytest.mark.parametrize("block", [40, 700])
@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "i2", "?", "c16", "nan"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::numpy.exceptions.ComplexWarning")
def test_reductions_are_those_of_numpy(dtype: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions, "BLOCK_BYTES", block)
    values = _values(dtype)
    np.save(tmp_path / "a.npy", values)
    rtol, atol = {"f2": (4e-3, 0.05), "f4": (2e-5, 1e-4)}.get(dtype, (1e-12, 1e-9))
    with ww.open(tmp_path / "a.npy", device="cpu") as a:
        for reduction, axis in itertools.product(REDUCTIONS, (None, 0, -1, (0, 2))):
            if isinstance(axis, tuple) and reduction in (np.argmin, np.argmax):
                continue
            for options in ({}, {"keepdims": True}, *([{"ddof": 1}] if reduction in (np.std, np.var) else [])):
                expected, result = (reduction(items, axis=axis, **options) for items in (values, a))
                case = f"{reduction} {axis} {options}"
                assert (np.shape(result), result.dtype) == (np.shape(expected), expected.dtype), case
                np.testing.assert_allclose(result, expected, rtol=rtol, atol=atol, err_msg=case)


def test_reductions_have_the_forms_of_numpy(array: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions, "BLOCK_BYTES", 400)
    values, out = np.asarray(array), np.zeros(10)
    assert array.sum() == array.sum(None, np.float64) == np.sum(array) == values.sum() and array.max(0)[3] == 9993
    assert array.sum(0, None, out) is out and np.add.reduce(array)[0] == out[0] == values[:, 0].sum()
    assert np.amax(array) == np.maximum.reduce(array, axis=None) == 9999 and array.sum(dtype="f4").dtype == np.float32
    with pytest.raises(TypeError, match=r"np\.asarray\(a\)\.sum\(where=\.\.\.\)"):
        array.sum(where=values > 3)
    with pytest.raises(np.exceptions.AxisError):
        array.sum(axis=2)


@pytest.mark.parametrize("shape", [(1 << 22,), (1, 1 << 22), (1 << 21, 2)])
@pytest.mark.parametrize("name", ["sum", "std", "argmax"])
def test_reductions_take_little_memory(
    name: str, shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reductions, "BLOCK_BYTES", 1 << 19)
    with ww.create(tmp_path / "a.npy", shape, np.float64, device="cpu") as a:
        tracemalloc.start()
        try:
            assert getattr(a, name)() == 0
            assert tracemalloc.get_traced_memory()[1] < 8 << 19  # of 32 MiB
        finally:
            tracemalloc.stop()


def test_arrays_are_equal_to_themselves_alone(array: Any) -> None:
    assert array == array and not array != array and array != None and array in [array]  # noqa: E711


@ww.kernel
def first(a: Any, out: Any) -> None:
    out[gpu.grid(1)] = a[0, 0]


def test_statistics_read_like_a_sentence(array: Any) -> None:
    before = array.stats
    first[1](array, np.zeros(1))
    assert repr(array.stats - before) == "<Statistics: 1 misses, 1 read commands, 4.0 KiB read>"
    assert repr(before - before) == "<Statistics: nothing yet>"


@ww.kernel
def total(a: Any, out: Any) -> None:
    i = gpu.grid(1)
    gpu.atomic_add(out, 0, a[i])


@pytest.mark.parametrize(
    ("tier", "device"),
    [("mapped", "cpu"), *((tier, device) for tier in TIERS[1:] for device in ("cpu", "interp"))],
)
def test_statistics_of_a_scan_say_what_is_counted(tier: str, device: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones(100))
    with ww.open(tmp_path / "a.npy", device=device, tier=tier) as a:
        total[a.size](a, np.zeros(1))
        if tier in ("mapped", "host", "device"):
            text = f'reads by kernels are not counted in tier "{tier}"'
            assert text in str(a.stats) and text in str(a.stats - a.stats) and text in a.stats.as_dict()["uncounted"]
        else:
            assert "misses" in str(a.stats) and not a.stats.uncounted


@pytest.mark.parametrize("tier", ["mapped", "storage"])
def test_reads_of_the_host_past_the_cache_are_counted(tier: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones((100, 3)))
    with ww.open(tmp_path / "a.npy", device="cpu", tier=tier) as a:
        before = a.stats
        np.asarray(a), a[3], a[7, 1], a[10:20].sum()
        since = a.stats - before
        assert (since.host_reads, since.host_bytes) == (4, 100 * 24 + 24 + 8 + 240)
        assert str(a.stats).startswith("4 reads by the host past the cache, 2.6 KiB read by the host")


@pytest.mark.parametrize("shape", [np.arange(10.0), np.arange(3)])
def test_create_takes_no_array_for_a_shape(tmp_path: Path, shape: Any) -> None:
    with pytest.raises(errors.ArgumentError, match=r"np\.save"):
        ww.create(tmp_path / "new.npy", shape)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shape", [2.5, (2.5, 3), "12", (-1,), True])
def test_a_shape_is_integers(tmp_path: Path, shape: Any) -> None:
    with pytest.raises(errors.ArgumentError, match="extent"):
        ww.create(tmp_path / "new.npy", shape)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shape", [(-2, -3), (-1, -1), (10, 2.0), (-1, 7)])
def test_reshape_refuses_what_cannot_be(array: Any, shape: tuple[Any, ...]) -> None:
    with pytest.raises(errors.ArgumentError):
        array.reshape(*shape)


@pytest.mark.parametrize(
    "options",
    [
        {"queues": 2.5},
        {"queues": 0},
        {"queues": True},
        {"depth": 0},
        {"depth": 8.0},
        {"threads": 0},
        {"threads": "2"},
        {"merge": 2.0},
        {"timeout": float("inf")},
        {"timeout": float("nan")},
        {"timeout": 0},
        {"timeout": "3"},
        {"page_size": 4096.0},
        {"page_size": "3KiB"},
        {"cache": 65536.5},
        {"offset": 1.5, "dtype": "u1"},
    ],
    ids=str,
)
def test_options_that_cannot_be_are_named(tmp_path: Path, options: dict[str, Any]) -> None:
    np.save(tmp_path / "a.npy", np.arange(100))
    with pytest.raises(errors.ArgumentError, match=next(iter(options))):
        ww.open(tmp_path / "a.npy", device="cpu", **options)


def test_a_shared_cache_takes_the_page_size_it_has(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(100))
    with ww.Cache("64KiB", page_size="8KiB", device="cpu") as cache:
        ww.open(tmp_path / "a.npy", cache=cache, page_size="8KiB").close()
        with pytest.raises(errors.ArgumentError, match="belongs to the shared Cache"):
            ww.open(tmp_path / "a.npy", cache=cache, page_size="4KiB")


@pytest.mark.parametrize("path", [None, 3, np.ones(3)], ids=["None", "3", "array"])
def test_open_says_what_is_no_path(path: Any) -> None:
    with pytest.raises(errors.ArgumentError, match="is not a path"):
        ww.open(path)


class Series:
    """Stand-in for a pandas Series: an object that NumPy can convert."""

    dtype = np.dtype(np.float64)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.zeros(3)


@ww.kernel
def double(x, y):
    i = gpu.grid(1)
    y[i] = 2 * x[i]


@pytest.mark.parametrize("value", [Series(), range(3)], ids=["Series", "range"])
def test_a_kernel_says_how_a_container_becomes_an_array(value: Any) -> None:
    with pytest.raises(errors.ArgumentError, match=r"argument 'x' of kernel 'double' is a .*numpy\.array\(\)"):
        double[3](value, np.zeros(3))
