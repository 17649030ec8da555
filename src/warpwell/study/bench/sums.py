"""Sums over an array larger than the cache: the benchmarks `reduction` and `scan`."""

from __future__ import annotations

import numpy as np

from . import kernels
from .ceilings import medium_rate, numpy_rate
from .figures import Report
from .reads import cold_row, hit_row, rates_of, run_of, sources
from .setting import Setting


def reduction(setting: Setting) -> Report:
    """Add up an array from storage once."""
    with sources(setting, resident=False) as found:
        wanted = int(found.data.sum())
        given = (setting.items, run_of(setting), 1)
        rates = rates_of("reduction", found, kernels.walk, wanted, *given, cold=True)
        amount, memory = setting.nbytes / 1e9, numpy_rate(found.data.sum, setting.nbytes, setting.runs) / 1e9
        if setting.cached:
            pages = np.arange(-(-setting.nbytes // setting.page_size))
            medium = medium_rate(found.array.medium, pages, setting) * setting.page_size / 1e9
            row = cold_row("sum", rates, amount, medium, numpy_in_memory=memory)
        else:
            row = hit_row("sum", rates, amount)
    return Report("reduction", "GB/s", setting.where(), [row], setting.emulated)
