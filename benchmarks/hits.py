"""All figures of reads that the cache answers, in one table: subscripts, spans, pins, and BaM's own headers.

Runs `hit_path.py` and `spans.py`, each several times in a process of its own, and BaM's page cache as its authors wrote
it (``--bam`` names a folder with the programs ``bam_hit`` and ``bam_hit_nostats``, which are not part of this
repository), and prints medians, and each as a share of raw reads of the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import machine, save, table
from spread import figures

import warpwell as ww

HERE = Path(__file__).parent


def repeated(script: str, runs: int, limit: float, *options: str) -> list[dict[str, Any]]:
    """Return what several runs of a benchmark wrote, and print the last one's tables; a run has `limit` seconds."""
    found = []
    for run in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            try:
                done = subprocess.run(
                    [sys.executable, str(HERE / script), *options, "--json", str(out)],
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=limit,
                )
            except subprocess.TimeoutExpired as late:
                print(f"{script} did not end within {limit:g} s; it said:\n{_text(late.stdout)}", flush=True)
                return found
            if done.returncode:
                print(f"{script} failed: {done.stderr.strip()[-1000:]}", flush=True)
                return found
            if run == runs - 1:
                print(done.stdout, flush=True)
            found.append(json.loads(out.read_text()))
    return found


def _text(said: bytes | str | None) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else said or ""


def bam(program: Path, *options: str) -> list[dict[str, Any]]:
    """Return BaM's figures, the best of its launch shapes for each pattern and method, beside its own raw reads."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.jsonl"
        done = subprocess.run(
            [str(program), "--no-sweep", *options, "--json", str(out)], capture_output=True, text=True, check=False
        )
        rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    if done.returncode or not rows:
        print(f"{program.name} failed: {(done.stderr or done.stdout).strip()[-1000:]}", flush=True)
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = (row["page"], row["pattern"], row["method"])
        if row["sum_ok"] and row["greads_median"] > best.get(key, {"greads_median": 0})["greads_median"]:
            best[key] = row
    raw = {key[:2]: row["greads_median"] for key, row in best.items() if key[2] == "raw_relaxed"}
    return [row | {"of_raw": row["greads_median"] / raw[key[:2]]} for key, row in best.items() if key[:2] in raw]


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=ww.default_device())
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--frames", default=None, help="bytes of frames (8GiB on cuda, 64MiB on cpu)")
    parser.add_argument("--limit", type=float, default=600, metavar="SECONDS", help="of each run of a script")
    parser.add_argument("--bam", type=Path, default=None, metavar="FOLDER")
    parser.add_argument("--quick", action="store_true", help="one run, few rounds, 256 MiB of frames")
    parser.add_argument("--json", default=None, metavar="FILE")
    options = parser.parse_args()
    given = ["--device", options.device]
    if options.quick:
        options.runs, options.frames = 1, options.frames or ("256MiB" if options.device == "cuda" else "4MiB")
    if options.frames:
        given += ["--frames", options.frames]
    rounds = ["--rounds", "64" if options.device == "cuda" else "2000"] if options.quick else []
    results: dict[str, Any] = machine(options.device) | {"runs": options.runs}
    results["hit_path"] = repeated("hit_path.py", options.runs, options.limit, *given, "--no-stores", *rounds)
    save(options.json, results)
    for program in ("bam_hit", "bam_hit_nostats") if options.bam is not None else ():
        size = "64M" if options.quick else "8G"
        methods = "raw_relaxed,bam_array,bam_ptr_clean,bam_get_raw"
        rows = bam(options.bam / program, "--cache", size, "--reps", "3", "--methods", methods)
        results[program] = rows
        table(
            f"BaM's own page cache, {'as shipped' if program == 'bam_hit' else 'counters off'}",
            ["page B", "pattern", "method", "G/s", "of raw"],
            [[r["page"], r["pattern"], r["method"], r["greads_median"], r["of_raw"]] for r in rows],
        )
        save(options.json, results)
    if (HERE / "spans.py").exists():
        results["spans"] = repeated("spans.py", options.runs, options.limit, *given)
        save(options.json, results)
    for part in ("hit_path", "spans") if options.runs > 1 else ():
        labels: dict[str, list[float]] = {}
        for one in results.get(part, []):
            for label, figure in figures(one):
                labels.setdefault(label, []).append(figure)
        rows = [[k, min(v), statistics.median(v), max(v)] for k, v in labels.items()]
        table(f"{part}, {options.runs} runs", ["figure", "least", "median", "most"], rows)


if __name__ == "__main__":
    main()
