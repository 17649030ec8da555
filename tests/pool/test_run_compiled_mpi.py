"""Compiled programs and scripts under ``warpwell run``: their status, signals, and devices of the fake driver."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.harness.until import until

from lab.driver import build
from warpwell.driver.build import compiler

from .runs import SOURCES, Start, start

__all__ = ["start"]

PROGRAM = r"""
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int cuInit(unsigned), cuDeviceGetCount(int *), cuDeviceGet(int *, int), cuDevicePrimaryCtxRetain(void **, int);
int cuCtxSetCurrent(void *), cuMemAlloc_v2(unsigned long long *, size_t);
int cuMemcpyHtoD_v2(unsigned long long, void *, size_t);
int cuMemcpyDtoH_v2(void *, unsigned long long, size_t);
static void check(int code) { if (code) { printf("error %d\n", code); exit(9); } }
static void stop(int number) { printf("signal %d\n", number); exit(3); }
int main(int argc, char **argv)
{
    int count, device, sent = 42, got = 0;
    unsigned long long memory;
    void *context;
    check(cuInit(0));
    check(cuDeviceGetCount(&count));
    for (int i = 0; i < count; i++) {
        check(cuDeviceGet(&device, i));
        check(cuDevicePrimaryCtxRetain(&context, device));
        check(cuCtxSetCurrent(context));
        check(cuMemAlloc_v2(&memory, 4));
        check(cuMemcpyHtoD_v2(memory, &sent, 4));
        check(cuMemcpyDtoH_v2(&got, memory, 4));
        if (got != 42) return 8;
    }
    sigset_t interrupt, none;
    sigemptyset(&none);
    sigemptyset(&interrupt);
    sigaddset(&interrupt, SIGINT);
    signal(SIGINT, stop);
    sigprocmask(SIG_BLOCK, &interrupt, NULL); /* `stop` uses stdout, too */
    printf("%d devices, %s\n", count, argv[1]);
    fflush(stdout);
    if (!strcmp(argv[1], "wait")) sigsuspend(&none);
    if (!strcmp(argv[1], "abort")) abort();
    return 7;
}
"""
KERNELS = '__attribute__((section(".nvFatBinSegment"))) int fatbin[4] = {1};\nint main(void) { return 0; }\n'


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a program for the driver; its DT_RPATH leads to a driver that refuses everything."""
    folder = tmp_path_factory.mktemp("compiled")
    (folder / "stub.c").write_text("".join(f"int {name}() {{ return 100; }}\n" for name in names(PROGRAM)))
    (folder / "prog.c").write_text(PROGRAM)
    stub = ["-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "stub.c", "-o", "libcuda.so.1"]
    linked = ["prog.c", "-o", "prog", "-L.", "-l:libcuda.so.1", f"-Wl,-rpath,{folder},--disable-new-dtags"]
    for flags in (stub, linked):
        subprocess.run([*compiler(), *flags], cwd=folder, check=True)
    return folder / "prog"


def names(text: str) -> list[str]:
    """Return the functions of the driver that a program declares."""
    return [word.partition("(")[0] for word in text.replace("(*", "").split() if word.startswith("cu") and "(" in word][
        :8
    ]


def fake() -> dict[str, str]:
    return {"WARPWELL_CUDA_DRIVER": str(build.build().fake)}


def test_a_compiled_program_has_the_devices_of_all_agents(start: Start, program: Path) -> None:
    assert subprocess.run([program, "alone"], capture_output=True, check=False).stdout == b"error 100\n"
    run = start("--agents", "2", "--target", "cpu", str(program), "--agents", environ=fake())
    assert run.end() == 7, run.errors
    assert run.output == "2 devices, --agents\n"
    run.nothing_is_left()


def test_signals_reach_the_program_and_its_status_is_returned(start: Start, program: Path) -> None:
    run = start("--agents", "1", "--target", "cpu", f"./{program.name}", "wait", environ=fake(), folder=program.parent)
    assert run.line("1 devices,") == ["wait"]
    (child,) = [pid for pid in run.left() if os.readlink(f"/proc/{pid}/exe") == str(program)]
    assert os.getpgid(child) == child
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 3
    assert run.output == f"signal {signal.SIGINT:d}\n" and not os.path.exists(f"/proc/{child}")
    run.nothing_is_left()


@pytest.mark.slow
def test_a_program_that_is_killed_by_a_signal(start: Start, program: Path) -> None:
    run = start("--agents", "1", "--target", "cpu", str(program), "abort", environ=fake())
    assert run.end() == 128 + signal.SIGABRT
    run.nothing_is_left()


def test_a_script_ends_with_its_children_when_the_job_must(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "script"
    text = "#!/bin/sh\ntrap 'echo interrupted' INT\nprintf '%s\\n' \"up $*\"\nsleep 600 &\nwhile :; do wait $!; done\n"
    script.write_text(text)
    script.chmod(0o755)
    run = start("--agents", "1", str(script), "a", "-b c")
    assert run.line("up") == ["a", "-b", "c"]
    until(lambda: run.find("sleep"))
    run.process.send_signal(signal.SIGINT)
    assert run.line("interrupted") == [] and run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    run.nothing_is_left()


def test_a_static_runtime_is_refused_before_anything_starts(start: Start, tmp_path: Path) -> None:
    (tmp_path / "prog.c").write_text(KERNELS)
    subprocess.run([*compiler(), "prog.c", "-o", "prog"], cwd=tmp_path, check=True)
    run = start("--agents", "1", "--target", "cpu", str(tmp_path / "prog"), environ=fake())
    assert run.end() == 1
    assert run.errors.startswith("warpwell: error: prog has NVIDIA's CUDA runtime linked in") and not run.output
    assert run.errors.count("\n") == 1
    run.nothing_is_left()
    local = start("--agents", "1", "--cuda", "local", str(tmp_path / "prog"))
    assert (local.end(), local.errors) == (0, "")


NO_DRIVER = (
    "import sys\nif sys.argv[:1] == ['-m']:\n    import warpwell.libcuda\n    warpwell.libcuda.driver = lambda: None\n"
)


def test_a_program_for_cuda_starts_with_a_note_on_a_host_without_a_driver(
    start: Start, program: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_DRIVER)
    environ = {"PYTHONPATH": f"{tmp_path}:{SOURCES}"}
    run = start("--explain-refused", str(program), "alone", environ=environ)
    assert (run.end(), run.output) == (9, "error 100\n")
    assert run.errors.splitlines() == [
        f"warpwell: note: {program} uses CUDA, which needs an NVIDIA driver, and this host has no CUDA driver; "
        "install a driver",
        "warpwell: no CUDA call of the program went to the pool, because this host has no CUDA driver",
    ]
    run = start("--cuda", "pool", str(program), "alone", environ=environ)
    assert run.end() == 2
    assert run.errors == (
        "warpwell: error: --cuda pool is not possible: this host has no CUDA driver; install NVIDIA's driver, name "
        "hosts with GPUs in --hosts, or omit --cuda pool to run only Warpwell's kernels\n"
    )
    run.nothing_is_left()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--cuda", "local"), "--cuda local was given"),
        (("--target", "cpu"), "no agent has a GPU with --target cpu"),
    ],
)
def test_the_reason_why_no_call_went_to_the_pool(start: Start, options: tuple[str, ...], reason: str) -> None:
    run = start("--agents", "1", "--explain-refused", *options, "-c", "pass")
    assert run.end() == 0
    assert run.errors == f"warpwell: no CUDA call of the program went to the pool, because {reason}\n"


