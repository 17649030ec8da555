"""Speed of Warpwell without a GPU, compared with NumPy and Numba on a memmap of the same file, in one run.

A float32 matrix with rows of 1000 bytes. Kernels: norms of all rows, and sums of random blocks of 1 KiB. On the host: a
row, and the whole matrix as a NumPy array. Compared rows alternate, so that load on the machine affects all of them;
each shows its best time. Cold: the page cache is dropped before each run (as root).

    python -m lab bench matrix --folder /data            # 2 GB
    python -m lab bench matrix --bytes 256MiB --json laptop.json
"""

from __future__ import annotations

import argparse
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np

import warpwell as ww
from lab.bench.timing import machine, save, table
from warpwell import gpu
from warpwell._check import checked_nbytes

COLUMNS = 250
BLOCK = 256
"""Items of a random block."""


@ww.kernel
def norms(a, out):
    """Norm of a row, by subscripts."""
    i = gpu.grid(1)
    total = np.float32(0)
    for j in range(a.shape[1]):
        total += a[i, j] * a[i, j]
    out[i] = total


@gpu.function
def add_square(total, item):
    return total + item * item


@ww.kernel
def norms_by_span(a, columns, out):
    """Norm of a row of a flat array, by a fold."""
    i = gpu.grid(1)
    out[i] = gpu.fold(add_square, np.float32(0), a, i * columns, (i + 1) * columns)


@ww.kernel
def blocks(a, where, out):
    """Sum of the block that `where` names, of a flat array."""
    i = gpu.grid(1)
    first = where[i] * 256
    total = np.float32(0)
    for j in range(256):
        total += a[first + j]
    out[i] = total


@numba.njit(parallel=True)
def numba_norms(a, out):
    """Norms of rows, as a user of Numba writes them."""
    for i in numba.prange(a.shape[0]):
        total = np.float32(0)
        for j in range(a.shape[1]):
            total += a[i, j] * a[i, j]
        out[i] = total


@numba.njit(parallel=True)
def numba_blocks(a, where, out):
    """Sums of blocks, as a user of Numba writes them."""
    for i in numba.prange(where.shape[0]):
        first = where[i] * 256
        total = np.float32(0)
        for j in range(256):
            total += a[first + j]
        out[i] = total


