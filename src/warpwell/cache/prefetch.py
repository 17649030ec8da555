"""Bulk reads of the host: prefetches with tickets, and bytes read past the cache.

Staging has a few slots. While one is being read from the medium, the one before it is published to frames, or copied to
where it is wanted; see `warpwell.cache.known_pages` for why pages that kernels use meanwhile are never mixed up.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .._os import clock, interruptible, uninterrupted
from .._settings import settings
from .._trace import traced
from ..storage import BulkReads, Controller, CuFileOptions, FileMedium, GpuDirectReads, QueueServer, StagedReads
from ..targets import Allocator, Block
from ..targets.launch_stream import LaunchStream, stream_on
from . import known_pages
from .known_pages import CAME, CHANGED, FAILED, T_COUNT, T_PAGE, T_PLACE, TOUCHED
from .layout import BLOCK, F_HAND
from .partition import PageSpace
from .word import REF

SLOTS = 4
"""Slots of staging: two are read, two are published or copied."""
SLOT_BYTES = {"cuda": 16 << 20, "cpu": 4 << 20, "interp": 16 << 10}
COMMAND_BYTES = 128 << 10
"""Most bytes of a command: a page that a kernel waits for waits for one of them at most."""
SHORT_BYTES = 16 << 10
"""Mean bytes of a command below which a GPU's warps read the pages one by one: the host submits a million a second."""
WAITING = 16
"""Prefetches that wait for their turn, at most."""
GRACE = 5.0
"""Seconds that reads in flight get when nobody wants them any more."""
BATCH = {"cuda": 1 << 20, "cpu": 1 << 16, "interp": 1 << 10}
"""Pages that are looked at together, at most."""


CUFILE = CuFileOptions()
"""When reads go to device memory directly."""
COMPILING = 60.0
"""Seconds that a first prefetch may take longer, while its kernels are compiled."""


class Ticket:
    """What becomes of a prefetch; see `Array.prefetch`.

    Attributes
    ----------
    pages : int
        Pages asked for.
    came : int
        Pages that were read into the cache.
    dropped : int
        Pages that are not read because no frame was free, or because the prefetch was cancelled.
    failed : int
        Pages whose read failed: who uses them gets the error.
    present : int
        Pages that were in the cache before, or were read by others meanwhile.
    error : Exception or None
        What ended it early, other than the medium.
    """

    def __init__(self, pages: int = 0) -> None:
        self.pages = pages
        self.came = self.dropped = self.failed = self.present = 0
        self.error: Exception | None = None
        self.hand = self.touched = 0
        self._over = threading.Event()
        self._process = os.getpid()
        self.cancelled = False
        if not pages:
            self._over.set()

    def __repr__(self) -> str:
        state = "done" if self.done else "under way"
        counts = ", ".join(f"{name} {getattr(self, name)}" for name in ("came", "present", "dropped", "failed"))
        return f"<prefetch of {self.pages} pages, {state}: {counts}>"

    def __reduce__(self) -> tuple[Any, ...]:
        self.wait()  # a pool sends what became of it
        return _told, (self.pages, self.came, self.failed, self.present)

    @property
    def done(self) -> bool:
        """Whether nothing more happens; then the counts add up to `pages`."""
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the prefetch is done, up to `timeout` seconds; return whether it is.

        Raises
        ------
        ForkError
            It goes on in the process that this one was forked from.
        """
        if not self.done and self._process != os.getpid():
            raise errors.ForkError("this prefetch was begun before the fork, and goes on in the parent: wait there")
        return clock.wait(self._over, timeout)

    def cancel(self) -> None:
        """Read no further pages; what has not come counts as dropped."""
        self.cancelled = True

    def finish(self) -> None:
        """Note that nothing more happens: pages that were not told of are dropped."""
        self.dropped = self.pages - self.came - self.present - self.failed
        self._over.set()


def _told(pages: int, came: int, failed: int, present: int) -> Ticket:
    ticket = Ticket(pages)
    ticket.came, ticket.failed, ticket.present = came, failed, present
    ticket.finish()
    return ticket


class Frames(Protocol):
    """What bulk reads need of a `Cache`."""

    device: str
    page_size: int
    timeout: float
    controller: QueueServer
    memory: Allocator

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Keep frames and table in place for the block."""

    def space(self, nsid: int) -> PageSpace:
        """Return the record of an array."""

    def run_in(self, stream: LaunchStream, kernel: Any, threads: int, nsid: int, *words: int) -> None:
        """Run a kernel that may wait for storage in a stream; raise what it latched."""


