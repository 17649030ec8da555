"""Keys of 17 to 511 bytes: the index has a hash of them, and the key itself is stored after the value."""

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.harness.examples import examples

import warpwell as ww
from warpwell import errors
from warpwell.cli.main import main
from warpwell.kv import keys as module
from warpwell.kv.keys import as_keys
from warpwell.kv.log import manifest
from warpwell.kv.log.format import FORMAT_VERSION, offset_of, segment_of, size_of

NAME = "n01440764/n01440764_10026.JPEG"
LONG = [NAME.encode(), b"x" * 17, b"x" * 18, b"y" * 511, bytes(300), bytes(301)]
KEYS = [*LONG, b"x" * 16, b"short", 7]
ANY_KEY = st.one_of(st.binary(min_size=1, max_size=511), st.sampled_from([key for key in KEYS if key != 7]))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with ww.kv.create(tmp_path / "a.kv") as store:
        store.put_many(KEYS, [b"value of %d" % k for k in range(len(KEYS))])
    return tmp_path / "a.kv"


class LongKeys(RuleBasedStateMachine):
    """A writer, a reader that follows it, and the dicts that they should equal."""

    @initialize(shards=st.sampled_from([0, 0, 2]))
    def begin(self, shards: int) -> None:
        self.folder = Path(tempfile.mkdtemp())
        folders = [self.folder / f"shard{k}" for k in range(shards)] or None
        self.path = self.folder / "a.kv"
        self.store = ww.kv.create(self.path, segment_bytes="64KiB", shards=folders)
        self.reader = ww.kv.open(self.path)
        self.model: dict[bytes, bytes] = {}
        self.committed: dict[bytes, bytes] = {}

    @rule(key=ANY_KEY, value=st.binary(max_size=600))
    def put(self, key: bytes, value: bytes) -> None:
        self.store[key] = value
        self.model[key] = value

    @rule(pairs=st.dictionaries(ANY_KEY, st.binary(max_size=600), max_size=8))
    def put_many(self, pairs: dict[bytes, bytes]) -> None:
        self.store.put_many(list(pairs), list(pairs.values()))
        self.model |= pairs

    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        if self.model:
            self.put(data.draw(st.sampled_from(sorted(self.model))), b"again")

    @rule(key=ANY_KEY, data=st.data())
    def delete(self, key: bytes, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from([key, *sorted(self.model)]))
        assert self.store.delete(key) == (self.model.pop(key, None) is not None)

    @rule(keys=st.lists(ANY_KEY, max_size=8))
    def get_many(self, keys: list[bytes]) -> None:
        keys += list(self.model)[:8]
        values, found = self.store.get_many(keys)
        assert values == [self.model.get(key) for key in keys]
        assert found.tolist() == [key in self.model for key in keys] == [key in self.store for key in keys]
        assert values == [self.store.get(key) for key in keys]

    @rule(prefix=st.binary(max_size=20), start=st.none() | ANY_KEY, limit=st.none() | st.integers(0, 5))
    def list_keys(self, prefix: bytes, start: bytes | None, limit: int | None) -> None:
        expected = sorted(key for key in self.model if key.startswith(prefix) and (start is None or key >= start))
        assert self.store.list(prefix, start, limit) == expected[:limit]

    @rule()
    def follow(self) -> None:
        self.store.commit()
        self.committed = dict(self.model)
        self.reader.refresh()

    @rule()
    def compact(self) -> None:
        self.store.compact(threshold=0.1)

    @rule()
    def open_again(self) -> None:
        self.store.close()
        self.committed = dict(self.model)
        self.store = ww.kv.open(self.path, "r+")
        self.reader.refresh()

    @invariant()
    def same(self) -> None:
        assert dict(self.store.items()) == self.model and dict(self.reader.items()) == self.committed
        assert len(self.store) == len(self.model)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            assert self.store.verify().sound
            self.reader.close()
            self.store.close()
            shutil.rmtree(self.folder)


