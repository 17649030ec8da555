"""Flip bits in the files of a key-value store: every flip must be detected, and no flipped value returned."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import partial

import numpy as np

from warpwell import errors
from warpwell.kv.log.files import LOCK_NAME, Files
from warpwell.kv.log.format import RECORD_BYTES, SUPERBLOCK, offset_of, segment_of, size_of
from warpwell.kv.log.journal import COMMITTED_NAME
from warpwell.kv.log.log import Log
from warpwell.kv.log.recovery import verify

from .kv_faults import salvage_all
from .kv_load import Run, State, WrongBytes, contents, write_script


@dataclass
class Flips:
    """Outcome: the number of flipped bytes, and how each flip was detected.

    Attributes
    ----------
    header_bytes : int
        Bytes of superblocks, records, snapshots, the manifest and the floor that were flipped, one at a time.
    value_bytes : int
        Bytes of values that were flipped, one at a time.
    refused : int
        Flips with which the store did not open.
    found_reading : int
        Flips that were detected by reading the values.
    found_by_verify : int
        Flips that only `verify` detected; the store opened and held the right records.
    unnoticed : int
        Flips that were not detected.
    served : int
        Flips after which the store returned records that were never put.
    changed : int
        Stores that did not open, but in which the attempt changed a file.
    salvaged : int
        Salvaged stores: one of `SALVAGE_EVERY` flips.
    misjudged : int
        Salvages that returned a value that was never put, or lost a record without a report.
    """

    header_bytes: int = 0
    value_bytes: int = 0
    refused: int = 0
    found_reading: int = 0
    found_by_verify: int = 0
    unnoticed: int = 0
    served: int = 0
    changed: int = 0
    salvaged: int = 0
    misjudged: int = 0
    seconds: float = 0.0
    details: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> int:
        """Flips with a wrong outcome."""
        return self.unnoticed + self.served + self.changed + self.misjudged


SALVAGE_EVERY = 50
_ENDINGS = ("closed", "killed", "snapshot")
_COUNTS = [each.name for each in fields(Flips) if each.name not in ("seconds", "details")]


def flip_campaign(seed: int, base: str, *, stride: int = 1, value_share: float = 0.01) -> Flips:
    """Flip bits of every `stride`-th header byte and of a share of the value bytes of stores, one at a time.

    One store was closed, one was left by a killed writer, and one has a snapshot; each has a process of its own.
    """
    start = time.monotonic()
    with ProcessPoolExecutor(len(_ENDINGS), multiprocessing.get_context("fork")) as pool:
        parts = list(pool.map(partial(_flip_store, seed, base, stride, value_share), _ENDINGS))
    counts = {name: sum(getattr(part, name) for part in parts) for name in _COUNTS}
    details = [detail for part in parts for detail in part.details][:10]
    return Flips(**counts, seconds=time.monotonic() - start, details=details)


def _flip_store(seed: int, base: str, stride: int, value_share: float, ending: str) -> Flips:
    rng, out = random.Random(f"{seed} {ending}"), Flips()
    with tempfile.TemporaryDirectory(dir=base) as outer:
        folder = os.path.join(outer, "store.kv")
        held, versions = _make(folder, rng.getrandbits(32), ending)
        _flip_all(folder, held, versions, rng, out, stride, value_share)
    return out


def _make(folder: str, seed: int, ending: str) -> tuple[State, set[tuple[bytes, bytes]]]:
    """Write a store; return its records, and every key with every value that was ever put."""
    script = replace(write_script(seed, steps=30, keys=15), shards=0)
    script.steps = [step for step in script.steps if step[0] != "reopen"]
    live = folder + ".live" if ending == "killed" else folder
    run = Run(script, live, Files(), lambda done, durable: None)
    run.begin()
    for _ in script.steps:
        run.next()
    records = run.records
    assert records is not None
    if ending == "snapshot":
        records.snapshot()
        records.put_one(b"behind", b"the snapshot", False)
        records.commit()
    if ending == "killed":  # the files of a store that is open
        shutil.copytree(live, folder)
    run.close()
    with Log.open(folder, writable=False) as log:
        return contents(log), script.versions() | {(b"behind", b"the snapshot")}


def _flip_all(
    folder: str,
    held: State,
    versions: set[tuple[bytes, bytes]],
    rng: random.Random,
    out: Flips,
    stride: int,
    value_share: float,
) -> None:
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        size = os.path.getsize(path)
        if name == LOCK_NAME:
            continue
        if name.endswith(".val"):
            headers = [*range(rng.randrange(stride), SUPERBLOCK, stride)]
            used = _value_bytes(folder, int(name.split(".")[0]))
            values = rng.sample(used, max(1, int(value_share * len(used)))) if used else []
        else:
            offsets = [*range(64), *range(4096, 4160)] if name == COMMITTED_NAME else range(size)
            headers, values = list(offsets)[rng.randrange(stride) :: stride], []
        for at in headers:
            out.header_bytes += at < size
            if at < size:
                _flip(folder, name, at, held, versions, rng, out)
        for at in values:
            out.value_bytes += 1
            _flip(folder, name, at, held, versions, rng, out)


def _value_bytes(folder: str, segment: int) -> list[int]:
    """Return the offsets of all bytes of live values in a segment."""
    with Log.open(folder, writable=False) as log:
        assert log.recovered is not None
        locs = log.recovered.live()[:, 2:]
    locs = locs[segment_of(locs[:, 0]) == segment]
    spans = [np.arange(o, o + n) for o, n in zip(offset_of(locs[:, 0]), size_of(*locs.T), strict=True)]
    return [int(at) for span in spans for at in span]


def _flip(
    folder: str,
    name: str,
    at: int,
    held: State,
    versions: set[tuple[bytes, bytes]],
    rng: random.Random,
    out: Flips,
) -> None:
    path = os.path.join(folder, name)
    with open(path, "r+b", buffering=0) as file:
        file.seek(at)
        old = file.read(1)
        file.seek(at)
        file.write(bytes([old[0] ^ 1 << rng.randrange(8)]))
        try:
            how = _notice(folder, held)
            if (out.header_bytes + out.value_bytes) % SALVAGE_EVERY == 0:
                out.salvaged += 1
                problem = _misjudged(folder, held, versions)
                if problem:
                    out.misjudged += 1
                    out.details.append(f"{name} byte {at}: {problem}")
        finally:
            file.seek(at)
            file.write(old)
    setattr(out, how, getattr(out, how) + 1)
    if how in ("unnoticed", "served", "changed"):
        where = f"record {(at - SUPERBLOCK) // RECORD_BYTES}" if name.endswith(".jnl") else ""
        out.details.append(f"{name} byte {at} {where}: {how}")


def _notice(folder: str, held: State) -> str:
    try:
        log = Log.open(folder, writable=False)
    except errors.FormatError:
        if verify(folder).sound:
            return "unnoticed"
        return "refused" if _writer_refuses(folder) else "changed"
    try:
        with log:
            found = contents(log)
    except (WrongBytes, errors.CorruptionError):  # a value, or a block of the index
        return "found_reading" if not verify(folder).sound else "unnoticed"
    if found != held:
        return "served"
    report = verify(folder)
    is_found = not report.sound or report.unsettled_values or report.torn_bytes or report.torn_marks
    return "found_by_verify" if is_found else "unnoticed"


def _misjudged(folder: str, held: State, versions: set[tuple[bytes, bytes]]) -> str:
    """Salvage a damaged store; return the fault, or ""."""
    found, report = salvage_all(folder)
    wrong = [key for key in found if (key, found[key]) not in versions]
    if wrong:
        return f"salvage brings a wrong value of {wrong[0]!r}"
    changed = {key for key in held.keys() | found.keys() if held.get(key) != found.get(key)}
    if changed and not report.missing_records and changed != {problem.key for problem in report.lost}:
        return f"salvage loses {changed}, and reports {report.lost}"
    return ""


def _writer_refuses(folder: str) -> bool:
    """Return whether opening for writing fails too, and changes no file."""
    before = _stamps(folder)
    try:
        Log.open(folder, writable=True).close()
    except errors.FormatError:
        return _stamps(folder) == before
    return False


def _stamps(folder: str) -> dict[str, tuple[int, int]]:
    out = {}
    for name in os.listdir(folder):
        if name != LOCK_NAME:
            status = os.stat(os.path.join(folder, name))
            out[name] = (status.st_size, status.st_mtime_ns)
    return out
