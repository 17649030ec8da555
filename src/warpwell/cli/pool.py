"""``warpwell run`` and ``warpwell pool``: programs whose devices are agents, on this host and others."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, MissingFileError, PoolError
from ._common import Commands, Output, add_command, add_group, json_option, new_file, output_of

if TYPE_CHECKING:
    from ..pool import Host, RunOptions

MIN_AGENTS = 16
"""Number of agents that are allowed on this host regardless of its cores."""

MAX_REMOTE_AGENTS = 256
"""Number of agents that are allowed on another host. Its number of cores is unknown."""

KERNEL_NAME = "warpwell"
"""Default name of the kernel that ``warpwell pool notebook`` writes."""


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``run``, and ``pool`` with its commands."""
    _add_run(commands)
    verbs = add_group(commands, "pool", "show the devices of a pool and their state")
    parser = add_command(verbs, "info", info, "start a pool as run does, and show its devices")
    _agent_options(parser)
    json_option(parser)
    parser = add_command(verbs, "top", top, "show the activity of the agents of a running program")
    parser.add_argument("--job", metavar="NAME", help="job to show if several jobs run here")
    parser.add_argument("--every", type=float, metavar="SECONDS", help="repeat until Ctrl-C (default: once)")
    json_option(parser)
    _add_notebook(verbs)


