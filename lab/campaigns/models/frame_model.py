"""Frame scenario: one frame alternates between two pages while readers access one of them.

The mover calls the functions that evict, fill and publish one after another, without commands between them. So a
reader that sleeps wakes during its frame's next use far more often than in the cache scenario, and a run covers many
more interleavings of the few relevant accesses.
"""

from __future__ import annotations

from random import Random

import numpy as np

from warpwell.cache import word_address
from warpwell.cache.layout import C_OWNERS, HELD_FRAME
from warpwell.cache.transfer import fill, publish
from warpwell.cache.word import BUSY, evicted, with_state
from warpwell.queues import field
from warpwell.targets.primitives import DEVICE, compare_exchange, load_relaxed, store_relaxed

from .adversary import SHORT, Violation
from .cache_model import ITEMS, CacheModel, Focus, base_value


class FrameModel(CacheModel):
    """One run of the frame scenario; `seed` and `trace` as for `CacheModel`."""

    def __init__(self, seed: int, trace: int = 0, focus: Focus | None = None) -> None:
        super().__init__(seed, trace, Focus(frames=1, pages=2, readers=True, naps=SHORT))

    def _look(self, seed: int) -> None:
        random, page = Random(seed), self.pages[0]
        for _ in range(80):
            item = random.randrange(4)
            value = self.view[page * ITEMS + item]
            if value not in (0, base_value(page, item)):  # 0: not cached
                raise Violation(f"page {page}, item {item}: read {value:#x}, which is page {(value >> 40) - 1}'s")

    def _move(self, turns: int) -> None:
        core = self.cache._core_address
        for turn in range(turns):
            page, before = self.pages[turn & 1], self.pages[1 - turn & 1]
            if turn:
                word = word_address(core, before)
                old = load_relaxed(word, DEVICE)
                while (observed := compare_exchange(word, old, evicted(old), DEVICE)) != old:
                    old = observed
                store_relaxed(field(core, C_OWNERS), HELD_FRAME, DEVICE)
            word = word_address(core, page)
            old = load_relaxed(word, DEVICE)
            compare_exchange(word, old, with_state(old, BUSY), DEVICE)
            fill(core, 0, self.sources[turn & 1].ctypes.data, 1, 0)
            publish(core, page, 0, 0)

    def check(self) -> int:
        """Run the interleaving; return its steps. Raises `Violation`."""
        run, cache = self.run, self.cache
        try:
            self.sources = [np.array([base_value(p, k) for k in range(ITEMS)], np.int64) for p in self.pages]
            for source in self.sources:
                run.announce(source.ctypes.data, source.nbytes)
            run.flag.interrupt()  # a miss returns 0 and loads no page
            for reader in range(self.readers):
                run.spawn(self._look, self.random.getrandbits(32), name=f"reader-{reader}")
            run.spawn(self._move, 60, name="mover")
            cache.begin(self.flag)
            run.run()
            cache.end(self.flag)
        finally:
            self._discard()
        return run.steps
