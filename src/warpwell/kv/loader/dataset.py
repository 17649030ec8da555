"""Dataset: a store as a sequence of records, for the data loaders of other libraries."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from ... import errors
from ..keys import Keys, as_keys
from ..opening import open_store
from .loader import require_store


class Dataset:
    """The records of a store by position; PyTorch's ``DataLoader`` accepts it and fetches a batch in one call.

    Parameters
    ----------
    store : Store
        A record is a dict of arrays for a store with a schema, bytes otherwise.
    keys : optional
        The keys of the dataset, as for `Store.get_many`. Default: all keys that the store has now, in the order of
        `Store.keys_array`.

    Raises
    ------
    KeyMissingError
        On access: a key was deleted from the store.
    ForkError
        On access in a forked process if the store is open for writing; on pickling if it is open for writing or on a
        GPU.

    Notes
    -----
    In a forked worker the store shows the records as of the fork. A dataset that is sent to a worker (spawn and
    forkserver) opens the store again there, at the first access.
    """

    def __init__(self, store: Any, keys: Any = None) -> None:
        require_store(store, keys)
        self._store: Any = store
        if keys is None:  # a store knows which keys are integers, and another's array of keys may not
            self._keys: Keys = as_keys(store.ordered() if hasattr(store, "ordered") else store.keys_array())
        else:
            self._keys = as_keys(keys).copied()
        self._path = store.path
        self._reopens = not store.writable and getattr(store, "device", None) in (None, "cpu")

    @property
    def store(self) -> Any:
        """The store, in this process."""
        if self._store is None:
            self._store = open_store(self._path, mode="r")
        return self._store

    def __len__(self) -> int:
        return self._keys.size

    def __repr__(self) -> str:
        return f"<Dataset of {str(self._path)!r}: {len(self)} records>"

    def __getitem__(self, index: int) -> Any:
        """Return one record; a negative index counts from the end."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several records, fetched as one batch."""
        rows = rows_of(indices, len(self), str(self._path))
        keys = self._keys.take(rows)
        batch, found = self.store.get_many(keys.words if keys.lengths is None else keys.padded())
        for k in np.flatnonzero(~np.asarray(found, dtype=bool))[:1]:
            key = keys.row(int(k))
            raise errors.KeyMissingError(
                f"the store does not have key {key!r} any more: was it deleted after the dataset was made? Make "
                "the dataset again",
                key=keys.raw(int(k)),
            )
        if not isinstance(batch, dict):
            return list(batch)
        return [{name: values[k] for name, values in batch.items()} for k in range(len(rows))]

    def __getstate__(self) -> dict[str, Any]:
        if not self._reopens:
            raise errors.ForkError(
                f"a dataset of {self._path} cannot be sent to another process, as its store is open for writing or on a"
                " GPU: open it with mode='r' and without a device, or load batches in this process (num_workers=0)"
            )
        return {**self.__dict__, "_store": None}


def rows_of(indices: Sequence[int] | np.ndarray[Any, Any], size: int, name: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return indices of a dataset of `size` rows as row numbers; negative ones count from the end.

    Raises
    ------
    ArgumentError, IndexRangeError
    """
    if isinstance(indices, np.ndarray) and indices.dtype.kind in "iu" and indices.ndim == 1:
        rows = (np.minimum(indices, size) if indices.dtype.kind == "u" else indices).astype(np.int64)
    else:
        try:
            indices = list(indices)
            rows = np.array([operator.index(i) for i in indices], np.int64)
        except (TypeError, OverflowError):
            wrong = next((i for i in indices if not _fits(i)), indices) if isinstance(indices, list) else indices
            if wrong is not indices and isinstance(wrong, int):
                raise _outside(wrong, size, name) from None
            raise _no_number(wrong) from None
        if indices and isinstance(indices[0], bool):  # True would be row 1
            raise _no_number(indices[0])
    rows[rows < 0] += size
    outside = np.flatnonzero((rows < 0) | (rows >= size))
    if outside.size:
        raise _outside(int(indices[int(outside[0])]), size, name)
    return rows


def _fits(index: Any) -> bool:
    try:
        return -(2**63) <= operator.index(index) < 2**63
    except TypeError:
        return False


def _outside(index: int, size: int, name: str) -> errors.IndexRangeError:
    return errors.IndexRangeError(f"index {index} of a dataset of {size} records", array=name, index=index, size=size)


def _no_number(index: Any) -> errors.ArgumentError:
    hint = ", np.flatnonzero(mask) of a mask" if isinstance(index, bool | np.bool_) else ""
    return errors.ArgumentError(
        f"index {index!r:.60} of a dataset: give a whole number, or a list of them to __getitems__(){hint}",
        name="index",
    )
