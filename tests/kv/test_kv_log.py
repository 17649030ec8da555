"""The log of key-value stores: appending, recovery, readers, snapshots, compaction, locks and damage."""

import contextlib
import errno
import inspect
import itertools
import json
import os
import shutil
import signal
import sys
import threading
import time

import numpy as np
import pytest
from tests.harness.until import HANG_SECONDS, until

import warpwell.kv.log.log
from lab.campaigns.crash.kv_load import Run, WrongBytes, contents, names_in, padded, write_script
from warpwell import errors
from warpwell.kv import as_keys, compaction
from warpwell.kv.compaction import compact
from warpwell.kv.log.checksum import crc32c, crc32c_many
from warpwell.kv.log.files import Files, read_at
from warpwell.kv.log.format import MAX_VALUE, RECORD, RECORD_BYTES, SUPERBLOCK, offset_of, segment_of, size_of
from warpwell.kv.log.journal import (
    COMMITTED_NAME,
    INLINE_BYTES,
    MARK_OFFSETS,
    MAX_AHEAD_BYTES,
    MIN_AHEAD_BYTES,
    journal_path,
    read_marks,
)
from warpwell.kv.log.log import UNSYNCED_BYTES, Log
from warpwell.kv.log.manifest import read_manifest
from warpwell.kv.log.recovery import verify
from warpwell.kv.log.segments import Segments
from warpwell.kv.records import Records
from warpwell.targets.checksum import crc32c_of

SMALL = 1 << 16


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "store.kv")


def put(log, records):
    return log.append(*padded(list(records)), list(records.values()))


def append_one(log, key, value):
    return tuple(put(log, {key: value})[0, 2:].tolist())


@pytest.fixture(autouse=True)
def usual_sizes(monkeypatch):
    """Use the sizes of a release: loads of crash campaigns that ran in this process have changed them."""
    monkeypatch.setattr(warpwell.kv.log.journal, "MIN_AHEAD_BYTES", MIN_AHEAD_BYTES)
    monkeypatch.setattr(warpwell.kv.log.log, "UNSYNCED_BYTES", UNSYNCED_BYTES)


def read(path):
    with Log.open(path, writable=False) as log:
        return contents(log)


def journal_of(path):
    return journal_path(path, read_manifest(path).journal)


def edit(path, offset, data):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def test_checksums_are_crc32c():
    assert crc32c(b"123456789") == 0xE3069283
    data = np.random.default_rng(0).integers(0, 256, 10_000).astype(np.uint8)
    starts, sizes = np.array([0, 1, 77, 5000]), np.array([0, 1, 1023, 5000])
    found = crc32c_many(data.ctypes.data + starts, sizes)
    assert found.tolist() == [crc32c_of(data[a : a + n].tobytes()) for a, n in zip(starts, sizes, strict=True)]
    assert crc32c(data[7:], crc32c(data[:7])) == crc32c(data)


def test_what_is_committed_is_there_again(path):
    records = {b"a": b"", b"a\0": b"x", b"16 bytes of key.": b"y" * 5000, b"eight by": b"z" * 64}
    with Log.create(path, schema_json={"x": [1, 2]}) as log:
        locs = put(log, records)
        assert offset_of(locs[2, 0]) % 64 == 0
        assert log.commit() == 4
        assert append_one(log, b"late", b"bird")[0] > 0
    with Log.open(path, writable=True) as log:
        assert contents(log) == {**records, b"late": b"bird"}
        assert log.schema_json == {"x": [1, 2]} and log.writable
        log.append_deletes(*padded([b"a", b"not there"]))
    del records[b"a"]
    assert read(path) == {**records, b"late": b"bird"}
    assert verify(path).sound


def test_what_is_not_committed_is_not_seen(path):
    with Log.create(path) as log:
        put(log, {b"k": b"1"})
        log.commit()
        put(log, {b"k": b"2"})
        assert read(path) == {b"k": b"1"}
    assert read(path) == {b"k": b"2"}


@pytest.mark.parametrize("shape", ["rows", "aligned rows", "list", "memoryviews", "no bytes"])
def test_values_come_back_in_any_shape(path, shape):
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 256, (3000, {"aligned rows": 128, "no bytes": 0}.get(shape, 100))).astype(np.uint8)
    keys, lens = padded([b"%d" % k for k in range(3000)])
    values = rows if shape in ("rows", "aligned rows", "no bytes") else [row.tobytes() for row in rows]
    if shape == "memoryviews":
        values = [memoryview(row) for row in rows]
    with Log.create(path, segment_bytes=SMALL) as log:
        log.append(keys, lens, values)
        log.commit()
        assert len(log.segments.ids()) == {"no bytes": 1, "aligned rows": 7}.get(shape, 7)
    assert read(path) == {b"%d" % k: row.tobytes() for k, row in enumerate(rows)}


def test_large_values(path):
    rng = np.random.default_rng(2)
    records = {b"%d" % n: rng.bytes(n) for n in (SMALL, 1 << 24, 4096, 300_000, 262_144, 1, (1 << 25) + 1)}
    with Log.create(path, segment_bytes=SMALL) as log:
        put(log, records)
        append_one(log, b"one", records[b"300000"])
        with pytest.raises(errors.ValueSizeError):
            put(log, {b"small": b"x", b"too large": bytes(MAX_VALUE + 1)})
        with pytest.raises(errors.ValueSizeError):
            append_one(log, b"too large", bytes(MAX_VALUE + 1))
    assert read(path) == {**records, b"one": records[b"300000"]}


def test_a_hundred_thousand_small_records_take_less_than_a_second(path):
    keys, lens = padded([b"%08d" % k for k in range(100_000)])
    rows = np.zeros((100_000, 100), np.uint8)
    with Log.create(path, durability="none") as log:
        log.append(keys[:1], lens[:1], rows[:1])  # compiles
        log.commit()
        start = time.process_time()
        log.append(keys, lens, rows)
        log.commit()
        assert time.process_time() - start < 1


