"""Stores: any sequence of calls against a dict, and the state after every bad input."""

import ctypes
import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.until import HANG_SECONDS

import warpwell as ww
from lab.campaigns.kv_model import KvModel
from warpwell import errors
from warpwell.kv.index.index import Index
from warpwell.kv.keys import as_keys
from warpwell.kv.log import manifest
from warpwell.kv.log.files import Files
from warpwell.kv.log.format import FORMAT_VERSION, MAX_VALUE, offset_of, segment_of


@pytest.mark.parametrize(("durability", "shards"), [("commit", 0), ("none", 3), ("always", 0)])
def test_random_operations(tmp_path: Path, durability: str, shards: int) -> None:
    model = KvModel(tmp_path, 7, durability=durability, shards=shards)
    model.run(1500 if durability == "always" else 3000)
    model.close()


@pytest.mark.parametrize("seed", range(12))
def test_random_operations_on_few_keys(tmp_path: Path, seed: int) -> None:
    model = KvModel(tmp_path, seed, keys=12, even=True)
    model.run(250)
    model.close()
    with ww.kv.open(model.path) as after:
        assert dict(after.items()) == dict(model.model.values())


# -- schemas ------------------------------------------------------------------------------------------------

DIGITS = {"x": ("uint8", (8, 8)), "y": ("int64", ())}


@pytest.fixture
def digits(tmp_path: Path):
    x = np.random.default_rng(0).integers(0, 16, (100, 8, 8), np.uint8)
    with ww.kv.create(tmp_path / "d.kv", schema=DIGITS) as made:
        made.put_many(np.arange(100), {"x": x, "y": np.arange(100) * 3})
    with ww.kv.open(tmp_path / "d.kv") as store:
        yield store, x


def test_records_come_back_as_arrays(digits) -> None:
    store, x = digits
    keys = np.array([5, 99, 1000, 5])
    batch, found = store.get_many(keys)
    assert found.tolist() == [True, True, False, True]
    np.testing.assert_array_equal(batch["x"][[0, 1, 3]], x[[5, 99, 5]])
    assert batch["y"].tolist() == [15, 297, 0, 15] and not batch["x"][2].any()
    again, _ = store.get_async(keys).wait()
    assert again["y"].tolist() == batch["y"].tolist()
    assert store[7]["y"] == 21 and store[7]["x"].shape == (8, 8)
    assert store.keys_array().tolist() == list(range(100))
    out = np.zeros((2, 72), np.uint8)
    batch, _ = store.get_many([1, 2], out=out)
    assert np.shares_memory(batch["y"], out) and batch["y"].tolist() == [3, 6]
    assert {k: v["y"] for k, v in store.items()} == {n: n * 3 for n in range(100)}
    assert store.schema == ww.kv.Schema(DIGITS)


def test_metadata_are_kept(tmp_path: Path) -> None:
    metadata = {"classes": {"label": ["cat", "dog"]}, "version": 2}
    with ww.kv.create(tmp_path / "s.kv", metadata=metadata) as store:
        store[1] = b"x"
        assert store.metadata == metadata
    with ww.kv.open(tmp_path / "s.kv") as store:
        assert store.metadata == metadata
    os.unlink(tmp_path / "s.kv" / "MANIFEST")  # the copy of the manifest has the metadata, too
    ww.kv.salvage(tmp_path / "s.kv", tmp_path / "t.kv")
    with ww.kv.open(tmp_path / "t.kv") as store:
        assert (store.metadata, store[1]) == (metadata, b"x")
    with ww.kv.create(tmp_path / "plain.kv") as store:
        assert store.metadata == {}
    for bad in ({"x": b"bytes"}, {"x": np.int64(1)}, ["list"]):
        with pytest.raises(errors.ArgumentError, match="metadata"):
            ww.kv.create(tmp_path / "bad.kv", metadata=bad)  # type: ignore[arg-type]
    assert not (tmp_path / "bad.kv").exists()


def test_records_of_another_schema_change_nothing(tmp_path: Path) -> None:
    with ww.kv.create(tmp_path / "d.kv", schema=DIGITS) as store:
        store.put(1, {"x": np.zeros((8, 8), np.uint8), "y": 5})
        for value in (b"bytes", {"x": np.zeros((8, 8), np.uint8)}, {"x": np.zeros((8, 8)), "y": 1}):
            with pytest.raises(errors.SchemaError):
                store[2] = value
        with pytest.raises(errors.SchemaError, match="shape"):
            store.put_many([1, 2], {"x": np.zeros((3, 8, 8), np.uint8), "y": [1, 2, 3]})
        assert list(store) == [1] and store[1]["y"] == 5


# -- bad input ----------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path):
    made = ww.kv.create(tmp_path / "s.kv")
    made["kept"] = b"value"
    made.commit()
    yield made
    made.close()


