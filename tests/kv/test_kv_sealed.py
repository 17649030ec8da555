"""The sealed index: a file that all processes map, and the table of later records in front of it."""

import json
import os
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.kv_slots import slots_at, tombstones
from tests.harness.native_calls import NativeCalls

import warpwell as ww
from warpwell import errors
from warpwell.cli.main import main
from warpwell.kv.index import sealed
from warpwell.kv.index.index import T_MASK, T_SEALED, Index, StoreState, lookup, put
from warpwell.kv.keys import Keys, as_keys
from warpwell.kv.log.files import Files
from warpwell.kv.log.format import KEY_LEN_SHIFT, SEGMENT_SHIFT, SUPERBLOCK
from warpwell.kv.log.manifest import open_index, write_snapshot
from warpwell.kv.log.recovery import verify
from warpwell.nvme import KV_RETRIEVE, key_value_word5
from warpwell.nvme.status import KV_UNRECOVERED_ERROR
from warpwell.targets import bus_error
from warpwell.targets.interp.interpreter import Interpreter

KEY = st.binary(min_size=1, max_size=3) | st.integers(0, 20)
UUID = bytes(range(16))


def seal(folder: Path, id: int, slots: np.ndarray) -> sealed.SealedIndex:
    write_snapshot(Files(), str(folder), UUID, id, slots, 0, 0)
    return open_index(str(folder), UUID, id)[0]


def new_slots(keys: Keys, serial: int) -> np.ndarray:
    """Made-up locations of keys, with values of 1, 2, ... bytes."""
    lengths = keys.padded()[1].astype(np.int64)
    numbers = serial + np.arange(keys.size)
    return slots_at(keys, np.column_stack([1 << SEGMENT_SHIFT | numbers, lengths << KEY_LEN_SHIFT | numbers % 1000]))


@given(st.lists(st.tuples(st.sampled_from(["put", "delete", "seal", "count"]), st.lists(KEY, max_size=8))))
def test_index_and_file_are_a_dict(tmp_path_factory, steps) -> None:
    folder, state = tmp_path_factory.mktemp("sealed"), StoreState()
    index, model, serial, is_sealed = Index(state), {}, 1, False
    for number, (step, listed) in enumerate(steps):
        keys = as_keys(listed)
        names = [keys.raw(k) for k in range(keys.size)]
        before = index.lookup(keys)
        assert [tuple(row) for row in before] == [model.get(n, (0, 0)) for n in names]
        after = new_slots(keys, serial)
        serial += keys.size
        if step == "put":
            index.put(after)
            model.update(zip(names, map(tuple, after[:, 2:]), strict=True))
        elif step == "delete":
            existing = keys.take(before[:, 0] != 0)
            assert index.put(tombstones(existing)) == len(model.keys() & set(names))
            assert index.put(tombstones(keys)) == 0 or is_sealed  # a file's absent keys get tombstones
            model = {name: location for name, location in model.items() if name not in names}
        elif step == "seal":
            index.replace(seal(folder, number, index.slots()))
            is_sealed = True
        assert len(index) == len(model)
        assert index.value_bytes == sum(loc1 & 1023 for _, loc1 in model.values())
    found, found_locations = index.entries()
    assert {found.raw(k): tuple(p) for k, p in enumerate(found_locations)} == model
    index.close()
    assert state.drain()


@pytest.mark.parametrize("count", [0, 1, 255, 256, 1000])
@pytest.mark.parametrize("first", [0, 1])
def test_every_key_and_no_other_is_found(tmp_path, count, first) -> None:
    keys = as_keys(np.random.default_rng(0).permutation(count) + first)
    slots = new_slots(keys, 1)
    file = seal(tmp_path, 1, slots)
    assert int(file._descriptor[sealed.B_TYPE]) == (sealed.HASHED if first and count else sealed.ARRAY)
    index = Index(StoreState(), file)
    np.testing.assert_array_equal(index.lookup(keys), slots[:, 2:])
    absent = as_keys([*range(-50, 0), *range(count + first, count + 50), 1 << 62, b"a", bytes(16), bytes(7), bytes(9)])
    assert not index.lookup(absent).any()
    assert sorted(map(tuple, file.slots())) == sorted(map(tuple, slots))
    index.close()


