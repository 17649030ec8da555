"""Shards: the folder of a store, for example on its own drive, that holds a key's value (rendezvous hash)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..targets import device
from ..targets.primitives import i64, store_weak_as
from .index.index import key_at
from .index.sealed import UINT8, hash_of
from .keys import Keys
from .native import compiled

MAX_SHARDS = 255
_SPREAD = -0x61C8864680B583EB
_MIX = -0x40A7B892E31B1A47
_LOW = 0x7FFFFFFF


@device
def shard_of(key0: int, key1: int, length: int, count: int) -> int:
    """Return the shard of a key, 0 to `count` - 1: the one whose number and key have the largest hash.

    If a shard is added at the end, a key stays or moves to the new shard. This function is part of the format: it never
    changes.
    """
    key = hash_of(key0, key1, length)
    shard = 0
    largest = 0
    for k in range(count):
        weight = i64((key ^ i64((k + 1) * _SPREAD)) * _MIX)
        weight = i64((weight ^ ((weight >> 32) & _LOW)) * _SPREAD)
        weight = weight ^ ((weight >> 29) & _LOW)
        if k == 0 or weight > largest:
            shard = k
            largest = weight
    return shard


def _shards_of(keys, lengths, count, shards, out):  # type: ignore[no-untyped-def]
    for k in range(count):
        key0, key1, length = key_at(keys, lengths, k)
        store_weak_as(out + k, shard_of(key0, key1, length, shards), UINT8)
    return 0


def shards_of(keys: Keys, count: int) -> NDArray[np.uint8]:
    """Return the shard of each key, uint8 [N]."""
    out = np.empty(keys.size, np.uint8)
    lengths = 0 if keys.lengths is None else keys.lengths.ctypes.data
    compiled(_shards_of)(keys.words.ctypes.data, lengths, keys.size, count, out.ctypes.data)
    return out
