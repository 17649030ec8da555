"""``python -m lab bench``: list, run, compare and record benchmarks."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path

from . import AGENTS, BENCHMARKS, SCRIPTS, baseline, compare, machine, page, runner, schema


def listing() -> str:
    """Return the names and summaries of all benchmarks."""
    rows = {name: summary for name, (_, summary) in (BENCHMARKS | SCRIPTS).items()}
    width = max(map(len, rows))
    text_lines = [f"  {name:{width}}  {summary}" for name, summary in sorted(rows.items())]
    return "\n".join(
        [
            "benchmarks (python -m lab bench NAME [--device --quick --repeat N --json FILE --compare FILE]):",
            *text_lines,
            "verbs: compare, baseline, page (each with --help)",
        ]
    )


def script(name: str, argv: list[str]) -> int:
    """Run a benchmark that has its own options."""
    module = SCRIPTS[name][0]
    if name in AGENTS and "--help" not in argv:
        file = str(machine.ROOT / "lab" / "bench" / f"{module}.py")
        paths = [str(machine.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [
            sys.executable,
            "-m",
            "warpwell",
            "run",
            "--agents",
            str(AGENTS[name]),
            "--cuda",
            "local",
            file,
            *argv,
        ]
        return subprocess.run(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}).returncode
    sys.argv = [f"python -m lab bench {name}", *argv]
    return int(importlib.import_module(f"lab.bench.{module}").main() or 0)


def show(result: schema.Result) -> str:
    """Return the figures of a result as an aligned table."""
    rows = [["figure", "median", "low", "high", "unit", "of ceiling", "peers"]]
    for figure in result["figures"]:
        bound = figure.get("ceiling")
        peers = ", ".join(f"{peer['name']} {peer['value']:.4g}" for peer in figure.get("peers", []))
        rows.append(
            [
                figure["id"],
                f"{figure['value']:.4g}",
                f"{min(figure['runs']):.4g}",
                f"{max(figure['runs']):.4g}",
                figure["unit"],
                f"{figure['value'] / bound['value']:.2f} ({bound['id']})" if bound and bound["value"] else "",
                peers,
            ]
        )
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    text_lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    if result["busy"]:
        text_lines.append("busy: other programs used this machine; the result cannot become a baseline")
    return "\n".join(text_lines)


def run(argv: list[str]) -> int:
    """Run benchmarks; return 1 if one failed or a comparison found a regression."""
    parser = argparse.ArgumentParser(prog="python -m lab bench", description="Run benchmarks and print their figures.")
    parser.add_argument("name", nargs="*", help="names of benchmarks")
    parser.add_argument("--all", action="store_true", help="run all benchmarks that the machine supports")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="processes per benchmark (default 1)")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the results")
    parser.add_argument("--compare", type=Path, default=None, metavar="FILE", help="compare with stored results")
    runner.add_setting_arguments(parser)
    arguments = parser.parse_args(argv)
    names = list(BENCHMARKS) if arguments.all else arguments.name
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown or not names:
        parser.error(f"unknown benchmark {unknown[0]!r}" if unknown else "no benchmark is named; add names or --all")
    setting, loaded = runner.setting_of(arguments), machine.is_loaded()
    results, status = [], 0
    for name in names:
        try:
            results.append(runner.measure(name, setting, arguments.repeat, loaded=loaded))
        except runner.CannotRunError as error:
            print(f"{name} skipped: {error}", flush=True)
            status = status or int(not arguments.all or "failed" in str(error))
            continue
        print(show(results[-1]), flush=True)
        if arguments.json:
            schema.write(arguments.json, results if len(names) > 1 else results[0])
    if arguments.compare and results:
        try:
            bases = [r for r in schema.read(arguments.compare) if r["benchmark"] in names]
            status = max(status, compare.report(bases, results))
        except (compare.NotComparableError, schema.SchemaError, OSError) as error:
            print(error, file=sys.stderr)
            return 2
    return status


def run_compare(argv: list[str]) -> int:
    """Compare stored results, or a revision with this checkout."""
    parser = argparse.ArgumentParser(
        prog="python -m lab bench compare",
        description="Report changes above 5 % and above the measured spread; exit with status 1 if a figure is worse.",
    )
    parser.add_argument("names", nargs="+", metavar="BASE NEW | NAME", help="two files or folders, or benchmarks")
    parser.add_argument("--against", metavar="REV", help="run benchmarks of this revision and of the checkout in turn")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each side with --against (default 5)")
    parser.add_argument("--tolerance", type=float, default=compare.TOLERANCE, help="relative change (default 0.05)")
    runner.add_setting_arguments(parser)
    arguments = parser.parse_args(argv)
    try:
        if arguments.against:
            unknown = [name for name in arguments.names if name not in BENCHMARKS]
            if unknown:
                parser.error(f"unknown benchmark {unknown[0]!r}")
            setting = runner.setting_of(arguments)
            return compare.against(arguments.against, arguments.names, setting, arguments.rounds, arguments.tolerance)
        if len(arguments.names) != 2:
            parser.error("expected BASE and NEW, or --against REV and names of benchmarks")
        base, new = (schema.read(Path(name)) for name in arguments.names)
        return compare.report(base, new, arguments.tolerance)
    except (compare.NotComparableError, schema.SchemaError, OSError) as error:
        print(error, file=sys.stderr)
        return 2


def main(argv: list[str]) -> int:
    """Run from the command line."""
    if not argv:
        print(listing())
        return 0
    verbs = {"compare": run_compare, "baseline": baseline.main, "page": page.main}
    if argv[0] in verbs:
        return verbs[argv[0]](argv[1:])
    if argv[0] in SCRIPTS:
        return script(argv[0], argv[1:])
    return run(argv)
