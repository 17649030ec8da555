"""Estimate pi on all devices at once, and pass partial sums from device to device.

``python many_devices.py`` uses the devices of this machine (the CPU, if there is no GPU), and
``warpwell run --agents 4 many_devices.py`` four agents; it prints the same.
"""

import numpy as np

import warpwell as ww
from warpwell import gpu

PARTS = 12
POINTS = 1 << 16


@ww.kernel
def inside(x, y, hits):
    i = gpu.grid(1)
    if x[i] * x[i] + y[i] * y[i] < 1.0:
        gpu.atomic_add(hits, 0, 1)


@ww.kernel
def add(total, part):
    total[0] += part[0]


def main():
    devices = ww.devices()
    hits = []
    for k in range(PARTS):  # nothing here waits
        with devices[k % len(devices)]:
            x, y = (ww.to_device(points) for points in np.random.default_rng(k).random((2, POINTS)))
            hits.append(ww.zeros(1, np.int64))
            inside[POINTS](x, y, hits[-1])

    first = devices[0]
    with first:
        total, part = ww.zeros(1, np.int64), ww.empty(1, np.int64)
        for each in hits:
            part.copy_from(each)  # from one agent straight to another
            add[1](total, part)
        found = int(total.copy_to_host()[0])

    print(f"{found} of {PARTS * POINTS} points: pi is about {4 * found / (PARTS * POINTS):.4f}")
    points = (np.random.default_rng(k).random((2, POINTS)) for k in range(PARTS))
    assert found == sum(int(np.sum(x * x + y * y < 1.0)) for x, y in points)


if __name__ == "__main__":
    main()
