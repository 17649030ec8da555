"""Litmus tests: results that the weak memory of the interp target must and must not show."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from lab.campaigns.models.adversary import native_handle
from warpwell.targets.interp.interpreter import Interpreter, current, i64, launch
from warpwell.targets.interp.threads import InterpStallError
from warpwell.targets.primitives import (
    activemask,
    any_sync,
    ballot,
    ffs,
    lane_id,
    match_any,
    popc,
    shfl,
    syncwarp,
    warp_size,
)

SYSTEM = 2
SEEDS = 400


def allocate_words(count: int) -> tuple[np.ndarray, list[int]]:
    memory = np.zeros(count, np.int64)
    base = memory.ctypes.data
    return memory, [base + 8 * k for k in range(count)]


def outcomes(build: Callable[[Interpreter, list[int], dict], None], count: int = 4, seeds: int = SEEDS) -> set:
    """Results that `build`'s threads left in a dict, over many seeds."""
    found = set()
    for seed in range(seeds):
        _memory, address = allocate_words(count)
        run = Interpreter(seed, max_steps=100_000)
        result: dict = {}
        build(run, address, result)
        run.run()
        found.add(tuple(result[key] for key in sorted(result)))
    return found


def message_passing(store: str, load: str, fences: bool) -> set:
    def build(run: Interpreter, at: list[int], result: dict) -> None:
        data, flag = at[0], at[1]

        def writer() -> None:
            run.store_relaxed(data, 7, SYSTEM)
            if fences:
                run.fence(SYSTEM)
            getattr(run, store)(flag, 1, SYSTEM)

        def reader() -> None:
            result["a flag"] = getattr(run, load)(flag, SYSTEM)
            if fences:
                run.fence(SYSTEM)
            result["b data"] = run.load_relaxed(data, SYSTEM)

        run.spawn(writer)
        run.spawn(reader)

    return outcomes(build)


@pytest.mark.parametrize(
    ("store", "load"),
    [
        ("store_relaxed", "load_relaxed"),
        ("store_release", "load_relaxed"),
        ("store_relaxed", "load_acquire"),
    ],
)
def test_message_passing_without_a_pair_is_weak(store: str, load: str) -> None:
    assert message_passing(store, load, False) == {(0, 0), (0, 7), (1, 7), (1, 0)}


@pytest.mark.parametrize(
    ("store", "load", "fences"),
    [("store_release", "load_acquire", False), ("store_relaxed", "load_relaxed", True)],
)
def test_message_passing_with_a_pair(store: str, load: str, fences: bool) -> None:
    assert message_passing(store, load, fences) == {(0, 0), (0, 7), (1, 7)}


def test_a_release_store_does_not_order_later_stores() -> None:
    def build(run: Interpreter, at: list[int], result: dict) -> None:
        def writer() -> None:
            run.store_release(at[0], 1, SYSTEM)
            run.store_relaxed(at[1], 1, SYSTEM)

        def reader() -> None:
            result["a second"] = run.load_acquire(at[1], SYSTEM)
            result["b first"] = run.load_acquire(at[0], SYSTEM)

        run.spawn(writer)
        run.spawn(reader)

    assert (1, 0) in outcomes(build)


@pytest.mark.parametrize("fenced", [False, True])
def test_store_buffering(fenced: bool) -> None:
    """An acquire-release fence does not order a store before a later load."""

    def build(run: Interpreter, at: list[int], result: dict) -> None:
        def side(name: str, own_flag: int, peer_flag: int) -> None:
            run.store_release(own_flag, 1, SYSTEM)
            if fenced:
                run.fence(SYSTEM)
            result[name] = run.load_acquire(peer_flag, SYSTEM)

        run.spawn(side, "a", at[0], at[1])
        run.spawn(side, "b", at[1], at[0])

    assert outcomes(build) == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_store_buffering_through_one_word_is_forbidden() -> None:
    """The two exchanges of one word are ordered, so one thread sees the other's store."""

    def build(run: Interpreter, at: list[int], result: dict) -> None:
        def side(name: str, own_flag: int, peer_flag: int) -> None:
            run.store_relaxed(own_flag, 1, SYSTEM)
            run.exchange(at[2], 1, SYSTEM)
            result[name] = run.load_relaxed(peer_flag, SYSTEM)

        run.spawn(side, "a", at[0], at[1])
        run.spawn(side, "b", at[1], at[0])

    assert (0, 0) not in outcomes(build)


