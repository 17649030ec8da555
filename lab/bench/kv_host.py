"""Key-value operations per second on the host, compared with LMDB and RocksDB: YCSB A, B, C, D, F and batched reads.

Every system gets the same records, requests and durability: all writes of each group of 256 operations are durable
after the group. Rounds of the systems alternate and caches are warm. Systems that are not installed are skipped. Bulk
loads ("load") write images of 2 to 200 KB into new files and commit after each 640, about 64 MiB: values alone, or
fields of a schema ("load/fields"), which LMDB does not have.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import numpy as np

from lab.bench.runner import Record, Setting, benchmark
from lab.kv import systems as kv_systems
from lab.kv.ycsb import NAMES, Requests, YcsbWorkload, record_keys
from lab.kv.ycsb_run import GROUP, load_records
from lab.kv.ycsb_run import run as run_ycsb

CACHE_BYTES = 2 << 30
LOAD_GROUP = 640
"""Images between commits of a bulk load."""
PACKAGES = {"Warpwell": "warpwell", "LMDB": "lmdb", "RocksDB": "rocksdict"}


def available() -> list:
    """Return the systems that are installed, Warpwell first."""
    return [kind for kind in kv_systems.SYSTEMS if importlib.util.find_spec(PACKAGES[kind.name])]


@contextlib.contextmanager
def systems(folder: str | None, row_bytes: int = 0) -> Iterator[list]:
    """Yield one of each system, in new folders."""
    with tempfile.TemporaryDirectory(prefix="warpwell-bench-", dir=folder) as path:
        opened = []
        try:
            for kind in available():
                opened.append(kind(Path(path), True, CACHE_BYTES, row_bytes))
            yield opened
        finally:
            for system in opened:
                system.close()


def rounds(opened: list, count: int, function: Callable[[object], float]) -> list[list[float]]:
    """Return the rates of each system. Every round runs all systems, in a different order each time."""
    found: list[list[float]] = [[] for _ in opened]
    gc.freeze()  # imported modules and compiled code are scanned once
    for k in range(count + 1):
        for n in range(len(opened)):
            turn = (n + k) % len(opened)
            gc.collect()
            rate = function(opened[turn])
            if k:  # the first round warms up
                found[turn].append(rate)
    return found


def record_rates(name: str, rates: list[list[float]], record: Record) -> None:
    """Record the rate of Warpwell, and the rates of the other systems."""
    peer_rates = zip(available()[1:], rates[1:], strict=True)
    peers = [(kind.name, metadata.version(PACKAGES[kind.name]), float(np.median(each))) for kind, each in peer_rates]
    record(name, rates[0], "1/s", peers=peers)


def ycsb(setting: Setting, name: str, batch: int, record: Record) -> None:
    """Run one YCSB workload."""
    sizes = (
        setting.pick((10_000, 100_000), (10_000, 100_000), "records"),
        setting.pick((5_000, 100_000), (5_000, 100_000), "operations"),
    )
    workload = YcsbWorkload.named(name, setting.options.get("properties")).sized(*sizes)
    with systems(setting.options.get("folder")) as opened:
        requests = {}
        for system in opened:
            load_records(system, workload)
            system.settle()
            requests[system.name] = Requests(workload, seed=1)

        def once(system) -> float:
            return run_ycsb(system, workload, batch=batch, requests=requests[system.name]).operations_per_second

        rates = rounds(opened, setting.option("rounds", 3), once)
    record_rates(f"{name}/batch{batch}", rates, record)


def gets(setting: Setting, nbytes: int, record: Record) -> None:
    """Read random batches into one array."""
    records = min(setting.pick((10_000, 100_000), (10_000, 100_000), "records"), (256 << 20) // nbytes)
    workload = YcsbWorkload("gets", records, value_bytes=nbytes)
    random = np.random.default_rng(7)
    count = setting.pick((50, 400), (50, 400))
    chosen = [record_keys(random.integers(0, records, GROUP)) for _ in range(count)]
    with systems(setting.options.get("folder"), nbytes) as opened:
        batches, answers = {}, []
        for system in opened:
            load_records(system, workload)
            system.settle()
            system.begin(False)
            batches[system.name] = [system.batch_of(keys) for keys in chosen]
            answers.append([bytes(value) for value in system.get_array(batches[system.name][0])])
        if any(answer != answers[0] for answer in answers):
            raise SystemExit("the systems return different values")

        def once(system) -> float:
            start = time.perf_counter()
            for batch in batches[system.name]:
                system.get_array(batch)
            return count * GROUP / (time.perf_counter() - start)

        rates = rounds(opened, setting.option("rounds", 3), once)
    record_rates(f"get/{nbytes}B/batch{GROUP}", rates, record)


def writes(setting: Setting, name: str, nbytes: int, group: int, count: int, record: Record) -> None:
    """Put values one by one and commit after each group.

    The rate counts the time of puts if `name` is "put", else the time of puts and commits.
    """
    random = np.random.default_rng(9)
    values = [random.bytes(nbytes) for _ in range(count)]
    with systems(setting.options.get("folder")) as opened:
        written = dict.fromkeys(opened, 0)

        def once(system) -> float:
            numbers = np.arange(written[system], written[system] + count)
            keys, seconds = system.keys_of(record_keys(numbers)), 0.0
            written[system] += count
            for at in range(0, count, group):
                system.begin(True)
                put, records = system.put, zip(keys[at : at + group], values[at : at + group], strict=True)
                started = time.perf_counter()
                for key, value in records:
                    put(key, value)
                seconds += time.perf_counter() - started if name == "put" else 0.0
                system.commit()
                seconds += time.perf_counter() - started if name != "put" else 0.0
            return count / seconds

        rates = rounds(opened, setting.option("rounds", 3), once)
    record_rates(f"{name}/{nbytes}B/group{group}", rates, record)


def bulk_loads(setting: Setting, count: int, record: Record) -> None:
    """Load images in batches of 64 from memory into new stores and into new environments of LMDB, in turn."""
    import lmdb

    import warpwell as ww

    random = np.random.default_rng(11)
    values = [random.bytes(nbytes) for nbytes in random.integers(2_000, 200_001, count).tolist()]
    labels = np.arange(count) % 100

    def load(path: Path, schema: dict | None) -> None:
        with ww.kv.create(path, schema=schema) as store:
            for at in range(0, count, 64):
                rows = slice(at, at + 64)
                batch = {"image": values[rows], "label": labels[rows]} if schema else values[rows]
                store.put_many(np.arange(at, min(at + 64, count)), batch)
                if (at + 64) % LOAD_GROUP == 0:
                    store.commit()

    def load_lmdb(path: Path) -> None:
        with lmdb.open(str(path), map_size=2 * sum(map(len, values)) + (64 << 20)) as environment:
            for at in range(0, count, LOAD_GROUP):
                with environment.begin(write=True) as transaction:
                    for key in range(at, min(at + LOAD_GROUP, count)):
                        transaction.put(key.to_bytes(8, "big"), values[key], append=True)

    loads: dict[str, Callable[[Path], None]] = {
        "values": lambda path: load(path, None),
        "fields": lambda path: load(path, {"image": ("uint8", (None,)), "label": "int64"}),
        "LMDB": load_lmdb,
    }
    rates: dict[str, list[float]] = {name: [] for name in loads}
    with tempfile.TemporaryDirectory(prefix="warpwell-bench-", dir=setting.options.get("folder")) as folder:
        for k in range(setting.option("rounds", 5) + 1):
            for name in list(loads)[:: 1 if k % 2 else -1]:
                os.sync()
                started = time.perf_counter()
                loads[name](Path(folder) / name)
                if k:  # the first round warms up
                    rates[name].append(count / (time.perf_counter() - started))
                shutil.rmtree(Path(folder) / name)
    for name in ("values", "fields"):
        peers = [("LMDB", metadata.version("lmdb"), statistics.median(rates["LMDB"]))]
        record(f"load/{name}", rates[name], "1/s", peers=peers)
        ratios = [own / peer for own, peer in zip(rates[name], rates["LMDB"], strict=True)]
        record(f"load/{name}/ratio", ratios, "LMDB's time / time", goal=1)


@benchmark("kv-host", figures=["ycsb-a", "ycsb-b", "ycsb-c", "ycsb-d", "ycsb-f", "get", "put", "write", "load"])
def run(setting: Setting, record: Record) -> None:
    """Run YCSB in batches and one by one, batched reads, single puts with commits, and bulk loads."""
    for nbytes in setting.option("write_sizes", [128, 1024]):
        for name, group, count in (
            ("put", 10_000, 50_000),
            ("write", 10_000, 50_000),
            ("write", 64, 6_400),
            ("write", 1, 300),
        ):
            writes(setting, name, nbytes, group, count // 10 if setting.quick else count, record)
    images = setting.option("images", 500 if setting.quick else 10_000)
    if images and importlib.util.find_spec("lmdb"):
        bulk_loads(setting, images, record)
    for batch in (GROUP, 1):
        for name in setting.option("workloads", list(NAMES)):
            ycsb(setting, name, batch, record)
    for nbytes in setting.option("sizes", [128, 1024, 8192]):
        gets(setting, nbytes, record)
