"""Folders of shards: stores that are moved, copied and replaced, with shards beside them and elsewhere."""

import os
import shutil

import numpy as np
import pytest

import warpwell as ww
from warpwell import errors
from warpwell.cli.main import main
from warpwell.kv import opening


def make(base, shards, count=100):
    base.mkdir(exist_ok=True)
    with ww.kv.create(base / "m.kv", shards=shards) as w:
        w.put_many(np.arange(count), [b"%d" % k for k in range(count)])
    return base / "m.kv"


def snapshot_of(*folders):
    return {
        str(path): path.read_bytes()
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "LOCK"
    }


@pytest.fixture(params=["now", "format 1"])
def beside(request, tmp_path, monkeypatch):
    """A store with its shards beside it, as now and as format 1 wrote paths."""
    base = tmp_path / "base"
    if request.param == "format 1":
        monkeypatch.setattr(opening, "written", lambda path, near: os.path.abspath(path))
    store = make(base, [base / "a", base / "b"])
    monkeypatch.undo()
    return store


def test_a_copy_has_shards_of_its_own(beside, tmp_path):
    base, copy = beside.parent, tmp_path / "copy"
    shutil.copytree(base, copy)
    before = snapshot_of(base)
    for k in range(2):
        with ww.kv.open(copy / "m.kv", "r+") as w:
            assert len(w) == 100 + k and w[7] == b"7"
            w.put(500 + k, b"of the copy")
    assert snapshot_of(base) == before
    with ww.kv.open(beside) as r:
        assert len(r) == 100 and 500 not in r
    with ww.kv.open(copy / "m.kv") as r:
        assert len(r) == 102 and r.verify().sound
    shutil.rmtree(base)
    with ww.kv.open(copy / "m.kv", "r+") as w:
        assert len(w) == 102 and w.delete(500)


def test_a_store_moves_with_its_shards(beside, tmp_path, capsys):
    os.rename(beside.parent, tmp_path / "moved")
    moved = tmp_path / "moved" / "m.kv"
    for mode in ("r", "r+", "r"):
        with ww.kv.open(moved, mode) as s:
            assert len(s) == 100
    assert main(["kv", "verify", str(moved), "--json"]) == 0 and '"records": 100' in capsys.readouterr().out
    shutil.rmtree(tmp_path / "moved" / "b")
    with pytest.raises(errors.MissingFileError, match=r"shard 1 of .* is not at .*b: put it back"):
        ww.kv.open(moved)


def test_a_copy_does_not_write_to_the_shards_of_another(beside, tmp_path):
    second = beside.parent / "second.kv"
    shutil.copytree(beside, second)
    folders = [beside, beside.parent / "a", beside.parent / "b"]
    before = snapshot_of(*folders)
    with pytest.raises(errors.SharingError, match=r"second.kv is a copy of .*m.kv, and .*a is a shard"):
        ww.kv.open(second, "r+")
    assert snapshot_of(*folders) == before
    with ww.kv.open(second) as r:
        assert len(r) == 100
    with ww.kv.open(beside, "r+") as w:
        w.put(7, b"x")
    shutil.rmtree(beside)  # and now it is the only one
    with ww.kv.open(second, "r+") as w:
        assert w[7] == b"x"
        w.put(8, b"y")
    shutil.copytree(second, beside)
    with pytest.raises(errors.SharingError, match=r"m.kv is a copy of .*second.kv"):
        ww.kv.open(beside, "r+")
    with ww.kv.open(second, "r+") as w:
        assert w[8] == b"y"


def test_shards_on_other_drives_stay_where_they_are(tmp_path):
    drives = [tmp_path / "drives" / f"d{k}" / "part" for k in range(2)]
    for drive in drives:
        drive.parent.mkdir(parents=True)
    store = make(tmp_path / "base", drives)
    os.rename(tmp_path / "base", tmp_path / "moved")
    with ww.kv.open(tmp_path / "moved" / "m.kv", "r+") as w:
        assert len(w) == 100
    shutil.copytree(tmp_path / "moved", tmp_path / "base")
    with pytest.raises(errors.SharingError, match="is a copy"):
        ww.kv.open(store, "r+")
    with pytest.raises(errors.FormatError, match=r"is shard 0 of the store .*moved/m.kv: open that one"):
        ww.kv.open(drives[0])
    before = snapshot_of(*drives)
    ww.kv.create(store, overwrite=True).close()  # the copy goes, the shards are another's
    assert snapshot_of(*drives) == before
    with pytest.raises(errors.SharingError, match=r"part is shard 0 of the store .*moved"):
        ww.kv.create(tmp_path / "new.kv", shards=drives, overwrite=True)
    assert snapshot_of(*drives) == before and not (tmp_path / "new.kv").exists()


def test_overwrite_clears_the_shards_too(beside):
    base = beside.parent
    with ww.kv.open(beside, "r+"), pytest.raises(errors.SharingError):
        ww.kv.create(beside, overwrite=True)
    with ww.kv.open(beside) as r:
        assert len(r) == 100
    with ww.kv.create(beside, overwrite=True, shards=[base / "b", base / "c"]) as w:
        w.put(1, b"1")
    assert sorted(os.listdir(base)) == ["b", "c", "m.kv"]
    ww.kv.create(beside, overwrite=True).close()
    assert os.listdir(base) == ["m.kv"]


def test_a_link_to_a_store_finds_its_shards(beside, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "link.kv").symlink_to(beside)
    for mode in ("r", "r+"):
        with ww.kv.open(tmp_path / "elsewhere" / "link.kv", mode) as s:
            assert len(s) == 100
