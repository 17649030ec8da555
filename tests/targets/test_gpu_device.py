"""The layer over the GPU's driver, with stand-ins for cuda.core, its driver and numba-cuda."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
import pytest
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from warpwell import errors
from warpwell.pool.agent.cuda_runtime import CudaRuntime
from warpwell.pool.agent.memory_pool import MemoryPool, PoolMemory
from warpwell.scheduler.executors.gpu import Gpu
from warpwell.targets.gpu import device
from warpwell.targets.gpu.device import GpuDevice
from warpwell.targets.gpu.prepared import Prepared
from warpwell.targets.launch_stream import GpuStream


class CUDAError(Exception):
    """Named as cuda.core's."""


class Stream:
    def __init__(self, priority: int, context: str) -> None:
        self.handle, self.priority, self.context = 100 + priority, priority, context
        self.is_closed, self.lost = False, False
        self.waited: list[Any] = []

    def record(self, event: Any = None, options: Any = None) -> Any:
        if self.lost:
            raise CUDAError("CUDA_ERROR_ILLEGAL_ADDRESS: ...")
        return SimpleNamespace(is_done=True, timing=options is not None)

    def wait(self, event: Any) -> None:
        self.waited.append(event)

    def close(self) -> None:
        self.is_closed = True


class Driver:
    """Notes calls; every one of them succeeds."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.CU_STREAM_LEGACY = 1
        self.CUresult = SimpleNamespace(CUDA_ERROR_OUT_OF_MEMORY=2)
        self.CUstreamWaitValue_flags = SimpleNamespace(CU_STREAM_WAIT_VALUE_GEQ=0)

    def cuCtxGetStreamPriorityRange(self) -> Any:
        return 0, 0, -5

    def cuMemGetInfo(self) -> Any:
        return 0, 1 << 30, 1 << 32

    def cuMemAllocFromPoolAsync(self, nbytes: int, pool: Any, stream: Any) -> Any:
        return (0, 4096) if nbytes < 1 << 20 else (2, None)

    def __getattr__(self, name: str) -> Any:
        assert name.startswith("cu")
        return lambda *arguments: (self.calls.append((name, *arguments)), (0,))[1]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    import cuda
    import cuda.bindings
    import numba.cuda

    found = Driver()
    names = (
        "multiprocessor_count",
        "max_registers_per_multiprocessor",
        "max_shared_memory_per_multiprocessor",
        "max_threads_per_multiprocessor",
        "clock_rate",
        "memory_clock_rate",
        "global_memory_bus_width",
    )
    stub = SimpleNamespace(
        name="stand-in",
        uuid="1-2",
        compute_capability=(9, 0),
        set_current=lambda: None,
        default_stream="default",
        properties=SimpleNamespace(**dict.fromkeys(names, 8)),
        create_stream=lambda options: Stream(options.priority, "whole"),
    )
    core = SimpleNamespace(
        Device=lambda ordinal=0: stub,
        Stream=SimpleNamespace(from_handle=lambda handle: f"stream {handle}"),
        **{name: SimpleNamespace for name in ("StreamOptions", "EventOptions")},
    )
    monkeypatch.setitem(sys.modules, "cuda.core", core)
    monkeypatch.setattr(cuda, "core", core, raising=False)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", found)
    monkeypatch.setattr(cuda.bindings, "driver", found, raising=False)
    monkeypatch.setattr(numba.cuda, "gpus", [contextlib.nullcontext()])
    monkeypatch.setattr(numba.cuda, "select_device", lambda ordinal: None)
    monkeypatch.setattr(device, "gpu_count", lambda: 1)
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    monkeypatch.setattr(device, "default_stream", functools.cache(device.default_stream.__wrapped__))
    return found


def test_a_gpu_that_is_not_there(driver: Driver) -> None:
    with pytest.raises(errors.DeviceNotFoundError, match="no GPU 1: 1 were found"):
        GpuDevice(1)


def test_streams_have_the_levels_that_a_gpu_has(driver: Driver) -> None:
    gpu = GpuDevice()
    assert [gpu.new_stream(p).priority for p in (-1, 0, 1, 8)] == [0, 0, -1, -5]
    assert gpu.uuid == "GPU-1-2" and gpu.memory_info() == (1 << 30, 1 << 32)
    stream = gpu.new_stream()
    assert gpu.done(gpu.mark(stream)) and gpu.mark(stream, timing=True).timing


def test_a_stream_waits_for_the_default_stream_and_another_one(driver: Driver) -> None:
    stream = GpuStream(0)
    stream.after_default(7)
    assert stream._stream.waited == ["stream 1", "stream 7"]


def test_a_lost_gpu_is_told_as_its_user_wants_it(driver: Driver) -> None:
    for failure in (errors.KernelError, errors.DeviceNotFoundError):
        gpu = GpuDevice(0, failure)
        stream = gpu.new_stream()
        stream.lost = True
        with pytest.raises(failure, match=r"ILLEGAL_ADDRESS.*all later calls fail"):
            gpu.mark(stream)


def test_a_lost_gpu_is_told_where_streams_are_made_and_launches_are_waited_for(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    core: Any = sys.modules["cuda.core"]

    def refuse(options: Any) -> None:
        raise CUDAError("CUDA_ERROR_ILLEGAL_ADDRESS: ...")

    gpu = GpuDevice(0, errors.KernelError)
    monkeypatch.setattr(core.Device(), "create_stream", refuse)
    with pytest.raises(errors.KernelError, match="ILLEGAL_ADDRESS"):
        gpu.new_stream()
    lost = Stream(0, "whole")
    lost.lost = True
    monkeypatch.setattr(core, "Stream", Stream)
    with pytest.raises(errors.KernelError, match="ILLEGAL_ADDRESS"):
        device.mark(lost)


def test_each_gpu_has_a_default_stream_of_its_own(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda.core has one object for all, which makes events in the context of the first GPU that it was used on."""
    core: Any = sys.modules["cuda.core"]

    class Legacy:
        """Behaves as cuda.core's streams do: the first use determines the context."""

        context: int | None = None

        @classmethod
        def from_handle(cls, handle: int) -> Legacy:
            assert handle == 1
            return cls()

        def record(self) -> int:
            self.context = now if self.context is None else self.context
            return self.context

    monkeypatch.setattr(core, "Stream", Legacy)
    shared = Legacy()
    monkeypatch.setattr(device, "current", lambda: (driver, SimpleNamespace(device_id=now, default_stream=shared)))
    for now in (0, 1, 0, 1):
        assert device.mark() == now


