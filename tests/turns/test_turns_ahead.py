"""Turns whose work waits at gates on the GPU: a thread plays a stream of the driver, on the words of the board."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.harness import turns
from tests.harness.turns import OTHER, WAITS, Gpu, rows, waiting
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from warpwell import errors, shared_file
from warpwell.turns import ahead, board, gpu_work, operate, seat

LONG = HANG_SECONDS
folder, name, start = turns.folder, turns.name, turns.start


class Stream(Gpu):
    """A GPU with one stream: kernels, and operations on memory, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.did: queue.Queue[Callable[[], None]] = queue.Queue()
        self.captures = 0
        self.status = 0
        self.ended: list[tuple[float, float]] = []
        self.closed = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self.closed.is_set():
            self.did.get()()

    def cuStreamQuery(self, stream: int) -> int:
        if self.captures:
            self.calls.append("query in a capture")
        return self.status or 600

    def kernel(self, seconds: float) -> None:
        """Launch a kernel; `ended` tells when it ran."""

        def run() -> None:
            began = time.monotonic()
            time.sleep(seconds)
            self.ended.append((began, time.monotonic()))

        self.did.put(run)

    def cuMemHostRegister_v2(self, begin: Any, length: Any, flags: int) -> int:
        return self.status

    def cuMemHostGetDevicePointer_v2(self, where: Any, begin: Any, flags: int) -> int:
        where._obj.value = begin
        return 0

    def cuStreamIsCapturing(self, stream: int, where: Any) -> int:
        where._obj.value = self.captures
        return 0

    def cuStreamBatchMemOp_v2(self, stream: int, count: int, at: int, flags: int) -> int:
        for k in range(count):
            kind, address, value, *_ = (ctypes.c_uint64 * 6).from_address(at + 48 * k)
            self.did.put(functools.partial(self._operate, kind, address, value))
        return self.status

    def _operate(self, kind: int, address: int, value: int) -> None:
        word = ctypes.c_int64.from_address(address)
        if kind == 5:
            word.value = value
            return
        assert kind == 4
        while word.value < value and not self.closed.is_set():
            time.sleep(1e-5)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    made = Stream()
    monkeypatch.setattr(gpu_work, "driver", lambda: made)
    monkeypatch.setattr(ahead, "driver", lambda: made)
    yield made
    made.closed.set()
    made.did.put(lambda: None)


def enqueue(gpu: Stream, its: ww.turns.Turn, seconds: float) -> None:
    gpu.kernel(seconds)
    time.sleep(2 * ahead.CLOSE)
    its.pause()


def mine(name: str) -> ahead.AheadSeat:
    found = seat._seats.found[name, ahead.AheadSeat]
    assert isinstance(found, ahead.AheadSeat)
    return found


def state(name: str) -> int:
    return mine(name).station.board.words[mine(name)._at + board.STATE]


def test_work_goes_on_while_the_host_only_enqueues(gpu: Stream, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "HOST", LONG)
    operate.limit(name, hold=3600.0)
    busy = threading.Event()
    gpu.did.put(lambda: busy.wait(LONG))  # the host does not wait for the kernels
    for _ in range(5):
        with ww.turn("here", device=name, ahead=True) as its:
            gpu.kernel(0.0)
            its.pause()
            gpu.kernel(0.0)
    assert mine(name).depth == 0 and not gpu.ended
    busy.set()
    until(lambda: len(gpu.ended) == 10)
    until(lambda: rows(name)["here"]["state"] == "holds")
    assert rows(name)["here"]["turns"] == 5


class Meeting:
    """A waiter of higher priority that comes into an open turn, beside kernels of 2 ms."""

    def __init__(self, gpu: Stream, name: str, start: Any, its: ww.turns.Turn) -> None:
        self.waiter = start(WAITS.format(priority=1))
        assert self.waiter.hears() == "begins"
        inside = threading.Event()
        threading.Thread(target=lambda: inside.set() if self.waiter.hears() == "inside" else None, daemon=True).start()
        self.parts = 0
        while not inside.is_set():
            enqueue(gpu, its, 2e-3)
            self.parts += 1
        self.gpu, self.done = gpu, len(gpu.ended)
        for _ in range(5):
            enqueue(gpu, its, 1e-3)  # the host goes on
        time.sleep(0.1)
        assert len(gpu.ended) == self.done < self.parts + 5

    def leave(self) -> None:
        self.waiter.tell()
        until(lambda: len(self.gpu.ended) == self.parts + 5)


