"""Shards: one store in several folders, for example on several drives; a rendezvous hash assigns keys to shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..nvme import key_words
from ..storage import NativeMedium
from ..targets import device
from ..targets.primitives import i64, store_weak_as
from .index.index import UINT8, hash_of, key_at
from .keys import Keys, as_key
from .log.compaction import CompactionReport
from .log.log import Log
from .log.verify import VerifyReport
from .native import compiled
from .shard import Progress, Shard
from .shard_folders import verify_all

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
    best = 0
    most = 0
    for shard in range(count):
        weight = i64((key ^ i64((shard + 1) * _SPREAD)) * _MIX)
        weight = i64((weight ^ ((weight >> 32) & _LOW)) * _SPREAD)
        weight = weight ^ ((weight >> 29) & _LOW)
        if shard == 0 or weight > most:
            best = shard
            most = weight
    return best


def _shards_of(keys, lengths, count, shards, out):  # type: ignore[no-untyped-def]
    for k in range(count):
        key0, key1, length = key_at(keys, lengths, k)
        store_weak_as(out + k, shard_of(key0, key1, length, shards), UINT8)
    return 0


class Shards:
    """The folders of one store, with the interface of a `Shard`.

    A batch is split by shard. A commit makes one shard after the other durable: after a crash during a commit the
    shards may differ by one commit. Acknowledged commits are in all of them.

    Parameters
    ----------
    main : Log
        The store's own log, which holds no records, only the names of the folders and the writer's lock.
    shards : sequence of Shard
        In the order of their numbers.
    """

    def __init__(self, main: Log, shards: Sequence[Shard]) -> None:
        self.main = main
        self.path = main.path
        self.shards = list(shards)
        self.kinds = all(shard.kinds for shard in self.shards)

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    def place(self, keys: Keys) -> NDArray[np.uint8]:
        """Return the shard of each key, uint8 [N]."""
        out = np.empty(keys.size, np.uint8)
        lengths = 0 if keys.lengths is None else keys.lengths.ctypes.data
        compiled(_shards_of)(keys.words.ctypes.data, lengths, keys.size, len(self.shards), out.ctypes.data)
        return out

    def _split(self, keys: Keys) -> list[tuple[Shard, NDArray[np.intp]]]:
        places = self.place(keys)
        rows = ((shard, np.flatnonzero(places == k)) for k, shard in enumerate(self.shards))
        return [(shard, some) for shard, some in rows if some.size]

    def _gathered(self, method: Callable[[Shard, Keys], NDArray[Any]], keys: Keys, dtype: type) -> NDArray[Any]:
        """Call a method of each shard for its keys; return the results in the order of the keys."""
        out: NDArray[Any] = np.zeros(keys.size, dtype)
        for shard, rows in self._split(keys):
            out[rows] = method(shard, keys.take(rows))
        return out

    # -- reads ----------------------------------------------------------------------------------------------

    def get(self, key: Any) -> bytes | None:
        """Return one value, None for an absent key."""
        return self.shard_for(key if type(key) is int else as_key(key)).get(key)

    def has(self, key: bytes | int) -> bool:
        """Return whether a key exists."""
        return self.shard_for(key).has(key)

    def shard_for(self, key: bytes | int) -> Shard:
        """Return the shard of one key."""
        words = (key, 0) if isinstance(key, int) else key_words(key)
        length = 8 if isinstance(key, int) else len(key)
        return self.shards[int(compiled(shard_of)(*words, length, len(self.shards)))]

    def rows(
        self, keys: Keys, row_bytes: int, out: NDArray[np.uint8] | None = None
    ) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Return values of one size as rows, and a mask."""
        if out is None:
            out = np.empty((keys.size, row_bytes), np.uint8)
        found = np.empty(keys.size, np.bool_)
        for shard, rows in self._split(keys):
            out[rows], found[rows] = shard.rows(keys.take(rows), row_bytes)
        return out, found

    def values(self, keys: Keys) -> list[bytes | None]:
        """Return values of any size, None for absent keys."""
        out: list[bytes | None] = [None] * keys.size
        for shard, rows in self._split(keys):
            for k, value in zip(rows.tolist(), shard.values(keys.take(rows)), strict=True):
                out[k] = value
        return out

    def contains(self, keys: Keys) -> NDArray[np.bool_]:
        """Return which keys exist, bool [N]."""
        return self._gathered(Shard.contains, keys, np.bool_)

    def entries(self) -> tuple[Keys, NDArray[np.int64]]:
        """Return all keys and locations, in no order; a location is valid only within its shard."""
        found = [shard.entries() for shard in self.shards]
        keys = [k.padded() for k, _ in found]
        words = np.concatenate([raw.view(np.int64).reshape(-1, 2) for raw, _ in keys])
        integers = np.concatenate([np.broadcast_to(k.kinds, k.size) for k, _ in found])
        lengths = np.concatenate([n for _, n in keys])
        return Keys(words, lengths, integers), np.concatenate([places for _, places in found])

    def sizes(self, keys: Keys) -> NDArray[np.int64]:
        """Return the bytes of the values of keys, 0 for absent ones."""
        return self._gathered(Shard.sizes, keys, np.int64)

    # -- changes --------------------------------------------------------------------------------------------

    def put(self, keys: Keys, values: Any) -> None:
        """Append values to their shards and index them."""
        for shard, rows in self._split(keys):
            some = values[rows] if isinstance(values, np.ndarray) else [values[k] for k in rows.tolist()]
            shard.put(keys.take(rows), some)

    def put_one(self, key: bytes, value: Any, integer: bool = False) -> None:
        """Append and index one record."""
        self.shard_for(key).put_one(key, value, integer)

    def delete(self, keys: Keys) -> NDArray[np.bool_]:
        """Delete keys; return which existed."""
        return self._gathered(Shard.delete, keys, np.bool_)

    def commit(self) -> int:
        """Make all changes durable; return the sum of the shards' sequence numbers."""
        return sum(shard.commit() for shard in self.shards)

    def refresh(self) -> int:
        """Read the writer's commits since the last refresh; return how many records changed."""
        return sum(shard.refresh() for shard in self.shards)

    def compact(self, *, threshold: float = 0.5, progress: Progress | None = None) -> CompactionReport:
        """Compact one shard after the other; segment numbers in the report are those of their shards."""
        reports = [shard.compact(threshold=threshold, progress=progress) for shard in self.shards]
        return CompactionReport(
            tuple(s for r in reports for s in r.segments),
            sum(r.moved for r in reports),
            sum(r.moved_bytes for r in reports),
            sum(r.freed_bytes for r in reports),
        )

    def verify(self, *, progress: Progress | None = None) -> VerifyReport:
        """Read and check all committed data; return one report for all shards."""
        return verify_all(self.path, progress=progress)

    def uncommitted(self) -> int:
        """Return the number of changes that the next commit makes durable."""
        return sum(shard.uncommitted() for shard in self.shards)

    @property
    def failed(self) -> bool:
        """Whether a write failed in any shard."""
        return any(shard.failed for shard in self.shards)

    def close(self, *, commit: bool = True) -> None:
        """Close all shards, even after an error; then raise the first error."""
        close_all([*(partial(shard.close, commit=commit) for shard in self.shards), self.main.close])

    def folders(self) -> list[Shard]:
        """Return all shards."""
        return self.shards

    # -- kernels and figures --------------------------------------------------------------------------------

    def natives(self) -> list[NativeMedium]:
        """Return the function that a controller calls, one for each shard."""
        return [native for shard in self.shards for native in shard.natives()]

    def figures(self) -> dict[str, Any]:
        """Return the sums of the shards' statistics."""
        figures = [shard.figures() for shard in self.shards]
        return {name: sum(f[name] for f in figures) for name in figures[0]}


def close_all(closings: Sequence[Callable[[], None]]) -> None:
    """Call all functions, then raise the first error."""
    first: BaseException | None = None
    for close in closings:
        try:
            close()
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first
