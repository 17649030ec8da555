"""Rates of folds and maps over cached pages, compared with raw loads of the same frames.

Each warp takes runs of items in grid stride. The ceiling is the same walk by plain addresses, past L1.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import numpy as np

import warpwell as ww
from lab.bench.hits import COMPLETE, EVICTING, fill, seen_as
from lab.bench.runner import Record, Setting, benchmark
from lab.bench.timing import kernel_times, rates
from warpwell import gpu
from warpwell._check import checked_nbytes
from warpwell.storage import RamMedium
from warpwell.targets import device, kernel, memory_for
from warpwell.targets.primitives import DEVICE, lane_id, load_pair, load_relaxed, store_weak_as, warp_size

I8 = np.dtype(np.int64)


@device
def mix(total, item):
    """Fold an item by a function that the library has no special case for."""
    return (total ^ item) + item


@device
def more(item):
    """Return the value to store for an item."""
    return item + 1


def raw(a, runs, items, warps, sink):
    """Walk by words."""
    warp, lane = gpu.grid(1) // warp_size(), lane_id()
    total = 0
    for run in range(warp, runs, warps):
        base = a + 8 * (run * items + lane)
        for k in range(0, items // warp_size(), 8):
            at = base + 8 * warp_size() * k
            step = 8 * warp_size()
            p, q = load_relaxed(at, DEVICE), load_relaxed(at + step, DEVICE)
            r, s = load_relaxed(at + 2 * step, DEVICE), load_relaxed(at + 3 * step, DEVICE)
            t, u = load_relaxed(at + 4 * step, DEVICE), load_relaxed(at + 5 * step, DEVICE)
            v, w = load_relaxed(at + 6 * step, DEVICE), load_relaxed(at + 7 * step, DEVICE)
            total = mix(mix(mix(mix(total, p), q), r), s)
            total = mix(mix(mix(mix(total, t), u), v), w)
    store_weak_as(sink + 8 * gpu.grid(1), total, I8)


def raw_pairs(a, runs, items, warps, sink):
    """Walk by pairs of words."""
    warp, lane = gpu.grid(1) // warp_size(), lane_id()
    total = 0
    step = 16 * warp_size()
    for run in range(warp, runs, warps):
        base = a + 8 * run * items + 16 * lane
        for k in range(0, 8 * items, 4 * step):
            p, q = load_pair(base + k)
            r, s = load_pair(base + k + step)
            t, u = load_pair(base + k + 2 * step)
            v, w = load_pair(base + k + 3 * step)
            total = mix(mix(mix(mix(total, p), q), r), s)
            total = mix(mix(mix(mix(total, t), u), v), w)
    store_weak_as(sink + 8 * gpu.grid(1), total, I8)


def raw_stores(a, runs, items, warps, sink):
    """Walk by words, and store a value for each."""
    warp, lane = gpu.grid(1) // warp_size(), lane_id()
    step = 8 * warp_size()
    for run in range(warp, runs, warps):
        base = 8 * (run * items + lane)
        for k in range(0, items // warp_size(), 4):
            at = base + step * k
            p, q = load_relaxed(a + at, DEVICE), load_relaxed(a + at + step, DEVICE)
            r, s = load_relaxed(a + at + 2 * step, DEVICE), load_relaxed(a + at + 3 * step, DEVICE)
            store_weak_as(sink + at, more(p), I8)
            store_weak_as(sink + at + step, more(q), I8)
            store_weak_as(sink + at + 2 * step, more(r), I8)
            store_weak_as(sink + at + 3 * step, more(s), I8)


def subscripts(a, runs, items, warps, sink):
    """Walk by subscripts."""
    warp, lane = gpu.grid(1) // warp_size(), lane_id()
    total = 0
    for run in range(warp, runs, warps):
        for k in range(lane, items, warp_size()):
            total = mix(total, a[run * items + k])
    store_weak_as(sink + 8 * gpu.grid(1), total, I8)


def known_fold(a, runs, items, warps, sink):
    """Walk by a fold of the library."""
    warp = gpu.grid(1) // warp_size()
    total = 0
    for run in range(warp, runs, warps):
        total = gpu.fold_warp(operator.add, total, a, run * items, run * items + items)
    store_weak_as(sink + 8 * gpu.grid(1), total, I8)


def user_fold(a, runs, items, warps, sink):
    """Walk by a fold of a user."""
    warp = gpu.grid(1) // warp_size()
    total = 0
    for run in range(warp, runs, warps):
        total = gpu.fold_warp(mix, total, a, run * items, run * items + items)
    store_weak_as(sink + 8 * gpu.grid(1), total, I8)


def map_in_place(a, runs, items, warps, sink):
    """Change each item."""
    warp = gpu.grid(1) // warp_size()
    for run in range(warp, runs, warps):
        gpu.map_warp(more, a, a, run * items, run * items + items)


def map_out(a, out, runs, items, warps, sink):
    """Store something for each item in an array in memory."""
    warp = gpu.grid(1) // warp_size()
    for run in range(warp, runs, warps):
        gpu.map_warp(more, out, a, run * items, run * items + items)


RAW = {"raw": raw, "raw pairs": raw_pairs, "raw stores": raw_stores}
SPANS = {
    "subscripts": subscripts,
    "known fold": known_fold,
    "user fold": user_fold,
    "map in place": map_in_place,
    "map out": map_out,
    "complete": user_fold,
}
"""Walks. They check the pages, which may be evicted; `complete` omits the check, because each page has its own
frame."""


def device_array(items: int, target: str) -> Any:
    """Return an array in the target's memory."""
    if target != "cuda":
        return np.zeros(items, np.int64)
    from numba import cuda

    return cuda.device_array(items, np.int64)


