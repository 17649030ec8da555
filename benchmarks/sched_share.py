"""How much work do policies get out of one GPU? The same traces under each, beside the simulator's answer.

Kernels are measured alone, untransformed; then their pairs, for the rates table that policies and the simulator use;
then traces of them run under each policy: a backlogged one of half memory- and half compute-intensive kernels, one of
other kernels, and open ones at several loads. STP is the sum of the times alone over the makespan. The simulator runs
the same trace with the host's time as the run had it, and, in the columns at the end, with a host that takes none.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
from measure import machine, save, table
from sched_forms import Bench, Made
from sched_pairs import SHARES, together

import warpwell as ww
from warpwell.scheduler import Capacity, Kind, Profile, Request, Task
from warpwell.scheduler.core import Core
from warpwell.scheduler.executors.cuda_executor import PAIRS, CudaExecutor
from warpwell.scheduler.policies import policy
from warpwell.scheduler.predict.rates import ClassTable, Matrix, Pair
from warpwell.study.replay import replay
from warpwell.study.simulator import HostDelays, Simulator
from warpwell.study.workloads import make
from warpwell.targets.arrays import zeros

ONE = np.float32(1)
POLICIES = ("first-come", "left-over", "stream-priority", "even-partition", "best-partition", "memory-first", "orion",
            "source", "warpwell")  # fmt: skip


@ww.kernel
def stream(a, b, c, factor):
    """Compute a = b + factor c in double precision, as STREAM's triad; four items a thread, loaded together."""
    i = ww.grid(1)
    n = a.size >> 2
    b0, b1, b2, b3 = b[i], b[i + n], b[i + 2 * n], b[i + 3 * n]
    c0, c1, c2, c3 = c[i], c[i + n], c[i + 2 * n], c[i + 3 * n]
    a[i] = b0 + factor * c0
    a[i + n] = b1 + factor * c1
    a[i + 2 * n] = b2 + factor * c2
    a[i + 3 * n] = b3 + factor * c3


@ww.kernel
def logistic(x, growth, steps):
    """Iterate the logistic map on four items a thread, so that one's latency hides behind the others."""
    i = ww.grid(1)
    n = x.size >> 2
    p, q, r, s = x[i], x[i + n], x[i + 2 * n], x[i + 3 * n]
    for _ in range(steps):
        for _ in range(4):
            p = growth * p * (ONE - p)
            q = growth * q * (ONE - q)
            r = growth * r * (ONE - r)
            s = growth * s * (ONE - s)
    x[i], x[i + n], x[i + 2 * n], x[i + 3 * n] = p, q, r, s


