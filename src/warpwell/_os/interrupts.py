"""`uninterrupted` defers signal handlers to its end, `interruptible` defers Ctrl-C until a launch has been stopped."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` makes an enumeration of all that passes it
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_SIGINT = int(signal.SIGINT)
_SIGNALS = sorted({*map(int, signal.valid_signals())} - {int(signal.SIGKILL), int(signal.SIGSTOP)})

_replaced: dict[int, Any] = {}
"""The program's handlers of the signals that blocks of the main thread handle."""
_owner = 0
"""The thread of these blocks."""
_is_deferring = False
"""Whether it is in a block of `uninterrupted`."""


@contextlib.contextmanager
def _handling(handlers: dict[int, Any]) -> Iterator[None]:
    """Install signal handlers of the main thread for a block; keep those that the block installs in their place."""
    global _owner
    previous = {number: _signal.getsignal(number) for number in handlers}
    added = {number: handler for number, handler in previous.items() if number not in _replaced}
    try:
        _owner = threading.get_ident()
        _replaced.update(added)
        for number, handler in handlers.items():
            _signal.signal(number, handler)
        yield
    finally:
        try:
            for number, handler in reversed(handlers.items()):  # SIGINT after those that are rare
                if _signal.getsignal(number) is handler:
                    _signal.signal(number, previous[number])
        finally:
            for number in added:
                del _replaced[number]


def _after_fork() -> None:
    """Install the program's handlers in the child of another thread, where the blocks of the main thread never end."""
    global _is_deferring
    if _owner != threading.get_ident():
        _is_deferring = False
        for number, handler in _replaced.items():
            _signal.signal(number, handler)
        _replaced.clear()


os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer the Python handlers of all signals of the main thread to the end of the block, seconds later at most.

    LLVM calls Python back while it compiles, and prints and drops exceptions of handlers. A store changes its files and
    its index together. Other threads are never interrupted, and signals that Python does not handle are left as they
    are.
    """
    global _is_deferring
    if _is_deferring or threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: handler for number in _SIGNALS if callable(handler := _signal.getsignal(number))}
    deferred: dict[int, FrameType | None] = {}
    is_over = False

    def defer(number: int, frame: FrameType | None) -> None:
        if is_over:  # a handler that raised while others were installed again
            previous[number](number, frame)
        else:
            deferred.setdefault(number, frame)  # once, as the system keeps a signal that a program blocks

    def deliver() -> None:
        """Call the handlers, the later ones too if one raises."""
        try:
            number = next(iter(deferred))
            previous[number](number, deferred.pop(number))
        finally:
            if deferred:
                deliver()

    try:
        with _handling(dict.fromkeys(previous, defer)):
            _is_deferring = True
            try:
                yield
            finally:
                _is_deferring = False  # blocks of handlers that are installed again before the others defer signals
    finally:
        is_over = True
        if deferred:
            deliver()


class Interrupts:
    """The interrupts that came during a block; see `interruptible`."""

    def __init__(self, stop: Callable[[], object]) -> None:
        self.raised: list[BaseException] = []
        self.at_once = False
        """Whether a second interrupt raises at once, for blocks that do not look at `raised`."""
        self.leaves = True
        """Whether the block may return after a second interrupt, and leave what it waits for running."""
        self.caught = False
        self.outermost = False
        """Whether the block raises an interrupt at its end; else the block around it does."""
        self._stop = stop

    def record(self, error: BaseException) -> None:
        """Note an interrupt. The first one stops what the block waits for."""
        self.raised.append(error)
        if len(self.raised) == 1:
            self._stop()

    def catch(self, error: BaseException) -> None:
        """Note an exception that the handler of another signal raised while the block waited."""
        self.caught = True
        self.record(error)


@contextlib.contextmanager
def interruptible(stop: Callable[[], object]) -> Iterator[Interrupts]:
    """Call `stop` when an interrupt of the main thread would raise in the block, and raise at its end.

    So the block leaves nothing half done, and its waits end soon. The program's own handler is called at once; if that
    raises nothing, the block continues. Blocks within blocks are all stopped, and the outermost raises.
    `stop` runs between two lines of the block and takes no lock.
    """
    found = Interrupts(stop)
    previous = _signal.getsignal(_SIGINT)
    found.outermost = not hasattr(previous, "within")
    handled = threading.current_thread() is threading.main_thread() and callable(previous)

    def handle(number: int, frame: FrameType | None) -> BaseException | None:
        try:
            error: object = previous(number, frame)
        except BaseException as raised:  # kept for the end of the block
            error = raised
        if not isinstance(error, BaseException):
            return None
        found.record(error)
        if found.at_once and len(found.raised) > 1:
            raise error
        return error  # to the block within this one, whose handler called

    handle.within = True  # type: ignore[attr-defined]
    try:
        with _handling({_SIGINT: handle} if handled else {}):
            yield found
    finally:
        if found.raised and (found.caught or found.outermost):
            raise found.raised[0].with_traceback(None)
