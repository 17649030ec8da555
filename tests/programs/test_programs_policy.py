"""The arbiter on a virtual clock: shares, priorities, slices, drains and stuck programs, with simulated programs."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.harness.until import HANG_SECONDS

from warpwell._os import clock
from warpwell.cli.main import main
from warpwell.driver import Board
from warpwell.driver.board import SLOTS
from warpwell.errors import SchedulerError
from warpwell.programs import Arbiter, set_limits
from warpwell.programs.arbiter import CONTENDED_LOG_SECONDS, LOG_EVENTS, LOG_SECONDS
from warpwell.programs.executor import DRAIN_SECONDS, MAX_DRAIN_SECONDS, START_SECONDS
from warpwell.programs.lease import Lease
from warpwell.programs.policy import AGING_SECONDS, TIME_SLICE_SECONDS
from warpwell.scheduler.extend import Event, Log

TICK = 0.2e-3


@dataclass(eq=False)
class Client:
    """A simulated program: it holds calls at its gate, and its calls take `call_seconds` on the device."""

    board: Board
    index: int
    call_seconds: float = 0.2e-3
    has_calls: Callable[[float], bool] = lambda now: True
    is_frozen: bool = False
    ends: float | None = None
    used: float = 0.0
    first_use: float | None = None

    def word(self, name: int) -> int:
        return self.board.fields[self.board.slot(self.index) + name]

    def put(self, name: int, value: int) -> None:
        self.board.fields[self.board.slot(self.index) + name] = value

    def step(self, now: float, number: int) -> None:
        if self.ends is not None and now >= self.ends:
            self.ends, self.used = None, self.used + self.call_seconds
            self.put(Board.DONE, self.word(Board.ISSUED))
            if self.word(Board.GATE) != 1:
                self.board.ring()
        if self.is_frozen or not self.has_calls(now) or self.ends is not None:
            return
        if self.word(Board.GATE) != 1:
            if not self.word(Board.HELD):
                self.board.ring()
            self.put(Board.HELD, 2 * number + 1)
            return
        self.put(Board.HELD, 0)
        self.put(Board.ISSUED, self.word(Board.ISSUED) + 1)
        self.ends = now + self.call_seconds
        self.first_use = now if self.first_use is None else self.first_use


class World:
    """A board, its arbiter and simulated programs on a virtual clock."""

    def __init__(self, path: Path) -> None:
        self.now, self.numbers = 0.0, itertools.count(1)
        self.board = Board(path / "gpu.board")
        self.arbiter = Arbiter(self.board, now=lambda: self.now)
        self.clients: list[Client] = []
        self.bell, self.due = -1, 0.0

    def add(self, tenant: str, priority: int = 0, kind: int = Board.WORKER, **options: object) -> Client:
        slot = self.board.take_slot(kind, len(self.clients) + 1, priority, tenant)
        assert slot is not None
        self.clients.append(Client(self.board, slot[0], **options))  # type: ignore[arg-type]
        return self.clients[-1]

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            if self.board.bell != self.bell or self.now >= self.due:
                self.bell = self.board.bell
                self.due = self.now + self.arbiter.step()
            for client in self.clients:
                client.step(self.now, next(self.numbers))
            self.now += TICK

    def on_device(self) -> int:
        return sum(client.ends is not None for client in self.clients)

    def rules(self, kind: str) -> list[str]:
        return [event.why["rule"] for event in self.arbiter.core.log if event.kind == kind]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("WARPWELL_TURNS", str(tmp_path))
    return World(tmp_path)


@pytest.mark.parametrize("weights", [(3, 1), (1, 1), (1, 2, 5)])
def test_shares_follow_the_weights(world: World, weights: tuple[int, ...]) -> None:
    set_limits({f"t{k}": {"weight": float(weight)} for k, weight in enumerate(weights)})
    for k in range(len(weights)):
        world.add(f"t{k}", call_seconds=(k + 1) * TICK)
    world.run(3.0)
    total = sum(client.used for client in world.clients)
    for client, weight in zip(world.clients, weights, strict=True):
        bound = 2 * TIME_SLICE_SECONDS / total  # a tolerance of two slices, if these are more than 5 %
        assert client.used / total == pytest.approx(weight / sum(weights), rel=0.05, abs=bound)


def test_programs_of_one_tenant_share_its_time(world: World) -> None:
    short, long = (world.add("default", call_seconds=seconds) for seconds in (2e-3, 60e-3))
    world.run(1.0)
    late = world.add("default")
    before = short.used, long.used
    world.run(3.0)
    used = [short.used - before[0], long.used - before[1], late.used]
    assert min(used) > 0.75 * max(used)


def test_weights_that_change_reach_running_programs(world: World) -> None:
    first, second = world.add("a"), world.add("b")
    world.run(1.0)
    set_limits({"a": {"weight": 4.0}})
    before = first.used, second.used
    world.run(2.0)
    assert (first.used - before[0]) / (second.used - before[1]) == pytest.approx(4, rel=0.1)


def test_one_program_at_a_time_has_the_device(world: World) -> None:
    for k in range(4):
        world.add(f"t{k % 2}", priority=k % 3, call_seconds=0.5e-3)
    overlaps = 0
    for _ in range(1500):
        world.run(TICK)
        overlaps += world.on_device() > 1
    assert overlaps <= 1  # the first programs attach with open gates


def test_a_higher_priority_comes_at_the_end_of_the_call_that_runs(world: World) -> None:
    world.add("training", call_seconds=2e-3)
    world.run(0.1)
    urgent = world.add("inference", priority=1)
    began = world.now
    world.run(0.05)
    assert urgent.first_use is not None
    assert urgent.first_use - began <= 2e-3 + 4 * TICK
    assert "priority" in world.rules("preempt")
    assert set(world.rules("hold")) == {"fair share"}  # the levels differ, so no time slice holds the training


def test_an_equal_waits_for_the_end_of_the_time_slice(world: World) -> None:
    world.add("first")
    world.run(TICK * 3)
    second = world.add("second")
    world.run(0.9 * TIME_SLICE_SECONDS)
    assert second.first_use is None
    world.run(0.3 * TIME_SLICE_SECONDS)
    assert second.first_use is not None


def test_a_low_priority_is_not_starved(world: World) -> None:
    world.add("urgent", priority=3)
    low = world.add("low")
    world.run(3 * AGING_SECONDS)
    assert low.first_use is None
    world.run(2 * AGING_SECONDS)
    assert low.used > 0.5 * TIME_SLICE_SECONDS


def test_the_ceiling_of_a_tenant_bounds_its_priorities(world: World) -> None:
    set_limits({"greedy": {"ceiling": 0}})
    world.add("other", call_seconds=0.4e-3)
    world.add("greedy", priority=1 << 40, call_seconds=0.4e-3)
    world.run(2.0)
    assert world.clients[0].used == pytest.approx(world.clients[1].used, rel=0.05)


def test_invalid_settings_of_tenants_are_ignored(world: World) -> None:
    settings = {"first": {"unknown": 1}, "second": {"weight": "x"}, "third": {"weight": -1}}
    (world.board.path.parent / "limits.json").write_text(json.dumps(settings))
    for tenant in settings:
        world.add(tenant)
    world.run(0.5)
    assert all(client.used for client in world.clients)


def test_status_shows_limits_and_the_level_that_decides(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def status() -> tuple[dict[str, Any], dict[str, int]]:
        assert main(["share", "status", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        return found["limits"], {row["tenant"]: row["level"] for row in found["programs"]}

    monkeypatch.setattr(Board, "of", lambda name: world.board)  # which has the locks of the slots
    world.add("high", priority=9)
    waiting = world.add("low", priority=-2)
    waiting.put(Board.STATE, Board.WAITING)
    now = clock.monotonic_ns()
    monkeypatch.setattr(clock, "monotonic_ns", lambda: now)
    waiting.put(Board.SINCE_NS, now - int(3.5 * AGING_SECONDS * 1e9))
    assert status() == ({}, {"high": 8, "low": 1})
    limits = {"high": {"ceiling": 1}, "low": {"priority": -1, "weight": 2.0}}
    set_limits(limits)
    assert status() == (limits, {"high": 1, "low": 0})
    assert main(["share", "status"]) == 0
    shown = capsys.readouterr().out
    assert "ceiling" in shown and all(cell in shown for cell in ("high", "9", "idle", "0.000"))


def test_status_without_programs_names_the_command_that_starts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WARPWELL_TURNS", str(tmp_path))
    assert main(["share", "status"]) == 0
    assert capsys.readouterr().out == "No program shares a GPU: start one with `warpwell share PROGRAM`.\n"


def test_a_limit_of_an_unknown_tenant_is_set_with_a_note(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    exited = world.add("training")
    world.add("serving")
    world.board.release_slot(exited.index)
    for tenant in ("trainnig", "training", "serving"):
        assert main(["share", "limit", tenant, "--weight", "2", "--json"]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out)[tenant] == {"weight": 2.0}
        assert err == ("" if tenant != "trainnig" else NOTE)


NOTE = "no known program has tenant 'trainnig'; known tenants: serving, training\n"


def put_limits(path: Path, shape: str) -> None:
    """Write a file of limits that cannot be used."""
    good = json.dumps({"first": {"weight": 2}})
    path.unlink(missing_ok=True)
    if shape == "FIFO":
        os.mkfifo(path)
    elif shape == "link":
        path.with_suffix(".other").write_text(good)
        path.symlink_to(path.with_suffix(".other"))
    elif shape == "folder":
        path.mkdir()
    elif shape == "earlier version":
        path.write_text(json.dumps({"hold": 5.0, "ceiling": 3, "tenants": {"first": {"priority": 1}}}))
    elif shape == "long":
        path.write_text(good + " " * (1 << 20))
    else:
        path.write_text(good if shape == "another user" else shape)
    if shape == "another user":
        os.chown(path, 12345, -1)


@pytest.mark.parametrize("shape", ["FIFO", "link", "folder", "earlier version", "long", "another user", "{", "[]", ""])
def test_limits_that_cannot_be_used_are_refused_in_time(
    world: World, shape: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if shape == "another user" and os.geteuid():
        pytest.skip("only root can write a file of another user")
    path = world.board.path.parent / "limits.json"
    set_limits({"first": {"weight": 3}})
    world.add("first")
    world.run(0.6)
    put_limits(path, shape)
    thread = threading.Thread(target=world.run, args=(0.6,), daemon=True)
    thread.start()
    thread.join(HANG_SECONDS)
    assert not thread.is_alive() and world.arbiter.core.tenants["first"].tenant.weight == 1
    with pytest.raises(SchedulerError, match=r"limits\.json"):
        set_limits({"first": {"weight": 3}})
    assert main(["share", "status"]) == 0
    assert "limits are ignored" in capsys.readouterr().err


def test_idle_time_earns_no_credit(world: World) -> None:
    world.add("busy")
    newcomer = world.add("newcomer", has_calls=lambda now: now > 3.0)
    world.run(3.0)
    busy = world.clients[0].used
    world.run(1.0)
    assert newcomer.used == pytest.approx(world.clients[0].used - busy, rel=0.15)


def test_an_idle_program_keeps_its_gate_open_until_another_one_comes(world: World) -> None:
    first = world.add("first", has_calls=lambda now: now < 0.01 or 0.05 < now < 0.06)
    world.run(0.1)
    assert first.word(Board.GATE) == 1 and first.word(Board.BUDGET_NS) == 0
    world.add("second", has_calls=lambda now: now > 0.15)
    world.run(0.2)
    assert first.word(Board.GATE) == 0


def test_work_is_bounded_only_while_another_program_is_active(world: World) -> None:
    first = world.add("first")
    second = world.add("second", has_calls=lambda now: now < 0.1)
    world.run(0.1)
    assert first.word(Board.BUDGET_NS) == second.word(Board.BUDGET_NS) > 0
    world.run(2.0)
    assert first.word(Board.BUDGET_NS) == 0


def test_a_program_that_does_not_drain_shares_the_device(world: World) -> None:
    spinning = world.add("spinning", call_seconds=1e9)
    world.run(0.1)
    second = world.add("other")
    began = world.now
    world.run(0.2)
    assert second.first_use is not None
    assert second.first_use - began < TIME_SLICE_SECONDS + DRAIN_SECONDS + 0.01
    used = second.used
    world.run(1.0)
    assert second.used - used > 0.95  # the policy does not wait for these calls a second time
    assert spinning.ends is not None


def test_a_frozen_program_costs_one_slice_and_returns(world: World) -> None:
    frozen = world.add("frozen", call_seconds=0.1e-3)
    second = world.add("other")
    world.run(0.1)
    frozen.is_frozen = True
    used = second.used
    world.run(1.0)
    assert second.used - used > 1.0 - 0.1 - START_SECONDS
    frozen.is_frozen = False
    used = frozen.used
    world.run(0.5)
    assert frozen.used - used > 0.1


@pytest.mark.parametrize("is_late", [False, True])
def test_work_that_the_gpu_let_pass_before_its_program_knew_is_waited_for(world: World, is_late: bool) -> None:
    world.add("busy", has_calls=lambda now: now < 0.05)
    slow = world.add("slow", kind=Board.STREAMS)
    world.run(0.02)
    assert slow.word(Board.HELD) and slow.word(Board.GATE) == 0
    slow.is_frozen = True  # the GPU passes the gate, and no thread of the program finds out
    while slow.word(Board.GATE) == 0:
        world.run(TICK)
    urgent = world.add("urgent", priority=1)
    world.run(START_SECONDS / 2)
    assert slow.word(Board.GATE) == 0 and urgent.first_use is None
    if is_late:
        world.run(START_SECONDS)
        assert urgent.first_use is not None
        return
    slow.put(Board.HELD, 0)
    slow.put(Board.ISSUED, slow.word(Board.ISSUED) + 1)
    world.run(START_SECONDS)
    assert urgent.first_use is None
    slow.put(Board.HELD, 1)
    slow.put(Board.DONE, slow.word(Board.ISSUED))
    world.board.ring()
    world.run(5 * TICK)
    assert urgent.first_use is not None


def test_a_lease_inside_behind_a_closed_gate_is_waited_for(world: World) -> None:
    """An arbiter that was killed closed its gate, or it entered without one."""
    inside = world.add("inside", kind=Board.TURN, has_calls=lambda now: False)
    inside.put(Board.ISSUED, 1)
    waiting = world.add("waiting", kind=Board.TURN)
    world.run(0.2)
    assert waiting.first_use is None
    assert (inside.word(Board.STATE), waiting.word(Board.STATE)) == (Board.LEAVING, Board.WAITING)
    inside.put(Board.DONE, 1)
    world.run(0.05)
    assert waiting.first_use is not None
    assert inside.word(Board.STATE) == Board.IDLE


def test_a_claim_of_a_lease_that_does_not_come_first_is_undone(world: World) -> None:
    running = world.add("running", kind=Board.TURN)
    world.run(0.01)
    assert world.board.running == running.index
    running.put(Board.SUCCESSOR, 3)
    world.board.set_gate(running.index, False)
    world.run(2 * TICK)
    world.board.ring()
    world.run(2 * TICK)
    assert (running.word(Board.GATE), running.word(Board.SUCCESSOR)) == (1, 0)


def test_the_next_owner_of_a_successors_slot_does_not_follow(world: World) -> None:
    """The arbiter has not seen it yet, and opens the gate of another program."""
    running = world.add("running", kind=Board.TURN, call_seconds=0.05)
    world.run(0.01)
    named = world.add("named", priority=1, kind=Board.TURN)
    world.run(0.001)
    assert running.word(Board.SUCCESSOR) and running.word(Board.GATE) == 0
    running.ends = None
    running.put(Board.DONE, running.word(Board.ISSUED))
    world.board.release_slot(named.index)
    lease = Lease(world.board)
    assert lease._index == named.index
    assert not lease._is_next


def test_a_lease_that_has_entered_as_successor_is_waited_for(world: World) -> None:
    running = world.add("running", kind=Board.TURN)
    world.run(0.01)
    first = world.add("first", priority=1, kind=Board.TURN)
    first.is_frozen = True
    world.run(TICK)
    world.board.set_gate(running.index, False)  # the waiting lease claims the gate
    running.ends = None
    running.put(Board.DONE, running.word(Board.ISSUED))
    first.put(Board.ISSUED, 1)
    urgent = world.add("urgent", priority=2)
    world.run(0.3)
    assert urgent.first_use is None and running.ends is None
    first.put(Board.DONE, 1)
    world.run(0.01)
    assert urgent.first_use is not None


def test_the_successor_is_the_waiting_lease_that_comes_first(world: World) -> None:
    running = world.add("running", kind=Board.TURN, call_seconds=0.02)
    world.run(0.001)
    leases = [world.add(f"p{n}", priority=n, kind=Board.TURN) for n in (1, 2)]
    world.run(0.005)
    assert running.word(Board.SUCCESSOR) % SLOTS == leases[1].index
    world.add("p3", priority=3)  # is not a lease: the arbiter opens its gate
    world.run(0.005)
    assert running.ends is not None and running.word(Board.SUCCESSOR) == 0


def test_a_lease_that_entered_without_an_arbiter_is_first(world: World) -> None:
    """It waited at a pause, too, when the arbiter read its words."""
    inside = world.add("inside", kind=Board.TURN, has_calls=lambda now: False)
    inside.put(Board.ISSUED, 1)
    inside.put(Board.HELD, 1)
    waiting = world.add("waiting", priority=1, kind=Board.TURN)
    waiting.put(Board.HELD, 1)
    world.run(0.2)
    assert [event.name for event in world.arbiter.core.log if event.kind == "launch"] == ["inside-1"]
    assert (inside.word(Board.STATE), waiting.word(Board.STATE)) == (Board.LEAVING, Board.WAITING)
    inside.put(Board.HELD, 0)
    inside.put(Board.DONE, 1)
    world.run(0.05)
    assert waiting.first_use is not None


def test_a_lease_that_exceeds_its_hold_time_shares_the_device(world: World) -> None:
    set_limits({"inside": {"hold": 0.3}})
    inside = world.add("inside", kind=Board.TURN, call_seconds=1e9)
    world.run(0.1)
    waiting = world.add("waiting", kind=Board.TURN)
    world.run(0.2)
    assert waiting.first_use is None
    world.run(0.2)
    assert waiting.first_use is not None and inside.word(Board.STATE) == Board.OVERDUE
    inside.ends = world.now
    world.run(0.2)
    assert inside.word(Board.STATE) != Board.OVERDUE


def test_a_late_mark_of_an_overdue_turn_does_not_count_for_the_next_one(world: World) -> None:
    """The arbiter was stopped before it wrote the mark."""
    inside = world.add("inside", kind=Board.TURN, has_calls=lambda now: False)
    inside.put(Board.ISSUED, 1)
    world.run(0.01)
    program = next(iter(world.arbiter.programs.values()))
    other = Lease(world.board)
    assert other._is_device_used(only_leases=True)
    program.mark_undrained()
    assert not other._is_device_used(only_leases=True)
    inside.put(Board.DONE, 1)
    inside.put(Board.ISSUED, 2)
    program.mark_undrained()
    assert other._is_device_used(only_leases=True)


def test_a_hold_time_counts_whatever_the_priorities(world: World) -> None:
    set_limits({"inside": {"hold": 0.3}})
    world.add("inside", priority=8, kind=Board.TURN, call_seconds=1e9)
    world.run(0.1)
    waiting = world.add("waiting", priority=-8, kind=Board.TURN)
    world.run(0.7)
    assert waiting.first_use is not None
    assert "hold time" in world.rules("preempt")


def test_a_lease_that_waits_no_more_takes_no_time_of_others(world: World) -> None:
    world.add("inside", kind=Board.TURN)
    world.run(0.01)
    waiting = world.add("waiting", kind=Board.TURN, has_calls=lambda now: now < 0.015)
    world.run(0.01)
    waiting.put(Board.HELD, 0)
    world.run(0.1)
    assert not world.rules("preempt") and waiting.word(Board.STATE) == Board.IDLE


def test_the_gate_of_a_slots_next_owner_is_its_own(world: World) -> None:
    first = world.add("first", kind=Board.TURN)
    second = world.add("second", kind=Board.TURN)
    world.run(0.01)
    assert first.word(Board.GATE) == 1
    world.board.fill_slot(first.index, Board.TURN, 1, 0, "next")
    first.ends = None
    overlaps = 0
    for _ in range(500):
        world.run(TICK)
        overlaps += world.on_device() > 1
    assert not overlaps and first.used and second.used


@pytest.mark.parametrize("seed", range(4))
def test_random_words_stop_no_other_program(world: World, seed: int) -> None:
    """A client writes anything into its slot, and into the fields of the arbiter and of the other slots."""
    import random

    rng = random.Random(seed)
    honest = world.add("honest", call_seconds=0.4e-3)
    hostile = world.add("hostile", priority=0)
    values = (0, 1, 2, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)

    def vandalize(now: float) -> bool:
        base = world.board.slot(hostile.index)
        for _ in range(3):
            word = rng.choice([w for w in range(32) if w != Board.SERIAL])
            world.board.fields[base + word] = rng.choice((*values, rng.getrandbits(64)))
        if rng.random() < 0.1:
            world.board.fields[world.board.slot(honest.index) + Board.GATE] = rng.choice(values)
            world.board.fields[world.board.slot(rng.randrange(2, 128)) + Board.SERIAL] = rng.getrandbits(64)
        return False

    hostile.has_calls = vandalize
    world.run(0.5)
    used = honest.used
    world.run(2.5)
    cycle = 2 * TIME_SLICE_SECONDS + MAX_DRAIN_SECONDS  # the longest possible cycle, as if the program had long calls
    assert honest.used - used > 0.9 * TIME_SLICE_SECONDS * int(2.5 / cycle)


def test_the_log_is_written_while_programs_compete(world: World) -> None:
    path = world.board.path.with_suffix(".log")
    world.add("a", kind=Board.WORKER)
    world.add("b", kind=Board.WORKER)
    world.run(0.1)
    world.arbiter._write_log()
    first = path.read_text()
    world.run(0.1)
    assert world.arbiter.core.first_waiting is not None
    world.now += LOG_SECONDS
    world.arbiter._write_log()
    assert path.read_text() == first
    world.now += CONTENDED_LOG_SECONDS
    world.arbiter._write_log()
    assert len(path.read_text()) > len(first)


def test_the_file_of_the_log_has_the_latest_events(world: World, tmp_path: Path) -> None:
    log = world.arbiter.core.log
    for number in range(3 * LOG_EVENTS):
        log.add(Event(0.1 * number, "arrive", number, "program"))
    with (tmp_path / "log").open("w") as file:
        log.write(file)
    found = Log.load(tmp_path / "log")
    assert found.events == log.events and len(found) >= LOG_EVENTS
    assert found.about["dropped"] + len(found) == 3 * LOG_EVENTS


@pytest.mark.parametrize("priority", [-(1 << 62), 1 << 62])
def test_any_priority_of_a_tenant_can_be_written(world: World, priority: int) -> None:
    (world.board.path.parent / "limits.json").write_text(json.dumps({"far": {"priority": priority}}))
    world.run(0.01)
    far = world.add("far", kind=Board.TURN)
    world.run(0.01)
    assert far.used > 0


def test_a_claim_compares_levels_with_the_priorities_of_tenants(world: World) -> None:
    (world.board.path.parent / "limits.json").write_text(json.dumps({"raised": {"priority": 5}}))
    world.run(0.01)
    raised = world.add("raised", kind=Board.TURN)
    world.run(0.1)
    assert raised.word(Board.LEVEL) == raised.word(Board.BASE) == Board.LEVEL_ZERO + 5
