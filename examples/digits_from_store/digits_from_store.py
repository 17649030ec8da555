"""Train a digits classifier from a store on disk, and check that the losses equal the losses of training from memory.

Run it with ``python digits_from_store.py``; it needs scikit-learn (``pip install -e '.[examples]'``) and no GPU.
"""

import tempfile
from pathlib import Path

import numpy as np

import warpwell as ww

try:
    from sklearn.datasets import load_digits
except ImportError:
    raise SystemExit(
        "this example needs scikit-learn, which has the digits: run pip install -e '.[examples]' in the checkout of "
        "Warpwell, or pip install scikit-learn"
    ) from None

EPOCHS, BATCH, SEED = 10, 64, 7


def scores(weights, x):
    pixels = np.hstack([x.reshape(-1, 64) / 16, np.ones((len(x), 1))])
    return pixels, pixels @ weights


def step(weights, x, y):
    pixels, raw = scores(weights, x)
    probability = np.exp(raw - raw.max(axis=1, keepdims=True))
    probability /= probability.sum(axis=1, keepdims=True)
    loss = -np.log(probability[np.arange(len(y)), y]).mean()
    weights -= 0.5 / len(y) * pixels.T @ (probability - np.eye(10)[y])
    return loss


def main():
    images, labels = load_digits(return_X_y=True)
    images, labels = images.reshape(-1, 8, 8).astype(np.uint8), labels.astype(np.int64)
    train = 1500  # the other digits are for the test

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.kv"
        with ww.kv.create(path, schema={"x": ("uint8", (8, 8)), "y": ("int64", ())}) as store:
            store.put_many(np.arange(len(labels)), {"x": images, "y": labels})

        weights, losses = np.zeros((65, 10)), []
        with ww.kv.open(path) as store:
            loader = ww.train.DataLoader(store, BATCH, seed=SEED, keys=range(train))
            for _ in range(EPOCHS):
                for batch in loader:  # the next batches are read in the meantime
                    losses.append(step(weights, batch["x"], batch["y"]))
            test, found = store.get_many(np.arange(train, len(labels)))
            accuracy = (scores(weights, test["x"])[1].argmax(axis=1) == test["y"]).mean()

    # the same from memory: the loader's order is a function of seed and epoch
    weights, expected = np.zeros((65, 10)), []
    for epoch in range(EPOCHS):
        order = ww.kv.Permutation(train, SEED, epoch).slice(0, train)
        for first in range(0, train, BATCH):
            rows = order[first : first + BATCH]
            expected.append(step(weights, images[rows], labels[rows]))

    print(f"{len(losses)} steps of {BATCH}: loss {losses[0]:.4f} to {losses[-1]:.4f}")
    print(f"test accuracy {accuracy:.3f} of {found.sum()} digits")

    assert losses == expected  # bit for bit
    assert found.all() and accuracy > 0.85


if __name__ == "__main__":
    main()
