"""Claims of GPUs among the processes of a host. No GPU is needed: a UUID is a name."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.harness.until import HANG_SECONDS, until

from warpwell._os import clock
from warpwell.driver.build import Built, find_parts
from warpwell.errors import AgentError, DeviceNotFoundError, DriverBuildError
from warpwell.pool.agent.runtime import Runtime
from warpwell.pool.launch import cuda_programs, reservation
from warpwell.pool.launch.options import RunOptions
from warpwell.pool.launch.reservation import FOLDER, Claim, Reservation, user_of, users

CLAIMING_PROGRAM = """
import sys, time
from warpwell.pool.launch.reservation import Claim
try:
    Claim(sys.argv[1], exclusive=sys.argv[2] == "own")
    print("has", flush=True)
except Exception as error:
    print(error, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path / "locks"))
    return tmp_path / "locks"


@pytest.fixture
def claim_elsewhere() -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """``claim_elsewhere("GPU-1", "own" or "share")``: start another process that claims; return it and its answer."""
    started: list[subprocess.Popen[str]] = []

    def start(uuid: str, how: str) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, "-c", CLAIMING_PROGRAM, uuid, how], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_second_job_takes_another_gpu_until_the_first_has_died(claim_elsewhere: Callable[..., tuple]) -> None:
    process, answer = claim_elsewhere("GPU-1", "own")
    assert answer == "has"
    owners = users(["GPU-1", "GPU-2"])
    assert list(owners) == ["GPU-1"] and f"process {process.pid} of user" in owners["GPU-1"]
    second = Reservation(["GPU-1", "GPU-2"], 1)
    assert second.poll() == second.poll() == ["GPU-2"]
    second.close()
    with pytest.raises(AgentError, match=f"GPU-1 is in use by process {process.pid}"):
        Claim("GPU-1", exclusive=True)
    with pytest.raises(AgentError, match=f"2 GPUs of the 2 .*GPU-1 is in use by process {process.pid}.*--wait"):
        Reservation(["GPU-1", "GPU-2"], 2).poll()
    Claim("GPU-1").free()  # shared
    process.kill()
    process.wait()
    assert not users(["GPU-1", "GPU-2"])
    Claim("GPU-1", exclusive=True).free()


def test_a_closed_file_in_one_thread_drops_no_claim_of_another() -> None:
    first = Claim("GPU-1", exclusive=True)
    Claim("GPU-1").free()
    assert user_of("GPU-1") is not None
    with pytest.raises(AgentError, match="GPU-1 is in use"):
        Claim("GPU-1", exclusive=True)
    first.free()
    assert user_of("GPU-1") is None


def test_a_claim_that_cannot_be_described_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(*_: object) -> int:
        raise OSError("no space left on device")

    with monkeypatch.context() as full:
        full.setattr("os.pwrite", is_full)
        with pytest.raises(OSError, match="no space"):
            Claim("GPU-1", exclusive=True)
    assert user_of("GPU-1") is None


def test_who_shares_keeps_others_from_having_it_for_themselves(claim_elsewhere: Callable[..., tuple]) -> None:
    claim = Claim("GPU-1")
    assert claim_elsewhere("GPU-1", "share")[1] == "has"
    assert "is in use by process" in claim_elsewhere("GPU-1", "own")[1]
    claim.free()
    with pytest.raises(AgentError, match="is in use"):
        Claim("GPU-1", exclusive=True)
    assert user_of("GPU-1") is not None


def tickets(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "queue"))


def test_more_gpus_than_there_are_fail_at_once() -> None:
    with pytest.raises(AgentError, match=r"3 GPUs of the 2 on host .*: start fewer, add hosts"):
        Reservation(["GPU-1", "GPU-2"], 3, wait=60)


def test_jobs_get_gpus_in_the_order_of_their_tickets(folder: Path) -> None:
    notes: list[str] = []
    first = Reservation(["GPU-1", "GPU-2"], 1, 60, notes.append)
    assert first.poll() == ["GPU-1"] and not tickets(folder)
    both = Reservation(["GPU-1", "GPU-2"], 2, 60, notes.append)
    third = Reservation(["GPU-2", "GPU-1"], 1, 60, notes.append)
    for _ in range(2):
        assert not both.poll() and not third.poll()  # GPU-2 is free, but `both` is ahead in the queue
    assert len(notes) == 2 and "waiting for 2 GPUs of the 2" in notes[0] and "1 job ahead" in notes[1]
    with pytest.raises(AgentError, match="2 jobs ahead in the queue; wait for them with --wait"):
        Reservation(["GPU-2"], 1).poll()
    assert tickets(folder) == ["1", "2"]
    unrelated = Reservation(["GPU-3"], 1)  # no job ahead in the queue wants this GPU
    assert unrelated.poll() == ["GPU-3"]
    first.close()
    assert not third.poll() and both.poll() == ["GPU-1", "GPU-2"] and not third.poll()
    both.close()
    assert third.poll() == ["GPU-2"] and not tickets(folder)
    for each in (third, unrelated):
        each.close()
    assert not users(["GPU-1", "GPU-2", "GPU-3"])


