"""Reads of a store, warm and cold, compared with other stores.

Warm: single gets, and batches of 64 as lists of bytes or as a ragged field, compared with LMDB (one read transaction,
one get a key). The systems alternate, and each figure is the median of the ratios of their CPU times.

Cold: batches of random records, each in a fresh process whose files are dropped from the page cache, compared with
LMDB, Lance, ArrayRecord, `warpwell.gather` of a ``.npy`` file, and WebDataset. WebDataset has no random access: its
records are read in the order of the tar file. A temporary folder in memory (tmpfs) is refused.
"""

from __future__ import annotations

import gc
import importlib.util
import io
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from lab.bench.runner import CannotRunError, Record, Setting, benchmark
from lab.bench.timing import drop_files

PACKAGES = {"LMDB": "lmdb", "Lance": "pylance", "ArrayRecord": "array_record", "WebDataset": "webdataset"}
MODULES = PACKAGES | {"Lance": "lance"}
BATCH = 64
COLD_BATCHES = 8
"""Measured batches of a process."""
MAP_BYTES = 8 << 30
TMPFS = 0x01021994


def sizes_of(name: str, count: int) -> np.ndarray:
    """Return the sizes of records: a number of bytes, or 2 to 18 KiB ("ragged", and "field": with a schema)."""
    return np.full(count, int(name)) if name.isdigit() else np.random.default_rng(3).integers(2048, 18433, count)


def records_of(sizes: np.ndarray) -> Iterator[tuple[int, bytes]]:
    """Yield the key and the value of each record; no value can be compressed."""
    random = np.random.default_rng(5)
    for key, nbytes in enumerate(sizes.tolist()):
        yield key, random.bytes(nbytes)


# -- systems: write(folder, sizes) and open(folder) -> function that reads a batch -------------------------------


def write_warpwell(folder: Path, sizes: np.ndarray, schema: dict[str, Any] | None = None) -> None:
    """Write a store of bytes, or of one ragged field."""
    import warpwell as ww

    with ww.kv.create(folder / "store.kv", schema=schema) as store:
        part: list[bytes] = []
        for key, value in records_of(sizes):
            part.append(value)
            if len(part) == 1024 or key == len(sizes) - 1:
                store.put_many(np.arange(key + 1 - len(part), key + 1), {"x": part} if schema else part)
                part.clear()


def open_warpwell(folder: Path) -> Callable[[np.ndarray], Any]:
    """Return `get_many`."""
    import warpwell as ww

    return ww.kv.open(folder / "store.kv").get_many


def write_lmdb(folder: Path, sizes: np.ndarray) -> None:
    """Write one environment in one transaction."""
    import lmdb

    with lmdb.open(str(folder), map_size=MAP_BYTES) as environment, environment.begin(write=True) as transaction:
        transaction.cursor().putmulti(((key_of(key), value) for key, value in records_of(sizes)), append=False)


def key_of(key: int) -> bytes:
    """Return the key of a record in LMDB."""
    return key.to_bytes(8, "little")


def open_lmdb(folder: Path) -> Callable[[np.ndarray], Any]:
    """Return gets in one transaction, without readahead of the system, which only costs random reads."""
    import lmdb

    get = lmdb.open(str(folder), readonly=True, lock=False, readahead=False, map_size=MAP_BYTES).begin().get
    return lambda keys: [get(key_of(key)) for key in keys.tolist()]


def write_lance(folder: Path, sizes: np.ndarray) -> None:
    """Write a data set with one column."""
    import lance
    import pyarrow as pa

    values = pa.array((value for _, value in records_of(sizes)), pa.large_binary())
    lance.write_dataset(pa.table({"x": values}), str(folder / "data.lance"))


def open_lance(folder: Path) -> Callable[[np.ndarray], Any]:
    """Return `take`, as an Arrow table."""
    import lance

    return lance.dataset(str(folder / "data.lance")).take


def write_array_record(folder: Path, sizes: np.ndarray) -> None:
    """Write a file for random access: groups of one record, not compressed."""
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(folder / "data.array_record"), "group_size:1,uncompressed")
    for _, value in records_of(sizes):
        writer.write(value)
    writer.close()


