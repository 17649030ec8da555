"""`uninterrupted` keeps Ctrl-C until a compiler is done, `interruptible` until a launch has been stopped."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` makes an enumeration of all that passes it
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_SIGINT = int(signal.SIGINT)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let an interrupt of the main thread raise at the end of the block, seconds later at most.

    LLVM calls Python back while it compiles. What is raised there is printed and forgotten: the program would go on as
    if nobody had pressed a key. Other threads are never interrupted, and signals that Python does not handle are left
    as they are.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    came: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _, frame: came.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if came:
            previous(signal.SIGINT, came[0])


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

    def came(self, error: BaseException) -> None:
        """Note an interrupt. The first one stops what the block waits for."""
        self.raised.append(error)
        if len(self.raised) == 1:
            self._stop()

    def catch(self, error: BaseException) -> None:
        """Note an exception that the handler of another signal raised while the block waited."""
        self.caught = True
        self.came(error)


@contextlib.contextmanager
def interruptible(stop: Callable[[], object]) -> Iterator[Interrupts]:
    """Call `stop` when an interrupt of the main thread would raise in the block, and raise at its end.

    So nothing in the block is left half done, and what it waits for ends soon. The program's own handler is called at
    once; where that raises nothing, the block goes on. Blocks within blocks are all stopped, and the outermost raises.
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
        found.came(error)
        if found.at_once and len(found.raised) > 1:
            raise error
        return error  # to the block within this one, whose handler called

    if handled:
        handle.within = True  # type: ignore[attr-defined]
        _signal.signal(_SIGINT, handle)
    try:
        yield found
    finally:
        if handled and _signal.getsignal(_SIGINT) is handle:  # else the program's handler installed another
            _signal.signal(_SIGINT, previous)
        if found.raised and (found.caught or found.outermost):
            raise found.raised[0].with_traceback(None)
