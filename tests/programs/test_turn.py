"""Leases between processes and threads, without a GPU: order, deaths, stops, forks, Ctrl-C, limits."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.harness import turns
from tests.harness.turns import HOLDS, OTHER_PROGRAM, WAITER, Gpu, rows, state, waiting
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from warpwell import errors, libcuda
from warpwell.cli.main import main
from warpwell.driver import Board
from warpwell.programs import end_programs, gpu_work, lease, set_limits
from warpwell.programs.executor import LEASE_START_SECONDS

LONG = HANG_SECONDS


@pytest.fixture
def no_arbiter(monkeypatch: pytest.MonkeyPatch) -> None:
    """No arbiter starts."""
    monkeypatch.setattr(Board, "ensure_arbiter", lambda board: None)


folder, device, name, start = turns.folder, turns.device, turns.name, turns.start


def free(name: str) -> None:
    """Take a turn: no program has the lease, or it becomes free."""
    with ww.turn("check", device=name, timeout=LONG):
        pass


def until_gate_is_closed(name: str) -> None:
    """Wait until the arbiter has closed this thread's gate, so that a pause hands over: the arbiter may be slow."""
    own_lease = lease._lease_of(name)
    until(lambda: not own_lease._is_open)


def spans_of(programs: list[Any]) -> list[tuple[int, ...]]:
    """Return the spans that programs print, in order; they do not overlap."""
    spans = sorted(tuple(map(int, pair.split(":"))) for program in programs for pair in program.line().split())
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    return spans


def test_turns_are_one_after_the_other_in_threads_and_processes(start: Any, name: str, tmp_path: Path) -> None:
    code = """
def work(n):
    for _ in range(30):
        with ww.turn(f"t{n}", device=D, timeout=30) as turn:
            a = time.monotonic_ns(); time.sleep(0.0005); b = time.monotonic_ns()
            spans.append((a, b))
            turn.pause()
            a = time.monotonic_ns(); time.sleep(0.0005); b = time.monotonic_ns()
            spans.append((a, b))
spans = []
threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
[t.start() for t in threads]; [t.join() for t in threads]
say(*(f"{a}:{b}" for a, b in spans))
"""
    programs = [start(code) for _ in range(3)]
    assert len(spans_of(programs)) == 3 * 2 * 60


def test_a_holder_between_two_turns_hands_over(start: Any, name: str) -> None:
    holder = start.holder()
    holder.post()
    assert holder.line() == "out"
    free(name)
    until(lambda: state(name, "holder") == "idle")


def test_a_killed_holder_frees_the_lease_at_once(start: Any, name: str) -> None:
    set_limits({"holder": {"hold": 3600.0}})
    holder, waiter = start.holder(), start.waiter()
    holder.send(signal.SIGKILL)
    assert waiter.line() == "inside"
    waiter.post()
    until(lambda: "holder" not in rows(name))


def test_a_killed_waiter_is_forgotten(start: Any, name: str) -> None:
    with ww.turn("here", device=name):
        waiter = start.waiter(priority=5)
        waiter.send(signal.SIGKILL)
        waiter.process.wait(LONG)
    free(name)


def test_a_stopped_holder_loses_the_lease_and_waits_again_afterwards(start: Any, name: str) -> None:
    set_limits({"holder": {"hold": 0.3}})
    holder = start.holder("with ww.turn('holder', device=D):\n    say('again')\n")
    holder.send(signal.SIGSTOP)
    with ww.turn("here", device=name, timeout=LONG):
        until(lambda: (state(name, "here"), state(name, "holder")) == ("running", "overdue"))
        holder.send(signal.SIGCONT)
        holder.post()
        assert holder.line() == "out"
        holder.post()
        until(lambda: waiting(name, "holder"))
    assert holder.line() == "again"


def test_a_stopped_waiter_lets_others_pass(start: Any, name: str) -> None:
    with ww.turn("here", device=name):
        start.waiter(priority=5).send(signal.SIGSTOP)
        second = start.waiter("second")
    assert second.line() == "inside"


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
    assert time.monotonic() - began < 20 * LEASE_START_SECONDS
    waiter.send(signal.SIGCONT)
    assert waiter.line() == "inside"


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
    assert waiter.line() == "begins"
    until(lambda: waiting(name))
    time.sleep(0.002 * times)
    waiter.send(signal.SIGINT)
    assert waiter.line() == "interrupted"
    until(lambda: waiting(name))
    holder.post()
    assert waiter.line() == "inside"
    free(name)


