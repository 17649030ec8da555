"""Record the figures that later runs are compared with.

``python -m lab bench baseline --machine NAME`` measures all benchmarks of the plan for the device and writes
``lab/results/NAME/BENCHMARK.json``. On a machine without the repository's history, ``--json FILE`` writes one file,
which ``--import FILE --machine NAME`` splits.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from . import machine, runner, schema

RESULTS = machine.ROOT / "lab" / "results"

PLAN = {
    "cpu": {
        "readme": 3,
        "hits": 3,
        "misses": 3,
        "gather": 3,
        "spans": 3,
        "graphs": 3,
        "taxi": 3,
        "kv-host": 2,
        "kv-device": 3,
        "launches": 3,
        "pool-transfer": 1,
        "sched-latency": 3,
    },
    "cuda": {
        "readme": 1,
        "hits": 1,
        "misses": 1,
        "gather": 1,
        "spans": 1,
        "graphs": 1,
        "taxi": 1,
        "kv-device": 1,
        "launches": 1,
        "sched-latency": 1,
        "sched-share": 1,
    },
}
"""Processes per benchmark. Within a process each figure is measured several times."""


def machine_folders(folder: Path = RESULTS) -> list[Path]:
    """Return the folders of machines. The results in `simulator` are in virtual time and in another format."""
    return sorted(path for path in folder.iterdir() if path.is_dir() and path.name != "simulator")


def store(results: list[schema.Result], name: str, folder: Path = RESULTS) -> list[str]:
    """Write each result to the folder of a machine; return the benchmarks whose results were refused as busy."""
    refused = []
    for result in results:
        if result["busy"]:
            refused.append(result["benchmark"])
        else:
            schema.write(folder / name / f"{result['benchmark']}.json", result)
    return refused


def measure(setting: runner.Setting, names: list[str], seconds: float, out: Path | None) -> list[schema.Result]:
    """Measure benchmarks until `seconds` have passed; `out` is rewritten after each benchmark."""
    results: list[schema.Result] = []
    loaded, start = machine.is_loaded(), time.perf_counter()
    for name in names:
        elapsed = time.perf_counter() - start
        if elapsed > seconds:
            print(f"{name} skipped: {seconds:g} s have passed", flush=True)
            continue
        try:
            result = runner.measure(name, setting, PLAN[setting.device].get(name, 1), loaded=loaded)
        except runner.CannotRunError as error:
            print(f"{name} skipped: {error}", flush=True)
            continue
        results.append(result)
        print(f"{name}: {len(result['figures'])} figures, {result['seconds']} s", flush=True)
        if out:
            schema.write(out, results)
    return results


def main(argv: list[str]) -> int:
    """Run from the command line; return 1 if a result was refused or nothing was measured."""
    parser = argparse.ArgumentParser(prog="python -m lab bench baseline", description=__doc__.split("\n\n")[0])
    parser.add_argument("--machine", metavar="NAME", help="folder below lab/results, such as two-cores or h100")
    parser.add_argument("--only", nargs="+", default=None, metavar="BENCHMARK", help="measure these benchmarks")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write all results to one file as well")
    parser.add_argument("--import", dest="source", type=Path, default=None, metavar="FILE", help="store these results")
    parser.add_argument("--seconds", type=float, default=420, help="start no benchmark after this time (default 420)")
    parser.add_argument("--full", action="store_true", help="use the full amount of data")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None)
    arguments = parser.parse_args(argv)
    if not arguments.machine and not arguments.json:
        parser.error("expected --machine NAME, --json FILE, or both")
    if arguments.source:
        try:
            results = schema.read(arguments.source)
        except (schema.SchemaError, OSError) as error:
            print(error, file=sys.stderr)
            return 2
    else:
        device = arguments.device or runner.default_device()
        os.environ.setdefault("WARPWELL_LOG_LEVEL", "ERROR")
        setting = runner.Setting(device, quick=not arguments.full)
        results = measure(setting, arguments.only or list(PLAN[device]), arguments.seconds, arguments.json)
    refused = store(results, arguments.machine) if arguments.machine else []
    if refused:
        print(f"not stored, because other programs used the machine: {', '.join(refused)}", file=sys.stderr)
    return int(bool(refused) or not results)
