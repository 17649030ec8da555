"""`Launcher`: starts an application and its agents, and ends all of them for any end of the application."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import signal
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from queue import Empty
from typing import Any

from ..._check import extra
from ..._os import clock, uninterrupted
from ...errors import AgentError, PoolVersionError
from . import cuda_programs, supervise
from .gpus import assign
from .hosts import is_here
from .job_files import JOB, JobFiles
from .job_output import FOLDER, AgentOutput, MpiexecOutput, standard_input
from .listener import Connection, Listener, Observer
from .mpiexec import Mpiexec, Ranks, root_allowed
from .options import RunOptions
from .reservation import WAIT
from .slurm import Allocation, step_environ
from .versions import difference

_EXIT_REASON_SECONDS = 1.0
"""Time in seconds in which the reason for the end of a process must arrive."""
_REVOKED_SECONDS = 30.0
"""Time in seconds that an application has to exit when its allocation has ended, as in Slurm (KillWait)."""
_END_SECONDS = 10.0
"""Time in seconds that supervisors have to end their members; they need less."""
_LOST_MPIEXEC = 195
"""Status with which PMIx ends a process whose mpiexec has exited (PMIX_ERR_LOST_CONNECTION, -61, as eight bits)."""
_COMPILE_SECONDS = 600.0
"""Additional seconds for the start while processes compile the code that moves data, once on a machine."""
_TICK = 0.1
_MAX_CONNECT_SECONDS = 5.0
"""Maximum seconds between the connections of two supervisors of this host, which MPI starts in direct succession."""
_MAX_INTERRUPTS, _INTERRUPT_SECONDS = 2, 3.0
"""After this number of Ctrl-C, each within this number of seconds of the previous, the launcher ends the
application."""


class Launcher:
    """Runs one job.

    Parameters
    ----------
    command : sequence of str
        The application: a Python file or a compiled program and its arguments, or ``-m``, a module and its arguments.
    options : RunOptions
    allocation : Allocation, optional
        If Slurm revokes it, the job ends.
    """

    def __init__(self, command: Sequence[str], options: RunOptions, allocation: Allocation | None = None) -> None:
        self._command, self._options, self._allocation = list(command), options, allocation
        self._hosts: dict[int, str] = {}
        self._connections: list[Connection] = []  # of supervisors
        self._ranks: dict[int, Connection] = {}
        self._phase = "join"
        self._by_host: dict[str, list[Connection]] = defaultdict(list)
        self._unreserved: list[list[Connection]] = []
        self._status: int | None = None
        self._interrupts, self._interrupted = 0, 0.0
        self._end: tuple[float, AgentError | int] | None = None
        self._allowance = options.start
        self._checked, self._connected = 0.0, math.inf
        self._observers: list[Observer] = []
        self._communicator: int | None = None  # rank of the process that forwards CUDA calls to other hosts
        # Jupyter sets the variable for kernels that must end with it; a wrapper may be between Jupyter and this process
        self._parent = os.getppid() if options.notebook and os.environ.get("JPY_PARENT_PID") else None

    def run(self) -> int:
        """Run the job until the application and all other processes have ended; return the exit status.

        Raises
        ------
        AgentError
            A process did not become ready, or the job cannot continue without a lost agent.
        """
        options = self._options
        away = any(not is_here(host.name) for host in options.hosts)
        refusal = cuda_programs.refusal(self._command, options, os.environ, away)
        if refusal is not None:
            print(f"warpwell: error: {refusal}", file=sys.stderr)
            return 1
        if importlib.util.find_spec("mpi4py") is None:
            raise AgentError(f"mpi4py is not installed: install {extra('mpi')}")
        self._mpiexec = Mpiexec.find(options.mpiexec)
        self._ft = options.ft and self._mpiexec.survives
        self._hosts = dict(enumerate((host.name for host in options.hosts for _ in range(host.agents or 1)), 1))
        self._files = JobFiles.of_new_job()
        with self._mpiexec_supervisor() as connected:
            self._files.make()
            if options.notebook:
                AgentOutput(self._files.folder).make()
            self._listener = Listener(self._files, away)
            supervisor = self._listener.serve(connected)
            with self._signals(), standard_input() as self._stdin:
                try:
                    return self._run(supervisor, away)
                finally:
                    self._stop()
                    if options.explain_refused:
                        text = cuda_programs.describe_refused(self._files.folder, options, os.environ, away)
                        print(f"warpwell: {text}", file=sys.stderr)

    @contextlib.contextmanager
    def _mpiexec_supervisor(self) -> Iterator[socket.socket]:
        """Start the supervisor of mpiexec, and yield the connection to it; at the end remove the files of the job.

        The supervisor starts before the files are created, so that it removes them even if this process is killed.
        """
        connected, inherited = socket.socketpair()
        paths = os.pathsep.join(map(str, [self._files.folder, self._files.memory]))
        with connected, inherited:
            self._process = subprocess.Popen(
                _supervised("mpiexec", [], paths),
                env={**os.environ, supervise.ADDRESS: f"fd:{inherited.fileno()}", supervise.TOKEN: ""},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=0,
                pass_fds=[inherited.fileno()],
            )
            inherited.close()
            assert self._process.stdout is not None and self._process.stderr is not None
            self._output = MpiexecOutput([(self._process.stdout, 1), (self._process.stderr, 2)])
            try:
                yield connected
            finally:
                with uninterrupted():  # without the supervisor, this process alone removes the files
                    self._process.kill()
                    self._process.wait()
                    self._files.remove()

    def _run(self, supervisor: Connection, away: bool) -> int:
        environ = self._environ(away)
        ranks, folder = self._ranks_to_start(away), str(self._files.folder)
        command = self._mpiexec.line(ranks, environ, ft=self._ft, tcp=self._options.tcp, folder=folder)
        command = step_environ(os.environ, self._options.hosts) + command
        start = clock.monotonic()
        supervisor.send(run=command, environ=dict(environ.items() - os.environ.items()))
        while self._status is None:
            with contextlib.suppress(Empty):
                connection, message = self._listener.events.get(timeout=_TICK)
                if connection is not None:
                    self._on_message(connection, message)
                elif message is not None:
                    self._on_signal(int(message["signal"]))
            if self._status is None and self._end is not None and clock.monotonic() > self._end[0]:
                if isinstance(self._end[1], AgentError):
                    raise self._end[1]
                self._status = self._end[1]
            if self._status is None and self._parent not in (None, os.getppid()):
                self._status = -signal.SIGHUP
            if self._allocation is not None and self._allocation.is_revoked():
                self._on_revocation()
            if self._process.poll() is not None:
                self._on_mpiexec_end(self._process.returncode)
            self._observers = [o for o in self._observers if not o.answer()]
            if self._phase != "running" and self._status is None:
                self._check_start(clock.monotonic() - start)
        return self._status if self._status >= 0 else 128 - self._status

    # -- what happens ------------------------------------------------------------------------------------------

    def _on_message(self, connection: Connection, message: dict[str, Any] | None) -> None:
        if message is None:
            self._on_close(connection)
            return
        connection.facts.update(message)
        if "here" in message:
            self._on_connect(connection)
        elif "joined" in message:
            self._start_when_joined()
        elif "note" in message:
            print(f"warpwell: {message['note']}", file=sys.stderr, flush=True)
        elif "reserved" in message:
            self._reserve_next()
        elif "fatal" in message:
            raise AgentError(message["fatal"])
        elif "ready" in message:
            if self._phase == "ready" and all(c.facts.get("ready") for c in self._ranks.values()):
                self._phase = "running"
                self._ranks[0].send(start=True)
                if self._options.notebook:
                    with contextlib.suppress(OSError):  # the notebook's kernel has ended
                        self._output.targets = AgentOutput(self._files.folder).writers()
        elif "failed" in message:
            if self._phase != "running":
                member = self._name(connection.rank)
                raise AgentError(f"{member} cannot start: {message['failed']}", agent=member)
        elif "status" in message:
            self._on_status(connection, int(message["status"]))

    def _on_connect(self, connection: Connection) -> None:
        if connection.role == "observer":
            self._observers.append(Observer(connection, [c for c in self._ranks.values() if c.role == "agent"]))
            return
        self._connections.append(connection)
        if connection.role == "application":
            connection.pass_files([self._stdin, 1, 2])
        if connection.role != "mpiexec":
            self._ranks[connection.rank] = connection
            self._connected = clock.monotonic()

    def _on_close(self, connection: Connection) -> None:
        connection.is_open = False
        if connection.role == "observer" or "status" in connection.facts:
            return
        connection.kill()
        if connection.role == "application":
            # there is no status, because its supervisor was killed, or mpiexec has ended it after the loss of an agent
            self._fail(-signal.SIGKILL, 0.0 if self._ft else _EXIT_REASON_SECONDS)
        elif connection.role != "mpiexec":
            self._on_loss(connection)

    def _on_status(self, connection: Connection, status: int) -> None:
        if connection.role == "mpiexec":
            self._on_mpiexec_end(status)
        elif connection.role != "application":
            self._on_loss(connection)
        elif status == _LOST_MPIEXEC:
            self._fail(status)  # the status of mpiexec is more precise, and may arrive later
        else:
            self._status = status

    def _on_mpiexec_end(self, status: int) -> None:
        if self._end is None or isinstance(self._end[1], int):
            self._output.settle()
            self._fail(AgentError(f"mpiexec ended with status {status}{self._output.messages()}"))

    def _on_loss(self, connection: Connection) -> None:
        agent = self._name(connection.rank, connection.facts.get("pid"))
        if self._phase != "running":
            raise AgentError(f"{agent} ended before it was ready{self._output.messages()}", agent=agent)
        if not self._ft:
            reason = connection.facts.get("failed", "its process ended")
            advice = "omit --no-ft" if self._mpiexec.survives else "use Open MPI"
            text = f"{agent} is lost ({reason}); to continue after a loss, {advice}"
            self._fail(AgentError(text, agent=agent))
        for each in self._ranks.values():  # MPI may report an exited agent late or never
            if each is not connection and each.is_open:
                each.send(lost=connection.rank)

    def _on_revocation(self) -> None:
        """Ask the application to exit, as Slurm does, and end the job some time later."""
        self._allocation = None
        text = "Slurm has ended the allocation, which was cancelled or has reached its time limit"
        print(f"warpwell: {text}", file=sys.stderr, flush=True)
        self._on_signal(signal.SIGTERM)
        self._fail(-signal.SIGTERM, _REVOKED_SECONDS)

    def _fail(self, why: AgentError | int, seconds: float = _EXIT_REASON_SECONDS) -> None:
        """End the job with this result after `seconds`, because the status of an ended application may still arrive."""
        if self._end is None or isinstance(self._end[1], int):
            self._end = (clock.monotonic() + seconds, why)

    def _start_when_joined(self) -> None:
        if self._phase != "join" or sum("joined" in c.facts for c in self._ranks.values()) < self._count():
            return
        for connection in self._ranks.values():
            if differences := difference(connection.facts["joined"].get("versions", {})):
                raise PoolVersionError(
                    f"{self._name(connection.rank, connection.facts.get('pid'))} has other versions than the launcher "
                    f"on {socket.gethostname()}: {differences}; install the same versions on every host"
                )
        self._phase = "reserve"
        for connection in sorted(self._ranks.values(), key=lambda c: (c.facts["host"], c.rank)):
            if connection.role == "agent":
                self._by_host[connection.facts["host"]].append(connection)
        options = self._options
        if options.target != "cpu" and options.allocate == "start" and not options.share_gpu:
            self._unreserved = [found for found in self._by_host.values() if found[0].facts["joined"]["gpus"]]
        self._reserve_until = clock.monotonic() + options.wait
        self._reserve_next()

    def _reserve_next(self) -> None:
        """Let the next host reserve its GPUs. When all hosts have reserved theirs, start all processes.

        Hosts reserve GPUs in the order of their names, so that two jobs cannot wait for each other.
        """
        if self._unreserved:
            found = self._unreserved.pop(0)
            wait = max(0.0, self._reserve_until - clock.monotonic())
            found[0].send(reserve={"count": len(found), "wait": wait})
            return
        options = self._options
        decided: dict[int, Any] = {}
        for host, found in self._by_host.items():
            facts, numbers = found[0].facts, [c.rank for c in found]
            used = facts["joined"]["used"]
            gpus = facts.get("reserved", sorted(facts["joined"]["gpus"], key=lambda uuid: uuid in used))
            if options.allocate == "use":
                chosen = assign(numbers, gpus, options.target, False, host)
                decided |= {rank: {**each, "joins": True} for rank, each in chosen.items()}
            else:
                decided |= assign(numbers, gpus, options.target, options.share_gpu, host)
        decided[0] = {"agents": options.agents, "idle": options.idle}
        ordinals = cuda_programs.ordinals([(rank, "uuid" in decided[rank]) for rank in self._hosts])
        for rank, ordinal in ordinals.items():
            decided[rank] = {**decided[rank], "cuda": ordinal, "away": not is_here(self._hosts[rank])}
        if self._communicator is not None:
            away = {n: (r, self._name(r)) for r, n in ordinals.items() if decided[r]["away"]}
            decided[self._communicator] = {"devices": away}
        self._phase = "ready"
        for connection in self._ranks.values():
            connection.send(go=decided.get(connection.rank, {}))

    def _check_start(self, seconds: float) -> None:
        """Raise AgentError if processes are not ready after the start timeout."""
        if self._phase == "reserve" or any(c.facts.get("compiling") for c in self._ranks.values()):
            longest = self._options.start + self._options.wait + _COMPILE_SECONDS
            self._allowance = min(self._allowance + seconds - self._checked, longest)
        self._checked = seconds
        if clock.monotonic() > self._connected + _MAX_CONNECT_SECONDS:
            for rank in range(self._count()):
                if rank not in self._ranks and is_here(self._hosts.get(rank, "localhost")):
                    agent = self._name(rank)  # the supervisor was killed before it connected
                    raise AgentError(f"{agent} ended before it was ready{self._output.messages()}", agent=agent)
        if seconds < self._allowance:
            return
        facts = {rank: self._ranks[rank].facts if rank in self._ranks else {} for rank in self._hosts}
        unready = [rank for rank in facts if not facts[rank].get("ready")]
        after = f"after {self._options.start:g} s"
        if not unready:
            communicator = self._ranks.get(self._communicator or 0)
            if self._communicator is not None and not (communicator and communicator.facts.get("ready")):
                agent = self._name(self._communicator)
                raise AgentError(f"not ready {after}: {agent}{self._output.messages()}", agent=agent)
            raise AgentError(f"the application was not ready {after}: use a longer --start-timeout")
        # some processes only wait for others, so name stopped processes first, then hosts that do not answer
        stopped = [rank for rank in unready if facts[rank].get("stopped")]
        unready = sorted(stopped or unready, key=lambda rank: (bool(facts[rank]), is_here(self._hosts[rank]), rank))
        first, hint = self._hosts[unready[0]], ", which is stopped" if len(stopped) == 1 else ""
        if not is_here(first) and not facts[unready[0]]:
            hint = f". Does `ssh {first}` work without a password, and is {sys.executable} there, too?"
        names = joined_names([self._name(rank, facts[rank].get("pid")) for rank in unready])
        raise AgentError(f"not ready {after}: {names}{hint}{self._output.messages()}", agent=self._name(unready[0]))

    def _count(self) -> int:
        """Return the number of ranks."""
        return 1 + self._options.agents + (self._communicator is not None)

    def _name(self, rank: int, pid: int | None = None) -> str:
        if rank == 0:
            return "the application"
        if rank == self._communicator:
            process = f" (process {pid})" if pid is not None else ""
            return f"the communicator of CUDA calls to other hosts{process}"
        host = socket.gethostname() if is_here(self._hosts[rank]) else self._hosts[rank]
        process = f", process {pid}" if pid is not None else ""
        return f"agent {rank} of {self._options.agents} (device {rank - 1}, on {host}{process})"

    # -- signals -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Pass signals of this process to the application."""
        before = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, lambda n, _: self._listener.events.put((None, {"signal": n})))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int) -> None:
        application = self._ranks.get(0)
        if self._options.notebook and number == signal.SIGINT:
            # each Ctrl-C only ends the running cell; during the start, no cell runs
            if self._phase == "running" and application is not None:
                application.send(signal=number)
            return
        now = clock.monotonic()
        self._interrupts = self._interrupts + 1 if now - self._interrupted < _INTERRUPT_SECONDS else 1
        self._interrupted = now
        if self._phase != "running" or application is None or self._interrupts >= _MAX_INTERRUPTS:
            self._status = -number
        else:
            application.send(signal=number)

    # -- the end -----------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """Let all supervisors end their members; kill supervisors and members that do not end."""
        self._listener.close()
        for connection in self._connections:
            connection.send(end=True)
        process = self._process
        until = clock.monotonic() + _END_SECONDS
        while (process.poll() is None or any(c.is_open for c in self._connections)) and clock.monotonic() < until:
            with contextlib.suppress(Empty):
                sender, message = self._listener.events.get(timeout=_TICK / 10)
                if sender is not None and message is None:
                    sender.is_open = False
                elif sender is not None and message is not None and "here" in message:
                    self._connections.append(sender)
                    sender.send(end=True)
        for connection in self._connections:
            if connection.is_open:
                connection.kill()
                connection.close()
        process.kill()
        process.wait()
        self._output.settle()

    # -- the line ----------------------------------------------------------------------------------------------

    def _ranks_to_start(self, away: bool) -> list[Ranks]:
        modules = [sys.executable, "-m"]
        program = _supervised("application", [*modules, "warpwell.pool.launch.application", *self._command])
        agent = _supervised("agent", [*modules, "warpwell.pool.agent.agent_main"])
        # the application runs on this host, which has the user's files and terminal
        found = [Ranks(1, program, socket.gethostname() if away else None)]
        found += [Ranks(h.agents or 1, agent, h.name if away else None) for h in self._options.hosts if h.agents]
        if self._communicator is not None:
            communicator = _supervised("communicator", [*modules, "warpwell.pool.cuda.communicator_main"])
            found.append(Ranks(1, communicator, socket.gethostname()))
        return found

    def _environ(self, away: bool) -> dict[str, str]:
        options = self._options
        found = root_allowed(os.environ)
        found |= {
            supervise.ADDRESS: self._listener.address,
            supervise.TOKEN: self._listener.token,
            WAIT: f"{math.ceil(options.wait)}",
            JOB: self._files.job,
        }
        if options.notebook:
            found[FOLDER] = str(self._files.folder)
        if options.trace is not None:
            found["WARPWELL_POOL_TRACE"] = os.path.abspath(options.trace)
        cuda = cuda_programs.prepare(options, self._files.folder, found, away)
        if cuda is None and options.cuda == "auto" and (note := cuda_programs.missing_driver(self._command, found)):
            print(f"warpwell: note: {note}", file=sys.stderr)
        if cuda is not None:
            found[cuda_programs.JOB] = cuda
            self._communicator = 1 + options.agents if away else None
        return found


def joined_names(texts: Sequence[str]) -> str:
    """Join texts for a message; if there are more than five, only the first four and the number of the rest."""
    return ", ".join(texts if len(texts) <= 5 else [*texts[:4], f"and {len(texts) - 4} more"])


def _supervised(role: str, command: Sequence[str], paths: str = "") -> list[str]:
    """Return the command of a supervisor that runs `command`, and removes `paths` at the end of the job."""
    return [sys.executable, "-I", "-S", supervise.__file__, role, paths, *command]
