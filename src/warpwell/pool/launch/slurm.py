"""Slurm: the hosts and GPUs of the job that this process is in, and `Allocation`, which waits for a job."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, MutableMapping, Sequence

from ..._os import end_with_parent
from ...errors import ArgumentError, PoolError
from .hosts import Host, expand, expand_list, is_here, slurm_hosts

VISIBLE = "CUDA_VISIBLE_DEVICES"

_QUERY_SECONDS = 20.0
_RELEASE_SECONDS = 10.0
"""Time that salloc has to release an allocation, after which it is killed."""
_DETAILS = re.compile(r"\bNodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)")
"""Nodes of a job and their resources, as in ``Nodes=n[1-2] CPU_IDs=0-3 Mem=0 GRES=gpu:a100:2(IDX:0-1)``."""
_INDICES = re.compile(r"\bgpu(?::[^:,()]+)*\(IDX:([\d,-]+)\)")
_COUNTS = re.compile(r"\bgpu(?::[^:,()]+)*:(\d+)")
_UNCONFIGURED = "Could not establish a configuration source"
"""Part of the error of a Slurm command on a host that has the package but does not belong to a cluster."""
_STEP_VARIABLES = (
    "SLURM_GPUS",
    "SLURM_GPUS_PER_NODE",
    "SLURM_GPUS_PER_SOCKET",
    "SLURM_GPUS_PER_TASK",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_TRES_PER_TASK",
)
"""Variables from which srun takes the GPUs of a step."""
_HOLDER = """import json, os, sys
print(json.dumps({"pid": os.getpid(), "environ": dict(os.environ)}), flush=True)
sys.stdin.read()"""
"""The program that salloc runs in an allocation. It ends when the process that started salloc closes the pipe."""


def use_job(environ: MutableMapping[str, str], target: str) -> list[Host]:
    """Return the hosts of the Slurm job; an empty list outside of a job.

    Slurm sets ``CUDA_VISIBLE_DEVICES`` in steps and batch scripts, but not for a command of salloc: this function sets
    it then to the GPUs of the job on this host.

    Parameters
    ----------
    environ : mapping
    target : {"auto", "cpu", "cuda"}
        With "cpu", agents use no GPUs, and their number does not depend on them.
    """
    gpus = _gpus(environ) or {}
    for node, indices in gpus.items():
        if is_here(node):
            environ.setdefault(VISIBLE, indices)
    counts = {} if target == "cpu" else {node: len(indices.split(",")) for node, indices in gpus.items() if indices}
    return slurm_hosts(environ, counts) or []


def step_environ(environ: Mapping[str, str], hosts: Sequence[Host]) -> list[str]:
    """Return the start of a command that gives the job's GPUs to a step that runs one process on each other host.

    mpiexec starts such a step with srun. Without these options, srun would give the step the GPUs of one task
    (``--gpus-per-task``), or fail because the step has fewer hosts than the job (``--gpus``).
    """
    gpus = _gpus(environ) or {}
    count = sum(len(indices.split(",")) for h in hosts if (indices := gpus.get(h.name)) and not is_here(h.name))
    if not count:
        return []
    return ["env", *(word for name in _STEP_VARIABLES for word in ("-u", name)), f"SLURM_GPUS={count}"]


def _gpus(environ: Mapping[str, str]) -> dict[str, str] | None:
    """Return the indices of the job's GPUs on each of its nodes, as in "0,2"; None if Slurm does not manage GPUs."""
    job = environ.get("SLURM_JOB_ID")
    return _gpus_of_job(job) if job and environ.get("SLURM_JOB_NODELIST") else None


@functools.cache
def _gpus_of_job(job: str) -> dict[str, str] | None:
    found: dict[str, str] = {}
    for nodes, resources in _DETAILS.findall(_query("scontrol", "-o", "-d", "show", "job", job)):
        indices = [index for text in _INDICES.findall(resources) for index in expand(f"[{text}]")]
        if resources and not indices:  # shares of GPUs, or resources without files
            return None
        found |= dict.fromkeys(expand_list(nodes), ",".join(indices))
    if any(found.values()):
        return found
    return found if re.search(r"\bGres=\S*gpu", _query("scontrol", "-o", "show", "node", ",".join(found))) else None


