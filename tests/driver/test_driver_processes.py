"""Programs that fork, wait, lose their context and die, through layer and worker on the fake driver."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.harness.driver import natives
from tests.harness.driver.raw import OPEN, OPENED, REFUSED, Raw
from tests.harness.until import HANG_SECONDS, until

from lab.driver import build
from lab.driver.serve import Servers, serve
from warpwell.driver.server import DriverServer
from warpwell.errors import AgentError

ROOT = Path(__file__).parents[2]
SECONDS = HANG_SECONDS


@pytest.fixture(scope="module")
def served() -> Iterator[Servers]:
    """A server of two fake devices for all tests of this file."""
    with serve(2, driver=build.build().fake) as server:
        yield server


@pytest.fixture
def server(served: Servers) -> Servers:
    """The server, when it has no worker of an earlier test."""
    until(lambda: not served.workers)
    return served


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start programs of tests.harness.driver.acts as clients of a server; they end with the test."""
    with contextlib.ExitStack() as stack:

        def begin(server: Servers, *arguments: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.harness.driver.acts", *arguments],
                env={**server.environ(), "PYTHONUNBUFFERED": ""},  # it would also end the buffering of C code
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


def output_of(process: subprocess.Popen[str]) -> list[str]:
    """Return the lines of a program that ends by itself."""
    return process.communicate(timeout=SECONDS)[0].splitlines()


def expect_line(process: subprocess.Popen[str], line: str) -> None:
    """Wait until a program says something."""
    assert process.stdout is not None
    assert process.stdout.readline() == f"{line}\n"


def are_workers_gone(server: Servers, but: int = 0, seconds: float = HANG_SECONDS) -> bool:
    """Return whether all but `but` workers have exited in time."""
    end = time.monotonic() + seconds
    while len(server.workers) > but:
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_a_child_forked_before_the_driver_starts_connects_itself(server: Servers, start: Start) -> None:
    assert output_of(start(server, "fork_before")) == ["child 1", "parent True True"]
    assert are_workers_gone(server)


def test_a_child_forked_after_it_may_call_nothing_and_hurts_nobody(server: Servers, start: Start) -> None:
    output = output_of(start(server, "fork_after"))
    assert output == ["child 1", "executes 1", "parent True True True", "pinned b'abc'"]
    assert are_workers_gone(server)


def test_forks_among_threads_hang_nobody(server: Servers, start: Start) -> None:
    assert output_of(start(server, "fork_among_threads")) == ["children {1} wrong [] parent True"]


def test_a_child_forked_while_the_driver_starts_has_it_too(start: Start, tmp_path: Path) -> None:
    parts, slow = build.build(), tmp_path / "worker"
    wait = f"touch {tmp_path}/started; until [ -e {tmp_path}/forked ]; do sleep 0.02; done"
    slow.write_text(f'#!/bin/sh\n{wait}\nexec {parts.worker} "$@"\n')
    slow.chmod(0o700)
    with serve(1, driver=parts.fake, parts=dataclasses.replace(parts, worker=slow)) as server:
        assert output_of(start(server, "fork_inside_init", str(tmp_path))) == ["inside True child 1 parent True"]
        assert are_workers_gone(server)


def test_a_program_asks_all_devices_before_the_first_answers(tmp_path: Path) -> None:
    parts, waiting_worker, marker = build.build(), tmp_path / "worker", tmp_path / "second"
    wait = f"i=0; until [ -e {marker} ] || [ $i = 5000 ]; do sleep 0.02; i=$((i + 1)); done; [ -e {marker} ] || exit 9"
    waiting_worker.write_text(
        f'#!/bin/sh\ncase "$*" in *"--ordinal 0"*) {wait} ;; *) touch {marker} ;; esac\nexec {parts.worker} "$@"\n'
    )
    waiting_worker.chmod(0o700)
    text = 'import ctypes; n = ctypes.c_int(); cuda = ctypes.CDLL("libcuda.so.1"); print(cuda.cuInit(0),'
    text += " cuda.cuDeviceGetCount(ctypes.byref(n)), n.value)"
    parts = dataclasses.replace(parts, worker=waiting_worker)
    with serve(1, driver=parts.fake, parts=parts) as server:
        with contextlib.closing(DriverServer("0", 1, parts, driver=parts.fake, folder=server.folder)):
            command = [sys.executable, "-c", text]
            out = subprocess.run(
                command, env=server.environ(), stdout=subprocess.PIPE, text=True, timeout=HANG_SECONDS
            ).stdout
    assert out == "0 0 2\n"


def test_a_program_without_addresses_gets_an_error_and_can_go_on(server: Servers, start: Start) -> None:
    assert output_of(start(server, "little_space")) == ["codes 2 2 then True"]
    assert are_workers_gone(server)


def test_a_program_that_executes_another_leaves_no_worker(server: Servers, start: Start) -> None:
    process = start(server, "executes")
    assert output_of(process) == []
    assert process.returncode == 1  # `plain` exits with 1 if it works
    assert are_workers_gone(server)


def test_the_end_of_a_worker_ends_all_waits_and_a_reset_brings_another(server: Servers, start: Start) -> None:
    process = start(server, "waits_for_killed_worker")
    expect_line(process, "waiting")
    workers = [
        worker for worker in server.workers if "--ordinal\x000\x00" in Path(f"/proc/{worker}/cmdline").read_text()
    ]
    assert len(workers) == 1
    os.kill(workers[0], signal.SIGKILL)
    output = output_of(process)
    assert output.pop(0).startswith("warpwell: device 0: its worker has ended")
    assert output == ["codes False 1 True", "other device True", "after reset True True", "old handles True True"]


@pytest.mark.parametrize("how", ["client", "server"])
def test_nobody_outlives_a_client_or_a_server(how: str, start: Start) -> None:
    with serve(1, driver=build.build().fake) as server:
        process = start(server, "hangs")
        expect_line(process, "waiting")
        assert len(server.workers) == 1
        if how == "client":
            process.kill()
            assert are_workers_gone(server)
        else:
            server.close()
            assert "cuStreamSynchronize" in output_of(process)[-1]
            assert process.returncode == 1


def test_late_calls_of_exit_handlers_return(server: Servers, start: Start) -> None:
    process = start(server, "leaves")
    assert output_of(process) == ["late [0, 0, 0] True"]
    assert process.returncode == 0
    assert are_workers_gone(server)


@pytest.mark.parametrize(("kernel", "code"), [("fault", 700), ("fail", 710)])
def test_a_fault_on_the_device_ends_one_context_until_a_reset(
    server: Servers, start: Start, kernel: str, code: int
) -> None:
    output = output_of(start(server, "faults", kernel))
    if kernel == "fail":
        assert "Assertion" in output.pop(1)
    assert output == ["before True True", "codes" + 5 * f" {code}", "other device True", "after reset True"]


@pytest.mark.parametrize("limits", ["ours", pytest.param("tight", marks=pytest.mark.slow)])
def test_a_stream_that_never_becomes_ready_leaves_others_alone(limits: str, start: Start) -> None:
    changes, arguments = (natives.TIGHT, [str(1 << 20)]) if limits == "tight" else ({}, [])
    with natives.changed(changes) as built, serve(2, driver=built.fake) as server:
        output = output_of(start(server, "stuck_beside", *arguments))
    assert output.pop() == "released True 0 260 {0}"
    assert output == ["independent [True, True, True] still stuck True", "held back True"]


def test_a_full_ring_holds_calls_back_and_loses_none(server: Servers, start: Start) -> None:
    process = start(server, "backlog")
    assert process.stdin is not None
    expect_line(process, "stop")
    workers = server.workers
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    try:
        process.stdin.write("\n")
        process.stdin.flush()
        expect_line(process, "blocked True")
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGCONT)
    process.stdin.write("\n")
    process.stdin.flush()
    expect_line(process, "right True")


