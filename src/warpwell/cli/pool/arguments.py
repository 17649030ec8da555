"""The arguments of ``warpwell run`` and ``warpwell pool``."""

from __future__ import annotations

import argparse
import sys

from ..arguments import Commands, command, json_option

NOTEBOOK = "warpwell"
"""The kernel that ``warpwell pool notebook`` writes if no other name is given."""


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``run``, and ``pool`` with its commands."""
    run = command(commands, "run", "pool.run", "run a program with the devices of other processes and hosts as its own")
    run.usage = "warpwell run [--agents N] [--hosts A:8,B:8] [options] FILE.py [ARG ...]"
    placing(run)
    run.add_argument("--trace", metavar="FILE", help="write statistics of calls: counts, bytes and waits (JSON)")
    run.add_argument(
        "--notebook",
        action="store_true",
        help="the program is a kernel of Jupyter: interrupts go to it "
        "and never end it, and it ends with Jupyter (see warpwell pool notebook)",
    )
    run.add_argument(
        "--cuda",
        choices=("auto", "pool", "local"),
        default="auto",
        help="whose GPUs CUDA calls of the "
        "program itself reach: the pool's (default auto: if there is a driver, and a C compiler once), or "
        "those of this machine",
    )
    run.add_argument(
        "--explain-refused",
        action="store_true",
        help="in the end, list the functions of the CUDA driver "
        "that the program called and that the pool does not serve",
    )
    run.add_argument("-m", dest="of_module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module")
    run.add_argument("-c", dest="of_text", nargs=argparse.REMAINDER, metavar="CODE", help="run a program text")
    run.add_argument("program", nargs=argparse.REMAINDER, metavar="FILE.py [ARG ...]", help="the program")

    pool = commands.add_parser("pool", help="show the devices of a pool and their state")
    verbs = pool.add_subparsers(metavar="COMMAND", required=True)
    info = command(verbs, "info", "pool.info", "start a pool as run does, and show its devices")
    placing(info)
    json_option(info)
    top = command(verbs, "top", "pool.top", "show what the agents of a running program do")
    top.add_argument("--job", metavar="NAME", help="the job to show, if several run here")
    top.add_argument("--every", type=float, metavar="SECONDS", help="repeat until Ctrl-C (default: once)")
    json_option(top)
    notebook = command(verbs, "notebook", "pool.notebook", "write a kernel for Jupyter whose devices are a pool's")
    notebook.description = (
        "Write a kernel specification for Jupyter: a notebook with this kernel starts a pool as run does, and its "
        "ww.devices() are the agents. Give the command on the host where Jupyter starts kernels."
    )
    group = notebook.add_argument_group("kernel")
    group.add_argument(
        "--name", default=NOTEBOOK, metavar="NAME", help=f"several have several names (default {NOTEBOOK})"
    )
    group.add_argument("--remove", action="store_true", help="remove the kernel of this name from the same place")
    place = group.add_mutually_exclusive_group()
    place.add_argument("--user", action="store_const", const=None, dest="prefix", help="for your Jupyter (default)")
    place.add_argument(
        "--sys-prefix",
        action="store_const",
        const=sys.prefix,
        dest="prefix",
        help="for the Jupyter in this Python's environment",
    )
    place.add_argument("--prefix", metavar="DIR", help="for the Jupyter that is installed there")
    placing(notebook)
    json_option(notebook)


def placing(parser: argparse.ArgumentParser) -> None:
    """Add the options for the number and the places of agents."""
    group = parser.add_argument_group("agents")
    group.add_argument(
        "--agents",
        type=int,
        metavar="N",
        help="how many; default: all of the hosts or of the Slurm job, else one for each GPU here, or one",
    )
    group.add_argument("--hosts", metavar="A:8,B:8", help="hosts, and agents on each (without: evenly)")
    group.add_argument("--hostfile", metavar="FILE", help="the same, one a line: a slots=8")
    group.add_argument(
        "--target", choices=("auto", "cpu", "cuda"), default="auto", help="default auto: cuda where a host has GPUs"
    )
    group.add_argument(
        "--share-gpu", action="store_true", help="allow several agents on one GPU, and GPUs that other jobs use"
    )
    group.add_argument("--force", action="store_true", help="allow more agents than this host has cores, and than 16")
    group = parser.add_argument_group("between them")
    group.add_argument(
        "--no-ft", action="store_true", help="end when an agent is lost; MPI may then use its fastest network (UCX)"
    )
    group.add_argument("--tcp", action="store_true", help="sockets only, no shared memory (Open MPI)")
    group.add_argument(
        "--start-timeout", type=float, metavar="SECONDS", default=30.0, help="for all to be ready (default 30)"
    )
    group.add_argument("--mpiexec", metavar="PATH", help="default: that of this Python's environment, or on PATH")
