"""Key-value commands as a controller gives them to a store, those that the interpreter serves included."""

import struct
import threading
import time

import numpy as np
import pytest
from tests.harness.native_calls import NativeCalls

import warpwell as ww
from warpwell.kv.index.layout import VERSION_BYTES, WITH_VERSION, version_at
from warpwell.kv.index.serve import PENDING, kv_complete, kv_start
from warpwell.kv.keys import as_key
from warpwell.nvme import FLUSH, KV_DELETE, KV_EXIST, KV_LIST, KV_RETRIEVE, KV_STORE, READ, key_value_word5, key_words

ABSENT, BAD_KEY, BAD_SIZE, UNRECOVERED, EXISTS, FULL = 0x87, 0x86, 0x85, 0x88, 0x89, 0x81


class Device:
    """What a controller does, from Python."""

    def __init__(self, store: ww.kv.Store) -> None:
        (self.native,) = store.native()
        assert (self.native.start, self.native.complete) == (kv_start.address, kv_complete.address)
        self.buffer = np.zeros(1 << 20, np.uint8)
        self.calls = NativeCalls(self.native)

    def begin(self, opcode: int, key: object, nbytes: int = 0, **options: int) -> int:
        raw = key if isinstance(key, bytes) else as_key(key)
        low, high = key_words(raw[:16])
        return self.start(opcode, low, high, len(raw), nbytes, **options)

    def start(
        self,
        opcode: int,
        low: int,
        high: int,
        length: int,
        nbytes: int,
        *,
        options: int = 0,
        tag: int = 1,
        at: int = 0,
        first: int = 0,
    ) -> int:
        sizes = key_value_word5(nbytes, length, options) | first << 48
        return self.calls.start([opcode, low, 0, self.buffer.ctypes.data + at, 0, sizes, 0, high], tag)

    def end(self) -> tuple[int, int]:
        limit = time.monotonic() + 30
        while time.monotonic() < limit:
            if (answer := self.calls.complete()) is not None:
                tag, status, result = answer
                assert result == 0
                return tag, status
        raise AssertionError("no answer")

    def version(self, nbytes: int) -> tuple[int, ...]:
        """Return the location behind a buffer of `nbytes` bytes."""
        at = version_at(self.buffer.ctypes.data, nbytes) - self.buffer.ctypes.data
        return tuple(self.buffer[at : at + VERSION_BYTES].view(np.int64).tolist())

    def __call__(self, opcode: int, key: object, nbytes: int = 0, *, options: int = 0) -> tuple[int, int]:
        """Return status and dw0."""
        answer = self.begin(opcode, key, nbytes, options=options, tag=0x12345678)
        if answer == PENDING:
            tag, status = self.end()
            assert tag == 0x12345678
            return status, 0
        return answer & 0xFFFF, (answer >> 16) & 0xFFFFFFFF

    def store(self, key: object, value: bytes, options: int = 0) -> int:
        self.buffer[: len(value)] = np.frombuffer(value, np.uint8)
        return self(KV_STORE, key, len(value), options=options)[0]

    def text(self, nbytes: int) -> bytes:
        return self.buffer[:nbytes].tobytes()


@pytest.fixture
def store(tmp_path):
    with ww.kv.create(tmp_path / "s.kv") as made:
        made.put_many([b"one", 5, b"k" * 16, b"large"], [b"first", b"fifth", b"", b"x" * 200_000])
        made.commit()
        yield made


def test_retrieve_and_exist(store: ww.kv.Store) -> None:
    device = Device(store)
    assert device(KV_RETRIEVE, b"one", 100) == (0, 5) and device.text(6) == b"first\0"
    assert device(KV_RETRIEVE, 5, 5) == (0, 5) and device.text(5) == b"fifth"
    assert device(KV_RETRIEVE, b"k" * 16, 10) == (0, 0)
    assert device(KV_RETRIEVE, b"none", 10) == (ABSENT, 0)
    assert device(KV_RETRIEVE, b"one\0", 10) == (ABSENT, 0)
    assert device(KV_EXIST, b"one") == (0, 0) and device(KV_EXIST, b"none") == (ABSENT, 0)
    assert device(KV_RETRIEVE, b"") == (BAD_KEY, 0) and device(KV_EXIST, b"x" * 17) == (BAD_KEY, 0)
    assert device(0x7F, b"one")[0] == 0x001 and READ == KV_RETRIEVE
    counters = store.stats
    assert counters.gets == 5 and counters.hits == 3


