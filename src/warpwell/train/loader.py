"""`DataLoader`: the records of a dataset in shuffled batches, which are fetched ahead."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from .. import closing, errors
from .._check import checked_integer
from .dataset import Dataset
from .sampler import Part, Progress, Sampler


class DataLoader(Sampler):
    """Batches of records; each iteration is one epoch.

    Parameters
    ----------
    data : Dataset, Store, dict, Table or path
        A `Dataset`, or its first argument. Batches are dicts of arrays ``(rows, *shape)``: NumPy arrays in C order, or
        device arrays (DLPack) of arrays on "cuda" and of a store with a schema on a GPU. A ragged field of a store is a
        `Ragged` on the host. Batches of a store without a schema are lists of bytes.
    batch_size : int
        Rows per batch and rank.
    shuffle : bool
        If False, records come in the order of the keys.
    seed : int
        Orders of different seeds are unrelated. All ranks must use the same seed.
    prefetch : int
        Number of batches to fetch ahead; with 0 a batch is fetched when it is requested.
    rank, world_size : int
        The part of each global batch to deliver.
    drop_last : bool
        Skip the last global batch of an epoch if it is incomplete.
    **options
        Options of `Dataset`, if `data` is not one: ``keys=range(1000)`` as a training split, `key_field`, `join`,
        `decode`, `on_error`.

    Attributes
    ----------
    epoch : int
        The current epoch, or the next one between two iterations.
    skipped : list of int and bytes
        Keys, or row numbers, of the records that this rank has left out.

    Raises
    ------
    ArgumentError
        An option is not valid.
    KeyMissingError, CorruptionError, MediumError
        On iteration, unless `on_error` is "skip": the store does not have a key, or a record cannot be read.

    Notes
    -----
    An iteration that is left early ends its epoch: the next iteration is the next epoch, so that a loop over a limited
    number of batches does not see the same samples each time. To continue in the middle of an epoch, keep the iterator,
    or load a state from `state_dict`. All ranks must start the same number of iterations, or call `set_epoch` before
    each.
    """

    def __init__(
        self,
        data: Any,
        batch_size: int = 256,
        shuffle: bool = True,
        seed: int = 0,
        prefetch: int = 4,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        if not isinstance(data, Dataset):
            data = Dataset(data, **options)
        elif options:
            name = next(iter(options))
            raise errors.ArgumentError(f"{name}= is one of the options of the Dataset: pass it there", name=name)
        super().__init__(data, batch_size, shuffle, seed, rank, world_size, drop_last)
        self.prefetch = checked_integer(prefetch, "prefetch", minimum=0)

    def __iter__(self) -> Iterator[Any]:
        progress = self._start_epoch()
        ahead = Prefetch(self._parts(progress), lambda part: self.dataset.start(part.rows), self.prefetch)
        return _Epoch(ahead, progress, self.record_skipped)


class _Epoch:
    """Iterator of an epoch's batches."""

    def __init__(
        self, ahead: Prefetch[Part], progress: Progress, record_skipped: Callable[[list[int | bytes]], None]
    ) -> None:
        self._ahead = ahead
        self._record_skipped = record_skipped
        self._progress = progress
        self._over = False

    def __iter__(self) -> _Epoch:
        return self

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        progress = self._progress
        try:
            part, (batch, skipped) = next(self._ahead)
        except StopIteration:
            self._over = True
            progress.epoch, progress.first, progress.position, progress.is_started = progress.epoch + 1, 0, 0, False
            raise
        except BaseException:
            self.close()
            raise
        progress.position = part.end
        self._record_skipped(skipped)
        return batch

    def close(self) -> None:
        """End the epoch here, and drop the batches that are being fetched."""
        self._over = True
        self._ahead.close()


Request = TypeVar("Request")


class Future(Protocol):
    """The interface of the future of a batch."""

    def wait(self) -> Any:
        """Return the result, or raise."""


class Prefetch(Generic[Request]):
    """Iterator of requests and their results, in order, with at most `depth` requests in flight ahead.

    No request is in flight after the iterator is exhausted, closed, or has raised; if it is dropped, the closing thread
    (`warpwell.closing`) waits for requests in flight. An error is raised in order: after the results of the
    requests before it.

    Parameters
    ----------
    requests : iterator
        The requests; advanced only as far as needed.
    submit : callable
        Returns a future for a request without waiting.
    depth : int
        Maximum number of results in flight or ready, without the result that was delivered last. With 0 a request is
        submitted when its result is requested.
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
                f"this iterator was created in process {self._pid} and prefetches there: create one in each process"
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
        """Stop fetching, and wait for the requests in flight (idempotent)."""
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
