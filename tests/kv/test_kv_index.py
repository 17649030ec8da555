"""Index and reader by themselves: against a dict, while a writer changes them, and with files that fail."""

import ctypes
import mmap
import os
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.harness.kv_slots import slots_at, tombstones

from warpwell import errors, kv
from warpwell.kv.index import reader
from warpwell.kv.index.index import (
    S_TABLE,
    STATE_WORDS,
    Index,
    StoreState,
    enter,
    leave,
    lookup,
    next_epoch,
    publish,
    put,
    readers_in,
)
from warpwell.kv.index.reader import Reader
from warpwell.kv.keys import Keys, as_keys
from warpwell.kv.log.checksum import crc32c
from warpwell.kv.log.format import KEY_LEN_SHIFT, SEGMENT_SHIFT, offset_of
from warpwell.kv.native import compiled
from warpwell.targets.interp.interpreter import Interpreter
from warpwell.targets.primitives import backoff, fetch_add, load_acquire, store_relaxed


def new_slots(keys: Keys, serial: int) -> np.ndarray:
    """Made-up locations of keys, in which loc1's upper half repeats the serial number in loc0."""
    lengths = keys.padded()[1].astype(np.int64)
    numbers = serial + np.arange(keys.size)
    return slots_at(keys, np.column_stack([1 << SEGMENT_SHIFT | numbers, numbers << 32 | lengths << KEY_LEN_SHIFT]))


def test_many_keys_and_churn() -> None:
    state = StoreState()
    index = Index(state)
    keys = as_keys(np.random.default_rng(0).permutation(200_000))
    index.put(new_slots(keys, 1))
    assert len(index) == 200_000
    np.testing.assert_array_equal(index.lookup(keys), new_slots(keys, 1)[:, 2:])
    for round_ in range(8):
        # other keys each time: tombstones must not fill the table
        churn = as_keys(np.arange(100_000) + 10**6 * (round_ + 1))
        index.put(new_slots(churn, 10**7))
        index.put(tombstones(churn))
    assert len(index) == 200_000
    assert index.nbytes < 1 << 26
    np.testing.assert_array_equal(index.lookup(keys), new_slots(keys, 1)[:, 2:])
    assert state.drain()


def test_readers_see_pairs_that_belong_together() -> None:
    state = StoreState()
    index = Index(state)
    keys = as_keys(np.arange(500))
    index.put(new_slots(keys, 1))
    stop, wrong, rounds = threading.Event(), [], [0, 0]

    def read(k: int) -> None:
        while not stop.is_set():
            found = index.lookup(keys)
            present = found[:, 0] != 0
            if not present.all() or (found[:, 0] & 0xFFFFFFFF != found[:, 1] >> 32).any():
                wrong.append(found)
                return
            rounds[k] += 1

    threads = [threading.Thread(target=read, args=(k,)) for k in range(2)]
    for t in threads:
        t.start()
    try:
        serial = 1000
        while min(rounds) < 200 and serial < 10**9 and not wrong:
            index.put(new_slots(keys, serial % 10**8))
            serial += 500
            if serial % 5000 == 0:
                fresh = as_keys(np.arange(1000) + serial)
                index.put(new_slots(fresh, 1))  # so that the table is replaced now and then
                index.put(tombstones(fresh))
    finally:
        stop.set()
        for t in threads:
            t.join()
    assert not wrong
    assert state.drain()


@pytest.mark.parametrize("first", range(0, 2000, 500))
def test_lookup_on_weak_memory(first: int) -> None:
    for seed in range(first, first + 500):
        memory = np.zeros(8 + 4 * 8, np.int64)
        memory[0] = 7
        table = memory.ctypes.data
        results: list[tuple[int, int]] = []

        def writer() -> None:
            for n in (1, 2, 3):
                put(table, 5, 0, 8, 1 << 40 | n, n << 32 | 8 << KEY_LEN_SHIFT)
            put(table, 5, 0, 8, -1, 0)
            put(table, 5, 0, 8, 1 << 40 | 4, 4 << 32 | 8 << KEY_LEN_SHIFT)

        def reader() -> None:
            for _ in range(4):
                results.append(lookup(table, 5, 0, 8))

        interpreter = Interpreter(seed)
        interpreter.spawn(writer, name="writer")
        interpreter.spawn(reader, name="reader")
        interpreter.run()
        for loc0, loc1 in results:
            assert loc0 & 0xFF == loc1 >> 32 and (loc0 == 0) == (loc1 == 0), seed
        # coherence: a later lookup never goes back, but for the deletion between 3 and 4
        numbers = [loc0 & 0xFF for loc0, _ in results if loc0]
        assert numbers == sorted(numbers), seed


