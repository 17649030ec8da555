"""The results as a table for a terminal, as a Markdown page and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from .experiment import AGREES, BUSY, DISAGREES, FAILED, UNAVAILABLE, Result, documents

SCHEMA = 1
HEADINGS = ("experiment", "document", "ours", "shape")


def cells(result: Result) -> tuple[str, str, str, str]:
    """Return the four cells of a result."""
    document = documents()[result.name]
    text = result.outcome.text if result.outcome else "-"
    verdict = result.status
    if result.outcome:
        verdict += f" in {sum(c.agrees for c in result.outcome.checks)} of {len(result.outcome.checks)} checks"
    if result.runs > 1:
        verdict += f", run {result.runs}"
    wrong = [f"{c.claim}: {c.found}" for c in result.outcome.checks if not c.agrees] if result.outcome else []
    notes = "; ".join([*wrong, *([result.reason] if result.reason else [])])
    if notes and result.status != AGREES:
        verdict += f": {notes}"
    return f"{result.name}: {document.title}", f"{document.figure}: {document.value}", text, verdict


def summary(results: Sequence[Result]) -> str:
    """Return how many shapes agree, and the time that all experiments took."""
    counts = Counter(result.status for result in results)
    labels = {AGREES: "agree", DISAGREES: "disagree", FAILED: "failed", BUSY: "not judged (busy machine)"}
    labels |= {UNAVAILABLE: "cannot run here"}
    parts = [f"{counts[status]} {word}" for status, word in labels.items() if counts[status] or status != FAILED]
    seconds, cpu = sum(r.seconds for r in results), sum(r.cpu_seconds for r in results)
    return f"{', '.join(parts)}; {seconds:.0f} s, {cpu:.0f} CPU s"


def print_table(results: Sequence[Result], console: Console) -> None:
    """Print the table, and below it the shapes that disagree."""
    table = Table(*HEADINGS, box=box.SIMPLE_HEAD, padding=(0, 1), show_lines=True)
    for result in results:
        table.add_row(*cells(result))
    console.print(table)
    bad = [result.name for result in results if result.status in (DISAGREES, FAILED)]
    if bad:
        console.print(f"disagree: {', '.join(bad)}", highlight=False)
    console.print(summary(results), highlight=False)


def as_json(results: Sequence[Result], machine: dict[str, Any]) -> dict[str, Any]:
    """Return the results as plain data."""
    entries = [asdict(result) | {"document": asdict(documents()[result.name])} for result in results]
    return {"schema": SCHEMA, "command": "paper", "machine": machine, "experiments": entries}


def write_json(path: Path, results: Sequence[Result], machine: dict[str, Any]) -> None:
    """Write the results as JSON."""
    text = json.dumps(as_json(results, machine), indent=1, ensure_ascii=False, default=str)
    path.write_text(text + "\n", encoding="utf-8")


def page(results: Sequence[Result], machine: dict[str, Any]) -> str:
    """Return the results as a Markdown page."""
    rows = [HEADINGS, ("---",) * len(HEADINGS), *map(cells, results)]
    rendered = ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]
    facts = ", ".join(f"{name} {value}" for name, value in machine.items())
    return "\n".join(
        [
            "# Experiments of the source documents",
            "",
            "Drives, links and copy engines are emulated at a fraction of their rates, so absolute rates are not",
            f"comparable; the shape is. Machine: {facts}.",
            "",
            *rendered,
            "",
            summary(results) + ".",
            "",
            "## Checks",
            "",
            *(f"- {result.name}: {_listed(result)}" for result in results if result.outcome),
            "",
        ]
    )


def _listed(result: Result) -> str:
    assert result.outcome is not None
    return "; ".join(f"{c.claim}: {c.found}{'' if c.agrees else ' (disagrees)'}" for c in result.outcome.checks)
