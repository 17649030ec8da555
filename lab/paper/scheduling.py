"""GPU task scheduling: the cost formula, the decay, decisions, and policies in the simulator.

The document has no measured figures, only formulas, constants and the flow of decisions (its figure 1).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any

from lab.sched.experiment import Experiment as Simulation
from lab.sched.fitting import Preemption, fit
from lab.sched.policies import BASELINES, NAMES
from lab.sched.rates import ClassTable
from lab.sched.replay import replay
from lab.sched.simulator import Simulator
from lab.sched.traces.recipe import Recipe
from warpwell.scheduler import Profile
from warpwell.scheduler.decision import worth
from warpwell.scheduler.extend import Core, Ended, Event, Job, Kind, Request, SourceModel, Stopped, Task

from . import shapes
from .experiment import Document, Experiment, Outcome, Setting

MEMORY, COMPUTE = Kind.MEMORY, Kind.COMPUTE
MODEL = SourceModel()
"""Cost formula and decay of the simulated device: the product's defaults."""


def _task(name: str, kind: Kind, seconds: float, blocks: int = 50_000, **fields: float) -> Task:
    shares = {"bandwidth": 0.9, "compute": 0.1} if kind is MEMORY else {"bandwidth": 0.05, "compute": 0.9}
    return Task(name, blocks, Profile(kind, seconds, 1e8, **(shares | fields)))  # type: ignore[arg-type]


def _core(limit: int = 2) -> Core:
    """Return the source's policy on a simulated device that switches contexts."""
    rates = ClassTable()
    return Core(Simulator(rates, model=MODEL, mode="switch"), "source", rates=rates, limit=limit)


