"""On a GPU: arrays that a device of a pool has opened, and tasks of a scheduler on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import warpwell as ww
from warpwell import errors, gpu
from warpwell.pool.devices import Devices
from warpwell.scheduler import Scheduler


@ww.kernel
def total(edges, out):
    i = gpu.grid(1)
    if i < edges.size:
        gpu.atomic_add(out, 0, edges[i])


@ww.kernel
def double(x):
    i = gpu.grid(1)
    if i < x.size:
        x[i] = 2 * x[i]


@ww.kernel
def beyond(array, out):
    out[0] = array[10_000_000 + gpu.grid(1)]


def test_a_gpu_reads_its_own_storage(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(100_000))
    with Devices(targets=["cuda"]) as devices:
        with devices[0].open(tmp_path / "a.npy", cache="256KiB") as array:
            out = devices[0].zeros(1, np.int64)
            total[array.size](array, out)
            assert out.copy_to_host()[0] == np.arange(100_000).sum()
            assert np.array_equal(array[10:20], np.arange(10, 20))
            beyond[1](array, out)
            with pytest.raises(errors.RemoteError, match="launch of 'beyond'"):
                devices[0].synchronize()
            total[array.size](array, out)
            devices[0].synchronize()


def test_tasks_on_a_gpu_and_the_cpu() -> None:
    with Devices(targets=["cuda", "cpu"]) as devices, Scheduler(devices=devices) as scheduler:
        arrays = [np.full(1000, k) for k in range(12)]
        handles = [scheduler.submit(double[1000], a) for a in arrays]
        remote = devices[0].to_device(np.arange(1000))
        on_gpu = scheduler.submit(double[1000], remote)
        for handle in [*handles, on_gpu]:
            handle.result(60)
        assert all((a == 2 * k).all() for k, a in enumerate(arrays))
        assert np.array_equal(remote.copy_to_host(), 2 * np.arange(1000))
