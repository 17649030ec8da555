"""``warpwell run`` under a real Slurm of one node with two GPUs of the fake driver."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.harness.until import HANG_SECONDS, until

from lab.driver import build
from warpwell.pool.launch.reservation import FOLDER

from .runs import SOURCES, Start, start

__all__ = ["start"]

PATIENT = ("--start-timeout", f"{HANG_SECONDS:g}", "--cuda", "pool")
SBIN = f"{os.environ['PATH']}:/usr/sbin:/sbin"
CONFIGURATION = """
ClusterName=warpwell
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdSpoolDir={folder}/spool
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
KillWait=1
SwitchType=switch/none
SchedulerParameters=sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=100 Gres=gpu:2
PartitionName=main Nodes={host} Default=YES
"""
PLANTED = """
import os, sys
if sys.argv[:1] == ["-m"]:
    import warpwell.pool.devices as devices
    import warpwell.pool.launch.gpus as gpus
    from warpwell.pool.agent.runtime import Runtime
    gpus.list_gpus = lambda: [f"GPU-{n[-1]}" for n in os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",") if n]
    devices.runtime_for = lambda target: Runtime()
"""
PROGRAM = """
import os, sys, time, warpwell as ww
for device in ww.devices():
    print("device", device.call(os.getenv, "CUDA_VISIBLE_DEVICES").get(), flush=True)
print("runs", flush=True)
if sys.argv[1:] == ["hold"]:
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Path]:
    """Yield the configuration of a running Slurm."""
    daemons = {name: shutil.which(name, path=SBIN) for name in ("munged", "slurmctld", "slurmd")}
    if not all(daemons.values()) or not shutil.which("salloc"):
        pytest.skip("needs the Debian packages slurm-wlm and munge")
    host, folder = socket.gethostname().partition(".")[0], Path(tempfile.mkdtemp(prefix="ww-slurm-", dir="/tmp"))
    with ExitStack() as sockets:
        listening = [sockets.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        ports = [each.getsockname()[1] for each in listening]
    values = {"host": host, "user": pwd.getpwuid(os.getuid()).pw_name, "folder": folder, "ports": ports}
    (folder / "slurm.conf").write_text(CONFIGURATION.format(**values))
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
    (folder / "state").mkdir()
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o400)
    folder.chmod(0o755)
    names = {"socket": "munge.socket", "key-file": "key", "log-file": "munged.log", "pid-file": "munged.pid"}
    files = [f"--{option}={folder / name}" for option, name in {**names, "seed-file": "seed"}.items()]
    commands = {"munged": ["--foreground", "--force", *files], "slurmctld": ["-D"], "slurmd": ["-D", "-N", host]}
    environ, log, running = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}, folder / "log", []
    try:
        for name, options in commands.items():
            command = [str(daemons[name]), *options]
            with log.open("ab") as output:
                running.append(subprocess.Popen(command, env=environ, stdout=output, stderr=output))
            if name == "munged":
                until((folder / "munge.socket").exists)
        try:
            until(lambda: "idle" in query("sinfo", "-h", "-o", "%T", environ=environ), 60.0)
        except AssertionError:
            pytest.fail(f"Slurm did not start: {log.read_text()[-4000:]}")
        yield folder / "slurm.conf"
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait(HANG_SECONDS)
        shutil.rmtree(folder)


@pytest.fixture
def environ(slurm: Path, tmp_path: Path) -> dict[str, str]:
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    (tmp_path / "app.py").write_text(PROGRAM)
    return {
        "PYTHONPATH": f"{tmp_path}:{SOURCES}:{SOURCES.parent}",
        "WARPWELL_CUDA_DRIVER": str(build.build().fake),
        "SLURM_CONF": str(slurm),
        FOLDER: str(tmp_path / "locks"),
    }


def query(*command: str, environ: dict[str, str]) -> str:
    return subprocess.run(
        command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=HANG_SECONDS
    ).stdout


