"""Random operations on a store against a dict: ``python -m lab campaign kv_model --operations 1000000 --seed 1``.

One operation is one call of the store, and its result is compared with the dict's. From time to time an operation
compares all records, closes and reopens the store, leaves its ``with`` block by an exception (then only committed
records remain), compacts or seals it, or compares a reader that follows it.
"""

from __future__ import annotations

import argparse
import collections
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from warpwell import kv
from warpwell.kv import Store

SIZES = (0, 1, 8, 63, 64, 65, 100, 200, 500, 4095, 4096, 5000)
LARGE = (65_536, 70_000, 300_000)
DURABILITIES = ("commit", "commit", "commit", "none", "always")


class KvModel:
    """A store, the dict that it must equal, and the dict at the last commit.

    Parameters
    ----------
    folder : path-like
        Folder of the store; existing files are deleted.
    seed : int
        Selects the keys, the values and the operations.
    durability : str, optional
    shards : int, optional
        By default the seed selects durability and shards.
    keys : int
        Number of different keys. With few keys, operations often meet on one key.
    even : bool
        Whether all operations are equally likely; by default, those of single records are most likely.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        *,
        durability: str | None = None,
        shards: int | None = None,
        keys: int = 4000,
        even: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.durability = durability or self.random.choice(DURABILITIES)
        count = self.random.choice((0, 0, 3)) if shards is None else shards
        self.path = Path(folder) / "model.kv"
        self.shards = [Path(folder) / f"shard{k}" for k in range(count)] or None
        self.pool = [_key(self.random, n) for n in range(keys)]
        self.model: dict[bytes, tuple[int | bytes, bytes]] = {}
        self.committed: dict[bytes, tuple[int | bytes, bytes]] = {}
        self.done: collections.Counter[str] = collections.Counter()
        self.store = kv.create(
            self.path, durability=self.durability, segment_bytes="256KiB", shards=self.shards, overwrite=True
        )
        self.reader: Store | None = None
        self._steps, weights = zip(*_STEPS, strict=True)
        self._weights = [1.0] * len(weights) if even else weights

    def run(self, operations: int, progress: Callable[[int], object] | None = None) -> None:
        """Do `operations` operations.

        Raises
        ------
        AssertionError
            A result of the store differs from the dict.
        """
        at = 0
        while at < operations:
            for step in self.random.choices(self._steps, self._weights, k=min(1000, operations - at)):
                step(self)
                self.done[step.__name__.strip("_")] += 1
                at += 1
            if progress is not None:
                progress(at)
        self._compare()

    def close(self) -> None:
        """Close the store and its reader."""
        if self.reader is not None:
            self.reader.close()
        self.store.close()

    # -- random arguments of operations ----------------------------------------------------------------------------

    def _random_key(self) -> Any:
        """Return a key as bytes or, if possible, as an integer or text."""
        key = self.random.choice(self.pool)
        if len(key) == 8 and self.random.random() < 0.5:
            return int.from_bytes(key, "little", signed=True)
        if key.isascii() and self.random.random() < 0.5:
            return key.decode()
        return key

    def _random_keys(self) -> list[Any]:
        return [self._random_key() for _ in range(self.random.randrange(60))]

    def _value(self) -> bytes:
        size = self.random.choice(LARGE if self.random.random() < 0.0005 else SIZES)
        return self.random.randbytes(min(size, 16)) * (size // 16 + 1) if size > 16 else self.random.randbytes(size)

    # -- operations -----------------------------------------------------------------------------------------

    def _put(self) -> None:
        key, value = self._random_key(), self._value()
        self.store[key] = value
        self._put_in_model([key], [value])

    def _get(self) -> None:
        key = self._random_key()
        _same(self.store.get(key), self._held(key), key)

    def _contains(self) -> None:
        key = self._random_key()
        _same(key in self.store, _raw(key) in self.model, key)

    def _getitem(self) -> None:
        key = self._random_key()
        try:
            value = self.store[key]
        except KeyError:
            value = None
        _same(value, self._held(key), key)

    def _delete(self) -> None:
        key = self._random_key()
        _same(self.store.delete(key), self.model.pop(_raw(key), None) is not None, key)
        self._changed()

    def _put_many(self) -> None:
        keys = self._random_keys()
        if self.random.random() < 0.5:
            values = [self._value() for _ in keys]
            self.store.put_many(keys, values)
        else:
            rows = np.frombuffer(self.random.randbytes(24 * len(keys)), np.uint8).reshape(len(keys), 24)
            self.store.put_many(keys, rows)
            values = [row.tobytes() for row in rows]
        self._put_in_model(keys, values)

    def _get_many(self) -> None:
        keys = self._random_keys()
        values, found = self.store.get_many(keys)
        _same(values, [self._held(k) for k in keys], keys)
        _same(found.tolist(), [_raw(k) in self.model for k in keys], keys)
        _same(self.store.get_async(keys).wait()[0], values, keys)

    def _get_rows(self) -> None:
        size = self.random.choice((0, 8, 24, 64))
        keys = [k for k in self._random_keys() if len(self._held(k, bytes(size))) == size]
        out = np.full((len(keys), size), 7, np.uint8)
        _, found = self.store.get_many(keys, out=out)
        _same(found.tolist(), [_raw(k) in self.model for k in keys], keys)
        _same([row.tobytes() for row in out], [self._held(k, bytes(size)) for k in keys], keys)

    def _delete_many(self) -> None:
        keys = self._random_keys()[:15]
        deleted = {k for k in map(_raw, keys) if self.model.pop(k, None) is not None}
        _same(self.store.delete_many(keys), len(deleted), keys)
        self._changed()

    def _list(self) -> None:
        prefix = self.random.choice(self.pool)[: self.random.randrange(3)]
        start = self.random.choice((None, self._random_key()))
        first = None if start is None else _order(_returned(start))
        limit = self.random.choice((None, 0, 5))
        keys = [k for k, _ in self.model.values() if not prefix or (isinstance(k, bytes) and k.startswith(prefix))]
        expected = sorted((k for k in keys if first is None or _order(k) >= first), key=_order)
        _same(self.store.list(prefix, start, limit), expected[:limit], (prefix, start, limit))

    def _len(self) -> None:
        _same(len(self.store), len(self.model), "len")

    def _commit(self) -> None:
        self.store.commit()
        self.committed = dict(self.model)

    def _reopen(self) -> None:
        self.store.close()
        self.committed = dict(self.model)
        self.store = kv.open(self.path, "r+")
        self._compare()

    def _leave(self) -> None:
        """Leave a ``with`` block by an exception: uncommitted changes are undone."""
        try:
            with self.store:
                raise _Left
        except _Left:
            pass
        self.model = dict(self.committed)
        self.store = kv.open(self.path, "r+")
        self._compare()

    def _compact(self) -> None:
        self.store.compact(threshold=self.random.choice((0.2, 0.5, 0.9)))
        self._compare()

    def _seal(self) -> None:
        self.store.seal()
        self.committed = dict(self.model)
        self._compare()

    def _follow(self) -> None:
        """Compare the committed records with those that a reader sees."""
        if self.reader is None or self.random.random() < 0.1:
            if self.reader is not None:
                self.reader.close()
            self.reader = kv.open(self.path)
        else:
            self.reader.refresh()
        _same(dict(self.reader.items()), dict(self.committed.values()), "reader")

    def _verify(self) -> None:
        report = self.store.verify()
        _same(report.problems, [], "verify")
        _same(report.records, len(self.committed), "verify")

    # -- the dict -------------------------------------------------------------------------------------------

    def _put_in_model(self, keys: list[Any], values: list[bytes]) -> None:
        self.model.update((_raw(k), (_returned(k), v)) for k, v in zip(keys, values, strict=True))
        self._changed()

    def _held(self, key: Any, default: bytes | None = None) -> Any:
        return self.model.get(_raw(key), (key, default))[1]

    def _changed(self) -> None:
        if self.durability == "always":
            self.committed = dict(self.model)

    def _compare(self) -> None:
        _same(dict(self.store.items()), dict(self.model.values()), "everything")
        _same(len(self.store), len(self.model), "len")
        names = sorted((key for key, _ in self.model.values()), key=_order)
        _same(sorted(self.store, key=_order), names, "iteration")
        _same(self.store.ordered().to_list(), names, "ordered")
        _same(self.store.list(), names, "list")


_STEPS: list[tuple[Callable[[KvModel], None], float]] = [
    (KvModel._put, 300),
    (KvModel._get, 300),
    (KvModel._getitem, 50),
    (KvModel._contains, 50),
    (KvModel._delete, 100),
    (KvModel._put_many, 30),
    (KvModel._get_many, 60),
    (KvModel._get_rows, 40),
    (KvModel._delete_many, 30),
    (KvModel._list, 5),
    (KvModel._len, 20),
    (KvModel._commit, 10),
    (KvModel._reopen, 0.3),
    (KvModel._leave, 0.3),
    (KvModel._compact, 0.3),
    (KvModel._seal, 0.6),
    (KvModel._follow, 0.6),
    (KvModel._verify, 0.1),
]


class _Left(Exception):
    pass


def _key(random_: random.Random, n: int) -> bytes:
    """Return a key. Keys have all lengths, many have 8 bytes, and some differ only in trailing zero bytes."""
    if n % 10 == 9:
        return random_.randbytes(2) * random_.randint(6, 255) + random_.randbytes(1)
    kind = n % 4
    if kind == 0:
        return n.to_bytes(8, "little")
    if kind == 1:
        return random_.randbytes(8)
    raw = random_.randbytes(random_.randint(1, 15))
    return raw if kind == 2 else raw[:2] + bytes(random_.randint(1, 13))


def _order(key: int | bytes) -> tuple[bool, Any]:
    return isinstance(key, bytes), key


def _returned(key: Any) -> int | bytes:
    """Return a key as a store returns it."""
    return key.encode() if isinstance(key, str) else key


def _raw(key: Any) -> bytes:
    returned = _returned(key)
    return returned.to_bytes(8, "little", signed=True) if isinstance(returned, int) else returned


def _same(got: Any, expected: Any, operation: Any) -> None:
    if got != expected:
        shown = (repr(got)[:300], repr(expected)[:300])
        raise AssertionError(f"{operation!r}: the store has {shown[0]}, the dict {shown[1]}")


def main(arguments: list[str] | None = None) -> int:
    """Run from a command line; return 0 if all results were right."""
    parser = argparse.ArgumentParser(prog="python -m lab campaign kv_model", description=__doc__)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=None, help="default: random")
    parser.add_argument("--durability", choices=sorted(set(DURABILITIES)), default=None)
    parser.add_argument("--shards", type=int, default=None)
    parser.add_argument("--folder", type=Path, default=None, help="working folder (default: in memory, if possible)")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    # An fsync in memory costs nothing, and this campaign does not test power cuts.
    memory = Path("/dev/shm") if options.folder is None and Path("/dev/shm").is_dir() else options.folder
    folder = Path(tempfile.mkdtemp(prefix="warpwell-kv-model-", dir=memory))
    start_time = time.monotonic()
    try:
        model = KvModel(folder, seed, durability=options.durability, shards=options.shards)
        print(f"seed {seed}, durability {model.durability}, shards {len(model.shards or [])}", flush=True)
        model.run(options.operations)
        model.close()
    except AssertionError as error:
        print(f"FAILED with seed {seed}: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    counts = ", ".join(f"{name} {count}" for name, count in sorted(model.done.items()))
    seconds = time.monotonic() - start_time
    print(f"{options.operations} operations in {seconds:.1f} s, all with the results of the dict: {counts}")
    return 0
