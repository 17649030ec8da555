"""Records: log, index and reader of one store together."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .._os import clock, uninterrupted
from ..nvme import key_words
from ..storage import NativeMedium
from .index.index import Index, StoreState
from .index.reader import STALE, Reader, ValueBuffer, read_error
from .index.serve import kv_start
from .keys import Keys
from .log.compaction import CompactionReport, compact
from .log.format import INTEGER, size_of
from .log.journal import Pending
from .log.log import Log
from .log.verify import VerifyReport, verify
from .native import compiled
from .shards import shard_of, shards_of

Progress = Callable[[int, int], object]
_ATTEMPTS = 100
"""Times that values are looked up again because segments go; each time took a whole refresh or compaction."""

_RETRY = 4096
"""Records between attempts at a snapshot that does not fit on the disk: each writes all keys."""


class Records:
    """The records of a store.

    Any thread may read; `lock` is held for changes.

    Parameters
    ----------
    log : Log
        Owned by this object from now on.

    Attributes
    ----------
    writable : bool
    kinds : bool
        Keys are marked as integers or not; False in stores of format 1.
    """

    def __init__(self, log: Log) -> None:
        self.log = log
        self.kinds, self.writable, self.path = log.kinds, log.writable, log.path
        self.shard_count = len(log.segments.paths)
        self.lock = log.lock
        self._compacting = threading.Lock()
        self._retry_at = 0  # after a snapshot that failed: the sequence number from which on to try again
        self._changing = False
        self._unfinished = False  # a refresh was interrupted: the index may lack what the log has read
        self._forks: list[None] = []  # one for each thread that waits in `hold`
        self.state = StoreState()
        recovered, log.recovered = log.recovered, None
        assert recovered is not None
        self.index = Index(self.state, len(recovered))
        self.reader = Reader(self.state, self.path)
        self.get = self.reader.get
        """Return one value, None for an absent key; see `Reader.get`."""
        log.segments.on_segment(self.reader.on_segment)
        self.index.put(_keys(recovered.keys, recovered.key_lens), recovered.locs)

    def __len__(self) -> int:
        return len(self.index)

    # -- reads ----------------------------------------------------------------------------------------------

    def has(self, key: bytes | int) -> bool:
        """Return whether a key exists."""
        return self.reader.contains(key)

    def rows(
        self, keys: Keys, row_bytes: int, out: NDArray[np.uint8] | None = None
    ) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Return values of one size as rows, and a mask; see `Reader.rows`."""
        return self.reader.rows(keys, row_bytes, out)

    def values(self, keys: Keys) -> tuple[list[bytes | None], NDArray[np.bool_]]:
        """Return values of any size, None for absent keys, and a mask."""
        values, locations = self._located(self.reader.values, keys)
        return values, np.not_equal(locations[:, 0], 0)

    def buffer(self, keys: Keys) -> ValueBuffer:
        """Return values of any size in one buffer."""
        values: ValueBuffer = self._located(self.reader.buffer, keys)[0]
        return values

    def _located(self, read: Callable[..., Any], keys: Keys) -> tuple[Any, NDArray[np.int64]]:
        """Return the values that `read` returns with the rows to look up again, and the locations of the keys."""
        before: NDArray[np.int64] | None = None
        for _ in range(_ATTEMPTS):
            locations = self.index.lookup(keys)
            values, stale = read(keys, locations)
            if not stale.size:
                return values, locations
            # A segment that went between the look-up and the read has moved its keys. One that is not open though keys
            # are in it will not be open at the next attempt either: the store was closed, or is damaged.
            if before is not None and (locations[stale, 0] == before[stale, 0]).any():
                break
            before = locations
        raise read_error(self.path, keys.row(int(stale[0])), STALE)

    def contains(self, keys: Keys) -> NDArray[np.bool_]:
        """Return which keys exist, bool [N]."""
        return np.not_equal(self.index.lookup(keys)[:, 0], 0)

    def entries(self) -> tuple[Keys, NDArray[np.int64]]:
        """Return all keys and locations, in no order."""
        with self.lock:
            return self.index.entries()

    def sizes(self, keys: Keys) -> NDArray[np.int64]:
        """Return the bytes of the values of keys, 0 for absent ones."""
        locations = self.index.lookup(keys)
        sizes: NDArray[np.int64] = size_of(locations[:, 0], locations[:, 1])
        return sizes

    # -- changes --------------------------------------------------------------------------------------------

    def put(self, keys: Keys, values: Any) -> None:
        """Append values and index them; the last of equal keys wins."""
        with self.lock:
            padded, lengths = keys.marked() if self.kinds else keys.padded()
            shards = None if self.shard_count == 1 else shards_of(keys, self.shard_count)
            with uninterrupted():  # the log and the index would differ
                self.index.put(keys, self.log.append(padded, lengths, values, shards=shards))

    def put_one(self, key: bytes, value: Any, integer: bool = False) -> None:
        """Append and index one record."""
        with self.lock:
            mark = INTEGER if integer and self.kinds else 0
            shard = 0
            if self.shard_count > 1:
                shard = int(compiled(shard_of)(*key_words(key), len(key), self.shard_count))
            self.index.put_one(key, *self.log.append_one(key, value, mark, shard))

    def delete(self, keys: Keys) -> NDArray[np.bool_]:
        """Delete keys; return which existed (the first of equal keys)."""
        with self.lock:
            exist = self.contains(keys)
            if not exist.any():
                return exist
            with uninterrupted():
                self.log.append_deletes(*keys.take(exist).padded())
                return self.index.delete(keys)

    def commit(self) -> int:
        """Make all changes durable; return their sequence number."""
        with self.lock:
            sequence = self.log.commit()
            self._snapshot_if_due()
            return sequence

    def refresh(self) -> int:
        """Read the writer's commits since the last refresh; return how many records changed."""
        if self._forks:
            clock.sleep(1e-3)  # locks are not fair: a loop of refreshes would keep a fork out until it gives up
        with self.lock:
            self._changing = True
            try:
                reads_all, self._unfinished = self._unfinished, True
                changes = self.log.refresh(reads_all=reads_all)
                keys = _keys(changes.keys, changes.key_lens)
                if changes.reset:
                    self.index.replace(keys, changes.locs)
                elif keys.size:
                    self.index.put(keys, changes.locs)
                self._unfinished = False
                self._release()
                return keys.size
            finally:
                self._changing = False

    def uncommitted(self) -> int:
        """Return the number of changes that the next commit makes durable."""
        return self.log.uncommitted()

    @property
    def failed(self) -> bool:
        """Whether a write failed, after which no more are accepted."""
        return self.log.failed

    def close(self, *, commit: bool = True) -> None:
        """Commit and close. After a failed write nothing more is committed."""
        with self._compacting, self.lock:
            try:
                if not commit:
                    self.log._pending = Pending()  # or the log would commit it when it is closed
                elif self.log.writable and not self.log.failed:
                    self.log.commit()
                    self._snapshot_if_due()
            finally:
                self.reader.close()
                self.log.close()

    def _snapshot(self) -> None:
        keys, locations = self.index.entries()
        self.log.snapshot(*keys.padded(), locations)

    def _snapshot_if_due(self) -> None:
        """Write a snapshot if one is due. The commit is durable without it, so an error is only a warning."""
        if not self.log.snapshot_due or self.log.seq < self._retry_at:
            return
        try:
            self._snapshot()
        except (errors.StorageFullError, errors.StoreFailedError) as error:
            if self.log.failed and self.log.durability == "none":
                raise  # a sync of what was committed may be what failed
            first, self._retry_at = self._retry_at == 0, self.log.seq + _RETRY
            if first or self.log.failed:
                then = "accepts no more writes: close it and open it again" if self.log.failed else "tries again later"
                warnings.warn(
                    f"{self.path}: the commit is durable, but the snapshot after it failed"
                    f" ({error.__cause__ or error}). The store {then}",
                    RuntimeWarning,
                    stacklevel=4,
                )
        else:
            self._retry_at = 0
            self._release()

    def _release(self) -> None:
        """Release segments that no location refers to any more, once no reader is inside."""
        retired = self.log.retired()
        if retired and self.state.drain():
            self.log.release(retired)

    def compact(self, *, threshold: float = 0.5, progress: Progress | None = None) -> CompactionReport:
        """Copy live values from mostly dead segments, and delete these; other threads may continue."""

        def live() -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.int64]]:
            keys, locations = self.index.entries()
            return *keys.padded(), locations

        with self._compacting:
            report = compact(
                self.log,
                live=live,
                lookup=lambda keys, lengths: self.index.lookup(_keys(keys, lengths)),
                relocate=lambda keys, lengths, old, new: self.index.move(_keys(keys, lengths), old, new),
                threshold=threshold,
                progress=progress,
            )
            with self.lock:
                self._release()
            return report

    def verify(self, *, progress: Progress | None = None) -> VerifyReport:
        """Read and check all committed data."""
        return verify(self.path, progress=progress)

    # -- forks (see `lifetime`) -----------------------------------------------------------------------------

    def hold(self, seconds: float) -> bool:
        """Block refreshes until `let_go`; return False, without blocking, if one does not end in time."""
        self._forks.append(None)
        try:
            if not self.lock.acquire(timeout=seconds):
                return False
        finally:
            self._forks.pop()
        if self._changing:  # by this thread: it forks in a signal handler that came in the middle of it
            self.lock.release()
            return False
        return True

    def let_go(self) -> None:
        """Undo `hold`."""
        self.lock.release()

    def forked(self) -> None:
        """Continue in a forked child, without the parent's threads."""
        self.lock = self.log.lock = threading.RLock()
        self._compacting = threading.Lock()
        self._forks = []
        self.state.forked()
        self.reader.forked()

    # -- kernels --------------------------------------------------------------------------------------------

    def natives(self) -> list[NativeMedium]:
        """Return the functions that a controller calls for commands of kernels, for each shard."""
        return [NativeMedium(kv_start.address, 0, self.state.address)] * self.shard_count

    # -- figures --------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, Any]:
        """Return values for `StoreStatistics`."""
        with self.lock:
            _, locations = self.index.entries()
            counters = self.state.counters()
            return {
                "records": len(self.index),
                "live_bytes": int(size_of(locations[:, 0], locations[:, 1]).sum()),
                "disk_bytes": sum(map(folder_bytes, dict.fromkeys([self.path, *self.log.segments.paths]))),
                "segments": len(self.log.segments.ids()),
                "index_bytes": self.index.nbytes,
                "gets": counters["gets"],
                "hits": counters["hits"],
                "read_bytes": counters["bytes"],
                "read_errors": counters["errors"],
                "shards": self.shard_count,
            }


def folder_bytes(path: str) -> int:
    """Return the bytes of the files in a folder."""
    total = 0
    with os.scandir(path) as files:
        for file in files:
            with contextlib.suppress(FileNotFoundError):  # replaced meanwhile
                total += file.stat().st_size
    return total


def _keys(keys: NDArray[np.uint8], lengths: NDArray[np.uint8]) -> Keys:
    """Return keys from the log, which has checked them, as `Keys`."""
    return Keys(np.ascontiguousarray(keys).view(np.int64).reshape(-1, 2), lengths & np.uint8(INTEGER - 1))
