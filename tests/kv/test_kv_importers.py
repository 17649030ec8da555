"""Importers: records out of folders, tar archives, Parquet and Arrow files, LMDB and .npz files."""

import bz2
import gzip
import hashlib
import io
import json
import os
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from warpwell.errors import ArgumentError, FormatError, MissingFileError, SchemaError, ValueSizeError, WarpwellError
from warpwell.kv.convert.importers import LoadReport, load, open_source
from warpwell.kv.convert.sources import BATCH_BYTES, BATCH_RECORDS, Source
from warpwell.kv.keys import as_keys
from warpwell.kv.log.format import MAX_VALUE
from warpwell.kv.schema import as_schema


class Collected:
    """A store in memory: records of bytes, text and arrays."""

    path = "store"

    def __init__(self) -> None:
        self.records: dict[int | bytes, Any] = {}
        self.sizes: list[int] = []
        self.commits = 0

    def __len__(self) -> int:
        return len(self.records)

    def __contains__(self, key: object) -> bool:
        return key in self.records

    def get(self, key: Any) -> Any:
        return self.records.get(key)

    def put_many(self, keys: Any, values: Any) -> None:
        names = as_keys(keys).to_list()
        self.sizes.append(len(names))
        if isinstance(values, dict):
            assert {len(column) for column in values.values()} == {len(names)}
            plain = {n: a.to_pylist() if hasattr(a, "to_pylist") else a for n, a in values.items()}
            values = [{n: a[k] for n, a in plain.items()} for k in range(len(names))]
        self.records |= dict(zip(names, values, strict=True))

    def commit(self) -> None:
        self.commits += 1


def loaded(source: Source, store: Collected | None = None) -> Collected:
    store = Collected() if store is None else store
    before = len(store)
    reports: list[LoadReport] = []
    done = load(source, store, reports.append)
    assert done.records == sum(store.sizes) == len(store) - before
    assert [report.records for report in reports] == np.cumsum(store.sizes).tolist()
    assert all(0 < report.share <= 1 for report in reports)
    assert store.commits >= 1
    source.close()
    source.close()
    return store


def resumed(source: Any, store: Collected, first_records: int, **options: Any) -> Collected:
    """Load a source into a store that has the first records of `store`."""
    part = Collected()
    part.records = dict(list(store.records.items())[:first_records])
    return loaded(open_source(source, **options), part)


def equal(found: Any, expected: Any) -> bool:
    """Return whether two records, in which arrays may occur, are equal."""
    if isinstance(found, dict):
        return found.keys() == expected.keys() and all(equal(found[name], expected[name]) for name in found)
    return np.array_equal(found, expected)


# --- folders


def test_a_folder(tmp_path: Path) -> None:
    (tmp_path / "b" / "c").mkdir(parents=True)
    for name, value in (("b/c/x", b"deep"), ("a.txt", b""), ("b.txt", bytes(range(256)))):
        (tmp_path / name).write_bytes(value)
    (tmp_path / "link").symlink_to("a.txt")
    (tmp_path / "loop").symlink_to(".")
    source = open_source(tmp_path)
    assert (source.kind, source.schema, source.records) == ("folder", None, 4)
    found = loaded(source).records
    assert found == {b"a.txt": b"", b"b.txt": bytes(range(256)), b"b/c/x": b"deep", b"link": b""}
    numbered = loaded(open_source(tmp_path, keys="number")).records
    assert numbered == {0: b"", 1: b"deep", 2: bytes(range(256)), 3: b""}
    hashed = loaded(open_source(tmp_path, keys="hash")).records
    assert hashed[hashlib.blake2b(b"b/c/x", digest_size=16).digest()] == b"deep"


def test_a_folder_of_more_than_a_batch(tmp_path: Path) -> None:
    for k in range(BATCH_RECORDS + 5):
        (tmp_path / f"{k:05}").write_bytes(b"%d" % k)
    store = loaded(open_source(tmp_path))
    assert store.sizes == [BATCH_RECORDS, 5]
    assert store.records == {b"%05d" % k: b"%d" % k for k in range(BATCH_RECORDS + 5)}


def test_names_that_are_too_long(tmp_path: Path) -> None:
    folder = tmp_path / ("a" * 200) / ("b" * 200)
    folder.mkdir(parents=True)
    (folder / ("c" * 110)).write_bytes(b"v")
    with pytest.raises(ArgumentError, match="--keys hash"):
        loaded(open_source(tmp_path))
    assert list(loaded(open_source(tmp_path, keys="number")).records) == [0]


