"""One pool of service threads for all controllers of a process."""

import contextlib
import gc
import os
import signal
import threading
import time

import numpy as np
import pytest
from tests.harness.clock import time_passes
from tests.harness.turns import interruptions
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from lab.media import Faulty
from warpwell import errors, gpu
from warpwell.storage import RamMedium, io_threads
from warpwell.storage.medium import PythonMedium

ITEMS = 2048
TIMEOUT = 1000.0
"""Timeout in seconds on the clock of the test, not in real time."""


@ww.kernel
def add_up(a, out):
    i = gpu.grid(1)
    if i < a.size:
        gpu.atomic_add(out, 0, a[i])


def opened(number: int = 0, **options: object) -> ww.Array:
    medium = options.pop("medium", None) or RamMedium(np.arange(number, number + ITEMS))
    return ww.open(medium, dtype=np.int64, device="cpu", tier="storage", cache=4096, page_size=1024, **options)


def total(a: ww.Array) -> int:
    out = np.zeros(1, np.int64)
    add_up[64](a, out)
    return int(out[0])


WANT = sum(range(64))


def service_threads() -> int:
    return sum(t.name.startswith("warpwell-io") for t in threading.enumerate())


class Blocked(PythonMedium):
    """It answers nothing until it is released."""

    def __init__(self) -> None:
        super().__init__(8 * ITEMS)
        self.entered, self.released = threading.Event(), threading.Event()

    def read(self, offset: int, nbytes: int) -> np.ndarray:
        self.entered.set()
        assert self.released.wait(HANG_SECONDS)
        return np.arange(offset // 8, (offset + nbytes) // 8).view(np.uint8)


def test_many_arrays_share_threads() -> None:
    arrays = [opened(k) for k in range(150)]
    try:
        for k, a in enumerate(arrays):
            assert total(a) == WANT + 64 * k
            # One more is started for an array without a thread while the others finish elsewhere: on a busy machine
            # many do. With threads of its own for each array there would be 150, or 8 times that.
            assert service_threads() < 150
        until(lambda: service_threads() <= 16)
    finally:
        for a in arrays:
            a.close()
    assert io_threads.current().active_threads == 0


def test_threads_park_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_threads, "IDLE_TIMEOUT", 0.2)
    with opened() as a:
        assert total(a) == WANT
        pool = io_threads.current()
        assert until(lambda: pool.active_threads == 0)  # the array is open, but nothing is to be done
        assert until(lambda: pool.threads == 0 or service_threads() > 0)
        # Threads that remained until now belong to other tests.
        assert total(a) == WANT


def test_threads_says_how_many_serve_an_array_at_once() -> None:
    with opened(threads=2) as a, a.cache.controller.active():
        assert a.cache.controller.threads == 2
        assert until(lambda: len(a.cache.controller._slots.occupied) == 2)
        time.sleep(0.05)
        assert len(a.cache.controller._slots.occupied) == 2


