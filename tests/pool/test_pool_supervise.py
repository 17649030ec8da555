"""The supervisor of a process: it reports how its member ends, and leaves nothing of it. No MPI."""

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.harness.until import HANG_SECONDS, until

from lab.campaigns.marked import state_of
from warpwell.errors import AgentError
from warpwell.pool.launch import job_files, supervise
from warpwell.pool.launch.launcher import Launcher, RunOptions
from warpwell.pool.launch.member import Member
from warpwell.pool.launch.supervise import JsonLines

SEND = """
import json, os, signal, socket, sys, time
own = socket.socket(fileno=int(os.environ["WARPWELL_POOL_MEMBER"]))
def send(**message):
    own.sendall(json.dumps(message).encode() + b"\\n")
"""
"""The start of a member without the package."""


class Supervised:
    """A supervisor whose launcher is the test."""

    def __init__(self, folder: Path, role: str, code: str, paths: tuple[Path, ...] = ()) -> None:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(str(folder / "socket"))
        listening.listen()
        listening.settimeout(HANG_SECONDS)
        removed = os.pathsep.join(map(str, paths))
        command = [sys.executable, "-I", "-S", supervise.__file__, role, removed, sys.executable, "-c", code]
        environ = {**os.environ, supervise.ADDRESS: f"unix:{folder / 'socket'}", supervise.TOKEN: "x", "PMIX_RANK": "3"}
        self.process = subprocess.Popen(command, env=environ, start_new_session=True)
        accepted, _ = listening.accept()
        listening.close()
        accepted.settimeout(HANG_SECONDS)
        self.launcher = JsonLines(accepted)
        self.messages = self.launcher.incoming()
        first = next(self.messages)
        assert {key: first[key] for key in ("here", "token", "rank", "supervisor")} == {
            "here": role,
            "token": "x",
            "rank": 3,
            "supervisor": self.process.pid,
        }
        if role == "application":
            with open(os.devnull, "rb") as null:
                socket.send_fds(accepted, [b"."], [null.fileno(), 1, 2])
        self.member: int = next(self.messages)["pid"]

    def until(self, key: str) -> Any:
        """Return the value of the next message with this key."""
        return next(message[key] for message in self.messages if key in message)

    def end(self) -> int:
        """Wait for the end of the supervisor; return its status."""
        return self.process.wait(HANG_SECONDS)


Make = Callable[..., Supervised]


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Make]:
    made: list[Supervised] = []

    def make(role: str, code: str, paths: tuple[Path, ...] = ()) -> Supervised:
        made.append(Supervised(tmp_path, role, code, paths))
        return made[-1]

    yield make
    for each in made:
        for kill, pid in ((os.kill, each.process.pid), (os.killpg, each.member)):
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        each.process.wait()
        each.launcher.socket.close()


def has_exited(pid: int) -> bool:
    return state_of(pid) in "XZ"


@pytest.mark.parametrize(
    ("end", "status", "own"),
    [("os._exit(7)", 7, 7), ("os.kill(os.getpid(), 9)", -9, -9), ("os.kill(os.getpid(), 15)", -15, -9)],
)
def test_the_end_of_an_agent_is_reported_after_its_last_message_and_is_that_of_the_rank(
    supervised: Make, end: str, status: int, own: int
) -> None:
    supervisor = supervised("agent", SEND + f"send(failed='why'); {end}")
    assert list(supervisor.messages) == [{"failed": "why"}, {"status": status}]
    assert supervisor.end() == own


def test_a_supervisor_of_an_application_stays_until_the_job_ends(supervised: Make, tmp_path: Path) -> None:
    supervisor = supervised("application", SEND + "sys.exit(3)")
    assert supervisor.until("status") == 3
    time.sleep(0.1)
    assert supervisor.process.poll() is None
    supervisor.launcher.send(end=True)
    assert supervisor.end() == 0


