"""Ragged fields: round trips through a store, `Ragged` against lists, bad input, damaged records."""

import json
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.harness import kv_device as load
from tests.harness.examples import examples

import warpwell as ww
from warpwell import errors
from warpwell.cli import main
from warpwell.kv import Ragged, as_keys
from warpwell.kv.log.format import offset_of, size_of

DTYPES = [np.dtype(c) for c in "?bBhHiIlLefdF"]
IMAGES = {"img": ("uint8", (None,)), "label": "int64", "name": "str", "raw": "bytes", "boxes": ("float32", (None, 3))}

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
fields = st.one_of(
    st.just(("str", ())),
    st.just(("bytes", ())),
    st.tuples(
        st.sampled_from(DTYPES).map(lambda d: d.name),
        st.sampled_from([(), (3,), (2, 2), (None,), (None, 1), (None, 3), (None, 2, 2)]),
    ),
)


def items_of(spec: tuple[str, tuple[int | None, ...]]) -> st.SearchStrategy[Any]:
    if spec[0] in ("str", "bytes"):
        return texts if spec[0] == "str" else st.binary(max_size=20)
    extents = [st.just(n) if n is not None else st.integers(0, 5) for n in spec[1]]
    return st.tuples(*extents).flatmap(lambda shape: hnp.arrays(spec[0], shape))


@st.composite
def batches(draw: st.DrawFn) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    schema = {f"f{k}": spec for k, spec in enumerate(draw(st.lists(fields, min_size=1, max_size=5)))}
    record = st.fixed_dictionaries({name: items_of(spec) for name, spec in schema.items()})
    return schema, draw(st.lists(record, max_size=6))


def same(left: Any, right: Any) -> bool:
    return np.asarray(left).tobytes() == np.asarray(right).tobytes() and np.shape(left) == np.shape(right)


@given(batches(), st.integers(1, 3))
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_records_of_any_schema_come_back(
    tmp_path_factory: pytest.TempPathFactory, batch: tuple[dict[str, Any], list[dict[str, Any]]], shards: int
) -> None:
    schema, records = batch
    path = tmp_path_factory.mktemp("ragged") / "a.kv"
    folders = None if shards == 1 else [f"{path}{k}" for k in range(shards)]
    columns = {name: [record[name] for record in records] for name in schema}
    arrays = {
        name: np.array(items, spec[0]).reshape(-1, *spec[1])
        if spec[0] not in ("str", "bytes") and None not in spec[1]
        else items
        for (name, spec), items in zip(schema.items(), columns.values(), strict=True)
    }
    n = len(records)
    with ww.kv.create(path, schema=schema, shards=folders, durability="none") as store:
        store.put_many(np.arange(n), arrays)
        again, _ = store.get_many(np.arange(n))
        store.put_many(np.arange(n) + n, again)  # each ragged field as a Ragged
        for k, record in enumerate(records):
            store[2 * n + k] = record
        store["last"] = _empty(schema)
    with ww.kv.open(path) as store:
        assert store.schema == ww.kv.Schema(schema) and len(store) == 3 * n + 1
        keys = [k for k in range(3 * n)] + [b"absent"]
        found_values, found = store.get_many(keys)
        assert found.tolist() == [True] * (3 * n) + [False]
        for name, column in found_values.items():
            assert len(column) == 3 * n + 1
            for k, item in enumerate(column):
                if k < 3 * n:
                    assert same(item, records[k % n][name])
                    assert same(store[k][name], item)
            assert not np.asarray(column[3 * n]).any() if not isinstance(column, Ragged) else len(column[3 * n]) == 0
        for key, value in store.items():
            for name, item in value.items():
                assert key == b"last" or same(item, records[key % n][name])
        first = next(iter(schema))
        assert list(store.get_many(keys, fields=[first])[0]) == [first]


def _empty(schema: dict[str, Any]) -> dict[str, Any]:
    def item(dtype: str, shape: tuple[int | None, ...]) -> Any:
        if dtype in ("str", "bytes"):
            return "" if dtype == "str" else b""
        return np.zeros([n or 0 for n in shape], dtype)

    return {name: item(*spec) for name, spec in schema.items()}


# -- Ragged -------------------------------------------------------------------------------------------------

