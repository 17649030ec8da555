"""Dumps load again as the same store: keys of all kinds, schemas, metadata, joined stores."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from tests.harness.examples import examples
from tests.kv.test_kv_ragged import IMAGES, batches, same

import warpwell as ww
from warpwell import errors
from warpwell.kv.convert.arrow import to_parquet
from warpwell.kv.convert.importers import load, open_source

integers = st.integers(-(1 << 63), (1 << 63) - 1)
any_bytes = (
    st.binary(min_size=1, max_size=40) | st.binary(min_size=8, max_size=8) | st.binary(min_size=500, max_size=511)
)


def dump(store: ww.kv.Store, path: Path) -> tuple[int, int]:
    return to_parquet(store, path, lambda *_: None)


def loaded(source_path: Path, path: Path) -> None:
    source = open_source(source_path)
    with ww.kv.create(path, source.schema, metadata=source.metadata) as store:
        load(source, store)
    source.close()


def compare(path: Path, again: Path) -> None:
    with ww.kv.open(path) as first, ww.kv.open(again) as second:
        assert first.schema == second.schema and first.metadata == second.metadata
        keys = first.list()
        assert [(type(key), key) for key in second.list()] == [(type(key), key) for key in keys]
        values, values_again = first.get_many(keys)[0], second.get_many(keys)[0]
        if first.schema is None:
            assert values == values_again
            return
        for name in values:
            assert all(same(left, right) for left, right in zip(values[name], values_again[name], strict=True)), name


@given(st.data(), st.sampled_from([integers, st.integers(0, 5), any_bytes]), st.none() | batches())
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_dump_loads_as_the_same_store(data: st.DataObject, keys_strategy: Any, batch: Any) -> None:
    schema, records = (None, data.draw(st.lists(st.binary(max_size=9), max_size=6))) if batch is None else batch
    keys = data.draw(st.lists(keys_strategy, min_size=len(records), max_size=len(records), unique_by=ww.kv.as_key))
    metadata = data.draw(st.sampled_from([{}, {"classes": {"f0": ["cat", "dog"]}}]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ww.kv.create(folder / "a.kv", schema, metadata=metadata) as store:
            for key, record in zip(keys, records, strict=True):
                store[key] = record
            try:
                assert dump(store, folder / "a.parquet")[0] == len(records)
            except errors.ArgumentError as error:
                assert "Arrow has no type" in str(error) and "complex64" in str(error)
                return
        if records:
            loaded(folder / "a.parquet", folder / "b.kv")
            compare(folder / "a.kv", folder / "b.kv")


def test_a_dump_in_several_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpwell.kv.convert.arrow.BATCH_RECORDS", 2)
    with ww.kv.create(tmp_path / "a.kv", IMAGES) as store:
        images = {"img": [np.arange(k, dtype=np.uint8) for k in range(5)], "label": range(5), "name": ["é"] * 5}
        images |= {"raw": [b"x" * k for k in range(5)], "boxes": [np.ones((k, 3), np.float32) for k in range(5)]}
        store.put_many([9, -1, 3, 0, 7], images)
        dump(store, tmp_path / "a.parquet")
    table = parquet.read_table(tmp_path / "a.parquet")
    assert table["__key__"].to_pylist() == [-1, 0, 3, 7, 9] and table["raw"].to_pylist()[1] == b"xxx"
    assert (
        table.schema.field("img").type == pa.large_binary()
        and parquet.ParquetFile(tmp_path / "a.parquet").num_row_groups == 3
    )
    loaded(tmp_path / "a.parquet", tmp_path / "b.kv")
    compare(tmp_path / "a.kv", tmp_path / "b.kv")


def test_integers_among_names_become_bytes(tmp_path: Path) -> None:
    with ww.kv.create(tmp_path / "a.kv") as store:
        store.put_many([5, b"k"], [b"five", b"name"])
        dump(store, tmp_path / "a.parquet")
    loaded(tmp_path / "a.parquet", tmp_path / "b.kv")
    with ww.kv.open(tmp_path / "b.kv") as store:
        assert dict(store.items()) == {ww.kv.as_key(5): b"five", b"k": b"name"} and store[5] == b"five"


def test_a_field_with_the_name_of_the_keys(tmp_path: Path) -> None:
    with ww.kv.create(tmp_path / "a.kv", {"__key__": "int64"}) as store:
        with pytest.raises(errors.ArgumentError, match="rename the field"):
            dump(store, tmp_path / "a.parquet")


def test_a_full_disk(tmp_path: Path) -> None:
    with ww.kv.create(tmp_path / "a.kv") as store:
        store[1] = bytes(range(256)) * 100
        with pytest.raises(errors.StorageFullError, match="no space left"):
            dump(store, Path("/dev/full"))


@pytest.mark.parametrize("described", ["{", "[]", '{"schema": 1, "metadata": {}}', '{"schema": null, "metadata": 1}'])
def test_a_description_that_is_damaged(tmp_path: Path, described: str) -> None:
    table = pa.table({"x": [1, 2]}).replace_schema_metadata({"warpwell": described})
    parquet.write_table(table, tmp_path / "a.parquet")
    source = open_source(tmp_path / "a.parquet")
    assert source.schema == {"x": ("int64", ())} and source.metadata == {}


def test_joined_stores(tmp_path: Path) -> None:
    keys = [b"long key " * 5, b"7", b"k"]
    images = {"img": [np.arange(3, dtype=np.uint8)] * 3, "label": [1, 2, 3], "name": ["a", "é", ""]}
    images |= {"raw": [b"", b"x", b"yy"], "boxes": [np.ones((k, 3), np.float32) for k in range(3)]}
    with ww.kv.create(tmp_path / "a", IMAGES) as store, ww.kv.create(tmp_path / "b", {"score": "float32"}) as scores:
        store.put_many(keys, images)
        scores.put_many(keys, {"score": [0.5, 1.5, 2.5]})
        for each in (store, scores):
            dump(each, Path(f"{each.path}.parquet"))
    for name in "ab":
        loaded(tmp_path / f"{name}.parquet", tmp_path / f"{name}.again")
    rows = []
    for suffix in ("", ".again"):
        with ww.kv.open(tmp_path / f"a{suffix}") as store, ww.kv.open(tmp_path / f"b{suffix}") as scores:
            rows.append(ww.train.Dataset(store, join=[scores]).take(range(3)))
    assert rows[0].keys() == rows[1].keys() == {*IMAGES, "score"}
    for name in rows[0]:
        assert all(same(left, right) for left, right in zip(rows[0][name], rows[1][name], strict=True))
