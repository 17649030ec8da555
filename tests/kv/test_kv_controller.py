"""Key-value commands through queue pairs and a controller: answers of all kinds, on `cpu` and `interp`."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.harness.key_value_memory import KeyValueMemory, command_row, request_all

from lab.media import KeyValueFaulty, KeyValueLatency
from warpwell import errors, nvme
from warpwell.queues import QueuePairs
from warpwell.storage import RamMedium
from warpwell.storage.controller import MAX_WEIGHT, Controller
from warpwell.targets import memory_for

LIMIT = 20 * 10**9
ROOM = 128
LARGEST = 64


class Bench:
    """Queue pairs, a controller and one namespace of keys and values."""

    def __init__(self, device: str = "cpu", functions: Any = None, *, count: int = 1, depth: int = 16, **options: Any):
        self.device = device
        self.memory = KeyValueMemory(largest=LARGEST)
        self.pairs = QueuePairs(memory_for(device), count=count, depth=depth, staging_bytes=512, results=True)
        options = {"threads": 2, "interpreted": device == "interp"} | options
        self.controller = Controller(self.pairs, **options)
        self.nsid = self.controller.attach_kv(functions or self.memory.native())

    def send(
        self,
        rows: Sequence[list[int]],
        values: Any = None,
        *,
        threads: int = 1,
        nsid: int | None = None,
        pairs: QueuePairs | None = None,
        limit: int = LIMIT,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Send commands; return their answers and buffers."""
        pairs = pairs or self.pairs
        commands = np.array(rows, np.int64)
        buffers = np.zeros((len(rows), ROOM), np.uint8)
        for buffer, value in zip(buffers, values or [], strict=False):
            buffer[: len(value)] = np.frombuffer(value, np.uint8)
        answers = np.full(len(rows), -9)
        each = -(-len(rows) // threads)
        with self.controller.active(pairs):
            request_all[threads](
                pairs.records,
                pairs.count,
                self.nsid if nsid is None else nsid,
                commands.ctypes.data,
                buffers,
                answers,
                each,
                limit,
                device=self.device,
                services=self.controller.services(),
            )
        assert pairs.in_use() == 0 or (answers < 0).any()
        return answers, buffers


@contextlib.contextmanager
def bench(*args: Any, **options: Any) -> Iterator[Bench]:
    made = Bench(*args, **options)
    try:
        yield made
    finally:
        made.controller.close()


DEVICES = pytest.mark.parametrize("device", ["cpu", "interp"])


@DEVICES
@pytest.mark.parametrize("window", [0, 3])
def test_each_command_and_its_answer(device: str, window: int) -> None:
    with bench(device, window=window) as b:
        value = bytes(range(40))
        rows = [
            command_row(nvme.KV_RETRIEVE, b"key", ROOM),
            command_row(nvme.KV_STORE, b"key", 40),
            command_row(nvme.KV_RETRIEVE, b"key", ROOM),
            command_row(nvme.KV_RETRIEVE, b"key", 16),
            command_row(nvme.KV_RETRIEVE, b"key", 0),
            command_row(nvme.KV_EXIST, b"key"),
            command_row(nvme.KV_EXIST, b"key\0"),
            command_row(nvme.KV_STORE, b"key", 1, nvme.STORE_IF_MISSING),
            command_row(nvme.KV_STORE, b"other", 1, nvme.STORE_IF_EXISTS),
            command_row(nvme.KV_STORE, b"other", LARGEST + 1),
            command_row(nvme.KV_STORE, bytes(range(16)), 0),
            command_row(nvme.KV_RETRIEVE, bytes(range(16)), ROOM),
            command_row(nvme.KV_DELETE, b"key"),
            command_row(nvme.KV_EXIST, b"key"),
        ]
        answers, buffers = b.send(rows, [value] * len(rows))
        absent, exists = nvme.KV_KEY_DOES_NOT_EXIST, nvme.KV_KEY_EXISTS
        assert answers.tolist() == [
            absent,
            0,
            40 << 16,
            40 << 16,
            40 << 16,
            0,
            absent,
            exists,
            absent,
            nvme.KV_INVALID_VALUE_SIZE,
            0,
            0,
            0,
            absent,
        ]
        assert bytes(buffers[2]) == value + b"\xff" * (ROOM - 40)
        assert bytes(buffers[3][:16]) == value[:16]


@DEVICES
def test_commands_that_are_refused(device: str) -> None:
    with bench(device) as b:
        blocks = b.controller.attach(RamMedium(4096))
        size, opcode = nvme.KV_INVALID_KEY_SIZE, nvme.INVALID_OPCODE
        for key, command, expected in [
            (b"", nvme.KV_RETRIEVE, size),
            (b"", nvme.KV_STORE, size),
            (b"", nvme.KV_DELETE, size),
            (b"", nvme.KV_EXIST, size),
            (bytes(17), nvme.KV_RETRIEVE, size),
            (bytes(255), nvme.KV_EXIST, size),
            (bytes(17), nvme.KV_LIST, size),
            (b"key", 0x09, opcode),
            (b"key", 0x05, opcode),
            (b"key", 0xFF, opcode),
            (b"", nvme.KV_LIST, opcode),  # a valid command that the store does not implement
        ]:
            assert b.send([command_row(command, key)])[0].tolist() == [expected], (key, command)
        for command in (nvme.KV_LIST, nvme.KV_DELETE, nvme.KV_EXIST):
            assert b.send([command_row(command, b"key")], nsid=blocks)[0].tolist() == [opcode]
        for nsid in (0, blocks + 1, 63, 64, 65, 2**31, 2**32 - 1):
            assert b.send([command_row(nvme.KV_EXIST, b"key")], nsid=nsid)[0].tolist() == [nvme.INVALID_NAMESPACE]
        b.controller.detach(b.nsid)
        assert b.send([command_row(nvme.KV_EXIST, b"key")])[0].tolist() == [nvme.INVALID_NAMESPACE]
        # the namespace id is free again, for both kinds of media
        assert b.controller.attach(RamMedium(512)) == b.nsid
        assert b.send([command_row(nvme.READ, b"")])[0].tolist() == [0]


STEP = st.tuples(
    st.sampled_from([nvme.KV_STORE, nvme.KV_STORE, nvme.KV_RETRIEVE, nvme.KV_EXIST, nvme.KV_DELETE]),
    st.binary(min_size=1, max_size=2) | st.binary(min_size=15, max_size=16),
    st.binary(max_size=LARGEST),
)


@pytest.fixture(scope="module")
def shared() -> Iterator[Bench]:
    with bench() as b:
        yield b


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=50)
@given(steps=st.lists(STEP, min_size=1, max_size=30))
def test_against_a_dict(shared: Bench, steps: list[tuple[int, bytes, bytes]]) -> None:
    model: dict[bytes, bytes] = {}
    rows, expected = [], []
    for opcode, key, value in steps:
        rows.append(command_row(opcode, key, len(value) if opcode == nvme.KV_STORE else ROOM))
        exists = key in model
        expected.append(0 if exists or opcode == nvme.KV_STORE else nvme.KV_KEY_DOES_NOT_EXIST)
        if opcode == nvme.KV_RETRIEVE and exists:
            expected[-1] = len(model[key]) << 16
        if opcode == nvme.KV_STORE:
            model[key] = value
        elif opcode == nvme.KV_DELETE:
            model.pop(key, None)
    answers, _ = shared.send(rows, [value for _, _, value in steps])
    assert answers.tolist() == expected
    _, found = shared.send([command_row(nvme.KV_RETRIEVE, key, ROOM) for key in model] or [command_row(20, b"x")])
    for buffer, value in zip(found, model.values(), strict=False):
        assert bytes(buffer[: len(value)]) == value
    # the next example starts with an empty store
    shared.send([command_row(nvme.KV_DELETE, key) for key in model] or [command_row(20, b"x")])