def make(path: Path, nbytes: int) -> int:
    """Write the matrix unless it exists; return its number of rows."""
    rows = max(1, nbytes // (4 * COLUMNS))
    file_bytes = 128 + rows * 4 * COLUMNS
    if not path.exists() or path.stat().st_size != file_bytes:
        block = np.random.default_rng(0).random((min(rows, 50_000), COLUMNS), np.float32)
        header = {"descr": "<f4", "fortran_order": False, "shape": (rows, COLUMNS)}
        with path.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            for start in range(0, rows, len(block)):
                block[: rows - start].tofile(file)
            file.flush()
            os.fsync(file.fileno())
    return rows


def drop(*mapped: Any) -> bool:
    """Drop the page cache and the pages of these mappings; return False if that is not allowed."""
    os.sync()
    for array in mapped:
        if isinstance(array, ww.Array):
            array.evict()
        else:
            array._mmap.madvise(mmap.MADV_DONTNEED)  # the kernel does not drop mapped pages
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return False
    return True


def turns(runs: dict[str, Callable[[], Any]], count: int, before: Callable[[], Any] | None = None) -> dict[str, float]:
    """Call each function in turn, `count` times; return the shortest time of each in seconds."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(count):
        for name, run in runs.items():
            if before is not None:
                before()
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def scans(path: Path, rows: int, options: argparse.Namespace, cold: bool) -> dict[str, float]:
    """Norms of all rows."""
    out, expected = np.zeros(rows, np.float32), np.zeros(rows, np.float32)
    mapped = np.load(path, mmap_mode="r")
    numba_norms(mapped[:8], expected[:8])
    cached: dict[str, Any] = {"cache": options.cache}
    if options.page_size:
        cached["page_size"] = options.page_size
    opened = {"mapped": ww.open(path, device="cpu"), "storage": ww.open(path, device="cpu", **cached)}
    runs: dict[str, Callable[[], Any]] = {"Numba on a memmap": lambda: numba_norms(mapped, expected)}
    for tier, a in opened.items():
        flat = a.reshape(a.size)
        norms[8](a, out)
        norms_by_span[8](flat, COLUMNS, out)
        runs[f"{tier}, spans"] = lambda flat=flat: norms_by_span[rows](flat, COLUMNS, out)
        if not (cold and tier == "storage"):
            runs[f"{tier}, subscripts"] = lambda a=a: norms[rows](a, out)
    cleared = (lambda: drop(mapped, *opened.values())) if cold else None
    found = turns(runs, options.cold_runs if cold else options.runs, cleared)
    np.testing.assert_allclose(out, expected, rtol=1e-4)
    for a in opened.values():
        a.close()
    return found


def gathers(path: Path, nbytes: int, options: argparse.Namespace, cold: bool) -> dict[str, float]:
    """Sums of random blocks of 1 KiB."""
    where = np.random.default_rng(1).integers(0, nbytes // (4 * BLOCK) - 1, options.blocks)
    out, expected = np.zeros(len(where), np.float32), np.zeros(len(where), np.float32)
    mapped = np.load(path, mmap_mode="r")
    flat = mapped.reshape(-1)
    numba_blocks(flat, where[:8], expected)
    a, b = (ww.open(path, device="cpu", **options_of_array) for options_of_array in ({}, {"cache": options.cache}))
    runs: dict[str, Callable[[], Any]] = {"Numba on a memmap": lambda: numba_blocks(flat, where, expected)}
    for name, array in (("mapped", a.reshape(a.size)), ("storage", b.reshape(b.size))):
        blocks[8](array, where, out)
        runs[name] = lambda array=array: blocks[len(where)](array, where, out)
    cleared = (lambda: drop(mapped, a, b)) if cold else None
    found = turns(runs, options.cold_runs if cold else options.runs, cleared)
    np.testing.assert_allclose(out, expected, rtol=1e-4)
    a.close()
    b.close()
    return found


def on_host(path: Path, rows: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Read a row, and the whole matrix, as NumPy arrays."""
    mapped = np.load(path, mmap_mode="r")
    row_numbers = np.random.default_rng(2).integers(0, rows, 1000).tolist()
    with ww.open(path, device="cpu") as a, ww.open(path, device="cpu", cache=options.cache) as b:

        def each(row: Callable[[int], Any]) -> Callable[[], None]:
            def run() -> None:
                for i in row_numbers:
                    row(i)

            return run

        single_rows = turns(
            {
                "memmap": each(lambda i: np.array(mapped[i])),
                "memmap, not copied": each(lambda i: mapped[i]),
                "mapped": each(lambda i: a[i]),
                "storage": each(lambda i: b[i]),
            },
            options.runs + 2,
        )
        full_reads = turns(
            {"np.load": lambda: np.load(path), "mapped": lambda: np.asarray(a), "storage": lambda: np.asarray(b)},
            options.runs,
        )
    return {
        "a row": {name: seconds / len(row_numbers) for name, seconds in single_rows.items()},
        "everything": full_reads,
    }


def show(title: str, found: dict[str, float], unit: float = 1.0) -> dict[str, Any]:
    """Print times with their ratios to the first."""
    first = next(iter(found.values()))
    table(
        title,
        ["", "ms" if unit == 1e3 else "us", "times the first"],
        [[name, seconds * unit, seconds / first] for name, seconds in found.items()],
    )
    return {name: {"seconds": seconds, "ratio": seconds / first} for name, seconds in found.items()}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=None, help="folder of the matrix, which is kept (default: temporary)")
    parser.add_argument("--bytes", default="2GB", help="size of the matrix (default 2GB)")
    parser.add_argument("--cache", default="64MiB", help="cache of the storage tier (default 64MiB)")
    parser.add_argument("--page-size", default=None, help="page size of scans from storage (default: the library's)")
    parser.add_argument("--blocks", type=int, default=20_000, help="random blocks (default 20000)")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cold-runs", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=("scans", "random", "host"), default=("scans", "random", "host"))
    parser.add_argument("--json", default=None, metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as own:
        path = Path(options.folder or own) / "laptop.npy"
        nbytes = checked_nbytes(options.bytes)
        rows = make(path, nbytes)
        may_drop = drop()
        results: dict[str, Any] = {**machine("cpu"), "bytes": nbytes, "cpus": os.cpu_count(), "cache": options.cache}
        np.load(path)  # into the page cache
        if "host" in options.only:
            host = on_host(path, rows, options)
            results["a row"] = show("a row of 1000 bytes on the host, warm", host["a row"], 1e6)
            results["everything"] = show("the matrix as a NumPy array, warm", host["everything"], 1e3)
        for cold in (False, True) if may_drop else (False,):
            state = "cold" if cold else "warm"
            if "scans" in options.only:
                found = scans(path, rows, options, cold)
                results[f"norms, {state}"] = show(f"norms of {rows} rows, {state}", found, 1e3)
            if "random" in options.only:
                title = f"{options.blocks} random blocks of 1 KiB, {state}"
                results[f"blocks, {state}"] = show(title, gathers(path, nbytes, options, cold), 1e3)
        if not may_drop:
            print("cold runs need root, to drop the page cache")
        save(options.json, results)


if __name__ == "__main__":
    main()
