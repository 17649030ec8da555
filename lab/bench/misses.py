"""How fast do misses go, by tier and page size?

Unique random pages, one command a page (no merging), data many times the cache. The storage tier stands over
host memory (`ram`), so it measures queues, controller and transfers, not a drive; commands are counted by the
controller. With ``--drives``, it stands over so many emulated drives as well, beside the rate that they emulate. The
host tier reads 4 KiB records at random, a warp a record, beside the bus rate of a pinned copy.
"""

from __future__ import annotations

import argparse

import numpy as np

import warpwell as ww
from lab.bench.timing import best, kernel_seconds, machine, save, table
from warpwell.cache import parse_size
from warpwell.storage import Latency, Medium, RamMedium, Striped
from warpwell.storage.latency import rates_of
from warpwell.targets import div, grid, kernel, lane_id, memory_for, store_weak_as, warp_size

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
        ww.atomic_add(wrong, 0, 1)


@kernel
def records(a, mask, sink):
    """Read a whole record a warp."""
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


def misses(
    tier: str, data: np.ndarray, pages: int, page_size: int, target: str, options: dict, drives: int = 0
) -> list:
    """Return a row: rate of unique random pages."""
    items = page_size // 8
    count = 1 << min(pages, data.nbytes // page_size).bit_length() - 1
    part = data[: count * items]
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
        times, commands, before = [], [], 0
        wrong = np.zeros(1, np.int64)
        if target == "cuda":
            from numba import cuda

            wrong = cuda.to_device(wrong)
        for _ in range(2):
            before = a.cache.controller.commands
            seconds = kernel_seconds(touch, count, a, items, count - 1, wrong, device=target, arrays=[a], runs=1)
            times.append(seconds)
            commands.append((a.cache.controller.commands - before) / 2)
        bad = int(np.asarray(wrong.copy_to_host() if target == "cuda" else wrong)[0])
        if bad:
            raise SystemExit(f"{bad} items were wrong")
        seconds = min(times)
        rate = count / seconds
        return [
            tier,
            page_size,
            count,
            part.nbytes / (a.cache.frames * page_size),
            commands[-1] / count,
            rate / 1e6,
            rate * page_size / 1e9,
        ]


def host_records(data: np.ndarray, target: str) -> list:
    """Return a row: bytes a second of 4 KiB records from the host tier, and of a pinned copy."""
    count = data.nbytes // 4096
    memory = memory_for(target)
    with ww.open(RamMedium(data), dtype=np.int64, shape=(count, 512), device=target, tier="host", name="records") as a:
        sink = memory.allocate(8 << 20)
        width = 32 if target == "cuda" else 1
        warps = 1 << 18 if target == "cuda" else 1 << 12
        seconds = kernel_seconds(records, warps * width, a, count - 1, sink.address, device=target, runs=5)
        rate = warps * 4096 / seconds / 1e9
        return ["host", rate, copy_rate(target)]


def copy_rate(target: str) -> float:
    """Return GB/s of a large copy: host to device from pinned memory, or within the host."""
    nbytes = 1 << 30 if target == "cuda" else 1 << 26
    if target != "cuda":
        import time

        source, into = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)

        def once() -> float:
            begun = time.perf_counter()
            into[:] = source
            return time.perf_counter() - begun

        return nbytes / best(once) / 1e9
    from numba import cuda

    source = cuda.pinned_array(nbytes, np.uint8)
    source[:] = 1
    into = cuda.device_array(nbytes, np.uint8)

    def copy() -> float:
        start, end = cuda.event(), cuda.event()
        start.record()
        into.copy_to_device(source)
        end.record()
        end.synchronize()
        return cuda.event_elapsed_time(start, end) / 1000

    copy()
    return nbytes / best(copy) / 1e9


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default=ww.default_device())
    parser.add_argument("--data", default=None, help="bytes of data (2GiB on cuda, 64MiB on cpu)")
    parser.add_argument("--page-size", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--threads", type=int, default=None, help="service threads (14 on cuda)")
    parser.add_argument("--queues", type=int, default=None)
    parser.add_argument("--depth", type=int, default=None)
    parser.add_argument("--tiers", nargs="+", default=["storage", "host-cached"])
    parser.add_argument("--drives", type=int, nargs="+", default=[], help="numbers of emulated drives")
    parser.add_argument("--json", default=None, metavar="FILE")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    nbytes = parse_size(options.data or ("2GiB" if on_gpu else "64MiB"))
    data = np.arange(nbytes // 8, dtype=np.int64)
    pages = 1 << 23 if on_gpu else 1 << 15
    chosen = {k: getattr(options, k) for k in ("threads", "queues", "depth") if getattr(options, k)}
    if on_gpu:
        chosen.setdefault("threads", 14)
    rows = [
        misses(tier, data, pages, size, options.device, chosen if tier == "storage" else {})
        for tier in options.tiers
        for size in options.page_size
    ]
    head = ["tier", "page B", "pages", "data/cache", "commands/page", "M pages/s", "GB/s"]
    table("miss path over ram (no drive), unique random pages", head, rows)
    over = [
        [n, size, row[4] * row[5], n * DRIVE.read_iops[size >= 4096] / 1e6]
        for n in options.drives
        for size in options.page_size
        for row in [misses("storage", data, pages, size, options.device, chosen, n)]
    ]
    if over:
        table(
            f"misses over emulated {DRIVE.name}",
            ["drives", "page B", "M commands/s", "drives' M/s", "ratio"],
            [[*row, row[2] / row[3]] for row in over],
        )
    record = host_records(data[: min(data.size, 1 << 28)], options.device)
    table(
        "4 KiB records at random, a warp a record",
        ["tier", "GB/s", "copy GB/s", "ratio"],
        [[*record, record[1] / record[2]]],
    )
    save(options.json, machine(options.device) | {"misses": rows, "head": head, "drives": over, "records": record})


if __name__ == "__main__":
    main()