class Bulk:
    """Bulk reads for the arrays of one cache. Staging is allocated with the first.

    Parameters
    ----------
    cache : Frames
    cufile : CuFileOptions
        When reads go to device memory directly.

    Attributes
    ----------
    commands, pages_read, prefetched, dropped : int
        For the cache's statistics.
    """

    def __init__(self, cache: Frames, cufile: CuFileOptions = CUFILE) -> None:
        self._weak = weakref.ref(cache)  # a cache that is dropped is closed at once, not by the next collection
        self._turn = threading.Lock()  # of staging
        self._lock = threading.Lock()  # of the queue below
        self._waiting: deque[tuple[Ticket, Callable[[], None]]] = deque()
        self._tickets: dict[Ticket, int] = {}
        """Those that are not done, each with its array's namespace id."""
        self._running = False
        self._staging: Block | None = None
        self._reads: GpuDirectReads | None = None
        self._cufile, self._cufile_failure = cufile, ""
        self._stream: LaunchStream
        self.commands = self.pages_read = self.prefetched = self.dropped = 0

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
        after: Ticket | None = None,
        leave: NDArray[np.int64] | None = None,
    ) -> Ticket:
        """Begin to read pages of an array into the cache.

        Parameters
        ----------
        nsid : int
        pages : ndarray or (int, int)
            Ascending numbers, counted from the array's first page; or the first and the end of a range.
        once : bool
            Whether the clock may take them when it first comes by.
        after : Ticket, optional
            A prefetch that went before, whose pages these must not evict.
        leave : ndarray, optional
            Pages that are evicted first, if they are clean and nobody holds them.
        """
        ticket = Ticket(len(pages) if isinstance(pages, np.ndarray) else max(0, pages[1] - pages[0]))
        if not ticket.pages:
            return ticket
        cache, mark = self._cache, 0 if once else REF

        def work() -> None:
            with self._turn, cache.held():
                self._prepare()
                job = _Job(self, nsid)
                ticket.hand = self._read_word(job.pool + 8 * F_HAND)
                pool = cache.space(nsid).pool
                limit = (after or ticket).hand + 2 * pool.frames
                if leave is not None:
                    job.leave(leave)
                job.prefetch(ticket, pages, limit, mark)
                pool.schedule_residency_check()

        if cache.device == "interp":  # one interpreted launch at a time
            self._tickets[ticket] = nsid
            self._run(ticket, work)
            return ticket
        while len(self._waiting) >= WAITING:  # who asks faster than the medium reads waits, instead of a growing queue
            self._oldest().wait(1.0)
        with uninterrupted(), self._lock:  # so that no ticket is left that nobody ends
            self._tickets[ticket] = nsid
            self._waiting.append((ticket, work))
            if not self._running:
                self._running = True
                try:
                    threading.Thread(target=self._work, name="warpwell-prefetch", daemon=True).start()
                except RuntimeError:  # none can be started where the interpreter ends
                    self._running = False
                    while self._waiting:
                        self._end(self._waiting.popleft()[0])
        return ticket

    def _oldest(self) -> Ticket:
        with self._lock:
            return self._waiting[0][0] if self._waiting else Ticket()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running = False
                    return
                ticket, work = self._waiting.popleft()
            self._run(ticket, work)

    @traced("prefetch")
    def _run(self, ticket: Ticket, work: Callable[[], None]) -> None:
        try:
            if not ticket.cancelled:
                work()
        except Exception as error:  # a prefetch is a hint: who uses the pages reads them
            ticket.error = error
        finally:
            self._end(ticket)

    def _end(self, ticket: Ticket) -> None:
        self._tickets.pop(ticket, None)
        ticket.finish()
        self.prefetched += ticket.came - ticket.touched  # those are counted as misses
        self.dropped += ticket.dropped

    def stop(self) -> None:
        """Cancel all prefetches, and wait for them: up to the timeout where the medium is silent."""
        for ticket in list(self._tickets):
            ticket.cancel()
        for ticket in list(self._tickets):
            ticket.wait(2 * self._cache.timeout + COMPILING)

    def require_gpudirect(self, nsid: int) -> None:
        """Raise ArgumentError if WARPWELL_GPUDIRECT is "on" and cuFile cannot read an array's file to a GPU."""
        cache = self._cache
        if settings.gpudirect != "on" or cache.device != self._cufile.device:
            return
        with interruptible(lambda: None), self._turn, cache.held():
            self._prepare()
            if self._reads is None or not isinstance(medium := cache.controller.medium(nsid), FileMedium):
                return
            with self._stream.on_device():
                obstacle = self._reads.obstacle(nsid)
        if obstacle:
            raise errors.ArgumentError(
                f"WARPWELL_GPUDIRECT is on, but cuFile cannot read {medium.name}: {obstacle}; set it to auto",
                name="WARPWELL_GPUDIRECT",
            )

    def forget(self, nsid: int) -> None:
        """Deregister an array's file at cuFile; none of its reads is in flight. Call it before the medium is closed."""
        if self._reads is not None:
            with self._stream.on_device():
                self._reads.close_file(nsid)

    def close(self) -> None:
        """Deregister everything at cuFile, in bounded time; no read is in flight."""
        if self._reads is not None:
            with self._stream.on_device():
                self._reads.close()

    def reads(self, nsid: int) -> bool:
        """Return whether a prefetch of an array is not done."""
        return nsid in list(self._tickets.values())

    # -- what is read past the cache ----------------------------------------------------------------------------

    def copy(
        self, nsid: int, first: int, end: int, *, to: Callable[[int, int, int], None] | None = None, into: Any = None
    ) -> list[tuple[int, int]] | None:
        """Read the bytes of pages [first, end) from the medium; return the ranges of pages that may be wrong.

        Either ``to(offset, address, nbytes)`` is called for each piece, which is at `address` in staging until the
        work that it gives to `stream` is done; `offset` counts from the first byte of page `first`. Or they are read
        `into` a uint8 array, which starts at a multiple of 4096.

        Pages that are in the cache, or were meanwhile, may be older on the medium: those are wrong. Return None if a
        read failed, or if most pages are in the cache: then not all was read.
        """
        cache = self._cache
        with interruptible(lambda: None) as interrupts, self._turn, cache.held():
            self._prepare()
            if self._reads is None:
                return None
            return _Job(self, nsid).copy(first, end, to, into, lambda: bool(interrupts.raised))

    # -- staging, and memory for rows -------------------------------------------------------------------------------

    @property
    def stream(self) -> LaunchStream:
        """The stream in which pages are published and copied."""
        self._prepare()
        return self._stream

    def _prepare(self) -> None:
        if self._staging is not None:
            return
        cache = self._cache
        size = cache.page_size
        self.slot_pages = max(1, SLOT_BYTES[cache.device] // size)
        self.slot_bytes = self.slot_pages * size
        self.most = max(1, min(COMMAND_BYTES // size, self.slot_pages // 4))
        self.rows = max(64, BATCH[cache.device] // self.most)
        words = self.rows * (known_pages.ROW_WORDS + self.most) + known_pages.COUNTERS
        self._stream = stream_on(cache.device)
        self._table = cache.memory.allocate(8 * words)
        self._shared = cache.memory.allocate_shared(8 * self.rows * (known_pages.ROW_WORDS + 1) + 64)
        if not isinstance(cache.controller, Controller):
            # a drive reads to no other memory than its own: kernels bring pages one by one
            self._staging, self.near = Block(0, 0, None, host=True), None
            return
        # What was read of a slot, on its way to frames. Two of them and two streams, so that one is copied while the
        # other is published, were slower by 8 % and more: each slot then has events that streams wait for.
        self.near = cache.memory.allocate(self.slot_bytes) if cache.device == "cuda" else None
        staging = cache.memory.allocate_shared(SLOTS * self.slot_bytes)
        self._reads = GpuDirectReads(
            StagedReads(cache.controller, slots=SLOTS, rows=self.slot_pages),
            staging,
            cache.memory,
            slots=SLOTS,
            zero=self._stream.zero,
            options=self._cufile,
            failure=self._cufile_failure,
        )
        self._staging = staging

    @property
    def on_demand(self) -> bool:
        """Whether all pages are read by kernels, because the host reads none."""
        return self._reads is None

    def staging(self, slot: int) -> int:
        """Return the address of a slot's staging."""
        assert self._staging is not None
        return self._staging.address + slot * self.slot_bytes

    def source(self, slot: int) -> int:
        """Return the address of the bytes of a slot that was read: in staging, or in device memory."""
        return (self._reads.device_address(slot) if self._reads is not None else 0) or self.staging(slot)

    @property
    def table(self) -> int:
        """Address of the rows (device memory)."""
        return self._table.address

    @property
    def words(self) -> int:
        """Address of the words that were seen, `most` for each row (device memory)."""
        return self.table + 8 * known_pages.ROW_WORDS * self.rows

    @property
    def counters(self) -> int:
        """Address of the counters (device memory)."""
        return self.words + 8 * self.most * self.rows

    def put_rows(self, rows: _Rows) -> None:
        """Copy rows to the device, in the order of the stream."""
        n = len(rows.pages)
        table = self._shared.words[: n * known_pages.ROW_WORDS].reshape(n, known_pages.ROW_WORDS)
        table[:, T_PAGE], table[:, T_COUNT], table[:, T_PLACE] = rows.pages, rows.counts, rows.places
        self._stream.copy(self.table, self._shared.address, table.nbytes)

    def per_row(self, kernel: Any, core: int, n: int) -> NDArray[np.int64]:
        """Run `look_rows` or `compare_rows`; return what it stored for each row."""
        offset = known_pages.ROW_WORDS * self.rows
        out = self._shared.address + 8 * offset
        self._stream.launch(kernel, n, core, self.table, self.words, n, self.most, out)
        self._stream.wait()
        return self._shared.words[offset : offset + n].copy()

    def _read_word(self, address: int) -> int:
        return int(self.read_words(address, 1)[0])

    def read_words(self, address: int, n: int) -> NDArray[np.int64]:
        """Return up to 8 words of device memory, in the order of the stream: kernels of others are not waited for."""
        offset = (known_pages.ROW_WORDS + 1) * self.rows
        self._stream.copy(self._shared.address + 8 * offset, address, 8 * n)
        self._stream.wait()
        return self._shared.words[offset : offset + n].copy()

    @contextlib.contextmanager
    def reading(self, into: Any) -> Iterator[BulkReads]:
        """Keep service threads awake for the block; memory that the medium may still write to is not used again.

        Ctrl-C in the block, and errors in it, leave no read in flight and nothing half published.
        """
        reads = self._reads
        assert reads is not None
        try:
            with self._stream.on_device(), reads.staged.controller.active(reads.staged.pairs):
                try:
                    yield reads
                finally:
                    reads.cancel()
                    deadline = clock.monotonic() + min(self._cache.timeout, GRACE)
                    while reads.left() and clock.monotonic() < deadline:
                        clock.sleep(1e-3)
        finally:
            if reads.left():
                reads.close()
                self._cufile_failure = reads.failure or "earlier reads did not complete"
                _lost.append((self._staging, reads, into))
                self._staging = None


_lost: list[Any] = []
"""Staging of reads that were never answered: a medium may write to it at any time."""


@dataclass
class _Rows:
    """Rows of neighbouring pages, each read by one command; counted from the array's first page until `at` its base."""

    pages: NDArray[np.int64]
    counts: NDArray[np.int64]
    slots: NDArray[np.int64]
    places: NDArray[np.int64]

    @classmethod
    def of(cls, pages: NDArray[np.int64] | tuple[int, int], most: int, slot_pages: int) -> _Rows:
        """Cut ascending pages into rows of at most `most`, and give each a slot of staging and its place there."""
        if isinstance(pages, tuple):
            firsts, lengths = np.array([pages[0]]), np.array([pages[1] - pages[0]])
        else:
            cut = np.flatnonzero(np.diff(pages) != 1) + 1
            ends = np.concatenate((cut, [len(pages)]))
            lengths = np.diff(ends, prepend=0)
            firsts = pages[ends - lengths]
        number = -(-lengths // most)
        which = np.repeat(np.arange(len(firsts)), number)
        offset = (np.arange(len(which)) - np.repeat(np.cumsum(number) - number, number)) * most
        counts = np.minimum(most, lengths[which] - offset)
        begin = np.cumsum(counts) - counts
        room = slot_pages - most + 1  # a row that begins within it ends within the slot
        slots = begin // room
        return cls(firsts[which] + offset, counts, slots, begin - slots * room)

    def part(self, chosen: Any) -> _Rows:
        """Return some of the rows."""
        return _Rows(self.pages[chosen], self.counts[chosen], self.slots[chosen], self.places[chosen])


class _Job:
    """Bulk reads of one array; the staging is its own meanwhile."""

    def __init__(self, bulk: Bulk, nsid: int) -> None:
        self._bulk, self._nsid = bulk, nsid
        self._cache = cache = bulk._cache
        self._space = space = cache.space(nsid)
        self._core, self._record, self.pool = space.words["core"], space.words["record"], space.pool.address
        self._width = 32 if cache.device == "cuda" else 1
        self._left: dict[int, Callable[[], bool]] = {}

    def _batches(self, pages: NDArray[np.int64] | tuple[int, int]) -> Iterator[_Rows]:
        """Yield rows of pages, as many as are looked at together."""
        bulk = self._bulk
        rows = _Rows.of(pages, bulk.most, bulk.slot_pages)
        for start in range(0, len(rows.pages), bulk.rows):
            some = rows.part(slice(start, start + bulk.rows))
            some.slots -= some.slots[0]
            yield some

    def _put(self, rows: _Rows) -> None:
        self._bulk.put_rows(_Rows(rows.pages + self._space.base, rows.counts, rows.slots, rows.places))

    # -- into the cache ---------------------------------------------------------------------------------------------

    def prefetch(self, ticket: Ticket, pages: NDArray[np.int64] | tuple[int, int], limit: int, mark: int) -> None:
        """Read pages into frames."""
        bulk, space = self._bulk, self._space
        bulk.stream.zero(bulk.counters, 8 * known_pages.COUNTERS)
        try:
            for rows in self._batches(pages):
                if ticket.cancelled:
                    return
                if space.host:
                    rows.places = rows.pages
                self._put(rows)
                short = rows.counts.mean() * self._cache.page_size < SHORT_BYTES
                by_warps = bulk.on_demand or (short and self._width > 1 and bulk.most > 1)
                if by_warps and not space.host:
                    self._touch(rows)
                    continue
                absent = bulk.per_row(known_pages.look_rows, self._core, len(rows.pages))
                ticket.present += int((rows.counts - absent).sum())
                if space.host:
                    self._publish(0, len(rows.pages), space.host, limit, mark)
                    bulk.pages_read += int(absent.sum())
                    _until(bulk.stream.mark())
                    continue

                def take(
                    slot: int, low: int, good: NDArray[np.bool_], rows: _Rows = rows, absent: NDArray[np.int64] = absent
                ) -> None:
                    ticket.failed += int(absent[low : low + len(good)][~good].sum())
                    if not absent[low : low + len(good)].any():
                        return
                    source = bulk.source(slot)
                    if bulk.near is not None and source == bulk.staging(slot):
                        # the copy engine has the whole rate of the bus; warps that pull pages have two thirds of it
                        held, nbytes = self._held(rows, slot, low, low + len(good))
                        bulk.stream.copy(bulk.near.address + held - source, held, nbytes)
                        source = bulk.near.address
                    for first, end in [(0, len(good))] if good.all() else _runs(good):
                        self._publish(low + first, end - first, source, limit, mark)

                if not absent.any():
                    continue
                if not self._read(rows, absent > 0, take, lambda: ticket.cancelled):
                    return
        finally:
            counts = bulk.read_words(bulk.counters, known_pages.COUNTERS)
            ticket.came += int(counts[CAME] + counts[TOUCHED])
            ticket.touched += int(counts[TOUCHED])
            ticket.present += int(counts[CHANGED])
            ticket.failed += int(counts[FAILED])

    def _publish(self, first: int, n: int, source: int, limit: int, mark: int) -> None:
        bulk = self._bulk
        # on a GPU a warp takes 4 KiB: one page, or eight; else a thread takes a row
        unit = max(1, 4096 // self._cache.page_size) if self._width > 1 else bulk.most
        threads = n * -(-bulk.most // unit) * self._width
        bulk.stream.launch(
            known_pages.publish_rows,
            threads,
            self._core,
            self._record,
            bulk.table,
            bulk.words,
            first,
            n,
            bulk.most,
            unit,
            source,
            limit,
            mark,
            bulk.counters,
        )

    def _touch(self, rows: _Rows) -> None:
        bulk, n = self._bulk, len(rows.pages)
        most = int(rows.counts.max())
        words = (bulk.table, n, most, bulk.counters)
        self._cache.run_in(bulk.stream, known_pages.touch_rows, n * most * self._width, self._nsid, *words)

    def leave(self, pages: NDArray[np.int64]) -> None:
        """Evict pages that are clean and that nobody holds."""
        bulk = self._bulk
        for rows in self._batches(pages):
            self._put(rows)
            n = len(rows.pages)
            bulk.stream.launch(known_pages.leave_rows, n * self._width, self._core, self._record, bulk.table, n)
            bulk.stream.wait()

    # -- past the cache -----------------------------------------------------------------------------------------

    def copy(
        self, first: int, end: int, to: Callable[[int, int, int], None] | None, into: Any, stopped: Callable[[], bool]
    ) -> list[tuple[int, int]] | None:
        """Read pages to a function, or into memory; see `Bulk.copy`."""
        bulk, size = self._bulk, self._cache.page_size
        wrong: list[tuple[int, int]] = []
        failed: list[int] = []
        for rows in self._batches((first, end)):
            n = len(rows.pages)
            self._put(rows)
            absent = bulk.per_row(known_pages.look_rows, self._core, n)
            if 2 * absent.sum() < rows.counts.sum():
                return None

            def take(slot: int, low: int, good: NDArray[np.bool_], rows: _Rows = rows) -> None:
                if not good.all():
                    failed.append(low)
                elif to is not None:
                    source, nbytes = self._held(rows, slot, low, low + len(good))
                    to((int(rows.pages[low]) - first) * size, source, nbytes)

            base = None if into is None else int(into.ctypes.data) - first * size
            done = self._read(rows, np.ones(n, np.bool_), take, lambda: bool(failed) or stopped(), base, into)
            if failed or not done or stopped():
                return None
            if self._space.writable:
                same = bulk.per_row(known_pages.compare_rows, self._core, n)
                edges = _runs(same != rows.counts)
                wrong += [(int(rows.pages[a]), int(rows.pages[b - 1] + rows.counts[b - 1])) for a, b in edges]
        return wrong

    # -- slot by slot -------------------------------------------------------------------------------------------

    def _read(
        self,
        rows: _Rows,
        wanted: NDArray[np.bool_],
        take: Callable[[int, int, NDArray[np.bool_]], None],
        stopped: Callable[[], bool],
        base: int | None = None,
        into: Any = None,
    ) -> bool:
        """Read rows from the medium, slot by slot, until `stopped`; return False if the medium is silent.

        They are read to staging, and ``take(slot, first row, good)`` gives work on a slot to the stream; or each page
        to `base` plus its place in the file.
        """
        bulk, size = self._bulk, self._cache.page_size
        slots = int(rows.slots[-1]) + 1
        cuts = np.searchsorted(rows.slots, np.arange(slots + 1))
        begun = taken = 0
        with bulk.reading(into) as reads:
            try:
                while taken < slots and not stopped():
                    if begun < slots and begun - taken < SLOTS // 2:
                        slot = begun % SLOTS
                        self._finish(slot)
                        some = rows.part(slice(cuts[begun], cuts[begun + 1]))
                        some = some.part(wanted[cuts[begun] : cuts[begun + 1]])
                        to = bulk.staging(slot) + some.places * size if base is None else base + some.pages * size
                        blocks = size // BLOCK
                        reads.start(slot, self._nsid, some.pages * blocks, some.counts * blocks, to)
                        bulk.commands += len(to)
                        bulk.pages_read += int(some.counts.sum())
                        begun += 1
                        continue
                    slot, low, high = taken % SLOTS, cuts[taken], cuts[taken + 1]
                    if not reads.wait(slot, self._cache.timeout, stopped):
                        return False
                    good = np.ones(high - low, np.bool_)
                    good[wanted[low:high]] = reads.statuses(slot) == 0
                    take(slot, int(low), good)
                    if base is None:
                        self._left[slot] = bulk.stream.mark()
                    taken += 1
            finally:
                for slot in range(SLOTS):
                    self._finish(slot)
        return True

    def _held(self, rows: _Rows, slot: int, low: int, high: int) -> tuple[int, int]:
        """Return the address and the bytes of rows [low, high), which are all those of a slot that was read."""
        size, first = self._cache.page_size, int(rows.places[low])
        end = int(rows.places[high - 1] + rows.counts[high - 1])
        return self._bulk.source(slot) + first * size, (end - first) * size

    def _finish(self, slot: int) -> None:
        """Wait until a slot's staging may be used again."""
        if slot in self._left:
            _until(self._left.pop(slot))


def _runs(chosen: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the ranges [first, end) of what is chosen."""
    edges = np.flatnonzero(np.diff(chosen.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    return [(int(a), int(b)) for a, b in edges]


def _until(done: Callable[[], bool]) -> None:
    """Wait for work in a stream, which ends by itself."""
    attempt = 0
    while not done():
        attempt += 1
        if attempt > 50:
            clock.sleep(min(20e-6 * (attempt - 50), 1e-4))