def test_many_uncommitted_records_spill_into_the_journal_but_do_not_count(path, monkeypatch):
    monkeypatch.setattr("warpwell.kv.log.log._SPILL", 100)
    log = Log.create(path)
    put(log, {b"first": b"0"})
    log.commit()
    for k in range(500):
        append_one(log, b"%d" % k, b"x")
    assert os.path.getsize(journal_of(path)) > SUPERBLOCK + 400 * RECORD_BYTES
    assert read(path) == {b"first": b"0"}
    log.commit()
    assert len(read(path)) == 501
    log.close()


# -- readers --------------------------------------------------------------------------------------------------


class Reader:
    """An index of a reader that follows."""

    def __init__(self, path):
        self.log = Log.open(path, writable=False)
        self.locations = {}
        self.apply(self.log.recovered.live())

    def apply(self, slots):
        for key, loc in zip(names_in(slots), slots[:, 2:].tolist(), strict=True):
            if loc[0] == -1:
                self.locations.pop(key, None)
            else:
                self.locations[key] = loc

    def refresh(self):
        changes = self.log.refresh()
        if changes.records is not None:
            self.locations = {}
            self.apply(changes.records.live())
        self.apply(changes.slots)
        self.log.release(sorted(self.log.retired))
        return changes

    def contents(self):
        out = {}
        for key, (loc0, loc1) in self.locations.items():
            value = os.pread(self.log.segments.fd(segment_of(loc0)), size_of(loc0, loc1), offset_of(loc0))
            assert crc32c(value) == loc1 >> 32 & 0xFFFFFFFF
            out[key] = value
        return out


def test_readers_follow_commits(path):
    with Log.create(path, segment_bytes=SMALL) as log:
        reader = Reader(path)
        assert reader.refresh().records is None
        put(log, {b"a": b"1", b"b": b"2"})
        assert reader.refresh().changed == 0
        log.commit()
        assert reader.refresh().changed == 2
        put(log, {b"%d" % k: bytes(1000) for k in range(200)})  # new segments
        log.append_deletes(*padded([b"a"]))
        log.commit()
        assert reader.refresh().slots[-1, 2] == -1
        assert reader.contents() == {b"b": b"2", **{b"%d" % k: bytes(1000) for k in range(200)}}
        with pytest.raises(errors.ReadOnlyError):
            append_one(reader.log, b"k", b"v")
        reader.log.close()
        with pytest.raises(errors.ClosedError):
            reader.log.refresh()


def test_a_reader_goes_over_to_the_next_journal_or_starts_anew(path):
    with Log.create(path) as log:
        reader, late_reader = Reader(path), Reader(path)
        for k in range(3):
            put(log, {b"%d" % k: b"x", b"same": b"%d" % k})
            log.commit()
            with Log.open(path, writable=False) as now:
                log.snapshot(now.recovered.live())
            changes = reader.refresh()
            assert changes.records is not None and changes.changed == 2
            assert reader.contents() == read(path)
        assert late_reader.refresh().changed == 6
        assert late_reader.contents() == read(path)
        reader.log.close()
        late_reader.log.close()


def test_readers_follow_a_busy_writer_from_state_to_state(tmp_path):
    path = str(tmp_path / "store.kv")
    script = write_script(11, steps=150)
    script.steps = [step for step in script.steps if step[0] != "reopen"]
    reached = []
    run = Run(script, path, Files(), lambda done, durable: reached.append(done))
    run.begin()
    states = []

    def follow():
        reader = Reader(path)
        while threading.current_thread() is not None and not stop.is_set():
            reader.refresh()
            states.append(reader.contents())
        reader.refresh()
        states.append(reader.contents())
        reader.log.close()

    stop = threading.Event()
    thread = threading.Thread(target=follow)
    thread.start()
    for _ in script.steps:
        run.next()
        time.sleep(0.001)
    until(lambda: len(states) > 10 or not thread.is_alive())
    stop.set()
    thread.join(HANG_SECONDS)
    run.close()
    assert not thread.is_alive() and len(states) > 10
    at = 0
    for state in states:
        assert state in script.states[at:], "a reader saw what never was, or went back"
        at = script.states.index(state, at)
    assert states[-1] == script.states[-1]


def test_a_reader_that_opens_while_segments_are_replaced_finds_a_store(path):
    with contextlib.closing(Records(Log.create(path, segment_bytes=SMALL))) as records:
        stop = threading.Event()
        problems, opened = [], []

        def open_again():
            while not stop.is_set():
                try:
                    opened.append(len(read(path)))
                except Exception as error:
                    problems.append(error)
                    return

        thread = threading.Thread(target=open_again)
        thread.start()
        for k in range(75):  # a reader that looks once fails within 60
            records.put(as_keys([b"%d" % j for j in range(12)]), [bytes([k]) * 3000] * 12)
            records.commit()
            compact(records)
        until(lambda: problems or len(opened) > 3)
        stop.set()
        thread.join(HANG_SECONDS)
    assert not thread.is_alive()
    assert not problems and len(opened) > 3


# -- snapshots and compaction ---------------------------------------------------------------------------------


