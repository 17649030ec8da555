"""Zoom into the Mandelbrot set: an ordinary numba-cuda program, which knows nothing of this library.

``python mandelbrot.py`` uses this machine's GPU, ``warpwell run mandelbrot.py`` one of the pool's; both print the same.
"""

import argparse

import numpy as np
from numba import cuda, float64, int32

SIZE, LIMIT = 2048, 1000
CENTRE = -0.743643887037151, 0.131825904205330


@cuda.jit((int32[:, :], float64, float64, float64))
def escape_times(image, left, top, step):
    column, row = cuda.grid(2)
    if row < image.shape[0] and column < image.shape[1]:
        cx, cy = left + column * step, top + row * step
        x = y = 0.0
        n = 0
        while n < LIMIT and x * x + y * y <= 4.0:
            x, y = x * x - y * y + cx, 2.0 * x * y + cy
            n += 1
        image[row, column] = n


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=int, default=30, help="frames")
    frames = parser.parse_args().work
    on_device = cuda.device_array((SIZE, SIZE), np.int32)
    on_host = np.empty((SIZE, SIZE), np.int32)
    inside = 0
    for frame in range(frames):
        width = 3.0 * 0.9 ** (frame % 100)
        left, top = CENTRE[0] - width / 2, CENTRE[1] - width / 2
        escape_times[(SIZE // 16, SIZE // 16), (16, 16)](on_device, left, top, width / SIZE)
        on_device.copy_to_host(on_host)
        inside += int((on_host[::16, ::16] == LIMIT).sum())
    print(f"{frames} frames, {inside} points of their samples do not escape")


if __name__ == "__main__":
    main()
