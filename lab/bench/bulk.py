"""Bulk reads beside a pinned copy, in one run.

``a.prefetch()`` into frames that hold everything, ``a[:]`` and ``np.asarray(a)``, from host memory behind queues and
service threads (``ram``). `file_rate.py` measures reads of files, beside fio.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import warpwell as ww
from lab.bench.misses import copy_rate
from lab.bench.timing import machine, save, table
from warpwell.cache import parse_size
from warpwell.storage import RamMedium


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
            RamMedium(data),
            dtype=np.int64,
            device=options.device,
            tier="storage",
            page_size=page,
            cache=nbytes + nbytes // 4 + (64 << 20),
            threads=options.threads,
            name="bulk",
        ) as a:

            def prefetch(a: Any = a) -> None:
                ticket = a.prefetch()
                ticket.wait()
                if ticket.came != a.nbytes // a.cache.page_size:
                    raise SystemExit(f"not all pages came: {ticket}")

            found = {f"prefetch, pages of {page} B": timed(prefetch, a.evict, options.runs)}
            if page == options.page_size[0]:
                if not np.array_equal(a[: 1 << 20], data[: 1 << 20]):
                    raise SystemExit("a slice is wrong")
                found["a[:], on the device"] = timed(lambda a=a: a[:].read(), a.evict, options.runs)
                found["np.asarray(a)"] = timed(lambda a=a: np.asarray(a), a.evict, 2)
            for name, times in found.items():
                rate = nbytes / float(np.median(times)) / 1e9
                out[name] = {"GB_a_second": rate, "of_copy": rate / copy}
    rows = [[name, row["GB_a_second"], row["of_copy"]] for name, row in out.items()]
    table(f"{nbytes / 2**30:.3g} GiB from ram", ["what", "GB/s", "of a pinned copy"], rows)
    return out


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=ww.default_device())
    parser.add_argument("--data", default=None, help="bytes of contiguous data (4GiB on cuda, 64MiB on cpu)")
    parser.add_argument("--page-size", type=int, nargs="+", default=[4096])
    parser.add_argument("--threads", type=int, default=None, help="service threads (14 on cuda, 2 on cpu)")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", default=None, metavar="FILE")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    options.threads = options.threads or (14 if on_gpu else 2)
    standard = ("1GiB" if options.quick else "4GiB") if on_gpu else "64MiB"
    results = machine(options.device)
    results["contiguous"] = contiguous(parse_size(options.data or standard), options)
    save(options.json, results)


if __name__ == "__main__":
    main()
