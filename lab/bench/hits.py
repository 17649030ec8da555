"""How fast are reads that the cache answers, against raw reads of the same frames?

Raw with L1, raw past L1, Warpwell's accessor as shipped (miss path linked in), and BaM's reference counts, for
random, hot and sequential access, with and without a store for each read. Ratios are to raw past L1 in this run.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import time

import numpy as np

import warpwell as ww
from lab.bench.timing import kernel_seconds, machine, registers_and_occupancy, save, table
from warpwell.cache import parse_size
from warpwell.cache.partition import ResidentPool
from warpwell.storage import Medium, NativeMedium
from warpwell.study.bench.bam import BamCache, bam_read
from warpwell.targets import (
    activemask,
    device,
    div,
    grid,
    kernel,
    lane_id,
    load_relaxed_as,
    load_weak_as,
    memory_for,
    native,
    store_weak_as,
    syncwarp,
    warp_size,
)

I8 = np.dtype(np.int64)


@device
def index_of(pattern, i, k, state, mask):
    """Return the item that thread i reads in round k: 0 random, 1 hot pages, 2 sequential."""
    if pattern == 2:
        return (i + (k << 18)) & mask
    return (state >> 13) & mask


@functools.cache
def make(reader, stores, pattern, registers=32):
    """Make a kernel that reads `rounds` items a thread by `reader(args, index)`; items beyond `mask` are not read."""

    def body(a, b, c, d, mask, rounds, sink):
        i = grid(1)
        total = 0
        state = i * 0x9E3779B97F4A7 + 12345
        for k in range(rounds):
            state = state * 6364136223846793005 + 1442695040888963407
            item = reader(a, b, c, d, index_of(pattern, i, k, state, mask))
            total += item
            if stores:
                store_weak_as(sink + 8 * ((i + (k << 18)) & 0xFFFFFF), item, I8)
        if not stores:
            store_weak_as(sink + 8 * (i & 0xFFFFFF), total, I8)

    body.__name__ = f"hit_{reader.__name__}_{pattern}_{int(stores)}"
    return kernel(body, max_registers=registers)


@device
def raw_l1(a, b, c, d, index):
    """Read past no cache."""
    return load_weak_as(a + 8 * index, I8)


@device
def raw(a, b, c, d, index):
    """Read past L1."""
    return load_relaxed_as(a + 8 * index, I8)


@device
def warpwell(a, b, c, d, index):
    """Read by subscript."""
    return a[index]


@device
def bam(a, b, c, d, index):
    """Read by BaM's protocol."""
    return bam_read(b, 8 * index)


READERS = {
    "raw L1": (raw_l1, 32),
    "raw": (raw, 32),
    "warpwell": (warpwell, None),
    "at 64 regs": (warpwell, 64),
    "placed": (warpwell, None),
    "complete": (warpwell, None),
    "BaM": (bam, 32),
}
"""Readers: `warpwell` looks at a page's word twice, as where pages take turns in the frames; `placed` once, as where
each page has its own; `complete` never, as where all are there."""
EVICTING, PLACED, COMPLETE = range(3)
RESIDENCIES = {"warpwell": EVICTING, "at 64 regs": EVICTING, "placed": PLACED, "complete": COMPLETE}
PATTERNS = ("random", "hot", "sequential")


@contextlib.contextmanager
def seen_as(a, residency):
    """Give views of the array this residency (None: what it is) for the block."""
    before = a.cache._resident
    if residency is not None:
        pool = ResidentPool(0)
        pool.complete, pool.due = residency == COMPLETE, lambda: False
        a.cache._resident = [None if residency == EVICTING else pool]
    try:
        yield
    finally:
        a.cache._resident = before


@kernel
def walk_raw(a, frames, page_items, pages, warps, sink):
    """Read pages, a warp a page, past L1."""
    lane, i = lane_id(), grid(1)
    total = 0
    for page in range(div(i, warp_size()), pages, warps):
        for k in range(lane, page_items, warp_size()):
            total += load_relaxed_as(frames + 8 * (page * page_items + k), I8)
    store_weak_as(sink + 8 * (i & 0xFFFFFF), total, I8)