def test_no_gpu_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "gpu_count", lambda: 0)

    @ww.kernel
    def double(a: Any) -> None:
        a[ww.gpu.grid(1)] *= 2

    monkeypatch.setattr(device, "has_cuda", lambda: False)
    source = ww.CudaSource('extern "C" __global__ void f(float *x) { x[0] = 1; }', "f", {"x": "float32*"})
    for call in (
        GpuDevice,
        lambda: double[3](np.ones(3), device="cuda"),
        lambda: source[1, 32](np.ones(3, np.float32)),
    ):
        with pytest.raises(errors.DeviceNotFoundError, match=r"no GPU is usable here.*\[cuda\].* or choose device cpu"):
            call()


FORKED = """
    import os, sys
    import numpy as np
    import warpwell as ww
    from warpwell.targets.gpu import device, memory
    from numba import cuda

    @ww.kernel
    def double(a):
        a[ww.gpu.grid(1)] *= 2

    cuda.is_available = lambda: True
    assert device.has_cuda()
    child = os.fork()
    if not child:
        a = np.ones(3)
        for call in (
            ww.devices,
            device.GpuDevice,
            lambda: double[3](a),
            lambda: double[3].cut((a,)).begin(),
            lambda: ww.zeros(3),
        ):
            try:
                call()
            except ww.errors.ForkError as error:
                print("CUDA, which does not work in a forked child" in str(error), flush=True)
        double[3](a, device="cpu")
        print(a.sum(), len(ww.pinned_empty(5)), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_child_is_told_that_the_gpu_is_its_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA does not work in a child of a process that has initialised it; code without a GPU does."""
    monkeypatch.delenv("WARPWELL_DEVICE")
    program = tmp_path / "forked.py"
    program.write_text(textwrap.dedent(FORKED))
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [*["True"] * 5, "6.0 5"], done.stderr


def test_what_a_signal_raises_is_not_the_gpus() -> None:
    class Event:
        @property
        def is_done(self) -> bool:
            raise TimeoutError("of a handler")

    with pytest.raises(TimeoutError, match="handler"):
        device.reached(Event())


