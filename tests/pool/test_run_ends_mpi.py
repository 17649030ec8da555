"""`run` reports each end of an application, an agent or a launcher, and no process or file is left."""

import json
import os
import signal
import time

import pytest
from tests.harness.until import until

from lab.campaigns.interrupts_pool import POOL, left
from lab.campaigns.marked import command_of
from warpwell.pool.launch.versions import PROTOCOL

from .runs import PROGRAMS, Run, Start, planted, start

ENDING = str(PROGRAMS / "ending.py")

__all__ = ["start"]


@pytest.mark.parametrize(
    ("how", "status", "message"),
    [
        pytest.param(["normal"], 0, "", marks=pytest.mark.slow),
        (["raise"], 1, "ValueError: on purpose"),
        pytest.param(["exit", "3"], 3, "", marks=pytest.mark.slow),
        pytest.param(["message"], 1, "a message", marks=pytest.mark.slow),
        pytest.param(["_exit", "3"], 3, "", marks=pytest.mark.slow),
        pytest.param(["signal", "SIGKILL"], 137, "", marks=pytest.mark.slow),
        pytest.param(["signal", "SIGSEGV"], 139, "", marks=pytest.mark.slow),
    ],
)
def test_an_application_that_ends(start: Start, how: list[str], status: int, message: str) -> None:
    run = start("--agents", "2", ENDING, *how)
    run.line("up")
    assert run.end() == status
    assert message in run.errors
    run.nothing_is_left()  # run returns when all have ended
    if status < 128 and not message.startswith("ValueError"):
        assert run.errors.strip() == message


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--no-ft"], ["--tcp"]], ids=" ".join)
def test_an_application_that_ends_over_other_paths(start: Start, options: list[str]) -> None:
    run = start("--agents", "3", *options, ENDING, "exit", "3")
    run.line("up")
    assert (run.end(), run.errors) == (3, "")
    run.nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "how"),
    [
        (signal.SIGINT, "wait"),
        (signal.SIGINT, "spin"),
        (signal.SIGTERM, "wait"),
        (signal.SIGHUP, "spin"),
    ],
)
def test_a_signal_reaches_the_application(start: Start, number: signal.Signals, how: str) -> None:
    run = start("--agents", "2", ENDING, how)
    run.line("up")
    run.process.send_signal(number)
    assert run.end() == 128 + number
    assert ("KeyboardInterrupt" in run.errors) == (number == signal.SIGINT)
    run.nothing_is_left()


@pytest.mark.parametrize(
    "how", ["copies", pytest.param("calls", marks=pytest.mark.slow), pytest.param("waits", marks=pytest.mark.slow)]
)
def test_ctrl_c_leaves_everything_usable_and_ends_a_program(start: Start, how: str) -> None:
    run = start("--agents", "2", str(PROGRAMS / "interrupted.py"), how)
    run.line("up")
    assert run.output.splitlines() == ["0.0"] * 10
    time.sleep(0.2)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    assert "KeyboardInterrupt" in run.errors
    run.nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_ctrl_c_at_random_moments(start: Start, seed: int) -> None:
    run = start("--agents", "2", "--target", "cpu", "-c", POOL, str(seed))
    run.line("READY")
    time.sleep(0.1 * seed)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    assert left(run.folder) == []


@pytest.mark.slow
def test_an_application_that_does_not_listen_is_killed_by_the_second_interrupt(start: Start) -> None:
    run = start("--agents", "2", ENDING, "deaf")
    run.line("deaf")
    for _ in range(2):
        time.sleep(0.2)
        run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    run.nothing_is_left()


def test_an_interrupt_while_everybody_starts(start: Start) -> None:
    run = start("--agents", "2", ENDING, "wait", environ=planted("1:stop-before-mpi"))
    until(lambda: run.find("agent_main"))
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    run.nothing_is_left()


def supervisor_of(run: Run, role: str) -> int:
    """Return the supervisor of a role."""
    return next(pid for pid in run.find("supervise.py") if command_of(pid).split()[4] == role)


@pytest.mark.parametrize(
    "whom",
    [
        "application",
        pytest.param("its supervisor", marks=pytest.mark.slow),
        "launcher",
        "mpiexec",
        pytest.param("supervisor of mpiexec", marks=pytest.mark.slow),
    ],
)
def test_somebody_is_killed(start: Start, whom: str) -> None:
    run = start("--agents", "2", ENDING, "wait")
    application, *_ = map(int, run.line("up"))
    victim = {
        "application": lambda: application,
        "its supervisor": lambda: supervisor_of(run, "application"),
        "launcher": lambda: run.process.pid,
        "mpiexec": lambda: next(pid for pid in run.find("prterun")),
        "supervisor of mpiexec": lambda: supervisor_of(run, "mpiexec"),
    }[whom]()
    os.kill(victim, signal.SIGKILL)
    status = run.end()
    statuses = {"application": 137, "its supervisor": 137, "launcher": -9, "mpiexec": 2, "supervisor of mpiexec": 2}
    assert status == statuses[whom]
    run.nothing_is_left()
    if "mpiexec" in whom:
        assert "mpiexec ended" in run.errors