any_ragged = st.one_of(
    st.tuples(st.just(str), st.lists(texts)),
    st.tuples(st.just(bytes), st.lists(st.binary(max_size=9))),
    st.tuples(st.just(np.ndarray), st.lists(items_of(("int16", (None, 2))))),
)


def ragged_of(item_type: type, items: list[Any]) -> Ragged:
    raw = [item.encode() if isinstance(item, str) else item for item in items]
    offsets = np.cumsum([0, *map(len, raw)])
    if item_type is np.ndarray:
        return Ragged(np.concatenate([np.empty((0, 2), np.int16), *raw]), offsets)
    return Ragged(np.frombuffer(b"".join(raw), np.uint8), offsets, item_type)


@given(any_ragged, st.data())
@settings(max_examples=examples(60), deadline=None)
def test_ragged_acts_as_a_list(made: tuple[type, list[Any]], data: st.DataObject) -> None:
    item_type, items = made
    ragged = ragged_of(item_type, items)
    picks = data.draw(st.lists(st.integers(0, len(items) - 1), max_size=5)) if items else []
    step = data.draw(st.sampled_from([1, 2, -1, -3]))
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(items), max_size=len(items))), bool)
    pairs = [
        (ragged, items),
        (ragged[1:], items[1:]),
        (ragged[::step], items[::step]),
        (ragged[np.array(picks, np.intp)], [items[k] for k in picks]),
        (ragged[mask], [item for item, use in zip(items, mask, strict=True) if use]),
    ]
    for chosen, expected in pairs:
        assert len(chosen) == len(expected) and chosen.item_type is item_type
        for got in (
            list(chosen),
            chosen.to_list(),
            [chosen[k] for k in range(len(chosen))],
            pickle.loads(pickle.dumps(chosen)),
        ):
            assert all(type(a) is type(b) and same(a, b) for a, b in zip(got, expected, strict=True))
        assert (
            chosen == ragged_of(item_type, expected)
            and chosen.offsets.tolist() == np.cumsum([0, *chosen.lengths]).tolist()
        )
        for arrow in (chosen.to_arrow(), chosen.to_arrow()[1:], pa.chunked_array([chosen.to_arrow()] * 2)):
            back = Ragged.from_arrow(arrow)
            assert back.to_arrow() == (arrow.combine_chunks() if isinstance(arrow, pa.ChunkedArray) else arrow)
    if len(items) > 1:
        assert (ragged == ragged[::-1]) == all(same(a, b) for a, b in zip(items, items[::-1], strict=True))


def test_ragged_shares_memory_and_copies_scattered_items_once() -> None:
    values = np.arange(10, dtype=np.float32)
    ragged = Ragged(values, [0, 3, 3, 10])
    assert np.shares_memory(ragged[2], values) and np.shares_memory(ragged.values, values)
    assert np.shares_memory(np.asarray(ragged.to_arrow().values), values)
    scattered = ragged[::-1]
    assert scattered.values.tolist() == [3, 4, 5, 6, 7, 8, 9, 0, 1, 2] and scattered.offsets.tolist() == [0, 7, 7, 10]
    assert scattered.values is not None and np.shares_memory(scattered.values, scattered[0])
    with pytest.raises(errors.IndexRangeError, match="index 3 of a Ragged with 3 items"):
        ragged[3]
    for index in ("a", None, True, [[0, 1]]):
        with pytest.raises(errors.ArgumentError, match="does not select"):
            ragged[index]
    with pytest.raises(ValueError, match="read-only"):
        ragged.lengths[0] = 100


@pytest.mark.parametrize(
    ("values", "offsets", "item_type", "match"),
    [
        (np.zeros(4), [0, 3, 2, 4], np.ndarray, "must not decrease"),
        (np.zeros(4), [0, 5], np.ndarray, "between 0 and 4"),
        (np.zeros(4), [-1, 2], np.ndarray, "between 0 and 4"),
        (np.zeros(4), [], np.ndarray, r"shape \(N \+ 1,\)"),
        (np.zeros(4), [0.0, 4.0], np.ndarray, r"shape \(N \+ 1,\)"),
        (np.zeros(4), [[0, 4]], np.ndarray, r"shape \(N \+ 1,\)"),
        (np.zeros(4), [0, 4], str, "uint8"),
        (np.zeros(()), [0], np.ndarray, "one dimension"),
        (np.array(["a"]), [0, 1], np.ndarray, "numbers"),
        (np.zeros(4), [0, 4], int, "item_type"),
    ],
)
def test_ragged_refuses(values: Any, offsets: Any, item_type: type, match: str) -> None:
    with pytest.raises(errors.ArgumentError, match=match):
        Ragged(values, offsets, item_type)