def test_compaction_gives_space_back_and_keeps_every_value(path, monkeypatch):
    log = Log.create(path, segment_bytes=SMALL)
    with contextlib.closing(Records(log)) as records:
        state = {}
        for k in range(40):
            values = {b"%d" % j: bytes([k]) * 900 for j in range(k % 7, 30)}
            state.update(values)
            records.put(as_keys(list(values)), list(values.values()))
        before = set(log.segments.ids())
        read_values = compaction._read

        def put_and_read(log, locations):  # a put in the middle of a compaction
            monkeypatch.undo()
            records.put(as_keys([b"3"]), [b"newest"])
            return read_values(log, locations)

        monkeypatch.setattr(compaction, "_read", put_and_read)
        progress = []
        report = compact(records, progress=lambda done, total: progress.append((done, total)))
        assert report.moved > 0 and report.freed_bytes > 0 and set(report.segments) <= before
        assert set(log.segments.ids()) >= before  # until their caller commits the concurrent puts
        assert set(report.segments) <= set(log.segments.ids())
        records.commit()
        assert not set(report.segments) & set(log.segments.ids())
        assert not any(os.path.exists(log.segments.path(s)) for s in report.segments)
        assert progress[-1] == (report.moved_bytes, report.moved_bytes)
    state[b"3"] = b"newest"
    assert read(path) == state
    assert verify(path).sound
    log = Log.open(path, writable=True)
    with contextlib.closing(Records(log)) as records:  # nothing is left to do
        compact(records)
        assert compact(records).segments == ()
        new = append_one(log, b"next", b"v")[0]
        assert segment_of(new) > max(report.segments)  # an id is never given twice


def test_compaction_refuses_a_damaged_value(path):
    log = Log.create(path, segment_bytes=SMALL)
    with contextlib.closing(Records(log)) as records:
        for k in range(3):
            records.put(as_keys([b"%d" % j for j in range(k, 30)]), [bytes([k]) * 900] * (30 - k))
        records.commit()
        loc = records.index.lookup(as_keys([b"0"]))[0].tolist()
        edit(log.segments.path(segment_of(loc[0])), offset_of(loc[0]) + 5, b"\xff")
        files = sorted(os.listdir(path))
        with pytest.raises(errors.CorruptionError, match="damaged"):
            compact(records, threshold=0.2)
        assert set(files) <= set(os.listdir(path))
    problems = verify(path).problems
    assert [problem.key for problem in problems] == [b"0"]


def test_a_snapshot_takes_only_what_it_can_name(path):
    with Log.create(path) as log:
        put(log, {b"k": b"v"})
        with pytest.raises(errors.ArgumentError, match="segments"):
            log.snapshot(np.array([[0x6B, 0, 9 << 40 | 64, 1 << 25]], np.int64))


# -- one writer, forks, failures ------------------------------------------------------------------------------


def test_one_writer_at_a_time(path):
    with Log.create(path) as log:
        with pytest.raises(errors.SharingError, match=str(os.getpid())):
            Log.open(path, writable=True)
        put(log, {b"k": b"v"})
    Log.open(path, writable=True).close()


def in_child(body):
    """Run `body` in a forked process and return what it returns, as JSON."""
    source, sink = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.write(sink, json.dumps(body()).encode())
        finally:
            os._exit(0)
    os.close(sink)
    with open(source, "rb") as file:
        out = file.read()
    os.waitpid(process, 0)
    return json.loads(out)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_does_not_write_and_does_not_keep_the_lock(path):
    log = Log.create(path)
    put(log, {b"k": b"v"})

    def child():
        names = []
        for attempt in (lambda: append_one(log, b"x", b"y"), log.commit):
            try:
                attempt()
            except errors.ForkError:
                names.append("fork")
        log.close()
        return names

    assert in_child(child) == ["fork", "fork"]
    log.commit()
    source, sink = os.pipe()
    process = os.fork()
    if process == 0:  # the child runs until the parent has closed the log
        os.close(sink)
        os.read(source, 1)
        os._exit(0)
    log.close()
    Log.open(path, writable=True).close()
    os.close(sink)
    os.waitpid(process, 0)
    assert read(path) == {b"k": b"v"}


class Failing(Files):
    """Fails a kind of call while `on`."""

    def __init__(self):
        self.on = None
        self.error = 5

    def sync(self, fd):
        if self.on == "sync":
            raise OSError(self.error, "planted")
        super().sync(fd)

    def sync_all(self, fds):
        for fd in fds:
            self.sync(fd)

    def pwrite(self, fd, data, offset):
        if self.on == "pwrite":
            raise OSError(self.error, "planted")
        super().pwrite(fd, data, offset)


def test_an_error_of_any_parallel_sync_is_raised(tmp_path):
    files = Files()
    fds = [files.create(str(tmp_path / name)) for name in "abc"]
    files.sync_all(fds)
    files.close(fds[1])
    with pytest.raises(OSError, match="Bad file descriptor"):
        files.sync_all(fds)
    files.close(fds[0])
    with pytest.raises(OSError, match="Bad file descriptor"):
        files.sync_all([fds[0], fds[2]])
    files.close(fds[2])


@pytest.mark.parametrize("damaged", [b"first", b"last"])
def test_only_the_last_group_may_lack_a_value(path, tmp_path, damaged):
    values = {b"first": b"1" * 100, b"last": b"2" * 100}
    cut = tmp_path / "cut"
    with Log.create(path) as log:
        for key, value in values.items():
            put(log, {key: value})
            log.commit()
        shutil.copytree(path, cut)
    # As a power cut may leave it: the floor is old, and a value did not reach the drive.
    (cut / "COMMITTED").write_bytes(b"")
    for file in [*cut.glob("*.val"), *cut.glob("*.jnl")]:
        file.write_bytes(file.read_bytes().replace(values[damaged], bytes(100)))
    if damaged == b"last":
        assert read(cut) == {b"first": values[b"first"]}
        with Log.open(cut, writable=True) as log:
            put(log, {b"new": b"3"})
        assert read(cut) == {b"first": values[b"first"], b"new": b"3"}
    else:
        with pytest.raises(errors.CorruptionError, match="is damaged"):
            read(cut)


