"""Programs that fork, wait, lose their context and die, through layer and worker on the fake driver."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.harness.driver import natives
from tests.harness.until import HANG_SECONDS

from lab.driver import build
from lab.driver.serve import serve
from warpwell.driver.server import DriverServer
from warpwell.errors import ArgumentError

ROOT = Path(__file__).parents[2]
SECONDS = 60


@pytest.fixture(scope="module")
def server() -> Iterator[DriverServer]:
    """A server of two fake devices for all tests of this file."""
    with serve(2, driver=build.build().fake) as server:
        yield server


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start programs of tests.harness.driver.acts as clients of a server; they end with the test."""
    with contextlib.ExitStack() as stack:

        def begin(server: DriverServer, *words: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.harness.driver.acts", *words],
                env=server.environ(),
                cwd=ROOT,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield begin


def said(process: subprocess.Popen[str]) -> list[str]:
    """Return the lines of a program that ends by itself."""
    return process.communicate(timeout=SECONDS)[0].splitlines()


def told(process: subprocess.Popen[str], line: str) -> None:
    """Wait until a program says something."""
    assert process.stdout is not None
    assert process.stdout.readline() == f"{line}\n"


def gone(server: DriverServer, but: int = 0, seconds: float = 5) -> bool:
    """Say whether no more than some workers are left in time."""
    end = time.monotonic() + seconds
    while len(server.workers) > but:
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_a_child_forked_before_the_driver_starts_connects_itself(server: DriverServer, start: Start) -> None:
    assert said(start(server, "fork_before")) == ["child 1", "parent True True"]
    assert gone(server)


def test_a_child_forked_after_it_may_call_nothing_and_hurts_nobody(server: DriverServer, start: Start) -> None:
    lines = said(start(server, "fork_after"))
    assert lines == ["child 1", "executes 1", "parent True True True", "pinned b'abc'"]
    assert gone(server)


def test_forks_among_threads_hang_nobody(server: DriverServer, start: Start) -> None:
    assert said(start(server, "fork_among_threads")) == ["children {1} wrong [] parent True"]


def test_a_child_forked_while_the_driver_starts_has_it_too(start: Start, tmp_path: Path) -> None:
    parts, slow = build.build(), tmp_path / "worker"
    slow.write_text(f'#!/bin/sh\nsleep 0.5\nexec {parts.worker} "$@"\n')
    slow.chmod(0o700)
    with serve(1, driver=parts.fake, parts=dataclasses.replace(parts, worker=slow)) as server:
        assert said(start(server, "fork_inside_init")) == ["inside True child 1 parent True"]
        assert gone(server)


def test_a_program_asks_all_devices_before_the_first_answers(tmp_path: Path) -> None:
    parts, late, other = build.build(), tmp_path / "worker", tmp_path / "second"
    wait = f"i=0; until [ -e {other} ] || [ $i = 500 ]; do sleep 0.02; i=$((i + 1)); done; [ -e {other} ] || exit 9"
    late.write_text(
        f'#!/bin/sh\ncase "$*" in *"--ordinal 0"*) {wait} ;; *) touch {other} ;; esac\nexec {parts.worker} "$@"\n'
    )
    late.chmod(0o700)
    text = 'import ctypes; n = ctypes.c_int(); cuda = ctypes.CDLL("libcuda.so.1"); print(cuda.cuInit(0),'
    text += " cuda.cuDeviceGetCount(ctypes.byref(n)), n.value)"
    parts = dataclasses.replace(parts, worker=late)
    with serve(1, driver=parts.fake, parts=parts) as one:
        with DriverServer(1, driver=parts.fake, parts=parts, folder=one.folder, first=1):
            command = [sys.executable, "-c", text]
            out = subprocess.run(
                command, env=one.environ(), stdout=subprocess.PIPE, text=True, timeout=HANG_SECONDS
            ).stdout
    assert out == "0 0 2\n"


def test_a_program_without_addresses_gets_an_error_and_can_go_on(server: DriverServer, start: Start) -> None:
    assert said(start(server, "little_space")) == ["codes 2 2 then True"]
    assert gone(server)


def test_a_program_that_executes_another_leaves_no_worker(server: DriverServer, start: Start) -> None:
    process = start(server, "executes")
    assert said(process) == []
    assert process.returncode == 1  # the other one works
    assert gone(server)


def test_the_end_of_a_worker_ends_all_waits_and_a_reset_brings_another(server: DriverServer, start: Start) -> None:
    process = start(server, "waits")
    told(process, "waiting")
    ours = [worker for worker in server.workers if "--ordinal\x000\x00" in Path(f"/proc/{worker}/cmdline").read_text()]
    assert len(ours) == 1
    os.kill(ours[0], signal.SIGKILL)
    lines = said(process)
    assert lines.pop(0).startswith("warpwell: device 0: its worker has ended")
    assert lines == ["codes False 1 True", "other device True", "after reset True True", "old handles True True"]


@pytest.mark.parametrize("how", ["client", "server"])
def test_nobody_outlives_a_client_or_a_server(how: str, start: Start) -> None:
    with serve(1, driver=build.build().fake) as server:
        process = start(server, "hangs")
        told(process, "waiting")
        assert len(server.workers) == 1
        if how == "client":
            process.kill()
            assert gone(server)
        else:
            server.close()
            assert "cuStreamSynchronize" in said(process)[-1]
            assert process.returncode == 1


def test_late_calls_of_exit_handlers_return(server: DriverServer, start: Start) -> None:
    process = start(server, "leaves")
    assert said(process) == ["late [0, 0, 0] True"]
    assert process.returncode == 0
    assert gone(server)


@pytest.mark.parametrize(("kernel", "code"), [("fault", 700), ("fail", 710)])
def test_a_fault_on_the_device_ends_one_context_until_a_reset(
    server: DriverServer, start: Start, kernel: str, code: int
) -> None:
    lines = said(start(server, "faults", kernel))
    if kernel == "fail":
        assert "Assertion" in lines.pop(1)
    assert lines == ["before True True", "codes" + 5 * f" {code}", "other device True", "after reset True"]


@pytest.mark.parametrize("limits", ["ours", pytest.param("tight", marks=pytest.mark.slow)])
def test_a_stream_that_never_becomes_ready_leaves_others_alone(limits: str, start: Start) -> None:
    changes, words = (natives.TIGHT, [str(1 << 20)]) if limits == "tight" else ({}, [])
    with natives.changed(changes) as built, serve(2, driver=built.fake) as server:
        lines = said(start(server, "stuck_beside", *words))
    assert lines.pop() == "released True 0 260 {0}"
    assert lines == ["beside [True, True, True] still stuck True", "held back True"]


def test_a_full_ring_holds_calls_back_and_loses_none(server: DriverServer, start: Start) -> None:
    process = start(server, "backlog")
    assert process.stdin is not None
    told(process, "stop")
    workers = server.workers
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    try:
        process.stdin.write("\n")
        process.stdin.flush()
        told(process, "blocked True")
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGCONT)
    process.stdin.write("\n")
    process.stdin.flush()
    told(process, "right True")


