"""`Launcher`: starts an application and its agents, and ends them all, however the application ends."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..._check import extra
from ...errors import AgentError
from ..several import several
from . import cuda_programs, lifeline
from .gpus import assign
from .hosts import Host, is_here
from .job_files import JobFiles
from .job_output import FOLDER, AgentOutput, MpiexecOutput, standard_input
from .mpiexec import Mpiexec, Ranks, root_allowed
from .processes import JOB, Children, kill_all, state_of, wait_until
from .rendezvous import JobProcess, Observer, Rendezvous

START = 30.0
"""Seconds that all processes have to become ready."""

_GRACE = 1.0
"""Seconds that processes have to end by themselves before they are killed."""
_LOST_MPIEXEC = 195
"""Status with which PMIx ends a process whose mpiexec is gone (PMIX_ERR_LOST_CONNECTION, -61, as eight bits)."""
_COMPILING = 600.0
"""Seconds more that processes have while some compile the code that moves data, once on a machine."""
_TICK = 0.1
_UNSEEN = 5.0
"""How long after the application an agent of this host may start: MPI starts them one right after the other."""
_IMPATIENT, _IN_A_ROW = 2, 3.0
"""The n-th Ctrl-C within so many seconds ends an application that has not ended by itself."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class RunOptions:
    """How to run an application.

    Parameters
    ----------
    hosts : sequence of Host
        Each with its number of agents; see `warpwell.pool.launch.hosts.place`.
    target : {"auto", "cpu", "cuda"}
    share_gpu : bool
        Several agents may use one GPU.
    ft : bool
        The job goes on when an agent is lost.
    tcp : bool
        Use no shared memory between processes.
    trace : str, optional
        File for the counts of calls.
    notebook : bool
        The application is a kernel of Jupyter: interrupts never end it, it shows what agents print, and the job ends
        when Jupyter does.
    start : float
        Seconds in which all processes must become ready.
    mpiexec : str, optional
        Path of mpiexec; by default that of this Python's environment, or the one on PATH.
    cuda : {"auto", "pool", "local"}
        Whose GPUs the application's own CUDA calls reach; see `cuda_programs.prepare`.
    explain_refused : bool
        Tell in the end which of the driver's functions the application called in vain.
    gpus : bool
        This host may have GPUs; without any, no layer for CUDA calls is built.
    wait : float
        Seconds that the job, or a CUDA program of it, may wait for GPUs that other jobs use.
    allocate : {"start", "use"}
        When a GPU is claimed: before the program runs, or when it opens its first context there. With "use" agents are
        CPU devices.
    """

    hosts: Sequence[Host] = (Host("localhost", 1),)
    target: str = "auto"
    share_gpu: bool = False
    ft: bool = True
    tcp: bool = False
    trace: str | None = None
    notebook: bool = False
    start: float = START
    mpiexec: str | None = None
    cuda: str = "auto"
    explain_refused: bool = False
    gpus: bool = True
    wait: float = 0.0
    allocate: str = "start"

    @property
    def agents(self) -> int:
        """The number of agents on all hosts."""
        return sum(host.agents or 1 for host in self.hosts)