def open_array_record(folder: Path) -> Callable[[np.ndarray], Any]:
    """Return reads without readahead, as its documentation advises for random access."""
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(str(folder / "data.array_record"), "readahead_buffer_size:0")
    return lambda keys: reader.read(keys.tolist())


def write_webdataset(folder: Path, sizes: np.ndarray) -> None:
    """Write a tar file."""
    with tarfile.open(folder / "data.tar", "w") as archive:
        for key, value in records_of(sizes):
            member = tarfile.TarInfo(f"{key:08}.bin")
            member.size = len(value)
            archive.addfile(member, io.BytesIO(value))


def open_webdataset(folder: Path) -> Callable[[np.ndarray], Any]:
    """Return the next records."""
    import webdataset

    records = iter(webdataset.WebDataset(str(folder / "data.tar"), shardshuffle=False, empty_check=False))
    return lambda keys: [next(records)["bin"] for _ in range(len(keys))]


def write_npy(folder: Path, sizes: np.ndarray) -> None:
    """Write the records as rows."""
    rows = np.lib.format.open_memmap(folder / "data.npy", "w+", np.uint8, (len(sizes), int(sizes[0])))
    for key, value in records_of(sizes):
        rows[key] = np.frombuffer(value, np.uint8)
    rows.flush()


def open_npy(folder: Path) -> Callable[[np.ndarray], Any]:
    """Return `warpwell.gather`."""
    import warpwell as ww

    array = ww.open(folder / "data.npy")
    return lambda keys: ww.gather(array, keys).result()


SYSTEMS: dict[str, tuple[Callable[[Path, np.ndarray], None], Callable[[Path], Callable[[np.ndarray], Any]]]] = {
    "Warpwell": (write_warpwell, open_warpwell),
    "gather": (write_npy, open_npy),
    "LMDB": (write_lmdb, open_lmdb),
    "Lance": (write_lance, open_lance),
    "ArrayRecord": (write_array_record, open_array_record),
    "WebDataset": (write_webdataset, open_webdataset),
}


# -- warm ---------------------------------------------------------------------------------------------------------


