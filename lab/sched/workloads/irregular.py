"""SpMV: a sparse matrix-vector product. Memory-intensive; the time of a thread depends on the length of its row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from warpwell.scheduler.extend import Kind
from warpwell.targets import kernel
from warpwell.targets.primitives import grid, i64

from .application import Built, Inputs, Step, Workload

ZERO = np.float32(0)
ROW = 16


@kernel
def spmv(pointers, columns, values, x, y):
    """Multiply a row of a sparse matrix by a vector: a row a thread."""
    i = grid(1)
    total = ZERO
    for k in range(i64(pointers[i]), i64(pointers[i + 1])):
        total += values[k] * x[i64(columns[k])]
    y[i] = total


def _spmv(size: int, make: Inputs) -> Built:
    # Lengths are log-normal, so a few rows are many times longer than the mean of `ROW`.
    lengths = make.random.lognormal(np.log(ROW) - 0.5, 1.0, size).astype(np.int64)
    pointers = np.zeros(size + 1, np.int32)
    np.cumsum(np.minimum(lengths, 64 * ROW), out=pointers[1:])
    columns = make.random.integers(0, size, int(pointers[-1]), dtype=np.int32)
    values, x = make.uniform(int(pointers[-1])), make.uniform(size)
    y = make.zeros(size)
    arguments = (make.put(pointers), make.put(columns), make.put(values), make.put(x), y)
    step = Step(spmv[size], arguments, {"rows": size, "nonzeros": int(pointers[-1])})

    def reference() -> dict[str, NDArray[np.float64]]:
        products = np.concatenate(([0.0], np.cumsum(values * x[columns].astype(np.float64))))
        return {"y": products[pointers[1:]] - products[pointers[:-1]]}

    return Built([step], {"y": y}, reference)


WORKLOADS = (Workload("spmv", {"spmv": Kind.MEMORY}, _spmv, small=700, large=1 << 22),)
