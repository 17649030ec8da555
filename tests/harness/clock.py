"""Let timeouts expire: `time_passes` advances the clock of Warpwell while a block runs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from warpwell._os import clock


@contextlib.contextmanager
def time_passes(seconds: float, when: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Advance the clock by `seconds` again and again while the block runs and `when` returns True.

    Timeouts restart after progress, so one advance can be too early.
    """
    over = threading.Event()

    def advance() -> None:
        while not over.is_set():
            if when():
                clock.advance(seconds)
            time.sleep(0.002)

    thread = threading.Thread(target=advance, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
