"""`TimedQueue`: order, timeouts that end, and puts from wherever they come."""

from __future__ import annotations

import os
import signal
import threading
import time
from queue import Empty

import pytest
from tests.harness.until import HANG_SECONDS

from warpwell.pool.agent.timed_queue import TimedQueue


def test_order_and_timeouts() -> None:
    queue: TimedQueue[int] = TimedQueue()
    for k in range(5):
        queue.put(k)
    assert [queue.get(timeout=0) for _ in range(5)] == list(range(5))
    for timeout in (0, 0.05):  # the first get() finds that the lock was left unlocked
        with pytest.raises(Empty):
            queue.get(timeout=timeout)
    queue.put(7)
    assert queue.get() == 7


def test_a_put_wakes_who_waits() -> None:
    queue: TimedQueue[int] = TimedQueue()
    received: list[int] = []
    thread = threading.Thread(
        target=lambda: received.extend(queue.get(timeout=HANG_SECONDS) for _ in range(2000)), daemon=True
    )
    thread.start()
    for k in range(2000):
        queue.put(k)
        if k % 100 == 0:
            time.sleep(1e-3)
    thread.join(HANG_SECONDS)
    assert received == list(range(2000))


@pytest.mark.slow
def test_timeouts_of_microseconds_end() -> None:
    """`queue.SimpleQueue` sleeps without end after about ten thousand of these, on shared cores."""
    queue: TimedQueue[int] = TimedQueue()
    stop = threading.Event()
    spinning = [threading.Thread(target=lambda: [None for _ in iter(stop.is_set, True)], daemon=True) for _ in range(2)]
    for thread in spinning:
        thread.start()
    for number in range(20_000):
        queue.put(number)
        assert queue.get(timeout=2e-6) == number
        with pytest.raises(Empty):
            queue.get(timeout=2e-6)
    stop.set()


def test_a_signal_handler_puts_while_its_thread_gets() -> None:
    queue: TimedQueue[int] = TimedQueue()
    before = signal.signal(signal.SIGUSR1, lambda *_: queue.put(3))
    try:
        for wait in (60.0, None):
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            assert queue.get(wait) == 3
    finally:
        signal.signal(signal.SIGUSR1, before)
