"""Importers: records out of folders, .npz files, LMDB and data sets."""

import hashlib
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from warpwell.errors import ArgumentError, FormatError, MissingFileError, ValueSizeError, WarpwellError
from warpwell.kv.convert.importers import load, open_source
from warpwell.kv.convert.sources import BATCH_RECORDS, RecordSource
from warpwell.kv.keys import as_keys
from warpwell.kv.log.format import MAX_VALUE


class Collected:
    """Stands in for a store: keeps what it is given."""

    def __init__(self) -> None:
        self.records: dict[bytes, Any] = {}
        self.sizes: list[int] = []
        self.commits = 0

    def put_many(self, keys: Any, values: Any) -> None:
        names = as_keys(keys).to_list()
        self.sizes.append(len(names))
        if isinstance(values, dict):
            values = [{n: a[k] for n, a in values.items()} for k in range(len(names))]
        self.records |= dict(zip(names, values, strict=True))

    def commit(self) -> None:
        self.commits += 1


def loaded(source: RecordSource) -> Collected:
    store = Collected()
    told: list[tuple[str, int, int]] = []
    done = load(source, store, lambda *report: told.append(report))
    assert done.records == sum(store.sizes)
    assert [t[1] for t in told] == np.cumsum(store.sizes).tolist()
    assert all(t[0] == "load" and t[2] == source.records for t in told)
    assert store.commits >= 1
    source.close()
    source.close()
    return store


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
    (tmp_path / "a name of 17 byte").write_bytes(b"v")
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


def test_values_of_bytes(tmp_path: Path) -> None:
    values = [b"", b"abc", os.urandom(5_000_000), b"x" * (1 << 24), b"", b"end"]
    names = [b"a", b"a\0", b"bb", b"0123456789abcdef", b"c", b"d"]
    arrays = {
        "keys": np.array([list(n.ljust(16, b"\0")) for n in names], np.uint8),
        "key_lengths": np.array([len(n) for n in names], np.uint8),
        "values": np.frombuffer(b"".join(values), np.uint8),
        "value_offsets": np.cumsum([0, *(len(v) for v in values)]),
    }
    np.savez(tmp_path / "d.npz", **arrays)
    source = open_source(tmp_path / "d.npz")
    assert (source.schema, source.records) == (None, 6)
    assert loaded(source).records == dict(zip(names, values, strict=True))
    for offsets in ([0, 3, 2, 3, 3, 3, 3], [0, 1, 2, 3, 4, 5, 1 << 60]):
        np.savez(tmp_path / "d.npz", **(arrays | {"value_offsets": np.array(offsets)}))
        with pytest.raises(FormatError, match="does not rise"):
            loaded(open_source(tmp_path / "d.npz"))


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"x": np.zeros(3), "y": np.zeros(4)}, "several lengths"),
        ({"x": np.array(3)}, "no rows"),
        ({"x": np.array([{}, []], object)}, "no fixed size"),
        ({"x": np.asfortranarray(np.zeros((2, 2)))}, "Fortran"),
        ({"keys": np.zeros(3)}, "no array but the keys"),
        ({"keys": np.zeros(3), "x": np.zeros(3)}, "keys are|take integers"),
        ({"keys": np.array([1 << 63], np.uint64), "x": np.zeros(1)}, "63 bits"),
        ({"keys": np.array(["seventeen bytes !!"]), "x": np.zeros(1)}, "--keys"),
        ({"x": np.zeros(3, ">f8")}, "big-endian"),
    ],
)
def test_arrays_that_cannot_be(tmp_path: Path, arrays: dict[str, Any], says: str) -> None:
    np.savez_compressed(tmp_path / "d.npz", **arrays)
    with pytest.raises(WarpwellError, match=says):
        loaded(open_source(tmp_path / "d.npz"))


