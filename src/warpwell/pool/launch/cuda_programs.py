"""Connects CUDA calls of the program to the GPUs of the agents: the parts of launcher, supervisor and agents.

The launcher makes a folder inside the job's folder. An agent of this host that has a GPU serves its GPU there; the
communicator serves the GPUs of other hosts (``pool/cuda``). The supervisor starts the program in an environment in
which the CUDA driver is the layer. Agents keep the real driver.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...driver import DriverServer, build, examine_program, is_compiled, make_library_folder, uses_cuda
from ...driver.environment import FOLDER as LAYER
from ...driver.environment import changes
from ...errors import DeviceNotFoundError, DriverBuildError
from ...libcuda import driver
from .gpus import has_driver
from .options import RunOptions
from .reservation import Reservation

JOB = "WARPWELL_POOL_CUDA"
"""Variable with settings for supervisor and agents as JSON: the program's environment, and the native parts."""
DRIVER = "WARPWELL_CUDA_DRIVER"
"""Variable with a driver library. Each agent without a GPU serves one of its devices; for tests."""
MAX_DEVICES = 64
"""Maximum number of devices of a program, which is the number of address ranges."""
_EXIT = "WARPWELL_CUDA_EXIT"
"""Variable that makes the layer end a process whose CUDA runtime does not support pooled GPUs."""
_NOTES = "WARPWELL_CUDA_REFUSED"
"""Variable with a file to which the layer writes the names of functions that it refuses."""

_NO_DRIVER = "this host has no CUDA driver"
_OTHER_HOSTS = "name hosts with GPUs in --hosts, or omit --cuda pool to run only Warpwell's kernels"

_COMPILE_NOTE_SECONDS = 1.0
"""Duration of the compilation of the layer, in seconds, after which a note reports it."""


def prepare(options: RunOptions, folder: Path, environ: Mapping[str, str], away: bool) -> str | None:
    """Make the folder, and return the value of `JOB`, or None if the program uses the GPUs of this machine.

    Parameters
    ----------
    options : RunOptions
    folder : Path
        The folder of the job.
    environ : mapping
        The program's environment.
    away : bool
        Whether some agents are on other hosts.

    Raises
    ------
    DeviceNotFoundError, DriverBuildError
        ``options.cuda`` is "pool", but the program cannot use the GPUs of the pool.
    """
    obstacle = _obstacle(options, environ, away)
    if options.cuda == "local" or (options.cuda == "auto" and obstacle):
        return None
    if obstacle:
        raise DeviceNotFoundError(f"--cuda pool is not possible: {'; '.join(obstacle)}", device="cuda")
    line = "warpwell: compiling the layer for CUDA programs, once on this machine (about 10 s)"
    timer = threading.Timer(_COMPILE_NOTE_SECONDS, lambda: print(line, file=sys.stderr, flush=True))
    timer.start()
    try:
        parts = build.parts()
    except DriverBuildError:
        if options.cuda == "pool":
            raise
        return None
    finally:
        timer.cancel()
    served = folder / "cuda"
    served.mkdir(mode=0o700)
    make_library_folder(served, parts.layer)
    changed = changes(served)  # the supervisor adds the library path of mpiexec
    if options.cuda == "auto":  # "pool" also serves programs that need no GPU
        changed[_EXIT] = "1"
    if options.explain_refused:
        changed[_NOTES] = str(served / "refused")
    settings = {"environ": changed, "parts": str(parts.layer.parent), "folder": str(served)}
    return json.dumps(settings | {"driver": environ.get(DRIVER)})


def refusal(command: Sequence[str], options: RunOptions, environ: Mapping[str, str], away: bool) -> str | None:
    """Return a line with the reason why a compiled program cannot use the pool's GPUs, or None.

    `command` is the program; the other parameters are those of `prepare`.
    """
    if options.cuda == "local" or _obstacle(options, environ, away) or not is_compiled_program(command):
        return None
    return examine_program(command[0], environ.get("LD_LIBRARY_PATH", ""))[0]


