"""``python -m lab campaign sched_order``: random programs of tasks on overlapping arrays, compared with serial runs.

In the simulator each program has priorities, tenants, quotas, requests, cancellations and failures, and the times of
tasks that must not overlap are compared. On the CPU the arrays are compared with the results of NumPy.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

import warpwell as ww
from lab.sched.rates import ClassTable
from lab.sched.simulator import HostDelays, Simulator
from warpwell import errors, gpu
from warpwell.scheduler import Profile, Scheduler
from warpwell.scheduler.data_order import Access
from warpwell.scheduler.extend import Capacity, Core, Job, Kind, Log, Request, State, Task

MODULUS = 1_000_003
ITEMS = 600
ENDED = (State.DONE, State.FAILED, State.CANCELLED)


def overlap(first: Task, second: Task) -> bool:
    """Return whether two tasks use the same memory, and one of them may write it."""
    return any(
        a.space == b.space and a.start < b.end and b.start < a.end and (a.writes or b.writes)
        for a in first.accesses
        for b in second.accesses
    )


def random_accesses(chance: random.Random, is_chain: bool) -> list[Access]:
    """Return the memory of a task; in a chain, all tasks use the same memory."""
    if is_chain and chance.random() < 0.9:
        return [Access(0, 10, chance.random() < 0.8)]
    found = []
    for _ in range(chance.randrange(4)):
        start = chance.randrange(30)
        found.append(Access(start, start + chance.randrange(1, 12), chance.random() < 0.5, chance.choice((0, 0, "x"))))
    return found


def count_queued(log: Log) -> int:
    """Return the number of tasks that were queued on the device behind the tasks whose data they use."""
    return sum(event.kind == "launch" and event.why.get("rule") == "data" for event in log)


def run_simulated(seed: int) -> tuple[int, int]:
    """Run a random program in the simulator.

    Returns
    -------
    (int, int)
        Numbers of tasks that waited for the data of another one, and that were queued behind it on the device.

    Raises
    ------
    AssertionError
        Two tasks on the same memory ran at the same time or in the wrong order, or a task never ended.
    """
    chance = random.Random(seed)
    capacity = Capacity(memory=100)
    is_chain = chance.random() < 0.5
    host = HostDelays(4e-4, 1e-4) if is_chain or chance.random() < 0.3 else HostDelays()
    executor = Simulator(ClassTable(capacity), capacity, mode=chance.choice(("switch", "drain")), seed=seed, host=host)
    tenants: Any = None
    if chance.random() < 0.5:
        tenants = {"a": {"share": 0.4, "burst": chance.random() < 0.5, "window": 0.01}, "b": {"weight": 3}, "c": {}}
    policy = chance.choice(("lanes", "lanes", "lanes", "source", "first-come", "left-over"))
    core = Core(executor, policy, limit=chance.randrange(1, 4), tenants=tenants)
    jobs: list[Job] = []
    events = []
    lengths = (0.05, 0.1) if is_chain else (0.05, 1, 3, 20)
    for number in range(chance.randrange(2, 25)):
        tasks = [
            Task(
                f"t{number}.{k}",
                100,
                Profile(kind=chance.choice(list(Kind)), seconds=1e-3 * chance.choice(lengths)),
                tenant=chance.choice("abc"),
                priority=chance.choice((0, 0, 3, 8)),
                memory=0 if is_chain else chance.choice((0, 0, 30, 60)),
                accesses=random_accesses(chance, is_chain),
            )
            for k in range(chance.choice((1, 1, 1, 3)))
        ]
        after = [f"event {number}"] if chance.random() < 0.1 else []
        events += after
        at = executor.now() + chance.choice((0.0, 0.0, 1e-4) if is_chain else (0.0, 1e-3, 10e-3))
        jobs += core.submit(Request(tasks[0].name, tasks, at), after)
        for _ in range(chance.randrange(2 if is_chain else 3)):
            until = core.step()
            if core.busy:
                executor.wait(until)
        if chance.random() < 0.1:
            core.cancel(chance.choice(jobs))
    for event in events:
        core.release(event)
    for _ in range(20_000):
        until = core.step()
        if not (core.busy or core.blocked):
            break
        executor.wait(until)
    assert not (core.busy or core.blocked), f"seed {seed}: tasks wait and nothing runs"
    assert all(job.state in ENDED for job in jobs)
    for k, later in enumerate(jobs):
        for earlier in jobs[:k]:
            if later.started is not None and earlier.started is not None and overlap(earlier.task, later.task):
                assert earlier.ended is not None
                names = f"{earlier.task.name} and {later.task.name}"
                assert earlier.ended <= later.started, f"seed {seed}: {names} ran in the wrong order"
    return sum(bool(job.after) for job in jobs), count_queued(core.log)


@ww.kernel
def scale_and_add(x, factor, term):  # type: ignore[no-untyped-def]
    """Compute x = x factor + term."""
    i = gpu.grid(1)
    if i < x.size:
        x[i] = (x[i] * factor + term) % MODULUS


@ww.kernel
def add_from(x, y):  # type: ignore[no-untyped-def]
    """Compute x = 3 x + y."""
    i = gpu.grid(1)
    if i < x.size and i < y.size:
        x[i] = (3 * x[i] + y[i]) % MODULUS


def run_on_cpu(seed: int, scheduler: Scheduler) -> int:
    """Run a random program of kernels on overlapping slices; return the number of its tasks.

    Raises
    ------
    AssertionError
        An array differs from the result of the same program in NumPy.
    """
    chance = random.Random(seed)
    arrays = [np.arange(ITEMS, dtype=np.int64) + 7 * k for k in range(3)]
    expected = [array.copy() for array in arrays]
    handles: list[Any] = []
    for _ in range(chance.randrange(5, 25)):
        options: dict[str, Any] = {"tenant": chance.choice("ab"), "priority": chance.choice((0, 0, 5))}
        if chance.random() < 0.7:  # short, so that it may be queued on the device
            options["profile"] = Profile(kind=Kind.COMPUTE, seconds=2e-5, resident=4, source="measured")
        k, length = chance.randrange(3), chance.randrange(1, ITEMS // 2)
        start = chance.randrange(ITEMS - length)
        part = slice(start, start + length)
        if chance.random() < 0.5:
            factor, term = chance.randrange(2, 9), chance.randrange(100)
            count = chance.choice((1, 1, 4))
            launch = (scale_and_add[length], arrays[k][part], factor, term)
            if count == 1:
                handles.append(scheduler.submit(*launch, **options))
            else:
                handles.append(scheduler.submit_many([launch] * count, **options))
            for _ in range(count):
                expected[k][part] = (expected[k][part] * factor + term) % MODULUS
        else:
            source = chance.choice([j for j in range(3) if j != k])
            begin = chance.randrange(ITEMS - length)
            source_part = slice(begin, begin + length)
            handles.append(scheduler.submit(add_from[length], arrays[k][part], arrays[source][source_part], **options))
            expected[k][part] = (3 * expected[k][part] + expected[source][source_part]) % MODULUS
    for handle in handles:
        handle.result(60)
    for array, result in zip(arrays, expected, strict=True):
        assert np.array_equal(array, result), f"seed {seed}: an array differs"
    return len(handles)


def main(argv: list[str] | None = None) -> int:
    """Run from a command line; return 0 if all results were right."""
    parser = argparse.ArgumentParser(prog="python -m lab campaign sched_order", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="number of programs on each device (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="first seed (default 0)")
    options = parser.parse_args(argv)
    seeds = range(options.first, options.first + options.seeds)
    failures: list[str] = []
    queued: list[int] = []

    def simulate(seed: int) -> int:
        waited, behind = run_simulated(seed)
        queued.append(behind)
        return waited

    waited = run_all(simulate, seeds, failures)
    with Scheduler("cpu") as scheduler:
        tasks = run_all(lambda seed: run_on_cpu(seed, scheduler), seeds, failures)
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    print(
        f"{len(seeds)} programs in the simulator, {waited} tasks waited for data, {sum(queued)} of them on the device"
    )
    print(f"as many programs on the CPU, {tasks} tasks")
    return int(bool(failures))


def run_all(run: Callable[[int], int], seeds: Iterable[int], failures: list[str]) -> int:
    """Run a program for each seed; return the sum of the results, and add a message to `failures` for each failure.

    A task that fails ends the runs, because its scheduler may have ended.
    """
    total = 0
    for seed in seeds:
        try:
            total += run(seed)
        except AssertionError as error:
            failures.append(str(error))
        except errors.WarpwellError as error:
            failures.append(f"seed {seed}: {error}")
            break
    return total