TestLongKeys = LongKeys.TestCase
TestLongKeys.settings = settings(
    max_examples=examples(15), stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_keys_are_whole_everywhere(path: Path) -> None:
    in_order = [7, *sorted(key for key in KEYS if key != 7)]
    with ww.kv.open(path) as store:
        assert set(store) == set(KEYS) and store.list() == in_order
        assert store.list("n014") == [NAME.encode()] and store.list("x" * 17) == [b"x" * 17, b"x" * 18]
        assert store.list(start=b"x" * 17, limit=2) == [b"x" * 17, b"x" * 18]
        padded, lengths = store.keys_array()
        assert padded.shape == (len(KEYS), 511) and padded.dtype == np.uint8 and lengths.max() == 511
        values, found = store.get_many((padded, lengths))
        assert found.all() and values == [store[key] for key in in_order]
        assert store[NAME] == b"value of 0" and NAME in store and NAME + "?" not in store
        with pytest.raises(errors.KeyMissingError, match=r"no key b'n01440764/n01440764_10027.JPEG'"):
            store["n01440764/n01440764_10027.JPEG"]
        with pytest.raises(errors.ValueSizeError, match=NAME):
            store.get_many([NAME, b"short"], out=np.empty((2, 3), np.uint8))
        assert ww.kv.salvage(path, f"{path}.new").complete
    with ww.kv.open(f"{path}.new") as store:
        assert store.list() == in_order and store[b"y" * 511] == b"value of 3"


def test_lengths_that_cannot_be(path: Path) -> None:
    with ww.kv.open(path, "r+") as store:
        for call in (lambda k: store.get(k), lambda k: store.put(k, b""), lambda k: store.put_many([k], [b""])):
            with pytest.raises(errors.ArgumentError, match="has 512 bytes: keys have 1 to 511; hash longer ones"):
                call(b"z" * 512)
        assert len(store) == len(KEYS) and not store.uncommitted()
    with pytest.raises(ValueError, match="at most 16 bytes, got 17"):
        ww.kv.key_words(b"x" * 17)


def test_two_keys_of_one_hash(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "hash_of_long", lambda key: b"the same for all")
    first, second = b"first " * 5, b"other " * 5
    with ww.kv.create(path, overwrite=True) as store:
        with pytest.raises(errors.ArgumentError, match="have the same hash"):
            store.put_many([first, second], [b"1", b"2"])
        assert len(store) == 0
        store[first] = b"1"
        for put in (lambda: store.put(second, b"2"), lambda: store.put_many([b"x", second], [b"", b""])):
            with pytest.raises(errors.ArgumentError, match=r"b'other .* and b'first .* have the same hash"):
                put()
        store[first] = b"one"
        assert store.get(second) is None and second not in store and not store.delete(second)
        store[b"x"] = b""
        assert store.delete_many([second, b"x", b"x"]) == 1 and first in store
        assert store.get_many([second, first])[0] == [None, b"one"]
        rows, found = store.get_many([second, first], out=np.full((2, 3), 9, np.uint8))
        assert found.tolist() == [False, True] and rows[1].tobytes() == b"one" and not rows[0].any()
        assert list(store) == [first] and store.delete(first)
        store[second] = b"2"
        assert dict(store.items()) == {second: b"2"}


@pytest.mark.parametrize("ragged", [False, True])
def test_records_with_fields(tmp_path: Path, ragged: bool) -> None:
    schema = {"x": ("float32", (3,)), "label": "int64"}
    rows = {"x": np.arange(len(KEYS) * 3, dtype=np.float32).reshape(-1, 3), "label": np.arange(len(KEYS))}
    if ragged:
        schema |= {"image": ("uint8", (None,)), "name": "str"}
        rows |= {"image": [b"i" * k for k in range(len(KEYS))], "name": [f"name {k}" for k in range(len(KEYS))]}
    with ww.kv.create(tmp_path / "a.kv", schema) as store:
        store.put_many(KEYS, rows)
        store["another key of more than 16 bytes"] = {name: values[1] for name, values in rows.items()}
        batch, found = store.get_many([*KEYS, "absent key of more than 16 bytes"])
        assert found.tolist() == [True] * len(KEYS) + [False]
        assert np.array_equal(batch["x"][:-1], rows["x"]) and batch["label"].tolist() == [*range(len(KEYS)), 0]
        assert not ragged or batch["name"].to_list() == [*rows["name"], ""]
        assert store["another key of more than 16 bytes"]["label"] == 1 and store[NAME]["x"].tolist() == [0, 1, 2]
        loader = ww.train.DataLoader(store, batch_size=4, shuffle=False)
        labels = [label for batch in loader for label in batch["label"].tolist()]
        assert sorted(labels) == sorted([*range(len(KEYS)), 1])
    assert ww.kv.salvage(tmp_path / "a.kv", tmp_path / "b.kv").complete


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    with ww.kv.create(path, durability="none") as store:  # the journal has no second copy of the values
        store.put_many(KEYS, [b"value of %d" % k for k in range(len(KEYS))])
    with ww.kv.open(path) as store:
        loc0, loc1 = store._records.index.lookup(as_keys([NAME]))[0].tolist()
    file, end = path / f"{segment_of(loc0):08d}.val", offset_of(loc0) + size_of(loc0, loc1)
    good = file.read_bytes()
    for at, name in ((offset_of(loc0), NAME.encode()), (end - 3, None)):  # a byte of the value, and one of the key
        file.write_bytes(good[:at] + b"?" + good[at + 1 :])
        with ww.kv.open(path, "r+") as store:
            report = store.verify()
            assert [problem.key for problem in report.problems] == [name or module.hash_of_long(NAME.encode())]
            with pytest.raises(errors.CorruptionError, match=NAME):
                store[NAME]
            assert NAME in store
            if name is None:
                with pytest.raises(errors.CorruptionError, match="warpwell kv verify"):
                    store.list()
        report = ww.kv.salvage(path, tmp_path / "new.kv")
        assert report.records == len(KEYS) - 1 and [problem.key for problem in report.lost] == [report.lost[0].key]
        shutil.rmtree(tmp_path / "new.kv")
    with ww.kv.open(path, "r+") as store:
        store[NAME] = b"new"
        store.commit()
        assert dict(store.items())[NAME.encode()] == b"new" and store.verify().sound


def test_batches_of_a_device(path: Path) -> None:
    with ww.kv.open(path, device="cpu") as store:
        values, found = store.get_async([b"short", 7, NAME]).wait()
        assert found.all() and [len(value) for value in values] == [10, 10, 10] and values[2] == b"value of 0"


def test_a_store_of_format_3_becomes_the_newest_before_it_holds_a_long_key(path: Path) -> None:
    for put in (lambda s: s.put("key of more than 16 bytes", b""), lambda s: s.put_many(["key " * 5], [b""])):
        with ww.kv.create(path, overwrite=True):
            pass
        body = (path / "MANIFEST").read_bytes().partition(b"\n")[2]
        (path / "MANIFEST").write_bytes(manifest._title(3, body) + body)
        with ww.kv.open(path, "r+") as store:
            store["short"] = b""
            store.commit()
            assert manifest.read_manifest(str(path)).version == 3
            put(store)
            assert manifest.read_manifest(str(path)).version == FORMAT_VERSION


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "images"
    for name in (NAME, "n01443537/n01443537_2.JPEG", "a/" + "b" * 200):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(name.encode())
    store, dump = str(tmp_path / "a.kv"), str(tmp_path / "a.parquet")
    assert main(["kv", "load", str(source), store]) == 0
    assert main(["kv", "dump", store, dump]) == 0 and main(["kv", "load", dump, str(tmp_path / "b.kv")]) == 0
    capsys.readouterr()
    assert main(["kv", "get", str(tmp_path / "b.kv"), NAME, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["key_hex"] == NAME.encode().hex()
