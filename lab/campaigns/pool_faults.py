"""Kills, ends, Ctrl-C, device faults and full disks in jobs of a pool: ``python -m lab campaign pool_faults``.

Each job is one ``warpwell run``. Half of the jobs are interrupted. The others lose a process, a device or the space for
their files, or exit in a chosen way, at random moments that the seed selects. The programs are CUDA programs that do
not import Warpwell (`cuda_client`), on the GPUs of this machine or on a stub driver. With ``--programs devices`` they
are programs that use ``ww.devices()``. The campaign checks the exit status and the output of each job. A loss must be
reported within 5 s, while other devices and clients continue. Within 5 s after the exit no process, file, socket or
shared memory of the job may be left. After all jobs the memory of the GPUs must be free.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from warpwell.pool import list_gpus
from warpwell.pool.launch.cuda_programs import DRIVER

from ..driver import build
from .marked import MARK, command_of, marked, memory_files, seconds_until_none_is_left
from .pool_losing import HOWS, LIMIT, MOMENTS

AGENTS = 4
START_LIMIT = 40.0
_PATH = {"PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))}
"""Lets the programs of a job import this package."""
CLIENT = str(Path(__file__).with_name("cuda_client.py"))
_ELSEWHERE = Path(__file__).with_name("elsewhere.sh")
_HOSTS = "localhost:1,elsewhere:3"
"""Nodes with equal numbers of ranks (with application and communicator); otherwise Open MPI takes both for one node."""
_SLACK_MIB = 64
"""GPU memory that other programs may allocate during a campaign."""
_PROCESSES: dict[str, Callable[[list[str]], bool]] = {
    "application": lambda command: command[1:3] == ["-m", "warpwell.pool.launch.application"],
    "agent": lambda command: command[1:3] == ["-m", "warpwell.pool.agent.agent_main"],
    "supervisor": lambda command: command[3].endswith("/supervise.py") and command[4] == "application",
    "starter": lambda command: command[3].endswith("/supervise.py") and command[4] == "mpiexec",
    "mpiexec": lambda command: command[0].endswith(("/mpiexec", "/prterun", "/mpiexec.hydra")),
    "communicator": lambda command: command[1:3] == ["-m", "warpwell.pool.cuda.communicator_main"],
    "worker": lambda command: command[0].endswith("/ww_worker"),
}
"""Predicates that recognize each process of a job by its command."""
_RANDOM = "[0-9a-f]" * 8
"""Pattern for the end of a job's name, which follows the process id. The fixed length excludes longer process ids."""
_STACKS = 5.0
"""Time for an application that hangs to write the stacks of its threads, in seconds."""
_running_jobs: dict[Path, Job] = {}
"""The running jobs by their folders."""


@dataclass(frozen=True)
class Setup:
    """The environment in which jobs run.

    Parameters
    ----------
    environ : mapping
        Additional environment variables of the jobs.
    options : sequence of str
        Options of ``warpwell run`` for CUDA programs.
    real : bool
        True for real GPUs, False for the stub driver.
    """

    environ: Mapping[str, str] = field(default_factory=dict)
    options: Sequence[str] = ()
    real: bool = False