def test_a_library_with_nvidias_runtime_ends_a_python_program(start: Start, tmp_path: Path) -> None:
    (tmp_path / "runtime.c").write_text(
        "int cuInit(unsigned), cuGetExportTable(const void **, const void *);\n"
        'int begin(void) { const void *t; cuInit(0); return cuGetExportTable(&t, "0123456789abcde"); }\n'
    )
    subprocess.run([*compiler(), "-shared", "-fPIC", "runtime.c", "-o", "libtorch_cuda.so"], cwd=tmp_path, check=True)
    text = (
        "import ctypes\nctypes.CDLL('libcuda.so.1', ctypes.RTLD_GLOBAL)\n"
        f"print(ctypes.CDLL({str(tmp_path / 'libtorch_cuda.so')!r}).begin(), flush=True)"
    )
    run = start("--agents", "1", "--target", "cpu", "-c", text, environ=fake())
    assert run.end() == 1
    line = (
        "warpwell: libtorch_cuda.so has NVIDIA's CUDA runtime linked in, which works only with NVIDIA's own driver "
        "library. Use `--cuda local` for this machine's GPUs.\n"
    )
    assert run.errors.endswith(line) and not run.output
    run = start("--agents", "1", "--target", "cpu", "--cuda", "pool", "-c", text, environ=fake())
    assert (run.end(), run.output) == (0, "500\n") and run.errors.endswith(line)
