"""Records per second that kernels retrieve from a store in memory (tmpfs, no drive), by value size and queues.

*Kernel*: every thread retrieves random records, past the device cache or from it. *Batch*: `get_async` of many keys,
compared with `get_many` into pinned memory and one copy to the device. *Overlap*: a batch that is fetched while a
kernel computes, relative to the longer of the two alone. With ``-o two=1`` (two GPUs): queues of both GPUs on one
emulated drive that one GPU loads to half.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from typing import Any

import numpy as np

import warpwell as ww
from lab.bench.runner import Record, Setting, benchmark
from lab.bench.timing import kernel_times, rates
from lab.media import KeyValueLatency
from warpwell import gpu
from warpwell.targets import kernel, memory_for
from warpwell.targets.launch_stream import stream_on
from warpwell.targets.primitives import grid, store_weak_as

I8 = np.dtype(np.int64)
ODD = 0x9E3779B97F4A7C15 & 0x7FFFFFFF


@kernel
def retrieve_all(kv, buffers, mask, rounds, wrong):
    """Retrieve `rounds` records a thread, keys at random; the first word of a value is its key."""
    i = grid(1)
    state = i * 2654435761 + 12345
    for _ in range(rounds):
        state = state * 6364136223846793005 + 1442695040888963407
        key = (state >> 20) & mask
        row = buffers[i]
        size = kv.retrieve(key, row)
        if size != 8 * row.size or row[0] != key:
            gpu.atomic_add(wrong, 0, 1)


@kernel
def fill_cache(kv, buffers, count):
    """Retrieve all records into the device cache."""
    i = grid(1)
    for key in range(i, count, buffers.shape[0]):
        kv.retrieve(key, buffers[i])


@kernel
def compute(sink, rounds):
    """Keep the arithmetic units busy, as training does."""
    i = grid(1)
    total = i
    for k in range(rounds):
        total = total * 6364136223846793005 + k
    store_weak_as(sink + 8 * (i & 0xFFFF), total, I8)


def make(folder: str, nbytes: int, count: int) -> str:
    """Make a store of `count` values of `nbytes` bytes; the first word of a value is its key."""
    path = f"{folder}/v{nbytes}"
    with ww.kv.create(path, schema={"v": ("int64", (nbytes // 8,))}, durability="none") as store:
        for first in range(0, count, 1 << 16):
            keys = np.arange(first, min(count, first + (1 << 16)))
            store.put_many(keys, {"v": np.repeat(keys[:, None], nbytes // 8, axis=1)})
    return path


def on_device(target: str, array: np.ndarray) -> Any:
    """Return an array in the memory of the target's kernels."""
    from warpwell.targets import to_device

    return to_device(target, array)


