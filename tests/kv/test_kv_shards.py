"""Folders of shards: stores that are moved, copied and replaced, with shards in the same folder and elsewhere."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

import warpwell as ww
from warpwell import errors
from warpwell.cli.main import main
from warpwell.kv.log.files import Files
from warpwell.kv.log.log import Log


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


@pytest.fixture
def sharded_store(tmp_path):
    """Return a store with its shards in the same folder."""
    base = tmp_path / "base"
    return make(base, [base / "a", base / "b"])


def test_a_copy_has_shards_of_its_own(sharded_store, tmp_path):
    base, copy = sharded_store.parent, tmp_path / "copy"
    shutil.copytree(base, copy)
    before = snapshot_of(base)
    for k in range(2):
        with ww.kv.open(copy / "m.kv", "r+") as w:
            assert len(w) == 100 + k and w[7] == b"7"
            w.put(500 + k, b"of the copy")
    assert snapshot_of(base) == before
    with ww.kv.open(sharded_store) as r:
        assert len(r) == 100 and 500 not in r
    with ww.kv.open(copy / "m.kv") as r:
        assert len(r) == 102 and r.verify().sound
    shutil.rmtree(base)
    with ww.kv.open(copy / "m.kv", "r+") as w:
        assert len(w) == 102 and w.delete(500)


def test_a_store_moves_with_its_shards(sharded_store, tmp_path, capsys):
    os.rename(sharded_store.parent, tmp_path / "moved")
    moved = tmp_path / "moved" / "m.kv"
    for mode in ("r", "r+", "r"):
        with ww.kv.open(moved, mode) as s:
            assert len(s) == 100
    assert main(["kv", "verify", str(moved), "--json"]) == 0 and '"records": 100' in capsys.readouterr().out
    shutil.rmtree(tmp_path / "moved" / "b")
    with pytest.raises(errors.MissingFileError, match=r"shard 1 of .* is not at .*b: put it back"):
        ww.kv.open(moved)


def test_a_copy_does_not_write_to_the_shards_of_another(sharded_store, tmp_path):
    second = sharded_store.parent / "second.kv"
    shutil.copytree(sharded_store, second)
    folders = [sharded_store, sharded_store.parent / "a", sharded_store.parent / "b"]
    before = snapshot_of(*folders)
    with pytest.raises(errors.SharingError, match=r"second.kv is a copy of .*m.kv, and .*a is a shard"):
        ww.kv.open(second, "r+")
    assert snapshot_of(*folders) == before
    with ww.kv.open(second) as r:
        assert len(r) == 100
    with ww.kv.open(sharded_store, "r+") as w:
        w.put(7, b"x")
    shutil.rmtree(sharded_store)  # the copy is the only store left, with the commits before it was made
    with ww.kv.open(second, "r+") as w:
        assert w[7] == b"7" and w.verify().sound
        w.put(8, b"y")
    shutil.copytree(second, sharded_store)
    with pytest.raises(errors.SharingError, match=r"m.kv is a copy of .*second.kv"):
        ww.kv.open(sharded_store, "r+")
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
    with pytest.raises(errors.FormatError, match=r"is shard 0 of the store .*moved/m.kv: open that store"):
        ww.kv.open(drives[0])
    before = snapshot_of(*drives)
    ww.kv.create(store, overwrite=True).close()  # deletes the copy, but not the shards, which belong to the moved store
    assert snapshot_of(*drives) == before
    with pytest.raises(errors.SharingError, match=r"part is shard 0 of the store .*moved"):
        ww.kv.create(tmp_path / "new.kv", shards=drives, overwrite=True)
    assert snapshot_of(*drives) == before and not (tmp_path / "new.kv").exists()


def test_overwrite_clears_the_shards_too(sharded_store):
    base = sharded_store.parent
    with ww.kv.open(sharded_store, "r+"), pytest.raises(errors.SharingError):
        ww.kv.create(sharded_store, overwrite=True)
    with ww.kv.open(sharded_store) as r:
        assert len(r) == 100
    with ww.kv.create(sharded_store, overwrite=True, shards=[base / "b", base / "c"]) as w:
        w.put(1, b"1")
    assert sorted(os.listdir(base)) == ["b", "c", "m.kv"]
    ww.kv.create(sharded_store, overwrite=True).close()
    assert os.listdir(base) == ["m.kv"]


def test_a_link_to_a_store_finds_its_shards(sharded_store, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "link.kv").symlink_to(sharded_store)
    for mode in ("r", "r+"):
        with ww.kv.open(tmp_path / "elsewhere" / "link.kv", mode) as s:
            assert len(s) == 100


# -- commits of all shards ------------------------------------------------------------------------------------

WRITER = """
import os, sys
import warpwell as ww