@pytest.mark.parametrize("meets", [False, True])
def test_an_interrupt_at_any_point_leaves_no_lease_behind(start: Any, name: str, meets: bool) -> None:
    set_limits({"here": {"hold": 3600.0}})
    other = start(OTHER_PROGRAM.format(priority=meets))
    with ww.turn("here", device=name):
        own_lease = lease._lease_of(name)

    posts: list[int] = []

    def one_turn() -> None:
        with ww.turn("here", device=name) as turn:
            if meets:
                posts.append(1)
                other.post()
                until(lambda: waiting(name, "other"))
            turn.pause()

    for where in turns.interruptions(one_turn):
        assert own_lease.depth == 0 and not own_lease.inside, where
        other.post()
        for _ in [*posts, 1]:
            assert other.line() == "done", where
        posts.clear()


def test_an_interrupt_in_a_turn_ends_it(name: str) -> None:
    with contextlib.suppress(KeyboardInterrupt), ww.turn("here", device=name):
        raise KeyboardInterrupt
    until(lambda: state(name, "here") == "idle")


def test_the_highest_priority_is_next_and_then_who_used_least(start: Any, name: str) -> None:
    with ww.turn("here", device=name):
        low, high = start.waiter("low", -100), start.waiter("high", 3)  # aging raises priorities
    assert high.line() == "inside"
    until(lambda: waiting(name, "low"))
    high.post()
    assert low.line() == "inside"
    low.post()
    until(lambda: not waiting(name, "low"))


def test_a_pause_lets_a_higher_priority_in_and_no_lower_one(start: Any, name: str) -> None:
    with ww.turn("here", device=name, timeout=LONG) as turn:
        start.waiter("lower", -100)  # aging raises its priority
        turn.pause()
        until(lambda: waiting(name, "lower"))
        higher = start.waiter("higher", 1)
        until_gate_is_closed(name)
        threading.Timer(0.1, higher.post).start()
        turn.pause()
        assert higher.line() == "inside"
        until(lambda: state(name, "here") == "running")


def test_a_holder_that_does_not_come_back_hands_over_whatever_its_priority(start: Any, name: str) -> None:
    with ww.turn("here", device=name, priority=8):
        waiter = start.waiter(priority=-8)
    assert waiter.line() == "inside"


def test_threads_of_one_process_wait_for_each_other(name: str) -> None:
    order: list[int] = []

    def take_turn() -> None:
        with ww.turn("other", device=name, timeout=LONG):
            order.append(2)

    with ww.turn("here", device=name):
        thread = threading.Thread(target=take_turn)
        thread.start()
        until(lambda: waiting(name, "other"))
        order.append(1)
    thread.join(LONG)
    assert order == [1, 2]
    free(name)


def test_a_thread_that_ends_frees_its_slot_and_the_lease(name: str, start: Any) -> None:
    def take_turn() -> None:
        with ww.turn("other", device=name):
            pass

    for _ in range(3):
        thread = threading.Thread(target=take_turn)
        thread.start()
        thread.join(LONG)
        until(lambda: "other" not in rows(name))
    waiter = start(WAITER.format(priority=0))
    assert [waiter.line(), waiter.line()] == ["begins", "inside"]


def test_a_turn_within_a_turn_is_a_part_of_it(name: str, start: Any) -> None:
    turn = ww.turn("here", device=name)
    with turn:
        with turn, ww.turn("inner", device=name):
            waiter = start.waiter(priority=5)
        until(lambda: waiting(name))
    assert waiter.line() == "inside"


def test_a_turn_that_does_not_come_in_time(start: Any, name: str) -> None:
    holder = start.holder()
    with pytest.raises(errors.TurnTimeoutError, match="share status") as raised, ww.turn(device=name, timeout=0.05):
        raise AssertionError
    assert raised.value.device == name and isinstance(raised.value, TimeoutError)
    until(lambda: not waiting(name, "default"))
    holder.post()
    free(name)


def test_a_forked_child_has_no_part_in_the_turn_of_its_parent(start: Any, name: str) -> None:
    code = """
with ww.turn("parent", device=D) as turn:
    child = os.fork()
    if child == 0:
        turn.pause()
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
        sys.stdin.readline()  # until the test closes it
        os._exit(0)
    say("forked")
    sys.stdin.readline()
"""
    program = start(code)
    assert program.line() == "child has ended"
    assert state(name, "parent") in ("running", "leaving")
    program.post()
    assert [program.line(), program.line()] == ["out", "forked"]
    program.send(signal.SIGKILL)  # its child survives, and does not hold the lease
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
    assert program.line() == "child has ended"
    until(lambda: state(name, "parent") == "running")
    program.post()
    assert program.line() == "out"
    until(lambda: state(name, "parent") == "idle")


