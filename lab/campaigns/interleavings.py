"""Seeded interleavings of queues, cache and stores: ``python -m lab campaign interleavings``.

Each seed is one scenario and one interleaving on weak memory, and the same seed gives the same run. With
``--faults`` the planted faults are run instead, each until a seed finds it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .models.cache_model import CacheModel, Focus
from .models.drive_model import DriveModel
from .models.faults_planted import FAULTS, RARE, Fault, planted
from .models.frame_model import FrameModel
from .models.gather_model import GatherModel, UnitsModel
from .models.key_value_model import KeyValueModel
from .models.known_model import KnownModel
from .models.kv_device_model import StoreModel
from .models.loss_models import LiesModel, LossModel
from .models.pin_models import PinModel, ResidentModel
from .models.queue_model import QueueModel
from .models.recover_model import RecoverModel
from .models.relay_model import RelayModel
from .models.revive_model import ReviveModel
from .models.ring_model import RingModel
from .models.service_model import ServiceModel
from .models.span_model import InPlaceModel, SpanModel
from .models.workers_model import WorkersModel

SCENARIOS = (
    "queue", "lies", "loss", "ring", "cache", "frame", "spans", "in-place", "gather", "units", "resident", "pins",
    "known", "key-value", "store", "service", "drive", "relay", "recover", "revive",
    "workers",
)  # fmt: skip
FAULT_RUNS = 1000
_CACHE: dict[str, Any] = {
    "cache": CacheModel,
    "frame": FrameModel,
    "spans": SpanModel,
    "in-place": InPlaceModel,
    "resident": ResidentModel,
    "pins": PinModel,
    "known": KnownModel,
    "gather": GatherModel,
    "units": UnitsModel,
    "recover": RecoverModel,
}
_MODELS: dict[str, Any] = {
    "queue": QueueModel,
    "lies": LiesModel,
    "loss": LossModel,
    "ring": RingModel,
    "key-value": KeyValueModel,
    "store": StoreModel,
    "service": ServiceModel,
    "drive": DriveModel,
    "relay": RelayModel,
    "revive": ReviveModel,
    "workers": WorkersModel,
}
_CHUNK = 50


@dataclass(frozen=True)
class Outcome:
    """One interleaving: its scenario, seed and number of steps, and the violation, or None."""

    scenario: str
    seed: int
    steps: int
    violation: str | None


@dataclass(frozen=True)
class Found:
    """A planted fault and the first seed that found it, or None."""

    fault: str
    scenario: str
    seed: int | None
    runs: int
    seconds: float
    violation: str | None


def interleave(scenario: str, seed: int, *, trace: int = 0, focus: Focus | None = None) -> Outcome:
    """Run one interleaving.

    Parameters
    ----------
    scenario : str
        One of `SCENARIOS`.
    seed : int
    trace : int
        Number of last accesses to add to the text of a violation.
    focus : Focus, optional
        Restriction of a scenario of the cache.
    """
    cached = _CACHE.get(scenario)
    model = cached(seed, trace, focus) if cached else _MODELS[scenario](seed, trace)
    try:
        return Outcome(scenario, seed, model.check(), None)
    except Exception as error:
        # any exception: device code with a fault or a bug can raise all types
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        return Outcome(scenario, seed, model.run.steps, f"{type(error).__name__}: {error}{notes}")


def explore(scenario: str, seeds: Sequence[int], processes: int = 1) -> Iterator[Outcome]:
    """Run many interleavings, in several processes, and yield each outcome (in any order)."""
    chunks = [(scenario, seeds[k : k + _CHUNK]) for k in range(0, len(seeds), _CHUNK)]
    if processes == 1:
        for chunk in chunks:
            yield from _explore_chunk(chunk)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for outcomes in pool.imap_unordered(_explore_chunk, chunks):
            yield from outcomes


def _explore_chunk(chunk: tuple[str, Sequence[int]]) -> list[Outcome]:
    scenario, seeds = chunk
    return [interleave(scenario, seed) for seed in seeds]


def find(fault: Fault, first_seed: int = 0, runs: int = FAULT_RUNS) -> Found:
    """Plant a fault and run its scenario until a seed finds it, with at most `runs` seeds."""
    start = time.monotonic()
    with planted(fault):
        for seed in range(first_seed, first_seed + runs):
            outcome = interleave(fault.scenario, seed, focus=fault.focus)
            if outcome.violation is not None:
                seconds = time.monotonic() - start
                text = outcome.violation.splitlines()[0]
                return Found(fault.name, fault.scenario, seed, seed - first_seed + 1, seconds, text)
    return Found(fault.name, fault.scenario, None, runs, time.monotonic() - start, None)


def _run_faults(names: Sequence[str], options: argparse.Namespace) -> int:
    found = []
    for fault in (*FAULTS, *RARE):
        if fault.name not in names if names else fault in RARE:
            continue
        result = find(fault, options.seed or fault.seed)
        found.append(result)
        if not options.json:
            match = f"seed {result.seed}, run {result.runs}" if result.seed is not None else "NOT FOUND"
            print(
                f"{result.fault:24s} {result.scenario:9s} {match}  ({result.seconds:.1f} s)  {fault.description}",
                flush=True,
            )
    if options.json:
        print(json.dumps([asdict(f) for f in found], indent=2))
    return int(any(f.seed is None for f in found))


def _run_scenario(scenario: str, options: argparse.Namespace) -> dict[str, Any]:
    start = time.monotonic()
    seeds = range(options.seed, options.seed + options.runs)
    steps, violations = 0, []
    for number, outcome in enumerate(explore(scenario, seeds, options.processes), 1):
        steps += outcome.steps
        if outcome.violation is not None:
            violations.append(outcome)
            if not options.json:
                print(f"{scenario} seed {outcome.seed}: {outcome.violation}\n  replay: {_replay(outcome)}", flush=True)
        if not options.json and number % 1000 == 0:
            print(f"{scenario}: {number} runs, {number / (time.monotonic() - start):.0f} runs/s", flush=True)
    seconds = time.monotonic() - start
    if not options.json:
        print(
            f"{scenario}: seeds {seeds.start} to {seeds.stop - 1}, {options.runs} runs in {seconds:.0f} s "
            f"({options.runs / seconds:.0f} runs/s, {steps / max(1, options.runs):.0f} steps a run), "
            f"{len(violations)} violations",
            flush=True,
        )
    return {
        "scenario": scenario,
        "first_seed": seeds.start,
        "runs": options.runs,
        "seconds": round(seconds, 1),
        "steps": steps,
        "violations": [asdict(v) for v in sorted(violations, key=lambda v: v.seed)],
    }


def _replay(outcome: Outcome) -> str:
    return f"python -m lab campaign interleavings --scenario {outcome.scenario} --replay {outcome.seed}"


def _run_replay(scenarios: Sequence[str], seed: int) -> int:
    outcomes = [interleave(scenario, seed, trace=60) for scenario in scenarios]
    for outcome in outcomes:
        print(f"{outcome.scenario} seed {seed}, {outcome.steps} steps: {outcome.violation or 'no violation'}")
    return int(any(outcome.violation for outcome in outcomes))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return 1 after a violation, or if a planted fault was not found."""
    parser = argparse.ArgumentParser(prog="python -m lab campaign interleavings", description=__doc__)
    integer: Callable[[str], int] = int
    parser.add_argument("--runs", type=integer, default=1000, help="interleavings of each scenario (1000)")
    parser.add_argument("--seed", type=integer, default=0, help="first seed (0; for faults: the recorded seed)")
    parser.add_argument("--scenario", choices=(*SCENARIOS, "all"), default="all")
    parser.add_argument("--processes", type=integer, default=2, help="processes to use (2)")
    parser.add_argument("--faults", nargs="*", metavar="NAME", help="find planted faults instead: these, or all")
    parser.add_argument("--replay", type=integer, metavar="SEED", help="run one seed and show its last accesses")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    scenarios = SCENARIOS if options.scenario == "all" else (options.scenario,)
    unknown = set(options.faults or ()) - {fault.name for fault in (*FAULTS, *RARE)}
    if unknown or options.runs < 1 or options.processes < 1:
        parser.error(f"no planted fault {sorted(unknown)}" if unknown else "--runs and --processes start at 1")
    if options.faults is not None:
        return _run_faults(options.faults, options)
    if options.replay is not None:
        return _run_replay(scenarios, options.replay)
    results = [_run_scenario(scenario, options) for scenario in scenarios]
    if options.json:
        print(json.dumps(results, indent=2))
    return int(any(result["violations"] for result in results))