def _end_with(launcher: int, prctl: Callable[..., int]) -> None:
    """Have mpiexec end if the launcher is killed, and so the processes that cannot see the launcher.

    Called between fork and exec. The launcher's handler would take the signal and do nothing with it; and a launcher
    that has ended before this asks sends none.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher:
        os._exit(1)


class Launcher:
    """Runs one job.

    Parameters
    ----------
    command : sequence of str
        The application: a Python file or a compiled program and its arguments, or ``-m``, a module and its arguments.
    options : RunOptions
    """

    def __init__(self, command: Sequence[str], options: RunOptions) -> None:
        self._command, self._options = list(command), options
        self._places: dict[int, str] = {}
        self._here: dict[tuple[str, int], JobProcess] = {}
        self._phase = "here"
        self._by_host: dict[str, list[JobProcess]] = defaultdict(list)
        self._unreserved: list[list[JobProcess]] = []
        self._status: int | None = None
        self._interrupts, self._interrupted = 0, 0.0
        self._doom: tuple[float, AgentError | int] | None = None
        self._mapped: set[str] = set()
        self._allowance = options.start
        self._looked = self._complete = self._alone = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._observers: list[Observer] = []
        self._communicator: int | None = None  # its rank: it brings CUDA calls to agents of other hosts
        # Jupyter sets the variable for kernels that must end with it; a wrapper may be between Jupyter and this process
        self._parent = os.getppid() if options.notebook and os.environ.get("JPY_PARENT_PID") else None

    def run(self) -> int:
        """Run the job until the application has ended and nothing is left of it; return the exit status.

        Raises
        ------
        AgentError
            A process did not become ready, or the job cannot go on without an agent that was lost.
        """
        options = self._options
        away = any(not is_here(host.name) for host in options.hosts)
        refusal = cuda_programs.refusal(
            self._command, options.cuda, os.environ, target=options.target, away=away, gpus=options.gpus
        )
        if refusal is not None:
            print(f"warpwell: error: {refusal}", file=sys.stderr)
            return 1
        if importlib.util.find_spec("mpi4py") is None:
            raise AgentError(f"mpi4py is not installed: install {extra('mpi')}")
        self._mpiexec = Mpiexec.find(options.mpiexec)
        self._ft = options.ft and self._mpiexec.survives
        rank = 1
        for host in options.hosts:
            for _ in range(host.agents or 1):
                self._places[rank] = host.name
                rank += 1
        self._files = JobFiles.create()
        try:
            if options.notebook:
                AgentOutput(self._files.folder).make()
            self._rendezvous = Rendezvous(self._files, away)
            with self._signals(), self._janitor(), standard_input() as self._stdin:
                try:
                    return self._run(away)
                finally:
                    self._stop()
                    if options.explain_refused:
                        print(f"warpwell: {cuda_programs.refused(self._files.folder)}", file=sys.stderr)
        finally:
            self._files.remove()

    def _run(self, away: bool) -> int:
        environ = self._environ(away)
        line = self._mpiexec.line(
            self._ranks_to_start(away), environ, ft=self._ft, tcp=self._options.tcp, folder=str(self._files.folder)
        )
        libc, launcher = ctypes.CDLL(None), os.getpid()
        began = time.monotonic()
        self._process = subprocess.Popen(
            line,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            preexec_fn=lambda: _end_with(launcher, libc.prctl),
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self._output = MpiexecOutput([(self._process.stdout, 1), (self._process.stderr, 2)])
        self._children = Children(self._process.pid, self._files.job)
        threading.Thread(target=self._await_mpiexec, name="warpwell mpiexec", daemon=True).start()
        self._rendezvous.start()
        while self._status is None:
            try:
                connection, said = self._rendezvous.events.get(timeout=_TICK)
            except Exception:  # queue.Empty: nothing happened
                connection = said = None
            if isinstance(connection, JobProcess):
                self._on_message(connection, said)
            elif isinstance(said, dict) and "signal" in said:
                self._signalled(int(said["signal"]))
            elif isinstance(said, dict) and "mpiexec" in said:
                self._output.settle()
                self._fail(AgentError(f"mpiexec ended with status {said['mpiexec']}{self._output.said()}"))
            if self._status is None and self._doom is not None and time.monotonic() > self._doom[0]:
                if isinstance(self._doom[1], AgentError):
                    raise self._doom[1]
                self._status = self._doom[1]
            if self._status is None and self._parent not in (None, os.getppid()):
                self._status = -signal.SIGHUP
            self._observers = [o for o in self._observers if not o.answered()]
            if self._phase != "running" and self._status is None:
                self._check_start(time.monotonic() - began)
        return self._status if self._status >= 0 else 128 - self._status

    # -- what happens ------------------------------------------------------------------------------------------

    def _on_message(self, connection: JobProcess, said: dict[str, Any] | None) -> None:
        if said is None:
            connection.open = False
            self._process_ended(connection)
        elif connection.kind == "observer":
            self._observers.append(Observer(connection, [c for c in self._here.values() if c.kind == "agent"]))
        elif "reply" in said:
            connection.about["info"] = said["info"]
            for observer in self._observers:
                observer.take(connection, int(said["reply"]))
        elif "here" in said:
            self._here[connection.kind, connection.rank] = connection
            if connection.kind == "supervisor":
                connection.hand([self._stdin, 1, 2])
            self._go()
        elif "note" in said:
            print(f"warpwell: {said['note']}", file=sys.stderr, flush=True)
        elif "reserved" in said:
            connection.about["gpus"] = said["reserved"]
            self._reserve_next()
        elif "unavailable" in said:
            raise AgentError(said["unavailable"])
        elif "mapped" in said:
            self._mapped |= set(said["mapped"]) if connection.local else set()
        elif "compiling" in said:
            connection.about["compiling"] = said["compiling"]
        elif "ready" in said:
            connection.ready = True
            if self._phase == "ready" and all(c.ready for c in self._ranks()):
                self._phase = "running"
                if self._options.notebook:
                    with contextlib.suppress(OSError):  # it has ended by now
                        self._output.targets = AgentOutput(self._files.folder).writers()
        elif "failed" in said:
            connection.about["failed"] = said["failed"]
            if self._phase != "running":
                who = "the application" if connection.kind == "application" else self._name(connection.rank)
                raise AgentError(f"{who} cannot start: {said['failed']}", agent=who)
        elif "status" in said and int(said["status"]) == _LOST_MPIEXEC:
            self._fail(_LOST_MPIEXEC)  # the end of mpiexec says more, and may come later
        elif "status" in said:
            self._status = int(said["status"])

    def _process_ended(self, connection: JobProcess) -> None:
        why = connection.about.get("failed")
        if connection.kind == "supervisor":
            # it was killed, or mpiexec has ended it because an agent was lost: else it would have told a status
            self._fail(-signal.SIGKILL, 0.0 if self._ft else _GRACE)
        elif connection.kind in ("agent", "communicator"):
            agent = self._name(connection.rank, connection.pid)
            if self._phase != "running":
                raise AgentError(f"{agent} ended before it was ready{self._output.said()}", agent=agent)
            if not self._ft:
                reason = why or "its process ended"
                why = "" if self._mpiexec.survives else ": with Open MPI it could"
                self._fail(
                    AgentError(f"{agent} is lost ({reason}), and this job cannot go on without it{why}", agent=agent)
                )
            for other in self._ranks():  # MPI may not report an agent that exits, and notices its silence after seconds
                if other is not connection and other.open:
                    other.tell(lost=connection.rank)

    def _fail(self, why: AgentError | int, seconds: float = _GRACE) -> None:
        """End the job with this soon; not at once, because the status of an ended application may be on its way."""
        if self._doom is None or isinstance(self._doom[1], int):
            self._doom = (time.monotonic() + seconds, why)

    def _go(self) -> None:
        ranks = self._ranks()
        count = 1 + self._options.agents + (self._communicator is not None)
        if self._phase != "here" or len(ranks) < count or ("supervisor", 0) not in self._here:
            return
        self._phase = "reserve"
        for connection in sorted(ranks, key=lambda c: (c.host, c.rank)):
            if connection.kind == "agent":
                self._by_host[connection.host].append(connection)
        options = self._options
        if options.target != "cpu" and options.allocate == "start" and not options.share_gpu:
            self._unreserved = [found for found in self._by_host.values() if found[0].about.get("gpus")]
        self._reserve_until = time.monotonic() + options.wait
        self._reserve_next()

    def _reserve_next(self) -> None:
        """Have the next host reserve its GPUs; start all processes when each host has them.

        The hosts do it in the order of their names, so that two jobs cannot wait for each other.
        """
        if self._unreserved:
            found = self._unreserved.pop(0)
            wait = max(0.0, self._reserve_until - time.monotonic())
            found[0].tell(reserve={"count": len(found), "wait": wait})
            return
        options = self._options
        decided: dict[int, Any] = {}
        for host, found in self._by_host.items():
            about, numbers = found[0].about, [c.rank for c in found]
            gpus = sorted(about.get("gpus", []), key=lambda uuid: uuid in about.get("used", []))
            if options.allocate == "use":
                chosen = assign(numbers, gpus, "cuda", False, host)
                decided |= {rank: {**each, "target": "cpu", "claim": True} for rank, each in chosen.items()}
            else:
                decided |= assign(numbers, gpus, options.target, options.share_gpu, host)
        decided[0] = {"agents": options.agents}
        ordinals = cuda_programs.ordinals([(rank, "uuid" in decided[rank]) for rank in self._places])
        for rank, ordinal in ordinals.items():
            decided[rank] = {**decided[rank], "cuda": ordinal, "away": not is_here(self._places[rank])}
        if self._communicator is not None:
            away = {n: (r, self._name(r)) for r, n in ordinals.items() if decided[r]["away"]}
            decided[self._communicator] = {"devices": away}
        self._phase = "ready"
        for connection in self._ranks():
            connection.tell(go={**decided.get(connection.rank, {}), "stay": not self._ft})

    def _ranks(self) -> list[JobProcess]:
        return [c for c in self._here.values() if c.kind != "supervisor"]

    def _check_start(self, seconds: float) -> None:
        for rank in self._children.ended() or self._never_seen(seconds):
            if rank == 0 and ("supervisor", 0) not in self._here:
                self._output.settle()
                raise AgentError(f"the application ended before it was ready{self._output.said()}")
            if rank and not any((kind, rank) in self._here for kind in ("agent", "communicator")):
                self._output.settle()
                agent = self._name(rank)
                raise AgentError(f"{agent} ended before it was ready{self._output.said()}", agent=agent)
        if self._phase == "reserve" or any(c.about.get("compiling") for c in self._ranks()):
            longest = self._options.start + self._options.wait + _COMPILING
            self._allowance = min(self._allowance + seconds - self._looked, longest)
        self._looked = seconds
        if seconds < self._allowance:
            return
        late = [r for r in self._places if (c := self._here.get(("agent", r))) is None or not c.ready]
        if not late:
            other = self._here.get(("communicator", self._communicator or 0))
            if self._communicator is not None and (other is None or not other.ready):
                raise AgentError(
                    f"not ready after {self._options.start:g} s: {self._name(self._communicator)}{self._output.said()}",
                    agent=self._name(self._communicator),
                )
            raise AgentError(f"the application was not ready after {self._options.start:g} s")
        # do not blame those that only wait for others: name stopped processes first, then hosts that do not answer
        stopped = [r for r in late if (c := self._here.get(("agent", r))) and c.local and state_of(c.pid) in "Tt"]
        late = stopped or late
        late.sort(key=lambda r: (("agent", r) in self._here, is_here(self._places[r]), r))
        first, hint = self._places[late[0]], ", which is stopped" if len(stopped) == 1 else ""
        if not is_here(first) and ("agent", late[0]) not in self._here:
            hint = f". Does `ssh {first}` work without a password, and is {sys.executable} there, too?"
        names = several([self._name(r, c.pid if (c := self._here.get(("agent", r))) else None) for r in late])
        raise AgentError(
            f"not ready after {self._options.start:g} s: {names}{hint}{self._output.said()}", agent=self._name(late[0])
        )

    def _never_seen(self, seconds: float) -> list[int]:
        """Return ranks of this host that ended between two looks: the others have been here for long."""
        waiting = {rank for kind, rank in self._here if kind == "agent"} == set(self._places)
        if not waiting or ("supervisor", 0) in self._here:
            self._alone = seconds
        elif seconds > self._alone + _UNSEEN:
            return [0]  # its supervisor connects within milliseconds of its start
        missing = {rank for rank in self._places if ("agent", rank) not in self._here}
        seen = self._children.seen()
        # the application was seen: processes can be, here
        if ("application", 0) not in self._here or 0 not in seen or seen & missing:
            self._complete = seconds
        if seconds < self._complete + _UNSEEN or not all(is_here(self._places[rank]) for rank in missing):
            return []
        return sorted(missing)

    def _name(self, rank: int, pid: int | None = None) -> str:
        if rank == self._communicator:
            process = f" (process {pid})" if pid is not None else ""
            return f"the communicator of CUDA calls to other hosts{process}"
        host = socket.gethostname() if is_here(self._places[rank]) else self._places[rank]
        process = f", process {pid}" if pid is not None else ""
        return f"agent {rank} of {self._options.agents} (device {rank - 1}, on {host}{process})"

    # -- signals -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Pass signals of this process to the application."""
        before = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, lambda n, _: self._rendezvous.events.put((None, {"signal": n})))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _signalled(self, number: int) -> None:
        application = self._here.get(("application", 0))
        if self._options.notebook and number == signal.SIGINT:
            # it ends the cell that runs, however often it comes; during the start no cell runs
            if self._phase == "running" and application is not None:
                application.tell(signal=number)
            return
        now = time.monotonic()
        self._interrupts = self._interrupts + 1 if now - self._interrupted < _IN_A_ROW else 1
        self._interrupted = now
        if self._phase != "running" or application is None or self._interrupts >= _IMPATIENT:
            self._status = -number
        else:
            application.tell(signal=number)

    @contextlib.contextmanager
    def _janitor(self) -> Iterator[None]:
        """Start the janitor, which clears up if this process is killed."""
        folders = [str(self._files.folder), str(self._files.memory)]
        command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("processes.py")), self._files.job, *folders]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            yield
        finally:
            self._files.remove()  # leave the janitor nothing to do
            assert process.stdin is not None
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2 * _GRACE)

    # -- the end -----------------------------------------------------------------------------------------------

    def _await_mpiexec(self) -> None:
        assert self._process is not None
        self._process.wait()
        self._rendezvous.events.put((None, {"mpiexec": self._process.returncode}))

    def _stop(self) -> None:
        """Ask all processes to end, and kill those that do not."""
        self._rendezvous.close()
        for connection in self._here.values():
            connection.tell(end=True)
        process = self._process
        if process is None:
            return
        mine = [c.pid for c in self._here.values() if c.local]
        mine += self._children.ranks()
        others = self._children.others()
        wait_until(lambda: not any(c.open for c in self._here.values() if c.local) or self._drain(), _GRACE)
        kill_all(mine, self._files.job)
        if not wait_until(lambda: process.poll() is not None, _GRACE):
            process.terminate()
            if not wait_until(lambda: process.poll() is not None, 2 * _GRACE):
                process.kill()
                process.wait()
        kill_all([*mine, *others, *self._children.ranks()], self._files.job)
        for connection in self._here.values():
            connection.close()
        for path in self._mapped:
            Path(path).unlink(missing_ok=True)
        self._output.settle()

    def _drain(self) -> bool:
        with contextlib.suppress(Exception):  # queue.Empty
            while True:
                connection, said = self._rendezvous.events.get(timeout=0)
                if isinstance(connection, JobProcess) and said is None:
                    connection.open = False
        return False

    # -- the line ----------------------------------------------------------------------------------------------

    def _ranks_to_start(self, away: bool) -> list[Ranks]:
        python = sys.executable
        supervisor = Path(__file__).with_name("supervise.py")
        program = [python, "-m", "warpwell.pool.launch.application", *self._command]
        application = [python, "-I", "-S", str(supervisor), *program]
        agent = [python, "-m", "warpwell.pool.agent.agent_main"]
        hosts = [h for h in self._options.hosts if h.agents]
        # the application runs on this host, beside the user's files and terminal
        here = [Ranks(1, application, socket.gethostname() if away else None)]
        found = here + [Ranks(h.agents or 1, agent, h.name if away else None) for h in hosts]
        if self._communicator is not None:
            found.append(Ranks(1, [python, "-m", "warpwell.pool.cuda.communicator_main"], socket.gethostname()))
        return found

    def _environ(self, away: bool) -> dict[str, str]:
        options = self._options
        found = root_allowed(os.environ)
        found |= {
            lifeline.ADDRESS: self._rendezvous.far_address if away else self._rendezvous.address,
            lifeline.TOKEN: self._rendezvous.token,
            lifeline.WAIT: f"{math.ceil(options.wait)}",
            JOB: self._files.job,
        }
        if options.notebook:
            found[FOLDER] = str(self._files.folder)
        if options.trace is not None:
            found["WARPWELL_POOL_TRACE"] = os.path.abspath(options.trace)
        cuda = cuda_programs.prepare(
            options.cuda,
            self._files.folder,
            found,
            target=options.target,
            away=away,
            gpus=options.gpus,
            explain=options.explain_refused,
        )
        if cuda is not None:
            found[cuda_programs.JOB] = cuda
            self._communicator = 1 + options.agents if away else None
        return found