def test_a_small_commit_syncs_the_journal_only(path, monkeypatch):
    monkeypatch.setattr(warpwell.kv.log.log, "UNSYNCED_BYTES", 700)
    files = Watching()
    with Log.create(path, files=files) as log:
        value, journal = log.segments.fd(1), log._journal.fd
        for size, synced in ((100, [journal]), (500, [journal]), (100, [value, journal]), (100, [journal])):
            put(log, {b"a": bytes(size)})
            log.commit()
            assert files.synced == synced
        put(log, {b"b": b"1"})
        log.append_deletes(*padded([b"a"]))
        log.commit()
        assert files.synced == [journal]
        put(log, {b"a": bytes(INLINE_BYTES + 1)})
        log.commit()
        assert files.synced == [value, journal]
        log.append_deletes(*padded([b"b"]))
        log.commit()
        assert files.synced == [journal]
        put(log, {b"c": b"1"})
    assert files.synced == [value]  # close() syncs the segment, because only the journal was durable
    assert read(path) == {b"a": bytes(INLINE_BYTES + 1), b"c": b"1"}


class Watching(Files):
    """Files that keep the descriptors of the last `sync_all`."""

    synced = ()

    def sync_all(self, fds):
        self.synced = list(fds)
        super().sync_all(fds)


def test_an_interrupt_at_any_instruction_of_a_sync_loses_no_sync(path):
    functions = {Log._sync.__code__, *(each.__code__ for each in vars(Segments).values() if inspect.isfunction(each))}
    files = Watching()
    with Log.create(path, files=files) as log:
        for number in itertools.count(1):
            put(log, {b"a": bytes(INLINE_BYTES + 1)})
            countdown, files.synced = iter(range(number)), ()

            def interrupt(frame, event, _, countdown=countdown):
                frame.f_trace_opcodes = frame.f_code in functions
                if event == "opcode" and next(countdown, number) == number - 1:
                    raise KeyboardInterrupt
                return interrupt

            sys.settrace(interrupt)
            try:
                log.commit()
                break
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            synced = set(files.synced)
            log.commit()
            assert log.segments.fd(1) in synced | set(files.synced)
    assert number > 50


@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize("shards", [0, 2])
@pytest.mark.parametrize("lost", ["bytes", "end"])
def test_values_that_only_the_journal_has(tmp_path, marks, shards, lost):
    folder, left = tmp_path / "store", tmp_path / "left"
    folder.mkdir()
    path = str(folder / "a.kv")
    expected = {b"%d" % k: bytes([k]) * 1000 for k in range(30)}
    with Log.create(path, shards=[str(folder / f"shard{k}") for k in range(shards)]) as log:
        put_in_shards(log, expected, shards)
    sizes = {file: file.stat().st_size for file in folder.rglob("*.val")}
    with Log.open(path, writable=True) as log:
        for k in range(20, 60, 4):
            group = {b"%d" % j: bytes([j + 100]) * (3 * j) for j in range(k, k + 4)}
            put_in_shards(log, group, shards)
            log.append_deletes(*padded([b"%d" % (k - 20)]))
            log.commit()
            expected.update(group)
            del expected[b"%d" % (k - 20)]
        shutil.copytree(folder, left)
    shutil.rmtree(folder)
    left.rename(folder)
    for file, size in sizes.items():  # as a power cut may leave it: no segment has the values since its last sync
        size_before = file.stat().st_size
        assert size_before > size
        os.truncate(file, size)
        if lost == "bytes":
            os.truncate(file, size_before)
    if not marks:
        os.truncate(os.path.join(path, "COMMITTED"), 0)
    report = verify(path)
    assert report.sound and report.unsettled_values == 40
    assert read(path) == expected
    with Log.open(path, writable=True) as log:
        put_in_shards(log, {b"new": b"value"}, shards)
    expected[b"new"] = b"value"
    assert read(path) == expected
    report = verify(path)
    assert report.sound and report.unsettled_values == 0


def put_in_shards(log, records, shards):
    chosen = np.array([key[-1] % shards for key in records], np.uint8) if shards else None
    log.append(*padded(list(records)), list(records.values()), shards=chosen)


def test_values_that_only_the_segments_have(path, tmp_path):
    """A power cut may lose the values of the last group in the journal, although their segments have them."""
    cut, value = str(tmp_path / "cut.kv"), b"value" * 20
    with Log.create(path) as log:
        append_one(log, b"a", b"1")
        log.commit()
        with open(os.path.join(path, COMMITTED_NAME), "rb") as file:
            marks = file.read()
        append_one(log, b"b", value)
        log.commit()
        shutil.copytree(path, cut)
    edit(os.path.join(cut, COMMITTED_NAME), 0, marks)
    with open(journal_of(cut), "rb") as file:
        at = file.read().index(value)
    edit(journal_of(cut), at, bytes(len(value)))
    assert verify(cut).sound
    with Log.open(cut, writable=True) as log:
        assert contents(log) == {b"a": b"1", b"b": value}
        append_one(log, b"c", b"3")
    assert verify(cut).sound


def test_a_group_whose_values_are_cut_off_does_not_count(path):
    with Log.create(path) as log:
        for k in range(3):
            put(log, {b"a": bytes([k]) * 100})
            log.commit()
    os.truncate(os.path.join(path, "COMMITTED"), 0)
    journal = journal_of(path)
    os.truncate(journal, os.path.getsize(journal) - 1)
    assert read(path) == {b"a": b"\1" * 100}
    with Log.open(path, writable=True) as log:
        put(log, {b"b": b"1"})
    assert read(path) == {b"a": b"\1" * 100, b"b": b"1"}


# -- the zeros after the last group of a journal ---------------------------------------------------------------


def test_small_commits_rarely_change_the_size_of_the_journal(path):
    sizes = []
    with Log.create(path) as log:
        for k in range(500):
            put(log, {b"%d" % k: b"value"})
            log.commit()
            sizes.append(os.path.getsize(journal_of(path)))
            end = log._journal.position.offset
            assert sizes[-1] <= end + max(MIN_AHEAD_BYTES, end)
        reader = Log.open(path, writable=False)
        report = verify(path)
        assert report.sound and report.torn_bytes == 0 and report.records == 500 and sizes[-1] > end
    assert len(set(sizes)) < 8 and sizes == sorted(sizes)
    assert os.path.getsize(journal_of(path)) == end
    assert reader.refresh().changed == 0 and len(contents(reader)) == 500
    reader.close()


