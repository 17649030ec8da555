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
_SYSTEM_HANDLERS = (int(signal.SIG_DFL), int(signal.SIG_IGN), None)
"""Values of `getsignal` for signals that Python does not handle."""

_handlers_then: tuple[list[int], list[int]] = [], []
"""The ids of the handlers of `_SIGNALS` when they were last read, and the signals that Python handled.

References would keep a handler alive that the program has replaced. No handler has the id of one of
`_SYSTEM_HANDLERS`, which always exist.
"""

_replaced: dict[int, Any] = {}
"""The program's handlers of the signals that blocks of the main thread handle."""
_owner = 0
"""The thread of these blocks."""
_is_deferring = False
"""Whether this thread is in a block of `uninterrupted`."""


class _Handling:
    """Installs signal handlers of the main thread for a block; handlers that the block itself installs are kept."""

    __slots__ = ("_added", "_handlers", "_previous")

    def __init__(self, handlers: dict[int, Any]) -> None:
        self._handlers = handlers

    def __enter__(self) -> None:
        global _owner
        self._previous = {number: _signal.getsignal(number) for number in self._handlers}
        self._added = {number: handler for number, handler in self._previous.items() if number not in _replaced}
        try:
            _owner = threading.get_ident()
            _replaced.update(self._added)
            for number, handler in self._handlers.items():
                _signal.signal(number, handler)
        except BaseException:  # an exception of another signal's handler
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        try:
            for number, handler in reversed(self._handlers.items()):  # SIGINT last, because other signals are rare
                if _signal.getsignal(number) is handler:
                    _signal.signal(number, self._previous[number])
        finally:
            for number in self._added:
                _replaced.pop(number, None)


def _after_fork() -> None:
    """Install the program's handlers in the child of another thread, where the blocks of the main thread never end."""
    global _is_deferring
    if _owner != threading.get_ident():
        _is_deferring = False
        for number, handler in _replaced.items():
            _signal.signal(number, handler)
        _replaced.clear()


os.register_at_fork(after_in_child=_after_fork)


def _handled_signals() -> list[int]:
    """Return the signals that Python handles."""
    global _handlers_then
    handlers = list(map(_signal.getsignal, _SIGNALS))
    ids = list(map(id, handlers))
    if ids != _handlers_then[0]:
        pairs = zip(_SIGNALS, handlers, strict=True)
        _handlers_then = ids, [number for number, handler in pairs if handler not in _SYSTEM_HANDLERS]
    return _handlers_then[1]


class _Deferral(_Handling):
    """A block of `uninterrupted`."""

    __slots__ = ("_deferred", "_is_within", "_is_over")

    def __init__(self) -> None:
        super().__init__({})
        self._deferred: dict[int, FrameType | None] = {}
        self._is_over = False
        self._is_within = _is_deferring or threading.get_ident() != threading.main_thread().ident

    def __enter__(self) -> None:
        global _is_deferring
        if self._is_within:
            return
        self._handlers = dict.fromkeys(_handled_signals(), self._defer)
        try:
            super().__enter__()
        except BaseException:
            self._end()
            raise
        _is_deferring = True

    def __exit__(self, *error: object) -> None:
        global _is_deferring
        if self._is_within:
            return
        _is_deferring = False  # blocks in handlers that run before all are restored must defer signals
        try:
            super().__exit__()
        finally:
            self._end()

    def _defer(self, number: int, frame: FrameType | None) -> None:
        if self._is_over:  # a handler raised while others were restored
            self._previous[number](number, frame)
        else:
            self._deferred.setdefault(number, frame)  # once, like a signal that is blocked in the system

    def _end(self) -> None:
        self._is_over, self._handlers = True, {}  # break the cycle of references
        if self._deferred:
            self._deliver()

    def _deliver(self) -> None:
        """Call all handlers, even if one raises."""
        try:
            number = next(iter(self._deferred))
            self._previous[number](number, self._deferred.pop(number))
        finally:
            if self._deferred:
                self._deliver()


def uninterrupted() -> contextlib.AbstractContextManager[None]:
    """Defer the Python handlers of all signals of the main thread to the end of the block, by at most a few seconds.

    LLVM calls Python back while it compiles, and prints and drops exceptions of handlers. A store changes its files and
    its index together. Other threads are never interrupted, and signals that Python does not handle are left as they
    are.
    """
    return _Deferral()


class Interrupts:
    """The interrupts that came during a block; see `interruptible`."""

    def __init__(self, stop: Callable[[], object]) -> None:
        self.raised: list[BaseException] = []
        self.at_once = False
        """Whether a second interrupt raises at once, for blocks that do not check `raised`."""
        self.may_leave = True
        """Whether the block may return after a second interrupt, and leave the work for which it waits running."""
        self.caught = False
        self.outermost = False
        """Whether the block raises an interrupt at its end; else the block around it does."""
        self._stop = stop

    def record(self, error: BaseException) -> None:
        """Record an interrupt. The first one stops the work for which the block waits."""
        self.raised.append(error)
        if len(self.raised) == 1:
            self._stop()

    def catch(self, error: BaseException) -> None:
        """Record an exception that the handler of another signal raised while the block waited."""
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
        return error  # to the inner block with the calling handler

    handle.within = True  # type: ignore[attr-defined]
    try:
        with _Handling({_SIGINT: handle} if handled else {}):
            yield found
    finally:
        if found.raised and (found.caught or found.outermost):
            raise found.raised[0].with_traceback(None)
