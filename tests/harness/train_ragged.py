"""A PyTorch program that may be killed: it trains on ragged records of a store, with a checkpoint after each step.

``python -m tests.harness.train_ragged FOLDER WORKERS METHOD`` trains to the end from the checkpoint in the folder, or
from the start. It appends the number, loss and digest of the inputs of each step to ``steps.txt``. It needs PyTorch.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import warpwell as ww

RECORDS, BATCH, EPOCHS, CLASSES, SEED = 203, 8, 3, 4, 5


def image(k: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes of record k, 1 to 60 of them."""
    return np.random.default_rng(k).integers(0, 256, 1 + k * 31 % 60, np.uint8)


def make(folder: Path) -> None:
    """Write the store, with a field that was added later in a store of its own."""
    keys = np.arange(RECORDS)
    with ww.kv.create(folder / "images.kv", schema={"image": ("uint8", (None,)), "name": "str"}) as store:
        store.put_many(keys, {"image": [image(k) for k in keys.tolist()], "name": [f"n{k}" for k in keys.tolist()]})
    with ww.kv.create(folder / "labels.kv", schema={"label": "int64"}) as store:
        store.put_many(keys[::-1], {"label": keys[::-1] % CLASSES})


def decode(record: dict[str, Any]) -> dict[str, Any]:
    """Return the histogram of an image; runs in the workers."""
    histogram = np.bincount(record["image"] // 32, minlength=8).astype(np.float32)
    return {"x": histogram / len(record["image"]), "y": record["label"], "name": record["name"]}


def batches(folder: Path, sampler_state: Any, workers: int, method: str | None) -> Iterator[tuple[Any, Any]]:
    """Yield batches of all epochs and the state after each."""
    from torch.utils.data import DataLoader

    with ww.kv.open(folder / "images.kv") as store, ww.kv.open(folder / "labels.kv") as labels:
        data = ww.train.Dataset(store, join=[labels], decode=decode, key_field="key")
        sampler = ww.train.Sampler(data, BATCH, seed=SEED)
        if sampler_state is not None:
            sampler.load_state_dict(sampler_state)
        loader = DataLoader(
            data,
            batch_sampler=sampler,
            num_workers=workers,
            multiprocessing_context=method if workers else None,
            persistent_workers=workers > 0,
            collate_fn=data.collate,
        )
        while sampler.epoch < EPOCHS:
            for number, batch in enumerate(loader, 1):
                yield batch, sampler.state_dict(number)


def batches_in_memory() -> Iterator[Any]:
    """Yield the same batches from memory."""
    import torch

    for epoch in range(EPOCHS):
        order = ww.kv.Permutation(RECORDS, SEED, epoch).slice(0, RECORDS)
        for first in range(0, RECORDS, BATCH):
            keys = order[first : first + BATCH]
            records = [decode({"image": image(k), "label": k % CLASSES, "name": f"n{k}"}) for k in keys.tolist()]
            yield {
                "key": torch.from_numpy(keys),
                "x": torch.from_numpy(np.stack([record["x"] for record in records])),
                "y": torch.from_numpy(keys % CLASSES),
                "name": [record["name"] for record in records],
            }


class Training:
    """A model, its optimizer and the number of steps taken."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(3)
        self._torch = torch
        self.model = torch.nn.Linear(8, CLASSES)
        self._optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        self.steps = 0

    def step(self, batch: Any) -> str:
        """Make a step; return its number, the exact loss and a digest of its inputs."""
        loss = self._torch.nn.functional.cross_entropy(self.model(batch["x"]), batch["y"])
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        contents = b"".join(batch[name].numpy().tobytes() for name in ("key", "x", "y")) + repr(batch["name"]).encode()
        line = f"{self.steps} {float(loss.item()).hex()} {hashlib.sha256(contents).hexdigest()}"
        self.steps += 1
        return line

    def save(self, path: Path, sampler_state: Any) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self._optimizer.state_dict(), "steps": self.steps}
        self._torch.save({**state, "sampler": sampler_state}, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)

    def load(self, path: Path) -> Any:
        state = self._torch.load(path)
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]
        return state["sampler"]


def main(folder: Path, workers: int, method: str) -> None:
    training, saved = Training(), None
    if (folder / "checkpoint.pt").exists():
        saved = training.load(folder / "checkpoint.pt")
    with open(folder / "steps.txt", "a") as file:
        for batch, sampler_state in batches(folder, saved, workers, method):
            file.write(f"{training.step(batch)}\n")
            file.flush()
            training.save(folder / "checkpoint.pt", sampler_state)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
