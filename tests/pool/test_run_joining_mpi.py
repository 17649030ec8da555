"""Devices that join and leave programs of ``warpwell run --allocate use``, on CPUs and on a GPU of the stub driver."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.harness.until import HANG_SECONDS, until

import warpwell.pool
from warpwell.cli.main import build_parser
from warpwell.cli.pool import run_options
from warpwell.pool.launch.reservation import users

from .runs import SOURCES, Run, Start, start
from .test_run_waits_mpi import environ, press_enter

__all__ = ["environ", "start"]

USE = ("--allocate", "use")
COMES_AND_GOES = """
import numpy as np, warpwell as ww
devices = ww.devices()
print("start", len(devices), ww.current_device if len(devices) else "none", flush=True)
with devices.lease() as first:
    survivor = first[0].to_device(np.arange(1000))
    for turn in range(3):
        with devices.lease(2, timeout=60) as lease:
            copies = [device.to_device(survivor) for device in lease]
            print("turn", turn, [d.index for d in devices], [int(c.copy_to_host().sum()) for c in copies], flush=True)
            pids = [device.call(__import__("os").getpid).get() for device in lease]
        del copies
        for device in lease:
            device.leave(60)
    print("end", [d.index for d in devices], int(survivor.copy_to_host().sum()), len(set(pids)), flush=True)
"""
LEASES = """
import sys, warpwell as ww
devices = ww.devices()
print("asks", len(devices), flush=True)
try:
    lease = devices.lease(timeout=float(sys.argv[1]))
except ww.errors.StallError as error:
    print("stalled", error, flush=True)
    raise SystemExit(0)
x = lease[0].zeros(10)
print("has", len(devices), x.copy_to_host().sum(), flush=True)
sys.stdin.readline()
x.free()
lease.release()
lease[0].leave(60)
print("left", len(devices), flush=True)
sys.stdin.readline()
"""
SLOW = """
import os, sys, time
if sys.argv[:1] == ["-m"]:
    import warpwell.pool.devices as devices
    from warpwell.pool.agent.runtime import Runtime
    def open_slowly(target, once=[]):
        if once and os.environ["OMPI_COMM_WORLD_RANK"] == "2":
            print("opening", os.getpid(), flush=True)
            time.sleep(3600)
        once.append(target)
        return Runtime()
    devices.runtime_for = open_slowly
"""
LOSES = """
import numpy as np, warpwell as ww
devices = ww.devices()
first = devices.lease()
survivor = first[0].to_device(np.arange(1000))
with devices.lease(timeout=100) as lease:
    print("got", [d.index for d in devices], int(lease[0].to_device(survivor).copy_to_host().sum()), flush=True)
try:
    devices.lease(3)
except ww.errors.PoolError as error:
    print("error", error, flush=True)
