"""Claims of GPUs among the processes of a host. No GPU is needed: a UUID is a name."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from warpwell.driver.build import Built
from warpwell.errors import AgentError, DeviceNotFoundError
from warpwell.pool.agent.runtime import Runtime
from warpwell.pool.launch import cuda_programs
from warpwell.pool.launch.gpus import FOLDER, Claim, assign, user_of, users

OTHER = """
import sys, time
from warpwell.pool.launch.gpus import Claim
try:
    Claim(sys.argv[1], sys.argv[2] == "share")
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
def other() -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """``other("GPU-1", "own" or "share")``: another process that claims; returns it and what it said."""
    started: list[subprocess.Popen[str]] = []

    def start(uuid: str, how: str) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen([sys.executable, "-c", OTHER, uuid, how], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_second_job_takes_another_gpu_until_the_first_has_died(other: Callable[..., tuple]) -> None:
    process, said = other("GPU-1", "own")
    assert said == "has"
    taken = users(["GPU-1", "GPU-2"])
    assert list(taken) == ["GPU-1"] and f"process {process.pid} of user" in taken["GPU-1"]
    assert assign([1], ["GPU-1", "GPU-2"], "auto", False, "n", taken)[1]["uuid"] == "GPU-2"
    with pytest.raises(AgentError, match=f"GPU-1 was taken just now by process {process.pid}"):
        Claim("GPU-1")
    Claim("GPU-1", share=True).free()  # on purpose
    process.kill()
    process.wait()
    assert not users(["GPU-1", "GPU-2"])
    Claim("GPU-1").free()


def test_who_shares_keeps_others_from_having_it_for_themselves(other: Callable[..., tuple]) -> None:
    mine = Claim("GPU-1", share=True)
    assert other("GPU-1", "share")[1] == "has"
    assert "was taken just now by process" in other("GPU-1", "own")[1]
    mine.free()
    with pytest.raises(AgentError, match="was taken just now"):
        Claim("GPU-1")
    assert user_of("GPU-1") is not None


def test_files_are_for_all_users_of_the_host(folder: Path) -> None:
    before = os.umask(0o077)
    try:
        Claim("GPU-1").free()
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o7777 == 0o1777 and (folder / "GPU-1").stat().st_mode & 0o777 == 0o666


def test_without_a_folder_to_lock_in_it_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.write_text("no folder")
    Claim("GPU-1").free()
    assert f"set {FOLDER} to a folder" in capsys.readouterr().err
    assert not users(["GPU-1"])


def test_every_cpu_agent_has_a_uuid_of_its_own() -> None:
    first, second = Runtime(), Runtime()
    assert first.info()["uuid"] == first.info()["uuid"] != second.info()["uuid"]


def test_cuda_calls_stay_local_where_the_pool_cannot_serve_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cuda_programs, "has_driver", lambda _: True)
    monkeypatch.setattr(cuda_programs.build, "parts", lambda: pytest.fail("nobody needs the layer"))
    refused = ({"target": "cpu"}, "--target cpu"), ({"gpus": False}, "has no GPU")
    for options, why in refused:
        assert cuda_programs.prepare("auto", tmp_path, {}, **options) is None  # type: ignore[arg-type]
        with pytest.raises(DeviceNotFoundError, match=why):
            cuda_programs.prepare("pool", tmp_path, {}, **options)  # type: ignore[arg-type]
    with pytest.raises(DeviceNotFoundError, match="already in a program"):
        cuda_programs.prepare("pool", tmp_path, {"WARPWELL_CUDA": "/job"})
    assert not list(tmp_path.iterdir())


def test_a_program_of_a_login_node_has_the_gpus_of_other_hosts_if_it_asks_for_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cuda_programs, "has_driver", lambda _: False)
    monkeypatch.setattr(cuda_programs.build, "parts", lambda: Built(*[tmp_path / "part"] * 3))
    assert cuda_programs.prepare("auto", tmp_path, {}, away=True, gpus=False) is None
    assert cuda_programs.prepare("pool", tmp_path, {}, away=True, gpus=False) is not None


def test_a_slow_build_of_the_layer_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def made(seconds: float) -> Built:
        time.sleep(seconds)
        return Built(None, None, None)

    monkeypatch.setattr(cuda_programs, "_SILENT", 0.02)
    for seconds, told in ((0.0, False), (0.2, True)):
        monkeypatch.setattr(cuda_programs.build, "parts", lambda s=seconds: made(s))
        assert cuda_programs.prepare("auto", tmp_path, {cuda_programs.DRIVER: "fake"}) is None
        assert ("is being compiled" in capsys.readouterr().err) == told
