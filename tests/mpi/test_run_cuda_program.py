"""A CUDA program under ``warpwell run`` has the agents' GPUs, here those of the fake driver, and leaves no worker."""

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

from tests.harness.until import until

from warpwell.driver import build
from warpwell.pool.launch.processes import environ_of, rank_of

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


def paths(pid: int) -> list[str]:
    """Return the folders in which a process looks for libraries."""
    words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return next((word.partition("=")[2] for word in words if word.startswith("LD_LIBRARY_PATH=")), "").split(":")


def test_a_program_has_the_devices_of_all_agents_and_its_workers_end_with_it(start: Start) -> None:
    mark = uuid.uuid4().hex
    environ = {"WARPWELL_CUDA_DRIVER": str(build.build().fake), "FAKE_MARK": mark, "CUDA_VISIBLE_DEVICES": "7"}
    program = str(PROGRAMS / "cuda_program.py")
    run = start("--agents", "2", "--target", "cpu", "--explain-refused", program, environ=environ)
    run.line("waits")
    assert run.output.split("\n")[:2] == ["device 0 True", "device 1 True"]
    found = workers(mark)
    assert len(found) == 2
    assert paths(run.find("cuda_program.py")[-1])[1:] == paths(run.find("agent_main")[-1])  # those of mpiexec, too
    assert not any(b"WARPWELL_POOL" in Path(f"/proc/{pid}/environ").read_bytes() for pid in found)
    top = [sys.executable, "-m", "warpwell", "pool", "top", "--json"]
    shown = subprocess.run(top, env={**os.environ, "TMPDIR": str(run.folder)}, capture_output=True, check=True).stdout
    programs = [each for agent in json.loads(shown)["agents"] for each in agent["info"]["programs"]]
    assert [(each["device"], each["bytes"], each["pid"]) for each in programs] == [
        (device, 2 << 20, run.find("cuda_program.py")[-1]) for device in range(2)
    ]
    assert {each["worker"] for each in programs} == set(found) and all(each["calls"] > 5 for each in programs)
    assert {each["command"] for each in programs} == {program}
    os.kill(run.find("cuda_program.py")[-1], 9)
    run.end()
    assert run.errors.endswith("functions of the driver that the pool does not serve: cuMemAllocManaged\n")
    run.nothing_is_left()
    until(lambda: not workers(mark))


def of_rank(run: Run, rank: int) -> int:
    """Return the process of a rank."""
    return next(pid for pid in run.find("warpwell.pool") if rank_of(environ_of(pid)) == rank)


def test_a_program_has_the_devices_of_other_hosts_and_loses_only_those(start: Start, tmp_path: Path) -> None:
    """The other host is this one under another name, and has as many ranks: Open MPI mistakes two such nodes else."""
    shell = tmp_path / "ssh"
    shell.write_text('#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done; shift; exec sh -c "$*"\n')
    shell.chmod(0o755)
    mark = uuid.uuid4().hex
    environ = {"WARPWELL_CUDA_DRIVER": str(build.build().fake), "FAKE_MARK": mark, "FAKE_DEVICES": "4",
               "PRTE_MCA_plm_ssh_agent": str(shell)}  # fmt: skip
    program = str(PROGRAMS / "cuda_hosts.py")
    run = start("--tcp", "--hosts", "localhost:1,elsewhere:3", "--target", "cpu", program, environ=environ)
    assert run.line("agents ") == ["4"]
    found = workers(mark)
    assert len(found) == 4 and not any(b"WARPWELL_POOL" in Path(f"/proc/{p}/environ").read_bytes() for p in found)
    os.kill(of_rank(run, 4), 9)
    run.line("lost 46 46")
    run.line("right 0 1 2")
    until(lambda: len(workers(mark)) == 3)
    os.kill(of_rank(run, 5), 9)  # the communicator
    run.line("lost 46 46")
    until(lambda: len(workers(mark)) == 1)
    assert run.end() == 0, run.errors
    assert run.output == "right 0 1 2 3\nright 0\n"
    assert run.errors.count("its worker has ended") == 3
    run.nothing_is_left()
    until(lambda: not workers(mark))
