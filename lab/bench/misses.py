"""Rates of misses by tier and page size, and of bulk reads, compared with a copy.

Misses read unique pages at random, one command per page, from data many times larger than the cache. The storage tier
is on host memory (`ram`), so the rates measure queues, controller and transfers, and no drive; with
``-o drives=1,4`` also on emulated drives. The host tier reads records of 4 KiB, one warp per record. Bulk reads load
everything: ``a.prefetch()``, ``a[:]`` and ``np.asarray(a)``.
"""

from __future__ import annotations

import numpy as np

import warpwell as ww
from lab.bench.runner import Record, Setting, benchmark
from lab.bench.timing import call_times, kernel_times, rates
from lab.media import Latency, rates_of
from warpwell import gpu
from warpwell._check import checked_nbytes
from warpwell.storage import Medium, RamMedium, Striped
from warpwell.targets import kernel, memory_for
from warpwell.targets.primitives import div, grid, lane_id, store_weak_as, warp_size

I8 = np.dtype(np.int64)
DRIVE = rates_of("P5800X")
STRIPE = 1 << 16
ODD = 0x9E3779B1


@kernel
def touch(a, page_items, mask, wrong):
    """Read one item of a page that no other thread reads."""
    i = grid(1)
    page = (i * ODD + 12345) & mask
    at = page * page_items + (i & (page_items - 1))
    if a[at] != at:
        gpu.atomic_add(wrong, 0, 1)


@kernel
def records(a, mask, sink):
    """Read a whole record per warp."""
    t = grid(1)
    record = (div(t, warp_size()) * ODD + 777) & mask
    total = 0
    for k in range(lane_id(), 512, warp_size()):
        total += a[record, k]
    store_weak_as(sink + 8 * (t & 0xFFFFF), total, I8)


def emulated(data: np.ndarray, drives: int) -> Medium:
    """Return emulated drives, striped, that hold the data."""
    parts = [RamMedium(-(-data.nbytes // (STRIPE * drives)) * STRIPE) for _ in range(drives)]
    Striped(parts, STRIPE).write(0, data)
    return Striped([Latency(part, DRIVE.name) for part in parts], STRIPE)


def misses(tier: str, data: np.ndarray, page_size: int, setting: Setting, drives: int = 0) -> tuple[list[float], float]:
    """Return pages per second of unique random pages, and commands per page."""
    items, target = page_size // 8, setting.device
    limit = 1 << 23 if setting.on_gpu else 1 << 15
    count = 1 << min(limit, data.nbytes // page_size).bit_length() - 1
    part = data[: count * items]
    options = {name: int(setting.options[name]) for name in ("threads", "queues", "depth") if name in setting.options}
    options = ({"threads": 14} if setting.on_gpu else {}) | options if tier == "storage" else {}
    with ww.open(
        emulated(part, drives) if drives else RamMedium(part),
        dtype=np.int64,
        shape=part.shape,
        device=target,
        tier=tier,
        cache=max(part.nbytes // 8, page_size),
        page_size=page_size,
        merge=1,
        timeout=60,
        name=f"{tier} {page_size}",
        **options,
    ) as a:
        wrong = np.zeros(1, np.int64)
        if setting.on_gpu:
            from numba import cuda

            wrong = cuda.to_device(wrong)
        before, runs = a.cache.controller.commands, 3
        times = kernel_times(touch, count, a, items, count - 1, wrong, device=target, arrays=[a], runs=runs)
        commands = (a.cache.controller.commands - before) / (runs + 1) / count
        bad = int(np.asarray(wrong.copy_to_host() if setting.on_gpu else wrong)[0])
        if bad:
            raise SystemExit(f"{bad} items were wrong")
        return rates(count, times), commands


def host_records(data: np.ndarray, target: str) -> list[float]:
    """Return bytes per second of 4 KiB records from the host tier."""
    count = data.nbytes // 4096
    with ww.open(RamMedium(data), dtype=np.int64, shape=(count, 512), device=target, tier="host", name="records") as a:
        sink = memory_for(target).allocate(8 << 20)
        width, warps = (32, 1 << 18) if target == "cuda" else (1, 1 << 12)
        times = kernel_times(records, warps * width, a, count - 1, sink.address, device=target)
        return rates(warps * 4096, times)


def copy_rates(target: str) -> list[float]:
    """Return bytes per second of a large copy: from pinned memory to the device, or within the host."""
    nbytes = 1 << 30 if target == "cuda" else 1 << 26
    if target != "cuda":
        source, into = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        return rates(nbytes, call_times(lambda: np.copyto(into, source), 5))
    from numba import cuda

    pinned = cuda.pinned_array(nbytes, np.uint8)
    pinned[:] = 1
    device_array = cuda.device_array(nbytes, np.uint8)
    times = []
    for _ in range(4):
        start, end = cuda.event(), cuda.event()
        start.record()
        device_array.copy_to_device(pinned)
        end.record()
        end.synchronize()
        times.append(cuda.event_elapsed_time(start, end) / 1000)
    return rates(nbytes, times[1:])


def bulk(nbytes: int, setting: Setting, record: Record, copy: float) -> None:
    """Measure reads of everything into an empty cache that holds it."""
    data = np.arange(nbytes // 8, dtype=np.int64)
    with ww.open(
        RamMedium(data),
        dtype=np.int64,
        device=setting.device,
        tier="storage",
        page_size=4096,
        cache=nbytes + nbytes // 4 + (64 << 20),
        threads=14 if setting.on_gpu else 2,
        name="bulk",
    ) as a:

        def prefetch() -> None:
            counts = a.prefetch().result()
            if counts.loaded != a.nbytes // a.cache.page_size:
                raise SystemExit(f"not all pages were loaded: {counts}")

        if not np.array_equal(a[: 1 << 20], data[: 1 << 20]):
            raise SystemExit("a slice has wrong items")
        for name, call in {
            "prefetch": prefetch,
            "slice": lambda: a[:].read(),
            "asarray": lambda: np.asarray(a),
        }.items():
            times = call_times(call, 3, a.evict)
            record(f"bulk/{name}", rates(nbytes, times), "B/s", ceiling=("copy", copy))


@benchmark("misses", figures=["storage", "host-cached", "host", "drives", "bulk"])
def run(setting: Setting, record: Record) -> None:
    """Measure all of it."""
    data = np.arange(checked_nbytes(setting.pick(("64MiB", "64MiB"), ("1GiB", "2GiB"), "data")) // 8, dtype=np.int64)
    sizes = setting.option("page-size", [512, 4096])
    for tier in ("storage", "host-cached"):
        for page_size in sizes:
            found, commands = misses(tier, data, page_size, setting)
            record(f"{tier}/{page_size}B", found, "pages/s")
            if tier == "storage":
                record(f"{tier}/{page_size}B/commands", commands, "commands/page", better="lower")
    for drives in setting.option("drives", [0]):
        for page_size in sizes if drives else ():
            found, commands = misses("storage", data, page_size, setting, drives)
            limit = drives * DRIVE.read_iops[page_size >= 4096]
            record(
                f"drives/{drives}/{page_size}B",
                [rate * commands for rate in found],
                "commands/s",
                ceiling=("drives", limit),
            )
            record.emulated.add("drive")
    copy = record("copy", copy_rates(setting.device), "B/s")
    record("host/records", host_records(data[: min(data.size, 1 << 27)], setting.device), "B/s", ceiling=("copy", copy))
    bulk(checked_nbytes(setting.pick(("64MiB", "64MiB"), ("1GiB", "4GiB"))), setting, record, copy)
