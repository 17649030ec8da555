"""Handles are futures of `concurrent.futures`, though they make what waiting needs only when somebody waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, as_completed, wait
from typing import Any

import pytest

from warpwell import errors
from warpwell.scheduler.handle import TaskFuture


class Runner:
    def cancel(self, handle: Any) -> bool:
        return False

    def state_of(self, handle: Any) -> Any:
        raise AssertionError("it has ended")


def future() -> TaskFuture:
    return TaskFuture(Runner(), "task")


def test_one_that_nobody_waits_for_has_no_lock() -> None:
    made = future()
    made.settle(None)
    assert made.done() and made.result() is None and made.result(1.0) is None and not made.cancelled()
    assert made._own_condition is None and made._own_waiters is None and made._own_callbacks is None
    with pytest.raises(errors.ArgumentError, match="timeout"):
        made.result(float("nan"))


def test_ends_are_told_in_every_way() -> None:
    called: list[Any] = []
    for error, cancelled in ((None, False), (errors.KernelError("bad"), False), (None, True)):
        before, after, none = future(), future(), future()
        for one in (before, none):
            one.add_done_callback(called.append)
        with pytest.raises(TimeoutError):
            before.result(0.01)
        for one in (before, after):
            one.settle(error, cancelled)
        after.add_done_callback(called.append)
        assert called == [before, after]
        called.clear()
        assert wait([before, after, none], timeout=0.01) == ({before, after}, {none})
        assert set(as_completed([before, after], timeout=1)) == {before, after}
        for one in (before, after):
            assert one.done() and one.cancelled() == cancelled
            if cancelled:
                with pytest.raises(CancelledError):
                    one.result(1)
            else:
                assert one.exception(1) is error


class Watched(TaskFuture):
    """Lets somebody come when its state changes, before or after."""

    comes: dict[str, Callable[[], None]]

    def __setattr__(self, name: str, value: object) -> None:
        if name == "_state":
            self.comes.pop("before", int)()
        super().__setattr__(name, value)
        if name == "_state":
            self.comes.pop("after", int)()


@pytest.mark.parametrize("when", ["before", "after"])
def test_who_comes_to_wait_at_the_end_hears_of_it(when: str) -> None:
    made, called, ended = Watched(Runner(), "task"), [], []
    threads: list[threading.Thread] = []

    def comes() -> None:
        made.add_done_callback(called.append)
        for waits in (lambda: made.result(10), lambda: wait([made], timeout=10).done or 1 / 0):
            threads.append(threading.Thread(target=lambda waits=waits: ended.append(waits())))
            threads[-1].start()
        while when == "before" and len(made._waiters) < 1:  # the second waits, and the first one does soon
            time.sleep(1e-3)

    made.comes = {when: comes}
    made.settle(None)
    for thread in threads:
        thread.join(20)
    assert called == [made] and len(ended) == 2 and not made.comes


def test_the_end_may_come_while_who_waits_makes_what_it_waits_for() -> None:
    failed: list[BaseException] = []

    def settles(made: TaskFuture, *, cancelled: bool) -> None:
        try:
            made.settle(None, cancelled)
        except BaseException as error:  # it would end the scheduler's thread, and all of its tasks
            failed.append(error)

    class Ends(TaskFuture):
        cancelled_then = False

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "_gate" and value is not None:
                thread = threading.Thread(target=settles, args=(self,), kwargs={"cancelled": self.cancelled_then})
                thread.start()
                thread.join(10)

    made = Ends(Runner(), "task")
    assert made.result(10) is None and failed == []
    made = Ends(Runner(), "task")
    made.cancelled_then = True
    with pytest.raises(CancelledError):
        made.result(10)
    assert failed == []
