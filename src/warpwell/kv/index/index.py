"""Index: where the value of each key lies, in memory, for one writer and native readers."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...targets import private_memory
from ..keys import Keys
from ..log.format import INTEGER, KEY_LEN_SHIFT, TOMBSTONE
from ..native import compiled
from .layout import (
    S_TABLE,
    SLOT,
    T_LIVE,
    T_MASK,
    T_USED,
    TABLE_HEADER,
    StoreState,
    publish,
)
from .slots import lookup_many, move_many, put, put_many, rehash

MIN_SLOTS = 1024
_FULL = 0.7
"""Share of used slots at which the table is replaced."""


class Index:
    """Hash table from keys to locations.

    One thread at a time may change it; native readers need no lock and see each key's old or new location.

    Parameters
    ----------
    state : StoreState
        The state block through which readers find the table.
    capacity : int
        Number of keys that fit without growing.
    """

    def __init__(self, state: StoreState, capacity: int = 0) -> None:
        self._state = state
        self._table = _Table(_slots_for(capacity))
        self._publish()

    def __len__(self) -> int:
        return int(self._table.header[T_LIVE])

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self._table.nbytes

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return int(self._table.header[T_MASK]) + 1

    def lookup(self, keys: Keys, *, stripe: int = 0) -> NDArray[np.int64]:
        """Return locations, int64 [N, 2], zeros for absent keys (any thread)."""
        locations = np.empty((keys.size, 2), np.int64)
        compiled(lookup_many)(self._state.address, stripe, *_addresses(keys), keys.size, locations.ctypes.data)
        return locations

    def put(self, keys: Keys, locations: NDArray[np.int64]) -> NDArray[np.int64]:
        """Put keys at locations, in order; return those that were replaced, int64 [N, 2], zeros where none."""
        self.reserve(keys.size)
        locations = np.ascontiguousarray(locations, np.int64)
        replaced = np.empty((keys.size, 2), np.int64)
        compiled(put_many)(
            self._table.address, *_addresses(keys), keys.size, locations.ctypes.data, replaced.ctypes.data
        )
        return replaced

    def put_one(self, key: bytes, loc0: int, loc1: int) -> None:
        """Put one key at a location."""
        self.reserve(1)
        compiled(put)(self._table.address, *words_of(key), len(key), loc0, loc1)

    def delete(self, keys: Keys) -> NDArray[np.int64]:
        """Delete keys; return the locations that they had, int64 [N, 2], zeros for absent ones."""
        locations = np.zeros((keys.size, 2), np.int64)
        locations[:, 0] = TOMBSTONE
        replaced = np.empty((keys.size, 2), np.int64)
        # A tombstone takes no new slot: absent keys are left out.
        compiled(put_many)(
            self._table.address, *_addresses(keys), keys.size, locations.ctypes.data, replaced.ctypes.data
        )
        return replaced

    def move(self, keys: Keys, before: NDArray[np.int64], after: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Move keys whose location is still `before` to `after` (int64 [N, 2]); return which keys were moved."""
        moved = np.empty(keys.size, np.bool_)
        before, after = np.ascontiguousarray(before, np.int64), np.ascontiguousarray(after, np.int64)
        compiled(move_many)(
            self._table.address,
            *_addresses(keys),
            keys.size,
            before.ctypes.data,
            after.ctypes.data,
            moved.ctypes.data,
        )
        return moved

    def entries(self) -> tuple[Keys, NDArray[np.int64]]:
        """Return all keys and their locations, in no order."""
        slots = self._table.slots
        live = slots[slots[:, 2] > 0]
        marked = live[:, 3] >> KEY_LEN_SHIFT
        keys = Keys(np.ascontiguousarray(live[:, :2]), (marked & 31).astype(np.uint8), marked & INTEGER != 0)
        return keys, np.ascontiguousarray(live[:, 2:])

    def reserve(self, more: int) -> None:
        """Make room for `more` new keys."""
        used = int(self._table.header[T_USED])
        if used + more <= _FULL * self.capacity:
            return
        # Tombstones are left behind, so the new table need not be larger than the old one.
        table = _Table(_slots_for(2 * len(self) + more))
        compiled(rehash)(self._table.address, table.address)
        self._take(table)

    def replace(self, keys: Keys, locations: NDArray[np.int64]) -> None:
        """Replace all keys; readers see either all of the old keys or all of the new ones."""
        locations = np.ascontiguousarray(locations, np.int64)
        table = _Table(_slots_for(keys.size))
        compiled(put_many)(table.address, *_addresses(keys), keys.size, locations.ctypes.data, 0)
        self._take(table)

    def _take(self, table: _Table) -> None:
        """Switch to another, filled table."""
        old, self._table = self._table, table
        self._publish()
        self._state.retire(old.free)

    def _publish(self) -> None:
        compiled(publish)(self._state.address, S_TABLE, self._table.address)


class _Table:
    """The memory of one table; in huge pages if the system has them, since lookups are random."""

    def __init__(self, slots: int) -> None:
        self.nbytes = TABLE_HEADER + SLOT * slots
        self._raw: Any = private_memory(self.nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._raw.madvise(mmap.MADV_HUGEPAGE)
        self._hold: Any = ctypes.c_char.from_buffer(self._raw)
        self.address = ctypes.addressof(self._hold)
        words = np.frombuffer(self._raw, np.int64, self.nbytes // 8)
        self.header = words[: TABLE_HEADER // 8]
        self.slots = words[TABLE_HEADER // 8 :].reshape(slots, SLOT // 8)
        self.header[T_MASK] = slots - 1

    def free(self) -> None:
        """Release the memory (it is freed when no array views it any more)."""
        self._raw = self._hold = None


def words_of(key: bytes) -> tuple[int, int]:
    """Return a key as two words."""
    low = int.from_bytes(key[:8], "little")
    high = int.from_bytes(key[8:], "little")
    return low - ((low & 1 << 63) << 1), high - ((high & 1 << 63) << 1)


def _slots_for(keys: int) -> int:
    slots = MIN_SLOTS
    while _FULL * slots < keys:
        slots *= 2
    return slots


def _addresses(keys: Keys) -> tuple[int, int]:
    return keys.words.ctypes.data, 0 if keys.lengths is None else keys.lengths.ctypes.data
