"""Key-value commands as a controller gives them to a store."""

import numpy as np
import pytest
from tests.harness.native_calls import NativeCalls

import warpwell as ww
from warpwell.kv.index.serve import VERSION_BYTES, WITH_VERSION, kv_start, version_at
from warpwell.kv.keys import as_key
from warpwell.kv.log.format import offset_of
from warpwell.nvme import FLUSH, KV_DELETE, KV_EXIST, KV_LIST, KV_RETRIEVE, KV_STORE, READ, key_value_word5, key_words

ABSENT, BAD_KEY, BAD_OPCODE, UNRECOVERED = 0x87, 0x86, 0x001, 0x88


class Device:
    """A Python model of a controller."""

    def __init__(self, store: ww.kv.Store) -> None:
        (self.native,) = store.native()
        assert (self.native.start, self.native.complete) == (kv_start.address, 0)
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
        first: int = 0,
    ) -> int:
        sizes = key_value_word5(nbytes, length, options)
        return self.calls.start([opcode, low, 0, self.buffer.ctypes.data, 0, sizes, first, high], 0x12345678)

    def version(self, nbytes: int) -> tuple[int, ...]:
        """Return the location behind a buffer of `nbytes` bytes."""
        at = version_at(self.buffer.ctypes.data, nbytes) - self.buffer.ctypes.data
        return tuple(self.buffer[at : at + VERSION_BYTES].view(np.int64).tolist())

    def __call__(self, opcode: int, key: object, nbytes: int = 0, *, options: int = 0) -> tuple[int, int]:
        """Return status and dw0."""
        answer = self.begin(opcode, key, nbytes, options=options)
        return answer & 0xFFFF, (answer >> 16) & 0xFFFFFFFF

    def text(self, nbytes: int) -> bytes:
        return self.buffer[:nbytes].tobytes()


@pytest.fixture
def store(tmp_path):
    with ww.kv.create(tmp_path / "s.kv") as made:
        made.put_many([b"one", 5, b"k" * 16, b"large"], [b"first", b"fifth", b"", b"x" * 200_000])
        made.commit()
        yield made


def test_retrieve(store: ww.kv.Store) -> None:
    device = Device(store)
    assert device(KV_RETRIEVE, b"one", 100) == (0, 5) and device.text(6) == b"first\0"
    assert device(KV_RETRIEVE, 5, 5) == (0, 5) and device.text(5) == b"fifth"
    assert device(KV_RETRIEVE, b"k" * 16, 10) == (0, 0)
    assert device(KV_RETRIEVE, b"none", 10) == (ABSENT, 0)
    assert device(KV_RETRIEVE, b"one\0", 10) == (ABSENT, 0)
    assert device(KV_RETRIEVE, b"") == (BAD_KEY, 0) and device(KV_RETRIEVE, b"x" * 17) == (BAD_KEY, 0)
    assert device(0x7F, b"one")[0] == BAD_OPCODE and READ == KV_RETRIEVE
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

    part = store._records
    locations = part.index.lookup(ww.kv.keys.as_keys([b"one"]))
    offset = int(offset_of(locations[0, 0]))
    path = os.path.join(store.path, next(n for n in os.listdir(store.path) if n.endswith(".val")))
    with open(path, "r+b") as file:
        file.seek(offset + 4)
        file.write(b"?")
    assert Device(store)(KV_RETRIEVE, b"one", nbytes)[0] == UNRECOVERED
    assert store.stats.read_errors == 1


def test_a_value_that_is_replaced_has_another_version(store: ww.kv.Store) -> None:
    """Versions of 15 bits repeat within 60 changes for several of 200 keys."""
    device = Device(store)
    keys = np.arange(200)
    versions: set[tuple[int, ...]] = set()
    for number in range(60):
        store.put_many(keys, np.full((200, 20), number, np.uint8))
        for key in range(200):
            assert device(KV_RETRIEVE, key, 11, options=WITH_VERSION) == (0, 20)
            versions.add((key, *device.version(11)))
    assert len(versions) == 12_000


def test_the_pieces_of_a_value_have_one_version(store: ww.kv.Store) -> None:
    device = Device(store)
    pieces = set()
    for first in (0, 512, 199_680, 200_192, 512_000):  # the last two offsets are beyond the end of the value
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


def test_pieces_of_a_value_of_more_than_32_mib(store: ww.kv.Store) -> None:
    device = Device(store)
    contents = np.random.default_rng(0).bytes(40 << 20)
    store["huge"] = contents
    for first in (0, (32 << 20) - 512, 32 << 20, len(contents) - 512):
        answer = device.begin(KV_RETRIEVE, b"huge", 512, first=first)
        assert (answer & 0xFFFF, answer >> 16) == (0, len(contents))
        assert device.text(512) == contents[first : first + 512]


@pytest.mark.parametrize("opcode", [FLUSH, KV_STORE, KV_LIST, KV_DELETE, KV_EXIST])
def test_no_command_but_a_retrieve_is_served(store: ww.kv.Store, opcode: int) -> None:
    device = Device(store)
    device.buffer[:] = 7
    assert device(opcode, b"one", 8) == (BAD_OPCODE, 0)
    assert (device.buffer == 7).all() and store["one"] == b"first" and len(store) == 4


def test_a_closed_store_serves_no_values(store: ww.kv.Store) -> None:
    with ww.kv.open(store.path) as reader:
        device = Device(reader)
        assert device(KV_RETRIEVE, b"one", 10) == (0, 5)
    assert device(KV_RETRIEVE, b"one", 10)[0] == UNRECOVERED
