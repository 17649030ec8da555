"""GEMM: a general matrix product. Compute-intensive."""

from __future__ import annotations

import numpy as np

from warpwell.scheduler.extend import Kind
from warpwell.targets import kernel
from warpwell.targets.primitives import grid

from .application import Built, Inputs, Step, Workload

ZERO = np.float32(0)


@kernel(max_registers=64)
def gemm(a, b, c, alpha, beta, inner):
    """Compute c = alpha a b + beta c, an item a thread."""
    i, j = grid(2)
    total = ZERO
    for k in range(inner):
        total += a[i, k] * b[k, j]
    c[i, j] = alpha * total + beta * c[i, j]


def _gemm(size: int, make: Inputs) -> Built:
    a, b, c = (make.uniform(size, size) for _ in range(3))
    alpha, beta = np.float32(1.5), np.float32(1.2)
    out = make.put(c)
    arguments = (make.put(a), make.put(b), out, alpha, beta, size)

    def reference() -> dict[str, np.ndarray]:
        return {"c": alpha * (a.astype(np.float64) @ b) + beta * c}

    return Built([Step(gemm[size, size], arguments, {"n": size})], {"c": out}, reference)


WORKLOADS = (Workload("gemm", {"gemm": Kind.COMPUTE}, _gemm, small=48, large=2048),)
