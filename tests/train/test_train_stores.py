"""Loaders and data sets over stores on disk: records of both kinds, faults, pickling, forks."""

import multiprocessing
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.until import HANG_SECONDS

import warpwell as ww
from warpwell.errors import (
    ArgumentError,
    ClosedError,
    CorruptionError,
    ForkError,
    IndexRangeError,
    KeyMissingError,
    SchemaError,
    SharingError,
)
from warpwell.train.dataset import DecodeError

# The threads of the parent do nothing that a child here waits for.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

N = 500


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of N records with a schema and gaps between the keys."""
    folder = tmp_path_factory.mktemp("kv") / "train.kv"
    keys = 7 * np.arange(N) - 100
    with ww.kv.create(folder, schema={"x": ("float32", (3, 5)), "y": ("uint8", ()), "id": ("int64", ())}) as store:
        x = np.arange(15 * N, dtype=np.float32).reshape(N, 3, 5)
        store.put_many(keys, {"x": x, "y": (keys & 0xFF).astype(np.uint8), "id": keys})
    return folder


@pytest.fixture
def store(path: Path) -> Iterator[Any]:
    with ww.kv.open(path) as opened:
        yield opened


def check(record: Any, k: int) -> None:
    assert record["id"] == 7 * k - 100 and record["y"] == record["id"] & 0xFF
    assert np.array_equal(record["x"], np.arange(15 * k, 15 * k + 15, dtype=np.float32).reshape(3, 5))


# -- loaders ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_deliver_one_order_of_a_store(store: Any, world: int) -> None:
    order = ww.kv.Permutation(N, 9).slice(0, N)
    loaders = [ww.train.DataLoader(store, 32 // world, seed=9, rank=r, world_size=world) for r in range(world)]
    at = 0
    for parts in zip(*loaders, strict=True):
        batch = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        for k, row in enumerate(order[at : at + 32]):
            check({name: field[k] for name, field in batch.items()}, int(row))
        assert all(part["x"].flags.c_contiguous and part["x"].shape[1:] == (3, 5) for part in parts)
        at += len(batch["id"])
    assert at == N


def test_batches_are_not_overwritten_by_later_ones(store: Any) -> None:
    batches = list(ww.train.DataLoader(store, 10, seed=2))
    order = ww.kv.Permutation(N, 2).slice(0, N)
    assert np.array_equal(np.concatenate([batch["id"] for batch in batches]), 7 * order - 100)
    assert np.array_equal(np.concatenate([batch["x"] for batch in batches])[:, 0, 0], 15 * order.astype(np.float32))


def test_a_schema_of_one_field(tmp_path: Path) -> None:
    with ww.kv.create(tmp_path / "store.kv", schema={"x": ("float64", (4,))}) as store:
        x = np.arange(400.0).reshape(100, 4)
        store.put_many(np.arange(100), {"x": x})
        batches = list(ww.train.DataLoader(store, 10, shuffle=False))
    assert all(batch["x"].flags.c_contiguous and batch["x"].flags.writeable for batch in batches)
    assert np.array_equal(np.concatenate([batch["x"] for batch in batches]), x)


def test_batches_leave_by_dlpack(store: Any) -> None:
    batch = next(iter(ww.train.DataLoader(store, 10)))
    assert all(np.array_equal(np.from_dlpack(field), field) for field in batch.values())
    assert all(field.flags.writeable for field in batch.values())


def test_a_batch_of_no_rows_has_its_shapes(store: Any) -> None:
    loader = ww.train.DataLoader(store, 4, keys=[-100], rank=0, world_size=2)
    (batch,) = list(loader)
    assert {name: field.shape for name, field in batch.items()} == {"x": (0, 3, 5), "y": (0,), "id": (0,)}


def test_values_without_a_schema_come_as_bytes(tmp_path: Path) -> None:
    keys = [f"key {k}" for k in range(40)]
    with ww.kv.create(tmp_path / "text.kv") as store:
        store.put_many(keys, [k.encode() * 3 for k in keys])
        loader = ww.train.DataLoader(store, 16, seed=1)
        got = [value for batch in loader for value in batch]
        named = [store.list()[k].decode() for k in ww.kv.Permutation(40, 1).slice(0, 40)]
        assert got == [name.encode() * 3 for name in named]
        state = loader.state_dict()
        store.put("another", b"")
        with pytest.raises(ArgumentError, match="other keys"):
            ww.train.DataLoader(store, 16).load_state_dict(state)
        assert len(ww.train.Dataset(store)) == 41 and ww.train.Dataset(store, keys=keys)[3] == b"key 3" * 3


def test_a_key_that_was_deleted_is_named(tmp_path: Path) -> None:
    with ww.kv.create(tmp_path / "store.kv") as store:
        store.put_many(np.arange(30), [b"v"] * 30)
        loader, dataset = ww.train.DataLoader(store, 10, shuffle=False), ww.train.Dataset(store)
        del store[12]
        with pytest.raises(KeyMissingError, match=r"key 12 .1 of a batch of 10") as raised:
            list(loader)
        assert raised.value.key == (12).to_bytes(8, "little")
        with pytest.raises(KeyMissingError, match=r"key 12 .1 of a batch of 2"):
            dataset.__getitems__([1, 12])


def test_damage_on_disk_reaches_the_loop(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "damaged.kv"
    with ww.kv.open(path) as source, ww.kv.create(copy, schema=source.schema) as store:
        batch, _ = source.get_many(source.keys_array())
        store.put_many(source.keys_array(), batch)
    values = next(copy.rglob("*.val"))  # damage this file, not the journal, which also has the values of small commits
    with open(values, "r+b") as file:
        # The float32 items of record 300 occur only once in the file.
        at = values.read_bytes().index(np.arange(4500, 4510, dtype=np.float32).tobytes())
        file.seek(at)
        file.write(b"\xff")
    with ww.kv.open(copy) as store:
        count = 0
        with pytest.raises(CorruptionError):
            for _ in ww.train.DataLoader(store, 50, shuffle=False):
                count += 1
        assert count == 6


def test_a_store_that_is_closed_meanwhile(path: Path) -> None:
    store = ww.kv.open(path)
    iterator = iter(ww.train.DataLoader(store, 10, prefetch=2))
    next(iterator)
    store.close()
    with pytest.raises(ClosedError):
        for _ in iterator:
            pass
    assert next(iterator, None) is None


def test_many_iterations_share_few_threads(store: Any) -> None:
    before = threading.active_count()
    for _ in range(100):
        for _ in ww.train.DataLoader(store, 16):
            break
    assert threading.active_count() <= before + 4


# -- data sets ----------------------------------------------------------------------------------------------


def test_a_dataset_is_a_sequence(store: Any) -> None:
    dataset = ww.train.Dataset(store)
    assert len(dataset) == N
    for index in (0, 1, N - 1, np.int64(17)):
        check(dataset[index], int(index))
    check(dataset[-1], N - 1)
    check(dataset[-N], 0)
    assert dataset[3]["y"].shape == () and isinstance(dataset[3]["y"], np.uint8)
    records = dataset.__getitems__([5, 499, 5, -500])
    for record, k in zip(records, (5, 499, 5, 0), strict=True):
        check(record, k)
    assert len(dataset.__getitems__([])) == 0
    for index in (N, -N - 1):
        with pytest.raises(IndexRangeError, match=f"index {index} of a dataset of {N}"):
            dataset[index]
    for odd in (slice(0, 2), 1.7, "a", None):
        with pytest.raises(ArgumentError, match="whole number"):
            dataset[odd]  # type: ignore[index]
    for lists in ([True, False], np.array([True, False]), np.array([[1, 2], [3, 4]]), [np.array([1])], 5, None):
        with pytest.raises(ArgumentError, match="whole number"):
            dataset.__getitems__(lists)
    for far in ([2**70], np.array([2**64 - 1], np.uint64), iter([N])):
        with pytest.raises(IndexRangeError, match="of a dataset"):
            dataset.__getitems__(far)
    assert repr(dataset) == f"<Dataset of {store.path}: {N} records of x, y, id>" and dataset.store is store
    for no_store in (None, store.path):
        with pytest.raises(ArgumentError, match=r"kv\.open"):
            ww.train.Dataset(no_store)
    assert sum(1 for _ in dataset) == N  # Python iterates with __getitem__ until IndexError


def fetch_as_torch_does(dataset: Any, batch_size: int) -> list[Any]:
    """Fetch as a worker of PyTorch's DataLoader does: one call per batch of indices, then stack the samples."""
    out = []
    for first in range(0, len(dataset), batch_size):
        samples = dataset.__getitems__(list(range(first, min(first + batch_size, len(dataset)))))
        out.append({name: np.stack([sample[name] for sample in samples]) for name in samples[0]})
    return out


