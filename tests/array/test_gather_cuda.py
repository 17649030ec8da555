"""`ww.gather`, `ww.rows` and data sets on a GPU: the tests for all devices, streams, and arrays of other libraries."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.arrays.gathers import TIERS, GatherConformance
from tests.harness.arrays.kernels import occupy

import warpwell as ww
from lab.media import Latency
from warpwell import errors
from warpwell.storage import RamMedium


class TestGathers(GatherConformance):
    DEVICE = "cuda"

    def near(self, host: Any) -> Any:
        from numba import cuda

        return cuda.to_device(host)


@pytest.fixture
def model() -> Any:
    return np.random.default_rng(0).integers(-9, 9, (2000, 64)).astype("f4")


@pytest.fixture(params=["device", "host", "storage", "frames", "ram"])
def a(request: pytest.FixtureRequest, tmp_path: Path, model: Any) -> Any:
    if request.param == "ram":
        medium = RamMedium(model, writable=False)
        opened = ww.open(medium, device="cuda", dtype="f4", shape=model.shape, cache="64KiB", page_size=512)
    else:
        np.save(tmp_path / "a.npy", model)
        opened = ww.open(tmp_path / "a.npy", device="cuda", **TIERS[request.param])
    with opened:
        yield opened


def test_tensors_of_pytorch(a: Any, model: Any) -> None:
    torch = pytest.importorskip("torch")
    rows = np.random.default_rng(1).integers(0, 2000, (30, 20))
    for kind in (torch.int32, torch.int64):
        device_rows = torch.as_tensor(rows, device="cuda").to(kind)
        out = torch.zeros((30, 20, 64), device="cuda")
        assert ww.gather(a, device_rows, out=out).result(60) is out
        assert (out.cpu().numpy() == model[rows]).all()
    assert (torch.from_dlpack(ww.gather(a, rows).result(60)).cpu().numpy() == model[rows]).all()
    with pytest.raises(errors.IndexRangeError, match="row 2000 at position 1"):
        ww.gather(a, torch.tensor([0, 2000], device="cuda")).result(60)
    with pytest.raises(errors.DTypeError):
        ww.gather(a, rows, out=torch.zeros((30, 20, 64), device="cuda", dtype=torch.float64))


def test_arrays_of_cupy(a: Any, model: Any) -> None:
    cupy = pytest.importorskip("cupy")
    rows = np.random.default_rng(2).integers(0, 2000, 300)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        device_rows, out = cupy.asarray(rows), cupy.zeros((300, 64), "f4")
    ww.gather(a, device_rows, out=out, stream=stream).result(60)
    assert (cupy.asnumpy(out) == model[rows]).all()
    assert (cupy.asnumpy(cupy.from_dlpack(ww.gather(a, rows).result(60))) == model[rows]).all()


@pytest.mark.parametrize("own", [False, True], ids=["default stream", "own stream"])
def test_work_is_ordered_by_the_stream(a: Any, model: Any, own: bool) -> None:
    torch = pytest.importorskip("torch")
    stream = torch.cuda.Stream() if own else torch.cuda.default_stream()
    rows = np.random.default_rng(3).integers(0, 2000, 5000)
    expected = torch.as_tensor(rows, device="cuda")
    torch.cuda.synchronize()
    ww.gather(a, rows).result(60)  # compiles the kernel
    occupy[1](0)
    for _ in range(3):
        with torch.cuda.stream(stream):
            device_rows, out = (
                torch.zeros(5000, dtype=torch.int64, device="cuda"),
                torch.zeros((5000, 64), device="cuda"),
            )
            occupy[1, stream](100_000_000)
            device_rows.copy_(expected)  # `occupy` delays this copy: the row numbers have not arrived
            out.fill_(7)
            start = time.perf_counter()
            gather = ww.gather(a, device_rows, out=out, stream=stream if own else None)
            took = time.perf_counter() - start
            if a.tier in ("device", "host"):
                copy = out.clone()  # follows the gather in the stream, without result()
            gather.result(60)
        assert took < 0.05, "the caller does not wait for the stream"
        torch.cuda.synchronize()
        assert (out.cpu().numpy() == model[rows]).all()
        if a.tier in ("device", "host"):
            assert (copy.cpu().numpy() == model[rows]).all()


def test_a_list_may_be_changed_as_soon_as_the_gather_began(a: Any, model: Any) -> None:
    rows = np.arange(2000)[::-1].copy()
    gathers = []
    for _ in range(4):
        gathers.append(ww.gather(a, rows))
        rows[:] = 0
        rows[:] = np.arange(2000)[::-1]
        rows[::2] = rows[0]
        gathers.append(ww.gather(a, rows))
        rows[:] = np.arange(2000)[::-1]
    mixed = np.arange(2000)[::-1].copy()
    mixed[::2] = mixed[0]
    for k, gather in enumerate(gathers):
        assert (gather.result(60).copy_to_host() == model[mixed if k % 2 else np.arange(2000)[::-1]]).all()


def test_items_of_bfloat16(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    bits = np.random.default_rng(5).integers(0, 30000, (50, 8)).astype("u2")
    bits.tofile(tmp_path / "b.bin")
    for tier in ("device", "storage"):
        with ww.open(tmp_path / "b.bin", dtype="bfloat16", shape=(50, 8), device="cuda", tier=tier, cache="1MiB") as b:
            out = torch.zeros((3, 8), dtype=torch.bfloat16, device="cuda")
            ww.gather(b, [49, 0, 49], out=out).result(60)
            assert (out.view(torch.int16).cpu().numpy().view("u2") == bits[[49, 0, 49]]).all()
            got = torch.from_dlpack(ww.gather(b, [7]).result(60))
            assert got.dtype == torch.bfloat16 and (got.view(torch.int16).cpu().numpy().view("u2") == bits[[7]]).all()


def test_a_data_set_gives_tensors_of_the_gpu(tmp_path: Path, model: Any) -> None:
    torch = pytest.importorskip("torch")
    from warpwell.train import Dataset

    np.save(tmp_path / "x.npy", model)
    np.save(tmp_path / "y.npy", np.arange(2000))
    fields = {"x": (tmp_path / "x.npy", {"device": "cuda", "cache": "1MiB"}), "y": tmp_path / "y.npy"}
    with Dataset(fields) as data:
        loader = torch.utils.data.DataLoader(data, batch_size=100, shuffle=True, collate_fn=Dataset.collate)
        labels = []
        for batch in loader:
            assert batch["x"].is_cuda and not batch["y"].is_cuda
            assert (batch["x"].cpu().numpy() == model[batch["y"].numpy()]).all()
            labels += batch["y"].tolist()
        assert sorted(labels) == list(range(2000))
        assert (data[7]["x"] == model[7]).all()


def test_a_gather_of_a_slow_medium_goes_on_beside_and_is_cancelled(model: Any) -> None:
    medium = Latency(RamMedium(model, writable=False), latency_us=20_000)
    with ww.open(medium, device="cuda", dtype="f4", shape=model.shape, cache="16KiB", page_size=512) as a:
        ww.gather(a, [0]).result(60)  # compiles the kernel
        start = time.perf_counter()
        gather = ww.gather(a, np.arange(2000))
        assert time.perf_counter() - start < 0.05 and not gather.done()
        assert (gather.result(60).copy_to_host() == model).all()
        gather = ww.gather(a, np.arange(2000))
        gather.cancel()
        with pytest.raises(errors.ClosedError):
            gather.result(60)
        assert (ww.gather(a, [3]).result(60).copy_to_host() == model[[3]]).all()
