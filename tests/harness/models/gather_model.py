"""Gather scenario: the frame scenario whose readers copy rows as the kernel of `ww.gather` does."""

from __future__ import annotations

from random import Random

import numpy as np

from warpwell.array.gather.cached import take_row
from warpwell.cache.word import REF
from warpwell.targets import load_weak_as

from .adversary import Violation
from .cache_model import ITEMS, base_value
from .frame_model import FrameModel


class GatherModel(FrameModel):
    """One run of the gather scenario; `seed` and `trace` as for `CacheModel`."""

    def _look(self, seed: int) -> None:
        random, page = Random(seed), self.pages[0]
        row = np.zeros(8, np.int64)
        self.run.announce(row.ctypes.data, row.nbytes)
        before = [0] * 8
        for _ in range(60):
            first, items = random.randrange(4), random.choice((1, 2, 8))
            at = 8 * (page * ITEMS + first)
            took = take_row(self.cache.core, self.view.space, at, 8 * items, row.ctypes.data, REF, 0)
            got = [load_weak_as(row.ctypes.data + 8 * k, row.dtype) for k in range(8)]
            if took:
                before[:items] = [base_value(page, first + k) for k in range(items)]
            if got != before:  # a row that is not there changes nothing
                raise Violation(f"page {page}, item {first}: a row is {[hex(n) for n in got]}")
