"""DataLoader: the records of a store in shuffled batches, divided among ranks.

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
import os
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ... import closing, errors
from ..._check import checked_flag, checked_integer
from ..keys import Keys, as_keys
from ..store import HostFuture
from .permutation import BLOCK, Permutation

STATE_VERSION = 1


class DataLoader:
    """Batches of a store's records; each iteration is one epoch.

    Parameters
    ----------
    store : Store or warpwell.train.Dataset
        With a schema, batches are dicts of arrays ``(rows, *shape)``: NumPy arrays in C order, or device arrays
        (DLPack) of a store on a GPU. Without one, batches are lists of bytes.
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
    keys : optional
        The keys to deliver, as for `Store.get_many`, for example a training split; a ``range`` needs no memory.
        Default: all keys that the store has now, in the order of `Store.keys_array`.

    Attributes
    ----------
    epoch : int
        The current epoch, or the next one between two iterations.

    Raises
    ------
    ArgumentError
        An option is not valid.
    KeyMissingError
        On iteration: the store does not have a key.

    Notes
    -----
    An iteration that is left early ends its epoch: the next iteration is the next epoch, so that a loop over a limited
    number of batches does not see the same samples each time. To continue in the middle of an epoch, keep the iterator,
    or load a state from `state_dict`. All ranks must start the same number of iterations, or call `set_epoch` before
    each.
    """

    def __init__(
        self,
        store: Any,
        batch_size: int = 256,
        shuffle: bool = True,
        seed: int = 0,
        prefetch: int = 4,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        keys: Any = None,
    ) -> None:
        require_store(store, keys)
        self.store = store
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
        if keys is None:
            self._keys = _keys_of(store.ordered() if hasattr(store, "ordered") else store.keys_array())
        else:
            self._keys = _keys_of(keys, given=True)
        self._crc: int | None = None
        self._place = _Place(0, 0)

    def __repr__(self) -> str:
        order = f"shuffled with seed {self.seed}" if self.shuffle else "in the order of keys"
        batches = f"{len(self)} batch{'' if len(self) == 1 else 'es'} of {self.batch_size}"
        part = f", rank {self.rank} of {self.world_size}" if self.world_size > 1 else ""
        return (
            f"<DataLoader of {name_of(self.store)}: {self.samples} samples in {batches}, {order}{part}, epoch"
            f" {self.epoch}>"
        )

    @property
    def epoch(self) -> int:
        """The current epoch, or the next one between two iterations."""
        return self._place.epoch

    @property
    def samples(self) -> int:
        """Number of samples of an epoch, over all ranks."""
        return self._keys.size

    def __len__(self) -> int:
        """Return the number of batches per epoch, which is the same for every rank."""
        whole, rest = divmod(self.samples, self.batch_size * self.world_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        place = self._place
        if place.begun:
            place = _Place(place.epoch + 1, 0)
        place.begun = True
        self._place = place
        fetch = _Fetch(self.store, self.batch_size)
        return _Epoch(Prefetch(self._parts(place), fetch.submit, self.prefetch), place)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next iteration delivers, from its start."""
        self._place = _Place(checked_integer(epoch, "epoch", minimum=0), 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the last delivered batch, as numbers that fit JSON and pickle.

        It is the same for all ranks after the same number of batches, and does not depend on how many ranks there are.
        The first call reads all keys once, for a checksum.
        """
        return {
            "version": STATE_VERSION,
            "seed": self.seed,
            "epoch": self._place.epoch,
            "position": self._place.position,
            "shuffle": self.shuffle,
            "samples": self.samples,
            "keys": self._checksum(),
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
        if samples != self.samples or keys != self._checksum():
            raise errors.ArgumentError(
                f"the state is of other keys ({samples} of them, here are {self.samples}), so its place means nothing"
                " here: open the store it was saved with, or pass the keys of then as keys=",
                name="state",
            )
        place = _Place(checked_integer(epoch, "epoch", minimum=0), checked_integer(position, "position", minimum=0))
        if place.position > self.samples:
            raise errors.ArgumentError(f"position {position} of {samples} samples: was the state edited?", name="state")
        self.seed = checked_integer(seed, "seed", minimum=None)
        self.shuffle = checked_flag(shuffle, "shuffle")
        self._place = place

    def _checksum(self) -> int:
        if self._crc is None:
            self._crc = 0
            for first in range(0, self.samples, 1 << 16):
                keys = self._keys.take(np.arange(first, min(first + (1 << 16), self.samples)))
                padded, lengths = keys.padded()
                self._crc = zlib.crc32(lengths.tobytes(), zlib.crc32(padded.tobytes(), self._crc))
        return self._crc

    def _parts(self, place: _Place) -> Iterator[_Part]:
        """Return an iterator of this rank's parts of an epoch, from a place."""
        order = Permutation(self.samples, self.seed, place.epoch) if self.shuffle and self.samples else None
        cuts = cut(self.samples, place.position, self.batch_size, self.rank, self.world_size, self.drop_last)
        # an order is computed faster for many positions at once
        return _parts(cuts, order, self._keys, max(1, BLOCK // self.batch_size))


def _parts(
    cuts: Iterator[tuple[int, int, int]], order: Permutation | None, keys: Keys | _KeyRange, together: int
) -> Iterator[_Part]:
    while group := list(itertools.islice(cuts, together)):
        positions = np.concatenate([np.arange(first, last) for first, last, _ in group])
        rows = positions if order is None else order(positions)
        at = 0
        for first, last, end in group:
            yield _Part(keys.take(rows[at : at + last - first]), end)
            at += last - first


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
    whole = batch_size * world_size
    while position < size:
        rows = min(whole, size - position)
        if rows < whole and drop_last:
            return
        end = position + rows
        yield position + rows * rank // world_size, position + rows * (rank + 1) // world_size, end
        position = end


class _Place:
    """The position in an epoch; advanced by its iterator."""

    def __init__(self, epoch: int, position: int) -> None:
        self.epoch = epoch
        self.position = position
        self.begun = False


class _Part(NamedTuple):
    """The keys of a batch, and the position where its global batch ends."""

    keys: Keys
    end: int


class _Epoch:
    """Iterator of an epoch's batches."""

    def __init__(self, ahead: Prefetch[_Part], place: _Place) -> None:
        self._ahead = ahead
        self._place = place
        self._over = False

    def __iter__(self) -> _Epoch:
        return self

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        place = self._place
        try:
            part, result = next(self._ahead)
            batch = _checked(part, *result)
        except StopIteration:
            self._over = True
            place.epoch, place.position, place.begun = place.epoch + 1, 0, False
            raise
        except BaseException:
            self.close()
            raise
        place.position = part.end
        return batch

    def close(self) -> None:
        """End the epoch here, and drop the batches that are being fetched."""
        self._over = True
        self._ahead.close()


class _Fetch:
    """Reads the batches of one iteration, with futures of a store on a GPU or with threads on the host.

    Parameters
    ----------
    store : Store
    batch_size : int
    """

    def __init__(self, store: Any, batch_size: int) -> None:
        self._store = store
        self._on_host = getattr(store, "device", None) in (None, "cpu")
        schema = getattr(store, "schema", None)
        self._shape = None
        if schema is not None and [field.nbytes for field in schema.fields] != [schema.nbytes]:
            self._shape = (batch_size, schema.nbytes)
        self._rows: list[NDArray[np.uint8]] = []

    def submit(self, part: _Part) -> Any:
        """Return the future of a batch."""
        keys = part.keys.words if part.keys.lengths is None else part.keys.padded()
        if self._on_host:
            return HostFuture(lambda: self._read(keys, part.keys.size))
        return self._store.get_async(keys)

    def _read(self, keys: Any, count: int) -> Any:
        """Read and return a batch; runs in a thread, because copies take as long as reads."""
        if self._shape is None:
            return self._store.get_many(keys)
        # Fields of several are views of whole records, over which sums would round in another order than over arrays
        # of their own. Records are read into memory that is used again, and only the copies are new.
        try:
            rows = self._rows.pop()
        except IndexError:
            rows = np.empty(self._shape, np.uint8)
        batch, found = self._store.get_many(keys, out=rows[:count])
        batch = {name: field.copy() for name, field in batch.items()}
        self._rows.append(rows)
        return batch, found


def _checked(part: _Part, batch: Any, found: Any) -> Any:
    there: NDArray[np.bool_] = np.asarray(found, dtype=bool)
    if not there.all():
        absent = np.flatnonzero(~there)
        key = part.keys.row(int(absent[0]))
        raise errors.KeyMissingError(
            f"the store does not have key {key!r} ({absent.size} of a batch of {there.size} are missing): was it"
            " deleted after the loader was made? Make the loader again, or pass keys= that the store has",
            key=part.keys.raw(int(absent[0])),
        )
    return batch


def require_store(store: Any, keys: Any) -> None:
    """Raise ArgumentError unless `store` is a store, and can list its keys if `keys` is left out."""
    if not hasattr(store, "get_many"):
        raise errors.ArgumentError(
            f"store is {store!r}: pass a store that is open, from warpwell.kv.open(path)", name="store"
        )
    if keys is None and not hasattr(store, "keys_array"):
        raise errors.ArgumentError(f"{store!r} does not list its keys: pass those to deliver as keys=", name="keys")


def name_of(store: Any) -> str:
    """Return the name of a store for a repr."""
    return repr(str(getattr(store, "path", None) or type(store).__name__))


class _KeyRange:
    """Integer keys in arithmetic progression, without a list of them."""

    def __init__(self, keys: range) -> None:
        self.size = len(keys)
        self._first = keys.start
        self._step = keys.step

    def take(self, rows: NDArray[np.int64]) -> Keys:
        return Keys(self._first + self._step * rows, None)


def _keys_of(keys: Any, *, given: bool = False) -> Keys | _KeyRange:
    """Return keys in the form that needs least memory; keys from the caller are copied, since they may change."""
    if isinstance(keys, range) and len(keys) > 2:
        as_keys([keys[0], keys[-1]])  # they have 64 bits, or an error says so
        return _KeyRange(keys)
    checked = as_keys(keys)
    if checked.lengths is None and checked.size and checked.all_integers:
        first, last = int(checked.words[0]), int(checked.words[-1])
        if last - first == checked.size - 1 and (np.diff(checked.words) == 1).all():
            return _KeyRange(range(first, last + 1))
    return checked.copied() if given else checked


Request = TypeVar("Request")


class Future(Protocol):
    """The interface of a future that a store's ``get_async`` returns."""

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
        Number of results that may be in flight or ready, besides the one that was delivered last. With 0 a request is
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
