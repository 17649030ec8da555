"""`Sampler`: the shuffled order of each epoch of a dataset, and the position in it. `DataLoader`: its records.

Each seed and epoch has one order, for any number of ranks. The order is cut into global batches of ``batch_size *
world_size`` consecutive positions. A global batch is cut into `world_size` consecutive parts, and rank r takes the r-th
part. Therefore:

- the concatenated batches of all ranks are the order itself. A single rank with `world_size` times the batch size has
  the same global batches, row for row; one with the same batch size has the ranks' batches one after another (except
  for an incomplete last one). With strided parts (rank r takes every `world_size`-th row) neither would be true.
- every rank has as many batches as the others. An incomplete last global batch is divided in the same way, into parts
  whose sizes differ by at most one; if there are fewer rows than ranks, some ranks get an empty batch.
- a place in the order is (seed, epoch, position) and does not depend on ranks: a run can resume with another number of
  ranks.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from .. import closing, errors
from .._check import checked_flag, checked_integer
from ..kv import Permutation
from .dataset import Dataset

_logger = logging.getLogger(__name__)

STATE_VERSION = 1
_MIN_POSITIONS = 1 << 14
"""Number of positions of an order that are computed at a time, which is faster than batch by batch."""


class Sampler:
    """The positions of each batch in a dataset: a ``batch_sampler`` of PyTorch's ``DataLoader`` that can resume.

    Each iteration is one epoch; its items are lists of positions. With the same options, a `DataLoader` has the same
    batches, and either class loads a state of the other.

    Parameters
    ----------
    dataset : Dataset
    batch_size : int
        Number of rows per batch of one rank.
    shuffle : bool
        If False, records come in the order of the keys.
    seed : int
        Orders of different seeds are unrelated. All ranks must use the same seed.
    rank, world_size : int
        Number of this rank, from 0, and number of ranks: they select the part of each global batch to return.
    drop_last : bool
        Skip the last global batch of an epoch if it is incomplete.

    Attributes
    ----------
    epoch : int
        The current epoch; between two iterations, the next epoch.
    skipped : list of int and bytes
        Keys, or row numbers, of the records that this rank has left out. They are part of the state. If you loop over
        PyTorch's ``DataLoader``, pass the field "skipped" of each batch to `record_skipped`.

    Raises
    ------
    ArgumentError
        An option is not valid.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int = 256,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
    ) -> None:
        if not isinstance(dataset, Dataset):
            raise errors.ArgumentError(f"dataset is {dataset!r:.60}: pass a warpwell.train.Dataset", name="dataset")
        self.dataset = dataset
        self.batch_size = checked_integer(batch_size, "batch_size")
        self.shuffle = checked_flag(shuffle, "shuffle")
        self.seed = checked_integer(seed, "seed", minimum=None)
        self.world_size = checked_integer(world_size, "world_size")
        self.rank = checked_integer(rank, "rank", minimum=0)
        if self.rank >= self.world_size:
            raise errors.ArgumentError(
                f"rank is {rank} of a world_size of {world_size}: ranks count from 0 to {self.world_size - 1}",
                name="rank",
            )
        self.drop_last = checked_flag(drop_last, "drop_last")
        self.skipped: list[int | bytes] = []
        self._progress = Progress(0, 0)

    def __repr__(self) -> str:
        order = f"shuffled with seed {self.seed}" if self.shuffle else "in the order of keys"
        batches = f"{len(self)} batch{'' if len(self) == 1 else 'es'} of {self.batch_size}"
        part = f", rank {self.rank} of {self.world_size}" if self.world_size > 1 else ""
        return f"<{type(self).__name__} of {self.dataset!r}: {batches}, {order}{part}, epoch {self.epoch}>"

    @property
    def epoch(self) -> int:
        """The current epoch; between two iterations, the next epoch."""
        return self._progress.epoch + self._progress.is_over

    @property
    def samples(self) -> int:
        """Number of samples of an epoch, over all ranks."""
        return len(self.dataset)

    def __len__(self) -> int:
        """Return the number of batches per epoch, which is the same for every rank."""
        full_batches, remainder = divmod(self.samples, self.batch_size * self.world_size)
        return full_batches + (remainder > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        # A generator starts at its first batch: PyTorch makes an iterator more than it uses.
        progress = self._start_epoch()
        for part in self._parts(progress):
            progress.position = part.end
            yield part.rows.tolist()
        progress.is_over = True

    def _start_epoch(self) -> Progress:
        progress = self._progress
        if progress.is_started:
            progress = Progress(progress.epoch + 1, 0)
        progress.is_started = True
        self._progress = progress
        return progress

    def record_skipped(self, keys: Iterable[int | bytes]) -> None:
        """Add keys to `skipped`, with a warning for each that is new."""
        for key in keys:
            if key not in self.skipped:
                _logger.warning("warpwell: %r leaves out the record of key %r, which cannot be read", self, key)
                self.skipped.append(key)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration return this epoch, from the start of the epoch."""
        self._progress = Progress(checked_integer(epoch, "epoch", minimum=0), 0)

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Return a position in the order, as numbers that fit JSON and pickle.

        After the same number of batches, the state is the same for all ranks, whatever their number, except for the
        item ``"skipped"``: the rank's `skipped`, with bytes keys in hexadecimal. The first call reads all keys once,
        for a checksum.

        Parameters
        ----------
        batches : int, optional
            Return the position after this number of batches of the current iteration. Default: after the last batch
            that was returned. PyTorch's ``DataLoader`` takes batches from a `Sampler` early, for its workers, so pass
            the number of batches that your loop has received.

        Raises
        ------
        ArgumentError
            The iteration has fewer batches.
        """
        progress = self._progress
        position = progress.position
        if batches is not None:
            global_size = self.batch_size * self.world_size
            left = self.samples - progress.first
            max_batches = left // global_size if self.drop_last else -(-left // global_size)
            if not 0 <= (batches := checked_integer(batches, "batches", minimum=0)) <= max_batches:
                raise errors.ArgumentError(
                    f"batches is {batches}, but the iteration has {max_batches}: count from 0 in each epoch",
                    name="batches",
                )
            position = min(progress.first + batches * global_size, self.samples)
        return {
            "version": STATE_VERSION,
            "seed": self.seed,
            "epoch": progress.epoch,
            "position": position,
            "shuffle": self.shuffle,
            "samples": self.samples,
            "keys": self._checksum,
            "skipped": [key.hex() if isinstance(key, bytes) else key for key in self.skipped],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at a position: the next iteration returns the rest of that epoch.

        Parameters
        ----------
        state : dict
            The result of `state_dict` of a sampler or loader with any batch size and any number of ranks. The `seed`
            and `shuffle` of the state replace those of this object.

        Raises
        ------
        ArgumentError
            The state is not valid, or belongs to other keys; nothing is changed.
        """
        try:
            version, seed, epoch, position, shuffle, samples, keys = (
                state[name] for name in ("version", "seed", "epoch", "position", "shuffle", "samples", "keys")
            )
        except (KeyError, TypeError):
            raise errors.ArgumentError(
                f"{state!r} is not a state of a loader: pass what state_dict() returned", name="state"
            ) from None
        if version != STATE_VERSION:
            raise errors.ArgumentError(
                f"the state has version {version!r}, but this Warpwell reads {STATE_VERSION}: use the Warpwell "
                "that saved it",
                name="state",
            )
        if samples != self.samples or keys != self._checksum:
            raise errors.ArgumentError(
                f"the state is of a dataset with other keys ({samples} keys, not {self.samples}): open the "
                "store with which it was saved, or pass the same keys as keys=, and"
                ' on_error="skip" if some were deleted',
                name="state",
            )
        progress = Progress(
            checked_integer(epoch, "epoch", minimum=0), checked_integer(position, "position", minimum=0)
        )
        if progress.position > self.samples:
            raise errors.ArgumentError(f"position {position} of {samples}: pass an unchanged state", name="state")
        try:
            skipped = [bytes.fromhex(key) if isinstance(key, str) else key for key in state.get("skipped", [])]
        except (ValueError, TypeError):
            raise errors.ArgumentError(
                'state["skipped"] is not a list of integers and of keys in hexadecimal: pass an unchanged state',
                name="state",
            ) from None
        self.seed, self.shuffle = checked_integer(seed, "seed", minimum=None), checked_flag(shuffle, "shuffle")
        self.skipped = skipped
        self._progress = progress

    @cached_property
    def _checksum(self) -> int:
        return self.dataset.checksum()

    def _parts(self, progress: Progress) -> Iterator[Part]:
        """Return an iterator over this rank's parts of an epoch, from a position on."""
        order = Permutation(self.samples, self.seed, progress.epoch) if self.shuffle and self.samples else None
        global_size = self.batch_size * self.world_size
        step = global_size * max(1, _MIN_POSITIONS // self.batch_size)
        for start in range(progress.first, self.samples, step):
            parts: list[tuple[NDArray[np.int64], int]] = []
            for first in range(start, min(start + step, self.samples), global_size):
                end = min(first + global_size, self.samples)
                if end - first < global_size and self.drop_last:
                    break
                bounds = [first + (end - first) * rank // self.world_size for rank in (self.rank, self.rank + 1)]
                parts.append((np.arange(*bounds), end))
            if not parts:
                return
            positions = np.concatenate([part for part, _ in parts])
            rows = positions if order is None else order(positions)
            for part, end in parts:
                yield Part(rows[: len(part)], end)
                rows = rows[len(part) :]


class Progress:
    """A position in an epoch.

    Attributes
    ----------
    epoch : int
    first, position : int
        The positions in the order at which the iteration begins, and at which the last delivered batch ends.
    is_started : bool
        Whether an iteration has begun here, so that the next iteration is the next epoch.
    is_over : bool
        Whether a `Sampler` has returned all positions; the loop may still wait for batches of them.
    """

    def __init__(self, epoch: int, position: int) -> None:
        self.epoch = epoch
        self.first = self.position = position
        self.is_started = self.is_over = False


class Part(NamedTuple):
    """The positions of a batch in the dataset, and the position in the order where its global batch ends."""

    rows: NDArray[np.int64]
    end: int


class DataLoader(Sampler):
    """Batches of records; each iteration is one epoch.

    Parameters
    ----------
    data : Dataset, Store, dict, Table or path
        A `Dataset`, or the first argument of `Dataset`. Batches are dicts of arrays ``(rows, *shape)``. These are NumPy
        arrays in C order; for arrays on "cuda", and for a store with a schema on a GPU, they are device arrays
        (DLPack). A ragged field of a store is a `Ragged` on the host. Batches of a store without a schema are lists of
        bytes.
    batch_size : int
        Number of rows per batch of one rank.
    shuffle : bool
        If False, records come in the order of the keys.
    seed : int
        Orders of different seeds are unrelated. All ranks must use the same seed.
    prefetch : int
        Number of batches to fetch ahead; with 0, a batch is fetched only when the loop requests it.
    rank, world_size : int
        Number of this rank, from 0, and number of ranks: they select the part of each global batch to return.
    drop_last : bool
        Skip the last global batch of an epoch if it is incomplete.
    **options
        Options of `Dataset`, if `data` is not a `Dataset`: `keys`, such as ``range(1000)`` for a training split,
        `key_field`, `join`, `decode` and `on_error`.

    Attributes
    ----------
    epoch : int
        The current epoch; between two iterations, the next epoch.
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
    Leaving an iteration early ends its epoch: the next iteration is the next epoch. So a loop over a limited number of
    batches does not see the same samples each time. To continue in the middle of an epoch, keep the iterator, or load a
    state from `state_dict`. All ranks must start the same number of iterations, or call `set_epoch` before each.
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
        return _Epoch(self, self._start_epoch())


Request = TypeVar("Request")


class Future(Protocol):
    """The interface of the future of a batch."""

    def wait(self) -> Any:
        """Return the result, or raise the error of the read."""


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
        Maximum number of results in flight or ready, not counting the result that was returned last. With 0, a request
        is submitted when the caller asks for its result.
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
            if os.getpid() == self._pid:  # a forked child has the list, but not the requests
                self._flight.finish()


class _Epoch(Prefetch[Part]):
    """Iterator of an epoch's batches."""

    def __init__(self, loader: DataLoader, progress: Progress) -> None:
        super().__init__(loader._parts(progress), lambda part: loader.dataset.start(part.rows), loader.prefetch)
        self._loader, self._progress = loader, progress

    def __next__(self) -> Any:
        progress, is_open = self._progress, self._dropped.alive
        try:
            part, (batch, skipped) = super().__next__()
        except StopIteration:
            if is_open:
                progress.epoch, progress.first, progress.position, progress.is_started = progress.epoch + 1, 0, 0, False
            raise
        progress.position = part.end
        self._loader.record_skipped(skipped)
        return batch


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
            self._failed = error  # `next` raises it after the results before it

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