class _Recorder(Simulator):
    """Records the inputs and the duration of each preemption."""

    core: Core

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.preemptions: list[Preemption] = []
        self._leaving: dict[Job, tuple[float, float, float]] = {}

    def preempt(self, job: Job, mode: str = "drain") -> None:
        profile, placement = job.task.profile, job.placement
        blocks = min(profile.resident, job.task.blocks)
        if placement is not None and placement.workers is not None:
            blocks = min(blocks, placement.workers)
        nbytes = (profile.registers + profile.shared) * -(-blocks // self.capacity.processors)
        misses = [running.task.profile.miss_rate for running in self.core.running if running is not job]
        self._leaving[job] = self.now(), nbytes, max(misses, default=0.0)
        super().preempt(job, mode)

    def poll(self) -> list[Ended | Stopped]:
        events = super().poll()
        for event in events:
            began, nbytes, miss_rate = self._leaving.pop(event.job, (None, 0.0, 0.0))
            if began is not None and isinstance(event, Stopped):
                cycles = (event.time - began) * self.capacity.clock
                self.preemptions.append(Preemption(nbytes, miss_rate, cycles))
        return events


def cost(setting: Setting, document: Document) -> Outcome:
    """Let simulated kernels of different sizes and miss rates be preempted, and fit the formula to the log."""
    requests = []
    for k in range(90):
        kind = MEMORY if k % 3 == 2 else COMPUTE  # the arriving kernel replaces one of two compute-intensive kernels
        registers, miss_rate = 8192 * (1 + k % 8), 0.02 * (k % 36)
        task = _task(f"kernel{k}", kind, 0.02, registers=registers, miss_rate=miss_rate)
        requests.append(Request(f"request{k}", [task], arrival=0.2 * (k // 3) + 1e-3 * (k % 3)))
    rates = ClassTable()
    simulator = _Recorder(rates, model=MODEL, mode="switch")
    simulator.core = Core(simulator, "source", rates=rates, limit=2)
    replay(requests, simulator.core)
    found = fit(simulator.preemptions)
    checks = [
        shapes.ratio("slope of the miss rate", found.model.slope, document.numbers["slope"], 1.01),
        shapes.ratio("cycles per byte without misses", found.model.base, document.numbers["base"], 1.01),
        shapes.between("fit of the linear model, R2", found.model.r2 or 0.0, 0.999, 1.0),
        shapes.between("preemptions in the fit", found.costs, 5),
    ]
    text = f"slope {found.model.slope:.5f}, base {found.model.base:.5f} from {found.costs} preemptions (simulator)"
    return Outcome(text, checks, {"slope": found.model.slope, "base": found.model.base, "r2": found.model.r2})


def decay(setting: Setting, document: Document) -> Outcome:
    """Measure the part of its rate that a kernel keeps while its co-runner is preempted."""
    decays = {kind: _measure_decay(kind) for kind in Kind}
    checks = [
        shapes.between("a memory-intensive kernel slows", decays[MEMORY], *document.numbers["memory"]),
        shapes.ratio("a compute-intensive kernel hardly slows", decays[COMPUTE], document.numbers["compute"], 1.02),
    ]
    text = f"memory-intensive {decays[MEMORY]:.2f}, compute-intensive {decays[COMPUTE]:.2f} (simulator)"
    return Outcome(text, checks, {kind.value: value for kind, value in decays.items()})


def _measure_decay(kind: Kind) -> float:
    """Return the rate of a kernel while its co-runner is saved, over its rate after the co-runner has left."""
    core = _core()
    staying = core.submit(Request("stays", [_task("stays", kind, 1.0, 500_000_000)]))[0]
    core.step()
    leaves = core.submit(Request("leaves", [_task("leaves", kind, 1.0, 5_000_000, registers=1 << 20)]))[0]
    core.step()
    simulator = core.executor
    assert isinstance(simulator, Simulator)

    def rate(seconds: float) -> float:
        before, until = simulator.progress(staying), simulator.now() + seconds
        while simulator.now() < until:
            simulator.wait(until)
            simulator.poll()
        return (simulator.progress(staying) - before) / seconds

    rate(1e-2)  # the quota of the first kernel changes when the second kernel arrives
    saving = simulator.cost(leaves, [staying])
    simulator.preempt(leaves, "switch")
    during = rate(0.5 * saving)
    rate(saving)  # the preempted kernel has left
    return during / rate(0.5 * saving)


CASES = (
    (dict(s0=1.10, n=0.55, s1=1.60, t=211, c=100, d=1.0), True),
    (dict(s0=1.10, n=0.55, s1=1.60, t=209, c=100, d=1.0), False),
    (dict(s0=1.10, n=0.55, s1=1.60, t=2220, c=1000, d=0.90), True),
    (dict(s0=1.10, n=0.55, s1=1.60, t=2200, c=1000, d=0.90), False),
    (dict(s0=1.10, n=0.55, s1=1.60, t=220, c=100, d=0.97), True),
    (dict(s0=1.10, n=0.55, s1=1.60, t=220, c=100, d=0.83), False),
    (dict(s0=0.50, n=1.0, s1=2.00, t=100, c=100, d=1.0), False),
    (dict(s0=1.60, n=0.80, s1=1.10, t=1e9, c=1, d=1.0), False),
)
"""Sums of normalized IPC, times and decay, with the decision worked by hand.

The rule preempts if and only if c < t and d n c + s1 (t - c) > s0 t, so if (s1 - s0) t > (s1 - d n) c: in the first
pair from t = 2.1 c on, in the second from 2.21 c, in the third from 2.133 c and 2.287 c.
"""


def decisions(setting: Setting, document: Document) -> Outcome:
    """Compare the rule with cases worked by hand, and the policy with each branch of the document's figure 1."""
    right = sum(worth(**figures) is decision for figures, decision in CASES)
    checks = [
        shapes.equal("the rule, worked by hand", right, len(CASES)),
        shapes.equal(
            "S104: below the limit the best combination is launched", _started([COMPUTE, COMPUTE, MEMORY]), "CM"
        ),
        shapes.equal("S104: among equals the preempted kernel comes first", _resumed(), "resumed"),
        shapes.equal("S106: no better combination, so all stay", _weighed([COMPUTE, MEMORY], COMPUTE, 1.0), ""),
        shapes.equal("S108: the gain exceeds the cost", _weighed([MEMORY, MEMORY], COMPUTE, 1.0), "preempt"),
        shapes.equal("S107: the cost exceeds the gain", _weighed([MEMORY, MEMORY], COMPUTE, 1e-5), "hold"),
    ]
    agree = sum(check.agrees for check in checks[1:])
    return Outcome(f"{right} of {len(CASES)} cases, {agree} of {len(checks) - 1} branches", checks)


def _started(kinds: list[Kind]) -> str:
    """Return the classes of the kernels that run if kernels of these classes arrive together."""
    core = _core()
    for kind in kinds:
        core.submit(Request(kind.value, [_task(kind.value, kind, 1.0)]))
    core.step()
    return "".join(sorted("M" if job.task.profile.kind is MEMORY else "C" for job in core.running))


def _weighed(running: list[Kind], arriving: Kind, seconds: float) -> str:
    """Return the decisions in the log if a kernel arrives while two others would run for some seconds."""
    core = _core()
    for number, kind in enumerate(running):
        core.submit(Request("running", [_task(f"running{number}", kind, seconds, registers=1 << 20)]))
    core.step()
    core.executor.wait(0.1 * seconds)
    core.submit(Request("arriving", [_task("arriving", arriving, 1.0)]))
    core.step()
    return " ".join(event.kind for event in core.log if event.kind in ("preempt", "hold"))


def _resumed() -> str:
    """Return whether a preempted kernel or a new kernel of its class is launched when a place becomes free."""
    core = _core()
    for number in range(2):
        core.submit(Request("first", [_task(f"first{number}", MEMORY, 10.0)]))
    core.step()
    core.submit(Request("compute", [_task("compute", COMPUTE, 1.0)]))  # the arriving kernel replaces one of the two
    core.submit(Request("new", [_task("new", MEMORY, 1.0)]))
    while core.busy and not (found := _launched_again(core.log)):
        core.executor.wait(core.step())
    return found


def _launched_again(events: Iterable[Event]) -> str:
    """Return "resumed" if a preempted kernel was launched before the new kernel, "new" if not, "" if none was."""
    stopped: set[int] = set()
    for event in events:
        if event.kind == "stop":
            stopped.add(event.task)
        elif event.kind == "launch" and event.task in stopped:
            return "resumed"
        elif event.kind == "launch" and event.name == "new":
            return "new"
    return ""


def policies(setting: Setting, document: Document) -> Outcome:
    """Compare the policies on built-in traces: system throughput and normalized turnaround time."""
    throughput, turnaround = _compare(setting, NAMES)
    speed = {name: 1 / value for name, value in turnaround.items()}
    simple = max(("first-come", "left-over"), key=throughput.__getitem__)
    checks = [
        shapes.ordered(
            "throughput: combinations of classes before any order of arrival", throughput, ["source", simple]
        ),
        shapes.ordered("turnaround: the same", speed, ["source", simple]),
        shapes.between("throughput of the source's rule over one kernel at a time", throughput["source"], 1.1, 2.0),
    ]
    return _table(throughput, turnaround, checks)


def predecessors(setting: Setting, document: Document) -> Outcome:
    """Compare the source's rule with the predecessors that it names."""
    throughput, turnaround = _compare(setting, ["source", *BASELINES])
    checks = [
        shapes.ordered(f"throughput of tasks that arrive at any time: source before {name}", throughput, order)
        for name, order in ((name, ["source", name]) for name in BASELINES)
    ]
    return _table(throughput, turnaround, checks)


def _compare(setting: Setting, names: Iterable[str]) -> tuple[dict[str, float], dict[str, float]]:
    """Return mean STP and geometric mean ANTT of policies over seeds."""
    seeds, kernels = (2, 2_000) if setting.quick else (5, 20_000)
    stp: dict[str, list[float]] = {name: [] for name in names}
    antt: dict[str, list[float]] = {name: [] for name in stp}
    for seed in range(seeds):
        simulation = Simulation(Recipe(mix="pure", kernels=kernels, load=1.5, seed=seed))
        trace = simulation.recipe.make()
        for name in stp:
            metrics = simulation.run(name, trace).metrics()
            stp[name].append(metrics.stp)
            antt[name].append(metrics.antt)
    throughput = {name: statistics.mean(values) for name, values in stp.items()}
    return throughput, {name: math.exp(statistics.mean(map(math.log, values))) for name, values in antt.items()}


def _table(throughput: dict[str, float], turnaround: dict[str, float], checks: list[shapes.Check]) -> Outcome:
    text = "; ".join(
        f"{n} {throughput[n]:.2f} / {turnaround[n]:.1f}" for n in sorted(throughput, key=lambda n: -throughput[n])
    )
    return Outcome(f"STP / ANTT: {text} (simulator)", checks, {"stp": throughput, "antt": turnaround})


EXPERIMENTS = [
    Experiment("scheduling/cost", cost, timed=False),
    Experiment("scheduling/decay", decay, timed=False),
    Experiment("scheduling/decisions", decisions, timed=False),
    Experiment("scheduling/policies", policies, timed=False),
    Experiment("scheduling/predecessors", predecessors, timed=False),
]
