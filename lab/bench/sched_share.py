"""Throughput of scheduling policies on one GPU, on the same traces, compared with the hardware's order.

Kernels are measured alone, untransformed, then their pairs; then traces run under each policy, seed by seed, so that a
machine that changes affects all policies alike. STP is the sum of the times alone of the plain kernels, divided by the
makespan; *pair* is the sum of rates while both classes have work. ``left-over`` (plain launches in arrival order) is
the ceiling of every other policy, and the fluid bound of the measured pairs the ceiling of every schedule. ``known`` is
``lanes`` with the pairs that it measured in earlier traces. The simulator runs the same trace; its error is a figure.

Options: ``traces``, ``policies``, ``count`` (kernels in a trace), ``seeds``, ``first``, ``seconds`` (no seed starts
later), ``peers`` (traces that also run by time slicing, MPS and green contexts), ``raw=FILE`` (all values and pairs,
for the simulator's tests).
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np

import warpwell as ww
from lab.bench import sched_peers
from lab.bench.runner import Record, Setting, benchmark
from lab.bench.sched_forms import Bench, Made
from lab.bench.sched_pairs import SHARES, together
from lab.sched.bound import bound
from lab.sched.policies import make_policy
from lab.sched.rates import ClassTable, Matrix, Pair
from lab.sched.recorded import WORKERS
from lab.sched.replay import ReplayResult, replay
from lab.sched.simulator import HostDelays, Simulator
from lab.sched.workloads import WORKLOADS, make
from warpwell.scheduler import Profile
from warpwell.scheduler.executors.cuda_executor import CudaExecutor
from warpwell.scheduler.extend import Capacity, Core, Kind, Request, Task
from warpwell.scheduler.predict.learner import Learner
from warpwell.targets import to_host, zeros

UNIT = np.float32(1)
POLICIES = ("left-over", "first-come", "stream-priority", "source", "lanes", "known")
"""`known` is `lanes` with the pairs that it measured in earlier traces; `lanes` begins each trace with none."""

LATER = 5e-3
"""Delay of the second class in seconds, on traces with an order."""


@ww.kernel
def ramp(x, factor):
    """Fill an array with small positive numbers."""
    i = ww.gpu.grid(1)
    if i < x.size:
        x[i] = factor * (i & 1023) + factor


@ww.kernel
def stream(a, b, c, factor):
    """Compute a = b + factor c in double precision, as STREAM's triad; four items a thread, loaded together."""
    i = ww.gpu.grid(1)
    n = a.size >> 2
    b0, b1, b2, b3 = b[i], b[i + n], b[i + 2 * n], b[i + 3 * n]
    c0, c1, c2, c3 = c[i], c[i + n], c[i + 2 * n], c[i + 3 * n]
    a[i] = b0 + factor * c0
    a[i + n] = b1 + factor * c1
    a[i + 2 * n] = b2 + factor * c2
    a[i + 3 * n] = b3 + factor * c3


@ww.kernel
def logistic(x, growth, steps):
    """Iterate the logistic map on four items per thread, so that their latencies overlap."""
    i = ww.gpu.grid(1)
    n = x.size >> 2
    p, q, r, s = x[i], x[i + n], x[i + 2 * n], x[i + 3 * n]
    for _ in range(steps):
        for _ in range(4):
            p = growth * p * (UNIT - p)
            q = growth * q * (UNIT - q)
            r = growth * r * (UNIT - r)
            s = growth * s * (UNIT - s)
    x[i], x[i + n], x[i + 2 * n], x[i + 3 * n] = p, q, r, s


