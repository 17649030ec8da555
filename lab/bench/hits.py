"""Rates of reads that the cache answers, compared with raw loads of the same frames.

Subscripts with each kind of residency, and BaM's reference counts, for random, hot (four pages) and sequential access.
The ceiling is the rate of raw loads that bypass L1, in the same run. Walks read whole pages, one warp per page.
"""

from __future__ import annotations

import contextlib
import functools
import operator

import numpy as np

import warpwell as ww
from lab.bench.micro.bam import BamCache, bam_read
from lab.bench.runner import Record, Setting, benchmark
from lab.bench.timing import kernel_times, rates, registers_per_thread
from warpwell import gpu
from warpwell._check import checked_nbytes
from warpwell.cache.partition import FramePool
from warpwell.storage import Medium, NativeMedium, decode_command
from warpwell.targets import device, kernel, memory_for, native
from warpwell.targets.primitives import (
    activemask,
    div,
    grid,
    lane_id,
    load_relaxed_as,
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
def make(reader, pattern, registers):
    """Make a kernel in which each thread reads `rounds` items by `reader(args, index)`; `mask` bounds the index."""

    def body(a, b, c, d, mask, rounds, sink):
        i = grid(1)
        total = 0
        state = i * 0x9E3779B97F4A7 + 12345
        for k in range(rounds):
            state = state * 6364136223846793005 + 1442695040888963407
            item = reader(a, b, c, d, index_of(pattern, i, k, state, mask))
            total += item
        store_weak_as(sink + 8 * (i & 0xFFFFFF), total, I8)

    body.__name__ = f"hit_{reader.__name__}_{pattern}"
    return kernel(body, max_registers=registers)


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


EVICTING, PLACED, COMPLETE = range(3)
READERS = {
    "raw": (raw, 32, None),
    "subscript": (warpwell, None, EVICTING),
    "placed": (warpwell, None, PLACED),
    "complete": (warpwell, None, COMPLETE),
    "BaM": (bam, 32, None),
}
"""Function, register limit and residency of each reader. `subscript` reads a page's word twice, because pages are
evicted; `placed` once, because each page has its own frame; `complete` never, because all pages are cached."""
PATTERNS = ("random", "hot", "sequential")


@contextlib.contextmanager
def seen_as(a, residency):
    """Set the residency of the array's views (None: unchanged) for the block."""
    space = a.cache.space(a._nsid)
    before = space.pool, space.words
    if residency is not None:
        space.pool = FramePool(0, 0, space.pool.frames, fully_resident=residency == COMPLETE)
        space.words = space.words | {"direct_mapped": int(residency != EVICTING)}
    try:
        yield
    finally:
        space.pool, space.words = before


@kernel
def walk_raw(a, frames, page_items, pages, warps, sink):
    """Read pages, one per warp, past L1."""
    lane, i = lane_id(), grid(1)
    total = 0
    for page in range(div(i, warp_size()), pages, warps):
        for k in range(lane, page_items, warp_size()):
            total += load_relaxed_as(frames + 8 * (page * page_items + k), I8)
    store_weak_as(sink + 8 * (i & 0xFFFFFF), total, I8)


@kernel
def walk(a, frames, page_items, pages, warps, sink):
    """Read pages by subscripts, one per warp."""
    lane, i = lane_id(), grid(1)
    total = 0
    for page in range(div(i, warp_size()), pages, warps):
        for k in range(lane, page_items, warp_size()):
            total += a[page * page_items + k]
    store_weak_as(sink + 8 * (i & 0xFFFFFF), total, I8)


@kernel
def walk_pinned(a, frames, page_items, pages, warps, sink):
    """Read pages by subscripts, a pinned page per warp."""
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
    """Sum pages by spans, a pinned page per warp."""
    lane, i = lane_id(), grid(1)
    mask = activemask()
    total = 0
    for page in range(div(i, warp_size()), pages, warps):
        held = False
        if lane == 0:
            held = a.pin(page * page_items)
        syncwarp(mask)
        total = gpu.fold_warp(operator.add, total, a, page * page_items, (page + 1) * page_items)
        syncwarp(mask)
        if held:
            a.unpin(page * page_items)
    store_weak_as(sink + 8 * (i & 0xFFFFFF), total, I8)


WALKS = {
    "raw": (walk_raw, EVICTING),
    "subscript": (walk, EVICTING),
    "complete": (walk, COMPLETE),
    "complete, pinned": (walk_pinned, COMPLETE),
    "span, pinned": (walk_pinned_span, COMPLETE),
}
"""Kernel and residency of each walk over all pages."""


class Sequence(Medium):
    """Items that equal their index and are computed when they are read: data of any size without memory."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.writable, self.name = nbytes, False, "sequence"
        self.emulated, self.description = True, "sequence (emulated)"

    def native(self) -> NativeMedium:
        """Return the function that computes items."""
        return NativeMedium(sequence.address, 0, 0)

    def read(self, offset: int, nbytes: int) -> np.ndarray:
        """Return items."""
        return np.arange(offset // 8, (offset + nbytes) // 8, dtype=np.int64).view(np.uint8)

    def write(self, offset: int, data: np.ndarray) -> None:
        """Raise an error, because the medium is read-only."""
        raise OSError("a sequence is read-only")

    def sync(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@native
def sequence(state, command, tag):
    """Fill a buffer with the indices of its items."""
    _, offset, nbytes, buffer = decode_command(command)
    for k in range(nbytes >> 3):
        store_weak_as(buffer + 8 * k, (offset >> 3) + k, I8)
    return 0


def fill(a, pages: int) -> None:
    """Load all pages. Concurrent loads can evict a page again, so this repeats until no page is missing."""
    for _ in range(5):
        before = a.stats.misses
        a.cache.pin(a._nsid, 0, pages)
        a.cache.unpin(a._nsid, 0, pages)
        if a.stats.misses == before:
            return


def measure(nbytes: int, page_size: int, setting: Setting, record: Record) -> None:
    """Fill a cache and time every reader and walk."""
    target, items, pages = setting.device, nbytes // 8, nbytes // page_size
    threads = 1 << 18 if setting.on_gpu else 64
    rounds = setting.pick((4000, 20000), (256, 1024), "rounds")
    with ww.open(
        Sequence(nbytes),
        dtype=np.int64,
        device=target,
        cache=nbytes + 16 * pages + (64 << 20),
        page_size=page_size,
        merge=1,
        name="resident",
        timeout=60,
    ) as a:
        fill(a, pages)
        misses, frames = a.stats.misses, a.cache.view_words(a._nsid)["frames"]
        references, sink = BamCache.resident(a), memory_for(target).allocate(8 << 24)
        for p, pattern in enumerate(PATTERNS):
            mask = 4 * page_size // 8 - 1 if pattern == "hot" else items - 1
            ceiling = None
            for name, (reader, registers, residency) in READERS.items():
                k = make(reader, p, registers)
                first = {warpwell: (a, 0, 0, 0), bam: (a, references.address, 0, 0)}.get(reader, (frames, 0, 0, 0))
                args = (*first, mask, rounds, sink.address)
                with seen_as(a, residency):
                    times = kernel_times(k, threads, *args, device=target, arrays=[a], runs=3)
                rate = record(f"{pattern}/{page_size}B/{name}", rates(threads * rounds, times), "1/s", ceiling=ceiling)
                ceiling = ceiling or ("raw", rate)
                if setting.on_gpu and pattern == "random" and name == "subscript" and page_size == 4096:
                    record("registers", registers_per_thread(k, len(args)), "registers", better="lower")
        ceiling = None
        for name, (k, residency) in WALKS.items():
            warps = threads // (32 if setting.on_gpu else 1)
            with seen_as(a, residency):
                args = (a, frames, page_size // 8, pages, warps, sink.address)
                times = kernel_times(k, threads, *args, device=target, arrays=[a], runs=3)
            rate = record(f"walk/{page_size}B/{name}", rates(items, times), "1/s", ceiling=ceiling)
            ceiling = ceiling or ("raw", rate)
        if a.stats.misses != misses:
            raise SystemExit(f"{a.stats.misses - misses} reads missed the cache; the rates are invalid")


@benchmark("hits", figures=["random", "hot", "sequential", "walk"])
def run(setting: Setting, record: Record) -> None:
    """Measure with pages of 4 KiB and 512 B."""
    nbytes = checked_nbytes(setting.pick(("16MiB", "64MiB"), ("4GiB", "8GiB"), "frames"))
    for page_size in setting.option("page-size", [4096, 512]):
        measure(1 << nbytes.bit_length() - 1, page_size, setting, record)
