"""Matrix-vector products: ATAX, BICG and MVT. Memory-intensive: each item of the matrix is used once a pass.

Sums over rows and columns are made in two launches, parts and then totals, because float atomics would make results
depend on the order in which blocks ran. The three differ in how many threads share a row and how long a strip is.
"""

from __future__ import annotations

import numpy as np

from ...scheduler.task import Kind
from ...targets import grid, kernel
from .application import Built, Inputs, Step, Workload, geometric

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
    for i in range(strip * 64, min(strip * 64 + 64, rows)):
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


@kernel
def bicg_rows(matrix, p, parts, columns):
    """Add up every 64th product of a row: two warps a row."""
    i, lane = grid(2)
    total = ZERO
    for j in range(lane, columns, 64):
        total += matrix[i, j] * p[j]
    parts[i, lane] = total


@kernel
def bicg_columns(matrix, r, strips, rows):
    """Add up 32 rows of a column."""
    strip, j = grid(2)
    total = ZERO
    for i in range(strip * 32, min(strip * 32 + 32, rows)):
        total += matrix[i, j] * r[i]
    strips[strip, j] = total


@kernel
def bicg_fold(parts, strips, q, s, width, count):
    """Add up parts and strips."""
    i = grid(1)
    total = ZERO
    for k in range(width):
        total += parts[i, k]
    q[i] = total
    total = ZERO
    for k in range(count):
        total += strips[k, i]
    s[i] = total


@kernel
def mvt_rows(matrix, y, parts, columns):
    """Add up every 8th product of a row: four rows a warp."""
    item = grid(1)
    i, lane = item >> 3, item & 7
    total = ZERO
    for j in range(lane, columns, 8):
        total += matrix[i, j] * y[j]
    parts[i, lane] = total


@kernel
def mvt_columns(matrix, y, strips, rows):
    """Add up 128 rows of a column."""
    strip, j = grid(2)
    total = ZERO
    for i in range(strip * 128, min(strip * 128 + 128, rows)):
        total += matrix[i, j] * y[i]
    strips[strip, j] = total


@kernel
def mvt_add(parts, strips, x1, x2, width, count):
    """Add both products to the vectors."""
    i = grid(1)
    total = x1[i]
    for k in range(width):
        total += parts[i, k]
    x1[i] = total
    total = x2[i]
    for k in range(count):
        total += strips[k, i]
    x2[i] = total


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


def _bicg(size: int, make: Inputs) -> Built:
    n = size
    matrix, p, r = make.uniform(n, n), make.uniform(n), make.uniform(n)
    held, count = make.put(matrix), -(-n // 32)
    parts, strips, q, s = make.zeros((n, 64)), make.zeros((count, n)), make.zeros(n), make.zeros(n)
    steps = [
        Step(bicg_rows[n, 64], (held, make.put(p), parts, n), {"n": n}),
        Step(bicg_columns[count, n], (held, make.put(r), strips, n), {"n": n}),
        Step(bicg_fold[n], (parts, strips, q, s, 64, count), {"n": n}),
    ]

    def reference() -> dict[str, np.ndarray]:
        exact = matrix.astype(np.float64)
        return {"q": exact @ p, "s": exact.T @ r}

    return Built(steps, {"q": q, "s": s}, reference)


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
    Workload(
        "atax", "transposed matrix times (matrix times vector); size: rows and columns",
        _memory("atax_rows", "atax_fold", "atax_columns", "atax_total"), "matrix-vector", _atax,
        small=70, large=16384, sizes=geometric(256, 4096),
    ),
    Workload(
        "bicg", "a matrix and its transpose, each times a vector; size: rows and columns",
        _memory("bicg_rows", "bicg_columns", "bicg_fold"), "matrix-vector", _bicg,
        small=75, large=16384, sizes=geometric(256, 4096),
    ),
    Workload(
        "mvt", "two vectors plus matrix-vector products; size: rows and columns",
        _memory("mvt_rows", "mvt_columns", "mvt_add"), "matrix-vector", _mvt,
        small=66, large=16384, sizes=geometric(256, 4096),
    ),
)  # fmt: skip
