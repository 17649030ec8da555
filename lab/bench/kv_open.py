"""Time and private memory of opening a store, compared with other stores: in a fresh process, and again in it.

Eight processes open the same files at once, and each reports the time of its first open (with a read, which loads
code), the median time of later opens, and the private memory of a later open. Stores are in the page cache. "journal"
is a sealed Warpwell store with 100,000 later records, which are not in its index file.
"""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from lab.bench import kv_reads
from lab.bench.runner import Record, Setting, benchmark

PACKAGES = kv_reads.PACKAGES | {"RocksDB": "rocksdict"}
MODULES = kv_reads.MODULES | {"RocksDB": "rocksdict"}
PROCESSES = 8
OPENS = 7
LATER_RECORDS = 100_000
RECORD_BYTES = 64


def write_warpwell(folder: Path, sizes: np.ndarray) -> None:
    """Write a sealed store."""
    import warpwell as ww

    kv_reads.write_warpwell(folder, sizes)
    ww.kv.seal(folder / "store.kv")


def write_journal(folder: Path, sizes: np.ndarray) -> None:
    """Write a sealed store, and then more records."""
    import warpwell as ww

    write_warpwell(folder, sizes)
    count = min(LATER_RECORDS, len(sizes))
    with ww.kv.open(folder / "store.kv", "r+") as store:
        keys = np.random.default_rng(5).permutation(len(sizes))[:count] + len(sizes) // 2
        store.put_many(keys, np.zeros((count, RECORD_BYTES), np.uint8))


def write_rocksdb(folder: Path, sizes: np.ndarray) -> None:
    """Write a database, and compact it."""
    import rocksdict

    database = rocksdict.Rdict(str(folder), rocksdict.Options(raw_mode=True))
    for key, value in kv_reads.records_of(sizes):
        database[kv_reads.key_of(key)] = value
    database.compact_range(None, None)
    database.close()


def open_rocksdb(folder: Path) -> Callable[[np.ndarray], Any]:
    """Return gets of a database that is open for reading."""
    import rocksdict

    access = rocksdict.AccessType.read_only()
    database = rocksdict.Rdict(str(folder), rocksdict.Options(raw_mode=True), access_type=access)
    return lambda keys: [database[kv_reads.key_of(key)] for key in keys.tolist()]


SYSTEMS = {
    "Warpwell": (write_warpwell, kv_reads.open_warpwell),
    "journal": (write_journal, kv_reads.open_warpwell),
    "LMDB": kv_reads.SYSTEMS["LMDB"],
    "RocksDB": (write_rocksdb, open_rocksdb),
    "Lance": kv_reads.SYSTEMS["Lance"],
    "ArrayRecord": kv_reads.SYSTEMS["ArrayRecord"],
}


def private_bytes() -> int:
    """Return the private memory of this process."""
    entries = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()]
    return sum(int(entry[1]) << 10 for entry in entries if entry[0] in ("Private_Clean:", "Private_Dirty:"))


def child(name: str, folder: Path) -> None:
    """Print the milliseconds of the first open and of the median open, and the KiB of one; wait for the parent."""
    times, memory, opened = [], [], []
    for _ in range(1 if name == "LMDB" else OPENS + 1):  # LMDB opens a file once a process
        before, started = private_bytes(), time.perf_counter()
        opened.append(SYSTEMS[name][1](folder))
        if len(opened) == 1:
            opened[0](np.arange(1))
        times.append(1e3 * (time.perf_counter() - started))
        memory.append((private_bytes() - before) / 1024)
    print(times[0], statistics.median(times[1:] or times), statistics.median(memory[1:] or memory), flush=True)
    sys.stdin.read()


def measure(name: str, folder: Path) -> np.ndarray:
    """Return the medians of the figures of processes that open a store at once."""
    command = [sys.executable, "-m", "lab.bench.kv_open", name, str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(PROCESSES)]
    printed = [process.stdout.readline() for process in processes]
    for process in processes:
        process.communicate()
    return np.median([[float(number) for number in line.split()] for line in printed], axis=0)


@benchmark("kv-open", figures=["first", "again", "private", "journal"])
def run(setting: Setting, record: Record) -> None:
    """Compare the time and memory of opening with other stores."""
    count = setting.pick((2_000, 5_000_000), (20_000, 5_000_000), "records")
    with tempfile.TemporaryDirectory(prefix="warpwell-bench-", dir=setting.options.get("folder")) as path:
        found: dict[str, np.ndarray] = {}
        for name, (write, _) in SYSTEMS.items():
            if name in MODULES and importlib.util.find_spec(MODULES[name]) is None:
                print(f"{name} is not installed: install {PACKAGES[name]} to compare with it", file=sys.stderr)
                continue
            folder = Path(path) / name
            folder.mkdir()
            write(folder, np.full(count, RECORD_BYTES))
            found[name] = measure(name, folder)
    for column, (figure, unit) in enumerate((("first", "ms"), ("again", "ms"), ("private", "KiB"))):
        peers = [
            (name, metadata.version(PACKAGES[name]), float(found[name][column])) for name in PACKAGES if name in found
        ]
        record(figure, float(found["Warpwell"][column]), unit, better="lower", peers=peers)
    record("journal", float(found["journal"][1]), "ms", better="lower")


if __name__ == "__main__":
    child(sys.argv[1], Path(sys.argv[2]))
