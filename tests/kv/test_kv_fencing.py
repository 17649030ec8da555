"""Two writers where locks do nothing, and file systems without locks or writes."""

import contextlib
import errno
import os
import shutil

import numpy as np
import pytest

import warpwell as ww
from warpwell import errors
from warpwell.kv.log import lock
from warpwell.kv.log.files import Files


@pytest.fixture
def no_locks(monkeypatch):
    monkeypatch.setattr(Files, "lock", lambda self, fd: True)


def fill(path, count=30):
    with ww.kv.create(path, segment_bytes="64KiB") as w:
        w.put_many(np.arange(count), [b"%d" % k * 100 for k in range(count)])
    return path


def journals(path):
    return sorted(p.name for p in path.glob("*.jnl"))


def test_a_second_writer_fences_the_first_off(tmp_path, no_locks):
    path = fill(tmp_path / "a.kv")
    reader = ww.kv.open(path)
    a = ww.kv.open(path, "r+")
    a.put("a", b"A" * 5000)
    a.commit()
    a.put("lost", b"A" * 5000)  # its value is written, to a segment that is no one else's
    b = ww.kv.open(path, "r+")
    a.put("lost too", b"A" * 5000)
    b.put("b", b"B" * 5000)
    b.commit()
    for _ in range(2):
        with pytest.raises(errors.SharingError, match=r"opened for writing by another \(process .*committed before is"):
            a.commit()
    with pytest.raises(errors.SharingError):
        a.put("no", b"more")
    b.put("c", b"C" * 5000)
    b.commit()
    assert reader.refresh() and reader["a"] == b"A" * 5000 and reader["c"] == b"C" * 5000
    a.close()
    b.put("d", b"D")
    b.close()
    for mode in ("r", "r+"):
        with ww.kv.open(path, mode) as s:
            assert {k: s[k][:1] for k in "abcd"} == {"a": b"A", "b": b"B", "c": b"C", "d": b"D"}
            assert len(s) == 34 and s.verify().sound
    reader.close()


def test_nothing_that_was_acknowledged_is_lost(tmp_path, no_locks):
    path = fill(tmp_path / "a.kv", 0)
    rng, acknowledged, writers, newest = np.random.default_rng(3), {}, [], None
    for n in range(60):
        if newest not in writers or rng.random() < 0.2:
            newest = ww.kv.open(path, "r+")
            writers.append(newest)
        at = int(rng.integers(len(writers)))
        key, value = f"k{n}", rng.bytes(int(rng.integers(1, 9000)))
        try:
            writers[at].put(key, value)
            writers[at].commit()
            assert writers[at] is newest
            acknowledged[key] = value
        except errors.SharingError:
            assert writers[at] is not newest
        if rng.random() < 0.1:
            with contextlib.suppress(errors.SharingError):
                writers[at].compact(threshold=0.01)
        if rng.random() < 0.1:
            with contextlib.suppress(errors.SharingError):
                writers.pop(at).close()
    for writer in writers:
        with contextlib.suppress(errors.SharingError):
            writer.close()
    with ww.kv.open(path) as r:
        assert {k: r.get(k) for k in acknowledged} == acknowledged and r.verify().sound
    assert len(acknowledged) > 20


@pytest.mark.parametrize("moment", ["journal", "floor", "manifest"])
def test_a_writer_that_is_late_harms_nobody(tmp_path, no_locks, monkeypatch, moment):
    """The first writer looks at the lock before the second comes, and does what it was about to do after that."""
    path = fill(tmp_path / "a.kv")
    a = ww.kv.open(path, "r+")
    a.put("a", b"A" * 3000)
    b = ww.kv.open(path, "r+")
    b.put("b", b"B" * 3000)
    b.commit()
    if moment == "journal":
        with pytest.raises(errors.SharingError):
            a.commit()
    elif moment == "floor":
        monkeypatch.setattr(a._records.log._writer, "check", lambda: None)
        a.put_many(np.arange(50), [b"x"] * 50)
        a.commit()  # writes COMMITTED
        monkeypatch.undo()
    else:
        with pytest.raises(errors.SharingError):
            a._records.log.roll()
    b.put("c", b"C")
    b.commit()
    with pytest.raises(errors.SharingError):
        a.put("x", b"") or a.commit()
    a.close()
    shutil.copytree(path, tmp_path / "killed.kv")
    b.close()
    for place in (path, tmp_path / "killed.kv"):
        for mode in ("r", "r+"):
            with ww.kv.open(place, mode) as s:
                assert s["b"] == b"B" * 3000 and s["c"] == b"C" and s.verify().sound


def test_files_are_shared_only_where_nobody_else_writes(tmp_path, monkeypatch):
    path = fill(tmp_path / "a.kv")
    ours = journals(path)
    ww.kv.open(path, "r+").close()
    assert journals(path) == ours  # closed before: everything goes on in place
    w = ww.kv.open(path, "r+")
    shutil.copytree(path, tmp_path / "killed.kv")
    w.close()
    shutil.copytree(tmp_path / "killed.kv", tmp_path / "rebooted.kv")
    ww.kv.open(tmp_path / "killed.kv", "r+").close()
    assert journals(tmp_path / "killed.kv") == ours  # its process has ended: else it would hold the lock
    monkeypatch.setattr(lock, "_boots", ["0" * 32])
    with ww.kv.open(tmp_path / "rebooted.kv", "r+") as w:  # of another host, perhaps
        assert len(w) == 30
    assert journals(tmp_path / "rebooted.kv") != ours
    with ww.kv.open(tmp_path / "rebooted.kv") as r:
        assert len(r) == 30 and r.verify().sound


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