def test_a_file_over_the_limit(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(MAX_VALUE + 1)
    with pytest.raises(ValueSizeError, match="large"):
        loaded(open_source(tmp_path))


# --- .npz


def test_a_row_over_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpwell.kv.convert.sources.MAX_VALUE", 1000)
    np.savez(tmp_path / "d.npz", x=np.zeros((1, 1001), np.uint8))
    with pytest.raises(ValueSizeError, match="at most 1000"):
        loaded(open_source(tmp_path / "d.npz"))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays(tmp_path: Path, save: Any) -> None:
    x = np.arange(9000 * 6, dtype=np.uint8).reshape(9000, 2, 3)
    y = np.arange(9000) * 3
    save(tmp_path / "d.npz", x=x, y=y)
    source = open_source(tmp_path / "d.npz")
    assert (source.kind, source.records) == ("npz", 9000)
    assert source.schema == {"x": ("uint8", (2, 3)), "y": ("int64", ())}
    store = loaded(source)
    assert store.sizes == [4096, 4096, 808]
    assert all(np.array_equal(store.records[k]["x"], x[k]) for k in range(9000))
    assert all(store.records[k]["y"] == y[k] for k in range(9000))
    only = open_source(tmp_path / "d.npz", fields=["x"], key_field="y")
    assert only.schema == {"x": ("uint8", (2, 3))}
    assert np.array_equal(loaded(only).records[9]["x"], x[3])


@pytest.mark.parametrize(
    ("column", "first"),
    [
        (np.array(["a", "bcd"]), b"a"),
        (np.array([b"a", b"bcd"]), b"a"),
        (np.array([7, 8], np.uint16), 7),
        (np.array([[1, 0], [2, 0]], np.uint8), b"\1\0"),
    ],
)
def test_keys_of_arrays(tmp_path: Path, column: Any, first: bytes) -> None:
    np.savez(tmp_path / "d.npz", keys=column, v=np.zeros(2, np.float32))
    assert next(iter(loaded(open_source(tmp_path / "d.npz")).records)) == first
    assert list(loaded(open_source(tmp_path / "d.npz", keys="number")).records) == [0, 1]
    assert all(len(k) == 16 for k in loaded(open_source(tmp_path / "d.npz", keys="hash")).records)


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"x": np.zeros(3), "y": np.zeros(4)}, "differ in length"),
        ({"x": np.array(3)}, "no rows"),
        ({"x": np.array([{}, []], object)}, "no fixed size"),
        ({"x": np.asfortranarray(np.zeros((2, 2)))}, "Fortran"),
        ({"keys": np.zeros(3)}, "no array but the keys"),
        ({"keys": np.zeros(3), "x": np.zeros(3)}, "keys: an array of keys of dtype float64"),
        ({"keys": np.array([1 << 63], np.uint64), "x": np.zeros(1)}, "not a signed 64-bit integer"),
        ({"keys": np.array(["x" * 512]), "x": np.zeros(1)}, "--keys"),
        ({"x": np.zeros(3, ">f8")}, "big-endian"),
    ],
)
def test_arrays_that_cannot_be(tmp_path: Path, arrays: dict[str, Any], says: str) -> None:
    np.savez_compressed(tmp_path / "d.npz", **arrays)
    with pytest.raises(WarpwellError, match=says):
        loaded(open_source(tmp_path / "d.npz"))


def test_arrays_of_text(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.arange(2), name=np.array(["äh", ""]))
    source = open_source(tmp_path / "d.npz")
    assert source.schema == {"x": ("int64", ()), "name": ("str", ())}
    assert loaded(source).records == {0: {"x": 0, "name": "äh"}, 1: {"x": 1, "name": ""}}
    with pytest.raises(ArgumentError, match="--keys name needs names"):
        open_source(tmp_path / "d.npz", keys="name")
    np.savez(tmp_path / "d.npz", x=np.zeros(3, [("a", "i4")]))
    with pytest.raises(SchemaError, match=r"dtype \[\('a', '<i4'\)\]: fields are"):
        as_schema(open_source(tmp_path / "d.npz").schema)