@functools.cache
def make(function, registers):
    """Return the kernel of a function with at most `registers` registers."""
    return kernel(function, max_registers=registers)


def measure(nbytes: int, page_size: int, run_bytes: int, setting: Setting, record: Record) -> None:
    """Fill a cache and time every walk."""
    target, items = setting.device, run_bytes // 8
    threads = 1 << 18 if setting.on_gpu else 64
    with ww.open(
        RamMedium(np.arange(nbytes // 8)),
        dtype=np.int64,
        device=target,
        mode="r+",
        page_size=page_size,
        cache=nbytes + 16 * (nbytes // page_size) + (64 << 20),
        name="resident",
        timeout=60,
    ) as a:
        fill(a, nbytes // page_size)
        misses, frames = a.stats.misses, a.cache.view_words(a._nsid)["frames"]
        sink, out = memory_for(target).allocate(nbytes), device_array(nbytes // 8, target)
        runs, warps = nbytes // run_bytes, threads // (32 if setting.on_gpu else 1)
        found: dict[str, float] = {}
        for name in [*RAW, *SPANS]:
            k = make(RAW.get(name) or SPANS[name], setting.option("registers", 64))
            first = (a if name in SPANS else frames, *((out,) if name == "map out" else ()))
            args = (*first, runs, items, warps, sink.address)
            with seen_as(a, COMPLETE if name == "complete" else EVICTING):
                times = kernel_times(k, threads, *args, device=target, arrays=[a], runs=3)
            raw = "raw stores" if "map" in name else max(("raw", "raw pairs"), key=lambda each: found.get(each, 0.0))
            ceiling = (raw, found[raw]) if name in SPANS else None
            found[name] = record(f"{page_size}B/{name}", rates(nbytes / 8, times), "items/s", ceiling=ceiling)
        if a.stats.misses != misses:
            raise SystemExit(f"{a.stats.misses - misses} reads missed the cache; the rates are invalid")


@benchmark("spans", figures=["4096B", "512B"])
def run(setting: Setting, record: Record) -> None:
    """Measure pages of 4 KiB, and pages of 512 B in runs of 2 KiB."""
    nbytes = checked_nbytes(setting.pick(("16MiB", "16MiB"), ("4GiB", "8GiB"), "frames"))
    for page_size, run_bytes in ((4096, 4096), (512, 2048)):
        measure(nbytes, page_size, run_bytes, setting, record)
