"""Matrix-vector products: ATAX and MVT. Memory-intensive: each item of the matrix is used once a pass.

Sums over rows and columns are made in two launches, parts and then totals, because float atomics would make results
depend on the order in which blocks ran. The two differ in how many threads share a row and how long a strip is.
"""

from __future__ import annotations

import numpy as np

from warpwell.scheduler import Kind
from warpwell.targets import device, kernel
from warpwell.targets.primitives import grid

from .application import Built, Inputs, Step, Workload

ZERO = np.float32(0)


@device
def row_part(matrix, x, i, first, step, columns):
    """Return every `step`-th product of a row and a vector, added up."""
    total = ZERO
    for j in range(first, columns, step):
        total += matrix[i, j] * x[j]
    return total


@device
def column_strip(matrix, x, strip, height, j, rows):
    """Return the products of a strip of a column and a vector, added up."""
    total = ZERO
    for i in range(strip * height, min(strip * height + height, rows)):
        total += matrix[i, j] * x[i]
    return total


@device
def with_row(total, parts, i, count):
    """Return `total` and the items of a row of parts, added up."""
    for k in range(count):
        total += parts[i, k]
    return total


@device
def with_column(total, strips, j, count):
    """Return `total` and the items of a column of strips, added up."""
    for k in range(count):
        total += strips[k, j]
    return total


@kernel
def atax_rows(matrix, x, parts, columns):
    """Add up every 32nd product of a row: a warp a row."""
    i, lane = grid(2)
    parts[i, lane] = row_part(matrix, x, i, lane, 32, columns)


@kernel
def atax_fold(parts, out, count):
    """Add up a row of parts."""
    i = grid(1)
    out[i] = with_row(ZERO, parts, i, count)


@kernel
def atax_columns(matrix, x, strips, rows):
    """Add up 64 rows of a column."""
    strip, j = grid(2)
    strips[strip, j] = column_strip(matrix, x, strip, 64, j, rows)


@kernel
def atax_total(strips, out, count):
    """Add up the strips of a column."""
    j = grid(1)
    out[j] = with_column(ZERO, strips, j, count)


@kernel
def mvt_rows(matrix, y, parts, columns):
    """Add up every 8th product of a row: four rows a warp."""
    item = grid(1)
    i, lane = item >> 3, item & 7
    parts[i, lane] = row_part(matrix, y, i, lane, 8, columns)


@kernel
def mvt_columns(matrix, y, strips, rows):
    """Add up 128 rows of a column."""
    strip, j = grid(2)
    strips[strip, j] = column_strip(matrix, y, strip, 128, j, rows)


@kernel
def mvt_add(parts, strips, x1, x2, width, count):
    """Add both products to the vectors."""
    i = grid(1)
    x1[i] = with_row(x1[i], parts, i, width)
    x2[i] = with_column(x2[i], strips, i, count)


def _atax(size: int, make: Inputs) -> Built:
    n = size
    matrix, x = make.uniform(n, n), make.uniform(n)
    held, vector, count = make.put(matrix), make.put(x), -(-n // 64)
    parts, middle, strips, out = make.zeros((n, 32)), make.zeros(n), make.zeros((count, n)), make.zeros(n)
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


def _mvt(size: int, make: Inputs) -> Built:
    n = size
    matrix, x1, x2, y1, y2 = make.uniform(n, n), *(make.uniform(n) for _ in range(4))
    held, count = make.put(matrix), -(-n // 128)
    parts, strips, out1, out2 = make.zeros((n, 8)), make.zeros((count, n)), make.put(x1), make.put(x2)
    steps = [
        Step(mvt_rows[8 * n], (held, make.put(y1), parts, n), {"n": n}),
        Step(mvt_columns[count, n], (held, make.put(y2), strips, n), {"n": n}),
        Step(mvt_add[n], (parts, strips, out1, out2, 8, count), {"n": n}),
    ]

    def reference() -> dict[str, np.ndarray]:
        exact = matrix.astype(np.float64)
        return {"x1": x1 + exact @ y1, "x2": x2 + exact.T @ y2}

    return Built(steps, {"x1": out1, "x2": out2}, reference)


def _memory(*names: str) -> dict[str, Kind]:
    return dict.fromkeys(names, Kind.MEMORY)


WORKLOADS = (
    Workload("atax", _memory("atax_rows", "atax_fold", "atax_columns", "atax_total"), _atax, small=70, large=16384),
    Workload("mvt", _memory("mvt_rows", "mvt_columns", "mvt_add"), _mvt, small=66, large=16384),
)
