"""A program that loses all of its devices but one, each in the middle of a copy or a kernel, and goes on with the rest.

``warpwell run --agents N -m lab.campaigns.pool_losing MOMENT SEED`` prints a JSON list of what happened.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpwell.errors import DeviceLostError, RemoteError
from warpwell.pool import Device
from warpwell.pool.devices import devices
from warpwell.targets import kernel
from warpwell.targets.primitives import grid

HOWS = ("kill", "exit", "stop")
MOMENTS = ("copy", "kernel")
LIMIT = 5.0
"""Seconds in which a loss must be told."""

_LONG = 4_000_000_000
_LARGE = 32 << 20


@kernel
def _double(x: Any, y: Any) -> None:
    i = grid(1)
    y[i] = 2 * x[i]


@kernel
def _long(out: Any, n: Any) -> None:
    value = 1
    for k in range(n):
        value = (value * 1103515245 + k) & 0x7FFFFFFF
    out[0] = value


def exit_later(seconds: float) -> None:
    """Have this process end soon, on its own."""
    threading.Timer(seconds, os._exit, (3,)).start()


def nothing() -> None:
    """Have an agent import this module."""


class _Busy(threading.Thread):
    """Uses a device all the time, and notices if a result is wrong or does not come."""

    def __init__(self, device: Device) -> None:
        super().__init__(daemon=True)
        self.device = device
        self.rounds, self.longest = 0, 0.0
        self.failure: BaseException | None = None
        self.ending = False

    def run(self) -> None:
        """Work until told to end."""
        data = np.arange(1000, dtype=np.int64)
        try:
            stream = self.device.stream()  # a copy that fails in another one is told there
            while not self.ending:
                began = time.monotonic()
                x = self.device.to_device(data, stream)
                y = self.device.empty(data.size, np.int64, stream)
                self.device.launch(_double[data.size], x, y, stream=stream)
                found = y.copy_to_host(stream=stream)
                assert np.array_equal(found, 2 * data), f"device {self.device.index} computed something else"
                self.longest = max(self.longest, time.monotonic() - began)
                self.rounds += 1
                time.sleep(0.005)
        except BaseException as error:
            self.failure = error


def lose(device: Device, others: list[Device], how: str, moment: str, draw: random.Random) -> dict[str, Any]:
    """Lose a device and return how long it took until that was told, and how the others fared."""
    pid = int(device.info["pid"])
    busy = [_Busy(other) for other in others]
    for each in busy:
        each.start()
    data = np.arange(_LARGE // 8, dtype=np.int64)
    delay = draw.uniform(0.0, 0.4)
    act = _copying(device, others, data, draw) if moment == "copy" else _computing(device)
    if how == "exit":
        device.call(exit_later, delay)  # its result may not come any more
    at = time.monotonic() + delay
    if how != "exit":
        number = signal.SIGKILL if how == "kill" else signal.SIGSTOP
        threading.Timer(delay, os.kill, (pid, number)).start()
    error: BaseException | None = None
    try:
        while time.monotonic() < at + 6 * LIMIT:
            act()
    except BaseException as caught:
        error = caught
    told = time.monotonic() - at
    before = [each.rounds for each in busy]
    time.sleep(0.3)
    for each in busy:
        each.ending = True
    for each in busy:
        each.join(2 * LIMIT)
    wrong = []
    if not isinstance(error, DeviceLostError):
        wrong.append(f"the loss was told as {error!r}")
    elif error.device not in (device.index, None):
        wrong.append(f"the loss was told of device {error.device}")
    if not told < LIMIT:
        wrong.append(f"it was told after {told:.2f} s")
    if device.lost is None:
        wrong.append("the device does not say that it is lost")
    for each, count in zip(busy, before, strict=True):
        if each.failure is not None or each.is_alive():
            wrong.append(f"device {each.device.index} did not go on: {each.failure!r}")
        elif each.rounds <= count:
            wrong.append(f"device {each.device.index} stood still")
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)  # a stopped one
    return {
        "how": how,
        "moment": moment,
        "device": device.index,
        "seconds": told,
        "wrong": wrong,
        "longest": max((each.longest for each in busy), default=0.0),
    }


def _copying(device: Device, others: list[Device], data: NDArray[np.int64], draw: random.Random) -> Callable[[], None]:
    near = device.to_device(data)
    far = draw.choice(others).to_device(data)
    device.synchronize()
    out = np.empty_like(data)
    way = draw.choice(("in", "out", "from another", "to another"))

    def act() -> None:
        if way == "in":
            near.copy_from(data)
        elif way == "out":
            near.copy_to_host(out)
        elif way == "from another":
            near.copy_from(far)
        else:
            far.copy_from(near)
            try:
                far.device.synchronize(6 * LIMIT)
            except RemoteError as error:  # a call of the other device failed, because this one is lost
                if not isinstance(error.__cause__, DeviceLostError):
                    raise
        device.synchronize(6 * LIMIT)

    return act


def _computing(device: Device) -> Callable[[], None]:
    out = device.empty(1, np.int64)

    def act() -> None:
        device.launch(_long[1], out, _LONG)
        device.synchronize(6 * LIMIT)

    return act


def main(moment: str, seed: int) -> int:
    """Lose devices; return 1 if something was wrong."""
    draw = random.Random(seed)
    found = list(devices())
    for device in found:  # compile and import first
        x = device.to_device(np.zeros(4, np.int64))
        device.launch(_double[4], x, x)
        device.launch(_long[1], x, 1)
        device.call(nothing).get()
    order = draw.sample(found, len(found))
    hows = [how for _ in order for how in draw.sample(HOWS, len(HOWS))]
    told = []
    while len(order) > 1:
        device = order.pop()
        told.append(lose(device, order, hows.pop(), moment, draw))
    print(json.dumps(told), flush=True)
    return int(any(each["wrong"] for each in told))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
