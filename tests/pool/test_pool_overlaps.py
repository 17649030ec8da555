"""NumPy arguments that share memory: one rule, wherever a launch runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.harness.until import HANG_SECONDS

import warpwell as ww
from warpwell import gpu
from warpwell.pool.devices import Devices
from warpwell.targets.arguments.overlaps import Span, together


@ww.kernel
def step(x, y):
    i = gpu.grid(1)
    if i == 0:  # one thread: several threads see each other's items in an undefined order
        for k in range(y.size):
            y[k] = x[k] + 1


@ww.kernel
def rows(x, y):
    if gpu.grid(1) == 0:
        for i in range(x.shape[0]):
            for j in range(x.shape[1]):
                y[j, i] += x[i, j] + 1


@ww.kernel
def three(x, y, z):
    if gpu.grid(1) == 0:
        for k in range(z.size):
            x[k] += 1
            y[k] += x[k]
            z[k] += y[k]


@pytest.fixture(scope="module")
def devices() -> Iterator[Devices]:
    with Devices(targets=["cpu", "cpu"]) as found:
        yield found


def read_only(array: Any) -> Any:
    view = array.view()
    view.flags.writeable = False
    return view


CASES: dict[str, tuple[Any, Callable[[Any], tuple[Any, ...]]]] = {
    "a part": (step, lambda a: (a, a[2:6])),
    "a part before": (step, lambda a: (a[1:], a[:-1])),
    "twice": (step, lambda a: (a, a)),
    "reversed": (step, lambda a: (a, a[::-1])),
    "every other": (step, lambda a: (a, a[1::2])),
    "interleaved": (step, lambda a: (a[1::2], a[::2])),
    "read-only": (step, lambda a: (read_only(a), a[3:])),
    "of other types": (step, lambda a: (a.view(np.int32), a[5:])),
    "transposed": (rows, lambda a: (a.reshape(3, 4), a.reshape(3, 4).T)),
    "three": (three, lambda a: (a, a[4:], a[8:])),
    "two of three": (three, lambda a: (a, np.ones(12, np.int64), a[8:])),
    "not aligned": (step, lambda a: (a.view(np.uint8)[1:41].view(np.int32), a.view(np.uint8)[5:37].view(np.int32))),
}


@pytest.mark.parametrize("name", list(CASES))
def test_a_launch_on_a_device_is_as_a_plain_one(devices: Devices, name: str) -> None:
    kernel, arguments = CASES[name]
    expected = np.arange(12)
    kernel[1](*arguments(expected), device="cpu")
    for launch in (
        lambda *args: devices[1].launch(kernel[1], *args),
        lambda *args: kernel[1](*args),
        lambda *args: kernel[1, stream](*args),
    ):
        found = np.arange(12)
        with devices[0], devices[1].stream() as stream:
            launch(*arguments(found))
        assert found.tolist() == expected.tolist()
    assert expected.tolist() != list(range(12))


def test_tasks_on_a_pool(devices: Devices) -> None:
    expected, found = np.arange(12), np.arange(12)
    three[1](expected, expected[4:], expected[8:], device="cpu")
    with ww.scheduler.Scheduler(devices=devices) as scheduler:
        scheduler.submit(three[1], found, found[4:], found[8:]).result(HANG_SECONDS)
    assert found.tolist() == expected.tolist()


def test_bytes_between_the_items_stay_as_they_are() -> None:
    matrix = np.zeros((4, 4), np.int64)
    left, part = matrix[:, :2], matrix[1:3, :1]
    (group,) = together([left, 3, part])
    span = Span(group)
    copy = np.full(span.pad + span.bytes.size, 255, np.uint8)
    copy[span.pad :] = span.bytes
    matrix[:, 3] = 7  # as another thread could do in the meantime
    np.ndarray(part.shape, part.dtype, copy, span.offset_of(part), part.strides)[:] = 5
    span.copy_back(copy)
    assert matrix.tolist() == [[0, 0, 0, 7], [5, 0, 0, 7], [5, 0, 0, 7], [0, 0, 0, 7]]


def test_what_shares_nothing_is_not_together() -> None:
    a = np.zeros(10)
    assert together([a[:5], a[5:], np.zeros(3), a[:0], 4]) == []
    assert together([a[::2], a[1::2]]) == [] and together([a]) == []
    assert [len(group) for group in together([a[:4], a[6:], a[3:7], np.zeros(3)])] == [3]