@pytest.mark.parametrize("key", [b"", b"x" * 512, "", 1 << 64])
def test_keys_that_cannot_be(store: ww.kv.Store, key: object) -> None:
    for call in (
        lambda: store.get(key),
        lambda: store[key],
        lambda: key in store,
        lambda: store.delete(key),
        lambda: store.put(key, b""),
        lambda: store.put_many([b"ok", key], [b"", b""]),
        lambda: store.get_many([key]),
        lambda: store.delete_many([b"kept", key]),
    ):
        with pytest.raises(errors.ArgumentError):
            call()
    assert dict(store.items()) == {b"kept": b"value"}


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("text", errors.ArgumentError),
        (5, errors.ArgumentError),
        (None, errors.ArgumentError),
        ({"x": 1}, errors.ArgumentError),
        (np.zeros(MAX_VALUE + 1, np.uint8), errors.ValueSizeError),  # untouched zero pages take no memory
        (np.zeros((4, 4))[:, 1], errors.ArgumentError),
    ],
)
def test_values_that_cannot_be(store: ww.kv.Store, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="kept"):
        store["kept"] = value
    with pytest.raises(error):
        store.put_many(["new", "kept"], [b"", value])
    assert dict(store.items()) == {b"kept": b"value"}


def test_batches_that_do_not_fit(store: ww.kv.Store) -> None:
    for values in ([b"x"], [b"x"] * 3, b"xx", {"x": 1}, 5, np.zeros((3, 4), np.uint8)):
        with pytest.raises(errors.ArgumentError):
            store.put_many(["a", "b"], values)
    for out in (np.zeros((1, 5)), np.zeros((2, 5), np.uint8), np.zeros((1, 10), np.uint8)[:, ::2], [0]):
        with pytest.raises(errors.ArgumentError, match="out"):
            store.get_many(["kept"], out=out)
    with pytest.raises(errors.ValueSizeError, match="5 bytes"):
        store.get_many(["kept"], out=np.zeros((1, 4), np.uint8))
    with pytest.raises(errors.ArgumentError, match="a single str"):
        store.get_many("kept")
    with pytest.raises(errors.ArgumentError, match="limit"):
        store.list(limit=-1)
    assert len(store) == 1


def check_large_values(path: Path, large: bytes) -> None:
    """Store a value of more than 32 MiB three times, and look at it in every way that there is."""
    with ww.kv.create(path, segment_bytes=4 * len(large)) as store:
        store["large"] = large
        store.put_many(["copy", "small"], [large, b"x"])
        store["large"] = large
        assert store["large"] == large and store.get_many(["copy"])[0] == [large]
        out = np.empty((1, len(large)), np.uint8)
        store.get_many(["large"], out=out)
        assert out[0].data == large
        del out
        store.commit()
        assert store.compact(threshold=0.1).moved == 3
        assert store.stats.live_bytes == 2 * len(large) + 1 and store["copy"] == large
    with ww.kv.open(path) as reader:
        assert reader.verify().sound
        sizes = {key: len(value) for key, value in reader.items()}
        assert sizes == {b"large": len(large), b"copy": len(large), b"small": 1}
    assert ww.kv.salvage(path, f"{path}.new").complete
    shutil.rmtree(path)
    with ww.kv.open(f"{path}.new") as reader:
        assert reader["large"] == large and reader["small"] == b"x"
    shutil.rmtree(f"{path}.new")


def test_values_of_more_bytes_than_earlier_formats_hold(tmp_path: Path) -> None:
    check_large_values(tmp_path / "a.kv", np.random.default_rng(0).bytes((40 << 20) + 1))


@pytest.mark.slow
def test_values_of_more_than_a_gibibyte(tmp_path: Path) -> None:
    check_large_values(tmp_path / "a.kv", np.random.default_rng(0).bytes((1 << 30) + 4097))


def test_a_damaged_large_value_is_not_copied(tmp_path: Path) -> None:
    with ww.kv.create(tmp_path / "a.kv") as store:
        store.put_many(["gone", "large"], [bytes(40 << 20), b"y" * (20 << 20)])
        del store["gone"]
        store.commit()
        location = store._records.index.lookup(as_keys([b"large"]))[0]
        with (tmp_path / "a.kv" / f"{segment_of(location[0]):08d}.val").open("r+b") as file:
            file.seek(offset_of(location[0]) + (19 << 20))
            file.write(b"?")
        with pytest.raises(errors.CorruptionError, match="20971520 bytes at byte"):
            store.compact(threshold=0.1)
        assert len(store) == 1 and not store.verify().sound


