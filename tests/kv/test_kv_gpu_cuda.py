"""Stores on a GPU: warps of 32 that share queues, lanes that diverge, few ids for many threads, and failures.

Every value contains its key. The same cases as in tests/kv/test_kv_device.py, with more threads.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness import kv_device as load

from lab.media import KeyValueFaulty
from warpwell import errors, kv

DEVICE = "cuda"
KEYS = 2000
THREADS = 10_000
SCHEMA = {"x": ("uint8", (8, 8)), "y": ("int64", ())}


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[bytes, bytes]]:
    path = tmp_path_factory.mktemp("kv") / "numbers.kv"
    with kv.create(path) as store:
        return path, load.fill(store, range(KEYS), [k % 257 for k in range(KEYS)])


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[bytes, bytes], list[bytes]]:
    folder = tmp_path_factory.mktemp("kv")
    keys = load.random_keys(5, 600)
    sizes = np.random.default_rng(6).choice([0, 1, 7, 8, 15, 16, 17, 511, 512, 513, 1500, 5000], 400)
    with kv.create(folder / "m.kv", shards=[folder / "s0", folder / "s1"]) as store:
        return folder / "m.kv", load.fill(store, keys[:400], sizes), keys


def opened(path: Path, **options: Any) -> Any:
    options = {"queues": 2, "depth": 64, "value_bytes": 256, "timeout": 20, **options}
    return kv.open(path, options.pop("mode", "r"), device=DEVICE, **options)


def arrays(count: int, room: int = 256) -> tuple[Any, Any]:
    return np.zeros((count, room), np.uint8), np.full(count, -99, np.int64)


@pytest.mark.parametrize("returns", ["request", "queue"])
@pytest.mark.parametrize("cache", [None, "1MiB"])
def test_keys_of_all_lengths(mixed: Any, cache: str | None, returns: str) -> None:
    path, records, keys = mixed
    rng = np.random.default_rng(1)
    with opened(path, cache=cache, value_bytes=2000, returns=returns) as store:
        for count in (1, 31, 32, 33, 5000):
            requested = [keys[k] for k in rng.integers(0, len(keys), count)]
            for _ in range(2):
                load.check_keys(store, requested, records, 2000)
        assert store._engine.pairs.in_use() == 0
        assert (store.device_stats["hits"] > 0) == (cache is not None)


def test_values_of_a_batch_without_a_schema(mixed: Any) -> None:
    from numba import cuda

    path, records, keys = mixed
    with opened(path) as store:
        for requested in (keys, keys[:1], []):
            values, found = store.get_async(requested).wait()
            contents, offsets = np.asarray(values.values).tobytes(), np.asarray(values.offsets).tolist()
            assert np.asarray(found).tolist() == [key in records for key in requested]
            assert [contents[offsets[k] : offsets[k + 1]] for k in range(len(requested))] == [
                records.get(key, b"") for key in requested
            ]
        numbers = np.frombuffer(b"".join(key for key in keys if len(key) == 8), np.int64)
        values, found = store.get_async(cuda.to_device(numbers)).wait()
        expected = [records.get(key.tobytes(), b"") for key in numbers]
        assert np.asarray(values.values).tobytes() == b"".join(expected)


@pytest.mark.parametrize("piece", [512, 1024])
def test_values_larger_than_a_piece(mixed: Any, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpwell.kv.device.engine.LARGEST", piece)
    path, records, keys = mixed
    with opened(path, value_bytes=6000) as store:
        load.check_keys(store, keys, records, 6000)


@pytest.mark.parametrize("options", [{}, {"cache": "4MiB", "value_bytes": "20KiB"}, {"returns": "queue"}])
def test_kernels_read_fields_by_name(tmp_path: Path, options: dict[str, Any]) -> None:
    records = load.ragged_records(300)
    with kv.create(tmp_path / "a.kv", schema=load.RAGGED) as store:
        store.put_many(np.arange(300), records)
    keys = np.arange(310)
    with opened(tmp_path / "a.kv", **options) as store:
        for nbytes in (18_200, 18_200, 3001):
            rows, sizes = arrays(310, nbytes)
            out = np.zeros((310, 9))
            load.reduce_fields[310](store, keys, rows, sizes, out)
            assert (sizes[300:] == -1).all()
            for k in np.flatnonzero(sizes[:300] <= nbytes).tolist():
                assert out[k].tolist() == load.reduced(records, k)


@pytest.mark.parametrize("cache", [None, "1MiB"])
def test_a_schema_and_its_arrays(tmp_path: Path, cache: str | None) -> None:
    x = np.random.default_rng(0).integers(0, 255, (500, 8, 8), dtype=np.uint8)
    with kv.create(tmp_path / "a", schema=SCHEMA) as store:
        store.put_many(np.arange(500), {"x": x, "y": np.arange(500) * 3})
    with opened(tmp_path / "a", cache=cache) as store:
        keys = np.random.default_rng(1).integers(-20, 520, 3000)
        host, host_found = store.get_many(keys)
        batches = [store.get_async(keys).wait() for _ in range(3)]
        for batch, found in batches:
            assert (np.asarray(found) == host_found).all()
            assert all((np.asarray(batch[name]) == host[name]).all() for name in SCHEMA)
        shapes = {name: batches[0][0][name].shape for name in SCHEMA}
        assert shapes == {"x": (3000, 8, 8), "y": (3000,)}
        # memory that is still held is not used for another batch
        assert len({batch["y"].__cuda_array_interface__["data"][0] for batch, _ in batches}) == 3


def test_gathered_batches(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 255, (6000, 8, 8), dtype=np.uint8)
    with kv.create(tmp_path / "a", schema=SCHEMA) as store:
        store.put_many(np.arange(6000), {"x": x, "y": np.arange(6000) * 3})
    rng = np.random.default_rng(4)
    with opened(tmp_path / "a") as store:
        for count in (0, 1, 511, 513, 20_000):
            keys = rng.integers(0, 6100, count)
            for _ in range(8):  # the memory of a dropped batch is used again while kernels may still read it
                store.get_async(keys[::-1].copy())
                future = store.get_async(keys)
                before = keys.copy()
                keys[:] = -1  # the caller may change its array
                batch, found = future.wait()
                assert future.done() and future.wait()[0] is batch
                keys[:] = before
                inside = keys < 6000
                assert (np.asarray(found) == inside).all()
                assert (np.asarray(batch["y"]) == np.where(inside, 3 * keys, 0)).all()
                assert (np.asarray(batch["x"])[inside] == x[keys[inside]]).all()
        futures = [store.get_async(rng.integers(0, 6000, 20_000)) for _ in range(4)]
        closed = False
        try:
            store.close()
            closed = True
        except errors.SharingError:  # a batch in flight prevents the close, as a running launch does
            pass
        for future in futures:
            future.wait()
        assert all(future.done() for future in futures)
        if not closed:
            store.close()
    with pytest.raises(errors.ClosedError):
        store.get_async([1])


def test_a_damaged_value_of_a_gathered_batch(tmp_path: Path) -> None:
    with kv.create(tmp_path / "a", schema=SCHEMA) as store:
        store.put_many(np.arange(3000), {"x": np.zeros((3000, 8, 8), np.uint8), "y": np.arange(3000)})
        location = store._records.entries()[1][1234]
    segment = next((tmp_path / "a").glob("*.val"))
    with open(segment, "r+b") as file:
        file.seek((int(location[0]) & (1 << 33) - 1) * 64)
        file.write(b"\xff")
    with opened(tmp_path / "a") as store:
        future = store.get_async(np.arange(3000))
        for _ in range(2):
            with pytest.raises(errors.CorruptionError, match="is damaged"):
                future.wait()
        future.wait_until_ended()
        assert sum(_readable(store, first) for first in range(0, 3000, 10)) == 299


def _readable(store: Any, first: int) -> bool:
    try:
        store.get_async(np.arange(first, first + 10)).wait()
    except errors.CorruptionError:
        return False
    return True


def test_ragged_fields_of_a_batch(tmp_path: Path) -> None:
    from numba import cuda

    rng = np.random.default_rng(3)
    images = [rng.integers(0, 256, n, np.uint8) for n in rng.integers(0, 3000, 400)]
    boxes = [rng.random((n, 4), np.float32) for n in rng.integers(0, 5, 400)]
    schema = {"image": ("uint8", (None,)), "box": ("float32", (None, 4)), "name": "str", "label": "int64"}
    with kv.create(tmp_path / "a", schema=schema) as store:
        names = [f"ü{k}" for k in range(400)]
        store.put_many(np.arange(400), {"image": images, "box": boxes, "name": names, "label": np.arange(400)})
    keys = rng.integers(0, 410, 1000)
    with opened(tmp_path / "a") as store:
        expected, expected_found = store.get_many(keys)
        for batch_keys in (keys, cuda.to_device(keys)):
            batch, found = store.get_async(batch_keys).wait()
            assert (np.asarray(found) == expected_found).all()
            assert (np.asarray(batch["label"]) == expected["label"]).all()
            for name in ("image", "box", "name"):
                assert (np.asarray(batch[name].offsets) == expected[name].offsets).all()
                assert (np.asarray(batch[name].values) == expected[name].values).all()
                assert batch[name].values.shape == expected[name].values.shape
        batch, _ = store.get_async([1, 2], fields=["image"]).wait()
        assert list(batch) == ["image"]
        assert store.get_async(keys[:0]).wait()[0]["image"].offsets.shape == (1,)
        with pytest.raises(errors.ArgumentError, match="int64"):
            store.get_async(cuda.to_device(keys.astype(np.int32)))


def test_keys_in_gpu_memory(tmp_path: Path) -> None:
    from numba import cuda

    with kv.create(tmp_path / "a", schema={"y": "int64"}) as store:
        store.put_many(np.arange(KEYS), {"y": 3 * np.arange(KEYS)})
    keys = np.random.default_rng(2).integers(0, KEYS + 50, 4000)
    with opened(tmp_path / "a", cache="1MiB") as store:
        for _ in range(3):
            batch, found = store.get_async(cuda.to_device(keys)).wait()
            assert (np.asarray(found) == (keys < KEYS)).all()
            assert (np.asarray(batch["y"]) == np.where(keys < KEYS, 3 * keys, 0)).all()
        assert store.get_async(cuda.to_device(keys[:0])).wait()[1].shape == (0,)
        with pytest.raises(errors.ArgumentError, match="int64"):
            store.get_async(cuda.to_device(keys.astype(np.int32)))
        with pytest.raises(errors.ArgumentError, match="int64"):
            store.get_async(cuda.to_device(keys)[::2])


@pytest.mark.parametrize("returns", ["request", "queue"])
@pytest.mark.parametrize("cache", [None, "64KiB"])
@pytest.mark.parametrize(("queues", "depth"), [(1, 4), (3, 64)])
def test_many_threads(numbers: Any, queues: int, depth: int, cache: str | None, returns: str) -> None:
    path, records = numbers
    keys = np.random.default_rng(3).integers(-50, KEYS + 50, THREADS)
    with opened(path, cache=cache, queues=queues, depth=depth, returns=returns) as store:
        for kernel in (load.retrieve_rows, load.part_ways, load.hold):
            rows, sizes = arrays(THREADS)
            kernel[THREADS](store, keys, rows, sizes)
            retrieved = np.arange(THREADS)
            retrieved = retrieved[retrieved % 5 != 4] if kernel is load.part_ways else retrieved
            load.check_rows(rows[retrieved], sizes[retrieved], keys[retrieved].tolist(), records)
        found = np.zeros(THREADS, np.int64)
        load.exist[THREADS](store, keys, found)
        assert (found == ((keys >= 0) & (keys < KEYS))).all()
        assert store._engine.pairs.in_use() == 0
        assert (store.device_stats["hits"] > 0) == (cache is not None)


def test_tickets_that_are_none(numbers: Any) -> None:
    forged = [-1, -(2**63), 0, 1, 7, 8, 0xFFFF, 2 << 16, 0xFFFFFFFF, 1 << 32, (1 << 32) + 3, 2**63 - 1]
    tickets = np.resize(np.array(forged, np.int64), 96)
    with opened(numbers[0]) as store:
        rows, _ = arrays(96)
        results = np.zeros((96, 3), np.int64)
        with pytest.raises(errors.KernelError, match="ticket"):
            load.forge[96](store, tickets, rows, results)
        assert (results[:, 0] > 0).all() and (results[:, 1:] == -2).all() and not rows.any()
        assert store._engine.pairs.in_use() == 0


def test_a_ticket_is_taken_once(numbers: Any) -> None:
    path, records = numbers
    keys = np.arange(20)
    with opened(path) as store:
        rows, sizes = arrays(20)
        again = np.zeros(20, np.int64)
        with pytest.raises(errors.KernelError, match="once"):
            load.take_twice[20](store, keys, rows, sizes, again)
        load.check_rows(rows, sizes, keys.tolist(), records)
        assert (again == -2).all() and store._engine.pairs.in_use() == 0


def test_a_drive_that_stops_and_goes_on(numbers: Any) -> None:
    path, records = numbers
    faults: list[KeyValueFaulty] = []
    keys = np.arange(500)
    with opened(path, timeout=0.5, drive=load.drive(faults)) as store:
        rows, sizes = arrays(500)
        states = np.zeros(500, np.int64)
        faults[0].stop()
        start = time.monotonic()
        with pytest.raises(errors.StallError):
            load.retrieve_rows[500](store, keys, rows, sizes)
        assert (sizes == -2).all()
        faults[0].resume()
        assert store._engine.quiet(10)
        faults[0].stop()
        with pytest.raises(errors.StallError):
            load.poll_to_the_end[500](store, keys, states)
        assert set(states) <= {-3, 0x7FFF} and time.monotonic() - start < 60
        faults[0].resume()
        assert store._engine.quiet(10)
        load.retrieve_rows[500](store, keys, rows, sizes)
        load.check_rows(rows, sizes, keys.tolist(), records)


@pytest.mark.parametrize("kernel", [load.retrieve_for, load.poll_for], ids=["retrieve", "poll"])
def test_a_lost_command_while_others_are_answered(numbers: Any, kernel: Any) -> None:
    path, records = numbers
    faults: list[KeyValueFaulty] = []
    keys = np.arange(256)
    with opened(path, timeout=0.4, depth=256, drive=load.drive(faults)) as store:
        rows, sizes = arrays(256)
        load.retrieve_rows[256](store, keys, rows, sizes)
        results = np.zeros((256, 3), np.int64)
        kernel[256](store, keys, rows, results, 10**7)  # compiles
        assert results[:, 1].sum() == 0
        faults[0].configure(["ok"] * 3000 + ["lost"], repeat=False)
        results[:] = 0
        with pytest.raises(errors.StallError):
            kernel[256](store, keys, rows, results, 4 * 10**9)
        assert faults[0].counts["lost"] == results[:, 1].sum() == 1
        # the lane's warp also continues, after the lane's time-outs
        assert 1.2 < results[results[:, 1] > 0, 2][0] / 1e9 < 3.2 and results[:, 0].min() > 5
        assert store._engine.pairs.in_use() == 1
        load.retrieve_rows[256](store, keys, rows, sizes)
        load.check_rows(rows, sizes, keys.tolist(), records)


def test_kernels_read_values_that_somebody_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpwell.kv.device.engine.LARGEST", 512)
    keys = np.arange(200)
    with kv.create(tmp_path / "c") as store:
        store.put_many(keys, np.zeros((200, 2000), np.uint8))
    with opened(tmp_path / "c", mode="r+", value_bytes=2048) as store:
        stop = threading.Event()

        def write() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                store.put_many(keys, np.full((200, 2000), number & 0xFF, np.uint8))
                time.sleep(1e-3)

        thread = threading.Thread(target=write)
        thread.start()
        try:
            for _ in range(50):
                rows, sizes = arrays(200, 2000)
                load.retrieve_rows[200](store, keys, rows, sizes)
                assert (sizes == 2000).all() and (rows == rows[:, :1]).all()
        finally:
            stop.set()
            thread.join(30)


def test_threads_that_share_a_buffer_leave_no_wrong_value_in_the_cache(numbers: Any) -> None:
    path, records = numbers
    keys = np.arange(KEYS)
    with opened(path, cache="16MiB", depth=1024) as store:
        rows, sizes = arrays(KEYS)
        load.share_a_row[KEYS](store, keys, rows, sizes)
        commands = store.device_stats["commands"]
        load.retrieve_rows[KEYS](store, keys, rows, sizes)
        load.check_rows(rows, sizes, keys.tolist(), records)
        assert store.device_stats["commands"] - commands < KEYS // 4


def test_values_of_several_pieces_come_into_the_cache(mixed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpwell.kv.device.engine.LARGEST", 512)
    path, records, keys = mixed
    keys = keys[:400]
    with opened(path, cache="32MiB", value_bytes=5000) as store:
        for _ in range(2):
            commands = store.device_stats["commands"]
            load.check_keys(store, keys, records, 5000)
        assert store.device_stats["commands"] - commands < len(keys) // 4
