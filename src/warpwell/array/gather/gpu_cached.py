"""`GpuCachedRows`: rows of arrays behind a cache, gathered to memory of a GPU.

1. A kernel copies the rows whose pages are in the cache and lists the missing ones.
2. The missing rows of a read-only medium in host memory (tmpfs, too) are copied from there to pinned memory by service
   threads, slot after slot. A copy engine copies each full slot to the device, where a kernel copies the rows to the
   result. The cache does not change.
3. The pages of other missing rows are read into the cache in batches, and a kernel copies the rows
   (`warpwell.array.gather.page_batches`): changes of other kernels are seen.

All of it is work of one stream, and of one gather at a time for each array.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ..._os import clock
from ...targets import native, stream_on
from ...targets.primitives import DEVICE, SYSTEM, backoff, clock_ns, div, fetch_add, load_acquire, load_relaxed, rem
from . import kernels
from .gpu import HEADER_BYTES, IndexBuffer, acquire_buffer, release_buffer
from .host import W_STOP, RowCopy, copy_range, require_in_range, row_bytes, word
from .page_batches import CachedRows
from .tasks import ChunkedTask, owned, worker_group
from .tensors import Indices, Tensor

MAX_LISTED_ROWS = 1 << 21
"""Maximum rows of a launch that lists missing rows, which bounds the list."""
SLOTS = 4
"""Slots of pinned memory: some are filled while others are copied."""
SLOT_CHUNKS = 32
"""Chunks of a slot, unless rows are longer than a chunk."""
CHUNK_BYTES = {"cuda": 512 << 10}
"""Bytes of a chunk: all slots together should fit the last-level cache of a processor. Elsewhere `SMALL_CHUNK`."""
SMALL_CHUNK = 256
CHUNK_ROWS = 2048
"""Maximum rows of a chunk: to find a row in memory takes as long as to copy some bytes of it."""
THREAD_BYTES, THREAD_ROWS = 1 << 20, 1 << 13
"""Bytes, or rows, for each thread if one slot holds all rows: a thread starts in the time that it copies them."""
MAX_COPIED_ROW = 16 << 20
"""Maximum bytes of a row that is copied from host memory: a slot has at least one row."""
SLOT_TIMEOUT_NS = 60 * 10**9
"""Longest wait for a free slot."""
POLL_SECONDS = 20e-6

S_NEXT, S_SENT, S_ROWS, S_CHUNK_ROWS, S_SLOT_CHUNKS, S_SLOT_BYTES, S_FILLED = range(7)
"""Words of slots: the next chunk; number of slots that the device has received; number of rows; rows of a chunk; chunks
of a slot; bytes of a slot; and from the last on, for each slot, the number of its rows that are copied."""


class GpuCachedRows(CachedRows):
    """Copies rows of an array behind a cache to memory of its device, after a point of the caller's stream."""

    def __init__(self, array: Any, indices: Indices, out: int, point: Any) -> None:
        super().__init__(array, indices, out)
        # one thread at a time uses this object: the worker group of the array has one thread
        self._stream = owned(array._part, "stream", lambda: stream_on(array.device))
        self._point = point
        self._from_host_bytes = 0

    @property
    def bytes_read(self) -> int:
        return super().bytes_read + self._from_host_bytes

    def run(self, chunk: int) -> None:
        """Copy row ``indices[k]`` to row k; return when it is done."""
        indices: Indices = self._rows
        array, stream, n = self._array, self._stream, indices.size
        stream.after(self._point)
        rows = acquire_buffer(array.device, 8 * n)
        missing = acquire_buffer(array.device, 8 * kernels.record_words(min(n, MAX_LISTED_ROWS))[1])
        try:
            if not n or not self._nbytes or not array.shape[0]:
                require_in_range(array, rows.to_host(stream, indices))
                return
            with array.cache.layout_lock():  # opening another array on the cache would move the frames
                array.cache.require_no_suspects(array._nsid)
                self._copy_indices(indices, rows, missing)
        finally:
            stream.wait()
            release_buffer(rows)
            release_buffer(missing)

    def _copy_indices(self, indices: Indices, rows: IndexBuffer, missing: IndexBuffer) -> None:
        address = rows.to_device(self._stream, indices)
        host: Any = None if isinstance(indices, Tensor) else indices.reshape(-1)
        from_host = self._is_in_host_memory()
        for first in range(0, indices.size, MAX_LISTED_ROWS):
            n = min(MAX_LISTED_ROWS, indices.size - first)
            out_of_range, count = self._copy_present(
                address + first * indices.itemsize, indices.itemsize, n, self._out + first * self._nbytes, missing
            )
            if self._stopped:
                return
            if not count and not out_of_range:
                continue
            if host is None:
                host = rows.to_host(self._stream, indices)
            if out_of_range:
                require_in_range(self._array, host)
            if from_host and count == n:
                self._copy_from_host(host[first : first + n], None, first)
                continue
            list_at = missing.on_device.address + 8 * kernels.record_words(n)[0]
            listed = missing.read(self._stream, list_at, count, "i8") + first
            if from_host:
                self._copy_from_host(host[listed], listed)
            else:
                self.copy(host[listed], listed)

    def _copy_present(self, rows: int, width: int, n: int, out: int, missing: IndexBuffer) -> tuple[bool, int]:
        """Copy the rows whose pages are in the cache; return whether an index is out of range, and count misses."""
        array, stream, record = self._array, self._stream, missing.on_device.address
        copy = kernels.Copy.of(n, self._nbytes, array._origin, self._stride, out)
        space = array.cache.space(array._nsid).words
        row_items = self._nbytes // array.dtype.itemsize if array.cache.full else 0
        stream.zero(record, 8 * kernels.record_words(n)[0])
        arguments = space["core"], space["record"], rows, width, array.shape[0], *copy
        stream.launch(kernels.copy_cached, copy.threads, *arguments, int(array.read_once), row_items, record)
        out_of_range, count = missing.read(stream, record, 2, "i8")
        return bool(out_of_range), int(count)

    def _launch(self, rows: NDArray[np.int64], out_rows: NDArray[np.int64]) -> None:
        array, n = self._array, len(rows)
        copy = kernels.Copy.of(n, self._nbytes, array._origin, self._stride, self._out)
        warps = copy.threads // 32 if array.device == "cuda" else copy.threads
        buffer = acquire_buffer(array.device, 16 * n)
        listed = buffer.to_device(self._stream, np.concatenate((rows, out_rows)))
        arguments = listed, listed + 8 * n, *copy, int(array.read_once)
        array.cache.run(kernels.copy_loaded, warps, array._nsid, *arguments, stream=self._stream)
        release_buffer(buffer)

    # -- rows of a medium in host memory ------------------------------------------------------------------------------

    def _is_in_host_memory(self) -> bool:
        """Return whether rows that are not in the cache are copied from the medium's own memory."""
        array = self._array
        if array.writable or array.tier != "storage" or not array.medium.host_memory():
            return False
        if self._nbytes > MAX_COPIED_ROW:
            return False
        return not array.cache.space(
            array._nsid
        ).pool.direct_mapped  # pages of such a pool are never evicted to make room

    def _copy_from_host(self, rows: NDArray[Any], out_rows: NDArray[np.int64] | None, first_row: int = 0) -> None:
        """Copy row ``rows[k]`` to row ``out_rows[k]`` of the result, or to ``first_row + k`` without `out_rows`.

        Service threads fill slots of pinned memory, one after another.
        """
        array, stream, nbytes = self._array, self._stream, self._nbytes
        slots = _Slots(array, np.ascontiguousarray(rows))
        targets = acquire_buffer(array.device, 8 * len(rows))
        out_row = 0 if out_rows is None else targets.to_device(stream, out_rows)
        out = self._out + first_row * nbytes
        threads = min(len(os.sched_getaffinity(0)), slots.chunks)
        few = slots.number == 1
        if few:
            threads = min(threads, max(1, len(rows) * nbytes // THREAD_BYTES, len(rows) // THREAD_ROWS))
        workers = None if few and threads == 1 else worker_group(array._part, len(os.sched_getaffinity(0)), "copiers")
        task = ChunkedTask(threads, slots.fill, workers, help=few)
        copies: deque[Callable[[], bool]] = deque()
        try:
            for slot in range(slots.number):
                first, n = slots.rows_of(slot)
                while not slots.is_full(slot):
                    if self._stopped or task.error is not None:
                        return
                    slots.free_copied(copies)
                    clock.sleep(POLL_SECONDS)
                stream.copy(slots.on_device, slots.pinned + slot % SLOTS * slots.slot_bytes, n * nbytes)
                copy = kernels.Copy.of(n, nbytes, slots.on_device, nbytes, out if out_row else out + first * nbytes)
                rows_in_order = 0, 8, out_row and out_row + 8 * first, n
                stream.launch(kernels.copy_from_memory, copy.threads, *rows_in_order, *copy, 0)
                copies.append(stream.mark())
                slots.free_copied(copies)
        finally:
            slots.stop()
            error = task.exception()
            stream.wait()
            release_buffer(slots.buffer)
            release_buffer(targets)
            if error is not None:
                raise error
        array.medium.require_memory()
        self._from_host_bytes += len(rows) * nbytes
        array.cache.bulk.commands += slots.chunks


@native
def fill_slots(slots: int, copier: int, pinned: int) -> int:
    """Copy chunks of rows to slots until none is left (any number of threads); return 1 after a timeout.

    Chunk numbers are drawn from a counter, so that all earlier chunks have been drawn when a thread waits for the slot
    of its own: slots fill in order, and no thread waits for a chunk that no thread copies.
    """
    n, each, slot_chunks = word(slots, S_ROWS), word(slots, S_CHUNK_ROWS), word(slots, S_SLOT_CHUNKS)
    while True:
        chunk = fetch_add(slots + 8 * S_NEXT, 1, DEVICE)
        if chunk * each >= n:
            return 0
        slot = div(chunk, slot_chunks)
        attempt = 0
        since = clock_ns()
        while slot >= load_acquire(slots + 8 * S_SENT, DEVICE) + SLOTS:
            if load_relaxed(word(copier, W_STOP), SYSTEM) != 0:
                return 0
            if attempt & 255 == 255 and clock_ns() - since > SLOT_TIMEOUT_NS:
                return 1
            backoff(min(attempt, 16))
            attempt += 1
        end = min((chunk + 1) * each, n)
        copy_range(copier, chunk * each, end, pinned + (rem(slot, SLOTS) - slot) * word(slots, S_SLOT_BYTES))
        fetch_add(slots + 8 * (S_FILLED + slot), end - chunk * each, DEVICE)


class _Slots:
    """Slots of pinned memory, which threads fill with rows from the memory of a medium, chunk by chunk.

    Attributes
    ----------
    buffer : IndexBuffer
        Memory of up to `SLOTS` slots.
    pinned, on_device : int
        Addresses of the slots, and of device memory of a slot.
    chunks, number, slot_bytes : int
        Number of chunks and of slots to fill; bytes of a slot.
    """

    def __init__(self, array: Any, rows: NDArray[Any]) -> None:
        nbytes, chunk_bytes = row_bytes(array), CHUNK_BYTES.get(array.device, SMALL_CHUNK)
        chunk_rows = max(1, min(chunk_bytes // nbytes, CHUNK_ROWS))
        slot_chunks = max(1, SLOT_CHUNKS * chunk_bytes // (chunk_rows * nbytes))
        self._array, self._rows = array, rows
        self._slot_rows = min(slot_chunks * chunk_rows, len(rows))
        self.chunks, self.number = -(-len(rows) // chunk_rows), -(-len(rows) // self._slot_rows)
        self.slot_bytes = self._slot_rows * nbytes
        self._state = state = np.zeros(S_FILLED + self.number, np.int64)
        state[S_ROWS:S_FILLED] = len(rows), chunk_rows, slot_chunks, self.slot_bytes
        self.buffer = acquire_buffer(array.device, min(self.number, SLOTS) * self.slot_bytes)
        self.pinned, self.on_device = self.buffer.pinned.address + HEADER_BYTES, self.buffer.on_device.address
        self._copier = RowCopy(array, rows, array.medium.host_memory() + array._origin, self.pinned)

    def rows_of(self, slot: int) -> tuple[int, int]:
        """Return the first row of a slot, and its number of rows."""
        first = slot * self._slot_rows
        return first, min(self._slot_rows, len(self._rows) - first)

    def fill(self, thread: int) -> None:
        """Copy chunks until none is left: the work of each thread."""
        del thread
        if fill_slots(int(self._state.ctypes.data), self._copier.address, self.pinned):
            self.stop()
            seconds = SLOT_TIMEOUT_NS // 10**9
            raise errors.StallError(
                f"no slot of pinned memory was free for {seconds} s: the GPU does not respond",
                array=self._array.name,
                seconds=seconds,
            )

    def is_full(self, slot: int) -> bool:
        """Return whether all rows of a slot are copied."""
        return bool(self._state[S_FILLED + slot] == self.rows_of(slot)[1])

    def free_copied(self, copies: deque[Callable[[], bool]]) -> None:
        """Let threads reuse the slots that the device has received: their functions in `copies` return True."""
        while copies and copies[0]():
            copies.popleft()
            self._state[S_SENT] += 1

    def stop(self) -> None:
        """Let `fill` return soon."""
        self._copier.stop()
