"""Micro-benchmarks, each with its ceiling and BaM's protocol, measured in the same run.

============  ===================================================================================
run.py        the benchmark `micro`: all of them, or those in the option ``names``
setting.py    `Setting`: options; arrays over the medium that they name
figures.py    `Report`, `Row`: results; `require_same`, which ends a benchmark with a wrong result
ceilings.py   upper bounds of rates: a medium without queues and cache, copies, NumPy
kernels.py    kernels that read the same items by different means
bam.py        BaM's protocol: references, and misses that wait
reads.py      `array`, `cache`, `pattern`: reads through the cache
commands.py   `block`, `iodepth`: commands of kernels without a cache
writes.py     `readwrite`, `vectoradd`: reads and writes
sums.py       `reduction`, `scan`
drives.py     `drive_reads`: a drive's own rate
============  ===================================================================================
"""

import importlib

from .figures import Report, Row
from .setting import Setting

BENCHMARKS = {
    "array": ("reads", "items of an array that the cache holds, sequentially and at random"),
    "cache": ("reads", "whole pages, a warp each, hot and cold"),
    "pattern": ("reads", "an array larger than the cache: sequential, random, stride, zipf"),
    "block": ("commands", "pages read and written by commands of kernels, without a cache"),
    "iodepth": ("commands", "pages read at random by a queue of more and more entries"),
    "readwrite": ("writes", "a copy of an array, by kernels and by the host"),
    "vectoradd": ("writes", "c = a + b, all larger than the cache"),
    "reduction": ("sums", "the sum of an array larger than the cache"),
    "scan": ("sums", "the sums up to each item of an array larger than the cache"),
}
"""The module of each benchmark, with a function of the benchmark's name, and the measured operation."""


def measure(name: str, setting: Setting) -> Report:
    """Run a benchmark.

    Raises
    ------
    WarpwellError
        A result was wrong.
    """
    report: Report = getattr(importlib.import_module(f".{BENCHMARKS[name][0]}", __name__), name)(setting)
    return report


__all__ = ["BENCHMARKS", "Report", "Row", "Setting", "measure"]
