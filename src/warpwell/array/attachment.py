"""`Attachment`: an array's part of a cache, with its medium, until everything is written and given back."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from .. import errors
from ..cache import Cache
from ..storage.medium import Medium
from ..targets import Block, closing
from .header import Header
from .host_pins import HostPins
from .nothing import Nothing
from .resident import Resident


class Attachment:
    """What an `Array` and the arrays derived from it share, and what outlives them until their changes are written.

    Nothing here refers to the array: a finalizer hands this over to the closing thread, and the end of the program
    closes what is left.

    Parameters
    ----------
    medium : Medium
    header : Header
    cache : Cache
    owns_cache : bool
        Close the cache with the array.
    tier : str
    writable : bool
    name : str
    share : float or None
    on_close : callable
        Called last.

    Attributes
    ----------
    nsid : int
    block : Block or None
        The data, in the tiers that hold all of it in memory.
    pins : HostPins
        Pages that the host holds, and how often.
    closed : bool
    viewed : bool
        Views were given out by which kernels that nobody counts may write.
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
        share: float | None,
        on_close: Callable[[], None],
    ) -> None:
        self.cache = cache
        self.medium = medium
        self.name = name
        self.pins = HostPins()
        self.closed = False
        self.viewed = False
        self._owns_cache = owns_cache
        self._writable = writable
        self._on_close = on_close
        self._cached = tier in ("storage", "host-cached")
        self._turn = threading.RLock()  # of flush and close: one at a time; taken before the cache's lock
        self._ending = False
        self._closing = False
        self._launches = 0
        self._streams: list[Callable[[], bool]] = []
        self._begun = 0
        self._compared = 0
        self._resident = None if tier == "storage" else Resident(
            medium, cache.memory, tier=tier, page_size=cache.page_size, start=header.origin,
            end=header.origin + header.nbytes, writable=writable,
        )  # fmt: skip
        self.block: Block | None = self._resident.block if self._resident else None
        host = self.block.address if self.block else 0
        if self._cached:
            self.nsid = cache.attach(medium, name=name, share=share, host=host, writable=writable)
        else:
            self.nsid = cache.attach(Nothing(medium), name=name, host=host)
        closing.ready()
        if writable:
            closing.keep(self, f"array {name!r}")

    # -- launches -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def launch(self, writes: bool) -> Iterator[None]:
        """Count a launch, which the block begins, until `launch_ended`; refused where the array is being closed."""
        with self.cache.lock:  # so that no launch begins between the look of `close` and its end
            self.require_open()
            yield
            self._launches += 1
            self._begun += writes

    def launch_ended(self) -> None:
        """Count a launch no more."""
        with self.cache.lock:
            self._launches -= 1

    def launch_continues(self, done: Callable[[], bool]) -> None:
        """Count a launch until `done` says True."""
        with self.cache.lock:
            self._streams.append(done)

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
        """Write what was changed to storage and make it durable; see `Array.flush`."""
        if not self._writable:
            return
        with self._turn:
            with self.cache.lock:
                # what a launch writes while bytes are compared, or after, is found the next time
                settled = -1 if self._running() else self._begun
            stale = self.viewed or self._compared != self._begun
            self._compared = -1  # unless all of this succeeds
            try:
                if self._cached and not self.cache.closed:
                    self.cache.flush(self.nsid)
            finally:
                if self._resident is not None and stale:
                    self._resident.write_back()
            self._compared = settled

    def close(self) -> None:
        """Flush and give everything back (idempotent).

        Raises
        ------
        SharingError
            A launch uses the array; it stays open. (Launches in streams are waited for, up to twice the time-out.)
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
        """Take the errors of launches in streams, to raise them last: a flush that found one would write nothing."""
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
                    if self._resident is not None and self._writable and not written:
                        self._resident.write_back()
                finally:
                    self.closed = True
                    self.medium.close()
                    self._on_close()
        if left:
            raise left[0]

    def _end(self) -> None:
        """Let no launch begin any more, once none is there."""
        deadline = time.monotonic() + 2 * self.cache.timeout  # each wait of a launch is bounded by the time-out
        while True:
            with self.cache.lock:
                if self._owns_cache:
                    self.cache.require_ended("close the array")
                running = self._running()
                if not running:
                    self._ending = True
                    return
                if running > len(self._streams) or time.monotonic() > deadline:
                    raise errors.SharingError(
                        f"{running} launches use array {self.name!r}: wait for them, then close the array"
                    )
            time.sleep(1e-3)

    def _let_go(self) -> None:
        """Give the host's pins back, which would hold the others' frames where they are for good."""
        with self.pins.lock:
            for first, end in self.pins.clear() if not self.cache.closed else ():
                self.cache.unpin(self.nsid, first, end)

    def drop(self) -> None:
        """Close after the array was dropped; what cannot be written is told on stderr."""
        try:
            self.close()
        except Exception as error:
            if self._writable:
                closing.say(f"array {self.name!r}, which was dropped,", error)

    def finish(self) -> None:
        """Write at the end of the program. It stays open, for handlers of the user's that come later."""
        if self.forked or self.closed or not (self._begun or self.viewed):
            return
        left = self._left()
        self.flush()
        with self.cache.lock:
            if self._running():
                raise errors.SharingError("a launch in a daemon thread or stream goes on: wait for it before the end")
        if left:
            raise left[0]

    # -- state ----------------------------------------------------------------------------------------------

    @property
    def forked(self) -> bool:
        """Whether all of this is the parent's."""
        return self.cache.process.forked

    def require_open(self) -> None:
        """Raise where the array is closed, or was opened before a fork."""
        if self.closed or self._ending:
            raise errors.ClosedError(f"array {self.name!r} is closed: open it again")
        self.cache.process.require(f"array {self.name!r}")


def hand_over(part: Attachment) -> None:
    """Have the array of `part`, which was dropped, closed (a finalizer: it takes no lock)."""
    if not part.closed and not part.forked:
        closing.hand_over(part.drop)
