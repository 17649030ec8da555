"""The launcher's connection to a process: telling and hearing do not disturb each other."""

import json
import socket

import pytest

from warpwell.pool.launch import rendezvous


def test_who_does_not_read_is_told_nothing_more_but_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_TELL_SECONDS", 1)
    here, there = socket.socketpair()
    with here, there:
        connection = rendezvous.JobProcess(here)
        while not connection._broken:
            connection.tell(text="x" * 100_000)
        connection.tell(text="more")
        assert here.gettimeout() is None  # for the thread that reads
        there.sendall(json.dumps({"alive": True}).encode() + b"\n")
        assert connection.read() == {"alive": True}


def test_messages_arrive_one_by_one() -> None:
    here, there = socket.socketpair()
    with here, there, there.makefile("rb") as lines:
        connection = rendezvous.JobProcess(here)
        for k in range(3):
            connection.tell(k=k)
        assert [json.loads(lines.readline()) for _ in range(3)] == [{"k": k} for k in range(3)]
        there.shutdown(socket.SHUT_WR)
        assert connection.read() is None
