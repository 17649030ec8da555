"""Known-pages scenario: the host reads pages in two slots and publishes them, while kernels read, write and evict them.

One thread executes the steps that `warpwell.cache.prefetch` makes in kernels and on the host: look, read, publish. A
fence replaces the end of a kernel. The medium completes commands late and out of order, and sometimes fails.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from random import Random

from warpwell.cache import layout as at
from warpwell.cache.known_pages import LOADED, PRESENT, look, publish_known
from warpwell.cache.word import REF
from warpwell.queues import Q_IN_USE
from warpwell.storage import host_reads as reads
from warpwell.targets import memory_for
from warpwell.targets.primitives import DEVICE, SYSTEM, backoff, fence, load_relaxed, store_relaxed

from .adversary import Adversary, Violation
from .cache_model import OWNED, PAGE, CacheModel, Focus

SLOTS, ROWS = 2, 3
TRIES = 3000
SLACK = 64
"""Number of steps of the clock hand that a relaxed load may miss."""


class KnownModel(CacheModel):
    """One run of the known-pages scenario; `seed` and `trace` as for `CacheModel`."""

    def __init__(self, seed: int, trace: int = 0, focus: Focus | None = None) -> None:
        self.reads: reads.StagedReads | None = None
        self.limit = 1 << 62
        super().__init__(seed, trace, Focus(frames=Random(~seed).randint(1, 5), readers=False))

    def _interpreter(self, seed: int) -> Adversary:
        if self.reads is None:
            self.reads = reads.StagedReads(self.cache.controller, slots=SLOTS, rows=ROWS)
            self.staging = memory_for("interp").allocate_shared(SLOTS * ROWS * PAGE)
        run = super()._interpreter(seed)
        pairs = self.reads.pairs
        run.announce_blocks(pairs._device, pairs._shared, self.reads._block, self.staging)
        space = self.cache.space(self.array._nsid)
        self.core, self.record, self.pool = space.words["core"], space.words["record"], space.pool.address
        run.watched[self.pool + 8 * at.F_HAND] = partial(self._hand_moved, run)
        return run

    def _hand_moved(self, run: Adversary, hand: int) -> None:
        if run.thread.name == "worker-0" and hand > self.limit + SLACK:
            raise Violation(f"the hand of the clock is at {hand}, {hand - self.limit} beyond the bound of the wave")

    def _worker(self, thread: int, seed: int) -> None:
        random = Random(seed)
        if thread == 0:
            self._pump(random)
            return
        observed: dict[tuple[int, int], int] = defaultdict(int)
        for _ in range(random.randint(6, 20)):
            page = random.choice(self.pages)
            action = random.random()
            if action < 0.4:
                item = random.choice((random.randrange(OWNED), OWNED + random.randrange(6)))
                self._read(thread, page, item, observed)
            elif action < 0.7:
                self._write(thread, page, observed)
            else:
                self._clean(page, action < 0.95)

    # -- the host -------------------------------------------------------------------------------------

    def _pump(self, random: Random) -> None:
        waves = random.randint(3, 8)
        began: list[tuple[list[int], list[int], int]] = []
        for wave in range(waves + 1):
            if wave < waves:
                pages = sorted(random.sample(self.pages, min(len(self.pages), random.randint(1, ROWS))))
                hand = load_relaxed(self.pool + 8 * at.F_HAND, DEVICE)
                observed = [look(self.core, page) for page in pages]
                fence(SYSTEM)
                self._start(wave % SLOTS, pages)
                began.append((pages, observed, hand))
            if wave > 0:
                pages, observed, _ = began[wave - 1]
                first = began[max(wave - 2, 0)][2]
                self._wait((wave - 1) % SLOTS)
                fence(SYSTEM)
                self._publish((wave - 1) % SLOTS, pages, observed, first + 2 * self.frames)

    def _slot(self, slot: int) -> int:
        assert self.reads is not None
        return self.reads._block.address + 8 * reads.SLOT_WORDS * slot

    def _start(self, slot: int, pages: list[int]) -> None:
        record = self._slot(slot)
        first = load_relaxed(record + 8 * reads.S_FIRST, DEVICE)
        for k, page in enumerate(pages):
            row = first + 8 * reads.ROW_WORDS * k
            buffer = self.staging.address + (slot * ROWS + k) * PAGE
            for word, value in enumerate((page, 1, buffer, reads.UNANSWERED)):
                store_relaxed(row + 8 * word, value, DEVICE)
        for word, value in enumerate((len(pages), 0, len(pages), self.array._nsid)):
            store_relaxed(record + 8 * word, value, DEVICE)
        self._advance(slot)

    def _advance(self, slot: int) -> None:
        assert self.reads is not None
        pairs = self.reads.pairs
        reads.advance(pairs.records, pairs.count, self._slot(0), SLOTS, slot, 0)

    def _wait(self, slot: int) -> None:
        for attempt in range(TRIES):
            if load_relaxed(self._slot(slot) + 8 * reads.S_LEFT, DEVICE) == 0:
                return
            self._advance(slot)
            backoff(min(attempt, 8))
        raise Violation(f"the reads of slot {slot} do not end")

    def _publish(self, slot: int, pages: list[int], observed: list[int], limit: int) -> None:
        first = load_relaxed(self._slot(slot) + 8 * reads.S_FIRST, DEVICE)
        self.limit = limit
        for k, (page, word) in enumerate(zip(pages, observed, strict=True)):
            good = load_relaxed(first + 8 * (reads.ROW_WORDS * k + reads.W_STATUS), DEVICE) == 0
            if word != PRESENT and good:
                source = self.staging.address + (slot * ROWS + k) * PAGE
                result = publish_known(self.core, self.record, page, word, source, limit, REF, 1, 0, 0)
                self.was_loaded |= result == LOADED
        self.limit = 1 << 62

    was_loaded = False

    def check(self) -> int:
        """Run as `CacheModel.check`; no read of the host may be left at the end."""
        steps = super().check()
        assert self.reads is not None
        for k in range(self.reads.pairs.count):
            offset = 8 * Q_IN_USE + self.reads.pairs.record(k) - self.reads.pairs._device.address
            if self.reads.pairs._device.read(offset, 8).any():
                raise Violation("command ids of the host's reads are still in use at the end")
        return steps
