"""``python -m lab sched simulate``: policies on a trace, in the simulator."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.cli import parser_of, run_command
from warpwell._check import checked_number
from warpwell._os import uninterrupted
from warpwell.cli._common import Output, json_option, output_of
from warpwell.errors import ArgumentError, SchedulerError

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, ForkServerProcess

    from lab.sched.experiment import Experiment
    from lab.sched.traces import Trace

_SLOW = ("lanes", "source")
"""Policies that think longest, the longest first."""
_QUICK = ("left-over", "first-come")
"""Those that hardly think, the quickest last."""

_PDEATHSIG = 1
"""PR_SET_PDEATHSIG of prctl."""


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = parser_of("sched simulate", "Replay a trace under policies, in virtual time.")
    trace_options(parser)
    group = parser.add_argument_group("what runs it")
    group.add_argument("--policy", default="source,lanes", metavar="A,B", help="or all (default source,lanes)")
    group.add_argument("--limit", type=int, default=2, metavar="N", help="kernels that run at once (default 2)")
    what = "how fast kernels run together (default: class, or matrix where --matrix is given)"
    group.add_argument("--rates", choices=("class", "maxmin", "matrix"), help=what)
    group.add_argument("--matrix", metavar="FILE.json", help="pairs measured by `python -m lab bench sched-pairs`")
    what = "switch: contexts are saved, as in the source; drain: blocks end, as on stock GPUs (default switch)"
    group.add_argument("--mode", choices=("switch", "drain"), default="switch", help=what)
    group.add_argument("--model", metavar="FILE.json", help="constants of the cost formula, from sched fit")
    what = "median relative error of predicted times (default 0.05)"
    group.add_argument("--error", type=float, metavar="E", help=what)
    what = "microseconds of the host for a decision with its launch (default 0; beside an H200 it took 145)"
    group.add_argument("--host", type=float, default=0.0, metavar="US", help=what)
    group.add_argument("--device", choices=("h100", "v100"), help="default: that of the trace")
    group.add_argument("--processes", type=int, metavar="N", help="default: a processor each, at most 2")
    parser.add_argument("--log", metavar="FILE", help="write the log; of several policies, one file each")
    json_option(parser)
    return run_command(run, parser, argv)


def trace_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a workload."""
    group = parser.add_argument_group("what runs")
    what = "Orion's profiles (archive, folder or file), or a table; default: a built-in mix"
    group.add_argument("--trace", metavar="PATH", help=what)
    what = "Azure's or Alibaba's trace, or poisson, or bursts (default poisson)"
    group.add_argument("--arrivals", metavar="PATH", help=what)
    what = "built-in mix: half, pure, quarter, memory, compute, heavy, long (default half)"
    group.add_argument("--mix", default="half", metavar="NAME", help=what)
    what = "applications that arrivals are drawn of (default: *_fwd of Orion's: inferences)"
    group.add_argument("--models", metavar="A,B*", help=what)
    group.add_argument("--kernels", type=int, default=100_000, metavar="N", help="at least so many (default 100000)")
    what = "time that all takes alone, over the time in which it arrives; time is compressed to it; inf: all at once "
    group.add_argument("--load", type=float, metavar="L", help=what + "(default 1.5; of a table: as it says)")
    what = "of requests with priority 1, where the trace has none (default 0.25)"
    group.add_argument("--urgent", type=float, default=0.25, metavar="SHARE", help=what)
    group.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all random choices (default 0)")


def recipe_of(arguments: argparse.Namespace) -> Any:
    """Return the `Recipe` of the options."""
    from lab.sched.traces import Recipe

    return Recipe(
        arguments.trace,
        arguments.arrivals,
        arguments.mix,
        arguments.models,
        arguments.kernels,
        arguments.load,
        arguments.urgent,
        arguments.seed,
    )


def run(arguments: argparse.Namespace) -> int:
    """Run each policy, and show its figures."""
    from lab.sched.experiment import ERROR, Experiment, chosen, log_path
    from lab.sched.traces import CAPACITIES
    from warpwell.scheduler import SourceModel
    from warpwell.scheduler.decision import SOURCE

    output = output_of(arguments)
    began = time.perf_counter()
    names = chosen(arguments.policy)
    experiment = Experiment(
        recipe_of(arguments),
        rates=arguments.rates or ("class" if arguments.matrix is None else "matrix"),
        matrix=arguments.matrix,
        mode=arguments.mode,
        limit=arguments.limit,
        error=ERROR if arguments.error is None else arguments.error,
        device=CAPACITIES[arguments.device] if arguments.device else None,
        model=SOURCE if arguments.model is None else SourceModel.load(arguments.model),
        host=1e-6 * checked_number(arguments.host, "--host", maximum=1e6),
    )
    experiment.check()
    processes = arguments.processes
    if processes is None:
        processes = min(2, os.cpu_count() or 1)
    if processes < 1:
        raise ArgumentError(f"--processes {processes}: take at least one", name="processes")
    if processes > 1 and len(names) > 1:
        _forks()
    workload = experiment.recipe.make()
    logs = {n: log_path(arguments.log, n, len(names) > 1) for n in names} if arguments.log else {}
    with output.progress() as report:
        found = _all(experiment, workload, names, logs, processes, lambda done: report("simulate", done, len(names)))
    about = {**experiment.about(workload), "rates": next(iter(found.values()))["rates"]}
    seconds = time.perf_counter() - began
    values = {
        **about,
        "seconds": seconds,
        "logs": [str(p) for p in logs.values()],
        "policies": found,
    }
    if arguments.json:
        output.result("", _finite(values))
    else:
        _print(output, about, found, seconds)
    return 0


