"""Keys in order: that of `Store.list` and of positions, and that of their bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .keys import Keys, as_keys

Columns = tuple[NDArray[Any], ...]


def in_order(keys: Keys) -> Keys:
    """Return keys in the order of stores: integers ascending, and then all others in the order of their bytes."""
    if keys.all_integers:
        return Keys(np.sort(keys.numbers()), None)
    return keys.take(np.lexsort(_columns(keys)))


def in_byte_order(keys: Keys) -> Keys:
    """Return keys in the order of their bytes, integers too; a key comes before those that continue it."""
    return keys.take(np.lexsort(_columns(keys._replace(integers=False))))


def with_prefix(keys: Keys, prefix: bytes, start: int | bytes | None) -> Keys:
    """Return the keys that begin with `prefix`, as no integer does, and do not come before `start`."""
    raw, lengths = keys.padded()
    keep = lengths >= len(prefix)
    if prefix and len(prefix) <= raw.shape[1]:
        keep &= (raw[:, : len(prefix)] == np.frombuffer(prefix, np.uint8)).all(axis=1) & ~np.asarray(keys.kinds)
    if start is not None:
        later = np.ones(keys.size, np.bool_)
        for column, first in zip(_columns(keys), _columns(as_keys([start])), strict=True):  # the least important first
            later = (column > first[0]) | (column == first[0]) & later
        keep &= later
    return keys if keep.all() else keys.take(keep)


def _columns(keys: Keys) -> Columns:
    """Return what orders keys, the most important last: zero padding and then the length tell all names apart."""
    raw, lengths = keys.padded()
    big = np.ascontiguousarray(raw).view(">u8").reshape(-1, 2).astype(np.uint64)
    integers = np.broadcast_to(keys.kinds, keys.size)
    big[integers, 0] = keys.numbers()[integers].view(np.uint64) ^ np.uint64(1 << 63)
    return lengths, big[:, 1], big[:, 0], ~integers
