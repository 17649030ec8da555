"""Kills, ends, Ctrl-C, device faults and full disks in jobs of a pool: ``python -m lab campaign pool_faults``.

Each job is one ``warpwell run``. Half of them are interrupted, the others lose a process, a device or the room for
their files, or end in some way, at random moments that the seed decides. The programs are CUDA programs that know
nothing of Warpwell (`cuda_client`), on the GPUs of this machine or on a fake driver, and with ``--programs devices``
those that use ``ww.devices()``. It checks how each job ends and what it says; that a loss is told within 5 s while
other devices and clients go on; that 5 s later no process, file, socket or shared memory of the job is left; and that
in the end no memory of a GPU is.
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
"""As many ranks on each, the application and the communicator counted: Open MPI takes two such nodes for one else."""
_SLACK_MIB = 64
"""Memory of a GPU that others may take during a campaign."""
_PROCESSES: dict[str, Callable[[list[str]], bool]] = {
    "application": lambda words: words[1:3] == ["-m", "warpwell.pool.launch.application"],
    "agent": lambda words: words[1:3] == ["-m", "warpwell.pool.agent.agent_main"],
    "supervisor": lambda words: words[3].endswith("/supervise.py"),
    "janitor": lambda words: words[3].endswith("/processes.py"),
    "mpiexec": lambda words: words[0].endswith(("/mpiexec", "/prterun", "/mpiexec.hydra")),
    "communicator": lambda words: words[1:3] == ["-m", "warpwell.pool.cuda.communicator_main"],
    "worker": lambda words: words[0].endswith("/ww_worker"),
}
"""What the commands of a job's processes begin with."""
_RANDOM = "[0-9a-f]" * 8
"""Of a job's name, after the process: a longer number of a process is another job's."""
_STACKS = 2.0
"""Seconds in which an application that does not end writes where its threads are."""
_under_way: dict[Path, Job] = {}
"""By their folders."""


