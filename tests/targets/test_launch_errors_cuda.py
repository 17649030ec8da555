"""Errors and `failed` belong to a launch on a GPU, too: in threads, and in streams."""

import threading
import warnings
from pathlib import Path

import numpy as np
import pytest

import warpwell as ww
from warpwell import errors, gpu
from warpwell.targets import Kernel
from warpwell.targets.compiler.run_cuda import ptx, reads_launch_flag
from warpwell.targets.primitives import backoff, clock_ns

SUM = 4096 * 4095 // 2
NS = 300_000_000


@ww.kernel
def beyond(a, distance, ns, out):
    """Fail, and stay for a time."""
    i = gpu.grid(1)
    since = clock_ns()
    out[i] = a[a.size + distance]
    while clock_ns() - since < ns:
        backoff(20)


@ww.kernel
def total(a, ns, out):
    """Add all items up, unless the launch failed, and stay for a time."""
    i = gpu.grid(1)
    since = clock_ns()
    for k in range(a.size):
        if gpu.failed():
            return
        out[i] += a[k]
    while clock_ns() - since < ns:
        if gpu.failed():
            out[i] = -1
            return


@pytest.fixture
def array(tmp_path: Path) -> ww.Array:
    np.save(tmp_path / "a.npy", np.arange(4096))
    with ww.open(tmp_path / "a.npy", device="cuda", cache=8192) as a:
        yield a


@pytest.mark.ptx
def test_a_kernel_that_asks_is_given_its_own_flag_and_others_nothing() -> None:
    @ww.kernel
    def asks(x):
        if not gpu.failed():
            x[gpu.grid(1)] = 1

    @ww.kernel
    def asks_not(x):
        x[gpu.grid(1)] = 1

    @gpu.function
    def inner():
        return gpu.failed()

    @ww.kernel
    def asks_below(x):
        if not inner():
            x[gpu.grid(1)] = 1

    def text(kernel: Kernel) -> str:
        return ptx(kernel, (np.zeros(1),))

    assert [reads_launch_flag(k) for k in (asks, asks_not, asks_below)] == [True, False, True]
    for kernel in (asks, asks_below):
        assert "warpwell_launch_flag" in text(kernel) and f"{0x5A5A_0000_0000}" not in text(kernel)
    assert "warpwell_launch_flag" not in text(asks_not)


@pytest.mark.parametrize("streams", [False, True])
def test_three_launches_side_by_side_raise_their_own(array: ww.Array, streams: bool) -> None:
    from numba import cuda

    out: list[object] = [None] * 3
    with pytest.raises(errors.IndexRangeError):
        beyond[1](array, 1, 0, np.zeros(1, np.int64))  # compiled from here on
    total[1](array, 0, np.zeros(1, np.int64))

    def work(k: int) -> None:
        sums = np.zeros(2, np.int64)
        stream = (cuda.stream(),) if streams else ()
        try:
            if k < 2:
                beyond[(1, *stream)](array, k, NS, sums)
            else:
                total[(2, *stream)](array, NS, sums)
                out[k] = sums.tolist()
        except errors.IndexRangeError as error:
            out[k] = error.index

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert out == [4096, 4097, [SUM, SUM]]


def test_launches_that_go_on_in_streams_are_told_one_by_one(array: ww.Array) -> None:
    from numba import cuda

    streams = [cuda.stream() for _ in range(3)]
    outputs = [cuda.to_device(np.zeros(2, np.int64)) for _ in range(3)]
    for k in range(2):
        beyond[1, streams[k]](array, k, NS, outputs[k])
    total[2, streams[2]](array, NS, outputs[2])
    for stream in streams:
        stream.synchronize()
    assert outputs[2].copy_to_host().tolist() == [SUM, SUM]
    indices = []
    for _ in range(2):
        with pytest.raises(errors.IndexRangeError) as caught:
            array[3]
        indices.append(caught.value.index)
    assert sorted(indices) == [4096, 4097] and array[3] == 3


def test_small_grids_and_numpy_arguments_are_no_reason_to_warn(array: ww.Array) -> None:
    frozen = np.arange(4)
    frozen.flags.writeable = False

    @ww.kernel
    def copy(x, y):
        i = gpu.grid(1)
        y[i] = x[i]

    @ww.kernel
    def shift(x, y):
        i = gpu.grid(1)
        y[i] = x[i] + 1

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = np.zeros(4, np.int64)
        copy[4](frozen, y)
        assert y.tolist() == [0, 1, 2, 3]
        shift[4](y, y)
        assert y.tolist() == [1, 2, 3, 4]
        array[:4].read()
