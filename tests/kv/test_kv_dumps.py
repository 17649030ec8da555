"""Dumps in all formats load again as the same store: keys of all kinds, schemas, metadata, joined stores."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.harness.examples import examples
from tests.kv.test_kv_ragged import IMAGES, batches, same

import warpwell as ww
from warpwell import errors
from warpwell.cli.main import main
from warpwell.kv.convert.exporters import to_folder, to_npz
from warpwell.kv.convert.importers import load, open_source

NAMES = ["a", "a/b", "n01/n01_1.JPEG", "n01/n01_2.JPEG", "n02/x.png", "data.mdb", "MANIFEST", "state.json", "x.tar"]
NAMES += [".warpwell.json", ".warpwell.json/a", "../x", "12", "+5", "-5", "6162", "dataset_info.json", "k" * 300]
integers = st.integers(-(1 << 63), (1 << 63) - 1)
texts = st.sampled_from(NAMES).map(str.encode)
any_bytes = (
    st.binary(min_size=1, max_size=40) | st.binary(min_size=8, max_size=8) | st.binary(min_size=500, max_size=511)
)
keys_of_a_kind = [integers, st.integers(0, 5), texts, any_bytes, integers | any_bytes | texts]


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


@given(st.data(), st.sampled_from(keys_of_a_kind), st.none() | batches())
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
            to_npz(store, folder / "a.npz")
            try:
                to_folder(store, folder / "dump")
            except errors.ArgumentError as error:
                assert "dump to a .npz file" in str(error) or "both" in str(error)
        for dump in (folder / "a.npz", folder / "dump"):
            if dump.exists() and any(dump.iterdir() if dump.is_dir() else [dump]):
                loaded(dump, folder / f"{dump.name}.kv")
                compare(folder / "a.kv", folder / f"{dump.name}.kv")


@pytest.mark.parametrize("names", ["text", "int", "hex"])
def test_chosen_names_of_files_load_as_the_same_keys(tmp_path: Path, names: str) -> None:
    keys: Any = {"text": [b"n01/a.png", b"12"], "int": [-3, 4], "hex": [5, -5, b"8 bytes.", b"12"]}[names]
    with ww.kv.create(tmp_path / "a.kv") as store:
        store.put_many(keys, [b"%d" % k for k in range(len(keys))])
    assert main(["kv", "dump", str(tmp_path / "a.kv"), str(tmp_path / "d"), "--names", names]) == 0
    assert main(["kv", "load", str(tmp_path / "d"), str(tmp_path / "b.kv")]) == 0
    compare(tmp_path / "a.kv", tmp_path / "b.kv")
    (tmp_path / "d" / "no key").write_bytes(b"")
    if names != "text":
        with pytest.raises(errors.FormatError, match="not one of a dump"):
            loaded(tmp_path / "d", tmp_path / "c.kv")


def test_a_description_that_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    fields = "1", "[1]", "[[]]", '[[["a"]]]', '[["a"], ["a"]]'
    damaged = "{", "[]", "[" * 100_000, '{"names": "x", "schema": null}', '{"classes": {}}'
    for text in (*damaged, *(f'{{"names": "", "schema": {schema}}}' for schema in fields)):
        (tmp_path / ".warpwell.json").write_text(text)
        with pytest.raises(errors.FormatError, match="dump the store again"):
            open_source(tmp_path)


def test_joined_stores(tmp_path: Path) -> None:
    keys = [b"long key " * 5, 7, b"k"]
    images = {"img": [np.arange(3, dtype=np.uint8)] * 3, "label": [1, 2, 3], "name": ["a", "é", ""]}
    images |= {"raw": [b"", b"x", b"yy"], "boxes": [np.ones((k, 3), np.float32) for k in range(3)]}
    with ww.kv.create(tmp_path / "a", IMAGES) as store, ww.kv.create(tmp_path / "b", {"score": "float32"}) as scores:
        store.put_many(keys, images)
        scores.put_many(keys, {"score": [0.5, 1.5, 2.5]})
        for each in (store, scores):
            to_folder(each, Path(f"{each.path}.dump"))
    for name in "ab":
        loaded(tmp_path / f"{name}.dump", tmp_path / f"{name}.again")
    rows = []
    for suffix in ("", ".again"):
        with ww.kv.open(tmp_path / f"a{suffix}") as store, ww.kv.open(tmp_path / f"b{suffix}") as scores:
            rows.append(ww.train.Dataset(store, join=[scores]).take(range(3)))
    assert rows[0].keys() == rows[1].keys() == {*IMAGES, "score"}
    for name in rows[0]:
        assert all(same(left, right) for left, right in zip(rows[0][name], rows[1][name], strict=True))
