"""A training program that may be killed: GraphSAGE on features from storage, with a checkpoint after each step.

``python -m tests.harness.train_sage FOLDER STEPS WORKERS METHOD`` trains from the checkpoint in the folder, or from the
start, and appends the loss of each step to ``losses.txt``. It needs PyTorch and PyTorch Geometric.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

import warpwell as ww

VERTICES, WIDTH, CLASSES, BATCH = 400, 8, 3, 50


def make(folder: Path) -> None:
    rng = np.random.default_rng(0)
    ends = rng.integers(0, VERTICES, (2, 6 * VERTICES))
    ww.graph.build([(ends[0], ends[1])], folder / "graph.ww", vertices=VERTICES, symmetric=True)
    np.save(folder / "x.npy", rng.standard_normal((VERTICES, WIDTH), np.float32))
    np.save(folder / "y.npy", rng.integers(0, CLASSES, VERTICES))


def neighbors(folder: Path) -> ww.train.Neighbors:
    return ww.train.Neighbors(folder / "graph.ww", [4, 3], BATCH, seed=1)


def loader(folder: Path, numbers: Iterable[int], workers: int, method: str | None) -> Any:
    features = {"x": folder / "x.npy", "y": folder / "y.npy"}
    context = method if workers else None
    return neighbors(folder).loader(features, numbers, num_workers=workers, multiprocessing_context=context)


class Training:
    """A model, its optimizer and how many steps were taken."""

    def __init__(self) -> None:
        import torch
        from torch_geometric.nn import GraphSAGE

        torch.set_num_threads(1)
        torch.manual_seed(3)
        self._torch = torch
        self._model = GraphSAGE(WIDTH, 16, 2, CLASSES)
        self._optimizer = torch.optim.Adam(self._model.parameters(), 0.01)
        self.steps = 0

    def step(self, batch: Any) -> str:
        out = self._model(batch.x, batch.edge_index)[: batch.batch_size]
        loss = self._torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size])
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.steps += 1
        return float(loss.item()).hex()

    def save(self, path: Path) -> None:
        state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict(), "steps": self.steps}
        self._torch.save(state, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)

    def load(self, path: Path) -> None:
        state = self._torch.load(path)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]


def main(folder: Path, steps: int, workers: int, method: str) -> None:
    training = Training()
    if (folder / "checkpoint.pt").exists():
        training.load(folder / "checkpoint.pt")
    with open(folder / "losses.txt", "a") as file:
        for batch in loader(folder, range(training.steps, steps), workers, method):
            file.write(f"{training.steps} {training.step(batch)}\n")
            file.flush()
            training.save(folder / "checkpoint.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
