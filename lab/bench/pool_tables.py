"""The source's tables 1 and 2: matrix products and FFTs on a device of the pool and on the same GPU directly.

Run it as ``python -m lab bench pool-tables``. The agent is another process on the same host, so the
link is MPI's shared memory. Each time covers the operands to the device, the computation, and the result back:

- *local pinned*, *local pageable*: CuPy in this process, from pinned and from ordinary arrays;
- *lent*: the pool, with arrays of ``ww.pinned_empty``, which the agent registers;
- *pipeline*, *one piece*: the pool with ordinary arrays, in a pipeline of chunks, and in one chunk.

Matrices are FP32, multiplied by a naive kernel and by cuBLAS; FFTs are of n rows of 1,024 complex64, by cuFFT. The
model of *pipeline* uses measured rates: the link's and the device's, in and out, the computation alone, and the time of
an empty call.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import cupy
import numpy as np

import warpwell as ww
from lab.bench.timing import machine, save, table
from warpwell import gpu
from warpwell.pool import Tuning

PIPELINE = Tuning()
LARGE = 256 << 20
SHORT = 10e-3


@ww.kernel
def product(a, b, c):
    """Multiply matrices, an item a thread."""
    i, j = gpu.grid(2)
    total = np.float32(0)
    for k in range(a.shape[1]):
        total += a[i, k] * b[k, j]
    c[i, j] = total


def blas(a: Any, b: Any, c: Any) -> None:
    cupy.matmul(a, b, out=c)


def fft(a: Any, c: Any) -> None:
    c[...] = cupy.fft.fft(a, axis=1)


def seconds(run: Callable[[], object], bound: float, times: int = 9) -> float:
    """Return the median time of a call; the first call warms up, unless the time limit is 0."""
    if bound:
        run()
    found: list[float] = []
    start = time.perf_counter()
    while len(found) < times and (not found or time.perf_counter() - start < bound):
        at = time.perf_counter()
        run()
        found.append(time.perf_counter() - at)
    return statistics.median(found)


def local(compute: Callable[..., None], inputs: Sequence[Any], out: Any) -> Callable[[], None]:
    """Return a run on the GPU of this process; arrays in pinned memory are copied by the copy engine alone."""
    on_device = [cupy.empty(a.shape, a.dtype) for a in (*inputs, out)]

    def run() -> None:
        for to, a in zip(on_device, inputs, strict=False):
            to.set(a)
        compute(*on_device)
        on_device[-1].get(out=out)
        cupy.cuda.Device().synchronize()

    return run


def pooled(
    device: Any, compute: Callable[..., None], inputs: Sequence[Any], out: Any, tuning: Tuning
) -> Callable[[], None]:
    """Return a run on a device of the pool."""
    on_device = [device.empty(a.shape, a.dtype) for a in (*inputs, out)]

    def run() -> None:
        device.transfers = tuning
        for to, a in zip(on_device, inputs, strict=False):
            to.copy_from(a)
        compute(*on_device)
        on_device[-1].copy_to_host(out)

    return run


def pinned_like(a: Any) -> Any:
    out = cupy.cuda.alloc_pinned_memory(max(1, a.nbytes))
    array = np.frombuffer(out, a.dtype, a.size).reshape(a.shape)
    array[...] = a
    return array


def lent_like(a: Any) -> Any:
    array = ww.pinned_empty(a.shape, a.dtype)
    array[...] = a
    return array


class Rates:
    """Measured rates in bytes per second, and the time of an empty call."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._data, self._lent = np.ones(LARGE, np.uint8), lent_like(np.ones(LARGE, np.uint8))
        self._device_buffer = device.empty(LARGE, np.uint8)
        self._found: list[dict[str, tuple[float, float]]] = []
        self.measure()

    def measure(self, *, discards_earlier: bool = True) -> None:
        """Measure, or average with earlier measurements, because rates of a host vary from second to second."""
        device, data, lent, device_buffer = self._device, self._data, self._lent, self._device_buffer

        def into(a: Any) -> Callable[[], None]:
            def run() -> None:
                device_buffer.copy_from(a)
                device.synchronize()

            return run

        times: dict[str, tuple[float, float]] = {}
        device.transfers = Tuning(LARGE, pipelined=False)
        times["in"] = seconds(into(data), 0.2), seconds(into(lent), 0.2)
        times["out"] = (
            seconds(lambda: device_buffer.copy_to_host(data), 0.2),
            seconds(lambda: device_buffer.copy_to_host(lent), 0.2),
        )
        self._found = [times] if discards_earlier else [*self._found, times]
        # A staged copy takes the time of the link and of the device, a zero-copy transfer only that of the device.
        total, alone = ({path: statistics.mean(f[path][k] for f in self._found) for path in times} for k in (0, 1))
        self.device = {path: LARGE / alone[path] for path in times}
        self.link = {path: LARGE / (total[path] - alone[path]) for path in times}
        self.call = seconds(device.synchronize, 0.2, 50)

    def pipeline(self, nbytes: int, path: str) -> float:
        """Return the model's time of a pipelined copy: the slower stage for all, the other one for one chunk."""
        chunk = min(nbytes, PIPELINE.plan(nbytes).chunk)
        rates = sorted((self.link[path], self.device[path]))
        return nbytes / rates[0] + chunk / rates[1]


