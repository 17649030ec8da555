"""`RunOptions`: the options of a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .hosts import Host

START_SECONDS = 30.0
"""Default time in which all processes must become ready."""


@dataclass(frozen=True)
class RunOptions:
    """Options of a job.

    Parameters
    ----------
    hosts : sequence of Host
        Each with its number of agents; see `warpwell.pool.launch.hosts.assign_agents`.
    target : {"auto", "cpu", "cuda"}
    share_gpu : bool
        Whether several agents may use one GPU.
    ft : bool
        Whether the job continues after the loss of an agent.
    tcp : bool
        Whether processes use sockets only, and no shared memory.
    trace : str, optional
        File for statistics of calls.
    notebook : bool
        Whether the program is a kernel of Jupyter: interrupts never end it, it shows the output of agents, and the job
        ends with Jupyter.
    start : float
        Time in seconds in which all processes must become ready.
    mpiexec : str, optional
        Path of mpiexec; by default the mpiexec of this Python's environment, or on PATH.
    cuda : {"auto", "pool", "local"}
        GPUs for the CUDA calls of the program itself: of the pool, or of this machine. With "auto", of the pool if
        there is a CUDA driver, agents may have GPUs, and the layer can be built.
    explain_refused : bool
        Whether to print at the end which functions of the CUDA driver the program called without success.
    gpus : bool
        Whether this host may have GPUs; otherwise, the layer for CUDA calls is not built.
    wait : float
        Time in seconds that the job, or a CUDA program of it, may wait for GPUs that other jobs use.
    allocate : {"start", "use"}
        When a GPU is claimed: before the program runs, or when it opens its first context there or leases the device.
    idle : float, optional
        Time in seconds without calls after which a device leaves that holds no objects and is not leased.
    """

    hosts: Sequence[Host] = (Host("localhost", 1),)
    target: str = "auto"
    share_gpu: bool = False
    ft: bool = True
    tcp: bool = False
    trace: str | None = None
    notebook: bool = False
    start: float = START_SECONDS
    mpiexec: str | None = None
    cuda: str = "auto"
    explain_refused: bool = False
    gpus: bool = True
    wait: float = 0.0
    allocate: str = "start"
    idle: float | None = None

    @property
    def agents(self) -> int:
        """The number of agents on all hosts."""
        return sum(host.agents or 1 for host in self.hosts)
