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
from tests.harness.until import HANG_SECONDS

import warpwell as ww
from warpwell import gpu
from warpwell.scheduler import Scheduler
from warpwell.turns import gpu_work, operate

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
        assert last.task.memory >= 4 * SIZE == last.task.there
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
    """A folder for turns: one for all, since a process keeps its boards; not on a disk, of which a GPU pins nothing."""
    folder = tempfile.mkdtemp(dir="/dev/shm")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("WARPWELL_TURNS", folder)
        operate.limit(hold=3600.0)
        yield
    shutil.rmtree(folder)


def test_turns_meet_by_the_name_of_the_gpu(turns: None) -> None:
    from numba import cuda

    with ww.turn("before"):  # before this thread has a context, perhaps
        pass
    x = cuda.to_device(np.ones(SIZE))
    assert gpu_work.current_context()
    with ww.turn("here") as turn:
        double[SIZE](x)
        turn.pause()
        with ww.turn("inner", device=0):
            double[SIZE](x)
        code = "import warpwell as ww, time\nwith ww.turn('other', priority=1):\n    print('inside', flush=True)\n"
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
            until = time.monotonic() + 60
            while not any(row["state"] == "waits" for row in operate.status()):
                assert time.monotonic() < until
                time.sleep(0.01)
            assert len({row["device"] for row in operate.status()}) == 1
            turn.pause()
            assert process.stdout is not None and process.stdout.readline() == "inside\n"
    assert (x.copy_to_host() == 4).all()


@pytest.mark.parametrize("graph", [False, True])
def test_work_waits_at_gates_while_another_program_has_the_gpu(
    graph: bool, turns: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    from warpwell.turns import ahead

    # This thread ends the other program: on a slow host, it must not wait for the GPU before that.
    monkeypatch.setattr(ahead, "HOST", HANG_SECONDS)
    x = torch.zeros(SIZE, device="cuda")
    # The driver loads a kernel at its first launch, and waits for all streams to do so: not behind a gate.
    x.add_(1)
    x.zero_()
    stream = torch.cuda.Stream() if graph else torch.cuda.current_stream()
    captured = torch.cuda.CUDAGraph()
    if graph:
        with ww.turn("here", ahead=True, stream=stream) as turn, torch.cuda.graph(captured, stream=stream):
            x.add_(1)
            turn.pause()
            x.add_(1)
    code = (
        "import sys, warpwell as ww\n"
        "print('begins', flush=True)\n"
        "with ww.turn('other', priority=1, device=0):\n"
        "    print('inside', flush=True)\n"
        "    sys.stdin.readline()\n"
    )
    turns = 0

    def step() -> None:
        with ww.turn("here", ahead=True, stream=stream) as turn, torch.cuda.stream(stream):
            if graph:
                captured.replay()
                return
            x.add_(1)
            time.sleep(2 * ahead.CLOSE)
            turn.pause()
            x.add_(1)

    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None and process.stdin is not None and process.stdout.readline() == "begins\n"
        # The hold limit is an hour, so only the pauses of this program can let the other one in.
        until = time.monotonic() + HANG_SECONDS
        while not any(row["tenant"] == "other" and row["state"] == "inside" for row in operate.status()):
            assert time.monotonic() < until
            step()
            turns += 1
        step()
        turns += 1
        done = torch.cuda.Event()
        done.record(stream)
        time.sleep(0.1)
        assert not done.query()  # it waits at a gate
        process.stdin.write("\n")
        process.stdin.flush()
        stream.synchronize()
    assert bool((x == 2 * turns).all())


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
        x.mul_(3)  # it is not there yet, and is waited for
        scheduler.submit(double[SIZE], Alone()).result(60)
        assert bool((x == 6).all())
        assert scheduler.submit(double[SIZE], Alone()).task.there == 4 * SIZE
