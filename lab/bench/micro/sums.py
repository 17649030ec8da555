"""Sums over an array larger than the cache: the benchmarks `reduction` and `scan`."""

from __future__ import annotations

import numpy as np

from warpwell.targets import to_device, to_host, zeros

from . import kernels
from .ceilings import medium_rate, numpy_rate
from .figures import Report, Row
from .reads import Sources, rates_of, rows_of, run_of, sources
from .setting import Setting
from .writes import check, target, written


def reduction(setting: Setting) -> Report:
    """Add up an array from storage once."""
    with sources(setting, resident=False) as found:
        total = int(found.data.sum())
        arguments = (setting.items, run_of(setting), 1)
        rates = rates_of("reduction", found, kernels.walk, total, *arguments, cold=True)
        amount, memory = setting.nbytes / 1e9, numpy_rate(found.data.sum, setting.nbytes, setting.runs) / 1e9
        medium = None
        if setting.cached:
            medium = medium_rate(setting, found.data, np.arange(setting.pages)) * setting.page_size / 1e9
        rows = rows_of("sum", rates, amount, medium, numpy_in_memory=memory)
    return Report("reduction", "GB/s", setting.where(), rows, setting.emulated)


def scan(setting: Setting) -> Report:
    """Store the sums up to each item: sums of runs, their sums on the host, and each run from its start."""
    with sources(setting, resident=False) as found, target(setting) as into:
        expected = np.cumsum(found.data)
        rates = {}
        for means in found.means(spans=False):

            def launch(means: str = means) -> None:
                _scan(setting, found, into, means)

            rates[means] = written(setting, launch, [found, into], means)
            check(setting, "scan", means, into, expected)
        amount, memory = 2 * setting.nbytes / 1e9, numpy_rate(found.data.cumsum, 2 * setting.nbytes, setting.runs) / 1e9
        medium = None
        if setting.cached:
            order = np.arange(setting.pages)
            reads, writes = (medium_rate(setting, found.data, order, write=write) for write in (False, True))
            # read twice, written once
            medium = 2 / (2 / reads + 1 / writes) * setting.page_size / 1e9
        rows: list[Row] = rows_of("scan", rates, amount, medium, numpy_in_memory=memory)
    return Report("scan", "GB/s", setting.where(), rows, setting.emulated)


def _scan(setting: Setting, found: Sources, into: Sources, means: str) -> None:
    run = run_of(setting)
    count = -(-setting.items // run)
    sums = zeros(setting.device, count)
    threads = setting.threads
    kernels.block_sums(means)[threads](
        *found.source_arguments, setting.items, run, sums, threads, device=setting.device
    )
    before = np.concatenate([[0], np.cumsum(to_host(sums))[:-1]])
    kernels.block_scans(means)[threads](
        *into.source_arguments,
        *found.source_arguments,
        setting.items,
        run,
        to_device(setting.device, before),
        threads,
        device=setting.device,
    )
