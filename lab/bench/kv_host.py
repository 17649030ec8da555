"""Key-value operations per second on the host, beside LMDB and RocksDB: YCSB A, B, C, D, F and batched gets.

Every system gets the same records, requests and durability (after each group of 256 operations all of it is on the
medium), in the same run. Rounds of the systems are interleaved, caches are warm, and the best round counts. Ratios
are to the better of the other two. Absolute rates are those of the machine that it runs on.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from lab.bench import timing
from lab.kv import systems as kv_systems
from warpwell.study.ycsb import NAMES, Requests, YcsbWorkload, record_keys
from warpwell.study.ycsb_run import GROUP, load_records, run

SIZES = (128, 1024, 8192)
CACHE_BYTES = 2 << 30


@contextlib.contextmanager
def systems(arguments: argparse.Namespace, row_bytes: int = 0) -> Iterator[list]:
    """Give one of each system, in fresh folders."""
    with tempfile.TemporaryDirectory(prefix="warpwell-bench-", dir=arguments.folder) as folder:
        opened = []
        try:
            for kind in kv_systems.SYSTEMS:
                opened.append(kind(Path(folder), arguments.durability == "commit", CACHE_BYTES, row_bytes))
            yield opened
        finally:
            for system in opened:
                system.close()


def rounds(opened: list, count: int, function: Callable[[object], float]) -> list[float]:
    """Return the best rate of each system; every round runs all of them, each time in another order."""
    best = [0.0] * len(opened)
    gc.freeze()  # what was imported, compiled code above all, is looked at once
    for k in range(count + 1):
        for n in range(len(opened)):
            turn = (n + k) % len(opened)
            gc.collect()
            rate = function(opened[turn])
            if k:  # the first round warms up
                best[turn] = max(best[turn], rate)
    return best


def ycsb(arguments: argparse.Namespace, name: str, batch: int) -> dict:
    """Run one YCSB workload."""
    workload = YcsbWorkload.named(name, arguments.properties).sized(arguments.records, arguments.operations)
    requests = {}
    latencies = {}
    with systems(arguments) as opened:
        for system in opened:
            load_records(system, workload)
            system.settle()
            requests[system.name] = Requests(workload, seed=1)

        def once(system) -> float:
            result = run(system, workload, batch=batch, requests=requests[system.name])
            latencies[system.name] = {k: vars(v) for k, v in result.latencies.items()}
            return result.operations_per_second

        rates = rounds(opened, arguments.rounds, once)
    how = "one by one" if batch == 1 else f"batches of {batch}"
    read_only = workload.update + workload.insert + workload.read_modify_write == 0
    return result_row(f"{name.upper()}, {how}", read_only, rates) | {"latencies": latencies}


def gets(arguments: argparse.Namespace, nbytes: int, as_array: bool) -> dict:
    """Fetch random batches."""
    records = min(arguments.records, (256 << 20) // nbytes)
    workload = YcsbWorkload("gets", records, value_bytes=nbytes)
    random = np.random.default_rng(7)
    count = max(8, arguments.operations // GROUP)
    chosen = [record_keys(random.integers(0, records, GROUP)) for _ in range(count)]
    with systems(arguments, nbytes if as_array else 0) as opened:
        batches = {}
        answers = []
        for system in opened:
            load_records(system, workload)
            system.settle()
            system.begin(False)
            batches[system.name] = [system.batch_of(keys) for keys in chosen]
            get = system.get_array if as_array else system.get_many
            answers.append([bytes(value) for value in get(batches[system.name][0])])
        if any(answer != answers[0] for answer in answers):
            raise SystemExit("the systems disagree about the values")

        def once(system) -> float:
            get = system.get_array if as_array else system.get_many
            begun = time.perf_counter()
            for batch in batches[system.name]:
                get(batch)
            return count * GROUP / (time.perf_counter() - begun)

        rates = rounds(opened, arguments.rounds, once)
    size = f"{nbytes} B" if nbytes < 1024 else f"{nbytes >> 10} KiB"
    return result_row(f"gets of {size}, 256 a batch, to {'one array' if as_array else 'bytes'}", True, rates)


def result_row(name: str, read_only: bool, rates: list[float]) -> dict:
    """Return what is known of one row."""
    others = max(rates[1:])
    return {
        "row": name,
        "read_only": read_only,
        "ratio": rates[0] / others,
        **{kind.name: rate for kind, rate in zip(kv_systems.SYSTEMS, rates, strict=True)},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--operations", type=int, default=100_000, help="in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--durability", choices=("commit", "none"), default="commit")
    parser.add_argument("--properties", help="YCSB's property files: a folder or tar archive (default: built in)")
    parser.add_argument("--only", help="rows whose name contains this")
    parser.add_argument("--folder", help="where the stores are made (default: the temporary folder)")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    jobs: dict[str, Callable[[], dict]] = {}
    for batch in (GROUP, 1):
        for name in NAMES:
            jobs[f"{name}-{batch}"] = functools.partial(ycsb, arguments, name, batch)
    for as_array in (False, True):
        for nbytes in SIZES:
            jobs[f"gets-{nbytes}-{'array' if as_array else 'bytes'}"] = functools.partial(
                gets, arguments, nbytes, as_array
            )
    results = []
    for name, job in jobs.items():
        if arguments.only is None or arguments.only in name:
            print(f"{name} ...", end="\r", file=sys.stderr, flush=True)
            results.append(job())
    names = [kind.name for kind in kv_systems.SYSTEMS]
    rows = [
        [r["row"], *(f"{r[n] / 1000:,.0f}" for n in names), f"{r['ratio']:.2f}", "yes" if r["read_only"] else ""]
        for r in results
    ]
    where = f"{len(os.sched_getaffinity(0))} cores, durability {arguments.durability}"
    timing.table(
        f"thousand operations per second ({where})",
        ["workload", *names, "ratio to the better other", "read-only"],
        rows,
    )
    losing = [r["row"] for r in results if r["read_only"] and r["ratio"] <= 1]
    print(f"\nread-only rows where another is faster: {', '.join(losing) or 'none'}")
    timing.save(arguments.json, {"machine": timing.machine("cpu"), "arguments": vars(arguments), "rows": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
