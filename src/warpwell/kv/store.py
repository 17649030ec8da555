"""Store: a mapping from keys to values on disk."""

from __future__ import annotations

import threading
from collections.abc import Callable, ItemsView, Iterator, MutableMapping, Sequence, ValuesView
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .. import errors
from ..errors.options import checked_bytes, checked_callable, checked_integer, checked_share
from ..storage.medium import NativeMedium
from . import lifetime
from .host_future import HostFuture
from .keys import INT_KEY, Key, Keys, as_key, as_keys, is_integer, shown
from .log.compaction import CompactionReport
from .log.verify import VerifyReport
from .schema import Schema
from .sorting import in_order, with_prefix
from .statistics import StoreStatistics
from .values import many_values, one_value, row_bytes_of
from .views import Items, Values

if TYPE_CHECKING:
    from .part import Part


class Parts(Protocol):
    """What a store stands on: one `Part`, or several behind `Shards`."""

    path: str
    kinds: bool

    def __len__(self) -> int: ...
    @property
    def get(self) -> Callable[[Any], bytes | None]: ...
    def has(self, key: bytes | int) -> bool: ...
    def rows(self, keys: Keys, row_bytes: int, out: Any = None) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]: ...
    def values(self, keys: Keys) -> list[bytes | None]: ...
    def contains(self, keys: Keys) -> NDArray[np.bool_]: ...
    def sizes(self, keys: Keys) -> NDArray[np.int64]: ...
    def entries(self) -> tuple[Keys, NDArray[np.int64]]: ...
    def put(self, keys: Keys, values: Any) -> None: ...
    def put_one(self, key: bytes, value: Any, integer: bool = False) -> None: ...
    def delete(self, keys: Keys) -> NDArray[np.bool_]: ...
    def commit(self) -> int: ...
    def refresh(self) -> int: ...
    def verify(self, *, progress: Any = None) -> VerifyReport: ...
    def compact(self, *, threshold: float = 0.5, progress: Any = None) -> CompactionReport: ...
    def uncommitted(self) -> int: ...
    @property
    def failed(self) -> bool: ...
    def close(self, *, commit: bool = True) -> None: ...
    def folders(self) -> Sequence[Part]: ...
    def serve(self, value_bytes: int | None = None) -> list[NativeMedium]: ...
    def figures(self) -> dict[str, Any]: ...


