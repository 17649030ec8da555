"""`GpuCachedRows`: rows of arrays behind a cache, gathered to memory of a GPU.

1. A kernel copies the rows whose pages are in the cache and lists the missing ones.
2. The missing rows of a read-only medium in host memory (tmpfs, too) are copied from there to pinned memory by service
   threads, slot after slot. A copy engine takes each full slot to the device, where a kernel puts the rows into their
   places. The cache stays as it is.
3. The pages of other missing rows are read into the cache in batches, and the kernel copies the rows
   (`warpwell.array.gather.page_batches`): changes of other kernels are seen.

All of it is work of one stream, and of one gather at a time for each array.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ..._os import clock
from ...targets.launch_stream import stream_on
from . import kernels
from .gpu import HEADER_BYTES, IndexBuffer, RowIndices, acquire_buffer, lanes_shift, release_buffer, unit_bytes
from .host import RowCopy, read_gap
from .page_batches import CachedRows
from .tasks import ChunkedTask, worker_group

MAX_LISTED_ROWS = 1 << 21
"""Maximum rows of a launch that lists missing rows, which bounds the list."""
SLOTS = 4
"""Slots of pinned memory: some are filled while another one is copied."""
SLOT_CHUNKS = 16
"""Chunks of a slot, unless rows are longer than a chunk."""
CHUNK_BYTES = {"cuda": 1 << 20}
"""Bytes of a chunk: all slots together should fit the last-level cache of a processor. Elsewhere `SMALL_CHUNK`."""
SMALL_CHUNK = 512
CHUNK_ROWS = 1 << 13
"""Maximum rows of a chunk: to find a row in memory takes as long as to copy some bytes of it."""
MAX_COPIED_ROW = 16 << 20
"""Maximum bytes of a row that is copied from host memory: a slot has at least one row."""
COPY_TIMEOUT_SECONDS = 60.0
"""Longest wait for a free slot."""
POLL_SECONDS = 20e-6

_streams: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _stream_of(array: Any) -> Any:
    """Return the stream of the gathers of an array (one thread at a time: its worker group has one)."""
    stream = _streams.get(array._part)
    if stream is None:
        stream = _streams[array._part] = stream_on(array.device)
    return stream


class GpuCachedRows(CachedRows):
    """Copies rows of an array behind a cache to memory of its device."""

    def __init__(self, array: Any, *, nbytes: int, stride: int, out: int) -> None:
        super().__init__(array, nbytes=nbytes, stride=stride, out=out)
        self._stream = _stream_of(array)
        self._from_host_bytes = 0

    @property
    def bytes_read(self) -> int:
        return super().bytes_read + self._from_host_bytes

    def copy_after(self, point: Any, indices: RowIndices, check: Callable[[NDArray[Any]], None]) -> None:
        """Copy row ``indices[k]`` to row k, after a point of another stream; return when it is done.

        ``check(indices in host memory)`` raises if an index is out of range.

        Raises
        ------
        IndexRangeError
        MediumError, StallError, ClosedError, DriveLostError
        """
        array, stream, n = self._array, self._stream, indices.size
        stream.after(point)
        rows = acquire_buffer(array.device, 8 * n)
        missing = acquire_buffer(array.device, 8 * (min(n, MAX_LISTED_ROWS) + 2))
        try:
            if not n or not self._nbytes:
                check(indices.to_host(stream, rows))
                return
            with array.cache.held():  # opening another array on the cache would move the frames
                array.cache.require_no_doubt(array._nsid)
                self._copy_indices(indices, rows, missing, check)
        finally:
            stream.wait()
            release_buffer(rows)
            release_buffer(missing)

    def _copy_indices(
        self, indices: RowIndices, rows: IndexBuffer, missing: IndexBuffer, check: Callable[[NDArray[Any]], None]
    ) -> None:
        address, host = indices.to_device(self._stream, rows), indices.host
        from_host = self._is_in_host_memory()
        for first in range(0, indices.size, MAX_LISTED_ROWS):
            n = min(MAX_LISTED_ROWS, indices.size - first)
            out_of_range, count = self._copy_present(
                address + first * indices.width, indices.width, n, self._out + first * self._nbytes, missing
            )
            if self._stopped:
                return
            if not count and not out_of_range:
                continue
            if host is None:
                host = indices.to_host(self._stream, rows)
            if out_of_range:
                check(host)
            if from_host and count == n:
                self._copy_from_host(host[first : first + n], None, first)
                continue
            listed = missing.read(self._stream, missing.on_device.address + 16, 8 * count).view(np.int64) + first
            if from_host:
                self._copy_from_host(host[listed], listed)
            else:
                self.copy(host[listed], read_gap(), listed)

    def _copy_present(self, rows: int, width: int, n: int, out: int, missing: IndexBuffer) -> tuple[bool, int]:
        """Copy the rows whose pages are in the cache; return whether an index is out of range, and how many miss."""
        array, stream, listed = self._array, self._stream, missing.on_device.address
        unit = unit_bytes(array._origin, self._stride, self._nbytes, out)
        shift = lanes_shift(min(self._nbytes, array.cache.page_size), unit, array.device)
        descriptors = array.cache.space(array._nsid).words
        stream.zero(listed, 16)
        stream.launch(
            kernels.copy_cached,
            n << shift,
            descriptors["core"],
            descriptors["record"],
            rows,
            width,
            0,
            n,
            shift,
            array.shape[0],
            array._origin,
            self._stride,
            self._nbytes,
            out,
            unit,
            int(array.read_once),
            array.dtype.itemsize if array.cache.full else 0,
            listed,
        )
        out_of_range, count = missing.read(stream, listed, 16).view(np.int64)
        return bool(out_of_range), int(count)

    def _launch(self, rows: NDArray[np.int64], out_rows: NDArray[np.int64]) -> None:
        array, n = self._array, len(rows)
        shift = 5 if array.device == "cuda" else 0
        buffer = acquire_buffer(array.device, 16 * n)
        listed = buffer.write(self._stream, np.concatenate((rows, out_rows)))
        array.cache.run_in(
            self._stream,
            kernels.copy_cached,
            n << shift,
            array._nsid,
            listed,
            8,
            listed + 8 * n,
            n,
            shift,
            array.shape[0],
            array._origin,
            self._stride,
            self._nbytes,
            self._out,
            unit_bytes(array._origin, self._stride, self._nbytes, self._out),
            int(array.read_once),
            0,
            0,
        )
        release_buffer(buffer)

    # -- rows of a medium in host memory ------------------------------------------------------------------------------

    def _is_in_host_memory(self) -> bool:
        """Return whether rows that are not in the cache are copied from the medium's own memory."""
        array = self._array
        if array.writable or array.tier != "storage" or not array.medium.host_memory():
            return False
        if self._nbytes > MAX_COPIED_ROW:
            return False
        return not array.cache.space(array._nsid).pool.direct_mapped  # pages of such a pool stay once they are read

    def _copy_from_host(self, rows: NDArray[Any], out_rows: NDArray[np.int64] | None, first_row: int = 0) -> None:
        """Copy row ``rows[k]`` to row ``out_rows[k]`` of the result, or to ``first_row + k`` without `out_rows`.

        Service threads fill slots of pinned memory, one after another.
        """
        array, stream, nbytes = self._array, self._stream, self._nbytes
        slots = _Slots(array, rows, nbytes, self._stride)
        targets = acquire_buffer(array.device, 8 * len(rows))
        pinned, near = slots.buffer.pinned.address + HEADER_BYTES, slots.buffer.on_device.address
        out = self._out + first_row * nbytes
        unit = unit_bytes(nbytes, out)
        shift = lanes_shift(nbytes, unit, array.device)
        target = 0 if out_rows is None else targets.write(stream, out_rows)
        workers = None if slots.chunks == 1 else worker_group(stream, len(os.sched_getaffinity(0)))
        task = ChunkedTask(slots.chunks, slots.fill, workers, help=slots.number == 1)
        try:
            for slot in range(slots.number):
                first, n = slots.rows_of(slot)
                while slots.filled[slot] < n:
                    if self._stopped or task.error is not None:
                        return
                    clock.sleep(POLL_SECONDS)
                offset = slot % SLOTS * slots.slot_bytes
                stream.copy(near + offset, pinned + offset, n * nbytes)
                stream.launch(
                    kernels.copy_from_memory,
                    n << shift,
                    0,
                    8,
                    target and target + 8 * first,
                    n,
                    shift,
                    n,
                    near + offset,
                    nbytes,
                    nbytes,
                    out + (0 if target else first * nbytes),
                    unit,
                    slots.buffer.pinned.address,
                )
                stream.wait()
                slots.sent += 1
        finally:
            slots.stopped = True
            error = task.exception()
            stream.wait()
            release_buffer(slots.buffer)
            release_buffer(targets)
            if error is not None:
                raise error
        array.medium.require_memory()
        self._from_host_bytes += len(rows) * nbytes
        array.cache.bulk.commands += slots.chunks