@kernel
def walk(a, frames, page_items, pages, warps, sink):
    """Read pages by subscripts, a warp a page."""
    lane, i = lane_id(), grid(1)
    total = 0
    for page in range(div(i, warp_size()), pages, warps):
        for k in range(lane, page_items, warp_size()):
            total += a[page * page_items + k]
    store_weak_as(sink + 8 * (i & 0xFFFFFF), total, I8)


@kernel
def walk_pinned(a, frames, page_items, pages, warps, sink):
    """Read pages by subscripts, a warp a page, which it holds meanwhile."""
    lane, i = lane_id(), grid(1)
    mask = activemask()
    total = 0
    for page in range(div(i, warp_size()), pages, warps):
        held = False
        if lane == 0:
            held = a.pin(page * page_items)
        syncwarp(mask)
        for k in range(lane, page_items, warp_size()):
            total += a[page * page_items + k]
        syncwarp(mask)
        if held:
            a.unpin(page * page_items)
    store_weak_as(sink + 8 * (i & 0xFFFFFF), total, I8)


@kernel
def walk_pinned_span(a, frames, page_items, pages, warps, sink):
    """Sum pages by spans, a warp a page, which it holds meanwhile."""
    lane, i = lane_id(), grid(1)
    mask = activemask()
    total = 0
    for page in range(div(i, warp_size()), pages, warps):
        held = False
        if lane == 0:
            held = a.pin(page * page_items)
        syncwarp(mask)
        total = ww.fold_warp(ww.add, total, a, page * page_items, (page + 1) * page_items)
        syncwarp(mask)
        if held:
            a.unpin(page * page_items)
    store_weak_as(sink + 8 * (i & 0xFFFFFF), total, I8)


