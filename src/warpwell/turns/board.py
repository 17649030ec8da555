"""Board: the file that all processes of a device share: 64-bit words, locks of the kernel, and bells.

Who has the lease is said by a lock of the kernel alone (a byte of the file, ``F_SETLK``): it is free at once when its
process ends, however it ends, and is not inherited by forked children. The words are hints: who waits, since when, with
which priority. Each is written by one process at a time or may be wrong for some milliseconds, for whoever waits looks
again. So nothing here needs an atomic operation, and no process can leave the file in a state that stops others.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from pathlib import Path

from .. import errors
from ..shared_file import SharedFile

SLOTS = 512
"""Threads of all processes that may have a seat at one device."""

WORDS = 16
"""Words of a slot, and then its tenant's name."""

SLOT = 256
"""Bytes of a slot."""

_, EPOCH, HOLDER, GRANT, GRANTED, YIELDED, LIMITS = range(7)
"""Words of the head: format; number of the lease; slots (from 1) of who has it and who is to have it, since when; when
the holder could last have handed over; version of the limits, odd while they are written."""

PRIORITY, SINCE, STATE, USE, TURNS, HOME, BELL, NAMED, OPEN, AT, CAPTURED, BEGUN, ENDED = range(13)
"""Words of a slot: effective priority; since when it waits, or is inside (ns); see `IDLE`; ns inside so far; turns;
slot whose bell its process listens to; bell; bytes of its tenant's name; and of `ahead.py`: whether the GPU may pass a
gate; twice the gates that it has passed, odd where it stands at one; whether it stands at one of a graph; turns that
have begun on the host; turns that have ended on the GPU."""

IDLE, WAITING, INSIDE, AHEAD = range(4)

_FLAGS = 256
"""Offset of a byte a slot: whether it waits."""

_TABLE = 1024
"""Offset of the slots."""

_TEXT = _TABLE + SLOTS * SLOT
TEXT_BYTES = 65536
"""Room for the operator's limits, as JSON behind its length."""

_NAME = SLOT - 8 * WORDS
_NOBODY = bytes(SLOTS)

_BETWEEN = 2e-5
"""Seconds between two looks whether the GPU stands at a gate: longer than it takes from its look at `OPEN` to `AT`."""

# bytes that the kernel locks; none of them is ever read
_LOCKS = 1 << 40
SEIZE = _LOCKS
_LEASE, LEASES = _LOCKS + 1024, 1 << 20
_PRESENT = _LOCKS + (1 << 30)


