"""Run micro-benchmarks and print their tables."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from ...cache.sizes import format_size, parse_page_size, parse_size
from ...errors import ArgumentError, checked_integer
from ...errors.general import extra
from ...storage import service_threads
from ...study.bench import BENCHMARKS, Report, Setting, measure
from ...targets import default_device
from ...targets.gpu.device import require_gpu
from ..output import Output

GIB, MIB = 1 << 30, 1 << 20

_BYTES = {("cuda", False): GIB, ("cuda", True): GIB // 4, ("cpu", False): 64 * MIB, ("cpu", True): 16 * MIB}
"""Bytes of data, by device and whether it is to be quick."""


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
        from .picture import draw  # matplotlib takes a second to import

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
    output.screen.print("run one: warpwell bench array; all of them in minutes: warpwell bench --quick")


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
    from .picture import checked_picture, has_matplotlib

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
