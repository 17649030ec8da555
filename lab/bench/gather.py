"""Rates of rows gathered by index, compared with NumPy or PyTorch.

On a CPU the file is in the page cache, and `ww.gather` alternates with ``np.take`` and an index into a memmap. With
``-o file=PATH`` (not on a tmpfs) also cold: each time in a fresh process, with no page of the file in memory, compared
with random reads of 4 KiB of the same drive.

On a GPU (needs PyTorch): rows in a cache and in device memory compared with ``torch.index_select``, rows in pinned
memory compared with a copy, and rows in host memory compared with ``np.take`` into pinned memory by all cores with
overlapped copies.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import warpwell as ww
from lab.bench.runner import CannotRunError, Record, Setting, benchmark
from lab.bench.timing import alternate, drop_file, rates
from warpwell._check import checked_nbytes
from warpwell.storage.file import _in_memory

PAGE = 4096


def in_memory(path: Path) -> int:
    """Return the number of pages of a file in the page cache."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        vector = (ctypes.c_ubyte * -(-len(mapped) // PAGE))()
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        if ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), vector) != 0:
            raise OSError("mincore failed")
        return int((np.frombuffer(vector, np.uint8) & 1).sum())


def drop(path: Path) -> None:
    """Sync a file and drop it from the page cache; raise if a part of the file remains there."""
    drop_file(path)
    left = in_memory(path)
    if left:
        raise SystemExit(f"{left} pages of {path} stay in memory: use a file that no other process has open")


def numbers(file_rows: int, count: int, seed: int) -> Any:
    """Return random row numbers, each once."""
    return np.random.default_rng(seed).permutation(file_rows)[:count]


