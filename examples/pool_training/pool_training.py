"""Train a classifier on all devices: each has a part of the data, and gradients are sent from device to device.

There are `PARTS` parts for any number of devices, and their gradients are added in one order: so
``python pool_training.py`` and ``warpwell run --agents 4 pool_training.py`` train the same weights, bit for bit.
"""

import numpy as np

import warpwell as ww
from warpwell import gpu

PARTS, SAMPLES, FEATURES, STEPS, RATE = 4, 500, 20, 60, 0.5


@ww.kernel
def add_gradient(x, y, weights, gradient):
    """Add to the gradient of logistic regression: one thread per feature, so that sums have one order."""
    f = gpu.grid(1)
    total = 0.0
    for row in range(y.size):
        score = 0.0
        for k in range(weights.size):
            score += x[row, k] * weights[k]
        total += (0.5 * score / (1.0 + abs(score)) + 0.5 - y[row]) * x[row, f]  # a sigmoid without a library
    gradient[f] = total / y.size


@ww.kernel
def add(total, part):
    i = gpu.grid(1)
    total[i] += part[i]


@ww.kernel
def descend(weights, gradient, rate):
    i = gpu.grid(1)
    weights[i] -= rate * gradient[i]


def main():
    devices = ww.devices()
    truth = np.random.default_rng(0).normal(size=FEATURES)
    owners = [devices[k % len(devices)] for k in range(PARTS)]
    data, on_devices = [], []
    for k, device in enumerate(owners):
        x = np.random.default_rng(1 + k).normal(size=(SAMPLES, FEATURES))
        y = (x @ truth > 0).astype(np.float64)
        data.append((x, y))
        on_devices.append((device.to_device(x), device.to_device(y), device.zeros(FEATURES), device.empty(FEATURES)))

    first = owners[0]
    total, part = first.zeros(FEATURES), first.empty(FEATURES)
    for _ in range(STEPS):  # nothing here waits: streams and copies keep the order
        for x, y, weights, gradient in on_devices:
            add_gradient[FEATURES](x, y, weights, gradient)
        total.fill(0.0)
        for _, _, _, gradient in on_devices:
            part.copy_from(gradient)  # straight from the device that has it
            add[FEATURES](total, part)
        for device, (_, _, weights, gradient) in zip(owners, on_devices, strict=True):
            gradient.copy_from(total)
            with device:
                descend[FEATURES](weights, gradient, RATE / PARTS)

    trained = [weights.copy_to_host() for _, _, weights, _ in on_devices]
    right = sum(int(((x @ trained[0] > 0) == (y > 0)).sum()) for x, y in data)
    print(f"{right} of {PARTS * SAMPLES} samples are classified rightly after {STEPS} steps")
    print("the first weights are", *(f"{w:.4f}" for w in trained[0][:5]))
    assert all(np.array_equal(weights, trained[0]) for weights in trained)
    assert right > 0.95 * PARTS * SAMPLES


if __name__ == "__main__":
    main()
