"""Streams of a pool that end, and code that comes and goes."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.harness.gate_file import gate_file, wait_for_file
from tests.harness.threads import when_blocked
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from warpwell import errors, gpu
from warpwell.pool.devices import Devices


@ww.kernel
def wrong(x):
    i = gpu.grid(1)
    x[i] = x.no_such_thing


@pytest.fixture(scope="module")
def devices() -> Iterator[Devices]:
    with Devices(targets=["cpu"]) as found:
        yield found


def test_a_closed_stream_is_waited_for_by_its_device(devices: Devices, tmp_path: Path) -> None:
    device = devices[0]
    with gate_file(tmp_path) as gate:
        with device.stream() as stream:
            slow = device.call(wait_for_file, str(gate), stream=stream)
            wrong[4, stream](device.zeros(4, stream=stream))
            event = stream.record()
        assert not slow.done
    with pytest.raises(errors.RemoteError, match="launch of 'wrong'"):
        device.synchronize(30)
    assert slow.done and event.done
    event.synchronize(HANG_SECONDS)
    with pytest.raises(errors.ClosedError):
        stream.synchronize()


def test_what_fails_after_its_stream_was_closed_is_raised_by_the_default_one(devices: Devices) -> None:
    def fail_late(seconds: float) -> None:
        time.sleep(seconds)
        raise ValueError(f"after {seconds} s")

    device = devices[0]
    for seconds in (0.0, 0.2):
        stream = device.stream()
        device.call(fail_late, seconds, stream=stream)
        time.sleep(0.1)  # the call with 0 s fails before the stream is closed
        stream.close()
        with pytest.raises(errors.RemoteError, match=f"after {seconds} s"):
            device.synchronize(60)
        device.synchronize(60)  # the error is raised only once
        stream = device.stream()
        result = device.call(fail_late, seconds, stream=stream)
        stream.close()
        with pytest.raises(errors.RemoteError, match=f"after {seconds} s"):
            result.get(60)
        device.synchronize(60)  # `get` has raised the error


def test_a_stream_that_nobody_holds_ends(devices: Devices) -> None:
    device = devices[0]
    lanes = len(device.query_agent()["lanes"])
    stream = device.stream(priority=2)
    x = device.zeros(4, stream=stream)
    assert len(device.query_agent()["lanes"]) == lanes + 1
    del stream
    gc.collect()
    until(lambda: len(device.query_agent()["lanes"]) == lanes)
    device.synchronize(HANG_SECONDS)  # the copy is of another stream, which does not wait for the zeros
    assert not x.copy_to_host().any()


def test_code_goes_when_nobody_has_it(devices: Devices) -> None:
    agent_codes = codes(devices)
    for k in range(20):
        large = np.full(1000, k)
        assert devices[0].call(lambda: int(large.sum())).get(30) == 1000 * k
    gc.collect()
    until(lambda: codes(devices) <= agent_codes + 1)


def codes(devices: Devices) -> int:
    return len(devices[0].connection._codes)


def test_calls_are_counted_with_bytes_and_waits(devices: Devices, tmp_path: Path) -> None:
    device = devices[0]
    before = device.trace()
    x = device.to_device(np.zeros(1_000_000))
    x.copy_to_host()
    with gate_file(tmp_path) as gate:
        device.call(wait_for_file, str(gate))
        thread = when_blocked(lambda: (time.sleep(0.1), gate.touch()))
        device.synchronize(HANG_SECONDS)
        thread.join(HANG_SECONDS)
    after = device.trace()

    def more(name: str) -> tuple[float, ...]:
        return tuple(b - a for a, b in zip(before.get(name, (0, 0, 0.0)), after[name], strict=True))

    assert more("WRITE_BULK")[:2] == more("READ_BULK")[:2] == (1, 8_000_000)
    assert more("SYNCHRONIZE")[0] == 1 and 0.05 < more("SYNCHRONIZE")[2] < HANG_SECONDS
