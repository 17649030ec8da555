"""How many instructions does each workload's kernel execute, how long does it take, and what bounds it?

Run once under Nsight Compute, which reads the counters, then make one JSON of what it wrote::

    ncu --profile-from-start off --clock-control none --csv --page raw --print-units base --log-file counts.csv \
        --metrics $(python benchmarks/sched_counts.py metrics) \
        python benchmarks/sched_counts.py run --plan plan.json
    python benchmarks/sched_counts.py parse counts.csv plan.json --out counts.json

`benchmarks/sched_predict.py` and ``warpwell sched fit`` read that JSON. Results of the first sizes are compared with
NumPy's on the way.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measure import machine, table

from warpwell.scheduler.predict.identity import footprint
from warpwell.study.workloads import WORKLOADS, Application, Step, make

METRICS = {
    "smsp__inst_executed.sum": "instructions",
    "gpu__time_duration.sum": "nanoseconds",
    "gpc__cycles_elapsed.max": "cycles",
    "dram__bytes_read.sum": "dram_read",
    "dram__bytes_write.sum": "dram_written",
    "lts__t_sector_hit_rate.pct": "hit_percent",
    "launch__registers_per_thread": "registers",
}
CHECKED = 4
"""Sizes, from the smallest, whose results are compared with NumPy's."""
UNITS = {
    "second": 1e9,
    "msecond": 1e6,
    "usecond": 1e3,
    "nsecond": 1,
    "s": 1e9,
    "ms": 1e6,
    "us": 1e3,
    "ns": 1,
    "Gbyte": 1e9,
    "Mbyte": 1e6,
    "Kbyte": 1e3,
}


def chosen(app: Application) -> list[int]:
    """Return the steps that are counted: the first of each kernel, and of a search the one of most vertices."""
    best: dict[str, int] = {}
    for k, step in enumerate(app):
        if step.name not in best or step.size.get("frontier", 0) > app[best[step.name]].size.get("frontier", 0):
            best[step.name] = k
    return sorted(best.values())


def described(app: Application, step: Step) -> dict[str, Any]:
    """Return what is known of a launch before it runs."""
    return {
        "app": app.workload.name,
        "kernel": step.name,
        "n": app.size,
        "size": step.size,
        "shape": list(step.launch.shape),
        "blocks": step.blocks(),
        "warps": step.warps(),
        "memory": app.memory,
        "bytes": footprint(step.arguments),
        "kind": app.workload.kinds[step.name].value,
    }


def rounds(apps: list[str], count: int) -> Iterator[tuple[str, int, int]]:
    """Yield (application, size, how small it is), such that a run that is cut short has all applications.

    The order of sizes takes the ends first, then what lies between.
    """
    order = sorted(range(count), key=lambda k: (k not in (0, count - 1), k % 4 != 0, k % 2 != 0, k))
    for k in order:
        for name in apps:
            sizes = WORKLOADS[name].sizes
            yield name, sizes[k * (len(sizes) - 1) // max(1, count - 1)], k


def run(arguments: argparse.Namespace) -> int:
    """Launch everything once, with the profiler on around what is counted."""
    device, begun = arguments.device, time.perf_counter()
    if device == "cuda":
        from numba import cuda
    where = machine(device)
    rows: list[dict[str, Any]] = []
    compiled: set[str] = set()
    worst, left = 0.0, 0
    for name, size, k in rounds(arguments.apps or list(WORKLOADS), arguments.count):
        if time.perf_counter() - begun > arguments.seconds:
            left += 1
            continue
        if name not in compiled:  # what the first launches do besides running is not counted
            compiled.add(name)
            first = make(name, WORKLOADS[name].small, device)
            first.run()
            worst = max(worst, first.check())
        app = make(name, size, device)
        counted = chosen(app)
        for index, step in enumerate(app):
            if index in counted:
                rows.append(described(app, step))
                if device == "cuda":
                    cuda.profile_start()
            step.launch(*step.arguments, device=device)
            if index in counted and device == "cuda":
                cuda.profile_stop()
        if k < CHECKED:
            worst = max(worst, app.check())
        # rewritten after each, so that a run that is killed leaves what it has done
        plan = {"machine": where, "rows": rows, "left_out": left, "worst_error": worst}
        Path(arguments.plan).write_text(json.dumps(plan), encoding="utf-8")
    print(
        f"{len(rows)} launches of {len(compiled)} applications in {time.perf_counter() - begun:.1f} s; {left} sizes "
        f"left out for time; results at most {worst:.2g} from NumPy's",
        flush=True,
    )
    return 0


def records(path: str) -> list[dict[str, Any]]:
    """Return the profiled launches of a CSV of ncu: of its raw page (a row a launch), or the details page."""
    lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.startswith('"')]
    if not lines:
        raise SystemExit(f"{path}: no line of CSV. Did ncu run, with --csv? It says: {Path(path).read_text()[:500]}")
    found: dict[str, dict[str, Any]] = {}
    units: dict[str, str] = {}
    for row in csv.DictReader(lines):
        if not row["ID"]:  # the raw page's second line has the units
            units = row
            continue
        record = found.setdefault(row["ID"], {"name": row["Kernel Name"]})
        if "Metric Name" in row:
            pairs = [(row["Metric Name"], row["Metric Value"], row["Metric Unit"])]
        else:
            pairs = [(metric, row[metric], units.get(metric, "")) for metric in METRICS if metric in row]
        for metric, value, unit in pairs:
            if metric in METRICS and value not in ("", "n/a"):
                record[METRICS[metric]] = float(value.replace(",", "")) * UNITS.get(unit, 1)
    return list(found.values())