def test_a_short_buffer_gets_a_part_and_the_whole_size(store: ww.kv.Store) -> None:
    device = Device(store)
    assert device(KV_RETRIEVE, b"one", 2) == (0, 5) and device.text(3) == b"fi\0"
    assert device(KV_RETRIEVE, b"large", 70_000) == (0, 200_000) and device.text(70_001) == b"x" * 70_000 + b"\0"
    assert device(KV_RETRIEVE, b"large", 0) == (0, 200_000)
    assert device(KV_RETRIEVE, b"large", 200_000) == (0, 200_000)


def test_bytes_behind_a_short_key_do_not_matter(store: ww.kv.Store) -> None:
    device = Device(store)
    low = int.from_bytes(b"oneJUNK!", "little")
    answer = device.start(KV_RETRIEVE, low, -1, 3, 100)
    assert answer & (1 << 48) - 1 == 5 << 16


@pytest.mark.parametrize("nbytes", [3, 1000])
def test_a_damaged_value_is_an_error(store: ww.kv.Store, nbytes: int) -> None:
    import os

    part = store._shards
    locations = part.index.lookup(ww.kv.keys.as_keys([b"one"]))
    offset = (int(locations[0, 0]) & (1 << 40) - 1) * 64
    path = os.path.join(store.path, next(n for n in os.listdir(store.path) if n.endswith(".val")))
    with open(path, "r+b") as file:
        file.seek(offset + 4)
        file.write(b"?")
    assert Device(store)(KV_RETRIEVE, b"one", nbytes)[0] == UNRECOVERED
    assert store.stats.read_errors == 1


def test_changes_are_served_by_the_interpreter(store: ww.kv.Store, tmp_path) -> None:
    device = Device(store)
    assert device.store(b"new", b"value") == 0 and store["new"] == b"value"
    assert device.store(b"new", b"again", options=2) == EXISTS and store["new"] == b"value"
    assert device.store(b"absent", b"", options=1) == ABSENT and b"absent" not in store
    assert device.store(b"new", b"changed", options=1) == 0 and store["new"] == b"changed"
    assert device(KV_STORE, b"new", (1 << 24) + 1) == (BAD_SIZE, 0)
    assert device(KV_DELETE, b"one") == (0, 0) and b"one" not in store
    assert device(KV_DELETE, b"one") == (ABSENT, 0)
    with ww.kv.open(store.path) as reader:
        assert b"one" in reader and b"new" not in reader
        assert device(FLUSH, b"") == (0, 0)
        reader.refresh()
        assert b"one" not in reader and reader["new"] == b"changed"
    assert store.stats.python_served == ["delete", "flush", "store"]


def test_a_value_that_is_replaced_has_another_version(store: ww.kv.Store) -> None:
    """Versions of 15 bits repeat within 60 changes for several of 200 keys."""
    device = Device(store)
    keys = np.arange(200)
    seen: set[tuple[int, ...]] = set()
    for number in range(60):
        store.put_many(keys, np.full((200, 20), number, np.uint8))
        for key in range(200):
            assert device(KV_RETRIEVE, key, 11, options=WITH_VERSION) == (0, 20)
            seen.add((key, *device.version(11)))
    assert len(seen) == 12_000


