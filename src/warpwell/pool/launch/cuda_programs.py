"""The parts of launcher, supervisor and agents that send the application's own CUDA calls to the agents' GPUs.

The launcher makes a folder in that of the job. Each agent of this host that has a GPU serves it there, and for those of
other hosts the communicator does (``pool/cuda``). The supervisor starts the application with an environment in which
the driver is the layer. Agents keep the real driver.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...driver import DriverServer, build, examine_program, is_compiled, make_library_folder
from ...driver.environment import FOLDER as LAYER
from ...driver.environment import changes
from ...errors import DeviceNotFoundError, DriverBuildError
from .gpus import has_driver
from .reservation import Reservation

JOB = "WARPWELL_POOL_CUDA"
"""Settings for supervisor and agents, as JSON: the changes of the application's environment, and the native parts."""
DRIVER = "WARPWELL_CUDA_DRIVER"
"""Variable with a driver's library that agents without a GPU serve, one device each: for tests."""
CHOICES = ("auto", "pool", "local")
MOST = 64
"""Devices of an application: as many ranges of addresses there are."""
_EXIT = "WARPWELL_CUDA_EXIT"
"""Variable with which the layer ends a process whose CUDA runtime does not work on pooled GPUs."""
_NOTES = "WARPWELL_CUDA_REFUSED"
"""Variable with a file to which the layer writes names of functions that it refuses."""

_SILENT = 1.0
"""Seconds after which the build of the layer is announced."""


def prepare(
    choice: str,
    folder: Path,
    environ: Mapping[str, str],
    *,
    target: str = "auto",
    away: bool = False,
    gpus: bool = True,
    explain: bool = False,
) -> str | None:
    """Make the folder; return the value of `JOB`, or None if the application keeps the GPUs of this machine.

    Parameters
    ----------
    choice : {"auto", "pool", "local"}
        auto: the pool's GPUs if there is a driver, agents may have GPUs, and the layer can be built.
    folder : Path
        The folder of the job.
    environ : mapping
        The application's environment.
    target : {"auto", "cpu", "cuda"}
        The target of the agents.
    away : bool
        Some agents are on other hosts: for "pool" there need be no driver here.
    gpus : bool
        This host may have GPUs, if it has a driver.
    explain : bool
        What the pool refuses is noted, for `refused`.

    Raises
    ------
    DeviceNotFoundError, DriverBuildError
        The choice is "pool", and that cannot be.
    """
    why_not = None if choice == "local" else _why_not(environ, target, away and choice == "pool", gpus)
    if choice == "local" or (choice == "auto" and why_not):
        return None
    if why_not:
        raise DeviceNotFoundError(f"--cuda pool cannot be: {why_not}", device="cuda")
    try:
        with _told():
            parts = build.parts()
        if parts.layer is None or parts.worker is None or parts.relay is None:
            raise DriverBuildError("the driver layer for CUDA programs is not in this installation")
    except DriverBuildError:
        if choice == "pool":
            raise
        return None
    served = folder / "cuda"
    served.mkdir(mode=0o700)
    make_library_folder(served, parts.layer)
    changed = changes(served, {})  # the supervisor joins it to the library path that mpiexec has made
    if choice == "auto":  # "pool" is for programs that need no GPU there
        changed[_EXIT] = "1"
    if explain:
        changed[_NOTES] = str(served / "refused")
    about = {"environ": changed, "layer": str(parts.layer), "worker": str(parts.worker), "relay": str(parts.relay)}
    return json.dumps(about | {"folder": str(served), "driver": environ.get(DRIVER)})


def refusal(
    command: Sequence[str], choice: str, environ: Mapping[str, str], *, target: str, away: bool, gpus: bool
) -> str | None:
    """Return why a compiled program cannot have the pool's GPUs, as one line; None if it can, or does not get them.

    The parameters are those of `prepare`; `command` is the program.
    """
    if (
        choice == "local"
        or _why_not(environ, target, away and choice == "pool", gpus)
        or not is_compiled_program(command)
    ):
        return None
    return examine_program(command[0], environ.get("LD_LIBRARY_PATH", ""))[0]


