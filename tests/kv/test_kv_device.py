"""Stores on a device: batches, kernels, tickets and the device cache; what fails, what is dropped, and what is shared.

Every value says which key it is of.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness import kv_device as load
from tests.harness.clock import time_passes
from tests.harness.until import HANG_SECONDS

from lab.media import KeyValueFaulty, KeyValueLatency
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


def drive(faults: list[KeyValueFaulty]) -> Any:
    def make(functions: Any) -> KeyValueFaulty:
        faults.append(KeyValueFaulty(functions))
        return faults[-1]

    return make


def busy(store: Any) -> int:
    return int(store._engine.pairs.in_use())


def arrays(count: int, room: int = 512) -> tuple[Any, Any]:
    return np.zeros((count, room), np.uint8), np.full(count, -99, np.int64)


# -- batches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("returns", ["request", "queue"])
@pytest.mark.parametrize("cache", [None, "64KiB"])
@pytest.mark.parametrize("device", ["cpu", "interp"])
def test_a_batch_is_what_the_host_reads(mixed: Any, device: str, cache: str | None, returns: str) -> None:
    path, records, keys = mixed
    rng = np.random.default_rng(1)
    counts = (0, 1, 33, 1000) if device == "cpu" else (0, 1, 33)
    with opened(path, device, cache=cache, value_bytes=2000, returns=returns) as store:
        for count in counts:
            wanted = [keys[k] for k in rng.integers(0, len(keys), count)]
            for _ in range(2):
                load.check_batch(*store.get_async(wanted).wait(), wanted, records, 2000)
        assert busy(store) == 0
        assert (store.device_stats["hits"] > 0) == (cache is not None)


@pytest.mark.parametrize("piece", [512, 1024])
def test_values_larger_than_a_piece(mixed: Any, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpwell.kv.device.engine.LARGEST", piece)
    path, records, keys = mixed
    with opened(path, value_bytes=6000) as store:
        assert store.device_stats["piece_bytes"] == piece
        load.check_batch(*store.get_async(keys).wait(), keys, records, 6000)
        rows, sizes = arrays(len(keys), 6000)
        load.retrieve_long[len(keys)](store, load.words_of(keys), rows, sizes)
        load.check_rows(rows, sizes, keys, records)


def test_keys_in_every_form(numbers: Any) -> None:
    path, records = numbers
    with opened(path) as store:
        ints = list(range(-3, KEYS + 5, 3))
        raw = [k.to_bytes(8, "little", signed=True) for k in ints]
        padded = np.zeros((len(ints), 16), np.uint8)
        padded[:, :8] = np.array(ints, np.int64)[:, None].view(np.uint8)
        for given in (ints, np.array(ints), raw, (padded, np.full(len(ints), 8, np.uint8))):
            load.check_batch(*store.get_async(given).wait(), raw, records, 512)
        # 16 bytes of which 8 are zero are another key
        assert not store.get_async(padded).wait()[1].any()


def test_a_schema(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 255, (50, 8, 8), dtype=np.uint8)
    with kv.create(tmp_path / "a", schema=SCHEMA) as store:
        store.put_many(np.arange(50), {"x": x, "y": np.arange(50) * 3})
    with opened(tmp_path / "a", cache="1MiB") as store:
        keys = np.array([4, 60, 4, 0, 49, -1])
        for _ in range(2):
            batch, found = store.get_async(keys).wait()
            host, told = store.get_many(keys)
            assert (found == told).all()
            assert all((batch[name] == host[name]).all() and batch[name].shape == host[name].shape for name in SCHEMA)


def test_one_queue_with_two_ids(numbers: Any) -> None:
    path, records = numbers
    keys = np.arange(1000) % (KEYS + 7)
    with opened(path, queues=1, depth=4) as store:
        load.check_batch(*store.get_async(keys).wait(), keys.tolist(), records, 512)
        rows, sizes = arrays(1000)
        for kernel in (load.retrieve_rows, load.hold):
            kernel[1000](store, keys, rows, sizes)
            load.check_rows(rows, sizes, keys.tolist(), records)
        assert busy(store) == 0


@pytest.mark.parametrize("returns", ["request", "queue"])
@pytest.mark.parametrize("depth", [4, 16])
def test_batches_are_waited_for_in_any_order(numbers: Any, depth: int, returns: str) -> None:
    """None that nobody waits for yet may hold what another one needs."""
    path, records = numbers
    with opened(path, queues=1, depth=depth, returns=returns) as store:
        keys = [np.arange(k, k + 60) for k in (0, 100, 200, 300)]
        futures = [store.get_async(k) for k in keys]
        rows, sizes = arrays(20)
        load.retrieve_rows[20](store, np.arange(20), rows, sizes)
        load.check_rows(rows, sizes, range(20), records)
        for k in (3, 0, 2, 1):
            load.check_batch(*futures[k].wait(), keys[k].tolist(), records, 512)


def test_a_batch_that_is_dropped_gives_its_ids_back(numbers: Any) -> None:
    path, records = numbers
    with opened(path, queues=1, depth=8) as store:
        for _ in range(5):
            store.get_async(np.arange(50))
            gc.collect()
        rows, sizes = arrays(10)
        load.retrieve_rows[10](store, np.arange(10), rows, sizes)
        load.check_rows(rows, sizes, range(10), records)
        assert busy(store) == 0
        store.get_async(np.arange(50))
        gc.collect()


def test_a_result_stays_and_may_be_asked_for_again(numbers: Any) -> None:
    path, records = numbers
    with opened(path) as store:
        future = store.get_async([1, 2])
        first = future.wait()
        assert future.wait() is first and future.done()
        store.get_async([3, 4]).wait()
    load.check_batch(*future.wait(), [1, 2], records, 512)
    with pytest.raises(errors.ClosedError):
        store.get_async([1])
    with pytest.raises(errors.ClosedError):
        load.exist[1](store, np.zeros(1, np.int64), np.zeros(1, np.int64))


def test_done_becomes_true(numbers: Any) -> None:
    path, records = numbers
    with opened(path, drive=lambda f: KeyValueLatency(f, latency_us=50_000)) as store:
        future = store.get_async([1, 2, 3])
        assert not future.done()
        end = time.monotonic() + 10
        while not future.done():
            assert time.monotonic() < end
            time.sleep(1e-3)
        load.check_batch(*future.wait(), [1, 2, 3], records, 512)


def test_close_with_requests_in_flight_is_refused(numbers: Any) -> None:
    path, records = numbers
    store = opened(path)
    future = store.get_async([1, 2])
    with pytest.raises(errors.SharingError, match="wait"):
        store.close()
    assert not store.closed
    load.check_batch(*future.wait(), [1, 2], records, 512)
    load.check_batch(*store.get_async([5]).wait(), [5], records, 512)
    store.close()
    store.close()


def test_threads_share_a_store(numbers: Any) -> None:
    path, records = numbers
    failed: list[BaseException] = []
    with opened(path, depth=8, cache="16KiB") as store:

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            try:
                for _ in range(15):
                    keys = rng.integers(0, KEYS + 9, 40)
                    future = store.get_async(keys)
                    rows, sizes = arrays(40)
                    load.retrieve_rows[40](store, keys, rows, sizes)
                    load.check_rows(rows, sizes, keys.tolist(), records)
                    load.check_batch(*future.wait(), keys.tolist(), records, 512)
            except BaseException as error:  # raised below
                failed.append(error)

        threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failed, failed
        assert busy(store) == 0


def test_threads_wait_for_one_batch(numbers: Any) -> None:
    with opened(numbers[0], drive=lambda f: KeyValueLatency(f, latency_us=20_000)) as store:
        future, told = store.get_async(np.arange(50)), []
        threads = [threading.Thread(target=lambda: told.append(future.wait())) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(told) == 3 and all(t is told[0] for t in told)
    assert store._engine._launches == 0


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
            some = [k for k in range(count) if kernel is not load.part_ways or k % 5 != 4]
            load.check_rows(rows[some], sizes[some], keys[some].tolist(), records)
        there = np.zeros(count, np.int64)
        load.exist[count](store, keys, there)
        assert (there == ((keys >= 0) & (keys < KEYS))).all()
        assert busy(store) == 0
        assert (store.device_stats["hits"] > 0) == (cache is not None)


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
        told = np.zeros((len(forged), 3), np.int64)
        with pytest.raises(errors.KernelError, match="ticket"):
            load.forge[len(forged)](store, tickets, rows, told)
        assert (told[:, 0] > 0).all() and (told[:, 1:] == -2).all() and not rows.any()
        assert busy(store) == 0


def test_items_that_do_not_stand_side_by_side_are_refused(numbers: Any) -> None:
    path, _ = numbers
    with opened(path) as store:
        columns, told = np.zeros((512, 4), np.uint8), np.zeros(1, np.int64)
        with pytest.raises(errors.KernelError, match="not contiguous"):
            load.into_column[1](store, 7, columns, told)
        assert told[0] == -2 and not columns.any()


# -- failures ----------------------------------------------------------------------------------------------------


def test_a_damaged_value(tmp_path: Path) -> None:
    with kv.create(tmp_path / "d") as store:
        records = load.fill(store, range(30), [400] * 30)
    value = records[(17).to_bytes(8, "little")]
    segment = next((tmp_path / "d").glob("*.val"))
    raw = bytearray(segment.read_bytes())
    raw[raw.index(value) + 200] ^= 4
    segment.write_bytes(raw)
    rest = [k for k in range(30) if k != 17]
    with opened(tmp_path / "d", cache="1MiB") as store:
        for _ in range(2):
            future = store.get_async(np.arange(30))
            for _ in range(2):
                with pytest.raises(errors.CorruptionError, match="verify"):
                    future.wait()
            rows, sizes = arrays(30)
            with pytest.raises(errors.CorruptionError, match="verify"):
                load.retrieve_rows[30](store, np.arange(30), rows, sizes)
            assert sizes[17] == -2
            load.check_rows(rows[rest], sizes[rest], rest, records)
            load.check_batch(*store.get_async(rest).wait(), rest, records, 512)


def test_a_drive_that_fails(numbers: Any) -> None:
    path, records = numbers
    faults: list[KeyValueFaulty] = []
    with opened(path, drive=drive(faults)) as store:
        faults[0].configure(["ok", "error"], status=0x2C0)
        with pytest.raises(errors.MediumError) as told:
            store.get_async(np.arange(40)).wait()
        assert told.value.status == 0x2C0
        faults[0].configure(["late", "ok"], late_us=3000)
        load.check_batch(*store.get_async(np.arange(40)).wait(), range(40), records, 512)


def test_a_drive_that_stops_and_goes_on(numbers: Any) -> None:
    path, records = numbers
    faults: list[KeyValueFaulty] = []
    with opened(path, depth=8, timeout=TIMEOUT, drive=drive(faults)) as store:
        rows, sizes = arrays(30)
        states = np.zeros(30, np.int64)
        for _ in range(2):
            faults[0].stop()
            with time_passes(TIMEOUT):
                future = store.get_async(np.arange(30))
                with pytest.raises(errors.StallError):
                    future.wait()
                with pytest.raises(errors.StallError):
                    load.retrieve_rows[30](store, np.arange(30), rows, sizes)
                assert (sizes == -2).all()
                with pytest.raises(errors.StallError):
                    store.get_async(np.arange(30)).wait()
            faults[0].resume()
            assert store._engine.quiet(HANG_SECONDS)
            load.check_batch(*store.get_async(np.arange(50)).wait(), range(50), records, 512)
            faults[0].stop()
            with time_passes(TIMEOUT), pytest.raises(errors.StallError):
                load.poll_to_the_end[30](store, np.arange(30), states)
            assert set(states) <= {-3, 0x7FFF} and (states == 0x7FFF).any()
            faults[0].resume()
            assert store._engine.quiet(HANG_SECONDS)
        load.retrieve_rows[30](store, np.arange(30), rows, sizes)
        load.check_rows(rows, sizes, range(30), records)


def test_a_controller_that_is_lost(numbers: Any) -> None:
    path, _records = numbers
    faults: list[KeyValueFaulty] = []
    with opened(path, drive=drive(faults), timeout=HANG_SECONDS) as store:
        faults[0].stop()
        future = store.get_async(np.arange(20))
        store._engine.pairs.lose("a test has taken it away")
        with pytest.raises(errors.DriveLostError, match="taken it away"):
            future.wait()
        with pytest.raises(errors.DriveLostError, match="taken it away"):
            store.get_async(np.arange(5)).wait()
        faults[0].resume()


def test_lost_commands(numbers: Any) -> None:
    path, records = numbers
    faults: list[KeyValueFaulty] = []
    with opened(path, queues=1, timeout=TIMEOUT, drive=drive(faults)) as store:
        faults[0].configure(["lost"] * 3 + ["ok"] * 2, repeat=False)
        with time_passes(TIMEOUT, lambda: faults[0].counts["ok"] == 2), pytest.raises(errors.StallError):
            store.get_async(np.arange(5)).wait()
        assert busy(store) == 3
        load.check_batch(*store.get_async(np.arange(90)).wait(), range(90), records, 512)


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
    told = np.zeros((lanes, 3), np.int64)
    before = np.zeros(lanes, np.int64)

    def healthy_lanes_went_on() -> bool:
        received = told[:, 0].copy()
        # The lane whose command is lost may have received nothing before.
        if faults[0].counts["lost"] == 0 or (received > before).sum() < lanes - 1:
            return False
        before[:] = received
        return True

    with opened(path, device, timeout=timeout, drive=drive(faults)) as store:
        load.check_batch(*store.get_async(keys).wait(), keys.tolist(), records, 512)
        healthy_commands = 0 if kernel is load.retrieve_for else 30
        faults[0].configure(["ok"] * healthy_commands + ["lost"], repeat=False)
        rows, _ = arrays(lanes)
        passing = time_passes(timeout / 8, healthy_lanes_went_on) if device == "cpu" else contextlib.nullcontext()
        with passing, pytest.raises(errors.StallError):
            kernel[lanes](store, keys, rows, told, int(10 * timeout * 1e9))
        assert faults[0].counts["lost"] == told[:, 1].sum() == 1
        waited = told[told[:, 1] > 0, 2][0] / 1e9
        assert 3 * timeout < waited < 8 * timeout
        # the lane that waited continues, as the others do
        assert told[:, 0].min() > 5
        assert busy(store) == 1
        load.check_batch(*store.get_async(keys).wait(), keys.tolist(), records, 512)


@pytest.mark.parametrize("what", ["batch", "kernel"])
def test_an_interrupt(numbers: Any, what: str) -> None:
    path, records = numbers
    faults: list[KeyValueFaulty] = []
    with opened(path, depth=8, timeout=TIMEOUT, drive=drive(faults)) as store:
        load.check_batch(*store.get_async(np.arange(9)).wait(), range(9), records, 512)
        rows, sizes = arrays(40)
        load.retrieve_rows[40](store, np.arange(40), rows, sizes)
        for _ in range(3):
            faults[0].stop()
            future = store.get_async(np.arange(40)) if what == "batch" else None
            old = signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            try:
                with pytest.raises(KeyboardInterrupt):
                    if future is not None:
                        future.wait()
                    else:
                        load.retrieve_rows[40](store, np.arange(40), rows, sizes)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, old)
            faults[0].resume()
            if future is not None:
                with pytest.raises(errors.KernelError, match="interrupted"):
                    future.wait()
            load.check_batch(*store.get_async(np.arange(60)).wait(), range(60), records, 512)
            load.retrieve_rows[40](store, np.arange(40), rows, sizes)
            load.check_rows(rows, sizes, range(40), records)
        assert store._engine.quiet(5)
    assert store._engine._launches == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told(numbers: Any) -> None:
    path, records = numbers
    with opened(path) as store:
        future = store.get_async(np.arange(30))
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            said = b""
            for call in (lambda: store.get_async([1]), future.wait):
                try:
                    call()
                    said += b"n"
                except errors.ForkError:
                    said += b"y"
            said += b"y" if store.get(5) == records[(5).to_bytes(8, "little")] else b"n"
            del future
            store.close()
            os.write(tell, said)
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(told, 10) == b"yyy"
        os.close(told)
        os.close(tell)
        load.check_batch(*future.wait(), range(30), records, 512)


# -- stores that change, and what is shared ----------------------------------------------------------------------


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
                    least = floor[0]
                    rows, sizes = arrays(60, 256)
                    load.retrieve_rows[60](store, keys, rows, sizes)
                    assert (rows == rows[:, :1]).all() and rows.min() >= least
            except BaseException as error:  # raised below
                failed.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        for number in range(1, 30):
            pending = store.get_async(keys)
            writer.put_many(keys, np.full((60, 256), number, np.uint8))
            writer.commit()
            assert store.refresh() > 0
            floor[0] = number
            assert (pending.wait()[0]["value"] >= number - 1).all()
            assert (store.get_async(keys).wait()[0]["value"] == number).all()
        stop.set()
        thread.join(30)
        assert not failed, failed
        assert store.device_stats["hits"] > 0
        store.close()


def filled(number: int, sizes: list[int]) -> list[bytes]:
    return [bytes([number]) * size for size in sizes]


@pytest.mark.parametrize("returns", ["request", "queue"])
def test_values_that_change_between_their_pieces(tmp_path: Path, returns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come as one version; what was there of another is gone."""
    monkeypatch.setattr("warpwell.kv.device.engine.LARGEST", 512)
    keys = list(range(6))
    with kv.create(tmp_path / "c") as store:
        store.put_many(keys, filled(1, [4000] * 6))
    with opened(tmp_path / "c", mode="r+", value_bytes=4096, returns=returns, queues=1, depth=32) as store:
        assert store.device_stats["piece_bytes"] == 512
        future = store.get_async(keys)
        end = time.monotonic() + 10
        while not future.done():
            assert time.monotonic() < end
            time.sleep(1e-3)
        # the first pieces have come, and nobody asks for the second ones before wait()
        sizes = [4000, 4096, 513, 100, 0]
        store.put_many(keys[:5], filled(2, sizes))
        store.delete(5)
        batch, found = future.wait()
        assert batch["size"].tolist()[:5] == sizes and found.tolist() == [True] * 5 + [False]
        for row, size in enumerate([*sizes, 0]):
            assert (batch["value"][row, :size] == 2).all() and not batch["value"][row, size:].any(), row
        assert busy(store) == 0


