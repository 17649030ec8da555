"""Checks of CUDA's promises for copies and memsets of rows and boxes."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable

import numpy as np
from tests.harness.driver.calls import (
    ARRAY_SIDE,
    DEVICE_SIDE,
    EITHER_SIDE,
    HOST_SIDE,
    INVALID_VALUE,
    NON_BLOCKING,
    NOT_SUPPORTED,
    PER_THREAD,
    Cuda,
    End,
    Rows,
)
from tests.harness.driver.checks import Held
from tests.harness.driver.graphs import Boxes, side

ROOM = 1 << 14
"""Bytes of each memory that takes part."""


class Room:
    """Memory of one kind, with its content."""

    def __init__(self, cuda: Cuda, kind: str) -> None:
        self.cuda, self.kind = cuda, kind
        self.host: np.ndarray | None = None
        if kind == "device":
            self.address = cuda.alloc(ROOM)
        elif kind == "pinned":
            self.address, view = cuda.pinned(ROOM)
            self.host = np.frombuffer(view, np.uint8)
        else:
            self.host = np.zeros(ROOM, np.uint8)
            self.address = self.host.ctypes.data

    def put(self, data: np.ndarray) -> None:
        """Set all bytes."""
        if self.host is None:
            self.cuda.write(self.address, data.tobytes())
        else:
            self.host[:] = data

    def get(self) -> np.ndarray:
        """Return all bytes."""
        return np.frombuffer(self.cuda.read(self.address, ROOM), np.uint8) if self.host is None else self.host.copy()

    def side(self, rng: random.Random) -> int:
        """Return its memory type for a copy: the specific or the unified one."""
        own = DEVICE_SIDE if self.kind == "device" else HOST_SIDE
        return rng.choice([own, EITHER_SIDE])


def rooms(cuda: Cuda, rng: random.Random) -> tuple[Room, Room, np.ndarray, np.ndarray]:
    """Return two memories, not both the program's own, and their bytes."""
    kinds = ["device", "device"]
    kinds[rng.randrange(2)] = rng.choice(["device", "pinned", "pageable"])
    made = [Room(cuda, kind) for kind in kinds]
    data = [np.frombuffer(rng.randbytes(ROOM), np.uint8).copy() for _ in made]
    for room, content in zip(made, data, strict=True):
        room.put(content)
    cuda.cuCtxSynchronize()
    return made[0], made[1], data[0], data[1]


def pitches(rng: random.Random, width: int) -> int:
    """Return a distance of rows."""
    return width + rng.choice([0, 0, 1, 7, 64, rng.randrange(200)])


def any_rows(cuda: Cuda) -> None:
    """Rows go where they should, and nothing between them changes, for all kinds of memory, pitches and starts."""
    stream = cuda.stream(NON_BLOCKING)
    for seed in range(80):
        rng = random.Random(seed)
        to, source, want, content = rooms(cuda, rng)
        width, height = rng.choice([1, 3, 4, 16, 100]), rng.choice([1, 2, 3, 9, 20])
        ends = []
        for room in (to, source):
            pitch = pitches(rng, width)
            x, y = rng.randrange(pitch), rng.randrange(3)
            ends.append((room, pitch, x, y))
        sides = []
        for room, pitch, x, y in ends:
            sides.append(cuda.end(room.address, pitch, x, y, room.side(rng)))
        is_synchronous = rng.random() < 0.5
        call = rng.choice(["cuMemcpy2D_v2", "cuMemcpy2DUnaligned_v2", "cuMemcpy2D_v2_ptds"])
        copy = ctypes.byref(Rows(sides[1], sides[0], width, height))
        if is_synchronous:
            getattr(cuda, call)(copy)
        else:
            which = rng.choice([stream, PER_THREAD, 0])
            cuda.cuMemcpy2DAsync_v2(copy, which)
            cuda.cuStreamSynchronize(which)
        (_, to_pitch, tx, ty), (_, pitch, sx, sy) = ends
        for row in range(height):
            a, b = (ty + row) * to_pitch + tx, (sy + row) * pitch + sx
            want[a : a + width] = content[b : b + width]
        assert np.array_equal(to.get(), want) and np.array_equal(source.get(), content), (seed, width, height, ends)
        for room in (to, source):
            if room.kind == "device":
                cuda.cuMemFree_v2(room.address)


