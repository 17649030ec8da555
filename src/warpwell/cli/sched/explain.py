"""``warpwell sched explain``: a log in plain sentences, as a timeline, and as metrics."""

from __future__ import annotations

import argparse
import sys
import textwrap
from typing import Any

from ...cache import format_size
from ...errors import ArgumentError
from ...scheduler import Event, Log
from ...scheduler.events import KINDS
from ...scheduler.report.explain import QUIET, sentences
from ...scheduler.report.prometheus import LogMetrics, write_text
from ...scheduler.report.timeline import draw, write_trace
from ..arguments import Commands, command, json_option
from ..output import Output

_WIDTH = 100
_SOME = 20
_NAMES = {"compressed": "time compressed by", "cost": "cost model"}
"""Words for keys of a log's `about`."""


def add(verbs: Commands[argparse.ArgumentParser]) -> None:
    """Add ``explain`` to the commands of ``sched``."""
    parser = command(verbs, "explain", "sched.explain", "say why each decision of a log was taken")
    parser.add_argument("log", metavar="LOG", help="what --log of another command wrote (- for stdin)")
    parser.add_argument("--task", type=int, action="append", metavar="N", help="only events of this task, or about it")
    parser.add_argument("--tenant", metavar="NAME", help="only events of this tenant's tasks")
    parser.add_argument("--kind", metavar="A,B", help=f"only these events, of {', '.join(KINDS)}")
    parser.add_argument("--all", action="store_true", help="arrivals, stops and ends too, not decisions alone")
    parser.add_argument("--since", type=float, default=0.0, metavar="SECONDS", help="only events from this time")
    parser.add_argument("--until", type=float, metavar="SECONDS", help="only events up to this time")
    views(parser)
    parser.add_argument("--metrics", metavar="FILE", help="write the log's metrics in Prometheus' text format")
    json_option(parser)


def views(parser: argparse.ArgumentParser) -> None:
    """Add what writes a log in other forms."""
    parser.add_argument("--trace-out", metavar="FILE.json", help="write a timeline for chrome://tracing or Perfetto")
    parser.add_argument("--picture", metavar="FILE.png", help="draw the timeline (.png, .svg or .pdf)")


def write_views(log: Log, trace: str | None, picture: str | None) -> None:
    """Write the forms that the options of `views` name."""
    if trace is not None:
        write_trace(log, trace)
    if picture is not None:
        draw(log, picture)


def run(arguments: argparse.Namespace) -> int:
    """Explain a log."""
    output = Output(arguments.json)
    log = Log.read(sys.stdin, "stdin") if arguments.log == "-" else Log.load(arguments.log)
    kinds = None if arguments.kind is None else [k for k in arguments.kind.split(",") if k]
    for kind in kinds or ():
        if kind not in KINDS:
            raise ArgumentError(f"--kind {kind}: choose some of {', '.join(KINDS)}", name="kind")

    def wanted(event: Event) -> bool:
        return (
            arguments.since <= event.time <= (event.time if arguments.until is None else arguments.until)
            and (arguments.task is None or bool(set(arguments.task) & _about(event)))
            and (arguments.tenant is None or event.tenant == arguments.tenant)
            and (event.kind in kinds if kinds is not None else arguments.all or event.kind not in QUIET)
        )

    write_views(log, arguments.trace_out, arguments.picture)
    if arguments.metrics is not None:
        metrics = LogMetrics(str(log.about.get("policy", "unknown"))).observe_all(log)
        write_text(arguments.metrics, metrics.render())
    told = ((event, text) for event, text in sentences(log) if wanted(event))
    if arguments.json:
        events = [{**event.plain(), "text": text} for event, text in told]
        output.result("", {"command": "explain", "log": arguments.log, "about": log.about, "events": events})
        return 0
    if log.about:
        output.screen.print(_header(log.about), style="bold")
    said = False
    for event, text in told:  # written plainly: a log may have a million lines
        sys.stdout.write(f"{event.time:12.6f} s  {text}\n")
        said = True
    if not said:
        sys.stdout.flush()
        output.notes.print(_nothing(arguments, log), soft_wrap=True)
    return 0


def _header(about: dict[str, Any]) -> str:
    """Return a log's `about` as text, the policy first; lists of names are left out."""
    words = []
    for key, value in sorted(about.items(), key=lambda item: item[0] != "policy"):
        if key == "clock" and isinstance(value, int | float):
            words.append(f"clock {value / 1e9:.4g} GHz")
        elif key == "memory" and isinstance(value, int):
            words.append(f"memory {format_size(value)}")
        elif isinstance(value, str | int | float):
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            words.append(f"{_NAMES.get(key, key.replace('_', ' '))} {shown}")
    return textwrap.fill(
        "; ".join(words), _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def _nothing(arguments: argparse.Namespace, log: Log) -> str:
    """Return why no sentence was printed, and what the log contains."""
    if not log.events:
        return "this log has no events"
    given = [f"--task {number}" for number in arguments.task or ()]
    given += [
        f"--{name} {value}"
        for name in ("tenant", "kind", "since", "until")
        if (value := getattr(arguments, name)) not in (None, 0.0)
    ]
    tenants = sorted({event.tenant for event in log})
    numbers = [event.task for event in log if event.kind != "reject"]
    text = f"nothing matches {' '.join(given)}" if given else "no decision was taken"
    text += f"; tenants in this log: {', '.join(tenants[:_SOME])}{', ...' if len(tenants) > _SOME else ''}"
    if numbers:
        text += f"; tasks {min(numbers)} to {max(numbers)}"
    text += f", {log.events[0].time:.6f} to {log.events[-1].time:.6f} s"
    if not (arguments.all or arguments.kind):
        text += " (arrivals, stops and ends are shown with --all)"
    return text


def _about(event: Event) -> set[int]:
    """Return the tasks that an event is about."""
    found = {event.task}
    for key in ("for", "victim", "newcomer", "by"):
        value = event.why.get(key)
        if isinstance(value, int):
            found.add(value)
    victims = event.why.get("victims")
    return found | (set(victims) if isinstance(victims, list) else set())
