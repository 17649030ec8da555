"""`DataLoader`: the records of a dataset in shuffled batches, divided among ranks.

Each seed and epoch has one order, for any number of ranks. It is cut into global batches of
``batch_size * world_size`` consecutive positions, and rank r takes the r-th of `world_size` consecutive parts of each.
Therefore:

- the concatenated batches of all ranks are the order itself. A single rank with `world_size` times the batch size has
  the same global batches, row for row; one with the same batch size has the ranks' batches one after another (except
  for an incomplete last one). With strided parts (rank r takes every `world_size`-th row) neither would be true.
- every rank has as many batches as the others. An incomplete last global batch is divided in the same way, into parts
  whose sizes differ by at most one; if there are fewer rows than ranks, some ranks get an empty batch.
- a place in the order is (seed, epoch, position) and does not depend on ranks: a run can resume with another number of
  ranks.
"""

from __future__ import annotations

import itertools
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from .. import closing, errors
from .._check import checked_flag, checked_integer
from ..kv import Permutation
from .dataset import Dataset
from .records import UNREADABLE, Finished

_logger = logging.getLogger(__name__)

STATE_VERSION = 1
_MIN_POSITIONS = 1 << 14
"""Positions of an order that are computed at once, which is faster than batch by batch."""


class DataLoader:
    """Batches of records; each iteration is one epoch.

    Parameters
    ----------
    data : Dataset, Store, dict, Table or path
        A `Dataset`, or its first argument. Batches are dicts of arrays ``(rows, *shape)``: NumPy arrays in C order, or
        device arrays (DLPack) of arrays on "cuda" and of a store with a schema on a GPU. Batches of a store without a
        schema are lists of bytes.
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
    on_error : {"raise", "skip"}
        "skip" leaves out records that are damaged, that the drive cannot read, or that were deleted: batches have fewer
        rows, a warning is logged, and `skipped` and `state_dict` name the keys. A batch of several records of which
        none can be read raises the error.
    keys, key_field : optional
        As for `Dataset`, for example ``keys=range(1000)`` as a training split; a ``range`` needs no memory.

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
        on_error: str = "raise",
        keys: Any = None,
        key_field: str | None = None,
    ) -> None:
        if not isinstance(data, Dataset):
            data = Dataset(data, keys=keys, key_field=key_field)
        elif keys is not None or key_field is not None:
            raise errors.ArgumentError("keys= and key_field= are options of the Dataset: pass them there", name="keys")
        self.dataset: Dataset = data
        self.batch_size = checked_integer(batch_size, "batch_size")
        self.shuffle = checked_flag(shuffle, "shuffle")
        self.seed = checked_integer(seed, "seed", minimum=None)
        self.prefetch = checked_integer(prefetch, "prefetch", minimum=0)
        self.world_size = checked_integer(world_size, "world_size")
        self.rank = checked_integer(rank, "rank", minimum=0)
        if self.rank >= self.world_size:
            raise errors.ArgumentError(
                f"rank is {rank} of a world_size of {world_size}: ranks count from 0 to {self.world_size - 1}",
                name="rank",
            )
        self.drop_last = checked_flag(drop_last, "drop_last")
        if on_error not in ("raise", "skip"):
            raise errors.ArgumentError(f'on_error is {on_error!r}: give "raise" or "skip"', name="on_error")
        self.on_error = on_error
        self.skipped: list[int | bytes] = []
        self._progress = _Progress(0, 0)

    def __repr__(self) -> str:
        order = f"shuffled with seed {self.seed}" if self.shuffle else "in the order of keys"
        batches = f"{len(self)} batch{'' if len(self) == 1 else 'es'} of {self.batch_size}"
        part = f", rank {self.rank} of {self.world_size}" if self.world_size > 1 else ""
        return f"<DataLoader of {self.dataset!r}: {batches}, {order}{part}, epoch {self.epoch}>"

    @property
    def epoch(self) -> int:
        """The current epoch, or the next one between two iterations."""
        return self._progress.epoch

    @property
    def samples(self) -> int:
        """Number of samples of an epoch, over all ranks."""
        return len(self.dataset)

    def __len__(self) -> int:
        """Return the number of batches per epoch, which is the same for every rank."""
        full_batches, remainder = divmod(self.samples, self.batch_size * self.world_size)
        return full_batches + (remainder > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        progress = self._progress
        if progress.is_started:
            progress = _Progress(progress.epoch + 1, 0)
        progress.is_started = True
        self._progress = progress
        start = self._start_skipping if self.on_error == "skip" else self._start
        return _Epoch(Prefetch(self._parts(progress), start, self.prefetch), progress, self._record_skipped)

    def _start(self, part: _Part) -> Future:
        return Finished(self.dataset.start_take(part.rows), lambda batch: (batch, []))

    def _start_skipping(self, part: _Part) -> Future:
        return _SkippingRead(self.dataset, part.rows)

    def _record_skipped(self, keys: list[int | bytes]) -> None:
        for key in keys:
            if key not in self.skipped:
                _logger.warning("warpwell: %r leaves out the record of key %r, which cannot be read", self, key)
                self.skipped.append(key)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next iteration delivers, from its start."""
        self._progress = _Progress(checked_integer(epoch, "epoch", minimum=0), 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the last delivered batch, as numbers that fit JSON and pickle.

        It is the same for all ranks after the same number of batches, and does not depend on how many ranks there are,
        except for ``"skipped"``: the rank's list of that name, in which keys of bytes are in hexadecimal.
        The first call reads all keys once, for a checksum.
        """
        return {
            "version": STATE_VERSION,
            "seed": self.seed,
            "epoch": self._progress.epoch,
            "position": self._progress.position,
            "shuffle": self.shuffle,
            "samples": self.samples,
            "keys": self._checksum,
            "skipped": [key.hex() if isinstance(key, bytes) else key for key in self.skipped],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at a place: the next iteration delivers the rest of its epoch.

        Parameters
        ----------
        state : dict
            From `state_dict` of a loader with any batch size and any number of ranks. Its seed and shuffle replace this
            loader's.

        Raises
        ------
        ArgumentError
            The state is not valid, or belongs to other keys; the loader is unchanged.
        """
        try:
            version, seed, epoch, position, shuffle, samples, keys = (
                state[name] for name in ("version", "seed", "epoch", "position", "shuffle", "samples", "keys")
            )
        except (KeyError, TypeError):
            raise errors.ArgumentError(
                f"{state!r} is not a state of a DataLoader: pass what state_dict() returned", name="state"
            ) from None
        if version != STATE_VERSION:
            raise errors.ArgumentError(
                f"the state has version {version!r}, and this Warpwell reads {STATE_VERSION}: use the Warpwell "
                "that saved it",
                name="state",
            )
        if samples != self.samples or keys != self._checksum:
            raise errors.ArgumentError(
                f"the state is of other keys ({samples} of them, here are {self.samples}), so its place means nothing"
                " here: open the store it was saved with, or pass its keys as keys=, and"
                ' on_error="skip" if some of them were deleted',
                name="state",
            )
        progress = _Progress(
            checked_integer(epoch, "epoch", minimum=0), checked_integer(position, "position", minimum=0)
        )
        if progress.position > self.samples:
            raise errors.ArgumentError(f"position {position} of {samples} samples: was the state edited?", name="state")
        try:
            skipped = [bytes.fromhex(key) if isinstance(key, str) else key for key in state.get("skipped", [])]
        except (ValueError, TypeError):
            raise errors.ArgumentError(
                'state["skipped"] is not a list of integers and of keys in hexadecimal: was the state edited?',
                name="state",
            ) from None
        self.seed, self.shuffle = checked_integer(seed, "seed", minimum=None), checked_flag(shuffle, "shuffle")
        self.skipped = skipped
        self._progress = progress

    @cached_property
    def _checksum(self) -> int:
        return self.dataset.checksum()

    def _parts(self, progress: _Progress) -> Iterator[_Part]:
        """Return an iterator of this rank's parts of an epoch, from a place."""
        order = Permutation(self.samples, self.seed, progress.epoch) if self.shuffle and self.samples else None
        cuts = cut(self.samples, progress.position, self.batch_size, self.rank, self.world_size, self.drop_last)
        together = max(1, _MIN_POSITIONS // self.batch_size)
        while group := list(itertools.islice(cuts, together)):
            positions = np.concatenate([np.arange(first, last) for first, last, _ in group])
            rows = positions if order is None else order(positions)
            start = 0
            for first, last, end in group:
                yield _Part(rows[start : start + last - first], end)
                start += last - first


def cut(
    size: int, position: int, batch_size: int, rank: int, world_size: int, drop_last: bool
) -> Iterator[tuple[int, int, int]]:
    """Cut the positions [position, size) into global batches, and each into a part for each rank.

    Yields
    ------
    first, last : int
        The positions of the rank's part: first to ``last - 1``.
    end : int
        Where the global batch ends.
    """
    global_size = batch_size * world_size
    while position < size:
        rows = min(global_size, size - position)
        if rows < global_size and drop_last:
            return
        end = position + rows
        yield position + rows * rank // world_size, position + rows * (rank + 1) // world_size, end
        position = end


class _Progress:
    """The position in an epoch; advanced by its iterator."""

    def __init__(self, epoch: int, position: int) -> None:
        self.epoch = epoch
        self.position = position
        self.is_started = False


class _Part(NamedTuple):
    """The positions of a batch in the dataset, and the position in the order where its global batch ends."""

    rows: NDArray[np.int64]
    end: int


class _Epoch:
    """Iterator of an epoch's batches."""

    def __init__(
        self, ahead: Prefetch[_Part], progress: _Progress, record_skipped: Callable[[list[int | bytes]], None]
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
            progress.epoch, progress.position, progress.is_started = progress.epoch + 1, 0, False
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


class _SkippingRead:
    """The future of the records of a batch that can be read, and of the keys of the other ones."""

    def __init__(self, dataset: Dataset, rows: NDArray[np.int64]) -> None:
        self._dataset = dataset
        self._rows = rows
        self._future = dataset.start_take(rows)

    def wait(self) -> tuple[Any, list[int | bytes]]:
        try:
            return self._future.wait(), []
        except UNREADABLE:
            is_readable = self._dataset.readable(self._rows)
            if len(self._rows) > 1 and not is_readable.any():
                raise  # the drive failed, not some records
        return (
            self._dataset.start_take(self._rows[is_readable]).wait(),
            self._dataset.keys_at(self._rows[~is_readable]),
        )


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
