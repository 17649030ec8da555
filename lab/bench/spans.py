"""How fast do kernels walk pages that are in the cache, by spans and raw?

Each warp takes runs of `--run` bytes in grid stride. Raw: the same walk of the same frames by plain address, past L1.
"""

from __future__ import annotations

import argparse
import functools
import time
from typing import Any

import numpy as np

import warpwell as ww
from lab.bench.hits import COMPLETE, EVICTING, seen_as
from lab.bench.timing import kernel_seconds, machine, registers_and_occupancy, save, table
from warpwell.cache import parse_size
from warpwell.storage import RamMedium
from warpwell.targets import (
    DEVICE,
    device,
    kernel,
    lane_id,
    load_pair,
    load_relaxed,
    memory_for,
    store_weak_as,
    warp_size,
)

I8 = np.dtype(np.int64)


@device
def mix(total, item):
    """Fold an item in a way that the library does not know."""
    return (total ^ item) + item


@device
def more(item):
    """Return what is stored for an item."""
    return item + 1


def raw(a, runs, items, warps, sink):
    """Walk by words."""
    warp, lane = ww.grid(1) // warp_size(), lane_id()
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
    store_weak_as(sink + 8 * ww.grid(1), total, I8)


def raw_pairs(a, runs, items, warps, sink):
    """Walk by pairs of words."""
    warp, lane = ww.grid(1) // warp_size(), lane_id()
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
    store_weak_as(sink + 8 * ww.grid(1), total, I8)


def raw_stores(a, runs, items, warps, sink):
    """Walk by words, and store something for each."""
    warp, lane = ww.grid(1) // warp_size(), lane_id()
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
    warp, lane = ww.grid(1) // warp_size(), lane_id()
    total = 0
    for run in range(warp, runs, warps):
        for k in range(lane, items, warp_size()):
            total = mix(total, a[run * items + k])
    store_weak_as(sink + 8 * ww.grid(1), total, I8)


def known_fold(a, runs, items, warps, sink):
    """Walk by a fold that the library knows."""
    warp = ww.grid(1) // warp_size()
    total = 0
    for run in range(warp, runs, warps):
        total = ww.fold_warp(ww.add, total, a, run * items, run * items + items)
    store_weak_as(sink + 8 * ww.grid(1), total, I8)


def user_fold(a, runs, items, warps, sink):
    """Walk by a fold of a user."""
    warp = ww.grid(1) // warp_size()
    total = 0
    for run in range(warp, runs, warps):
        total = ww.fold_warp(mix, total, a, run * items, run * items + items)
    store_weak_as(sink + 8 * ww.grid(1), total, I8)


def map_in_place(a, runs, items, warps, sink):
    """Change each item."""
    warp = ww.grid(1) // warp_size()
    for run in range(warp, runs, warps):
        ww.map_warp(more, a, a, run * items, run * items + items)


def map_out(a, out, runs, items, warps, sink):
    """Store something for each item in an array in memory."""
    warp = ww.grid(1) // warp_size()
    for run in range(warp, runs, warps):
        ww.map_warp(more, out, a, run * items, run * items + items)


RAW = {"raw": raw, "raw pairs": raw_pairs, "raw stores": raw_stores}
SPANS = {
    "subscripts": subscripts,
    "known fold": known_fold,
    "user fold": user_fold,
    "map in place": map_in_place,
    "map out": map_out,
    "complete": user_fold,
}
"""Walks with the look at pages that take turns in the frames; `complete` without, as where all pages have their own."""


def device_array(items: int, target: str) -> Any:
    """Return an array in the target's memory."""
    if target != "cuda":
        return np.zeros(items, np.int64)
    from numba import cuda

    return cuda.device_array(items, np.int64)


@functools.cache
def make(function, registers):
    """Return the kernel of a function with so many registers."""
    return kernel(function, max_registers=registers)


def run(nbytes: int, page_size: int, run_bytes: int, target: str, threads: int, names: list[str], counts: list) -> dict:
    """Fill a cache and time every walk."""
    items = run_bytes // 8
    a = ww.open(
        RamMedium(np.arange(nbytes // 8)),
        dtype=np.int64,
        device=target,
        mode="r+",
        page_size=page_size,
        cache=nbytes + 16 * (nbytes // page_size) + (64 << 20),
        name="resident",
        timeout=60,
    )
    memory = memory_for(target)
    try:
        begun, pages = time.perf_counter(), nbytes // page_size
        for _ in range(5):
            before = a.stats.misses
            a.cache.hold(a._nsid, 0, pages)
            a.cache.unpin(a._nsid, 0, pages)
            if a.stats.misses == before:
                break
        print(f"{pages} pages of {page_size} B filled in {time.perf_counter() - begun:.1f} s", flush=True)
        misses = a.stats.misses
        frames = a.cache.constants(a._nsid)["frames"]
        sink = memory.allocate(nbytes)
        out = device_array(nbytes // 8, target)
        runs, warps = nbytes // run_bytes, threads // (32 if target == "cuda" else 1)
        rows, rates = [], {}
        for name in names:
            for registers in counts if name in SPANS else counts[:1]:
                k = make(RAW.get(name) or SPANS[name], registers)
                args = (
                    a if name in SPANS else frames,
                    *((out,) if name == "map out" else ()),
                    runs,
                    items,
                    warps,
                    sink.address,
                )
                try:
                    with seen_as(a, COMPLETE if name == "complete" else EVICTING):
                        seconds = kernel_seconds(k, threads, *args, device=target, arrays=[a], runs=3)
                except Exception as error:
                    print(f"{name}, {registers} registers: {error!r:.300}", flush=True)
                    continue
                rate = rates[name, registers] = nbytes / 8 / seconds / 1e9
                base = max(
                    v
                    for (n, _), v in rates.items()
                    if n in (("raw stores",) if "map" in name else ("raw", "raw pairs"))
                )
                used = registers_and_occupancy(k, len(args)) if target == "cuda" else (0, 0.0)
                rows.append([name, registers, used[0], f"{used[1]:.2f}", rate, rate / base])
                print(*rows[-1], flush=True)
        head = ["walk", "registers", "used", "occupancy", "G items/s", "of raw"]
        table(f"spans, pages of {page_size} B, runs of {run_bytes} B", head, rows)
        if a.stats.misses != misses:
            print(f"{a.stats.misses - misses} misses: these are no figures of resident pages")
        return {"page_size": page_size, "run": run_bytes, "rows": rows}
    finally:
        a.close()


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default=ww.default_device())
    parser.add_argument("--frames", default=None, help="bytes of frames (8GiB on cuda, 16MiB on cpu)")
    parser.add_argument("--pages", nargs="+", default=["4096:4096", "512:2048"], help="page size:bytes of a run")
    parser.add_argument("--walks", nargs="+", default=[*RAW, *SPANS], choices=[*RAW, *SPANS])
    parser.add_argument("--registers", type=int, nargs="+", default=[32, 40, 64])
    parser.add_argument("--json", default=None, metavar="FILE")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    nbytes = parse_size(options.frames or ("8GiB" if on_gpu else "16MiB"))
    results = machine(options.device)
    results["spans"] = [
        run(
            nbytes,
            *(int(n) for n in shape.split(":")),
            options.device,
            1 << 18 if on_gpu else 64,
            options.walks,
            options.registers,
        )
        for shape in options.pages
    ]
    save(options.json, results)


if __name__ == "__main__":
    main()
