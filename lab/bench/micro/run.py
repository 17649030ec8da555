"""The micro-benchmarks of the BaM paper: reads, writes and sums, each with a ceiling of the same run.

The ceiling is raw loads of a plain copy, the medium without queues and cache, or a drive's rate; the protocol of BaM on
the same queues is a peer. Every result is compared with NumPy's, and a wrong one ends the run. Options: ``names``
(array, cache, pattern, block, iodepth, readwrite, vectoradd, reduction, scan), ``tier`` (storage, host-cached, host,
device, mapped), ``medium`` (ram, file, or a drive to emulate such as P5800X or 980Pro/16), ``drives``, ``bytes``,
``cache``, ``page-size``, ``threads``, ``service-threads``, ``runs``.
"""

from __future__ import annotations

from lab.bench import runner
from lab.bench.micro import BENCHMARKS, Setting, measure
from lab.bench.runner import Record, benchmark
from warpwell._check import checked_nbytes
from warpwell.cache import choose_page_size
from warpwell.errors import ArgumentError
from warpwell.storage import service_threads


def setting_of(setting: runner.Setting) -> Setting:
    """Return the setting of the micro-benchmarks."""
    page = choose_page_size(setting.option("page-size", "4KiB"), "cpu", 0)
    text = setting.pick(("16MiB", "64MiB"), ("256MiB", "1GiB"), "bytes")
    nbytes = checked_nbytes(text) // page * page
    if nbytes < 64 * page:
        raise ArgumentError(f"bytes must be at least 64 pages of {page} B, got {text}")
    found = Setting(
        device=setting.device,
        tier=setting.option("tier", "storage"),
        page_size=page,
        cache=checked_nbytes(setting.options["cache"]) if "cache" in setting.options else nbytes // 4,
        nbytes=nbytes,
        threads=setting.pick((64, 64), (1 << 18, 1 << 18), "threads"),
        service_threads=setting.option("service-threads", service_threads(setting.device)),
        medium=setting.option("medium", "ram"),
        drives=setting.option("drives", 1),
        runs=setting.option("runs", 3),
    )
    found.check()
    return found


@benchmark("micro", figures=tuple(BENCHMARKS))
def run(setting: runner.Setting, record: Record) -> None:
    """Run the micro-benchmarks."""
    names, options = setting.option("names", list(BENCHMARKS)), setting_of(setting)
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        raise ArgumentError(f"unknown micro-benchmark {unknown[0]!r}; expected one of {', '.join(BENCHMARKS)}")
    for name in names:
        report = measure(name, options)
        if report.emulated:
            record.emulated.add("drive")
        for row in report.rows:
            ceiling = (row.by, row.ceiling) if row.ceiling else None
            peers = [("BaM's protocol", "315fadf", row.bam)] if row.bam else []
            record(f"{name}/{row.name}", row.rate, report.unit, ceiling=ceiling, peers=peers)
