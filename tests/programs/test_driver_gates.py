"""Gates in workers of the driver layer, on the fake driver: right results under any gate, any death, any board."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.harness import turns
from tests.harness.conversation import Conversation
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from lab.driver import build
from lab.driver.serve import Servers, serve
from warpwell.cli.main import main
from warpwell.driver import Board
from warpwell.errors import ArgumentError
from warpwell.programs import end_programs, program_status

ROOT = Path(__file__).parents[2]
UNCOUNTED = 1 << 63
"""The value of `Board.ISSUED` while calls are not counted."""
FAIL_OPEN_SECONDS = 0.1
"""WW_GATE_FAIL_OPEN_NS of gate.h."""
DEVICES = ("gpu-" + "fa" * 15 + "00", "gpu-" + "fa" * 15 + "01")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    monkeypatch.setenv("WARPWELL_TURNS", str(tmp_path))
    with serve(2, driver=build.build().fake) as made:
        yield made
    turns.end_leases()
    for name in DEVICES:
        kill_arbiter(Board.of(name))


@pytest.fixture
def manual(monkeypatch: pytest.MonkeyPatch) -> None:
    """No arbiter starts: the test writes the gates."""
    monkeypatch.setattr(Board, "ensure_arbiter", lambda board: None)


class Program(Conversation):
    """A process of `tests.harness.driver.gated`, or of random programs."""

    def __init__(self, server: Servers, share: str, *arguments: str, module: str = "gated") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"tests.harness.driver.{module}", *arguments],
            env={**server.environ(), "WARPWELL_SHARE": share},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def end(self) -> str:
        return self.process.communicate(timeout=HANG_SECONDS)[0].strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start(server: Servers) -> Iterator[Start]:
    made = Start(server)
    yield made
    for program in made.started:
        program.kill()


class Start:
    """Starts programs that end with the test."""

    def __init__(self, server: Servers) -> None:
        self.server, self.started = server, []

    def __call__(self, share: str, kind: str, microseconds: int = 100) -> Program:
        self.started.append(Program(self.server, share, kind, str(microseconds)))
        assert self.started[-1].line() == "ready"
        return self.started[-1]

    def random(self, share: str, seeds: range) -> Program:
        text = f"{seeds.start}:{seeds.stop}"
        program = Program(self.server, share, "--devices", "2", "--seeds", text, module="programs")
        self.started.append(program)
        return program


def slots(board: Board) -> list[int]:
    return [index for index, _ in board.used_slots()]


def only_slot(board: Board) -> int:
    until(lambda: len(slots(board)) == 1)
    return slots(board)[0]


def kill_arbiter(board: Board, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to the arbiter of a board if it has one."""
    owner = board.arbiter
    if owner is not None and owner != os.getpid():
        try:
            os.kill(owner, number)
        except ProcessLookupError:
            pass


class Background:
    """Repeats a function in a thread until the block ends."""

    def __init__(self, function: object, seconds: float) -> None:
        self._function, self._seconds, self._over = function, seconds, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.wait(random.random() * self._seconds):
            self._function()  # type: ignore[operator]

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()


class Pauses:
    """Measures in a thread the time without a beat of a board's arbiter, after which programs count gates as open."""

    def __init__(self, board: Board) -> None:
        self._board, self._over, self._lock = board, threading.Event(), threading.Lock()
        self.restart()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.wait(1e-3):
            self._poll()

    def _poll(self) -> None:
        with self._lock:
            now = time.monotonic()
            self._longest = max(self._longest, now - self._since)
            if self._board.beats != self._beats:
                # An upper bound: the beat changed after the previous poll.
                self._beats, self._since = self._board.beats, self._polled
            self._polled = now

    def restart(self) -> None:
        with self._lock:
            self._beats, self._longest = self._board.beats, 0.0
            self._since = self._polled = time.monotonic()

    @property
    def may_have_opened_gates(self) -> bool:
        self._poll()  # the thread may have had no processor
        return self._longest > FAIL_OPEN_SECONDS / 2

    def __enter__(self) -> Pauses:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 100), marks=pytest.mark.slow)], ids=str)
