"""Ctrl-C where Python would drop it: in a finalizer, and while Python reports what a finalizer raised."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable

import pytest

from warpwell.pool.launch import application

SECONDS = 60.0


class Finalized:
    """Calls a function in its finalizer."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def __del__(self) -> None:
        self.act()


class Pressed:
    """A standard error on which each write meets a Ctrl-C; Python silently drops exceptions of these writes."""

    def write(self, text: str) -> int:
        press()
        return len(text)

    def flush(self) -> None:
        pass


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def fail() -> None:
    raise ValueError("on purpose")


def finalize(act: Callable[[], object]) -> None:
    Finalized(act)


def no_report(unraisable: object) -> None:
    press()


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", application._raise_again)


def test_in_a_finalizer(hook: None) -> None:
    with pytest.raises(KeyboardInterrupt):
        finalize(press)
        time.sleep(SECONDS)


def test_in_one_finalizer_after_the_other(hook: None) -> None:
    """The repeated interrupt arrives in a finalizer, too."""
    with pytest.raises(KeyboardInterrupt):
        finalize(press)
        finalize(lambda: time.sleep(SECONDS))
        time.sleep(SECONDS)


@pytest.mark.parametrize("reporting", ["stderr", "__unraisablehook__"])
def test_while_python_reports_another_exception(hook: None, reporting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, reporting, Pressed() if reporting == "stderr" else no_report)
    with pytest.raises(KeyboardInterrupt):
        finalize(fail)
        time.sleep(SECONDS)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_exceptions_are_reported_and_none_is_repeated(hook: None, capsys: pytest.CaptureFixture[str]) -> None:
    finalize(fail)
    time.sleep(5 * application._REPEAT_SECONDS)
    assert "on purpose" in capsys.readouterr().err


def test_none_comes_after_the_program(hook: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "_ended", True)
    finalize(press)
    time.sleep(5 * application._REPEAT_SECONDS)
