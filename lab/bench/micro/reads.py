"""Reads through the cache: the benchmarks `array`, `cache` and `pattern`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.kv.distributions import Zipfian
from warpwell.array import Array
from warpwell.cache import Statistics
from warpwell.targets import Block, memory_for, to_device, to_host

from . import kernels
from .bam import BamCache
from .ceilings import medium_rate
from .figures import Report, Row, require_same, seconds
from .setting import Setting, numbers

Items = NDArray[np.int64]

TABLE = 1 << 20
"""Memory for page table and owners, in addition to an eighth of the data, in a cache that holds all data."""
RUN = 4096
"""Items that a warp reads in a row in a sequential walk, on a GPU; on a CPU a thread's share is one run."""


class Sources:
    """The same items for all means of reading: an array, a copy in device memory, BaM's slots."""

    def __init__(self, setting: Setting, array: Array, data: Items, frame_bytes: int) -> None:
        self.setting, self.array, self.data = setting, array, data
        self.copy: Block = memory_for(setting.device).allocate(data.nbytes)
        self.copy.write(0, data)
        self.bam = BamCache(array, frame_bytes) if array.tier == "storage" else None
        self.counted: dict[str, Statistics] = {}

    def means(self, spans: bool) -> list[str]:
        """Return the available means of reading."""
        bam = ["BaM"] if self.bam is not None else []
        return ["raw", "subscript", *(["span"] if spans else []), *bam]

    @property
    def source_arguments(self) -> tuple[Array, int, int]:
        """The first arguments of kernels: array, address of the copy, address of BaM's record."""
        return self.array, self.copy.address, 0 if self.bam is None else self.bam.address

    def forget(self) -> None:
        """Empty the caches."""
        self.array.evict()
        if self.bam is not None:
            self.bam.clear()

    def time(self, name: str, kernel: Any, total: int, *arguments: Any, cold: bool = False) -> float:
        """Return the seconds of a launch of `kernel`, which must compute `total`; if `cold`, with an empty cache."""
        setting = self.setting
        sums = to_device(setting.device, np.array([0, setting.threads]))

        def launch() -> None:
            kernel[setting.threads](*self.source_arguments, *arguments, sums, device=setting.device)

        before = self.array.stats
        times = seconds(launch, setting.runs, self.forget if cold else lambda: None)
        self.counted[name] = self.array.stats - before
        if self.bam is not None:
            self.bam.check()
        require_same(name, int(to_host(sums)[0]), _wrapped(total * (setting.runs + 1)))
        return times


