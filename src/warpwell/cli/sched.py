"""``warpwell sched``: serves a device to several processes, and explains logs."""

from __future__ import annotations

import argparse
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import ArgumentError, ServiceError
from ._common import (
    Commands,
    Output,
    add_command,
    add_group,
    device_option,
    json_option,
    new_file,
    output_of,
    split_names,
)

if TYPE_CHECKING:
    from ..scheduler.extend import Event, Log

FAILURE_SECONDS = 1.0
"""Interval at which `serve` checks whether its service has failed."""


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``sched`` and its commands."""
    verbs = add_group(commands, "sched", "serve a device to several processes, and explain decisions")
    _add_explain(verbs)
    _add_serve(verbs)

    parser = add_command(verbs, "status", status, "show the state of a service")
    _socket(parser)
    parser.add_argument("--prometheus", action="store_true", help="print metrics in the text format of Prometheus")
    parser.add_argument("--log", metavar="FILE", help="write the log of the service, for sched explain")
    json_option(parser)


def _add_explain(verbs: Commands[argparse.ArgumentParser]) -> None:
    parser = add_command(verbs, "explain", explain, "explain each decision in a log")
    parser.add_argument("log", metavar="LOG", help="file that --log of another command wrote (-: stdin)")
    parser.add_argument("--task", type=int, action="append", metavar="N", help="show only events about this task")
    parser.add_argument("--tenant", metavar="NAME", help="show only events of the tasks of this tenant")
    text = (
        "show only events of these kinds: arrive, launch, preempt, resize, stop, end, fail, cancel, reject, hold, lost"
    )
    parser.add_argument("--kind", metavar="A,B", help=text)
    parser.add_argument("--all", action="store_true", help="show arrivals, stops and ends as well as decisions")
    text = "show only later events (default: 0)"
    parser.add_argument("--since", type=float, default=0.0, metavar="SECONDS", help=text)
    parser.add_argument("--until", type=float, metavar="SECONDS", help="show only earlier events")
    trace_option(parser)
    parser.add_argument("--metrics", metavar="FILE", help="write metrics in the text format of Prometheus")
    json_option(parser)


def _add_serve(verbs: Commands[argparse.ArgumentParser]) -> None:
    parser = add_command(verbs, "serve", serve, "serve a device to several processes, until Ctrl-C or SIGTERM")
    _socket(parser)
    device_option(parser, ("cpu", "cuda"))
    parser.add_argument("--policy", default="lanes", metavar="NAME", help="scheduling policy (default: lanes)")
    parser.add_argument("--limit", type=int, metavar="N", help="maximum number of running kernels (default: 2)")
    text = "settings of the tenants that may submit: {name: {weight, share, memory, ...}}"
    parser.add_argument("--tenants", metavar="FILE.json", help=text)
    parser.add_argument("--stuck-after", type=float, metavar="SECONDS", help="time limit for a block of a kernel")
    parser.add_argument("--log", metavar="FILE", help="append every event to a file, for sched explain")
    parser.add_argument("--metrics", metavar="FILE", help="write metrics for Prometheus every 5 s")
    parser.add_argument("--max-message", default="1GiB", metavar="SIZE", help="largest submission (default: 1GiB)")
    text = "maximum size of the data that the service keeps for a tenant (default: 8GiB)"
    parser.add_argument("--max-held", default="8GiB", metavar="SIZE", help=text)
    json_option(parser)
    group = parser.add_argument_group("other users", "Kernels run with your rights; see Trust in docs/scheduler.md.")
    group.add_argument("--group", metavar="NAME", help="open the socket to this group; its users are tenants")
    group.add_argument("--users", metavar="FILE.json", help="tenant of each user: {user: tenant}; others are rejected")
    text = "module whose kernels other users may launch; PACKAGE.*: all modules below a package"
    group.add_argument("--allow", action="append", default=[], metavar="MODULE", help=text)
    group.add_argument("--trust-group", action="store_true", help="run any of their kernels with your rights")


def _socket(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--socket", metavar="PATH", help="socket path (default: $WARPWELL_SOCKET, or one per user)")


def trace_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that writes a log as a timeline."""
    parser.add_argument("--trace-out", metavar="FILE.json", help="write a timeline for chrome://tracing or Perfetto")


# -- explain -----------------------------------------------------------------------------------------------------------

_LISTED_TENANTS = 20


def explain(arguments: argparse.Namespace) -> int:
    """Explain a log."""
    from ..scheduler.events import KINDS
    from ..scheduler.extend import Log
    from ..scheduler.report.explain import QUIET, sentences
    from ..scheduler.report.prometheus import LogMetrics, write_text
    from ..scheduler.report.timeline import write_trace

    output = output_of(arguments)
    log = Log.read(sys.stdin, "stdin") if arguments.log == "-" else Log.load(arguments.log)
    kinds = split_names(arguments.kind)
    for kind in kinds or ():
        if kind not in KINDS:
            raise ArgumentError(f"--kind {kind} is unknown; expected some of {', '.join(KINDS)}", name="kind")

    def is_selected(event: Event) -> bool:
        return (
            arguments.since <= event.time <= (event.time if arguments.until is None else arguments.until)
            and (arguments.task is None or bool(set(arguments.task) & _tasks_of(event)))
            and (arguments.tenant is None or event.tenant == arguments.tenant)
            and (event.kind in kinds if kinds is not None else arguments.all or event.kind not in QUIET)
        )

    if arguments.trace_out is not None:
        write_trace(log, arguments.trace_out)
    if arguments.metrics is not None:
        metrics = LogMetrics(str(log.about.get("policy", "unknown"))).observe_all(log)
        write_text(arguments.metrics, metrics.render())
    selected = ((event, text) for event, text in sentences(log) if is_selected(event))
    if arguments.json:
        events = [{**event.plain(), "text": text} for event, text in selected]
        output.print_json({"log": arguments.log, "about": log.about, "events": events})
        return 0
    if log.about:
        shown = {key: value for key, value in log.about.items() if not isinstance(value, list)}
        if isinstance(clock := shown.get("clock"), int | float):
            shown["clock"] = f"{clock / 1e9:.4g} GHz"
        output.result("log", shown)
    empty = True
    for event, text in selected:  # without rich: a log may have a million lines
        sys.stdout.write(f"{event.time:12.6f} s  {text}\n")
        empty = False
    if empty:
        sys.stdout.flush()
        output.notes.print(_explain_nothing(arguments, log), soft_wrap=True)
    return 0


