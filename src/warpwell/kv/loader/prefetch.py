"""Prefetch: results that are fetched ahead of their use."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from ... import errors
from ...targets import closing

Request = TypeVar("Request")


class Future(Protocol):
    """What a store's ``get_async`` returns."""

    def wait(self) -> Any:
        """Return the result, or raise."""


class Prefetch(Generic[Request]):
    """Iterator of requests and their results, in order, of which at most `depth` are in flight ahead.

    Nothing is in flight any more once it is exhausted or closed, or has raised; where it is dropped, the closing thread
    waits for what is (`warpwell.targets.closing`). An error comes in its turn: after the results of the requests before
    it.

    Parameters
    ----------
    requests : iterator
        What to fetch; advanced no further than needed.
    submit : callable
        Returns a future for a request, at once.
    depth : int
        Results that may be in flight or ready, beside the one that was delivered last. With 0 a request is submitted
        when its result is asked for.
    """

    def __init__(self, requests: Iterator[Request], submit: Callable[[Request], Future], depth: int) -> None:
        self._pid = os.getpid()
        self._flight = _Flight(requests, submit)
        self._depth = depth
        closing.ready()
        closing.keep(self._flight, "a prefetch")
        self._dropped = weakref.finalize(self, _dropped, self._pid, self._flight)
        self._dropped.atexit = False
        self._flight.fill(depth)

    def __iter__(self) -> Prefetch[Request]:
        return self

    def __next__(self) -> tuple[Request, Any]:
        if not self._dropped.alive:
            raise StopIteration
        if os.getpid() != self._pid:
            raise errors.ForkError(
                f"this iterator was begun in process {self._pid} and prefetches there: begin one in each process"
            )
        try:
            self._flight.fill(max(1, self._depth))
            result = self._flight.next()
            self._flight.fill(self._depth)
        except BaseException:
            self.close()
            raise
        return result

    def close(self) -> None:
        """Fetch no more, and wait for what is in flight; may be called again."""
        if self._dropped.detach() is not None:
            closing.forget(self._flight)
            if os.getpid() == self._pid:  # a forked child has the list, and not the requests
                self._flight.finish()


class _Flight(Generic[Request]):
    """Requests in flight."""

    def __init__(self, requests: Iterator[Request], submit: Callable[[Request], Future]) -> None:
        self._requests = requests
        self._submit = submit
        self._futures: deque[tuple[Request, Future]] = deque()
        self._failed: Exception | None = None

    def fill(self, depth: int) -> None:
        try:
            while self._failed is None and len(self._futures) < depth:
                request = next(self._requests, None)
                if request is None:
                    return
                self._futures.append((request, self._submit(request)))
        except Exception as error:
            self._failed = error  # its turn comes later

    def next(self) -> tuple[Request, Any]:
        if not self._futures:
            raise StopIteration if self._failed is None else self._failed
        request, future = self._futures[0]
        result = future.wait()
        self._futures.popleft()
        return request, result

    def finish(self) -> None:
        """Wait for everything in flight, so that the store may be closed."""
        while self._futures:
            _, future = self._futures.popleft()
            try:
                future.wait()
            except Exception:
                continue


def _dropped(pid: int, flight: _Flight[Any]) -> None:
    closing.forget(flight)
    if os.getpid() == pid:
        closing.hand_over(flight.finish)