def run_in(*allocation: str, environ: dict[str, str], app: Path) -> list[str]:
    """Return the output of a job in an allocation."""
    command = [*allocation, sys.executable, "-m", "warpwell", "run", *PATIENT, str(app)]
    return query(*command, environ=environ).splitlines()


def jobs(environ: dict[str, str]) -> list[str]:
    """Return the state of each job of Slurm."""
    return sorted(query("squeue", "-h", "-o", "%T", environ=environ).split())


def test_a_job_uses_the_tasks_and_gpus_of_its_allocation(environ: dict[str, str], tmp_path: Path) -> None:
    app = tmp_path / "app.py"
    alone = ["device GPU-0,GPU-1", "device GPU-1,GPU-0", "runs"]
    assert run_in("salloc", "--gpus=2", environ=environ, app=app) == alone
    with subprocess.Popen(["srun", "-n1", "--gpus=1", "cat"], env={**os.environ, **environ}, stdin=-1) as holder:
        until(lambda: jobs(environ) == ["RUNNING"])
        assert run_in("salloc", "-n1", "--gpus=1", environ=environ, app=app) == ["device GPU-1", "runs"]
        holder.communicate()
    until(lambda: not jobs(environ))
    assert run_in("srun", "-n1", "--gpus=1", environ=environ, app=app) == ["device GPU-0", "runs"]


SLOW = pytest.mark.slow


@pytest.mark.parametrize("end", ["scancel", pytest.param("Ctrl-C", marks=SLOW), pytest.param("SIGKILL", marks=SLOW)])
def test_a_second_job_waits_for_the_first(start: Start, environ: dict[str, str], tmp_path: Path, end: str) -> None:
    options = (*PATIENT, "--agents", "2", "--wait", "600", str(tmp_path / "app.py"))
    first = start(*options, "hold", environ=environ)
    first.line("runs")
    second = start(*options, environ=environ)
    until(lambda: jobs(environ) == ["PENDING", "RUNNING"])
    if end == "scancel":
        query("scancel", "--state=RUNNING", "--name=interactive", environ=environ)
    else:
        first.process.send_signal(signal.SIGINT if end == "Ctrl-C" else signal.SIGKILL)
    assert first.end() == {"Ctrl-C": 130, "scancel": 128 + signal.SIGTERM, "SIGKILL": -signal.SIGKILL}[end]
    assert ("Slurm has ended the allocation" in first.errors) == (end == "scancel")
    assert second.end() == 0 and second.output.count("device") == 2
    for run in (first, second):
        run.nothing_is_left()
    until(lambda: not jobs(environ))


def test_a_waiting_job_that_is_interrupted_leaves_the_queue(
    start: Start, environ: dict[str, str], tmp_path: Path
) -> None:
    with subprocess.Popen(["srun", "-n1", "--gpus=1", "cat"], env={**os.environ, **environ}, stdin=-1) as holder:
        until(lambda: jobs(environ) == ["RUNNING"])
        run = start("--agents", "2", "--wait", "600", str(tmp_path / "app.py"), environ=environ)
        until(lambda: jobs(environ) == ["PENDING", "RUNNING"])
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130 and not run.output
        run.nothing_is_left()
        until(lambda: jobs(environ) == ["RUNNING"])
        timed_out = start("--agents", "2", "--wait", "1", str(tmp_path / "app.py"), environ=environ)
        assert timed_out.end() == 2 and "Slurm has not granted 2 tasks with a GPU each" in timed_out.errors
        holder.communicate()


def test_more_gpus_than_all_nodes_have_are_refused_at_once(
    start: Start, environ: dict[str, str], tmp_path: Path
) -> None:
    run = start("--agents", "3", "--wait", "600", str(tmp_path / "app.py"), environ=environ)
    assert run.end() == 2 and "all nodes of the Slurm cluster together have 2 GPUs" in run.errors
    assert not jobs(environ)
