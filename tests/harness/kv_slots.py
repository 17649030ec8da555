"""Slots for an index of a key-value store."""

import numpy as np

from warpwell.kv.keys import Keys
from warpwell.kv.log.format import KEY_LEN_SHIFT, TOMBSTONE


def slots_at(keys: Keys, locations: np.ndarray) -> np.ndarray:
    """Return the slots of keys at locations, int64 [N, 2]."""
    return np.column_stack([keys.padded()[0].view(np.int64), locations])


def tombstones(keys: Keys) -> np.ndarray:
    """Return slots that delete keys."""
    lengths = keys.padded()[1].astype(np.int64)
    return slots_at(keys, np.column_stack([np.full(keys.size, TOMBSTONE), lengths << KEY_LEN_SHIFT]))
