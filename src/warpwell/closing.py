"""Close objects that were dropped, in a thread, and write other objects at the end of the program.

A finalizer runs in any thread between any two lines, possibly while that thread holds a lock. So it acquires no lock
and does not wait: it passes the closing function to a thread, by the one call that Python documents as safe in
finalizers.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Protocol

_logger = logging.getLogger(__name__)

_END_SECONDS = 120.0
"""Longest wait for dropped objects at the end of the program; each is bounded by its own time-outs, too."""


class Unfinished(Protocol):
    """An object with changes that must be written before the program ends."""

    def finish(self) -> None:
        """Write what was changed, and stay open."""


_dropped: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
_thread: threading.Thread | None = None
_starting = threading.Lock()
_unfinished: dict[int, tuple[Unfinished, str]] = {}
_registered = False


def keep(unfinished: Unfinished, name: str) -> None:
    """Finish `unfinished` at the end of the program, unless `forget` is called before; `name` is for messages."""
    _unfinished[id(unfinished)] = unfinished, name


def forget(unfinished: Unfinished) -> None:
    """Undo `keep`."""
    _unfinished.pop(id(unfinished), None)


def ready() -> None:
    """Start the thread that closes dropped objects, unless it runs; call it when such an object is made."""
    global _thread, _registered
    with _starting:
        if not _registered:
            _register()
            _registered = True
        if _thread is None or not _thread.is_alive():  # a thread that could not be started is not alive
            _thread = threading.Thread(target=_close_dropped, args=(_dropped,), name="warpwell-closing", daemon=True)
            _thread.start()


def hand_over(close: Callable[[], None]) -> None:
    """Have `close` called in the closing thread (for finalizers). If it raises, the error is printed to stderr."""
    _dropped.put(close)


def hand_over_to_thread(close: Callable[[], None], name: str) -> None:
    """Have `close` called in a thread of its own, because it may take as long as the program runs."""

    def start() -> None:
        with contextlib.suppress(RuntimeError):  # the interpreter ends
            threading.Thread(target=close, name=name, daemon=True).start()

    hand_over(start)


def wait_until_closed(seconds: float) -> bool:
    """Wait until all objects that were handed over so far are closed; return False after a timeout."""
    if _thread is None or _thread is threading.current_thread() or not _thread.is_alive():
        return True
    done = threading.Event()
    _dropped.put(done.set)
    return done.wait(seconds)


def report_loss(name: str, error: BaseException) -> None:
    """Log that changes of `name` are lost, because no caller could catch an exception."""
    _logger.error("warpwell: changes of %s may be lost: %s: %s", name, type(error).__name__, error)


def _close_dropped(handed: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        close = handed.get()
        try:
            close()
        except Exception as error:  # the next object is closed anyway
            report_loss("an object that was dropped", error)
        del close  # The closed object is freed now, not when the next one arrives.


def finish() -> None:
    """Write the objects that are still open (at the end of the program). Threads that are daemons may be running."""
    if not wait_until_closed(_END_SECONDS):
        report_loss("objects that were dropped", TimeoutError(f"closing them takes more than {_END_SECONDS:g} s"))
    for unfinished, name in list(_unfinished.values()):
        try:
            unfinished.finish()
        except Exception as error:  # the other objects are written anyway
            report_loss(name, error)
        except KeyboardInterrupt as error:
            report_loss(name, error)
            raise


def _register() -> None:
    atexit.register(finish)
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        # a process of multiprocessing exits without the interpreter's own handlers
        from multiprocessing.util import Finalize

        Finalize(None, finish, exitpriority=0)


def _after_fork() -> None:
    global _dropped, _thread, _starting, _registered
    _dropped, _thread, _starting = queue.SimpleQueue(), None, threading.Lock()
    _registered = False
    _unfinished.clear()  # they belong to the parent
    atexit.unregister(finish)


os.register_at_fork(after_in_child=_after_fork)