def is_configured() -> bool:
    """Return True if this host has salloc, and Slurm's commands find a configuration."""
    if shutil.which("salloc") is None:
        return False
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        ping = subprocess.run(
            ["scontrol", "ping"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_QUERY_SECONDS
        )
        return _UNCONFIGURED not in ping.stderr
    return True


class Allocation:
    """An allocation of Slurm for this process, until `close` or the end of the process.

    Parameters
    ----------
    tasks : int
    with_gpus : bool
        Whether each task needs a GPU.
    wait : float
        Time limit in seconds.
    options : str
        Further options for salloc.

    Raises
    ------
    ArgumentError
        All nodes together are too small.
    PoolError
        Slurm has not granted the request; salloc has written the reason on stderr.
    """

    def __init__(self, tasks: int, with_gpus: bool, wait: float, options: str) -> None:
        _check_size(tasks, with_gpus)
        command = ["salloc", f"--ntasks={tasks}", *(["--gpus-per-task=1"] if with_gpus else [])]
        command += [f"--immediate={math.ceil(wait)}", "--kill-command=TERM", *shlex.split(options)]
        self._salloc = subprocess.Popen(
            [*command, sys.executable, "-I", "-S", "-c", _HOLDER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C must reach only the program
            preexec_fn=functools.partial(end_with_parent, signal.SIGTERM),
        )
        assert self._salloc.stdout is not None
        self._holder: int | None = None  # a descriptor of the process
        try:
            # a plugin of the cluster may write lines before the JSON object
            granted = json.loads(next((line for line in self._salloc.stdout if line.startswith(b"{")), b"{}"))
            if not granted:
                raise PoolError(
                    f"Slurm has not granted {tasks} task{'s' * (tasks > 1)}{' with a GPU each' * with_gpus}, for the "
                    f"reason that salloc gives above; use fewer --agents, a longer --wait, other options in --slurm, "
                    f"or --hosts localhost to wait for this host's GPUs"
                )
        except BaseException:
            self._salloc.terminate()
            self.close()
            raise
        with contextlib.suppress(OSError):  # without pidfd_open, or after its exit, only salloc's exit shows the end
            self._holder = os.pidfd_open(granted["pid"])
        os.environ.update({name: text for name, text in granted["environ"].items() if name.startswith("SLURM")})

    def is_revoked(self) -> bool:
        """Return True if Slurm has ended the job: salloc or its command has exited.

        When Slurm revokes the allocation, salloc terminates its command, and may itself run for minutes after that.
        """
        holder = select.poll()
        if self._holder is not None:
            holder.register(self._holder, select.POLLIN)
        return self._salloc.poll() is not None or bool(holder.poll(0))

    def close(self) -> None:
        """Release the allocation."""
        assert self._salloc.stdin is not None and self._salloc.stdout is not None
        self._salloc.stdin.close()
        try:
            self._salloc.wait(_RELEASE_SECONDS)
        except subprocess.TimeoutExpired:
            self._salloc.kill()
            self._salloc.wait()
        self._salloc.stdout.close()
        if self._holder is not None:
            os.close(self._holder)
            self._holder = None

    def __enter__(self) -> Allocation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_size(tasks: int, with_gpus: bool) -> None:
    """Raise if all nodes of the cluster together are too small, because Slurm itself may let the job wait forever."""
    nodes = dict(re.findall(r"^(\S+) (.*)$", _query("sinfo", "-h", "-N", "-o", "%N %c %G"), re.MULTILINE))
    found = {"core": sum(int(text.split()[0]) for text in nodes.values())}
    if with_gpus:
        found["GPU"] = sum(int(count) for text in nodes.values() for count in _COUNTS.findall(text))
    for resource, count in found.items():
        if nodes and count < tasks:
            raise ArgumentError(
                f"{tasks} agents need a {resource} each, and all nodes of the Slurm cluster together have "
                f"{count or 'no'} {resource}{'s' * (count != 1)}: use fewer --agents"
                f"{', or --target cpu' * (resource == 'GPU')}",
                name="agents",
            )


def _query(*command: str) -> str:
    """Return the output of a command of Slurm, or nothing if it fails or does not exist, as in some containers."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        null = subprocess.DEVNULL
        return subprocess.run(
            command, stdin=null, stdout=subprocess.PIPE, stderr=null, text=True, timeout=_QUERY_SECONDS
        ).stdout
    return ""
