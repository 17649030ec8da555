"""LaunchQueues: the native thread that launches kernels, over functions that stand for the driver's."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.harness.until import HANG_SECONDS

from warpwell._os import clock
from warpwell.scheduler.executors import launch_queues as module
from warpwell.scheduler.executors.launch_queues import LaunchQueue, LaunchQueues, address_of
from warpwell.targets.memory import view_of
from warpwell.targets.native import native
from warpwell.targets.primitives import SYSTEM, load_acquire

CALL_FIELDS = (ctypes.c_int64,) * 7


@native
def query(event, _a, _b, _c, _d, _e):
    return load_acquire(event, SYSTEM)


class Stream:
    def __init__(self, handle: int) -> None:
        self.handle = handle


class Driver:
    """A driver whose kernels complete on demand: `run` completes recorded events."""

    def __init__(self) -> None:
        self.launched: list[tuple[int, int]] = []
        self.recorded: list[int] = []
        self.refused: dict[int, int] = {}
        self.status = 0
        self._fields = np.full(1 << 14, module.NOT_READY, np.int64)
        self._used = 0
        self._streams = 0
        self._calls = [ctypes.CFUNCTYPE(*CALL_FIELDS)(call) for call in (self._launch, self._record)]
        self.queues = LaunchQueues(
            [*map(address_of, self._calls), query.address], self.events, self.stream, lambda: None
        )

    def events(self, count: int) -> list[int]:
        first, self._used = self._used, self._used + count
        return [int(self._fields.ctypes.data) + 8 * k for k in range(first, first + count)]

    def stream(self, priority: int) -> Stream:
        self._streams += 1
        return Stream(100 * (1 + priority) + self._streams)

    def _launch(self, row: int, function: int, *_: int) -> int:
        function -= 1
        stream = int(np.ctypeslib.as_array(ctypes.cast(row, ctypes.POINTER(ctypes.c_int64)), (7,))[4])
        if function in self.refused:
            return self.refused[function]
        self.launched.append((stream, function))
        return 0

    def _record(self, event: int, *_: int) -> int:
        self._fields[(event - int(self._fields.ctypes.data)) // 8] = module.NOT_READY
        self.recorded.append(event)
        return 0

    def run(self, count: int | None = None) -> None:
        """Complete the first `count` events, or make them fail."""
        for event in self.recorded[:count]:
            self._fields[(event - int(self._fields.ctypes.data)) // 8] = self.status
        del self.recorded[:count]


def kernel(number: int) -> Any:
    fields = np.zeros(9, np.int64)
    fields[7] = 1 + number  # without a function, nothing is launched
    return fields


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = Driver()
    yield made
    made.queues.close()


def until(condition: Any) -> None:
    limit = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < limit
        time.sleep(1e-4)


def take_queue(driver: Driver, priority: int) -> LaunchQueue:
    queue = driver.queues.take(priority)
    assert queue is not None
    return queue


def polled(queue: Any, count: int) -> list[tuple[Any, int]]:
    found: list[tuple[Any, int]] = []

    def more() -> bool:
        found.extend(entry[:2] for entry in queue.poll_completions())
        return len(found) >= count

    until(more)
    return found


def test_kernels_of_a_queue_are_launched_and_end_in_order(driver: Driver) -> None:
    queue, second = take_queue(driver, 0), take_queue(driver, 3)
    for number in range(20):
        queue.push(kernel(number), 10e-6, f"task {number}")
        second.push(kernel(1000 + number), 10e-6, None)
    until(lambda: len(driver.launched) == 40)
    for filled, first in ((queue, 0), (second, 1000)):
        handles = {stream for stream, number in driver.launched if first <= number < first + 20}
        assert handles == {filled.stream.handle}
        assert [n for stream, n in driver.launched if stream in handles] == list(range(first, first + 20))
    assert queue.poll_completions() == [] and not queue.empty  # nothing has ended yet
    found: list[Any] = []
    while len(found) < 20:
        driver.run()
        found += polled(queue, 1)
    assert found == [(f"task {k}", 0) for k in range(20)] and queue.empty


def test_what_others_gave_a_stream_ends_in_its_turn(driver: Driver) -> None:
    queue = take_queue(driver, 0)
    for owner, row in enumerate((kernel(1), module.NOTHING, kernel(2))):
        queue.push(row, 0.0, owner)
    assert queue.follows(2, 2) and queue.follows(1, 2) and not queue.follows(0, 2) and not queue.follows(1, 0)
    until(lambda: len(driver.recorded) == 3)
    assert [number for _, number in driver.launched] == [1, 2]
    driver.run(2)
    assert polled(queue, 2) == [(0, 0), (1, 0)] and not queue.follows(2, 2)
    driver.run()
    assert polled(queue, 1) == [(2, 0)] and queue.empty


def test_an_end_is_told_once_with_its_times(driver: Driver) -> None:
    queue = take_queue(driver, 0)
    before = clock.monotonic()
    queue.push(kernel(7), 0.0, "task")
    until(lambda: len(driver.recorded) == 1)
    driver.run()
    found: list[Any] = []
    until(lambda: found.extend(queue.poll_completions()) or found)  # type: ignore[func-returns-value]
    [(owner, status, started, ended)] = found
    assert (owner, status) == ("task", 0) and before <= started <= ended <= clock.monotonic()
    assert queue.empty and queue.poll_completions() == []


def test_no_more_is_on_the_gpu_than_should_be_and_the_rest_may_be_withdrawn(driver: Driver) -> None:
    queue = take_queue(driver, 0)
    numbers = [queue.push(kernel(k), 0.9 * module.AHEAD_NS * 1e-9, k) for k in range(8)]
    until(lambda: len(driver.launched) == 2)
    time.sleep(0.02)
    assert len(driver.launched) == 2  # one launch runs, and the next one is on the device when it ends
    assert queue.withdraw(numbers[5]) and not queue.withdraw(numbers[5]) and not queue.withdraw(numbers[0])
    ends: list[tuple[Any, int]] = []
    while len(ends) < 8:
        until(lambda: driver.recorded)
        driver.run(1)
        ends += polled(queue, 1)
    assert ends == [(k, -1 if k == 5 else 0) for k in range(8)]
    assert [number for _, number in driver.launched] == [0, 1, 2, 3, 4, 6, 7]


def test_the_last_ones_may_be_withdrawn(driver: Driver) -> None:
    queue = take_queue(driver, 0)
    numbers = [queue.push(kernel(k), 0.9 * module.AHEAD_NS * 1e-9, k) for k in range(4)]
    until(lambda: len(driver.launched) == 2)
    assert queue.withdraw(numbers[2]) and queue.withdraw(numbers[3])
    until(lambda: len(driver.recorded) == 2)
    driver.run()
    assert polled(queue, 4) == [(0, 0), (1, 0), (2, -1), (3, -1)]
    assert queue.empty


def test_what_the_driver_refuses_ends_in_its_turn_and_the_others_run(driver: Driver) -> None:
    driver.refused[1] = 701
    queue = take_queue(driver, 0)
    for k in range(3):
        queue.push(kernel(k), 1e-3, k)
    until(lambda: len(driver.recorded) == 2)
    driver.run()
    assert polled(queue, 3) == [(0, 0), (1, 701), (2, 0)]


def test_a_lost_gpu_ends_everything_with_its_status(driver: Driver) -> None:
    queue = take_queue(driver, 0)
    for k in range(3):
        queue.push(kernel(k), 1e-3, k)
    until(lambda: len(driver.recorded) >= 1)
    driver.status = 700
    driver.run()
    assert {status for _, status in polled(queue, 2)} == {700}


def test_queues_are_given_back_and_there_are_not_endless_ones(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_QUEUES", 2)
    first, second = take_queue(driver, 0), take_queue(driver, 1)
    assert driver.queues.take(0) is None
    driver.queues.put(first)
    assert driver.queues.take(0) is first and driver.queues.take(0) is None and second is not first
    driver.queues.put(first)
    assert driver.queues.take(1) is first  # a queue of another priority, if the requested one has no queue


def test_a_ring_of_rows_is_used_again(driver: Driver) -> None:
    queue = take_queue(driver, 0)
    stop = threading.Event()

    def runs() -> None:
        while not stop.is_set():
            driver.run()
            time.sleep(1e-4)

    thread = threading.Thread(target=runs)
    thread.start()
    ends: list[tuple[Any, int]] = []
    launched: list[int] = []
    k = 0
    while k < 3 * module.SLOTS:
        if not queue.room:
            ends += polled(queue, 1)
        assert queue.push(kernel(k), 1e-6, k) == k
        launched.append(k)
        k += 1
    ends += polled(queue, 3 * module.SLOTS - len(ends))
    stop.set()
    thread.join()
    assert ends == [(k, 0) for k in range(3 * module.SLOTS)]
    assert [function for _, function in driver.launched] == launched


def test_who_waits_is_woken_by_an_end_and_by_others_and_by_the_time(driver: Driver) -> None:
    queues = driver.queues
    queue = take_queue(driver, 0)
    start = clock.monotonic()
    queues.watch(queues.news, start + 0.05, 0.0)
    assert clock.monotonic() >= start + 0.05
    timer = threading.Timer(0.05, queues.wake)
    timer.start()
    queues.watch(queues.news, clock.monotonic() + HANG_SECONDS, 0.0)
    assert queues.woken
    queues.watch(queues.news, clock.monotonic() + HANG_SECONDS, 0.0)  # returns at once: the wake-up is remembered
    timer.join()
    queues.clear_wake()
    queues.nudge()
    start = clock.monotonic()
    queues.watch(queues.news - 1, 0.0, 0.0, start + 0.05)  # there is news, for which the caller may wait longer
    assert start + 0.05 <= clock.monotonic()
    timer = threading.Timer(0.05, queues.wake)
    timer.start()
    queues.watch(queues.news - 1, 0.0, 0.0, clock.monotonic() + HANG_SECONDS)
    timer.join()
    queues.clear_wake()
    queue.push(kernel(0), 0.0, None)
    until(lambda: driver.recorded)
    # `news` is read first, because the launch may end at once.
    timer, news = threading.Timer(0.05, driver.run), queues.news
    timer.start()
    queues.watch(news, clock.monotonic() + HANG_SECONDS, 0.0)
    assert not queues.woken and queue.poll_completions()
    timer.join()
    assert clock.monotonic() - start < HANG_SECONDS


def test_a_thread_that_sleeps_is_woken_by_work(driver: Driver) -> None:
    """Without a wake-up it sleeps on: the longest sleep has no end here."""
    queue, libc = take_queue(driver, 0), ctypes.CDLL(None)

    @ctypes.CFUNCTYPE(*CALL_FIELDS)
    def ppoll(descriptors: int, count: int, timeout: int, *_: int) -> int:
        seconds, nanos = view_of(timeout, 16, np.int64).tolist()
        limit = timeout if seconds * 10**9 + nanos < module.NAP_NS else None
        return int(libc.ppoll(ctypes.c_void_p(descriptors), ctypes.c_ulong(count), ctypes.c_void_p(limit), None))

    driver.queues._state[module.PPOLL // 8] = address_of(ppoll)
    for _ in range(3):
        until(lambda: driver.queues._state[(module.WORKER + module.ASLEEP) // 8])
        queue.push(kernel(0), 0.0, None)
        until(lambda: driver.recorded)
        driver.run()
        polled(queue, 1)
    driver.queues.close()  # it calls `ppoll`
