"""`Attachment`: an array's part of a cache, and its medium, until all changes are written and it is closed."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from .. import closing, errors
from .._os import clock
from .._ranges import ranges_of
from ..cache import Cache
from ..storage import FileMedium, Medium, RamMedium
from ..targets import Block, LaunchFlag
from .header import Header
from .in_memory import InMemory
from .mapping import Mapping


class Attachment:
    """The state that an `Array` and its derived arrays share. It outlives them until their changes are written.

    An attachment has no reference to its array: when the array is dropped, a finalizer passes the attachment to the
    closing thread. Attachments that are still open at the end of the program are closed then.

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
    pins : Counter
        The host's pins of each page; the cache has one pin of each page that is counted.
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
        self.pins: Counter[int] = Counter()
        # held while pins of the host and the cache change; acquired before the cache's lock
        self._pins_lock = threading.RLock()
        self.closed = False
        self.viewed = False
        self._owns_cache = owns_cache
        self._on_close = on_close
        self.cached = tier in ("storage", "host-cached")
        self._flush_lock = threading.RLock()  # for one flush or close at a time; acquired before the cache's lock
        self._ending = False
        self._closing = False
        self._launches = 0
        self._streams: list[Callable[[], bool]] = []
        self._writes = 0
        self._flushed = 0
        self._written_back = 0
        self.host_reads = self.host_bytes = 0
        self.mapping = mapping
        has_cache_alone = tier in ("storage", "mapped")
        self._resident = None if has_cache_alone else InMemory(medium, header, cache, tier, writable=writable)
        self.block: Block | None = self._resident.block if self._resident else None
        on_host = cache.device != "cuda" and not (self.cached and cache.full)
        self.file = medium if on_host and self.block is None and isinstance(medium, FileMedium) else None
        self._memory = self.block
        if on_host and not (self.file or self.block) and (address := medium.host_memory()):
            self._memory = Block(address, medium.nbytes, medium, host=True)
        self._is_direct = on_host and bool(self.file or self._memory)
        self._host_mapping: Mapping | None = None
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
        """Count a launch that begins in the ``with`` block until `launch_ended`; raise if the array is being closed."""
        with self.cache.lock:  # so that no launch begins between the check of `close` and its end
            self.require_open()
            if self.mapping is not None:
                self.mapping.require()
            yield
            self._launches += 1
            self._writes += writes

    def launch_ended(self) -> None:
        """Stop counting a launch."""
        with self.cache.lock:
            self._launches -= 1

    def require_sound(self) -> None:
        """Raise if part of the mapping failed."""
        mapping = self.mapping or self._host_mapping
        failed = None if mapping is None else mapping.failure()
        if failed is not None:
            raise failed

    # -- access of the host past the cache ------------------------------------------------------------------

    def can_read_directly(self) -> bool:
        """Return whether the host may read the file, or its memory, past the cache.

        Changes in the cache are written to the file first. With full statistics, the host's reads go through the cache,
        so that they are counted. This method raises the error of an earlier launch in a stream, as the next launch
        would.
        """
        if self.mapping is not None:
            self.require_sound()
            return True
        if not (self._is_direct and self.cached and self.writable):
            self.cache.raise_pending_error(self.nsid)
            return self._is_direct
        with self.cache.lock:
            if self._is_used() or self.cache.launches.storing():
                return False
            if self._written_back != self._writes:
                with contextlib.suppress(errors.WarpwellError):  # the next flush raises it again
                    self.cache.write_back(self.nsid)
                    self._written_back = self._writes
            return self._written_back == self._writes

    @contextlib.contextmanager
    def direct_write(self, pages: NDArray[np.int64]) -> Iterator[bool]:
        """Yield whether the ``with`` block may write these pages past the cache, to the file or its memory.

        The pages are evicted first. No launch begins during the block.
        """
        if not self.cached:
            with self.in_use(writes=True):  # counted, so that the array is flushed at the end of the program
                yield self._is_direct
            return
        with self.cache.lock:
            self.require_open()
            self.cache.require_open()
            is_direct = self._is_direct and self._evict(pages)
            try:
                yield is_direct
            finally:
                if is_direct:
                    self._written_back += self._written_back == self._writes
                    self._writes += 1

    def _is_used(self) -> bool:
        """Return whether a launch may use the array; else raise the error of one that has ended (lock held)."""
        is_running = self._running() > 0
        self.cache.raise_pending_error(self.nsid)
        return is_running or self.viewed

    def _evict(self, pages: NDArray[np.int64]) -> bool:
        """Evict pages; return False if the host must not write them past the cache (lock held).

        The host must not write pages to which a launch may store, which a prefetch may be reading, or which are pinned.
        """
        if self._is_used() or self.pins or self.cache.bulk.reads(self.nsid):
            return False
        try:
            self.cache.evict(self.nsid, pages)
        except errors.WarpwellError:
            return False
        return True

    def host_memory(self, starts: NDArray[np.int64], nbytes: int) -> NDArray[np.uint8] | None:
        """Return the file as bytes of host memory, for a copy of these runs, or None if it cannot be mapped."""
        if self._memory is not None:
            return self._memory.view(np.dtype(np.uint8))
        assert self.file is not None
        mapping = self.mapping or self._host_mapping
        if mapping is None:
            try:
                mapping = self._host_mapping = Mapping(self.file, self.name)
            except OSError:
                return None
        mapping.announce(starts, nbytes)
        return np.asarray(mapping)

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
        """Stop counting a launch that continued, without waiting for the next check. No effect if it is not counted."""
        with self.cache.lock:
            if done in self._streams:
                self._streams.remove(done)
                self._launches -= 1

    @contextlib.contextmanager
    def in_use(self, *, writes: bool = False) -> Iterator[None]:
        """Keep the array open for the block, as a launch does."""
        with self.launch(writes):
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
        with self._flush_lock:
            with self.cache.lock:
                # the next flush finds changes of a launch that runs at the same time
                settled = -1 if self._running() else self._writes
            stale = self.viewed or self._flushed != self._writes
            self._flushed = -1  # unless all of this succeeds
            try:
                if self.cached and not self.cache.closed:
                    # at the end of the program no thread may be started any more, and a kernel needs one
                    is_clean = self._is_direct and settled == self._written_back and not self.viewed
                    self.cache.flush(self.nsid, is_clean=is_clean)
            finally:
                if self._resident is not None and stale:
                    self._resident.write_back()
                elif self.mapping is not None:
                    self.mapping.sync()
            self._flushed = self._written_back = settled

    def close(self) -> None:
        """Flush and release everything (idempotent).

        Raises
        ------
        SharingError
            A launch uses the array; it stays open. (The call waits for launches in streams, up to twice the timeout.)
        """
        with self._flush_lock:
            if self.closed or self._closing:
                return
            self._closing = True  # a finalizer of the user may call this method while it runs
            try:
                self._end()
                self._close()
            finally:
                self._closing = False

    def _take_stream_errors(self) -> list[Exception]:
        """Return the errors of launches in streams, to raise them last: flush would raise one and write nothing."""
        return [] if self.cache.closed else self.cache.take_pending_errors(self.nsid)

    def _close(self) -> None:
        written = False
        left = self._take_stream_errors()
        try:
            self.flush()
            written = True
        finally:
            closing.forget(self)
            try:
                # flush once more in both cases: the first flush may have raised the error of another launch
                if self._owns_cache:
                    self.cache.close()
                else:
                    try:
                        self._unpin_all()
                    finally:
                        self.cache.detach(self.nsid)
            finally:
                try:
                    if self._resident is not None and self.writable and not written:
                        self._resident.write_back()
                finally:
                    self.closed = True
                    self.mapping = self._host_mapping = None  # views that kernels still use keep the file mapped
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

    # -- pins of the host ------------------------------------------------------------------------------------

    def pin(self, first: int, end: int) -> None:
        """Read pages [first, end) and pin them; see `Array.pin`."""
        with self.in_use(), self._pins_lock:
            fresh = ranges_of([page for page in range(first, end) if not self.pins[page]])
            number = sum(b - a for a, b in fresh)
            room = self.cache.room(self.nsid)
            if number > room:
                raise errors.KernelError(
                    f"pinning {number} pages of array {self.name!r}: only {max(room, 0)} more fit if one frame stays "
                    "free; pin fewer, enlarge the cache or the array's share"
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
            self.pins.update(range(first, end))

    def unpin(self, first: int, end: int) -> None:
        """Unpin pages that `pin` pinned."""
        with self.in_use(), self._pins_lock:
            missing = next((page for page in range(first, end) if not self.pins[page]), None)
            if missing is not None:
                raise errors.KernelError(
                    f"page {missing} of array {self.name!r} is not pinned: unpin the rows that pin() pinned",
                    array=self.name,
                )
            self.pins.subtract(range(first, end))
            free = [page for page in range(first, end) if not self.pins[page]]
            for page in free:
                del self.pins[page]
            for a, b in ranges_of(free):
                self.cache.unpin(self.nsid, a, b)

    def _unpin_all(self) -> None:
        """Release the host's pins, which would otherwise keep frames in place forever."""
        with self._pins_lock:
            pages = sorted(self.pins) if not self.cache.closed else []
            self.pins.clear()
            for first, end in ranges_of(pages):
                self.cache.unpin(self.nsid, first, end)

    def drop(self) -> None:
        """Close after the array was dropped; print a message on stderr if changes cannot be written."""
        try:
            self.close()
        except Exception as error:
            if self.writable:
                closing.report_loss(f"array {self.name!r}, which was dropped,", error)

    def finish(self) -> None:
        """Flush at the end of the program. The array stays open for exit handlers of the user that run later."""
        if self.forked or self.closed or not (self._writes or self.viewed):
            return
        left = self._take_stream_errors()
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
        """Whether the array was opened in a parent process."""
        return self.cache.process.forked

    def require_open(self) -> None:
        """Raise if the array is closed, or was opened before a fork."""
        if self.closed or self._ending:
            raise errors.ClosedError(f"array {self.name!r} is closed: open it again")
        self.cache.process.require(f"array {self.name!r}")

    def require_readable(self) -> None:
        """Raise unless the host can read: a read-only mapping stays usable after a fork."""
        if self.closed or self._ending or self.mapping is None or self.writable:
            self.require_open()


class CacheArgument:
    """Base of kernel arguments that use an array's part of a cache (`warpwell.targets.KernelArgument`)."""

    cache: Cache
    writable: bool
    _part: Attachment
    _nsid: int

    def launch_begins(self, flag: LaunchFlag) -> None:
        """Count a launch that begins; raise if the array is closed."""
        with self._part.launch(self.writable):
            self.cache.begin(flag, self._nsid)

    def launch_ended(self, flag: LaunchFlag) -> None:
        """Stop counting a launch; raise the latched error of its device code."""
        self._part.launch_ended()
        try:
            self.cache.end(flag)
        finally:
            self._part.require_sound()  # first, because zeros in place of items may have caused the latched error

    def launch_continues(self, flag: LaunchFlag, done: Callable[[], bool]) -> None:
        """Count a launch that continues in a stream until `done` returns True."""
        self._part.launch_continues(done)
        self.cache.end(flag, done)

    def abort(self, flag: LaunchFlag) -> None:
        """Abort all waits of a launch's device code."""
        self.cache.abort(flag)

    def interp_services(self) -> list[Callable[[], int]]:
        """Return the controller's steps for an interpreted launch."""
        return self.cache.controller.services()


def hand_over(part: Attachment) -> None:
    """Pass the `part` of a dropped array to the closing thread (a finalizer: it takes no lock)."""
    if not part.closed and not part.forked:
        closing.hand_over(part.drop)