def parse(arguments: argparse.Namespace) -> int:
    """Join ncu's CSV with the plan, in order."""
    plan = json.loads(Path(arguments.plan).read_text(encoding="utf-8"))
    counted = [r for r in records(arguments.csv) if "warpwell_" in r["name"]]
    rows = plan["rows"][: len(counted)]
    if len(counted) != len(plan["rows"]):
        print(f"warning: {len(counted)} launches counted, {len(plan['rows'])} planned: the rest is left out")
    joined = []
    for row, record in zip(rows, counted, strict=False):
        if f"warpwell_{row['kernel']}" not in record["name"]:
            raise SystemExit(f"launch {len(joined)}: {record['name'][:80]!r} in the CSV, {row['kernel']!r} in the plan")
        values = {k: v for k, v in record.items() if k != "name"}
        seconds = values.pop("nanoseconds") / 1e9
        traffic = values.pop("dram_read", 0.0) + values.pop("dram_written", 0.0)
        miss = 1 - values.pop("hit_percent") / 100 if "hit_percent" in values else None
        joined.append({**row, **values, "seconds": seconds, "dram_bytes": traffic, "miss_rate": miss})
    result = {"machine": plan["machine"], "worst_error": plan["worst_error"], "rows": joined}
    Path(arguments.out).write_text(json.dumps(result, indent=0), encoding="utf-8")
    largest = {r["kernel"]: r for r in sorted(joined, key=lambda r: r["n"])}
    table(
        f"{len(joined)} launches, the largest of each kernel",
        ("kernel", "size", "instructions", "us", "GB/s", "miss"),
        [
            (
                k,
                str(r["size"]),
                r["instructions"],
                r["seconds"] * 1e6,
                r["dram_bytes"] / r["seconds"] / 1e9,
                r["miss_rate"] if r["miss_rate"] is not None else "-",
            )
            for k, r in largest.items()
        ],
    )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    modes = parser.add_subparsers(required=True)
    runs = modes.add_parser("run", help="launch everything (under ncu)")
    runs.add_argument("--plan", required=True, metavar="FILE", help="where the list of launches goes")
    runs.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    runs.add_argument("--count", type=int, default=12, help="sizes of each application")
    runs.add_argument("--seconds", type=float, default=75, help="leave the rest out after this time")
    runs.add_argument("--apps", nargs="*", choices=list(WORKLOADS), help="only these")
    runs.set_defaults(function=run)
    parses = modes.add_parser("parse", help="make one JSON of ncu's CSV and the plan")
    parses.add_argument("csv")
    parses.add_argument("plan")
    parses.add_argument("--out", required=True, metavar="FILE")
    parses.set_defaults(function=parse)
    metrics = modes.add_parser("metrics", help="print what ncu must count")
    metrics.set_defaults(function=lambda _: print(",".join(METRICS)) or 0)
    arguments = parser.parse_args()
    return int(arguments.function(arguments))


if __name__ == "__main__":
    sys.exit(main())
