"""Salvage of stores with damage in every kind of file."""

import errno
import json
import os
import random
import shutil
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

import warpwell as ww
from warpwell import errors
from warpwell.cli.main import main
from warpwell.kv.log.files import Files
from warpwell.kv.log.format import offset_of, segment_of
from warpwell.kv.log.log import Log
from warpwell.kv.log.segments import StoredValue
from warpwell.kv.records import Records


def bytes_of(folder):
    return {p: p.read_bytes() for p in sorted(Path(folder).rglob("*")) if p.is_file()}


def flip(path, at, bit=0):
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def snapshot(store):
    with store._records.lock:
        store._records.snapshot()


@pytest.fixture
def damaged(tmp_path):
    """A store with two snapshots, deletes, and records behind; the versions of each key, and the last ones."""
    path, versions, last = tmp_path / "a.kv", {}, {}
    with ww.kv.create(path, segment_bytes="64KiB") as w:
        for turn in range(3):
            for k in [*range(turn, 40, 2), f"name {turn}", "8 bytes."]:
                value = f"{turn} {k} ".encode() * (1 + hash(str(k)) % 40)
                w.put(k, value)
                key = k.encode() if isinstance(k, str) else k
                versions.setdefault(key, set()).add(value)
                last[key] = value
            w.delete(turn)
            last.pop(turn, None)
            w.commit()
            if turn < 2:
                snapshot(w)
    return path, versions, last


def salvaged(path, versions, last):
    """Salvage, check that nothing is wrong, and return the report and the salvaged records."""
    before = bytes_of(path)
    target = path.parent / "new.kv"
    report = ww.kv.salvage(path, target)
    assert bytes_of(path) == before
    with ww.kv.open(target) as r:
        held = dict(r.items())
        assert r.verify().sound and len(held) == report.records
    shutil.rmtree(target)
    assert all(value in versions[key] for key, value in held.items())
    if report.complete:
        assert held == last
    if not report.missing_records:  # then each salvaged value is the last one of its key
        assert all(last[key] == value for key, value in held.items())
        assert set(last) - set(held) == {p.key for p in report.lost}
    return report, held


def test_a_sound_store_comes_over_whole(damaged):
    report, _ = salvaged(*damaged)
    assert report.complete and not report.problems


def test_one_flipped_bit_anywhere(damaged):
    path, versions, last = damaged
    rng, incomplete = random.Random(5), {}
    for file in sorted(path.iterdir()):
        if file.name == "LOCK":
            continue
        good = file.read_bytes()
        offsets = range(len(good)) if file.suffix != ".val" else [0, 40, *range(4096, len(good))]
        for at in [0, *rng.sample(list(offsets), min(5, len(offsets)))]:
            flip(file, at, rng.randrange(8))
            report, held = salvaged(path, versions, last)
            if not report.complete:
                incomplete.setdefault(file.suffix, []).append((report, held))
            file.write_bytes(good)
    assert set(incomplete) <= {".jnl", ".val"}  # all other files are stored twice
    assert all(len(r.lost) + r.missing_records == 1 for damaged in incomplete.values() for r, _ in damaged)


def test_whole_files_that_are_missing(damaged):
    path, versions, last = damaged
    names = sorted(p.name for p in path.iterdir())
    snapshots = [n for n in names if n.endswith(".idx")]
    journals = [n for n in names if n.endswith(".jnl")]
    assert len(snapshots) == len(journals) == 2
    for missing, complete in [
        (["MANIFEST"], True),
        (["MANIFEST", "IDENTITY"], True),
        (snapshots[1:], True),
        (snapshots[:1], True),
        (journals[:1], True),
        (["COMMITTED", "LOCK", "MANIFEST"], True),
        (journals[1:], False),
        (snapshots, False),
        (["MANIFEST", *snapshots], False),
        ([n for n in names if n.endswith(".val")], False),
    ]:
        content = {name: (path / name).read_bytes() for name in missing}
        for name in missing:
            (path / name).unlink()
        report, _ = salvaged(path, versions, last)
        assert report.complete == complete and report.problems + report.lost, missing
        for name, data in content.items():
            (path / name).write_bytes(data)
    assert salvaged(path, versions, last)[0].complete


def test_a_damaged_manifest_keeps_its_schema(tmp_path):
    with ww.kv.create(tmp_path / "a.kv", schema={"x": ("uint8", (3,)), "y": ("int64", ())}) as w:
        w.put_many(np.arange(9), {"x": np.ones((9, 3), np.uint8), "y": np.arange(9)})
    flip(tmp_path / "a.kv" / "MANIFEST", 60)
    report = ww.kv.salvage(tmp_path / "a.kv", tmp_path / "b.kv")
    with ww.kv.open(tmp_path / "b.kv") as r:
        assert report.complete and r[7]["y"] == 7 and r[7]["x"].tolist() == [1] * 3
    (tmp_path / "a.kv" / "IDENTITY").unlink()
    report = ww.kv.salvage(tmp_path / "a.kv", tmp_path / "c.kv")
    with ww.kv.open(tmp_path / "c.kv") as r:
        assert r.schema is None and len(r[7]) == 16 and "schema is not known" in report.problems[0].what