class Job:
    """One ``warpwell run``.

    Parameters
    ----------
    arguments : list of str
    folder : str
        Folder of its temporary files, not used by other programs.
    environ : mapping, optional
        Additional environment variables.
    before : sequence of str, optional
        A command that runs the job.
    limits : sequence of (int, int), optional
        Resources and their limits, for `resource.setrlimit`.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: str,
        environ: Mapping[str, str] = {},
        before: Sequence[str] = (),
        limits: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.folder = Path(folder)
        self.began = time.monotonic()
        self.output: list[str] = []
        self.errors: list[str] = []
        self._memory: set[tuple[int, str]] = set()
        self._line_queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()

        def prepare() -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # shells let background processes ignore it
            for limited, maximum in limits:
                resource.setrlimit(limited, (maximum, maximum))

        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", "warpwell", "run", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
            errors="replace",
            env={**os.environ, **_PATH, **environ, MARK: self.mark, "TMPDIR": folder, "PYTHONFAULTHANDLER": "1"},
            preexec_fn=prepare,
        )
        _running_jobs[self.folder] = self
        self._readers = [
            threading.Thread(target=self._read, args=each, daemon=True)
            for each in ((self.process.stdout, self.output, True), (self.process.stderr, self.errors, False))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: Any, received: list[str], is_output: bool) -> None:
        with stream:
            for line in stream:
                received.append(line.rstrip("\n"))
                if is_output:
                    self._line_queue.put(received[-1])
        if is_output:
            self._line_queue.put(None)

    def line(self, start: str, limit: float = START_LIMIT) -> list[str]:
        """Wait for a line of output that begins with `start`; return its words."""
        until = time.monotonic() + limit
        while True:
            try:
                line = self._line_queue.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no line {start!r} within {limit:g} s: {self.recent_output()}") from None
            assert line is not None, f"the job ended without a line {start!r}: {self.recent_output()}"
            if line.startswith(start):
                self._memory |= memory_files(self.pids())
                return line.split()

    def recent_output(self) -> str:
        """Return the last lines of its output and errors."""
        return " | ".join([*self.output[-20:], "errors:", *self.errors[-20:]])

    def pids(self) -> list[int]:
        """Return the ids of its processes."""
        return marked(self.mark, self.folder)

    def find(self, role: str) -> list[int]:
        """Return the ids of its processes of a role, in the order of their start."""
        return [pid for pid in self.pids() if _PROCESSES[role]([*command_of(pid).split(" "), *[""] * 4])]

    def interrupt(self, draw: random.Random, times: int = 1) -> None:
        """Press Ctrl-C: send SIGINT to the process group, as a terminal does."""
        for _ in range(times):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGINT)
            time.sleep(draw.uniform(0.05, 0.4) if times > 1 else 0.0)

    def end(self, timeout: float) -> tuple[int, str, str, float]:
        """Wait; return status, output, errors, and the seconds until all processes had exited."""
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            left = [f"{pid} {command_of(pid)}" for pid in self.pids()]
            shown, stacks = self.recent_output(), self._stacks()
            self.kill()
            raise AssertionError(
                f"the job did not end within {timeout:g} s: {shown}; the application is in: {stacks}; processes {left}"
            ) from None
        try:
            seconds = seconds_until_none_is_left(self.mark, LIMIT, self.folder)
            self._nothing_else_is_left()
        finally:
            self.kill()
        for reader in self._readers:
            reader.join(LIMIT)
            assert not reader.is_alive(), "a process still has the output open"
        return status, "\n".join(self.output), "\n".join(self.errors), seconds

    def _stacks(self) -> str:
        """Abort the application, so that it writes the stacks of its threads; return them."""
        first = len(self.errors)
        for pid in (found := self.find("application")):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)
        until = time.monotonic() + _STACKS
        while set(found) & set(self.pids()) and time.monotonic() < until:
            time.sleep(0.05)
        self._readers[1].join(max(0.1, until - time.monotonic()))  # the thread still reads the last lines
        return " | ".join(self.errors[first:][-60:])

    def _nothing_else_is_left(self) -> None:
        """Check for files, sockets and memory, for some time: the last process may still be removing them."""
        until = time.monotonic() + LIMIT
        while (left := self._left()) and time.monotonic() < until:
            time.sleep(0.02)
        assert not left, f"left behind: {left}"

    def _left(self) -> list[str]:
        own = str(self.folder)
        left = [str(path) for path in self.folder.rglob("*") if path.parent != self.folder or not path.is_dir()]
        left += [str(path) for path in self.folder.iterdir() if not path.name.startswith("warpwell-pool-")]
        left += [path.name for path in self._shared_memory()]
        sockets = Path("/proc/net/unix").read_text().splitlines()
        left += [f"socket {line.split()[-1]}" for line in sockets if own in line]
        if self._memory:
            left += [name for _, name in self._memory & memory_files()]
        return left

    def _shared_memory(self) -> list[Path]:
        return list(Path("/dev/shm").glob(f"warpwell-pool-{os.getuid()}-{self.process.pid}{_RANDOM}"))

    def kill(self) -> None:
        """Kill its remaining processes, and remove its shared memory, which no process would remove after that."""
        until = time.monotonic() + LIMIT
        while (left := self.pids()) and time.monotonic() < until:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(LIMIT)
        for path in self._shared_memory():
            shutil.rmtree(path, ignore_errors=True)


def lose_devices(setup: Setup, folder: str, draw: random.Random, moment: str) -> list[dict[str, Any]]:
    """Run a program that loses all devices except one."""
    program = "lab.campaigns.pool_losing"
    job = Job(["--agents", str(AGENTS), "-m", program, moment, str(draw.randrange(10**6))], folder)
    status, output, errors, left = job.end(120)
    found = json.loads(output.splitlines()[-1]) if output else []
    wrong = [text for each in found for text in each["wrong"]]
    assert status == 0 and not wrong, f"status {status}: {wrong} {errors}"
    return [{"what": f"{e['how']} in mid-{moment}", "seconds": e["seconds"], "left": left} for e in found]


def kill_while_starting(setup: Setup, folder: str, draw: random.Random) -> list[dict[str, Any]]:
    """Kill an agent at a random moment before it is ready."""
    job = Job(["--agents", "3", "-c", _WAITING], folder)
    agents: list[int] = []
    while not agents and time.monotonic() < job.began + START_LIMIT:
        agents = job.find("agent")
        time.sleep(0.005)
        assert job.process.poll() is None, job.recent_output()
    time.sleep(draw.uniform(0.0, 1.0))
    os.kill(draw.choice(agents), signal.SIGKILL)
    killed = time.monotonic()
    while job.process.poll() is None and time.monotonic() < killed + START_LIMIT:
        time.sleep(0.01)
        if time.monotonic() > killed + LIMIT and len(job.find("agent")) == 2:
            break  # the agent was already ready, and the application continues
    if job.process.poll() is None:
        os.kill(job.find("application")[0], signal.SIGKILL)
        status, _, _, left = job.end(20)
        assert status == 137, f"status {status}"
        return [{"what": "killed when ready", "seconds": 0.0, "left": left}]
    seconds = time.monotonic() - killed
    status, _, errors, left = job.end(20)
    assert status == 2 and "agent " in errors and "device " in errors, f"status {status}: {errors}"
    return [{"what": "killed before ready", "seconds": seconds, "left": left}]


_WAITING = "import time, warpwell as ww; print(len(ww.devices()), flush=True); time.sleep(100)"
_ENDINGS: dict[str, tuple[str, int]] = {
    "kill": (_WAITING, 137),
    "raise": ("import warpwell as ww; len(ww.devices()); raise ValueError('on purpose')", 1),
    "status 3": ("import sys, warpwell as ww; len(ww.devices()); sys.exit(3)", 3),
    "_exit 3": ("import os, warpwell as ww; len(ww.devices()); os._exit(3)", 3),
    "normal": ("import warpwell as ww; len(ww.devices())", 0),
}


def end_application(setup: Setup, folder: str, draw: random.Random, how: str) -> list[dict[str, Any]]:
    """End an application that uses ``ww.devices()``, in the way `how`."""
    program, expected = _ENDINGS[how]
    job = Job(["--agents", "2", "-c", program], folder)
    killed = None
    if how == "kill":
        assert job.line("2")
        time.sleep(draw.uniform(0, 0.3))
        os.kill(job.find("application")[0], signal.SIGKILL)
        killed = time.monotonic()
    status, _, errors, left = job.end(60)
    seconds = 0.0 if killed is None else time.monotonic() - killed - left
    assert status == expected, f"status {status}: {errors}"
    return [{"what": f"application: {how}", "seconds": seconds, "left": left}]


# -- CUDA programs that do not import Warpwell -----------------------------------------------------------------------


def _client(setup: Setup, folder: str, draw: random.Random, *act: str, agents: int = 1, **options: Any) -> Job:
    """Start a program with agents on this host, or on `_HOSTS` if `agents` is 0."""
    environ = {**setup.environ, **({"CLIENT_NUMBA": "1"} if draw.random() < (0.3 if setup.real else 0.1) else {})}
    agent_options = ["--agents", str(agents)] if agents else ["--tcp", "--hosts", _HOSTS]
    if not agents:
        environ |= {"PRTE_MCA_plm_ssh_agent": f"/bin/sh {_ELSEWHERE}", "FAKE_DEVICES": "4"}
    return Job([*agent_options, *setup.options, CLIENT, *act], folder, environ, **options)


def interrupt(setup: Setup, folder: str, draw: random.Random, when: str) -> list[dict[str, Any]]:
    """Press Ctrl-C once or three times at a moment: start, work, a driver call, the end, or with several hosts."""
    act = {"blocked": ("waits",), "end": ("rounds", "0.1"), "children": ("children", "30")}.get(when, ("rounds", "30"))
    job = _client(setup, folder, draw, *act, agents=0 if when == "hosts" else 1)
    if when == "start":
        time.sleep(draw.uniform(0.05, 5.0 if setup.real else 2.5))
    else:
        job.line("rounds" if when == "end" else "ready")
        time.sleep(draw.uniform(0.0, 0.5))
    times = 3 if when in ("three", "blocked") else draw.choice((1, 3)) if when == "start" else 1
    pressed = time.monotonic()
    job.interrupt(draw, times)
    status, output, errors, left = job.end(20)
    seconds = time.monotonic() - pressed - left
    # Before and after the command itself, Python ends the process by the signal, which shells report as 130.
    ended = {130, -signal.SIGINT} if when in ("start", "end", "three", "blocked") else {130}
    allowed = ended | {0} if when == "end" else ended
    if status == 1 and when == "start" and errors.endswith("KeyboardInterrupt"):
        allowed = {1}  # Python was still importing its own modules
    assert status in allowed and "wrong" not in output, f"status {status}: {job.recent_output()}"
    assert "no launcher" not in errors and seconds < LIMIT, f"{seconds:.1f} s: {errors}"
    return [{"what": f"Ctrl-C: {when}", "seconds": seconds, "left": left}]


_RESET_SECONDS = {"worker": "8", "agent": "2", "communicator": "1"}
"""Time for which the program tries to reset a device that was lost with this process, in seconds; "worker" succeeds."""


def kill(setup: Setup, folder: str, draw: random.Random, role: str) -> list[dict[str, Any]]:
    """Kill a process of a job at a random moment, and check the job's status and the report of a lost device."""
    hosts = role == "communicator"
    on_device = role in _RESET_SECONDS
    act = ("rounds", "20", *([_RESET_SECONDS[role]] if on_device else []))
    job = _client(setup, folder, draw, *act, agents=0 if hosts else 2 if on_device else 1)
    ready = on_device or draw.random() < 0.6
    if ready:
        job.line("ready")
        time.sleep(draw.uniform(0.0, 0.4))
    else:
        time.sleep(draw.uniform(0.05, 1.5))
    pids = [job.process.pid] if role == "launcher" else job.find(role)
    until = time.monotonic() + START_LIMIT
    while not pids and job.process.poll() is None and time.monotonic() < until:
        time.sleep(0.005)
        pids = job.find(role)
    assert pids, f"the job has no {role}: {job.recent_output()}"
    if role == "worker":
        pids = pids[:2]  # the workers of the two devices; spare workers start later
    killed = time.monotonic()
    with contextlib.suppress(ProcessLookupError):
        os.kill(draw.choice(pids), signal.SIGKILL)
    reported = 0.0
    if on_device:
        lost = {int(job.line("lost", 2 * LIMIT)[1])}
        reported = time.monotonic() - killed
        back = [job.line("back", 4 * LIMIT)[2]]
        for _ in range(2 * hosts):
            lost.add(int(job.line("lost", 2 * LIMIT)[1]))
            back.append(job.line("back", 4 * LIMIT)[2])
        counts = job.line("rounds", 2 * LIMIT)
        working = set(range(len(counts) - 1)) - lost
        assert working and all(int(counts[1 + device]) > 1 for device in working), job.recent_output()
        assert not hosts or lost == {1, 2, 3}, job.recent_output()
        assert set(back) == {str(role == "worker")}, f"after a reset: {job.recent_output()}"
    status, output, errors, left = job.end(30)
    seconds = reported or max(0.0, time.monotonic() - killed - left)
    expected = {
        "application": (137,),
        "worker": (0,),
        "agent": (0,),
        "communicator": (0,),
        "launcher": (-9,),
    }
    assert "wrong" not in output and status in expected.get(role, range(1, 256)), (
        f"status {status}: {job.recent_output()}"
    )
    assert seconds < (LIMIT if ready else 3 * LIMIT), f"it took {seconds:.1f} s: {errors}"
    return [{"what": f"kill the {role}", "seconds": seconds, "left": left}]


