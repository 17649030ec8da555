"""Time and private memory of opening a store in several processes at once, compared with other stores.

Each process first opens a store with one record, which loads code. Then all processes open the same large store at the
same moment and get one record. A process reports the time of both steps, and its additional private memory while all of
them have the store open. Figures are maxima over the processes, or medians if the name says so. Stores are in the page
cache, except for "cold". "hashed" is a store whose keys are not 0 to N - 1, and "journal" a store with 100,000 later
records, which are not in its index file.
"""

from __future__ import annotations

import importlib.util
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
from lab.bench.timing import drop_files

PACKAGES = kv_reads.PACKAGES | {"RocksDB": "rocksdict"}
MODULES = kv_reads.MODULES | {"RocksDB": "rocksdict"}
LATER_RECORDS = 100_000
RECORD_BYTES = 64


def write_warpwell(folder: Path, sizes: np.ndarray, step: int = 1) -> None:
    """Write a sealed store whose keys are multiples of `step`."""
    import warpwell as ww

    with ww.kv.create(folder / "store.kv") as store:
        for first in range(0, len(sizes), 100_000):
            keys = step * np.arange(first, min(first + 100_000, len(sizes)))
            store.put_many(keys, np.zeros((len(keys), RECORD_BYTES), np.uint8))
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
    "hashed": (lambda folder, sizes: write_warpwell(folder, sizes, 2), kv_reads.open_warpwell),
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
    """Open the small and the large store; print milliseconds of wall and CPU time, and later KiB of private memory.

    Each step waits for a line of the parent.
    """
    open_store, key = SYSTEMS[name][1], np.zeros(1, np.int64)
    small = open_store(folder / "small")
    small(key)
    print("ready", flush=True)
    sys.stdin.readline()
    memory, started, cpu = private_bytes(), time.perf_counter(), time.process_time()
    opened = open_store(folder / "large")
    opened(key)
    print(1e3 * (time.perf_counter() - started), 1e3 * (time.process_time() - cpu), flush=True)
    sys.stdin.readline()
    print((private_bytes() - memory) / 1024, flush=True)


def measure(name: str, folder: Path, count: int, *, cold: bool = False) -> np.ndarray:
    """Return the milliseconds of wall and CPU time, and the KiB, of each of `count` processes."""
    command = [sys.executable, "-m", "lab.bench.kv_open", name, str(folder)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    processes = [subprocess.Popen(command, **pipes) for _ in range(count)]
    try:
        answers = [_answers(processes)]
        if cold:
            drop_files(folder / "large")
        for _ in range(2):
            for process in processes:
                process.stdin.write("\n")
            answers.append(_answers(processes))
    finally:
        for process in processes:
            process.communicate()
    return np.array([[*map(float, (*times.split(), memory))] for _, times, memory in zip(*answers, strict=True)])


def _answers(processes: list[subprocess.Popen[str]]) -> list[str]:
    """Return the next line of each process."""
    outputs = [process.stdout.readline() if process.stdout else "" for process in processes]
    if not all(outputs):
        raise SystemExit("a process failed before it had opened its store")
    return outputs


@benchmark("kv-open", figures=["open", "cold", "private", "hashed", "journal"])
def run(setting: Setting, record: Record) -> None:
    """Compare the time and memory of opening with other stores."""
    count = setting.pick((2_000, 5_000_000), (2_000, 5_000_000), "records")
    processes, rounds = setting.option("processes", 8), setting.option("rounds", 1 if setting.quick else 3)
    with tempfile.TemporaryDirectory(prefix="warpwell-bench-", dir=setting.options.get("folder")) as path:
        warm: dict[str, list[np.ndarray]] = {}
        cold: dict[str, list[np.ndarray]] = {}
        for name, (write, _) in SYSTEMS.items():
            if name in MODULES and importlib.util.find_spec(MODULES[name]) is None:
                print(f"{name} is not installed: install {PACKAGES[name]} to compare with it", file=sys.stderr)
                continue
            warm[name], cold[name] = [], []
            for part, records in (("small", 1), ("large", count)):
                folder = Path(path) / name / part
                folder.mkdir(parents=True)
                write(folder, np.full(records, RECORD_BYTES))
        for _ in range(rounds):
            for name in warm:
                warm[name].append(measure(name, Path(path) / name, processes))
                cold[name].append(measure(name, Path(path) / name, processes, cold=True))
    peers = [name for name in PACKAGES if name in warm]

    def add(figure: str, unit: str, found: dict[str, list[np.ndarray]], column: int, reduce: Any, goal: float) -> None:
        values = {name: [float(reduce(each[:, column])) for each in found[name]] for name in found}
        peer_values = [(name, metadata.version(PACKAGES[name]), float(np.median(values[name]))) for name in peers]
        record(figure, values["Warpwell"], unit, better="lower", goal=goal, peers=peer_values)
        for name in ("hashed", "journal"):
            record(f"{name}/{figure}", values[name], unit, better="lower")

    add("open", "ms", warm, 0, np.max, 10)
    add("open/median", "ms", warm, 0, np.median, 10)
    add("open/cpu", "ms", warm, 1, np.max, 10)
    add("cold", "ms", cold, 0, np.max, 10)
    add("private", "KiB", warm, 2, np.max, 1024)


if __name__ == "__main__":
    child(sys.argv[1], Path(sys.argv[2]))