def test_random_programs_are_right_under_random_gates(start: Start, manual: None, seeds: range) -> None:
    rng, boards = random.Random(7), [Board.of(name) for name in DEVICES]

    def change() -> None:
        for board in boards:
            board.beat(2)
            for index in slots(board):
                board.set_gate(index, rng.random() < 0.5)
                board.fields[board.slot(index) + Board.BUDGET_NS] = rng.choice((0, 1, 100_000))

    with Background(change, 3e-3):
        assert start.random("0:random", seeds).end() == f"{len(seeds)} programs are right"


def test_random_programs_are_right_while_arbiters_are_killed(start: Start) -> None:
    rng, boards = random.Random(7), [Board.of(name) for name in DEVICES]

    def disturb() -> None:
        board = rng.choice(boards)
        kill_arbiter(board, rng.choice((signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT)))
        board.ensure_arbiter()

    programs = [start.random(f"{k}:t{k}", range(6 * k, 6 * k + 6)) for k in range(2)]
    with Background(disturb, 0.4):
        assert [program.end() for program in programs] == ["6 programs are right"] * 2


def test_random_programs_are_right_beside_a_hostile_client_of_the_board(start: Start) -> None:
    rng, boards = random.Random(7), [Board.of(name) for name in DEVICES]

    def write() -> None:
        for board in boards:
            for _ in range(8):
                at = rng.randrange(8, len(board.fields))  # all fields but the format
                board.fields[at] = rng.choice((0, 1, 3, (1 << 64) - 1, rng.getrandbits(64)))
            for index in range(4):
                at = board.slot(index)
                board.fields[at + rng.randrange(32)] = rng.choice((0, 1, 3, rng.getrandbits(64)))

    programs = [start.random(f"{k}:t{k}", range(4 * k, 4 * k + 4)) for k in range(2)]
    with Background(write, 2e-3):
        assert [program.end() for program in programs] == ["4 programs are right"] * 2


def test_calls_wait_at_a_closed_gate_while_an_arbiter_is_alive(start: Start, manual: None) -> None:
    board = Board.of(DEVICES[0])
    program = start("0:one", "each")
    index = only_slot(board)
    at = board.slot(index)
    issued, held = at + Board.ISSUED, at + Board.HELD

    def waits() -> bool:
        """Return True after an attempt in which the beats did not pause."""
        board.set_gate(index, False)
        pauses.restart()
        program.post()
        until(lambda: board.fields[held] != 0 or pauses.may_have_opened_gates)
        before = board.fields[issued], board.fields[held]
        time.sleep(0.4)
        after = board.fields[issued], board.fields[held]
        has_paused = pauses.may_have_opened_gates
        board.set_gate(index, True)
        seconds = float(program.line())
        if not has_paused:
            assert after[0] == before[0] and after[1] not in (0, before[1]) and seconds >= 0.4
        return not has_paused

    with Background(lambda: board.beat(1), 10e-3), Pauses(board) as pauses:
        until(waits)
    until(lambda: board.fields[at + Board.ISSUED] == board.fields[at + Board.DONE])
    assert board.fields[at + Board.HELD] == 0


def test_the_first_call_of_a_program_waits_for_programs_before_it(start: Start, manual: None) -> None:
    board = Board.of(DEVICES[0])

    def waits() -> bool:
        """Return True after an attempt in which the beats did not pause."""
        until(lambda: not slots(board))
        board.beat(1)
        pauses.restart()
        program = start("0:one", "each")
        at = board.slot(only_slot(board))
        program.post()
        until(lambda: board.fields[at + Board.HELD] or pauses.may_have_opened_gates)
        is_held, done = board.fields[at + Board.HELD] != 0, board.fields[at + Board.DONE]
        has_paused = pauses.may_have_opened_gates
        assert has_paused or (is_held and done == 0)
        board.set_gate(only_slot(board), True)
        assert float(program.line()) < HANG_SECONDS
        program.kill()
        return not has_paused

    with Background(lambda: board.beat(1), 10e-3), Pauses(board) as pauses:
        until(waits)