"""


def test_devices_join_and_leave_and_arrays_on_others_survive(start: Start) -> None:
    run = start(*USE, "--agents", "3", "--target", "cpu", "-c", COMES_AND_GOES)
    assert run.end() == 0, run.errors
    turns = [f"turn {turn} [0, 1, 2] [499500, 499500]" for turn in range(3)]
    assert run.output.splitlines() == ["start 0 none", *turns, "end [0] 499500 2"]
    assert not run.errors
    run.nothing_is_left()


def test_two_jobs_lease_one_gpu(start: Start, environ: dict[str, str], tmp_path: Path) -> None:
    def lease(*arguments: str) -> Run:
        return start(*USE, "-c", LEASES, *arguments, environ=environ, stdin=subprocess.PIPE)

    first = lease("60")
    assert first.line("asks") == ["0"] and first.line("has") == ["1", "0.0"]
    assert "process" in users(["GPU-0"])["GPU-0"]
    refused = lease("0")
    assert refused.end() == 0 and "stalled waited 0 s for 1 devices: 1 GPU of the 1 on host" in refused.output
    assert "GPU-0 is in use by process" in refused.output
    second = lease("600")
    assert second.line("asks") == ["0"]
    until(lambda: list((tmp_path / "locks" / "queue").iterdir()))
    press_enter(first)
    assert first.line("left") == ["0"]
    assert second.line("has") == ["1", "0.0"]  # the first program still runs
    third = lease("600")
    assert third.line("asks") == ["0"]
    until(lambda: list((tmp_path / "locks" / "queue").iterdir()))
    second.process.send_signal(signal.SIGKILL)
    assert third.line("has") == ["1", "0.0"]
    press_enter(third)
    press_enter(third)
    press_enter(first)
    assert third.end() == first.end() == 0
    for run in (first, refused, second, third):
        run.nothing_is_left()
    until(lambda: not users(["GPU-0"]))


def test_a_waiting_lease_ends_with_ctrl_c(start: Start, environ: dict[str, str], tmp_path: Path) -> None:
    first = start(*USE, "-c", LEASES, "60", environ=environ, stdin=subprocess.PIPE)
    assert first.line("has") == ["1", "0.0"]
    second = start(*USE, "-c", LEASES, "600", environ=environ, stdin=subprocess.PIPE)
    assert second.line("asks") == ["0"]
    until(lambda: list((tmp_path / "locks" / "queue").iterdir()))
    second.process.send_signal(signal.SIGINT)
    assert second.end() == 130 and "KeyboardInterrupt" in second.errors
    until(lambda: not second.left())
    first.process.send_signal(signal.SIGINT)
    assert first.end() == 130
    for run in (first, second):
        run.nothing_is_left()
    until(lambda: not users(["GPU-0"]))


def test_an_agent_that_is_killed_while_it_joins(start: Start, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    path = {"PYTHONPATH": f"{tmp_path}:{SOURCES}:{SOURCES.parent}"}
    run = start(*USE, "--agents", "3", "--target", "cpu", "-c", LOSES, environ=path)
    os.kill(int(run.line("opening")[0]), signal.SIGKILL)
    assert run.line("got") == ["[0,", "2]", "499500"]
    assert run.end(HANG_SECONDS) == 0
    assert "3 devices were requested, but the pool has 2 (1 are lost)" in run.output
    run.nothing_is_left()


def test_idle_devices_leave(start: Start) -> None:
    program = (
        "import warpwell as ww; devices = ww.devices(); lease = devices.lease(2); x = lease[0].zeros(5); "
        "devices.changed.clear(); lease.release(); devices.changed.wait(100); "
        "print(len(devices), x.copy_to_host().sum())"
    )
    run = start(*USE, "--agents", "2", "--target", "cpu", "--idle", "0.2", "-c", program)
    assert run.end() == 0 and run.output == "1 0.0\n", run.errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--allocate", "use", "--share-gpu"], "--allocate use and --share-gpu exclude each other; leave out one"),
        (["--idle", "5"], "--idle works only with `--allocate use`: add that, or leave out --idle"),
        (["--allocate", "use", "--idle", "-1"], "--idle must be a positive number of seconds, got -1"),
    ],
)
def test_options_that_exclude_each_other(start: Start, options: list[str], message: str) -> None:
    run = start(*options, "-c", "")
    assert run.end() == 2 and message in run.errors


@pytest.mark.parametrize(
    ("options", "gpus", "cuda"),
    [
        ([], ["GPU-0"], "pool"),
        ([], [], "auto"),
        (["--hosts", "a:2"], [], "pool"),
        (["--hosts", "a:2", "--target", "cpu"], [], "auto"),
        (["--cuda", "local"], ["GPU-0"], "local"),
    ],
)
def test_cuda_calls_reach_the_pool_if_agents_may_have_gpus(
    monkeypatch: pytest.MonkeyPatch, options: list[str], gpus: list[str], cuda: str
) -> None:
    monkeypatch.setattr(warpwell.pool, "list_gpus", lambda: gpus)
    arguments = build_parser().parse_args(["run", "--allocate", "use", *options, "-c", ""])
    assert run_options(arguments).cuda == cuda
