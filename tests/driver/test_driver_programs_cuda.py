"""Unmodified CUDA programs through layer and worker on the real driver: their results, output and failures."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.harness.driver import calls, natives
from tests.harness.driver.managed_checks import CHECKS

from lab.driver.serve import Servers, serve

ROOT = Path(__file__).parents[2]


def output_of(module: str, environ: Mapping[str, str], *arguments: str) -> str:
    """Return what a program of the harness prints."""
    command = [sys.executable, "-m", f"tests.harness.driver.{module}", *arguments]
    out = subprocess.PIPE
    done = subprocess.run(command, env=environ, cwd=ROOT, timeout=60, stdout=out, stderr=subprocess.STDOUT, text=True)
    assert done.returncode >= 0, f"ended with {done.returncode}: {done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def server() -> Iterator[Servers]:
    """Two devices, both on the first GPU: memory and order are each worker's own."""
    with serve(["0", "0"]) as server:
        yield server


@pytest.fixture
def two_gpus() -> Iterator[Servers]:
    """A device on each of two GPUs."""
    text = "from warpwell.pool.launch.gpus import list_gpus; print(len(list_gpus()))"  # this process has begun CUDA
    if int(subprocess.run([sys.executable, "-c", text], stdout=subprocess.PIPE, check=True).stdout) < 2:
        pytest.skip("two GPUs are needed")
    with serve(["0", "1"]) as server:
        yield server


@pytest.mark.ptx
def test_the_kernels_assemble() -> None:
    linker = pytest.importorskip("cuda.bindings.nvjitlink")
    for architecture in ("sm_75", "sm_90"):
        handle = linker.create(1, [f"-arch={architecture}"])
        linker.add_data(handle, linker.InputType.PTX, calls.IMAGE, len(calls.IMAGE), "kernels")
        linker.complete(handle)
        linker.destroy(handle)


def test_random_programs_on_the_gpu_equal_the_model(server: Servers) -> None:
    assert output_of("programs", server.environ(), "--seeds", "0:60", "--devices", "2") == "60 programs are right\n"


def test_random_programs_on_the_gpu_without_workers_equal_the_model() -> None:
    assert output_of("programs", os.environ, "--seeds", "0:60", "--relies", "") == "60 programs are right\n"


def test_random_programs_on_the_gpu_are_right_where_all_is_scarce() -> None:
    with natives.changed(natives.TIGHT), serve(["0", "0"]) as server:
        arguments = "--seeds", "100:160", "--devices", "2", "--threads", "4"
        assert output_of("programs", server.environ(), *arguments) == "60 programs are right\n"


def test_managed_memory_is_that_of_program_and_kernels() -> None:
    with serve(1) as server:
        output = output_of("checks", server.environ(), "managed_checks").splitlines()
    assert [line for line in output if not line.startswith("warpwell: ")] == [f"{c.__name__}: right" for c in CHECKS]


@pytest.mark.parametrize(("kernel", "code"), [("fault", 700), ("fail", 710)])
def test_a_fault_on_the_gpu_ends_one_context_until_a_reset(server: Servers, kernel: str, code: int) -> None:
    output = output_of("acts", server.environ(), "faults", kernel).splitlines()
    if kernel == "fail":
        assert "Assertion" in output.pop(1)
    assert output == ["before True True", "codes" + 5 * f" {code}", "other device True", "after reset True"]


def test_prints_of_program_and_gpu_are_in_order(server: Servers) -> None:
    expected = [f"{writer} {value}" for value in range(3) for writer in ("before", "fake print", "host")]
    assert output_of("acts", server.environ(), "prints").splitlines() == expected


def test_streams_that_never_become_ready_leave_others_on_the_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # the driver's default is 8, and 9 streams get stuck
    with serve(["0", "0"]) as server:
        output = output_of("acts", server.environ(), "stuck_beside").splitlines()
    assert output.pop() == "released True 0 260 {0}"
    assert output == ["independent [True, True, True] still stuck True", "held back True"]


def test_random_programs_on_two_gpus_equal_the_model(two_gpus: Servers) -> None:
    arguments = "--seeds", "0:40", "--devices", "2", "--relies", ""
    assert output_of("programs", os.environ, *arguments) == "40 programs are right\n"
    assert output_of("programs", two_gpus.environ(), "--seeds", "0:60", "--devices", "2") == "60 programs are right\n"


def test_an_unmodified_program_on_two_gpus_computes_what_it_computes_without_workers(two_gpus: Servers) -> None:
    native = output_of("two_devices", os.environ, "--rounds", "50").splitlines()
    assert len(native) == 2
    assert output_of("two_devices", two_gpus.environ(), "--rounds", "50").splitlines()[0] == native[0]