def kernels(device: str, small: bool, side: str = "") -> dict[str, tuple[Any, tuple[Any, ...], Kind]]:
    """Return launches with their arguments and classes, by name; `side` selects a class."""
    n = 1 << (12 if small else 31)
    a, b, c = (zeros(device, 2 if side == "compute" else n, np.float64) for _ in range(3))
    m = 1 << (12 if small else 26)
    x = zeros(device, m, np.float32)
    found = {
        "stream": (stream[n // 4], (a, b, c, 3.0), Kind.MEMORY),
        "logistic": (logistic[m // 4], (x, np.float32(3.7), 8 if small else 450), Kind.COMPUTE),
    }
    rng = np.random.default_rng(17)
    for k in range(4):  # of 0.4 to 6 ms, at random
        part = float(rng.uniform(math.log(1 / 30), math.log(1 / 2)))
        few = int(n * math.exp(part)) // 1024 * 1024 if not small else n
        found[f"random_stream{k}"] = (stream[few // 4], (a[:few], b[:few], c[:few], 3.0), Kind.MEMORY)
        part = math.exp(float(rng.uniform(math.log(1 / 30), math.log(1 / 2))))
        found[f"random_logistic{k}"] = (logistic[m // 4], (x, np.float32(3.7), max(8, int(450 * part))), Kind.COMPUTE)
    sizes = {"spmv": 1 << 22, "atax": 1 << 14, "black_scholes": 1 << 25, "gemm": 1024, "conv2d": 1 << 14}
    for name, size in sizes.items():
        if side and side not in {kind.value for kind in WORKLOADS[name].kinds.values()}:
            continue
        app = make(name, None if small else size, device)
        step = app[0]
        applications.append(app)
        found[step.name] = (step.launch, tuple(step.arguments), app.workload.kinds[step.name])
    return {name: entry for name, entry in found.items() if side in ("", entry[2].value)}


applications: list[Any] = []


def measured(bench: Bench, found: dict[str, Any]) -> tuple[dict[str, Made], dict[str, Profile]]:
    made, profiles = {}, {}
    for name, (launch, arguments, kind) in found.items():
        prepared = made[name] = Made(bench, launch, arguments)
        for _ in range(2):
            bench.seconds(prepared.forms.start_plain)
        seconds = statistics.median(bench.seconds(prepared.forms.start_plain) for _ in range(5))
        r = prepared.resident["workers"]
        resident = min(r["resident"], prepared.blocks.blocks)
        prepared.chunk = prepared.chunk_for(seconds)
        profiles[name] = Profile(
            kind=kind,
            seconds=seconds,
            registers=4 * r["registers"] * r["threads"],
            shared=r["shared"],
            threads=r["threads"],
            resident=resident,
            bandwidth=0.9 if kind is Kind.MEMORY else 0.1,
            compute=0.1 if kind is Kind.MEMORY else 0.9,
            source="measured",
        )
        print(f"{name} {kind.value} {1e3 * seconds:.3f} ms, {prepared.blocks.blocks} blocks, {resident} resident")
    return made, profiles


def pairs(bench: Bench, made: dict[str, Made], profiles: dict[str, Profile], found: Any, window: float) -> list[Pair]:
    gpu = bench.gpu
    streams = (gpu.new_stream(), gpu.new_stream())
    out = []
    for first, first_made in made.items():
        for second, second_made in made.items():
            if first == second:
                co_runner = Made(bench, *found[first][:2])
                co_runner.chunk = first_made.chunk
            else:
                co_runner = second_made
            first_made.alone, co_runner.alone = profiles[first].seconds, profiles[second].seconds
            names, sides = (first, second), (first_made, co_runner)
            rates = [m.blocks.blocks / profiles[n].seconds for m, n in zip(sides, names, strict=True)]
            for share in SHARES:
                workers = tuple(max(1, int(s * profiles[n].resident)) for s, n in zip(share, names, strict=True))
                found_rates = together(bench, *sides, workers, streams, window)
                normal = tuple(f / r for f, r in zip(found_rates, rates, strict=True))
                out.append(Pair(first, second, normal, share))
    return out


def ordered(found: Any, profiles: Any, first: str, second: str, count: int, at: float) -> list[Request]:
    """Return `count` kernels of one class, and as many of the other a little later."""
    return [
        request(found, profiles, name, at + k * LATER) for k, name in enumerate((first, second)) for _ in range(count)
    ]


def trace(
    found: Any,
    profiles: Any,
    names: tuple[list[str], list[str]],
    count: int,
    load: float | None,
    seed: int,
    at: float = 0.0,
) -> list[Request]:
    """Return `count` requests of one kernel, memory- and compute-intensive in equal parts, at random."""
    rng = np.random.default_rng(seed)
    order = [rng.choice(names[k % 2]) for k in range(count)]
    rng.shuffle(order)
    gap = sum(profiles[n].seconds for n in order) / count / (load or 1.0)
    arrivals = at + (np.cumsum(rng.exponential(gap, count)) if load else np.zeros(count))
    return [request(found, profiles, str(n), float(arrival)) for n, arrival in zip(order, arrivals, strict=True)]


def request(found: Any, profiles: Any, name: str, at: float) -> Request:
    launch, arguments, _ = found[name]
    return Request(name, [Task(name, blocks_by_name[name], profiles[name], launch, arguments)], at)


def sum_of_rates(ran: ReplayResult, profiles: Any) -> float:
    """Return the sum of normalized rates while both classes have work; a kernel's progress counts as even."""
    sides: dict[Any, list[Any]] = defaultdict(list)
    for job in ran.jobs:
        if job.started is None:
            return float("nan")  # a failed kernel, which is counted
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


def has_equal_bits(real: Any, bench: Any, made: Any, found: Any, profiles: Any, count: int) -> bool:
    """Return True if `count` runs of logistic together with stream have the same bits as plain launches."""
    x = found["logistic"][1][0]
    ramp[x.size](x, np.float32(0.0007))
    for _ in range(count):
        bench.seconds(made["logistic"].forms.start_plain)
    expected = to_host(x).tobytes()
    ramp[x.size](x, np.float32(0.0007))
    replay(ordered(found, profiles, "logistic", "stream", count, real.now()), Core(real, "lanes"))
    return bool(to_host(x).tobytes() == expected)


blocks_by_name: dict[str, int] = {}


def measure_all(window: float) -> tuple[Any, Any, Any, list[Pair], Any, Any]:
    """Return launches, prepared launches, profiles, pairs, an executor and a bench."""
    found, bench = kernels("cuda", False), Bench()
    made, profiles = measured(bench, found)
    blocks_by_name.update({n: m.blocks.blocks for n, m in made.items()})
    return found, made, profiles, pairs(bench, made, profiles, found, window), CudaExecutor(), bench


def traces_of(found: Any, profiles: Any, count: int) -> dict[str, Any]:
    """Return functions that create each trace from a seed and the time at which it begins."""
    suite = [n for n in found if not n.startswith("random")]
    mixed = [n for n in found if n.startswith("random")]
    sides = {
        name: tuple([n for n in names if found[n][2] is kind] for kind in (Kind.MEMORY, Kind.COMPUTE))
        for name, names in {
            "seven": suite,
            "short": [n for n in suite if n not in ("stream", "logistic")],
            "random mix": mixed,
            "complementary": ["stream", "logistic"],
        }.items()
    }
    memory, compute = sides["seven"]

    def of(names: Any, load: float | None) -> Any:
        return lambda seed, at: trace(found, profiles, names, count, load, seed, at)

    made = {
        "memory first": lambda seed, at: ordered(found, profiles, "stream", "logistic", count // 2, at),
        "compute first": lambda seed, at: ordered(found, profiles, "logistic", "stream", count // 2, at),
        **{name: of(names, None) for name, names in sides.items()},
        **{f"seven, load {load}": of(sides["seven"], load) for load in (0.5, 0.9, 1.5)},
        "memory only": of((memory, memory), None),
        "compute only": of((compute, compute), None),
    }
    return made


@benchmark("sched-share", needs={"gpu"}, figures=["alone", "stp", "simulator"])
def run(setting: Setting, record: Record) -> None:
    """Measure kernels and pairs, then run the traces."""
    began = time.perf_counter()
    found, made, profiles, found_pairs, real, bench = measure_all(setting.option("window", 5e-3))
    capacity: Capacity = real.capacity
    rates = Matrix(found_pairs, ClassTable(capacity), device="cuda")
    count, first = setting.option("count", 32), setting.option("first", 0)
    for name, profile in profiles.items():
        record(f"alone/{name}", profile.seconds, "s", better="lower")
    # each kernel runs once, so that nothing is compiled or loaded later
    replay([request(found, profiles, n, real.now()) for n in found for _ in range(2)], Core(real, "first-come"))
    if not has_equal_bits(real, bench, made, found, profiles, 5):
        raise SystemExit("logistic left different bits under the scheduler than by plain launches")
    makers, learner = traces_of(found, profiles, count), Learner()
    usual = ["memory first", "compute first", "complementary", "random mix", "seven, load 0.9"]
    titles = setting.option("traces", usual if setting.quick else list(makers))
    policies = setting.option("policies", ["left-over", "source", "lanes"] if setting.quick else list(POLICIES))
    figures: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    work: dict[str, list[dict[str, int]]] = defaultdict(list)
    limit = began + setting.option("seconds", 120.0 if setting.quick else 400.0)
    for seed in range(first, first + setting.option("seeds", 3 if setting.quick else 10)):
        for title in titles:
            if time.perf_counter() > limit:
                break
            work[title].append(dict(Counter(task.name for drawn in makers[title](seed, 0.0) for task in drawn.tasks)))
            for name in policies:
                policy, pairs_of = ("lanes", learner) if name == "known" else (name, None)
                core = Core(real, make_policy(policy), rates=rates, learner=pairs_of)
                requests = makers[title](seed, real.now() + 1e-3)
                ran = replay(requests, core, alone=lambda task: profiles[task.name].seconds)
                steps = float(np.median(np.asarray(ran.steps)))
                host = HostDelays.of(steps, real._pace.launching)  # most steps decide and launch one kernel
                simulated = Simulator(rates, capacity, mode="drain", host=host, workers=WORKERS)
                guess = replay(makers[title](seed, 0.0), Core(simulated, make_policy(core.policy.name), rates=rates))
                m = ran.metrics()
                preempted = float(sum(e.kind == "preempt" for e in ran.log))
                error = guess.metrics().stp / m.stp - 1
                row = [m.stp, sum_of_rates(ran, profiles), m.antt, float(m.failed), preempted, 1e6 * steps, error]
                figures[title, name].append(row)
    seconds = {name: profile.seconds for name, profile in profiles.items()}
    for title in setting.option("peers", [""]):
        if title:
            items = [
                [(r.tasks[0].name, found[r.tasks[0].name][2].value, r.arrival) for r in makers[title](first + k, 0.0)]
                for k in range(3)
            ]
            for _, name, rows in sched_peers.measure(bench, made, {title: items}, seconds, False, limit):
                record(f"stp/{title}/{name}", [stp for stp, _ in rows], "STP")
    real.close()
    for (title, name), rows in figures.items():
        left = [row[0] for row in figures.get((title, "left-over"), [])]
        over = [row[0] / base for row, base in zip(rows, left, strict=False)]
        ceiling = ("left-over", float(np.median(left))) if left and name != "left-over" else None
        record(f"stp/{title}/{name}", [row[0] for row in rows], "STP", ceiling=ceiling)
        if over and name != "left-over":
            record(f"stp/{title}/{name}/of left-over", over, "ratio", goal=0.97)
            if all(math.isfinite(row[1]) for row in rows):
                record(f"pair/{title}/{name}", [row[1] for row in rows], "STP")
            record(f"antt/{title}/{name}", [row[2] for row in rows], "ANTT", better="lower")
            if ", load " not in title:
                bounds = [bound((r.tasks[0] for r in makers[title](first + k, 0.0)), rates) for k in range(len(rows))]
                ratios = [row[0] / b for row, b in zip(rows, bounds, strict=True)]
                record(f"stp/{title}/{name}/of fluid bound", ratios, "ratio")
            record(f"decision/{title}/{name}", [1e-6 * row[5] for row in rows], "s", better="lower")
        record(f"simulator/{title}/{name}", [abs(row[6]) for row in rows], "relative error", better="lower", goal=0.05)
    if "raw" in setting.options:
        content = {
            "count": count,
            "profiles": {
                n: [p.seconds, p.kind.value if p.kind else "", blocks_by_name[n], p.resident]
                for n, p in profiles.items()
            },
            "pairs": [[p.first, p.second, p.rates, p.shares] for p in found_pairs],
            "work": work,
            "figures": [[*key, rows] for key, rows in figures.items()],
        }
        Path(setting.options["raw"]).write_text(json.dumps(content), encoding="utf-8")
