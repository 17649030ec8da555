"""Devices of a pool whose agents are threads of this process."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import warpwell as ww
from warpwell import errors
from warpwell.pool.devices import Devices


@ww.device
def twice(v):
    return 2 * v


@ww.kernel
def scale(x, y, factor):
    i = ww.grid(1)
    y[i] = twice(x[i]) * factor


@pytest.fixture(scope="module")
def devices() -> Iterator[Devices]:
    with Devices(targets=["cpu", "cpu", "cpu"]) as found:
        yield found


def test_a_kernel_runs_where_the_block_says(devices: Devices) -> None:
    a = np.arange(1000.0)
    with devices[1]:
        x = ww.to_device(a)
        y = ww.empty_like(x)
        scale[x.size](x, y, 2.0)
        assert y.device is devices[1]
        out = y.copy_to_host()
    assert np.array_equal(out, 4 * a)


def test_a_kernel_runs_where_its_buffers_are(devices: Devices) -> None:
    a = np.arange(50, dtype=np.float32)
    x = devices[2].to_device(a)
    y = ww.empty_like(x)
    with devices[0]:
        scale[50](x, y, np.float32(3))
    assert np.array_equal(np.asarray(y), 6 * a)


def test_numpy_arrays_go_there_and_back(devices: Devices) -> None:
    a, b = np.arange(20.0), np.zeros(40)
    with devices[0]:
        scale[20](a, b[::2], 1.0)
    assert np.array_equal(b[::2], 2 * a) and not b[1::2].any()


def test_a_buffer_of_another_device_is_refused(devices: Devices) -> None:
    x, y = devices[0].zeros(4), devices[1].zeros(4)
    with pytest.raises(errors.ArgumentError, match="of device 1, and the call is for device 0: copy it"):
        scale[4](x, y, 1.0)