@pytest.mark.parametrize("segment_is", ["damaged", "missing"])
@pytest.mark.parametrize("key", [b"short", b"long" * 30])
def test_a_record_whose_value_is_sound_in_the_journal_only(tmp_path, key, segment_is):
    path = tmp_path / "a.kv"
    with ww.kv.create(path, {"x": ("f4", (4,))}) as w:
        w[key] = {"x": np.arange(4, dtype=np.float32)}
        w.commit()
    (segment,) = path.glob("*.val")
    segment.write_bytes(segment.read_bytes()[:4096].ljust(segment.stat().st_size, b"\0"))
    if segment_is == "missing":
        segment.unlink()
        (path / "²²²²²²²².jnl").write_bytes(b"")  # another program's file
        flip(path / "MANIFEST", 60)
    report = ww.kv.salvage(path, tmp_path / "new.kv")
    assert report.complete and report.records == 1
    with ww.kv.open(tmp_path / "new.kv") as r:
        assert list(r.keys()) == [key] and r[key]["x"].tolist() == [0, 1, 2, 3]


def test_shards_are_gathered(tmp_path):
    values = {k: b"%d" % k * 5000 for k in range(50)}  # too large for the journal
    with ww.kv.create(tmp_path / "m.kv", shards=[tmp_path / "a", tmp_path / "b"]) as w:
        w.put_many(list(values), list(values.values()))
    flip(tmp_path / "a" / "MANIFEST", 70)
    report = ww.kv.salvage(tmp_path / "m.kv", tmp_path / "n.kv")
    with ww.kv.open(tmp_path / "n.kv") as r:
        assert report.complete and {k: r[k] for k in r} == values
    shutil.rmtree(tmp_path / "b")
    report = ww.kv.salvage(tmp_path / "m.kv", tmp_path / "o.kv")
    assert not report.complete and 0 < report.records < 50 and "shard 1" in report.lost[0].what


def test_a_snapshot_of_format_2(tmp_path):
    with zipfile.ZipFile(Path(__file__).parent.parent / "data" / "kv-format-2.zip") as file:
        file.extractall(tmp_path)
    path = tmp_path / "one.kv"
    with ww.kv.open(path) as r:
        expected = dict(r.items())
    (damaged,) = path.glob("*.snap")
    flip(damaged, 4096 + 32 * 5 + 28)  # a value's checksum
    with pytest.raises(errors.CorruptionError, match="kv salvage"):
        ww.kv.open(path)
    assert ww.kv.salvage(path, tmp_path / "all.kv").complete
    with ww.kv.open(tmp_path / "all.kv") as r:
        assert dict(r.items()) == expected
    (path / "00000001.jnl").unlink()
    report = ww.kv.salvage(path, tmp_path / "new.kv")
    assert (report.records, report.unproven, len(report.lost)) == (19, 21, 1) and not report.complete
    with ww.kv.open(tmp_path / "new.kv") as r:
        assert dict(r.items()) == {key: value for key, value in expected.items() if key != report.lost[0].key}