# -- stores -------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path):
    with ww.kv.create(tmp_path / "a.kv", schema=IMAGES, durability="none") as made:
        made.put_many([1, 2, 3], columns(3))
        yield made


def columns(count: int) -> dict[str, Any]:
    return {
        "img": [bytes([k]) * (k + 1) for k in range(count)],
        "label": np.arange(count),
        "name": [f"é{k}" * k for k in range(count)],
        "raw": [b"raw" * k for k in range(count)],
        "boxes": [np.full((k, 3), k, np.float32) for k in range(count)],
    }


@pytest.mark.parametrize(
    ("img", "expected"),
    [
        ([b"a", np.array([1, 2], np.uint8), [3, 4, 5]], [b"a", b"\1\2", b"\3\4\5"]),
        (np.arange(6, dtype=np.uint8).reshape(3, 2), [b"\0\1", b"\2\3", b"\4\5"]),
        (Ragged(np.arange(4, dtype=np.uint8), [0, 1, 1, 4]), [b"\0", b"", b"\1\2\3"]),
        (Ragged(np.arange(4, dtype=np.uint8), [0, 1, 1, 4], bytes)[::-1], [b"\1\2\3", b"", b"\0"]),
        (pa.array([b"a", b"", b"bcd"], pa.binary()), [b"a", b"", b"bcd"]),
        (pa.array([[9], [], [2, 3]], pa.list_(pa.uint8())), [b"\t", b"", b"\2\3"]),
        (pa.chunked_array([pa.array([b"a", b""]), pa.array([b"x", b"bcd"])[1:]]), [b"a", b"", b"bcd"]),
        ((bytes(k) for k in range(3)), [b"", b"\0", b"\0\0"]),
    ],
)
def test_inputs_of_a_ragged_field(store: ww.kv.Store, img: Any, expected: list[bytes]) -> None:
    texts = pa.array(["a", "", "é"], pa.string_view())
    store.put_many([7, 8, 9], {**columns(3), "img": img, "name": texts})
    batch, _ = store.get_many([7, 8, 9])
    assert [item.tobytes() for item in batch["img"]] == expected
    assert batch["name"].to_arrow() == texts.cast(pa.large_string())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"img": [b"a", b"b"]}, "2 items for 3 keys"),
        ({"img": b"abc"}, "single bytes"),
        ({"img": 5}, "single int"),
        ({"img": [b"a", None, b"c"]}, "None"),
        ({"img": [b"a", "b", b"c"]}, "'b'"),
        ({"img": [b"a", [256], b"c"]}, "does not fit uint8"),
        ({"img": [b"a", np.zeros(2), b"c"]}, "float64"),
        ({"img": [b"a", np.zeros((2, 2), np.uint8), b"c"]}, "shape"),
        ({"img": [b"a", np.uint8(3), b"c"]}, "shape"),
        ({"img": Ragged(np.zeros(3), [0, 1, 2, 3])}, "float64"),
        ({"img": Ragged(np.zeros((3, 2), np.uint8), [0, 1, 2, 3])}, "convert"),
        ({"boxes": Ragged(np.zeros((3, 3), ">f4"), [0, 1, 2, 3])}, "3 items, >f4"),
        ({"img": np.array([b"ab", b"a\0", b"cd"])}, "padding"),
        ({"img": pa.array([b"a", None, b"c"])}, "1 nulls"),
        ({"img": pa.array([1, 2, 3])}, "int64"),
        ({"img": pa.array([[1], [None], [2]], pa.list_(pa.uint8()))}, "1 nulls"),
        ({"img": pa.array([[1], [2], [3]], pa.list_(pa.int16()))}, "int16"),
        ({"name": ["a", b"b", "c"]}, "pass a string"),
        ({"name": ["a", None, "c"]}, "None"),
        ({"name": ["a", "\ud800", "c"]}, "surrogates"),
        ({"name": "abc"}, "single str"),
        ({"name": pa.array([b"a", b"\xff", b"c"])}, "convert"),
        ({"name": Ragged(np.frombuffer(b"a\xffc", np.uint8), [0, 1, 2, 3], str)}, "UTF-8"),
        ({"name": Ragged(np.frombuffer("éa".encode(), np.uint8), [0, 1, 2, 3], str)}, "inside of a character"),
        ({"raw": [b"a", "b", b"c"]}, "'b': pass bytes"),
        ({"raw": [b"a", None, b"c"]}, "None"),
        ({"boxes": [np.zeros((1, 2), np.float32)] * 3}, "shape"),
        ({"boxes": [np.zeros((1, 3))] * 3}, "float64"),
        ({"label": [1, None, 2]}, "not numbers"),
        ({"label": np.zeros(2, np.int64)}, "shape"),
        ({"label": pa.array([1, None, 2])}, "has nulls"),
        ({"boxes": [[], [[1, 2, 3j]], []]}, "does not fit float32"),
        ({"boxes": [[], [[1, 2, 1e300]], []]}, "does not fit float32"),
        ({"other": 1}, "not in the schema"),
    ],
)
def test_bad_input_stores_nothing(store: ww.kv.Store, change: dict[str, Any], match: str) -> None:
    before = {key: repr(value) for key, value in store.items()}
    with pytest.raises(errors.SchemaError, match=match):
        store.put_many([1, 8, 9], {**columns(3), **change})
    item = {name: column[1] for name, column in columns(3).items()}
    (name, value), *_ = change.items()
    if isinstance(value, list) and len(value) == 3 and name != "label":
        with pytest.raises(errors.SchemaError, match=match):
            store[1] = {**item, name: value[1]}
    assert {key: repr(value) for key, value in store.items()} == before


