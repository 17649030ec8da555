"""Products of matrices by tiles in shared memory: an ordinary numba-cuda program, which knows nothing of this library.

``python matrix_product.py`` uses this machine's GPU, ``warpwell run matrix_product.py`` one of the pool's; both print
the same.
"""

import argparse

import numpy as np
from numba import cuda, float32

TILE = 32


@cuda.jit
def multiply(a, b, c):
    rows = cuda.shared.array((TILE, TILE), float32)
    columns = cuda.shared.array((TILE, TILE), float32)
    x, y = cuda.grid(2)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    total = float32(0)
    for tile in range(a.shape[1] // TILE):
        rows[ty, tx] = a[y, tile * TILE + tx]
        columns[ty, tx] = b[tile * TILE + ty, x]
        cuda.syncthreads()
        for k in range(TILE):
            total += rows[ty, k] * columns[k, tx]
        cuda.syncthreads()
    c[y, x] = total


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=int, default=20, help="products")
    parser.add_argument("--size", type=int, default=4096, help="rows and columns, a multiple of 32")
    options = parser.parse_args()
    random = np.random.default_rng(1)
    a, b = (random.integers(-4, 5, (options.size, options.size)).astype(np.float32) for _ in range(2))
    c = np.empty_like(a)
    blocks = options.size // TILE, options.size // TILE
    right = cuda.to_device(b)
    for turn in range(options.work):
        a[0, 0] = turn % 5
        left = cuda.to_device(a)
        product = cuda.device_array_like(a)
        multiply[blocks, (TILE, TILE)](left, right, product)
        product.copy_to_host(c)
        row = turn % options.size  # without a BLAS: its threads would spin on all cores until the next product
        assert np.array_equal(c[row, ::64], (a[row, :, None] * b[:, ::64]).sum(axis=0))  # whole numbers: exact
    print(f"{options.work} products of {options.size} x {options.size}, the last has the trace {np.trace(c):.0f}")


if __name__ == "__main__":
    main()