def test_damaged_arrays(tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    np.savez(path, x=np.arange(20_000))
    content = path.read_bytes()
    for damage in (content[:-30], content[: len(content) // 2], b"PK\3\4" + bytes(100)):
        path.write_bytes(damage)
        with pytest.raises(FormatError, match="npz"):
            open_source(path)
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1  # a bit of the items: only the checksum shows the damage
    path.write_bytes(flipped)
    with pytest.raises(FormatError, match="damaged"):
        loaded(open_source(path))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("cat/1.jpg", b"image")
    with pytest.raises(FormatError, match="unpack it, and load the folder"):
        open_source(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", b"no array")
    with pytest.raises(FormatError, match=r"not a \.npy file"):
        open_source(path)


# --- LMDB


def test_lmdb(tmp_path: Path) -> None:
    lmdb = pytest.importorskip("lmdb")
    for subdir in (True, False):
        path = tmp_path / f"db{subdir}"
        with lmdb.open(str(path), subdir=subdir, max_dbs=2, map_size=1 << 24) as environment:
            with environment.begin(write=True) as transaction:
                for k in range(5000):
                    transaction.put(b"%05d" % k, b"v" * (k % 300))
        source = open_source(path, keys="number")
        assert (source.kind, source.schema, source.records) == ("lmdb", None, 5000)
        store = loaded(source)
        assert store.sizes == [4096, 904]
        assert all(store.records[k] == b"v" * (k % 300) for k in range(5000))
        with lmdb.open(str(path), subdir=subdir, max_dbs=2, map_size=1 << 24) as environment:
            inner = environment.open_db(b"inner")
            with environment.begin(inner, write=True) as transaction:
                transaction.put(b"k", b"inside")
        assert loaded(open_source(path, database="inner")).records == {b"k": b"inside"}
        with pytest.raises(FormatError, match="--database inner"):  # a record of the unnamed database describes it
            loaded(open_source(path))
        with pytest.raises(FormatError, match="none"):
            open_source(path, database="none")
    with lmdb.open(str(tmp_path / "several"), max_dbs=1) as environment:
        many = environment.open_db(b"many", dupsort=True)
        with environment.begin(many, write=True) as transaction:
            for value in (b"1", b"2"):
                transaction.put(b"k", value)
    with pytest.raises(FormatError, match="several values"):
        open_source(tmp_path / "several", database="many")
    both = loaded(open_source(tmp_path / "several", database="many", keys="number")).records
    assert both == {0: b"1", 1: b"2"}
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "data.mdb").write_bytes(b"no database" * 1000)
    with pytest.raises(FormatError, match="as an LMDB"):
        open_source(tmp_path / "bad")


def test_a_package_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lmdb", None)
    (tmp_path / "data.mdb").write_bytes(b"")
    with pytest.raises(ArgumentError, match=r"extra \[lmdb\].* pip install -e '\.\[lmdb\]'"):
        open_source(tmp_path)


# --- folders of classes


def images_in(root: Path, classes: Iterable[str] = ("b", "a", "c"), count: int = 3, nbytes: int = 50) -> dict[int, Any]:
    """Write files that are named like images; return the records that should come of them."""
    for name in classes:
        (root / name).mkdir(parents=True)
        for k in range(count):
            (root / name / f"{name}_{k:04}.JPEG").write_bytes(os.urandom(nbytes + k))
    files = [file for name in sorted(classes) for file in sorted((root / name).iterdir())]
    labels = {name: label for label, name in enumerate(sorted(classes))}
    return {
        key: {"image": f.read_bytes(), "label": labels[f.parent.name], "name": f"{f.parent.name}/{f.name}"}
        for key, f in enumerate(files)
    }


def test_classes(tmp_path: Path) -> None:
    expected = images_in(tmp_path / "r")
    source = open_source(tmp_path / "r")
    assert (source.kind, source.records, source.metadata) == ("classes", 9, {"classes": {"label": ["a", "b", "c"]}})
    assert source.schema == {"image": ("uint8", (None,)), "label": "int64", "name": "str"}
    store = loaded(source)
    assert store.records == expected
    for first_records in (1, 4, 9):
        assert resumed(tmp_path / "r", store, first_records).records == expected
    named = loaded(open_source(tmp_path / "r", keys="name")).records
    assert named == {record["name"].encode(): record for record in expected.values()}
    files = open_source(tmp_path / "r", layout="files", keys="number")
    assert loaded(files).records == {key: record["image"] for key, record in expected.items()}


def test_batches_of_classes_are_bounded(tmp_path: Path) -> None:
    images_in(tmp_path, "ab", 5, BATCH_BYTES // 4)
    assert loaded(open_source(tmp_path)).sizes == [4, 4, 2]


def test_files_beside_classes(tmp_path: Path) -> None:
    expected = images_in(tmp_path)
    (tmp_path / "README.md").write_bytes(b"about")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "a" / ".DS_Store").write_bytes(b"")
    (tmp_path / "b" / "Thumbs.db").write_bytes(b"")
    source = open_source(tmp_path)
    assert (source.kind, source.skipped) == ("classes", ["README.md"])
    assert loaded(source).records == expected
    assert not source.note
    (tmp_path / "b" / "labels.xml").write_bytes(b"")
    source = open_source(tmp_path)
    assert source.kind == "folder"
    assert source.note == "each file is a value, because b/labels.xml is not an image; --layout classes skips it"
    assert open_source(tmp_path, layout="classes").skipped == ["README.md", "b/labels.xml"]
    (tmp_path / "b" / "labels.xml").unlink()
    (tmp_path / "loose.png").write_bytes(b"x")
    with pytest.raises(FormatError, match=r"loose\.png: move it into a folder"):
        open_source(tmp_path)
    assert loaded(open_source(tmp_path, layout="classes")).records == expected
    assert open_source(tmp_path, layout="files").records == 13


def test_folders_whose_classes_are_not_clear(tmp_path: Path) -> None:
    images_in(tmp_path / "train")
    images_in(tmp_path / "val")
    with pytest.raises(FormatError, match="choose one of train, val"):
        open_source(tmp_path)
    assert open_source(tmp_path, layout="classes").metadata == {"classes": {"label": ["train", "val"]}}
    assert open_source(tmp_path / "train").records == 9
    (tmp_path / "train" / "empty").mkdir()
    with pytest.raises(FormatError, match="the folder empty holds no image"):
        open_source(tmp_path / "train")
    (tmp_path / "none").mkdir()
    with pytest.raises(FormatError, match="holds no folder of images"):
        open_source(tmp_path / "none", layout="classes")
    with pytest.raises(ArgumentError, match="layout"):
        open_source(tmp_path, layout="trees")


def test_links_in_folders_of_classes(tmp_path: Path) -> None:
    images_in(tmp_path / "far", ["x"])
    expected = images_in(tmp_path / "near", ["a"])
    (tmp_path / "near" / "b").symlink_to(tmp_path / "far" / "x")
    records = loaded(open_source(tmp_path / "near")).records
    assert {key: records[key] for key in expected} == expected
    assert [records[k]["name"] for k in range(3, 6)] == ["b/x_0000.JPEG", "b/x_0001.JPEG", "b/x_0002.JPEG"]
    (tmp_path / "near" / "b" / "loop").symlink_to(tmp_path / "near" / "b")
    with pytest.raises(FormatError, match="link to a folder that contains it"):
        open_source(tmp_path / "near")
    (tmp_path / "near" / "b" / "loop").unlink()
    (tmp_path / "near" / "a" / "broken.jpg").symlink_to("nothing")
    with pytest.raises(FormatError, match="broken link"):
        open_source(tmp_path / "near")


def test_names_that_are_not_text(tmp_path: Path) -> None:
    images_in(tmp_path, ["a"])
    (tmp_path / "a" / os.fsdecode(b"\xff.jpg")).write_bytes(b"x")
    with pytest.raises(FormatError, match="not text in UTF-8"):
        loaded(open_source(tmp_path))


# --- tar archives


def archive_of(path: Path, members: Iterable[tuple[str, bytes]], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def samples(count: int, first: int = 0) -> tuple[list[tuple[str, bytes]], dict[int, Any]]:
    members: list[tuple[str, bytes]] = []
    records = {}
    for k in range(first, first + count):
        name, image, weights = f"set/{k:06}", os.urandom(40 + k % 50), np.arange(3, dtype=np.float32) + k
        npy = io.BytesIO()
        np.save(npy, weights)
        parts = {"jpg" if k % 2 else "PNG": image, "cls": b"%d\n" % (k % 10), "txt": f"caption é {k}".encode()}
        parts |= {"json": b'{"k": %d}' % k, "w.npy": npy.getvalue(), "mask": b"m%d" % k}
        members += [(f"{name}.{extension}", data) for extension, data in parts.items()]
        records[k] = {"image": image, "label": k % 10, "txt": f"caption é {k}", "json": f'{{"k": {k}}}'}
        records[k] |= {"w.npy": weights, "mask": b"m%d" % k, "name": name}
    return members, records


@pytest.mark.parametrize(
    ("suffix", "mode"), [("tar", "w"), ("tar.gz", "w:gz"), ("tar.bz2", "w:bz2"), ("tar.xz", "w:xz")]
)
def test_tar(tmp_path: Path, suffix: str, mode: str) -> None:
    members, expected = samples(200)
    path = archive_of(tmp_path / f"a.{suffix}", members, mode)
    source = open_source(path)
    assert source.kind == "tar"
    assert source.schema == {
        "image": ("uint8", (None,)),
        "label": "int64",
        "txt": "str",
        "json": "str",
        "w.npy": ("float32", (3,)),
        "mask": ("uint8", (None,)),
        "name": "str",
    }
    store = loaded(source)
    assert equal(store.records, expected)
    for first_records in (1, 77, 200):
        assert equal(resumed(path, store, first_records).records, expected)
    selected = open_source(path, fields=["image", "label"], keys="name")
    assert loaded(selected).records[b"set/000007"] == {name: expected[7][name] for name in ("image", "label")}


def test_shards(tmp_path: Path) -> None:
    expected = {}
    for shard in range(3):
        members, records = samples(10, 10 * shard)
        archive_of(tmp_path / f"s-{shard:06}.tar", members)
        expected.update(records)
    shards = sorted(tmp_path.iterdir())
    for source in (tmp_path, str(tmp_path / "s-*.tar"), shards):
        store = loaded(open_source(source))
        assert equal(store.records, expected)
        assert equal(resumed(source, store, 15).records, expected)
    with pytest.raises(MissingFileError):
        open_source(str(tmp_path / "t-*.tar"))
    np.savez(tmp_path / "x.npz", x=np.zeros(3))
    for several in ([*shards, tmp_path / "x.npz"], [tmp_path / "x.npz", tmp_path / "x.npz"]):
        with pytest.raises(ArgumentError, match="sources were given"):
            open_source(several)


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ([("b.jpg", b"x")], "the first sample"),
        ([("b.jpg", b"x"), ("b.cls", b"1"), ("b.txt", b"t")], "the first sample"),
        ([("b.jpg", b"x"), ("b.png", b"x"), ("b.cls", b"1")], "the first sample"),
        ([("b.jpg", b"x"), ("b.cls", b"dog")], "not an integer"),
        ([("b.jpg", b"x"), ("b.cls", b"9" * 20)], "not an integer of 64 bits"),
        ([("b.jpg", b"x"), ("b.cls", b"1"), ("b.cls", b"2")], "two members"),
        ([("b.jpg", b"x"), ("c.cls", b"1")], "sort=name"),
        ([("Makefile", b"x")], "no extension"),
    ],
)
def test_samples_that_differ(tmp_path: Path, second: list[tuple[str, bytes]], says: str) -> None:
    path = archive_of(tmp_path / "a.tar", [("a.jpg", b"x"), ("a.cls", b"1"), *second])
    with pytest.raises(FormatError, match=says):
        loaded(open_source(path))


def test_arrays_of_samples_that_differ(tmp_path: Path) -> None:
    arrays = []
    for k, array in enumerate((np.zeros(3, np.float32), np.zeros(3, np.float64))):
        file = io.BytesIO()
        np.save(file, array)
        arrays.append((f"{k}.npy", file.getvalue()))
    with pytest.raises(FormatError, match="float64"):
        loaded(open_source(archive_of(tmp_path / "a.tar", arrays)))
    with pytest.raises(FormatError, match="truncated"):
        open_source(archive_of(tmp_path / "a.tar", [("0.npy", arrays[0][1][:-1])]))
    file = io.BytesIO()
    np.save(file, np.zeros(3, ">f4"))
    with pytest.raises(WarpwellError, match=r"a\.tar: sample 0: npy: .*big-endian"):
        open_source(archive_of(tmp_path / "a.tar", [("0.npy", file.getvalue())]))


def test_damaged_archives(tmp_path: Path) -> None:
    members, _ = samples(20)
    intact = archive_of(tmp_path / "a.tar", members).read_bytes()
    path = tmp_path / "b.tar"
    end = 20 * 6 * 1024 + 1024  # each member has a header block and a data block; one member has two data blocks
    for cut in (1000, 20_000, 20_480, 20_992, len(intact) - 10240 // 2 if len(intact) > end else 30_000):
        path.write_bytes(intact[: min(cut, intact.rindex(b"ustar") + 300)])
        with pytest.raises(FormatError, match="damaged or truncated"):
            loaded(open_source(path))
    broken = bytearray(intact)
    broken[1024 * 12 + 5] ^= 1  # in a header
    path.write_bytes(broken)
    with pytest.raises(FormatError, match="damaged or truncated"):
        loaded(open_source(path))
    path.write_bytes(intact + intact)
    with pytest.raises(FormatError, match="after its end mark"):
        loaded(open_source(path))
    for name, compress in (("c.tar.gz", gzip.compress), ("c.tar.bz2", bz2.compress)):
        packed = bytearray(compress(intact))
        (tmp_path / name).write_bytes(packed[:-20])
        with pytest.raises(FormatError, match="damaged"):
            loaded(open_source(tmp_path / name))
        packed[len(packed) // 2] ^= 1
        (tmp_path / name).write_bytes(packed)
        with pytest.raises(FormatError, match="damaged"):
            loaded(open_source(tmp_path / name))
    with tarfile.open(path, "w") as archive:
        member = tarfile.TarInfo("a.jpg")
        member.type, member.linkname = tarfile.SYMTYPE, "b.jpg"
        archive.addfile(member)
    with pytest.raises(FormatError, match="is a link"):
        open_source(path)
    with pytest.raises(FormatError, match="holds no file"):
        open_source(archive_of(path, []))


# --- Parquet, Arrow, Hugging Face


def hugging_face(features: dict[str, Any]) -> dict[bytes, bytes]:
    """Return the metadata of a schema as Hugging Face's ``datasets`` writes them."""
    return {b"huggingface": json.dumps({"info": {"features": features}}).encode()}


def image_table(count: int, first: int = 0) -> tuple[Any, dict[int, Any]]:
    """Return rows as Hugging Face stores images with labels, and the records that should come of them."""
    pa = pytest.importorskip("pyarrow")
    rows = [
        {"bytes": os.urandom(30 + k % 70), "path": f"{k}.jpg" if k % 3 else None} for k in range(first, first + count)
    ]
    labels = [k % 2 for k in range(first, first + count)]
    image = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    features = {"image": {"_type": "Image"}, "label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}
    schema = pa.schema({"image": image, "label": pa.int64()}, metadata=hugging_face(features))
    records = {
        first + k: {"image": row["bytes"], "name": row["path"] or "", "label": label}
        for k, (row, label) in enumerate(zip(rows, labels, strict=True))
    }
    return pa.table([pa.array(rows, image), labels], schema=schema), records


def write_stream(path: Path, table: Any, rows: int = 1000) -> None:
    ipc = pytest.importorskip("pyarrow.ipc")
    with ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


def saved(folder: Path, tables: list[Any]) -> Path:
    """Write a data set as ``save_to_disk`` does."""
    folder.mkdir()
    names = [f"data-{k:05}-of-{len(tables):05}.arrow" for k in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        write_stream(folder / name, table)
    state = {"_data_files": [{"filename": name} for name in names], "_split": None, "_indices_files": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_hugging_face_images(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    ipc = pytest.importorskip("pyarrow.ipc")
    (table1, expected), (table2, records2) = image_table(3000), image_table(2500, 3000)
    expected |= records2
    (tmp_path / "hub" / "data").mkdir(parents=True)
    (tmp_path / "hub" / "README.md").write_text("about")
    for k, table in enumerate((table1, table2)):
        parquet.write_table(table, tmp_path / "hub" / "data" / f"train-{k:05}-of-00002.parquet", row_group_size=700)
    with ipc.new_file(tmp_path / "f.arrow", table1.schema) as writer:
        writer.write_table(table1, max_chunksize=900)
        writer.write_table(table2)
    sources = {"parquet": tmp_path / "hub", "arrow": saved(tmp_path / "saved", [table1, table2])}
    for kind, path in [*sources.items(), ("arrow", tmp_path / "f.arrow")]:
        source = open_source(path)
        assert (source.kind, source.records, source.metadata) == (kind, 5500, {"classes": {"label": ["cat", "dog"]}})
        assert source.schema == {"image": ("uint8", (None,)), "name": "str", "label": ("int64", ())}
        store = loaded(source)
        assert store.records == expected
        for first_records in (1, 700, 2999, 3000, 3001, 5500):
            assert resumed(path, store, first_records).records == expected
    assert loaded(open_source(tmp_path / "hub", fields=["image"])).records[5] == {
        name: expected[5][name] for name in ("image", "name")
    }
    parquet.write_table(table2, tmp_path / "hub" / "data" / "test-00000-of-00001.parquet")
    with pytest.raises(FormatError, match=r"splits test, train.*train-\*\.parquet"):
        open_source(tmp_path / "hub")
    assert open_source(str(tmp_path / "hub" / "data" / "train-*.parquet")).records == 5500


def test_columns(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    n = 6000
    texts = [f"w{k % 7}" for k in range(n)]
    columns = {
        "f": pa.array(np.arange(n) / 7, pa.float32()),
        "ok": pa.array(np.arange(n) % 3 == 0),
        "u": pa.array(np.arange(n) % 200, pa.uint8()),
        "box": pa.FixedSizeListArray.from_arrays(np.arange(4 * n, dtype=np.int32), 4),
        "tokens": pa.array([list(range(k % 5)) for k in range(n)], pa.list_(pa.int32())),
        "points": pa.array([[[k, 1]] * (k % 3) for k in range(n)], pa.large_list(pa.list_(pa.float64(), 2))),
        "word": pa.array(texts).dictionary_encode(),
        "view": pa.array(texts, pa.string_view()),
        "raw": pa.array([w.encode() for w in texts], pa.binary(2)),
        "id": pa.array([f"id {k}" for k in range(n)]),
    }
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet", row_group_size=2500)
    source = open_source(tmp_path / "t.parquet", key_field="id")
    assert source.schema == {
        "f": ("float32", ()),
        "ok": ("bool", ()),
        "u": ("uint8", ()),
        "box": ("int32", (4,)),
        "tokens": ("int32", (None,)),
        "points": ("float64", (None, 2)),
        "word": "str",
        "view": "str",
        "raw": ("uint8", (None,)),
    }
    store = loaded(source)
    assert max(store.sizes) <= BATCH_RECORDS
    for k in (0, 1, 2499, 2500, n - 1):
        record = store.records[f"id {k}".encode()]
        expected = {name: column[k].as_py() for name, column in columns.items() if name != "id"}
        expected["points"] = np.reshape(expected["points"], (-1, 2))
        assert equal(record, {**expected, "f": np.float32(k / 7)})
    assert equal(resumed(tmp_path / "t.parquet", store, 3000, key_field="id").records, store.records)
    numbers = loaded(open_source(tmp_path / "t.parquet", key_field="u", fields=["word"], keys="number")).records
    assert numbers[9] == {"word": "w2"}
    with pytest.raises(FormatError, match="key 0 occurs twice"):
        loaded(open_source(tmp_path / "t.parquet", key_field="u"))


def test_arrays_of_hugging_face(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    x = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    features = {"x": {"shape": [3, 4], "dtype": "uint8", "_type": "Array2D"}}
    schema = pa.schema({"x": pa.list_(pa.list_(pa.uint8()))}, metadata=hugging_face(features))
    saved(tmp_path / "d", [pa.table([x.tolist()], schema=schema)])
    source = open_source(tmp_path / "d")
    assert source.schema == {"x": ("uint8", (3, 4))}
    assert np.array_equal(loaded(source).records[1]["x"], x[1])
    saved(tmp_path / "e", [pa.table([[x[0].tolist(), x[1, :2].tolist()]], schema=schema)])
    with pytest.raises(FormatError, match="other lengths than 3"):
        loaded(open_source(tmp_path / "e"))
    features["x"]["shape"] = [None, 4]  # the first extent may differ
    schema = schema.with_metadata(hugging_face(features))
    table = pa.table([[x[0].tolist(), x[1, :2].tolist(), []]], schema=schema)
    source = open_source(saved(tmp_path / "f", [table, table.slice(1)]))
    assert source.schema == {"x": ("uint8", (None, 4))}
    found = [record["x"] for record in loaded(source).records.values()]
    assert [item.shape for item in found] == [(3, 4), (2, 4), (0, 4), (2, 4), (0, 4)]
    assert all(np.array_equal(item, x[1, :2]) for item in found[1::2])


def test_batches_of_columns_are_bounded(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    values = [bytes([k]) * (BATCH_BYTES // 4) for k in range(10)]
    parquet.write_table(pa.table({"v": values}), tmp_path / "t.parquet", compression="none", use_dictionary=False)
    store = loaded(open_source(tmp_path / "t.parquet"))
    assert max(store.sizes) <= 4
    assert [store.records[k]["v"] for k in range(10)] == values


def test_columns_that_cannot_be(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "t.parquet"
    for column, error, says in (
        (pa.array([1, None, 3]), FormatError, "no value in row 1"),
        (pa.array(["a", None]), FormatError, "no value in row 1"),
        (pa.array([[1], [None]]), FormatError, "missing items"),
        (pa.array([{"bytes": b"x", "path": "a"}, {"bytes": None, "path": "b"}]), FormatError, "embed the files"),
        (pa.array([{"a": 1}]), ArgumentError, "--fields"),
        (pa.array([[["a"]]]), ArgumentError, "--fields"),
        (pa.array([0], pa.timestamp("s")), ArgumentError, "--fields"),
        (pa.array([], pa.int64()), FormatError, "0 rows"),
    ):
        parquet.write_table(pa.table({"x": column}), path)
        with pytest.raises(error, match=says):
            loaded(open_source(path))
    with pytest.raises(ArgumentError, match="no field 'z'"):
        open_source(path, fields=["z"])
    with pytest.raises(ArgumentError, match=r"no field of .* was chosen"):
        open_source(path, fields=[])
    with pytest.raises(ArgumentError, match="add --key-field"):
        open_source(path, keys="hash")
    parquet.write_table(pa.table({"x": [[1], [2]], "y": [1, 2]}), path)
    with pytest.raises(FormatError, match=r"x is list<.*: keys are integers, text or bytes"):
        loaded(open_source(path, key_field="x"))
    parquet.write_table(pa.table([pa.array([1]), pa.array([2])], names=["x", "x"]), path)
    with pytest.raises(FormatError, match="two columns 'x'"):
        open_source(path)
    parquet.write_table(pa.table({"x": [1]}), tmp_path / "u.parquet")
    parquet.write_table(pa.table({"x": [1.0]}), path)
    with pytest.raises(FormatError, match=r"u\.parquet: the column x is int64, but double in"):
        open_source([path, tmp_path / "u.parquet"])


def test_damaged_columns(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table, expected = image_table(5000)
    path = tmp_path / "t.parquet"
    parquet.write_table(table, path, write_page_checksum=True)
    intact = path.read_bytes()
    damaged = bytearray(intact)
    damaged[len(intact) // 2] ^= 1
    for data in (intact[:-100], intact[: len(intact) // 2], damaged):
        path.write_bytes(data)
        with pytest.raises(FormatError, match="cannot be read"):
            loaded(open_source(path))
    stream = saved(tmp_path / "d", [table]) / "data-00000-of-00001.arrow"
    intact = stream.read_bytes()
    for cut in (8, 9, 100, len(intact) // 2, len(intact) - 10):
        stream.write_bytes(intact[:-cut])
        with pytest.raises(FormatError, match=r"truncated|cannot be read"):
            loaded(open_source(tmp_path / "d"))
    stream.write_bytes(intact)
    assert loaded(open_source(tmp_path / "d")).records == expected
    state = json.loads((tmp_path / "d" / "state.json").read_text())
    (tmp_path / "d" / "state.json").write_text(json.dumps({**state, "_indices_files": [{"filename": "i.arrow"}]}))
    with pytest.raises(FormatError, match="flatten_indices"):
        open_source(tmp_path / "d")
    (tmp_path / "d" / "state.json").write_text("{}")
    with pytest.raises(FormatError, match="damaged"):
        open_source(tmp_path / "d")


# --- continuing


def test_a_source_that_differs_is_refused(tmp_path: Path) -> None:
    images_in(tmp_path, "ab")
    store = loaded(open_source(tmp_path))
    assert resumed(tmp_path, store, 6).sizes == []
    store.records[5] = {**store.records[5], "label": 7}
    with pytest.raises(FormatError, match=r"another record 5.*--overwrite"):
        load(open_source(tmp_path), store)
    store.records[6] = store.records[5]
    with pytest.raises(FormatError, match="fewer records"):
        load(open_source(tmp_path), store)
    np.savez(tmp_path / "k.npz", keys=np.array([1, 2, 1]), v=np.zeros(3))
    twice = Collected()
    with pytest.raises(FormatError, match="key 1 occurs twice"):
        load(open_source(tmp_path / "k.npz"), twice)
    assert not twice.sizes


# --- other formats


def test_what_is_no_source(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        open_source(tmp_path / "none")
    with pytest.raises(FormatError, match="no file"):
        open_source(tmp_path)
    np.save(tmp_path / "a.npy", np.zeros(3))
    with pytest.raises(FormatError, match="savez"):
        open_source(tmp_path / "a.npy")
    (tmp_path / "t").write_bytes(b"text")
    with pytest.raises(FormatError, match="unknown format"):
        open_source(tmp_path / "t")
    (tmp_path / "z.tar.gz").write_bytes(b"\x1f\x8b0000000000")
    with pytest.raises(FormatError, match="damaged"):
        open_source(tmp_path / "z.tar.gz")
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "a.lance").write_bytes(b"")
    with pytest.raises(FormatError, match=r"data sets \(part/a\.lance\)"):
        open_source(tmp_path)
    (tmp_path / "part" / "a.lance").unlink()
    datasets = tmp_path / "splits"
    datasets.mkdir()
    (datasets / "dataset_dict.json").write_text('{"splits": ["train"]}')
    (datasets / "train").mkdir()
    with pytest.raises(FormatError, match="the splits train"):
        open_source(datasets)
    with pytest.raises(ArgumentError, match="choose one of"):
        open_source(tmp_path, keys="random")
    for option in ("key_field", "database"):
        with pytest.raises(ArgumentError, match="source is a folder"):
            open_source(tmp_path, **{option: "x"})