def is_compiled_program(command: Sequence[str]) -> bool:
    """Return whether a command of `warpwell run` is a program of its own, and not one for this Python."""
    return command[0] not in ("-c", "-m") and is_compiled(command[0])


def program_environ(program: str) -> dict[str, str]:
    """Return this process's environment for a compiled program: its DT_RPATH must not hide the job's libraries."""
    environ = dict(os.environ)
    if folder := environ.get(LAYER):
        _, hidden = examine_program(program, environ.get("LD_LIBRARY_PATH", ""))
        preload = [*(f"{folder}/lib/{name}" for name in hidden), environ.get("LD_PRELOAD", "")]
        environ |= {"LD_PRELOAD": ":".join(filter(None, preload))} if hidden else {}
    return environ


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Print a line if the layer takes long, because this or another process compiles it."""
    line = "warpwell: the layer for CUDA programs is being compiled, once (some 10 s)"
    timer = threading.Timer(_SILENT, lambda: print(line, file=sys.stderr, flush=True))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _why_not(environ: Mapping[str, str], target: str, away: bool, gpus: bool) -> str | None:
    """Return why the application cannot have the pool's GPUs as those of its CUDA calls; None: it can."""
    if DRIVER in environ:
        return None
    if target == "cpu":
        return "with --target cpu no agent has a GPU: leave out one of the two"
    if environ.get(LAYER):
        return "this is already in a program of warpwell run, whose GPUs CUDA calls reach: leave out --cuda pool"
    if away:
        return None
    if not has_driver(environ):
        return "no CUDA driver is here: leave out --cuda pool"
    return None if gpus else "this host has no GPU: leave out --cuda pool"


def refused(folder: Path) -> str:
    """Return a sentence about what the application asked the driver for and the pool does not serve."""
    if not (folder / "cuda").is_dir():
        return "the program had the GPUs of this machine: --cuda pool says why"
    try:
        names = sorted(set((folder / "cuda" / "refused").read_text().splitlines()))  # some are sentences
    except OSError:
        return "all functions of the driver that the program called are served"
    return f"the program asked the driver for what the pool does not serve: {', '.join(names)}"


def ordinals(agents: Sequence[tuple[int, bool]]) -> dict[int, int]:
    """Return the application's number for the GPU of each agent, by rank: the first `MOST` have one.

    Parameters
    ----------
    agents : sequence of (int, bool)
        The rank of each, and whether it has a GPU.
    """
    anyway = DRIVER in os.environ
    found = sorted(rank for rank, has_gpu in agents if has_gpu or anyway)
    return {rank: i for i, rank in enumerate(found[:MOST])}


def wanted() -> dict[str, Any] | None:
    """Return the settings of the launcher in `JOB`, or None, and remove the variable."""
    text = os.environ.pop(JOB, None)
    return None if text is None else json.loads(text)


def serve(about: Mapping[str, Any], ordinal: int, claim: Callable[[], Reservation] | None = None) -> DriverServer:
    """Serve this agent's GPU as a device of the application; return the server, which lives as long as the agent.

    The first context waits for the reservation that `claim` returns.
    """
    parts = build.Built(Path(about["layer"]), Path(about["worker"]), None)
    return DriverServer(
        [_device(about, ordinal)],
        driver=about["driver"],
        folder=about["folder"],
        first=ordinal,
        parts=parts,
        claim=claim,
    )


def serve_away(
    about: Mapping[str, Any], ordinal: int, claim: Callable[[], Reservation] | None = None
) -> tuple[DriverServer, Path]:
    """Serve this agent's GPU to the communicator of another host; return the server and the native part for it.

    Raises
    ------
    DriverBuildError
        The native parts are not on this host, and cannot be built.
    """
    parts = build.parts()
    if parts.worker is None or parts.relay is None:
        raise DriverBuildError("the driver layer for CUDA programs is not in this installation")
    device = _device(about, ordinal)
    made = DriverServer([device], driver=about["driver"], first=ordinal, parts=parts, claim=claim)
    return made, parts.relay


def _device(about: Mapping[str, Any], ordinal: int) -> str:
    return str(ordinal) if about["driver"] else "0"  # `visible` made the agent's GPU the first
