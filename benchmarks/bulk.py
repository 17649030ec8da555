"""Bulk reads beside a pinned copy, and reads of a file on a disk beside fio, in one run.

Contiguous: ``a.prefetch()`` into frames that hold everything, ``a[:]`` and ``np.asarray(a)``, from host memory behind
queues and service threads (``ram``). A file: unique random pages by kernels, a command a page, and a prefetch of all of
it, against ``fio`` with direct I/O at several depths (``--fio`` names the program; its libraries may lie beside it).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from measure import kernel_seconds, machine, save, table
from miss_path import copy_rate, touch

import warpwell as ww
from warpwell.cache import parse_size
from warpwell.storage import RamMedium
from warpwell.storage.file import FileMedium

CHUNK = 1 << 24


def timed(call: Callable[[], object], before: Callable[[], object] = lambda: None, runs: int = 3) -> list[float]:
    """Return the seconds of several calls, after one that compiles."""
    times = []
    for _ in range(runs + 1):
        before()
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return times[1:]


def contiguous(nbytes: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure prefetch, slices and host arrays of data in host memory."""
    data = np.arange(nbytes // 8, dtype=np.int64)
    copy = copy_rate(options.device)
    out: dict[str, Any] = {"pinned copy": {"GB_a_second": copy, "of_copy": 1.0}}
    for page in options.page_size:
        with ww.open(
            RamMedium(data), dtype=np.int64, device=options.device, tier="storage", page_size=page,
            cache=nbytes + nbytes // 4 + (64 << 20), threads=options.threads, name="bulk",
        ) as a:  # fmt: skip

            def prefetch(a: Any = a) -> None:
                ticket = a.prefetch()
                ticket.wait()
                if ticket.came != a.nbytes // a.cache.page_size:
                    raise SystemExit(f"not all pages came: {ticket}")

            found = {f"prefetch, pages of {page} B": timed(prefetch, a.evict)}
            if page == options.page_size[0]:
                got = np.asarray(a[: 1 << 20].copy_to_host() if hasattr(a[:8], "copy_to_host") else a[: 1 << 20])
                if not np.array_equal(got, data[: 1 << 20]):
                    raise SystemExit("a slice is wrong")
                found["a[:], on the device"] = timed(lambda a=a: a[:], a.evict)
                found["np.asarray(a)"] = timed(lambda a=a: np.asarray(a), a.evict, 2)
            for name, times in found.items():
                rate = nbytes / float(np.median(times)) / 1e9
                out[name] = {"GB_a_second": rate, "of_copy": rate / copy}
    rows = [[name, row["GB_a_second"], row["of_copy"]] for name, row in out.items()]
    table(f"{nbytes / 2**30:.3g} GiB from ram", ["what", "GB/s", "of a pinned copy"], rows)
    return out


def write_file(path: Path, nbytes: int) -> None:
    """Write a file of int64 that are their own indices."""
    with path.open("wb") as file:
        for first in range(0, nbytes // 8, CHUNK):
            np.arange(first, min(first + CHUNK, nbytes // 8), dtype=np.int64).tofile(file)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fio_rate(fio: Path, file: Path, block: int, random: bool, jobs: int, depth: int, seconds: int) -> dict[str, float]:
    """Return what fio reads from a file with direct I/O."""
    found = {}
    for engine in ("io_uring", "libaio", "psync"):
        done = subprocess.run(
            [str(fio), "--name=read", f"--filename={file}", f"--rw={'randread' if random else 'read'}",
             f"--bs={block}", "--direct=1", f"--ioengine={engine}", f"--iodepth={depth}", f"--numjobs={jobs}",
             "--thread", "--group_reporting", "--time_based", f"--runtime={seconds}", "--output-format=json",
             *(["--norandommap"] if random else [f"--offset_increment={file.stat().st_size // jobs}"])],
            capture_output=True, text=True, env=os.environ | {"LD_LIBRARY_PATH": str(fio.parent)}, check=False,
        )  # fmt: skip
        try:
            read = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]
            found[engine] = float(read["bw_bytes"])
        except (ValueError, KeyError, IndexError):
            print(f"fio {engine}: {(done.stderr or done.stdout).strip()[:200]}")
    return found


def file_reads(options: argparse.Namespace, nbytes: int) -> dict[str, Any]:
    """Measure reads of a file: ours, and fio's at the same and at other depths."""
    out: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "items"
        write_file(path, nbytes)
        for page in options.page_size:
            out |= ours(path, page, nbytes, options)
        if options.fio is not None:
            for block, random in ((4096, True), (1 << 17, False)):
                for jobs, depth in options.depths:
                    found = fio_rate(options.fio, path, block, random, jobs, depth, options.seconds)
                    name = f"fio, {'random' if random else 'sequential'} {block} B, {jobs} x {depth}"
                    for engine, rate in found.items():
                        out[f"{name}, {engine}"] = {"GB_a_second": rate / 1e9, "M_a_second": rate / block / 1e6}
    rows = [[name, row["GB_a_second"], row["M_a_second"]] for name, row in out.items()]
    table(f"a file of {nbytes / 2**30:.3g} GiB in {options.folder or tempfile.gettempdir()}",
          ["what", "GB/s", "M commands/s"], rows)  # fmt: skip
    for kind, ours_name in (("random 4096", "random, pages of 4096 B"),
                            ("sequential 131072", "prefetch, pages of 4096 B")):  # fmt: skip
        theirs = [row["GB_a_second"] for name, row in out.items() if name.startswith(f"fio, {kind}")]
        if theirs and ours_name in out:
            print(f"{ours_name}: {out[ours_name]['GB_a_second'] / max(theirs):.2f} of fio's best")
    return out


def ours(path: Path, page: int, nbytes: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return rates of misses, a command a page, and of a prefetch of the whole file."""
    out = {}
    items = page // 8
    count = 1 << min(options.pages, nbytes // page).bit_length() - 1
    given = {"dtype": np.int64, "device": options.device, "tier": "storage", "page_size": page,
             "threads": options.threads, "timeout": 60}  # fmt: skip
    with FileMedium(path) as medium, ww.open(medium, cache=max(nbytes // 8, page), merge=1, **given) as a:
        wrong = np.zeros(1, np.int64)
        if options.device == "cuda":
            from numba import cuda

            wrong = cuda.to_device(wrong)
        seconds = kernel_seconds(
            touch, count, a, items, count - 1, wrong, device=options.device, arrays=[a], runs=options.runs
        )
        if int(np.asarray(wrong.copy_to_host() if options.device == "cuda" else wrong)[0]):
            raise SystemExit("items of the file were wrong")
        out[f"random, pages of {page} B"] = {
            "GB_a_second": count * page / seconds / 1e9, "M_a_second": count / seconds / 1e6,
            "medium": a.medium.description,
        }  # fmt: skip
        print(f"the medium is {a.medium.description}")
    with FileMedium(path) as medium, ww.open(medium, cache=nbytes + nbytes // 4 + (64 << 20), **given) as a:
        times = timed(lambda: a.prefetch().wait(), a.evict, options.runs)
        rate = nbytes / float(np.median(times))
        out[f"prefetch, pages of {page} B"] = {"GB_a_second": rate / 1e9, "M_a_second": rate / page / 1e6}
    return out


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=ww.default_device())
    parser.add_argument("--data", default=None, help="bytes of contiguous data (4GiB on cuda, 64MiB on cpu)")
    parser.add_argument("--file", default=None, help="bytes of the file (4GiB on cuda, 64MiB on cpu; 0: none)")
    parser.add_argument("--folder", default=None, help="where the file lies (default: a temporary folder)")
    parser.add_argument("--page-size", type=int, nargs="+", default=[4096])
    parser.add_argument("--pages", type=int, default=1 << 18, help="random pages of the file")
    parser.add_argument("--threads", type=int, default=None, help="service threads (14 on cuda, 2 on cpu)")
    parser.add_argument("--fio", type=Path, default=None, metavar="PROGRAM")
    parser.add_argument("--seconds", type=int, default=3, help="of each run of fio")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", default=None, metavar="FILE")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    options.threads = options.threads or (14 if on_gpu else 2)
    options.depths = [(options.threads, 32), (options.threads, 128)]
    if options.quick:
        options.seconds, options.depths = 1, options.depths[:1]
    standard = ("1GiB" if options.quick else "4GiB") if on_gpu else "64MiB"
    results = machine(options.device)
    results["contiguous"] = contiguous(parse_size(options.data or standard), options)
    if options.file != "0":
        results["file"] = file_reads(options, parse_size(options.file or standard))
    save(options.json, results)


if __name__ == "__main__":
    main()
