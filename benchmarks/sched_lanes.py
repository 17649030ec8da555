"""Two lanes beside other policies: pairs in either order of arrival, and traces, over left-over of the same seed.

Everything in one run, seed by seed, so that a machine that changes changes all policies alike. STP is the sum of the
times alone of the plain kernels over the makespan; *together* is the same while both classes have work. The measured
pairs are written with the rows: a linear programme over them says what a trace allows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from typing import Any

import numpy as np
from measure import machine, save, table
from sched_forms import Bench
from sched_share import PAIRS, blocks_by_name, kernels, measured, pairs, trace
from sched_shifts import ramp

from warpwell.scheduler import Kind, Profile, Request, Task
from warpwell.scheduler.core import Core
from warpwell.scheduler.executors.cuda_executor import CudaExecutor
from warpwell.scheduler.policies import policy
from warpwell.scheduler.predict.rates import ClassTable, Matrix, Pair
from warpwell.study.replay import ReplayResult, replay
from warpwell.targets.arrays import to_host

POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "left-over": ("left-over", {}), "first-come": ("first-come", {}), "source": ("source", {}),
    "warpwell": ("warpwell", {}), "lanes": ("lanes", {}), "lanes, shifts of 1 ms": ("lanes", {"shift": 1e-3}),
    "lanes, short 0.3 ms": ("lanes", {"short": 0.3e-3}), "lanes, short 3 ms": ("lanes", {"short": 3e-3}),
}  # fmt: skip
VARIED = ("memory first", "compute first", "complementary", "half and half")
"""Traces under which options of a policy are compared."""

LATER = 5e-3
"""Seconds by which the second class comes later, where the order matters."""


def ordered(found: Any, profiles: Any, first: str, second: str, count: int, at: float) -> list[Request]:
    """Return `count` kernels of one class, and as many of the other a little later."""
    return [
        Request(name, [Task(name, blocks_by_name[name], profiles[name], *found[name][:2])], at + k * LATER)
        for k, name in enumerate((first, second)) for _ in range(count)
    ]  # fmt: skip


def both(ran: ReplayResult, profiles: Any) -> float:
    """Return the sum of normalized rates while both classes have work; a kernel's progress counts as even."""
    sides: dict[Any, list[Any]] = defaultdict(list)
    for job in ran.jobs:
        sides[job.task.profile.kind].append(job)
    if len(sides) < 2:
        return float("nan")
    begin = max(min(job.arrival for job in jobs) for jobs in sides.values())
    end = min(max(job.ended for job in jobs) for jobs in sides.values())
    work = 0.0
    for job in ran.jobs:
        part = max(0.0, min(job.ended, end) - max(job.started, begin)) / max(1e-9, job.ended - job.started)
        work += part * profiles[job.task.name].seconds
    return work / (end - begin)