def send_digest(dataset: Any, connection: Any) -> None:
    try:
        own = dataset.store
        connection.send((sum(float(b["x"].sum()) for b in fetch_as_torch_does(dataset, 64)), own.closed, os.getpid()))
    except BaseException as error:
        connection.send(error)
        raise


@pytest.mark.quick("fork")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_dataset_in_workers(store: Any, method: str) -> None:
    dataset = ww.train.Dataset(store)
    check(dataset[0], 0)
    expected = sum(float(b["x"].sum()) for b in fetch_as_torch_does(dataset, 64))
    context = multiprocessing.get_context(method)
    pairs = [context.Pipe(duplex=False) for _ in range(2)]
    workers = [context.Process(target=send_digest, args=(dataset, sending)) for _, sending in pairs]
    for worker in workers:
        worker.start()
    for worker, (receiving, _) in zip(workers, pairs, strict=True):
        assert receiving.poll(HANG_SECONDS), "no answer from a worker"
        assert receiving.recv() == (expected, False, worker.pid)
        worker.join(HANG_SECONDS)
        assert worker.exitcode == 0
    check(dataset[7], 7)


def test_a_forked_worker_goes_on_with_the_store(store: Any) -> None:
    dataset = ww.train.Dataset(store)
    check(dataset[0], 0)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            check(dataset[5], 5)
            code = 0 if dataset.store is store else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert dataset.store is store


