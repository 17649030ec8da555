"""``python -m lab sched fit``: constants of the cost formula, and the predictor, from measurements."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import numpy as np

from lab.cli import parser_of, run_command
from warpwell.cli._common import Report, json_option, output_of
from warpwell.errors import ArgumentError


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = parser_of("sched fit", "Fit the cost formula and the predictor to measurements.")
    add_arguments(parser)
    return run_command(run, parser, argv)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    text = "preemptions: .csv (miss_rate, bytes, cycles or seconds; kind, decay), or a log"
    parser.add_argument("measurements", nargs="*", metavar="FILE", help=text)
    parser.add_argument("--clock", type=float, default=1.755e9, metavar="HZ", help="cycles a second (default 1.755e9)")
    parser.add_argument("--out", metavar="FILE.json", help="write the constants, for --model of other commands")
    parser.add_argument("--counts", metavar="FILE.json", help="counted launches")
    parser.add_argument(
        "--device", metavar="NAME", help="device whose history records the launches (default: as measured)"
    )
    parser.add_argument("--history", metavar="FILE.json", help="where it is (default: the user's cache folder)")
    json_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """Fit, and report how well it fits."""
    output = output_of(arguments)
    if not arguments.measurements and arguments.counts is None:
        raise ArgumentError("nothing to fit: give files of preemptions, or --counts, or both")
    if not arguments.clock > 0:
        raise ArgumentError(f"--clock {arguments.clock:g}: give cycles a second", name="clock")
    result: dict[str, Any] = {}
    if arguments.measurements:
        result["costs"] = _costs(arguments)
    if arguments.counts is not None:
        with output.progress() as report:
            result["predictor"] = _predictor(arguments, report)
    if arguments.json:
        output.result("", result)
        return 0
    for title, values in result.items():
        output.result({"costs": "Cost and decay", "predictor": "Predictor"}[title], values)
    return 0


def _costs(arguments: argparse.Namespace) -> dict[str, Any]:
    from lab.sched.fitting import fit, read_csv, read_log

    rows = []
    for path in arguments.measurements:
        rows += (read_csv if path.endswith(".csv") else read_log)(path, arguments.clock)
    done = fit(rows, origin=", ".join(arguments.measurements))
    if arguments.out:
        done.model.save(arguments.out)
    values = {k: v for k, v in asdict(done.model).items() if k != "origin"}
    statistics = {k: v for k, v in asdict(done).items() if k not in ("model", "notes")}
    notes = list(done.notes)
    unknown = sum(p.cycles is not None and (p.nbytes is None or p.miss_rate is None) for p in rows)
    if unknown:
        notes.append(f"{unknown} preemptions were left out: their bytes or miss rate are not known")
    return {**values, **statistics, "written": arguments.out, "notes": notes if arguments.json else "; ".join(notes)}


def _predictor(arguments: argparse.Namespace, report: Report) -> dict[str, Any]:
    from lab.sched.counts import read_counts
    from warpwell.scheduler.predict.history import History
    from warpwell.scheduler.predict.predictor import Predictor
    from warpwell.scheduler.predict.sample import Sample

    samples, device = read_counts(arguments.counts)
    history = History.load(arguments.device or device, arguments.history)
    for sample in samples:
        history.record(sample)
    history.save()
    kernels = sorted({s.kernel for s in samples})
    off: dict[str, list[float]] = {"instructions": [], "seconds": []}
    for number, kernel in enumerate(kernels):
        report("fit", number, len(kernels))
        rows = [s for s in samples if s.kernel == kernel]
        for left_out in rows:
            predictor = Predictor(r for r in rows if r is not left_out)
            target = Sample(kernel, left_out.size, left_out.warps, left_out.moving)
            got = predictor.predict(target)
            for name, values in off.items():
                true, predicted = getattr(left_out, name), getattr(got, name)
                if got.how == "interpolation" and true and predicted:
                    values.append(abs(predicted / true - 1))
    errors = {
        f"{name}_error_{part}": float(np.quantile(values, q)) if values else None
        for name, values in off.items()
        for part, q in (("median", 0.5), ("p90", 0.9))
    }
    return {
        "device": history.device,
        "launches": len(samples),
        "kernels": len(kernels),
        "history": str(history.path),
        "interpolated": len(off["seconds"]),
        **errors,
    }
