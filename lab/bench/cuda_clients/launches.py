"""Measure launches, copies and allocations by numba-cuda in microseconds: prints one line of JSON."""

import json
import statistics
import sys
import time

import numpy as np
from numba import cuda


@cuda.jit("void(float64[:], float64[:])")
def step(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = x[i] + 1.0


def each(work, times):
    """Return the microseconds per completed call of many calls; the best of three rounds."""
    best = float("inf")
    for _ in range(3):
        cuda.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            work()
        cuda.synchronize()
        best = min(best, (time.perf_counter() - start) / times * 1e6)
    return best


def main():
    start = time.perf_counter()
    cuda.current_context()
    found = {"context, by numba, ms": (time.perf_counter() - start) * 1e3}
    rounds = int(sys.argv[1])
    host_array = np.arange(512.0)
    x, y = cuda.to_device(host_array), cuda.device_array(512)
    launch = step[4, 128]
    launch(x, y)
    found["launch by numba"] = each(lambda: launch(x, y), 40 * rounds)
    found["4 KiB in by numba"] = each(lambda: x.copy_to_device(host_array), 10 * rounds)
    found["4 KiB out by numba"] = each(lambda: y.copy_to_host(host_array), 10 * rounds)
    arrays = [cuda.device_array(1 << 18) for _ in range(10 * rounds)]  # numba frees in groups
    times = []
    for i in range(10 * rounds):
        start = time.perf_counter()
        arrays[i] = cuda.device_array(1 << 18)
        times.append(time.perf_counter() - start)
    found["2 MiB array by numba, one for another"] = statistics.median(times) * 1e6
    print(json.dumps(found))


if __name__ == "__main__":
    main()
