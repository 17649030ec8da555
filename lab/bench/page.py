"""Write docs/figures.md from the stored results."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import BENCHMARKS, machine, schema
from .baseline import RESULTS, machine_folders

PAGE = machine.ROOT / "docs" / "figures.md"


def number(value: float) -> str:
    """Return a number with three digits and a decimal prefix."""
    for scale, prefix in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e4, " k")):
        if abs(value) >= scale:
            return f"{value / (1e3 if scale == 1e4 else scale):.3g}{prefix}"
    if value and abs(value) < 1e-3:
        return f"{value * 1e6:.3g} u" if abs(value) >= 1e-6 else f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(result: schema.Result) -> list[str]:
    """Return the lines of a Markdown table of a result; columns without an entry are left out."""
    head = ["figure", "median", "low to high", "unit", "goal", "share of ceiling", "other systems"]
    rows = []
    for figure in result["figures"]:
        runs, bound = figure["runs"], figure.get("ceiling")
        goal = ""
        if "goal" in figure:
            reached = (figure["value"] >= figure["goal"]) == (figure["better"] == "higher")
            goal = number(figure["goal"]) + ("" if reached else " (missed)")
        rows.append(
            [
                figure["id"].partition("/")[2],
                number(figure["value"]),
                f"{number(min(runs))} to {number(max(runs))}" if len(runs) > 1 else "",
                figure["unit"],
                goal,
                f"{figure['value'] / bound['value']:.2f} ({bound['id']})" if bound and bound["value"] else "",
                ", ".join(f"{p['name']} {number(p['value'])}" for p in figure.get("peers", [])),
            ]
        )
    used = [k for k in range(len(head)) if k < 2 or any(row[k] for row in rows)]
    formatted = ["| " + " | ".join(row[k] for k in used) + " |" for row in [head, *rows]]
    return [formatted[0], "|" + "---|" * len(used), *formatted[1:]]


def section(name: str, results: list[schema.Result]) -> list[str]:
    """Return the lines of a machine."""
    facts = results[0]["machine"]
    parts = [facts.get("gpu"), f"{facts['cores']} cores of {facts['cpu']}" if facts.get("cpu") else None]
    versions = [f"{key} {facts[key]}" for key in ("python", "numpy", "numba", "numba_cuda") if facts.get(key)]
    content = [f"## {name}", "", f"{'; '.join(filter(None, [*parts, ', '.join(versions)]))}.", ""]
    order = [*BENCHMARKS, *sorted(r["benchmark"] for r in results if r["benchmark"] not in BENCHMARKS)]
    for result in sorted(results, key=lambda r: order.index(r["benchmark"])):
        purpose = BENCHMARKS.get(result["benchmark"], ("", ""))[1]
        emulated = result["machine"].get("emulated") or []
        notes = [f"{result['date']}, commit {result['commit']}"]
        notes += ["little data"] if result["options"].get("quick") else []
        notes += [f"emulated: {', '.join(emulated)}"] if emulated else []
        title = f"### {result['benchmark']}" + (f": {purpose}" if purpose else "")
        content += [title, "", f"{'; '.join(notes)}.", "", *table(result), ""]
    return content


def render(folder: Path = RESULTS) -> str:
    """Return the page."""
    introduction = folder / "introduction.md"
    content = [introduction.read_text(encoding="utf-8").rstrip() if introduction.exists() else "# Figures", ""]
    for path in machine_folders(folder):
        results = schema.read(path)
        if results:
            content += section(path.name, results)
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
