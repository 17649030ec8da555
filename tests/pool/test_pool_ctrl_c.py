"""Ctrl-C at every place of the pool's own code: the call ends, and everything can be used afterwards."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.pool_agents import pool_of
from tests.harness.until import until

import warpwell as ww
from warpwell import gpu
from warpwell.pool.agent.agent import Agent
from warpwell.pool.agent.runtime import Runtime
from warpwell.pool.device import Device
from warpwell.pool.devices import Devices

OWN = str(Path(ww.__file__).parent / "pool")
POINTS = 40
"""Places of each call at which it is interrupted: all of them where there are no more."""
LARGE = np.arange(100_000.0)
HUGE = np.zeros(10 << 20, np.uint8)


@ww.kernel
def add(x, y):
    i = gpu.grid(1)
    y[i] += x[i]


def length(x: Any, y: int) -> int:
    return len(x) + y


@pytest.fixture(scope="module")
def agents() -> Iterator[tuple[Devices, list[Agent]]]:
    with pool_of(Runtime() for _ in range(2)) as made:
        yield made


class Interrupts:
    """Presses Ctrl-C at the n-th place of the pool's code in this thread where Python takes signals.

    Those are where functions begin, and where those of C, which have no other place, return.
    """

    def __init__(self, at: int) -> None:
        self.at = at
        self.points = 0

    def __enter__(self) -> Interrupts:
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: Any, event: str, _: Any) -> None:
        if event not in ("call", "c_return") or not frame.f_code.co_filename.startswith(OWN):
            return
        if "__del__" in (frame.f_code.co_name, frame.f_back.f_code.co_name) or frame.f_code.co_name == "<genexpr>":
            return  # Python ignores exceptions in __del__ and while it closes a generator
        self.points += 1
        if self.points == self.at:
            signal.raise_signal(signal.SIGINT)


def between(device: Device, x: Any) -> None:
    peer = device.peers[0]
    y = peer.empty(x.shape, x.dtype)
    y.copy_from(x)
    y.copy_to_host()


def streams(device: Device, x: Any) -> None:
    with device.stream() as stream:
        device.default_stream.wait(stream.record())
        x[:10].copy_to_host()
    device.synchronize(30)


CALLS: dict[str, Callable[[Device, Any], object]] = {
    "large to a device": lambda device, x: device.to_device(HUGE),
    "small to a device": lambda device, x: device.to_device(LARGE[:10]),
    "to the host": lambda device, x: x.copy_to_host(),
    "a launch with arrays": lambda device, x: device.launch(add[10], np.zeros(10), np.zeros(10)),
    "a launch": lambda device, x: (device.launch(add[10], x, x), device.synchronize(30)),
    "a call": lambda device, x: device.call(length, LARGE, 3).get(30),
    "a large result": lambda device, x: device.call(np.ones, 200_000).get(30),
    "between devices": between,
    "streams": streams,
}


@pytest.mark.parametrize("name", list(CALLS))
def test_ctrl_c_at_every_place(agents: tuple[Devices, list[Agent]], name: str) -> None:
    devices, served = agents
    device, call = devices[0], CALLS[name]
    x = device.to_device(LARGE)
    call(device, x)
    with Interrupts(0) as counted:
        call(device, x)
    for at in np.unique(np.linspace(1, counted.points, POINTS).astype(int)).tolist():
        with Interrupts(at) as interrupts:
            try:
                call(device, x)
            except KeyboardInterrupt:
                pass
            else:
                assert interrupts.points < at, f"an interrupt at place {at} was lost"
        for each in devices:
            each.synchronize(30)  # no error of the abandoned calls is raised
            assert each.zeros(3).copy_to_host().tolist() == [0, 0, 0]
        assert np.array_equal(x[100:200].copy_to_host(), LARGE[100:200])
    until(lambda: not any(agent.bulk or agent.outgoing for agent in served))
    until(lambda: [len(agent.handles) for agent in served] == [1, 0])  # the agents keep no handle but x
    assert all(not c.caller.replies for c in devices)
