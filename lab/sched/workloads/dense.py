"""Matrix products: GEMM, 2MM and correlation. Compute-intensive, but for the passes over correlation's data."""

from __future__ import annotations

import math

import numpy as np

from warpwell.scheduler import Kind
from warpwell.targets import kernel
from warpwell.targets.primitives import grid

from .application import Built, Inputs, Step, Workload, geometric

ZERO = np.float32(0)
ONE = np.float32(1)
LEAST = np.float32(1e-6)
ROWS = 64
"""Rows of the data that a thread of `correlation_sums` adds up."""


@kernel(max_registers=64)
def gemm(a, b, c, alpha, beta, inner):
    """Compute c = alpha a b + beta c, an item a thread."""
    i, j = grid(2)
    total = ZERO
    for k in range(inner):
        total += a[i, k] * b[k, j]
    c[i, j] = alpha * total + beta * c[i, j]


@kernel(max_registers=64)
def mm2_first(a, b, product, alpha, inner):
    """Compute product = alpha a b, two neighbouring rows a thread."""
    i, j = grid(2)
    low, high = ZERO, ZERO
    for k in range(inner):
        right = b[k, j]
        low += a[2 * i, k] * right
        high += a[2 * i + 1, k] * right
    product[2 * i, j] = alpha * low
    product[2 * i + 1, j] = alpha * high


@kernel(max_registers=64)
def mm2_second(product, c, d, beta, inner):
    """Compute d = product c + beta d, two neighbouring rows a thread."""
    i, j = grid(2)
    low, high = ZERO, ZERO
    for k in range(inner):
        right = c[k, j]
        low += product[2 * i, k] * right
        high += product[2 * i + 1, k] * right
    d[2 * i, j] = low + beta * d[2 * i, j]
    d[2 * i + 1, j] = high + beta * d[2 * i + 1, j]


@kernel
def correlation_sums(data, sums, squares, rows):
    """Add up a strip of a column, and its squares."""
    strip, j = grid(2)
    total, square = ZERO, ZERO
    for i in range(strip * ROWS, min(strip * ROWS + ROWS, rows)):
        value = data[i, j]
        total += value
        square += value * value
    sums[strip, j] = total
    squares[strip, j] = square


@kernel
def correlation_moments(sums, squares, mean, scale, strips, rows, count):
    """Make each column's mean, and one over (standard deviation times root of rows)."""
    j = grid(1)
    total, square = ZERO, ZERO
    for strip in range(strips):
        total += sums[strip, j]
        square += squares[strip, j]
    middle = total / count
    variance = square / count - middle * middle
    mean[j] = middle
    scale[j] = ONE / math.sqrt(max(variance, LEAST) * count)


@kernel
def correlation_center(data, mean, scale):
    """Subtract the means and divide by the deviations, in place."""
    i, j = grid(2)
    data[i, j] = (data[i, j] - mean[j]) * scale[j]


@kernel(max_registers=64)
def correlation_product(data, result, rows):
    """Multiply the transposed data by itself; the upper triangle's threads write both halves."""
    i, j = grid(2)
    if i == j:
        result[i, j] = ONE
    elif i < j:
        total = ZERO
        for k in range(rows):
            total += data[k, i] * data[k, j]
        result[i, j] = total
        result[j, i] = total


def _gemm(size: int, make: Inputs) -> Built:
    a, b, c = (make.uniform(size, size) for _ in range(3))
    alpha, beta = np.float32(1.5), np.float32(1.2)
    out = make.put(c)
    arguments = (make.put(a), make.put(b), out, alpha, beta, size)

    def reference() -> dict[str, np.ndarray]:
        return {"c": alpha * (a.astype(np.float64) @ b) + beta * c}

    return Built([Step(gemm[size, size], arguments, {"n": size})], {"c": out}, reference)


def _mm2(size: int, make: Inputs) -> Built:
    n = size + size % 2
    a, b, c, d = (make.uniform(n, n) for _ in range(4))
    alpha, beta = np.float32(0.01), np.float32(1.2)
    out, product, inner = make.put(d), make.zeros((n, n)), n
    steps = [
        Step(mm2_first[n // 2, n], (make.put(a), make.put(b), product, alpha, inner), {"n": n}),
        Step(mm2_second[n // 2, n], (product, make.put(c), out, beta, inner), {"n": n}),
    ]

    def reference() -> dict[str, np.ndarray]:
        return {"d": alpha * (a.astype(np.float64) @ b) @ c + beta * d}

    return Built(steps, {"d": out}, reference)


def _correlation(size: int, make: Inputs) -> Built:
    rows, columns = 2 * size, size
    # columns that go together in pairs, so that correlations are not all about zero
    data = make.uniform(rows, columns) + make.uniform(rows, 1)
    strips = -(-rows // ROWS)
    held, out = make.put(data), make.zeros((columns, columns))
    sums, squares = make.zeros((strips, columns)), make.zeros((strips, columns))
    mean, scale = make.zeros(columns), make.zeros(columns)
    size_of: dict[str, float] = {"rows": rows, "columns": columns}
    moments = (sums, squares, mean, scale, strips, rows, np.float32(rows))
    steps = [
        Step(correlation_sums[strips, columns], (held, sums, squares, rows), dict(size_of)),
        Step(correlation_moments[columns], moments, dict(size_of)),
        Step(correlation_center[rows, columns], (held, mean, scale), dict(size_of)),
        Step(correlation_product[columns, columns], (held, out, rows), dict(size_of)),
    ]

    def reference() -> dict[str, np.ndarray]:
        exact = data.astype(np.float64)
        exact = exact - exact.mean(axis=0)
        exact /= np.sqrt(np.maximum((exact * exact).sum(axis=0), 1e-6 * rows))
        result = exact.T @ exact
        np.fill_diagonal(result, 1.0)
        return {"result": result}

    return Built(steps, {"result": out}, reference)


WORKLOADS = (
    Workload(
        "gemm",
        "general matrix product; size: rows and columns",
        {"gemm": Kind.COMPUTE},
        _gemm,
        small=48,
        large=2048,
        sizes=geometric(64, 1024),
    ),
    Workload(
        "2mm",
        "two matrix products; size: rows and columns",
        {"mm2_first": Kind.COMPUTE, "mm2_second": Kind.COMPUTE},
        _mm2,
        small=40,
        large=2048,
        sizes=geometric(64, 1024, step=2),
    ),
    Workload(
        "correlation",
        "correlations of columns; size: columns, and half the rows",
        {
            "correlation_product": Kind.COMPUTE,
            "correlation_center": Kind.MEMORY,
            "correlation_sums": Kind.MEMORY,
            "correlation_moments": Kind.MEMORY,
        },
        _correlation,
        small=40,
        large=1536,
        sizes=geometric(64, 768),
        tolerance=1e-3,
    ),
)
