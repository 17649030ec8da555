"""Copies in chunks through staging buffers: every size and plan gives the same bytes, and failures end them."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness.examples import examples
from tests.harness.pool_agents import pool_of
from tests.harness.pool_programs import double, run

from lab.emulated_device import EmulatedDevice
from warpwell import errors
from warpwell.pool.agent.cuda_runtime import CudaRuntime
from warpwell.pool.agent.runtime import Runtime
from warpwell.pool.agent.staged import cancel_and_wait
from warpwell.pool.devices import Devices
from warpwell.pool.transport.bulk import DONE, MAX_CHUNK, Region, Transfer
from warpwell.pool.tuning import BUFFERS, CHUNK, LARGE, CopyPlan, Tuning


@contextlib.contextmanager
def pool(count: int = 2, bandwidth: float = 50e9) -> Iterator[Devices]:
    with pool_of(EmulatedDevice(bandwidth) for _ in range(count)) as (made, _):
        yield made


@pytest.fixture(scope="module")
def devices() -> Iterator[Devices]:
    with pool() as made:
        yield made


@settings(max_examples=examples(40))
@given(
    nbytes=st.one_of(st.integers(0, 5 << 20), st.sampled_from([65536, 65537, 1 << 20, (1 << 20) + 1, 4 << 20])),
    chunk=st.sampled_from([None, 4096, 65536, 1 << 20]),
    buffers=st.integers(1, 5),
    pipelined=st.booleans(),
    direct=st.booleans(),
)
def test_every_plan_moves_every_byte(
    devices: Devices, nbytes: int, chunk: int | None, buffers: int, pipelined: bool, direct: bool
) -> None:
    for device in devices:
        device.transfers = Tuning(chunk, buffers, pipelined, direct)
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    first = devices[0].to_device(data)
    second = devices[1].empty(nbytes, np.uint8)
    second.copy_from(first)
    assert np.array_equal(first.copy_to_host(), data)
    assert np.array_equal(second.copy_to_host(), data)


def test_plans() -> None:
    assert Tuning().plan(64 << 20) == Tuning().plan(LARGE) == CopyPlan(CHUNK, BUFFERS)
    assert Tuning().plan(1) == CopyPlan(4096, 1)
    assert Tuning().plan(LARGE - 1) == CopyPlan(LARGE - 1, 1), "small ones go in one piece"
    assert Tuning(chunk=1 << 20).plan(1 << 20) == CopyPlan(1 << 20, 1), "one chunk goes as without a pipeline"
    assert Tuning(chunk=1 << 20).plan(2 << 20) == CopyPlan(1 << 20, BUFFERS)
    assert Tuning(pipelined=False).plan(64 << 20) == CopyPlan(64 << 20, 1)
    assert Tuning(CHUNK, pipelined=False).plan(3 << 30) == CopyPlan(MAX_CHUNK, 1)
    for options, name in (({"chunk": 100}, "chunk"), ({"buffers": 0}, "buffers"), ({"chunk": 1 << 40}, "chunk")):
        with pytest.raises(errors.ArgumentError, match=name):
            Tuning(**options)  # type: ignore[arg-type]


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPWELL_POOL_CHUNK", "65536")
    assert Tuning.from_environment().plan(1 << 20) == CopyPlan(65536, BUFFERS)
    monkeypatch.setenv("WARPWELL_POOL_PIPELINE", "0")
    assert Tuning.from_environment().plan(1 << 20) == CopyPlan(1 << 20, 1)
    monkeypatch.setenv("WARPWELL_POOL_BUFFERS", "many")
    with pytest.raises(errors.ArgumentError, match="WARPWELL_POOL_BUFFERS"):
        Tuning.from_environment()


def test_a_gpu_overrides_the_operations_of_the_cpu() -> None:
    """An operation of the CPU would access device memory as host memory."""
    inherited = {name for name in vars(Runtime) if not name.startswith("_")} - set(vars(CudaRuntime))
    assert inherited == {"reach"}


@pytest.mark.timing
def test_the_parts_of_a_pipeline_overlap() -> None:
    """The engine copies while chunks are received: it has begun before the last chunk is there."""
    with pool(1, bandwidth=1e9) as devices:
        device = devices[0]
        data = np.ones(32 << 20, np.uint8)
        seconds: dict[bool, float] = {True: math.inf, False: math.inf}
        for pipelined in (True, False) * 4:  # the shortest times: other load only adds to them
            device.transfers = Tuning(pipelined=pipelined)
            buffer = device.to_device(data)
            device.synchronize()
            start = time.perf_counter()
            buffer.copy_from(data)
            device.synchronize()
            seconds[pipelined] = min(seconds[pipelined], time.perf_counter() - start)
        assert min(seconds.values()) >= 0.9 * data.nbytes / 1e9
        assert seconds[True] < 1.25 * seconds[False]


class LateDevice(EmulatedDevice):
    """A device on which functions leave their work in the stream, as those do that use CuPy."""

    def call(self, stream: Any, function: Any, arguments: Any, options: Any) -> Any:
        if function.__name__ != "double":
            return super().call(stream, function, arguments, options)
        stream.put(lambda: function(*arguments, **options))
        return len(arguments[0])


def test_staging_memory_that_may_still_be_written_to_is_not_used_again() -> None:
    runtime = EmulatedDevice(1e9)
    staging = runtime.staging(4096)
    region = Region.over(staging)
    over, lost = Transfer(1, 1, region), Transfer(1, 1, region)
    over.finish(DONE)
    cancel_and_wait(over, runtime)
    assert np.shares_memory(runtime.staging(4096), staging)
    lost.fail("it fell over", keep_memory=True)
    cancel_and_wait(lost, runtime)
    assert not np.shares_memory(runtime.staging(4096), staging)


def test_an_empty_copy_is_in_the_order_of_both_devices() -> None:
    with pool_of(LateDevice(5e9, jitter=0.2, seed=4) for _ in range(2)) as (made, _):
        a, b = (device.to_device(np.arange(8)) for device in made)
        for left, right in ((a, b), (b, a)):
            for to, origin in ((left, right), (right, left)):
                left.device.call(double, left)
                before = left.device.default_stream.record()
                to.device.copy(to[3:3], origin[5:5])
                right.device.default_stream.record().synchronize(60)
                assert before.done
        assert np.array_equal(a.copy_to_host(), 4 * np.arange(8))


@pytest.mark.parametrize("programs", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_random_programs_where_kernels_copies_and_functions_come_late(programs: int) -> None:
    """Streams overtake each other, as on a GPU that is shared, wherever calls do not order them."""
    devices = (LateDevice(5e9, jitter=2e-3, seed=k) for k in range(3))
    with pool_of(devices) as (made, _), np.errstate(over="ignore"):
        run(made, programs, seed=12, steps=60)
