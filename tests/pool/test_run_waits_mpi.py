"""Jobs under ``warpwell run`` that want the same GPU, here one of the fake driver."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.harness.until import until

from lab.driver import build
from warpwell.pool.launch.reservation import FOLDER, users

from .runs import SOURCES, Run, Start, start

__all__ = ["start"]

GPU = """
import sys
if sys.argv[:1] == ["-m"]:
    import warpwell.pool.devices as devices
    import warpwell.pool.launch.gpus as gpus
    from warpwell.pool.agent.runtime import Runtime
    gpus.list_gpus = lambda: ["GPU-0"]
    devices.runtime_for = lambda target: Runtime()
"""
PROGRAM = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
count, context = ctypes.c_int(), ctypes.c_void_p()
print("starts", cuda.cuInit(0), cuda.cuDeviceGetCount(ctypes.byref(count)), count.value, flush=True)
print("context", cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), flush=True)
if sys.argv[1:] == ["hold"]:
    sys.stdin.readline()
    print("reset", cuda.cuDevicePrimaryCtxReset_v2(0), flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the environment of a host with one GPU and without Slurm."""
    (tmp_path / "sitecustomize.py").write_text(GPU)
    monkeypatch.setenv(FOLDER, str(tmp_path / "locks"))
    return {
        "PYTHONPATH": f"{tmp_path}:{SOURCES}:{SOURCES.parent}",
        "WARPWELL_CUDA_DRIVER": str(build.build().fake),
        "SLURM_JOB_ID": "1",
    }


def press_enter(run: Run) -> None:
    assert run.process.stdin is not None
    run.process.stdin.write("\n")
    run.process.stdin.flush()


def test_jobs_wait_for_a_gpu_in_the_order_of_their_start(start: Start, environ: dict[str, str], tmp_path: Path) -> None:
    first = start("-c", PROGRAM, "hold", environ=environ, stdin=subprocess.PIPE)
    assert first.line("context") == ["0"]
    assert "process" in users(["GPU-0"])["GPU-0"]
    refused = start("-c", PROGRAM, environ=environ)
    assert refused.end() == 2 and "GPU-0" in refused.errors and "--wait" in refused.errors
    too_many = start("--agents", "2", "--wait", "600", "-c", PROGRAM, environ=environ)
    assert too_many.end() == 2 and "2 agents on this host, which has 1 GPU: start fewer" in too_many.errors
    waiting = []
    for position in (1, 2):
        waiting.append(start("--wait", "600", "-c", PROGRAM, "hold", environ=environ, stdin=subprocess.PIPE))
        until(lambda count=position: len(list((tmp_path / "locks" / "queue").iterdir())) == count)
    second, third = waiting
    first.process.send_signal(signal.SIGKILL)
    assert second.line("context") == ["0"]
    assert len(list((tmp_path / "locks" / "queue").iterdir())) == 1
    press_enter(second)
    press_enter(second)
    assert second.end() == 0
    assert "waiting for 1 GPU of the 1 on host" in second.errors and "GPU-0 is in use by process" in second.errors
    assert third.line("context") == ["0"]
    third.process.send_signal(signal.SIGTERM)
    assert third.end() == 128 + signal.SIGTERM
    for run in (first, second, third):
        run.nothing_is_left()
    until(lambda: not users(["GPU-0"]))
    assert not list((tmp_path / "locks" / "queue").iterdir())


def test_a_gpu_is_claimed_at_its_first_context_and_released_with_its_last(
    start: Start, environ: dict[str, str], tmp_path: Path
) -> None:
    use = ("--allocate", "use", "-c", PROGRAM)
    first = start(*use, "hold", environ=environ, stdin=subprocess.PIPE)
    assert first.line("context") == ["0"]
    refused = start(*use, environ=environ)
    assert refused.end() == 0 and refused.output == "starts 0 0 1\ncontext 46\n"
    assert "GPU-0 is in use by process" in refused.errors
    second = start("--wait", "600", *use, environ=environ)
    assert second.line("starts") == ["0", "0", "1"]
    until(lambda: list((tmp_path / "locks" / "queue").iterdir()))
    press_enter(first)
    assert first.line("reset") == ["0"]
    assert second.line("context") == ["0"] and second.end() == 0
    press_enter(first)
    assert first.end() == 0
    for run in (first, second):
        run.nothing_is_left()
    until(lambda: not users(["GPU-0"]))


SALLOC = """#!/bin/sh
echo "$*" > "${0%/*}/asked"
while [ "${1#-}" != "$1" ]; do shift; done
SLURM_JOB_ID=5 SLURM_JOB_NODELIST=localhost SLURM_TASKS_PER_NODE=2 SLURM_NTASKS=2 exec "$@"
"""


@pytest.fixture
def slurm(environ: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """Return the environment of a host with scripts for Slurm's commands, and without a CUDA driver."""
    for name, text in {"salloc": SALLOC, "sinfo": "#!/bin/sh\n", "scontrol": "#!/bin/sh\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    del environ["WARPWELL_CUDA_DRIVER"]
    return {**environ, "SLURM_JOB_ID": "", "PATH": f"{tmp_path}:{os.environ['PATH']}"}


def test_a_wait_outside_a_slurm_job_is_one_for_an_allocation(
    start: Start, slurm: dict[str, str], tmp_path: Path
) -> None:
    options = ("--wait", "90.5", "--target", "cpu", "--slurm=--partition=gpu")
    text = "import os, warpwell as ww; print('devices', len(ww.devices()), os.environ['SLURM_JOB_ID'])"
    run = start(*options, "-c", text, environ=slurm)
    assert run.end() == 0, run.errors
    assert run.output == "devices 2 5\n"
    assert "--ntasks=1 --immediate=91 --kill-command=TERM --partition=gpu" in (tmp_path / "asked").read_text()
    run.nothing_is_left()
    (tmp_path / "asked").unlink()
    no_program = ("--mpiexec", "/bin/true", *options, "-c", "")
    for more, changed in (((), {"SLURM_JOB_ID": "5"}), (("--hosts", "localhost:1"), {})):
        run = start(*more, *no_program, environ={**slurm, **changed})
        assert run.end() == 2 and "put one of the two on PATH" in run.errors
    assert not (tmp_path / "asked").exists()
    run = start("--wait", "0", "-c", "", environ=slurm)
    assert run.end() == 2 and "--wait must be a positive number of seconds, got 0" in run.errors


def test_a_program_that_ignores_the_end_of_its_allocation_is_killed(
    start: Start, slurm: dict[str, str], tmp_path: Path
) -> None:
    with (tmp_path / "sitecustomize.py").open("a") as planted:
        planted.write("    import warpwell.pool.launch.launcher as launcher; launcher._REVOKED_SECONDS = 3.0\n")
    text = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
print("runs", flush=True)
while True:
    time.sleep(0.01)
"""
    run = start("--wait", "90", "--target", "cpu", "-c", text, environ=slurm)
    assert run.line("runs") == []
    (holder,) = run.find("sys.stdin.read()")
    os.kill(holder, signal.SIGTERM)
    assert run.line("asked") == [] and run.end() == 128 + signal.SIGTERM
    assert "Slurm has ended the allocation" in run.errors
    run.nothing_is_left()
