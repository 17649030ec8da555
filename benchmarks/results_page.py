"""Make a page of tables from what the benchmarks wrote: ``python benchmarks/results_page.py FOLDER > PAGE.md``.

Takes graphs.json, hits.json, misses.json, bulk.json, file.json and block.json of a folder, as far as they are there.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Found = dict[str, Any]


def line(cells: Sequence[object]) -> str:
    """Return a row of a table in Markdown."""
    return "| " + " | ".join(_text(cell) for cell in cells) + " |"


def _text(cell: object) -> str:
    if cell is None:
        return ""
    return (
        f"{cell:.3g}"
        if isinstance(cell, float) and abs(cell) < 1000
        else f"{cell:,.0f}"
        if isinstance(cell, float)
        else str(cell)
    )


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    return "\n".join([line(head), "|" + "---|" * len(head), *(line(row) for row in rows)]) + "\n"


def graphs(found: Found) -> str:
    """Return the tables of graphs.json."""
    out = []
    names = ("bfs", "cc", "pr", "sssp")
    for kind in ("kron", "urand"):
        if kind not in found:
            continue
        part = found[kind]
        rows: list[list[object]] = []
        if "GAP" in part:
            rows.append(["GAP's code, all cores, in memory", None, *(_ms(part["GAP"], n) for n in names), None, None])
        for way, figures in part["tiers"].items():
            shares = [figures.get(n, {}).get("of_the_drives") for n in ("bfs", "cc")]
            rows.append([way, figures.get("loading_s"), *(_ms(figures, n) for n in names), *shares])
        head = [
            "edges in",
            "loading, s",
            "BFS, ms",
            "components",
            "PageRank",
            "SSSP",
            "BFS, of the drives",
            "components",
        ]
        equal = ", ".join(name for name, good in part.get("agrees_with_GAP", {}).items() if good)
        out += [
            f"### {kind} {found['scale']}, {part['edges']:,} edges\n",
            table(head, rows),
            f"Means; BFS over {found['sources']} sources. Equal to GAP's, vertex by vertex: "
            f"{equal or 'not compared'}. A kernel reads pinned host memory at "
            f"{found['bus_GB_a_second']:.1f} GB/s.\n",
        ]
        out += [f"- {text}" for text in _shares(part)] + [""]
    return "\n".join(out)


def _ms(figures: Found, name: str) -> object:
    return float(figures[name]["ms"]) if name in figures else None


def _shares(part: Found) -> list[str]:
    """Return what the goals of graphs are about, in words."""
    out, tiers = [], part["tiers"]
    host, stored, device = (tiers.get(name, {}) for name in ("host", "storage", "device"))
    for name, words in (("bfs", "BFS"), ("cc", "components")):
        if name in host and name in stored:
            mine, theirs = stored[name]["ms"], host[name]["ms"]
            loaded = (theirs + 1e3 * host["loading_s"]) / mine
            out.append(
                f"{words}: from storage {mine / theirs:.2f} times as long as from host memory without its loading; "
                f"host memory with its loading takes {loaded:.2f} times as long as storage; it moves "
                f"{host[name].get('of_the_bus', 0.0):.2f} of what the bus can"
            )
    for name, words in (("bfs", "BFS"), ("cc", "components"), ("pr", "PageRank"), ("sssp", "SSSP")):
        if name in device and name in part.get("GAP", {}):
            ratio = part["GAP"][name]["ms"] / device[name]["ms"]
            out.append(f"{words}: GAP takes {ratio:.2f} times as long as device memory")
    return out


def hits(found: Found) -> str:
    """Return the tables of hits.json: medians over the runs."""
    out = []
    runs = found.get("hit_path", [])
    for k, page in enumerate(runs[0]["pages"] if runs else []):
        pages = [run["pages"][k] for run in runs]
        readers = [
            n for n in page["rows"][0] if n not in ("pattern", "store") and not n.endswith((" regs", " occupancy"))
        ]
        rows = []
        for r, row in enumerate(page["rows"]):
            rates = {n: statistics.median(p["rows"][r][n] for p in pages) for n in readers}
            rows.append(
                [
                    row["pattern"] + (", with stores" if row["store"] else ""),
                    rates["raw"],
                    *(rates[n] / rates["raw"] for n in readers if n != "raw"),
                ]
            )
        head = ["reads", "raw, G/s", *(f"{n}, of raw" for n in readers if n != "raw")]
        out += [f"### Pages of {page['page_size']} B\n", table(head, rows)]
        walks = [p.get("walks") for p in pages]
        if walks[0]:
            rows = [
                [w[0], statistics.median(one[i][1] for one in walks), statistics.median(one[i][2] for one in walks)]
                for i, w in enumerate(walks[0])
            ]
            out += [table(["walks, a warp a page", "G/s", "of raw"], rows)]
    for part in (found.get("spans") or [{}])[-1].get("spans", []):
        rows = [[row[0], row[2], float(row[4]), float(row[5])] for row in part["rows"]]
        out += [
            f"### Spans, pages of {part['page_size']} B, runs of {part['run']} B\n",
            table(["walk", "registers", "G items/s", "of raw"], rows),
        ]
    for name, words in (("bam_hit", "as shipped"), ("bam_hit_nostats", "counters off")):
        rows = [
            [r["page"], r["pattern"], r["method"], float(r["greads_median"]), float(r["of_raw"])]
            for r in found.get(name, [])
        ]
        if rows:
            head = ["page, B", "pattern", "accessor", "G/s", "of raw"]
            out += [f"### BaM's own page cache, {words}\n", table(head, rows)]
    return "\n".join(out)


def rows_of(found: Found) -> str:
    """Return the table of a file with ``head`` and ``rows`` (or ``misses``)."""
    return table([str(h) for h in found["head"]], found.get("rows") or found["misses"])


def bulk(found: Found) -> str:
    """Return the table of bulk.json."""
    return table(
        ["what", "GB/s", "of a pinned copy"],
        [[name, row["GB_a_second"], row["of_copy"]] for name, row in found["contiguous"].items()],
    )


def block(found: Found) -> str:
    """Return the table of block.json."""
    (part,) = found["benchmarks"]
    head = ["commands", part["unit"], "ceiling", "of", "of ceiling"]
    keys = ("what", "rate", "ceiling", "ceiling_by", "of_ceiling")
    return f"{part['where']}.\n\n" + table(head, [[row[k] for k in keys] for row in part["rows"]])


PARTS: dict[str, tuple[str, Callable[[Found], str]]] = {
    "hits": ("Reads that the cache answers", hits),
    "misses": ("Misses from host memory", rows_of),
    "bulk": ("Bulk reads from host memory", bulk),
    "file": ("Random reads of a file", rows_of),
    "block": ("Commands without a cache", block),
    "graphs": ("Graphs", graphs),
}


def page(folder: Path) -> str:
    """Return the page."""
    out, machine = [], {}
    for name, (title, make) in PARTS.items():
        path = folder / f"{name}.json"
        if path.exists() and path.stat().st_size:
            found = json.loads(path.read_text())
            machine = machine or {k: found[k] for k in ("gpu", "commit") if k in found}
            out += [f"## {title}\n", make(found)]
    where = f"{machine.get('gpu', 'CPU')}, commit {machine.get('commit', 'unknown')}"
    return "\n".join([f"# {where}\n", *out])


if __name__ == "__main__":
    print(page(Path(sys.argv[1])))
