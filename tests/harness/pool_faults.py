"""Kills, exits and stops of the processes of a pool, at random moments: ``python -m tests.harness.pool_faults``.

It checks that a lost device is told within 5 s while the others go on; that a job whose agents do not all start ends
within 40 s and names one; that `run` returns the application's status; and that 5 s later no process and no file of a
job is left, whatever happened.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .marked import MARK, command_of, marked, seconds_until_none_is_left
from .pool_losing import HOWS, LIMIT, MOMENTS

AGENTS = 4
START_LIMIT = 40.0

_WAITING = "import time, warpwell as ww; print(len(ww.devices()), flush=True); time.sleep(100)"
_ENDINGS: dict[str, tuple[str, int]] = {
    "kill": (_WAITING, 137),
    "raise": ("import warpwell as ww; len(ww.devices()); raise ValueError('on purpose')", 1),
    "status 3": ("import sys, warpwell as ww; len(ww.devices()); sys.exit(3)", 3),
    "_exit 3": ("import os, warpwell as ww; len(ww.devices()); os._exit(3)", 3),
    "normal": ("import warpwell as ww; len(ww.devices())", 0),
}


class Job:
    """One ``warpwell run``."""

    def __init__(self, arguments: list[str], folder: str) -> None:
        self.mark = uuid.uuid4().hex
        self.folder = Path(folder)
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "warpwell", "run", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env={**os.environ, MARK: self.mark, "TMPDIR": folder}, start_new_session=True,
        )  # fmt: skip

    def find(self, module: str) -> list[int]:
        """Return its processes that run a module of the pool: ``python -m warpwell.pool.MODULE ..``."""
        wanted = ["-m", f"warpwell.pool.{module}"]
        return [pid for pid in marked(self.mark) if command_of(pid).split(" ")[1:3] == wanted]

    def end(self, timeout: float) -> tuple[int, str, str, float]:
        """Wait; return status, output, errors, and the seconds until no process was left."""
        try:
            output, errors = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            output, errors = self.process.communicate()
            raise AssertionError(f"the job did not end within {timeout:g} s: {output} {errors}") from None
        try:
            seconds = seconds_until_none_is_left(self.mark, LIMIT)
        finally:
            self.kill()
        files = [str(path) for base in self.folder.glob("warpwell-pool-*") for path in base.iterdir()]
        files += [n for n in os.listdir("/dev/shm") if n.startswith(f"warpwell-pool-{os.getuid()}-{self.process.pid}")]
        assert not files, f"left behind: {files}"
        return self.process.returncode, output, errors, seconds

    def kill(self) -> None:
        """Kill all that is left of it."""
        for pid in marked(self.mark):
            os.kill(pid, signal.SIGKILL)


def lose_devices(folder: str, moment: str, seed: int) -> list[dict[str, Any]]:
    """Run a program that loses all devices but one."""
    job = Job(["--agents", str(AGENTS), "-m", "tests.harness.pool_losing", moment, str(seed)], folder)
    status, output, errors, left = job.end(120)
    found = json.loads(output.splitlines()[-1]) if output else []
    wrong = [text for each in found for text in each["wrong"]]
    assert status == 0 and not wrong, f"status {status}: {wrong} {errors}"
    return [{"what": f"{e['how']} in mid-{moment}", "seconds": e["seconds"], "left": left} for e in found]


def kill_while_starting(folder: str, seed: int) -> list[dict[str, Any]]:
    """Kill an agent at a random moment before it is ready."""
    draw = random.Random(seed)
    job = Job(["--agents", "3", "-c", _WAITING], folder)
    agents: list[int] = []
    while not agents and time.monotonic() < job.began + START_LIMIT:
        agents = job.find("agent.agent_main")
        time.sleep(0.005)
        assert job.process.poll() is None, job.process.communicate()[1]
    time.sleep(draw.uniform(0.0, 1.0))
    os.kill(draw.choice(agents), signal.SIGKILL)
    killed = time.monotonic()
    while job.process.poll() is None and time.monotonic() < killed + START_LIMIT:
        time.sleep(0.01)
        if time.monotonic() > killed + LIMIT and len(job.find("agent.agent_main")) == 2:
            break  # it was ready already, and the application goes on
    if job.process.poll() is None:
        os.kill(job.find("launch.application")[0], signal.SIGKILL)
        status, _, _, left = job.end(20)
        assert status == 137, f"status {status}"
        return [{"what": "killed when ready", "seconds": 0.0, "left": left}]
    seconds = time.monotonic() - killed
    status, _, errors, left = job.end(20)
    assert status == 2 and "agent " in errors and "device " in errors, f"status {status}: {errors}"
    return [{"what": "killed before ready", "seconds": seconds, "left": left}]


def end_application(folder: str, how: str, seed: int) -> list[dict[str, Any]]:
    """End the application in some way."""
    program, expected = _ENDINGS[how]
    job = Job(["--agents", "2", "-c", program], folder)
    killed = None
    if how == "kill":
        assert job.process.stdout is not None and job.process.stdout.readline().strip() == "2"
        time.sleep(random.Random(seed).uniform(0, 0.3))
        os.kill(job.find("launch.application")[0], signal.SIGKILL)
        killed = time.monotonic()
    status, _, errors, left = job.end(60)
    seconds = 0.0 if killed is None else time.monotonic() - killed - left
    assert status == expected, f"status {status}: {errors}"
    return [{"what": f"application: {how}", "seconds": seconds, "left": left}]


def main(argv: list[str] | None = None) -> int:
    """Run; return 1 if anything was not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m tests.harness.pool_faults", description=__doc__)
    parser.add_argument("--times", type=int, default=50, metavar="N", help="each kind of fault (default 50)")
    parser.add_argument("--seed", type=int, default=7, metavar="N")
    parser.add_argument("--quick", action="store_true", help="each kind once or twice")
    arguments = parser.parse_args(argv)
    times = 1 if arguments.quick else arguments.times
    tasks: list[tuple[str, Callable[[str, int], list[dict[str, Any]]]]] = []
    for moment in MOMENTS:
        jobs = -(-times * len(HOWS) // (AGENTS - 1))  # a job has each of the three once
        tasks += [(moment, lambda f, s, m=moment: lose_devices(f, m, s))] * jobs  # type: ignore[misc]
    tasks += [("start", kill_while_starting)] * times
    for how in _ENDINGS:
        tasks += [(how, lambda f, s, h=how: end_application(f, h, s))] * times  # type: ignore[misc]
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    failures = 0
    for number, (name, task) in enumerate(tasks):
        seed = arguments.seed * 1_000_003 + number
        with tempfile.TemporaryDirectory(prefix="ww-", dir="/tmp") as folder:
            try:
                for each in task(folder, seed):
                    found[each["what"]].append(each)
            except Exception as error:
                failures += 1
                print(f"{name}, seed {seed}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    for what, times_of in sorted(found.items()):
        told, left = sorted(e["seconds"] for e in times_of), sorted(e["left"] for e in times_of)
        print(f"{what:24} {len(told):4} times; told after {told[len(told) // 2]:.2f} s (median), {told[-1]:.2f} s"
              f" (most); nothing left {left[-1]:.2f} s later (most)")  # fmt: skip
    print(f"{failures} failures in {len(tasks)} jobs")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
