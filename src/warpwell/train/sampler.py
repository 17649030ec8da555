"""`Sampler`: the shuffled order of the epochs of a dataset, the part of each rank, and the place to resume at.

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
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .._check import checked_flag, checked_integer
from ..kv import Permutation
from .dataset import Dataset

_logger = logging.getLogger(__name__)

STATE_VERSION = 1
_MIN_POSITIONS = 1 << 14
"""Positions of an order that are computed at once, which is faster than batch by batch."""


class Sampler:
    """The positions of each batch in a dataset: a ``batch_sampler`` of PyTorch's ``DataLoader`` that can resume.

    Each iteration is one epoch; its items are lists of positions. `DataLoader` has the same batches for the same
    options, and each loads the state of the other.

    Parameters
    ----------
    dataset : Dataset
    batch_size : int
        Rows per batch and rank.
    shuffle : bool
        If False, records come in the order of the keys.
    seed : int
        Orders of different seeds are unrelated. All ranks must use the same seed.
    rank, world_size : int
        The part of each global batch to deliver.
    drop_last : bool
        Skip the last global batch of an epoch if it is incomplete.

    Attributes
    ----------
    epoch : int
        The current epoch, or the next one between two iterations.
    skipped : list of int and bytes
        Keys, or row numbers, of the records that this rank has left out, which are part of the state. A loop over
        PyTorch's ``DataLoader`` passes the field "skipped" of each batch to `record_skipped`.

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
        """The current epoch, or the next one between two iterations."""
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
        """Set the epoch that the next iteration delivers, from its start."""
        self._progress = Progress(checked_integer(epoch, "epoch", minimum=0), 0)

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Return a place in the order, as numbers that fit JSON and pickle.

        It is the same for all ranks after the same number of batches, and does not depend on how many ranks there are,
        except for ``"skipped"``: the rank's list of that name, in which keys of bytes are in hexadecimal.
        The first call reads all keys once, for a checksum.

        Parameters
        ----------
        batches : int, optional
            The place after this number of batches of the current iteration. Default: after the last batch that was
            delivered. PyTorch's ``DataLoader`` draws batches from a `Sampler` ahead of its workers: pass the number of
            batches that your loop has received.

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
                    f"batches is {batches}, and the iteration has {max_batches}: count from 0 in each epoch",
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
        """Resume at a place: the next iteration delivers the rest of its epoch.

        Parameters
        ----------
        state : dict
            From `state_dict` of a sampler or loader with any batch size and any number of ranks. `seed` and `shuffle`
            are set to the state's.

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
        progress = Progress(
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

    def _parts(self, progress: Progress) -> Iterator[Part]:
        """Return an iterator of this rank's parts of an epoch, from a place."""
        order = Permutation(self.samples, self.seed, progress.epoch) if self.shuffle and self.samples else None
        cuts = cut(self.samples, progress.first, self.batch_size, self.rank, self.world_size, self.drop_last)
        together = max(1, _MIN_POSITIONS // self.batch_size)
        while group := list(itertools.islice(cuts, together)):
            positions = np.concatenate([np.arange(first, last) for first, last, _ in group])
            rows = positions if order is None else order(positions)
            start = 0
            for first, last, end in group:
                yield Part(rows[start : start + last - first], end)
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


class Progress:
    """A place in an epoch.

    Attributes
    ----------
    epoch : int
    first, position : int
        The positions in the order at which the iteration begins, and at which the last delivered batch ends.
    is_started : bool
        Whether an iteration has begun here; the next one is the next epoch.
    is_over : bool
        Whether a `Sampler` has delivered all positions; the loop may still wait for batches.
    """

    def __init__(self, epoch: int, position: int) -> None:
        self.epoch = epoch
        self.first = self.position = position
        self.is_started = self.is_over = False


class Part(NamedTuple):
    """The positions of a batch in the dataset, and the position in the order where its global batch ends."""

    rows: NDArray[np.int64]
    end: int