def measure_method(method: str, path: Path, row_bytes: int, count: int, seed: int) -> dict[str, float]:
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
        read, start = io_bytes(), time.perf_counter()
        np.take(mapped, rows, axis=0, out=out, mode="clip")
    else:
        # compile the kernels and use a cache once before the measurement
        with ww.open(small, dtype="u1", device="cpu", **more) as a:
            ww.gather(a, np.arange(0, 1 << 20, 5000)).result()
        with ww.open(path, dtype="u1", shape=shape, device="cpu", **more) as a:
            read, start = io_bytes(), time.perf_counter()
            ww.gather(a, rows, out=out).result()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "read": io_bytes() - read, "sum": int(out[:: max(1, count // 100)].sum())}


def io_bytes() -> int:
    """Return the number of bytes that drives have read for this process."""
    return int(next(line for line in Path("/proc/self/io").read_text().splitlines() if "read_bytes" in line).split()[1])


def drive_rate(path: Path, depth: int, seconds: float) -> float:
    """Return random reads of 4 KiB a second."""
    program = shutil.which("fio")
    drop(path)
    from lab.bench.file import fio_rate, medium_rate

    if program:
        return fio_rate(program, path, PAGE, depth, seconds)
    return medium_rate(path, PAGE, depth, seconds, True)


def cold(path: Path, row_bytes: int, turns: int, record: Record) -> None:
    """Measure cold gathers, in turns."""
    with path.open("rb") as file:
        if _in_memory(file.fileno()):
            raise CannotRunError(f"{path} is on a tmpfs; pass a file on a drive")
    found: dict[str, list[float]] = {"gather": [], "storage": [], "memmap": []}
    limit = drive_rate(path, 64, 3.0)
    for turn in range(turns):
        for method, each in found.items():
            count = 2_000 if method == "memmap" else 16_000
            drop(path)
            code = "import sys; from lab.bench import gather; gather.child(*sys.argv[1:])"
            arguments = [method, str(path), str(row_bytes), str(count), str(turn)]
            process = subprocess.run(
                [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
            )
            answer = json.loads(process.stdout)
            each.append(count / answer["seconds"])
            if turn == 0:
                read = answer["read"] / (count * row_bytes)
                record(f"cold/{method}/amplification", read, "bytes read per byte", better="lower")
    for method, values in found.items():
        record(f"cold/{method}", values, "rows/s", ceiling=("reads of 4 KiB", limit))


def child(method: str, path: str, row_bytes: str, count: str, seed: str) -> None:
    """Gather once and print the answer."""
    print(json.dumps(measure_method(method, Path(path), int(row_bytes), int(count), int(seed))))


def warm(path: Path, row_bytes: int, record: Record) -> None:
    """Measure rows of one size with the file in memory, in turns."""
    kind, shape = np.dtype(np.int64), (path.stat().st_size // row_bytes, row_bytes // 8)
    count = min(100_000, (128 << 20) // row_bytes)
    rows = np.random.default_rng(1).integers(0, shape[0], count)
    mapped = np.memmap(path, kind, "r", shape=shape)
    mapped.sum()
    out = np.zeros((count, shape[1]), kind)
    with ww.open(path, dtype=kind, shape=shape, device="cpu") as a:
        times = alternate(
            {
                "take": lambda: np.take(mapped, rows, axis=0, out=out, mode="clip"),
                "index": lambda: mapped[rows],
                "gather": lambda: ww.gather(a, rows, out=out).result(),
            },
            5,
        )
    found = {name: rates(count, each) for name, each in times.items()}
    peers = [("np.take", np.__version__, float(np.median(found["take"])))]
    peers += [("memmap[rows]", np.__version__, float(np.median(found["index"])))]
    record(f"warm/{row_bytes}B", found["gather"], "rows/s", peers=peers)


# -- on a GPU -------------------------------------------------------------------------------------------------------


def resident(items: Any, row_bytes: int, record: Record) -> None:
    """Measure rows that are in GPU memory, with eight consecutive calls of each method in one stream."""
    import torch

    model = items.reshape(-1, row_bytes // 8)
    count = min(len(model), (1 << 30) // row_bytes)
    device_model = torch.as_tensor(model, device="cuda")
    rows = torch.randint(0, len(model), (count,), device="cuda")
    cached_rows = rows % (len(model) * 2 // 5)
    out = torch.empty((count, row_bytes // 8), dtype=torch.int64, device="cuda")
    options = {"device": "cuda", "dtype": "i8", "shape": model.shape}

    def opened(**more: Any) -> Any:
        return ww.open(ww.storage.RamMedium(model, writable=False), **options, **more)

    def many(gather: Any) -> Any:
        return lambda: [gather() for _ in range(8)]

    with (
        opened(cache=2 * model.nbytes) as full_cache,
        opened(cache=model.nbytes // 2) as part,
        opened(tier="device") as device,
    ):
        full_cache.prefetch().result()
        part.prefetch(0, len(model) * 2 // 5).result()
        for a, numbers in ((full_cache, rows), (full_cache, rows), (part, cached_rows), (device, rows)):
            ww.gather(a, numbers, out=out).result()
            if not torch.equal(out, device_model[numbers]):
                raise SystemExit(f"the rows are wrong: {a}")
        times = alternate(
            {
                "index_select": many(lambda: torch.index_select(device_model, 0, rows, out=out)),
                "cache": many(lambda: ww.gather(full_cache, rows, out=out)),
                "partial cache": many(lambda: ww.gather(part, cached_rows, out=out).result()),
                "device": many(lambda: ww.gather(device, rows, out=out)),
            },
            5,
            torch.cuda.synchronize,
        )
    nbytes = 8 * count * row_bytes
    limit = nbytes / float(np.median(times.pop("index_select")))
    for name, each in times.items():
        record(f"{name}/{row_bytes}B", rates(nbytes, each), "B/s", ceiling=("index_select", limit))


def take_and_copy(model: Any, rows: Any, out: Any) -> Any:
    """Return a function that gathers by `np.take` on all cores into pinned memory; copies overlap with it."""
    from concurrent.futures import ThreadPoolExecutor

    import torch

    cores = len(os.sched_getaffinity(0))
    pool = ThreadPoolExecutor(cores)
    each = max(cores, (64 << 20) // model[0].nbytes // cores * cores)
    staging = [torch.empty((each, model.shape[1]), dtype=torch.int64, pin_memory=True) for _ in range(2)]
    views = [buffer.numpy() for buffer in staging]
    events: list[Any] = [None, None]

    def one_part(view: Any, part_rows: Any) -> None:
        np.take(model, part_rows, axis=0, out=view, mode="clip")

    def run() -> None:
        for k, low in enumerate(range(0, len(rows), each)):
            part_rows, view = rows[low : low + each], views[k % 2]
            if events[k % 2] is not None:
                events[k % 2].synchronize()
            step = -(-len(part_rows) // cores)
            parts = [slice(at, min(at + step, len(part_rows))) for at in range(0, len(part_rows), step)]
            list(pool.map(one_part, [view[part] for part in parts], [part_rows[part] for part in parts]))
            out[low : low + len(part_rows)].copy_(staging[k % 2][: len(part_rows)], non_blocking=True)
            events[k % 2] = torch.cuda.Event()
            events[k % 2].record()

    return run


def from_host(items: Any, row_bytes: int, record: Record) -> None:
    """Measure rows of pinned memory, and of host memory behind a small cache."""
    import torch

    model = items.reshape(-1, row_bytes // 8)
    count = min(len(model), (1 << 30) // row_bytes)
    rows = np.random.default_rng(0).integers(0, len(model), count)
    on_gpu = torch.as_tensor(rows, device="cuda")
    out = torch.empty((count, row_bytes // 8), dtype=torch.int64, device="cuda")
    pinned = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    device_buffer = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    options = {"device": "cuda", "dtype": "i8", "shape": model.shape}
    with (
        ww.open(ww.storage.RamMedium(model, writable=False), **options, tier="host") as host,
        ww.open(ww.storage.RamMedium(model, writable=False), **options, cache="256MiB") as ram,
    ):
        for a in (host, ram):
            ww.gather(a, rows, out=out).result()
            if (out[:: count // 97].cpu().numpy() != model[rows[:: count // 97]]).any():
                raise SystemExit(f"the rows are wrong: {a}")
        times = alternate(
            {
                "copy": lambda: device_buffer.copy_(pinned, non_blocking=True),
                "take": take_and_copy(model, rows, out),
                "ram": lambda: ww.gather(ram, rows, out=out).result(),
                "host": lambda: ww.gather(host, rows, out=out).result(),
                "host, rows on the GPU": lambda: ww.gather(host, on_gpu, out=out).result(),
            },
            5,
            torch.cuda.synchronize,
        )
    copy = (1 << 30) / float(np.median(times.pop("copy")))
    take = ("np.take and copy", np.__version__, count * row_bytes / float(np.median(times.pop("take"))))
    for name, each in times.items():
        peers = [take] if name == "ram" else []
        record(f"{name}/{row_bytes}B", rates(count * row_bytes, each), "B/s", ceiling=("copy", copy), peers=peers)


@benchmark("gather", figures=["warm", "cold", "cache", "device", "ram", "host"])
def run(setting: Setting, record: Record) -> None:
    """Measure on the device."""
    size = checked_nbytes(setting.pick(("64MiB", "1GiB"), ("2GiB", "4GiB"), "size"))
    if setting.on_gpu:
        try:
            import torch  # noqa: F401
        except ImportError:
            raise CannotRunError("needs the package torch") from None
        items = np.arange(size // 8)
        for row_bytes in (1024, 4096):
            from_host(items, row_bytes, record)
        for row_bytes in (256, 1024, 4096):
            resident(items[: len(items) // 2], row_bytes, record)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(setting.options.get("file", Path(folder) / "rows.bin"))
        if not path.exists():
            with path.open("wb") as file:
                for k in range(size >> 24):
                    file.write(np.random.default_rng(k).bytes(1 << 24))
        for row_bytes in setting.option("row-bytes", [8, 64, 512, 1024, 4096]):
            warm(path, row_bytes, record)
        if "file" in setting.options:
            cold(path, 1024, 3, record)