def test_blocks_and_keys_side_by_side() -> None:
    data = np.arange(512, dtype=np.uint8)
    with bench() as b:
        blocks = b.controller.attach(RamMedium(data))
        b.send([command_row(nvme.KV_STORE, 7, 8)], [b"01234567"])
        # Both namespaces use one ring: the entry of a block read still has the key words of an earlier command.
        for _ in range(40):
            answers, buffers = b.send([command_row(nvme.KV_RETRIEVE, 7, ROOM)])
            assert answers.tolist() == [8 << 16] and bytes(buffers[0, :8]) == b"01234567"
            row = command_row(nvme.READ, b"")  # slba is 0, because the sizes are 0; a read ignores the key words
            row[1] = row[2] = -1
            assert b.send([row], nsid=blocks)[0].tolist() == [0]


@DEVICES
def test_queue_pairs_of_several_devices(device: str) -> None:
    with bench(device, count=2) as b:
        more_pairs = [QueuePairs(memory_for(device), count=n, depth=8, staging_bytes=512, results=True) for n in (1, 3)]
        for number, pairs in enumerate(more_pairs):
            b.controller.add_pairs(pairs, weight=number + 1)
        for number, pairs in enumerate([b.pairs, *more_pairs]):
            value = bytes([number]) * 8
            answers, buffers = b.send(
                [command_row(nvme.KV_STORE, number, 8), command_row(nvme.KV_RETRIEVE, number, ROOM)] * 3,
                [value] * 6,
                pairs=pairs,
            )
            assert answers.tolist() == [0, 8 << 16] * 3 and bytes(buffers[1, :8]) == value
        assert b.controller.commands == 18 and b.controller.outstanding() == 0
        with b.controller.active(more_pairs[0]):
            assert [b.controller._client(p).launches for p in (b.pairs, *more_pairs)] == [0, 1, 0]
            with pytest.raises(errors.SharingError, match="1 launches"):
                b.controller.remove_pairs(more_pairs[0])
        b.controller.remove_pairs(more_pairs[0])
        with pytest.raises(errors.ArgumentError, match="add_pairs"):
            b.controller.begin(more_pairs[0])
        # the remaining queue pairs keep their positions
        answers, _ = b.send([command_row(nvme.KV_RETRIEVE, 0, ROOM)] * 6, pairs=more_pairs[1], threads=3)
        assert answers.tolist() == [8 << 16] * 6
        assert b.controller.commands == 24


def test_wrong_arguments() -> None:
    with bench() as b:
        pairs = QueuePairs(memory_for("cpu"), count=1, depth=4, staging_bytes=512)
        for weight in (0, -1, MAX_WEIGHT + 1):
            with pytest.raises(errors.ArgumentError, match="weight"):
                b.controller.add_pairs(pairs, weight=weight)
        with pytest.raises(errors.ArgumentError, match="window"):
            Controller(pairs, threads=1, window=-1)
        many = QueuePairs(memory_for("cpu"), count=1024, depth=4, staging_bytes=512)
        with pytest.raises(errors.ArgumentError, match="at most"):
            b.controller.add_pairs(many)
        with pytest.raises(errors.ArgumentError, match="schedule"):
            KeyValueFaulty(b.memory.native(), ["sometimes"])
        with pytest.raises(errors.ArgumentError, match="one of P5800X"):
            KeyValueLatency(b.memory.native(), "P9999")
    with pytest.raises(errors.ClosedError):
        b.controller.add_pairs(pairs)
    with pytest.raises(errors.ClosedError):
        b.controller.attach_kv(b.memory.native())
    with pytest.raises(errors.ClosedError):
        b.controller.begin()
