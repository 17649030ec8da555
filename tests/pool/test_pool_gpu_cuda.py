"""A GPU as a device of a pool, its agent in this process: what `CudaRuntime` does that `Runtime` cannot show."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import numpy as np
import pytest
from tests.harness.pool_programs import run

import warpwell as ww
from warpwell import errors
from warpwell.pool.devices import Devices


@ww.kernel
def scale(x, y, factor):
    i = ww.gpu.grid(1)
    y[i] = x[i] * factor


@ww.kernel
def burn(x, rounds):
    """Take a while: some 30 ms for a million rounds."""
    i = ww.gpu.grid(1)
    v = x[i]
    for _ in range(rounds):
        v = v * 6364136223846793005 + 1442695040888963407
    x[i] = v


SAXPY = ww.CudaSource(
    """
#include <warpwell.cuh>
extern "C" __global__ void saxpy(const float *x, float *y, float a, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        y[i] += a * x[i];
}
""",
    "saxpy",
    {"x": "const float32*", "y": "float32*", "a": "float32", "n": "int32"},
)

LONG = 20_000_000
"""Rounds that take half a second or more."""


@pytest.fixture(scope="module")
def devices() -> Iterator[Devices]:
    with Devices(targets=["cuda", "cpu", "cuda"]) as found:
        yield found


def test_it_says_what_it_is(devices: Devices) -> None:
    gpu = devices[0]
    assert gpu.target == "cuda" and gpu.compute_capability is not None
    free, total = gpu.memory_info()
    assert 0 < free <= total == gpu.memory


@pytest.mark.parametrize("items", [0, 1, 3, 8191, 8193, 100_001, 5_000_001])
def test_copies_of_all_sizes(devices: Devices, items: int) -> None:
    a = np.random.default_rng(items).random(items)
    x = devices[0].to_device(a)
    remote = devices[1].to_device(x)  # to the CPU's memory, by way of no application
    again = devices[2].to_device(remote)
    returned = devices[0].to_device(again)
    assert np.array_equal(returned.copy_to_host(), a)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("u1", 7), ("<u2", 513), ("<f4", 1.5), ("<f8", -2.25), ("<i8", 1 << 40), ("<c16", 1 + 2j), ("S3", b"abc")],
)
def test_filling(devices: Devices, dtype: str, value: object) -> None:
    x = devices[0].full(1001, value, dtype)
    assert (x.copy_to_host() == np.full(1001, value, dtype)).all()
    x[3:5].fill(x.dtype.type())
    assert np.flatnonzero(x.copy_to_host() == x.dtype.type()).tolist() == [3, 4]


def test_kernels_of_both_kinds(devices: Devices) -> None:
    a = np.arange(1000, dtype=np.float32)
    x = devices[0].to_device(a)
    y = ww.empty_like(x)
    scale[1000](x, y, np.float32(3))
    SAXPY[4, 256](x, y, 2.0, 1000)
    stream = devices[0].stream()
    stream.wait(devices[0].default_stream)
    scale[1000, stream](y, x, np.float32(2))
    assert np.array_equal(x.copy_to_host(stream=stream), 10 * a)


def test_fields_of_records(devices: Devices) -> None:
    kind = np.dtype([("a", "<i4"), ("b", "<f4")], align=True)
    records = np.zeros(100, kind)
    records["a"] = np.arange(100)

    @ww.kernel
    def square(r):
        i = ww.gpu.grid(1)
        r[i].b = r[i].a * r[i].a

    x = devices[0].to_device(records)
    square[100](x)
    assert np.array_equal(x.copy_to_host()["b"], np.arange(100.0) ** 2)


def test_calls_do_not_wait_and_copies_to_the_host_do(devices: Devices) -> None:
    gpu = devices[0]
    x = gpu.zeros(4, np.int64)
    burn[4](x, 10)
    gpu.synchronize(60)
    start = time.monotonic()
    burn[4](x, LONG)
    event = gpu.default_stream.record()
    issued = time.monotonic() - start
    assert not event.done
    found = x.copy_to_host()
    assert event.done
    assert issued < 0.5 * (time.monotonic() - start)
    assert len(set(found.tolist())) == 1


def test_streams_overlap(devices: Devices) -> None:
    gpu = devices[0]
    slow = gpu.stream()
    x = gpu.zeros(4, np.int64, stream=slow)
    burn[4, slow](x, 1)
    warm = gpu.to_device(np.arange(100_000.0))  # compiled, and the staging memory made, which waits for the GPU
    scale[100_000](warm, ww.empty_like(warm), 1.0)
    gpu.synchronize(60)
    burn[4, slow](x, LONG)
    event = slow.record()
    start = time.monotonic()
    y = gpu.to_device(np.arange(100_000.0))
    z = ww.empty_like(y)
    scale[100_000](y, z, 1.0)
    assert np.array_equal(z.copy_to_host(), np.arange(100_000.0))
    del y, z  # freeing does not wait for the other stream either
    assert not event.done, time.monotonic() - start
    event.synchronize(60)


def test_an_event_of_a_gpu_holds_up_another_device(devices: Devices) -> None:
    gpu, cpu = devices[0], devices[1]
    x = gpu.zeros(4, np.int64)
    burn[4](x, LONG)
    cpu.default_stream.wait(gpu.default_stream.record())
    event = cpu.default_stream.record()
    assert not event.done
    event.synchronize(60)


def test_elapsed_time_is_the_gpus(devices: Devices) -> None:
    stream = devices[0].default_stream
    x = devices[0].zeros(4, np.int64)
    burn[4](x, 10)
    first = stream.record()
    burn[4](x, LONG)
    last = stream.record()
    assert 0.01 < last.elapsed(first) < 60


def test_memory_that_is_freed_in_use_stays_until_then(devices: Devices) -> None:
    gpu = devices[0]
    for k in range(50):
        x = gpu.full(1 << 20, k, np.int64)
        y = ww.empty_like(x)
        scale[1 << 20](x, y, 2)
        x.free()
        z = gpu.full(1 << 20, -1, np.int64, stream=gpu.stream())
        assert (y.copy_to_host()[::4099] == 2 * k).all()
        del z


def test_no_room_is_told_and_room_comes_back(devices: Devices) -> None:
    gpu = devices[0]
    gc.collect()
    gpu.synchronize(60)
    free, total = gpu.memory_info()
    with pytest.raises(errors.RemoteError, match="has no memory for"):
        gpu.empty(total + 1, np.uint8)
        gpu.synchronize(60)
    for _ in range(4):  # each takes more than half of the memory, so the previous array must be freed
        x = gpu.empty(int(0.6 * free), np.uint8)
        x[:10].fill(1)
        gpu.synchronize(60)
        x.free()


def test_functions_get_arrays_of_the_gpu(devices: Devices) -> None:
    x = devices[0].to_device(np.arange(10.0))
    kind, total = devices[0].call(lambda a: (type(a).__module__.partition(".")[0], a), x).get(60)
    assert kind in ("cupy", "numba")
    assert isinstance(total, np.ndarray) and total.tolist() == list(range(10))


def test_pinned_arrays(devices: Devices) -> None:
    a = ww.pinned_empty(1 << 22, np.float32)
    a[:] = np.arange(1 << 22)
    x = devices[0].to_device(a)
    devices[0].synchronize(60)
    out = ww.pinned_empty(1 << 22, np.float32)
    x.copy_to_host(out)
    assert np.array_equal(a, out)


@pytest.mark.parametrize("threads", [1, 4])
def test_random_programs(devices: Devices, threads: int) -> None:
    run(devices, 30, seed=11 + threads, threads=threads)


def test_numpy_arrays_go_there_and_back(devices: Devices) -> None:
    a, b = np.arange(20.0), np.zeros(40)
    with devices[0]:
        scale[20](a, b[::2], 2.0)
    assert np.array_equal(b[::2], 2 * a) and not b[1::2].any()


@pytest.mark.timing
def test_launches_a_second(devices: Devices) -> None:
    x = devices[0].zeros(32)
    y = ww.empty_like(x)
    scale[32](x, y, 2.0)
    devices[0].synchronize(60)
    start = time.perf_counter()
    for _ in range(2000):
        scale[32](x, y, 2.0)
    devices[0].synchronize(60)
    rate = 2000 / (time.perf_counter() - start)
    print(f"{rate:.0f} launches a second")
    assert rate > 1000
