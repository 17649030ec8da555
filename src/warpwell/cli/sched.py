"""``warpwell sched serve`` and ``sched status``: a service that several processes submit to."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

from ...cache import parse_size
from ...errors import ArgumentError, SchedulerError, ServiceError
from ...json_file import read_json
from ...turns.choice import HOLD
from ...turns.operate import limited
from ..arguments import Commands, command, json_option, new_file
from ..output import Output

if TYPE_CHECKING:
    from ...scheduler.service.service import Service

_EVERY = 5.0


def add(verbs: Commands[argparse.ArgumentParser]) -> None:
    """Add ``serve`` and ``status`` to the commands of ``sched``."""
    serve = command(verbs, "serve", "sched.serve", "serve a device to several processes, until Ctrl-C or SIGTERM")
    _socket(serve)
    serve.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    serve.add_argument("--policy", default="lanes", metavar="NAME", help="default lanes")
    serve.add_argument("--limit", type=int, metavar="N", help="kernels that run at the same time (default 2)")
    serve.add_argument("--tenants", metavar="FILE.json", help="who may submit: {name: {weight, share, memory, ..}}")
    serve.add_argument("--hold", type=float, metavar="SECONDS", help="as sched limit; with --tenants, for turns, too")
    serve.add_argument("--stuck-after", type=float, metavar="SECONDS", help="time limit for a block of a kernel")
    serve.add_argument("--log", metavar="FILE", help="append every event, for sched explain")
    serve.add_argument("--metrics", metavar="FILE", help=f"write metrics for Prometheus, each {_EVERY:g} s")
    serve.add_argument(
        "--max-message", default="1GiB", metavar="SIZE", help="maximal size of one submission (default 1GiB)"
    )
    serve.add_argument(
        "--max-held", default="8GiB", metavar="SIZE", help="maximal bytes of a tenant at the service (default 8GiB)"
    )
    group = serve.add_argument_group("for other users", "Kernels are code that runs as you: docs/scheduler.md, Trust.")
    group.add_argument("--group", metavar="NAME", help="open the socket to this group; users are tenants")
    group.add_argument("--users", metavar="FILE.json", help="tenant of each user: {user: tenant}; no others get in")
    group.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="MODULE",
        help="whose kernels they may launch; PACKAGE.*: of all modules below it",
    )
    group.add_argument("--trust-group", action="store_true", help="take any kernel: they can do whatever you can")
    json_option(serve)

    status = command(verbs, "status", "sched.serve", "show the state of a service, and who takes turns at a GPU")
    _socket(status)
    status.add_argument("--prometheus", action="store_true", help="print its metrics in Prometheus' text format")
    status.add_argument("--log", metavar="FILE", help="write its log, for sched explain")
    json_option(status)


def _socket(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--socket", metavar="PATH", help="default: $WARPWELL_SOCKET, or one of your own")


def run(arguments: argparse.Namespace) -> int:
    """Serve, or ask a service."""
    return _status(arguments) if arguments.command == "status" else _serve(arguments)


def _serve(arguments: argparse.Namespace) -> int:
    output = Output(arguments.json)
    if arguments.group is None and (arguments.allow or arguments.trust_group):
        raise ArgumentError("--allow and --trust-group are about other users: add --group", name="group")
    # nohup has SIGHUP ignored
    ends = [n for n in _ENDS if n is not signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
    before = {n: signal.signal(n, _stop) for n in ends}
    try:
        _until_stopped(arguments, output)
    except _Terminated:
        return 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Terminated(BaseException):
    """SIGTERM came, which is how a service is asked to end, or SIGHUP: its terminal was closed."""


def _stop(number: int, _: object) -> None:
    """End what goes on, and let nothing disturb the order in which that ends."""
    for each in _ENDS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt if number == signal.SIGINT else _Terminated


def _until_stopped(arguments: argparse.Namespace, output: Output) -> NoReturn:
    from ...scheduler.service.service import Service

    tenants = _by_name(arguments.tenants, "--tenants")
    if arguments.metrics is not None:
        new_file(arguments.metrics, "--metrics")
    service = Service(
        arguments.socket,
        device=arguments.device,
        policy=arguments.policy,
        limit=arguments.limit,
        tenants=tenants,
        group=arguments.group,
        users=_by_name(arguments.users, "--users"),
        allow=arguments.allow,
        trust_group=arguments.trust_group,
        log=arguments.log,
        max_message=parse_size(arguments.max_message, "max-message"),
        max_held=parse_size(arguments.max_held, "max-held"),
        stuck=arguments.stuck_after,
    )
    try:
        with output.progress() as report:
            report("start", 0, 0)
            service.start()
        with _limits_of_turns(arguments.hold, tenants or {}):
            _serve_on(arguments, service, output)
    except KeyboardInterrupt:
        service.close(soon=True)
        raise
    finally:
        service.close()


def _serve_on(arguments: argparse.Namespace, service: Service, output: Output) -> NoReturn:
    """Say that a service has begun, and write its metrics until it is stopped or fails."""
    broker = service.broker
    _write(arguments.metrics, broker)  # a path that cannot be written ends the service here, and later does not
    output.result(
        "Serving",
        {"command": "serve", "socket": str(service.path), **broker.about, "owner_pid": broker.status()["owner_pid"]},
    )
    sys.stdout.flush()  # the program that started it may wait for this line
    failing = told = False
    try:
        while not broker.failure:
            time.sleep(_EVERY)
            failing = _write_again(arguments.metrics, broker, output, failing)
            told = _tell_missing(arguments.log, broker, output, told)
    finally:  # the last ones, of a service that is asked to end too
        _write_again(arguments.metrics, broker, output, failing)
        _tell_missing(arguments.log, broker, output, told)
    raise ServiceError(f"the process that owns the device does not start any more: {broker.failure}")


def _limits_of_turns(hold: float | None, tenants: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Return what sets limits of turns while the service runs, if its options say any."""
    own = _of_turns(tenants)
    if hold is None and not any(own.values()):
        return contextlib.nullcontext()
    return limited(hold=HOLD if hold is None else hold, tenants=own)