class Store(MutableMapping[Any, Any]):
    """Records of keys of 1 to 16 bytes and values of up to 16 MiB, durable once they are committed.

    Use `warpwell.kv.create` and `warpwell.kv.open`. A store is a mutable mapping: ``store[key]``,
    ``store[key] = value``, ``del store[key]``, ``in``, ``len``, iteration over keys, ``items`` and the rest. An integer
    is the same key as its 8 bytes. How a key was put last, as an integer or not, is kept with it: iteration, `list`
    and messages give integers as ``int`` and all other keys as bytes.

    As a context manager it commits and closes; after an exception it closes without a commit. One that is dropped, or
    left open when the program ends, commits and closes as well, but not where an exception ends the program: what is
    lost then is said on stderr.

    Any number of threads may read. Changes take a lock. A process that is forked goes on reading what was there at the
    fork, until it refreshes, and a store that is open for reading can be pickled: it is opened again where it arrives.
    One that is open for writing stays in its process.

    Attributes
    ----------
    path : str
        Its folder.
    schema : Schema or None
        With a schema every value is a dict of arrays; without one, values are bytes.
    writable : bool
    """

    no_kernel_argument = "open it with device="

    def __init__(self, parts: Parts, *, schema: Schema | None, writable: bool, durability: str) -> None:
        self.path = parts.path
        self.schema = schema
        self.writable = writable
        self._parts = parts
        self._get = parts.get
        self._durability = durability
        self._unusable: Any = None
        self._counts = {"puts": 0, "deletes": 0, "commits": 0}
        self._lock = threading.RLock()
        self._estate, self._finalizer = lifetime.opened(self, parts)

    # -- one record -----------------------------------------------------------------------------------------

    def get(self, key: Key, default: Any = None) -> Any:
        """Return the value of a key.

        Parameters
        ----------
        key : int, bytes or str
        default : optional
            What to return for an absent key.

        Returns
        -------
        bytes, or dict of arrays where the store has a schema

        Raises
        ------
        CorruptionError, MediumError
            The value cannot be read, or is not what was put.
        KeyLengthError, ClosedError, ForkError
        """
        if self._unusable is not None:
            raise self._unusable()
        if type(key) is not int and type(key) is not bytes:
            key = as_key(key)
        try:
            value = self._get(key)
        except errors.CorruptionError:
            self._check()  # another thread closed the store meanwhile
            raise
        except Exception:
            as_key(key)  # raises what tells why; of an integer that is too large the compiler says something else
            raise
        if value is None:
            return default
        return value if self.schema is None else self.schema.unpack_one(value)

    def __getitem__(self, key: Key) -> Any:
        value = self.get(key, self)
        if value is self:
            raise errors.KeyMissingError(
                f"{self.path} has no key {shown(key)!r}: use get() for a default, or `in` to ask", key=as_key(key)
            )
        return value

    def __contains__(self, key: object) -> bool:
        self._check()
        return self._parts.has(as_key(key))

    def put(self, key: Key, value: Any) -> None:
        """Store one record; see `put_many`."""
        self._check_writable()
        raw = as_key(key)
        packed = one_value(value, key) if self.schema is None else self.schema.pack_one(value)
        self._parts.put_one(raw, packed, is_integer(key))
        self._counts["puts"] += 1

    __setitem__ = put

    def delete(self, key: Key) -> bool:
        """Delete a record; return whether it was there."""
        return self.delete_many([key]) == 1

    def __delitem__(self, key: Key) -> None:
        if not self.delete(key):
            raise errors.KeyMissingError(
                f"{self.path} has no key {shown(key)!r}: delete() returns False for it instead", key=as_key(key)
            )

    # -- batches --------------------------------------------------------------------------------------------

    def get_many(self, keys: Any, out: Any = None) -> tuple[Any, NDArray[np.bool_]]:
        """Return the values of many keys.

        Parameters
        ----------
        keys : array or iterable
            int64 [N] is the fastest; uint8 [N, 16]; or an iterable of int, bytes and str.
        out : numpy.ndarray, optional
            uint8 [N, nbytes], where all values have `nbytes` bytes: values are read into its rows. Needed only
            for values without a schema (with one, rows have the record's size).

        Returns
        -------
        batch : dict of arrays, list, or `out`
            With a schema, arrays [N, ...] (zeros for absent keys); else a list of bytes, None for absent keys.
        found : numpy.ndarray
            bool [N].

        Raises
        ------
        CorruptionError, MediumError
            A value cannot be read, or is not what was put: none is returned.
        ValueSizeError
            A value has another size than the rows of `out`.
        """
        if self._unusable is not None:
            raise self._unusable()
        checked = as_keys(keys)
        if self.schema is None and out is None:
            values = self._reading(self._parts.values, checked)
            return values, np.fromiter((v is not None for v in values), np.bool_, checked.size)
        row_bytes = row_bytes_of(out, checked.size) if self.schema is None else self.schema.nbytes
        if out is not None and self.schema is not None:
            row_bytes_of(out, checked.size, row_bytes)
        rows, found = self._reading(self._parts.rows, checked, row_bytes, out)
        return (rows if self.schema is None else self.schema.unpack(rows)), found

    def get_async(self, keys: Any) -> HostFuture:
        """Begin to read the values of many keys; ``wait()`` of what it returns gives what `get_many` would."""
        self._check()
        checked = as_keys(keys).copied()
        return HostFuture(lambda: self.get_many(checked))

    def put_many(self, keys: Any, values: Any) -> None:
        """Store many records; of equal keys the last one counts.

        They are visible at once and durable after the next `commit`.

        Parameters
        ----------
        keys : array or iterable
            As for `get_many`.
        values : dict of arrays, list of bytes-like, or array
            With a schema a dict of arrays [N, ...]; else a list, or uint8 [N, nbytes].

        Raises
        ------
        ArgumentError
            There are not as many values as keys.
        SchemaError, ValueSizeError, KeyLengthError
            Nothing was stored.
        StorageFullError
            No space is left.
        StoreFailedError
            A write failed, now or before: the store is read-only.
        """
        self._check_writable()
        checked = as_keys(keys)
        if self.schema is not None:
            packed: Any = self.schema.pack(values, checked.size)
        else:
            packed = many_values(values, checked)
        if checked.size:
            self._parts.put(checked, packed)
            self._counts["puts"] += checked.size

    def delete_many(self, keys: Any) -> int:
        """Delete many records; return how many were there."""
        self._check_writable()
        there = int(np.count_nonzero(self._parts.delete(as_keys(keys))))
        self._counts["deletes"] += there
        return there

    # -- all records ----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        self._check()
        return len(self._parts)

    def __iter__(self) -> Iterator[int | bytes]:
        self._check()
        return iter(self._parts.entries()[0].to_list())

    def items(self) -> ItemsView[Any, Any]:
        """Return the records, as a view that reads them in batches."""
        return Items(self)

    def values(self) -> ValuesView[Any]:
        """Return the values, as a view that reads them in batches."""
        return Values(self)


    def list(self, prefix: bytes | str = b"", start: Key | None = None, limit: int | None = None) -> list[int | bytes]:
        """Return keys in order: integers ascending, and then all others in the order of their bytes.

        In a store that format 1 created no key is known to be an integer.

        Parameters
        ----------
        prefix : bytes or str
            Only keys that begin with it; no integer does.
        start : int, bytes or str, optional
            Only keys from this one on: from an integer on, or from a name on, without integers.
        limit : int, optional
            At most so many.
        """
        self._check()
        first = checked_bytes(prefix, "prefix")
        limit = None if limit is None else checked_integer(limit, "limit", least=0)
        begin = None if start is None else shown(start) if self._parts.kinds else as_key(start)
        keys = with_prefix(self._parts.entries()[0], first, begin)
        return in_order(keys).take(slice(limit)).to_list()

    def ordered(self) -> Keys:
        """Return all keys in the order of `keys_array`, with what they are."""
        self._check()
        keys, _ = self._parts.entries()
        if not self._parts.kinds and (keys.padded()[1] == INT_KEY).all():
            keys = keys._replace(integers=True)
        return in_order(keys)

    def keys_array(self) -> NDArray[np.int64] | tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return all keys, sorted: what a position means to `DataLoader`.

        Returns
        -------
        numpy.ndarray or tuple
            int64 [N] where every key is an integer; else uint8 [N, 16], with uint8 [N] lengths. The order is that of
            `list`. `get_many` takes both. In a store that format 1 created keys of 8 bytes are integers here, if no
            other key is there.
        """
        keys = self.ordered()
        return keys.numbers() if keys.all_integers else keys.padded()

    def clear(self) -> None:
        """Delete all records."""
        self.delete_many(self._parts.entries()[0])

    __eq__ = object.__eq__  # comparing records would read them all
    __hash__ = object.__hash__

    # -- the whole ------------------------------------------------------------------------------------------

    def commit(self) -> int:
        """Make everything stored so far durable; return its sequence number.

        Raises
        ------
        StoreFailedError
            It may not be durable. The store is read-only from now on; open it again.
        """
        self._check_writable()
        self._counts["commits"] += 1
        return self._parts.commit()

    def refresh(self) -> int:
        """Follow what another process committed since; return the number of changes. Nothing to do for a writer."""
        self._check()
        return 0 if self.writable else self._parts.refresh()

    def verify(self, *, progress: Callable[[int, int], object] | None = None) -> VerifyReport:
        """Read everything that is committed and check it.

        Parameters
        ----------
        progress : callable, optional
            Called with the number of checked and of all values.

        Returns
        -------
        VerifyReport
            ``sound`` says whether all is well, and ``problems`` what is not.
        """
        self._check()
        checked_callable(progress, "progress")
        return self._parts.verify(progress=progress)

    def compact(
        self, *, threshold: float = 0.5, progress: Callable[[int, int], object] | None = None
    ) -> CompactionReport:
        """Copy live values out of segments that are mostly dead, and delete those.

        Other threads may read and write meanwhile. What was put and not committed stays so; the segments are deleted
        with the next `commit` then.

        Parameters
        ----------
        threshold : float
            Share of dead bytes from which on a segment is compacted.
        progress : callable, optional
            Called with the bytes that were copied and all that will be.

        Raises
        ------
        CorruptionError
            A live value is damaged: it stays where it is, and so does its segment.
        """
        self._check_writable()
        checked_callable(progress, "progress")
        return self._parts.compact(threshold=checked_share(threshold, "threshold"), progress=progress)

    @property
    def stats(self) -> StoreStatistics:
        """Figures of the store."""
        self._check()
        figures: dict[str, Any] = {**self._parts.figures(), **self._counts}
        return StoreStatistics(**figures, durability=self._durability)

    def close(self) -> None:
        """Commit and give everything back. Idempotent.

        Raises
        ------
        StoreFailedError
            The commit failed; everything was given back.
        """
        self._close(commit=True)

    def _close(self, *, commit: bool) -> None:
        with self._lock:
            if self._unusable is not None:
                return
            self._unusable = self._closed_error
        lifetime.closed(self)
        self._finalizer.detach()
        self._parts.close(commit=commit)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._unusable is not None

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(commit=kind is None)

    def __repr__(self) -> str:
        if self._unusable is not None:
            return f"<Store {self.path!r}, closed>"
        mode = "r+" if self.writable else "r"
        return f"<Store {self.path!r}, mode {mode!r}, {len(self._parts)} records>"

    def native(self) -> Sequence[NativeMedium]:
        """Return what a controller calls for key-value commands, one for each shard (see `shards.shard_of`).

        Their ``start`` is `serve.kv_start`, and their ``owner`` the store. No command may be in flight when the store
        is closed.
        """
        self._check()
        value_bytes = None if self.schema is None else self.schema.nbytes
        return [replace(native, owner=self) for native in self._parts.serve(value_bytes)]

    def uncommitted(self) -> int:
        """Return the number of changes that the next `commit` makes durable."""
        self._check()
        return self._parts.uncommitted()

    # -- other processes (see `lifetime`) -------------------------------------------------------------------

    def folders(self) -> Sequence[Part]:
        """Return what holds the records of each folder."""
        return self._parts.folders()

    def forked(self, *, busy: bool) -> None:
        """Go on in a forked child; `busy` tells that another thread's refresh is cut in the middle here."""
        self._lock = threading.RLock()
        if self.writable:
            self._unusable = partial(lifetime.forked_error, self.path)
        elif busy:
            self._unusable = partial(lifetime.busy_error, self.path)

    def __reduce__(self) -> tuple[Any, ...]:
        self._check()
        if self.writable:
            raise errors.ForkError(
                f"{self.path} cannot be sent to another process, as it is open for writing: open it with mode='r', or"
                " send its path",
                path=self.path,
            )
        return self._reopening()

    def _reopening(self) -> tuple[Any, ...]:
        from .opening import open_store

        return open_store, (self.path,)

    # -- checks ---------------------------------------------------------------------------------------------

    def _reading(self, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except errors.CorruptionError:
            self._check()  # another thread closed the store meanwhile
            raise

    def _check(self) -> None:
        if self._unusable is not None:
            raise self._unusable()

    def _check_writable(self) -> None:
        self._check()
        if not self.writable:
            raise errors.ReadOnlyError(f'{self.path} is open for reading: open it with mode="r+" to change it')

    def _closed_error(self) -> Exception:
        return errors.ClosedError(f"the store {self.path} is closed: open it again")


__all__ = ["Store"]
