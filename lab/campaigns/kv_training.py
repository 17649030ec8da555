"""Training from a store against training from memory, through kills: ``python -m lab campaign kv_training``.

A network learns scikit-learn's digits. The reference run is one process with all digits in memory. Each other run must
have the same losses, bit for bit, and the same samples in the same order:

- one process trains from the store;
- ranks train as processes, and the trainer joins their batches in the order of the ranks;
- ranks train as processes, and all ranks or one rank are killed (SIGKILL) within an epoch, several times. After each
  kill another number of ranks resumes from the last checkpoint. A repeated step must have the same result.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warpwell import kv
from warpwell.kv import Permutation
from warpwell.train import DataLoader

from .digits import SCHEMA, Classifier, digits
from .kv_ranks import RANKS, Run, Step, checkpoint_position, start, steps_of

LIMIT = 120.0
"""Timeout of a trainer, in seconds."""


@dataclass
class Result:
    """The comparison of a run with the reference run.

    Attributes
    ----------
    run : str
    steps : int
    different : str or None
        The first difference.
    kills, repeated : int
        Numbers of kills and of repeated steps.
    worlds : tuple of int
        Numbers of ranks, in turn.
    resumed_at : tuple of (int, int)
        Epochs and positions at which the runs after kills began.
    accuracy : float or None
    """

    run: str
    steps: int
    different: str | None
    kills: int = 0
    repeated: int = 0
    worlds: tuple[int, ...] = ()
    resumed_at: tuple[tuple[int, int], ...] = ()
    accuracy: float | None = None

    def line(self) -> str:
        """Return the result as a line of text."""
        comparison = self.different or "the same losses, bit for bit, and the same samples in the same order"
        text = f"{self.run}: {self.steps} steps: {comparison}"
        if self.kills:
            worlds = " ".join(map(str, self.worlds))
            positions = " ".join(f"{epoch}:{position}" for epoch, position in self.resumed_at)
            text += f"; {self.kills} kills, {self.repeated} steps done again; ranks in turn {worlds}"
            text += f"; resumed at epoch:position {positions}"
        return text if self.accuracy is None else f"{text}; accuracy {self.accuracy:.3f}"


def in_memory(data: dict[str, Any], run: Run) -> tuple[list[Step], float]:
    """Train from arrays in memory; return the steps and the final accuracy."""
    model, size = Classifier(run.seed), len(data["y"])
    steps: list[Step] = []
    for epoch in range(run.epochs):
        order = Permutation(size, run.seed, epoch).slice(0, size)
        for first in range(0, size, run.batch):
            rows = order[first : first + run.batch]
            loss = model.step({name: field[rows] for name, field in data.items()})
            steps.append(Step(len(steps), epoch, loss.hex(), tuple(rows.tolist())))
    return steps, model.accuracy(data)


def from_store(run: Run, data: dict[str, Any]) -> tuple[list[Step], float]:
    """Train from the store in this process."""
    model = Classifier(run.seed)
    steps: list[Step] = []
    with kv.open(run.store) as store:
        loader = DataLoader(store, run.batch, seed=run.seed)
        for epoch in range(run.epochs):
            for batch in loader:
                loss = model.step(batch)
                steps.append(Step(len(steps), epoch, loss.hex(), tuple(batch["id"].tolist())))
    return steps, model.accuracy(data)


def with_ranks(run: Run) -> list[Step]:
    """Train all epochs with ranks as processes."""
    trainer = start("train", run)
    if trainer.wait(LIMIT) != 0:
        raise RuntimeError(f"a trainer with {run.world_size} ranks ended with {trainer.returncode}")
    return steps_of(Path(run.folder))


def through_kills(run: Run, worlds: Sequence[int], kills: int, step_count: int, chance: random.Random) -> Result:
    """Train with ranks as processes, and kill them within an epoch `kills` times; resume with the next of `worlds`.

    Parameters
    ----------
    run : Run
    worlds : sequence of int
        Numbers of ranks, taken in turn.
    kills : int
    step_count : int
        Steps of the run.
    chance : random.Random
        Selects the moments of the kills, and the killed processes.

    Returns
    -------
    Result
        Without a comparison.
    """
    folder = Path(run.folder)
    used: list[int] = []
    positions: list[tuple[int, int]] = []
    done = 0
    for kill in range(kills + 1):
        world = worlds[kill % len(worlds)]
        used.append(world)
        now = Run(**{**run.__dict__, "world_size": world})
        before = len(steps_of(folder))
        last = kill == kills
        # A session of its own lets one signal end the trainer and its ranks.
        trainer = start("train", now, start_new_session=True, stderr=subprocess.DEVNULL if not last else None)
        if last:
            if trainer.wait(LIMIT) != 0:
                raise RuntimeError(f"the last trainer, which was not killed, ended with {trainer.returncode}")
            break
        # Leave steps for each of the remaining kills.
        target = before + chance.randint(1, max(1, (step_count - done) // (kills - kill + 1)))
        deadline = time.monotonic() + LIMIT
        while len(steps_of(folder)) < target and trainer.poll() is None:
            if time.monotonic() > deadline:
                os.killpg(trainer.pid, signal.SIGKILL)
                raise RuntimeError(f"a trainer with {world} ranks made no progress in {LIMIT} s")
            time.sleep(0.001)
        time.sleep(chance.random() * 2 * run.pause)
        if chance.random() < 0.5:
            os.killpg(trainer.pid, signal.SIGKILL)
        else:
            os.kill(chance.choice(json.loads((folder / RANKS).read_text())), signal.SIGKILL)
        if trainer.wait(LIMIT) == 0:
            raise RuntimeError("a trainer finished before it was killed: use more --epochs or fewer --kills")
        done = max(step.number for step in steps_of(folder)) + 1
        positions.append(checkpoint_position(folder))
    steps = steps_of(folder)
    repeated = len(steps) - len({step.number for step in steps})
    return Result("killed and resumed", step_count, None, kills, repeated, tuple(used), tuple(positions))


def difference(steps: Sequence[Step], expected: Sequence[Step]) -> str | None:
    """Describe the first difference between a run, in which steps may be repeated, and the expected run."""
    for step in steps:
        if step.number >= len(expected):
            return f"step {step.number} of {len(expected)}"
        right = expected[step.number]
        if step.ids != right.ids or step.epoch != right.epoch:
            return f"step {step.number} has other samples: {step.ids[:5]}... and not {right.ids[:5]}..."
        if step.loss != right.loss:
            return f"step {step.number} has loss {step.loss} and not {right.loss}"
    absent = set(range(len(expected))) - {step.number for step in steps}
    return f"step {min(absent)} is missing" if absent else None


def compare(folder: Path, run: Run, worlds: Sequence[int], kills: int, report: Any = print) -> list[Result]:
    """Create the store in `folder`, and execute all runs; `report` receives each line of text."""
    data = digits()
    with kv.create(folder / "digits.kv", schema=SCHEMA) as store:
        store.put_many(data["id"], data)
    expected, accuracy = in_memory(data, run)
    first, last = (float.fromhex(expected[k].loss) for k in (0, -1))
    report(
        f"{len(data['y'])} digits, {run.epochs} epochs in global batches of {run.batch}, seed {run.seed}; in memory: "
        f"{len(expected)} steps, loss {first:.4f} to {last:.4f}, accuracy {accuracy:.3f}"
    )
    results = []

    def add(result: Result, steps: Sequence[Step]) -> None:
        result.different = difference(steps, expected)
        results.append(result)
        report(result.line())

    steps, reached = from_store(run, data)
    add(Result("one process, from the store", len(steps), None, accuracy=reached), steps)
    for world in worlds:
        steps = with_ranks(_in(folder / f"ranks-{world}", run, world_size=world))
        add(Result(f"{world} rank{'s' * (world > 1)} as processes", len(steps), None), steps)
    if kills:
        killed = _in(folder / "killed", run, pause=0.005)
        result = through_kills(killed, worlds, kills, len(expected), random.Random(run.seed))
        add(result, steps_of(Path(killed.folder)))
    return results


def _in(folder: Path, run: Run, **changes: Any) -> Run:
    folder.mkdir()
    return Run(**{**run.__dict__, "folder": str(folder), **changes})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return 1 if two runs differ."""
    parser = argparse.ArgumentParser(prog="python -m lab campaign kv_training", description=__doc__)
    integer: Any = int
    parser.add_argument("--ranks", type=integer, nargs="+", default=[1, 2, 4], help="numbers of ranks (1 2 4)")
    parser.add_argument("--kills", type=integer, default=9, help="kills in mid-epoch (9)")
    parser.add_argument("--epochs", type=integer, default=8, help="epochs (8)")
    parser.add_argument("--batch", type=integer, default=64, help="rows of a global batch (64)")
    parser.add_argument("--seed", type=integer, default=0, help="seed of weights, order and kills (0)")
    parser.add_argument("--folder", type=Path, help="working folder (a temporary folder)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    if options.kills < 0 or options.epochs < 1 or options.batch < 1 or min(options.ranks) < 1:
        parser.error("--kills starts at 0; --epochs, --batch and --ranks start at 1")
    if any(options.batch % world for world in options.ranks):
        parser.error(f"--batch {options.batch} must be a multiple of each number of --ranks: {options.ranks}")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        run = Run(str(Path(folder) / "digits.kv"), folder, options.batch, options.epochs, options.seed)
        results = compare(
            Path(folder), run, options.ranks, options.kills, (lambda _: None) if options.json else _print_now
        )
    if options.json:
        print(json.dumps({"seed": options.seed, "results": [result.__dict__ for result in results]}, indent=2))
    return int(any(result.different for result in results))


def _print_now(text: str) -> None:
    print(text, flush=True)
