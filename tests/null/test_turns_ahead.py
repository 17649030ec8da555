"""Turns whose work waits at gates on the GPU: a thread plays a stream of the driver, on the words of the board."""

from __future__ import annotations

import ctypes
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.harness.until import until
from tests.null import test_turns
from tests.null.test_turns import WAITS, Gpu, rows

import warpwell as ww
from warpwell.turns import ahead, gpu_work, seat

LONG = 30.0
start = test_turns.start  # a fixture


class Stream(Gpu):
    """A GPU with one stream: kernels, and operations on memory, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.did: queue.Queue[Callable[[], None]] = queue.Queue()
        self.captures = 0
        self.status = 0
        self.ended: list[tuple[float, float]] = []
        self.closed = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self.closed.is_set():
            self.did.get()()

    def kernel(self, seconds: float) -> None:
        """Launch a kernel; `ended` tells when it ran."""

        def run() -> None:
            began = time.monotonic()
            time.sleep(seconds)
            self.ended.append((began, time.monotonic()))

        self.did.put(run)

    def cuMemHostRegister_v2(self, begin: Any, length: Any, flags: int) -> int:
        return self.status

    def cuMemHostGetDevicePointer_v2(self, where: Any, begin: Any, flags: int) -> int:
        where._obj.value = begin
        return 0

    def cuStreamIsCapturing(self, stream: int, where: Any) -> int:
        where._obj.value = self.captures
        return 0

    def cuStreamQuery(self, stream: int) -> int:
        return self.status or 600

    def cuStreamBatchMemOp_v2(self, stream: int, count: int, at: int, flags: int) -> int:
        for k in range(count):
            kind, address, value, *_ = (ctypes.c_uint64 * 6).from_address(at + 48 * k)
            self.did.put(functools.partial(self._operate, kind, address, value))
        return self.status

    def _operate(self, kind: int, address: int, value: int) -> None:
        word = ctypes.c_int64.from_address(address)
        if kind == 5:
            word.value = value
            return
        assert kind == 4
        while word.value < value and not self.closed.is_set():
            time.sleep(1e-5)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPWELL_TURNS", str(tmp_path))


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"a{abs(hash(request.node.name))}"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    made = Stream()
    monkeypatch.setattr(gpu_work, "driver", lambda: made)
    monkeypatch.setattr(ahead, "driver", lambda: made)
    yield made
    made.closed.set()
    made.did.put(lambda: None)


def mine(name: str) -> ahead.AheadSeat:
    found = seat._seats.found[name, ahead.AheadSeat]
    assert isinstance(found, ahead.AheadSeat)
    return found


def test_work_goes_on_while_the_host_only_enqueues(gpu: Stream, name: str) -> None:
    began = time.monotonic()
    for _ in range(5):
        with ww.turn("here", device=name, ahead=True) as its:
            gpu.kernel(0.02)
            its.pause()
            gpu.kernel(0.02)
    assert mine(name).depth == 0
    assert time.monotonic() - began < 0.15  # the host did not wait for the kernels
    until(lambda: len(gpu.ended) == 10)
    until(lambda: rows(name)["here"]["state"] == "holds")
    assert rows(name)["here"]["turns"] == 5


def test_the_gpu_stands_at_a_gate_while_another_has_the_lease(
    gpu: Stream, name: str, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "HOST", LONG)
    waiter = start(WAITS.format(priority=1))
    assert waiter.hears() == "begins"
    parts, told = 0, threading.Event()
    threading.Thread(target=lambda: told.set() if waiter.hears() == "inside" else None, daemon=True).start()
    with ww.turn("here", device=name, ahead=True) as its:
        while not told.is_set() or parts < 20:
            gpu.kernel(5e-3)
            parts += 1
            time.sleep(2e-4)
            its.pause()
        done = len(gpu.ended)
        for _ in range(5):
            gpu.kernel(1e-3)
            time.sleep(2e-4)
            its.pause()  # the host goes on
        time.sleep(0.1)
        assert len(gpu.ended) == done < parts
        waiter.tell()
        until(lambda: len(gpu.ended) == parts + 5)
    assert waiter.hears() == "out"
