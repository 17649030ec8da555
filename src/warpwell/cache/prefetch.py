"""Bulk reads of the host: prefetches, and reads past the cache.

Staging has a few slots. While two of them are read from the medium, earlier ones are published to frames, or copied to
their target. `warpwell.cache.known_pages` explains why pages that kernels use in the meantime are never mixed up.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .._check import LONGEST
from .._future import Future
from .._os import clock, interruptible, uninterrupted
from .._ranges import ranges_of
from .._settings import settings
from .._trace import traced
from ..storage import BulkReads, Controller, CuFileOptions, FileMedium, GpuDirectReads, QueueServer, StagedReads
from ..targets import Allocator, Block
from ..targets.launch_stream import LaunchStream, stream_on
from . import known_pages
from .known_pages import CHANGED, FAILED, LOADED, MISSED, T_COUNT, T_PAGE, T_POSITION
from .layout import BLOCK, F_HAND
from .partition import PageSpace
from .word import REF

SLOTS = 4
"""Slots of staging: two are read, two are published or copied."""
SLOT_BYTES = {"cuda": 16 << 20, "cpu": 4 << 20, "interp": 16 << 10}
COMMAND_BYTES = 128 << 10
"""Maximum bytes of a command: a miss of a kernel waits for at most one command."""
SHORT_BYTES = 16 << 10
"""Mean bytes of a command below which a GPU's warps read the pages one by one: the host submits a million a second."""
MAX_WAITING = 16
"""Maximum number of prefetches that have not started."""
DRAIN_TIMEOUT_SECONDS = 5.0
"""How long a prefetch that is cancelled or fails waits for its reads in flight."""
BATCH_PAGES = {"cuda": 1 << 20, "cpu": 1 << 16, "interp": 1 << 10}
"""Maximum number of pages that one launch looks up."""
COMPILE_SECONDS = 60.0
"""Time that a first prefetch may take longer, because its kernels are compiled."""
CUFILE = CuFileOptions()
"""When reads go to device memory directly."""


class PrefetchCounts(NamedTuple):
    """The result of a prefetch, in pages; see `Array.prefetch`."""

    pages: int
    """All pages of the prefetch: the sum of the other counts."""
    loaded: int
    """Pages read into the cache."""
    present: int
    """Pages already in the cache, or read by kernels in the meantime."""
    skipped: int
    """Pages not read because no frame was free, the medium did not answer, or the prefetch was cancelled."""
    failed: int
    """Pages whose read failed: a kernel that uses one reads it again, and raises the error."""


class Prefetch(Future):
    """A read of pages in the background; the result is `PrefetchCounts`.

    Parameters
    ----------
    pages : int
        A prefetch of 0 pages is done.

    Attributes
    ----------
    loaded, missed, present, failed : int
        Counts so far; `missed` are those of `loaded` that a miss of a kernel read.
    hand : int
        Position of the clock hand at the start.
    stopped : bool
        Read no further pages.
    """

    def __init__(self, pages: int = 0) -> None:
        super().__init__(f"prefetch of {pages} pages")
        self.pages = pages
        self.loaded = self.missed = self.present = self.failed = self.hand = 0
        self.stopped = False
        if not pages:
            self.set_result(self.counts)

    @property
    def counts(self) -> PrefetchCounts:
        """The result, if the prefetch ends now."""
        skipped = self.pages - self.loaded - self.present - self.failed
        return PrefetchCounts(self.pages, self.loaded, self.present, skipped, self.failed)

    def cancel(self) -> bool:
        """Read no further pages; they count as skipped. Return whether this came before the end."""
        self.stopped = True
        return not self.done()


