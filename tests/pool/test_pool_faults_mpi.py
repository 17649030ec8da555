"""A small campaign of kills and interrupts in jobs with unmodified CUDA programs, and planted leftovers."""

import itertools
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.harness.until import HANG_SECONDS

from lab.campaigns import pool_faults

LEAVES = """
import os, socket, subprocess, sys, time
what, folder = sys.argv[1], os.environ["TMPDIR"]
held = os.memfd_create("ring", 0)
os.set_inheritable(held, True)
print("ready", flush=True)
while not os.path.exists(folder + "/go"):
    time.sleep(0.01)
os.remove(folder + "/go")
sleep, quiet = ["sleep", "8"], dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
if what == "process":
    subprocess.Popen(sleep, **quiet)
elif what == "memory":
    subprocess.Popen(sleep, env={"PATH": os.environ["PATH"]}, close_fds=False, **quiet)
elif what == "shared":
    os.mkdir(f"/dev/shm/warpwell-pool-{os.getuid()}-{os.getpid()}" + 8 * "a")
elif what == "output":
    subprocess.Popen(sleep, env={"PATH": os.environ["PATH"]}, start_new_session=True)
elif what == "socket":
    socket.socket(socket.AF_UNIX).bind(folder + "/socket")
elif what == "file":
    os.makedirs(folder + "/warpwell-pool-0/job")
"""


@pytest.mark.slow
def test_jobs_with_cuda_programs_leave_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert pool_faults.main(["--jobs", "2", "--at-a-time", "2", "--driver", "fake", "--seed", "1"]) == 0
    assert "0 failures in 2 jobs, 1 of them interrupted" in capfd.readouterr().out


@pytest.mark.slow
def test_jobs_of_all_kinds_leave_nothing() -> None:
    for programs in ("cuda", "devices"):
        jobs = len(pool_faults.kinds(programs))
        arguments = ["--jobs", str(jobs), "--at-a-time", "2", "--programs", programs, "--driver", "fake"]
        assert pool_faults.main(arguments) == 0


@pytest.mark.parametrize("leftover", ["process", "memory", "shared", "output", "socket", "file", "nothing"])
def test_what_a_job_leaves_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leftover: str) -> None:
    if leftover != "nothing":
        monkeypatch.setattr(pool_faults, "LIMIT", 0.2)
    job = pool_faults.Job([], str(tmp_path), before=[sys.executable, "-c", LEAVES, leftover])
    try:
        job.line("ready")
        (tmp_path / "go").touch()
        if leftover == "nothing":
            assert job.end(HANG_SECONDS)[0] == 0
        else:
            with pytest.raises(AssertionError, match=r"left|output open"):
                job.end(HANG_SECONDS)
    finally:
        job.kill()
    assert not list(Path("/dev/shm").glob(f"warpwell-pool-{os.getuid()}-{job.process.pid}{8 * 'a'}"))


STAY_ALIVE = """
import sys, threading, time
def report(thread):
    while sys._current_frames()[thread].f_code.co_name != "wait":
        time.sleep(0.01)
    print("ready", flush=True)
threading.Thread(target=report, args=(threading.get_ident(),), daemon=True).start()
threading.Event().wait(100)
"""


def test_a_job_that_does_not_end_tells_where_its_application_is(tmp_path: Path) -> None:
    job = pool_faults.Job([], str(tmp_path), before=[sys.executable, "-c", STAY_ALIVE])
    job.find = lambda role: [job.process.pid]  # type: ignore[method-assign]
    job.line("ready")
    with pytest.raises(AssertionError, match=r"the application is in: .*threading.py.* in wait"):
        job.end(0.2)


def test_an_interrupted_campaign_kills_its_jobs() -> None:
    jobs: list[pool_faults.Job] = []
    numbers = itertools.count()

    def stay_alive(setup: pool_faults.Setup, folder: str, draw: random.Random) -> list[dict[str, Any]]:
        number = next(numbers)
        jobs.append(job := pool_faults.Job([], folder, before=[sys.executable, "-c", STAY_ALIVE]))
        job.line("ready")
        if number == 1:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        job.end(HANG_SECONDS)
        return []

    campaign = pool_faults.Campaign(pool_faults.Setup(), 5, [("stays", stay_alive, ())])
    with pytest.raises(KeyboardInterrupt):
        campaign.run(range(5), 2)
    assert len(jobs) <= 2 and not campaign.failures
    assert not [pid for job in jobs for pid in job.pids()]


def test_a_seed_and_a_number_are_always_the_same_job() -> None:
    drawn: list[tuple[str, float]] = []

    def act(name: str) -> object:
        return lambda setup, folder, draw, *arguments: drawn.append((name, draw.random())) or []

    kinds = [(name, act(name), ()) for name in "abc"]
    pool_faults.Campaign(pool_faults.Setup(), 5, kinds).run(range(6), 1)  # type: ignore[arg-type]
    pool_faults.Campaign(pool_faults.Setup(), 5, kinds).run([4], 3)  # type: ignore[arg-type]
    assert drawn[6] == drawn[4] == ("b", random.Random(5 * 1_000_003 + 4).random())
