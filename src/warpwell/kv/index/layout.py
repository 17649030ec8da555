"""The words that native code of a store works on, and epochs, which tell when replaced memory may be freed.

A store has one state block. Its pointers are replaced, never changed in place: a native reader enters an epoch,
loads a pointer, follows it, and leaves. Replaced memory is freed once every reader that may have seen it has left.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from ..._os import clock
from ...targets import device, private_block
from ...targets.primitives import SYSTEM, fetch_add, load_acquire, store_release
from ..log.format import KEY_LEN_SHIFT, SEGMENT_SHIFT
from ..native import compiled

# -- state block, in 64-bit words ------------------------------------------------------------------------------
S_TABLE = 0
"""Address of the index's table."""
S_SEGMENTS = 1
"""Address of the segment table."""
S_SCRATCH = 2
"""Address of the scratch buffers."""
S_EPOCH = 8
S_STRIPES = 16
"""Then `STRIPES` stripes of a cache line each, so that threads seldom count in the same one."""
STRIPES = 16

# -- stripe ----------------------------------------------------------------------------------------------------
C_READERS = 0
"""Two words: readers in even and in odd epochs."""
C_GETS = 2
C_HITS = 3
C_BYTES = 4
C_ERRORS = 5
STRIPE_WORDS = 8

STATE_WORDS = S_STRIPES + STRIPES * STRIPE_WORDS

# -- table of the index: header of 8 words, then slots of 4 -----------------------------------------------------
T_MASK = 0
T_USED = 1
"""Slots that were ever used, tombstones included."""
T_LIVE = 2
TABLE_HEADER = 64
SLOT = 32
"""Bytes of a slot: key0, key1, loc0, loc1."""
SLOT_KEY0 = 0
SLOT_KEY1 = 8
SLOT_LOC0 = 16
SLOT_LOC1 = 24

# -- segment table: the number of entries, padded to 8 words, then entries of 4 --------------------------------
SEGMENT_HEADER = 64
SEGMENT_ENTRY = 32
G_FD = 0
"""File descriptor plus 1; 0 where there is no such segment."""
G_BASE = 1
"""Address of the mapped file, 0 where it is not mapped."""
G_MAPPED = 2
"""Bytes that are mapped."""

# -- location (see `warpwell.kv.log.format`) -------------------------------------------------------------------
UNIT_SHIFT = 6
"""Offsets count units of 64 bytes."""
OFFSET_MASK = (1 << SEGMENT_SHIFT) - 1
SIZE_MASK = (1 << KEY_LEN_SHIFT) - 1

# -- scratch buffers: a line with a lock each, then the buffers ------------------------------------------------
SCRATCHES = 16
SCRATCH_BYTES = 65536

# -- pieces of a value -----------------------------------------------------------------------------------------
WITH_VERSION = 0x80
"""Option of a retrieve, our own: put the value's location behind the buffer unless it holds the whole value."""
VERSION_BYTES = 16
"""Of a location, which is written to `version_at`. It identifies a value of a key: a changed value has another one."""

INT64 = np.dtype(np.int64)
UINT8 = np.dtype(np.uint8)


@device
def version_at(buffer: int, nbytes: int) -> int:
    """Return where the location of a value stands whose piece is in a buffer of `nbytes` bytes."""
    return (buffer + nbytes + 7) & ~7


@device
def stripe_of(state: int, stripe: int) -> int:
    """Return the address of a stripe; any integer selects one."""
    return state + 8 * S_STRIPES + 8 * STRIPE_WORDS * (stripe & (STRIPES - 1))


@device
def enter(state: int, stripe: int) -> int:
    """Enter the current epoch and return it: memory reachable from the state block is not freed until `leave`."""
    readers = stripe_of(state, stripe)
    while True:
        epoch = load_acquire(state + 8 * S_EPOCH, SYSTEM)
        fetch_add(readers + 8 * (epoch & 1), 1, SYSTEM)
        # Whoever ends an epoch looks at this count by a read-modify-write, too: it either sees this one, or this
        # one sees that the epoch has ended.
        if load_acquire(state + 8 * S_EPOCH, SYSTEM) == epoch:
            return epoch
        fetch_add(readers + 8 * (epoch & 1), -1, SYSTEM)


