"""Handles are futures of `concurrent.futures` and complete in every way of waiting."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError, as_completed, wait
from typing import Any

import pytest
from tests.harness.until import HANG_SECONDS

from warpwell import errors
from warpwell.scheduler.handle import RequestHandle, TaskFuture


class Runner:
    def cancel(self, handle: Any) -> bool:
        return False

    def state_of(self, handle: Any) -> Any:
        raise AssertionError("it has ended")


def future() -> TaskFuture:
    """Return the handle of a task."""
    return TaskFuture(Runner(), "task")


def test_the_outcome_is_known_without_waiting() -> None:
    made = future()
    assert not made.done() and not made.cancelled()
    made.settle(None)
    assert made.done() and made.result() is None and made.result(1.0) is None and not made.cancelled()
    assert made.exception() is None
    with pytest.raises(errors.ArgumentError, match="timeout"):
        made.result(float("nan"))
    made = future()
    threading.Timer(0.05, made.settle, [None]).start()
    assert made.result() is None


def test_ends_are_told_in_every_way() -> None:
    called: list[Any] = []
    for error, cancelled in ((None, False), (errors.KernelError("bad"), False), (None, True)):
        before, after, pending = future(), future(), future()
        for handle in (before, pending):
            handle.add_done_callback(called.append)
        with pytest.raises(TimeoutError):
            before.result(0.01)
        for handle in (before, after):
            handle.settle(error, cancelled)
        after.add_done_callback(called.append)
        assert called == [before, after]
        called.clear()
        assert wait([before, after, pending], timeout=0.01) == ({before, after}, {pending})
        assert set(as_completed([before, after], timeout=1)) == {before, after}
        for handle in (before, after):
            assert handle.done() and handle.cancelled() == cancelled
            if cancelled:
                with pytest.raises(CancelledError):
                    handle.result(1)
            else:
                assert handle.exception(1) is error


def test_a_callback_that_ends_its_thread_ends_no_other(caplog: pytest.LogCaptureFixture) -> None:
    made, called = future(), []
    for error in (SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt(), ValueError("bad")):
        made.add_done_callback(lambda _, error=error: (_ for _ in ()).throw(error))
    made.add_done_callback(called.append)
    thread = threading.Thread(target=made.settle, args=[None])
    thread.start()
    thread.join(HANG_SECONDS)
    assert called == [made] and len(caplog.records) == 4
    made = future()
    made.add_done_callback(lambda _: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):  # in the main thread, it is Ctrl-C
        made.settle(None)


def test_asyncio_hears_of_ends() -> None:
    async def all_of(handles: list[Any]) -> list[Any]:
        return await asyncio.gather(*map(asyncio.wrap_future, handles), return_exceptions=True)

    handles, bad = [future() for _ in range(3)], errors.KernelError("bad")
    for k, how in enumerate(((None, False), (bad, False), (None, True))):
        threading.Timer(0.02 * k, handles[k].settle, how).start()
    found = asyncio.run(all_of(handles))
    assert found[:2] == [None, bad] and isinstance(found[2], asyncio.CancelledError)


def test_a_request_ends_with_its_last_task_and_has_the_first_error() -> None:
    handles = [future() for _ in range(3)]
    request = RequestHandle("request", handles)
    handles[0].settle(None)
    assert not request.done() and not request.cancel()
    bad = errors.KernelError("bad")
    handles[1].settle(bad)
    assert not request.done()
    handles[2].settle(None, cancelled=True)
    assert request.exception(1) is bad and not request.cancelled() and wait([request], timeout=1).done == {request}
    handles = [future() for _ in range(2)]
    request = RequestHandle("request", handles)
    for handle in handles:
        handle.settle(None, cancelled=True)
    with pytest.raises(CancelledError):
        request.result(1)
    assert request.cancelled()