def test_a_store_of_format_3_becomes_the_newest_before_it_holds_a_large_value(tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    ww.kv.create(path).close()
    body = (path / "MANIFEST").read_bytes().partition(b"\n")[2]
    (path / "MANIFEST").write_bytes(manifest._title(3, body) + body)
    for put in (lambda s, v: s.put("k", v), lambda s, v: s.put_many(["k"], [v])):
        (path / "MANIFEST").write_bytes(manifest._title(3, body) + body)
        with ww.kv.open(path, "r+") as store:
            put(store, b"small")
            store.commit()
            assert manifest.read_manifest(str(path)).version == 3
            put(store, bytes(1 << 25))
            assert manifest.read_manifest(str(path)).version == FORMAT_VERSION
        with ww.kv.open(path) as store:
            assert store["k"] == bytes(1 << 25)


def test_the_empty_batch(store: ww.kv.Store) -> None:
    store.put_many([], [])
    assert store.get_many([])[0] == [] and store.get_many(np.empty(0, np.int64))[1].tolist() == []
    assert store.delete_many([]) == 0


def test_absent_keys(store: ww.kv.Store) -> None:
    with pytest.raises(errors.KeyMissingError, match="b'none'") as raised:
        store["none"]
    assert isinstance(raised.value, KeyError) and raised.value.key == b"none"
    with pytest.raises(KeyError):
        del store["none"]
    assert store.get("none") is None and store.pop("none", 3) == 3 and store.setdefault("kept") == b"value"


def test_a_second_writer_is_refused(store: ww.kv.Store) -> None:
    with pytest.raises(errors.SharingError, match=str(os.getpid())):
        ww.kv.open(store.path, "r+")
    with ww.kv.open(store.path) as reader:
        assert reader["kept"] == b"value"
        with pytest.raises(errors.ReadOnlyError, match=r"r\+"):
            reader["kept"] = b""
        with pytest.raises(errors.ReadOnlyError):
            reader.compact()
        store["kept"] = b"other"
        assert reader["kept"] == b"value" and reader.refresh() == 0
        store.commit()
        assert reader.refresh() == 1 and reader["kept"] == b"other"


def test_folders_that_are_no_stores(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").write_text("x")
    with pytest.raises(errors.MissingFileError, match="create"):
        ww.kv.open(tmp_path / "none")
    for name in ("file", "folder"):
        with pytest.raises(errors.FormatError, match="store"):
            ww.kv.open(tmp_path / name)
        with pytest.raises(errors.WarpwellError):
            ww.kv.create(tmp_path / name)
        with pytest.raises(errors.FormatError):
            ww.kv.create(tmp_path / name, overwrite=True)
    assert (tmp_path / "folder" / "mine").read_text() == "x" and (tmp_path / "file").read_text() == "x"
    with pytest.raises(errors.ArgumentError, match="mode"):
        ww.kv.open(tmp_path / "none", "w")


def test_a_newer_store(store: ww.kv.Store) -> None:
    from warpwell.kv.log import manifest

    store.close()
    file = Path(store.path) / "MANIFEST"
    body = file.read_bytes().partition(b"\n")[2]
    file.write_bytes(manifest._title(99, body) + body)
    with pytest.raises(errors.StoreVersionError, match="99"):
        ww.kv.open(store.path)


def test_creation_refuses_and_leaves_what_is_there(store: ww.kv.Store, tmp_path: Path) -> None:
    with pytest.raises(errors.ArgumentError, match="overwrite"):
        ww.kv.create(store.path)
    with pytest.raises(errors.SharingError):  # the store is open for writing
        ww.kv.create(store.path, overwrite=True)
    store.close()
    for options in (
        {"durability": "perhaps"},
        {"segment_bytes": "1KiB"},
        {"segment_bytes": "x"},
        {"schema": {}},
        {"shards": []},
        {"shards": [tmp_path / "a", tmp_path / "a"]},
        {"shards": [tmp_path / "no" / "a"]},
    ):
        with pytest.raises(errors.WarpwellError):
            ww.kv.create(store.path, overwrite=True, **options)
        with ww.kv.open(store.path) as original:
            assert dict(original.items()) == {b"kept": b"value"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s.kv"]
    with ww.kv.create(store.path, overwrite=True) as fresh:
        assert len(fresh) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s.kv"]


def test_use_after_close(store: ww.kv.Store) -> None:
    store.close()
    store.close()
    for call in (
        lambda: store["kept"],
        lambda: len(store),
        lambda: list(store),
        lambda: store.put(1, b""),
        lambda: store.commit(),
        lambda: store.get_many([1]),
        lambda: store.get_async([1]),
        lambda: store.stats,
        lambda: "kept" in store,
        lambda: store.native(),
    ):
        with pytest.raises(errors.ClosedError, match="open it again"):
            call()
    assert "closed" in repr(store)


def test_closing_while_threads_read(tmp_path: Path) -> None:
    store = ww.kv.create(tmp_path / "s.kv")
    store.put_many(np.arange(2000), np.ones((2000, 512), np.uint8))
    ended: list[object] = []

    def read() -> None:
        try:
            while True:
                rows, found = store.get_many(np.arange(2000), out=np.empty((2000, 512), np.uint8))
                assert found.all() and (rows == 1).all()
        except BaseException as error:
            ended.append(type(error))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for t in threads:
        t.start()
    time.sleep(0.2)
    store.close()
    for t in threads:
        t.join(HANG_SECONDS)
    assert ended == [errors.ClosedError] * 3


def forked(path: str, store: ww.kv.Store, queue) -> None:
    out = []
    for call in (lambda: store["kept"], lambda: store.put("x", b""), lambda: store.close()):
        try:
            out.append(call())
        except errors.ForkError as error:
            out.append("open it again here, by its path (for reading" in str(error))
    with ww.kv.open(path) as own:
        out.append(own["kept"])
    queue.put(out)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_writer_refuses_and_the_parent_goes_on(store: ww.kv.Store) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=forked, args=(store.path, store, queue))
    child.start()
    assert queue.get(timeout=120) == [True, True, None, b"value"]
    child.join(HANG_SECONDS)
    store["after"] = b"1"
    store.commit()
    assert store["after"] == b"1"


def test_options_that_cannot_be(store: ww.kv.Store, tmp_path: Path) -> None:
    future = ww.kv.open(store.path).get_async([1])
    for call, name in (
        *(
            (lambda o=o: ww.kv.create(tmp_path / "odd.kv", **o), next(iter(o)))
            for o in (
                {"overwrite": "no"},
                {"shards": "abc"},
                {"shards": 3},
                {"shards": [3]},
                {"segment_bytes": 1.5},
                {"durability": None},
            )
        ),
        *((lambda path=path: ww.kv.open(path), "path") for path in (3, None, store, b"path", "")),
        *((lambda o=o: store.compact(threshold=o), "threshold") for o in ("x", None, float("nan"), True)),
        *((lambda o=o: store.list(limit=o), "limit") for o in (1.5, "x", True)),
        *((lambda o=o: store.list(prefix=o), "prefix") for o in (3, None)),
        (lambda: store.verify(progress=3), "progress"),
        (lambda: store.compact(progress=3), "progress"),
        *((lambda o=o: future.wait(o), "timeout") for o in (float("inf"), float("nan"), -1, "3")),
        (lambda: ww.kv.Permutation(10, 1.5), "seed"),
        (lambda: ww.kv.Permutation(2.5), "size"),
    ):
        with pytest.raises(errors.ArgumentError, match=name):
            call()
    assert not (tmp_path / "odd.kv").exists()
    with pytest.raises(errors.ArgumentError, match="need a device"):
        ww.kv.open(store.path, queues=2)
    future.wait(HANG_SECONDS)


def test_statistics_in_words(tmp_path: Path) -> None:
    with ww.kv.create(tmp_path / "s.kv") as store:
        store.put_many([1, 2], [b"abc", b"d"])
        store.get(1)
        text = str(store.stats)
        assert "2 records, 4 B of values" in text and "in 1 segment, 1 get, 1 hit, 2 puts" in text
        assert repr(store.stats) == f"<StoreStatistics: {text}>"


def test_keys_that_are_changed_after_the_call(tmp_path: Path) -> None:
    with ww.kv.create(tmp_path / "s.kv", schema={"y": ("int64", ())}) as store:
        store.put_many(np.arange(50_000), {"y": np.arange(50_000)})
    for device in (None, "cpu"):
        with ww.kv.open(tmp_path / "s.kv", device=device) as store:
            n = 50_000 if device is None else 500
            keys = np.arange(n)
            future = store.get_async(keys)
            keys[:] = 7
            batch, found = future.wait()
            assert found.all() and np.array_equal(batch["y"], np.arange(n))
            keys = np.array([5, 9, 2])
            loader, dataset = (
                ww.train.DataLoader(store, 3, shuffle=False, keys=keys),
                ww.train.Dataset(store, keys=keys),
            )
            keys[:] = 7
            assert next(iter(loader))["y"].tolist() == [5, 9, 2] == [dataset[k]["y"] for k in range(3)]


@pytest.mark.parametrize(
    "change",
    [
        lambda store: store.put_many([1], [b"new"]),
        lambda store: store.delete_many([1]),
        lambda store: (store.put(1, b"new"), len(store)),
        lambda store: (store.put(1, b"new"), store.commit()),
        lambda store: store.put(1, b"new" * 1_000_000),
    ],
)
def test_an_interrupt_between_log_and_index_leaves_both_equal(tmp_path: Path, monkeypatch, change) -> None:
    with ww.kv.create(tmp_path / "s.kv") as store:
        store.put_many([1], [b"old"])
        store.commit()

        def interrupted(self: Any, *args: Any, inner: Any, **options: Any) -> Any:
            monkeypatch.undo()
            signal.raise_signal(signal.SIGINT)
            return inner(self, *args, **options)

        monkeypatch.setattr(Index, "put", partialmethod(interrupted, inner=Index.put))
        with pytest.raises(KeyboardInterrupt):
            change(store)
        store.commit()
        with ww.kv.open(tmp_path / "s.kv") as reader:
            assert (1 in store) == (1 in reader) and (1 not in store or store.get(1) == reader.get(1) != b"old")


# -- staged puts --------------------------------------------------------------------------------------------


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[OSError]:
    """The errors of the next writes."""
    raised: list[OSError] = []
    write = os.pwrite

    def pwrite(*args: Any) -> int:
        if raised:
            raise raised[-1]
        return write(*args)

    monkeypatch.setattr(os, "pwrite", pwrite)
    return raised


def test_a_put_is_visible_at_once_and_keeps_no_buffer_of_the_caller(tmp_path: Path) -> None:
    with ww.kv.create(tmp_path / "s.kv") as store:
        buffer = bytearray(b"first")
        store["a"] = buffer
        buffer[:] = b"other"
        store[7], store[8] = b"", np.arange(2, dtype=np.uint8)
        assert (store["a"], store[7], store[8]) == (b"first", b"", bytes([0, 1]))
        assert 7 in store and 9 not in store and store.uncommitted() == 3
        assert store._records.log.uncommitted() == 0  # staged values are not in the log yet
        store[(7).to_bytes(8, "little")] = b"bytes"
        store["a"] = b"second"
        assert sorted(map(str, store)) == [str(8), str(b"\x07" + bytes(7)), str(b"a")]
        assert store.stats.puts == 5 and store.stats.gets == store.stats.hits == 3 and store.stats.read_bytes == 7
        store[7] = b"int"
        store.delete("a")
        assert store.list() == [7, 8] and "a" not in store
        store["a"] = b"third"
        store.commit()
        with ww.kv.open(tmp_path / "s.kv") as reader:
            assert dict(reader.items()) == {7: b"int", 8: bytes([0, 1]), b"a": b"third"}


def test_staged_records_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpwell.kv.records.STAGED_BYTES", 2000)
    with ww.kv.create(tmp_path / "s.kv") as store:
        records = store._records
        for k in range(100):
            store[k] = b"%d" % k * 50
            assert sum(map(len, records.staged)) + 50 * len(records.staged) <= 2000
        store["large"] = bytes(3000)
        assert not records.staged and records.log.uncommitted() == 101
        assert store[99] == b"99" * 50 and len(store) == 101


def test_a_small_commit_of_staged_records_makes_four_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    with ww.kv.create(tmp_path / "s") as store:
        store.put(0, b"first")
        store.commit()  # it also writes zeros for the next groups
        for name in ("pwrite", "sync_all", "truncate"):
            real = getattr(Files, name)
            monkeypatch.setattr(Files, name, lambda *args, n=name, real=real: (calls.append(n), real(*args))[1])
        store.put(1, b"one")
        store.put(b"two", b"")
        assert store.commit() == 3
        assert calls == ["pwrite", "pwrite", "sync_all", "pwrite"]  # values, records with values, and the mark
    with ww.kv.open(tmp_path / "s") as store:
        assert dict(store.items()) == {0: b"first", 1: b"one", b"two": b""} and store.verify().sound


@pytest.mark.parametrize("order", [(".val", ".jnl"), (".jnl", ".val")])
def test_a_commit_after_a_full_disk_has_earlier_and_later_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[str, str]
) -> None:
    real, failing = Files.pwrite, list[str]()

    def pwrite(files: Files, fd: int, data: object, offset: int) -> None:
        if failing and os.readlink(f"/proc/self/fd/{fd}").endswith(failing[0]):
            del failing[0]
            raise OSError(errno.ENOSPC, "full")
        real(files, fd, data, offset)

    monkeypatch.setattr(Files, "pwrite", pwrite)
    with ww.kv.create(tmp_path / "s") as store:
        store.put(7, b"earlier")
        failing[:] = order
        for k in range(2):
            with pytest.raises(errors.StorageFullError):
                store.commit()
            store.put(b"later%d" % k, b"value")
            assert store[7] == b"earlier" and store.uncommitted() == k + 2
        assert store.commit() == 3 and store.uncommitted() == 0 and not failing
        with ww.kv.open(tmp_path / "s") as reader:
            assert dict(reader.items()) == {7: b"earlier", b"later0": b"value", b"later1": b"value"}


def test_a_full_disk_loses_no_staged_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: list[OSError]
) -> None:
    monkeypatch.setattr("warpwell.kv.records.STAGED_BYTES", 1000)
    with ww.kv.create(tmp_path / "s.kv") as store:
        full.append(OSError(errno.ENOSPC, "planted"))
        with pytest.raises(errors.StorageFullError):
            for k in range(20):
                store[k] = b"v" * 100
        assert k == 4
        for call in (store.commit, lambda: store.get_many([1]), lambda: store.put(9, b""), lambda: len(store)):
            with pytest.raises(errors.StorageFullError):
                call()
        assert [store.get(key) for key in range(5)] == [b"v" * 100] * 4 + [None] and store.uncommitted() == 4
        full.clear()
        store[0] = b"newer"
        store.commit()
        assert store.uncommitted() == 0 and store[0] == b"newer"
        with ww.kv.open(tmp_path / "s.kv") as reader:
            assert reader[0] == b"newer" and reader.list() == [0, 1, 2, 3]


def test_a_close_that_cannot_write_staged_records_commits_no_part_of_their_group(tmp_path: Path, monkeypatch) -> None:
    store = ww.kv.create(tmp_path / "s.kv")
    store.put_many([1], [b"written"])
    store[2] = b"staged"

    def refuse(*_: object) -> None:
        raise errors.StorageFullError("planted", path=store.path)

    monkeypatch.setattr(store._records.log, "append_staged", refuse)
    with pytest.raises(errors.StorageFullError):
        store.close()
    with ww.kv.open(tmp_path / "s.kv") as reader:
        assert len(reader) == 0


def test_a_failed_write_loses_staged_records_with_an_error(tmp_path: Path, full: list[OSError]) -> None:
    store = ww.kv.create(tmp_path / "s.kv")
    store[1] = b"committed"
    store.commit()
    store[2] = b"lost"
    full.append(OSError(errno.EIO, "planted"))
    with pytest.raises(errors.StoreFailedError):
        store.get_many([1])
    full.clear()
    for call in (store.commit, lambda: store.put(3, b"")):
        with pytest.raises(errors.StoreFailedError):
            call()
    assert store.uncommitted() == 1 and store.get(2) is None and store.get_many([1])[0] == [b"committed"]
    store.close()


def test_puts_of_threads_during_commits(tmp_path: Path) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    wrong: list[int] = []

    def write(first: int) -> None:
        for k in range(first, first + 3000):
            store[k] = b"%d" % k
            if store.get(k) != b"%d" % k:
                wrong.append(k)

    try:
        with ww.kv.create(tmp_path / "s.kv", durability="none") as store:
            threads = [threading.Thread(target=write, args=(10_000 * k,)) for k in range(3)]
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                store.commit()
                len(store)
            for thread in threads:
                thread.join()
            assert not wrong and len(store) == 9000
    finally:
        sys.setswitchinterval(interval)
    with ww.kv.open(tmp_path / "s.kv") as reader:
        assert all(reader[k] == b"%d" % k for first in range(3) for k in range(10_000 * first, 10_000 * first + 3000))


