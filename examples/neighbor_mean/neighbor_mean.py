"""Learn labels of vertices from features of sampled neighbors, with graph and features on storage, by NumPy alone.

Run it with ``python neighbor_mean.py``; it needs no input and no GPU. It stops half-way, as if it had been killed, and
resumes at the number of the next batch: the losses equal the losses of one run, bit for bit.
"""

import tempfile
from pathlib import Path

import numpy as np

import warpwell as ww

VERTICES, WIDTH, CLASSES, EPOCHS, BATCH, SEED = 4096, 32, 5, 6, 256, 3


def make(folder):
    """Write a graph in which neighbors mostly have one label, and features that depend weakly on the label."""
    rng = np.random.default_rng(SEED)
    labels = rng.integers(0, CLASSES, VERTICES)
    ends = rng.integers(0, VERTICES, (2, 60 * VERTICES))
    same = labels[ends[0]] == labels[ends[1]]
    ends = ends[:, same | (rng.random(len(same)) < 0.05)]
    ww.graph.build([(ends[0], ends[1])], folder / "graph.ww", vertices=VERTICES, symmetric=True)
    np.save(folder / "x.npy", rng.standard_normal((VERTICES, WIDTH)) + 0.8 * np.eye(CLASSES, WIDTH)[labels])
    np.save(folder / "y.npy", labels)


def inputs(batch, x):
    """Return the features of the batch's vertices, and the mean features of their sampled neighbors."""
    total = np.zeros((batch.batch_size, WIDTH))
    np.add.at(total, batch.targets, x[batch.sources])
    degree = np.bincount(batch.targets, minlength=batch.batch_size)
    return np.hstack([x[: batch.batch_size], total / np.maximum(degree, 1)[:, None]])


def step(weights, features, labels):
    """Improve the weights; return the loss before this step."""
    raw = features @ weights
    probability = np.exp(raw - raw.max(axis=1, keepdims=True))
    probability /= probability.sum(axis=1, keepdims=True)
    loss = -np.log(probability[np.arange(len(labels)), labels]).mean()
    weights -= 0.5 / len(labels) * features.T @ (probability - np.eye(CLASSES)[labels])
    return loss


def train(weights, neighbors, data, numbers):
    losses = []
    for number in numbers:
        batch = neighbors[number]  # sampled from the graph's files; depends only on the number
        rows = data.take(batch.nodes)  # read from the files of features and labels
        losses.append(step(weights, inputs(batch, rows["x"]), rows["y"][: batch.batch_size]))
    return losses


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder)
        data = ww.train.Dataset({"x": folder / "x.npy", "y": folder / "y.npy"})
        neighbors = ww.train.Neighbors(folder / "graph.ww", fanouts=[8], batch_size=BATCH, seed=SEED)
        steps = EPOCHS * len(neighbors)

        weights = np.zeros((2 * WIDTH, CLASSES))
        losses = train(weights, neighbors, data, range(steps // 2))
        np.savez(folder / "checkpoint.npz", weights=weights, step=steps // 2)

        saved = np.load(folder / "checkpoint.npz")  # as another process would
        again = ww.train.Neighbors(folder / "graph.ww", fanouts=[8], batch_size=BATCH, seed=SEED)
        losses += train(saved["weights"], again, data, range(int(saved["step"]), steps))

        # the same from memory: batches are a function of seed and number
        memory = ww.train.Dataset({name: np.load(folder / f"{name}.npy") for name in ("x", "y")})
        expected = train(np.zeros((2 * WIDTH, CLASSES)), neighbors, memory, range(steps))
        data.close()

    print(f"{steps} steps of {BATCH} vertices: loss {losses[0]:.4f} to {losses[-1]:.4f}")

    assert losses == expected  # bit for bit
    assert losses[-1] < 0.5 * losses[0]


if __name__ == "__main__":
    main()
