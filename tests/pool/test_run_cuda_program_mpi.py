"""A CUDA program under ``warpwell run`` has the agents' GPUs, here of the fake driver, and leaves no worker."""

import contextlib
import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from tests.harness.driver import faults, natives, over_mpi
from tests.harness.until import until

from lab.campaigns.marked import command_of
from lab.driver import build

from .runs import PROGRAMS, Run, Start, start

__all__ = ["start"]


def workers(mark: str) -> list[int]:
    """Processes of workers with a mark in their environment: nothing else of the job's is in that."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"ww_worker" in (folder / "cmdline").read_bytes() and mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def served(mark: str) -> set[int]:
    """Numbers of the devices whose workers have a client and therefore a ring; a spare worker has no ring."""
    found = set()
    for pid in workers(mark):
        with contextlib.suppress(OSError, ValueError):
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if "warpwell-ring" in Path(f"/proc/{pid}/maps").read_text():
                found.add(int(arguments[arguments.index(b"--ordinal") + 1]))
    return found


def paths(pid: int) -> list[str]:
    """Return the folders in which a process looks for libraries."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return next((word.partition("=")[2] for word in variables if word.startswith("LD_LIBRARY_PATH=")), "").split(":")


def test_a_program_has_the_devices_of_all_agents_and_its_workers_end_with_it(start: Start) -> None:
    mark = uuid.uuid4().hex
    environ = {"WARPWELL_CUDA_DRIVER": str(build.build().fake), "FAKE_MARK": mark, "CUDA_VISIBLE_DEVICES": "7"}
    program = str(PROGRAMS / "cuda_program.py")
    run = start("--agents", "2", "--target", "cpu", "--explain-refused", program, environ=environ)
    run.line("waits")
    assert run.output.split("\n")[:2] == ["device 0 True", "device 1 True"]
    assert served(mark) == {0, 1}
    # Including the paths that mpiexec adds.
    assert paths(run.find("cuda_program.py")[-1])[1:] == paths(run.find("agent_main")[-1])
    assert not any(b"WARPWELL_POOL" in Path(f"/proc/{pid}/environ").read_bytes() for pid in workers(mark))
    top = [sys.executable, "-m", "warpwell", "pool", "top", "--json"]
    shown = subprocess.run(top, env={**os.environ, "TMPDIR": str(run.folder)}, capture_output=True, check=True).stdout
    programs = [each for agent in json.loads(shown)["agents"] for each in agent["info"]["programs"]]
    assert [(each["device"], each["bytes"], each["pid"]) for each in programs] == [
        (device, 2 << 20, run.find("cuda_program.py")[-1]) for device in range(2)
    ]
    assert {each["worker"] for each in programs} <= {*workers(mark)} and all(each["calls"] > 5 for each in programs)
    assert {each["command"] for each in programs} == {program}
    os.kill(run.find("cuda_program.py")[-1], 9)
    run.end()
    assert run.errors.endswith("to the CUDA driver: managed memory of a program with several devices\n")
    run.nothing_is_left()
    until(lambda: not workers(mark))


def of_rank(run: Run, rank: int) -> int:
    """Return the process of a rank."""
    members = [pid for pid in run.find("warpwell.pool") if "supervise.py" not in command_of(pid)]
    return next(p for p in members if f"PMIX_RANK={rank}\0".encode() in Path(f"/proc/{p}/environ").read_bytes())


@pytest.mark.slow
def test_a_program_has_the_devices_of_other_hosts_and_loses_only_those(start: Start, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    environ = {**over_mpi.emulated(tmp_path, build.build().fake), "FAKE_MARK": mark}
    run = start(*over_mpi.HOSTS, str(PROGRAMS / "cuda_hosts.py"), environ=environ)
    assert run.line("agents ") == ["4"]
    found = workers(mark)
    assert served(mark) == {0, 1, 2, 3}
    assert not any(b"WARPWELL_POOL" in Path(f"/proc/{p}/environ").read_bytes() for p in found)
    os.kill(of_rank(run, 4), 9)
    run.line("lost 46 46")
    run.line("right 0 1 2")
    until(lambda: served(mark) == {0, 1, 2})
    os.kill(of_rank(run, 5), 9)  # the communicator
    run.line("lost 46 46")
    until(lambda: served(mark) <= {0})  # the program ends soon
    assert run.end() == 0, run.errors
    assert run.output == "right 0 1 2 3\nright 0\n"
    assert run.errors.count("its worker has ended") == 3
    run.nothing_is_left()
    until(lambda: not workers(mark))


@pytest.mark.slow
@pytest.mark.parametrize("away", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["here", "away"])
def test_a_program_that_executes_another_keeps_its_devices(start: Start, tmp_path: Path, away: bool) -> None:
    environ = {"WARPWELL_CUDA_DRIVER": str(build.build().fake)}
    where = ["--agents", "2", "--target", "cpu"]
    if away:
        where, environ = list(over_mpi.HOSTS), over_mpi.emulated(tmp_path, build.build().fake)
    # The executed program does not use MPI, so the agents receive no more messages.
    run = start(*where, str(PROGRAMS / "cuda_exec.py"), environ={**environ, "WARPWELL_POOL_TIMEOUT": "1"})
    assert run.end() == 0, run.errors
    assert run.output == f"right {4 if away else 2}\n"
    run.nothing_is_left()


def test_programs_are_right_on_devices_of_another_host() -> None:
    assert over_mpi.programs(0, 3).endswith("3 programs are right\n")


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the fake driver take random times."""
    monkeypatch.setenv("FAKE_SEED", "7")


@pytest.mark.slow
def test_random_programs_are_right_over_mpi_and_wait_for_a_late_communicator(delays: None) -> None:
    changes = {"communicator_main.py": {"near.begin(tr": '__import__("time").sleep(1.0); near.begin(tr'}}
    assert over_mpi.programs(0, 20, "--threads", "2", changes=changes) == "20 programs are right\n"


@pytest.mark.slow
def test_many_random_programs_are_right_over_mpi(delays: None) -> None:
    assert over_mpi.programs(0, 500) == "500 programs are right\n"
    output = over_mpi.programs(500, 700, "--threads", "4", devices=4, changes=over_mpi.LIMITS)
    assert output == "200 programs are right\n"


@pytest.mark.slow
@pytest.mark.parametrize("fault", faults.OVER_MPI)
def test_planted_faults_between_hosts_are_found_over_mpi(fault: str, delays: None) -> None:
    changes = natives.merged(over_mpi.LIMITS, faults.OVER_MPI[fault])
    try:
        assert over_mpi.programs(100, 200, "--threads", "4", changes=changes, seconds=50) != "100 programs are right\n"
    except subprocess.TimeoutExpired:
        pass  # a planted fault may leave a process asleep