def test_a_ctrl_c_reaches_the_program_and_not_its_worker(server: Servers, start: Start) -> None:
    process = start(server, "interrupted")
    expect_line(process, "waiting")
    time.sleep(0.1)
    for pid in [process.pid, *server.workers]:
        os.kill(pid, signal.SIGINT)  # a terminal sends Ctrl-C to all processes
    assert output_of(process) == ["interrupted 0 True"]


def test_prints_of_program_and_device_are_in_order(server: Servers, start: Start) -> None:
    expected = [f"{writer} {value}" for value in range(3) for writer in ("before", "fake print", "host")]
    assert output_of(start(server, "prints")) == expected


def test_threads_give_their_streams_back(server: Servers, start: Start) -> None:
    assert output_of(start(server, "threads_end")) == ["right True []"]


def test_contexts_are_switched_without_a_limit(server: Servers, start: Start) -> None:
    assert output_of(start(server, "switches")) == ["right True True []"]


def test_handles_that_are_none_are_refused(server: Servers, start: Start) -> None:
    assert output_of(start(server, "handles")) == ["codes True [400] True"]


class Reserving:
    """A reservation of a device for a server: `poll` returns the state, or raises it."""

    def __init__(self, state: list[str] | AgentError) -> None:
        self.state, self.closed = state, False

    def poll(self) -> list[str]:
        if isinstance(self.state, AgentError):
            raise self.state
        return self.state

    def close(self) -> None:
        self.closed = True


def test_a_client_is_not_refused_because_another_has_waited_too_long() -> None:
    """The device becomes free after one of two waiting clients was refused: the other one is served."""
    first, second = Reserving([]), Reserving(["GPU-0"])
    claims = iter([first, second])
    with serve(1, driver=build.build().fake, claim=lambda: next(claims)) as server:
        connections = [Raw.connect(server.folder) for _ in range(2)]
        with contextlib.ExitStack() as stack, open(os.devnull, "wb") as nothing:
            for line in connections:
                stack.enter_context(line)
                socket.send_fds(line, [Raw.hello(OPEN)], [nothing.fileno()] * 2)
            until(lambda: sum(client.request is not None for client in list(server.servers[0]._clients)) == 2)
            first.state = AgentError("the device was not free in time")
            answers = {int.from_bytes(line.recv(4), "little") for line in connections}
    assert answers == {REFUSED, OPENED} and first.closed and second.closed