def test_no_load_buffering() -> None:
    def build(run: Interpreter, at: list[int], result: dict) -> None:
        def side(name: str, source: int, target: int) -> None:
            result[name] = run.load_relaxed(source, SYSTEM)
            run.store_relaxed(target, 1, SYSTEM)

        run.spawn(side, "a", at[0], at[1])
        run.spawn(side, "b", at[1], at[0])

    assert (1, 1) not in outcomes(build)


def coherence_run(seed: int) -> tuple[list[int], int]:
    """Values read, in happens-before order, and how many of them were stale when read."""
    _memory, at = allocate_words(2)
    run = Interpreter(seed)
    newest = 0
    stale = 0
    loaded: list[int] = []

    def writer() -> None:
        nonlocal newest
        for value in range(1, 12):
            run.store_relaxed(at[0], value, SYSTEM)
            newest = value

    def reader() -> None:
        nonlocal stale
        for _ in range(6):
            loaded.append(run.load_relaxed(at[0], SYSTEM))
            stale += loaded[-1] < newest
        run.store_release(at[1], 1, SYSTEM)

    def follower() -> None:
        while not run.load_acquire(at[1], SYSTEM):
            run.backoff(1)
        loaded.append(run.load_relaxed(at[0], SYSTEM))

    for fn in (writer, reader, follower):
        run.spawn(fn)
    run.run()
    return loaded, stale


def test_coherence() -> None:
    """Values of one word never go back, in one thread and along happens-before; stale ones are seen."""
    total = 0
    for seed in range(SEEDS):
        loaded, stale = coherence_run(seed)
        assert loaded == sorted(loaded), seed
        total += stale
    assert total > 50


@pytest.mark.parametrize("breaker", ["fetch_add", "store_relaxed"])
def test_release_sequence(breaker: str) -> None:
    """A read-modify-write of a third thread keeps the release; a plain store of one ends it."""

    def build(run: Interpreter, at: list[int], result: dict) -> None:
        data, flag = at[0], at[1]

        def first() -> None:
            run.store_relaxed(data, 7, SYSTEM)
            run.store_release(flag, 1, SYSTEM)

        def second() -> None:
            while run.load_relaxed(flag, SYSTEM) != 1:
                run.backoff(1)
            if breaker == "fetch_add":
                run.fetch_add(flag, 1, SYSTEM)
            else:
                run.store_relaxed(flag, 2, SYSTEM)

        def third() -> None:
            result["a"] = run.load_acquire(flag, SYSTEM)
            result["b"] = run.load_relaxed(data, SYSTEM)

        for fn in (first, second, third):
            run.spawn(fn)

    assert ((2, 0) in outcomes(build)) == (breaker == "store_relaxed")


def test_relaxed_add_continues_a_release_but_acquires_nothing() -> None:
    def build(run: Interpreter, at: list[int], result: dict) -> None:
        data, flag = at[0], at[1]

        def first() -> None:
            run.store_relaxed(data, 7, SYSTEM)
            run.store_release(flag, 1, SYSTEM)

        def second() -> None:
            result["a"] = run.fetch_add_as(flag, 1, np.int64)
            result["b"] = run.load_relaxed(data, SYSTEM)

        def third() -> None:
            result["c"] = run.load_acquire(flag, SYSTEM)
            result["d"] = run.load_relaxed(data, SYSTEM)

        for fn in (first, second, third):
            run.spawn(fn)

    found = outcomes(build, seeds=2 * SEEDS)
    assert any(a == 1 and b == 0 for a, b, _c, _d in found)
    assert any(c == 2 for _a, _b, c, _d in found)
    assert not any(a == 1 and c == 2 and d == 0 for a, _b, c, d in found)


def test_failed_compare_exchange_acquires_the_newest() -> None:
    def build(run: Interpreter, at: list[int], result: dict) -> None:
        data, flag = at[0], at[1]

        def writer() -> None:
            run.store_relaxed(data, 7, SYSTEM)
            run.store_release(flag, 5, SYSTEM)

        def reader() -> None:
            result["a"] = run.compare_exchange(flag, 4, 9, SYSTEM)
            result["b"] = run.load_relaxed(data, SYSTEM)

        run.spawn(writer)
        run.spawn(reader)

    assert outcomes(build) == {(0, 0), (0, 7), (5, 7)}


def torn_reads(seed: int, fence_after_invalid: bool, acquire_data: bool) -> int:
    """The page word of the cache: generation << 1 | valid; the frame's two words hold the generation."""
    memory, (word, first, second) = allocate_words(3)
    memory[0] = 1
    run = Interpreter(seed)
    load_data = run.load_acquire if acquire_data else run.load_relaxed
    torn = 0

    def evictor() -> None:
        for generation in range(1, 4):
            run.exchange(word, generation << 1, SYSTEM)
            if fence_after_invalid:
                run.fence(SYSTEM)
            run.store_relaxed(first, generation, SYSTEM)
            run.store_relaxed(second, generation, SYSTEM)
            run.store_release(word, generation << 1 | 1, SYSTEM)

    def reader() -> None:
        nonlocal torn
        for _ in range(6):
            before = run.load_acquire(word, SYSTEM)
            if not before & 1:
                continue
            pair = load_data(first, SYSTEM), load_data(second, SYSTEM)
            if not acquire_data:
                run.fence(SYSTEM)
            if run.load_relaxed(word, SYSTEM) == before:
                torn += pair != (before >> 1, before >> 1)

    run.spawn(evictor)
    run.spawn(reader)
    run.run()
    return torn


@pytest.mark.parametrize("acquire_data", [True, False])
def test_page_word_recheck(acquire_data: bool) -> None:
    """Without the fence after INVALID a torn read passes the recheck; with it none does."""
    assert not any(torn_reads(seed, True, acquire_data) for seed in range(1000))
    assert sum(torn_reads(seed, False, acquire_data) for seed in range(1000)) > 5


def test_tickets_are_never_lost() -> None:
    for seed in range(60):
        memory, at = allocate_words(2)
        tickets: list[int] = []

        def take(run: Interpreter, ticket: int, plain: int, tickets: list[int]) -> None:
            for _ in range(5):
                tickets.append(run.fetch_add(ticket, 1, SYSTEM))
            run.fetch_add_as(plain, 1.5, np.float64)

        run = Interpreter(seed)
        run.launch(take, 30, (run, at[0], at[1], tickets), live=8)
        assert sorted(tickets) == list(range(150))
        assert memory[0] == 150
        assert memory.view(np.float64)[1] == 45.0


def test_lost_update_of_a_load_and_a_store_is_found() -> None:
    def build(run: Interpreter, at: list[int], result: dict) -> None:
        def add(name: str) -> None:
            run.store_relaxed(at[0], run.load_relaxed(at[0], SYSTEM) + 1, SYSTEM)
            result[name] = 0

        run.spawn(add, "a")
        run.spawn(add, "b")

    memory, at = allocate_words(1)
    finals = set()
    for seed in range(100):
        memory[0] = 0
        run = Interpreter(seed)
        build(run, at, {})
        run.run()
        finals.add(int(memory[0]))
    assert finals == {1, 2}


def contended(run: Interpreter, at: list[int]) -> None:
    for k in range(20):
        run.fetch_add(at[0], 1, SYSTEM)
        run.store_relaxed(at[1], k, SYSTEM)
        if run.load_relaxed(at[1], SYSTEM) != k:
            run.backoff(k)
        run.clock_ns()


def test_seed_decides_everything() -> None:
    def trace(seed: int) -> int:
        _memory, at = allocate_words(4)
        run = Interpreter(seed)
        for _ in range(4):
            run.spawn(contended, run, at)
        run.run()
        return run.trace_hash

    hashes = [trace(seed) for seed in range(40)]
    assert hashes == [trace(seed) for seed in range(40)]
    assert len(set(hashes)) == 40


def test_trace_hash_does_not_depend_on_addresses() -> None:
    _memory, at = allocate_words(2)
    run = Interpreter(5)
    for _ in range(3):
        run.spawn(contended, run, at)
    run.run()
    _memory, at = allocate_words(2000)
    again = Interpreter(5)
    for _ in range(3):
        again.spawn(contended, again, at[500:])
    again.run()
    assert run.trace_hash == again.trace_hash


def test_parts_of_words() -> None:
    memory, at = allocate_words(1)
    memory[0] = -1

    def store(run: Interpreter) -> None:
        run.store_relaxed_as(at[0], 0x11, np.uint8)
        run.store_relaxed_as(at[0] + 2, -2, np.int16)
        run.store_weak_as(at[0] + 4, 1.5, np.float32)
        assert run.load_relaxed_as(at[0], np.int8) == 0x11
        assert run.load_acquire_as(at[0] + 1, np.uint8) == 0xFF
        assert run.load_weak_as(at[0] + 2, np.dtype("<i2")) == -2
        value = run.load_relaxed_as(at[0] + 4, np.dtype(np.float32))
        assert value == 1.5 and isinstance(value, np.float32)
        assert run.fetch_add_as(at[0] + 4, 2, np.float32) == 1.5

    run = Interpreter(0)
    run.spawn(store, run)
    run.run()
    data = memory.view(np.uint8)
    assert data[:4].tolist() == [0x11, 0xFF, 0xFE, 0xFF]
    assert memory.view(np.float32)[1] == 3.5


def test_threads_that_store_parts_of_one_word_do_not_lose_them() -> None:
    for seed in range(50):
        memory, at = allocate_words(1)

        def put(run: Interpreter, at: list[int] = at) -> None:
            index = run.grid(1)
            run.store_relaxed_as(at[0] + index, index + 1, np.uint8)

        run = Interpreter(seed)
        run.launch(put, 8, (run,))
        assert memory.view(np.uint8).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("dtype", "value", "back"),
    [
        (np.uint64, -1, 2**64 - 1),
        (np.int32, 2**31, -(2**31)),
        (np.bool_, 5, True),
        (np.float64, 0.1, 0.1),
        (np.float16, 1.5, 1.5),
        (np.complex64, 1 + 2j, 1 + 2j),
        (np.dtype("<M8[s]"), np.datetime64("2020-01-01", "s"), np.datetime64("2020-01-01", "s")),
    ],
)
def test_items_round_trip(dtype: object, value: object, back: object) -> None:
    run = Interpreter(0)
    assert run.bits_as(run.as_bits(value, dtype), dtype) == back
    with pytest.raises(TypeError, match="16 bytes"):
        run.bits_as(0, np.complex128)


