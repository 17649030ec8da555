"""Batches fetched ahead of their use: by a store's own futures, or by one thread."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from .. import errors

Request = TypeVar("Request")


class Future(Protocol):
    """What a store's ``get_async`` returns."""

    def wait(self) -> Any:
        """Return the result, or raise."""


class Prefetch(Generic[Request]):
    """Iterator of the results of requests, in their order, of which at most `depth` are fetched ahead.

    With a depth of 0 a request is fetched when its result is asked for. No request is left in flight once the iterator
    is exhausted, closed, collected, or has raised.

    Parameters
    ----------
    requests : iterator
        What to fetch; it is advanced no further than needed.
    depth : int
        Results that may be in flight or ready at once, beside the one that was delivered last.
    fetch : callable, optional
        Returns the result of a request; runs in one thread of the iterator.
    submit : callable, optional
        Returns a future instead, at once; taken in place of `fetch`, and then there is no thread.
    """

    def __init__(
        self,
        requests: Iterator[Request],
        depth: int,
        *,
        fetch: Callable[[Request], Any],
        submit: Callable[[Request], Future] | None = None,
    ) -> None:
        self._pid = os.getpid()
        self._ahead: _Ahead
        if depth == 0:
            self._ahead = _Nothing(requests, fetch)
        elif submit is not None:
            self._ahead = _Futures(requests, depth, submit)
        else:
            self._ahead = _Thread(requests, depth, fetch)
        # also at the exit of the interpreter, before the store's own code is taken down
        self._close = weakref.finalize(self, _close_in, os.getpid(), self._ahead)

    def __iter__(self) -> Prefetch[Request]:
        return self

    def __next__(self) -> tuple[Request, Any]:
        if not self._close.alive:
            raise StopIteration
        if os.getpid() != self._pid:
            raise errors.ForkError(
                f"this iterator was begun in process {self._pid} and prefetches there: begin a new one in each process"
            )
        try:
            return self._ahead.next()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Fetch no more, and wait for what is in flight; may be called again."""
        self._close()


def _close_in(pid: int, ahead: _Ahead) -> None:
    if os.getpid() == pid:  # a forked child has neither the thread nor the requests
        ahead.close()


class _Ahead(Protocol):
    """One way to fetch ahead."""

    def next(self) -> tuple[Any, Any]:
        """Return the next request and its result; raise StopIteration after the last."""

    def close(self) -> None:
        """Leave nothing in flight."""


class _Nothing(Generic[Request]):
    def __init__(self, requests: Iterator[Request], fetch: Callable[[Request], Any]) -> None:
        self._requests = requests
        self._fetch = fetch

    def next(self) -> tuple[Request, Any]:
        request = next(self._requests)
        return request, self._fetch(request)

    def close(self) -> None:
        pass


class _Futures(Generic[Request]):
    def __init__(self, requests: Iterator[Request], depth: int, submit: Callable[[Request], Future]) -> None:
        self._requests = requests
        self._depth = depth
        self._submit = submit
        self._flying: deque[tuple[Request, Future]] = deque()
        self._failed: BaseException | None = None
        self._fill()

    def next(self) -> tuple[Request, Any]:
        if not self._flying:
            if self._failed is not None:
                raise self._failed
            raise StopIteration
        request, future = self._flying[0]
        result = future.wait()
        self._flying.popleft()
        self._fill()
        return request, result

    def _fill(self) -> None:
        try:
            while self._failed is None and len(self._flying) < self._depth:
                request = next(self._requests, None)
                if request is None:
                    return
                self._flying.append((request, self._submit(request)))
        except Exception as error:
            self._failed = error  # its turn comes after the requests before it

    def close(self) -> None:
        while self._flying:
            _, future = self._flying.popleft()
            try:
                future.wait()  # only so that it holds nothing of the store any more
            except Exception:
                continue


class _Thread(Generic[Request]):
    def __init__(self, requests: Iterator[Request], depth: int, fetch: Callable[[Request], Any]) -> None:
        self._permits = threading.Semaphore(depth)
        self._ready: SimpleQueue[Any] = SimpleQueue()
        self._stop = threading.Event()
        # A daemon only so that an iterator that is still alive at the exit does not keep the process from it.
        self._thread = threading.Thread(
            target=_work, args=(requests, fetch, self._permits, self._ready, self._stop), name="warpwell-prefetch",
            daemon=True,
        )  # fmt: skip
        self._thread.start()

    def next(self) -> tuple[Request, Any]:
        item = self._ready.get()
        if isinstance(item, _Ended):
            raise StopIteration if item.error is None else item.error
        self._permits.release()
        request, result = item
        return request, result

    def close(self) -> None:
        self._stop.set()
        self._permits.release()
        if self._thread is not threading.current_thread():  # the collector runs in any thread
            self._thread.join()


class _Ended:
    """What the thread says last."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def _work(
    requests: Iterator[Any],
    fetch: Callable[[Any], Any],
    permits: threading.Semaphore,
    ready: SimpleQueue[Any],
    stop: threading.Event,
) -> None:
    """Fetch until there is no more or `stop` is set; holds no reference to the iterator, so that it is collected."""
    failed: BaseException | None = None
    try:
        for request in requests:
            permits.acquire()
            if stop.is_set():
                return
            ready.put((request, fetch(request)))
    except BaseException as error:
        failed = error
    finally:
        ready.put(_Ended(failed))
