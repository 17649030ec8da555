"""Stencils: a 3 x 3 convolution of an image. Memory-intensive."""

from __future__ import annotations

import numpy as np

from warpwell.scheduler.extend import Kind
from warpwell.targets import kernel
from warpwell.targets.primitives import grid

from .application import Built, Inputs, Step, Workload

WEIGHTS = np.array([[0.2, -0.3, 0.4], [0.5, 0.6, 0.7], [-0.8, -0.9, 0.1]], np.float32)
W00, W01, W02, W10, W11, W12, W20, W21, W22 = (np.float32(w) for w in WEIGHTS.flat)


@kernel
def conv2d(image, out):
    """Weigh the nine neighbors of each inner point; `out` has two rows and two columns fewer."""
    i, j = grid(2)
    total = W00 * image[i, j] + W01 * image[i, j + 1] + W02 * image[i, j + 2]
    total += W10 * image[i + 1, j] + W11 * image[i + 1, j + 1] + W12 * image[i + 1, j + 2]
    total += W20 * image[i + 2, j] + W21 * image[i + 2, j + 1] + W22 * image[i + 2, j + 2]
    out[i, j] = total


def _conv2d(size: int, make: Inputs) -> Built:
    image = make.uniform(size + 2, size + 2)
    out = make.zeros(size, size)

    def reference() -> dict[str, np.ndarray]:
        total = np.zeros((size, size))
        for di in range(3):
            for dj in range(3):
                total += float(WEIGHTS[di, dj]) * image[di : di + size, dj : dj + size]
        return {"out": total}

    return Built([Step(conv2d[size, size], (make.put(image), out), {"n": size})], {"out": out}, reference)


WORKLOADS = (Workload("conv2d", {"conv2d": Kind.MEMORY}, _conv2d, small=50, large=16384),)
