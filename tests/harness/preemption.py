"""``python -m tests.harness.preemption``: preempts two kernels at random, and checks every block of them.

Both run on `CpuExecutor` at the same time, are drained, shrunk, grown and resumed at random, and each is preempted as
often as was asked, each time with blocks done (some since it was last launched) and blocks left. At its end every
block must have run exactly once, and every result must equal the untransformed kernel's, bit for bit. A kernel whose
blocks run out before that (a busy machine lets many run until a flag is set) runs once more, from its start.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpwell.scheduler.executors.cpu_executor import CpuExecutor
from warpwell.scheduler.extend import Ended, Job, Placement, Request, Task
from warpwell.targets import Launch, kernel
from warpwell.targets.blocks.launch import BlockLaunch
from warpwell.targets.primitives import DEVICE, backoff, element_address, fetch_add, grid, load_acquire

BUDGET = 60
"""Average number of blocks that run between a launch and the next stop."""

LIMIT = 60.0
"""Seconds without an event, after which something is wrong."""


def live_threads(executor: CpuExecutor, job: Job) -> int:
    """Return the number of threads of a job. It exceeds a reduced quota until the surplus threads have left."""
    executor.progress(job)  # handles the posts of threads that have left
    run = executor._runs.get(job)
    return 0 if run is None else run.inside


@kernel
def gated(gate, counts):  # type: ignore[no-untyped-def]
    """A block waits until gate[0] is larger than its number."""
    i = grid(1)
    if i < counts.size:
        attempt = 0
        while load_acquire(element_address(gate, 0), DEVICE) <= i // 256:
            backoff(attempt)
            attempt += 1
        fetch_add(element_address(counts, i), 1, DEVICE)


@kernel
def logistic(counts, out, steps):  # type: ignore[no-untyped-def]
    """Compute-intensive: a map that is chaotic, so that one wrong bit shows."""
    i = grid(1)
    if i < counts.size:
        fetch_add(element_address(counts, i), 1, DEVICE)
        x = (i + 1) / (counts.size + 2)
        for _ in range(steps):
            x = 3.9999 * x * (1.0 - x)
        out[i] = x


@kernel
def scatter(counts, out, source, steps):  # type: ignore[no-untyped-def]
    """Memory-intensive, over two dimensions: sums of items that lie anywhere."""
    y, x = grid(2)
    rows, columns = out.shape
    if y < rows and x < columns:
        i = y * columns + x
        fetch_add(element_address(counts, i), 1, DEVICE)
        position = i
        total = 0.0
        for _ in range(steps):
            position = (position * 1103515245 + 12345) % source.size
            total += source[position]
        out[y, x] = total


@dataclass
class Run:
    """One kernel's way through the test.

    Attributes
    ----------
    extra : tuple
        What it is called with, after counts and results.
    drains, shrinks, grows, resumes : int
        What was done to it. `drains` are those with blocks done and blocks left, as the test counts them.
    idle : int
        Stops without a block since the launch (not counted).
    rounds : int
        How often it ran from its start to its end.
    faults : list of str
        What was wrong at an end.
    """

    launch: Launch
    extra: tuple[Any, ...]
    expected: NDArray[Any]
    quota: int = 0
    running: bool = False
    ended: bool = False
    since: int = 0
    next_move: float = 0.0
    leaving: bool = False
    drains: int = 0
    shrinks: int = 0
    grows: int = 0
    resumes: int = 0
    idle: int = 0
    rounds: int = 0
    stops: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.restart()

    @property
    def task(self) -> Task:
        """Its task."""
        return self.job.task

    def restart(self) -> None:
        """Make a new task of it."""
        self.counts = np.zeros(self.expected.size, np.int64)
        self.out = np.zeros_like(self.expected)
        arguments = (self.counts, self.out, *self.extra)
        blocks = BlockLaunch(self.launch, arguments, "cpu").blocks
        task = Task(self.launch.kernel.function.__name__, blocks, launch=self.launch, arguments=arguments)
        self.job = Job(task, Request(task.name, [task]), 0.0)

    def check(self) -> None:
        """Record errors in the results of a round."""
        self.rounds += 1
        blocks = np.add.reduceat(self.counts, np.arange(0, self.counts.size, 256))
        expected = np.full(blocks.size, 256)
        expected[-1] = self.counts.size - 256 * (blocks.size - 1)
        if blocks.size != self.task.blocks or (blocks != expected).any() or (self.counts != 1).any():
            self.faults.append(
                f"{np.count_nonzero(blocks != expected)} of {blocks.size} blocks did not run exactly once"
            )
        if self.out.tobytes() != self.expected.tobytes():
            self.faults.append("its results differ from the untransformed kernel's")


def make(preemptions: int, seed: int) -> list[Run]:
    """Return the two kernels, with the results of the untransformed ones."""
    rng = np.random.default_rng(seed)
    n = 256 * BUDGET * (preemptions + 4) - 101
    columns = 1000
    rows = -(-n // columns)
    source = rng.random(1 << 16)
    runs = []
    for launch, shape, dtype, extra in (
        (logistic[n], (n,), np.float64, (24,)),
        (scatter[rows, columns], (rows, columns), np.float64, (source, 8)),
    ):
        expected = np.zeros(shape, dtype)
        launch(np.zeros(expected.size, np.int64), expected, *extra, device="cpu")
        runs.append(Run(launch, extra, expected))
    return runs


def drive(runs: list[Run], executor: CpuExecutor, preemptions: int, seed: int) -> None:
    """Preempt, resize and resume until both have ended.

    Raises
    ------
    AssertionError
        The executor said something that cannot be.
    """
    rng = random.Random(seed)
    max_workers = executor.threads
    last_event = time.monotonic()
    while not all(run.ended for run in runs):
        now = executor.now()
        for run in runs:
            if run.ended or run.leaving or now < run.next_move:
                continue
            if not run.running:
                launch(run, executor, rng, max_workers, preemptions)
            elif run.drains < preemptions:
                move(run, executor, rng, max_workers, preemptions)
        acting = [run for run in runs if not (run.ended or run.leaving or (run.running and run.drains >= preemptions))]
        executor.wait(max(min((run.next_move for run in acting), default=now + 1.0), now + 1e-4))
        for event in executor.poll():
            last_event = time.monotonic()
            run = next(run for run in runs if run.job is event.job)
            assert run.running, f"{run.task.name} said {event} and was not running"
            run.running = run.leaving = False
            run.next_move = executor.now() + rng.choice([0.0, 0.0, rng.random() * 1e-3])
            if isinstance(event, Ended):
                assert event.error is None, event.error
                run.check()
                run.ended = run.drains >= preemptions or bool(run.faults)
                if not run.ended:
                    run.restart()
                continue
            assert run.since <= event.done < run.task.blocks, (run.since, event.done)
            assert live_threads(executor, run.job) == 0, "a thread is left"
            run.job.done = event.done
            if event.done > run.since:
                run.drains += 1
                run.stops.append(event.done)
            else:
                run.idle += 1
        assert time.monotonic() - last_event < LIMIT, f"nothing happened for {LIMIT:g} s"


def launch(run: Run, executor: CpuExecutor, rng: random.Random, max_workers: int, preemptions: int) -> None:
    """Launch a kernel, or launch it again."""
    run.since = run.job.done
    run.resumes += run.since > 0
    run.quota = 1 if hurried(run, preemptions) else rng.randint(1, max_workers)
    executor.launch(run.job, Placement(workers=run.quota))
    run.running = True
    run.next_move = executor.now() + (0.0 if hurried(run, preemptions) else rng.random() * 3e-4)


def move(run: Run, executor: CpuExecutor, rng: random.Random, max_workers: int, preemptions: int) -> None:
    """Resize a kernel that runs, or preempt it, once it has ended a block since it was launched."""
    is_urgent = hurried(run, preemptions)
    if not is_urgent and rng.random() < 0.5:
        quota = rng.randint(1, max_workers)
        run.shrinks += quota < run.quota
        run.grows += quota > run.quota
        run.quota = quota
        executor.resize(run.job, quota)
        run.next_move = executor.now() + rng.random() * 2e-4
    elif executor.progress(run.job) > run.since or rng.random() < 0.01:
        executor.preempt(run.job)
        run.leaving = True
    else:
        run.next_move = executor.now() + 1e-4


def hurried(run: Run, preemptions: int) -> bool:
    """Return whether too few blocks are left for the remaining preemptions."""
    return run.task.blocks - run.job.done < BUDGET * (preemptions - run.drains)


def main(arguments: list[str] | None = None) -> int:
    """Run the test; return 0 where everything held."""
    parser = argparse.ArgumentParser(prog="python -m tests.harness.preemption", description=__doc__.splitlines()[0])
    parser.add_argument("--preemptions", type=int, default=1000, help="of each kernel (default: 1000)")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2, help="workers of a kernel at most (default: 2)")
    options = parser.parse_args(arguments)
    if options.preemptions < 1 or options.threads < 1:
        parser.error("--preemptions and --threads are at least 1")
    runs = make(options.preemptions, options.seed)
    executor = CpuExecutor(threads=options.threads)
    start = time.perf_counter()
    try:
        drive(runs, executor, options.preemptions, options.seed)
    finally:
        executor.close()
    seconds = time.perf_counter() - start
    good = True
    for run in runs:
        if run.drains < options.preemptions:
            run.faults.append(f"it was preempted {run.drains} times of {options.preemptions}")
        stops = f"at {min(run.stops)} to {max(run.stops)} blocks done" if run.stops else "never"
        print(
            f"{run.task.name}: {run.task.blocks} blocks, each ran {run.counts.min()} to {run.counts.max()} times "
            f"(in each of {run.rounds} rounds); "
            f"{run.drains} preemptions with blocks done and left ({stops}), {run.idle} more before a block had ended; "
            f"{run.resumes} resumes, {run.shrinks} shrinks, {run.grows} grows"
        )
        for fault in run.faults:
            print(f"{run.task.name}: {fault}")
        good &= not run.faults
    verdict = "results bit-equal to the untransformed kernels" if good else "FAILED"
    print(f"{verdict} ({seconds:.1f} s, seed {options.seed})")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
