"""Ctrl-C while something compiles."""

import os
import signal
import threading

import pytest

from warpwell._os import uninterrupted


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
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        with uninterrupted():
            interrupt()
            assert not seen
        assert seen == [signal.SIGINT]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with uninterrupted():
            interrupt()
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_leave_the_handler_alone() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