def test_media_that_block_delay_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of them could hold more threads than there are."""
    monkeypatch.setattr(io_threads, "MAX_THREADS", 4)
    media = [Blocked() for _ in range(3)]
    arrays = [opened(medium=m, timeout=TIMEOUT) for m in media]
    results: list[int] = []
    launches = [threading.Thread(target=lambda a=a: results.append(total(a))) for a in arrays]
    try:
        for launch in launches:
            launch.start()
        assert all(m.entered.wait(HANG_SECONDS) for m in media)
        for k in range(5):
            with opened(k) as array:
                assert total(array) == WANT + 64 * k
        assert results == []
    finally:
        for m in media:
            m.released.set()
        for launch in launches:
            launch.join(HANG_SECONDS)
    assert results == [WANT] * 3
    for a in arrays:
        a.close()


def test_arrays_open_and_close_beside_launches() -> None:
    stop, failed, rounds = threading.Event(), [], [0, 0]

    def launch(k: int) -> None:
        try:
            with opened(k) as a:
                while not stop.is_set():
                    assert total(a) == WANT + 64 * k
                    rounds[k] += 1
        except BaseException as error:
            failed.append(error)

    launchers = [threading.Thread(target=launch, args=(k,)) for k in range(2)]
    for thread in launchers:
        thread.start()
    try:
        for k in range(100):
            a = opened(k)
            if k % 10 == 0:
                assert total(a) == WANT + 64 * k
            if k % 3:
                a.close()
            del a
        gc.collect()
        assert until(lambda: min(rounds) > 1 or failed)
    finally:
        stop.set()
        for thread in launchers:
            thread.join(HANG_SECONDS)
    assert not failed
    assert until(lambda: io_threads.current().active_threads == 0)


def test_a_lost_command_keeps_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    medium = Faulty(RamMedium(np.arange(ITEMS)), silent_after=0)
    a = opened(medium=medium, timeout=TIMEOUT)
    with time_passes(TIMEOUT):
        with pytest.raises(errors.StallError):
            total(a)
        seats = a.cache.controller._slots
        assert until(lambda: len(seats.occupied) == 1)
        a.close()
    assert seats.occupied == set()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own() -> None:
    with opened(3) as a:
        assert total(a) == WANT + 192
        child = os.fork()
        if child == 0:
            code = 1
            try:
                pool = io_threads.current()
                assert pool.threads == 0
                a.cache.controller.close()  # its threads are the parent's
                with opened(5) as array:
                    assert total(array) == WANT + 320
                code = 0 if io_threads.current() is pool and pool.threads else 2
            finally:
                os._exit(code)
        deadline = time.monotonic() + HANG_SECONDS
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        if ended[0] == 0:
            os.kill(child, 9)
            os.waitpid(child, 0)
        assert ended[0] and os.waitstatus_to_exitcode(ended[1]) == 0
        assert total(a) == WANT + 192


def test_threads_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch fails, and leaves nothing behind."""
    monkeypatch.setattr(io_threads, "_pool", io_threads.IOThreadPool())
    with opened() as a:

        def refuse(_: object) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="start"):
                a.cache.controller.begin()
        assert a.cache.controller._client(a.cache.pairs).launches == 0
        assert total(a) == WANT


def test_a_client_is_served_again_after_an_exception(caplog: pytest.LogCaptureFixture) -> None:
    work, served = ["fails", "succeeds"], threading.Event()

    def serve(_: int) -> None:
        if work.pop(0) == "fails":
            raise ValueError("on purpose")
        served.set()

    slots = io_threads.WorkerSlots(lambda: min(1, len(work)), serve, lambda: None)
    io_threads.current().submit(slots)
    assert served.wait(HANG_SECONDS) and until(lambda: not slots.occupied)
    assert "an I/O thread failed" in caplog.text and "on purpose" in caplog.text


def test_an_interrupt_of_a_caller_leaves_the_pool_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_threads, "IDLE_TIMEOUT", 0.01)
    served: list[int] = []

    def needs_two() -> io_threads.WorkerSlots:
        left = [1, 1]
        return io_threads.WorkerSlots(lambda: len(left), lambda slot: served.append(left.pop()), lambda: None)

    def submit() -> None:
        pools.append(io_threads.IOThreadPool())
        with contextlib.suppress(RuntimeError):  # `threading` may find the lock of a new thread's event released
            pools[-1].submit(needs_two())
            pools[-1].submit(needs_two())

    pools: list[io_threads.IOThreadPool] = []
    for position in interruptions(submit, "storage/io_threads.py", "/threading.py"):
        pool = pools.pop() if pools else io_threads.IOThreadPool()
        served.clear()
        thread = threading.Thread(target=pool.submit, args=[needs_two()], daemon=True)
        thread.start()
        thread.join(HANG_SECONDS)
        assert not thread.is_alive(), position
        assert until(lambda: len(served) >= 2), position


def test_an_interrupt_as_an_array_becomes_active_counts_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    a = opened()
    begin = a.cache.begin

    def interrupted(*arguments: object) -> None:
        begin(*arguments)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(a.cache, "begin", interrupted)
    with pytest.raises(KeyboardInterrupt), a.active():
        pass
    monkeypatch.undo()
    a.close()  # which raises while a launch uses the array