def test_calls_are_not_counted_while_no_other_program_wants_the_device(start: Start, manual: None) -> None:
    board = Board.of(DEVICES[0])
    program = start("0:one", "loop", 10)
    at = board.slot(only_slot(board))
    until(lambda: board.fields[at + Board.ISSUED] == UNCOUNTED)
    bell, done = board.bell, board.fields[at + Board.DONE]
    until(lambda: board.fields[at + Board.DONE] > done + 1000)
    assert board.bell == bell
    assert board.fields[at + Board.EXPECTED_NS] == board.fields[at + Board.LONGEST_NS] == 0
    program.post()
    launches = int(program.end())
    assert board.fields[at + Board.DONE] >= launches


def test_calls_before_a_second_program_came_are_waited_for(start: Start, manual: None) -> None:
    board = Board.of(DEVICES[0])
    program = start("0:one", "each", 500_000)
    index = only_slot(board)
    at = board.slot(index)

    def is_on_device() -> bool:
        return board.fields[at + Board.ISSUED] != board.fields[at + Board.DONE]

    def is_waited_for() -> bool:
        """Return True after an attempt in which the gate was closed during the call."""
        began = time.monotonic()
        program.post()
        until(lambda: is_on_device() or select.select([program.process.stdout], [], [], 0)[0])
        board.set_gate(index, False)
        was_on_device = is_on_device()
        until(lambda: not is_on_device())
        seconds = time.monotonic() - began
        board.set_gate(index, True)
        assert float(program.line()) >= 0.5
        assert not was_on_device or seconds >= 0.5
        return was_on_device

    with Background(lambda: board.beat(2), 10e-3):
        until(is_waited_for)


def test_a_program_stops_at_its_closed_gate_although_its_calls_were_not_counted(start: Start, manual: None) -> None:
    board = Board.of(DEVICES[0])
    program = start("0:one", "loop", 10)
    index = only_slot(board)
    at = board.slot(index)

    def stops() -> bool:
        """Return True after an attempt in which the beats did not pause."""
        until(lambda: board.fields[at + Board.ISSUED] == UNCOUNTED)
        pauses.restart()
        board.set_gate(index, False)
        until(lambda: board.fields[at + Board.ISSUED] == board.fields[at + Board.DONE])
        done = board.fields[at + Board.DONE]
        time.sleep(20e-3)
        # Not while the program tries to enter the gate.
        until(lambda: board.fields[at + Board.ISSUED] == board.fields[at + Board.DONE])
        stopped, has_paused = board.fields[at + Board.DONE] == done, pauses.may_have_opened_gates
        board.set_gate(index, True)
        assert stopped or has_paused
        return not has_paused

    with Background(lambda: board.beat(2), 10e-3), Pauses(board) as pauses:
        for _ in range(20):
            until(stops)
    program.post()
    assert int(program.end()) > 0


def test_an_idle_program_has_nothing_on_the_device(start: Start, manual: None) -> None:
    board = Board.of(DEVICES[0])
    program = start("0:one", "each")
    at = board.slot(only_slot(board))
    program.post()
    assert float(program.line()) < HANG_SECONDS
    until(lambda: 0 < board.fields[at + Board.ISSUED] == board.fields[at + Board.DONE])


def test_calls_wait_for_a_bounded_time_without_an_arbiter(start: Start, manual: None) -> None:
    board = Board.of(DEVICES[0])
    program = start("0:one", "each")
    board.set_gate(only_slot(board), False)
    program.post()
    assert 0.1 <= float(program.line()) < HANG_SECONDS
    times = []
    for _ in range(5):
        program.post()
        times.append(float(program.line()))
    assert min(times) < 0.1  # only the first launch waits


def test_a_program_whose_slot_was_taken_waits_for_nothing(start: Start, manual: None) -> None:
    board = Board.of(DEVICES[0])
    program = start("0:one", "each")
    index = only_slot(board)
    board.set_gate(index, False)
    board.fields[board.slot(index) + Board.SERIAL] += 2
    with Background(lambda: board.beat(1), 10e-3):
        program.post()
        assert float(program.line()) < HANG_SECONDS


def test_a_program_without_share_has_no_slot(server: Servers, start: Start) -> None:
    program = start("", "each")
    program.post()
    program.line()
    assert not slots(Board.of(DEVICES[0]))


