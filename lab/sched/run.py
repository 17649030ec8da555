"""``python -m lab sched run``: programs that share this machine's device under one policy after another."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from lab.cli import parser_of, run_command
from warpwell.array.opening import require_device
from warpwell.cli._common import Output, Report, json_option, output_of
from warpwell.cli.sched import view_options, write_views
from warpwell.errors import ArgumentError, SchedulerError
from warpwell.scheduler import Core, Log, Profile, Request, Task
from warpwell.scheduler.executors import executor_of
from warpwell.scheduler.report.timeline import require_pictures
from warpwell.targets import default_device

from .experiment import chosen, log_path
from .metrics import Metrics
from .replay import ReplayResult, replay
from .workloads import WORKLOADS, Application, make

MIXES = {"cpu": "triad:2000000,gemm:256,mvt:1000,nbody:3000", "cuda": "triad,gemm,mvt,nbody"}
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
    parser.add_argument(
        "--limit", type=int, default=2, metavar="N", help="number of kernels that run together (default 2)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of inputs, order and arrivals")
    parser.add_argument("--log", metavar="FILE", help="write the log, for sched explain")
    view_options(parser)
    parser.epilog = "With several policies the names of files that are written get the policy's name."
    json_option(parser)
    return run_command(run, parser, argv)


def run(arguments: argparse.Namespace) -> int:
    """Run under each policy and report. The exit code is 1 if a result is not what NumPy computes."""
    output = output_of(arguments)
    device = arguments.device or default_device()
    if device not in ("cpu", "cuda"):
        raise ArgumentError(f"device {device!r} has no scheduler: use --device cpu or cuda", name="device")
    require_device(device)
    for name, minimum in (("repeat", 1), ("limit", 1), ("seed", 0)):
        if getattr(arguments, name) < minimum:
            raise ArgumentError(f"--{name} {getattr(arguments, name)}: give {minimum} or more", name=name)
    if arguments.load is not None and not 0 < arguments.load < float("inf"):
        raise ArgumentError(f"--load {arguments.load}: give more than 0", name="load")
    policies = chosen(arguments.policy)
    programs = programs_of(arguments.workload or MIXES[device], device)
    for path in (arguments.log, arguments.trace_out, arguments.picture):
        if path is not None:
            log_path(path, policies[0], len(policies) > 1)  # before hours of work: is there such a folder?
    if arguments.picture is not None:
        require_pictures()
    with output.progress() as report:
        solo = _measure_solo(programs, device, arguments.seed, report)
        order, arrivals = _draw_arrivals(arguments, solo)
        found: dict[str, Metrics] = {}
        wrong: list[str] = []
        for number, policy in enumerate(policies):
            report("run", number, len(policies))
            runs = [make(name, programs[name], device, seed=arguments.seed + k) for k, name in enumerate(order)]
            result = _share(policy, runs, arrivals, solo, device, arguments)
            for application in runs:
                try:
                    application.check()
                except AssertionError as error:
                    wrong.append(f"under {policy}: {error}")
            found[policy] = result.metrics()
            _write(arguments, result.log, policy, len(policies) > 1)
    totals = {name: sum(solo[name]) for name in programs}
    values = {
        **_options(arguments, device),
        "requests": len(order),
        "kernels": sum(len(solo[name]) for name in order),
        "sum_alone_seconds": sum(totals[name] for name in order),
        "results": wrong or "equal to NumPy's",
    }
    if arguments.json:
        by_policy = {name: metrics.as_dict() for name, metrics in found.items()}
        output.result("", {**values, "alone_seconds": totals, "policies": by_policy})
    else:
        _print(output, values | {f"{name} solo, ms": f"{1e3 * seconds:.3f}" for name, seconds in totals.items()}, found)
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
            runs.append([])
            for step in make(name, size, device, seed=seed):
                began = time.perf_counter()
                step.launch(*step.arguments, device=device)
                runs[-1].append(time.perf_counter() - began)
        found[name] = [float(seconds) for seconds in np.median(runs[1:], axis=0)]
        with contextlib.closing(executor_of(device)()) as executor:
            replay([make(name, size, device, seed=seed).request()], Core(executor, "source"))
    return found


def _draw_arrivals(arguments: argparse.Namespace, solo: dict[str, list[float]]) -> tuple[list[str], Sequence[float]]:
    """Return the names of programs in order of arrival, and their arrivals in seconds."""
    order = [name for name in solo for _ in range(arguments.repeat)]
    random = np.random.default_rng(arguments.seed)
    random.shuffle(order)
    gaps = np.zeros(len(order))
    if arguments.load is not None:
        gaps = random.exponential(np.mean([sum(solo[name]) for name in order]) / arguments.load, len(order))
    return order, np.cumsum(gaps).tolist()


def _options(arguments: argparse.Namespace, device: str) -> dict[str, Any]:
    return {"device": device, "seed": arguments.seed, "limit": arguments.limit, "load": arguments.load}


def _share(
    policy: str,
    runs: Sequence[Application],
    arrivals: Sequence[float],
    solo: dict[str, list[float]],
    device: str,
    arguments: argparse.Namespace,
) -> ReplayResult:
    """Run programs under a policy.

    Raises
    ------
    SchedulerError
        A task failed, or a request was rejected.
    """
    log = Log()
    log.about = {"policy": policy, **{k: v for k, v in _options(arguments, device).items() if v is not None}}
    solo_seconds: dict[Task, float] = {}
    with contextlib.closing(executor_of(device)()) as executor:
        core = Core(executor, policy, limit=arguments.limit, log=log)
        began = executor.now()
        requests = [
            _request(application, solo[application.workload.name], began + arrival, solo_seconds)
            for application, arrival in zip(runs, arrivals, strict=True)
        ]
        result = replay(requests, core, alone=solo_seconds.get)
    failures = [job.error for job in result.jobs if job.error is not None] + [error for _, error in result.rejected]
    if failures:
        raise SchedulerError(f"a task failed under policy {policy}: {failures[0]}") from failures[0]
    return result


def _request(
    application: Application, seconds: Sequence[float], arrival: float, solo_seconds: dict[Task, float]
) -> Request:
    times, kinds = iter(seconds), application.workload.kinds
    request = application.request(
        lambda step: Profile(kind=kinds[step.name], seconds=next(times), source="measured"), arrival=arrival
    )
    solo_seconds.update(zip(request.tasks, seconds, strict=True))
    return request


def _write(arguments: argparse.Namespace, log: Log, policy: str, several: bool) -> None:
    """Write the log, the Chrome trace and the plot, as far as they were requested."""
    paths = (arguments.log, arguments.trace_out, arguments.picture)
    target, *views = (path and os.fspath(log_path(path, policy, several)) for path in paths)
    if target is not None:
        with open(target, "w", encoding="utf-8") as stream:
            log.write(stream)
    write_views(log, *views)


def _print(output: Output, values: dict[str, Any], found: dict[str, Metrics]) -> None:
    output.result("Run", {k: v for k, v in values.items() if v is not None})
    heads = (
        "policy",
        "STP",
        "ANTT",
        "fairness",
        "makespan s",
        "p99 memory ms",
        "p99 compute ms",
        "preempted",
        "in us (p50)",
    )
    rows = []
    for name, m in found.items():
        p99 = [f"{m.turnaround[k].p99 * 1e3:.2f}" if k in m.turnaround else "-" for k in ("memory", "compute")]
        numbers = (_number(v) for v in (m.stp, m.antt, m.fairness, m.makespan))
        rows.append((name, *numbers, *p99, str(m.preemptions), _number(m.preemption_p50 * 1e6, 0)))
    output.table("Policies", heads, rows)


def _number(value: float, digits: int = 3) -> str:
    return "-" if value != value else f"{value:.{digits}f}"