def _wrapped(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


@contextlib.contextmanager
def sources(setting: Setting, *, resident: bool) -> Iterator[Sources]:
    """Yield arrays of numbers, with a cache that holds all of them, or with the cache size of the setting."""
    data = numbers(setting.items)
    cache = setting.nbytes + setting.nbytes // 8 + TABLE if resident else setting.cache
    with setting.opened(data, cache=cache) as array:
        yield Sources(setting, array, data, setting.nbytes if resident else setting.cache)


def rates_of(
    name: str,
    found: Sources,
    make: Callable[[str], Any],
    total: int,
    *arguments: Any,
    cold: bool = False,
    spans: bool = True,
) -> dict[str, float]:
    """Return the launches a second of a kernel by all means of reading."""
    return {
        means: 1 / found.time(f"{name} by {means}", make(means), total, *arguments, cold=cold and means != "raw")
        for means in found.means(spans)
    }


def rows_of(
    name: str, rates: dict[str, float], amount: float, medium: float | None = None, **notes: float
) -> list[Row]:
    """Return a row for subscripts and a row for spans; a launch processes `amount`.

    The ceiling is raw loads, or the medium alone (in the unit of the rows) if the medium is slower.
    """
    raw = amount * rates["raw"]
    bound, by = min((raw, "raw loads"), (raw if medium is None else medium, "the medium alone"))
    bam = amount * rates["BaM"] if "BaM" in rates else None
    several = "span" in rates
    return [
        Row(f"{name}, {means}s" if several else name, amount * rates[means], bound, by, bam, dict(notes))
        for means in ("subscript", "span")
        if means in rates
    ]


def passes_of(setting: Setting) -> int:
    """Return how often a kernel goes over the data, so that the time of a launch itself is negligible."""
    return max(1, (1 << (34 if setting.device == "cuda" else 25)) // setting.nbytes)


def run_of(setting: Setting) -> int:
    """Return how many items in a row a warp reads in a sequential walk."""
    return RUN if setting.device == "cuda" else max(1, -(-setting.items // setting.threads))


def array(setting: Setting) -> Report:
    """Read every item of an array that the cache holds: one after another, and in random order."""
    times = passes_of(setting)
    with sources(setting, resident=True) as found:
        total = times * int(found.data.sum())
        order = to_device(setting.device, np.random.default_rng(1).permutation(setting.items))
        reads = times * setting.items / 1e9
        arguments = (setting.items, run_of(setting), times)
        rows = rows_of("sequential", rates_of("sequential", found, kernels.walk, total, *arguments), reads)
        rates = rates_of("random", found, kernels.pick, total, order, times, spans=False)
        rows += rows_of("random", rates, reads)
    return Report("array", "G items/s", setting.where(), rows, setting.emulated)


def cache(setting: Setting) -> Report:
    """Read whole pages, a warp each: of a cache that holds them (hot), and of one that holds none (cold)."""
    times = passes_of(setting)
    run = setting.page_size // 8
    pages = -(-setting.items // run)
    orders = {"in order": np.arange(pages), "at random": np.random.default_rng(2).permutation(pages)}
    rows = []
    with sources(setting, resident=True) as found:
        total = int(found.data.sum())
        for name, order in orders.items():
            label = f"hot pages {name}"
            device_order = to_device(setting.device, order)
            rates = rates_of(label, found, kernels.pages, times * total, device_order, run, times)
            rows += rows_of(label, rates, times * setting.nbytes / 1e9)
        for name, order in orders.items() if setting.cached else ():
            label = f"cold pages {name}"
            device_order = to_device(setting.device, order)
            rates = rates_of(label, found, kernels.pages, total, device_order, run, 1, cold=True)
            medium = medium_rate(setting, found.data, order) * setting.page_size / 1e9
            rows += rows_of(label, rates, setting.nbytes / 1e9, medium)
    return Report("cache", "GB/s", setting.where(), rows, setting.emulated)


def pattern(setting: Setting) -> Report:
    """Read items in four orders, of an array that is larger than the cache."""
    rows = []
    with sources(setting, resident=False) as found:
        for name, order in orders_of(setting).items():
            device_order = to_device(setting.device, order)
            total, reads = int(found.data[order].sum()), len(order) / 1e6
            rates = rates_of(name, found, kernels.pick, total, device_order, 1, cold=True, spans=False)
            if not setting.cached:
                rows += rows_of(name, rates, reads)
                continue
            stats = found.counted[f"{name} by subscript"]
            misses, read = (n / (setting.runs + 1) for n in (stats.misses, stats.bytes_read))
            sample = order[: 1 << 14] * 8 // setting.page_size
            bound = medium_rate(setting, found.data, sample) * reads / max(1, read / setting.page_size)
            rows += rows_of(
                name,
                rates,
                reads,
                bound,
                misses_a_read=misses / len(order),
                bytes_read_over_wanted=read / (8 * len(order)),
            )
    return Report("pattern", "M reads/s", setting.where(), rows, setting.emulated)


def orders_of(setting: Setting) -> dict[str, Items]:
    """Return the orders in which `pattern` reads: sequential, random, an item a page, and zipf over the pages."""
    count = min(setting.items, 1 << (22 if setting.device == "cuda" else 16))
    run = setting.page_size // 8
    pages = -(-setting.items // run)
    random = np.random.default_rng(3)
    hot = Zipfian().draw(np.full(count, pages), random)
    return {
        "sequential": np.arange(count),
        "random": random.integers(0, setting.items, count),
        "stride": np.arange(count) * run % setting.items,
        # the hot pages are not adjacent
        "zipf": np.minimum(random.permutation(pages)[hot] * run + random.integers(0, run, count), setting.items - 1),
    }
