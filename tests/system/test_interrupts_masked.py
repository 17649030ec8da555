"""Signals during blocks that defer them."""

import _signal
import os
import signal
import threading
import time
import weakref
from types import SimpleNamespace

import pytest

from warpwell._os import interruptible, interrupts, uninterrupted


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_comes_when_all_is_done() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        with uninterrupted():
            interrupt()
            done.append("inner")
        interrupt()
        done.append("outer")
    assert done == ["inner", "outer"]
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_it_comes_after_a_failure_too() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, uninterrupted():
        interrupt()
        raise ValueError("it does not compile")
    assert isinstance(caught.value.__context__, ValueError)


def test_who_handles_interrupts_is_called() -> None:
    handled = []
    before = signal.signal(signal.SIGINT, lambda number, _: handled.append(number))
    try:
        with uninterrupted():
            interrupt()
            assert not handled
        assert handled == [signal.SIGINT]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with uninterrupted():
            interrupt()
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_leave_the_handler_alone() -> None:
    before, handled = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with uninterrupted():
            handled.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handled == [before]


def test_all_handlers_are_called_at_the_end_also_after_one_that_raises() -> None:
    handled: list[int] = []

    def handle(number: int, _: object) -> None:
        handled.append(number)
        if number == signal.SIGTERM:
            raise SystemExit

    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.signal(number, handle) for number in numbers]
    try:
        with pytest.raises(SystemExit), uninterrupted():
            for number in numbers:
                os.kill(os.getpid(), number)
            assert not handled
        assert handled == list(numbers)
        assert [signal.getsignal(number) for number in numbers] == [handle, handle]
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_a_handler_that_is_called_while_others_are_installed_again_can_defer_signals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handled: list[str] = []

    def handle_second(*_: object) -> None:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGALRM)
            handled.append("second")

    def install(number: int, handler: object) -> None:
        _signal.signal(number, handler)
        if handler is handle_second and not handled:
            os.kill(os.getpid(), signal.SIGUSR2)

    before = [signal.signal(signal.SIGALRM, lambda *_: handled.append("first"))]
    before.append(signal.signal(signal.SIGUSR2, handle_second))
    monkeypatch.setattr(interrupts, "_signal", SimpleNamespace(signal=install, getsignal=_signal.getsignal))
    try:
        with uninterrupted():
            pass
        assert handled == ["second", "first"]
    finally:
        for number, handler in zip((signal.SIGALRM, signal.SIGUSR2), before, strict=True):
            signal.signal(number, handler)


def test_a_handler_is_called_once_for_the_signals_of_a_block() -> None:
    handled: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: handled.append(number))
    try:
        with uninterrupted():
            for _ in range(2000):  # a timer of 1 ms, while a kernel is compiled
                os.kill(os.getpid(), signal.SIGUSR1)
        assert handled == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("block", [uninterrupted, lambda: interruptible(lambda: None)])
def test_ctrl_c_raises_in_the_child_that_another_thread_forks_during_a_block(block) -> None:
    status = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            try:
                interrupt()
                time.sleep(10)
            except KeyboardInterrupt:
                os._exit(7)
            finally:
                os._exit(1)
        status.append(os.waitpid(child, 0)[1])

    with block():
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
    assert os.waitstatus_to_exitcode(status[0]) == 7
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_a_handler_that_was_replaced_is_not_kept():
    def handler(_number, _frame): ...

    reference = weakref.ref(handler)
    before = signal.signal(signal.SIGTERM, handler)
    with uninterrupted():
        pass
    signal.signal(signal.SIGTERM, before)
    del handler
    assert reference() is None