def test_a_ctrl_c_reaches_the_program_and_not_its_worker(server: DriverServer, start: Start) -> None:
    process = start(server, "interrupted")
    told(process, "waiting")
    time.sleep(0.1)
    for pid in [process.pid, *server.workers]:
        os.kill(pid, signal.SIGINT)  # as a terminal does
    assert said(process) == ["interrupted 0 True"]


def test_prints_of_the_device_come_before_a_synchronization_returns(server: DriverServer, start: Start) -> None:
    lines = [f"{who} {value}" for value in range(3) for who in ("fake print", "host")]
    assert said(start(server, "prints")) == lines


def test_threads_give_their_streams_back(server: DriverServer, start: Start) -> None:
    assert said(start(server, "threads_end")) == ["right True []"]


def test_contexts_are_switched_without_a_limit(server: DriverServer, start: Start) -> None:
    assert said(start(server, "switches")) == ["right True True []"]


def test_handles_that_are_none_are_refused(server: DriverServer, start: Start) -> None:
    assert said(start(server, "handles")) == ["codes True [400] True"]


def test_a_server_without_a_folder_has_no_environment() -> None:
    parts = build.build()
    with DriverServer(1, driver=parts.fake, parts=parts) as server, pytest.raises(ArgumentError, match="folder="):
        server.environ()
