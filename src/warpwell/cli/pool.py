"""``warpwell run``: a program whose devices are agents, here and on other hosts."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence

from ...errors import ArgumentError, MissingFileError
from ...pool.launch.gpus import list_gpus, users
from ...pool.launch.hosts import Host, is_here, parse_hosts, place, read_hostfile, slurm_hosts
from ...pool.launch.launcher import Launcher, RunOptions
from ..arguments import new_file

LEAST, ELSEWHERE = 16, 256
"""Agents that this host may always have, and that another host may have, whose cores are not known."""


def run(arguments: argparse.Namespace) -> int:
    """Run the program; return its exit status."""
    chosen = options(arguments)
    if arguments.of_module is not None:
        if not arguments.of_module:
            raise ArgumentError("-m names no module: warpwell run -m MODULE [ARG ...]", name="module")
        command = ["-m", *arguments.of_module]
    elif arguments.of_text is not None:
        if not arguments.of_text:
            raise ArgumentError("-c has no program: warpwell run -c 'TEXT' [ARG ...]", name="program")
        command = ["-c", *arguments.of_text]
    else:
        command = _program(arguments.program)
    return Launcher(command, chosen).run()


def options(arguments: argparse.Namespace) -> RunOptions:
    """Return how to run an application, from the options that `placing` adds.

    Raises
    ------
    ArgumentError
        An option is not allowed, or there are more agents than GPUs.
    """
    seconds = arguments.start_timeout
    if not (seconds > 0 and math.isfinite(seconds)):
        raise ArgumentError(f"--start-timeout {seconds:g}: give more than 0", name="start_timeout")
    if os.geteuid() == 0 and sys.stderr.isatty() and "OMPI_ALLOW_RUN_AS_ROOT" not in os.environ:
        print("warpwell: note: this runs as root, which Open MPI advises against", file=sys.stderr)
    trace = getattr(arguments, "trace", None)
    if trace is not None:  # before hours of work
        path = new_file(trace, "--trace")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ArgumentError(
                f"--trace {trace} cannot be written: give another place, or check its permissions", name="trace"
            )
    gpus = [] if arguments.target == "cpu" else list_gpus()
    return RunOptions(
        hosts=_hosts(arguments, gpus),
        gpus=bool(gpus),
        target=arguments.target,
        share_gpu=arguments.share_gpu,
        ft=not arguments.no_ft,
        tcp=arguments.tcp,
        trace=trace,
        notebook=getattr(arguments, "notebook", False),
        start=arguments.start_timeout,
        mpiexec=arguments.mpiexec,
        cuda=getattr(arguments, "cuda", "local"),
        explain_refused=getattr(arguments, "explain_refused", False),
    )


def _hosts(arguments: argparse.Namespace, gpus: Sequence[str]) -> list[Host]:
    if arguments.hosts is not None and arguments.hostfile is not None:
        raise ArgumentError("--hosts and --hostfile say the same: give one of them", name="hosts")
    if arguments.hosts is not None:
        listed = parse_hosts(arguments.hosts)
    elif arguments.hostfile is not None:
        listed = read_hostfile(arguments.hostfile)
    else:
        listed = slurm_hosts(os.environ) or []
    taken = users(gpus)
    if not listed:
        listed = [Host("localhost")]
        if arguments.agents is None:
            listed = [Host("localhost", max(1, len(gpus) - (0 if arguments.share_gpu else len(taken))))]
    placed = place(listed, arguments.agents)
    here = sum(h.agents or 0 for h in placed if is_here(h.name))
    if not arguments.force:
        _check_number(placed, here)
    if here > len(gpus) - len(taken) and not arguments.share_gpu and (gpus or arguments.target == "cuda") and here:
        used = "".join(f", of which GPU {uuid} is {user}'s" for uuid, user in list(taken.items())[:1])
        more = f" and other jobs have {len(taken) - 1} more" if len(taken) > 1 else ""
        raise ArgumentError(
            f"{here} agent{'s' * (here > 1)} on this host, which has {len(gpus) or 'no'} GPU{'s' * (len(gpus) != 1)}"
            f"{used}{more}: "
            + ("start fewer, or use --share-gpu to have several on one" if gpus else "use --target cpu or auto"),
            name="agents",
        )
    return placed


def _check_number(placed: Sequence[Host], here: int) -> None:
    """Raise if a digit too many would start more processes than a host can run."""
    cores = len(os.sched_getaffinity(0))
    for count, room, what in (
        (here, max(LEAST, cores), f"this host, which has {cores} core{'s' * (cores > 1)}"),
        *((h.agents or 0, ELSEWHERE, f"host {h.name}") for h in placed if not is_here(h.name)),
    ):
        if count > room:
            raise ArgumentError(
                f"{count} agents on {what}: each is a process, and {room} are the most without --force", name="agents"
            )


def _program(words: Sequence[str]) -> list[str]:
    command = list(words[1:] if words[:1] == ["--"] else words)
    if not command:
        raise ArgumentError("name a program: warpwell run --agents 2 FILE.py [ARG ...]", name="program")
    if command[0].startswith("-"):
        raise ArgumentError(f"there is no option {command[0]}: see warpwell run --help", name="program")
    if not os.path.exists(command[0]):
        raise MissingFileError(f"{command[0]} does not exist: name a Python file", path=command[0])
    return command
