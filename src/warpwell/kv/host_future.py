"""HostFuture: values that a thread of the host reads meanwhile."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable
from typing import Any

from .. import errors
from ..errors.options import checked_timeout

_pools: dict[int, concurrent.futures.ThreadPoolExecutor] = {}
"""One, of this process."""
os.register_at_fork(after_in_child=_pools.clear)  # its threads are the parent's


class HostFuture:
    """The result of a read that goes on in another thread.

    Parameters
    ----------
    read : callable
        Returns the result.
    """

    def __init__(self, read: Callable[[], Any]) -> None:
        self._pid = os.getpid()
        pool = _pools.get(0)
        if pool is None:  # of threads that come here at once, one makes the pool that all use; none starts a thread yet
            pool = _pools.setdefault(0, concurrent.futures.ThreadPoolExecutor(4, "warpwell-kv"))
        self._future = pool.submit(read)

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the result and return it; may be called again.

        Raises
        ------
        TimeoutError
            It took longer than `timeout` seconds.
        ForkError
            This process was forked from the one that began to read.
        """
        timeout = checked_timeout(timeout)
        if self._pid != os.getpid():
            raise errors.ForkError(
                f"this read was begun in process {self._pid}, which this one ({os.getpid()}) was forked from: begin it"
                " again here"
            )
        try:
            return self._future.result(timeout)
        except concurrent.futures.TimeoutError as error:
            if self._future.done():
                raise  # by the read itself
            raise TimeoutError(f"the read is not done after {timeout:g} s: wait longer") from error

    def done(self) -> bool:
        """Tell whether `wait` would return at once."""
        return self._pid != os.getpid() or self._future.done()