def test_the_pieces_of_a_value_have_one_version(store: ww.kv.Store) -> None:
    device = Device(store)
    pieces = set()
    for first in (0, 1, 390, 391, 1000):  # the last one begins behind the value
        device.buffer[512:] = 0
        answer = device.begin(KV_RETRIEVE, b"large", 512, options=WITH_VERSION, first=first)
        assert (answer & 0xFFFF, answer >> 16) == (0, 200_000)
        pieces.add(device.version(512))
    assert len(pieces) == 1 and pieces != {(0, 0)}
    # without the option, or with the whole value in the buffer, no location is written
    for options, nbytes in ((0, 512), (WITH_VERSION, 200_000)):
        device.buffer[nbytes:] = 0
        assert device(KV_RETRIEVE, b"large", nbytes, options=options) == (0, 200_000)
        assert device.version(nbytes) == (0, 0)


def test_list(store: ww.kv.Store) -> None:
    device = Device(store)
    keys = sorted(as_key(key) for key in store)  # the command knows bytes only

    def listed(start: bytes, nbytes: int) -> list[bytes]:
        assert device(KV_LIST, start, nbytes) == (0, 0)
        (count,), at, out = struct.unpack("<I", device.text(4)), 4, []
        for _ in range(count):
            (size,) = struct.unpack("<H", device.buffer[at : at + 2].tobytes())
            out.append(device.buffer[at + 2 : at + 2 + size].tobytes())
            at += -(-(2 + size) // 4) * 4
        assert at <= nbytes
        return out

    assert listed(b"", 1000) == keys
    assert listed(keys[2], 1000) == keys[2:]
    assert listed(b"", 4 + 12 + 20) == keys[:2]
    assert device(KV_LIST, b"", 3)[0] == BAD_SIZE


def test_a_schema_fixes_the_size(tmp_path) -> None:
    with ww.kv.create(tmp_path / "d.kv", schema={"y": ("int64", (2,))}) as store:
        device = Device(store)
        assert device.store(1, b"short") == BAD_SIZE
        assert device.store(1, np.array([7, 8]).tobytes()) == 0
        assert store[1]["y"].tolist() == [7, 8]


def test_a_reader_takes_no_changes_and_a_closed_store_nothing(store: ww.kv.Store) -> None:
    with ww.kv.open(store.path) as reader:
        device = Device(reader)
        assert device.store(b"new", b"") == 0x020 and device(KV_DELETE, b"one")[0] == 0x020
        assert device(FLUSH, b"") == (0, 0)
        assert device(KV_RETRIEVE, b"one", 10) == (0, 5)
        assert device(KV_LIST, b"", 100) == (0, 0)
    assert device(KV_LIST, b"", 100)[0] == 0x082
    assert device(KV_RETRIEVE, b"one", 10)[0] == UNRECOVERED


def test_many_threads_at_once(store: ww.kv.Store) -> None:
    """Every request is answered once, by its own tag, whatever its neighbours do."""
    device = Device(store)
    per_thread, threads = 600, 4
    answers: list[int] = []

    def put(thread: int) -> None:
        for k in range(per_thread):
            n = thread * per_thread + k
            device.buffer[8 * n : 8 * n + 8] = np.frombuffer(n.to_bytes(8, "little"), np.uint8)
            assert device.begin(KV_STORE, 1000 + n, 8, tag=n, at=8 * n) == PENDING
            if k % 3 == 0:
                answers.append(device.end()[0])

    running = [threading.Thread(target=put, args=(t,)) for t in range(threads)]
    for t in running:
        t.start()
    for t in running:
        t.join()
    while len(answers) < per_thread * threads:
        tag, status = device.end()
        assert status == 0
        answers.append(tag)
    assert sorted(answers) == list(range(per_thread * threads))
    rows, found = store.get_many(np.arange(2400) + 1000, out=np.empty((2400, 8), np.uint8))
    assert found.all() and (rows.view(np.int64)[:, 0] == np.arange(2400)).all()


def test_requests_in_flight_are_finished_by_close(tmp_path) -> None:
    store = ww.kv.create(tmp_path / "s.kv")
    device = Device(store)
    for n in range(2000):
        assert device.begin(KV_STORE, n, 8, tag=n) == PENDING
    store.close()
    assert sorted(device.end()[0] for _ in range(2000)) == list(range(2000))
    with ww.kv.open(tmp_path / "s.kv") as after:
        assert len(after) == 2000
