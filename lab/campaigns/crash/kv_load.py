"""A scripted load on a `warpwell.kv` log, and what its store may hold after each step."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpwell.kv import crc32c
from warpwell.kv.log.compaction import compact
from warpwell.kv.log.files import Files, read_at
from warpwell.kv.log.format import crc_of, offset_of, segment_of, size_of
from warpwell.kv.log.log import Log

from .power import SHARD

State = dict[bytes, bytes]
SEGMENT_BYTES = 1 << 16


@dataclass
class Script:
    """Steps and what they lead to.

    Attributes
    ----------
    steps : list of tuple
        ``("put", {key: value})``, ``("one", key, value)``, ``("delete", [keys])``, and those that commit:
        ``("commit",)``, ``("snapshot",)``, ``("reopen",)``; and ``("compact",)``, which leaves what is not committed
        so. With durability "always" all commit.
    states : list of dict
        ``states[k]`` is what the store holds when `k` steps that commit are done.
    durability : str
    shards : int
        Number of folders with segments, next to the store's; 0 for its own.
    """

    steps: list[tuple[Any, ...]]
    states: list[State]
    durability: str
    shards: int = 0

    def commits(self, step: tuple[Any, ...]) -> bool:
        """Tell whether a step commits."""
        return self.durability == "always" or step[0] not in ("put", "one", "delete", "compact")

    def versions(self) -> set[tuple[bytes, bytes]]:
        """Return every key with every value that was ever put."""
        out: set[tuple[bytes, bytes]] = set()
        for step in self.steps:
            if step[0] == "put":
                out.update(step[1].items())
            elif step[0] == "one":
                out.add((step[1], step[2]))
        return out


def write_script(seed: int, steps: int = 60, durability: str = "commit", keys: int = 40) -> Script:
    """Return a load of about `steps` steps; the same seed gives the same."""
    rng = random.Random(seed)
    state: State = {}
    names = [rng.randbytes(rng.choice((1, 3, 8, 8, 8, 15, 16))) for _ in range(keys)]
    names += [b"a", b"a\0", b"\0"]
    out = Script([], [{}], durability, shards=2 * (seed % 2))
    for _ in range(steps):
        draw = rng.random()
        if draw < 0.30:
            chosen = {rng.choice(names): _value(rng) for _ in range(rng.randint(1, 12))}
            out.steps.append(("put", chosen))
            state.update(chosen)
        elif draw < 0.48:
            step = ("one", rng.choice(names), _value(rng))
            out.steps.append(step)
            state[step[1]] = step[2]
        elif draw < 0.60:
            gone = rng.sample(names, rng.randint(1, 6))
            out.steps.append(("delete", gone))
            for key in gone:
                state.pop(key, None)
        else:
            kind = "commit" if draw < 0.85 else rng.choice(("snapshot", "compact", "reopen"))
            out.steps.append((kind,))
        if out.commits(out.steps[-1]):
            out.states.append(dict(state))
    out.steps.append(("commit",))
    out.states.append(dict(state))
    return out


def _value(rng: random.Random) -> bytes:
    sizes = (0, 1, 63, 64, 65, rng.randint(0, 600), rng.randint(0, 600), 4095, 4096, rng.randint(4097, 20000))
    return rng.randbytes(rng.choice(sizes))


@dataclass
class Run:
    """A run of a script on a store.

    Attributes
    ----------
    script : Script
    folder : str
    files : Files
    acknowledge : callable
        Called with the number of committing steps that are done (0: the store is created), and with the number of
        those that are durable even if the power fails.
    """

    script: Script
    folder: str
    files: Files
    acknowledge: Callable[[int, int], object]
    log: Log | None = None
    locations: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    created: bool = False
    done: int = 0
    committed: int = 0
    durable: int = 0

    def all(self) -> None:
        """Create the store and do every step that is not done yet."""
        self.begin()
        while self.done < len(self.script.steps):
            self.next()
        self.close()

    def begin(self) -> None:
        """Create the store."""
        if not self.created:
            parent = os.path.dirname(self.folder)
            self.log = Log.create(
                self.folder,
                durability=self.script.durability,
                segment_bytes=SEGMENT_BYTES,
                shards=[os.path.join(parent, f"{SHARD}{k}") for k in range(self.script.shards)],
                files=self.files,
            )
            self.created = True
            self.acknowledge(0, 0)

    def next(self) -> None:
        """Do one step; one that raised can be done again."""
        step = self.script.steps[self.done]
        if self.log is None:  # closed, and opening it failed
            self._reopen()
        log = self.log
        assert log is not None
        if step[0] == "put":
            keys, lens = padded(list(step[1]))
            shards = np.array([self._shard(key) for key in step[1]], np.uint8)
            locs = log.append(keys, lens, list(step[1].values()), shards=shards)
            self.locations.update(zip(step[1], map(tuple, locs.tolist()), strict=True))
        elif step[0] == "one":
            self.locations[step[1]] = append_one(log, step[1], step[2], self._shard(step[1]))
        elif step[0] == "delete":
            log.append_deletes(*padded(step[1]))
            for key in step[1]:
                self.locations.pop(key, None)
        elif step[0] == "compact":
            compact(log, live=self._index, lookup=self._lookup, relocate=self._relocate, threshold=0.3)
            log.release(log.retired())
        else:
            self._committing(step[0], log)
        self.done += 1
        if self.script.commits(step):
            self.committed += 1
            if self.script.durability != "none" or step[0] in ("snapshot", "reopen"):
                self.durable = self.committed
            self.acknowledge(self.committed, self.durable)

    def close(self) -> None:
        """Close the store."""
        if self.log is not None:
            self.log.close()
            self.acknowledge(self.committed, self.committed)

    def _committing(self, kind: str, log: Log) -> None:
        if kind == "commit":
            log.commit()
            if log.snapshot_due:
                log.snapshot(*self._index())
                log.release(log.retired())
        elif kind == "snapshot":
            log.snapshot(*self._index())
        else:
            log.commit()
            self.log = None
            log.close()
            self._reopen()

    def _reopen(self) -> None:
        self.log = Log.open(self.folder, writable=True, files=self.files)
        self.locations = index_of(self.log)

    def _shard(self, key: bytes) -> int:
        return key[0] % max(self.script.shards, 1)

    def _index(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.int64]]:
        keys, lens = padded(list(self.locations))
        return keys, lens, np.array(list(self.locations.values()), np.int64).reshape(-1, 2)

    def _lookup(self, keys: NDArray[np.uint8], lens: NDArray[np.uint8]) -> NDArray[np.int64]:
        found = [self.locations.get(key, (0, 0)) for key in unpadded(keys, lens)]
        return np.array(found, np.int64).reshape(-1, 2)

    def _relocate(
        self, keys: NDArray[np.uint8], lens: NDArray[np.uint8], old: NDArray[np.int64], new: NDArray[np.int64]
    ) -> None:
        for key, was, now in zip(unpadded(keys, lens), old.tolist(), new.tolist(), strict=True):
            if self.locations.get(key) == tuple(was):
                self.locations[key] = (now[0], now[1])


def append_one(log: Log, key: bytes, value: bytes, shard: int = 0) -> tuple[int, int]:
    """Append one record and return its location."""
    loc0, loc1 = log.append(*padded([key]), [value], shards=np.array([shard], np.uint8))[0].tolist()
    return loc0, loc1


def padded(keys: list[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return keys as uint8 [N, 16] and their lengths."""
    joined = b"".join(key.ljust(16, b"\0") for key in keys)
    return np.frombuffer(joined, np.uint8).reshape(-1, 16), np.array([len(key) for key in keys], np.uint8)


def unpadded(keys: NDArray[np.uint8], lens: NDArray[np.uint8]) -> list[bytes]:
    """Return keys as bytes."""
    return [key.tobytes()[:n] for key, n in zip(keys, lens.tolist(), strict=True)]


def index_of(log: Log) -> dict[bytes, tuple[int, int]]:
    """Return the locations that recovery found."""
    found = log.recovered
    assert found is not None
    return dict(zip(unpadded(found.keys, found.key_lens), map(tuple, found.locs.tolist()), strict=True))


class WrongBytes(Exception):
    """A value whose checksum does not fit: a store would refuse to serve it."""


def contents(log: Log) -> State:
    """Return everything that a log holds, checked as a store checks it.

    Raises
    ------
    WrongBytes
    """
    out: State = {}
    for key, (loc0, loc1) in index_of(log).items():
        value = read_at(log.segments.fd(segment_of(loc0)), size_of(loc0, loc1), offset_of(loc0))
        if len(value) != size_of(loc0, loc1) or crc32c(value) != crc_of(loc1):
            raise WrongBytes(f"{key!r} at {os.path.basename(log.segments.path(segment_of(loc0)))}:{offset_of(loc0)}")
        out[key] = value
    return out
