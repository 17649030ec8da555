"""Clients that write what they like into the ring: errors for them alone; nothing of another's is read or written."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import struct
import threading
from collections.abc import Callable, Iterator

import pytest
from tests.harness.driver import natives
from tests.harness.driver.calls import IMAGE
from tests.harness.driver.raw import ENTRY, MAGIC, NO_SLOT, OPEN, OPS, RING, STAGING_BYTES, Lost, Raw

from lab.driver import build
from lab.driver.serve import Servers, serve

SECRET = bytes(range(256)) * 16
INVALID_VALUE, OUT_OF_MEMORY, INVALID_HANDLE, NOT_FOUND = 1, 2, 400, 500
MAX_WORD = (1 << 64) - 1


@pytest.fixture(scope="module")
def server() -> Iterator[Servers]:
    """A server of one fake device."""
    with serve(1, driver=build.build().fake) as server:
        yield server


@pytest.fixture
def witness(server: Servers) -> Iterator[Raw]:
    """Another client; its memory must stay unchanged, and its worker must keep running."""
    with Raw(server.folder) as bystander:
        address = bystander.alloc(len(SECRET))
        bystander.put(address, SECRET)
        yield bystander
        assert bystander.get(address, len(SECRET)) == SECRET
        assert not bystander.hung_up()
        assert bystander.deferred == (0, 0)


def entry(size: int, op: int = OPS["CTX_SYNC"], slot: int = NO_SLOT, staging_index: int = 0, nbytes: int = 0) -> bytes:
    """Return an entry that says of itself what it likes."""
    return ENTRY.pack(size, op, 0, slot, 1, 1, staging_index, nbytes, 1)


def head_moves(delta: int) -> Callable[[Raw], None]:
    """Return an act that stores a head where no entries are."""
    return lambda raw: raw.publish(raw.head + delta)


MALFORMED: dict[str, Callable[[Raw], None]] = {
    "no size": lambda raw: raw.write(entry(0)),
    "less than a header": lambda raw: raw.write(entry(16)),
    "a size that is not aligned": lambda raw: raw.write(entry(40) + bytes(32)),
    "more than was published": lambda raw: raw.write(entry(96)),
    "more than an entry may have": lambda raw: raw.write(entry(70_000) + bytes(70_016)),
    "the greatest size": lambda raw: raw.write(entry(0xFFFFFFE0)),
    "a slot that there is not": lambda raw: raw.write(entry(32, slot=256)),
    "a place that there is not": lambda raw: raw.write(entry(32, staging_index=65)),
    "more than a place holds": lambda raw: raw.write(entry(32, staging_index=1, nbytes=STAGING_BYTES + 1)),
    "padding beyond the end": lambda raw: raw.write(entry(RING + 32, op=OPS["PAD"])),
    "a head between entries": head_moves(8),
    "a head behind the tail": head_moves(-64),
    "a head far ahead": head_moves(RING + 32),
    "the greatest head": lambda raw: raw.publish(MAX_WORD - 31),
}


@pytest.mark.parametrize("act", MALFORMED)
def test_a_malformed_ring_ends_the_client_alone(server: Servers, witness: Raw, act: str) -> None:
    with Raw(server.folder) as raw:
        address = raw.alloc(64)
        MALFORMED[act](raw)
        raw.until(raw.hung_up, "the worker keeps running")
        assert raw.sticky == 999
    with Raw(server.folder) as raw:  # the server serves the next client
        raw.put(raw.alloc(64), bytes(64))
        assert address


def call(name: str, layout: str, *values: int, **more: int) -> tuple[str, bytes, dict[str, int]]:
    """Return a call: its operation, arguments and header fields."""
    return name, struct.pack(layout, *values), more


def wrong_calls(raw: Raw) -> list[tuple[str, bytes, dict[str, int]]]:
    """Return calls that must be refused; memory of another is not even an address here."""
    arena, end, pin = raw.arena, raw.arena + raw.arena_bytes, 0x200000000000
    own = raw.alloc(4096)
    bad = (own - 512, own + 4096 - 8, end, end - 8, 0, 1, MAX_WORD - 7, pin, 0x7F0000000000, arena + (1 << 35))
    return [
        *(call("COPY", "=QQQ", own, address, 64, stream=1) for address in bad),
        *(call("COPY", "=QQQ", address, own, 64, stream=1) for address in bad),
        *(call("COPY", "=QQQ", own, own, nbytes, stream=1) for nbytes in (4097, MAX_WORD, 1 << 63, MAX_WORD - own + 1)),
        *(call("IN", "=QQ", address, 64, stream=1, staging_index=3, nbytes=64) for address in bad),
        *(call("OUT", "=QQ", address, 64, stream=1, staging_index=3, nbytes=64) for address in bad),
        call("IN", "=QQ", own, 128, stream=1, staging_index=3, nbytes=64),
        call("IN", "=QQ", own, 4000, stream=1),
        call("IN", "=QQ", own, MAX_WORD, stream=1),
        call("OUT", "=QQ", own, 64, stream=1),
        *(call("MEMSET", "=QQII", address, 16, 1, 4, stream=1) for address in bad),
        *(call("MEMSET", "=QQII", own, count, 1, 4, stream=1) for count in (1025, 1 << 62, (1 << 62) + 1, MAX_WORD)),
        *(call("MEMSET", "=QQII", own, 1, 1, width, stream=1) for width in (0, 3, 8, 1 << 31)),
        call("MEMSET", "=QQII", own + 1, 1, 1, 4, stream=1),
        *(call("MEMSET", "=QQII", own, 1, 1, 4, stream=stream) for stream in (0, 2, 15, 99, 65_535, 65_536, 1 << 31)),
        *(call("LAUNCH", "=8I4I", number, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, stream=1) for number in (0, 99, 1 << 31)),
        *(call("LAUNCH", "=8I4I", 1, 1, 1, 1, 1, 1, 1, 0, *pair, 0, 0, stream=1) for pair in ((9, 0), (1 << 31, 0))),
        *(call("LAUNCH", "=8I4I", 1, 1, 1, 1, 1, 1, 1, 0, 0, n, 0, 0, stream=1) for n in (17, 4096, 1 << 31)),
        *(call("STREAM_CREATE", "=IIiI", number, 0, 0, 0) for number in (0, 1, 15, 65_536, 1 << 31)),
        *(call("STREAM_DESTROY", "=II", number, 0) for number in (0, 1, 99, 65_536, 1 << 31)),
        *(call("EVENT_CREATE", "=II", number, 0) for number in (0, 65_536, 1 << 31)),
        call("EVENT_CREATE", "=II", 7, 0xFFFFFFFF),
        *(call("EVENT_DESTROY", "=II", number, 0) for number in (0, 99, 65_536, 1 << 31)),
        *(call("EVENT_RECORD", "=II", number, 0, stream=1) for number in (0, 99, 65_536, 1 << 31)),
        *(call("STREAM_WAIT", "=II", number, 0, stream=1) for number in (0, 99, 65_536, 1 << 31)),
        *(call("FREE", "=Q", address) for address in (0, own + 512, end, MAX_WORD)),
        *(call("FREE_ASYNC", "=Q", address, stream=1) for address in (0, own + 512, end, MAX_WORD)),
        *(call("IMAGE", "=QQ", *pair, staging_index=3, nbytes=64) for pair in ((0, 32), (0, MAX_WORD), (64, 128))),
    ]


def answered_calls(raw: Raw) -> list[tuple[str, bytes, dict[str, int]]]:
    """Return calls with an answer that must be refused."""
    pin, highest = 0x200000000000, 0x2F0000000000
    return [
        *(call("ALLOC", "=Q", nbytes) for nbytes in (0, MAX_WORD, 1 << 40, 1 << 63)),
        *(call("ALLOC_ASYNC", "=Q", nbytes, stream=stream) for nbytes, stream in ((MAX_WORD, 1), (64, 99))),
        *(call("PIN", "=QQII", address, 4096, 0, 0) for address in (0, 4096, pin - 4096, pin + 1, highest, MAX_WORD)),
        *(call("PIN", "=QQII", pin, nbytes, 0, 0) for nbytes in (0, 1, MAX_WORD - 4095, highest - pin + 4096, 1 << 46)),
        *(call("UNPIN", "=Q", address) for address in (0, pin, MAX_WORD)),
        *(call("LOAD", "=4I", module, 0, 0, 0) for module in (0, 5, 65_536, 1 << 31)),  # no image was sent before
        *(call("LOAD", "=4I", 5, *more) for more in ((33, 0, 0), (0, 1 << 20, 0), (0, 0, 1 << 20))),
        *(call("UNLOAD", "=II", module, 0) for module in (0, 5, 65_536, 1 << 31)),
        *(call("GLOBAL", "=II4s", module, size, b"abcd") for module, size in ((1, 4), (1, 1 << 31), (9, 4))),
        *(call("FUNCTION_SET", "=IIiI", number, 8, 1, 0) for number in (0, 99, 1 << 31)),
        *(call("EVENT_ELAPSED", "=II", a, b) for a, b in ((0, 0), (99, 99), (65_536, 1), (1 << 31, 1))),
        *(call(name, "=II", 99, 0) for name in ("EVENT_QUERY", "EVENT_SYNC")),
        *(call(name, "=", stream=99) for name in ("STREAM_QUERY", "STREAM_SYNC")),
    ]


def test_wrong_calls_are_refused_one_by_one(server: Servers, witness: Raw) -> None:
    with Raw(server.folder) as raw:
        assert raw.load(IMAGE + b"\0")[0] == 0
        for op, arguments, more in wrong_calls(raw):
            before = raw.deferred[1]
            raw.post(op, arguments, **more)
            assert raw.call("CTX_SYNC")[0] == 0
            code, count = raw.deferred
            assert count == before + 1 and code, (op, struct.unpack(f"={len(arguments) // 4}I", arguments), more)
        for op, arguments, more in answered_calls(raw):
            code, data = raw.call(op, arguments, **more)
            assert code, (op, struct.unpack(f"={len(arguments) // 4}I", arguments), more)
            assert not data or op in ("LOAD",), (op, data)
        assert [raw.call("MORE", struct.pack("=Q", offset))[0] for offset in (1 << 40, (1 << 64) - 1)] == [1, 1]
        for op in range(max(OPS.values()) + 1, 90):  # calls without their arguments, and unknown numbers
            raw.call(op)
        address = raw.alloc(64)
        raw.put(address, bytes(range(64)))
        assert raw.get(address, 64) == bytes(range(64))
        assert raw.sticky == 0


def prepared(raw: Raw) -> list[int]:
    """Load kernels, make two streams, and return addresses of own memory."""
    raw.load(IMAGE + b"\0")
    for number in (20, 21):
        raw.post("STREAM_CREATE", struct.pack("=IIiI", number, number - 20, 0, 0))
    return [raw.alloc(4096), raw.alloc(1 << 20), 0x200000000000]


def random_calls(raw: Raw, own: list[int], seed: int, entries: int) -> None:
    """Post entries of random operations, ids, addresses and sizes; some are right."""
    rng = random.Random(seed)
    names = [name for name in OPS if name != "PAD"] + ["LAUNCH", "COPY", "IN", "OUT", "EVENT_RECORD", "STREAM_WAIT"]
    for _ in range(entries):
        op: str | int = rng.choice(names) if rng.random() < 0.97 else rng.randrange(1 << 16)
        near = rng.choice(own) + rng.choice([0, 0, 8, 512, 4096, 1 << 20])
        operands = [
            near,
            rng.choice(own),
            rng.choice([0, 1, 64, 4096, 1 << 20, 1 << 32, MAX_WORD, rng.getrandbits(64)]),
        ]
        small = [rng.choice([0, 1, 2, 3, 5, 20, 21, 64, 255, 65_535, 65_536, 1 << 31]) for _ in range(12)]
        arguments = rng.choice(
            [
                struct.pack("=QQQ", *rng.sample(operands, 3)),
                struct.pack("=12I", *small),
                rng.randbytes(rng.randrange(200)),
                struct.pack("=QQ", near, 64) + bytes(64),
                struct.pack("=QQII", near, 4096, 1, 4),
                struct.pack("=Q", near),
            ]
        )
        raw.post(
            op,
            arguments,
            slot=rng.choice([None, None, 0, 7, 255]),
            flags=rng.choice([0, 1, 0xFFFF]),
            stream=rng.choice([0, 1, 1, 20, 21, 99, 1 << 31]),
            staging_index=rng.choice([0, 0, 1, 2, 64]),
            nbytes=rng.choice([0, 64, 4096, STAGING_BYTES]),
        )
    raw.until(lambda: struct.unpack_from("=Q", raw.status)[0] == raw.head, "the worker stopped reading")


def test_random_calls_do_not_harm_a_worker(server: Servers, witness: Raw) -> None:
    for seed in range(20):
        with Raw(server.folder) as raw:
            random_calls(raw, prepared(raw), seed, 400)
            assert raw.sticky == 0


def flip(raw: Raw, end: threading.Event, seed: int) -> None:
    """Change words of the ring, and of staging, while the worker reads them."""
    rng = random.Random(seed)
    while not end.is_set():
        at = 4096 + (raw.head + rng.randrange(-4096, 4096)) % RING // 4 * 4
        raw.ring[at : at + 4] = struct.pack("=I", rng.choice([0, 31, 32, 64, 1 << 16, 1 << 31, rng.getrandbits(32)]))
        raw.staging[rng.randrange(STAGING_BYTES)] = rng.randrange(256)


def changes_while_read(server: Servers, seeds: range) -> None:
    """Post calls while another thread changes them; the worker may end, but only because of invalid entries."""
    for seed in seeds:
        with Raw(server.folder) as raw:
            own, end = prepared(raw), threading.Event()
            thread = threading.Thread(target=flip, args=(raw, end, seed))
            thread.start()
            try:
                random_calls(raw, own, seed, 300)
            except Lost:
                assert raw.sticky == 999
            finally:
                end.set()
                thread.join()


def test_a_client_that_writes_while_the_worker_reads_harms_itself(server: Servers, witness: Raw) -> None:
    changes_while_read(server, range(6))


@pytest.mark.slow
def test_sanitizers_find_nothing_in_a_worker_of_hostile_clients(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    with natives.changed({}, natives.SANITIZED) as parts:
        with serve(1, driver=parts.fake) as server:
            for seed in range(100, 160):
                with Raw(server.folder) as raw:
                    random_calls(raw, prepared(raw), seed, 400)
                    assert raw.sticky == 0
            changes_while_read(server, range(100, 130))


def test_nobody_changes_what_the_worker_says_or_the_size_of_memory(server: Servers, witness: Raw) -> None:
    with Raw(server.folder) as raw:
        status = raw.memory[1]
        for memory in raw.memory:
            for size in (0, 1 << 30):
                with pytest.raises(PermissionError):
                    os.ftruncate(memory, size)
            with pytest.raises(PermissionError):
                fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        with pytest.raises(PermissionError):
            mmap.mmap(status, 4096)
        with pytest.raises(PermissionError):
            os.pwrite(status, b"x", 0)
        again = os.open(f"/proc/self/fd/{status}", os.O_RDWR)
        with pytest.raises(PermissionError):
            mmap.mmap(again, 4096)
        os.close(again)
        address = raw.alloc(64)
        raw.put(address, b"a" * 64)
        assert raw.get(address, 64) == b"a" * 64


def test_a_handshake_may_say_anything(server: Servers, witness: Raw) -> None:
    right = Raw.hello(OPEN)
    for packet, descriptors in [
        (b"", 0),
        (b"x", 0),
        (right, 0),
        (right, 1),
        (right, 3),
        (right * 2, 2),
        (right[:-1], 2),
        (struct.pack("=IIQII", OPEN, MAGIC, 1, 1, 0), 2),
        (struct.pack("=IIQII", 77, MAGIC, 1, 1, 0), 2),
    ]:
        line = Raw.connect(server.folder)
        with open(os.devnull, "rb") as nothing:
            line.sendmsg([packet], [(1, 1, struct.pack(f"={descriptors}i", *[nothing.fileno()] * descriptors))])
        while answer := line.recv(4096):
            assert struct.unpack_from("=I", answer)[0] != 4
        line.close()
    silent = [Raw.connect(server.folder) for _ in range(20)]  # silent clients delay no other client
    with Raw(server.folder) as raw:
        raw.put(raw.alloc(64), bytes(64))
    for line in silent:
        line.close()
