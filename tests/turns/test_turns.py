"""Turns between processes and threads, without a GPU: order, deaths, stops, forks, Ctrl-C, limits."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
from tests.harness import turns
from tests.harness.turns import HOLDS, OTHER, WAITS, Gpu, rows, waiting
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from warpwell import errors
from warpwell.cli.main import main
from warpwell.turns import choice, gpu_work, lease, operate, seat
from warpwell.turns.board import GRANT, HOLDER, PRIORITY, SINCE, SLOTS, USE, Board

LONG = HANG_SECONDS
folder, name, start = turns.folder, turns.name, turns.start


def free(name: str) -> None:
    """Take a turn: the lease is nobody's, or comes."""
    with ww.turn("check", device=name, timeout=LONG):
        pass


def test_turns_are_one_after_the_other_in_threads_and_processes(start: Any, name: str, tmp_path: Path) -> None:
    code = """
def work(n):
    for _ in range(30):
        with ww.turn(f"t{n}", device=D, timeout=30) as its:
            a = time.monotonic_ns(); time.sleep(0.0005); b = time.monotonic_ns()
            spans.append((a, b))
            its.pause()
            a = time.monotonic_ns(); time.sleep(0.0005); b = time.monotonic_ns()
            spans.append((a, b))
spans = []
threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
[t.start() for t in threads]; [t.join() for t in threads]
say(*(f"{a}:{b}" for a, b in spans))
"""
    programs = [start(code) for _ in range(3)]
    spans = sorted(tuple(map(int, pair.split(":"))) for program in programs for pair in program.hears().split())
    assert len(spans) == 3 * 2 * 60
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def test_a_holder_between_two_turns_hands_over(start: Any, name: str) -> None:
    holder = start.holder()
    holder.tell()
    assert holder.hears() == "out"
    assert rows(name)["holder"]["state"] == "holds"
    free(name)
    assert rows(name)["holder"]["state"] == "idle"


def test_a_killed_holder_frees_the_lease_at_once(start: Any, name: str) -> None:
    operate.limit(name, hold=3600.0)
    holder, waiter = start.holder(), start.waiter()
    holder.send(signal.SIGKILL)
    assert waiter.hears() == "inside"
    waiter.tell()
    assert "holder" not in rows(name)


def test_a_killed_waiter_is_forgotten(start: Any, name: str) -> None:
    with ww.turn("here", device=name):
        waiter = start.waiter(priority=5)
        waiter.send(signal.SIGKILL)
        waiter.process.wait(LONG)
    free(name)


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "between"])
def test_a_stopped_holder_loses_the_lease_and_waits_again_afterwards(start: Any, name: str, inside: bool) -> None:
    operate.limit(name, hold=0.3)
    holder = start.holder("with ww.turn('holder', device=D):\n    say('again')\n")
    if not inside:
        holder.tell()
        assert holder.hears() == "out"
    holder.send(signal.SIGSTOP)
    with ww.turn("here", device=name, timeout=LONG):
        assert rows(name)["here"]["state"] == "inside"
        holder.send(signal.SIGCONT)
        if inside:
            holder.tell()
            assert holder.hears() == "out"
        holder.tell()
        until(lambda: waiting(name, "holder"))
    assert holder.hears() == "again"


def test_a_stopped_waiter_lets_others_pass(start: Any, name: str) -> None:
    with ww.turn("here", device=name):
        start.waiter(priority=5).send(signal.SIGSTOP)
        second = start.waiter("second")
    assert second.hears() == "inside"


@pytest.mark.timing
def test_a_stopped_waiter_is_waited_for_once_only(start: Any, name: str) -> None:
    with ww.turn("here", device=name):
        waiter = start.waiter(priority=5)
        waiter.send(signal.SIGSTOP)
        time.sleep(0.05)
    began = time.monotonic()
    for _ in range(40):
        with ww.turn("here", device=name):
            pass
    assert time.monotonic() - began < 20 * seat.LATE
    waiter.send(signal.SIGCONT)
    assert waiter.hears() == "inside"


