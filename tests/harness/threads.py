"""Calls in several threads at the same time, and calls as soon as a thread waits.

`run_threads`, `until_blocked`, `when_blocked`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from .until import HANG_SECONDS, until


def run_threads(work: Callable[..., object], arguments: Iterable[Sequence[Any]]) -> None:
    """Call `work` once for each of `arguments`, each in a thread of its own, and wait for all.

    Raises
    ------
    BaseException
        The first exception of a thread.
    AssertionError
        A thread did not end within `HANG_SECONDS`.
    """
    failures: list[BaseException] = []

    def run(values: Sequence[Any]) -> None:
        try:
            work(*values)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(values,), daemon=True) for values in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert not any(thread.is_alive() for thread in threads), "a thread did not end"
    if failures:
        raise failures[0]


def until_blocked(thread: threading.Thread | int) -> None:
    """Wait until a thread waits for an event, in Python or in a function of a library.

    `thread` is a started thread of this process, or the id of a process, for its main thread.

    A thread that has no processor is not in the state S. A thread that waits for the GIL wakes up every 5 ms.
    """
    task = f"{thread}/task/{thread}" if isinstance(thread, int) else f"self/task/{thread.native_id}"
    status = Path(f"/proc/{task}/status")

    def switches() -> str | None:
        lines = dict(line.split(":\t", 1) for line in status.read_text().splitlines())
        return lines["voluntary_ctxt_switches"] if lines["State"].startswith("S") else None

    def is_blocked() -> bool:
        before = switches()
        time.sleep(0.05)
        return before is not None and before == switches()

    until(is_blocked)


def when_blocked(act: Callable[[], object]) -> threading.Thread:
    """Start a thread that calls `act` as soon as the calling thread waits, and return it."""
    caller = threading.current_thread()

    def run() -> None:
        until_blocked(caller)
        act()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread
