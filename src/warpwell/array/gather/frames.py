"""`FrameRows`: rows of arrays behind a cache, gathered to a GPU's memory.

1. Rows whose pages are in frames are copied by three launches (`warpwell.array.gather.kernels`), which list the rest.
2. If the medium is in host memory (tmpfs, too) and read-only, service threads copy the other rows into pinned memory,
   list by list. A copy engine takes each list to the device, where a kernel puts the rows into their places. The cache
   does not change.
3. If the medium is another one or is writable, the pages of the other rows are read into the cache in waves, and a
   kernel copies each under a transient pin (`warpwell.array.gather.waves`), so that stores of other kernels are seen.

All of it is work of one stream, and of one gather at a time for each array.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...targets import Block
from ...targets.launch_stream import stream_on
from . import kernels
from .host import read_gap
from .in_stream import Numbers, Room, give_back, lanes_shift, take_room, unit_of
from .lists import ListRing
from .tasks import ChunkedTask, WorkerGroup
from .waves import ROWS, CachedRows

TABLE = 1 << 21
"""Maximum page words that a launch records."""
SLOTS = 4
"""Slots of staging: some are filled while others are copied."""
LISTS = 32
"""Lists of rows that fill a slot."""
LIST_BYTES = {"cuda": 512 << 10}
"""Bytes of the rows of a list: all slots together should stay in a processor's last cache. Elsewhere `SMALL_LIST`."""
SMALL_LIST = 256
LIST_ROWS = 2048
"""Most rows of a list: it takes as long to find a row in memory as to copy some bytes of it."""
PIECE_BYTES, PIECE_ROWS = 1 << 20, 1 << 13
"""Bytes, or rows, of a slot for which another thread is woken: it takes that as long to begin as to copy them."""
LONG_ROW = 16 << 20
"""Bytes of rows that are not copied by lists."""


class Lane:
    """What the gathers of one array use, one after another: a stream, tables, and staging."""

    def __init__(self, device: str, memory: Any) -> None:
        self.stream = stream_on(device)
        self.workers = WorkerGroup(len(os.sched_getaffinity(0)))
        self._memory = memory
        self._blocks: dict[tuple[str, bool], Block] = {}

    def near(self, name: str, nbytes: int) -> int:
        """Return the address of device memory of at least `nbytes` bytes; the next call may overwrite it."""
        return self._block((name, False), nbytes, self._memory.allocate).address

    def shared(self, name: str, nbytes: int) -> Block:
        """Return the same of pinned memory."""
        return self._block((name, True), nbytes, self._memory.allocate_shared)

    def _block(self, key: tuple[str, bool], nbytes: int, allocate: Callable[[int], Block]) -> Block:
        found = self._blocks.get(key)
        if found is None or found.nbytes < nbytes:
            self._blocks.pop(key, None)
            found = self._blocks[key] = allocate(1 << max(12, (nbytes - 1).bit_length()))
        return found


_lanes: weakref.WeakKeyDictionary[Any, Lane] = weakref.WeakKeyDictionary()


def lane_of(array: Any) -> Lane:
    """Return the lane of an array (one thread at a time: its worker group has one)."""
    found = _lanes.get(array._part)
    if found is None:
        found = _lanes[array._part] = Lane(array.device, array.cache.memory)
    return found


