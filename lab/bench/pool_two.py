"""Two GPUs of a pool from one process: copies between them, independent work on both, and work that exchanges data.

Run it as ``python -m lab bench pool-two`` on a host with two GPUs. Copies go from agent to agent,
two processes; compared with the peer copy of one process that has both GPUs. Breadth-first searches from many sources
are independent; the subspace iteration multiplies half of a matrix on each GPU and exchanges the halves of its vectors.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import warpwell as ww
from lab.bench.timing import machine, save, table
from warpwell import gpu


@ww.kernel
def level(rows, columns, depth, found, now):
    """Visit the neighbors of the vertices of the last level."""
    i = gpu.grid(1)
    if depth[i] == now:
        for k in range(rows[i], rows[i + 1]):
            j = columns[k]
            if depth[j] < 0:
                depth[j] = now + 1
                found[0] = 1


def search(rows: Any, columns: Any, depth: Any, found: Any, sources: Any) -> list[int]:
    """Search from each source (on the agent); return the number of vertices that each search has reached."""
    reached = []
    for source in sources:
        depth[:] = -1
        depth[int(source)] = 0
        now = 0
        while True:
            found[:] = 0
            level[depth.size](rows, columns, depth, found, now)
            if not int(found[0]):
                break
            now += 1
        reached.append(int((depth >= 0).sum()))
    return reached


def multiply(matrix: Any, vectors: Any, out: Any) -> None:
    import sys

    sys.modules["cupy" if hasattr(out, "get") else "numpy"].matmul(matrix, vectors, out=out)


def normalize(vectors: Any) -> None:
    vectors /= abs(vectors).max()


def seconds(run: Callable[[], object], times: int = 5) -> float:
    run()
    found = []
    for _ in range(times):
        at = time.perf_counter()
        run()
        found.append(time.perf_counter() - at)
    return statistics.median(found)


def copies(devices: Any) -> list[list[Any]]:
    """Return rates of copies from one GPU to the other, by size: from memory to memory, and by way of the host."""
    rows = []
    for size in (1 << 16, 1 << 20, 1 << 24, 1 << 28):
        source, two = devices[0].empty(size, np.uint8), devices[1].empty(size, np.uint8)
        source.fill(3)
        back = devices[0].empty(size, np.uint8)

        def copy(source: Any = source, two: Any = two) -> None:
            two.copy_from(source)
            two.device.synchronize()

        def both(source: Any = source, two: Any = two, back: Any = back) -> None:
            two.copy_from(source)
            back.copy_from(two)
            devices[0].synchronize()
            devices[1].synchronize()

        found: list[float] = []
        for direct in (True, False):
            for device in devices:
                device.transfers.direct = direct
            found += [size / seconds(copy) / 1e9, 2 * size / seconds(both) / 1e9]
        for device in devices:
            device.transfers.direct = True
        rows.append([f"{size >> 10} KiB", *found, peer(size, False), peer(size, True)])
        print(*rows[-1], flush=True)
    return rows


def peer(size: int, access: bool) -> float:
    """Return the rate of a peer copy in this process in GB/s; nan if the process does not have two GPUs.

    Without peer access, which a program must enable, the driver copies through the host.
    """
    try:
        import cupy
    except ImportError:
        return float("nan")
    runtime = cupy.cuda.runtime
    if runtime.getDeviceCount() < 2:
        return float("nan")
    with cupy.cuda.Device(0):
        source = cupy.ones(size, cupy.uint8)
    with cupy.cuda.Device(1):
        two = cupy.empty(size, cupy.uint8)
    for k in (0, 1) if access else ():
        with cupy.cuda.Device(k), contextlib.suppress(runtime.CUDARuntimeError):  # peer access may already be enabled
            runtime.deviceEnablePeerAccess(1 - k)
    try:

        def run() -> None:
            runtime.memcpyPeer(two.data.ptr, 1, source.data.ptr, 0, size)
            for k in (0, 1):
                with cupy.cuda.Device(k):
                    runtime.deviceSynchronize()

        return size / seconds(run) / 1e9
    finally:
        for k in (0, 1) if access else ():
            with cupy.cuda.Device(k):
                runtime.deviceDisablePeerAccess(1 - k)


@ww.kernel
def burn(x, rounds):
    """Occupy the GPU for a time."""
    i = gpu.grid(1)
    v = x[i]
    for _ in range(rounds):
        v = v * 6364136223846793005 + 1442695040888963407
    x[i] = v


def copy_during_kernel(devices: Any) -> list[list[Any]]:
    """Return times of a copy of 64 MiB between idle GPUs, and while a kernel fills one of them, in milliseconds."""
    size = 1 << 26
    source, two = devices[0].empty(size, np.uint8), devices[1].empty(size, np.uint8)
    rows = []
    for direct in (True, False):
        devices[0].transfers.direct = devices[1].transfers.direct = direct
        row = ["from memory to memory" if direct else "by way of the host"]
        for busy in (None, devices[0], devices[1]):
            if busy is not None:
                x, stream = busy.zeros(1 << 22 if busy.target == "cuda" else 1 << 12, np.int64), busy.stream()
                burn[x.size, stream](x, 10)
                stream.synchronize()
            found = []
            for _ in range(5):
                if busy is not None:
                    burn[x.size, stream](x, 20_000)
                    time.sleep(2e-3)
                at = time.perf_counter()
                two.copy_from(source)
                two.device.default_stream.synchronize()
                found.append(1e3 * (time.perf_counter() - at))
                if busy is not None:
                    stream.synchronize()
                    kernel = 1e3 * (time.perf_counter() - at)
            row.append(statistics.median(found))
        rows.append([*row, kernel])
    devices[0].transfers.direct = devices[1].transfers.direct = True
    return rows


def searches(devices: Any, scale: int, sources: int) -> list[list[Any]]:
    rng = np.random.default_rng(1)
    n, m = 1 << scale, 16 << scale
    source = np.sort(rng.integers(0, n, m))
    columns = rng.integers(0, n, m).astype(np.int64)
    rows = np.searchsorted(source, np.arange(n + 1)).astype(np.int64)
    parts = []
    for device in devices[:2]:
        parts.append([device.to_device(a) for a in (rows, columns, np.zeros(n, np.int64), np.zeros(1, np.int64))])
    starts = [int(s) for s in rng.integers(0, n, sources)]

    def run(count: int) -> list[int]:
        futures = [devices[k].call(search, *parts[k], starts[k::count]) for k in range(count)]
        answers = [a.get(300) for a in futures]
        return [answers[k % count][k // count] for k in range(sources)]

    assert run(1) == run(2)
    times = [[seconds(lambda: run(1), 1), seconds(lambda: run(2), 1)] for _ in range(5)]  # alternate: hosts vary
    print("searches:", *(f"{single / two:.2f}" for single, two in times), flush=True)
    single, two = statistics.median(t[0] for t in times), statistics.median(t[1] for t in times)
    return [[f"{sources} searches, {m:,} edges", 1e3 * single, 1e3 * two, statistics.median(a / b for a, b in times)]]


def subspace(devices: Any, n: int, width: int, steps: int) -> list[list[Any]]:
    """Iterate ``V = A V``: on one GPU, and by halves of A's rows on two."""
    half = n // 2
    start_vectors = np.random.default_rng(2).random((n, width), np.float32)
    results = {}
    times = {}
    for count in (1, 2):
        part = n // count
        matrices = []
        for k in range(count):
            matrices.append(devices[k].empty((part, n), np.float32))
            devices[k].call(_fill, matrices[k], k * part)
        vectors = [devices[k].to_device(start_vectors) for k in range(count)]
        outs = [devices[k].empty((part, width), np.float32) for k in range(count)]

        def run(
            count: int = count, part: int = part, matrices: Any = matrices, vectors: Any = vectors, outs: Any = outs
        ) -> None:
            for _ in range(steps):
                for k in range(count):
                    devices[k].call(multiply, matrices[k], vectors[k], outs[k])
                for k in range(count):
                    for j in range(count):
                        vectors[j][k * part : (k + 1) * part].copy_from(outs[k])
                for k in range(count):
                    devices[k].call(normalize, vectors[k])
            for k in range(count):
                devices[k].synchronize()

        run()
        for k in range(count):
            vectors[k].copy_from(start_vectors)
        run()
        results[count] = vectors[0].copy_to_host()
        times[count] = seconds(run, 3)
        del matrices, vectors, outs
    np.testing.assert_allclose(results[1], results[2], rtol=1e-2)
    exchanged = half * width * 4 / 1e6
    name = f"subspace iteration, {n} x {n}, {width} vectors ({exchanged:.0f} MB each way a step)"
    return [[name, 1e3 * times[1] / steps, 1e3 * times[2] / steps, times[1] / times[2]]]


