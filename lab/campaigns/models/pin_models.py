"""Resident scenario: each page has its own frame. Pin scenario: long pins of more pages than credits."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from random import Random

from warpwell.cache import layout as at

from .adversary import Adversary, Violation
from .cache_model import ITEMS, OWNED, CacheModel, Focus


class ResidentModel(CacheModel):
    """One run of the resident scenario; `seed` and `trace` as for `CacheModel`.

    In the second round the host has found that all pages are cached, so that kernels do not check page words.
    """

    def __init__(self, seed: int, trace: int = 0, focus: Focus | None = None) -> None:
        super().__init__(seed, trace, Focus(pages=8, readers=False, resident=True))
        self.rounds = 2

    def _worker(self, thread: int, seed: int) -> None:
        random = Random(seed)
        observed: dict[tuple[int, int], int] = defaultdict(int)
        for _ in range(random.randint(2, 8)):
            page = random.choice(self.pages)
            action = random.random()
            if action < 0.4:
                for _ in range(random.randint(1, 4)):
                    self._read(thread, page, random.choice((random.randrange(OWNED), OWNED + thread)), observed)
            elif action < 0.5:
                self._write(thread, page, observed)
            elif action < 0.75:
                self._hold(thread, page, observed)
            else:
                self._clean(page, True)


class PinModel(CacheModel):
    """One run of the pin scenario; `seed` and `trace` as for `CacheModel`. There are several words of credits."""

    def __init__(self, seed: int, trace: int = 0, focus: Focus | None = None) -> None:
        before, at.FRAMES_PER_CREDIT_WORD = at.FRAMES_PER_CREDIT_WORD, Random(seed).choice((1, 1, 2))
        try:
            super().__init__(seed, trace, Focus(frames=Random(~seed).randint(2, 4), readers=False))
        finally:
            at.FRAMES_PER_CREDIT_WORD = before

    def _interpreter(self, seed: int) -> Adversary:
        run = super()._interpreter(seed)
        self.long: set[int] = set()
        for frame in range(self.cache.frames):
            run.watched[self.owners + 8 * frame] = partial(self._owner_changed, frame)
        return run

    def _owner_changed(self, frame: int, owner: int) -> None:
        (self.long.add if owner > at.OWNER_PAGE else self.long.discard)(frame)
        if len(self.long) == self.frames:
            raise Violation(f"all {self.frames} frames are held for long")

    def _worker(self, thread: int, seed: int) -> None:
        random = Random(seed)
        observed: dict[tuple[int, int], int] = defaultdict(int)
        for _ in range(random.randint(3, 8)):
            pages = random.sample(self.pages, min(len(self.pages), random.choice((1, 2, 2))))
            held = [page for page in pages if self.view.pin(page * ITEMS)]
            for page in pages:
                if page in held:
                    self.held[self._word(page)] += 1
                if random.random() < 0.4:
                    self._write(thread, page, observed)
                self._read(thread, page, OWNED + thread, observed)
            for page in held:
                self.held[self._word(page)] -= 1
                if not self.view.unpin(page * ITEMS):
                    raise Violation(f"page {page} was held, and no kernel has a pin of it")

    def _word(self, page: int) -> int:
        return int(self.view.table) + 8 * page