def test_groups_that_would_soon_pass_the_zeros_write_none(path):
    with Log.create(path) as log:
        for size in (MIN_AHEAD_BYTES, INLINE_BYTES + 1):
            put(log, {b"a": bytes(size)})
            log.commit()
            assert os.path.getsize(journal_of(path)) == log._journal.position.offset


def test_a_snapshot_and_a_killed_writer_leave_no_zeros(path, tmp_path):
    killed = str(tmp_path / "killed.kv")
    with Log.create(path) as log:
        put(log, {b"a": b"1"})
        log.commit()
        before, end = journal_of(path), log._journal.position.offset
        shutil.copytree(path, killed)
        with Log.open(path, writable=False) as reader:
            log.snapshot(reader.recovered.live())
        assert os.path.getsize(before) == end
    assert os.path.getsize(journal_of(killed)) > end
    assert read(killed) == {b"a": b"1"}
    with Log.open(killed, writable=True):
        assert os.path.getsize(journal_of(killed)) == end
    assert read(killed) == {b"a": b"1"}


def test_a_disk_without_room_for_zeros(path):
    files = Failing()
    files.error = errno.ENOSPC
    pwrite = files.pwrite
    files.pwrite = lambda fd, data, offset: (setattr(files, "on", "pwrite" * (not any(data))), pwrite(fd, data, offset))
    with Log.create(path, files=files) as log:
        for k in range(3):
            put(log, {b"%d" % k: b"value"})
            log.commit()
        assert os.path.getsize(journal_of(path)) == log._journal.position.offset
        files.error = errno.EIO
        put(log, {b"a": b"x" * (MIN_AHEAD_BYTES // 16)})
        log._journal._end = 0
        with pytest.raises(errors.StoreFailedError):
            log.commit()
    assert read(path).keys() >= {b"0", b"1", b"2"}


def test_zeros_leave_the_rest_of_a_full_disk_to_groups(path):
    class Nearly(Files):
        def pwrite(self, fd, data, offset):
            if any(data):
                return super().pwrite(fd, data, offset)
            super().pwrite(fd, data[: len(data) // 2], offset)
            raise OSError(errno.ENOSPC, "full")

    with Log.create(path, files=Nearly()) as log:
        put(log, {b"a": b"1"})
        log.commit()
        assert os.path.getsize(journal_of(path)) == log._journal.position.offset
    assert read(path) == {b"a": b"1"}


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("first", [0, 64, 128])
def test_a_group_with_zeros_instead_of_its_end(path, tmp_path, first, durable):
    """A power cut may leave zeros instead of any part of the last group, and the file is longer than the group."""
    torn, value = str(tmp_path / "torn.kv"), b"value" * 20
    with Log.create(path) as log:
        put(log, {b"a": b"1"})
        log.commit()
        begin = log._journal.position.offset
        marks = snap(path)[COMMITTED_NAME]
        put(log, {b"a": value, b"b": value})
        log.commit()
        end = log._journal.position.offset
        shutil.copytree(path, torn)
    edit(journal_of(torn), begin + first, bytes(end - begin - first))
    edit(torn + "/00000001.val", SUPERBLOCK + 64, bytes(end - begin))
    if not durable:
        edit(os.path.join(torn, COMMITTED_NAME), 0, marks)
        assert os.path.getsize(journal_of(torn)) > end
        for _ in range(2):
            report = verify(torn)
            assert report.sound and report.torn_bytes <= first
            assert read(torn) == {b"a": b"1"}
        with Log.open(torn, writable=True) as log:
            put(log, {b"c": b"3"})
        assert read(torn) == {b"a": b"1", b"c": b"3"} and verify(torn).sound
    elif first < 128:
        with pytest.raises(errors.CorruptionError, match="is damaged"):
            Log.open(torn, writable=True)
    else:
        with pytest.raises(WrongBytes):
            read(torn)
        assert not verify(torn).sound


def test_a_refresh_does_not_read_the_zeros(path, monkeypatch):
    monkeypatch.setattr(warpwell.kv.log.journal, "MIN_AHEAD_BYTES", MAX_AHEAD_BYTES)
    counts = []

    def read_and_count(fd, nbytes, offset):
        counts.append(nbytes)
        return read_at(fd, nbytes, offset)

    with Log.create(path) as log:
        put(log, {b"a": b"1"})
        log.commit()
        reader = Reader(path)
        monkeypatch.setattr(warpwell.kv.log.journal, "read_at", read_and_count)
        monkeypatch.setattr(warpwell.kv.log.recovery, "read_at", read_and_count)
        for k in range(3):
            assert reader.refresh().changed == 0
            put(log, {b"b": b"%d" % k})
            log.commit()
            assert reader.refresh().changed == 1 and reader.contents() == {b"a": b"1", b"b": b"%d" % k}
        reader.log.close()
    assert sum(counts) < MAX_AHEAD_BYTES / 2


def test_values_that_look_like_records(path):
    """A value that contains records of the journal is not read as records."""
    with Log.create(path) as log:
        for k in range(4):
            put(log, {b"a": b"%d" % k})
            log.commit()
        with open(journal_of(path), "rb") as file:
            records = file.read()[SUPERBLOCK:]
        put(log, {b"b": records})
        log.commit()
    with open(path + "/00000001.val", "r+b") as file:
        file.truncate(SUPERBLOCK)
    os.truncate(os.path.join(path, "COMMITTED"), 0)
    assert read(path) == {b"a": b"3", b"b": records}


def test_a_failed_fsync_ends_the_writing(path):
    files = Failing()
    log = Log.create(path, files=files)
    put(log, {b"a": b"1"})
    log.commit()
    put(log, {b"b": b"2"})
    files.on = "sync"
    with pytest.raises(errors.StoreFailedError, match="fsync"):
        log.commit()
    files.on = None
    for attempt in (log.commit, lambda: append_one(log, b"c", b"3"), lambda: log.append_deletes(*padded([b"a"]))):
        with pytest.raises(errors.StoreFailedError):
            attempt()
    assert log.failed
    log.close()
    # The page cache has the group, perhaps without the drive: a writer writes it again before it relies on it.
    assert read(path) == {b"a": b"1", b"b": b"2"}
    Log.open(path, writable=True).close()
    assert read(path) == {b"a": b"1", b"b": b"2"} and verify(path).sound


def test_a_full_disk_changes_nothing(path):
    files = Failing()
    files.error = 28
    log = Log.create(path, files=files, segment_bytes=SMALL)
    put(log, {b"a": b"1"})
    files.on = "pwrite"
    with pytest.raises(errors.StorageFullError):
        put(log, {b"b": b"2"})
    with pytest.raises(errors.StorageFullError):
        append_one(log, b"b", b"2")
    with pytest.raises(errors.StorageFullError):
        log.commit()
    files.on = None
    put(log, {b"c": b"3"})
    log.commit()
    log.close()
    assert read(path) == {b"a": b"1", b"c": b"3"}


def test_always_takes_a_put_back_that_was_not_committed(path):
    files = Failing()
    files.error = 28
    log = Log.create(path, durability="always", files=files)
    append_one(log, b"a", b"1")
    assert read(path) == {b"a": b"1"}
    files.on = "pwrite"
    with pytest.raises(errors.StorageFullError):
        log.append_deletes(*padded([b"a"]))
    files.on = None
    log.close()
    assert read(path) == {b"a": b"1"}


@pytest.mark.parametrize("nbytes", [64, 100, 1 << 16])
@pytest.mark.parametrize("is_array", [False, True])
def test_the_caller_may_change_values_between_append_and_commit(path, nbytes, is_array):
    contents_of = np.random.default_rng(nbytes).integers(0, 256, (1, nbytes)).astype(np.uint8)
    values = contents_of.copy() if is_array else [bytearray(contents_of.tobytes())]
    with Log.create(path) as log:
        log.append(*padded([b"a"]), values)
        np.frombuffer(values[0], np.uint8)[:] = 0
        log.commit()
        assert verify(path).problems == []
    assert read(path) == {b"a": contents_of.tobytes()}


# -- bad folders and damage -----------------------------------------------------------------------------------


def test_folders_that_are_no_stores(tmp_path):
    with pytest.raises(errors.MissingFileError, match="does not exist"):
        Log.open(tmp_path / "none", writable=False)
    with pytest.raises(errors.FormatError, match="not a key-value store"):
        Log.open(tmp_path, writable=True)
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(errors.FormatError, match="folder"):
        Log.open(tmp_path / "file", writable=False)
    assert sorted(os.listdir(tmp_path)) == ["file"]
    with pytest.raises(errors.ArgumentError, match="other files"):
        Log.create(tmp_path)
    with pytest.raises(errors.ArgumentError, match="is a file"):
        Log.create(tmp_path / "file")
    with pytest.raises(errors.MissingFileError, match="no such folder"):
        Log.create(tmp_path / "a" / "b")
    for wrong in ({"durability": "maybe"}, {"segment_bytes": 10}):
        with pytest.raises(errors.ArgumentError, match=next(iter(wrong))):
            Log.create(tmp_path / "new", **wrong)
    assert sorted(os.listdir(tmp_path)) == ["file"]
    Log.create(tmp_path / "new").close()
    with pytest.raises(errors.ArgumentError, match="already a store"):
        Log.create(tmp_path / "new")


def test_a_newer_format_is_named(path):
    Log.create(path).close()
    manifest = os.path.join(path, "MANIFEST")
    with open(manifest, "rb") as file:
        body = file.read().partition(b"\n")[2]
    with open(manifest, "wb") as file:
        file.write(f"warpwell-kv 6 {len(body)} {crc32c(body, crc32c(b'6')):08x}\n".encode() + body)
    with pytest.raises(errors.StoreVersionError, match="update"):
        Log.open(path, writable=True)


def committed(path, groups=4):
    log = Log.create(path, segment_bytes=SMALL)
    for k in range(groups):
        put(log, {b"%d" % j: bytes([k]) * 100 for j in range(3)})
        log.commit()
    log.close()
    return journal_of(path)


def offset_in(record):
    """Return the offset of a record in the journal of `committed`."""
    return SUPERBLOCK + (3 * RECORD_BYTES + 3 * 128) * (record // 3) + RECORD_BYTES * (record % 3)


def snap(path):
    out = {}
    for name in os.listdir(path):
        if name != "LOCK":
            with open(os.path.join(path, name), "rb") as file:
                out[name] = file.read()
    return out


@pytest.mark.parametrize("record", [0, 5, 11])
@pytest.mark.parametrize("how", ["flip", "zero", "cut", "cut within", "swap"])
def test_damage_of_what_was_committed_is_refused_and_left_alone(path, record, how):
    journal = committed(path)
    at = offset_in(record)
    if how == "flip":
        edit(journal, at + 33, b"\xaa")
    elif how == "zero":
        edit(journal, at, bytes(RECORD_BYTES))
    elif how.startswith("cut"):
        os.truncate(journal, at + 30 * (how == "cut within"))
    else:
        with open(journal, "rb") as file:
            file.seek(offset_in((record + 3) % 12))
            stale_record = file.read(RECORD_BYTES)
        edit(journal, at, stale_record)
    before = snap(path)
    for writable in (True, False):
        with pytest.raises(errors.CorruptionError) as caught:
            Log.open(path, writable=writable)
        assert str(caught.value.path) == journal and "copy" in str(caught.value)
    assert snap(path) == before
    assert [problem.path for problem in verify(path).problems] == [journal]


@pytest.mark.parametrize("field", ["seq", "ordinal", "salt", "previous", "crc"])
def test_a_record_that_does_not_continue_its_group_ends_the_journal(path, field):
    """A valid record of an earlier group or journal may be left behind the last group; it is not part of the log."""
    with Log.create(path, durability="none") as log:
        put(log, {b"first": b"1"})
        log.commit()
        put(log, {b"a": b"2", b"b": b"3"})
        log.commit()
    journal = journal_of(path)
    data = np.fromfile(journal, np.uint8)
    last = data[SUPERBLOCK:].view(RECORD)[-1:]
    last[field] += 1
    if field != "crc":
        last["crc"] = crc32c(last.view(np.uint8)[:60])
    data.tofile(journal)
    # As if the last mark in COMMITTED had been lost.
    edit(os.path.join(path, COMMITTED_NAME), 0, bytes(MARK_OFFSETS[1] + 64))
    assert read(path) == {b"first": b"1"}


@pytest.mark.parametrize(("field", "value"), [("type", 9), ("key_len", 0), ("key_len", 2), ("loc", [0, 1 << 56])])
def test_a_record_with_a_right_checksum_that_no_release_writes_is_damage(path, field, value):
    with Log.create(path, durability="none") as log:
        put(log, {b"first": b"1"})
        log.commit()
        put(log, {b"a": b"2"})
        log.commit()
    journal = journal_of(path)
    data = np.fromfile(journal, np.uint8)
    last = data[SUPERBLOCK:].view(RECORD)[-1:]
    last[field] = value
    last["crc"] = crc32c(last.view(np.uint8)[:60])
    data.tofile(journal)
    with pytest.raises(errors.CorruptionError, match="no release writes such a record") as caught:
        Log.open(path, writable=False)
    assert caught.value.path == journal and caught.value.offset == len(data) - RECORD_BYTES


def test_one_mark_survives_a_torn_write(path):
    with Log.create(path) as log:
        for key in (b"a", b"b", b"c"):
            put(log, {key: b"value"})
            log.commit()
        uuid = read_manifest(path).uuid_bytes
        marks, _ = read_marks(path, uuid)
        assert {mark[0] for mark in marks} == {2, 3}
        for offset in MARK_OFFSETS:
            shutil.copytree(path, copy := f"{path}.{offset}")
            edit(os.path.join(copy, COMMITTED_NAME), offset, os.urandom(64))
            assert len(read_marks(copy, uuid)[0]) == 1
            assert verify(copy).sound and verify(copy).torn_marks == 1


def test_verify_counts_torn_marks_and_misses_the_file_of_a_store_with_records(path):
    with Log.create(path) as log:
        pass
    committed_marks = os.path.join(path, COMMITTED_NAME)
    os.unlink(committed_marks)
    assert verify(path).sound  # a power failure may undo the creation before the first commit
    with Log.open(path, writable=True) as log:
        put(log, {b"a": b"value"})
        log.commit()
        put(log, {b"b": b"value"})
        log.commit()
    for offset in MARK_OFFSETS:
        edit(committed_marks, offset, os.urandom(64))
    assert verify(path).sound and verify(path).torn_marks == 2  # neither mark is synced before the log is closed
    os.unlink(committed_marks)
    assert [problem.path for problem in verify(path).problems] == [committed_marks]


def test_a_torn_end_is_dropped_by_the_writer_only(path):
    journal = committed(path)
    size = os.path.getsize(journal)
    with open(journal, "ab") as file:
        file.write(b"torn" * 25)
    expected = {b"%d" % j: bytes([3]) * 100 for j in range(3)}
    assert read(path) == expected
    assert os.path.getsize(journal) == size + 100
    assert verify(path).torn_bytes == 100 and verify(path).sound
    with Log.open(path, writable=True) as log:
        assert os.path.getsize(journal) == size
        put(log, {b"new": b"v"})
    assert read(path) == {**expected, b"new": b"v"}


def test_missing_and_cut_files_are_named(path):
    committed(path)
    before = snap(path)
    for name, change in [("00000001.val", os.unlink), ("00000001.jnl", os.unlink), ("00000001.val", None)]:
        file = os.path.join(path, name)
        if change is None:
            os.truncate(file, SUPERBLOCK + 10)
        else:
            change(file)
        with pytest.raises(errors.CorruptionError, match=name):
            Log.open(path, writable=True)
        with pytest.raises(errors.CorruptionError, match=name):
            Log.open(path, writable=False)
        assert not verify(path).sound
        with open(file, "wb") as out:
            out.write(before[name])
    assert len(read(path)) == 3


def test_a_journal_of_another_store_is_refused(tmp_path):
    journal, foreign_journal = committed(str(tmp_path / "a")), committed(str(tmp_path / "b"))
    os.replace(foreign_journal, journal)
    with pytest.raises(errors.CorruptionError, match="another file"):
        Log.open(tmp_path / "a", writable=True)


def test_an_older_copy_of_the_journal_is_refused(path):
    journal = committed(path)
    with open(journal, "rb") as file:
        old = file.read()
    with Log.open(path, writable=True) as log:
        put(log, {b"new": b"v"})
    with open(journal, "wb") as file:
        file.write(old)
    with pytest.raises(errors.CorruptionError, match="had been committed"):
        Log.open(path, writable=True)


def test_only_a_location_that_was_never_committed_is_used_again(path):
    log = Log.create(path)
    committed_location = append_one(log, b"k", b"x" * 500)[0]
    log.commit()
    lost_location = append_one(log, b"k", b"y" * 500)[0]
    log._writer.release()  # as if the process exited before the commit
    with Log.open(path, writable=True) as again:
        assert append_one(again, b"k", b"z")[0] == lost_location > committed_location


def test_segments_are_announced(path):
    with Log.create(path, segment_bytes=SMALL) as log:
        announced = []
        log.segments.on_segment(lambda segment, fd: announced.append((segment, fd)))
        assert announced == [(1, log.segments.fd(1))]
        put(log, {b"%d" % k: bytes(40_000) for k in range(5)})
        assert [segment for segment, _ in announced] == log.segments.ids() == [1, 2, 3, 4, 5]
    assert [fd for _, fd in announced[5:]] == [-1] * 5


def take_snapshot(log):
    log.commit()
    with Log.open(log.path, writable=False) as found:
        live = found.recovered.live()
    log.snapshot(live)


class Interrupting(Files):
    """Ctrl-C, or an error, during the first call of a kind after `armed` is set."""

    def __init__(self, name, error=None):
        self.armed, self._name, self._error = False, name, error

    def _after(self, name, made):
        if self.armed and name == self._name and made:
            self.armed = False
            if self._error is not None:
                raise self._error
            signal.raise_signal(signal.SIGINT)

    def create(self, path):
        fd = super().create(path)
        self._after("create", True)
        return fd

    def rename(self, source, target):
        super().rename(source, target)
        self._after("rename", True)

    def sync_folder(self, path):
        super().sync_folder(path)
        self._after("sync_folder", True)

    def unlink(self, path):
        made = os.path.lexists(path)
        super().unlink(path)
        self._after("unlink", made)


@pytest.mark.parametrize("call", ["create", "rename", "sync_folder"])
def test_an_interrupt_leaves_log_and_manifest_in_agreement(path, call):
    files = Interrupting(call)
    with Log.create(path, segment_bytes=SMALL, files=files) as log:
        put(log, {b"1": b"one"})
        log.commit()
        for step in (log.roll, lambda: take_snapshot(log)):
            files.armed = True
            with pytest.raises(KeyboardInterrupt):
                step()
            assert read_manifest(path) == log._manifest
            put(log, {b"2": b"two"})
            log.commit()
            assert read(path) == {b"1": b"one", b"2": b"two"}
        log.roll()
    with Log.open(path, writable=True) as log:
        assert contents(log) == {b"1": b"one", b"2": b"two"}


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "broken"), None])
def test_an_old_file_that_cannot_be_removed_does_not_undo_a_snapshot(path, error):
    files = Interrupting("unlink", error)
    with Log.create(path, files=files) as log:
        for number in range(4):
            put(log, {b"%d" % number: b"value"})
            log.commit()
            files.armed = number == 3
            with contextlib.suppress(KeyboardInterrupt):
                take_snapshot(log)
        assert not files.armed
        put(log, {b"9": b"nine"})
        log.commit()
        assert set(read(path)) == {b"0", b"1", b"2", b"3", b"9"}


def test_an_exception_of_a_signal_handler_during_a_snapshot_ends_the_writing(path):
    files = Interrupting("sync_folder", ZeroDivisionError("an alarm"))
    log = Log.create(path, files=files)
    put(log, {b"1": b"one"})
    files.armed = True
    with pytest.raises(ZeroDivisionError):
        take_snapshot(log)
    with pytest.raises(errors.StoreFailedError):
        put(log, {b"2": b"two"})
    log.close()
    assert read(path) == {b"1": b"one"}


@pytest.mark.parametrize("error", [OSError(errno.ENOENT, "made by a lost request"), OSError(errno.ENOSPC, "full")])
@pytest.mark.parametrize("step", [Log.roll, take_snapshot])
def test_a_rename_that_raises_though_it_was_made_removes_no_files(path, error, step):
    files = Interrupting("rename", error)
    log = Log.create(path, files=files)
    put(log, {b"1": b"one"})
    log.commit()
    files.armed = True
    with pytest.raises((errors.StoreFailedError, errors.StorageFullError)):
        step(log)
    with pytest.raises(errors.StoreFailedError):
        put(log, {b"2": b"two"})
    log.close()
    with Log.open(path, writable=True) as log:
        assert contents(log) == {b"1": b"one"}


def test_an_interrupt_does_not_hide_the_error_of_a_parallel_sync(path, monkeypatch):
    real, armed = os.fdatasync, []

    def fdatasync(fd):
        if armed and os.readlink(f"/proc/self/fd/{fd}").endswith(".val"):
            armed.clear()
            signal.raise_signal(signal.SIGINT)
            raise OSError(5, "planted")
        real(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    log = Log.create(path)
    put(log, {b"a": bytes(INLINE_BYTES + 1)})
    armed.append(True)
    with pytest.raises(errors.StoreFailedError):
        log.commit()
    with pytest.raises(errors.StoreFailedError):
        log.commit()
    log.close()


def test_a_commit_after_an_interrupted_one_syncs(path, monkeypatch):
    synced = []

    class Once(Files):
        def sync_all(self, fds):
            if len(synced) == 0:
                synced.append(None)
                raise KeyboardInterrupt
            synced.append(list(fds))
            super().sync_all(fds)

    with Log.create(path, files=Once()) as log:
        put(log, {b"a": b"value"})
        with pytest.raises(KeyboardInterrupt):
            log.commit()
        assert log.commit() == 1
        assert synced == [None, [log.segments.fd(1), log._journal.fd]]


@pytest.mark.parametrize("call", ["pwrite", "sync_all"])
def test_a_record_that_a_signal_handler_puts_during_a_commit_is_in_the_next(path, call):
    class Handling(Files):
        handler, synced_fds = None, ()

        def pwrite(self, fd, data, offset):
            super().pwrite(fd, data, offset)
            if call == "pwrite" and os.readlink(f"/proc/self/fd/{fd}").endswith(".jnl"):
                self._handle()

        def sync_all(self, fds):
            self.synced_fds = list(fds)
            super().sync_all(fds)
            if call == "sync_all":
                self._handle()

        def _handle(self):
            handler, self.handler = self.handler, None
            if handler is not None:
                handler()

    files, values = Handling(), {b"a": b"value", b"b": bytes(INLINE_BYTES + 1)}
    with Log.create(path, files=files) as log:
        put(log, {b"a": values[b"a"]})
        files.handler = lambda: put(log, {b"b": values[b"b"]})
        log.commit()
        assert log.uncommitted() == 1
        log.commit()
        assert log.segments.fd(1) in files.synced_fds or call == "pwrite"
    assert read(path) == values
