"""``python -m lab sched run``: kernels that share this machine's device under one policy after another."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from lab.cli import parser_of, run_command
from lab.sched.experiment import chosen, log_path
from lab.sched.metrics import Metrics, measure
from lab.sched.replay import replay
from lab.sched.workloads import WORKLOADS, Application, make
from warpwell.array.opening import require_device
from warpwell.cli._common import Output, Report, json_option, output_of
from warpwell.cli.sched import view_options, write_views
from warpwell.errors import ArgumentError, MissingFileError, SchedulerError
from warpwell.scheduler import Core, Event, Job, Log, Profile, Request, Scheduler, Task
from warpwell.scheduler.executors import executor_of
from warpwell.scheduler.report.timeline import require_pictures
from warpwell.targets import default_device

_MIXES = {"cpu": "triad:2000000,gemm:256,mvt:1000,nbody:3000", "cuda": "triad,gemm,mvt,nbody"}
"""Two memory- and two compute-intensive programs each, of some milliseconds a kernel."""

_ENDS = ("end", "fail", "cancel", "lost")
_WRONG = 1
_TIMES = 3


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = parser_of("sched run", "Run kernels under policies, on the CPU or a GPU, and compare.")
    what = "a Python file with a function submit(scheduler); default: a mix of workloads"
    parser.add_argument("file", nargs="?", metavar="FILE.py", help=what)
    parser.add_argument(
        "--workload",
        metavar="A,B:SIZE",
        help="programs of the mix, each with an optional size (all: every one; default: two that are "
        "memory- and two that are compute-intensive)",
    )
    parser.add_argument("--repeat", type=int, default=4, metavar="N", help="runs of each program (default 4)")
    parser.add_argument(
        "--load",
        type=float,
        metavar="L",
        help="arrivals at random, so that the device is busy for L of the time if programs run alone "
        "(default: all arrive at once)",
    )
    parser.add_argument("--policy", default="lanes", metavar="A,B", help="policies, or all (default lanes)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    parser.add_argument("--limit", type=int, default=2, metavar="N", help="kernels that run at once (default 2)")
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
    for name, least in (("repeat", 1), ("limit", 1), ("seed", 0)):
        if getattr(arguments, name) < least:
            raise ArgumentError(f"--{name} {getattr(arguments, name)}: give {least} or more", name=name)
    if arguments.load is not None and not 0 < arguments.load < float("inf"):
        raise ArgumentError(f"--load {arguments.load}: give more than 0", name="load")
    policies = chosen(arguments.policy)
    for path in (arguments.log, arguments.trace_out, arguments.picture):
        if path is not None:
            log_path(path, policies[0], len(policies) > 1)  # before hours of work: is there such a folder?
    if arguments.picture is not None:
        require_pictures()
    runner = _mix if arguments.file is None else _file
    with output.progress() as report:
        values, found, wrong = runner(arguments, device, policies, report)
    if arguments.json:
        output.result("", {**values, "policies": {name: metrics.as_dict() for name, metrics in found.items()}})
    else:
        _print(output, values, found)
    return _WRONG if wrong else 0


class _Counting(Log):
    """A log that reports how many tasks have ended."""

    def __init__(self, about: dict[str, Any], report: Callable[[int], None]) -> None:
        super().__init__()
        self.about = about
        self._report, self._ended = report, 0

    def add(self, event: Event) -> None:
        """See `Log`."""
        super().add(event)
        if event.kind in _ENDS:
            self._ended += 1
            self._report(self._ended)


def _write(arguments: argparse.Namespace, log: Log, policy: str, several: bool) -> None:
    def place(path: str | None) -> str | None:
        return None if path is None else os.fspath(log_path(path, policy, several))

    target = place(arguments.log)
    if target is not None:
        with open(target, "w", encoding="utf-8") as stream:
            log.write(stream)
    write_views(log, place(arguments.trace_out), place(arguments.picture))


# a mix of workloads


def _mix(
    arguments: argparse.Namespace, device: str, policies: Sequence[str], report: Report
) -> tuple[dict[str, Any], dict[str, Metrics], bool]:
    programs = _programs(arguments.workload or _MIXES[device], device)
    alone = _alone(programs, device, arguments.seed, report)
    _warm_up(programs, device, arguments.seed, report)
    order = [name for name in programs for _ in range(arguments.repeat)]
    random = np.random.default_rng(arguments.seed)
    random.shuffle(order)
    gaps = np.zeros(len(order))
    if arguments.load is not None:
        gaps = random.exponential(np.mean([sum(alone[name]) for name in order]) / arguments.load, len(order))
    arrivals = np.cumsum(gaps)
    found: dict[str, Metrics] = {}
    wrong: list[str] = []
    for policy in policies:
        applications = [make(name, programs[name], device, seed=arguments.seed + k) for k, name in enumerate(order)]
        total = sum(len(a) for a in applications)
        about = {
            "policy": policy,
            "device": device,
            "seed": arguments.seed,
            "limit": arguments.limit,
            "load": arguments.load,
        }
        log = _Counting(
            {k: v for k, v in about.items() if v is not None},
            lambda done, policy=policy, total=total: report(f"run {policy}", done, total),  # type: ignore[misc]
        )
        seconds: dict[Task, float] = {}
        with contextlib.closing(executor_of(device)()) as executor:
            core = Core(executor, policy, limit=arguments.limit, log=log)
            began = executor.now()
            requests = [
                _request(a, alone[a.workload.name], began + float(t), seconds)
                for a, t in zip(applications, arrivals, strict=True)
            ]
            result = replay(requests, core, alone=seconds.get)
        failed = next((j for j in result.jobs if j.error is not None), None)
        if failed is not None or result.rejected:
            error = failed.error if failed is not None else result.rejected[0][1]
            raise SchedulerError(f"a task failed under policy {policy}: {error}") from error
        for application in applications:
            try:
                application.check()
            except AssertionError as error:
                wrong.append(f"under {policy}: {error}")
        found[policy] = result.metrics()
        _write(arguments, log, policy, len(policies) > 1)
    values = {
        "device": device,
        "seed": arguments.seed,
        "limit": arguments.limit,
        "load": arguments.load,
        "requests": len(order),
        "kernels": sum(len(alone[name]) for name in order),
        "alone_seconds": {name: sum(alone[name]) for name in programs},
        "sum_alone_seconds": sum(sum(alone[name]) for name in order),
        "results": "equal to NumPy's" if not wrong else wrong,
    }
    return values, found, bool(wrong)


def _programs(listed: str, device: str) -> dict[str, int]:
    """Return the workloads of a mix and their sizes."""
    programs: dict[str, int] = {}
    for entry in list(WORKLOADS) if listed == "all" else [e for e in listed.split(",") if e]:
        name, _, size = entry.partition(":")
        if name not in WORKLOADS:
            known = ", ".join(WORKLOADS)
            raise ArgumentError(f"there is no workload {name!r}: choose some of {known}", name="workload")
        if size and not (size.isdecimal() and int(size) > 0):
            raise ArgumentError(f"--workload {entry}: its size must be a number of 1 or more", name="workload")
        workload = WORKLOADS[name]
        programs[name] = int(size) if size else workload.small if device == "cpu" else workload.large
    if not programs:
        raise ArgumentError("--workload names none: give one at least", name="workload")
    return programs


def _alone(programs: dict[str, int], device: str, seed: int, report: Report) -> dict[str, list[float]]:
    """Return the seconds that each kernel of each program takes alone, untransformed (median of three)."""
    found: dict[str, list[float]] = {}
    for k, (name, size) in enumerate(programs.items()):
        report("measure alone", k, len(programs))
        runs: list[list[float]] = []
        for _ in range(1 + _TIMES):
            runs.append([])
            for step in make(name, size, device, seed=seed):
                began = time.perf_counter()
                step.launch(*step.arguments, device=device)
                runs[-1].append(time.perf_counter() - began)
        found[name] = [float(seconds) for seconds in np.median(runs[1:], axis=0)]
    return found


def _warm_up(programs: dict[str, int], device: str, seed: int, report: Report) -> None:
    """Have every kernel compiled in the forms that schedulers use, so that no policy is charged for it."""
    for k, (name, size) in enumerate(programs.items()):
        report("compile for sharing", k, len(programs))
        with contextlib.closing(executor_of(device)()) as executor:
            replay([make(name, size, device, seed=seed).request()], Core(executor, "source"))


def _request(application: Application, seconds: Sequence[float], arrival: float, known: dict[Task, float]) -> Request:
    times = iter(seconds)
    request = application.request(
        lambda step: Profile(kind=application.workload.kinds[step.name], seconds=next(times), source="measured"),
        arrival=arrival,
    )
    for task, alone in zip(request.tasks, seconds, strict=True):
        known[task] = alone
    return request


# a file


def _file(
    arguments: argparse.Namespace, device: str, policies: Sequence[str], report: Report
) -> tuple[dict[str, Any], dict[str, Metrics], bool]:
    submit = _submit_of(arguments.file)
    found: dict[str, Metrics] = {}
    for policy in policies:
        about = {"policy": policy, "device": device, "limit": arguments.limit, "file": arguments.file}
        log = _Counting(about, lambda done, policy=policy: report(f"run {policy}", done, 0))  # type: ignore[misc]
        with Scheduler(device, policy, limit=arguments.limit, log=log) as scheduler:
            handles = _handles(submit(scheduler), arguments.file)
            for handle in handles:
                handle.result()
        found[policy] = measure(_jobs(handles), log)
        _write(arguments, log, policy, len(policies) > 1)
    return {"device": device, "limit": arguments.limit, "file": arguments.file}, found, False


def _handles(returned: Any, path: str) -> list[Future[Any]]:
    """Return the handles that a `submit` has returned: several, one, or none."""
    if returned is None:
        return []
    found = list(returned) if isinstance(returned, Iterable) else [returned]
    for handle in found:
        if not isinstance(handle, Future):
            raise ArgumentError(
                f"submit of {path} returned {handle!r:.80} where a handle should be: let it return a handle of "
                "scheduler.submit, or a list of them",
                name="submit",
            )
    return found


def _jobs(handles: Iterable[Any]) -> list[Job]:
    return [handle.job for handle in handles if getattr(handle, "job", None) is not None]


def _submit_of(path: str) -> Callable[[Scheduler], Any]:
    """Import a file and return its `submit`."""
    if not Path(path).is_file():
        raise MissingFileError(f"{path} does not exist: name a file with a function submit(scheduler)", path=path)
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ArgumentError(f"{path} is not a Python file: name one that ends in .py", name="file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))  # as for a script
    spec.loader.exec_module(module)
    submit = getattr(module, "submit", None)
    if not callable(submit):
        raise ArgumentError(
            f"{path} has no function submit(scheduler): define one that submits launches and returns their handles",
            name="file",
        )
    found: Callable[[Scheduler], Any] = submit
    return found


def _print(output: Output, values: dict[str, Any], found: dict[str, Metrics]) -> None:
    shown = {k: v for k, v in values.items() if k not in ("alone_seconds",) and v is not None}
    for name, seconds in values.get("alone_seconds", {}).items():
        shown[f"{name} alone"] = f"{seconds * 1e3:.3f} ms"
    output.result("Run", shown)
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
        figures = (_figure(v) for v in (m.stp or float("nan"), m.antt, m.fairness, m.makespan))
        rows.append((name, *figures, *p99, str(m.preemptions), _figure(m.preemption_p50 * 1e6, 0)))
    output.table("Policies", heads, rows)


def _figure(value: float, digits: int = 3) -> str:
    return "-" if value != value else f"{value:.{digits}f}"
