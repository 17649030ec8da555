"""Multiply two matrices on all devices: each device receives blocks of rows, and its library multiplies them.

``python pool_matrix.py`` uses the devices of this machine, ``warpwell run --agents 4 pool_matrix.py`` four agents, on
this machine or others; it prints the same.
"""

import numpy as np

import warpwell as ww

N = 768


def multiply(block, matrix, product):
    """Run on a device: buffers arrive as NumPy arrays, or on a GPU as CuPy's, whose ``@`` is cuBLAS."""
    product[...] = block @ matrix


def main():
    devices = ww.devices()
    random = np.random.default_rng(0)
    a, b = (random.integers(-8, 8, (N, N)).astype(np.float64) for _ in range(2))  # so that sums are exact

    first = devices[0].to_device(b)
    products = []
    for device, rows in zip(devices, np.array_split(a, len(devices)), strict=True):
        with device:  # nothing here waits
            matrix = first if device is devices[0] else ww.to_device(first)  # straight from the first device
            block, product = ww.to_device(rows), ww.empty((len(rows), N))
            device.call(multiply, block, matrix, product)
            products.append(product)

    c = np.concatenate([product.copy_to_host() for product in products])
    print(f"the product of two {N} x {N} matrices has the trace {np.trace(c):,.0f} and the sum {c.sum():,.0f}")
    assert np.array_equal(c, a @ b)


if __name__ == "__main__":
    main()
