"""Bulk reads of the host: prefetches with tickets, and bytes read past the cache.

Staging has a few slots. While one is being read from the medium, the one before it is published to frames, or copied to
where it is wanted; see `warpwell.cache.known_pages` for why pages that kernels use meanwhile are never mixed up.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..storage.controller import Controller
from ..storage.host_reads import HostReads
from ..targets import Allocator, Block
from ..targets.launch_stream import LaunchStream, stream_on
from . import known_pages
from .known_pages import CAME, FAILED, NO_FRAME
from .layout import BLOCK, F_HAND
from .word import REF

SLOTS = 3
"""Slots of staging: one that is read, one whose read is waited for, one that is published."""
SLOT_BYTES = {"cuda": 16 << 20, "cpu": 4 << 20, "interp": 16 << 10}
COMMAND_BYTES = 128 << 10
"""Most bytes of a command: a page that a kernel waits for waits for one of them at most."""
GAP_BYTES = 4096
"""Bytes between two wanted pages that are read too, because a command of their own would cost more."""
BATCH = 1 << 17
"""Pages that are looked at together."""


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
        self.hand = 0
        self._over = threading.Event()
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
        """Wait until the prefetch is done, up to `timeout` seconds; return whether it is."""
        return self._over.wait(timeout)

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
    controller: Controller
    memory: Allocator

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Keep frames and table in place for the block."""

    def space(self, nsid: int) -> Any:
        """Return what is known of an array."""

    def records(self, nsid: int) -> tuple[int, int, int]:
        """Return the addresses of the core record, of the array's space record, and of its pool's record."""

    def pool_frames(self, nsid: int) -> int:
        """Return how many frames an array can use."""

    def look_soon(self, nsid: int) -> None:
        """See after the next launch whether all pages of an array are in the cache."""