def test_items_are_filled_as_columns(driver: Driver) -> None:
    runtime = object.__new__(CudaRuntime)
    runtime.gpu = GpuDevice()
    stream = runtime.gpu.new_stream()
    for item in (b"\0" * 8, b"abcd", b"abcdefgh", b"abc", b""):
        runtime.fill(stream, 4096, item, 5)
    assert [call[:5] for call in driver.calls] == [
        ("cuMemsetD8Async", 4096, 0, 40, 100),
        ("cuMemsetD32Async", 4096, 0x64636261, 5, 100),
        ("cuMemsetD2D32Async", 4096, 8, 0x64636261, 1),
        ("cuMemsetD2D32Async", 4100, 8, 0x68676665, 1),
        *(("cuMemsetD2D8Async", 4096 + k, 3, 0x61 + k, 1) for k in range(3)),
    ]


def test_launches_with_arguments_of_their_own() -> None:
    prepared = Prepared(SimpleNamespace(cuLaunchKernel=None), 77, "k", 2, [np.float64(2.5), 3], shared=40)
    first, second = prepared.row((5,), (64,), (7, 8)), prepared.row((5,), (64,), (9, 10))
    wide = prepared.row((4, 3), (8, 2, 2), (1, 2))
    for row, grid, values in (
        (first, (5, 1, 1, 64, 1, 1), (7, 8)),
        (second, (5, 1, 1, 64, 1, 1), (9, 10)),
        (wide, (4, 3, 1, 8, 2, 2), (1, 2)),
    ):
        assert row[:4].view(np.uint32)[:7].tolist() == [*grid, 40] and row[7] == 77
        pointers = [ctypes.c_int64.from_address(a) for a in (ctypes.c_int64 * 4).from_address(int(row[8]))]
        assert [p.value for p in pointers] == [*values, int(np.float64(2.5).view(np.int64)), 3]


def test_a_word_is_set_at_once_and_waited_for_in_a_stream(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    from warpwell.targets import memory

    monkeypatch.setattr(memory, "CudaMemory", memory.Allocator)
    called: list[Any] = []
    library = SimpleNamespace(
        cuStreamBatchMemOp_v2=None,
        cuStreamWriteValue64_v2=lambda *arguments: called.append(("write", *arguments)) or 0,
        cuStreamWaitValue64_v2=lambda *arguments: called.append(("wait", *arguments)) or 0,
    )
    monkeypatch.setattr("warpwell.scheduler.executors.gpu.driver", lambda: library)
    gpu = Gpu()
    assert gpu.bandwidth == 2e3 * 8
    first = gpu.new_stream()
    gpu.set_word(64, 1)
    gpu.wait_word(first, 64, 2)
    assert called == [("write", 95, 64, 1, 0), ("wait", 100, 64, 2, 0)]
    assert gpu.read_words(64, 3).tolist() == [0, 0, 0]
    gpu.close()
    assert gpu._control.is_closed


def test_memory_is_freed_behind_the_streams_that_used_it(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        MemoryPool, "of", lambda driver, ordinal: SimpleNamespace(handle=1, reserved=64, used=16, trim=lambda: None)
    )
    monkeypatch.setattr("warpwell.pool.agent.memory_pool.OOM_SECONDS", 0.02)
    gpu = GpuDevice(0, errors.KernelError)
    memory = PoolMemory(gpu)
    assert memory.info() == ((1 << 30) + 48, 1 << 32)
    block, stream, closed = memory.allocate(100), gpu.new_stream(1), gpu.new_stream(2)
    block.used |= {stream, closed}
    memory.close_stream(closed)
    freeing = memory._freeing
    del block
    until(lambda: ("cuMemFreeAsync", 4096, 100) in driver.calls)
    assert freeing.waited == [stream]
    with pytest.raises(MemoryError, match="no memory for 2097152 bytes"):
        memory.allocate(2 << 20)


@pytest.mark.parametrize("status", [0, 600, 201])
def test_the_default_stream_is_waited_for_only_where_it_has_work(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    queried, waited = [], []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    def query(stream: int | None) -> int:
        queried.append(stream)
        return status

    monkeypatch.setattr(device, "driver", lambda: SimpleNamespace(cuStreamQuery=query))
    stream = SimpleNamespace(synchronize=lambda: waited.append(status))
    monkeypatch.setitem(sys.modules, "numba.cuda", SimpleNamespace(default_stream=lambda: stream))
    monkeypatch.setattr(numba, "cuda", sys.modules["numba.cuda"], raising=False)
    device._query_default.cache_clear()
    try:
        device.wait_default()
    finally:
        device._query_default.cache_clear()
    assert queried == [None] and waited == [status] * (status != 0)