@pytest.mark.parametrize("moment", ["job_files.JobFiles.use", "launcher.Listener", "launcher.cuda_programs.prepare"])
def test_a_launcher_that_is_killed_before_mpiexec_runs_leaves_nothing(start: Start, moment: str) -> None:
    run = start("--agents", "2", ENDING, "wait", environ=planted(f"launcher:{moment}"))
    run.line("held")
    assert run.files()
    os.kill(run.process.pid, signal.SIGKILL)
    run.end()
    run.nothing_is_left()


def test_an_interrupt_while_files_are_removed_leaves_none(start: Start) -> None:
    run = start("--agents", "1", "-c", "pass", environ=planted("interrupt:job_files.JobFiles.remove"))
    assert run.end() in {130, -signal.SIGINT}
    run.nothing_is_left()


@pytest.mark.slow
def test_a_killed_launcher_takes_stopped_processes_along(start: Start) -> None:
    run = start("--agents", "2", ENDING, "wait")
    _, first, _ = map(int, run.line("up"))
    os.kill(first, signal.SIGSTOP)
    os.kill(run.process.pid, signal.SIGKILL)
    run.end()
    run.nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_application_goes_on_without_an_agent(start: Start, how: signal.Signals) -> None:
    run = start("--agents", "3", str(PROGRAMS / "losing.py"), environ={"WARPWELL_POOL_TIMEOUT": "3"})
    agents = list(map(int, run.line("up")))
    os.kill(agents[1], how)
    assert run.line("lost")[1:] == ["1", "6.0,6.0"]
    assert run.end() == 0
    assert run.errors == ""
    run.nothing_is_left()


def test_an_agent_that_exits_is_told_of_at_once(start: Start) -> None:
    """The launcher sees its process end: waiting for its silence would take longer than this test may."""
    run = start("--agents", "3", str(PROGRAMS / "exiting.py"), environ={"WARPWELL_POOL_TIMEOUT": "3600"})
    for event in ("told", "copied"):
        assert "its process ended" in " ".join(run.line(event))
    assert run.line("others") == ["6.0", "6.0"]
    assert run.end() == 0, run.errors
    run.nothing_is_left()


@pytest.mark.timing
@pytest.mark.parametrize(
    ("moment", "seed", "hows"),
    [
        ("copy", "1", ["stop", "exit"]),
        ("kernel", "2", ["exit", "kill"]),
    ],
)
def test_devices_that_are_lost_in_the_middle(start: Start, moment: str, seed: str, hows: list[str]) -> None:
    program = ("-m", "lab.campaigns.pool_losing", moment, seed)
    run = start("--agents", "3", *program, environ={"WARPWELL_POOL_TIMEOUT": "3"})
    assert run.end() == 0, run.errors
    assert [each["how"] for each in json.loads(run.output)] == hows
    run.nothing_is_left()


def test_without_fault_tolerance_a_lost_agent_ends_the_job(start: Start) -> None:
    run = start("--agents", "2", "--no-ft", ENDING, "wait")
    _, first, _ = map(int, run.line("up"))
    os.kill(first, signal.SIGKILL)
    assert run.end() == 2
    assert "agent 1 of 2 (device 0" in run.errors or "mpiexec ended" in run.errors
    run.nothing_is_left()


@pytest.mark.parametrize(
    "action",
    [
        "kill-at-start",
        pytest.param("kill-before-mpi", marks=pytest.mark.slow),
        pytest.param("exit-at-start", marks=pytest.mark.slow),
        pytest.param("kill-in-mpi", marks=pytest.mark.slow),
        pytest.param("no-agent", marks=pytest.mark.slow),
    ],
)
def test_an_agent_that_ends_before_it_is_ready_is_named(start: Start, action: str) -> None:
    run = start("--agents", "3", ENDING, "wait", environ=planted(f"2:{action}"))
    assert run.end() == 2
    assert "agent 2 of 3 (device 1" in run.errors, run.errors
    run.nothing_is_left()


@pytest.mark.slow
def test_an_agent_that_stops_before_it_is_ready_is_named(start: Start) -> None:
    run = start("--agents", "3", "--start-timeout", "12", ENDING, "wait", environ=planted("3:stop-before-mpi"))
    assert run.end() == 2
    assert "not ready after 12 s: agent 3 of 3 (device 2" in run.errors
    run.nothing_is_left()


def test_a_message_without_a_handler_ends_the_job_and_is_named(start: Start) -> None:
    text = "import time, warpwell as ww; from warpwell.pool.agent.protocol import pack; "
    text += "ww.devices()[1].caller.transport.send(2, pack(77, 0, 0)); time.sleep(100)"
    run = start("--agents", "2", "-c", text)
    assert run.end() == 2
    assert "rank 2 has no handler for the message 77 of rank 0" in run.errors
    run.nothing_is_left()


@pytest.mark.slow
def test_another_version_is_refused(start: Start) -> None:
    run = start("--agents", "2", ENDING, "wait", environ=planted("1:another-protocol"))
    assert run.end() == 2
    assert "agent 1 of 2 (device 0" in run.errors and f"protocol {PROTOCOL} here and 99 there" in run.errors, run.errors
    run.nothing_is_left()
