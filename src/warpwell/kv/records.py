"""Records: log, index and reader of one store together."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .._os import clock, uninterrupted
from ..storage import NativeMedium
from .index.index import Index, StoreState
from .index.reader import STALE, Reader, ValueBuffer, other_size
from .index.serve import kv_start
from .keys import MAX_KEY, Key, Keys, as_key, as_keys, from_bytes, is_integer, one_key, suffix_of
from .log.checksum import BAD_CRC
from .log.format import LONG, MAX_VALUE, size_of
from .log.journal import Pending
from .log.log import Log
from .log.segments import too_large
from .log.shards import shards_of
from .log.staged import Staged

STAGED_BYTES = 1 << 20
"""Maximum size of all staged records, in bytes; a larger value is not staged."""
STAGED_RECORD_BYTES = 128
"""Memory of a staged record in addition to its value, in bytes: more than its journal record and padding."""

_RETRY = 4096
"""Number of records between attempts at a snapshot that does not fit on the disk: each attempt writes all keys."""


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
    """

    def __init__(self, log: Log) -> None:
        self.log = log
        self.writable, self.path = log.writable, log.path
        self.shard_count = len(log.segments.paths)
        self.lock = log.lock
        self._compacting = threading.RLock()
        self._is_compacting = False
        self._retry_at = 0  # after a failed snapshot: the sequence number at which to try again
        self._changing = False
        self._unfinished = False  # a refresh was interrupted: the index may lack records that the log has read
        self._seq = log.seq  # sequence number of the last complete refresh
        self._forks: list[None] = []  # an item for each thread that waits in `block_refreshes`
        self.staged: Staged = {}
        self.staged_bytes = 0  # approximate if several threads put
        self.max_staged_bytes = STAGED_BYTES if log.writable and log.durability != "always" else 0
        if log.writable:
            log.guard.on_failure = self._stop_staging
        self._flushing: Staged = {}
        self._staged_reads = self._staged_read_bytes = 0
        self._lost = 0
        self.state = StoreState()
        recovered, log.recovered = log.recovered, None
        assert recovered is not None
        self.index = Index(self.state, recovered.base, recovered.slots)
        log.on_snapshot = self.index.replace
        self.reader = Reader(self.state, self.path, log.segments.path)
        self._read: Callable[[Any], bytes | None] = self.reader.getter(self.reader.get)
        self.unusable: Callable[[], Exception] | None = None
        """Returns the error for a store that cannot be used any more."""
        log.segments.on_segment(self.reader.on_segment)

    def __len__(self) -> int:
        self.flush()
        if self.index.is_counted:
            return len(self.index)
        with self.lock:
            return len(self.index)

    # -- reads ----------------------------------------------------------------------------------------------

    def get(self, key: bytes | int) -> bytes | None:
        """Return one value, None for an absent key."""
        if self.staged or self._flushing:
            value = self._staged_value(as_key(key))
            if value is not None:
                self._staged_reads += 1
                self._staged_read_bytes += len(value)
                return value
        return self._read(key)

    def _staged_value(self, key: bytes) -> bytes | None:
        """Return the value of a record that is staged or being flushed, else None. Other records are in the index."""
        found = self.staged.get(key)
        if found is None:
            found = self._flushing.get(key)
        return found[0] if type(found) is tuple else found  # type: ignore[return-value]

    def has_key(self, key: Any) -> bool:
        """Return whether a key exists."""
        raw = as_key(key)
        if self._staged_value(raw) is not None:
            return True
        if len(raw) <= MAX_KEY:
            return self.reader.contains(int(key) if is_integer(key) else raw)
        found = self.reader.has_long(raw)
        return bool(self.contains(one_key(raw))[0]) if found is None else found

    def place_of(self, key: Key) -> tuple[str, int | None]:
        """Return the file and the byte offset of the value of a key, for messages."""
        return self.reader.place_of(int(self.index.lookup(as_keys([key]))[0, 0]))

    def error(self, key: int | bytes, status: int) -> Exception:
        """Return the exception for an error code of a key; see `Reader.error`."""
        return self.reader.error(key, status, int(self.index.lookup(as_keys([key]))[0, 0]))

    def rows(
        self, keys: Keys, row_bytes: int, out: NDArray[np.uint8] | None = None
    ) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Return values of one size as rows, and a mask; see `Reader.rows`."""
        if keys.full is None:
            self.flush()
            return self.reader.rows(keys, row_bytes, out)
        read = self.buffer(keys)
        wrong = np.flatnonzero(read.found & (read.sizes != row_bytes))
        if wrong.size:
            raise other_size(self.path, keys.row(int(wrong[0])), int(read.sizes[wrong[0]]), row_bytes)
        out = np.empty((keys.size, row_bytes), np.uint8) if out is None else out
        out[:] = 0
        out[read.found] = read.buffer[read.starts[read.found, None] + np.arange(row_bytes)]
        return out, read.found

    def values(self, keys: Keys) -> tuple[list[bytes | None], NDArray[np.bool_]]:
        """Return values of any size, None for absent keys, and a mask."""
        self.flush()
        return self.reader.values(keys)

    def buffer(self, keys: Keys) -> ValueBuffer:
        """Return values of any size in one buffer."""
        self.flush()
        return self.reader.buffer(keys)

    def _stored_keys(self, keys: Keys) -> tuple[NDArray[np.object_], NDArray[np.int64]]:
        """Return the long keys that are stored for keys (see `Reader.long_keys`), and the locations."""

        def read(locations: NDArray[np.int64]) -> tuple[NDArray[np.object_], NDArray[np.intp]]:
            locations[:] = self.index.lookup(keys)
            return self.reader.long_keys(keys, locations)

        return self.reader.located(keys, read)

    def contains(self, keys: Keys) -> NDArray[np.bool_]:
        """Return which keys exist, bool [N]."""
        if keys.full is None:
            return np.not_equal(self.index.lookup(keys)[:, 0], 0)
        stored, locations = self._stored_keys(keys)
        return np.not_equal(locations[:, 0], 0) & _are_same(keys.full, stored)

    def entries(self) -> tuple[Keys, NDArray[np.int64]]:
        """Return all keys and locations, in arbitrary order.

        Raises
        ------
        CorruptionError
            A long key, which is stored after its value, is damaged.
        """
        with self.lock:
            self.flush()
            keys, locations = self.index.entries()
            if keys.lengths is None or LONG not in keys.lengths:
                return keys, locations
            stored, stale = self.reader.long_keys(keys, locations)
            damaged = stale if stale.size else np.flatnonzero(stored == b"")
            if damaged.size:
                k = int(damaged[0])
                raise self.reader.error(keys.raw(k), STALE if stale.size else BAD_CRC, int(locations[k, 0]))
            return keys._replace(full=stored), locations

    def sizes(self, keys: Keys) -> NDArray[np.int64]:
        """Return the size of each key's value in bytes, 0 for absent keys."""
        self.flush()
        locations = self.index.lookup(keys)
        sizes: NDArray[np.int64] = size_of(locations[:, 0], locations[:, 1])
        if keys.full is not None:
            suffixes = [0 if key is None else len(suffix_of(key)) for key in keys.full]
            sizes[locations[:, 0] != 0] -= np.array(suffixes)[locations[:, 0] != 0]
        return sizes

    # -- changes --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        """Hold the lock and defer signal handlers while log and index change, so that the two stay consistent."""
        with self.lock, uninterrupted():
            if self._changing:
                raise errors.SharingError(
                    f"{self.path} is being changed by a call that this call interrupts: do not use a store in a "
                    "finalizer",
                    path=self.path,
                )
            self._changing = True
            try:
                yield
            finally:
                self._changing = False

    def put(self, keys: Keys, values: Any) -> None:
        """Append values and index them; if a key occurs several times, its last value counts."""
        with self.change():
            self._flush()
            if keys.full is not None:
                self._check_hashes(keys)
                values = _with_suffixes(keys, values)
            shards = None if self.shard_count == 1 else shards_of(keys, self.shard_count)
            self.index.put(self.log.append(*keys.marked(), values, shards=shards))

    def put_one(self, key: bytes, value: Any, integer: bool) -> None:
        """Put one record: stage a copy of it, or append and index it at once if it is large or staging is off."""
        if len(key) > MAX_KEY:
            return self.put(from_bytes([key]), [value])
        if type(value) is not bytes:
            value = bytes(value)
        nbytes = len(value) + STAGED_RECORD_BYTES
        with self.lock:
            if self.staged_bytes + nbytes > self.max_staged_bytes:
                self.flush()
            if nbytes <= self.max_staged_bytes:
                self.staged[key] = (value,) if integer else value
                self.staged_bytes += nbytes
            else:
                self.put(from_bytes([key])._replace(integers=integer), [value])

    def flush(self) -> None:
        """Append and index the staged records.

        Raises
        ------
        StorageFullError
            The records stay staged.
        StoreFailedError
            The records are lost; `uncommitted` still counts them.
        """
        if self.staged or self._flushing:
            with self.change():
                self._flush()

    def _stop_staging(self) -> None:
        self.max_staged_bytes = 0

    def _flush(self) -> None:
        """Append and index the staged records; see `flush`.

        `Store.put` stages a record without the lock, and stages it again if `staged` was replaced in the meantime.
        Other threads find each record in `staged`, in `_flushing` or in the index.
        """
        if self._flushing:  # left by a failed call
            self._write_flushing()
        if self._take_staged():
            self._write_flushing()

    def _take_staged(self) -> bool:
        """Move the staged records to `_flushing`; return whether there are any."""
        self._flushing = staged = self.staged
        self.staged = {}
        self._flushing = staged.copy()
        return bool(self._flushing)

    def _write_flushing(self, *, commit: bool = False) -> int | None:
        """Append and index the records in `_flushing`; with `commit` only if one call can commit them, too.

        Returns the sequence number of the commit, or None if nothing was committed.
        """

        def index(slots: NDArray[np.int64]) -> None:
            self.index.put(slots)
            self._flushing, self.staged_bytes = {}, 0

        try:
            if commit:
                return self.log.commit_staged(self._flushing, self.staged_bytes, index)
            index(self.log.append_staged(self._flushing, self.staged_bytes))
            return None
        except errors.StoreFailedError:
            self._lost += len(self._flushing)
            self._flushing = {}
            raise

    def _check_hashes(self, keys: Keys) -> None:
        """Raise ArgumentError if a long key has the same hash as another key in the store or in the batch."""
        assert keys.full is not None
        stored, _ = self._stored_keys(keys)
        keys_by_hash: dict[bytes, bytes] = {}
        for k, key in enumerate(keys.full):
            if key is not None:
                first = keys_by_hash.setdefault(keys.words[k].tobytes(), stored[k] or key)
                if first != key:
                    raise errors.ArgumentError(
                        f"keys {key!r} and {first!r} have the same hash, so {self.path} can store only one of them: "
                        "change one key",
                        name="key",
                    )

    def delete(self, keys: Keys) -> int:
        """Delete keys; return how many existed."""
        with self.change():
            self._flush()
            existing_keys = keys.take(self.contains(keys))  # without long keys that have the hash of another key
            if not existing_keys.size:
                return 0
            return self.index.put(self.log.append_deletes(*existing_keys.padded()))

    def commit(self) -> int:
        """Make all changes durable; return their sequence number."""
        with self.change():
            # If a failed call left records, the group has two parts.
            sequence = self._write_flushing(commit=True) if not self._flushing and self._take_staged() else None
            if sequence is None:
                self._flush()
                sequence = self.log.commit()
            self._snapshot_if_due()
            return sequence

    def seal(self) -> None:
        """Commit, and write an index of all records, unless the snapshot already contains all of them."""
        with self.change():
            self._flush()
            self.log.commit()
            if not self.log.is_sealed:
                self.snapshot()
                self._release()

    def refresh(self) -> int:
        """Read the writer's commits since the last refresh; return how many records changed."""
        if self._forks:
            clock.sleep(1e-3)  # locks are not fair: a loop of refreshes would block a fork until it times out
        with self.lock, uninterrupted():  # a signal handler may refresh, too
            self._changing = True
            try:
                reads_all, self._unfinished = self._unfinished, True
                changes = self.log.refresh(reads_all=reads_all)
                if changes.records is not None:
                    self.index.replace(changes.records.base, changes.records.slots)
                elif changes.changed:
                    self.index.put(changes.slots)
                self._unfinished = False
                changed, self._seq = max(self.log.seq - self._seq, changes.changed), self.log.seq
                self._release()
                return changed
            finally:
                self._changing = False

    def uncommitted(self) -> int:
        """Return the number of changes that the next commit makes durable."""
        return self.log.uncommitted() + len(self._flushing) + len(self.staged) + self._lost

    def close(self, *, commit: bool = True) -> None:
        """Commit and close. After a failed write nothing more is committed."""
        with self._compacting, self.lock, uninterrupted():
            self._stop_staging()
            try:
                if not commit:
                    self.log._pending = Pending()  # otherwise `log.close` would commit these records
                elif self.log.writable and not self.log.failed:
                    try:
                        self._flush()
                    except errors.StorageFullError:
                        self.log._pending = Pending()  # a group is committed as a whole
                        raise
                    self.log.commit()
                    self._snapshot_if_due()
            finally:
                self.index.close()
                self.reader.close()
                self.log.close()
                self.log.guard.on_failure = None  # a reference cycle would delay the freeing of memory

    def snapshot(self) -> None:
        """Write a snapshot of all records in the index; see `Log.snapshot`."""
        self.log.snapshot(self.index.slots())

    def _snapshot_if_due(self) -> None:
        """Write a snapshot if one is due. The commit is durable without it, so an error is only a warning."""
        if not self.log.snapshot_due or self.log.seq < self._retry_at:
            return
        try:
            self.snapshot()
        except (errors.StorageFullError, errors.StoreFailedError, errors.CorruptionError) as error:
            if self.log.failed and self.log.durability == "none":
                raise  # the failed sync may be the sync of committed records
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
        retired = sorted(self.log.retired)
        if retired and self.state.drain():
            self.log.release(retired)

    @contextlib.contextmanager
    def for_compaction(self) -> Iterator[None]:
        """Keep out other compactions, and at the end release retired segments; other threads may continue."""
        with self._compacting:
            if self._is_compacting:
                raise errors.SharingError(
                    f"{self.path} is being compacted by a call that this call interrupts: compact it after that call",
                    path=self.path,
                )
            self._is_compacting = True
            try:
                yield
                with self.lock:
                    self._release()
            except Exception:
                self.log.check_open()  # a signal handler or `progress` closed the store
                raise
            finally:
                self._is_compacting = False

    # -- forks (see `lifetime`) -----------------------------------------------------------------------------

    def block_refreshes(self, seconds: float) -> bool:
        """Block refreshes until `unblock_refreshes`; return False, without blocking, if one does not end in time."""
        self._forks.append(None)
        try:
            if not self.lock.acquire(timeout=seconds):
                return False
        finally:
            self._forks.pop()
        if self._changing:  # this thread forks in a signal handler that interrupted its own refresh
            self.lock.release()
            return False
        return True

    def unblock_refreshes(self) -> None:
        """Undo `block_refreshes`."""
        self.lock.release()

    def forked(self) -> None:
        """Continue in a forked child, without the parent's threads."""
        self.lock = self.log.lock = threading.RLock()
        self._compacting, self._is_compacting = threading.RLock(), False
        self._forks, self._changing, self.max_staged_bytes = [], False, 0
        self.state.forked()
        self.reader.forked()

    # -- kernels --------------------------------------------------------------------------------------------

    def natives(self) -> list[NativeMedium]:
        """Return the functions that a controller calls for commands of kernels, for each shard.

        From now on no records are staged: kernels find records in the index only.
        """
        with self.change():
            self._stop_staging()
            self._flush()
        return [NativeMedium(kv_start.address, 0, self.state.address)] * self.shard_count

    # -- statistics -----------------------------------------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        """Return values for `StoreStatistics`."""
        with self.lock:
            self.flush()
            counters = self.state.counters()
            return {
                "records": len(self.index),
                "live_bytes": self.index.value_bytes,
                "disk_bytes": sum(map(folder_bytes, dict.fromkeys([self.path, *self.log.segments.paths]))),
                "segments": len(self.log.segments.ids()),
                "index_bytes": self.index.nbytes,
                "gets": counters["gets"] + self._staged_reads,
                "hits": counters["hits"] + self._staged_reads,
                "read_bytes": counters["bytes"] + self._staged_read_bytes,
                "read_errors": counters["errors"],
                "shards": self.shard_count,
            }


def _are_same(keys: NDArray[np.object_], stored: NDArray[np.object_]) -> NDArray[np.bool_]:
    """Return which long keys equal the stored keys; also True if the stored key is damaged, or the key is not long."""
    pairs = zip(keys, stored, strict=True)
    return np.array([key is None or key == in_store or in_store == b"" for key, in_store in pairs], np.bool_)


def _with_suffixes(keys: Keys, values: Any) -> list[Any]:
    """Return values in their stored form: a long key follows its value."""
    assert keys.full is not None
    out = []
    for key, value in zip(keys.full, values, strict=True):
        if key is not None:
            nbytes = len(key) + 2 + memoryview(value).nbytes
            if nbytes > MAX_VALUE:
                raise too_large(nbytes, f"the value of key {key!r} and the key")
            value = b"".join((value, suffix_of(key)))
        out.append(value)
    return out


def folder_bytes(path: str) -> int:
    """Return the bytes of the files in a folder."""
    total = 0
    with os.scandir(path) as files:
        for file in files:
            with contextlib.suppress(FileNotFoundError):  # another process has replaced it
                total += file.stat().st_size
    return total