@pytest.mark.timing
def test_time_is_shared_whatever_the_length_of_turns(start: Any, name: str) -> None:
    code = """
end = time.monotonic() + 6.0
say("ready")
while time.monotonic() < end:
    with ww.turn({tenant!r}, device=D, timeout=30):
        time.sleep({seconds})
sys.stdin.readline()
"""
    programs = [start(code.format(tenant=t, seconds=s)) for t, s in (("short", 0.002), ("long", 0.03))]
    for program in programs:
        assert program.line() == "ready"
    until(lambda: all(rows(name).get(t, {}).get("used", 0) > 0.5 for t in ("short", "long")))
    used = {t: rows(name)[t]["used"] for t in ("short", "long")}
    assert 0.5 < used["short"] / used["long"] < 2.0


def test_garbage_in_the_words_stops_no_turn(name: str) -> None:
    board, rng = Board.of(name), random.Random(7)
    for word in range(1, len(board.fields)):
        board.fields[word] = rng.choice((1, (1 << 64) - 1, rng.getrandbits(64)))
    for _ in range(20):
        with ww.turn("here", device=name, timeout=LONG) as turn:
            turn.pause()
            board.fields[board.slot(lease._lease_of(name)._index) + rng.randrange(8, 16)] = rng.getrandbits(64)
    assert "here" in rows(name)


@pytest.mark.parametrize("target", ["tenant", "number"])
def test_end_ends_a_tenant(start: Any, name: str, target: str) -> None:
    stubborn = start("signal.signal(signal.SIGTERM, lambda *_: say('asked'))\n" + HOLDS)
    assert stubborn.line() == "inside"
    number = stubborn.process.pid
    assert end_programs("holder" if target == "tenant" else str(number), 2.0) == [number]
    assert stubborn.line() == "asked"
    assert stubborn.process.wait(LONG) == -signal.SIGKILL
    with pytest.raises(errors.ArgumentError, match="no program does"):
        end_programs("holder")