def test_a_wait_ends_with_the_names_of_the_holders(folder: Path) -> None:
    notes: list[str] = []
    holder = Reservation(["GPU-1", "GPU-2"], 2)
    holder.poll()
    waiting = Reservation(["GPU-1"], 1, 1000.0, notes.append)
    for number in range(1, 4):
        assert not waiting.poll() and len(notes) == number
        clock.advance(reservation.NOTE_SECONDS)
    clock.advance(1000.0)
    match = rf"GPU-1 is in use by process {os.getpid()} .*GPU-2 is .*not free within 1000 s"
    with pytest.raises(AgentError, match=match):
        waiting.poll()
    assert not tickets(folder)


JOB = """
import sys, time
from warpwell.pool.launch.reservation import Reservation
job = Reservation(["GPU-1", "GPU-2"], int(sys.argv[2]), 600, lambda text: print("waits", flush=True))
while not job.poll():
    time.sleep(0.01)
print("has", sys.argv[1], flush=True)
time.sleep(float(sys.argv[3]))
"""


def begin(name: object, count: int = 2, seconds: float = 60) -> subprocess.Popen[str]:
    """Start a job that waits for GPUs, and keeps them for some time."""
    command = [sys.executable, "-c", JOB, str(name), str(count), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def line_of(job: subprocess.Popen[str]) -> str:
    assert job.stdout is not None
    return job.stdout.readline().strip()


def end(*jobs: subprocess.Popen[str]) -> None:
    for job in jobs:
        job.kill()
        job.communicate()


def test_three_jobs_run_in_order_and_the_first_is_killed(folder: Path) -> None:
    jobs = []
    for name in range(3):
        jobs.append(begin(name))
        assert line_of(jobs[name]) == ("waits" if name else "has 0")
    end(jobs[0])
    assert line_of(jobs[1]) == "has 1" and tickets(folder) == ["2"]
    end(jobs[1])
    assert line_of(jobs[2]) == "has 2" and tickets(folder) == []
    end(jobs[2])


def test_kills_at_random_moments_leave_no_ticket(folder: Path) -> None:
    seed = random.Random(7)
    jobs: list[subprocess.Popen[str]] = []
    for name in range(8):
        jobs.append(begin(name, seed.randint(1, 2), 0.05))
    for job in jobs[1:]:
        time.sleep(seed.random() * 0.3)
        end(job)
    assert "has 0" in jobs[0].communicate(timeout=HANG_SECONDS)[0]
    last = Reservation(["GPU-1", "GPU-2"], 2)
    assert last.poll() and not tickets(folder)
    last.close()


def test_files_are_for_all_users_of_the_host(folder: Path) -> None:
    before = os.umask(0o077)
    try:
        assert Reservation(["GPU-1"], 1).poll() == ["GPU-1"]
    finally:
        os.umask(before)
    modes = [path.stat().st_mode & 0o7777 for path in (folder, folder / "queue", folder / "GPU-1")]
    assert modes == [0o1777, 0o777, 0o666]


def test_without_a_folder_to_lock_in_it_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.write_text("no folder")
    Claim("GPU-1").free()
    assert f"set {FOLDER} to a folder" in capsys.readouterr().err
    assert not users(["GPU-1"])
    assert Reservation(["GPU-1", "GPU-2"], 1).poll() == ["GPU-1"]
    assert f"set {FOLDER} to a folder" in capsys.readouterr().err


def test_every_cpu_agent_has_a_uuid_of_its_own() -> None:
    first, second = Runtime(), Runtime()
    assert first.info()["uuid"] == first.info()["uuid"] != second.info()["uuid"]


def test_cuda_calls_stay_local_where_the_pool_cannot_serve_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cuda_programs, "has_driver", lambda _: True)
    monkeypatch.setattr(cuda_programs.build, "parts", lambda: pytest.fail("no program needs the layer"))
    refused = ({"target": "cpu"}, "--target cpu"), ({"gpus": False}, "has no GPU")
    for options, why in refused:
        assert cuda_programs.prepare(RunOptions(**options), tmp_path, {}, False) is None  # type: ignore[arg-type]
        with pytest.raises(DeviceNotFoundError, match=why):
            cuda_programs.prepare(RunOptions(cuda="pool", **options), tmp_path, {}, False)  # type: ignore[arg-type]
    with pytest.raises(DeviceNotFoundError, match="in a program of warpwell run"):
        cuda_programs.prepare(RunOptions(cuda="pool"), tmp_path, {"WARPWELL_CUDA": "/job"}, False)
    assert not list(tmp_path.iterdir())


def test_a_program_of_a_login_node_has_the_gpus_of_other_hosts_if_it_asks_for_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cuda_programs, "has_driver", lambda _: False)
    monkeypatch.setattr(cuda_programs.build, "parts", lambda: find_parts(tmp_path))
    assert cuda_programs.prepare(RunOptions(gpus=False), tmp_path, {}, True) is None
    assert cuda_programs.prepare(RunOptions(cuda="pool", gpus=False), tmp_path, {}, True) is not None


def test_a_slow_build_of_the_layer_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(is_slow: bool) -> Built:
        if is_slow:
            until(lambda: "compiling the layer" in capsys.readouterr().err)
        raise DriverBuildError("there is no compiler")

    for silent_seconds, is_slow in ((HANG_SECONDS, False), (0.02, True)):
        monkeypatch.setattr(cuda_programs, "_COMPILE_NOTE_SECONDS", silent_seconds)
        monkeypatch.setattr(cuda_programs.build, "parts", lambda is_slow=is_slow: make(is_slow))
        assert cuda_programs.prepare(RunOptions(), tmp_path, {cuda_programs.DRIVER: "fake"}, False) is None
        assert not capsys.readouterr().err