def test_a_dataset_is_pickled_without_its_store(store: Any) -> None:
    data = pickle.dumps(ww.train.Dataset(store, keys=[-100, 600]))
    copy = pickle.loads(data)
    assert len(copy) == 2 and len(data) < 2000
    check(copy[1], 100)
    assert copy.store is not store
    copy.store.close()


def test_a_writer_stays_in_its_process(tmp_path: Path) -> None:
    with ww.kv.create(tmp_path / "store.kv") as store:
        store.put(1, b"one")
        dataset = ww.train.Dataset(store)
        assert dataset[0] == b"one"
        with pytest.raises(ForkError, match="mode='r'"):
            pickle.dumps(dataset)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                dataset[0]
            except ForkError:
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert issubclass(ForkError, SharingError)


# -- keys in batches ------------------------------------------------------------------------------------------


def test_batches_have_the_keys_of_their_records(tmp_path: Path, store: Any) -> None:
    for batch in ww.train.DataLoader(store, 64, seed=1, key_field="key"):
        assert list(batch) == ["key", "x", "y", "id"] and np.array_equal(batch["key"], batch["id"])
    dataset = ww.train.Dataset(store, key_field="key")
    assert dataset.names == ["key", "x", "y", "id"] and dataset[3]["key"] == 7 * 3 - 100
    rows = ww.train.Dataset({"x": np.arange(10) * 2}, keys=[7, 3], key_field="row")
    assert rows.take([0, 1])["row"].tolist() == [7, 3] and rows.take([-1])["x"].tolist() == [6]
    values = {name: name.encode() * 3 + b"\0" for name in ("a", "b", "c")}
    with ww.kv.create(tmp_path / "text.kv") as text:
        text.update(values)
        assert text.get_many(["b"])[0] == [b"bbb\0"]
        records = ww.train.Dataset(text, key_field="name").__getitems__([2, 0])
        assert records.fields == {"name": [b"c", b"a"], "value": [b"ccc\0", b"aaa\0"]}  # type: ignore[union-attr]
        assert records[1] == {"name": b"a", "value": b"aaa\0"}
    for name in ("x", 3):
        with pytest.raises(ArgumentError, match="key_field"):
            ww.train.Dataset(store, key_field=name)  # type: ignore[arg-type]