def test_a_table_that_is_replaced_keeps_what_hides_the_file(tmp_path) -> None:
    keys = as_keys(np.arange(20_000))
    slots = new_slots(keys, 1)
    index = Index(StoreState(), seal(tmp_path, 1, slots))
    assert index.put(tombstones(as_keys(np.arange(0, 20_000, 2)))) == 10_000
    more = as_keys(np.arange(20_000, 40_000))
    index.put(new_slots(more, 50_000))
    found = index.lookup(as_keys(np.arange(40_000)))[:, 0] != 0
    assert not found[:20_000:2].any() and found[1:20_000:2].all() and found[20_000:].all()
    assert len(index) == 30_000 == index.entries()[0].size
    index.close()


@pytest.mark.parametrize("first", range(0, 1000, 250))
def test_lookup_on_weak_memory(tmp_path, first: int) -> None:
    key = as_keys([5])
    file = seal(tmp_path, 1, slots_at(key, np.array([[1 << 40 | 1, 8 << KEY_LEN_SHIFT | 1]])))
    for seed in range(first, first + 250):
        memory = np.zeros(8 + 4 * 8, np.int64)
        memory[[T_MASK, T_SEALED]] = 7, file.address
        table = memory.ctypes.data
        results: list[tuple[int, int]] = []

        def writer() -> None:
            put(table, 5, 0, 8, 1 << 40 | 2, 8 << KEY_LEN_SHIFT | 2)
            put(table, 5, 0, 8, -1, 0)
            put(table, 6, 0, 8, -1, 0)

        def reader() -> None:
            for _ in range(4):
                results.append(lookup(table, 5, 0, 8))

        interpreter = Interpreter(seed)
        interpreter.spawn(writer, name="writer")
        interpreter.spawn(reader, name="reader")
        interpreter.run()
        numbers = [loc0 & 0xFF or 3 for loc0, _ in results]
        assert numbers == sorted(numbers) and all(loc0 & 0xFF == loc1 & 0xFF for loc0, loc1 in results), seed
    file.close()


# -- stores -------------------------------------------------------------------------------------------------


def sealed_store(path: Path, keys: list, later: dict | None = None) -> dict:
    """Make a store with a snapshot, and later records in its journal; return its contents."""
    contents = {key: b"%d" % k * 5 for k, key in enumerate(keys)}
    with ww.kv.create(path) as store:
        store.put_many(list(contents), list(contents.values()))
        store.commit()
        store._records.snapshot()
        for key, value in (later or {}).items():
            store[key] = value
    return {**contents, **(later or {})}


NAMES = [*(b"%d" % k for k in range(1950)), *(b"a key that is longer than 16 bytes, %d" % k for k in range(50))]
NUMBERS = list(range(2000))


def flipped(path: Path, at: int, bit: int = 3) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def index_file(path: Path) -> Path:
    return max(path.glob("*.idx"))


FORMS = pytest.mark.parametrize("keys", [NAMES, NUMBERS], ids=["hashed", "array"])


@FORMS
def test_a_damaged_block_is_an_error_and_no_absent_key(tmp_path, keys) -> None:
    path = tmp_path / "a.kv"
    later = {keys[k]: b"later" for k in range(0, len(keys), 3)}
    contents = sealed_store(path, keys, later)
    file = index_file(path)
    good = file.read_bytes()
    for at in (0, 2000, 4080, 4088, 4092):
        flipped(file, SUPERBLOCK + at)
        with ww.kv.open(path) as store:
            wrong = []
            for key in keys:
                try:
                    assert store[key] == contents[key]
                except errors.CorruptionError as error:
                    wrong.append(key)
                    assert "salvage" in str(error) and repr(key) in str(error)
            assert 20 < len(wrong) < len(keys) / 2 and not set(wrong) & set(later)
            bad = ww.kv.as_keys(wrong[:1])
            with pytest.raises(errors.CorruptionError, match=f"key {re.escape(repr(wrong[0]))} "):
                assert wrong[0] not in store
            for call, argument in (
                (store.get_many, [*later, *wrong]),
                (store.__contains__, wrong[0]),
                (store.get, wrong[0]),
                (store._records.sizes, bad),
                (lambda keys: store._records.rows(keys, 5), bad),
                (list, store),
                (len, store),
            ):
                with pytest.raises(errors.CorruptionError, match="block"):
                    call(argument)
            status = NativeCalls(*store.native()).start(retrieve_command(wrong[0]), 0) & 0xFFFF
            assert status == KV_UNRECOVERED_ERROR
            assert [(p.path, p.offset) for p in store.verify().problems] == [(str(file), SUPERBLOCK)]
        with ww.kv.open(path, "r+") as store:
            with pytest.raises(errors.CorruptionError, match="block"):
                store.delete_many(wrong)
            store[wrong[0]] = b"again"  # a put needs no earlier location
            assert store[wrong[0]] == b"again"
            contents[wrong[0]] = b"again"
        assert ww.kv.salvage(path, tmp_path / f"{at}.kv").complete
        with ww.kv.open(tmp_path / f"{at}.kv") as store:
            assert dict(store.items()) == contents
        file.write_bytes(good)


