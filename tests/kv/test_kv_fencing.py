"""The one writer of a store: locks that do nothing, other hosts, file systems without locks or writes."""

import errno
import os
import shutil

import numpy as np
import pytest

import warpwell as ww
from warpwell import errors
from warpwell.kv.log import files as lock
from warpwell.kv.log.files import Files


def fill(path, count=30):
    with ww.kv.create(path, segment_bytes="64KiB") as w:
        w.put_many(np.arange(count), [b"%d" % k * 100 for k in range(count)])
    return path


def test_locks_that_do_nothing_are_noticed(tmp_path, monkeypatch):
    path = fill(tmp_path / "a.kv")
    before = (path / "LOCK").read_bytes()
    monkeypatch.setattr(Files, "lock", lambda self, fd: True)
    with pytest.raises(errors.SharingError, match=r"a.kv: the file system has locks that do nothing.*mount it with"):
        ww.kv.open(path, "r+")
    with pytest.raises(errors.SharingError, match="locks that do nothing"):
        ww.kv.create(tmp_path / "new.kv")
    with pytest.raises(errors.SharingError, match="locks that do nothing"):
        ww.kv.create(tmp_path / "new.kv", shards=[tmp_path / "shard"])
    assert os.listdir(tmp_path) == ["a.kv"] and (path / "LOCK").read_bytes() == before
    with ww.kv.open(path) as r:
        assert len(r) == 30


def test_a_store_that_another_host_left_open_is_refused(tmp_path, monkeypatch):
    path, copy = fill(tmp_path / "a.kv"), tmp_path / "copy.kv"
    w = ww.kv.open(path, "r+")
    shutil.copytree(path, copy)
    with pytest.raises(errors.SharingError, match="already open for writing"):
        ww.kv.open(path, "r+")
    w.close()
    ww.kv.open(copy, "r+").close()  # a record of this boot: the lock is free, so the process that wrote it has exited
    shutil.copyfile(path / "LOCK", copy / "LOCK")
    opened = lock._line(lock.OPEN)
    (copy / "LOCK").write_bytes(opened)
    monkeypatch.setattr(lock, "_boots", ["0" * 32])
    ww.kv.open(copy, "r+").close()  # a record of an earlier boot of this host
    (copy / "LOCK").write_bytes(opened)
    monkeypatch.setattr(lock, "_host", lambda: "elsewhere")
    with pytest.raises(errors.SharingError, match=r"by another host \(process \d+ on .*ended, remove .*copy.kv/LOCK"):
        ww.kv.open(copy, "r+")
    assert (copy / "LOCK").read_bytes() == opened
    with ww.kv.open(copy) as r:
        assert len(r) == 30
    (copy / "LOCK").unlink()
    with ww.kv.open(copy, "r+") as w:
        assert len(w) == 30


def test_a_power_cut_during_a_write_of_the_lock_file_needs_no_repair(tmp_path, monkeypatch):
    path = fill(tmp_path / "a.kv")
    closed, opened = (path / "LOCK").read_bytes(), lock._line(lock.OPEN)
    number = 10 * os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: number)
    before = lock._line(lock.OPEN)  # a record of a process with a longer id
    monkeypatch.undo()
    monkeypatch.setattr(lock, "_boots", ["0" * 32])
    for old in (closed, before, bytes(128), b""):
        for length in range(0, 128, 9):
            for torn in (opened[:length] + old[length:], old[:length] + opened[length:]):
                (path / "LOCK").write_bytes(torn)
                ww.kv.open(path, "r+").close()


def test_an_opening_that_fails_leaves_the_lock_as_it_was(tmp_path):
    path = fill(tmp_path / "a.kv")
    before = (path / "LOCK").read_bytes()
    journal = next(path.glob("*.jnl"))
    good = journal.read_bytes()
    journal.write_bytes(good[:4200] + b"\xff" + good[4201:])
    with pytest.raises(errors.CorruptionError):
        ww.kv.open(path, "r+")
    assert (path / "LOCK").read_bytes() == before and b"closed" in before


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(tmp_path, monkeypatch, code):
    path = fill(tmp_path / "a.kv")

    def lock_fails(self, fd):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Files, "lock", lock_fails)
    with pytest.raises(errors.SharingError, match=r"a.kv: the file system has no locks.*mount it with locks"):
        ww.kv.open(path, "r+")
    with pytest.raises(errors.SharingError, match="no locks"):
        ww.kv.create(tmp_path / "new.kv")
    assert os.listdir(tmp_path) == ["a.kv"]
    with ww.kv.open(path) as r:
        assert len(r) == 30


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_file_system_that_cannot_be_written(tmp_path, monkeypatch, code):
    path = fill(tmp_path / "a.kv")

    def refused(self, *args):
        raise OSError(code, os.strerror(code))

    opened = Files.open

    def open_file(self, path, writable):
        return refused(self) if writable else opened(self, path, writable)

    monkeypatch.setattr(Files, "open", open_file)
    monkeypatch.setattr(Files, "mkdir", refused)
    with pytest.raises(errors.ReadOnlyError, match=r'a.kv cannot be written .*open it with mode="r"'):
        ww.kv.open(path, "r+")
    with pytest.raises(errors.ReadOnlyError, match=r"new.kv cannot be written .*choose a folder"):
        ww.kv.create(tmp_path / "new.kv")
    with ww.kv.open(path) as r:
        assert len(r) == 30 and r.verify().sound
