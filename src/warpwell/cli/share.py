"""``warpwell share``: runs a program that shares GPUs with others, and manages such programs."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from pathlib import Path

from ..errors import ArgumentError, MissingFileError, SchedulerError
from ._common import Commands, add_command, json_option, output_of
from .pool import program_options, run

_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}")

_ON_MACHINE = ("program", "of_module", "of_text", "cuda", "share_gpu", "handles_interrupt")
"""Options of `program_options` that apply without a pool, too."""


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``share``."""
    parser = add_command(
        commands,
        "share",
        share,
        "run a program that shares GPUs with other programs",
        "Run a CUDA program on this machine's GPUs under the scheduler. Such programs use a GPU one at a "
        "time: by priority, then in fair shares. They use the machine's own driver (--cuda local), or the driver layer "
        "of warpwell run (--cuda pool). Without a program: warpwell share status, end WHO, or limit.",
    )
    parser.usage = "warpwell share [--priority N] [--tenant NAME] [options of warpwell run] PROGRAM [ARG ...]"
    group = parser.add_argument_group("sharing")
    text = "programs with a larger priority run first (default: 0); an operator can limit this"
    group.add_argument("--priority", type=int, default=0, metavar="N", help=text)
    group.add_argument(
        "--tenant", metavar="NAME", help="name for fair shares, limits and logs (default: your user name)"
    )
    program_options(parser)
    parser.set_defaults(share_gpu=True, cuda="local")


def share(arguments: argparse.Namespace) -> int:
    """Run a program, or one of the subcommands in `_VERBS`."""
    command = arguments.program
    if command and command[0] in _VERBS:
        return _VERBS[command[0]](command[1:])
    if command and os.sep not in command[0] and not os.path.exists(command[0]):
        command[0] = shutil.which(command[0]) or command[0]
    sharing = f"{arguments.priority}:{_tenant(arguments.tenant)}"
    if arguments.cuda == "local":
        return _run_on_machine(arguments, sharing)
    os.environ["WARPWELL_SHARE"] = sharing
    return run(arguments)


def _run_on_machine(arguments: argparse.Namespace, sharing: str) -> int:
    """Run a program behind the pass-through driver."""
    from ..driver import is_compiled
    from ..programs import run_program

    parser = argparse.ArgumentParser()
    program_options(parser)
    for name, default in vars(parser.parse_args([])).items():
        if name not in _ON_MACHINE and getattr(arguments, name) != default:
            option = f"--{name.replace('_', '-')}"
            raise ArgumentError(f"{option} needs a pool: add --cuda pool, or leave out {option}", name=name)
    for option, text in (("-m", arguments.of_module), ("-c", arguments.of_text)):
        if text:
            return run_program([sys.executable, option, *text], sharing)
    command = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not command:
        raise ArgumentError("name a program: warpwell share --priority 1 python serve.py", name="program")
    if not os.path.exists(command[0]):
        message = f"{command[0]} does not exist, and PATH has no such program; give the path of a program"
        raise MissingFileError(message, path=command[0])
    return run_program(command if is_compiled(command[0]) else [sys.executable, *command], sharing)


def _tenant(name: str | None) -> str:
    import getpass  # seldom needed

    try:
        found = getpass.getuser() if name is None else name
    except (OSError, KeyError):  # the user has no name
        found = f"user-{os.getuid()}"
    if not _TENANT.fullmatch(found):
        message = f"--tenant must be 1 to 63 letters, digits, dots, dashes, underscores or @, got {found!r:.70}"
        raise ArgumentError(message, name="tenant")
    return found


def _parser(verb: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"warpwell share {verb}", description=description, allow_abbrev=False)
    parser.set_defaults(command=f"share {verb}")
    return parser


def _status(argv: list[str]) -> int:
    """Show the programs that share GPUs."""
    from ..programs import program_status, tenant_limits

    parser = _parser("status", "Show the programs that share GPUs, and the limits of tenants.")
    json_option(parser)
    output, limits = output_of(parser.parse_args(argv)), {}
    try:
        limits = tenant_limits()
    except SchedulerError as problem:
        print(f"limits are ignored: {problem}", file=sys.stderr)
    rows = program_status(limits)
    if output.print_json({"programs": rows, "limits": limits}):
        return 0
    heads = ("device", "process", "tenant", "priority", "level", "state", "for, s", "busy periods", "used, s")
    cells = "{device} {process} {tenant} {priority} {level} {state} {seconds:.3f} {launches:,} {used:.3f}".split()
    if rows:
        output.table("programs that share GPUs", heads, [[cell.format(**row) for cell in cells] for row in rows])
    else:
        print("No program shares a GPU: start one with `warpwell share PROGRAM`.")
    if limits:
        output.result("limits", limits)
    return 0


def _end(argv: list[str]) -> int:
    """End programs of a tenant, or a process."""
    from ..programs import end_programs

    parser = _parser("end", "End the programs of a tenant, or the program with a process number.")
    parser.add_argument("name", metavar="TENANT|PROCESS")
    text = "time between SIGTERM and SIGKILL (default: 5)"
    parser.add_argument("--grace", type=float, default=5.0, metavar="SECONDS", help=text)
    json_option(parser)
    arguments = parser.parse_args(argv)
    processes = end_programs(arguments.name, arguments.grace)
    output_of(arguments).result("Ended", {"processes": processes})
    return 0


def _limit(argv: list[str]) -> int:
    """Change settings of a tenant."""
    from ..programs import known_tenants, set_limits

    parser = _parser("limit", "Change the settings of a tenant; without options, reset them.")
    parser.add_argument("tenant", metavar="TENANT")
    parser.add_argument("--weight", type=float, metavar="N", help="share of the time among tenants (default: 1)")
    parser.add_argument("--priority", type=int, metavar="N", help="added to its programs' priority (default: 0)")
    parser.add_argument("--ceiling", type=int, metavar="N", help="largest priority of its programs (default: 8)")
    text = "time that a turn of ww.turn may take while another program waits (default: 10)"
    parser.add_argument("--hold", type=float, metavar="SECONDS", help=text)
    json_option(parser)
    arguments = parser.parse_args(argv)
    names = ("weight", "priority", "ceiling", "hold")
    values = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    limits = set_limits({arguments.tenant: values})
    tenants = known_tenants()
    if arguments.tenant not in tenants:
        text = f"no known program has tenant {arguments.tenant!r}; known tenants: "
        print(text + (", ".join(tenants) or "none"), file=sys.stderr)
    output_of(arguments).result("Tenants", limits)
    return 0


def _arbiter(argv: list[str]) -> int:
    """Run the arbiter of a board. Programs start it; users need not."""
    from ..driver import Board

    if len(argv) != 1:
        raise ArgumentError("share arbiter takes one argument, the path of a board", name="path")
    board = Board(Path(argv[0]))
    if board.become_arbiter():  # before the import, which takes a second: no other process may start one
        from ..programs import run_arbiter

        run_arbiter(board)
    return 0


_VERBS = {"status": _status, "end": _end, "limit": _limit, "arbiter": _arbiter}