def test_commands(start: Any, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(*command: str) -> Any:
        assert main(["share", *command, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    start.holder()
    waiter = start.waiter(priority=2)
    found = {row["tenant"]: row for row in answer("status")["programs"]}
    assert found["waiter"]["process"] == waiter.process.pid and found["waiter"]["priority"] == 2
    assert answer("limit", "holder", "--hold", "0.2")["holder"] == {"hold": 0.2}
    assert waiter.line() == "inside"  # the holder has lost the lease
    until(lambda: state(name, "holder") == "overdue")
    assert answer("end", "waiter", "--grace", "100")["processes"] == [waiter.process.pid]
    assert waiter.process.wait(LONG) == -signal.SIGTERM
    for wrong in (0, -1, float("nan"), "x"):
        with pytest.raises(errors.ArgumentError, match="hold of tenant 'here'"):
            set_limits({"here": {"hold": wrong}})


def test_a_folder_without_room_or_rights_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(errors.SchedulerError, match=r"No space left.*KiB.*WARPWELL_TURNS"), ww.turn("a", device=device):
        pass
    (tmp_path / "file").touch()
    monkeypatch.setenv("WARPWELL_TURNS", str(tmp_path / "file"))
    with pytest.raises(errors.SchedulerError, match="File exists"), ww.turn("a", device=device):
        pass


def test_the_folder_is_named_by_its_whole_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WARPWELL_TURNS", "turns")
    with (
        pytest.raises(errors.SchedulerError, match="WARPWELL_TURNS must be an absolute path, got 'turns'"),
        ww.turn("a", device=device),
    ):
        pass
    assert not any(tmp_path.iterdir())


def test_the_file_is_for_the_group_of_a_shared_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, no_arbiter: None
) -> None:
    changes = []

    def fchown(_: int, user: int, group: int) -> None:
        changes.append((user, group))
        raise OSError(errno.EINVAL, "a container does not know this group")

    monkeypatch.setattr(os, "fchown", fchown)
    for mode in (0o700, 0o770):
        folder = tmp_path / oct(mode)
        folder.mkdir()
        folder.chmod(mode)
        monkeypatch.setenv("WARPWELL_TURNS", str(folder))
        free(f"{device}-{mode}")
        (made,) = folder.iterdir()
        assert made.stat().st_mode & 0o777 == mode & 0o660
    assert changes == [(-1, tmp_path.stat().st_gid)]


def test_the_folder_must_be_its_users(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, no_arbiter: None
) -> None:
    monkeypatch.delenv("WARPWELL_TURNS")
    monkeypatch.setattr(os.path, "isdir", lambda _: False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    own_folder = tmp_path / f"warpwell-{os.getuid()}"
    free(device)
    assert own_folder.stat().st_mode & 0o777 == 0o700
    own_folder.chmod(0o770)
    with pytest.raises(errors.SchedulerError, match="chmod 700"):
        free(f"{device}-other")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tenant": ""}, "tenant must be .* got ''"),
        ({"tenant": "x" * 64}, "tenant must be"),
        ({"tenant": 3}, "tenant must be .* got 3"),
        ({"priority": 0.5}, "priority is 0.5"),
        ({"timeout": -1}, "timeout is -1"),
        ({"stream": "left"}, "stream must be .* got 'left'"),
        ({"device": "../x"}, "device must be"),
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
    code = "import sys, warpwell as ww\nfrom warpwell.driver import Board\nBoard.ensure_arbiter = lambda board: None\n"
    code += "with ww.turn(device='none'): pass\n"
    code += "from warpwell.programs import run_arbiter\n"  # the shorter its start, the sooner turns have an order
    code += "assert not {'numpy', 'numba', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_SECONDS)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    for module in (gpu_work, libcuda):
        monkeypatch.setattr(module, "driver", lambda: made)
    return made


def test_one_turn_is_queued_behind_the_one_that_runs(gpu: Gpu, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_work, "RUN_AHEAD_SECONDS", 0.0)
    for _ in range(4):
        with ww.turn("here", device=name):
            gpu.calls.append("work")
    marks = [f"record {k} in 0" for k in range(1, 5)]
    assert gpu.calls == ["work", marks[0], "work", marks[1], "wait 1", "work", marks[2], "wait 2", "work", marks[3]]


def test_short_parts_are_queued_for_as_long_as_a_long_one(gpu: Gpu, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(lease, "MARK_SECONDS", 0.0)
    monkeypatch.setattr(gpu_work, "clock", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(gpu_work, "RUN_AHEAD_SECONDS", 2e-3)
    with ww.turn("here", device=name) as turn:
        for step in (0.45e-3, 2.5e-3, 1e-6):
            gpu.calls.clear()
            for _ in range(100):
                now[0] += step
                turn.pause()
            marks = [call for call in gpu.calls if call.startswith("record")]
            ahead = {0.45e-3: 4, 2.5e-3: 1, 1e-6: 31}[step]
            assert gpu.calls[-1] == marks[-1 - ahead].replace("record", "wait").replace(" in 0", "")


def test_the_gpu_is_drained_before_the_lease_is_handed_over(gpu: Gpu, name: str, start: Any) -> None:
    with ww.turn("here", device=name) as turn:
        waiter = start.waiter(priority=1)
        until_gate_is_closed(name)
        threading.Timer(0.2, waiter.post).start()
        turn.pause()
        assert "synchronize" in gpu.calls
        assert waiter.line() == "inside"


def test_a_turn_that_begins_while_its_keeper_drains_keeps_the_lease(
    gpu: Gpu, name: str, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ww.turn("here", device=name, priority=8):
        pass
    own_lease = lease._lease_of(name)
    draining, resume = threading.Event(), threading.Event()

    def drain() -> None:
        if not draining.is_set():
            draining.set()
            resume.wait(LONG)

    monkeypatch.setattr(own_lease.work, "drain", drain)
    waiter = start(WAITER.format(priority=-8))
    assert waiter.line() == "begins"
    assert draining.wait(LONG)
    with ww.turn("here", device=name, priority=8):
        resume.set()
        time.sleep(0.2)
        assert own_lease.inside and own_lease._is_in_flight
        until(lambda: waiting(name))
    assert waiter.line() == "inside"
    waiter.post()


def test_pauses_that_follow_each_other_closely_are_one(gpu: Gpu, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "MARK_SECONDS", 30.0)
    with ww.turn("here", device=name) as turn:
        for _ in range(5):
            turn.pause()
        assert not gpu.calls
        monkeypatch.setattr(lease, "MARK_SECONDS", 0.0)
        turn.pause()
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
    stream = Torch()
    where, turn = weakref.ref(stream), ww.turn("here", device=name, stream=[stream])
    del stream
    assert where() is not None and turn is not None  # a turn keeps a reference to its streams
    work = lease._lease_of(name).work
    gpu.calls.clear()
    gpu.context = 0  # as in another thread, which has no current context
    work.drain()
    assert gpu.calls == ["context 77", "wait 1", "wait 2", "wait 3", "wait 4", "context None"]


def test_a_tensor_is_no_stream(name: str) -> None:
    class Tensor:
        def __bool__(self) -> bool:
            raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")

    with pytest.raises(errors.ArgumentError, match="must be a stream of PyTorch"):
        ww.turn("here", device=name, stream=Tensor())


def test_another_context_has_events_of_its_own(gpu: Gpu, name: str) -> None:
    for context in (77, 78):
        gpu.context = context
        with ww.turn("here", device=name):
            pass
    assert gpu.calls == ["record 1 in 0", "destroy 1", "record 2 in 0"]


# -- the arbiter -------------------------------------------------------------------------------------------------------


def test_a_lone_program_waits_for_no_arbiter(device: str, no_arbiter: None) -> None:
    for _ in range(3):
        with ww.turn("here", device=device, timeout=0) as turn:
            turn.pause()


def test_without_an_arbiter_turns_do_not_overlap(device: str, no_arbiter: None) -> None:
    spans = []

    def work() -> None:
        for _ in range(20):
            with ww.turn("here", device=device, timeout=LONG):
                began = time.monotonic_ns()
                time.sleep(1e-3)
                spans.append((began, time.monotonic_ns()))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert len(spans) == 60 and all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(spans)))


def test_an_arbiter_that_cannot_start_is_reported(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "START_SECONDS", 0.2)
    monkeypatch.setattr(sys, "executable", "/opt/application")
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            free(device)
        except errors.SchedulerError as error:
            raised.append(error)

    with ww.turn("here", device=device):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(LONG)
    assert "'/opt/application', not Python); `python -m warpwell share arbiter" in str(raised[0])
    free(device)


@pytest.mark.parametrize("seed", range(2))
def test_turns_do_not_overlap_while_arbiters_are_killed_and_stopped(start: Any, device: str, seed: int) -> None:
    code = """
end = time.monotonic() + 4.0
spans = []
def work(n):
    while time.monotonic() < end or len(spans) <= 20:
        with ww.turn(f"t{n}", device=D, priority=n, timeout=60) as turn:
            for _ in range(3):
                a = time.monotonic_ns(); time.sleep(0.001); spans.append((a, time.monotonic_ns()))
                turn.pause()
threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
[t.start() for t in threads]; [t.join() for t in threads]
say(*(f"{a}:{b}" for a, b in spans))
"""
    programs, rng, board = [start(code) for _ in range(2)], random.Random(seed), Board.of(device)
    until(lambda: board.arbiter is not None)
    spans: list[tuple[int, ...]] = []
    reader, stopped = threading.Thread(target=lambda: spans.extend(spans_of(programs))), 0
    reader.start()
    while reader.is_alive():  # until the end of the last turn
        time.sleep(rng.random() * 0.5)
        arbiter = board.arbiter
        if arbiter:
            number = rng.choice((signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT, signal.SIGCONT))
            with contextlib.suppress(ProcessLookupError):
                os.kill(arbiter, number)
            stopped = arbiter if number == signal.SIGSTOP else 0
    if stopped:
        os.kill(stopped, signal.SIGCONT)
    assert len(spans) > 40
    if board.arbiter:
        os.kill(board.arbiter, signal.SIGKILL)


def test_the_arbiter_of_this_process_frees_no_slot_of_its_threads(start: Any, device: str) -> None:
    board = Board.of(device)
    slot = board.take_slot(Board.TURN, os.getpid(), 0, "here")
    assert slot is not None
    index, serial = slot
    board.free_slot(index, serial - 2)  # as an arbiter that saw the slot before its reuse: no effect
    board.free_slot(index, serial)
    other = start("from warpwell.driver import Board\nsay(Board.of(D).owner(0), *Board.of(D).used_slots())")
    assert other.line() == f"{os.getpid()} {(index, serial)}"
    board.release_slot(index)


def test_threads_take_slots_of_their_own(device: str) -> None:
    board, wrong = Board.of(device), []

    def work() -> None:
        for _ in range(50):
            slot = board.take_slot(Board.TURN, os.getpid(), 0, threading.current_thread().name)
            assert slot is not None
            if board.tenant(slot[0]) != threading.current_thread().name or not board.is_alive(slot[0]):
                wrong.append(slot)
            board.release_slot(slot[0])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert not wrong and not list(board.used_slots())


def test_a_program_that_warpwell_share_runs_takes_no_lease(
    gpu: Gpu, device: str, no_arbiter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Board.of(f"gpu-{device}")
    monkeypatch.setattr(lease, "orders_calls", lambda: False)
    with ww.turn("here", device=board.name):
        assert [board.tenant(index) for index, _ in board.used_slots()] == ["here"]
    monkeypatch.setenv("WARPWELL_SHARE", "0:training")
    monkeypatch.setattr(lease, "orders_calls", lambda: True)
    with ww.turn("other", device=board.name) as turn:
        turn.pause()
        assert [board.tenant(index) for index, _ in board.used_slots()] == ["here"]
    monkeypatch.delenv("WARPWELL_SHARE")  # the variable was set when the library was loaded
    with ww.turn("other", device=board.name):
        assert [board.tenant(index) for index, _ in board.used_slots()] == ["here"]


def test_a_turn_at_a_name_of_a_gpu_needs_no_driver(
    device: str, no_arbiter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libcuda, "driver", lambda: None)
    with ww.turn("here", device=f"gpu-{device}"):
        assert [Board.of(f"gpu-{device}").tenant(index) for index in (0,)] == ["here"]


def test_turns_are_leases_if_the_drivers_library_orders_no_calls(
    gpu: Gpu, device: str, no_arbiter: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    board = Board.of(f"gpu-{device}")
    monkeypatch.setenv("WARPWELL_SHARE", "0:training")
    monkeypatch.setattr(lease, "orders_calls", lambda: False)
    caplog.set_level("WARNING", logger="warpwell")
    lease._report_unordered.cache_clear()
    for _ in range(2):
        with ww.turn("here", device=board.name):
            assert [board.tenant(index) for index, _ in board.used_slots()] == ["here"]
    assert caplog.text.count("only turns are ordered") == 1


def test_turns_beside_a_stopped_arbiter_do_not_overlap(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    board, spans, end = Board.of(device), [], time.monotonic() + 3.0
    long_end = end + LONG
    assert board.become_arbiter()

    def work(name: str) -> None:
        while time.monotonic() < (end if len(spans) > 20 else long_end):
            with ww.turn(name, device=device, timeout=LONG):
                began = time.monotonic_ns()
                time.sleep(5e-3)
                spans.append((began, time.monotonic_ns()))

    threads = [threading.Thread(target=work, args=(f"t{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    gaps = [b[0] - a[1] for a, b in itertools.pairwise(sorted(spans))]
    assert len(spans) > 20 and 0 <= min(gaps) < 1e9 * lease.SILENT_SECONDS  # not each turn waits for silence
    monkeypatch.setattr(lease, "FAIL_OPEN_SECONDS", 0.3)
    with ww.turn("here", device=device):
        thread = threading.Thread(target=free, args=(device,))  # enters, although the turn of this thread has not ended
        thread.start()
        thread.join(LONG)
        assert not thread.is_alive()
    board.resign()


def test_a_lease_between_turns_hands_over_beside_a_stopped_arbiter(gpu: Gpu, device: str) -> None:
    board = Board.of(device)
    arbiter = turns.ArbiterThread(board)
    with ww.turn("here", device=device):
        pass
    arbiter._is_over = True
    board.ring()
    arbiter.join()
    own_lease, entered = lease._lease_of(device), threading.Event()
    assert own_lease._is_open and own_lease._is_in_flight

    def take_turn() -> None:
        with ww.turn("other", device=device, timeout=lease.FAIL_OPEN_SECONDS / 2):
            entered.set()

    thread = threading.Thread(target=take_turn)
    thread.start()
    thread.join(LONG)
    assert entered.is_set()
    arbiter.end()


def test_an_overdue_lease_counts_again_after_its_turn(device: str, no_arbiter: None) -> None:
    free(device)
    own_lease, raised = lease._lease_of(device), []
    own_lease._store(Board.UNDRAINED, 1)  # by an arbiter that was killed

    def wait() -> None:
        with pytest.raises(errors.TurnTimeoutError) as found, ww.turn("other", device=device, timeout=0.1):
            pass
        raised.append(found)

    with ww.turn("check", device=device):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(LONG)
    assert raised


def test_an_interrupt_at_any_point_of_a_turn_within_itself_ends_both(device: str, no_arbiter: None) -> None:
    free(device)
    own_lease = lease._lease_of(device)

    def two_turns() -> None:
        turn = ww.turn("here", device=device)
        with turn, turn:
            pass

    for where in turns.interruptions(two_turns):
        assert own_lease.depth == 0 and not own_lease.inside, where


def test_a_thread_that_ends_leaves_a_slot_that_another_process_has_taken(
    device: str, no_arbiter: None, start: Any
) -> None:
    board, leases, resume = Board.of(device), [], threading.Event()

    def take_turn() -> None:
        free(device)
        leases.append(lease._lease_of(device))
        resume.wait(LONG)

    thread = threading.Thread(target=take_turn)
    thread.start()
    until(lambda: leases)
    index = leases[0]._index
    board.unlock((1 << 40) + index)  # as closing another descriptor of the file releases the lock
    other = start("from warpwell.driver import Board\nsay(*Board.of(D).take_slot(3, 1, 0, 'other'))\nsys.stdin.read()")
    assert other.line().split()[0] == str(index)
    resume.set()
    thread.join(LONG)
    until(lambda: index not in board._own)
    assert (board.tenant(index), board.is_alive(index)) == ("other", True)
    assert index in dict(board.used_slots())


def test_a_turn_that_is_open_in_a_thread_is_refused_in_another_one(device: str, no_arbiter: None) -> None:
    turn, raised = ww.turn("here", device=device, timeout=1), []

    def work() -> None:
        with pytest.raises(errors.ArgumentError, match="open in another thread") as found, turn:
            raise AssertionError
        raised.append(found)

    with turn:
        own_lease = lease._lease_of(device)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(LONG)
        assert own_lease.inside
    assert raised and own_lease.depth == 0


def test_an_interrupt_of_the_first_turn_loses_no_slot(
    device: str, no_arbiter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(threading.Thread, "start", interrupt)
        free(device)
    for _ in range(2):
        free(device)
        assert len(list(Board.of(device).used_slots())) == 1


def test_wakes_of_several_processes_are_all_counted(start: Any, device: str) -> None:
    code = """
from warpwell.driver import Board
board = Board.of(D)
say("ready")
sys.stdin.readline()
for _ in range(20_000):
    board.ring()
say("done")
"""
    board, programs = Board.of(device), [start(code) for _ in range(2)]
    assert [program.line() for program in programs] == ["ready", "ready"]
    before = board.bell
    for program in programs:
        program.post()
    assert [program.line() for program in programs] == ["done", "done"]
    assert board.bell - before == 40_000


def test_a_keeper_that_looks_while_a_turn_ends_does_not_sleep(
    device: str, no_arbiter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn ends between the keeper's look and its wait."""
    monkeypatch.setattr(lease, "LOOK_SECONDS", LONG)
    monkeypatch.setattr(lease, "IDLE_LOOK_SECONDS", LONG)
    free(device)
    own_lease, board = lease._lease_of(device), Board.of(device)
    board.set_gate(own_lease._index, True)
    board.fields[own_lease._at + Board.BUDGET_NS] = 1  # another program was active
    looked, ended, original = threading.Event(), threading.Event(), board.wait_for_slot

    def wait_late(*arguments: Any) -> None:
        looked.set()
        assert ended.wait(LONG)
        original(*arguments)

    with ww.turn("check", device=device):
        monkeypatch.setattr(board, "wait_for_slot", wait_late)
        board.wake_slot(own_lease._index, Board.CLOSED)
        assert looked.wait(LONG)
    assert own_lease._is_in_flight
    ended.set()
    until(lambda: not own_lease._is_in_flight, seconds=10)


def test_a_higher_priority_follows_a_lower_one_without_the_arbiter(start: Any, device: str) -> None:
    board = Board.of(device)
    arbiter = turns.ArbiterThread(board)
    patient = "from warpwell.programs import lease\nlease.SILENT_SECONDS = 1000.0\n"
    high = start(patient + OTHER_PROGRAM.format(priority=True))
    high.post()
    assert high.line() == "done"
    low = start(
        """
sys.stdin.readline()
with ww.turn("low", device=D) as turn:
    say("inside")
    while True:
        time.sleep(1e-3)
        turn.pause()
"""
    )
    low.post()
    assert low.line() == "inside"
    until(lambda: state(device, "low") == "running")
    arbiter._is_over = True
    board.ring()
    arbiter.join()
    beats = board.beats
    high.post()
    assert high.line() == "done"  # for which it would wait 100 s without its succession
    assert board.beats == beats
    board.resign()


def test_a_lease_that_is_killed_after_its_claim_delays_the_running_one_by_a_look(start: Any, name: str) -> None:
    free(name)
    lease._lease_of(name).release()
    code = """
from warpwell.driver import Board
from warpwell.programs import lease
with ww.turn("claims", priority=1, device=D):
    pass
sys.stdin.readline()
def die(self, index, is_open):
    self.fields[self.slot(index) + self.GATE] = is_open
    os.kill(os.getpid(), signal.SIGKILL)
Board.set_gate = die
with ww.turn("claims", priority=1, device=D):
    pass
"""

    def is_short() -> bool:
        until(lambda: "claims" not in rows(name))
        claims = start("say('begins')" + code)
        assert claims.line() == "begins"
        until(lambda: state(name, "claims") == "idle" and rows(name)["claims"]["launches"])
        free(name)
        with ww.turn("here", device=name) as turn:
            until(lambda: Board.of(name).running == lease._lease_of(name)._index)
            claims.post()
            claims.process.wait(LONG)
            began = time.monotonic()
            turn.pause()
        return time.monotonic() - began < 0.5

    assert any(is_short() for _ in range(5))  # the process may have had no processor in an attempt


def test_a_turn_of_a_signal_handler_waits_like_the_turn_that_it_interrupts(start: Any, name: str) -> None:
    holder, events = start.holder(), []

    def handle(number: int, frame: object) -> None:
        try:
            with ww.turn("handler", device=name, timeout=0.1):
                events.append("overlap")
        except errors.TurnTimeoutError:
            events.append("timeout")
        holder.post()

    before = signal.signal(signal.SIGUSR1, handle)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
    try:
        timer.start()
        with ww.turn("here", device=name, timeout=LONG):
            events.append("inside")
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    assert events == ["timeout", "inside"]


@pytest.mark.parametrize("has_arbiter", [False, True])
def test_a_turn_of_a_signal_handler_at_any_point_holds_the_lease(
    device: str, request: pytest.FixtureRequest, has_arbiter: bool
) -> None:
    request.getfixturevalue("name" if has_arbiter else "no_arbiter")
    board, wrong = Board.of(device), []

    def check(where: str) -> None:
        leases = [found for found in lease._leases.found.values() if found.board is board]
        if sum(found.inside and found._is_in_flight for found in leases) != 1:
            wrong.append(where)

    def handle(number: int, frame: Any) -> None:
        with ww.turn("handler", device=device, timeout=LONG):
            check(f"handler at line {frame.f_lineno}")

    def one() -> None:
        with ww.turn("here", device=device, timeout=LONG) as turn:
            check("turn")
            turn.pause()
            check("pause")
        lease._lease_of(device).release()

    one()
    before = signal.signal(signal.SIGINT, handle)
    try:
        for where in turns.interruptions(one, "programs/lease.py", step=2):
            assert not wrong, (where, wrong)
            found = lease._lease_of(device)
            assert (found.depth, found.inside) == (0, False)
    finally:
        signal.signal(signal.SIGINT, before)
    thread = threading.Thread(target=free, args=(device,))
    thread.start()
    thread.join(LONG)
    assert not thread.is_alive()


def test_an_interrupted_turn_of_a_signal_handler_keeps_no_lease(device: str, no_arbiter: None) -> None:
    board = Board.of(device)

    def handle(number: int, frame: object) -> None:
        with ww.turn("handler", device=device):
            raise KeyboardInterrupt

    free(device)
    own_lease, before = lease._lease_of(device), signal.signal(signal.SIGUSR1, handle)
    own_lease.depth = 1  # as if it waited
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
        own_lease.depth = 0
    for index, _ in board.used_slots():
        at = board.slot(index)
        assert board.fields[at + Board.ISSUED] == board.fields[at + Board.DONE]


def test_work_of_a_signal_handler_at_the_end_of_a_turn_is_waited_for(
    gpu: Gpu, device: str, no_arbiter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(device)
    own_lease, mark = lease._lease_of(device), gpu_work.Work.mark

    def mark_and_interrupt(work: gpu_work.Work, streams: tuple[int, ...]) -> None:
        mark(work, streams)
        with ww.turn("handler", device=device):
            pass

    monkeypatch.setattr(gpu_work.Work, "mark", mark_and_interrupt)
    with ww.turn("check", device=device, stream=5):
        gpu.calls.clear()
    assert gpu.calls[-1] == "synchronize" and not own_lease._is_in_flight


def test_a_turn_of_a_parent_that_ends_in_its_child_keeps_the_slots_of_the_child(start: Any, device: str) -> None:
    """To close the mapping of the parent would free them."""
    program = start("""
from warpwell.driver import Board
from warpwell.programs.lease import Lease
Board.ensure_arbiter = lambda board: None
Lease._start_keeper = lambda lease: None
turn = ww.turn("parent", device=D)
turn.__enter__()
child = os.fork()
if child == 0:
    board = Board.of(D)
    slot = board.take_slot(Board.TURN, os.getpid(), 0, "child")
    del turn
    say(slot[0], os.getpid())
sys.stdin.readline()
""")
    index, process = map(int, program.line().split())
    assert Board.of(device).owner(index) == process
    os.kill(process, signal.SIGKILL)


def test_a_child_forked_by_a_signal_handler_of_a_waiting_thread_does_not_enter(start: Any, name: str) -> None:
    with ww.turn("here", device=name):
        program = start("""
signal.signal(signal.SIGUSR1, lambda *_: os.fork())
parent = os.getpid()
try:
    with ww.turn("waiter", device=D, timeout=30):
        say("parent" if os.getpid() == parent else "child")
except ww.errors.SchedulerError:
    say("refused")
""")
        until(lambda: waiting(name, "waiter"))
        program.send(signal.SIGUSR1)
        assert program.line() == "refused"
    assert program.line() == "parent"