@pytest.mark.parametrize("coarse", [False, True])
def test_copies_are_weak_and_exact(coarse: bool) -> None:
    source = np.arange(64, dtype=np.int64)
    target = np.zeros(64, np.int64)
    odd = np.zeros(64, np.uint8)
    torn = set()

    def copy(run: Interpreter) -> None:
        run.copy_wide(target.ctypes.data, source.ctypes.data, 128, 4)
        run.copy_bytes(target.ctypes.data + 8, source.ctypes.data + 8, 504)
        run.copy_bytes(odd.ctypes.data + 3, source.ctypes.data + 8, 21)

    def watch(run: Interpreter) -> None:
        pair = [run.load_relaxed(target.ctypes.data + 8 * k, SYSTEM) for k in (1, 63)]
        torn.add(tuple(pair))

    for seed in range(100):
        target[:] = 0
        run = Interpreter(seed, coarse_copies=coarse)
        run.spawn(copy, run)
        run.spawn(watch, run)
        run.run()
        assert (target[1:] == source[1:]).all()
        assert bytes(odd[3:24]) == source.tobytes()[8:29] and not odd[:3].any() and not odd[24:].any()
    assert {(0, 0), (1, 63), (1, 0)} <= torn


def test_files_and_native_calls(tmp_path: object) -> None:
    path = tmp_path / "data"  # type: ignore[operator]
    path.write_bytes(bytes(range(100)))
    buffer = np.zeros(16, np.int64)
    out: list[int] = []

    def serve(state: int, a: int, b: int, c: int, d: int, e: int) -> int:
        return state + a * b + c + d + e

    with path.open("r+b") as file:

        def body(run: Interpreter) -> None:
            address = buffer.ctypes.data
            out.append(run.pread(file.fileno(), address, 64, 50))
            out.append(run.pwrite(file.fileno(), address + 1, 3, 0))
            out.append(run.pread(-1, address, 8, 0))
            out.append(run.call_native(native_handle(serve), 1, 2, 3, 4, 5, 6))

        run = Interpreter(0)
        run.spawn(body, run)
        run.run()
    assert out == [50, 3, -9, 22]
    assert path.read_bytes()[:4] == bytes([51, 52, 53, 3])
    assert buffer.tobytes()[:50] == bytes(range(50, 100))


def test_host_writes_between_runs_are_seen() -> None:
    memory, at = allocate_words(1)
    loaded = []
    run = Interpreter(0)
    for value in (3, 4):
        memory[0] = value
        run.spawn(lambda: loaded.append(run.load_relaxed(at[0], SYSTEM)))
        run.spawn(lambda: run.store_relaxed(at[0], 9, SYSTEM))
        run.run()
        assert memory[0] == 9
    assert loaded[0] in (3, 9) and loaded[1] in (4, 9)


def test_a_spinning_thread_sees_the_store_in_the_end() -> None:
    for seed in range(100):
        _memory, at = allocate_words(1)
        run = Interpreter(seed, max_steps=20_000)
        run.memory.fresh = 0.0

        def spin(run: Interpreter = run, at: list[int] = at) -> None:
            while not run.load_relaxed(at[0], SYSTEM):
                pass

        run.spawn(spin)
        run.spawn(run.store_relaxed, at[0], 1, SYSTEM)
        run.run()


def test_stall_names_the_threads_and_their_lines() -> None:
    for seed in range(10):
        _memory, at = allocate_words(2)
        run = Interpreter(seed, max_steps=2_000, trace=5)

        def wait_for_nothing(at: list[int] = at, run: Interpreter = run) -> None:
            attempt = 0
            while not run.load_acquire(at[0], SYSTEM):
                run.backoff(attempt)
                attempt += 1

        run.spawn(wait_for_nothing, name="waiter")
        run.spawn(lambda: None, name="short")
        run.spawn(wait_for_nothing, name="service", daemon=True)
        with pytest.raises(InterpStallError) as caught:
            run.run()
        text = str(caught.value)
        assert "waiter: " + __file__ in text and "service (daemon): " + __file__ in text
        assert "short: ended" in text
        assert "load acquire" in "".join(caught.value.__notes__)


