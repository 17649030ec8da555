"""`Member`: a process of a job, connected to its supervisor; `serve`: runs a process that serves the application."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from ...errors import AgentError, ArgumentError, WarpwellError
from ..transport.transport import Transport
from .job_files import JOB, JobFiles
from .reservation import WAIT
from .supervise import MEMBER, JsonLines
from .versions import versions

TRANSPORT = "WARPWELL_POOL_TRANSPORT"
"""``module:function``. The function gets the transport of a process and returns its replacement."""

joined = False
"""Whether this process belongs to a job."""

_GO_SECONDS = 600.0
"""Timeout in seconds for the launcher's decisions; longer than the launcher itself waits."""
_OF_LAUNCHERS = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "WARPWELL_POOL_")
_USER_VARIABLES = ("WARPWELL_POOL_TIMEOUT", "WARPWELL_POOL_STALL")


class Member(JsonLines):
    """A process of a job. Its supervisor kills it at the end of the job.

    Parameters
    ----------
    **facts
        Facts about this process for the launcher, such as its GPUs.
    """

    def __init__(self, **facts: Any) -> None:
        super().__init__(socket.socket(fileno=int(os.environ.pop(MEMBER))))
        self.socket.set_inheritable(False)
        self._messages = self.incoming()
        self._calls: list[tuple[str, Callable[[dict[str, Any]], Any]]] = []
        files = JobFiles(os.environ[JOB])
        self._memory = files.memory
        self.send(remove=[str(files.memory)])
        files.use()
        self.send(joined={"versions": versions(), **facts})

    def wait_for_go(self, reserve: Callable[..., list[str]] = list) -> dict[str, Any]:
        """Wait until all processes have joined; return the launcher's decisions for this process.

        No process enters MPI before all have joined, because MPI would wait forever for a process that has died.

        Parameters
        ----------
        reserve : callable
            Reserves GPUs of this host for the job and returns them; called if the launcher requests this.

        Raises
        ------
        AgentError
            The launcher sends nothing.
        """
        self.socket.settimeout(_GO_SECONDS + float(os.environ.get(WAIT, 0)))
        for message in self._messages:
            if "go" in message:
                self.socket.settimeout(None)
                threading.Thread(target=self._receive, name="warpwell member", daemon=True).start()
                decisions: dict[str, Any] = message["go"]
                return decisions
            if "reserve" not in message:  # an observer asks all agents; starting agents do not answer
                continue
            try:
                self.send(reserved=reserve(**message["reserve"]))
            except AgentError as error:
                self.send(fatal=str(error))
        raise AgentError("the launcher of this job does not answer: start the job again")

    def on(self, name: str, call: Callable[[dict[str, Any]], Any]) -> None:
        """Call ``call(message)`` for messages with this name, in the thread that receives them. It must not raise."""
        self._calls.append((name, call))

    def wait_for_start(self) -> None:
        """Report that this process is ready, and wait until all are. After that, the launcher forwards signals."""
        started = threading.Event()
        self.on("start", lambda _: started.set())
        self.send(ready=True)
        started.wait(_GO_SECONDS)

    def wait_for_end(self) -> None:
        """Wait until the supervisor ends this process.

        An earlier exit would make mpiexec end the application; and a program that the application has executed may use
        this device, but not MPI.
        """
        threading.Event().wait()

    def _receive(self) -> None:
        for message in self._messages:
            for name, call in list(self._calls):
                if name in message:
                    call(message)

    def connect(self) -> Transport:
        """Enter MPI and return a transport to all other processes of the job. All of them must call it.

        Raises
        ------
        PoolError
            See `MpiTransport`.
        ArgumentError
            See `named_transport`.
        """
        global joined
        from ..transport.mpi_transport import compiled_loop  # slow, because it loads LLVM

        self.send(compiling=True)
        compiled_loop()
        self.send(compiling=False)
        folder = os.environ.get("TMPDIR")
        if self._memory.is_dir():
            os.environ["OMPI_MCA_btl_sm_backing_directory"] = str(self._memory)
            os.environ["TMPDIR"] = str(self._memory)  # if mpiexec dies, Open MPI leaves a folder in the user's
        import mpi4py

        mpi4py.rc.finalize = False  # MPI would wait forever for processes that have exited
        from ..transport.mpi_transport import MpiTransport

        try:
            transport: Transport = MpiTransport()
        finally:
            if folder is None:
                os.environ.pop("TMPDIR", None)
            else:
                os.environ["TMPDIR"] = folder
        joined = True
        self.send(remove=_mpich_files())
        self.on("lost", lambda message: transport.lose(message["lost"], "its process ended"))
        name = os.environ.get(TRANSPORT)
        return named_transport(name)(transport) if name else transport


def serve(work: Callable[[Member], None], **facts: Any) -> NoReturn:
    """Call ``work(member)``, which does not return, and report its failure."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)  # the launcher handles signals
    member = Member(**facts)
    try:
        work(member)
    except WarpwellError as error:
        member.send(failed=str(error))
    except BaseException as error:
        member.send(failed=f"{type(error).__name__}: {error}")
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # MPI's own exit handler would wait for processes that have exited


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
    """Remove the variables of MPI and of the job from the environment: child processes are not ranks."""
    for name in list(os.environ):
        if name.startswith(_OF_LAUNCHERS) and name not in _USER_VARIABLES:
            del os.environ[name]


def _mpich_files() -> list[str]:
    """Return the files in shared memory of MPICH, which removes them only in MPI_Finalize."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = {line.rstrip("\n").partition("/")[2] for line in maps}
    return sorted("/" + path for path in paths if path.startswith("dev/shm/mpich"))
