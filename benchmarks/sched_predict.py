"""How far off is the predictor, and what does that cost the scheduler?

Reads the JSON of `benchmarks/sched_counts.py`, by default the one kept in results/. Predicted are sizes between those
measured (each inner size left out in turn) and larger ones (the largest third left out); and each launch after its own
first run, whose class is told by its time. Then a backlogged trace is simulated with predicted profiles, and with the
measured ones.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from measure import save, table

from warpwell.errors import WarpwellError
from warpwell.scheduler import Profile, Request, Task
from warpwell.scheduler.core import Core
from warpwell.scheduler.predict.predictor import Prediction, Predictor
from warpwell.scheduler.predict.sample import Sample
from warpwell.study.counts import read_counts
from warpwell.study.rates import MaxMin
from warpwell.study.replay import replay
from warpwell.study.simulator import Simulator

Pairs = list[tuple[Sample, Prediction]]
IRREGULAR = ("bfs", "spmv")
KEPT = Path(__file__).parent / "results" / "sched_counts_h200.json"


def query(sample: Sample) -> Sample:
    return Sample(sample.kernel, sample.size, sample.warps, sample.moving, sample.app)


def by(samples: Iterable[Sample], field: str) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(getattr(sample, field), []).append(sample)
    return found


def order(sample: Sample) -> float:
    return sum(np.log(max(v, 1e-9)) for v in sample.size.values())


def interpolated(samples: Sequence[Sample]) -> Pairs:
    """Leave out each size but the ends, one at a time."""
    found = []
    for rows in by(samples, "kernel").values():
        rows = sorted(rows, key=order)
        for row in rows[1:-1]:
            predictor = Predictor(r for r in rows if r is not row)
            found.append((row, predictor.predict(query(row))))
    # a search's frontier does not grow as its graph does, so an inner size may lie outside in one feature
    return [(row, p) for row, p in found if p.how == "interpolation"]


def extrapolated(samples: Sequence[Sample]) -> Pairs:
    """Learn the smaller two thirds of the sizes, predict the others."""
    found = []
    for rows in by(samples, "kernel").values():
        rows = sorted(rows, key=order)
        cut = len(rows) * 2 // 3
        predictor = Predictor(rows[:cut])
        found += [(row, predictor.predict(query(row))) for row in rows[cut:]]
    return found


def first_run(samples: Sequence[Sample]) -> Pairs:
    """Tell the class of each launch by how fast it went through its arrays, as the scheduler does."""
    shares = [min(1.0, s.moving / s.seconds) for s in samples]
    return [
        (s, Prediction("first run", seconds=s.seconds, bandwidth=moved, compute=1 - moved))
        for s, moved in zip(samples, shares, strict=True)
    ]


def errors(pairs: Pairs, field: str) -> np.ndarray:
    known = [(getattr(s, field), getattr(p, field)) for s, p in pairs]
    return np.array([abs(predicted / true - 1) for true, predicted in known if true and predicted])


def summary(pairs: Pairs) -> dict[str, Any]:
    found: dict[str, Any] = {"launches": len(pairs)}
    for field in ("instructions", "seconds"):
        off = errors(pairs, field)
        if off.size:
            found |= {f"{field}_median": float(np.median(off)), f"{field}_p90": float(np.quantile(off, 0.9))}
    classed = [(s.kind, p.kind) for s, p in pairs if s.kind is not None and p.kind is not None]
    if classed:
        found["class_accuracy"] = sum(a is b for a, b in classed) / len(classed)
    return found


def profile(source: Sample | Prediction, truth: Sample, scale: float) -> Profile:
    """Return a profile of what is believed, in the room that the launch takes; it is `scale` times as long."""
    if not source.seconds or source.kind is None:
        return Profile(kind=None, miss_rate=1.0, source="cold", resident=room(truth))
    return Profile(
        source.kind,
        source.seconds * scale,
        (source.instructions or 0) * scale,
        miss_rate=source.miss_rate or 0.0,
        bandwidth=source.bandwidth or 0.0,
        compute=source.compute or 0.0,
        resident=room(truth),
        source="predicted",
    )


def room(sample: Sample) -> int:
    return max(1, min(8 * 132, sample.warps // 8))


def simulated(pairs: Pairs, policy: str, kernels: int, seed: int, scale: float, perfect: bool) -> dict[str, float]:
    """Return STP and ANTT of a backlogged trace under predicted profiles; every kernel is a request."""
    truth: dict[Task, Profile] = {}
    requests = []
    chosen = random.Random(seed)
    for number in range(kernels):
        sample, prediction = chosen.choice(pairs)
        seen = profile(sample if perfect else prediction, sample, scale)
        task = Task(sample.kernel, max(1, sample.warps // 8), seen, size=sample.size)
        truth[task] = profile(sample, sample, scale)
        requests.append(Request(f"{sample.app}{number}", [task]))
    rates = MaxMin()
    executor = Simulator(rates, mode="drain", truth=truth, seed=seed)
    metrics = replay(requests, Core(executor, policy, rates=rates)).metrics()
    return {"stp": metrics.stp, "antt": metrics.antt}


def lost(pairs: Pairs, policies: Sequence[str], kernels: int, seeds: int, scale: float) -> list[dict[str, Any]]:
    """Compare what a policy reaches by predictions with what it reaches by the measured figures."""
    # kernels of a few microseconds are all overhead: what a scheduler handles is longer
    long = [(s, p) for s, p in pairs if s.seconds and s.kind is not None and s.seconds >= 5e-6]
    rows = []
    for name in policies:
        found = {
            kind: [simulated(long, name, kernels, seed, scale, kind == "perfect") for seed in range(seeds)]
            for kind in ("predicted", "perfect")
        }
        stp = {kind: float(np.mean([run["stp"] for run in runs])) for kind, runs in found.items()}
        antt = {kind: float(np.mean([run["antt"] for run in runs])) for kind, runs in found.items()}
        rows.append(
            {
                "policy": name,
                "stp": stp["predicted"],
                "stp_perfect": stp["perfect"],
                "stp_lost": 1 - stp["predicted"] / stp["perfect"],
                "antt": antt["predicted"],
                "antt_perfect": antt["perfect"],
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("counts", nargs="?", default=str(KEPT), help="JSON of sched_counts.py parse")
    parser.add_argument("--policies", nargs="*", default=["lanes", "source"])
    parser.add_argument("--kernels", type=int, default=400, help="of the simulated trace (default 400)")
    parser.add_argument("--seeds", type=int, default=3, help="traces (default 3)")
    parser.add_argument("--scale", type=float, default=100, help="times the measured length (default 100)")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    try:
        samples, device = read_counts(arguments.counts)
    except WarpwellError as error:
        print(f"{error}\nCount launches on a GPU first; the text at the top of sched_counts.py says how.")
        return 2
    print(
        f"{len(samples)} launches of {len(by(samples, 'kernel'))} kernels in {len(by(samples, 'app'))} applications, "
        f"measured on {device}",
        flush=True,
    )
    cases = {
        "interpolation": interpolated(samples),
        "extrapolation": extrapolated(samples),
        "first run": first_run(samples),
        "first run of 20 us": first_run([s for s in samples if s.seconds >= 2e-5]),
        "first run of 100 us": first_run([s for s in samples if s.seconds >= 1e-4]),
    }
    everything = {s.app for s in samples}
    parts = {"all": everything, "irregular": everything & set(IRREGULAR), "others": everything - set(IRREGULAR)}
    result: dict[str, Any] = {"device": device, "launches": len(samples), "errors": {}}
    fields = ("launches", "instructions_median", "instructions_p90", "seconds_median", "seconds_p90", "class_accuracy")
    lines = []
    for (case, pairs), (part, apps) in itertools.product(cases.items(), parts.items()):
        found = summary([(s, p) for s, p in pairs if s.app in apps])
        result["errors"].setdefault(case, {})[part] = found
        lines.append((case, part, *(found.get(f, "-") for f in fields)))
    table("Relative errors", ("case", "applications", *fields), lines)
    lines = []
    for app, rows in by((s for s, _ in cases["interpolation"]), "app").items():
        names = {row.kernel for row in rows}
        ours = {case: summary([(s, p) for s, p in pairs if s.kernel in names]) for case, pairs in cases.items()}
        lines.append(
            (
                app,
                *(
                    ours[c].get(f"{f}_median", "-")
                    for f in ("instructions", "seconds")
                    for c in ("interpolation", "extrapolation")
                ),
            )
        )
    table(
        "Median errors by application: instructions, then seconds, each interpolated, extrapolated",
        ("application", "i inter", "i extra", "s inter", "s extra"),
        lines,
    )
    result["lost"] = {}
    for case in ("interpolation", "extrapolation", "first run"):
        found = lost(cases[case], arguments.policies, arguments.kernels, arguments.seeds, arguments.scale)
        result["lost"][case] = found
        title = f"{arguments.kernels} kernels, {arguments.seeds} traces, times x {arguments.scale:g}"
        table(f"Simulated, backlogged, {title}: {case}", tuple(found[0]), [tuple(row.values()) for row in found])
    save(arguments.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
