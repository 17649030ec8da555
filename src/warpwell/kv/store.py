"""`Store`: a mapping from keys to values on disk, with its views, its statistics, and reads in background threads."""

from __future__ import annotations

import contextlib
import os
import queue
import struct
import threading
from collections.abc import Callable, ItemsView, Iterator, MutableMapping, Sequence, ValuesView
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .._check import checked_bytes, checked_callable, checked_integer, checked_share
from .._future import Future
from ..cache import batches_of, format_size
from ..storage import NativeMedium
from . import lifetime
from .compaction import CompactionReport, compact
from .index.reader import BAD_RECORD
from .keys import MAX_KEY, Key, Keys, as_key, as_keys, in_order, is_integer, shown, with_prefix
from .log.files import forked_error
from .log.format import size_of
from .log.recovery import VerifyReport, verify
from .records import STAGED_RECORD_BYTES, Records
from .schema import RecordError, Schema, many_values, one_value, row_bytes_of

_INT_MIN, _INT_MAX = -1 << 63, (1 << 63) - 1
_pack = struct.Struct("<q").pack

_MAX_READERS = 4
"""Maximum number of threads for asynchronous reads in a process."""
_reads: queue.SimpleQueue[tuple[HostFuture, Callable[[], Any]]] = queue.SimpleQueue()
_readers: list[threading.Thread] = []


def _serve(reads: queue.SimpleQueue[tuple[HostFuture, Callable[[], Any]]]) -> None:
    while True:
        future, read = reads.get()
        with contextlib.suppress(BaseException):  # an exception of a callback must not end the thread
            try:
                result = read()
            except BaseException as error:  # `wait` raises it
                future.set_exception(error)
            else:
                future.set_result(result)
        result = None
        del future, read  # so that a store to which only this read refers can be dropped


def _after_fork() -> None:
    global _reads
    _reads = queue.SimpleQueue()  # the threads of the old queue exist only in the parent
    _readers.clear()


os.register_at_fork(after_in_child=_after_fork)


class HostFuture(Future):
    """The future of a read in another thread.

    Parameters
    ----------
    read : callable
        Returns the result.
    """

    def __init__(self, read: Callable[[], Any]) -> None:
        super().__init__("read")
        if len(_readers) < _MAX_READERS:
            # A daemon thread, so that a read that hangs does not block the end of the program.
            thread = threading.Thread(target=_serve, args=(_reads,), name="warpwell-kv", daemon=True)
            thread.start()
            _readers.append(thread)
        _reads.put((self, read))

    def wait(self, timeout: float | None = None) -> Any:
        """Return `result`: the futures of all batches, also of batches on a GPU, have this method."""
        return self.result(timeout)