@pytest.mark.parametrize("first", range(0, 600, 200))
def test_nothing_is_given_back_while_a_reader_is_inside(first: int) -> None:
    for seed in range(first, first + 200):
        memory = np.zeros(STATE_WORDS + 1, np.int64)
        state, value = memory.ctypes.data, memory[STATE_WORDS:].ctypes.data
        memory[S_TABLE] = 1  # the table of the readers: 1, then 2, then 3; `value` is the last released table
        wrong: list[int] = []

        def reader(stripe: int) -> None:
            for _ in range(6):
                epoch = enter(state, stripe)
                held = load_acquire(state + 8 * S_TABLE, 2)
                for _ in range(30):
                    # fetch_add reads the newest value, which a read of freed memory would show.
                    if fetch_add(value, 0, 2) >= held:
                        wrong.append(held)
                leave(state, stripe, epoch)

        def writer() -> None:
            # Twice, because the second release does not see a reader that entered an epoch that was over.
            for released in (1, 2):
                publish(state, S_TABLE, released + 1)
                old = next_epoch(state)
                while readers_in(state, old):
                    backoff(1)
                store_relaxed(value, released, 2)

        interpreter = Interpreter(seed)
        interpreter.spawn(writer, name="writer")
        for stripe in range(2):
            interpreter.spawn(lambda stripe=stripe: reader(stripe), name=f"reader{stripe}")
        interpreter.run()
        assert not wrong, seed


# -- reader -------------------------------------------------------------------------------------------------


