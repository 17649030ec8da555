"""Stores on a device: kernels, tickets, the device cache, failures, dropped requests and shared stores.

Every value contains its key.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness import kv_device as load
from tests.harness.clock import time_passes
from tests.harness.until import HANG_SECONDS, until

from lab.media import KeyValueFaulty
from warpwell import errors, kv, train
from warpwell.kv.index.serve import WITH_VERSION, version_at
from warpwell.nvme import word5_options, word5_value_size
from warpwell.storage import NativeMedium, word
from warpwell.storage.commands import call_start
from warpwell.targets import memory_for, native
from warpwell.targets.compiler.run_cpu import THREADS
from warpwell.targets.primitives import SYSTEM, fetch_add, store_relaxed

KEYS = 400
TIMEOUT = 1000.0
"""Timeout in seconds on the clock of the test, not in real time."""
SCHEMA = {"x": ("uint8", (8, 8)), "y": ("int64", ())}


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[bytes, bytes]]:
    """Integer keys; sizes from 0 to 512."""
    path = tmp_path_factory.mktemp("kv") / "numbers.kv"
    with kv.create(path) as store:
        return path, load.fill(store, range(KEYS), [k % 513 for k in range(KEYS)])


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[bytes, bytes], list[bytes]]:
    """Keys of 1 to 16 bytes in two shards; sizes from 0 to more than the room that tests give."""
    folder = tmp_path_factory.mktemp("kv")
    keys = load.random_keys(5, 300)
    sizes = np.random.default_rng(6).choice([0, 1, 7, 8, 15, 16, 17, 511, 512, 513, 1500, 5000], 200)
    with kv.create(folder / "m.kv", shards=[folder / "s0", folder / "s1"]) as store:
        return folder / "m.kv", load.fill(store, keys[:200], sizes), keys


def opened(path: Path, device: str = "cpu", mode: str = "r", **options: Any) -> Any:
    options = {"queues": 2, "depth": 16, "value_bytes": 512, "timeout": HANG_SECONDS, **options}
    return kv.open(path, mode, **{"device": device, **options})


def busy(store: Any) -> int:
    return int(store._engine.pairs.in_use())


def arrays(count: int, room: int = 512) -> tuple[Any, Any]:
    return np.zeros((count, room), np.uint8), np.full(count, -99, np.int64)


# -- batches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "interp"])
def test_a_batch_is_what_the_host_reads(mixed: Any, tmp_path: Path, device: str) -> None:
    path, records, keys = mixed
    with opened(path, device) as store:
        values, found = store.get_async(keys).wait()
        assert values == [records.get(key) for key in keys] and found.tolist() == [key in records for key in keys]
    x = np.random.default_rng(0).integers(0, 255, (50, 8, 8), dtype=np.uint8)
    with kv.create(tmp_path / "a", schema=SCHEMA) as store:
        store.put_many(np.arange(50), {"x": x, "y": np.arange(50) * 3})
    with opened(tmp_path / "a", device, cache="1MiB") as store:
        requested = np.array([4, 60, 4, 0, 49, -1])
        (batch, found), (host, host_found) = store.get_async(requested).wait(), store.get_many(requested)
        assert (found == host_found).all() and all((batch[name] == host[name]).all() for name in SCHEMA)


def test_a_closed_store(numbers: Any) -> None:
    with opened(numbers[0]) as store:
        pass
    with pytest.raises(errors.ClosedError):
        store.get_async([1])
    with pytest.raises(errors.ClosedError):
        load.exist[1](store, np.zeros(1, np.int64), np.zeros(1, np.int64))


# -- kernels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("returns", ["request", "queue"])
@pytest.mark.parametrize("cache", [None, "64KiB"])
@pytest.mark.parametrize("device", ["cpu", "interp"])
def test_kernels(numbers: Any, device: str, cache: str | None, returns: str) -> None:
    path, records = numbers
    count = 300 if device == "cpu" else 40
    keys = np.random.default_rng(3).integers(-5, KEYS + 5, count)
    with opened(path, device, cache=cache, depth=32, returns=returns) as store:
        for kernel in (load.retrieve_rows, load.retrieve_rows, load.part_ways, load.hold):
            rows, sizes = arrays(count)
            kernel[count](store, keys, rows, sizes)
            retrieved = [k for k in range(count) if kernel is not load.part_ways or k % 5 != 4]
            load.check_rows(rows[retrieved], sizes[retrieved], keys[retrieved].tolist(), records)
        found = np.zeros(count, np.int64)
        load.exist[count](store, keys, found)
        assert (found == ((keys >= 0) & (keys < KEYS))).all()
        assert busy(store) == 0
        assert (store.device_stats["hits"] > 0) == (cache is not None)


@pytest.mark.parametrize("returns", ["request", "queue"])
@pytest.mark.parametrize("cache", [None, "64KiB"])
@pytest.mark.parametrize("device", ["cpu", "interp"])
def test_keys_of_all_lengths(mixed: Any, device: str, cache: str | None, returns: str) -> None:
    path, records, keys = mixed
    rng = np.random.default_rng(1)
    with opened(path, device, cache=cache, value_bytes=2000, returns=returns) as store:
        for count in (1, 33, 1000) if device == "cpu" else (1, 33):
            requested = [keys[k] for k in rng.integers(0, len(keys), count)]
            for _ in range(2):
                load.check_keys(store, requested, records, 2000)
        assert busy(store) == 0
        assert (store.device_stats["hits"] > 0) == (cache is not None)


@pytest.mark.parametrize("piece", [512, 1024])
def test_values_larger_than_a_piece(mixed: Any, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpwell.kv.device.engine.LARGEST", piece)
    path, records, keys = mixed
    with opened(path, value_bytes=6000) as store:
        assert store.device_stats["piece_bytes"] == piece
        load.check_keys(store, keys, records, 6000)


def test_one_queue_with_two_ids(numbers: Any) -> None:
    path, records = numbers
    keys = np.arange(1000) % (KEYS + 7)
    with opened(path, queues=1, depth=4) as store:
        rows, sizes = arrays(1000)
        for kernel in (load.retrieve_rows, load.hold):
            kernel[1000](store, keys, rows, sizes)
            load.check_rows(rows, sizes, keys.tolist(), records)
        assert busy(store) == 0


def test_close_with_a_launch_in_flight_is_refused(numbers: Any) -> None:
    path, records = numbers
    faults: list[KeyValueFaulty] = []
    store = opened(path, drive=load.drive(faults))
    load.check_keys(store, [1, 2], records)
    faults[0].stop()
    with ThreadPoolExecutor(1) as pool:
        launch = pool.submit(load.check_keys, store, [1, 2], records)
        until(lambda: store._engine._launches > 0)
        with pytest.raises(errors.SharingError, match="in flight"):
            store.close()
        assert not store.closed
        faults[0].resume()
        launch.result()
    load.check_keys(store, [5], records)
    store.close()
    store.close()


def test_threads_share_a_store(numbers: Any) -> None:
    path, records = numbers
    with opened(path, depth=8, cache="16KiB") as store:

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(15):
                load.check_keys(store, rng.integers(0, KEYS + 9, 40).tolist(), records)

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(work, range(3)))
        assert busy(store) == 0


def test_room_smaller_than_the_value(numbers: Any) -> None:
    path, records = numbers
    keys = np.arange(KEYS)
    with opened(path, cache="64KiB") as store:
        for room in (100, 0, 512, 7):
            rows, sizes = arrays(KEYS, room + 24)
            rows[:] = 0xAA
            load.retrieve_rows[KEYS](store, keys, rows[:, :room], sizes)
            assert (rows[:, room:] == 0xAA).all()
            load.check_rows(rows[:, :room], sizes, keys.tolist(), records)


@pytest.mark.parametrize("device", ["cpu", "interp"])
def test_a_ticket_is_taken_once(numbers: Any, device: str) -> None:
    path, records = numbers
    count = 64 if device == "cpu" else 16
    keys = np.arange(count)
    with opened(path, device) as store:
        rows, sizes = arrays(count)
        again = np.zeros(count, np.int64)
        with pytest.raises(errors.KernelError, match="once"):
            load.take_twice[count](store, keys, rows, sizes, again)
        load.check_rows(rows, sizes, keys.tolist(), records)
        assert (again == -2).all()
        assert busy(store) == 0
        load.retrieve_rows[count](store, keys, rows, sizes)


@pytest.mark.parametrize("device", ["cpu", "interp"])
def test_numbers_that_are_no_tickets(numbers: Any, device: str) -> None:
    forged = [-1, -(2**63), 0, 1, 7, 8, 0xFFFF, 2 << 16, 0xFFFFFFFF, 1 << 32, (1 << 32) + 3, 2**63 - 1]
    tickets = np.array(forged, np.int64)
    with opened(numbers[0], device) as store:
        rows, _ = arrays(len(forged))
        results = np.zeros((len(forged), 3), np.int64)
        with pytest.raises(errors.KernelError, match="ticket"):
            load.forge[len(forged)](store, tickets, rows, results)
        assert (results[:, 0] > 0).all() and (results[:, 1:] == -2).all() and not rows.any()
        assert busy(store) == 0


def test_items_that_do_not_stand_side_by_side_are_refused(numbers: Any) -> None:
    path, _ = numbers
    with opened(path) as store:
        columns, results = np.zeros((512, 4), np.uint8), np.zeros(1, np.int64)
        with pytest.raises(errors.KernelError, match="not contiguous"):
            load.into_column[1](store, 7, columns, results)
        assert results[0] == -2 and not columns.any()


# -- failures ----------------------------------------------------------------------------------------------------


def test_a_damaged_value(tmp_path: Path) -> None:
    with kv.create(tmp_path / "d") as store:
        records = load.fill(store, range(30), [400] * 30)
    value = records[(17).to_bytes(8, "little")]
    segment = next((tmp_path / "d").glob("*.val"))
    raw = bytearray(segment.read_bytes())
    raw[raw.index(value) + 200] ^= 4
    segment.write_bytes(raw)
    intact = [k for k in range(30) if k != 17]
    with opened(tmp_path / "d", cache="1MiB") as store:
        for _ in range(2):
            rows, sizes = arrays(30)
            with pytest.raises(errors.CorruptionError, match="verify"):
                load.retrieve_rows[30](store, np.arange(30), rows, sizes)
            assert sizes[17] == -2
            load.check_rows(rows[intact], sizes[intact], intact, records)
            load.check_keys(store, intact, records)


def test_a_drive_that_fails(numbers: Any) -> None:
    path, records = numbers
    faults: list[KeyValueFaulty] = []
    with opened(path, drive=load.drive(faults)) as store:
        faults[0].configure(["ok", "error"], status=0x2C0)
        with pytest.raises(errors.MediumError) as raised:
            load.check_keys(store, range(40), records)
        assert raised.value.status == 0x2C0
        faults[0].configure(["late", "ok"], late_us=3000)
        load.check_keys(store, range(40), records)


def test_a_drive_that_stops_and_goes_on(numbers: Any) -> None:
    path, records = numbers
    faults: list[KeyValueFaulty] = []
    with opened(path, depth=8, timeout=TIMEOUT, drive=load.drive(faults)) as store:
        rows, sizes = arrays(30)
        states = np.zeros(30, np.int64)
        for _ in range(2):
            faults[0].stop()
            with time_passes(TIMEOUT):
                for _ in range(2):
                    with pytest.raises(errors.StallError):
                        load.retrieve_rows[30](store, np.arange(30), rows, sizes)
                    assert (sizes == -2).all()
            faults[0].resume()
            assert store._engine.quiet(HANG_SECONDS)
            load.check_keys(store, range(50), records)
            faults[0].stop()
            with time_passes(TIMEOUT), pytest.raises(errors.StallError):
                load.poll_to_the_end[30](store, np.arange(30), states)
            assert set(states) <= {-3, 0x7FFF} and (states == 0x7FFF).any()
            faults[0].resume()
            assert store._engine.quiet(HANG_SECONDS)
        load.retrieve_rows[30](store, np.arange(30), rows, sizes)
        load.check_rows(rows, sizes, range(30), records)


def test_a_controller_that_is_lost(numbers: Any) -> None:
    path, records = numbers
    faults: list[KeyValueFaulty] = []
    with opened(path, drive=load.drive(faults), timeout=HANG_SECONDS) as store:
        faults[0].stop()
        with ThreadPoolExecutor(1) as pool:
            launch = pool.submit(load.check_keys, store, range(20), records)
            until(lambda: busy(store) > 0)
            store._engine.pairs.lose("a test has taken it away")
            with pytest.raises(errors.DriveLostError, match="taken it away"):
                launch.result()
        with pytest.raises(errors.DriveLostError, match="taken it away"):
            load.check_keys(store, range(5), records)
        faults[0].resume()


@pytest.mark.quick("cpu-retrieve", "cpu-poll")
@pytest.mark.parametrize("kernel", [load.retrieve_for, load.poll_for], ids=["retrieve", "poll"])
@pytest.mark.parametrize("device", ["cpu", "interp"])
def test_a_lost_command_while_others_are_answered(numbers: Any, device: str, kernel: Any) -> None:
    """It is given up after some timeouts of its own; no other lane notices.

    On `cpu` the clock advances by an eighth of the timeout once all healthy lanes have received a value since the last
    time, so that no healthy command is ever older than a quarter of the timeout, however slow the machine is.
    """
    path, records = numbers
    faults: list[KeyValueFaulty] = []
    # on `interp` a thousand steps of a lane take a millionth of a second
    timeout, lanes = (TIMEOUT, max(2, min(8, THREADS))) if device == "cpu" else (0.02, 8)
    keys = np.arange(lanes)
    results = np.zeros((lanes, 3), np.int64)
    before = np.zeros(lanes, np.int64)
    advances = 0

    def healthy_lanes_went_on() -> bool:
        nonlocal advances
        received = results[:, 0].copy()
        # The lane whose command is lost may have received nothing before.
        if faults[0].counts["lost"] == 0 or (received > before).sum() < lanes - 1:
            return False
        # If the system does not run that lane, six timeouts pass until it looks, and not more.
        if advances == 6 * 8 and results[:, 1].sum() == 0:
            return False
        before[:] = received
        advances += 1
        return True

    with opened(path, device, timeout=timeout, drive=load.drive(faults)) as store:
        load.check_keys(store, keys.tolist(), records)
        healthy_commands = 0 if kernel is load.retrieve_for else 30
        faults[0].configure(["ok"] * healthy_commands + ["lost"], repeat=False)
        rows, _ = arrays(lanes)
        passing = time_passes(timeout / 8, healthy_lanes_went_on) if device == "cpu" else contextlib.nullcontext()
        with passing, pytest.raises(errors.StallError):
            kernel[lanes](store, keys, rows, results, int(10 * timeout * 1e9))
        assert faults[0].counts["lost"] == results[:, 1].sum() == 1
        waited = results[results[:, 1] > 0, 2][0] / 1e9
        assert 3 * timeout < waited < 8 * timeout
        # the lane whose command was lost continues, like all others
        assert results[:, 0].min() > 5
        assert busy(store) == 1
        load.check_keys(store, keys.tolist(), records)


def test_an_interrupt(numbers: Any) -> None:
    path, records = numbers
    faults: list[KeyValueFaulty] = []
    with opened(path, depth=8, timeout=TIMEOUT, drive=load.drive(faults)) as store:
        rows, sizes = arrays(40)
        load.retrieve_rows[40](store, np.arange(40), rows, sizes)
        for _ in range(3):
            faults[0].stop()
            old = signal.signal(signal.SIGALRM, signal.default_int_handler)
            try:
                with pytest.raises(KeyboardInterrupt):
                    signal.setitimer(signal.ITIMER_REAL, 0.3)
                    load.retrieve_rows[40](store, np.arange(40), rows, sizes)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, old)
            faults[0].resume()
            load.check_keys(store, range(60), records)
        assert store._engine.quiet(HANG_SECONDS)
    assert store._engine._launches == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_no_device(numbers: Any) -> None:
    path, records = numbers
    with opened(path) as store:
        load.check_keys(store, [5], records)
        child = os.fork()
        if child == 0:
            try:
                with pytest.raises(errors.ForkError):
                    load.check_keys(store, [5], records)
                fine = store.get_async([5]).wait(HANG_SECONDS)[0] == [records[(5).to_bytes(8, "little")]]
                store.close()
                os._exit(0 if fine else 1)
            except BaseException:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        load.check_keys(store, range(30), records)


# -- stores that change, shared stores ----------------------------------------------------------------------


def test_refresh_leaves_no_old_value_in_the_cache(tmp_path: Path) -> None:
    keys = np.arange(60)
    with kv.create(tmp_path / "r") as writer:
        writer.put_many(keys, np.zeros((60, 256), np.uint8))
        writer.commit()
        store = opened(tmp_path / "r", cache="1MiB", value_bytes=256)
        stop = threading.Event()
        failed: list[BaseException] = []
        floor = [0]

        def read() -> None:
            try:
                while not stop.is_set():
                    minimum = floor[0]
                    rows, sizes = arrays(60, 256)
                    load.retrieve_rows[60](store, keys, rows, sizes)
                    assert (rows == rows[:, :1]).all() and rows.min() >= minimum
            except BaseException as error:  # raised below
                failed.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        for number in range(1, 30):
            writer.put_many(keys, np.full((60, 256), number, np.uint8))
            writer.commit()
            assert store.refresh() > 0
            floor[0] = number
            rows, sizes = arrays(60, 256)
            load.retrieve_rows[60](store, keys, rows, sizes)
            assert (rows == number).all()
        stop.set()
        thread.join(HANG_SECONDS)
        assert not failed, failed
        assert store.device_stats["hits"] > 0
        store.close()


def test_kernels_read_values_that_somebody_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpwell.kv.device.engine.LARGEST", 512)
    keys = np.arange(20)
    with kv.create(tmp_path / "c") as store:
        store.put_many(keys, np.zeros((20, 2000), np.uint8))
    with opened(tmp_path / "c", mode="r+", value_bytes=2048) as store:
        stop = threading.Event()
        launches = 0

        def write() -> None:
            number, chance = 0, random.Random(5)
            while not stop.is_set():
                number, launches_before = number + 1, launches
                store.put_many(keys, np.full((20, 2000), number & 0xFF, np.uint8))
                # A reader starts anew if a value changes meanwhile: each launch meets few writes.
                until(lambda before=launches_before: launches > before or stop.is_set())  # type: ignore[misc]
                stop.wait(chance.random() * 5e-3)

        thread = threading.Thread(target=write)
        thread.start()
        try:
            for _ in range(30):
                rows, sizes = arrays(20, 2000)
                load.retrieve_rows[20](store, keys, rows, sizes)
                launches += 1
                assert (sizes == 2000).all() and (rows == rows[:, :1]).all()
        finally:
            stop.set()
            thread.join(HANG_SECONDS)


class EverOther:
    """A drive that reports another version each time."""

    def __init__(self, functions: NativeMedium) -> None:
        self.block = memory_for("cpu").allocate(64)
        self.block.words[:2] = functions.start, functions.state
        self.functions = functions

    def native(self) -> NativeMedium:
        return NativeMedium(other_each_time.address, 0, self.block.address, self)


@native
def other_each_time(state: int, command: int, tag: int) -> int:
    answer = call_start(word(state, 0), word(state, 1), command, tag)
    word5 = word(command, 5)
    if word5_options(word5) & WITH_VERSION != 0:
        version = version_at(word(command, 3), word5_value_size(word5))
        store_relaxed(version + 8, fetch_add(state + 16, 1, SYSTEM), SYSTEM)
    return answer


def test_a_value_that_changes_all_the_time(mixed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpwell.kv.device.engine.LARGEST", 512)
    path, records, keys = mixed
    long = [key for key in keys if len(records.get(key, b"")) > 512][:3]
    short = [key for key in keys if len(records.get(key, b"")) <= 512][:30]
    with opened(path, value_bytes=6000, drive=EverOther, cache="1MiB") as store:
        load.check_keys(store, short, records, 6000)
        rows, sizes = arrays(3, 6000)
        with pytest.raises(errors.MediumError, match="changed while it was read in pieces"):
            load.retrieve_long[3](store, load.words_of(long), rows, sizes)
        assert (sizes == -2).all() and busy(store) == 0
        load.check_keys(store, short, records, 6000)


# -- the device cache --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "interp"])
def test_threads_that_share_a_buffer_leave_no_wrong_value_in_the_cache(numbers: Any, device: str) -> None:
    path, records = numbers
    keys = np.arange(KEYS if device == "cpu" else 40)
    with opened(path, device, cache="4MiB", depth=64) as store:
        rows, sizes = arrays(keys.size)
        load.share_a_row[keys.size](store, keys, rows, sizes)
        commands = store.device_stats["commands"]
        load.retrieve_rows[keys.size](store, keys, rows, sizes)
        load.check_rows(rows, sizes, keys.tolist(), records)
        # Only values whose cache sets were full are read again.
        assert store.device_stats["commands"] - commands < keys.size // 4


@pytest.mark.parametrize("device", ["cpu", "interp"])
def test_values_of_several_pieces_come_into_the_cache(mixed: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpwell.kv.device.engine.LARGEST", 512)
    path, records, keys = mixed
    keys = keys[:200] if device == "cpu" else keys[:20]
    with opened(path, device, cache="16MiB", value_bytes=5000) as store:
        for _ in range(2):
            commands = store.device_stats["commands"]
            load.check_keys(store, keys, records, 5000)
        assert store.device_stats["commands"] - commands < len(keys) // 4


@pytest.mark.parametrize("kind", ["error", "lost"])
def test_a_value_whose_pieces_end_early_leaves_its_place_in_the_cache(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warpwell.kv.device.engine.LARGEST", 512)
    with kv.create(tmp_path / "c") as store:
        records = load.fill(store, range(6), [2000] * 6)
    faults: list[KeyValueFaulty] = []
    with opened(tmp_path / "c", cache="6KiB", value_bytes=2000, timeout=TIMEOUT, drive=load.drive(faults)) as store:
        assert store.device_stats["cache_records"] == 2
        for key in range(4):
            faults[0].configure(["ok", "ok", kind], repeat=False)
            lost = faults[0].counts["lost"]
            with time_passes(TIMEOUT, lambda lost=lost: faults[0].counts["lost"] > lost):
                with pytest.raises((errors.CorruptionError, errors.StallError)):
                    load.check_keys(store, [key], records, 2000)
        for _ in range(2):
            load.check_keys(store, [4], records, 2000)
        assert store.device_stats["hits"] == 1


def test_two_devices_on_one_controller(numbers: Any) -> None:
    path, records = numbers
    with opened(path) as first:
        second = opened(path, beside=first, cache="64KiB")
        with ThreadPoolExecutor(4) as pool:
            stores = [first, second, second, first]
            list(pool.map(lambda store: load.check_keys(store, range(50), records), stores))
        with pytest.raises(errors.SharingError, match="close those first"):
            first.close()
        load.check_keys(second, [3], records)
        assert second.refresh() == 0
        second.close()


@pytest.mark.parametrize(
    "options",
    [
        {"queues": 0},
        {"queues": -1},
        {"depth": 3},
        {"depth": 0},
        {"depth": 48},
        {"value_bytes": 0},
        {"value_bytes": 1 << 31},
        {"timeout": 0},
        {"timeout": float("nan")},
        {"threads": 0},
        {"cache": "much"},
        {"returns": "maybe"},
        {"weight": 0},
        {"device": "cpu:1"},
        {"device": "cudas"},
        {"device": 3},
        {"mode": "w"},
        {"mode": None},
        {"timeout": float("inf")},
        {"timeout": "3"},
        {"timeout": None},
        {"timeout": True},
        {"timeout": 1e10},
        {"queues": 2.5},
        {"queues": True},
        {"queues": "2"},
        {"queues": 10**6},
        {"depth": 16.0},
        {"depth": 2**40},
        {"threads": 1.5},
        {"cache": -1},
        {"cache": True},
        {"value_bytes": 2.5},
        {"window": -1},
        {"window": 1.5},
        {"window": float("nan")},
        {"weight": 1.5},
        {"weight": 1000},
        {"returns": None},
        {"beside": 3},
        {"drive": 3},
    ],
)
def test_options_that_cannot_be(numbers: Any, options: dict[str, Any]) -> None:
    path, records = numbers
    (name,) = options
    with pytest.raises(errors.ArgumentError, match=name):
        opened(path, **options)
    if name not in ("device", "mode"):
        with pytest.raises(errors.ArgumentError):  # the option is also refused without a device
            kv.open(path, **options)
    with opened(path) as store:
        load.check_keys(store, [3], records)


def test_keys_of_a_gpu_on_another_device(numbers: Any) -> None:
    class Keys:
        __cuda_array_interface__ = {"shape": (3,), "typestr": "<i8", "data": (4096, False), "version": 3}  # noqa: RUF012

    with opened(numbers[0]) as store, pytest.raises(errors.ArgumentError, match="GPU memory"):
        store.get_async(Keys())


# -- loaders -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "interp"])
def test_a_loader_delivers_what_it_does_over_a_host_store(tmp_path: Path, device: str) -> None:
    x = np.random.default_rng(0).integers(0, 255, (150, 8, 8), dtype=np.uint8)
    with kv.create(tmp_path / "a", schema=SCHEMA) as store:
        store.put_many(np.arange(150) * 3, {"x": x, "y": np.arange(150)})
    options: dict[str, Any] = {"batch_size": 32, "seed": 7, "prefetch": 3}
    with kv.open(tmp_path / "a") as host, opened(tmp_path / "a", device, cache="32KiB", depth=32) as store:
        host_loader, device_loader = train.DataLoader(host, **options), train.DataLoader(store, **options)
        for _ in range(2):
            pairs = list(zip(host_loader, device_loader, strict=True))
            assert len(pairs) == 5
            for a, b in pairs:
                assert all((np.asarray(b[name]) == a[name]).all() for name in SCHEMA)
        part = iter(device_loader)
        next(part)
        resumed = train.DataLoader(store, **options)
        resumed.load_state_dict(device_loader.state_dict())
        assert [b["y"].tolist() for b in resumed] == [b["y"].tolist() for b in part]
        del part


@pytest.mark.parametrize("device", [None, "cpu", "interp"])
def test_a_loader_delivers_whole_values_without_a_schema(tmp_path: Path, device: str | None) -> None:
    values = [bytes([k]) * 6000 for k in range(8)]
    with kv.create(tmp_path / "a") as store:
        store.put_many(np.arange(8), values)
    with kv.open(tmp_path / "a", device=device) as store:
        loader = train.DataLoader(store, batch_size=4, shuffle=False, key_field="key")
        batches = [(batch["key"].tolist(), batch["value"]) for batch in loader]
        assert batches == [(list(range(4)), values[:4]), (list(range(4, 8)), values[4:])]
        assert [batch for batch in train.DataLoader(store, batch_size=4, shuffle=False)] == [values[:4], values[4:]]