def test_values_that_are_too_large_store_nothing(store: ww.kv.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpwell.kv.schema.MAX_VALUE", 1000)
    change = {**columns(3), "raw": [b"", bytes(2000), b""]}
    with pytest.raises(errors.ValueSizeError, match=r"record 1 of the batch has 20.. bytes"):
        store.put_many([1, 8, 9], change)
    with pytest.raises(errors.ValueSizeError, match=r"a record has 20.. bytes"):
        store[8] = {name: column[1] for name, column in change.items()}
    assert sorted(store) == [1, 2, 3] and store[1]["name"] == ""


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:-1],
        lambda raw: raw + b"\0",
        lambda raw: raw[:8],
        lambda raw: b"",
        lambda raw: raw[:8] + b"\xff\xff\xff\xff" + raw[12:],
        lambda raw: raw[:20] + b"\xff\xff\xff\xff" + raw[24:],
        lambda raw: raw[:8] + (9).to_bytes(4, "little") + raw[12:],
    ],
)
def test_a_record_whose_lengths_are_wrong_is_corrupt(store: ww.kv.Store, damage: Any) -> None:
    raw = store.schema.pack_one(store[2])
    store._records.put_one((2).to_bytes(8, "little"), damage(raw), True)
    with pytest.raises(errors.CorruptionError, match="key 2 is damaged"):
        store[2]
    with pytest.raises(errors.CorruptionError, match="key 2 is damaged"):
        store.get_many([1, 2, 3])
    with pytest.raises(errors.CorruptionError, match="key 2 is damaged"):
        store.get_many([1, 2], fields=["label"])
    assert store[1]["label"] == 0 and store.get_many([3, 1])[0]["label"].tolist() == [2, 0]
    store.commit()
    report = ww.kv.salvage(_copied(store), f"{store.path}.new")
    assert report.records == 2 and "not a record of the schema" in str(report.lost[0])


def test_a_batch_from_a_damaged_index_is_corrupt(store: ww.kv.Store) -> None:
    store.seal()
    file = max(Path(store.path).glob("*.idx"))
    raw = bytearray(file.read_bytes())
    raw[-2 * 4096 + 40] ^= 1
    path = _copied(store)
    (Path(path) / file.name).write_bytes(raw)
    with ww.kv.open(path) as damaged, pytest.raises(errors.CorruptionError, match="block of the index"):
        damaged.get_many([1, 2, 3] * 100)