def _add_run(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = add_command(commands, "run", run, "run a program with devices of other processes and hosts")
    parser.usage = "warpwell run [--agents N] [--hosts A:8,B:8] [options] PROGRAM [ARG ...]"
    program_options(parser)


def program_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that run a program with the devices of a pool."""
    parser.set_defaults(handles_interrupt=True)
    _agent_options(parser)
    parser.add_argument("--trace", metavar="FILE", help="write statistics of calls as JSON: counts, bytes and waits")
    text = "run a Jupyter kernel: interrupts do not end it, and it exits with Jupyter (see pool notebook)"
    parser.add_argument("--notebook", action="store_true", help=text)
    text = "GPUs for the program's own CUDA calls (auto: of the pool if a driver and a C compiler are installed)"
    parser.add_argument("--cuda", choices=("auto", "pool", "local"), default="auto", help=text)
    text = "maximum wait for GPUs that other jobs use or, with Slurm, for an allocation (default: fail at once)"
    parser.add_argument("--wait", type=float, metavar="SECONDS", help=text)
    text = "options for the salloc that --wait starts outside a Slurm job, as in --slurm=--partition=gpu"
    parser.add_argument("--slurm", default="", metavar="OPTIONS", help=text)
    text = "claim GPUs at the start, or each at its first use: a CUDA context or a lease (default: start)"
    parser.add_argument("--allocate", choices=("start", "use"), default="start", help=text)
    text = "with --allocate use: release a device after this time without calls, objects and leases (default: never)"
    parser.add_argument("--idle", type=float, metavar="SECONDS", help=text)
    text = "list the CUDA driver functions that the program called and the pool does not support"
    parser.add_argument("--explain-refused", action="store_true", help=text)
    parser.add_argument("-m", dest="of_module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module")
    parser.add_argument("-c", dest="of_text", nargs=argparse.REMAINDER, metavar="CODE", help="run this program text")
    text = "program to run, in Python or compiled"
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM [ARG ...]", help=text)


def _add_notebook(verbs: Commands[argparse.ArgumentParser]) -> None:
    text = (
        "Write a kernel specification for Jupyter: a notebook with this kernel starts a pool as run does, and its "
        "ww.devices() are the agents. Run this on the host where Jupyter starts kernels."
    )
    parser = add_command(verbs, "notebook", notebook, "write a kernel for Jupyter with the devices of a pool", text)
    parser.set_defaults(handles_interrupt=True)
    group = parser.add_argument_group("kernel")
    group.add_argument("--name", default=KERNEL_NAME, metavar="NAME", help=f"kernel name (default: {KERNEL_NAME})")
    group.add_argument("--remove", action="store_true", help="remove the kernel instead")
    target = group.add_mutually_exclusive_group()
    target.add_argument("--user", action="store_const", const=None, dest="prefix", help="for your Jupyter (default)")
    text = "for the Jupyter of this Python environment"
    target.add_argument("--sys-prefix", action="store_const", const=sys.prefix, dest="prefix", help=text)
    target.add_argument("--prefix", metavar="FOLDER", help="for the Jupyter that is installed in FOLDER")
    _agent_options(parser)
    json_option(parser)


def _agent_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the number and the hosts of agents."""
    group = parser.add_argument_group("agents")
    text = "number of agents (default: all agents of --hosts or of the Slurm job, else one for each GPU here, or one)"
    group.add_argument("--agents", type=int, metavar="N", help=text)
    group.add_argument("--hosts", metavar="A:8,B:8", help="hosts, with their numbers of agents (default: evenly)")
    group.add_argument("--hostfile", metavar="FILE", help="file with a host on each line, as in: a slots=8")
    text = "target of the agents (default: cuda on hosts with GPUs, else cpu)"
    group.add_argument("--target", choices=("auto", "cpu", "cuda"), default="auto", help=text)
    group.add_argument("--share-gpu", action="store_true", help="allow several agents on a GPU, and GPUs of other jobs")
    group.add_argument("--force", action="store_true", help="allow more than 16 agents and more agents than cores")
    group = parser.add_argument_group("network")
    text = "end the program if an agent is lost; MPI may then use its fastest network (UCX)"
    group.add_argument("--no-ft", action="store_true", help=text)
    group.add_argument("--tcp", action="store_true", help="use only sockets, not shared memory (Open MPI)")
    text = "time limit for the start of all agents (default: 30)"
    group.add_argument("--start-timeout", type=float, metavar="SECONDS", default=30.0, help=text)
    group.add_argument("--mpiexec", metavar="PATH", help="mpiexec to use (default: in this environment, else on PATH)")


# -- run ---------------------------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> int:
    """Run the program; return its exit status."""
    from ..pool import Allocation, Launcher

    needs_allocation = _needs_allocation(arguments)
    options = None if needs_allocation else run_options(arguments)
    if arguments.of_module is not None:
        if not arguments.of_module:
            raise ArgumentError("-m needs a module: warpwell run -m MODULE [ARG ...]", name="module")
        command = ["-m", *arguments.of_module]
    elif arguments.of_text is not None:
        if not arguments.of_text:
            raise ArgumentError("-c needs a program: warpwell run -c 'TEXT' [ARG ...]", name="program")
        command = ["-c", *arguments.of_text]
    else:
        command = _program(arguments.program)
    if options is not None:
        return Launcher(command, options).run()
    with Allocation(arguments.agents or 1, arguments.target != "cpu", arguments.wait, arguments.slurm) as allocation:
        return Launcher(command, run_options(arguments), allocation).run()  # with the hosts of the allocation


def _needs_allocation(arguments: argparse.Namespace) -> bool:
    """Return True if the job is to wait for an allocation of Slurm."""
    from ..pool import is_configured

    wait = arguments.wait
    if wait is not None and not (wait > 0 and math.isfinite(wait)):
        raise ArgumentError(f"--wait must be a positive number of seconds, got {wait:g}", name="wait")
    is_given = arguments.hosts or arguments.hostfile or os.environ.get("SLURM_JOB_ID")
    return wait is not None and not is_given and is_configured()


def _program(argv: Sequence[str]) -> list[str]:
    from ..driver import is_compiled

    command = list(argv[1:] if argv[:1] == ["--"] else argv)
    if not command:
        raise ArgumentError("name a program: warpwell run --agents 2 app.py [ARG ...]", name="program")
    if command[0].startswith("-"):
        raise ArgumentError(f"unknown option {command[0]}; see warpwell run --help", name="program")
    if not os.path.exists(command[0]):
        raise MissingFileError(f"{command[0]} does not exist; give a Python file or a program", path=command[0])
    is_compiled(command[0])  # raises if this host cannot run it
    return command


def run_options(arguments: argparse.Namespace) -> RunOptions:
    """Return how to run a program, from the options of `_agent_options`.

    Raises
    ------
    ArgumentError
        An option is not allowed, or there are more agents than GPUs.
    """
    from ..pool import RunOptions, is_here, list_gpus, use_job

    seconds = arguments.start_timeout
    if not (seconds > 0 and math.isfinite(seconds)):
        raise ArgumentError(f"--start-timeout must be positive, got {seconds:g}", name="start_timeout")
    if os.geteuid() == 0 and sys.stderr.isatty() and "OMPI_ALLOW_RUN_AS_ROOT" not in os.environ:
        print("warpwell: note: the program runs as root, which Open MPI advises against", file=sys.stderr)
    names = "target share_gpu tcp trace notebook mpiexec wait allocate idle explain_refused".split()
    options: dict[str, Any] = {n: value for n in names if (value := getattr(arguments, n, None)) is not None}
    if (trace := options.get("trace")) is not None:  # fail before hours of work, not after
        path = new_file(trace, "--trace")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            text = f"--trace {trace} cannot be written; give another path, or check its permissions"
            raise ArgumentError(text, name="trace")
    at_use = options.get("allocate") == "use"
    if at_use and arguments.share_gpu:
        raise ArgumentError("--allocate use and --share-gpu exclude each other; leave out one", name="share_gpu")
    idle = options.get("idle")
    if idle is not None and not at_use:
        raise ArgumentError("--idle works only with `--allocate use`: add that, or leave out --idle", name="idle")
    if idle is not None and not (idle > 0 and math.isfinite(idle)):
        raise ArgumentError(f"--idle must be a positive number of seconds, got {idle:g}", name="idle")
    allocated = use_job(os.environ, arguments.target)
    gpus = [] if arguments.target == "cpu" else list_gpus()
    cuda = getattr(arguments, "cuda", "local")
    hosts = _hosts(arguments, gpus, allocated)
    has_gpus = bool(gpus) or (arguments.target != "cpu" and not all(is_here(host.name) for host in hosts))
    if at_use and cuda == "auto" and has_gpus:
        cuda = "pool"
    return RunOptions(hosts=hosts, gpus=bool(gpus), ft=not arguments.no_ft, start=seconds, cuda=cuda, **options)


def _hosts(arguments: argparse.Namespace, gpus: Sequence[str], allocated: Sequence[Host]) -> list[Host]:
    from ..pool import Host, assign_agents, is_here, parse_hosts, read_hostfile, users

    if arguments.hosts is not None and arguments.hostfile is not None:
        raise ArgumentError("--hosts and --hostfile exclude each other; give one of them", name="hosts")
    if arguments.hosts is not None:
        listed = parse_hosts(arguments.hosts)
    elif arguments.hostfile is not None:
        listed = read_hostfile(arguments.hostfile)
    else:
        listed = list(allocated)
    may_wait = getattr(arguments, "wait", None) is not None or getattr(arguments, "allocate", "start") == "use"
    used_gpus = {} if may_wait else users(gpus)
    if not listed:
        listed = [Host("localhost")]
        if arguments.agents is None:
            listed = [Host("localhost", max(1, len(gpus) - (0 if arguments.share_gpu else len(used_gpus))))]
    placed = assign_agents(listed, arguments.agents)
    local_agents = sum(h.agents or 0 for h in placed if is_here(h.name))
    if not arguments.force:
        _check_number(placed, local_agents)
    needs_gpus = local_agents and not arguments.share_gpu and (gpus or arguments.target == "cuda")
    if needs_gpus and local_agents > len(gpus) - len(used_gpus):
        used = "".join(f"; {user} uses GPU {uuid}" for uuid, user in list(used_gpus.items())[:1])
        more = f", and other jobs use {len(used_gpus) - 1} more" if len(used_gpus) > 1 else ""
        advice = "start fewer, or use --share-gpu for several on one GPU" if gpus else "use --target cpu or auto"
        advice = f"wait for the GPUs with --wait, {advice}" if used_gpus else advice
        raise ArgumentError(
            f"{local_agents} agent{'s' * (local_agents > 1)} on this host, which has "
            f"{len(gpus) or 'no'} GPU{'s' * (len(gpus) != 1)}{used}{more}: {advice}",
            name="agents",
        )
    return placed


def _check_number(placed: Sequence[Host], local_agents: int) -> None:
    """Raise ArgumentError if a host would get more agents than it can run, as after a typing error."""
    from ..pool import is_here

    cores = len(os.sched_getaffinity(0))
    for count, limit, host in (
        (local_agents, max(MIN_AGENTS, cores), f"this host, which has {cores} core{'s' * (cores > 1)}"),
        *((h.agents or 0, MAX_REMOTE_AGENTS, f"host {h.name}") for h in placed if not is_here(h.name)),
    ):
        if count > limit:
            raise ArgumentError(
                f"{count} agents (processes) on {host}: start at most {limit}, or add --force", name="agents"
            )


# -- pool info, pool top -----------------------------------------------------------------------------------------------


def info(arguments: argparse.Namespace) -> int:
    """Start a pool, print its devices, and end the pool."""
    import json
    import tempfile
    import time

    from ..cache import format_size
    from ..pool import Launcher

    output = output_of(arguments)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "devices.json"
        status = Launcher(["-m", "warpwell.pool.launch.describe", str(path)], run_options(arguments)).run()
        if status or not path.exists():
            raise PoolError(f"the program that lists the devices exited with status {status}; see its output above")
        devices = json.loads(path.read_text())
    seconds = round(time.monotonic() - began, 3)
    if output.print_json({"devices": devices, "seconds": seconds}):
        return 0
    heads = ("device", "host", "target", "name", "memory", "free", "link", "round trip us", "process")
    rows = []
    for d in devices:
        sizes = format_size(d["memory_bytes"]), format_size(d["free_bytes"])
        name = str(d["device"]), d["host"], d["target"], d["name"]
        rows.append((*name, *sizes, d["link"], f"{d['round_trip_us']:.0f}", str(d["pid"])))
    output.table(f"Pool (started, described and ended in {seconds:.1f} s)", heads, rows, left=heads)
    return 0


def top(arguments: argparse.Namespace) -> int:
    """Show agents, once or repeatedly."""
    import time

    from ..pool.launch.job_files import jobs
    from ..pool.launch.listener import query_job

    if arguments.every is not None and not 0 < arguments.every < 1e9:
        raise ArgumentError(f"--every must be a positive number of seconds, got {arguments.every:g}", name="every")
    output = output_of(arguments)
    running = {files.job: files for files, alive in jobs() if alive}
    job = arguments.job or (next(iter(running)) if len(running) == 1 else None)
    if job is None or job not in running:
        problem = f"unknown job {job!r}" if job else "several jobs run here" if running else "no job of yours runs here"
        advice = f"choose --job from {', '.join(running)}" if running else "start a job with warpwell run"
        raise PoolError(f"{problem}: {advice}")
    before: dict[int, tuple[int, float]] = {}
    while True:
        agents = query_job(running[job])
        if not output.print_json({"job": job, "agents": agents}):
            output.table(f"Job {job}", _AGENT_HEADS.split(), map(_agent_row, agents), left=("host", "target", "doing"))
            before = print_programs(output, agents, before)
        if arguments.every is None:
            return 0
        time.sleep(arguments.every)


_AGENT_HEADS = "device host process target calls launches sent received buffers held free waiting doing"


def _agent_row(agent: dict[str, Any]) -> tuple[str, ...]:
    from ..cache import format_size

    start = str(agent["rank"] - 1), agent["host"], str(agent["pid"])
    state = agent.get("info")
    if state is None:
        return *start, "-", agent["state"]
    lanes = state["lanes"].values()
    counts = (f"{n:,}" for n in (sum(state["calls"].values()), state["calls"].get("LAUNCH", 0)))
    sent = (format_size(sum(p[n] for p in state["transport"].values())) for n in ("bytes_sent", "bytes_received"))
    memory = str(state["buffers"]), format_size(state["held"]), format_size(state["free"])
    doing = ", ".join(sorted({lane["doing"] for lane in lanes if lane["doing"]})) or "-"
    target, waiting = state["target"] if state["joined"] else "-", sum(lane["waiting"] for lane in lanes)
    return *start, target, *counts, *sent, *memory, str(waiting), doing


def print_programs(
    output: Output, agents: list[dict[str, Any]], before: dict[int, tuple[int, float]]
) -> dict[int, tuple[int, float]]:
    """Print the CUDA programs that agents serve, with their rate of calls.

    Parameters
    ----------
    output : Output
    agents : list of dict
    before : dict
        What the previous call returned.

    Returns
    -------
    dict
        Calls and seconds of each program by its worker.
    """
    from ..cache import format_size

    programs = [(agent, each) for agent in agents for each in (agent.get("info") or {}).get("programs", ())]
    rows = []
    for agent, each in sorted(programs, key=lambda pair: pair[1]["device"]):
        calls, seconds = before.get(each["worker"], (0, 0.0))
        rate = (each["calls"] - calls) / max(1e-9, each["seconds"] - seconds)
        process = ("-", "on another host") if each["pid"] is None else (str(each["pid"]), each["command"] or "-")
        size, count = format_size(each["bytes"]), f"{each['calls']:,}"
        rows.append((*process, str(each["device"]), agent["host"], size, count, f"{rate:,.0f}"))
    if rows:
        heads = ("process", "program", "device", "host", "memory", "calls", "calls/s")
        output.table("CUDA programs", heads, rows, left=("program", "host"))
    return {each["worker"]: (each["calls"], each["seconds"]) for _, each in programs}


# -- pool notebook -----------------------------------------------------------------------------------------------------

_REQUIRED = {"ipykernel": "ipykernel", "mpi4py": "-e '.[mpi]'"}
"""Modules that a kernel imports, and the arguments of pip that install each module in a checkout."""


def notebook(arguments: argparse.Namespace) -> int:
    """Write the kernel specification, or remove it."""
    import importlib.util

    from ..pool import KernelSpec, kernels_folder

    spec = KernelSpec(arguments.name, kernels_folder(arguments.prefix, os.environ))
    output = output_of(arguments)
    values = {"name": spec.name, "folder": str(spec.path)}
    if arguments.remove:
        spec.remove()
        output.result("Removed", {**values, "removed": True})
        return 0
    missing = [module for module in _REQUIRED if importlib.util.find_spec(module) is None]
    if missing:
        source = " (Warpwell's extra [mpi]): in a checkout, run" if "mpi4py" in missing else ": run"
        raise PoolError(
            f"notebooks need {' and '.join(missing)} in the environment of Warpwell{source} "
            f"{sys.executable} -m pip install {' '.join(_REQUIRED[module] for module in missing)}"
        )
    agents = run_options(arguments).agents
    all_gpus = arguments.agents is None and arguments.hosts is None and arguments.hostfile is None
    size = "all GPUs" if all_gpus else f"{agents} agent{'s' * (agents > 1)}"
    title = f"Warpwell{'' if spec.name == KERNEL_NAME else ' ' + spec.name} ({size})"
    content = spec.write(_command_options(arguments), title)
    if not output.print_json({**values, **content}):
        output.result("Choose the kernel in Jupyter by its display name", {"display name": title, **values})
    return 0


def _command_options(arguments: argparse.Namespace) -> list[str]:
    """Return the options of `run` that are not defaults. Paths are absolute, because a kernel starts elsewhere."""
    parser = argparse.ArgumentParser()
    _agent_options(parser)
    options: list[str] = []
    for name, default in vars(parser.parse_args([])).items():
        value = getattr(arguments, name)
        if value == default:
            continue
        options.append(f"--{name.replace('_', '-')}")
        if name == "hostfile" or (name == "mpiexec" and os.sep in value):
            options.append(os.path.abspath(value))
        elif value is not True:
            options.append(str(value))
    return options