def retrieve_command(key: int | bytes) -> list[int]:
    raw = ww.kv.as_key(key)
    low, high = ww.nvme.key_words(raw)
    return [KV_RETRIEVE, low, 0, 0, 0, key_value_word5(0, len(raw), 0), 0, high]


@FORMS
@pytest.mark.parametrize("part", ["superblock", "segments", "cut", "longer", "missing"])
def test_a_file_without_its_beginning_or_end_is_refused(tmp_path, keys, part) -> None:
    path = tmp_path / "a.kv"
    contents = sealed_store(path, keys)
    file = index_file(path)
    size = file.stat().st_size
    if part in ("superblock", "segments"):
        flipped(file, {"superblock": 72, "segments": size - 4096}[part])
    elif part == "missing":
        file.unlink()
    else:
        os.truncate(file, size + (4096 if part == "longer" else -4096))
    for mode in ("r", "r+"):
        with pytest.raises(errors.CorruptionError, match=file.name):
            ww.kv.open(path, mode)
    assert not verify(path).sound
    assert ww.kv.salvage(path, tmp_path / "new.kv").complete
    with ww.kv.open(tmp_path / "new.kv") as store:
        assert dict(store.items()) == contents


@FORMS
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_file_that_is_cut_while_it_is_mapped(tmp_path, keys, when) -> None:
    path = tmp_path / "a.kv"
    sealed_store(path, keys)
    with ww.kv.open(path) as store:
        if when == "after":  # all blocks were checked
            assert store.get_many(keys)[1].all() and not store.get_many([b"none", -1])[1].any()
        os.truncate(index_file(path), SUPERBLOCK)
        for key in (*keys, b"none", b"1", b"20000"):
            if keys is NAMES or isinstance(key, int):  # a store of an array has only integer keys
                with pytest.raises(errors.CorruptionError, match="block"):
                    store.get(key)


def test_a_missing_or_cut_segment_is_named(tmp_path) -> None:
    path = tmp_path / "a.kv"
    sealed_store(path, NAMES)
    os.truncate(path / "00000001.val", os.path.getsize(path / "00000001.val") - 1)
    with pytest.raises(errors.CorruptionError, match=r"00000001\.val is missing or cut"):
        ww.kv.open(path)


def test_counts_do_not_touch_the_file(tmp_path) -> None:
    path = tmp_path / "a.kv"
    names = NAMES[:1900]  # a long key is stored after its value, and counts
    contents = sealed_store(path, names)
    with ww.kv.open(path) as store:
        stats = store.stats
        assert len(store) == stats.records == len(contents)
        assert stats.live_bytes == sum(map(len, contents.values()))
        assert not store._records.index._sealed._descriptor[sealed.DESCRIPTOR_WORDS :].any()
    with ww.kv.open(path, "r+") as store:
        store[names[0]] = b"longer than it was"
        store[b"new"] = b"new"
        del store[names[1]]
        store.delete_many(names[:3])
        expected = store.stats.live_bytes
    for mode in ("r", "r+"):
        with ww.kv.open(path, mode) as store:
            assert (len(store), store.stats.live_bytes) == (len(contents) - 2, expected)
            assert expected == sum(map(len, store.values()))
            assert names[1] not in store and sorted(store) == sorted([*names[3:], b"new"])