@device
def leave(state: int, stripe: int, epoch: int) -> None:
    """Leave an epoch."""
    fetch_add(stripe_of(state, stripe) + 8 * (epoch & 1), -1, SYSTEM)


@device
def next_epoch(state: int) -> int:
    """Start the next epoch; return the old one. All readers must have left the epoch before (host, one thread)."""
    return fetch_add(state + 8 * S_EPOCH, 1, SYSTEM)


@device
def readers_in(state: int, epoch: int) -> int:
    """Return how many readers have not left an epoch."""
    total = 0
    for stripe in range(STRIPES):
        total += fetch_add(stripe_of(state, stripe) + 8 * (epoch & 1), 0, SYSTEM)
    return total


@device
def publish(state: int, index: int, address: int) -> None:
    """Replace a pointer of the state block."""
    store_release(state + 8 * index, address, SYSTEM)


class StoreState:
    """The state block of one store, and the memory to free once readers have left.

    Attributes
    ----------
    address : int
        Of the state block.
    """

    def __init__(self) -> None:
        self._block = private_block(8 * STATE_WORDS)
        self._scratch = private_block(SCRATCHES * (64 + SCRATCH_BYTES))
        self.address = self._block.address
        self.words = self._block.words
        self.words[S_SCRATCH] = self._scratch.address
        # Only tried, never waited for: a signal handler or a finalizer may come while its own thread has it.
        self._collecting = threading.Lock()
        self._next: deque[Callable[[], None]] = deque()
        self._waiting: list[Callable[[], None]] = []
        self._epoch = 0

    def retire(self, give_back: Callable[[], None]) -> None:
        """Call `give_back` once every reader that is inside now has left; new readers cannot reach the memory."""
        self._next.append(give_back)
        self.collect()

    def collect(self) -> bool:
        """Free the memory that no reader uses any more; return True if none is left to free. Never blocks.

        Does nothing while another thread, or an interrupted call of this thread, is doing so.
        """
        flip, count = compiled(next_epoch), compiled(readers_in)
        if not self._collecting.acquire(blocking=False):
            return False
        try:
            for _ in range(2):
                if self._waiting and count(self.address, self._epoch) == 0:
                    done, self._waiting = self._waiting, []
                    for give_back in done:
                        give_back()
                if not self._waiting and self._next:
                    number = len(self._next)  # what is retired from here on waits for the next epoch
                    self._epoch = int(flip(self.address))
                    self._waiting = [self._next.popleft() for _ in range(number)]
            return not self._waiting and not self._next
        finally:
            self._collecting.release()

    def drain(self, seconds: float = 5.0) -> bool:
        """Wait until all retired memory is freed; return False if readers stay inside."""
        end = clock.monotonic() + seconds
        pause = 1e-5
        while not self.collect():
            if clock.monotonic() > end:
                return False
            clock.sleep(pause)
            pause = min(2 * pause, 0.01)
        return True

    def forked(self) -> None:
        """Forget the readers that were inside when this process was forked: their threads exist only in the parent."""
        self._collecting = threading.Lock()
        self.words[S_STRIPES:].reshape(STRIPES, STRIPE_WORDS)[:, C_READERS : C_READERS + 2] = 0
        self._scratch.words[:: (64 + SCRATCH_BYTES) // 8] = 0  # the buffers' locks

    def counters(self) -> dict[str, int]:
        """Return the sums of the stripes: gets, hits, bytes, errors."""
        lines = self.words[S_STRIPES:].reshape(STRIPES, STRIPE_WORDS).sum(axis=0)
        return {
            "gets": int(lines[C_GETS]),
            "hits": int(lines[C_HITS]),
            "bytes": int(lines[C_BYTES]),
            "errors": int(lines[C_ERRORS]),
        }