def test_kernels_read_values_that_somebody_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpwell.kv.device.engine.LARGEST", 512)
    keys = np.arange(20)
    with kv.create(tmp_path / "c") as store:
        store.put_many(keys, np.zeros((20, 2000), np.uint8))
    with opened(tmp_path / "c", mode="r+", value_bytes=2048) as store:
        stop = threading.Event()
        rows, sizes = arrays(20, 2000)
        for _ in range(2):  # the first launch compiles
            begin = time.monotonic()
            load.retrieve_rows[20](store, keys, rows, sizes)
        # a reader must find the time for four pieces between two writes, however busy the machine is
        pause = max(20e-3, time.monotonic() - begin)

        def write() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                store.put_many(keys, np.full((20, 2000), number & 0xFF, np.uint8))
                stop.wait(pause)

        thread = threading.Thread(target=write)
        thread.start()
        try:
            for _ in range(30):
                rows, sizes = arrays(20, 2000)
                load.retrieve_rows[20](store, keys, rows, sizes)
                assert (sizes == 2000).all() and (rows == rows[:, :1]).all()
        finally:
            stop.set()
            thread.join(30)


class EverOther:
    """A drive that tells of another version each time."""

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
        load.check_batch(*store.get_async(short).wait(), short, records, 6000)
        with pytest.raises(errors.MediumError, match="changed while it was read in pieces"):
            store.get_async(long).wait()
        rows, sizes = arrays(3, 6000)
        with pytest.raises(errors.MediumError, match="changed while it was read in pieces"):
            load.retrieve_long[3](store, load.words_of(long), rows, sizes)
        assert (sizes == -2).all() and busy(store) == 0
        load.check_batch(*store.get_async(short).wait(), short, records, 6000)


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
        assert store.device_stats["commands"] - commands < keys.size // 4  # those whose sets were full


