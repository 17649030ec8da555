"""Upkeep: what the host asks of a cache beside launches: write back, bring in, evict, settle."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from .. import errors
from ..queues import QueuePairs
from ..storage.controller import Controller
from ..targets import Block
from ..targets.fault import LaunchFlag
from ..targets.uninterrupted import interruptible
from . import layout as at
from . import maintenance
from .launches import Launches
from .plan import Space

_SWEEPS = 8
"""Rounds of a prefetch without any page coming, after which no frame is to be had."""


class Upkeep:
    """Base of `Cache`: each method runs maintenance kernels until what is asked for is done, or cannot be."""

    device: str
    timeout: float
    frames: int
    pairs: QueuePairs
    controller: Controller
    _spaces: dict[int, Space]
    _lock: threading.RLock
    _in_flight: int
    _core: Block | None
    _stats: Block
    _queues: int
    _depth: int
    require_open: Callable[[], None]
    launches: Launches
    begin: Callable[..., None]
    end: Callable[[LaunchFlag], None]
    index_of: Callable[[int], int]
    pool_frames: Callable[[int], int]

    @property
    def core(self) -> int:
        """Address of the core record."""
        if self._core is None:
            raise errors.ClosedError("the cache is closed: open the array again")
        return self._core.address

    def flush(self, nsid: int | None = None) -> None:
        """Write dirty pages back (of one array, or all) and make them durable."""
        with self._lock:
            self.require_open()
            # looked at before the flush is a launch itself; none begins meanwhile, for the lock is held
            alone = self._in_flight == 0
            for space in [s for s in self._spaces.values() if s.writable and (nsid is None or s.nsid == nsid)]:
                self._until_none(
                    maintenance.flush_frames,
                    self.frames,
                    space.nsid,
                    lambda left, s=space: (s.base, s.base + s.pages, int(alone), left),
                    f"flushing {space.name!r}",
                )
                if not space.host:
                    self.controller.medium(space.nsid).sync()

    def evict(self, nsid: int, first: int, end: int) -> None:
        """Write back and evict pages [first, end) of an array; pinned pages are an error."""
        with self._held():
            space = self._spaces[nsid]
            what = f"evicting pages of {space.name!r}"
            self._until_none(maintenance.evict_pages, end - first, nsid, lambda left: (space.base + first, left), what)

    def prefetch(self, nsid: int, first: int, end: int) -> None:
        """Start to bring pages [first, end) in, as many as the array's frames hold.

        Commands are few: what exceeds them is asked for as earlier ones are done, and only the last are waited for by
        nobody. Pages that find no frame, because others are pinned, are dropped.
        """
        with self._held():
            space = self._spaces[nsid]
            end = min(end, first + self.pool_frames(nsid))
            some = end - first if space.host else max(8, self._queues * self._depth // 4)
            for start in range(first, end, some):
                n = min(some, end - start)
                page = space.base + start
                if self._prefetch(n, nsid, page):
                    dropped = page, self._stats.address + 8 * at.N_PREFETCH_DROPPED
                    self.run(maintenance.prefetch_pages, n, nsid, functools.partial(_rest, dropped))
            self.settle()

    def _prefetch(self, n: int, nsid: int, page: int) -> int:
        """Start to bring pages [page, page + n) in; return how many found no frame."""
        least, since = n + 1, time.monotonic()
        idle = 0
        while left := self.run(maintenance.prefetch_pages, n, nsid, lambda left: (page, left), counts=True):
            now = time.monotonic()
            if left < least:
                least, since, idle = left, now, 0
            idle += not self.pairs.in_use()  # then nothing that comes brings an id or a frame
            if idle > _SWEEPS or now - since > self.timeout:
                break
            self.settle()
        return left

    def hold(self, nsid: int, first: int, end: int) -> int:
        """Bring pages [first, end) in, wait, and hold them for the host, which has none yet; return how many it got."""
        with self._held():
            base = self._spaces[nsid].base
            return self.run(maintenance.hold_pages, end - first, nsid, lambda done: (base + first, done), counts=True)

    def unpin(self, nsid: int, first: int, end: int) -> int:
        """Give the host's pin of each page in [first, end) back; return how many had one."""
        with self._held():
            base = self._spaces[nsid].base
            width = 32 if self.device == "cuda" else 1
            warps = -(-(end - first) // width)
            given = lambda done: (base + first, base + end, done)  # noqa: E731
            return self.run(maintenance.unpin_pages, warps, nsid, given, counts=True)

    def _drop(self, nsid: int) -> None:
        """Take the frames of an array that is closed back, with what could not be written and pins that were left."""
        space = self._spaces[nsid]
        with contextlib.suppress(errors.KernelError):  # some other launch's: nobody asks for these pages any more
            self._until_none(
                maintenance.drop_frames,
                self.frames,
                nsid,
                lambda left: (space.base, space.base + space.pages, left),
                f"dropping pages of {space.name!r}",
            )

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Keep frames and table where they are: another thread may open or close an array meanwhile."""
        with self._lock:
            self.require_open()
            self._in_flight += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_flight -= 1

    def settle(self) -> None:
        """Publish prefetched pages whose data has come, and release what late completions held."""
        self.run(maintenance.settle_queues, self.pairs.count, None, functools.partial(_rest, ()))

    def _until_none(self, kernel: Any, threads: int, nsid: int, args: Any, what: str) -> None:
        """Run a kernel until it counts nothing left, a bounded number of times."""
        left = 0
        attempts = 0
        deadline = None
        while attempts < 64:
            left = self.run(kernel, threads, nsid, args, counts=True)
            if left == 0:
                return
            deadline = deadline or time.monotonic() + self.timeout  # after the first, which may compile
            if not self.pairs.in_use():
                attempts += 1
                continue
            # prefetched pages, and pages of commands that were given up, may be among them
            if time.monotonic() > deadline:
                raise self._silence(what)
            self.settle()
            time.sleep(1e-3)
        raise errors.PinError(f"{what}: {left} pages are pinned or in use; unpin them first")

    def run(
        self,
        kernel: Any,
        threads: int,
        nsid: int | None,
        args: Callable[[int], tuple[int, ...]],
        *,
        counts: bool = False,
    ) -> int:
        """Run a maintenance kernel: `threads` warps of work; return what it counted.

        `args` is given the address of the word to count in, and returns what the kernel takes after core and space.
        """
        if threads <= 0:
            return 0
        width = 32 if self.device == "cuda" else 1
        flag = LaunchFlag(self.device)
        with interruptible(lambda: None):  # the launch stops; what surrounds it is done whole
            self.begin(flag, nsid)
            try:
                launch = self.launches.take(flag)
                if counts:
                    launch.reset()
                space = launch.space(0 if nsid is None else self.index_of(nsid))
                kernel[threads * width](
                    self.core, space, *args(launch.count_address), device=self.device,
                    services=self.controller.services(), aborts=(self,), flag=flag,
                )  # fmt: skip
                return launch.counted() if counts else 0
            finally:
                self.end(flag)

    def _drain(self) -> bool:
        """Wait until no command is in flight; return False where the medium does not answer in time.

        Commands name frames: whatever lays the frames out anew comes after.
        """
        deadline = None
        while self._core is not None and self.pairs.in_use():
            if deadline is not None and time.monotonic() > deadline:
                return False
            self.settle()
            deadline = deadline or time.monotonic() + self.timeout  # after the first, which may compile
            time.sleep(1e-3)
        return True

    def _silence(self, what: str) -> errors.StallError:
        return errors.StallError(
            f"{what}: {self.pairs.in_use()} commands had no answer for {self.timeout:g} s: the medium does not answer",
            seconds=self.timeout,
        )


def _rest(words: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return what a kernel takes that does not count."""
    return words