with ww.kv.open(sys.argv[1], "r+") as w:
    print("ready", flush=True)
    version = 0
    while version < 100 or not os.path.exists(sys.argv[2]):
        version += 1
        w.put_many(range(200), [version.to_bytes(8, "little") * (1 + version % 50)] * 200)
        w.commit()
        if version % 25 == 0:
            w.compact(threshold=0.3)
print(version)
"""


def test_readers_see_whole_commits(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    with ww.kv.create(tmp_path / "m.kv", segment_bytes="256KiB", shards=folders) as w:
        w.put_many(range(200), [bytes(8)] * 200)
    command = [sys.executable, "-c", WRITER, tmp_path / "m.kv", tmp_path / "enough"]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        versions, done = [0], False
        while not done:
            done = writer.poll() is not None
            with ww.kv.open(tmp_path / "m.kv") as r:
                for _ in range(10):
                    values, found = r.get_many(range(200))
                    assert found.all() and len({value[:8] for value in values}) == 1
                    versions.append(int.from_bytes(values[0][:8], "little"))
                    r.refresh()
            if len(set(versions)) > 3:
                (tmp_path / "enough").touch()
        last = int(writer.stdout.read())
    finally:
        writer.kill()
        writer.communicate()
    assert versions == sorted(versions) and versions[-1] == last >= 100


class StoppedError(OSError):
    """The end of a process that is killed at a call."""


class StoppingFiles(Files):
    """Calls that raise from the call `number` on."""

    def __init__(self, number):
        self.left = number

    def _step(self):
        self.left -= 1
        if self.left < 0:
            raise StoppedError

    def create(self, path):
        self._step()
        return super().create(path)

    def pwrite(self, fd, data, offset):
        self._step()
        super().pwrite(fd, data, offset)

    def rename(self, source, target):
        self._step()
        super().rename(source, target)

    def unlink(self, path):
        self._step()
        super().unlink(path)


@pytest.fixture
def format_2(tmp_path):
    with zipfile.ZipFile(Path(__file__).parent.parent / "data" / "kv-format-2.zip") as file:
        file.extractall(tmp_path)
    expected = {k: b"v5-%d" % k * (1 + 150 * (k % 2)) for k in range(40) if k != 5}
    expected.update({b"name%d" % k: b"n%d" % k for k in range(10)})
    return tmp_path, {**expected, 100: b"last", -1: b""}


def test_shards_of_format_2_become_one_log(format_2):
    folder, expected = format_2
    before = snapshot_of(folder)
    with ww.kv.open(folder / "m.kv") as r, ww.kv.open(folder / "none.kv") as unsynced:
        assert dict(r.items()) == expected and r.verify().sound and r.refresh() == 0
        assert dict(unsynced.items()) == {k: b"%d" % k for k in range(20)}
        assert snapshot_of(folder) == before
        with ww.kv.open(folder / "m.kv", "r+") as w:
            assert dict(w.items()) == expected
            w.put_many([1, 2], [b"new"] * 2)
            w.delete(100)
        assert r.refresh() and r[1] == b"new" and 100 not in r and r[3] == expected[3]
        with ww.kv.open(folder / "none.kv", "r+") as w:
            w.put(20, b"20")
        assert unsynced.refresh() and dict(unsynced.items()) == {k: b"%d" % k for k in range(21)}
    for mode in ("r+", "r"):
        with ww.kv.open(folder / "m.kv", mode) as s:
            assert s[1] == s[2] == b"new" and len(s) == len(expected) - 1 and s.verify().sound
    assert not [path for shard in "ab" for path in (folder / shard).glob("*.[js]n*")]
    with ww.kv.open(folder / "one.kv", "r+") as w:
        assert len(w) == 20 and 3 not in w and w.verify().sound


def test_an_interrupted_merge_of_logs_loses_nothing(format_2, tmp_path):
    folder, expected = format_2
    for number in range(100):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("copy*"))
        try:
            Log.open(copy / "m.kv", writable=True, files=StoppingFiles(number)).close()
        except (StoppedError, errors.StoreFailedError):
            pass
        else:
            break
        for mode in ("r", "r+"):
            with ww.kv.open(copy / "m.kv", mode) as s:
                assert dict(s.items()) == expected and s.verify().sound
        shutil.rmtree(copy)
    assert number > 10


def test_shards_of_format_2_are_salvaged(format_2):
    folder, expected = format_2
    (folder / "m.kv" / "MANIFEST").unlink()
    report = ww.kv.salvage(folder / "m.kv", folder / "new.kv")
    with ww.kv.open(folder / "new.kv") as r:
        assert report.complete and dict(r.items()) == expected
