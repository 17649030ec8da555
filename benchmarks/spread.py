"""How far do the figures of a benchmark spread from run to run? Runs it several times, each in a process of its own."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measure import table


def figures(value: Any, label: str = "") -> Iterator[tuple[str, float]]:
    """Yield (label, figure) for every float of a result; strings and integers beside it make its label."""
    if isinstance(value, dict):
        plain = [str(v) for v in value.values() if isinstance(v, str | int)]
        label = " ".join([label, *plain]) if label else " ".join(plain[3:])  # not the machine's
        for key, inner in value.items():
            if isinstance(inner, float):
                yield f"{label} {key}".strip(), inner
            elif isinstance(inner, dict | list):
                yield from figures(inner, f"{label} {key}".strip())
    elif isinstance(value, list):
        if all(isinstance(v, str | int | float) for v in value):
            label = " ".join([label, *(str(v) for v in value if isinstance(v, str | int))])
            for k, v in enumerate(v for v in value if isinstance(v, float)):
                yield f"{label} [{k}]", v
        else:
            for inner in value:
                yield from figures(inner, label)


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="a benchmark of this folder that takes --json")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", default=None, metavar="FILE", help="all figures of all runs")
    options, rest = parser.parse_known_args()
    script = Path(__file__).parent / f"{options.name}.py"
    found: dict[str, list[float]] = {}
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for run in range(options.runs):
            out = Path(folder) / f"{run}.json"
            begun = time.perf_counter()
            subprocess.run([sys.executable, script, *rest, "--json", out], check=True, stdout=subprocess.DEVNULL)
            print(f"run {run + 1} of {options.runs}: {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
            results.append(json.loads(out.read_text()))
            for label, figure in figures(results[-1]):
                found.setdefault(label, []).append(figure)
    rows = [[k, min(v), statistics.median(v), max(v)] for k, v in found.items()]
    table(f"{options.name}, {options.runs} runs", ["figure", "least", "median", "most"], rows)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
