"""Shards: one store over several folders, on several drives say; each key has its place by rendezvous hash."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..storage.medium import NativeMedium
from ..targets import device, i64, store_weak_as
from .index.index import words_of
from .index.layout import UINT8
from .index.native import compiled
from .index.slots import hash_of, key_at
from .keys import Keys, as_key
from .log.compaction import CompactionReport
from .log.log import Log
from .log.verify import VerifyReport
from .part import Part, Progress

MAX_SHARDS = 255
_SPREAD = -0x61C8864680B583EB
_MIX = -0x40A7B892E31B1A47
_LOW = 0x7FFFFFFF


@device
def shard_of(key0: int, key1: int, length: int, count: int) -> int:
    """Return the shard of a key, 0 to `count` - 1: the one whose number and key have the largest hash.

    With another shard at the end, a key stays or moves there. Part of the format: it never changes.
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
    """The folders of one store, with the interface of a `Part`.

    A batch is split by shard. A commit makes one shard after the other durable: after a crash in its middle
    the shards may differ by one commit. What was acknowledged is in all of them.

    Parameters
    ----------
    main : Log
        The store's own log, which holds no records, but the names of the folders and the writer's lock.
    parts : sequence of Part
        In the order of their numbers.
    """

    def __init__(self, main: Log, parts: Sequence[Part]) -> None:
        self.main = main
        self.path = main.path
        self.parts = list(parts)
        self.kinds = all(part.kinds for part in self.parts)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def place(self, keys: Keys) -> NDArray[np.uint8]:
        """Return the shard of each key, uint8 [N]."""
        out = np.empty(keys.size, np.uint8)
        lengths = 0 if keys.lengths is None else keys.lengths.ctypes.data
        compiled(_shards_of)(keys.words.ctypes.data, lengths, keys.size, len(self.parts), out.ctypes.data)
        return out

    def _split(self, keys: Keys) -> list[tuple[Part, NDArray[np.intp]]]:
        places = self.place(keys)
        rows = ((part, np.flatnonzero(places == k)) for k, part in enumerate(self.parts))
        return [(part, some) for part, some in rows if some.size]

    # -- reads ----------------------------------------------------------------------------------------------

    def get(self, key: Any) -> bytes | None:
        """See `Part.get`."""
        return self.part_of(key if type(key) is int else as_key(key)).get(key)

    def has(self, key: bytes | int) -> bool:
        """See `Part.has`."""
        return self.part_of(key).has(key)

    def part_of(self, key: bytes | int) -> Part:
        """Return the shard of one key."""
        words = (key, 0) if isinstance(key, int) else words_of(key)
        length = 8 if isinstance(key, int) else len(key)
        return self.parts[int(compiled(shard_of)(*words, length, len(self.parts)))]

    def rows(
        self, keys: Keys, row_bytes: int, out: NDArray[np.uint8] | None = None
    ) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """See `Part.rows`."""
        if out is None:
            out = np.empty((keys.size, row_bytes), np.uint8)
        found = np.empty(keys.size, np.bool_)
        for part, rows in self._split(keys):
            out[rows], found[rows] = part.rows(keys.take(rows), row_bytes)
        return out, found

    def values(self, keys: Keys) -> list[bytes | None]:
        """See `Part.values`."""
        out: list[bytes | None] = [None] * keys.size
        for part, rows in self._split(keys):
            for k, value in zip(rows.tolist(), part.values(keys.take(rows)), strict=True):
                out[k] = value
        return out

    def contains(self, keys: Keys) -> NDArray[np.bool_]:
        """See `Part.contains`."""
        out = np.zeros(keys.size, np.bool_)
        for part, rows in self._split(keys):
            out[rows] = part.contains(keys.take(rows))
        return out

    def entries(self) -> tuple[Keys, NDArray[np.int64]]:
        """See `Part.entries`; a location means something within its shard only."""
        found = [part.entries() for part in self.parts]
        keys = [k.padded() for k, _ in found]
        words = np.concatenate([raw.view(np.int64).reshape(-1, 2) for raw, _ in keys])
        integers = np.concatenate([np.broadcast_to(k.kinds, k.size) for k, _ in found])
        lengths = np.concatenate([n for _, n in keys])
        return Keys(words, lengths, integers), np.concatenate([places for _, places in found])

    def sizes(self, keys: Keys) -> NDArray[np.int64]:
        """See `Part.sizes`."""
        out = np.zeros(keys.size, np.int64)
        for part, rows in self._split(keys):
            out[rows] = part.sizes(keys.take(rows))
        return out

    # -- changes --------------------------------------------------------------------------------------------

    def put(self, keys: Keys, values: Any) -> None:
        """See `Part.put`."""
        for part, rows in self._split(keys):
            some = values[rows] if isinstance(values, np.ndarray) else [values[k] for k in rows.tolist()]
            part.put(keys.take(rows), some)

    def put_one(self, key: bytes, value: Any, integer: bool = False) -> None:
        """See `Part.put_one`."""
        self.part_of(key).put_one(key, value, integer)

    def delete(self, keys: Keys) -> NDArray[np.bool_]:
        """See `Part.delete`."""
        out = np.zeros(keys.size, np.bool_)
        for part, rows in self._split(keys):
            out[rows] = part.delete(keys.take(rows))
        return out

    def commit(self) -> int:
        """Make all changes durable; return the sum of the shards' sequence numbers."""
        return sum(part.commit() for part in self.parts)

    def refresh(self) -> int:
        """See `Part.refresh`."""
        return sum(part.refresh() for part in self.parts)

    def compact(self, *, threshold: float = 0.5, progress: Progress | None = None) -> CompactionReport:
        """See `Part.compact`. Segment numbers in the report are those of their shards."""
        reports = [part.compact(threshold=threshold, progress=progress) for part in self.parts]
        return CompactionReport(
            tuple(s for r in reports for s in r.segments),
            sum(r.moved for r in reports),
            sum(r.moved_bytes for r in reports),
            sum(r.freed_bytes for r in reports),
        )

    def verify(self, *, progress: Progress | None = None) -> VerifyReport:
        """See `Part.verify`."""
        out = VerifyReport(self.path)
        for part in self.parts:
            report = part.verify(progress=progress)
            out.records += report.records
            out.value_bytes += report.value_bytes
            out.journal_records += report.journal_records
            out.torn_bytes += report.torn_bytes
            out.problems += report.problems
        return out

    def uncommitted(self) -> int:
        """See `Part.uncommitted`."""
        return sum(part.uncommitted() for part in self.parts)

    @property
    def failed(self) -> bool:
        """Whether a write failed in any."""
        return any(part.failed for part in self.parts)

    def close(self, *, commit: bool = True) -> None:
        """Close all, also those behind one that fails; the first error is raised."""
        closings: list[Callable[[], None]] = [lambda part=part: part.close(commit=commit) for part in self.parts]  # type: ignore[misc]
        close_all([*closings, self.main.close])

    def folders(self) -> list[Part]:
        """Return all parts."""
        return self.parts

    # -- kernels and figures --------------------------------------------------------------------------------

    def serve(self, value_bytes: int | None = None) -> list[NativeMedium]:
        """Return what a controller calls, one for each shard; see `Part.serve`."""
        return [native for part in self.parts for native in part.serve(value_bytes)]

    def figures(self) -> dict[str, Any]:
        """See `Part.figures`."""
        figures = [part.figures() for part in self.parts]
        served = sorted({kind for f in figures for kind in f.pop("python_served")})
        return {**{name: sum(f[name] for f in figures) for name in figures[0]}, "python_served": served}


def close_all(closings: Sequence[Callable[[], None]]) -> None:
    """Call all of them and raise the first error."""
    first: BaseException | None = None
    for close in closings:
        try:
            close()
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first
