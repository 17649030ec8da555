"""A YCSB workload on a store, timed: ``load_records`` and ``run``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from warpwell.errors import CorruptionError

from .distributions import Items
from .ycsb import INSERT, KIND_NAMES, READ, READ_MODIFY_WRITE, Requests, YcsbWorkload

GROUP = 256
"""Operations between two commits if operations are executed one at a time."""

_POOL = 1024
_POOL_BYTES = 64 << 20
_LOAD_ROWS = 4096
COMMIT = len(KIND_NAMES)
_NAMES = (*KIND_NAMES, "commit")


class System(Protocol):
    """The runner's interface of a store, so that several types of stores execute the same requests.

    `keys_of` and `values_of` are called before the clock starts, and return the form that the system reads fastest.
    """

    def keys_of(self, keys: Items) -> Sequence[Any]:
        """Return keys for `get` and `put`, one each."""

    def batch_of(self, keys: Items) -> Any:
        """Return keys for `get_many` and `put_many`."""

    def values_of(self, values: NDArray[np.uint8]) -> Any:
        """Return the rows of uint8 [N, nbytes] as values: item k for `put`, a slice for `put_many`."""

    def begin(self, writes: bool) -> None:
        """Begin a group of operations, `writes` of which write."""

    def get(self, key: Any) -> bytes | None:
        """Return the value of one key."""

    def put(self, key: Any, value: Any) -> None:
        """Write one record."""

    def get_many(self, batch: Any) -> Sequence[bytes | None]:
        """Return the values of several keys."""

    def put_many(self, batch: Any, values: Any) -> None:
        """Write several records."""

    def commit(self) -> None:
        """End the group: make its writes durable."""


@dataclass(frozen=True)
class OperationTimes:
    """Times of one kind of operation (of a batch, where operations come in batches).

    Attributes
    ----------
    count : int
        Number of operations.
    p50, p99 : float
        Microseconds.
    """

    count: int
    p50: float
    p99: float


@dataclass(frozen=True)
class YcsbResult:
    """The measurements of a run.

    Attributes
    ----------
    operations : int
        Number of operations.
    seconds : float
        Time within operations and commits; drawing requests is not part of it.
    latencies : dict of str to OperationTimes
        By kind ("read", "update", "insert", "read-modify-write"), and of commits.
    """

    operations: int
    seconds: float
    latencies: dict[str, OperationTimes]

    @property
    def operations_per_second(self) -> float:
        """Operations divided by seconds."""
        return self.operations / self.seconds


def load_records(
    system: System, workload: YcsbWorkload, seed: int = 0, progress: Callable[[str, int, int], None] | None = None
) -> None:
    """Put the records that a workload starts with."""
    pool = _values(workload.value_bytes, min(_LOAD_ROWS, workload.records), seed)
    requests = Requests(workload)
    for start in range(0, workload.records, len(pool)):
        keys = requests.load_keys(start, min(start + len(pool), workload.records))
        system.begin(True)
        system.put_many(system.batch_of(keys), system.values_of(pool[: keys.size]))
        system.commit()
        if progress is not None:
            progress("load", start + keys.size, workload.records)


def run(
    system: System,
    workload: YcsbWorkload,
    *,
    batch: int = 1,
    group: int = GROUP,
    seed: int = 0,
    requests: Requests | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> YcsbResult:
    """Run the operations of a workload on a system that `load_records` filled.

    Parameters
    ----------
    system : System
        The system to measure.
    workload : YcsbWorkload
        The mix.
    batch : int, default 1
        Operations in one call. A batch inserts, then reads, then updates, then commits.
    group : int, default 256
        Operations between two commits if `batch` is 1.
    seed : int, default 0
        Of requests and values.
    requests : Requests, optional
        Requests to continue with if the system has executed some of them; new requests by default.
    progress : callable, optional
        Called repeatedly as ``progress("run", done, operations)``.

    Raises
    ------
    CorruptionError
        A record that must exist is missing, or has another size.
    """
    requests = Requests(workload, seed) if requests is None else requests
    values = system.values_of(_values(workload.value_bytes, _POOL, seed, at_least=batch))
    work = _one_by_one if batch == 1 else _batched
    # compile before the measurement
    shares = workload.update + workload.insert + workload.read_modify_write
    for code in (READ, READ_MODIFY_WRITE) if shares else (READ,):
        work(system, np.array([code], np.uint8), requests.load_keys(0, 1), values, workload.value_bytes)
    times: list[NDArray[np.int64]] = [np.zeros((0, 2), np.int64)]
    done = total = 0
    for block in requests.blocks(group if batch == 1 else batch):
        durations, nanoseconds = work(system, block.kinds, block.keys, values, workload.value_bytes)
        times.append(np.array(durations, np.int64).reshape(-1, 2))
        total += nanoseconds
        done += block.keys.size
        if progress is not None and done % (64 * group) < block.keys.size:
            progress("run", done, workload.operations)
    return YcsbResult(done, total / 1e9, _latencies(np.concatenate(times)))


def _one_by_one(
    system: System, kinds: NDArray[np.uint8], keys: Items, values: Any, nbytes: int
) -> tuple[list[tuple[int, int]], int]:
    listed, codes = system.keys_of(keys), kinds.tolist()
    clock, rows = time.perf_counter_ns, len(values)
    sizes: list[int] = []
    marks = [0] * (len(codes) + 1)
    start = marks[0] = clock()
    system.begin(bool((kinds != READ).any()))
    get, put = system.get, system.put
    for k, code in enumerate(codes):
        if code == READ or code == READ_MODIFY_WRITE:
            value = get(listed[k])
            sizes.append(-1 if value is None else len(value))
        if code != READ:
            put(listed[k], values[k % rows])
        marks[k + 1] = clock()
    system.commit()
    ended = clock()
    _check(sizes, nbytes)
    durations = [(code, after - before) for code, before, after in zip(codes, marks, marks[1:], strict=False)]
    return [*durations, (COMMIT, ended - marks[-1])], ended - start


def _batched(
    system: System, kinds: NDArray[np.uint8], keys: Items, values: Any, nbytes: int
) -> tuple[list[tuple[int, int]], int]:
    inserts, reads = kinds == INSERT, (kinds == READ) | (kinds == READ_MODIFY_WRITE)
    updates = ~inserts & (kinds != READ)
    groups = [(code, mask) for code, mask in ((INSERT, inserts), (READ, reads), (1, updates)) if mask.any()]
    calls = [(code, system.batch_of(keys[mask]), int(mask.sum())) for code, mask in groups]
    durations: list[tuple[int, int]] = []
    found: Sequence[bytes | None] = ()
    clock = time.perf_counter_ns
    start = last = clock()
    system.begin(bool((kinds != READ).any()))
    for code, batch, count in calls:
        if code == READ:
            found = system.get_many(batch)
        else:
            system.put_many(batch, values[:count])
        now = clock()
        durations.append((code, now - last))
        last = now
    system.commit()
    ended = clock()
    _check([-1 if value is None else len(value) for value in found], nbytes)
    return [*durations, (COMMIT, ended - last)], ended - start


def _check(sizes: list[int], nbytes: int) -> None:
    if any(size != nbytes for size in sizes):
        wrong = next(size for size in sizes if size != nbytes)
        problem = "is missing" if wrong < 0 else f"has {wrong} bytes instead of {nbytes}"
        raise CorruptionError(f"a record of the workload {problem}: load the workload into a separate store")


def _latencies(times: NDArray[np.int64]) -> dict[str, OperationTimes]:
    out = {}
    for code, name in enumerate(_NAMES):
        microseconds = times[times[:, 0] == code, 1] / 1000
        if microseconds.size:
            p50, p99 = np.percentile(microseconds, [50, 99])
            out[name] = OperationTimes(int(microseconds.size), float(p50), float(p99))
    return out


def _values(nbytes: int, rows: int, seed: int, at_least: int = 1) -> NDArray[np.uint8]:
    rows = max(at_least, min(rows, _POOL_BYTES // nbytes))
    return np.random.default_rng(seed).integers(0, 256, (rows, nbytes), np.uint8)
