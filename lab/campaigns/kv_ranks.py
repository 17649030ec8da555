"""Processes of a training run that `lab.campaigns.kv_training` kills: a trainer, and the ranks that load for it.

A trainer starts its ranks, joins their batches in the order of the ranks, learns from the joined batch, and writes a
line for each step to a file. At regular intervals it saves a checkpoint: the weights and the loader's state. A trainer
that starts after a kill, with any number of ranks, resumes from the last checkpoint.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from warpwell import kv
from warpwell.train import DataLoader

from .digits import Classifier

MODULE = "lab.campaigns.kv_ranks"
CHECKPOINT = "checkpoint.npz"
STEPS = "steps.txt"
RANKS = "ranks.json"


@dataclass(frozen=True)
class Run:
    """Options of a training run, for all of its processes.

    Attributes
    ----------
    store : str
        Folder of the store.
    folder : str
        Folder of the trainer's files.
    batch : int
        Rows of a global batch; a multiple of the number of ranks.
    epochs, seed : int
    world_size, rank : int
    every : int
        Steps between checkpoints.
    pause : float
        Sleep in each step in seconds, so that kills hit the run.
    state : dict, optional
        State that the loaders resume from.
    """

    store: str
    folder: str
    batch: int
    epochs: int
    seed: int
    world_size: int = 1
    rank: int = 0
    every: int = 5
    pause: float = 0.0
    state: dict[str, Any] | None = None


@dataclass(frozen=True)
class Step:
    """One step of a run: its number and epoch, its exact loss (in hexadecimal digits), and the samples of its batch."""

    number: int
    epoch: int
    loss: str
    ids: tuple[int, ...]


def start(role: str, run: Run, **options: Any) -> subprocess.Popen[bytes]:
    """Start a process of a run: role "train" or "rank"."""
    command = [sys.executable, "-m", MODULE, role, json.dumps(asdict(run))]
    # One thread sums matrix products in a fixed order, and does not overload a small machine.
    return subprocess.Popen(command, env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}, **options)


def steps_of(folder: Path) -> list[Step]:
    """Return the steps that trainers wrote, with every repetition and without a torn last line."""
    path = folder / STEPS
    text = path.read_text() if path.exists() else ""
    fields = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [Step(int(n), int(e), loss, tuple(map(int, ids.split(",")))) for n, e, loss, ids in fields]


def checkpoint_position(folder: Path) -> tuple[int, int]:
    """Return the epoch and position of the last checkpoint; (0, 0) without a checkpoint."""
    if not (folder / CHECKPOINT).exists():
        return 0, 0
    with np.load(folder / CHECKPOINT) as saved:
        state = json.loads(str(saved["state"]))
    return state["epoch"], state["position"]


def train(run: Run) -> None:
    """Train to the end of the last epoch, from the last checkpoint if one exists."""
    folder = Path(run.folder)
    model = Classifier(run.seed)
    number, state = 0, None
    if (folder / CHECKPOINT).exists():
        with np.load(folder / CHECKPOINT) as saved:
            model.arrays = {name: saved[name] for name in model.arrays}
            number, state = int(saved["number"]), json.loads(str(saved["state"]))
    run = replace(run, state=state)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    ranks = [start("rank", replace(run, rank=r), **pipes) for r in range(run.world_size)]
    (folder / RANKS).write_text(json.dumps([process.pid for process in ranks]))
    try:
        with open(folder / STEPS, "ab", buffering=0) as steps:
            for epoch, state, batch in _joined(ranks):
                time.sleep(run.pause)
                loss = model.step(batch)
                ids = ",".join(map(str, batch["id"].tolist()))
                steps.write(f"{number} {epoch} {loss.hex()} {ids}\n".encode())
                number += 1
                if number % run.every == 0:
                    _save(folder, model, number, state)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _joined(ranks: list[subprocess.Popen[bytes]]) -> Iterator[tuple[int, dict[str, Any], dict[str, Any]]]:
    """Yield the epoch, the loaders' state and the global batch of each step."""
    while True:
        got = [_receive(process.stdout) for process in ranks]
        if all(message is None for message in got):
            return
        epochs, states, parts = zip(*got, strict=True)
        if any(state != states[0] for state in states) or len(set(epochs)) != 1:
            raise RuntimeError(f"ranks are at different positions: {states}")
        yield epochs[0], states[0], {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        for process in ranks:  # like an all-reduce: no rank begins the next step before all ranks have sent this one
            _continue(process.stdin)


def _receive(pipe: BinaryIO | Any) -> tuple[int, dict[str, Any], dict[str, Any]] | None:
    """Return a message of a rank, or None at the end of its epochs.

    Raises
    ------
    EOFError
        The rank was killed.
    """
    message: tuple[int, dict[str, Any], dict[str, Any]] | None = pickle.load(pipe)
    return message


def _continue(pipe: BinaryIO | Any) -> None:
    pipe.write(b"\n")
    pipe.flush()


def _save(folder: Path, model: Classifier, number: int, state: dict[str, Any]) -> None:
    new = folder / f"new-{CHECKPOINT}"
    np.savez(new, number=number, state=json.dumps(state), **model.arrays)
    os.replace(new, folder / CHECKPOINT)


def load(run: Run) -> None:
    """Load the batches of one rank and write them to standard output, each with the loader's state after it.

    After each batch the rank waits for a line on standard input.
    """
    with kv.open(run.store) as store:
        loader = DataLoader(store, run.batch // run.world_size, seed=run.seed, rank=run.rank, world_size=run.world_size)
        if run.state is not None:
            loader.load_state_dict(run.state)
        while loader.epoch < run.epochs:
            for batch in loader:
                pickle.dump((loader.epoch, loader.state_dict(), batch), sys.stdout.buffer)
                sys.stdout.buffer.flush()
                if not sys.stdin.readline():
                    return
        pickle.dump(None, sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    {"train": train, "rank": load}[sys.argv[1]](Run(**json.loads(sys.argv[2])))
