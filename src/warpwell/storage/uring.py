"""Ring: io_uring, through which one thread has many reads and writes of a file in flight.

io_uring is used if the kernel allows it, and if transfers bypass the page cache: other transfers complete at once, and
would gain nothing. `allowed` probes io_uring in a child process, because some sandboxes kill the caller. Any I/O thread
queues commands, submits them to the kernel, and takes completions, so the ring is not bound to one thread. If the ring
cannot carry a command, because it is not aligned or no slot is free, the thread transfers it itself.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from .._os import clock, probe
from ..nvme import READ
from ..targets import device, private_block
from ..targets.primitives import (
    SYSTEM,
    call_foreign,
    exchange,
    fence,
    i64,
    load_acquire_as,
    load_relaxed,
    store_relaxed,
    store_relaxed_as,
    store_release,
)
from .commands import (
    R_BUFFER,
    R_NBYTES,
    R_OFFSET,
    R_OP,
    SlotTable,
    lock,
    record_of,
    unlock,
    word,
)

ENTRIES = 1024
"""Maximum number of commands of one file in flight."""
BATCH = 16
"""Number of queued commands that are submitted at once; polls for completions submit fewer."""

SETUP, ENTER = 425, 426
"""System calls, on every processor."""
OP_READ, OP_WRITE = 22, 23
CLAMP = 1 << 4
SINGLE_MMAP, NO_DROP = 1, 2
AT_ENTRIES = 0x10000000

U4 = np.dtype(np.uint32)

# -- record of a ring; words for which threads contend have their own cache lines --------------------------------
G_SYSCALL = 0
G_FD = 1
G_SQ_HEAD = 2
G_SQ_TAIL = 3
G_SQ_MASK = 4
G_ENTRIES = 5
G_CQ_HEAD = 6
G_CQ_TAIL = 7
G_CQ_MASK = 8
G_COMPLETIONS = 9
G_SLOTS = 10
G_QUEUE_LOCK = 16
G_ENTERING = 32
G_REAP_LOCK = 48
G_WORDS = 64


class Ring:
    """The rings of one file, mapped from the kernel.

    Raises
    ------
    OSError
        The kernel refuses.
    """

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        params = np.zeros(30, np.uint32)
        params[2] = CLAMP
        self._fd = int(libc.syscall(SETUP, ENTRIES, ctypes.c_void_p(params.ctypes.data)))
        if self._fd < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"io_uring_setup: {os.strerror(code)}")
        self._maps: list[mmap.mmap] = []
        try:
            if int(params[5]) & (SINGLE_MMAP | NO_DROP) != SINGLE_MMAP | NO_DROP:
                raise OSError("io_uring is older than Linux 5.5")
            submissions, completions = params[10:20].astype(int), params[20:30].astype(int)
            count = int(params[0])
            rings = self._map(max(submissions[6] + 4 * count, completions[5] + 16 * int(params[1])), 0)
            self._table = SlotTable(count)
            self._block = private_block(8 * G_WORDS)
            words = self._block.words
            words[G_SYSCALL] = ctypes.cast(libc["syscall"], ctypes.c_void_p).value or 0
            words[G_FD] = self._fd
            words[G_SQ_HEAD], words[G_SQ_TAIL] = rings + submissions[0], rings + submissions[1]
            words[G_CQ_HEAD], words[G_CQ_TAIL] = rings + completions[0], rings + completions[1]
            words[G_SQ_MASK], words[G_CQ_MASK] = count - 1, int(params[1]) - 1
            words[G_COMPLETIONS] = rings + completions[5]
            words[G_ENTRIES] = self._map(64 * count, AT_ENTRIES)
            words[G_SLOTS] = self._table.address
            order = np.frombuffer(self._maps[0], np.uint32, count, int(submissions[6]))
            order[:] = np.arange(count)  # entry k always has position k
        except BaseException:
            self.unmap()
            raise

    @property
    def address(self) -> int:
        """Address of the ring's record."""
        return self._block.address

    def _map(self, nbytes: int, offset: int) -> int:
        mapped = mmap.mmap(
            self._fd, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ | mmap.PROT_WRITE, offset=offset
        )
        self._maps.append(mapped)
        return int(np.frombuffer(mapped, np.uint8).ctypes.data)

    @property
    def in_flight(self) -> int:
        """Number of commands that the kernel or the ring has (a snapshot)."""
        return self._table.taken

    def drain(self, complete: Callable[[], bool], seconds: float) -> None:
        """Wait until no command is in flight, and call `complete` until then."""
        deadline = clock.monotonic() + seconds
        while self.in_flight and clock.monotonic() < deadline:
            if not complete():
                clock.sleep(0.0005)

    def close(self) -> None:
        """Unmap the rings; if commands are in flight, the rings stay mapped and the descriptor open."""
        if self.in_flight:
            _left.append(self)
        else:
            self.unmap()

    def unmap(self) -> None:
        """Unmap the rings and close the descriptor; a parent process may continue to use them."""
        self._maps.clear()  # the mappings end with their objects
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