def test_a_dataset_of_no_fields(store: ww.kv.Store) -> None:
    with pytest.raises(ArgumentError, match=r"columns= is empty: name some of \["):
        ww.train.Dataset(store, columns=[])


def test_a_dataset_of_some_rows_of_arrays_checks_them() -> None:
    with pytest.raises(IndexRangeError, match="index 10 of a dataset of 10"):
        ww.train.Dataset({"x": np.arange(10)}, keys=[3, 10]).take([0, 1])
    with pytest.raises(ArgumentError, match="columns of a table"):
        ww.train.Dataset({"x": np.arange(10)}, columns=["x"])


# -- records that cannot be read ------------------------------------------------------------------------------


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A store of 100 values; the value of key 77 is damaged on disk."""
    path = tmp_path / "damaged.kv"
    with ww.kv.create(path) as store:
        store.put_many(np.arange(100), [bytes([k]) * 1000 for k in range(100)])
    segment = next(path.glob("*.val"))
    data = bytearray(segment.read_bytes())
    data[data.index(bytes([77]) * 1000) + 5] ^= 1
    segment.write_bytes(data)
    return path


def test_a_damaged_record_is_skipped_and_named(damaged: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="warpwell")
    with ww.kv.open(damaged) as store:
        with pytest.raises(CorruptionError):
            list(ww.train.DataLoader(store, 16))
        loader = ww.train.DataLoader(store, 16, seed=3, on_error="skip", key_field="key")
        expected = [k for k in ww.kv.Permutation(100, 3, 0).slice(0, 100).tolist() if k != 77]
        for _ in range(2):
            batches = list(loader)
            assert sum(len(batch["value"]) for batch in batches) == 99 and loader.skipped == [77]
            assert all(v == bytes([k]) * 1000 for b in batches for k, v in zip(b["key"], b["value"], strict=True))
            if loader.epoch == 1:
                assert [k for batch in batches for k in batch["key"].tolist()] == expected
        assert caplog.text.count("key 77") == 1
        state = loader.state_dict()
    with ww.kv.open(damaged, mode="r+") as store:
        del store[77]
        with pytest.raises(ArgumentError, match='on_error="skip"'):
            ww.train.DataLoader(store, 16).load_state_dict(state)
        again = ww.train.DataLoader(store, 16, on_error="skip", keys=range(100))
        again.load_state_dict(state)
        assert again.skipped == [77] and sum(map(len, again)) == 99


def test_keys_of_bytes_that_are_skipped_are_in_the_state(tmp_path: Path) -> None:
    with ww.kv.create(tmp_path / "s.kv") as store:
        store.update({"a": b"1", "b": b"2", "c": b"3"})
        loader = ww.train.DataLoader(store, 3, shuffle=False, on_error="skip")
        del store["b"]
        assert list(loader) == [[b"1", b"3"]] and loader.skipped == [b"b"]
        state = loader.state_dict()
        assert state["skipped"] == ["62"]
        loader.load_state_dict(state)
        assert loader.skipped == [b"b"]
        store.clear()
        with pytest.raises(KeyMissingError):  # no record of the batch can be read
            list(loader)
    with pytest.raises(ArgumentError, match="on_error"):
        ww.train.DataLoader({"x": np.arange(3)}, on_error="ignore")


# -- ragged fields ---------------------------------------------------------------------------------------------


@pytest.fixture
def ragged(tmp_path: Path) -> Path:
    """A store of 60 records of different lengths."""
    schema = {"image": ("uint8", (None,)), "label": "int64", "name": "str", "boxes": ("float32", (None, 4))}
    with ww.kv.create(tmp_path / "ragged.kv", schema=schema) as store:
        images, boxes = [ragged_image(k) for k in range(60)], [np.full((k % 3, 4), k, np.float32) for k in range(60)]
        store.put_many(np.arange(60), {"image": images, "label": np.arange(60), "name": NAMES, "boxes": boxes})
    return tmp_path / "ragged.kv"


NAMES = [f"é{k}" for k in range(60)]


def ragged_image(k: int) -> np.ndarray:
    return np.full(k * 7 % 23, k, np.uint8)


def decode_image(record: dict[str, Any]) -> dict[str, Any]:
    return {"largest": record["image"].max(initial=0), "name": record["name"].upper()}


def test_batches_of_ragged_fields(ragged: Path) -> None:
    with ww.kv.open(ragged) as store:
        loader = ww.train.DataLoader(store, 16, seed=2, key_field="key")
        batches = list(loader)
        for batch in batches:
            assert list(batch) == ["key", "image", "label", "name", "boxes"]
            for i, k in enumerate(batch["key"].tolist()):
                assert np.array_equal(batch["image"][i], ragged_image(k)) and batch["name"][i] == NAMES[k]
                assert batch["boxes"][i].shape == (k % 3, 4) and (batch["boxes"][i] == k).all()
        dataset = ww.train.Dataset(store, columns=["label", "image"])
        assert set(dataset.names) == {"label", "image"} and set(dataset[5]) == {"label", "image"}
        assert np.array_equal(dataset[5]["image"], ragged_image(5))
        assert [len(image) for image in dataset.take([3, 0])["image"]] == [21, 0]
        decoded = ww.train.DataLoader(store, 16, decode=decode_image, shuffle=False)
        assert np.concatenate([b["largest"] for b in decoded]).tolist() == [k if k * 7 % 23 else 0 for k in range(60)]
        with pytest.raises(ArgumentError, match="columns"):
            ww.train.Dataset({"x": np.arange(3)}, columns=["x"])
        with pytest.raises(SchemaError, match="'jpeg'"):
            ww.train.Dataset(store, columns=["jpeg"])


def test_columns_of_a_store_without_a_schema(damaged: Path) -> None:
    with ww.kv.open(damaged) as store, pytest.raises(ArgumentError, match="has no fields"):
        ww.train.Dataset(store, columns=["value"])


# -- fields that were added later --------------------------------------------------------------------------------


def test_fields_of_several_stores_and_arrays_are_joined(tmp_path: Path, store: Any) -> None:
    with ww.kv.create(tmp_path / "scores.kv", schema={"score": ("float32", ())}) as scores:
        keys = store.keys_array()[::-1]  # another order
        scores.put_many(keys, {"score": keys.astype(np.float32) / 2})
    with ww.kv.create(tmp_path / "text.kv") as text:
        text.put_many(np.arange(600), [b"%d" % k for k in range(600)])
    y = np.arange(600) ** 2
    with ww.kv.open(tmp_path / "scores.kv") as scores, ww.kv.open(tmp_path / "text.kv") as text:
        chosen = [40, 47, 5]
        dataset = ww.train.Dataset(store, join=[scores, text, {"square": y}], keys=chosen, key_field="key")
        assert dataset.names == ["key", "x", "y", "id", "score", "value", "square"] and dataset.store is store
        batch = dataset.take([2, 0])
        assert batch["id"].tolist() == [5, 40] and batch["score"].tolist() == [2.5, 20]
        assert batch["value"] == [b"5", b"40"] and batch["square"].tolist() == [25, 1600]
        copy = pickle.loads(pickle.dumps(dataset))
        assert copy[0]["square"] == 1600 and copy[0]["value"] == b"40"
        copy.store.close()
        loader = ww.train.DataLoader(store, 2, join=[scores], seed=1)
        assert all(np.array_equal(b["id"] / 2, b["score"]) for b in loader)
        rows = ww.train.Dataset({"square": y}, join=[text])
        assert rows[7] == {"square": 49, "value": b"7"} and rows.store is text


def test_keys_that_a_joined_part_lacks_are_named(tmp_path: Path, store: Any) -> None:
    with ww.kv.create(tmp_path / "scores.kv", schema={"score": ("float32", ())}) as scores:
        scores.put_many([40, 54], {"score": np.ones(2, np.float32)})
        with pytest.raises(KeyMissingError, match=r"scores\.kv does not have key 47") as raised:
            ww.train.Dataset(store, join=[scores], keys=[40, 47]).take([0, 1])
        assert raised.value.key == (47).to_bytes(8, "little")
        loader = ww.train.DataLoader(store, 3, join=[scores], keys=[40, 47, 54], on_error="skip", shuffle=False)
        assert [batch["id"].tolist() for batch in loader] == [[40, 54]] and loader.skipped == [47]
        scores.put_many(["name"], {"score": np.ones(1, np.float32)})
        for keys, named in (([40, 48], 48), ([-100, 5], -100), (["name"], "b'name'"), (range(0, 100, 10), 90)):
            with pytest.raises(KeyMissingError, match=f"row for key {named}: 48 rows have the keys 0 to 47"):
                ww.train.Dataset(store, join=[{"z": np.arange(48)}], keys=keys)
        for same in (store, {"x": np.arange(500)}):
            with pytest.raises(ArgumentError, match="'x' is in two"):
                ww.train.Dataset(store, join=[same])
        with pytest.raises(ArgumentError, match="a list of stores"):
            ww.train.Dataset(store, join=scores)  # type: ignore[arg-type]


# -- decoding --------------------------------------------------------------------------------------------------


def half(record: dict[str, Any]) -> dict[str, Any]:
    """Decode a record of the store of `path`."""
    if record["id"] == 33:
        raise ZeroDivisionError(f"bad {record['id']}")
    return {"half": record["x"] / 2, "name": f"r{record['id']}", "part": np.arange(record["id"] % 3)}


def test_records_are_decoded_in_batches(store: Any) -> None:
    dataset = ww.train.Dataset(store, decode=half, key_field="key", keys=[-100, 40, 47])
    batch = dataset.take([2, 0])
    x = np.arange(15 * N, dtype=np.float32).reshape(N, 3, 5)
    assert list(batch) == ["key", "half", "name", "part"] and batch["key"].tolist() == [47, -100]
    assert np.array_equal(batch["half"], x[[21, 0]] / 2) and batch["half"].dtype == np.float32
    assert batch["name"] == ["r47", "r-100"] and [len(part) for part in batch["part"]] == [2, 2]
    assert batch["part"].shape == (2, 2)
    mixed = dataset.__getitems__([0, 1, 2])
    assert [len(part) for part in mixed.fields["part"]] == [2, 1, 2]  # type: ignore[union-attr]
    assert dataset[1]["name"] == "r40" and dataset[1]["key"] == 40
    loader = ww.train.DataLoader(dataset, 2, seed=4)
    named = {name for batch in loader for name in batch["name"]}
    assert named == {"r-100", "r40", "r47"}
    assert ww.train.Dataset(store, decode=lambda record: record["id"], keys=[40, 47]).take([0, 1]) == [40, 47]
    copy = pickle.loads(pickle.dumps(dataset))
    assert np.array_equal(copy.take([2, 0])["half"], batch["half"])
    copy.store.close()


def test_an_error_of_decode_names_the_key(store: Any, caplog: pytest.LogCaptureFixture) -> None:
    store_keys = [26, 33, 40, 47]
    caplog.set_level("WARNING", logger="warpwell")
    dataset = ww.train.Dataset(store, decode=half, keys=store_keys)
    with pytest.raises(DecodeError, match="ZeroDivisionError for the record of key 33: bad 33") as raised:
        dataset.take([0, 1])
    assert raised.value.key == (33).to_bytes(8, "little") and isinstance(raised.value.__cause__, ZeroDivisionError)
    path, offset = raised.value.path, raised.value.offset
    assert str(raised.value).startswith(f"{path}, byte {offset}: ")
    assert path is not None and offset is not None
    assert (33).to_bytes(8, "little") in Path(path).read_bytes()[offset : offset + 80]
    with pytest.raises(DecodeError, match="key 33"):
        list(ww.train.DataLoader(dataset, 4))
    skipping = ww.train.DataLoader(store, 4, shuffle=False, decode=half, keys=[*store_keys, 54], on_error="skip")
    batches = list(skipping)
    assert [batch["name"] for batch in batches] == [["r26", "r40", "r47"], ["r54"]] and skipping.skipped == [33]
    assert "key 33" in caplog.text and skipping.state_dict()["skipped"] == [33]
    with pytest.raises(DecodeError):  # only batches skip records: an index raises
        skipping.dataset[1]

    def wrong(record: Any) -> Any:
        raise TypeError("a mistake")

    with pytest.raises(DecodeError, match="a mistake"):  # no record of the batch can be decoded
        list(ww.train.DataLoader(store, 4, decode=wrong, on_error="skip"))
    with pytest.raises(ArgumentError, match="the same fields"):
        ww.train.Dataset(store, decode=lambda r: {"a": 1} if r["id"] == 26 else {"b": 1}, keys=store_keys).take([0, 1])
    with pytest.raises(ArgumentError, match="decode"):
        ww.train.Dataset(store, decode="jpeg")  # type: ignore[arg-type]


def test_records_that_are_skipped_are_named_in_the_batch(damaged: Path) -> None:
    with ww.kv.open(damaged) as store:
        dataset = ww.train.Dataset(store, key_field="key", on_error="skip")
        records = dataset.__getitems__([76, 77, 78])
        assert records.skipped == [77] and records.fields["key"].tolist() == [76, 78]  # type: ignore[union-attr]
        assert dataset.__getitems__([1, 2]).skipped == []  # type: ignore[union-attr]
        with pytest.raises(CorruptionError):
            dataset[77]
        sampler = ww.train.Sampler(dataset, 16)
        sampler.record_skipped([77, 77])
        assert sampler.skipped == [77] and sampler.state_dict()["skipped"] == [77]


# -- ragged fields --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [None, "cpu", "interp"])
def test_ragged_fields(tmp_path: Path, device: str | None) -> None:
    schema = {"img": ("uint8", (None,)), "label": "int64", "name": "str"}
    images, names = [bytes([k]) * (3 * k % 40) for k in range(50)], [f"é{k}" for k in range(50)]
    with ww.kv.create(tmp_path / "a.kv", schema=schema) as made:
        made.put_many(np.arange(50), {"img": images, "label": np.arange(50), "name": names})
    with ww.kv.open(tmp_path / "a.kv", **({} if device is None else {"device": device})) as store:
        data = ww.train.Dataset(store)
        assert (data[7]["img"].tobytes(), data[7]["name"]) == (images[7], names[7])
        records = data.__getitems__([3, 1, 49])
        assert [record["name"] for record in records] == [names[k] for k in (3, 1, 49)]
        assert records.fields["img"].offsets.tolist() == np.cumsum([0, *(len(images[k]) for k in (3, 1, 49))]).tolist()
        again = pickle.loads(pickle.dumps(records.fields))
        assert again["img"] == records.fields["img"] and again["name"].to_list() == [names[k] for k in (3, 1, 49)]
        delivered = []
        for batch in ww.train.DataLoader(store, batch_size=8, seed=0):
            for image, label, name in zip(batch["img"], batch["label"].tolist(), batch["name"], strict=True):
                assert (image.tobytes(), name) == (images[label], names[label])
                delivered.append(label)
        assert sorted(delivered) == list(range(50))
        decoded = ww.train.Dataset(store, decode=lambda record: {"size": len(record["img"]), "name": record["name"]})
        assert decoded.take([2, 5])["name"] == [names[2], names[5]] and decoded.take([5])["size"].tolist() == [15]