def test_a_signal_handler_changes_a_store_during_changes(tmp_path: Path) -> None:
    handled: list[int] = []
    depth = 0

    def handle(*_: object) -> None:
        nonlocal depth
        if depth == 3:  # on a loaded machine a handler takes longer than the interval of the timer
            return
        depth += 1
        handled.append(len(handled))
        store.put_many([b"handler"], [b"%d" % handled[-1]])
        store[b"single"] = b"%d" % handled[-1]
        store.commit()
        depth -= 1

    with ww.kv.create(tmp_path / "s.kv", durability="none") as store:
        store.put_many([b"handler"], [b"compiled"])
        store.commit()
        previous = signal.signal(signal.SIGALRM, handle)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
            for k in range(300):
                store[k] = b"%d" % k
                store.put_many([1000 + k, b"handler"], [b"%d" % k, b"program"])
                store[b"single"] = b"program"
                store.commit()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        assert len(handled) > 5
        expected = dict(store.items())
        store.commit()
        with ww.kv.open(tmp_path / "s.kv") as reader:
            assert dict(reader.items()) == expected and len(reader) == 602 and reader.verify().sound


def test_a_signal_handler_refreshes_a_reader_after_a_refresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    with ww.kv.create(tmp_path / "s.kv") as store, ww.kv.open(tmp_path / "s.kv") as reader:
        refresh = reader._records.log.refresh

        def refresh_slowly(**options: Any) -> Any:
            calls.append("begin")
            if len(calls) == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            changes = refresh(**options)
            calls.append("end")
            return changes

        monkeypatch.setattr(reader._records.log, "refresh", refresh_slowly)
        store[1] = b"one"
        store.commit()
        previous = signal.signal(signal.SIGUSR1, lambda *_: reader.refresh())
        try:
            reader.refresh()
        finally:
            signal.signal(signal.SIGUSR1, previous)
        assert calls == ["begin", "end"] * 2 and reader[1] == b"one"


