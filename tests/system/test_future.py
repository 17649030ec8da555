"""`Future`: completed by another thread or by polling, in the process that started the work."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import signal
import threading
from typing import Any

import pytest
from tests.harness.turns import interruptions
from tests.harness.until import HANG_SECONDS

from warpwell import _future, errors
from warpwell._future import Future


class Work:
    """Work that finishes when `finish` has been called."""

    def __init__(self) -> None:
        self.polls = 0
        self.end: Any = None
        self.inner: list[bool] = []

    def poll(self, future: Future) -> None:
        self.polls += 1
        self.inner.append(future.done())
        if isinstance(self.end, Exception):
            future.set_exception(self.end)
        elif self.end is not None:
            future.set_result(self.end)


class Cancellable(Future):
    def cancel(self) -> bool:
        return True


def test_a_poll_completes_the_future_once_and_may_ask_for_it() -> None:
    work = Work()
    future = Future("copy", work.poll)
    assert not future.done() and future.running() and repr(future) == "<Future: copy, running>"
    with pytest.raises(TimeoutError, match=r"the copy is not done after 0\.01 s: wait longer$"):
        future.result(0.01)
    with pytest.raises(TimeoutError, match=r"wait longer, or cancel\(\) it$"):
        Cancellable("copy", work.poll).result(0.01)
    assert not future.cancel() and not any(work.inner)
    work.end = 7
    assert future.result() == 7 and future.done() and future.exception() is None
    assert repr(future) == "<Future: copy, done>"
    polls = work.polls
    assert future.result(0) == 7 and work.polls == polls


def test_the_exception_of_a_poll_is_raised_by_each_result() -> None:
    work = Work()
    future = Future("copy", work.poll)
    work.end = ValueError("lost")
    for _ in range(2):
        with pytest.raises(ValueError, match="lost"):
            future.result()
    assert future.exception() is work.end


def test_a_poll_that_fails_is_called_again() -> None:
    calls: list[int] = []

    def poll(future: Future) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        future.set_result(1)

    future = Future("copy", poll)
    with pytest.raises(KeyboardInterrupt):
        future.done()
    assert future.result() == 1


def test_another_thread_completes_the_future() -> None:
    future = Future("read")
    assert not future.done() and not future.cancel()
    with pytest.raises(TimeoutError, match="the read is not done"):
        future.exception(0.01)
    threading.Timer(0.05, future.set_result, ["rows"]).start()
    assert concurrent.futures.wait([future], 60).done == {future} and future.result() == "rows"

    async def read() -> Any:
        later = Future("read")
        threading.Timer(0.05, later.set_result, [1]).start()
        return await asyncio.wrap_future(later)

    assert asyncio.run(read()) == 1


@pytest.mark.parametrize("timeout", [-1, float("nan"), "soon"])
def test_a_wrong_timeout_is_refused(timeout: Any) -> None:
    with pytest.raises(errors.ArgumentError, match="timeout"):
        Future("read").result(timeout)


def test_a_forked_child_is_refused_and_waits_for_nothing() -> None:
    future = Future("read", lambda future: pytest.fail("polled in the child"))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            done, cancelled = future.done(), future.cancel()
            try:
                future.result()
            except errors.ForkError:
                os.write(writer, b"refused" if (done, cancelled) == (True, False) else b"wrong")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 20) == b"refused"
    os.close(reader)
    os.close(writer)


def test_ctrl_c_ends_a_wait_that_the_signal_does_not_wake() -> None:
    future = Future("read")

    def interrupt() -> None:  # as if the signal came just before the main thread sleeps
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.2, interrupt).start()
        future.result(HANG_SECONDS)
    future.set_result(7)
    assert future.result() == 7


def test_ctrl_c_in_a_wait_leaves_a_future_that_another_thread_can_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_future, "SIGNAL_CHECK_SECONDS", 1e-4)
    futures: list[Future] = []

    def wait() -> None:
        futures.append(Future("read"))
        with contextlib.suppress(TimeoutError):
            futures[-1].result(5e-4)

    for line in interruptions(wait, "warpwell/_future.py", "/_base.py", "/threading.py", least=30):
        while futures:
            future = futures.pop()
            thread = threading.Thread(target=future.set_result, args=[7], daemon=True)
            thread.start()
            thread.join(HANG_SECONDS)
            assert not thread.is_alive() and future.result(HANG_SECONDS) == 7, line
