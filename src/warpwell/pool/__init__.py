"""Every GPU of a cluster as a local device: one agent process for each device, called by one ordinary program.

In the order in which a call passes them; see ``docs/pool.md``:

    devices.py       Devices, `devices()`, the current device, and the device of a launch
    device.py        Device, Buffer, Remote, Stream, Event: the program's objects
    lease.py         Lease: exclusive use of devices among the threads of a program
    spares.py        Spares: agents whose devices join and leave
    host_memory.py   `pinned_empty`: host arrays that agents map; HostArrays: NumPy arguments of a launch
    copies.py        copies to a device, from a device and between two; large arguments of calls
    tuning.py        Tuning, CopyPlan: the chunks of copies
    caller.py        AgentConnection: numbers and sends calls to one agent; Caller: receives the messages of agents
    channel.py       Channel: the calls of one stream that are in flight, and those that failed
    reply.py         Reply, ArrayReply, CallResult: futures of an agent's replies
    transport/       messages and bulk data between processes: MPI, or within one process
    agent/           the process of one device: receives calls and runs them in the order of their streams
    cuda/            CUDA programs on devices of other hosts: the communicator process and the agents' side
    launch/          starts the processes of a job, detects their exits, and cleans up
"""

from functools import cache
from typing import TYPE_CHECKING, Any

from .. import registry
from .._check import extra

if TYPE_CHECKING:
    from .agent.code import Code
    from .agent.protocol import pack_arguments
    from .device import Buffer, Device, Remote, Stream
    from .devices import broadcast, current_device, empty, empty_like, to_device, zeros
    from .host_memory import HostArrays, pinned_empty
    from .launch.gpus import list_gpus
    from .launch.hosts import Host, assign_agents, is_here, parse_hosts, read_hostfile
    from .launch.kernel_spec import KernelSpec, kernels_folder
    from .launch.launcher import Launcher
    from .launch.options import RunOptions
    from .launch.reservation import users
    from .launch.slurm import Allocation, is_configured, use_job
    from .reply import CallResult
    from .tuning import Tuning

__all__ = ["Tuning", "communicator"]

_FROM = {
    "tuning": "Tuning",
    "launch.kernel_spec": "KernelSpec kernels_folder",
    "device": "Buffer Device Remote Stream",
    "launch.launcher": "Launcher",
    "launch.options": "RunOptions",
    "agent.code": "Code",
    "devices": "broadcast current_device empty empty_like to_device zeros",
    "launch.hosts": "Host assign_agents is_here parse_hosts read_hostfile",
    "launch.gpus": "list_gpus",
    "launch.reservation": "users",
    "launch.slurm": "Allocation is_configured use_job",
    "host_memory": "HostArrays pinned_empty",
    "reply": "CallResult",
    "agent.protocol": "pack_arguments",
}
"""Modules that are imported when one of their names is first used; the launcher does not need all of them."""

if not TYPE_CHECKING:
    _HOMES = {name: f"{module}:" for module, names in _FROM.items() for name in names.split()}
    __getattr__, __dir__ = registry.on_first_use(__name__, _HOMES)


@cache
def communicator() -> Any:
    """Return an mpi4py communicator of the program's own processes, without the agents.

    Under ``warpwell run``, the program is one process, so the communicator has one rank; ``MPI.COMM_WORLD`` also
    includes the agents, which do not join collectives. In other programs, this is ``MPI.COMM_WORLD``.

    Raises
    ------
    ImportError
        mpi4py is not installed: install the extra ``mpi``.
    """
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ImportError(f"mpi4py cannot be imported ({error}): install {extra('mpi')}") from None

    from .launch import member

    return MPI.COMM_SELF.Dup() if member.joined else MPI.COMM_WORLD
