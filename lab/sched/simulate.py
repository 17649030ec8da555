"""``python -m lab sched simulate``: policies on a trace, in the simulator."""

from __future__ import annotations

import argparse
from typing import Any

from lab.cli import parser_of, run_command
from warpwell._check import checked_number
from warpwell.cli._common import Output, json_option, output_of
from warpwell.scheduler.decision import SOURCE

from .experiment import ERROR, Experiment, chosen, file_of
from .fitting import read_model
from .metrics import print_table
from .traces.recipe import CAPACITIES, Recipe


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = parser_of("sched simulate", "Replay a trace under policies, in virtual time.")
    trace_options(parser)
    group = parser.add_argument_group("policies and device")
    group.add_argument("--policy", default="source,lanes", metavar="A,B", help="policies or all (default source,lanes)")
    text = "number of kernels that run together (default 2)"
    group.add_argument("--limit", type=int, default=2, metavar="N", help=text)
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
    parser.add_argument("--log", metavar="FILE", help="write the log; one file for each policy")
    json_option(parser)
    return run_command(run, parser, argv)


def trace_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a workload: the fields of `Recipe`."""
    group = parser.add_argument_group("workload")
    text = "Orion's profiles (archive, folder or file), or a table; default: a built-in mix"
    group.add_argument("--trace", metavar="PATH", help=text)
    text = "Azure's or Alibaba's trace (default: Poisson arrivals)"
    group.add_argument("--arrivals", metavar="PATH", help=text)
    text = "built-in mix: half or pure, by the classes of an application (default half)"
    group.add_argument("--mix", default="half", metavar="NAME", help=text)
    text = "applications of the requests (default: Orion's inferences, *_fwd)"
    group.add_argument("--models", metavar="A,B*", help=text)
    text = "minimum number of kernels (default 100000)"
    group.add_argument("--kernels", type=int, default=100_000, metavar="N", help=text)
    text = "sum of the solo times over the time of arrivals, which is compressed; inf: all at once (default 1.5)"
    group.add_argument("--load", type=float, metavar="L", help=text)
    text = "share of requests with priority 1, if the trace has no priorities (default 0.25)"
    group.add_argument("--urgent", type=float, default=0.25, metavar="SHARE", help=text)
    group.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all random choices (default 0)")


def recipe_of(arguments: argparse.Namespace) -> Recipe:
    """Return the recipe of the options."""
    names = ("trace", "arrivals", "mix", "models", "kernels", "load", "urgent", "seed")
    return Recipe(**{name: getattr(arguments, name) for name in names})


def run(arguments: argparse.Namespace) -> int:
    """Run each policy, and print the metrics."""
    output = output_of(arguments)
    names = chosen(arguments.policy)
    experiment = Experiment(
        recipe_of(arguments),
        matrix=arguments.matrix,
        mode=arguments.mode,
        limit=arguments.limit,
        error=arguments.error,
        device=CAPACITIES[arguments.device] if arguments.device else None,
        model=SOURCE if arguments.model is None else read_model(arguments.model),
        host=1e-6 * checked_number(arguments.host, "--host", maximum=1e6),
    )
    workload = experiment.recipe.make()
    experiment.rates(workload.capacity)  # raise before hours of work
    logs = {n: file_of(arguments.log, "--log", n, len(names) > 1) for n in names} if arguments.log else {}
    found: dict[str, dict[str, Any]] = {}
    with output.progress() as report:
        for name in names:
            report("simulate", len(found), len(names))
            found[name] = experiment.metrics(name, workload, logs.get(name))
    description = {**experiment.describe(workload), "rates": found[names[0]]["rates"]}
    if not output.print_json(finite({**description, "logs": [str(p) for p in logs.values()], "policies": found})):
        print_description(output, description)
        print_table(output, found)
    return 0


def print_description(output: Output, description: dict[str, Any]) -> None:
    """Print the description of a workload as a table."""
    shown = {k: ", ".join(v) if isinstance(v, list) else v for k, v in description.items() if v not in (None, [])}
    shown |= {f"imputed: {name}": text for name, text in description["imputed"].items()}
    output.result(description["workload"], shown, {"workload": None, "imputed": None})


def finite(value: Any) -> Any:
    """Return plain data with "inf" as text, because JSON has no infinity."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return "inf" if value == float("inf") else value