def warm(setting: Setting, size: str, folder: Path, record: Record) -> None:
    """Compare single gets, and batches, with LMDB."""
    import lmdb

    import warpwell as ww

    mean = int(size) if size.isdigit() else 10240
    sizes = sizes_of(size, min(setting.pick((2_000, 100_000), (2_000, 100_000), "records"), (160 << 20) // mean))
    write_warpwell(folder, sizes, {"x": "bytes"} if size == "field" else None)
    write_lmdb(folder, sizes)
    keys = np.random.default_rng(7).integers(0, len(sizes), setting.pick((1024, 12800), (1024, 12800)))
    batches = [keys[k : k + BATCH].copy() for k in range(0, len(keys), BATCH)]
    listed, raw = keys.tolist(), [key_of(key) for key in keys.tolist()]
    raw_batches = [raw[k : k + BATCH] for k in range(0, len(keys), BATCH)]
    with ww.kv.open(folder / "store.kv") as store, lmdb.open(str(folder), readonly=True, lock=False) as environment:
        get, get_many, peer = store.get, store.get_many, environment.begin().get
        values = get_many(np.arange(len(sizes)))[0]  # load and map all records
        if list(values["x"] if size == "field" else values) != [peer(key_of(key)) for key in range(len(sizes))]:
            raise SystemExit("the systems return different values")
        del values
        pairs = {
            "get": (lambda: [None for k in listed if get(k) is None], lambda: [None for k in raw if peer(k) is None]),
            f"batch{BATCH}": (
                lambda: [None for batch in batches if get_many(batch) is None],
                lambda: [None for batch in raw_batches if not [peer(key) for key in batch]],
            ),
        }
        for name, pair in pairs.items():
            times = alternate(pair, setting.option("rounds", 9))
            ratios = [b / a for a, b in times]
            record(f"warm/{size}/{name}", ratios, "LMDB's time / time", goal=1.2)
            per_record = [statistics.median(column) / len(keys) * 1e6 for column in zip(*times, strict=True)]
            peers = [("LMDB", metadata.version("lmdb"), per_record[1])]
            record(f"warm/{size}/{name}/time", per_record[0], "us", better="lower", peers=peers)


def alternate(functions: tuple[Callable[[], Any], ...], rounds: int) -> list[list[float]]:
    """Return the CPU seconds of the functions in each round; the order alternates. The first round warms up."""
    found = []
    gc.collect()
    gc.disable()
    for k in range(rounds + 1):
        times = [0.0] * len(functions)
        for n in range(len(functions)) if k % 2 else reversed(range(len(functions))):
            started = time.process_time()
            functions[n]()
            times[n] = time.process_time() - started
        found.append(times)
    gc.enable()
    return found[1:]


# -- cold ---------------------------------------------------------------------------------------------------------


def cold(setting: Setting, folder: Path, record: Record) -> None:
    """Compare cold batches with all other systems that are installed."""
    if on_tmpfs(folder):
        raise CannotRunError(f"{folder} is in memory; pass -o folder=PATH on a drive")
    nbytes = setting.option("cold_bytes", 8192)
    sizes = sizes_of(str(nbytes), setting.pick((4_000, 50_000), (4_000, 50_000), "cold_records"))
    systems = [name for name in SYSTEMS if name not in MODULES or importlib.util.find_spec(MODULES[name])]
    for name in systems:
        (folder / name).mkdir()
        SYSTEMS[name][0](folder / name, sizes)
    os.sync()
    for batch in setting.option("batches", [64, 256]):
        times: dict[str, list[float]] = {name: [] for name in systems}
        for k in range(setting.option("cold_rounds", 7)):
            for n in range(len(systems)):
                name = systems[(n + k) % len(systems)]
                command = [sys.executable, "-m", "lab.bench.kv_reads", name, str(folder / name), str(len(sizes))]
                done = subprocess.run([*command, str(batch), str(k)], check=True, stdout=subprocess.PIPE, text=True)
                times[name].append(float(done.stdout))
        for name in systems[1:]:
            ratios = [b / a for a, b in zip(times["Warpwell"], times[name], strict=True)]
            record(f"cold/batch{batch}/{name}", ratios, f"{name}'s time / time", goal=0.8 if name == "gather" else 1)
        peers = [
            (name, metadata.version(PACKAGES.get(name, "warpwell")), statistics.median(times[name]))
            for name in systems[1:]
        ]
        record(f"cold/batch{batch}/time", times["Warpwell"], "us", better="lower", peers=peers)


def on_tmpfs(folder: Path) -> bool:
    """Return True if a folder is in memory."""
    kind = subprocess.run(["stat", "-f", "-c", "%t", str(folder)], check=True, stdout=subprocess.PIPE, text=True)
    return int(kind.stdout, 16) == TMPFS


def child(name: str, folder: Path, records: int, batch: int, seed: int) -> float:
    """Return the median time of cold batches in this process, in us a record; the first batch loads code.

    No record is read twice, because mapped pages stay in the page cache.
    """
    chosen = np.random.default_rng(seed).permutation(records)[: (COLD_BATCHES + 1) * batch].reshape(-1, batch)
    drop_files(folder)
    read = SYSTEMS[name][1](folder)
    times = []
    for keys in chosen:
        drop_files(folder)
        started = time.perf_counter()
        read(keys)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:]) / batch * 1e6


@benchmark("kv-reads", needs=["lmdb"], figures=["warm", "cold"])
def run(setting: Setting, record: Record) -> None:
    """Compare warm and cold reads with other stores."""
    with tempfile.TemporaryDirectory(prefix="warpwell-bench-", dir=setting.options.get("folder")) as path:
        for size in setting.option("sizes", ["128", "1024", "8192", "ragged", "field"]):
            folder = Path(path) / size
            folder.mkdir()
            warm(setting, size, folder, record)
        cold(setting, Path(path), record)


if __name__ == "__main__":
    print(child(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:])))
