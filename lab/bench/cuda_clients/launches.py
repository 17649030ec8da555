"""What launches, copies and allocations by numba-cuda cost, in microseconds: prints one line of JSON."""

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
    """Return microseconds of one of many calls, done; the best of three rounds."""
    best = float("inf")
    for _ in range(3):
        cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(times):
            work()
        cuda.synchronize()
        best = min(best, (time.perf_counter() - begun) / times * 1e6)
    return best


def main():
    begun = time.perf_counter()
    cuda.current_context()
    found = {"context, by numba, ms": (time.perf_counter() - begun) * 1e3}
    rounds = int(sys.argv[1])
    here = np.arange(512.0)
    x, y = cuda.to_device(here), cuda.device_array(512)
    launch = step[4, 128]
    launch(x, y)
    found["launch by numba"] = each(lambda: launch(x, y), 40 * rounds)
    found["4 KiB in by numba"] = each(lambda: x.copy_to_device(here), 10 * rounds)
    found["4 KiB out by numba"] = each(lambda: y.copy_to_host(here), 10 * rounds)
    kept = [cuda.device_array(1 << 18) for _ in range(10 * rounds)]  # numba frees in groups
    times = []
    for i in range(10 * rounds):
        begun = time.perf_counter()
        kept[i] = cuda.device_array(1 << 18)
        times.append(time.perf_counter() - begun)
    found["2 MiB array by numba, one for another"] = statistics.median(times) * 1e6
    print(json.dumps(found))


if __name__ == "__main__":
    main()
