"""Train GraphSAGE on features on storage, and check that the losses equal the losses of training from memory.

Run it with ``python graphsage.py``; it needs PyTorch and PyTorch Geometric (``pip install -e '.[train]'``) and no GPU.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

import warpwell as ww

try:
    import torch
    from torch_geometric.data import Data
    from torch_geometric.nn import SAGEConv
except ImportError:
    raise SystemExit(
        "this example needs PyTorch and PyTorch Geometric: run pip install -e '.[train]' in the checkout of Warpwell"
    ) from None

VERTICES, WIDTH, CLASSES, EPOCHS, BATCH, SEED = 2048, 64, 4, 3, 128, 7


def make(folder):
    """Write a graph in which neighbors mostly have one label, and features that depend weakly on the label."""
    rng = np.random.default_rng(SEED)
    labels = rng.integers(0, CLASSES, VERTICES)
    ends = rng.integers(0, VERTICES, (2, 40 * VERTICES))
    same = labels[ends[0]] == labels[ends[1]]
    ends = ends[:, same | (rng.random(len(same)) < 0.1)]
    ww.graph.build([(ends[0], ends[1])], folder / "graph.ww", vertices=VERTICES, symmetric=True)
    features = rng.standard_normal((VERTICES, WIDTH), np.float32)
    features[:, :CLASSES] += np.eye(CLASSES, dtype=np.float32)[labels]
    np.save(folder / "x.npy", features)
    np.save(folder / "y.npy", labels)


class Sage(torch.nn.Module):
    """Two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = SAGEConv(WIDTH, 32), SAGEConv(32, CLASSES)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


def train(batches):
    """Return the losses over batches, from the same weights each time."""
    torch.manual_seed(SEED)
    model = Sage()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for batch in batches:
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        loss = torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder)
        neighbors = ww.train.Neighbors(folder / "graph.ww", [10, 5], BATCH, seed=SEED)
        features = {"x": folder / "x.npy", "y": folder / "y.npy"}
        # A batch depends on its number alone: workers change nothing, and a run resumes with any number.
        numbers = range(EPOCHS * len(neighbors))
        loader = neighbors.loader(features, numbers, num_workers=int(sys.argv[1]) if sys.argv[1:] else 0)
        recorded = []

        def record(batches):
            for batch in batches:
                recorded.append((batch.n_id, batch.edge_index, batch.batch_size))
                yield batch

        losses = train(record(loader))
        x, y = torch.from_numpy(np.load(folder / "x.npy")), torch.from_numpy(np.load(folder / "y.npy"))

    expected = train(Data(x=x[n], y=y[n], edge_index=e, batch_size=size) for n, e, size in recorded)
    print(f"{len(losses)} steps of {BATCH} vertices: loss {losses[0]:.4f} to {losses[-1]:.4f}")

    assert losses == expected  # bit for bit
    assert losses[-1] < 0.5 * losses[0]


if __name__ == "__main__":
    main()
