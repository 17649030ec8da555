"""`connect`: how a process that the launcher started joins the others."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable

from ...errors import ArgumentError
from ..transport.transport import Transport
from .lifeline import Lifeline

TRANSPORT = "WARPWELL_POOL_TRANSPORT"
"""``module:function``. The function gets the transport of a process and returns its replacement."""

joined = False
"""Whether this process is one of a job."""

_OF_LAUNCHERS = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "WARPWELL_POOL_")
_KEPT = ("WARPWELL_POOL_TIMEOUT", "WARPWELL_POOL_STALL")


def connect(lifeline: Lifeline, start: float = 30.0) -> Transport:
    """Enter MPI and return a transport to all other processes of the job. All of them must call it.

    Raises
    ------
    AgentError, PoolVersionError
        See `MpiTransport`.
    ArgumentError
        See `named_transport`.
    """
    global joined
    from ..transport.mpi_progress import compiled_loop  # slow: it loads LLVM; the launcher knows of the process by now

    lifeline.tell(compiling=True)
    compiled_loop()
    lifeline.tell(compiling=False)
    memory = lifeline.shared_memory()
    if memory is not None:
        os.environ["OMPI_MCA_btl_sm_backing_directory"] = memory
    import mpi4py

    mpi4py.rc.finalize = False  # it would wait forever for those who died; whoever ends leaves by os._exit
    from ..transport.mpi_transport import MpiTransport

    made: Transport = MpiTransport(start=start)
    joined = True
    lifeline.tell(mapped=_mapped())
    lifeline.on("lost", lambda said: made.lose(said["lost"], "its process ended"))
    name = os.environ.get(TRANSPORT)
    return named_transport(name)(made) if name else made


def named_transport(name: str) -> Callable[[Transport], Transport]:
    """Import the function that ``WARPWELL_POOL_TRANSPORT`` names.

    Parameters
    ----------
    name : str
        ``module:function``.

    Raises
    ------
    ArgumentError
        If the module or the function does not exist.
    """
    module, _, function = name.partition(":")
    try:
        found: Callable[[Transport], Transport] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ArgumentError(f"{TRANSPORT} must be module:function, got {name!r}: {error}", name=TRANSPORT) from error
    return found


def forget_launcher() -> None:
    """Take out of the environment what belongs to this process alone: programs that it starts are no ranks."""
    for name in list(os.environ):
        if name.startswith(_OF_LAUNCHERS) and name not in _KEPT:
            del os.environ[name]


def _mapped() -> list[str]:
    """Return the files in shared memory that MPICH has made, and would remove at an end that is never reached."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        paths = {line.rstrip("\n").partition("/")[2] for line in lines}
    return sorted("/" + path for path in paths if path.startswith("dev/shm/mpich"))