def bits(real: Any, bench: Any, made: Any, rates: Any, found: Any, profiles: Any, count: int) -> bool:
    """Return whether logistic, that ran `count` times in lanes, left the bits that plain launches leave."""
    x = found["logistic"][1][0]
    ramp[x.size](x, np.float32(0.0007))
    for _ in range(count):
        bench.seconds(made["logistic"].forms.start_plain)
    wanted = to_host(x).tobytes()
    ramp[x.size](x, np.float32(0.0007))
    requests = ordered(found, profiles, "logistic", "stream", count, real.now())
    replay(requests, Core(real, policy("lanes"), rates=rates))
    return bool(to_host(x).tobytes() == wanted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20, help="kernels of a trace")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--traces", nargs="+", default=None)
    parser.add_argument("--limit", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=70, help="begin no other seed after this time")
    parser.add_argument("--json", default=None, metavar="FILE")
    parser.add_argument("--dry", action="store_true", help="on the CPU, to try the script; figures mean nothing")
    options = parser.parse_args()
    begun = time.perf_counter()
    device = "cpu" if options.dry else "cuda"
    found = kernels(device, options.dry)
    result: dict[str, Any] = machine(device)
    found_pairs: list[Pair] = []
    if options.dry:
        from tests.harness.fake_gpu import FakeGpu

        from warpwell.targets.blocks.launch import BlockLaunch

        profiles = {n: Profile(kind=k, seconds=2e-3, resident=4, source="measured") for n, (_, _, k) in found.items()}
        blocks_by_name.update({n: BlockLaunch(f[0], f[1], "cpu").blocks for n, f in found.items()})
        real = CudaExecutor(gpu=FakeGpu())
    else:
        from warpwell.targets.gpu.gpu import Gpu

        bench = Bench()
        bench.gpu = Gpu(0, PAIRS)
        bench.gpu.enter()
        made, profiles = measured(bench, found)
        blocks_by_name.update({n: m.blocks.blocks for n, m in made.items()})
        found_pairs = pairs(bench, made, profiles, found, 5e-3)
        real = CudaExecutor(pairs=PAIRS)
    rates = Matrix(found_pairs or [Pair("k", "k", (0.5, 0.5))], ClassTable(real.capacity))
    result["profiles"] = {n: [p.seconds, p.kind.value if p.kind else ""] for n, p in profiles.items()}
    result["pairs"] = [[p.first, p.second, p.rates, p.shares, p.partition] for p in found_pairs]
    print(f"{time.perf_counter() - begun:.1f} s to measure kernels and pairs", flush=True)
    names = list(found)
    memory = [n for n in names if found[n][2] is Kind.MEMORY]
    compute = [n for n in names if found[n][2] is Kind.COMPUTE]
    replay(trace(found, profiles, (memory, compute), 14, None, 1, real.now()),
           Core(real, policy("first-come"), rates=rates))  # fmt: skip
    if not options.dry:
        print("bits of logistic as by plain launches:", bits(real, bench, made, rates, found, profiles, 5), flush=True)
    one = (["stream"], ["logistic"])
    traces: dict[str, Any] = {
        "memory first": lambda seed, at: ordered(found, profiles, "stream", "logistic", options.count // 2, at),
        "compute first": lambda seed, at: ordered(found, profiles, "logistic", "stream", options.count // 2, at),
        "complementary": lambda seed, at: trace(found, profiles, one, options.count, None, seed, at),
        "half and half": lambda seed, at: trace(found, profiles, (memory, compute), options.count, None, seed, at),
        "load 1.5": lambda seed, at: trace(found, profiles, (memory, compute), options.count, 1.5, seed, at),
        "load 0.9": lambda seed, at: trace(found, profiles, (memory, compute), options.count, 0.9, seed, at),
        "load 0.5": lambda seed, at: trace(found, profiles, (memory, compute), options.count, 0.5, seed, at),
        "memory only": lambda seed, at: trace(found, profiles, (memory, memory), options.count, None, seed, at),
        "compute only": lambda seed, at: trace(found, profiles, (compute, compute), options.count, None, seed, at),
    }
    figures: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    for seed in range(options.seeds):
        if time.perf_counter() - begun > options.seconds:
            break
        for title, make in traces.items():
            if options.traces and title not in options.traces:
                continue
            for name in options.policies:
                base, extra = POLICIES[name]
                if extra and title not in VARIED:
                    continue
                core = Core(real, policy(base, **extra), rates=rates, limit=options.limit)
                ran = replay(make(seed, real.now() + 1e-3), core, alone=lambda task: profiles[task.name].seconds)
                m = ran.metrics()
                figures[title, name].append([m.stp, both(ran, profiles), m.antt, float(m.failed), m.makespan,
                                             sum(e.kind == "preempt" for e in ran.log),
                                             1e6 * float(np.median(np.asarray(ran.steps)))])  # fmt: skip
        print(f"seed {seed} at {time.perf_counter() - begun:.1f} s", flush=True)
    real.close()
    rows = []
    for (title, name), its in figures.items():
        over = [mine[0] / left[0] for mine, left in zip(its, figures.get((title, "left-over"), its), strict=False)]
        columns = list(zip(*its, strict=True))
        middle = [statistics.median(column) for column in columns]
        rows.append([title, name, len(its), middle[0], min(columns[0]), statistics.median(over), min(over), middle[1],
                     middle[2], max(columns[3]), middle[5], middle[6]])  # fmt: skip
    table("policies", ["trace", "policy", "seeds", "STP", "worst", "over left-over", "worst", "together", "ANTT",
                       "failed", "preempted", "decision us"], rows)  # fmt: skip
    result["rows"] = rows
    result["figures"] = [[*key, its] for key, its in figures.items()]
    save(options.json, result)


if __name__ == "__main__":
    main()
