"""Train a digits classifier inside one kernel launch: the kernel draws the records from a store by itself.

Run it with ``python train_in_one_launch.py [DEVICE]``; DEVICE is "cpu" (the default) or "cuda". It needs scikit-learn
(``pip install -e '.[examples]'``). No Python code runs between the first record and the last of three epochs.
"""

import math
import sys
import tempfile
from pathlib import Path

import numpy as np

import warpwell as ww
from warpwell import gpu

try:
    from sklearn.datasets import load_digits
except ImportError:
    raise SystemExit(
        "this example needs scikit-learn, which has the digits: run pip install -e '.[examples]' in the checkout of "
        "Warpwell, or pip install scikit-learn"
    ) from None

EPOCHS, SEED, RATE = 3, 7, 0.05
AHEAD = 8
"""Records that are on their way while one is learned from."""


@ww.kernel
def train(kv, orders, weights, rows, tickets, score, read_counts):
    for epoch in range(orders.shape[0]):
        order = orders[epoch]
        for position in range(-AHEAD, read_counts.shape[1]):
            slot = position % AHEAD
            if position >= 0:
                key = ww.kv.permuted(position, order)  # this epoch's shuffled order, computed here
                if tickets[slot] < 0:
                    kv.retrieve(key, rows)
                else:
                    while kv.poll(tickets[slot]) < 0:
                        pass
                    kv.take(tickets[slot], rows)
                read_counts[epoch, key] += 1
                learn(rows[0], weights, score)
            if position + AHEAD < read_counts.shape[1]:
                tickets[slot] = kv.submit(ww.kv.permuted(position + AHEAD, order))


@gpu.function
def learn(record, weights, score):
    """Make one step of gradient descent of a softmax regression."""
    largest = -1e30
    for c in range(10):
        score[c] = weights[c, 64]
        for j in range(64):
            score[c] += weights[c, j] * (record.x[j // 8, j % 8] / 16)
        largest = max(largest, score[c])
    total = 0.0
    for c in range(10):
        score[c] = math.exp(score[c] - largest)
        total += score[c]
    for c in range(10):
        gradient = RATE * (score[c] / total - (1.0 if c == record.y else 0.0))
        for j in range(64):
            weights[c, j] -= gradient * (record.x[j // 8, j % 8] / 16)
        weights[c, 64] -= gradient


def main(device="cpu"):
    images, labels = load_digits(return_X_y=True)
    images, labels = images.reshape(-1, 8, 8).astype(np.uint8), labels.astype(np.int64)
    orders = [ww.kv.Permutation(len(labels), SEED, epoch) for epoch in range(EPOCHS)]
    weights, read_counts = np.zeros((10, 65)), np.zeros((EPOCHS, len(labels)), np.int64)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.kv"
        with ww.kv.create(path, schema={"x": ("uint8", (8, 8)), "y": ("int64", ())}) as store:
            store.put_many(np.arange(len(labels)), {"x": images, "y": labels})
        with ww.kv.open(path, device=device) as store:
            rows = np.zeros(1, store.schema.record)  # fields by name: record.x, record.y
            orders_words = np.stack([order.words for order in orders])
            train[1](store, orders_words, weights, rows, np.full(AHEAD, -1), np.zeros(10), read_counts)

    expected = np.zeros((10, 65))
    pixels = np.hstack([images.reshape(-1, 64) / 16, np.ones((len(labels), 1))])
    for order in orders:
        for key in order.slice(0, len(labels)):
            probability = np.exp(expected @ pixels[key] - (expected @ pixels[key]).max())
            expected -= RATE * np.outer(probability / probability.sum() - (np.arange(10) == labels[key]), pixels[key])
    accuracy = ((pixels @ weights.T).argmax(axis=1) == labels).mean()
    print(f"{EPOCHS} epochs of {len(labels)} records in one launch on {device}: accuracy {accuracy:.3f}")
    assert (read_counts == 1).all() and np.allclose(weights, expected, rtol=0, atol=1e-9) and accuracy > 0.9


if __name__ == "__main__":
    main(*sys.argv[1:])