class Bulk:
    """Bulk reads for the arrays of one cache. Staging is allocated with the first.

    Attributes
    ----------
    commands, pages_read, prefetched, dropped : int
        For the cache's statistics.
    """

    def __init__(self, cache: Frames) -> None:
        self._weak = weakref.ref(cache)  # a cache that is dropped is closed at once, not by the next collection
        self._turn = threading.Lock()  # of staging
        self._lock = threading.Lock()  # of the queue below
        self._waiting: deque[tuple[Ticket, Callable[[], None]]] = deque()
        self._tickets: set[Ticket] = set()
        self._running = False
        self._staging: Block | None = None
        self._reads: HostReads
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
        pages: NDArray[np.int64],
        *,
        once: bool = False,
        after: Ticket | None = None,
        leave: NDArray[np.int64] | None = None,
    ) -> Ticket:
        """Begin to read ascending pages of an array into the cache.

        Parameters
        ----------
        nsid : int
        pages : ndarray
            Counted from the array's first.
        once : bool
            Whether the clock may take them when it first comes by.
        after : Ticket, optional
            A prefetch that went before, whose pages these must not evict.
        leave : ndarray, optional
            Pages that are evicted first, if they are clean and nobody holds them.
        """
        ticket = Ticket(len(pages))
        if not ticket.pages:
            return ticket
        cache, mark = self._cache, 0 if once else REF

        def work() -> None:
            with self._turn, cache.held():
                self._prepare()
                core, record, pool = cache.records(nsid)
                ticket.hand = self._read_word(pool + 8 * F_HAND)
                limit = (after or ticket).hand + 2 * cache.pool_frames(nsid)
                if leave is not None:
                    self._leave(core, record, leave)
                publisher = _Publisher(self, ticket, core, record, cache.space(nsid), limit, mark)
                self._prefetch(ticket, nsid, pages, publisher)
                cache.look_soon(nsid)

        with self._lock:
            self._tickets.add(ticket)
            if self._cache.device != "interp":  # one interpreted launch at a time
                self._waiting.append((ticket, work))
                if not self._running:
                    self._running = True
                    try:
                        threading.Thread(target=self._work, name="warpwell-prefetch", daemon=True).start()
                    except RuntimeError:  # none can be started where the interpreter ends
                        self._running = False
                        self._waiting.clear()
                        self._end(ticket)
                return ticket
        self._run(ticket, work)
        return ticket

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running = False
                    return
                ticket, work = self._waiting.popleft()
            self._run(ticket, work)

    def _run(self, ticket: Ticket, work: Callable[[], None]) -> None:
        try:
            if not ticket.cancelled:
                work()
        except Exception as error:  # a prefetch is a hint: who uses the pages reads them
            ticket.error = error
        finally:
            self._end(ticket)

    def _end(self, ticket: Ticket) -> None:
        ticket.finish()
        self.prefetched += ticket.came
        self.dropped += ticket.dropped
        self._tickets.discard(ticket)

    def stop(self) -> None:
        """Cancel all prefetches, and wait for them: up to the timeout where the medium is silent."""
        for ticket in list(self._tickets):
            ticket.cancel()
        for ticket in list(self._tickets):
            ticket.wait(2 * self._cache.timeout)

    def _prefetch(self, ticket: Ticket, nsid: int, pages: NDArray[np.int64], publisher: _Publisher) -> None:
        cache = self._cache
        space, core = cache.space(nsid), cache.records(nsid)[0]
        reader = _Reader(self, nsid, cache.page_size)
        for start in range(0, len(pages), BATCH):
            some = pages[start : start + BATCH]
            words = self.look(core, space.base, some)
            absent = np.flatnonzero(words >= 0)
            ticket.present += len(some) - len(absent)
            if not len(absent):
                continue
            if space.host:
                publisher.from_memory(some[absent], words[absent])
            else:
                reader.run(some[absent], words[absent], publisher)
            if ticket.cancelled:
                return

    def _leave(self, core: int, record: int, pages: NDArray[np.int64]) -> None:
        width = 32 if self._cache.device == "cuda" else 1
        for start in range(0, len(pages), BATCH):
            some = pages[start : start + BATCH]
            address, words = self._batch()
            words[: len(some)] = some
            self._stream.launch(known_pages.leave_pages, len(some) * width, core, record, address, len(some))
            self._stream.wait()

    # -- what is read past the cache ----------------------------------------------------------------------------

    def copy(
        self, nsid: int, first: int, end: int, *, to: Callable[[int, int, int], None] | None = None, into: Any = None
    ) -> NDArray[np.bool_] | None:
        """Read the bytes of pages [first, end) from the medium; return which of these pages were not, or may be wrong.

        Either ``to(offset, address, nbytes)`` is called for each piece, which is at `address` in staging until the
        work that it gives to `stream` is done; `offset` counts from the first byte of page `first`. Or they are read
        `into` a uint8 array, which starts at a multiple of 4096.

        Pages that are in the cache, or were meanwhile, may be older on the medium. Where most of a part are, none of
        it is read. Return None if a read failed.
        """
        cache = self._cache
        with self._turn, cache.held():
            self._prepare()
            space, core = cache.space(nsid), cache.records(nsid)[0]
            reader = _Reader(self, nsid, cache.page_size)
            wrong = np.zeros(end - first, np.bool_)
            for start in range(first, end, BATCH):
                pages = np.arange(start, min(start + BATCH, end))
                part = wrong[start - first :][: len(pages)]
                before = self.look(core, space.base, pages)
                if (before < 0).mean() > 0.5:
                    part[:] = True
                    continue
                copier = _Copier(self, to, into, (start - first) * cache.page_size, cache.page_size)
                if not reader.run(pages, before, copier) or copier.stopped:
                    return None
                if space.writable:
                    part[:] = (before != self.look(core, space.base, pages)) | (before < 0)
            return wrong

    @property
    def stream(self) -> LaunchStream:
        """The stream in which pages are published and copied."""
        self._prepare()
        return self._stream

    # -- staging ------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        if self._staging is not None:
            return
        cache = self._cache
        self.slot_pages = max(1, SLOT_BYTES[cache.device] // cache.page_size)
        self.slot_bytes = self.slot_pages * cache.page_size
        self._stream = stream_on(cache.device)
        staging = cache.memory.allocate_shared(SLOTS * (self.slot_bytes + 24 * self.slot_pages) + 16 * BATCH + 8)
        self._reads = HostReads(cache.controller, slots=SLOTS, rows=self.slot_pages)
        self._lists_at = SLOTS * self.slot_bytes
        self._batch_at = self._lists_at + 24 * SLOTS * self.slot_pages
        self._staging = staging

    def staging(self, slot: int) -> int:
        """Return the address of a slot's staging."""
        assert self._staging is not None
        return self._staging.address + slot * self.slot_bytes

    def lists(self, slot: int) -> tuple[int, NDArray[np.int64]]:
        """Return address and memory of a slot's pages, words and places, shape ``(3, slot_pages)``."""
        assert self._staging is not None
        offset = self._lists_at + 24 * slot * self.slot_pages
        words = self._staging.words[offset // 8 : offset // 8 + 3 * self.slot_pages]
        return self._staging.address + offset, words.reshape(3, self.slot_pages)

    def look(self, core: int, base: int, pages: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what `known_pages.look` finds of pages counted from page `base`."""
        n = len(pages)
        address, words = self._batch()
        words[:n] = pages
        self._stream.launch(known_pages.look_pages, n, core, base, address, address + 8 * BATCH, n)
        self._stream.wait()
        return words[BATCH : BATCH + n].copy()

    def _batch(self) -> tuple[int, NDArray[np.int64]]:
        """Return address and memory of `BATCH` pages, their words, and one word."""
        assert self._staging is not None
        return self._staging.address + self._batch_at, self._staging.words[self._batch_at // 8 :]

    def _read_word(self, address: int) -> int:
        """Return a word of device memory, in the order of this stream: kernels of others are not waited for."""
        at, words = self._batch()
        self._stream.copy(at + 16 * BATCH, address, 8)
        self._stream.wait()
        return int(words[2 * BATCH])

    @contextlib.contextmanager
    def reading(self, into: Any) -> Iterator[HostReads]:
        """Keep service threads awake for the block; memory that the medium may still write to is not used again."""
        reads = self._reads
        try:
            with self._cache.controller.active(reads.pairs):
                try:
                    yield reads
                finally:
                    reads.cancel()
                    deadline = time.monotonic() + self._cache.timeout
                    while reads.left() and time.monotonic() < deadline:
                        time.sleep(1e-3)
        finally:
            if reads.left():
                _lost.append((self._staging, reads, into))
                self._staging = None


_lost: list[Any] = []
"""Staging of reads that were never answered: a medium may write to it at any time."""


class _Reader:
    """Reads pages of one array slot by slot."""

    def __init__(self, bulk: Bulk, nsid: int, page_size: int) -> None:
        self._bulk, self._nsid, self._page_size = bulk, nsid, page_size

    def run(self, pages: NDArray[np.int64], words: NDArray[np.int64], sink: _Publisher | _Copier) -> bool:
        """Read ascending pages and pass them to `sink`, until it stops; return False if the medium is silent."""
        bulk, size = self._bulk, self._page_size
        slot_pages = bulk.slot_pages
        most = max(1, min(COMMAND_BYTES // size, slot_pages))
        starts, firsts, counts, places = _pieces(pages, GAP_BYTES // size, most, slot_pages)
        slots = -(-int(starts[-1] + counts[-1]) // slot_pages)
        cuts = np.searchsorted(starts, np.arange(slots + 1) * slot_pages)
        page_cuts = np.searchsorted(places, np.arange(slots + 1) * slot_pages)
        sink.begin(pages, words)
        blocks = size // BLOCK
        begun = taken = 0
        with bulk.reading(sink.into) as reads:
            try:
                while taken < slots and not sink.stopped:
                    if begun < slots and begun - taken < SLOTS - 1:
                        slot, rows = begun % SLOTS, slice(cuts[begun], cuts[begun + 1])
                        sink.finish(slot)
                        buffers = sink.buffer(slot) + (starts[rows] - begun * slot_pages) * size
                        reads.start(slot, self._nsid, firsts[rows] * blocks, counts[rows] * blocks, buffers)
                        bulk.commands += len(buffers)
                        bulk.pages_read += int(counts[rows].sum())
                        begun += 1
                        continue
                    slot, rows = taken % SLOTS, slice(cuts[taken], cuts[taken + 1])
                    if not reads.wait(slot, bulk._cache.timeout):
                        return False
                    chosen = slice(page_cuts[taken], page_cuts[taken + 1])
                    inside = places[chosen] - taken * slot_pages
                    status = reads.statuses(slot)
                    good = np.ones(len(inside), np.bool_)
                    if status.any():
                        row = np.searchsorted(starts[rows], places[chosen], side="right") - 1
                        good = status[row] == 0
                    sink.take(slot, chosen, inside, good)
                    taken += 1
            finally:
                for slot in range(SLOTS):
                    sink.finish(slot)
        return True


def _pieces(
    pages: NDArray[np.int64], gap: int, most: int, slot_pages: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Cut ascending pages into commands.

    Returns the place in staging (in pages), first page and number of pages of each command, and the place of each page.
    Gaps of up to `gap` pages are read too; no command has more than `most` pages or reaches into the next slot.
    """
    cut = np.flatnonzero(np.diff(pages) > gap + 1) + 1
    first = pages[np.concatenate(([0], cut))]
    end = pages[np.concatenate((cut - 1, [len(pages) - 1]))] + 1
    length = end - first
    at = np.cumsum(length) - length
    places = pages - np.repeat(first - at, np.diff(np.concatenate(([0], cut, [len(pages)]))))
    # in places, commands end at multiples of `most`, which divides a slot or is one
    unit = most if slot_pages % most == 0 else slot_pages
    low, high = at // unit, (at + length - 1) // unit
    number = high - low + 1
    which = np.repeat(np.arange(len(first)), number)
    index = np.arange(len(which)) - np.repeat(np.cumsum(number) - number, number)
    start = np.maximum((low[which] + index) * unit, at[which])
    stop = np.minimum((low[which] + index + 1) * unit, at[which] + length[which])
    return start, first[which] + start - at[which], stop - start, places


class _Publisher:
    """Publishes pages of a prefetch."""

    def __init__(
        self, bulk: Bulk, ticket: Ticket, core: int, record: int, space: Any, limit: int, mark: int
    ) -> None:
        self._bulk, self._ticket = bulk, ticket
        self._core, self._record, self._space = core, record, space
        self._limit, self._mark = limit, mark
        self._left: dict[int, tuple[Callable[[], bool], NDArray[np.int64]]] = {}
        self.into = None

    @property
    def stopped(self) -> bool:
        """Whether nothing more is wanted."""
        return self._ticket.cancelled

    def begin(self, pages: NDArray[np.int64], words: NDArray[np.int64]) -> None:
        """Note the pages that follow, and their words."""
        self._pages, self._words = pages, words

    def buffer(self, slot: int) -> int:
        """Return where the next slot is read to."""
        return self._bulk.staging(slot)

    def take(self, slot: int, chosen: slice, places: NDArray[np.int64], good: NDArray[np.bool_]) -> None:
        """Begin to publish what a slot holds of pages ``pages[chosen]``, at `places` of it."""
        words = np.where(good, self._words[chosen], FAILED)
        self._publish(slot, self._pages[chosen], words, places, self._bulk.staging(slot))

    def _publish(
        self, slot: int, pages: NDArray[np.int64], words: NDArray[np.int64], places: NDArray[np.int64], source: int
    ) -> None:
        n = len(pages)
        address, lists = self._bulk.lists(slot)
        lists[0, :n], lists[1, :n], lists[2, :n] = pages, words, places
        cache, step = self._bulk._cache, 8 * self._bulk.slot_pages
        each, width = (max(1, GAP_BYTES // cache.page_size), 32) if cache.device == "cuda" else (-(-n // 4), 1)
        self._bulk.stream.launch(
            known_pages.publish_pages, -(-n // each) * width, self._core, self._record, address, address + step,
            address + 2 * step, n, each, source, self._limit, self._mark,
        )  # fmt: skip
        self._left[slot] = self._bulk.stream.mark(), lists[1, :n]

    def from_memory(self, pages: NDArray[np.int64], words: NDArray[np.int64]) -> None:
        """Publish pages of an array whose data are in memory that the device reads."""
        some = self._bulk.slot_pages
        for k, start in enumerate(range(0, len(pages), some)):
            if self._ticket.cancelled:
                break
            self.finish(k % SLOTS)
            part = pages[start : start + some]
            self._publish(k % SLOTS, part, words[start : start + some], part, self._space.host)
            self._bulk.pages_read += len(part)
        for slot in range(SLOTS):
            self.finish(slot)

    def finish(self, slot: int) -> None:
        """Wait until a slot's staging may be used again, and count what became of its pages."""
        if slot not in self._left:
            return
        done, results = self._left.pop(slot)
        _until(done)
        ticket = self._ticket
        came, short, failed = (int((results == what).sum()) for what in (CAME, NO_FRAME, FAILED))
        ticket.came += came
        ticket.failed += failed
        ticket.present += len(results) - came - short - failed


class _Copier:
    """Passes what is read on to a function, or has it read to where it is wanted."""

    def __init__(
        self, bulk: Bulk, to: Callable[[int, int, int], None] | None, into: Any, offset: int, page_size: int
    ) -> None:
        self._bulk, self._to, self.into = bulk, to, into
        self._offset, self._page_size = offset, page_size
        self._next = 0
        self._left: dict[int, Callable[[], bool]] = {}
        self.stopped = False

    def begin(self, pages: NDArray[np.int64], words: NDArray[np.int64]) -> None:
        """Contiguous pages follow."""

    def buffer(self, slot: int) -> int:
        """Return where the next slot is read to."""
        if self.into is None:
            return self._bulk.staging(slot)
        self._next += self._bulk.slot_bytes
        return int(self.into.ctypes.data) + self._offset + self._next - self._bulk.slot_bytes

    def take(self, slot: int, chosen: slice, places: NDArray[np.int64], good: NDArray[np.bool_]) -> None:
        """Pass a slot on."""
        self.stopped |= not good.all()
        if self._to is not None and not self.stopped:
            size = self._page_size
            self._to(self._offset + chosen.start * size, self._bulk.staging(slot), len(places) * size)
            self._left[slot] = self._bulk.stream.mark()

    def finish(self, slot: int) -> None:
        """Wait until a slot's staging may be used again."""
        if slot in self._left:
            _until(self._left.pop(slot))


def _until(done: Callable[[], bool]) -> None:
    """Wait for work in a stream, which ends by itself."""
    attempt = 0
    while not done():
        attempt += 1
        if attempt > 50:
            time.sleep(min(20e-6 * (attempt - 50), 1e-3))