_CODES = {"fault": "700", "fail": "710"}


def fail_while_shared(setup: Setup, folder: str, draw: random.Random, kernel: str) -> list[dict[str, Any]]:
    """Let two clients fault on a device that another client uses."""
    job = _client(setup, folder, draw, "share", kernel)
    status, output, _errors, left = job.end(60)
    rows = [line for line in output.splitlines() if not line.startswith("Assert")]
    assert status == 0 and rows[:2] == [f"ready code {_CODES[kernel]}"] * 2, f"status {status}: {job.recent_output()}"
    assert rows[2].startswith("rounds") and "wrong" not in output, job.recent_output()
    return [{"what": f"a client's device code {_CODES[kernel]}", "seconds": 0.0, "left": left}]


_EXIT_STATUS = {"normal": 0, "raise": 1, "status 3": 3, "_exit 3": 3, "abort": 134, "thread": 3, "exec": 0}


def end_client(setup: Setup, folder: str, draw: random.Random, how: str) -> list[dict[str, Any]]:
    """End a program while its devices execute its work."""
    job = _client(setup, folder, draw, "ends", how, agents=2, limits=[(resource.RLIMIT_CORE, 0)])
    status, output, _errors, left = job.end(60)
    assert status == _EXIT_STATUS[how] and "ready" in output and "wrong" not in output, (
        f"status {status}: {job.recent_output()}"
    )
    return [{"what": f"ends: {how}", "seconds": 0.0, "left": left}]


