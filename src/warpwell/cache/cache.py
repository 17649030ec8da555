"""Cache: frames in device memory that arrays on storage share."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import closing, errors
from .._check import checked_device, checked_integer, checked_nbytes, checked_seconds, checked_share
from .._os import clock, interruptible
from .._ranges import Range, ranges_of
from .._trace import traced
from ..queues import QueuePairs
from ..storage import HostThreads, Medium, QueueBackend, QueueServer, Rings
from ..targets import Block, LaunchFlag, LaunchStream, PlainFlag, default_device, memory_for, view_of
from . import layout as at
from . import maintenance
from .launches import CacheLaunch, Launches, error_of
from .partition import FramePool, PageSpace, Partition
from .prefetch import Bulk, Prefetch
from .statistics import Statistics
from .word import INVALID, STATE
from .written import UnflushedLog, text_of

MAX_STAGING = 256 << 20
"""Maximum bytes of staging if no depth is given."""
MAX_LAUNCHES_UNCHECKED = 64
"""Maximum number of launches on a GPU between two residency checks: each check copies from the device."""


class OpeningProcess:
    """The process that opened an object. A process forked from it does not have its threads."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this process was forked from that process."""
        return self.pid != os.getpid()

    def require(self, name: str) -> None:
        """Raise `ForkError` in a process that was forked from that process."""
        if self.forked:
            raise errors.ForkError(
                f"{name} was opened in process {self.pid}, but this process ({os.getpid()}) was forked from it: open "
                "it again here, by its path"
            )


