"""`Attachment`: an array's part of a cache, and its medium, until all changes are written and it is closed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator

from .. import errors
from .._os import clock
from ..cache import Cache
from ..storage import FileMedium, Medium, RamMedium
from ..targets import Block, closing
from .header import Header
from .in_memory import InMemory
from .mapping import Mapping


class Attachment:
    """The state that an `Array` and arrays derived from it share; it outlives them until their changes are written.

    It does not refer to the array: a finalizer passes it to the closing thread, and those that are left are closed at
    the end of the program.

    Parameters
    ----------
    medium : Medium
    header : Header
    cache : Cache
    owns_cache : bool
        Close the cache with the array.
    tier : {"mapped", "storage", "host-cached", "host", "device"}
    writable : bool
    name : str
        For messages.
    share : float, optional
        Fraction of the cache's frames for this array alone.
    on_close : callable, optional
        Called at the end of `close`.
    mapping : Mapping, optional
        The data, in tier "mapped".

    Attributes
    ----------
    nsid : int
    cached : bool
        Whether the data is behind the cache; otherwise it is all in memory that kernels read directly.
    block : Block or None
        The data, in the tiers that hold all of it in memory.
    mapping : Mapping or None
        The data, in tier "mapped"; None again after `close`.
    pins : HostPins
        Pages that the host holds, and how often.
    closed : bool
    host_reads, host_bytes : int
        Reads of the file by the host past the cache, and their bytes.
    viewed : bool
        Whether views were returned; kernels that use them are not counted and may write.
    """

    def __init__(
        self,
        medium: Medium,
        header: Header,
        *,
        cache: Cache,
        owns_cache: bool,
        tier: str,
        writable: bool,
        name: str,
        share: float | None = None,
        on_close: Callable[[], None] | None = None,
        mapping: Mapping | None = None,
    ) -> None:
        self.cache = cache
        self.medium = medium
        self.header = header
        self.tier = tier
        self.writable = writable
        self.name = name
        self.pins = HostPins()
        self.closed = False
        self.viewed = False
        self._owns_cache = owns_cache
        self._on_close = on_close
        self.cached = tier in ("storage", "host-cached")
        self._turn = threading.RLock()  # of flush and close: one at a time; taken before the cache's lock
        self._ending = False
        self._closing = False
        self._launches = 0
        self._streams: list[Callable[[], bool]] = []
        self._begun = 0
        self._compared = 0
        self.host_reads = self.host_bytes = 0
        self.mapping = mapping
        self._resident = (
            None
            if tier in ("storage", "mapped")
            else InMemory(
                medium,
                cache.memory,
                tier=tier,
                page_size=cache.page_size,
                start=header.origin,
                end=header.origin + header.nbytes,
                writable=writable,
            )
        )
        self.block: Block | None = self._resident.block if self._resident else None
        host = self.block.address if self.block else 0
        if self.cached:
            self.nsid = cache.attach(medium, name=name, share=share, host=host, writable=writable)
            if tier == "storage":
                try:
                    cache.bulk.require_gpudirect(self.nsid)
                except BaseException:
                    cache.detach(self.nsid)
                    raise
        else:
            # a namespace without pages, for launches and their errors
            self.nsid = cache.attach(RamMedium(0, writable=False), name=name, host=host)
        closing.ready()
        if writable:
            closing.keep(self, f"array {name!r}")

    # -- launches -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def launch(self, writes: bool) -> Iterator[None]:
        """Count a launch, which the block begins, until `launch_ended`; raise if the array is being closed."""
        with self.cache.lock:  # so that no launch begins between the look of `close` and its end
            self.require_open()
            if self.mapping is not None:
                self.mapping.require()
            yield
            self._launches += 1
            self._begun += writes

    def launch_ended(self) -> None:
        """Stop counting a launch."""
        with self.cache.lock:
            self._launches -= 1

    def require_sound(self) -> None:
        """Raise if part of the mapping failed."""
        failed = None if self.mapping is None else self.mapping.failure()
        if failed is not None:
            raise failed

    def current_file(self) -> FileMedium | None:
        """Return the file if the host may read it past the cache: it has all that kernels wrote, and none is running.

        With full statistics the host's reads go through the cache, so that they are counted. The error of an earlier
        launch in a stream is raised here, as a launch would.
        """
        if not isinstance(self.medium, FileMedium) or self.cache.device != "cpu":
            return None
        if self.mapping is not None:
            self.require_sound()
            return self.medium
        if self.tier != "storage" or self.cache.full:
            return None
        self.cache.raise_pending_error(self.nsid)
        if not self.writable:
            return self.medium
        with self.cache.lock:
            clean = self._compared == self._begun and not self.viewed and not self._running()
        return self.medium if clean else None

    def count_host_reads(self, reads: int, nbytes: int) -> None:
        """Count reads of the file by the host past the cache."""
        # without a lock, which would slow down short reads: no other Python thread runs within an augmented assignment
        self.host_reads += reads
        self.host_bytes += reads * nbytes

    @property
    def data(self) -> int:
        """Address of byte 0 of the file, in the tiers without a cache."""
        held = self.mapping or self.block
        assert held is not None
        return held.address

    def launch_continues(self, done: Callable[[], bool]) -> None:
        """Count a launch until `done` returns True."""
        with self.cache.lock:
            self._streams.append(done)

    def continued_over(self, done: Callable[[], bool]) -> None:
        """Stop counting a launch that continued, at once instead of when somebody looks (where it is still counted)."""
        with self.cache.lock:
            if done in self._streams:
                self._streams.remove(done)
                self._launches -= 1

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the array open for the block, as a launch does."""
        with self.launch(False):
            pass
        try:
            yield
        finally:
            self.launch_ended()

    def _running(self) -> int:
        """Return how many launches use the array; with the cache's lock."""
        left = [done for done in self._streams if not done()]
        self._launches -= len(self._streams) - len(left)
        self._streams = left
        return self._launches

    # -- writing --------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write changes to storage and make them durable."""
        if not self.writable:
            return
        with self._turn:
            with self.cache.lock:
                # what a launch writes while bytes are compared, or after, is found the next time
                settled = -1 if self._running() else self._begun
            stale = self.viewed or self._compared != self._begun
            self._compared = -1  # unless all of this succeeds
            try:
                if self.cached and not self.cache.closed:
                    self.cache.flush(self.nsid)
            finally:
                if self._resident is not None and stale:
                    self._resident.write_back()
                elif self.mapping is not None:
                    self.mapping.sync()
            self._compared = settled

    def close(self) -> None:
        """Flush and release everything (idempotent).

        Raises
        ------
        SharingError
            A launch uses the array; it stays open. (It waits for launches in streams, up to twice the timeout.)
        """
        with self._turn:
            if self.closed or self._closing:
                return
            self._closing = True  # a finalizer of the user's may call this in the middle of itself
            try:
                self._end()
                self._close()
            finally:
                self._closing = False

    def _left(self) -> list[Exception]:
        """Remove the errors of launches in streams, to raise them last: a flush that finds one writes nothing."""
        return [] if self.cache.closed else self.cache.take_left(self.nsid)

    def _close(self) -> None:
        written = False
        left = self._left()
        try:
            self.flush()
            written = True
        finally:
            closing.forget(self)
            try:
                # both flush once more, in case that it was another launch's error that flush raised
                if self._owns_cache:
                    self.cache.close()
                else:
                    try:
                        self._let_go()
                    finally:
                        self.cache.detach(self.nsid)
            finally:
                try:
                    if self._resident is not None and self.writable and not written:
                        self._resident.write_back()
                finally:
                    self.closed = True
                    self.mapping = None  # views that kernels still have keep it mapped
                    self.medium.close()
                    if self._on_close is not None:
                        self._on_close()
        if left:
            raise left[0]

    def _end(self) -> None:
        """Wait until no launch uses the array, then refuse new ones."""
        self.cache.bulk.stop()
        deadline = clock.monotonic() + 2 * self.cache.timeout  # each wait of a launch is bounded by the time-out
        while True:
            with self.cache.lock:
                running = self._running()
                if not running:
                    if self._owns_cache:
                        self.cache.require_ended("close the array")
                    self._ending = True
                    return
                if running > len(self._streams) or clock.monotonic() > deadline:
                    raise errors.SharingError(
                        f"{running} launches use array {self.name!r}: wait for them, then close the array"
                    )
            clock.sleep(1e-3)

    # -- pages that the host holds --------------------------------------------------------------------------

    def pin(self, first: int, end: int) -> None:
        """Read pages [first, end) and pin them; see `Array.pin`."""
        with self.in_use(), self.pins.lock:
            fresh = self.pins.fresh(first, end)
            number = sum(b - a for a, b in fresh)
            room = self.cache.room(self.nsid)
            if number > room:
                raise errors.KernelError(
                    f"pinning {number} pages of array {self.name!r}: only {max(room, 0)} more fit if one frame "
                    "stays free; pin less, enlarge the cache or the array's share"
                )
            try:
                done = sum(self.cache.pin(self.nsid, a, b) for a, b in fresh)
                if done != number:
                    raise errors.KernelError(
                        f"{number - done} pages of array {self.name!r} could not be read into the cache"
                    )
            except BaseException:
                for a, b in fresh:
                    self.cache.unpin(self.nsid, a, b)
                raise
            self.pins.add(first, end)

    def unpin(self, first: int, end: int) -> None:
        """Unpin pages that `pin` pinned."""
        with self.in_use(), self.pins.lock:
            missing = next((page for page in range(first, end) if page not in self.pins), None)
            if missing is not None:
                raise errors.KernelError(
                    f"page {missing} of array {self.name!r} is not pinned: give back what pin() holds",
                    array=self.name,
                )
            for a, b in self.pins.remove(first, end):
                self.cache.unpin(self.nsid, a, b)

    def _let_go(self) -> None:
        """Release the host's pins, which would otherwise keep frames in place forever."""
        with self.pins.lock:
            for first, end in self.pins.clear() if not self.cache.closed else ():
                self.cache.unpin(self.nsid, first, end)

    def drop(self) -> None:
        """Close after the array was dropped; print a message on stderr if changes cannot be written."""
        try:
            self.close()
        except Exception as error:
            if self.writable:
                closing.say(f"array {self.name!r}, which was dropped,", error)

    def finish(self) -> None:
        """Flush at the end of the program. It stays open for later exit handlers of the user."""
        if self.forked or self.closed or not (self._begun or self.viewed):
            return
        left = self._left()
        self.flush()
        with self.cache.lock:
            if self._running():
                raise errors.SharingError(
                    "a launch in a daemon thread or stream is still running: wait for it before the program ends"
                )
        if left:
            raise left[0]

    # -- state ----------------------------------------------------------------------------------------------

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the one that opened the array."""
        return self.cache.process.forked

    def require_open(self) -> None:
        """Raise if the array is closed, or was opened before a fork."""
        if self.closed or self._ending:
            raise errors.ClosedError(f"array {self.name!r} is closed: open it again")
        self.cache.process.require(f"array {self.name!r}")

    def require_readable(self) -> None:
        """Raise unless the host can read: a mapping that nobody writes needs nothing that a fork leaves behind."""
        if self.closed or self._ending or self.mapping is None or self.writable:
            self.require_open()


def hand_over(part: Attachment) -> None:
    """Pass the `part` of a dropped array to the closing thread (a finalizer: it takes no lock)."""
    if not part.closed and not part.forked:
        closing.hand_over(part.drop)


class HostPins:
    """Counts of the host's pins by page; the cache has one pin for each page with a count.

    Attributes
    ----------
    lock : threading.RLock
        Held while the counts are read and the cache's pins are changed accordingly; taken before the cache's lock.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._counts: dict[int, int] = {}

    def __contains__(self, page: int) -> bool:
        return page in self._counts

    def fresh(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return the pages of [first, end) that are not counted yet, as ranges."""
        return _ranges(page for page in range(first, end) if page not in self._counts)

    def add(self, first: int, end: int) -> None:
        """Count each page of [first, end) once more."""
        for page in range(first, end):
            self._counts[page] = self._counts.get(page, 0) + 1

    def remove(self, first: int, end: int) -> list[tuple[int, int]]:
        """Count each page of [first, end) once less; return those that are not counted any more, as ranges."""
        gone = []
        for page in range(first, end):
            self._counts[page] -= 1
            if not self._counts[page]:
                del self._counts[page]
                gone.append(page)
        return _ranges(gone)

    def clear(self) -> list[tuple[int, int]]:
        """Clear the counts; return the pages that were counted, as ranges."""
        pages = sorted(self._counts)
        self._counts.clear()
        return _ranges(pages)


def _ranges(pages: Iterable[int]) -> list[tuple[int, int]]:
    """Join ascending pages into ranges [first, end)."""
    out: list[tuple[int, int]] = []
    for page in pages:
        if out and out[-1][1] == page:
            out[-1] = out[-1][0], page + 1
        else:
            out.append((page, page + 1))
    return out