def missing_driver(command: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Return a line if a compiled program is linked with CUDA and this host has no driver, or None.

    Such a program starts nevertheless, because it may use CUDA only if a driver exists.
    """
    if driver() is not None or not is_compiled_program(command):
        return None
    if not uses_cuda(command[0], environ.get("LD_LIBRARY_PATH", "")):
        return None
    return f"{command[0]} uses CUDA, which needs an NVIDIA driver, and {_NO_DRIVER}; install a driver"


def is_compiled_program(command: Sequence[str]) -> bool:
    """Return True if a command of `warpwell run` is a compiled program and not Python code."""
    return command[0] not in ("-c", "-m") and is_compiled(command[0])


def program_environ(program: str) -> dict[str, str]:
    """Return this process's environment for a compiled program: its DT_RPATH must not hide the job's libraries."""
    environ = dict(os.environ)
    if folder := environ.get(LAYER):
        _, hidden = examine_program(program, environ.get("LD_LIBRARY_PATH", ""))
        preload = [*(f"{folder}/lib/{name}" for name in hidden), environ.get("LD_PRELOAD", "")]
        environ |= {"LD_PRELOAD": ":".join(filter(None, preload))} if hidden else {}
    return environ


def _obstacle(options: RunOptions, environ: Mapping[str, str], away: bool) -> tuple[str, str] | None:
    """Return the reason why CUDA calls of the program cannot reach the pool's GPUs, and the next step, or None."""
    if DRIVER in environ:
        return None
    if options.target == "cpu":
        return "no agent has a GPU with --target cpu", "omit one of the two options"
    if environ.get(LAYER):
        return "this process runs in a program of warpwell run and uses the GPUs of its pool", "omit --cuda pool"
    if away and options.cuda == "pool":  # this host needs no driver
        return None
    if not has_driver(environ):
        return _NO_DRIVER, f"install NVIDIA's driver, {_OTHER_HOSTS}"
    return None if options.gpus else ("this host has no GPU", _OTHER_HOSTS)


def describe_refused(folder: Path, options: RunOptions, environ: Mapping[str, str], away: bool) -> str:
    """Return a sentence about the functions of the CUDA driver that the program requested without success.

    The parameters are those of `prepare`.
    """
    if not (folder / "cuda").is_dir():
        reason, _ = _obstacle(options, environ, away) or ("the layer cannot be built (--cuda pool reports why)", "")
        reason = "--cuda local was given" if options.cuda == "local" else reason
        return f"no CUDA call of the program went to the pool, because {reason}"
    try:
        names = sorted(set((folder / "cuda" / "refused").read_text().splitlines()))  # some names are sentences
    except OSError:
        return "the pool supports all functions of the CUDA driver that the program called"
    return f"the pool does not support these requests of the program to the CUDA driver: {', '.join(names)}"


def ordinals(agents: Sequence[tuple[int, bool]]) -> dict[int, int]:
    """Return the program's ordinal for the GPU of each agent, by rank, for at most `MAX_DEVICES` agents.

    Parameters
    ----------
    agents : sequence of (int, bool)
        Rank of each agent, and whether it has a GPU.
    """
    ranks = sorted(rank for rank, has_gpu in agents if has_gpu or DRIVER in os.environ)
    return {rank: i for i, rank in enumerate(ranks[:MAX_DEVICES])}


def take_settings() -> dict[str, Any] | None:
    """Return the settings of the launcher in `JOB`, or None, and remove the variable."""
    text = os.environ.pop(JOB, None)
    return None if text is None else json.loads(text)


def native_parts(settings: Mapping[str, Any]) -> build.Built:
    """Return the native parts that the launcher has built on this host."""
    return build.find_parts(Path(settings["parts"]))


def make_server(
    settings: Mapping[str, Any], ordinal: int, claim: Callable[[], Reservation] | None, *, away: bool
) -> tuple[DriverServer, Path]:
    """Serve this agent's GPU as a device of the program. The first context waits for the reservation of `claim`.

    Parameters
    ----------
    settings : mapping
        See `take_settings`.
    ordinal : int
    claim : callable, optional
    away : bool
        Whether the program is on another host: its communicator connects to the server, which does not listen.

    Returns
    -------
    DriverServer, Path
        The server, and the path of the native library for the communicator.

    Raises
    ------
    DriverBuildError
        The native parts cannot be built on this host.
    """
    parts = build.parts() if away else native_parts(settings)
    device = str(ordinal) if settings["driver"] else "0"  # `visible` has made the agent's GPU the first GPU
    folder = None if away else settings["folder"]
    server = DriverServer(device, ordinal, parts, driver=settings["driver"], folder=folder, claim=claim)
    return server, parts.relay
