"""GatheredBatch: a batch whose values host threads read into pinned memory, from which the GPU copies them.

The batch's stream waits until all pieces were read, and then copies, without Python code in between. No GPU threads are
involved, so a concurrent kernel is not slowed down. Kernels use the queues instead, because they know their keys only
while they run.

The I/O threads of the process read in native code, without Python's interpreter lock. To them a batch is a *job* in one
of `SLOTS` slots. Its word `J_LEFT` counts the pieces that no thread has claimed: a thread that lowers it from k > 0 has
claimed piece k - 1. The word is stored last when a job is published, and all decrements follow this store, so a thread
that has claimed a piece sees the job's other words. A slot is reused when the words at `J_DONE` show that all pieces of
its job were read. A thread that is too late lowers a count that is not positive, and the next job replaces this
count.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ... import errors
from ..._future import require_same_process
from ..._os import clock, uninterrupted
from ...array import DeviceArray
from ...storage import WorkerSlots, current_io_threads
from ...targets import device, private_block
from ...targets.primitives import (
    SYSTEM,
    backoff,
    clock_ns,
    fetch_add,
    load_acquire,
    load_relaxed,
    store_relaxed,
    store_release,
)
from ..index.index import addresses
from ..index.reader import read_many
from ..keys import as_keys
from ..native import address_of, compiled
from ..schema import Schema
from .engine import Engine

PIECE_KEYS = 256
"""Minimum number of keys of a piece: a smaller piece costs more time than it saves."""
MAX_PIECES = 32
DONE_BYTES = 256
"""Size of the counts at the start of a space: read pieces, and keys that could not be read."""
_MAX_SPARE = 2
"""Number of free spaces of a size that are kept when a space of another size is allocated."""


class BatchSpace:
    """Memory of one batch in device memory and in pinned memory, with the same layout.

    Attributes
    ----------
    found_at, rows_at : int
        Offset of a byte for each key, 1 if it was found, and offset of the rows.
    """

    found_at = DONE_BYTES

    def __init__(self, engine: Engine, capacity: int, stride: int) -> None:
        self.capacity, self.stride = capacity, stride
        self.rows_at = self.found_at + -(-capacity // 256) * 256
        self.nbytes = self.rows_at + capacity * stride
        self.used = False
        self.device = engine.memory.allocate(self.nbytes)
        self.host = engine.memory.allocate_shared(self.nbytes)


class BatchSpaces:
    """Free spaces of an engine."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, int], list[BatchSpace]] = {}

    def acquire(self, engine: Engine, count: int, stride: int) -> BatchSpace:
        """Return a space for `count` rows; allocate one if none is free."""
        capacity = 1 << max(5, (count - 1).bit_length())
        free = self._free.setdefault((capacity, stride), [])
        with contextlib.suppress(IndexError):
            return free.pop()
        # batches of other sizes may not occur again
        for size, spaces in list(self._free.items()):
            if size != (capacity, stride):
                del spaces[_MAX_SPARE:]
        with engine.stream.on_device():
            return BatchSpace(engine, capacity, stride)

    def release(self, space: BatchSpace) -> None:
        """Keep a space for the next batch."""
        self._free[space.capacity, space.stride].append(space)


class Lease:
    """Keeps a space in use: the arrays of a batch refer to it, and the space is released with the last of them."""

    def __init__(self, spaces: BatchSpaces, space: BatchSpace) -> None:
        self.space = space
        weakref.finalize(self, spaces.release, space).atexit = False


