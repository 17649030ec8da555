"""``python -m lab sched run``: programs that share this machine's device under one policy after another."""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lab.cli import parser_of, run_command
from warpwell._check import checked_integer
from warpwell.array.opening import require_device
from warpwell.cli._common import Report, json_option, output_of
from warpwell.cli.sched import trace_option
from warpwell.errors import ArgumentError, SchedulerError
from warpwell.scheduler.executors import executor_of
from warpwell.scheduler.extend import Core, Log, Task
from warpwell.scheduler.report.timeline import write_trace
from warpwell.targets import default_device

from .experiment import chosen, file_of, write_log
from .metrics import Metrics, print_table
from .plot import draw, require_matplotlib
from .replay import replay
from .workloads import WORKLOADS, Application, make

MIXES = {"cpu": "triad:2000000,gemm:256,atax:1000,black_scholes:200000", "cuda": "triad,gemm,atax,black_scholes"}
"""Two memory- and two compute-intensive programs each, with kernels of some milliseconds."""
SOLO_RUNS = 3
"""Measured runs of each program, after one that compiles it."""


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = parser_of("sched run", "Run programs under policies, on the CPU or a GPU, and compare.")
    text = "programs, each with an optional size (all: every one; default: two of each class)"
    parser.add_argument("--workload", metavar="A,B:SIZE", help=text)
    parser.add_argument("--repeat", type=int, default=4, metavar="N", help="runs of each program (default 4)")
    text = "random arrivals, so that the device is busy for L of the time with solo runs (default: all at once)"
    parser.add_argument("--load", type=float, metavar="L", help=text)
    parser.add_argument("--policy", default="lanes", metavar="A,B", help="policies, or all (default lanes)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    text = "number of kernels that run together (default 2)"
    parser.add_argument("--limit", type=int, default=2, metavar="N", help=text)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of inputs, order and arrivals")
    parser.add_argument("--log", metavar="FILE", help="write the log, for sched explain")
    trace_option(parser)
    parser.add_argument("--picture", metavar="FILE.png", help="plot the timeline (.png, .svg, .pdf)")
    parser.epilog = "With several policies, the names of written files contain the policy's name."
    json_option(parser)
    return run_command(run, parser, argv)


def run(arguments: argparse.Namespace) -> int:
    """Run under each policy and report. The exit code is 1 if a result differs from NumPy's."""
    output = output_of(arguments)
    device = arguments.device or default_device()
    if device not in MIXES:
        raise ArgumentError(f"device {device!r} has no scheduler: use --device cpu or cuda", name="device")
    require_device(device)
    checked_integer(arguments.repeat, "--repeat")
    checked_integer(arguments.limit, "--limit")
    checked_integer(arguments.seed, "--seed", minimum=0)
    if arguments.load is not None and not 0 < arguments.load < math.inf:
        raise ArgumentError(f"--load must be above 0, got {arguments.load}", name="load")
    policies, programs = chosen(arguments.policy), programs_of(arguments.workload or MIXES[device], device)
    files = {"--log": arguments.log, "--trace-out": arguments.trace_out, "--picture": arguments.picture}
    several = len(policies) > 1
    paths = {p: [file and str(file_of(file, o, p, several)) for o, file in files.items()] for p in policies}
    if arguments.picture is not None:
        require_matplotlib()
    options = {"device": device, "seed": arguments.seed, "limit": arguments.limit, "load": arguments.load}
    found: dict[str, Metrics] = {}
    wrong: list[str] = []
    with output.progress() as report:
        solo = _measure_solo(programs, device, arguments.seed, report)
        order, arrivals = _draw_arrivals(arguments, solo)
        for number, policy in enumerate(policies):
            report("run", number, len(policies))
            runs = [make(name, programs[name], device, seed=arguments.seed + k) for k, name in enumerate(order)]
            log = Log()
            log.about = {"policy": policy, **{k: v for k, v in options.items() if v is not None}}
            found[policy] = _share(runs, arrivals, solo, arguments.limit, log)
            for application in runs:
                try:
                    application.check()
                except AssertionError as error:
                    wrong.append(f"under {policy}: {error}")
            target, trace, picture = paths[policy]
            if target:
                write_log(log, Path(target))
            if trace:
                write_trace(log, trace)
            if picture:
                draw(log, picture)
    totals = {name: sum(solo[name]) for name in programs}
    values: dict[str, Any] = {
        **options,
        "requests": len(order),
        "kernels": sum(len(solo[name]) for name in order),
        "sum_alone_seconds": sum(totals[name] for name in order),
        "results": wrong or "equal to NumPy's",
        "alone_seconds": totals,
        "policies": {name: metrics.as_dict() for name, metrics in found.items()},
    }
    shown: dict[str, Any] = {key: None for key, value in values.items() if value is None or isinstance(value, dict)}
    output.result("Run", values, shown | {f"{n} solo, ms": f"{1e3 * seconds:.3f}" for n, seconds in totals.items()})
    if not arguments.json:
        print_table(output, values["policies"])
    return int(bool(wrong))


def programs_of(text: str, device: str) -> dict[str, int]:
    """Return the names and sizes of programs such as ``gemm,triad:5000``.

    Raises
    ------
    ArgumentError
        The text is empty, or has an unknown name or a wrong size.
    """
    programs: dict[str, int] = {}
    for entry in WORKLOADS if text == "all" else [e for e in text.split(",") if e]:
        name, _, size = entry.partition(":")
        if name not in WORKLOADS:
            raise ArgumentError(f"unknown workload {name!r}; expected some of {', '.join(WORKLOADS)}", name="workload")
        if size and not (size.isdecimal() and int(size) > 0):
            raise ArgumentError(f"--workload {entry}: its size must be a number of 1 or more", name="workload")
        workload = WORKLOADS[name]
        programs[name] = int(size) if size else workload.small if device == "cpu" else workload.large
    if not programs:
        raise ArgumentError("--workload is empty; give at least one workload", name="workload")
    return programs


def _measure_solo(programs: dict[str, int], device: str, seed: int, report: Report) -> dict[str, list[float]]:
    """Return the median solo seconds of each unmodified kernel, and compile all forms that schedulers use."""
    found: dict[str, list[float]] = {}
    for k, (name, size) in enumerate(programs.items()):
        report("measure solo", k, len(programs))
        runs: list[list[float]] = []
        for _ in range(1 + SOLO_RUNS):
            application = make(name, size, device, seed=seed)
            times = [time.perf_counter()]
            for step in application:
                step.launch(*step.arguments, device=device)
                times.append(time.perf_counter())
            runs.append(np.diff(times).tolist())
        found[name] = np.median(runs[1:], axis=0).tolist()
        with contextlib.closing(executor_of(device)()) as executor:
            replay([make(name, size, device, seed=seed).request()], Core(executor, "source"))
    return found


def _draw_arrivals(arguments: argparse.Namespace, solo: dict[str, list[float]]) -> tuple[list[str], Sequence[float]]:
    """Return the names of programs in order of arrival, and their arrivals in seconds."""
    order = [name for name in solo for _ in range(arguments.repeat)]
    random = np.random.default_rng(arguments.seed)
    random.shuffle(order)
    gap = 0.0 if arguments.load is None else np.mean([sum(solo[name]) for name in order]) / arguments.load
    return order, np.cumsum(random.exponential(gap, len(order))).tolist()


def _share(
    runs: Sequence[Application], arrivals: Sequence[float], solo: dict[str, list[float]], limit: int, log: Log
) -> Metrics:
    """Run programs under the policy that the log names.

    Raises
    ------
    SchedulerError
        A task failed, or a request was rejected.
    """
    solo_seconds: dict[Task, float] = {}
    requests = []
    with contextlib.closing(executor_of(runs[0].device)()) as executor:
        core = Core(executor, log.about["policy"], limit=limit, log=log)
        start = executor.now()
        for application, arrival in zip(runs, arrivals, strict=True):
            seconds = solo[application.workload.name]
            requests.append(application.request(seconds, start + arrival))
            solo_seconds.update(zip(requests[-1].tasks, seconds, strict=True))
        result = replay(requests, core, alone=solo_seconds.get)
    failures = [job.error for job in result.jobs if job.error is not None] + [error for _, error in result.rejected]
    if failures:
        raise SchedulerError(f"a task failed under policy {log.about['policy']}: {failures[0]}") from failures[0]
    return result.metrics()