def _all(
    experiment: Experiment,
    workload: Trace,
    names: Sequence[str],
    logs: dict[str, Path],
    processes: int,
    report: Callable[[int], object],
) -> dict[str, dict[str, Any]]:
    """Run the policies, in several processes where that helps; return metrics in the order of the names."""
    from lab.sched.experiment import run_to_dict

    found: dict[str, dict[str, Any]] = {}
    report(0)
    if processes == 1 or len(names) == 1:
        for name in names:
            found[name] = run_to_dict(experiment, name, workload, logs.get(name))
            report(len(found))
        return found
    waiting = sorted(names, key=_rank)
    running: dict[Connection, tuple[ForkServerProcess, str]] = {}
    context = _forks()
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                name = waiting.pop(0)
                with _uninterrupted():  # half of a start is a traceback of the one that is started
                    ours, theirs = context.Pipe()
                    process = context.Process(target=_run_one, args=(theirs,), daemon=True)
                    process.start()
                    running[ours] = process, name
                    theirs.close()
                with contextlib.suppress(BrokenPipeError):  # it has died, as will be seen below
                    ours.send((experiment, name, workload, logs.get(name)))
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                process, name = running.pop(ready)
                found[name] = _result(ready, process, name)
                report(len(found))
    finally:
        for process, _ in running.values():
            process.kill()
        for process, _ in running.values():
            process.join(0.2)
    return {name: found[name] for name in names}


def _run_one(parent: Connection) -> None:
    """Run a policy and send its metrics, or its error (a process of its own, which ends with the command)."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    from lab.sched.experiment import run_to_dict

    try:
        experiment, name, workload, log = parent.recv()
        found: Any = run_to_dict(experiment, name, workload, log, last=True)
    except EOFError:
        os._exit(0)  # the command has ended
    except Exception as error:
        found = error
    with contextlib.suppress(BrokenPipeError):
        parent.send(found)
    os._exit(0)  # faster than freeing the objects of the run


def _result(ready: Connection, process: ForkServerProcess, name: str) -> dict[str, Any]:
    try:
        with ready:
            found = ready.recv()
    except (EOFError, ConnectionResetError):
        process.join(1.0)
        raise SchedulerError(
            f"the process that simulated {name} ended without a result (exit code {process.exitcode}): is memory short?"
        ) from None
    process.join(1.0)
    if isinstance(found, Exception):
        raise found
    return dict(found)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Keep Ctrl-C until the end of the block, and from the processes that are started in it for good."""
    with uninterrupted():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _rank(name: str) -> int:
    """Return the place of a policy in a queue: the longest go first, so that all processes are done at one time."""
    if name in _QUICK:
        return len(_SLOW) + 1 + _QUICK.index(name)
    return next((i for i, slow in enumerate(_SLOW) if name.startswith(slow)), len(_SLOW))


def _forks() -> ForkServerContext:
    """Return what makes the processes of runs, and let it begin to import, which takes as long as to make a workload.

    They are forked from one that has no threads and has imported all that a run needs; each ends after one run, which
    is faster than to free what that made.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lab.sched.experiment"])
    resource_tracker.ensure_running()  # which would let signals through while the other is started
    # the server that starts here, and its forks, never get Ctrl-C of a terminal: it is for the command
    with _uninterrupted():
        forkserver.ensure_running()
    return context


def _print(output: Output, about: dict[str, Any], found: dict[str, dict[str, Any]], seconds: float) -> None:
    shown = {
        "requests": about["requests"],
        "kernels": about["kernels"],
        "load": about.get("load"),
        "time compressed": about.get("compressed"),
        "arrivals": about.get("arrivals"),
        "applications": ", ".join(about.get("applications", ())),
        "rates": about["rates"],
        "preemption": about["mode"],
        "limit": about["limit"],
        "prediction error": about["prediction_error"],
        "seed": about["seed"],
        "host, us": 1e6 * about["host"] or None,
        "left out": ", ".join([*about.get("placeholders", ()), *about.get("not_drawn", ())]) or None,
    }
    shown |= {f"imputed: {name}": text for name, text in about["imputed"].items()}
    output.result(str(about["workload"]), {k: v for k, v in shown.items() if v is not None})
    classes = sorted({name for values in found.values() for name in values["turnaround"]})
    levels = sorted({level for values in found.values() for level in values["requests_by_priority"]}, key=int)
    heads = ["policy", "STP", "ANTT", "fairness", "Jain"]
    heads += [f"p99 {name}\nkernel, ms" for name in classes] + [f"p99 priority {n}\nrequest, ms" for n in levels]
    rows = []
    for name, values in found.items():
        cells = [_number(values[key], 3) for key in ("stp", "antt", "fairness", "jain")]
        cells += [_number(values["turnaround"].get(c, {}).get("p99"), 3, 1e3) for c in classes]
        cells += [_number(values["requests_by_priority"].get(n, {}).get("p99"), 1, 1e3) for n in levels]
        rows.append((name, *cells, f"{values['preemptions']:,}", _number(values["decision_mean"], 1, 1e6)))
    output.table(f"{len(found)} policies in {seconds:.1f} s", [*heads, "preempted", "decision\nus"], rows)


def _number(value: float | None, digits: int, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:,.{digits}f}"


def _finite(value: Any) -> Any:
    """JSON has no infinity: a load of inf is written as the text."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return "inf" if value == float("inf") else value
