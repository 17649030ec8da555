"""Options that calls of a pool refuse with a reason; none of the calls reaches a device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import warpwell as ww
from warpwell import errors
from warpwell.pool import Tuning
from warpwell.pool.devices import Devices

INF, NAN = float("inf"), float("nan")


@pytest.fixture(scope="module")
def devices() -> Iterator[Devices]:
    with Devices(targets=["cpu"]) as found:
        yield found


ODD: list[tuple[Callable[[Any], object], str]] = [
    (lambda d: d.empty(-1), "negative extent"),
    (lambda d: d.zeros((2, -3)), "negative extent"),
    (lambda d: d.empty(2.5), "shape is 2.5: give an integer"),
    (lambda d: d.empty((2.5,)), "give an integer, or a tuple"),
    (lambda d: d.empty("3"), "shape is '3'"),
    (lambda d: d.empty(None), "shape is None"),
    (lambda d: d.empty(3, "no"), "dtype 'no'"),
    (lambda d: d.full(3, "abc", np.int64), "is not one item of int64"),
    (lambda d: d.full(3, [1], np.int64), "is not one item of int64"),
    (lambda d: d.zeros(3).fill(None), "None is not one item"),
    (lambda d: d.zeros(3)[True], "slice of step 1, got True"),
    (lambda d: d.synchronize(INF), "timeout is inf: give seconds"),
    (lambda d: d.default_stream.synchronize(NAN), "timeout is nan: give seconds"),
    (lambda d: d.default_stream.record().synchronize("1"), "timeout is '1'"),
    (lambda d: d.call(sum, [1]).get(-1), "timeout is -1"),
    (lambda d: d.stream(1.5), "priority is 1.5"),
    (lambda d: d.stream(-1), "priority is -1"),
    (lambda d: d.default_stream.wait(3), "an event or a stream of a device, got 3"),
    (lambda d: d.default_stream.record(3), "an event of a device, got 3"),
    (lambda d: d.event().record(3), r"stream must be a device.stream\(\), got 3"),
    (lambda d: d.event().elapsed(None), "an event of a device, got None"),
    (lambda d: d.launch(None), "None is not a launch: give kernel"),
    (lambda d: d.create(3), "give the name of a service"),
    (lambda d: d.create("a:b:c"), "give the name of a service"),
    (lambda d: Tuning(chunk=NAN), "chunk is nan"),
    (lambda d: Tuning(buffers=2.5), "buffers is 2.5"),
    (lambda d: ww.pinned_empty(-3), "negative extent"),
    (lambda d: ww.pinned_empty((2, 2.5)), "give an integer, or a tuple"),
    (lambda d: ww.pinned_empty(3, object), "holds Python objects"),
    (lambda d: ww.empty_like(3), "expected an array or a buffer, got 3"),
    (lambda d: ww.broadcast(d, len), "must be a sequence of devices, such as"),
    (lambda d: ww.broadcast([3], len), "must be a sequence of devices, such as"),
]


@pytest.mark.parametrize(("call", "message"), ODD, ids=[message for _, message in ODD])
def test_odd_options_are_refused(devices: Devices, call: Callable[[Any], object], message: str) -> None:
    (device,) = devices
    with pytest.raises((errors.ArgumentError, errors.DTypeError), match=message):
        call(device)
    device.synchronize(30)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 1.5}, "count is 1.5"),
        ({"count": 0}, "at least"),
        ({"memory": -1}, "memory must be 0 to .*, got -1"),
        ({"target": "tpu"}, "unknown target 'tpu'; expected one of cpu, cuda"),
        ({"timeout": INF}, "timeout is inf"),
    ],
)
def test_leases_that_cannot_be(devices: Devices, options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ArgumentError, match=message):
        devices.lease(**options)
    devices.lease(1, timeout=0).release()


def test_more_than_any_device_has_room_for(devices: Devices) -> None:
    for shape in (1 << 62, (1 << 40, 1 << 40)):
        with pytest.raises(MemoryError, match="any device has room for"):
            devices[0].empty(shape)


def test_what_cannot_be_used_ends_the_devices_that_were_begun_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.ArgumentError, match="unknown targets 'tpu'"):
        Devices(targets=["cpu", "tpu"])
    monkeypatch.setenv("WARPWELL_POOL_CHUNK", "abc")
    before = {thread for thread in threading.enumerate() if thread.name.startswith("warpwell agent")}
    with pytest.raises(errors.ArgumentError, match="WARPWELL_POOL_CHUNK is 'abc'"):
        Devices(targets=["cpu", "cpu"])
    # Agents of earlier tests may end meanwhile.
    assert {thread for thread in threading.enumerate() if thread.name.startswith("warpwell agent")} <= before
