"""ATAX: the product of a transposed matrix, the matrix and a vector. Memory-intensive.

Sums over rows and columns are made in two launches, parts and then totals, because float atomics would make results
depend on the order in which blocks ran.
"""

from __future__ import annotations

import numpy as np

from warpwell.scheduler.extend import Kind
from warpwell.targets import kernel
from warpwell.targets.primitives import grid

from .application import Built, Inputs, Step, Workload

ZERO = np.float32(0)


@kernel
def atax_rows(matrix, x, parts, columns):
    """Add up every 32nd product of a row: a warp a row."""
    i, lane = grid(2)
    total = ZERO
    for j in range(lane, columns, 32):
        total += matrix[i, j] * x[j]
    parts[i, lane] = total


@kernel
def atax_fold(parts, out, count):
    """Add up a row of parts."""
    i = grid(1)
    total = ZERO
    for k in range(count):
        total += parts[i, k]
    out[i] = total


@kernel
def atax_columns(matrix, x, strips, rows):
    """Add up 64 rows of a column."""
    strip, j = grid(2)
    total = ZERO
    for i in range(64 * strip, min(64 * strip + 64, rows)):
        total += matrix[i, j] * x[i]
    strips[strip, j] = total


@kernel
def atax_total(strips, out, count):
    """Add up the strips of a column."""
    j = grid(1)
    total = ZERO
    for k in range(count):
        total += strips[k, j]
    out[j] = total


def _atax(size: int, make: Inputs) -> Built:
    n = size
    matrix, x = make.uniform(n, n), make.uniform(n)
    held, vector, count = make.put(matrix), make.put(x), -(-n // 64)
    parts, middle, strips, out = make.zeros(n, 32), make.zeros(n), make.zeros(count, n), make.zeros(n)
    steps = [
        Step(atax_rows[n, 32], (held, vector, parts, n), {"n": n}),
        Step(atax_fold[n], (parts, middle, 32), {"n": n}),
        Step(atax_columns[count, n], (held, middle, strips, n), {"n": n}),
        Step(atax_total[n], (strips, out, count), {"n": n}),
    ]

    def reference() -> dict[str, np.ndarray]:
        exact = matrix.astype(np.float64)
        return {"y": exact.T @ (exact @ x)}

    return Built(steps, {"y": out}, reference)


KINDS = dict.fromkeys(("atax_rows", "atax_fold", "atax_columns", "atax_total"), Kind.MEMORY)
WORKLOADS = (Workload("atax", KINDS, _atax, small=70, large=16384),)
