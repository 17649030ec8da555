"""How fast are rows gathered by their numbers, warm and cold, beside NumPy and the drive?

Warm: the file is in memory; `ww.gather` into an array, `np.take(out=)`, and an index into a memmap, in turns, best of
several. Cold: each time a fresh process, after fsync and DONTNEED, with no page of the file in memory; `ww.gather` from
the mapping and through a cache, and a memmap with MADV_RANDOM. The drive's own rate, of random reads of 4 KiB with 64
in flight, stands before and after: fio's if there is one, else that of `file_rate.py`. Never on a tmpfs.

With ``--device cuda`` (needs PyTorch, and no file): rows in a cache and in device memory beside PyTorch's
`index_select`, rows in pinned memory beside the bus, and rows of memory of the host beside pinned rows, and beside
`np.take` into pinned memory by all cores with the copy of each piece beside the next.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import warpwell as ww
from lab.bench.timing import machine, save, table
from warpwell.cache import parse_size
from warpwell.storage.file import _in_memory

PAGE = 4096


def in_memory(path: Path) -> int:
    """Return how many pages of a file are in the page cache."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        vector = (ctypes.c_ubyte * -(-len(mapped) // PAGE))()
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        if ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), vector) != 0:
            raise OSError("mincore failed")
        return int((np.frombuffer(vector, np.uint8) & 1).sum())


def drop(path: Path) -> None:
    """Write a file out and drop it from the page cache; raise if something of it stays."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    left = in_memory(path)
    if left:
        raise SystemExit(f"{left} pages of {path} stay in memory: use a file that nobody else has open")


def numbers(file_rows: int, count: int, seed: int) -> Any:
    """Return random row numbers, each once."""
    return np.random.default_rng(seed).permutation(file_rows)[:count]


def one(method: str, path: Path, row_bytes: int, count: int, seed: int) -> dict[str, float]:
    """Gather once in this process; return seconds, and bytes read from the drive."""
    shape = path.stat().st_size // row_bytes, row_bytes
    rows = numbers(shape[0], count, seed)
    out = np.zeros((count, row_bytes), np.uint8)
    small = Path(str(path) + ".small")
    if not small.exists():
        np.arange(1 << 20, dtype=np.uint8).tofile(small)
    more: dict[str, Any] = {"cache": "256MiB", "page_size": PAGE} if method == "storage" else {}
    if method == "memmap":
        mapped = np.memmap(path, np.uint8, "r", shape=shape)
        mapped._mmap.madvise(mmap.MADV_RANDOM)
        read, begun = io_bytes(), time.perf_counter()
        np.take(mapped, rows, axis=0, out=out, mode="clip")
    else:
        # what is compiled is compiled before, and with it the first use of a cache
        with ww.open(small, dtype="u1", device="cpu", **more) as a:
            ww.gather(a, np.arange(0, 1 << 20, 5000)).result()
        with ww.open(path, dtype="u1", shape=shape, device="cpu", **more) as a:
            read, begun = io_bytes(), time.perf_counter()
            ww.gather(a, rows, out=out).result()
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "read": io_bytes() - read, "sum": int(out[:: max(1, count // 100)].sum())}


def io_bytes() -> int:
    """Return the bytes that this process has had read from drives."""
    return int(next(line for line in Path("/proc/self/io").read_text().splitlines() if "read_bytes" in line).split()[1])


def drive_rate(path: Path, depth: int, seconds: float) -> float:
    """Return random reads of 4 KiB a second."""
    program = shutil.which("fio")
    drop(path)
    from lab.bench.file import fio_rate, medium_rate

    if program:
        return fio_rate(program, path, PAGE, depth, seconds)
    return medium_rate(path, PAGE, depth, seconds, True)


def cold(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure cold, in turns."""
    path = Path(args.file)
    before = drive_rate(path, 64, args.seconds)
    methods = ["gather", "storage", "memmap"]
    found: dict[str, list[dict[str, float]]] = {m: [] for m in methods}
    for turn in range(args.turns):
        for method in methods:
            count = args.rows // 8 if method == "memmap" else args.rows
            drop(path)
            said = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "lab.bench.gather",
                    "--one",
                    method,
                    "--file",
                    args.file,
                    "--row-bytes",
                    str(args.row_bytes),
                    "--rows",
                    str(count),
                    "--seed",
                    str(turn),
                ],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            found[method].append({**json.loads(said), "count": count})
    after = drive_rate(path, 64, args.seconds)
    lines = []
    for method, each in found.items():
        rate = statistics.median(one["count"] / one["seconds"] for one in each)
        pages = statistics.median(one["read"] / PAGE / one["seconds"] for one in each)
        lines.append(
            {
                "cold": method,
                "rows/s": round(rate),
                "4 KiB reads/s": round(pages),
                "of the drive": round(pages / ((before + after) / 2), 2),
                "read / wanted": round(
                    statistics.median(one["read"] / one["count"] for one in each) / args.row_bytes, 2
                ),
            }
        )
    lines.append({"cold": "drive before, after", "4 KiB reads/s": f"{before:.0f}, {after:.0f}"})
    return lines


