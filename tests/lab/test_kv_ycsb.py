"""YCSB: distributions, property files, and the operations drawn from a workload."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lab.kv.distributions import (
    SCRAMBLED_ITEMS,
    SCRAMBLED_ZETA,
    Latest,
    ScrambledZipfian,
    Uniform,
    Zipfian,
    fnv_hash,
    zeta,
)
from lab.kv.ycsb import INSERT, NAMES, READ, READ_MODIFY_WRITE, UPDATE, Requests, YcsbWorkload, parse_properties
from warpwell.errors import ArgumentError, FormatError, MissingFileError

SHARED = Path(__file__).parents[3] / "shared" / "data" / "ycsb_workloads.tar.gz"
DRAWS = 200_000

Counts = NDArray[np.int64]


def drawn(distribution: Uniform | Zipfian | ScrambledZipfian | Latest, items: int, seed: int = 1) -> Counts:
    values = distribution.draw(np.full(DRAWS, items), np.random.default_rng(seed))
    assert values.dtype == np.int64
    assert values.min() >= 0
    assert values.max() < items
    return np.bincount(values, minlength=items)


def test_uniform() -> None:
    counts = drawn(Uniform(), 100)
    expected = DRAWS / 100
    # chi-square with 99 degrees of freedom: 160 has a probability below 1e-4
    assert np.sum((counts - expected) ** 2 / expected) < 160


def test_zipfian_has_the_probabilities_of_its_definition() -> None:
    counts = drawn(Zipfian(), 1000)
    share = np.arange(1, 1001.0) ** -0.99
    share /= share.sum()
    # exact for the two hottest; the tail is a continuous approximation: compare its distribution function
    assert np.allclose(counts[:2] / DRAWS, share[:2], rtol=0.02)
    assert np.abs(np.cumsum(counts) / DRAWS - np.cumsum(share)).max() < 0.03
    # and the slope of the tail in a log-log plot
    middle = np.array([counts[k : 2 * k].sum() for k in (16, 32, 64, 128, 256)]) / DRAWS
    expected = np.array([share[k : 2 * k].sum() for k in (16, 32, 64, 128, 256)])
    assert np.allclose(middle, expected, rtol=0.05)


@pytest.mark.parametrize("items", [1, 2, 3])
def test_zipfian_of_few_items(items: int) -> None:
    counts = drawn(Zipfian(), items)
    share = np.arange(1, items + 1.0) ** -0.99
    assert np.allclose(counts / DRAWS, share / share.sum(), atol=0.01)


def test_the_constant_of_scrambled_is_zeta_of_its_items() -> None:
    # Euler-Maclaurin from 10 million items up, since summing 10 billion takes a minute
    begin, theta = 10_000_000, 0.99
    remainder = (SCRAMBLED_ITEMS ** (1 - theta) - begin ** (1 - theta)) / (1 - theta)
    assert zeta(0, begin, theta) + remainder == pytest.approx(SCRAMBLED_ZETA, rel=1e-7)


def test_scrambled_keeps_the_skew_and_scatters_the_hot_items() -> None:
    counts = drawn(ScrambledZipfian(1000), 1000)
    hottest = np.argsort(-counts)[:4].tolist()
    assert hottest[:2] == (fnv_hash(np.array([0, 1])) % 1000).tolist()
    # the hottest of 10 billion has 1 / zeta of all requests
    assert counts[hottest[0]] / DRAWS == pytest.approx(1 / SCRAMBLED_ZETA, abs=0.005)
    halves = counts[:500].sum() / DRAWS
    assert 0.3 < halves < 0.7


def test_latest_follows_the_newest() -> None:
    counts = drawn(Latest(), 1000)
    assert np.argmax(counts) == 999
    assert counts[999] / DRAWS == pytest.approx(1 / zeta(0, 1000, 0.99), rel=0.03)
    growing = np.repeat(np.arange(10, 1010), 500)
    ages = growing - 1 - Latest().draw(growing, np.random.default_rng(0))
    assert ages.min() == 0
    assert np.all(ages < growing)
    assert np.mean(ages == 0) == pytest.approx(np.mean([1 / zeta(0, n, 0.99) for n in range(10, 1010)]), rel=0.02)


def test_zeta_that_grows_is_zeta() -> None:
    growing, separate = Zipfian(), Zipfian()
    for count in ([5, 5, 8], [8, 9, 20], [20, 3000]):
        growing._zetas(np.array(count))
    assert growing._zeta == pytest.approx(zeta(0, 3000, 0.99))
    assert np.allclose(separate._zetas(np.array([3, 4, 6])), [zeta(0, n, 0.99) for n in (3, 4, 6)])
    assert np.allclose(separate._zetas(np.array([2])), [zeta(0, 2, 0.99)])  # fewer than before: from the start


@pytest.mark.parametrize("theta", [0, 1, -0.5, 1.2])
def test_a_constant_that_cannot_be(theta: float) -> None:
    with pytest.raises(ArgumentError, match="between 0 and 1"):
        Zipfian(theta)


def test_keys_are_those_of_ycsb() -> None:
    # the first two keys that YCSB loads are user6284781860667377211 and user8517097267634966620
    keys = Requests(YcsbWorkload.named("ycsb-a")).load_keys(0, 2)
    assert keys.tolist() == [6284781860667377211, 8517097267634966620]
    assert fnv_hash(np.arange(100_000)).min() >= 0
    assert np.unique(fnv_hash(np.arange(100_000))).size == 100_000


@pytest.mark.skipif(not SHARED.exists(), reason="the files of YCSB are not here")
@pytest.mark.parametrize("name", NAMES)
def test_what_is_built_in_is_what_the_files_say(name: str) -> None:
    assert YcsbWorkload.named(name, SHARED) == YcsbWorkload.named(name)


MIXES = {
    "ycsb-a": {READ: 0.5, UPDATE: 0.5},
    "ycsb-b": {READ: 0.95, UPDATE: 0.05},
    "ycsb-c": {READ: 1.0},
    "ycsb-d": {READ: 0.95, INSERT: 0.05},
    "ycsb-f": {READ: 0.5, READ_MODIFY_WRITE: 0.5},
}


@pytest.mark.parametrize("name", NAMES)
def test_operations_are_in_proportion(name: str) -> None:
    requests = Requests(YcsbWorkload.named(name).sized(1000, 50_000), seed=5)
    loaded = set(requests.load_keys(0, 1000).tolist())
    kinds = []
    for block in requests.blocks(700):
        assert block.kinds.shape == block.keys.shape
        for kind, key in zip(block.kinds.tolist(), block.keys.tolist(), strict=True):
            kinds.append(kind)
            # Never reads a record before its insert, never inserts one twice.
            assert (key in loaded) == (kind != INSERT)
            loaded.add(key)
    assert len(kinds) == 50_000
    assert len(loaded) == requests.records
    for kind in range(4):
        assert kinds.count(kind) / 50_000 == pytest.approx(MIXES[name].get(kind, 0), abs=0.01)


def test_the_same_seed_draws_the_same() -> None:
    workload = YcsbWorkload.named("ycsb-d").sized(500, 2000)
    same = [Requests(workload, seed).draw(2000).keys for seed in (3, 3, 4)]
    assert np.array_equal(same[0], same[1])
    assert not np.array_equal(same[0], same[2])


def test_inserts_of_scrambled_requests_become_visible() -> None:
    mixed = YcsbWorkload("mixed", 100, 4000, read=0.5, update=0, insert=0.5, distribution="zipfian")
    requests = Requests(mixed, seed=2)
    loaded = set(requests.load_keys(0, 100).tolist())
    new = set()
    for block in requests.blocks(64):
        for kind, key in zip(block.kinds.tolist(), block.keys.tolist(), strict=True):
            assert (key in loaded) == (kind == READ)
            if kind == INSERT:
                new.add(key)
                loaded.add(key)
            else:
                new.discard(key)
    assert len(new) < requests.records - 100  # some records were read after their insert


def test_property_files(tmp_path: Path) -> None:
    text = "# c\n! c\nrecordcount = 7\noperationcount:9\nreadproportion 0.25\n"
    text += "updateproportion=\\\n  0.75\n\nfieldlength=10"
    values = {
        "recordcount": "7",
        "operationcount": "9",
        "readproportion": "0.25",
        "updateproportion": "0.75",
        "fieldlength": "10",
    }
    assert parse_properties(text, "x") == values
    assert parse_properties("a=1\nb=\\\n#2\\", "x") == {"a": "1", "b": "#2"}
    (tmp_path / "workloada").write_text(text)
    expected = YcsbWorkload("ycsb-a", 7, 9, 0.25, 0.75, value_bytes=100)
    assert YcsbWorkload.named("ycsb-a", tmp_path / "workloada") == expected
    assert YcsbWorkload.named("ycsb-a", tmp_path) == expected
    with tarfile.open(tmp_path / "w.tar", "w") as archive:
        info = tarfile.TarInfo("deep/workloada")
        info.size = len(text)
        archive.addfile(info, io.BytesIO(text.encode()))
    assert YcsbWorkload.named("ycsb-a", tmp_path / "w.tar") == expected
    for path in (tmp_path, tmp_path / "w.tar"):
        with pytest.raises(MissingFileError, match="workloadb"):
            YcsbWorkload.named("ycsb-b", path)
    with pytest.raises(MissingFileError, match="does not exist"):
        YcsbWorkload.named("ycsb-b", tmp_path / "none")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("recordcount=many", "recordcount=many"),
        ("recordcount=1.5", "whole number"),
        ("recordcount=0", "whole number"),
        ("recordcount=5\nreadproportion=-1", "readproportion=-1"),
        ("recordcount=5\nreadproportion=nan", "readproportion=nan"),
        ("recordcount=5\nreadproportion=0\nupdateproportion=0", "no operation"),
        ("recordcount=5\nrequestdistribution=hotspot", "hotspot"),
        ("recordcount=5\nwhat", "line 2"),
        ("readproportion=1", "recordcount is missing"),
        ("\0\0\0", "not a property file"),
    ],
)
def test_property_files_that_cannot_be(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "workloada").write_text(text)
    with pytest.raises(FormatError, match=says):
        YcsbWorkload.named("ycsb-a", tmp_path / "workloada")


def test_scans_are_not_supported(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="not supported"):
        YcsbWorkload.named("ycsb-e")
    (tmp_path / "workloadx").write_text("recordcount=5\nscanproportion=0.95")
    with pytest.raises(ArgumentError, match="not supported"):
        YcsbWorkload.named("ycsb-a", tmp_path / "workloadx")
    with pytest.raises(ArgumentError, match="ycsb-a"):
        YcsbWorkload.named("ycsb-g")
    with pytest.raises(ArgumentError, match="at least 1"):
        YcsbWorkload.named("ycsb-a").sized(0, None)
