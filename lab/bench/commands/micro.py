"""``python -m lab bench``: micro-benchmarks."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from lab.cli import parser_of, run_command
from warpwell.cache.sizes import format_size, parse_page_size, parse_size
from warpwell.cli.arguments import json_option
from warpwell.cli.output import Output
from warpwell.errors import ArgumentError, checked_integer
from warpwell.errors.general import extra
from warpwell.storage import service_threads
from warpwell.study.bench import BENCHMARKS, Report, Setting, measure
from warpwell.targets import default_device
from warpwell.targets.gpu.device import require_gpu

GIB, MIB = 1 << 30, 1 << 20

_BYTES = {("cuda", False): GIB, ("cuda", True): GIB // 4, ("cpu", False): 64 * MIB, ("cpu", True): 16 * MIB}
"""Bytes of data, by device and whether it is to be quick."""


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = parser_of("bench", "Measure reads, writes and sums next to their ceilings.")
    parser.add_argument("name", nargs="*", metavar="NAME", help="a benchmark; without one they are listed")
    parser.add_argument("--all", action="store_true", help="run all of them")
    parser.add_argument("--quick", action="store_true", help="little data, few runs: all of them in a few minutes")
    parser.add_argument("--out", metavar="FILE", help="draw the figures (.png, .svg, .pdf); of all: bench.png")
    json_option(parser)

    how = parser.add_argument_group("how to run")
    how.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    how.add_argument(
        "--tier",
        choices=("storage", "host-cached", "host", "device", "mapped"),
        default="storage",
        help="where the data live (default storage)",
    )
    how.add_argument(
        "--medium",
        default="ram",
        metavar="NAME",
        help="what the data lie on: ram (default), file, or a drive to emulate over host memory: P5800X, "
        "PM1735, 980Pro; 980Pro/16 has a sixteenth of its rates",
    )
    how.add_argument("--drives", type=int, default=1, metavar="N", help="emulated drives, striped (default 1)")
    how.add_argument("--bytes", metavar="SIZE", help="of data (default 1GiB on cuda, 64MiB on cpu)")
    how.add_argument("--cache", metavar="SIZE", help="where data exceed the cache (default: a quarter of the data)")
    how.add_argument("--page-size", default="4KiB", metavar="SIZE", help="default 4KiB")
    how.add_argument("--threads", type=int, metavar="N", help="of kernels (default 262144 on cuda, 64 on cpu)")
    how.add_argument("--service-threads", type=int, metavar="N", help="host threads that serve commands")
    how.add_argument("--runs", type=int, metavar="N", help="each figure is the median of so many (default 3)")
    return run_command(run, parser, argv)


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmarks that were named; list them where none was."""
    output = Output(arguments.json)
    names = _chosen(arguments)
    if not names:
        _list(output)
        return 0
    picture = _picture(arguments, names, output)
    setting = setting_of(arguments)
    started = time.perf_counter()
    reports = []
    with output.progress() as report:
        for done, name in enumerate(names):
            report("run", done, len(names))
            reports.append(measure(name, setting))
            if not arguments.json:
                _print(output, reports[-1])
    values = {
        "command": "bench",
        "device": setting.device,
        "tier": setting.tier,
        "bytes": setting.nbytes,
        "cache_bytes": setting.cache,
        "page_size": setting.page_size,
        "threads": setting.threads,
        "service_threads": setting.service_threads,
        "runs": setting.runs,
        "benchmarks": [one.as_dict() for one in reports],
        "picture": None if picture is None else str(picture),
        "total_seconds": time.perf_counter() - started,
    }
    if picture is not None:
        from .plot import draw  # matplotlib takes a second to import

        draw(picture, reports)
    if arguments.json:
        output.result("bench", values)
    else:
        output.screen.print(
            f"{setting.device}, {format_size(setting.nbytes)} of data, pages of {setting.page_size} B, "
            f"{setting.threads:,} threads; results were compared with NumPy's; {values['total_seconds']:.0f} s in all"
            + (f"; picture: {picture}" if picture else "")
        )
    return 0


def _chosen(arguments: argparse.Namespace) -> list[str]:
    unknown = [name for name in arguments.name if name not in BENCHMARKS]
    if unknown:
        raise ArgumentError(f"there is no benchmark {unknown[0]!r}: choose one of {', '.join(BENCHMARKS)}")
    if arguments.all and arguments.name:
        raise ArgumentError("--all runs every benchmark: leave the names out, or leave --all out")
    return list(BENCHMARKS) if arguments.all or (arguments.quick and not arguments.name) else arguments.name


def _list(output: Output) -> None:
    if output.as_json:
        output.result("benchmarks", {name: text for name, (_, text) in BENCHMARKS.items()})
        return
    output.table("benchmarks", ("name", "measures"), [(n, text) for n, (_, text) in BENCHMARKS.items()], ("measures",))
    output.screen.print("run one: python -m lab bench array; all of them in minutes: python -m lab bench --quick")


def setting_of(arguments: argparse.Namespace) -> Setting:
    """Return the setting that the options describe."""
    device = arguments.device or default_device()
    if device == "cuda":
        require_gpu()
    page = parse_page_size(arguments.page_size)
    nbytes = _BYTES[device, arguments.quick] if arguments.bytes is None else parse_size(arguments.bytes, "--bytes")
    nbytes = nbytes // page * page
    if nbytes < 64 * page:
        raise ArgumentError(f"--bytes {arguments.bytes}: give at least 64 pages, {format_size(64 * page)}")
    cache = nbytes // 4 if arguments.cache is None else parse_size(arguments.cache, "--cache")
    threads = {"cuda": 1 << 18, "cpu": 64}[device] if arguments.threads is None else arguments.threads
    setting = Setting(
        device=device,
        tier=arguments.tier,
        page_size=page,
        cache=cache,
        nbytes=nbytes,
        threads=checked_integer(threads, "--threads", least=1),
        service_threads=checked_integer(arguments.service_threads or service_threads(device), "--service-threads"),
        medium=arguments.medium,
        drives=checked_integer(arguments.drives, "--drives", least=1, most=60),
        runs=checked_integer(arguments.runs or 3, "--runs", least=1),
    )
    setting.check()
    return setting


def _picture(arguments: argparse.Namespace, names: Sequence[str], output: Output) -> Path | None:
    """Return the path of the picture: the one asked for, bench.png of all benchmarks, else none."""
    from .plot import checked_picture, has_matplotlib

    if arguments.out is not None:
        return checked_picture(arguments.out)
    if len(names) < len(BENCHMARKS):
        return None
    if not has_matplotlib():
        output.notes.print(f"no picture: matplotlib is missing; install {extra('demo')}")
        return None
    return checked_picture("bench.png")


def _print(output: Output, report: Report) -> None:
    rows = [row.as_dict() for row in report.rows]
    notes = list(dict.fromkeys(name for row in report.rows for name in row.notes))
    heads = ["", report.unit, "ceiling", "of", "of ceiling", "BaM's protocol", "over BaM's"]
    shown: list[Sequence[str]] = [
        (
            row["what"],
            _figure(row["rate"]),
            _figure(row["ceiling"]),
            row["ceiling_by"],
            _figure(row["of_ceiling"]),
            _figure(row["bam"]),
            _figure(row["over_bam"]),
            *(_figure(row.get(name)) for name in notes),
        )
        for row in rows
    ]
    output.table(f"{report.name}: {report.where}", [*heads, *(n.replace("_", " ") for n in notes)], shown, ("of",))


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