def test_a_reader_takes_the_next_file_and_releases_the_last(tmp_path) -> None:
    path = tmp_path / "a.kv"
    sealed_store(path, NAMES)
    before = len(bus_error._slots)
    with ww.kv.open(path, "r+") as writer, ww.kv.open(path) as reader:
        mapped = len(bus_error._slots)
        for k in range(3):
            writer[b"new"] = b"%d" % k
            writer.delete_many(NAMES[:k])
            writer.commit()
            if k == 1:
                assert reader.refresh() > 0 and reader[b"new"] == b"1"
            writer._records.snapshot()
        assert reader.refresh() == 2  # a put and a delete
        assert reader[b"new"] == b"2" and len(reader) == len(writer) == 1999
        assert reader._records.index._sealed.path == writer._records.index._sealed.path == str(index_file(path))
        assert reader._records.state.drain() and writer._records.state.drain()
        assert len(bus_error._slots) == mapped
    assert len(bus_error._slots) < before + 1 and len(list(path.glob("*.idx"))) == 2


def test_a_closed_store_is_closed_and_not_empty(tmp_path) -> None:
    path = tmp_path / "a.kv"
    sealed_store(path, NAMES)
    store = ww.kv.open(path)
    records = store._records
    store.close()
    with pytest.raises(errors.ClosedError):
        store.get(NAMES[0])
    for read in (lambda: records.values(ww.kv.as_keys(NAMES[:1])), lambda: records.has_key(NAMES[0])):
        with pytest.raises(errors.CorruptionError):
            read()


def test_a_snapshot_that_meets_damage_leaves_the_commit(tmp_path) -> None:
    path = tmp_path / "a.kv"
    sealed_store(path, NUMBERS)
    flipped(index_file(path), SUPERBLOCK)
    with ww.kv.open(path, "r+") as store:
        store.put_many(np.arange(2000, 72_000), np.ones((70_000, 8), np.uint8))
        with pytest.warns(RuntimeWarning, match=r"the commit is durable.*block 0"):
            store.commit()
    with ww.kv.open(path) as store:
        assert store[71_999] == b"\1" * 8 and store[1999] == b"1999" * 5


def test_a_file_system_that_cannot_map(tmp_path, monkeypatch) -> None:
    path = tmp_path / "a.kv"
    contents = sealed_store(path, NAMES)
    monkeypatch.setattr("warpwell.kv.log.manifest.map_guarded", lambda fd, nbytes: None)
    with ww.kv.open(path) as store:
        assert dict(store.items()) == contents


def test_seal(tmp_path, capsys) -> None:
    path = tmp_path / "a.kv"
    with ww.kv.create(path) as store:
        store.put_many(NUMBERS, [b"%d" % k for k in NUMBERS])
    ww.kv.seal(path)
    with ww.kv.open(path) as store:
        assert store._records.log.is_sealed and store._records.index._sealed.count == len(NUMBERS)
        assert store.verify().journal_records == 0 and store[7] == b"7"
    files = sorted(os.listdir(path))
    ww.kv.seal(path)  # nothing to do
    assert sorted(os.listdir(path)) == files
    with ww.kv.open(path, "r+") as store:
        store[7] = b"seven"
        store.seal()
        assert store.uncommitted() == 0 and store[7] == b"seven"
        with pytest.raises(errors.SharingError):
            ww.kv.seal(path)
        store[8] = b"eight"
    assert main(["kv", "seal", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["records"] == len(NUMBERS)
    with ww.kv.open(path) as store:
        assert store.verify().journal_records == 0 and (store[7], store[8]) == (b"seven", b"eight")
    with pytest.raises(errors.MissingFileError):
        ww.kv.seal(tmp_path / "none")


def test_seal_upgrades_an_earlier_format(tmp_path) -> None:
    with zipfile.ZipFile(Path(__file__).parent.parent / "data" / "kv-format-2.zip") as file:
        file.extractall(tmp_path)
    path = tmp_path / "one.kv"
    with ww.kv.open(path) as store:
        contents = dict(store.items())
        assert store._records.index._sealed is None
    ww.kv.seal(path)
    assert (path / "MANIFEST").read_bytes().startswith(b"warpwell-kv 5 ")
    with ww.kv.open(path) as store:
        assert store._records.index._sealed is not None
        assert dict(store.items()) == contents and store.verify().sound


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_reads_the_file_of_its_parent(tmp_path) -> None:
    path = tmp_path / "a.kv"
    contents = sealed_store(path, NAMES, {NAMES[3]: b"later"})
    with ww.kv.open(path) as store:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                if [store[key] for key in NAMES] == list(contents.values()) and store.refresh() == 0:
                    code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert store[NAMES[0]] == contents[NAMES[0]]