def test_stores_that_are_no_stores_or_in_use(tmp_path, damaged):
    path = damaged[0]
    with ww.kv.open(path, "r+"), pytest.raises(errors.SharingError, match="open for writing"):
        ww.kv.salvage(path, tmp_path / "new.kv")
    with pytest.raises(errors.MissingFileError):
        ww.kv.salvage(tmp_path / "none", tmp_path / "new.kv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(errors.FormatError):
        ww.kv.salvage(tmp_path / "empty", tmp_path / "new.kv")
    (tmp_path / "link").symlink_to(path)
    for inside in (path / "new.kv", tmp_path / "link" / "new.kv"):
        with pytest.raises(errors.ArgumentError, match="inside the store itself"):
            ww.kv.salvage(path, inside)
    assert not (tmp_path / "new.kv").exists()
    ww.kv.create(tmp_path / "other.kv").close()
    with pytest.raises(errors.ArgumentError, match="already a store"):
        ww.kv.salvage(path, tmp_path / "other.kv")


def test_verify_reads_what_salvage_needs(damaged):
    path, _, last = damaged
    spares = [path / "IDENTITY", min(path.glob("*.idx")), min(path.glob("*.jnl"))]
    for spare in spares:
        good = spare.read_bytes()
        for at in (3, len(good) // 2, len(good) - 10):
            flip(spare, at)
            with ww.kv.open(path, "r") as r:
                assert dict(r.items()) == last
                assert [p.path for p in r.verify().problems] == [str(spare)]
            spare.write_bytes(good)
    spares[1].unlink()
    with ww.kv.open(path) as r:
        assert [p.what for p in r.verify().problems] == ["the file is missing"]


def test_the_command(damaged, tmp_path, capsys):
    path = damaged[0]
    assert main(["kv", "salvage", str(path), str(tmp_path / "b.kv"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["complete"]
    with ww.kv.open(path) as r:
        victim = int(r._records.index.lookup(ww.kv.keys.as_keys([33]))[0, 0])
        value = r[33]
    flip(path / f"{segment_of(victim):08d}.val", offset_of(victim))
    # The value is recovered from the journal.
    assert main(["kv", "salvage", str(path), str(tmp_path / "copied.kv"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["complete"]
    for journal in path.glob("*.jnl"):
        journal.write_bytes(journal.read_bytes().replace(value, bytes(len(value))))
    assert main(["kv", "salvage", str(path), str(tmp_path / "c.kv")]) == 1
    assert "key 33 is lost" in "".join(capsys.readouterr().out.split("\n")).replace("  ", " ")
    assert os.path.isdir(tmp_path / "c.kv")


@pytest.mark.parametrize("torn", ["value", "record"])
def test_a_torn_group_gives_way_to_the_record_before_it(tmp_path, torn):
    path, copy = tmp_path / "a.kv", tmp_path / "b.kv"
    with ww.kv.create(path) as w:
        w.put(b"k", b"committed")
        w.commit()
        mark = (path / "COMMITTED").read_bytes()
        records_end = w._records.log._journal.position.offset
        w.put_many([b"other", b"k"], [b"small", os.urandom(200_000)])  # too large for the journal
        w.commit()
        shutil.copytree(path, copy)
        offset = offset_of(int(w._records.index.lookup(ww.kv.as_keys([b"k"]))[0, 0]))
    (copy / "COMMITTED").write_bytes(mark)
    file, at, nbytes = ("00000001.val", offset, 4096) if torn == "value" else ("00000001.jnl", records_end, 64)
    with open(copy / file, "r+b") as opened:  # a power cut has lost a part of the last group
        opened.seek(at)
        opened.write(bytes(nbytes))
    with ww.kv.open(copy) as r:
        assert dict(r.items()) == {b"k": b"committed"} and r.verify().sound
    report = ww.kv.salvage(copy, tmp_path / "c.kv")
    with ww.kv.open(tmp_path / "c.kv") as r:
        assert dict(r.items()) == {b"k": b"committed"} and report.complete
    if torn == "value":  # if COMMITTED may have named the group, its value is not known to be torn
        flip(copy / "COMMITTED", 4096 if any(mark[4096:]) else 0)
        assert not ww.kv.salvage(copy, tmp_path / "d.kv").complete


class FullDisk(Files):
    """Writes the first `room` bytes of the next write to a journal, and no more."""

    room = -1

    def pwrite(self, fd, data, offset):
        if self.room >= 0 and os.readlink(f"/proc/self/fd/{fd}").endswith(".jnl"):
            room, self.room = self.room, -1
            super().pwrite(fd, memoryview(data).cast("B")[:room], offset)
            raise OSError(errno.ENOSPC, "no space left")
        super().pwrite(fd, data, offset)


def test_records_of_a_put_that_the_disk_had_no_room_for_do_not_come_back(tmp_path):
    path, files, keys = tmp_path / "a.kv", FullDisk(), [b"%d" % k for k in range(5)]
    records = Records(Log.create(path, durability="always", files=files))
    records.put(ww.kv.as_keys(keys), [b"old %d" % k for k in range(5)])
    files.room = 5 * 64 + 32  # the records, and half of a value
    with pytest.raises(errors.StorageFullError):
        records.put(ww.kv.as_keys(keys), [b"new %d" % k for k in range(5)])
    records.put_one(keys[0], b"newest", False)
    shutil.copytree(path, tmp_path / "b.kv")
    records.close()
    with ww.kv.open(tmp_path / "b.kv") as r:
        expected = dict(r.items())
    assert expected == {keys[0]: b"newest", **{key: b"old " + key for key in keys[1:]}}
    assert ww.kv.salvage(tmp_path / "b.kv", tmp_path / "c.kv").complete
    with ww.kv.open(tmp_path / "c.kv") as r:
        assert dict(r.items()) == expected


def test_a_value_whose_size_exceeds_its_file_is_damaged_without_being_read(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(bytes(4096))
    with path.open("rb") as file:
        tracemalloc.start()
        assert StoredValue(str(path), file.fileno(), 0, (1 << 31) - 1, 0).read() is None
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()