@pytest.fixture(params=["keeper", "other"])
def hands_over(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By whom the lease changes hands: the keeper, or the other where the keeper does not come to run."""
    monkeypatch.setattr(ahead, "HOST", LONG)
    if request.param == "other":
        go = threading.Event()
        request.addfinalizer(go.set)
        monkeypatch.setattr(ahead.AheadSeat, "_offer", lambda self: go.wait(LONG))
    return str(request.param)


def test_a_keeper_that_is_late_does_not_open_the_gate_of_a_lease_that_is_gone(
    gpu: Stream, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ww.turn("here", device=name, ahead=True):
        gpu.kernel(1e-3)
    its = mine(name)
    words = its.station.board.words
    until(lambda: its.station.seat is its and not its._gate.pending())
    late = threading.Event()

    def nobody(self: board.Board) -> bool:
        """Nobody waits; before the keeper has heard of it somebody comes, and takes the lease away."""
        if threading.current_thread() is its._keeper and not late.is_set():
            words[its._at + board.OPEN] = 0
            words[board.EPOCH] += 1
            late.set()
        return False

    monkeypatch.setattr(board.Board, "anyone", nobody)
    opened = []
    monkeypatch.setattr(ahead._Gate, "open", lambda self, opened_=True: opened.append(opened_ and late.is_set()))
    its.station.board.ring(its.slot)
    assert late.wait(HANG_SECONDS)
    time.sleep(0.05)
    assert not any(opened)


@pytest.mark.parametrize("graph", [False, True])
def test_the_gpu_stands_at_a_gate_while_another_has_the_lease(
    gpu: Stream, name: str, start: Any, hands_over: str, graph: bool
) -> None:
    with ww.turn("here", device=name, ahead=True) as its:
        gpu.captures = graph
        Meeting(gpu, name, start, its).leave()
        gpu.captures = 0
    until(lambda: not mine(name)._gate.pending())
    assert rows(name)["here"]["turns"] == 1


def test_an_equal_waits_for_the_quantum_and_then_comes_in(
    gpu: Stream, name: str, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "HOST", LONG)  # the host must not wait for the other, which waits for it
    waiter = start(WAITS.format(priority=0))
    with ww.turn("here", device=name, ahead=True) as its:
        until(lambda: "waiter" in rows(name) or not enqueue(gpu, its, 1e-3))
        inside = threading.Event()
        threading.Thread(target=lambda: (waiter.hears(), waiter.hears(), inside.set()), daemon=True).start()
        while not inside.is_set():
            enqueue(gpu, its, 1e-3) if mine(name)._gate.gates - mine(name)._gate.passed() < 5 else time.sleep(1e-3)
        waiter.tell()


def test_a_host_is_not_too_far_ahead(gpu: Stream, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "HOST", 0.0)
    with ww.turn("here", device=name, ahead=True) as its:
        for count in range(1, 6):
            enqueue(gpu, its, 0.02)
            assert len(gpu.ended) >= count - 1


def test_a_context_that_failed_holds_up_nobody(gpu: Stream, name: str, start: Any) -> None:
    with pytest.warns(RuntimeWarning, match=f"{name} run ahead no more: .* stream 0x0 .*700") as told:
        with ww.turn("here", device=name, ahead=True) as its:
            gpu.status = 700
            enqueue(gpu, its, 0.0)
            waiter = start(WAITS.format(priority=0))
            assert [waiter.hears(), waiter.hears()] == ["begins", "inside"]
            waiter.tell()
    assert len(told) == 1 and mine(name)._gate.broken


def test_where_the_driver_refuses_a_gate_the_turns_after_are_ordinary_ones(gpu: Stream, name: str, start: Any) -> None:
    gpu.status = 801
    ahead._addresses[board.Board.of(name)] = board.Board.of(name).extent[0]  # it has mapped the words
    with pytest.warns(RuntimeWarning, match="801"), ww.turn("here", device=name, ahead=True):
        pass
    with ww.turn("here", device=name, ahead=True), ww.turn("there", device=name, ahead=True):
        assert type(seat.seat_of(name)) is seat.Seat and seat.seat_of(name).depth == 2
        waiter = start(WAITS.format(priority=1))
        assert waiter.hears() == "begins"
        until(lambda: waiting(name))
    assert waiter.hears() == "inside"
    waiter.tell()


class OwnStream:
    """A stream of a framework; the driver gives its handle to another one when it is no more."""

    handle = 5


def test_a_stream_lives_until_the_next_turn_of_its_thread(gpu: Stream, name: str) -> None:
    kept = []
    for _ in range(2):
        stream = OwnStream()
        with ww.turn("here", device=name, ahead=True, stream=stream):
            gpu.kernel(0.01)
        kept.append(weakref.ref(stream))
        del stream
    assert kept[0]() is None and kept[1]() is not None


def test_an_interrupt_while_a_lease_is_taken_away_leaves_no_lock_behind(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    its, held, call = board.Board.of(name), set(), fcntl.fcntl

    def noting(file: int, what: int, argument: bytes) -> Any:
        kind, _, byte, *_ = shared_file._FLOCK.unpack(argument)
        found = call(file, what, argument)
        if what == fcntl.F_SETLK:
            (held.add if kind == fcntl.F_WRLCK else held.discard)(byte)
        return found

    monkeypatch.setattr(fcntl, "fcntl", noting)
    monkeypatch.setattr(seat, "overstays", lambda *arguments: True)
    one, other = seat.Seat(seat.Station(its)), its.sit()

    def take_away() -> None:
        for state in (board.INSIDE, board.AHEAD):
            its.words[board.HOLDER], its.words[its.at(other) + board.STATE] = other, state
            one._ask(time.monotonic_ns(), 0) if state == board.INSIDE else one._overtake(other)
            assert its.words[board.HOLDER] == 0

    for where in turns.interruptions(take_away):
        assert board.SEIZE not in held, where


def test_threads_of_one_process_take_a_lease_away_one_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    its = board.Board.of(name)
    one, two, other = seat.Seat(seat.Station(its)), seat.Seat(seat.Station(its)), its.sit()
    met: list[int] = []

    def overstays(its: board.Board, since: int, now: int, least: float) -> bool:
        """Ask in another thread as soon as this one has the lock: a process gets its own locks again."""
        if least == 0.0 and not met:
            met.append(its.words[board.EPOCH])
            asks = threading.Thread(target=two._ask, args=(now, since))
            asks.start()
            asks.join(HANG_SECONDS)
            met.append(its.words[board.EPOCH])
        return True

    monkeypatch.setattr(seat, "overstays", overstays)
    its.words[board.HOLDER], its.words[its.at(other) + board.STATE] = other, board.INSIDE
    one._ask(time.monotonic_ns(), 0)
    assert met[0] == met[1] == its.words[board.EPOCH] - 1 and its.words[board.HOLDER] == 0


def test_gates_open_when_the_program_ends(gpu: Stream, name: str, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "HOLD", 0.2)
    monkeypatch.setattr(ahead, "HOST", LONG)
    with ww.turn("here", device=name, ahead=True) as its:
        met = Meeting(gpu, name, start, its)
    mine(name).finish()
    until(lambda: len(gpu.ended) == met.parts + 5)  # though the other is inside
    met.waiter.tell()
    until(lambda: mine(name).station.seat is mine(name) and not mine(name).inside)
    assert state(name) == board.IDLE  # so nobody shuts it again


def test_a_gate_that_was_shut_after_its_program_gave_up_is_opened(
    gpu: Stream, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    offers = threading.Event()  # the keeper does not come to run
    monkeypatch.setattr(ahead.AheadSeat, "_offer", lambda self: offers.set() or threading.Event().wait(LONG))
    with ww.turn("here", device=name, ahead=True):
        until(lambda: state(name) == board.AHEAD)
        other, its = seat.Seat(mine(name).station), mine(name).station.board
        its.flag(other.slot, True)
        its.ring(mine(name).slot)
        assert offers.wait(HANG_SECONDS)
        mine(name)._gate.fail()
        assert not its.shut(mine(name).slot, its.words[board.EPOCH], 0.0)  # it had seen AHEAD before
        mine(name)._gate.enqueue(0)
        gpu.kernel(0.0)
        until(lambda: its.stands(mine(name).slot))
        other._overtake(mine(name).slot)
        until(lambda: len(gpu.ended) == 1)
        its.flag(other.slot, False)


def test_work_that_never_goes_on_takes_the_lease_once(
    gpu: Stream, name: str, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = threading.Event()
    with ww.turn("here", device=name, ahead=True):
        gpu.did.put(stuck.wait)  # a kernel of a context that has failed: the host does not ask
    until(lambda: state(name) == board.AHEAD)
    operate.limit(name, hold=0.5)
    other = start(OTHER.format(priority=0))
    other.tell()
    assert other.hears() == "done"
    operate.limit(name, hold=3600.0)
    for _ in range(5):
        time.sleep(0.05)  # the keeper could take it
        other.tell()
        assert other.hears() == "done"
    stuck.set()
    until(lambda: not mine(name)._gate.pending())
    with ww.turn("here", device=name, ahead=True):
        gpu.kernel(0.0)
    until(lambda: len(gpu.ended) == 1 and rows(name)["here"]["state"] == "holds")


def test_another_kind_of_turn_does_not_wait_for_a_context_that_failed(gpu: Stream, name: str) -> None:
    stuck = threading.Event()
    with ww.turn("here", device=name, ahead=True):
        gpu.did.put(stuck.wait)
    gpu.status = 700
    gpu.cuCtxSynchronize = lambda: 700  # type: ignore[method-assign]
    done = threading.Event()
    threading.Thread(target=lambda: (done.wait(HANG_SECONDS) or stuck.set(), None), daemon=True).start()
    with ww.turn("here", device=name):
        done.set()
        assert not stuck.is_set()
    stuck.set()


def test_turns_in_another_stream_begin_when_those_before_have_ended(
    gpu: Stream, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = Stream()
    monkeypatch.setattr(
        gpu,
        "cuStreamBatchMemOp_v2",
        lambda stream, *rest: Stream.cuStreamBatchMemOp_v2(second if stream == 2 else gpu, stream, *rest),
    )
    with ww.turn("here", device=name, ahead=True, stream=1):
        gpu.kernel(0.1)
    with ww.turn("here", device=name, ahead=True, stream=2):
        second.kernel(0.0)
    until(lambda: second.did.empty() and len(gpu.ended) == 1)
    until(lambda: not mine(name)._gate.pending())
    second.closed.set()
    second.did.put(lambda: None)


def test_a_capture_is_not_asked_for_its_stream(gpu: Stream, name: str) -> None:
    with ww.turn("here", device=name, ahead=True):
        gpu.captures = 1
        assert not mine(name)._gate.dead(0)
        gpu.captures = 0
    assert "query in a capture" not in gpu.calls


def test_a_thread_that_ends_gives_its_slot_back_once_the_gpu_is_done(gpu: Stream, name: str) -> None:
    kept = []

    def work() -> None:
        with ww.turn("here", device=name, ahead=True) as its:
            kept.append(its)
            gpu.kernel(0.3)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not gpu.ended and "here" in rows(name)
    until(lambda: "here" not in rows(name))
    assert gpu.ended
    (its,) = [one for one in ahead._gated if one.station.board.name == name]
    until(lambda: not its._keeper.is_alive())
    words, opened = its.station.board.words, its._at + board.OPEN
    words[opened] = 0  # of whoever has the slot now
    its.finish()  # the end of the program
    assert words[opened] == 0


def test_where_the_gpu_cannot_wait_the_host_does_and_it_is_told_once(gpu: Stream, name: str, tmp_path: Path) -> None:
    gpu.status = 801
    with pytest.warns(RuntimeWarning, match=f"{tmp_path}.*801.*WARPWELL_TURNS") as told:
        for _ in range(2):
            with ww.turn("here", device=name, ahead=True), ww.turn("here", device=name):
                assert seat.seat_of(name).depth == 2
                assert type(seat.seat_of(name)) is seat.Seat
    assert len(told) == 1 and told[0].filename == __file__


def test_a_turn_in_one_that_is_ahead_is_part_of_it(gpu: Stream, name: str) -> None:
    with ww.turn("here", device=name, ahead=True), ww.turn("there", device=name):
        assert mine(name).depth == 2
    assert rows(name)["here"]["turns"] == 1


@pytest.mark.parametrize("options", [{"timeout": 1.0}, {"stream": [1, 2]}])
def test_what_makes_no_sense_together_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(errors.ArgumentError, match="ahead"):
        ww.turn("here", ahead=True, **options)


def test_no_turn_begins_in_a_capture(gpu: Stream, name: str) -> None:
    gpu.captures = 1
    with pytest.raises(errors.ArgumentError, match="captured"), ww.turn("here", device=name, ahead=True):
        pass
    gpu.captures = 0
    assert mine(name).depth == 0


def test_a_thread_may_take_both_kinds_of_turns(gpu: Stream, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize() -> int:  # of the context: whatever stands at a gate, too
        until(lambda: gpu.did.empty() and not mine(name)._gate.pending(), LONG)
        return 0

    operate.limit(name, hold=3600.0)
    with ww.turn("here", device=name):
        pass
    monkeypatch.setattr(gpu, "cuCtxSynchronize", synchronize, raising=False)
    for _ in range(3):
        with ww.turn("here", device=name, ahead=True):
            gpu.kernel(0.01)
        with ww.turn("here", device=name):  # has its work behind that of the other turn
            done = len(gpu.ended)
    assert done == 3


def test_an_interrupt_at_any_point_leaves_no_gate_shut(
    gpu: Stream, name: str, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "CLOSE", 0.0)
    operate.limit(name, hold=3600.0)
    other = start(OTHER.format(priority=0))

    def one_turn() -> None:
        with ww.turn("here", device=name, ahead=True) as its:
            gpu.kernel(0.0)
            its.pause()
            gpu.kernel(0.0)

    one_turn()
    for where in turns.interruptions(one_turn):
        assert mine(name).depth == 0, where
        other.tell()
        assert other.hears() == "done", where
    until(lambda: not mine(name)._gate.pending())
