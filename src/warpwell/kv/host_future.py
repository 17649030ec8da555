"""HostFuture: values that a thread of the host reads meanwhile."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable
from typing import Any

_pools: dict[int, concurrent.futures.ThreadPoolExecutor] = {}


class HostFuture:
    """The result of a read that goes on in another thread.

    Parameters
    ----------
    read : callable
        Returns the result.
    """

    def __init__(self, read: Callable[[], Any]) -> None:
        # by process: threads do not survive a fork
        pid = os.getpid()
        if pid not in _pools:
            _pools.clear()
            _pools[pid] = concurrent.futures.ThreadPoolExecutor(4, "warpwell-kv")
        self._future = _pools[pid].submit(read)

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the result and return it; may be called again.

        Raises
        ------
        TimeoutError
            It took longer than `timeout` seconds.
        """
        return self._future.result(timeout)

    def done(self) -> bool:
        """Tell whether `wait` would return at once."""
        return self._future.done()
