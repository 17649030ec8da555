"""`Gates`: an arbiter by hand, which opens and closes the gates of the programs on the boards of a folder."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from warpwell._os import FUTEX

FORMAT = int.from_bytes(b"WWWGATE3", "little")
TABLE, SLOT_BYTES, SLOTS = 4096, 256, 128
BEAT, PROGRAMS, BELL = 8, 9, 16
GATE, OPENED, SERIAL, HELD, ISSUED, DONE, LONGEST, LAUNCHES = 0, 2, 3, 8, 9, 10, 12, 19
FAKE_UUID = "fa" * 15
"""Of the fake driver's devices, without their number."""
_libc = ctypes.CDLL(None)


class Gates:
    """The gate of the first program on a board.

    Attributes
    ----------
    words : memoryview of uint64
    closings, held : int
        How often `flipping` closed the gate, and found the program waiting.
    """

    def __init__(self, path: Path) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.posix_fallocate(file, 0, TABLE + SLOTS * SLOT_BYTES)
        self._map = mmap.mmap(file, TABLE + SLOTS * SLOT_BYTES)
        self.fields = memoryview(self._map).cast("B").cast("Q")
        self.fields[0], self.fields[PROGRAMS] = FORMAT, 2
        self._halves = memoryview(self._map).cast("B").cast("I")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.closings = self.held = 0

    def word(self, word: int) -> int:
        return self.fields[TABLE // 8 + word]

    @property
    def is_attached(self) -> bool:
        return self.word(SERIAL) % 2 == 1

    @property
    def is_waiting(self) -> bool:
        """Whether the program waits at the gate and the GPU has nothing of it."""
        return self.word(HELD) != 0 and self.word(ISSUED) == self.word(DONE)

    @property
    def is_idle(self) -> bool:
        return self.word(HELD) == 0 and self.word(ISSUED) == self.word(DONE)

    @property
    def has_measured(self) -> bool:
        """Whether the program knows of calls that take 0.9 ms or longer, so that it puts a gate before each of them."""
        return self.word(LONGEST) >= 900_000

    def set_gate(self, is_open: bool) -> None:
        self.beat()
        self.fields[TABLE // 8 + GATE] = is_open
        at = 2 * (TABLE // 8 + OPENED)
        self._halves[at] = (self._halves[at] + 1) & 0xFFFFFFFF
        _libc.syscall(FUTEX, ctypes.c_void_p(self._address + 4 * at), 1, 1 << 30, None, None, 0)

    def beat(self) -> None:
        """Show that an arbiter is alive."""
        self.fields[BEAT] += 1


@contextlib.contextmanager
def flipping(folder: Path, seed: int = 0) -> Iterator[Gates]:
    """Open and close the gates of all boards of a folder at random; yield the counts of all boards."""
    sums, boards, stop = Gates(folder / "sums"), {}, threading.Event()

    def flip() -> None:
        chance = random.Random(seed)
        while not stop.wait(chance.choice([1e-4, 1e-3, 3e-3])):
            for path in folder.glob("*.board"):
                board = boards.get(path) or boards.setdefault(path, Gates(path))
                if not board.is_attached:
                    continue
                board.set_gate(False)
                sums.closings += 1
                time.sleep(chance.choice([1e-4, 1e-3, 5e-3]))
                sums.held += board.is_waiting
                board.set_gate(True)

    thread = threading.Thread(target=flip)
    thread.start()
    try:
        yield sums
    finally:
        stop.set()
        thread.join()