@pytest.mark.parametrize("times", range(3))
def test_an_interrupt_while_waiting_raises_and_leaves_nothing(start: Any, name: str, times: int) -> None:
    code = """
say("begins")
try:
    with ww.turn("waiter", device=D):
        say("inside")
except KeyboardInterrupt:
    say("interrupted")
with ww.turn("waiter", device=D):
    say("inside")
sys.stdin.readline()
"""
    holder = start.holder()
    waiter = start(code)
    assert waiter.hears() == "begins"
    until(lambda: waiting(name))
    time.sleep(0.002 * times)
    waiter.send(signal.SIGINT)
    assert waiter.hears() == "interrupted"
    until(lambda: waiting(name))
    holder.tell()
    assert waiter.hears() == "inside"
    free(name)


@pytest.mark.parametrize("meets", [False, True])
def test_an_interrupt_at_any_point_leaves_no_lease_behind(start: Any, name: str, meets: bool) -> None:
    operate.limit(name, hold=3600.0)
    other = start(OTHER.format(priority=meets))
    with ww.turn("here", device=name):
        mine = seat.seat_of(name)

    told: list[int] = []

    def one_turn() -> None:
        with ww.turn("here", device=name) as its:
            if meets:
                told.append(1)
                other.tell()
                until(mine.station.board.anyone)
            its.pause()

    for where in turns.interruptions(one_turn):
        assert mine.depth == 0 and not mine.inside, where
        other.tell()
        for _ in [*told, 1]:
            assert other.hears() == "done", where
        told.clear()


def test_an_interrupt_in_a_turn_ends_it(name: str) -> None:
    with contextlib.suppress(KeyboardInterrupt), ww.turn("here", device=name):
        raise KeyboardInterrupt
    assert rows(name)["here"]["state"] == "holds"


def test_the_highest_priority_is_next_and_then_who_used_least(start: Any, name: str) -> None:
    with ww.turn("here", device=name):
        low, high = start.waiter("low"), start.waiter("high", 3)
    assert high.hears() == "inside"
    assert rows(name)["low"]["state"] == "waits"
    high.tell()
    assert low.hears() == "inside"
    low.tell()
    assert not Board.of(name).anyone()


def test_a_pause_lets_a_higher_priority_in_and_no_lower_one(start: Any, name: str) -> None:
    with ww.turn("here", device=name, timeout=LONG) as its:
        start.waiter("lower", -1)
        its.pause()
        assert rows(name)["lower"]["state"] == "waits"
        higher = start.waiter("higher", 1)
        threading.Timer(0.1, higher.tell).start()
        its.pause()
        assert higher.hears() == "inside"
        assert rows(name)["here"]["state"] == "inside"