@pytest.mark.parametrize("how", ["end", "close", "kill"])
def test_nothing_of_a_member_outlives_the_job(supervised: Make, tmp_path: Path, how: str) -> None:
    """Of a member that does not listen, its forked child, and a program in another process group."""
    folder, later = tmp_path / "job", tmp_path / "later"
    for path in (folder, later):
        path.mkdir()
        (path / "file").touch()
    program = "other = os.fork()\nif other == 0: os.setpgid(0, 0); time.sleep(600)\nsend(group=other)\n"
    code = f"signal.signal(15, signal.SIG_IGN)\nsend(remove=[{str(later)!r}])\nchild = os.fork()\n"
    code += "if child == 0: time.sleep(600)\n" + program + "send(children=[child, other]); time.sleep(600)"
    supervisor = supervised("agent", SEND + code, (folder,))
    children = supervisor.until("children")
    if how == "end":
        supervisor.launcher.send(end=True)
    elif how == "close":
        supervisor.launcher.socket.close()
    else:
        os.kill(supervisor.member, signal.SIGKILL)
        assert supervisor.until("status") == -9
    assert supervisor.end() == {"end": 0, "close": 1, "kill": -9}[how]
    until(lambda: all(map(has_exited, [supervisor.member, *children])))
    assert folder.exists() == later.exists() == (how == "kill")  # the job continues


def test_a_member_dies_with_its_supervisor(supervised: Make) -> None:
    supervisor = supervised("agent", SEND + "signal.signal(15, signal.SIG_IGN); send(ready=True); time.sleep(600)")
    supervisor.until("ready")
    supervisor.process.kill()
    until(lambda: has_exited(supervisor.member))


def test_signals_reach_the_member_and_its_stops_are_reported(supervised: Make) -> None:
    supervisor = supervised(
        "application", SEND + "signal.signal(2, lambda *_: send(got=2)); send(ready=True)\nwhile True: time.sleep(9)"
    )
    supervisor.until("ready")
    os.kill(supervisor.member, signal.SIGSTOP)
    assert supervisor.until("stopped") is True
    supervisor.launcher.send(signal=int(signal.SIGINT))
    os.kill(supervisor.member, signal.SIGCONT)
    assert {key for _ in range(2) for key in next(supervisor.messages)} == {"stopped", "got"}


def test_messages_reach_the_member_and_a_program_that_it_executes_is_still_the_member(supervised: Make) -> None:
    code = "data = own.recv(100); send(got=json.loads(data)['go']); os.execv('/bin/sh', ['sh', '-c', 'exit 5'])"
    supervisor = supervised("application", SEND + "own.set_inheritable(False)\n" + code)
    supervisor.launcher.send(go={"agents": 2})
    assert supervisor.until("got") == {"agents": 2}
    assert supervisor.until("status") == 5


@pytest.mark.parametrize("is_deaf", [False, True])
def test_mpiexec_may_end_by_itself_before_it_is_killed(supervised: Make, tmp_path: Path, is_deaf: bool) -> None:
    code = f"import os, signal, time; signal.signal(15, signal.SIG_IGN if {is_deaf} else lambda *_: os._exit(0))\n"
    supervisor = supervised("mpiexec", code + f"open({str(tmp_path / 'up')!r}, 'w'); time.sleep(600)")
    until((tmp_path / "up").exists)
    began = time.monotonic()
    supervisor.launcher.send(end=True)
    assert supervisor.end() == 0
    assert has_exited(supervisor.member) and time.monotonic() - began > (2.9 if is_deaf else 0.9)


def test_a_supervisor_that_finds_no_launcher_removes_the_files_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    environ = {**os.environ, supervise.ADDRESS: f"unix:{tmp_path / 'socket'}", supervise.TOKEN: "x"}
    line = [sys.executable, "-I", "-S", supervise.__file__, "mpiexec", str(tmp_path / "job"), "true"]
    assert subprocess.run(line, env=environ, check=False).returncode == 1
    assert not (tmp_path / "job").exists()


