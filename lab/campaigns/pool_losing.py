"""A program that loses all devices except one, during copies or kernels, and continues with the remaining devices.

``warpwell run --agents N -m lab.campaigns.pool_losing MOMENT SEED`` prints a JSON list of the losses.
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
"""Time within which a loss must be reported, in seconds."""

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
    """Exit this process after some seconds."""
    threading.Timer(seconds, os._exit, (3,)).start()


def nothing() -> None:
    """Make an agent import this module."""


class _Busy(threading.Thread):
    """Uses a device all the time, and records a wrong or missing result."""

    def __init__(self, device: Device) -> None:
        super().__init__(daemon=True)
        self.device = device
        self.rounds, self.longest = 0, 0.0
        self.failure: BaseException | None = None
        self.ending = False

    def run(self) -> None:
        """Work until `ending` is set."""
        data = np.arange(1000, dtype=np.int64)
        try:
            stream = self.device.stream()  # a failed copy of another stream is reported on that stream
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


def lose(device: Device, remaining: list[Device], how: str, moment: str, draw: random.Random) -> dict[str, Any]:
    """Lose a device; return the time until the report of the loss, and the faults of the remaining devices."""
    pid = int(device.info["pid"])
    busy = [_Busy(survivor) for survivor in remaining]
    for each in busy:
        each.start()
    data = np.arange(_LARGE // 8, dtype=np.int64)
    delay = draw.uniform(0.0, 0.4)
    act = _copying(device, remaining, data, draw) if moment == "copy" else _computing(device)
    if how == "exit":
        device.call(exit_later, delay)  # the result may not arrive before the exit
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
    reported_seconds = time.monotonic() - at
    before = [each.rounds for each in busy]
    time.sleep(0.3)
    for each in busy:
        each.ending = True
    for each in busy:
        each.join(2 * LIMIT)
    wrong = []
    if not isinstance(error, DeviceLostError):
        wrong.append(f"the loss was reported as {error!r}")
    elif error.device not in (device.index, None):
        wrong.append(f"the loss was reported for device {error.device}")
    if not reported_seconds < LIMIT:
        wrong.append(f"the loss was reported after {reported_seconds:.2f} s")
    if device.lost is None:
        wrong.append("Device.lost is not set")
    for each, count in zip(busy, before, strict=True):
        if each.failure is not None or each.is_alive():
            wrong.append(f"device {each.device.index} did not continue: {each.failure!r}")
        elif each.rounds <= count:
            wrong.append(f"device {each.device.index} made no progress")
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)  # the process may be stopped
    return {
        "how": how,
        "moment": moment,
        "device": device.index,
        "seconds": reported_seconds,
        "wrong": wrong,
        "longest": max((each.longest for each in busy), default=0.0),
    }


def _copying(
    device: Device, remaining: list[Device], data: NDArray[np.int64], draw: random.Random
) -> Callable[[], None]:
    near = device.to_device(data)
    far = draw.choice(remaining).to_device(data)
    device.synchronize()
    out = np.empty_like(data)
    direction = draw.choice(("in", "out", "from another", "to another"))

    def act() -> None:
        if direction == "in":
            near.copy_from(data)
        elif direction == "out":
            near.copy_to_host(out)
        elif direction == "from another":
            near.copy_from(far)
        else:
            far.copy_from(near)
            try:
                far.device.synchronize(6 * LIMIT)
            except RemoteError as error:  # the call of the other device failed because `device` is lost
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
    """Lose devices; return 1 if a check failed."""
    draw = random.Random(seed)
    found = list(devices())
    for device in found:  # compile and import first
        x = device.to_device(np.zeros(4, np.int64))
        device.launch(_double[4], x, x)
        device.launch(_long[1], x, 1)
        device.call(nothing).get()
    order = draw.sample(found, len(found))
    hows = [how for _ in order for how in draw.sample(HOWS, len(HOWS))]
    losses = []
    while len(order) > 1:
        device = order.pop()
        losses.append(lose(device, order, hows.pop(), moment, draw))
    print(json.dumps(losses), flush=True)
    return int(any(each["wrong"] for each in losses))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