def test_a_holder_that_does_not_come_back_hands_over_whatever_its_priority(
    start: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without waiting until those who wait look."""
    with ww.turn("here", device=name, priority=3):
        waiter = start.waiter(priority=-3, before="from warpwell.turns import seat\nseat.LOOK = 3600.0\n")
    assert waiter.hears() == "inside"


def test_a_loop_of_higher_priority_keeps_the_lease_between_its_turns(start: Any, name: str) -> None:
    with ww.turn("here", device=name, priority=3):
        waiter = start.waiter(priority=-3)
    for _ in range(200):
        with ww.turn("here", device=name, priority=3):
            pass
    assert rows(name)["here"]["turns"] >= 150
    assert waiter.hears() == "inside"


def test_threads_of_one_process_wait_for_each_other(name: str) -> None:
    order: list[int] = []

    def other() -> None:
        with ww.turn("other", device=name, timeout=LONG):
            order.append(2)

    with ww.turn("here", device=name):
        thread = threading.Thread(target=other)
        thread.start()
        until(lambda: waiting(name, "other"))
        order.append(1)
    thread.join(LONG)
    assert order == [1, 2]
    free(name)


def test_a_thread_that_ends_gives_back_its_seat_and_the_lease(name: str, start: Any) -> None:
    def other() -> None:
        with ww.turn("other", device=name):
            pass

    for _ in range(3):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(LONG)
        until(lambda: "other" not in rows(name))
    waiter = start(WAITS.format(priority=0))
    assert [waiter.hears(), waiter.hears()] == ["begins", "inside"]


def test_a_turn_within_a_turn_is_a_part_of_it(name: str, start: Any) -> None:
    its = ww.turn("here", device=name)
    with its:
        with its, ww.turn("inner", device=name):
            waiter = start.waiter(priority=5)
        assert waiting(name)
    assert waiter.hears() == "inside"


def test_a_turn_that_does_not_come_in_time(start: Any, name: str) -> None:
    holder = start.holder()
    with pytest.raises(errors.TurnTimeoutError, match="sched status") as raised, ww.turn(device=name, timeout=0.05):
        raise AssertionError
    assert raised.value.device == name and isinstance(raised.value, TimeoutError)
    assert not waiting(name, "default")
    holder.tell()
    free(name)


def test_a_forked_child_has_no_part_in_the_turn_of_its_parent(start: Any, name: str) -> None:
    code = """
with ww.turn("parent", device=D) as its:
    child = os.fork()
    if child == 0:
        its.pause()
        try:
            with ww.turn("child", device=D, timeout=0.1):
                say("child is inside")
        except ww.errors.TurnTimeoutError:
            pass
        os._exit(0)
    else:
        os.waitpid(child, 0)
        say("child has ended")
        sys.stdin.readline()
say("out")
with ww.turn("parent", device=D):
    if os.fork() == 0:
        time.sleep(60)
    say("forked")
    sys.stdin.readline()
"""
    program = start(code)
    assert program.hears() == "child has ended"
    assert rows(name)["parent"]["state"] == "inside"
    program.tell()
    assert [program.hears(), program.hears()] == ["out", "forked"]
    program.send(signal.SIGKILL)  # its child lives, and has no part of the lease
    free(name)


def test_a_child_leaves_the_block_of_a_turn_that_was_open_at_the_fork(start: Any, name: str) -> None:
    code = """
with ww.turn("parent", device=D):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        say("child has ended")
        sys.stdin.readline()
if child == 0:
    os._exit(0)
say("out")
sys.stdin.readline()
"""
    program = start(code)
    assert program.hears() == "child has ended"
    assert rows(name)["parent"]["state"] == "inside" and rows(name)["parent"]["turns"] == 0
    program.tell()
    assert program.hears() == "out"
    assert rows(name)["parent"]["turns"] == 1


@pytest.mark.timing
def test_time_is_shared_whatever_the_length_of_turns(start: Any, name: str) -> None:
    code = """
end = time.monotonic() + 2.0
say("ready")
while time.monotonic() < end:
    with ww.turn({tenant!r}, device=D, timeout=30):
        time.sleep({seconds})
sys.stdin.readline()
"""
    programs = [start(code.format(tenant=t, seconds=s)) for t, s in (("short", 0.002), ("long", 0.03))]
    for program in programs:
        assert program.hears() == "ready"
    until(lambda: all(rows(name).get(t, {}).get("used", 0) > 0.5 for t in ("short", "long")))
    used = {t: rows(name)[t]["used"] for t in ("short", "long")}
    assert 0.5 < used["short"] / used["long"] < 2.0


def seats(board: Board, *given: tuple[int, float, int]) -> list[int]:
    """Make waiters of priority, seconds of waiting, and use."""
    found = []
    for priority, waited, use in given:
        slot = board.sit()
        at = board.at(slot)
        board.words[at + PRIORITY], board.words[at + USE] = priority, use
        board.words[at + SINCE] = 10**12 - int(waited * 1e9)
        board.flag(slot, True)
        found.append(slot)
    return found


@pytest.mark.parametrize(
    ("waiters", "wanted"),
    [
        ([(0, 0.0, 5), (0, 0.0, 3), (0, 0.0, 4)], 1),  # the least use
        ([(0, 0.0, 0), (2, 0.0, 9)], 1),  # the largest priority
        ([(0, 2.5, 0), (2, 0.1, 0), (1, 0.0, 0)], 0),  # who has waited for long enough: a step a second
        ([(-3, 5.1, 9), (2, 0.1, 0)], 1),
        ([(-3, 6.1, 0), (2, 0.1, 9)], 0),
        ([], None),
    ],
)
def test_who_is_next(name: str, waiters: list[tuple[int, float, int]], wanted: int | None) -> None:
    board = Board.of(name)
    slots = seats(board, *waiters)
    assert choice.next_of(board, 0, 0, 10**12) == (0 if wanted is None else slots[wanted])
    dead = next(slot for slot in range(1, SLOTS) if slot not in slots)
    board.words[board.at(dead) + PRIORITY] = 100
    board.flag(dead, True)  # nobody sits there
    assert choice.next_of(board, 0, 0, 10**12) == (0 if wanted is None else slots[wanted])
    assert not board.flagged(dead)


@pytest.mark.parametrize(
    ("holder", "kept", "waiter", "keeps"),
    [
        ((1, 0), 10.0, (0, 0.5, 0), True),
        ((0, 0), 0.0, (1, 0.0, 9), False),
        ((0, 0), 0.0, (0, 0.5, 0), True),  # within the quantum
        ((0, 7), 1.0, (0, 0.5, 7), False),
        ((0, 6), 1.0, (0, 0.5, 7), True),  # it has used less
        ((1, 0), 10.0, (0, 2.5, 0), False),  # who waits grows older
    ],
)
def test_when_a_holder_keeps_the_lease(
    name: str, holder: tuple[int, int], kept: float, waiter: tuple[int, float, int], keeps: bool
) -> None:
    board = Board.of(name)
    (slot,) = seats(board, waiter)
    own = board.sit()
    board.words[board.at(own) + PRIORITY], board.words[board.at(own) + USE] = holder
    assert choice.next_of(board, own, 10**12 - int(kept * 1e9), 10**12) == (0 if keeps else slot)


def test_a_thread_that_was_idle_has_no_credit(start: Any, name: str) -> None:
    with ww.turn("here", device=name):
        board = Board.of(name)
        own = next(s for s in range(1, SLOTS) if board.tenant(s) == "here")
        board.words[board.at(own) + USE] = 10**15
        waiter = start.waiter()
    assert waiter.hears() == "inside"
    assert rows(name)["waiter"]["used"] >= 1e6


def test_garbage_in_the_words_stops_nobody(name: str, start: Any) -> None:
    board = Board.of(name)
    for word in range(1, 6):
        board.words[word] = -(1 << 62) if word != GRANT else SLOTS + 5
    board.words[HOLDER] = 1 << 60
    for slot in range(1, SLOTS):
        for word in range(8):
            board.words[board.at(slot) + word] = (1 << 62) - slot
        board.flag(slot, True)
    with ww.turn("here", device=name, timeout=LONG) as its:
        its.pause()
    assert operate.status()


def test_limits_reach_turns_that_run(name: str) -> None:
    its = ww.turn("here", priority=100, device=name)
    with its:
        assert rows(name)["here"]["priority"] == choice.CEILING
    operate.limit(name, hold=3, ceiling=4, tenants={"here": {"ceiling": 2, "hold": 1.5}, "else": {"priority": 1}})
    with its:
        assert rows(name)["here"]["priority"] == 2
    with ww.turn("else", device=name):
        assert rows(name)["else"]["priority"] == 1
    found = choice.Limits.read(Board.of(name))[1]
    assert found is not None and found.holds("here") == 1.5 and found.holds("other") == 3
    with ww.turn("here", priority=100, device=f"{name}-later"):
        assert rows(f"{name}-later")["here"]["priority"] == choice.CEILING
    operate.limit(ceiling=1)  # of all, and of those to come
    with ww.turn("new", priority=100, device=f"{name}-new"), its:
        assert rows(f"{name}-new")["new"]["priority"] == rows(name)["here"]["priority"] == 1
    operate.limit(name, ceiling=2)
    with its:
        assert rows(name)["here"]["priority"] == 2
    for wrong in ({"hold": 0}, {"ceiling": -1}, {"weight": 2}, 3):
        with pytest.raises(errors.ArgumentError, match="here"):
            operate.limit(tenants={"here": wrong})  # type: ignore[dict-item]
    Board.of(name).write_text(b"{")
    with its:
        assert rows(name)["here"]["priority"] == 2  # half a text changes nothing


def hold(name: str) -> float:
    found = choice.Limits.read(Board.of(name))[1]
    assert found is not None
    return found.hold


def test_limits_for_a_while_give_back_those_of_before(name: str) -> None:
    for each in (name, f"{name}-other"):
        with ww.turn("here", device=each):
            pass
    operate.limit(hold=3)
    operate.limit(f"{name}-other", hold=4)
    with operate.limited(hold=2):
        assert hold(name) == hold(f"{name}-other") == 2
        with operate.limited(hold=1):
            assert hold(name) == 1
        with ww.turn("here", device=f"{name}-new"):
            pass
    assert (hold(name), hold(f"{name}-other")) == (3, 4)
    with ww.turn("here", device=f"{name}-later"):
        assert hold(f"{name}-later") == 3


def test_limits_that_are_set_meanwhile_stay(name: str) -> None:
    with ww.turn("here", device=name):
        pass
    operate.limit(hold=3)
    with operate.limited(hold=2):
        operate.limit(hold=5)
    assert hold(name) == 5
    with operate.limited(hold=2):
        operate.limit(name, hold=6)
    assert hold(name) == 6


def test_limits_of_a_program_that_was_killed_are_not_taken_for_the_operators(name: str) -> None:
    with ww.turn("here", device=name):
        pass
    operate.limit(hold=3)
    code = "import os\nfrom warpwell.turns.operate import limited\nwith limited(hold=2): os._exit(0)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_SECONDS)
    assert hold(name) == 2
    with operate.limited(hold=1):
        assert hold(name) == 1
    assert hold(name) == 3


@pytest.mark.parametrize("who", ["tenant", "number"])
def test_end_ends_a_tenant(start: Any, name: str, who: str) -> None:
    stubborn = start("signal.signal(signal.SIGTERM, lambda *_: say('asked'))\n" + HOLDS)
    assert stubborn.hears() == "inside"
    number = stubborn.process.pid
    assert operate.end("holder" if who == "tenant" else str(number), grace=0.3) == [number]
    assert stubborn.hears() == "asked"
    assert stubborn.process.wait(LONG) == -signal.SIGKILL
    with pytest.raises(errors.ArgumentError, match="there is"):
        operate.end("holder")


def answer(*command: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "warpwell", "sched", *command, "--json"],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert not done.returncode, done.stderr
    return dict(json.loads(done.stdout))


def test_commands(
    start: Any, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WARPWELL_SOCKET", str(tmp_path / "nobody.sock"))
    assert main(["sched", "status"]) == 2
    assert "no program leases a GPU here, and no scheduler service" in "".join(capsys.readouterr())
    start.holder()
    waiter = start.waiter(priority=2)
    found = {row["tenant"]: row for row in answer("status")["turns"]}
    assert (found["holder"]["state"], found["waiter"]["state"]) == ("inside", "waits")
    assert found["waiter"]["process"] == waiter.process.pid and found["waiter"]["priority"] == 2
    (tmp_path / "tenants.json").write_text('{"holder": {"hold": 0.2}}')
    assert answer("limit", "--ceiling", "1", "--tenants", str(tmp_path / "tenants.json"))["devices"] == [name]
    assert waiter.hears() == "inside"  # the holder has lost it
    assert rows(name)["holder"]["state"] == "without"
    assert answer("end", "waiter", "--grace", "2")["processes"] == [waiter.process.pid]
    assert waiter.process.wait(LONG) == -signal.SIGTERM
    main(["sched", "status"])


def test_a_folder_without_room_or_rights_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(errors.SchedulerError, match=r"No space left.*KiB.*WARPWELL_TURNS"), ww.turn("a", device=name):
        pass
    (tmp_path / "file").touch()
    monkeypatch.setenv("WARPWELL_TURNS", str(tmp_path / "file"))
    with pytest.raises(errors.SchedulerError, match="File exists"), ww.turn("a", device=name):
        pass


def test_the_folder_is_named_by_its_whole_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WARPWELL_TURNS", "turns")
    with (
        pytest.raises(errors.SchedulerError, match="WARPWELL_TURNS must be an absolute path, got 'turns'"),
        ww.turn("a", device=name),
    ):
        pass
    assert not any(tmp_path.iterdir())


def test_the_file_is_for_the_group_of_a_shared_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    given = []

    def fchown(_: int, user: int, group: int) -> None:
        given.append((user, group))
        raise OSError(errno.EINVAL, "a container does not know this group")

    monkeypatch.setattr(os, "fchown", fchown)
    for mode in (0o700, 0o770):
        folder = tmp_path / oct(mode)
        folder.mkdir()
        folder.chmod(mode)
        monkeypatch.setenv("WARPWELL_TURNS", str(folder))
        free(f"{name}-{mode}")
        (made,) = folder.iterdir()
        assert made.stat().st_mode & 0o777 == mode & 0o660
    assert given == [(-1, tmp_path.stat().st_gid)]


def test_the_folder_must_be_its_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.delenv("WARPWELL_TURNS")
    monkeypatch.setattr(os.path, "isdir", lambda _: False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    mine = tmp_path / f"warpwell-{os.getuid()}"
    free(name)
    assert mine.stat().st_mode & 0o777 == 0o700
    mine.chmod(0o770)
    with pytest.raises(errors.SchedulerError, match="chmod 700"):
        free(f"{name}-other")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tenant": ""}, "tenant is ''"),
        ({"tenant": "x" * 129}, "tenant is"),
        ({"tenant": 3}, "tenant is 3"),
        ({"priority": 0.5}, "priority is 0.5"),
        ({"timeout": -1}, "timeout is -1"),
        ({"stream": "left"}, "stream is 'left'"),
        ({"device": "../x"}, "device is"),
        ({"device": -1}, "device is -1"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ArgumentError, match=message), ww.turn(**options):
        raise AssertionError


class TorchDevice:
    """As `torch.device`."""

    def __init__(self, kind: str, index: int | None) -> None:
        self.type, self.index = kind, index

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


def test_devices_as_pytorch_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_names", {})
    monkeypatch.setattr(lease, "current_context", lambda: 7)
    monkeypatch.setattr(lease, "device_name", lambda number: f"gpu-{number}")
    for kind, index, name in (
        ("cpu", None, "host"),
        ("cuda", None, "gpu-None"),
        ("cuda", 0, "gpu-0"),
        ("cuda", 1, "gpu-1"),
    ):
        device = TorchDevice(kind, index)
        assert lease._name_of(device) == lease._name_of(str(device)) == name
    assert lease._name_of(None) == "gpu-None" and lease._name_of("cuda-x") == "cuda-x"


def test_a_framework_needs_no_compiler_here() -> None:
    code = "import sys, warpwell as ww\nwith ww.turn(device='none'): pass\n"
    code += "assert not {'numpy', 'numba', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_SECONDS)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    monkeypatch.setattr(gpu_work, "driver", lambda: made)
    return made


def test_one_turn_is_queued_behind_the_one_that_runs(gpu: Gpu, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_work, "AHEAD", 0.0)
    for _ in range(4):
        with ww.turn("here", device=name):
            gpu.calls.append("work")
    marks = [f"record {k} in 0" for k in range(1, 5)]
    assert gpu.calls == ["work", marks[0], "work", marks[1], "wait 1", "work", marks[2], "wait 2", "work", marks[3]]


def test_short_parts_are_queued_for_as_long_as_a_long_one(gpu: Gpu, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(seat, "OFTEN", 0.0)
    monkeypatch.setattr(gpu_work.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(gpu_work, "AHEAD", 2e-3)
    with ww.turn("here", device=name) as its:
        for step in (0.45e-3, 2.5e-3, 1e-6):
            gpu.calls.clear()
            for _ in range(100):
                now[0] += step
                its.pause()
            marks = [call for call in gpu.calls if call.startswith("record")]
            ahead = {0.45e-3: 4, 2.5e-3: 1, 1e-6: 31}[step]
            assert gpu.calls[-1] == marks[-1 - ahead].replace("record", "wait").replace(" in 0", "")


def test_the_gpu_is_drained_before_the_lease_is_handed_over(gpu: Gpu, name: str, start: Any) -> None:
    with ww.turn("here", device=name) as its:
        waiter = start.waiter(priority=1)
        threading.Timer(0.2, waiter.tell).start()
        its.pause()
        assert "synchronize" in gpu.calls
        assert waiter.hears() == "inside"


def test_a_turn_that_begins_while_another_thread_hands_over_keeps_the_lease(
    gpu: Gpu, name: str, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ww.turn("here", device=name):
        pass
    mine = seat.seat_of(name)
    draining, go = threading.Event(), threading.Event()

    def drain(alone: bool) -> None:
        if not draining.is_set():
            draining.set()
            go.wait(LONG)

    monkeypatch.setattr(mine.work, "drain", drain)
    waiter = start(WAITS.format(priority=0))
    waiter.hears()
    assert draining.wait(LONG)
    with monkeypatch.context() as patch:
        patch.setattr(seat.Station, "hand_over", lambda *_: False)  # by nobody else
        with ww.turn("here", device=name):
            go.set()
            time.sleep(0.2)
            assert mine.station.seat is mine and mine.inside
    assert waiter.hears() == "inside"
    waiter.tell()


def test_a_thread_that_keeps_the_lease_stops_a_hand_over_that_began_before(
    gpu: Gpu, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of the station begins to hand over just before the holder, which comes back, asks for that itself."""
    with ww.turn("here", device=name):
        pass
    holder = seat.seat_of(name)
    station, board = holder.station, holder.station.board
    draining, resume, answers = threading.Event(), threading.Event(), []

    def drain(alone: bool) -> None:
        draining.set()
        assert resume.wait(LONG)

    monkeypatch.setattr(holder.work, "drain", drain)
    hand_over = seat.Station.hand_over
    concurrent = threading.Thread(target=lambda: answers.append(hand_over(station, None, False)))

    def hand_over_concurrently(self: seat.Station, held: seat.Seat | None, continues: bool) -> bool:
        if held is holder and not answers and not draining.is_set():
            concurrent.start()
            assert draining.wait(LONG)
        return hand_over(self, held, continues)

    monkeypatch.setattr(seat.Station, "hand_over", hand_over_concurrently)
    waiter = board.sit()
    board.words[board.at(waiter) + PRIORITY] = 1
    board.flag(waiter, True)
    with ww.turn("here", device=name):
        resume.set()
        concurrent.join(LONG)
        assert answers == [False] and station.seat is holder and holder.inside
        assert board.words[HOLDER] == holder.slot
        board.flag(waiter, False)
    board.rise(waiter)


def test_pauses_that_follow_each_other_closely_are_one(gpu: Gpu, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seat, "OFTEN", 30.0)
    with ww.turn("here", device=name) as its:
        for _ in range(5):
            its.pause()
        assert not gpu.calls
        monkeypatch.setattr(seat, "OFTEN", 0.0)
        its.pause()
        assert gpu.calls[:1] == ["record 1 in 0"]


def test_streams_narrow_what_is_waited_for(gpu: Gpu, name: str) -> None:
    class Torch:
        cuda_stream = 5

    class Numba:
        class handle:
            value = 6

    class Core:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 7

    with ww.turn("here", device=name, stream=[Torch(), Numba(), Core(), 8]):
        pass
    assert gpu.calls == [f"record {k} in {k + 4}" for k in range(1, 5)]
    kept = Torch()
    where, turn = weakref.ref(kept), ww.turn("here", device=name, stream=[kept])
    del kept
    assert where() is not None and turn is not None  # a turn keeps its streams
    work = seat.seat_of(name).work
    gpu.calls.clear()
    gpu.context = 0  # of another thread
    work.drain()
    assert gpu.calls == ["context 77", "wait 1", "wait 2", "wait 3", "wait 4", "context None"]


def test_a_tensor_is_no_stream(name: str) -> None:
    class Tensor:
        def __bool__(self) -> bool:
            raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")

    with pytest.raises(errors.ArgumentError, match="give a stream of PyTorch"):
        ww.turn("here", device=name, stream=Tensor())


def test_another_context_has_events_of_its_own(gpu: Gpu, name: str) -> None:
    for context in (77, 78):
        gpu.context = context
        with ww.turn("here", device=name):
            pass
    assert gpu.calls == ["record 1 in 0", "destroy 1", "record 2 in 0"]
