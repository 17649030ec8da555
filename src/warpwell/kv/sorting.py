"""Keys in the order of their bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .keys import Keys, from_bytes


def sorted_keys(keys: Keys) -> Keys:
    """Return keys in the order of their bytes; a key comes before those that continue it."""
    return keys.take(np.lexsort(_columns(keys)))


def with_prefix(keys: Keys, prefix: bytes, start: bytes | None) -> Keys:
    """Return the keys that begin with `prefix` and do not come before `start`."""
    raw, lengths = keys.padded()
    keep = lengths >= len(prefix)
    if prefix and len(prefix) <= raw.shape[1]:
        keep &= (raw[:, : len(prefix)] == np.frombuffer(prefix, np.uint8)).all(axis=1)
    if start is not None:
        length, low, high = _columns(keys)
        first = [int(c[0]) for c in _columns(from_bytes([start]))]
        after = (high > first[2]) | (high == first[2]) & ((low > first[1]) | (low == first[1]) & (length >= first[0]))
        keep &= after
    return keys if keep.all() else keys.take(keep)


def _columns(keys: Keys) -> tuple[NDArray[np.uint8], NDArray[np.uint64], NDArray[np.uint64]]:
    """Return what orders keys, the most important last: zero padding and then the length tell all apart."""
    raw, lengths = keys.padded()
    big = np.ascontiguousarray(raw).view(">u8").reshape(-1, 2).astype(np.uint64)
    return lengths, big[:, 1], big[:, 0]