class Frames(Protocol):
    """The part of `Cache` that bulk reads use."""

    device: str
    page_size: int
    timeout: float
    controller: QueueServer
    memory: Allocator

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Keep frames and table in place for the block."""

    def space(self, nsid: int) -> PageSpace:
        """Return the record of an array."""

    def run_in(self, stream: LaunchStream, kernel: Any, threads: int, nsid: int, *arguments: int) -> None:
        """Run a kernel that may wait for storage in a stream; raise the error that it latched."""


class Bulk:
    """Bulk reads for the arrays of one cache. Staging is allocated with the first.

    Parameters
    ----------
    cache : Frames
    cufile : CuFileOptions
        When reads go to device memory directly.

    Attributes
    ----------
    commands, pages_read, prefetched, skipped : int
        For the cache's statistics.
    stream : LaunchStream
        The stream in which pages are published and copied; like the following attributes, set by the first read.
    table, page_words, counters : int
        Addresses in device memory: of the rows, of the recorded page words (`max_pages` for each row), of the counters.
    """

    def __init__(self, cache: Frames, cufile: CuFileOptions = CUFILE) -> None:
        self._weak = weakref.ref(cache)  # a cache that is dropped is closed at once, not by the next collection
        self._staging_lock = threading.Lock()
        self._lock = threading.Lock()  # of the queue below
        self._waiting: deque[tuple[Prefetch, Callable[[], None]]] = deque()
        self._unfinished: dict[Prefetch, int] = {}
        """Prefetches that are not done, each with its array's namespace id."""
        self._has_thread = False
        self._staging: Block | None = None
        self._reads: GpuDirectReads | None = None
        self._cufile, self._cufile_failure = cufile, ""
        self.commands = self.pages_read = self.prefetched = self.skipped = 0

    @property
    def _cache(self) -> Frames:
        cache = self._weak()
        assert cache is not None, "callers hold the cache"
        return cache

    # -- prefetches -------------------------------------------------------------------------------------------------

    def prefetch(
        self,
        nsid: int,
        pages: NDArray[np.int64] | tuple[int, int],
        *,
        once: bool = False,
        after: Prefetch | None = None,
        leave: NDArray[np.int64] | None = None,
    ) -> Prefetch:
        """Begin to read pages of an array into the cache.

        Parameters
        ----------
        nsid : int
        pages : ndarray or (int, int)
            Ascending numbers, counted from the array's first page; or the first and the end of a range.
        once : bool
            Whether the clock may take their frames when it first passes.
        after : Prefetch, optional
            An earlier prefetch whose pages these must not evict.
        leave : ndarray, optional
            Pages that are evicted first, if they are clean and not pinned.
        """
        prefetch = Prefetch(len(pages) if isinstance(pages, np.ndarray) else max(0, pages[1] - pages[0]))
        if not prefetch.pages:
            return prefetch
        cache, mark = self._cache, 0 if once else REF

        def work() -> None:
            with self._staging_lock, cache.held():
                self._prepare()
                job = _Job(self, nsid)
                prefetch.hand = self._read_word(job.pool + 8 * F_HAND)
                pool = cache.space(nsid).pool
                limit = (after or prefetch).hand + 2 * pool.frames
                if leave is not None:
                    job.leave(leave)
                job.prefetch(prefetch, pages, limit, mark)
                pool.schedule_residency_check()

        if cache.device == "interp":  # one interpreted launch at a time
            self._unfinished[prefetch] = nsid
            self._run(prefetch, work)
            return prefetch
        while len(self._waiting) >= MAX_WAITING:  # a caller that is faster than the medium waits
            with contextlib.suppress(TimeoutError, IndexError):
                self._waiting[0][0].exception(1.0)
        with uninterrupted(), self._lock:  # so that each prefetch ends
            self._unfinished[prefetch] = nsid
            self._waiting.append((prefetch, work))
            if not self._has_thread:
                self._has_thread = True
                try:
                    threading.Thread(target=self._work, name="warpwell-prefetch", daemon=True).start()
                except RuntimeError:  # the interpreter exits and starts no thread
                    self._has_thread = False
                    while self._waiting:
                        self._end(self._waiting.popleft()[0], None)
        return prefetch

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._has_thread = False
                    return
                prefetch, work = self._waiting.popleft()
            self._run(prefetch, work)

    @traced("prefetch")
    def _run(self, prefetch: Prefetch, work: Callable[[], None]) -> None:
        failure = None
        try:
            if not prefetch.stopped:
                work()
        except Exception as error:  # `result` raises it
            failure = error
        finally:
            self._end(prefetch, failure)

    def _end(self, prefetch: Prefetch, failure: Exception | None) -> None:
        self._unfinished.pop(prefetch, None)
        counts = prefetch.counts
        self.prefetched += counts.loaded - prefetch.missed  # the others are counted as misses
        self.skipped += counts.skipped
        if failure is None:
            prefetch.set_result(counts)
        else:
            prefetch.set_exception(failure)

    def stop(self) -> None:
        """Cancel all prefetches and wait for them, at most for the timeout of a medium that does not answer."""
        prefetches = list(self._unfinished)
        for prefetch in prefetches:
            prefetch.cancel()
        for prefetch in prefetches:
            with contextlib.suppress(TimeoutError):
                prefetch.exception(min(2 * self._cache.timeout + COMPILE_SECONDS, LONGEST))

    def require_gpudirect(self, nsid: int) -> None:
        """Raise ArgumentError if WARPWELL_GPUDIRECT is "on" and cuFile cannot read an array's file to a GPU."""
        cache = self._cache
        if settings.gpudirect != "on" or cache.device != self._cufile.device:
            return
        with interruptible(lambda: None), self._staging_lock, cache.held():
            self._prepare()
            if self._reads is None or not isinstance(medium := cache.controller.medium(nsid), FileMedium):
                return
            with self.stream.on_device():
                obstacle = self._reads.obstacle(nsid)
        if obstacle:
            raise errors.ArgumentError(
                f"WARPWELL_GPUDIRECT is on, but cuFile cannot read {medium.name}: {obstacle}; set it to auto",
                name="WARPWELL_GPUDIRECT",
            )

    def forget(self, nsid: int) -> None:
        """Deregister an array's file at cuFile before its medium is closed; no read of the file is in flight."""
        if self._reads is not None:
            with self.stream.on_device():
                self._reads.close_file(nsid)

    def close(self) -> None:
        """Deregister everything at cuFile, in bounded time; no read is in flight."""
        if self._reads is not None:
            with self.stream.on_device():
                self._reads.close()

    def reads(self, nsid: int) -> bool:
        """Return whether a prefetch of an array is not done."""
        return nsid in list(self._unfinished.values())

    # -- reads past the cache -----------------------------------------------------------------------------------

    def copy(
        self, nsid: int, first: int, end: int, *, to: Callable[[int, int, int], None] | None = None, into: Any = None
    ) -> list[tuple[int, int]] | None:
        """Read the bytes of pages [first, end) from the medium; return the ranges of pages that may be stale.

        Either ``to(offset, address, nbytes)`` is called for each chunk, which is at `address` in staging until the
        work that it launches in `stream` is done; `offset` counts from the first byte of page `first`. Or they are read
        `into` a uint8 array, which starts at a multiple of 4096.

        A page that is or was in the cache during the read may be newer than the medium: it is stale. Return None
        if a read failed, or if most pages are in the cache: then the read is not complete.
        """
        cache = self._cache
        with interruptible(lambda: None) as interrupts, self._staging_lock, cache.held():
            self._prepare()
            if self._reads is None:
                return None
            return _Job(self, nsid).copy(first, end, to, into, lambda: bool(interrupts.raised))

    # -- staging, and memory for rows -------------------------------------------------------------------------------

    def _prepare(self) -> None:
        if self._staging is not None:
            return
        cache = self._cache
        size = cache.page_size
        self.slot_pages = max(1, SLOT_BYTES[cache.device] // size)
        self.slot_bytes = self.slot_pages * size
        self.max_pages = max(1, min(COMMAND_BYTES // size, self.slot_pages // 4))
        self.max_rows = max(64, BATCH_PAGES[cache.device] // self.max_pages)
        table_words = self.max_rows * (known_pages.ROW_WORDS + self.max_pages) + known_pages.COUNTERS
        self.stream: LaunchStream = stream_on(cache.device)
        self._table = cache.memory.allocate(8 * table_words)
        self.table = self._table.address
        self.page_words = self.table + 8 * known_pages.ROW_WORDS * self.max_rows
        self.counters = self.page_words + 8 * self.max_pages * self.max_rows
        self._shared = cache.memory.allocate_shared(8 * self.max_rows * (known_pages.ROW_WORDS + 1) + 64)
        if not isinstance(cache.controller, Controller):
            # a drive reads only to memory of its own: kernels load pages one by one
            self._staging, self.device_slot = Block(0, 0, None, host=True), None
            return
        # The bytes of a slot, before they are copied to frames. Two buffers and two streams, so that one is copied
        # while the other is published, were slower by at least 8 %: each slot then has events that streams wait for.
        self.device_slot = cache.memory.allocate(self.slot_bytes) if cache.device == "cuda" else None
        staging = cache.memory.allocate_shared(SLOTS * self.slot_bytes)
        self._reads = GpuDirectReads(
            StagedReads(cache.controller, slots=SLOTS, rows=self.slot_pages),
            staging,
            cache.memory,
            slots=SLOTS,
            zero=self.stream.zero,
            options=self._cufile,
            failure=self._cufile_failure,
        )
        self._staging = staging

    @property
    def is_on_demand(self) -> bool:
        """Whether kernels read all pages, because the host cannot."""
        return self._reads is None

    def staging(self, slot: int) -> int:
        """Return the address of a slot's staging."""
        assert self._staging is not None
        return self._staging.address + slot * self.slot_bytes

    def source(self, slot: int) -> int:
        """Return the address of the bytes of a slot that was read: in staging, or in device memory."""
        return (self._reads.device_address(slot) if self._reads is not None else 0) or self.staging(slot)

    def put_rows(self, rows: _Rows, base: int) -> None:
        """Copy rows of an array whose first page is `base` to the device, in the order of the stream."""
        n = len(rows.pages)
        table = self._shared.words[: n * known_pages.ROW_WORDS].reshape(n, known_pages.ROW_WORDS)
        table[:, T_PAGE], table[:, T_COUNT], table[:, T_POSITION] = rows.pages + base, rows.counts, rows.positions
        self.stream.copy(self.table, self._shared.address, table.nbytes)

    def per_row(self, kernel: Any, core: int, n: int) -> NDArray[np.int64]:
        """Run `look_rows` or `compare_rows`; return the count that it stored for each row."""
        offset = known_pages.ROW_WORDS * self.max_rows
        out = self._shared.address + 8 * offset
        self.stream.launch(kernel, n, core, self.table, self.page_words, n, self.max_pages, out)
        self.stream.wait()
        return self._shared.words[offset : offset + n].copy()

    def _read_word(self, address: int) -> int:
        return int(self.read_words(address, 1)[0])

    def read_words(self, address: int, n: int) -> NDArray[np.int64]:
        """Return up to 8 words of device memory, in the order of the stream, without waiting for other streams."""
        offset = (known_pages.ROW_WORDS + 1) * self.max_rows
        self.stream.copy(self._shared.address + 8 * offset, address, 8 * n)
        self.stream.wait()
        return self._shared.words[offset : offset + n].copy()

    @contextlib.contextmanager
    def reading(self, into: Any) -> Iterator[BulkReads]:
        """Keep I/O threads awake for the block; memory that the medium may still write to is not used again.

        Ctrl-C in the block, and errors in it, leave no read in flight and no page partly published.
        """
        reads = self._reads
        assert reads is not None
        try:
            with self.stream.on_device(), reads.staged.controller.active(reads.staged.pairs):
                try:
                    yield reads
                finally:
                    reads.cancel()
                    deadline = clock.monotonic() + min(self._cache.timeout, DRAIN_TIMEOUT_SECONDS)
                    while reads.left() and clock.monotonic() < deadline:
                        clock.sleep(1e-3)
        finally:
            if reads.left():
                reads.close()
                self._cufile_failure = reads.failure or "earlier reads did not complete"
                _abandoned.append((self._staging, reads, into))
                self._staging = None


_abandoned: list[Any] = []
"""Staging of reads that did not complete: a medium may write to it at any time."""


class _Rows(NamedTuple):
    """Rows of consecutive pages, each read by one command; counted from the array's first page."""

    pages: NDArray[np.int64]
    counts: NDArray[np.int64]
    slots: NDArray[np.int64]
    positions: NDArray[np.int64]

    @classmethod
    def of(cls, pages: NDArray[np.int64] | tuple[int, int], max_pages: int, slot_pages: int) -> _Rows:
        """Cut ascending pages into rows of at most `max_pages`; assign each a slot of staging and a position there."""
        if isinstance(pages, tuple):
            firsts, lengths = np.array([pages[0]]), np.array([pages[1] - pages[0]])
        else:
            cut = np.flatnonzero(np.diff(pages) != 1) + 1
            ends = np.concatenate((cut, [len(pages)]))
            lengths = np.diff(ends, prepend=0)
            firsts = pages[ends - lengths]
        number = -(-lengths // max_pages)
        which = np.repeat(np.arange(len(firsts)), number)
        offset = (np.arange(len(which)) - np.repeat(np.cumsum(number) - number, number)) * max_pages
        counts = np.minimum(max_pages, lengths[which] - offset)
        start = np.cumsum(counts) - counts
        room = slot_pages - max_pages + 1  # a row that starts within it ends within the slot
        slots = start // room
        return cls(firsts[which] + offset, counts, slots, start - slots * room)

    def part(self, chosen: Any) -> _Rows:
        """Return some of the rows."""
        return _Rows(*(column[chosen] for column in self))


class _Job:
    """Bulk reads of one array; the caller holds the lock of the staging."""

    def __init__(self, bulk: Bulk, nsid: int) -> None:
        self._bulk, self._nsid = bulk, nsid
        self._cache = cache = bulk._cache
        self._space = space = cache.space(nsid)
        self._core, self._record, self.pool = space.words["core"], space.words["record"], space.pool.address
        self._width = 32 if cache.device == "cuda" else 1
        self._pending: dict[int, Callable[[], bool]] = {}
        """For slots whose staging is in use by the stream, whether that work is done."""

    def _batches(self, pages: NDArray[np.int64] | tuple[int, int]) -> Iterator[_Rows]:
        """Copy rows of pages to the device and yield them, as many at a time as one launch looks up."""
        bulk = self._bulk
        rows = _Rows.of(pages, bulk.max_pages, bulk.slot_pages)
        for start in range(0, len(rows.pages), bulk.max_rows):
            batch = rows.part(slice(start, start + bulk.max_rows))
            batch.slots[:] -= batch.slots[0]
            if self._space.host:
                batch.positions[:] = batch.pages
            bulk.put_rows(batch, self._space.base)
            yield batch

    # -- into the cache ---------------------------------------------------------------------------------------------

    def prefetch(self, prefetch: Prefetch, pages: NDArray[np.int64] | tuple[int, int], limit: int, mark: int) -> None:
        """Read pages into frames."""
        bulk, space = self._bulk, self._space
        bulk.stream.zero(bulk.counters, 8 * known_pages.COUNTERS)
        try:
            for rows in self._batches(pages):
                if prefetch.stopped:
                    return
                is_short = rows.counts.mean() * self._cache.page_size < SHORT_BYTES
                by_warps = bulk.is_on_demand or (is_short and self._width > 1 and bulk.max_pages > 1)
                if by_warps and not space.host:
                    self._touch(rows)
                    continue
                absent = bulk.per_row(known_pages.look_rows, self._core, len(rows.pages))
                prefetch.present += int((rows.counts - absent).sum())
                if space.host:
                    self._publish(0, len(rows.pages), space.host, limit, mark)
                    bulk.pages_read += int(absent.sum())
                    _wait_until(bulk.stream.mark())
                elif absent.any() and not self._read_into_frames(rows, absent, prefetch, limit, mark):
                    return
        finally:
            counts = bulk.read_words(bulk.counters, known_pages.COUNTERS)
            prefetch.loaded += int(counts[LOADED] + counts[MISSED])
            prefetch.missed += int(counts[MISSED])
            prefetch.present += int(counts[CHANGED])
            prefetch.failed += int(counts[FAILED])

    def _read_into_frames(
        self, rows: _Rows, absent: NDArray[np.int64], prefetch: Prefetch, limit: int, mark: int
    ) -> bool:
        """Read rows with absent pages to staging and publish them; return False if the medium does not answer."""
        bulk = self._bulk

        def publish(slot: int, low: int, good: NDArray[np.bool_]) -> None:
            prefetch.failed += int(absent[low : low + len(good)][~good].sum())
            if not absent[low : low + len(good)].any():
                return
            source = bulk.source(slot)
            if bulk.device_slot is not None and source == bulk.staging(slot):
                # the copy engine has the whole rate of the bus; warps that pull pages have two thirds of it
                address, nbytes = self._slot_bytes(rows, slot, low, low + len(good))
                bulk.stream.copy(bulk.device_slot.address + address - source, address, nbytes)
                source = bulk.device_slot.address
            for first, end in ranges_of(np.flatnonzero(good)):
                self._publish(low + first, end - first, source, limit, mark)

        return self._read(rows, absent > 0, publish, lambda: prefetch.stopped)

    def _publish(self, first: int, n: int, source: int, limit: int, mark: int) -> None:
        bulk = self._bulk
        # on a GPU a warp takes 4 KiB: one page, or eight; else a thread takes a row
        unit = max(1, 4096 // self._cache.page_size) if self._width > 1 else bulk.max_pages
        threads = n * -(-bulk.max_pages // unit) * self._width
        bulk.stream.launch(
            known_pages.publish_rows,
            threads,
            self._core,
            self._record,
            bulk.table,
            bulk.page_words,
            first,
            n,
            bulk.max_pages,
            unit,
            source,
            limit,
            mark,
            bulk.counters,
        )

    def _touch(self, rows: _Rows) -> None:
        bulk, n = self._bulk, len(rows.pages)
        row_pages = int(rows.counts.max())
        arguments = (bulk.table, n, row_pages, bulk.counters)
        self._cache.run_in(bulk.stream, known_pages.touch_rows, n * row_pages * self._width, self._nsid, *arguments)

    def leave(self, pages: NDArray[np.int64]) -> None:
        """Evict pages that are clean and not pinned."""
        bulk = self._bulk
        for rows in self._batches(pages):
            n = len(rows.pages)
            bulk.stream.launch(known_pages.leave_rows, n * self._width, self._core, self._record, bulk.table, n)
            bulk.stream.wait()

    # -- past the cache -----------------------------------------------------------------------------------------

    def copy(
        self, first: int, end: int, to: Callable[[int, int, int], None] | None, into: Any, stopped: Callable[[], bool]
    ) -> list[tuple[int, int]] | None:
        """Read pages to a function, or into memory; see `Bulk.copy`."""
        bulk, size = self._bulk, self._cache.page_size
        stale: list[tuple[int, int]] = []
        failed: list[int] = []
        for rows in self._batches((first, end)):
            n = len(rows.pages)
            absent = bulk.per_row(known_pages.look_rows, self._core, n)
            if 2 * absent.sum() < rows.counts.sum():
                return None

            def copy_slot(slot: int, low: int, good: NDArray[np.bool_], rows: _Rows = rows) -> None:
                if not good.all():
                    failed.append(low)
                elif to is not None:
                    source, nbytes = self._slot_bytes(rows, slot, low, low + len(good))
                    to((int(rows.pages[low]) - first) * size, source, nbytes)

            base = None if into is None else int(into.ctypes.data) - first * size
            done = self._read(rows, np.ones(n, np.bool_), copy_slot, lambda: bool(failed) or stopped(), base, into)
            if failed or not done or stopped():
                return None
            if self._space.writable:
                same = bulk.per_row(known_pages.compare_rows, self._core, n)
                edges = ranges_of(np.flatnonzero(same != rows.counts))
                stale += [(int(rows.pages[a]), int(rows.pages[b - 1] + rows.counts[b - 1])) for a, b in edges]
        return stale

    # -- slot by slot -------------------------------------------------------------------------------------------

    def _read(
        self,
        rows: _Rows,
        chosen: NDArray[np.bool_],
        use: Callable[[int, int, NDArray[np.bool_]], None],
        stopped: Callable[[], bool],
        base: int | None = None,
        into: Any = None,
    ) -> bool:
        """Read the chosen rows, slot by slot, until `stopped`; return False if the medium does not answer.

        They are read to staging, and ``use(slot, first row, good)`` launches work on a slot in the stream; or each page
        to `base` plus its offset in the file.
        """
        bulk, size = self._bulk, self._cache.page_size
        slots = int(rows.slots[-1]) + 1
        cuts = np.searchsorted(rows.slots, np.arange(slots + 1))
        started = finished = 0
        with bulk.reading(into) as reads:
            try:
                while finished < slots and not stopped():
                    if started < slots and started - finished < SLOTS // 2:
                        slot = started % SLOTS
                        self._release(slot)
                        part = slice(cuts[started], cuts[started + 1])
                        batch = rows.part(part).part(chosen[part])
                        to = bulk.staging(slot) + batch.positions * size if base is None else base + batch.pages * size
                        blocks = size // BLOCK
                        reads.start(slot, self._nsid, batch.pages * blocks, batch.counts * blocks, to)
                        bulk.commands += len(to)
                        bulk.pages_read += int(batch.counts.sum())
                        started += 1
                        continue
                    slot, low, high = finished % SLOTS, cuts[finished], cuts[finished + 1]
                    if not reads.wait(slot, self._cache.timeout, stopped):
                        return False
                    good = np.ones(high - low, np.bool_)
                    good[chosen[low:high]] = reads.statuses(slot) == 0
                    use(slot, int(low), good)
                    if base is None:
                        self._pending[slot] = bulk.stream.mark()
                    finished += 1
            finally:
                for slot in range(SLOTS):
                    self._release(slot)
        return True

    def _slot_bytes(self, rows: _Rows, slot: int, low: int, high: int) -> tuple[int, int]:
        """Return address and size of rows [low, high), which are all rows of a slot that was read."""
        size, first = self._cache.page_size, int(rows.positions[low])
        end = int(rows.positions[high - 1] + rows.counts[high - 1])
        return self._bulk.source(slot) + first * size, (end - first) * size

    def _release(self, slot: int) -> None:
        """Wait until a slot's staging may be used again."""
        if slot in self._pending:
            _wait_until(self._pending.pop(slot))


def _wait_until(done: Callable[[], bool]) -> None:
    """Wait for work in a stream, which ends without the host."""
    attempt = 0
    while not done():
        attempt += 1
        if attempt > 50:
            clock.sleep(min(20e-6 * (attempt - 50), 1e-4))
