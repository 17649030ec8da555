"""PieceReaders: threads that read the pieces of batches in native code, without Python's interpreter lock.

A batch is a *job* in one of `SLOTS` places. Its word `J_LEFT` counts the pieces that no thread has claimed: a thread
that lowers it from k > 0 has claimed piece k - 1. The word is stored last when a job is published, and all decrements
follow this store, so a thread that has claimed a piece sees the job's other words. A place is used again when `J_DONE`
says that all pieces of its job were read. A thread that comes too late lowers a count that is not positive, which the
next job replaces.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from ...targets import device, private_block
from ...targets.primitives import SYSTEM, backoff, clock_ns, fetch_add, load_acquire, load_relaxed, store_release
from ..index.reader import read_many
from ..native import compiled

SLOTS = 32
JOB_BYTES = 128
J_LEFT = 0
"""Pieces that no thread has taken, or a number that is not positive."""
J_PIECES = 1
J_COUNT = 2
J_STATE = 3
"""Address of the store's state block."""
J_KEYS = 4
J_LENGTHS = 5
"""Addresses as for `read_many`; so are the following."""
J_LOCATIONS = 6
J_ROWS = 7
J_ROW_BYTES = 8
J_FOUND = 9
J_DONE = 10
"""Address of two words: pieces that were read, and keys that could not be read."""

THREADS = max(1, min(8, (os.cpu_count() or 2) // 2))
"""As many threads look for jobs all the time while batches are read."""
SPIN_NS = 300_000
"""How long a thread without work looks for a job all the time; then it sleeps 50 us between two looks."""
IDLE_NS = 20_000_000
"""How long a thread without work stays in native code."""


@device
def read_pieces(job: int) -> int:
    """Read pieces of a job until all are taken (any host thread); return how many this thread read."""
    pieces_read = 0
    while load_relaxed(job + 8 * J_LEFT, SYSTEM) > 0:
        piece = fetch_add(job + 8 * J_LEFT, -1, SYSTEM) - 1
        if piece < 0:
            return pieces_read
        count = load_relaxed(job + 8 * J_COUNT, SYSTEM)
        pieces = load_relaxed(job + 8 * J_PIECES, SYSTEM)
        first = count * piece // pieces
        number = count * (piece + 1) // pieces - first
        lengths = load_relaxed(job + 8 * J_LENGTHS, SYSTEM)
        keys = load_relaxed(job + 8 * J_KEYS, SYSTEM) + 8 * first
        if lengths != 0:
            keys += 8 * first
            lengths += first
        row_bytes = load_relaxed(job + 8 * J_ROW_BYTES, SYSTEM)
        done = load_relaxed(job + 8 * J_DONE, SYSTEM)
        wrong = read_many(
            load_relaxed(job + 8 * J_STATE, SYSTEM),
            piece,
            keys,
            lengths,
            number,
            load_relaxed(job + 8 * J_LOCATIONS, SYSTEM) + 16 * first,
            load_relaxed(job + 8 * J_ROWS, SYSTEM) + row_bytes * first,
            0,
            row_bytes,
            load_relaxed(job + 8 * J_FOUND, SYSTEM) + first,
        )
        fetch_add(done + 8, wrong, SYSTEM)
        fetch_add(done, 1, SYSTEM)
        pieces_read += 1
    return pieces_read


@device
def look_again(waited: int) -> None:
    """Wait a little: shorter if the thread has waited less than `SPIN_NS`."""
    if waited < SPIN_NS:
        backoff(0)
    else:
        backoff(25)


def read_jobs(jobs: int) -> int:
    """Read pieces of all jobs; return 0 when all have been claimed for `IDLE_NS` (a thread of `PieceReaders`)."""
    since = clock_ns()
    waited = 0
    while waited < IDLE_NS:
        pieces_read = 0
        for slot in range(SLOTS):
            pieces_read += read_pieces(jobs + JOB_BYTES * slot)
        if pieces_read > 0:
            since = clock_ns()
        else:
            look_again(waited)
        waited = clock_ns() - since
    return 0


def wait_for_pieces(done: int, pieces: int, nanoseconds: int) -> int:
    """Wait until `pieces` pieces were read and return 1, or 0 if the time is over."""
    begin = clock_ns()
    while load_acquire(done, SYSTEM) < pieces:
        waited = clock_ns() - begin
        if waited > nanoseconds:
            return 0
        look_again(waited)
    return 1


class PieceReaders:
    """The threads of this process, which all stores share."""

    def __init__(self) -> None:
        self._read_jobs = compiled(read_jobs)
        compiled(read_pieces)
        self._block = private_block(SLOTS * JOB_BYTES)
        self._jobs = self._block.words.reshape(SLOTS, JOB_BYTES // 8)
        self._free = list(range(SLOTS))
        self._lock = threading.Lock()
        self._wake = threading.Semaphore(0)
        self._threads = self._awake = 0

    def start(self, pieces: int, arguments: list[int]) -> int:
        """Publish a job with `arguments` from word `J_COUNT` on; return its place, or -1 if no place is free."""
        with self._lock:
            if not self._free:
                return -1
            slot = self._free.pop()
            job = self._jobs[slot]
            job[J_PIECES] = pieces
            job[J_COUNT : J_COUNT + len(arguments)] = arguments
            compiled(publish)(self.address_of(slot), pieces)
            while self._awake < min(THREADS, pieces):
                if self._threads <= self._awake:
                    try:
                        threading.Thread(target=self._work, name="warpwell-kv-pieces", daemon=True).start()
                    except RuntimeError:  # Python is shutting down: `GatheredBatch.settle` reads the batch
                        break
                    self._threads += 1
                else:
                    self._wake.release()
                self._awake += 1
            return slot

    def address_of(self, slot: int) -> int:
        """Return the address of a job."""
        return self._block.address + JOB_BYTES * slot

    def give_back(self, slot: int) -> None:
        """Let others use the place of a job whose pieces were all read."""
        with self._lock:
            self._free.append(slot)

    def _work(self) -> None:
        while True:
            self._read_jobs(self._block.address)
            with self._lock:
                if (self._jobs[:, J_LEFT] > 0).any():
                    continue
                self._awake -= 1
            self._wake.acquire()


def publish(job: int, pieces: int) -> int:
    """Publish a job after its other words."""
    store_release(job + 8 * J_LEFT, pieces, SYSTEM)
    return 0


_readers: list[Any] = []
os.register_at_fork(after_in_child=_readers.clear)  # its threads are the parent's
_making = threading.Lock()


def piece_readers() -> PieceReaders:
    """Return the threads of this process."""
    while not _readers:
        with _making:
            if not _readers:
                _readers.append(PieceReaders())
    return _readers[0]  # type: ignore[no-any-return]