def orphans(setup: Setup, folder: str, draw: random.Random) -> list[dict[str, Any]]:
    """Kill a program with child processes that use its devices: they must end with the job."""
    job = _client(setup, folder, draw, "children", "30")
    job.line("ready")
    job.line("ready")
    time.sleep(draw.uniform(0.0, 0.3))
    os.kill(job.find("application")[0], signal.SIGKILL)
    killed = time.monotonic()
    status, output, _errors, left = job.end(20)
    assert status == 137 and "wrong" not in output, f"status {status}: {job.recent_output()}"
    return [{"what": "kill a parent", "seconds": time.monotonic() - killed - left, "left": left}]


_MOUNTED = 'mount -t tmpfs -o size="$1" tmpfs "$2" && shift 2 && exec "$@"'


def without_room(setup: Setup, folder: str, draw: random.Random, resource_name: str) -> list[dict[str, Any]]:
    """Run a program with limited space or a limited number of files. It must work or report an error, and not hang."""
    limits: list[tuple[int, int]] = []
    before: list[str] = []
    if resource_name == "files":
        limits = [(resource.RLIMIT_FSIZE, draw.choice((0, 100, 4096, 100_000, 2 << 20, 20 << 20)))]
    elif resource_name == "descriptors":
        limits = [(resource.RLIMIT_NOFILE, draw.randrange(8, 80))]
    else:
        size = draw.choice(("4k", "8k", "32k", "128k", "1m", "8m"))
        target = folder if resource_name == "TMPDIR" else "/dev/shm"
        before = ["unshare", "-m", "sh", "-c", _MOUNTED, "sh", size, target]
    job = _client(setup, folder, draw, "rounds", "0.2", agents=2, before=before, limits=limits)
    status, output, errors, left = job.end(60)
    assert "wrong" not in output, job.recent_output()
    assert "rounds" in output if status == 0 else errors, f"status {status}: {job.recent_output()}"
    return [{"what": f"no room: {resource_name}", "seconds": 0.0, "left": left}]