def _of_turns(tenants: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what settings of tenants mean for turns."""
    given = {name: values for name, values in tenants.items() if isinstance(values, dict)}
    return {name: {k: values[k] for k in ("ceiling", "priority") if k in values} for name, values in given.items()}


def _write(path: str | None, broker: Any) -> None:
    if path is not None:
        from ...scheduler.report.prometheus import write_text

        write_text(path, broker.render())


def _write_again(path: str | None, broker: Any, output: Output, failing: bool) -> bool:
    """Write metrics; return whether that failed, which is told once: a full disk is no reason to stop the tasks."""
    try:
        _write(path, broker)
    except OSError as error:
        if not failing and not output.as_json:
            output.notes.print(f"no metrics are written to {path}: {error.strerror or error}")
        return True
    return False


def _tell_missing(path: str, broker: Any, output: Output, told: bool) -> bool:
    """Tell once that the log's file lacks events; return whether that was told."""
    if broker.unlogged and not told and not output.as_json:
        output.notes.print(f"events are missing from {path}: {broker.unlogged}; `sched status --log` has the last ones")
    return bool(broker.unlogged)


def _status(arguments: argparse.Namespace) -> int:
    from ...turns.operate import status
    from .turns import show

    output = Output(arguments.json)
    rows: list[dict[str, Any]] = []
    hidden = ""
    try:
        rows = status()
    except SchedulerError as error:  # no /dev/shm, or a folder that is not this user's: a service may be there
        hidden = str(error)
    asked = arguments.socket or arguments.prometheus or arguments.log
    try:
        found = _service_status(arguments, output)
    except ServiceError as error:
        if asked:
            raise
        if not rows:
            raise ServiceError(f"{hidden or 'nobody takes turns at a GPU here'}, and {error}") from None
        found = {}  # turns need no service
    if arguments.json:
        unknown = {"turns_unknown": hidden} if hidden else {}
        output.result("", {"command": "status", **found, "turns": rows, **unknown})
    elif not arguments.prometheus:
        if found:
            output.result(found["socket"], {"command": "status", **found})
        if rows:
            show(output, rows)
    if hidden and not arguments.json:
        output.notes.print(f"who takes turns is not known: {hidden}")
    return 0


def _service_status(arguments: argparse.Namespace, output: Output) -> dict[str, Any]:
    """Ask a service; write its log and print its metrics, if wanted."""
    from ...scheduler import connect

    client = connect(arguments.socket)
    try:
        if arguments.log is not None:
            with open(arguments.log, "w", encoding="utf-8") as stream:
                client.log().write(stream)
        if arguments.prometheus:
            output.screen.print(client.metrics(), end="", markup=False)
        return {"socket": str(client.path), **client.status()}
    finally:
        client.close(cancel=True)


def _by_name(path: str | None, option: str) -> dict[str, Any] | None:
    """Read the file of an option."""
    return None if path is None else read_json(path, f"the file of {option}, an object by name")
