"""Stencils: 2-D convolution and the finite-difference time-domain method. Memory-intensive."""

from __future__ import annotations

import numpy as np

from warpwell.scheduler import Kind
from warpwell.targets import kernel
from warpwell.targets.primitives import grid

from .application import Built, Inputs, Step, Workload, geometric

WEIGHTS = np.array([[0.2, -0.3, 0.4], [0.5, 0.6, 0.7], [-0.8, -0.9, 0.1]], np.float32)
W00, W01, W02, W10, W11, W12, W20, W21, W22 = (np.float32(w) for w in WEIGHTS.flat)
HALF = np.float32(0.5)
SEVEN_TENTHS = np.float32(0.7)
STEPS = 2
"""Time steps of an FDTD application: three launches each."""


@kernel
def conv2d(image, out):
    """Weigh the nine neighbours of each inner point; `out` has two rows and two columns fewer."""
    i, j = grid(2)
    total = W00 * image[i, j] + W01 * image[i, j + 1] + W02 * image[i, j + 2]
    total += W10 * image[i + 1, j] + W11 * image[i + 1, j + 1] + W12 * image[i + 1, j + 2]
    total += W20 * image[i + 2, j] + W21 * image[i + 2, j + 1] + W22 * image[i + 2, j + 2]
    out[i, j] = total


@kernel
def fdtd_ey(ey, hz, source):
    """Advance the electric field along y; its first row is the source."""
    i, j = grid(2)
    if i == 0:
        ey[i, j] = source
    else:
        ey[i, j] = ey[i, j] - HALF * (hz[i, j] - hz[i - 1, j])


@kernel
def fdtd_ex(ex, hz):
    """Advance the electric field along x."""
    i, j = grid(2)
    if j > 0:
        ex[i, j] = ex[i, j] - HALF * (hz[i, j] - hz[i, j - 1])


@kernel
def fdtd_hz(ex, ey, hz):
    """Advance the magnetic field."""
    i, j = grid(2)
    hz[i, j] = hz[i, j] - SEVEN_TENTHS * (ex[i, j + 1] - ex[i, j] + ey[i + 1, j] - ey[i, j])


def _conv2d(size: int, make: Inputs) -> Built:
    image = make.uniform(size + 2, size + 2)
    out = make.zeros((size, size))

    def reference() -> dict[str, np.ndarray]:
        total = np.zeros((size, size))
        for di in range(3):
            for dj in range(3):
                total += float(WEIGHTS[di, dj]) * image[di : di + size, dj : dj + size]
        return {"out": total}

    return Built([Step(conv2d[size, size], (make.put(image), out), {"n": size})], {"out": out}, reference)


def _fdtd(size: int, make: Inputs) -> Built:
    n = size
    start = {"ex": make.uniform(n, n + 1), "ey": make.uniform(n + 1, n), "hz": make.uniform(n, n)}
    ex, ey, hz = (make.put(start[k]) for k in ("ex", "ey", "hz"))
    steps = []
    for t in range(STEPS):
        steps += [
            Step(fdtd_ey[n, n], (ey, hz, np.float32(t)), {"n": n}),
            Step(fdtd_ex[n, n], (ex, hz), {"n": n}),
            Step(fdtd_hz[n, n], (ex, ey, hz), {"n": n}),
        ]

    def reference() -> dict[str, np.ndarray]:
        x, y, z = (start[k].astype(np.float64) for k in ("ex", "ey", "hz"))
        for t in range(STEPS):
            y[0] = t
            y[1:n] -= 0.5 * (z[1:] - z[:-1])
            x[:, 1:n] -= 0.5 * (z[:, 1:] - z[:, :-1])
            z -= 0.7 * (x[:, 1:] - x[:, :-1] + y[1:] - y[:-1])
        return {"ex": x, "ey": y, "hz": z}

    return Built(steps, {"ex": ex, "ey": ey, "hz": hz}, reference)


WORKLOADS = (
    Workload(
        "conv2d",
        "3 x 3 convolution of an image; size: rows and columns",
        {"conv2d": Kind.MEMORY},
        _conv2d,
        small=50,
        large=16384,
        sizes=geometric(128, 4096),
    ),
    Workload(
        "fdtd",
        "electromagnetic waves in two dimensions; size: rows and columns",
        {"fdtd_hz": Kind.MEMORY, "fdtd_ey": Kind.MEMORY, "fdtd_ex": Kind.MEMORY},
        _fdtd,
        small=45,
        large=12288,
        sizes=geometric(128, 3072),
    ),
)