def test_a_peer_that_does_not_read_gets_nothing_more_but_is_received_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "_SEND_SECONDS", 1)
    own_end, peer = socket.socketpair()
    with own_end, peer:
        connection = JsonLines(own_end)
        while not connection._broken:
            connection.send(text="x" * 100_000)
        connection.send(text="more")
        assert own_end.gettimeout() is None  # the receiving thread must not time out
        peer.sendall(json.dumps({"alive": True}).encode() + b"\n")
        assert connection.receive() == [{"alive": True}]


def test_messages_arrive_in_parts_and_together() -> None:
    own_end, peer = socket.socketpair()
    with own_end, peer:
        connection = JsonLines(own_end)
        peer.sendall(b'{"k": 0}\n{"k"')
        assert connection.receive() == [{"k": 0}]
        peer.sendall(b": 1}\n")
        peer.close()
        assert list(connection.incoming()) == [{"k": 1}]


@pytest.mark.parametrize("text", [b"[1]\n", b"{\n", b"x" * (supervise._MAX_LINE_BYTES + 1), b"[" * 200_000 + b"\n"])
def test_a_peer_that_does_not_follow_the_protocol_is_disconnected(text: bytes) -> None:
    own_end, peer = socket.socketpair()
    with own_end, peer:
        threading.Thread(target=peer.sendall, args=(text,), daemon=True).start()
        connection = JsonLines(own_end)
        with pytest.raises(EOFError):
            while True:
                connection.receive()


def test_a_member_that_waits_for_the_start_does_not_answer_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_end, peer = socket.socketpair()
    monkeypatch.setattr(job_files, "SHARED_MEMORY", tmp_path)
    monkeypatch.setenv(job_files.JOB, "1")
    monkeypatch.setenv(supervise.MEMBER, str(own_end.detach()))
    joining = Member()
    with joining.socket, peer:
        for message in ({"ask": True}, {"reserve": {}}, {"ask": True}, {"go": {"agents": 2}}):
            peer.sendall(json.dumps(message).encode() + b"\n")
        assert joining.wait_for_go() == {"agents": 2}
        sent = JsonLines(peer).receive()
        assert sent[-1] == {"reserved": []}


def test_a_job_that_starts_is_not_removed_by_another_one_that_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_files, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(job_files, "base", lambda: tmp_path)
    lock = fcntl.flock
    first, second = job_files.JobFiles.of_new_job(), job_files.JobFiles.of_new_job()

    def flock(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        second.make()  # while the first job is about to lock its file
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    first.make()
    try:
        assert first.folder.exists() and second.folder.exists()
        assert {files.job: alive for files, alive in job_files.jobs()} == {first.job: True, second.job: True}
    finally:
        first.remove()
        second.remove()


def test_processes_that_are_late_are_named_stopped_ones_first(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = Launcher(["program.py"], RunOptions(start=5.0))
    made._hosts = {1: "localhost", 2: "localhost", 3: "localhost"}
    made._output = type("Output", (), {"messages": lambda self: ""})()
    sent: dict[int, dict[str, Any]] = {rank: {"rank": rank, "pid": rank} for rank in range(4)}
    made._ranks = {rank: type("Known", (), {"facts": sent[rank]})() for rank in (0, 1, 3)}
    sent[0]["compiling"] = True
    made._check_start(60.0)  # the time of compiling does not count
    sent[0]["compiling"] = False
    made._check_start(64.9)
    with pytest.raises(AgentError, match=r"after 5 s: agent 2 of .*\), agent 1 .*, process 1\), agent 3"):
        made._check_start(65.1)
    sent[3]["stopped"] = True
    with pytest.raises(AgentError, match=r"after 5 s: agent 3 of .*, process 3.*, which is stopped"):
        made._check_start(65.2)
    made._ranks[2] = made._ranks[1]
    for rank in (1, 3):
        sent[rank]["ready"] = True
    with pytest.raises(AgentError, match="the application was not ready"):
        made._check_start(65.3)