def _fill(matrix: Any, first: int) -> None:
    for i in range(0, matrix.shape[0], 128):
        stop = min(i + 128, matrix.shape[0])
        block = np.random.default_rng(first + i).random((stop - i, matrix.shape[1]), np.float32)
        if hasattr(matrix, "get"):
            matrix[i:stop].set(block)
        else:
            matrix[i:stop] = block


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=int, default=22, help="scale of the graph: 2^scale vertices")
    parser.add_argument("--sources", type=int, default=128)
    parser.add_argument("--size", type=int, default=32768, help="rows of the matrix")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--json", default=None, metavar="FILE")
    options = parser.parse_args()
    devices = ww.devices()
    result: dict[str, Any] = machine(devices[0].target) | {"link": devices[0].link}
    print([(d.index, d.name, d.link) for d in devices], flush=True)
    result["copies"] = copies(devices)
    names = ["size", "agent to agent", "both ways", "by the host", "both ways", "one process, no access", "with access"]
    table("GPU to GPU, GB/s", names, result["copies"])
    result["during a kernel"] = copy_during_kernel(devices)
    names = ["way", "both idle", "sender busy", "receiver busy", "minimum of that kernel"]
    table("a copy of 64 MiB during a kernel that fills a GPU, ms", names, result["during a kernel"])
    result["jobs"] = searches(devices, options.scale, options.sources)
    print(*result["jobs"][-1], flush=True)
    result["jobs"] += subspace(devices, options.size, options.width, 10)
    table("one process, two GPUs", ["work", "one GPU ms", "two GPUs ms", "speed-up"], result["jobs"])
    save(options.json, result)


if __name__ == "__main__":
    main()