class FrameRows:
    """Copies rows of an array behind a cache to memory of its device.

    Attributes
    ----------
    asked : int
        Bytes that the medium was asked for ahead.
    """

    def __init__(self, array: Any, *, nbytes: int, stride: int, out: int) -> None:
        self._array = array
        self._nbytes, self._stride, self._out = nbytes, stride, out
        self._gap = read_gap()
        self._stopped = False
        self._waves: CachedRows | None = None
        self._listed = 0

    @property
    def asked(self) -> int:
        """See the class."""
        waves = 0 if self._waves is None else self._waves.asked * self._array.cache.page_size
        return self._listed + waves

    def stop(self) -> None:
        """Let `copy` end soon."""
        self._stopped = True
        if self._waves is not None:
            self._waves.stop()

    def copy(self, numbers: Numbers, point: Any, check: Callable[[NDArray[Any]], None]) -> None:
        """Copy row ``numbers[k]`` to row k, after a point of another stream; it is done on return.

        ``check(numbers in host memory)`` raises if one is out of range.

        Raises
        ------
        IndexRangeError
        MediumError, StallError, ClosedError, DriveLostError
        """
        lane, array = lane_of(self._array), self._array
        lane.stream.after(point)
        room = take_room(array.device, max(8, 8 * numbers.size))
        try:
            if not numbers.size or not self._nbytes:
                check(numbers.on_host(lane.stream, room))
                return
            with array.cache.layout_lock():  # no array is opened on the cache meanwhile, which would move the frames
                array.cache.require_no_doubt(array._nsid)
                self._copy(lane, numbers, room, check)
        finally:
            lane.stream.wait()
            give_back(room)

    def _copy(
        self,
        lane: Lane,
        numbers: Numbers,
        room: Room,
        check: Callable[[NDArray[Any]], None],
    ) -> None:
        array = self._array
        at = numbers.tensor.address if numbers.tensor is not None else room.put(lane.stream, numbers.host)
        most = (self._nbytes - 2) // array.cache.page_size + 2
        each = max(1, TABLE // most)
        lists = self._by_lists()
        rows: Any = numbers.host
        for low in range(0, numbers.size, each):
            n = min(each, numbers.size - low)
            base = self._out + low * self._nbytes
            listed = at + low * numbers.width
            wrong, count = self._present(lane, listed, numbers.width, n, base, most)
            if self._stopped:
                return
            if rows is None and (count or wrong):  # row numbers on the GPU are not known to the host before
                rows = numbers.on_host(lane.stream, room)
            if wrong:
                check(rows)
            if not count:
                continue
            some = rows[low : low + n]
            if lists and count == n:  # in their order, which is known
                self._by_service_threads(lane, some, 0, base)
                continue
            missing = self._missing(lane, count)
            some = some[missing]
            if lists:
                self._by_service_threads(lane, some, lane.near("missing", 8 * (n + 2)) + 16, base)
            else:
                self._through_cache(lane, some, missing, base)

    def _by_lists(self) -> bool:
        """Return whether service threads copy rows from the medium's own memory, past the cache."""
        array = self._array
        if array.writable or array.tier != "storage" or not array.medium.host_memory():
            return False
        if self._nbytes > LONG_ROW:  # it has pages enough of its own, and slots would be as large as rows
            return False
        return not array.cache.space(array._nsid).pool.direct_mapped  # else pages come to stay

    def _present(
        self,
        lane: Lane,
        rows: int,
        width: int,
        n: int,
        out: int,
        most: int,
    ) -> tuple[bool, int]:
        """Copy the rows whose pages are in the cache; return whether a number is out of range, and how many miss.

        Their places follow two words of memory "missing".
        """
        array, stream = self._array, lane.stream
        words = array.cache.space(array._nsid).words
        core, space = words["core"], words["record"]
        seen = lane.near("seen", 8 * n * most)
        wrong = lane.near("missing", 8 * (n + 2))  # that word, their number, and the list
        missing = wrong + 8
        shared = lane.shared("missing", 8 * (n + 2))
        page = array.cache.page_size
        unit = unit_of(array._origin, self._stride, self._nbytes, out)
        shift = lanes_shift(min(self._nbytes, page), unit, array.device)
        where = array._origin, self._stride, self._nbytes
        stream.zero(wrong, 16)
        stream.launch(
            kernels.look_pages, n * most, core, space, rows, width, n, most, array.shape[0], *where, seen, wrong
        )
        stream.launch(kernels.copy_seen, n << shift, core, rows, width, n, most, shift, *where, out, unit, seen)
        stream.launch(
            kernels.settle_rows,
            n,
            core,
            space,
            rows,
            width,
            n,
            most,
            *where,
            seen,
            int(array.read_once),
            array.dtype.itemsize if array.cache.full else 0,
            missing,
        )
        stream.copy(shared.address, wrong, 16)
        stream.wait()
        return bool(shared.words[0]), int(shared.words[1])

    def _missing(self, lane: Lane, count: int) -> NDArray[np.int64]:
        """Return which rows are missing, in any order, as `_present` has listed them."""
        nbytes = 8 * (count + 2)
        shared = lane.shared("missing", nbytes)
        lane.stream.copy(shared.address, lane.near("missing", nbytes), nbytes)
        lane.stream.wait()
        return shared.words[2 : 2 + count].copy()

    # -- lists of rows, past the cache ------------------------------------------------------------------------------

    def _by_service_threads(self, lane: Lane, rows: NDArray[Any], targets: int, out: int) -> None:
        """Copy rows from memory of the host: slots are filled by service threads while others are on their way.

        `targets` is the address of their places; 0 for the order of the list.
        """
        array, stream, nbytes = self._array, lane.stream, self._nbytes
        size = LIST_BYTES.get(array.device, SMALL_LIST)
        each = max(1, min(size // nbytes, LIST_ROWS))
        lists = max(1, LISTS * size // (each * nbytes))
        ring = ListRing(
            np.ascontiguousarray(rows),
            each=each,
            lists=lists,
            slots=SLOTS,
            nbytes=nbytes,
            stride=self._stride,
            source=array.medium.host_memory() + array._origin,
        )
        staging = lane.shared("staging", ring.staging_bytes).address
        near = lane.near("staged", ring.slot_bytes)
        flag = lane.shared("flag", 8)
        unit = unit_of(nbytes, out)
        shift = lanes_shift(nbytes, unit, array.device)
        on_their_way: deque[Callable[[], bool]] = deque()

        def freed() -> None:
            while on_their_way and on_their_way[0]():
                on_their_way.popleft()
                ring.give_back()

        threads = min(len(os.sched_getaffinity(0)), ring.pieces)
        few = ring.filled_slots == 1  # all of them are copied before any is on its way
        if few:
            threads = min(threads, max(1, len(rows) * nbytes // PIECE_BYTES, len(rows) // PIECE_ROWS))
        workers = None if few and threads == 1 else lane.workers
        task = ChunkedTask(threads, lambda _: ring.fill(staging), workers, help=few)
        try:
            for slot in range(ring.filled_slots):
                while not ring.full(slot):
                    if self._stopped or task.error is not None:
                        return
                    freed()
                    time.sleep(20e-6)
                first, n = ring.rows_of(slot)
                stream.copy(near, staging + slot % SLOTS * ring.slot_bytes, n * nbytes)
                stream.launch(
                    kernels.copy_listed,
                    n << shift,
                    0,
                    8,
                    targets and targets + 8 * first,
                    n,
                    shift,
                    n,
                    near,
                    nbytes,
                    nbytes,
                    out if targets else out + first * nbytes,
                    unit,
                    flag.address,
                )
                on_their_way.append(stream.mark())
                freed()
        finally:
            ring.stop()
            error = task.exception()
            stream.wait()
            if error is not None:
                raise error
        array.medium.require_memory()
        self._listed += len(rows) * nbytes
        array.cache.bulk.commands += ring.pieces

    # -- through the cache ------------------------------------------------------------------------------------------

    def _through_cache(self, lane: Lane, rows: NDArray[Any], places: NDArray[np.int64], out: int) -> None:
        """Read the pages of rows into the cache, in waves, and take the rows from there."""
        array = self._array
        unit = unit_of(array._origin, self._stride, self._nbytes, out)
        lists = lane.shared("listed", 16 * min(len(rows), ROWS))

        def take(some: NDArray[np.int64], where: NDArray[np.int64]) -> None:
            n = len(some)
            lists.words[:n], lists.words[n : 2 * n] = some, where
            array.cache.run(
                kernels.take_missing,
                n,
                array._nsid,
                lists.address,
                lists.address + 8 * n,
                n,
                array._origin,
                self._stride,
                self._nbytes,
                out,
                unit,
                stream=lane.stream,
            )

        self._waves = CachedRows(array, nbytes=self._nbytes, stride=self._stride, out=out, take=take)
        if not self._stopped:
            self._waves.copy(rows, self._gap, places)


def _after_fork() -> None:
    global _lanes
    _lanes = weakref.WeakKeyDictionary()


os.register_at_fork(after_in_child=_after_fork)