@pytest.mark.parametrize("device", ["cpu", "interp"])
def test_values_of_several_pieces_come_into_the_cache(mixed: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpwell.kv.device.engine.LARGEST", 512)
    path, records, keys = mixed
    keys = keys[:200] if device == "cpu" else keys[:20]
    with opened(path, device, cache="16MiB", value_bytes=5000) as store:
        for _ in range(2):
            rows, sizes = arrays(len(keys), 5000)
            commands = store.device_stats["commands"]
            load.retrieve_long[len(keys)](store, load.words_of(keys), rows, sizes)
            load.check_rows(rows, sizes, keys, records)
            load.check_batch(*store.get_async(keys).wait(), keys, records, 5000)
        assert store.device_stats["commands"] - commands < len(keys) // 4


@pytest.mark.parametrize("kind", ["error", "lost"])
def test_a_value_whose_pieces_end_early_leaves_its_place_in_the_cache(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warpwell.kv.device.engine.LARGEST", 512)
    with kv.create(tmp_path / "c") as store:
        records = load.fill(store, range(6), [2000] * 6)
    faults: list[KeyValueFaulty] = []
    with opened(tmp_path / "c", cache="6KiB", value_bytes=2000, timeout=TIMEOUT, drive=drive(faults)) as store:
        assert store.device_stats["cache_records"] == 2
        for key in range(4):
            faults[0].configure(["ok", "ok", kind], repeat=False)
            lost = faults[0].counts["lost"]
            with time_passes(TIMEOUT, lambda lost=lost: faults[0].counts["lost"] > lost):
                with pytest.raises((errors.CorruptionError, errors.StallError)):
                    store.get_async([key]).wait()
        for _ in range(2):
            load.check_batch(*store.get_async([4]).wait(), [4], records, 2000)
        assert store.device_stats["hits"] == 1


def test_two_devices_on_one_controller(numbers: Any) -> None:
    path, records = numbers
    with opened(path) as first:
        second = opened(path, beside=first, cache="64KiB")
        futures = [s.get_async(np.arange(50)) for s in (first, second, second, first)]
        for future in futures:
            load.check_batch(*future.wait(), range(50), records, 512)
        with pytest.raises(errors.SharingError, match="close those first"):
            first.close()
        load.check_batch(*second.get_async([3]).wait(), [3], records, 512)
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
        with pytest.raises(errors.ArgumentError):  # without a device, too
            kv.open(path, **options)
    with opened(path) as store:
        load.check_batch(*store.get_async([3]).wait(), [3], records, 512)


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
        theirs, ours = train.DataLoader(host, **options), train.DataLoader(store, **options)
        for _ in range(2):
            pairs = list(zip(theirs, ours, strict=True))
            assert len(pairs) == 5
            for a, b in pairs:
                assert all((np.asarray(b[name]) == a[name]).all() for name in SCHEMA)
        part = iter(ours)
        next(part)
        resumed = train.DataLoader(store, **options)
        resumed.load_state_dict(ours.state_dict())
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