def _can_mount() -> bool:
    """Return True if a file system of limited size can be mounted for one job."""
    if shutil.which("unshare") is None:
        return False
    line = ["unshare", "-m", "sh", "-c", _MOUNTED, "sh", "4k", "/dev/shm", "true"]
    return subprocess.run(line, capture_output=True, check=False).returncode == 0


_Kind = tuple[str, Callable[..., list[dict[str, Any]]], tuple[Any, ...]]


def kinds(programs: str) -> list[_Kind]:
    """Return the types of jobs in the order of their execution; each second job is interrupted."""
    presses: list[_Kind] = [
        (f"interrupt {when}", interrupt, (when,))
        for when in ("start", "work", "blocked", "three", "start", "end", "work", "children", "hosts")
    ]
    rooms = ["files", "descriptors", *(["TMPDIR", "shared memory"] if _can_mount() else [])]
    cuda: list[_Kind] = [
        *(
            (f"kill {role}", kill, (role,))
            for role in ("worker", "application", "agent", "launcher", "supervisor", "communicator")
        ),
        *((f"share {kernel}", fail_while_shared, (kernel,)) for kernel in _CODES),
        *((f"end {how}", end_client, (how,)) for how in _EXIT_STATUS),
        *((f"kill {role}", kill, (role,)) for role in ("worker", "mpiexec", "agent", "starter", "application")),
        *((f"room {resource_name}", without_room, (resource_name,)) for resource_name in rooms),
        ("orphans", orphans, ()),
    ]
    devices: list[_Kind] = [
        *((moment, lose_devices, (moment,)) for moment in MOMENTS for _ in range(len(HOWS))),
        *(("start", kill_while_starting, ()) for _ in HOWS),
        *((f"application {how}", end_application, (how,)) for how in _ENDINGS),
    ]
    if programs == "devices":
        return devices
    return [job for k, loss in enumerate(cuda) for job in (presses[k % len(presses)], loss)]


