"""Correctness and speed of GPU kernels on a third-party NVMe controller, compared with our controller.

QEMU's controller carries out the commands in rings that the kernels fill; a native thread forwards their doorbells. In
turn, with pages of 4, 8 and 64 KiB (one data pointer, two, and a list of them):

1. items at random, checked (a million with pages of 4 KiB);
2. a scan whose warps request adjacent pages, so that a GPU merges commands; the commands are counted;
3. random writes and a flush, after which the image is compared;
4. the same random reads by our own controller on the image's file.

For a machine without QEMU, run ``python -m lab.drives.qemu_pack build/qemu`` on a machine with QEMU, then on the first
``WARPWELL_QEMU=build/qemu/qemu-system-x86_64 python -m lab bench drive-gpu``. A rehearsal without a GPU:
``python -m lab bench drive-gpu --device cpu --quick``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import warpwell as ww
from lab.bench.timing import machine, save, table
from lab.drives.qemu import QemuDrive, QemuNamespace
from warpwell._check import checked_nbytes
from warpwell.drives.superblock import DATA_AT, head_of
from warpwell.storage import FileMedium
from warpwell.targets import kernel
from warpwell.targets.primitives import grid

PAGES = (4096, 8192, 65536)


@kernel
def gather(a, where, out):
    """Read an item each."""
    i = grid(1)
    out[i] = a[where[i]]


@kernel
def first_items(a, step, out):
    """Read the first item of each page: the lanes of a warp read neighbors."""
    i = grid(1)
    out[i] = a[i * step]


@kernel
def scatter(a, where, values):
    """Write an item each."""
    i = grid(1)
    a[where[i]] = values[i]


def require_equal(found: np.ndarray, expected: np.ndarray, label: str) -> None:
    """Raise SystemExit if a kernel has read other items than expected."""
    bad = np.flatnonzero(found != expected)
    if bad.size:
        k = int(bad[0])
        raise SystemExit(f"{label}: {bad.size} of {found.size} wrong, first item {k}: {found[k]}, not {expected[k]}")


def read_at_random(a: Any, data: np.ndarray, reads: int, device: str, label: str) -> float:
    """Check random reads in four launches; return misses a second of the last three."""
    rng = np.random.default_rng(1)
    misses = seconds = 0.0
    for part in range(4):
        where = rng.integers(0, data.size, reads // 4)
        out = np.zeros(where.size, np.int64)
        before, start = a.stats.misses, time.perf_counter()
        gather[where.size](a, where, out, device=device)
        require_equal(out, data[where], label)
        if part:  # the first launch compiles
            seconds += time.perf_counter() - start
            misses += a.stats.misses - before
    return misses / seconds


def on_the_drive(path: Path, data: np.ndarray, page: int, reads: int, options: argparse.Namespace) -> dict[str, Any]:
    """Read, scan and write through the drive's rings; return the rates."""
    device, label = options.device, f"pages of {page}"
    settings: dict[str, Any] = {"device": device, "cache": max(data.nbytes // 16, 64 * page), "page_size": page}
    with QemuDrive([QemuNamespace(path=path, block=4096)]) as qemu, qemu.open() as drive:
        with ww.open(drive.namespace(1), merge=4, **settings) as a:
            rate = read_at_random(a, data, reads, device, f"random reads, {label}")
            rung = a.cache.controller.forwarder.forwarded
        # A quarter of the array: in a smaller cache, pages of a command are evicted before their lanes read them.
        with ww.open(drive.namespace(1), merge=4, **settings | {"cache": max(data.nbytes // 4, 64 * page)}) as a:
            step = page // 8
            out = np.zeros(data.size // step, np.int64)
            first_items[out.size](a, step, out, device=device)
            require_equal(out, data[::step], f"scan, {label}")
            commands, pages = a.stats.read_commands, a.stats.bytes_read // page
            if device == "cuda" and page * 2 <= drive.max_transfer and commands * 2 > pages:
                raise SystemExit(f"{label}: {commands} commands for {pages} pages: they were not merged")
        with ww.open(drive.namespace(1), "r+", merge=4, **settings) as a:
            where = np.random.default_rng(2).permutation(data.size)[: reads // 10]
            data[where] = -where
            scatter[where.size](a, where, -where, device=device)
            a.flush()
        require_equal(np.fromfile(path, np.int64, offset=DATA_AT)[: data.size], data, f"writes, {label}")
        if drive.failure:
            raise SystemExit(str(drive.failure))
    return {"misses a second": rate, "doorbells": rung, "pages": pages, "commands": commands}


def on_the_file(path: Path, data: np.ndarray, page: int, reads: int, device: str) -> float:
    """Return misses a second by our own controller on the image's file, in the page cache."""
    cache = max(data.nbytes // 16, 64 * page)
    with (
        FileMedium(path, direct=False) as medium,
        ww.open(
            medium,
            dtype=np.int64,
            shape=data.size + DATA_AT // 8,
            device=device,
            tier="storage",
            cache=cache,
            page_size=page,
        ) as a,
    ):
        items = np.fromfile(path, np.int64)[: a.size]
        return read_at_random(a, items, reads, device, f"our controller, pages of {page}")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=ww.default_device(), choices=("cuda", "cpu"))
    parser.add_argument("--size", default="512MiB", help="size of the array")
    parser.add_argument("--reads", type=int, default=1_000_000, help="random reads with pages of 4 KiB")
    parser.add_argument("--folder", type=Path, default=None, help="folder of the image; default: in memory")
    parser.add_argument("--quick", action="store_true", help="a small array and few reads")
    parser.add_argument("--json", default=None, metavar="FILE")
    options = parser.parse_args()
    if options.quick:
        options.size, options.reads = "32MiB", 40_000
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder or "/dev/shm") as folder:
        path = Path(folder) / "image.raw"
        data = np.random.default_rng(0).integers(1, 1 << 40, checked_nbytes(options.size) // 8)
        path.write_bytes(head_of(data.shape, data.dtype))
        with open(path, "ab") as file:
            data.tofile(file)
            file.write(bytes(1 << 20))
        for page in PAGES:
            reads = options.reads * 4096 // page // 4 * 4
            found = on_the_drive(path, data, page, reads, options)
            file_rate = on_the_file(path, data, page, reads, options.device)
            rows.append(
                [
                    page,
                    reads,
                    found["misses a second"] / 1e3,
                    file_rate / 1e3,
                    found["misses a second"] / file_rate,
                    found["doorbells"],
                    found["pages"],
                    found["commands"],
                ]
            )
    head = [
        "page",
        "reads, all right",
        "K misses/s, drive",
        "our controller, on the file",
        "ratio",
        "doorbells",
        "pages scanned",
        "commands",
    ]
    table(f"kernels on {options.device}, QEMU's controller", head, rows)
    save(options.json, machine(options.device) | {"rows": rows, "head": head})


if __name__ == "__main__":
    main()