class _Slots:
    """Slots of pinned memory, which threads fill with rows from the memory of a medium, chunk by chunk.

    Attributes
    ----------
    buffer : IndexBuffer
        Memory of up to `SLOTS` slots, pinned and on the device.
    chunks, number, slot_bytes : int
        Number of chunks and of slots to fill; bytes of a slot.
    filled : list of int
        Number of copied rows of each slot.
    sent : int
        Number of slots that the device has; their memory is filled again.
    stopped : bool
        Lets `fill` return soon.
    """

    def __init__(self, array: Any, rows: NDArray[Any], nbytes: int, stride: int) -> None:
        chunk_bytes = CHUNK_BYTES.get(array.device, SMALL_CHUNK)
        self._array, self._rows = array, rows
        self._chunk_rows = max(1, min(chunk_bytes // nbytes, CHUNK_ROWS))
        self._slot_chunks = max(1, SLOT_CHUNKS * chunk_bytes // (self._chunk_rows * nbytes))
        self._slot_rows = min(self._slot_chunks * self._chunk_rows, len(rows))
        self.chunks, self.number = -(-len(rows) // self._chunk_rows), -(-len(rows) // self._slot_rows)
        self.slot_bytes = self._slot_rows * nbytes
        self.buffer = acquire_buffer(array.device, min(self.number, SLOTS) * self.slot_bytes)
        self.filled, self.sent, self.stopped = [0] * self.number, 0, False
        self._lock = threading.Lock()
        self._copier = RowCopy(
            rows,
            source=array.medium.host_memory() + array._origin,
            extent=array.shape[0],
            stride=stride,
            nbytes=nbytes,
            out=self.buffer.pinned.address + HEADER_BYTES,
        )

    def rows_of(self, slot: int) -> tuple[int, int]:
        """Return the first row of a slot, and its number of rows."""
        first = slot * self._slot_rows
        return first, min(self._slot_rows, len(self._rows) - first)

    def fill(self, chunk: int) -> None:
        """Copy a chunk as soon as its slot is free (any thread)."""
        slot, first = chunk // self._slot_chunks, chunk * self._chunk_rows
        deadline = clock.monotonic() + COPY_TIMEOUT_SECONDS
        while slot >= self.sent + SLOTS and not self.stopped:
            if clock.monotonic() > deadline:
                raise errors.StallError(
                    f"no slot of pinned memory was free for {COPY_TIMEOUT_SECONDS:g} s: the GPU does not respond",
                    array=self._array.name,
                    seconds=COPY_TIMEOUT_SECONDS,
                )
            clock.sleep(POLL_SECONDS)
        if not self.stopped:
            end = min(first + self._chunk_rows, len(self._rows))
            pinned = self.buffer.pinned.address + HEADER_BYTES
            self._copier.copy(first, end, pinned + (slot % SLOTS - slot) * self.slot_bytes)
            with self._lock:
                self.filled[slot] += end - first


def _after_fork() -> None:
    global _streams
    _streams = weakref.WeakKeyDictionary()


os.register_at_fork(after_in_child=_after_fork)