class ValueFile:
    """One segment file with some values, and an index over them."""

    def __init__(self, folder: Path, values: dict[bytes, bytes], mapped: bool) -> None:
        self.path = folder / "1.val"
        self.state = StoreState()
        self.index = Index(self.state)
        self.reader = Reader(self.state, str(folder), mapped=mapped)
        blob, rows = bytearray(4096), []
        for key, value in values.items():
            blob += bytes(-len(blob) % 64)
            rows.append((1 << 40 | len(blob) // 64, crc32c(value) << 32 | len(key) << KEY_LEN_SHIFT | len(value)))
            blob += value
        self.path.write_bytes(bytes(blob))
        locations = np.array([[a, b - (b >> 63 << 64)] for a, b in rows], np.int64)
        self.index.put(slots_at(as_keys(list(values)), locations))
        self.locations = dict(zip(values, locations, strict=True))
        self.fd = os.open(self.path, os.O_RDWR)
        self.reader.on_segment(1, self.fd)

    def close(self) -> None:
        self.reader.close()
        os.close(self.fd)

    def offset(self, key: bytes) -> int:
        return int(offset_of(self.locations[key][0]))


@pytest.fixture(params=[True, False], ids=["mapped", "pread"])
def value_file(tmp_path: Path, request: pytest.FixtureRequest):
    random = np.random.default_rng(0)
    sizes = (0, 1, 7, 64, 1000, 20_000, 65536, 65537, 1 << 20)
    made = ValueFile(tmp_path, {b"k%d" % n: random.bytes(n) for n in sizes}, request.param)
    assert (1 in made.reader._mappings) == request.param
    yield made
    made.close()


def test_values_of_any_size(value_file: ValueFile) -> None:
    data = value_file.path.read_bytes()
    for key in value_file.locations:
        size = int(key[1:])
        assert value_file.reader.get(key) == data[value_file.offset(key) : value_file.offset(key) + size]
    assert value_file.reader.get(b"absent") is None
    keys = as_keys([b"k7", b"absent", b"k1000", b"k0", b"k1048576"])
    values, found = value_file.reader.values(keys)
    assert found.tolist() == [True, False, True, True, True]
    assert [None if v is None else len(v) for v in values] == [7, None, 1000, 0, 1 << 20]
    assert values[2] == value_file.reader.get(b"k1000")
    rows, found = value_file.reader.rows(as_keys([b"k64", b"absent"]), 64)
    assert found.tolist() == [True, False]
    assert rows[0].tobytes() == value_file.reader.get(b"k64") and not rows[1].any()
    with pytest.raises(errors.ValueSizeError, match="1000 bytes"):
        value_file.reader.rows(as_keys([b"k64", b"k1000"]), 64)


def test_keys_of_all_lengths_by_both_ways_to_get(tmp_path: Path) -> None:
    numbers = {n.to_bytes(8, "little", signed=True): n for n in (-1, 0, 1, -(1 << 63), (1 << 63) - 1)}
    values = {b"0123456789abcdef"[:n]: b"%d" % n * n for n in range(1, 17)} | {key: key for key in numbers}
    made = ValueFile(tmp_path, values, True)
    get = made.reader.getter(made.reader.get)
    assert isinstance(get, types.BuiltinFunctionType)
    assert {key: get(key) for key in values} == values
    assert {key: get(n) for key, n in numbers.items()} == {key: key for key in numbers}
    assert get(2) is None and get(b"0") == b"1" and get(b"1") is None
    changes = []
    for _ in range(3):
        references = sys.getrefcount(None), sys.getrefcount(get(b"01"))
        for _ in range(1000):
            get(2), get(b"01")
        after = sys.getrefcount(None), sys.getrefcount(get(b"01"))
        changes.append(abs(after[0] - references[0]))
        assert after[1] == references[1]
    # Threads and finalizers of other tests may add or drop references to None once, `get` would in each round.
    assert min(changes) < 100, changes
    for key in (1 << 63, -(1 << 63) - 1):
        with pytest.raises(errors.ArgumentError, match="signed 64-bit"):
            get(key)
    for wrong in (bytes(512), b"", 1.5):
        with pytest.raises((errors.ArgumentError, TypeError)):
            get(wrong)
    counters = made.state.counters()
    assert counters["errors"] == 0 and counters["gets"] - counters["hits"] == 3002
    assert {key: made.reader.get(key) for key in values} == values
    assert {key: made.reader.get(n) for key, n in numbers.items()} == {key: key for key in numbers}
    made.close()


@pytest.mark.parametrize("key", [b"k1", b"k64", b"k65537"])
def test_a_changed_byte_is_never_served(value_file: ValueFile, key: bytes) -> None:
    before = value_file.reader.get(key)
    assert before is not None
    os.pwrite(value_file.fd, bytes([before[-1] ^ 4]), value_file.offset(key) + len(before) - 1)
    for read in (value_file.reader.get, lambda k: value_file.reader.rows(as_keys([b"none", k]), len(before))):
        with pytest.raises(errors.CorruptionError, match="CRC-32C") as raised:
            read(key)
        assert repr(key) in str(raised.value)
    os.pwrite(value_file.fd, before[-1:], value_file.offset(key) + len(before) - 1)
    assert value_file.reader.get(key) == before


def test_a_file_that_was_cut(value_file: ValueFile) -> None:
    expected = value_file.reader.get(b"k64")
    os.ftruncate(value_file.fd, value_file.offset(b"k1000") + 10)
    assert value_file.reader.get(b"k64") == expected
    for key in (b"k1000", b"k20000", b"k65536", b"k1048576"):
        with pytest.raises(errors.CorruptionError, match="cut"):
            value_file.reader.get(key)
    with pytest.raises(errors.CorruptionError, match="cut"):
        value_file.reader.rows(as_keys([b"k1000"]), 1000)


def test_a_file_that_grows_and_one_that_comes_into_memory(
    value_file: ValueFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    more, at = b"more" * 1000, os.fstat(value_file.fd).st_size + 4096 - os.fstat(value_file.fd).st_size % 4096
    os.pwrite(value_file.fd, more, at)
    crc = crc32c(more)
    loc1 = (crc - (crc >> 31 << 32)) << 32 | 4 << KEY_LEN_SHIFT | 4000
    value_file.index.put(slots_at(as_keys([b"more"]), np.array([[1 << 40 | at // 64, loc1]])))
    assert value_file.reader.get(b"more") == more
    if value_file.reader._mapped:
        # Open the segment as if it were not in the page cache.
        monkeypatch.setattr("warpwell.kv.index.reader._MIN_RESIDENT", 2.0)
        value_file.reader.on_segment(1, -1)
        value_file.reader.on_segment(1, value_file.fd)
        assert not value_file.reader._mappings and value_file.reader.get(b"more") == more
        monkeypatch.undo()
        for _ in range(256):
            value_file.reader.rows(as_keys([b"more"]), 4000)
        assert 1 in value_file.reader._mappings and value_file.reader.get(b"more") == more


def test_a_drive_that_fails(value_file: ValueFile) -> None:
    # a descriptor that cannot be read stands for a failing drive: EISDIR
    folder = os.open(value_file.path.parent, os.O_RDONLY)
    value_file.reader.on_segment(1, -1)
    value_file.reader.on_segment(1, folder)
    with pytest.raises(errors.MediumError, match="directory") as raised:
        value_file.reader.get(b"k64")
    os.close(folder)
    assert isinstance(raised.value, OSError)
    value_file.reader.on_segment(1, -1)
    with pytest.raises(errors.CorruptionError, match="not open"):
        value_file.reader.get(b"k64")


def test_batches_are_read_ahead_from_files_that_are_not_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {b"a": 64, b"b": 200 << 10, b"gap": 20 << 10, b"c": 100, b"d": 1000}
    made = ValueFile(tmp_path, {key: bytes(nbytes) for key, nbytes in sizes.items()}, False)
    requests: list[tuple[int, ...]] = []
    record = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)(lambda *request: requests.append(request) or 0)
    monkeypatch.setattr("warpwell.kv.index.reader._FADVISE", ctypes.cast(record, ctypes.c_void_p).value)
    keys = as_keys([b"d", b"absent", b"b", b"a", b"c"])
    for read in (
        lambda: made.reader.values(keys),
        lambda: made.reader.rows(as_keys([b"a", b"a"]), 64),
    ):
        read()
    first, last, end = made.offset(b"a"), made.offset(b"c"), made.offset(b"d") + 1000
    advice = os.POSIX_FADV_WILLNEED
    assert requests == [
        (made.fd, first, 128 << 10, advice),
        (made.fd, first + (128 << 10), made.offset(b"b") + (200 << 10) - first - (128 << 10), advice),
        (made.fd, last, end - last, advice),
        (made.fd, first, 64, advice),
    ]
    counters = made.state.counters()
    assert (counters["gets"], counters["hits"]) == (7, 6)
    made.reader.on_segment(1, -1)
    requests.clear()
    with pytest.raises(errors.CorruptionError, match="not open"):
        made.reader.values(keys)
    assert not requests
    made.close()


# -- which files are mapped ---------------------------------------------------------------------------------


@pytest.fixture
def cold(tmp_path: Path) -> Iterator[int]:
    """A file of 8 MiB that is not in the page cache."""
    path = tmp_path / "file"
    path.write_bytes(bytes(8 << 20))
    path.chmod(0o644)
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if resident(fd) > 0.1:
        pytest.skip("this file system keeps all files in memory")
    yield fd
    os.close(fd)


def resident(fd: int) -> float:
    """Return what mincore() says to a file's owner."""
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped:
        address = int(np.frombuffer(mapped, np.uint8).ctypes.data)
        flags = np.zeros(len(mapped) // mmap.PAGESIZE, np.uint8)
        assert reader._libc.mincore(address, len(mapped), flags.ctypes.data) == 0
        return float((flags & 1).mean())


@pytest.mark.parametrize("owner", [True, False])
def test_files_outside_of_the_page_cache_are_not_mapped(
    cold: int, owner: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_may_ask", lambda fd: owner)
    assert reader.map_file(cold) is None
    assert resident(cold) < 0.02  # the check has not loaded pages
    while os.read(cold, 1 << 20):
        pass
    made = reader.map_file(cold)
    assert made is not None
    reader.unmap(*made)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_mincore_is_asked_only_where_it_tells(cold: int) -> None:
    assert reader._may_ask(cold)
    if os.geteuid() != 0:
        pytest.skip("needs root, to act as another user")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setuid(65534)
            if resident(cold) == 1.0:  # what this test claims: all pages are in the page cache
                code = 0 if not reader._may_ask(cold) and reader.map_file(cold) is None else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("is_mapped", [True, False])
def test_a_segment_stays_open_while_a_reader_that_may_have_seen_it_is_inside(tmp_path, monkeypatch, is_mapped):
    if not is_mapped:
        monkeypatch.setattr(reader, "map_file", lambda fd: None)
    with kv.create(tmp_path / "store") as store:
        store[1] = b"value"
        records = store._records
        if not records.reader._mappings:
            records.reader.map_one_more()
        mappings, unmapped = list(records.reader._mappings.values()), []
        assert len(mappings) == is_mapped
        monkeypatch.setattr(reader, "unmap", lambda *mapping: unmapped.append(mapping))
        epoch = compiled(enter)(records.state.address, 0)
        closing = threading.Thread(target=records.reader.on_segment, args=(1, -1))
        closing.start()
        closing.join(0.05)
        assert closing.is_alive() and not unmapped
        compiled(leave)(records.state.address, 0, epoch)
        closing.join()
        assert unmapped == mappings
        monkeypatch.undo()
        for mapping in mappings:
            reader.unmap(*mapping)
