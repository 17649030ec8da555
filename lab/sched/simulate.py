"""``python -m lab sched simulate``: policies on a trace, in the simulator."""

from __future__ import annotations

import argparse
import time
from typing import Any

from lab.cli import parser_of, run_command
from warpwell._check import checked_number
from warpwell.cli._common import Output, json_option, output_of
from warpwell.scheduler import SourceModel
from warpwell.scheduler.decision import SOURCE

from .experiment import ERROR, Experiment, chosen, log_path
from .traces import CAPACITIES, Recipe


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = parser_of("sched simulate", "Replay a trace under policies, in virtual time.")
    trace_options(parser)
    group = parser.add_argument_group("policies and device")
    group.add_argument("--policy", default="source,lanes", metavar="A,B", help="or all (default source,lanes)")
    group.add_argument(
        "--limit", type=int, default=2, metavar="N", help="number of kernels that run together (default 2)"
    )
    text = "pairs measured by `python -m lab bench sched-pairs` (default: rates by class)"
    group.add_argument("--matrix", metavar="FILE.json", help=text)
    text = "switch: contexts are saved, as in the source; drain: blocks end, as on stock GPUs (default switch)"
    group.add_argument("--mode", choices=("switch", "drain"), default="switch", help=text)
    group.add_argument("--model", metavar="FILE.json", help="constants of the cost formula, from sched fit")
    text = f"median relative error of predicted times (default {ERROR})"
    group.add_argument("--error", type=float, default=ERROR, metavar="E", help=text)
    text = "microseconds of the host for a decision with its launch (default 0; 145 with an H200)"
    group.add_argument("--host", type=float, default=0.0, metavar="US", help=text)
    group.add_argument("--device", choices=tuple(CAPACITIES), help="default: the device of the trace")
    parser.add_argument("--log", metavar="FILE", help="write the log; of several policies, one file each")
    json_option(parser)
    return run_command(run, parser, argv)


def trace_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a workload: the fields of `Recipe`."""
    group = parser.add_argument_group("workload")
    text = "Orion's profiles (archive, folder or file), or a table; default: a built-in mix"
    group.add_argument("--trace", metavar="PATH", help=text)
    text = "Azure's or Alibaba's trace, or poisson, or bursts (default poisson)"
    group.add_argument("--arrivals", metavar="PATH", help=text)
    text = "built-in mix: half, pure, quarter, memory, compute, heavy, long (default half)"
    group.add_argument("--mix", default="half", metavar="NAME", help=text)
    text = "applications that arrivals are drawn of (default: *_fwd of Orion's: inferences)"
    group.add_argument("--models", metavar="A,B*", help=text)
    group.add_argument(
        "--kernels", type=int, default=100_000, metavar="N", help="minimum number of kernels (default 100000)"
    )
    text = "time that all takes alone, over the time in which it arrives; time is compressed to it; inf: all at once "
    group.add_argument("--load", type=float, metavar="L", help=text + "(default 1.5; of a table: as it says)")
    text = "share of requests with priority 1, if the trace has no priorities (default 0.25)"
    group.add_argument("--urgent", type=float, default=0.25, metavar="SHARE", help=text)
    group.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all random choices (default 0)")


def recipe_of(arguments: argparse.Namespace) -> Recipe:
    """Return the recipe of the options."""
    names = ("trace", "arrivals", "mix", "models", "kernels", "load", "urgent", "seed")
    return Recipe(**{name: getattr(arguments, name) for name in names})


def run(arguments: argparse.Namespace) -> int:
    """Run each policy, and show its figures."""
    output = output_of(arguments)
    began = time.perf_counter()
    names = chosen(arguments.policy)
    experiment = Experiment(
        recipe_of(arguments),
        matrix=arguments.matrix,
        mode=arguments.mode,
        limit=arguments.limit,
        error=arguments.error,
        device=CAPACITIES[arguments.device] if arguments.device else None,
        model=SOURCE if arguments.model is None else SourceModel.load(arguments.model),
        host=1e-6 * checked_number(arguments.host, "--host", maximum=1e6),
    )
    workload = experiment.recipe.make()
    experiment.rates(workload.capacity)  # before hours of work: is the file of pairs there?
    logs = {n: log_path(arguments.log, n, len(names) > 1) for n in names} if arguments.log else {}
    found: dict[str, dict[str, Any]] = {}
    with output.progress() as report:
        for name in names:
            report("simulate", len(found), len(names))
            found[name] = experiment.metrics(name, workload, logs.get(name))
    description = {**experiment.describe(workload), "rates": found[names[0]]["rates"]}
    seconds = time.perf_counter() - began
    if arguments.json:
        values = {**description, "seconds": seconds, "logs": [str(p) for p in logs.values()], "policies": found}
        output.result("", finite(values))
    else:
        _print(output, description, found, seconds)
    return 0


def _print(output: Output, description: dict[str, Any], found: dict[str, dict[str, Any]], seconds: float) -> None:
    keys = (
        "requests",
        "kernels",
        "load",
        "compressed",
        "arrivals",
        "rates",
        "mode",
        "limit",
        "prediction_error",
        "seed",
    )
    shown = {key.replace("_", " "): description.get(key) for key in keys}
    shown |= {
        "applications": ", ".join(description.get("applications", ())),
        "host, us": 1e6 * description["host"] or None,
        "left out": ", ".join([*description.get("placeholders", ()), *description.get("not_drawn", ())]) or None,
        **{f"imputed: {name}": text for name, text in description["imputed"].items()},
    }
    output.result(str(description["workload"]), {k: v for k, v in shown.items() if v is not None})
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


def finite(value: Any) -> Any:
    """Return plain data with "inf" as text, because JSON has no infinity."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return "inf" if value == float("inf") else value
