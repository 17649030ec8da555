"""Reads per second of a drive that QEMU emulates, compared with QEMU's block layer and our controller on its file.

Reads of 4 KiB, all over an image that the page cache holds, at the same depth: by ``qemu-img bench`` (no controller),
by `DriveMedium` alone, and by the file's own medium alone, which one thread drives; then by misses of a kernel through
the drive's rings (`DriveController`), through `DriveMedium` and through our own controller on the file. On "cpu" at
most 64 threads wait for misses, at any depth.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

import warpwell as ww
from lab.bench.file import pump
from lab.bench.timing import machine, save, table
from lab.drives.qemu import QemuDrive, QemuNamespace
from warpwell import gpu
from warpwell._check import checked_nbytes
from warpwell.drives import DriveMedium
from warpwell.storage import FileMedium, Medium
from warpwell.targets import kernel, memory_for
from warpwell.targets.primitives import grid

PAGE = 4096
ODD = 0x9E3779B1


@kernel
def walk(a, count, mask, wrong):
    """Read one item of each of `count` pages that no other thread reads."""
    i = grid(1)
    for k in range(count):
        n = i * count + k
        at = ((n * ODD + 12345) & mask) * 512 + (n & 511)
        if a[at] != at:
            gpu.atomic_add(wrong, 0, 1)


def qemu_img(path: Path, depth: int, count: int) -> float:
    """Return reads a second of ``qemu-img bench``."""
    program = ["qemu-img", "bench", "-f", "raw", "-i", "threads", "-t", "writeback", "-d", str(depth), "-c", str(count)]
    output = subprocess.run(
        [*program, "-s", str(PAGE), "-S", str(12345 * PAGE), str(path)], capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"completed in ([0-9.]+) seconds", output)
    assert found, output
    return count / float(found[1])


def medium_rate(medium: Medium, depth: int, count: int) -> float:
    """Return reads a second of a medium, started and completed by one thread."""
    native = medium.native()
    assert native is not None
    block, counter = memory_for("cpu").allocate(PAGE * depth), memory_for("cpu").allocate(8)
    pages = 1 << (medium.nbytes // PAGE).bit_length() - 1
    spent = 0.0
    for k in (64, count):
        counter.words[0] = 0
        start = time.perf_counter()
        failed = pump(
            native.start, native.complete, native.state, block.address, PAGE, pages, depth, k, counter.address, k
        )
        spent = time.perf_counter() - start
        if failed:
            raise SystemExit(f"{failed} reads failed: {medium.last_error()}")
    return count / spent


def kernel_rate(source: object, pages: int, depth: int, count: int) -> float:
    """Return misses a second of a kernel of `depth` threads."""
    queues = max(1, depth // 32)
    with ww.open(
        source,
        dtype=np.int64,
        shape=pages * 512,
        device="cpu",
        tier="storage",
        page_size=PAGE,
        merge=1,
        cache=max(pages // 16, 2 * depth) * PAGE,
        queues=queues,
        depth=max(64, 2 * depth // queues),
    ) as a:
        wrong = np.zeros(1, np.int64)
        walk[depth](a, 1, pages - 1, wrong)
        misses = a.stats.misses
        start = time.perf_counter()
        walk[depth](a, count // depth, pages - 1, wrong)
        spent = time.perf_counter() - start
        if wrong[0]:
            raise SystemExit(f"{wrong[0]} items were wrong")
        return (a.stats.misses - misses) / spent


def rates(path: Path, depth: int, count: int) -> dict[str, float]:
    """Return reads a second of each reader, once."""
    pages = path.stat().st_size // PAGE
    found = {"qemu-img bench": qemu_img(path, depth, count)}
    with QemuDrive([QemuNamespace(path=path, block=PAGE)]) as qemu, qemu.open() as drive:
        space = drive.namespace(1)
        with DriveMedium(space, writable=False, depth=2 * max(32, depth // 4)) as medium:
            found["DriveMedium"] = medium_rate(medium, depth, count)
        with FileMedium(path, direct=False) as medium:
            found["file"] = medium_rate(medium, depth, count)
        found["misses: rings of the drive"] = kernel_rate(space, pages, depth, count)
        with DriveMedium(space, writable=False, depth=2 * max(32, depth // 4)) as medium:
            found["misses: DriveMedium"] = kernel_rate(medium, pages, depth, count)
        with FileMedium(path, direct=False) as medium:
            found["misses: file"] = kernel_rate(medium, pages, depth, count)
    return found


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=None, help="folder of the image; default: in memory")
    parser.add_argument("--size", default="256MiB", help="size of the image, a power of two")
    parser.add_argument("--depth", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--count", type=int, default=20000, help="reads of each run; a quarter at depth 1")
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds; the best counts")
    parser.add_argument("--quick", action="store_true", help="one round of few reads")
    parser.add_argument("--json", default=None, metavar="FILE")
    options = parser.parse_args()
    if options.quick:
        options.count, options.rounds = 2000, 1
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder or "/dev/shm") as folder:
        path = Path(folder) / "image.raw"
        np.arange(checked_nbytes(options.size) // 8, dtype=np.int64).tofile(path)
        for depth in options.depth:
            count = options.count // (4 if depth == 1 else 1)
            turns = [rates(path, depth, count) for _ in range(options.rounds)]
            top = {name: max(turn[name] for turn in turns) for name in turns[0]}
            rows += [
                [name, depth, rate / 1e3, rate / top["qemu-img bench"], rate / top["file"], rate / top["misses: file"]]
                for name, rate in top.items()
            ]
    head = ["reader", "depth", "K reads/s", "of qemu-img", "of file", "of misses: file"]
    table("random reads of 4 KiB", head, rows)
    save(options.json, machine("cpu") | {"rows": rows, "head": head})


if __name__ == "__main__":
    main()