def kernels(device: str, small: bool) -> dict[str, tuple[Any, tuple[Any, ...], Kind]]:
    """Return launches with their arguments and classes, by name."""
    n = 1 << (12 if small else 31)
    a, b, c = (zeros(device, n, np.float64) for _ in range(3))
    m = 1 << (12 if small else 26)
    x = zeros(device, m, np.float32)
    found = {
        "stream": (stream[n // 4], (a, b, c, 3.0), Kind.MEMORY),
        "logistic": (logistic[m // 4], (x, np.float32(3.7), 8 if small else 450), Kind.COMPUTE),
    }
    sizes = {"spmv": 1 << 22, "atax": 1 << 14, "black_scholes": 1 << 25, "gemm": 1024, "conv2d": 1 << 14}
    for name, size in sizes.items():
        app = make(name, None if small else size, device)
        step = app[0]
        kept.append(app)
        found[step.name] = (step.launch, tuple(step.arguments), app.workload.kinds[step.name])
    return found


kept: list[Any] = []


def measured(bench: Bench, found: dict[str, Any]) -> tuple[dict[str, Made], dict[str, Profile]]:
    made, profiles = {}, {}
    for name, (launch, arguments, kind) in found.items():
        one = made[name] = Made(bench, launch, arguments)
        for _ in range(2):
            bench.seconds(one.forms.start_plain)
        seconds = statistics.median(bench.seconds(one.forms.start_plain) for _ in range(5))
        r = one.resident["workers"]
        resident = min(r["resident"], one.blocks.blocks)
        one.chunk = max(1, min(16, int(20e-6 / (seconds * resident / one.blocks.blocks))))
        profiles[name] = Profile(
            kind=kind, seconds=seconds, registers=4 * r["registers"] * r["threads"], shared=r["shared"],
            threads=r["threads"], resident=resident, bandwidth=0.9 if kind is Kind.MEMORY else 0.1,
            compute=0.1 if kind is Kind.MEMORY else 0.9, source="measured",
        )  # fmt: skip
        print(f"{name} {kind.value} {1e3 * seconds:.3f} ms, {one.blocks.blocks} blocks, {resident} resident")
    return made, profiles


def pairs(bench: Bench, made: dict[str, Made], profiles: dict[str, Profile], found: Any, window: float) -> list[Pair]:
    gpu = bench.gpu
    whole = (gpu.stream(), gpu.stream())
    out = []
    for first, one in made.items():
        for second, two in made.items():
            if first == second:
                other = Made(bench, *found[first][:2])
                other.chunk = one.chunk
            else:
                other = two
            names, sides = (first, second), (one, other)
            rates = [m.blocks.blocks / profiles[n].seconds for m, n in zip(sides, names, strict=True)]
            places = [(share, whole, None) for share in SHARES]
            for p in PAIRS:
                part = gpu.partitions[f"a{p}"] / gpu.processors
                streams = (gpu.stream(partition=f"a{p}"), gpu.stream(partition=f"b{p}"))
                places.append(((part, 1 - part), streams, part))
            for share, streams, part in places:
                workers = tuple(max(1, int(s * profiles[n].resident)) for s, n in zip(share, names, strict=True))
                found_rates = together(bench, *sides, workers, streams, window)
                normal = tuple(f / r for f, r in zip(found_rates, rates, strict=True))
                out.append(Pair(first, second, normal, share if part is None else (1.0, 1.0), part))
                if part is not None:
                    for s in streams:
                        gpu.release(s)
    return out


def trace(found: Any, profiles: Any, names: tuple[list[str], list[str]], count: int, load: float | None, seed: int,
          at: float = 0.0) -> list[Request]:  # fmt: skip
    """Return `count` requests of one kernel, memory- and compute-intensive in equal parts of time, at random."""
    rng = np.random.default_rng(seed)
    order = [rng.choice(names[k % 2]) for k in range(count)]
    rng.shuffle(order)
    gap = sum(profiles[n].seconds for n in order) / count / (load or 1.0)
    arrivals = at + (np.cumsum(rng.exponential(gap, count)) if load else np.zeros(count))
    requests = []
    for name, arrival in zip(order, arrivals, strict=True):
        launch, arguments, _ = found[name]
        blocks = blocks_by_name[name]
        requests.append(Request(name, [Task(str(name), blocks, profiles[name], launch, arguments)], float(arrival)))
    return requests


blocks_by_name: dict[str, int] = {}

SIGNAL = 15e-6
"""Seconds of the host for a word that tells workers to leave."""

NOTICE = 20e-6
"""Seconds from an event of the GPU until the host, which looks again and again, notices it."""


def host_of(step: float, executor: CudaExecutor) -> HostDelays:
    """Return what the simulator is to take for the host: most steps decide and launch one kernel."""
    launch = executor._pace.launching
    return HostDelays(decision=max(0.0, step - launch), launch=min(launch, step), signal=SIGNAL, notice=NOTICE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=48, help="kernels of a trace")
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--traces", nargs="+", default=None)
    parser.add_argument("--window", type=float, default=10e-3, help="seconds in which a pair is measured")
    parser.add_argument("--seed", type=int, default=3, help="of the traces")
    parser.add_argument("--logs", default=None, metavar="DIR", help="write the logs of all runs, for sched explain")
    parser.add_argument("--matrix", default=None, metavar="FILE")
    parser.add_argument("--json", default=None, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=200, help="leave the rest out after this time")
    parser.add_argument("--dry", action="store_true", help="on the CPU, to try the script; figures mean nothing")
    options = parser.parse_args()
    begun = time.perf_counter()
    device = "cpu" if options.dry else "cuda"
    found = kernels(device, options.dry)
    result: dict[str, Any] = machine(device)
    if options.dry:
        from tests.harness.fake_gpu import FakeGpu

        from warpwell.targets.blocks.launch import BlockLaunch

        profiles = {n: Profile(kind=k, seconds=2e-3, resident=4, source="measured") for n, (_, _, k) in found.items()}
        blocks_by_name.update({n: BlockLaunch(f[0], f[1], "cpu").blocks for n, f in found.items()})
        measured_pairs: list[Pair] = []
    else:
        from warpwell.targets.gpu.gpu import Gpu

        bench = Bench()
        bench.gpu = Gpu(0, PAIRS)
        bench.gpu.enter()
        made, profiles = measured(bench, found)
        blocks_by_name.update({n: m.blocks.blocks for n, m in made.items()})
        measured_pairs = pairs(bench, made, profiles, found, options.window)
        best: dict[tuple[str, str], Pair] = {}
        for pair in measured_pairs:
            key = (pair.first, pair.second)
            if key not in best or sum(pair.rates) > sum(best[key].rates):
                best[key] = pair
        table("best of each pair", ["first", "second", "STP", "rates", "quotas", "part"],
              [[*k, sum(p.rates), "{:.2f} {:.2f}".format(*p.rates), str(p.shares), p.partition or ""]
               for k, p in best.items()])  # fmt: skip
    result["profiles"] = {n: p.__dict__ for n, p in profiles.items()}

    def executor() -> Any:
        return CudaExecutor(gpu=FakeGpu()) if options.dry else CudaExecutor(pairs=PAIRS)

    first = executor()
    capacity: Capacity = first.capacity
    first.close()

    def rates() -> Any:
        return Matrix(measured_pairs, ClassTable(capacity), device=str(result.get("gpu", device)))

    if options.matrix:
        rates().write(options.matrix)
    memory = [n for n, (_, _, k) in found.items() if k is Kind.MEMORY]
    compute = [n for n, (_, _, k) in found.items() if k is Kind.COMPUTE]
    traces = {
        "complementary": ((["stream"], ["logistic"]), None),
        "half and half": ((memory, compute), None),
        "load 0.9": ((memory, compute), 0.9),
        "load 1.5": ((memory, compute), 1.5),
        "load 0.5": ((memory, compute), 0.5),
        "memory only": ((memory, memory), None),
        "compute only": ((compute, compute), None),
    }
    rows = []
    for title, (names, load) in traces.items():
        if options.traces and title not in options.traces:
            continue
        for name in options.policies:
            if time.perf_counter() - begun > options.seconds:
                print(f"left out for time: {title}, {name}", flush=True)
                continue
            real = executor()
            # each kernel once, so that nothing is compiled or loaded on the way
            replay(trace(found, profiles, names, len(set(names[0] + names[1])) * 2, None, 1, real.now()),
                   Core(real, policy("first-come"), rates=rates()))  # fmt: skip
            core = Core(real, policy(name), rates=rates())
            ran = replay(trace(found, profiles, names, options.count, load, options.seed, real.now() + 1e-3), core,
                         alone=lambda task: profiles[task.name].seconds)  # fmt: skip
            steps = np.asarray(ran.steps)
            host = host_of(float(np.median(steps)), real)
            real.close()
            m = ran.metrics()
            guesses = []
            for its in (host, HostDelays()):
                simulated = Simulator(rates(), capacity, mode="drain", host=its)
                asked = trace(found, profiles, names, options.count, load, options.seed)
                guess = replay(asked, Core(simulated, policy(name), rates=rates()))
                guesses.append(guess.metrics().stp)
                if options.logs and not guesses[1:]:
                    for kind, run in (("real", ran), ("simulated", guess)):
                        with open(f"{options.logs}/{title.replace(' ', '-')}.{name}.{kind}.jsonl", "w") as file:
                            run.log.write(file)
            tails = [m.turnaround[k].p99 if k in m.turnaround else float("nan") for k in ("memory", "compute")]
            rows.append([
                title, name, m.stp, guesses[0], guesses[0] / m.stp - 1, m.antt, m.fairness, 1e3 * tails[0],
                1e3 * tails[1], sum(e.kind == "preempt" for e in ran.log), m.failed, 1e6 * float(np.median(steps)),
                guesses[1], guesses[1] / m.stp - 1, 1e6 * host.launch,
            ])  # fmt: skip
            print(*rows[-1], flush=True)
            result["rows"] = rows
            save(options.json, result)
    table("policies", ["trace", "policy", "STP", "simulated", "error", "ANTT", "fairness", "p99 memory ms",
                       "p99 compute ms", "preempted", "failed", "decision us", "simulated without host", "its error",
                       "launch us"], rows)  # fmt: skip


if __name__ == "__main__":
    main()
