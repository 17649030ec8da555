"""Every GPU of a cluster as a local device: agents, one a device, that one ordinary program calls.

In the order in which a call meets them; see ``docs/pool.md``:

    devices.py       Devices, `devices()`, the current device; decides on which device a launch runs
    device.py        Device, Buffer, Stream, Event: what the program holds
    lease.py         Lease: devices that no other thread of the program has leased
    host_memory.py   `pinned_empty`: arrays that devices read and write themselves; NumPy arguments of a launch
    copies.py        copies: to a device, from a device, between two; large arguments of calls
    tuning.py        Tuning, CopyPlan: the chunks of copies
    caller.py        AgentConnection: numbers and sends calls to one agent; Caller: receives what agents answer
    channel.py       Channel: the calls of one stream that are under way, and those that failed
    reply.py         Reply, Answer: what an agent answers to one request
    result.py        CallResult: what a function that was called on a device returns
    transport/       messages and bulk data between processes: MPI, in one process
    agent/           the process of one device: receives calls, and executes them in the order of their streams
    cuda/            CUDA calls of the program itself reach devices of other hosts: the communicator and the agents' end
    launch/          starts the processes of a job, notices when one dies (an agent, the program), and clears up
    several.py       `several`: lists in messages, shortened
"""

from functools import cache
from typing import TYPE_CHECKING, Any

from .. import registry
from .._check import extra

if TYPE_CHECKING:
    from .agent.code import Code
    from .agent.protocol import pack_arguments
    from .device import AgentObject, Buffer, Device, Stream
    from .devices import broadcast, current_device, empty, empty_like, to_device, zeros
    from .host_memory import HostArrays, pinned_empty
    from .launch.gpus import list_gpus
    from .launch.hosts import Host, is_here, parse_hosts, place, read_hostfile, slurm_hosts
    from .launch.kernel_spec import KernelSpec, kernels_folder
    from .launch.launcher import Launcher, RunOptions
    from .launch.reservation import users
    from .result import CallResult
    from .tuning import Tuning

__all__ = ["Tuning", "communicator"]


@cache
def communicator() -> Any:
    """Return an mpi4py communicator of the application alone, without the agents.

    Under ``warpwell run`` the application is one process, and so this one has one rank; ``MPI.COMM_WORLD`` includes the
    agents there, who take part in nothing. Elsewhere it is ``MPI.COMM_WORLD``.

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


_FROM = {
    "tuning": "Tuning",
    "launch.kernel_spec": "KernelSpec kernels_folder",
    "device": "AgentObject Buffer Device Stream",
    "result": "CallResult",
    "launch.launcher": "Launcher RunOptions",
    "agent.code": "Code",
    "devices": "broadcast current_device empty empty_like to_device zeros",
    "launch.hosts": "Host is_here parse_hosts place read_hostfile slurm_hosts",
    "launch.gpus": "list_gpus",
    "launch.reservation": "users",
    "host_memory": "HostArrays pinned_empty",
    "agent.protocol": "pack_arguments",
}
"""Names of modules that are imported when a name is first used."""

if not TYPE_CHECKING:  # the launcher does not need all of them
    _HOMES = {name: f"{module}:" for module, names in _FROM.items() for name in names.split()}
    __getattr__, __dir__ = registry.on_first_use(__name__, _HOMES)