def _explain_nothing(arguments: argparse.Namespace, log: Log) -> str:
    """Return the reason why no sentence was printed, and the contents of the log."""
    if not log.events:
        return "this log has no events"
    options = [f"--task {number}" for number in arguments.task or ()]
    options += [
        f"--{name} {value}"
        for name in ("tenant", "kind", "since", "until")
        if (value := getattr(arguments, name)) not in (None, 0.0)
    ]
    tenants = sorted({event.tenant for event in log})
    numbers = [event.task for event in log if event.kind != "reject"]
    text = f"nothing matches {' '.join(options)}" if options else "this log has no decisions"
    more = ", ..." if len(tenants) > _LISTED_TENANTS else ""
    text += f"; tenants in this log: {', '.join(tenants[:_LISTED_TENANTS])}{more}"
    if numbers:
        text += f"; tasks {min(numbers)} to {max(numbers)}"
    text += f", {log.events[0].time:.6f} to {log.events[-1].time:.6f} s"
    if not (arguments.all or arguments.kind):
        text += " (arrivals, stops and ends are shown with --all)"
    return text


def _tasks_of(event: Event) -> set[int]:
    """Return the tasks that an event is about."""
    tasks = {event.task}
    for key in ("for", "victim", "newcomer", "by"):
        value = event.why.get(key)
        if isinstance(value, int):
            tasks.add(value)
    victims = event.why.get("victims")
    return tasks | (set(victims) if isinstance(victims, list) else set())


# -- serve -------------------------------------------------------------------------------------------------------------

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Terminated(BaseException):
    """SIGTERM, which stops a service, or SIGHUP, which the kernel sends when the terminal closes."""


def serve(arguments: argparse.Namespace) -> int:
    """Serve a device until a signal stops the service."""
    output = output_of(arguments)
    if arguments.group is None and (arguments.allow or arguments.trust_group):
        raise ArgumentError("--allow and --trust-group give access to other users: add --group", name="group")
    # nohup has SIGHUP ignored
    stops = [n for n in _STOP_SIGNALS if n is not signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _stop) for number in stops}
    try:
        _serve_until_stopped(arguments, output)
    except _Terminated:
        return 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, _: object) -> None:
    """Stop the service, and ignore further signals until it has stopped."""
    for each in _STOP_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt if number == signal.SIGINT else _Terminated


def _serve_until_stopped(arguments: argparse.Namespace, output: Output) -> NoReturn:
    import time

    from .._check import checked_nbytes
    from ..scheduler.service.service import Service

    tenants = _read_names(arguments.tenants, "--tenants")
    if arguments.metrics is not None:
        new_file(arguments.metrics, "--metrics")
    service = Service(
        arguments.socket,
        device=arguments.device,
        policy=arguments.policy,
        limit=arguments.limit,
        tenants=tenants,
        group=arguments.group,
        users=_read_names(arguments.users, "--users"),
        allow=arguments.allow,
        trust_group=arguments.trust_group,
        log=arguments.log,
        metrics=arguments.metrics,
        max_message=checked_nbytes(arguments.max_message, "max-message"),
        max_held=checked_nbytes(arguments.max_held, "max-held"),
        stuck=arguments.stuck_after,
    )
    try:
        with output.progress() as report:
            report("start", 0, 0)
            service.start()
        output.result("Serving", {"socket": str(service.path), **service.properties})
        sys.stdout.flush()  # the parent process may wait for this line
        while not service.failure:
            time.sleep(FAILURE_SECONDS)
        raise ServiceError(f"the device process failed to restart: {service.failure}")
    except KeyboardInterrupt:
        service.close(urgent=True)
        raise
    finally:
        service.close()


def _read_names(path: str | None, option: str) -> dict[str, Any] | None:
    from ..json_file import read_json

    return None if path is None else read_json(path, f"the file of {option}, an object by name")


# -- status ------------------------------------------------------------------------------------------------------------


def status(arguments: argparse.Namespace) -> int:
    """Show the state of a service; write its log and print its metrics, according to the options."""
    from ..scheduler import connect

    output = output_of(arguments)
    with connect(arguments.socket) as client:
        if arguments.log is not None:
            log = client.log()  # An error does not change the file.
            with open(arguments.log, "w", encoding="utf-8") as stream:
                log.write(stream)
        if arguments.prometheus:
            output.screen.print(client.metrics(), end="", markup=False)
        service = {"socket": str(client.path), **client.status()}
    if arguments.json:
        output.print_json(service)
    elif not arguments.prometheus:
        output.result(service["socket"], service)
    return 0