def _copied(store: ww.kv.Store) -> str:
    import shutil

    shutil.copytree(store.path, f"{store.path}.copy")
    return f"{store.path}.copy"


def test_schemas(tmp_path: Path) -> None:
    plain = ww.kv.Schema({"x": ("uint8", (8, 8)), "y": "int64"})
    assert plain.to_json() == [["x", "|u1", [8, 8]], ["y", "<i8", []]] and plain.nbytes == 72 and not plain.ragged
    schema = ww.kv.Schema(IMAGES)
    assert ww.kv.Schema.from_json(schema.to_json()) == schema == ww.kv.Schema({**IMAGES, "name": str, "raw": bytes})
    assert schema.nbytes == 8 + 16 and [f.name for f in schema.ragged] == ["img", "name", "raw", "boxes"]
    assert schema.record.names == ("label",)
    for spec in [("uint8", (3, None)), ("uint8", (None, None)), ("str", (3,)), "bfloat16", ("uint8", (None, 0)), "O"]:
        with pytest.raises(errors.SchemaError):
            ww.kv.create(tmp_path / "b.kv", schema={"a": spec})
    assert not (tmp_path / "b.kv").exists()


def test_fields_and_out(store: ww.kv.Store) -> None:
    batch, found = store.get_many([3, 4, 1], fields=["name", "label"])
    assert list(batch) == ["label", "name"] and batch["label"].tolist() == [2, 0, 0] and found.tolist() == [1, 0, 1]
    assert store.get_async([3], fields=["raw"]).wait()[0]["raw"].to_list() == [b"rawraw"]
    with pytest.raises(errors.SchemaError, match="'title'"):
        store.get_many([1], fields=["title"])
    with pytest.raises(errors.ArgumentError, match="out"):
        store.get_many([1], out=np.zeros((1, 24), np.uint8))