@pytest.mark.parametrize("share", ["0:one", ""])
def test_the_library_of_a_program_shows_whether_it_orders_calls(server: Servers, share: str) -> None:
    text = "from warpwell.libcuda import device_name, orders_calls; print(device_name(None), orders_calls())"
    environ = {**server.environ(), "WARPWELL_SHARE": share}
    assert (
        subprocess.check_output([sys.executable, "-c", text], env=environ, text=True) == f"{DEVICES[0]} {bool(share)}\n"
    )


def test_two_programs_progress_and_are_listed(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    programs = [start("0:first", "loop"), start("2:second", "each", 300)]

    def are_listed() -> bool:
        programs[1].post()
        assert float(programs[1].line()) < HANG_SECONDS
        return {row["tenant"] for row in program_status() if row["launches"]} == {"first", "second"}

    until(are_listed)
    assert main(["share", "status", "--json"]) == 0
    rows = {row["tenant"]: row for row in json.loads(capsys.readouterr().out)["programs"]}
    assert rows["second"]["priority"] == 2
    assert rows["first"]["process"] == programs[0].process.pid
    programs[0].post()
    assert int(programs[0].end()) > 0


def test_a_lease_and_a_program_have_the_device_one_at_a_time(start: Start) -> None:
    board = Board.of(DEVICES[0])
    program = start("0:program", "loop", 300)
    done = board.slot(only_slot(board)) + Board.DONE

    def waits() -> bool:
        """Return True after an attempt in which the beats did not pause."""
        until(lambda: state_of("program") == "running")
        pauses.restart()
        with ww.turn("lease", device=DEVICES[0], timeout=HANG_SECONDS):
            before = board.fields[done]
            time.sleep(0.03)
            has_changed, has_paused = board.fields[done] != before, pauses.may_have_opened_gates
        assert has_paused or not has_changed
        return not has_paused

    with Pauses(board) as pauses:
        for _ in range(6):
            until(waits)
    program.post()
    assert int(program.end()) > 0


def state_of(tenant: str) -> str:
    return next((row["state"] for row in program_status() if row["tenant"] == tenant), "")


def test_an_arbiter_is_the_only_one_of_its_board(start: Start) -> None:
    start("0:one", "each")
    board = Board.of(DEVICES[0])
    until(lambda: board.arbiter is not None)
    assert main(["share", "arbiter", str(board.path)]) == 0  # returns at once


@pytest.mark.parametrize("target", ["tenant", "process"])
def test_end_ends_programs(start: Start, target: str) -> None:
    program, second = start("0:first", "each"), start("0:second", "each")
    name = "first" if target == "tenant" else str(program.process.pid)
    assert end_programs(name) == [program.process.pid]
    until(lambda: [row["tenant"] for row in program_status()] == ["second"])
    with pytest.raises(ArgumentError, match="tenants are second"):
        end_programs(name)
    second.post()
    assert second.line()


def test_a_killed_program_frees_its_slot_and_its_place(start: Start) -> None:
    first, second = start("1:first", "loop", 1000), start("0:second", "each")
    board = Board.of(DEVICES[0])
    first.process.send_signal(signal.SIGKILL)
    second.post()
    assert float(second.line()) < HANG_SECONDS
    until(lambda: len(slots(board)) == 1)


@pytest.mark.timing
@pytest.mark.parametrize("fate", ["killed", "stopped", "spinning"])
def test_a_program_that_fails_delays_others_by_a_bounded_time(server: Servers, start: Start, fate: str) -> None:
    first = start("0:first", "loop", 30_000_000 if fate == "spinning" else 500)
    second = start("0:second", "each", 100)
    until(lambda: any(row["tenant"] == "first" and row["state"] == "running" for row in program_status()))
    worker = next(row["worker"] for row in server.programs() if row["pid"] == first.process.pid)
    if fate != "spinning":
        os.kill(worker, signal.SIGKILL if fate == "killed" else signal.SIGSTOP)
    times = []
    for _ in range(10):
        second.post()
        times.append(float(second.line()))
    if fate == "stopped":
        os.kill(worker, signal.SIGCONT)
    assert sorted(times)[-2] < 0.1, times