def test_a_signal_handler_closes_or_compacts_a_store_during_a_compaction(tmp_path: Path) -> None:
    store = ww.kv.create(tmp_path / "s.kv", segment_bytes="64KiB")
    keys = np.arange(4000)
    store.put_many(keys, [b"v" * 100] * 4000)
    store.put_many(keys[::2], [b"w" * 100] * 2000)
    store.commit()

    def handle(*_: object) -> None:
        with pytest.raises(errors.SharingError, match="is being compacted by a call that this call interrupts"):
            store.compact()
        store.close()

    previous = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(errors.ClosedError):
            store.compact(threshold=0.1, progress=lambda *_: os.kill(os.getpid(), signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, previous)
    with ww.kv.open(tmp_path / "s.kv", "r+") as store:
        store.compact(threshold=0.1)
        assert store[0] == b"w" * 100 and store[1] == b"v" * 100 and len(store) == 4000 and store.verify().sound


def test_a_put_of_a_finalizer_during_a_compaction_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the compaction has listed the live records, the snapshot and the index would lack such a record."""
    with ww.kv.create(tmp_path / "s.kv") as store:
        store.put_many(np.arange(100), [b"v"] * 100)
        store.delete_many(np.arange(99))
        store.commit()
        list_slots, refused = store._records.index.slots, 0

        def slots() -> Any:
            nonlocal refused
            found = list_slots()
            with pytest.raises(errors.SharingError, match="do not use a store in a finalizer"):
                store.put_many([b"finalizer"], [b"v"])
            refused += 1
            return found

        monkeypatch.setattr(store._records.index, "slots", slots)
        assert store.compact().moved == 1 and refused == 2
        monkeypatch.undo()
        assert list(store) == [99] and store.verify().sound


# -- shards -------------------------------------------------------------------------------------------------


def test_shards_have_their_places(tmp_path: Path) -> None:
    folders = [tmp_path / f"drive{k}" for k in range(4)]
    with ww.kv.create(tmp_path / "m.kv", shards=folders) as store:
        store.put_many(np.arange(8000), np.arange(8000).view(np.uint8).reshape(8000, 8))
        segments = store._records.entries()[1][:, 0] >> 40
        sizes = np.bincount(segments % 4).tolist()
        assert min(sizes) > 1800 and sum(sizes) == 8000 == len(store)
    with pytest.raises(errors.FormatError, match="shard 2"):
        ww.kv.open(folders[2])
    with ww.kv.open(tmp_path / "m.kv") as store:
        out, found = store.get_many(np.arange(8001), out=np.empty((8001, 8), np.uint8))
        assert found.sum() == 8000 and (out.view(np.int64)[:8000, 0] == np.arange(8000)).all()
        assert store.stats.shards == 4 and store.stats.records == 8000
    os.rename(folders[0], tmp_path / "gone")
    with pytest.raises(errors.MissingFileError, match="shard 0"):
        ww.kv.open(tmp_path / "m.kv")
    ww.kv.create(folders[0]).close()
    with pytest.raises(errors.FormatError, match="shard 0"):
        ww.kv.open(tmp_path / "m.kv")


def test_a_key_moves_only_to_a_new_shard() -> None:
    from warpwell.kv.keys import as_keys
    from warpwell.kv.log.shards import shard_of, shards_of

    # Part of the on-disk format.
    assert [shard_of(k, 0, 8, 5) for k in range(12)] == [0, 3, 2, 4, 3, 1, 1, 4, 3, 4, 2, 0]

    def positions(count: int) -> np.ndarray:
        return shards_of(as_keys(np.arange(20_000)), count)

    before, after = positions(4), positions(5)
    assert (before[before != after] != 4).all() and (after[before != after] == 4).all()
    assert 3500 < (after == 4).sum() < 4500


# -- calls that commit, and calls that do not --------------------------------------------------------------------------


def test_compact_leaves_a_group_to_its_caller(tmp_path):
    with ww.kv.create(tmp_path / "a.kv", segment_bytes="64KiB") as w:
        for k in range(40):
            w.put_many(np.arange(30), [b"%d" % k * 900] * 30)
        w.commit()
        w.put("half", b"of a group")
        w.put(3, b"newer")
        w.delete(4)
        report = w.compact(threshold=0.1)
        assert report.moved
        with ww.kv.open(tmp_path / "a.kv") as r:
            assert "half" not in r and r[3] == r[4] == b"39" * 900
        shutil.copytree(tmp_path / "a.kv", tmp_path / "killed.kv")  # as a kill would leave it
        segments = w.stats.segments
        w.commit()
        assert w.stats.segments < segments and w.verify().sound
        with ww.kv.open(tmp_path / "a.kv") as r:
            assert r["half"] == b"of a group" and r[3] == b"newer" and 4 not in r
    with ww.kv.open(tmp_path / "killed.kv", "r+") as w:
        assert dict(w.items()) == {k: b"39" * 900 for k in range(30)} and w.verify().sound


def test_an_exception_undoes_what_was_put_before_a_compaction(tmp_path):
    with ww.kv.create(tmp_path / "a.kv", segment_bytes="64KiB") as w:
        for k in range(40):
            w.put_many(np.arange(30), [b"%d" % k * 900] * 30)
    with pytest.raises(ZeroDivisionError), ww.kv.open(tmp_path / "a.kv", "r+") as w:
        w.put_many([3], [b"newer"])
        assert w.compact(threshold=0.1).segments
        raise ZeroDivisionError
    with ww.kv.open(tmp_path / "a.kv", "r+") as w:
        assert w[3] == b"39" * 900 and w.verify().sound
        assert w.compact(threshold=0.1).segments  # nothing was in the way, so they go now
        assert w.verify().sound and len(w) == 30


def test_a_commit_stands_where_its_snapshot_fails(tmp_path, monkeypatch):
    create = Files.create

    def full(self, path):
        if path.endswith(".idx"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(self, path)

    monkeypatch.setattr(Files, "create", full)
    path = tmp_path / "a.kv"
    w = ww.kv.create(path)
    w.put_many(np.arange(70_000), np.ones((70_000, 16), np.uint8))
    with pytest.warns(RuntimeWarning, match=r"the commit is durable.*No space left.*tries again later"):
        assert w.commit() == 70_000
    for k in range(3):  # warns once, and does not try again at each commit
        w.put(k, b"after")
        assert w.commit() == 70_001 + k
    with ww.kv.open(path) as r:
        assert r[2] == b"after" and len(r) == 70_000
    w.put_many(np.arange(5000), [b"more"] * 5000)
    w.commit()
    assert not list(path.glob("*.idx"))
    monkeypatch.setattr(Files, "create", create)
    w.put_many(np.arange(5000), [b"last"] * 5000)
    w.commit()
    assert len(list(path.glob("*.idx"))) == 1
    w.close()
    with ww.kv.open(path) as r:
        assert r[2] == b"last" and len(r) == 70_000 and r.verify().sound


def test_a_commit_stands_where_its_snapshot_breaks_the_store(tmp_path, monkeypatch):
    w = ww.kv.create(tmp_path / "a.kv")
    w.put_many(np.arange(70_000), np.ones((70_000, 16), np.uint8))
    rename = Files.rename
    monkeypatch.setattr(Files, "rename", lambda *args: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    with pytest.warns(RuntimeWarning, match=r"the commit is durable.*Input/output.*accepts no more writes"):
        w.commit()
    monkeypatch.setattr(Files, "rename", rename)
    with pytest.raises(errors.StoreFailedError):
        w.put(1, b"x")
    w.close()
    with ww.kv.open(tmp_path / "a.kv", "r+") as w:
        assert len(w) == 70_000 and w.verify().sound


# -- which keys are integers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [0, 3])
def test_a_key_is_shown_as_it_was_put(tmp_path, shards):
    folders = [tmp_path / f"s{k}" for k in range(shards)] or None
    names = [f"img{k:05}" for k in (2, 11, 300)]
    with ww.kv.create(tmp_path / "a.kv", shards=folders, segment_bytes="64KiB") as w:
        w.put_many(names, [b"n"] * 3)
        assert w.list() == list(ww.train.Dataset(w)._keys.to_list()) == [n.encode() for n in names]
        assert isinstance(w.keys_array(), tuple)
        w.put_many(np.arange(256, 250, -1), [b"i" * 4000] * 6)
        w.put(-7, b"i")
        w.put("a", b"n")
        expected = [-7, *range(251, 257), b"a", *(n.encode() for n in names)]
        assert w.list() == expected and set(w) == set(expected)
        assert w.list(start=255) == expected[5:] and w.list(start="img") == expected[8:] == w.list("img")
        assert {-7: b"i", b"a": b"n"} == {k: v for k, v in w.items() if k in (-7, b"a")}
        assert ("a", b"n") in w.items() and (-7, b"other") not in w.items() and b"i" in w.values()
        raw, lengths = w.keys_array()
        assert w.get_many((raw, lengths))[1].all()
        assert ww.train.Dataset(w)[0] == b"i" == w[(-7).to_bytes(8, "little", signed=True)]
        with pytest.raises(errors.KeyMissingError, match="no key 5:"):
            w[5]
        with pytest.raises(errors.KeyMissingError, match=r"no key b'5':"):
            w["5"]
        w.put(bytes([252]) + bytes(7), b"a name now")
        w.put(254, b"x" * 60_000)
        expected = [-7, 251, 253, 254, 255, 256, *expected[7:], bytes([252]) + bytes(7)]
        assert w.list() == expected and w[252] == b"a name now"
        w.commit()
        assert w.compact(threshold=0.05).moved and w.list() == expected
    with ww.kv.open(tmp_path / "a.kv") as r:
        assert r.list() == expected and r.verify().sound
    with ww.kv.create(tmp_path / "b.kv") as w:
        w.put_many([3, -1, 2], [b"v"] * 3)
        assert w.keys_array().tolist() == [-1, 2, 3] == w.list()


def test_stores_of_format_1_are_refused_and_stay_unchanged(tmp_path):
    ww.kv.create(tmp_path / "a.kv").close()
    path = tmp_path / "a.kv" / "MANIFEST"
    fields = json.loads(path.read_bytes().partition(b"\n")[2])
    del fields["kinds"]
    for version in (1, 2):  # format 2, written from a store of format 1, lacks `kinds`, too
        body = json.dumps(fields).encode()
        path.write_bytes(manifest._title(version, body) + body)
        before = {file: file.read_bytes() for file in (tmp_path / "a.kv").iterdir()}
        salvage = partial(ww.kv.salvage, target=tmp_path / "b.kv")
        for call in (ww.kv.open, partial(ww.kv.open, mode="r+"), ww.kv.seal, salvage):
            with pytest.raises(errors.StoreVersionError, match="format 1, but this release reads formats 2 to 5: dump"):
                call(tmp_path / "a.kv")
        assert before == {file: file.read_bytes() for file in (tmp_path / "a.kv").iterdir()}
    ww.kv.create(tmp_path / "a.kv", overwrite=True).close()
    assert len(ww.kv.open(tmp_path / "a.kv")) == 0


def test_values_that_hold_addresses_are_refused(tmp_path):
    with ww.kv.create(tmp_path / "a.kv") as w:
        for value in (
            np.array([{}], object),
            np.zeros(1, [("a", object)]),
            (ctypes.py_object * 1)(1),
            (ctypes.c_char_p * 1)(b"x"),
        ):
            with pytest.raises(errors.ArgumentError, match="'o' holds Python objects or pointers"):
                w.put("o", value)
            with pytest.raises(errors.ArgumentError, match="'o' holds"):
                w.put_many([1, "o"], [b"", value])
        for number in (np.float32(1), np.float64(1), np.int64(1), np.True_, 1, 1.5):
            with pytest.raises(errors.ArgumentError, match=r"of type .*pass bytes or an array"):
                w.put(7, number)
        with pytest.raises(errors.ArgumentError, match="key 1 is of type uint8"):
            w.put_many([1, 2], np.array([7, 8], np.uint8))
        w.put(1, np.array(5))
        assert list(w) == [1] and w[1] == (5).to_bytes(8, "little")
        with pytest.raises(errors.ArgumentError, match="surrogates"):
            w.list("\udc80")


def test_an_integer_that_is_too_large_may_come_first(tmp_path: Path) -> None:
    """Nothing is compiled then yet, and the compiler would refuse it in words of its own."""
    ww.kv.create(tmp_path / "s.kv").close()
    program = (
        "import sys, warpwell as ww\n"
        "try:\n    ww.kv.open(sys.argv[1]).get(1 << 64)\n"
        "except ww.errors.ArgumentError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "s.kv")], capture_output=True, text=True, timeout=120, check=True
    )
    assert "not a signed 64-bit integer" in done.stdout