def any_boxes(cuda: Cuda) -> None:
    """The same with planes."""
    for seed in range(40):
        rng = random.Random(seed)
        to, source, want, content = rooms(cuda, rng)
        size = rng.choice([1, 4, 12, 50]), rng.choice([1, 2, 5]), rng.choice([1, 2, 4])
        ends = []
        for room in (to, source):
            pitch, rows = pitches(rng, size[0]), size[1] + rng.choice([0, 0, 1, 3])
            at = rng.randrange(pitch), rng.randrange(2), rng.randrange(2)
            ends.append((room, pitch, rows, at))
        sides = [side(room.address, pitch, rows, room.side(rng), at) for room, pitch, rows, at in ends]
        copy = ctypes.byref(Boxes(sides[1], sides[0], *size))
        if rng.random() < 0.5:
            cuda.cuMemcpy3D_v2(copy)
        else:
            cuda.cuMemcpy3DAsync_v2(copy, PER_THREAD)
            cuda.cuStreamSynchronize(PER_THREAD)
        starts: list[Callable[[int, int], int]] = []
        for _, pitch, rows, (x, y, z) in ends:
            starts.append(lambda k, j, pitch=pitch, rows=rows, x=x, y=y, z=z: ((z + k) * rows + y + j) * pitch + x)
        for k in range(size[2]):
            for j in range(size[1]):
                a, b = (start(k, j) for start in starts)
                want[a : a + size[0]] = content[b : b + size[0]]
        assert np.array_equal(to.get(), want) and np.array_equal(source.get(), content), (seed, size, ends)
        for room in (to, source):
            if room.kind == "device":
                cuda.cuMemFree_v2(room.address)


def ends_of_memory(cuda: Cuda) -> None:
    """The last row may end where the memory does, without what is left of its pitch; a byte more is refused."""
    device, (pinned, _), host = cuda.alloc(1000), cuda.pinned(4096), ctypes.create_string_buffer(4096)

    def code(to: End, source: End, width: int, height: int) -> int:
        copy = ctypes.byref(Rows(source, to, width, height))
        codes = {cuda.code("cuMemcpy2D_v2", copy), cuda.code("cuMemcpy2DAsync_v2", copy, PER_THREAD)}
        cuda.cuStreamSynchronize(PER_THREAD)
        (found,) = codes
        return found

    plain = cuda.end(ctypes.addressof(host), 100, kind=HOST_SIDE)
    for kind in (DEVICE_SIDE, EITHER_SIDE):
        assert code(cuda.end(device, 100, kind=kind), plain, 100, 10) == 0
        assert code(cuda.end(device, 110, kind=kind), plain, 10, 10) == 0  # 9 x 110 + 10 are 1000
        for pitch, x, y, width, height in (
            (100, 0, 0, 100, 11),
            (110, 0, 0, 11, 10),
            (110, 1, 0, 10, 10),
            (100, 0, 1, 100, 10),
            (1001, 0, 0, 1, 2),
            (1 << 63, 0, 0, 1, 3),
            (1 << 40, 0, 0, 1, (1 << 24) + 1),
            (100, 0, 0, 100, 1 << 62),
            (0, 0, 0, 1, 1001),
        ):
            end = cuda.end(device, pitch, x, y, kind)
            host_end = cuda.end(pinned, 100, kind=HOST_SIDE)
            assert code(end, host_end, width, height) == INVALID_VALUE, (pitch, x, y, width, height)
            assert code(host_end, end, width, height) == INVALID_VALUE, (pitch, x, y, width, height)
    assert code(cuda.end(device, 100, 1 << 62, kind=DEVICE_SIDE), plain, 1, 1) == INVALID_VALUE
    assert code(cuda.end(pinned, 512, kind=HOST_SIDE), cuda.end(device, 100), 100, 9) == INVALID_VALUE  # 4196 bytes
    assert code(cuda.end(pinned, 499, kind=HOST_SIDE), cuda.end(device, 100), 100, 9) == 0
    cuda.write(device, bytes(1000))
    assert cuda.read(device, 1000) == bytes(1000)


