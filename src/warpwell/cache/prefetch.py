"""Bulk reads of the host: prefetches, and reads past the cache.

Staging has a few slots. While two of them are read from the medium, earlier ones are published to frames, or copied to
their target. `warpwell.cache.known_pages` explains why pages that kernels use in the meantime are never mixed up.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .._check import LONGEST
from .._future import Future
from .._os import clock, interruptible, uninterrupted
from .._ranges import Range, ranges_of
from .._settings import settings
from .._trace import traced
from ..storage import Controller, CuFileOptions, FileMedium, GpuDirectReads, StagedReads
from ..targets import Block, LaunchStream, stream_on
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
MAX_UNFINISHED = 17
"""Maximum number of prefetches that are not done: one reads, the others wait for it."""
DRAIN_TIMEOUT_SECONDS = 5.0
"""How long a prefetch that is cancelled or fails waits for its reads in flight."""
BATCH_PAGES = {"cuda": 1 << 20, "cpu": 1 << 16, "interp": 1 << 10}
"""Maximum number of pages that one launch looks up."""
COMPILE_SECONDS = 60.0
"""Additional time for a first prefetch, because its kernels are compiled."""
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


class Bulk:
    """Bulk reads for the arrays of one cache. Staging is allocated with the first.

    Parameters
    ----------
    cache : Cache
    cufile : CuFileOptions
        When reads go to device memory directly.

    Attributes
    ----------
    commands, pages_read, prefetched, skipped : int
        For the cache's statistics.
    stream : LaunchStream
        The stream in which pages are published and copied, set by the first read.
    """

    def __init__(self, cache: Any, cufile: CuFileOptions = CUFILE) -> None:
        self._weak = weakref.ref(cache)  # a cache that is dropped is closed at once, not by the next collection
        self._staging_lock = threading.Lock()
        self._lock = threading.Lock()  # of the two tables below
        self._unfinished: dict[Prefetch, tuple[int, Callable[[], None]]] = {}
        """Prefetches that are not done, with namespace id and work, in order; a thread does the work of the first."""
        self._detaching: set[int] = set()
        self._width = 32 if cache.device == "cuda" else 1
        self._staging: Block | None = None
        self._reads: GpuDirectReads | None = None
        self._busy: dict[int, Callable[[], bool]] = {}
        """For each slot whose staging is in use by the stream, a function that returns whether that work is done."""
        self._cufile, self._cufile_failure = cufile, ""
        self.commands = self.pages_read = self.prefetched = self.skipped = 0

    @property
    def _cache(self) -> Any:
        cache = self._weak()
        assert cache is not None, "callers keep the cache alive"
        return cache

    # -- prefetches -------------------------------------------------------------------------------------------------

    def prefetch(
        self,
        nsid: int,
        pages: NDArray[np.int64] | Range,
        *,
        once: bool = False,
        after: Prefetch | None = None,
        evict_first: NDArray[np.int64] | None = None,
    ) -> Prefetch:
        """Begin to read pages of an array into the cache, after all earlier prefetches.

        Parameters
        ----------
        nsid : int
        pages : ndarray or (int, int)
            Ascending numbers, counted from the array's first page; or the first and the end of a range.
        once : bool
            Whether the clock may take their frames when it first passes.
        after : Prefetch, optional
            An earlier prefetch whose pages these must not evict.
        evict_first : ndarray, optional
            Pages that are evicted first, if they are clean and not pinned.
        """
        prefetch = Prefetch(len(pages) if isinstance(pages, np.ndarray) else max(0, pages[1] - pages[0]))
        if not prefetch.pages:
            return prefetch
        cache = self._cache

        @traced("prefetch")
        def work() -> None:
            with self._staging_lock, cache.layout_lock():
                self._prepare()
                space = cache.space(nsid)
                prefetch.hand = int(self._read_words(space.pool.address + 8 * F_HAND, 1)[0])
                if evict_first is not None and evict_first.size:
                    self._evict(space, evict_first)
                limit = (after or prefetch).hand + 2 * space.pool.frames
                self._read_ahead(space, prefetch, pages, limit, 0 if once else REF)
                space.pool.schedule_residency_check()

        while len(self._unfinished) >= MAX_UNFINISHED:  # a caller that is faster than the medium waits
            with contextlib.suppress(TimeoutError, StopIteration, RuntimeError):  # another thread changes the table
                next(iter(self._unfinished)).exception(1.0)
        with uninterrupted(), self._lock:  # so that each prefetch ends
            is_first = not self._unfinished
            if nsid in self._detaching:
                self.skipped += prefetch.pages
                prefetch.set_result(prefetch.counts)
                return prefetch
            self._unfinished[prefetch] = nsid, work
            is_inline = cache.device == "interp"  # one interpreted launch at a time
            if is_first and not is_inline:
                thread = threading.Thread(target=self._work, args=(prefetch,), name="warpwell-prefetch", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the interpreter exits and starts no thread
                    prefetch.stopped = is_inline = True
        if is_inline and is_first:
            with interruptible(prefetch.cancel):  # other threads wait for the work of their prefetches here
                self._work(prefetch)
        elif is_inline:
            prefetch.exception()  # another thread does the work
        return prefetch

    def waves(
        self, nsid: int, waves: Iterable[tuple[NDArray[np.int64], NDArray[np.int64]]], *, once: bool
    ) -> Iterator[None]:
        """Read pages in waves; yield after each wave was read, while the next one is being read.

        A wave has the pages that the caller uses and the pages to read, both ascending. The pages of two waves fit into
        the array's frames: the pages of the previous wave are evicted for the next one. Close the iterator to cancel
        reads.
        """
        earlier: list[tuple[NDArray[np.int64], Prefetch]] = []
        try:
            for pages, to_read in waves:
                prefetch = self.prefetch(
                    nsid,
                    to_read,
                    once=once,
                    after=earlier[-1][1] if earlier and earlier[-1][1].pages else None,
                    evict_first=earlier[-2][0] if len(earlier) > 1 else None,
                )
                earlier = [*earlier[-2:], (pages, prefetch)]  # before a wait, which Ctrl-C may end
                if len(earlier) > 1:
                    earlier[-2][1].exception()
                    yield
            for _, prefetch in earlier[-1:]:
                prefetch.exception()
                yield
        finally:
            for _, prefetch in earlier[-1:]:
                prefetch.cancel()

    def _work(self, prefetch: Prefetch) -> None:
        """Do the work of a prefetch, then of those that wait for it."""
        following: Prefetch | None = prefetch
        while following is not None:
            prefetch, failure = following, None
            try:
                if not prefetch.stopped:
                    self._unfinished[prefetch][1]()
            except Exception as error:  # `result` raises it
                failure = error
            finally:
                with self._lock:
                    del self._unfinished[prefetch]
                    following = next(iter(self._unfinished), None)
                counts = prefetch.counts
                self.prefetched += counts.loaded - prefetch.missed  # the others are counted as misses
                self.skipped += counts.skipped
                if failure is None:
                    prefetch.set_result(counts)
                else:
                    prefetch.set_exception(failure)

    def stop(self, nsid: int | None = None) -> None:
        """Cancel all prefetches and wait for them, at most for the timeout of a medium that does not answer.

        With `nsid` that array is being detached, and later prefetches of it read nothing.
        """
        with self._lock:
            if nsid is not None:
                self._detaching.add(nsid)
            prefetches = list(self._unfinished)
        for prefetch in prefetches:
            prefetch.cancel()
        for prefetch in prefetches:
            with contextlib.suppress(TimeoutError):
                prefetch.exception(min(2 * self._cache.timeout + COMPILE_SECONDS, LONGEST))

    def reads(self, nsid: int) -> bool:
        """Return whether a prefetch of an array is not done."""
        return nsid in [reading for reading, _ in list(self._unfinished.values())]

    def require_gpudirect(self, nsid: int) -> None:
        """Raise ArgumentError if WARPWELL_GPUDIRECT is "on" and cuFile cannot read an array's file to a GPU."""
        cache = self._cache
        if settings.gpudirect != "on" or cache.device != self._cufile.device:
            return
        with interruptible(lambda: None), self._staging_lock, cache.layout_lock():
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
        self._detaching.discard(nsid)
        if self._reads is not None:
            with self.stream.on_device():
                self._reads.close_file(nsid)

    def close(self) -> None:
        """Deregister everything at cuFile, in bounded time; no read is in flight."""
        if self._reads is not None:
            with self.stream.on_device():
                self._reads.close()

    # -- staging, and memory for rows -------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Allocate what is missing; set the sizes and addresses that the following methods use."""
        if self._staging is not None:
            return
        cache = self._cache
        size: int = cache.page_size
        self._slot_pages = max(1, SLOT_BYTES[cache.device] // size)
        self._slot_bytes = self._slot_pages * size
        self._max_pages = max(1, min(COMMAND_BYTES // size, self._slot_pages // 4))
        self._max_rows = max(64, BATCH_PAGES[cache.device] // self._max_pages)
        table_words = self._max_rows * (known_pages.ROW_WORDS + self._max_pages) + known_pages.COUNTERS
        self.stream: LaunchStream = stream_on(cache.device)
        # rows, recorded page words (`_max_pages` for each row) and counters in device memory
        self._block: Block = cache.memory.allocate(8 * table_words)
        self._table = self._block.address
        self._page_words = self._table + 8 * known_pages.ROW_WORDS * self._max_rows
        self._counters = self._page_words + 8 * self._max_pages * self._max_rows
        self._shared: Block = cache.memory.allocate_shared(8 * self._max_rows * (known_pages.ROW_WORDS + 1) + 64)
        if not isinstance(cache.controller, Controller):
            # a drive reads only to memory of its own: kernels load pages one by one
            self._staging, self._device_slot = Block(0, 0, None, host=True), None
            return
        # The bytes of a slot, before they are copied to frames. Two buffers and two streams, so that one is copied
        # while the other is published, were slower by at least 8 %: each slot then has events that streams wait for.
        self._device_slot = cache.memory.allocate(self._slot_bytes) if cache.device == "cuda" else None
        staging = cache.memory.allocate_shared(SLOTS * self._slot_bytes)
        self._reads = GpuDirectReads(
            StagedReads(cache.controller, slots=SLOTS, rows=self._slot_pages),
            staging,
            cache.memory,
            slots=SLOTS,
            zero=self.stream.zero,
            options=self._cufile,
            failure=self._cufile_failure,
        )
        self._staging = staging

    def _staging_address(self, slot: int) -> int:
        assert self._staging is not None
        return self._staging.address + slot * self._slot_bytes

    def _slot_data(self, rows: _Rows, slot: int, low: int, high: int) -> tuple[int, int, int]:
        """Return the address of a slot that was read (in staging or device memory); address and size of some rows."""
        assert self._reads is not None
        start = self._reads.device_address(slot) or self._staging_address(slot)
        size, first = self._cache.page_size, int(rows.positions[low])
        end = int(rows.positions[high - 1] + rows.counts[high - 1])
        return start, start + first * size, (end - first) * size

    def _batches(self, space: PageSpace, pages: NDArray[np.int64] | Range) -> Iterator[_Rows]:
        """Copy rows of pages to the device and yield them, as many at a time as one launch looks up."""
        rows = _Rows.of(pages, self._max_pages, self._slot_pages)
        for start in range(0, len(rows.pages), self._max_rows):
            batch = rows.part(slice(start, start + self._max_rows))
            batch.slots[:] -= batch.slots[0]
            if space.host:
                batch.positions[:] = batch.pages
            n = len(batch.pages)
            table = self._shared.words[: n * known_pages.ROW_WORDS].reshape(n, known_pages.ROW_WORDS)
            table[:, T_PAGE], table[:, T_COUNT] = batch.pages + space.base, batch.counts
            table[:, T_POSITION] = batch.positions
            self.stream.copy(self._table, self._shared.address, table.nbytes)
            yield batch

    def _look(self, space: PageSpace, n: int, *, compares: bool = False) -> NDArray[np.int64]:
        """Run `look_rows` on `n` rows; return the count that it stored for each."""
        offset = known_pages.ROW_WORDS * self._max_rows
        out = self._shared.address + 8 * offset
        arguments = space.words["core"], self._table, self._page_words, n, self._max_pages, int(compares), out
        self.stream.launch(known_pages.look_rows, n, *arguments)
        self.stream.wait()
        return self._shared.words[offset : offset + n].copy()

    def _read_words(self, address: int, n: int) -> NDArray[np.int64]:
        """Return up to 8 words of device memory, in the order of the stream, without waiting for other streams."""
        offset = (known_pages.ROW_WORDS + 1) * self._max_rows
        self.stream.copy(self._shared.address + 8 * offset, address, 8 * n)
        self.stream.wait()
        return self._shared.words[offset : offset + n].copy()

    @contextlib.contextmanager
    def _reading(self, into: Any) -> Iterator[GpuDirectReads]:
        """Keep I/O threads awake for the block; memory to which the medium may still write is not reused.

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

    def _read(
        self,
        space: PageSpace,
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
        cache = self._cache
        size, slots = cache.page_size, int(rows.slots[-1]) + 1
        cuts = np.searchsorted(rows.slots, np.arange(slots + 1))
        started = finished = 0
        with self._reading(into) as reads:
            try:
                while finished < slots and not stopped():
                    if started < slots and started - finished < SLOTS // 2:
                        slot = started % SLOTS
                        self._release(slot)
                        part = slice(cuts[started], cuts[started + 1])
                        batch = rows.part(part).part(chosen[part])
                        start, pages = (
                            (self._staging_address(slot), batch.positions) if base is None else (base, batch.pages)
                        )
                        blocks = size // BLOCK
                        reads.start(slot, space.nsid, batch.pages * blocks, batch.counts * blocks, start + pages * size)
                        self.commands += len(pages)
                        self.pages_read += int(batch.counts.sum())
                        started += 1
                        continue
                    slot, low, high = finished % SLOTS, cuts[finished], cuts[finished + 1]
                    if not reads.wait(slot, cache.timeout, stopped):
                        return False
                    good = np.ones(high - low, np.bool_)
                    good[chosen[low:high]] = reads.statuses(slot) == 0
                    use(slot, int(low), good)
                    if base is None:
                        self._busy[slot] = self.stream.mark()
                    finished += 1
            finally:
                for slot in range(SLOTS):
                    self._release(slot)
        return True

    def _release(self, slot: int) -> None:
        """Wait until a slot's staging may be used again."""
        if slot in self._busy:
            _wait_until(self._busy.pop(slot))

    # -- into the cache ---------------------------------------------------------------------------------------------

    def _read_ahead(
        self, space: PageSpace, prefetch: Prefetch, pages: NDArray[np.int64] | Range, limit: int, mark: int
    ) -> None:
        """Read pages into frames."""
        cache = self._cache
        self.stream.zero(self._counters, 8 * known_pages.COUNTERS)
        try:
            for rows in self._batches(space, pages):
                if prefetch.stopped:
                    return
                n = len(rows.pages)
                is_short = rows.counts.mean() * cache.page_size < SHORT_BYTES and self._max_pages > 1
                # warps load the pages if the host cannot read them, or if many warps are faster
                if not space.host and (self._reads is None or (is_short and self._width > 1)):
                    row_pages = int(rows.counts.max())
                    arguments = self._table, n, row_pages, self._counters
                    cache.run(known_pages.touch_rows, n * row_pages, space.nsid, *arguments, stream=self.stream)
                    continue
                absent = self._look(space, n)
                prefetch.present += int((rows.counts - absent).sum())
                if space.host:
                    self._publish(space, 0, n, space.host, limit, mark)
                    self.pages_read += int(absent.sum())
                    _wait_until(self.stream.mark())
                elif absent.any() and not self._read_into_frames(space, rows, absent, prefetch, limit, mark):
                    return
        finally:
            counts = self._read_words(self._counters, known_pages.COUNTERS)
            prefetch.loaded += int(counts[LOADED] + counts[MISSED])
            prefetch.missed += int(counts[MISSED])
            prefetch.present += int(counts[CHANGED])
            prefetch.failed += int(counts[FAILED])

    def _read_into_frames(
        self, space: PageSpace, rows: _Rows, absent: NDArray[np.int64], prefetch: Prefetch, limit: int, mark: int
    ) -> bool:
        """Read rows with absent pages to staging and publish them; return False if the medium does not answer."""

        def publish(slot: int, low: int, good: NDArray[np.bool_]) -> None:
            high = low + len(good)
            prefetch.failed += int(absent[low:high][~good].sum())
            if not absent[low:high].any():
                return
            source, address, nbytes = self._slot_data(rows, slot, low, high)
            if self._device_slot is not None and source == self._staging_address(slot):
                # the copy engine has the whole rate of the bus; warps that pull pages have two thirds of it
                self.stream.copy(self._device_slot.address + address - source, address, nbytes)
                source = self._device_slot.address
            for first, end in ranges_of(np.flatnonzero(good)):
                self._publish(space, low + first, end - first, source, limit, mark)

        return self._read(space, rows, absent > 0, publish, lambda: prefetch.stopped)

    def _publish(self, space: PageSpace, first: int, n: int, source: int, limit: int, mark: int) -> None:
        # on a GPU a warp takes 4 KiB: one page, or eight; else a thread takes a row
        unit = max(1, 4096 // self._cache.page_size) if self._width > 1 else self._max_pages
        self.stream.launch(
            known_pages.publish_rows,
            n * -(-self._max_pages // unit) * self._width,
            space.words["core"],
            space.words["record"],
            self._table,
            self._page_words,
            first,
            n,
            self._max_pages,
            unit,
            source,
            limit,
            mark,
            self._counters,
        )

    def _evict(self, space: PageSpace, pages: NDArray[np.int64]) -> None:
        """Evict pages that are clean and not pinned."""
        for rows in self._batches(space, pages):
            n, words = len(rows.pages), space.words
            self.stream.launch(known_pages.evict_rows, n * self._width, words["core"], words["record"], self._table, n)
            self.stream.wait()

    # -- past the cache -----------------------------------------------------------------------------------------

    def copy(
        self, nsid: int, first: int, end: int, *, to: Callable[[int, int, int], None] | None = None, into: Any = None
    ) -> list[Range] | None:
        """Read the bytes of pages [first, end) from the medium; return the ranges of pages that may be stale.

        Either ``to(offset, address, nbytes)`` is called for each chunk, which is at `address` in staging until the
        work that it launches in `stream` is done; `offset` counts from the first byte of page `first`. Or they are read
        `into` a uint8 array, which starts at a multiple of 4096.

        A page that is or was in the cache during the read may be newer than the medium: it is stale. Return None
        if a read failed, or if most pages are in the cache: then the read is not complete.
        """
        cache = self._cache
        with interruptible(lambda: None) as interrupts, self._staging_lock, cache.layout_lock():
            self._prepare()
            space, size = cache.space(nsid), cache.page_size
            if self._reads is None:
                return None
            stale: list[Range] = []
            failed: list[int] = []

            def copy_slot(slot: int, low: int, good: NDArray[np.bool_]) -> None:
                if not good.all():
                    failed.append(low)
                elif to is not None:
                    _, source, nbytes = self._slot_data(rows, slot, low, low + len(good))
                    to((int(rows.pages[low]) - first) * size, source, nbytes)

            def stopped() -> bool:
                return bool(failed or interrupts.raised)

            base = None if into is None else int(into.ctypes.data) - first * size
            for rows in self._batches(space, (first, end)):
                n = len(rows.pages)
                absent = self._look(space, n)
                if 2 * absent.sum() < rows.counts.sum():
                    return None
                done = self._read(space, rows, np.ones(n, np.bool_), copy_slot, stopped, base, into)
                if not done or stopped():
                    return None
                if space.writable:
                    same = self._look(space, n, compares=True)
                    edges = ranges_of(np.flatnonzero(same != rows.counts))
                    stale += [(int(rows.pages[a]), int(rows.pages[b - 1] + rows.counts[b - 1])) for a, b in edges]
            return stale


_abandoned: list[Any] = []
"""Staging of reads that did not complete: a medium may write to it at any time."""


class _Rows(NamedTuple):
    """Rows of consecutive pages, each read by one command; counted from the array's first page."""

    pages: NDArray[np.int64]
    counts: NDArray[np.int64]
    slots: NDArray[np.int64]
    positions: NDArray[np.int64]

    @classmethod
    def of(cls, pages: NDArray[np.int64] | Range, max_pages: int, slot_pages: int) -> _Rows:
        """Cut ascending pages into rows of at most `max_pages`, and give each row a place in a staging slot."""
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


def _wait_until(done: Callable[[], bool]) -> None:
    """Wait for work in a stream, which ends without the host."""
    attempt = 0
    while not done():
        attempt += 1
        if attempt > 50:
            clock.sleep(min(20e-6 * (attempt - 50), 1e-4))
