"""Handles are futures of `concurrent.futures`, though they make what waiting needs only when somebody waits."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, _base, as_completed, wait
from types import SimpleNamespace
from typing import Any

import pytest
from tests.harness.ctrl_c import interrupted_everywhere
from tests.harness.until import HANG_SECONDS

from warpwell import errors
from warpwell.scheduler import handle as handles_of
from warpwell.scheduler.handle import TaskFuture
from warpwell.scheduler.series import Series, SeriesHandle
from warpwell.scheduler.task import Pattern, Task


class Runner:
    def cancel(self, handle: Any) -> bool:
        return False

    def state_of(self, handle: Any) -> Any:
        raise AssertionError("it has ended")


def future(kind: str) -> TaskFuture:
    """Return a handle: of a task by itself, or the second one of a series."""
    return TaskFuture(Runner(), "task") if kind == "one" else series(SeriesHandle)[1]


def series(kind: type[SeriesHandle], count: int = 3) -> list[Any]:
    made = Series(Runner(), Pattern(Task("task", 1)), ())
    handles = [made.add() for _ in range(count)]
    for handle in handles:
        handle.__class__ = kind
    return handles


kinds = pytest.mark.parametrize("kind", ["one", "series"])


@kinds
def test_one_that_nobody_waits_for_has_no_lock(kind: str) -> None:
    made = future(kind)
    assert not made.done() and not made.cancelled()
    made.settle(None)
    assert made.done() and made.result() is None and made.result(1.0) is None and not made.cancelled()
    assert made.exception() is None
    with pytest.raises(errors.ArgumentError, match="timeout"):
        made.result(float("nan"))
    made = future(kind)
    threading.Timer(0.05, made.settle, [None]).start()
    assert made.result() is None
    assert made._looks is None and made._own_waiters is None and made._own_callbacks is None


@kinds
def test_ends_are_told_in_every_way(kind: str) -> None:
    called: list[Any] = []
    for error, cancelled in ((None, False), (errors.KernelError("bad"), False), (None, True)):
        before, after, none = future(kind), future(kind), future(kind)
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


@kinds
def test_a_callback_that_ends_its_thread_ends_no_other(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    made, called = future(kind), []
    for error in (SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt(), ValueError("bad")):
        made.add_done_callback(lambda _, error=error: (_ for _ in ()).throw(error))
    made.add_done_callback(called.append)
    thread = threading.Thread(target=made.settle, args=[None])
    thread.start()
    thread.join(HANG_SECONDS)
    assert called == [made] and len(caplog.records) == 4
    made = future(kind)
    made.add_done_callback(lambda _: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):  # in the main thread, it is Ctrl-C
        made.settle(None)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@kinds
def test_a_child_forked_while_others_come_to_wait_waits_for_its_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []

    def lock() -> Any:
        """Fork in another thread while this one makes what it waits for."""
        if not found:
            thread = threading.Thread(target=forks)
            thread.start()
            thread.join(HANG_SECONDS)
        return threading.Lock()

    def forks() -> None:
        found.append(os.fork())
        if not found[0]:
            signal.alarm(30)  # ends it if it waits for ever
            own = future(kind)
            threading.Timer(0.05, own.settle, [None]).start()
            os._exit(0 if own.result(HANG_SECONDS) is None else 1)

    monkeypatch.setattr(handles_of, "threading", SimpleNamespace(**{**vars(threading), "Lock": lock}))
    with pytest.raises(TimeoutError):
        future(kind).result(0.05)
    assert os.waitstatus_to_exitcode(os.waitpid(found[0], 0)[1]) == 0


@kinds
def test_asyncio_hears_of_ends(kind: str) -> None:
    async def all_of(handles: list[Any]) -> list[Any]:
        return await asyncio.gather(*map(asyncio.wrap_future, handles), return_exceptions=True)

    handles, bad = [future(kind) for _ in range(3)], errors.KernelError("bad")
    for k, how in enumerate(((None, False), (bad, False), (None, True))):
        threading.Timer(0.02 * k, handles[k].settle, how).start()
    found = asyncio.run(all_of(handles))
    assert found[:2] == [None, bad] and isinstance(found[2], asyncio.CancelledError)


def test_the_tasks_of_a_series_end_each_by_itself_and_are_kept_until_then() -> None:
    handles = series(SeriesHandle, 5)
    its, kept = handles[0]._series, [weakref.ref(handle) for handle in handles]
    handles[3].settle(None)
    handles[1].settle(None, cancelled=True)
    assert [handle.done() for handle in handles] == [False, True, False, True, False]
    handles.clear()
    assert [ref() is None for ref in kept] == [False, True, False, True, False]  # by no collector: there is no cycle
    assert wait([kept[2]()], timeout=0.01).not_done
    for index in (0, 2, 4):
        its.settle(index)
    assert all(ref() is None for ref in kept) and not its.awaited


class Watched(TaskFuture):
    """Lets somebody come when its end is noted, before or after."""

    comes: dict[str, Callable[[], None]]

    def __setattr__(self, name: str, value: object) -> None:
        if name == "_live_state":
            self.comes.pop("before", int)()
        super().__setattr__(name, value)
        if name == "_live_state":
            self.comes.pop("after", int)()


class WatchedEnds(bytearray):
    """The same for a series."""

    comes: dict[str, Callable[[], None]]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.comes.pop("before", int)()
        super().__setitem__(index, value)
        self.comes.pop("after", int)()


@pytest.mark.parametrize("when", ["before", "after"])
@kinds
def test_who_comes_to_wait_at_the_end_hears_of_it(when: str, kind: str) -> None:
    called: list[Any] = []
    ended: list[Any] = []
    threads: list[threading.Thread] = []
    made: Any = Watched(Runner(), "task") if kind == "one" else future(kind)
    watched: Any = made
    if kind == "series":
        watched = made._series.ends = WatchedEnds(made._series.ends)

    def comes() -> None:
        made.add_done_callback(called.append)
        for waits in (lambda: made.result(HANG_SECONDS), lambda: wait([made], timeout=HANG_SECONDS).done or 1 / 0):
            threads.append(threading.Thread(target=lambda waits=waits: ended.append(waits())))
            threads[-1].start()
        while when == "before" and len(made._own_waiters or ()) < 1:  # the second waits, and the first one does soon
            time.sleep(1e-3)

    watched.comes = {when: comes}
    made.settle(None)
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert called == [made] and len(ended) == 2 and not watched.comes


def in_a_thread(function: Callable[..., Any], *arguments: Any) -> threading.Thread:
    """Call a function in a thread, and wait a second for it."""
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    thread.join(1)
    return thread


@pytest.mark.parametrize("how", ["wait", "as_completed"])
@kinds
def test_tasks_may_end_while_somebody_comes_to_wait_for_several(
    how: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, meanwhile, behind = made = [future(kind) for _ in range(3)]
    comes = _base._create_and_install_waiters  # type: ignore[attr-defined]

    class Looks(_base._AcquireFutures):  # type: ignore[misc, name-defined]
        def __enter__(self) -> None:
            super().__enter__()
            if not before.done():
                in_a_thread(before.settle, None)

    def coming(*about: Any) -> Any:
        waiter = comes(*about)
        in_a_thread(meanwhile.settle, None)
        threading.Timer(0.1, behind.settle, [None]).start()
        return waiter

    monkeypatch.setattr(_base, "_AcquireFutures", Looks)
    monkeypatch.setattr(_base, "_create_and_install_waiters", coming)
    found = wait(made, 20).done if how == "wait" else list(as_completed(made, 20))
    assert set(found) == set(made) and len(found) == 3


@kinds
def test_who_is_interrupted_while_it_comes_to_wait_keeps_nobody_from_the_end(kind: str) -> None:
    made, called = future(kind), []
    made._condition.acquire()  # as `wait` does, and Ctrl-C comes before it releases it
    others = [in_a_thread(wait, [made], 20), in_a_thread(made.add_done_callback, called.append)]
    others.append(in_a_thread(made.settle, None))
    for thread in others:
        thread.join(HANG_SECONDS)
    assert not any(thread.is_alive() for thread in others) and called == [made]
    assert wait([made], 20).done == {made} and made.result(HANG_SECONDS) is None


@kinds
def test_ctrl_c_wherever_it_comes_keeps_nobody_from_the_end(kind: str) -> None:
    made = [future(kind)]

    def ends() -> None:
        thread = threading.Thread(target=made[0].settle, args=[None])
        thread.start()
        thread.join(HANG_SECONDS)
        assert not thread.is_alive() and made[0].result(HANG_SECONDS) is None
        made[0] = future(kind)

    assert interrupted_everywhere(lambda: wait([made[0]], timeout=1e-3), ends) > 20
    assert interrupted_everywhere(lambda: made[0].exception(-1), ends) > 5


@kinds
def test_the_end_may_come_while_who_waits_makes_what_it_waits_for(kind: str) -> None:
    failed: list[BaseException] = []

    def settles(made: TaskFuture, *, cancelled: bool) -> None:
        try:
            made.settle(None, cancelled)
        except BaseException as error:  # it would end the scheduler's thread, and all of its tasks
            failed.append(error)

    class Ends(TaskFuture if kind == "one" else SeriesHandle):  # type: ignore[misc]
        cancelled_then = False

        def _made(self, name: str, make: Any) -> Any:
            made = super()._made(name, make)
            if name == "_event":
                thread = threading.Thread(target=settles, args=(self,), kwargs={"cancelled": self.cancelled_then})
                thread.start()
                thread.join(HANG_SECONDS)
            return made

    def ends() -> Any:
        return Ends(Runner(), "task") if kind == "one" else series(Ends)[1]

    made = ends()
    assert made.result(HANG_SECONDS) is None and failed == []
    made = ends()
    made.cancelled_then = True
    with pytest.raises(CancelledError):
        made.result(HANG_SECONDS)
    assert failed == []