def kernel_rate(
    path: str, target: str, nbytes: int, count: int, lanes: int, rounds: int, cached: bool, **options: Any
) -> list[float]:
    """Return records per second that kernels retrieve."""
    cache = 4 * count * (nbytes + 64) if cached else None
    with ww.kv.open(path, device=target, cache=cache, **options) as store:
        buffers = on_device(target, np.zeros((lanes, nbytes // 8), np.int64))
        wrong = on_device(target, np.zeros(1, np.int64))
        if cached:
            fill_cache[lanes](store, buffers, count)
        times = kernel_times(
            retrieve_all, lanes, store, buffers, count - 1, rounds, wrong, device=target, arrays=[store], runs=3
        )
        bad = int(np.asarray(wrong.copy_to_host() if target == "cuda" else wrong)[0])
        if bad:
            raise SystemExit(f"{bad} values were wrong")
        return rates(lanes * rounds, times)


def batch_rates(path: str, target: str, nbytes: int, count: int, batch: int, **options: Any) -> tuple[list[float], ...]:
    """Return records per second of batches on the device, and on the host with a pinned copy."""
    rng = np.random.default_rng(0)
    keys = [rng.integers(0, count, batch) for _ in range(24)]
    with ww.kv.open(path, device=target, **options) as store:
        pinned = memory_for(target).allocate_shared(batch * nbytes)
        device = memory_for(target).allocate(batch * nbytes)
        rows = pinned.view(np.dtype(np.uint8))[: batch * nbytes].reshape(batch, nbytes)
        stream = stream_on(target)
        times: tuple[list[float], list[float]] = ([], [])
        for k in keys:
            start = time.perf_counter()
            store.get_async(k).wait()
            half = time.perf_counter()
            store.get_many(k, out=rows)
            stream.copy(device.address, pinned.address, batch * nbytes)
            stream.wait()
            times[0].append(half - start)
            times[1].append(time.perf_counter() - half)
        return tuple(rates(batch, t[4:]) for t in times)


def overlap(path: str, target: str, count: int, batch: int) -> list[float]:
    """Return the time of a fetch and a computation together, divided by the longer of the two times alone."""
    rng = np.random.default_rng(1)
    sink = memory_for(target).allocate(8 << 16)
    threads = 1 << 18 if target == "cuda" else 1 << 10
    with ww.kv.open(path, device=target, depth=2048, threads=14 if target == "cuda" else None) as store:

        def fetch() -> Any:
            return store.get_async(rng.integers(0, count, batch))

        def run(rounds: int) -> float:
            start = time.perf_counter()
            compute[threads](sink.address, rounds, device=target)
            return time.perf_counter() - start

        fetch().wait()
        run(10)
        alone = []
        for _ in range(12):
            start = time.perf_counter()
            fetch().wait()
            alone.append(time.perf_counter() - start)
        fetching = statistics.median(alone)
        rounds = 1000
        rounds = max(1, int(rounds * fetching / statistics.median(run(rounds) for _ in range(5))))
        computing = statistics.median(run(rounds) for _ in range(9))
        both = []
        future = fetch()
        future.wait()
        for _ in range(14):
            start = time.perf_counter()
            following = fetch()
            run(rounds)
            following.wait()
            both.append(time.perf_counter() - start)
        return [together / max(fetching, computing) for together in both[2:]]


def two_devices(path: str, count: int, threads: int, rounds: int) -> list[Any]:
    """Return millions of records a second of one GPU, and of two GPUs whose queues are on one emulated drive."""
    limits = {"latency_us": 100.0}
    # 32 commands in flight per GPU, because the emulation on the CPU must not be the bottleneck
    shape = {"queues": 2, "depth": 32, "value_bytes": None}
    probe = ww.kv.open(path, device="cuda:0", drive=lambda n: KeyValueLatency(n, **limits), threads=4, **shape)
    with probe:
        one_rate = _drive_rate([probe], count, threads, rounds)
    limits["read_iops"] = 2 * one_rate * 1e6
    first = ww.kv.open(path, device="cuda:0", drive=lambda n: KeyValueLatency(n, **limits), threads=4, **shape)
    second = ww.kv.open(path, device="cuda:1", beside=first, **shape)
    alone = _drive_rate([first], count, threads, rounds)
    together = _drive_rate([first, second], count, threads, rounds)
    second.close()
    first.close()
    return [2 * one_rate, alone, together, together / alone]


def _drive_rate(stores: list[Any], count: int, threads: int, rounds: int) -> float:
    """Return the millions of records per second that kernels of all stores' devices retrieve at the same time.

    One kernel per device retrieves without the host, so only the queues or the drive limit scaling.
    """
    done = [0.0] * len(stores)
    gate = threading.Barrier(len(stores))

    def work(k: int) -> None:
        with stream_on(f"cuda:{k}").on_device():
            buffers = on_device("cuda", np.zeros((threads, 128), np.int64))
            wrong = on_device("cuda", np.zeros(1, np.int64))
            retrieve_all[threads](stores[k], buffers, count - 1, 1, wrong)
            gate.wait()
            start = time.perf_counter()
            retrieve_all[threads](stores[k], buffers, count - 1, rounds, wrong)
            done[k] = time.perf_counter() - start
            if int(wrong.copy_to_host()[0]):
                raise SystemExit("values were wrong")

    workers = [threading.Thread(target=work, args=(k,)) for k in range(len(stores))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(threads * rounds / seconds for seconds in done) / 1e6


@benchmark("kv-device", figures=["kernel", "cached", "batch", "overlap", "two"])
def run(setting: Setting, record: Record) -> None:
    """Measure values of 128 B, 1 KiB and 8 KiB."""
    target = setting.device
    total = setting.pick((1 << 22, 1 << 24), (1 << 27, 1 << 29), "bytes")
    threads, rounds = (1 << 15, 8) if setting.on_gpu else (64, 16)
    shapes = [(1, 1), (14, 14)] if setting.on_gpu else [(1, 1), (4, 2)]
    with tempfile.TemporaryDirectory(dir=setting.option("folder", "/dev/shm")) as folder:
        if setting.options.get("two"):
            path = make(folder, 1024, 1 << 17)
            limit, _, together, ratio = two_devices(path, 1 << 17, 4096, 40)
            record("two/together", together, "M records/s", ceiling=("drive", limit))
            record("two/ratio", ratio, "of one")
            record.emulated.add("drive")
            return
        for nbytes in setting.option("sizes", [128, 1024, 8192]):
            count = 1 << (total // nbytes).bit_length() - 1
            path = make(folder, nbytes, count)
            common = (path, target, nbytes, count)
            for queues, service in shapes:
                settings = {"queues": queues, "threads": service, "depth": 1024}
                found = kernel_rate(*common, threads, rounds, False, **settings)
                record(f"kernel/{nbytes}B/{queues} queues", found, "records/s")
            found = kernel_rate(*common, threads, rounds * 8, True, queues=8, depth=1024)
            record(f"cached/{nbytes}B", found, "records/s")
            for batch in (256, 4096):
                device, host = batch_rates(*common, batch, queues=8, depth=1024)
                peer = ("get_many and copy", ww.__version__, statistics.median(host))
                record(f"batch/{nbytes}B/{batch} keys", device, "records/s", peers=[peer])
        record("overlap/8192B", overlap(path, target, count, 4096), "of the longer", better="lower", goal=1.1)
