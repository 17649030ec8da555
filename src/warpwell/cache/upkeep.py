"""Upkeep: what the host asks of a cache beside launches: write back, bring in, evict, settle."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .. import errors
from ..queues import QueuePairs
from ..storage.controller import Controller
from ..targets import Block
from . import layout as at
from . import maintenance
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
    _count: Block
    _stats: Block
    _queues: int
    _depth: int
    require_open: Callable[[], None]
    begin: Callable[[], None]
    end: Callable[[], None]
    constants: Callable[[int], dict[str, int]]
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
            for space in [s for s in self._spaces.values() if s.writable and (nsid is None or s.nsid == nsid)]:
                self._until_none(
                    maintenance.flush_frames,
                    self.frames,
                    lambda left, s=space: (
                        self.core, s.base, s.base + s.pages, int(self._in_flight == 0), left),
                    f"flushing {space.name!r}",
                )  # fmt: skip
                if not space.host:
                    self.controller.medium(space.nsid).sync()

    def evict(self, nsid: int, first: int, end: int) -> None:
        """Write back and evict pages [first, end) of an array; pinned pages are an error."""
        with self._held():
            constants = self.constants(nsid)
            self._until_none(
                maintenance.evict_pages,
                end - first,
                lambda left: (self.core, constants["space"], constants["base"] + first, left),
                f"evicting pages of {self._spaces[nsid].name!r}",
            )

    def prefetch(self, nsid: int, first: int, end: int) -> None:
        """Start to bring pages [first, end) in, as many as the array's frames hold.

        Commands are few: what exceeds them is asked for as earlier ones are done, and only the last are waited for by
        nobody. Pages that find no frame, because others are pinned, are dropped.
        """
        with self._held():
            constants = self.constants(nsid)
            end = min(end, first + self.pool_frames(nsid))
            some = end - first if self._spaces[nsid].host else max(8, self._queues * self._depth // 4)
            for start in range(first, end, some):
                n = min(some, end - start)
                page = constants["base"] + start
                if self._prefetch(n, constants["space"], page):
                    dropped = self._stats.address + 8 * at.N_PREFETCH_DROPPED
                    self.run(maintenance.prefetch_pages, n, self.core, constants["space"], page, dropped)
            self.settle()

    def _prefetch(self, n: int, space: int, page: int) -> int:
        """Start to bring pages [page, page + n) in; return how many found no frame."""
        least, since = n + 1, time.monotonic()
        idle = 0
        while left := self._counted(maintenance.prefetch_pages, n, lambda left: (self.core, space, page, left)):
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
            constants = self.constants(nsid)
            return self._counted(
                maintenance.hold_pages,
                end - first,
                lambda done: (self.core, constants["space"], constants["base"] + first, done),
            )

    def unpin(self, nsid: int, first: int, end: int) -> int:
        """Give the host's pin of each page in [first, end) back; return how many had one."""
        with self._held():
            constants = self.constants(nsid)
            width = 32 if self.device == "cuda" else 1
            return self._counted(
                maintenance.unpin_pages,
                -(-(end - first) // width),
                lambda done: (self.core, constants["space"], constants["base"] + first, constants["base"] + end, done),
            )

    def _drop(self, nsid: int) -> None:
        """Take the frames of an array that is closed back, with what could not be written and pins that were left."""
        constants, space = self.constants(nsid), self._spaces[nsid]
        with contextlib.suppress(errors.KernelError):  # some other launch's: nobody asks for these pages any more
            self._until_none(
                maintenance.drop_frames,
                self.frames,
                lambda left: (self.core, constants["space"], space.base, space.base + space.pages, left),
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
        self.run(maintenance.settle_queues, self.pairs.count, self.core)

    def _until_none(self, kernel: Any, threads: int, args: Any, what: str) -> None:
        """Run a kernel until it counts nothing left, a bounded number of times."""
        left = 0
        attempts = 0
        deadline = None
        while attempts < 64:
            left = self._counted(kernel, threads, args)
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

    def _counted(self, kernel: Any, threads: int, args: Any) -> int:
        """Run a kernel that counts in a word of device memory; return the count."""
        self._count.write(0, np.zeros(1, np.int64))
        self.run(kernel, threads, *args(self._count.address))
        return int(self._count.read(0, 8).view(np.int64)[0])

    def run(self, kernel: Any, threads: int, *args: int) -> None:
        """Run a maintenance kernel: `threads` warps of work."""
        if threads <= 0:
            return
        width = 32 if self.device == "cuda" else 1
        self.begin()
        try:
            launch = kernel[threads * width]
            launch(*args, device=self.device, services=self.controller.services(), aborts=(self,))
        finally:
            self.end()

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