class GatheredBatch:
    """A batch in flight; ``wait()`` returns the same result as `Store.get_many`, in device memory.

    The memory of the arrays is reused once all of them are dropped, in the order of the default stream: if you read
    them in another stream, keep them until that stream is done. The batch ends before its store is closed, so `wait`
    may follow.

    Parameters
    ----------
    store : DeviceStore
    spaces : BatchSpaces
    keys : array or iterable
        As for `Store.get_many`.
    names : sequence of str or None
        The fields to return, by default all.
    """

    def __init__(self, store: Any, spaces: BatchSpaces, keys: Any, names: Sequence[str] | None) -> None:
        self._engine: Engine = store._engine
        self._engine.check()
        self._engine.reap()
        self._keys = as_keys(keys).copied()
        self.count = n = self._keys.size
        self._schema, self._names, self._read_again = store.schema, names, store._records.rows
        self._failed: Exception | None = None
        self._result: Any = None
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._lease = Lease(spaces, spaces.acquire(self._engine, max(1, n), self._schema.nbytes))
        space, stream = self._lease.space, self._engine.stream
        base = space.host.address
        space.host.words[:2] = 0
        self._locations = np.empty((n, 2), np.int64)
        self._pieces = max(1, min(MAX_PIECES, n // PIECE_KEYS))
        arguments = [
            n,
            store._records.state.address,
            *addresses(self._keys),
            self._locations.ctypes.data,
            base + space.rows_at,
            space.stride,
            base + space.found_at,
            base,
        ]
        self._readers = piece_readers()
        self._is_copied: Callable[[], bool] = lambda: True
        # `engine.gathered` keeps the memory that the threads and the stream use, until the copy has ended. The batch is
        # added after its copy is in the stream: otherwise another thread could end the batch too early.
        with uninterrupted():
            self._slot = self._readers.start(self._pieces, arguments)
            try:
                if space.used:
                    # a kernel may still read the arrays of the previous batch
                    stream.after_default()
                space.used = True
                stream.wait_for_word(base, self._pieces)
                self._copy()
            finally:
                self._engine.gathered.append(self)

    def _copy(self) -> None:
        space = self._lease.space
        nbytes = space.rows_at - space.found_at + self.count * space.stride
        stream = self._engine.stream
        stream.copy(space.device.address + space.found_at, space.host.address + space.found_at, nbytes)
        self._is_copied = stream.mark()

    def done(self) -> bool:
        """Return whether all values have arrived, so that `wait` returns at once."""
        return self._pid != os.getpid() or (self._all_read(0) and self._is_copied())

    def _all_read(self, nanoseconds: int) -> bool:
        return bool(compiled(wait_for_pieces)(self._lease.space.host.address, self._pieces, nanoseconds))

    def wait(self) -> tuple[Any, Any]:
        """Wait for the values and return them (may be called again).

        Returns
        -------
        batch : dict of arrays
            Fields [N, ...] of the schema, on the device (zeros for absent keys).
        found : array
            bool [N], on the device.

        Raises
        ------
        CorruptionError, MediumError
            A value cannot be read, or its checksum is wrong.
        ForkError
            Another process, from which this one was forked, started the batch.
        """
        self.wait_until_ended()
        if self._failed is not None:
            raise self._failed
        if self._result is None:
            self._result = fields_of(self._lease, self._schema, self.count, self._names)
        return self._result  # type: ignore[no-any-return]

    def read(self) -> None:
        """Read the pieces that no thread has claimed, and wait until all are read."""
        slot = self._slot  # another thread may release it; then this thread helps the next batch
        if slot >= 0:
            compiled(read_pieces)(self._readers.address_of(slot))
        while not self._all_read(10**7):
            pass

    def wait_until_ended(self) -> None:
        """Wait until the batch has ended; `wait` raises its errors."""
        require_same_process(self._pid, "this batch")
        self.read()
        spins = 0
        while not self._is_copied():
            spins += 1
            if spins > 100:
                clock.sleep(5e-5)
        with self._lock:
            control_words = self._lease.space.host.words
            if control_words[1]:
                # Read the values again, before the store is closed: the read succeeds, or raises the error.
                try:
                    self._repair()
                except (errors.CorruptionError, errors.MediumError) as error:
                    self._failed = error
                control_words[1] = 0
        self._engine.forget_gathered(self)

    def _repair(self) -> None:
        space, n = self._lease.space, self.count
        raw = space.host.view(np.dtype(np.uint8))
        rows = raw[space.rows_at :][: n * space.stride]
        _, raw[space.found_at :][:n] = self._read_again(self._keys, space.stride, rows.reshape(n, space.stride))
        self._copy()
        self._engine.stream.wait()

    def retire(self) -> None:
        """Release the slot of the job (once, by `Engine.forget_gathered`)."""
        slot, self._slot = self._slot, -1
        if slot >= 0:
            self._readers.release(slot)


def fields_of(
    lease: Lease, schema: Schema, count: int, names: Sequence[str] | None
) -> tuple[dict[str, DeviceArray], DeviceArray]:
    """Return fields of the records in a space in GPU memory, by default all, and which keys were found."""
    space = lease.space
    fields = {
        field.name: view_of(lease, space.rows_at + field.offset, (count, *field.shape), field.dtype, space.stride)
        for field in schema.fields
        if names is None or field.name in names
    }
    return fields, view_of(lease, space.found_at, (count,), np.dtype(np.bool_), 1)


def view_of(lease: Lease, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any], pitch: int) -> DeviceArray:
    """Return rows of a space in GPU memory as an array, which keeps the space in use."""
    strides = [dtype.itemsize]
    for extent in reversed(shape[2:]):
        strides.insert(0, strides[0] * extent)
    steps = (pitch, *strides) if len(shape) > 1 else (pitch,)
    return DeviceArray(lease.space.device._owner, shape, dtype, offset=offset, strides=steps, keep=lease)


# -- the threads ------------------------------------------------------------------------------------------------

SLOTS = 32
JOB_BYTES = 128
J_LEFT = 0
"""Number of pieces that no thread has claimed; it can become negative."""
J_PIECES = 1
J_COUNT = 2
J_STATE = 3
"""Address of the store's state block."""
J_KEYS = 4
J_LENGTHS = 5
"""Addresses, in this word and the next ones, as for `read_many`."""
J_LOCATIONS = 6
J_ROWS = 7
J_ROW_BYTES = 8
J_FOUND = 9
J_DONE = 10
"""Address of two words: pieces that were read, and keys that could not be read."""

THREADS = max(1, min(8, (os.cpu_count() or 2) // 2))
"""Number of threads that poll for jobs while batches are read."""
SPIN_NS = 300_000
"""Time for which a thread without work polls without a pause; after that it sleeps 50 us between polls."""
IDLE_NS = 20_000_000
"""Time after which a thread without work leaves native code."""
STUCK_NS = 100_000_000
"""Maximum time of the pieces of a job, unless a drive does not answer: 256 cold values take about 10 ms."""
MAX_THREADS = 64
"""Maximum number of threads whose times are recorded; the process has no more I/O threads."""


@device
def read_pieces(job: int) -> int:
    """Read pieces of a job until all are claimed (any host thread); return how many this thread read."""
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
def pause(waited: int) -> None:
    """Pause between two polls: briefly if the thread has waited less than `SPIN_NS`, else longer."""
    if waited < SPIN_NS:
        backoff(0)
    else:
        backoff(25)


def read_jobs(jobs: int, start: int) -> int:
    """Read pieces of all jobs; return 0 when all have been claimed for `IDLE_NS` (a thread of `PieceReaders`).

    The word at `start` has the time at which the thread began with the pieces of a job, or 0 while it polls for a job.
    """
    since = clock_ns()
    waited = 0
    while waited < IDLE_NS:
        pieces_read = 0
        for slot in range(SLOTS):
            if load_relaxed(jobs + JOB_BYTES * slot + 8 * J_LEFT, SYSTEM) > 0:
                store_relaxed(start, clock_ns(), SYSTEM)
                pieces_read += read_pieces(jobs + JOB_BYTES * slot)
                store_relaxed(start, 0, SYSTEM)
        if pieces_read > 0:
            since = clock_ns()
        else:
            pause(waited)
        waited = clock_ns() - since
    return 0


def wait_for_pieces(done: int, pieces: int, nanoseconds: int) -> int:
    """Wait until `pieces` pieces were read and return 1, or 0 after the timeout."""
    begin = clock_ns()
    while load_acquire(done, SYSTEM) < pieces:
        waited = clock_ns() - begin
        if waited > nanoseconds:
            return 0
        pause(waited)
    return 1


def publish(job: int, pieces: int) -> int:
    """Publish a job after its other words."""
    store_release(job + 8 * J_LEFT, pieces, SYSTEM)
    return 0


class PieceReaders:
    """The jobs of this process, which all stores share; I/O threads of the process read their pieces."""

    def __init__(self) -> None:
        self._read_jobs = compiled(read_jobs)
        compiled(read_pieces)
        self._block = private_block(SLOTS * JOB_BYTES + 8 * MAX_THREADS)
        self._jobs = self._block.words[: SLOTS * JOB_BYTES // 8].reshape(SLOTS, JOB_BYTES // 8)
        self._starts = self._block.words[SLOTS * JOB_BYTES // 8 :]
        self._free = list(range(SLOTS))
        self._workers = WorkerSlots(self._count_needed, self._serve, lambda: None)

    def start(self, pieces: int, arguments: list[int]) -> int:
        """Publish a job with `arguments` from word `J_COUNT` on; return its slot.

        If no slot is free, or no thread can be started, this thread reads all pieces. Without a slot it returns -1.
        """
        try:
            slot = self._free.pop()
            job = self._jobs[slot]
        except IndexError:
            slot, job = -1, np.empty(JOB_BYTES // 8, np.int64)
        job[J_PIECES] = pieces
        job[J_COUNT : J_COUNT + len(arguments)] = arguments
        compiled(publish)(job.ctypes.data, pieces)
        try:
            if slot >= 0:
                current_io_threads().submit(self._workers)
                return slot
        except RuntimeError:  # the system allows no more threads, or Python is shutting down
            pass
        compiled(read_pieces)(job.ctypes.data)
        return slot

    def address_of(self, slot: int) -> int:
        """Return the address of a job."""
        return self._block.address + JOB_BYTES * slot

    def release(self, slot: int) -> None:
        """Let other batches use the slot of a job whose pieces were all read."""
        self._free.append(slot)

    def _count_needed(self) -> int:
        """Return the number of threads to run. Threads that poll for jobs are not surplus: they leave after `IDLE_NS`.

        A thread whose piece takes long may wait for a drive that does not answer. It does not count as one of
        `THREADS`, because other stores need another thread.
        """
        starts = self._starts[self._starts > 0]
        stuck = int(np.count_nonzero(starts < clock.monotonic_ns() - STUCK_NS))
        unclaimed = int(np.maximum(self._jobs[:, J_LEFT], 0).sum())
        needed = min(THREADS + stuck, len(starts) + unclaimed)
        return max(len(self._workers.occupied), needed)

    def _serve(self, slot: int) -> None:
        start = self._starts[slot % MAX_THREADS :]
        self._read_jobs(self._block.address, address_of(start))


@functools.cache
def piece_readers() -> PieceReaders:
    """Return the jobs of this process."""
    return PieceReaders()


os.register_at_fork(after_in_child=piece_readers.cache_clear)  # the threads exist only in the parent