class Board(SharedFile):
    """The board of one device.

    Attributes
    ----------
    words : memoryview of int64
    held : int
        The lease (a lock) that this process has, or 0.
    """

    SUFFIX, NBYTES, FORMAT = ".turns", _TEXT + 8 + TEXT_BYTES, 1

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.words = memoryview(self._map).cast("B").cast("q")
        self._own: set[int] = set()
        self._seizes: dict[int, int] = {}  # the thread that has SEIZE
        self.held = 0
        self._lock = threading.Lock()

    @property
    def extent(self) -> tuple[int, int]:
        """Where this process has the file: address, bytes in whole pages."""
        return self._address, -(-self.NBYTES // mmap.PAGESIZE) * mmap.PAGESIZE

    # -- locks of the kernel -------------------------------------------------------------------------------------

    def seize(self) -> bool:
        """Take the lock SEIZE, if nobody has it: no other thread of this process either, which `lock` does not see."""
        me = threading.get_ident()
        return self._seizes.setdefault(SEIZE, me) == me and self.lock(SEIZE)

    def let_go(self) -> None:
        """Free the lock SEIZE, whatever `seize` said, unless another thread has it."""
        if self._seizes.get(SEIZE) == threading.get_ident():
            self.unlock(SEIZE)
            self._seizes.pop(SEIZE, None)

    def holds(self, byte: int) -> bool:
        """Return whether some process has a lock; of this one's, only leases are known."""
        return byte == self.held or self.lock_owner(byte) is not None

    @staticmethod
    def lease(epoch: int) -> int:
        """Return the lock that is the lease; each epoch has its own."""
        return _LEASE + epoch % LEASES

    def present(self, slot: int) -> bool:
        """Return whether the process of a slot lives."""
        return slot in self._own or self.lock_owner(_PRESENT + slot) is not None

    def process(self, slot: int) -> int | None:
        """Return the process of a slot, as the kernel knows it; None where it has ended."""
        return os.getpid() if slot in self._own else self.lock_owner(_PRESENT + slot)

    # -- slots ---------------------------------------------------------------------------------------------------

    def sit(self) -> int:
        """Take a free slot.

        Raises
        ------
        SchedulerError
            There is none.
        """
        with self._lock:
            for slot in range(1, SLOTS):
                if slot not in self._own and self.lock(_PRESENT + slot):
                    self._own.add(slot)
                    self._map[_FLAGS + slot] = 0
                    base = self.at(slot)
                    for word in range(WORDS):
                        self.words[base + word] = 0
                    return slot
        raise errors.SchedulerError(f"{SLOTS - 1} threads have a seat at {self.name} already: end some of them")

    def rise(self, slot: int) -> None:
        """Give a slot back."""
        with self._lock:
            self._map[_FLAGS + slot] = 0
            self._own.discard(slot)
            self.unlock(_PRESENT + slot)

    @staticmethod
    def at(slot: int) -> int:
        """Return the index of a slot's first word."""
        return (_TABLE + slot * SLOT) // 8

    def set_name(self, slot: int, name: bytes) -> None:
        """Write the name of a slot's tenant."""
        at = _TABLE + slot * SLOT + 8 * WORDS
        self._map[at : at + len(name)] = name
        self.words[self.at(slot) + NAMED] = len(name)

    def tenant(self, slot: int) -> str:
        """Return the name of a slot's tenant."""
        at = _TABLE + slot * SLOT + 8 * WORDS
        length = max(0, min(_NAME, self.words[self.at(slot) + NAMED]))
        return self._map[at : at + length].decode(errors="replace")

    # -- who waits -----------------------------------------------------------------------------------------------

    def anyone(self) -> bool:
        """Return whether somebody waits."""
        return self._map[_FLAGS : _FLAGS + SLOTS] != _NOBODY

    def flag(self, slot: int, waits: bool) -> None:
        """Say whether a slot waits."""
        self._map[_FLAGS + slot] = waits

    def flagged(self, slot: int) -> bool:
        """Return whether a slot says that it waits; it may have died meanwhile."""
        return self._map[_FLAGS + slot] != 0

    def waiters(self) -> list[int]:
        """Return the slots that wait, and forget those whose process has died."""
        flags = self._map[_FLAGS : _FLAGS + SLOTS]
        found = []
        slot = flags.find(1)
        while slot >= 0:
            if self.present(slot):
                found.append(slot)
            else:
                self._map[_FLAGS + slot] = 0
            slot = flags.find(1, slot + 1)
        return found

    # -- gates -------------------------------------------------------------------------------------------------

    def stands(self, slot: int) -> bool:
        """Return whether the GPU stands at a gate of a slot, or was through it some microseconds ago."""
        at = self.at(slot)
        return self.words[at + AT] % 2 != 0 or self.words[at + CAPTURED] != 0

    def pending(self, slot: int) -> bool:
        """Return whether turns have begun and not ended on the GPU, or a graph stands at a gate."""
        at = self.at(slot)
        return self.words[at + BEGUN] != self.words[at + ENDED] or self.stands(slot)

    def shut(self, slot: int, epoch: int, seconds: float) -> bool:
        """Shut the gate of a slot; return whether the GPU came to stand there, or has nothing to do, in time.

        Not where the lease gets another number meanwhile.
        """
        self.words[self.at(slot) + OPEN] = 0
        end, looks = time.monotonic() + seconds, 0
        while self.pending(slot) and looks < 2:
            if self.words[EPOCH] != epoch or time.monotonic() > end:
                return False
            looks = looks + 1 if self.stands(slot) else 0
            time.sleep(_BETWEEN)
        return True

    # -- bells ---------------------------------------------------------------------------------------------------

    def heard(self, slot: int) -> int:
        """Return how often a slot's bell was rung: for `listen`."""
        return self._read_futex(self.at(slot) + BELL)

    def ring(self, slot: int) -> None:
        """Wake whoever listens to a slot's bell."""
        self._wake(self.at(slot) + BELL)

    def listen(self, slot: int, heard: int, seconds: float) -> None:
        """Wait until a bell is rung once more than `heard` says, a signal arrives, or the time is over."""
        self._wait(self.at(slot) + BELL, heard, seconds)

    # -- limits --------------------------------------------------------------------------------------------------

    def write_text(self, text: bytes) -> None:
        """Replace the operator's limits."""
        if len(text) > TEXT_BYTES:
            raise errors.ArgumentError(f"limits of {len(text)} bytes: at most {TEXT_BYTES}", name="tenants")
        version = self.words[LIMITS] | 1
        self.words[LIMITS] = version
        self.words[_TEXT // 8] = len(text)
        self._map[_TEXT + 8 : _TEXT + 8 + len(text)] = text
        self.words[LIMITS] = version + 1

    def read_text(self) -> bytes:
        """Return the operator's limits; half of them while they are written, when `LIMITS` is odd."""
        length = max(0, min(TEXT_BYTES, self.words[_TEXT // 8]))
        return self._map[_TEXT + 8 : _TEXT + 8 + length]
