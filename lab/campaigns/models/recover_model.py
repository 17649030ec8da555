"""Recover scenario: a cache loses its controller while kernels write and a thread flushes.

The medium has a volatile cache. A Flush makes the content durable that the cache has when the Flush is sent. The loss
drops a random half of the remaining content. `Cache.recover` moves the cache to a second controller, and the model
flushes it. After that, an item that `recover` did not report must have its last version, and a reported item must have
the flushed version or a later one.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from random import Random

import numpy as np

from warpwell import errors
from warpwell.cache import queue_of
from warpwell.cache.frames import clean
from warpwell.cache.layout import N_WRITEBACKS, R_FAILED, S_LAUNCH
from warpwell.cache.transfer import serve
from warpwell.queues import field
from warpwell.queues.layout import LOST
from warpwell.queues.loss import lost
from warpwell.storage import HostThreads
from warpwell.targets import memory_for
from warpwell.targets.primitives import DEVICE, SYSTEM, backoff, fetch_add, load_relaxed, store_relaxed

from .adversary import Adversary, Violation
from .cache_model import ITEMS, OWNED, CacheModel, Focus, base_value


class RecoverModel(CacheModel):
    """One run of the scenario; `seed` and `trace` as for `CacheModel`."""

    def __init__(self, seed: int, trace: int = 0, focus: Focus | None = None) -> None:
        self._order = memory_for("interp").allocate(8)
        super().__init__(seed, trace, focus)
        self.sure: dict[tuple[int, int], int] = defaultdict(int)
        """Oldest version that an item may have, set when its store has returned."""
        self.floor: dict[tuple[int, int], int] = defaultdict(int)
        """Version that a flush has acknowledged."""
        self.durable = self._snapshot()
        self._wait = self.random.choice((5, 20, 50, 100, 200))
        self._stands = self.random.random() < 0.5

    def _snapshot(self) -> dict[int, bytes]:
        return {page: bytes(self.medium.block_of(page)) for page in self.pages}

    def _interpreter(self, seed: int) -> Adversary:
        run = super()._interpreter(seed)
        run.announce_blocks(self._order)
        return run

    # -- threads

    def _worker(self, thread: int, seed: int) -> None:
        random, item = Random(seed), OWNED + thread
        for _ in range(random.randint(6, 20)):
            page = random.choice(self.pages)
            version = self.started[page, item] = self.started[page, item] + 1
            self.view[page * ITEMS + item] = base_value(page, item) + version
            if self._failed():
                return  # the store may or may not have happened
            fetch_add(self._order.address, 1, SYSTEM)  # orders the store before later flushes
            self.sure[page, item] = version
            if random.random() < 0.2:
                self._clean(random.choice(self.pages), True)

    def _flusher(self) -> None:
        cache = self.cache
        written, stats = cache._unflushed, cache._stats.address
        written.count = lambda: load_relaxed(stats + 8 * N_WRITEBACKS, DEVICE)  # type: ignore[method-assign]
        with contextlib.suppress(errors.DriveLostError):
            for _ in range(self.random.randint(0, 3)):
                for attempt in range(self.random.randint(0, 10)):
                    backoff(attempt)
                stored = dict(self.sure)
                fetch_add(self._order.address, 1, SYSTEM)
                for page in self.pages:
                    self._write_back(page)
                with written.flushing(self.array._nsid):
                    self._send_flush()
                self.floor.update(stored)

    def _write_back(self, page: int) -> None:
        core, space, attempt = self.cache._core_address, self.view.space, 0
        while not clean(core, space, page, False, 1, 0, 0):
            self._require_controller()
            serve(core, queue_of(core, page), 1, 0, 0)
            backoff(attempt)
            attempt += 1

    def _send_flush(self) -> None:
        held = self._snapshot()
        for attempt in range(self.random.randint(0, 8)):
            backoff(attempt)  # other threads continue to write
        self._require_controller()
        self.durable = held

    def _failed(self) -> int:
        """Return whether the launch has failed. A relaxed load could miss a failure that R_KIND has already shown."""
        return fetch_add(field(self.view.space, S_LAUNCH) + 8 * R_FAILED, 0, DEVICE)

    def _require_controller(self) -> None:
        if lost(self.cache.pairs.records) or self._failed():
            raise errors.DriveLostError("the controller was lost")

    def _kill(self) -> None:
        for attempt in range(self._wait):
            backoff(min(attempt, 4))
        if self._stands:
            self.medium._pending_share = self.medium._lazy = 1.0  # the medium completes no more commands
        store_relaxed(self.cache.pairs.loss_address, LOST, SYSTEM)

    # -- the whole

    def check(self) -> int:
        """Run the interleaving, recover, flush, and compare. Raises `Violation` or what device code raised."""
        cache = self.cache
        try:
            for thread in range(self.threads):
                self.run.spawn(self._worker, thread, self.random.getrandbits(32), name=f"worker-{thread}")
            self.run.spawn(self._flusher, name="flusher")
            self.run.spawn(self._kill, name="killer")
            cache.begin(self.flag)
            self.view = self.array.kernel_struct(self.flag)
            self.run.run()
            with contextlib.suppress(errors.DriveLostError):
                cache.end(self.flag)
            del cache._unflushed.count  # type: ignore[method-assign]
            doubts = self._recover()
            self._flush()
            self._check_words(settled=True)
            self._check_items(doubts)
        finally:
            self._discard()
        return self.run.steps

    def _recover(self) -> set[int]:
        cache, nsid = self.cache, self.array._nsid
        old = cache.controller
        for page, content in self.durable.items():
            if self.random.random() < 0.5:
                self.medium.block_of(page)[:] = content
        self.medium.waiting.clear()
        self.medium._pending_share = self.medium._lazy = 0.5

        def restart() -> None:
            cache.controller = HostThreads().start(cache.pairs, device="interp", timeout=1.0)
            if cache.controller.attach(self.medium, cache.page_size) != nsid:
                raise Violation("the medium has another namespace id")

        old.silence, old.restart = lambda: None, restart  # type: ignore[method-assign]
        pages = cache.recover(nsid, accept_loss=True)
        old.close()
        if cache.pairs.in_use() or cache.pairs.loss():
            raise Violation(f"{cache.pairs.in_use()} ids are in use after recovery, {cache.pairs.loss()}")
        return {page for first, end in pages for page in range(first, end)}

    def _check_items(self, doubts: set[int]) -> None:
        for page in self.pages:
            items = np.frombuffer(bytes(self.medium.block_of(page)), np.int64)
            for item in range(ITEMS):
                key = page, item
                version = int(items[item]) - base_value(page, item)
                oldest = (self.floor if page in doubts else self.sure)[key]
                if not oldest <= version <= self.started[key]:
                    raise Violation(
                        f"page {page}{' (reported)' * (page in doubts)}, item {item}: version {version}, not "
                        f"{oldest} to {self.started[key]}"
                    )