_left: list[Ring] = []

_TRY_IT = f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
ring = libc.syscall({SETUP}, 4, ctypes.create_string_buffer(120))
if ring < 0 or libc.syscall({ENTER}, ring, 0, 0, 0, None, 0) < 0:
    print("io_uring:", os.strerror(ctypes.get_errno()))
    raise SystemExit(1)
"""


@functools.cache
def allowed() -> str | None:
    """Return None if this process may use io_uring, else the reason why not (probed once a process)."""
    try:
        switch = int(Path("/proc/sys/kernel/io_uring_disabled").read_text())
    except (OSError, ValueError):
        switch = 0
    if switch == 2:
        return "kernel.io_uring_disabled is 2"
    return probe(_TRY_IT)


# -- device code -----------------------------------------------------------------------------------------------


@device
def at_index(address: int) -> int:
    """Load an index of a ring; later loads see the entries before it."""
    return i64(load_acquire_as(address, U4))


@device
def move_index(address: int, value: int) -> None:
    """Store an index of a ring, after the entries before it."""
    fence(SYSTEM)
    store_relaxed_as(address, value & 0xFFFFFFFF, U4)


@device
def queued(ring: int) -> int:
    """Return the number of commands that the kernel has not taken yet (a snapshot)."""
    head = at_index(word(ring, G_SQ_HEAD))
    return (at_index(word(ring, G_SQ_TAIL)) - head) & 0xFFFFFFFF


@device
def queue(ring: int, fd: int, slot: int) -> None:
    """Queue the command of a slot. There is an entry for each slot, so the queue is never full."""
    record = record_of(word(ring, G_SLOTS), slot)
    code = OP_WRITE
    if word(record, R_OP) == READ:
        code = OP_READ
    lock(ring + 8 * G_QUEUE_LOCK)
    tail = at_index(word(ring, G_SQ_TAIL))
    entry = word(ring, G_ENTRIES) + 64 * (tail & word(ring, G_SQ_MASK))
    store_relaxed(entry, code | (fd << 32), SYSTEM)
    store_relaxed(entry + 8, word(record, R_OFFSET), SYSTEM)
    store_relaxed(entry + 16, word(record, R_BUFFER), SYSTEM)
    store_relaxed(entry + 24, word(record, R_NBYTES), SYSTEM)
    store_relaxed(entry + 32, slot, SYSTEM)
    store_relaxed(entry + 40, 0, SYSTEM)
    store_relaxed(entry + 48, 0, SYSTEM)
    store_relaxed(entry + 56, 0, SYSTEM)
    move_index(word(ring, G_SQ_TAIL), tail + 1)
    unlock(ring + 8 * G_QUEUE_LOCK)


@device
def submit(ring: int) -> None:
    """Submit queued commands to the kernel, unless another thread does; the next call submits the rejected ones."""
    flag = ring + 8 * G_ENTERING
    if load_relaxed(flag, SYSTEM) != 0:
        return
    waiting = queued(ring)
    if waiting == 0 or exchange(flag, 1, SYSTEM) != 0:
        return
    call_foreign(word(ring, G_SYSCALL), ENTER, word(ring, G_FD), waiting, 0, 0, 0, 0)
    store_release(flag, 0, SYSTEM)


@device
def poll_completions(ring: int) -> int:
    """Take a completion: return ``slot << 32 | result & 0xFFFFFFFF``, or -1 without a completion."""
    head_at = word(ring, G_CQ_HEAD)
    tail_at = word(ring, G_CQ_TAIL)
    if at_index(head_at) == at_index(tail_at):
        return -1
    held = ring + 8 * G_REAP_LOCK
    if load_relaxed(held, SYSTEM) != 0 or exchange(held, 1, SYSTEM) != 0:
        return -1
    head = at_index(head_at)
    found = -1
    if head != at_index(tail_at):
        entry = word(ring, G_COMPLETIONS) + 16 * (head & word(ring, G_CQ_MASK))
        found = (load_relaxed(entry, SYSTEM) << 32) | (load_relaxed(entry + 8, SYSTEM) & 0xFFFFFFFF)
        move_index(head_at, head + 1)
    unlock(held)
    return found
