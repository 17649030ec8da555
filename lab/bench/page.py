"""Write docs/figures.md from the stored results."""

from __future__ import annotations

import argparse
import fnmatch
from pathlib import Path
from typing import Any

from . import BENCHMARKS, machine, schema
from .baseline import RESULTS, machine_folders

PAGE = machine.ROOT / "docs" / "figures.md"

SHOWN = {
    "readme": (),
    "hits": ("random/4096B/subscript", "random/4096B/BaM", "sequential/4096B/subscript", "sequential/4096B/BaM"),
    "misses": ("storage/*B", "bulk/prefetch"),
    "gather": ("ram/1024B", "cache/1024B", "partial cache/1024B", "warm/1024B"),
    "spans": ("4096B/subscripts", "4096B/user fold", "4096B/map out"),
    "graphs": ("kron/storage/bfs", "kron/storage/pr", "kron/storage/sssp"),
    "taxi": ("select/4096B/0.0003", "q5/4096B/0.0003", "q5/4096B/1e-05", "q?/warm/file scan"),
    "kv-host": ("ycsb-[ac]/*", "get/128B/*", "get/8192B/*"),
    "kv-device": ("kernel/1024B/1*", "batch/1024B/*", "overlap/*"),
    "launches": (),
    "pool-transfer": (),
    "sched-latency": (),
    "sched-share": ("stp/compute*/lanes", "stp/[rs]*/lanes"),
}
"""Figures of each benchmark that the page shows; a benchmark without such figures has no section there."""

TITLES = {
    "hits": "Cached reads",
    "misses": "Cache misses",
    "gather": "Rows by index",
    "spans": "Runs of items",
    "graphs": "Graphs",
    "taxi": "Tables",
    "kv-host": "Key-value stores",
    "kv-device": "Key-value stores in kernels",
    "sched-share": "Policies on one GPU",
}
"""Headings of benchmarks; by default, the name of the benchmark."""


def number(value: float) -> str:
    """Return a number with three digits and a decimal prefix."""
    for scale, prefix in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e4, " k")):
        if abs(value) >= scale:
            return f"{value / (1e3 if scale == 1e4 else scale):.3g}{prefix}"
    if value and abs(value) < 1e-3:
        return f"{value * 1e6:.3g} u" if abs(value) >= 1e-6 else f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def is_shown(result: schema.Result, figure: dict[str, Any]) -> bool:
    """Return True if the page shows a figure: of a benchmark without an entry in `SHOWN`, it shows all figures."""
    patterns = SHOWN.get(result["benchmark"], ("*",))
    return any(fnmatch.fnmatchcase(figure["id"].partition("/")[2], pattern) for pattern in patterns)


def cell(figure: dict[str, Any]) -> str:
    """Return a figure of a machine: the median, its share of the ceiling, the goal if it was missed, other systems."""
    runs, value, bound = figure["runs"], figure["value"], figure.get("ceiling")
    is_wide = max(abs(run - value) for run in runs) > abs(value) / 4
    parts = [("~" if is_wide else "") + number(value)]
    if bound and bound["value"]:
        parts.append(f"{value / bound['value']:.2f}")
    if "goal" in figure and (value >= figure["goal"]) != (figure["better"] == "higher"):
        parts.append(f"missed goal {number(figure['goal'])}")
    parts += [f"{peer['name']} {number(peer['value'])}" for peer in figure.get("peers", [])]
    return "; ".join(parts)


def table(results: dict[str, schema.Result]) -> list[str]:
    """Return the lines of a Markdown table of a benchmark, with a column for each machine."""
    rows: dict[str, dict[str, str]] = {}
    for machine_name, result in results.items():
        for figure in result["figures"]:
            if is_shown(result, figure):
                bound = figure.get("ceiling")
                unit = figure["unit"] + (f"; of {bound['id']}" if bound and bound["value"] else "")
                key = f"{figure['id'].partition('/')[2]} ({unit})"
                rows.setdefault(key, {})[machine_name] = cell(figure)
    head = ["figure", *(provenance(name, result) for name, result in results.items())]
    body = [[key, *(cells.get(each, "") for each in results)] for key, cells in rows.items()]
    formatted = ["| " + " | ".join(line) + " |" for line in (head, *body)]
    return [formatted[0], "|" + "---|" * len(head), *formatted[1:]]


def provenance(name: str, result: schema.Result) -> str:
    """Return the machine, the commit and the conditions of a result."""
    emulated = result["machine"].get("emulated") or []
    notes = [f"{name} {result['commit']}"]
    notes += ["emulated " + ", ".join(emulated)] if emulated else []
    notes += ["full data"] if not result["options"].get("quick") else []
    return ", ".join(notes)


def machines(folders: dict[str, list[schema.Result]]) -> list[str]:
    """Return the lines of a table of the machines."""
    text = ["| machine | hardware | versions |", "|---|---|---|"]
    for name, results in folders.items():
        facts = results[0]["machine"]
        hardware = [facts.get("gpu"), f"{facts['cores']} cores of {facts['cpu']}" if facts.get("cpu") else None]
        versions = [f"{key} {facts[key]}" for key in ("python", "numpy", "numba", "numba_cuda") if facts.get(key)]
        text.append(f"| {name} | {'; '.join(filter(None, hardware))} | {', '.join(versions)} |")
    return text


def render(folder: Path = RESULTS) -> str:
    """Return the page."""
    introduction = folder / "introduction.md"
    content = [introduction.read_text(encoding="utf-8").rstrip() if introduction.exists() else "# Figures", ""]
    folders = {path.name: results for path in machine_folders(folder) if (results := schema.read(path))}
    content += ["## Machines", "", *machines(folders), ""]
    measured = {result["benchmark"] for results in folders.values() for result in results}
    for benchmark in [*(each for each in BENCHMARKS if each in measured), *sorted(measured - set(BENCHMARKS))]:
        found = {name: r for name, results in folders.items() for r in results if r["benchmark"] == benchmark}
        purpose = BENCHMARKS.get(benchmark, ("", ""))[1]
        opening = f"`{benchmark}`: {purpose}." if purpose else f"`{benchmark}`"
        rows = table(found)
        if len(rows) > 2:
            content += [f"## {TITLES.get(benchmark, benchmark)}", "", opening, "", *rows, ""]
    return "\n".join(content).rstrip() + "\n"


def main(argv: list[str]) -> int:
    """Run from the command line; with ``--check``, return 1 if the page is not up to date."""
    parser = argparse.ArgumentParser(prog="python -m lab bench page", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare the page with the results and write nothing")
    arguments = parser.parse_args(argv)
    text = render()
    if arguments.check:
        current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        print(f"{PAGE.name} is up to date" if current else f"{PAGE.name} differs: run `python -m lab bench page`")
        return int(not current)
    PAGE.write_text(text, encoding="utf-8")
    print(PAGE)
    return 0