def test_exceptions_name_seed_step_and_thread() -> None:
    def fail() -> None:
        current().fence(SYSTEM)
        raise KeyError("broken")

    cleaned = []

    def service() -> Iterator[None]:
        try:
            while True:
                current().backoff(3)
        finally:
            current().fence(SYSTEM)
            cleaned.append(True)

    def ended_first() -> None:
        for _ in range(5):
            current().fence(SYSTEM)

    for seed in range(20):
        run = Interpreter(seed)
        run.spawn(fail, name="culprit")
        run.spawn(ended_first)
        run.spawn(service, daemon=True)
        with pytest.raises(KeyError, match="broken") as caught:
            run.run()
        assert f"seed {seed}, step " in caught.value.__notes__[0]
        assert "'culprit'" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match="outside of a launch"):
        current()


@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(12, 100), marks=pytest.mark.slow)], ids=["few", "many"]
)
@pytest.mark.parametrize("endless", [True, False])
def test_services_are_stopped(endless: bool, seeds: range) -> None:
    memory, at = allocate_words(2)

    def controller() -> None:
        attempt = 0
        while True:
            if current().load_acquire(at[0], SYSTEM) == 8:
                current().store_release(at[1], 1, SYSTEM)
            if not endless:
                break
            current().backoff(attempt)
            attempt += 1

    def client() -> None:
        current().fetch_add(at[0], 1, SYSTEM)
        attempt = 0
        while not current().load_acquire(at[1], SYSTEM):
            current().backoff(attempt)
            attempt += 1

    for seed in seeds:
        memory[:] = 0
        launch(client, 8, seed=seed, services=[controller], max_steps=50_000)
        assert memory.tolist() == [8, 1]


def test_launch_shapes() -> None:
    indices = []
    launch(lambda: indices.append((current().grid(2), current().shape)), (3, 2))
    assert [s[0] for s in sorted(indices)] == [(x, y) for x in range(3) for y in range(2)]
    assert {s[1:] for s in indices} == {((3, 2),)}
    indices.clear()
    launch(lambda: indices.append(current().grid(2)), (2, 3), live=1)
    assert indices == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    indices.clear()
    launch(lambda: indices.append(current().grid(3)), (2, 2, 2), seed=3)
    assert (0, 0, 1) in indices and len(set(indices)) == 8
    launch(lambda: indices.append(None), 0)
    assert len(indices) == 8


def test_logical_time_jumps_when_everybody_waits() -> None:
    def wait(limit_ns: int) -> None:
        start = current().clock_ns()
        attempt = 0
        while current().clock_ns() - start < limit_ns:
            current().backoff(attempt)
            attempt += 1

    run = launch(wait, 2, (1_000_000_000,))
    assert run.steps < 5_000


@pytest.mark.parametrize("address", [0, 12])
def test_bad_addresses_raise(address: int) -> None:
    run = Interpreter(0)
    run.spawn(run.load_relaxed, address, SYSTEM)
    with pytest.raises(ValueError, match="address"):
        run.run()


def test_an_access_outside_of_the_memory_ranges_raises() -> None:
    _memory, at = allocate_words(4)
    run = Interpreter(0)
    run.announce(at[0], 16)
    run.spawn(run.load_relaxed, at[1], SYSTEM)
    run.run()
    run.spawn(run.load_relaxed, at[2], SYSTEM)
    with pytest.raises(ValueError, match="none of the memory ranges"):
        run.run()


def test_scopes_and_warps() -> None:
    run = Interpreter(0)
    _memory, _at = allocate_words(1)
    run.spawn(run.fence, 3)
    with pytest.raises(ValueError, match="scope"):
        run.run()

    def use_warp() -> None:
        assert (lane_id(), warp_size(), activemask(), shfl(1, 7, 0), match_any(1, 7)) == (0, 1, 1, 7, 1)
        assert ballot(1, True) == 1 and ballot(1, False) == 0 and any_sync(1, True) and not any_sync(1, False)
        syncwarp(1)

    run.spawn(use_warp)
    run.run()
    with pytest.raises(RuntimeError, match="outside of a launch"):
        lane_id()
    assert popc(-1) == 64 and ffs(0) == 0 and ffs(-(2**63)) == 64
    assert i64(2**63) == -(2**63) and i64(2**64 + 5) == 5
