"""`Board`: the file that the programs of a GPU and its arbiter share; ``native/gate.h`` has its layout and rules.

Nothing here needs the scheduler or a GPU: the server of programs opens boards, and an arbiter reads them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .._os import clock
from ..shared_file import SharedFile

SLOTS, SLOT_BYTES, TABLE, NAME_BYTES = 128, 256, 4096, 64
_SLOT_LOCKS, _ARBITER_LOCK = 1 << 40, (1 << 40) - 1
"""Offsets of the file's bytes that the owners of slots and the arbiter lock with fcntl."""
_ARBITER, _BEAT, _PROGRAMS, _RUNNING, _BELL, _FENCE = 1, 8, 9, 10, 16, 24
"""64-bit fields of the head."""
_WRAP = 1 << 64

START_PAUSE_SECONDS = 1.0
"""Minimum time between two starts of an arbiter by a process; doubled after each failed start."""


def device_file(uuid: bytes) -> str:
    """Return the name of a GPU's board, without the suffix."""
    return f"gpu-{uuid.hex()}"


class Board(SharedFile):
    """The board of one device.

    Attributes
    ----------
    fields : memoryview of uint64
    GATE, BUDGET_NS, OPENED, SERIAL, ... : int
        Words of a slot.
    WORKER, STREAMS, TURN : int
        Types of programs.
    IDLE, RUNNING, LEAVING, WAITING, OVERDUE : int
        States of a slot, which its arbiter writes.
    """

    SUFFIX, NBYTES, FORMAT = ".board", TABLE + SLOTS * SLOT_BYTES, int.from_bytes(b"WWWGATE3", "little")

    GATE, BUDGET_NS, OPENED, SERIAL, SUCCESSOR, LEVEL, CLOSED, UNDRAINED = range(8)
    HELD, ISSUED, DONE, EXPECTED_NS, LONGEST_NS = range(8, 13)
    STATE, SINCE_NS, USED_NS, LAUNCHES, KIND, PID, PRIORITY, BASE = range(16, 24)
    TENANT, LEVEL_ZERO = 24, 1 << 40
    WORKER, STREAMS, TURN = 1, 2, 3
    IDLE, RUNNING, LEAVING, WAITING, OVERDUE = range(5)

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fields = memoryview(self._map).cast("B").cast("Q")
        self._own: dict[int, object] = {}
        self._is_arbiter = False
        self._started: subprocess.Popen[bytes] | None = None
        self._start_time, self._start_pause = 0.0, START_PAUSE_SECONDS

    # -- the arbiter ---------------------------------------------------------------------------------------------

    def ensure_arbiter(self) -> None:
        """Start an arbiter unless a process has the arbiter's lock. An arbiter exits when the board has no programs.

        Raises
        ------
        OSError
            The arbiter cannot be started.
        """
        if self._started is not None and self._started.poll() is None:
            return
        self._started, now = None, clock.monotonic()
        if self.arbiter is not None:
            self._start_pause = START_PAUSE_SECONDS
            return
        if getattr(sys, "frozen", False) or not os.path.basename(sys.executable or "").startswith("python"):
            raise OSError(f"sys.executable is {sys.executable!r}, not Python")  # an embedder would start itself again
        if now >= self._start_time:
            self._start_time, self._start_pause = now + self._start_pause, min(2 * self._start_pause, 32.0)
            self._started = subprocess.Popen(
                [sys.executable, "-P", "-m", "warpwell", "share", "arbiter", str(self.path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def become_arbiter(self) -> bool:
        """Take the lock of the arbiter; return False if another process has it."""
        self._is_arbiter = self.lock(_ARBITER_LOCK)
        return self._is_arbiter

    def resign(self) -> None:
        """Free the lock of the arbiter."""
        self._is_arbiter = False
        self.unlock(_ARBITER_LOCK)

    @property
    def arbiter(self) -> int | None:
        """The process of the arbiter, 0 if the process is in another container, or None."""
        return os.getpid() if self._is_arbiter else self.lock_owner(_ARBITER_LOCK)

    def beat(self, programs: int) -> None:
        """Record that the arbiter is alive, and its number of programs."""
        self.fields[_ARBITER], self.fields[_PROGRAMS] = os.getpid(), programs
        self.fields[_BEAT] = (self.fields[_BEAT] + 1) & 0xFFFFFFFF

    @property
    def beats(self) -> int:
        """The word that changes while the arbiter is alive and a program waits."""
        return self.fields[_BEAT]

    @property
    def bell(self) -> int:
        """The value of the arbiter's futex, for `wait`."""
        return self._read_futex(_BELL)

    def ring(self) -> None:
        """Wake the arbiter."""
        self._wake(_BELL)

    def wait(self, bell: int, seconds: float) -> None:
        """Wait until the arbiter's futex differs from `bell`, a signal arrives, or `seconds` have passed."""
        self._wait(_BELL, bell, seconds)

    @property
    def running(self) -> int | None:
        """The slot of the lease whose gate the arbiter opened last, or None if the last gate was not of a lease."""
        found = self.fields[_RUNNING]
        return found - 1 if found else None

    @running.setter
    def running(self, index: int | None) -> None:
        self.fields[_RUNNING] = 0 if index is None else index + 1

    def fence(self) -> None:
        """Execute a full memory fence: loads after the call follow all stores before it."""
        self._wake(_FENCE)

    # -- slots ---------------------------------------------------------------------------------------------------

    @staticmethod
    def slot(index: int) -> int:
        """Return the index of the first word of a slot; another process may have written the slot's index."""
        return (TABLE + index % SLOTS * SLOT_BYTES) // 8

    @staticmethod
    def owner_key(index: int, serial: int) -> int:
        """Return the value that identifies a slot and its owner in SUCCESSOR; `slot` accepts it as an index."""
        return (serial * SLOTS + index) % _WRAP

    def used_slots(self) -> Iterator[tuple[int, int]]:
        """Yield index and serial of the slots in use; their owners may have exited."""
        fields, base = self.fields, TABLE // 8 + self.SERIAL
        for index, serial in enumerate(fields[base :: SLOT_BYTES // 8].tolist()):
            if serial & 1:
                yield index, serial

    def owner(self, index: int) -> int | None:
        """Return the process that owns a slot, 0 if the process is in another container, or None if it has exited."""
        return os.getpid() if index in self._own else self.lock_owner(_SLOT_LOCKS + index)

    def is_alive(self, index: int) -> bool:
        """Return True if the process of a slot has not exited."""
        return self.owner(index) is not None

    def free_slot(self, index: int, serial: int) -> None:
        """Mark the slot of an exited process as free, unless a process has allocated the slot again. Any thread."""
        claim = object()
        if self._own.setdefault(index, claim) is not claim:
            return  # a lock belongs to a process: unlocking would free the slot of another thread
        if self.lock(_SLOT_LOCKS + index):
            if self.fields[self.slot(index) + self.SERIAL] == serial:
                self.fields[self.slot(index) + self.SERIAL] = (serial + 1) % _WRAP
            self.unlock(_SLOT_LOCKS + index)
        del self._own[index]

    def take_slot(self, kind: int, pid: int, priority: int, tenant: str) -> tuple[int, int] | None:
        """Allocate a slot for this process; return its index and serial, or None if all are in use. Any thread."""
        claim = object()
        for index in range(SLOTS):
            if self._own.setdefault(index, claim) is not claim:
                continue
            try:
                if self.lock(_SLOT_LOCKS + index):
                    return index, self.fill_slot(index, kind, pid, priority, tenant)
            except BaseException:
                self.unlock(_SLOT_LOCKS + index)
                del self._own[index]
                raise
            del self._own[index]
        return None

    def fill_slot(self, index: int, kind: int, pid: int, priority: int, tenant: str) -> int:
        """Write the program of a slot that this process owns; return the slot's new serial. A full memory fence.

        The gate of a lease is closed: two new leases must not overlap before an arbiter has seen them.
        """
        at = self.slot(index)
        serial = (self.fields[at + self.SERIAL] + 2) % _WRAP & ~1
        self.fields[at + self.SERIAL] = serial
        for word in (*range(self.BUDGET_NS, self.SERIAL), *range(self.SUCCESSOR, self.TENANT)):
            self.fields[at + word] = 0
        self.fields[at + self.GATE] = kind != self.TURN
        self.fields[at + self.KIND], self.fields[at + self.PID] = kind, pid
        self.fields[at + self.PRIORITY] = priority % _WRAP
        name = tenant.encode()[: NAME_BYTES - 1]
        self._map[8 * (at + self.TENANT) : 8 * (at + self.TENANT) + NAME_BYTES] = name.ljust(NAME_BYTES, b"\0")
        self.fields[at + self.SERIAL] = serial + 1
        self.ring()
        return serial + 1

    def keep_slot(self, index: int) -> bool:
        """Lock a slot of this process again. If another process has the slot, forget the slot and return False."""
        if self.lock(_SLOT_LOCKS + index):
            return True
        del self._own[index]
        return False

    def release_slot(self, index: int) -> None:
        """Free a slot of this process."""
        at = self.slot(index) + self.SERIAL
        self.fields[at] = (self.fields[at] | 1) + 1 & _WRAP - 1
        self.unlock(_SLOT_LOCKS + index)
        del self._own[index]
        self.ring()

    def tenant(self, index: int) -> str:
        """Return the tenant of a slot; its bytes may be invalid UTF-8."""
        at = 8 * (self.slot(index) + self.TENANT)
        return self._map[at : at + NAME_BYTES].split(b"\0")[0].decode(errors="replace") or "default"

    def tenants(self) -> set[str]:
        """Return the tenants of all slots. A free slot keeps the tenant of its last program."""
        serials = self.fields[TABLE // 8 + self.SERIAL :: SLOT_BYTES // 8].tolist()
        return {self.tenant(index) for index, serial in enumerate(serials) if serial}

    def named_process(self, index: int) -> int:
        """Return the process number in a slot, as in the program's container. The slot's owner may write any number."""
        return self.fields[self.slot(index) + self.PID] & 0x7FFFFFFF

    def priority(self, index: int) -> int:
        """Return the priority that the program of a slot requested."""
        word = self.fields[self.slot(index) + self.PRIORITY]
        return word - _WRAP if word >> 63 else word

    def set_gate(self, index: int, is_open: bool) -> None:
        """Open or close the gate of a slot, and wake its program. A full memory fence."""
        at = self.slot(index)
        self.fields[at + self.GATE] = is_open
        self.wake_slot(index, self.OPENED if is_open or self.fields[at + self.KIND] != self.TURN else self.CLOSED)

    def futex(self, index: int, word: int) -> int:
        """Return the value of the futex OPENED or CLOSED of a slot, for `wait_for_slot`."""
        return self._read_futex(self.slot(index) + word)

    def wait_for_slot(self, index: int, word: int, value: int, seconds: float) -> None:
        """Wait until a futex of a slot differs from `value`, a signal arrives, or `seconds` have passed."""
        self._wait(self.slot(index) + word, value, seconds)

    def wake_slot(self, index: int, word: int) -> None:
        """Change a futex of a slot, and wake the threads that wait for it. A full memory fence."""
        self._wake(self.slot(index) + word)