def warm(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure with the whole file in memory, in turns."""
    lines = []
    path = Path(args.file)
    for row_bytes in (8, 64, 512, 1024, 4096):
        nbytes = min(path.stat().st_size, args.warm_bytes) // row_bytes * row_bytes
        shape = nbytes // row_bytes, row_bytes
        count = min(args.rows, (128 << 20) // row_bytes)
        rows = np.random.default_rng(1).integers(0, shape[0], count)
        kind = np.dtype(np.int64)
        shape = shape[0], row_bytes // 8
        mapped = np.memmap(path, kind, "r", shape=shape)
        mapped.sum()
        out = np.zeros((count, shape[1]), kind)
        with ww.open(path, dtype=kind, shape=shape, device="cpu") as a:
            ways = {
                "gather": lambda a=a, rows=rows, out=out: ww.gather(a, rows, out=out).result(),
                "take": lambda m=mapped, rows=rows, out=out: np.take(m, rows, axis=0, out=out, mode="clip"),
                "take raise": lambda m=mapped, rows=rows, out=out: np.take(m, rows, axis=0, out=out),
                "index": lambda m=mapped, rows=rows: m[rows],
            }
            best = dict.fromkeys(ways, float("inf"))
            for _ in range(args.turns + 2):
                for name, way in ways.items():
                    begun = time.perf_counter()
                    way()
                    best[name] = min(best[name], time.perf_counter() - begun)
        lines.append(
            {
                "warm, bytes a row": row_bytes,
                "rows": count,
                **{f"{name} Mrows/s": round(count / s / 1e6, 2) for name, s in best.items()},
                "gather / take": round(best["take"] / best["gather"], 2),
            }
        )
    return lines


# -- on a GPU -------------------------------------------------------------------------------------------------------


def best_of(ways: dict[str, Any], turns: int) -> dict[str, float]:
    """Return the best seconds of each way, measured in turns; each ends with the GPU idle."""
    import torch

    best = dict.fromkeys(ways, float("inf"))
    for turn in range(turns + 1):
        for name, way in ways.items():
            torch.cuda.synchronize()
            begun = time.perf_counter()
            way()
            torch.cuda.synchronize()
            if turn:
                best[name] = min(best[name], time.perf_counter() - begun)
    return best


def line_of(what: str, row_bytes: int, count: int, best: dict[str, float], goal: str) -> dict[str, Any]:
    """Return a line of the table: GB/s of each way, and the first one's of that of the goal."""
    rates = {name: round(count * row_bytes / seconds / 1e9, 2) for name, seconds in best.items()}
    first = next(iter(best))
    return {
        "what": what,
        "bytes a row": row_bytes,
        "rows": count,
        "GB/s": rates,
        f"{first} / {goal}": round(best[goal] / best[first], 3),
    }


def resident(items: Any, row_bytes: int, turns: int) -> dict[str, Any]:
    """Measure rows that are in the GPU's memory already, each way eight times in a row in one stream."""
    import torch

    model = items.reshape(-1, row_bytes // 8)
    count = min(len(model), (1 << 30) // row_bytes)
    there = torch.as_tensor(model, device="cuda")
    rows = torch.randint(0, len(model), (count,), device="cuda")
    some = rows % (len(model) * 2 // 5)
    out = torch.empty((count, row_bytes // 8), dtype=torch.int64, device="cuda")
    options = {"device": "cuda", "dtype": "i8", "shape": model.shape}

    def opened(**more: Any) -> Any:
        return ww.open(ww.storage.RamMedium(model, writable=False), **options, **more)

    def many(one: Any) -> Any:
        return lambda: [one() for _ in range(8)]

    with (
        opened(cache=2 * model.nbytes) as whole,
        opened(cache=model.nbytes // 2) as part,
        opened(tier="device") as device,
    ):
        whole.prefetch().wait()
        part.prefetch(0, len(model) * 2 // 5).wait()
        for a, numbers in ((whole, rows), (whole, rows), (part, some), (device, rows)):
            ww.gather(a, numbers, out=out).result()
            if not torch.equal(out, there[numbers]):
                raise SystemExit(f"the rows are wrong: {a}")
        best = best_of(
            {
                "whole cache": many(lambda: ww.gather(whole, rows, out=out)),
                "part": many(lambda: ww.gather(part, some, out=out).result()),
                "device tier": many(lambda: ww.gather(device, rows, out=out)),
                "index_select": many(lambda: torch.index_select(there, 0, rows, out=out)),
            },
            turns,
        )
        asked = ww.gather(part, some, out=out)
        asked.result()
    line = line_of("cached", row_bytes, 8 * count, best, "index_select")
    return {**line, "part / index_select": round(best["index_select"] / best["part"], 3), "part asked": asked.asked()}


def take_and_copy(model: Any, rows: Any, out: Any) -> Any:
    """Return what gathers by `np.take` on all cores into pinned memory; each piece is copied beside the next."""
    from concurrent.futures import ThreadPoolExecutor

    import torch

    cores = len(os.sched_getaffinity(0))
    pool = ThreadPoolExecutor(cores)
    each = max(cores, (64 << 20) // model[0].nbytes // cores * cores)
    staging = [torch.empty((each, model.shape[1]), dtype=torch.int64, pin_memory=True) for _ in range(2)]
    views = [one.numpy() for one in staging]
    events: list[Any] = [None, None]

    def one_part(view: Any, some: Any) -> None:
        np.take(model, some, axis=0, out=view, mode="clip")

    def run() -> None:
        for k, low in enumerate(range(0, len(rows), each)):
            some, view = rows[low : low + each], views[k % 2]
            if events[k % 2] is not None:
                events[k % 2].synchronize()
            step = -(-len(some) // cores)
            parts = [slice(at, min(at + step, len(some))) for at in range(0, len(some), step)]
            list(pool.map(one_part, [view[part] for part in parts], [some[part] for part in parts]))
            out[low : low + len(some)].copy_(staging[k % 2][: len(some)], non_blocking=True)
            events[k % 2] = torch.cuda.Event()
            events[k % 2].record()

    return run


def bus_seconds(turns: int) -> float:
    """Return the seconds of a byte from pinned memory, by a copy engine."""
    import torch

    pinned = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    return best_of({"bus": lambda: there.copy_(pinned, non_blocking=True)}, turns)["bus"] / (1 << 30)


def from_host(items: Any, row_bytes: int, turns: int) -> dict[str, Any]:
    """Measure rows of pinned memory, and of memory of the host past a small cache."""
    import torch

    model = items.reshape(-1, row_bytes // 8)
    count = min(len(model), (2 << 30) // row_bytes)
    rows = np.random.default_rng(0).integers(0, len(model), count)
    on_gpu = torch.as_tensor(rows, device="cuda")
    out = torch.empty((count, row_bytes // 8), dtype=torch.int64, device="cuda")
    options = {"device": "cuda", "dtype": "i8", "shape": model.shape}
    with (
        ww.open(ww.storage.RamMedium(model, writable=False), **options, tier="host") as host,
        ww.open(ww.storage.RamMedium(model, writable=False), **options, cache="256MiB") as ram,
    ):
        for a in (host, ram):
            ww.gather(a, rows, out=out).result()
            if (out[:: count // 97].cpu().numpy() != model[rows[:: count // 97]]).any():
                raise SystemExit(f"the rows are wrong: {a}")
        best = best_of(
            {
                "ram": lambda: ww.gather(ram, rows, out=out).result(),
                "pinned tier": lambda: ww.gather(host, rows, out=out).result(),
                "pinned tier, numbers on the GPU": lambda: ww.gather(host, on_gpu, out=out).result(),
                "take and copy": take_and_copy(model, rows, out),
            },
            turns,
        )
    best["bus"] = bus_seconds(turns) * count * row_bytes
    line = line_of("host", row_bytes, count, best, "pinned tier")
    return {
        **line,
        "ram / take": round(best["take and copy"] / best["ram"], 3),
        "pinned / bus": round(best["bus"] / best["pinned tier"], 3),
    }


def on_gpu(args: argparse.Namespace) -> None:
    """Measure on a GPU."""
    items = np.arange(parse_size(args.size) // 8)
    lines = []
    for measure, given, row_bytes in (
        (resident, items[: len(items) // 2], 1024),
        (from_host, items, 4096),
        (from_host, items, 1024),
        (resident, items[: len(items) // 2], 256),
        (resident, items[: len(items) // 2], 4096),
    ):
        lines.append(measure(given, row_bytes, args.turns))
        print(json.dumps(lines[-1]), flush=True)
    save(args.out, {**machine("cuda"), "lines": lines})


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--file", help="needed on the CPU; is made if it does not exist; not on a tmpfs")
    parser.add_argument("--size", default="4GiB")
    parser.add_argument("--row-bytes", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--warm-bytes", type=parse_size, default=1 << 30)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--one", help="gather once in this way, in this process")
    parser.add_argument("--only", choices=("warm", "cold"))
    parser.add_argument("--out", help="a file for the results, as JSON")
    args = parser.parse_args()
    if args.device == "cuda":
        on_gpu(args)
        return
    if not args.file:
        parser.error("--file is needed")
    path = Path(args.file)
    if args.one:
        print(json.dumps(one(args.one, path, args.row_bytes, args.rows, args.seed)))
        return
    if not path.exists():
        with path.open("wb") as file:
            for k in range(parse_size(args.size) >> 24):
                file.write(np.random.default_rng(k).bytes(1 << 24))
    with path.open("rb") as file:
        if _in_memory(file.fileno()):
            raise SystemExit(f"{path} is in memory, on a tmpfs: name a file on a drive")
    lines = []
    for name, measure in (("warm", warm), ("cold", cold)):
        if args.only in (None, name):
            found = measure(args)
            names = list(dict.fromkeys(key for line in found for key in line))
            table(name, names, [[line.get(key, "") for key in names] for line in found])
            lines += found
    save(args.out, {**machine("cpu"), "lines": lines})


if __name__ == "__main__":
    main()