def test_damaged_arrays(tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    np.savez(path, x=np.arange(20_000))
    whole = path.read_bytes()
    for damage in (whole[:-30], whole[: len(whole) // 2], b"PK\3\4" + bytes(100)):
        path.write_bytes(damage)
        with pytest.raises(FormatError, match="npz"):
            open_source(path)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1  # in the items: only the checksum tells
    path.write_bytes(flipped)
    with pytest.raises(FormatError, match="damaged"):
        loaded(open_source(path))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", b"no array")
    with pytest.raises(FormatError, match=r"not a \.npy file"):
        open_source(path)


# --- LMDB


def test_lmdb(tmp_path: Path) -> None:
    lmdb = pytest.importorskip("lmdb")
    for subdir in (True, False):
        place = tmp_path / f"db{subdir}"
        with lmdb.open(str(place), subdir=subdir, max_dbs=2, map_size=1 << 24) as environment:
            with environment.begin(write=True) as transaction:
                for k in range(5000):
                    transaction.put(b"%05d" % k, b"v" * (k % 300))
            inner = environment.open_db(b"inner")
            with environment.begin(inner, write=True) as transaction:
                transaction.put(b"k", b"inside")
        found = loaded(open_source(place, database="inner"))
        assert found.records == {b"k": b"inside"}
        source = open_source(place, keys="number")
        assert (source.kind, source.schema, source.records) == ("lmdb", None, 5001)
        store = loaded(source)
        assert store.sizes == [4096, 905]
        assert all(store.records[k] == b"v" * (k % 300) for k in range(5000))
        with pytest.raises(FormatError, match="none"):
            open_source(place, database="none")
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


# --- Hugging Face


def test_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    from warpwell.kv.convert.import_datasets import DatasetSource
    from warpwell.kv.convert.sources import KeyRule

    n = 10_000
    x = np.arange(n * 12, dtype=np.uint8).reshape(n, 3, 4)
    data = datasets.Dataset.from_dict(
        {"x": list(x), "w": np.arange(n) / 7, "y": list(range(n)), "name": [f"n{k}" for k in range(n)]},
        features=datasets.Features(
            {
                "x": datasets.Array2D((3, 4), "uint8"),
                "w": datasets.Value("float64"),
                "y": datasets.ClassLabel(num_classes=n),
                "name": datasets.Value("string"),
            }
        ),
    )
    data.save_to_disk(str(tmp_path / "d"))
    source = open_source(tmp_path / "d", key_field="name")
    assert (source.kind, source.records) == ("datasets", n)
    assert source.schema == {"x": ("uint8", (3, 4)), "w": ("float64", ()), "y": ("int64", ())}
    store = loaded(source)
    assert all(np.array_equal(store.records[b"n%d" % k]["x"], x[k]) for k in range(n))
    assert all(store.records[b"n%d" % k]["w"] == k / 7 for k in range(n))
    text = loaded(open_source(tmp_path / "d", key_field="y", fields=["name"])).records
    assert text[77] == b"n77"
    shuffled = data.shuffle(seed=1)
    values = loaded(DatasetSource(shuffled, KeyRule(None), fields=["y"])).records
    assert [values[k]["y"] for k in range(n)] == shuffled["y"][:]
    with pytest.raises(ArgumentError, match="numbers only"):
        open_source(tmp_path / "d")
    with pytest.raises(ArgumentError, match="no field 'z'"):
        open_source(tmp_path / "d", fields=["z"])


def test_datasets_without_one_shape(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    from warpwell.kv.convert.import_datasets import DatasetSource
    from warpwell.kv.convert.sources import KeyRule

    rows = [[1.0, 2.0]] * 20_000
    ragged = datasets.Dataset.from_dict({"x": [*rows, [1.0]]})
    with pytest.raises(FormatError, match="several lengths"):
        loaded(DatasetSource(ragged, KeyRule(None)))
    empty = datasets.Dataset.from_dict({"x": [1, None, 3]})
    with pytest.raises(FormatError, match="without a value"):
        loaded(DatasetSource(empty, KeyRule(None)))
    datasets.DatasetDict({"train": empty}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(FormatError, match="train"):
        open_source(tmp_path / "splits")


# --- whatever else


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
    with pytest.raises(FormatError, match="unpack"):
        open_source(tmp_path / "z.tar.gz")
    with pytest.raises(ArgumentError, match="choose one of"):
        open_source(tmp_path, keys="random")
    for option in ("key_field", "database"):
        with pytest.raises(ArgumentError, match="source is a folder"):
            open_source(tmp_path, **{option: "x"})
