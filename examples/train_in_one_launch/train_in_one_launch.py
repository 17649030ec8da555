"""Train a digits classifier inside one kernel launch: the kernel draws the records from a store by itself.

Run it with ``python train_in_one_launch.py [DEVICE]``; DEVICE is "cpu" (the default) or "cuda". It needs scikit-learn
(``pip install -e '.[examples]'``). No Python code runs between the first record and the last of three epochs.
"""

import math
import sys

import numpy as np

import warpwell as ww
from warpwell import gpu

try:
    from sklearn.datasets import load_digits
except ImportError:
    raise SystemExit("this example needs scikit-learn, which has the digits: run pip install scikit-learn") from None

EPOCHS, RATE, IN_FLIGHT = 3, 0.05, 8


@ww.kernel
def train(kv, orders, weights, records, tickets, scores, counts):
    for epoch in range(EPOCHS):
        for position in range(-IN_FLIGHT, counts.shape[1]):
            slot = position % IN_FLIGHT
            if position >= 0:
                while kv.poll(tickets[slot]) < 0:
                    pass
                kv.take(tickets[slot], records)
                learn(records[0].image, records[0].label, weights, scores)
                counts[epoch, ww.kv.permuted(position, orders[epoch])] += 1
            if position + IN_FLIGHT < counts.shape[1]:  # request the record that is used IN_FLIGHT steps later
                tickets[slot] = kv.submit(ww.kv.permuted(position + IN_FLIGHT, orders[epoch]))


@gpu.function
def learn(image, label, weights, scores):
    """Make one step of gradient descent of a softmax regression."""
    total = 0.0
    for c in range(10):
        scores[c] = weights[c, 64]
        for j in range(64):
            scores[c] += weights[c, j] * (image[j // 8, j % 8] / 16)
        scores[c] = math.exp(scores[c])
        total += scores[c]
    for c in range(10):
        gradient = RATE * (scores[c] / total - (1.0 if c == label else 0.0))
        for j in range(64):
            weights[c, j] -= gradient * (image[j // 8, j % 8] / 16)
        weights[c, 64] -= gradient


def main(device="cpu"):
    data = load_digits()
    images, labels, count = data.images.astype(np.uint8), data.target.astype(np.int64), len(data.target)
    with ww.kv.create("digits.kv", schema={"image": ("uint8", (8, 8)), "label": "int64"}, overwrite=True) as store:
        store.put_many(np.arange(count), {"image": images, "label": labels})
    orders = [ww.kv.Permutation(count, seed=7, epoch=epoch) for epoch in range(EPOCHS)]
    weights, counts = np.zeros((10, 65)), np.zeros((EPOCHS, count), np.int64)
    with ww.kv.open("digits.kv", device=device) as store:
        records = np.zeros(1, store.schema.record)
        order_words = np.stack([order.words for order in orders])
        train[1](store, order_words, weights, records, np.zeros(IN_FLIGHT, np.int64), np.zeros(10), counts)

    expected = np.zeros((10, 65))
    pixels = np.hstack([images.reshape(-1, 64) / 16, np.ones((count, 1))])
    for order in orders:
        for key in order.slice(0, count):
            scores = np.exp(expected @ pixels[key])
            expected -= RATE * np.outer(scores / scores.sum() - (np.arange(10) == labels[key]), pixels[key])
    accuracy = ((pixels @ weights.T).argmax(axis=1) == labels).mean()
    print(f"{EPOCHS} epochs of {count} records in one launch on {device}: accuracy {accuracy:.3f}")
    assert (counts == 1).all() and np.allclose(weights, expected, rtol=0, atol=1e-9) and accuracy > 0.9


if __name__ == "__main__":
    main(*sys.argv[1:])