def setup_for(driver: str | None) -> Setup:
    """Return the setup of CUDA programs: driver ``real`` or ``fake``; None selects ``real`` if a GPU exists."""
    real = driver == "real" or (driver is None and bool(list_gpus()))
    if real:
        return Setup({}, ["--share-gpu", "--cuda", "pool"], True)
    return Setup({DRIVER: str(build.build().fake)}, ["--target", "cpu"])


def _gpu_memory() -> list[int]:
    """Return the memory in use on each GPU in MiB; an empty list without nvidia-smi."""
    line = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True)
        return [int(word) for word in done.stdout.split()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def _grown(before: list[int]) -> str:
    """Describe GPU memory that is still in use some time after the jobs; return "" if it was freed."""
    until = time.monotonic() + LIMIT
    while True:
        after = _gpu_memory()
        if all(b <= a + _SLACK_MIB for a, b in zip(before, after, strict=False)):
            return ""
        if time.monotonic() > until:
            return f"memory of GPUs in use, MiB: {before} before, {after} after"
        time.sleep(0.2)


def _kill_until_done(jobs: Sequence[Future[Any]]) -> None:
    """Kill the running jobs, and jobs that threads start in the meantime."""
    while not all(job.done() for job in jobs):
        for running in list(_running_jobs.values()):
            running.kill()
        time.sleep(0.05)


class Campaign:
    """Numbered jobs: a seed and a number always give the same job.

    Parameters
    ----------
    setup : Setup
    seed : int
    kinds : list
        The types of jobs; see `kinds`.
    """

    def __init__(self, setup: Setup, seed: int, kinds: list[_Kind]) -> None:
        self._setup, self._seed, self._kinds = setup, seed, kinds
        self.found: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.failures: list[str] = []
        self._stopped = threading.Event()

    def run(self, numbers: Sequence[int], at_a_time: int = 1, seconds: float = float("inf")) -> int:
        """Run jobs, `at_a_time` in parallel; start no job after `seconds`. Return the number of jobs that ran.

        Ctrl-C also ends the running jobs, which do not receive the signal because they have their own sessions.
        """
        end = time.monotonic() + seconds
        with ThreadPoolExecutor(at_a_time) as pool:
            jobs = [pool.submit(lambda n: time.monotonic() < end and self._job(n), number) for number in numbers]
            try:
                return sum(job.result() for job in jobs)
            except BaseException:
                self._stopped.set()
                threading.Thread(target=_kill_until_done, args=(jobs,)).start()  # not stopped by a second Ctrl-C
                raise

    def _job(self, number: int) -> bool:
        if self._stopped.is_set():
            return False
        name, act, parameters = self._kinds[number % len(self._kinds)]
        draw = random.Random(self._seed * 1_000_003 + number)
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="ww-", dir="/tmp", ignore_cleanup_errors=True) as folder:
            try:
                for each in act(self._setup, folder, draw, *parameters):
                    self.found[each["what"]].append({**each, "took": time.monotonic() - began})
            except Exception as error:
                if self._stopped.is_set():
                    return False
                self.failures.append(f"job {number} ({name}): {type(error).__name__}: {error}")
                print(self.failures[-1], file=sys.stderr, flush=True)
            finally:
                if job := _running_jobs.pop(Path(folder), None):
                    job.kill()
        return True

    def table(self) -> list[str]:
        """Return a line of results for each type of job."""
        rows = []
        for job_type, results in sorted(self.found.items()):
            reported, left, took = (sorted(result[key] for result in results) for key in ("seconds", "left", "took"))
            rows.append(
                f"{job_type:26} {len(reported):4} times; reported or ended after {reported[len(reported) // 2]:.2f} s"
                f" (median), {reported[-1]:.2f} s (maximum); nothing left {left[-1]:.2f} s later (maximum); a job took"
                f" {took[len(took) // 2]:.1f} s (median)"
            )
        return rows