def what_is_refused(cuda: Cuda) -> None:
    """Arrays, nothing, rows wider than their distance; rows without bytes are no error."""
    device, target = cuda.alloc(4096), cuda.alloc(4096)
    right = cuda.end(target, 64)
    cases = [
        (cuda.end(device, 10), 11, 2, INVALID_VALUE),
        (cuda.end(0, 64), 8, 2, INVALID_VALUE),
        (cuda.end(0, 64, kind=HOST_SIDE), 8, 2, INVALID_VALUE),
        (cuda.end(device, 64, kind=0), 8, 2, INVALID_VALUE),
        (cuda.end(device, 64, kind=9), 8, 2, INVALID_VALUE),
        (End(0, 0, ARRAY_SIDE, array=device, pitch=64), 8, 2, NOT_SUPPORTED),
        (cuda.end(0x5000, 64, kind=DEVICE_SIDE), 8, 2, INVALID_VALUE),
        (cuda.end(device, 64), 0, 2, 0),
        (cuda.end(device, 64), 8, 0, 0),
        (cuda.end(device, 10), 11, 1, 0),
    ]
    cuda.write(device, bytes(4096))
    cuda.write(target, b"x" * 4096)
    for number, (end, width, height, want) in enumerate(cases):
        found = cuda.code("cuMemcpy2D_v2", ctypes.byref(Rows(right, end, width, height)))
        assert found == want, (number, found)
        back = cuda.code("cuMemcpy2D_v2", ctypes.byref(Rows(end, right, width, height)))
        assert back == want, (number, back)
    assert cuda.code("cuMemcpy2D_v2", None) == INVALID_VALUE
    pitch, address = ctypes.c_size_t(), ctypes.c_uint64()
    out = ctypes.byref(address), ctypes.byref(pitch)
    for width, element, want in ((1, 4, 0), (513, 16, 0), (10, 3, INVALID_VALUE), (0, 4, INVALID_VALUE)):
        code = cuda.code("cuMemAllocPitch_v2", *out, width, 7, ctypes.c_uint(element))
        assert code == want and (code or (pitch.value % 512 == 0 and pitch.value >= width)), (width, element, code)


def memsets_of_rows(cuda: Cuda) -> None:
    """Rows are set, gaps between them are not, and invalid calls are refused."""
    kinds = {1: ctypes.c_ubyte, 2: ctypes.c_ushort, 4: ctypes.c_uint}
    for seed in range(30):
        rng = random.Random(seed)
        room = Room(cuda, rng.choice(["device", "pinned"]))
        want = np.frombuffer(rng.randbytes(ROOM), np.uint8).copy()
        room.put(want)
        width = rng.choice([1, 2, 4])
        call, kind = f"cuMemsetD2D{8 * width}", kinds[width]
        columns, rows, start = rng.randrange(1, 60), rng.randrange(1, 12), width * rng.randrange(9)
        pitch = width * (columns + rng.choice([0, 1, 30]))
        value = rng.getrandbits(8 * width)
        arguments = (room.address + start, pitch, kind(value), columns, rows)
        if rng.random() < 0.5:
            getattr(cuda, f"{call}_v2")(*arguments)
        else:
            getattr(cuda, f"{call}Async")(*arguments, PER_THREAD)
            cuda.cuStreamSynchronize(PER_THREAD)
        for row in range(rows):
            at = start + row * pitch
            want[at : at + width * columns].view(f"u{width}")[:] = value
        assert np.array_equal(room.get(), want), seed
    x = cuda.alloc(1000)
    four = ctypes.c_uint(1)
    wrong = [(x, 8, four, 3, 2), (x + 2, 16, four, 2, 2), (x, 18, four, 2, 2), (x, 100, four, 25, 11)]
    wrong += [(x, 1 << 63, four, 1, 3), (x, 100, four, 1 << 62, 1), (x, 4, four, 1, 1 << 62)]
    codes = [cuda.code("cuMemsetD2D32_v2", *arguments) for arguments in wrong]
    assert codes == [INVALID_VALUE] * len(wrong), codes


def in_the_order_of_their_stream(cuda: Cuda) -> None:
    """Rows between the device's and pinned memory are read when their stream gets there, pageable ones at once."""
    held, x, y = Held(cuda), cuda.alloc(1024), cuda.alloc(1024)
    (source, before), (target, after) = cuda.pinned(1024), cuda.pinned(1024)
    plain = ctypes.create_string_buffer(b"p" * 1024, 1024)
    before[:] = b"a" * 1024
    cuda.write(x, b"-" * 1024)
    cuda.write(y, b"-" * 1024)
    cuda.rows(cuda.end(x, 64), cuda.end(source, 32), 32, 16, held.stream)
    cuda.rows(cuda.end(y, 64), cuda.end(x, 64), 64, 8, held.stream)
    cuda.rows(cuda.end(y, 64, 0, 8), cuda.end(ctypes.addressof(plain), 64, kind=HOST_SIDE), 16, 8, held.stream)
    cuda.rows(cuda.end(target, 64), cuda.end(y, 64), 64, 16, held.stream)
    before[:] = b"b" * 1024
    ctypes.memset(plain, ord("q"), 1024)
    assert held.is_pending() and bytes(after) == bytes(1024)
    held.release()
    cuda.cuStreamSynchronize(held.stream)
    row = b"b" * 32 + b"-" * 32
    assert bytes(after) == row * 8 + (b"p" * 16 + b"-" * 48) * 8, bytes(after)


CHECKS = (any_rows, any_boxes, ends_of_memory, what_is_refused, memsets_of_rows, in_the_order_of_their_stream)