def test_lists_of_a_fixed_size_are_arrays(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    numbers = np.arange(24, dtype=np.float32)
    pairs = pa.FixedSizeListArray.from_arrays(pa.array(numbers), 2)
    boxes = pa.FixedSizeListArray.from_arrays(pairs, 3)
    with ww.kv.create(tmp_path / "s", {"pair": ("float32", (2,)), "box": ("float32", (3, 2))}) as store:
        store.put_many(range(3), {"pair": pa.chunked_array([pairs[9:11], pairs[11:]]), "box": boxes.slice(1)})
        assert np.array_equal(store[1]["pair"], [20, 21]) and np.array_equal(store[1]["box"], boxes[2].as_py())
        for wrong in (pa.array([[1, 2]], pa.list_(pa.float64(), 2)), pa.array([[1, None]], pairs.type), pairs[:2]):
            with pytest.raises(errors.SchemaError, match="'pair'"):
                store.put_many([9], {"pair": wrong, "box": boxes[:1]})
        assert len(store) == 3


def test_the_command_shows_ragged_fields(store: ww.kv.Store, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    store.commit()
    fields = {"img": b"\2\2\2", "name": "é2é2".encode(), "raw": b"rawraw", "boxes": np.full(6, 2, np.float32).tobytes()}
    for name, contents in fields.items():
        assert main(["kv", "get", store.path, "3", "--field", name]) == 0
        assert capsysbinary.readouterr().out == contents
    assert main(["kv", "get", store.path, "3"]) == 0
    assert "str [4]  'é2é2'" in capsysbinary.readouterr().out.decode()
    assert main(["kv", "get", store.path, "3", "--json"]) == 0
    found = json.loads(capsysbinary.readouterr().out)["fields"]
    assert (found["img"], found["name"], found["raw"]) == ([2, 2, 2], "é2é2", "cmF3cmF3")
    assert main(["kv", "stats", store.path, "--json"]) == 0
    assert json.loads(capsysbinary.readouterr().out)["fields"]["boxes"] == ["float32", [None, 3]]


def test_bytes_between_ragged_values_are_not_stored(tmp_path: Path) -> None:
    bounds = np.arange(20).reshape(-1, 2) // 2 * 64 + [0, 60]
    values = Ragged(np.full(640, 5, np.uint8), bounds.reshape(-1), bytes)[::2]
    with ww.kv.create(tmp_path / "s.kv") as store:
        store.put_many(np.arange(10), values)
        store.commit()
        assert store.verify().problems == []
        assert store.get_many(np.arange(10))[0] == [b"\5" * 60] * 10
    assert (tmp_path / "s.kv" / "00000001.val").read_bytes()[4096:].rstrip(b"\5") == (b"\5" * 60 + bytes(4)) * 9


def test_a_store_without_a_schema_takes_ragged_values(tmp_path: Path) -> None:
    with ww.kv.create(tmp_path / "b.kv", durability="none") as store:
        store.put_many([1, 2, 3], pa.array([b"a", b"", b"bcd"]))
        store.put_many([4, 5], Ragged(np.arange(4, dtype=np.uint8), [0, 3, 4]))
        assert store.get_many([1, 2, 3, 4, 5])[0] == [b"a", b"", b"bcd", b"\0\1\2", b"\3"]
        with pytest.raises(errors.ArgumentError, match="2 values for 3 keys"):
            store.put_many([1, 2, 3], pa.array([b"a", b""]))
        with pytest.raises(errors.ArgumentError, match="padding"):
            store.put_many([1, 2], np.array([b"ab", b"a\0"]))
        with pytest.raises(errors.ArgumentError, match="no schema"):
            store.get_many([1], fields=["a"])


# -- kernels ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder, records = tmp_path_factory.mktemp("ragged"), load.ragged_records(60)
    with ww.kv.create(folder / "a.kv", schema=load.RAGGED, shards=[folder / "s0", folder / "s1"]) as store:
        store.put_many(np.arange(60), records)
    return folder / "a.kv", records


@pytest.mark.parametrize(
    ("device", "count", "options"),
    [
        ("cpu", 60, {}),
        ("cpu", 60, {"value_bytes": 512}),
        ("cpu", 60, {"returns": "queue"}),
        ("cpu", 60, {"cache": "1MiB", "value_bytes": "20KiB"}),
        ("interp", 6, {"value_bytes": "20KiB"}),
    ],
)
def test_kernels_read_fields_by_name(images: Any, device: str, count: int, options: dict[str, Any]) -> None:
    path, records = images
    keys = np.arange(count + 1)
    keys[count] = 1000  # the key is absent
    with ww.kv.open(path, device=device, **options) as kv:
        for _ in range(1 + ("cache" in options)):
            rows, sizes = np.zeros((count + 1, 18_200), np.uint8), np.zeros(count + 1, np.int64)
            out = np.zeros((count + 1, 9))
            load.reduce_fields[count + 1](kv, keys, rows, sizes, out)
            assert out[:count].tolist() == [load.reduced(records, k) for k in range(count)]
            assert sizes[count] == -1 and out[count].tolist() == [0] * 8 + [6]


@pytest.mark.parametrize(("device", "count"), [("cpu", 60), ("interp", 4)])
def test_fields_beyond_the_end_of_a_row_are_empty(images: Any, device: str, count: int) -> None:
    path, records = images
    with ww.kv.open(path, device=device) as kv:
        for nbytes in (1, 5, kv.schema.nbytes - 1, kv.schema.nbytes, 3000):
            # an odd stride: fields need no alignment
            rows, sizes = np.zeros((count, nbytes), np.uint8), np.zeros(count, np.int64)
            out = np.zeros((count, 9))
            load.reduce_fields[count](kv, np.arange(count), rows, sizes, out)
            for k in range(count):
                expected = load.reduced(records, k)
                fits = nbytes >= kv.schema.nbytes
                assert out[k, [0, 2, 7, 8]].tolist() == [expected[j] * fits for j in (0, 2, 7, 8)]
                end = kv.schema.nbytes + len(records["img"][k])
                assert out[k, 1] == (expected[1] if end <= nbytes else 0)
                assert sizes[k] > nbytes or out[k].tolist() == expected
            random = np.random.default_rng(nbytes).integers(0, 256, rows.shape, np.uint8)
            load.reduce_fields[count](
                kv, np.full(count, 1000), random, sizes, out
            )  # the keys are absent, whatever the rows contain
            assert (sizes == -1).all()


def test_kernels_change_fields_in_place(images: Any) -> None:
    with ww.kv.open(images[0], device="cpu") as kv:
        rows, labels = np.zeros((3, 18_200), np.uint8), np.zeros(3, np.int64)
        load.overwrite_labels[3](kv, np.arange(3), rows, labels)
        assert labels.tolist() == [77] * 3 and (rows[:, kv.schema.nbytes] == 77).all()


def test_fields_that_kernels_cannot_read(images: Any, tmp_path: Path) -> None:
    arguments = np.arange(2), np.zeros((2, 64), np.uint8), np.zeros(2)
    with ww.kv.open(images[0], device="cpu") as kv:
        with pytest.raises(errors.CompileError, match=r"'picture' is not in the schema, which has .*'img'"):
            load.unknown_field[2](kv, *arguments)
    ww.kv.create(tmp_path / "b.kv").close()
    ww.kv.create(tmp_path / "c.kv", schema={"picture": "complex64"}).close()
    for name, match in (("b.kv", "needs a store with a schema"), ("c.kv", "no complex items")):
        with ww.kv.open(tmp_path / name, device="cpu") as kv, pytest.raises(errors.CompileError, match=match):
            load.unknown_field[2](kv, *arguments)


@pytest.mark.parametrize("device", ["cpu", "interp"])
def test_batches_of_a_device(images: Any, device: str) -> None:
    path, records = images
    with ww.kv.open(path, device=device) as kv:
        batch, found = kv.get_async([7, 1000, 3], fields=["img", "name", "label"]).wait()
        assert list(batch) == ["img", "label", "name"] and found.tolist() == [True, False, True]
        assert batch["img"].values.tobytes() == records["img"][7].tobytes() + records["img"][3].tobytes()
        assert batch["name"].to_list() == [records["name"][7], "", records["name"][3]]


@pytest.mark.parametrize(
    "schema",
    [
        {"x": "bytes"},
        {"name": "str", "x": "bytes"},
        {"label": "int64", "image": "bytes", "name": "str", "box": ("float32", (2, 2)), "points": ("int16", (None, 3))},
        {"points": ("int16", (None, 3)), "flag": "bool"},
    ],
)
def test_single_records_are_the_same_by_native_code_and_by_python(tmp_path: Path, schema: dict) -> None:
    values = {
        "x": b"abc" * 50, "name": "é" * 3, "label": np.int64(-5), "image": b"", "flag": np.bool_(True),
        "box": np.arange(4, dtype=np.float32).reshape(2, 2), "points": np.arange(6, dtype=np.int16).reshape(2, 3),
    }  # fmt: skip
    record = {name: values[name] for name in schema}
    with ww.kv.create(tmp_path / "s", schema=schema) as store:
        store[1] = store[2] = record
        store.commit()
        by_python = store.get(1)
        location = store._records.index.lookup(as_keys([2]))[0]
    with ww.kv.open(tmp_path / "s") as store:
        get = store.get
        assert isinstance(store._get, types.BuiltinFunctionType)
        for found in (get(1), by_python):
            assert list(found) == list(schema)
            for name, value in record.items():
                assert type(found[name]) is type(value) and np.array_equal(found[name], value)
        assert get(3) is None and get(3, "absent") == get(3, default="absent") == "absent"
        name = next(iter(schema))
        references = sys.getrefcount(name), sys.getrefcount(None)
        for _ in range(1000):
            get(1)
        assert abs(sys.getrefcount(name) - references[0]) < 9 and abs(sys.getrefcount(None) - references[1]) < 99
        with open(next((tmp_path / "s").glob("*.val")), "r+b") as file:
            file.seek(int(offset_of(location[0])) + int(size_of(*location)) - 1)
            file.write(b"\xff")
        for read in (get, lambda key: store.get_many([1, key])):
            with pytest.raises(errors.CorruptionError, match=r"00000001\.val, byte \d+: the \w+ of key 2 ") as raised:
                read(2)
            assert raised.value.path == file.name and raised.value.offset == offset_of(location[0])
    for key in (1, 3):
        with pytest.raises(errors.ClosedError):
            get(key)
