"""Transform an image that no device has as a whole: rows, an exchange of blocks between all devices, then columns.

``python pool_fft.py`` uses the devices of this machine, ``warpwell run --agents 4 pool_fft.py`` four agents; it prints
the same.
"""

import numpy as np

import warpwell as ww

N = 512


def transform(array):
    """Return the transform of each row: by cuFFT, through CuPy, on a GPU, by NumPy elsewhere."""
    if isinstance(array, np.ndarray):
        return np.fft.fft(array)
    import cupy

    return cupy.fft.fft(array)


def rows_first(image, *blocks):
    """Transform rows, and store a transposed block of the result for each device."""
    done = transform(image)
    first = 0
    for block in blocks:
        block[...] = done[:, first : first + len(block)].T
        first += len(block)


def columns_next(result, *blocks):
    """Put the blocks of all devices together, which are whole columns of the image, and transform them."""
    first = 0
    for block in blocks:
        result[:, first : first + block.shape[1]] = block
        first += block.shape[1]
    result[...] = transform(result)


def main():
    devices = ww.devices()
    y, x = np.mgrid[:N, :N]
    image = np.sin(2 * np.pi * (5 * x + 3 * y) / N) + 0.5 * np.cos(2 * np.pi * 40 * x / N)
    parts = np.array_split(image, len(devices))

    blocks = []  # blocks[k][j]: data that device k sends to device j
    for device, rows in zip(devices, parts, strict=True):
        blocks.append([device.empty((len(columns), len(rows)), np.complex128) for columns in parts])
        device.call(rows_first, device.to_device(rows), *blocks[-1])

    results = []
    for j, device in enumerate(devices):
        # each block goes straight from the device that has it; nothing here waits
        received = [blocks[k][j] if k == j else device.to_device(blocks[k][j]) for k in range(len(devices))]
        results.append(device.empty((len(parts[j]), N), np.complex128))
        device.call(columns_next, results[-1], *received)

    spectrum = np.concatenate([result.copy_to_host() for result in results]).T
    strength = np.abs(spectrum[: N // 2]) / N**2
    for row, column in np.argwhere(strength > 0.1):
        print(f"{row:3} waves down and {column:3} across, of strength {strength[row, column]:.3f}")
    assert np.allclose(spectrum, np.fft.fft2(image))


if __name__ == "__main__":
    main()