def walks(a, page_size, target, threads, sink):
    """Time walks over all pages, and print a table."""
    pages, items = a.size * 8 // page_size, page_size // 8
    kinds = [
        ("raw", walk_raw, EVICTING),
        ("subscripts", walk, EVICTING),
        ("placed", walk, PLACED),
        ("complete", walk, COMPLETE),
        ("placed, pinned", walk_pinned, PLACED),
        ("complete, pinned", walk_pinned, COMPLETE),
        ("span, pinned", walk_pinned_span, COMPLETE),
    ]
    frames, rows, raw = a.cache.constants(a._nsid)["frames"], [], 0.0
    for name, k, residency in kinds:
        with seen_as(a, residency):
            args = (a, frames, items, pages, threads // (32 if target == "cuda" else 1), sink.address)
            seconds = kernel_seconds(k, threads, *args, device=target, arrays=[a], runs=3)
        rate = a.size / seconds / 1e9
        raw = raw or rate
        rows.append([name, rate, rate / raw])
    table(f"walks, a warp a page of {page_size} B", ["reads", "G/s", "of raw"], rows)
    return rows


class Sequence(Medium):
    """Items that are their own index, made when they are read: data of any size that takes no memory."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.writable, self.name = nbytes, False, "sequence"
        self.emulated, self.description = True, "sequence (emulated)"

    def native(self) -> NativeMedium:
        """Return the function that makes items."""
        return NativeMedium(sequence.address, 0, 0)

    def read(self, offset: int, nbytes: int) -> np.ndarray:
        """Return items."""
        return np.arange(offset // 8, (offset + nbytes) // 8, dtype=np.int64).view(np.uint8)

    def write(self, offset: int, data: np.ndarray) -> None:
        """Refuse."""
        raise OSError("a sequence is not written")

    def sync(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@native
def sequence(state, opcode, offset, nbytes, buffer, tag):
    """Fill a buffer with the indices of its items."""
    for k in range(nbytes >> 3):
        store_weak_as(buffer + 8 * k, (offset >> 3) + k, I8)
    return 0


def run(nbytes: int, page_size: int, target: str, rounds: int, threads: int, stores: list[bool]) -> dict:
    """Fill a cache and time every reader."""
    begun = time.perf_counter()
    items = nbytes // 8
    table_bytes = 16 * (nbytes // page_size) + (64 << 20)
    a = ww.open(
        Sequence(nbytes),
        dtype=np.int64,
        device=target,
        cache=nbytes + table_bytes,
        page_size=page_size,
        merge=1,
        name="resident",
        timeout=60,
    )
    memory = memory_for(target)
    try:
        pages = nbytes // page_size
        opened = time.perf_counter()
        # more than once: while many bring pages in, the clock passes frames that were given back unused
        for _ in range(5):
            before = a.stats.misses
            a.cache.hold(a._nsid, 0, pages)
            a.cache.unpin(a._nsid, 0, pages)
            if a.stats.misses == before:
                break
        filled = time.perf_counter()
        print(f"opened in {opened - begun:.1f} s, {pages} pages of {page_size} B filled in {filled - opened:.1f} s")
        misses = a.stats.misses
        constants = a.cache.constants(a._nsid)
        references = BamCache.resident(a)
        sink = memory.allocate(8 << 24)
        results: dict = {"page_size": page_size, "frame_bytes": a.cache.frames * page_size, "rows": []}
        rows = []
        for store in stores:
            for p, pattern in enumerate(PATTERNS):
                mask = 4 * page_size // 8 - 1 if pattern == "hot" else items - 1
                rates = {}
                for name, (reader, registers) in READERS.items():
                    k = make(reader, store, p, registers)
                    args = {
                        warpwell: (a, 0, 0, 0),
                        bam: (a, references.address, 0, 0),
                    }.get(reader, (constants["frames"], 0, 0, 0))
                    args = (*args, mask, rounds, sink.address)
                    # said beforehand, so that a failure of the GPU has a name
                    print(f"{pattern}, {'with' if store else 'without'} stores: {name}", file=sys.stderr, flush=True)
                    with seen_as(a, RESIDENCIES.get(name)):
                        seconds = kernel_seconds(k, threads, *args, device=target, arrays=[a], runs=3)
                    rates[name] = threads * rounds / seconds / 1e9
                    if target == "cuda":
                        rates[name + " regs"], rates[name + " occupancy"] = registers_and_occupancy(k, len(args))
                row = [pattern, "yes" if store else "no"]
                row += [rates[n] for n in READERS]
                row += [rates[n] / rates["raw"] for n in READERS if n != "raw"]
                if target == "cuda":
                    row += [
                        f"{rates['warpwell regs']}/{rates['at 64 regs regs']}",
                        f"{rates['warpwell occupancy']:.2f}/{rates['at 64 regs occupancy']:.2f}",
                    ]
                rows.append(row)
                results["rows"].append({"pattern": pattern, "store": store, **rates})
        head = ["pattern", "store", *(f"{n} G/s" for n in READERS), *(f"{n}/raw" for n in READERS if n != "raw")]
        if target == "cuda":
            head += ["regs", "occupancy"]
        table(f"hit path, pages of {page_size} B, {a.cache.frames * page_size / 2**30:.3g} GiB of frames", head, rows)
        results["walks"] = walks(a, page_size, target, threads, sink)
        if a.stats.misses != misses:
            raise SystemExit(f"{a.stats.misses - misses} reads missed: these are no hit figures")
        return results
    finally:
        a.close()


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default=ww.default_device())
    parser.add_argument("--frames", default=None, help="bytes of frames (8GiB on cuda, 64MiB on cpu)")
    parser.add_argument("--page-size", type=int, nargs="+", default=[4096, 512])
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--no-stores", action="store_true")
    parser.add_argument("--json", default=None, metavar="FILE")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    nbytes = parse_size(options.frames or ("8GiB" if on_gpu else "64MiB"))
    threads = 1 << 18 if on_gpu else 64
    rounds = options.rounds or (1024 if on_gpu else 20000)
    stores = [False] if options.no_stores else [False, True]
    results = machine(options.device)
    nbytes = 1 << nbytes.bit_length() - 1
    results["pages"] = [run(nbytes, p, options.device, rounds, threads, stores) for p in options.page_size]
    save(options.json, results)


if __name__ == "__main__":
    main()
