"""``python -m lab bench kv``: a YCSB workload on a store."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.cli import parser_of, run_command
from lab.kv.distributions import Items
from lab.kv.ycsb import Requests, YcsbWorkload
from lab.kv.ycsb_run import GROUP, YcsbResult, load_records
from lab.kv.ycsb_run import run as run_workload
from warpwell import kv
from warpwell.cli._common import Output, json_option, output_of
from warpwell.errors import ArgumentError, SchemaError
from warpwell.replacing import unfinished

_DEFAULT_SIZE = 100_000
_LARGEST_BATCH = 1 << 20
_WORKLOADS = ("ycsb-a", "ycsb-b", "ycsb-c", "ycsb-d", "ycsb-e", "ycsb-f")
"""Workload e is listed so that its message can explain why it is not supported."""


class StoreSystem:
    """A store as the runner sees it.

    Parameters
    ----------
    store : Store
        Open for writing, without a schema.
    """

    def __init__(self, store: kv.Store) -> None:
        self.get, self.put, self.put_many = store.get, store.put, store.put_many
        self._store = store
        self._writes = False

    def keys_of(self, keys: Items) -> Sequence[Any]:
        """Return integers."""
        listed: list[int] = keys.tolist()
        return listed

    def batch_of(self, keys: Items) -> Any:
        """Return the array itself."""
        return keys

    def values_of(self, values: NDArray[np.uint8]) -> Any:
        """Return the array itself."""
        return values

    def begin(self, writes: bool) -> None:
        """Record whether the group writes, so that `commit` is necessary."""
        self._writes = writes

    def get_many(self, batch: Any) -> Sequence[bytes | None]:
        """Return the values."""
        values: Sequence[bytes | None] = self._store.get_many(batch)[0]
        return values

    def commit(self) -> None:
        """Commit the writes of the group."""
        if self._writes:
            self._store.commit()


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = parser_of("bench kv", "Measure operations per second and latencies of a store with YCSB.")
    parser.add_argument("--workload", choices=_WORKLOADS, default="ycsb-c", help="default ycsb-c; e is not supported")
    parser.add_argument(
        "--properties",
        metavar="PATH",
        help="YCSB's property file, or a folder or tar archive that contains it (default: the same mix, built in)",
    )
    parser.add_argument("--store", metavar="STORE", help="run on this store (default: a temporary store)")
    parser.add_argument("--records", type=int, metavar="N", help="default: as in the property file, or 100000")
    parser.add_argument("--operations", type=int, metavar="N", help="default: as in the property file, or 100000")
    parser.add_argument("--value-bytes", type=int, metavar="N", help="size of a value (default 1000)")
    parser.add_argument(
        "--batch",
        type=int,
        default=1,
        metavar="N",
        help="operations per call and commit (default 1: single operations, with a commit after each 256)",
    )
    parser.add_argument(
        "--durability", choices=("commit", "always", "none"), default="commit", help="durability of a new store"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the requests")
    json_option(parser)
    return run_command(run, parser, argv)


def run(arguments: argparse.Namespace) -> int:
    """Run a workload and report operations per second and latencies."""
    output = output_of(arguments)
    workload = YcsbWorkload.named(arguments.workload, arguments.properties)
    size = _DEFAULT_SIZE if arguments.properties is None else None
    workload = workload.sized(
        size if arguments.records is None else arguments.records,
        size if arguments.operations is None else arguments.operations,
        arguments.value_bytes,
    )
    if not 1 <= arguments.batch <= _LARGEST_BATCH:
        raise ArgumentError(f"--batch {arguments.batch}: expected 1 to {_LARGEST_BATCH} operations", name="batch")
    if arguments.seed < 0:
        raise ArgumentError(f"--seed {arguments.seed}: expected 0 or more", name="seed")
    with output.progress() as report, _opened(arguments, workload) as (store, loaded):
        system = StoreSystem(store)
        if not loaded:
            load_records(system, workload, arguments.seed, report)
        report("run", 0, workload.operations)
        result = run_workload(system, workload, batch=arguments.batch, seed=arguments.seed, progress=report)
    values = _values(arguments, workload, result)
    if arguments.json:
        output.result("", values)
        return 0
    _print(output, values, result)
    return 0


@contextlib.contextmanager
def _opened(arguments: argparse.Namespace, workload: YcsbWorkload) -> Iterator[tuple[kv.Store, bool]]:
    """Yield a store, and whether it has the records of the workload."""
    if arguments.store is None:
        with tempfile.TemporaryDirectory(prefix="warpwell-bench-") as folder:
            unfinished.add(Path(folder))  # if an interrupt ends the process, the folder is removed
            with kv.create(Path(folder, "bench.kv"), durability=arguments.durability) as store:
                yield store, False
        return
    path = Path(arguments.store)
    if not path.exists():
        with kv.create(path, durability=arguments.durability) as store:
            yield store, False
        return
    with kv.open(path, mode="r+") as store:
        if store.schema is not None:
            raise SchemaError(f"{path} has a schema, but YCSB's values are bytes: omit --store, or pass a new store")
        yield store, _holds(store, workload)


def _holds(store: kv.Store, workload: YcsbWorkload) -> bool:
    """Return True if a store has the records; raise ArgumentError if it has other records."""
    if not len(store):
        return False
    keys = Requests(workload).load_keys(0, workload.records)
    sample = np.unique(np.linspace(0, keys.size - 1, 1024).astype(np.int64))
    values, found = store.get_many(keys[sample])
    if not found.any():
        raise ArgumentError(f"{store.path} has other records: omit --store, or pass a new store", name="store")
    return bool(found.all()) and all(len(v) == workload.value_bytes for v in values) and len(store) >= keys.size


def _values(arguments: argparse.Namespace, workload: YcsbWorkload, result: YcsbResult) -> dict[str, Any]:
    latencies = {
        name: {"count": histogram.count, "p50_us": histogram.p50, "p99_us": histogram.p99}
        for name, histogram in result.latencies.items()
    }
    return {
        "workload": workload.name,
        "store": arguments.store or "temporary",
        "records": workload.records,
        "operations": result.operations,
        "value_bytes": workload.value_bytes,
        "distribution": workload.distribution,
        "batch": arguments.batch,
        "durability": arguments.durability,
        "commit_every": GROUP if arguments.batch == 1 else arguments.batch,
        "seed": arguments.seed,
        "seconds": result.seconds,
        "operations_per_second": result.operations_per_second,
        "latencies": latencies,
    }


def _print(output: Output, values: dict[str, Any], result: YcsbResult) -> None:
    shown = {k: v for k, v in values.items() if k not in ("latencies", "workload", "store")}
    output.result(f"{values['workload']} on {values['store']}", shown)
    unit = "call" if values["batch"] == 1 else f"call of up to {values['batch']}"
    rows = [(name, f"{t.count:,}", f"{t.p50:.1f}", f"{t.p99:.1f}") for name, t in result.latencies.items()]
    output.table(f"microseconds a {unit}", ("", "count", "p50", "p99"), rows)