def compare(
    device: Any, rates: Rates, name: str, local_compute: Any, away: Any, inputs: Sequence[Any], out: Any, bound: float
) -> list[Any]:
    """Return the times of all methods, measured in turn, and their ratios; the model uses rates before and after."""
    runs = {
        "local pinned": local(local_compute, [pinned_like(a) for a in inputs], pinned_like(out)),
        "local pageable": local(local_compute, inputs, out),
        "lent": pooled(device, away, [lent_like(a) for a in inputs], lent_like(out), PIPELINE),
        "pipeline": pooled(device, away, inputs, out, PIPELINE),
        "one piece": pooled(device, away, inputs, out, Tuning(max(LARGE, out.nbytes), pipelined=False)),
    }
    rates.measure()
    seconds_of: dict[str, list[float]] = {path: [] for path in runs}
    if bound:
        for run in runs.values():
            run()
    start = time.perf_counter()
    for _ in range(15 if bound else 1):
        for path, run in runs.items():
            # repeat short calls, because the first call after other work has cold caches
            short = bool(seconds_of[path]) and seconds_of[path][-1] < SHORT
            seconds_of[path].append(seconds(run, SHORT if short else 0.0))
        if len(seconds_of["lent"]) >= 3 and time.perf_counter() - start > len(runs) * bound:
            break
    rates.measure(discards_earlier=False)
    found = {path: statistics.median(times) for path, times in seconds_of.items()}
    on_device = [cupy.asarray(a) for a in (*inputs, out)]

    def computed() -> None:
        local_compute(*on_device)
        cupy.cuda.Device().synchronize()

    alone = seconds(computed, bound)
    model = alone + sum(rates.pipeline(a.nbytes, "in") for a in inputs) + rates.pipeline(out.nbytes, "out") + rates.call
    return [
        name,
        *[1e3 * t for t in found.values()],
        1e3 * alone,
        1e3 * model,
        found["pipeline"] / model,
        found["lent"] / found["local pinned"],
        found["pipeline"] / found["one piece"],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--matrices", type=int, nargs="*", default=[1024, 2048, 4096, 8192, 12288, 16384])
    parser.add_argument("--ffts", type=int, nargs="*", default=[8, 16, 64, 256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--bound", type=float, default=0.5, help="time for one figure, in seconds")
    parser.add_argument("--json", default=None, metavar="FILE")
    options = parser.parse_args()
    device = next(d for d in ww.devices() if d.target == "cuda")
    result: dict[str, Any] = machine("cuda") | {"link": device.link}
    rates = Rates(device)
    print(
        f"{device.link}: "
        + ", ".join(
            f"{path} {stage} {rate / 1e9:.2f} GB/s"
            for stage, of in (("link", rates.link), ("device", rates.device))
            for path, rate in of.items()
        )
        + f"; a call that moves nothing {1e6 * rates.call:.0f} us",
        flush=True,
    )
    columns = [
        "case",
        "local pinned ms",
        "local pageable",
        "lent",
        "pipeline",
        "one piece",
        "computation",
        "model",
        "pipeline/model",
        "lent/local pinned",
        "pipeline/one piece",
    ]
    rows = []
    rng = np.random.default_rng(0)
    for n in options.ffts:
        a = (rng.random((n, 1024), np.float32) + 1j).astype(np.complex64)
        c = np.zeros_like(a)
        away = lambda x, z: device.call(fft, x, z)  # noqa: E731
        rows.append(compare(device, rates, f"FFT {n}", fft, away, (a,), c, options.bound))
        print(*rows[-1], flush=True)
        np.testing.assert_allclose(c[0], np.fft.fft(a[0]), rtol=1e-3, atol=1e-2)
    for n in options.matrices:
        a, b = (rng.random((n, n), np.float32) for _ in range(2))
        c = np.zeros((n, n), np.float32)

        def naive(*arrays: Any) -> None:
            product[arrays[0].shape](*arrays)

        for name, local_compute, away in (
            ("cuBLAS", blas, lambda x, y, z: device.call(blas, x, y, z)),
            ("naive", naive, naive),
        ):
            if name == "naive" and n > 8192 and n != max(options.matrices):
                continue  # seconds each
            bound = 0.0 if name == "naive" and n > 8192 else options.bound
            rows.append(compare(device, rates, f"{name} {n}", local_compute, away, (a, b), c, bound))
            print(*rows[-1], flush=True)
        np.testing.assert_allclose(c[0, :50], a[0] @ b[:, :50], rtol=1e-3)
    table("in, computed, out", columns, rows)
    result["columns"], result["rows"] = columns, rows
    result["rates"] = {"link": rates.link, "device": rates.device, "call": rates.call}
    save(options.json, result)


if __name__ == "__main__":
    main()