class Store(MutableMapping[Any, Any]):
    """A mapping on disk, with keys of 1 to 511 bytes and values of less than 2 GiB, which are durable once committed.

    Use `warpwell.kv.create` and `warpwell.kv.open`. A store is a mutable mapping: ``store[key]``, ``store[key] =
    value``, ``del store[key]``, ``in``, ``len``, iteration over keys, ``items`` and the rest. An integer and the 8
    bytes that encode it are the same key. The store remembers whether a key was last put as an integer: iteration,
    `list` and messages show such keys as ``int`` and all other keys as bytes.

    As a context manager, a store commits and closes; after an exception it closes without a commit. A store that is
    dropped, or still open when the program ends, also commits and closes. If an exception ends the program, the store
    does not commit, and prints the number of lost changes on stderr.

    Any number of threads may read, and changes take a lock. A forked process reads the records as of the fork until it
    calls `refresh`. A store that is open for reading can be pickled: the process that unpickles it opens it again. A
    store that is open for writing cannot be used in another process.

    Attributes
    ----------
    path : str
        The folder of the store.
    schema : Schema or None
        With a schema every value is a dict of arrays; without one, values are bytes.
    writable : bool
    """

    no_kernel_argument = "open it with device="

    def __init__(self, records: Records) -> None:
        self.path, self.writable = records.path, records.writable
        described = (records.log.schema_json or {}).get("schema")
        self.schema = None if described is None else Schema.from_json(described)
        self._records = records
        self._get: Callable[..., Any] = partial(_get, records, self.schema)
        if not self.writable:
            self._get = records.reader.getter(self._get, self.schema)
        self._counts = {"puts": 0, "deletes": 0, "commits": 0}
        self._lock = threading.RLock()
        self._estate, self._finalizer = lifetime.opened(self, records)

    # -- one record -----------------------------------------------------------------------------------------

    def get(self, key: Key, default: Any = None) -> Any:
        """Return the value of a key.

        Parameters
        ----------
        key : int, bytes or str
        default : optional
            The value to return for an absent key.

        Returns
        -------
        bytes, or a dict of the fields if the store has a schema

        Raises
        ------
        CorruptionError, MediumError
            The value cannot be read, or its checksum is wrong.
        ArgumentError, ClosedError, ForkError
        """
        value = self._get(key)
        return default if value is None else value

    def __getitem__(self, key: Key) -> Any:
        value = self.get(key)
        if value is None:
            raise errors.KeyMissingError(
                f"{self.path} has no key {shown(key)!r}: use get() for a default, or `in` to test", key=as_key(key)
            )
        return value

    def __contains__(self, key: object) -> bool:
        self.check_open()
        return self._records.has_key(key)

    def put(self, key: Key, value: Any) -> None:
        """Store one record; see `put_many`.

        Small records are staged, and later calls write them in groups. Such a call raises `StorageFullError` if no
        space is left. The records stay staged, so that you can free some space and commit.
        """
        if type(value) is bytes and self.schema is None:
            raw = key if type(key) is bytes else _pack(key) if type(key) is int and _INT_MIN <= key <= _INT_MAX else b""
            records = self._records
            staged = records.staged
            nbytes = records.staged_bytes + len(value) + STAGED_RECORD_BYTES
            if 0 < len(raw) <= MAX_KEY and nbytes <= records.max_staged_bytes:
                staged[raw] = value if raw is key else (value,)
                records.staged_bytes = nbytes
                if staged is records.staged:  # otherwise a thread has flushed the dict without it
                    self._counts["puts"] += 1
                    return
        self._check_writable()
        raw = as_key(key)
        packed = one_value(value, key) if self.schema is None else self.schema.pack_one(value)
        self._records.put_one(raw, packed, is_integer(key))
        self._counts["puts"] += 1

    __setitem__ = put

    def delete(self, key: Key) -> bool:
        """Delete a record; return whether it existed."""
        return self.delete_many([key]) == 1

    def __delitem__(self, key: Key) -> None:
        if not self.delete(key):
            raise errors.KeyMissingError(
                f"{self.path} has no key {shown(key)!r}: delete() returns False for it instead", key=as_key(key)
            )

    # -- batches --------------------------------------------------------------------------------------------

    def get_many(
        self, keys: Any, out: Any = None, *, fields: Sequence[str] | None = None
    ) -> tuple[Any, NDArray[np.bool_]]:
        """Return the values of many keys.

        Parameters
        ----------
        keys : array or iterable
            int64 [N] is the fastest; uint8 [N, width]; or an iterable of int, bytes and str.
        out : numpy.ndarray, optional
            An array uint8 [N, nbytes] into whose rows the values are read; all values must have `nbytes` bytes. It is
            meant for stores without a schema. With a schema, a row has the size of a record, and `out` is not allowed
            if a field is ragged.
        fields : sequence of str, optional
            The fields of the schema to return; all by default.

        Returns
        -------
        batch : dict, list, or `out`
            With a schema, a dict of arrays [N, ...], with a `Ragged` for each ragged field; absent keys have zeros and
            empty items. Without a schema, a list of bytes, with None for absent keys.
        found : numpy.ndarray
            bool [N].

        Raises
        ------
        CorruptionError, MediumError
            A value cannot be read, or its checksum is wrong: no value is returned.
        ValueSizeError
            A value has another size than the rows of `out`.
        SchemaError
            The schema has no such field.
        """
        if self._records.unusable is not None:
            raise self._records.unusable()
        checked, schema = as_keys(keys), self.schema
        if fields is not None:
            fields = self._checked_fields(fields)
        if schema is None and out is None:
            values: tuple[Any, NDArray[np.bool_]] = self._reading(self._records.values, checked)
            return values
        if schema is not None and schema.ragged:
            if out is not None:
                raise errors.ArgumentError(
                    f"records of {self.path} have different sizes and do not fit into rows of out: omit out", name="out"
                )
            read = self._reading(self._records.buffer, checked)
            try:
                return schema.unpack_ragged(read, fields), read.found
            except RecordError as error:
                raise self._records.error(checked.row(error.row), BAD_RECORD) from None
        row_bytes = row_bytes_of(out, checked.size) if schema is None else schema.nbytes
        if out is not None and schema is not None:
            row_bytes_of(out, checked.size, row_bytes)
        rows, found = self._reading(self._records.rows, checked, row_bytes, out)
        return (rows if schema is None else schema.unpack(rows, fields)), found

    def _checked_fields(self, fields: Sequence[str]) -> Sequence[str]:
        """Return names of fields; raise an error if the schema lacks one."""
        if self.schema is None:
            raise errors.ArgumentError(f"{self.path} has no schema, so its values have no fields: omit fields")
        return self.schema.check_names(fields)

    def get_async(self, keys: Any, *, fields: Sequence[str] | None = None) -> HostFuture:
        """Start to read the values of many keys; return a future whose ``wait()`` returns the result of `get_many`."""
        self.check_open()
        checked = as_keys(keys).copied()
        names = None if fields is None else self._checked_fields(fields)
        return HostFuture(lambda: self.get_many(checked, fields=names))

    def put_many(self, keys: Any, values: Any) -> None:
        """Store many records; if a key occurs several times, its last value is stored.

        The records are visible at once and durable after the next `commit`.

        Parameters
        ----------
        keys : array or iterable
            As for `get_many`.
        values : dict, list of bytes-like, or array
            With a schema, a dict of arrays [N, ...]. A ragged field is a list of arrays, bytes or strings; or, without
            a Python loop over the records, a `Ragged` or an Arrow array of binaries, strings or lists. Without a
            schema, a list of bytes-like objects, a `Ragged` or Arrow array of bytes, or an array uint8 [N, nbytes].

        Raises
        ------
        ArgumentError, SchemaError, ValueSizeError
            The numbers of keys and values differ, or a key or value is not allowed. Nothing was stored.
        StorageFullError
            No space is left.
        StoreFailedError
            A write failed, in this call or an earlier one: the store is read-only.
        """
        self._check_writable()
        checked = as_keys(keys)
        if self.schema is not None:
            packed: Any = self.schema.pack(values, checked.size)
        else:
            packed = many_values(values, checked)
        if checked.size:
            self._records.put(checked, packed)
            self._counts["puts"] += checked.size

    def delete_many(self, keys: Any) -> int:
        """Delete many records; return how many existed."""
        self._check_writable()
        count = self._records.delete(as_keys(keys))
        self._counts["deletes"] += count
        return count

    # -- all records ----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        self.check_open()
        return len(self._records)

    def __iter__(self) -> Iterator[int | bytes]:
        self.check_open()
        return iter(self._records.entries()[0].to_list())

    def items(self) -> ItemsView[Any, Any]:
        """Return the records, as a view that reads them in batches."""
        return StoreItems(self)

    def values(self) -> ValuesView[Any]:
        """Return the values, as a view that reads them in batches."""
        return StoreValues(self)

    def list(self, prefix: bytes | str = b"", start: Key | None = None, limit: int | None = None) -> list[int | bytes]:
        """Return the keys in order: integers ascending, then all others in byte order.

        Parameters
        ----------
        prefix : bytes or str
            Only keys that begin with this prefix; integer keys never match a prefix.
        start : int, bytes or str, optional
            Only this key and the keys after it. If `start` is not an integer, no integer keys are returned.
        limit : int, optional
            Maximum number of keys.
        """
        self.check_open()
        first = checked_bytes(prefix, "prefix")
        limit = None if limit is None else checked_integer(limit, "limit", minimum=0)
        begin = None if start is None else shown(start)
        keys = with_prefix(self._records.entries()[0], first, begin)
        return in_order(keys).take(slice(limit)).to_list()

    def ordered(self) -> Keys:
        """Return all keys in the order of `keys_array`, and which of them are integers."""
        self.check_open()
        return in_order(self._records.entries()[0])

    def keys_array(self) -> NDArray[np.int64] | tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return all keys, sorted; `DataLoader` counts positions in this order.

        Returns
        -------
        numpy.ndarray or tuple
            int64 [N] if every key is an integer. Otherwise a tuple: the keys as uint8 [N, 16], or wider if a key is
            longer, and their lengths [N]. The order is that of `list`. `get_many` accepts both forms.
        """
        keys = self.ordered()
        return keys.numbers() if keys.all_integers else keys.arrays()

    def clear(self) -> None:
        """Delete all records."""
        with self._records.lock:
            self._records.flush()
            self.delete_many(self._records.index.entries()[0])  # including keys that are damaged

    __eq__ = object.__eq__  # a comparison of contents would read all records
    __hash__ = object.__hash__

    # -- the whole store ------------------------------------------------------------------------------------

    def commit(self) -> int:
        """Make all changes so far durable; return the sequence number of the last one.

        Raises
        ------
        StoreFailedError
            The changes may not be durable. The store is read-only from now on; open it again.
        """
        self._check_writable()
        self._counts["commits"] += 1
        return self._records.commit()

    def seal(self) -> None:
        """Commit, and write the index of all records to a file: opening the store then reads no journal.

        All processes that open the store share the file. Later changes are allowed. The next call of `seal` writes the
        index again, and so does a `commit` once there are at least 65,536 changes and half as many changes as records.

        Raises
        ------
        StorageFullError, StoreFailedError
            See `commit`. If only the index finds no space, the records are committed.
        """
        self._check_writable()
        self._records.seal()

    def refresh(self) -> int:
        """Read what another process committed since the last refresh; return the number of changes (0 for a writer)."""
        self.check_open()
        return 0 if self.writable else self._records.refresh()

    def verify(self, *, progress: Callable[[int, int], object] | None = None) -> VerifyReport:
        """Read all committed data and check its checksums.

        Parameters
        ----------
        progress : callable, optional
            Called with the number of values checked and the number of all values.

        Returns
        -------
        VerifyReport
            ``sound`` is True if nothing is damaged; ``problems`` lists the damage.
        """
        self.check_open()
        checked_callable(progress, "progress")
        return verify(self.path, progress=progress)

    def compact(
        self, *, threshold: float = 0.5, progress: Callable[[int, int], object] | None = None
    ) -> CompactionReport:
        """Reclaim the space of replaced and deleted values: copy live values, delete mostly dead segments.

        Other threads may read and write during a compaction. Uncommitted changes stay uncommitted; if there are any,
        the compacted segments are deleted only by the next `commit`.

        Parameters
        ----------
        threshold : float
            Segments with at least this share of dead bytes are compacted.
        progress : callable, optional
            Called with the bytes copied so far and the bytes to copy in all.

        Raises
        ------
        CorruptionError
            A live value is damaged. The value and its segment stay unchanged.
        """
        self._check_writable()
        checked_callable(progress, "progress")
        return compact(self._records, threshold=checked_share(threshold, "threshold"), progress=progress)

    @property
    def metadata(self) -> dict[str, Any]:
        """Return the metadata that was passed to `warpwell.kv.create`; `kv load` writes the names of classes there."""
        return dict((self._records.log.schema_json or {}).get("metadata", {}))

    @property
    def stats(self) -> StoreStatistics:
        """Return the store's statistics."""
        self.check_open()
        values: dict[str, Any] = {**self._records.statistics(), **self._counts}
        return StoreStatistics(**values, durability=self._records.log.durability)

    def close(self) -> None:
        """Commit, and close the store (idempotent).

        Raises
        ------
        StoreFailedError
            The commit failed; the store is closed.
        """
        self._close(commit=True)

    def _close(self, *, commit: bool) -> None:
        with self._lock:
            if self._records.unusable is not None:
                return
            self._records.unusable = self._closed_error
        lifetime.closed(self)
        self._finalizer.detach()
        self._records.close(commit=commit)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._records.unusable is not None

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(commit=kind is None)

    def __repr__(self) -> str:
        if self._records.unusable is not None:
            return f"<Store {self.path!r}, closed>"
        mode = "r+" if self.writable else "r"
        return f"<Store {self.path!r}, mode {mode!r}, {len(self._records)} records>"

    def native(self) -> Sequence[NativeMedium]:
        """Return the function that a controller calls for commands, one for each shard (see `shards.shard_of`).

        ``start`` is `serve.kv_start`, and ``owner`` the store. No command may be in flight when the store is closed.
        """
        self.check_open()
        return [replace(native, owner=self) for native in self._records.natives()]

    def place_of(self, key: Key) -> tuple[str, int | None]:
        """Return the file and the byte offset of a key's value, for messages; the store and None for an absent key."""
        return self._records.place_of(key)

    def uncommitted(self) -> int:
        """Return the number of changes that the next `commit` makes durable."""
        self.check_open()
        return self._records.uncommitted()

    # -- other processes (see `lifetime`) -------------------------------------------------------------------

    def forked(self, *, busy: bool) -> None:
        """Continue in a forked child; `busy` means that the fork interrupted a refresh in another thread."""
        self._lock = threading.RLock()
        if self.writable:
            self._records.unusable = partial(forked_error, self.path)
        elif busy:
            self._records.unusable = partial(lifetime.busy_error, self.path)
            self._records.index.close()  # `get` must not find records

    # -- checks ---------------------------------------------------------------------------------------------

    def _reading(self, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except (errors.CorruptionError, errors.MediumError):
            self.check_open()  # another thread may have closed the store
            raise

    def check_open(self) -> None:
        """Raise ClosedError or ForkError if the store cannot be used any more."""
        if self._records.unusable is not None:
            raise self._records.unusable()

    def _check_writable(self) -> None:
        self.check_open()
        if not self.writable:
            raise errors.ReadOnlyError(f'{self.path} is open for reading: open it with mode="r+" to change it')

    def _closed_error(self) -> Exception:
        return errors.ClosedError(f"the store {self.path} is closed: open it again")


def _get(records: Records, schema: Schema | None, key: Any) -> Any:
    """Return the value of a key, or None; see `Store.get`. No reference to the store is kept, so it can be dropped."""
    if records.unusable is not None:
        raise records.unusable()
    if type(key) is not int and type(key) is not bytes:
        key = as_key(key)
    try:
        value = records.get(key)
    except (errors.CorruptionError, errors.MediumError):
        if records.unusable is not None:  # another thread has closed the store
            raise records.unusable() from None
        raise
    if value is None or schema is None:
        return value
    try:
        return schema.unpack_one(value)
    except RecordError:
        raise records.error(shown(key), BAD_RECORD) from None


__all__ = ["Store"]


_BATCH, _BATCH_BYTES = 1024, 8 << 20
"""Maximum numbers of records and bytes that iteration reads at once; a larger value is read alone."""


class StoreItems(ItemsView[Any, Any]):
    """View of the records of a store, which are read in batches."""

    _mapping: Store

    def __iter__(self) -> Iterator[tuple[int | bytes, Any]]:
        return _records(self._mapping)


class StoreValues(ValuesView[Any]):
    """View of the values of a store, which are read in batches."""

    _mapping: Store

    def __iter__(self) -> Iterator[Any]:
        return (value for _, value in _records(self._mapping))

    def __contains__(self, value: object) -> bool:
        return any(stored is value or stored == value for stored in self)  # the mixin would read one value at a time


def _records(store: Store) -> Iterator[tuple[int | bytes, Any]]:
    keys, locations = store._records.entries()
    for rows in batches_of(size_of(locations[:, 0], locations[:, 1]), _BATCH_BYTES, _BATCH):
        batch_keys = keys.take(rows)
        batch, found = store.get_many(batch_keys)
        for k, key in enumerate(batch_keys.to_list()):
            if found[k]:  # otherwise another thread has deleted it
                yield key, batch[k] if store.schema is None else {n: a[k] for n, a in batch.items()}


@dataclass(frozen=True)
class StoreStatistics:
    """Statistics of a store.

    Attributes
    ----------
    records : int
        Number of keys.
    live_bytes : int
        Bytes of their values.
    disk_bytes : int
        Bytes of all files.
    segments : int
        Files that hold values.
    index_bytes : int
        Bytes of the index, the mapped file included.
    gets, hits : int
        Keys looked up, and values found, since the store was opened.
    read_bytes : int
        Bytes of values read.
    read_errors : int
        Values that could not be read or whose CRC was wrong.
    puts, deletes, commits : int
        Since the store was opened.
    shards : int
        Folders.
    durability : str
        "commit", "always" or "none".
    """

    records: int
    live_bytes: int
    disk_bytes: int
    segments: int
    index_bytes: int
    gets: int
    hits: int
    read_bytes: int
    read_errors: int
    puts: int
    deletes: int
    commits: int
    shards: int
    durability: str

    def __str__(self) -> str:
        """Return the values that are not zero: "10 records, 640 B of values, 13.6 KiB on disk in 1 segment, 3 gets"."""
        disk = f"{format_size(self.disk_bytes)} on disk in {_count(self.segments, 'segment')}"
        parts = [_count(self.records, "record"), f"{format_size(self.live_bytes)} of values", disk]
        if self.shards > 1:
            parts[-1] += f" of {self.shards} shards"
        parts += [
            _count(getattr(self, name), name.removesuffix("s").replace("_", " "))
            for name in ("gets", "hits", "puts", "deletes", "commits", "read_errors")
            if getattr(self, name)
        ]
        if self.read_bytes:
            parts.append(f"{format_size(self.read_bytes)} read")
        return ", ".join(parts)

    def __repr__(self) -> str:
        return f"<StoreStatistics: {self}>"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
