"""A scripted load on the records of a store, and the contents that are allowed after each step."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpwell.kv import as_keys, crc32c
from warpwell.kv.compaction import compact
from warpwell.kv.log import journal as journal_module
from warpwell.kv.log import log as log_module
from warpwell.kv.log.files import Files, read_at
from warpwell.kv.log.format import crc_of, key_len_of, offset_of, segment_of, size_of
from warpwell.kv.log.journal import MIN_AHEAD_BYTES
from warpwell.kv.log.log import UNSYNCED_BYTES, Log
from warpwell.kv.records import Records

from .power import SHARD

State = dict[bytes, bytes]
SEGMENT_BYTES = 1 << 16


@dataclass
class Script:
    """Steps, and the contents of the store after each of them.

    Attributes
    ----------
    steps : list of tuple
        ``("put", {key: value})``, ``("one", key, value)``, ``("delete", [keys])``, and the
        committing steps ``("commit",)``, ``("snapshot",)`` and ``("reopen",)``. ``("compact",)`` does not commit
        pending changes. With durability "always" every step commits.
    states : list of dict
        ``states[k]`` is the contents of the store after `k` committing steps.
    durability : str
    shards : int
        Number of shard folders next to the store's folder; 0 keeps the segments in the store's folder.
    unsynced_bytes : int
        Maximum size of values that are durable in the journal only.
    ahead_bytes : int
        Minimum size of the zeros that a group writes after itself.
    """

    steps: list[tuple[Any, ...]]
    states: list[State]
    durability: str
    shards: int = 0
    unsynced_bytes: int = UNSYNCED_BYTES
    ahead_bytes: int = MIN_AHEAD_BYTES

    def commits(self, step: tuple[Any, ...]) -> bool:
        """Return whether a step commits."""
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
    """Return a load of about `steps` steps; the same seed gives the same load."""
    rng = random.Random(seed)
    state: State = {}
    names = [rng.randbytes(rng.choice((1, 3, 8, 8, 8, 15, 16))) for _ in range(keys)]
    names += [b"a", b"a\0", b"\0"]
    unsynced_bytes = (0, 1 << 14, 1 << 16, UNSYNCED_BYTES)[seed // 2 % 4]
    out = Script([], [{}], durability, 2 * (seed % 2), unsynced_bytes, (MIN_AHEAD_BYTES, 1 << 18)[seed // 8 % 2])
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
            deleted = rng.sample(names, rng.randint(1, 6))
            out.steps.append(("delete", deleted))
            for key in deleted:
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
    """A run of a script on the records of a store.

    Attributes
    ----------
    script : Script
    folder : str
    files : Files
    acknowledge : callable
        Called with the number of finished committing steps (0 after the creation), and with the number of them that
        survive a power cut.
    records : Records or None
        None before the creation, and if opening the store failed.
    """

    script: Script
    folder: str
    files: Files
    acknowledge: Callable[[int, int], object]
    records: Records | None = None
    created: bool = False
    done: int = 0
    committed: int = 0
    durable: int = 0

    def all(self) -> None:
        """Create the store and execute all remaining steps."""
        self.begin()
        while self.done < len(self.script.steps):
            self.next()
        self.close()

    def begin(self) -> None:
        """Create the store."""
        log_module.UNSYNCED_BYTES = self.script.unsynced_bytes
        journal_module.MIN_AHEAD_BYTES = self.script.ahead_bytes
        if not self.created:
            parent = os.path.dirname(self.folder)
            log = Log.create(
                self.folder,
                durability=self.script.durability,
                segment_bytes=SEGMENT_BYTES,
                shards=[os.path.join(parent, f"{SHARD}{k}") for k in range(self.script.shards)],
                files=self.files,
            )
            self.created = True
            self.records = Records(log)
            self.acknowledge(0, 0)

    def next(self) -> None:
        """Execute one step; a step that raised can be retried."""
        kind, *arguments = step = self.script.steps[self.done]
        records = self._open() if self.records is None else self.records  # not `or`: empty records are false
        if kind == "put":
            records.put(as_keys(list(arguments[0])), list(arguments[0].values()))
        elif kind == "one":
            records.put_one(arguments[0], arguments[1], False)
        elif kind == "delete":
            records.delete(as_keys(arguments[0]))
        elif kind == "compact":
            compact(records, threshold=0.3)
        else:
            records.commit()
        if kind == "snapshot":
            records.snapshot()
        elif kind == "reopen":
            self.close()
            self._open()
        self.done += 1
        if self.script.commits(step):
            self.committed += 1
            if self.script.durability != "none" or kind in ("snapshot", "reopen"):
                self.durable = self.committed
            self.acknowledge(self.committed, self.durable)

    def close(self) -> None:
        """Close the store."""
        records, self.records = self.records, None
        if records is not None:
            records.close()
            if self.done == len(self.script.steps):
                self.acknowledge(self.committed, self.committed)

    def _open(self) -> Records:
        self.records = Records(Log.open(self.folder, writable=True, files=self.files))
        return self.records


def append_one(log: Log, key: bytes, value: bytes, shard: int = 0) -> tuple[int, int]:
    """Append one record and return its location."""
    loc0, loc1 = log.append(*padded([key]), [value], shards=np.array([shard], np.uint8))[0, 2:].tolist()
    return loc0, loc1


def padded(keys: list[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return keys as uint8 [N, 16] and their lengths."""
    joined = b"".join(key.ljust(16, b"\0") for key in keys)
    return np.frombuffer(joined, np.uint8).reshape(-1, 16), np.array([len(key) for key in keys], np.uint8)


def names_in(slots: NDArray[np.int64]) -> list[bytes]:
    """Return the keys in slots as bytes."""
    return [key.tobytes()[:n] for key, n in zip(slots[:, :2], key_len_of(slots[:, 3]).tolist(), strict=True)]


def index_of(log: Log) -> dict[bytes, tuple[int, int]]:
    """Return the locations that recovery found."""
    found = log.recovered
    assert found is not None
    slots = found.live()
    return dict(zip(names_in(slots), map(tuple, slots[:, 2:].tolist()), strict=True))


class WrongBytes(Exception):
    """A stored value does not match its checksum; a store would raise instead of returning it."""


def contents(log: Log) -> State:
    """Return all records of a log, with the checks that a store makes.

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
