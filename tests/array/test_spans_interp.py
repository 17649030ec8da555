"""Spans on `interp`, in both forms: by words in registers, and by buffers."""

from pathlib import Path

import numpy as np
import pytest
from tests.harness.arrays.spans import PAGE, by_thread, change, cuts, in_order, mixed

import warpwell as ww
from warpwell.array.spans import calls


@pytest.fixture(params=["words", "buffers"], autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "BUFFERED", {"interp"} if request.param == "buffers" else set())


@pytest.mark.parametrize("page_size", [PAGE, 8 * PAGE])
@pytest.mark.parametrize("kind", ["u1", "i8"])
def test_folds(tmp_path: Path, kind: str, page_size: int) -> None:
    data = np.random.default_rng(0).integers(0, 100, 700).astype(kind)
    np.save(tmp_path / "a.npy", data)
    lo, hi = cuts(700, 6)
    out, sums = np.zeros(6, np.int64), np.zeros((6, 3))
    with ww.open(tmp_path / "a.npy", device="interp", page_size=page_size, cache=2 * (page_size + 8)) as a:
        in_order[6](a, lo, hi, out)
        by_thread[6](a, lo, hi, sums)
    assert out.tolist() == [mixed(data[i:j]) for i, j in zip(lo, hi, strict=True)]
    assert sums[:, 0].tolist() == [data[i:j].sum(dtype=float) for i, j in zip(lo, hi, strict=True)]


@pytest.mark.parametrize("kind", ["i2", "f8"])
def test_stores(tmp_path: Path, kind: str) -> None:
    data = np.arange(300).astype(kind)
    np.save(tmp_path / "a.npy", data)
    lo, hi = cuts(300, 6)
    b, out = np.zeros(300), np.zeros(300)
    with ww.open(tmp_path / "a.npy", "r+", device="interp", page_size=PAGE, cache=2 * (PAGE + 8)) as a:
        change[6](a, b, out, lo, hi)
        assert np.array_equal(b, data + 2) and np.array_equal(out, data + 3) and np.array_equal(a[:], 3 * data)
