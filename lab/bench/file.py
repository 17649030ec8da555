"""Rates of random reads of a file, compared with fio.

Random reads of unique pages of a file with direct I/O, at the same depth: by fio with io_uring, by the medium alone
(io_uring, and a pool of threads with pread), and by misses of a kernel, where at most `depth` commands are in flight.
The option --fio names another program than `fio`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import numpy as np

import warpwell as ww
from lab.bench.misses import touch
from lab.bench.timing import kernel_seconds, machine, save, table
from warpwell._check import checked_nbytes
from warpwell.nvme import READ
from warpwell.storage import FileMedium, word
from warpwell.storage.commands import (
    A_STATUS,
    ANSWER_BYTES,
    COMMAND_BYTES,
    call_complete,
    call_start,
    encode_command,
)
from warpwell.targets import memory_for, native
from warpwell.targets.primitives import SYSTEM, fetch_add, load_relaxed, scratch


@native
def pump(start, complete, state, buffers, nbytes, pages, depth, count, counter, salt):
    """Keep `depth` reads of random pages in flight until all threads have begun `count`; return the failures."""
    command = scratch(COMMAND_BYTES)
    answer = scratch(ANSWER_BYTES)
    number = fetch_add(counter, 1, SYSTEM)
    going = 0
    failed = 0
    while number < count or going > 0:
        while going < depth and number < count:
            page = (number * 0x9E3779B1 + salt) & (pages - 1)
            slot = number % depth
            encode_command(command, READ, page * nbytes, nbytes, buffers + slot * nbytes)
            status = call_start(start, state, command, slot)
            if status < 0:
                going += 1
            elif status > 0:
                failed += 1
            number = fetch_add(counter, 1, SYSTEM)
        while going > 0 and call_complete(complete, state, answer):
            going -= 1
            if word(answer, A_STATUS) != 0:
                failed += 1
        if load_relaxed(counter, SYSTEM) >= count and going == 0:
            break
    return failed


def fio_rate(program: str, path: Path, nbytes: int, depth: int, seconds: float) -> float:
    """Return fio's reads a second."""
    output = subprocess.run(
        [
            program,
            "--name=read",
            f"--filename={path}",
            f"--size={path.stat().st_size}",
            f"--bs={nbytes}",
            "--rw=randread",
            "--direct=1",
            "--ioengine=io_uring",
            f"--iodepth={depth}",
            f"--runtime={seconds}",
            "--time_based",
            "--output-format=json",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=60 + seconds,
    ).stdout
    return float(json.loads(output[output.index("{") :])["jobs"][0]["read"]["iops"])


def medium_rate(path: Path, nbytes: int, depth: int, seconds: float, ring: bool) -> float:
    """Return reads a second of the medium alone: one thread with a ring, `depth` threads without."""
    loop = pump.load()
    with FileMedium(path, direct=True, ring=ring) as medium:
        functions = medium.native()
        threads, each = (1, depth) if ring else (depth, 1)
        block = memory_for("cpu").allocate(nbytes * depth + 4096)
        counter = memory_for("cpu").allocate(8)
        pages = 1 << (medium.nbytes // nbytes).bit_length() - 1

        def reads(count: int, salt: int) -> float:
            counter.words[0] = 0
            failed: list[int] = []
            workers = [
                threading.Thread(
                    target=lambda k=k: failed.append(
                        loop(
                            functions.start,
                            functions.complete,
                            functions.state,
                            block.address + nbytes * k,
                            nbytes,
                            pages,
                            each,
                            count,
                            counter.address,
                            salt,
                        )
                    )
                )
                for k in range(threads)
            ]
            start = time.perf_counter()
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            if any(failed):
                raise SystemExit(f"{failed} reads failed: {medium.last_error()}")
            return count / (time.perf_counter() - start)

        first = reads(4 * depth, 1)  # compiles
        first = reads(2000, 2)
        return reads(max(2000, int(first * seconds)), 3)


def array_rate(path: Path, nbytes: int, depth: int, target: str, seconds: float, ring: bool) -> float:
    """Return misses a second of a kernel."""
    pages = 1 << (path.stat().st_size // nbytes).bit_length() - 1
    queues = min(8, max(1, depth // 8))
    options = {"queues": queues, "depth": 2 * depth // queues, "merge": 1, "page_size": nbytes}
    with (
        FileMedium(path, direct=True, ring=ring) as medium,
        ww.open(
            medium,
            dtype=np.int64,
            device=target,
            tier="storage",
            cache=max(pages * nbytes // 8, 64 * nbytes),
            **options,
        ) as a,
    ):
        wrong = np.zeros(1, np.int64)
        count = 2048
        spent = kernel_seconds(touch, count, a, nbytes // 8, pages - 1, wrong, device=target, arrays=[a], runs=1)
        count = min(pages, max(2048, int(count / spent * seconds)))
        spent = kernel_seconds(touch, count, a, nbytes // 8, pages - 1, wrong, device=target, arrays=[a], runs=1)
        return count / spent


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the file, on the drive to measure")
    parser.add_argument("--device", default=ww.default_device())
    parser.add_argument("--size", default="1GiB")
    parser.add_argument("--page-size", type=int, nargs="+", default=[4096])
    parser.add_argument("--depth", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--fio", default=shutil.which("fio"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", default=None, metavar="FILE")
    options = parser.parse_args()
    path = options.folder / "file_rate.bin"
    items = checked_nbytes(options.size) // 8
    rows = []
    try:
        np.arange(items, dtype=np.int64).tofile(path)
        os.sync()
        for nbytes in options.page_size:
            for depth in options.depth:
                rates: dict[str, list[float]] = {}
                for _ in range(options.rounds):  # alternate, because other programs may use the drive
                    if options.fio:
                        rates.setdefault("fio", []).append(fio_rate(options.fio, path, nbytes, depth, options.seconds))
                    for name, ring in (("ring", True), ("threads", False)):
                        rate = medium_rate(path, nbytes, depth, options.seconds, ring)
                        rates.setdefault(name, []).append(rate)
                        rate = array_rate(path, nbytes, depth, options.device, options.seconds, ring)
                        rates.setdefault(f"array, {name}", []).append(rate)
                top = {name: max(values) for name, values in rates.items()}
                for name, rate in top.items():
                    rows.append([name, nbytes, depth, rate / 1e3, rate * nbytes / 1e9, rate / top.get("fio", np.nan)])
    finally:
        path.unlink(missing_ok=True)
    head = ["reader", "page B", "depth", "K reads/s", "GB/s", "of fio"]
    table("random direct reads of a file", head, rows)
    save(options.json, machine(options.device) | {"rows": rows, "head": head})


if __name__ == "__main__":
    main()