class Cache:
    """A page cache in device memory, which arrays on storage share.

    Parameters
    ----------
    nbytes : int or str
        Budget in bytes for the frames, the page table, and a word per frame that names its page; also text such as
        "256MiB".
    page_size : int or str, optional
        Bytes of a page: a power of two from 512; also text such as "4KiB". Default: 4096, or 16384 on "cpu" if the
        cache has at least 16 MiB.
    device : {"cpu", "cuda", "interp"}, optional
    stats : {"basic", "full"}
        "full" also counts hits and bytes requested, which slows every access down.
    timeout : float
        Timeout of kernels that wait for storage, in seconds without any completion.
    queues, depth, threads : int, optional
        Number of queue pairs, entries of each ring, and maximum number of the process's service threads that serve this
        cache at once.
    merge : int
        Maximum number of adjacent pages that one command reads: 1, 2, 4 or 8.
    service : QueueBackend, optional
        Executes the commands, and may lower `depth` and `merge`. Default: threads of this process.

    Attributes
    ----------
    closed : bool

    Raises
    ------
    ArgumentError
        A size or an option is out of range.
    """

    def __init__(
        self,
        nbytes: int | str,
        *,
        page_size: int | str | None = None,
        device: str | None = None,
        stats: str = "basic",
        timeout: float = 30.0,
        queues: int | None = None,
        depth: int | None = None,
        threads: int | None = None,
        merge: int = 4,
        service: QueueBackend | None = None,
    ) -> None:
        self.closed = True  # a failed constructor has nothing to close
        self.process = OpeningProcess()
        self.device = checked_device(device or default_device())
        self.cache_bytes = checked_nbytes(nbytes, "cache")
        self.page_size = choose_page_size(page_size, self.device, self.cache_bytes)
        if self.cache_bytes < self.page_size:
            raise errors.ArgumentError(
                f"a cache of {self.cache_bytes} bytes is smaller than one page of {self.page_size}: "
                "enlarge cache or choose a smaller page_size"
            )
        if stats not in ("basic", "full"):
            raise errors.ArgumentError(f'stats is "basic" or "full", not {stats!r}')
        if checked_integer(merge, "merge") not in (1, 2, 4, at.MERGE_MAX):
            raise errors.ArgumentError(f"merge is 1, 2, 4 or {at.MERGE_MAX} pages, not {merge!r}")
        for option, value, maximum in (("queues", queues, 1024), ("depth", depth, 1 << 16), ("threads", threads, 256)):
            if value is not None:
                checked_integer(value, option, maximum=maximum)
        self.full = stats == "full"
        self.timeout = checked_seconds(timeout, "timeout")
        on_gpu = self.device == "cuda"
        self._warp = 32 if on_gpu else 1
        queues = queues or default_queues(self.device)
        if depth is None:
            # staging is pinned memory, set aside for every command id
            depth = 512 if on_gpu else 16 if self.device == "interp" else 128
            while depth > 8 and queues * (depth // 2) * self.page_size * merge > MAX_STAGING:
                depth //= 2
        service = service or HostThreads(threads)
        rings = service.fit(Rings(queues, depth, merge), self.device, self.page_size)
        self.merge = rings.merge
        self.memory = memory_for(self.device)
        self.pairs = QueuePairs(
            service.memory(self.device),
            count=rings.queues,
            depth=rings.depth,
            staging_bytes=self.page_size * self.merge,
            lists=service.lists,
            timeout=self.timeout,
        )
        self.controller: QueueServer = service.start(self.pairs, device=self.device, timeout=self.timeout)
        self.bulk = Bulk(self)
        self._spaces: dict[int, PageSpace] = {}
        self.launches = Launches(self.memory)
        self._views: CacheLaunch | None = None
        self.layout_epoch = 0
        self._stats = self.memory.allocate(8 * (at.STATS_WORDS + at.WRITTEN_WORDS))
        self._unflushed = UnflushedLog(self._stats)
        self._core: Block | None = None
        self._in_flight = 0
        self._pending: list[tuple[set[int], Exception]] = []
        self._streamed = False
        """Whether a launch may continue in a stream."""
        self.lock = threading.RLock()
        self._pools: list[FramePool] = []
        self.frames = 0
        self.closed = False
        closing.ready()
        self._finalizer = weakref.finalize(self, _dropped, self.controller, self.process)
        self._finalizer.atexit = False

    # -- arrays ---------------------------------------------------------------------------------------------

    def attach(
        self,
        medium: Medium,
        *,
        name: str,
        share: float | None = None,
        host: int = 0,
        writable: bool = False,
    ) -> int:
        """Assign page numbers to a medium; return its namespace id. Empties the cache.

        `share` is the fraction of the frames that only this array uses; with None, the array shares the frames that no
        array has for itself. `host` is the address of the data in shared memory if the cache reads from there
        ("host-cached").
        """
        self.bulk.stop()
        with self.lock:
            self.require_open()
            share = None if share is None else checked_share(share, "share")
            total = (share or 0.0) + sum(s.share or 0.0 for s in self._spaces.values())
            if total > 1:
                raise errors.ArgumentError(f"the shares of this cache's arrays would add up to {total:.3f}")
            self._require_idle("open another array on it")
            if any(self._count_pinned(k) for k in self._spaces):
                raise errors.SharingError("arrays of this cache have pinned pages: unpin them before you open another")
            self.flush(keep_errors=True)
            if not self._drain():
                raise self._stall_error("opening another array on this cache")
            nsid = self.controller.attach(medium, self.page_size)
            address = self.controller.namespace_address(nsid)
            pages = -(-address.nbytes // self.page_size)
            self._spaces[nsid] = PageSpace(name, nsid, pages, share, host, writable, address[:2])
            self._unflushed.forget(nsid)
            try:
                self._lay_out()
            except BaseException:
                self._forget(nsid)
                if self._spaces:
                    self._lay_out()
                raise
            return nsid

    def detach(self, nsid: int) -> None:
        """Write an array's dirty pages back and remove it from the cache.

        Launches on other arrays can begin and end while this method waits for commands, but not while it writes pages.
        If the medium does not answer, the writing takes as long as the timeout.
        """
        until = None
        try:
            with contextlib.suppress(errors.WarpwellError, KeyError):  # raised below, or another thread detaches it
                if not self.closed and nsid in self._spaces and not self.process.forked:
                    self.bulk.stop(nsid)
                    until = None if self._drain(nsid) else clock.monotonic()
        finally:
            self._detach(nsid, until)

    def _detach(self, nsid: int, until: float | None) -> None:
        """Detach an array; wait for its commands as `_drain` does."""
        if nsid in self._spaces:
            self.bulk.stop(nsid)
        with self.lock:
            if self.closed or nsid not in self._spaces:
                return
            self.reap()
            written = False
            try:
                self.flush(nsid, keep_errors=True)
                written = True
            finally:
                # while other arrays use the cache, or have pinned pages in it, its frames must not move
                alone = self._in_flight == 0
                settled = self._drain(None if alone else nsid, until) and alone
                if not written or self._count_pinned(nsid):
                    # A dirty page left here could never be written back, and would fail every later access.
                    self._drop(nsid)
                held = any(self._count_pinned(k) for k in self._spaces)
                self._forget(nsid)
                if self._spaces and settled and not held:
                    with contextlib.suppress(errors.KernelError, errors.DriveLostError):
                        self.flush(keep_errors=True)
                        self._lay_out()

    def _forget(self, nsid: int) -> None:
        del self._spaces[nsid]
        self.bulk.forget(nsid)
        self.controller.detach(nsid)
        # the next array may get this number, and must not raise these errors
        self._pending = [(left, error) for nsids, error in self._pending if (left := nsids - {nsid})]

    def space(self, nsid: int) -> PageSpace:
        """Return the `PageSpace` of an array."""
        return self._spaces[nsid]

    def _lay_out(self) -> None:
        """Allocate table, owners and frames for the current arrays, all empty."""
        self.layout_epoch += 1
        parts = Partition(list(self._spaces.values()), budget=self.cache_bytes, page_size=self.page_size)
        self._core = None  # free the old block before the new one is allocated: a cache may fill the device
        block = self.memory.allocate(parts.nbytes)
        records = parts.records(block.address)
        records[at.C_QUEUES] = self.pairs.records
        records[at.C_N_QUEUES] = self.pairs.count
        records[at.C_MERGE] = self.merge
        records[at.C_STATS] = self._stats.address
        records[at.C_TIMEOUT] = int(self.timeout * 1e9)
        block.write(0, records)
        spaces = records[at.CORE_WORDS : at.CORE_WORDS + at.SPACE_WORDS * len(parts.spaces)]
        self.launches.lay_out(spaces.reshape(-1, at.SPACE_WORDS))
        self._views = None
        self._core = block
        self._owners = int(records[at.C_OWNERS])
        self.frames = parts.frames
        self._pools = parts.pools
        self._unflushed.renumber(self._spaces)

    # -- members of views -----------------------------------------------------------------------------------

    def view_words(self, nsid: int, flag: LaunchFlag | None = None) -> dict[str, int]:
        """Return the cache's members of a view, for a launch that has begun or for any launch.

        `fully_resident` is 1 if all pages are in the cache. It is 0 in a view whose launches do not begin on the cache,
        because such a view may outlive an eviction.
        """
        space = self._spaces[nsid]
        self._require_core()
        launch = self.launches.of(flag) if flag is not None else None
        fully_resident = launch is not None and space.pool.fully_resident
        if launch is None:  # plain views share one record: their launches do not begin on the cache
            with self.lock:
                plain = PlainFlag if self.device == "cuda" else lambda: LaunchFlag(self.device)
                launch = self._views = self._views or self.launches.take(plain())
        return space.words | {"space": launch.space(space.index), "fully_resident": int(fully_resident)}

    def _check_residency(self) -> None:
        """Find out whether all pages of direct-mapped pools are in the cache; nothing is in flight (lock held)."""
        for pool in self._pools:
            if pool.is_residency_check_due(MAX_LAUNCHES_UNCHECKED if self.device == "cuda" else 1):
                with contextlib.suppress(Exception):  # if the device failed, the launch raises the error
                    pool.fully_resident = int(self._read(pool.address + 8 * at.F_PRESENT)[0]) == pool.pages

    def _read(self, address: int, words: int = 1) -> NDArray[np.int64]:
        """Return a copy of words of the cache's memory."""
        return self._require_core().read(address - self._core_address, 8 * words).view(np.int64)

    def _count_pinned(self, nsid: int) -> int:
        """Return how many of the frames that an array can use have long pins."""
        if self._core is None or nsid not in self._spaces:
            return 0
        pool = self._spaces[nsid].pool
        if pool.direct_mapped:
            return int((self._read(self._owners + 8 * pool.first, pool.frames) > at.OWNER_PAGE).sum())
        address, mask = (int(self._read(pool.address + 8 * word)[0]) for word in (at.F_CREDITS, at.F_CREDIT_MASK))
        credits = self._read(address, at.CREDIT_BYTES // 8 * (mask + 1))
        return pool.frames - 1 - int(credits[:: at.CREDIT_BYTES // 8].sum())

    def room(self, nsid: int) -> int:
        """Return how many more pages of an array can be pinned."""
        space = self._spaces[nsid]
        return space.pages if space.pool.direct_mapped else space.pool.frames - 1 - self._count_pinned(nsid)

    def wave_pages(self, nsid: int) -> int:
        """Return how many pages of an array are prefetched at a time, so that two waves fit into the frames.

        This is the whole array if each page has a frame of its own; else one frame stays free.
        """
        room = self.room(nsid)
        return max(1, room if self._spaces[nsid].pool.direct_mapped else room // 2)

    # -- launches -------------------------------------------------------------------------------------------

    def begin(
        self, flag: LaunchFlag, nsid: int | None = None, *, stores: bool = True, keep_errors: bool = False
    ) -> CacheLaunch:
        """Begin a launch on an array; raise the error of an earlier launch on it in a stream, unless `keep_errors`.

        The cache's own kernels have `stores` False: they do not change items.
        """
        with self.lock:
            self.require_open()
            self._require_controller(nsid)
            if stores and nsid is not None:
                self.require_no_suspects(nsid)
            if not keep_errors:
                self.raise_pending_error(nsid)
            self.controller.begin()  # the server is awake until the launch ends
            launch = self.launches.take(flag)
            launch.stores = stores
            if nsid is not None:
                launch.nsids.add(nsid)
            launch.users += 1
            self._in_flight += 1
            return launch

    def raise_pending_error(self, nsid: int | None) -> None:
        """Raise the error of an earlier launch in a stream: of an array, or of any array."""
        if not (self._streamed or self._pending or self._views):
            return
        with self.lock:
            self.reap()
            self._streamed = bool(self.launches.in_streams())
            for pending in self._pending:
                if nsid is None or nsid in pending[0]:
                    self._pending.remove(pending)
                    raise pending[1]

    def end(self, flag: LaunchFlag, done: Callable[[], bool] | None = None) -> None:
        """End a launch for one of its arrays; after the last array raise its latched error.

        With `done` the launch continues in a stream, and `reap` ends it when `done` returns True.
        """
        with self.lock:
            launch = self.launches.of(flag)
            if launch is None:
                return  # another array has ended it
            if done is not None:
                launch.done, self._streamed = done, True
                return
            error = self._end(launch, 1)
            if self._in_flight == 0:
                self._check_residency()
        if error is not None:
            raise error

    def _end(self, launch: CacheLaunch, users: int) -> Exception | None:
        """End a launch for some of its arrays; after the last array release its records and return its error."""
        self._in_flight -= users
        for _ in range(users):
            self.controller.end()
        launch.users -= users
        if launch.users:
            return None
        used = min(launch.nsids, default=None)
        return self._error(self.launches.release(launch), used)

    def _error(self, latched: tuple[int, int, int, int], used: int | None = None) -> Exception | None:
        """Return the exception for the latched error of a launch, which used array `used` and possibly other arrays."""
        if latched[0] == at.CLEAR:
            return None
        failure = self.controller.failure(latched[1] or used, silent=latched[0] == at.STALLED) or self._loss()
        if failure is not None or latched[0] == at.ABORTED:  # the thread that aborted raises its own error
            return failure
        if latched[0] in (at.READ_ERROR, at.WRITE_ERROR) and latched[1] in self._spaces:
            failure = self.controller.medium(latched[1]).failure()
            if failure is not None:
                return failure
        return error_of(latched, self._spaces, page_size=self.page_size, timeout=self.timeout)

    def reap(self, seconds: float = 0.0) -> None:
        """End the launches in streams that are done, so that the server can park; keep their errors.

        Wait for them up to `seconds`.
        """
        with self.lock:
            deadline = clock.monotonic() + seconds
            while True:
                going = self.launches.in_streams()
                for launch in [each for each in going if each.done is not None and each.done()]:
                    nsids, error = launch.nsids, self._end(launch, launch.users)
                    if error is not None:
                        self._pending.append((nsids, error))
                    going.remove(launch)
                if self._views is not None:
                    latched = self._views.take_error()
                    error = self._error(latched)
                    if error is not None:
                        self._pending.append(({latched[1]}, error))
                if not going or clock.monotonic() >= deadline:
                    return
                clock.sleep(1e-3)

    def take_pending_errors(self, nsid: int) -> list[Exception]:
        """Return and remove the errors of an array's launches in streams."""
        with self.lock:
            self.reap()
            left = [pending for pending in self._pending if nsid in pending[0]]
            self._pending = [pending for pending in self._pending if pending not in left]
            return [error for _, error in left]

    def abort(self, flag: LaunchFlag) -> None:
        """Abort all waits of a launch's device code on this cache (takes no lock)."""
        launch = self.launches.of(flag)
        if launch is not None:
            launch.abort()

    # -- maintenance: each method runs kernels until the operation is complete or fails --------------------------

    @traced("flush")
    def flush(self, nsid: int | None = None, *, is_clean: bool = False, keep_errors: bool = False) -> None:
        """Write dirty pages back (of one array, or all) and make them durable; then raise if pages are suspect.

        `is_clean` states that no page is dirty, so no kernel searches for dirty pages. Otherwise, the error of an
        earlier launch in a stream is raised first, unless `keep_errors` leaves it to a later call.
        """
        with self.lock:
            self.require_open()
            if not (is_clean or keep_errors):
                self.raise_pending_error(nsid)
            writable = [s for s in self._spaces.values() if s.writable and (nsid is None or s.nsid == nsid)]
            if writable:  # a read-only array has no changes to lose, and closes without an error
                self._require_controller(nsid)
            for space in writable:
                if not is_clean:
                    self.write_back(space.nsid)
                if not space.host:
                    with self._unflushed.flushing(space.nsid):
                        self.controller.medium(space.nsid).sync()
            self.require_no_suspects(*(space.nsid for space in writable))

    def write_back(self, nsid: int) -> None:
        """Write an array's dirty pages to its medium, which need not make them durable."""
        with self.lock:
            space = self._spaces[nsid]
            # No launch begins, because the lock is held. A prefetch may continue: it does not change pinned pages.
            pinned_too = not self.launches.storing()
            arguments = (space.base, space.base + space.pages, int(pinned_too))
            self._until_none(maintenance.flush_frames, self.frames, nsid, arguments, f"flushing {space.name!r}")

    @traced("evict")
    def evict(self, nsid: int, pages: Range | NDArray[np.int64]) -> None:
        """Write back and evict pages of an array, as a range or as numbers; raise KernelError if pages are pinned.

        Stop prefetches first: a page that is being read is in use, and evicted pages could be loaded again.
        """
        with self.layout_lock(nsid):
            if isinstance(pages, tuple):
                ranges = [pages]
            elif pages.size:
                ranges = ranges_of(np.unique(pages[self.page_words(nsid)[pages] & STATE != INVALID]))
            else:
                ranges = []
            space = self._spaces[nsid]
            space.pool.schedule_residency_check(evicts=True)
            for first, end in ranges:
                work = f"evicting pages of {space.name!r}"
                self._until_none(maintenance.evict_pages, end - first, nsid, (space.base + first,), work)

    def prefetch(self, nsid: int, first: int, end: int, *, once: bool = False) -> Prefetch:
        """Begin to read pages [first, end) into the cache, as many as the array's frames hold."""
        self.require_open()
        return self.bulk.prefetch(nsid, (first, min(end, first + self._spaces[nsid].pool.frames)), once=once)

    def pin(self, nsid: int, first: int, end: int) -> int:
        """Read pages [first, end) and pin them for the host, which has not pinned them; return how many are pinned."""
        if end - first > 1:
            self.bulk.prefetch(nsid, (first, end)).exception()  # in long commands; the others are read on demand
        with self.layout_lock(nsid):
            space = self._spaces[nsid]
            space.pool.schedule_residency_check()
            return self.run(maintenance.pin_pages, end - first, nsid, space.base + first, counts=True)

    def unpin(self, nsid: int, first: int, end: int) -> int:
        """Release the host's pin of each page in [first, end); return how many pages had one."""
        with self.layout_lock(nsid):
            base = self._spaces[nsid].base
            warps = -(-(end - first) // self._warp)
            return self.run(maintenance.unpin_pages, warps, nsid, base + first, base + end, counts=True)

    def _drop(self, nsid: int) -> None:
        """Free the frames of a closed array, with unwritten changes and remaining pins."""
        space = self._spaces[nsid]
        space.pool.schedule_residency_check(evicts=True)
        with contextlib.suppress(errors.KernelError, errors.DriveLostError):  # these pages have no user
            arguments = (space.base, space.base + space.pages)
            self._until_none(maintenance.drop_frames, self.frames, nsid, arguments, f"dropping pages of {space.name!r}")

    @contextlib.contextmanager
    def layout_lock(self, nsid: int | None = None) -> Iterator[None]:
        """Keep frames and table in place for the block, while another thread may open or close an array.

        With `nsid` first raise the error of an earlier launch of that array in a stream.
        """
        with self.lock:
            self.require_open()
            if nsid is not None:
                self.raise_pending_error(nsid)
            self._in_flight += 1
        try:
            yield
        finally:
            with self.lock:
                self._in_flight -= 1
                if self._in_flight == 0 and not self.closed:
                    self._check_residency()

    @contextlib.contextmanager
    def keep_io_threads_running(self) -> Iterator[None]:
        """Keep the I/O threads running for the block: its launches and prefetches then need not wake them."""
        with self.lock:
            self.require_open()
            self.controller.begin()
        try:
            yield
        finally:
            self.controller.end()

    @traced("settle")
    def _process_completions(self) -> None:
        """Publish prefetched pages whose data has arrived, and release the frames and ids of late completions."""
        self.run(maintenance.settle_queues, self.pairs.count, None)

    def _until_none(self, kernel: Any, threads: int, nsid: int, arguments: tuple[int, ...], work: str) -> None:
        """Run a kernel until it counts no remaining pages; give up after a bounded number of runs without progress."""
        left, fewest = 0, -1
        attempts = 0
        deadline = 0.0
        while attempts < 64:
            left = self.run(kernel, threads, nsid, *arguments, counts=True)
            if left == 0:
                return
            if fewest < 0 or left < fewest:  # restart the timeout, also after the first run, which may compile
                fewest, attempts, deadline = left, 0, clock.monotonic() + self.timeout
            if not self.pairs.in_use():
                attempts += 1
                continue
            # the remaining pages may include prefetched pages and pages of abandoned commands
            if clock.monotonic() > deadline:
                raise self._stall_error(work)
            self._process_completions()
            clock.sleep(1e-3)
        raise errors.KernelError(f"{work}: {left} pages are pinned or in use; unpin them first")

    def run(
        self,
        kernel: Any,
        warps: int,
        nsid: int | None,
        *arguments: int,
        counts: bool = False,
        stream: LaunchStream | None = None,
    ) -> int:
        """Run a kernel for an array, in a stream if one is given; return its count. Keep the errors of other launches.

        The kernel takes core, space, `arguments` and, with `counts`, the address of the word to count in.
        """
        if warps <= 0:
            return 0
        flag = LaunchFlag(self.device)
        with interruptible(lambda: None):  # Ctrl-C stops the launch only
            launch = self.begin(flag, nsid, stores=False, keep_errors=True)
            try:
                if counts:
                    launch.reset()
                    arguments = *arguments, launch.count_address
                arguments = (
                    self._core_address,
                    launch.space(0 if nsid is None else self._spaces[nsid].index),
                    *arguments,
                )
                services = self.controller.services()
                threads = warps * self._warp
                if stream is not None:
                    stream.launch(kernel, threads, *arguments, services=services)
                    stream.wait()
                else:
                    kernel[threads](*arguments, device=self.device, services=services, aborts=(self,), flag=flag)
                return launch.counted() if counts else 0
            finally:
                self.end(flag)

    def _drain(self, nsid: int | None = None, until: float | None = None) -> bool:
        """Wait until no command is in flight, or none of an array; return False if the medium does not answer in time.

        The limit is `until`, or the timeout. Commands refer to frames and to a medium, so call this before
        the frames move or the medium is detached.
        """
        pages = None
        if nsid is not None:
            space = self._spaces[nsid]
            pages = space.base, space.base + space.pages
        deadline = until
        while self._core is not None and self.pairs.in_use(pages):
            if self._loss() or (deadline is not None and clock.monotonic() > deadline):
                return False
            self._process_completions()
            deadline = deadline or clock.monotonic() + self.timeout  # after the first kernel, which may be compiled
            clock.sleep(1e-3)
        return True

    def _stall_error(self, work: str) -> Exception:
        return self._loss() or errors.StallError(
            f"{work}: {self.pairs.in_use()} commands got no answer for {self.timeout:g} s: the medium does not answer",
            seconds=self.timeout,
        )

    # -- loss: see `warpwell.queues.loss` ---------------------------------------------------------------------

    def _loss(self) -> Exception | None:
        """Return the error for a controller that is lost, or None."""
        loss = self.pairs.loss()
        failure = self.controller.failure()
        if failure is not None or loss is None:
            return failure
        names = ", ".join(repr(space.name) for space in self._spaces.values())
        return errors.DriveLostError(
            f"the controller of {names or 'this cache'} is lost: {loss}. Pages written since the last flush may be "
            "lost: call recover() on the array, or close it, check the drive, and open it again"
        )

    def _require_controller(self, nsid: int | None) -> None:
        """Raise if controller or medium is lost (lock held)."""
        if error := self._loss():
            raise error
        if nsid is not None and (failure := self.controller.medium(nsid).failure()) is not None:
            raise failure

    def require_no_suspects(self, *nsids: int) -> None:
        """Raise if pages of these arrays are suspect."""
        for nsid in nsids:
            if suspects := self._unflushed.suspects(nsid):
                raise errors.DriveLostError(
                    f"the drive of array {self._spaces[nsid].name!r} was lost: its pages {text_of(suspects)} of "
                    f"{self.page_size} bytes were written after the last flush(), had left the cache, and may be "
                    "lost. All other pages are intact. recover(accept_loss=True) returns the rows of these pages and "
                    "enables the array again: write these rows again"
                )

    def recover(self, nsid: int, *, accept_loss: bool = False) -> list[Range]:
        """Restart a lost controller; return the suspect pages of an array as ranges, and forget them if accepted.

        A controller that is not lost is not restarted; see `warpwell.queues.loss`. Pages whose read was aborted are
        read again on demand. Pages changed by kernels stay in the cache, and pages written since the last flush
        are written again. Suspect pages cannot be written again, because they were evicted.

        Raises
        ------
        DriveLostError
            The controller or medium does not restart, and is still lost.
        SharingError
            A launch is in flight, or a controller cannot be restarted.
        """
        self.require_open()
        self.bulk.stop()
        with self.lock, interruptible(lambda: None):
            self.require_open()
            if self._loss() is not None:
                self._restart()
            if (failure := self.controller.medium(nsid).failure()) is not None:
                raise failure
            suspects = self._unflushed.suspects(nsid)
            if accept_loss:
                self._unflushed.forget(nsid)
            return suspects

    def _restart(self) -> None:
        self._require_idle("recover the array")
        self.controller.silence()
        self.pairs.abort()
        for _ in range(self.pairs.ids):
            if self._core is None or not self.pairs.in_use():
                break
            self._settle_alone()
        self.pairs.rewind()
        if self._core is not None:
            self._unflushed.record_loss(self._spaces.values(), self._core, self._owners, self.frames)
        self.controller.restart()

    def _settle_alone(self) -> None:
        """Settle ids that have completed, without a controller (lock held)."""
        flag = LaunchFlag(self.device)
        launch = self.launches.take(flag)
        try:
            with interruptible(lambda: None):
                maintenance.settle_queues[self.pairs.count * self._warp](
                    self._core_address, launch.space(0), device=self.device, aborts=(self,), flag=flag
                )
        finally:
            self.launches.release(launch)

    # -- state ----------------------------------------------------------------------------------------------

    @property
    def _core_address(self) -> int:
        """Address of the core record."""
        return self._require_core().address

    def _require_core(self) -> Block:
        if self._core is None:
            raise errors.ClosedError("the cache is closed: open the array again")
        return self._core

    @property
    def stats(self) -> Statistics:
        """Return the statistics so far (host; after launches are done)."""
        self.require_open()
        n = self._stats.read(0, 8 * at.STATS_WORDS).view(np.int64)
        return Statistics(
            misses=int(n[at.N_MISSES]),
            evictions=int(n[at.N_EVICTIONS]),
            writebacks=int(n[at.N_WRITEBACKS]),
            read_commands=int(n[at.N_READ_COMMANDS]) + self.bulk.commands,
            write_commands=int(n[at.N_WRITE_COMMANDS]),
            bytes_read=(int(n[at.N_PAGES_READ]) + self.bulk.pages_read) * self.page_size,
            bytes_written=int(n[at.N_WRITEBACKS]) * self.page_size,
            prefetched=int(n[at.N_PREFETCHED]) + self.bulk.prefetched,
            prefetch_dropped=int(n[at.N_PREFETCH_DROPPED]) + self.bulk.skipped,
            retries=int(n[at.N_RETRIES]),
            hits=int(n[at.N_HITS]) if self.full else None,
            bytes_wanted=int(n[at.N_WANTED]) if self.full else None,
        )

    # -- life -----------------------------------------------------------------------------------------------

    def require_open(self) -> None:
        """Raise `ClosedError` if the cache is closed."""
        self.process.require("the cache")
        if self.closed:
            raise errors.ClosedError("the cache is closed: open the array again")

    def require_ended(self, action: str) -> None:
        """Raise if another thread's launch uses the cache; wait for launches in streams."""
        with self.lock:
            if self._in_flight > sum(launch.users for launch in self.launches.in_streams()):
                raise errors.SharingError(f"a launch uses the cache: wait for it, then {action}")

    def _require_idle(self, action: str) -> None:
        self.reap()
        if self._in_flight:
            raise errors.SharingError(f"{self._in_flight} launches use the cache: wait for them, then {action}")

    def close(self) -> None:
        """Flush, stop the controller and drop the memory (idempotent)."""
        if not self.closed and not self.process.forked:
            self.bulk.stop()
        with self.lock:
            if self.closed or self.process.forked:
                return
            self.require_ended("close it")
            try:
                # each wait of a launch in a stream is bounded by the timeout
                self.reap(2 * self.timeout)
                self.flush(keep_errors=True)
            finally:
                self.closed = True
                self.layout_epoch += 1
                self._finalizer.detach()
                self.bulk.close()
                self.controller.close()
                if self.pairs.outstanding() == 0:
                    self._core = None
            if self._pending:
                raise self._pending[0][1]

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def page_words(self, nsid: int, first: int = 0, end: int | None = None) -> NDArray[np.int64]:
        """Return the words of pages [first, end) of an array, by default of all: a view, and on a GPU a copy.

        They may change at any time. Use the view within `layout_lock`.
        """
        space = self._spaces[nsid]
        address, count = space.words["table"] + 8 * first, (space.pages if end is None else end) - first
        return self._read(address, count) if self.device == "cuda" else view_of(address, 8 * count, np.int64)


def _dropped(controller: QueueServer, process: OpeningProcess) -> None:
    # A finalizer takes no lock, and closing waits for threads. All arrays are closed, so no page is dirty.
    if not process.forked:
        closing.hand_over(controller.close)


def choose_page_size(page_size: int | str | None, device: str, cache_bytes: int | str) -> int:
    """Return the bytes of a page, from an integer, text such as "4KiB", or by default.

    On the CPU a page of 16 KiB takes hardly longer to read than one of 4 KiB, and a scan has a quarter of the misses
    (measured by the matrix benchmark); in a small cache more frames matter more. A GPU waits for many pages at once.

    Raises
    ------
    ArgumentError
        The value is not a power of two from 512 bytes to 1 MiB.
    """
    if page_size is not None:
        nbytes = checked_nbytes(page_size, "page_size", minimum=at.BLOCK, maximum=1 << 20)
        if nbytes & (nbytes - 1):
            raise errors.ArgumentError(f"page_size must be a power of two, got {page_size!r}: choose 4096, for example")
        return nbytes
    return 16384 if device == "cpu" and checked_nbytes(cache_bytes, "cache") >= 1024 * 16384 else 4096


def default_queues(device: str, pages: int | None = None) -> int:
    """Return the number of queue pairs of a cache for at most `pages` pages; groups of eight share a queue."""
    maximum = {"cuda": 32, "interp": 1}.get(device, 8)
    return maximum if pages is None else max(1, min(maximum, -(-pages // at.MERGE_MAX)))
