"""Work and arrays of other libraries in a scheduler on a GPU, and turns around it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.harness.arrays.kernels import occupy

import warpwell as ww
from warpwell import gpu
from warpwell.libcuda import current_context
from warpwell.programs import program_status, set_limits
from warpwell.scheduler import Scheduler

SIZE = 1 << 16


@ww.kernel
def double(x):
    i = gpu.grid(1)
    x[i] = 2 * x[i]


def test_functions_get_a_stream_of_the_driver() -> None:
    from numba import cuda

    x = cuda.to_device(np.ones(SIZE, np.float32))

    @cuda.jit
    def add(array):
        i = cuda.grid(1)
        if i < array.size:
            array[i] += 1

    def enqueue(stream: int, array: Any) -> None:
        add[SIZE // 256, 256, cuda.external_stream(stream)](array)

    with Scheduler("cuda") as scheduler:
        handles = scheduler.submit_many([(double[SIZE], x), (enqueue, x), (double[SIZE], x), (enqueue, x)]).handles
        for handle in handles:
            handle.result(60)
        for _ in range(6):
            last = scheduler.submit(enqueue, x)
            last.result(60)
        assert last.task.memory >= 4 * SIZE == last.task.resident_bytes
        assert last.task.profile.source == "measured" and 0 < (last.task.profile.seconds or 0) < 0.1
        failing = scheduler.submit(lambda stream: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            failing.result(60)
        scheduler.submit(double[SIZE], x).result(60)
    assert (x.copy_to_host() == 26).all()


def test_graphs_and_tensors_of_pytorch() -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(SIZE, device="cuda")
    weights = torch.ones(4, device="cuda", requires_grad=True)
    graph = torch.cuda.CUDAGraph()
    x.mul_(3)  # loads the kernel
    with torch.cuda.graph(graph):
        x.mul_(3)

    def add(stream: int, tensor: Any, addend: Any) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            tensor.add_(addend.detach()[0])

    torch.cuda.synchronize()
    with Scheduler("cuda") as scheduler:
        pointer = x.data_ptr()
        launches = [(double[SIZE], x), (graph,), (add, x, weights), (double[SIZE], x)]
        for handle in scheduler.submit_many(launches).handles:
            handle.result(60)
    assert x.data_ptr() == pointer and (x == (3 * 2 * 3 + 1) * 2).all()


def test_graphs_of_cupy_and_the_driver() -> None:
    cupy = pytest.importorskip("cupy")
    x = cupy.ones(SIZE, dtype=cupy.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x *= 2
        stream.synchronize()
        stream.begin_capture()
        x *= 2
        graph = stream.end_capture()
    with Scheduler("cuda") as scheduler:
        for handle in scheduler.submit_many([(graph,), (double[SIZE], x), (graph,)]).handles:
            handle.result(60)
    assert (x == 16).all()


@pytest.fixture(scope="module")
def turns() -> Iterator[None]:
    """A folder for turns, for all tests, because a process keeps its boards."""
    folder = tempfile.mkdtemp(dir="/dev/shm")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("WARPWELL_TURNS", folder)
        set_limits({"here": {"hold": 3600.0}})
        yield
    shutil.rmtree(folder)


def test_turns_meet_by_the_name_of_the_gpu(turns: None) -> None:
    from numba import cuda

    with ww.turn("before"):  # the thread may not have a context yet
        pass
    x = cuda.to_device(np.ones(SIZE))
    assert current_context()
    with ww.turn("here") as turn:
        double[SIZE](x)
        turn.pause()
        with ww.turn("inner", device=0):
            double[SIZE](x)
        code = "import warpwell as ww, time\nwith ww.turn('other', priority=1):\n    print('inside', flush=True)\n"
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
            until = time.monotonic() + 60
            while not any(row["state"] == "waiting" for row in program_status()):
                assert time.monotonic() < until
                time.sleep(0.01)
            assert len({row["device"] for row in program_status()}) == 1
            turn.pause()
            assert process.stdout is not None and process.stdout.readline() == "inside\n"
    assert (x.copy_to_host() == 4).all()


def test_arrays_with_dlpack_alone() -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(SIZE, device="cuda")

    class Alone:
        def __dlpack__(self, stream: Any = None) -> Any:
            return x.__dlpack__(stream=stream)

        def __dlpack_device__(self) -> Any:
            return x.__dlpack_device__()

    with Scheduler("cuda") as scheduler:
        occupy[1, torch.cuda.default_stream()](10_000_000)
        x.mul_(3)  # x * 3 is not computed yet: the scheduler waits for it
        scheduler.submit(double[SIZE], Alone()).result(60)
        assert bool((x == 6).all())
        assert scheduler.submit(double[SIZE], Alone()).task.resident_bytes == 4 * SIZE