@dataclass(frozen=True)
class Place:
    """Where jobs run.

    Parameters
    ----------
    environ : mapping
        What their environment has besides.
    options : sequence of str
        Of ``warpwell run``, for CUDA programs.
    real : bool
        The GPUs are real.
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
        For its temporary files; nothing else uses it.
    environ : mapping, optional
        Additions to its environment.
    before : sequence of str, optional
        A command that runs it.
    limits : sequence of (int, int), optional
        Limits of its processes, for `resource.setrlimit`.
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
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

        def prepare() -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # shells have their background processes ignore it
            for what, most in limits:
                resource.setrlimit(what, (most, most))

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
        _under_way[self.folder] = self
        self._readers = [
            threading.Thread(target=self._read, args=each, daemon=True)
            for each in ((self.process.stdout, self.output, True), (self.process.stderr, self.errors, False))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: Any, kept: list[str], told: bool) -> None:
        with stream:
            for line in stream:
                kept.append(line.rstrip("\n"))
                if told:
                    self._lines.put(kept[-1])
        if told:
            self._lines.put(None)

    def line(self, start: str, limit: float = START_LIMIT) -> list[str]:
        """Wait for a line of output that begins with a word; return its words."""
        until = time.monotonic() + limit
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no line {start!r} within {limit:g} s: {self.said()}") from None
            assert line is not None, f"it ended without a line {start!r}: {self.said()}"
            if line.startswith(start):
                self._memory |= memory_files(self.pids())
                return line.split()

    def said(self) -> str:
        """Return what it has written so far."""
        return " | ".join([*self.output[-20:], "errors:", *self.errors[-20:]])

    def pids(self) -> list[int]:
        """Return its processes."""
        return marked(self.mark, self.folder)

    def find(self, who: str) -> list[int]:
        """Return its processes of a kind, in the order of their start."""
        return [pid for pid in sorted(self.pids()) if _PROCESSES[who]([*command_of(pid).split(" "), *[""] * 4])]

    def interrupt(self, draw: random.Random, times: int = 1) -> None:
        """Press Ctrl-C, as a terminal does for the processes in its foreground."""
        for _ in range(times):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGINT)
            time.sleep(draw.uniform(0.05, 0.4) if times > 1 else 0.0)

    def end(self, timeout: float) -> tuple[int, str, str, float]:
        """Wait; return status, output, errors, and the seconds until nothing was left."""
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            left = [f"{pid} {command_of(pid)}" for pid in self.pids()]
            said, stacks = self.said(), self._stacks()
            self.kill()
            raise AssertionError(
                f"the job did not end within {timeout:g} s: {said}; the application is in: {stacks}; processes {left}"
            ) from None
        try:
            seconds = seconds_until_none_is_left(self.mark, LIMIT, self.folder)
            self._nothing_else_is_left()
        finally:
            self.kill()
        for reader in self._readers:
            reader.join(LIMIT)
            assert not reader.is_alive(), "somebody still has its output open"
        return status, "\n".join(self.output), "\n".join(self.errors), seconds

    def _stacks(self) -> str:
        """Have the application write where its threads are, which ends it; return that."""
        first = len(self.errors)
        for pid in (found := self.find("application")):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)
        until = time.monotonic() + _STACKS
        while set(found) & set(self.pids()) and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.1)  # what it wrote last is read by a thread
        return " | ".join(self.errors[first:][-60:])

    def _nothing_else_is_left(self) -> None:
        """Look for files, sockets and memory; who ends last may still be removing some."""
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
        """Kill all that is left of it, and remove its shared memory, for none is left who would."""
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


def lose_devices(place: Place, folder: str, draw: random.Random, moment: str) -> list[dict[str, Any]]:
    """Run a program that loses all devices but one."""
    program = "lab.campaigns.pool_losing"
    job = Job(["--agents", str(AGENTS), "-m", program, moment, str(draw.randrange(10**6))], folder)
    status, output, errors, left = job.end(120)
    found = json.loads(output.splitlines()[-1]) if output else []
    wrong = [text for each in found for text in each["wrong"]]
    assert status == 0 and not wrong, f"status {status}: {wrong} {errors}"
    return [{"what": f"{e['how']} in mid-{moment}", "seconds": e["seconds"], "left": left} for e in found]


def kill_while_starting(place: Place, folder: str, draw: random.Random) -> list[dict[str, Any]]:
    """Kill an agent at a random moment before it is ready."""
    job = Job(["--agents", "3", "-c", _WAITING], folder)
    agents: list[int] = []
    while not agents and time.monotonic() < job.began + START_LIMIT:
        agents = job.find("agent")
        time.sleep(0.005)
        assert job.process.poll() is None, job.said()
    time.sleep(draw.uniform(0.0, 1.0))
    os.kill(draw.choice(agents), signal.SIGKILL)
    killed = time.monotonic()
    while job.process.poll() is None and time.monotonic() < killed + START_LIMIT:
        time.sleep(0.01)
        if time.monotonic() > killed + LIMIT and len(job.find("agent")) == 2:
            break  # it was ready already, and the application goes on
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


def end_application(place: Place, folder: str, draw: random.Random, how: str) -> list[dict[str, Any]]:
    """End an application that uses ``ww.devices()`` in some way."""
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


# -- CUDA programs that know nothing of Warpwell -----------------------------------------------------------------------


def _client(place: Place, folder: str, draw: random.Random, *act: str, agents: int = 1, **more: Any) -> Job:
    """Start a program with so many agents here; with 0, with some of `_HOSTS`."""
    environ = {**place.environ, **({"CLIENT_NUMBA": "1"} if draw.random() < (0.3 if place.real else 0.1) else {})}
    where = ["--agents", str(agents)] if agents else ["--tcp", "--hosts", _HOSTS]
    if not agents:
        environ |= {"PRTE_MCA_plm_ssh_agent": f"/bin/sh {_ELSEWHERE}", "FAKE_DEVICES": "4"}
    return Job([*where, *place.options, CLIENT, *act], folder, environ, **more)


def interrupt(place: Place, folder: str, draw: random.Random, when: str) -> list[dict[str, Any]]:
    """Press Ctrl-C once or three times: during the start, in work, in a call of the driver, at the end, with hosts."""
    act = {"blocked": ("waits",), "end": ("rounds", "0.1"), "children": ("children", "30")}.get(when, ("rounds", "30"))
    job = _client(place, folder, draw, *act, agents=0 if when == "hosts" else 1)
    if when == "start":
        time.sleep(draw.uniform(0.05, 5.0 if place.real else 2.5))
    else:
        job.line("rounds" if when == "end" else "ready")
        time.sleep(draw.uniform(0.0, 0.5))
    times = 3 if when in ("three", "blocked") else draw.choice((1, 3)) if when == "start" else 1
    pressed = time.monotonic()
    job.interrupt(draw, times)
    status, output, errors, left = job.end(20)
    seconds = time.monotonic() - pressed - left
    # before the command has begun and after it has ended Python itself ends it: by the signal, which shells call 130
    ended = {130, -signal.SIGINT} if when in ("start", "end", "three", "blocked") else {130}
    allowed = ended | {0} if when == "end" else ended
    if status == 1 and when == "start" and errors.endswith("KeyboardInterrupt"):
        allowed = {1}  # as Python itself had begun to load its modules
    assert status in allowed and "wrong" not in output, f"status {status}: {job.said()}"
    assert "no launcher" not in errors and seconds < LIMIT, f"{seconds:.1f} s: {errors}"
    return [{"what": f"Ctrl-C: {when}", "seconds": seconds, "left": left}]


_PATIENCE = {"worker": "8", "agent": "2", "communicator": "1"}
"""Seconds in which the program tries to have back a device that was lost with such a process; a worker comes back."""


def kill(place: Place, folder: str, draw: random.Random, who: str) -> list[dict[str, Any]]:
    """Kill a process of a job at a random moment: its status is that, and a lost device is told."""
    hosts = who == "communicator"
    on_device = who in _PATIENCE
    act = ("rounds", "6" if who == "janitor" else "20", *([_PATIENCE[who]] if on_device else []))
    job = _client(place, folder, draw, *act, agents=0 if hosts else 2 if on_device else 1)
    ready = on_device or who == "janitor" or draw.random() < 0.6
    if ready:
        job.line("ready")
        time.sleep(draw.uniform(0.0, 0.4))
    else:
        time.sleep(draw.uniform(0.05, 1.5))
    pids = [job.process.pid] if who == "launcher" else job.find(who)
    until = time.monotonic() + START_LIMIT
    while not pids and job.process.poll() is None and time.monotonic() < until:
        time.sleep(0.005)
        pids = job.find(who)
    assert pids, f"there is no {who}: {job.said()}"
    if who == "worker":
        pids = pids[:2]  # those of the two devices; spare ones are started later
    killed = time.monotonic()
    with contextlib.suppress(ProcessLookupError):
        os.kill(draw.choice(pids), signal.SIGKILL)
    told = 0.0
    if on_device:
        lost = {int(job.line("lost", 2 * LIMIT)[1])}
        told = time.monotonic() - killed
        back = [job.line("back", 4 * LIMIT)[2]]
        for _ in range(2 * hosts):
            lost.add(int(job.line("lost", 2 * LIMIT)[1]))
            back.append(job.line("back", 4 * LIMIT)[2])
        counts = job.line("rounds", 2 * LIMIT)
        others = set(range(len(counts) - 1)) - lost
        assert others and all(int(counts[1 + other]) > 1 for other in others), f"other devices: {job.said()}"
        assert not hosts or lost == {1, 2, 3}, job.said()
        assert set(back) == {str(who == "worker")}, f"after a reset: {job.said()}"
    status, output, errors, left = job.end(30)
    seconds = told or max(0.0, time.monotonic() - killed - left)
    expected = {
        "application": (137,),
        "worker": (0,),
        "agent": (0,),
        "communicator": (0,),
        "janitor": (0,),
        "launcher": (-9,),
    }
    assert "wrong" not in output and status in expected.get(who, range(1, 256)), f"status {status}: {job.said()}"
    bound = 4 * LIMIT if who == "janitor" else LIMIT if ready else 3 * LIMIT
    assert seconds < bound, f"it took {seconds:.1f} s: {errors}"
    return [{"what": f"kill the {who}", "seconds": seconds, "left": left}]


_CODES = {"fault": "700", "fail": "710"}


def fail_beside(place: Place, folder: str, draw: random.Random, kernel: str) -> list[dict[str, Any]]:
    """Let two clients fault on a device on which another one works."""
    job = _client(place, folder, draw, "beside", kernel)
    status, output, _errors, left = job.end(60)
    lines = [line for line in output.splitlines() if not line.startswith("Assert")]
    assert status == 0 and lines[:2] == [f"ready code {_CODES[kernel]}"] * 2, f"status {status}: {job.said()}"
    assert lines[2].startswith("rounds") and "wrong" not in output, job.said()
    return [{"what": f"a client's device code {_CODES[kernel]}", "seconds": 0.0, "left": left}]


_WAYS = {"normal": 0, "raise": 1, "status 3": 3, "_exit 3": 3, "abort": 134, "thread": 3, "exec": 0}


def end_client(place: Place, folder: str, draw: random.Random, how: str) -> list[dict[str, Any]]:
    """End a program that has work under way on its devices."""
    job = _client(place, folder, draw, "ends", how, agents=2, limits=[(resource.RLIMIT_CORE, 0)])
    status, output, _errors, left = job.end(60)
    assert status == _WAYS[how] and "ready" in output and "wrong" not in output, f"status {status}: {job.said()}"
    return [{"what": f"ends: {how}", "seconds": 0.0, "left": left}]


def orphans(place: Place, folder: str, draw: random.Random) -> list[dict[str, Any]]:
    """Kill a program whose children work on its devices: they end with the job."""
    job = _client(place, folder, draw, "children", "30")
    job.line("ready")
    job.line("ready")
    time.sleep(draw.uniform(0.0, 0.3))
    os.kill(job.find("application")[0], signal.SIGKILL)
    killed = time.monotonic()
    status, output, _errors, left = job.end(20)
    assert status == 137 and "wrong" not in output, f"status {status}: {job.said()}"
    return [{"what": "kill a parent", "seconds": time.monotonic() - killed - left, "left": left}]


_MOUNTED = 'mount -t tmpfs -o size="$1" tmpfs "$2" && shift 2 && exec "$@"'


def without_room(place: Place, folder: str, draw: random.Random, what: str) -> list[dict[str, Any]]:
    """Run a program where files find no room: it works, or says why not; nothing hangs."""
    limits: list[tuple[int, int]] = []
    before: list[str] = []
    if what == "files":
        limits = [(resource.RLIMIT_FSIZE, draw.choice((0, 100, 4096, 100_000, 2 << 20, 20 << 20)))]
    elif what == "descriptors":
        limits = [(resource.RLIMIT_NOFILE, draw.randrange(8, 80))]
    else:
        size = draw.choice(("4k", "8k", "32k", "128k", "1m", "8m"))
        before = ["unshare", "-m", "sh", "-c", _MOUNTED, "sh", size, folder if what == "TMPDIR" else "/dev/shm"]
    job = _client(place, folder, draw, "rounds", "0.2", agents=2, before=before, limits=limits)
    status, output, errors, left = job.end(60)
    assert "wrong" not in output, job.said()
    assert "rounds" in output if status == 0 else errors, f"status {status}: {job.said()}"
    return [{"what": f"no room: {what}", "seconds": 0.0, "left": left}]


def _can_mount() -> bool:
    """Whether a folder of a size can be had for a job alone."""
    if shutil.which("unshare") is None:
        return False
    line = ["unshare", "-m", "sh", "-c", _MOUNTED, "sh", "4k", "/dev/shm", "true"]
    return subprocess.run(line, capture_output=True, check=False).returncode == 0


_Kind = tuple[str, Callable[..., list[dict[str, Any]]], tuple[Any, ...]]


def kinds(programs: str) -> list[_Kind]:
    """Return the kinds of jobs, in the order in which they come: each second one is interrupted."""
    presses: list[_Kind] = [
        (f"interrupt {when}", interrupt, (when,))
        for when in ("start", "work", "blocked", "three", "start", "end", "work", "children", "hosts")
    ]
    rooms = ["files", "descriptors", *(["TMPDIR", "shared memory"] if _can_mount() else [])]
    cuda: list[_Kind] = [
        *(
            (f"kill {who}", kill, (who,))
            for who in ("worker", "application", "agent", "launcher", "supervisor", "communicator")
        ),
        *((f"beside {kernel}", fail_beside, (kernel,)) for kernel in _CODES),
        *((f"end {how}", end_client, (how,)) for how in _WAYS),
        *((f"kill {who}", kill, (who,)) for who in ("worker", "mpiexec", "agent", "janitor", "application")),
        *((f"room {what}", without_room, (what,)) for what in rooms),
        ("orphans", orphans, ()),
    ]
    devices: list[_Kind] = [
        *((moment, lose_devices, (moment,)) for moment in MOMENTS for _ in range(len(HOWS))),
        *(("start", kill_while_starting, ()) for _ in HOWS),
        *((f"application {how}", end_application, (how,)) for how in _ENDINGS),
    ]
    if programs == "devices":
        return devices
    return [each for k, other in enumerate(cuda) for each in (presses[k % len(presses)], other)]


def place_for(driver: str | None) -> Place:
    """Return where the CUDA programs run: ``real``, ``fake``, or None for real where there is a GPU."""
    real = driver == "real" or (driver is None and bool(list_gpus()))
    if real:
        return Place({}, ["--share-gpu", "--cuda", "pool"], True)
    return Place({DRIVER: str(build.build().fake)}, ["--target", "cpu"])


def _gpu_memory() -> list[int]:
    """Return the memory in use on each GPU in MiB; nothing if there is none to ask."""
    line = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True)
        return [int(word) for word in done.stdout.split()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def _grown(before: list[int]) -> str:
    """Say what more memory of GPUs is in use than before, soon after the jobs; nothing if none is."""
    until = time.monotonic() + LIMIT
    while True:
        after = _gpu_memory()
        if all(b <= a + _SLACK_MIB for a, b in zip(before, after, strict=False)):
            return ""
        if time.monotonic() > until:
            return f"memory of GPUs in use, MiB: {before} before, {after} after"
        time.sleep(0.2)


def _kill_until_done(jobs: Sequence[Future[Any]]) -> None:
    """Kill what is under way, and what threads begin that did not know yet."""
    while not all(job.done() for job in jobs):
        for each in list(_under_way.values()):
            each.kill()
        time.sleep(0.05)


class Campaign:
    """Jobs with numbers: a seed and a number always make the same job.

    Parameters
    ----------
    place : Place
    seed : int
    kinds : list
        See `kinds`.
    """

    def __init__(self, place: Place, seed: int, kinds: list[_Kind]) -> None:
        self._place, self._seed, self._kinds = place, seed, kinds
        self.found: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.failures: list[str] = []
        self._stopped = threading.Event()

    def run(self, numbers: Sequence[int], at_a_time: int = 1, seconds: float = float("inf")) -> int:
        """Run jobs, so many at a time; begin none after so many seconds. Return how many ran.

        Ctrl-C ends those that are under way, too: they are sessions of their own.
        """
        end = time.monotonic() + seconds
        with ThreadPoolExecutor(at_a_time) as pool:
            jobs = [pool.submit(lambda n: time.monotonic() < end and self._job(n), number) for number in numbers]
            try:
                return sum(job.result() for job in jobs)
            except BaseException:
                self._stopped.set()
                threading.Thread(target=_kill_until_done, args=(jobs,)).start()  # a second Ctrl-C does not stop it
                raise

    def _job(self, number: int) -> bool:
        if self._stopped.is_set():
            return False
        name, act, words = self._kinds[number % len(self._kinds)]
        draw = random.Random(self._seed * 1_000_003 + number)
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="ww-", dir="/tmp", ignore_cleanup_errors=True) as folder:
            try:
                for each in act(self._place, folder, draw, *words):
                    self.found[each["what"]].append({**each, "took": time.monotonic() - began})
            except Exception as error:
                if self._stopped.is_set():
                    return False
                self.failures.append(f"job {number} ({name}): {type(error).__name__}: {error}")
                print(self.failures[-1], file=sys.stderr, flush=True)
            finally:
                if job := _under_way.pop(Path(folder), None):
                    job.kill()
        return True

    def table(self) -> list[str]:
        """Return a line for each kind."""
        lines = []
        for what, times_of in sorted(self.found.items()):
            told, left, took = (sorted(e[key] for e in times_of) for key in ("seconds", "left", "took"))
            lines.append(
                f"{what:26} {len(told):4} times; told or ended after {told[len(told) // 2]:.2f} s (median),"
                f" {told[-1]:.2f} s (most); nothing left {left[-1]:.2f} s later (most); a job took"
                f" {took[len(took) // 2]:.1f} s"
            )
        return lines


def main(argv: list[str] | None = None) -> int:
    """Run; return 1 if anything was not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m lab campaign pool_faults", description=__doc__)
    parser.add_argument("--jobs", type=int, default=200, metavar="N", help="default 200")
    parser.add_argument("--seed", type=int, default=7, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first job (default 0)")
    parser.add_argument("--at-a-time", type=int, default=1, metavar="N", help="jobs that run together (default 1)")
    parser.add_argument(
        "--within", type=float, default=float("inf"), metavar="SECONDS", help="begin no job after so many seconds"
    )
    parser.add_argument(
        "--programs",
        choices=("cuda", "devices"),
        default="cuda",
        help="unmodified CUDA programs (default), or programs that use ww.devices()",
    )
    parser.add_argument("--driver", choices=("real", "fake"), help="default: real where there is a GPU")
    parser.add_argument("--only", metavar="WORD", help="kinds of jobs whose name has this word")
    arguments = parser.parse_args(argv)
    wanted = [each for each in kinds(arguments.programs) if (arguments.only or "") in each[0]]
    if not wanted:
        parser.error(f"--only {arguments.only}: the kinds are {', '.join(sorted({k[0] for k in kinds('cuda')}))}")
    campaign = Campaign(place_for(arguments.driver), arguments.seed, wanted)
    before, began = _gpu_memory(), time.monotonic()
    jobs = campaign.run(range(arguments.first, arguments.first + arguments.jobs), arguments.at_a_time, arguments.within)
    print("\n".join(campaign.table()))
    if grown := _grown(before):
        campaign.failures.append(grown)
        print(grown, file=sys.stderr)
    presses = sum(len(each) for what, each in campaign.found.items() if "Ctrl-C" in what)
    print(
        f"{len(campaign.failures)} failures in {jobs} jobs, {presses} of them interrupted,"
        f" in {time.monotonic() - began:.0f} s{f'; memory of GPUs {before} MiB' if before else ''}"
    )
    return int(bool(campaign.failures))


if __name__ == "__main__":
    sys.exit(main())