def main(argv: list[str] | None = None) -> int:
    """Run the campaign; return 1 if a job failed."""
    parser = argparse.ArgumentParser(prog="python -m lab campaign pool_faults", description=__doc__)
    parser.add_argument("--jobs", type=int, default=200, metavar="N", help="default 200")
    parser.add_argument("--seed", type=int, default=7, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first job (default 0)")
    parser.add_argument("--at-a-time", type=int, default=1, metavar="N", help="jobs that run together (default 1)")
    parser.add_argument(
        "--within", type=float, default=float("inf"), metavar="SECONDS", help="start no job after SECONDS"
    )
    parser.add_argument(
        "--programs",
        choices=("cuda", "devices"),
        default="cuda",
        help="unmodified CUDA programs (default), or programs that use ww.devices()",
    )
    parser.add_argument("--driver", choices=("real", "fake"), help="default: real if a GPU exists")
    parser.add_argument("--only", metavar="WORD", help="only jobs with this word in their name")
    arguments = parser.parse_args(argv)
    selected = [each for each in kinds(arguments.programs) if (arguments.only or "") in each[0]]
    if not selected:
        parser.error(f"--only {arguments.only}: choose from {', '.join(sorted({k[0] for k in kinds('cuda')}))}")
    campaign = Campaign(setup_for(arguments.driver), arguments.seed, selected)
    before, began = _gpu_memory(), time.monotonic()
    jobs = campaign.run(range(arguments.first, arguments.first + arguments.jobs), arguments.at_a_time, arguments.within)
    print("\n".join(campaign.table()))
    if grown := _grown(before):
        campaign.failures.append(grown)
        print(grown, file=sys.stderr)
    presses = sum(len(results) for name, results in campaign.found.items() if "Ctrl-C" in name)
    print(
        f"{len(campaign.failures)} failures in {jobs} jobs, {presses} of them interrupted,"
        f" in {time.monotonic() - began:.0f} s{f'; memory of GPUs {before} MiB' if before else ''}"
    )
    return int(bool(campaign.failures))


if __name__ == "__main__":
    sys.exit(main())
